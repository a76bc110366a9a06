/* linear_avx2.c: linear layers for AVX2 (with FMA and F16C). See linear_kernels.h for the data and for the
 * chain of an output.
 *
 * Tile by tile, 512 columns are unpacked to a panel of bytes in L1, from which all tokens read, two at once
 * (linear_panel.h).
 * VPMADDUBSW multiplies unsigned by signed bytes and adds pairs into 16 bits, saturating. So that nothing
 * saturates, 8-bit formats keep their sign in the panel and it is moved over to the activation (|w| * q * sgn
 * w, pairs up to 128 * 127 * 2), and as many products are added in 16 bits as the format's largest u allows.
 */
#include <immintrin.h>

#include "ops/linear_lanes.h"

#define INLINE static inline __attribute__((always_inline))
/* Loops whose bounds are constants once a function is inlined. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

enum {
    VECS = 2,          /* of 8 rows */
    PANEL_BLOCK = 640, /* quants [8][64], d f32[16], then m, or d of the second half, f32[16] */
    PANEL_BLOCKS = PAGED__PANEL_COLS / PAGED__ACT_BLOCK,
    TOKENS = 2
};

/* Weights keep their sign in the panel, and there is no offset. */
INLINE bool is_signed(const paged__weight_type type) {
    return type == PAGED__W_Q8_0 || type == PAGED__W_IQ4_NL;
}
/* How many sums of pairs fit in 16 bits: 127 * 2 * largest u * this ≤ 32767. */
INLINE int pairs_in_16(const paged__weight_type type) {
    return is_signed(type) ? 1 : type == PAGED__W_Q6_K ? 2 : paged__high_bytes(type) == 64 ? 4 : 8;
}

typedef __m256 vec;

INLINE vec vec_zero(void) {
    return _mm256_setzero_ps();
}
INLINE vec vec_load(const float *p) {
    return _mm256_loadu_ps(p);
}
INLINE void vec_store(float *p, vec x) {
    _mm256_storeu_ps(p, x);
}
INLINE vec vec_add(vec a, vec b) {
    return _mm256_add_ps(a, b);
}
INLINE vec vec_fma(vec acc, vec w, float x) {
    return _mm256_fmadd_ps(w, _mm256_set1_ps(x), acc);
}

/* ---- unpacking ---- */

INLINE __m256i load(const uint8_t *p) {
    return _mm256_load_si256((const __m256i *)(const void *)p);
}

INLINE __m256i moved(__m256i bits, const int left) {
    return left < 0 ? _mm256_srli_epi32(bits, -left & 31) : _mm256_slli_epi32(bits, left & 31);
}

/* 8 rows (of half h of the tile) × columns 4 i … 4 i + 3. */
INLINE __m256i quants(const uint8_t *block, const int i, const int h, const paged__weight_type type) {
    const uint8_t *q = block + paged__high_bytes(type) + h * 32;
    if (type == PAGED__W_Q8_0) return _mm256_xor_si256(load(q + i * 64), _mm256_set1_epi8(-128));
    const __m256i both = load(q + i % 4 * 64);
    const __m256i low = _mm256_and_si256(i < 4 ? both : _mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
    if (type == PAGED__W_IQ4_NL) {
        const __m256i table =
            _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)paged__iq4_nl));
        return _mm256_xor_si256(_mm256_shuffle_epi8(table, low), _mm256_set1_epi8(-128));
    }
    if (paged__high_bytes(type) == 64)
        return _mm256_or_si256(low,
                               _mm256_and_si256(moved(load(block + h * 32), 4 - i), _mm256_set1_epi8(16)));
    if (paged__high_bytes(type) == 128)
        return _mm256_or_si256(low, _mm256_and_si256(moved(load(block + i / 4 * 64 + h * 32), 4 - i % 4 * 2),
                                                     _mm256_set1_epi8(48)));
    return low;
}

INLINE __m256 f32_of_f16(const uint8_t *src) {
    return _mm256_cvtph_ps(_mm_load_si128((const __m128i *)(const void *)src));
}
INLINE __m256 f32_of_u8(const uint8_t *src) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)src)));
}
INLINE __m256 f32_of_i8(const uint8_t *src) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)src)));
}

/* Rows 8 h … 8 h + 7; `second`: of the second half of the block's columns (Q6_K). */
INLINE __m256 scale_of(const uint8_t *unit, int64_t b, const int h, const int second,
                       const paged__weight_type type) {
    if (!paged__is_k(type)) return f32_of_f16(unit + b * 32 + h * 16);
    const uint8_t *at = unit + 64 + b * 32 + second * 16 + h * 8;
    return _mm256_mul_ps(f32_of_f16(unit + h * 16), type == PAGED__W_Q6_K ? f32_of_i8(at) : f32_of_u8(at));
}
INLINE __m256 min_of(const uint8_t *unit, int64_t b, const int h, const paged__weight_type type) {
    if (!paged__is_k(type)) return f32_of_f16(unit + 64 + b * 32 + h * 16);
    return _mm256_mul_ps(f32_of_f16(unit + 32 + h * 16), f32_of_u8(unit + 64 + b * 32 + 16 + h * 8));
}

