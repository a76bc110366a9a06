/* attn_avx512_bf16.c: the kernels of ops.h for bf16 with AVX-512 BF16, whose VDPBF16PS adds the products of
 * two pairs of bf16 to a float. So everything here works in pairs: q and K in pairs of elements, p and V in
 * pairs of tokens (2 i, 2 i + 1), which is how the packed layout has them.
 * weights_bf16.h has rows of q and the softmax.
 *
 * qk: 6 rows × 4 tiles are 24 accumulators; a vector of K holds a pair of elements of 16 keys, a pair of q is
 *     broadcast. Tiles that none of the 6 rows sees are left out.
 * pv: 6 rows × 64 elements (up to 3 rows × 128); a vector of V holds a pair of tokens of 16 elements, a pair
 *     of p is broadcast. Of pairs that not all the rows see, what a row does not see is masked.
 */
#include <immintrin.h>

#include "ops/ops.h"
#include "ops/scores.h"
#include "ops/weights_bf16.h"

enum {
    ROWS = 6,    /* of a block, in which all rows share what is loaded */
    QK_ROWS = 8, /* of qk with few rows */
    PAIRS = PAGED_TILE / 2
};

INLINE __m512i broadcast_pair(const uint8_t *at) {
    int32_t pair;
    memcpy(&pair, at, sizeof pair);
    return _mm512_set1_epi32(pair);
}

/* ---- prefetching ---- */

/* With few rows, what is brought into the cache meanwhile: lines of tiles at two distances ahead. */
typedef struct stream {
    const uint8_t *near, *far;
} stream;

INLINE stream stream_of(const paged__tiles *tiles, int32_t tile, int64_t lines) {
    int32_t bytes = (int32_t)lines * 64;
    return (stream){paged__tile_ahead(tiles, tile, PAGED__NEAR_BYTES, bytes),
                    paged__tile_ahead(tiles, tile, PAGED__FAR_BYTES, bytes)};
}

INLINE void fetch_stream(const stream *f, int64_t at) {
    _mm_prefetch((const char *)f->near + at, _MM_HINT_T1);
    _mm_prefetch((const char *)f->far + at, _MM_HINT_T1);
}

/* With many rows, lines of the tiles of the next call: a line of each of the tiles first … end - 1, at the
 * place that is worked on. So they come evenly: a burst fills the queue of misses, and all work waits. */
typedef struct bringer {
    const paged__tiles *tiles;
    int32_t first, end;
} bringer;

/* The tiles that part `part` of n_parts brings. Tiles of another type come in another way. */
INLINE bringer bringer_of(const paged__tiles *tiles, int32_t lines, int32_t part, int32_t n_parts) {
    int32_t n = tiles->next_lines == lines ? tiles->n_next : 0;
    return (bringer){tiles, n * part / n_parts, n * (part + 1) / n_parts};
}

INLINE void bring_line(const bringer *b, int64_t at) {
    for (int32_t i = b->first; i < b->end; i++)
        _mm_prefetch((const char *)b->tiles->next[i] + at, _MM_HINT_T0);
}

INLINE int64_t k_tile_lines(const paged__step *step) {
    return (step->head_dim_k + 1) / 2;
}

INLINE int64_t v_tile_lines(const paged__step *step) {
    return (step->head_dim_v + 1) / 2;
}

/* ---- scores ---- */

/* One pair of elements: n_rows rows against n_tiles tiles. */
INLINE void qk_pair(__m512 acc[ROWS][4], const uint8_t *q, int64_t q_stride, const uint8_t *const *k,
                    int64_t at, const int n_rows, const int n_tiles) {
    __m512i pairs[4];
    UNROLL for (int j = 0; j < n_tiles; j++) pairs[j] = _mm512_loadu_si512(k[j] + at);
    UNROLL for (int r = 0; r < n_rows; r++) {
        __m512i qd = broadcast_pair(q + r * q_stride);
        UNROLL for (int j = 0; j < n_tiles; j++) acc[r][j] = dot(acc[r][j], qd, pairs[j]);
    }
}

