/* model/arch/falcon.c: Falcon (Almazrouei et al. 2023): LayerNorm, one matrix for q, k and v, RoPE on halves,
 * and attention and feed-forward side by side, both added to what came in. 7B: one KV head, one norm for
 * both; 40B and 180B: several KV heads, a norm for each (attn_norm_2 is that of attention). GGUF architecture
 * "falcon"; Falcon 3 is "llama".
 */
#include "model/forward.h"
#include "model/load.h"

static void load_layer(paged__loader *from, paged__layer *l) {
    paged__load_norm(from, "attn_norm", &l->attn_norm);
    if (paged__load_has(from, "attn_norm_2")) paged__load_norm(from, "attn_norm_2", &l->attn_norm_2);
    paged__load_attention(from, l);
    paged__load_plain_ffn(from, l);
}

static void forward_layer(paged__lane *t, const paged__layer *l) {
    paged__project_qkv(t, l, l->attn_norm_2.weight ? &l->attn_norm_2 : &l->attn_norm);
    if (!paged__attend(t, l)) return;
    paged__make_hidden(t, l, &l->attn_norm, PAGED__GELU_ERF); /* before x changes */
    paged__add_attention(t, l);
    paged__add_hidden(t, l);
}

const paged__arch paged__arch_falcon = {
    .name = "falcon",
    .norm = PAGED__NORM_LAYER,
    .rope = PAGED__ROPE_HALVES,
    .load_layer = load_layer,
    .forward_layer = forward_layer,
};
