#!/usr/bin/env python3
"""Compares what a card computed with the golden result of `paged ascend-check --dump`, in whose folder this file lies.

    python3 compare.py out=FILE.npy [lse=FILE.npy]              attention
    python3 compare.py k_cache=FILE.npy v_cache=FILE.npy        scatter: the caches after the call
    python3 compare.py k_rows=FILE.npy v_rows=FILE.npy          gather

manifest.json says which call it is, which files it takes, and of which shapes its results are. bf16 is stored as its bits, in
uint16. The golden result was computed on a CPU, in double precision, from the stored inputs. NOTHING HERE RAN ON A CARD, and the
tolerances are what the number types suggest, not what was measured there.

Exit status: 0 within the tolerance, 1 not, 2 the arguments are wrong. Needs NumPy alone.

How the call may be made with torch_npu (attention; the argument names are those of its public documentation):

    import numpy, torch, torch_npu
    q = torch.from_numpy(numpy.load("q.npy")).npu()             # bf16: torch.from_numpy(x.view("int16")).view(torch.bfloat16)
    ...
    out, lse = torch_npu.npu_fused_infer_attention_score(
        q, k_cache, v_cache, block_table=block_table, block_size=..., num_heads=..., num_key_value_heads=..., scale=...,
        input_layout=..., sparse_mode=..., atten_mask=..., actual_seq_lengths=[...], actual_seq_lengths_kv=[...],
        softmax_lse_flag=True)
    numpy.save("card_out.npy", out.float().cpu().numpy())
"""

import json
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent


def usage(text):
    print(f"compare.py: {text}; see its first lines", file=sys.stderr)
    sys.exit(2)


def as_double(array, manifest):
    """bf16 as bits becomes its value; all else is what it is."""
    if array.dtype == np.uint16 and manifest["q_type"] == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def valid_rows(golden, manifest):
    """Rows that a query owns, as a mask over all axes but the last; padded layouts have rows behind a short query."""
    lens, layout = np.load(HERE / "lens_q.npy"), manifest["q_layout"]
    mask = np.ones(golden.shape[:-1], bool)
    if layout == "tnd":
        return mask
    for i, n in enumerate(lens):
        if layout == "bnsd" or golden.ndim == 4 and golden.shape[-1] == 1:
            mask[i, :, n:] = False
        else:
            mask[i, n:] = False
    return mask


def compare_values(name, got, manifest):
    golden = np.load(HERE / f"golden_{name}.npy").astype(np.float64)
    if got.shape != golden.shape:
        usage(f"{name} has the shape {got.shape}, the golden one {golden.shape}")
    got, mask = as_double(got, manifest), valid_rows(golden, manifest)
    got, golden = got[mask], golden[mask]
    limit = manifest["tolerance"][name]
    # A row without keys has no LSE: the operator says inf, we say -inf.
    none = np.isinf(golden)
    wrong = int((none & ~np.isinf(got)).sum())
    error = np.abs(got[~none] - golden[~none]) / np.maximum(1, np.abs(golden[~none]))
    wrong += int((~(error <= limit)).sum())
    largest = float(np.nanmax(error)) if error.size else 0.0
    print(f"{name}: {golden.size} values, {wrong} beyond {limit:g}, largest error {largest:.3g}")
    return wrong == 0


def compare_bytes(name, got):
    golden = np.load(HERE / f"golden_{name}.npy")
    if got.shape != golden.shape or got.itemsize != golden.itemsize:
        usage(f"{name} is {got.dtype} {got.shape}, the golden one {golden.dtype} {golden.shape}")
    bits = f"u{golden.itemsize}"
    wrong = int((np.ascontiguousarray(got).view(bits) != golden.view(bits)).sum())
    print(f"{name}: {golden.size} values, {wrong} of other bits")
    return wrong == 0


def main():
    manifest = json.loads((HERE / "manifest.json").read_text(encoding="utf-8"))
    results = dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    if len(results) != len(sys.argv) - 1 or not results or not set(results) <= set(manifest["results"]):
        usage(f"it takes NAME=FILE.npy, NAME of {', '.join(manifest['results'])}")
    exact = manifest["path"] in ("scatter", "gather")
    same = [compare_bytes(name, np.load(path)) if exact else compare_values(name, np.load(path), manifest)
            for name, path in results.items()]
    sys.exit(0 if all(same) else 1)


if __name__ == "__main__":
    main()
