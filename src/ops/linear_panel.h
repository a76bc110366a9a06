/* ops/linear_panel.h: linear layers through a panel, the part that AVX2 and NEON share. A file of kernels
 * defines what depends on the instruction set and includes this behind it:
 *
 *     vec, VECS                           a vector of floats, of rows; so many are a tile
 *     vec_zero, vec_load, vec_store, vec_add
 *     vec_fma(acc, w, x)                  acc + w * x, x a scalar, fused
 *     unpack_block(panel, unit, b, type)  block b of a unit of a tile as the panel has it: PANEL_BLOCK bytes
 *     block(acc, panel, x, n_tokens, type)         acc[VECS][TOKENS] goes on by one block
 *     column(tile, k, v, type)            vector v of column k of F32, F16 or BF16
 *
 * A tile is unpacked, up to 512 columns at a time, into a panel that stays in L1; then the tokens pass over
 * it, TOKENS at a time. Float formats are read as they are, by up to six tokens at once. See linear_kernels.h
 * for the chain of an output.
 */
#ifndef PAGED_OPS_LINEAR_PANEL_H
#define PAGED_OPS_LINEAR_PANEL_H

#include "ops/linear_lanes.h"

enum { N = PAGED__ROW_TILE / VECS }; /* floats of a vec */

INLINE void unpack(uint8_t *panel, const uint8_t *unit, int64_t n_units, const paged__weight_type type) {
    for (int64_t u = 0; u < n_units; u++, unit += paged__unit_step(type))
        for (int64_t b = 0; b < paged__unit_blocks(type); b++, panel += PANEL_BLOCK)
            unpack_block(panel, unit, b, type);
}

INLINE void tokens(float *out, int64_t stride, const uint8_t *panel, int64_t n_blocks,
                   const paged__act_block *x, int64_t width, const int n_tokens,
                   const paged__weight_type type) {
    vec acc[VECS][TOKENS];
    UNROLL for (int t = 0; t < n_tokens; t++) {
        UNROLL for (int v = 0; v < VECS; v++) acc[v][t] = vec_load(out + t * stride + v * N);
    }
    for (int64_t b = 0; b < n_blocks; b++) block(acc, panel + b * PANEL_BLOCK, x + b * width, n_tokens, type);
    UNROLL for (int t = 0; t < n_tokens; t++) {
        UNROLL for (int v = 0; v < VECS; v++) vec_store(out + t * stride + v * N, acc[v][t]);
    }
}

INLINE void tile_sums(float *out, int64_t stride, const uint8_t *tile, int64_t n_units, const paged__act *x,
                      int32_t token0, int32_t n_tokens, const paged__weight_type type) {
    _Alignas(64) uint8_t panel[PANEL_BLOCKS * PANEL_BLOCK];
    const int64_t unit_blocks = paged__unit_blocks(type), most = PANEL_BLOCKS / unit_blocks;
    for (int64_t u = 0; u < n_units; u += most) {
        const int64_t n = PAGED_MIN(most, n_units - u), n_blocks = n * unit_blocks;
        unpack(panel, tile + u * paged__unit_step(type), n, type);
        for (int32_t t = 0; t < n_tokens;) {
            const paged__group group = paged__group_of(x, token0 + t);
            const int32_t inside = token0 + t - group.first, here = PAGED_MIN(TOKENS, group.width - inside);
            const paged__act_block *at =
                paged__group_blocks(x, group) + u * unit_blocks * group.width + inside;
            if (here == TOKENS)
                tokens(out + t * stride, stride, panel, n_blocks, at, group.width, TOKENS, type);
            else
                tokens(out + t * stride, stride, panel, n_blocks, at, group.width, 1, type);
            t += here;
        }
    }
}

/* ---- f32, f16, bf16 weights: a column at a time, up to six tokens ---- */

/* One partial sum. */
INLINE void part_of(float *out, int64_t stride, const uint8_t *tile, int64_t n_cols, const float *x,
                    const int n_tokens, const paged__weight_type type) {
    vec acc[VECS][PAGED__ACT_GROUP];
    UNROLL for (int v = 0; v < VECS; v++) {
        UNROLL for (int t = 0; t < n_tokens; t++) acc[v][t] = vec_zero();
    }
    for (int64_t k = 0; k < n_cols; k++, x += n_tokens) {
        UNROLL for (int v = 0; v < VECS; v++) {
            const vec w = column(tile, k, v, type);
            UNROLL for (int t = 0; t < n_tokens; t++) acc[v][t] = vec_fma(acc[v][t], w, x[t]);
        }
    }
    UNROLL for (int t = 0; t < n_tokens; t++) {
        UNROLL for (int v = 0; v < VECS; v++) {
            float *sum = out + t * stride + v * N;
            vec_store(sum, vec_add(vec_load(sum), acc[v][t]));
        }
    }
}

