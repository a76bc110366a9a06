"""Goal: `paged plan` computes what its help says, and refuses odd input with the numbers. Method: from outside; the oracle is
arithmetic here over configurations as their makers published them, and a simulation of the pool that knows nothing of bytes."""
import json
import random
import sys
import time
import xml.etree.ElementTree

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import reserving  # noqa: E402
import traces  # noqa: E402

WAYS = "paged", "packed tails", "contiguous"


def plan(paged, *args, code=0, **options):
    done = paged("plan", *args, "--json", "-q", **options)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def error(paged, *args, code=1, **options):
    done = paged("plan", *args, **options)
    assert done.returncode == code and done.stdout == "" and done.stderr.count("\n") == 1, (done.stdout, done.stderr)
    return done.stderr


# ---- shapes ----

# vocabulary, width, feed-forward, layers, heads, KV heads, head_dim, the embedding is the output too
CONFIGS = {
    "llama-2-7b": (32000, 4096, 11008, 32, 32, 32, 128, False),
    "llama-2-13b": (32000, 5120, 13824, 40, 40, 40, 128, False),
    "llama-2-70b": (32000, 8192, 28672, 80, 64, 8, 128, False),
    "llama-3-8b": (128256, 4096, 14336, 32, 32, 8, 128, False),
    "llama-3-70b": (128256, 8192, 28672, 80, 64, 8, 128, False),
    "llama-3.1-405b": (128256, 16384, 53248, 126, 128, 8, 128, False),
    "llama-3.2-1b": (128256, 2048, 8192, 16, 32, 8, 64, True),
    "llama-3.2-3b": (128256, 3072, 8192, 28, 24, 8, 128, True),
    "mistral-7b": (32768, 4096, 14336, 32, 32, 8, 128, False),
    "mistral-7b-v0.1": (32000, 4096, 14336, 32, 32, 8, 128, False),
    "qwen2-0.5b": (151936, 896, 4864, 24, 14, 2, 64, True),
    "qwen2-1.5b": (151936, 1536, 8960, 28, 12, 2, 128, True),
    "qwen2-7b": (152064, 3584, 18944, 28, 28, 4, 128, False),
    "qwen2-72b": (152064, 8192, 29568, 80, 64, 8, 128, False),
    "qwen2.5-3b": (151936, 2048, 11008, 36, 16, 2, 128, True),
    "qwen2.5-14b": (152064, 5120, 13824, 48, 40, 8, 128, False),
    "qwen2.5-32b": (152064, 5120, 27648, 64, 40, 8, 128, False),
    "qwen3-0.6b": (151936, 1024, 3072, 28, 16, 8, 128, True),
    "qwen3-1.7b": (151936, 2048, 6144, 28, 16, 8, 128, True),
    "qwen3-4b": (151936, 2560, 9728, 36, 32, 8, 128, True),
    "qwen3-8b": (151936, 4096, 12288, 36, 32, 8, 128, False),
    "qwen3-14b": (151936, 5120, 17408, 40, 40, 8, 128, False),
    "qwen3-32b": (151936, 5120, 25600, 64, 64, 8, 128, False),
    "gemma-2-2b": (256000, 2304, 9216, 26, 8, 4, 256, True),
    "gemma-2-9b": (256000, 3584, 14336, 42, 16, 8, 256, True),
    "gemma-2-27b": (256000, 4608, 36864, 46, 32, 16, 128, True),
    "gemma-3-270m": (262144, 640, 2048, 18, 4, 1, 256, True),
    "gemma-3-1b": (262144, 1152, 6912, 26, 4, 1, 256, True),
    "gemma-3-4b": (262144, 2560, 10240, 34, 8, 4, 256, True),
    "gemma-3-12b": (262144, 3840, 15360, 48, 16, 8, 256, True),
    "gemma-3-27b": (262144, 5376, 21504, 62, 32, 16, 128, True),
    "smollm2-135m": (49152, 576, 1536, 30, 9, 3, 64, True),
    "smollm2-360m": (49152, 960, 2560, 32, 15, 5, 64, True),
    "smollm2-1.7b": (49152, 2048, 8192, 24, 32, 32, 64, True),
}


