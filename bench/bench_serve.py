#!/usr/bin/env python3
"""What the server costs: tokens of streams over HTTP beside the same requests in the bare engine, and llama.cpp's server beside both.

    ./x bench serve [--json] [--rounds N] [--write-docs]

Requests of 128 prompt tokens decode side by side, greedily; a token each a step. The bare engine (bench/bench_engine.c) and the
servers get the same prompts and as many threads as there are cores. The client reads the streams in one thread and looks at nothing
but the time; it runs on the same cores, so what it takes is counted against the server. The rate is that of the tokens between the
last stream's first and the first stream's last token. Rounds, medians and intervals are those of bench/rounds.py; a round counts
only when the bare engine had the cores for itself. The time between two tokens is that of all tokens of all rounds.

Environment: PAGED_BUILD, PAGED_MODEL. Exit status 1: a requirement failed.
"""

import argparse
import contextlib
import json
import os
import pathlib
import selectors
import socket
import statistics
import subprocess
import sys
import time

from rounds import CPUS, ROOT, Progress, Side, is_clean, machine, row as any_row, write_docs

PROMPT = 128
TOKENS = 200            # that each request makes
BATCHES = 1, 8
MUST = 1.03             # seconds a token of the server, of those of the bare engine
GAP_AIM = 3             # of the median time between two tokens, the 99th percentile
N_VOCAB_SEED = 7919     # as bench_token() of bench/protocol.h


def prompt_of(request, n_vocab):
    return [(i * N_VOCAB_SEED + 1000 + request * 12345) % n_vocab for i in range(PROMPT)]


class Streams:
    """Requests to a server whose answers are read as they come."""

    def __init__(self, address, n_vocab):
        self.address, self.n_vocab = address, n_vocab

    def open(self, request):
        body = json.dumps({"prompt": prompt_of(request, self.n_vocab), "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
                           "temperature": 0, "cache_prompt": False}).encode()
        s = socket.create_connection(self.address)
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return s

    def run(self, n_requests):
        """(tokens a second, [seconds between two tokens])"""
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            times = {}
            for i in range(n_requests):
                s = stack.enter_context(self.open(i))
                times[s] = []
                selector.register(s, selectors.EVENT_READ)
            n_open = n_requests
            while n_open:
                for key, _ in selector.select(60):
                    data = key.fileobj.recv(1 << 16)
                    now = time.perf_counter()
                    if not data or b"data: [DONE]" in data:
                        n_open -= 1
                        selector.unregister(key.fileobj)
                    # A token is an event; whatever else one says has no text of a token in it.
                    times[key.fileobj] += [now] * (data.count(b'"text":"') - data.count(b'"text":""'))
        lists = list(times.values())
        if min(map(len, lists)) < TOKENS // 2:
            raise SystemExit(f"bench: a stream of {min(map(len, lists))} events instead of about {TOKENS}")
        begin, end = max(t[0] for t in lists), min(t[-1] for t in lists)
        n = sum(sum(begin < x <= end for x in t) for t in lists)
        # One event may hold two characters' worth of tokens, so the count is that of the requests, not of the events.
        share = TOKENS * n_requests / sum(map(len, lists))
        gaps = [b - a for t in lists for a, b in zip(t, t[1:])]
        return n * share / (end - begin), gaps


class OurServer(Streams):
    name = "paged serve"

    def __init__(self, build, model, n_vocab):
        self.process = subprocess.Popen([str(build / "paged"), "serve", "--model", model, "--port", "0", "--ctx", "1024", "-q",
                                         "--max-running", str(max(BATCHES)), "--no-prefix-cache"], stdout=subprocess.PIPE, text=True)
        port = int(self.process.stdout.readline().rsplit(":", 1)[1])
        super().__init__(("127.0.0.1", port), n_vocab)

    def close(self):
        self.process.terminate()
        self.process.wait(60)


