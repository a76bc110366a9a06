"""Request traces: lengths, arrivals and, where the trace has it, which parts of prompts are the same.

A request is (arrival_ms, n_prompt, n_output, ids): ids name runs of `run` prompt tokens each; equal ids are equal tokens.

load(path)       Azure LLM inference (TIMESTAMP,ContextTokens,GeneratedTokens), BurstGPT, lengths only (num_prefill_tokens,
                 num_decode_tokens), and JSON lines with hash_ids (Mooncake: 512 tokens an id; ShareGPT of LLMServingSim and
                 Bailian: 16). Without arrivals: a Poisson process of one a second.
generated(name)  a load of the shape of one of those traces, where the trace itself is not there: log-normal lengths with its
                 median and mean; conversations whose prompts grow by turns
"""

import csv
import dataclasses
import datetime
import json
import math
import pathlib
import random


@dataclasses.dataclass
class Trace:
    name: str
    requests: list  # of (arrival_ms, n_prompt, n_output, ids)
    run: int        # tokens of an id; 0: no ids

    def lines(self):
        """What cache_replay reads."""
        return "".join(f"{a:.1f} {p} {o}{''.join(f' {i}' for i in ids)}\n" for a, p, o, ids in self.requests)


def poisson(n, seed=1):
    generator, at = random.Random(seed), 0.0
    for _ in range(n):
        yield at
        at += generator.expovariate(1.0) * 1000


def azure_ms(text):
    """100 ns digits are one more than datetime takes."""
    stamp = datetime.datetime.fromisoformat(text[:26])
    return stamp.timestamp() * 1000


def from_csv(path):
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path}: no requests")
    columns = rows[0].keys()
    if "ContextTokens" in columns:
        found = [(azure_ms(r["TIMESTAMP"]), int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in rows]
    elif "Request tokens" in columns:
        found = [(float(r["Timestamp"]) * 1000, int(r["Request tokens"]), int(r["Response tokens"])) for r in rows]
    elif "num_prefill_tokens" in columns:
        found = [(at, int(r["num_prefill_tokens"]), int(r["num_decode_tokens"]))
                 for r, at in zip(rows, poisson(len(rows)))]
    else:
        raise ValueError(f"{path}: columns {', '.join(columns)} are of no trace that this reads")
    first = found[0][0]
    return [(at - first, prompt, output, []) for at, prompt, output in found if prompt > 0]


def from_json_lines(path):
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    found = [(float(r["timestamp"]) * (1000 if "chat_id" in r else 1), r["input_length"], r["output_length"],
              r["hash_ids"]) for r in rows]
    # 512 tokens an id, the last one partly filled, or 16 and full ones only.
    wide = all(len(ids) == math.ceil(n / 512) for _, n, _, ids in found)
    return found, 512 if wide else 16


def load(path):
    path = pathlib.Path(path)
    if path.suffix == ".csv":
        return Trace(path.stem, from_csv(path), 0)
    requests, run = from_json_lines(path)
    return Trace(path.stem, requests, run)


# ---- loads of the same shape ----

# prompt: median, mean; output: median, mean; longest; requests
SHAPES = {
    "azure_conv": ((1020, 1154), (129, 211), 14050, 4000),
    "azure_code": ((1469, 2047), (13, 27), 7437, 4000),
    "arxiv": ((2712, 2900), (165, 305), 4056, 2000),
}
# prompts of turns: share of prompts that begin with an earlier one, ids of a first prompt, tokens of an id, requests
CONVERSATIONS = {"mooncake": (0.4, 16, 512, 1500), "sharegpt": (0.1, 50, 16, 300)}


def log_normal(generator, median_mean, longest):
    median, mean = median_mean
    sigma = math.sqrt(2 * math.log(mean / median))
    return max(1, min(longest, round(generator.lognormvariate(math.log(median), sigma))))


def generated(name, seed=1):
    generator = random.Random(seed)
    if name in SHAPES:
        prompt, output, longest, n = SHAPES[name]
        requests = [(at, log_normal(generator, prompt, longest), log_normal(generator, output, longest), [])
                    for at in poisson(n, seed)]
        requests[n // 2] = (requests[n // 2][0], longest, 1, [])  # the tail of a real load is longer than log-normal
        return Trace(f"{name} (generated)", requests, 0)
    share, n_ids, run, n = CONVERSATIONS[name]
    histories, requests, next_id = [], [], 1
    for at in poisson(n, seed):
        ids = list(generator.choice(histories)) if histories and generator.random() < share else [0]
        for _ in range(max(1, round(generator.expovariate(1 / n_ids)))):
            ids.append(next_id)
            next_id += 1
        histories.append(ids)
        requests.append((at, len(ids) * run - generator.randrange(run), max(1, round(generator.expovariate(1 / 300))),
                         ids))
    return Trace(f"{name} (generated)", requests, run)
