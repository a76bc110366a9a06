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
#include "ops/scores.h"

enum { ROWS = 6 };

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

INLINE void qk_rows(const paged__step *step, int32_t first_row, int32_t tile, const int n_rows,
                    const paged_type type) {
    const void *at = step->k.at[tile], *next = step->k.next[tile];
    const uint8_t *q = step->q + first_row * step->q_stride;
    float *s = step->s + first_row * PAGED_ATTN_STEP + tile * PAGED_TILE;
    __m256 acc[ROWS][2];
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int j = 0; j < 2; j++) acc[r][j] = _mm256_setzero_ps();
    }
    for (int64_t d = 0; d < step->head_dim_k; d++) {
        __m256 k[2] = {load_k(at, d, 0, type), load_k(at, d, 1, type)};
        prefetch_k(next, d, type);
        UNROLL for (int r = 0; r < n_rows; r++) {
            __m256 qd = _mm256_broadcast_ss((const float *)(const void *)(q + r * step->q_stride) + d);
            UNROLL for (int j = 0; j < 2; j++) acc[r][j] = _mm256_fmadd_ps(qd, k[j], acc[r][j]);
        }
    }
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int j = 0; j < 2; j++) _mm256_storeu_ps(s + r * PAGED_ATTN_STEP + j * 8, acc[r][j]);
    }
}

INLINE void qk_block(const paged__step *step, int32_t r, int32_t n, int32_t tile, const paged_type type) {
    switch (n) {
    case 1:
        qk_rows(step, r, tile, 1, type);
        break;
    case 2:
        qk_rows(step, r, tile, 2, type);
        break;
    case 3:
        qk_rows(step, r, tile, 3, type);
        break;
    case 4:
        qk_rows(step, r, tile, 4, type);
        break;
    case 5:
        qk_rows(step, r, tile, 5, type);
        break;
    default:
        qk_rows(step, r, tile, 6, type);
        break;
    }
}

INLINE void qk(const paged__step *step, const paged_type type) {
    for (int32_t r = 0, n; r < step->n_rows; r += n) {
        n = paged__next_rows(step->n_rows - r, ROWS);
        for (int32_t tile = 0; tile < PAGED__STEP_TILES; tile++) qk_block(step, r, n, tile, type);
    }
}

/* n_vecs vectors of 8 elements from d on. */
INLINE void pv_rows(const paged__step *step, int32_t first_row, int32_t t0, int32_t t1, int64_t d,
                    const int n_rows, const int n_vecs, const bool tail, const paged_type type) {
    int64_t head_dim = step->head_dim_v;
    float *o = step->o + first_row * step->o_stride + d;
    const uint8_t *p = step->p + first_row * step->p_stride;
    __m256 acc[ROWS][2];
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int j = 0; j < n_vecs; j++) acc[r][j] = _mm256_loadu_ps(o + r * step->o_stride + j * 8);
    }
    for (int64_t t = t0; t < t1;) {
        const void *tile = step->v.at[t / PAGED_TILE], *next = step->v.next[t / PAGED_TILE];
        int64_t end = PAGED_MIN((t / PAGED_TILE + 1) * PAGED_TILE, (int64_t)t1);
        for (; t < end; t++) {
            __m256 v[2];
            prefetch_v(next, t % PAGED_TILE, d, head_dim, type);
            UNROLL for (int j = 0; j < n_vecs; j++) v[j] =
                tail ? load_v_tail(tile, t % PAGED_TILE, d, head_dim, type)
                     : load_v(tile, t % PAGED_TILE, d + j * 8, head_dim, type);
            UNROLL for (int r = 0; r < n_rows; r++) {
                __m256 weight =
                    _mm256_broadcast_ss((const float *)(const void *)(p + r * step->p_stride) + t);
                UNROLL for (int j = 0; j < n_vecs; j++) acc[r][j] = _mm256_fmadd_ps(weight, v[j], acc[r][j]);
            }
        }
    }
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int j = 0; j < n_vecs; j++) _mm256_storeu_ps(o + r * step->o_stride + j * 8, acc[r][j]);
    }
}

INLINE void pv_dims(const paged__step *step, int32_t r, int32_t t0, int32_t t1, const int n_rows,
                    const paged_type type) {
    int32_t d = 0, dv = step->head_dim_v;
    for (; d + 16 <= dv; d += 16) pv_rows(step, r, t0, t1, d, n_rows, 2, false, type);
    for (; d + 8 <= dv; d += 8) pv_rows(step, r, t0, t1, d, n_rows, 1, false, type);
    if (d < dv) pv_rows(step, r, t0, t1, d, n_rows, 1, true, type);
}

