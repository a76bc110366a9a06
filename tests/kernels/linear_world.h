/* linear_world.h: matrices in GGUF's formats, made and read back by ggml, and what their products must be.
 * Nothing of the oracle comes from src/ops: numbers of weights are ggml's dequantisation, sums are in double.
 */
#ifndef PAGED_TESTS_KERNELS_LINEAR_WORLD_H
#define PAGED_TESTS_KERNELS_LINEAR_WORLD_H

#include <ggml-cpu.h>
#include <ggml.h>
#include <math.h>

#include "kernels/world.h"
#include "ops/linear.h"

static const enum ggml_type ggml_types[PAGED__N_WEIGHT_TYPES] = {
    [PAGED__W_F32] = GGML_TYPE_F32,   [PAGED__W_F16] = GGML_TYPE_F16,       [PAGED__W_BF16] = GGML_TYPE_BF16,
    [PAGED__W_Q4_0] = GGML_TYPE_Q4_0, [PAGED__W_Q4_1] = GGML_TYPE_Q4_1,     [PAGED__W_Q5_0] = GGML_TYPE_Q5_0,
    [PAGED__W_Q8_0] = GGML_TYPE_Q8_0, [PAGED__W_Q4_K] = GGML_TYPE_Q4_K,     [PAGED__W_Q5_K] = GGML_TYPE_Q5_K,
    [PAGED__W_Q6_K] = GGML_TYPE_Q6_K, [PAGED__W_IQ4_NL] = GGML_TYPE_IQ4_NL,
};

static const uint32_t linear_isas[] = {
    0, PAGED_CPU_AVX2, PAGED_CPU_AVX2 | PAGED_CPU_AVX512 | PAGED_CPU_AVX512_VNNI,
    PAGED_CPU_AVX2 | PAGED_CPU_AVX512 | PAGED_CPU_AVX512_VNNI | PAGED_CPU_AVX512_BF16 | PAGED_CPU_AMX};
enum { N_LINEAR_ISAS = 4 };

static inline bool linear_isa_use(int32_t isa) {
    paged_cpu_mask(~0u);
    if ((paged_cpu_flags() & linear_isas[isa]) != linear_isas[isa]) return false;
    paged_cpu_mask(linear_isas[isa]);
    return true;
}

static inline const char *weight_name(paged__weight_type type) {
    return ggml_type_name(ggml_types[type]);
}

/* Memory that ends where it is said to end, so that ASan sees a step too far. */
static inline void *take_aligned(size_t bytes) {
    void *p = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    CHECK(p != NULL);
    return p;
}

/* What a job brings for wide sums, of NaN; for a third of all n: nothing, which must not change a bit. */
static inline float *room_for(int32_t n) {
    static _Alignas(64) float room[PAGED__ROOM_BYTES / sizeof(float)];
    memset(room, 0xff, sizeof room);
    return n % 3 ? room : NULL;
}

typedef struct weights {
    paged__matrix w;
    uint8_t *gguf; /* rows of row_bytes */
    size_t row_bytes;
    float *values; /* [n_rows, n_cols], ggml's dequantisation */
} weights;

/* Makes every 16-bit scale at `at` finite and not large. */
static inline void tame(uint8_t *block, size_t at) {
    uint16_t h;
    memcpy(&h, block + at, sizeof h);
    h = (uint16_t)((h & 0x83ffu) | (0x2000u + (h & 0x0c00u)));
    memcpy(block + at, &h, sizeof h);
}

/* Any bits are a valid block, as long as the scales are finite. */
static inline void random_blocks(uint8_t *gguf, size_t bytes, paged__weight_type type, uint64_t *rng) {
    for (size_t i = 0; i < bytes; i++) gguf[i] = (uint8_t)paged__rand(rng);
    const size_t block = ggml_type_size(ggml_types[type]);
    for (size_t b = 0; b + block <= bytes; b += block) {
        tame(gguf + b, type == PAGED__W_Q6_K ? 208 : 0);
        if (type == PAGED__W_Q4_1 || type == PAGED__W_Q4_K || type == PAGED__W_Q5_K) tame(gguf + b, 2);
    }
}

