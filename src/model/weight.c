/* model/weight.c: see weight.h. Packed products go to ops; here is the other way, ggml's dot products.
 *
 * That way is for types that are rare enough to have no kernel of ours. Work is cut by output rows; each
 * thread computes its rows for all of x, so that a row of W is read from memory once.
 */
#include "model/weight.h"

#include <ggml-cpu.h>
#include <math.h>

/* ---- types ---- */

bool paged__weight_can_pack(const paged__weight *w, paged__weight_type *type) {
    static const struct {
        enum ggml_type theirs;
        paged__weight_type ours;
    } map[] = {
        {GGML_TYPE_F32, PAGED__W_F32},   {GGML_TYPE_F16, PAGED__W_F16},      {GGML_TYPE_BF16, PAGED__W_BF16},
        {GGML_TYPE_Q4_0, PAGED__W_Q4_0}, {GGML_TYPE_Q4_1, PAGED__W_Q4_1},    {GGML_TYPE_Q5_0, PAGED__W_Q5_0},
        {GGML_TYPE_Q8_0, PAGED__W_Q8_0}, {GGML_TYPE_Q4_K, PAGED__W_Q4_K},    {GGML_TYPE_Q5_K, PAGED__W_Q5_K},
        {GGML_TYPE_Q6_K, PAGED__W_Q6_K}, {GGML_TYPE_IQ4_NL, PAGED__W_IQ4_NL}};
    for (size_t i = 0; i < sizeof map / sizeof map[0]; i++) {
        if (map[i].theirs != w->type) continue;
        *type = map[i].ours;
        return paged__linear_supports(map[i].ours, w->n_rows, w->n_cols);
    }
    return false;
}

paged__form paged__weight_form(const paged__weight *w) {
    if (w->is_packed && w->as_bf16) return PAGED__FORM_BF16;
    if (w->is_packed) return paged__wants_quantised(w->matrix.type) ? PAGED__FORM_QUANTISED : PAGED__FORM_F32;
    return (paged__form)ggml_get_type_traits_cpu(w->type)->vec_dot_type;
}

void paged__weight_row(const paged__weight *w, int32_t row, float *out) {
    const uint8_t *from = w->rows + (size_t)row * w->row_bytes;
    if (w->type == GGML_TYPE_F32)
        memcpy(out, from, (size_t)w->n_cols * sizeof *out);
    else
        ggml_get_type_traits(w->type)->to_float(from, out, w->n_cols);
}

/* ---- inputs ---- */

static bool is_ours(paged__form form) {
    return form < 0;
}

static paged__act_kind kind_of(paged__form form) {
    return form == PAGED__FORM_BF16        ? PAGED__ACT_BF16
           : form == PAGED__FORM_QUANTISED ? PAGED__ACT_I8
                                           : PAGED__ACT_F32;
}

size_t paged__input_bytes(paged__form form, int32_t n_rows, int32_t n_cols) {
    if (is_ours(form)) return paged__act_bytes(kind_of(form), n_rows, n_cols);
    return (size_t)n_rows * ggml_row_size((enum ggml_type)form, n_cols);
}

void paged__input_init(paged__input *in, paged__form form, int32_t n_rows, int32_t n_cols, uint8_t *data) {
    *in = (paged__input){.form = form, .n_rows = n_rows, .n_cols = n_cols, .data = data};
    if (is_ours(form))
        in->act = paged__act_make(kind_of(form), n_rows, n_cols, data);
    else
        in->row_bytes = ggml_row_size((enum ggml_type)form, n_cols);
}

/* The factor that makes the mean square of x one; the sum is one chain in double. */
static float rms_scale(const float *x, int32_t n, float eps) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
    return (float)(1.0 / sqrt(sum / n + (double)eps));
}

void paged__input_set(const paged__input *in, int32_t row, const float *x, const float *norm, float eps) {
    enum { PIECE = 256 }; /* a whole number of blocks of every type */
    if (is_ours(in->form)) {
        paged__act_set(&in->act, row, x, norm, eps);
        return;
    }
    const enum ggml_type type = (enum ggml_type)in->form;
    const ggml_from_float_t convert = ggml_get_type_traits_cpu(type)->from_float;
    const float scale = norm ? rms_scale(x, in->n_cols, eps) : 1.0f;
    uint8_t *to = in->data + (size_t)row * in->row_bytes;
    float piece[PIECE];
    for (int32_t at = 0; at < in->n_cols; at += PIECE) {
        const int32_t n = PAGED_MIN(in->n_cols - at, (int32_t)PIECE);
        for (int32_t i = 0; i < n; i++) piece[i] = norm ? x[at + i] * scale * norm[at + i] : x[at + i];
        if (type == GGML_TYPE_F32)
            memcpy(to, piece, (size_t)n * sizeof *piece);
        else
            convert(piece, to, n);
        to += ggml_row_size(type, n);
    }
}

