"""Goal: the contract with Ascend's operators from Python says what the C library says, and the layouts are what the public pages
write. Method: layouts against index formulas in NumPy that are written from the shapes alone; the documents' own examples."""

import pathlib

import numpy as np
import pytest

import conftest
import paged
from paged import ascend

RNG = np.random.default_rng(conftest.random_seed())
HEADER = (pathlib.Path(__file__).resolve().parents[2] / "include/paged/ascend.h").read_text(encoding="utf-8")
SIZES = (3, 32, 2, 64)  # blocks, block, heads, head_dim


def random_bytes(shape, dtype):
    """Every bit pattern, NaN among them."""
    return RNG.integers(0, 256, (*shape[:-1], shape[-1] * np.dtype(dtype).itemsize), np.uint8).view(dtype)


def bits(array):
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and (bits(a) == bits(b)).all()


def in_layout(tokens, layout):
    """[blocks, block, heads, d] in a layout, by transposing: what the axes of the public pages say, and nothing else."""
    n, size, heads, d = tokens.shape
    c0 = 32 // tokens.itemsize
    return {"bnbsh": tokens.reshape(n, size, heads * d), "bnnbsd": tokens.transpose(0, 2, 1, 3),
            "pa_nz": tokens.reshape(n, size, heads, d // c0, c0).transpose(0, 2, 3, 1, 4)}[layout]


# ---- layouts ----


@pytest.mark.parametrize("dtype", ["f2", "f4", "i1", "u2"])
@pytest.mark.parametrize("target", ["bnbsh", "bnnbsd", "pa_nz"])
@pytest.mark.parametrize("source", ["bnbsh", "bnnbsd", "pa_nz"])
def test_convert_is_a_transposition(source, target, dtype):
    tokens = random_bytes(SIZES, dtype)
    array = np.ascontiguousarray(in_layout(tokens, source))
    out = ascend.convert(array, source, target, n_kv_heads=2)
    assert same(out.view(dtype), np.ascontiguousarray(in_layout(tokens, target)))
    assert out.shape == ascend.shape(target, array.dtype, *SIZES)
    assert same(ascend.convert(out, target, source, n_kv_heads=2), array)


def test_vllm_ascends_cache_is_bnbsh():
    """vllm-ascend keeps K and V as [blocks, block, heads, head_dim]: the bytes of BnBsH."""
    cache = random_bytes((2, *SIZES), np.float16)
    nz = ascend.convert(cache[0], "bnbsh", "pa_nz")
    assert same(nz, np.ascontiguousarray(in_layout(cache[0], "pa_nz")))


@pytest.mark.parametrize("layout", ["bnbsh", "bnnbsd", "pa_nz"])
@pytest.mark.parametrize("kind", ["plain", "packed"])
@pytest.mark.parametrize("dtype", ["f16", "f32", "bf16"])
def test_caches_leave_and_come_back(dtype, kind, layout):
    kv = paged.KV.empty(3, 2, 32, 64, 96, dtype=dtype, layout=kind)
    k, v = (RNG.standard_normal((96, 2, d)).astype(np.float32) for d in (64, 96))
    kv.write(k, v, np.arange(96))
    got_k, got_v = ascend.export(kv, layout)
    for got, want in ((got_k, k), (got_v, v)):
        assert same(got, np.ascontiguousarray(in_layout(kv_tokens(want, got.dtype), layout)))
    other = paged.KV.empty(3, 2, 32, 64, 96, dtype=dtype, layout=kind)
    ascend.load(other, layout, got_k, got_v)
    assert all(same(a, b) for a, b in ((kv.k, other.k), (kv.v, other.v)))


def kv_tokens(rows, dtype):
    """[tokens, heads, d] f32 as [3, 32, heads, d] of a type, rounded by NumPy; bf16 by its own rule, nearest even."""
    rows = rows.reshape(3, 32, 2, -1)
    if dtype in (np.float16, np.float32):
        return rows.astype(dtype)
    u = rows.view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16).view(dtype)


@pytest.mark.parametrize("layout", ["bnbsh", "bnnbsd", "pa_nz"])
def test_int8_leaves_with_scales_that_give_the_scores(layout):
    """A card that has the int8 keys, their scales for each token and head, and queries rotated as kv.h says, gets q · k."""
    kv = paged.KV.empty(3, 2, 32, 64, dtype="i8")
    k, v = (RNG.standard_normal((96, 2, 64)).astype(np.float32) for _ in range(2))
    kv.write(k, v, np.arange(96))
    got_k, got_v, k_scale, v_scale = ascend.export(kv, layout)
    assert got_k.dtype == got_v.dtype == np.int8 and k_scale.shape == (3, 2, 32)
    k8, v8 = (ascend.convert(x, layout, "bnnbsd", 2).astype(np.float64) for x in (got_k, got_v))
    rotation = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(64)] for i in range(64)]) / 8
    heads_first = [x.reshape(3, 32, 2, 64).transpose(0, 2, 1, 3) for x in (k, v)]
    assert np.abs(v8 * v_scale[..., None] - heads_first[1]).max() <= v_scale.max() / 2 * 1.001
    q = RNG.standard_normal(64)
    scores, want = (k8 * k_scale[..., None]) @ (rotation @ q), heads_first[0] @ q
    assert np.abs(scores - want).max() < 0.05 * np.abs(want).max()
    other = paged.KV.empty(3, 2, 32, 64, dtype="i8")
    ascend.load(other, layout, got_k, got_v, k_scale, v_scale)
    assert same(kv.k, other.k) and same(kv.v, other.v)
    assert all(same(a, b) for a, b in zip(ascend.export(other, layout), (got_k, got_v, k_scale, v_scale)))


