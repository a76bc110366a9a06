#!/usr/bin/env python3
"""The engine beside llama.cpp and OpenVINO GenAI: prefill, decode of one request and of many, load time, what a step costs, and
attention's share of a step by context length.

    ./x bench engine [--json] [--long] [--case NAME] [--write-docs]      NAME: load, decode, prefill, requests, steps, contexts

All programs get as many threads as there are cores, and stay open. A round asks each of them once, in turns (A B C, C B A, …);
its ratios are paired, so that a machine that speeds up or slows down does not tell. A round counts only when every program had the
cores for itself: its own CPU time says so (98 % of wall × threads), or, since not all of them spin while they wait, nobody else's
does. Medians; intervals are 95 % bootstrap; a requirement is met when the lower bound meets it, and fewer than 15 clean rounds
decide nothing.

--json: one object a row. --long: more rounds. --write-docs: puts the tables into docs/performance.md.
Environment: PAGED_BUILD (build folder), PAGED_MODEL, PAGED_CACHE_DIR (where the peers are built). Exit status 1: a requirement
failed.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

from rounds import CLEAN, CPUS, MIN_ROUNDS, ROOT, Progress, Side, is_clean, machine, row as any_row, write_docs

CASE_S = 90             # seconds for the rounds of a case, so that a busy machine ends in "inconclusive" and not in waiting
PAUSE_S = 0.25          # the threads of a side spin for a while after its answer; the next one waits until they sleep
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
N_CTX = 8192
CONTEXTS = 512, 2048, 4096, 7680
DECODE_AT = 128         # decode so many tokens after as many
BATCHES = {8: 1.5, 16: 2.0, 32: 2.0}    # requests at once: must beside OpenVINO GenAI
STEPS = 1, 2, 4, 8, 16                  # requests at once: what a step costs
PROBES = 16             # short prompts, to see that all sides compute the same model
READS = 8               # of all weights, to know what memory gives in the same round
OURS, LLAMA, GENAI = "paged", "llama.cpp", "OpenVINO GenAI"


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
        """A command, or the sum of it several times, with its rate and whether the threads had the cores for themselves."""
        total = {"tokens": 0, "seconds": 0, "cpu_seconds": 0, "attn_seconds": 0, "bytes": 0}
        before = busy_seconds()
        for _ in range(times):
            answer = super().ask(command)
            for key in total:
                total[key] += answer.get(key, 0)
        others = busy_seconds() - before - total["cpu_seconds"]
        enough = (1 - CLEAN) * total["seconds"] * CPUS + 2 * TICK_S
        clean = is_clean(total) or (total["seconds"] > 20 * TICK_S and others <= enough)
        return answer | total | {"rate": total["tokens"] / total["seconds"], "clean": clean}


def row(case, metric, unit, better, values, must=None, aim=None):
    return any_row("engine", case, metric, unit, values, must, aim, better)


def rounds(sides, ask, wanted, label, progress):
    """Clean rounds, each {name of the side: answer}; fewer than wanted when the time for a case is over."""
    clean, i = [], 0
    give_up = time.monotonic() + CASE_S * max(1, wanted / MIN_ROUNDS)
    while len(clean) < wanted and time.monotonic() < give_up:
        progress.show(f"{label}: {len(clean)} of {wanted} rounds, {i - len(clean)} dropped")
        answers = {}
        for side in sides if i % 2 == 0 else reversed(sides):
            time.sleep(PAUSE_S)
            answers[side.name] = ask(side)
        i += 1
        if all(answer["clean"] for answer in answers.values()):
            clean.append(answers)
    return clean


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


# ---- cases: each gets all sides, ours first, and the numbers of rounds for short and for long ones ----


def load(sides, n_rounds, _, progress):
    """Warm: the file has just been read."""
    command = [pathlib.Path(os.environ["PAGED_BUILD"]) / "paged", "inspect", "--json", os.environ["PAGED_MODEL"]]
    times = []
    for i in range(n_rounds + 1):
        progress.show(f"load: {i} of {n_rounds}")
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        times.append(json.loads(done.stdout)["load_ms"])
    yield row("load, warm file cache", "time", "ms", "lower", times[1:], 500, 200)


def decode(sides, n_rounds, _, progress):
    def ask(side):
        side.ask(f"prefill {DECODE_AT}")
        answer = side.ask(f"decode {DECODE_AT}")
        if side.name == OURS:
            read = side.ask(f"read {READS}")
            # How long reading the weights once for each token takes, over how long the tokens took.
            answer["read_share"] = read["seconds"] / READS * DECODE_AT / answer["seconds"]
            answer["clean"] &= is_clean(read)
        return answer

    case = f"decode {DECODE_AT} after {DECODE_AT}"
    clean = rounds(sides, ask, n_rounds, "decode", progress)
    yield from compare(case, sides, clean, llama_cpp=(2.0, 2.4))
    yield row(case, "weight-read bound", "share", "higher", [answers[OURS]["read_share"] for answers in clean], 0.75, 0.9)
    yield attention_share(f"decode at {DECODE_AT}", clean)


def prefill(sides, n_rounds, _, progress):
    clean = rounds(sides, lambda side: side.ask("prefill 512", side.times), n_rounds, "prefill", progress)
    yield from compare("prefill 512", sides, clean, llama_cpp=(7, 10), OpenVINO_GenAI=(1.4, 1.8))
    yield attention_share("prefill to 512", clean)


def requests(sides, n_rounds, _, progress):
    """They stay open, so a round costs its tokens only; contexts grow on both sides alike."""
    sides = [side for side in sides if side.name != LLAMA]
    for n, must in BATCHES.items():
        for side in sides:
            progress.show(f"{side.name}: prefill of {n} requests")
            side.ask(f"requests {n} {DECODE_AT}")
        clean = rounds(sides, lambda side: side.ask("decode 24"), n_rounds, f"decode of {n} requests", progress)
        yield from compare(f"decode, {n} requests", sides, clean, OpenVINO_GenAI=(must, 2.5 if must >= 2 else None))


def steps(sides, n_rounds, _, progress):
    for n in STEPS:
        sides[0].ask(f"requests {n} {DECODE_AT}")
        clean = rounds(sides[:1], lambda side: side.ask("decode 32"), n_rounds, f"steps of {n} requests", progress)
        times = [1e3 * n * answers[OURS]["seconds"] / answers[OURS]["tokens"] for answers in clean]
        yield row(f"a step of {n} request{'s' if n > 1 else ''}", "time", "ms", "lower", times)


def contexts(sides, _, n_rounds, progress):
    """Decode at growing context, one request, which stays open."""
    sides = [side for side in sides if side.name != GENAI]
    for context in CONTEXTS:
        for side in sides:
            progress.show(f"{side.name}: prefill of {context}")
            time.sleep(PAUSE_S)
            answer = side.ask(f"prefill {context}")
            if side.name == OURS and context > 512:
                # The last chunk of the prompt: what a prefill pays at this length.
                _, seconds, attn_seconds = answer["chunks"][-1]
                yield row(f"prefill to {context}", "attention share", "share", "lower", [attn_seconds / seconds])
        clean = rounds(sides, lambda side: side.ask("decode 16"), n_rounds, f"decode at {context}", progress)
        yield from compare(f"decode at {context}", sides, clean, llama_cpp=(None, 1.0))
        yield attention_share(f"decode at {context}", clean)


CASES = load, decode, prefill, requests, steps, contexts


# ---- tables ----


def number(r):
    if r["value"] is None:
        return "-"
    return {"share": f"{100 * r['value']:.1f} %", "ms": f"{r['value']:.2f} ms"}.get(r["unit"], f"{r['value']:.0f}")


def limit(r):
    if r["must"] is None:
        return ""
    return ("≥ " if r["better"] == "higher" else "≤ ") + (f"{r['must']:g}" + (" ms" if r["unit"] == "ms" else ""))


def speed_table(rows):
    """One line for each case and peer."""
    yield "| case | paged, tokens/s | peer | its tokens/s | ratio (95 % interval) | rounds | must | verdict |"
    yield "|---|---|---|---|---|---|---|---|"
    rates = {(r["case"], r["metric"]): r for r in rows if r["unit"] == "tokens/s"}
    for r in rows:
        if r["unit"] != "ratio":
            continue
        peer = r["metric"].removeprefix(f"{OURS} / ")
        value = "-" if r["value"] is None else f"{r['value']:.2f} ({r['low']:.2f}-{r['high']:.2f})"
        yield (f"| {r['case']} | {number(rates[r['case'], OURS])} | {peer} | {number(rates[r['case'], peer])} | {value} | "
               f"{r['rounds']} | {limit(r)} | {r['verdict']} |")


def limit_table(rows):
    """What has a limit of its own, and what a step costs."""
    yield "| case | what | value | rounds | must | verdict |"
    yield "|---|---|---|---|---|---|"
    for r in rows:
        if r["unit"] == "ms" or r["metric"] == "weight-read bound":
            yield f"| {r['case']} | {r['metric']} | {number(r)} | {r['rounds']} | {limit(r)} | {r['verdict']} |"


def share_table(rows):
    yield "| step | attention's share | rounds |"
    yield "|---|---|---|"
    for r in sorted((r for r in rows if r["metric"] == "attention share"), key=lambda r: r["case"].split()[0]):
        yield f"| {r['case']} | {number(r)} | {r['rounds']} |"


def requirement(file, package):
    lines = (ROOT / "bench/peers" / file).read_text(encoding="utf-8").splitlines()
    return next(line.split()[0] for line in lines if line.startswith(package))


def report(rows):
    yield (f"{machine()}; {pathlib.Path(os.environ['PAGED_MODEL']).name}; peers: llama.cpp native "
           f"({requirement('requirements.txt', 'llama')}), {requirement('requirements-genai.txt', 'openvino-genai')}")
    for table in speed_table, limit_table, share_table:
        yield ""
        yield from table(rows)


def setup(script):
    """What it prints: the peer's program; None if there is none."""
    command = [sys.executable, ROOT / "bench/peers" / script, os.environ["PAGED_CACHE_DIR"]]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def open_sides(progress):
    model = os.environ["PAGED_MODEL"]
    build = pathlib.Path(os.environ["PAGED_BUILD"])
    sides = [ModelSide(OURS, [build / "bench/bench_engine", model, CPUS, N_CTX], times=4)]
    facts = subprocess.run([build / "paged", "inspect", "--json", model], check=True, stdout=subprocess.PIPE, text=True)
    if llama := setup("setup"):
        sides.append(ModelSide(LLAMA, [llama, model, CPUS, N_CTX]))
    if python := setup("setup-genai"):
        peer = [python, ROOT / "bench/peers/genai_peer.py", model, CPUS, json.loads(facts.stdout)["vocab"]]
        sides.append(ModelSide(GENAI, peer, times=4))
    progress.show("the same model?")
    check_same_model(sides)
    return sides


def measure(args, progress):
    """Yields the rows as they come."""
    sides = open_sides(progress)
    for case in CASES:
        if args.case in (None, case.__name__):
            yield from case(sides, 60 if args.long else 18, 40 if args.long else MIN_ROUNDS, progress)
    for side in sides:
        side.close()


def main():
    parser = argparse.ArgumentParser(prog="./x bench engine")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--long", action="store_true", help="more rounds")
    parser.add_argument("--case", choices=[case.__name__ for case in CASES], help="only this one")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/performance.md")
    args = parser.parse_args()
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
