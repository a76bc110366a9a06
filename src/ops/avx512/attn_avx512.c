/* attn_avx512.c: the kernels of ops.h for AVX-512 (F, BW, DQ, VL).
 *
 * qk: a vector holds one element d of 16 keys (a tile); 6 rows × 4 tiles are 24 accumulators, 4 registers
 *     hold K, and q comes as a broadcast memory operand. So 24 independent chains hide the latency of the
 *     multiply-add, and each K vector that is loaded serves 6 rows. Tiles that none of them sees are left
 *     out.
 * pv: a vector holds 16 elements of one token's V; 6 rows × 64 elements are 24 accumulators, p is broadcast.
 * Few rows are worked on in the type of the cache, tile by tile; many are always of f32 (widen_k, widen_v).
 * Functions that are always inlined take their row count and type as constants, which the switch in the
 * caller gives them; so every loop over rows and vectors is unrolled and the accumulators stay in registers.
 */
#include <immintrin.h>

#include "ops/ops.h"
#include "ops/scores.h"
#include "ops/softmax_avx512.h"

enum { ROWS = 6 };

INLINE __m512 f32_of_f16(const void *src) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)src));
}

static void load_q(void *q, const float *src, float scale, int32_t head_dim) {
    float *row = q;
    for (int32_t d = 0; d < head_dim; d += 16) {
        __mmask16 mask = (__mmask16)(0xffffu >> (16 - PAGED_MIN(head_dim - d, 16)));
        _mm512_mask_storeu_ps(row + d, mask,
                              _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, src + d), _mm512_set1_ps(scale)));
    }
}

/* 16 keys, element d. */
INLINE __m512 load_k(const void *tile, int64_t d, const paged_type type) {
    const uint8_t *bytes = tile;
    if (type == PAGED_TYPE_F32) return _mm512_loadu_ps(bytes + d * 64);
    if (type == PAGED_TYPE_F16) return f32_of_f16(bytes + d * 32);
    /* A lane holds the elements d and d + 1 (even d: the low half). The float is its 16 bits, shifted to
     * the top. */
    __m512i pair = _mm512_loadu_si512(bytes + (d >> 1) * 64);
    __m512i top = _mm512_sll_epi32(pair, _mm_cvtsi32_si128(d & 1 ? 0 : 16));
    return _mm512_castsi512_ps(_mm512_and_si512(top, _mm512_set1_epi32((int)0xffff0000u)));
}

INLINE int32_t tile_bytes(int32_t head_dim, const paged_type type) {
    return PAGED_TILE * head_dim * (type == PAGED_TYPE_F32 ? 4 : 2);
}

/* Token t of the tile, elements d … d + 15; only those under the mask are read. */
INLINE __m512 load_v(const void *tile, int64_t t, int64_t d, int64_t head_dim, __mmask16 mask,
                     const paged_type type) {
    const uint8_t *bytes = tile;
    if (type == PAGED_TYPE_F32) return _mm512_maskz_loadu_ps(mask, bytes + (t * head_dim + d) * 4);
    if (type == PAGED_TYPE_F16)
        return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, bytes + (t * head_dim + d) * 2));
    __m512i pair = _mm512_maskz_loadu_epi32(mask, bytes + ((t >> 1) * head_dim + d) * 4);
    __m512i top = _mm512_sll_epi32(pair, _mm_cvtsi32_si128(t & 1 ? 0 : 16));
    return _mm512_castsi512_ps(_mm512_and_si512(top, _mm512_set1_epi32((int)0xffff0000u)));
}

