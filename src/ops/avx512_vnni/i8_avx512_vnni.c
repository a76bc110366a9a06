/* i8_avx512_vnni.c: the kernels of i8 (i8.h) for AVX-512 VNNI. VPDPBUSD adds, in each of 16 lanes, four
 * products of an unsigned and a signed byte to an int32. Sums are exact, so their order is free.
 *
 * qk: a lane is a key, its four bytes the elements d … d + 3. K is the unsigned operand, four bytes of q
 *     are broadcast. 6 rows × 4 tiles are 24 accumulators, 4 registers hold K; few rows, up to 8 at a time,
 *     take tile after tile (paged__tiles).
 * pv: a lane is an element of V, its four bytes the tokens of a group of four; a tile has four groups. The
 *     weights of a tile, 4 registers a row, stay while V streams by once, from its first byte to its last.
 *     4 rows at a time.
 */
#include <immintrin.h>

#include "ops/i8.h"
#include "ops/softmax_avx512.h"

enum { QK_ROWS = 6, QK_FEW = 8, PV_ROWS = 4, GROUPS = 4, FEW = 12 };

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

/* The same with the same four signed bytes in each lane. */
INLINE __m512i add_products4(__m512i sum, __m512i unsigned_bytes, const int8_t *four) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "m"(*(const int8_t(*)[4])four));
    return sum;
}

/* ---- scores ---- */

/* The scores of a row with a tile. */
INLINE void store_scores(float *s, __m512i sum, float q_scale, __m512 k_scale) {
    __m512 x = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(q_scale));
    _mm512_storeu_ps(s, _mm512_mul_ps(x, k_scale));
}

/* Few rows, r … r + n - 1, against one tile. Up to four take lines in turns for two sums each, as a sum waits
 * five cycles for itself; more lines at once are faster from L2, but slower from memory. The first of all
 * rows bring in what comes; of an odd number of lines some are asked for twice or by others. */
INLINE void qk_tile(const paged__step *step, int32_t r, const int n, int32_t tile,
                    const paged__distances *ahead, const bool near) {
    const int n_sums = n <= 4 ? 2 : 1;
    const int64_t end = ahead->tile_bytes, whole = end / (n_sums * 64) * (n_sums * 64);
    const uint8_t *k = step->k.at[tile];
    const paged__i8_q *q[QK_FEW];
    __m512i acc[QK_FEW][4];
    UNROLL for (int i = 0; i < n; i++) {
        q[i] = paged__i8_q_row(step, r + i);
        acc[i][0] = _mm512_set1_epi32(q[i]->bias);
        UNROLL for (int j = 1; j < n_sums; j++) acc[i][j] = _mm512_setzero_si512();
    }
    paged__stream f = {0};
    if (r == 0) f = paged__stream_of(&step->k, tile, ahead, near);
    int64_t at = 0;
    for (; at < whole; at += n_sums * 64) {
        const uint8_t *first = paged__byte_ahead(&f.near, at), *then = paged__byte_ahead(&f.far, at);
        UNROLL for (int j = 0; j < n_sums; j++) {
            __m512i line = _mm512_loadu_si512(k + at + j * 64);
            if (r == 0) paged__fetch_lines(first + j * 64, then + j * 64, near);
            UNROLL for (int i = 0; i < n; i++) acc[i][j] =
                add_products4(acc[i][j], line, q[i]->q + at / 16 + j * 4);
        }
    }
    for (; at < end; at += 64) {
        __m512i line = _mm512_loadu_si512(k + at);
        if (r == 0) paged__fetch(&f, at, near);
        UNROLL for (int i = 0; i < n; i++) acc[i][0] = add_products4(acc[i][0], line, q[i]->q + at / 16);
    }
    float *s = step->s + r * PAGED_ATTN_STEP + tile * PAGED_TILE;
    const __m512 scale = _mm512_loadu_ps(step->k.scale[tile]);
    UNROLL for (int i = 0; i < n; i++) {
        UNROLL for (int j = 1; j < n_sums; j++) acc[i][0] = _mm512_add_epi32(acc[i][0], acc[i][j]);
        store_scores(s + i * PAGED_ATTN_STEP, acc[i][0], q[i]->scale, scale);
    }
}

