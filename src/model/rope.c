/* model/rope.c: see rope.h. */
#include "model/rope.h"

#include <math.h>

/* The pair that makes `turns` turns within the original context, as a number between pairs. */
static double pair_of_turns(const paged__rope *rope, double turns) {
    const double two_pi = 6.283185307179586;
    return rope->n_rot * log(rope->n_ctx_orig / (turns * two_pi)) / (2 * log((double)rope->base));
}

/* YaRN: 1 where a frequency stays as it is, 0 where it is scaled, a ramp in between. */
static double kept_share(double low, double high, int32_t pair) {
    const double at = (pair - low) / fmax(0.001, high - low);
    return 1 - fmin(1, fmax(0, at));
}

double paged__rope_frequencies(const paged__rope *rope, int32_t n_ctx, double *inv_freq) {
    const float *factors = paged__rope_is_long(rope, n_ctx) ? rope->long_factors : rope->factors;
    const double scale = (double)rope->scale;
    double low = 0, high = 0, magnitude = (double)rope->attn_factor;
    if (rope->yarn) {
        low = fmax(0, floor(pair_of_turns(rope, (double)rope->beta_fast)));
        high = fmin(rope->n_rot - 1, ceil(pair_of_turns(rope, (double)rope->beta_slow)));
        magnitude *= 1 + 0.1 * log(1 / scale);
    }
    for (int32_t i = 0; i < rope->n_rot / 2; i++) {
        const double kept = rope->yarn ? kept_share(low, high, i) : 0;
        const double own =
            pow((double)rope->base, -2.0 * i / rope->n_rot) / (factors ? (double)factors[i] : 1.0);
        inv_freq[i] = own * (scale * (1 - kept) + kept);
    }
    return magnitude;
}
