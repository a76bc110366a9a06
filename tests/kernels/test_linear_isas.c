/* Goal: the linear kernels of every instruction set give the bits of the reference. Method: packed matrices
 * of random bytes in every format, made here without ggml, so that this runs where there is none (the foreign
 * processor); that the reference is right is shown by test_linear.c, against ggml's weights.
 */
#include "kernels/world.h"
#include "ops/linear_kernels.h"

enum { N_ROWS = 77, N_TOKENS = 67 };

static const uint32_t linear_isas[] = {
    PAGED_CPU_AVX2, PAGED_CPU_AVX2 | PAGED_CPU_AVX512 | PAGED_CPU_AVX512_VNNI,
    PAGED_CPU_AVX2 | PAGED_CPU_AVX512 | PAGED_CPU_AVX512_VNNI | PAGED_CPU_AVX512_BF16 | PAGED_CPU_AMX,
    PAGED_CPU_NEON, PAGED_CPU_NEON | PAGED_CPU_NEON_DOT};
static const char *const linear_names[] = {"avx2", "avx512_vnni", "amx", "neon", "neon_dot"};

static void put_f16(uint8_t *at, float x) {
    const uint16_t half = paged__f32_to_f16(x);
    memcpy(at, &half, sizeof half);
}

/* Scales of a size that models have; quants are any bytes. */
static void fill_quantised(uint8_t *unit, paged__weight_type type, uint64_t *rng) {
    const int n_bytes = paged__unit_bytes(type), head = paged__head_bytes(type);
    const int n_f16 = paged__is_k(type) ? 32 : head / 2;
    for (int i = 0; i < n_bytes; i++) unit[i] = (uint8_t)draw(rng, 256);
    for (int i = 0; i < n_f16; i++) put_f16(unit + 2 * i, draw_unit(rng) * 0.1f);
}

static paged__matrix matrix_make(paged__weight_type type, int32_t n_cols, uint64_t *rng) {
    const size_t n_bytes = paged__matrix_bytes(type, N_ROWS, n_cols);
    CHECK(n_bytes > 0);
    paged__matrix w;
    uint8_t *data = aligned_alloc(64, (n_bytes + 63) & ~(size_t)63);
    CHECK(data != NULL);
    paged__matrix_init(&w, type, N_ROWS, n_cols, data);
    if (paged__is_quantised(type)) {
        const size_t unit = (size_t)paged__unit_bytes(type);
        for (int32_t t = 0; t < w.n_tiles; t++) {
            uint8_t *tile = data + (paged__tile_at(&w, t) - data);
            for (size_t u = 0; u < w.tile_bytes / unit; u++) fill_quantised(tile + 2 * u * unit, type, rng);
        }
    } else {
        for (size_t i = 0; i < n_bytes / (size_t)paged__float_bytes(type); i++) {
            const float x = draw_unit(rng);
            const uint16_t bf16 = paged__f32_to_bf16(x);
            if (type == PAGED__W_F32)
                memcpy(data + 4 * i, &x, sizeof x);
            else if (type == PAGED__W_F16)
                put_f16(data + 2 * i, x);
            else
                memcpy(data + 2 * i, &bf16, sizeof bf16);
        }
    }
    return w;
}

/* y [n_tokens, N_ROWS] on the kernels that are chosen now; with `then`, products on those of this mask. */
static float *products(const paged__matrix *w, const float *x, int32_t n_tokens, const uint32_t *then) {
    const bool quantised = paged__wants_quantised(w->type);
    const size_t n_bytes = paged__act_bytes(quantised, n_tokens, w->n_cols);
    uint8_t *data = aligned_alloc(64, (n_bytes + 63) & ~(size_t)63);
    float *y = take((size_t)n_tokens * N_ROWS, sizeof *y);
    CHECK(data != NULL);
    const paged__act act = paged__act_make(quantised, n_tokens, w->n_cols, data);
    for (int32_t t = 0; t < n_tokens; t++) paged__act_set(&act, t, x + (int64_t)t * w->n_cols, NULL, 0);
    if (then) paged_cpu_mask(*then);
    const paged__linear_job job = {.w = {w}, .n_w = 1, .x = &act, .y = y, .y_stride = N_ROWS};
    for (int32_t ith = 0; ith < 2; ith++) paged__linear_run(&job, ith, 2);
    free(data);
    return y;
}

