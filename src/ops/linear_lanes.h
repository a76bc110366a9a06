/* ops/linear_lanes.h: what linear layers compute besides products: RMS norm and quantisation of activations,
 * and what becomes of the sums. Each file of kernels includes it and compiles it for its instruction set.
 *
 * Plain C in loops over 16 or 32 lanes, which compilers turn into vectors. No multiply-add is fused (the
 * room is compiled with -ffp-contract=off) and every sum has one order, so all instruction sets give the same
 * bits.
 */
#ifndef PAGED_OPS_LINEAR_LANES_H
#define PAGED_OPS_LINEAR_LANES_H

#include <math.h>

#include "ops/linear_kernels.h"

#define PAGED__LANES static inline __attribute__((always_inline))

enum { PAGED__N_LANES = 16 };

PAGED__LANES uint32_t paged__bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}
PAGED__LANES float paged__float(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* A float of this size has units of 1 in its last place: adding it rounds to nearest even, and its low bits
 * are the integer. */
#define PAGED__ROUNDER 12582912.0f /* 1.5 * 2^23 */

/* exp(x) for x ≤ 88; above as at 88, below as at -87; NaN stays NaN. Relative error 2e-7. */
PAGED__LANES float paged__exp(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float shifted = x * 1.44269504f + PAGED__ROUNDER, n = shifted - PAGED__ROUNDER;
    /* ln 2 in two parts; n times the first is exact. */
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.98756915e-4f;
    p = p * r + 1.39819995e-3f;
    p = p * r + 8.33345199e-3f;
    p = p * r + 4.16657962e-2f;
    p = p * r + 1.66666657e-1f;
    p = p * r + 5.00000000e-1f;
    p = (p * r) * r + r + 1.0f;
    return p * paged__float((paged__bits(shifted) - paged__bits(PAGED__ROUNDER) + 127u) << 23);
}

PAGED__LANES float paged__silu(float x) {
    return x / (1.0f + paged__exp(-x));
}

/* x / 2 * (1 + tanh u) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x^3). */
PAGED__LANES float paged__gelu(float x) {
    const float u2 = x * 1.59576912f * (1.0f + 0.044715f * x * x);
    return x / (1.0f + paged__exp(-u2));
}

/* ---- epilogue ---- */

PAGED__LANES void paged__finish_16(float *y, const float *a, const float *b, const float *bias_a,
                                   const float *bias_b, paged__epilogue epilogue) {
    float g[PAGED__N_LANES], u[PAGED__N_LANES];
    for (int i = 0; i < PAGED__N_LANES; i++) g[i] = bias_a ? a[i] + bias_a[i] : a[i];
    if (epilogue != PAGED__STORE)
        for (int i = 0; i < PAGED__N_LANES; i++) u[i] = bias_b ? b[i] + bias_b[i] : b[i];
    if (epilogue == PAGED__ADD)
        for (int i = 0; i < PAGED__N_LANES; i++) g[i] = u[i] + g[i];
    if (epilogue == PAGED__SWIGLU)
        for (int i = 0; i < PAGED__N_LANES; i++) g[i] = paged__silu(g[i]) * u[i];
    if (epilogue == PAGED__GEGLU)
        for (int i = 0; i < PAGED__N_LANES; i++) g[i] = paged__gelu(g[i]) * u[i];
    memcpy(y, g, sizeof g);
}

/* Behind the last row nothing is read or written. */
static void paged__finish_rows(float *y, const float *a, const float *b, const float *bias_a,
                               const float *bias_b, int32_t n, paged__epilogue epilogue) {
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

/* ---- activations ---- */

/* 1 / sqrt(mean(x^2) + eps); lane i sums the squares of i, i + 16, … in double, then lanes are added in
 * pairs. */
static float paged__rms_scale(const float *x, int32_t n, float eps) {
    double sum[PAGED__N_LANES] = {0};
    int32_t j = 0;
    for (; j + PAGED__N_LANES <= n; j += PAGED__N_LANES)
        for (int i = 0; i < PAGED__N_LANES; i++) sum[i] += (double)x[j + i] * (double)x[j + i];
    for (int i = 0; i < n - j; i++) sum[i] += (double)x[j + i] * (double)x[j + i];
    for (int width = PAGED__N_LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) sum[i] += sum[i + width];
    return (float)(1.0 / sqrt(sum[0] / n + (double)eps));
}

/* Blocks whose largest value is below 2^-100 count as zero; one that holds NaN or an infinity makes every
 * output of its token NaN. */
PAGED__LANES void paged__quantise(paged__act_block *out, const float *x) {
    uint32_t largest = 0;
    for (int i = 0; i < PAGED__ACT_BLOCK; i++) {
        const uint32_t size = paged__bits(x[i]) & 0x7fffffffu;
        largest = size > largest ? size : largest;
    }
    const float amax = paged__float(largest);
    const bool finite = largest < 0x7f800000u, counts = finite && amax >= 0x1p-100f;
    const float s = counts ? amax / 127.0f : finite ? 0.0f : NAN, inverse = counts ? 127.0f / amax : 0.0f;
    int32_t q[PAGED__ACT_BLOCK], sums[2] = {0, 0};
    for (int i = 0; i < PAGED__ACT_BLOCK; i++) {
        const float rounded = x[i] * inverse + PAGED__ROUNDER;
        q[i] = (int32_t)(paged__bits(rounded) - paged__bits(PAGED__ROUNDER));
    }
    if (!finite)
        for (int i = 0; i < PAGED__ACT_BLOCK; i++) q[i] = 0;
    for (int i = 0; i < PAGED__ACT_BLOCK; i++) out->q[i] = (int8_t)q[i];
    for (int i = 0; i < 16; i++) sums[0] += q[i];
    for (int i = 0; i < 16; i++) sums[1] += q[16 + i];
    out->s = s;
    out->s_sum = s * (float)(sums[0] + sums[1]);
    out->neg_sum = -(sums[0] + sums[1]);
    out->neg_first = -sums[0];
}

static void paged__act_quantised(const paged__act *act, int32_t token, const float *x, const float *weight,
                                 float scale) {
    const int32_t width = paged__group_tokens(act, token), n = act->n_cols;
    paged__act_block *out = paged__group_blocks(act, token) + token % PAGED__ACT_GROUP;
    for (int32_t first = 0; first < paged__act_blocks(n) * PAGED__ACT_BLOCK; first += PAGED__ACT_BLOCK) {
        float part[PAGED__ACT_BLOCK] = {0};
        const int32_t n_here = PAGED_MIN(PAGED__ACT_BLOCK, n - first);
        if (n_here > 0) memcpy(part, x + first, (size_t)n_here * sizeof(float));
        if (weight && n_here == PAGED__ACT_BLOCK)
            for (int i = 0; i < PAGED__ACT_BLOCK; i++) part[i] = (part[i] * scale) * weight[first + i];
        else if (weight)
            for (int i = 0; i < n_here; i++) part[i] = (part[i] * scale) * weight[first + i];
        paged__quantise(out, part);
        out += width;
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
