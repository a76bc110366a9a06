"""The benches as instruments: that what they time computes attention, and that their verdicts follow from the rounds.

The oracle is the textbook in double that every peer is checked against before it is timed (bench/attn_peers.py).
"""
import os
import subprocess
import sys
import types
import unittest.mock
import xml.etree.ElementTree

import pytest

from conftest import ROOT, program

sys.path.insert(0, str(ROOT / "bench"))
os.environ.setdefault("PAGED_BUILD", str(ROOT / "build/release"))

import attn_bench  # noqa: E402
import attn_peers  # noqa: E402
import attn_plot  # noqa: E402
import bench_engine  # noqa: E402
import rounds  # noqa: E402

SHAPE = attn_bench.shape(heads=8, kv_heads=2, ctx=1100, dim=64, batch=1)


@pytest.fixture
def instrument():
    side = rounds.Side("paged", [program("bench/bench_attn")])
    yield side
    side.close()


@pytest.fixture(scope="module", params=[1, 40], ids=["decode", "prefill"])
def data(request, tmp_path_factory):
    return attn_peers.Data(tmp_path_factory.mktemp("data"), {**SHAPE, "q": request.param})


def opened(instrument, data, name="a", **more):
    cache = attn_bench.Cache(instrument, name, {**data.spec, "data": data.folder, "layers": 3, **more})
    assert not cache.skip
    cache.run()
    return cache


def output(cache, data):
    path = data.folder / f"{cache.name}.out"
    cache.out(path)
    return path.read_bytes()


@pytest.mark.parametrize("layout", ["packed", "plain"])
@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16"])
def test_what_is_timed_is_attention(instrument, data, kv_type, layout):
    cache = opened(instrument, data, type=kv_type, layout=layout, block=48, shuffled=1)
    assert data.error(cache) < attn_peers.TOLERANCE[kv_type]


def test_all_ways_of_placing_have_the_same_bits(instrument, data):
    """Sides of a comparison that computed something else would be no comparison."""
    ways = {"plain": {}, "shuffled": {"shuffled": 1}, "run": {"contiguous": 1}, "gather": {"shuffled": 1, "gather": 1},
            "few": {"contiguous": 1, "block": 1024}, "write": {"shuffled": 1, "write": 1}}
    outputs = {name: output(opened(instrument, data, name, type="bf16", **{"block": 16, **way}), data)
               for name, way in ways.items()}
    assert len(set(outputs.values())) == 1


def test_cascade_has_the_same_bits(instrument, data):
    spec = {**attn_bench.shape(8, 2, ctx=700, dim=64, batch=3), "type": "bf16", "block": 32, "shared": 640, "shuffled": 1}
    caches = [attn_bench.Cache(instrument, name, {**spec, "cascade": cascade}) for name, cascade in (("a", 0), ("b", 1))]
    assert not any(cache.skip for cache in caches)
    for cache in caches:
        cache.run()
    assert output(caches[0], data) == output(caches[1], data)


def test_limits_and_refusals_are_answered(instrument):
    probe = instrument.ask("probe")
    assert probe["bytes"] > 1e9 * .99 and probe["seconds"] > 0
    assert set(instrument.ask("peak f32")) in ({"skip"}, {"seconds", "cpu_seconds", "ops"})
    assert "no multiple" in instrument.ask("open a heads=3 kv_heads=2 dim=64 ctx=64")["skip"]


