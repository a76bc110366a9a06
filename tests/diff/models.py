"""GGUF files written with the `gguf` package: tiny random models of all families, and f32 copies of real ones."""
import dataclasses

import gguf
import numpy as np


def dequantise(source, target):
    """Writes the model `source` to `target` with every tensor as f32; all keys stay as they are."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.get_field("general.architecture").contents())
    skipped = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    for name, field in reader.fields.items():
        if not name.startswith(skipped):
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            sub_type = field.types[-1] if is_array else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        writer.write_tensor_data(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.close()


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a tiny model looks like; the defaults are those of LLaMA. What other families have in its place is
    named by a field each, so that writer and reference need not know families."""

    name: str
    arch: str = "llama"
    n_layers: int = 2
    n_embd: int = 64
    n_ff: int = 96
    n_heads: int = 4
    n_kv_heads: int = 4
    head_dim: int = 0  # where it is not n_embd / n_heads
    tied: bool = True
    n_ctx: int = 1024
    # RoPE
    rope: str = "pairs"  # pairs, halves or none
    n_rot: int = 0  # of the head; 0: all
    freq_base: float = 10000.0
    local_freq_base: float = 0.0  # of layers with a window
    scaling: str = ""  # linear, yarn
    factor: float = 1.0
    n_ctx_orig: int = 0
    attn_factor: float = 0.0
    llama3_factors: bool = False
    long_factors: bool = False  # and short ones
    no_rope_every: int = 0  # the last of so many layers does without
    # attention
    window: int = 0
    global_every: int = 0  # the last of so many layers has no window
    softcap: float = 0.0
    logit_softcap: float = 0.0
    qk_norm: bool = False
    fused_qkv: bool = False
    bias: str = ""  # "qkv": of q, k and v; "all": of all matrices of a layer
    # the rest of a layer
    norm: str = "rms"  # or layer
    post_norms: bool = False
    parallel: str = ""  # attention and feed-forward side by side: "one" norm for both, or "two"
    act: str = "silu"  # silu, gelu (tanh), gelu_erf
    gated: bool = True
    fused_ffn: bool = False
    scale_embd: bool = False
    positions: bool = False

    @property
    def d(self):
        return self.head_dim or self.n_embd // self.n_heads

    @property
    def rotated(self):
        return self.n_rot or self.d

    def has_window(self, layer):
        return self.window > 0 and not (self.global_every and layer % self.global_every == self.global_every - 1)

    def has_rope(self, layer):
        every = self.no_rope_every
        return self.rope != "none" and not (every and layer % every == every - 1)


GEMMA = dict(rope="halves", post_norms=True, act="gelu", scale_embd=True, head_dim=32)

SHAPES = [
    Shape("mha-16", n_embd=64, n_heads=4, n_kv_heads=4),
    Shape("gqa-4-2-untied", n_embd=128, n_heads=4, n_kv_heads=2, tied=False),
    Shape("gqa-9-3-like-smollm2", n_layers=3, n_embd=576, n_ff=192, n_heads=9, n_kv_heads=3, freq_base=1e5),
    Shape("mqa-80-wide-head", n_embd=64, n_heads=4, n_kv_heads=1, head_dim=80, tied=False),
    Shape("llama3-factors", n_embd=128, n_heads=4, n_kv_heads=2, freq_base=500000.0, llama3_factors=True),
    Shape("linear-rope", n_embd=128, n_heads=2, n_kv_heads=2, scaling="linear", factor=4.0),
    Shape("yarn", n_embd=128, n_heads=2, n_kv_heads=1, scaling="yarn", factor=4.0, n_ctx_orig=256),
    Shape("biases", n_embd=64, n_heads=4, n_kv_heads=2, bias="all"),
    Shape("smollm3", arch="smollm3", n_layers=5, n_kv_heads=2, no_rope_every=4, freq_base=5e6),
    Shape("qwen2", arch="qwen2", n_embd=224, n_heads=14, n_kv_heads=2, rope="halves", bias="qkv", freq_base=1e6),
    Shape("qwen3", arch="qwen3", n_heads=8, n_kv_heads=2, head_dim=32, rope="halves", qk_norm=True, freq_base=1e6),
    Shape("gemma2", arch="gemma2", n_layers=3, n_kv_heads=2, window=40, global_every=2, softcap=5.0,
          logit_softcap=6.0, **GEMMA),
    Shape("gemma3", arch="gemma3", n_layers=7, n_kv_heads=1, window=24, global_every=6, qk_norm=True, freq_base=1e6,
          local_freq_base=10000.0, scaling="linear", factor=8.0, **GEMMA),
    Shape("phi3", arch="phi3", rope="halves", n_rot=12, n_kv_heads=2, fused_qkv=True, fused_ffn=True, tied=False),
    Shape("phi3-long", arch="phi3", rope="halves", fused_qkv=True, fused_ffn=True, long_factors=True, n_ctx_orig=512,
          attn_factor=1.19),
    Shape("falcon-7b", arch="falcon", n_embd=96, n_heads=6, n_kv_heads=1, rope="halves", norm="layer",
          fused_qkv=True, parallel="one", act="gelu_erf", gated=False, n_ff=384),
    Shape("falcon-40b", arch="falcon", n_embd=128, n_heads=8, n_kv_heads=2, rope="halves", norm="layer", tied=False,
          fused_qkv=True, parallel="two", act="gelu_erf", gated=False, n_ff=512),
    Shape("gpt2", arch="gpt2", rope="none", norm="layer", fused_qkv=True, act="gelu", gated=False, bias="all",
          positions=True, n_ff=256),
]
# llama.cpp does not read the window of these.
WINDOWED = [
    Shape("mistral-window", n_kv_heads=2, window=48),
    Shape("phi3-window", arch="phi3", rope="halves", n_kv_heads=2, fused_qkv=True, fused_ffn=True, window=17),
]