/* Many rows: the tiles first_tile … first_tile + n_tiles - 1. */
INLINE void qk_tiles(const paged__step *step, const bringer *bring, int32_t first_row, int32_t first_tile,
                     const int n_rows, const int n_tiles) {
    const uint8_t *q = step->q + first_row * step->q_stride, *k[4];
    const int64_t q_stride = step->q_stride;
    __m512 acc[ROWS][4];
    UNROLL for (int j = 0; j < n_tiles; j++) k[j] = step->k.at[first_tile + j];
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int j = 0; j < n_tiles; j++) acc[r][j] = _mm512_setzero_ps();
    }
    for (int64_t at = 0, end = k_tile_lines(step) * 64; at < end; at += 64, q += 4) {
        bring_line(bring, at);
        qk_pair(acc, q, q_stride, k, at, n_rows, n_tiles);
    }
    float *s = step->s + first_row * PAGED_ATTN_STEP + first_tile * PAGED_TILE;
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int j = 0; j < n_tiles; j++)
            _mm512_storeu_ps(s + r * PAGED_ATTN_STEP + j * PAGED_TILE, acc[r][j]);
    }
}

INLINE void qk_rows(const paged__step *step, const bringer *bring, int32_t r, const int n_rows) {
    int32_t first = step->seen[r].first / PAGED_TILE, end = step->seen[r + n_rows - 1].end;
    switch ((end + PAGED_TILE - 1) / PAGED_TILE - first) {
    case 1:
        qk_tiles(step, bring, r, first, n_rows, 1);
        break;
    case 2:
        qk_tiles(step, bring, r, first, n_rows, 2);
        break;
    case 3:
        qk_tiles(step, bring, r, first, n_rows, 3);
        break;
    default:
        qk_tiles(step, bring, r, 0, n_rows, 4);
        break;
    }
}

/* A block of rows: of more than 12 they have 4 … 6. */
INLINE void qk_block(const paged__step *step, const bringer *bring, int32_t r, int32_t n) {
    switch (n) {
    case 4:
        qk_rows(step, bring, r, 4);
        break;
    case 5:
        qk_rows(step, bring, r, 5);
        break;
    default:
        qk_rows(step, bring, r, 6);
        break;
    }
}

/* Few rows: one tile. */
INLINE void qk_tile(const paged__step *step, int32_t first_row, int32_t tile, const int n_rows) {
    const uint8_t *q = step->q + first_row * step->q_stride, *k = step->k.at[tile];
    stream f = stream_of(&step->k, tile, k_tile_lines(step));
    __m512 acc[QK_ROWS];
    UNROLL for (int r = 0; r < n_rows; r++) acc[r] = _mm512_setzero_ps();
    for (int64_t at = 0, end = k_tile_lines(step) * 64; at < end; at += 64, q += 4) {
        if (first_row == 0) fetch_stream(&f, at);
        __m512i pairs = _mm512_loadu_si512(k + at);
        UNROLL for (int r = 0; r < n_rows; r++) acc[r] =
            dot(acc[r], broadcast_pair(q + r * step->q_stride), pairs);
    }
    float *s = step->s + first_row * PAGED_ATTN_STEP + tile * PAGED_TILE;
    UNROLL for (int r = 0; r < n_rows; r++) _mm512_storeu_ps(s + r * PAGED_ATTN_STEP, acc[r]);
}

INLINE void qk_tile_block(const paged__step *step, int32_t tile, int32_t r, int32_t n) {
    switch (n) {
    case 1:
        qk_tile(step, r, tile, 1);
        break;
    case 2:
        qk_tile(step, r, tile, 2);
        break;
    case 3:
        qk_tile(step, r, tile, 3);
        break;
    case 4:
        qk_tile(step, r, tile, 4);
        break;
    case 5:
        qk_tile(step, r, tile, 5);
        break;
    case 6:
        qk_tile(step, r, tile, 6);
        break;
    case 7:
        qk_tile(step, r, tile, 7);
        break;
    default:
        qk_tile(step, r, tile, 8);
        break;
    }
}

