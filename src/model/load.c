/* model/load.c: see load.h, and paged__model_tensors() in model.h. */
#include "model/load.h"

#include <ggml-cpu.h>
#include <stdio.h>

enum { NAME_BYTES = 96 };

__attribute__((format(printf, 3, 4))) static void fail(paged__loader *from, paged_status status,
                                                       const char *fmt, ...) {
    char text[300];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    from->status = paged__fail(from->err, status, "%s", text);
}

/* "attn_q" + ".weight" -> "blk.3.attn_q.weight" */
static const char *full_name(const paged__loader *from, const char *name, const char *suffix,
                             char buf[NAME_BYTES]) {
    if (from->layer < 0)
        snprintf(buf, NAME_BYTES, "%s%s", name, suffix);
    else
        snprintf(buf, NAME_BYTES, "blk.%d.%s%s", from->layer, name, suffix);
    return buf;
}

bool paged__load_has(const paged__loader *from, const char *name) {
    char buf[NAME_BYTES];
    return paged__gguf_find(from->m->file, full_name(from, name, ".weight", buf)) != NULL;
}

/* A tensor of the shape [ne0, ne1]; NULL: it is absent, which is an error if `required`, or an error. */
static const paged__gguf_tensor *find(paged__loader *from, const char *name, bool required, int64_t ne0,
                                      int64_t ne1) {
    if (from->status) return NULL;
    const paged__gguf_tensor *t = paged__gguf_find(from->m->file, name);
    if (!t) {
        if (required) fail(from, PAGED_ERR_FORMAT, "tensor %s is missing", name);
        return NULL;
    }
    if (t->ne[0] != ne0 || t->ne[1] != ne1 || t->ne[2] != 1 || t->ne[3] != 1) {
        fail(from, PAGED_ERR_FORMAT, "tensor %s: shape [%lld, %lld, %lld, %lld], not [%lld, %lld]", name,
             (long long)t->ne[0], (long long)t->ne[1], (long long)t->ne[2], (long long)t->ne[3],
             (long long)ne0, (long long)ne1);
        return NULL;
    }
    if ((uintptr_t)t->data % 32) {
        fail(from, PAGED_ERR_UNSUPPORTED,
             "tensor %s: data is aligned to less than 32 bytes (general.alignment)", name);
        return NULL;
    }
    PAGED_ASSERT(from->n_used < paged__gguf_n_tensors(from->m->file));
    from->used[from->n_used++] = t;
    return t;
}

static const float *find_vector(paged__loader *from, const char *name, bool required, int32_t n) {
    const paged__gguf_tensor *t = find(from, name, required, n, 1);
    if (!t || t->type == GGML_TYPE_F32) return t ? t->data : NULL;
    fail(from, PAGED_ERR_UNSUPPORTED, "tensor %s: type %s is not supported for a vector (f32 is)", name,
         ggml_type_name(t->type));
    return NULL;
}

void paged__load_vector(paged__loader *from, const char *name, int32_t n, const float **out) {
    char buf[NAME_BYTES];
    *out = find_vector(from, full_name(from, name, ".weight", buf), true, n);
}

void paged__load_norm(paged__loader *from, const char *name, paged__norm *out) {
    char buf[NAME_BYTES];
    const int32_t n = from->m->hp.n_embd;
    out->weight = find_vector(from, full_name(from, name, ".weight", buf), true, n);
    if (from->m->arch->norm == PAGED__NORM_LAYER)
        out->bias = find_vector(from, full_name(from, name, ".bias", buf), true, n);
}

/* ---- matrices ---- */

/* Rows [first, first + n_rows) of a tensor as a matrix. */
static const paged__weight *add_weight(paged__loader *from, const paged__gguf_tensor *t, int32_t first,
                                       int32_t n_rows) {
    paged_model *m = from->m;
    if (!t) return NULL;
    const struct ggml_type_traits_cpu *traits = ggml_get_type_traits_cpu(t->type);
    if (!traits->vec_dot || (traits->vec_dot_type != GGML_TYPE_F32 &&
                             !ggml_get_type_traits_cpu(traits->vec_dot_type)->from_float)) {
        fail(from, PAGED_ERR_UNSUPPORTED, "tensor %s: type %s is not supported for a matrix", t->name,
             ggml_type_name(t->type));
        return NULL;
    }
    paged__weight *w = &m->weights[m->n_weights++];
    *w = (paged__weight){.name = t->name,
                         .type = t->type,
                         .n_rows = n_rows,
                         .n_cols = (int32_t)t->ne[0],
                         .row_bytes = ggml_row_size(t->type, t->ne[0])};
    w->rows = (const uint8_t *)t->data + (size_t)first * w->row_bytes;
    return w;
}

static const paged__weight *find_matrix(paged__loader *from, const char *name, bool required, int32_t n_rows,
                                        int32_t n_cols) {
    return add_weight(from, find(from, name, required, n_cols, n_rows), 0, n_rows);
}

void paged__load_affine(paged__loader *from, const char *name, int32_t n_rows, int32_t n_cols,
                        paged__affine *out) {
    char buf[NAME_BYTES];
    out->w = find_matrix(from, full_name(from, name, ".weight", buf), true, n_rows, n_cols);
    out->bias = find_vector(from, full_name(from, name, ".bias", buf), false, n_rows);
}

