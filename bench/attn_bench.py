"""The instrument of `./x bench attn`: our program and the peers as sides, caches that are open in them, rounds between probes.

A round: probe, A, B, …, probe. A value is worth something only beside the probes of its own round. The machine has two memory
regimes, several minutes each; a round belongs to the one that its probes show, a round that sees both is dropped, and no median
mixes them: the regime with more rounds is reported, by name.
"""

import contextlib
import math
import os
import pathlib
import time

from rounds import CPUS, Side, is_clean, row

COLD_BYTES = 768 << 20          # to rotate through, far more than any cache
FAST_BYTES_S = 65e9             # what tells the regimes of the machine apart (46-52 and 80 GB/s)
STEADY = 1.15                   # probes of one round that differ by more saw a change
FOREIGN = 0.03                  # CPU time that others may use while a peer is asked …
FOREIGN_TICKS = 2               # … beyond that which the clock cannot tell
TRIES = 6                       # for an answer whose threads had the cores for themselves
PAUSE_S = 0.1                   # after a peer's answer, until its threads have gone to sleep
LAYERS_MAX = 256                # of bench_attn.c
ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1}
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def causal_flops(spec):
    """Products and sums of Q·K and P·V that the mask leaves."""
    q, keys = spec["q"], spec["ctx"]
    return 4.0 * spec["batch"] * spec["heads"] * spec["dim"] * (q * keys - q * (q - 1) / 2)


def shape(heads, kv_heads, ctx, dim=128, q=1, batch=1):
    return {"heads": heads, "kv_heads": kv_heads, "dim": dim, "ctx": ctx, "q": q, "batch": batch}


def cold_layers(spec, element_bytes, n_keys=None):
    """So many that COLD_BYTES pass before a layer is read again."""
    keys = n_keys or spec["batch"] * spec["ctx"]
    return min(LAYERS_MAX, math.ceil(COLD_BYTES / (2 * keys * spec["kv_heads"] * spec["dim"] * element_bytes)))


def time_of(answer, threads, loaded):
    """Seconds; beside other work those that the threads were given, which tell more than the clock on the wall."""
    return answer["cpu_seconds"] / threads if loaded else answer["seconds"]


class Cache:
    """A cache that is open in a side. `skip` says why it is not."""

    def __init__(self, side, name, spec, loaded=False):
        self.side, self.name, self.spec, self.loaded = side, name, spec, loaded
        words = " ".join(f"{key}={value}" for key, value in spec.items())
        self.opened = side.ask(f"open {name} {words}")
        self.skip = self.opened.get("skip")
        self.bytes = self.opened.get("bytes")

    def run(self, times=1):
        return self.call(f"run {self.name} {times}", CPUS)

    def plan(self, times):
        return self.call(f"plan {self.name} {times}", 1)

    def call(self, line, threads):
        """The answer, with the time of one call."""
        answer = self.side.ask(line)
        return {**answer, "call_s": time_of(answer, threads, self.loaded) / answer["calls"]}

    def out(self, path):
        self.side.ask(f"out {self.name} {path}")

    def close(self):
        if not self.skip and not self.side.ended:
            self.side.ask(f"close {self.name}")


class Rounds:
    """The clean rounds of one regime: for each, the answers by step and `limit`, the mean of its probes (per second)."""

    def __init__(self, clean, regime, dropped, loaded):
        self.clean, self.regime, self.dropped, self.loaded = clean, regime, dropped, loaded

    def values(self, function):
        """function(round) of each clean round."""
        return [function(answers) for answers in self.clean]

    def row(self, case, metric, unit, function, must=None, aim=None, better="higher", **more):
        """must, aim: a number, or one by regime. What was measured beside other work decides nothing."""
        def chosen(bound):
            return bound.get(self.regime or "slow") if isinstance(bound, dict) else bound

        made = row("attn", case, metric, unit, self.values(function), chosen(must), chosen(aim), better, regime=self.regime,
                   **more)
        if self.loaded:
            made["verdict"] = "inconclusive"
        return made