def parameters(name):
    """Of a LLaMA-like model: what its tensors hold. Falcon has one matrix for q, k and v, no gate, and LayerNorm."""
    if name.startswith("falcon"):
        width, layers, heads, kv_heads, norms = (4544, 32, 71, 1, 1) if name == "falcon-7b" else (8192, 60, 128, 8, 2)
        layer = width * (heads + 2 * kv_heads) * 64 + width * width + 8 * width * width + norms * 2 * width
        return 65024 * width + layers * layer + 2 * width
    vocab, width, ff, layers, heads, kv_heads, dim, tied = CONFIGS[name]
    layer = 2 * width * heads * dim + 2 * width * kv_heads * dim + 3 * width * ff
    layer += (4 if name.startswith("gemma") else 2) * width
    if name.startswith("qwen2"):
        layer += (heads + 2 * kv_heads) * dim
    if name.startswith(("qwen3", "gemma-3")):
        layer += 2 * dim
    return vocab * width * (1 if tied else 2) + layers * layer + width


def test_shapes_have_the_parameters_and_heads_of_their_configurations(paged):
    done = paged("plan", "--shapes", "--json")
    shapes = {s["name"]: s for s in json.loads(done.stdout)}
    assert set(shapes) == {*CONFIGS, "falcon-7b", "falcon-40b"}
    for name, shape in shapes.items():
        assert shape["parameters"] == parameters(name), name
        if name in CONFIGS:
            layers, heads, kv_heads, dim = CONFIGS[name][3:7]
            assert (shape["layers"], shape["heads"], shape["kv_heads"], shape["head_dim"]) == (layers, heads, kv_heads, dim)
        assert shape["token_bytes_f16"] == 2 * 2 * shape["layers"] * shape["kv_heads"] * shape["head_dim"]
    # Every sixth layer of Gemma 3 sees everything, every second of Gemma 2.
    assert {n: s["layers_with_window"] for n, s in shapes.items() if s["window"]} == {
        "mistral-7b-v0.1": 32, "gemma-2-2b": 13, "gemma-2-9b": 21, "gemma-2-27b": 23, "gemma-3-270m": 15, "gemma-3-1b": 22,
        "gemma-3-4b": 29, "gemma-3-12b": 40, "gemma-3-27b": 52}
    assert len(paged("plan", "--shapes").stdout.splitlines()) == 1 + len(shapes)


# ---- one request, memory ----

def test_the_table_of_the_document(paged):
    """LLaMA-13B, batch 8, 4096 tokens: to the byte."""
    got = plan(paged, "llama-2-13b", "--lengths", "128,1024,4096", "--requests", 8)
    assert got["token_bytes"] == {"f16": 819200, "f32": 1638400, "bf16": 819200, "int8": 422400}
    assert got["request_bytes"] == 3355443200 and got["pool_bytes_for_requests"] == 25 * 2**30
    assert got["weight_bytes"] == 26031728640
    assert [row["paged"]["bytes"] for row in got["lengths"]] == [104857600, 838860800, 3355443200]
    assert {row["contiguous"]["bytes"] for row in got["lengths"]} == {3355443200}
    assert got["tables"] == {"entries": 256, "bytes_per_request": 1024, "bytes": 8 * 17 * 64, "document_tables": 3200,
                             "document_bytes_per_request": 6553600}
    assert "pool" not in got and "fit" not in got["lengths"][0]["paged"]


