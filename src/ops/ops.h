/* ops/ops.h: inside of ops: the table of kernels that attention and kv_write call, one table for each
 * instruction set, one entry in it for each KV type.
 *
 * The driver (attn_run.c) is plain C and knows blocks, splits, bounds and merging. A kernel knows one
 * step: any number of query rows against the 4 tiles of 16 tokens of a softmax step. Scores s are f32 for
 * all types, so that the driver may work on them between qk and softmax; the rows of q and p are the
 * kernels' own: f32, pairs of bf16, bytes and a scale. load_q writes q, softmax writes p, nobody else
 * looks inside.
 *
 * Prefill and decode call the same kernels with different numbers of rows, so that their bits are equal
 * by construction. For that every kernel keeps two rules:
 *  - an element of S or O is one chain of operations in ascending order (of pairs of elements, or of
 *    tiles, where the entry works in pairs or tiles; these lie at absolute positions), and no other row or
 *    element changes it;
 *  - what a row does not see is never multiplied into its result: K and V there may be NaN or Inf.
 *
 * Tiles are in the packed layout of paged/kv.h. The driver brings the plain layout into packed tiles first,
 * so both layouts give the same bits.
 */
#ifndef PAGED_OPS_OPS_H
#define PAGED_OPS_OPS_H

#include "base/base.h"
#include "paged/ops.h"

enum {
    PAGED__N_TYPES = 4,
    PAGED__STEP_TILES = PAGED_ATTN_STEP / PAGED_TILE, /* 4 */
    PAGED__FEW_ROWS = 12, /* up to so many rows of a head memory is what one waits for */
    PAGED__L_LANES = 16,  /* partial sums of the denominator, token t in lane t % 16 */
    PAGED__ROW_ALIGN = 64 /* rows of q and p are multiples of it, in bytes */
};

/* The tokens first … end - 1 of a step. */
typedef struct paged__range {
    int32_t first, end;
} paged__range;

enum {
    PAGED__TILES_AHEAD = 2 * PAGED__STEP_TILES, /* whose place a kernel knows */
    /* The two distances of paged__tiles, in whole tiles of at least one … */
    PAGED__NEAR_BYTES = 4 << 10,
    PAGED__FAR_BYTES = 16 << 10,
    /* … and to the byte, of a processor that `looks_near`. */
    PAGED__NEARER_BYTES = 7 << 9,
    PAGED__LESS_FAR_BYTES = 9 << 10
};

/* K or V of one step, and the tiles that are worked on after them, of K or V: `next` is the same as `at`
 * where nothing follows. Where rows are few, memory is what one waits for, and a kernel reads tile after
 * tile, each from its first byte to its last. Meanwhile it brings the tiles at two distances ahead into the
 * L2 cache, line by line, spread evenly over its work: a burst overflows the queue of misses, and a pause
 * lets it run dry. Into L2, since L1 waits for far fewer lines at once; the nearer into L1 with `looks_near`.
 * A prefetch may be dropped, hence twice. Where rows are many, `attend` brings the first n_next of `next`. */
typedef struct paged__tiles {
    const void *at[PAGED__STEP_TILES], *next[PAGED__TILES_AHEAD];
    const float *scale[PAGED__STEP_TILES], *next_scale[PAGED__STEP_TILES]; /* i8: [16] of each tile */
    int32_t n_next, next_lines; /* `attend`: tiles of `next`, 4 or 8; lines of each, as it lies in memory */
    bool looks_near;            /* as the table of kernels says: which distances */
} paged__tiles;

/* Tile j, counted on through `next`. */
static inline const uint8_t *paged__tile_on(const paged__tiles *tiles, int32_t j) {
    return j < PAGED__STEP_TILES ? tiles->at[j] : tiles->next[j - PAGED__STEP_TILES];
}

/* The tile that comes about so many bytes after tile j, of tiles of so many bytes. */
static inline const uint8_t *paged__tile_ahead(const paged__tiles *tiles, int32_t j, int32_t distance_bytes,
                                               int32_t tile_bytes) {
    return paged__tile_on(tiles,
                          j + PAGED_MIN(PAGED_MAX(distance_bytes / tile_bytes, 1), PAGED__TILES_AHEAD));
}

/* What comes a distance after byte `at` of a tile: (at < turn ? first : then) + at. Addresses, since `then`
 * may lie before the pool. */
