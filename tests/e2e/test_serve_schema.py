"""Goal: `/openapi.json` is true. Method: Schemathesis makes requests of it, valid and broken ones, and looks at each answer: statuses
and bodies that are not described, broken requests that are accepted, valid ones that are not, methods, headers, server errors.

Two examples an operation beside the boundary values of each field; with PAGED_LONG=1 hundreds, and chains of operations."""
import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest
from serving import Server

LONG = os.environ.get("PAGED_LONG") == "1"
HOW = ["--max-examples", "100"] if LONG else ["--max-examples", "2", "--phases", "coverage,fuzzing", "--generation-deterministic"]


@pytest.mark.skipif(not importlib.util.find_spec("schemathesis"), reason="schemathesis is not installed: ./x setup test")
def test_schemathesis_finds_nothing(model, tmp_path):
    config = pathlib.Path(__file__).parent / "schemathesis.toml"
    with Server(model, "--ctx", 64, "--max-tokens", 2, "--max-running", 16) as server:
        command = [pathlib.Path(sys.executable).parent / "schemathesis", "--config-file", config, "run", server.url + "/openapi.json",
                   "--mode", "all", "--request-timeout", "60", "--no-color", *HOW]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-12000:]
        server.wait_idle()
