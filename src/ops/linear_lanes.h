/* ops/linear_lanes.h: what linear layers compute besides products: RMS norm and quantisation of activations,
 * and what becomes of the sums. Each file of kernels includes it and compiles it for its instruction set.
 *
 * Written in vectors of 16 lanes, which GCC and clang turn into what the machine has. No multiply-add is
 * fused (the room is compiled with -ffp-contract=off) and every sum has one order, so all instruction sets
 * give the same bits. Vectors are passed by address: by value, their place would depend on the instruction
 * set.
 */
#ifndef PAGED_OPS_LINEAR_LANES_H
#define PAGED_OPS_LINEAR_LANES_H

#include <math.h>

#include "ops/linear_kernels.h"

#define PAGED__LANES static inline __attribute__((always_inline))

enum { PAGED__N_LANES = 16 };

typedef float paged__f32s __attribute__((vector_size(64)));
typedef uint32_t paged__u32s __attribute__((vector_size(64)));
typedef int32_t paged__i32s __attribute__((vector_size(64)));
typedef int32_t paged__i32s_8 __attribute__((vector_size(32)));
typedef int32_t paged__i32s_4 __attribute__((vector_size(16)));
typedef int8_t paged__i8s __attribute__((vector_size(16)));
typedef float paged__f32s_8 __attribute__((vector_size(32)));
typedef double paged__f64s_8 __attribute__((vector_size(64)));

/* A float of this size has units of 1 in its last place: adding it rounds to nearest even, and its low bits
 * are the integer. */
#define PAGED__ROUNDER      12582912.0f /* 1.5 * 2^23 */
#define PAGED__ROUNDER_BITS 0x4b400000u

/* *x where the mask is zero, `other` where it is ones. */
PAGED__LANES void paged__blend(paged__f32s *x, float other, const paged__i32s *mask) {
    const paged__f32s all = other - (paged__f32s){0};
    *x = (paged__f32s)((*mask & (paged__i32s)all) | (~*mask & (paged__i32s)*x));
}

/* *x = exp(*x); from 88 on as at 88, up to -87 as at -87; NaN stays NaN. Relative error 2e-7. */
PAGED__LANES void paged__exp(paged__f32s *io) {
    paged__f32s x = *io;
    const paged__i32s above = x > 88.0f, below = x < -87.0f;
    paged__blend(&x, 88.0f, &above);
    paged__blend(&x, -87.0f, &below);
    const paged__f32s shifted = x * 1.44269504f + PAGED__ROUNDER, n = shifted - PAGED__ROUNDER;
    /* ln 2 in two parts; n times the first is exact. */
    const paged__f32s r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    paged__f32s p = r * 1.98756915e-4f + 1.39819995e-3f;
    p = p * r + 8.33345199e-3f;
    p = p * r + 4.16657962e-2f;
    p = p * r + 1.66666657e-1f;
    p = p * r + 5.00000000e-1f;
    p = (p * r) * r + r + 1.0f;
    *io = p * (paged__f32s)(((paged__u32s)shifted - PAGED__ROUNDER_BITS + 127u) << 23);
}

/* *x = x / (1 + exp(-x)) */
PAGED__LANES void paged__silu(paged__f32s *x) {
    paged__f32s e = -*x;
    paged__exp(&e);
    *x = *x / (e + 1.0f);
}

/* *x = x / 2 * (1 + tanh u) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x^3) */
PAGED__LANES void paged__gelu(paged__f32s *x) {
    paged__f32s e = *x * -1.59576912f * (*x * *x * 0.044715f + 1.0f);
    paged__exp(&e);
    *x = *x / (e + 1.0f);
}

/* ---- epilogue ---- */