INLINE void pv(const paged__step *step, int32_t r, int32_t n, int32_t t0, int32_t t1, const paged_type type) {
    switch (n) {
    case 1:
        pv_dims(step, r, t0, t1, 1, type);
        break;
    case 2:
        pv_dims(step, r, t0, t1, 2, type);
        break;
    case 3:
        pv_dims(step, r, t0, t1, 3, type);
        break;
    case 4:
        pv_dims(step, r, t0, t1, 4, type);
        break;
    case 5:
        pv_dims(step, r, t0, t1, 5, type);
        break;
    default:
        pv_dims(step, r, t0, t1, 6, type);
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

/* Tokens t … t + 7 that the row sees. */
INLINE __m256i seen_from(paged__range seen, int32_t t) {
    return _mm256_andnot_si256(lanes_below(seen.first - t), lanes_below(seen.end - t));
}

static void softmax_row(float *p, const float *s, paged__range seen, float *l, float *o, int32_t n) {
    /* Not -inf, so that a row whose scores are all -inf has weights of zero and not NaN. */
    __m256 lowest = _mm256_set1_ps(-FLT_MAX), v_max = lowest;
    float *m = o + n;
    for (int32_t t = 0; t < PAGED_ATTN_STEP; t += 8) {
        __m256 valid = _mm256_castsi256_ps(seen_from(seen, t));
        v_max = _mm256_max_ps(v_max, _mm256_blendv_ps(lowest, _mm256_loadu_ps(s + t), valid));
    }
    float s_max = reduce_max(v_max);
    if (s_max > *m + PAGED__RESCALE) rescale(s_max, m, l, o, n);
    __m256 v_m = _mm256_set1_ps(*m), sum[2] = {_mm256_loadu_ps(l), _mm256_loadu_ps(l + 8)};
    for (int32_t t = 0; t < PAGED_ATTN_STEP; t += 16) UNROLL for (int j = 0; j < 2; j++) {
            __m256 x = _mm256_sub_ps(_mm256_loadu_ps(s + t + j * 8), v_m);
            x = exp2_ps(x, seen_from(seen, t + j * 8));
            sum[j] = _mm256_add_ps(sum[j], x);
            _mm256_storeu_ps(p + t + j * 8, x);
        }
    _mm256_storeu_ps(l, sum[0]);
    _mm256_storeu_ps(l + 8, sum[1]);
}

static void softmax(const paged__step *step) {
    for (int32_t r = 0; r < step->n_rows; r++)
        softmax_row((float *)(void *)(step->p + r * step->p_stride), step->s + r * PAGED_ATTN_STEP,
                    step->seen[r], step->l + r * PAGED__L_LANES, step->o + r * step->o_stride,
                    step->o_floats);
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

/* Pairs [n_pairs][width][2] -> [2 * n_pairs][width]. */
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

static void widen_k_f16(float *tile, const void *src, int32_t head_dim) {
    to_f32_f16(tile, src, (int64_t)head_dim * PAGED_TILE);
}

static void widen_k_bf16(float *tile, const void *src, int32_t head_dim) {
    unpack_bf16(tile, src, (head_dim + 1) / 2, PAGED_TILE);
}

static void widen_v_bf16(float *tile, const void *src, int32_t head_dim) {
    unpack_bf16(tile, src, PAGED_TILE / 2, head_dim);
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
    static void qk_##name(const paged__step *step) {                                                         \
        qk(step, type);                                                                                      \
    }                                                                                                        \
    static void pv_block_##name(const paged__step *step, int32_t r, int32_t n, int32_t t0, int32_t t1) {     \
        pv(step, r, n, t0, t1, type);                                                                        \
    }                                                                                                        \
    static void pv_##name(const paged__step *step) {                                                         \
        paged__pv_by_blocks(step, ROWS, pv_block_##name);                                                    \
    }

OF_TYPE(f16, PAGED_TYPE_F16)
OF_TYPE(f32, PAGED_TYPE_F32)
OF_TYPE(bf16, PAGED_TYPE_BF16)

#define ENTRY(name)                                                                                          \
    .q_bytes = paged__q_bytes_f32, .p_bytes = PAGED_ATTN_STEP * 4, .load_q = paged__load_q_f32,              \
    .qk = qk_##name, .softmax = softmax, .pv = pv_##name, .pack_k = paged__pack_k_##name,                    \
    .pack_v = paged__pack_v_##name, .to_f32 = to_f32_##name, .from_f32 = from_f32_##name

const paged__type_kernels paged__avx2_f16 = {ENTRY(f16), .widen_k = widen_k_f16, .widen_v = widen_k_f16};
const paged__type_kernels paged__avx2_f32 = {ENTRY(f32)};
const paged__type_kernels paged__avx2_bf16 = {ENTRY(bf16), .widen_k = widen_k_bf16, .widen_v = widen_v_bf16};

const paged__kernels paged__kernels_avx2 = {
    .name = "avx2",
    .of = {[PAGED_TYPE_F16] = &paged__avx2_f16,
           [PAGED_TYPE_F32] = &paged__avx2_f32,
           [PAGED_TYPE_BF16] = &paged__avx2_bf16,
           [PAGED_TYPE_I8] = &paged__avx2_i8},
    .merge = merge,
    .divide = divide,
    .softcap = paged__softcap,
    .alibi = paged__alibi,
};
