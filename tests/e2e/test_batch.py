"""Goal: `paged batch` answers the OpenAI batch format and goes on where it was stopped. Method: from outside; the answers are those
of `paged run` and of the same requests alone."""
import json
import re
import signal
import subprocess
import time

import conftest
import pytest

SMALL = ("--ctx", 256, "--threads", 1)


def chat(custom_id, text, **body):
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **body}}


def completion(custom_id, prompt, **body):
    return {"custom_id": custom_id, "url": "/v1/completions", "body": {"prompt": prompt, "max_tokens": 8, **body}}


def write(path, requests):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in requests), encoding="utf-8")
    return path


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(paged, model, tmp_path, requests, *args):
    source, target = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    done = paged("batch", source, "--output", target, "--model", model, *SMALL, *args)
    assert done.returncode == 0, done.stderr
    return {line["custom_id"]: line["response"] for line in read(target)}


def test_answers_equal_those_of_run(paged, model, tmp_path):
    question = "Name a fruit."
    answers = run(paged, model, tmp_path, [chat("a", question), completion("b", "The capital of France is", stop="."),
                                           completion("c", [7042, 30, 198], max_tokens=3)])
    alone = json.loads(paged("run", "--model", model, "--prompt", question, "--max-tokens", 8, "--json", *SMALL).stdout)
    body = answers["a"]["body"]
    assert answers["a"]["status_code"] == 200 and body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": alone["text"]}
    assert body["choices"][0]["finish_reason"] == alone["finish_reason"]
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (alone["prompt_tokens"], alone["completion_tokens"])
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert answers["b"]["body"]["choices"][0] == {"index": 0, "text": " Paris", "logprobs": None, "finish_reason": "stop"}
    assert answers["c"]["body"]["usage"]["prompt_tokens"] == 3


def test_stats_count_what_was_shared_and_who_gave_way(paged, model, tmp_path):
    """Equal prompts are computed once and read once; in a pool for less than all of them some give way; the texts stay."""
    requests = [completion(str(i), list(range(1000, 1600)), max_tokens=40, temperature=1, seed=i) for i in range(4)]
    source, found = write(tmp_path / "in.jsonl", requests), []
    for more in [(), ("--contiguous",)]:
        done = paged("batch", source, "--model", model, "--ctx", 704, "--pool-bytes", "60M", "--parallel", 4, "--stats", "-q", *more)
        assert done.returncode == 0, done.stderr
        lines = sorted(done.stdout.splitlines(), key=lambda line: json.loads(line)["custom_id"])
        found.append([json.loads(line)["response"]["body"]["choices"][0]["text"] for line in lines])
        shared = re.search(r"shared +(\d+) of \d+ tokens found in the cache, (\d+) times after a wait; "
                           r"a common beginning read once in (\d+) steps, for (\d+) rows", done.stderr)
        hits, waits, steps, rows = map(int, shared.groups())
        assert (hits, waits, steps, rows) == (0, 0, 0, 0) if more else (hits, waits) == (3 * 599, 3) and rows > 3 * steps > 60
    assert found[0] == found[1]


def test_logprobs(paged, model, tmp_path):
    answers = run(paged, model, tmp_path, [chat("a", "Hi", logprobs=True, top_logprobs=3), completion("b", "One two", logprobs=2)])
    content = answers["a"]["body"]["choices"][0]["logprobs"]["content"]
    assert content and all(len(c["top_logprobs"]) == 3 for c in content)
    for c in content:  # greedy: the chosen one is the first
        assert c["top_logprobs"][0]["token"] == c["token"] and c["top_logprobs"][0]["logprob"] == c["logprob"] <= 0
        assert bytes(c["bytes"]).decode(errors="replace") == c["token"]
    legacy = answers["b"]["body"]["choices"][0]["logprobs"]
    assert len(legacy["tokens"]) == len(legacy["token_logprobs"]) == len(legacy["top_logprobs"]) == 8


def test_bad_requests_are_answered_and_the_rest_goes_on(paged, model, tmp_path):
    requests = ["not json", "[1]", chat("n", "x", n=2), completion("tools", "x", tools=[{}]), chat("long", "word " * 400),
                completion("token", [99999999]), completion("bias", "x", logit_bias={"-1": 1}), completion("hot", "x", temperature=-1),
                completion("type", "x", max_tokens="many"), chat("role", [{"type": "image_url"}]), {"url": "/v1/completions"},
                {"custom_id": "url", "url": "/v1/audio", "body": {}}, completion("good", "x"), completion("good", "twice"), ""]
    answers = run(paged, model, tmp_path, requests)
    codes = {name: r["status_code"] for name, r in answers.items()}
    assert codes == {None: 400, "n": 501, "tools": 501, "long": 400, "token": 400, "bias": 400, "hot": 400, "type": 400,
                     "role": 400, "url": 501, "good": 200}
    error = answers["long"]["body"]["error"]
    assert error["code"] == "context_length_exceeded" and "256" in error["message"]
    assert "99999999" in answers["token"]["body"]["error"]["message"]


def test_goes_on_where_it_was(paged, model, tmp_path):
    requests = [completion(f"r{i}", f"Number {i} is", max_tokens=6) for i in range(12)] + ["no json"]
    source, target = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    args = ("batch", source, "--output", target, "--model", model, *SMALL)
    assert paged(*args).returncode == 0
    whole = target.read_text(encoding="utf-8")
    texts = {line["custom_id"]: line["response"]["body"].get("choices") for line in read(target)}
    assert len(texts) == 13
    lines = whole.splitlines(keepends=True)
    target.write_text("".join(lines[:5]) + lines[5][:40], encoding="utf-8")  # stopped in the middle of a line
    done = paged(*args)
    assert done.returncode == 0 and "were answered before" in done.stderr
    assert {line["custom_id"]: line["response"]["body"].get("choices") for line in read(target)} == texts
    again = paged(*args)
    assert again.returncode == 0 and len(read(target)) == 13
    foreign = tmp_path / "foreign.txt"
    foreign.write_text("my diary\n", encoding="utf-8")
    refused = paged("batch", source, "--output", foreign, "--model", model)
    assert refused.returncode == 1 and foreign.read_text(encoding="utf-8") == "my diary\n"


def test_interrupt_keeps_what_is_there(paged, model, tmp_path):
    requests = [completion(f"r{i}", f"Number {i} is", max_tokens=40, ignore_eos=True) for i in range(200)]
    source, target = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    process = subprocess.Popen([conftest.program("paged"), "batch", source,
                                "--output", target, "--model", model, "--ctx", "64", "--threads", "1"],
                               stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (target.exists() and target.stat().st_size):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on" in err
    n = len(read(target))
    assert 0 < n < 200
    assert all(line["response"]["status_code"] == 200 for line in read(target))


@pytest.mark.parametrize("args, says", [(("batch",), "no file"), (("batch", "/does/not/exist"), "cannot open"),
                                        (("batch", "/"), "is a folder")])
def test_refusals(paged, model, args, says):
    done = paged(*args, "--model", model)
    assert done.returncode in (1, 2) and says in done.stderr and done.stdout == ""


def test_a_refused_model_leaves_no_output(paged, tmp_path):
    requests, target, bad = write(tmp_path / "in.jsonl", [chat("a", "Hi")]), tmp_path / "out.jsonl", tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF")
    assert paged("batch", requests, "--output", target, "--model", bad).returncode == 1 and not target.exists()
    target.write_text("")  # what was there stays
    assert paged("batch", requests, "--output", target, "--model", bad).returncode == 1 and target.exists()
