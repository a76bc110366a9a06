/* model/model.c: from a checked GGUF file to a paged_model. Every number of the file is bounded here before
 * anything is sized by it; what a family adds is loaded by its file in arch/.
 */
#include "model/model.h"

#include <ggml-cpu.h>
#include <math.h>
#include <stdio.h>

#include "model/chat.h"
#include "paged/ops.h"

enum { LAYERS_MAX = 1024, EMBD_MAX = 1 << 17, HEADS_MAX = 1024, CTX_MAX = 1 << 28 };

/* Adding a family: its file in arch/ and one line here. */
static const paged__arch *const archs[] = {&paged__arch_llama};

static const paged__arch *find_arch(const char *name) {
    for (size_t i = 0; i < sizeof archs / sizeof archs[0]; i++)
        if (strcmp(archs[i]->name, name) == 0) return archs[i];
    return NULL;
}

/* "llama" + "block_count" -> "llama.block_count" */
static const char *arch_key(const paged_model *m, char buf[96], const char *key) {
    snprintf(buf, 96, "%s.%s", m->arch->name, key);
    return buf;
}

static paged_status key_i32(const paged_model *m, const char *key, bool required, int32_t min, int32_t max,
                            int32_t *out, paged_error *err) {
    char name[96];
    uint32_t value = (uint32_t)*out;
    paged_status s =
        paged__gguf_u32(m->file, arch_key(m, name, key), required, (uint32_t)min, (uint32_t)max, &value, err);
    if (!s) *out = (int32_t)value;
    return s;
}

static paged_status load_heads(paged_model *m, paged_error *err) {
    paged__hparams *hp = &m->hp;
    paged_status s;
    if ((s = key_i32(m, "attention.head_count", true, 1, HEADS_MAX, &hp->n_heads, err))) return s;
    hp->n_kv_heads = hp->n_heads;
    if ((s = key_i32(m, "attention.head_count_kv", false, 1, HEADS_MAX, &hp->n_kv_heads, err))) return s;
    if (hp->n_heads % hp->n_kv_heads)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED, "%d attention heads are not a multiple of %d KV heads",
                           hp->n_heads, hp->n_kv_heads);
    hp->head_dim_k = hp->head_dim_v = hp->n_embd / hp->n_heads; /* key_length and value_length win over it */
    if ((s = key_i32(m, "attention.key_length", false, 1, PAGED_HEAD_DIM_MAX, &hp->head_dim_k, err)))
        return s;
    if ((s = key_i32(m, "attention.value_length", false, 1, PAGED_HEAD_DIM_MAX, &hp->head_dim_v, err)))
        return s;
    if (hp->head_dim_k < 1 || hp->head_dim_k > PAGED_HEAD_DIM_MAX)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED,
                           "head_dim %d (embedding %d / %d heads) is outside 1 … %d", hp->head_dim_k,
                           hp->n_embd, hp->n_heads, PAGED_HEAD_DIM_MAX);
    return PAGED_OK;
}

