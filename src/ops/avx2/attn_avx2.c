/* attn_avx2.c: the kernels of ops.h for AVX2, FMA and F16C.
 *
 * qk: tile by tile; two vectors hold one element d of 16 keys; 6 rows × 2 vectors are 12 of the 16 registers.
 * pv: 6 rows × 16 elements of V likewise. The chains are those of AVX-512, only fewer run side by side.
 * Functions that are always inlined take their row count and type as constants, which the switch in the
 * caller gives them; so every loop over rows and vectors is unrolled and the accumulators stay in registers.
 */
#include <float.h>
#include <immintrin.h>

#include "ops/ops.h"

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

INLINE __m256i load_i(const void *src) {
    return _mm256_loadu_si256((const __m256i *)src);
}

INLINE __m256 f32_of_f16(const void *src) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)src));
}

/* A lane holds two bf16, the even one low. The float is its 16 bits, shifted to the top. */
INLINE __m256 f32_of_pair(__m256i pair, int64_t which) {
    __m256i top = _mm256_sll_epi32(pair, _mm_cvtsi32_si128(which & 1 ? 0 : 16));
    return _mm256_castsi256_ps(_mm256_and_si256(top, _mm256_set1_epi32((int)0xffff0000u)));
}

/* Lanes 0 … n - 1, n ≤ 8. */
INLINE __m256i lanes_below(int32_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* Keys 8 * half … 8 * half + 7, element d. */
INLINE __m256 load_k(const void *tile, int64_t d, int64_t half, const paged_type type) {
    const uint8_t *bytes = tile;
    if (type == PAGED_TYPE_F32)
        return _mm256_loadu_ps((const float *)(const void *)(bytes + d * 64 + half * 32));
    if (type == PAGED_TYPE_F16) return f32_of_f16(bytes + d * 32 + half * 16);
    return f32_of_pair(load_i(bytes + (d >> 1) * 64 + half * 32), d);
}

/* Token t of the tile, elements d … d + 7. */
INLINE __m256 load_v(const void *tile, int64_t t, int64_t d, int64_t head_dim, const paged_type type) {
    const uint8_t *bytes = tile;
    if (type == PAGED_TYPE_F32)
        return _mm256_loadu_ps((const float *)(const void *)(bytes + (t * head_dim + d) * 4));
    if (type == PAGED_TYPE_F16) return f32_of_f16(bytes + (t * head_dim + d) * 2);
    return f32_of_pair(load_i(bytes + ((t >> 1) * head_dim + d) * 4), t);
}

/* The last head_dim % 8 elements: nothing behind them is read. */
INLINE __m256 load_v_tail(const void *tile, int64_t t, int64_t d, int64_t head_dim, const paged_type type) {
    const uint8_t *bytes = tile;
    __m256i mask = lanes_below((int32_t)(head_dim - d));
    if (type == PAGED_TYPE_F32)
        return _mm256_maskload_ps((const float *)(const void *)(bytes + (t * head_dim + d) * 4), mask);
    if (type == PAGED_TYPE_F16) {
        uint16_t part[8] = {0};
        memcpy(part, bytes + (t * head_dim + d) * 2, (size_t)(head_dim - d) * 2);
        return f32_of_f16(part);
    }
    return f32_of_pair(
        _mm256_maskload_epi32((const int *)(const void *)(bytes + ((t >> 1) * head_dim + d) * 4), mask), t);
}

INLINE void prefetch_k(const void *tile, int64_t d, const paged_type type) {
    _mm_prefetch((const char *)tile + d * (type == PAGED_TYPE_F32 ? 64 : 32), _MM_HINT_T0);
}

INLINE void prefetch_v(const void *tile, int64_t t, int64_t d, int64_t head_dim, const paged_type type) {
    int64_t element = (t * head_dim + d) * (type == PAGED_TYPE_F32 ? 4 : 2);
    _mm_prefetch((const char *)tile + element, _MM_HINT_T0);
}

INLINE void qk_rows(float *s, const float *q, int64_t q_stride, const void *tile, const void *next,
                    int32_t head_dim, const int n_rows, const paged_type type) {
    __m256 acc[PAGED__ROWS][2];
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int j = 0; j < 2; j++) acc[r][j] = _mm256_setzero_ps();
    }
    for (int64_t d = 0; d < head_dim; d++) {
        __m256 k[2] = {load_k(tile, d, 0, type), load_k(tile, d, 1, type)};
        prefetch_k(next, d, type);
        UNROLL for (int r = 0; r < n_rows; r++) {
            __m256 qd = _mm256_broadcast_ss(q + r * q_stride + d);
            UNROLL for (int j = 0; j < 2; j++) acc[r][j] = _mm256_fmadd_ps(qd, k[j], acc[r][j]);
        }
    }
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int j = 0; j < 2; j++) _mm256_storeu_ps(s + r * PAGED_ATTN_STEP + j * 8, acc[r][j]);
    }
}

