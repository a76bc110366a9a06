/* attn_amx.c: the kernels of ops.h for bf16 with Intel AMX, whose TDPBF16PS multiplies up to 16 rows of 32
 * bf16 by 32 × 16 of them, into 16 × 16 floats. A row of a product depends on that row alone, and so do the
 * sums of its instruction: rows are configured, 1 … 16 at a time, and bits do not depend on how many.
 *
 * The packed layout is what it wants: of K, 16 lines of a tile (32 elements of 16 tokens); of V, 16 elements
 * of the 16 pairs of tokens of a group of two tiles, if these lie one behind the other, as they do in a block
 * of at least 32 tokens. Otherwise the group is copied.
 *
 * qk: rows × 4 tiles; a chain of chunks of 32 elements, the last one shorter where head_dim_k wants it.
 * pv: rows × 64 elements; a chain of groups of 32 tokens. A weight of zero times any finite value changes
 *     nothing, so it is enough that tokens which no row sees are zero, in a copy, and that what some rows see
 *     and others do not is finite. Where it is not, rows that see the same are worked on apart.
 *
 * q and p are those of weights_bf16.h. TDPBF16PS also takes denormals for zero.
 */
#include <immintrin.h>

#include "ops/ops.h"
#include "ops/scores.h"
#include "ops/weights_bf16.h"

enum {
    ROWS = 16,  /* of a tile register at most */
    LINE = 64,  /* bytes of such a row at most */
    LINES = 16, /* of K or V in one product */
    GROUP = 32, /* tokens of one product of values */
    GROUPS = PAGED_ATTN_STEP / GROUP,
    GROUP_TILES = GROUP / PAGED_TILE,
    PAIRS = PAGED_TILE / 2 /* lines of a tile of V for 16 elements */
};

/* ---- tile registers ---- */

/* 0 … 3 are sums, 4 is of q or p, 5 of K or V; 6 and 7 are like 4 and 5 in the last chunk of scores. In words
 * of the assembler: compilers' own functions differ in what they say about memory. */
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t : :)
#define TILE_LOAD(t, at, stride)                                                                             \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(at), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(t, at, stride)                                                                            \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(at), "r"((int64_t)(stride)) : "memory")
#define TILE_DOT(sum, rows, lines)                                                                           \
    __asm__ volatile("tdpbf16ps %%tmm" #lines ", %%tmm" #rows ", %%tmm" #sum : :)

typedef struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t n_rows[16];
} tile_shapes;

/* For n rows of q or p; the last chunk of K has so many lines. What is in tiles is lost or stays. To load
 * shapes takes nearly 200 cycles, to look at those that are loaded 20. */
static void configure(int32_t n, int32_t last_lines) {
    uint8_t rows = (uint8_t)n, last = (uint8_t)last_lines;
    const tile_shapes shapes = {
        .palette = 1,
        .row_bytes = {LINE, LINE, LINE, LINE, LINE, LINE, (uint16_t)(4 * last), LINE},
        .n_rows = {rows, rows, rows, rows, rows, LINES, rows, last},
    };
    tile_shapes loaded;
    __asm__ volatile("sttilecfg %0" : "=m"(loaded));
    if (memcmp(&loaded, &shapes, sizeof shapes) != 0) __asm__ volatile("ldtilecfg %0" : : "m"(shapes));
}

static void end(void) {
    __asm__ volatile("tilerelease" : :);
}

static int32_t k_lines(const paged__step *step) {
    return (step->head_dim_k + 1) / 2;
}

/* Chunks of 16 lines of K, and the lines of the last. */
static int32_t n_chunks(const paged__step *step) {
    return (k_lines(step) + LINES - 1) / LINES;
}

static int32_t last_lines(const paged__step *step) {
    return k_lines(step) - (n_chunks(step) - 1) * LINES;
}

static void configure_rows(const paged__step *step, int32_t n) {
    configure(n, last_lines(step));
}

/* ---- prefetching ---- */

/* With few rows: lines of two tiles, one after the other, at two distances ahead. */
typedef struct stream {
    const uint8_t *near[2], *far[2];
    int32_t line, tile_lines;
} stream;

