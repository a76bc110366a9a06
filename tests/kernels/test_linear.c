/* Goal: a linear layer is the product of the matrix that the GGUF file holds with activations in 127 steps a
 * block of 32, to the rounding of f32, and an output has one bit pattern, whatever batch, thread or
 * instruction set computed it. Method: weights by ggml (quantised by it, or random bits) and dequantised by
 * it, sums in double; then equality of bits between many ways to compute the same. */
#include "kernels/linear_world.h"

static const int32_t shape_rows[] = {1, 16, 17, 40, 100}, shape_cols[] = {32, 64, 96, 256, 512, 1056};
static const int32_t batches[] = {1, 2, 3, 4, 5, 6, 7, 12, 25, 70};

static int32_t cols_for(paged__weight_type type, int32_t n_cols) {
    const int32_t block = (int32_t)ggml_blck_size(ggml_types[type]);
    const int32_t odd = block == 1 ? 1 : 0; /* float formats take any number */
    return (n_cols + block - 1) / block * block - (n_cols > 32 ? odd : 0);
}

/* ---- packing ---- */

static void rows_come_back(void) {
    uint64_t rng = test_seed;
    for (int32_t type = 0; type < PAGED__N_WEIGHT_TYPES; type++)
        for (int32_t c = 0; c < 6; c++)
            for (int32_t bits = 0; bits < 2; bits++) {
                const int32_t n_rows = shape_rows[(type + c) % 5],
                              n_cols = cols_for((paged__weight_type)type, shape_cols[c]);
                weights v = weights_make((paged__weight_type)type, n_rows, n_cols, bits, 1 + c, &rng);
                float *row = take((size_t)n_cols, sizeof *row);
                for (int32_t r = 0; r < n_rows; r++) {
                    paged__matrix_row(&v.w, r, row);
                    for (int32_t k = 0; k < n_cols; k++) CHECK(row[k] == v.values[r * n_cols + k]);
                }
                free(row);
                weights_free(&v);
            }
}

static void support(void) {
    CHECK(paged__linear_supports(PAGED__W_Q4_0, 1, 32));
    CHECK(!paged__linear_supports(PAGED__W_Q4_0, 1, 48));
    CHECK(!paged__linear_supports(PAGED__W_Q4_K, 1, 128));
    CHECK(paged__linear_supports(PAGED__W_F16, 3, 7));
    CHECK(!paged__linear_supports(PAGED__W_F16, 0, 7));
    CHECK(!paged__linear_supports(PAGED__W_F16, INT64_MAX, 7));
    CHECK(!paged__linear_supports(PAGED__N_WEIGHT_TYPES, 1, 256));
    CHECK_EQ(paged__matrix_bytes(PAGED__W_Q4_0, 1, 48), 0);
    CHECK_EQ(paged__act_bytes(true, 0, 32), 0);
    /* Bits a weight of a large matrix: at most 0.2 more than in the file. */
    for (int32_t type = 0; type < PAGED__N_WEIGHT_TYPES; type++) {
        const double file = (double)ggml_row_size(ggml_types[type], 4096) / 4096 * 8;
        const double packed =
            (double)paged__matrix_bytes((paged__weight_type)type, 4096, 4096) / 4096 / 4096 * 8;
        CHECK(packed >= file && packed <= file + 0.2);
    }
}

/* ---- products ---- */

static float *run_job(paged__linear_job job, int64_t n_outputs, int32_t nth) {
    const int64_t stride = n_outputs + 2, n = job.x->n_tokens * stride;
    float *y = take((size_t)n, sizeof *y);
    for (int64_t i = 0; i < n; i++) y[i] = -12345.0f;
    job.y = y;
    job.y_stride = stride;
    for (int32_t i = nth - 1; i >= 0; i--) paged__linear_run(&job, i, nth);
    for (int32_t t = 0; t < job.x->n_tokens; t++) /* nothing behind a row */
        for (int64_t e = n_outputs; e < stride; e++) CHECK(y[t * stride + e] == -12345.0f);
    return y;
}

static void check_products(const weights *v, const inputs *in, const float *y, int32_t n_tokens) {
    const int32_t n_rows = v->w.n_rows, n_cols = v->w.n_cols;
    const bool quantised = paged__wants_quantised(v->w.type);
    double *x = take((size_t)n_cols, sizeof *x);
    for (int32_t t = 0; t < n_tokens; t++) {
        const float *row = in->x + t * in->stride;
        if (quantised) quantised_row(row, n_cols, x);
        for (int32_t k = 0; k < n_cols && !quantised; k++) x[k] = (double)row[k];
        for (int32_t r = 0; r < n_rows; r++) {
            double size;
            const double want = dot_row(v, r, x, &size), got = (double)y[t * (n_rows + 2) + r];
            /* Formats with minima or an offset are sums of larger parts. */
            const double steps = quantised ? n_cols / 32 * 2 + 8 : n_cols;
            if (!(fabs(got - want) <= size * steps * 0x1p-23 + 1e-30))
                test_fail(__FILE__, __LINE__, "%s %d x %d, token %d of %d, row %d: %.9g, not %.9g (%s)",
                          weight_name(v->w.type), n_rows, n_cols, t, n_tokens, r, got, want,
                          paged__linear_kernels());
        }
    }
    free(x);
}

static void products(void) {
    for (int32_t isa = 0; isa < N_LINEAR_ISAS; isa++) {
        uint64_t rng = test_seed;
        if (!linear_isa_use(isa)) continue;
        for (int32_t type = 0; type < PAGED__N_WEIGHT_TYPES; type++)
            for (int32_t i = 0; i < (test_long ? 300 : 20); i++) {
                const int32_t n_cols = cols_for((paged__weight_type)type, shape_cols[draw(&rng, 6)]);
                const int32_t n_rows = shape_rows[draw(&rng, 5)], n_tokens = batches[i % 10];
                weights v = weights_make((paged__weight_type)type, n_rows, n_cols, i % 2 != 0, 1, &rng);
                inputs in = inputs_make(n_tokens, n_cols, &rng);
                paged__act act = activate(&in, paged__wants_quantised(v.w.type), 0, n_tokens);
                float *y =
                    run_job((paged__linear_job){.w = {&v.w}, .n_w = 1, .x = &act}, n_rows, 1 + draw(&rng, 4));
                check_products(&v, &in, y, n_tokens);
                free(y);
                free(act.data);
                inputs_free(&in);
                weights_free(&v);
            }
    }
    paged_cpu_mask(~0u);
}

#define TESTS(X) X(rows_come_back) X(support) X(products)
TEST_MAIN(TESTS)
