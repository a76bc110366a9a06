"""Goal: every shape of every family is computed right. Method: random models against NumPy in double.

The reference is itself held against llama.cpp on the same files, so nothing is proven by its author alone.
"""
import numpy as np
import pytest

import reference
from models import SHAPES, WINDOWED, tiny_prompt

BOUND = 1e-4
# llama.cpp takes GELU from a table of f16, and the tanh form of it for Falcon, whose authors use the exact one.
LLAMACPP_BOUND = {"gelu": 2e-3, "gelu_erf": 5e-3}
NAMES = [shape.name for shape in SHAPES]
ALL = NAMES + [shape.name for shape in WINDOWED]
LONG = ("mha-16", "gqa-9-3-like-smollm2")  # these cross the border of an attention split (512 tokens)


@pytest.fixture(scope="module")
def expected(tiny):
    """expected(name) -> (path, ids, log-probabilities [n - 1, n_vocab]), computed once."""
    made = {}

    def get(name):
        if name not in made:
            shape, weights, path = tiny(name)
            ids = tiny_prompt(600 if name in LONG else 150)
            made[name] = path, ids, reference.log_probs(shape, weights, ids)[:-1]
        return made[name]

    return get


def compare(got, top1, log_probs, ids, bound=BOUND):
    """got [n - 1] log-probabilities, top1 [n - 1]; log_probs [n - 1, n_vocab]."""
    rows = np.arange(len(ids) - 1)
    delta = np.abs(np.array(got) - log_probs[rows, ids[1:]])
    assert delta.max() <= bound, f"position {delta.argmax()}: off by {delta.max():.2e}"
    # Where two tokens are as good as equal either may come first.
    behind = log_probs.max(axis=1) - log_probs[rows, top1]
    assert behind.max() <= bound, f"position {behind.argmax()}: not the most likely token"
    assert log_probs.std() > 0.5, "the log-probabilities hardly differ: this would prove nothing"


@pytest.mark.parametrize("name", NAMES)
def test_reference_against_llamacpp(llamacpp, tiny, expected, name):
    path, ids, log_probs = expected(name)
    shape = tiny(name)[0]
    scores = llamacpp(path, n_ctx=1024).score(ids)
    compare([s[0] for s in scores], [s[1] for s in scores], log_probs, ids, LLAMACPP_BOUND.get(shape.act, BOUND))


@pytest.mark.parametrize("layout", ["packed", "plain"])
@pytest.mark.parametrize("name", ALL)
def test_engine_against_reference(score, expected, name, layout):
    path, ids, log_probs = expected(name)
    plain = ["--kv-plain"] if layout == "plain" else []
    (answer,) = score(path, [ids], "--kv-type", "f32", "--poison", *plain)
    compare(answer["logprobs"], answer["top1"], log_probs, ids)
    assert answer["blocks_used"] == -(-len(ids) // 16)


@pytest.mark.parametrize("name", ALL)
def test_generation_against_reference(score, tiny, expected, name):
    """Greedy decoding takes the reference's most likely token and reports its log-probability."""
    shape, weights, path = tiny(name)
    prompt = expected(name)[1][:40]
    (answer,) = score(path, [prompt], "--kv-type", "f32", "--generate", 24)
    ids = prompt + answer["generated"]
    log_probs = reference.log_probs(shape, weights, ids)[len(prompt) - 1 : -1]
    compare(answer["generated_logprobs"], answer["generated"], log_probs, ids[len(prompt) - 1 :])


def test_factors_for_long_contexts_follow_the_context(score, tiny):
    """longrope: an engine whose context is not longer than the original one takes the short factors."""
    shape, weights, path = tiny("phi3-long")
    ids = tiny_prompt(60)
    for n_ctx in (512, 513):
        (answer,) = score(path, [ids], "--kv-type", "f32", "--ctx", n_ctx)
        compare(answer["logprobs"], answer["top1"], reference.log_probs(shape, weights, ids, n_ctx)[:-1], ids)
