/* ops/linear_vnni.h: what the files of AVX-512 kernels of linear layers share. */
#ifndef PAGED_OPS_LINEAR_VNNI_H
#define PAGED_OPS_LINEAR_VNNI_H

#include <immintrin.h>

#include "ops/linear_kernels.h"

#define INLINE static inline __attribute__((always_inline))
/* Loops whose bounds are constants once a function is inlined; loops that stay loops, as there are many
 * variants. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#define ROLLED _Pragma("clang loop unroll(disable)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#define ROLLED _Pragma("GCC unroll 1")
#endif

/* ---- one block of the packed format ---- */

/* The block's quants (and high bits before them). */
INLINE const uint8_t *block_of(const uint8_t *unit, int64_t b, const paged__weight_type type) {
    return unit + paged__head_bytes(type) + b * paged__block_bytes(type);
}

/* 16 rows × 4 columns as unsigned bytes: those from column 4 i on, i < 4, of half h of the block. */
INLINE __m512i quants(const uint8_t *block, int i, const int h, const paged__weight_type type) {
    const uint8_t *q = block + paged__high_bytes(type);
    if (type == PAGED__W_Q8_0) return _mm512_load_si512(q + h * 256 + i * 64);
    const __m512i both = _mm512_load_si512(q + i * 64), mask = _mm512_set1_epi8(15);
    const __m512i low = _mm512_and_si512(h ? _mm512_srli_epi16(both, 4) : both, mask);
    if (type == PAGED__W_IQ4_NL) {
        const __m128i *table = (const __m128i *)(const void *)paged__iq4_nl;
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table)), low);
    }
    if (!paged__high_bytes(type)) return low;
    /* Bit i, or i + 4, of 8; field i of two bits of 4. */
    const bool pairs = paged__high_bytes(type) == 128;
    const __m512i all = _mm512_load_si512(block + (pairs ? h * 64 : 0));
    const __m512i down = _mm512_srl_epi32(all, _mm_cvtsi32_si128(pairs ? 2 * i : i));
    const __m512i high = !pairs && h ? down : _mm512_slli_epi32(down, 4);
    return _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi8(pairs ? 48 : 16),
                                     0xf8); /* low | (high & c) */
}

INLINE __m512 f32_of_f16(const uint8_t *src) {
    return _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)(const void *)src));
}
INLINE __m512 f32_of_u8(const uint8_t *src) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)(const void *)src)));
}
INLINE __m512 f32_of_i8(const uint8_t *src) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)(const void *)src)));
}

/* d of half `half` (Q6_K only: 1) of block b. Products with 6- and 8-bit scales are exact. */
INLINE __m512 scale_of(const uint8_t *unit, int64_t b, const int half, const paged__weight_type type) {
    if (!paged__is_k(type)) return f32_of_f16(unit + b * 32);
    const uint8_t *at = unit + 64 + b * 32 + half * 16;
    return _mm512_mul_ps(f32_of_f16(unit), type == PAGED__W_Q6_K ? f32_of_i8(at) : f32_of_u8(at));
}
INLINE __m512 min_of(const uint8_t *unit, int64_t b, const paged__weight_type type) {
    if (!paged__is_k(type)) return f32_of_f16(unit + 64 + b * 32);
    return _mm512_mul_ps(f32_of_f16(unit + 32), f32_of_u8(unit + 64 + b * 32 + 16));
}

/* sums of paged__linear_kernels_table for F32, F16 and BF16; `tile` is the first. */
void paged__vnni_float_sums(float *out, const paged__matrix *w, const uint8_t *tile, int32_t n_tiles,
                            const paged__act *x, int32_t token0, int32_t n_tokens);

#endif
