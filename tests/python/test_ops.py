"""The operator from Python equals NumPy in double, for random shapes, types, tables and options; what it is given wrong it
refuses; and it computes without the GIL."""

import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from dense import attention

import paged

# The counts are small, so that all of this takes seconds; hypothesis prints what made it fail.
QUICK = settings(max_examples=200, deadline=None, print_blob=True, database=None, suppress_health_check=list(HealthCheck))

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def held(x, dtype):
    """What a cache of this type has of x."""
    return x.astype(DTYPES[dtype]).astype(np.float32)


def bound(dtype):
    """VDPBF16PS rounds queries and weights to bf16, by up to 2^-9 each (ops.h); all else are f32 sums."""
    return 3e-2 if dtype == "bf16" else 5e-6


@st.composite
def steps(draw):
    """A ragged step: lengths, heads, types, and blocks in any order."""
    layout = draw(st.sampled_from(["plain", "packed"]))
    shape = {"dtype": draw(st.sampled_from(sorted(DTYPES))), "layout": layout, "n_kv_heads": draw(st.integers(1, 3)),
             "group": draw(st.sampled_from([1, 2, 3])), "head_dim": 2 * draw(st.integers(1, 40)),
             "block_size": draw(st.sampled_from([16, 32] if layout == "packed" else [1, 5, 16]))}
    keys = draw(st.lists(st.integers(0, 90), min_size=1, max_size=4))
    queries = [draw(st.integers(0, n)) for n in keys]
    return shape, keys, queries, draw(st.integers(0, 2**32 - 1))


