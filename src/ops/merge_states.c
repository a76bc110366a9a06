/* merge_states.c: attention over two sets of keys put together from outside. (Inside a run, splits are merged
 * in attn_run.c, in units of log2.) */
#include <math.h>

#include "ops/ops.h"

/* out_a = out_a * a + out_b * b. A side of weight 0 is not read. */
static void mix(float *out_a, float a, const float *out_b, float b, int32_t n) {
    if (b == 0) return;
    if (a == 0)
        memcpy(out_a, out_b, (size_t)n * sizeof(float));
    else
        for (int32_t d = 0; d < n; d++) out_a[d] = out_a[d] * a + out_b[d] * b;
}

void paged_attn_merge_states(float *out_a, float *lse_a, const float *out_b, const float *lse_b,
                             int64_t n_rows, int32_t head_dim) {
    for (int64_t r = 0; r < n_rows; r++, out_a += head_dim, out_b += head_dim) {
        double a = lse_a[r], b = lse_b[r];
        if (b == -INFINITY) {
            if (a == -INFINITY) memset(out_a, 0, (size_t)head_dim * sizeof(float));
            continue;
        }
        if (a == -INFINITY) {
            memcpy(out_a, out_b, (size_t)head_dim * sizeof(float));
            lse_a[r] = lse_b[r];
            continue;
        }
        double high = a > b ? a : b, lse = high + log(exp(a - high) + exp(b - high));
        mix(out_a, (float)exp(a - lse), out_b, (float)exp(b - lse), head_dim);
        lse_a[r] = (float)lse;
    }
}
