/* Goal: norm, RoPE and epilogues are what their formulas say, and a layer is no further from the product of
 * the numbers in the file with unquantised activations than ggml's own dot product is. Method: the formulas
 * in double; ggml's vec_dot on the same rows. Errors are printed. */
#include "kernels/linear_world.h"

/* ---- epilogues, norm and RoPE ---- */

static double silu(double x) {
    return x / (1 + exp(-x));
}
static double gelu(double x) {
    return x / 2 * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}

/* A matrix whose outputs are its input: 1 on the diagonal. So an epilogue sees any number that we like. */
static paged__matrix identity(int32_t n) {
    paged__matrix w;
    float *rows = take((size_t)n * (size_t)n, sizeof *rows);
    for (int32_t i = 0; i < n; i++) rows[i * n + i] = 1;
    uint8_t *data = take_aligned(paged__matrix_bytes(PAGED__W_F32, n, n));
    paged__matrix_init(&w, PAGED__W_F32, n, n, data);
    paged__matrix_pack(&w, rows, (size_t)n * sizeof *rows, 0, 1);
    free(rows);
    return w;
}

static void activation_functions(void) {
    enum { N = 64, ROUNDS = 2000 };
    paged__matrix w = identity(N);
    uint64_t rng = test_seed;
    for (int32_t isa = 0; isa < N_LINEAR_ISAS; isa++) {
        if (!linear_isa_use(isa)) continue;
        double worst[2] = {0, 0};
        for (int32_t i = 0; i < ROUNDS; i++) {
            float x[N], y[N];
            const float reach = i % 3 == 0 ? 1.0f : i % 3 == 1 ? 12.0f : 150.0f;
            for (int32_t k = 0; k < N; k++) x[k] = draw_unit(&rng) * reach;
            paged__act act = paged__act_make(false, 1, N, take_aligned(sizeof x));
            paged__act_set(&act, 0, x, NULL, 0);
            const bool is_silu = i % 2 == 0;
            const paged__linear_job job = {.w = {&w, &w},
                                           .n_w = 2,
                                           .x = &act,
                                           .y = y,
                                           .y_stride = N,
                                           .epilogue = is_silu ? PAGED__SWIGLU : PAGED__GEGLU};
            paged__linear_run(&job, 0, 1);
            for (int32_t k = 0; k < N; k++) {
                const double want = (is_silu ? silu : gelu)((double)x[k]) * (double)x[k];
                const double error = fabs((double)y[k] - want);
                /* Far out on the left the exponential amplifies the rounding of its argument; and gelu's
                 * formula there is a difference of nearly equal numbers even in double. */
                CHECK(error <= fabs(want) * 4e-6 + 1e-12);
                if (fabs(want) > 1e-6) worst[!is_silu] = fmax(worst[!is_silu], error / fabs(want));
            }
            free(act.data);
        }
        printf("%s: relative error of silu at most %.2g, of gelu %.2g\n", paged__linear_kernels(), worst[0],
               worst[1]);
    }
    paged_cpu_mask(~0u);
    free(w.data);
}

static void norm(void) {
    enum { N = 77 };
    uint64_t rng = test_seed;
    for (int32_t isa = 0; isa < N_LINEAR_ISAS; isa++) {
        if (!linear_isa_use(isa)) continue;
        for (int32_t i = 0; i < 100; i++) {
            float x[N], weight[N];
            double squares = 0;
            for (int32_t k = 0; k < N; k++) {
                x[k] = draw_unit(&rng) * (i % 2 ? 1000.0f : 0.01f);
                weight[k] = draw_unit(&rng);
                squares += (double)x[k] * (double)x[k];
            }
            paged__act act = paged__act_make(false, 1, N, take_aligned(sizeof x));
            paged__act_set(&act, 0, x, weight, 1e-5f);
            const float *got = (const float *)(const void *)act.data;
            for (int32_t k = 0; k < N; k++) {
                const double want = (double)x[k] / sqrt(squares / N + (double)1e-5f) * (double)weight[k];
                CHECK(fabs((double)got[k] - want) <= fabs(want) * 3e-7);
            }
            paged__rms_norm(x, x, N, weight, 1e-5f);
            CHECK(memcmp(x, got, sizeof x) == 0);
            free(act.data);
        }
    }
    paged_cpu_mask(~0u);
}

