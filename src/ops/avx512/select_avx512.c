/* select.h for AVX-512: gather compresses sixteen elements at a time, in a register, since a compressing
 * store is slow on some processors. */
#define NAME(x) paged__select_##x##_avx512

#include "ops/select_body.h"

int32_t paged__select_gather_avx512(const float *x, int32_t n, float floor, float *values, int32_t *places) {
    const __m512 least = _mm512_set1_ps(floor);
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    int32_t n_found = 0;
    for (int32_t i = 0; i < n; i += LANES) {
        const __mmask16 inside = n - i < LANES ? (__mmask16)((1u << (n - i)) - 1) : (__mmask16)0xffff;
        const __m512 v = _mm512_maskz_loadu_ps(inside, x + i);
        const __mmask16 found = _mm512_mask_cmp_ps_mask(inside, v, least, _CMP_GE_OQ);
        if (!found) continue;
        const __m512i at = _mm512_add_epi32(_mm512_set1_epi32(i), lanes);
        _mm512_storeu_ps(values + n_found, _mm512_maskz_compress_ps(found, v));
        _mm512_storeu_si512(places + n_found, _mm512_maskz_compress_epi32(found, at));
        n_found += __builtin_popcount(found);
    }
    return n_found;
}
