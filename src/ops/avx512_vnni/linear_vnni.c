/* linear_vnni.c: quantised linear layers for AVX-512 with VNNI. See linear_kernels.h for the data and for the
 * chain of an output.
 *
 * A vector has 16 rows × 4 columns of weights as unsigned bytes; VPDPBUSD multiplies it by 4 activations that
 * are broadcast from memory. A register tile is 2 tiles × 6 tokens: 12 integer sums of the block and 12
 * f32 sums, so that each weight vector serves 6 tokens and each broadcast 32 rows. The offset of the unsigned
 * form is what the integer sums begin with. A block of 32 columns costs a token and tile 8 VPDPBUSD, one
 * conversion, one multiplication and one or two multiply-adds.
 *
 * One group of tokens reads the weights from memory as they are. For more groups the tiles are divided into
 * equal parts: few tokens read them packed, 512 columns that stay in L1; many from a panel of unpacked bytes,
 * 1536 columns in L2, which is near enough as a panel is read in order, and most rows are no longer, so that
 * their sums stay in registers. While they do, the next part is brought in.
 *
 * Multiplications bound it: 10 of them a block, 11 with minima, for 8 VPDPBUSD, where the processor converts
 * and adds beside them. The inner loop reaches that (0.72 of the VPDPBUSD that registers allow).
 */
#include "ops/linear_vnni.h"
#include "ops/linear_lanes.h"

/* What the weights are read from: one of the packed formats, or a panel. */
typedef struct source {
    paged__weight_type type;
    bool panel;
} source;

enum {
    TILES = 2,         /* at a time */
    PANEL_BLOCK = 640, /* quants u8[8][64], d f32[16], then m, or d of the second half, f32[16] */
    PACKED_BLOCKS = PAGED__PANEL_COLS / PAGED__ACT_BLOCK,
    PANEL_BLOCKS = 48,
    PACKED_TOKENS = 18 /* for more, unpacking pays; with high bits for more than a group */
};

/* ---- what comes into the cache meanwhile ---- */

/* Weights from `next` on, maybe behind the last: so many bytes a step of the work into L1, and, if `farther`
 * is not 0, what lies so much farther into L2. Lines from where a step begins, or only those that begin in
 * it. */
typedef struct incoming {
    uintptr_t next;
    size_t bytes, farther;
    bool whole_lines;
} incoming;

/* Those behind the part that several groups of tokens share, or that one group (part_bytes 0) uses soon.
 *
 * A processor with AMX (measured on one) has few places for lines that are on their way to L1; most of what
 * memory gives comes by its own prefetcher, which follows requests within 4 KiB. Two requests for a line, in
 * steps and not in bursts, the first not over 3 KiB before the second, read weights as fast as nothing but
 * loads would, from L3 as from memory; one request 8 KiB ahead at 0.7 of that. For one group a line in two
 * steps is asked for by both, which pays, since requests are dropped where too many are under way; where
 * groups share, lines come slowly enough. Others do with one request (distance measured on Zen 4 and 5). */
static incoming incoming_after(const uint8_t *units, int64_t part_bytes, int64_t step_bytes) {
    enum { NEAR = 3072, FARTHER = 3072, WITHOUT_AMX = 8192 };
    const bool has_amx = (paged_cpu_flags() & PAGED_CPU_AMX) != 0, is_shared = part_bytes > 0;
    const size_t distance = is_shared ? (size_t)part_bytes : has_amx ? NEAR : WITHOUT_AMX;
    return (incoming){(uintptr_t)units + distance, (size_t)step_bytes, has_amx ? FARTHER : 0,
                      is_shared || !has_amx};
}

INLINE void bring_step(incoming *in) {
    const uintptr_t end = in->next + in->bytes;
    for (uintptr_t at = in->whole_lines ? (in->next + 63) & ~(uintptr_t)63 : in->next; at < end; at += 64) {
        _mm_prefetch((const char *)at, _MM_HINT_T0);
        if (in->farther) _mm_prefetch((const char *)(at + in->farther), _MM_HINT_T1);
    }
    in->next = end;
}

/* ---- one block, up to 2 tiles × 6 tokens ---- */

/* The tiles' blocks: in the packed format, or in the panel. */
typedef struct block_at {
    const uint8_t *unit[TILES]; /* panel: the block itself */
    int64_t b;                  /* which of the unit */
    __m128i shift;              /* panel: log2 of zero */
} block_at;

