"""The planner from Python says what the command says, and what the published sizes give by hand."""

import json
import subprocess

import pytest

import conftest
import paged


def test_shapes_have_their_published_sizes():
    shape = paged.shape("LLaMA-2-13B")
    assert (shape.name, shape.n_heads, shape.n_ctx) == ("llama-2-13b", 40, 4096)
    assert [g[:3] for g in shape.groups] == [(40, 40, 128)]
    assert len(paged.shapes()) >= 30 and shape in paged.shapes()


def test_bytes_of_the_second_document():
    """A token of LLaMA-13B takes 40 layers x 40 heads x 128 x K and V x 2 bytes = 819 200 bytes; 4096 of them 3.125 GiB."""
    ways = {way: paged.Plan(paged.shape("llama-2-13b"), way, 64 if way == "packed tails" else 16) for way in
            ("paged", "contiguous", "packed tails")}
    assert {w: p.taken_bytes(17) for w, p in ways.items()} == {"paged": 2 * 16 * 819200, "contiguous": 4096 * 819200,
                                                               "packed tails": 2 * 16 * 819200}
    assert all(p.stored_bytes(4096) == 3355443200 for p in ways.values())
    assert ways["paged"].fit(25 << 30, 4096) == ways["contiguous"].fit(25 << 30, 17) == 8
    assert ways["paged"].fit(25 << 30, 1024) == 32 and ways["paged"].table_entries == 256


def test_the_command_says_the_same():
    out = subprocess.run([conftest.program("paged"), "plan", "llama-3-8b", "--memory", "24GB", "--json", "-q"], capture_output=True,
                         text=True, check=True)
    told, plan = json.loads(out.stdout), paged.Plan(paged.shape("llama-3-8b"))
    for row in told["lengths"]:
        assert plan.fit(told["pool_bytes"], row["tokens"]) == row["paged"]["fit"]


@pytest.mark.parametrize("arguments, words", [
    (dict(model=[]), "max_tokens"), (dict(model=[], max_tokens=16), "0"), (dict(model=None, way="x"), "way"),
    (dict(model=None, block_size=2000), "2000"), (dict(model=None, max_tokens=0), "0")])
def test_mistakes_are_named(arguments, words):
    model = arguments.pop("model")
    with pytest.raises(paged.InvalidArgument, match=words):
        paged.Plan(paged.shape("smollm2-135m") if model is None else model, **arguments)
    with pytest.raises(paged.InvalidArgument, match="no-such"):
        paged.shape("no-such")
