/* model/arch/gemma.c: Gemma 2 and 3 (Gemma Team 2024, 2025): the embedding is scaled, GEGLU, norms before and
 * after attention and feed-forward, RoPE on halves. GGUF architectures
 *   "gemma2": every other layer sees a window, softcaps on attention scores and logits
 *   "gemma3": five of six layers see a window, and these have a RoPE base of their own; norms of q and k
 * The files have 1 + weight for RMS norms already.
 */
#include <math.h>

#include "model/forward.h"
#include "model/load.h"

static void load_gemma2(paged__loader *from, paged__layer *l) {
    paged__load_norm(from, "attn_norm", &l->attn_norm);
    paged__load_attention(from, l);
    paged__load_norm(from, "post_attention_norm", &l->attn_post_norm);
    paged__load_norm(from, "ffn_norm", &l->ffn_norm);
    paged__load_gated_ffn(from, l);
    paged__load_norm(from, "post_ffw_norm", &l->ffn_post_norm);
}

static void load_gemma3(paged__loader *from, paged__layer *l) {
    load_gemma2(from, l);
    paged__load_head_norms(from, l);
}

static void forward_layer(paged__lane *t, const paged__layer *l) {
    paged__project_qkv(t, l, &l->attn_norm);
    if (!paged__attend(t, l)) return;
    paged__add_attention(t, l);
    paged__make_hidden(t, l, &l->ffn_norm, PAGED__GELU_TANH);
    paged__add_hidden(t, l);
}

/* Of `period` layers the last one sees all keys. The largest model of either generation scales by the width
 * of its heads as if they were n_embd / n_heads wide; its files do not say so. */
static paged_status configure(paged_model *m, int32_t period, int32_t n_layers_largest, paged_error *err) {
    paged__hparams *hp = &m->hp;
    paged_status s =
        paged__model_key_i32(m, "attention.sliding_window_pattern", false, 1, hp->n_layers, &period, err);
    hp->embd_scale = sqrtf((float)hp->n_embd);
    if (hp->attn_scale == 0 && hp->n_layers == n_layers_largest)
        hp->attn_scale = 1.0f / sqrtf((float)hp->n_embd / (float)hp->n_heads);
    for (int32_t i = 0; i < hp->n_layers; i++)
        m->layers[i].rope = m->layers[i].windowed = i % period < period - 1;
    return s;
}

/* 0 is none. What is smaller than any score would leave nothing of them, and attention refuses it. */
static paged_status read_softcap(const paged_model *m, const char *key, float *out, paged_error *err) {
    float cap = *out;
    const paged_status s = paged__model_key_f32(m, key, false, 0, 1e6f, &cap, err);
    if (s) return s;
    if (cap != 0 && cap < 1e-3f)
        return paged__fail(err, PAGED_ERR_FORMAT, "%s is %g, neither 0 nor at least 0.001", key, (double)cap);
    *out = cap;
    return PAGED_OK;
}

static paged_status configure_gemma2(paged_model *m, paged_error *err) {
    paged__hparams *hp = &m->hp;
    if (hp->window == 0) hp->window = 4096;
    hp->attn_softcap = 50.0f;
    hp->logit_softcap = 30.0f;
    paged_status s = configure(m, 2, 46, err);
    if (!s) s = read_softcap(m, "attn_logit_softcapping", &hp->attn_softcap, err);
    if (!s) s = read_softcap(m, "final_logit_softcapping", &hp->logit_softcap, err);
    return s;
}

static paged_status configure_gemma3(paged_model *m, paged_error *err) {
    paged__hparams *hp = &m->hp;
    paged__rope *windowed = &hp->rope[1];
    windowed->base = 10000.0f; /* and no scaling */
    windowed->scale = windowed->attn_factor = 1.0f;
    windowed->yarn = false;
    windowed->factors = windowed->long_factors = NULL;
    paged_status s = configure(m, 6, 62, err);
    if (!s) s = paged__model_key_f32(m, "rope.freq_base_swa", false, 1.0f, 1e12f, &windowed->base, err);
    if (!s) s = read_softcap(m, "final_logit_softcapping", &hp->logit_softcap, err);
    return s;
}

const paged__arch paged__arch_gemma2 = {
    .name = "gemma2",
    .norm = PAGED__NORM_RMS,
    .rope = PAGED__ROPE_HALVES,
    .configure = configure_gemma2,
    .load_layer = load_gemma2,
    .forward_layer = forward_layer,
};

const paged__arch paged__arch_gemma3 = {
    .name = "gemma3",
    .norm = PAGED__NORM_RMS,
    .rope = PAGED__ROPE_HALVES,
    .configure = configure_gemma3,
    .load_layer = load_gemma3,
    .forward_layer = forward_layer,
};