static void every_set_gives_the_bits_of_the_reference(void) {
    uint64_t rng = test_seed;
    for (int32_t type = 0; type < PAGED__N_WEIGHT_TYPES; type++) {
        const int32_t n_cols = paged__is_quantised((paged__weight_type)type) ? 1280 : 601;
        paged__matrix w = matrix_make((paged__weight_type)type, n_cols, &rng);
        float *x = take((size_t)(N_TOKENS * n_cols), sizeof *x);
        for (int32_t i = 0; i < N_TOKENS * n_cols; i++) x[i] = draw_unit(&rng) * (float)(1 + i % 7);
        for (int32_t n = 1; n <= N_TOKENS; n += n < 7 ? 1 : n < 20 ? 5 : n < 34 ? 1 : 7) {
            paged_cpu_mask(0);
            float *want = products(&w, x, n, NULL);
            for (size_t i = 0; i < sizeof linear_isas / sizeof linear_isas[0]; i++) {
                paged_cpu_mask(~0u);
                if ((paged_cpu_flags() & linear_isas[i]) != linear_isas[i]) continue;
                paged_cpu_mask(linear_isas[i]);
                CHECK(strcmp(paged__linear_kernels(), linear_names[i]) == 0);
                float *y = products(&w, x, n, NULL);
                for (int32_t j = 0; j < n * N_ROWS; j++)
                    if (memcmp(&y[j], &want[j], sizeof *y) != 0)
                        test_fail(__FILE__, __LINE__,
                                  "%s, weight type %d, %d tokens: token %d row %d is %a, not %a",
                                  paged__linear_kernels(), type, n, j / N_ROWS, j % N_ROWS, (double)y[j],
                                  (double)want[j]);
                free(y);
            }
            free(want);
        }
        free(x);
        free(w.data);
    }
    paged_cpu_mask(~0u);
}

/* Each set makes its products from what each other has set, as when the choice changes in between. */
static void sets_share_activations(void) {
    enum { N_SETS = sizeof linear_isas / sizeof linear_isas[0], N_COLS = 768 };
    static const int32_t ns[] = {1, 23, 24, 33, 49, N_TOKENS};
    uint64_t rng = test_seed;
    float *x = take((size_t)(N_TOKENS * N_COLS), sizeof *x);
    for (int32_t i = 0; i < N_TOKENS * N_COLS; i++) x[i] = draw_unit(&rng);
    paged_cpu_mask(~0u);
    const uint32_t flags = paged_cpu_flags();
    for (int32_t type = 0; type < PAGED__N_WEIGHT_TYPES; type++) {
        paged__matrix w = matrix_make((paged__weight_type)type, N_COLS, &rng);
        for (size_t i = 0; i < sizeof ns / sizeof ns[0]; i++) {
            const size_t n_bytes = (size_t)ns[i] * N_ROWS * sizeof(float);
            paged_cpu_mask(0);
            float *want = products(&w, x, ns[i], NULL);
            for (size_t set = 0; set <= N_SETS; set++)
                for (size_t run = 0; run <= N_SETS; run++) {
                    const uint32_t masks[] = {set < N_SETS ? linear_isas[set] : 0,
                                              run < N_SETS ? linear_isas[run] : 0};
                    if ((masks[0] | masks[1]) & ~flags) continue;
                    paged_cpu_mask(masks[0]);
                    float *y = products(&w, x, ns[i], &masks[1]);
                    if (memcmp(y, want, n_bytes) != 0)
                        test_fail(__FILE__, __LINE__, "weight type %d, %d tokens: set by %#x, run by %#x",
                                  type, ns[i], masks[0], masks[1]);
                    free(y);
                }
            free(want);
        }
        free(w.data);
    }
    free(x);
    paged_cpu_mask(~0u);
}

#define TESTS(X) X(every_set_gives_the_bits_of_the_reference) X(sets_share_activations)
TEST_MAIN(TESTS)
