"""Goal: real models predict a text as well as they do in llama.cpp. Method: the fixed text, and what llama.cpp made of it.

vectors/*.json are made by make_vectors.py, from llama.cpp with two settings. 8-bit activations blow last-bit differences up:
where two standard errors of the mean difference of these settings are more than half a percent, so much less than a percent
says nothing. With f32 weights (--long) there is no such noise.
"""
import json
import math
import os

import pytest

from make_vectors import CTX, HERE, TEXT


@pytest.fixture(params=["smollm2", "gemma3"])
def case(request):
    """(path of the model, what llama.cpp made of it)"""
    path = request.getfixturevalue({"smollm2": "model", "gemma3": "gemma"}[request.param])
    return path, json.loads((HERE / "vectors" / f"{request.param}.json").read_text())


def flat(pieces):
    return [x for piece in pieces for x in piece]


def perplexity(logprobs):
    return math.exp(-sum(logprobs) / len(logprobs))


def bound(vectors):
    f32, f16 = (flat(vectors["logprobs"][setting]) for setting in ("f32", "f16"))
    delta = [x - y for x, y in zip(f32, f16)]
    mean = sum(delta) / len(delta)
    error = math.sqrt(sum((d - mean) ** 2 for d in delta)) / len(delta)
    return 0.005 if 2 * error <= 0.005 else 0.01


@pytest.mark.parametrize("kv_type", ["f16", "bf16"] + (["f32"] if os.environ.get("PAGED_LONG") else []))
def test_perplexity(paged, case, kv_type):
    """The cache of llama.cpp has our type, but for bf16: there it is f32, and what bf16 rounds is in the same bound."""
    path, vectors = case
    done = paged("perplexity", TEXT, "--model", path, "--kv-type", kv_type, "--json", "-q")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    theirs = flat(vectors["logprobs"]["f32" if kv_type == "bf16" else kv_type])
    text = f"{kv_type}: perplexity {answer['perplexity']:.3f}, llama.cpp {perplexity(theirs):.3f}"
    print(text)
    assert answer["tokens"] == len(theirs) and answer["context"] == CTX
    assert abs(answer["perplexity"] / perplexity(theirs) - 1) <= bound(vectors), text


def test_token_by_token(score, case):
    """No farther from llama.cpp than its settings are from each other, by a fifth at most."""
    path, vectors = case
    answers = score(path, vectors["tokens"][:2], "--kv-type", "f32", "--ctx", 1024)
    ours = [a["logprobs"][CTX // 2 :] for a in answers]
    theirs = {s: vectors["logprobs"][s][:2] for s in ("f32", "f16")}

    def distance(a, b):
        return sum(abs(x - y) for x, y in zip(flat(a), flat(b), strict=True)) / len(flat(a))

    spread = distance(theirs["f32"], theirs["f16"])
    ours_to_theirs = min(distance(ours, t) for t in theirs.values())
    text = f"mean |Δ log-prob| {ours_to_theirs:.4f}, llama.cpp's own spread {spread:.4f}"
    print(text)
    assert ours_to_theirs <= 1.2 * spread, text


def test_greedy(paged, score, case):
    """llama.cpp's own continuations are what we would write as well, but for near ties."""
    path, vectors = case
    n_same = n = 0
    for prompt, theirs in vectors["greedy"].items():
        ids = json.loads(paged("tokenize", "--model", path, "--json", "--text", prompt).stdout)["tokens"]
        (answer,) = score(path, [ids + theirs], "--kv-type", "f32", "--ctx", 256)
        same = [a == b for a, b in zip(answer["top1"][len(ids) - 1 :], theirs, strict=True)]
        assert all(same[:3]), (prompt, same)
        n_same += sum(same)
        n += len(same)
    print(f"{n_same} of {n} tokens")
    assert n_same >= 0.9 * n, f"{n_same} of {n} tokens"


@pytest.mark.skipif(not os.environ.get("PAGED_LONG"), reason="a file of 1 GB and minutes of llama.cpp; --long")
def test_gemma_with_f32_weights(llamacpp, score, gemma, tmp_path):
    from models import dequantise

    path = str(tmp_path / "gemma-f32.gguf")
    dequantise(gemma, path)
    ids = llamacpp(path).tokenize(TEXT.read_text()[:800], add_special=True)
    theirs = llamacpp(path).score(ids)
    (answer,) = score(path, [ids], "--kv-type", "f32", "--ctx", 1024)
    delta = [abs(a - t[0]) for a, t in zip(answer["logprobs"], theirs, strict=True)]
    print(f"mean |Δ log-prob| {sum(delta) / len(delta):.5f}, max {max(delta):.4f} over {len(delta)} tokens")
    assert max(delta) <= 0.02 and sum(delta) / len(delta) <= 0.002


def test_short_texts(paged, model):
    """Less than a piece counts from its second token on; what has no second token is an error."""
    done = paged("perplexity", "-", "--model", model, "--json", input="The cat sat on the mat.")
    assert json.loads(done.stdout)["tokens"] == 6
    for text in ("", "a"):
        done = paged("perplexity", "-", "--model", model, input=text)
        assert done.returncode == 1 and "token" in done.stderr
    assert paged("perplexity", "--model", model).returncode == 2