typedef struct paged__ahead {
    uintptr_t first, then;
    int64_t turn;
} paged__ahead;

/* A distance in whole tiles and bytes. */
typedef struct paged__offset {
    int32_t tiles, bytes;
} paged__offset;

/* The same distance for all tiles of a step, so that each line comes once: of small tiles what keeps the last
 * one's within the tiles that are known. */
static inline paged__offset paged__offset_of(int32_t distance_bytes, int32_t tile_bytes) {
    distance_bytes = PAGED_MIN(distance_bytes, PAGED__TILES_AHEAD * tile_bytes - tile_bytes / 2);
    return (paged__offset){distance_bytes / tile_bytes, distance_bytes % tile_bytes};
}

static inline paged__ahead paged__ahead_of(const paged__tiles *tiles, int32_t j, paged__offset offset,
                                           int32_t tile_bytes) {
    const uintptr_t first = (uintptr_t)paged__tile_on(tiles, j + offset.tiles),
                    then = (uintptr_t)paged__tile_on(tiles, j + offset.tiles + 1),
                    rest = (uintptr_t)offset.bytes;
    return (paged__ahead){first + rest, then + rest - (uintptr_t)tile_bytes, tile_bytes - offset.bytes};
}

static inline const void *paged__byte_ahead(const paged__ahead *a, int64_t at) {
    return (const void *)((at < a->turn ? a->first : a->then) + (uintptr_t)at);
}

/* The two distances, of all tiles of a step. */
typedef struct paged__distances {
    int32_t tile_bytes;
    paged__offset near, far; /* with `looks_near` */
} paged__distances;

/* Who passes a constant `looks_near`, here and below, pays for no choice. */
static inline paged__distances paged__distances_of(int32_t tile_bytes, bool looks_near) {
    paged__distances d = {.tile_bytes = tile_bytes};
    if (!looks_near) return d;
    d.near = paged__offset_of(PAGED__NEARER_BYTES, tile_bytes);
    d.far = paged__offset_of(PAGED__LESS_FAR_BYTES, tile_bytes);
    return d;
}

/* What comes at the two distances. */
typedef struct paged__stream {
    paged__ahead near, far;
} paged__stream;

static inline paged__stream paged__stream_of(const paged__tiles *tiles, int32_t j, const paged__distances *d,
                                             bool looks_near) {
    int32_t bytes = d->tile_bytes;
    if (looks_near)
        return (paged__stream){paged__ahead_of(tiles, j, d->near, bytes),
                               paged__ahead_of(tiles, j, d->far, bytes)};
    return (paged__stream){
        {.first = (uintptr_t)paged__tile_ahead(tiles, j, PAGED__NEAR_BYTES, bytes), .turn = bytes},
        {.first = (uintptr_t)paged__tile_ahead(tiles, j, PAGED__FAR_BYTES, bytes), .turn = bytes}};
}

/* Brings a line at each distance. */
__attribute__((always_inline)) static inline void paged__fetch_lines(const void *near, const void *far,
                                                                     bool looks_near) {
    if (looks_near)
        __builtin_prefetch(near, 0, 3);
    else
        __builtin_prefetch(near, 0, 2);
    __builtin_prefetch(far, 0, 2);
}

/* Brings the two lines that come after byte `at` of the tile. */
__attribute__((always_inline)) static inline void paged__fetch(const paged__stream *s, int64_t at,
                                                               bool looks_near) {
    if (looks_near)
        paged__fetch_lines(paged__byte_ahead(&s->near, at), paged__byte_ahead(&s->far, at), true);
    else
        paged__fetch_lines((const void *)(s->near.first + (uintptr_t)at),
                           (const void *)(s->far.first + (uintptr_t)at), false);
}

/* Lines to be asked for while weights are made. Nothing is read then, so nothing else is asked for, and
 * memory would stand still: those behind all that K of the step has asked for. */
typedef struct paged__lines {
    uintptr_t at; /* a tile of V may be smaller than K's, and the last of all */
    int32_t n;
} paged__lines;

enum { PAGED__LINES_A_ROW = 2 };

/* `far` is the greatest distance at which K is asked for; at most what is left of a tile there. */
static inline paged__lines paged__lines_behind(const paged__tiles *k, paged__offset far, int32_t tile_bytes) {
    return (paged__lines){(uintptr_t)paged__tile_on(k, PAGED__STEP_TILES + far.tiles) + (uintptr_t)far.bytes,
                          (tile_bytes - far.bytes) / 64};
}