/* Few rows: one tile. `near` is `looks_near` of the tiles, as a constant. */
INLINE void qk_tile(const paged__step *step, int32_t first_row, int32_t tile, const int n_rows,
                    const paged_type type, const bool near) {
    const uint8_t *q = step->q + first_row * step->q_stride, *at = step->k.at[tile];
    const paged__distances ahead = paged__distances_of(tile_bytes(step->head_dim_k, type), near);
    const paged__stream f = paged__stream_of(&step->k, tile, &ahead, near);
    const int32_t d_bytes = type == PAGED_TYPE_F32 ? 64 : 32;
    __m512 acc[ROWS];
    UNROLL for (int r = 0; r < n_rows; r++) acc[r] = _mm512_setzero_ps();
    for (int64_t d = 0; d < step->head_dim_k; d++) {
        __m512 k = load_k(at, d, type);
        /* Without `near` a line of 16-bit keys is asked for with each half, as it was measured. */
        if (first_row == 0 && (!near || d * d_bytes % 64 == 0)) paged__fetch(&f, d * d_bytes, near);
        UNROLL for (int r = 0; r < n_rows; r++) {
            __m512 qd = _mm512_set1_ps(((const float *)(const void *)(q + r * step->q_stride))[d]);
            acc[r] = _mm512_fmadd_ps(qd, k, acc[r]);
        }
    }
    float *s = step->s + first_row * PAGED_ATTN_STEP + tile * PAGED_TILE;
    UNROLL for (int r = 0; r < n_rows; r++) _mm512_storeu_ps(s + r * PAGED_ATTN_STEP, acc[r]);
}

INLINE void qk_few(const paged__step *step, int32_t tile, int32_t r, int32_t n, const paged_type type,
                   const bool near) {
    switch (n) {
    case 1:
        qk_tile(step, r, tile, 1, type, near);
        break;
    case 2:
        qk_tile(step, r, tile, 2, type, near);
        break;
    case 3:
        qk_tile(step, r, tile, 3, type, near);
        break;
    case 4:
        qk_tile(step, r, tile, 4, type, near);
        break;
    case 5:
        qk_tile(step, r, tile, 5, type, near);
        break;
    default:
        qk_tile(step, r, tile, 6, type, near);
        break;
    }
}

INLINE void qk(const paged__step *step, const paged_type type, const bool near) {
    const paged__range *seen = step->seen;
    int32_t last = (seen[step->n_rows - 1].end - 1) / PAGED_TILE;
    for (int32_t tile = seen[0].first / PAGED_TILE; tile <= last; tile++)
        for (int32_t r = 0, n; r < step->n_rows; r += n) {
            n = paged__next_rows(step->n_rows - r, ROWS);
            qk_few(step, tile, r, n, type, near);
        }
}

/* n_vecs vectors of 16 elements from d on; `mask` is for the last of them. */
INLINE void pv_rows(const paged__step *step, int32_t first_row, int32_t t0, int32_t t1, int64_t d,
                    __mmask16 mask, const int n_rows, const int n_vecs, const paged_type type,
                    const bool near) {
    int64_t head_dim = step->head_dim_v;
    const int32_t size = type == PAGED_TYPE_F32 ? 4 : 2;
    const paged__distances ahead = paged__distances_of(tile_bytes(step->head_dim_v, type), near);
    float *o = step->o + first_row * step->o_stride + d;
    const uint8_t *p = step->p + first_row * step->p_stride;
    __m512 acc[ROWS][4];
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int j = 0; j < n_vecs; j++) acc[r][j] = _mm512_loadu_ps(o + r * step->o_stride + j * 16);
    }
    for (int64_t t = t0; t < t1;) {
        int32_t index = (int32_t)(t / PAGED_TILE);
        const void *tile = step->v.at[index];
        const paged__stream f = paged__stream_of(&step->v, index, &ahead, near);
        int64_t end = PAGED_MIN((t / PAGED_TILE + 1) * PAGED_TILE, (int64_t)t1);
        for (; t < end; t++) {
            __m512 v[4];
            UNROLL for (int j = 0; j < n_vecs; j++) {
                v[j] =
                    load_v(tile, t % PAGED_TILE, d + j * 16, head_dim, j == n_vecs - 1 ? mask : 0xffff, type);
                if (type != PAGED_TYPE_F32 && j % 2 != 0) continue;
                paged__fetch(&f, (t % PAGED_TILE * head_dim + d + j * 16) * size, near);
            }
            UNROLL for (int r = 0; r < n_rows; r++) {
                __m512 weight = _mm512_set1_ps(((const float *)(const void *)(p + r * step->p_stride))[t]);
                UNROLL for (int j = 0; j < n_vecs; j++) acc[r][j] = _mm512_fmadd_ps(weight, v[j], acc[r][j]);
            }
        }
    }
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int j = 0; j < n_vecs; j++) _mm512_storeu_ps(o + r * step->o_stride + j * 16, acc[r][j]);
    }
}

