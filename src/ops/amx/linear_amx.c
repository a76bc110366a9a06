/* linear_amx.c: quantised linear layers for AMX. See linear_kernels.h for the data and for the chain of an
 * output.
 *
 * TDPBSSD multiplies up to 16 tokens × 32 columns of activations, as they lie in a group, by 32 columns × 16
 * rows of weights, as they lie in a panel of signed bytes (u - zero): one instruction gives the integer sums
 * of a block. They are exact, so that what follows makes the bits of all other kernels.
 *
 * Tile registers and vectors meet in memory only, and while tiles are at work, and for some 230 cycles after,
 * the processor has one unit for multiplications of vectors instead of two. So a group goes through a panel
 * in two phases: first all products, into L1; then from there into the sums, a conversion, a multiplication
 * and one or two multiply-adds for 16 outputs. For 16 × 16 outputs of a block the first takes 26 cycles (a
 * tile is stored row by row), the second 35, with minima 47. A panel is two row tiles × up to 256 columns:
 * with its products and a group's activations it fits into L1, and nothing larger does.
 *
 * Few tokens, and F32, F16 and BF16 weights, are left to the kernels for VNNI.
 */
#include "ops/amx/tiles.h"
#include "ops/linear_lanes.h"
#include "ops/linear_vnni.h"

enum {
    TILES = 2, /* of rows, side by side in a matrix */
    STRIDE = TILES * PAGED__ROW_TILE,
    /* A step is what one scale belongs to: a block, or a half of one of Q6_K. */
    STEP_BYTES = 640, /* quants i8[8][64], d f32[16], m f32[16] */
    HALF_BYTES = 320, /* quants i8[4][64], d f32[16] */
    STEPS = 8,        /* of a panel */
    BATCH = 8         /* tokens whose sums are in registers */
};

typedef enum step_kind { PLAIN, MINIMA, HALVES, N_KINDS } step_kind;

INLINE step_kind kind_of(const paged__weight_type type) {
    return type == PAGED__W_Q6_K ? HALVES : paged__has_min(type) ? MINIMA : PLAIN;
}
INLINE int step_bytes(const step_kind kind) {
    return kind == HALVES ? HALF_BYTES : STEP_BYTES;
}

/* ---- the panel ---- */

INLINE void unpack_quants(uint8_t *to, const uint8_t *block, const int h, const paged__weight_type type) {
    const __m512i zero = _mm512_set1_epi8(paged__has_min(type) ? 0 : (char)(1 << paged__zero_shift(type)));
    UNROLL for (int i = 0; i < 4; i++)
        _mm512_store_si512(to + i * 64, _mm512_sub_epi8(quants(block, i, h, type), zero));
}

INLINE void unpack_units(uint8_t *panel, const uint8_t *unit, int64_t n_units,
                         const paged__weight_type type) {
    for (int64_t u = 0; u < n_units; u++, unit += paged__unit_step(type))
        ROLLED for (int64_t b = 0; b < paged__unit_blocks(type); b++, panel += TILES * STEP_BYTES) {
            const uint8_t *from = block_of(unit, b, type);
            unpack_quants(panel, from, 0, type);
            if (type == PAGED__W_Q6_K) {
                _mm512_store_ps(panel + 256, scale_of(unit, b, 0, type));
                unpack_quants(panel + TILES * HALF_BYTES, from, 1, type);
                _mm512_store_ps(panel + TILES * HALF_BYTES + 256, scale_of(unit, b, 1, type));
                continue;
            }
            unpack_quants(panel + 256, from, 1, type);
            _mm512_store_ps(panel + 512, scale_of(unit, b, 0, type));
            if (paged__has_min(type)) _mm512_store_ps(panel + 576, min_of(unit, b, type));
        }
}

/* ---- a group of tokens on a panel [steps][TILES] ---- */

typedef int32_t products[TILES][PAGED__AMX_GROUP][PAGED__ROW_TILE];

typedef struct task {
    float *sums;  /* [n_tokens], rows STRIDE apart */
    bool goes_on; /* from what sums holds, else from 0 */
    const uint8_t *panel;
    int64_t n_steps;           /* even */
    const paged__act_block *x; /* of the group, at the first of the blocks */
    int64_t width;             /* tokens of the group */
    products *products;        /* [n_steps] */
    uintptr_t next;            /* weights to bring into the cache meanwhile, maybe behind the last, … */
    size_t next_bytes;         /* … so much a group */
    int32_t configured;        /* tokens that the tiles' shapes are for; 0: none yet */
} task;

/* One step on tiles a (activations), c0 and c1 (products), whose products of two steps before go to `done`. A
 * tile should not be stored right after the instruction that makes it, so two steps are under way. */