INLINE void qk_few_rows(const paged__step *step, int32_t r, int32_t n, int32_t tile,
                        const paged__distances *ahead, const bool near) {
    switch (n) {
    case 1:
        qk_tile(step, r, 1, tile, ahead, near);
        break;
    case 2:
        qk_tile(step, r, 2, tile, ahead, near);
        break;
    case 3:
        qk_tile(step, r, 3, tile, ahead, near);
        break;
    case 4:
        qk_tile(step, r, 4, tile, ahead, near);
        break;
    case 5:
        qk_tile(step, r, 5, tile, ahead, near);
        break;
    case 6:
        qk_tile(step, r, 6, tile, ahead, near);
        break;
    case 7:
        qk_tile(step, r, 7, tile, ahead, near);
        break;
    default:
        qk_tile(step, r, 8, tile, ahead, near);
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
        const __m512 scale = _mm512_loadu_ps(step->k.scale[j]);
        UNROLL for (int i = 0; i < n; i++)
            store_scores(step->s + (r + i) * PAGED_ATTN_STEP + j * PAGED_TILE, acc[i][j], q[i]->scale, scale);
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

/* Few rows, tile after tile, which those behind the first find in L1. */
INLINE void qk_few(const paged__step *step, const bool near) {
    const paged__distances ahead = paged__distances_of((step->head_dim_k + 3) / 4 * 64, near);
    for (int32_t tile = 0; tile < PAGED__STEP_TILES; tile++)
        for (int32_t r = 0, n; r < step->n_rows; r += n) {
            n = paged__next_rows(step->n_rows - r, QK_FEW);
            qk_few_rows(step, r, n, tile, &ahead, near);
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
        qk_few(step, true);
    else
        qk_few(step, false);
}

/* ---- weights ---- */

enum { WEIGHT_ROWS = 4 }; /* at a time */

/* Of the 16 numbers of each x[j] the greatest of each four that are 4 apart, in the 128-bit lane j, as bits.
 * For numbers ≥ 0 the order of the bits is that of the numbers, and NaN is above them all. */
INLINE __m512i top_fours(const __m512i x[4]) {
    __m512i a =
        _mm512_max_epu32(_mm512_shuffle_i32x4(x[0], x[1], 0x44), _mm512_shuffle_i32x4(x[0], x[1], 0xee));
    __m512i b =
        _mm512_max_epu32(_mm512_shuffle_i32x4(x[2], x[3], 0x44), _mm512_shuffle_i32x4(x[2], x[3], 0xee));
    return _mm512_max_epu32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

/* The greatest of those of four rows: of row i in element i of each lane. */
INLINE __m512 tops_of_rows(const __m512i x[WEIGHT_ROWS]) {
    __m512i a = _mm512_max_epu32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    __m512i b = _mm512_max_epu32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b)));
}

/* The softmax of a row as that of f32, but weights times their scales; they are left in s. Returns their
 * greatest. The scale of what the row does not see may be NaN. */
INLINE __m512i weigh_row(float *s, uint64_t mask, const __m512 v_scale[4], float *l, float *o, int32_t n) {
    __m512 x[4], m = load_scores(x, s, mask, l, o, n), sum = _mm512_loadu_ps(l);
    __m512i bits[4];
    UNROLL for (int j = 0; j < 4; j++) {
        const __mmask16 sees = (__mmask16)(mask >> (j * 16));
        __m512 weight = exp2_ps(_mm512_sub_ps(x[j], m), sees);
        sum = _mm512_add_ps(sum, weight);
        weight = _mm512_maskz_mul_ps(sees, weight, v_scale[j]);
        bits[j] = _mm512_castps_si512(weight);
        _mm512_storeu_ps(s + j * 16, weight);
    }
    _mm512_storeu_ps(l, sum);
    return top_fours(bits);
}

/* Element 4 i + j to 4 j + i. */
INLINE __m512i transposed(void) {
    return _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
}

/* Weights times by[4 j] as bytes. */
INLINE void store_weights(uint8_t *to, const float *weight, const float *by) {
    __m512i x[4];
    UNROLL for (int j = 0; j < 4; j++) x[j] =
        _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(weight + j * 16), _mm512_set1_ps(by[4 * j])));
    __m512i bytes = _mm512_packus_epi16(_mm512_packus_epi32(x[0], x[1]), _mm512_packus_epi32(x[2], x[3]));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(transposed(), bytes));
}

/* The rows r … r + n - 1. */
INLINE void weigh_rows(const paged__step *step, int32_t r, const int n, const __m512 v_scale[4],
                       paged__lines *next) {
    float *s = step->s + r * PAGED_ATTN_STEP;
    __m512i top_of[WEIGHT_ROWS] = {_mm512_setzero_si512()};
    UNROLL for (int i = 0; i < n; i++) {
        const uint64_t mask = paged__seen_mask(step->seen[r + i]);
        float *l = step->l + (r + i) * PAGED__L_LANES, *o = step->o + (r + i) * step->o_stride;
        if (mask == ~(uint64_t)0)
            top_of[i] = weigh_row(s + i * PAGED_ATTN_STEP, ~(uint64_t)0, v_scale, l, o, step->o_floats);
        else
            top_of[i] = weigh_row(s + i * PAGED_ATTN_STEP, mask, v_scale, l, o, step->o_floats);
        paged__fetch_some(next, PAGED__LINES_A_ROW / 2);
    }
    const __m512 top = tops_of_rows(top_of), most = _mm512_set1_ps(255),
                 least = _mm512_set1_ps(PAGED__I8_P_MIN);
    _Alignas(64) float by[16], scale[16];
    _mm512_store_ps(by, _mm512_maskz_div_ps(_mm512_cmp_ps_mask(top, least, _CMP_GE_OQ), most, top));
    /* Not less than, so that NaN is kept. */
    __m512 scales = _mm512_maskz_div_ps(_mm512_cmp_ps_mask(top, least, _CMP_NLT_UQ), top, most);
    _mm512_store_ps(scale, _mm512_permutexvar_ps(transposed(), scales));
    UNROLL for (int i = 0; i < n; i++) {
        paged__i8_p *row = paged__i8_p_row(step, r + i);
        _mm_storeu_ps(row->scale, _mm_load_ps(scale + 4 * i));
        store_weights(row->weight, s + i * PAGED_ATTN_STEP, by + i);
        paged__fetch_some(next, PAGED__LINES_A_ROW / 2);
    }
}

