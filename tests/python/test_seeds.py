"""The documents' interface does what their samples show: the samples run, the output equals dense attention in double within what
f16 can hold, pages are counted, and what their code would have overwritten is an error with its numbers."""

import gc
import pathlib
import re
import runpy
import sys

import numpy as np
import pytest
from dense import attention, f16_bound

import paged
import paged.seeds as torch

SAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples" / "seeds"
PAGE = 16 * 1024


@pytest.fixture(scope="module")
def inference():
    """The document's sample, run once: operator, q, k, v, table, cache, output."""
    sys.path.insert(0, str(SAMPLES))
    try:
        return runpy.run_path(str(SAMPLES / "paged_attention_inference.py"))["test_paged_attention"]()
    finally:
        sys.path.remove(str(SAMPLES))


def arrays(rng, shape, n_kv_heads=None, dtype=np.float16):
    batch, heads, n, dim = shape
    return [rng.standard_normal((batch, h, n, dim), np.float32).astype(dtype)
            for h in (heads, n_kv_heads or heads, n_kv_heads or heads)]


def memory(batch, heads, max_blocks, page_size=PAGE, dtype=np.float16):
    return (np.zeros((batch, heads, max_blocks), np.int32),
            np.zeros((batch, heads, max_blocks * page_size // np.dtype(dtype).itemsize), dtype))


def test_output_equals_dense_attention(inference):
    _, q, k, v, _, _, output = inference
    assert output.shape == (1, 32, 8192, 64) and output.dtype == np.float16
    # Every head, the borders of splits and pages, and rows in between.
    rows = sorted({0, 1, 63, 64, 511, 512, 4095, 4096, 8191, *np.random.default_rng(1).integers(0, 8192, 8)})
    expected = attention(q[0], k[0], v[0], rows=rows)
    got = output[0][:, rows].numpy().astype(np.float64)
    assert (np.abs(got - expected) <= f16_bound(expected)).all(), np.abs(got - expected).max()


def test_pages_are_counted(inference):
    op, _, _, _, table, cache, _ = inference
    assert op.used_blocks(table, cache, per_head=True) == 128
    assert op.used_blocks(table, cache) == 4096
    assert op.num_tokens(table, cache) == 8192
    assert op.usage_bytes(table, cache) == (32 * 256 * PAGE, 32 * 128 * PAGE)
    # What the document prints as "blocks" is a sum of ids.
    assert table.sum().item() == 32 * sum(range(128))
    for head in range(32):
        assert sorted(table[0, head, :128]) == list(range(128)) and not table[0, head, 128:].any()


def test_pages_lie_where_the_document_says(inference):
    """Page `id` begins at byte id × 16 KB of its head; keys in its first half, values in the second, 64 tokens each."""
    op, _, k, v, table, cache, _ = inference
    pages = cache.view(np.uint8).reshape(1, 32, 256 * PAGE)
    for head, page in ((0, 0), (7, 3), (31, 127)):
        start = int(table[0, head, page]) * PAGE
        assert op.table_of(table, cache, 0, head).block_offsets[page] == start
        keys, values = (np.frombuffer(pages[0, head, start + half:start + half + PAGE // 2].tobytes(), np.float16).reshape(64, 64)
                        for half in (0, PAGE // 2))
        assert np.array_equal(keys, k[0, head, page * 64:page * 64 + 64])
        assert np.array_equal(values, v[0, head, page * 64:page * 64 + 64])


def test_decode_after_prefill(inference):
    """One query appends, in the sample's own cache: the 8193rd token is the first of page 129."""
    op, _, k, v, table, cache, _ = inference
    rng = np.random.default_rng(2)
    keys, values = k[0].numpy(), v[0].numpy()
    for n in (8193, 8194):
        q1, k1, v1 = arrays(rng, (1, 32, 1, 64))
        out = op(q1, k1, v1, table, cache, 1)
        keys, values = np.concatenate((keys, k1[0]), 1), np.concatenate((values, v1[0]), 1)
        expected = attention(q1[0], keys, values)
        assert (np.abs(out[0] - expected) <= f16_bound(expected)).all()
        assert op.num_tokens(table, cache) == n and op.used_blocks(table, cache, per_head=True) == 129


@pytest.mark.parametrize("sample", sorted(p.name for p in SAMPLES.glob("*.py") if "inference" not in p.name))
def test_samples_run(sample, capsys):
    runpy.run_path(str(SAMPLES / sample), run_name="__main__")
    assert capsys.readouterr().out


def test_what_does_not_fit_is_an_error_with_both_numbers():
    op = paged.PagedAttention(1, 64)
    table, cache = memory(1, 1, 256)
    zeros = np.zeros((1, 1, 16385, 64), np.float16)
    with pytest.raises(paged.NoBlocks, match=r"16385 tokens need 257 pages .* 256 are allowed"):
        op(zeros, zeros, zeros, table, cache, 16385)
    assert not table.any() and op.num_tokens(table, cache) == 0
    # The same with half the tokens at twice the head size.
    wide = np.zeros((1, 1, 8193, 128), np.float16)
    with pytest.raises(paged.NoBlocks, match=r"8193 tokens need 257 pages of 32 tokens a head, 256 are allowed"):
        paged.PagedAttention(1, 128)(wide, wide, wide, *memory(1, 1, 256))
    # 16384 fit, and the next token does not.
    op(zeros[:, :, :16384], zeros[:, :, :16384], zeros[:, :, :16384], table, cache)
    before = table.copy(), cache.copy()
    with pytest.raises(paged.NoBlocks, match="16385 tokens need 257"):
        op(zeros[:, :, :1], zeros[:, :, :1], zeros[:, :, :1], table, cache)
    assert np.array_equal(before[0], table) and np.array_equal(before[1], cache) and op.num_tokens(table, cache) == 16384


def test_a_larger_limit_is_the_documents_solution():
    op = paged.PagedAttention(num_heads=2, head_dim=64, max_blocks_per_head=2, page_size=PAGE)
    x = arrays(np.random.default_rng(3), (1, 2, 129, 64))
    table, cache = memory(1, 2, 4)
    with pytest.raises(paged.NoBlocks, match="129 tokens need 3 pages .* 2 are allowed"):
        op(*x, table, cache)
    op.max_blocks_per_head = 4
    out = op(*x, table, cache)
    assert op.used_blocks(table, cache, per_head=True) == 3
    expected = attention(*(a[0] for a in x))
    assert (np.abs(out[0] - expected) <= f16_bound(expected)).all()


def test_pages_grow_and_shrink_between_calls():
    """The document's FAQ: the number of pages may change before each call. The same bits as without the change."""
    rng = np.random.default_rng(4)
    x, one = arrays(rng, (2, 4, 200, 64), 2), arrays(rng, (2, 4, 1, 64), 2)
    results = []
    for sizes in ((), (8,), (9, 4)):
        op = paged.PagedAttention(max_blocks_per_head=4)
        table, cache = memory(2, 2, 4)
        op(*x, table, cache)
        for size in sizes:
            table, cache = op.resize(table, cache, size)
            assert table.shape == (2, 2, size) and cache.shape == (2, 2, size * PAGE // 2) and op.num_tokens(table, cache) == 200
        results.append(op(*one, table, cache))
        with pytest.raises(paged.NoBlocks, match="201 tokens need 4 pages a head, 3 are wanted"):
            op.resize(table, cache, 3)
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


@pytest.mark.parametrize("dtype, cache_type", [("float16", np.float16), ("float32", np.float32), ("bfloat16", np.uint16)])
@pytest.mark.parametrize("gather", [False, True])
def test_gqa_batches_and_types(dtype, cache_type, gather):
    """Two batch entries, four query heads on two KV heads, a prefill and five appended tokens, against NumPy on what the cache
    can hold."""
    rng = np.random.default_rng(5)
    op = paged.PagedAttention(max_blocks_per_head=8, page_size=2048, kv_cache_dtype=dtype, gather=gather)
    table, cache = memory(2, 2, 8, 2048, cache_type)
    q, k, v = arrays(rng, (2, 4, 15, 32), 2, np.float32)

    def held(x):
        return x.astype(torch.bfloat16 if dtype == "bfloat16" else dtype).astype(np.float32)

    got = [op(q[:, :, :10], k[:, :, :10], v[:, :, :10], table, cache)]
    got += [op(q[:, :, i:i + 1], k[:, :, i:i + 1], v[:, :, i:i + 1], table, cache) for i in range(10, 15)]
    got = np.concatenate(got, 2)
    assert got.dtype == np.float32 and op.num_tokens(table, cache) == 15
    for b in range(2):
        expected = attention(q[b], held(k[b]), held(v[b]))
        # VDPBF16PS rounds queries and weights to bf16 as well, by 2^-9 of each (ops.h).
        assert np.abs(got[b] - expected).max() < (2e-2 if dtype == "bfloat16" else 2e-6)


def test_f32_inputs_to_an_f16_cache_are_converted():
    x = arrays(np.random.default_rng(6), (1, 2, 30, 64), dtype=np.float32)
    op = paged.PagedAttention()
    table, cache = memory(1, 2, 1)
    out = op(*x, table, cache, 30)
    assert out.dtype == np.float32
    expected = attention(x[0][0], x[1][0].astype(np.float16), x[2][0].astype(np.float16))
    assert np.abs(out[0] - expected).max() < 2e-6


def test_all_keys_without_a_mask():
    x = arrays(np.random.default_rng(7), (1, 2, 600, 64), dtype=np.float32)
    op = paged.PagedAttention(causal=False, kv_cache_dtype=np.float32, page_size=2 * PAGE)
    out = op(*x, *memory(1, 2, 10, 2 * PAGE, np.float32))
    assert np.abs(out[0] - attention(*(a[0] for a in x), causal=False)).max() < 2e-6


def test_append_and_reset_are_said_openly():
    rng = np.random.default_rng(8)
    x = arrays(rng, (1, 2, 40, 64))
    parts = [[a[:, :, i:i + 20] for a in x] for i in (0, 20)]
    op = paged.PagedAttention()
    table, cache = memory(1, 2, 2)
    whole = op(*x, table, cache)
    op(*parts[0], table, cache)  # more than one query begins anew
    assert op.num_tokens(table, cache) == 20
    second = op(*parts[1], table, cache, append=True)
    assert op.num_tokens(table, cache) == 40 and np.array_equal(second, whole[:, :, 20:])
    op.reset(table, cache)
    assert op.num_tokens(table, cache) == 0 and not table.any()
    one = [a[:, :, :1] for a in x]
    assert np.array_equal(op(*one, table, cache), whole[:, :, :1])
    op(*one, table, cache, append=False)
    assert op.num_tokens(table, cache) == 1


def test_entries_that_are_not_in_use_do_not_count():
    """A table that holds anything is empty as long as this operator has put nothing into it."""
    x = arrays(np.random.default_rng(9), (1, 2, 70, 64))
    op = paged.PagedAttention()
    clean, dirty = memory(1, 2, 4), memory(1, 2, 4)
    dirty[0][...] = 3
    assert np.array_equal(op(*x, *clean), op(*x, *dirty))
    assert np.array_equal(clean[0], dirty[0])


def test_pages_may_be_moved_by_the_caller():
    """The table is the truth: who swaps two pages and their entries gets the same bits."""
    rng = np.random.default_rng(10)
    x, one = arrays(rng, (1, 1, 200, 64)), arrays(rng, (1, 1, 1, 64))
    op = paged.PagedAttention()
    straight, moved = memory(1, 1, 8), memory(1, 1, 8)
    op(*x, *straight), op(*x, *moved)
    pages = moved[1].reshape(8, -1)
    pages[[0, 6]] = pages[[6, 0]]
    moved[0][0, 0, 0] = 6
    assert np.array_equal(op(*one, *straight), op(*one, *moved))
    assert moved[0][0, 0, :4].tolist() == [6, 1, 2, 3]


@pytest.mark.parametrize("entries, words", [([1, 1], "page 1 .* twice"), ([0, 0], "page 0 .* twice"),
                                            ([0, 8], r"ids 0 … 8, not 0 … 7"),
                                            ([-1, 1], "ids -1")])
def test_a_damaged_table_is_refused(entries, words):
    """Their sample takes a zero for a page and writes over it in silence."""
    x, one = arrays(np.random.default_rng(11), (1, 1, 100, 64)), np.zeros((1, 1, 1, 64), np.float16)
    op = paged.PagedAttention()
    table, cache = memory(1, 1, 8)
    op(*x, table, cache)
    table[0, 0, :2] = entries
    before = cache.copy()
    with pytest.raises(paged.InvalidArgument, match=words):
        op(one, one, one, table, cache)
    assert np.array_equal(before, cache) and op.num_tokens(table, cache) == 100


def test_the_arithmetic_of_their_kernel_overwrites():
    """The sample writes a page at (head + id) pages and reads at id: two heads share bytes there. Here every (head, page) has
    its own."""
    n_heads, n_pages = 4, 3
    theirs = {(head, page): head + page for head in range(n_heads) for page in range(n_pages)}
    assert len(set(theirs.values())) < len(theirs)
    op = paged.PagedAttention()
    table, cache = memory(1, n_heads, n_pages)
    x = arrays(np.random.default_rng(12), (1, n_heads, 64 * n_pages, 64))
    op(*x, table, cache)
    ours = {(head, page): head * n_pages * PAGE + op.table_of(table, cache, 0, head).block_offsets[page]
            for head in range(n_heads) for page in range(n_pages)}
    assert len(set(ours.values())) == n_heads * n_pages and max(ours.values()) == cache.nbytes - PAGE


def test_two_caches_have_two_states():
    x = arrays(np.random.default_rng(13), (1, 1, 10, 64))
    op = paged.PagedAttention()
    a, b = memory(1, 1, 2), memory(1, 1, 2)
    op(*x, *a)
    assert op.num_tokens(*a) == 10 and op.num_tokens(*b) == 0
    # Views of the same memory are the same cache.
    assert op.num_tokens(a[0][:], a[1].view(torch.Tensor)) == 10
    # Memory that is gone has no state, whoever gets its address.
    n = len(op._states)
    del a
    gc.collect()
    assert n == 1 and not op._states


def test_standard_attention_has_the_same_bits():
    rng = np.random.default_rng(14)
    x, one = arrays(rng, (2, 4, 300, 64), 2), arrays(rng, (2, 4, 1, 64), 2)
    op, standard = paged.PagedAttention(), paged.StandardAttention(4, 64, max_seq_len=301)
    pages, cache = memory(2, 2, 8), standard.new_cache(2, 2)
    assert np.array_equal(op(*x, *pages), standard(*x, cache))
    assert np.array_equal(op(*one, *pages), standard(*one, cache)) and standard.num_tokens(cache) == 301
    with pytest.raises(paged.TooLong, match="302 tokens, the cache is reserved for 301"):
        standard(*one, cache)
    standard.reset(cache)
    assert standard.num_tokens(cache) == 0


def test_threads_change_no_bit():
    x = arrays(np.random.default_rng(15), (1, 4, 700, 64))
    outs = [paged.PagedAttention(threads=n)(*x, *memory(1, 4, 11)) for n in (1, 2, 3)]
    assert np.array_equal(outs[0], outs[1]) and np.array_equal(outs[0], outs[2])


def test_warmup_takes_what_the_first_call_would():
    op = paged.PagedAttention(num_heads=4, head_dim=64)
    op.warmup(n_keys=2048)
    made = list(op._attentions.values())
    assert len(made) == 1 and not op._states
    op(*arrays(np.random.default_rng(16), (1, 4, 2048, 64)), *memory(1, 4, 32))
    assert list(op._attentions.values()) == made
    with pytest.raises(paged.InvalidArgument, match="not known before the first call"):
        paged.PagedAttention().warmup()


X = np.zeros((1, 2, 3, 64), np.float16)
T, C = memory(1, 2, 1)
MISTAKES = [
    (lambda: paged.PagedAttention(page_size=1001), "no two halves"),
    (lambda: paged.PagedAttention(2, 64, page_size=128), "holds 0 tokens of head_dim 64"),
    (lambda: paged.PagedAttention(2, 2, page_size=PAGE), "holds 2048 tokens"),
    (lambda: paged.PagedAttention(kv_cache_dtype="int8"), "scales"),
    (lambda: paged.PagedAttention(kv_cache_dtype="float8"), "float8"),
    (lambda: paged.PagedAttention(0, 64), "num_heads is 0"),
    (lambda: paged.PagedAttention(4, 64)(X, X, X, T, C), "num_heads 2, this operator 4"),
    (lambda: paged.PagedAttention(2, 32)(X, X, X, T, C), "head_dim 64, this operator 32"),
    (lambda: paged.PagedAttention()(X, X[:, :, :2], X, T, C), "value"),
    (lambda: paged.PagedAttention()(X[:, :1], X, X, T, C), "divides"),
    (lambda: paged.PagedAttention()(X[0], X, X, T, C), "query has shape"),
    (lambda: paged.PagedAttention()(X.astype(int), X, X, T, C), "int64"),
    (lambda: paged.PagedAttention()(X, X, X, T, C, 2), "3 new tokens, max_new_tokens is 2"),
    (lambda: paged.PagedAttention()(X, X, X, T[:, :1], C), "block_table has shape"),
    (lambda: paged.PagedAttention()(X, X, X, T.astype(np.int64), C), "int64, not int32"),
    (lambda: paged.PagedAttention()(X, X, X, T, C[:, :, 1:]), "kv_cache has shape"),
    (lambda: paged.PagedAttention()(X, X, X, T, C.astype(np.float32)), "kv_cache is float32"),
    (lambda: paged.PagedAttention()("q", X, X, T, C), "query"),
    (lambda: paged.BlockTable([3, -1]), "block -1"),
]


@pytest.mark.parametrize("mistake, words", MISTAKES, ids=[words for _, words in MISTAKES])
def test_mistakes_are_named(mistake, words):
    with pytest.raises(paged.InvalidArgument, match=re.escape(words)):
        mistake()
    assert not T.any() and not C.any()


def test_read_only_memory_is_refused():
    table, cache = memory(1, 2, 1)
    cache.flags.writeable = False
    with pytest.raises(paged.InvalidArgument, match="kv_cache is read-only"):
        paged.PagedAttention()(X, X, X, table, cache)


def test_block_table_of_the_document():
    """block 5 lies at 80 KB, 12 at 192 KB, 30 at 480 KB."""
    table = paged.BlockTable([5, 12, 30])
    assert table.num_blocks == 3
    assert table.block_offsets.tolist() == [80 * 1024, 192 * 1024, 480 * 1024]


def test_cache_config_of_the_document():
    config = {"block_size": 16, "max_blocks": 100000, "enable_paged": True}
    # LLaMA-2-13B: 40 layers, 40 heads of 128, f16: 819200 bytes a token.
    with pytest.raises(paged.NoBlocks,
                       match=r"max_blocks 100000 .* 1310720000000 bytes \(1310.72 GB\), the budget is 26000000000 bytes"):
        paged.Cache(40, 40, 128, cache_config=config, budget_bytes=26_000_000_000)
    cache = paged.Cache(1, 1, 64, cache_config=config)
    assert cache.stats()["n_blocks"] == 100000 and cache.stats()["block_size"] == 16
    with pytest.raises(paged.InvalidArgument, match="cache_config"):
        paged.Cache(1, 1, 64, cache_config={**config, "blocks": 3})
