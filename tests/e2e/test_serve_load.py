"""Goal: many clients at once, some of which leave or hardly read, cost nobody his answer, and nothing stays behind. Method: streams
over loopback; every text that ends equals the one of the same request alone; blocks and memory come back.

Ten minutes of 64 clients with PAGED_LONG=1, a minute without."""
import asyncio
import io
import json
import os
import random
import time

import pytest
from conftest import random_seed
from serving import Server, raw_request, read_response

LONG = os.environ.get("PAGED_LONG") == "1"
SECONDS, WARM_UP = (600, 60) if LONG else (60, 6)
WORDS = "one two three four five six seven eight nine ten red green blue house tree river".split()


def make_request(i):
    """One of 24 requests, of mixed lengths; half of them begin alike."""
    shared = "You are a poet who knows many words and likes rivers. " * 4 if i % 2 else ""
    words = " ".join(WORDS[(i * 7 + j) % len(WORDS)] for j in range(3 + i * 5 % 60))
    return {"prompt": shared + words, "max_tokens": 4 + i * 11 % 60, "temperature": 0.8 if i % 3 else 0, "seed": i, "ignore_eos": True,
            "stream": True}


def text_of(server, request):
    return server.post("/v1/completions", dict(request, stream=False))["choices"][0]["text"]


@pytest.fixture(scope="module")
def server(model):
    with Server(model, "--ctx", 512, "--max-running", 32, "--max-waiting", 64, "--reader-timeout", 600) as server:
        yield server


def test_a_client_that_leaves_frees_its_blocks(server):
    # One request runs on, so that steps can be counted.
    server.wait_idle()
    before = server.metrics()
    endless = dict(make_request(1), max_tokens=400)
    for i in range(20):
        with server.connect() as s, s.makefile("rb") as file:
            body = dict(endless, prompt=f"{i} {endless['prompt']}", stream=i % 2 == 0)
            s.sendall(raw_request("/v1/completions", body))
            if body["stream"]:
                while not file.readline().startswith(b"data: "):
                    pass
            else:
                while server.metrics()["vllm:num_requests_running"] == 0:
                    time.sleep(0.002)
        left = server.metrics()
        while (now := server.metrics())["paged_blocks{state=\"used\"}"]:
            assert now["paged_steps_total"] - left["paged_steps_total"] <= 2
    after = server.metrics()
    name = 'vllm:request_success_total{finished_reason="abort"}'
    assert after[name] - before[name] == 20
    server.wait_idle()


def test_a_slow_reader_costs_bounded_memory_and_delays_nobody(server):
    resident = server.metrics()["process_resident_memory_bytes"]
    wide = {"prompt": "Count: one two three", "max_tokens": 480, "ignore_eos": True, "stream": True, "temperature": 0, "n": 8}
    with server.connect(receive_bytes=2048) as slow, slow.makefile("rb", buffering=0) as file:
        slow.sendall(raw_request("/v1/completions", wide))
        begun = file.read(1)
        started = time.monotonic()
        expected = text_of(server, make_request(3))
        for _ in range(3):
            assert text_of(server, make_request(3)) == expected
        assert time.monotonic() - started < 60
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if server.metrics()['paged_requests_waiting_by_reason{reason="reader"}'] == 8:
                break  # all eight are parked
            begun += file.read(1)
            time.sleep(0.05)
        else:
            pytest.fail("the answers of a client that does not read were not parked")
        assert server.metrics()["process_resident_memory_bytes"] - resident < 64 << 20
        whole = io.BytesIO(begun + read_to_end(slow))  # and then it reads, and has all
    status, _, body = read_response(whole)
    assert status == 200 and body.endswith(b"data: [DONE]\n\n")
    texts = [""] * 8
    for event in body.decode().split("\n\n"):
        if event.startswith("data: {"):
            choice = json.loads(event[6:])["choices"][0]
            texts[choice["index"]] += choice["text"]
    assert set(texts) == {text_of(server, dict(wide, n=1))}
    server.wait_idle()


def read_to_end(s):
    """All up to the end of a chunked answer."""
    data = b""
    while not data.endswith(b"\r\n0\r\n\r\n"):
        piece = s.recv(1 << 16)
        assert piece, data[-200:]
        data += piece
    return data


async def one_client(server, request, generator, tally):
    """Sends a request; reads all of it, leaves in the middle, or reads a byte a second for a while first."""
    kind = generator.choices(("reads", "leaves", "slow"), (60, 32, 8))[0]
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(raw_request("/v1/completions", request))
        status = int((await reader.readline()).split()[1])
        if status == 429:
            tally["refused"] += 1
            return None
        assert status == 200
        if kind == "leaves":
            await reader.read(generator.randrange(1, 4000))
            tally["left"] += 1
            return None
        if kind == "slow":
            for _ in range(20 if LONG else 4):
                await reader.read(1)
                await asyncio.sleep(1)
        body = await reader.readuntil(b"data: [DONE]\n\n")
        tally[kind] += 1
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in body.split(b"\n") if line.startswith(b"data: {")]
        return "".join(texts)
    finally:
        writer.close()


async def client_loop(server, n, expected, until, seed, tally):
    generator = random.Random(f"{seed} {n}")
    while time.monotonic() < until:
        i = generator.randrange(len(expected))
        text = await asyncio.wait_for(one_client(server, make_request(i), generator, tally), 120)
        assert text is None or text == expected[i], (i, text, expected[i])


def test_64_streams(server):
    seed = random_seed()
    server.wait_idle()
    expected = [text_of(server, make_request(i)) for i in range(24)]
    server.wait_idle()
    tally = dict.fromkeys(("reads", "left", "slow", "refused"), 0)

    async def run_all(seconds):
        until = time.monotonic() + seconds
        await asyncio.gather(*(client_loop(server, n, expected, until, seed, tally) for n in range(64)))

    asyncio.run(run_all(WARM_UP))  # what the first of them take for good is not a leak
    server.wait_idle()
    before = server.metrics()
    asyncio.run(run_all(SECONDS))
    server.wait_idle()
    after = server.metrics()
    print(tally)
    assert tally["reads"] > 20 and tally["left"] > 10 and tally["slow"] > 0
    assert after["process_resident_memory_bytes"] - before["process_resident_memory_bytes"] < 16 << 20
    assert after["process_open_fds"] <= before["process_open_fds"] + 2
    assert after['paged_requests_waiting_by_reason{reason="reader"}'] == 0
