/* i8_avx512_vnni.c: the kernels of i8 (i8.h) for AVX-512 VNNI. VPDPBUSD adds, in each of 16 lanes, four
 * products of an unsigned and a signed byte to an int32. Sums are exact, so their order is free.
 *
 * qk: a lane is a key, its four bytes the elements d … d + 3. K is the unsigned operand; four bytes of q come
 *     as a broadcast memory operand. 6 rows × 4 tiles are 24 accumulators, 4 registers hold K; few rows, up
 *     to 8 at a time, take tile after tile (paged__tiles).
 * pv: a lane is an element of V, its four bytes the tokens of a group of four; a tile has four groups. The
 *     weights of a tile, 4 registers a row, stay while V streams by once, from its first byte to its last.
 *     4 rows at a time.
 */
#include <immintrin.h>

#include "ops/i8.h"

enum { QK_ROWS = 6, QK_FEW = 8, PV_ROWS = 4, GROUPS = 4, FEW = 12 };

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

/* Four bytes in each lane. */
INLINE __m512i broadcast4(const void *bytes) {
    int32_t four;
    memcpy(&four, bytes, sizeof four);
    return _mm512_set1_epi32(four);
}

/* sum + four products in each lane. The intrinsic would do, but gcc 12 copies its accumulator to another
 * register and back, which halves the speed of the loops below. */
INLINE __m512i add_products(__m512i sum, __m512i unsigned_bytes, __m512i signed_bytes) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
    return sum;
}

/* ---- scores ---- */

/* The scores of row i with tile j. */
INLINE void store_scores(const paged__step *step, int32_t i, int32_t j, __m512i sum) {
    __m512 s = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(paged__i8_q_row(step, i)->scale));
    _mm512_storeu_ps(step->s + i * PAGED_ATTN_STEP + j * PAGED_TILE,
                     _mm512_mul_ps(s, _mm512_loadu_ps(step->k.scale[j])));
}

/* Few rows, r … r + n - 1, against one tile. Up to four rows take the lines in turns for two sums each: one
 * would wait for itself. The first of all rows bring in what comes. */
INLINE void qk_tile(const paged__step *step, int32_t r, const int n, int32_t tile, const bool near) {
    const int n_sums = n <= 4 ? 2 : 1;
    const int32_t dk = step->head_dim_k, tile_bytes = (dk + 3) / 4 * 64;
    const uint8_t *at = step->k.at[tile];
    paged__stream f = {0};
    if (r == 0) f = paged__stream_of(&step->k, tile, tile_bytes, near);
    const paged__i8_q *q[QK_FEW];
    __m512i acc[QK_FEW][2];
    UNROLL for (int i = 0; i < n; i++) {
        q[i] = paged__i8_q_row(step, r + i);
        acc[i][0] = _mm512_set1_epi32(q[i]->bias);
        acc[i][1] = _mm512_setzero_si512();
    }
    for (int64_t d = 0; d < dk; d += 4 * n_sums) {
        UNROLL for (int j = 0; j < n_sums; j++) {
            int64_t e = d + 4 * j;
            if (j > 0 && e >= dk) break;
            __m512i k = _mm512_loadu_si512(at + e * PAGED_TILE);
            if (r == 0) paged__fetch(&f, e * PAGED_TILE, near);
            UNROLL for (int i = 0; i < n; i++) acc[i][j] =
                add_products(acc[i][j], k, broadcast4(q[i]->q + e));
        }
    }
    UNROLL for (int i = 0; i < n; i++)
        store_scores(step, r + i, tile, _mm512_add_epi32(acc[i][0], acc[i][1]));
}

INLINE void qk_few(const paged__step *step, int32_t r, int32_t n, int32_t tile, const bool near) {
    switch (n) {
    case 1:
        qk_tile(step, r, 1, tile, near);
        break;
    case 2:
        qk_tile(step, r, 2, tile, near);
        break;
    case 3:
        qk_tile(step, r, 3, tile, near);
        break;
    case 4:
        qk_tile(step, r, 4, tile, near);
        break;
    case 5:
        qk_tile(step, r, 5, tile, near);
        break;
    case 6:
        qk_tile(step, r, 6, tile, near);
        break;
    case 7:
        qk_tile(step, r, 7, tile, near);
        break;
    default:
        qk_tile(step, r, 8, tile, near);
        break;
    }
}

/* Many rows, r … r + n - 1, against all tiles. */
INLINE void qk_rows(const paged__step *step, int32_t r, const int n) {
    const paged__i8_q *q[QK_ROWS];
    __m512i acc[QK_ROWS][4];
    UNROLL for (int i = 0; i < n; i++) {
        q[i] = paged__i8_q_row(step, r + i);
        UNROLL for (int j = 0; j < 4; j++) acc[i][j] = _mm512_set1_epi32(q[i]->bias);
    }
    for (int64_t d = 0; d < step->head_dim_k; d += 4) {
        __m512i k[4];
        UNROLL for (int j = 0; j < 4; j++) {
            k[j] = _mm512_loadu_si512((const uint8_t *)step->k.at[j] + d * PAGED_TILE);
            _mm_prefetch((const char *)step->k.next[j] + d * PAGED_TILE, _MM_HINT_T1);
        }
        UNROLL for (int i = 0; i < n; i++) {
            __m512i four = broadcast4(q[i]->q + d);
            UNROLL for (int j = 0; j < 4; j++) acc[i][j] = add_products(acc[i][j], k[j], four);
        }
    }
    UNROLL for (int j = 0; j < 4; j++) {
        UNROLL for (int i = 0; i < n; i++) store_scores(step, r + i, j, acc[i][j]);
    }
}