static void qk_few(const paged__step *step) {
    const paged__range *seen = step->seen;
    int32_t last = (seen[step->n_rows - 1].end - 1) / PAGED_TILE;
    for (int32_t tile = seen[0].first / PAGED_TILE; tile <= last; tile++)
        for (int32_t r = 0, n; r < step->n_rows; r += n) {
            n = paged__next_rows(step->n_rows - r, QK_ROWS);
            qk_tile_block(step, tile, r, n);
        }
}

static void qk(const paged__step *step) {
    if (step->n_rows <= PAGED__FEW_ROWS) {
        qk_few(step);
        return;
    }
    const bringer nothing = {0};
    for (int32_t block = 0, r = 0, next; r < step->n_rows; r = next) {
        next = paged__block_row(step, ROWS, ++block);
        qk_block(step, &nothing, r, next - r);
    }
}

/* ---- values ---- */

/* One pair of tokens: n_rows rows, n_vecs vectors of 16 elements, of which the last has only those under
 * `mask`. */
INLINE void pv_pair(__m512 acc[ROWS][8], const uint8_t *p, int64_t p_stride, const uint8_t *v, __mmask16 mask,
                    const int n_rows, const int n_vecs) {
    __m512i pairs[8];
    UNROLL for (int j = 0; j < n_vecs; j++) pairs[j] =
        _mm512_maskz_loadu_epi32(j == n_vecs - 1 ? mask : 0xffff, v + j * 64);
    UNROLL for (int r = 0; r < n_rows; r++) {
        __m512i weights = broadcast_pair(p + r * p_stride);
        UNROLL for (int j = 0; j < n_vecs; j++) acc[r][j] = dot(acc[r][j], weights, pairs[j]);
    }
}

INLINE void load_rows(const paged__step *step, __m512 acc[ROWS][8], int32_t first_row, int64_t d,
                      const int n_rows, const int n_vecs) {
    const float *o = step->o + first_row * step->o_stride + d;
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int j = 0; j < n_vecs; j++) acc[r][j] = _mm512_loadu_ps(o + r * step->o_stride + j * 16);
    }
}

INLINE void store_rows(const paged__step *step, __m512 acc[ROWS][8], int32_t first_row, int64_t d,
                       const int n_rows, const int n_vecs) {
    float *o = step->o + first_row * step->o_stride + d;
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int j = 0; j < n_vecs; j++) _mm512_storeu_ps(o + r * step->o_stride + j * 16, acc[r][j]);
    }
}

/* The same, each row with the tokens that it sees of pair i of the step: others are not multiplied. */
INLINE void pv_pair_edge(__m512 acc[ROWS][8], const uint8_t *p, const paged__range *seen, int32_t i,
                         const uint8_t *v, __mmask16 mask, const int n_rows, const int n_vecs) {
    UNROLL for (int r = 0; r < n_rows; r++) {
        __mmask32 tokens = (uint32_t)(paged__seen_mask(seen[r]) >> 2 * i & 3) * 0x55555555u;
        __m512i weights = broadcast_pair(p + r * P_BYTES);
        UNROLL for (int j = 0; j < n_vecs; j++) {
            __m512i pairs = _mm512_maskz_loadu_epi32(j == n_vecs - 1 ? mask : 0xffff, v + j * 64);
            acc[r][j] = dot(acc[r][j], weights, _mm512_maskz_mov_epi16(tokens, pairs));
        }
    }
}

/* Many rows: pairs of tokens, of which some of the rows see some from `low` on and before `high`, and all
 * rows all from `first` on and before `end`. */
typedef struct pair_range {
    int32_t low, first, end, high;
} pair_range;

INLINE pair_range pairs_of(const paged__range *seen, int32_t n_rows) {
    int32_t last = n_rows - 1, first = (seen[last].first + 1) / 2;
    return (pair_range){seen[0].first / 2, first, PAGED_MAX(seen[0].end / 2, first),
                        (seen[last].end + 1) / 2};
}

INLINE const uint8_t *v_at(const paged__step *step, int32_t i, int64_t d) {
    return (const uint8_t *)step->v.at[i / PAIRS] + (i % PAIRS * (int64_t)step->head_dim_v + d) * 4;
}