__attribute__((always_inline)) static inline void paged__fetch_some(paged__lines *lines, int32_t n) {
    for (n = PAGED_MIN(n, lines->n), lines->n -= n; n > 0; n--, lines->at += 64)
        __builtin_prefetch((const void *)lines->at, 0, 2);
}

/* What the kernels of a step work on. All rows belong to one KV head and see at least one token. */
typedef struct paged__step {
    int32_t n_rows, head_dim_k, head_dim_v;
    const paged__range *seen; /* [n_rows] tokens that each row sees; first and end ascend with the row */
    paged__tiles k, v;
    const uint8_t *q; /* [n_rows] of q_stride bytes */
    float *s;         /* [n_rows, 64] scores in units of log2; what a row does not see is unspecified */
    uint8_t *p;       /* [n_rows] of p_stride bytes: the weights exp2(s - m), zero where the row sees none */
    int64_t q_stride, p_stride;
    float *l; /* [n_rows, 16] lanes of the denominator */
    float *o; /* [n_rows] of o_stride floats: o[o_floats], then the maximum m, as in a state (attn.h) */
    int64_t o_stride;
    int32_t o_floats; /* head_dim_v rounded up to 16; what is written behind head_dim_v is in no result */
} paged__step;

typedef struct paged__type_kernels {
    int32_t (*q_bytes)(int32_t head_dim); /* of a row of q; a multiple of PAGED__ROW_ALIGN, like p_bytes */
    int32_t p_bytes;
    void (*load_q)(void *q, const float *src, float scale, int32_t head_dim); /* src[head_dim] * scale */

    void (*qk)(const paged__step *step); /* s = q · K */
    /* When the maximum of a row's scores is above m by more than PAGED__RESCALE, m moves to it, and l and o
     * shrink accordingly. Then p = exp2(s - m), and l += p. May leave anything in s. Those of f32 also work
     * in place: p may be s. */
    void (*softmax)(const paged__step *step);
    void (*pv)(const paged__step *step); /* o += p · V */
    /* All three, with the same bits, of more than few rows. `next` are then the tiles of the next call.
     * NULL: one after the other. */
    void (*attend)(const paged__step *step);
    int32_t few_rows;  /* if more than PAGED__FEW_ROWS: memory is what one waits for up to so many */
    void (*end)(void); /* after the last of these calls of a run, on its thread; NULL: nothing to be done */

    /* A tile as an f32 tile, for kernels that convert: with many rows it is cheaper to do it once, and call
     * the kernels of f32, whose q and p these then share. NULL: kernels work on the type itself. */
    void (*widen_k)(float *tile, const void *src, int32_t head_dim);
    void (*widen_v)(float *tile, const void *src, int32_t head_dim);
    /* Not for i8, which has no plain layout and whose rows have scales (i8.h): */
    /* The plain rows of 16 tokens, [head_dim] each, as a packed tile; an odd head_dim of pairs is filled
     * with a zero. */
    void (*pack_k)(void *tile, const void *const *rows, int32_t head_dim);
    void (*pack_v)(void *tile, const void *const *rows, int32_t head_dim);

    void (*to_f32)(float *dst, const void *src, int64_t n);
    /* Round to nearest even, saturate; returns the number of NaN. */
    int64_t (*from_f32)(void *dst, const float *src, int64_t n);
} paged__type_kernels;

typedef struct paged__kernels {
    const char *name;
    const paged__type_kernels *of[PAGED__N_TYPES]; /* tables may share entries */
    /* acc[n] = acc * a + part * b, n a multiple of 16. */
    void (*merge)(float *acc, float a, const float *part, float b, int32_t n);
    void (*divide)(float *out, const float *o, float l,
                   int32_t n); /* out[n] = o / l or o * (1 / l), never -0 */
    /* paged__blocks_exist of tables.h; NULL: plain C. */
    bool (*blocks_exist)(const int32_t *blocks, int32_t n, int32_t n_blocks);
    /* On processors with AMX L2 waits for few more prefetches than L1, and its own prefetcher brings most
     * lines: it follows requests within 4 KiB, and does so best where they are not far ahead. What works is
     * a line at 3.5 KiB into L1 and one at 9 KiB into L2. Multiples of 4 KiB, which whole tiles often are,
     * are slower: pure reads of the addresses of decode, GQA 4, asked for once into L2, get 0.87 of the
     * probe at 8 and 12 KiB and 0.90 at 6, 7 and 10. Kernels of bf16 have distances of their own. */
    bool looks_near;
    /* On 64 scores, see scores.h. NULL: those of paged__kernels_ref. */
    void (*softcap)(float *s, float cap);
    void (*alibi)(float *s, float slope, int32_t first);
} paged__kernels;

