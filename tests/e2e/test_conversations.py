"""Goal: conversations are kept, in memory or on Redis, as they were: after a restart, after kill -9, for every server that shares them.
Method: from outside; the oracle of an answer is a server that nothing has interrupted."""
import json
import os
import time

import pytest
from redis_server import Redis
from serving import Server

GREEDY = {"temperature": 0, "seed": 1, "logprobs": True, "top_logprobs": 2}
SYSTEM = {"role": "system", "content": "You are brief. " * 50}
TURNS = ("Name a fruit.", "Name another one.", "And a third, with its colour.")


@pytest.fixture(scope="module")
def server(model):
    with Server(model, "--ctx", 1024) as s:
        yield s


@pytest.fixture
def redis(tmp_path_factory):
    with Redis(tmp_path_factory.mktemp("r")) as r:
        yield r


def say(server, path, content, **more):
    return server.post(path + "/turns", {"content": content, "max_tokens": 12, **GREEDY, **more})


def streamed(server, path, content):
    """The text of a turn that is streamed."""
    raw = server.post(path + "/turns", {"content": content, "max_tokens": 12, "stream": True, **GREEDY})
    lines = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines[:-1])


def begin(server, **fields):
    return "/v1/conversations/" + server.post("/v1/conversations", {"messages": [SYSTEM], **fields})["id"]


@pytest.fixture(scope="module")
def uninterrupted(server):
    """The answers to TURNS of one conversation that nothing has interrupted."""
    path = begin(server)
    answers = [say(server, path, t) for t in TURNS]
    server.request("DELETE", path)
    return answers


def test_titles_pins_and_expiry(server):
    path = begin(server, title="Fruit")
    made = server.get(path)
    assert (made["title"], made["pinned"], made["expires_at"], made["n_messages"]) == ("Fruit", False, None, 1)
    soon = int(time.time()) + 1000
    for fields in ({"title": "Früchte"}, {"pinned": True}, {"expires_at": soon}, {"title": None, "pinned": False, "expires_at": None}):
        status, _, value = server.request("PATCH", path, fields)
        assert status == 200 and {k: value[k] for k in fields} == fields
        assert server.get(path) == value
    for salt in ("x" * 257, 7, "a\0b"):
        assert server.request("POST", "/v1/conversations", {"cache_salt": salt})[0] == 400
    for wrong in ({"title": 7}, {"title": "x" * 201}, {"pinned": "yes"}, {"expires_at": 5}, {"expires_at": "later"}, {"expires_at": 1 << 50}):
        status, _, value = server.request("PATCH", path, wrong)
        assert status == 400 and value["error"]["param"] == next(iter(wrong))
    assert server.get(path)["title"] is None
    say(server, path, "Ünd now something that is rather long, so that it does not fit into a title as a whole. Or does it?")
    title = server.get(path)["title"]
    assert title.startswith("Ünd now something") and 40 < len(title) <= 60  # it takes its name from what was said first
    say(server, path, "Else.")
    assert server.get(path)["title"] == title
    server.request("PATCH", path, {"expires_at": int(time.time()) + 1})
    deadline = time.monotonic() + 60
    while server.request("GET", path)[0] == 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.request("GET", path)[0] == 404 and server.request("PATCH", path, {"pinned": True})[0] == 404


@pytest.mark.parametrize("message", [
    {"role": "", "content": "x"}, {"role": "poet", "content": "x"}, {"role": "user", "content": [{"\u0093": None}]}, {"role": "user", "content": None},
    {"role": "user", "content": [{"type": "image_url", "text": "x"}]}, {"role": "assistant", "content": "", "tool_calls": [{}]}, {"content": "x"}, "user"])
def test_only_messages_of_a_chat_are_kept(server, message):
    for messages in ([message], [SYSTEM, message], message):
        status, _, value = server.request("POST", "/v1/conversations", {"messages": messages})
        assert (status, value["error"]["param"]) == (400, "messages")
    assert server.post("/v1/conversations", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]})["n_messages"] == 1


