"""The LLaMA forward pass in NumPy and double precision, written from the papers and not from our code.

RMSNorm (Zhang & Sennrich 2019), rotary embedding on neighbouring pairs (Su et al. 2021), grouped queries
(Ainslie et al. 2023), SwiGLU (Shazeer 2020), as put together by Touvron et al. 2023. There is no cache: every
position sees the whole prefix at once.
"""
import numpy as np


def rms_norm(x, weight, eps=1e-5):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope(x, freq_base, scale, factors):
    """x [n_tokens, n_heads, d]: pair (2i, 2i + 1) turns by position * scale * base^(-2i/d) / factors[i]."""
    n, _, d = x.shape
    frequency = freq_base ** (-np.arange(0, d, 2) / d) / factors
    angle = (np.arange(n)[:, None] * scale * frequency)[:, None, :]
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
    out[..., 1::2] = even * np.sin(angle) + odd * np.cos(angle)
    return out


def attention(q, k, v):
    """q [n, n_heads, d], k and v [n, n_kv_heads, d]; causal. Returns [n, n_heads * d]."""
    n, n_heads, d = q.shape
    group = n_heads // k.shape[1]
    masked = np.triu(np.full((n, n), -np.inf), 1)
    out = np.empty_like(q)
    for h in range(n_heads):
        score = q[:, h] @ k[:, h // group].T / np.sqrt(d) + masked
        p = np.exp(score - score.max(axis=1, keepdims=True))
        out[:, h] = (p / p.sum(axis=1, keepdims=True)) @ v[:, h // group]
    return out.reshape(n, n_heads * d)


def log_probs(shape, weights, tokens):
    """[n_tokens, n_vocab] log-probabilities of the token after each position."""
    w = {name: data.astype(np.float64) for name, data in weights.items()}
    scale = 1.0 / shape.linear_scale if shape.linear_scale else 1.0
    factors = w.get("rope_freqs.weight", np.ones(shape.d // 2))
    x = w["token_embd.weight"][tokens]
    n = len(tokens)
    for i in range(shape.n_layers):
        layer = {name.split(".")[2]: w[name] for name in w if name.startswith(f"blk.{i}.")}
        h = rms_norm(x, layer["attn_norm"])
        q = (h @ layer["attn_q"].T).reshape(n, shape.n_heads, shape.d)
        k = (h @ layer["attn_k"].T).reshape(n, shape.n_kv_heads, shape.d)
        v = (h @ layer["attn_v"].T).reshape(n, shape.n_kv_heads, shape.d)
        q, k = rope(q, shape.freq_base, scale, factors), rope(k, shape.freq_base, scale, factors)
        x = x + attention(q, k, v) @ layer["attn_output"].T
        h = rms_norm(x, layer["ffn_norm"])
        gate = h @ layer["ffn_gate"].T
        x = x + (gate / (1.0 + np.exp(-gate)) * (h @ layer["ffn_up"].T)) @ layer["ffn_down"].T
    logits = rms_norm(x, w["output_norm.weight"]) @ w.get("output.weight", w["token_embd.weight"]).T
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
