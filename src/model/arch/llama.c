/* model/arch/llama.c: the LLaMA family: RMSNorm, RoPE on neighbouring pairs, grouped queries, SwiGLU. GGUF
 * architecture "llama": LLaMA 1-3, Mistral, SmolLM2 and others with the same graph. Touvron et al. 2023.
 */
#include <stdio.h>

#include "model/forward.h"

static paged_status load_layer(paged_model *m, int32_t il, paged_error *err) {
    const paged__hparams *hp = &m->hp;
    paged__layer *l = &m->layers[il];
    const int32_t q_dim = hp->n_heads * hp->head_dim_k, k_dim = hp->n_kv_heads * hp->head_dim_k,
                  v_dim = hp->n_kv_heads * hp->head_dim_v, a_dim = hp->n_heads * hp->head_dim_v;
    const struct {
        const char *name;
        int32_t n_rows, n_cols;
        const paged__weight **out;
    } matrices[] = {
        {"attn_q", q_dim, hp->n_embd, &l->wq},        {"attn_k", k_dim, hp->n_embd, &l->wk},
        {"attn_v", v_dim, hp->n_embd, &l->wv},        {"attn_output", hp->n_embd, a_dim, &l->wo},
        {"ffn_gate", hp->n_ff, hp->n_embd, &l->gate}, {"ffn_up", hp->n_ff, hp->n_embd, &l->up},
        {"ffn_down", hp->n_embd, hp->n_ff, &l->down},
    };
    const struct {
        const char *name;
        const float **out;
    } norms[] = {{"attn_norm", &l->attn_norm}, {"ffn_norm", &l->ffn_norm}};
    char name[64];
    paged_status s = PAGED_OK;
    for (size_t i = 0; i < sizeof norms / sizeof norms[0] && !s; i++) {
        snprintf(name, sizeof name, "blk.%d.%s.weight", il, norms[i].name);
        s = paged__model_vector(m, name, hp->n_embd, norms[i].out, err);
    }
    for (size_t i = 0; i < sizeof matrices / sizeof matrices[0] && !s; i++) {
        snprintf(name, sizeof name, "blk.%d.%s.weight", il, matrices[i].name);
        s = paged__model_matrix(m, name, true, matrices[i].n_rows, matrices[i].n_cols, matrices[i].out, err);
    }
    return s;
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

static void llama_forward(paged__lane *t) {
    const paged_model *m = t->model;
    paged__embed(t);
    for (int32_t il = 0; il < m->hp.n_layers; il++) {
        const paged__layer *l = &m->layers[il];
        const bool is_last = il == m->hp.n_layers - 1;
        paged__project_qkv(t, l);
        paged__write_kv(t, il);
        if (is_last && t->n_outputs == 0) return; /* the cache is filled; nobody asks for more */
        paged__attend(t, il);
        if (is_last) paged__keep_outputs(t);
        paged__add_attention(t, l);
        paged__add_gated_ffn(t, l, PAGED__SWIGLU);
    }
    paged__project_logits(t);
}

const paged__arch paged__arch_llama = {"llama", llama_load, llama_forward};
