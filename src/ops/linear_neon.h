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
    VECS = PAGED__ROW_TILE / 4,                 /* vectors of 4 rows × 4 columns, or of 4 rows */
    PANEL_BLOCK = 512 + 2 * 16 * sizeof(float), /* quants, d, and d of the second half, or m */
    PANEL_BLOCKS = PAGED__PANEL_COLS / PAGED__ACT_BLOCK,
    TOKENS = 2
};

typedef float32x4_t vec;

INLINE vec vec_zero(void) {
    return vdupq_n_f32(0);
}
INLINE vec vec_load(const float *p) {
    return vld1q_f32(p);
}
INLINE void vec_store(float *p, vec x) {
    vst1q_f32(p, x);
}
INLINE vec vec_add(vec a, vec b) {
    return vaddq_f32(a, b);
}
INLINE vec vec_fma(vec acc, vec w, float x) {
    return vfmaq_n_f32(acc, w, x);
}

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

INLINE void unpack_block(uint8_t *panel, const uint8_t *unit, int64_t b, const paged__weight_type type) {
    const uint8_t *block = unit + paged__head_bytes(type) + b * paged__block_bytes(type);
    float *scales = (float *)(void *)(panel + 512);
    UNROLL for (int quad = 0; quad < VECS; quad++) {
        UNROLL for (int i = 0; i < 8; i++)
            vst1q_s8((int8_t *)panel + i * 64 + quad * 16, quants(block, i, quad, type));
        vst1q_f32(scales + quad * 4, scale_of(unit, b, quad, 0, type));
        if (type == PAGED__W_Q6_K) vst1q_f32(scales + 16 + quad * 4, scale_of(unit, b, quad, 1, type));
        if (paged__has_min(type)) vst1q_f32(scales + 16 + quad * 4, min_of(unit, b, quad, type));
    }
}

/* ---- products ---- */

/* 4 activations, for each of 4 rows. */
INLINE int8x16_t four_of(const int8_t *q) {
    int32_t four;
    memcpy(&four, q, sizeof four);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

INLINE void block(vec acc[VECS][TOKENS], const uint8_t *panel, const paged__act_block *x, const int n_tokens,
                  const paged__weight_type type) {
    const int n_halves = type == PAGED__W_Q6_K ? 2 : 1, n_pairs = 4 / n_halves;
    const int8_t *w = (const int8_t *)panel;
    const float *scales = (const float *)(const void *)(panel + 512);
    UNROLL for (int half = 0; half < n_halves; half++) {
        int32x4_t dot[VECS][TOKENS];
        UNROLL for (int quad = 0; quad < VECS; quad++) {
            UNROLL for (int t = 0; t < n_tokens; t++) dot[quad][t] = vdupq_n_s32(0);
        }
        UNROLL for (int k = 0; k < n_pairs; k++) {
            const int i = half * 4 + 2 * k;
            UNROLL for (int t = 0; t < n_tokens; t++) {
                const int8x16_t q0 = four_of(x[t].q + 4 * i), q1 = four_of(x[t].q + 4 * i + 4);
                UNROLL for (int quad = 0; quad < VECS; quad++) dot[quad][t] =
                    dots(dot[quad][t], vld1q_s8(w + i * 64 + quad * 16), q0,
                         vld1q_s8(w + i * 64 + 64 + quad * 16), q1);
            }
        }
        UNROLL for (int t = 0; t < n_tokens; t++) {
            UNROLL for (int quad = 0; quad < VECS; quad++) {
                const float32x4_t ds = vmulq_n_f32(vld1q_f32(scales + half * 16 + quad * 4), x[t].s);
                acc[quad][t] = vfmaq_f32(acc[quad][t], vcvtq_f32_s32(dot[quad][t]), ds);
            }
        }
    }
    if (!paged__has_min(type)) return;
    UNROLL for (int t = 0; t < n_tokens; t++) {
        UNROLL for (int quad = 0; quad < VECS; quad++) acc[quad][t] =
            vfmaq_n_f32(acc[quad][t], vld1q_f32(scales + 16 + quad * 4), x[t].s_sum);
    }
}

/* ---- f32, f16, bf16 weights ---- */

INLINE float32x4_t column(const uint8_t *tile, int64_t k, const int quad, const paged__weight_type type) {
    if (type == PAGED__W_F32) return vld1q_f32((const float *)(const void *)tile + k * 16 + quad * 4);
    const uint8_t *at = tile + k * 32 + quad * 8;
    if (type == PAGED__W_F16) return f32_of_f16(at);
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(at)), 16));
}

#include "ops/linear_panel.h"

#endif
