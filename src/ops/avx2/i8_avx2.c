/* i8_avx2.c: the kernels of i8 (i8.h) for AVX2, and for AVX-512 without VNNI. Bytes are widened to 16 bits
 * and multiplied by VPMADDWD, which is exact (VPMADDUBSW would saturate). A register holds the four bytes of
 * four lanes of a tile; the sum of a lane comes in two halves, which are added at the end.
 *
 * qk: a tile is 4 registers of four keys each; 3 rows share them.
 * pv: 8 elements of V are 2 registers of four elements each; 4 rows share them.
 */
#include <immintrin.h>

#include "ops/i8.h"

enum { QK_ROWS = 3, PV_ROWS = 4, GROUPS = 4 };

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

INLINE __m128i load16(const void *bytes) {
    return _mm_loadu_si128((const __m128i *)bytes);
}

INLINE __m128i broadcast4(const void *bytes) {
    int32_t four;
    memcpy(&four, bytes, sizeof four);
    return _mm_set1_epi32(four);
}

/* The sums of 8 lanes whose halves lie in a (lanes 0 … 3) and b, as floats. */
INLINE __m256 sums_of(__m256i a, __m256i b) {
    /* hadd works within 128 bits: lanes 0 1 4 5 2 3 6 7. */
    return _mm256_cvtepi32_ps(_mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xd8));
}

/* ---- scores ---- */

INLINE void qk_tile(const paged__step *step, int32_t r, int j, const int n) {
    const uint8_t *k = step->k.at[j], *next = step->k.next[j];
    const paged__i8_q *q[QK_ROWS];
    __m256i acc[QK_ROWS][4];
    UNROLL for (int i = 0; i < n; i++) {
        q[i] = paged__i8_q_row(step, r + i);
        UNROLL for (int m = 0; m < 4; m++) acc[i][m] = _mm256_setzero_si256();
    }
    for (int64_t d = 0; d < step->head_dim_k; d += 4) {
        __m256i keys[4];
        _mm_prefetch((const char *)next + d * PAGED_TILE, _MM_HINT_T0);
        UNROLL for (int m = 0; m < 4; m++) keys[m] =
            _mm256_cvtepu8_epi16(load16(k + d * PAGED_TILE + m * 16));
        UNROLL for (int i = 0; i < n; i++) {
            __m256i four = _mm256_cvtepi8_epi16(broadcast4(q[i]->q + d));
            UNROLL for (int m = 0; m < 4; m++) acc[i][m] =
                _mm256_add_epi32(acc[i][m], _mm256_madd_epi16(keys[m], four));
        }
    }
    UNROLL for (int i = 0; i < n; i++) {
        float *s = step->s + (r + i) * PAGED_ATTN_STEP + j * PAGED_TILE;
        /* Half of the sum's begin, in each half of the lanes; it is even. */
        __m256i bias = _mm256_set1_epi32(q[i]->bias / 2);
        UNROLL for (int m = 0; m < 4; m += 2) {
            __m256 sum = sums_of(_mm256_add_epi32(acc[i][m], bias), _mm256_add_epi32(acc[i][m + 1], bias));
            sum = _mm256_mul_ps(sum, _mm256_set1_ps(q[i]->scale));
            _mm256_storeu_ps(s + m * 4, _mm256_mul_ps(sum, _mm256_loadu_ps(step->k.scale[j] + m * 4)));
        }
    }
}

static void qk(const paged__step *step) {
    for (int j = 0; j < PAGED__STEP_TILES; j++) {
        _mm_prefetch((const char *)step->k.next_scale[j], _MM_HINT_T0);
        _mm_prefetch((const char *)step->v.next_scale[j], _MM_HINT_T0);
        for (int32_t r = 0, n; r < step->n_rows; r += n) {
            n = paged__next_rows(step->n_rows - r, QK_ROWS);
            switch (n) {
            case 1:
                qk_tile(step, r, j, 1);
                break;
            case 2:
                qk_tile(step, r, j, 2);
                break;
            default:
                qk_tile(step, r, j, 3);
                break;
            }
        }
    }
}

/* ---- weights ---- */

/* Bits of numbers ≥ 0 are in the order of the numbers, and NaN is above them all. */
INLINE float top_of(__m256i a, __m256i b) {
    __m256i x = _mm256_max_epu32(a, b);
    __m128i y = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = _mm_max_epu32(y, _mm_shuffle_epi32(y, 0x4e));
    y = _mm_max_epu32(y, _mm_shuffle_epi32(y, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(y));
}

/* p of 8 tokens by the scales of their values; those scales are NaN, perhaps, where p is a zero because the
 * row does not see the token. `first` and `end` are relative to the first of the 8. */
INLINE __m256 weigh(const float *p, const float *v_scale, int32_t first, int32_t end) {
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i seen = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane),
                                       _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane));
    return _mm256_and_ps(_mm256_mul_ps(_mm256_loadu_ps(p), _mm256_loadu_ps(v_scale)),
                         _mm256_castsi256_ps(seen));
}

