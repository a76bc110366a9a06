/* attn_amx.c: the kernels of ops.h for bf16 with Intel AMX, whose TDPBF16PS multiplies up to 16 rows of up to
 * 32 bf16 by as many lines of pairs of 16 columns. A row of a product depends on that row alone: rows are
 * configured, 1 … 16 at a time, and bits do not depend on how many.
 *
 * The packed layout is what it wants: 16 lines of a tile of K are 32 elements of 16 tokens, and 16 columns of
 * a tile of V are its 8 pairs of tokens. Each product adds up pairs, even and odd ones apart, and then the
 * sum to what there was, so its lines are part of the bits:
 *
 * qk: rows × 4 tiles; a chain of products of 32 elements, the last one of what is left of head_dim_k.
 * pv: rows × 64 elements; a chain of tiles. A weight of zero times any finite value changes nothing, so it is
 *     enough that tokens which no row sees are zero, in a copy, and that what some rows see and others do not
 *     is finite. Where it is not, rows that see the same are worked on apart.
 *
 * q and p are those of weights_bf16.h. TDPBF16PS also takes denormals for zero.
 */
#include <immintrin.h>

#include "ops/amx/tiles.h"
#include "ops/ops.h"
#include "ops/scores.h"
#include "ops/weights_bf16.h"

enum {
    ROWS = 16,              /* of a tile register at most */
    LINE = 64,              /* bytes of such a row at most */
    LINES = 16,             /* of K in one product */
    PAIRS = PAGED_TILE / 2, /* the same of a tile of V */
    TILES = PAGED__STEP_TILES
};

/* ---- tile registers ---- */

/* 0 … 3 are sums, 4 is of q, 5 of K; 6 and 7 are like 4 and 5, with fewer lines, for the rest of K, and for p
 * and V. */

/* What is loaded on this thread, as `configure` has it; 0: nothing. Between the first of these calls of a run
 * and `end` nobody else loads shapes. */
static _Thread_local int32_t loaded;

/* To load shapes takes nearly 200 cycles, to look at them in their register more than 20, so they stay until
 * the end, and memory tells which they are. */
static __attribute__((noinline)) void load_shapes(int32_t n, int32_t lines) {
    uint8_t rows = (uint8_t)n, few = (uint8_t)lines;
    const tile_shapes shapes = {
        .palette = 1,
        .row_bytes = {LINE, LINE, LINE, LINE, LINE, LINE, (uint16_t)(4 * lines), LINE},
        .n_rows = {rows, rows, rows, rows, rows, LINES, rows, few},
    };
    TILE_SHAPES_LOAD(shapes);
}

/* For n rows of q or p; 6 and 7 for so many lines of K or V. */
INLINE void configure(int32_t n, int32_t lines) {
    int32_t wanted = n * (LINES + 1) + lines;
    if (loaded == wanted) return;
    load_shapes(n, lines);
    loaded = wanted;
}

static void end(void) {
    TILE_RELEASE();
    loaded = 0;
}

static int32_t k_lines(const paged__step *step) {
    return (step->head_dim_k + 1) / 2;
}

/* Most often the same: of K, a multiple of 16 elements leaves 8 lines or none. */
static void configure_k(const paged__step *step, int32_t n) {
    int32_t rest = k_lines(step) % LINES;
    configure(n, rest ? rest : PAIRS);
}

static void configure_v(int32_t n) {
    configure(n, PAIRS);
}

/* ---- prefetching ---- */

/* With few rows: lines of tiles at two distances ahead, near for the reason of `looks_near` (ops.h). */
enum { K_NEAR = 1, V_NEAR = 2, FAR = 3 };

typedef struct stream {
    const uint8_t *near, *far;
    int32_t n; /* lines to come */
} stream;

/* From line `first` on, of tiles of so many. */
static stream stream_of(const paged__tiles *tiles, int32_t tile, int32_t near, int32_t first, int32_t lines) {
    return (stream){paged__tile_on(tiles, tile + near) + first * LINE,
                    paged__tile_on(tiles, tile + FAR) + first * LINE, lines - first};
}

