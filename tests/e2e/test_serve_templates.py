"""Goal: a chat template that refuses is the client's fault, one that is broken or hostile costs the chat and nothing else, and a prompt
has one BOS. Method: tiny models with templates of their own, served."""
import pytest
from models import SHAPES, write_tiny
from serving import Server

STRICT = """{{- bos_token -}}
{%- for m in messages -%}
    {%- if m.role == 'system' %}{{ raise_exception('no system role here') }}{% endif -%}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
    [{{ m.role }}]{{ m.content }}
{%- endfor -%}"""
USER, MODEL, SYSTEM = ({"role": role, "content": "a b"} for role in ("user", "assistant", "system"))


@pytest.fixture
def serve(tmp_path):
    """serve(template, add_bos=…) -> a server of a tiny model with it"""
    def start(template, **more):
        write_tiny(tmp_path / "tiny.gguf", SHAPES[0], template=template, **more)
        return Server(tmp_path / "tiny.gguf", "--ctx", 256, "--max-tokens", 2)
    return start


def chat(server, messages):
    status, _, value = server.request("POST", "/v1/chat/completions", {"messages": messages})
    return status, value.get("error", value)


def completes(server):
    return server.request("POST", "/v1/completions", {"prompt": "a b"})[0] == 200


def test_what_a_template_refuses_is_400(serve):
    with serve(STRICT) as server:
        for messages, says in (([SYSTEM, USER], "no system role here"), ([USER, USER], "roles must alternate"), ([MODEL], "alternate"),
                               ([], "messages")):
            status, error = chat(server, messages)
            assert status == 400 and says in error["message"] and error["type"] == "invalid_request_error"
            for path in ("/tokenize", "/apply-template"):
                assert server.request("POST", path, {"messages": messages})[0] == 400
        assert chat(server, [USER, MODEL, USER])[0] == 200 and completes(server)


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__ }}", "{{ messages.__init__.__globals__ }}", "{{ messages | no_such_filter }}", "{{ no_such_function() }}",
    "{{ cycler.__init__ }}", "{% include '/etc/passwd' %}", "{% for i in range(1000000000) %}x{% endfor %}", "{% if %}", "{{ 1 / 0 }}",
    "{{ 'x' * 2000000000 }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"])
def test_a_bad_template_costs_the_chat_alone(serve, template):
    with serve(template) as server:
        status, error = chat(server, [USER])
        assert status == 400 and error["message"] and "root:" not in error["message"]
        assert completes(server) and server.get("/health") == {"status": "ok"}


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("template", [STRICT, STRICT.replace("{{- bos_token -}}", "")])
def test_one_bos(serve, template, add_bos):
    with serve(template, add_bos=add_bos) as server:
        bos = server.post("/tokenize", {"content": "<|im_start|>"})["tokens"]
        assert len(bos) == 1
        tokens = server.post("/tokenize", {"messages": [USER]})["tokens"]
        has_one = "bos_token" in template or add_bos
        assert tokens.count(bos[0]) == has_one and (tokens[:1] == bos) == has_one
        assert server.post("/v1/chat/completions", {"messages": [USER]})["usage"]["prompt_tokens"] == len(tokens)
        raw = server.post("/tokenize", {"prompt": "a b"})["tokens"]
        assert (raw[:1] == bos) == add_bos
        assert server.post("/v1/completions", {"prompt": "a b"})["usage"]["prompt_tokens"] == len(raw)
