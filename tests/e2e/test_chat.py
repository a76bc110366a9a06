"""Goal: `paged chat` holds a conversation, in a terminal and through a pipe. Method: from outside, with a real pseudo-terminal."""
import contextlib
import fcntl
import json
import os
import pty
import random
import re
import select
import subprocess
import termios
import time

import conftest
import pytest
from redis_server import Redis

SMALL = ("--ctx", 512, "--threads", 1, "--max-tokens", 12)


class Terminal:
    """The program in a pseudo-terminal."""

    def __init__(self, model, state, *args):
        self.master, slave = pty.openpty()
        env = dict(os.environ, TERM="xterm", XDG_STATE_HOME=str(state), HOME=str(state))
        command = [conftest.program("paged"), "chat", "--model", str(model), *map(str, (*SMALL, *args))]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True,
                                        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        os.close(slave)
        self.seen = ""

    def until(self, pattern, timeout=60):
        """Reads until the pattern comes, and forgets what is before its end."""
        deadline = time.monotonic() + timeout
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, f"{pattern!r} did not come: {self.seen!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.master, 65536).decode(errors="replace")
                except OSError:
                    break
        assert found, f"{pattern!r} did not come: {self.seen!r}"
        before, self.seen = self.seen[:found.end()], self.seen[found.end():]
        return before

    def type(self, text):
        with contextlib.suppress(OSError):
            os.write(self.master, text.encode())

    def prompt(self, timeout=60):
        """Waits until the program reads a line: it has made the terminal raw and written its prompt. What is typed earlier is not
        lost, but the terminal echoes it, which a test could take for the program's output."""
        deadline = time.monotonic() + timeout
        before = self.until("> ", timeout)
        while termios.tcgetattr(self.master)[3] & termios.ICANON:
            assert time.monotonic() < deadline, f"the program reads no line: {before!r}"
            time.sleep(0.01)
        return before

    def close(self):
        """The exit code. What still comes is read: the program sets the terminal right only when its output is through."""
        deadline = time.monotonic() + 30
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self.master], [], [], 0.3)[0]:
                try:
                    self.seen += os.read(self.master, 65536).decode(errors="replace")
                except OSError:
                    break
        code = self.process.wait(timeout=5)
        os.close(self.master)
        return code


def test_a_conversation_in_a_terminal(model, tmp_path):
    t = Terminal(model, tmp_path)
    t.until("/help lists")
    t.prompt()
    t.type("Hello\r")
    t.prompt()
    t.type("/stats\r")
    stats = t.until(r"1 turn, \d+ of 512 tokens.*\n")
    assert "0 from the cache" in stats
    t.prompt()
    t.type("What did I say?\r")
    t.prompt()
    t.type("/stats\r")
    stats = t.until(r"2 turns, .*\n")
    cached = int(re.search(r"\((\d+) from the cache\)", stats)[1])
    assert cached >= 32  # the first turn, question and answer, was not computed again
    t.prompt()
    t.type("/clear\r")
    t.until("a new conversation")
    t.prompt()
    t.type("/stast\r")
    t.until("did you mean /stats")
    t.prompt()
    t.type("/quit\r")
    assert t.close() == 0
    history = tmp_path / "paged/history"
    assert "Hello" in history.read_text() and history.stat().st_mode & 0o077 == 0


def test_letters_of_all_languages_can_be_typed(model, tmp_path, monkeypatch):
    """Whatever the locale says: what was typed is in the history, and the model was asked that."""
    for locale in ("C", "C.UTF-8"):
        monkeypatch.setenv("LC_ALL", locale)
        t = Terminal(model, tmp_path / locale)
        t.prompt()
        t.type("Grüße 你好 🦙\r")
        t.prompt()
        t.type("/stats\r")
        t.until("1 turn,")
        t.prompt()
        t.type("/quit\r")
        assert t.close() == 0
        history = (tmp_path / locale / "paged/history").read_text(encoding="utf-8")
        # libedit writes what is not ASCII as octal bytes.
        lines = [line.encode().decode("unicode_escape").encode("latin-1").decode().strip() for line in history.splitlines()]
        assert "Grüße 你好 🦙" in lines


def begin_a_story(model, state):
    t = Terminal(model, state, "--ignore-eos", "--max-tokens", 7000, "--ctx", 8192)
    t.prompt()
    t.type("Tell me a long story\r")
    t.until("story\r\n.*[a-z]{3} [a-z]{3}")
    return t


def test_interrupt_stops_the_answer_and_not_the_program(model, tmp_path):
    t = begin_a_story(model, tmp_path)
    t.type("\x03")
    t.until("stopped")
    t.prompt()
    t.type("\x03")
    t.until("Ctrl-D")
    t.prompt()
    t.type("\x03")
    assert t.close() == 0


def test_interrupt_at_any_moment_is_answered(model, tmp_path):
    """Between the line and the answer, and between the answer and the line, as well as in them: nothing hangs, none is ignored."""
    rng = random.Random(conftest.random_seed())
    for _ in range(20):
        t = Terminal(model, tmp_path, "--ignore-eos", "--max-tokens", 7000, "--ctx", 8192)
        t.prompt()
        t.type("Tell me a long story\r")
        time.sleep(rng.choice((0, 0, 0.001, 0.01, 0.05)) * rng.random())
        t.type("\x03")
        # The line was taken, and then the answer is stopped; or it was not, and the editor says how to leave.
        t.until(r"\(stopped\)|\(Ctrl-C again")
        t.prompt()
        t.type("/quit\r")
        assert t.close() == 0


