/* model/weight.h: a matrix of a model file, and products with it: y = W x for the rows of a step.
 *
 * Two ways, chosen once at load by type and shape: *packed*, our kernels (ops/linear.h) on a copy in their
 * own layout; else *rows*, ggml's dot product of the type, row by row on the mapped file. Either way an
 * output element is one fixed computation on its row of W and its row of x, so its bits do not depend on
 * how many rows x has, on the threads, or on the cut.
 *
 * A product takes its input in the form that its matrices want (*form*): quantised, bf16 or f32 as our
 * kernels have it, or a type of ggml. Matrices of one product share an input, so they must want the same
 * form.
 *
 * May include base/, ops, ggml. Thread rule: a weight does not change after load; pure functions.
 */
#ifndef PAGED_MODEL_WEIGHT_H
#define PAGED_MODEL_WEIGHT_H

#include <ggml.h>

#include "ops/linear.h"

typedef struct paged__weight {
    const char *name; /* of the tensor */
    enum ggml_type type;
    int32_t n_rows, n_cols; /* outputs, inputs */
    const uint8_t *rows;    /* [n_rows][row_bytes] in the mapped file */
    size_t row_bytes;
    bool is_packed;
    bool as_bf16;         /* packed, and multiplied as bf16 (PAGED__ACT_BF16) */
    paged__matrix matrix; /* if packed */
} paged__weight;

enum { PAGED__FORM_BF16 = -3, PAGED__FORM_QUANTISED = -2, PAGED__FORM_F32 = -1 };
typedef int32_t paged__form; /* one of these, or ≥ 0: ggml's type */

paged__form paged__weight_form(const paged__weight *w);

/* Whether our kernels take this type and shape; then *type is their name for it. */
bool paged__weight_can_pack(const paged__weight *w, paged__weight_type *type);

/* Row `row` as f32 [n_cols], from the file. */
void paged__weight_row(const paged__weight *w, int32_t row, float *out);

/* The input of a product: [n_rows, n_cols] in a form; `data` is the caller's, paged__input_bytes() of it. */
typedef struct paged__input {
    paged__form form;
    int32_t n_rows, n_cols;
    paged__act act;   /* of our forms */
    size_t row_bytes; /* of ggml's types: rows at `data` */
    uint8_t *data;
} paged__input;

size_t paged__input_bytes(paged__form form, int32_t n_rows, int32_t n_cols);
void paged__input_init(paged__input *in, paged__form form, int32_t n_rows, int32_t n_cols, uint8_t *data);
/* Row `row` from x [n_cols]; with norm [n_cols] it is RMS-normalised first (Zhang & Sennrich 2019): x /
 * sqrt(mean(x^2) + eps) * norm, the sum in a fixed order. */
void paged__input_set(const paged__input *in, int32_t row, const float *x, const float *norm, float eps);

/* Up to four matrices with one input, outputs side by side; or gate and up of a gated unit. */
typedef struct paged__product {
    const paged__weight *w[4]; /* [n_w] all of one form */
    const float *bias[4];      /* each [w->n_rows] or NULL */
    int32_t n_w;
    const paged__input *x;
    float *y;                 /* [x->n_rows, sum of n_rows], gated [x->n_rows, n_rows] */
    int64_t y_stride;         /* elements from one row to the next */
    const paged__input *next; /* gated, instead of y: the input of the product that follows */
    paged__epilogue epilogue;
    const float *residual; /* PAGED__ADD */
    int64_t residual_stride;
    float *room; /* as in paged__linear_job */
} paged__product;

/* Whether what a gated unit of gate and up makes can go as the next input to `down` at once, without y. */
bool paged__weight_chains(const paged__weight *gate, const paged__weight *up, const paged__weight *down);

/* The part of thread ith of nth. Cannot fail. */
void paged__product_run(const paged__product *p, int32_t ith, int32_t nth);

/* What the gated epilogues do to gate and up: PAGED__SWIGLU or PAGED__GEGLU. */
float paged__gate(paged__epilogue epilogue, float gate, float up);

#endif
