/* model/selftest.c: do products give a row the same bits alone and among others, on one thread and on
 * several? Our kernels and our use of ggml's promise it; an instruction set, a compiler or a ggml that
 * nobody has tried yet could break it, and then answers depend on the batch. So it is asked at start, for
 * each type of matrix in the model, on rows of the model's own weights.
 */
#include <stdio.h>

#include "model/model.h"

enum { TEST_ROWS = 2 * PAGED__ROW_TILE, TEST_INPUTS = 41, N_NS = 6 };

typedef struct test {
    paged__weight w; /* the first rows of one of the model */
    float *x;        /* [TEST_INPUTS, n_cols] */
    uint8_t *input;
    float *all, *some; /* [TEST_INPUTS, w.n_rows] */
} test;

/* y [n, w.n_rows] for the first n inputs, as nth threads would do it. */
static void multiply(const test *t, int32_t n, int32_t nth, float *y) {
    paged__input in;
    paged__input_init(&in, paged__weight_form(&t->w), n, t->w.n_cols, t->input);
    for (int32_t i = 0; i < n; i++) paged__input_set(&in, i, t->x + (int64_t)i * t->w.n_cols, NULL, 0);
    const paged__product p = {.w = {&t->w}, .n_w = 1, .x = &in, .y = y, .y_stride = t->w.n_rows};
    for (int32_t ith = 0; ith < nth; ith++) paged__product_run(&p, ith, nth);
}

static bool same_bits(const test *t, int32_t n_threads) {
    static const int32_t ns[N_NS] = {1, 2, 5, 17, 24, TEST_INPUTS}; /* ours have a way for 24 and more */
    bool same = true;
    uint64_t seed = 7;
    for (int64_t i = 0; i < (int64_t)t->w.n_cols * TEST_INPUTS; i++)
        t->x[i] = (float)(int32_t)(paged__rand(&seed) >> 40) / 8388608.0f - 1.0f;
    multiply(t, TEST_INPUTS, 1, t->all);
    for (int32_t i = 0; i < N_NS; i++) {
        for (int32_t threads = 1; threads <= n_threads; threads++) {
            multiply(t, ns[i], threads, t->some);
            same = same && memcmp(t->all, t->some, (size_t)(ns[i] * t->w.n_rows) * sizeof *t->all) == 0;
        }
    }
    return same;
}

static paged_status test_weight(const paged__weight *w, int32_t n_threads, bool *same) {
    test t = {.w = *w};
    t.w.n_rows = PAGED_MIN(w->n_rows, (int32_t)TEST_ROWS);
    if (w->is_packed) paged__matrix_init(&t.w.matrix, w->matrix.type, t.w.n_rows, w->n_cols, w->matrix.data);
    const size_t n_outputs = (size_t)TEST_INPUTS * (size_t)t.w.n_rows;
    t.x = paged__alloc((size_t)w->n_cols * TEST_INPUTS, sizeof *t.x);
    t.input = paged__alloc(paged__input_bytes(paged__weight_form(w), TEST_INPUTS, w->n_cols), 1);
    t.all = paged__alloc(n_outputs, sizeof *t.all);
    t.some = paged__alloc(n_outputs, sizeof *t.some);
    const bool ok = t.x && t.input && t.all && t.some;
    if (ok) *same = same_bits(&t, n_threads);
    paged__free(t.x);
    paged__free(t.input);
    paged__free(t.all);
    paged__free(t.some);
    return ok ? PAGED_OK : PAGED_ERR_NO_MEMORY;
}

paged_status paged__model_self_test(const paged_model *m, int32_t n_threads, bool *all, char *text,
                                    size_t capacity, paged_error *err) {
    bool seen[GGML_TYPE_COUNT] = {false};
    size_t used = 0;
    *all = true;
    if (capacity) text[0] = 0;
    for (int32_t i = 0; i < m->n_weights; i++) {
        const paged__weight *w = &m->weights[i];
        if (seen[w->type] || !paged__model_multiplies(m, w)) continue;
        bool same;
        seen[w->type] = true;
        if (test_weight(w, PAGED_MIN(n_threads, 2), &same))
            return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for the self-test of %s",
                               ggml_type_name(w->type));
        *all = *all && same;
        if (used < capacity)
            used += (size_t)snprintf(text + used, capacity - used, "%s%s: %s", used ? ", " : "",
                                     ggml_type_name(w->type), same ? "yes" : "no");
    }
    return PAGED_OK;
}