/* Turns heads of `dim` by random angles on all instruction sets: near to doubles, and the same bits. */
static void turn_heads(int32_t n_rot, int32_t dim, bool neighbours, uint64_t *rng) {
    enum { HEADS = 3, MOST = 80 };
    float before[HEADS * MOST] = {0}, first[HEADS * MOST], cs[2][MOST];
    const int32_t half = n_rot / 2, n = HEADS * dim;
    bool is_first = true;
    for (int32_t i = 0; i < n; i++) before[i] = draw_unit(rng);
    for (int32_t k = 0; k < half; k++) {
        const double angle = (double)draw_unit(rng) * 7;
        const int32_t at = neighbours ? 2 * k : k;
        cs[0][at] = (float)cos(angle);
        cs[1][at] = (float)(neighbours ? -sin(angle) : sin(angle));
        if (!neighbours) continue;
        cs[0][at + 1] = cs[0][at];
        cs[1][at + 1] = -cs[1][at];
    }
    const paged__turns turns = {neighbours, n_rot, cs[0], cs[1]};
    for (int32_t isa = 0; isa < N_LINEAR_ISAS; isa++) {
        if (!linear_isa_use(isa)) continue;
        float x[HEADS * MOST];
        memcpy(x, before, sizeof x);
        paged__turn(x, &turns, HEADS, dim);
        for (int32_t i = 0; i < n; i++) {
            const int32_t e = i % dim, k = neighbours ? e / 2 : e % half;
            const bool is_low = neighbours ? e % 2 == 0 : e < half;
            double want = (double)before[i];
            if (e < n_rot) {
                const int32_t at = neighbours ? 2 * k + 1 : k, other = neighbours ? 1 : half;
                const double c = (double)cs[0][at], s = (double)cs[1][at];
                want = is_low ? want * c - (double)before[i + other] * s
                              : want * c + (double)before[i - other] * s;
            }
            CHECK(fabs((double)x[i] - want) <= 3e-7);
        }
        if (is_first) memcpy(first, x, sizeof x);
        is_first = false;
        CHECK(memcmp(first, x, (size_t)n * sizeof *x) == 0);
    }
    paged_cpu_mask(~0u);
}

static void turn(void) {
    const int32_t n_rots[] = {2, 6, 16, 22, 32, 48, 64, 80};
    uint64_t rng = test_seed;
    for (size_t i = 0; i < sizeof n_rots / sizeof n_rots[0]; i++)
        for (int32_t more = 0; n_rots[i] + more <= 80; more += 8) {
            turn_heads(n_rots[i], n_rots[i] + more, false, &rng);
            turn_heads(n_rots[i], n_rots[i] + more, true, &rng);
        }
}

/* y may be its own residual, and rows may be apart. */
static void residual_in_place(void) {
    enum { ROWS = 37, COLS = 64, TOKENS = 9, STRIDE = 50 };
    uint64_t rng = test_seed;
    weights v = weights_make(PAGED__W_F32, ROWS, COLS, false, 1, &rng);
    inputs in = inputs_make(TOKENS, COLS, &rng);
    for (int32_t isa = 0; isa < N_LINEAR_ISAS; isa++) {
        if (!linear_isa_use(isa)) continue;
        float y[TOKENS * STRIDE], before[TOKENS * STRIDE];
        for (int32_t i = 0; i < TOKENS * STRIDE; i++) y[i] = before[i] = draw_unit(&rng);
        paged__act act = activate(&in, false, 0, TOKENS);
        const paged__linear_job job = {.w = {&v.w},
                                       .n_w = 1,
                                       .x = &act,
                                       .y = y,
                                       .y_stride = STRIDE,
                                       .epilogue = PAGED__ADD,
                                       .residual = y,
                                       .residual_stride = STRIDE};
        for (int32_t i = 0; i < 3; i++) paged__linear_run(&job, i, 3);
        for (int32_t t = 0; t < TOKENS; t++)
            for (int32_t r = 0; r < STRIDE; r++) {
                double size = 0, want = (double)before[t * STRIDE + r];
                double x[COLS];
                for (int32_t k = 0; k < COLS; k++) x[k] = (double)in.x[t * in.stride + k];
                if (r < ROWS) want += dot_row(&v, r, x, &size);
                CHECK(fabs((double)y[t * STRIDE + r] - want) <= (size + 1) * COLS * 0x1p-24);
            }
        free(act.data);
    }
    paged_cpu_mask(~0u);
    inputs_free(&in);
    weights_free(&v);
}

