/* model/arch/llama.c: the LLaMA family: RMSNorm, RoPE on neighbouring pairs, grouped queries, SwiGLU (Touvron
 * et al. 2023). GGUF architecture "llama": LLaMA 1-3, Mistral (with a window), SmolLM2, Falcon 3 and others
 * of the same graph; "smollm3": SmolLM3, in which every fourth layer does without RoPE.
 */
#include "model/forward.h"
#include "model/load.h"

static void load_layer(paged__loader *from, paged__layer *l) {
    paged__load_norm(from, "attn_norm", &l->attn_norm);
    paged__load_attention(from, l);
    paged__load_norm(from, "ffn_norm", &l->ffn_norm);
    paged__load_gated_ffn(from, l);
}

static void forward_layer(paged__lane *t, const paged__layer *l) {
    paged__project_qkv(t, l, &l->attn_norm);
    if (!paged__attend(t, l)) return;
    paged__add_attention(t, l);
    paged__make_hidden(t, l, &l->ffn_norm, PAGED__SILU);
    paged__add_hidden(t, l);
}

static paged_status configure_smollm3(paged_model *m, paged_error *err) {
    (void)err;
    for (int32_t i = 3; i < m->hp.n_layers; i += 4) m->layers[i].rope = -1;
    return PAGED_OK;
}

const paged__arch paged__arch_llama = {
    .name = "llama",
    .norm = PAGED__NORM_RMS,
    .rope = PAGED__ROPE_PAIRS,
    .load_layer = load_layer,
    .forward_layer = forward_layer,
};

const paged__arch paged__arch_smollm3 = {
    .name = "smollm3",
    .norm = PAGED__NORM_RMS,
    .rope = PAGED__ROPE_PAIRS,
    .configure = configure_smollm3,
    .load_layer = load_layer,
    .forward_layer = forward_layer,
};