INLINE void unpack_block(uint8_t *panel, const uint8_t *unit, int64_t b, const paged__weight_type type) {
    const uint8_t *block = unit + paged__head_bytes(type) + b * paged__block_bytes(type);
    float *scales = (float *)(void *)(panel + 512);
    UNROLL for (int h = 0; h < 2; h++) {
        UNROLL for (int i = 0; i < 8; i++)
            _mm256_store_si256((__m256i *)(void *)(panel + i * 64 + h * 32), quants(block, i, h, type));
        _mm256_store_ps(scales + h * 8, scale_of(unit, b, h, 0, type));
        if (type == PAGED__W_Q6_K) _mm256_store_ps(scales + 16 + h * 8, scale_of(unit, b, h, 1, type));
        if (paged__has_min(type)) _mm256_store_ps(scales + 16 + h * 8, min_of(unit, b, h, type));
    }
}

/* ---- products ---- */

INLINE __m256i offset(const paged__act_block *x, const int half, const paged__weight_type type) {
    const int shift = paged__zero_shift(type);
    if (shift < 0 || is_signed(type)) return _mm256_setzero_si256();
    const int32_t sum = type != PAGED__W_Q6_K ? x->neg_sum : half ? x->neg_sum - x->neg_first : x->neg_first;
    return _mm256_slli_epi32(_mm256_set1_epi32(sum), PAGED_MAX(shift, 0));
}

INLINE __m256i products(__m256i w, __m256i q, const paged__weight_type type) {
    if (is_signed(type)) return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(q, w));
    return _mm256_maddubs_epi16(w, q);
}

INLINE void block(vec acc[VECS][TOKENS], const uint8_t *panel, const paged__act_block *x, const int n_tokens,
                  const paged__weight_type type) {
    const int n_halves = type == PAGED__W_Q6_K ? 2 : 1, n_fours = 8 / n_halves, span = pairs_in_16(type);
    const __m256i ones = _mm256_set1_epi16(1);
    const float *scales = (const float *)(const void *)(panel + 512);
    UNROLL for (int half = 0; half < n_halves; half++) {
        __m256i dot[2][TOKENS], part[2][TOKENS];
        UNROLL for (int t = 0; t < n_tokens; t++) dot[0][t] = dot[1][t] = offset(x + t, half, type);
        UNROLL for (int k = 0; k < n_fours; k++) {
            const int i = half * 4 + k;
            UNROLL for (int t = 0; t < n_tokens; t++) {
                int32_t four;
                memcpy(&four, x[t].q + 4 * i, sizeof four);
                UNROLL for (int h = 0; h < 2; h++) {
                    const __m256i pairs =
                        products(load(panel + i * 64 + h * 32), _mm256_set1_epi32(four), type);
                    part[h][t] = k % span == 0 ? pairs : _mm256_add_epi16(part[h][t], pairs);
                    if (k % span == span - 1)
                        dot[h][t] = _mm256_add_epi32(dot[h][t], _mm256_madd_epi16(part[h][t], ones));
                }
            }
        }
        UNROLL for (int t = 0; t < n_tokens; t++) {
            UNROLL for (int h = 0; h < 2; h++) {
                const __m256 ds =
                    _mm256_mul_ps(_mm256_load_ps(scales + half * 16 + h * 8), _mm256_set1_ps(x[t].s));
                acc[h][t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[h][t]), ds, acc[h][t]);
            }
        }
    }
    if (!paged__has_min(type)) return;
    UNROLL for (int t = 0; t < n_tokens; t++) {
        UNROLL for (int h = 0; h < 2; h++) acc[h][t] =
            _mm256_fmadd_ps(_mm256_load_ps(scales + 16 + h * 8), _mm256_set1_ps(x[t].s_sum), acc[h][t]);
    }
}

/* ---- f32, f16, bf16 weights ---- */

INLINE __m256 column(const uint8_t *tile, int64_t k, const int h, const paged__weight_type type) {
    if (type == PAGED__W_F32) return _mm256_load_ps((const float *)(const void *)tile + k * 16 + h * 8);
    const uint8_t *at = tile + k * 32 + h * 16;
    if (type == PAGED__W_F16) return f32_of_f16(at);
    const __m128i half = _mm_load_si128((const __m128i *)(const void *)at);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

#include "ops/linear_panel.h"

const paged__linear_kernels_table paged__linear_avx2 = {.name = "avx2", .sums = sums, PAGED__LANES};
