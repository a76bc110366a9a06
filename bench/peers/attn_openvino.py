"""OpenVINO's PagedAttention as a peer of `./x bench attn`: a model of that one operator.

Its cache is filled by itself, with a prefill of all tokens, so that whatever it stores is what it stored. Blocks of 32 tokens
(its size on CPUs), in random order. A setting is arithmetic/keys and values: bf16/bf16, f32/f16, f32/f32, bf16/u8, f32/u8.
"""

import numpy as np
import openvino
from openvino import PartialShape, Tensor, Type, opset13
from openvino.op import _PagedAttentionExtension as PagedAttention

import attn_peer

BLOCK = 32


def constant(kind, value=None):
    """A number, or without one an empty list, which turns a feature off."""
    return opset13.constant(np.zeros(0, kind) if value is None else np.array(value, kind)).output(0)


def parameter(name, kind, shape):
    node = opset13.parameter(PartialShape(shape), kind)
    node.set_friendly_name(name)
    node.output(0).set_names({name})
    return node


def build(spec, arithmetic, kv_type):
    f32, i32 = np.float32, np.int32
    rows = [parameter(name, Type.f32, [-1, heads * spec.dim])
            for name, heads in (("q", spec.heads), ("k", spec.kv_heads), ("v", spec.kv_heads))]
    caches = [parameter(name, Type.dynamic, [-1] * 4) for name in ("key_cache", "value_cache")]
    tables = [parameter(name, Type.i32, [-1]) for name in ("past_lens", "starts", "blocks", "block_starts")]
    max_keys = parameter("max_keys", Type.i32, [])
    off = [constant(i32), constant(i32), constant(i32), constant(f32), constant(f32), constant(i32, 0), constant(i32, 0),
           constant(f32), constant(i32, 0), constant(i32), constant(i32), constant(i32), constant(i32), constant(np.uint8),
           constant(i32)]
    node = PagedAttention([p.output(0) for p in [*rows, *caches, *tables]]
                          + [constant(f32, spec.dim ** -0.5), constant(i32, 0), constant(f32), max_keys.output(0), *off])
    for key, value in (("k_head_size", spec.dim), ("num_k_heads", spec.kv_heads), ("v_head_size", spec.dim),
                       ("num_v_heads", spec.kv_heads)):
        node.get_rt_info()[key] = value
    model = openvino.Model([opset13.result(node.output(0))], [*rows, *caches, *tables, max_keys], "attention")
    return openvino.Core().compile_model(model, "CPU", {
        "INFERENCE_PRECISION_HINT": arithmetic, "KV_CACHE_PRECISION": kv_type, "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": attn_peer.THREADS, "PERFORMANCE_HINT": "LATENCY"})


class Work:
    def __init__(self, spec):
        self.spec, self.layers = spec, spec.layers
        self.model = build(spec, *spec.setting.split("/"))
        self.ports = {port.get_any_name(): port for port in self.model.inputs}
        blocks_each = -(-spec.ctx // BLOCK)
        self.n_blocks = spec.batch * blocks_each
        self.blocks = np.random.permutation(self.n_blocks).astype(np.int32)
        self.block_starts = np.arange(0, self.n_blocks + 1, blocks_each, dtype=np.int32)
        q, k, v = (attn_peer.load(spec, name) for name in "qkv")
        first = self.cache()
        self.request(first, np.zeros((*k.shape[:2], spec.heads, spec.dim), np.float32), k, v, spec.ctx).infer()
        self.requests = []
        for layer in range(self.layers):
            cache = first if layer == 0 else self.cache()
            for mine, source in zip(cache, first):
                if layer > 0:
                    self.raw(mine)[:] = self.raw(source)
            self.requests.append(self.request(cache, q, k[:, -spec.q:], v[:, -spec.q:], spec.q))

    def cache(self):
        tensors = []
        for name in ("key_cache", "value_cache"):
            port = self.ports[name]
            shape = [self.n_blocks, *(dim.get_length() for dim in list(port.get_partial_shape())[1:])]
            tensors.append(Tensor(port.get_element_type(), shape))
            self.raw(tensors[-1])[:] = 0
        return tensors

    @staticmethod
    def raw(tensor):
        return np.asarray(tensor.data).reshape(-1).view(np.uint8)

    def request(self, cache, q, k, v, n_fresh):
        spec = self.spec
        request = self.model.create_infer_request()
        values = {"past_lens": np.full(spec.batch, spec.ctx - n_fresh, np.int32), "blocks": self.blocks,
                  "starts": np.arange(0, spec.batch * n_fresh + 1, n_fresh, dtype=np.int32),
                  "block_starts": self.block_starts, "max_keys": np.array(spec.ctx, np.int32)}
        for name, array in (("q", q), ("k", k), ("v", v)):
            values[name] = array.reshape(spec.batch * n_fresh, -1)
        for name, array in values.items():
            request.set_tensor(self.ports[name], Tensor(array.copy()))
        for name, tensor in zip(("key_cache", "value_cache"), cache):
            request.set_tensor(self.ports[name], tensor)
        return request

    def run(self):
        for request in self.requests:
            request.infer()

    def out(self):
        return np.array(self.requests[-1].get_output_tensor(0).data)


class Peer:
    version = openvino.__version__.split("-")[0]
    settings = ["bf16/bf16", "f32/f16", "f32/f32", "bf16/u8", "f32/u8"]

    def open(self, spec):
        return Work(spec)


if __name__ == "__main__":
    np.random.seed(1)
    attn_peer.serve(Peer())