INLINE void pv_dims(const paged__step *step, int32_t r, int32_t t0, int32_t t1, const int n_rows,
                    const paged_type type, const bool near) {
    int32_t d = 0, dv = step->head_dim_v;
    for (; d + 64 <= dv; d += 64) pv_rows(step, r, t0, t1, d, 0xffff, n_rows, 4, type, near);
    for (; d + 32 <= dv; d += 32) pv_rows(step, r, t0, t1, d, 0xffff, n_rows, 2, type, near);
    for (; d < dv; d += 16)
        pv_rows(step, r, t0, t1, d, (__mmask16)(0xffffu >> (16 - PAGED_MIN(dv - d, 16))), n_rows, 1, type,
                near);
}

INLINE void pv_block(const paged__step *step, int32_t r, int32_t n, int32_t t0, int32_t t1,
                     const paged_type type, const bool near) {
    switch (n) {
    case 1:
        pv_dims(step, r, t0, t1, 1, type, near);
        break;
    case 2:
        pv_dims(step, r, t0, t1, 2, type, near);
        break;
    case 3:
        pv_dims(step, r, t0, t1, 3, type, near);
        break;
    case 4:
        pv_dims(step, r, t0, t1, 4, type, near);
        break;
    case 5:
        pv_dims(step, r, t0, t1, 5, type, near);
        break;
    default:
        pv_dims(step, r, t0, t1, 6, type, near);
        break;
    }
}

/* Tile by tile, so that a tile is in L1 while the passes go over it. */
INLINE void pv(const paged__step *step, int32_t r, int32_t n, int32_t t0, int32_t t1, const paged_type type,
               const bool near) {
    for (int32_t t = t0, end; t < t1; t = end) {
        end = PAGED_MIN((t / PAGED_TILE + 1) * PAGED_TILE, t1);
        pv_block(step, r, n, t, end, type, near);
    }
}

INLINE void softmax_row(float *p, const float *s, uint64_t mask, float *l, float *o, int32_t n) {
    __m512 x[4], v_m = load_scores(x, s, mask, l, o, n), sum = _mm512_loadu_ps(l);
    UNROLL for (int j = 0; j < 4; j++) {
        x[j] = exp2_ps(_mm512_sub_ps(x[j], v_m), (__mmask16)(mask >> (j * 16)));
        sum = _mm512_add_ps(sum, x[j]);
        _mm512_storeu_ps(p + j * 16, x[j]);
    }
    _mm512_storeu_ps(l, sum);
}

INLINE void softmax_rows(const paged__step *step, int32_t r, int32_t end) {
    for (; r < end; r++)
        softmax_row((float *)(void *)(step->p + r * step->p_stride), step->s + r * PAGED_ATTN_STEP,
                    paged__seen_mask(step->seen[r]), step->l + r * PAGED__L_LANES,
                    step->o + r * step->o_stride, step->o_floats);
}

static void softmax(const paged__step *step) {
    softmax_rows(step, 0, step->n_rows);
}

/* ---- many rows, of f32 ---- */

INLINE __m512 broadcast(const uint8_t *row, int64_t i) {
    return _mm512_set1_ps(((const float *)(const void *)row)[i]);
}