INLINE void qk(float *s, const float *q, int64_t q_stride, int32_t n_rows, const paged__tiles *tiles,
               int32_t head_dim, const paged_type type) {
    for (int32_t j = 0; j < PAGED__STEP_TILES; j++, s += PAGED_TILE) switch (n_rows) {
        case 1:
            qk_rows(s, q, q_stride, tiles->at[j], tiles->next[j], head_dim, 1, type);
            break;
        case 2:
            qk_rows(s, q, q_stride, tiles->at[j], tiles->next[j], head_dim, 2, type);
            break;
        case 3:
            qk_rows(s, q, q_stride, tiles->at[j], tiles->next[j], head_dim, 3, type);
            break;
        case 4:
            qk_rows(s, q, q_stride, tiles->at[j], tiles->next[j], head_dim, 4, type);
            break;
        case 5:
            qk_rows(s, q, q_stride, tiles->at[j], tiles->next[j], head_dim, 5, type);
            break;
        default:
            qk_rows(s, q, q_stride, tiles->at[j], tiles->next[j], head_dim, 6, type);
            break;
        }
}

/* n_vecs vectors of 8 elements from d on. */
INLINE void pv_rows(float *o, int64_t o_stride, const float *p, const paged__tiles *tiles, int32_t t0,
                    int32_t t1, int64_t d, int64_t head_dim, const int n_rows, const int n_vecs,
                    const bool tail, const paged_type type) {
    __m256 acc[PAGED__ROWS][2];
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int j = 0; j < n_vecs; j++) acc[r][j] = _mm256_loadu_ps(o + r * o_stride + d + j * 8);
    }
    for (int64_t t = t0; t < t1;) {
        const void *tile = tiles->at[t / PAGED_TILE], *next = tiles->next[t / PAGED_TILE];
        int64_t end = PAGED_MIN((t / PAGED_TILE + 1) * PAGED_TILE, (int64_t)t1);
        for (; t < end; t++) {
            __m256 v[2];
            prefetch_v(next, t % PAGED_TILE, d, head_dim, type);
            UNROLL for (int j = 0; j < n_vecs; j++) v[j] =
                tail ? load_v_tail(tile, t % PAGED_TILE, d, head_dim, type)
                     : load_v(tile, t % PAGED_TILE, d + j * 8, head_dim, type);
            UNROLL for (int r = 0; r < n_rows; r++) {
                __m256 weight = _mm256_broadcast_ss(p + r * PAGED_ATTN_STEP + t);
                UNROLL for (int j = 0; j < n_vecs; j++) acc[r][j] = _mm256_fmadd_ps(weight, v[j], acc[r][j]);
            }
        }
    }
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int j = 0; j < n_vecs; j++) _mm256_storeu_ps(o + r * o_stride + d + j * 8, acc[r][j]);
    }
}

INLINE void pv_dims(float *o, int64_t o_stride, const float *p, const paged__tiles *tiles, int32_t t0,
                    int32_t t1, int32_t head_dim, const int n_rows, const paged_type type) {
    int32_t d = 0;
    for (; d + 16 <= head_dim; d += 16)
        pv_rows(o, o_stride, p, tiles, t0, t1, d, head_dim, n_rows, 2, false, type);
    for (; d + 8 <= head_dim; d += 8)
        pv_rows(o, o_stride, p, tiles, t0, t1, d, head_dim, n_rows, 1, false, type);
    if (d < head_dim) pv_rows(o, o_stride, p, tiles, t0, t1, d, head_dim, n_rows, 1, true, type);
}

INLINE void pv(float *o, int64_t o_stride, const float *p, int32_t n_rows, const paged__tiles *tiles,
               int32_t t0, int32_t t1, int32_t head_dim, const paged_type type) {
    switch (n_rows) {
    case 1:
        pv_dims(o, o_stride, p, tiles, t0, t1, head_dim, 1, type);
        break;
    case 2:
        pv_dims(o, o_stride, p, tiles, t0, t1, head_dim, 2, type);
        break;
    case 3:
        pv_dims(o, o_stride, p, tiles, t0, t1, head_dim, 3, type);
        break;
    case 4:
        pv_dims(o, o_stride, p, tiles, t0, t1, head_dim, 4, type);
        break;
    case 5:
        pv_dims(o, o_stride, p, tiles, t0, t1, head_dim, 5, type);
        break;
    default:
        pv_dims(o, o_stride, p, tiles, t0, t1, head_dim, 6, type);
        break;
    }
}