/* ---- products by ggml's dot product ---- */

float paged__gate(paged__epilogue epilogue, float gate, float up) {
    if (epilogue == PAGED__SWIGLU) return gate / (1.0f + expf(-gate)) * up;
    const float inner = 0.79788456f * gate * (1.0f + 0.044715f * gate * gate); /* sqrt(2 / pi) */
    return 0.5f * gate * (1.0f + tanhf(inner)) * up;
}

static float dot(const paged__weight *w, int32_t row, const paged__input *x, int32_t x_row) {
    float sum;
    ggml_get_type_traits_cpu(w->type)->vec_dot(w->n_cols, &sum, 0, w->rows + (size_t)row * w->row_bytes, 0,
                                               x->data + (size_t)x_row * x->row_bytes, 0, 1);
    return sum;
}

static float output(const paged__product *p, int32_t i, int32_t row, int32_t x_row) {
    return dot(p->w[i], row, p->x, x_row) + (p->bias[i] ? p->bias[i][row] : 0.0f);
}

/* Rows [begin, end) of matrix i, whose outputs begin at column `first`. */
static void run_rows(const paged__product *p, int32_t i, int32_t first, int32_t begin, int32_t end) {
    const bool gated = p->epilogue == PAGED__SWIGLU || p->epilogue == PAGED__GEGLU;
    for (int32_t r = begin; r < end; r++) {
        for (int32_t t = 0; t < p->x->n_rows; t++) {
            float sum = output(p, i, r, t);
            if (gated) sum = paged__gate(p->epilogue, sum, output(p, 1, r, t));
            if (p->epilogue == PAGED__ADD) sum += p->residual[t * p->residual_stride + r];
            p->y[t * p->y_stride + first + r] = sum;
        }
    }
}

static void run_by_rows(const paged__product *p, int32_t ith, int32_t nth) {
    const int32_t n_w = p->epilogue == PAGED__SWIGLU || p->epilogue == PAGED__GEGLU ? 1 : p->n_w;
    int64_t n_rows = 0;
    for (int32_t i = 0; i < n_w; i++) n_rows += p->w[i]->n_rows;
    const int64_t begin = n_rows * ith / nth, end = n_rows * (ith + 1) / nth;
    int64_t first = 0; /* output of row 0 of matrix i */
    for (int32_t i = 0; i < n_w; first += p->w[i]->n_rows, i++) {
        const int64_t lo = PAGED_MAX(begin - first, 0), hi = PAGED_MIN(end - first, (int64_t)p->w[i]->n_rows);
        if (lo < hi) run_rows(p, i, (int32_t)first, (int32_t)lo, (int32_t)hi);
    }
}

bool paged__weight_chains(const paged__weight *gate, const paged__weight *up, const paged__weight *down) {
    const paged__form form = paged__weight_form(gate);
    return (form == PAGED__FORM_QUANTISED || form == PAGED__FORM_BF16) && paged__weight_form(up) == form &&
           paged__weight_form(down) == form && paged__linear_into_act(&gate->matrix);
}

void paged__product_run(const paged__product *p, int32_t ith, int32_t nth) {
    if (!is_ours(p->x->form)) {
        run_by_rows(p, ith, nth);
        return;
    }
    paged__linear_job job = {.n_w = p->n_w,
                             .x = &p->x->act,
                             .y = p->y,
                             .y_stride = p->y_stride,
                             .act = p->next ? &p->next->act : NULL,
                             .epilogue = p->epilogue,
                             .residual = p->residual,
                             .residual_stride = p->residual_stride,
                             .room = p->room};
    for (int32_t i = 0; i < p->n_w; i++) {
        job.w[i] = &p->w[i]->matrix;
        job.bias[i] = p->bias[i];
    }
    paged__linear_run(&job, ith, nth);
}