/* The tiles first_tile … first_tile + n_tiles - 1. */
INLINE void qk_tiles(const paged__step *step, int32_t first_row, int32_t first_tile, const int n_rows,
                     const int n_tiles) {
    const uint8_t *q = step->q + first_row * step->q_stride;
    const float *k[4];
    __m512 acc[ROWS][4];
    UNROLL for (int j = 0; j < n_tiles; j++) k[j] = step->k.at[first_tile + j];
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int j = 0; j < n_tiles; j++) acc[r][j] = _mm512_setzero_ps();
    }
    for (int64_t d = 0; d < step->head_dim_k; d++) {
        __m512 keys[4];
        UNROLL for (int j = 0; j < n_tiles; j++) keys[j] = _mm512_loadu_ps(k[j] + d * PAGED_TILE);
        UNROLL for (int r = 0; r < n_rows; r++) {
            __m512 qd = broadcast(q + r * step->q_stride, d);
            UNROLL for (int j = 0; j < n_tiles; j++) acc[r][j] = _mm512_fmadd_ps(qd, keys[j], acc[r][j]);
        }
    }
    float *s = step->s + first_row * PAGED_ATTN_STEP + first_tile * PAGED_TILE;
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int j = 0; j < n_tiles; j++)
            _mm512_storeu_ps(s + r * PAGED_ATTN_STEP + j * PAGED_TILE, acc[r][j]);
    }
}

INLINE void many_qk_rows(const paged__step *step, int32_t r, const int n_rows) {
    int32_t first = step->seen[r].first / PAGED_TILE, end = step->seen[r + n_rows - 1].end;
    switch ((end + PAGED_TILE - 1) / PAGED_TILE - first) {
    case 1:
        qk_tiles(step, r, first, n_rows, 1);
        break;
    case 2:
        qk_tiles(step, r, first, n_rows, 2);
        break;
    case 3:
        qk_tiles(step, r, first, n_rows, 3);
        break;
    default:
        qk_tiles(step, r, 0, n_rows, 4);
        break;
    }
}

/* Tokens of which some of the rows see some from `low` on and before `high`, and all rows all from `first` on
 * and before `end`. */
typedef struct token_range {
    int32_t low, first, end, high;
} token_range;

/* One token, by all rows; or, at the edges, by those that see it: others do not multiply it. */
INLINE void pv_token(const paged__step *step, __m512 acc[ROWS][4], int32_t first_row, int32_t t, int64_t d,
                     __mmask16 mask, const bool is_edge, const int n_rows, const int n_vecs) {
    const uint8_t *p = step->p + first_row * step->p_stride;
    const float *v =
        (const float *)step->v.at[t / PAGED_TILE] + t % PAGED_TILE * (int64_t)step->head_dim_v + d;
    __m512 values[4];
    UNROLL for (int j = 0; j < n_vecs; j++) values[j] =
        _mm512_maskz_loadu_ps(j == n_vecs - 1 ? mask : 0xffff, v + j * 16);
    UNROLL for (int r = 0; r < n_rows; r++) {
        __m512 weight = broadcast(p + r * step->p_stride, t);
        paged__range seen = step->seen[first_row + r];
        __mmask16 sees = !is_edge || (t >= seen.first && t < seen.end) ? 0xffff : 0;
        UNROLL for (int j = 0; j < n_vecs; j++) acc[r][j] =
            _mm512_mask3_fmadd_ps(weight, values[j], acc[r][j], sees);
    }
}

/* Elements from d on. */
INLINE void pv_pass(const paged__step *step, token_range tokens, int32_t first_row, int64_t d, __mmask16 mask,
                    const int n_rows, const int n_vecs) {
    float *o = step->o + first_row * step->o_stride + d;
    int32_t t = tokens.low;
    __m512 acc[ROWS][4];
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int j = 0; j < n_vecs; j++) acc[r][j] = _mm512_loadu_ps(o + r * step->o_stride + j * 16);
    }
    for (; t < tokens.first; t++) pv_token(step, acc, first_row, t, d, mask, true, n_rows, n_vecs);
    for (; t < tokens.end; t++) pv_token(step, acc, first_row, t, d, mask, false, n_rows, n_vecs);
    for (; t < tokens.high; t++) pv_token(step, acc, first_row, t, d, mask, true, n_rows, n_vecs);
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int j = 0; j < n_vecs; j++) _mm512_storeu_ps(o + r * step->o_stride + j * 16, acc[r][j]);
    }
}

