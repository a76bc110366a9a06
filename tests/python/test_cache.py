"""The cache from Python: a random story of sequences equals a model of it in plain lists, every invariant holds after each step,
and sequences that are dropped from any thread and at any moment give their blocks back."""

import gc
import os
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import paged
from conftest import random_seed

SHAPE = {"n_layers": 1, "n_kv_heads": 1, "head_dim": 8, "layout": "plain", "dtype": "f32"}


def value_of(tokens):
    """A key for each token that depends on all tokens before it, as a model's keys do."""
    sums = np.cumsum([(t + 1) * 31**(i % 7) for i, t in enumerate(tokens)], dtype=np.int64) % 1009
    return np.repeat(sums.astype(np.float32)[:, None, None], 8, 2)


def append(cache, seq, tokens):
    """Reserve, write, commit."""
    seq.reserve(len(tokens))
    before = list(seq.tokens)
    keys = value_of(before + list(tokens))[len(before):]
    cache.kv().write(keys, -keys, seq.slots())
    seq.commit(tokens)


def assert_holds(cache, seq, tokens):
    """The sequence has these tokens, and their keys are in its blocks."""
    assert seq.tokens.tolist() == list(tokens) and len(seq) == len(tokens)
    k, v = cache.kv().read(seq.slots(0, len(tokens)))
    assert np.array_equal(k, value_of(tokens)) and np.array_equal(v, -k)


class Story(RuleBasedStateMachine):
    """Sequences as lists of tokens. Reuse may give any common prefix, so that it is checked by the keys that it brings."""

    def __init__(self):
        super().__init__()
        self.live = []  # [Sequence, tokens]

    @initialize(n_blocks=st.integers(4, 24))
    def begin(self, n_blocks):
        self.capacity = 4 * n_blocks
        self.cache = paged.Cache(**SHAPE, block_size=4, max_blocks=n_blocks, max_seqs=6, poison=True)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), space=st.sampled_from([None, {"salt": "a"}]))
    def new(self, tokens, space):
        try:
            seq = self.cache.sequence()
        except paged.NoSequences:
            assert len(self.live) == 6
            return
        try:
            match = seq.match(tokens, space)
        except paged.TooLong:
            assert len(tokens) > self.capacity
            seq.close()
            return
        assert 0 <= match.n_matched < len(tokens)
        self.live.append([seq, tokens[:match.n_matched]])
        self.grow(len(self.live) - 1, tokens[match.n_matched:])

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 5), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def grow(self, which, tokens):
        each = self.live[which % len(self.live)]
        try:
            append(self.cache, each[0], tokens)
        except paged.NoBlocks:
            each[0].reserve(0)
        except paged.TooLong:
            assert len(each[1]) + len(tokens) > self.capacity
        else:
            each[1] = each[1] + tokens

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 5), n=st.integers(0, 30))
    def truncate(self, which, n):
        each = self.live[which % len(self.live)]
        n = min(n, len(each[1]))
        each[0].truncate(n)
        each[1] = each[1][:n]

    @precondition(lambda self: 0 < len(self.live) < 6)
    @rule(which=st.integers(0, 5))
    def fork(self, which):
        seq, tokens = self.live[which % len(self.live)]
        self.live.append([seq.fork(), tokens])

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 5), openly=st.booleans())
    def end(self, which, openly):
        seq, _ = self.live.pop(which % len(self.live))
        if openly:
            seq.close()

    @invariant()
    def all_hold(self):
        if hasattr(self, "cache"):
            self.cache.check()
            for seq, tokens in self.live:
                assert_holds(self.cache, seq, tokens)
            assert self.cache.stats()["n_tokens"] == sum(len(tokens) for _, tokens in self.live)


Story.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None, print_blob=True, database=None,
                                   derandomize=not os.environ.get("PAGED_LONG"), suppress_health_check=list(HealthCheck))
TestStory = Story.TestCase


