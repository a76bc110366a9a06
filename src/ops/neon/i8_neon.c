/* i8_neon.c: the kernels of i8 (i8.h) for 64-bit ARM (NEON), without the dot product instructions, which not
 * every such machine has. Sums are exact, so their order is free.
 *
 * qk: two products of signed bytes fit 16 bits, 2 * 128 * 127 < 2^15, and are summed to 32 bits in pairs.
 * pv: weights reach 255, so both operands are widened to 16 bits first.
 */
#include <arm_neon.h>

#include "ops/i8.h"

enum { GROUPS = 4 };

/* The products of 16 keys, four of which lie in each 16 bytes. */
static void qk_tile(float *s, const paged__i8_q *q, const uint8_t *k, const float *k_scale,
                    int32_t head_dim) {
    int32x4_t acc[8] = {{0}};
    for (int64_t d = 0; d < head_dim; d += 4) {
        int32_t four;
        memcpy(&four, q->q + d, sizeof four);
        int8x16_t q4 = vreinterpretq_s8_s32(vdupq_n_s32(four));
        for (int32_t m = 0; m < 4; m++) {
            uint8x16_t biased = vld1q_u8(k + d * PAGED_TILE + m * 16);
            int8x16_t k4 = vreinterpretq_s8_u8(veorq_u8(biased, vdupq_n_u8(PAGED__I8_BIAS)));
            acc[2 * m] = vpadalq_s16(acc[2 * m], vmull_s8(vget_low_s8(k4), vget_low_s8(q4)));
            acc[2 * m + 1] = vpadalq_s16(acc[2 * m + 1], vmull_high_s8(k4, q4));
        }
    }
    for (int32_t m = 0; m < 4; m++) {
        float32x4_t sum = vcvtq_f32_s32(vpaddq_s32(acc[2 * m], acc[2 * m + 1]));
        vst1q_f32(s + m * 4, vmulq_f32(vmulq_n_f32(sum, q->scale), vld1q_f32(k_scale + m * 4)));
    }
}

static void qk(const paged__step *step) {
    for (int32_t j = 0; j < PAGED__STEP_TILES; j++)
        for (int32_t r = 0; r < step->n_rows; r++)
            qk_tile(step->s + r * PAGED_ATTN_STEP + j * PAGED_TILE, paged__i8_q_row(step, r), step->k.at[j],
                    step->k.scale[j], step->head_dim_k);
}

static void softmax(const paged__step *step) {
    paged__i8_softmax(step, &paged__neon_f32);
    paged__i8_weights(step);
}

/* Four elements of V lie in each 16 bytes of a group of four tokens. */
static void pv_tile(float *o, const uint8_t *weight, float scale, const int8_t *v, int64_t dv) {
    int16x4_t p[GROUPS];
    for (int32_t g = 0; g < GROUPS; g++) {
        uint32_t four;
        memcpy(&four, weight + g * 4, sizeof four);
        p[g] = vget_low_s16(vreinterpretq_s16_u16(vmovl_u8(vcreate_u8(four))));
    }
    for (int64_t d = 0; d < dv; d += 4) {
        int32x4_t acc[4] = {{0}};
        for (int32_t g = 0; g < GROUPS; g++) {
            int8x16_t bytes = vld1q_s8(v + (g * dv + d) * 4);
            int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
            acc[0] = vmlal_s16(acc[0], vget_low_s16(low), p[g]);
            acc[1] = vmlal_s16(acc[1], vget_high_s16(low), p[g]);
            acc[2] = vmlal_s16(acc[2], vget_low_s16(high), p[g]);
            acc[3] = vmlal_s16(acc[3], vget_high_s16(high), p[g]);
        }
        int32x4_t sum = vpaddq_s32(vpaddq_s32(acc[0], acc[1]), vpaddq_s32(acc[2], acc[3]));
        vst1q_f32(o + d, vfmaq_n_f32(vld1q_f32(o + d), vcvtq_f32_s32(sum), scale));
    }
}

static void pv(const paged__step *step) {
    for (int32_t r = 0; r < step->n_rows; r++) {
        const paged__i8_p *p = paged__i8_p_row(step, r);
        for (int32_t j = step->seen[r].first / PAGED_TILE; j * PAGED_TILE < step->seen[r].end; j++)
            pv_tile(step->o + r * step->o_stride, p->weight + j * PAGED_TILE, p->scale[j], step->v.at[j],
                    step->head_dim_v);
    }
}

const paged__type_kernels paged__neon_i8 = {.q_bytes = paged__q_bytes_i8,
                                            .p_bytes = PAGED__I8_P_BYTES,
                                            .load_q = paged__load_q_i8,
                                            .qk = qk,
                                            .softmax = softmax,
                                            .pv = pv};