INLINE __m512i weights_at(const block_at *at, const int r, int i, const int h, const source from) {
    if (from.panel) return _mm512_load_si512(at->unit[r] + h * 256 + i * 64);
    return quants(block_of(at->unit[r], at->b, from.type), i, h, from.type);
}
INLINE __m512 scale_at(const block_at *at, const int r, const int half, const source from) {
    if (from.panel) return _mm512_load_ps(at->unit[r] + 512 + half * 64);
    return scale_of(at->unit[r], at->b, half, from.type);
}
INLINE __m512 min_at(const block_at *at, const int r, const source from) {
    if (from.panel) return _mm512_load_ps(at->unit[r] + 576);
    return min_of(at->unit[r], at->b, from.type);
}

/* -zero * sum q, over the block or a half of it. */
INLINE __m512i offset(const block_at *at, const paged__act_block *x, const int half, const source from) {
    if (paged__has_min(from.type)) return _mm512_setzero_si512();
    const __m512i all = _mm512_set1_epi32(x->neg_sum), first = _mm512_set1_epi32(x->neg_first);
    const __m512i sum = from.type != PAGED__W_Q6_K ? all : half ? _mm512_sub_epi32(all, first) : first;
    if (from.panel) return _mm512_sll_epi32(sum, at->shift);
    return _mm512_slli_epi32(sum, (unsigned)paged__zero_shift(from.type) & 31u);
}

INLINE __m512i four(const paged__act_block *x, int i) {
    int32_t q;
    memcpy(&q, x->q + 4 * i, sizeof q);
    return _mm512_set1_epi32(q);
}

INLINE __m512i dot_4(__m512i sum, __m512i w, __m512i q) {
    return _mm512_dpbusd_epi32(sum, w, q);
}

/* dot[TILES][n_tokens] goes on by 4 columns. */
INLINE void columns(__m512i dot[TILES][PAGED__ACT_GROUP], const block_at *at, const paged__act_block *x,
                    int i, const int h, const int n_tokens, const source from) {
    const __m512i w[TILES] = {weights_at(at, 0, i, h, from), weights_at(at, 1, i, h, from)};
    UNROLL for (int t = 0; t < n_tokens; t++) {
        const __m512i q = four(x + t, 4 * h + i);
        dot[0][t] = dot_4(dot[0][t], w[0], q);
        dot[1][t] = dot_4(dot[1][t], w[1], q);
    }
}

/* Steps of `incoming` in a block of the packed format; a block of a panel is one. */
INLINE int block_steps(const paged__weight_type type) {
    return type == PAGED__W_Q6_K ? 8 : 4;
}

/* acc[TILES][n_tokens] goes on by one block. */
INLINE void block(__m512 acc[TILES][PAGED__ACT_GROUP], const block_at *at, const paged__act_block *x,
                  incoming *in, const int n_tokens, const source from) {
    const bool by_halves = from.type == PAGED__W_Q6_K;
    const int n_passes = by_halves ? 2 : 1;
    UNROLL for (int pass = 0; pass < n_passes; pass++) {
        __m512i dot[TILES][PAGED__ACT_GROUP];
        UNROLL for (int t = 0; t < n_tokens; t++) dot[0][t] = dot[1][t] = offset(at, x + t, pass, from);
        if (from.panel) {
            UNROLL for (int i = 0; i < 4; i++) columns(dot, at, x, i, pass, n_tokens, from);
            if (!by_halves) {
                UNROLL for (int i = 0; i < 4; i++) columns(dot, at, x, i, 1, n_tokens, from);
            }
        } else
            ROLLED for (int i = 0; i < 4; i++) {
                bring_step(in);
                columns(dot, at, x, i, pass, n_tokens, from);
                if (!by_halves) columns(dot, at, x, i, 1, n_tokens, from);
            }
        UNROLL for (int r = 0; r < TILES; r++) {
            const __m512 d = scale_at(at, r, pass, from);
            UNROLL for (int t = 0; t < n_tokens; t++) acc[r][t] = _mm512_fmadd_ps(
                _mm512_cvtepi32_ps(dot[r][t]), _mm512_mul_ps(d, _mm512_set1_ps(x[t].s)), acc[r][t]);
        }
    }
    if (!paged__has_min(from.type)) return;
    UNROLL for (int r = 0; r < TILES; r++) {
        const __m512 m = min_at(at, r, from);
        UNROLL for (int t = 0; t < n_tokens; t++) acc[r][t] =
            _mm512_fmadd_ps(m, _mm512_set1_ps(x[t].s_sum), acc[r][t]);
    }
}

/* A job of the functions below. */
typedef struct task {
    float *sums;               /* [n_tokens][TILES * 16] */
    bool goes_on;              /* from what sums holds, else from 0 */
    const uint8_t *tile;       /* two side by side, packed; or the panel */
    int64_t n_units;           /* panel: blocks */
    const paged__act_block *x; /* of the group, at the first of the units */
    int shift;                 /* panel: log2 of zero */
    incoming in;               /* while it runs */
} task;

enum { STRIDE = TILES * PAGED__ROW_TILE }; /* of sums */