/* `bits`: random bits; otherwise random numbers, quantised by ggml. */
static inline weights weights_make(paged__weight_type type, int32_t n_rows, int32_t n_cols, bool bits,
                                   int32_t nth, uint64_t *rng) {
    const enum ggml_type gt = ggml_types[type];
    const int64_t n = (int64_t)n_rows * n_cols;
    weights v = {.row_bytes = ggml_row_size(gt, n_cols)};
    float *source = take((size_t)n, sizeof *source);
    v.values = take((size_t)n, sizeof(float));
    v.gguf = take((size_t)n_rows, v.row_bytes);
    for (int64_t i = 0; i < n; i++) source[i] = draw_unit(rng) * draw_unit(rng);
    if (bits && paged__wants_quantised(type))
        random_blocks(v.gguf, (size_t)n_rows * v.row_bytes, type, rng);
    else
        CHECK_EQ(ggml_quantize_chunk(gt, source, v.gguf, 0, n_rows, n_cols, NULL),
                 (size_t)n_rows * v.row_bytes);
    free(source);
    if (type == PAGED__W_F32)
        memcpy(v.values, v.gguf, (size_t)n * sizeof(float));
    else
        ggml_get_type_traits(gt)->to_float(v.gguf, v.values, n);
    const size_t bytes = paged__matrix_bytes(type, n_rows, n_cols);
    CHECK(bytes > 0);
    uint8_t *data = take_aligned(bytes);
    CHECK_EQ(bytes % 64, 0);
    memset(data, 0xff, bytes);
    paged__matrix_init(&v.w, type, n_rows, n_cols, data);
    for (int32_t i = 0; i < nth; i++) paged__matrix_pack(&v.w, v.gguf, v.row_bytes, i, nth);
    return v;
}

static inline void weights_free(weights *v) {
    free(v->w.data);
    free(v->gguf);
    free(v->values);
}

/* n_tokens rows of n_cols floats between NaN, and their activations. */
typedef struct inputs {
    paged__act act;
    float *x; /* row t at x + t * stride */
    int64_t stride;
} inputs;

static inline inputs inputs_make(int32_t n_tokens, int32_t n_cols, uint64_t *rng) {
    inputs in = {.stride = n_cols + 3};
    in.x = take((size_t)(n_tokens * in.stride), sizeof *in.x);
    for (int32_t t = 0; t < n_tokens; t++) {
        for (int32_t k = 0; k < n_cols; k++)
            in.x[t * in.stride + k] = draw_unit(rng) * (draw(rng, 50) == 0 ? 20.0f : 1.0f);
        for (int32_t k = n_cols; k < in.stride; k++) in.x[t * in.stride + k] = NAN;
    }
    in.act.n_tokens = n_tokens;
    in.act.n_cols = n_cols;
    return in;
}

/* Activations of the tokens token0 … token0 + n - 1, as a batch of their own. The caller frees the data. */
static inline paged__act activate(const inputs *in, paged__act_kind kind, int32_t token0, int32_t n) {
    const size_t bytes = paged__act_bytes(kind, n, in->act.n_cols);
    CHECK(bytes > 0);
    const paged__act act = paged__act_make(kind, n, in->act.n_cols, take_aligned(bytes));
    memset(act.data, 0xff, bytes);
    for (int32_t t = n - 1; t >= 0; t--) paged__act_set(&act, t, in->x + (token0 + t) * in->stride, NULL, 0);
    return act;
}

static inline void inputs_free(inputs *in) {
    free(in->x);
}

/* What the kernels see of a row: 127 steps a block of 32. */
static inline void quantised_row(const float *x, int32_t n, double *out) {
    for (int32_t first = 0; first < n; first += 32) {
        float amax = 0;
        for (int32_t k = first; k < first + 32; k++) amax = fmaxf(amax, fabsf(x[k]));
        const float inverse = amax > 0 ? 127.0f / amax : 0;
        for (int32_t k = first; k < first + 32; k++)
            out[k] = (double)(amax / 127.0f) * (double)nearbyintf(x[k] * inverse);
    }
}

/* Row r of w times x, in double; size: the sum of the absolute products. */
static inline double dot_row(const weights *v, int32_t r, const double *x, double *size) {
    double sum = 0, all = 0;
    for (int32_t k = 0; k < v->w.n_cols; k++) {
        const double product = (double)v->values[(int64_t)r * v->w.n_cols + k] * x[k];
        sum += product;
        all += fabs(product);
    }
    *size = all;
    return sum;
}

#endif