static inline int32_t paged__row_bytes(int32_t bytes) {
    return (bytes + PAGED__ROW_ALIGN - 1) / PAGED__ROW_ALIGN * PAGED__ROW_ALIGN;
}

/* Rows of at most `most` at a time, as equal as possible: 8 rows are 4 + 4, which is faster than 6 + 2. */
static inline int32_t paged__next_rows(int32_t n_rows, int32_t most) {
    int32_t n_calls = (n_rows + most - 1) / most;
    return (n_rows + n_calls - 1) / n_calls;
}

/* Where rows are many, blocks of at most `most` rows, as equal as possible: their number, and the first row
 * of one, or the end of the last. */
static inline int32_t paged__n_blocks(const paged__step *step, int32_t most) {
    return (step->n_rows + most - 1) / most;
}

static inline int32_t paged__block_row(const paged__step *step, int32_t most, int32_t block) {
    return step->n_rows * block / paged__n_blocks(step, most);
}

/* Brings part `part` of n of the tiles that are worked on next into the cache. (GCC takes a function that
 * only prefetches for one without effects and drops its calls.) */
__attribute__((always_inline)) static inline void paged__bring(const paged__tiles *tiles, int32_t part,
                                                               int32_t n_parts) {
    int32_t lines = tiles->next_lines, n = tiles->n_next * lines, at = n * part / n_parts,
            end = n * (part + 1) / n_parts;
    for (int32_t tile = 0; tile < tiles->n_next; tile++, at -= lines, end -= lines)
        for (int32_t i = PAGED_MAX(at, 0); i < PAGED_MIN(end, lines); i++)
            __builtin_prefetch((const uint8_t *)tiles->next[tile] + i * (int64_t)64);
}

/* Bit t: the token t of a step is seen. */
static inline uint64_t paged__seen_mask(paged__range seen) {
    return ~(uint64_t)0 >> (PAGED_ATTN_STEP - seen.end) & ~(uint64_t)0 << seen.first;
}

/* The rows r … r + n - 1 and the tokens t0 … t1 - 1 of the step, all of which all these rows see. */
typedef void paged__pv_block(const paged__step *step, int32_t r, int32_t n, int32_t t0, int32_t t1);

/* For pv that works token by token: `most` rows at a time where they see the same tokens, and row by row at
 * both ends, where they do not. */
static inline void paged__pv_by_blocks(const paged__step *step, int32_t most, paged__pv_block *block) {
    for (int32_t r = 0, n; r < step->n_rows; r += n) {
        n = paged__next_rows(step->n_rows - r, most);
        const paged__range *seen = step->seen;
        int32_t first = seen[r + n - 1].first, end = PAGED_MAX(seen[r].end, first);
        for (int32_t i = r; i < r + n - 1 && seen[i].first < first; i++)
            block(step, i, 1, seen[i].first, PAGED_MIN(first, seen[i].end));
        if (first < end) block(step, r, n, first, end);
        for (int32_t i = r; i < r + n; i++)
            if (seen[i].end > end) block(step, i, 1, end, seen[i].end);
    }
}

/* Weights may grow to 2^8 before the state is rescaled: rare rescaling, and still far from overflow. */
#define PAGED__RESCALE 8.0f

/* 2^f = 1 + f * (C1 + f * (C2 + …)) for |f| ≤ 0.5, relative error 2e-9 (fitted for the least maximum), and
 * exact at 0. */
#define PAGED__EXP2_C1 0.693147182f
#define PAGED__EXP2_C2 0.240226477f
#define PAGED__EXP2_C3 0.0555033237f
#define PAGED__EXP2_C4 0.00961843692f
#define PAGED__EXP2_C5 0.00133988739f
#define PAGED__EXP2_C6 0.00015353362f
/* Below, a weight is zero: nothing that f32 could add to a denominator of at least 2^-8. */
#define PAGED__EXP2_MIN (-126.0f)

