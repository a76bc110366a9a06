/* ops/linear_neon.h: linear layers for 64-bit ARM, compiled twice: neon/ (every processor of that kind) and
 * neon_dot/ (SDOT). The file that includes it defines
 *
 *     int32x4_t dots(int32x4_t acc, int8x16_t w0, int8x16_t q0, int8x16_t w1, int8x16_t q1)
 *
 * which adds to each of 4 lanes the products of its 4 bytes of w0 and q0, and of w1 and q1; |w| ≤ 128,
 * |q| ≤ 127.
 *
 * A tile is unpacked block by block into a panel that stays in L1: quants with their sign, so that a dot
 * product needs no correction, and the scales as floats. Then the tokens pass over it, two at a time: four
 * vectors of four rows × two tokens are 8 sums and 8 exact dot products.
 */
#ifndef PAGED_OPS_LINEAR_NEON_H
#define PAGED_OPS_LINEAR_NEON_H

#include <arm_neon.h>

#include "ops/linear_lanes.h"

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

INLINE int32x4_t dots(int32x4_t acc, int8x16_t w0, int8x16_t q0, int8x16_t w1, int8x16_t q1);

enum {
    QUADS = PAGED__ROW_TILE / 4,                /* vectors of 4 rows × 4 columns, or of 4 rows */
    PANEL_BLOCK = 512 + 2 * 16 * sizeof(float), /* quants, d, and d of the second half, or m */
    PANEL_BLOCKS = PAGED__PANEL_COLS / PAGED__ACT_BLOCK,
    TOKENS = 2
};

/* ---- unpacking ---- */

/* 4 rows × columns 4 i … 4 i + 3 of a block, u - zero. */
INLINE int8x16_t quants(const uint8_t *block, const int i, const int quad, const paged__weight_type type) {
    const uint8_t *q = block + paged__high_bytes(type) + quad * 16;
    const int zero_shift = paged__zero_shift(type);
    if (type == PAGED__W_Q8_0) return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(q + i * 64), vdupq_n_u8(128)));
    const uint8x16_t both = vld1q_u8(q + i % 4 * 64);
    uint8x16_t u = i < 4 ? vandq_u8(both, vdupq_n_u8(15)) : vshrq_n_u8(both, 4);
    if (type == PAGED__W_IQ4_NL) u = vqtbl1q_u8(vld1q_u8(paged__iq4_nl), u);
    if (paged__high_bytes(type) == 64)
        u = vorrq_u8(
            u, vandq_u8(vshlq_u8(vld1q_u8(block + quad * 16), vdupq_n_s8((int8_t)(4 - i))), vdupq_n_u8(16)));
    if (paged__high_bytes(type) == 128)
        u = vorrq_u8(u, vandq_u8(vshlq_u8(vld1q_u8(block + i / 4 * 64 + quad * 16),
                                          vdupq_n_s8((int8_t)(4 - i % 4 * 2))),
                                 vdupq_n_u8(48)));
    if (zero_shift >= 0) u = vsubq_u8(u, vdupq_n_u8((uint8_t)(1 << PAGED_MAX(zero_shift, 0))));
    return vreinterpretq_s8_u8(u);
}

INLINE float32x4_t f32_of_f16(const uint8_t *src) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(src)));
}
INLINE float32x4_t f32_of_u8(const uint8_t *src) {
    uint32_t four;
    memcpy(&four, src, sizeof four);
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four))))));
}
INLINE float32x4_t f32_of_i8(const uint8_t *src) {
    int32_t four;
    memcpy(&four, src, sizeof four);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
}

/* Of 4 rows; `second`: of the second half of the block's columns (Q6_K). */
INLINE float32x4_t scale_of(const uint8_t *unit, int64_t b, const int quad, const int second,
                            const paged__weight_type type) {
    if (!paged__is_k(type)) return f32_of_f16(unit + b * 32 + quad * 8);
    const uint8_t *at = unit + 64 + b * 32 + second * 16 + quad * 4;
    return vmulq_f32(f32_of_f16(unit + quad * 8), type == PAGED__W_Q6_K ? f32_of_i8(at) : f32_of_u8(at));
}
INLINE float32x4_t min_of(const uint8_t *unit, int64_t b, const int quad, const paged__weight_type type) {
    if (!paged__is_k(type)) return f32_of_f16(unit + 64 + b * 32 + quad * 8);
    return vmulq_f32(f32_of_f16(unit + 32 + quad * 8), f32_of_u8(unit + 64 + b * 32 + 16 + quad * 4));
}

INLINE void unpack(uint8_t *panel, const uint8_t *unit, int64_t n_units, const paged__weight_type type) {
    for (int64_t u = 0; u < n_units; u++, unit += paged__unit_step(type))
        for (int64_t b = 0; b < paged__unit_blocks(type); b++, panel += PANEL_BLOCK) {
            const uint8_t *block = unit + paged__head_bytes(type) + b * paged__block_bytes(type);
            float *scales = (float *)(void *)(panel + 512);
            UNROLL for (int quad = 0; quad < QUADS; quad++) {
                UNROLL for (int i = 0; i < 8; i++)
                    vst1q_s8((int8_t *)panel + i * 64 + quad * 16, quants(block, i, quad, type));
                vst1q_f32(scales + quad * 4, scale_of(unit, b, quad, 0, type));
                if (type == PAGED__W_Q6_K)
                    vst1q_f32(scales + 16 + quad * 4, scale_of(unit, b, quad, 1, type));
                if (paged__has_min(type)) vst1q_f32(scales + 16 + quad * 4, min_of(unit, b, quad, type));
            }
        }
}