/* Of a tile register all lines are read at once, so the near ones come into L1. */
INLINE void fetch_stream(stream *f, int32_t n) {
    n = PAGED_MIN(n, f->n);
    for (int32_t i = 0; i < n; i++, f->near += LINE, f->far += LINE) {
        _mm_prefetch((const char *)f->near, _MM_HINT_T0);
        _mm_prefetch((const char *)f->far, _MM_HINT_T1);
    }
    f->n -= n;
}

/* With many rows: lines of K and then V of the next call, `rate` at a time. */
typedef struct bringer {
    const paged__tiles *tiles[2];
    const uint8_t *line;       /* the next one */
    int32_t n, kv, tile, rate; /* n: lines to come of this tile */
} bringer;

static void bring_tile(bringer *b) {
    b->line = b->tiles[b->kv]->next[b->tile];
    b->n = b->tiles[b->kv]->next_lines;
}

/* Runs of lines, since it is called beside products. */
INLINE void bring(bringer *b) {
    for (int32_t rest = b->rate; rest > 0 && b->n > 0;) {
        int32_t n = PAGED_MIN(rest, b->n);
        for (const uint8_t *end = b->line + n * LINE; b->line < end; b->line += LINE)
            _mm_prefetch((const char *)b->line, _MM_HINT_T1);
        rest -= n;
        b->n -= n;
        if (b->n > 0) continue;
        if (++b->tile == b->tiles[b->kv]->n_next) {
            b->tile = 0;
            if (++b->kv == 2) return;
        }
        bring_tile(b);
    }
}

static bringer bringer_of(const paged__step *step, int32_t n_times) {
    bringer b = {.tiles = {&step->k, &step->v}};
    if (step->k.next_lines <= 0 || step->v.next_lines <= 0) return b;
    int32_t n = step->k.n_next * step->k.next_lines + step->v.n_next * step->v.next_lines;
    b.rate = (n + n_times - 1) / n_times;
    bring_tile(&b);
    return b;
}

/* ---- scores ---- */

/* A chunk of the scores of the rows at q with n_tiles tiles. */
#define QK_CHUNK(rows, lines)                                                                                \
    do {                                                                                                     \
        TILE_LOAD(rows, q + at, step->q_stride);                                                             \
        TILE_LOAD(lines, k[0] + at * LINES, LINE);                                                           \
        TILE_DOT_BF16(0, rows, lines);                                                                       \
        if (n_tiles > 1) {                                                                                   \
            TILE_LOAD(lines, k[1] + at * LINES, LINE);                                                       \
            TILE_DOT_BF16(1, rows, lines);                                                                   \
        }                                                                                                    \
        if (n_tiles > 2) {                                                                                   \
            TILE_LOAD(lines, k[2] + at * LINES, LINE);                                                       \
            TILE_DOT_BF16(2, rows, lines);                                                                   \
        }                                                                                                    \
        if (n_tiles > 3) {                                                                                   \
            TILE_LOAD(lines, k[3] + at * LINES, LINE);                                                       \
            TILE_DOT_BF16(3, rows, lines);                                                                   \
        }                                                                                                    \
    } while (0)

