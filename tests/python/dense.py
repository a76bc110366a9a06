"""Attention in NumPy, in double: what the tests of the Python package compare with."""

import numpy as np


def attention(q, k, v, *, rows=None, causal=True, scale=None):
    """(heads, n_q, d) over (kv_heads, n_k, d) -> (heads, n, d); `rows`: only these queries. Queries sit at the end of the
    keys."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    n_q, n_k = q.shape[1], k.shape[1]
    rows = np.arange(n_q) if rows is None else np.asarray(rows)
    group = q.shape[0] // k.shape[0]
    out = np.empty((q.shape[0], len(rows), v.shape[2]))
    hidden = np.arange(n_k)[None] > (n_k - n_q + rows)[:, None] if causal else np.zeros((len(rows), n_k), bool)
    for h in range(q.shape[0]):
        score = q[h, rows] @ k[h // group].T * (scale or q.shape[2] ** -0.5)
        score[hidden] = -np.inf
        weight = np.exp(score - score.max(1, keepdims=True))
        out[h] = weight @ v[h // group] / weight.sum(1, keepdims=True)
    return out


def f16_bound(expected):
    """What an output in f16 may differ from the exact one: its own rounding (half a unit in the last place), and that of the f32
    sums before it."""
    return np.maximum(np.abs(expected) * 2.0**-11, 2.0**-25) * 1.05 + 2e-5