def test_ctrl_d_leaves(model, tmp_path):
    t = Terminal(model, tmp_path)
    t.prompt()
    t.type("\x04")
    assert t.close() == 0


def test_lines_from_a_pipe(paged, model):
    lines = "Hello\n\n/unknown\n/clear\nWhat is 2+2?\n/quit\nnever read\n"
    done = paged("chat", "--model", model, *SMALL, input=lines)
    assert done.returncode == 0, done.stderr
    alone = [json.loads(paged("run", "--model", model, "--prompt", p, "--json", *SMALL).stdout)["text"]
             for p in ("Hello", "What is 2+2?")]
    assert done.stdout == "".join(text + "\n" for text in alone)
    assert "unknown command '/unknown'" in done.stderr


def test_too_long_a_message_leaves_the_conversation(paged, model):
    lines = "Hello\n" + "word " * 700 + "\n/stats\n"
    done = paged("chat", "--model", model, *SMALL, input=lines)
    assert done.returncode == 0
    assert "512" in done.stderr and "1 turn," in done.stderr


def test_a_full_context_is_told(paged, model):
    done = paged("chat", "--model", model, "--ctx", 64, "--threads", 1, "--ignore-eos", input="Hello\n")
    assert done.returncode == 0 and "the context of 64 tokens is full" in done.stderr


def test_old_turns_go(paged, model):
    """What is left after /drop, or by --history, answers as a conversation that was never longer."""
    fruit = ("Name a fruit.", "And a colour?")
    lines = "\n".join(("Hello", *fruit, "/drop", "/drop x", "/drop 1", "Name a town.", "/stats")) + "\n"
    done = paged("chat", "--model", model, *SMALL, input=lines)
    assert done.returncode == 0 and done.stderr.count("/drop asks for a number") == 2
    assert "(1 turn forgotten, 2 left," in done.stderr and "3 turns" in done.stderr and "dropped turns: 1," in done.stderr
    limited = paged("chat", "--model", model, *SMALL, "--history", 90, input="\n".join((*fruit, *fruit, "/stats")) + "\n")
    assert limited.returncode == 0 and re.search(r"dropped turns: [1-9]", limited.stderr)
    assert limited.stdout.splitlines()[0] == paged("chat", "--model", model, *SMALL, input=fruit[0]).stdout.splitlines()[0]


@pytest.mark.parametrize("place", ["--store", "--redis"])
def test_a_conversation_is_resumed(paged, model, tmp_path_factory, place):
    """In another process, with the tokens that it had: the same words, and nothing of it computed again."""
    folder = tmp_path_factory.mktemp("c")
    with contextlib.ExitStack() as stack:
        where = folder / "store" if place == "--store" else stack.enter_context(Redis(folder)).address

        def chat(*args, lines=()):
            done = paged("chat", "--model", model, *SMALL, *args, input="".join(line + "\n" for line in lines))
            assert done.returncode == 0, done.stderr
            return done

        said = ("You are a cook. What is a fruit? Answer at length, with examples.", "Name another one.", "And a third.")
        whole = chat(lines=said).stdout
        assert chat("--list", place, where).stdout == ""
        first = chat(place, where, lines=said[:2])
        listed = chat("--list", place, where).stdout.split(maxsplit=1)
        assert listed[0].startswith("conv-") and "4 messages" in listed[1] and said[0][:40] in listed[1]
        third = chat("--resume", place, where, lines=(said[2], "/stats"))
        assert first.stdout + third.stdout == whole
        read, cached = map(int, re.search(r"(\d+) read \((\d+) from the cache\)", third.stderr).groups())
        assert cached >= 0.75 * (read + cached), (read, cached)  # short as it is
        assert "(2 turns, " in third.stderr
        again = chat("--resume", listed[0], place, where, lines=("/stats",))
        assert "(3 turns, " in again.stderr and len(chat("--list", place, where).stdout.splitlines()) == 1
        assert paged("chat", "--model", model, "--resume", "conv-0", place, where, input="").returncode == 1
    assert paged("chat", "--list").returncode == 2 and paged("chat", "--model", model, "conv-0", input="").returncode == 2
    assert paged("chat", "--model", model, "--resume", *SMALL, input="").returncode == 2


def test_keep_sink_outlives_the_context(paged, model):
    args = ("--ctx", 96, "--threads", 1, "--max-tokens", 150, "--ignore-eos", "--keep-sink")
    done = paged("chat", "--model", model, *args, input="Hello\nGo on\n/stats\n")
    assert done.returncode == 0, done.stderr
    assert "is full" not in done.stderr
    assert int(re.search(r"within the last answer: (\d+)", done.stderr)[1]) >= 48
    assert " 150 written" in done.stderr


def test_bench_prints_rows(paged, model):
    args = ("--contexts", "16,32", "--requests", "1,3", "--tokens", 2, "--rounds", 1, "--threads", 1)
    done = paged("bench", "--model", model, *args, "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(r["case"], r["context"], r["requests"]) for r in rows] == [
        (case, context, n) for context in (16, 32) for case, n in (("prefill", 1), ("decode", 1), ("decode", 3))]
    assert all(r["low"] <= r["value"] <= r["high"] and r["value"] > 0 for r in rows)
    for bad in ("", "0", "a", "1,,2", "1 2"):
        assert paged("bench", "--model", model, "--contexts", bad).returncode == 2
    assert paged("bench", "--model", model, "--contexts", 9000).returncode == 1
