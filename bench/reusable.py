"""How much of each prompt an earlier one had already, by brute force: the oracle of the prefix reuse in `./x bench cache`.

The longest common beginning of a prompt with any earlier prompt, in tokens, at most its length - 1. Nothing here knows blocks,
hashes or eviction. Prompts are walked id by id; where they part, the tokens of the next piece are compared one by one with
those of every piece that came there before.
"""

import numpy

VOCAB = 50000


def mix(x):
    """The token rule of cache_replay.c, on 64-bit unsigned arrays."""
    with numpy.errstate(over="ignore"):
        x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        return x ^ (x >> numpy.uint64(31))


class Place:
    """What followed one beginning, in all prompts so far: by id, how many tokens of it and what came after it."""

    def __init__(self):
        self.pieces = {}    # id -> [longest piece that was there, Place behind it]
        self.by_token = {}  # first token -> ids


def reusable(trace):
    """One number for each request of a trace with ids, in order."""
    run, root, first_tokens, runs = trace.run, Place(), {}, {}

    def tokens(identity):
        if identity not in runs:
            at = numpy.uint64(identity * run) + numpy.arange(run, dtype=numpy.uint64)
            runs[identity] = (mix(at) % numpy.uint64(VOCAB)).astype(numpy.int32)
        return runs[identity]

    def common(mine, n_mine, other, n_other):
        n = min(n_mine, n_other)
        if mine == other:
            return n
        differ = numpy.nonzero(tokens(mine)[:n] != tokens(other)[:n])[0]
        return int(differ[0]) if len(differ) else n

    for _, n_prompt, _, ids in trace.requests:
        # By walking: whole pieces first, then the best of what came at the place where the walk ends.
        place, matched, walking = root, 0, True
        longest = 0
        for i, identity in enumerate(ids):
            n = min(run, n_prompt - i * run)
            if n <= 0:
                break
            if identity not in first_tokens:
                first_tokens[identity] = int(tokens(identity)[0])
            if walking:
                for other in place.by_token.get(first_tokens[identity], ()):
                    longest = max(longest, matched + common(identity, n, other, place.pieces[other][0]))
                walking = identity in place.pieces and place.pieces[identity][0] >= n == run
                matched += n
            piece = place.pieces.get(identity)
            if piece is None:
                piece = place.pieces[identity] = [0, Place()]
                place.by_token.setdefault(first_tokens[identity], []).append(identity)
            piece[0] = max(piece[0], n)
            place = piece[1]
        yield min(longest, n_prompt - 1)
