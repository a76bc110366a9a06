#!/usr/bin/env python3
"""What the server costs: tokens of streams over HTTP beside the same requests in the bare engine, and llama.cpp's server beside both.

    ./x bench serve [--json] [--quick] [--case N] [--trace FILE|NAME] [--write-docs]

Requests of 128 prompt tokens decode side by side, greedily; a token each a step. The bare engine (bench/bench_engine.c) and the
servers get the same prompts and as many threads as there are cores, and take turns in the middle of their answers: between its turns a
server is stopped (SIGSTOP) and the engine is not asked. So each round has all sides at the same place of the same text, and on each the
clock starts with the twelfth token after such a stop, when threads have found their cores and caches again. Engine and our server have
the same settings. The client (bench/bench_serve.c) runs on the same cores and wakes up twice in a part only, so that hardly
anything of what is measured is its own work; the time between two tokens comes from turns of their own, in which it looks at each, and
of ours from their clean parts. llama.cpp's server is asked in every eighth round, so it is less far in its text.

A turn is six parts of 30 to 50 ms. Where a hypervisor takes a core away for some milliseconds a few times a second,
hardly any turn as a whole has the cores for itself, but many a part has. Of a round count the parts that were clean (bench/rounds.py) on
both engine and server, the same ones on both; its ratio is that of their sums. That llama.cpp's server keeps all cores at work is not
known, so its turn is taken as a whole and compared with the whole one of the engine. Medians and intervals of the rounds are those of
bench/rounds.py. All processes are started anew a few times, since two engines that differ in nothing but their memory's place differ by
some percent.

--quick: fewer rounds, under two minutes. --case: only so many streams. --json: one object a row. --write-docs: puts the table into
docs/server.md; with --case only its own rows, where the others are of the same machine and day.
--trace: instead, a trace of requests (a file as bench/traces.py reads it, or one that it generates: sharegpt, azure_conv, …) is
replayed against both servers: bench/serve_trace.py. It has no requirement.

Environment: PAGED_BUILD, PAGED_MODEL. Exit status 1: a requirement failed.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

import serve_trace
from rounds import CPUS, MIN_ROUNDS, ROOT, Progress, Side, is_clean, machine, row as any_row, write_docs

BUILD = pathlib.Path(os.environ.get("PAGED_BUILD", ROOT / "build/release"))
N_CTX = 1024
PROMPT = 128
TOKENS = N_CTX - PROMPT - 2     # that each request may make; then they are opened anew
BATCHES = 1, 8
PARTS, PART_S = 6, {1: 0.05, 8: 0.03}    # of a turn; seconds of each, of so many streams
# Starts of the processes: where one's memory lies is worth some percent; the first to start takes turns.
ROUNDS, CASE_S, STARTS = 180, 240, 6
QUICK_ROUNDS, QUICK_S, QUICK_STARTS = 24, 40, 2
WARM = 12                       # tokens of each stream before the clock starts; bench/bench_serve.c waits for as many
LIKE_BARE = "--max-running", "32"       # a setting of bench/bench_engine.c
REPLAY = "--max-running", str(max(BATCHES))
OTHERS_EVERY = 8                # rounds: they have no requirement, and take most of the time; so have the gaps
WHOLE = "bare engine, whole turns"
PAUSE_S = 0.01                  # in which the threads of the side before go to sleep
MUST = 1.03                     # seconds a token of the server, of those of the bare engine
GAP_AIM = 3                     # of the median time between two tokens, the 99th percentile


class Server:
    """A server and the client that asks it."""

    def __init__(self, process, port, n_vocab):
        self.process, self.port, self.n_vocab = process, port, n_vocab
        self.client, self.done = Side(f"the client of {self.name}", [BUILD / "bench/bench_serve"]), 0

    def open(self, n_requests):
        self.done = self.client.ask(f"open {self.process.pid} {self.port} {n_requests} {PROMPT} {TOKENS} {self.n_vocab}")["done"]

    def ask(self, n_tokens):
        return self.asked(f"round {n_tokens} {PARTS}")

    def watch(self, n_tokens):
        return self.asked(f"watch {n_tokens} {PARTS}")

    def asked(self, command):
        answer = self.client.ask(command)
        self.done = answer["done"]
        return answer

    def end(self):
        raise NotImplementedError

    def close(self):
        self.client.close()
        self.process.send_signal(signal.SIGCONT)
        self.end()
        self.process.wait(60)


class OurServer(Server):
    name = "paged serve"

    def __init__(self, model, n_vocab, *options):
        process = subprocess.Popen([str(BUILD / "paged"), "serve", "--model", model, "--port", "0", "--ctx", str(N_CTX), "-q",
                                    *options], stdout=subprocess.PIPE, text=True)
        super().__init__(process, int(process.stdout.readline().rsplit(":", 1)[1]), n_vocab)

    def end(self):
        self.process.terminate()


class LlamaServer(Server):
    name = "llama.cpp's server"

    def __init__(self, model, n_vocab):
        config = {"model": model, "n_ctx": N_CTX * max(BATCHES), "n_threads": CPUS, "kv_type": "f16", "flash_attn": True,
                  "n_parallel": max(BATCHES)}
        process = subprocess.Popen([sys.executable, str(ROOT / "tests/diff/llamacpp_server.py"), json.dumps(config)],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        line = process.stdout.readline()
        if not line:
            raise OSError("llama.cpp's server did not start")
        super().__init__(process, int(json.loads(line)["address"].rsplit(":", 1)[1]), n_vocab)

    def end(self):
        self.process.stdin.close()


class Bare:
    """The engine without a server."""
    name = "bare engine"

    def __init__(self, model):
        self.side, self.done = Side(self.name, [BUILD / "bench/bench_engine", model, CPUS, N_CTX, 16, "cache"]), 0
        self.n_requests = 0

    def open(self, n_requests):
        self.side.ask(f"requests {n_requests} {PROMPT}")
        self.done, self.n_requests = 1, n_requests

    def catch_up(self, done):
        """What comes next is at the same place of the text as the servers' next tokens."""
        if done > self.done:
            self.side.ask(f"decode {done - self.done}")
            self.done = done

    def ask(self, n_tokens):
        self.done += WARM + PARTS * n_tokens
        return self.side.ask(f"decode {n_tokens} {WARM} {PARTS}")

    def close(self):
        self.side.close()