PAGED__LANES void paged__finish_16(float *y, const float *a, const float *b, const float *bias_a,
                                   const float *bias_b, const paged__epilogue epilogue) {
    paged__f32s g, u, bias;
    memcpy(&g, a, sizeof g);
    if (bias_a) {
        memcpy(&bias, bias_a, sizeof bias);
        g += bias;
    }
    if (epilogue != PAGED__STORE) {
        memcpy(&u, b, sizeof u);
        if (bias_b) {
            memcpy(&bias, bias_b, sizeof bias);
            u += bias;
        }
        if (epilogue == PAGED__SWIGLU) paged__silu(&g);
        if (epilogue == PAGED__GEGLU) paged__gelu(&g);
        g = epilogue == PAGED__ADD ? u + g : g * u;
    }
    memcpy(y, &g, sizeof g);
}

/* Behind the last row nothing is read or written. */
PAGED__LANES void paged__finish_as(float *y, const float *a, const float *b, const float *bias_a,
                                   const float *bias_b, int32_t n, const paged__epilogue epilogue) {
    int32_t r = 0;
    for (; r + PAGED__N_LANES <= n; r += PAGED__N_LANES)
        paged__finish_16(y + r, a + r, b ? b + r : NULL, bias_a ? bias_a + r : NULL,
                         bias_b ? bias_b + r : NULL, epilogue);
    if (r == n) return;
    float in[4][PAGED__N_LANES] = {{0}}, out[PAGED__N_LANES];
    const size_t bytes = (size_t)(n - r) * sizeof(float);
    memcpy(in[0], a + r, bytes);
    if (b) memcpy(in[1], b + r, bytes);
    if (bias_a) memcpy(in[2], bias_a + r, bytes);
    if (bias_b) memcpy(in[3], bias_b + r, bytes);
    paged__finish_16(out, in[0], in[1], bias_a ? in[2] : NULL, bias_b ? in[3] : NULL, epilogue);
    memcpy(y + r, out, bytes);
}

static void paged__finish_rows(float *y, const float *a, const float *b, const float *bias_a,
                               const float *bias_b, int32_t n, paged__epilogue epilogue) {
    if (epilogue == PAGED__STORE) paged__finish_as(y, a, b, bias_a, bias_b, n, PAGED__STORE);
    if (epilogue == PAGED__ADD) paged__finish_as(y, a, b, bias_a, bias_b, n, PAGED__ADD);
    if (epilogue == PAGED__SWIGLU) paged__finish_as(y, a, b, bias_a, bias_b, n, PAGED__SWIGLU);
    if (epilogue == PAGED__GEGLU) paged__finish_as(y, a, b, bias_a, bias_b, n, PAGED__GEGLU);
}

/* ---- activations ---- */

/* 1 / sqrt(mean(x^2) + eps); lane i sums the squares of i, i + 16, … in double, then lanes are added in
 * pairs. */
static float paged__rms_scale(const float *x, int32_t n, float eps) {
    paged__f64s_8 low = {0}, high = {0};
    for (int32_t j = 0; j < n; j += PAGED__N_LANES) {
        paged__f32s_8 part[2] = {{0}, {0}};
        memcpy(part, x + j, (size_t)PAGED_MIN(PAGED__N_LANES, n - j) * sizeof(float));
        const paged__f64s_8 a = __builtin_convertvector(part[0], paged__f64s_8),
                            b = __builtin_convertvector(part[1], paged__f64s_8);
        low += a * a;
        high += b * b;
    }
    low += high;
    for (int width = 4; width > 0; width /= 2)
        for (int i = 0; i < width; i++) low[i] += low[i + width];
    return (float)(1.0 / sqrt(low[0] / n + (double)eps));
}

PAGED__LANES int32_t paged__sum_lanes(const paged__i32s *v) {
    paged__i32s_8 half[2];
    paged__i32s_4 quarter[2];
    memcpy(half, v, sizeof half);
    half[0] += half[1];
    memcpy(quarter, half, sizeof quarter);
    quarter[0] += quarter[1];
    return (quarter[0][0] + quarter[0][1]) + (quarter[0][2] + quarter[0][3]);
}