/* Blocks of more than 12 rows have 4 … 6. */
INLINE void qk_block(const paged__step *step, int32_t r, int32_t n) {
    switch (n) {
    case 4:
        qk_rows(step, r, 4);
        break;
    case 5:
        qk_rows(step, r, 5);
        break;
    default:
        qk_rows(step, r, 6);
        break;
    }
}

/* Few rows: tile after tile. */
INLINE void qk_tiles(const paged__step *step, const bool near) {
    for (int32_t tile = 0; tile < PAGED__STEP_TILES; tile++)
        for (int32_t r = 0, n; r < step->n_rows; r += n) {
            n = paged__next_rows(step->n_rows - r, QK_FEW);
            qk_few(step, r, n, tile, near);
        }
}

static void qk(const paged__step *step) {
    for (int j = 0; j < PAGED__STEP_TILES; j++) {
        _mm_prefetch((const char *)step->k.next_scale[j], _MM_HINT_T1);
        _mm_prefetch((const char *)step->v.next_scale[j], _MM_HINT_T1);
    }
    if (step->n_rows > FEW) {
        for (int32_t r = 0, n; r < step->n_rows; r += n) {
            n = paged__next_rows(step->n_rows - r, QK_ROWS);
            qk_block(step, r, n);
        }
        return;
    }
    if (step->k.looks_near)
        qk_tiles(step, true);
    else
        qk_tiles(step, false);
}

/* ---- weights ---- */

/* The greatest of the 16 numbers of each x[j], as bits, four times in the 128-bit lane j. For numbers ≥ 0
 * the order of the bits is that of the numbers, and NaN is above them all. */
INLINE __m512i top_bits(const __m512i x[4]) {
    __m512i a =
        _mm512_max_epu32(_mm512_shuffle_i32x4(x[0], x[1], 0x44), _mm512_shuffle_i32x4(x[0], x[1], 0xee));
    __m512i b =
        _mm512_max_epu32(_mm512_shuffle_i32x4(x[2], x[3], 0x44), _mm512_shuffle_i32x4(x[2], x[3], 0xee));
    __m512i c = _mm512_max_epu32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
    c = _mm512_max_epu32(c, _mm512_shuffle_epi32(c, 0x4e));
    return _mm512_max_epu32(c, _mm512_shuffle_epi32(c, 0xb1));
}

INLINE void weights_of_row(paged__i8_p *row, const float *p, paged__range seen, const __m512 v_scale[4]) {
    uint64_t mask = ~(uint64_t)0 >> (PAGED_ATTN_STEP - seen.end) & ~(uint64_t)0 << seen.first;
    __m512i bits[4];
    UNROLL for (int j = 0; j < 4; j++) {
        /* The scale of what the row does not see may be NaN. */
        __m512 w =
            _mm512_maskz_mul_ps((__mmask16)(mask >> (j * 16)), _mm512_loadu_ps(p + j * 16), v_scale[j]);
        bits[j] = _mm512_castps_si512(w);
    }
    /* Of each 128-bit lane one number, in a small register, of which division takes a third of the time. */
    __m128 top =
        _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, _mm512_castsi512_ps(top_bits(bits))));
    __m128 most = _mm_set1_ps(255), least = _mm_set1_ps(PAGED__I8_P_MIN);
    __m512 by = _mm512_castps128_ps512(_mm_maskz_div_ps(_mm_cmp_ps_mask(top, least, _CMP_GE_OQ), most, top));
    UNROLL for (int j = 0; j < 4; j++) {
        __m512 by_tile = _mm512_permutexvar_ps(_mm512_set1_epi32(j), by);
        __m512i weight = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(bits[j]), by_tile));
        _mm_storeu_si128((__m128i *)(void *)(row->weight + j * 16), _mm512_cvtepi32_epi8(weight));
    }
    /* Not less than, so that NaN is kept. */
    _mm_storeu_ps(row->scale, _mm_maskz_div_ps(_mm_cmp_ps_mask(top, least, _CMP_NLT_UQ), top, most));
}

static void softmax(const paged__step *step) {
    paged__i8_softmax(step, &paged__avx512_f32);
    __m512 v_scale[4];
    UNROLL for (int j = 0; j < 4; j++) v_scale[j] = _mm512_loadu_ps(step->v.scale[j]);
    for (int32_t r = 0; r < step->n_rows; r++)
        weights_of_row(paged__i8_p_row(step, r), step->s + r * PAGED_ATTN_STEP, step->seen[r], v_scale);
}

