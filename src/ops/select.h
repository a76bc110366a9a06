/* ops/select.h: what sampling needs of a row of logits: a few passes of vector code.
 *
 * A row is looked at in blocks of 512: their maxima and their sums of exponentials. So the best token, or the
 * one at which a sum is reached, is looked for in one block, and blocks without a good token are left out
 * when the good ones are gathered. The same bits from all instruction sets: element i of a block adds to lane
 * i % 16, in f32 with those of the same 64 elements and in double beyond, and the lanes are added in order.
 *
 * NaN counts as -inf. May include base/ and ops/. Pure functions.
 */
#ifndef PAGED_OPS_SELECT_H
#define PAGED_OPS_SELECT_H

#include "base/base.h"

enum {
    PAGED__SELECT_BLOCK = 512,
    PAGED__SELECT_SLACK = 16 /* elements that gather may write behind the last one that it found */
};

static inline int32_t paged__select_blocks(int32_t n) {
    return (n + PAGED__SELECT_BLOCK - 1) / PAGED__SELECT_BLOCK;
}

/* maxima[paged__select_blocks(n)] of x[n]; a block of NaN has -inf. */
void paged__select_maxima(const float *x, int32_t n, float *maxima);

/* sums[paged__select_blocks(n)] of exp2((x - max) * scale), max no less than any x. Relative error 2e-7 of
 * each exponential; what is below 2^-126 is 0. */
void paged__select_sums(const float *x, int32_t n, float max, float scale, double *sums);

/* Each of them, weights[n]. */
void paged__select_weights(const float *x, int32_t n, float max, float scale, float *weights);

/* What is at least `floor`, in order: values and their places in x, each with room for n and
 * PAGED__SELECT_SLACK. Returns how many. */
int32_t paged__select_gather(const float *x, int32_t n, float floor, float *values, int32_t *places);

#endif
