/* linear_neon.c: linear layers for every 64-bit ARM processor: products of bytes in 16 bits, two to a sum. */
#include "ops/linear_neon.h"

/* Two products are at most 2 * 128 * 127, which 16 bits hold. */
INLINE int32x4_t dots(int32x4_t acc, int8x16_t w0, int8x16_t q0, int8x16_t w1, int8x16_t q1) {
    const int16x8_t low =
        vmlal_s8(vmull_s8(vget_low_s8(w0), vget_low_s8(q0)), vget_low_s8(w1), vget_low_s8(q1));
    const int16x8_t high = vmlal_high_s8(vmull_high_s8(w0, q0), w1, q1);
    return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}

const paged__linear_kernels_table paged__linear_neon = {.name = "neon", .sums = sums, PAGED__LANES};
