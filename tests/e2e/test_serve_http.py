"""Goal: whatever bytes a client sends, and however it sends them, it is answered by the rules of HTTP and the next request works.
Method: raw sockets against a running server."""
import gzip
import json
import os
import random
import resource
import select
import socket
import time

import pytest
from conftest import random_seed
from serving import Server, raw_request, read_response

COMPLETION = {"prompt": "One two three", "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def server(model):
    with Server(model, "--ctx", 256, "--max-body", 65536) as server:
        yield server


def exchange(server, data, n=1):
    """What comes back for these bytes: n responses."""
    with server.connect() as s:
        s.sendall(data)
        stream = s.makefile("rb")
        return [read_response(stream) for _ in range(n)]


def alive(server):
    assert exchange(server, raw_request("/health"))[0][0] == 200


def test_split_at_every_byte(server):
    data = raw_request("/v1/completions", COMPLETION, headers="X-Request-Id: split\r\n")
    whole = json.loads(exchange(server, data)[0][2])
    for at in range(1, len(data)):
        with server.connect() as s:
            s.sendall(data[:at])
            if at % 8 == 0:
                time.sleep(0.001)
            s.sendall(data[at:])
            status, headers, body = read_response(s.makefile("rb"))
        assert status == 200 and headers["x-request-id"] == "split", at
        assert json.loads(body)["choices"] == whole["choices"], at


def test_bytes_one_by_one(server):
    data = raw_request("/v1/completions", COMPLETION)
    with server.connect() as s:
        for i in range(len(data)):
            s.sendall(data[i:i + 1])
        assert read_response(s.makefile("rb"))[0] == 200


def test_chunked_body(server):
    body = json.dumps(COMPLETION).encode()
    chunks = b"".join(b"%x;note=1\r\n%c\r\n" % (1, c) for c in body) + b"0\r\nTrailer: x\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    first, second = exchange(server, head + chunks + raw_request("/health"), 2)
    assert first[0] == 200 and second[0] == 200


def test_pipelining_keeps_the_order(server):
    requests = [raw_request("/tokenize", {"content": "a " * i}) for i in range(40)]
    mixed = requests[:20] + [raw_request("/v1/completions", COMPLETION)] + requests[20:]
    answers = exchange(server, b"".join(mixed), len(mixed))
    assert all(a[0] == 200 for a in answers)
    counts = [len(json.loads(a[2])["tokens"]) for i, a in enumerate(answers) if i != 20]
    assert counts == sorted(counts) and counts[-1] > 30
    assert json.loads(answers[20][2])["object"] == "text_completion"


def test_a_thousand_at_once_without_reading(server):
    with server.connect() as s:
        s.sendall(raw_request("/openapi.json") * 300)
        stream = s.makefile("rb")
        assert all(read_response(stream)[0] == 200 for _ in range(300))


def test_keep_alive_and_http_1_0(server):
    with server.connect() as s:
        stream = s.makefile("rb")
        for _ in range(3):
            s.sendall(raw_request("/health"))
            assert read_response(stream)[1]["connection"] == "keep-alive"
        s.sendall(raw_request("/health", headers="Connection: close\r\n"))
        assert read_response(stream)[1]["connection"] == "close" and read_response(stream) is None
    with server.connect() as s:
        s.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        stream = s.makefile("rb")
        assert read_response(stream)[0] == 200 and read_response(stream) is None
    body = json.dumps(dict(COMPLETION, stream=True)).encode()
    with server.connect() as s:  # no chunks are known there: the end is the end of the connection
        s.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert s.makefile("rb").read().endswith(b"data: [DONE]\n\n")


def test_expect_continue(server):
    body = json.dumps(COMPLETION).encode()
    with server.connect() as s:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
        stream = s.makefile("rb")
        assert stream.readline() == b"HTTP/1.1 100 Continue\r\n" and stream.readline() == b"\r\n"
        s.sendall(body)
        assert read_response(stream)[0] == 200


@pytest.mark.parametrize("target", ["http://x", "http://x/", "HTTP://x:80/health", "http://", "http://x/%61"])
def test_absolute_targets(server, target):
    answer = exchange(server, f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())[0]
    assert answer[0] == (404 if target.endswith("%61") else 200)
    alive(server)


@pytest.mark.parametrize("data, status", [
    (b"GET http://x?a HTTP/1.1\r\nHost: x\r\n\r\n", 400), (b"GET ftp://x/ HTTP/1.1\r\nHost: x\r\n\r\n", 400), (b"GARBAGE\r\n\r\n", 400), (b"GET /health\r\n\r\n", 400), (b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n", 505),
    (b"GET /health HTTP/1.1\r\n\r\n", 400), (b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
    (b"GET health HTTP/1.1\r\nHost: x\r\n\r\n", 400), (b"GET /%zz HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET /%00 HTTP/1.1\r\nHost: x\r\n\r\n", 400), (b"GET /a\x01b HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n", 400), (b"GET /health HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\nHost: x\n\r\n\r\n", 400), (b"GET /health HTTP/1.1\r\nHost: a\0b\r\n\r\n", 400),
    (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
    (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 1x\r\n\r\n", 400),
    (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n", 400),
    (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
    (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n", 400),
    (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n", 413),
    (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 65537\r\n\r\n", 413),
    (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n", 413),
    (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nExpect: magic\r\nContent-Length: 2\r\n\r\n", 417),
    (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 101 + b"\r\n", 431),
    (b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 20000 + b"\r\n\r\n", 431),
])
def test_refused_requests(server, data, status):
    with server.connect() as s:
        s.sendall(data)
        stream = s.makefile("rb")
        answer = read_response(stream)
        assert answer[0] == status and answer[1]["connection"] == "close", answer
        error = json.loads(answer[2])["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        assert read_response(stream) is None
    alive(server)


def test_compressed_bodies_are_refused(server):
    packed = gzip.compress(json.dumps(COMPLETION).encode())
    data = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed
    first, second = exchange(server, data + raw_request("/v1/completions", COMPLETION, headers="Content-Encoding: identity\r\n"), 2)
    assert first[0] == 415 and "gzip" in json.loads(first[2])["error"]["message"] and second[0] == 200


def test_a_client_that_closes_its_side_has_left(server):
    # The same as one that goes away: until something is sent to it nobody can tell.
    before = server.metrics()['vllm:request_success_total{finished_reason="abort"}']
    with server.connect() as s:
        s.sendall(raw_request("/v1/completions", dict(COMPLETION, max_tokens=200, ignore_eos=True)))
        s.shutdown(socket.SHUT_WR)
        assert s.recv(1) == b""
    server.wait_idle()
    assert server.metrics()['vllm:request_success_total{finished_reason="abort"}'] == before + 1
    with server.connect() as s:  # what is answered at once is
        s.sendall(raw_request("/health") * 3)
        s.shutdown(socket.SHUT_WR)
        stream = s.makefile("rb")
        assert [read_response(stream)[0] for _ in range(3)] == [200] * 3 and read_response(stream) is None


def test_methods(server):
    for method in ("PUT", "PATCH", "TRACE", "LINK", "get", "PRI", "M" * 300):
        answer = exchange(server, raw_request("/health", method=method))[0]
        assert answer[0] == 405 and answer[1]["allow"] == "OPTIONS, HEAD, GET", method
    assert exchange(server, b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n")[0][0] == 400


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_who_takes_nothing_is_cut_off(model):
    stream = {"prompt": "a", "max_tokens": 900, "n": 8, "stream": True, "ignore_eos": True}
    with Server(model, "--ctx", 1024, "--reader-timeout", 1) as server:
        for data in (raw_request("/openapi.json") * 60, raw_request("/v1/completions", stream)):
            with server.connect(receive_bytes=2048) as s:
                s.sendall(data)
                assert s.recv(1)
                deadline = time.monotonic() + 60
                while server.metrics()["paged_http_connections"] > 1:  # the one that asks
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
        server.wait_idle()


def test_without_descriptors(model):
    with Server(model, "--ctx", 256) as server:
        pid, n_open = server.process.pid, int(server.metrics()["process_open_fds"])
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (n_open + 3, n_open + 3))  # of which the connection that asked was one
        sockets = [server.connect() for _ in range(12)]
        for s in sockets:
            s.sendall(raw_request("/health"))
        time.sleep(0.5)
        before = cpu_seconds(pid)
        time.sleep(1)
        assert cpu_seconds(pid) - before < 0.5  # it waits, and does not turn round and round
        answered = [s for s in sockets if select.select([s], [], [], 0)[0]]
        assert 2 <= len(answered) <= 5
        for s in sockets:
            s.close()
        deadline = time.monotonic() + 30
        while True:
            try:
                alive(server)
                break
            except OSError:
                assert time.monotonic() < deadline
        assert server.metrics()["process_open_fds"] <= n_open + 3


def test_body_too_large_is_told_while_it_is_sent(server):
    with server.connect() as s:
        s.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n")
        try:
            for _ in range(100):
                s.sendall(b"x" * 100000)
        except OSError:
            pass
        assert read_response(s.makefile("rb"))[0] == 413
    alive(server)


def test_length_that_lies(server):
    with server.connect() as s:  # more than is sent: the client gives up
        s.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{}")
    short = b'{"content": "abc"}'  # less than is sent: the rest is the next request, and none
    data = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(short) + short + b"junk}\r\n\r\n"
    first, second = exchange(server, data, 2)
    assert first[0] == 200 and second[0] == 400
    alive(server)


@pytest.mark.parametrize("body", [
    b"", b"{:", b"[]", b"5", b"null", b'"x"', b"{", b'{"prompt": "x"', b'{"prompt": "\\u0000"}', b'{"prompt": "\xff"}',
    b'{"prompt": "a\0b"}', b"[" * 10000 + b"]" * 10000, b'{"a":' * 10000 + b"1" + b"}" * 10000, b'{"a": 1, "a": 2}',
    b'{"prompt": 1e999}'])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bodies_that_are_no_json_object(server, path, body):
    data = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    status, _, text = exchange(server, data + raw_request("/health"), 2)[0]
    assert status == 400 and json.loads(text)["error"]["type"] == "invalid_request_error"
    alive(server)


def test_random_damage(server):
    seed = random_seed()
    generator = random.Random(seed)
    data = raw_request("/v1/completions", COMPLETION, headers="X-Request-Id: abc\r\nConnection: close\r\n")
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        with server.connect() as s:
            s.sendall(bytes(damaged))
            s.shutdown(1)
            answer = s.makefile("rb").read()
        assert not answer or answer.startswith(b"HTTP/1.1 "), answer[:80]
        assert b"HTTP/1.1 500" not in answer
    alive(server)


def test_too_many_connections(model):
    with Server(model, "--ctx", 256, "--max-connections", 2) as server:
        with server.connect() as one, server.connect() as two:
            for s in (one, two):
                s.sendall(raw_request("/health"))
                assert read_response(s.makefile("rb"))[0] == 200
            with server.connect() as three:
                status, headers, body = read_response(three.makefile("rb"))
                assert status == 503 and headers["retry-after"] and json.loads(body)["error"]["code"] == 503
        deadline = time.monotonic() + 20  # until the server has seen that the two have left
        while exchange(server, raw_request("/health"))[0][0] != 200 and time.monotonic() < deadline:
            time.sleep(0.01)
        alive(server)


@pytest.mark.skipif(os.environ.get("PAGED_LONG") != "1", reason="it takes the ten seconds that a head has; PAGED_LONG is not set")
def test_slow_head_is_cut_off_and_delays_nobody(model):
    with Server(model, "--ctx", 256) as server:
        with server.connect() as s:
            s.sendall(b"GET /health HTTP/1.1\r\n")
            started = time.monotonic()
            alive(server)
            try:
                while time.monotonic() - started < 20:  # a header now and then does not help
                    s.sendall(b"X: y\r\n")
                    time.sleep(0.5)
            except OSError:
                pass
            answer = read_response(s.makefile("rb"))
            assert answer is None or (answer[0] == 408 and answer[1]["x-request-id"])
            assert 8 < time.monotonic() - started < 15
