"""The two ways without paging, for `./x bench cache`: how many requests run at once, and where the memory goes.

All requests wait from the start and are taken in order; each runs for as many steps as it has output tokens. Both ways give a
sequence one run of memory for its whole life: `maximum` the longest length of the trace for everyone, `first_fit` exactly the
length it will reach (which nobody knows beforehand; so this is better than anything that could be built), at the lowest address
where it fits. Sizes in tokens.
"""

import dataclasses
import heapq


@dataclasses.dataclass
class Result:
    running: float   # mean number of requests at once, over steps
    stored: float    # tokens that were there, of the pool, mean over steps
    reserved: float  # taken but never used by then: internal waste, of the pool
    blocked: float   # free, but in pieces too small for the request that waits: external waste, of the pool


class Holes:
    """Free runs of memory, by address."""

    def __init__(self, size):
        self.runs = [(0, size)]

    def take(self, size):
        for i, (at, n) in enumerate(self.runs):
            if n >= size:
                self.runs[i:i + 1] = [(at + size, n - size)] if n > size else []
                return at
        return None

    def give(self, at, size):
        i = next((i for i, (other, _) in enumerate(self.runs) if other > at), len(self.runs))
        self.runs.insert(i, (at, size))
        for j in (i, i - 1):  # joins with the run behind it, then with the one before it
            if 0 <= j < len(self.runs) - 1 and sum(self.runs[j]) == self.runs[j + 1][0]:
                self.runs[j:j + 2] = [(self.runs[j][0], self.runs[j][1] + self.runs[j + 1][1])]

    def free(self):
        return sum(n for _, n in self.runs)


def run(requests, pool, size_of):
    """Event by event; between two events the number of running requests stays and each grows by a token a step."""
    holes, ends, now, i = Holes(pool), [], 0, 0
    live, steps, sums = {}, 0, dict.fromkeys(("running", "stored", "taken", "blocked"), 0.0)
    while i < len(requests) or ends:
        while i < len(requests):
            _, prompt, output, _ = requests[i]
            at = holes.take(size_of(prompt, output))
            if at is None:
                break
            live[i] = at
            heapq.heappush(ends, (now + max(1, output), i))
            i += 1
        if not ends:
            raise ValueError(f"a request of {size_of(prompt, output)} tokens does not fit a pool of {pool}")
        until = ends[0][0]
        span, middle = until - now, (now + until) / 2
        tokens = sum(requests[j][1] + min(middle - (end - max(1, requests[j][2])), requests[j][2]) for end, j in ends)
        sums["running"] += span * len(ends)
        sums["stored"] += span * tokens
        sums["taken"] += span * (pool - holes.free())
        sums["blocked"] += span * (holes.free() if i < len(requests) else 0)
        steps, now = steps + span, until
        while ends and ends[0][0] == now:
            _, j = heapq.heappop(ends)
            holes.give(live.pop(j), size_of(*requests[j][1:3]))
    mean = {key: value / steps for key, value in sums.items()}
    return Result(mean["running"], mean["stored"] / pool, (mean["taken"] - mean["stored"]) / pool,
                  mean["blocked"] / pool)


def maximum(trace, pool):
    longest = max(prompt + output for _, prompt, output, _ in trace.requests)
    return run(trace.requests, pool, lambda prompt, output: longest)


def first_fit(trace, pool):
    return run(trace.requests, pool, lambda prompt, output: prompt + output)
