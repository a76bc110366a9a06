"""What the Python peers of `./x bench attn` have in common: the protocol of bench/bench_attn.c.

    hello                                       {"version": …, "settings": [how it can be set up, best guess first]}
    open NAME setting=S KEY=VALUE…              keys and values from `data` into a cache of `layers` layers
    run NAME N                                  N times all layers; the clock runs around that alone
    out NAME FILE                               the result of the last layer: f32 [batch * q, heads, dim]
    close NAME

A peer is a class with `version`, `settings` and `open(spec)`; open gives an object with `run()` and `out()`. An exception in
open is an answer too: {"skip": why}.
"""

import json
import os
import sys
import time
import types

import numpy as np

NUMBERS = {"heads", "kv_heads", "dim", "batch", "ctx", "q", "layers"}
THREADS = int(os.environ["OMP_NUM_THREADS"])  # not the affinity, which libgomp may have narrowed by now


def parse(words):
    """What is to be opened: heads, kv_heads, dim, batch, ctx (keys of a sequence), q (its last queries), layers, data."""
    spec = types.SimpleNamespace(batch=1, q=1, layers=1)
    for word in words:
        key, value = word.split("=", 1)
        setattr(spec, key, int(value) if key in NUMBERS else value)
    return spec


def load(spec, name):
    """q [batch, q, heads, dim], or k or v [batch, ctx, kv_heads, dim], f32; numbers that bf16 holds exactly."""
    shape = (spec.q, spec.heads) if name == "q" else (spec.ctx, spec.kv_heads)
    return np.fromfile(f"{spec.data}/{name}.f32", np.float32).reshape(spec.batch, *shape, spec.dim)


def answer(peer, opened, line):
    verb, *words = line.split()
    if verb == "hello":
        return {"version": peer.version, "settings": peer.settings}
    name, *words = words
    if verb == "open":
        try:
            opened[name] = peer.open(parse(words))
            opened[name].run()
        except Exception as error:  # whatever the peer does not like about it
            opened.pop(name, None)
            return {"skip": f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"}
        return {}
    work = opened[name]
    if verb == "run":
        n_times = int(words[0])
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(n_times):
            work.run()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return {"seconds": wall, "cpu_seconds": cpu, "calls": n_times * work.layers}
    if verb == "out":
        np.ascontiguousarray(work.out(), np.float32).tofile(words[0])
    if verb == "close":
        del opened[name]
    return {}


def serve(peer):
    # Libraries talk on stdout; the answers keep a way of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    opened = {}
    for line in sys.stdin:
        print(json.dumps(answer(peer, opened, line)), file=answers, flush=True)
