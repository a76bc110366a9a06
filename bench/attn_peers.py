"""The cases of `./x bench attn` beside other people's attention: the same keys, values and queries, in turns.

Every peer runs at its best: of the settings that it has for a case, each is checked against NumPy in double, timed, and the
fastest is the one that we are compared with. Tokens a second: what a peer stores in fewer bytes is its gain.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

from attn_bench import cold_layers, shape
from attn_cases import CONTEXT, GQA_4, HEADS, MHA, by_regime, paged
from rounds import CPUS, ROOT, Ended

NAMES = "vllm", "openvino", "onnxruntime", "ggml"
TITLES = {"vllm": "vLLM CPU", "openvino": "OpenVINO", "onnxruntime": "ONNX Runtime", "ggml": "ggml"}
# Settings of each peer, by the bytes of keys and values. The first is taken where there is no time to try.
WIDE, NARROW = "16 bits or more", "8 bits"
SETTINGS = {
    "vllm": {WIDE: ["bf16", "f16", "f32"], NARROW: ["fp8_e4m3", "fp8_e5m2"]},
    "openvino": {WIDE: ["bf16/bf16", "f32/f16", "f32/f32"], NARROW: ["bf16/u8", "f32/u8"]},
    "onnxruntime": {WIDE: ["f32", "f16"], NARROW: []},
    "ggml": {WIDE: ["f16/heads", "f16/tokens", "bf16/heads", "f32/heads"], NARROW: ["q8_0/heads", "q8_0/tokens"]},
}
KV_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "u8": 1, "q8_0": 1}
# Relative RMS error of a right result. Keys, values and queries are numbers of bf16, so that only what a setting does to them
# afterwards is seen; ggml adds values up in f16, and eight bits of a float keep three or two behind the point.
TOLERANCE = {"f32": 1e-2, "f16": 2e-2, "bf16": 1e-2, "i8": .05, "u8": .05, "q8_0": .05, "fp8_e4m3": .25, "fp8_e5m2": .5}
CHECKED_ROWS = 12               # queries of a prefill that are checked
# OpenMP's threads are pinned, or the scheduler puts two on one core; OpenVINO and ONNX Runtime pin their own. Memory in huge
# pages, as ours.
PINNED = {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}
ENVIRONMENT = {"OMP_NUM_THREADS": str(CPUS), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def kv_type_of(setting):
    return next(part for part in reversed(setting.split("/")) if part in KV_BYTES)


class Program:
    """One program of a peer; ggml has two."""

    def __init__(self, bench, peer, command, prefix):
        env = {**ENVIRONMENT, **(PINNED if peer in ("vllm", "ggml") else {})}
        self.peer, self.prefix = peer, prefix
        self.side = bench.other_side(TITLES[peer], command, env)
        self.version = self.side.ask("hello")["version"]


def start(bench, names):
    """The programs of the peers that could be installed."""
    bench.progress.show("peers: setting up")
    setup = subprocess.run([sys.executable, ROOT / "bench/peers/setup-attn", os.environ["PAGED_CACHE_DIR"], *names],
                           stdout=subprocess.PIPE, text=True, check=False)
    if setup.returncode:
        bench.progress.say("the peers cannot be set up; going on without them")
    programs = []
    for each in map(json.loads, setup.stdout.splitlines()):
        try:
            programs.append(Program(bench, each["peer"], each["command"], each["prefix"]))
        except Ended as reason:
            bench.progress.say(f"{each['prefix']}{TITLES[each['peer']]} is left out: {reason}")
    return programs


# ---- the same numbers for all, and what must come out ----

def as_bf16(array):
    """The nearest numbers of bf16, in place of f32."""
    bits = array.view(np.uint32)
    return ((bits + 0x7fff + ((bits >> 16) & 1)) & np.uint32(0xffff0000)).view(np.float32)


class Data:
    """q, k, v in a folder, as every side reads them, and the textbook answer. Scores have a deviation of 2, so that some tokens
    count and a wrong one is noticed."""

    def __init__(self, folder, spec):
        self.folder, self.spec = pathlib.Path(folder), spec
        random = np.random.default_rng(7)
        kv_shape = spec["batch"], spec["ctx"], spec["kv_heads"], spec["dim"]
        self.q = as_bf16(2 * random.standard_normal((spec["batch"], spec["q"], spec["heads"], spec["dim"]), np.float32))
        self.k, self.v = (as_bf16(random.standard_normal(kv_shape, np.float32)) for _ in "kv")
        for name in "qkv":
            getattr(self, name).tofile(self.folder / f"{name}.f32")
        count = spec["q"]
        self.rows = np.unique(np.linspace(0, count - 1, min(count, CHECKED_ROWS)).astype(int))
        self.expected = self.textbook()

    def textbook(self):
        """[batch, rows, heads, dim] in double."""
        spec, group = self.spec, self.spec["heads"] // self.spec["kv_heads"]
        out = np.empty((spec["batch"], len(self.rows), spec["heads"], spec["dim"]))
        hidden = np.arange(spec["ctx"])[None, :] > (spec["ctx"] - spec["q"] + self.rows)[:, None]
        for b in range(spec["batch"]):
            for kv_head in range(spec["kv_heads"]):
                k, v = (part[b, :, kv_head].astype(np.float64) for part in (self.k, self.v))
                for head in range(kv_head * group, (kv_head + 1) * group):
                    scores = self.q[b, self.rows, head].astype(np.float64) @ k.T / np.sqrt(spec["dim"])
                    scores[hidden] = -np.inf
                    weights = np.exp(scores - scores.max(1, keepdims=True))
                    out[b, :, head] = weights / weights.sum(1, keepdims=True) @ v
        return out

    def error(self, cache):
        """Relative RMS error of what the cache's last run gave."""
        path = self.folder / "out.f32"
        cache.out(path)
        got = np.fromfile(path, np.float32).reshape(self.q.shape)[:, self.rows]
        path.unlink()
        return float(np.sqrt(np.mean((got - self.expected) ** 2) / np.mean(self.expected ** 2)))


