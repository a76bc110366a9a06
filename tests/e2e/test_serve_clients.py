"""Goal: the clients that people use work against `paged serve`, streamed and not. Method: the official `openai` client, whose types
validate every answer; curl; with PAGED_LONG=1 also langchain-openai and litellm, where they are installed; prometheus_client and,
where it is installed, promtool read the metrics."""
import json
import os
import re
import shutil
import subprocess

import conftest
import pytest
from serving import Server

LONG = os.environ.get("PAGED_LONG") == "1"
MESSAGES = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def server(model):
    with Server(model, "--ctx", 512, env={"PAGED_API_KEY": "k"}) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return make_client(server, True)


def make_client(server, strict):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0, _strict_response_validation=strict)


def test_chat(client):
    name = client.models.list().data[0].id
    assert client.models.retrieve(name).id == name
    options = dict(model=name, messages=MESSAGES, temperature=0, max_completion_tokens=20, logprobs=True, top_logprobs=2)
    whole = client.chat.completions.create(**options)
    choice = whole.choices[0]
    assert choice.finish_reason in ("stop", "length") and choice.message.role == "assistant"
    assert "".join(c.token for c in choice.logprobs.content) == choice.message.content
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    text, usage = "", None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == choice.message.content and usage.completion_tokens == whole.usage.completion_tokens
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_completions(server, client):
    name = client.models.list().data[0].id
    options = dict(model=name, prompt=["One two", "The capital of France is"], temperature=0, max_tokens=6, logprobs=1, echo=True)
    # The first token of a prompt has no log-probability, and the client's types know no null there.
    whole = make_client(server, strict=False).completions.create(**options)
    assert [c.index for c in whole.choices] == [0, 1] and whole.choices[1].text.startswith(options["prompt"][1])
    assert whole.choices[0].logprobs.token_logprobs[0] is None
    parts = ["", ""]
    assert client.completions.create(**dict(options, echo=False)).choices[0].logprobs.text_offset[0] == 0
    # Nor do they know that a chunk before the last has no reason to finish, which it has not for the API itself.
    for chunk in make_client(server, strict=False).completions.create(**dict(options, logprobs=None), stream=True):
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == [c.text for c in whole.choices]


def test_errors(server, client):
    import openai
    name = client.models.list().data[0].id
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=name, messages=MESSAGES, temperature=-1)
    assert error.value.param == "temperature" and error.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=name, messages=[{"role": "user", "content": "word " * 1000}])
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.InternalServerError):
        client.embeddings.create(model=name, input="x")


def test_curl(server):
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")
    body = json.dumps({"messages": MESSAGES, "max_tokens": 4, "stream": True})
    done = subprocess.run(["curl", "-sNf", server.url + "/v1/chat/completions", "-H", "Authorization: Bearer k", "-d", body],
                          capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("data: [DONE]\n\n")


@pytest.mark.skipif(not LONG, reason="PAGED_LONG is not set")
def test_langchain(server):
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(base_url=server.url + "/v1", api_key="k", model=server_model(server), temperature=0, max_tokens=12)
    whole = chat.invoke("Name three colours.")
    assert whole.content and whole.usage_metadata["output_tokens"] > 0
    assert "".join(c.content for c in chat.stream("Name three colours.")) == whole.content


@pytest.mark.skipif(not LONG, reason="PAGED_LONG is not set")
def test_litellm(server):
    litellm = pytest.importorskip("litellm")
    options = dict(model="openai/" + server_model(server), api_base=server.url + "/v1", api_key="k", messages=MESSAGES, temperature=0, max_tokens=12)
    whole = litellm.completion(**options)
    assert "".join(c.choices[0].delta.content or "" for c in litellm.completion(**options, stream=True)) == whole.choices[0].message.content


def server_model(server):
    return server.request("GET", "/v1/models", headers={"Authorization": "Bearer k"})[2]["data"][0]["id"]


def metrics_text(server):
    return server.request("GET", "/metrics", headers={"Authorization": "Bearer k"})[2]


def test_prometheus_client_reads_the_metrics(server):
    parser = pytest.importorskip("prometheus_client.parser")
    families = {f.name: f for f in parser.text_string_to_metric_families(metrics_text(server))}
    assert all(f.documentation and f.type != "unknown" for f in families.values())
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prefix_cache_queries",
                 "vllm:prefix_cache_hits", "vllm:num_preemptions", "vllm:prompt_tokens", "vllm:prompt_tokens_cached",
                 "vllm:generation_tokens", "vllm:request_success", "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
                 "vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds",
                 "vllm:request_decode_time_seconds", "vllm:request_prompt_tokens", "vllm:request_generation_tokens",
                 "vllm:iteration_tokens_total", "vllm:cache_config_info", "process_resident_memory_bytes"):
        assert name in families, name
        assert families[name].samples


def test_promtool_reads_the_metrics(server):
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed, and ./x does not do it: Debian's prometheus starts a server")
    done = subprocess.run(["promtool", "check", "metrics"], input=metrics_text(server), capture_output=True, text=True, timeout=60, check=False)
    # What vLLM's names are is not ours to choose: they have a colon, and one is a histogram's that ends like a counter's.
    colon = re.compile(r"vllm:\w+ metric names should not contain ':'")
    complaints = [line for line in (done.stdout + done.stderr).splitlines() if line and not colon.fullmatch(line)]
    assert complaints == ['vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix'] and done.returncode == 3


# ---- the description of the API ----

def test_openapi_names_every_route_and_field(server):
    value = server.request("GET", "/openapi.json", headers={"Authorization": "Bearer k"})[2]
    source = conftest.ROOT / "src" / "server"
    for methods, path in re.findall(r'\{"([A-Z ]+)", "(/[^"]*)"', (source / "route.c").read_text()):
        if path.endswith("/"):
            found = [p for p in value["paths"] if p.startswith(path)]
            served = {m for p in found for m in value["paths"][p]}
        else:
            served = set(value["paths"].get(path, {}))
        assert set(methods.lower().split()) <= served, path
    for path, operations in value["paths"].items():
        methods = {m.upper() for m in operations} & {"GET", "POST", "PATCH", "PUT", "DELETE"}
        methods |= {"OPTIONS"} | ({"HEAD"} if "GET" in methods else set())
        _, headers, _ = server.request("OPTIONS", path.replace("{", "").replace("}", ""))
        assert set(headers["Allow"].split(", ")) == methods, path
    text = (source / "openai.c").read_text()
    fields = set(re.findall(r'(?:take_\w+|field)\(\s*(?:body|options),\s*"(\w+)"', text)) | {"messages", "prompt", "model"}
    described = json.dumps(value["components"]["schemas"])
    assert len(fields) > 25
    for field in fields:
        assert f'"{field}"' in described, field
    # What is refused is said, too.
    refused = re.search(r"names\[\] = \{([^}]*)\}", text)[1]
    for field in re.findall(r'"(\w+)"', refused):
        assert f'"{field}"' in described, field


def test_what_is_not_there_yet_is_said():
    source = (conftest.ROOT / "src" / "server" / "route.c").read_text()
    paths = re.findall(r'"(/[^"]*)", unsupported', source)
    readme = re.search(r"\*\*Not yet\*\*.*?\n\n", (conftest.ROOT / "README.md").read_text(), re.S)[0]
    manual = (conftest.ROOT / "docs" / "server.md").read_text()
    assert len(paths) >= 4
    for path in paths:
        assert f"`{path.rstrip('/')}" in readme and f"`{path.rstrip('/')}" in manual, path
    for field in ("tools", "response_format"):
        assert field in readme and field in manual
