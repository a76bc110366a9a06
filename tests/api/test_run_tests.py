"""What `tools/run-tests` counts when tests do not end as they should, and that it can be interrupted."""

import importlib.machinery
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOOD = "def test_good():\n    pass\n"
CRASHES = GOOD + "import atexit, os, signal\natexit.register(os.kill, os.getpid(), signal.SIGSEGV)\n"
HANGS = "import time\ndef test_hangs():\n    time.sleep(600)\n"


def load():
    loader = importlib.machinery.SourceFileLoader("run_tests", str(ROOT / "tools/run-tests"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("run_tests", loader))
    loader.exec_module(module)
    return module


run_tests = load()


@pytest.mark.parametrize("source, timeout_s, counts, words", [
    (GOOD, 300, (1, 0, 0), "1 passed"),
    (GOOD + "def test_bad():\n    assert False\n", 300, (1, 1, 0), "1 failed"),
    (CRASHES, 300, (1, 1, 0), "exit status -11"),
    ("", 300, (0, 1, 0), "exit status 5"),
    ("import pytest\npytest.skip('not here', allow_module_level=True)\n", 300, (0, 0, 1), "not here"),
    ("import no_such_thing\n", 300, (0, 2, 0), "exit status 2"),
    (HANGS, 3, (0, 1, 0), "it ran out of time"),
])
def test_counts_of_pytest(tmp_path, source, timeout_s, counts, words):
    file = tmp_path / "test_it.py"
    file.write_text(source)
    *found, took_s, output = run_tests.pytest_counts([file], os.environ, timeout_s)
    assert tuple(found) == counts and words in output, output
    assert took_s < 300


def test_a_job_that_raises_counts_and_the_others_run(capsys):
    totals, done = run_tests.Totals(), []
    jobs = run_tests.Jobs(totals, 2)
    jobs.add([("bad", lambda: 1 // 0), *((f"good {i}", lambda i=i: done.append(i)) for i in range(5))])
    jobs.run()
    assert sorted(done) == list(range(5)) and (totals.passed, totals.failed) == (0, 1)
    said = capsys.readouterr().out
    assert "ZeroDivisionError" in said and "FAIL  bad" in said


INTERRUPTED = """
import sys
sys.path.insert(0, {here!r})
from test_run_tests import run_tests

run_tests.END_S = 2
jobs = run_tests.Jobs(run_tests.Totals(), 2)


def sleep():
    print("begins\\n", end="", flush=True)
    print(f"ends {{run_tests.CHILDREN.run(['sleep', '600'])[0]}}\\n", end="", flush=True)


jobs.add([("job", sleep)] * 9)
jobs.run()
"""


@pytest.mark.parametrize("everybody", [False, True])
def test_an_interrupt_ends_what_runs_and_nothing_begins(everybody):
    """As a terminal sends it, to everybody, or to the program alone. Who started us in the background may have had it ignored."""
    here = str(pathlib.Path(__file__).parent)
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED.format(here=here)], start_new_session=True, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as child:
        assert [child.stdout.readline() for _ in range(2)] == ["begins\n"] * 2
        os.killpg(child.pid, signal.SIGINT) if everybody else child.send_signal(signal.SIGINT)
        started = time.monotonic()
        out, err = child.communicate(timeout=300)
    assert time.monotonic() - started < 300
    assert "KeyboardInterrupt" in err
    begun = out.count("begins")  # those that a worker took when what it had before ended, and nobody had been stopped yet
    assert begun <= 2 and out.split("\n").count("ends -2") + out.split("\n").count("ends -9") == 2 + begun, out
