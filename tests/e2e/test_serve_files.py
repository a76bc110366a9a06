"""Goal: what lies in deploy/ is true of the program. Method: options, metric names and syntax are compared with the program's own."""
import json
import re
import shutil
import subprocess

import conftest
import pytest
from serving import Server

DEPLOY = conftest.ROOT / "deploy"


def options_of(paged, command):
    return set(re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", paged(command, "--help").stdout, re.M))


@pytest.fixture(scope="module")
def options(paged):
    return options_of(paged, "serve")


@pytest.mark.parametrize("command, n", [("serve", 30), ("ascend-check", 25)])
def test_manual_has_every_option(paged, command, n):
    page = DEPLOY / f"paged-{command}.1"
    manual = page.read_text(encoding="utf-8").replace("\\-", "-")
    told = set(re.findall(r"\\fB(--[a-z-]+)\\fR", manual))
    assert len(told) > n and told == options_of(paged, command)
    if shutil.which("man"):
        done = subprocess.run(["man", "--warnings", "-l", page], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and not done.stderr, done.stderr


def test_completion(paged, options, tmp_path):
    if not shutil.which("bash"):
        pytest.skip("bash is not installed")
    script = f"""source {DEPLOY / 'paged.bash'}
complete_words() {{ COMP_WORDS=({paged.path} "$@"); COMP_CWORD=$#; _paged; printf '%s\\n' "${{COMPREPLY[@]}}"; }}
"""

    def complete(*words):
        line = script + "complete_words " + " ".join(f"'{w}'" for w in words)
        return set(subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, cwd=tmp_path).stdout.split())

    assert complete("ser") == {"serve"} and {"run", "chat", "inspect"} <= complete("")
    assert complete("serve", "--max-") == {o for o in options if o.startswith("--max-")}


def test_dashboard_asks_for_metrics_that_are_there(model):
    with Server(model, "--ctx", 128) as server:
        server.get("/health")
        text = server.get("/metrics")
    names = set(re.findall(r"^([a-z_:]+)", text, re.M))
    board = json.loads((DEPLOY / "grafana-dashboard.json").read_text(encoding="utf-8"))
    asked = {name for p in board["panels"] for t in p["targets"] for name in re.findall(r"(?:vllm:|paged_)[a-z_]+", t["expr"])}
    assert len(asked) > 15 and asked <= names, asked - names


def test_unit_and_container_name_options_that_exist(options):
    unit = (DEPLOY / "paged.service.in").read_text(encoding="utf-8")
    line = re.search(r"^ExecStart=.*$", unit, re.M)[0]
    assert set(re.findall(r"--[a-z-]+", line)) <= options
    container = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert {"--" + v.lower().replace("_", "-") for v in re.findall(r"PAGED_([A-Z_]+)=", container)} <= options