@pytest.mark.parametrize("call, words", [
    (lambda: ascend.shape("pa_nz", "f16", 1, 1, 1, 24), "24; PA_NZ takes multiples of 16"),
    (lambda: ascend.shape("pa_nz", "int8", 1, 1, 1, 16), "multiples of 32"),
    (lambda: ascend.shape("nz", "f16", 1, 1, 1, 16), "layout"),
    (lambda: ascend.convert(np.zeros((2, 4, 30), "f2"), "bnbsh", "pa_nz", 2), "head_dim is 15"),
    (lambda: ascend.convert(np.zeros((2, 4, 30), "f2"), "bnbsh", "bnnbsd"), "n_kv_heads"),
    (lambda: ascend.convert(np.zeros((2, 4, 30), "f2"), "bnbsh", "bnnbsd", 4), "n_kv_heads"),
    (lambda: ascend.convert(np.zeros((2, 4, 30), "f2"), "pa_nz", "bnnbsd"), "not in pa_nz"),
    (lambda: ascend.convert(np.zeros((2, 1, 1, 4, 8), "f2"), "pa_nz", "bnnbsd"), "PA_NZ takes"),
    (lambda: ascend.load(paged.KV.empty(1, 1, 16, 16), "bnbsh", *[np.zeros((1, 16, 16), "f4")] * 2), "k is"),
])
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(paged.InvalidArgument, match=words):
        call()


# ---- the contract ----


def test_the_header_and_the_package_agree():
    assert f'PAGED_ASCEND_FACTS "{ascend.FACTS}"' in HEADER
    ids = [rule.id for rule in ascend.rules()]
    assert len(ids) == len(set(ids)) > 80
    assert {p for rule in ascend.rules() for p in rule.paths} == set(ascend.PATHS)


def test_the_page_has_the_table_of_rules():
    """docs/ascend.md has each rule as one row, in our words and with its source."""
    page = (pathlib.Path(__file__).resolve().parents[2] / "docs/ascend.md").read_text(encoding="utf-8")
    rows = [line for line in page.split("## The rules")[1].splitlines() if line.startswith("| `")]
    assert len(rows) == len(ascend.rules())
    for row, rule in zip(rows, ascend.rules()):
        paths = "all" if len(rule.paths) == len(ascend.PATHS) else ", ".join(rule.paths)
        assert row == f"| `{rule.id}` | {paths}{', warns' if rule.warning else ''} | {rule.text} | {rule.source} |"


def test_a_call_with_all_defaults_is_accepted():
    for path in ascend.PATHS:
        assert ascend.check(path) == (True, [], ascend.check(path).call, None)