INLINE void weights_of_tile(paged__i8_p *row, int j, const float *p, const float *v_scale,
                            paged__range seen) {
    int32_t first = seen.first - j * PAGED_TILE, end = seen.end - j * PAGED_TILE;
    __m256 a = weigh(p, v_scale, first, end), b = weigh(p + 8, v_scale + 8, first - 8, end - 8);
    float top = top_of(_mm256_castps_si256(a), _mm256_castps_si256(b));
    __m256 by = _mm256_set1_ps(top >= PAGED__I8_P_MIN ? 255 / top : 0);
    row->scale[j] = top < PAGED__I8_P_MIN ? 0 : top / 255; /* NaN is kept */
    __m256i words = _mm256_packus_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(a, by)),
                                        _mm256_cvtps_epi32(_mm256_mul_ps(b, by)));
    words = _mm256_permute4x64_epi64(words, 0xd8);
    __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i *)(void *)(row->weight + j * PAGED_TILE), bytes);
}

static void softmax(const paged__step *step) {
    paged__i8_softmax(step, &paged__avx2_f32);
    for (int32_t r = 0; r < step->n_rows; r++)
        for (int j = 0; j < PAGED__STEP_TILES; j++)
            weights_of_tile(paged__i8_p_row(step, r), j, step->s + r * PAGED_ATTN_STEP + j * PAGED_TILE,
                            step->v.scale[j], step->seen[r]);
}

/* ---- values ---- */

/* The elements from d on, 8 of them, or 4 if `is_half`. */
INLINE void pv_lanes(const paged__step *step, int32_t r, int32_t j, int64_t d, bool is_half, const int n) {
    const uint8_t *v = (const uint8_t *)step->v.at[j] + d * 4,
                  *next = (const uint8_t *)step->v.next[j] + d * 4;
    int64_t group_bytes = step->head_dim_v * (int64_t)4;
    __m256i acc[PV_ROWS][2];
    UNROLL for (int i = 0; i < n; i++) acc[i][0] = acc[i][1] = _mm256_setzero_si256();
    UNROLL for (int g = 0; g < GROUPS; g++) {
        __m256i low = _mm256_cvtepi8_epi16(load16(v + g * group_bytes));
        __m256i high = is_half ? low : _mm256_cvtepi8_epi16(load16(v + g * group_bytes + 16));
        _mm_prefetch((const char *)next + g * group_bytes, _MM_HINT_T0);
        UNROLL for (int i = 0; i < n; i++) {
            const paged__i8_p *p = paged__i8_p_row(step, r + i);
            __m256i four = _mm256_cvtepu8_epi16(broadcast4(p->weight + j * PAGED_TILE + g * 4));
            acc[i][0] = _mm256_add_epi32(acc[i][0], _mm256_madd_epi16(low, four));
            acc[i][1] = _mm256_add_epi32(acc[i][1], _mm256_madd_epi16(high, four));
        }
    }
    UNROLL for (int i = 0; i < n; i++) {
        float *o = step->o + (r + i) * step->o_stride + d;
        __m256 scale = _mm256_set1_ps(paged__i8_p_row(step, r + i)->scale[j]);
        __m256 sum = _mm256_fmadd_ps(scale, sums_of(acc[i][0], acc[i][1]), _mm256_loadu_ps(o));
        _mm256_storeu_ps(o, sum);
    }
}

INLINE void pv_rows(const paged__step *step, int32_t r, const int n) {
    int32_t first = step->seen[r].first / PAGED_TILE, last = (step->seen[r + n - 1].end - 1) / PAGED_TILE;
    for (int32_t j = first; j <= last; j++) {
        int64_t dv = step->head_dim_v, d = 0;
        for (; d + 8 <= dv; d += 8) pv_lanes(step, r, j, d, false, n);
        /* What this writes into the 4 lanes behind the last element is in no result. */
        if (d < dv) pv_lanes(step, r, j, d, true, n);
    }
}

/* Where the rows of a call do not see the same tiles, weights and scales of zero make up for it. */
static void pv(const paged__step *step) {
    for (int32_t r = 0, n; r < step->n_rows; r += n) {
        n = paged__next_rows(step->n_rows - r, PV_ROWS);
        switch (n) {
        case 1:
            pv_rows(step, r, 1);
            break;
        case 2:
            pv_rows(step, r, 2);
            break;
        case 3:
            pv_rows(step, r, 3);
            break;
        default:
            pv_rows(step, r, 4);
            break;
        }
    }
}

const paged__type_kernels paged__avx2_i8 = {.q_bytes = paged__q_bytes_i8,
                                            .p_bytes = PAGED__I8_P_BYTES,
                                            .load_q = paged__load_q_i8,
                                            .qk = qk,
                                            .softmax = softmax,
                                            .pv = pv};