/* ---- accuracy beside ggml ---- */

static void ggml_row(const weights *v, int32_t r, const float *x, float *y) {
    const struct ggml_type_traits_cpu *traits = ggml_get_type_traits_cpu(ggml_types[v->w.type]);
    const enum ggml_type dot_type = traits->vec_dot_type;
    const int32_t n = v->w.n_cols;
    uint8_t *act = take(ggml_row_size(dot_type, n), 1);
    if (dot_type == GGML_TYPE_F32)
        memcpy(act, x, (size_t)n * sizeof *x);
    else
        ggml_get_type_traits_cpu(dot_type)->from_float(x, act, n);
    traits->vec_dot(n, y, 0, v->gguf + (size_t)r * v->row_bytes, 0, act, 0, 1);
    free(act);
}

/* Root mean square over all outputs, relative to the same of the outputs. */
static void check_accuracy(const bool as_bf16) {
    enum { ROWS = 192, COLS = 1536, TOKENS = 4 };
    uint64_t rng = test_seed;
    ggml_cpu_init();
    printf("relative error against double      ours      ggml  (%s)\n",
           as_bf16 ? paged__linear_bf16() : paged__linear_kernels());
    for (int32_t type = as_bf16 ? PAGED__W_Q4_0 : 0; type < PAGED__N_WEIGHT_TYPES; type++) {
        const bool quantised = paged__wants_quantised((paged__weight_type)type);
        weights v = weights_make((paged__weight_type)type, ROWS, COLS, false, 1, &rng);
        inputs in = inputs_make(TOKENS, COLS, &rng);
        paged__act act = activate(&in, as_bf16 ? PAGED__ACT_BF16 : quantised, 0, TOKENS);
        float y[TOKENS * ROWS];
        const paged__linear_job job = {.w = {&v.w}, .n_w = 1, .x = &act, .y = y, .y_stride = ROWS};
        paged__linear_run(&job, 0, 1);
        double ours = 0, theirs = 0, all = 0, x[COLS], size;
        for (int32_t t = 0; t < TOKENS; t++) {
            const float *row = in.x + t * in.stride;
            for (int32_t k = 0; k < COLS; k++) x[k] = (double)row[k];
            for (int32_t r = 0; r < ROWS; r++) {
                float g;
                ggml_row(&v, r, row, &g);
                const double want = dot_row(&v, r, x, &size);
                ours += pow((double)y[t * ROWS + r] - want, 2);
                theirs += pow((double)g - want, 2);
                all += want * want;
            }
        }
        printf("%-28s %10.3g %10.3g\n", weight_name(v.w.type), sqrt(ours / all), sqrt(theirs / all));
        /* A hundredth for chance, since both round the same numbers. F32: ggml has 64 short chains, we have
         * sums of 64 columns; both are rounding alone. */
        CHECK(sqrt(ours) <= sqrt(theirs) * (as_bf16 ? 0.5 : type == PAGED__W_F32 ? 2 : 1.01));
        free(act.data);
        inputs_free(&in);
        weights_free(&v);
    }
}

static void no_worse_than_ggml(void) {
    check_accuracy(false);
    if (paged__linear_bf16()) check_accuracy(true);
}

#define TESTS(X) X(activation_functions) X(norm) X(turn) X(residual_in_place) X(no_worse_than_ggml)
TEST_MAIN(TESTS)