def test_seed_a_pages_of_16_kb():
    """Document A: 32 heads of 64, f16, pages of 16 KB, which are 64 tokens of a head; 8192 tokens at once."""
    shape = dict(n_heads=32, n_kv_heads=32, head_dim=64, block_size=64, max_k=8192)
    prefill = ascend.check("prefill", max_q=8192, **shape)
    assert not prefill.accepted and [f.rule.id for f in prefill.findings] == ["block_size.prefill"]
    assert prefill.nearest_call["block_size"] == 128 == ascend.BLOCK_SIZE
    decode = ascend.check("decode", **shape)
    assert decode.accepted and [f.rule.id for f in decode.findings] == ["block_size.advised"]
    # Its table has a row for each head.
    per_head = ascend.check("decode", table_rows=32, table_cols=256, **shape)
    assert not per_head.accepted and "table_rows" in [f.rule.id for f in per_head.findings]
    # 256 pages hold 16384 tokens, so 8192 need no 512.
    assert ascend.check("decode", table_cols=256, **shape).accepted and ascend.check("decode", table_cols=128, **shape).accepted
    assert not ascend.check("decode", table_cols=127, **shape).accepted


def test_seed_b_blocks_of_16():
    """Document B: LLaMA-13B, 40 heads of 128, blocks of 16, 4096 tokens, 100000 blocks; batch 8."""
    shape = dict(n_heads=40, n_kv_heads=40, head_dim=128, block_size=16, batch=8, max_k=4096, n_blocks=100000)
    assert ascend.check("decode", table_cols=256, **shape).accepted
    for path in ("prefill", "tnd"):
        verdict = ascend.check(path, **shape)
        assert not verdict.accepted and verdict.nearest_call["block_size"] == 128
    table = np.arange(8 * 256, dtype=np.int32).reshape(8, 256)
    assert ascend.check_arrays("decode", table=table, lens_k=[4096] * 8, **shape).findings == []
    table[7, 255] = 99999  # element offset 99999 × 16 × 5120 is beyond 2^32
    found = ascend.check_arrays("decode", table=table, lens_k=[4096] * 8, **shape)
    assert found.accepted and [f.rule.id for f in found.findings] == ["table.wide"]


@pytest.mark.parametrize("path, fields, rule", [
    ("prefill", dict(engine_block_size=16), "engine_block_size"),  # vLLM's blocks of 16 over the kernel's of 128
    ("decode", dict(kv_type="int8", q_type="bf16", n_heads=64, n_kv_heads=8, kv_layout="pa_nz", writer_block_size=16),
     "writer_block_size"),
    ("decode", dict(pool_block_bytes=1 << 20), "pool_block_bytes"),
    ("prefill", dict(sparse_mode=0, mask_rows=128, mask_cols=513), "mask.width"),
])
def test_what_users_met_is_explained(path, fields, rule):
    verdict = ascend.check(path, **fields)
    assert [f.rule.id for f in verdict.findings] == [rule]
    assert ascend.check(path, **{k: v for k, v in verdict.nearest_call.items() if k != "path"}).accepted


def test_arrays_are_looked_through():
    def told(path, **arguments):
        return [(f.rule.id, f.entry) for f in ascend.check_arrays(path, **arguments).findings]

    assert told("scatter", slots=[0, 5, 5], n_blocks=4) == [("slots.twice", 2)]
    assert told("scatter", slots=[-1, 512], n_blocks=4, n_tokens=2) == [("slots.negative", 0), ("slots.range", 1)]
    assert told("decode", table=[[0, -1], [7, 1]], lens_k=[129, 1], n_blocks=7) == [("table.absent", 1), ("table.range", 2)]
    assert told("tnd", lens_q=[2, 1], batch=2) == [("lens_q.order", 1)]
    with pytest.raises(paged.InvalidArgument, match="table_rows 3"):
        ascend.check_arrays("decode", table=[[0]], table_rows=3)
    with pytest.raises(paged.InvalidArgument, match="batch"):
        ascend.check_arrays("decode", lens_k=[1], batch=0)


@pytest.mark.parametrize("call, words", [
    (lambda: ascend.check("x"), "path is 'x'"), (lambda: ascend.check(heads=3), "heads is none of"),
    (lambda: ascend.check(kv_layout="nd"), "kv_layout is 'nd'"), (lambda: ascend.check(kv_type="fp8"), "fp8"),
    (lambda: ascend.check(batch=1 << 40), "32 bits")])
def test_words_that_there_are_not(call, words):
    with pytest.raises(paged.InvalidArgument, match=words):
        call()
