/* model/fused.c: see fused.h. Sources of every node of ours: src[0] the activations, then the matrices, then
 * a residual.
 *
 * Work is divided by output rows; each thread computes its rows for all (at most PAGED_FUSED_MAX_ROWS)
 * tokens, so that a weight row is read once. Bytes: the weights, once; activations stay in L1.
 */
#include "model/fused.h"

#include <ggml-cpu.h>

static size_t max_of(size_t a, size_t b) {
    return a > b ? a : b;
}

size_t paged__fused_scratch_bytes(const paged_model *m) {
    const size_t widest = max_of(
        (size_t)m->hp.n_ff, max_of((size_t)m->hp.n_embd, (size_t)m->hp.n_heads * (size_t)m->hp.head_dim_v));
    return widest * sizeof(float) * PAGED_FUSED_MAX_ROWS + 4096; /* no dot-product type is wider than f32 */
}

/* Rows of x as the dot product of w wants them: quantised into this thread's scratch, or x itself for f32. */
static const uint8_t *activations(const struct ggml_tensor *w, const struct ggml_tensor *x, uint8_t *scratch,
                                  size_t *row_bytes) {
    const struct ggml_type_traits_cpu *traits = ggml_get_type_traits_cpu(w->type);
    if (traits->vec_dot_type == GGML_TYPE_F32) {
        *row_bytes = x->nb[1];
        return x->data;
    }
    *row_bytes = ggml_row_size(traits->vec_dot_type, x->ne[0]);
    ggml_from_float_t convert = ggml_get_type_traits_cpu(traits->vec_dot_type)->from_float;
    for (int64_t t = 0; t < x->ne[1]; t++)
        convert((const float *)(const void *)((const uint8_t *)x->data + (size_t)t * x->nb[1]),
                scratch + (size_t)t * *row_bytes, x->ne[0]);
    return scratch;
}

/* dst[first_out + r][t] = w row r · x row t (+ residual) for the rows [begin, end) of w. */
static void dot_rows(struct ggml_tensor *dst, int64_t first_out, const struct ggml_tensor *w,
                     const uint8_t *x, size_t x_row_bytes, int64_t k, int64_t begin, int64_t end,
                     const struct ggml_tensor *residual) {
    const ggml_vec_dot_t dot = ggml_get_type_traits_cpu(w->type)->vec_dot;
    for (int64_t r = begin; r < end; r++) {
        const uint8_t *row = (const uint8_t *)w->data + (size_t)r * w->nb[1];
        for (int64_t t = 0; t < dst->ne[1]; t++) {
            float sum;
            dot((int)k, &sum, 0, row, 0, x + (size_t)t * x_row_bytes, 0, 1);
            if (residual)
                sum += ((const float *)(const void *)((const uint8_t *)residual->data +
                                                      (size_t)t * residual->nb[1]))[r];
            ((float *)(void *)((uint8_t *)dst->data + (size_t)t * dst->nb[1]))[first_out + r] = sum;
        }
    }
}

/* The matrices src[1] … src[n_mats] one below the other; the last source may be a residual of the same shape
 * as dst. */
static void run(struct ggml_tensor *dst, int n_mats, const struct ggml_tensor *residual, int ith, int nth,
                paged__runner *r) {
    const struct ggml_tensor *x = dst->src[0];
    uint8_t *scratch = paged__runner_scratch(r, ith);
    const int64_t begin = dst->ne[0] * ith / nth, end = dst->ne[0] * (ith + 1) / nth;
    enum ggml_type have = GGML_TYPE_COUNT; /* of which dot-product type the scratch is */
    const uint8_t *rows = NULL;
    size_t row_bytes = 0;
    int64_t first = 0;
    for (int i = 1; i <= n_mats; i++) {
        const struct ggml_tensor *w = dst->src[i];
        const int64_t lo = PAGED_MAX(begin, first), hi = PAGED_MIN(end, first + w->ne[1]);
        if (lo < hi) {
            const enum ggml_type want = ggml_get_type_traits_cpu(w->type)->vec_dot_type;
            if (want != have) rows = activations(w, x, scratch, &row_bytes);
            have = want;
            dot_rows(dst, first, w, rows, row_bytes, x->ne[0], lo - first, hi - first, residual);
        }
        first += w->ne[1];
    }
}