/* Rows from r on, as many as are configured, with n_tiles tiles from `tile` on; their scores go to s. */
INLINE void qk_tiles(const paged__step *step, bringer *b, int32_t r, float *s, int32_t tile,
                     const int n_tiles) {
    const uint8_t *q = step->q + r * step->q_stride, *k[4];
    for (int32_t j = 0; j < n_tiles; j++) k[j] = step->k.at[tile + j];
    s += tile * PAGED_TILE;
    TILE_ZERO(0);
    if (n_tiles > 1) TILE_ZERO(1);
    if (n_tiles > 2) TILE_ZERO(2);
    if (n_tiles > 3) TILE_ZERO(3);
    int64_t at = 0, lines = k_lines(step), whole = lines / LINES * LINE;
    for (; at < whole; at += LINE) {
        QK_CHUNK(4, 5);
        if (b) bring(b);
    }
    if (lines % LINES) QK_CHUNK(6, 7);
    const int64_t s_bytes = PAGED_ATTN_STEP * (int64_t)sizeof(float);
    TILE_STORE(0, s, s_bytes);
    if (n_tiles > 1) TILE_STORE(1, s + PAGED_TILE, s_bytes);
    if (n_tiles > 2) TILE_STORE(2, s + 2 * PAGED_TILE, s_bytes);
    if (n_tiles > 3) TILE_STORE(3, s + 3 * PAGED_TILE, s_bytes);
    if (b) bring(b);
}

/* The rows r … r + n - 1 with the tiles that they see. */
INLINE void qk_rows(const paged__step *step, bringer *b, int32_t r, int32_t n, float *s) {
    int32_t first = step->seen[r].first / PAGED_TILE, end = step->seen[r + n - 1].end;
    switch ((end + PAGED_TILE - 1) / PAGED_TILE - first) {
    case 1:
        qk_tiles(step, b, r, s, first, 1);
        break;
    case 2:
        qk_tiles(step, b, r, s, first, 2);
        break;
    case 3:
        qk_tiles(step, b, r, s, first, 3);
        break;
    default:
        qk_tiles(step, b, r, s, 0, 4);
        break;
    }
}

/* Few rows: tile after tile, line after line. */
static void qk_few(const paged__step *step) {
    const int n_tiles = 1;
    const uint8_t *q = step->q, *k[4]; /* of QK_CHUNK; one is used */
    int32_t last = (step->seen[step->n_rows - 1].end - 1) / PAGED_TILE;
    configure_k(step, step->n_rows);
    for (int32_t tile = step->seen[0].first / PAGED_TILE; tile <= last; tile++) {
        int64_t at = 0, lines = k_lines(step), whole = lines / LINES * LINE;
        stream f = stream_of(&step->k, tile, K_NEAR, 0, (int32_t)lines);
        k[0] = step->k.at[tile];
        TILE_ZERO(0);
        for (; at < whole; at += LINE) {
            QK_CHUNK(4, 5);
            fetch_stream(&f, LINES);
        }
        if (lines % LINES) QK_CHUNK(6, 7);
        fetch_stream(&f, LINES);
        TILE_STORE(0, step->s + tile * PAGED_TILE, PAGED_ATTN_STEP * sizeof(float));
    }
}

/* Rows of one block are few: a step of them takes less time than its K and V take to come from memory. */
static void qk(const paged__step *step) {
    if (step->n_rows <= ROWS) {
        qk_few(step);
        return;
    }
    for (int32_t r = 0, n; r < step->n_rows; r += n) {
        n = PAGED_MIN(step->n_rows - r, ROWS);
        configure_k(step, n);
        qk_rows(step, NULL, r, n, step->s + r * PAGED_ATTN_STEP);
    }
}

/* ---- weights ---- */

static void softmax_few(const paged__step *step) {
    paged__lines next =
        paged__lines_behind(&step->k, (paged__offset){.tiles = FAR}, step->k.next_lines * LINE);
    for (int32_t r = 0; r < step->n_rows; r++) {
        softmax_rows(step, step->s + r * PAGED_ATTN_STEP, step->p + r * step->p_stride, r, r + 1);
        paged__fetch_some(&next, PAGED__LINES_A_ROW);
    }
}

/* Of many rows if softcap or ALiBi is between; else see below. */
static void softmax_of_step(const paged__step *step) {
    if (step->n_rows <= ROWS)
        softmax_few(step);
    else
        softmax(step);
}

/* ---- values ---- */

