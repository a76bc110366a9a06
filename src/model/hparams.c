/* model/hparams.c: the numbers of a model file, each bounded here before anything is sized by it. What all
 * families have is read here; configure() of the family adds what is its own.
 */
#include <math.h>
#include <stdio.h>

#include "model/model.h"
#include "paged/ops.h"

enum { LAYERS_MAX = 1024, EMBD_MAX = 1 << 17, HEADS_MAX = 1024, CTX_MAX = 1 << 28, KEY_BYTES = 96 };

/* "llama" + "block_count" -> "llama.block_count" */
static const char *arch_key(const paged_model *m, char buf[KEY_BYTES], const char *key) {
    snprintf(buf, KEY_BYTES, "%s.%s", m->arch->name, key);
    return buf;
}

paged_status paged__model_key_i32(const paged_model *m, const char *key, bool required, int32_t min,
                                  int32_t max, int32_t *out, paged_error *err) {
    char name[KEY_BYTES];
    uint32_t value = (uint32_t)*out;
    paged_status s =
        paged__gguf_u32(m->file, arch_key(m, name, key), required, (uint32_t)min, (uint32_t)max, &value, err);
    if (!s) *out = (int32_t)value;
    return s;
}

paged_status paged__model_key_f32(const paged_model *m, const char *key, bool required, float min, float max,
                                  float *out, paged_error *err) {
    char name[KEY_BYTES];
    return paged__gguf_f32(m->file, arch_key(m, name, key), required, min, max, out, err);
}

static paged_status read_heads(paged_model *m, paged_error *err) {
    paged__hparams *hp = &m->hp;
    const int32_t max = PAGED_HEAD_DIM_MAX;
    paged_status s = paged__model_key_i32(m, "attention.head_count", true, 1, HEADS_MAX, &hp->n_heads, err);
    hp->n_kv_heads = hp->n_heads;
    if (!s) s = paged__model_key_i32(m, "attention.head_count_kv", false, 1, HEADS_MAX, &hp->n_kv_heads, err);
    if (s) return s;
    if (hp->n_heads % hp->n_kv_heads)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED, "%d attention heads are not a multiple of %d KV heads",
                           hp->n_heads, hp->n_kv_heads);
    hp->head_dim_k = hp->head_dim_v = hp->n_embd / hp->n_heads; /* key_length and value_length win over it */
    s = paged__model_key_i32(m, "attention.key_length", false, 1, max, &hp->head_dim_k, err);
    if (!s) s = paged__model_key_i32(m, "attention.value_length", false, 1, max, &hp->head_dim_v, err);
    if (!s) s = paged__model_key_f32(m, "attention.scale", false, 1e-6f, 1e6f, &hp->attn_scale, err);
    if (s) return s;
    if (hp->head_dim_k < 1 || hp->head_dim_k > max || hp->head_dim_v < 1 || hp->head_dim_v > max)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED,
                           "head_dim %d and %d (embedding %d / %d heads) outside 1 … %d", hp->head_dim_k,
                           hp->head_dim_v, hp->n_embd, hp->n_heads, max);
    return PAGED_OK;
}

/* ---- RoPE ---- */

/* A tensor of factors, if there is one. */
static paged_status find_factors(const paged_model *m, const char *name, const float **out,
                                 paged_error *err) {
    const int32_t n = m->hp.rope[0].n_rot / 2;
    const paged__gguf_tensor *t = paged__gguf_find(m->file, name);
    if (!t) return PAGED_OK;
    if (t->type != GGML_TYPE_F32 || t->n_dims != 1 || t->ne[0] != n)
        return paged__fail(err, PAGED_ERR_FORMAT, "%s: %lld values of type %s, not %d of f32", name,
                           (long long)t->ne[0], ggml_type_name(t->type), n);
    *out = t->data;
    for (int32_t i = 0; i < n; i++)
        if (!(isfinite((*out)[i]) && (*out)[i] > 0))
            return paged__fail(err, PAGED_ERR_FORMAT, "%s[%d] is %g", name, i, (double)(*out)[i]);
    return PAGED_OK;
}

/* The type names what the numbers mean; linear is what old files without one mean by a factor. */
static paged_status read_scaling(paged_model *m, paged__rope *rope, paged_error *err) {
    const char *type = "linear";
    char key[KEY_BYTES];
    float factor = 1.0f, log_multiplier = 0.0f;
    paged_status s = paged__gguf_str(m->file, arch_key(m, key, "rope.scaling.type"), false, &type, err);
    if (!s) s = paged__model_key_f32(m, "rope.scale_linear", false, 1e-6f, 1e6f, &factor, err);
    if (!s) s = paged__model_key_f32(m, "rope.scaling.factor", false, 1e-6f, 1e6f, &factor, err);
    if (s) return s;
    rope->yarn = strcmp(type, "yarn") == 0;
    if (strcmp(type, "none") == 0) return PAGED_OK;
    if (!rope->yarn && strcmp(type, "linear") != 0 && strcmp(type, "longrope") != 0)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED,
                           "RoPE scaling \"%.40s\" (%s) is not known; none, linear, yarn and longrope are",
                           type, arch_key(m, key, "rope.scaling.type"));
    rope->scale = 1.0f / factor;
    if (!rope->yarn) return PAGED_OK;
    s = paged__model_key_f32(m, "rope.scaling.yarn_beta_fast", false, 1e-3f, 1e6f, &rope->beta_fast, err);
    if (!s)
        s = paged__model_key_f32(m, "rope.scaling.yarn_beta_slow", false, 1e-3f, 1e6f, &rope->beta_slow, err);
    if (!s)
        s = paged__model_key_f32(m, "rope.scaling.yarn_log_multiplier", false, 0, 0, &log_multiplier, err);
    return s;
}