static paged_status load_rope(paged_model *m, paged_error *err) {
    paged__hparams *hp = &m->hp;
    char key[96];
    paged_status s;
    hp->n_rot = hp->head_dim_k;
    if ((s = key_i32(m, "rope.dimension_count", false, 2, hp->head_dim_k, &hp->n_rot, err))) return s;
    if (hp->n_rot % 2)
        return paged__fail(err, PAGED_ERR_FORMAT, "%s is %d: an odd number cannot be rotated in pairs",
                           arch_key(m, key, "rope.dimension_count"), hp->n_rot);
    hp->rope_freq_base = 10000.0f;
    if ((s = paged__gguf_f32(m->file, arch_key(m, key, "rope.freq_base"), false, 1.0f, 1e12f,
                             &hp->rope_freq_base, err)))
        return s;

    const char *type = "";
    float factor = 1.0f;
    if ((s = paged__gguf_str(m->file, arch_key(m, key, "rope.scaling.type"), false, &type, err))) return s;
    if ((s = paged__gguf_f32(m->file, arch_key(m, key, "rope.scale_linear"), false, 1e-6f, 1e6f, &factor,
                             err)))
        return s;
    if (strcmp(type, "linear") == 0) {
        if ((s = paged__gguf_f32(m->file, arch_key(m, key, "rope.scaling.factor"), false, 1e-6f, 1e6f,
                                 &factor, err)))
            return s;
    } else if (*type && strcmp(type, "none") != 0) {
        return paged__fail(err, PAGED_ERR_UNSUPPORTED,
                           "RoPE scaling \"%.40s\" is not supported; none and linear are", type);
    }
    hp->rope_freq_scale = 1.0f / factor;

    const paged__gguf_tensor *t = paged__gguf_find(m->file, "rope_freqs.weight");
    if (!t) return PAGED_OK;
    if (t->type != GGML_TYPE_F32 || t->n_dims != 1 || t->ne[0] != hp->n_rot / 2)
        return paged__fail(err, PAGED_ERR_FORMAT, "rope_freqs.weight: %lld values of type %s, not %d of f32",
                           (long long)t->ne[0], ggml_type_name(t->type), hp->n_rot / 2);
    m->rope_factors = paged__alloc((size_t)t->ne[0], sizeof(float));
    if (!m->rope_factors)
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for %lld RoPE factors", (long long)t->ne[0]);
    memcpy(m->rope_factors, t->data, (size_t)t->ne[0] * sizeof(float));
    for (int64_t i = 0; i < t->ne[0]; i++)
        if (!(isfinite(m->rope_factors[i]) && m->rope_factors[i] > 0))
            return paged__fail(err, PAGED_ERR_FORMAT, "rope_freqs.weight[%lld] is %g", (long long)i,
                               (double)m->rope_factors[i]);
    return PAGED_OK;
}

static paged_status load_hparams(paged_model *m, paged_error *err) {
    paged__hparams *hp = &m->hp;
    char key[96];
    paged_status s;
    if ((s = key_i32(m, "block_count", true, 1, LAYERS_MAX, &hp->n_layers, err))) return s;
    if ((s = key_i32(m, "embedding_length", true, 1, EMBD_MAX, &hp->n_embd, err))) return s;
    if ((s = key_i32(m, "feed_forward_length", true, 1, EMBD_MAX * 8, &hp->n_ff, err))) return s;
    if ((s = key_i32(m, "context_length", true, 1, CTX_MAX, &hp->n_ctx_train, err))) return s;
    if ((s = load_heads(m, err))) return s;
    if ((s = load_rope(m, err))) return s;
    hp->norm_eps = 1e-5f;
    if ((s = paged__gguf_f32(m->file, arch_key(m, key, "attention.layer_norm_rms_epsilon"), true, 0.0f, 1.0f,
                             &hp->norm_eps, err)))
        return s;
    int32_t n_experts = 0;
    if ((s = key_i32(m, "expert_count", false, 0, 1 << 20, &n_experts, err))) return s;
    if (n_experts)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED,
                           "mixture of %d experts: not supported in architecture %s", n_experts,
                           m->arch->name);
    return PAGED_OK;
}

/* A tensor of the shape [ne0, ne1]; *out = NULL if it is absent and not required. */
static paged_status find_tensor(const paged_model *m, const char *name, bool required, int64_t ne0,
                                int64_t ne1, const paged__gguf_tensor **out, paged_error *err) {
    const paged__gguf_tensor *t = *out = paged__gguf_find(m->file, name);
    if (!t) return required ? paged__fail(err, PAGED_ERR_FORMAT, "tensor %s is missing", name) : PAGED_OK;
    if (t->ne[0] != ne0 || t->ne[1] != ne1 || t->ne[2] != 1 || t->ne[3] != 1)
        return paged__fail(err, PAGED_ERR_FORMAT,
                           "tensor %s: shape [%lld, %lld, %lld, %lld], not [%lld, %lld]", name,
                           (long long)t->ne[0], (long long)t->ne[1], (long long)t->ne[2], (long long)t->ne[3],
                           (long long)ne0, (long long)ne1);
    if ((uintptr_t)t->data % 32)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED,
                           "tensor %s: data is aligned to less than 32 bytes (general.alignment)", name);
    return PAGED_OK;
}

