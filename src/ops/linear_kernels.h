/* ops/linear_kernels.h: inside of linear layers: how packed weights and activations lie in memory, and the
 * table of kernels, one for each instruction set.
 *
 * A tile of a quantised matrix is a row of units, a unit 64 columns (256 for K-quants) of 16 rows. Two tiles
 * lie side by side, unit by unit, so that a kernel that works on both reads one stream. A unit:
 *
 *     head    d of every block      2 × f16[16]                              K: d f16[16], -dmin f16[16]
 *             m (Q4_1 only)         2 × f16[16]                                 8 × scale u8[16], min u8[16]
 *             …                                                              Q6_K: 8 × scale i8[2][16]
 *     blocks  high bits             byte (row, c): bit i is that of column 4 i + c         Q5_0, Q5_K: 64 B
 *                                   2 vectors, byte (row, c): 2-bit fields of columns 4 i + c       Q6_K: 128
 *             quants                vector i of 4, byte (row, c): column 4 i + c low, 16 + 4 i + c high: 256
 *                                   vector i of 8, byte (row, c): column 4 i + c, plus 128          Q8_0: 512
 *
 * Columns behind the last have d = m = 0. A tile of F32, F16, BF16 is [n_cols][16 rows].
 *
 * Activations: tokens in groups of up to six (AMX takes more), so that a kernel walks one stream for all of
 * them. paged__act carries the size, so all kernels agree on it, whichever it was made for:
 *
 *     quantised   [groups][n_blocks][tokens of the group] paged__act_block, zeros behind the last column
 *     f32         [groups][n_cols][tokens of the group]
 *
 * The chain of an output, which every kernel follows for every row and token, over ascending blocks:
 *
 *     i   = sum of (u - zero) * q, an exact integer below 2^24          (a half block for Q6_K, twice)
 *     acc = fma((float)i, d * s, acc)
 *     acc = fma(m, s * sum q, acc)                                      only the formats with minima
 *
 * and for F32, F16, BF16 over ascending blocks of 64 columns, which keeps errors small in long rows:
 *
 *     part = fma(w, x, part) from 0 over ascending columns; acc = acc + part
 */
#ifndef PAGED_OPS_LINEAR_KERNELS_H
#define PAGED_OPS_LINEAR_KERNELS_H

#include "ops/linear.h"

enum {
    PAGED__ACT_GROUP = 6,    /* tokens, at most; … */
    PAGED__AMX_GROUP = 16,   /* … of AMX, which takes so many … */
    PAGED__AMX_TOKENS = 24,  /* … where so many are together, and leaves fewer to VNNI */
    PAGED__FLOAT_BLOCK = 64, /* columns of a partial sum of F32, F16 and BF16 */
    PAGED__PANEL_COLS = 512, /* columns that a kernel works on before it goes to the next tokens */
    /* Floats that one call of `sums` gives, and weights are unpacked once for: groups of 2 or of 4 tiles. */
    PAGED__SUMS_MAX = 43 * PAGED__ACT_GROUP * 4 * PAGED__ROW_TILE,
    PAGED__WIDE_TILES = 16,
    PAGED__WIDE_SUMS_MAX = 256 * PAGED__WIDE_TILES * PAGED__ROW_TILE
};

typedef struct paged__act_block {
    int8_t q[32];
    float s, s_sum;             /* s_sum = s * sum q */
    int32_t neg_sum, neg_first; /* -sum q, of all and of the first 16 */
} paged__act_block;

/* What becomes of the sums of some tokens: rows of y, or, if `act` is set, activations of the next
 * product. */
typedef struct paged__outcome {
    const float *sums, *other;      /* rows of n_rows; of GLU gate's and up's; the residual, or NULL */
    int64_t stride, other_stride;   /* from one token's to the next */
    const float *bias, *bias_other; /* [n_rows] or NULL */
    float *y;
    int64_t y_stride;
    const paged__act *act;      /* quantised; … */
    int32_t act_token, act_col; /* … from here on, in whole blocks */
    int32_t n_tokens, n_rows;
    paged__epilogue epilogue;
} paged__outcome;

typedef struct paged__linear_kernels_table {
    const char *name;
    bool wide_groups; /* wants, and takes, groups of more than PAGED__ACT_GROUP tokens */
    /* sums[n_tokens][n_tiles * 16] of the tiles tile0 … and tokens token0 …; token0 begins a group. n_tiles
     * is paged__tiles_at_once(), or less of F32, F16 and BF16; n_tokens * n_tiles * 16 at most
     * PAGED__SUMS_MAX. */
    void (*sums)(float *sums, const paged__matrix *w, int32_t tile0, int32_t n_tiles, const paged__act *x,
                 int32_t token0, int32_t n_tokens);
    void (*finish)(const paged__outcome *out);
    /* Or instead of sums, and then for all quantised types: what becomes of the sums of some tiles, an even
     * number, and of a gated unit of those of `up`, else NULL. Where sums lie `out` does not say. Of more
     * tokens than two groups n_tokens * n_tiles * 16 is at most PAGED__WIDE_SUMS_MAX; room: twice that. */
    void (*layer)(const paged__outcome *out, const paged__matrix *w, const paged__matrix *up, int32_t tile0,
                  int32_t n_tiles, const paged__act *x, int32_t token0, float *room);
    void (*act_set)(const paged__act *act, int32_t token, const float *x, const float *norm_weight,
                    float eps);
    void (*rms_norm)(float *out, const float *x, int32_t n, const float *weight, float eps);
    void (*turn)(float *x, const paged__turns *turns, int32_t n_heads, int32_t head_dim);
} paged__linear_kernels_table;