/* exp2 for x ≤ 8; zero below PAGED__EXP2_MIN and where `valid` is not set. */
INLINE __m256 exp2_ps(__m256 x, __m256i valid) {
    __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 f = _mm256_sub_ps(x, n);
    __m256 p = _mm256_fmadd_ps(f, _mm256_set1_ps(PAGED__EXP2_C6), _mm256_set1_ps(PAGED__EXP2_C5));
    p = _mm256_fmadd_ps(f, p, _mm256_set1_ps(PAGED__EXP2_C4));
    p = _mm256_fmadd_ps(f, p, _mm256_set1_ps(PAGED__EXP2_C3));
    p = _mm256_fmadd_ps(f, p, _mm256_set1_ps(PAGED__EXP2_C2));
    p = _mm256_fmadd_ps(f, p, _mm256_set1_ps(PAGED__EXP2_C1));
    p = _mm256_fmadd_ps(f, p, _mm256_set1_ps(1.0f));
    /* p lies in [0.7, 1.5], so that adding n to its exponent cannot leave the normal range. NaN: n is
     * 2^31, which shifts out, and p stays NaN. */
    p = _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
    __m256 keep = _mm256_cmp_ps(x, _mm256_set1_ps(PAGED__EXP2_MIN), _CMP_NLT_UQ);
    return _mm256_and_ps(p, _mm256_and_ps(keep, _mm256_castsi256_ps(valid)));
}

INLINE float reduce_max(__m256 v) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

/* Rare, so kept out of the way of the common path. */
static __attribute__((noinline)) void rescale(float s_max, float *m, float *l, float *o, int32_t n) {
    __m256 factor = _mm256_set1_ps(paged__exp2(*m - s_max));
    for (int32_t i = 0; i < PAGED__L_LANES; i += 8)
        _mm256_storeu_ps(l + i, _mm256_mul_ps(_mm256_loadu_ps(l + i), factor));
    for (int32_t d = 0; d < n; d += 8) _mm256_storeu_ps(o + d, _mm256_mul_ps(_mm256_loadu_ps(o + d), factor));
    *m = s_max;
}

static void softmax(float *s, int32_t n_valid, float *m, float *l, float *o, int32_t n) {
    /* Not -inf, so that a row whose scores are all -inf has weights of zero and not NaN. */
    __m256 lowest = _mm256_set1_ps(-FLT_MAX), v_max = lowest;
    for (int32_t t = 0; t < PAGED_ATTN_STEP; t += 8) {
        __m256 valid = _mm256_castsi256_ps(lanes_below(n_valid - t));
        v_max = _mm256_max_ps(v_max, _mm256_blendv_ps(lowest, _mm256_loadu_ps(s + t), valid));
    }
    float s_max = reduce_max(v_max);
    if (s_max > *m + PAGED__RESCALE) rescale(s_max, m, l, o, n);
    __m256 v_m = _mm256_set1_ps(*m), sum[2] = {_mm256_loadu_ps(l), _mm256_loadu_ps(l + 8)};
    for (int32_t t = 0; t < PAGED_ATTN_STEP; t += 16) UNROLL for (int j = 0; j < 2; j++) {
            __m256 x = _mm256_sub_ps(_mm256_loadu_ps(s + t + j * 8), v_m);
            x = exp2_ps(x, lanes_below(n_valid - t - j * 8));
            sum[j] = _mm256_add_ps(sum[j], x);
            _mm256_storeu_ps(s + t + j * 8, x);
        }
    _mm256_storeu_ps(l, sum[0]);
    _mm256_storeu_ps(l + 8, sum[1]);
}

static void merge(float *acc, float a, const float *part, float b, int32_t n) {
    __m256 va = _mm256_set1_ps(a), vb = _mm256_set1_ps(b);
    for (int32_t d = 0; d < n; d += 8) {
        __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(acc + d), va);
        _mm256_storeu_ps(acc + d, _mm256_fmadd_ps(_mm256_loadu_ps(part + d), vb, scaled));
    }
}

static void divide(float *out, const float *o, float l, int32_t n) {
    __m256 vl = _mm256_set1_ps(l), zero = _mm256_setzero_ps();
    int32_t d = 0;
    for (; d + 8 <= n; d += 8)
        _mm256_storeu_ps(out + d, _mm256_add_ps(_mm256_div_ps(_mm256_loadu_ps(o + d), vl), zero));
    for (; d < n; d++) out[d] = o[d] / l + 0.0f;
}

static void to_f32_f16(float *dst, const void *src, int64_t n) {
    const uint8_t *bytes = src;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, f32_of_f16(bytes + i * 2));
    for (; i < n; i++) {
        uint16_t h;
        memcpy(&h, bytes + i * 2, sizeof h);
        dst[i] = _cvtsh_ss(h);
    }
}

