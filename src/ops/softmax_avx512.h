/* ops/softmax_avx512.h: what kernels of AVX-512 (F, DQ) share of a softmax. */
#ifndef PAGED_OPS_SOFTMAX_AVX512_H
#define PAGED_OPS_SOFTMAX_AVX512_H

#include <float.h>
#include <immintrin.h>

#include "ops/ops.h"

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

/* What is left of x behind the nearest integer, which is then exactly the difference. Two VREDUCEPS go in a
 * cycle, of VRNDSCALEPS, which gives the integer, one (Xeon). */
INLINE __m512 fraction(__m512 x) {
    return _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* exp2 for x ≤ 8; zero below PAGED__EXP2_MIN and where `mask` is not set. */
INLINE __m512 exp2_ps(__m512 x, __mmask16 mask) {
    __m512 f = fraction(x), n = _mm512_sub_ps(x, f);
    __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(PAGED__EXP2_C6), _mm512_set1_ps(PAGED__EXP2_C5));
    p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(PAGED__EXP2_C4));
    p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(PAGED__EXP2_C3));
    p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(PAGED__EXP2_C2));
    p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(PAGED__EXP2_C1));
    p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(1.0f));
    /* Not less than, so that NaN is kept. */
    mask = _mm512_mask_cmp_ps_mask(mask, x, _mm512_set1_ps(PAGED__EXP2_MIN), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(mask, p, n);
}

/* Rare, so kept out of the way of the common path. */
static __attribute__((noinline)) void rescale(float s_max, float *m, float *l, float *o, int32_t n) {
    __m512 factor = _mm512_set1_ps(paged__exp2(*m - s_max));
    _mm512_storeu_ps(l, _mm512_mul_ps(_mm512_loadu_ps(l), factor));
    for (int32_t d = 0; d < n; d += 16)
        _mm512_storeu_ps(o + d, _mm512_mul_ps(_mm512_loadu_ps(o + d), factor));
    *m = s_max;
}

/* The scores s[64] of a row, and what `softmax` does with them before it takes weights of them: returns m. */
INLINE __m512 load_scores(__m512 x[4], const float *s, uint64_t mask, float *l, float *o, int32_t n) {
    float *m = o + n;
    /* Not -inf, so that a row whose scores are all -inf has weights of zero and not NaN. */
    __m512 v_max = _mm512_set1_ps(-FLT_MAX);
    UNROLL for (int j = 0; j < 4; j++) {
        x[j] = _mm512_loadu_ps(s + j * 16);
        v_max = _mm512_mask_max_ps(v_max, (__mmask16)(mask >> (j * 16)), v_max, x[j]);
    }
    if (_mm512_cmp_ps_mask(v_max, _mm512_set1_ps(*m + PAGED__RESCALE), _CMP_GT_OQ))
        rescale(_mm512_reduce_max_ps(v_max), m, l, o, n);
    return _mm512_set1_ps(*m);
}

#endif
