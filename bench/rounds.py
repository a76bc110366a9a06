"""How the benches measure so that it can be believed: programs that stay open, rounds, intervals, verdicts, tables in the docs.

A round asks every side once, in turns (A B, B A, …), and its ratios are paired, so that a machine that speeds up or slows down
does not tell. A round in which a side's threads did not have the cores for themselves does not count. Medians; intervals are
95 % bootstrap; a requirement is met when the far bound of the interval meets it, missed when the near one misses it, and fewer
than MIN_ROUNDS clean rounds decide nothing.
"""

import contextlib
import datetime
import json
import os
import pathlib
import platform
import random
import select
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs/performance.md"

MIN_ROUNDS = 15
CLEAN = 0.98            # CPU time of a clean round, of wall × threads
ANSWER_S = 300          # after which a side is held to be stuck
CPUS = len(os.sched_getaffinity(0))


class Ended(SystemExit):
    """A side died, or does not answer any more. Whoever can do without it catches this; else it ends the bench."""


class Side:
    """A program that answers one line of JSON for one line."""

    def __init__(self, name, command, env=None):
        self.name = name
        self.process = subprocess.Popen([str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, env={**os.environ, **(env or {})})

    def ask(self, line):
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            # Every answer is one line, read to its end, so nothing of it waits in a buffer of ours.
            if not select.select([self.process.stdout], [], [], ANSWER_S)[0]:
                self.process.kill()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise Ended(f"bench: {self.name} ended at `{line}` with status {self.process.wait()}")
        return json.loads(answer)

    @property
    def ended(self):
        return self.process.poll() is not None

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def is_clean(answer, threads=None):
    """Whether so many threads (default: one for each CPU) had the cores for themselves."""
    return answer["cpu_seconds"] >= CLEAN * answer["seconds"] * (threads or CPUS)


class Progress:
    """One line on stderr, when that is a terminal."""

    def show(self, text):
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def say(self, text):
        """Something that stays."""
        self.show("")
        print(f"bench: {text}", file=sys.stderr, flush=True)


def interval(values):
    """Median and the 95 % bootstrap interval of it, the same for the same values; None where there are none."""
    if not values:
        return None, None, None
    generator = random.Random(1)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(2000))
    # Ratios near 1 and small shares are told apart by four digits behind the first.
    return [float(f"{value:.5g}") for value in (statistics.median(values), medians[49], medians[1949])]


def verdict_of(low, high, better, must, n_rounds, least=MIN_ROUNDS):
    if n_rounds < least:
        return "inconclusive"
    if must is None:
        return "pass"
    good, bad = (low >= must, high < must) if better == "higher" else (high <= must, low > must)
    return "pass" if good else "fail" if bad else "inconclusive"


def row(bench, case, metric, unit, values, must=None, aim=None, better="higher", least=MIN_ROUNDS, **more):
    """A row of the result; `values` has one entry for each clean round, and fewer than `least` decide nothing."""
    value, low, high = interval(values)
    return {"bench": bench, "case": case, "metric": metric, "unit": unit, "better": better, "value": value, "low": low,
            "high": high, "must": must, "aim": aim, "verdict": verdict_of(low, high, better, must, len(values), least),
            "rounds": len(values), **more}


def machine():
    model = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo", encoding="utf-8")
                  if line.startswith("model name")), platform.machine())
    return f"{model}, {CPUS} cores, Linux; {datetime.date.today()}"


def write_docs(bench, lines, path=DOCS):
    """Puts the lines into a page, docs/performance.md by default, between the marks of this bench."""
    begin, end = f"<!-- bench {bench}: made by --write-docs, not by hand -->", f"<!-- end of bench {bench} -->"
    text = path.read_text(encoding="utf-8")
    before, rest = text.split(begin, 1)
    after = rest.split(end, 1)[1]
    path.write_text(before + "\n".join([begin, "", *lines, "", end]) + after, encoding="utf-8")