INLINE void many_pv_rows(const paged__step *step, int32_t r, const int n_rows) {
    const paged__range *seen = step->seen + r;
    int32_t first = seen[n_rows - 1].first, d = 0, dv = step->head_dim_v;
    token_range tokens = {seen[0].first, first, PAGED_MAX(seen[0].end, first), seen[n_rows - 1].end};
    for (; d + 64 <= dv; d += 64) pv_pass(step, tokens, r, d, 0xffff, n_rows, 4);
    for (; d + 32 <= dv; d += 32) pv_pass(step, tokens, r, d, 0xffff, n_rows, 2);
    for (; d < dv; d += 16)
        pv_pass(step, tokens, r, d, (__mmask16)(0xffffu >> (16 - PAGED_MIN(dv - d, 16))), n_rows, 1);
}

#define OF_ROWS(name)                                                                                        \
    static void name##_block(const paged__step *step, int32_t r, int32_t n) {                                \
        switch (n) {                                                                                         \
        case 4:                                                                                              \
            name##_rows(step, r, 4);                                                                         \
            break;                                                                                           \
        case 5:                                                                                              \
            name##_rows(step, r, 5);                                                                         \
            break;                                                                                           \
        default:                                                                                             \
            name##_rows(step, r, 6);                                                                         \
            break;                                                                                           \
        }                                                                                                    \
    }

/* Blocks of more than 12 rows have 4 … 6. */
OF_ROWS(many_qk)
OF_ROWS(many_pv)

static void many_qk(const paged__step *step) {
    for (int32_t block = 0, r = 0, next; r < step->n_rows; r = next) {
        next = paged__block_row(step, ROWS, ++block);
        many_qk_block(step, r, next - r);
    }
}

static void many_pv(const paged__step *step) {
    for (int32_t block = 0, r = 0, next; r < step->n_rows; r = next) {
        next = paged__block_row(step, ROWS, ++block);
        many_pv_block(step, r, next - r);
    }
}

/* K of a step, then V: with heads of 128 and more both together are larger than L1. The weights of a block of
 * rows are made while the products of the one before it are under way. */
static void attend(const paged__step *step) {
    const int32_t n = paged__n_blocks(step, ROWS);
    for (int32_t block = 0, r = 0, next; block < n; block++, r = next) {
        next = paged__block_row(step, ROWS, block + 1);
        paged__bring(&step->k, block, n);
        many_qk_block(step, r, next - r);
    }
    for (int32_t block = 0, r = 0, next; block < n; block++, r = next) {
        next = paged__block_row(step, ROWS, block + 1);
        softmax_rows(step, r, next);
        paged__bring(&step->v, block, n);
        many_pv_block(step, r, next - r);
    }
}

void paged__merge_avx512(float *acc, float a, const float *part, float b, int32_t n) {
    __m512 va = _mm512_set1_ps(a), vb = _mm512_set1_ps(b);
    for (int32_t d = 0; d < n; d += 16) {
        __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(acc + d), va);
        _mm512_storeu_ps(acc + d, _mm512_fmadd_ps(_mm512_loadu_ps(part + d), vb, scaled));
    }
}

void paged__divide_avx512(float *out, const float *o, float l, int32_t n) {
    __m512 inverse = _mm512_set1_ps(1 / l);
    for (int32_t d = 0; d < n; d += 16) {
        __mmask16 mask = (__mmask16)(0xffffu >> (16 - PAGED_MIN(n - d, 16)));
        __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, o + d), inverse);
        _mm512_mask_storeu_ps(out + d, mask, _mm512_add_ps(x, _mm512_setzero_ps()));
    }
}

static void paged__to_f32_f16_avx512(float *dst, const void *src, int64_t n) {
    const uint8_t *bytes = src;
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 mask = (__mmask16)(0xffffu >> (16 - PAGED_MIN(n - i, 16)));
        _mm512_mask_storeu_ps(dst + i, mask, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, bytes + i * 2)));
    }
}

void paged__to_f32_bf16_avx512(float *dst, const void *src, int64_t n) {
    const uint8_t *bytes = src;
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 mask = (__mmask16)(0xffffu >> (16 - PAGED_MIN(n - i, 16)));
        __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, bytes + i * 2));
        _mm512_mask_storeu_epi32(dst + i, mask, _mm512_slli_epi32(wide, 16));
    }
}

