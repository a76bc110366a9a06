/* linear_neon_dot.c: linear layers for 64-bit ARM with SDOT (ARMv8.2 and later, optional there). */
#include "ops/linear_neon.h"

INLINE int32x4_t dots(int32x4_t acc, int8x16_t w0, int8x16_t q0, int8x16_t w1, int8x16_t q1) {
    return vdotq_s32(vdotq_s32(acc, w0, q0), w1, q1);
}

const paged__linear_kernels_table paged__linear_neon_dot = {.name = "neon_dot", .sums = sums, PAGED__LANES};