void paged__load_attention(paged__loader *from, paged__layer *l) {
    const paged__hparams *hp = &from->m->hp;
    const int32_t q_dim = hp->n_heads * hp->head_dim_k, k_dim = hp->n_kv_heads * hp->head_dim_k,
                  v_dim = hp->n_kv_heads * hp->head_dim_v;
    if (paged__load_has(from, "attn_qkv")) {
        l->n_qkv = 1;
        paged__load_affine(from, "attn_qkv", q_dim + k_dim + v_dim, hp->n_embd, &l->qkv[0]);
    } else {
        l->n_qkv = 3;
        paged__load_affine(from, "attn_q", q_dim, hp->n_embd, &l->qkv[0]);
        paged__load_affine(from, "attn_k", k_dim, hp->n_embd, &l->qkv[1]);
        paged__load_affine(from, "attn_v", v_dim, hp->n_embd, &l->qkv[2]);
    }
    paged__load_affine(from, "attn_output", hp->n_embd, hp->n_heads * hp->head_dim_v, &l->wo);
}

void paged__load_head_norms(paged__loader *from, paged__layer *l) {
    paged__load_vector(from, "attn_q_norm", from->m->hp.head_dim_k, &l->q_norm);
    paged__load_vector(from, "attn_k_norm", from->m->hp.head_dim_k, &l->k_norm);
}

void paged__load_gated_ffn(paged__loader *from, paged__layer *l) {
    const int32_t n_embd = from->m->hp.n_embd, n_ff = from->m->hp.n_ff;
    char buf[NAME_BYTES];
    if (paged__load_has(from, "ffn_gate")) {
        paged__load_affine(from, "ffn_gate", n_ff, n_embd, &l->gate);
        paged__load_affine(from, "ffn_up", n_ff, n_embd, &l->up);
    } else {
        const paged__gguf_tensor *both =
            find(from, full_name(from, "ffn_up", ".weight", buf), true, n_embd, 2 * (int64_t)n_ff);
        l->gate.w = add_weight(from, both, 0, n_ff);
        l->up.w = add_weight(from, both, n_ff, n_ff);
    }
    paged__load_affine(from, "ffn_down", n_embd, n_ff, &l->down);
}

void paged__load_plain_ffn(paged__loader *from, paged__layer *l) {
    const int32_t n_embd = from->m->hp.n_embd, n_ff = from->m->hp.n_ff;
    paged__load_affine(from, "ffn_up", n_ff, n_embd, &l->up);
    paged__load_affine(from, "ffn_down", n_embd, n_ff, &l->down);
}

/* ---- all of them ---- */

/* Tensors of RoPE were read with the numbers (hparams.c); some old files have its angles, which are computed
 * here. */
static bool is_of_rope(const char *name) {
    return strncmp(name, "rope_", 5) == 0 || strstr(name, ".attn_rot_embd.");
}

static void refuse_unused(paged__loader *from) {
    const paged__gguf *g = from->m->file;
    for (int32_t i = 0; i < paged__gguf_n_tensors(g) && !from->status; i++) {
        const paged__gguf_tensor *t = paged__gguf_tensor_at(g, i);
        int32_t k = 0;
        while (k < from->n_used && from->used[k] != t) k++;
        if (k == from->n_used && !is_of_rope(t->name))
            fail(from, PAGED_ERR_UNSUPPORTED, "tensor %s: architecture %s has none of this name here",
                 t->name, from->m->arch->name);
    }
}

static void load_all(paged__loader *from) {
    paged_model *m = from->m;
    const paged__hparams *hp = &m->hp;
    from->layer = -1;
    m->tok_embd = find_matrix(from, "token_embd.weight", true, hp->n_vocab, hp->n_embd);
    if (m->arch->has_positions)
        m->pos_embd = find_matrix(from, "position_embd.weight", true, hp->n_ctx_train, hp->n_embd);
    paged__load_norm(from, "output_norm", &m->output_norm);
    m->output.w = find_matrix(from, "output.weight", false, hp->n_vocab, hp->n_embd);
    if (!m->output.w) m->output.w = m->tok_embd;
    m->output.bias = find_vector(from, "output.bias", false, hp->n_vocab);
    for (int32_t i = 0; i < hp->n_layers && !from->status; i++) {
        from->layer = i;
        m->arch->load_layer(from, &m->layers[i]);
    }
    refuse_unused(from);
}

paged_status paged__model_tensors(paged_model *m, paged_error *err) {
    const size_t n = (size_t)paged__gguf_n_tensors(m->file);
    paged__loader from = {.m = m, .err = err};
    /* A tensor is at most two matrices, so this never grows and pointers into it stay. */
    m->weights = paged__calloc(2 * n, sizeof *m->weights);
    from.used = paged__alloc(n, sizeof *from.used);
    if (m->weights && from.used)
        load_all(&from);
    else
        fail(&from, PAGED_ERR_NO_MEMORY, "no memory for the headers of %zu tensors", n);
    paged__free(from.used);
    return from.status;
}
