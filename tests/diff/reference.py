"""The forward passes of all families in NumPy and double precision, written from the papers and not from our code.

RMSNorm (Zhang & Sennrich 2019), LayerNorm (Ba et al. 2016), rotary embedding (Su et al. 2021) with YaRN (Peng et al.
2023), grouped queries (Ainslie et al. 2023), gated units (Shazeer 2020), as put together by Touvron et al. 2023 (LLaMA),
Almazrouei et al. 2023 (Falcon), the Gemma team 2024 and 2025, Radford et al. 2019 (GPT-2), and the reports of Qwen and
Phi. There is no cache: every position sees the whole prefix at once.
"""
import math

import numpy as np

EPS = 1e-5


def norm(shape, x, w, name):
    if shape.norm == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * w[f"{name}.weight"] + w[f"{name}.bias"]
    return rms_norm(x, w[f"{name}.weight"])


def rms_norm(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * weight


def frequencies(shape, w, windowed, n_ctx):
    """(radians a position for each pair, magnitude)"""
    d = shape.rotated
    base = shape.local_freq_base if windowed and shape.local_freq_base else shape.freq_base
    own = base ** (-np.arange(0, d, 2) / d)
    if windowed and shape.local_freq_base:
        return own, 1.0
    if shape.llama3_factors:
        own = own / w["rope_freqs.weight"]
    if shape.long_factors:
        own = own / w["rope_factors_long.weight" if n_ctx > shape.n_ctx_orig else "rope_factors_short.weight"]
    magnitude = shape.attn_factor or 1.0
    if shape.scaling != "yarn":
        return own / shape.factor, magnitude

    def pair(turns):
        return d * math.log(shape.n_ctx_orig / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), d - 1)
    ramp = np.clip((np.arange(d // 2) - low) / max(high - low, 0.001), 0, 1)
    return own / shape.factor * ramp + own * (1 - ramp), magnitude * (0.1 * math.log(shape.factor) + 1)


def rope(shape, x, frequency, magnitude):
    """x [n_tokens, n_heads, d]: a pair turns by position * frequency; what is beyond n_rot stays."""
    angle = (np.arange(len(x))[:, None] * frequency)[:, None, :]
    cos, sin = np.cos(angle) * magnitude, np.sin(angle) * magnitude
    n, out = shape.rotated, x.copy()
    first, second = (slice(0, n, 2), slice(1, n, 2)) if shape.rope == "pairs" else (slice(0, n // 2), slice(n // 2, n))
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def attention(q, k, v, window, softcap):
    """q [n, n_heads, d], k and v [n, n_kv_heads, d]; causal. Returns [n, n_heads * d]."""
    n, n_heads, d = q.shape
    group = n_heads // k.shape[1]
    behind = np.arange(n)[:, None] - np.arange(n)
    hidden = (behind < 0) | (behind >= window if window else False)
    out = np.empty_like(q)
    for h in range(n_heads):
        score = q[:, h] @ k[:, h // group].T / np.sqrt(d)
        if softcap:
            score = softcap * np.tanh(score / softcap)
        score = np.where(hidden, -np.inf, score)
        p = np.exp(score - score.max(axis=1, keepdims=True))
        out[:, h] = (p / p.sum(axis=1, keepdims=True)) @ v[:, h // group]
    return out.reshape(n, n_heads * d)


def activate(shape, x):
    if shape.act == "silu":
        return x / (1.0 + np.exp(-x))
    if shape.act == "gelu":
        return 0.5 * x * (1.0 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2)))


def affine(w, name, x):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def attend(shape, w, layer, x, n_ctx):
    """x [n, n_embd] after its norm"""
    n, h_q, h_kv, windowed = len(x), shape.n_heads, shape.n_kv_heads, shape.has_window(layer)
    if shape.fused_qkv:
        cuts = [h_q * shape.d, (h_q + h_kv) * shape.d]
        q, k, v = np.split(affine(w, "attn_qkv", x), cuts, axis=1)
    else:
        q, k, v = (affine(w, f"attn_{part}", x) for part in "qkv")
    q, k, v = q.reshape(n, h_q, -1), k.reshape(n, h_kv, -1), v.reshape(n, h_kv, -1)
    if shape.qk_norm:
        q, k = rms_norm(q, w["attn_q_norm.weight"]), rms_norm(k, w["attn_k_norm.weight"])
    if shape.has_rope(layer):
        turn = frequencies(shape, w, windowed, n_ctx)
        q, k = rope(shape, q, *turn), rope(shape, k, *turn)
    return affine(w, "attn_output", attention(q, k, v, shape.window if windowed else 0, shape.softcap))


def feed_forward(shape, w, x):
    if shape.fused_ffn:
        gate, up = np.split(affine(w, "ffn_up", x), 2, axis=1)
        hidden = activate(shape, gate) * up
    elif shape.gated:
        hidden = activate(shape, affine(w, "ffn_gate", x)) * affine(w, "ffn_up", x)
    else:
        hidden = activate(shape, affine(w, "ffn_up", x))
    return affine(w, "ffn_down", hidden)


def log_probs(shape, weights, tokens, n_ctx=0):
    """[n_tokens, n_vocab] log-probabilities of the token after each position."""
    w = {name: data.astype(np.float64) for name, data in weights.items()}
    n_ctx = n_ctx or shape.n_ctx
    x = w["token_embd.weight"][tokens]
    if shape.scale_embd:
        x = x * math.sqrt(shape.n_embd)
    if shape.positions:
        x = x + w["position_embd.weight"][: len(tokens)]
    for i in range(shape.n_layers):
        start = f"blk.{i}."
        layer = {name.removeprefix(start): w[name] for name in w if name.startswith(start)} | {
            name: w[name] for name in w if name.startswith("rope_")}
        attn_norm = "attn_norm_2" if shape.parallel == "two" else "attn_norm"
        a = attend(shape, layer, i, norm(shape, x, layer, attn_norm), n_ctx)
        if shape.parallel:
            x = x + a + feed_forward(shape, layer, norm(shape, x, layer, "attn_norm"))
            continue
        x = x + (norm(shape, a, layer, "post_attention_norm") if shape.post_norms else a)
        f = feed_forward(shape, layer, norm(shape, x, layer, "ffn_norm"))
        x = x + (norm(shape, f, layer, "post_ffw_norm") if shape.post_norms else f)
    logits = norm(shape, x, w, "output_norm") @ w.get("output.weight", w["token_embd.weight"]).T
    if shape.logit_softcap:
        logits = shape.logit_softcap * np.tanh(logits / shape.logit_softcap)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
