"""ONNX Runtime's GroupQueryAttention as a peer of `./x bench attn`. Its cache is one run of bytes a sequence, shared by past
and present. Settings are types of keys, values and queries: f32, f16.
"""

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

import attn_peer

TYPES = {"f32": (np.float32, TensorProto.FLOAT), "f16": (np.float16, TensorProto.FLOAT16)}


def session(spec, onnx_type):
    past = [spec.batch, spec.kv_heads, spec.ctx, spec.dim]
    fresh = [spec.batch, spec.q, spec.kv_heads * spec.dim]
    rows = [spec.batch, spec.q, spec.heads * spec.dim]
    node = helper.make_node("GroupQueryAttention", ["q", "k", "v", "past_k", "past_v", "last", "total"],
                            ["out", "k_out", "v_out"], domain="com.microsoft", num_heads=spec.heads, kv_num_heads=spec.kv_heads)

    def value(name, shape, kind=onnx_type):
        return helper.make_tensor_value_info(name, kind, shape)

    graph = helper.make_graph(
        [node], "attention",
        [value("q", rows), value("k", fresh), value("v", fresh), value("past_k", past), value("past_v", past),
         value("last", [spec.batch], TensorProto.INT32), value("total", [1], TensorProto.INT32)],
        [value("out", rows), value("k_out", past), value("v_out", past)])
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17),
                                                                  helper.make_opsetid("com.microsoft", 1)])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = attn_peer.THREADS
    # Its threads spin while they work, and leave the cores to the next one when they have worked.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class Work:
    def __init__(self, spec):
        self.spec, self.layers = spec, spec.layers
        numpy_type, onnx_type = TYPES[spec.setting]
        self.session = session(spec, onnx_type)
        self.kept = []  # what a binding points to
        self.result = self.value(np.zeros((spec.batch, spec.q, spec.heads * spec.dim), numpy_type))
        q = attn_peer.load(spec, "q").astype(numpy_type)
        k, v = (attn_peer.load(spec, name).astype(numpy_type) for name in "kv")
        inputs = {"q": q.reshape(spec.batch, spec.q, -1), "last": np.full(spec.batch, spec.ctx - 1, np.int32),
                  "k": k[:, -spec.q:].reshape(spec.batch, spec.q, -1), "v": v[:, -spec.q:].reshape(spec.batch, spec.q, -1),
                  "total": np.array([spec.ctx], np.int32)}
        inputs = {name: self.value(np.ascontiguousarray(array)) for name, array in inputs.items()}
        past = [np.ascontiguousarray(part.transpose(0, 2, 1, 3)) for part in (k, v)]
        self.bindings = [self.bind(inputs, *(self.value(part) for part in past)) for _ in range(self.layers)]

    def value(self, array):
        """A copy that the runtime owns."""
        self.kept.append(onnxruntime.OrtValue.ortvalue_from_numpy(array.copy()))
        return self.kept[-1]

    def bind(self, inputs, k, v):
        binding = self.session.io_binding()
        for name, value in {**inputs, "past_k": k, "past_v": v}.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in (("out", self.result), ("k_out", k), ("v_out", v)):
            binding.bind_ortvalue_output(name, value)
        return binding

    def run(self):
        for binding in self.bindings:
            self.session.run_with_iobinding(binding)

    def out(self):
        return self.result.numpy().astype(np.float32)


class Peer:
    version = onnxruntime.__version__
    settings = [*TYPES]

    def open(self, spec):
        return Work(spec)


if __name__ == "__main__":
    attn_peer.serve(Peer())
