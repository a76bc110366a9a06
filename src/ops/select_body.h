/* ops/select_body.h: select.h in vector extensions of the compiler, which turns them into whatever
 * instruction set the including file is built for. NAME(x) gives the names of that set. No file but
 * select_*.c includes this. */
#include <math.h>

#include "ops/ops.h"
#include "ops/select.h"

enum { LANES = 16, PARTS = PAGED__SELECT_BLOCK / LANES };

typedef float floats __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef double doubles __attribute__((vector_size(128)));

/* A macro, since vectors wider than the machine's are not passed to functions. */
#define PICK(mask, yes, no) ((floats)(((mask) & (ints)(yes)) | (~(mask) & (ints)(no))))

/* The part of the block at x that begins at `at`; behind n comes -inf. */
static inline void load(floats *v, const float *x, int64_t at, int64_t n) {
    float few[LANES];
    if (at + LANES <= n) {
        memcpy(v, x + at, sizeof *v);
        return;
    }
    for (int64_t i = 0; i < LANES; i++) few[i] = at + i < n ? x[at + i] : -INFINITY;
    memcpy(v, few, sizeof *v);
}

void NAME(maxima)(const float *x, int32_t n, float *maxima) {
    const floats lowest = {0};
    for (int64_t at = 0; at < n; at += PAGED__SELECT_BLOCK) {
        floats m = lowest - INFINITY, v;
        for (int32_t p = 0; p < PARTS; p++) {
            load(&v, x, at + p * LANES, n);
            m = PICK(v > m, v, m); /* false for NaN */
        }
        float lanes[LANES];
        memcpy(lanes, &m, sizeof m);
        for (int32_t width = LANES / 2; width > 0; width /= 2)
            for (int32_t i = 0; i < width; i++)
                lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
        maxima[at / PAGED__SELECT_BLOCK] = lanes[0];
    }
}

/* exp2 of each lane, x ≤ 0: as paged__exp2 of ops.h. */
static inline void exp2_lanes(floats *x) {
    const floats zero = {0}, magic = zero + 12582912.0f; /* 1.5 * 2^23 rounds to an integer */
    const ints live = *x >= zero + PAGED__EXP2_MIN;      /* false for NaN */
    const floats low = PICK(live, *x, zero), shifted = low + magic, f = low - (shifted - magic);
    floats p = zero + PAGED__EXP2_C6;
    p = p * f + PAGED__EXP2_C5;
    p = p * f + PAGED__EXP2_C4;
    p = p * f + PAGED__EXP2_C3;
    p = p * f + PAGED__EXP2_C2;
    p = p * f + PAGED__EXP2_C1;
    p = p * f + 1.0f;
    p = (floats)((ints)p + ((ints)shifted << 23));
    *x = PICK(live, p, zero);
}

void NAME(sums)(const float *x, int32_t n, float max, float scale, double *sums) {
    for (int64_t at = 0; at < n; at += PAGED__SELECT_BLOCK) {
        doubles sum = {0};
        for (int32_t p = 0; p < PARTS; p++) {
            floats v;
            load(&v, x, at + p * LANES, n);
            v = (v - max) * scale;
            exp2_lanes(&v);
            sum += __builtin_convertvector(v, doubles);
        }
        double total = 0;
        for (int32_t i = 0; i < LANES; i++) total += sum[i];
        sums[at / PAGED__SELECT_BLOCK] = total;
    }
}
