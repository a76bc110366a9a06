"""Goal: `paged run` answers, streams, stops and reports as its help says. Method: from outside."""
import json
import os
import pathlib
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from fcntl import ioctl

import pytest

QUESTION = "What is a KV cache?"
# Where threads are not the point one is enough, and a busy machine slows it least.
ONE_THREAD = ("--threads", 1)
NO_END = ("--ignore-eos", "--max-tokens", 4000, *ONE_THREAD)


def run_json(paged, model, *args, prompt=QUESTION, code=0, **options):
    done = paged("run", "--model", model, "--prompt", prompt, "--json", *ONE_THREAD, *args, **options)
    assert done.returncode == code, done.stderr
    assert done.stdout.endswith("}\n")
    return json.loads(done.stdout)


# ---- what comes out ----


def test_json_fields(paged, model):
    answer = run_json(paged, model, "--max-tokens", 12, "--seed", 7)
    assert answer["text"] and isinstance(answer["text"], str)
    assert len(answer["tokens"]) == answer["completion_tokens"] <= 12
    assert answer["prompt_tokens"] > 10
    assert answer["cached_tokens"] == 0 and answer["cache_miss"] == "no-match"
    assert answer["finish_reason"] in ("stop", "length")
    assert answer["blocks_used"] > 0
    assert answer["seed"] == 7 and answer["block_size"] == 16 and answer["kv_type"] in ("f16", "bf16")
    timings = answer["timings"]
    for field in "load_ms queue_ms prefill_ms decode_ms prefill_tokens_per_s decode_tokens_per_s".split():
        assert isinstance(timings[field], float) and timings[field] >= 0, field
    assert timings["prefill_ms"] > 0 and timings["decode_ms"] > 0


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
def test_blocks_used(paged, model, block_size):
    """ceil(tokens / block_size); the last token is never written to the cache, since nothing follows it."""
    for n in (1, 9, 16, 17):
        args = ("--ignore-eos", "--max-tokens", n, "--block-size", block_size, "--ctx", 256)
        answer = run_json(paged, model, *args)
        assert answer["finish_reason"] == "length" and answer["completion_tokens"] == n
        tokens = answer["prompt_tokens"] + n - 1
        assert answer["blocks_used"] == -(-tokens // block_size)


def test_keep_sink_outlives_the_context(paged, model):
    """Up to the full context the tokens are those of an exact run; then whole blocks of the middle go, and it goes on."""
    small = ("--ctx", 96, "--ignore-eos", "--max-tokens", 150)
    exact, long = run_json(paged, model, *small), run_json(paged, model, *small, "--keep-sink", 8)
    n = exact["completion_tokens"]
    assert exact["finish_reason"] == "length" and exact["prompt_tokens"] + n == 97 and exact["dropped_tokens"] == 0
    assert long["completion_tokens"] == 150 and long["tokens"][:n] == exact["tokens"] and long["text"].startswith(exact["text"])
    assert long["dropped_tokens"] > 0 and long["dropped_tokens"] % 16 == 0
    # What is left fits, and has lost no more than the half of what is behind the sink each time.
    assert 40 < long["prompt_tokens"] + 150 - long["dropped_tokens"] <= 97
    done = paged("run", "--model", model, "--prompt", QUESTION, *ONE_THREAD, *small, "--keep-sink", 8, "--stats", "-q")
    assert done.stdout == long["text"] and f"dropped     {long['dropped_tokens']} tokens" in done.stderr


def test_keep_sink_asks_for_an_end_and_for_room(paged, model):
    done = paged("run", "--model", model, "--prompt", "x", "--keep-sink", 8)
    assert done.returncode == 2 and "asks for --max-tokens" in done.stderr
    done = paged("run", "--model", model, "--prompt", "x", "--keep-sink", 65, "--ctx", 96, "--max-tokens", 9, *ONE_THREAD)
    assert done.returncode == 1 and "keep_sink is 65" in done.stderr


def test_finish_reasons(paged, model):
    assert run_json(paged, model, "--max-tokens", 2)["finish_reason"] == "length"
    whole = run_json(paged, model, "--max-tokens", 200, prompt="What is 2+2?")
    assert whole["finish_reason"] == "stop" and whole["completion_tokens"] < 200
    assert "<|im_end|>" not in whole["text"]
    # A context that the answer fills ends it as well.
    full = run_json(paged, model, "--ignore-eos", "--ctx", 64)
    assert full["finish_reason"] == "length"
    assert full["prompt_tokens"] + full["completion_tokens"] in (64, 65)


def test_greedy_equals_llamacpp_f32(paged, llamacpp, model_f32):
    """The chat prompt of the same question, f32 weights and f32 cache: the same 32 tokens."""
    oracle = llamacpp(model_f32, kv_type="f32", flash_attn=False)
    for question in ("What is the capital of France?", "Write a short poem about the sea."):
        prompt = oracle.tokenize(oracle.apply_template([{"role": "user", "content": question}]))
        theirs = oracle.generate(prompt, 32)
        args = ("--max-tokens", 32, "--kv-type", "f32", "--ctx", 512)
        ours = run_json(paged, model_f32, *args, prompt=question)
        assert ours["prompt_tokens"] == len(prompt)
        # llama.cpp reports the token that ends a text among the others, we do not.
        assert ours["tokens"] == [t for t in theirs if t not in (0, 2)]


def test_greedy_begins_like_llamacpp_q4_1(paged, llamacpp, model):
    """Quantised weights may part ways later; a plain question must begin with the same words."""
    oracle = llamacpp(model, kv_type="f32", flash_attn=False)
    prompt = oracle.tokenize(oracle.apply_template([{"role": "user", "content": QUESTION}]))
    theirs = oracle.generate(prompt, 8)
    ours = run_json(paged, model, "--max-tokens", 8)
    assert ours["tokens"][:5] == theirs[:5]
    assert "KV cache" in ours["text"]


def test_seeds(paged, model):
    def text(seed, *args):
        sampling = ("--temperature", 1.0, "--max-tokens", 16, "--seed", seed, "--ctx", 256, *args)
        return run_json(paged, model, *sampling, prompt="Tell me a story.")["text"]

    texts = [text(seed) for seed in (1, 2, 3)]
    assert len(set(texts)) == 3
    assert text(2) == texts[1]
    assert text(2, "--threads", 2, "--chunk", 5, "--block-size", 32) == texts[1]


def test_greedy_whatever_the_seed(paged, model):
    texts = {run_json(paged, model, "--max-tokens", 8, "--seed", seed)["text"] for seed in (0, 1)}
    assert len(texts) == 1
    assert run_json(paged, model, "--max-tokens", 8, "--temperature", 1.5, "--top-k", 1)["text"] in texts


def test_stream_equals_json(paged, model):
    args = ("--max-tokens", 40, "--temperature", 0.8, "--seed", 3, *ONE_THREAD)
    streamed = paged("run", "--model", model, "--prompt", QUESTION, *args)
    assert streamed.returncode == 0, streamed.stderr
    assert streamed.stdout == run_json(paged, model, *args)["text"]


def test_text_is_valid_utf8_wherever_it_ends(paged, model):
    for n in range(1, 9):
        args = ("--raw", "--ignore-eos", "--max-tokens", n, "--ctx", 256, *ONE_THREAD)
        done = paged("run", "--model", model, "--prompt", "Emoji: 🦙 🦙 🦙 🦙 🦙", *args, text=False)
        assert done.returncode == 0
        done.stdout.decode("utf-8", "strict")


def test_stream_comes_token_by_token(paged, model):
    command = [paged.path, "run", "--model", model, "--prompt", QUESTION, "--quiet", *map(str, NO_END)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        pieces = [os.read(process.stdout.fileno(), 65536) for _ in range(10)]
        assert process.poll() is None
        process.kill()
    assert all(0 < len(p) < 200 for p in pieces)
    b"".join(pieces).decode("utf-8", "strict")


# ---- prompts ----


def test_raw_and_template(paged, model):
    chat = run_json(paged, model, "--max-tokens", 8)
    raw = run_json(paged, model, "--max-tokens", 8, "--raw")
    assert raw["prompt_tokens"] < chat["prompt_tokens"]
    count = paged("tokenize", "--model", model, "--chat", "--json", "--text", QUESTION)
    assert json.loads(count.stdout)["count"] == chat["prompt_tokens"]
    written = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    )
    by_hand = run_json(paged, model, "--max-tokens", 8, "--raw", prompt=written)
    assert by_hand["prompt_tokens"] == chat["prompt_tokens"] and by_hand["tokens"] == chat["tokens"]


def test_system_message(paged, model):
    default = run_json(paged, model, "--max-tokens", 4)
    own = run_json(paged, model, "--max-tokens", 4, "--system", "Answer in French. " * 8)
    assert own["prompt_tokens"] > default["prompt_tokens"]


def test_prompt_from_file_and_stdin(paged, model, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(QUESTION)
    expected = run_json(paged, model, "--max-tokens", 6)["tokens"]
    common = ("run", "--model", model, "--json", "--max-tokens", 6, *ONE_THREAD)
    assert json.loads(paged(*common, "--file", path).stdout)["tokens"] == expected
    assert json.loads(paged(*common, "--file", "-", input=QUESTION).stdout)["tokens"] == expected


def test_model_without_a_template(paged, tiny):
    path = tiny("mha-16")[2]
    args = ("run", "--model", path, "--prompt", "the and on", "--max-tokens", 5, "--ignore-eos", "--json")
    told = paged(*args)
    assert told.returncode == 0 and "no chat template" in told.stderr
    raw = paged(*args, "--raw")
    assert json.loads(told.stdout)["tokens"] == json.loads(raw.stdout)["tokens"]


def test_model_from_the_environment(paged, model):
    env = os.environ | {"PAGED_MODEL": model}
    done = paged("run", "--prompt", QUESTION, "--max-tokens", 3, "--quiet", env=env)
    assert done.returncode == 0 and done.stdout


# ---- what is told ----


def test_help_and_version(paged):
    for line in ("--help", "help", "run --help", "help run", "tokenize -h", "inspect --help"):
        args = line.split()
        done = paged(*args)
        assert done.returncode == 0 and done.stderr == ""
        assert "Example:" in done.stdout and "paged run" in done.stdout or args[0] in ("tokenize", "inspect")
        assert max(map(len, done.stdout.splitlines())) <= 100
    version = paged("--version")
    assert version.returncode == 0 and re.match(r"paged \d+\.\d+\.\d+\n", version.stdout)


def test_every_option_of_run_is_in_its_help(paged):
    text = paged("run", "--help").stdout
    for option in (
        "model prompt raw max-tokens temperature seed ctx pool-bytes kv-type block-size threads json stats "
        "log-level quiet top-k top-p"
    ).split():
        assert f"--{option}" in text, option


FIXED_TEXT = pathlib.Path(__file__).parents[1] / "diff" / "fixed_text.txt"


# What each name of PAGED_CPU leaves, and whether pairs of bf16 are multiplied there.
CPU_SETS = {"ref": False, "avx2": False, "avx512": False, "avx512_vnni": False, "avx512_bf16": True, "amx": True}


@pytest.mark.parametrize("name, pairs", CPU_SETS.items())
def test_the_default_kv_type_is_by_the_processor(paged, model, name, pairs):
    """bf16 where the processor multiplies pairs of it (as Linux says) and PAGED_CPU leaves that, else f16; what is said wins."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        wanted = "bf16" if pairs and "avx512_bf16" in file.read() else "f16"
    env = {**os.environ, "PAGED_CPU": name}
    small = ("--max-tokens", 2, "--ctx", 64)
    assert run_json(paged, model, *small, env=env)["kv_type"] == wanted
    assert run_json(paged, model, *small, "--kv-type", "auto", env=env)["kv_type"] == wanted
    for kv_type in ("f16", "bf16", "f32", "int8"):
        assert run_json(paged, model, *small, "--kv-type", kv_type, env=env)["kv_type"] == kv_type
    text = paged("run", "--model", model, "--prompt", "x", *ONE_THREAD, *small, "--stats", env=env).stderr
    assert f" of 16 tokens, {wanted}, so " in text and f"kernels, packed {wanted}\n" in text
    assert f" a token in {wanted}, " in (shown := paged("inspect", model, env=env).stdout) and f" 8192 in {wanted}: pool" in shown
    assert json.loads(paged("inspect", model, "--json", env=env).stdout)["plan"]["kv_type"] == wanted
    assert json.loads(paged("plan", model, "--json", env=env).stdout)["kv_type"] == wanted
    assert f" tokens in {wanted}\n" in paged("plan", model, env=env).stdout


def test_linear_bf16_refused(paged, model, tmp_path):
    """Whatever loads a model says that there is no AMX, and ends with an error."""
    commands = (("run", "--prompt", "x"), ("chat",), ("batch", "-", "--output", tmp_path / "answers"), ("serve", "--port", 0),
                ("bench",), ("perplexity", FIXED_TEXT))
    for command in commands:
        done = paged(*command, "--model", model, "--linear", "bf16", env={**os.environ, "PAGED_CPU": "avx2"})
        assert done.returncode == 1 and not done.stdout, command
        assert f"paged: {command[0]}: linear bf16 asks for a processor with AMX, and here are " in done.stderr, command


def test_linear_bf16(paged, model, model_f32, tmp_path):
    """Where AMX is what computes, products of bf16 are chosen by name: the same text on one thread and on two, cold and from a
    store, which serves one kind of products only; the perplexity is that of the same weights as f32 within 0.3 %. Elsewhere they
    are an error."""
    bf16 = ("--linear", "bf16", "--ctx", 256, "--max-tokens", 24)
    told = paged("run", "--model", model, "--prompt", "x", *bf16, "--stats")
    if "linear bf16 asks for a processor with AMX" in told.stderr:
        kernels = json.loads(paged("inspect", model, "--json").stdout)["linear_kernels"]
        assert told.returncode == 1 and not kernels.startswith("amx"), kernels
        return
    assert told.returncode == 0 and "linear      amx_bf16, packed q8_0, q4_1" in told.stderr, told.stderr
    text = [run_json(paged, model, *bf16, "--threads", n)["text"] for n in (1, 2)]
    assert text[0] and text[0] == text[1]
    stored = [run_json(paged, model, *bf16, "--store", tmp_path / "kv") for _ in range(2)]
    other = run_json(paged, model, *bf16[2:], "--store", tmp_path / "kv")
    assert [s["text"] for s in stored] == text and stored[1]["cached_tokens"] > 0 and other["cached_tokens"] == 0
    values = [json.loads(paged("perplexity", FIXED_TEXT, *args, "-q", "--json").stdout)["perplexity"]
              for args in (("--model", model_f32), ("--model", model, "--linear", "bf16"))]
    assert abs(values[1] / values[0] - 1) < 0.003


def test_fit(paged, model):
    """Memory is at hand for the whole context here: then --fit changes nothing but the way the pool was found."""
    arguments = ("run", "--model", model, "--prompt", "hi", "-n", 2, *ONE_THREAD)
    fitted, plain = paged(*arguments, "--fit"), paged(*arguments)
    assert fitted.returncode == plain.returncode == 0, fitted.stderr
    assert fitted.stdout == plain.stdout and fitted.stderr == plain.stderr
    assert "context 64" in paged(*arguments, "--fit", "--ctx", 64).stderr
    assert paged(*arguments, "--fit", "--pool-bytes", "1M").returncode == 2


def test_device(paged, model_f32):
    """On an OpenCL device, where there is one, the text is the processor's, with weights that round no activation; where there is
    none, that is said. No other name is a device."""
    arguments = ("run", "--model", model_f32, "--prompt", QUESTION, "-n", 32, "--ctx", 128, "--stats")
    done = paged(*arguments, "--device", "opencl")
    if "no OpenCL" in done.stderr:
        assert done.returncode == 1 and not done.stdout
    else:
        assert done.returncode == 0 and "KV read back 0 B" in done.stderr, done.stderr
        assert done.stdout == paged(*arguments, "--device", "cpu").stdout
    done = paged(*arguments, "--device", "abacus")
    assert done.returncode == 1 and 'device is "abacus"; cpu, opencl' in done.stderr
    assert "this machine, not that of --device" in paged(*arguments, "--device", "opencl", "--fit").stderr


def test_windows_in_plan_and_inspect(paged, tiny):
    path = tiny("gemma3")[2]
    assert "6 of 7 layers keep 24 tokens" in paged("run", "--model", path, "--prompt", "hi", "-n", 2).stderr
    told = json.loads(paged("inspect", path, "--json").stdout)
    assert (told["window"], told["windowed_layers"], told["layers"]) == (24, 6, 7)
    assert told["kv_bytes_per_token"]["f16"] == 7 * 1 * (32 + 32) * 2
    assert "6 of 7 layers see the last 24 tokens" in paged("inspect", path).stdout


def test_quiet(paged, model):
    done = paged("run", "--model", model, "--prompt", QUESTION, "--max-tokens", 3, "--quiet", *ONE_THREAD)
    assert done.returncode == 0 and done.stdout and done.stderr == ""


def test_plan_at_start(paged, model):
    done = paged("run", "--model", model, "--prompt", QUESTION, "--max-tokens", 3, "--ctx", 512)
    assert done.returncode == 0
    # 30 layers × 3 KV heads × (64 + 64) × 2 bytes = 22.5 KiB a token, so 512 tokens are 11.25 MiB.
    for word in ("weights", "32 blocks", "512 tokens", "11.2 MiB"):
        assert word in done.stderr, done.stderr
    assert "\r" not in done.stderr and "\033" not in done.stderr


def test_stats(paged, model):
    done = paged("run", "--model", model, "--prompt", QUESTION, "--max-tokens", 5, "--quiet", "--stats", *ONE_THREAD)
    assert done.returncode == 0
    assert "tokens/s" in done.stderr and "blocks" in done.stderr and "same bits" in done.stderr
    assert re.search(r"steps +5, .* 1 requests\ngave way +0 times", done.stderr)
    assert "attention" in done.stderr and "linear" in done.stderr and "packed q8_0, q4_1" in done.stderr


def test_contiguous_says_the_same_in_fewer_places(paged, model):
    """Without paging: the same tokens, in a run for the whole context, of which the pool holds two."""
    args = ("--ctx", 512, "--pool-bytes", 22 * 1024 * 1100 + (1 << 20))
    with_paging, without = (run_json(paged, model, *args, *more) for more in [(), ("--contiguous",)])
    assert without["tokens"] == with_paging["tokens"] and without["cache_miss"] == "off"
    done = paged("run", "--model", model, "--prompt", QUESTION, "--max-tokens", 3, *args, "--contiguous")
    assert done.returncode == 0 and "no paging: room for 2 requests at once, a run of 512 tokens each" in done.stderr


def test_inspect_tells_what_loading_took(paged, model):
    facts = json.loads(paged("inspect", model, "--json").stdout)
    assert facts["load_ms"] > 0 and facts["linear_kernels"].endswith("packed q8_0, q4_1")
    # The packed layout keeps each type's bits for a weight.
    assert 0.98 < facts["packed_bytes"] / facts["weight_bytes"] < 1.02


def test_pool_holds_exactly_what_fits(paged, model):
    """A pool of N bytes is N bytes: what its blocks hold is the context, and one token more is refused."""
    args = ("--pool-bytes", 22 * 1024 * 16 * 5, "--ignore-eos")  # less than 5 blocks of 22.5 KiB a token
    answer = run_json(paged, model, *args)
    assert answer["blocks_used"] == 4
    assert answer["prompt_tokens"] + answer["completion_tokens"] in (64, 65)


# ---- ends ----


def start(paged, model, *args, **options):
    command = [paged.path, "run", "--model", model, "--prompt", QUESTION, "--quiet", *map(str, NO_END), *args]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(command, **options)


def test_interrupt(paged, model):
    with start(paged, model) as process:
        first = os.read(process.stdout.fileno(), 4096)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        rest, stderr = process.communicate(timeout=10)
        assert process.returncode == 130
        assert time.monotonic() - begin < 2
        assert (first + rest).decode("utf-8", "strict")
        assert stderr == b""


def test_interrupt_with_json(paged, model):
    with start(paged, model, "--json") as process:
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=10)
        assert process.returncode == 130
        answer = json.loads(stdout)
        assert answer["finish_reason"] == "cancelled"
        assert len(answer["tokens"]) == answer["completion_tokens"]


def test_interrupt_during_a_long_prompt(paged, model):
    command = [paged.path, "run", "--model", model, "--file", "-", "--raw", "--chunk", "64", "--threads", "1"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        process.stdin.write(b"word " * 8000)
        process.stdin.close()
        time.sleep(1.0)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
        assert time.monotonic() - begin < 5


def test_reader_goes_away(paged, model):
    with start(paged, model) as process:
        os.read(process.stdout.fileno(), 10)
        process.stdout.close()
        assert process.wait(timeout=10) in (1, 141)


def test_full_disk(paged, model):
    with open("/dev/full", "wb") as full, start(paged, model, stdout=full) as process:
        _, stderr = process.communicate(timeout=20)
        assert process.returncode == 1
        assert len(stderr.splitlines()) == 1 and stderr.startswith(b"paged: ")


# ---- terminals ----


def on_terminal(command, columns, stdout=None, env=()):
    """Runs a command whose stderr (and stdout, unless given) is a terminal: (exit code, what it showed)."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    options = {"stdout": stdout or theirs, "stderr": theirs, "stdin": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=os.environ | {"TERM": "xterm"} | dict(env), **options)
    os.close(theirs)
    shown, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline and select.select([ours], [], [], 60)[0]:
        try:
            data = os.read(ours, 65536)
        except OSError:  # how Linux tells that the other end is closed
            break
        if not data:
            break
        shown += data
    os.close(ours)
    return process.wait(timeout=10), shown.decode("utf-8", "strict")


def long_prompt(paged, model, *args):
    prompt = ("--raw", "--prompt", "word " * 300, "--max-tokens", "3", "--chunk", "64", "--threads", "1")
    return [paged.path, "run", "--model", model, *prompt, *args]


def visible(line):
    return re.sub(r"\033\[[0-9;]*[A-Za-z]", "", line)


@pytest.mark.parametrize("columns", [100, 40, 20, 8, 3])
def test_progress_on_a_terminal(paged, model, columns):
    code, shown = on_terminal(long_prompt(paged, model), columns, stdout=subprocess.DEVNULL)
    assert code == 0
    bars = [visible(part) for part in re.split(r"[\r\n]", shown) if "%" in part]
    assert bool(bars) == (columns > 4)
    assert all(len(bar) < columns for bar in bars)
    if columns >= 40:
        assert any(bar.startswith("loading") for bar in bars)
        assert any(bar.startswith("reading the prompt") for bar in bars)
    # The bar is gone in the end: what was drawn last on its line is an erase.
    if bars:
        assert shown.rfind("\033[K") > shown.rfind("%")


def test_no_color(paged, model):
    _, plain = on_terminal(long_prompt(paged, model), 80, subprocess.DEVNULL, {"NO_COLOR": "1"})
    _, color = on_terminal(long_prompt(paged, model), 80, subprocess.DEVNULL, {"NO_COLOR": ""})
    assert "%" in plain and not re.search(r"\033\[[0-9;]*m", plain)
    assert re.search(r"\033\[[0-9;]*m", color)


def test_no_progress_when_quiet_or_dumb(paged, model):
    _, quiet = on_terminal(long_prompt(paged, model, "--quiet"), 80, subprocess.DEVNULL)
    assert quiet == ""
    _, dumb = on_terminal(long_prompt(paged, model), 80, subprocess.DEVNULL, {"TERM": "dumb"})
    assert "\033" not in dumb and "%" not in dumb


def test_text_on_a_terminal_ends_its_line(paged, model):
    code, shown = on_terminal(long_prompt(paged, model, "--quiet"), 80)
    assert code == 0 and shown.endswith("\n")