static void paged__to_f32_f32_avx512(float *dst, const void *src, int64_t n) {
    memcpy(dst, src, (size_t)n * sizeof(float));
}

/* Pairs [n_pairs][width][2] -> [2 * n_pairs][width]. */
static void unpack_bf16(float *dst, const void *src, int32_t n_pairs, int32_t width) {
    const uint8_t *bytes = src;
    __m512i top = _mm512_set1_epi32((int)0xffff0000u);
    for (int64_t p = 0; p < n_pairs; p++, bytes += width * 4, dst += 2 * width)
        for (int32_t i = 0; i < width; i += 16) {
            __mmask16 mask = (__mmask16)(0xffffu >> (16 - PAGED_MIN(width - i, 16)));
            __m512i pair = _mm512_maskz_loadu_epi32(mask, bytes + i * 4);
            _mm512_mask_storeu_epi32(dst + i, mask, _mm512_slli_epi32(pair, 16));
            _mm512_mask_storeu_epi32(dst + width + i, mask, _mm512_and_si512(pair, top));
        }
}

static void widen_k_f16(float *tile, const void *src, int32_t head_dim) {
    paged__to_f32_f16_avx512(tile, src, (int64_t)head_dim * PAGED_TILE);
}

static void widen_k_bf16(float *tile, const void *src, int32_t head_dim) {
    unpack_bf16(tile, src, (head_dim + 1) / 2, PAGED_TILE);
}

static void widen_v_bf16(float *tile, const void *src, int32_t head_dim) {
    unpack_bf16(tile, src, PAGED_TILE / 2, head_dim);
}

/* The 16 floats (fewer under the mask) from src on, limited to ±limit; NaN stays (the second operand of
 * min and max wins). */
INLINE __m512 load_limited(const float *src, __mmask16 mask, float limit, int64_t *n_nan) {
    __m512 x = _mm512_maskz_loadu_ps(mask, src);
    *n_nan += __builtin_popcount(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q));
    return _mm512_max_ps(_mm512_set1_ps(-limit), _mm512_min_ps(_mm512_set1_ps(limit), x));
}

static int64_t paged__from_f32_f16_avx512(void *dst, const float *src, int64_t n) {
    int64_t n_nan = 0;
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 mask = (__mmask16)(0xffffu >> (16 - PAGED_MIN(n - i, 16)));
        __m512 x = load_limited(src + i, mask, 65504.0f, &n_nan);
        _mm256_mask_storeu_epi16((uint8_t *)dst + i * 2, mask, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    return n_nan;
}

int64_t paged__from_f32_bf16_avx512(void *dst, const float *src, int64_t n) {
    int64_t n_nan = 0;
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 mask = (__mmask16)(0xffffu >> (16 - PAGED_MIN(n - i, 16)));
        __m512 x = load_limited(src + i, mask, 0x1.fep127f, &n_nan);
        __m512i u = _mm512_castps_si512(x), top = _mm512_srli_epi32(u, 16);
        __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
        __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        __m512i quiet = _mm512_or_si512(top, _mm512_set1_epi32(0x40));
        rounded = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16),
                                        _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
        _mm256_mask_storeu_epi16((uint8_t *)dst + i * 2, mask, _mm512_cvtepi32_epi16(rounded));
    }
    return n_nan;
}

