#!/usr/bin/env python3
"""What the cache does with memory: slots, requests at once, reuse, its own time and size. No model computes here.

    ./x bench cache [--trace FILE]... [--json] [--write-docs]

FILE is a request trace (formats: bench/traces.py), replayed through the real cache by bench/cache_replay.c. Without one, loads of
the same shape as the public traces are generated. The oracles are not ours to tune: the arithmetic of lengths, a brute-force
search for common prefixes (bench/reusable.py), and simulations of what memory does without paging (bench/reserving.py).

--json: one object a row. --write-docs: puts tables and plots into docs/memory.md. Environment: PAGED_BUILD, PAGED_MODEL.
Exit status 1: a requirement failed.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

import charts
import reserving
import reusable
import rounds
import traces

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs/memory.md"
BUILD = pathlib.Path(os.environ.get("PAGED_BUILD", ROOT / "build/release"))

GENERATED = "azure_conv", "azure_code", "mooncake", "sharegpt", "arxiv"
POOL_TOKENS = 131072      # 16 GiB of LLaMA-3-8B in f16, at 128 KiB a token
BLOCK_SIZES = 8, 16, 32, 64, 128, 256
LRU_SHARES = 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0


class Progress(rounds.Progress):
    """With a bar, since the number of steps is known."""

    def __init__(self, n_steps):
        self.step, self.n_steps = 0, n_steps

    def show(self, text):
        if text:
            self.step += 1
            done = min(20, 20 * self.step // self.n_steps)
            text = f"[{'#' * done}{'.' * (20 - done)}] {text}"
        super().show(text)


def replay(mode, trace, *options):
    words = [BUILD / "bench/cache_replay", mode, "--run", str(trace.run), *map(str, options)]
    done = subprocess.run(words, input=trace.lines(), text=True, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def row(case, metric, unit, better, values, must=None, aim=None):
    """`values`: one for a figure that is the same in every run, several for one that is timed."""
    value, low, high = rounds.interval(values) if len(values) > 1 else (values[0],) * 3
    return {"bench": "cache", "case": case, "metric": metric, "unit": unit, "better": better, "value": value, "low": low,
            "high": high, "must": must, "aim": aim, "verdict": rounds.verdict_of(low, high, better, must, 1, least=1)}


# ---- memory ----

def slots(trace):
    """Tokens stored by slots taken, each request when it ends, and the best that whole tiles of 16 allow."""
    totals = [prompt + output for _, prompt, output, _ in trace.requests]
    best = sum(totals) / sum((n + 15) // 16 * 16 for n in totals)
    got = replay("serial", trace, "--no-index")
    yield row(trace.name, "stored / taken, block 16", "share", "higher", [got["tokens"] / got["slots"]], 0.993,
              best - 0.0002)
    yield row(trace.name, "arithmetic best, tiles of 16", "share", "higher", [best])
    tails = replay("serial", trace, "--no-index", "--block", 64, "--tails")
    yield row(trace.name, "stored / taken, block 64 with packed tails", "share", "higher",
              [tails["tokens"] / tails["slots"]], 0.992, got["tokens"] / got["slots"] - 0.0005)


def block_sizes(trace):
    for block in BLOCK_SIZES:
        got = replay("serial", trace, "--no-index", "--block", block)
        yield row(f"{trace.name}, block {block}", "wasted slots", "share", "lower", [1 - got["tokens"] / got["slots"]])
        if block >= 32:
            got = replay("serial", trace, "--no-index", "--block", block, "--tails")
            yield row(f"{trace.name}, block {block}", "wasted slots, packed tails", "share", "lower",
                      [1 - got["tokens"] / got["slots"]])


def at_once(trace):
    """Requests that run at once in a pool of the same size, three ways."""
    longest = max(prompt + output for _, prompt, output, _ in trace.requests)
    pool = max(POOL_TOKENS, 2 * longest)
    paged = replay("saturate", trace, "--no-index", "--pool", pool)
    ways = reserving.maximum(trace, pool), reserving.first_fit(trace, pool)
    case = f"{trace.name}, {pool} tokens"
    yield row(case, "paged", "requests at once", "higher", [paged["running"]])
    for name, way in zip(("maximum reserved", "first fit of exact sizes"), ways):
        yield row(case, name, "requests at once", "higher", [way.running])
        for what in "stored", "reserved", "blocked":
            yield row(case, f"{name}: {what}", "share of the pool", "lower", [getattr(way, what)])
    stored = paged["tokens"] / (paged["steps"] / 16) / pool
    yield row(case, "paged: stored", "share of the pool", "higher", [stored])
    yield row(case, "paged / maximum reserved", "ratio", "higher", [paged["running"] / ways[0].running],
              5 if "conv" in trace.name and "azure" in trace.name else None)
    yield row(case, "paged / first fit", "ratio", "higher", [paged["running"] / ways[1].running])
    yield row(case, "preempted", "requests", "lower", [paged["preempted"]])


def reuse(trace):
    want = list(reusable.reusable(trace))
    got = replay("serial", trace)["reused"]
    n_wrong = sum(a != b for a, b in zip(want, got))
    yield row(trace.name, "reused / reusable", "share", "higher", [sum(got) / sum(want)], 1.0, 1.0)
    yield row(trace.name, "requests whose reuse is not the longest", "requests", "lower", [n_wrong], 0)
    prompts = sum(r[1] for r in trace.requests)
    yield row(trace.name, "reusable", "share of prompt tokens", "higher", [sum(want) / prompts])


def least_recently_used(trace, progress):
    """Reuse in pools smaller than what all requests would fill."""
    total = sum((prompt + output + 15) // 16 * 16 for _, prompt, output, _ in trace.requests)
    longest = max(prompt + output for _, prompt, output, _ in trace.requests) + 64
    for share in LRU_SHARES:
        if share * total < longest:
            continue
        progress.show(f"{trace.name}: reuse in {share:.0%}")
        got = replay("lru", trace, "--pool", int(share * total))
        yield row(f"{trace.name}, pool {share:.0%} of all tokens", "reused", "share of prompt tokens", "higher",
                  [got["reused_tokens"] / got["prompt_tokens"]])


# ---- time ----

def bookkeeping(progress):
    progress.show("bookkeeping of a million blocks")
    got = json.loads(subprocess.run([BUILD / "bench/bench_cache", "--json"], text=True, stdout=subprocess.PIPE,
                                    check=True).stdout)
    yield row("1 M blocks", "alloc + append + free", "ns a block", "lower", got["cycle_ns"], 60, 20)
    yield row("1 M blocks", "the same through the index, 0 % hits", "ns a block", "lower", got["indexed_ns"])
    yield row("1 M blocks", "the same, each evicts one", "ns a block", "lower", got["refill_ns"])
    yield row("100,000 cached tokens", "match", "ms", "lower", got["match_ms"], 3, 1)
    yield row("LLaMA-3-8B, 64 GiB", "metadata and tables", "share of the pool", "lower", [got["metadata_share"]], 0.001)
    case = f"burst of 1024 sequences in SmolLM2's shape, {got['free_mib']:.0f} MiB free after it"
    yield row(case, "returned to the system within 60 s", "share of what is free", "higher", [got["returned_share"]], 0.8, 0.95)
    yield row(case, "until nothing more came", "s", "lower", [got["returned_s"]], 60)
    yield row(case, "compaction in all", "ms", "lower", [got["compact_ms"]])
    yield row("a prompt's first writes", "new memory", "ms a MiB", "lower", got["cold_ms"])
    yield row("a prompt's first writes", "warm memory", "ms a MiB", "lower", got["warm_ms"])


def decode_step_seconds():
    """Of the real engine, one request; None without a model."""
    if not os.environ.get("PAGED_MODEL"):
        return None
    words = [BUILD / "bench/bench_engine", os.environ["PAGED_MODEL"], str(len(os.sched_getaffinity(0))), "8192"]
    done = subprocess.run(words, input="prefill 128\ndecode 64\ndecode 64\ndecode 64\n", text=True,
                          stdout=subprocess.PIPE, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()][1:]
    return min(answer["seconds"] / answer["tokens"] for answer in answers)


def index_loss(trace, progress):
    """CPU time that the index adds to a replay in which it finds nothing, a step, by the time of the shortest real step."""
    step = decode_step_seconds()
    if step is None:
        return
    longest = sum(prompt + output for _, prompt, output, _ in trace.requests)
    losses = []
    for i in range(7):
        progress.show(f"loss with the index, round {i + 1}")
        pair = [replay("clock", trace, "--pool", longest, *extra) for extra in (["--no-index"], [])]
        losses.append((pair[1]["cpu_seconds"] - pair[0]["cpu_seconds"]) / pair[0]["steps"] / step)
    yield row(f"{trace.name}, 0 % hits", "loss with the index", "share of a decode step", "lower", losses, 0.02, 0.005)


# ---- report ----

def number(r):
    unit, value = r["unit"], r["value"]
    if unit.startswith("share"):
        return f"{100 * value:.3f} %" if value < 0.01 or value > 0.9 else f"{100 * value:.1f} %"
    if unit in ("requests", "s"):
        return f"{value:.0f} {unit if unit == 's' else ''}".strip()
    return f"{value:.2f} {'' if unit in ('ratio', 'requests at once') else unit}".strip()


def limit(r, key):
    if r[key] is None:
        return ""
    sign = "≥" if r["better"] == "higher" else "≤"
    return f"{sign} {number({**r, 'value': r[key]})}"


def table(rows):
    yield "| case | figure | measured | must | aim | verdict |"
    yield "|---|---|---|---|---|---|"
    for r in rows:
        verdict = r["verdict"] if r["must"] is not None else ""
        yield f"| {r['case']} | {r['metric']} | {number(r)} | {limit(r, 'must')} | {limit(r, 'aim')} | {verdict} |"


# metric -> heading of its column, for parts that have the same figures for every case
COLUMNS = {
    "slots": {"arithmetic best, tiles of 16": "best of tiles of 16", "stored / taken, block 16": "block 16",
              "stored / taken, block 64 with packed tails": "block 64, packed tails"},
    "block sizes": {"wasted slots": "wasted", "wasted slots, packed tails": "wasted with packed tails"},
    "at once": {"maximum reserved": "maximum reserved", "first fit of exact sizes": "first fit of exact sizes",
                "paged": "paged", "paged / maximum reserved": "paged / maximum", "paged / first fit": "paged / first fit",
                "preempted": "preempted"},
    "where": {"maximum reserved: stored": "maximum: stored", "maximum reserved: reserved": "reserved, not used",
              "maximum reserved: blocked": "free, too small", "first fit of exact sizes: stored": "first fit: stored",
              "first fit of exact sizes: reserved": "reserved, not yet used",
              "first fit of exact sizes: blocked": "free, too small", "paged: stored": "paged: stored"},
    "lru": {"reused": "prompt tokens reused"},
}


def wide_table(rows, columns):
    """One line a case, one column a figure; limits stand in the heading."""
    cases = {}
    for r in rows:
        cases.setdefault(r["case"], {})[r["metric"]] = r
    limits = {metric: next((f" (must {limit(r, 'must')})" for r in rows if r["metric"] == metric and r["must"] is not None), "")
              for metric in columns}
    has_verdict = any(limits.values())
    yield "| case | " + " | ".join(head + limits[m] for m, head in columns.items()) + (" | verdict |" if has_verdict else " |")
    yield "|---" * (1 + len(columns) + has_verdict) + "|"
    for case, figures in cases.items():
        cells = [number(figures[m]) if m in figures else "" for m in columns]
        judged = [figures[m]["verdict"] for m in columns if m in figures and figures[m]["must"] is not None]
        worst = next((v for v in ("fail", "inconclusive", "pass") if v in judged), "")
        yield f"| {case} | " + " | ".join(cells) + (f" | {worst} |" if has_verdict else " |")


def by_case(rows, metric):
    return {r["case"]: r["value"] for r in rows if r["metric"] == metric}


def plots(parts):
    """name -> SVG."""
    fit = parts["at once"]
    cases = list(by_case(fit, "paged"))
    series = {name: [by_case(fit, name)[case] for case in cases]
              for name in ("maximum reserved", "first fit of exact sizes", "paged")}
    yield "at-once", charts.bars("Requests that run at once in the same pool", "requests", [c.split(",")[0] for c in cases],
                                 series)
    waste = parts["block sizes"]
    values = {name: {int(case.rsplit(" ", 1)[1]): 100 * v for case, v in by_case(waste, name).items()}
              for name in ("wasted slots", "wasted slots, packed tails")}
    yield "block-sizes", charts.bars("Slots that hold no token, by block size", "% of slots taken",
                                     [str(b) for b in BLOCK_SIZES],
                                     {name: [v.get(b) for b in BLOCK_SIZES] for name, v in values.items()})
    curves = {}
    for r in parts["lru"]:
        name, share = r["case"].rsplit(", pool ", 1)
        curves.setdefault(name, []).append((float(share.split("%")[0]), 100 * r["value"]))
    if curves:
        yield "reuse", charts.lines("Prompt tokens reused, by size of the pool", "pool, % of all tokens of the trace",
                                    "% of prompt tokens", curves)


TITLES = {"slots": "Slots that hold a token", "block sizes": "Block sizes", "at once": "Requests at once",
          "reuse": "Reuse to the token", "lru": "Reuse when the pool is smaller", "time": "The cache's own time and size"}
PICTURES = {"block sizes": "block-sizes", "at once": "at-once", "lru": "reuse"}


def report(parts, pictures):
    yield rounds.machine()
    for key, rows in parts.items():
        if not rows:
            continue
        yield from ("", f"### {TITLES[key]}", "")
        if key in PICTURES and PICTURES[key] in pictures:
            yield from (f"![{TITLES[key]}](plots/{PICTURES[key]}.svg)", "")
        if key not in COLUMNS:
            yield from table(rows)
            continue
        yield from wide_table(rows, COLUMNS[key])
        if key == "at once":
            yield from ("", "Where the pool goes, mean over steps:", "")
            yield from wide_table(rows, COLUMNS["where"])


def write_docs(parts):
    pictures = dict(plots(parts))
    (DOCS.parent / "plots").mkdir(exist_ok=True)
    for name, svg in pictures.items():
        (DOCS.parent / f"plots/{name}.svg").write_text(svg, encoding="utf-8")
    rounds.write_docs("cache", report(parts, pictures), DOCS)


def measure(loads, progress):
    """Yields (part, row) as they come."""
    for trace in loads:
        progress.show(f"{trace.name}: slots")
        yield from (("slots", r) for r in slots(trace))
    progress.show(f"{loads[0].name}: block sizes")
    yield from (("block sizes", r) for r in block_sizes(loads[0]))
    for trace in loads:
        progress.show(f"{trace.name}: requests at once")
        yield from (("at once", r) for r in at_once(trace))
    for trace in (t for t in loads if t.run):
        progress.show(f"{trace.name}: reuse")
        yield from (("reuse", r) for r in reuse(trace))
        yield from (("lru", r) for r in least_recently_used(trace, progress))
    yield from (("time", r) for r in bookkeeping(progress))
    yield from (("time", r) for r in index_loss(loads[0], progress))


def main():
    parser = argparse.ArgumentParser(prog="./x bench cache", epilog="example: ./x bench cache --trace azure_conv.csv")
    parser.add_argument("--trace", action="append", default=[], metavar="FILE", help="a request trace; several are fine")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--write-docs", action="store_true", help="put tables and plots into docs/memory.md")
    args = parser.parse_args()
    try:
        loads = [traces.load(path) for path in args.trace] or [traces.generated(name) for name in GENERATED]
    except (OSError, ValueError, KeyError) as problem:
        sys.exit(f"bench: {problem}")
    progress = Progress(3 * len(loads) + len(LRU_SHARES) * sum(t.run > 0 for t in loads) + 9)
    parts = {}
    for part, r in measure(loads, progress):
        parts.setdefault(part, []).append(r)
        if args.json:
            progress.show("")
            print(json.dumps(r), flush=True)
    progress.show("")
    if not args.json:
        print("\n".join(report(parts, {})))
    if args.write_docs:
        write_docs(parts)
    return any(r["verdict"] == "fail" for rows in parts.values() for r in rows)


if __name__ == "__main__":
    sys.exit(main())
