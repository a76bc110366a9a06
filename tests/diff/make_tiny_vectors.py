"""Makes tests/diff/vectors/tiny/*.json: what mlx-lm and transformers compute for the tiny random models of models.py.

    python -m venv .cache/vectors
    .cache/vectors/bin/pip install -r tools/requirements-vectors.txt
    .cache/vectors/bin/python tests/diff/make_tiny_vectors.py [NAME...]

Neither reads GGUF here: each gets the same random arrays under the names and in the layouts of the published checkpoints,
and the configuration a checkpoint would have. So what is compared is everything: names, layouts, keys, arithmetic. All
models are computed by transformers (torch, CPU, f32), and by mlx-lm as well where it has the family whole; both, and
reference.py, must agree before anything is written.
"""
import json
import pathlib
import sys

import numpy as np

import reference
from models import SHAPES, WINDOWED, random_weights, tiny_prompt, tiny_vocab

FOLDER = pathlib.Path(__file__).resolve().parent / "vectors" / "tiny"
LONG = ("mha-16", "gqa-9-3-like-smollm2")  # these cross the border of an attention split (512 tokens)
N_PROMPT, N_GREEDY = 40, 24
AGREE = 1e-4  # between the oracles; 150 rows in f32
MARGIN = 1e-3  # of a greedy token before the next best, so that the choice is not left to rounding

# What mlx-lm leaves out: Falcon, the window where all layers or those of Gemma 2 have one, the magnitude of longrope.
NOT_IN_MLX = ("gemma2", "phi3-long", "phi3-window", "mistral-window", "falcon-7b", "falcon-40b")

