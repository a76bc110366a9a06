/* attn_ref.c: the kernels of ops.h in plain C, for every machine and as the plain statement of what the
 * others compute. */
#include <float.h>
#include <math.h>

#include "ops/ops.h"

/* Element e of an array of n pairs or singles is converted on its own; slow and obvious. */
static float load(const void *src, int64_t e, paged_type type) {
    uint16_t h;
    if (type == PAGED_TYPE_F32) {
        float f;
        memcpy(&f, (const uint8_t *)src + e * 4, sizeof f);
        return f;
    }
    memcpy(&h, (const uint8_t *)src + e * 2, sizeof h);
    return type == PAGED_TYPE_F16 ? paged__f16_to_f32(h) : paged__bf16_to_f32(h);
}

static void qk(float *s, const float *q, int64_t q_stride, int32_t n_rows, const paged__tiles *tiles,
               int32_t head_dim, paged_type type) {
    float k[PAGED_ATTN_STEP];
    for (int32_t e = 0; e < n_rows * PAGED_ATTN_STEP; e++) s[e] = 0;
    for (int32_t d = 0; d < head_dim; d++) {
        for (int32_t t = 0; t < PAGED_ATTN_STEP; t++) {
            int32_t i = t % PAGED_TILE;
            int64_t e = type == PAGED_TYPE_BF16 ? (d / 2) * 32 + i * 2 + d % 2 : d * 16 + i;
            k[t] = load(tiles->at[t / PAGED_TILE], e, type);
        }
        for (int32_t r = 0; r < n_rows; r++) {
            float *row = s + r * PAGED_ATTN_STEP, qd = q[r * q_stride + d];
            for (int32_t t = 0; t < PAGED_ATTN_STEP; t++) row[t] += qd * k[t];
        }
    }
}

static void pv(float *o, int64_t o_stride, const float *p, int32_t n_rows, const paged__tiles *tiles,
               int32_t t0, int32_t t1, int32_t head_dim, paged_type type) {
    float v[PAGED_HEAD_DIM_MAX];
    for (int32_t t = t0; t < t1; t++) {
        int64_t i = t % PAGED_TILE;
        for (int32_t d = 0; d < head_dim; d++) {
            int64_t e = type == PAGED_TYPE_BF16 ? (i / 2) * 2 * head_dim + d * 2 + i % 2 : i * head_dim + d;
            v[d] = load(tiles->at[t / PAGED_TILE], e, type);
        }
        for (int32_t r = 0; r < n_rows; r++) {
            float *row = o + r * o_stride, pt = p[r * PAGED_ATTN_STEP + t];
            for (int32_t d = 0; d < head_dim; d++) row[d] += pt * v[d];
        }
    }
}

static void softmax(float *s, int32_t n_valid, float *m, float *l, float *o, int32_t n) {
    /* Not -inf, so that a row whose scores are all -inf has weights of zero and not NaN. */
    float s_max = -FLT_MAX;
    for (int32_t t = 0; t < n_valid; t++) s_max = s[t] > s_max ? s[t] : s_max;
    if (s_max > *m + PAGED__RESCALE) {
        float factor = paged__exp2(*m - s_max);
        for (int32_t i = 0; i < PAGED__L_LANES; i++) l[i] *= factor;
        for (int32_t d = 0; d < n; d++) o[d] *= factor;
        *m = s_max;
    }
    for (int32_t t = 0; t < n_valid; t++) {
        s[t] = paged__exp2(s[t] - *m);
        l[t % PAGED__L_LANES] += s[t];
    }
    for (int32_t t = n_valid; t < PAGED_ATTN_STEP; t++) s[t] = 0;
}

static void merge(float *acc, float a, const float *part, float b, int32_t n) {
    for (int32_t d = 0; d < n; d++) acc[d] = acc[d] * a + part[d] * b;
}

static void divide(float *out, const float *o, float l, int32_t n) {
    for (int32_t d = 0; d < n; d++) out[d] = o[d] / l + 0.0f;
}

static void unpack_bf16(float *dst, const void *src, int32_t n_pairs, int32_t width) {
    for (int64_t p = 0; p < n_pairs; p++)
        for (int64_t i = 0; i < width; i++)
            for (int64_t b = 0; b < 2; b++)
                dst[(2 * p + b) * width + i] = load(src, (p * width + i) * 2 + b, PAGED_TYPE_BF16);
}

static int64_t from_f32(void *dst, const float *src, int64_t n, paged_type type) {
    int64_t n_nan = 0;
    for (int64_t i = 0; i < n; i++) {
        n_nan += isnan(src[i]) != 0;
        if (type == PAGED_TYPE_F32) {
            memcpy((uint8_t *)dst + i * 4, &src[i], sizeof src[i]);
        } else {
            uint16_t h = type == PAGED_TYPE_F16 ? paged__f32_to_f16(src[i]) : paged__f32_to_bf16(src[i]);
            memcpy((uint8_t *)dst + i * 2, &h, sizeof h);
        }
    }
    return n_nan;
}

#define OF_TYPE(name, type)                                                                                  \
    static void qk_##name(float *s, const float *q, int64_t q_stride, int32_t n_rows,                        \
                          const paged__tiles *tiles, int32_t head_dim) {                                     \
        qk(s, q, q_stride, n_rows, tiles, head_dim, type);                                                   \
    }                                                                                                        \
    static void pv_##name(float *o, int64_t o_stride, const float *p, int32_t n_rows,                        \
                          const paged__tiles *tiles, int32_t t0, int32_t t1, int32_t head_dim) {             \
        pv(o, o_stride, p, n_rows, tiles, t0, t1, head_dim, type);                                           \
    }                                                                                                        \
    static void to_f32_##name(float *dst, const void *src, int64_t n) {                                      \
        for (int64_t i = 0; i < n; i++) dst[i] = load(src, i, type);                                         \
    }                                                                                                        \
    static int64_t from_f32_##name(void *dst, const float *src, int64_t n) {                                 \
        return from_f32(dst, src, n, type);                                                                  \
    }

OF_TYPE(f16, PAGED_TYPE_F16)
OF_TYPE(f32, PAGED_TYPE_F32)
OF_TYPE(bf16, PAGED_TYPE_BF16)

const paged__kernels paged__kernels_ref = {
    .name = "ref",
    .qk = {qk_f16, qk_f32, qk_bf16},
    .softmax = softmax,
    .pv = {pv_f16, pv_f32, pv_bf16},
    .merge = merge,
    .divide = divide,
    .to_f32 = {to_f32_f16, to_f32_f32, to_f32_bf16},
    .unpack_bf16 = unpack_bf16,
    .from_f32 = {from_f32_f16, from_f32_f32, from_f32_bf16},
};
