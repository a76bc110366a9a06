"""GGUF models of random weights at the shapes of real ones: what a layer costs depends on its shape and types and not on what it
has learned. Tokens and their names are those of a model that is there, so that every program reads the file.

All matrices are Q4_K (llama.cpp's `--pure`). Blocks are made as they lie in the file, bits at random and scales such that a product
keeps the size of its input; attention is sharp enough to matter. The same file for the same seed.
"""

import dataclasses
import hashlib
import pathlib

import gguf
import numpy as np

SEED = 8


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a LLaMA; widths are multiples of 256, as K-quants want."""
    name: str
    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    freq_base: float = 500000.0
    n_ctx: int = 8192


LLAMA_8B = Shape("LLaMA-3-8B's layers", n_layers=2, n_embd=4096, n_ff=14336, n_heads=32, n_kv_heads=8, head_dim=128)


def f16_bytes(values):
    return values.astype(np.float16)[..., None].view(np.uint8)


def q4_k(rng, n_rows, n_cols, size):
    """Blocks of 256 columns: d, dmin, 8 scales and 8 minima of 6 bits in 12 bytes, nibbles; values d * scale * q - dmin * min."""
    n = n_rows * n_cols // 256
    blocks = np.frombuffer(rng.bytes(n * 144), np.uint8).reshape(n, 144).copy()
    # q is 7.5 ± 4.6, and the scales, 8 times 4 … 7, have a mean square of 44.9². What a block subtracts is a whole number of
    # steps, 7 or 8, since a peer may round it to one; always the same, it would be a direction that all rows share.
    d = (size / (44.9 * 4.64) * rng.uniform(0.8, 1.2, n)).astype(np.float16)
    eighths = rng.integers(4, 8, (n, 8), np.uint8)
    scales, mins = eighths * 8, eighths * rng.integers(7, 9, (n, 8), np.uint8)
    blocks[:, 0:2] = f16_bytes(d)
    blocks[:, 2:4] = f16_bytes(8 * d)
    blocks[:, 4:8] = scales[:, :4] | scales[:, 4:] >> 4 << 6
    blocks[:, 8:12] = mins[:, :4] | mins[:, 4:] >> 4 << 6
    blocks[:, 12:16] = scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4
    return blocks.reshape(n_rows, -1)


def tensors(shape, n_vocab, rng):
    """(name, data, type or None), one after the other."""
    n_embd, q, kv = shape.n_embd, shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim

    def matrix(name, n_rows, n_cols, gain=1.0):
        return f"{name}.weight", q4_k(rng, n_rows, n_cols, gain / n_cols ** 0.5), gguf.GGMLQuantizationType.Q4_K

    def norm(name):
        return f"{name}.weight", rng.uniform(0.8, 1.2, n_embd).astype(np.float32), None

    yield matrix("token_embd", n_vocab, n_embd, n_embd ** 0.5)
    for i in range(shape.n_layers):
        blk = f"blk.{i}."
        yield norm(blk + "attn_norm")
        yield matrix(blk + "attn_q", q, n_embd, 1.5)
        yield matrix(blk + "attn_k", kv, n_embd, 1.5)
        yield matrix(blk + "attn_v", kv, n_embd, 1.5)
        yield matrix(blk + "attn_output", n_embd, q, 1.5)
        yield norm(blk + "ffn_norm")
        yield matrix(blk + "ffn_gate", shape.n_ff, n_embd)
        yield matrix(blk + "ffn_up", shape.n_ff, n_embd)
        yield matrix(blk + "ffn_down", n_embd, shape.n_ff)
    yield norm("output_norm")
    yield matrix("output", n_vocab, n_embd, 1.5)


def add_tokenizer(writer, source):
    """That of the source, as it is; returns how many tokens there are."""
    for name, field in source.fields.items():
        if name.startswith("tokenizer."):
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=field.types[-1] if is_array else None)
    return len(source.get_field("tokenizer.ggml.tokens").contents())


def write(path, shape, source):
    """Writes the model; `source`: a GGUF file whose tokenizer it gets."""
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=True)
    writer.add_name(shape.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_S)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(shape.n_layers)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape.freq_base)
    writer.add_rope_dimension_count(shape.head_dim)
    n_vocab = add_tokenizer(writer, gguf.GGUFReader(source))
    writer.add_vocab_size(n_vocab)
    for name, data, kind in tensors(shape, n_vocab, np.random.default_rng(SEED)):
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def kept(folder, shape, source):
    """The path of the model in a folder, where there is one of these: made there unless it has been made by this source before."""
    source = pathlib.Path(source)
    made_of = f"{shape} {source.name} {source.stat().st_size} {pathlib.Path(__file__).read_text(encoding='utf-8')}"
    path = pathlib.Path(folder) / f"random-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}.gguf"
    if not path.exists():
        for old in path.parent.glob("random-*.gguf"):
            old.unlink()
        part = path.with_suffix(".part")
        write(part, shape, source)
        part.rename(path)
    return path
