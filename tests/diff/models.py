"""GGUF files written with the `gguf` package: tiny random LLaMA models, and f32 copies of real ones."""
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
    """What a tiny model looks like. head_dim differs from n_embd / n_heads where it says so."""

    name: str
    n_layers: int = 2
    n_embd: int = 64
    n_ff: int = 96
    n_heads: int = 4
    n_kv_heads: int = 4
    head_dim: int = 0
    tied: bool = True
    freq_base: float = 10000.0
    linear_scale: float = 0.0
    llama3_factors: bool = False
    n_ctx: int = 1024

    @property
    def d(self):
        return self.head_dim or self.n_embd // self.n_heads


SHAPES = [
    Shape("mha-16", n_embd=64, n_heads=4, n_kv_heads=4),
    Shape("gqa-4-2-untied", n_embd=128, n_heads=4, n_kv_heads=2, tied=False),
    Shape("gqa-9-3-like-smollm2", n_layers=3, n_embd=576, n_ff=192, n_heads=9, n_kv_heads=3, freq_base=1e5),
    Shape("mqa-80-wide-head", n_embd=64, n_heads=4, n_kv_heads=1, head_dim=80, tied=False),
    Shape("llama3-factors", n_embd=128, n_heads=4, n_kv_heads=2, freq_base=500000.0, llama3_factors=True),
    Shape("linear-rope", n_embd=128, n_heads=2, n_kv_heads=2, linear_scale=4.0),
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


def llama3_factors(d):
    """Frequency divisors as LLaMA 3.1 scales them: high frequencies stay, low ones are divided by 8."""
    x = np.linspace(0.0, 1.0, d // 2)
    return np.clip(1.0 + 7.0 * (2.0 * x - 0.5), 1.0, 8.0).astype(np.float32)


def random_weights(shape, seed):
    """name -> f32 array [n_out, n_in] or [n], of a size at which log-probabilities differ widely."""
    rng = np.random.default_rng(seed)
    n_vocab = len(tiny_vocab()[0])

    def matrix(n_out, n_in, gain=1.0):
        return (rng.standard_normal((n_out, n_in)) * gain / np.sqrt(n_in)).astype(np.float32)

    def norm(n):
        return (1.0 + 0.2 * rng.standard_normal(n)).astype(np.float32)

    weights = {"token_embd.weight": matrix(n_vocab, shape.n_embd, 1.5)}
    weights["output_norm.weight"] = norm(shape.n_embd)
    if not shape.tied:
        weights["output.weight"] = matrix(n_vocab, shape.n_embd, 1.5)
    for i in range(shape.n_layers):
        weights |= {
            f"blk.{i}.attn_norm.weight": norm(shape.n_embd),
            f"blk.{i}.attn_q.weight": matrix(shape.n_heads * shape.d, shape.n_embd),
            f"blk.{i}.attn_k.weight": matrix(shape.n_kv_heads * shape.d, shape.n_embd),
            f"blk.{i}.attn_v.weight": matrix(shape.n_kv_heads * shape.d, shape.n_embd),
            f"blk.{i}.attn_output.weight": matrix(shape.n_embd, shape.n_heads * shape.d),
            f"blk.{i}.ffn_norm.weight": norm(shape.n_embd),
            f"blk.{i}.ffn_gate.weight": matrix(shape.n_ff, shape.n_embd),
            f"blk.{i}.ffn_up.weight": matrix(shape.n_ff, shape.n_embd),
            f"blk.{i}.ffn_down.weight": matrix(shape.n_embd, shape.n_ff),
        }
    if shape.llama3_factors:
        weights["rope_freqs.weight"] = llama3_factors(shape.d)
    return weights


def write_tiny(path, shape, seed=1, weight_type=None):
    """Writes the model; matrices as weight_type (default f32). Returns its weights as they were before."""
    weights = random_weights(shape, seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(shape.name)
    writer.add_block_count(shape.n_layers)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    if shape.head_dim:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.d)
    writer.add_rope_freq_base(shape.freq_base)
    if shape.linear_scale:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(shape.linear_scale)

    tokens, types, merges = tiny_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)

    for name, data in weights.items():
        if data.ndim == 2 and weight_type is not None:
            writer.add_tensor(name, gguf.quants.quantize(data, weight_type), raw_dtype=weight_type)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def tiny_prompt(n, seed=7):
    """n random ids, all of them whole characters: bytes of printable ASCII and merges."""
    rng = np.random.default_rng(seed)
    choices = [*range(0x20, 0x7F), *range(256, 266)]
    return [int(t) for t in rng.choice(choices, n)]