LLAMA = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "layer": "model.layers",
}
GEMMA = LLAMA | {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FALCON = {
    "token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head",
    "attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h", "layer": "transformer.h",
}
NAMES = {
    "gemma2": GEMMA, "gemma3": GEMMA, "phi3": LLAMA | {"ffn_up": "mlp.gate_up_proj"},
    "falcon-7b": FALCON | {"attn_norm": "input_layernorm"},
    "falcon-40b": FALCON | {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
    "gpt2": {
        "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
        "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj", "layer": "transformer.h",
    },
}


def own_layout(shape, part, data):
    """An array as the checkpoints of the family hold it. GGUF files are converted from these."""
    if shape.arch in ("llama", "smollm3") and part in ("attn_q", "attn_k"):
        # A checkpoint's pairs are halves of a head; the converter puts them side by side.
        heads = shape.n_heads if part == "attn_q" else shape.n_kv_heads
        return data.reshape(heads, shape.d // 2, 2, -1).swapaxes(1, 2).reshape(data.shape)
    if shape.arch.startswith("gemma") and part.endswith("norm"):
        return data - 1.0  # a checkpoint's norm multiplies by 1 + weight
    if shape.arch == "falcon" and part == "attn_qkv":
        # Groups of a key head: its query heads, the key, the value.
        q, k, v = np.split(data.reshape(-1, shape.d, data.shape[1]), [shape.n_heads, shape.n_heads + shape.n_kv_heads])
        q = q.reshape(shape.n_kv_heads, -1, shape.d, data.shape[1])
        return np.concatenate([q, k[:, None], v[:, None]], axis=1).reshape(data.shape)
    if shape.arch == "gpt2" and data.ndim == 2 and not part.endswith("embd"):
        return data.T
    return data


def checkpoint(shape, weights):
    """name -> array, as published; without what the configuration says instead (RoPE factors)."""
    names = NAMES.get(shape.name) or NAMES.get(shape.arch) or LLAMA
    out = {}
    for name, data in weights.items():
        if name.startswith("rope_"):
            continue
        *layer, part, kind = name.split(".")
        prefix = f"{names['layer']}.{layer[1]}." if layer else ""
        out[f"{prefix}{names[part]}.{kind}"] = np.ascontiguousarray(own_layout(shape, part, data), np.float32)
    return out


def rope_parameters(shape, weights):
    r = {"rope_type": "default", "rope_theta": shape.freq_base}
    if shape.scaling:
        r |= {"rope_type": shape.scaling, "factor": shape.factor}
    if shape.scaling == "yarn":
        r |= {"original_max_position_embeddings": shape.n_ctx_orig}
    if shape.llama3_factors:
        r |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192}
    if shape.long_factors:
        # The original length only tells which factors to take, by the length of the text: here the long ones.
        r |= {"rope_type": "longrope", "attention_factor": shape.attn_factor, "original_max_position_embeddings": 16,
              "factor": shape.n_ctx / 16}
        for kind in ("short", "long"):
            r[f"{kind}_factor"] = weights[f"rope_factors_{kind}.weight"].tolist()
    if shape.n_rot:
        r["partial_rotary_factor"] = shape.n_rot / shape.d
    return r


def configuration(shape, weights):
    """What config.json would say."""
    kind = {"gemma3": "gemma3_text", "llama": "mistral" if shape.window else "llama"}.get(shape.arch, shape.arch)
    c = {"model_type": kind, "vocab_size": len(tiny_vocab()[0]), "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if kind == "gpt2":
        return c | {"n_ctx": shape.n_ctx, "n_positions": shape.n_ctx, "n_embd": shape.n_embd, "n_head": shape.n_heads,
                    "n_layer": shape.n_layers, "n_inner": shape.n_ff, "layer_norm_epsilon": 1e-5}
    c |= {"hidden_size": shape.n_embd, "num_hidden_layers": shape.n_layers, "num_attention_heads": shape.n_heads,
          "max_position_embeddings": shape.n_ctx, "rope_theta": shape.freq_base, "tie_word_embeddings": shape.tied}
    rope = rope_parameters(shape, weights)
    c["rope_parameters"] = rope
    if kind == "falcon":
        return c | {"layer_norm_epsilon": 1e-5, "num_kv_heads": shape.n_kv_heads, "ffn_hidden_size": shape.n_ff,
                    "multi_query": True, "parallel_attn": True, "new_decoder_architecture": shape.parallel == "two",
                    "bias": False, "alibi": False}
    c |= {"intermediate_size": shape.n_ff, "num_key_value_heads": shape.n_kv_heads, "head_dim": shape.d,
          "rms_norm_eps": 1e-5, "attention_bias": shape.bias == "all", "mlp_bias": shape.bias == "all"}
    if rope["rope_type"] != "default":
        c["rope_scaling"] = rope  # as older checkpoints say it, and mlx-lm reads it
    if shape.long_factors:
        c["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    if shape.n_rot:
        c["partial_rotary_factor"] = shape.n_rot / shape.d
    if shape.no_rope_every:
        c["no_rope_layers"] = [int(shape.has_rope(i)) for i in range(shape.n_layers)]
    if shape.window:
        c["sliding_window"] = shape.window
    if shape.arch.startswith("gemma"):
        kinds = ["sliding_attention" if shape.has_window(i) else "full_attention" for i in range(shape.n_layers)]
        c |= {"layer_types": kinds, "query_pre_attn_scalar": shape.d, "attn_logit_softcapping": shape.softcap or None,
              "final_logit_softcapping": shape.logit_softcap or None}
    if kind == "gemma3_text":
        c |= {"sliding_window_pattern": shape.global_every, "rope_local_base_freq": shape.local_freq_base}
        local = {"rope_type": "default", "rope_theta": shape.local_freq_base}
        c["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    return c


def with_transformers(config, weights):
    """ids -> logits"""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config), attn_implementation="eager", dtype=torch.float32)
    missing, unexpected = model.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()}, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    model.eval()

    def logits(ids):
        with torch.no_grad():
            return model(torch.tensor([ids]), use_cache=False).logits[0].double().numpy()

    return logits


def with_mlx(config, weights):
    """ids -> logits"""
    import importlib

    import mlx.core as mx

    if config["model_type"] == "gemma3_text":
        config = config | {"rope_theta": config["rope_parameters"]["full_attention"]["rope_theta"]}
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    given = {name.removeprefix("transformer."): mx.array(data) for name, data in weights.items()}
    if hasattr(model, "sanitize"):
        given = model.sanitize(given)
    model.load_weights(list(given.items()))

    def logits(ids):
        return np.array(model(mx.array([ids])).astype(mx.float32))[0].astype(np.float64)

    return logits


def log_softmax(x):
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def greedy(logits, ids):
    """The ids that follow and their log-probabilities; each clearly ahead of the second."""
    ids, out = list(ids), []
    for _ in range(N_GREEDY):
        row = log_softmax(logits(ids)[-1:])[0]
        second, best = np.argsort(row)[-2:]
        assert row[best] - row[second] > MARGIN, f"two tokens are nearly equal after {len(ids)}"
        ids.append(int(best))
        out.append(round(float(row[best]), 6))
    return {"tokens": ids[-N_GREEDY:], "logprobs": out}


def make(shape):
    weights = random_weights(shape, 1)
    ids = tiny_prompt(600 if shape.name in LONG else 150)
    config, arrays = configuration(shape, weights), checkpoint(shape, weights)
    oracle = with_transformers(config, arrays)
    rows = log_softmax(oracle(ids))[:-1]
    apart = {"numpy": np.abs(rows - reference.log_probs(shape, weights, ids)[:-1]).max()}
    if shape.name not in NOT_IN_MLX:
        apart["mlx"] = np.abs(rows - log_softmax(with_mlx(config, arrays)(ids))[:-1]).max()
    print(f"{shape.name:22}", "  ".join(f"{name} {value:.1e}" for name, value in apart.items()), flush=True)
    assert max(apart.values()) <= AGREE, "the oracles do not agree"
    top = np.argsort(rows, axis=1)[:, :-3:-1]  # the two most likely ids
    taken = rows[np.arange(len(rows)), ids[1:]]
    made = {
        "by": ["transformers", *(["mlx-lm"] if "mlx" in apart else [])],
        "tokens": ids,
        "logprobs": [round(float(p), 6) for p in taken],
        "top": top.tolist(),
        "top_logprobs": [[round(float(p), 6) for p in row] for row in np.take_along_axis(rows, top, axis=1)],
        "n_prompt": N_PROMPT,
        "greedy": greedy(oracle, ids[:N_PROMPT]),
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in made.items())
    (FOLDER / f"{shape.name}.json").write_text("{\n" + lines + "\n}\n")


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    for shape in SHAPES + WINDOWED:
        if shape.name in sys.argv[1:] or not sys.argv[1:]:
            make(shape)


if __name__ == "__main__":
    main()