paged_status paged__model_matrix(paged_model *m, const char *name, bool required, int32_t n_rows,
                                 int32_t n_cols, const paged__weight **out, paged_error *err) {
    const paged__gguf_tensor *t;
    paged_status s = find_tensor(m, name, required, n_cols, n_rows, &t, err);
    *out = NULL;
    if (s || !t) return s;
    const struct ggml_type_traits_cpu *traits = ggml_get_type_traits_cpu(t->type);
    if (!traits->vec_dot || (traits->vec_dot_type != GGML_TYPE_F32 &&
                             !ggml_get_type_traits_cpu(traits->vec_dot_type)->from_float))
        return paged__fail(err, PAGED_ERR_UNSUPPORTED, "tensor %s: type %s is not supported for a matrix",
                           name, ggml_type_name(t->type));
    PAGED_ASSERT(m->n_weights < paged__gguf_n_tensors(m->file));
    paged__weight *w = &m->weights[m->n_weights++];
    *w = (paged__weight){.name = t->name,
                         .type = t->type,
                         .n_rows = n_rows,
                         .n_cols = n_cols,
                         .rows = t->data,
                         .row_bytes = ggml_row_size(t->type, n_cols)};
    *out = w;
    return PAGED_OK;
}

paged_status paged__model_vector(const paged_model *m, const char *name, int32_t n, const float **out,
                                 paged_error *err) {
    const paged__gguf_tensor *t;
    paged_status s = find_tensor(m, name, true, n, 1, &t, err);
    if (s) return s;
    if (t->type != GGML_TYPE_F32)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED,
                           "tensor %s: type %s is not supported for a vector (f32 is)", name,
                           ggml_type_name(t->type));
    *out = t->data;
    return PAGED_OK;
}

static paged_status load_weights(paged_model *m, paged_error *err) {
    const paged__hparams *hp = &m->hp;
    const int32_t n = paged__gguf_n_tensors(m->file);
    m->layers = paged__calloc((size_t)hp->n_layers, sizeof *m->layers);
    /* A file asks for each of its tensors at most once, so this never grows and pointers into it stay. */
    m->weights = paged__calloc((size_t)n, sizeof *m->weights);
    if (!m->layers || !m->weights)
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for the headers of %d tensors", n);
    paged_status s =
        paged__model_matrix(m, "token_embd.weight", true, hp->n_vocab, hp->n_embd, &m->tok_embd, err);
    if (!s) s = paged__model_vector(m, "output_norm.weight", hp->n_embd, &m->output_norm, err);
    if (!s) s = paged__model_matrix(m, "output.weight", false, hp->n_vocab, hp->n_embd, &m->output, err);
    if (!s && !m->output) m->output = m->tok_embd;
    return s ? s : m->arch->load(m, err);
}

static paged_status load(paged_model *m, const char *path, const paged_model_config *config,
                         paged_error *err) {
    const char *arch_name = NULL;
    paged_status s = paged__gguf_open(path, &m->file, err);
    if (s) return s;
    if ((s = paged__gguf_str(m->file, "general.architecture", true, &arch_name, err))) return s;
    m->name = "";
    if ((s = paged__gguf_str(m->file, "general.name", false, &m->name, err))) return s;
    if ((s = paged__gguf_str(m->file, "tokenizer.chat_template", false, &m->chat_template, err))) return s;
    m->arch = find_arch(arch_name);
    if (!m->arch)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED, "architecture \"%.60s\" is not supported; llama is",
                           arch_name);
    if ((s = load_hparams(m, err))) return s;
    if ((s = paged__tokenizer_create(m->file, &m->tok, err))) return s;
    m->hp.n_vocab = paged_token_count(m->tok);
    if (m->chat_template && (s = paged__chat_create(m->chat_template, m->tok, &m->chat, err))) return s;
    if (config->vocab_only) {
        m->vocab_only = true;
        return PAGED_OK;
    }
    if ((s = load_weights(m, err))) return s;
    ggml_cpu_init(); /* the tables behind its conversions */
    return paged__model_pack(m, config->progress, config->progress_user, err);
}