#define MULTIPLY(a, c0, c1, q, weights, done)                                                                \
    do {                                                                                                     \
        TILE_LOAD(a, q, sizeof(paged__act_block));                                                           \
        TILE_LOAD(2, weights, 64);                                                                           \
        if (done) TILE_STORE(c0, (done)[0][0], 64);                                                          \
        TILE_ZERO(c0);                                                                                       \
        TILE_DOT_INT8(c0, a, 2);                                                                             \
        TILE_LOAD(3, (weights) + step_bytes(kind), 64);                                                      \
        if (done) TILE_STORE(c1, (done)[0][1], 64);                                                          \
        TILE_ZERO(c1);                                                                                       \
        TILE_DOT_INT8(c1, a, 3);                                                                             \
    } while (0)

INLINE void multiply(const task *k, const step_kind kind) {
    const int64_t bytes = TILES * step_bytes(kind), n = k->n_steps, width = k->width;
    const uint8_t *panel = k->panel;
    const paged__act_block *x = k->x;
    products *to = k->products, *even = NULL, *odd = NULL;
    for (int64_t i = 0; i < n; i += 2, panel += 2 * bytes) {
        const paged__act_block *second = kind == HALVES ? x : x + width;
        MULTIPLY(0, 4, 5, x->q, panel, even);
        MULTIPLY(1, 6, 7, second->q + (kind == HALVES ? 16 : 0), panel + bytes, odd);
        even = to + i;
        odd = even + 1;
        x = second + width;
    }
    TILE_STORE(4, even[0][0], 64);
    TILE_STORE(5, even[0][1], 64);
    TILE_STORE(6, odd[0][0], 64);
    TILE_STORE(7, odd[0][1], 64);
}

/* Sums of tile r, of some tokens from t0 on. */
INLINE void add(const task *k, const int r, const int t0, const int n_tokens, const step_kind kind) {
    const int bytes = step_bytes(kind), at_scale = kind == HALVES ? 256 : 512;
    const uint8_t *panel = k->panel + r * bytes;
    float *sums = k->sums + t0 * STRIDE + r * PAGED__ROW_TILE;
    const paged__act_block *x = k->x + t0;
    __m512 acc[BATCH];
    UNROLL for (int t = 0; t < n_tokens; t++) acc[t] =
        k->goes_on ? _mm512_load_ps(sums + t * STRIDE) : _mm512_setzero_ps();
    ROLLED for (int64_t step = 0; step < k->n_steps; step++, panel += TILES * bytes) {
        const __m512 d = _mm512_load_ps(panel + at_scale);
        UNROLL for (int t = 0; t < n_tokens; t++) {
            const __m512 f = _mm512_cvtepi32_ps(_mm512_load_si512(k->products[step][r][t0 + t]));
            acc[t] = _mm512_fmadd_ps(f, _mm512_mul_ps(d, _mm512_set1_ps(x[t].s)), acc[t]);
        }
        if (kind == MINIMA) {
            const __m512 m = _mm512_load_ps(panel + 576);
            UNROLL for (int t = 0; t < n_tokens; t++) acc[t] =
                _mm512_fmadd_ps(m, _mm512_set1_ps(x[t].s_sum), acc[t]);
        }
        if (kind != HALVES || step % 2) x += k->width;
    }
    UNROLL for (int t = 0; t < n_tokens; t++) _mm512_store_ps(sums + t * STRIDE, acc[t]);
}

INLINE void bring(const task *k) {
    for (size_t i = 0; i < k->next_bytes; i += 64) _mm_prefetch((const char *)(k->next + i), _MM_HINT_T1);
}

/* ---- the functions for each format, and for each kind and number of tokens ---- */

typedef void (*task_fn)(const task *k);
typedef void (*unpack_fn)(uint8_t *panel, const uint8_t *unit, int64_t n_units);

/* n tokens, or BATCH and n. */
#define FEW(kind, n)                                                                                         \
    static void few_##kind##_##n(const task *k) {                                                            \
        multiply(k, kind);                                                                                   \
        bring(k);                                                                                            \
        add(k, 0, 0, n, kind);                                                                               \
        add(k, 1, 0, n, kind);                                                                               \
    }
#define MANY(kind, n)                                                                                        \
    static void many_##kind##_##n(const task *k) {                                                           \
        few_##kind##_8(k);                                                                                   \
        add(k, 0, BATCH, n, kind);                                                                           \
        add(k, 1, BATCH, n, kind);                                                                           \
    }
#define EIGHT(X, kind) X(kind, 1) X(kind, 2) X(kind, 3) X(kind, 4) X(kind, 5) X(kind, 6) X(kind, 7) X(kind, 8)
EIGHT(FEW, PLAIN)
EIGHT(FEW, MINIMA)
EIGHT(FEW, HALVES)
EIGHT(MANY, PLAIN)
EIGHT(MANY, MINIMA)
EIGHT(MANY, HALVES)

