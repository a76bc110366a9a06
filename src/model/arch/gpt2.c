/* model/arch/gpt2.c: GPT-2 (Radford et al. 2019): LayerNorm, learned positions in place of RoPE, biases
 * everywhere, one matrix for q, k and v, a plain feed-forward. GGUF architecture "gpt2".
 */
#include "model/forward.h"
#include "model/load.h"

static void load_layer(paged__loader *from, paged__layer *l) {
    paged__load_norm(from, "attn_norm", &l->attn_norm);
    paged__load_attention(from, l);
    paged__load_norm(from, "ffn_norm", &l->ffn_norm);
    paged__load_plain_ffn(from, l);
}

static void forward_layer(paged__lane *t, const paged__layer *l) {
    paged__project_qkv(t, l, &l->attn_norm);
    if (!paged__attend(t, l)) return;
    paged__add_attention(t, l);
    paged__make_hidden(t, l, &l->ffn_norm, PAGED__GELU_TANH);
    paged__add_hidden(t, l);
}

const paged__arch paged__arch_gpt2 = {
    .name = "gpt2",
    .norm = PAGED__NORM_LAYER,
    .rope = PAGED__ROPE_NONE,
    .load_layer = load_layer,
    .forward_layer = forward_layer,
    .has_positions = true,
};