def test_the_list_has_pages(server):
    paths = [begin(server, title=f"Number {i}") for i in range(5)]
    ids = [p.rsplit("/", 1)[1] for p in paths]
    server.request("PATCH", paths[1], {"pinned": True})  # changed last, so listed first
    newest = [ids[1], ids[4], ids[3], ids[2], ids[0]]
    first = server.get("/v1/conversations?limit=2")
    assert [c["id"] for c in first["data"]] == newest[:2] and first["has_more"] and "messages" not in first["data"][0]
    rest = server.get(f"/v1/conversations?limit=3&after={newest[1]}")
    assert [c["id"] for c in rest["data"]] == newest[2:]
    for wrong in ("0", "-1", "x", "1001", "-1.8628063949876216e-47", "%zz", "", "0" * 30 + "1"):
        assert server.request("GET", f"/v1/conversations?limit={wrong}")[0] == 400
    for unknown in ("x", "x" * 100, "%zz"):
        assert server.get(f"/v1/conversations?after={unknown}")["data"] == []
    for p in paths:
        assert server.request("DELETE", p)[0] == 200
    assert server.request("DELETE", paths[0])[0] == 404
    assert server.get("/v1/conversations")["data"] == [] or all(c["id"] not in ids for c in server.get("/v1/conversations")["data"])
    for name in ("conv-..%2f..", "conv-", "notes", "conv-" + "0" * 60, "conv-zz", "x"):
        assert server.request("GET", "/v1/conversations/" + name)[0] == 404


def test_a_turn_is_not_said_twice(server):
    path = begin(server)
    say(server, path, TURNS[0], n_messages=1)
    for known, status in ((1, 409), (4, 409), ("3", 400), (3.0, 400)):
        got, _, value = server.request("POST", path + "/turns", {"content": TURNS[0], "n_messages": known, **GREEDY})
        assert got == status and value["error"]["param"] == "n_messages"
        assert status == 400 or value["error"]["code"] == "changed"
    say(server, path, TURNS[1], n_messages=3)
    assert server.get(path)["n_messages"] == 5