/* Many rows: elements from d on. */
INLINE void pv_pass(const paged__step *step, const bringer *bring, pair_range pairs, int32_t first_row,
                    int64_t d, __mmask16 mask, const int n_rows, const int n_vecs) {
    const uint8_t *p = step->p + first_row * P_BYTES;
    const paged__range *seen = step->seen + first_row;
    int64_t pair_bytes = step->head_dim_v * (int64_t)4;
    int32_t i = pairs.low;
    __m512 acc[ROWS][8];
    load_rows(step, acc, first_row, d, n_rows, n_vecs);
    for (; i < pairs.first; i++)
        pv_pair_edge(acc, p + i * 4, seen, i, v_at(step, i, d), mask, n_rows, n_vecs);
    while (i < pairs.end) {
        const uint8_t *v = v_at(step, i, d);
        for (int32_t stop = PAGED_MIN((i / PAIRS + 1) * PAIRS, pairs.end); i < stop; i++, v += pair_bytes) {
            if (i < 8 * n_vecs) bring_line(bring, (d / 2 + i) * 64);
            pv_pair(acc, p + i * 4, P_BYTES, v, mask, n_rows, n_vecs);
        }
    }
    for (; i < pairs.high; i++) pv_pair_edge(acc, p + i * 4, seen, i, v_at(step, i, d), mask, n_rows, n_vecs);
    store_rows(step, acc, first_row, d, n_rows, n_vecs);
}

/* Few rows: the pairs i0 … i1 - 1, which lie in one tile; each brings in `rate` lines from `f` on. */
INLINE void pv_tile(const paged__step *step, stream f, int32_t rate, int32_t first_row, int32_t i0,
                    int32_t i1, int64_t d, __mmask16 mask, const int n_rows, const int n_vecs) {
    const uint8_t *p = step->p + first_row * step->p_stride + i0 * 4;
    int64_t pair_bytes = step->head_dim_v * (int64_t)4, p_stride = step->p_stride;
    const uint8_t *v = (const uint8_t *)step->v.at[i0 / PAIRS] + i0 % PAIRS * pair_bytes + d * 4;
    __m512 acc[ROWS][8];
    load_rows(step, acc, first_row, d, n_rows, n_vecs);
    for (int64_t i = i0, at = 0; i < i1; i++, v += pair_bytes, p += 4) {
        for (int64_t stop = at + rate * 64; at < stop; at += 64) fetch_stream(&f, at);
        pv_pair(acc, p, p_stride, v, mask, n_rows, n_vecs);
    }
    store_rows(step, acc, first_row, d, n_rows, n_vecs);
}

/* Vectors of the next pass, of which the last may be a part. */
INLINE int32_t pass_vecs(int32_t n_elements, const int n_rows) {
    if (n_rows <= 3 && n_elements >= 128) return 8;
    return n_elements >= 64 ? 4 : n_elements >= 32 ? 2 : 1;
}

/* Elements under this mask are there, of the 16 from d on. */
INLINE __mmask16 mask_at(int32_t dv, int32_t d) {
    return (__mmask16)(0xffffu >> (16 - PAGED_MIN(dv - d, 16)));
}

INLINE void pv_rows(const paged__step *step, const bringer *bring, int32_t r, const int n_rows) {
    pair_range pairs = pairs_of(step->seen + r, n_rows);
    int32_t dv = step->head_dim_v;
    for (int32_t d = 0, n; d < dv; d += 16 * n) {
        n = pass_vecs(dv - d, n_rows);
        if (n == 4)
            pv_pass(step, bring, pairs, r, d, 0xffff, n_rows, 4);
        else if (n == 2)
            pv_pass(step, bring, pairs, r, d, 0xffff, n_rows, 2);
        else
            pv_pass(step, bring, pairs, r, d, mask_at(dv, d), n_rows, 1);
    }
}