extern const paged__linear_kernels_table paged__linear_ref;
#if defined(__x86_64__)
extern const paged__linear_kernels_table paged__linear_avx2, paged__linear_vnni, paged__linear_amx,
    paged__linear_amx_bf16;
#elif defined(__aarch64__)
extern const paged__linear_kernels_table paged__linear_neon, paged__linear_neon_dot;
#endif

/* ---- formats; `type` is a constant where kernels ask ---- */

static inline bool paged__is_quantised(paged__weight_type type) {
    return type > PAGED__W_BF16;
}
static inline bool paged__is_k(paged__weight_type type) {
    return type == PAGED__W_Q4_K || type == PAGED__W_Q5_K || type == PAGED__W_Q6_K;
}
static inline bool paged__has_min(paged__weight_type type) {
    return type == PAGED__W_Q4_1 || type == PAGED__W_Q4_K || type == PAGED__W_Q5_K;
}
/* log2 of zero: a power of two in every format. -1: zero is 0. */
static inline int paged__zero_shift(paged__weight_type type) {
    return paged__has_min(type)    ? -1
           : type == PAGED__W_Q4_0 ? 3
           : type == PAGED__W_Q5_0 ? 4
           : type == PAGED__W_Q6_K ? 5
                                   : 7;
}
static inline int paged__unit_blocks(paged__weight_type type) {
    return paged__is_k(type) ? 8 : 2;
}
static inline int paged__head_bytes(paged__weight_type type) {
    return paged__is_k(type) ? 320 : type == PAGED__W_Q4_1 ? 128 : 64;
}
static inline int paged__high_bytes(paged__weight_type type) {
    return type == PAGED__W_Q6_K ? 128 : type == PAGED__W_Q5_0 || type == PAGED__W_Q5_K ? 64 : 0;
}
static inline int paged__block_bytes(paged__weight_type type) {
    return paged__high_bytes(type) + (type == PAGED__W_Q8_0 ? 512 : 256);
}
static inline int paged__unit_bytes(paged__weight_type type) {
    return paged__head_bytes(type) + paged__unit_blocks(type) * paged__block_bytes(type);
}
/* From a unit of a tile to its next. */
static inline int paged__unit_step(paged__weight_type type) {
    return 2 * paged__unit_bytes(type);
}
static inline int paged__float_bytes(paged__weight_type type) {
    return type == PAGED__W_F32 ? 4 : 2;
}

static inline int32_t paged__round_up(int32_t n, int32_t to) {
    return (n + to - 1) / to * to;
}
/* Blocks of a row of activations, or of weights of the type, with the padding. */
static inline int32_t paged__act_blocks(int32_t n_cols) {
    return paged__round_up(n_cols, 64) / PAGED__ACT_BLOCK;
}
static inline int32_t paged__tiles_at_once(paged__weight_type type) {
    return paged__is_quantised(type) ? 2 : 4;
}

/* Bytes behind the last unit of a tile: the factors of its rows (see pack_tile_factors). */
enum { PAGED__FACTOR_BYTES = PAGED__ROW_TILE * 4 };

/* Where the tile begins. */
static inline const uint8_t *paged__tile_at(const paged__matrix *w, int32_t tile) {
    if (!paged__is_quantised(w->type)) return w->data + (size_t)tile * w->tile_bytes;
    return w->data + (size_t)(tile & ~1) * w->tile_bytes +
           (size_t)(tile & 1) * (size_t)paged__unit_bytes(w->type);
}

/* [16] */
static inline float *paged__tile_factors(const paged__matrix *w, int32_t tile) {
    const size_t pair = 2 * w->tile_bytes;
    return (float *)(void *)(w->data + (size_t)(tile / 2 + 1) * pair -
                             (size_t)(2 - tile % 2) * PAGED__FACTOR_BYTES);
}

/* The group of a token: its first token, and how many it has. The last may be smaller than the others. */
typedef struct paged__group {
    int32_t first, width;
} paged__group;

static inline paged__group paged__group_of(const paged__act *x, int32_t token) {
    const int32_t first = token / x->group * x->group;
    return (paged__group){first, PAGED_MIN(x->group, x->n_tokens - first)};
}
/* The group behind it. */
static inline paged__group paged__group_after(const paged__act *x, paged__group group) {
    const int32_t first = group.first + group.width;
    return (paged__group){first, PAGED_MIN(x->group, x->n_tokens - first)};
}
/* Where its activations begin. */
static inline paged__act_block *paged__group_blocks(const paged__act *x, paged__group group) {
    return (paged__act_block *)(void *)x->data + (int64_t)group.first * paged__act_blocks(x->n_cols);
}
static inline float *paged__group_floats(const paged__act *x, paged__group group) {
    return (float *)(void *)x->data + (int64_t)group.first * x->n_cols;
}

/* u = kvalue + 128 of IQ4_NL. */
extern const uint8_t paged__iq4_nl[16];

/* 32 columns of one row in plain numbers: w = d * (u - zero) + m, d of the first and of the second 16. */
typedef struct paged__row_block {
    uint8_t u[PAGED__ACT_BLOCK];
    float d[2], m;
    int32_t zero;
} paged__row_block;

void paged__row_block_read(const paged__matrix *w, int32_t row, int32_t block, paged__row_block *out);

#endif