def test_a_turn_goes_on_with_the_tokens_of_the_last(server):
    """An answer at a high temperature is spelled in tokens that its text does not give; what was computed is taken over all the same."""
    for seed in range(2):
        path = begin(server)
        first = server.post(path + "/turns", {"content": TURNS[0], "max_tokens": 60, "temperature": 1.5, "seed": seed, "ignore_eos": True})
        usage = first["usage"]
        stop = server.post(path + "/turns", {"content": TURNS[1], "max_tokens": 4, "stop": ["e"], "temperature": 1, "seed": seed})
        cached = stop["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= usage["total_tokens"] - 1, (cached, usage)
        assert server.get(path)["n_messages"] == 5 and "tokens" not in server.get(path)
        say(server, path, TURNS[2])  # after a stop string the text gives the tokens
        assert server.post(path + "/drop", {"turns": 1})["n_messages"] == 5
        say(server, path, TURNS[2])


def test_a_salt_stays_with_its_conversation(server):
    path = begin(server, cache_salt="mine")
    assert "cache_salt" not in server.get(path)
    say(server, path, TURNS[0])
    again = say(server, path, TURNS[1])
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert say(server, path, TURNS[2], cache_salt="mine")["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    status, _, value = server.request("POST", path + "/turns", {"content": "x", "cache_salt": "yours"})
    assert status == 400 and value["error"]["param"] == "cache_salt"
    # The same words of somebody else are computed.
    other = begin(server, cache_salt="theirs")
    assert say(server, other, TURNS[0])["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    branch = server.post(path + "/fork", {})
    assert server.request("POST", f"/v1/conversations/{branch['id']}/turns", {"content": "x", "cache_salt": "theirs"})[0] == 400


def same(a, b):
    """Text, log-probabilities and reason, to the last bit."""
    return a["choices"] == b["choices"]


@pytest.mark.parametrize("place", ["--redis", "--store"])
def test_kept_over_kill_and_restart(model, request, tmp_path, uninterrupted, place):
    args = ("--ctx", 1024, place, request.getfixturevalue("redis").address if place == "--redis" else tmp_path / "store")
    with Server(model, *args) as first:
        path = begin(first, title="Kept")
        assert same(say(first, path, TURNS[0]), uninterrupted[0])
        first.kill()  # right after the answer: what was told is kept
    with Server(model, *args) as second:
        listed = second.get("/v1/conversations")["data"]
        assert [(c["id"], c["title"], c["n_messages"]) for c in listed] == [(path.rsplit("/", 1)[1], "Kept", 3)]
        assert streamed(second, path, TURNS[1]) == uninterrupted[1]["choices"][0]["message"]["content"]
        assert second.stop() == 0
    with Server(model, *args) as third:
        answer = say(third, path, TURNS[2])
        assert same(answer, uninterrupted[2])
        usage = answer["usage"]
        print("cached:", usage["prompt_tokens_details"]["cached_tokens"], "of", usage["prompt_tokens"])
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 0.9 * usage["prompt_tokens"]
        assert third.get(path)["n_messages"] == 7


def test_servers_share(model, redis, uninterrupted):
    with Server(model, "--ctx", 1024, "--redis", redis.address) as a, Server(model, "--ctx", 1024, "--redis", redis.address) as b:
        path = begin(a)
        for i, server in enumerate((a, b, a)):
            assert same(say(server, path, TURNS[i]), uninterrupted[i])
            assert [c["n_messages"] for c in b.get("/v1/conversations")["data"]] == [3 + 2 * i]
        assert b.request("DELETE", path)[0] == 200 and a.request("GET", path)[0] == 404


def test_a_password_comes_from_a_file_or_the_environment(paged, redis, tmp_path):
    redis("ACL", "SETUSER", "ann", "on", ">secret-of-ann", "~*", "+@all")
    redis("CONFIG", "SET", "requirepass", "sesame-of-all")
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("sesame-of-all\n", encoding="utf-8")
    wrong.write_text("sesame-of-none\r\nsesame-of-all\n", encoding="utf-8")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PAGED_")}

    def listing(*args, password=None):
        env = clean if password is None else dict(clean, PAGED_REDIS_PASSWORD=password)
        done = paged("chat", "--list", "--redis", redis.address, *args, env=env)
        assert "sesame" not in done.stderr + done.stdout and "secret" not in done.stderr + done.stdout
        return done.returncode

    assert listing("--redis-password-file", right) == 0 and listing(password="sesame-of-all") == 0
    assert listing("--redis-password-file", right, password="sesame-of-none") == 0  # the file comes first
    assert listing("--redis-user", "ann", password="secret-of-ann") == 0
    assert listing() == 1 and listing("--redis-password-file", wrong) == 1 and listing("--redis-user", "ann", password="sesame-of-all") == 1
    assert listing("--redis-password-file", tmp_path / "none") == 1 and listing("--redis-user", "ann") == 2
    assert paged("chat", "--list", "--redis-user", "ann", env=clean).returncode == 2
    assert paged("chat", "--list", "--redis", "redis://:sesame-of-all@host", env=clean).returncode == 2


def test_no_hit_across_salts(model, redis):
    """What one tenant has computed is found on Redis by nobody else, of a conversation as of a plain request, and not by its name."""
    prompt = "The secret of the house is a green door. " * 20
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}

    def cached(server, **salt):
        return server.post("/v1/completions", {**body, **salt})["usage"]["prompt_tokens_details"]["cached_tokens"]

    with Server(model, "--ctx", 1024, "--redis", redis.address) as first:
        assert cached(first, cache_salt="mine") == 0
        deadline = time.monotonic() + 60
        while len(redis("KEYS", "paged:b:*")) < 13 and time.monotonic() < deadline:
            time.sleep(0.02)
    with Server(model, "--ctx", 1024, "--redis", redis.address) as second:
        assert cached(second, cache_salt="yours") == 0 and cached(second) == 0
        assert cached(second, cache_salt="mine") > 150
    names = b" ".join(redis("KEYS", "*"))
    assert all(word not in names for word in (b"secret", b"house", b"mine", b"yours", b"green"))


def n_pinned(paged, folder):
    """Records that pins keep."""
    return sum(shape["pinned"] for shape in json.loads(paged("store", "ls", "--store", folder, "--json").stdout)["fingerprints"])


def n_blocks(answer):
    """Blocks of 16 tokens for what was computed of a turn: all but an answer's last token, unless a token that is no part of it ended it."""
    usage = answer["usage"]
    return (usage["prompt_tokens"] + usage["completion_tokens"] - (answer["choices"][0]["finish_reason"] == "length") + 15) // 16


def test_what_was_computed_is_pinned(paged, model, tmp_path):
    """Neither a block more nor less, whether length or a token ends the answer, wherever that is in a block."""
    ended = {"stop": 0, "length": 0}
    for padding in range(3):
        folder, want = tmp_path / str(padding), 0
        with Server(model, "--ctx", 1024, "--store", folder) as server:
            for max_tokens in (12, 18, 300):
                path = begin(server, cache_salt=str(max_tokens), pinned=True)
                answer = say(server, path, "word " * 5 * padding + "What is 2 + 2?", max_tokens=max_tokens, ignore_eos=max_tokens < 300)
                ended[answer["choices"][0]["finish_reason"]] += 1
                want += n_blocks(answer)
        assert n_pinned(paged, folder) == want
    print(ended)
    assert min(ended.values()) > 0


def test_pins_without_notes_are_taken_back(paged, model, redis, tmp_path):
    """Another server deletes a conversation, or pins it no more; a crash comes between the note and the pin; a note is gone when it is to be deleted."""
    folder = tmp_path / "blocks"
    options = ("--ctx", 1024, "--store", folder)
    with Server(model, *options, "--redis", redis.address) as first:
        paths = [begin(first, pinned=True, cache_salt=str(i)) for i in range(4)]
        blocks = [n_blocks(say(first, path, TURNS[0])) for path in paths]
    assert n_pinned(paged, folder) == sum(blocks)
    with Server(model, "--ctx", 1024, "--redis", redis.address) as other:
        assert other.request("DELETE", paths[0])[0] == 200
        assert other.request("PATCH", paths[1], {"pinned": False})[0] == 200
    with Server(model, *options, "--redis", "127.0.0.1:1"):
        pass  # what cannot be read may be pinned
    assert n_pinned(paged, folder) == sum(blocks)
    with Server(model, *options, "--redis", redis.address):
        pass
    assert n_pinned(paged, folder) == blocks[2] + blocks[3]
    with Server(model, *options, "--redis", redis.address) as second:
        assert second.get(paths[2])["pinned"]  # after what it does at its start
        redis("DEL", "paged:n:" + paths[2].rsplit("/", 1)[1])
        assert second.request("DELETE", paths[2])[0] == 404
    assert n_pinned(paged, folder) == blocks[3]
    with Server(model, *options, "--redis", redis.address) as third:
        assert third.get(paths[3])["pinned"]
        redis("DEL", "paged:n:" + paths[3].rsplit("/", 1)[1])
        third.kill()
    assert n_pinned(paged, folder) == blocks[3]
    with Server(model, *options, "--redis", redis.address):
        pass
    assert n_pinned(paged, folder) == 0


def test_blocks_of_pinned_conversations_stay(paged, model, tmp_path):
    """In a store for 53 blocks others push out what is not pinned, before a restart and after it."""
    folder = tmp_path / "blocks"
    options = ("--ctx", 1024, "--store", folder, "--store-bytes", 20_000_000)

    def found(answer):
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"] / answer["usage"]["prompt_tokens"]

    def flood(server, first):
        for i in range(first, first + 6):
            server.post("/v1/completions", {"prompt": " ".join(f"{i * 1000 + k}" for k in range(80)), "max_tokens": 1, "cache_salt": str(i)})

    with Server(model, *options) as first:
        kept, other = begin(first, cache_salt="kept"), begin(first, cache_salt="other")
        say(first, kept, TURNS[0])
        say(first, other, TURNS[0])
        assert first.request("PATCH", kept, {"pinned": True})[0] == 200
        say(first, kept, TURNS[1])  # its blocks, too
        last = say(first, kept, TURNS[2])
        flood(first, 100)
    assert n_pinned(paged, folder) == n_blocks(last)
    assert "pinned" in paged("store", "ls", "--store", folder).stdout
    with Server(model, *options) as second:
        flood(second, 200)
        assert found(say(second, kept, "And a fourth.")) > 0.8
        assert found(say(second, other, "And a fourth.")) == 0
        assert second.request("PATCH", kept, {"pinned": False})[0] == 200
        assert second.request("PATCH", other, {"pinned": True})[0] == 200
    assert n_pinned(paged, folder) > 0
    with Server(model, *options) as third:
        flood(third, 300)
        assert found(say(third, kept, "And a fifth.")) == 0
        assert found(say(third, other, "And a fifth.")) > 0.8
        assert third.request("DELETE", other)[0] == 200
    assert n_pinned(paged, folder) == 0


def test_what_is_damaged_or_out_of_reach(model, redis):
    with Server(model, "--ctx", 1024, "--redis", redis.address) as server:
        path = begin(server)
        ident = path.rsplit("/", 1)[1]
        say(server, path, TURNS[0])
        name = f"paged:n:{ident}"
        good = redis("GET", name)
        note = json.loads(good)
        wrong = [b"", b"\x00\xff", b"[]", b"{}", good[:-5], json.dumps(dict(note, id="conv-0")).encode(),
                 json.dumps(dict(note, messages=[7])).encode(), json.dumps(dict(note, paged=2)).encode(),
                 json.dumps(dict(note, cache_salt=7)).encode(), b"[" * 100000, b"x" * (17 << 20)]
        for data in wrong:
            redis("SET", name, data)
            status, _, value = server.request("GET", path)
            assert status in (404, 503) and "error" in value, data[:50]
            assert server.request("POST", path + "/turns", {"content": "x"})[0] == status
            # A list reads the beginnings of notes, and shows what is damaged behind that, so that it can be deleted.
            shown = [c["id"] for c in server.get("/v1/conversations")["data"]]
            assert shown == ([ident] if data == good[:-5] else []), data[:50]
        redis("SET", name, good)
        assert server.get(path)["n_messages"] == 3
        redis.kill()
        for method, where, body in (("GET", path, None), ("GET", "/v1/conversations", None), ("POST", path + "/turns", {"content": "x"}),
                                    ("PATCH", path, {"pinned": True}), ("DELETE", path, None), ("POST", "/v1/conversations", {})):
            status, headers, value = server.request(method, where, body)
            assert status == 503 and headers["Retry-After"] and "Redis" in value["error"]["message"], (method, where, value)
        # What needs no store goes on.
        server.post("/v1/chat/completions", {"messages": [SYSTEM], "max_tokens": 2})
        redis.start()
        deadline = time.monotonic() + 60
        while server.request("POST", "/v1/conversations", {})[0] == 503 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(server.get("/v1/conversations")["data"]) == 1


def test_an_answer_that_cannot_be_kept_is_an_error(model, redis):
    with Server(model, "--ctx", 1024, "--redis", redis.address) as server:
        path = begin(server)
        redis("CONFIG", "SET", "maxmemory-policy", "noeviction")
        redis("CONFIG", "SET", "maxmemory", "1")
        status, _, value = server.request("POST", path + "/turns", {"content": "x", "max_tokens": 4})
        assert status == 500 and value["error"]["code"] == "not_kept" and "full" in value["error"]["message"]
        assert server.request("POST", "/v1/conversations", {})[0] == 429
        redis("CONFIG", "SET", "maxmemory", "0")
        assert server.get(path)["n_messages"] == 1
        say(server, path, "x")
        assert server.get(path)["n_messages"] == 3
        # No word of a conversation is in a name, and no password in a message.
        assert all(b"fruit" not in n and b"brief" not in n for n in redis("KEYS", "*"))