def byte_alphabet():
    """The 256 characters with which GPT-2 vocabularies write bytes: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(256))
    return [chr(b) if b in printable else chr(256 + next(rest)) for b in range(256)]


def tiny_vocab():
    """256 bytes, a few merges over them, and control tokens last. Returns (tokens, types, merges)."""
    space = byte_alphabet()[0x20]
    merges = ["t h", "th e", "i n", "e r", f"{space} t", f"{space}t he", "a n", "an d", "o n", "l l"]
    tokens = byte_alphabet() + [m.replace(" ", "") for m in merges]
    types = [gguf.TokenType.NORMAL] * len(tokens)
    for control in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        tokens.append(control)
        types.append(gguf.TokenType.CONTROL)
    return tokens, types, merges


def llama3_factors(shape, factor=8.0, low=1.0, high=4.0, n_ctx_orig=8192):
    """Frequency divisors as LLaMA 3.1 scales them: short waves stay, long ones are divided, with a ramp between."""
    turns = n_ctx_orig * shape.freq_base ** (-np.arange(0, shape.rotated, 2) / shape.rotated) / (2 * np.pi)
    ramp = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / (ramp + (1 - ramp) / factor)).astype(np.float32)


def random_weights(shape, seed):
    """name -> f32 array [n_out, n_in] or [n], of a size at which log-probabilities differ widely."""
    rng = np.random.default_rng(seed)
    n_vocab = len(tiny_vocab()[0])
    weights = {}

    def matrix(name, n_out, n_in, gain=1.0, bias=False):
        weights[f"{name}.weight"] = (rng.standard_normal((n_out, n_in)) * gain / np.sqrt(n_in)).astype(np.float32)
        if bias:
            weights[f"{name}.bias"] = (0.3 * rng.standard_normal(n_out)).astype(np.float32)

    def norm(name, n):
        weights[f"{name}.weight"] = (1.0 + 0.2 * rng.standard_normal(n)).astype(np.float32)
        if shape.norm == "layer":
            weights[f"{name}.bias"] = (0.2 * rng.standard_normal(n)).astype(np.float32)

    n_embd, all_bias = shape.n_embd, shape.bias == "all"
    q, kv = shape.n_heads * shape.d, shape.n_kv_heads * shape.d
    matrix("token_embd", n_vocab, n_embd, 1.5)
    if shape.positions:
        matrix("position_embd", shape.n_ctx, n_embd)
    norm("output_norm", n_embd)
    if not shape.tied:
        matrix("output", n_vocab, n_embd, 1.5)
    for i in range(shape.n_layers):
        blk = f"blk.{i}."
        norm(blk + "attn_norm", n_embd)
        if shape.parallel == "two":
            norm(blk + "attn_norm_2", n_embd)
        parts = [("attn_qkv", q + 2 * kv)] if shape.fused_qkv else [("attn_q", q), ("attn_k", kv), ("attn_v", kv)]
        for name, n in parts:
            matrix(blk + name, n, n_embd, bias=bool(shape.bias))
        matrix(blk + "attn_output", n_embd, q, bias=all_bias)
        if shape.qk_norm:
            norm(blk + "attn_q_norm", shape.d)
            norm(blk + "attn_k_norm", shape.d)
        if not shape.parallel:
            norm(blk + "ffn_norm", n_embd)
        if shape.post_norms:
            norm(blk + "post_attention_norm", n_embd)
            norm(blk + "post_ffw_norm", n_embd)
        if shape.gated and not shape.fused_ffn:
            matrix(blk + "ffn_gate", shape.n_ff, n_embd, bias=all_bias)
        matrix(blk + "ffn_up", 2 * shape.n_ff if shape.fused_ffn else shape.n_ff, n_embd, bias=all_bias)
        matrix(blk + "ffn_down", n_embd, shape.n_ff, bias=all_bias)
    if shape.llama3_factors:
        weights["rope_freqs.weight"] = llama3_factors(shape)
    if shape.long_factors:
        weights["rope_factors_short.weight"] = rng.uniform(1.0, 1.5, shape.rotated // 2).astype(np.float32)
        weights["rope_factors_long.weight"] = rng.uniform(1.0, 9.0, shape.rotated // 2).astype(np.float32)
    return weights


def _add_numbers(writer, shape):
    def u32(key, value):
        writer.add_uint32(f"{shape.arch}.{key}", value)

    def f32(key, value):
        writer.add_float32(f"{shape.arch}.{key}", value)

    u32("block_count", shape.n_layers)
    u32("context_length", shape.n_ctx)
    u32("embedding_length", shape.n_embd)
    u32("feed_forward_length", shape.n_ff)
    u32("attention.head_count", shape.n_heads)
    u32("attention.head_count_kv", shape.n_kv_heads)
    if shape.head_dim:
        u32("attention.key_length", shape.head_dim)
        u32("attention.value_length", shape.head_dim)
    f32("attention.layer_norm_epsilon" if shape.norm == "layer" else "attention.layer_norm_rms_epsilon", 1e-5)
    if shape.window:
        u32("attention.sliding_window", shape.window)
    if shape.softcap:
        f32("attn_logit_softcapping", shape.softcap)
    if shape.logit_softcap:
        f32("final_logit_softcapping", shape.logit_softcap)
    if shape.rope == "none":
        return
    u32("rope.dimension_count", shape.rotated)
    f32("rope.freq_base", shape.freq_base)
    if shape.scaling:
        writer.add_string(f"{shape.arch}.rope.scaling.type", shape.scaling)
        f32("rope.scaling.factor", shape.factor)
    if shape.n_ctx_orig:
        u32("rope.scaling.original_context_length", shape.n_ctx_orig)
    if shape.attn_factor:
        f32("rope.scaling.attn_factor", shape.attn_factor)


def write_weights(path, shape, stored, template=None, add_bos=False):
    """Writes a model of tensors: name -> (array, type, or None for the array's own)."""
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_name("tiny")  # llama.cpp takes tokens of a file by the name of Phi-3 for others
    _add_numbers(writer, shape)

    tokens, types, merges = tiny_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(add_bos)
    if template:
        writer.add_chat_template(template)

    for name, (data, kind) in stored.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tiny(path, shape, seed=1, weight_type=None, **more):
    """Writes the model; matrices as weight_type (default f32). Returns its weights as they were before."""
    weights = random_weights(shape, seed)
    quantised = {name: (gguf.quants.quantize(data, weight_type), weight_type) for name, data in weights.items()
                 if data.ndim == 2 and weight_type is not None}
    write_weights(path, shape, {name: (data, None) for name, data in weights.items()} | quantised, **more)
    return weights


def tiny_prompt(n, seed=7):
    """n random ids, all of them whole characters: bytes of printable ASCII and merges."""
    rng = np.random.default_rng(seed)
    choices = [*range(0x20, 0x7F), *range(256, 266)]
    return [int(t) for t in rng.choice(choices, n)]


def write_vocab(path, name="tiny", model=None, pre=None, tokens=None, types=None, scores=None, merges=None, ids=None,
                flags=None):
    """A LLaMA model of 32 columns around a vocabulary, just large enough for llama.cpp to load it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    _add_numbers(writer, Shape("vocabulary", n_layers=1, n_embd=32, n_ff=32, n_heads=2, n_kv_heads=2))
    writer.add_tokenizer_model(model)
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if scores:
        writer.add_token_scores(scores)
    if merges:
        writer.add_token_merges(merges)
    for key, value in (ids or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{key}", value)
    for key, value in (flags or {}).items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    shape = {"token_embd": (len(tokens), 32), "output_norm": (32,)}
    shape |= {f"blk.0.{part}": (32,) for part in ("attn_norm", "ffn_norm")}
    shape |= {f"blk.0.{part}": (32, 32) for part in (
        "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    for part, size in shape.items():
        writer.add_tensor(f"{part}.weight", np.zeros(size, np.float16 if len(size) == 2 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def spm_vocab():
    """SentencePiece-style: (tokens, types, scores, ids). Bytes, letters, pieces of English, markers of Phi-3."""
    mark = "\u2581"
    tokens, types = ["<unk>", "<s>", "</s>"], [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    tokens += [f"<0x{b:02X}>" for b in range(256)]
    types += [gguf.TokenType.BYTE] * 256
    pieces = [mark, *map(chr, range(0x21, 0x7F)), "é", "你", mark * 2, mark * 4]
    pieces += "th he in er an on re the and ing ll ello Hello us er user".split()
    pieces = list(dict.fromkeys(pieces + [mark + p for p in ("t", "a", "th", "the", "and", "x", "Hello", "w")]))
    tokens += pieces
    types += [gguf.TokenType.NORMAL] * len(pieces)
    for control in ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"):
        tokens.append(control)
        types.append(gguf.TokenType.CONTROL)
    tokens.append("<|place|>")
    types.append(gguf.TokenType.USER_DEFINED)
    scores = [-float(i) for i in range(len(tokens))]
    return tokens, types, scores, {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