@pytest.mark.parametrize("line", ["dance", "run a 1", "open a heads=x", "open a height=3", "peak f64"])
def test_nonsense_ends_the_program_with_a_word(line):
    done = subprocess.run([program("bench/bench_attn")], input=line + "\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("bench_attn: ") and not done.stdout


# ---- rounds and verdicts ----

class Clock:
    """Stands for our program: its probes read so many bytes a second, in turns."""

    def __init__(self, rates):
        self.rates, self.n = rates, 0

    def ask(self, line):
        assert line == "probe"
        rate = self.rates[self.n // 2 % len(self.rates)]  # the same before and after a round
        self.n += 1
        return {"bytes": rate, "seconds": 1, "cpu_seconds": rounds.CPUS}


def bench_of(rates):
    bench = attn_bench.Bench.__new__(attn_bench.Bench)
    bench.options = types.SimpleNamespace(quick=False, loaded=False)
    bench.progress, bench.label, bench.others = rounds.Progress(), "", []
    bench.ours = Clock(rates)
    bench.ours.process = types.SimpleNamespace(pid=os.getpid())
    bench.ours.ended = False
    return bench


def answer(seconds, used=1.0):
    return {"seconds": seconds, "cpu_seconds": seconds * rounds.CPUS * used, "calls": 1, "call_s": seconds}


def test_regimes_are_never_mixed():
    bench = bench_of([50e9, 80e9, 80e9])
    measured = bench.rounds({"a": lambda: answer(1)}, "memory", wanted=20)
    assert measured.regime == "fast" and len(measured.clean) == 20
    assert {each["limit"] for each in measured.clean} == {80e9}
    row = measured.row("case", "share", "share", lambda each: 72e9 / each["limit"], {"slow": .95, "fast": .88})
    assert (row["value"], row["must"], row["verdict"], row["regime"]) == (.9, .88, "pass", "fast")


def test_rounds_without_the_cores_do_not_count():
    """What is not clean is measured again in its round, up to TRIES times; then the round does not count."""
    tries = attn_bench.TRIES
    bench, used = bench_of([50e9]), iter(([1] + [.97] * tries + [.97] * (tries - 1) + [1]) * 100)
    measured = bench.rounds({"a": lambda: answer(1, next(used))}, "memory", wanted=15)
    assert len(measured.clean) == 15 and measured.dropped == 7
    assert all(each["a"]["cpu_seconds"] == rounds.CPUS for each in measured.clean)


def test_of_a_peer_the_faster_of_two_counts(monkeypatch):
    monkeypatch.setattr(attn_bench, "busy_ticks", lambda: 0)  # the machine may have work
    bench, times = bench_of([50e9]), iter([2, 3, 5, 4] * 100)
    measured = bench.rounds({"a": lambda: answer(next(times), .5) | {"peer": "one"}}, "memory", wanted=4)
    assert [each["a"]["seconds"] for each in measured.clean] == [2, 4, 2, 4] and measured.dropped == 0


def test_of_a_side_the_clean_parts_count():
    """If these are half of them; else the faster half."""
    side = bench_engine.ModelSide.__new__(bench_engine.ModelSide)
    for parts, seconds, clean in (((1, 1), (3, 1), (9, .5), (9, .5)), 4, True), (((1, .5), (2, .5), (5, .5), (4, 1)), 3, True):
        answers = iter(part | {"tokens": 8} for part in (answer(each, used) for each, used in parts))
        with unittest.mock.patch.object(rounds.Side, "ask", lambda *_: next(answers)), \
                unittest.mock.patch.object(bench_engine, "busy_seconds", lambda: 0):
            told = side.ask("decode 8", 4)
        assert (told["seconds"], told["clean"], told["each_s"], told["rate"]) == (seconds, clean, seconds / 2, 16 / seconds)


def test_steps_take_turns():
    bench, order = bench_of([50e9]), []
    bench.rounds({"a": lambda: order.append("a") or answer(1), "b": lambda: order.append("b") or answer(1)}, "memory", wanted=2)
    assert order == ["a", "b", "b", "a"]


@pytest.mark.parametrize("values, must, better, expected", [
    ([1.0] * 15, 1, "higher", "pass"),
    ([1.0] * 14, 1, "higher", "inconclusive"),
    ([.9] * 15, 1, "higher", "fail"),
    ([.9, 1.1] * 10, 1, "higher", "inconclusive"),
    ([.01] * 15, .02, "lower", "pass"),
    ([.03] * 15, .02, "lower", "fail"),
    ([5.0] * 15, None, "lower", "pass"),
    ([], 1, "higher", "inconclusive"),
])
def test_verdicts(values, must, better, expected):
    row = rounds.row("bench", "case", "metric", "unit", values, must, better=better)
    assert row["verdict"] == expected and row["rounds"] == len(values)
    assert list(row)[:11] == ["bench", "case", "metric", "unit", "better", "value", "low", "high", "must", "aim", "verdict"]


def test_claims_of_half_a_percent_take_more_rounds():
    assert rounds.row("bench", "case", "metric", "unit", [.001] * 199, .005, better="lower", least=200)["verdict"] == "inconclusive"


def test_a_side_that_dies_says_so():
    side = rounds.Side("brief", [sys.executable, "-c", "input()"])
    with pytest.raises(rounds.Ended, match="brief ended at `hello`"):
        side.ask("hello")


def test_the_picture_is_xml():
    rows = [rounds.row("attn", "decode <&>", "bf16, share of read bandwidth", "share", [.9] * 15, .95),
            rounds.row("attn", "peers: decode", "bf16 / ggml, tokens/s", "ratio", [3.5] * 15, 2),
            rounds.row("attn", "peers: decode", "bf16 / vLLM CPU, tokens/s", "ratio", [])]
    root = xml.etree.ElementTree.fromstring(attn_plot.draw(rows))
    assert sum(element.tag.endswith("rect") for element in root) == 3  # the ground and two bars
    xml.etree.ElementTree.fromstring(attn_plot.draw([]))
