/* model/arch/llama.c: the LLaMA family: RMSNorm, RoPE on neighbouring pairs, grouped queries, SwiGLU. GGUF
 * architecture "llama": LLaMA 1-3, Mistral, SmolLM2 and others with the same graph. Touvron et al. 2023.
 */
#include <stdio.h>

#include "model/fused.h"
#include "model/model.h"
#include "model/runner.h"

static paged_status load_layer(paged_model *m, int32_t il, paged_error *err) {
    const paged__hparams *hp = &m->hp;
    paged__layer *l = &m->layers[il];
    const int64_t n_embd = hp->n_embd, n_ff = hp->n_ff;
    const struct {
        const char *name;
        int64_t ne0, ne1;
        struct ggml_tensor **out;
    } wanted[] = {
        {"attn_norm", n_embd, 0, &l->attn_norm},
        {"attn_q", n_embd, (int64_t)hp->n_heads * hp->head_dim_k, &l->wq},
        {"attn_k", n_embd, (int64_t)hp->n_kv_heads * hp->head_dim_k, &l->wk},
        {"attn_v", n_embd, (int64_t)hp->n_kv_heads * hp->head_dim_v, &l->wv},
        {"attn_output", (int64_t)hp->n_heads * hp->head_dim_v, n_embd, &l->wo},
        {"ffn_norm", n_embd, 0, &l->ffn_norm},
        {"ffn_gate", n_embd, n_ff, &l->ffn_gate},
        {"ffn_up", n_embd, n_ff, &l->ffn_up},
        {"ffn_down", n_ff, n_embd, &l->ffn_down},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%d.%s.weight", il, wanted[i].name);
        paged_status s = paged__model_tensor(m, name, true, wanted[i].ne0, wanted[i].ne1, wanted[i].out, err);
        if (s) return s;
    }
    return PAGED_OK;
}

/* What the graph below does not do must not be in the file: ignoring a bias would give wrong text in silence.
 */
static paged_status refuse_unknown(const paged_model *m, paged_error *err) {
    static const char *const unknown[] = {
        "blk.0.attn_q.bias", "blk.0.attn_k.bias",     "blk.0.attn_v.bias",        "blk.0.attn_output.bias",
        "blk.0.ffn_up.bias", "blk.0.ffn_down.bias",   "blk.0.attn_q_norm.weight", "blk.0.ffn_gate_inp.weight",
        "output.bias",       "blk.0.attn_qkv.weight", "rope_factors_long.weight"};
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++)
        if (paged__gguf_find(m->file, unknown[i]))
            return paged__fail(err, PAGED_ERR_UNSUPPORTED, "tensor %s: not supported in architecture llama",
                               unknown[i]);
    return PAGED_OK;
}

static paged_status llama_load(paged_model *m, paged_error *err) {
    paged_status s = refuse_unknown(m, err);
    for (int32_t il = 0; il < m->hp.n_layers && !s; il++) s = load_layer(m, il, err);
    return s;
}

/* x [n_embd, n] -> RMS norm times weight. */
static struct ggml_tensor *norm(paged__graph *g, struct ggml_tensor *x, struct ggml_tensor *weight) {
    return ggml_mul(g->ctx, ggml_rms_norm(g->ctx, x, g->model->hp.norm_eps), weight);
}

static void llama_build(paged__graph *g) {
    const paged_model *m = g->model;
    const paged__hparams *hp = &m->hp;
    struct ggml_tensor *x = ggml_get_rows(g->ctx, m->tok_embd, g->tokens); /* [n_embd, n_tokens] */

    for (int32_t il = 0; il < hp->n_layers; il++) {
        const paged__layer *l = &m->layers[il];
        const bool last = il == hp->n_layers - 1;

        struct ggml_tensor *h = norm(g, x, l->attn_norm), *q, *k, *v;
        paged__linear_qkv(g, l, h, &q, &k, &v);
        struct ggml_tensor *a = paged__graph_attention(g, il, q, k, v, !last || g->n_outputs > 0);
        if (!a)
            return; /* a chunk of a prompt whose logits nobody wants: the cache is filled, the rest is not
                       needed */
        if (last && g->n_outputs < g->n_tokens) {
            a = ggml_get_rows(g->ctx, a, g->outputs);
            x = ggml_get_rows(g->ctx, x, g->outputs);
        }
        x = paged__linear_add(g, l->wo, a, x);
        h = norm(g, x, l->ffn_norm);
        x = paged__linear_add(g, l->ffn_down, paged__linear_swiglu(g, l, h), x);
    }
    g->logits = paged__linear(g, m->output, norm(g, x, m->output_norm));
}

const paged__arch paged__arch_llama = {"llama", llama_load, llama_build};
