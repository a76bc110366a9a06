"""Goal: a matrix of any GGUF type is multiplied as what it stands for. Method: random blocks of each type, their values by the
gguf package (NumPy), and the model that they make by reference.py in double.

The engine may be off by what rounding its inputs to 8 bits costs; the long tier asks llama.cpp, which does the same, how much that is.
"""
import os

import gguf
import numpy as np
import pytest

import reference
from gguf import GGMLQuantizationType as T
from models import Shape, random_weights, tiny_prompt, write_weights

# Where the f16 numbers of a block lie, and how they stand to the first: so that the values have a mean near zero.
SCALES = {
    T.Q4_0: {0: 1}, T.Q4_1: {0: 1, 2: -7.5}, T.Q5_0: {0: 1}, T.Q5_1: {0: 1, 2: -15.5}, T.Q8_0: {0: 1},
    T.Q2_K: {80: 1, 82: 1.5}, T.Q3_K: {108: 1}, T.Q4_K: {0: 1, 2: 7.5}, T.Q5_K: {0: 1, 2: 15.5}, T.Q6_K: {208: 1},
    T.IQ1_S: {0: 1}, T.IQ2_XXS: {0: 1}, T.IQ2_XS: {0: 1}, T.IQ2_S: {0: 1}, T.IQ3_XXS: {0: 1}, T.IQ3_S: {0: 1},
    T.IQ4_NL: {0: 1}, T.IQ4_XS: {0: 1}, T.TQ1_0: {52: 1}, T.TQ2_0: {64: 1},
}
OTHERS = [T.IQ1_M, T.MXFP4, T.NVFP4]
FLOATS = {T.F16: np.float16, T.F32: np.float32}
SHAPE = Shape("types", n_embd=256, n_ff=512, n_heads=4, n_kv_heads=2, tied=False)
IDS = tiny_prompt(80)


def set_scale(kind, blocks, scale):
    """blocks [..., bytes of a block]"""
    for offset, factor in SCALES.get(kind, {}).items():
        blocks[..., offset : offset + 2] = np.frombuffer(np.float16(scale * factor).tobytes(), np.uint8)
    if kind == T.IQ1_M:  # the f16 in the high nibbles of four words
        bits = int(np.float16(scale).view(np.uint16))
        for i in range(4):
            high = blocks[..., 49 + 2 * i]
            high[...] = (high & 15) | (bits >> (4 * i) & 15) << 4
    if kind == T.MXFP4:  # a power of two
        blocks[..., 0] = 127 + round(np.log2(scale))
    if kind == T.NVFP4:  # E4M3, powers of two here
        blocks[..., :4] = (7 + round(np.log2(scale))) << 3


def random_blocks(kind, data, rng):
    """Random blocks in place of data, whose values vary as much."""
    n_cols, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (data.shape[0], data.shape[1] // n_cols, n_bytes), np.uint8)
    set_scale(kind, blocks, 1.0)
    rows = blocks.reshape(data.shape[0], -1)
    set_scale(kind, blocks, data.std() / gguf.quants.dequantize(rows, kind).std())
    return rows


def make(kind, path):
    """Writes the model; returns the weights as NumPy reads them."""
    rng = np.random.default_rng(3)
    stored, values = {}, {}
    for name, data in random_weights(SHAPE, 5).items():
        stored[name], values[name] = (data, None), data
        if data.ndim != 2:
            continue
        if kind in FLOATS:
            rows = data.astype(FLOATS[kind])
            values[name] = rows.astype(np.float32)
        else:
            rows = gguf.quants.quantize(data, kind) if kind == T.BF16 else random_blocks(kind, data, rng)
            values[name] = gguf.quants.dequantize(rows, kind).astype(np.float32)
        stored[name] = rows, kind
    write_weights(path, SHAPE, stored)
    return values


def mean_off(logprobs, expected):
    return np.abs(np.array(logprobs) - expected).mean()


@pytest.mark.parametrize("kind", [*FLOATS, T.BF16, *SCALES, *OTHERS], ids=lambda kind: kind.name)
def test_type(score, llamacpp, tmp_path, kind):
    path = str(tmp_path / f"{kind.name}.gguf")
    log_probs = reference.log_probs(SHAPE, make(kind, path), IDS)[:-1]
    expected = log_probs[np.arange(len(IDS) - 1), IDS[1:]]
    assert expected.std() > 0.5
    (answer,) = score(path, [IDS], "--kv-type", "f32")
    bound = 1e-4 if kind in (*FLOATS, T.BF16) else 0.08
    assert mean_off(answer["logprobs"], expected) <= bound
    if os.environ.get("PAGED_LONG"):
        theirs = [s[0] for s in llamacpp(path).score(IDS)]
        assert mean_off(answer["logprobs"], expected) <= 1.3 * mean_off(theirs, expected) + 1e-4
