/* half.c: f16 and bf16 in plain C, round to nearest even.
 *
 * Equal to the instructions (VCVTPS2PH, VCVTPH2PS) for every finite input and for NaN payloads; only
 * overflow differs: it saturates, so that one huge activation does not turn a whole row of attention into
 * NaN. */
#include "base/base.h"

static uint32_t bits_of(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static float float_of(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

float paged__f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
    if (exponent == 0) {
        /* Subnormal: mantissa units of 2^-24, exact in f32. */
        return float_of(sign | bits_of((float)mantissa * 0x1p-24f));
    }
    if (exponent == 31) return float_of(sign | 0x7f800000u | (mantissa ? 0x400000u | mantissa << 13 : 0u));
    return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}

uint16_t paged__f32_to_f16(float f) {
    uint32_t u = bits_of(f), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7bffu); /* from 65520 on it would round to infinity */
    if (a < 0x38800000u) {
        /* Below 2^-14: the sum with 0.5 has units of 2^-24 in its last place, so the addition rounds for
         * us. */
        return (uint16_t)(sign | (bits_of(float_of(a) + 0.5f) - 0x3f000000u));
    }
    a += 0xfffu + ((a >> 13) & 1u);
    return (uint16_t)(sign | (a - 0x38000000u) >> 13);
}

uint16_t paged__f32_to_bf16(float f) {
    uint32_t u = bits_of(f), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40u);
    a += 0x7fffu + ((a >> 16) & 1u);
    return (uint16_t)(sign | PAGED_MIN(a >> 16, 0x7f7fu));
}
