#!/usr/bin/env python3
"""Attention against the machine's limits, against itself, and beside other people's.

    ./x bench attn [--json] [--quick] [--peers none|all|NAME,…] [--case FILTER] [--write-docs]

Measures in rounds (bench/rounds.py, bench/attn_bench.py) what bench/attn_cases.py and bench/attn_peers.py describe. Peers: vllm,
openvino, onnxruntime, ggml; they are installed once, 3 GB to load with vllm. A full run takes some twenty minutes, --quick
two.

--json: one object a row. --case: only cases whose name contains FILTER. --loaded: count rounds although something else uses the
cores, to try the bench itself; then nothing is decided. --write-docs: the table and the picture into docs/.
Environment: PAGED_BUILD (build folder), PAGED_CACHE_DIR (where the peers are). Exit status 1: a requirement failed.
"""

import argparse
import json
import sys

import attn_cases
import attn_peers
import attn_plot
from attn_bench import Bench
from rounds import ROOT, Ended, Progress, machine, write_docs

PICTURE = ROOT / "docs/attention.svg"
BAR = 20


def parse_arguments():
    parser = argparse.ArgumentParser(prog="./x bench attn")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--quick", action="store_true", help="two minutes: fewer rounds and peers' cases")
    parser.add_argument("--peers", default="all", metavar="none|all|NAME,…", help=", ".join(attn_peers.NAMES))
    parser.add_argument("--case", default="", metavar="FILTER", help="only cases whose name contains it")
    parser.add_argument("--loaded", action="store_true", help="count rounds beside other work; decides nothing")
    parser.add_argument("--write-docs", action="store_true", help="put table and picture into docs/")
    args = parser.parse_args()
    if args.loaded and args.write_docs:
        parser.error("figures measured beside other work do not belong into docs/")
    args.peers = {"all": list(attn_peers.NAMES), "none": []}.get(args.peers, args.peers.split(","))
    unknown = set(args.peers) - set(attn_peers.NAMES)
    if unknown:
        parser.error(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(attn_peers.NAMES)}")
    return args


def cases(args):
    """(name, function of the bench and the choices of settings) of all that is to be measured."""
    chosen = [(name, lambda bench, _, case=case: case(bench)) for name, case in attn_cases.CASES]
    for name, *rest in attn_peers.CASES[:attn_peers.N_QUICK if args.quick else None] if args.peers else []:
        chosen.append((name, lambda bench, choices, name=name, rest=rest: attn_peers.beside_peers(bench, choices, name, *rest)))
    return [(name, case) for name, case in chosen if args.case.lower() in name.lower()]


def measure(args, progress):
    """Yields the rows as they come."""
    wanted = cases(args)
    if not wanted:
        sys.exit(f"bench: no case has `{args.case}` in its name")
    bench, choices = Bench(args, progress), None
    for i, (name, case) in enumerate(wanted):
        done = BAR * i // len(wanted)
        bench.label = f"[{'#' * done}{'.' * (BAR - done)}] {i + 1}/{len(wanted)} {name}"
        if name.startswith("peers:") and choices is None:
            choices = attn_peers.Choices(bench, attn_peers.start(bench, args.peers))
        try:
            yield from case(bench, choices)
        except Ended as reason:
            if bench.ours.ended:
                raise
            progress.say(f"{name} is given up: {reason}")
    progress.show("")
    bench.close()


def number(value, unit):
    if unit == "share":
        return f"{100 * value:.2f} %" if abs(value) < .1 else f"{100 * value:.1f} %"
    return f"{value:.3f}" if unit == "ratio" else f"{value:.2f}" if unit == "µs" else f"{value:.0f}"


def bound(row, key):
    if row[key] is None:
        return ""
    return f"{'≥' if row['better'] == 'higher' else '≤'} {number(row[key], row['unit'])}"


def with_interval(row):
    if row["value"] is None:
        return "-"
    low, high = (number(row[key], row["unit"]) for key in ("low", "high"))
    unit = f" {row['unit']}" if row["unit"] not in ("share", "ratio") else ""
    return f"{number(row['value'], row['unit'])}{unit} ({low} … {high})"


def last_cells(row):
    """must, aim, rounds with the regime of memory, verdict."""
    regime = f", {row['regime']}" if row["regime"] else ""
    verdict = row["verdict"] if row["must"] is not None else ""
    return f"{bound(row, 'must')} | {bound(row, 'aim')} | {row['rounds']}{regime} | {verdict} |"


def own_table(rows):
    yield "| case | what | value (95 % interval) | must | aim | rounds | verdict |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        what = row["metric"] + (f" ({row['note']})" if row.get("note") else "")
        yield f"| {row['case']} | {what} | {with_interval(row)} | {last_cells(row)}"


def peers_table(rows):
    """One line a ratio, with the two rates that it is made of."""
    yield ("| case | peer, its version, setting and error | ours, tokens/s a layer | theirs | ratio (95 % interval) | must | aim | "
           "rounds | verdict |")
    yield "|---|---|---|---|---|---|---|---|---|"
    rates = {(row["case"], row["metric"].removesuffix(", one layer")): row for row in rows if row["unit"] == "tokens/s"}
    for row in rows:
        if row["unit"] != "ratio":
            continue
        kv_type, peer = row["metric"].removesuffix(", tokens/s").split(" / ")
        ours, theirs = rates.get((row["case"], kv_type)), rates.get((row["case"], peer))
        note = theirs["note"] if theirs else row.get("note", "")
        yield (f"| {row['case'].removeprefix('peers: ')} | {peer} ({note}) | {rate(ours)} | {rate(theirs)} | "
               f"{with_interval(row)} | {last_cells(row)}")


def rate(row):
    return "-" if not row or row["value"] is None else f"{row['value']:.0f}"


def report(rows):
    beside = [row for row in rows if row["case"].startswith("peers:")]
    own = [row for row in rows if row not in beside]
    yield machine()
    if own:
        yield from ("", *own_table(own))
    if beside:
        yield from ("", *peers_table(beside))


def main():
    args, progress, rows = parse_arguments(), Progress(), []
    for row in measure(args, progress):
        rows.append(row)
        if args.json:
            progress.show("")
            print(json.dumps(row, ensure_ascii=False), flush=True)
    lines = list(report(rows))
    if not args.json:
        print("\n".join(lines))
    if args.write_docs:
        write_docs("attn", [*lines, "", "![Attention beside the machine's limits and others](attention.svg)"])
        PICTURE.write_text(attn_plot.draw(rows), encoding="utf-8")
    return any(row["verdict"] == "fail" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
