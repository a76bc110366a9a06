"""Goal: the model of random weights that ./x bench engine measures is the same model to everybody. Method: the same maker at small
widths; llama.cpp scores the same tokens, and the bits are the same in pieces.

Both round what goes into a product to 8 bits, and next tokens of random weights are far apart, so they agree closely or not at all.
"""
import sys

import pytest

from conftest import ROOT
from models import tiny_prompt

sys.path.insert(0, str(ROOT / "bench"))

import random_model  # noqa: E402

SHAPE = random_model.Shape("small", n_layers=2, n_embd=256, n_ff=768, n_heads=4, n_kv_heads=2, head_dim=64)
IDS = tiny_prompt(40)


@pytest.fixture(scope="module")
def source(tiny):
    """Whose tokens it gets."""
    return tiny("mha-16")[2]


@pytest.fixture(scope="module")
def path(tmp_path_factory, source):
    path = tmp_path_factory.mktemp("random") / "small.gguf"
    random_model.write(path, SHAPE, source)
    return str(path)


def test_is_what_llamacpp_computes(score, llamacpp, path):
    (ours,) = score(path, [IDS], "--kv-type", "f32", "--ctx", 256)
    theirs = llamacpp(path, n_ctx=256).score(IDS)
    off = [abs(a - b[0]) for a, b in zip(ours["logprobs"], theirs, strict=True)]
    n_same = sum(a == b[1] for a, b in zip(ours["top1"], theirs, strict=True))
    text = f"mean |Δ log-prob| {sum(off) / len(off):.4f}, max {max(off):.3f}, top-1 {n_same} of {len(off)}"
    print(text)
    assert sum(off) / len(off) < 0.1 and n_same >= 0.8 * len(off), text


@pytest.mark.parametrize("options", [("--chunk", 7), ("--chunk", 1, "--threads", 2), ("--chunk", 64, "--block-size", 32)], ids=str)
def test_bits_in_pieces(score, path, options):
    def bits(*options):
        return score(path, [IDS], "--hash", "--generate", 4, "--ctx", 256, *options)[0]["hash"]

    assert bits(*options) == bits("--chunk", 512)


def test_is_kept(tmp_path, source):
    """Made once; another shape takes its place."""
    path = random_model.kept(tmp_path, SHAPE, source)
    before = path.stat()
    assert random_model.kept(tmp_path, SHAPE, source) == path and path.stat().st_mtime_ns == before.st_mtime_ns
    other = random_model.kept(tmp_path, random_model.dataclasses.replace(SHAPE, n_layers=1), source)
    assert other != path and list(tmp_path.iterdir()) == [other]
