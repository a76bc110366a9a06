/* ops/weights_bf16.h: rows of q and the weights of kernels that work on pairs of bf16, in AVX-512 BF16, whose
 * VDPBF16PS adds the products of two pairs to a float. Shared by attn_avx512_bf16.c and attn_amx.c.
 *
 * q (after scaling) and p are rounded to bf16, by at most 2^-8 of their value. The denominator is the sum of
 * the rounded p, so that the weights of a row sum to 1. The instruction rounds to nearest even and takes and
 * gives zero for denormals: keys, values, queries and weights below 2^-126 count as zero.
 */
#ifndef PAGED_OPS_WEIGHTS_BF16_H
#define PAGED_OPS_WEIGHTS_BF16_H

#include <immintrin.h>

#include "ops/ops.h"
#include "ops/softmax_avx512.h"

enum { P_BYTES = PAGED_ATTN_STEP * 2 };

INLINE __m512 dot(__m512 acc, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}

/* ---- q ---- */

static int32_t q_bytes(int32_t head_dim) {
    return paged__row_bytes((head_dim + 1) / 2 * 4);
}

/* The half pair behind an odd head_dim, and the padding, are zero. */
static void load_q(void *q, const float *src, float scale, int32_t head_dim) {
    uint8_t *row = q;
    int32_t n_row = q_bytes(head_dim) / 2;
    for (int32_t d = 0; d < n_row; d += 16) {
        __mmask16 mask = (__mmask16)(head_dim - d >= 16 ? 0xffff : (1u << PAGED_MAX(head_dim - d, 0)) - 1);
        __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, src + d), _mm512_set1_ps(scale));
        _mm256_storeu_si256((__m256i *)(void *)(row + d * 2), (__m256i)_mm512_cvtneps_pbh(x));
    }
}

/* ---- weights ---- */

/* 2^f = 1 + f * (C1 + f * (C2 + …)) for |f| ≤ 0.5, relative error 1.0e-4, little beside the 2^-8 of rounding
 * to bf16; fitted for the least maximum, and exact at 0. Products keep the vector units busy (two a cycle,
 * also beside additions, on Zen 5), so each instruction here costs time. */
#define C1 0.69328290f
#define C2 0.24221095f
#define C3 0.055008933f

/* exp2 for x ≤ 8; zero below PAGED__EXP2_MIN and where `mask` is not set; NaN is kept. */
INLINE __m512 rough_exp2_ps(__m512 x, __mmask16 mask) {
    __m512 f = fraction(x), n = _mm512_sub_ps(x, f);
    __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(C3), _mm512_set1_ps(C2));
    p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(C1));
    p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(1.0f));
    mask = _mm512_mask_cmp_ps_mask(mask, x, _mm512_set1_ps(PAGED__EXP2_MIN), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(mask, p, n);
}

INLINE void softmax_row(uint8_t *p, const float *s, uint64_t mask, float *l, float *o, int32_t n) {
    __m512 x[4], v_m = load_scores(x, s, mask, l, o, n), sum = _mm512_loadu_ps(l);
    UNROLL for (int j = 0; j < 4; j++) x[j] =
        rough_exp2_ps(_mm512_sub_ps(x[j], v_m), (__mmask16)(mask >> (j * 16)));
    __m512i ones = _mm512_set1_epi32(0x3f803f80);
    UNROLL for (int j = 0; j < 4; j += 2) {
        __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh(x[j + 1], x[j]);
        sum = dot(sum, pairs, ones);
        _mm512_storeu_si512(p + j * 32, pairs);
    }
    _mm512_storeu_ps(l, sum);
}

/* The rows r … end - 1, of which the first has its scores at s and its weights at p. */
INLINE void softmax_rows(const paged__step *step, const float *s, uint8_t *p, int32_t r, int32_t end) {
    for (; r < end; r++, s += PAGED_ATTN_STEP, p += step->p_stride) {
        uint64_t mask = paged__seen_mask(step->seen[r]);
        float *l = step->l + r * PAGED__L_LANES, *o = step->o + r * step->o_stride;
        if (mask == ~(uint64_t)0)
            softmax_row(p, s, ~(uint64_t)0, l, o, step->o_floats); /* without masks */
        else
            softmax_row(p, s, mask, l, o, step->o_floats);
    }
}

static void softmax(const paged__step *step) {
    softmax_rows(step, step->s, step->p, 0, step->n_rows);
}

#endif