/* Of the n tiles from `tile` on, which are worked on together. */
INLINE stream stream_of(const paged__tiles *tiles, int32_t tile, int32_t tile_lines, const int n) {
    stream f = {.tile_lines = tile_lines};
    int32_t bytes = tile_lines * LINE;
    for (int32_t i = 0; i < n; i++) {
        f.near[i] = paged__tile_ahead(tiles, tile + i, PAGED_MAX(PAGED__NEAR_BYTES, n * bytes), bytes);
        f.far[i] = paged__tile_ahead(tiles, tile + i, PAGED__FAR_BYTES, bytes);
    }
    return f;
}

/* The next n lines, of the `of` first tiles. Of a tile register all lines are read at once, so the near ones
 * come into L1. */
INLINE void fetch_stream(stream *f, int32_t n, const int32_t of) {
    for (int32_t end = PAGED_MIN(f->line + n, of * f->tile_lines); f->line < end; f->line++) {
        int32_t i = f->line >= f->tile_lines, at = (f->line - i * f->tile_lines) * LINE;
        _mm_prefetch((const char *)f->near[i] + at, _MM_HINT_T0);
        _mm_prefetch((const char *)f->far[i] + at, _MM_HINT_T1);
    }
}

/* With many rows: lines of K and then V of the next call, some at a time. */
typedef struct bringer {
    const paged__tiles *tiles[2];
    int32_t kv, tile, line, rate;
} bringer;

static void bring(bringer *b) {
    for (int32_t i = 0; i < b->rate && b->kv < 2; i++) {
        const paged__tiles *tiles = b->tiles[b->kv];
        _mm_prefetch((const char *)tiles->next[b->tile] + b->line * LINE, _MM_HINT_T1);
        if (++b->line < tiles->next_lines) continue;
        b->line = 0;
        if (++b->tile < tiles->n_next) continue;
        b->tile = 0;
        b->kv++;
    }
}

static bringer bringer_of(const paged__step *step, int32_t n_times) {
    bringer b = {.tiles = {&step->k, &step->v}};
    int32_t n = step->k.n_next * step->k.next_lines + step->v.n_next * step->v.next_lines;
    if (step->k.next_lines > 0 && step->v.next_lines > 0) b.rate = (n + n_times - 1) / n_times;
    return b;
}

/* ---- scores ---- */