/* ---- products ---- */

/* 4 activations, for each of 4 rows. */
INLINE int8x16_t four_of(const int8_t *q) {
    int32_t four;
    memcpy(&four, q, sizeof four);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

INLINE void block(float32x4_t acc[QUADS][TOKENS], const uint8_t *panel, const paged__act_block *x,
                  const int n_tokens, const paged__weight_type type) {
    const int n_halves = type == PAGED__W_Q6_K ? 2 : 1, n_pairs = 4 / n_halves;
    const int8_t *w = (const int8_t *)panel;
    const float *scales = (const float *)(const void *)(panel + 512);
    UNROLL for (int half = 0; half < n_halves; half++) {
        int32x4_t dot[QUADS][TOKENS];
        UNROLL for (int quad = 0; quad < QUADS; quad++) {
            UNROLL for (int t = 0; t < n_tokens; t++) dot[quad][t] = vdupq_n_s32(0);
        }
        UNROLL for (int k = 0; k < n_pairs; k++) {
            const int i = half * 4 + 2 * k;
            UNROLL for (int t = 0; t < n_tokens; t++) {
                const int8x16_t q0 = four_of(x[t].q + 4 * i), q1 = four_of(x[t].q + 4 * i + 4);
                UNROLL for (int quad = 0; quad < QUADS; quad++) dot[quad][t] =
                    dots(dot[quad][t], vld1q_s8(w + i * 64 + quad * 16), q0,
                         vld1q_s8(w + i * 64 + 64 + quad * 16), q1);
            }
        }
        UNROLL for (int t = 0; t < n_tokens; t++) {
            UNROLL for (int quad = 0; quad < QUADS; quad++) {
                const float32x4_t ds = vmulq_n_f32(vld1q_f32(scales + half * 16 + quad * 4), x[t].s);
                acc[quad][t] = vfmaq_f32(acc[quad][t], vcvtq_f32_s32(dot[quad][t]), ds);
            }
        }
    }
    if (!paged__has_min(type)) return;
    UNROLL for (int t = 0; t < n_tokens; t++) {
        UNROLL for (int quad = 0; quad < QUADS; quad++) acc[quad][t] =
            vfmaq_n_f32(acc[quad][t], vld1q_f32(scales + 16 + quad * 4), x[t].s_sum);
    }
}

INLINE void tokens(float *out, int64_t stride, const uint8_t *panel, int64_t n_blocks,
                   const paged__act_block *x, int64_t width, const int n_tokens,
                   const paged__weight_type type) {
    float32x4_t acc[QUADS][TOKENS];
    UNROLL for (int t = 0; t < n_tokens; t++) {
        UNROLL for (int quad = 0; quad < QUADS; quad++) acc[quad][t] = vld1q_f32(out + t * stride + quad * 4);
    }
    for (int64_t b = 0; b < n_blocks; b++) block(acc, panel + b * PANEL_BLOCK, x + b * width, n_tokens, type);
    UNROLL for (int t = 0; t < n_tokens; t++) {
        UNROLL for (int quad = 0; quad < QUADS; quad++) vst1q_f32(out + t * stride + quad * 4, acc[quad][t]);
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

/* ---- f32, f16, bf16 weights: one column of 16 rows in four vectors, up to six tokens ---- */

INLINE float32x4_t column(const uint8_t *tile, int64_t k, const int quad, const paged__weight_type type) {
    if (type == PAGED__W_F32) return vld1q_f32((const float *)(const void *)tile + k * 16 + quad * 4);
    const uint8_t *at = tile + k * 32 + quad * 8;
    if (type == PAGED__W_F16) return f32_of_f16(at);
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(at)), 16));
}

/* One partial sum. */
INLINE void part_of(float *out, int64_t stride, const uint8_t *tile, int64_t n_cols, const float *x,
                    const int n_tokens, const paged__weight_type type) {
    float32x4_t acc[QUADS][PAGED__ACT_GROUP];
    UNROLL for (int quad = 0; quad < QUADS; quad++) {
        UNROLL for (int t = 0; t < n_tokens; t++) acc[quad][t] = vdupq_n_f32(0);
    }
    for (int64_t k = 0; k < n_cols; k++, x += n_tokens) {
        UNROLL for (int quad = 0; quad < QUADS; quad++) {
            const float32x4_t w = column(tile, k, quad, type);
            UNROLL for (int t = 0; t < n_tokens; t++) acc[quad][t] = vfmaq_n_f32(acc[quad][t], w, x[t]);
        }
    }
    UNROLL for (int t = 0; t < n_tokens; t++) {
        UNROLL for (int quad = 0; quad < QUADS; quad++) {
            float *sum = out + t * stride + quad * 4;
            vst1q_f32(sum, vaddq_f32(vld1q_f32(sum), acc[quad][t]));
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