def ticks_of(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def busy_ticks():
    """Of all CPUs, time that the host took included."""
    fields = [int(word) for word in pathlib.Path("/proc/stat").read_text(encoding="utf-8").split("\n")[0].split()[1:9]]
    return sum(fields) - fields[3] - fields[4]


class Bench:
    """Everything that a case needs. Sides start when they are first asked for."""

    def __init__(self, options, progress):
        self.options, self.progress = options, progress
        build = pathlib.Path(os.environ["PAGED_BUILD"])
        self.ours = Side("paged", [build / "bench/bench_attn"])
        self.free_program = build / "bench/bench_attn_free"
        self.others = []        # sides that are not ours
        self.label = ""         # of the case at hand, with its place in the list

    @contextlib.contextmanager
    def open(self, side=None, **caches):
        """Caches by name, each a spec; those that the library refuses are there too, with their `skip`."""
        self.progress.show(f"{self.label}: placing keys and values")
        opened = {}
        try:
            for name, spec in caches.items():
                opened[name] = self.cache(side or self.ours, name, spec)
            yield opened
        finally:
            for cache in opened.values():
                cache.close()

    def cache(self, side, name, spec):
        return Cache(side, name, spec, self.options.loaded)

    def other_side(self, name, command, env=None):
        side = Side(name, command, env)
        self.others.append(side)
        return side

    def settled(self, step, threads=None):
        """The first answer whose threads had the cores for themselves, or the last of a few: where a host takes a core away some
        times a second, hardly a whole round would be clean. Of a peer, which cannot tell, the faster of two."""
        answer = step()
        if answer.get("peer"):
            time.sleep(PAUSE_S)
            return min(answer, step(), key=lambda one: one["call_s"])
        for _ in range(0 if self.options.loaded else TRIES - 1):
            if "skip" in answer or is_clean(answer, threads):
                break
            answer = step()
        return answer

    def foreign_share(self, step, threads):
        """An answer, and what part of the cores others used meanwhile."""
        pids = [os.getpid(), *(side.process.pid for side in [self.ours, *self.others] if not side.ended)]
        busy, mine, wall = busy_ticks(), sum(map(ticks_of, pids)), time.monotonic()
        answer = self.settled(step, threads)
        foreign = busy_ticks() - busy - sum(map(ticks_of, pids)) + mine
        return answer, max(0, foreign - FOREIGN_TICKS) * TICK_S / (CPUS * (time.monotonic() - wall))

    def limit(self, kind):
        """What the machine can do right now: bytes or operations a second; and whether the cores were ours."""
        if kind is None:
            return None
        answer = self.settled(lambda: self.ours.ask("probe" if kind == "memory" else f"peak {kind}"))
        if "skip" in answer:
            return None
        seconds = time_of(answer, CPUS, self.options.loaded)
        return {"rate": answer.get("bytes", answer.get("ops")) / seconds, "clean": is_clean(answer)}

    def round(self, steps, kind, threads):
        """The answers of one round, and whether it counts."""
        limits, answers, clean = [self.limit(kind)], {}, True
        for name, step in steps:
            answers[name], foreign = self.foreign_share(step, threads)
            if answers[name].get("peer"):
                # Its threads may wait without spinning, so its CPU time says nothing; what others used does.
                clean = clean and foreign <= FOREIGN
                time.sleep(PAUSE_S)
            else:
                clean = clean and is_clean(answers[name], threads)
        limits.append(self.limit(kind))
        if limits[0]:
            rates = [limit["rate"] for limit in limits]
            clean = clean and all(limit["clean"] for limit in limits) and max(rates) <= STEADY * min(rates)
            answers["limit"] = sum(rates) / 2
        return answers, clean

    def rounds(self, steps, kind, wanted=None, seconds=25, threads=None):
        """steps: {name: function that measures}; kind: of the probe, None without. Ends after so many clean rounds of a regime, or
        after so many seconds."""
        quick = self.options.quick
        wanted = (15 if quick else 40) if wanted is None else min(wanted, 30) if quick else wanted
        give_up = time.monotonic() + (min(seconds, 3) if quick else seconds)
        by_regime, n = {}, 0
        while True:
            best = max(by_regime.values(), key=len, default=[])
            if len(best) >= wanted or (time.monotonic() > give_up and n > 0):
                break
            self.progress.show(f"{self.label}: {len(best)} of {wanted} rounds, {n - len(best)} dropped")
            items = list(steps.items())
            answers, clean = self.round(items if n % 2 == 0 else items[::-1], kind, threads)
            n += 1
            if clean or self.options.loaded:
                regime = None if kind != "memory" else "fast" if answers["limit"] >= FAST_BYTES_S else "slow"
                by_regime.setdefault(regime, []).append(answers)
        regime = max(by_regime, key=lambda key: len(by_regime[key]), default=None)
        clean = by_regime.get(regime, [])
        return Rounds(clean, regime, n - len(clean), self.options.loaded)

    def skipped(self, case, metric, unit, why, must=None, aim=None, better="higher"):
        """The row of something that is not there; `why` becomes its note."""
        if isinstance(must, dict):
            must, aim = must["slow"], aim and aim["slow"]
        return row("attn", case, metric, unit, [], must, aim, better, regime=None, note=why)

    def close(self):
        for side in [self.ours, *self.others]:
            side.close()