/* A block of rows, likewise. */
INLINE void pv_block(const paged__step *step, const bringer *bring, int32_t r, int32_t n) {
    switch (n) {
    case 4:
        pv_rows(step, bring, r, 4);
        break;
    case 5:
        pv_rows(step, bring, r, 5);
        break;
    default:
        pv_rows(step, bring, r, 6);
        break;
    }
}

/* A block of rows, one of n_blocks, which share the lines that are to be brought in. */
INLINE void pv_tile_dims(const paged__step *step, int32_t block, int32_t n_blocks, int32_t r, int32_t i0,
                         int32_t i1, const int n_rows) {
    const __mmask16 all = 0xffff;
    stream f = stream_of(&step->v, i0 / PAIRS, v_tile_lines(step));
    int32_t dv = step->head_dim_v;
    f.near += v_tile_lines(step) * block / n_blocks * 64;
    f.far += v_tile_lines(step) * block / n_blocks * 64;
    for (int32_t d = 0, n, rate; d < dv; d += 16 * n) {
        n = pass_vecs(dv - d, n_rows);
        rate = (n + n_blocks - 1) / n_blocks;
        if (n_rows <= 3 && n == 8)
            pv_tile(step, f, rate, r, i0, i1, d, all, n_rows, 8);
        else if (n == 4)
            pv_tile(step, f, rate, r, i0, i1, d, all, n_rows, 4);
        else if (n == 2)
            pv_tile(step, f, rate, r, i0, i1, d, all, n_rows, 2);
        else
            pv_tile(step, f, rate, r, i0, i1, d, mask_at(dv, d), n_rows, 1);
        f.near += rate * PAIRS * 64;
        f.far += rate * PAIRS * 64;
    }
}

INLINE void pv_tile_block(const paged__step *step, int32_t block, int32_t n_blocks, int32_t r, int32_t n,
                          int32_t i0, int32_t i1) {
    switch (n) {
    case 1:
        pv_tile_dims(step, block, n_blocks, r, i0, i1, 1);
        break;
    case 2:
        pv_tile_dims(step, block, n_blocks, r, i0, i1, 2);
        break;
    case 3:
        pv_tile_dims(step, block, n_blocks, r, i0, i1, 3);
        break;
    case 4:
        pv_tile_dims(step, block, n_blocks, r, i0, i1, 4);
        break;
    case 5:
        pv_tile_dims(step, block, n_blocks, r, i0, i1, 5);
        break;
    default:
        pv_tile_dims(step, block, n_blocks, r, i0, i1, 6);
        break;
    }
}

/* The pairs i0 … i1 - 1 of row r, tokens that it does not see masked. The same operations as pv_pairs. */
static void pv_edge(const paged__step *step, int32_t r, int32_t i0, int32_t i1) {
    paged__range seen = step->seen[r];
    float *o = step->o + r * step->o_stride;
    const uint8_t *p = step->p + r * step->p_stride;
    int64_t dv = step->head_dim_v;
    for (int64_t i = i0; i < i1; i++) {
        __mmask32 even = 2 * i >= seen.first && 2 * i < seen.end ? 0x55555555 : 0,
                  odd = 2 * i + 1 >= seen.first && 2 * i + 1 < seen.end ? 0xaaaaaaaa : 0;
        const uint8_t *v = step->v.at[i / PAIRS];
        __m512i weights = broadcast_pair(p + i * 4);
        for (int64_t d = 0; d < dv; d += 16) {
            __mmask32 mask = dv - d >= 16 ? 0xffffffff : (1u << (2 * (dv - d))) - 1;
            __m512i pairs = _mm512_maskz_loadu_epi16(mask & (even | odd), v + (i % PAIRS * dv + d) * 4);
            _mm512_storeu_ps(o + d, dot(_mm512_loadu_ps(o + d), weights, pairs));
        }
    }
}