def llama_server(stack, model, n_vocab, progress):
    """[it], or [] where it does not start."""
    try:
        return [stack.enter_context(contextlib.closing(LlamaServer(model, n_vocab)))]
    except OSError as error:
        progress.say(f"{error}; left out")
        return []


def part_tokens(bare):
    """Of each stream, in a part."""
    paces = [seconds / tokens for tokens, seconds, _ in bare.ask(2)["parts"]]
    return max(2, round(PART_S[bare.n_requests] / statistics.median(paces) / bare.n_requests))


def is_clean_part(part):
    return is_clean({"seconds": part[1], "cpu_seconds": part[2]})


def clean_parts(answers, names):
    """{name: seconds a token}, of the parts that were clean on all of these; None: there are none."""
    parts = {name: answers[name]["parts"] for name in names}
    clean = [i for i in range(PARTS) if all(is_clean_part(p[i]) for p in parts.values())]
    return {name: sum(p[i][1] for i in clean) / sum(p[i][0] for i in clean) for name, p in parts.items()} if clean else None


def measure(bare, servers, n_requests, plan, progress):
    """Rounds that count, each {name: seconds a token}; {server: seconds between two tokens}."""
    rounds, tried, gaps = [], 0, {server.name: [] for server in servers}
    sides, (wanted, seconds) = [bare, *servers], plan
    give_up = time.monotonic() + seconds
    bare.open(n_requests)
    n_tokens = part_tokens(bare)
    while len(rounds) < wanted and time.monotonic() < give_up:
        if tried == 0 or max(side.done for side in sides) + 3 * (PARTS * n_tokens + WARM) + 10 > TOKENS:
            for side in sides:
                side.open(n_requests)
        progress.show(f"{n_requests} streams: {len(rounds)} of {wanted} rounds, {tried - len(rounds)} dropped")
        bare.catch_up(servers[0].done)
        answers, with_others = {}, tried % OTHERS_EVERY == 0
        for side in sides[:2] if tried % 2 == 0 else reversed(sides[:2]):
            time.sleep(PAUSE_S)
            answers[side.name] = side.ask(n_tokens)
        tried += 1
        for server in servers[1:] if with_others else []:
            time.sleep(PAUSE_S)
            answers[server.name] = server.ask(n_tokens)
        watched = {server.name: server.watch(n_tokens) for server in servers if with_others}
        if clean := clean_parts(answers, (bare.name, OurServer.name)):
            whole = {name: answer["seconds"] / answer["tokens"] for name, answer in answers.items()}
            rounds.append(whole | {WHOLE: whole[bare.name]} | clean)
        for name, answer in watched.items():
            for part, between in zip(answer["parts"], answer["gaps"]):
                gaps[name] += between if name != OurServer.name or is_clean_part(part) else []
    return rounds, gaps


def name_of(n_requests):
    return f"{n_requests} streams" if n_requests > 1 else "1 stream"