/* Where the tiles of V lie, or copies in `room`; their pairs of tokens are `stride` bytes apart. */
typedef struct values {
    const uint8_t *at[TILES];
    int64_t stride;
    _Alignas(64) uint8_t room[TILES][PAIRS * PAGED_HEAD_DIM_MAX * 4];
} values;

/* The 16-bit halves that are token 2 i or 2 i + 1 of the step, if it lies in `seen`. */
INLINE __mmask32 halves_of(paged__range seen, int32_t i) {
    return (uint32_t)(paged__seen_mask(seen) >> 2 * i & 3) * 0x55555555u;
}

INLINE const uint8_t *v_pair(const paged__step *step, int32_t i) {
    return (const uint8_t *)step->v.at[i / PAIRS] + i % PAIRS * (int64_t)step->head_dim_v * 4;
}

/* What is there of the 16 pairs from element d on. */
INLINE __mmask16 mask_at(int32_t dv, int32_t d) {
    return (__mmask16)(0xffffu >> (16 - PAGED_MIN(dv - d, 16)));
}

/* Zero where a token is not seen. Behind the last element of a pair is anything, which is in no result. */
static void copy_tile(const paged__step *step, int32_t tile, paged__range seen, uint8_t *to) {
    int32_t dv = step->head_dim_v;
    for (int32_t i = tile * PAIRS; i < (tile + 1) * PAIRS; i++, to += dv * 4) {
        const __mmask32 halves = halves_of(seen, i);
        const uint8_t *from = v_pair(step, i);
        for (int32_t d = 0; d < dv; d += 16) {
            __m512i pairs = _mm512_setzero_si512();
            if (halves) pairs = _mm512_maskz_loadu_epi32(mask_at(dv, d), from + d * 4);
            _mm512_storeu_si512(to + d * 4, _mm512_maskz_mov_epi16(halves, pairs));
        }
    }
}

/* Of the tokens in `seen`, for rows that see nothing else. */
static void find_values(const paged__step *step, paged__range seen, values *v) {
    int32_t last = (seen.end - 1) / PAGED_TILE;
    v->stride = step->head_dim_v * (int64_t)4;
    for (int32_t tile = seen.first / PAGED_TILE; tile <= last; tile++) {
        bool is_whole = seen.first <= tile * PAGED_TILE && seen.end >= (tile + 1) * PAGED_TILE;
        v->at[tile] = step->v.at[tile];
        if (is_whole && step->head_dim_v % 16 == 0) continue;
        v->at[tile] = v->room[tile];
        copy_tile(step, tile, seen, v->room[tile]);
    }
}

/* Neither Inf nor NaN in the tokens of `range`. */
static bool are_finite(const paged__step *step, paged__range range) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 found = 0;
    int32_t dv = step->head_dim_v;
    for (int32_t i = range.first / 2; 2 * i < range.end; i++) {
        const __mmask32 halves = halves_of(range, i);
        const uint8_t *at = v_pair(step, i);
        for (int32_t d = 0; d < dv; d += 16) {
            __m512i pairs = _mm512_maskz_loadu_epi32(mask_at(dv, d), at + d * 4);
            pairs = _mm512_and_si512(pairs, exponent);
            found |= _mm512_mask_cmpeq_epi16_mask(halves, pairs, exponent);
        }
    }
    return found == 0;
}

/* What all rows see, and whether it is finite where not all of them see it. */
static bool find_common(const paged__step *step, paged__range *all) {
    paged__range low = step->seen[0], high = step->seen[step->n_rows - 1];
    *all = (paged__range){low.first, high.end};
    return (high.first == low.first ||
            are_finite(step, (paged__range){low.first, PAGED_MIN(high.first, high.end)})) &&
           (high.end == low.end || are_finite(step, (paged__range){PAGED_MAX(low.end, low.first), high.end}));
}

/* Rows from r on, as many as are configured, with weights at p; 16 * n elements from d on. Few rows bring a
 * part of a tile in with each, in the order of its lines. */