/* ---- values ---- */

/* What rows r … r + n - 1 need of tile j. */
typedef struct pv_work {
    __m512i weight[PV_ROWS][GROUPS];
    __m512 scale[PV_ROWS];
    float *o[PV_ROWS];
} pv_work;

/* The elements d … d + 15 of V, of which those under the mask exist. With `brings`, what comes is
 * brought in. */
INLINE void pv_lanes(const pv_work *w, const uint8_t *v, const paged__stream *f, bool brings, const bool near,
                     int64_t group_bytes, int64_t d, const int n, __mmask16 mask) {
    __m512i sum[PV_ROWS];
    UNROLL for (int i = 0; i < n; i++) sum[i] = _mm512_setzero_si512();
    UNROLL for (int g = 0; g < GROUPS; g++) {
        __m512i four = _mm512_maskz_loadu_epi32(mask, v + g * group_bytes + d * 4);
        if (brings) paged__fetch(f, g * group_bytes + d * 4, near);
        UNROLL for (int i = 0; i < n; i++) sum[i] = add_products(sum[i], w->weight[i][g], four);
    }
    UNROLL for (int i = 0; i < n; i++) {
        __m512 o = _mm512_loadu_ps(w->o[i] + d);
        _mm512_storeu_ps(w->o[i] + d, _mm512_fmadd_ps(w->scale[i], _mm512_cvtepi32_ps(sum[i]), o));
    }
}

INLINE void pv_tile(const paged__step *step, int32_t r, int32_t j, const int n, const bool near) {
    const int32_t tile_bytes = step->head_dim_v * PAGED_TILE;
    const uint8_t *v = step->v.at[j];
    paged__stream f = {0};
    if (r == 0) f = paged__stream_of(&step->v, j, tile_bytes, near);
    int64_t dv = step->head_dim_v, d = 0;
    pv_work w;
    UNROLL for (int i = 0; i < n; i++) {
        const paged__i8_p *p = paged__i8_p_row(step, r + i);
        w.scale[i] = _mm512_set1_ps(p->scale[j]);
        w.o[i] = step->o + (r + i) * step->o_stride;
        UNROLL for (int g = 0; g < GROUPS; g++) w.weight[i][g] =
            broadcast4(p->weight + j * PAGED_TILE + g * 4);
    }
    const bool brings = r == 0;
    if (brings) /* with a test in each turn it would be slower */
        for (; d + 16 <= dv; d += 16) pv_lanes(&w, v, &f, true, near, dv * 4, d, n, 0xffff);
    else
        for (; d + 16 <= dv; d += 16) pv_lanes(&w, v, &f, false, near, dv * 4, d, n, 0xffff);
    if (d < dv) pv_lanes(&w, v, &f, brings, near, dv * 4, d, n, (__mmask16)(0xffffu >> (16 - (dv - d))));
}

/* Rows r … r + n - 1 against the tiles first … last, of which some may see nothing: weights and scales of
 * zero make up for it. */
INLINE void pv_rows(const paged__step *step, int32_t r, const int n, int32_t first, int32_t last,
                    const bool near) {
    for (int32_t j = first; j <= last; j++) pv_tile(step, r, j, n, near);
}

INLINE void pv_block(const paged__step *step, int32_t r, int32_t n, int32_t first, int32_t last,
                     const bool near) {
    switch (n) {
    case 1:
        pv_rows(step, r, 1, first, last, near);
        break;
    case 2:
        pv_rows(step, r, 2, first, last, near);
        break;
    case 3:
        pv_rows(step, r, 3, first, last, near);
        break;
    default:
        pv_rows(step, r, 4, first, last, near);
        break;
    }
}

INLINE void pv_with(const paged__step *step, const bool near) {
    const paged__range *seen = step->seen;
    int32_t first = seen[0].first / PAGED_TILE, last = (seen[step->n_rows - 1].end - 1) / PAGED_TILE;
    if (step->n_rows <= FEW) {
        for (int32_t tile = first; tile <= last; tile++)
            for (int32_t r = 0, n; r < step->n_rows; r += n) {
                n = paged__next_rows(step->n_rows - r, PV_ROWS);
                pv_block(step, r, n, tile, tile, near);
            }
        return;
    }
    for (int32_t r = 0, n; r < step->n_rows; r += n) {
        n = paged__next_rows(step->n_rows - r, PV_ROWS);
        pv_block(step, r, n, seen[r].first / PAGED_TILE, (seen[r + n - 1].end - 1) / PAGED_TILE, near);
    }
}

static void pv(const paged__step *step) {
    if (step->v.looks_near)
        pv_with(step, true);
    else
        pv_with(step, false);
}

const paged__type_kernels paged__avx512_vnni_i8 = {.q_bytes = paged__q_bytes_i8,
                                                   .p_bytes = PAGED__I8_P_BYTES,
                                                   .load_q = paged__load_q_i8,
                                                   .qk = qk,
                                                   .softmax = softmax,
                                                   .pv = pv};