paged_status paged_model_load(const char *path, const paged_model_config *config, paged_model **out,
                              paged_error *err) {
    if (!path || !out) return paged__fail(err, PAGED_ERR_INVALID_ARG, "%s is NULL", path ? "out" : "path");
    paged_model_config c = {0};
    if (config) {
        if (config->struct_size < sizeof config->struct_size || config->struct_size > sizeof c)
            return paged__fail(err, PAGED_ERR_INVALID_ARG, "struct_size is %zu, this library knows up to %zu",
                               config->struct_size, sizeof c);
        memcpy(&c, config, config->struct_size);
    }
    const uint64_t start = paged__now_ns();
    paged_model *m = paged__calloc(1, sizeof *m);
    if (!m) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a model");
    paged_error why = {0};
    paged_status s = load(m, path, &c, &why);
    if (s) {
        paged_model_free(m);
        /* The file's own messages begin with its path already. */
        const bool named = strncmp(why.message, path, strlen(path)) == 0;
        return paged__fail(err, s, "%s%s%s", named ? "" : path, named ? "" : ": ", why.message);
    }
    m->load_ms = (double)(paged__now_ns() - start) / 1e6;
    *out = m;
    return PAGED_OK;
}

void paged_model_free(paged_model *m) {
    if (!m) return;
    paged__free(m->packed);
    paged__free(m->weights);
    paged__free(m->layers);
    paged__free(m->rope_factors);
    paged__chat_free(m->chat);
    paged__tokenizer_free(m->tok);
    paged__gguf_close(m->file);
    paged__free(m);
}

const paged_tokenizer *paged_model_tokenizer(const paged_model *m) {
    return m->tok;
}

paged_status paged_chat_render(const paged_model *m, const paged_chat *chat, paged_prompt *out,
                               paged_error *err) {
    return paged__chat_render(m->chat, chat, out, err);
}

paged_status paged_chat_tokenize(const paged_model *m, const paged_message *messages, int32_t n_messages,
                                 bool add_generation_prompt, int32_t *tokens, int32_t capacity,
                                 int32_t *n_tokens, char *text, size_t text_capacity, paged_error *err) {
    const paged_chat chat = {.struct_size = sizeof chat,
                             .messages = messages,
                             .n_messages = n_messages,
                             .add_generation_prompt = add_generation_prompt};
    return paged__chat_tokenize(m->chat, &chat, tokens, capacity, n_tokens, text, text_capacity, err);
}

static void count_weight(paged_model_info *info, const paged__gguf_tensor *t) {
    const char *name = ggml_type_name(t->type);
    int32_t i = 0;
    while (i < info->n_weight_types && strcmp(info->weight_types[i].name, name) != 0) i++;
    if (i == PAGED_WEIGHT_TYPES_MAX) return;
    if (i == info->n_weight_types) info->weight_types[info->n_weight_types++].name = name;
    info->weight_types[i].n_tensors++;
    info->weight_types[i].bytes += t->size_bytes;
}

void paged_model_get_info(const paged_model *m, paged_model_info *info) {
    const paged__hparams *hp = &m->hp;
    *info = (paged_model_info){
        .arch = m->arch->name,
        .name = m->name,
        .chat_template = m->chat_template,
        .tokenizer = paged__tokenizer_kind(m->tok),
        .pre = paged__tokenizer_pre(m->tok),
        .n_layers = hp->n_layers,
        .n_embd = hp->n_embd,
        .n_ff = hp->n_ff,
        .n_heads = hp->n_heads,
        .n_kv_heads = hp->n_kv_heads,
        .head_dim_k = hp->head_dim_k,
        .head_dim_v = hp->head_dim_v,
        .n_vocab = hp->n_vocab,
        .n_ctx_train = hp->n_ctx_train,
        .n_tensors = paged__gguf_n_tensors(m->file),
        .file_bytes = paged__gguf_file_bytes(m->file),
        .weight_bytes = paged__gguf_data_bytes(m->file),
        .packed_bytes = m->packed_bytes,
        .linear_kernels = m->linear_kernels,
        .load_ms = m->load_ms,
        .rope_freq_base = hp->rope_freq_base,
        .tied_output = !paged__gguf_find(m->file, "output.weight"),
    };
    for (int32_t i = 0; i < info->n_tensors; i++) {
        const paged__gguf_tensor *t = paged__gguf_tensor_at(m->file, i);
        info->n_params += t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3];
        count_weight(info, t);
    }
}
