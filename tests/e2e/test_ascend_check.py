"""Goal: `paged ascend-check` says accepted or refused with its exit code, and a dump is right: the golden result equals attention
computed here, by NumPy, through block table and cache layout (the program computes it from rows of keys and looks at neither);
the comparing program finds a result right that is, and wrong that is not."""

import json
import re
import shlex
import subprocess
import sys

import conftest
import numpy as np
import pytest


def check(paged, *arguments):
    done = paged("ascend-check", *arguments, "--json")
    return done.returncode, json.loads(done.stdout)


# ---- verdicts ----


def test_exit_codes(paged):
    done = paged("ascend-check", "llama-3-8b")
    assert done.returncode == 0
    assert done.stdout.startswith("accepted: decode, 32 heads on 8, head_dim 128, bnbsh, blocks of 128\n")
    assert "nothing of this ran on such a card" in done.stdout
    done = paged("ascend-check", "--path", "prefill", "--block-size", "16")
    assert done.returncode == 1 and "refused  block_size.prefill\n" in done.stdout
    assert "accepted with block_size 128\n" in done.stdout
    for wrong in (["--path", "x"], ["--heads", "-1"], ["no-such-shape"], ["--blok-size", "1"]):
        done = paged("ascend-check", *wrong)
        assert done.returncode == 2 and done.stdout == "" and "paged: ascend-check: " in done.stderr


def test_help_has_an_example(paged):
    text = paged("ascend-check", "--help").stdout
    assert "paged ascend-check llama-3-8b --path prefill --block-size 16" in text and "--dump" in text


def test_json_has_the_call_put_right(paged):
    code, told = check(paged, "--path", "tnd", "--block-size", 16, "--head-dim", 100)
    assert (code, told["accepted"], told["ran_on_a_card"], told["facts"]) == (1, False, False, "2026-11")
    assert [(f["rule"], f["value"], f["nearest"]) for f in told["findings"]] == [("head_dim.tnd", 100, 128),
                                                                                  ("block_size.tnd", 16, 128)]
    assert all(f["source"] and f["message"] for f in told["findings"])
    nearest = told["nearest_call"]
    assert (nearest["block_size"], nearest["head_dim_k"], nearest["head_dim_v"]) == (128, 128, 128)
    again = [x for name, option in (("block_size", "--block-size"), ("head_dim_k", "--head-dim"), ("head_dim_v", "--head-dim-v"))
             for x in (option, nearest[name])]
    assert check(paged, "--path", "tnd", *again)[0] == 0


def test_the_transcripts_of_the_docs_are_what_is_printed(paged, tmp_path):
    n = 0
    for page in ("ascend", "cli"):
        for block in re.findall(r"```\n(\$ .*?)\n```", (conftest.ROOT / f"docs/{page}.md").read_text(encoding="utf-8"), re.S):
            if "$ paged ascend-check" not in block:
                continue
            for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block + "\n", re.M):
                if command.startswith("cat "):
                    (tmp_path / command.split()[1].rstrip(";")).write_text(shown)
                elif command.startswith("ls "):
                    assert sorted(path.name for path in (tmp_path / command.split()[1]).iterdir()) == shown.split()
                else:
                    assert paged(*shlex.split(command)[1:], cwd=tmp_path).stdout == shown, command
                    n += 1
    assert n == 5


def test_rules_are_listed(paged):
    rules = json.loads(paged("ascend-check", "--rules", "--json").stdout)
    text = paged("ascend-check", "--rules").stdout
    assert len(rules) > 80 and all(rule["rule"] in text and rule["source"] in text for rule in rules)


def test_arrays_from_a_file_and_from_stdin(paged, tmp_path):
    arrays = {"table": [[0, 1], [2, 9]], "lens_k": [256, 129]}
    (tmp_path / "a.json").write_text(json.dumps(arrays))
    code, told = check(paged, "--max-k", 256, "--blocks", 8, "--arrays", tmp_path / "a.json")
    assert code == 1 and [(f["rule"], f["value"], f["entry"]) for f in told["findings"]] == [("table.range", 9, 3)]
    assert told["call"]["batch"] == 2 and told["nearest_call"] is None
    done = paged("ascend-check", "--max-k", "256", "--blocks", "10", "--arrays", "-", input=json.dumps(arrays))
    assert done.returncode == 0