/* A chunk of the scores of the rows at q with n_tiles tiles. */
#define QK_CHUNK(rows, lines)                                                                                \
    do {                                                                                                     \
        TILE_LOAD(rows, q + at, step->q_stride);                                                             \
        TILE_LOAD(lines, k[0] + at * LINES, LINE);                                                           \
        TILE_DOT(0, rows, lines);                                                                            \
        if (n_tiles > 1) {                                                                                   \
            TILE_LOAD(lines, k[1] + at * LINES, LINE);                                                       \
            TILE_DOT(1, rows, lines);                                                                        \
        }                                                                                                    \
        if (n_tiles > 2) {                                                                                   \
            TILE_LOAD(lines, k[2] + at * LINES, LINE);                                                       \
            TILE_DOT(2, rows, lines);                                                                        \
        }                                                                                                    \
        if (n_tiles > 3) {                                                                                   \
            TILE_LOAD(lines, k[3] + at * LINES, LINE);                                                       \
            TILE_DOT(3, rows, lines);                                                                        \
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
    int64_t at = 0, end = (n_chunks(step) - 1) * (int64_t)LINE;
    for (; at < end; at += LINE) {
        QK_CHUNK(4, 5);
        if (b) bring(b);
    }
    QK_CHUNK(6, 7);
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
    const uint8_t *q = step->q, *k[1];
    int32_t last = (step->seen[step->n_rows - 1].end - 1) / PAGED_TILE;
    configure_rows(step, step->n_rows);
    for (int32_t tile = step->seen[0].first / PAGED_TILE; tile <= last; tile++) {
        stream f = stream_of(&step->k, tile, k_lines(step), 1);
        int64_t at = 0, end = (n_chunks(step) - 1) * (int64_t)LINE;
        k[0] = step->k.at[tile];
        TILE_ZERO(0);
        for (; at < end; at += LINE) {
            QK_CHUNK(4, 5);
            fetch_stream(&f, LINES, 1);
        }
        QK_CHUNK(6, 7);
        fetch_stream(&f, LINES, 1);
        TILE_STORE(0, step->s + tile * PAGED_TILE, PAGED_ATTN_STEP * sizeof(float));
    }
}

static void qk(const paged__step *step) {
    if (step->n_rows <= PAGED__FEW_ROWS) {
        qk_few(step);
        return;
    }
    for (int32_t r = 0, n, configured = 0; r < step->n_rows; r += n) {
        n = PAGED_MIN(step->n_rows - r, ROWS);
        if (n != configured) configure_rows(step, configured = n);
        qk_rows(step, NULL, r, n, step->s + r * PAGED_ATTN_STEP);
    }
}

/* ---- values ---- */

/* Where the lines of V lie: pairs of tokens of a group are `stride` bytes apart. `room` is for copies. */
typedef struct values {
    const uint8_t *at[GROUPS];
    int64_t stride[GROUPS];
    _Alignas(64) uint8_t room[GROUPS][LINES * PAGED_HEAD_DIM_MAX * 4];
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

/* Zero where a token is not seen, and behind the last element. */
static void copy_group(const paged__step *step, int32_t g, paged__range seen, uint8_t *to) {
    int32_t dv = step->head_dim_v;
    for (int32_t i = g * LINES; i < (g + 1) * LINES; i++) {
        const __mmask32 halves = halves_of(seen, i);
        const uint8_t *from = v_pair(step, i);
        for (int32_t d = 0; d < dv; d += 16, to += LINE) {
            __m512i pairs = _mm512_setzero_si512();
            if (halves) pairs = _mm512_maskz_loadu_epi32(mask_at(dv, d), from + d * 4);
            _mm512_store_si512(to, _mm512_maskz_mov_epi16(halves, pairs));
        }
    }
}

/* Group g, of the tokens in `seen`, for rows that see nothing else. */
static void find_group(const paged__step *step, int32_t g, paged__range seen, values *v) {
    const uint8_t *first = step->v.at[g * GROUP_TILES], *second = step->v.at[g * GROUP_TILES + 1];
    bool is_whole = seen.first <= g * GROUP && seen.end >= (g + 1) * GROUP;
    v->at[g] = first;
    v->stride[g] = step->head_dim_v * (int64_t)4;
    if (is_whole && second == first + PAGED_TILE / 2 * v->stride[g] && step->head_dim_v % 16 == 0) return;
    v->at[g] = v->room[g];
    v->stride[g] = step->o_floats * (int64_t)4;
    copy_group(step, g, seen, v->room[g]);
}

static void find_values(const paged__step *step, paged__range seen, values *v) {
    for (int32_t g = seen.first / GROUP; g * GROUP < seen.end; g++) find_group(step, g, seen, v);
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

/* Rows from r on, as many as are configured, with weights at p; 16 * n elements from d on. */
INLINE void pv_columns(const paged__step *step, const values *v, bringer *b, stream *f, paged__range groups,
                       int32_t r, const uint8_t *p, int32_t d, const int n) {
    const int64_t o_bytes = step->o_stride * (int64_t)sizeof(float);
    float *o = step->o + r * step->o_stride + d;
    TILE_LOAD(0, o, o_bytes);
    if (n > 1) TILE_LOAD(1, o + 16, o_bytes);
    if (n > 2) TILE_LOAD(2, o + 32, o_bytes);
    if (n > 3) TILE_LOAD(3, o + 48, o_bytes);
    for (int32_t g = groups.first; g < groups.end; g++) {
        const uint8_t *at = v->at[g] + d * 4;
        const int64_t stride = v->stride[g];
        TILE_LOAD(4, p + g * LINE, step->p_stride);
        TILE_LOAD(5, at, stride);
        TILE_DOT(0, 4, 5);
        if (f) fetch_stream(f, LINES, GROUP_TILES);
        if (n > 1) {
            TILE_LOAD(5, at + LINE, stride);
            TILE_DOT(1, 4, 5);
            if (f) fetch_stream(f, LINES, GROUP_TILES);
        }
        if (n > 2) {
            TILE_LOAD(5, at + 2 * LINE, stride);
            TILE_DOT(2, 4, 5);
            if (f) fetch_stream(f, LINES, GROUP_TILES);
        }
        if (n > 3) {
            TILE_LOAD(5, at + 3 * LINE, stride);
            TILE_DOT(3, 4, 5);
            if (f) fetch_stream(f, LINES, GROUP_TILES);
        }
        if (b) bring(b);
    }
    TILE_STORE(0, o, o_bytes);
    if (n > 1) TILE_STORE(1, o + 16, o_bytes);
    if (n > 2) TILE_STORE(2, o + 32, o_bytes);
    if (n > 3) TILE_STORE(3, o + 48, o_bytes);
}

INLINE void pv_rows(const paged__step *step, const values *v, bringer *b, stream *f, paged__range groups,
                    int32_t r, const uint8_t *p) {
    for (int32_t d = 0, n; d < step->o_floats; d += 16 * n) {
        n = paged__next_rows((step->o_floats - d) / 16, 4);
        switch (n) {
        case 1:
            pv_columns(step, v, b, f, groups, r, p, d, 1);
            break;
        case 2:
            pv_columns(step, v, b, f, groups, r, p, d, 2);
            break;
        case 3:
            pv_columns(step, v, b, f, groups, r, p, d, 3);
            break;
        default:
            pv_columns(step, v, b, f, groups, r, p, d, 4);
            break;
        }
    }
}

/* The groups that some of the rows r … r + n - 1 see. */
static paged__range groups_of(const paged__step *step, int32_t r, int32_t n) {
    return (paged__range){step->seen[r].first / GROUP, (step->seen[r + n - 1].end + GROUP - 1) / GROUP};
}

/* The rows r … r + n - 1, which see the tokens `seen` and nothing else. Few rows: group after group. */
static void pv_few(const paged__step *step, paged__range seen, int32_t r, int32_t n) {
    values v;
    configure_rows(step, n);
    for (int32_t g = seen.first / GROUP; g * GROUP < seen.end; g++) {
        stream f = stream_of(&step->v, g * GROUP_TILES, (step->head_dim_v + 1) / 2, GROUP_TILES);
        find_group(step, g, seen, &v);
        pv_rows(step, &v, NULL, &f, (paged__range){g, g + 1}, r, step->p + r * step->p_stride);
    }
}

static void pv_many(const paged__step *step, paged__range seen, int32_t r, int32_t end) {
    values v;
    find_values(step, seen, &v);
    for (int32_t n; r < end; r += n) {
        n = PAGED_MIN(end - r, ROWS);
        configure_rows(step, n);
        pv_rows(step, &v, NULL, NULL, groups_of(step, r, n), r, step->p + r * step->p_stride);
    }
}

static void pv(const paged__step *step) {
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
        if (step->n_rows <= PAGED__FEW_ROWS)
            pv_few(step, seen, r, last - r);
        else
            pv_many(step, seen, r, last);
    }
}

/* ---- all three, of many rows ---- */

/* Scores of two blocks are at hand, at the begin of their array, where they stay in L1; so do the weights of
 * one. Scores are a block ahead, so that the processor, which looks some hundred instructions ahead, is not
 * held up by the weights that follow from them. */
static void attend_blocks(const paged__step *step, const values *v) {
    int32_t n = step->n_rows / ROWS, rest = step->n_rows % ROWS;
    int32_t per_block = n_chunks(step) + GROUPS * ((step->o_floats / 16 + 3) / 4);
    bringer b = bringer_of(step, (n + (rest > 0)) * per_block);
    float *s[2] = {step->s, step->s + (n > 1 ? ROWS * PAGED_ATTN_STEP : 0)};
    if (n > 0) {
        configure_rows(step, ROWS);
        qk_rows(step, &b, 0, ROWS, s[0]);
    }
    for (int32_t i = 0, r = 0; i < n; i++, r += ROWS) {
        if (i + 1 < n) qk_rows(step, &b, r + ROWS, ROWS, s[(i + 1) % 2]);
        softmax_rows(step, s[i % 2], step->p, r, r + ROWS);
        pv_rows(step, v, &b, NULL, groups_of(step, r, ROWS), r, step->p);
    }
    if (rest == 0) return;
    configure_rows(step, rest);
    qk_rows(step, &b, n * ROWS, rest, step->s);
    softmax_rows(step, step->s, step->p, n * ROWS, step->n_rows);
    pv_rows(step, v, &b, NULL, groups_of(step, n * ROWS, rest), n * ROWS, step->p);
}

static void attend(const paged__step *step) {
    values v;
    paged__range seen;
    if (find_common(step, &seen)) {
        find_values(step, seen, &v);
        attend_blocks(step, &v);
        return;
    }
    qk(step);
    softmax(step);
    pv(step);
}

const paged__type_kernels paged__amx_bf16 = {.q_bytes = q_bytes,
                                             .p_bytes = P_BYTES,
                                             .load_q = load_q,
                                             .qk = qk,
                                             .softmax = softmax,
                                             .pv = pv,

                                             .attend = attend,
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
                                           .softcap = paged__softcap,
                                           .alibi = paged__alibi};