def rows_of(n_requests, clean, gaps, servers):
    case = name_of(n_requests)

    def row(metric, unit, values, must=None, aim=None, better="lower"):
        return any_row("serve", case, metric, unit, values, must, aim, better, least=MIN_ROUNDS)

    yield row(Bare.name, "tokens/s", [1 / a[Bare.name] for a in clean], better="higher")
    for server in servers:
        ours = isinstance(server, OurServer)
        both = [a for a in clean if server.name in a]
        yield row(server.name, "tokens/s", [1 / a[server.name] for a in both], better="higher")
        against = Bare.name if ours else WHOLE
        yield row(f"{server.name}: time a token, of the bare engine's", "ratio", [a[server.name] / a[against] for a in both],
                  must=MUST if ours else None)
        seen = sorted(gaps[server.name])
        if clean and seen:
            middle, high = statistics.median(seen), seen[int(len(seen) * 0.99)]
            yield row(f"{server.name}: between two tokens, median", "ms", [middle * 1e3] * len(clean))
            yield row(f"{server.name}: 99th percentile, of the median", "ratio", [high / middle] * len(clean), aim=GAP_AIM if ours else None)


def table(rows):
    yield from ("| case | | | 95 % | must | |", "|---|---|---|---|---|---|")
    for r in rows:
        value = "-" if r["value"] is None else f"{r['value']:.4g} {'' if r['unit'] == 'ratio' else r['unit']}".strip()
        low_high = "-" if r["value"] is None or r["low"] == r["high"] else f"{r['low']:.4g} … {r['high']:.4g}"
        bound = f"≤ {r['must']}" if r["must"] else f"aim < {r['aim']}" if r["aim"] else ""
        verdict = f"{r['verdict']}, {r['rounds']} rounds" if r["must"] else ""
        yield f"| {r['case']} | {r['metric']} | {value} | {low_high} | {bound} | {verdict} |"


def write_rows(rows, docs=ROOT / "docs/server.md"):
    """The rows of the cases that were not measured stay, if they are of this machine and day."""
    lines = docs.read_text(encoding="utf-8").split("<!-- bench serve:", 1)[1].split("<!-- end of bench serve", 1)[0].splitlines()
    measured, here = {r["case"] for r in rows}, machine() in lines
    kept = {case: [line for line in lines if here and line.startswith(f"| {case} |")] for case in map(name_of, BATCHES) if case not in measured}
    head, bar, *new = table(rows)
    for case in map(name_of, BATCHES):
        kept.setdefault(case, [line for line in new if line.startswith(f"| {case} |")])
    write_docs("serve", [machine(), "", head, bar, *(line for case in map(name_of, BATCHES) for line in kept[case])], docs)


def main():
    parser = argparse.ArgumentParser(prog="./x bench serve")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under two minutes")
    parser.add_argument("--case", type=int, choices=BATCHES, help="only so many streams")
    parser.add_argument("--trace", metavar="FILE", help="replay a request trace instead")
    parser.add_argument("--time-scale", type=float, default=1, help="of its arrivals: 0.1 is ten times as fast")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/server.md")
    args = parser.parse_args()
    model, progress, rows = os.environ["PAGED_MODEL"], Progress(), []
    n_vocab = json.loads(subprocess.run([str(BUILD / "paged"), "inspect", model, "--json"], capture_output=True, text=True,
                                        check=True).stdout)["vocab"]
    plan = (QUICK_ROUNDS, QUICK_S, QUICK_STARTS) if args.quick else (ROUNDS, CASE_S, STARTS)
    if args.trace:
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(contextlib.closing(OurServer(model, n_vocab, *REPLAY))), *llama_server(stack, model, n_vocab, progress)]
            rows += serve_trace.replay(args.trace, args.time_scale, servers, n_vocab, N_CTX, progress)
    else:
        rounds, seconds, n_starts = plan[0] // plan[2], plan[1] / plan[2], plan[2]
        batches = [args.case] if args.case else BATCHES
        clean, gaps = {n: [] for n in batches}, {n: {} for n in batches}
        for start in range(n_starts):
            with contextlib.ExitStack() as stack:
                made = [lambda: OurServer(model, n_vocab, *LIKE_BARE), lambda: Bare(model)]
                first, second = (stack.enter_context(contextlib.closing(make())) for make in (made if start % 2 else reversed(made)))
                bare, ours = (first, second) if isinstance(first, Bare) else (second, first)
                servers = [ours, *llama_server(stack, model, n_vocab, progress)]
                for n in batches:
                    more, more_gaps = measure(bare, servers, n, (rounds, seconds), progress)
                    clean[n] += more
                    for name, values in more_gaps.items():
                        gaps[n].setdefault(name, []).extend(values)
        rows += [row for n in batches for row in rows_of(n, clean[n], gaps[n], servers)]
    progress.show("")
    if args.json:
        print("\n".join(map(json.dumps, rows)))
    else:
        print("\n".join(table(rows)))
    if args.write_docs and not args.trace:
        write_rows(rows)
    return 1 if any(r["verdict"] == "fail" for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
