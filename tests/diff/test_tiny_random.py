"""Goal: every shape of every family is computed right. Method: random models against vectors/tiny, which transformers and
mlx-lm computed from the same weights (make_tiny_vectors.py), and against llama.cpp on the same file.

The long tier also computes all of it in NumPy and double (reference.py).
"""
import json
import os
import pathlib

import numpy as np
import pytest

import reference
from models import SHAPES, WINDOWED, tiny_prompt

BOUND = 1e-4
# llama.cpp takes GELU from a table of f16, and the tanh form of it for Falcon, whose authors use the exact one.
LLAMACPP_BOUND = {"gelu": 2e-3, "gelu_erf": 5e-3}
NAMES = [shape.name for shape in SHAPES]
ALL = NAMES + [shape.name for shape in WINDOWED]
VECTORS = pathlib.Path(__file__).resolve().parent / "vectors" / "tiny"


@pytest.fixture(scope="module")
def expected(tiny):
    """expected(name) -> (path, ids, vector)"""

    def get(name):
        vector = json.loads((VECTORS / f"{name}.json").read_text())
        return tiny(name)[2], vector["tokens"], vector

    return get


def compare(got, top1, logprobs, top, top_logprobs, bound=BOUND):
    """Log-probabilities of the tokens and the most likely ids, [n] each, with the expected; top [n, 2] with the second."""
    delta = np.abs(np.array(got) - logprobs)
    assert delta.max() <= bound, f"position {delta.argmax()}: off by {delta.max():.2e}"
    # Where two tokens are as good as equal either may come first.
    first, second = np.array(top).T
    gap = np.subtract(*np.array(top_logprobs).T)
    right = (top1 == first) | ((top1 == second) & (gap <= 2 * bound))
    assert right.all(), f"position {right.argmin()}: not the most likely token"
    assert np.std(logprobs) > 0.5, "the log-probabilities hardly differ: this would prove nothing"


def compare_with(vector, got, top1, bound=BOUND):
    compare(got, np.array(top1), vector["logprobs"], vector["top"], vector["top_logprobs"], bound)


def rows_of(log_probs, ids):
    """The same of [n - 1, n_vocab] log-probabilities: of the tokens, the two most likely, theirs."""
    top = np.argsort(log_probs, axis=1)[:, :-3:-1]
    return log_probs[np.arange(len(log_probs)), ids[1:]], top, np.take_along_axis(log_probs, top, axis=1)


@pytest.mark.parametrize("name", NAMES)
def test_llamacpp_agrees(llamacpp, tiny, expected, name):
    path, ids, vector = expected(name)
    scores = llamacpp(path, n_ctx=1024).score(ids)
    compare_with(vector, [s[0] for s in scores], [s[1] for s in scores], LLAMACPP_BOUND.get(tiny(name)[0].act, BOUND))


@pytest.mark.skipif(not os.environ.get("PAGED_LONG"), reason="long: NumPy takes a minute")
@pytest.mark.parametrize("name", ALL)
def test_numpy_agrees(tiny, expected, name):
    shape, weights, _ = tiny(name)
    ids, vector = expected(name)[1:]
    assert ids == tiny_prompt(len(ids))
    taken, top, _ = rows_of(reference.log_probs(shape, weights, ids)[:-1], ids)
    compare_with(vector, taken, top[:, 0])


@pytest.mark.parametrize("layout", ["packed", "plain"])
@pytest.mark.parametrize("name", ALL)
def test_engine(score, expected, name, layout):
    path, ids, vector = expected(name)
    plain = ["--kv-plain"] if layout == "plain" else []
    (answer,) = score(path, [ids], "--kv-type", "f32", "--poison", *plain)
    compare_with(vector, answer["logprobs"], answer["top1"])
    assert answer["blocks_used"] == -(-len(ids) // 16)


@pytest.mark.parametrize("name", ALL)
def test_generation(score, expected, name):
    """Greedy decoding takes the most likely token each time and reports its log-probability."""
    path, ids, vector = expected(name)
    (answer,) = score(path, [ids[: vector["n_prompt"]]], "--kv-type", "f32", "--generate", len(vector["greedy"]["tokens"]))
    assert answer["generated"] == vector["greedy"]["tokens"]
    delta = np.abs(np.subtract(answer["generated_logprobs"], vector["greedy"]["logprobs"]))
    assert delta.max() <= BOUND, f"token {delta.argmax()}: off by {delta.max():.2e}"


def test_factors_for_long_contexts_follow_the_context(score, tiny):
    """longrope: an engine whose context is not longer than the original one takes the short factors."""
    shape, weights, path = tiny("phi3-long")
    ids = tiny_prompt(60)
    for n_ctx in (512, 513):
        (answer,) = score(path, [ids], "--kv-type", "f32", "--ctx", n_ctx)
        taken, top, top_logprobs = rows_of(reference.log_probs(shape, weights, ids, n_ctx)[:-1], ids)
        compare(answer["logprobs"], np.array(answer["top1"]), taken, top, top_logprobs)
