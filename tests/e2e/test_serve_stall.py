"""Goal: an engine that hangs is told of within a second, by the server that goes on answering, and a step that lasts long is not
waited for. Method: one thread of the server is stopped from outside, in the middle of a step, and let go on again."""
import contextlib
import signal
import time

import pytest
from serving import Server, raw_request
from thread_stop import has_ended, stopped, thread_of

BODY = {"prompt": "One two three", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


@contextlib.contextmanager
def hanging(server):
    """With a stream under way. A second thread of the engine is stopped: the one that others wait for holds no lock in a step."""
    with server.connect() as s, s.makefile("rb") as file:
        s.sendall(raw_request("/v1/completions", dict(BODY, stream=True)))
        while not file.readline().startswith(b"data: "):
            pass
        with contextlib.ExitStack() as stack:
            thread = thread_of(server.process.pid, "paged-1")
            try:
                stack.enter_context(stopped(thread))
            except OSError as error:
                pytest.skip(f"no thread can be stopped here: {error}")
            yield file, stack, thread


def timed(server, *request):
    started = time.monotonic()
    answer = server.request(*request)
    return answer, time.monotonic() - started


def test_an_engine_that_hangs(model):
    with Server(model, "--ctx", 256, "--threads", 2, "--stall-timeout", 1) as server:
        metrics = server.metrics()
        with hanging(server) as (file, stack, _):
            begun = time.monotonic()
            # The thread may have been stopped at the very end of a step; then the next one hangs.
            while server.request("GET", "/slots")[0] == 200:
                assert time.monotonic() - begun < 5
            # It is in a step: what looks into the memory gives up soon, once, and everything else goes on.
            for path in ("/slots", "/paged/blocks", "/paged/check", "/paged/blocks/0"):
                (status, headers, body), seconds = timed(server, "GET", path)
                assert status == 503 and headers["Retry-After"] and "step" in body["error"]["message"] and seconds < 5
            assert server.metrics()["paged_steps_total"] >= metrics["paged_steps_total"]
            while server.request("GET", "/health")[0] == 200:
                assert time.monotonic() - begun < 10
                time.sleep(0.05)
            assert time.monotonic() - begun > 0.9
            for request in (("GET", "/health"), ("POST", "/v1/completions", BODY), ("POST", "/v1/chat/completions", {"messages": []})):
                (status, headers, body), seconds = timed(server, *request)
                assert status == 503 and headers["Retry-After"] and "has not moved for 1 s" in body["error"]["message"]
                assert body["error"]["code"] == 503 and seconds < 1
            assert server.request("POST", "/tokenize", {"content": "a"})[0] == 200
            stack.close()  # it goes on
            read_rest(file)
        assert server.get("/health") == {"status": "ok"}
        assert server.post("/v1/completions", dict(BODY, max_tokens=8))["usage"]["completion_tokens"] == 8
        server.wait_idle()


def read_rest(file):
    """The stream up to its end, which has come."""
    while (line := file.readline()) != b"data: [DONE]\n":
        assert line


def test_a_hanging_engine_can_be_ended(model):
    server = Server(model, "--ctx", 256, "--threads", 2, "--stall-timeout", 1, "--drain-timeout", 2)
    with hanging(server) as (_, _, thread):
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 30
        while not has_ended(thread):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert server.stop() == 1
    assert "has not moved" in "".join(server.errors)
