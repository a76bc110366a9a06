#!/usr/bin/env python3
"""The engine beside llama.cpp and OpenVINO GenAI: prefill, decode of one request and of many, load time, what a step costs,
attention's share of a step by context length, the share of scheduling and sampling, and a request trace replayed with paging and
without.

    ./x bench engine [--trace FILE] [--json] [--quick | --long] [--case FILTER] [--write-docs]

Cases: load, decode, prefill, requests, batch, sampling, steps, contexts, replay, llama8b; FILTER is a part of their names. FILE is
a request trace (formats: bench/traces.py); without one a load of the shape of ShareGPT's is generated. llama8b is the same
comparison with two layers of LLaMA-3-8B's shapes and random weights (bench/random_model.py), made once. A run takes twenty-five
minutes, --quick nine.

All programs get as many threads as there are cores, and stay open. A round asks each of them once, in turns (A B C, C B A, …);
its ratios are paired, so that a machine that speeds up or slows down does not tell. A round counts only when every program had the
cores for itself: its own CPU time says so (98 % of wall × threads), or, since not all of them spin while they wait, nobody else's
does. Medians; intervals are 95 % bootstrap; a requirement is met when the lower bound meets it, and fewer than 15 clean rounds
decide nothing.

--json: one object a row. --quick: a third of the rounds, which then decide. --long: more rounds. --write-docs: puts the tables
into docs/performance.md.
Environment: PAGED_BUILD (build folder), PAGED_MODEL, PAGED_CACHE_DIR (where the peers are built). Exit status 1: a requirement
failed.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import random_model
import traces
from rounds import CLEAN, CPUS, MIN_ROUNDS, ROOT, Progress, Side, is_clean, machine, row as any_row, write_docs

CASE_S = 60             # seconds for the rounds of a case, so that a busy machine ends in "inconclusive" and not in waiting
READABLE_S = 0.25       # of ours, so that the clock of CPU time, which ticks a hundred times a second, can tell
PAUSE_S = 0.25          # the threads of a side spin for a while after its answer; the next one waits until they sleep
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
N_CTX = 8192            # of all programs
BATCH_TOKENS = 2048     # that a request can make at least, where there are several
CONTEXTS = {2048: 1.0, 4096: 1.0, 7680: 2.0}            # must beside llama.cpp
MANY_AT = {2048: 8, 7680: 4}                            # as many requests at once there
DECODE_AT = 128         # decode so many tokens after as many
PART = 16               # so many at a time
BATCHES = {8: 1.5, 16: 2.0, 32: 2.0}    # requests at once: must beside OpenVINO GenAI
MANY = 32
NAME_8B = "8B layers"   # rows of llama8b
STEPS = 1, 2, 4, 8                      # requests at once: what a step costs
SAMPLING = "greedy", "top-p 0.9 at temperature 0.8", "the same with log-probabilities"
PROBES = 16             # short prompts, to see that all sides compute the same model
READ_PART, READS = 16, 8    # reads of all weights at once, and so many times: in all a quarter of a second
READS_8B = 16               # one at a time
SUMS = "tokens", "seconds", "cpu_seconds", "attn_seconds", "own_seconds", "bytes"
OURS, LLAMA, GENAI = "paged", "llama.cpp", "OpenVINO GenAI"
SINGLE, RUNS = "one by one", "contiguous"

# The replay: lengths of a trace of long contexts by REPLAY_SCALE, requests that fit REPLAY_CTX, a pool for REPLAY_RUNS of them.
REPLAY_SCALE, REPLAY_CTX, REPLAY_RUNS, REPLAY_N = 4, 1024, 8, 64
REPLAY_LOAD = 0.8       # of what all at once took
REPLAY_PATIENCE = 4     # a round of it is half a minute


def busy_seconds():
    """CPU time of the whole machine so far, stolen time included."""
    user, nice, system, _, _, irq, softirq, steal = map(int, open("/proc/stat", encoding="utf-8").readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) * TICK_S


class ModelSide(Side):
    """A program that speaks the protocol of bench/protocol.h. `times`: how often it is asked for a short answer, so that the
    machine's clock of CPU time, which ticks a hundred times a second, can tell whether somebody else was there."""

    def __init__(self, name, command, times=1):
        super().__init__(name, command)
        self.times = times

    def ask(self, command, times=1):
        """A command, or the sum of it several times, with its rate and whether the threads had the cores for themselves. Of
        several, those count in which they had, if these are half of them: some virtual machines lose a core for a few milliseconds
        some times a second, and no answer of half a second is whole there. Where fewer are, as of a side whose threads sleep while
        they wait, the faster half counts, if nobody else used the cores."""
        before, parts = busy_seconds(), [super(ModelSide, self).ask(command) for _ in range(times)]
        others = busy_seconds() - before - sum(part["cpu_seconds"] for part in parts)
        whole = [part for part in parts if is_clean(part)]
        clean = len(whole) * 2 >= times
        counted = whole if clean else sorted(parts, key=lambda part: part["seconds"])[:(times + 1) // 2]
        if not clean:
            seconds = sum(part["seconds"] for part in parts)
            clean = seconds > 20 * TICK_S and others <= (1 - CLEAN) * seconds * CPUS + 2 * TICK_S
        total = {key: sum(part.get(key, 0) for part in counted) for key in SUMS}
        return parts[-1] | total | {"rate": total["tokens"] / max(total["seconds"], 1e-9), "clean": clean,
                                    "each_s": total["seconds"] / len(counted)}


def row(case, metric, unit, better, values, must=None, aim=None, **more):
    return any_row("engine", case, metric, unit, values, must, aim, better, Plan.least, **more)


class Plan:
    """How many clean rounds are wanted, how many decide, seconds for those of a case; the trace to replay."""
    rounds, least, seconds, trace = MIN_ROUNDS, MIN_ROUNDS, CASE_S, None

    @classmethod
    def choose(cls, args):
        cls.trace = args.trace
        if args.quick:
            cls.rounds, cls.least, cls.seconds = 5, 5, CASE_S / 3
        elif args.long:
            cls.rounds, cls.seconds = 40, 4 * CASE_S


def rounds(sides, ask, label, progress, patience=1, most=1000):
    """Clean rounds, each {name of the side: answer}; fewer than wanted when the time for a case, so many times, is over, or after
    `most` of any kind."""
    clean, i, wanted = [], 0, Plan.rounds
    give_up = time.monotonic() + Plan.seconds * patience
    while len(clean) < wanted and i < most and time.monotonic() < give_up:
        progress.show(f"{label}: {len(clean)} of {wanted} rounds, {i - len(clean)} dropped")
        answers = {}
        for side in sides if i % 2 == 0 else reversed(sides):
            time.sleep(PAUSE_S)
            answers[side.name] = ask(side)
        i += 1
        if all(answer["clean"] for answer in answers.values()):
            clean.append(answers)
    return clean


def decode_rounds(sides, n, context, label, progress, ask=ModelSide.ask, steps=16):
    """Rounds of so many steps, or as many times as the clock of CPU time needs; requests stay open, so contexts grow on all sides
    alike, as far as there is room."""
    tokens = max(1, steps // n) if context > DECODE_AT else steps
    once = [side.ask(f"decode {tokens}") for side in sides][0]["seconds"]
    room = min(N_CTX - context, BATCH_TOKENS)
    times = min(math.ceil(READABLE_S / once), max(1, room // ((MIN_ROUNDS + 5) * tokens)))
    return rounds(sides, lambda side: ask(side, f"decode {tokens}", times), label, progress, 2, room // (times * tokens) - 2)


def compare(case, sides, clean, **limits):
    """Rows of a case: each side's rate, and ours over each peer's; limits: {peer: (must, aim)}, _ for what is no letter."""
    for side in sides:
        yield row(case, side.name, "tokens/s", "higher", [answers[side.name]["rate"] for answers in clean])
    for side in sides:
        if side.name != OURS:
            must, aim = limits.get(side.name.replace(".", "_").replace(" ", "_"), (None, None))
            ratios = [answers[OURS]["rate"] / answers[side.name]["rate"] for answers in clean]
            yield row(case, f"{OURS} / {side.name}", "ratio", "higher", ratios, must, aim)


def attention_share(case, clean):
    shares = [answers[OURS]["attn_seconds"] / answers[OURS]["seconds"] for answers in clean]
    return row(case, "attention share", "share", "lower", shares)


def check_same_model(sides):
    """A peer that computes something else would be no peer. The prompts are random tokens, where many a next token is as good as
    another and 8-bit arithmetic of another kind decides: of 49152, the same one after a quarter of them is no accident."""
    for peer in sides[1:]:
        same = sum(sides[0].ask(f"prefill {n}")["token"] == peer.ask(f"prefill {n}")["token"]
                   for n in range(16, 16 + 5 * PROBES, 5))
        if same < PROBES // 4:
            sys.exit(f"bench: {peer.name} chose the same token as we did after only {same} of {PROBES} prompts")


# ---- cases: each gets all sides, ours first ----


def load_times(model, progress):
    """Warm: the file has just been read."""
    command = [pathlib.Path(os.environ["PAGED_BUILD"]) / "paged", "inspect", "--json", model]
    times = []
    for i in range(Plan.rounds + 1):
        progress.show(f"load: {i} of {Plan.rounds}")
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        times.append(json.loads(done.stdout)["load_ms"])
    return times[1:]


def load(_, progress):
    yield row("load, warm file cache", "time", "ms", "lower", load_times(os.environ["PAGED_MODEL"], progress), 500, 200)


def decode(sides, progress):
    def ask(side):
        side.ask(f"prefill {DECODE_AT}")
        answer = side.ask(f"decode {PART}", DECODE_AT // PART)
        if side.name == OURS:
            read = side.ask(f"read {READ_PART}", READS)
            # How long reading the weights once for each token takes, over how long the tokens took.
            answer["read_share"] = read["each_s"] / READ_PART * answer["tokens"] / answer["seconds"]
            answer["clean"] &= read["clean"]
        return answer

    case = f"decode {DECODE_AT} after {DECODE_AT}"
    clean = rounds(sides, ask, "decode", progress)
    yield from compare(case, sides, clean, llama_cpp=(2.0, 2.4))
    yield row(case, "weight-read bound", "share", "higher", [answers[OURS]["read_share"] for answers in clean], 0.75, 0.9)
    yield attention_share(f"decode at {DECODE_AT}", clean)


def prefill(sides, progress):
    clean = rounds(sides, lambda side: side.ask("prefill 512", side.times), "prefill", progress)
    yield from compare("prefill 512", sides, clean, llama_cpp=(7, 10), OpenVINO_GenAI=(1.4, 1.8))
    yield attention_share("prefill to 512", clean)


def requests(sides, progress, case="decode", steps=16):
    """They stay open, so a round costs its tokens only; contexts grow on all sides alike."""
    for n, must in BATCHES.items():
        for side in sides:
            progress.show(f"{side.name}: prefill of {n} requests")
            side.ask(f"requests {n} {DECODE_AT}")
        clean = decode_rounds(sides, n, DECODE_AT, f"{case}, {n} requests", progress, steps=steps)
        yield from compare(f"{case}, {n} requests", sides, clean, llama_cpp=(1.0, 2.0),
                           OpenVINO_GenAI=(must, 2.5 if must >= 2 else None))


def batch(sides, progress):
    """So many requests at once beside one after the other, prompts included; of the latter two are run, since they are alike."""
    ours, case = sides[0], f"{MANY} requests of {DECODE_AT} + {DECODE_AT}"

    def answers(n):
        parts = [ours.ask(f"requests {n} {DECODE_AT}"), ours.ask(f"decode {DECODE_AT - 1}")]
        return {"seconds": sum(part["seconds"] for part in parts), "clean": all(part["clean"] for part in parts)}

    rates, clean, give_up = [], 0, time.monotonic() + Plan.seconds
    while clean < Plan.rounds and time.monotonic() < give_up:
        progress.show(f"{case}: {clean} of {Plan.rounds} rounds")
        single, together = [answers(1), answers(1)], answers(MANY)
        if all(answer["clean"] for answer in [*single, together]):
            rates.append((MANY * DECODE_AT / together["seconds"], 2 * DECODE_AT / sum(answer["seconds"] for answer in single)))
            clean += 1
    yield row(case, OURS, "tokens/s", "higher", [many for many, _ in rates])
    yield row(case, SINGLE, "tokens/s", "higher", [one for _, one in rates])
    yield row(case, f"{OURS} / {SINGLE}", "ratio", "higher", [many / one for many, one in rates], 3.0)


def sampling(sides, progress):
    """What of a step is not the model: scheduling, and choosing the tokens."""
    for how, name in enumerate(SAMPLING):
        sides[0].ask(f"sampling {how}")
        sides[0].ask(f"requests {MANY} {DECODE_AT}")
        clean = decode_rounds(sides[:1], MANY, DECODE_AT, f"sampling {name}", progress)
        shares = [answers[OURS]["own_seconds"] / answers[OURS]["seconds"] for answers in clean]
        yield row(f"scheduling and sampling, {MANY} requests", name, "share", "lower", shares, 0.03)
    sides[0].ask("sampling 0")


def steps(sides, progress):
    for n in STEPS:
        sides[0].ask(f"requests {n} {DECODE_AT}")
        clean = decode_rounds(sides[:1], n, DECODE_AT, f"steps of {n} requests", progress)
        times = [1e3 * n * answers[OURS]["seconds"] / answers[OURS]["tokens"] for answers in clean]
        yield row(f"a step of {n} request{'s' if n > 1 else ''}", "time", "ms", "lower", times)


def contexts(sides, progress):
    """Decode at growing context, one request and some, which stay open."""
    sides = [side for side in sides if side.name != GENAI]
    for context, must in CONTEXTS.items():
        for n in dict.fromkeys([1, MANY_AT.get(context, 1)]):
            for side in sides:
                progress.show(f"{side.name}: prefill of {n} × {context}")
                time.sleep(PAUSE_S)
                answer = side.ask(f"requests {n} {context}")
                if side.name == OURS and n == 1:
                    # The last chunk of the prompt: what a prefill pays at this length.
                    _, seconds, attn_seconds = answer["chunks"][-1]
                    yield row(f"prefill to {context}", "attention share", "share", "lower", [attn_seconds / seconds])
            case = f"decode at {context}" + (f", {n} requests" if n > 1 else "")
            clean = decode_rounds(sides, n, context, case, progress)
            yield from compare(case, sides, clean, llama_cpp=(must, None))
            yield attention_share(case, clean)


# ---- the replay ----


def replay_lines(trace, seconds):
    """Scaled requests, arriving at random over so many seconds; 0: all at once."""
    lines = []
    arrivals = list(traces.poisson(min(len(trace.requests), REPLAY_N)))
    for at, (_, n_prompt, n_output, _) in zip(arrivals, trace.requests):
        n_prompt = min(max(1, n_prompt // REPLAY_SCALE), REPLAY_CTX * 3 // 4)
        n_output = min(max(1, n_output // REPLAY_SCALE), REPLAY_CTX - n_prompt)
        lines.append(f"{at / arrivals[-1] * seconds * 1000:.1f} {n_prompt} {n_output}\n")
    return "".join(lines)


def replay_rows(case, answers, must=None):
    """Rows of each side, and how often ours has as many at once and as many tokens a second."""
    for name in OURS, RUNS:
        values = {"tokens/s": [a[name]["tokens"] / a[name]["seconds"] for a in answers],
                  "requests at once": [a[name]["running"] for a in answers]}
        for unit, found in values.items():
            yield row(case, name, unit, "higher", found)
        for metric in "ttft_ms", "itl_ms":
            for i, quantile in enumerate(["p50", "p99"]):
                yield row(case, f"{name} {metric[:4].strip('_')} {quantile}", "replay ms", "lower", [a[name][metric][i] for a in answers])
    for what, of, limit in (("at once", lambda a: a["running"], must), ("tokens/s", lambda a: a["tokens"] / a["seconds"], None)):
        yield row(case, f"{OURS} / {RUNS}, {what}", "replay ratio", "higher", [of(a[OURS]) / of(a[RUNS]) for a in answers], limit,
                  2.0 if must else None)


def replay(_, progress):
    """The same pool bytes with paging and without: all requests at once, then arriving at a rate that paging can serve."""
    trace = traces.load(Plan.trace) if Plan.trace else traces.generated("sharegpt")
    program = [pathlib.Path(os.environ["PAGED_BUILD"]) / "bench/engine_replay", os.environ["PAGED_MODEL"], CPUS, REPLAY_CTX,
               REPLAY_CTX * REPLAY_RUNS, REPLAY_N]
    sides = [ModelSide(OURS, program), ModelSide(RUNS, [*program, "contiguous"])]

    def ask(seconds, what):
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(replay_lines(trace, seconds))
            file.flush()
            return rounds(sides, lambda side: side.ask(file.name), f"replay of {trace.name}, {what}", progress, REPLAY_PATIENCE)

    case = f"{trace.name}, pool for {REPLAY_RUNS} × {REPLAY_CTX} tokens"
    at_once = ask(0, "all at once")
    yield from replay_rows(f"{case}, all at once", at_once, 2.0)
    if at_once:
        seconds = statistics.median(a[OURS]["seconds"] for a in at_once) / REPLAY_LOAD
        yield from replay_rows(f"{case}, over time", ask(seconds, "over time"))
    for side in sides:
        side.close()


# ---- layers of a larger model ----


def decode_8b(sides, progress):
    """Of one request, and how long reading the weights once for each token takes, over how long the tokens took on each side. What
    others read is of the size of ours within 3 %."""
    def ask(side, command, times):
        answer = side.ask(command, times)
        if side.name == OURS:
            read = side.ask("read 1", READS_8B)
            answer["read_s"] = read["each_s"]
            answer["clean"] &= read["clean"]
        return answer

    case = f"{NAME_8B}, decode after {DECODE_AT}"
    for side in sides:
        side.ask(f"prefill {DECODE_AT}")
    clean = decode_rounds(sides, 1, DECODE_AT, case, progress, ask)
    yield from compare(case, sides, clean, llama_cpp=(2.0, None))
    for side in sides[:2]:
        shares = [answers[OURS]["read_s"] * answers[side.name]["rate"] for answers in clean]
        metric, must = ("weight-read bound", 0.75) if side.name == OURS else (f"weight-read bound, {side.name}", None)
        yield row(case, metric, "share", "higher", shares, must)


def llama8b(_, progress):
    """What the layers of a model of eight billions cost, of which two stand for all."""
    progress.show("a model of random weights (once)")
    model = random_model.kept(os.environ["PAGED_CACHE_DIR"], random_model.LLAMA_8B, os.environ["PAGED_MODEL"])
    yield row(f"{NAME_8B}, load, warm file cache", "time", "ms", "lower", load_times(model, progress))
    sides = open_sides(progress, model)
    clean = rounds(sides, lambda side: side.ask("prefill 512"), f"{NAME_8B}, prefill", progress, 2)
    yield from compare(f"{NAME_8B}, prefill 512", sides, clean, llama_cpp=(7, None), OpenVINO_GenAI=(1.4, None))
    yield attention_share(f"prefill to 512, {NAME_8B}", clean)
    yield from decode_8b(sides, progress)
    yield from requests(sides, progress, f"{NAME_8B}, decode", steps=8)
    for side in sides:
        side.close()


CASES = load, decode, prefill, requests, batch, sampling, steps, contexts, replay, llama8b


# ---- tables ----


def number(r):
    if r["value"] is None:
        return "-"
    return {"share": f"{100 * r['value']:.1f} %", "ms": f"{r['value']:.2f} ms",
            "replay ms": f"{r['value']:.0f}"}.get(r["unit"], f"{r['value']:.0f}")


def limit(r):
    if r["must"] is None:
        return ""
    return ("≥ " if r["better"] == "higher" else "≤ ") + (f"{r['must']:g}" + (" ms" if r["unit"] == "ms" else ""))


def ratio(r):
    return "-" if r["value"] is None else f"{r['value']:.2f} ({r['low']:.2f}-{r['high']:.2f})"


def speed_table(rows):
    """One line for each case and peer."""
    yield "| case | paged, tokens/s | peer | its tokens/s | ratio (95 % interval) | rounds | must | verdict |"
    yield "|---|---|---|---|---|---|---|---|"
    rates = {(r["case"], r["metric"]): r for r in rows if r["unit"] == "tokens/s"}
    for r in rows:
        if r["unit"] != "ratio":
            continue
        peer, value = r["metric"].removeprefix(f"{OURS} / "), ratio(r)
        yield (f"| {r['case']} | {number(rates[r['case'], OURS])} | {peer} | {number(rates[r['case'], peer])} | {value} | "
               f"{r['rounds']} | {limit(r)} | {r['verdict']} |")


def limit_table(rows):
    """What has a limit of its own, and what a step costs."""
    yield "| case | what | value | rounds | must | verdict |"
    yield "|---|---|---|---|---|---|"
    for r in rows:
        if r["unit"] == "ms" or r["metric"].startswith("weight-read bound") or r["metric"] in SAMPLING:
            yield f"| {r['case']} | {r['metric']} | {number(r)} | {r['rounds']} | {limit(r)} | {r['verdict']} |"


def share_table(rows):
    yield "| step | attention's share | rounds |"
    yield "|---|---|---|"
    for r in sorted((r for r in rows if r["metric"] == "attention share"), key=lambda r: r["case"].split()[0]):
        yield f"| {r['case']} | {number(r)} | {r['rounds']} |"


def replay_table(rows):
    """One line for each way of replaying."""
    found = {(r["case"], r["metric"], r["unit"]): r for r in rows}
    cases = dict.fromkeys(r["case"] for r in rows if r["unit"] == "requests at once")
    yield "| replay | mode | requests at once | tokens/s | to first token p50 / p99, ms | between tokens p50 / p99, ms | rounds |"
    yield "|---|---|---|---|---|---|---|"
    for case in cases:
        for name in OURS, RUNS:
            at_once = found[case, name, "requests at once"]
            times = [" / ".join(number(found[case, f"{name} {what} {quantile}", "replay ms"]) for quantile in ("p50", "p99"))
                     for what in ("ttft", "itl")]
            yield (f"| {case} | {name} | {ratio(at_once).split()[0]} | {number(found[case, name, 'tokens/s'])} | {times[0]} | "
                   f"{times[1]} | {at_once['rounds']} |")
    yield ""
    yield "| replay | what | ratio (interval) | rounds | must | verdict |"
    yield "|---|---|---|---|---|---|"
    for r in rows:
        if r["unit"] == "replay ratio":
            yield f"| {r['case']} | {r['metric']} | {ratio(r)} | {r['rounds']} | {limit(r)} | {r['verdict']} |"


def requirement(file, package):
    lines = (ROOT / "bench/peers" / file).read_text(encoding="utf-8").splitlines()
    return next(line.split()[0] for line in lines if line.startswith(package))


def report(rows):
    yield (f"{machine()}; {pathlib.Path(os.environ['PAGED_MODEL']).name}; peers: llama.cpp native "
           f"({requirement('requirements.txt', 'llama')}), {requirement('requirements-genai.txt', 'openvino-genai')}")
    for table in speed_table, limit_table, share_table, replay_table:
        yield ""
        yield from table(rows)


def setup(script):
    """What it prints: the peer's program; None if there is none."""
    command = [sys.executable, ROOT / "bench/peers" / script, os.environ["PAGED_CACHE_DIR"]]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def open_sides(progress, model):
    build = pathlib.Path(os.environ["PAGED_BUILD"])
    sides = [ModelSide(OURS, [build / "bench/bench_engine", model, CPUS, N_CTX], times=4)]
    facts = subprocess.run([build / "paged", "inspect", "--json", model], check=True, stdout=subprocess.PIPE, text=True)
    if llama := setup("setup"):
        sides.append(ModelSide(LLAMA, [llama, model, CPUS, N_CTX], times=4))
    if python := setup("setup-genai"):
        peer = [python, ROOT / "bench/peers/genai_peer.py", model, CPUS, json.loads(facts.stdout)["vocab"]]
        sides.append(ModelSide(GENAI, peer, times=4))
    progress.show("the same model?")
    check_same_model(sides)
    return sides


def measure(args, progress):
    """Yields the rows as they come."""
    cases = [case for case in CASES if args.case in case.__name__]
    sides = open_sides(progress, os.environ["PAGED_MODEL"]) if set(cases) - {load, replay, llama8b} else []
    for case in cases:
        yield from case(sides, progress)
    for side in sides:
        side.close()


def main():
    parser = argparse.ArgumentParser(prog="./x bench engine")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--quick", action="store_true", help="a third of the rounds")
    pace.add_argument("--long", action="store_true", help="more rounds")
    parser.add_argument("--case", default="", metavar="FILTER", help="only those of " + ", ".join(case.__name__ for case in CASES) +
                        " that have this in their names")
    parser.add_argument("--trace", metavar="FILE", help="request trace of the replay")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/performance.md")
    args = parser.parse_args()
    if not any(args.case in case.__name__ for case in CASES):
        parser.error(f"no case has {args.case} in its name")
    Plan.choose(args)
    progress = Progress()
    rows = []
    for r in measure(args, progress):
        rows.append(r)
        if args.json:
            progress.show("")
            print(json.dumps(r), flush=True)
    progress.show("")
    lines = list(report(rows))
    if not args.json:
        print("\n".join(lines))
    if args.write_docs:
        write_docs("engine", lines)
    return any(r["verdict"] == "fail" for r in rows)


if __name__ == "__main__":
    sys.exit(main())
