/* model/arch/qwen.c: Qwen: as LLaMA, with RoPE on halves. GGUF architectures "qwen2" (2 and 2.5: biases on q,
 * k and v) and "qwen3" (dense; an RMS norm over each head of q and k in their place).
 */
#include "model/forward.h"
#include "model/load.h"

static void load_qwen2(paged__loader *from, paged__layer *l) {
    paged__load_norm(from, "attn_norm", &l->attn_norm);
    paged__load_attention(from, l);
    paged__load_norm(from, "ffn_norm", &l->ffn_norm);
    paged__load_gated_ffn(from, l);
}

static void load_qwen3(paged__loader *from, paged__layer *l) {
    load_qwen2(from, l);
    paged__load_head_norms(from, l);
}

static void forward_layer(paged__lane *t, const paged__layer *l) {
    paged__project_qkv(t, l, &l->attn_norm);
    if (!paged__attend(t, l)) return; /* with the norms of heads, where there are any */
    paged__add_attention(t, l);
    paged__make_hidden(t, l, &l->ffn_norm, PAGED__SILU);
    paged__add_hidden(t, l);
}

const paged__arch paged__arch_qwen2 = {
    .name = "qwen2",
    .norm = PAGED__NORM_RMS,
    .rope = PAGED__ROPE_HALVES,
    .load_layer = load_qwen2,
    .forward_layer = forward_layer,
};

const paged__arch paged__arch_qwen3 = {
    .name = "qwen3",
    .norm = PAGED__NORM_RMS,
    .rope = PAGED__ROPE_HALVES,
    .load_layer = load_qwen3,
    .forward_layer = forward_layer,
};