INLINE void pv_columns(const paged__step *step, const values *v, bringer *b, const bool is_few,
                       paged__range tiles, int32_t r, const uint8_t *p, int32_t d, const int n) {
    const int64_t o_bytes = step->o_stride * (int64_t)sizeof(float);
    float *o = step->o + r * step->o_stride + d;
    TILE_LOAD(0, o, o_bytes);
    if (n > 1) TILE_LOAD(1, o + 16, o_bytes);
    if (n > 2) TILE_LOAD(2, o + 32, o_bytes);
    if (n > 3) TILE_LOAD(3, o + 48, o_bytes);
    for (int32_t tile = tiles.first; tile < tiles.end; tile++) {
        const uint8_t *at = v->at[tile] + d * 4;
        const int64_t stride = v->stride;
        TILE_LOAD(6, p + tile * PAGED_TILE * 2, step->p_stride);
        TILE_LOAD(7, at, stride);
        TILE_DOT_BF16(0, 6, 7);
        if (n > 1) {
            TILE_LOAD(7, at + LINE, stride);
            TILE_DOT_BF16(1, 6, 7);
        }
        if (n > 2) {
            TILE_LOAD(7, at + 2 * LINE, stride);
            TILE_DOT_BF16(2, 6, 7);
        }
        if (n > 3) {
            TILE_LOAD(7, at + 3 * LINE, stride);
            TILE_DOT_BF16(3, 6, 7);
        }
        if (is_few) {
            stream f = stream_of(&step->v, tile, V_NEAR, d / 16 * PAIRS, (step->head_dim_v + 1) / 2);
            fetch_stream(&f, n * PAIRS);
        }
        if (b) bring(b);
    }
    TILE_STORE(0, o, o_bytes);
    if (n > 1) TILE_STORE(1, o + 16, o_bytes);
    if (n > 2) TILE_STORE(2, o + 32, o_bytes);
    if (n > 3) TILE_STORE(3, o + 48, o_bytes);
}

INLINE void pv_rows(const paged__step *step, const values *v, bringer *b, const bool is_few,
                    paged__range tiles, int32_t r, const uint8_t *p) {
    for (int32_t d = 0, n; d < step->o_floats; d += 16 * n) {
        n = paged__next_rows((step->o_floats - d) / 16, 4);
        switch (n) {
        case 1:
            pv_columns(step, v, b, is_few, tiles, r, p, d, 1);
            break;
        case 2:
            pv_columns(step, v, b, is_few, tiles, r, p, d, 2);
            break;
        case 3:
            pv_columns(step, v, b, is_few, tiles, r, p, d, 3);
            break;
        default:
            pv_columns(step, v, b, is_few, tiles, r, p, d, 4);
            break;
        }
    }
}

/* The tiles that some of the rows r … r + n - 1 see. */
static paged__range tiles_of(const paged__step *step, int32_t r, int32_t n) {
    return (paged__range){step->seen[r].first / PAGED_TILE,
                          (step->seen[r + n - 1].end + PAGED_TILE - 1) / PAGED_TILE};
}

/* Few rows, r … end - 1. Sums stay in their tiles for a step: to store and load them takes longer than that
 * lines of V come in two halves. */
static void pv_few(const paged__step *step, const values *v, int32_t r, int32_t end) {
    configure_v(end - r);
    pv_rows(step, v, NULL, true, tiles_of(step, r, end - r), r, step->p + r * step->p_stride);
}

static void pv_many(const paged__step *step, const values *v, int32_t r, int32_t end) {
    for (int32_t n; r < end; r += n) {
        n = PAGED_MIN(end - r, ROWS);
        configure_v(n);
        pv_rows(step, v, NULL, false, tiles_of(step, r, n), r, step->p + r * step->p_stride);
    }
}

