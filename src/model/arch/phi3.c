/* model/arch/phi3.c: Phi-3, Phi-3.5, Phi-4 (Abdin et al. 2024): as LLaMA, with RoPE on halves (on a part of
 * the head in some), factors of its own for long contexts, one matrix for q, k and v and one for gate and up.
 * Some of them have a window. GGUF architecture "phi3".
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

const paged__arch paged__arch_phi3 = {
    .name = "phi3",
    .norm = PAGED__NORM_RMS,
    .rope = PAGED__ROPE_HALVES,
    .load_layer = load_layer,
    .forward_layer = forward_layer,
};
