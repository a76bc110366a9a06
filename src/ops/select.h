/* ops/select.h: what sampling needs of a row of logits, in one pass each.
 *
 * A row is looked at in blocks of 64: their maxima, and their sums of exponentials. Whoever looks for the
 * best tokens skips the blocks whose maximum is too small, so that a vocabulary of 100,000 costs two passes
 * of vector code and a few blocks. The same code for all instruction sets (select_body.h), so the same bits:
 * element i of a block adds to lane i % 16, lanes are added in order.
 *
 * NaN counts as -inf. May include base/ and ops/. Pure functions.
 */
#ifndef PAGED_OPS_SELECT_H
#define PAGED_OPS_SELECT_H

#include "base/base.h"

enum { PAGED__SELECT_BLOCK = 64 };

static inline int32_t paged__select_blocks(int32_t n) {
    return (n + PAGED__SELECT_BLOCK - 1) / PAGED__SELECT_BLOCK;
}

/* maxima[paged__select_blocks(n)] of x[n]; a block of NaN has -inf. */
void paged__select_maxima(const float *x, int32_t n, float *maxima);

/* sums[paged__select_blocks(n)] of exp2((x - max) * scale), max no less than any x. Relative error 1e-7 of
 * each exponential; what is below 2^-126 is 0. */
void paged__select_sums(const float *x, int32_t n, float max, float scale, double *sums);

/* One of them, with the same bits. */
float paged__select_weight(float x, float max, float scale);

#endif
