#!/usr/bin/env python3
"""Prefill and decode of one request beside llama.cpp, and attention's share of a step by context length.

    ./x bench engine [--json] [--long] [--write-docs]

Both programs are built for this machine, get as many threads as there are cores, and stay open. A round asks each of them once,
in turns (A B, B A, …); its ratio is paired, so that a machine that speeds up or slows down does not tell. A round in which the
threads did not have the cores for themselves (CPU time below 98 % of wall × threads) does not count. Medians; intervals are 95 %
bootstrap; a requirement is met when the lower bound meets it, and fewer than 15 clean rounds decide nothing.

--json: one object a row. --long: more rounds. --write-docs: puts the table into docs/performance.md.
Environment: PAGED_BUILD (build folder), PAGED_MODEL, PAGED_CACHE_DIR (where the peer is built). Exit status 1: a requirement failed.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

from rounds import CPUS, MIN_ROUNDS, ROOT, Progress, Side, is_clean, machine, row as any_row, write_docs

CASE_S = 60             # seconds for the rounds of a case, so that a busy machine ends in "inconclusive" and not in waiting
PAUSE_S = 0.25          # the threads of a side spin for a while after its answer; the other one waits until they sleep
N_CTX = 8192
CONTEXTS = 512, 2048, 4096, 7680
DECODE_AT = 128         # the must: this many tokens after as many
PROBES = 8              # short prompts, to see that both sides compute the same model


class ModelSide(Side):
    """A program that speaks the protocol of bench/protocol.h."""

    def ask(self, verb, n):
        """One command; the answer with its rate and whether the threads had the cores for themselves."""
        answer = super().ask(f"{verb} {n}")
        answer["rate"] = answer["tokens"] / answer["seconds"]
        answer["clean"] = is_clean(answer)
        return answer


def row(case, metric, unit, better, values, must=None, aim=None):
    return any_row("engine", case, metric, unit, values, must, aim, better)


def rounds(sides, ask, wanted, label, progress):
    """Clean rounds, each a pair of answers in the order of `sides`; fewer than wanted when the time for a case is over."""
    clean, i = [], 0
    give_up = time.monotonic() + CASE_S * max(1, wanted / MIN_ROUNDS)
    while len(clean) < wanted and time.monotonic() < give_up:
        progress.show(f"{label}: {len(clean)} of {wanted} rounds, {i - len(clean)} dropped")
        answers = {}
        for side in sides if i % 2 == 0 else reversed(sides):
            time.sleep(PAUSE_S)
            answers[side] = ask(side)
        i += 1
        if all(answer["clean"] for answer in answers.values()):
            clean.append([answers[side] for side in sides])
    return clean


def compare(case, clean, must=None, aim=None):
    """Three rows of a case: ours, the peer's, the paired ratio."""
    rates = [[answer["rate"] for answer in pair] for pair in clean]
    yield row(case, "paged", "tokens/s", "higher", [ours for ours, _ in rates])
    yield row(case, "llama.cpp", "tokens/s", "higher", [peer for _, peer in rates])
    yield row(case, "paged / llama.cpp", "ratio", "higher", [ours / peer for ours, peer in rates], must, aim)


def share(answers):
    return [answer["attn_seconds"] / answer["seconds"] for answer in answers]


def check_same_model(sides):
    """A peer that computes something else would be no peer: after short prompts both must mostly choose the same token."""
    same = sum(len({side.ask("prefill", 16 + 5 * i)["token"] for side in sides}) == 1 for i in range(PROBES))
    if same <= PROBES // 2:
        sys.exit(f"bench: the two programs chose the same token after only {same} of {PROBES} prompts")


def short_cases(sides, n_rounds, progress):
    def decode(side):
        side.ask("prefill", DECODE_AT)
        return side.ask("decode", DECODE_AT)

    clean = rounds(sides, decode, n_rounds, "decode", progress)
    yield from compare(f"decode {DECODE_AT} after {DECODE_AT}", clean, must=1.0)
    yield row(f"decode at {DECODE_AT}", "attention share", "share", "lower", share([ours for ours, _ in clean]))
    clean = rounds(sides, lambda side: side.ask("prefill", 512), n_rounds, "prefill", progress)
    yield from compare("prefill 512", clean, aim=1.0)
    yield row("prefill to 512", "attention share", "share", "lower", share([ours for ours, _ in clean]))


