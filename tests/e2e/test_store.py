"""Goal: what is on disk outlives the process, is believed only when it is right, and can be looked at and moved. Method: the program
with --store is ended, killed and damaged; texts are compared with those of runs without a store, and cached tokens are counted."""
import json
import os
import random
import threading

import conftest
import pytest
from serving import Server

LONG = 300  # words: some 300 tokens and more


def words(seed, n=LONG):
    chosen = random.Random(seed)
    return " ".join(chosen.choice(("engine", "river", "seven", "letter", "cold", "garden")) for _ in range(n))


def ask(server, prompt):
    answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 12, "temperature": 0})
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def run(paged, model, *args):
    done = paged("run", "--model", model, "--prompt", words(1), "--max-tokens", 12, "--json", *args)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ls(paged, folder):
    return json.loads(paged("store", "ls", "--store", folder, "--json").stdout)


def size_of(folder):
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


@pytest.fixture(scope="module")
def filled(paged, model, tmp_path_factory):
    """A store with a prompt in it, and the answer of a run without one."""
    folder = tmp_path_factory.mktemp("store") / "blocks"
    cold = run(paged, model)
    assert run(paged, model, "--store", folder)["text"] == cold["text"]
    return folder, cold


def test_a_second_run_reads_what_the_first_has_computed(paged, model, filled):
    folder, cold = filled
    before = size_of(folder)
    for _ in range(3):
        warm = run(paged, model, "--store", folder)
        assert warm["text"] == cold["text"] and warm["tokens"] == cold["tokens"]
        assert warm["cached_tokens"] >= 0.9 * cold["prompt_tokens"]
    assert size_of(folder) <= before + 65536
    # Another cache type is another fingerprint: nothing of it is believed, and nothing of the first is lost.
    other = run(paged, model, "--store", folder, "--kv-type", "f32")
    assert other["cached_tokens"] == 0 and len(ls(paged, folder)["fingerprints"]) == 2
    assert run(paged, model, "--store", folder)["cached_tokens"] == warm["cached_tokens"]


def test_ls_check_export_import(paged, model, filled, tmp_path):
    folder, cold = filled
    told = paged("store", "ls", "--store", folder, "--records", "--json")
    shapes = json.loads(told.stdout)["fingerprints"]
    records = min(shapes, key=lambda s: s["block_bytes"])["list"]  # of 16 bits, whatever another test has added
    assert sum(r["tokens"] for r in records if r["first"] < cold["prompt_tokens"] // 16 * 16) >= cold["prompt_tokens"] // 16 * 16
    assert "engine" not in told.stdout and "river" not in told.stdout
    assert paged("store", "check", "--store", folder).returncode == 0
    last = max(records, key=lambda r: (r["tokens"] == 16, r["first"]))["key"]
    done = paged("store", "export", tmp_path / "part.kv", "--store", folder, "--key", last, "--json")
    assert json.loads(done.stdout)["records"] == next(r["first"] for r in records if r["key"] == last) // 16 + 1
    done = paged("store", "import", tmp_path / "part.kv", "--store", tmp_path / "other")
    assert done.returncode == 0, done.stderr
    there = run(paged, model, "--store", tmp_path / "other")
    assert there["text"] == cold["text"] and there["cached_tokens"] >= 0.9 * cold["prompt_tokens"]
    # Each error says what is wrong.
    with open(tmp_path / "part.kv", "r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    for args, word in ((("import", tmp_path / "part.kv", "--store", tmp_path / "third"), "damaged"),
                       (("ls", "--store", tmp_path / "nowhere"), "No such file"),
                       (("export", tmp_path / "x", "--store", folder, "--key", "0" * 31 + "1"), "no record")):
        done = paged("store", *args)
        assert done.returncode == 1 and word in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "x").exists() and not (tmp_path / "x.part").exists()
    for args in ((), ("sl", "--store", folder), ("ls",), ("export", "--store", folder), ("ls", "file", "--store", folder),
                 ("export", "f", "--store", folder, "--key", "xyz")):
        assert paged("store", *args).returncode == 2