static void pv(const paged__step *step) {
    values v;
    paged__range seen;
    bool is_common = find_common(step, &seen);
    /* Otherwise apart: rows that see the same. */
    for (int32_t r = 0, last = step->n_rows; r < step->n_rows; r = last, last = step->n_rows) {
        if (!is_common) {
            seen = step->seen[r];
            for (last = r + 1; last < step->n_rows && step->seen[last].first == seen.first &&
                               step->seen[last].end == seen.end;)
                last++;
        }
        find_values(step, seen, &v);
        if (step->n_rows <= ROWS)
            pv_few(step, &v, r, last);
        else
            pv_many(step, &v, r, last);
    }
}

/* ---- all three, of many rows ---- */

/* Scores of two blocks are at hand, at the begin of their array, where they stay in L1; so do the weights of
 * one. Scores are a block ahead, so that the processor, which looks some hundred instructions ahead, is not
 * held up by the weights that follow from them. */
static void attend_blocks(const paged__step *step, const values *v) {
    int32_t n = step->n_rows / ROWS, rest = step->n_rows % ROWS;
    int32_t per_block = k_lines(step) / LINES + 1 + TILES * ((step->o_floats / 16 + 3) / 4);
    bringer b = bringer_of(step, (n + (rest > 0)) * per_block);
    float *s[2] = {step->s, step->s + (n > 1 ? ROWS * PAGED_ATTN_STEP : 0)};
    const bool varies = k_lines(step) % PAIRS != 0; /* shapes for K and V */
    if (n > 0) {
        configure_k(step, ROWS);
        qk_rows(step, &b, 0, ROWS, s[0]);
    }
    for (int32_t i = 0, r = 0; i < n; i++, r += ROWS) {
        if (i + 1 < n) {
            if (varies) configure_k(step, ROWS);
            qk_rows(step, &b, r + ROWS, ROWS, s[(i + 1) % 2]);
        }
        softmax_rows(step, s[i % 2], step->p, r, r + ROWS);
        if (varies) configure_v(ROWS);
        pv_rows(step, v, &b, false, tiles_of(step, r, ROWS), r, step->p);
    }
    if (rest == 0) return;
    configure_k(step, rest);
    qk_rows(step, &b, n * ROWS, rest, step->s);
    softmax_rows(step, step->s, step->p, n * ROWS, step->n_rows);
    configure_v(rest);
    pv_rows(step, v, &b, false, tiles_of(step, n * ROWS, rest), n * ROWS, step->p);
}

static void attend(const paged__step *step) {
    values v;
    paged__range seen;
    if (step->n_rows > ROWS && find_common(step, &seen)) {
        find_values(step, seen, &v);
        attend_blocks(step, &v);
        return;
    }
    qk(step);
    softmax_of_step(step);
    pv(step);
}

const paged__type_kernels paged__amx_bf16 = {.q_bytes = q_bytes,
                                             .p_bytes = P_BYTES,
                                             .load_q = load_q,
                                             .qk = qk,
                                             .softmax = softmax_of_step,
                                             .pv = pv,
                                             .attend = attend,
                                             .few_rows = ROWS,
                                             .end = end,
                                             .pack_k = paged__pack_k_bf16_avx512,
                                             .pack_v = paged__pack_v_bf16_avx512,
                                             .to_f32 = paged__to_f32_bf16_avx512,
                                             .from_f32 = paged__from_f32_bf16_avx512};

const paged__kernels paged__kernels_amx = {.name = "amx",
                                           .of = {[PAGED_TYPE_F16] = &paged__avx512_f16,
                                                  [PAGED_TYPE_F32] = &paged__avx512_f32,
                                                  [PAGED_TYPE_BF16] = &paged__amx_bf16,
                                                  [PAGED_TYPE_I8] = &paged__avx512_vnni_i8},
                                           .merge = paged__merge_avx512,
                                           .divide = paged__divide_avx512,
                                           .blocks_exist = paged__blocks_exist_avx512,
                                           .looks_near = true,
                                           .softcap = paged__softcap,
                                           .alibi = paged__alibi};