def test_reuse_to_the_token():
    cache = paged.Cache(**SHAPE, block_size=4, max_blocks=16)
    first = cache.sequence()
    assert first.match(range(11)) == paged.Match(0, 0, "no-match")
    append(cache, first, range(11))
    first.close()
    second = cache.sequence()
    assert second.match([*range(10), 99]).n_matched == 10
    assert_holds(cache, second, range(10))
    # Another namespace shares nothing.
    assert cache.sequence().match(range(11), {"salt": "other"}) == paged.Match(0, 0, "namespace")
    assert cache.sequence().match(range(11)) == paged.Match(10, 2, "none")


def test_fork_copies_on_write():
    cache = paged.Cache(**SHAPE, block_size=4, max_blocks=8)
    parent = cache.sequence()
    append(cache, parent, range(6))
    child = parent.fork()
    assert child.blocks.tolist() == parent.blocks.tolist() and cache.block_refs(int(parent.blocks[0])) == 2
    append(cache, child, [7])
    append(cache, parent, [8])
    assert_holds(cache, child, [*range(6), 7]), assert_holds(cache, parent, [*range(6), 8])
    assert child.blocks[0] == parent.blocks[0] and child.blocks[1] != parent.blocks[1]
    assert cache.stats()["n_copies"] == 1


def test_shortage_says_its_numbers():
    cache = paged.Cache(**SHAPE, block_size=4, max_blocks=3, max_seqs=2)
    one, two = cache.sequence(), cache.sequence()
    one.reserve(8)
    assert one.reserved == 8 and len(one.slots()) == 8
    assert two.blocks_needed(5) == 2
    with pytest.raises(paged.NoBlocks, match="5 more tokens need 2 blocks of 4, 1 of 3 are free"):
        two.reserve(5)
    with pytest.raises(paged.TooLong, match="13 tokens more than 0"):
        one.reserve(13)
    with pytest.raises(paged.NoSequences, match="2 of 2"):
        cache.sequence()
    assert one.reserved == 8 and two.reserved == 0


def test_windows_and_groups():
    """A group with a window gives back what falls out of it; the other one keeps all."""
    cache = paged.Cache(groups=[paged.Group(1, 1, 8, layout="plain"), paged.Group(1, 1, 8, layout="plain", window=8)],
                        block_size=4, pool_bytes=1 << 20)
    seq = cache.sequence()
    for i in range(0, 40, 4):
        seq.reserve(4)
        seq.commit(range(i, i + 4))
    assert seq.first_k(0) == 0 and seq.first_k(1) == 32
    tables = cache.tables([seq], group=1)
    assert tables.first_k.tolist() == [32] and (tables.blocks[0, :8] == -1).all() and (tables.blocks[0, 8:10] >= 0).all()
    with pytest.raises(paged.InvalidArgument, match="positions 0 … 3 in group 1"):
        seq.slots(0, 4, group=1)


def test_packed_tails_reach_the_operator():
    """Blocks of 64 with 20 tokens: the tail is two tiles, and attention over it has the bits of attention over a block."""
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((20, 1, 8), np.float32) for _ in range(2))
    q, outs = rng.standard_normal((1, 1, 8), np.float32), []
    for tails in (False, True):
        cache = paged.Cache(1, 1, 8, block_size=64, max_blocks=4, packed_tails=tails)
        seq = cache.sequence()
        seq.reserve(20)
        cache.kv().write(k, v, seq.slots())
        seq.commit(range(20))
        op = paged.Attention(1, 1, 8, block_size=64)
        op.plan(cache.kv(), cache.tables([seq]))
        outs.append(op.run(q))
        assert cache.stats()["n_tail_tiles"] == (2 if tails else 0)
    assert np.array_equal(*outs)


def test_contiguous_is_the_baseline():
    cache = paged.Cache(**SHAPE, block_size=4, max_blocks=8, enable_paged=False, max_seq_tokens=16)
    seq, other = cache.sequence(), cache.sequence()
    append(cache, seq, range(3))
    assert cache.stats()["n_used"] == 4
    append(cache, other, range(3))
    with pytest.raises(paged.NoBlocks):
        cache.sequence().reserve(1)


