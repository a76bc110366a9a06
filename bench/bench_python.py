#!/usr/bin/env python3
"""The Python package: what a call costs, and the document's comparison of paged and contiguous attention.

    ./x bench python [--json] [--case FILTER] [--quick] [--loaded] [--write-docs]

One thread, in rounds (bench/rounds.py); a round in which the thread did not have a core for itself does not count. --loaded: it
counts all the same, and nothing is decided. --quick: fewer rounds, prompts up to 2048. Exit status 1: a requirement failed.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
from rounds import CLEAN, MIN_ROUNDS, Progress, machine, row, write_docs

BUILD = pathlib.Path(os.environ["PAGED_BUILD"])
sys.path.insert(0, str(BUILD / "python"))
import paged  # noqa: E402 (found by the line above)

HEADS, DIM = 32, 64  # the document's shape
LENGTHS = {2048: 0.04, 4096: 0.05, 8192: None}  # tokens: the overhead that the document states
CALLS = 2000
PAGE_TOKENS, PAGE = 64, 16 * 1024
PAGE_SIZES = [size * 1024 for size in (4, 8, 16, 32, 64)]

COLD = f"""
import time, numpy as np, paged
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, {HEADS}, 128, {DIM}), np.float32).astype(np.float16) for _ in range(3))
table, cache = np.zeros((1, {HEADS}, 256), np.int32), np.ones((1, {HEADS}, 256 * {PAGE} // 2), np.float16)
op = paged.PagedAttention({HEADS}, {DIM}, threads=1)
%s
times = []
for _ in range(5):
    began = time.perf_counter()
    op(q, k, v, table, cache, 128)
    times.append(time.perf_counter() - began)
print(times[0], sorted(times[1:])[2])
"""


class Bench:
    """Runs sides in turns and keeps the rounds that were clean."""

    def __init__(self, options):
        self.n_rounds = 5 if options.quick else MIN_ROUNDS
        self.loaded = options.loaded
        self.progress = Progress()

    def rounds(self, label, sides, wanted=None):
        """A dict of each side's seconds, over the rounds that count; sides: name -> function that runs once."""
        kept, wanted = {name: [] for name in sides}, wanted or self.n_rounds
        for turn in range(4 * wanted):
            self.progress.show(f"{label}: round {turn + 1}, {len(next(iter(kept.values())))} of {wanted} count")
            times, clean = {}, True
            for name in sorted(sides, reverse=bool(turn % 2)):
                cpu, wall = time.thread_time(), time.perf_counter()
                sides[name]()
                times[name] = time.perf_counter() - wall
                clean &= time.thread_time() - cpu >= CLEAN * times[name]
            if clean or self.loaded:
                for name, taken in times.items():
                    kept[name].append(taken)
            if len(next(iter(kept.values()))) == wanted:
                break
        self.progress.show("")
        return kept

    def row(self, case, metric, unit, values, must=None, aim=None, better="lower", note=""):
        made = row("python", case, metric, unit, values, must, aim, better, self.n_rounds, note=note)
        if self.loaded:
            made["verdict"] = "inconclusive"
        return made


def overhead_of_calls(bench):
    """Calls on one key of one head: the kernel is a few hundred nanoseconds of them."""
    kv = paged.KV.empty(4, 1, 16, DIM)
    op = paged.Attention(1, 1, DIM)
    tables = paged.Tables([[0, 1]], [1])
    op.plan(kv, tables)
    q, out, slots = np.ones((1, 1, DIM), np.float32), np.empty((1, 1, DIM), np.float32), np.zeros(1, np.int64)
    cache = paged.Cache(1, 1, DIM, max_blocks=64)
    seq = cache.sequence()

    def grow():
        seq.reserve(1)
        seq.commit([1])
        seq.truncate(0)

    calls = {"Attention.run": lambda: op.run(q, out), "KV.write": lambda: kv.write(q, q, slots),
             "Attention.plan, Tables": lambda: op.plan(kv, paged.Tables([[0, 1]], [1])),
             "Sequence.reserve, commit, truncate": grow}

    def many(call):
        def run():
            for _ in range(CALLS):
                call()

        return run

    times = bench.rounds("calls", {name: many(call) for name, call in calls.items()})
    for name in calls:
        must = 20 if name in ("Attention.run", "KV.write") else None
        yield bench.row("a call", name, "µs", [t / CALLS * 1e6 for t in times[name]], must)


def operators(n_tokens):
    """The three ways over the same numbers: name -> (operator, arrays behind q, k, v)."""
    pages = n_tokens // PAGE_TOKENS + 1
    made = {}
    for name, gather in (("paged", False), ("gather", True)):
        table = np.zeros((1, HEADS, pages), np.int32)
        made[name] = (paged.PagedAttention(HEADS, DIM, pages, gather=gather, threads=1),
                      (table, np.zeros((1, HEADS, pages * PAGE // 2), np.float16)))
    standard = paged.StandardAttention(HEADS, DIM, n_tokens + PAGE_TOKENS, threads=1)
    made["contiguous"] = standard, (standard.new_cache(),)
    return made


def paged_beside_contiguous(bench, n_tokens, theirs):
    rng = np.random.default_rng(0)
    x, one = ([rng.standard_normal((1, HEADS, n, DIM), np.float32).astype(np.float16) for _ in range(3)] for n in (n_tokens, 1))
    made = operators(n_tokens)
    outs = [op(*x, *memory) for op, memory in made.values()]
    assert all(np.array_equal(outs[0], out) for out in outs), "the three ways differ"
    del outs
    prompt = {name: lambda op=op, memory=memory: op(*x, *memory) for name, (op, memory) in made.items()}
    token = {name: lambda op=op, memory=memory: op(*one, *memory) for name, (op, memory) in made.items()}
    note = f"theirs: {theirs:.0%}" if theirs else "theirs: out of memory contiguously"
    for what, sides in (("a prompt", prompt), ("a token", token)):
        times = bench.rounds(f"{what}, {n_tokens}", sides)
        for name in sides:
            yield bench.row(f"{what}, {n_tokens} tokens", name, "ms", [1e3 * t for t in times[name]])
        for name in ("paged", "gather"):
            values = [a / b - 1 for a, b in zip(times[name], times["contiguous"])]
            yield bench.row(f"{what}, {n_tokens} tokens", f"{name} over contiguous", "share", values, aim=theirs,
                            note=note if what == "a prompt" else "")


def sizes_of_pages(bench, n_tokens=4096):
    """One token after n_tokens, from pages of different sizes: is the document's 16 KB the best here?"""
    rng = np.random.default_rng(0)
    x, one = ([rng.standard_normal((1, HEADS, n, DIM), np.float32).astype(np.float16) for _ in range(3)] for n in (n_tokens, 1))
    sides = {}
    for size in PAGE_SIZES:
        pages = (n_tokens + 4096) * DIM * 4 // size
        memory = np.zeros((1, HEADS, pages), np.int32), np.zeros((1, HEADS, pages * size // 2), np.float16)
        op = paged.PagedAttention(HEADS, DIM, pages, page_size=size, threads=1)
        op(*x, *memory)
        sides[size] = lambda op=op, memory=memory: op(*one, *memory)
    times = bench.rounds("sizes of pages", sides)
    for size in PAGE_SIZES:
        values = [t / base for t, base in zip(times[size], times[PAGE])]
        yield bench.row(f"a token, {n_tokens} tokens", f"pages of {size // 1024} KiB against 16", "ratio", values)


def first_call(bench):
    """In a new process each time: the first call of 128 tokens against the later ones."""
    for name, line in (("cold", ""), ("after warmup()", "op.warmup()")):
        firsts, ratios = [], []
        for i in range(bench.n_rounds):
            bench.progress.show(f"first call, {name}: {i + 1} of {bench.n_rounds}")
            done = subprocess.run([sys.executable, "-c", COLD % line], env={**os.environ, "PYTHONPATH": str(BUILD / "python")},
                                  capture_output=True, text=True, check=True)
            first, later = map(float, done.stdout.split())
            firsts.append(1e3 * first)
            ratios.append(first / later)
        bench.progress.show("")
        yield bench.row("first call, 128 tokens", name, "ms", firsts)
        yield bench.row("first call, 128 tokens", f"{name}, against later calls", "ratio", ratios)


def beyond_a_contiguous_reservation(bench, n_tokens, budget_bytes):
    """Four sequences, one of them long, in a budget in which contiguous reservations for four such do not fit."""
    shape = {"n_layers": 1, "n_kv_heads": HEADS, "head_dim": DIM, "block_size": PAGE_TOKENS, "pool_bytes": budget_bytes,
             "max_seqs": 4}
    reserved = paged.Cache(**shape, enable_paged=False, max_seq_tokens=n_tokens)
    fit = []
    try:
        while len(fit) < 4:
            seq = reserved.sequence()
            seq.reserve(1)
            fit.append(seq)
    except paged.NoBlocks:
        pass
    cache = paged.Cache(**shape)
    kv, seqs, chunk = cache.kv(), [], np.random.default_rng(0).standard_normal((1024, HEADS, DIM), np.float32)
    for n in (n_tokens - 1024, 1024, 1024, 1024):
        seq = cache.sequence()
        for done in range(0, n, 1024):
            seq.reserve(1024)
            kv.write(chunk, chunk, seq.slots())
            seq.commit(np.arange(done, done + 1024))
        seqs.append(seq)
    op = paged.Attention(HEADS, HEADS, DIM, block_size=PAGE_TOKENS, max_seqs=4, max_q=4, max_k=n_tokens)
    op.plan(kv, cache.tables(seqs))
    q, out = np.ones((4, HEADS, DIM), np.float32), np.empty((4, HEADS, DIM), np.float32)
    times = bench.rounds(f"{n_tokens} tokens", {"paged": lambda: op.run(q, out)})["paged"]
    used = cache.stats()["used_bytes"] / 2**30
    note = f"budget {budget_bytes / 2**30:g} GiB: {len(fit)} of 4 fit contiguously, 4 paged, in {used:.2f} GiB"
    yield bench.row(f"{n_tokens} tokens beside three of 1024", "a token of all four", "ms", [1e3 * t for t in times], note=note)


# name: (rows of it, whether it is in a quick run)
CASES = {
    "calls": (overhead_of_calls, True),
    **{f"{n} tokens": (lambda bench, n=n, theirs=theirs: paged_beside_contiguous(bench, n, theirs), n <= 2048)
       for n, theirs in LENGTHS.items()},
    "pages": (sizes_of_pages, True),
    "first call": (first_call, True),
    "32k": (lambda bench: beyond_a_contiguous_reservation(bench, 32 * 1024, 2**29), True),
    "128k": (lambda bench: beyond_a_contiguous_reservation(bench, 128 * 1024, 2**31), False),
}


def measure(options):
    bench = Bench(options)
    for name, (rows, quick) in CASES.items():
        if options.case in name and (quick or options.case or not options.quick):
            yield from rows(bench)


def number(value, unit):
    return f"{100 * value:.1f} %" if unit == "share" else f"{value:.2f}" if unit in ("ratio", "ms") else f"{value:.1f}"


def table(rows):
    yield machine() + f", {paged.kernels()}, one thread"
    yield from ("", "| case | what | value (95 % interval) | must | rounds | verdict |", "|---|---|---|---|---|---|")
    for each in rows:
        value = "-"
        if each["value"] is not None:
            middle, low, high = (number(each[key], each["unit"]) for key in ("value", "low", "high"))
            value = f"{middle}{'' if each['unit'] in ('share', 'ratio') else ' ' + each['unit']} ({low} … {high})"
        must = f"≤ {each['must']} {each['unit']}" if each["must"] is not None else ""
        note = f" ({each['note']})" if each["note"] else ""
        verdict = each["verdict"] if must else ""
        yield f"| {each['case']} | {each['metric']}{note} | {value} | {must} | {each['rounds']} | {verdict} |"


def main():
    parser = argparse.ArgumentParser(prog="./x bench python", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--case", default="", metavar="FILTER", help=f"only cases with it in their name: {', '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, prompts up to 2048")
    parser.add_argument("--loaded", action="store_true", help="count rounds beside other work; decides nothing")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/python.md")
    options = parser.parse_args()
    if options.write_docs and (options.loaded or options.case):
        parser.error("what goes into docs/ is all of it, measured without other work")
    rows = []
    for each in measure(options):
        rows.append(each)
        if options.json:
            print(json.dumps(each, ensure_ascii=False), flush=True)
    if not options.json:
        print("\n".join(table(rows)))
    if options.write_docs:
        write_docs("python", list(table(rows)), pathlib.Path(__file__).resolve().parent.parent / "docs/python.md")
    return any(each["verdict"] == "fail" for each in rows)


if __name__ == "__main__":
    sys.exit(main())
