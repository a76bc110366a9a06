"""llama.cpp as an oracle: token ids, chat templates, greedy text, and log-probabilities of given tokens."""
import concurrent.futures
import copy
import http.client
import json
import os
import subprocess
import sys
import urllib.parse

HARMLESS = 253  # any token that is whole UTF-8 by itself; its text is never looked at


class LlamaCpp:
    """A server in its own process, so that a crash of llama.cpp fails one test and not the whole run."""

    def __init__(self, model, n_ctx=2048, kv_type="f32", flash_attn=False, n_threads=1, n_parallel=1, log=None):
        config = {"model": str(model), "n_ctx": n_ctx, "n_threads": n_threads, "n_parallel": n_parallel}
        config |= {"kv_type": kv_type, "flash_attn": flash_attn}
        self.slot, self.n_parallel = -1, n_parallel
        script = os.path.join(os.path.dirname(__file__), "llamacpp_server.py")
        self.log = open(log, "wb") if log else subprocess.DEVNULL
        self.process = subprocess.Popen(
            [sys.executable, script, json.dumps(config)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
        )
        line = self.process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f"llama.cpp does not load {model}")
        address = urllib.parse.urlparse(json.loads(line)["address"])
        self.connection = http.client.HTTPConnection(address.hostname, address.port, timeout=120)

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        if self.log != subprocess.DEVNULL:
            self.log.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _exchange(self, path, body):
        self.connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        return response.status, response.read()

    def post(self, path, body):
        body = json.dumps(body)
        try:
            status, data = self._exchange(path, body)
        except (ConnectionError, http.client.HTTPException):
            # The server closes a connection that was idle for some seconds; a second failure is a real one.
            self.connection.close()
            status, data = self._exchange(path, body)
        if status != 200:
            raise RuntimeError(f"{path}: {status} {data[:300]!r}")
        return json.loads(data)

    def tokenize(self, text, parse_special=True, add_special=False):
        body = {"content": text, "parse_special": parse_special, "add_special": add_special}
        return self.post("/tokenize", body)["tokens"]

    def apply_template(self, messages):
        return self.post("/apply-template", {"messages": messages})["prompt"]

    def generate(self, tokens, n):
        """Greedy continuation of token ids, as ids; shorter than n if the model ended it."""
        body = {"prompt": tokens, "n_predict": n, "temperature": 0, "return_tokens": True}
        return self.post("/completion", body)["tokens"]

    def _next(self, tokens, bias_id, n_probs):
        body = {
            "prompt": tokens, "n_predict": 1, "n_probs": n_probs, "temperature": 0, "cache_prompt": True,
            "logit_bias": [[bias_id, 1e9]], "id_slot": self.slot,
        }
        answer = self.post("/completion", body).get("completion_probabilities")
        return answer[0] if answer else None

    def score(self, tokens, first=1):
        """[(log-probability of tokens[i], most likely token there) for i = first …], given all tokens before.

        There are no prompt log-probabilities in the server's API, so the next token is forced by a bias,
        position by position; the values reported stay raw. A token that ends inside a UTF-8 character is
        reported without them: there another token is forced and the whole distribution is read.
        """
        out = []
        for i in range(first, len(tokens)):
            target = tokens[i]
            at = self._next(tokens[:i], target, 1)
            if at:
                assert at["id"] == target
                out.append((at["logprob"], at["top_logprobs"][0]["id"]))
                continue
            for n_probs in (2000, 1 << 20):
                top = self._next(tokens[:i], HARMLESS, n_probs)["top_logprobs"]
                found = [entry["logprob"] for entry in top if entry["id"] == target]
                if found:
                    break
            out.append((found[0], top[0]["id"]))
        return out

    def score_all(self, texts):
        """score() of several lists of tokens, n_parallel of them at a time, which read the weights once for all: of a model
        in f32 these are what takes the time."""

        def score(nth_text):
            nth, text = nth_text
            one = copy.copy(self)
            one.slot = nth % self.n_parallel
            one.connection = http.client.HTTPConnection(self.connection.host, self.connection.port, timeout=120)
            try:
                return one.score(text)
            finally:
                one.connection.close()

        with concurrent.futures.ThreadPoolExecutor(self.n_parallel) as pool:
            return list(pool.map(score, enumerate(texts)))
