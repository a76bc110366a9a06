#!/usr/bin/env python3
"""What places outside memory bring and cost: time to the first token from each, files beside fio, the engine while it writes.

    ./x bench store [--quick] [--case FILTER] [--json] [--write-docs] [--dir DIR] [--loaded]

Everything runs in one program (bench/bench_store.c) in rounds that take each way once; ratios are of one round. A round of the
engine counts if its threads had the cores (--loaded: all count, and nothing is written into docs). fio (Debian: fio) writes and reads
a file of the same size in pieces of a record, one at a time, in the same folder; it reads through the system's memory and past it
(direct), as the store does. redis-server (Debian: redis-server) is started by the bench, without either its rows are left out. The
system's file cache is dropped before `disk` and before each read, by posix_fadvise.

--dir: where the files go (default: a folder beside the build), on the file system that is asked about.
Exit status 1: a requirement failed.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from rounds import MIN_ROUNDS, ROOT, Progress, Side, is_clean, machine, row as any_row, write_docs

BUILD = pathlib.Path(os.environ.get("PAGED_BUILD", ROOT / "build/release"))
PROMPT = 4096
MIB = 512           # of the records that are written and read
RECORD = 368640     # bytes: 16 tokens of SmolLM2-135M, two bytes a number
READS = 2           # of the same in a round
CASES = ("files", "first_tokens", "slowdown")
SLOW = (256, 48)  # tokens of a prompt, of an answer: about as long as a store lets a flush wait, and each turn ends with one
SLOW_ROUNDS = 8 * MIN_ROUNDS  # what is asked about is a few percent, and a round's ratio strays by as much by itself
SLOW_TRIES = 8  # for a round that counts
LEFT_OUT = 0.02  # of all turns, as they lost blocks
PROMPT_STEPS = 3  # bring in four prompts: by 512 tokens, or with a store 256, 512, 256, as a prompt is looked for first
PART_STEPS = 8  # of answers are clean or not together: hardly any turn of half a second is, on a virtual machine
SYNC = (64 << 20) // RECORD  # records between two syncs of the store


def row(case, metric, values, must=None, aim=None, unit="ratio", better="higher", least=MIN_ROUNDS):
    return any_row("store", case, metric, unit, values, must, aim, better, least)


class Redis:
    """A server of the bench's own, on a socket in its folder."""

    def __init__(self, folder):
        self.socket = folder / "redis.sock"
        self.process = subprocess.Popen(
            ["redis-server", "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--maxmemory", "1gb",
             "--maxmemory-policy", "allkeys-lru", "--dir", str(folder)], stdout=subprocess.DEVNULL)
        for _ in range(100):
            if self.socket.exists():
                return
            time.sleep(0.1)
        raise SystemExit("bench: redis-server did not start")

    def close(self):
        self.process.terminate()
        self.process.wait(30)


def fio(folder, kind, *options):
    """Bytes a second, by fio's own clock, the sync at the end included."""
    command = ["fio", "--name=x", f"--filename={folder / 'fio'}", f"--rw={kind}", f"--bs={RECORD}", f"--size={MIB}M",
               "--ioengine=psync", "--output-format=json", *options]
    job = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["jobs"][0]
    return job[kind]["bw_bytes"]


def read_in_turns(side, folder, i):
    """Bytes a second of each reader: some times in turns, since a disk may be a few times as fast in one second as in the next."""
    def ours():
        answer = side.ask("read")
        return answer["seconds"] / answer["bytes"]

    readers = {"store": ours, "fio": lambda: 1 / fio(folder, "read", "--invalidate=1"),
               "fio, direct": lambda: 1 / fio(folder, "read", "--invalidate=1", "--direct=1")}
    seconds = dict.fromkeys(readers, 0)  # for a byte
    for turn in range(READS):
        for name in list(readers)[::1 if (turn + i) % 2 else -1]:
            seconds[name] += readers[name]()
    return {name: READS / s for name, s in seconds.items()}