#define UNPACK(type)                                                                                         \
    static void unpack_##type(uint8_t *panel, const uint8_t *unit, int64_t n_units) {                        \
        unpack_units(panel, unit, n_units, PAGED__W_##type);                                                 \
    }
#define FORMATS(X) X(Q4_0) X(Q4_1) X(Q5_0) X(Q8_0) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_NL)
FORMATS(UNPACK)

#define FEW_NAME(kind, n)  few_##kind##_##n,
#define MANY_NAME(kind, n) many_##kind##_##n,
#define NAMES(kind)                                                                                          \
    { EIGHT(FEW_NAME, kind) EIGHT(MANY_NAME, kind) }
#define UNPACK_NAME(type) [PAGED__W_##type] = unpack_##type,
static const task_fn run[N_KINDS][PAGED__AMX_GROUP] = {NAMES(PLAIN), NAMES(MINIMA), NAMES(HALVES)};
static const unpack_fn unpack[PAGED__N_WEIGHT_TYPES] = {FORMATS(UNPACK_NAME)};

/* ---- the table's functions ---- */

/* Tiles 0, 1: activations; 2, 3: weights; 4 … 7: products. */
static void configure(int32_t n_tokens, const step_kind kind) {
    const uint8_t columns = kind == HALVES ? 16 : 32, rows = columns / 4, t = (uint8_t)n_tokens;
    const tile_shapes shapes = {.palette = 1,
                                .row_bytes = {columns, columns, 64, 64, 64, 64, 64, 64},
                                .n_rows = {t, t, rows, rows, t, t, t, t}};
    TILE_SHAPES_LOAD(shapes);
}

/* All tokens on a panel; x_block: where its columns begin. */
static void panel_sums(task *k, float *out, const paged__act *x, int64_t x_block, int32_t token0,
                       int32_t n_tokens, const step_kind kind) {
    for (int32_t t = 0; t < n_tokens;) {
        const paged__group group = paged__group_of(x, token0 + t);
        if (group.width != k->configured) configure(k->configured = group.width, kind);
        k->sums = out + t * STRIDE;
        k->width = group.width;
        k->x = paged__group_blocks(x, group) + x_block * group.width;
        run[kind][group.width - 1](k);
        t += group.width;
        k->next += k->next_bytes;
    }
}

/* Some columns of the two tiles; those of Q6_K are twice as many steps and two panels. */
static void part_sums(task *k, float *out, const paged__matrix *w, const uint8_t *units, int64_t first_unit,
                      int64_t n, const paged__act *x, int32_t token0, int32_t n_tokens) {
    _Alignas(64) uint8_t unpacked[STEPS * TILES * STEP_BYTES];
    _Alignas(64) products of_steps[STEPS];
    const step_kind kind = kind_of(w->type);
    const int32_t n_panels = kind == HALVES ? 2 : 1;
    const int64_t n_blocks = n * paged__unit_blocks(w->type), bytes = n * paged__unit_step(w->type);
    const int32_t n_groups = (n_tokens + x->group - 1) / x->group;
    unpack[w->type](unpacked, units, n);
    unpack[w->type](unpacked + step_bytes(kind), units + paged__unit_bytes(w->type), n);
    k->n_steps = n_blocks;
    k->products = of_steps;
    /* As many bytes as were used now, evenly over all groups. */
    k->next = (uintptr_t)units + (size_t)bytes;
    k->next_bytes = (size_t)(bytes / (n_groups * n_panels));
    for (int32_t i = 0; i < n_panels; i++) {
        k->panel = unpacked + i * n_blocks * TILES * step_bytes(kind);
        k->goes_on = first_unit > 0 || i > 0;
        panel_sums(k, out, x, first_unit * paged__unit_blocks(w->type) + i * n_blocks / 2, token0, n_tokens,
                   kind);
    }
}

static void sums(float *out, const paged__matrix *w, int32_t tile0, int32_t n_tiles, const paged__act *x,
                 int32_t token0, int32_t n_tokens) {
    if (x->group <= PAGED__ACT_GROUP) {
        paged__linear_vnni.sums(out, w, tile0, n_tiles, x, token0, n_tokens);
        return;
    }
    const uint8_t *tile = paged__tile_at(w, tile0);
    const int64_t n_units = (int64_t)w->tile_bytes / paged__unit_bytes(w->type);
    const int64_t most = STEPS / paged__unit_blocks(w->type);
    const int64_t n_parts = (n_units + most - 1) / most, part = (n_units + n_parts - 1) / n_parts;
    task k = {.configured = 0};
    for (int64_t u = 0; u < n_units; u += part)
        part_sums(&k, out, w, tile + u * paged__unit_step(w->type), u, PAGED_MIN(part, n_units - u), x,
                  token0, n_tokens);
    TILE_RELEASE();
}

const paged__linear_kernels_table paged__linear_amx = {
    .name = "amx", .wide_groups = true, .sums = sums, PAGED__LANES};