static void op_linear(struct ggml_tensor *dst, int ith, int nth, void *user) {
    run(dst, 1, NULL, ith, nth, user);
}
static void op_linear_add(struct ggml_tensor *dst, int ith, int nth, void *user) {
    run(dst, 1, dst->src[2], ith, nth, user);
}
static void op_linear2(struct ggml_tensor *dst, int ith, int nth, void *user) {
    run(dst, 2, NULL, ith, nth, user);
}
static void op_linear3(struct ggml_tensor *dst, int ith, int nth, void *user) {
    run(dst, 3, NULL, ith, nth, user);
}

static bool few(const struct ggml_tensor *x) {
    return x->ne[1] <= PAGED_FUSED_MAX_ROWS;
}

static struct ggml_tensor *node(paged__graph *g, int64_t rows, struct ggml_tensor **src, int n_src,
                                ggml_custom_op_t op) {
    return ggml_custom_4d(g->ctx, GGML_TYPE_F32, rows, src[0]->ne[1], 1, 1, src, n_src, op, GGML_N_TASKS_MAX,
                          g->runner);
}

struct ggml_tensor *paged__linear(paged__graph *g, struct ggml_tensor *w, struct ggml_tensor *x) {
    struct ggml_tensor *src[] = {x, w};
    return few(x) ? node(g, w->ne[1], src, 2, op_linear) : ggml_mul_mat(g->ctx, w, x);
}

struct ggml_tensor *paged__linear_add(paged__graph *g, struct ggml_tensor *w, struct ggml_tensor *x,
                                      struct ggml_tensor *residual) {
    struct ggml_tensor *src[] = {x, w, residual};
    return few(x) ? node(g, w->ne[1], src, 3, op_linear_add)
                  : ggml_add(g->ctx, ggml_mul_mat(g->ctx, w, x), residual);
}

/* Columns [first, first + rows) of every token of y. */
static struct ggml_tensor *part(paged__graph *g, struct ggml_tensor *y, int64_t first, int64_t rows) {
    return ggml_view_2d(g->ctx, y, rows, y->ne[1], y->nb[1], (size_t)first * sizeof(float));
}

void paged__linear_qkv(paged__graph *g, const paged__layer *l, struct ggml_tensor *x, struct ggml_tensor **q,
                       struct ggml_tensor **k, struct ggml_tensor **v) {
    const int64_t nq = l->wq->ne[1], nk = l->wk->ne[1], nv = l->wv->ne[1];
    if (!few(x)) {
        *q = ggml_mul_mat(g->ctx, l->wq, x);
        *k = ggml_mul_mat(g->ctx, l->wk, x);
        *v = ggml_mul_mat(g->ctx, l->wv, x);
        return;
    }
    struct ggml_tensor *src[] = {x, l->wq, l->wk, l->wv};
    struct ggml_tensor *y = node(g, nq + nk + nv, src, 4, op_linear3);
    *q = part(g, y, 0, nq);
    *k = part(g, y, nq, nk);
    *v = part(g, y, nq + nk, nv);
}

struct ggml_tensor *paged__linear_swiglu(paged__graph *g, const paged__layer *l, struct ggml_tensor *x) {
    const int64_t n_ff = l->ffn_gate->ne[1];
    if (!few(x))
        return ggml_swiglu_split(g->ctx, ggml_mul_mat(g->ctx, l->ffn_gate, x),
                                 ggml_mul_mat(g->ctx, l->ffn_up, x));
    struct ggml_tensor *src[] = {x, l->ffn_gate, l->ffn_up};
    struct ggml_tensor *y = node(g, 2 * n_ff, src, 3, op_linear2);
    return ggml_swiglu_split(g->ctx, part(g, y, 0, n_ff), part(g, y, n_ff, n_ff));
}
