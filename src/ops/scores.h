/* ops/scores.h: what becomes of scores between Q · K and the softmax: softcap and ALiBi. Plain C on 64 scores
 * without a branch, which each ISA folder compiles for its own instructions. A score depends on itself and
 * its place alone, so it has the same bits in every batch. Scores are in units of log2. */
#ifndef PAGED_OPS_SCORES_H
#define PAGED_OPS_SCORES_H

#include <math.h>

#include "ops/ops.h"

/* tanh(x) / x = 1 + u * (C0 + u * (C1 + …)), u = x * x, for |x| < 0.6: Chebyshev fit, error 4e-10. */
#define PAGED__TANH_C0 -0.3333333323f
#define PAGED__TANH_C1 0.1333331287f
#define PAGED__TANH_C2 -0.05396155178f
#define PAGED__TANH_C3 0.021788322f
#define PAGED__TANH_C4 -0.008410070802f
#define PAGED__TANH_C5 0.00237076564f

static inline uint32_t paged__bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float paged__float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Within 2 units in the last place; NaN stays NaN, infinity gives 1. Choices are made on the bits of |x|,
 * since compilers take a comparison of floats for control flow, which they do not vectorise. */
static inline float paged__tanh(float x) {
    const uint32_t split = 0x3f19999a /* 0.6 */, most = 0x41200000 /* 10 */, infinity = 0x7f800000;
    uint32_t sign = paged__bits(x) & 0x80000000u, a = paged__bits(x) ^ sign;
    float u = x * x, p = fmaf(u, PAGED__TANH_C5, PAGED__TANH_C4);
    p = fmaf(u, p, PAGED__TANH_C3);
    p = fmaf(u, p, PAGED__TANH_C2);
    p = fmaf(u, p, PAGED__TANH_C1);
    p = fmaf(u, p, PAGED__TANH_C0);
    uint32_t near = paged__bits(fmaf(x * u, p, x));

    /* 1 - 2 / (exp(2 |x|) + 1), where it loses no digits. exp2 as in ops.h, of 0 … 29. */
    const float magic = 12582912.0f;
    float y = paged__float(PAGED_MIN(a, most)) * 2.8853900818f, shifted = y + magic,
          f = y - (shifted - magic), e = fmaf(f, PAGED__EXP2_C6, PAGED__EXP2_C5);
    e = fmaf(f, e, PAGED__EXP2_C4);
    e = fmaf(f, e, PAGED__EXP2_C3);
    e = fmaf(f, e, PAGED__EXP2_C2);
    e = fmaf(f, e, PAGED__EXP2_C1);
    e = fmaf(f, e, 1.0f);
    e = paged__float(paged__bits(e) + (paged__bits(shifted) << 23));
    uint32_t far = paged__bits(1.0f - 2.0f / (e + 1.0f)) | sign;
    uint32_t is_far = 0u - (uint32_t)((a >= split) & (a <= infinity));
    return paged__float((far & is_far) | (near & ~is_far));
}

/* s[64] = cap * tanh(s / cap) */
static inline void paged__softcap(float *s, float cap) {
    float inverse = 1.0f / cap;
    for (int32_t t = 0; t < PAGED_ATTN_STEP; t++) s[t] = cap * paged__tanh(s[t] * inverse);
}

/* s[64] += slope * (first + t): `first` is the distance of token 0 of the step from the query. */
static inline void paged__alibi(float *s, float slope, int32_t first) {
    for (int32_t t = 0; t < PAGED_ATTN_STEP; t++) s[t] = fmaf(slope, (float)(first + t), s[t]);
}

#endif