def test_128k_tokens_where_a_reservation_does_not_fit():
    """A pool of 40 MiB holds one reservation for 128k tokens of one head (32 MiB), but a sequence of 128k tokens and three short
    ones when it is paged; attention over them equals NumPy in double."""
    n, rng = 128 * 1024, np.random.default_rng(1)
    reserved = paged.Cache(1, 1, 64, block_size=64, pool_bytes=40 << 20, enable_paged=False, max_seq_tokens=n)
    first, second = reserved.sequence(), reserved.sequence()
    first.reserve(1)
    with pytest.raises(paged.NoBlocks):
        second.reserve(1)
    cache = paged.Cache(1, 1, 64, block_size=64, pool_bytes=40 << 20)
    seqs, parts = [], []
    for length in (n, 32, 1024, 5000):
        seq = cache.sequence()
        seq.reserve(length)
        k, v = (rng.standard_normal((length, 1, 64), np.float32) for _ in range(2))
        cache.kv().write(k, v, seq.slots())
        seq.commit(np.arange(length))
        seqs.append(seq)
        parts.append((k[:, 0].astype(np.float16).astype(float), v[:, 0].astype(np.float16).astype(float)))
    q = rng.standard_normal((4, 1, 64), np.float32)
    op = paged.Attention(1, 1, 64, block_size=64, max_seqs=4, max_q=4, max_k=n)
    op.plan(cache.kv(), cache.tables(seqs))
    out = op.run(q)
    for got, row, (k, v) in zip(out[:, 0], q[:, 0], parts):
        weight = np.exp(k @ row / 8)
        assert np.abs(got - weight @ v / weight.sum()).max() < 2e-6


def test_promises_wait_for_each_other():
    cache = paged.Cache(**SHAPE, block_size=4, max_blocks=8)
    one, two = cache.sequence(), cache.sequence()
    assert not one.promise(range(9)) and two.promise(range(9)) and two.waits
    one.match(range(9))
    append(cache, one, range(9))
    assert not two.waits and two.match(range(9)).n_matched == 8


def test_elastic_pool():
    cache = paged.Cache(1, 4, 128, max_blocks=1024)
    seq = cache.sequence()
    seq.reserve(16 * 1024)
    backed = cache.stats()["backed_bytes"]
    seq.close()
    cache.set_max_bytes(backed // 4)
    assert cache.stats()["backed_bytes"] <= backed // 4
    cache.trim()
    assert cache.stats()["backed_bytes"] == 0
    # What nobody has taken can be read: it is zeros.
    assert not cache.kv().k[1023].any()


def test_a_handle_of_another_time_or_cache():
    cache, other = (paged.Cache(**SHAPE, max_blocks=4) for _ in range(2))
    seq = cache.sequence()
    with pytest.raises(paged.InvalidArgument, match="another cache"):
        other.tables([seq])
    seq.close()
    seq.close()
    for use in (seq.fork, lambda: seq.reserve(1), lambda: len(seq), lambda: seq.tokens, lambda: cache.tables([seq])):
        with pytest.raises(paged.Stale):
            use()


def test_sequences_outlive_their_cache():
    seq = paged.Cache(**SHAPE, max_blocks=4).sequence()
    gc.collect()
    seq.reserve(3)
    assert seq.reserved == 3


def test_views_outlive_their_cache():
    view = paged.Cache(**SHAPE, max_blocks=4).kv().k
    gc.collect()
    view[0] = 1
    assert view.sum() == view[0].size


def test_threads_and_garbage():
    """Four threads on one cache drop sequences in cycles, so that they die in whichever thread the collector runs, also inside a
    call of another one. In the end every block is back."""
    seed = random_seed()
    cache = paged.Cache(**SHAPE, block_size=4, max_blocks=8192, max_seqs=2000)
    failures = []

    def work(number):
        rng = random.Random(seed + number)
        try:
            for _ in range(250):
                seq = cache.sequence()
                cycle = [seq]
                cycle.append(cycle)
                tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
                n = seq.match(tokens).n_matched
                append(cache, seq, tokens[n:])
                if rng.random() < 0.3:
                    cycle.append(seq.fork())
                assert_holds(cache, seq, tokens)
                if rng.random() < 0.2:
                    seq.close()
                if rng.random() < 0.05:
                    gc.collect()
        except Exception as failure:
            failures.append(failure)

    before = gc.get_threshold()
    gc.set_threshold(20, 2, 2)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*before)
    assert not failures, failures
    gc.collect()
    cache.check()
    stats = cache.stats()
    assert stats["n_seqs"] == 0 and stats["n_used"] == 0 and stats["n_free"] + stats["n_cached"] == 8192