# ---- a case ----

class Choices:
    """The fastest setting of each peer for a kind of case, found once."""

    def __init__(self, bench, programs):
        self.bench, self.programs, self.known = bench, programs, {}

    def candidates(self, peer, width):
        programs = [program for program in self.programs if program.peer == peer]
        return [(program, setting) for setting in SETTINGS[peer][width] for program in programs]

    def best(self, peer, kind, width, data):
        """(program, setting), or None where the peer has nothing for it."""
        if (peer, kind) in self.known:
            return self.known[peer, kind]
        candidates = self.candidates(peer, width)
        if self.bench.options.quick:
            candidates = candidates[:1]
        tried = [self.attempt(program, setting, data) for program, setting in candidates]
        right = [each for each in tried if each]
        self.known[peer, kind] = min(right, key=lambda each: each[0])[1:] if right else None
        return self.known[peer, kind]

    def attempt(self, program, setting, data):
        """(seconds, program, setting), or None where it fails or computes something else."""
        name = f"{TITLES[program.peer]} {program.prefix}{setting}"
        self.bench.progress.show(f"{self.bench.label}: trying {name}")
        try:
            return self.time_setting(program, setting, data, name)
        except Ended as reason:
            self.bench.progress.say(f"{name} is left out: {reason}")
            return None

    def time_setting(self, program, setting, data, name):
        cache = self.bench.cache(program.side, "try", {**data.spec, "setting": setting, "data": data.folder,
                                                         "layers": 2 if data.spec["q"] == 1 else 1})
        if cache.skip:
            self.bench.progress.say(f"{name} is left out: {cache.skip}")
            return None
        try:
            error = data.error(cache)
            if not error <= TOLERANCE[kv_type_of(setting)]:
                self.bench.progress.say(f"{name} is left out: its relative error is {error:.2g}")
                return None
            seconds = min(cache.run()["seconds"] for _ in range(3))
            return seconds, program, setting
        finally:
            cache.close()


def open_best(bench, stack, data, program, setting):
    """(cache, what to say about it) with as many layers as make it cold, checked once more; None where it fails."""
    spec = data.spec
    layers = 1 if spec["q"] > 1 else cold_layers(spec, KV_BYTES[kv_type_of(setting)])
    try:
        cache = bench.cache(program.side, "case", {**spec, "setting": setting, "layers": layers, "data": data.folder})
        stack.callback(cache.close)
        error = float("nan") if cache.skip else data.error(cache)
    except Ended as reason:
        bench.progress.say(str(reason))
        return None
    if not error <= TOLERANCE[kv_type_of(setting)]:
        bench.progress.say(f"{TITLES[program.peer]} {setting} is left out: {cache.skip or f'its relative error is {error:.2g}'}")
        return None
    return cache, f"{program.version}, {program.prefix}{setting}, error {error:.0e}"