def long_cases(sides, n_rounds, n_tokens, progress):
    """Decode at growing context. The request stays open, so a round costs its tokens only."""
    for context in CONTEXTS:
        for side in sides:
            progress.show(f"{side.name}: prefill of {context}")
            time.sleep(PAUSE_S)
            answer = side.ask("prefill", context)
            if side is sides[0] and context > 512:
                # The last chunk of the prompt: what a prefill pays at this length.
                _, seconds, attn_seconds = answer["chunks"][-1]
                yield row(f"prefill to {context}", "attention share", "share", "lower", [attn_seconds / seconds])
        clean = rounds(sides, lambda side: side.ask("decode", n_tokens), n_rounds, f"decode at {context}", progress)
        yield from compare(f"decode at {context}", clean, aim=1.0)
        yield row(f"decode at {context}", "attention share", "share", "lower", share([ours for ours, _ in clean]))


def number(value, unit):
    if value is None:
        return "-"
    if unit == "share":
        return f"{100 * value:.1f} %"
    return f"{value:.0f}"


def speed_table(rows):
    """Lines of the table of speeds: one line a case."""
    yield "| case | paged, tokens/s | llama.cpp, tokens/s | ratio (95 % interval) | rounds | must | verdict |"
    yield "|---|---|---|---|---|---|---|"
    by_case = {}
    for r in rows:
        if r["unit"] != "share":
            by_case.setdefault(r["case"], {})[r["metric"]] = r
    for case, metrics in by_case.items():
        ours, peer, ratio = (metrics[name] for name in ("paged", "llama.cpp", "paged / llama.cpp"))
        must = "" if ratio["must"] is None else f"≥ {ratio['must']:g}"
        value = "-" if ratio["value"] is None else f"{ratio['value']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})"
        yield (f"| {case} | {number(ours['value'], 'tokens/s')} | {number(peer['value'], 'tokens/s')} | {value} | "
               f"{ratio['rounds']} | {must} | {ratio['verdict']} |")


def share_table(rows):
    yield "| step | attention's share | rounds |"
    yield "|---|---|---|"
    for r in sorted((r for r in rows if r["unit"] == "share"), key=lambda r: r["case"].split()[0]):
        yield f"| {r['case']} | {number(r['value'], 'share')} | {r['rounds']} |"


def report(rows, peer_name):
    yield f"{machine()}; {pathlib.Path(os.environ['PAGED_MODEL']).name}; peer: {peer_name}"
    yield ""
    yield from speed_table(rows)
    yield ""
    yield from share_table(rows)


def measure(args, progress):
    """Yields the rows as they come."""
    setup = [sys.executable, ROOT / "bench/peers/setup", os.environ["PAGED_CACHE_DIR"]]
    peer = subprocess.run(setup, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    common = [os.environ["PAGED_MODEL"], CPUS, N_CTX]
    sides = [ModelSide("paged", [pathlib.Path(os.environ["PAGED_BUILD"]) / "bench/bench_engine", *common]),
             ModelSide("llama.cpp", [peer, *common])]
    check_same_model(sides)
    short = list(short_cases(sides, 60 if args.long else 18, progress))
    yield from short
    if any(r["rounds"] for r in short):
        yield from long_cases(sides, 40 if args.long else MIN_ROUNDS, 32 if args.long else 16, progress)
    else:
        progress.show("")
        print("bench: something else uses the cores, so no round was clean; the longer cases are left out", file=sys.stderr)
    for side in sides:
        side.close()


def main():
    parser = argparse.ArgumentParser(prog="./x bench engine")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--long", action="store_true", help="more rounds")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/performance.md")
    args = parser.parse_args()
    progress = Progress()
    rows = []
    for r in measure(args, progress):
        rows.append(r)
        if args.json:
            progress.show("")
            print(json.dumps(r), flush=True)
    progress.show("")
    requirement = (ROOT / "bench/peers/requirements.txt").read_text(encoding="utf-8").splitlines()[-1].split()[0]
    lines = list(report(rows, f"llama.cpp native ({requirement})"))
    if not args.json:
        print("\n".join(lines))
    if args.write_docs:
        write_docs("engine", lines)
    return any(r["verdict"] == "fail" for r in rows)


if __name__ == "__main__":
    sys.exit(main())
