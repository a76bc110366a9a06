"""Goal: conversations go on when the server that had them is gone. Method: three servers, HAProxy with deploy/haproxy.cfg and a Redis
server on loopback; one server is killed, another drained; the oracle is a server that nothing has interrupted."""
import concurrent.futures
import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import threading
import time

import conftest
import pytest
from redis_server import Redis
from serving import Server

HAPROXY = shutil.which("haproxy") or ("/usr/sbin/haproxy" if shutil.which("/usr/sbin/haproxy") else None)
pytestmark = pytest.mark.skipif(not HAPROXY, reason="there is no haproxy (Debian's package of this name)")
CONFIG = conftest.ROOT / "deploy" / "haproxy.cfg"
GREEDY = {"temperature": 0, "seed": 1, "logprobs": True, "max_tokens": 10}
# So long that the block or two that a killed server had not written yet are less than a tenth of it.
SYSTEM = "You are a patient teacher and answer in one short sentence. " * 24


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Balancer(Server):
    """HAProxy as it is in deploy/, with addresses of this machine; what a Server is asked, it can be asked."""

    def __init__(self, folder, servers):
        self.port, self.errors = free_port(), []
        text = CONFIG.read_text(encoding="utf-8").replace("bind :8080", f"bind 127.0.0.1:{self.port}")
        text = text.replace("/run/haproxy/admin.sock", str(folder / "admin.sock"))
        for i, server in enumerate(servers, 1):
            text = text.replace(f"10.0.0.{i}:8080", f"127.0.0.1:{server.port}")
        assert "10.0.0" not in text
        path = folder / "haproxy.cfg"
        path.write_text(text, encoding="utf-8")
        self.process = subprocess.Popen([HAPROXY, "-db", "-f", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                if self.request("GET", "/health")[0] == 200:
                    return
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.05)

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()


def test_the_file_is_right(tmp_path):
    text = CONFIG.read_text(encoding="utf-8").replace("/run/haproxy/admin.sock", str(tmp_path / "admin.sock"))
    (tmp_path / "haproxy.cfg").write_text(text, encoding="utf-8")
    done = subprocess.run([HAPROXY, "-c", "-f", tmp_path / "haproxy.cfg"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "WARNING" not in done.stdout + done.stderr, done.stdout + done.stderr


class Conversation:
    """One person's: says what comes next, tries again what may be tried again, and keeps what was answered."""

    def __init__(self, server, number):
        self.server, self.number, self.answers, self.errors, self.served_by = server, number, [], [], None
        made = server.post("/v1/conversations", {"messages": [{"role": "system", "content": f"{SYSTEM} You are number {number}."}]})
        self.path = "/v1/conversations/" + made["id"]

    def say(self):
        words = f"What is {len(self.answers) + 2} times {self.number + 3}?"
        body = {"content": words, "n_messages": 1 + 2 * len(self.answers), **GREEDY}
        for _ in range(50):
            status, headers, value = self.server.request("POST", self.path + "/turns", body)
            if status == 409 and value["error"]["code"] == "changed":  # kept, but the answer did not come through
                value = {"choices": None, "text": self.server.get(self.path)["messages"][-1]["content"]}
                status = 200
            if status == 200:
                self.served_by = headers.get("x-served-by")
                self.answers.append(value)
                return value
            assert status in (409, 429, 502, 503, 504), value
            self.errors.append(status)
            time.sleep(float(headers.get("Retry-After", 0.1)))  # as clients do; of a server that loads: a second
        raise AssertionError(value)


def cached_part(answer):
    usage = answer["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]


def test_a_conversation_outlives_its_server(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("h")
    n_talks, n_turns = 3, 4
    with Server(model, "--ctx", 1024) as alone:
        expected = [Conversation(alone, i) for i in range(n_talks)]
        for talk in expected:
            for _ in range(n_turns):
                talk.say()
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(Redis(folder))
        args = ("--ctx", 1024, "--redis", redis.address, "--redis-timeout", 5000)
        servers = [stack.enter_context(Server(model, *args)) for _ in range(3)]
        balancer = stack.enter_context(Balancer(folder, servers))
        talks = [Conversation(balancer, i) for i in range(n_talks)]
        for talk in talks:
            first = talk.say()
            at = talk.served_by
            talk.say()
            assert talk.served_by == at and re.fullmatch(r"replica-[123]", at)  # it stays where its blocks are
            assert first["choices"]
        lost = int(talks[0].served_by[-1]) - 1
        orphans = [t for t in talks if t.served_by == talks[0].served_by]
        # Killed while all of them talk.
        with concurrent.futures.ThreadPoolExecutor(n_talks) as pool:
            running = [pool.submit(t.say) for t in talks]
            servers[lost].kill()
            for r in running:
                r.result()
        for talk in talks:
            talk.say()
            assert talk.served_by != f"replica-{lost + 1}" and len(talk.errors) <= 1
        for talk, want in zip(talks, expected):
            assert all(got["choices"] in (None, expect["choices"]) for got, expect in zip(talk.answers, want.answers, strict=True))
            kept = balancer.get(talk.path)["messages"]
            assert kept == alone_messages(want, talk) and len(kept) == 1 + 2 * n_turns

        parts = [[round(cached_part(a), 2) if a["choices"] else None for a in t.answers] for t in orphans]
        assert all(p[3] >= 0.9 for p in parts), parts

        # One that drains ends what it has begun, and nothing new comes to it.
        talk = talks[0]
        talk.errors.clear()
        at = int(talk.served_by[-1]) - 1
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            last = pool.submit(talk.say)
            servers[at].process.send_signal(signal.SIGTERM)
            last.result()
        assert len(talk.errors) <= 1 and servers[at].process.wait(timeout=60) == 0
        assert talk.say() and talk.served_by not in (f"replica-{at + 1}", f"replica-{lost + 1}")
        assert balancer.get(talk.path)["n_messages"] == 1 + 2 * (n_turns + 2)

        # What is on Redis under names that tell nothing.
        names = redis("KEYS", "*")
        assert names and all(re.fullmatch(rb"paged:(b:[0-9a-f:]+|t:[0-9a-f:]+|n:conv-[0-9a-f]+|notes)", n) for n in names), names


def alone_messages(want, talk):
    """What the conversation must be: the system message, then what was said and answered."""
    out = [{"role": "system", "content": f"{SYSTEM} You are number {talk.number}."}]
    for i, answer in enumerate(want.answers):
        out.append({"role": "user", "content": f"What is {i + 2} times {talk.number + 3}?"})
        out.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return out


@pytest.mark.skipif(not os.environ.get("PAGED_LONG"), reason="minutes; --long")
def test_servers_die_again_and_again(model, tmp_path_factory):
    """A random one of three is killed at a random moment and started again, twenty times, while six people talk. Each conversation is the
    one that nothing has interrupted, and says each turn once."""
    rng, folder = random.Random(conftest.random_seed()), tmp_path_factory.mktemp("h")
    n_talks, n_deaths = 6, 20
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(Redis(folder))
        ports = [free_port() for _ in range(3)]

        def start(i):
            return stack.enter_context(Server(model, "--ctx", 4096, "--port", ports[i], "--redis", redis.address, "--redis-timeout", 5000))

        servers = [start(i) for i in range(3)]
        balancer = stack.enter_context(Balancer(folder, servers))
        talks = [Conversation(balancer, i) for i in range(n_talks)]
        over = threading.Event()

        def talk_on(talk):
            while not over.is_set():
                talk.say()

        with concurrent.futures.ThreadPoolExecutor(n_talks) as pool:
            running = [pool.submit(talk_on, t) for t in talks]
            try:
                for _ in range(n_deaths):
                    time.sleep(rng.uniform(0.2, 2))
                    i = rng.randrange(3)
                    servers[i].kill()
                    time.sleep(rng.uniform(0, 1))
                    servers[i] = start(i)
            finally:
                over.set()
            for r in running:
                r.result()
        with Server(model, "--ctx", 4096) as alone:
            for talk in talks:
                want = Conversation(alone, talk.number)
                for _ in talk.answers:
                    want.say()
                assert balancer.get(talk.path)["messages"] == alone_messages(want, talk)
        print("turns", [len(t.answers) for t in talks], "errors", [t.errors for t in talks])
        assert all(len(t.errors) <= n_deaths for t in talks)