class LlamaServer(Streams):
    name = "llama.cpp's server"

    def __init__(self, model, n_vocab):
        config = {"model": model, "n_ctx": 1024 * max(BATCHES), "n_threads": CPUS, "kv_type": "f16", "flash_attn": True,
                  "n_parallel": max(BATCHES)}
        self.process = subprocess.Popen([sys.executable, str(ROOT / "tests/diff/llamacpp_server.py"), json.dumps(config)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        line = self.process.stdout.readline()
        if not line:
            raise OSError("llama.cpp's server did not start")
        host, port = json.loads(line)["address"].removeprefix("http://").rsplit(":", 1)
        super().__init__((host, int(port)), n_vocab)

    def close(self):
        self.process.stdin.close()
        self.process.wait(60)


def bare_rate(side, n_requests):
    side.ask(f"requests {n_requests} {PROMPT}")
    answer = side.ask(f"decode {TOKENS - 1}")
    return answer["tokens"] / answer["seconds"], is_clean(answer)


def measure(side, servers, n_requests, wanted, progress):
    """Clean rounds, each {name: tokens a second}, and the gaps by server."""
    rounds, gaps, tried = [], {s.name: [] for s in servers}, 0
    while len(rounds) < wanted and tried < 4 * wanted:
        progress.show(f"{n_requests} streams: {len(rounds)} of {wanted} rounds, {tried - len(rounds)} dropped")
        rates = {}
        order = ["bare", *servers] if tried % 2 == 0 else [*reversed(servers), "bare"]
        for who in order:
            time.sleep(0.25)  # threads of the one before spin for a while
            if who == "bare":
                rates["bare"], clean = bare_rate(side, n_requests)
            else:
                rates[who.name], new = who.run(n_requests)
                gaps[who.name] += new
        tried += 1
        if clean:
            rounds.append(rates)
    return rounds, gaps


def rows_of(n_requests, rounds, gaps, servers):
    case = f"{n_requests} streams" if n_requests > 1 else "1 stream"

    def row(metric, unit, values, must=None, aim=None, better="lower"):
        return any_row("serve", case, metric, unit, values, must, aim, better)

    yield row("bare engine", "tokens/s", [r["bare"] for r in rounds], better="higher")
    for server in servers:
        ours = isinstance(server, OurServer)
        yield row(server.name, "tokens/s", [r[server.name] for r in rounds], better="higher")
        yield row(f"{server.name}: time a token, of the bare engine's", "ratio", [r["bare"] / r[server.name] for r in rounds],
                  must=MUST if ours else None)
        times = sorted(gaps[server.name])
        if times:
            middle, high = statistics.median(times), times[int(len(times) * 0.99)]
            yield row(f"{server.name}: between two tokens, median", "ms", [middle * 1e3] * len(rounds))
            yield row(f"{server.name}: 99th percentile, of the median", "ratio", [high / middle] * len(rounds), aim=GAP_AIM if ours else None)


def main():
    parser = argparse.ArgumentParser(prog="./x bench serve")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--rounds", type=int, default=15, help="clean rounds a case")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/server.md")
    args = parser.parse_args()
    build, model = pathlib.Path(os.environ.get("PAGED_BUILD", ROOT / "build/release")), os.environ["PAGED_MODEL"]
    n_vocab = json.loads(subprocess.run([str(build / "paged"), "inspect", model, "--json"], capture_output=True, text=True,
                                        check=True).stdout)["vocab"]
    progress, rows = Progress(), []
    with contextlib.ExitStack() as stack:
        side = stack.enter_context(contextlib.closing(Side("bare", [build / "bench/bench_engine", model, CPUS, 1024, 16])))
        servers = [stack.enter_context(contextlib.closing(OurServer(build, model, n_vocab)))]
        try:
            servers.append(stack.enter_context(contextlib.closing(LlamaServer(model, n_vocab))))
        except OSError as error:
            progress.say(f"{error}; left out")
        for n in BATCHES:
            rows += rows_of(n, *measure(side, servers, n, args.rounds, progress), servers)
    progress.show("")
    lines = ["| case | | | 95 % | must | |", "|---|---|---|---|---|---|"]
    for r in rows:
        if args.json:
            print(json.dumps(r))
        value = "-" if r["value"] is None else f"{r['value']:.4g} {'' if r['unit'] == 'ratio' else r['unit']}".strip()
        low_high = "-" if r["value"] is None else f"{r['low']:.4g} … {r['high']:.4g}"
        bound = f"≤ {r['must']}" if r["must"] else f"aim < {r['aim']}" if r["aim"] else ""
        lines.append(f"| {r['case']} | {r['metric']} | {value} | {low_high} | {bound} | {r['verdict'] if r['must'] else ''} |")
    if not args.json:
        print("\n".join(lines))
    if args.write_docs:
        write_docs("serve", [machine(), "", *lines], ROOT / "docs/server.md")
    return 1 if any(r["verdict"] == "fail" for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