INLINE void load_sums(__m512 acc[TILES][PAGED__ACT_GROUP], const float *sums, bool goes_on,
                      const int n_tokens) {
    UNROLL for (int t = 0; t < n_tokens; t++) acc[0][t] = acc[1][t] = _mm512_setzero_ps();
    if (!goes_on) return;
    UNROLL for (int t = 0; t < n_tokens; t++) {
        acc[0][t] = _mm512_load_ps(sums + t * STRIDE);
        acc[1][t] = _mm512_load_ps(sums + t * STRIDE + 16);
    }
}
INLINE void store_sums(float *sums, __m512 acc[TILES][PAGED__ACT_GROUP], const int n_tokens) {
    UNROLL for (int t = 0; t < n_tokens; t++) {
        _mm512_store_ps(sums + t * STRIDE, acc[0][t]);
        _mm512_store_ps(sums + t * STRIDE + 16, acc[1][t]);
    }
}

/* ---- straight from the packed format ---- */

INLINE void packed_units(const task *k, const int n_tokens, const paged__weight_type type) {
    const source from = {type, false};
    __m512 acc[TILES][PAGED__ACT_GROUP];
    load_sums(acc, k->sums, k->goes_on, n_tokens);
    block_at at = {.unit = {k->tile, k->tile + paged__unit_bytes(type)}};
    const paged__act_block *x = k->x;
    incoming in = k->in;
    for (int64_t u = 0; u < k->n_units; u++) {
        ROLLED for (at.b = 0; at.b < paged__unit_blocks(type); at.b++, x += n_tokens) {
            block(acc, &at, x, &in, n_tokens, from);
        }
        at.unit[0] += paged__unit_step(type);
        at.unit[1] += paged__unit_step(type);
    }
    store_sums(k->sums, acc, n_tokens);
}

/* ---- through a panel [blocks][TILES] ---- */

INLINE void panel_blocks(const task *k, const int n_tokens, const paged__weight_type like) {
    const source from = {like, true};
    __m512 acc[TILES][PAGED__ACT_GROUP];
    load_sums(acc, k->sums, k->goes_on, n_tokens);
    block_at at = {.unit = {k->tile, k->tile + PANEL_BLOCK}, .shift = _mm_cvtsi32_si128(k->shift)};
    const paged__act_block *x = k->x;
    incoming in = k->in;
    ROLLED for (int64_t b = 0; b < k->n_units; b++, x += n_tokens) {
        bring_step(&in);
        block(acc, &at, x, &in, n_tokens, from);
        at.unit[0] += TILES * PANEL_BLOCK;
        at.unit[1] += TILES * PANEL_BLOCK;
    }
    store_sums(k->sums, acc, n_tokens);
}

/* One tile's share of the panel. */
INLINE void unpack_tile(uint8_t *panel, const uint8_t *unit, int64_t n_units, const paged__weight_type type) {
    for (int64_t u = 0; u < n_units; u++, unit += paged__unit_step(type))
        ROLLED for (int64_t b = 0; b < paged__unit_blocks(type); b++, panel += TILES * PANEL_BLOCK) {
            const uint8_t *from = block_of(unit, b, type);
            UNROLL for (int i = 0; i < 4; i++) {
                _mm512_store_si512(panel + i * 64, quants(from, i, 0, type));
                _mm512_store_si512(panel + 256 + i * 64, quants(from, i, 1, type));
            }
            _mm512_store_ps(panel + 512, scale_of(unit, b, 0, type));
            if (type == PAGED__W_Q6_K) _mm512_store_ps(panel + 576, scale_of(unit, b, 1, type));
            if (paged__has_min(type)) _mm512_store_ps(panel + 576, min_of(unit, b, type));
        }
}

/* ---- the functions for each format and number of tokens ---- */

typedef void (*task_fn)(const task *k);
typedef void (*unpack_fn)(uint8_t *panel, const uint8_t *unit, int64_t n_units);

#define FUNCTION(way, type, n)                                                                               \
    static void way##_##type##_##n(const task *k) {                                                          \
        way(k, n, PAGED__W_##type);                                                                          \
    }
#define FUNCTIONS(way, type)                                                                                 \
    FUNCTION(way, type, 1)                                                                                   \
    FUNCTION(way, type, 2)                                                                                   \
    FUNCTION(way, type, 3)                                                                                   \
    FUNCTION(way, type, 4)                                                                                   \
    FUNCTION(way, type, 5)                                                                                   \
    FUNCTION(way, type, 6)
#define LIST(way, type)                                                                                      \
    {                                                                                                        \
        way##_##type##_1, way##_##type##_2, way##_##type##_3, way##_##type##_4, way##_##type##_5,            \
            way##_##type##_6                                                                                 \
    }