/* Tile by tile, so that a tile is in L1 while blocks and passes go over it. */
static void pv_few(const paged__step *step) {
    const paged__range *seen = step->seen;
    int32_t n_rows = step->n_rows, n_blocks = (n_rows + ROWS - 1) / ROWS;
    /* The pairs that all rows see whole. */
    int32_t first = (seen[n_rows - 1].first + 1) / 2, end = PAGED_MAX(seen[0].end / 2, first);
    for (int32_t r = 0; r < n_rows; r++)
        if (seen[r].first < 2 * first)
            pv_edge(step, r, seen[r].first / 2, PAGED_MIN(first, (seen[r].end + 1) / 2));
    for (int32_t i0 = first, i1; i0 < end; i0 = i1) {
        i1 = PAGED_MIN((i0 / PAIRS + 1) * PAIRS, end);
        for (int32_t r = 0, n, block = 0; r < n_rows; r += n, block++) {
            n = paged__next_rows(n_rows - r, ROWS);
            pv_tile_block(step, block, n_blocks, r, n, i0, i1);
        }
    }
    for (int32_t r = 0; r < n_rows; r++)
        if (seen[r].end > 2 * end) pv_edge(step, r, end, (seen[r].end + 1) / 2);
}

static void pv(const paged__step *step) {
    if (step->n_rows <= PAGED__FEW_ROWS) {
        pv_few(step);
        return;
    }
    const bringer nothing = {0};
    for (int32_t block = 0, r = 0, next; r < step->n_rows; r = next) {
        next = paged__block_row(step, ROWS, ++block);
        pv_block(step, &nothing, r, next - r);
    }
}

/* ---- all three, of many rows ---- */

/* Scores are a block ahead, so that the processor, which looks some hundred instructions ahead, is not held
 * up by the weights that follow from them. K and V stay in L1 all the time. */
INLINE void attend_rows(const paged__step *step, const bool evenly) {
    int32_t n = paged__n_blocks(step, ROWS), r = 0, next = paged__block_row(step, ROWS, 1);
    bringer k = {0}, v = {0};
    if (evenly) k = bringer_of(&step->k, (int32_t)k_tile_lines(step), 0, n);
    qk_block(step, &k, 0, next);
    for (int32_t block = 0, after; block < n; block++, r = next, next = after) {
        after = block + 1 < n ? paged__block_row(step, ROWS, block + 2) : next;
        softmax_rows(step, step->s + r * PAGED_ATTN_STEP, step->p + r * P_BYTES, r, next);
        if (evenly) {
            k = bringer_of(&step->k, (int32_t)k_tile_lines(step), block + 1, n);
            v = bringer_of(&step->v, (int32_t)v_tile_lines(step), block, n);
        } else {
            paged__bring(&step->k, block, n);
        }
        if (after > next) qk_block(step, &k, next, after - next);
        if (!evenly) paged__bring(&step->v, block, n);
        pv_block(step, &v, r, next - r);
    }
}

/* Evenly where memory has more to bring, in a cascade; for a prompt the loops are shorter without. */
static void attend(const paged__step *step) {
    if (step->k.n_next > PAGED__STEP_TILES)
        attend_rows(step, true);
    else
        attend_rows(step, false);
}

const paged__type_kernels paged__avx512_bf16_bf16 = {.q_bytes = q_bytes,
                                                     .p_bytes = P_BYTES,
                                                     .load_q = load_q,
                                                     .qk = qk,
                                                     .softmax = softmax,
                                                     .pv = pv,
                                                     .attend = attend,
                                                     .pack_k = paged__pack_k_bf16_avx512,
                                                     .pack_v = paged__pack_v_bf16_avx512,
                                                     .to_f32 = paged__to_f32_bf16_avx512,
                                                     .from_f32 = paged__from_f32_bf16_avx512};

const paged__kernels paged__kernels_avx512_bf16 = {.name = "avx512_bf16",
                                                   .of = {[PAGED_TYPE_F16] = &paged__avx512_f16,
                                                          [PAGED_TYPE_F32] = &paged__avx512_f32,
                                                          [PAGED_TYPE_BF16] = &paged__avx512_bf16_bf16,
                                                          [PAGED_TYPE_I8] = &paged__avx512_vnni_i8},
                                                   .merge = paged__merge_avx512,
                                                   .divide = paged__divide_avx512,
                                                   .blocks_exist = paged__blocks_exist_avx512,
                                                   .softcap = paged__softcap,
                                                   .alibi = paged__alibi};