EXIT = """
import paged, threading
cache = paged.Cache(1, 1, 8, max_blocks=64)
kept = [cache.sequence() for _ in range(10)]
for seq in kept:
    seq.reserve(5)
cycle = [kept, cache]
cycle.append(cycle)
attention = paged.Attention(1, 1, 8)
def work():
    while True:
        seq = cache.sequence()
        seq.reserve(3)
threading.Thread(target=work, daemon=True).start()
paged.arrays.parallel(3, lambda ith, nth: ith)
"""


def test_the_interpreter_ends_in_peace():
    """With sequences alive, cycles, and a thread inside the library."""
    for _ in range(5):
        done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", EXIT], capture_output=True, text=True, timeout=60,
                              env={"PYTHONPATH": ":".join(sys.path)}, check=False)
        assert done.returncode == 0 and done.stderr == "", (done.returncode, done.stderr)


def text_of(cache):
    return bytes(cache.sequence.tokens.tolist()).decode()


def test_conversation_cache_without_a_model():
    """A token is a byte: turns own their bytes, the oldest go beyond the limit, blocks of dropped turns are free again."""
    cache = paged.ConversationCache(max_history_len=100)
    for i in range(4):
        assert cache.add_turn(f"question {i}", f"answer {i}") == 0
    assert text_of(cache) == "".join(f"question {i}\0answer {i}\0" for i in range(4)) and cache.n_tokens == 80
    assert [(turn.start, turn.end) for turn in cache.turns] == [(0, 20), (20, 40), (40, 60), (60, 80)]
    assert cache.block_table[1] == cache.sequence.blocks[1:3].tolist() and len(cache.used_blocks) == 5
    assert cache.add_turn("x" * 20, "y" * 18) == 1 and cache.n_tokens == 100
    assert cache.clear_old_turns(keep_last_n=1) == 40
    assert text_of(cache) == "x" * 20 + "\0" + "y" * 18 + "\0" and len(cache.used_blocks) == 3
    assert cache.clear_old_turns(keep_last_n=5) == 0 and cache.clear_old_turns(keep_last_n=0) == 0
    assert cache.n_tokens == 0 and not cache.used_blocks and cache.turns == []
    cache.cache.check()


def test_a_turn_that_does_not_fit_changes_nothing():
    pool = paged.Cache(1, 1, 2, layout="plain", max_blocks=4)
    other = pool.sequence()
    other.reserve(32)
    cache = paged.ConversationCache(cache=pool, system="be brief")
    cache.add_turn("a", "b")
    before = text_of(cache), cache.turns
    with pytest.raises(paged.NoBlocks):
        cache.add_turn("x" * 40, "y")
    with pytest.raises(paged.InvalidArgument, match="needs a model"):
        cache.reply("x")
    with pytest.raises(paged.InvalidArgument, match="keep_last_n is -1"):
        cache.clear_old_turns(-1)
    assert (text_of(cache), cache.turns) == before
    other.close()
    cache.add_turn("x" * 30, "y")
    assert text_of(cache) == "be brief\0a\0b\0" + "x" * 30 + "\0y\0"
    with pytest.raises(paged.InvalidArgument):
        paged.ConversationCache(0)
