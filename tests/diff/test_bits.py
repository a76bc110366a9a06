"""Goal: the same bits whatever the chunks, threads, blocks and layout. Method: hash the log-probabilities.

The hash covers the raw bits of the log-probability of every prompt token, the most likely token at every
position, and the tokens generated after the prompt with their log-probabilities. tool_score also checks the
cache after every request, and that all blocks are free again.
"""
import gguf
import pytest

from models import tiny_prompt
from texts import TEXTS

BASE = {"--chunk": 512, "--threads": 1, "--block-size": 16}
VARIANTS = {
    "same-again": {},
    "chunk-1": {"--chunk": 1},
    "chunk-7": {"--chunk": 7},
    "chunk-16": {"--chunk": 16},
    "chunk-64": {"--chunk": 64},
    "threads-2": {"--threads": 2},
    "threads-2-chunk-7": {"--threads": 2, "--chunk": 7},
    "blocks-32": {"--block-size": 32},
    "blocks-64": {"--block-size": 64},
    "poison": {"--poison": None},
    "plain": {"--kv-plain": None},
    "plain-blocks-5-chunk-16": {"--kv-plain": None, "--block-size": 5, "--chunk": 16},
}
N_GENERATE = 8


def arguments(options):
    return [a for flag, value in options.items() for a in ((flag,) if value is None else (flag, value))]


def hashes(score, path, requests, options):
    args = ("--hash", "--generate", N_GENERATE, "--ctx", 1024, *arguments(BASE | options))
    answers = score(path, requests, *args)
    return [a["hash"] for a in answers]


@pytest.fixture(scope="module")
def base():
    """(path, KV type) -> hashes of the base configuration, computed once."""
    return {}


def check(score, base, path, requests, kv_type, variant):
    kv = {"--kv-type": kv_type}
    if (path, kv_type) not in base:
        base[path, kv_type] = hashes(score, path, requests, kv)
    assert hashes(score, path, requests, kv | VARIANTS[variant]) == base[path, kv_type]


TINY = [
    ("mha-16", None, "f16"),
    ("gqa-4-2-untied", gguf.GGMLQuantizationType.F16, "f32"),
    ("gqa-9-3-like-smollm2", gguf.GGMLQuantizationType.BF16, "bf16"),
    ("mqa-80-wide-head", gguf.GGMLQuantizationType.Q8_0, "f16"),
]
# What other families do in another way: two groups, old blocks that are gone, the order of the halves, positions.
FAMILIES = [
    ("gemma3", None, "f16"),
    ("phi3-window", gguf.GGMLQuantizationType.Q8_0, "f16"),
    ("falcon-7b", gguf.GGMLQuantizationType.Q4_0, "f16"),
    ("gpt2", gguf.GGMLQuantizationType.F16, "f32"),
    ("gemma2", gguf.GGMLQuantizationType.Q8_0, "bf16"),
    ("falcon-40b", None, "f16"),
    ("qwen2", gguf.GGMLQuantizationType.Q4_1, "f16"),
    ("qwen3", gguf.GGMLQuantizationType.Q5_0, "f16"),
    ("smollm3", gguf.GGMLQuantizationType.Q8_0, "f32"),
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name, weight_type, kv_type", TINY, ids=[t[0] for t in TINY])
def test_tiny(score, base, tiny, name, weight_type, kv_type, variant):
    _, _, path = tiny(name, weight_type)
    # 530 tokens: the last ones and all that is generated see more than one attention split (512).
    check(score, base, path, [tiny_prompt(530), tiny_prompt(3), tiny_prompt(64)], kv_type, variant)


@pytest.mark.parametrize("variant", ["chunk-1", "threads-2-chunk-7", "blocks-64", "plain-blocks-5-chunk-16"])
@pytest.mark.parametrize("name, weight_type, kv_type", FAMILIES, ids=[t[0] for t in FAMILIES])
def test_families(score, base, tiny, name, weight_type, kv_type, variant):
    _, _, path = tiny(name, weight_type)
    check(score, base, path, [tiny_prompt(530), tiny_prompt(64)], kv_type, variant)


@pytest.mark.parametrize("options", [{"--threads": 2}, {"--threads": 2, "--chunk": 100}, {"--chunk": 7, "--kv-plain": None}])
@pytest.mark.parametrize("name, weight_type, kv_type", TINY + FAMILIES, ids=[t[0] for t in TINY + FAMILIES])
def test_rows_without_logits(score, tiny, name, weight_type, kv_type, options):
    """The last layer leaves out what only the logits of a prompt would need; what follows has the same bits."""
    _, _, path = tiny(name, weight_type)
    requests = [tiny_prompt(530), tiny_prompt(64), tiny_prompt(5)]
    args = ("--kv-type", kv_type, "--generate", N_GENERATE, "--ctx", 1024, *arguments(BASE | {"--poison": None} | options))
    for scored, not_scored in zip(score(path, requests, *args), score(path, requests, "--unscored", *args), strict=True):
        assert not not_scored["logprobs"]
        for key in ("generated", "generated_logprobs"):
            assert len(scored[key]) == N_GENERATE and scored[key] == not_scored[key]


@pytest.fixture(scope="module")
def smollm2_requests(llamacpp, model):
    oracle = llamacpp(model, kv_type="f32", flash_attn=False)
    code, emoji = oracle.tokenize(TEXTS["code"]), oracle.tokenize(TEXTS["emoji"])
    return [(code + emoji)[:160], emoji[:33]]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kv_type", ["f16", "bf16"])
def test_smollm2(score, base, model, smollm2_requests, kv_type, variant):
    """Of the types that are the default somewhere."""
    check(score, base, model, smollm2_requests, kv_type, variant)


@pytest.mark.parametrize("kv_type", ["f16", "f32", "bf16", "int8"])
def test_decode_equals_prefill(score, model, smollm2_requests, kv_type):
    """Generated tokens, given as a prompt afterwards, get the log-probabilities they were generated with."""
    prompt = smollm2_requests[0]
    (first,) = score(model, [prompt], "--kv-type", kv_type, "--generate", 24, "--ctx", 1024)
    generated = first["generated"]
    assert len(generated) == 24
    (again,) = score(model, [prompt + generated], "--kv-type", kv_type, "--ctx", 1024)
    start = len(prompt) - 1
    assert again["top1"][start:] == generated
    assert again["logprobs"][start:] == first["generated_logprobs"]
    assert again["logprobs"][:start] == first["logprobs"]


def test_values_depend_on_the_cache_type(score, model, smollm2_requests):
    """A hash that never changes would prove nothing: another KV type must change it."""
    answers = {hashes(score, model, smollm2_requests, {"--kv-type": kv})[0] for kv in ("f16", "f32", "bf16")}
    assert len(answers) == 3
