/* pack_avx512.c: plain rows of 16 tokens as packed tiles (paged/kv.h), for AVX-512. The layout of K is a
 * transposition: of elements in f32, of pairs of elements in bf16, and of pairs that are then parted in f16.
 * Nothing behind a row's head_dim elements is read; an odd one is paired with zero. */
#include <immintrin.h>

#include "ops/ops.h"

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* x[16] of 16 words each: x[i] word j <-> x[j] word i. */
INLINE void transpose(__m512i x[16]) {
    __m512i y[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    /* x[4 i + c]: lane L has column 4 L + c of the rows 4 i … 4 i + 3. */
    UNROLL for (int i = 0; i < 16; i += 4) {
        UNROLL for (int c = 0; c < 2; c++) {
            x[i + 2 * c] = _mm512_unpacklo_epi64(y[i + c], y[i + c + 2]);
            x[i + 2 * c + 1] = _mm512_unpackhi_epi64(y[i + c], y[i + c + 2]);
        }
    }
    UNROLL for (int c = 0; c < 4; c++) {
        __m512i even_low = _mm512_shuffle_i32x4(x[c], x[4 + c], 0x88),
                even_high = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0x88),
                odd_low = _mm512_shuffle_i32x4(x[c], x[4 + c], 0xdd),
                odd_high = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0xdd);
        y[c] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
        y[4 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
        y[8 + c] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
        y[12 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
    }
    UNROLL for (int i = 0; i < 16; i++) x[i] = y[i];
}

/* Words of 4 bytes from byte `at` of each row on, transposed; half words under `mask` are read. */
INLINE void load_columns(__m512i x[16], const void *const *rows, int64_t at, __mmask32 mask) {
    UNROLL for (int i = 0; i < 16; i++) x[i] = _mm512_maskz_loadu_epi16(mask, (const uint8_t *)rows[i] + at);
    transpose(x);
}

/* For n_halves half words, 1 … 32 of which count. */
INLINE __mmask32 mask_of(int64_t n_halves) {
    return n_halves >= 32 ? 0xffffffff : (1u << n_halves) - 1;
}

/* [words][16], rows of n_halves half words. */
INLINE void pack_words(void *tile, const void *const *rows, int64_t n_halves) {
    uint8_t *to = tile;
    for (int64_t at = 0; at < n_halves; at += 32) {
        __m512i x[16];
        load_columns(x, rows, at * 2, mask_of(n_halves - at));
        int64_t n_words = (PAGED_MIN(n_halves - at, (int64_t)32) + 1) / 2;
        if (n_words == 16) {
            UNROLL for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * 64, x[i]);
        } else {
            for (int64_t i = 0; i < n_words; i++) _mm512_storeu_si512(to + i * 64, x[i]);
        }
        to += n_words * 64;
    }
}

void paged__pack_k_f32_avx512(void *tile, const void *const *rows, int32_t head_dim) {
    pack_words(tile, rows, (int64_t)head_dim * 2);
}

void paged__pack_k_bf16_avx512(void *tile, const void *const *rows, int32_t head_dim) {
    pack_words(tile, rows, head_dim);
}

void paged__pack_k_f16_avx512(void *tile, const void *const *rows, int32_t head_dim) {
    uint8_t *to = tile;
    for (int64_t at = 0; at < head_dim; at += 32) {
        __m512i x[16];
        load_columns(x, rows, at * 2, mask_of(head_dim - at));
        int64_t n = PAGED_MIN(head_dim - at, (int64_t)32);
        for (int64_t i = 0; i < n; i++) {
            __m512i half = i % 2 ? _mm512_srli_epi32(x[i / 2], 16) : x[i / 2];
            _mm256_storeu_si256((__m256i *)(void *)(to + i * 32), _mm512_cvtepi32_epi16(half));
        }
        to += n * 32;
    }
}

INLINE __m512i pair_rows(__m256i low, __m256i high) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

/* [8][head_dim][2] */
void paged__pack_v_bf16_avx512(void *tile, const void *const *rows, int32_t head_dim) {
    uint8_t *to = tile;
    for (int64_t i = 0; i < PAGED_TILE; i += 2, to += (int64_t)head_dim * 4) {
        const uint8_t *low = rows[i], *high = rows[i + 1];
        int64_t d = 0;
        for (; d + 16 <= head_dim; d += 16)
            _mm512_storeu_si512(to + d * 4,
                                pair_rows(_mm256_loadu_si256((const __m256i *)(const void *)(low + d * 2)),
                                          _mm256_loadu_si256((const __m256i *)(const void *)(high + d * 2))));
        if (d == head_dim) continue;
        __mmask16 mask = (__mmask16)mask_of(head_dim - d);
        _mm512_mask_storeu_epi32(to + d * 4, mask,
                                 pair_rows(_mm256_maskz_loadu_epi16(mask, low + d * 2),
                                           _mm256_maskz_loadu_epi16(mask, high + d * 2)));
    }
}