def files(side, folder, n_rounds, progress):
    """Records through the store and bytes through fio, in turns."""
    writes, reads = {"store": [], "fio": [], "fio, one sync": []}, []
    for i in range(n_rounds):
        progress.show(f"files: round {i + 1} of {n_rounds}")
        (folder / "fio").unlink(missing_ok=True)
        theirs = [lambda: writes["fio"].append(fio(folder, "write", f"--fdatasync={SYNC}", "--end_fsync=1")),
                  lambda: writes["fio, one sync"].append(fio(folder, "write", "--end_fsync=1", "--overwrite=0"))]

        def ours():
            answer = side.ask(f"write {MIB}")
            writes["store"].append(answer["bytes"] / answer["seconds"])
        for turn in [ours] + theirs if i % 2 else theirs + [ours]:
            turn()
    for i in range(n_rounds + 1):
        progress.show(f"reads: round {i} of {n_rounds}")
        read = read_in_turns(side, folder, i)
        if i > 0:   # the first time the system's memory for it is new, which costs either side more than the disk
            reads.append(read)
    reads = {name: [r[name] for r in reads] for name in reads[0]}
    for kind, rates in ("write", writes), ("read", reads):
        for name, values in rates.items():
            yield row(f"{kind}, {MIB} MiB", name, [v / 1e6 for v in values], unit="MB/s")
    pairs = [("write", writes, "fio", "fio with as many syncs", 0.8), ("write", writes, "fio, one sync", "fio with one sync", None),
             ("read", reads, "fio", "fio", 0.8), ("read", reads, "fio, direct", "fio, direct", 0.8)]
    for kind, rates, other, word, must in pairs:
        ratios = [a / b for a, b in zip(rates["store"], rates[other])]
        yield row(f"{kind}, {MIB} MiB", f"store / {word}", ratios, must=must, aim=must and 1)


def first_tokens(side, n_rounds, progress, has_redis):
    case = f"first token of {PROMPT} tokens"
    rounds = []
    for i in range(n_rounds):
        progress.show(f"first token: round {i + 1} of {n_rounds}")
        answer = side.ask(f"ttft {i} {PROMPT}")
        if min(answer["cached"][1:4]) < 0.9 * PROMPT:
            raise SystemExit(f"bench: cached tokens {answer['cached']}; what is measured is no store")
        rounds.append(answer)
    ways = ["cold", "memory", "disk", "warm"] + (["redis"] if has_redis else [])
    names = {"cold": "computed", "memory": "from memory", "disk": "from disk, file cache dropped",
             "warm": "from disk, file cache not dropped", "redis": "from Redis (unix socket)"}
    for way in ways:
        yield row(case, names[way], [1000 * r[way] for r in rounds], unit="ms", better="lower")
    for way in ways[1:]:
        must = 5 if way in ("disk", "warm") else None
        yield row(case, f"computed / {names[way]}", [r["cold"] / r[way] for r in rounds], must=must)


def parts_of(*sides):
    """For each place in a turn the (tokens, seconds, CPU seconds, blocks written) of all sides: PROMPT_STEPS, and then PART_STEPS by
    PART_STEPS. All places together are the same work."""
    if len({len(steps) for steps in sides}) > 1:
        raise SystemExit("bench: the engines took another number of steps for the same work")
    cuts = [0, *range(PROMPT_STEPS, len(sides[0]), PART_STEPS), len(sides[0])]
    return [tuple(tuple(map(sum, zip(*steps[a:b]))) for steps in sides) for a, b in zip(cuts, cuts[1:])]


