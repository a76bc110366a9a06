"""Goal: the engine computes what llama.cpp computes. Method: both score the same tokens of the same texts.

With f32 weights rounding is all that differs. With quantised weights ggml rounds activations to 8 bits, which
blows last-bit differences up; there llama.cpp's two settings (f16 cache with flash attention, f32 cache
without) differ from each other as well, and the measure is that distance, taken in the same run.
"""
import math

import pytest

from texts import TEXTS

MIN_POSITIONS = 500


@pytest.fixture(scope="module")
def tokens(llamacpp, model):
    """name -> token ids, from llama.cpp's tokenizer."""
    oracle = llamacpp(model, kv_type="f32", flash_attn=False)
    ids = {name: oracle.tokenize(text) for name, text in TEXTS.items()}
    assert sum(len(t) - 1 for t in ids.values()) >= MIN_POSITIONS
    return ids


def oracle_scores(server, tokens):
    """[(log-probability, most likely token)] over all texts, one after the other."""
    return [pair for scores in server.score_all(tokens.values()) for pair in scores]


@pytest.fixture(scope="module")
def oracle_of_f32(llamacpp, model_f32, tokens):
    """The same for the f32 weights, which are read once for all texts; llama.cpp shares n_ctx out among them."""

    def scores(**options):
        return oracle_scores(llamacpp(model_f32, n_ctx=1024 * len(TEXTS), n_parallel=len(TEXTS), **options), tokens)

    return scores


def our_scores(score, model, tokens, *args):
    answers = score(model, tokens.values(), *args)
    return [pair for a in answers for pair in zip(a["logprobs"], a["top1"], strict=True)]


def distance(a, b):
    """(mean |Δ log-prob|, greatest, share of equal most likely tokens)"""
    delta = [abs(x[0] - y[0]) for x, y in zip(a, b, strict=True)]
    return sum(delta) / len(delta), max(delta), sum(x[1] == y[1] for x, y in zip(a, b)) / len(a)


def perplexity(scores):
    return math.exp(-sum(s[0] for s in scores) / len(scores))


@pytest.fixture(scope="module")
def oracle_f32(oracle_of_f32):
    return oracle_of_f32(kv_type="f32", flash_attn=False)


def test_f32_weights(score, model_f32, tokens, oracle_f32):
    ours = our_scores(score, model_f32, tokens, "--kv-type", "f32", "--ctx", 1024)
    mean, greatest, top1 = distance(ours, oracle_f32)
    print(f"f32: mean |Δ| {mean:.5f}, max {greatest:.4f}, top-1 {top1:.2%}, {len(ours)} positions")
    assert top1 >= 0.995, f"top-1 agreement {top1:.2%}"
    assert mean <= 0.003, f"mean |Δ log-prob| {mean:.5f}"


@pytest.fixture(scope="module")
def quantised(llamacpp, model, tokens):
    """llama.cpp's two settings on the Q4_1 file, and how far they are from each other."""
    f32 = oracle_scores(llamacpp(model, kv_type="f32", flash_attn=False), tokens)
    f16 = oracle_scores(llamacpp(model, kv_type="f16", flash_attn=True), tokens)
    return {"f32": f32, "f16 flash": f16}, distance(f32, f16)


@pytest.fixture(scope="module", params=["f32", "f16"])
def ours_q4_1(request, score, model, tokens):
    return request.param, our_scores(score, model, tokens, "--kv-type", request.param, "--ctx", 1024)


def test_q4_1(ours_q4_1, quantised):
    kv_type, ours = ours_q4_1
    settings, (spread, spread_max, spread_top1) = quantised
    mean, greatest, top1 = min(distance(ours, theirs) for theirs in settings.values())
    text = (
        f"q4_1, {kv_type} cache: mean |Δ| {mean:.4f}, max {greatest:.3f}, top-1 {top1:.2%}; "
        f"llama.cpp's own spread: mean |Δ| {spread:.4f}, max {spread_max:.3f}, top-1 {spread_top1:.2%}"
    )
    print(text)
    assert mean <= spread, text
    assert top1 >= min(spread_top1, 0.96), text


def test_q4_1_perplexity(ours_q4_1, quantised):
    kv_type, ours = ours_q4_1
    settings, _ = quantised
    theirs = perplexity(settings["f32" if kv_type == "f32" else "f16 flash"])
    text = f"q4_1, {kv_type} cache: perplexity {perplexity(ours):.3f}, llama.cpp {theirs:.3f}"
    print(text)
    assert abs(perplexity(ours) / theirs - 1.0) <= 0.01, text


def test_bf16_cache(oracle_of_f32, score, model_f32, tokens, oracle_f32):
    """How far bf16 moves the answers, with f32 weights. It rounds keys, values and queries by 2^-9 of them at most, f16 by 2^-12:
    so 8 times what llama.cpp's f16 cache with flash attention moves, and what f32 caches may differ by (test_f32_weights).
    The best two tokens change places where they are closer than both move; few positions have them within a nat."""
    ours = our_scores(score, model_f32, tokens, "--kv-type", "bf16", "--ctx", 1024)
    oracle_f16 = oracle_of_f32(kv_type="f16", flash_attn=True)
    mean, greatest, top1 = distance(ours, oracle_f32)
    f16_mean, f16_greatest, f16_top1 = distance(oracle_f16, oracle_f32)
    bound = 8 * f16_mean + 0.003
    ratio = perplexity(ours) / perplexity(oracle_f32)
    text = (
        f"bf16 cache: mean |Δ| {mean:.4f} of {bound:.4f}, max {greatest:.3f}, top-1 {top1:.2%}, perplexity × {ratio:.4f}; "
        f"llama.cpp's f16: mean |Δ| {f16_mean:.4f}, max {f16_greatest:.3f}, top-1 {f16_top1:.2%}"
    )
    print(text)
    assert mean <= bound and top1 >= 1 - 2 * bound, text
    assert abs(ratio - 1.0) <= 0.005, text


def test_int8_cache(oracle_of_f32, score, model_f32, tokens, oracle_f32):
    """How far 8 bits move the answers, with f32 weights, beside llama.cpp's q8_0 (a scale for 32 elements)."""
    f32, int8 = (our_scores(score, model_f32, tokens, "--kv-type", kv, "--ctx", 1024) for kv in ("f32", "int8"))
    oracle_q8_0 = oracle_of_f32(kv_type="q8_0", flash_attn=True)
    mean, greatest, top1 = distance(int8, f32)
    q8_0_mean, q8_0_greatest, q8_0_top1 = distance(oracle_q8_0, oracle_f32)
    ratio = perplexity(int8) / perplexity(f32)
    text = (
        f"int8 against f32 cache: mean |Δ| {mean:.4f}, max {greatest:.3f}, top-1 {top1:.2%}, perplexity × {ratio:.4f}; "
        f"llama.cpp's q8_0: mean |Δ| {q8_0_mean:.4f}, max {q8_0_greatest:.3f}, top-1 {q8_0_top1:.2%}"
    )
    print(text)
    assert mean <= 2 * q8_0_mean and top1 >= q8_0_top1 - 0.02, text
    assert abs(ratio - 1.0) <= 0.01, text