/* Plain C, for the reference kernels and for the factors of merging. x ≤ 8. */
static inline float paged__exp2(float x) {
    const float magic =
        12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits */
    if (!(x >= PAGED__EXP2_MIN)) return x < PAGED__EXP2_MIN ? 0.0f : x;
    float shifted = x + magic, f = x - (shifted - magic), p;
    uint32_t n, u;
    memcpy(&n, &shifted, sizeof n);
    p = PAGED__EXP2_C5 + f * PAGED__EXP2_C6;
    p = PAGED__EXP2_C4 + f * p;
    p = PAGED__EXP2_C3 + f * p;
    p = PAGED__EXP2_C2 + f * p;
    p = PAGED__EXP2_C1 + f * p;
    p = 1.0f + f * p;
    memcpy(&u, &p, sizeof u);
    u += n << 23; /* the bits of magic above the integer are shifted out */
    memcpy(&p, &u, sizeof p);
    return p;
}

/* Plain C of attn_ref.c that other tables use as well. */
int32_t paged__q_bytes_f32(int32_t head_dim);
void paged__load_q_f32(void *q, const float *src, float scale, int32_t head_dim);
void paged__pack_k_f16(void *tile, const void *const *rows, int32_t head_dim);
void paged__pack_k_f32(void *tile, const void *const *rows, int32_t head_dim);
void paged__pack_k_bf16(void *tile, const void *const *rows, int32_t head_dim);
void paged__pack_v_f16(void *tile, const void *const *rows, int32_t head_dim);
void paged__pack_v_f32(void *tile, const void *const *rows, int32_t head_dim);
void paged__pack_v_bf16(void *tile, const void *const *rows, int32_t head_dim);

static inline size_t paged__type_bytes(paged_type type) {
    return type == PAGED_TYPE_F32 ? 4 : type == PAGED_TYPE_I8 ? 1 : 2;
}

/* The best table for the flags; a static object. */
const paged__kernels *paged__kernels_choose(uint32_t cpu_flags);

extern const paged__kernels paged__kernels_ref;
extern const paged__type_kernels paged__ref_f16, paged__ref_f32, paged__ref_bf16;
extern const paged__type_kernels paged__ref_i8;
#if defined(__x86_64__)
extern const paged__kernels paged__kernels_avx2, paged__kernels_avx512, paged__kernels_avx512_bf16;
extern const paged__kernels paged__kernels_avx512_vnni, paged__kernels_amx;
extern const paged__type_kernels paged__avx2_f16, paged__avx2_f32, paged__avx2_bf16;
extern const paged__type_kernels paged__avx512_f16, paged__avx512_f32, paged__avx512_bf16;
extern const paged__type_kernels paged__avx2_i8, paged__avx512_vnni_i8;
extern const paged__type_kernels paged__avx512_bf16_bf16, paged__amx_bf16;
/* Of attn_avx512.c and pack_avx512.c, for the tables of larger sets. */
void paged__pack_k_f16_avx512(void *tile, const void *const *rows, int32_t head_dim);
void paged__pack_k_f32_avx512(void *tile, const void *const *rows, int32_t head_dim);
void paged__pack_k_bf16_avx512(void *tile, const void *const *rows, int32_t head_dim);
void paged__pack_v_bf16_avx512(void *tile, const void *const *rows, int32_t head_dim);
bool paged__blocks_exist_avx512(const int32_t *blocks, int32_t n, int32_t n_blocks);
void paged__merge_avx512(float *acc, float a, const float *part, float b, int32_t n);
void paged__divide_avx512(float *out, const float *o, float l, int32_t n);
void paged__to_f32_bf16_avx512(float *dst, const void *src, int64_t n);
int64_t paged__from_f32_bf16_avx512(void *dst, const float *src, int64_t n);
#elif defined(__aarch64__)
extern const paged__kernels paged__kernels_neon;
extern const paged__type_kernels paged__neon_f16, paged__neon_f32, paged__neon_bf16, paged__neon_i8;
#endif

/* PAGED_ERR_INVALID_ARG, naming the field, if the shape of `kv` is none that ops can work on. */
paged_status paged__kv_check(const paged_kv *kv, paged_error *err);

#endif