INLINE void columns(float *out, int64_t stride, const uint8_t *tile, int64_t n_cols, const float *x,
                    const int n_tokens, const paged__weight_type type) {
    for (int64_t c = 0; c < n_cols; c += PAGED__FLOAT_BLOCK)
        part_of(out, stride, tile + c * 16 * paged__float_bytes(type),
                PAGED_MIN(PAGED__FLOAT_BLOCK, n_cols - c), x + c * n_tokens, n_tokens, type);
}

INLINE void float_tile(float *out, int64_t stride, const uint8_t *tile, int64_t n_cols, const paged__act *x,
                       int32_t token0, int32_t n_tokens, const paged__weight_type type) {
    for (int64_t c = 0; c < n_cols; c += PAGED__PANEL_COLS) {
        const int64_t n = PAGED_MIN(PAGED__PANEL_COLS, n_cols - c);
        const uint8_t *from = tile + c * 16 * paged__float_bytes(type);
        for (int32_t t = 0, width = 0; t < n_tokens; t += width) {
            const paged__group group = paged__group_of(x, token0 + t);
            const float *at = paged__group_floats(x, group) + c * group.width;
            float *to = out + t * stride;
            width = group.width;
            switch (width) {
            case 1:
                columns(to, stride, from, n, at, 1, type);
                break;
            case 2:
                columns(to, stride, from, n, at, 2, type);
                break;
            case 3:
                columns(to, stride, from, n, at, 3, type);
                break;
            case 4:
                columns(to, stride, from, n, at, 4, type);
                break;
            case 5:
                columns(to, stride, from, n, at, 5, type);
                break;
            default:
                columns(to, stride, from, n, at, 6, type);
                break;
            }
        }
    }
}

/* ---- the table's functions ---- */

typedef void (*tile_fn)(float *out, int64_t stride, const uint8_t *tile, int64_t n, const paged__act *x,
                        int32_t token0, int32_t n_tokens);

#define FORMAT(type, fn)                                                                                     \
    static void tile_##type(float *out, int64_t stride, const uint8_t *tile, int64_t n, const paged__act *x, \
                            int32_t token0, int32_t n_tokens) {                                              \
        fn(out, stride, tile, n, x, token0, n_tokens, PAGED__W_##type);                                      \
    }
FORMAT(F32, float_tile)
FORMAT(F16, float_tile)
FORMAT(BF16, float_tile)
FORMAT(Q4_0, tile_sums)
FORMAT(Q4_1, tile_sums)
FORMAT(Q5_0, tile_sums)
FORMAT(Q8_0, tile_sums)
FORMAT(Q4_K, tile_sums)
FORMAT(Q5_K, tile_sums)
FORMAT(Q6_K, tile_sums)
FORMAT(IQ4_NL, tile_sums)

static const tile_fn tile_fns[PAGED__N_WEIGHT_TYPES] = {
    [PAGED__W_F32] = tile_F32,   [PAGED__W_F16] = tile_F16,       [PAGED__W_BF16] = tile_BF16,
    [PAGED__W_Q4_0] = tile_Q4_0, [PAGED__W_Q4_1] = tile_Q4_1,     [PAGED__W_Q5_0] = tile_Q5_0,
    [PAGED__W_Q8_0] = tile_Q8_0, [PAGED__W_Q4_K] = tile_Q4_K,     [PAGED__W_Q5_K] = tile_Q5_K,
    [PAGED__W_Q6_K] = tile_Q6_K, [PAGED__W_IQ4_NL] = tile_IQ4_NL,
};

static void sums(float *out, const paged__matrix *w, int32_t tile0, int32_t n_tiles, const paged__act *x,
                 int32_t token0, int32_t n_tokens) {
    const int64_t stride = n_tiles * PAGED__ROW_TILE;
    const int64_t n = paged__is_quantised(w->type)
                          ? (int64_t)w->tile_bytes / paged__unit_bytes(w->type) /* units */
                          : w->n_cols;
    memset(out, 0, (size_t)(n_tokens * stride) * sizeof *out);
    for (int32_t i = 0; i < n_tiles; i++)
        tile_fns[w->type](out + i * PAGED__ROW_TILE, stride, paged__tile_at(w, tile0 + i), n, x, token0,
                          n_tokens);
}

#endif