static int64_t paged__from_f32_f32_avx512(void *dst, const float *src, int64_t n) {
    int64_t n_nan = 0;
    memcpy(dst, src, (size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++) n_nan += src[i] != src[i];
    return n_nan;
}

#define OF_TYPE(name, type)                                                                                  \
    static void qk_##name(const paged__step *step) {                                                         \
        if (step->n_rows > PAGED__FEW_ROWS)                                                                  \
            many_qk(step);                                                                                   \
        else if (step->k.looks_near)                                                                         \
            qk(step, type, true);                                                                            \
        else                                                                                                 \
            qk(step, type, false);                                                                           \
    }                                                                                                        \
    static void pv_block_##name(const paged__step *step, int32_t r, int32_t n, int32_t t0, int32_t t1) {     \
        if (step->v.looks_near)                                                                              \
            pv(step, r, n, t0, t1, type, true);                                                              \
        else                                                                                                 \
            pv(step, r, n, t0, t1, type, false);                                                             \
    }                                                                                                        \
    static void pv_##name(const paged__step *step) {                                                         \
        if (step->n_rows > PAGED__FEW_ROWS)                                                                  \
            many_pv(step);                                                                                   \
        else                                                                                                 \
            paged__pv_by_blocks(step, ROWS, pv_block_##name);                                                \
    }

OF_TYPE(f16, PAGED_TYPE_F16)
OF_TYPE(f32, PAGED_TYPE_F32)
OF_TYPE(bf16, PAGED_TYPE_BF16)

#define ENTRY(name)                                                                                          \
    .q_bytes = paged__q_bytes_f32, .p_bytes = PAGED_ATTN_STEP * 4, .load_q = load_q, .qk = qk_##name,        \
    .softmax = softmax, .pv = pv_##name, .pack_k = paged__pack_k_##name##_avx512,                            \
    .to_f32 = paged__to_f32_##name##_avx512, .from_f32 = paged__from_f32_##name##_avx512

const paged__type_kernels paged__avx512_f16 = {ENTRY(f16), .pack_v = paged__pack_v_f16,
                                               .widen_k = widen_k_f16, .widen_v = widen_k_f16};
const paged__type_kernels paged__avx512_f32 = {ENTRY(f32), .attend = attend, .pack_v = paged__pack_v_f32};
const paged__type_kernels paged__avx512_bf16 = {ENTRY(bf16), .pack_v = paged__pack_v_bf16_avx512,
                                                .widen_k = widen_k_bf16, .widen_v = widen_v_bf16};

/* A table is read once a plan, so this is as long as it takes to load it. */
bool paged__blocks_exist_avx512(const int32_t *blocks, int32_t n, int32_t n_blocks) {
    const __m512i end = _mm512_set1_epi32(n_blocks);
    __mmask16 good = 0xffff;
    int32_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __mmask16 a = _mm512_cmplt_epu32_mask(_mm512_loadu_si512(blocks + i), end);
        __mmask16 b = _mm512_cmplt_epu32_mask(_mm512_loadu_si512(blocks + i + 16), end);
        good = (__mmask16)(good & a & b);
    }
    for (; i < n; i += 16) {
        const __mmask16 left = (__mmask16)(0xffffu >> (16 - PAGED_MIN(n - i, 16)));
        __m512i e = _mm512_maskz_loadu_epi32(left, blocks + i);
        good = (__mmask16)(good & (~left | _mm512_mask_cmplt_epu32_mask(left, e, end)));
    }
    return good == 0xffff;
}

const paged__kernels paged__kernels_avx512 = {
    .name = "avx512",
    .of = {[PAGED_TYPE_F16] = &paged__avx512_f16,
           [PAGED_TYPE_F32] = &paged__avx512_f32,
           [PAGED_TYPE_BF16] = &paged__avx512_bf16,
           [PAGED_TYPE_I8] = &paged__avx2_i8},
    .merge = paged__merge_avx512,
    .divide = paged__divide_avx512,
    .blocks_exist = paged__blocks_exist_avx512,
    .softcap = paged__softcap,
    .alibi = paged__alibi,
};

const paged__kernels paged__kernels_avx512_vnni = {
    .name = "avx512_vnni",
    .of = {[PAGED_TYPE_F16] = &paged__avx512_f16,
           [PAGED_TYPE_F32] = &paged__avx512_f32,
           [PAGED_TYPE_BF16] = &paged__avx512_bf16,
           [PAGED_TYPE_I8] = &paged__avx512_vnni_i8},
    .merge = paged__merge_avx512,
    .divide = paged__divide_avx512,
    .blocks_exist = paged__blocks_exist_avx512,
    .softcap = paged__softcap,
    .alibi = paged__alibi,
};