def place_ours(bench, stack, case, data, ours):
    """Our cache of the same data, checked; or one with a `skip`."""
    own = {**paged(data.spec, ours), "data": data.folder}
    if data.spec["q"] > 1:
        own.update(layers=1, write=1)  # a peer's prefill writes its keys and values too
    cache = stack.enter_context(bench.open(ours=own))["ours"]
    if not cache.skip:
        cache.run()
        error = data.error(cache)
        if not error <= TOLERANCE[ours]:
            sys.exit(f"bench: {case}: our relative error is {error:.2g}")
    return cache


def beside_peers(bench, choices, case, spec, ours, musts, kind=None):
    """One case: ours against every peer in the same rounds. `kind`: cases of one kind share the choice of settings."""
    peers = [peer for peer in NAMES if peer in bench.options.peers]
    with contextlib.ExitStack() as stack:
        data = Data(stack.enter_context(tempfile.TemporaryDirectory(prefix="paged-bench-")), spec)
        own = place_ours(bench, stack, case, data, ours)
        chosen = {}
        for peer in [] if own.skip else peers:
            best = choices.best(peer, kind or case, NARROW if ours == "i8" else WIDE, data)
            found = best and open_best(bench, stack, data, *best)
            if found:
                chosen[peer] = found
        if not own.skip:
            yield from compare(bench, case, spec, ours, own, chosen, musts)
        for peer in peers:
            if peer in musts and peer not in chosen:
                why = f"not built: {own.skip}" if own.skip else f"{TITLES[peer]} is not there"
                yield bench.skipped(case, f"{ours} / {TITLES[peer]}, tokens/s", "ratio", why, musts[peer])


def compare(bench, case, spec, ours, own_cache, chosen, musts):
    steps = {"ours": own_cache.run}
    for peer, (cache, _) in chosen.items():
        steps[peer] = lambda cache=cache: {**cache.run(), "peer": True}
    rounds = bench.rounds(steps, "memory", wanted=20, seconds=40)
    n_tokens = spec["batch"] * spec["q"]
    yield rounds.row(case, f"{ours}, one layer", "tokens/s", lambda answers: n_tokens / answers["ours"]["call_s"])
    for peer, (_, note) in chosen.items():
        yield rounds.row(case, f"{TITLES[peer]}, one layer", "tokens/s",
                         lambda answers, peer=peer: n_tokens / answers[peer]["call_s"], note=note)
        yield rounds.row(case, f"{ours} / {TITLES[peer]}, tokens/s", "ratio",
                         lambda answers, peer=peer: answers[peer]["call_s"] / answers["ours"]["call_s"], musts.get(peer))


PREFILL = {"openvino": 1.3, "vllm": 2.1, "ggml": 4.5}
# name, shape, our type, musts, kind; the first three are those of --quick
CASES = [
    ("peers: decode MHA", shape(HEADS, MHA, CONTEXT), "bf16",
     {"vllm": 1.7, "openvino": by_regime(1.5, 2), "onnxruntime": 1.3, "ggml": 2}, None),
    ("peers: decode GQA 4", shape(HEADS, GQA_4, CONTEXT), "bf16",
     {"vllm": 2.4, "openvino": 2.4, "onnxruntime": 2, "ggml": 5}, None),
    ("peers: prefill GQA 4, q 2048", shape(HEADS, GQA_4, 2048, q=2048), "bf16", PREFILL, "prefill"),
    ("peers: decode GQA 4, 8 bits", shape(HEADS, GQA_4, CONTEXT), "i8", {"vllm": 3, "openvino": 5, "ggml": 10}, "8 bits"),
    ("peers: decode MHA, 8 bits", shape(HEADS, MHA, CONTEXT), "i8", {}, "8 bits"),
    ("peers: prefill MHA, q 2048", shape(HEADS, MHA, 2048, q=2048), "bf16", PREFILL, "prefill"),
    ("peers: prefill GQA 4, 512 on 8192", shape(HEADS, GQA_4, CONTEXT, q=512), "bf16", PREFILL, "prefill"),
]
N_QUICK = 3
