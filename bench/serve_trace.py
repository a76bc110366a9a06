"""A request trace against servers, for bench_serve.py: the lengths of bench/traces.py, scaled to a small model's context, arrive as the
trace says (times --time-scale), one connection each. What is reported is what the clients see; a request that is refused is counted
and not tried again. The servers are asked one after the other.
"""

import asyncio
import json
import pathlib
import statistics
import time

import traces
from rounds import row

LENGTH_SCALE, N_REQUESTS = 4, 60


def load(name):
    return traces.load(name) if pathlib.Path(name).exists() else traces.generated(name)


def requests_of(trace, time_scale, n_vocab, n_ctx):
    """[(seconds, tokens, number of new tokens)]; equal ids of the trace are equal tokens."""
    found = []
    for i, (at_ms, n_prompt, n_output, ids) in enumerate(trace.requests[:N_REQUESTS]):
        n_prompt = min(max(1, n_prompt // LENGTH_SCALE), n_ctx * 3 // 4)
        n_output = min(max(1, n_output // LENGTH_SCALE), n_ctx - n_prompt)
        run = max(1, trace.run // LENGTH_SCALE)
        places = [(ids[j // run] if j // run < len(ids) else -1 - i, j) for j in range(n_prompt)]
        found.append((at_ms / 1000 * time_scale, [(7919 * j + 104729 * name) % (n_vocab - 1000) + 1000 for name, j in places], n_output))
    return found


async def one(port, request, started):
    """(status, seconds to the first token, [seconds between two events], tokens of the prompt, of these cached)"""
    at, tokens, n_output = request
    await asyncio.sleep(max(0, at - (time.perf_counter() - started)))
    sent = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": tokens, "max_tokens": n_output, "ignore_eos": True, "stream": True, "temperature": 0,
                       "stream_options": {"include_usage": True}}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    status, times, usage = int((await reader.readline()).split()[1]), [], {}
    while status == 200 and (line := await reader.readline()):
        if line.startswith(b"data: [DONE]"):
            break
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            if any(choice.get("text") for choice in event["choices"]):
                times.append(time.perf_counter())
    writer.close()
    return {"status": status, "first": times[0] - sent if times else None, "gaps": [b - a for a, b in zip(times, times[1:])],
            "tokens": usage.get("completion_tokens", 0), "prompt": usage.get("prompt_tokens", 0),
            "cached": usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)}


async def all_of(port, requests):
    started = time.perf_counter()
    answers = await asyncio.gather(*(one(port, request, started) for request in requests))
    return answers, time.perf_counter() - started


def quantile(values, share):
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def replay(name, time_scale, servers, n_vocab, n_ctx, progress):
    trace = load(name)
    requests = requests_of(trace, time_scale, n_vocab, n_ctx)
    case = f"{trace.name}, {len(requests)} requests, lengths / {LENGTH_SCALE}, times × {time_scale:g}"
    for server in servers:
        progress.show(f"{server.name}: {case}")
        answers, seconds = asyncio.run(all_of(server.port, requests))
        good = [a for a in answers if a["status"] == 200 and a["first"] is not None]

        def told(metric, unit, value, better="lower", server=server):
            return row("serve", case, f"{server.name}: {metric}", unit, [value], better=better, least=1)

        yield told("refused", "requests", sum(a["status"] == 429 for a in answers))
        yield told("failed", "requests", sum(a["status"] not in (200, 429) for a in answers))
        if not good:
            continue
        yield told("together", "tokens/s", sum(a["tokens"] for a in good) / seconds, "higher")
        yield told("prompt tokens from the cache", "ratio", sum(a["cached"] for a in good) / max(1, sum(a["prompt"] for a in good)), "higher")
        firsts, gaps = [a["first"] for a in good], [gap for a in good for gap in a["gaps"]]
        yield told("to the first token, median", "ms", statistics.median(firsts) * 1e3)
        yield told("to the first token, 99th percentile", "ms", quantile(firsts, 0.99) * 1e3)
        if gaps:
            yield told("between two tokens, median", "ms", statistics.median(gaps) * 1e3)
            yield told("between two tokens, 99th percentile", "ms", quantile(gaps, 0.99) * 1e3)