static paged_status read_rope(paged_model *m, paged_error *err) {
    paged__hparams *hp = &m->hp;
    paged__rope *rope = &hp->rope[0];
    char key[KEY_BYTES];
    paged_status s;
    *rope = (paged__rope){.n_rot = hp->head_dim_k,
                          .base = 10000.0f,
                          .scale = 1.0f,
                          .attn_factor = 1.0f,
                          .beta_fast = 32.0f,
                          .beta_slow = 1.0f,
                          .n_ctx_orig = hp->n_ctx_train};
    if ((s = paged__model_key_i32(m, "rope.dimension_count", false, 2, hp->head_dim_k, &rope->n_rot, err)))
        return s;
    if (rope->n_rot % 2)
        return paged__fail(err, PAGED_ERR_FORMAT, "%s is %d: an odd number cannot be rotated in pairs",
                           arch_key(m, key, "rope.dimension_count"), rope->n_rot);
    s = paged__model_key_f32(m, "rope.freq_base", false, 1.0f, 1e12f, &rope->base, err);
    if (!s)
        s = paged__model_key_f32(m, "rope.scaling.attn_factor", false, 1e-3f, 1e3f, &rope->attn_factor, err);
    if (!s)
        s = paged__model_key_i32(m, "rope.scaling.original_context_length", false, 1, CTX_MAX,
                                 &rope->n_ctx_orig, err);
    if (!s) s = read_scaling(m, rope, err);
    if (!s) s = find_factors(m, "rope_freqs.weight", &rope->factors, err);
    if (!s) s = find_factors(m, "rope_factors_short.weight", &rope->factors, err);
    if (!s) s = find_factors(m, "rope_factors_long.weight", &rope->long_factors, err);
    hp->rope[1] = *rope;
    return s;
}

/* ---- all of them ---- */

static paged_status refuse_others(paged_model *m, paged_error *err) {
    char key[KEY_BYTES];
    int32_t n_experts = 0;
    bool causal = true;
    paged_status s = paged__model_key_i32(m, "expert_count", false, 0, 1 << 20, &n_experts, err);
    if (!s) s = paged__gguf_bool(m->file, arch_key(m, key, "attention.causal"), false, &causal, err);
    if (s) return s;
    if (n_experts)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED,
                           "mixture of %d experts: not supported in architecture %s", n_experts,
                           m->arch->name);
    if (!causal)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED, "%s is false: a model that does not generate text",
                           key);
    return PAGED_OK;
}

/* Which layers share a group of the cache. A window that the context never fills is none. */
static void make_groups(paged_model *m) {
    const int32_t n_layers = m->hp.n_layers;
    if (m->hp.window >= m->hp.n_ctx_train) m->hp.window = 0;
    int32_t n_windowed = 0;
    for (int32_t i = 0; i < n_layers; i++) {
        m->layers[i].windowed = m->layers[i].windowed && m->hp.window > 0;
        n_windowed += m->layers[i].windowed;
    }
    const int32_t windowed_group = n_windowed == n_layers ? 0 : 1;
    m->n_groups = n_windowed > 0 && n_windowed < n_layers ? 2 : 1;
    for (int32_t i = 0; i < n_layers; i++) {
        paged__layer *l = &m->layers[i];
        l->group = l->windowed ? windowed_group : 0;
        l->in_group = m->groups[l->group].n_layers++;
        m->groups[l->group].window = l->windowed ? m->hp.window : 0;
    }
}

paged_status paged__model_hparams(paged_model *m, paged_error *err) {
    paged__hparams *hp = &m->hp;
    const bool is_rms = m->arch->norm == PAGED__NORM_RMS;
    hp->embd_scale = 1.0f;
    paged_status s = paged__model_key_i32(m, "block_count", true, 1, LAYERS_MAX, &hp->n_layers, err);
    if (!s) s = paged__model_key_i32(m, "embedding_length", true, 1, EMBD_MAX, &hp->n_embd, err);
    if (!s) s = paged__model_key_i32(m, "feed_forward_length", true, 1, EMBD_MAX * 8, &hp->n_ff, err);
    if (!s) s = paged__model_key_i32(m, "context_length", true, 1, CTX_MAX, &hp->n_ctx_train, err);
    if (!s) s = read_heads(m, err);
    if (!s && m->arch->rope != PAGED__ROPE_NONE) s = read_rope(m, err);
    if (!s)
        s = paged__model_key_f32(m,
                                 is_rms ? "attention.layer_norm_rms_epsilon" : "attention.layer_norm_epsilon",
                                 true, 0.0f, 1.0f, &hp->norm_eps, err);
    if (!s) s = paged__model_key_i32(m, "attention.sliding_window", false, 0, INT32_MAX, &hp->window, err);
    if (!s) s = refuse_others(m, err);
    if (s) return s;
    m->layers = paged__calloc((size_t)hp->n_layers, sizeof *m->layers);
    if (!m->layers) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for %d layers", hp->n_layers);
    for (int32_t i = 0; i < hp->n_layers; i++) {
        m->layers[i].index = i;
        m->layers[i].windowed = hp->window > 0;
        m->layers[i].rope = m->arch->rope == PAGED__ROPE_NONE ? -1 : 0;
    }
    if (m->arch->configure && (s = m->arch->configure(m, err))) return s;
    make_groups(m);
    return PAGED_OK;
}