static void to_f32_bf16(float *dst, const void *src, int64_t n) {
    const uint8_t *bytes = src;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(bytes + i * 2)));
        _mm256_storeu_ps(dst + i, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
    }
    for (; i < n; i++) {
        uint16_t h;
        memcpy(&h, bytes + i * 2, sizeof h);
        dst[i] = paged__bf16_to_f32(h);
    }
}

static void to_f32_f32(float *dst, const void *src, int64_t n) {
    memcpy(dst, src, (size_t)n * sizeof(float));
}

static void unpack_bf16(float *dst, const void *src, int32_t n_pairs, int32_t width) {
    const uint8_t *bytes = src;
    for (int64_t p = 0; p < n_pairs; p++, bytes += width * 4, dst += 2 * width) {
        int32_t i = 0;
        for (; i + 8 <= width; i += 8) {
            __m256i pair = load_i(bytes + i * 4);
            _mm256_storeu_ps(dst + i, f32_of_pair(pair, 0));
            _mm256_storeu_ps(dst + width + i, f32_of_pair(pair, 1));
        }
        for (; i < width; i++) {
            uint16_t h[2];
            memcpy(h, bytes + i * 4, sizeof h);
            dst[i] = paged__bf16_to_f32(h[0]);
            dst[width + i] = paged__bf16_to_f32(h[1]);
        }
    }
}

/* 8 floats limited to ±limit; NaN stays (the second operand of min and max wins). */
INLINE __m256 load_limited(const float *src, float limit, int64_t *n_nan) {
    __m256 x = _mm256_loadu_ps(src);
    *n_nan += __builtin_popcount((unsigned)_mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    return _mm256_max_ps(_mm256_set1_ps(-limit), _mm256_min_ps(_mm256_set1_ps(limit), x));
}

static int64_t from_f32_f16(void *dst, const float *src, int64_t n) {
    uint8_t *bytes = dst;
    int64_t n_nan = 0, i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 x = load_limited(src + i, 65504.0f, &n_nan);
        _mm_storeu_si128((__m128i *)(void *)(bytes + i * 2), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    for (; i < n; i++) {
        uint16_t h = paged__f32_to_f16(src[i]);
        n_nan += src[i] != src[i];
        memcpy(bytes + i * 2, &h, sizeof h);
    }
    return n_nan;
}

static int64_t from_f32_bf16(void *dst, const float *src, int64_t n) {
    uint8_t *bytes = dst;
    int64_t n_nan = 0, i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 x = load_limited(src + i, 0x1.fep127f, &n_nan);
        __m256i u = _mm256_castps_si256(x), top = _mm256_srli_epi32(u, 16);
        __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
        __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
        __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        rounded = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), quiet, nan);
        __m128i half =
            _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
        _mm_storeu_si128((__m128i *)(void *)(bytes + i * 2), half);
    }
    for (; i < n; i++) {
        uint16_t h = paged__f32_to_bf16(src[i]);
        n_nan += src[i] != src[i];
        memcpy(bytes + i * 2, &h, sizeof h);
    }
    return n_nan;
}

static int64_t from_f32_f32(void *dst, const float *src, int64_t n) {
    int64_t n_nan = 0;
    memcpy(dst, src, (size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++) n_nan += src[i] != src[i];
    return n_nan;
}

#define OF_TYPE(name, type)                                                                                  \
    static void qk_##name(float *s, const float *q, int64_t q_stride, int32_t n_rows,                        \
                          const paged__tiles *tiles, int32_t head_dim) {                                     \
        qk(s, q, q_stride, n_rows, tiles, head_dim, type);                                                   \
    }                                                                                                        \
    static void pv_##name(float *o, int64_t o_stride, const float *p, int32_t n_rows,                        \
                          const paged__tiles *tiles, int32_t t0, int32_t t1, int32_t head_dim) {             \
        pv(o, o_stride, p, n_rows, tiles, t0, t1, head_dim, type);                                           \
    }

OF_TYPE(f16, PAGED_TYPE_F16)
OF_TYPE(f32, PAGED_TYPE_F32)
OF_TYPE(bf16, PAGED_TYPE_BF16)

const paged__kernels paged__kernels_avx2 = {
    .name = "avx2",
    .qk = {qk_f16, qk_f32, qk_bf16},
    .softmax = softmax,
    .pv = {pv_f16, pv_f32, pv_bf16},
    .merge = merge,
    .divide = divide,
    .to_f32 = {to_f32_f16, to_f32_f32, to_f32_bf16},
    .unpack_bf16 = unpack_bf16,
    .from_f32 = {from_f32_f16, from_f32_f32, from_f32_bf16},
};
