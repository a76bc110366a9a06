"""Goal: what is made in docs/ says what is so. Method: the list of claims has every row of both documents, the page, the
figures in the program and the pictures are what tools/claims and tools/pictures make of the tree as it is, and evidence that is
not there is noticed."""
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from conftest import BUILD, ROOT

N_CLAIMS = 37  # 24 of document A, 13 of document B


@pytest.fixture(scope="module")
def claims():
    loader = importlib.machinery.SourceFileLoader("claims", str(ROOT / "tools/claims"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("claims", loader))
    loader.exec_module(module)
    module.BUILD = BUILD
    return module


@pytest.mark.parametrize("tool", ["claims", "pictures"])
def test_what_is_made_is_in_step(tool):
    done = subprocess.run([sys.executable, ROOT / "tools" / tool, "--check"], capture_output=True, text=True, check=False,
                          env={**os.environ, "PAGED_BUILD": str(BUILD)})
    assert done.returncode == 0, done.stderr


def test_every_claim_is_there():
    rows = json.loads((ROOT / "tools/claims.json").read_text(encoding="utf-8"))
    assert [row["claim"] for row in rows] == list(range(1, N_CLAIMS + 1))
    assert "".join(row["document"] for row in rows) == 24 * "A" + 13 * "B"
    for row in rows:
        assert row["text"] and row["verdict"] and (row["shown_by"] or row["waits_for"]), row
        assert set(row) <= {"claim", "document", "text", "verdict", "shown_by", "waits_for"}, row
    page = (ROOT / "docs/claims.md").read_text(encoding="utf-8")
    for row in rows:
        assert f"| {row['claim']} | {row['document']}: {row['text']} | {row['verdict']} |" in page
        assert page.count(f"not yet: {row['waits_for']} |") >= 1 if "waits_for" in row else True


@pytest.mark.parametrize("evidence, words", [
    ({"test": "tests/unit/test_plan.c::nobody_wrote_this"}, "there is no tests/unit/test_plan.c::nobody"),
    ({"test": "tests/unit/no_such_file.c::a"}, "there is no"), ({"bench": "./x bench nothing"}, "no bench nothing"),
    ({"file": "docs/no.md"}, "no docs/no.md"), ({"belief": "x"}, "belief is none of"),
    ({"run": "paged plan no-such-shape"}, "ended with 1"),
    ({"run": "paged plan llama-2-13b", "prints": ["26 GiB"]}, "does not print"),
    ({"run": "paged plan llama-2-13b", "exit": 1}, "ended with 0"),
])
def test_evidence_that_is_not_there_is_noticed(claims, evidence, words):
    with pytest.raises(claims.Broken, match=words):
        claims.check_evidence(1, evidence)


def test_figures_come_from_their_rows(claims):
    text = ("| case | wasted | more |\n|---|---|---|\n| a, block 8 | 1 % | 2 % |\n| a, block 80 | 3 % | |\n\n"
            "| case | what | value | verdict |\n|---|---|---|---|\n| t | x | 4 % | inconclusive |\n| t | y | 5 % | pass |\n")
    assert claims.figure(text, "a, block 8", "wasted") == "1 %" and claims.figure(text, "a, block 8", "more") == "2 %"
    assert claims.figure(text, "t", "value") == "4 %, inconclusive" and claims.figure(text, "t", "value", "y") == "5 %"
    assert claims.figure(text, "a, ", "wasted") == "1 %" and claims.figure(text, "a", "wasted") == claims.NOT_RECORDED
    section = "<!-- bench cache: x -->\n\n{}CPU, 2 cores; 2026-11-29\n<!-- end of bench cache -->"
    assert claims.run_of(section.format(""), "bench cache") == "./x bench cache, 2026-11-29"
    quick = section.format("Of `./x bench cache --quick`.\n\n")
    assert claims.run_of(quick, "bench cache") == "./x bench cache --quick, 2026-11-29"