@QUICK
@given(steps(), st.integers(1, 3), st.sampled_from([0, 1, 7, 64]), st.booleans())
def test_attention_equals_numpy(step, threads, window, causal):
    shape, keys, queries, seed = step
    if not causal:
        window = 0
    rng = np.random.default_rng(seed)
    n_kv_heads, n_heads, dim, size = (shape["n_kv_heads"], shape["n_kv_heads"] * shape["group"], shape["head_dim"],
                                      shape["block_size"])
    needed = [-(-n // size) for n in keys]
    order = iter(rng.permutation(sum(needed) + 2))
    blocks = np.full((len(keys), max(needed) + 1), -1, np.int32)
    kv = paged.KV.empty(sum(needed) + 2, n_kv_heads, size, dim, dtype=shape["dtype"], layout=shape["layout"])
    parts = []
    for s, n in enumerate(keys):
        blocks[s, :needed[s]] = [next(order) for _ in range(needed[s])]
        k, v = (rng.standard_normal((n, n_kv_heads, dim), np.float32) for _ in range(2))
        positions = np.arange(n)
        assert kv.write(k, v, blocks[s, positions // size].astype(np.int64) * size + positions % size, threads) == 0
        parts.append((held(k, shape["dtype"]).transpose(1, 0, 2), held(v, shape["dtype"]).transpose(1, 0, 2)))
    op = paged.Attention(n_heads, n_kv_heads, dim, block_size=size, dtype=shape["dtype"], layout=shape["layout"], window=window,
                         causal=causal, max_q=max(1, sum(queries)), max_seqs=len(keys), threads=threads)
    starts = np.cumsum([0, *queries])
    op.plan(kv, paged.Tables(blocks, keys), starts)
    q = rng.standard_normal((starts[-1], n_heads, dim), np.float32)
    lse = np.empty((starts[-1], n_heads), np.float32)
    out = op.run(q, lse=lse)
    for s, (k, v) in enumerate(parts):
        if queries[s] == 0:
            continue
        mine = q[starts[s]:starts[s + 1]].transpose(1, 0, 2)
        expected = (attention(mine, k, v, causal=causal) if not window else
                    np.concatenate([windowed(mine, k, v, i, window) for i in range(queries[s])], 1))
        assert np.abs(out[starts[s]:starts[s + 1]].transpose(1, 0, 2) - expected).max() < bound(shape["dtype"])
    assert np.isfinite(lse).all()


def windowed(q, k, v, i, window):
    """The row of query i, which sees the last `window` keys up to its own."""
    last = k.shape[1] - q.shape[1] + i
    first = max(0, last - window + 1)
    return attention(q[:, i:i + 1], k[:, first:last + 1], v[:, first:last + 1], causal=False)


@QUICK
@given(st.sampled_from(["f16", "f32", "bf16", "i8"]), st.sampled_from(["plain", "packed"]), st.integers(1, 3),
       st.integers(0, 2**32 - 1))
def test_what_is_written_is_read_back(dtype, layout, n_kv_heads, seed):
    rng = np.random.default_rng(seed)
    if dtype == "i8":
        layout = "packed"
    kv = paged.KV.empty(5, n_kv_heads, 16, 8, 12, dtype, layout)
    n = int(rng.integers(1, 80))
    slots = rng.permutation(80)[:n]
    k, v = (rng.standard_normal((n, n_kv_heads, dim), np.float32) for dim in (8, 12))
    kv.write(k, v, slots, int(rng.integers(1, 4)))
    got_k, got_v = kv.read(slots)
    if dtype == "i8":  # kv.h: 127 steps to the largest of a row, keys in another basis
        assert np.abs(got_v - v).max() <= np.abs(v).max() / 127 * 0.51
        assert np.abs(got_k - k).max() <= np.abs(k).max() * 8**.5 / 127
    else:
        assert np.array_equal(got_k, held(k, dtype)) and np.array_equal(got_v, held(v, dtype))


@pytest.mark.parametrize("dtype", ["f16", "f32", "bf16"])
@pytest.mark.parametrize("layout", ["plain", "packed"])
@pytest.mark.parametrize("order", ["heads_first", "tokens_first"])
def test_dense_there_and_back(dtype, layout, order):
    rng = np.random.default_rng(0)
    kv = paged.KV.empty(4, 2, 16, 8, dtype=dtype, layout=layout)
    k, v = (rng.standard_normal((64, 2, 8), np.float32) for _ in range(2))
    kv.write(k, v, np.arange(64))
    dense = kv.export_dense(order, threads=2)
    shaped = k.reshape(4, 16, 2, 8) if order == "tokens_first" else k.reshape(4, 16, 2, 8).transpose(0, 2, 1, 3)
    assert np.array_equal(dense[0].astype(np.float32), held(shaped, dtype))
    other = paged.KV.empty(4, 2, 16, 8, dtype=dtype, layout="packed" if layout == "plain" else "plain")
    other.import_dense(*dense, order)
    for a, b in zip(other.read(np.arange(64)), kv.read(np.arange(64))):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("order", ["heads_first", "tokens_first"])
def test_int8_is_dense_with_its_scales(order):
    rng = np.random.default_rng(0)
    kv = paged.KV.empty(4, 2, 16, 8, 12, "i8")
    k, v = (rng.standard_normal((64, 2, dim), np.float32) for dim in (8, 12))
    kv.write(k, v, np.arange(64))
    parts = kv.export_dense(order, threads=2)
    tokens_first = [x if order == "tokens_first" else x.swapaxes(1, 2) for x in parts]
    k8, v8, k_scale, v_scale = (x.reshape(64, 2, *x.shape[3:]) for x in tokens_first)
    assert k8.dtype == v8.dtype == np.int8 and k_scale.dtype == v_scale.dtype == np.float32
    assert np.array_equal(v8 * v_scale[..., None], kv.read(np.arange(64))[1])
    rotation = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(8)] for i in range(8)]) / 8**.5  # kv.h
    assert np.abs(k8 * k_scale[..., None] - k @ rotation).max() <= k_scale.max() * 0.51
    other = paged.KV.empty(4, 2, 16, 8, 12, "i8")
    other.import_dense(*parts[:2], order, k_scale=parts[2], v_scale=parts[3])
    assert all(np.array_equal(a, b) for a, b in zip((other.k, other.v, *other.export_dense(order)), (kv.k, kv.v, *parts)))
    parts[3][1, 0, 1] = -1
    with pytest.raises(paged.InvalidArgument, match="v_scale of slot .* is -1, not in 0"):
        other.import_dense(*parts[:2], order, k_scale=parts[2], v_scale=parts[3])


@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_gather_is_the_same_sequence_in_one_piece(layout):
    rng = np.random.default_rng(1)
    kv = paged.KV.empty(9, 2, 16, 8, layout=layout)
    blocks = rng.permutation(9)[:5].astype(np.int32)
    n = 70
    slots = blocks[np.arange(n) // 16] * 16 + np.arange(n) % 16
    k, v = (rng.standard_normal((n, 2, 8), np.float32) for _ in range(2))
    kv.write(k, v, slots)
    tables = paged.Tables(blocks[None], [n])
    copy = kv.gather(tables, threads=2)
    assert copy.n_blocks == 5
    for a, b in zip(copy.read(np.arange(n)), kv.read(slots)):
        assert np.array_equal(a, b)
    if layout == "plain":
        assert np.array_equal(copy.k.swapaxes(0, 1).reshape(2, 80, 8)[:, :n], k.transpose(1, 0, 2).astype(np.float16))
    op, q = paged.Attention(4, 2, 8, layout=layout), rng.standard_normal((1, 4, 8), np.float32)
    op.plan(kv, tables)
    paged_out = op.run(q)
    op.plan(copy, paged.Tables(np.arange(5)[None], [n]))
    assert np.array_equal(paged_out, op.run(q))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_queries_and_outputs_of_sixteen_bits(dtype):
    rng = np.random.default_rng(2)
    kv = paged.KV.empty(2, 1, 16, 32, dtype="f32")
    k, v = (rng.standard_normal((20, 1, 32), np.float32).astype(dtype) for _ in range(2))
    kv.write(k, v, np.arange(20))
    op = paged.Attention(2, 1, 32, dtype="f32", max_q=20)
    op.plan(kv, paged.Tables([[0, 1]], [20]), [0, 20])
    q = rng.standard_normal((20, 2, 32), np.float32).astype(dtype)
    out = op.run(q)
    exact = op.run(q.astype(np.float32))
    assert out.dtype == dtype and np.array_equal(out.astype(np.float32), exact.astype(dtype).astype(np.float32))
    bits = np.empty((20, 2, 32), np.uint16)
    op.run(q, out=bits)
    assert dtype == np.float16 or np.array_equal(bits, out.view(np.uint16))


def test_sinks_shared_beginnings_and_merging():
    rng = np.random.default_rng(3)
    kv = paged.KV.empty(40, 1, 16, 16, dtype="f32")
    k, v = (rng.standard_normal((640, 1, 16), np.float32) for _ in range(2))
    kv.write(k, v, np.arange(640))
    q = rng.standard_normal((2, 1, 16), np.float32)
    # Two sequences behind the same 512 tokens: with and without a cascade, bit for bit.
    blocks = np.array([[*range(32), 32, 33], [*range(32), 34, 35]])
    alone, together = paged.Attention(1, 1, 16, dtype="f32", max_seqs=2, max_q=2), paged.Attention(
        1, 1, 16, dtype="f32", max_seqs=2, max_q=2, max_shared_q=2)
    alone.plan(kv, paged.Tables(blocks, [540, 533]))
    together.plan(kv, paged.Tables(blocks, [540, 533]), shared=[paged.Shared(0, 2, 512)])
    assert np.array_equal(alone.run(q), together.run(q))
    # Keys 0 … 299 and 300 … 539 by themselves, merged, against all of them.
    whole = np.empty((1, 1), np.float32), np.empty((1, 1), np.float32)
    op = paged.Attention(1, 1, 16, dtype="f32", causal=False)
    op.plan(kv, paged.Tables([range(19)], [304]))
    a = op.run(q[:1], lse=whole[0])
    op.plan(kv, paged.Tables([range(19, 34)], [236]))
    b = op.run(q[:1], lse=whole[1])
    paged.merge_states(a, whole[0], b, whole[1])
    expected = attention(q[:1].transpose(1, 0, 2), k[:540].transpose(1, 0, 2), v[:540].transpose(1, 0, 2), causal=False)
    assert np.abs(a - expected).max() < 2e-6
    # A sink is a score without a value.
    op.plan(kv, paged.Tables([[0]], [1]))
    score = (q[0, 0].astype(float) @ k[0, 0]) / 4
    out = op.run(q[:1], sinks=np.float32([score]))
    assert np.abs(out[0, 0] - v[0, 0] / 2).max() < 1e-6


def kv_and_op(**options):
    kv = paged.KV.empty(4, 1, 16, 8)
    return kv, paged.Attention(1, 1, 8, max_seqs=2, **options)


def run_with(tables, q=np.zeros((1, 1, 8), np.float32), **options):
    kv, op = kv_and_op()
    op.plan(kv, tables)
    return op.run(q, **options)


def import_int8(dtype="i8", **changes):
    parts = {name: np.zeros((1, 1, 16), np.float32) for name in ("k_scale", "v_scale")}
    values = np.zeros((1, 1, 16, 8), np.int8)
    paged.KV.empty(1, 1, 16, 8, dtype=dtype).import_dense(values, values, **{**parts, **changes})


ONE = np.zeros((1, 1, 8), np.float32)
MISTAKES = [
    (lambda: run_with(paged.Tables([[4]], [1])), "entry 0 of its table is 4"),
    (lambda: run_with(paged.Tables([[0, -1]], [17])), "entry 1 of its table is -1"),
    (lambda: run_with(paged.Tables([[0]], [17])), "17 keys do not fit 1 blocks"),
    (lambda: paged.Tables([[0]], [1, 1]), "blocks is of 1 sequences, seqlens_k of 2"),
    (lambda: run_with(paged.Tables([[[0]] * 2], [1])), "tables of 2 heads, the cache has 1"),
    (lambda: run_with(paged.Tables([[0]], [1], tail_tiles=[[0, 0]])), "2 tiles a sequence"),
    (lambda: run_with(paged.Tables([[0]], [1]), ONE[:, :, :4]), "q has shape (1, 1, 4)"),
    (lambda: run_with(paged.Tables([[0]], [1]), ONE, out=np.zeros((2, 1, 8), np.float32)), "out has shape"),
    (lambda: run_with(paged.Tables([[0]], [1]), ONE, out=np.broadcast_to(ONE, (1, 1, 8))), "read-only"),
    (lambda: run_with(paged.Tables([[0]], [1]), ONE, lse=np.zeros((1, 1))), "lse must be dense float32"),
    (lambda: run_with(paged.Tables([[0]], [1]), ONE, kv=paged.KV.empty(5, 1, 16, 8)), "n_blocks of kv is 5"),
    (lambda: kv_and_op()[1].run(ONE), "there is no plan"),
    (lambda: kv_and_op()[0].write(ONE, ONE, [64]), "slot 64 of token 0"),
    (lambda: kv_and_op()[0].write(ONE, ONE, [0], threads=0), "threads is 0, not in 1 … 1024"),
    (lambda: kv_and_op()[0].export_dense(threads=-1), "threads is -1"),
    (lambda: import_int8(k_scale=None), "k_scale"),
    (lambda: import_int8(v_scale=np.zeros((1, 16, 1), np.float32)), "v_scale has shape (1, 16, 1), not (1, 1, 16)"),
    (lambda: import_int8(k_scale=np.zeros((1, 1, 16), np.float16)), "k_scale is of float16, not of f32"),
    (lambda: import_int8("f16"), "scales are given, which a cache of f16 does not have"),
    (lambda: kv_and_op()[0].gather(paged.Tables([[0]], [1]), threads=5000), "threads is 5000"),
    (lambda: kv_and_op()[0].read([-1]), "slot -1 is negative"),
    (lambda: kv_and_op()[0].write(ONE, ONE, [0, 1]), "k has shape"),
    (lambda: kv_and_op()[0].gather(paged.Tables([[0]], [1]), 1), "sequence 1 of 1"),
    (lambda: kv_and_op()[0].gather(paged.Tables([[9]], [1])), "is 9"),
    (lambda: paged.Attention(3, 2, 8), "n_heads"),
    (lambda: paged.Attention(1, 1, 8, dtype="float64"), "float64"),
    (lambda: paged.Attention(1, 1, 8, layout="tiled"), "none of plain, packed"),
    (lambda: paged.Attention(2**40, 1, 8), "32 bits"),
    (lambda: paged.KV(np.zeros((2, 1, 16, 8), np.float16)[..., ::2], np.zeros((2, 1, 16, 4), np.float16)), "apart"),
    (lambda: paged.KV(np.zeros((1, 1, 16, 16), np.float16)[..., ::2], np.zeros((1, 1, 16, 8), np.float16)), "not dense"),
    (lambda: paged.KV.empty(1, 1, 12, 8), "no multiple of 16"),
    (lambda: paged.KV.empty(-1, 1, 16, 8), "shapes are"),
    (lambda: paged.KV(np.broadcast_to(np.zeros((1, 1, 16, 8), np.float16), (4, 1, 16, 8)), np.zeros((4, 1, 16, 8), np.float16)),
     "read-only"),
]


@pytest.mark.parametrize("mistake, words", MISTAKES, ids=[words for _, words in MISTAKES])
def test_mistakes_are_named(mistake, words):
    with pytest.raises(paged.InvalidArgument) as caught:
        mistake()
    assert words in str(caught.value)


def test_nothing_is_a_step_too():
    """No blocks, no sequences, no queries, no tokens."""
    none, op = paged.KV.empty(0, 1, 16, 8), paged.Attention(1, 1, 8)
    assert none.k.shape == (0, 1, 16, 8)
    op.plan(none, paged.Tables(np.zeros((0, 3), np.int32), []), [0])
    assert op.run(ONE[:0]).shape == (0, 1, 8)
    kv = kv_and_op()[0]
    op.plan(kv, paged.Tables([[0]], [0]), [0, 0])
    assert op.run(ONE[:0]).shape == (0, 1, 8)
    assert kv.write(ONE[:0], ONE[:0], []) == 0 and kv.read([])[0].shape == (0, 1, 8)
    assert kv.gather(paged.Tables([[0]], [0])).n_blocks == 0


def test_a_plan_is_a_snapshot():
    """Who changes the table after the plan changes nothing, least of all what memory is read."""
    kv, op = kv_and_op()
    kv.write(np.ones((1, 1, 8), np.float32), np.ones((1, 1, 8), np.float32), [0])
    blocks, lengths = np.array([[0]], np.int32), np.array([1], np.int32)
    op.plan(kv, paged.Tables(blocks, lengths))
    blocks[...], lengths[...] = 1 << 30, 1 << 30
    assert np.array_equal(op.run(ONE), np.ones((1, 1, 8)))


def big_step():
    """A step of some tenths of a second on one thread."""
    kv = paged.KV.empty(512, 8, 16, 64)
    op = paged.Attention(32, 8, 64, max_q=512, max_k=8192)
    op.plan(kv, paged.Tables([range(512)], [8192]), [0, 512])
    return op, np.zeros((512, 32, 64), np.float32)


def test_the_gil_is_released():
    """A second thread, which the interpreter would not switch to by itself, advances while the operator computes."""
    op, q = big_step()
    seen, stop = [], threading.Event()

    def count():
        while not stop.is_set():
            seen.append(time.monotonic())
            time.sleep(0.001)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    thread = threading.Thread(target=count)
    try:
        thread.start()
        began = time.monotonic()
        op.run(q)
        ended = time.monotonic()
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()
    inside = [t for t in seen if began < t < ended]
    assert len(inside) >= 5, (len(inside), ended - began)


def test_one_operator_from_many_threads():
    """Plans and runs of several threads take turns: each gets what its own plan says, or an error, never another's memory."""
    rng = np.random.default_rng(4)
    kv = paged.KV.empty(8, 2, 16, 32, dtype="f32")
    k, v = (rng.standard_normal((128, 2, 32), np.float32) for _ in range(2))
    kv.write(k, v, np.arange(128))
    op = paged.Attention(2, 2, 32, dtype="f32", threads=2)
    q = rng.standard_normal((1, 2, 32), np.float32)
    allowed = []
    for b in range(8):
        op.plan(kv, paged.Tables([[b]], [16]))
        allowed.append(op.run(q))
    wrong = []

    def work(seed):
        mine = np.random.default_rng(seed)
        for _ in range(60):
            op.plan(kv, paged.Tables([[int(mine.integers(8))]], [16]))
            out = op.run(q)
            if not any(np.array_equal(out, each) for each in allowed):
                wrong.append(out)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