/* The largest number of two vectors. */
PAGED__LANES int32_t paged__max_lanes(const paged__i32s *a, const paged__i32s *b) {
    paged__i32s_8 half[2];
    paged__i32s_4 quarter[2];
    const paged__i32s less = *a < *b, most = (less & *b) | (~less & *a);
    memcpy(half, &most, sizeof half);
    const paged__i32s_8 less_8 = half[0] < half[1];
    half[0] = (less_8 & half[1]) | (~less_8 & half[0]);
    memcpy(quarter, half, sizeof quarter);
    const paged__i32s_4 less_4 = quarter[0] < quarter[1], q = (less_4 & quarter[1]) | (~less_4 & quarter[0]);
    const int32_t first = PAGED_MAX(q[0], q[1]), second = PAGED_MAX(q[2], q[3]);
    return PAGED_MAX(first, second);
}

/* Blocks whose largest value is below 2^-100 count as zero; one that holds NaN or an infinity makes every
 * output of its token NaN. */
PAGED__LANES void paged__quantise(paged__act_block *out, const paged__f32s x[2]) {
    /* Without their sign, the bits of floats are ordered as integers; infinity and NaN come last. */
    const paged__i32s size[2] = {(paged__i32s)x[0] & INT32_MAX, (paged__i32s)x[1] & INT32_MAX};
    const int32_t largest = paged__max_lanes(&size[0], &size[1]);
    float amax;
    memcpy(&amax, &largest, sizeof amax);
    const bool finite = largest < 0x7f800000, counts = finite && amax >= 0x1p-100f;
    const float inverse = counts ? 127.0f / amax : 0.0f;
    int32_t sums[2];
    for (int i = 0; i < 2; i++) {
        const paged__f32s shifted = x[i] * inverse + PAGED__ROUNDER;
        paged__i32s q = (paged__i32s)((paged__u32s)shifted - PAGED__ROUNDER_BITS);
        if (!finite) q = (paged__i32s){0};
        const paged__i8s bytes = __builtin_convertvector(q, paged__i8s);
        memcpy(out->q + 16 * i, &bytes, sizeof bytes);
        sums[i] = paged__sum_lanes(&q);
    }
    out->s = counts ? amax / 127.0f : finite ? 0.0f : NAN;
    out->s_sum = out->s * (float)(sums[0] + sums[1]);
    out->neg_sum = -(sums[0] + sums[1]);
    out->neg_first = -sums[0];
}

static void paged__act_quantised(const paged__act *act, int32_t token, const float *x, const float *weight,
                                 float scale) {
    const int32_t width = paged__group_tokens(act, token), n = act->n_cols;
    paged__act_block *out = paged__group_blocks(act, token) + token % PAGED__ACT_GROUP;
    for (int32_t b = 0; b < paged__act_blocks(n); b++, out += width) {
        paged__f32s part[2] = {{0}, {0}}, w[2];
        if (b * PAGED__ACT_BLOCK < n) {
            memcpy(part, x + b * PAGED__ACT_BLOCK, sizeof part);
            if (weight) {
                memcpy(w, weight + b * PAGED__ACT_BLOCK, sizeof w);
                part[0] = (part[0] * scale) * w[0];
                part[1] = (part[1] * scale) * w[1];
            }
        }
        paged__quantise(out, part);
    }
}

static void paged__act_set_lanes(const paged__act *act, int32_t token, const float *x, const float *weight,
                                 float eps) {
    const float scale = weight ? paged__rms_scale(x, act->n_cols, eps) : 1.0f;
    if (act->quantised) {
        paged__act_quantised(act, token, x, weight, scale);
        return;
    }
    const int32_t width = paged__group_tokens(act, token);
    float *out = paged__group_floats(act, token) + token % PAGED__ACT_GROUP;
    for (int64_t k = 0; k < act->n_cols; k++) out[k * width] = weight ? (x[k] * scale) * weight[k] : x[k];
}

#endif