def test_json_has_these_fields(paged):
    got = plan(paged, "llama-3-8b", "--memory", "24GB")
    kinds = {"model": str, "groups": list, "context": int, "kv_type": str, "block_size": int, "token_bytes": dict,
             "block_bytes": int, "request_bytes": int, "requests": int, "pool_bytes_for_requests": int, "tables": dict,
             "lengths": list, "load": dict, "weight_bytes": int, "pool_bytes": int, "pool": dict}
    assert {key: type(value) for key, value in got.items()} == kinds
    assert set(got["groups"][0]) == {"layers", "kv_heads", "head_dim_k", "head_dim_v", "window"}
    assert set(got["load"]) == {"name", "requests", "left_out", "waste", "contiguous_waste"}
    assert set(got["load"]["waste"][0]) == {"block_size", "entries", "table_bytes", "paged", "packed tails"}
    assert set(got["lengths"][0]) == {"tokens", "stored_bytes", *WAYS} and set(got["pool"]) == set(WAYS)
    assert set(got["pool"]["paged"]) == {"block_size", "steps", "running", "most", "stored", "taken", "gave_way", "curve"}
    assert got["pool_bytes"] == 24 * 10**9 - got["weight_bytes"] == 24 * 10**9 - 2 * 8030261248


@pytest.mark.parametrize("kv_type, row", [("f16", 256), ("f32", 512), ("bf16", 256), ("int8", 136)])
def test_how_many_fit(paged, kv_type, row):
    """SmolLM2-135M: 90 heads of 64 elements, K and V; int8 has a scale of 4 bytes beside each."""
    token = 90 * row
    got = plan(paged, "smollm2-135m", "--kv-type", kv_type, "--pool-bytes", 10**9, "--lengths", "1,16,17,1000,8192")
    for line in got["lengths"]:
        blocks = -(-line["tokens"] // 16)
        assert line["stored_bytes"] == line["tokens"] * token
        assert line["paged"] == {"bytes": blocks * 16 * token, "fit": 10**9 // (16 * token) // blocks}
        assert line["contiguous"] == {"bytes": 8192 * token, "fit": 10**9 // (8192 * token)}
        tiles = line["tokens"] // 64 * 4 + -(-(line["tokens"] % 64) // 16)
        assert line["packed tails"] == {"bytes": tiles * 16 * token, "fit": 10**9 // (64 * token) * 4 // tiles}


def test_a_model_file_is_a_shape(paged, model):
    file, shape = plan(paged, model), plan(paged, "SmolLM2-135M")
    assert file["weight_bytes"] < shape["weight_bytes"] == 2 * 134515008
    for key in "groups", "context", "token_bytes", "request_bytes", "tables", "lengths", "load":
        assert file[key] == shape[key], key


def test_what_a_sequence_leaves_unused(paged):
    """100 tokens in seven blocks of 16, of 4096 reserved: the 97 % of the document."""
    text = paged("plan", "llama-2-13b", "--lengths", "100").stdout
    assert "100 87.5 MiB = 91.75 MB 10.7% 3.125 GiB = 3.355 GB 97.3%" in [" ".join(line.split()) for line in text.splitlines()]


def test_pages_of_the_other_document(paged):
    own = "--layers", 1, "--kv-heads", 32, "--head-dim", 64, "--ctx", 8192
    got = plan(paged, *own, "--page-size", "16K")
    assert got["block_size"] == 64 and got["block_bytes"] == 32 * 16384 and got["tables"]["entries"] == 128
    assert got["request_bytes"] == 64 * 2**20
    assert plan(paged, *own[:-4], "--head-dim", 128, "--page-size", "16K")["block_size"] == 32
    assert "17000 bytes" in error(paged, *own, "--page-size", 17000) and "256" in error(paged, *own, "--page-size", 17000)
    assert "1048576 bytes holds 4096 tokens" in error(paged, *own, "--page-size", "1M")


def test_windows_take_less(paged):
    got = plan(paged, "gemma-3-1b", "--lengths", "512,32768")
    assert [row["paged"]["bytes"] for row in got["lengths"]] == [26 * 512 * 1024, 4 * 32768 * 1024 + 22 * 528 * 1024]
    assert [row["contiguous"]["bytes"] for row in got["lengths"]] == 2 * [26 * 32768 * 1024]


def test_a_file_with_windows_is_planned_with_them(paged, gemma):
    """Gemma-3-270M as a file and as a name: the same groups, so the same bytes; its weights are quantised in the file."""
    arguments = ["--ctx", 8192, "--lengths", "100,512,8192", "--pool-bytes", "256MiB"]
    file, name = plan(paged, gemma, *arguments), plan(paged, "gemma-3-270m", *arguments)
    assert file["groups"] == [dict(layers=n, kv_heads=1, head_dim_k=256, head_dim_v=256, window=w) for n, w in ((3, 0), (15, 512))]
    for key in ("groups", "token_bytes", "block_bytes", "request_bytes", "tables", "lengths", "load", "pool"):
        assert file[key] == name[key], key
    full = plan(paged, "--layers", 18, "--kv-heads", 1, "--head-dim", 256, *arguments)
    assert file["request_bytes"] < full["request_bytes"] / 4 and file["token_bytes"] == full["token_bytes"]


# ---- loads ----

def lengths_file(folder, requests):
    path = folder / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "".join(f"{p},{o}\n" for p, o in requests))
    return path


def drawn(n, seed=4):
    generator = random.Random(seed)
    return [(generator.randint(1, 900), generator.randint(1, 300)) for _ in range(n)]


def test_waste_is_the_arithmetic_of_lengths(paged, tmp_path):
    requests = drawn(60)
    got = plan(paged, "llama-3-8b", "--ctx", 1200, "--trace", lengths_file(tmp_path, requests))["load"]
    lengths = [p + k for p, o in requests for k in range(o)]
    assert got["requests"] == 60 and got["left_out"] == 0
    for row in got["waste"]:
        b = row["block_size"]
        assert row["paged"] == pytest.approx(1 - sum(lengths) / sum(-(-n // b) * b for n in lengths), abs=1e-5)
        tiles = sum(-(-n // 16) * 16 for n in lengths)
        assert row["packed tails"] == (pytest.approx(1 - sum(lengths) / tiles, abs=1e-5) if b >= 32 else None)
    assert got["contiguous_waste"] == pytest.approx(1 - sum(lengths) / (1200 * len(lengths)), abs=1e-5)


def test_a_contiguous_pool_is_that_of_the_bench(paged, tmp_path):
    """bench/reserving.py simulates the same by events and holes."""
    requests = drawn(80)
    pool = 5000
    got = plan(paged, "llama-3-8b", "--ctx", 1200, "--pool-bytes", pool * 131072, "--trace", lengths_file(tmp_path, requests))
    trace = traces.Trace("x", [(0, p, o, []) for p, o in requests], 0)
    want = reserving.run(trace.requests, pool, lambda prompt, output: 1200)
    contiguous = got["pool"]["contiguous"]
    assert contiguous["running"] == pytest.approx(want.running, rel=1e-4) and contiguous["most"] == 4
    assert contiguous["taken"] == pytest.approx(want.stored + want.reserved, rel=1e-4)
    # There a request grows from its prompt to its end, here to one token less: the last one is never stored.
    assert contiguous["stored"] == pytest.approx(want.stored, abs=0.001)


def simulated(requests, n_blocks, spare):
    """The rule of the help in blocks: (steps, sum of running, sum of tokens, preempted)."""
    waiting, running, totals = [[p, o] for p, o in requests], [], [0, 0, 0, 0]
    blocks = lambda n: -(-n // 16)  # noqa: E731
    while waiting or running:
        i = 0
        while i < len(running):
            others = sum(blocks(n) for j, (n, _) in enumerate(running) if j != i)
            if others + blocks(running[i][0] + 1) > n_blocks:
                n, left = running.pop()
                waiting.insert(0, [n + 1, left])
                totals[3] += 1
                continue
            running[i][0] += 1
            i += 1
        while waiting:
            free = n_blocks - sum(blocks(n) for n, _ in running)
            if blocks(waiting[0][0]) > free or (running and blocks(waiting[0][0]) + spare > free):
                break
            running.append(waiting.pop(0))
        totals[0] += 1
        totals[1] += len(running)
        totals[2] += sum(n for n, _ in running)
        for request in running:
            request[1] -= 1
        running = [r for r in running if r[1]]
    return totals


@pytest.mark.parametrize("n_blocks", [80, 200, 1000])
def test_a_paged_pool_is_that_of_a_simulation(paged, tmp_path, n_blocks):
    requests = drawn(60, seed=n_blocks)
    got = plan(paged, "llama-3-8b", "--ctx", 1200, "--pool-bytes", n_blocks * 2**21, "--trace",
               lengths_file(tmp_path, requests))["pool"]["paged"]
    steps, running, tokens, preempted = simulated(requests, n_blocks, n_blocks / 100)
    assert got["steps"] == steps and got["gave_way"] == preempted
    assert got["running"] == pytest.approx(running / steps, rel=1e-5)
    assert got["stored"] == pytest.approx(tokens / steps / 16 / n_blocks, rel=1e-5)
    width, values = got["curve"]["steps_a_value"], got["curve"]["stored"]
    assert len(values) == -(-steps // width) and 128 < len(values) <= 256
    n_last = steps - width * (len(values) - 1)
    assert sum(v * width for v in values[:-1]) + values[-1] * n_last == pytest.approx(got["stored"] * steps, rel=1e-4)


def test_a_pool_too_small_for_a_request_says_so(paged, tmp_path):
    path = lengths_file(tmp_path, [(100, 10)])
    done = paged("plan", "llama-3-8b", "--pool-bytes", "4MiB", "--trace", path)
    assert done.returncode == 0 and "14680064 bytes" in done.stderr and "4194304" in done.stderr
    assert done.stdout.count("a request does not fit") == 3
    got = plan(paged, "llama-3-8b", "--pool-bytes", "4MiB", "--trace", path)
    assert got["pool"] == dict.fromkeys(WAYS)


@pytest.mark.parametrize("name, text", [
    ("azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023,396,109\r\n"),
    ("burst.csv", "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,374,44,418,x\n"
                  "6,y,396,109,1,z\n"),
    ("lengths.csv", "num_prefill_tokens,num_decode_tokens\n374,44\n\n396,109\n"),
    ("mooncake.jsonl", '{"timestamp": 0, "input_length": 374, "output_length": 44, "hash_ids": [1]}\n'
                       '{"timestamp": 3, "input_length": 396, "output_length": 109, "hash_ids": [1, 2]}'),
])
def test_traces_are_read(paged, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    got = plan(paged, "llama-3-8b", "--trace", tmp_path / name)["load"]
    want = plan(paged, "llama-3-8b", "--trace", lengths_file(tmp_path, [(374, 44), (396, 109)]))["load"]
    assert got["requests"] == 2 and got["waste"] == want["waste"] and got["name"].endswith(name)
    assert plan(paged, "llama-3-8b", "--trace", "-", input=text)["load"]["waste"] == want["waste"]


@pytest.mark.parametrize("text, words", [
    ("", "is empty"), ("\n \n", "is empty"), ("a,b\n1,2\n", "no trace that this reads"),
    ("num_prefill_tokens,num_decode_tokens\n", "no request with a prompt"),
    ("num_prefill_tokens,num_decode_tokens\n0,5\n", "no request with a prompt"),
    ("num_prefill_tokens,num_decode_tokens\n7,x\n", "line 2"), ("num_prefill_tokens,num_decode_tokens\n7\n", "line 2"),
    ("num_prefill_tokens,num_decode_tokens\n7,5\n-7,5\n", "line 3: a prompt of -7"),
    ("num_prefill_tokens,num_decode_tokens\n99999999999999999999,5\n", "line 2"),
    ("num_prefill_tokens,num_decode_tokens\n536870913,5\n", "536870912"),
    ("num_prefill_tokens,num_decode_tokens\n9000,5\n", "9005 tokens, the context 8192"),
    ('{"input_length": 4}\n', "line 1: input_length and output_length"), ('{"input_length": 4\n', "line 1"),
    ('{"input_length": 4.5, "output_length": 3}', "line 1"), ("a\0b", "byte 1 is 0"),
])
def test_bad_traces_are_refused(paged, text, words):
    assert words in error(paged, "llama-3-8b", "--trace", "-", input=text)


def test_a_load_without_end_is_refused(paged):
    text = "num_prefill_tokens,num_decode_tokens\n" + "1,500000000\n" * 3
    started = time.monotonic()
    assert "1500000000 tokens" in error(paged, "llama-3-8b", "--ctx", 2147483647, "--trace", "-", input=text)
    assert time.monotonic() - started < 5


def test_the_longest_context(paged, tmp_path):
    longest = "smollm2-135m", "--ctx", 2**31 - 1
    got = plan(paged, *longest, "--trace", lengths_file(tmp_path, [(5, 5)]))
    assert got["request_bytes"] == 2**31 * 23040 and got["lengths"][-1]["contiguous"]["bytes"] == 2**31 * 23040
    assert "beyond 2^64" in error(paged, *longest)


def test_what_is_too_long_is_left_out(paged, tmp_path):
    done = paged("plan", "llama-3-8b", "--ctx", 100, "--trace", lengths_file(tmp_path, [(90, 11), (90, 10), (5, 5)]), "--json")
    assert json.loads(done.stdout)["load"]["requests"] == 2 and json.loads(done.stdout)["load"]["left_out"] == 1
    assert done.stderr == "paged: 1 of 3 requests are longer than 100 tokens and left out\n"


# ---- bad input, pictures, documents ----

@pytest.mark.parametrize("code, words, args", [
    (2, "no model", []), (2, "takes no MODEL", ["llama-3-8b", "--documents"]), (2, "takes no MODEL", ["x", "--shapes"]),
    (1, "did you mean llama-2-13b?", ["llama-2-14b"]), (1, "neither a file nor a shape", ["/no/such"]),
    (2, "--kv-heads and --head-dim together", ["--layers", "3"]), (2, "not both", ["llama-3-8b", "--layers", "3"]),
    (2, "--window belongs", ["llama-3-8b", "--window", "3"]),
    (2, "not both", ["llama-3-8b", "--memory", "1G", "--pool-bytes", "1G"]),
    (2, "not both", ["llama-3-8b", "--block-size", "16", "--page-size", "16K"]),
    (1, "16060522496 bytes of the 1073741824", ["llama-3-8b", "--memory", "1G"]),
    (2, "1 to the context 8192", ["llama-3-8b", "--lengths", "1,9000"]), (2, "not '5;6'", ["llama-3-8b", "--lengths", "5;6"]),
    (2, "not ''", ["llama-3-8b", "--lengths", ""]), (2, "not '1,'", ["llama-3-8b", "--lengths", "1,"]),
    (2, "more than 32", ["llama-3-8b", "--lengths", ",".join("1" * 33)]), (2, "1 to 1024", ["llama-3-8b", "--block-size", "0"]),
    (2, "auto, f16, f32, bf16, int8", ["llama-3-8b", "--kv-type", "f8"]), (1, "Is a directory", ["llama-3-8b", "--trace", "/"]),
    (1, "/no/such.csv", ["llama-3-8b", "--trace", "/no/such.csv"]), (1, "/no/x.svg", ["llama-3-8b", "--svg", "/no/x.svg"]),
    (1, "address space", ["--layers", "100000", "--kv-heads", "100000", "--head-dim", "100000"]),
])
def test_odd_input_is_refused(paged, code, words, args):
    assert words in error(paged, *args, code=code, env={})


def test_the_examples_of_the_help_run(paged, model, tmp_path):
    words = paged("plan", "--help").stdout
    examples = [line.split()[1:] for line in words.split("Example:\n")[1].splitlines()]
    trace = lengths_file(tmp_path, [(20, 5)])
    assert len(examples) == 5
    for example in examples:
        names = {"model.gguf": model, "requests.csv": trace, "plan.svg": tmp_path / "plan.svg"}
        done = paged(*[names.get(word, word) for word in example])
        assert done.returncode == 0 and done.stdout, done.stderr


def test_profiles_are_blocks_of_others(paged):
    assert " of 128 tokens\n" in paged("plan", "llama-3-8b", "--profile", "ascend").stdout
    seed = paged("plan", "--layers", "32", "--kv-heads", "32", "--head-dim", "64", "--profile", "seed")
    assert seed.stdout == paged("plan", "--layers", "32", "--kv-heads", "32", "--head-dim", "64", "--page-size", "16K").stdout
    assert "Ascend" not in paged("plan", "llama-3-8b", "--profile", "ascend", "--kv-type", "bf16").stderr
    refused = paged("plan", "llama-3-8b", "--profile", "ascend", "--kv-type", "f32")
    assert refused.returncode == 0 and "Ascend would refuse it (kv_type.paged_prefill): kv_type is f32" in refused.stderr
    for option in (["--block-size", "16"], ["--page-size", "16K"]):
        assert f"leave out {option[0]}" in error(paged, "llama-3-8b", "--profile", "ascend", *option, code=2, env={})


def test_the_transcripts_of_the_docs_are_what_is_printed(paged):
    blocks = (ROOT / "docs/cli.md").read_text(encoding="utf-8").split("```\n$ paged plan ")[1:]
    assert len(blocks) == 2
    for block in blocks:
        line, shown = block.split("\n```")[0].split("\n", 1)
        command, _, cut = line.partition(" | sed -n ")
        # Printed on a machine whose default this is.
        done = paged("plan", *command.split(), "--kv-type", "bf16")
        printed = (done.stderr + done.stdout).rstrip("\n").split("\n")
        first, last = map(int, cut.strip("'p").split(",")) if cut else (1, len(printed))
        assert shown.split("\n") == printed[first - 1:last]


def test_a_file_that_is_no_model(paged, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(20))
    assert "x.gguf" in error(paged, tmp_path / "x.gguf")


def test_charts_are_drawn(paged, tmp_path):
    for extra, n_lines in ([], 0), (["--pool-bytes", "8GiB"], 3):
        path = tmp_path / "plan.svg"
        assert paged("plan", "llama-3-8b", "--svg", path, *extra).returncode == 0
        root = xml.etree.ElementTree.parse(path).getroot()
        tags = [element.tag.rsplit("}")[-1] for element in root.iter()]
        assert tags.count("polyline") == n_lines and tags.count("rect") >= 1 + 2 + 10
        # A page in the dark shows it as well: it lies on white.
        assert root[1].attrib["fill"] == "white"


def test_documents(paged):
    done = paged("plan", "--documents", "--json")
    numbers = json.loads(done.stdout)
    by_says = {(n["claim"], n["what"]): n for n in numbers}
    assert {n["document"] for n in numbers} == {"A", "B"}
    assert {n["verdict"] for n in numbers} <= {"holds", "does not hold", "depends", "not measured yet", "ours"}
    for claim, what, says, verdict, ours in [
            (26, "a request of 4096 tokens", "3.2 GB", "does not hold", "3.125 GiB = 3.355 GB"),
            (25, "batch 8 × 4096, in the heading", "25.6 GB", "does not hold", "25 GiB = 26.84 GB"),
            (25, "batch 8 × 4096, in the text", "22 GB", "does not hold", "25 GiB = 26.84 GB"),
            (26, "K of a layer, [40, 4096, 128] × 2 bytes", "40 MB", "holds", "40 MiB = 41.94 MB"),
            (26, "weights", "26 GB", "holds", "24.24 GiB = 26.03 GB"),
            (33, "all tables of a request", "6.4 MB", "does not hold", "6.25 MiB = 6.554 MB"),
            (33, "tables: layers × heads × K and V", "3200", "holds", "3200"),
            (2, "32 layers", "32 MB", "does not hold", "2 GiB = 2.147 GB"),
            (6, "address of block 30", "480 KB", "holds", "491520 bytes")]:
        assert (by_says[claim, what]["says"], by_says[claim, what]["verdict"], by_says[claim, what]["ours"]) == (
            says, verdict, ours)
    assert [n["verdict"] for n in numbers if n["claim"] == 32 and n["says"].endswith("%")] == 4 * ["holds"]
    text = paged("plan", "--documents").stdout
    assert all(n["ours"] in text and n["what"] in text for n in numbers)