def test_damage_is_a_miss_and_no_answer(paged, model, tmp_path):
    folder = tmp_path / "blocks"
    cold = run(paged, model, "--store", folder)
    data = folder / "data-1"
    rng = random.Random(conftest.random_seed())
    with open(data, "r+b") as file:
        for _ in range(20):
            file.seek(rng.randrange(data.stat().st_size))
            file.write(b"\x5a\xa5\x00")
    done = paged("store", "check", "--store", folder)
    assert done.returncode == 1 and "damaged" in done.stderr and list((folder / "quarantine").iterdir())
    again = run(paged, model, "--store", folder)
    assert again["text"] == cold["text"]
    assert paged("store", "gc", "--store", folder).returncode == 0 and not list((folder / "quarantine").iterdir())
    assert run(paged, model, "--store", folder)["cached_tokens"] >= 0.9 * cold["prompt_tokens"]
    # The index is gone, or is something else.
    (folder / "index.sqlite").write_bytes(b"not a database " * 1000)
    again = run(paged, model, "--store", folder)
    assert again["text"] == cold["text"] and again["cached_tokens"] == 0 and (folder / "index.sqlite.damaged").exists()
    assert run(paged, model, "--store", folder)["cached_tokens"] >= 0.9 * cold["prompt_tokens"]


def test_gc_keeps_to_its_limit(paged, model, tmp_path):
    folder = tmp_path / "blocks"
    run(paged, model, "--store", folder, "--store-bytes", "2M")
    assert (folder / "data-1").stat().st_size <= 2 << 20
    run(paged, model, "--store", folder)
    assert (folder / "data-1").stat().st_size > 4 << 20
    assert paged("store", "gc", "--store", folder, "--store-bytes", "1MiB").returncode == 0
    assert (folder / "data-1").stat().st_size <= 1 << 20 and ls(paged, folder)["records"] >= 1


def test_one_process_has_a_directory(paged, model, tmp_path):
    with Server(model, "--ctx", 512, "--store", tmp_path / "blocks") as server:
        server.get("/health")
        done = paged("store", "ls", "--store", tmp_path / "blocks")
        assert done.returncode == 1 and "in use by another process" in done.stderr


def test_a_restart_keeps_blocks(model, tmp_path):
    """D08: SIGTERM, then the same again; the directory does not grow."""
    folder = tmp_path / "blocks"
    sizes = []
    for i in range(3):
        with Server(model, "--ctx", 1024, "--store", folder) as server:
            text, cached = ask(server, words(2))
            if i == 0:
                first, prompt_tokens = text, server.post("/tokenize", {"prompt": words(2)})["count"]
                assert prompt_tokens >= 300 and cached == 0
            else:
                assert text == first and cached >= 0.9 * prompt_tokens
        sizes.append(size_of(folder))
    assert max(sizes) <= sizes[0] + 65536


def test_killed_while_it_writes(model, tmp_path):
    """D08: kill -9 during writes; the server starts, answers right, and the directory stays in its bounds."""
    rounds = 300 if os.environ.get("PAGED_LONG") else 3
    rng = random.Random(conftest.random_seed())
    folder = tmp_path / "blocks"
    with Server(model, "--ctx", 1024) as server:
        right = {seed: ask(server, words(seed, 100))[0] for seed in range(3)}
    found = 0
    for _ in range(rounds):
        with Server(model, "--ctx", 1024, "--store", folder, "--store-bytes", "16M") as server:
            for seed, text in right.items():
                answer, cached = ask(server, words(seed, 100))
                assert answer == text
                found += cached > 0
            # Many blocks are on their way when the power goes.
            others = [threading.Thread(target=quietly, args=(server, words(100 + i))) for i in range(3)]
            for thread in others:
                thread.start()
            others[0].join(rng.uniform(0, 1))
            server.kill()
            for thread in others:
                thread.join()
        assert size_of(folder) <= (16 << 20) + (8 << 20)
    assert found > 0


def quietly(server, prompt):
    try:
        ask(server, prompt)
    except (OSError, ValueError, AssertionError):
        pass  # it was killed meanwhile
    except Exception as error:  # of http.client
        assert type(error).__module__ == "http.client", error
