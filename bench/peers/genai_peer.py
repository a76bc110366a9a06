"""OpenVINO GenAI behind the protocol of bench/protocol.h: its continuous-batching pipeline over paged attention, which reads the
same GGUF file, step by step, greedy, its own choice of precisions and of the KV cache's type.

    genai_peer.py MODEL N_THREADS N_VOCAB
"""

import json
import sys
import time

import numpy
import openvino
import openvino_genai

CACHE_GB = 2
BATCH_TOKENS = 2048     # of a step; larger is not faster for prompts of 512
MAX_NEW = 8000


class Peer:
    def __init__(self, path, n_threads, n_vocab):
        config = openvino_genai.SchedulerConfig()
        config.cache_size = CACHE_GB
        config.enable_prefix_caching = False
        config.max_num_batched_tokens = BATCH_TOKENS
        config.max_num_seqs = 64
        config.dynamic_split_fuse = True
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(path, config, "CPU", {"INFERENCE_NUM_THREADS": n_threads})
        self.n_vocab = n_vocab
        self.open = []
        self.n_ids = 0
        self.token = 0

    def prompt(self, request, n_tokens):
        """The same as bench_token() of bench/protocol.h."""
        ids = (numpy.arange(n_tokens, dtype=numpy.int64) * 7919 + 1000 + request * 12345) % self.n_vocab
        return openvino.Tensor(ids[None])

    def close_requests(self):
        for handle in self.open:
            handle.cancel()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        self.open = []

    def submit(self, n_requests, n_tokens):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = MAX_NEW if n_requests == 1 else 2048
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        for request in range(n_requests):
            self.open.append(self.pipeline.add_request(self.n_ids, self.prompt(request, n_tokens), config))
            self.n_ids += 1

    def step(self):
        """How many requests made a token."""
        self.pipeline.step()
        n_made = 0
        for i, handle in enumerate(self.open):
            if not handle.can_read():
                continue
            ids = next(iter(handle.read().values())).generated_ids
            n_made += 1
            if i == 0:
                self.token = ids[-1]
        return n_made

    def requests(self, n_requests, n_tokens):
        while self.step() < n_requests:
            pass
        return n_requests * n_tokens

    def decode(self, n_steps):
        for _ in range(n_steps):
            if self.step() < len(self.open):
                sys.exit("a request made no token in a step")
        return n_steps * len(self.open)


def main():
    path, n_threads, n_vocab = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    peer = Peer(path, n_threads, n_vocab)
    for line in sys.stdin:
        verb, *numbers = line.split()
        numbers = [int(number) for number in numbers]
        if verb == "prefill":
            verb, numbers = "requests", [1, *numbers]
        if verb == "requests":
            peer.close_requests()
            peer.submit(*numbers)
        cpu, wall = time.process_time(), time.perf_counter()
        n_tokens = peer.requests(*numbers) if verb == "requests" else peer.decode(*numbers)
        seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        print(json.dumps({"tokens": n_tokens, "seconds": seconds, "cpu_seconds": cpu_seconds, "token": int(peer.token)}),
              flush=True)
    peer.close_requests()


if __name__ == "__main__":
    main()
