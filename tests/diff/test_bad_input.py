"""Goal: bad input is told in one clear line with exit code 1, and nothing crashes. Method: bend the valid."""
import json
import os
import shutil

import pytest

from hostile import CASES, File


def assert_refused(done, word="", code=1):
    """One line on stderr that begins with the program's name and holds `word`, nothing on stdout."""
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stderr[-2000:]}"
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr[-2000:]
    assert lines[0].startswith("paged: ")
    assert word in lines[0], lines[0]


def run(paged, path):
    return paged("run", "--model", path, "--prompt", "hi", "--max-tokens", 2, "--ctx", 64, "--quiet")


def refuse_both(paged, path, word=""):
    assert_refused(run(paged, path), word)
    assert_refused(paged("inspect", path), word)


@pytest.fixture(scope="module")
def valid(tiny):
    with open(tiny("mha-16")[2], "rb") as f:
        return File(f.read())


# ---- not a GGUF file at all ----


def test_missing(paged, tmp_path):
    refuse_both(paged, tmp_path / "none.gguf", "none.gguf")


def test_empty(paged, tmp_path):
    (tmp_path / "empty.gguf").touch()
    refuse_both(paged, tmp_path / "empty.gguf", "empty.gguf")


def test_directory(paged, tmp_path):
    refuse_both(paged, tmp_path, str(tmp_path))


def test_fifo(paged, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    refuse_both(paged, tmp_path / "pipe", "pipe")


def test_text_file(paged, tmp_path):
    (tmp_path / "readme.txt").write_text("This is not a model.\n" * 100)
    refuse_both(paged, tmp_path / "readme.txt", "readme.txt")


def test_name_with_a_newline_stays_one_line(paged, tmp_path):
    refuse_both(paged, tmp_path / "two\nlines")


# ---- truncated ----


def test_truncated_tiny(paged, valid, tmp_path):
    """At every structural boundary, and one byte before it."""
    path = tmp_path / "cut.gguf"
    whole = valid.bytes()
    sizes = sorted({n for b in valid.boundaries for n in (b, b - 1) if 0 <= n < len(whole)}, reverse=True)
    path.write_bytes(whole)
    assert run(paged, path).returncode == 0
    for i, size in enumerate(sizes):
        os.truncate(path, size)
        assert_refused(run(paged, path) if i % 2 else paged("inspect", path), "cut.gguf")


def test_truncated_real(paged, model, tmp_path):
    path = tmp_path / "cut.gguf"
    shutil.copyfile(model, path)
    with open(model, "rb") as f:
        head = f.read(2 << 20)  # all of the metadata lies in there
    size = os.path.getsize(model)
    names = (b"general.name", b"llama.block_count", b"tokenizer.ggml.tokens", b"blk.0.attn_q")
    keys = [head.find(name) for name in names]
    assert all(k > 0 for k in keys)
    sizes = {size - 1, size - 4096, *(size * i // 16 for i in range(1, 16))}
    sizes |= {100_000 * i for i in range(1, 12)}
    sizes |= {k + d for k in keys for d in (0, 3, 20)} | {3, 4, 8, 15, 23}
    for i, n in enumerate(sorted(sizes, reverse=True)):
        os.truncate(path, n)
        assert_refused(run(paged, path) if i % 2 else paged("inspect", path), "cut.gguf")


# ---- hostile ----


def test_the_unbent_file_is_good(paged, valid, tmp_path):
    path = tmp_path / "good.gguf"
    path.write_bytes(valid.bytes())
    assert run(paged, path).returncode == 0
    done = paged("inspect", path, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["layers"] == 2


@pytest.mark.parametrize("case", CASES)
def test_hostile(paged, valid, tmp_path, case):
    bend, word = CASES[case]
    bent = valid.copy()
    bend(bent)
    path = tmp_path / "bent.gguf"
    path.write_bytes(bent.bytes())
    refuse_both(paged, path, word)


# ---- prompts and options ----


def test_prompt_longer_than_the_context(paged, model):
    prompt = "word " * 300
    counted = paged("tokenize", "--model", model, "--json", "--text", prompt)
    n = json.loads(counted.stdout)["count"]
    done = paged("run", "--model", model, "--raw", "--prompt", prompt, "--ctx", 64, "--quiet")
    assert_refused(done, "64")
    assert str(n) in done.stderr


def test_pool_too_small(paged, model):
    """Both numbers: what was given and what is needed."""
    done = paged("run", "--model", model, "--prompt", "hi", "--ctx", 512, "--pool-bytes", "4K", "--quiet")
    assert_refused(done, "4096")
    assert sum(part.strip(",.;:()").isdigit() for part in done.stderr.split()) >= 2, done.stderr


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["rnu"],
        ["--bogus"],
        ["run"],
        ["run", "--prompt", "x", "--bogus"],
        ["run", "--prompt"],
        ["run", "--prompt", "x", "--max-tokens", "-5"],
        ["run", "--prompt", "x", "--max-tokens", "0"],
        ["run", "--prompt", "x", "--max-tokens", "9999999999"],
        ["run", "--prompt", "x", "--max-tokens", "12x"],
        ["run", "--prompt", "x", "--max-tokens", ""],
        ["run", "--prompt", "x", "--temperature", "-1"],
        ["run", "--prompt", "x", "--temperature", "nan"],
        ["run", "--prompt", "x", "--temperature", "inf"],
        ["run", "--prompt", "x", "--top-p", "1.5"],
        ["run", "--prompt", "x", "--seed", "abc"],
        ["run", "--prompt", "x", "--kv-type", "f64"],
        ["run", "--prompt", "x", "--block-size", "0"],
        ["run", "--prompt", "x", "--block-size", "4096"],
        ["run", "--prompt", "x", "--threads", "0"],
        ["run", "--prompt", "x", "--pool-bytes", "12Q"],
        ["run", "--prompt", "x", "--pool-bytes", "99999999999T"],
        ["run", "--prompt", "x", "--ctx", "1.5"],
        ["run", "--prompt", "x", "--json=yes"],
        ["run", "--prompt", "x", "--log-level", "loud"],
        ["run", "--prompt", "x", "--file", "y"],
        ["run", "stray", "--prompt", "x"],
        ["tokenize", "--text", "a", "--file", "b"],
        ["tokenize", "--jsn"],
        ["inspect", "a", "b"],
        ["help", "nothing"],
    ],
    ids=" ".join,
)
def test_usage(paged, args):
    done = paged(*args, env=os.environ | {"PAGED_MODEL": "/nonexistent.gguf"})
    assert done.returncode == 2
    assert done.stdout == ""
    assert 1 <= len(done.stderr.splitlines()) <= 2
    assert done.stderr.startswith("paged: ")
    assert "help" in done.stderr


def test_no_model_named(paged):
    env = {k: v for k, v in os.environ.items() if k != "PAGED_MODEL"}
    done = paged("run", "--prompt", "x", env=env)
    assert done.returncode == 2
    assert "--model" in done.stderr


@pytest.mark.parametrize("typed, meant", [("rum", "run"), ("tokenise", "tokenize"), ("inspct", "inspect")])
def test_did_you_mean_command(paged, typed, meant):
    done = paged(typed)
    assert done.returncode == 2
    assert f"'{meant}'" in done.stderr


@pytest.mark.parametrize(
    "typed, meant", [("--maxtokens", "--max-tokens"), ("--temp", "--temperature"), ("--sed", "--seed")]
)
def test_did_you_mean_option(paged, typed, meant):
    done = paged("run", typed, "1")
    assert done.returncode == 2
    assert meant in done.stderr