@pytest.mark.parametrize("text, words", [
    ("[", "line 1"), ("[]", "takes a JSON object"), ('{"tables": []}', "not 'tables'"), ('{"table": [1]}', "rows of integers"),
    ('{"table": [[1, 2], [3]]}', "row 1 of table has 1 entries"), ('{"table": [[1e9]]}', "no int32"),
    ('{"table": [[4294967296]]}', "no int32"), ('{"slots": [1.5]}', "entry 0 of slots"), ('{"lens_k": 7}', "not a list"),
    ('{"table": [[1, 2]]}', "--table-cols"), ('{"slots": [1], "slots": [2]}', "duplicate")])
def test_arrays_that_are_none(paged, text, words):
    done = paged("ascend-check", "--arrays", "-", "--table-cols", "3", input=text)
    assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr


# ---- dumps ----


def load(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {f["file"].removesuffix(".npy"): np.load(folder / f["file"]) for f in manifest["files"]}
    for f in manifest["files"]:
        array = files[f["file"].removesuffix(".npy")]
        assert list(array.shape) == f["shape"] and np.dtype(f["dtype"]) == array.dtype and f["what"]
    assert manifest["ran_on_a_card"] is False and "Nothing of this ran" in manifest["note"]
    return manifest, files


def number(array, kind):
    if kind == "bf16" and array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def tokens_of(cache, layout, n_kv_heads):
    """[blocks, block, heads, d], by transposing."""
    if layout == "bnbsh":
        return cache.reshape(*cache.shape[:2], n_kv_heads, -1)
    if layout == "bnnbsd":
        return cache.transpose(0, 2, 1, 3)
    n, heads, parts, size, c0 = cache.shape
    return cache.transpose(0, 3, 1, 2, 4).reshape(n, size, heads, parts * c0)


def keys_of(files, name, manifest, seq):
    """Keys of a sequence through the block table, [n, heads, d] double."""
    call = manifest["call"]
    kind = "int8" if files[f"{name}_cache"].dtype == np.int8 else manifest["q_type"]
    cache = number(tokens_of(files[f"{name}_cache"], manifest["kv_layout"], call["n_kv_heads"]), kind)
    n = int(files["lens_k"][seq])
    rows = np.concatenate([cache[b] for b in files["block_table"][seq] if b >= 0] or [cache[0, :0]])[:n]
    return rows * number(files[f"{name}_scale"], manifest["q_type"]) if f"{name}_scale" in files else rows


def heads_of(array, manifest, files, seq, n_q):
    """[n_q, heads, d] of a query-shaped array."""
    call, layout = manifest["call"], manifest["q_layout"]
    if layout == "tnd":
        start = int(files["lens_q"][:seq].sum())
        return array[start:start + n_q]
    if layout == "bnsd":
        return array[seq, :, :n_q].transpose(1, 0, 2)
    return array[seq, :n_q].reshape(n_q, call["n_heads"], -1)


def attend(q, k, v, mode, scale, group):
    scores = np.einsum("ihd,jhd->hij", q, np.repeat(k, group, 1)) * scale
    n_q, n_k = scores.shape[1:]
    if mode:
        shift = n_k - n_q if mode == 3 else 0
        scores[:, np.arange(n_k)[None] > np.arange(n_q)[:, None] + shift] = -np.inf
    lse = np.logaddexp.reduce(scores, axis=2)
    return np.einsum("hij,jhd->ihd", np.exp(scores - lse[..., None]), np.repeat(v, group, 1)), lse.T


CASES = [
    ["--path", "decode", "--heads", 8, "--kv-heads", 2, "--head-dim", 32, "--batch", 3, "--max-k", 300, "--block-size", 32],
    ["--path", "decode", "--heads", 8, "--kv-heads", 2, "--head-dim", 32, "--batch", 2, "--max-k", 200, "--kv-type", "int8",
     "--q-type", "bf16", "--kv-layout", "bnnbsd"],
    ["--path", "decode", "--heads", 10, "--kv-heads", 1, "--kv-type", "int8", "--kv-layout", "pa_nz", "--max-k", 200],
    ["--path", "prefill", "--heads", 4, "--kv-heads", 2, "--head-dim", 48, "--batch", 2, "--max-q", 40, "--max-k", 150,
     "--q-layout", "bsnd"],
    ["--path", "prefill", "--heads", 4, "--kv-heads", 1, "--head-dim", 16, "--batch", 2, "--max-q", 30, "--max-k", 140,
     "--q-layout", "bsh", "--sparse-mode", 2, "--q-type", "bf16"],
    ["--path", "prefill", "--heads", 2, "--head-dim", 16, "--max-q", 20, "--max-k", 140, "--kv-layout", "bnnbsd",
     "--sparse-mode", 0],
    ["--path", "tnd", "--heads", 4, "--kv-heads", 2, "--head-dim", 192, "--batch", 3, "--max-q", 9, "--max-k", 200],
    ["--path", "mla", "--heads", 32, "--batch", 2, "--max-q", 3, "--max-k", 140, "--kv-layout", "pa_nz", "--q-type", "bf16"],
    ["--path", "atb", "--heads", 4, "--kv-heads", 2, "--head-dim", 64, "--batch", 3, "--max-k", 100, "--kv-layout", "pa_nz",
     "--block-size", 16],
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}-{case[-1]}")
def test_golden_results_are_attention_through_the_table(paged, tmp_path, case):
    folder = tmp_path / "dump"
    done = paged("ascend-check", *case, "--seed", 5, "--dump", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    manifest, files = load(folder)
    call, mla = manifest["call"], manifest["path"] == "mla"
    out, lse = files["golden_out"].astype(np.float64), files["golden_lse"].astype(np.float64)
    for seq in range(call["batch"]):
        n_q = int(files["lens_q"][seq])
        k, v = keys_of(files, "k", manifest, seq), keys_of(files, "k" if mla else "v", manifest, seq)
        q = heads_of(number(files["q"], manifest["q_type"]), manifest, files, seq, n_q)
        if mla:
            k = np.concatenate([k, keys_of(files, "k_rope", manifest, seq)], 2)
            q = np.concatenate([q, heads_of(number(files["q_rope"], manifest["q_type"]), manifest, files, seq, n_q)], 2)
        mode = call["sparse_mode"]
        want, want_lse = attend(q, k, v, mode, manifest["scale"], call["n_heads"] // call["n_kv_heads"])
        assert np.abs(heads_of(out, manifest, files, seq, n_q) - want).max() < 1e-6
        got_lse = lse[int(files["lens_q"][:seq].sum()):][:n_q, :, 0] if manifest["q_layout"] == "tnd" else lse[seq, :, :n_q, 0].T
        assert np.abs(got_lse - want_lse).max() < 1e-6
        slots = files["slots"][int(files["lens_k"][:seq].sum()):][:files["lens_k"][seq]]
        t, size = np.arange(len(slots)), call["block_size"]
        assert (slots == files["block_table"][seq][t // size] * size + t % size).all()
    lens_q = np.cumsum(files["lens_q"]) if manifest["q_layout"] == "tnd" else files["lens_q"]
    assert (files["actual_seq_lengths"] == lens_q).all()
    used = files["block_table"][files["block_table"] >= 0]
    assert len(set(used.tolist())) == used.size and used.max() < call["n_blocks"]
    if case in (CASES[0], CASES[4]):  # f16 and bf16, padded
        compare_finds_it(folder, files)


def compare(folder, **results):
    arguments = [f"{name}={path}" for name, path in results.items()]
    done = subprocess.run([sys.executable, folder / "compare.py", *arguments], capture_output=True, text=True, check=False,
                          timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def compare_finds_it(folder, files):
    out, lse = folder / "card_out.npy", folder / "card_lse.npy"
    card_lse = files["golden_lse"].copy()
    np.save(out, files["golden_out"].astype(np.float16))
    np.save(lse, card_lse)
    assert compare(folder, out=out, lse=lse)[0] == 0
    wrong = files["golden_out"].copy()
    wrong.reshape(-1)[0] += 0.1
    np.save(out, wrong)
    code, text = compare(folder, out=out)
    assert code == 1 and "1 beyond" in text
    wrong.reshape(-1)[0] = np.nan
    np.save(out, wrong)
    assert compare(folder, out=out)[0] == 1
    np.save(out, wrong[:0])
    assert compare(folder, out=out)[0] == 2 and compare(folder)[0] == 2 and compare(folder, x=out)[0] == 2


@pytest.mark.parametrize("kind", ["f16", "bf16", "int8"])
@pytest.mark.parametrize("layout", ["bnbsh", "pa_nz"])
def test_movers_are_dumped_to_the_byte(paged, tmp_path, layout, kind):
    sizes = ["--kv-type", kind, "--kv-layout", layout, "--heads", 2, "--head-dim", 32, "--head-dim-v", 64, "--batch", 3,
             "--max-k", 50, "--block-size", 16]
    for path in ("scatter", "gather"):
        folder = tmp_path / path
        done = paged("ascend-check", "--path", path, *sizes, "--dump", folder)
        assert done.returncode == 0, done.stdout + done.stderr
        manifest, files = load(folder)
        scatter = path == "scatter"
        for name in ("k", "v"):
            cache = tokens_of(files[f"golden_{name}_cache" if scatter else f"{name}_cache"], layout, 2)
            rows = files[f"{name}_rows" if scatter else f"golden_{name}_rows"]
            flat = cache.reshape(-1, *cache.shape[2:])
            assert (flat[files["slots"]].view(np.uint8) == rows.view(np.uint8)).all()
            rest = np.delete(flat, files["slots"], axis=0)
            assert rest.size and not rest.any()
        results = {name: folder / f"golden_{name}.npy" for name in manifest["results"]}
        assert len(results) == 2
        if kind != "f16":
            continue
        assert compare(folder, **results)[0] == 0
        name = manifest["results"][0]
        wrong = np.load(results[name]).copy()
        wrong.view(np.uint8).reshape(-1)[7] ^= 1
        np.save(folder / "card.npy", wrong)
        code, text = compare(folder, **{name: folder / "card.npy"})
        assert code == 1 and "1 of other bits" in text


def test_a_dump_can_be_repeated(paged, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        paged("ascend-check", "--heads", 2, "--head-dim", 16, "--max-k", 40, "--seed", seed, "--dump", tmp_path / name)
    a, b, c = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in "abc")
    assert a == b and a != c and a.keys() == c.keys()


@pytest.mark.parametrize("arguments, words", [
    (["--blocks", "100000"], "MiB a cache"), (["--batch", "65536", "--max-k", "9000", "--blocks", "100"], "MiB an array"),
    (["--path", "prefill", "--max-q", "8192", "--max-k", "8192", "--batch", "8"], "multiplications"),
    (["--path", "prefill", "--sparse-mode", "4"], "no mask of your own"),
    (["--batch", "2", "--blocks", "8"], "more than the 8 blocks")])
def test_dumps_that_can_not_be(paged, tmp_path, arguments, words):
    seed = 3
    done = paged("ascend-check", *arguments, "--seed", seed, "--dump", tmp_path / "d")
    assert done.returncode == 1 and words in done.stderr


def test_a_folder_that_can_not_be_made(paged, tmp_path):
    done = paged("ascend-check", "--dump", tmp_path / "no" / "such")
    assert done.returncode == 1 and "cannot make" in done.stderr
    (tmp_path / "file").write_text("")
    done = paged("ascend-check", "--max-k", "10", "--dump", tmp_path / "file")
    assert done.returncode == 1 and "cannot write" in done.stderr