def slowdown(side, n_rounds, progress, loaded):
    """n_rounds turns, each put together of parts that were clean on both sides, one or some for each place in a turn; they come
    from any turns. What was written is the store's word for it: a turn's blocks in a turn's time, so that nothing is put off until nobody
    measures. Parts in which the store wrote may be left out more often than others; so for each block that the turns which were put
    together have less than was due, what they add is taken to be more, and it may not be many. A turn that lost a block does not
    count, and few may be."""
    places, cpu, time, made, written, left_out, tried = [], [], [], 0, 0, 0, 0
    work = " ".join(map(str, SLOW))
    side.ask(f"slow 0 {work}")
    while min(map(len, places), default=0) < n_rounds and tried < SLOW_TRIES * n_rounds:
        tried += 1
        progress.show(f"while it writes: {min(map(len, places), default=0)} of {n_rounds} turns put together, of {tried - 1}")
        answer = side.ask(f"slow {tried} {work}")
        if answer["failed"]:
            raise SystemExit(f"bench: the store failed {answer['failed']} times")
        if answer["lost"]:  # a disk that stands still for long; a turn with less to write does not count
            if (left_out := left_out + 1) > LEFT_OUT * max(n_rounds, tried):
                raise SystemExit(f"bench: of {tried} turns {left_out} lost blocks, {answer['lost']} the latest")
            continue
        parts = parts_of(answer["plain"], answer["writing"])
        places = places or [[] for _ in parts]
        for place, both in zip(places, parts):
            if loaded or all(is_clean({"seconds": part[1], "cpu_seconds": part[2]}) for part in both):
                place.append(both)
        made += answer["made"]
        written += sum(w[3] for _, w in parts)
        time.append(sum(w[1] for _, w in parts) / sum(p[1] for p, _ in parts) - 1)
        cpu.append(sum(w[2] for _, w in parts) / sum(p[2] for p, _ in parts) - 1)
    # Of a place that was clean more often than others a turn takes the mean of some.
    n = min(map(len, places), default=0)
    if n == 0:
        raise SystemExit(f"bench: of {tried} turns no part was clean at one of their places; --loaded counts all")
    turns = [[place[i * len(place) // n:(i + 1) * len(place) // n] for place in places] for i in range(n)]
    seconds = [[sum(statistics.mean(both[side][1] for both in some) for some in turn) for side in (0, 1)] for turn in turns]
    counted = sum(statistics.mean(both[1][3] for both in some) for turn in turns for some in turn)
    due = made / len(cpu) * n
    for blocks, all_blocks, least in (written, made, 0.98), (counted, due, 0.95):
        if blocks < least * all_blocks or not blocks:
            raise SystemExit(f"bench: {blocks:.0f} of {all_blocks:.0f} blocks were written in the time that was measured")
    shares = [(writing / plain - 1) * max(1, due / counted) for plain, writing in seconds]
    case = f"4 requests, {SLOW[0]} + {SLOW[1]} tokens"
    yield row(case, "time that writing all blocks adds", shares, must=0.03, unit="share", better="lower")
    yield row(case, "the same of all turns, clean or not", time, unit="share", better="lower")
    # What others do on the machine does not tell here, and where all cores compute this is what the time would become.
    yield row(case, "processor time that writing all blocks adds", cpu, unit="share", better="lower")


def table(rows):
    yield "| what | | value | 95 % | must | verdict |"
    yield "|---|---|---|---|---|---|"
    for r in rows:
        number = (lambda x: "-" if x is None else f"{x:.4g}")
        must = "" if r["must"] is None else ("≥ " if r["better"] == "higher" else "≤ ") + number(r["must"])
        unit = "" if r["unit"] in ("ratio", "share") else " " + r["unit"]
        yield (f"| {r['case']} | {r['metric']} | {number(r['value'])}{unit} | {number(r['low'])} … {number(r['high'])} | {must} | "
               f"{r['verdict'] if r['must'] is not None else ''} |")


def measure(args, side, folder, progress, has_redis):
    n = 3 if args.quick else MIN_ROUNDS
    if args.case in "files" and shutil.which("fio"):
        yield from files(side, folder, n, progress)
    elif args.case in "files":
        progress.say("without fio (Debian: fio) files are not measured")
    if args.case in "first_tokens":
        yield from first_tokens(side, n, progress, has_redis)
    if args.case in "slowdown":
        yield from slowdown(side, n if args.quick else SLOW_ROUNDS, progress, args.loaded)


def main():
    parser = argparse.ArgumentParser(prog="./x bench store", epilog="example: ./x bench store --dir /mnt/nvme")
    parser.add_argument("--quick", action="store_true", help="three rounds: a look, no verdicts")
    parser.add_argument("--case", default="", metavar="FILTER", help=f"only those of {', '.join(CASES)} whose name contains it")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/stores.md")
    parser.add_argument("--dir", type=pathlib.Path, default=BUILD, help="where the files go")
    parser.add_argument("--loaded", action="store_true", help="count rounds on a busy machine, too; writes no docs")
    args = parser.parse_args()
    if args.write_docs and (args.loaded or args.case):
        parser.error("docs are written from a quiet machine, all cases at once")
    if not any(args.case in case for case in CASES):
        parser.error(f"no case has {args.case} in its name")
    progress, rows = Progress(), []
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-store-") as name:
        folder = pathlib.Path(name)
        redis = Redis(folder) if shutil.which("redis-server") else None
        side = Side("bench_store", [BUILD / "bench/bench_store", os.environ["PAGED_MODEL"], folder, 0,
                                    *([f"unix:{redis.socket}"] if redis else [])])
        try:
            for r in measure(args, side, folder, progress, redis is not None):
                rows.append(r)
                if args.json:
                    progress.show("")
                    print(json.dumps(r), flush=True)
        finally:
            side.close()
            if redis:
                redis.close()
    progress.show("")
    lines = [machine(), "", *table(rows)]
    if not args.json:
        print("\n".join(lines))
    if args.write_docs:
        write_docs("store", lines, ROOT / "docs/stores.md")
    return any(r["verdict"] == "fail" for r in rows)


if __name__ == "__main__":
    sys.exit(main())