#define FORMATS(X) X(Q4_0) X(Q4_1) X(Q5_0) X(Q8_0) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_NL)

#define FORMAT(type)                                                                                         \
    FUNCTIONS(packed_units, type)                                                                            \
    static void unpack_##type(uint8_t *panel, const uint8_t *unit, int64_t n_units) {                        \
        unpack_tile(panel, unit, n_units, PAGED__W_##type);                                                  \
    }
FORMATS(FORMAT)
/* Panels differ only in whether there are minima, or halves. */
FUNCTIONS(panel_blocks, Q8_0)
FUNCTIONS(panel_blocks, Q4_1)
FUNCTIONS(panel_blocks, Q6_K)

#define PACKED(type) [PAGED__W_##type] = LIST(packed_units, type),
#define UNPACK(type) [PAGED__W_##type] = unpack_##type,
static const task_fn packed[PAGED__N_WEIGHT_TYPES][PAGED__ACT_GROUP] = {FORMATS(PACKED)};
static const unpack_fn unpack[PAGED__N_WEIGHT_TYPES] = {FORMATS(UNPACK)};
static const task_fn panel_plain[] = LIST(panel_blocks, Q8_0), panel_min[] = LIST(panel_blocks, Q4_1),
                     panel_halves[] = LIST(panel_blocks, Q6_K);

static bool through_panel(paged__weight_type type, int32_t n_tokens) {
    return n_tokens > (paged__high_bytes(type) ? PAGED__ACT_GROUP : PACKED_TOKENS);
}

/* Some columns of the two tiles: from the packed format at once, or unpacked first. */
static void part_sums(float *out, const paged__matrix *w, const uint8_t *units, int64_t first_unit, int64_t n,
                      const paged__act *x, int32_t token0, int32_t n_tokens) {
    _Alignas(64) uint8_t panel[PANEL_BLOCKS * TILES * PANEL_BLOCK];
    const int64_t unit_blocks = paged__unit_blocks(w->type), step = paged__unit_step(w->type);
    const task_fn *run = packed[w->type];
    task k = {.goes_on = first_unit > 0, .tile = units, .n_units = n, .shift = paged__zero_shift(w->type)};
    int64_t n_steps = n * unit_blocks * block_steps(w->type);
    if (through_panel(w->type, n_tokens)) {
        run = w->type == PAGED__W_Q6_K ? panel_halves : paged__has_min(w->type) ? panel_min : panel_plain;
        unpack[w->type](panel, units, n);
        unpack[w->type](panel + PANEL_BLOCK, units + paged__unit_bytes(w->type), n);
        k.tile = panel;
        k.n_units = n_steps = n * unit_blocks;
    }
    /* As many bytes as were used now, evenly over all groups. */
    const int32_t n_groups = (n_tokens + x->group - 1) / x->group;
    k.in = incoming_after(units, n_groups > 1 ? n * step : 0, (n * step / n_groups + n_steps - 1) / n_steps);
    const uintptr_t end = k.in.next + (size_t)(n * step);
    for (int32_t t = 0; t < n_tokens;) {
        const paged__group group = paged__group_of(x, token0 + t);
        PAGED_ASSERT(group.width <= PAGED__ACT_GROUP);
        k.sums = out + t * STRIDE;
        k.x = paged__group_blocks(x, group) + first_unit * unit_blocks * group.width;
        run[group.width - 1](&k);
        t += group.width;
        k.in.next += k.in.bytes * (size_t)n_steps;
        if (k.in.next >= end) k.in.bytes = 0;
    }
}

static void sums(float *out, const paged__matrix *w, int32_t tile0, int32_t n_tiles, const paged__act *x,
                 int32_t token0, int32_t n_tokens) {
    const uint8_t *tile = paged__tile_at(w, tile0);
    if (!paged__is_quantised(w->type)) {
        paged__vnni_float_sums(out, w, tile, n_tiles, x, token0, n_tokens);
        return;
    }
    const int64_t n_units = (int64_t)w->tile_bytes / paged__unit_bytes(w->type);
    const int32_t unit_blocks = paged__unit_blocks(w->type);
    const int64_t most = through_panel(w->type, n_tokens) ? PANEL_BLOCKS / unit_blocks
                         : n_tokens > PAGED__ACT_GROUP    ? PACKED_BLOCKS / unit_blocks
                                                          : n_units;
    const int64_t n_parts = (n_units + most - 1) / most, part = (n_units + n_parts - 1) / n_parts;
    for (int64_t u = 0; u < n_units; u += part)
        part_sums(out, w, tile + u * paged__unit_step(w->type), u, PAGED_MIN(part, n_units - u), x, token0,
                  n_tokens);
}

const paged__linear_kernels_table paged__linear_vnni = {.name = "avx512_vnni", .sums = sums, PAGED__LANES};