static void softmax(const paged__step *step) {
    __m512 v_scale[4];
    UNROLL for (int j = 0; j < 4; j++) v_scale[j] = _mm512_loadu_ps(step->v.scale[j]);
    paged__lines next = {0, 0};
    if (step->k.looks_near && step->n_rows <= FEW) {
        const paged__distances ahead = paged__distances_of((step->head_dim_k + 3) / 4 * 64, true);
        next = paged__lines_behind(&step->k, ahead.far, ahead.tile_bytes);
    }
    int32_t r = 0;
    for (; r + WEIGHT_ROWS <= step->n_rows; r += WEIGHT_ROWS)
        weigh_rows(step, r, WEIGHT_ROWS, v_scale, &next);
    switch (step->n_rows - r) {
    case 1:
        weigh_rows(step, r, 1, v_scale, &next);
        break;
    case 2:
        weigh_rows(step, r, 2, v_scale, &next);
        break;
    case 3:
        weigh_rows(step, r, 3, v_scale, &next);
        break;
    default:
        break;
    }
}

/* ---- values ---- */

/* What rows r … r + n - 1 need of tile j, and where what comes lies, for each group. */
typedef struct pv_work {
    __m512i weight[PV_ROWS][GROUPS];
    __m512 scale[PV_ROWS];
    float *o[PV_ROWS];
    const uint8_t *near[GROUPS], *far[GROUPS];
} pv_work;

/* The elements d … d + 15 of V, of which those under the mask exist. With `brings`, what comes is
 * brought in. */
INLINE void pv_lanes(const pv_work *w, const uint8_t *v, bool brings, const bool near, int64_t group_bytes,
                     int64_t d, const int n, __mmask16 mask) {
    __m512i sum[PV_ROWS];
    UNROLL for (int i = 0; i < n; i++) sum[i] = _mm512_setzero_si512();
    UNROLL for (int g = 0; g < GROUPS; g++) {
        __m512i four = _mm512_maskz_loadu_epi32(mask, v + g * group_bytes + d * 4);
        if (brings) paged__fetch_lines(w->near[g] + d * 4, w->far[g] + d * 4, near);
        UNROLL for (int i = 0; i < n; i++) sum[i] = add_products(sum[i], w->weight[i][g], four);
    }
    UNROLL for (int i = 0; i < n; i++) {
        __m512 o = _mm512_loadu_ps(w->o[i] + d);
        _mm512_storeu_ps(w->o[i] + d, _mm512_fmadd_ps(w->scale[i], _mm512_cvtepi32_ps(sum[i]), o));
    }
}

INLINE void pv_tile(const paged__step *step, int32_t r, int32_t j, const int n, const paged__distances *ahead,
                    const bool near) {
    const uint8_t *v = step->v.at[j];
    int64_t dv = step->head_dim_v, d = 0;
    const bool brings = r == 0;
    paged__stream f = {0};
    if (brings) f = paged__stream_of(&step->v, j, ahead, near);
    pv_work w;
    UNROLL for (int i = 0; i < n; i++) {
        const paged__i8_p *p = paged__i8_p_row(step, r + i);
        w.scale[i] = _mm512_set1_ps(p->scale[j]);
        w.o[i] = step->o + (r + i) * step->o_stride;
        UNROLL for (int g = 0; g < GROUPS; g++) w.weight[i][g] =
            broadcast4(p->weight + j * PAGED_TILE + g * 4);
    }
    /* A group in which a distance changes tiles has lines of the wrong one, unless it does so at its end. */
    UNROLL for (int g = 0; g < GROUPS; g++) {
        w.near[g] = paged__byte_ahead(&f.near, g * dv * 4);
        w.far[g] = paged__byte_ahead(&f.far, g * dv * 4);
    }
    if (brings) /* with a test in each turn it would be slower */
        for (; d + 16 <= dv; d += 16) pv_lanes(&w, v, true, near, dv * 4, d, n, 0xffff);
    else
        for (; d + 16 <= dv; d += 16) pv_lanes(&w, v, false, near, dv * 4, d, n, 0xffff);
    if (d < dv) pv_lanes(&w, v, brings, near, dv * 4, d, n, (__mmask16)(0xffffu >> (16 - (dv - d))));
}

/* Rows r … r + n - 1 against the tiles first … last, of which some may see nothing: weights and scales of
 * zero make up for it. */
INLINE void pv_rows(const paged__step *step, int32_t r, const int n, int32_t first, int32_t last,
                    const bool near) {
    const paged__distances ahead = paged__distances_of(step->head_dim_v * PAGED_TILE, near);
    for (int32_t j = first; j <= last; j++) pv_tile(step, r, j, n, &ahead, near);
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
