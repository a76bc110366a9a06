/* Goal: the angles of stretched rotary embeddings. Method: the published formulas, written out once more here
 * in double, at positions up to beyond the original context. */
#include "model/rope.h"

#include <math.h>

#include "test.h"

enum { DIM = 64, HALF = DIM / 2 };

static const int32_t positions[] = {0, 100, 8191, 20000};

static double own_frequency(double base, int i) {
    return pow(base, -2.0 * i / DIM);
}

/* wanted [HALF] radians a position */
static void check_angles(const paged__rope *rope, int32_t n_ctx, const double *wanted, double magnitude) {
    double got[HALF];
    CHECK(fabs(paged__rope_frequencies(rope, n_ctx, got) - magnitude) < 1e-6);
    for (size_t p = 0; p < sizeof positions / sizeof positions[0]; p++)
        for (int i = 0; i < HALF; i++) {
            const double angle = positions[p] * wanted[i];
            CHECK(fabs(positions[p] * got[i] - angle) <= 1e-6 * fmax(1, angle));
        }
}

static paged__rope plain(float base) {
    return (paged__rope){.n_rot = DIM,
                         .base = base,
                         .scale = 1,
                         .attn_factor = 1,
                         .beta_fast = 32,
                         .beta_slow = 1,
                         .n_ctx_orig = 8192};
}

/* LLaMA 3.1: wavelengths beyond 8192 / 1 are stretched by 32, those below 8192 / 4 stay. */
static double llama3_frequency(int i) {
    const double factor = 32, low = 1, high = 4, orig = 8192, f = own_frequency(5e5, i);
    const double wavelength = 2 * acos(-1.0) / f;
    if (wavelength < orig / high) return f;
    if (wavelength > orig / low) return f / factor;
    const double smooth = (orig / wavelength - low) / (high - low);
    return (1 - smooth) * f / factor + smooth * f;
}

static void llama3_factors(void) {
    paged__rope rope = plain(5e5f);
    float factors[HALF]; /* as the file has them */
    double wanted[HALF], unscaled[HALF];
    int n_changed = 0;
    for (int i = 0; i < HALF; i++) {
        wanted[i] = llama3_frequency(i);
        unscaled[i] = own_frequency(5e5, i);
        factors[i] = (float)(unscaled[i] / wanted[i]);
        n_changed += wanted[i] != unscaled[i];
    }
    CHECK(n_changed > 8 && n_changed < HALF);
    check_angles(&rope, 8192, unscaled, 1); /* without the tensor */
    rope.factors = factors;
    check_angles(&rope, 8192, wanted, 1);
}

static void linear(void) {
    paged__rope rope = plain(1e4f);
    double wanted[HALF];
    rope.scale = 0.25f;
    for (int i = 0; i < HALF; i++) wanted[i] = own_frequency(1e4, i) / 4;
    check_angles(&rope, 8192, wanted, 1);
}

/* Peng et al. 2023, as their own code has it: borders between pairs are rounded outwards. */
static void yarn(void) {
    const double factor = 16, orig = 4096, base = 1e4, pi = acos(-1.0);
    paged__rope rope = plain((float)base);
    double wanted[HALF];
    rope.yarn = true;
    rope.scale = (float)(1 / factor);
    rope.n_ctx_orig = (int32_t)orig;
    const double low = floor(DIM * log(orig / (32 * 2 * pi)) / (2 * log(base)));
    const double high = ceil(DIM * log(orig / (1 * 2 * pi)) / (2 * log(base)));
    for (int i = 0; i < HALF; i++) {
        const double ramp = fmin(1, fmax(0, (i - low) / (high - low))), f = own_frequency(base, i);
        wanted[i] = f / factor * ramp + f * (1 - ramp);
    }
    CHECK(wanted[0] == own_frequency(base, 0));
    check_angles(&rope, 65536, wanted, 0.1 * log(factor) + 1);
}

static void longrope(void) {
    paged__rope rope = plain(1e4f);
    float near[HALF], far[HALF];
    double wanted_near[HALF], wanted_far[HALF];
    for (int i = 0; i < HALF; i++) {
        near[i] = 1 + (float)i / 64;
        far[i] = 1 + (float)i;
        wanted_near[i] = own_frequency(1e4, i) / (double)near[i];
        wanted_far[i] = own_frequency(1e4, i) / (double)far[i];
    }
    rope.factors = near;
    rope.long_factors = far;
    rope.attn_factor = 1.19f;
    check_angles(&rope, 8192, wanted_near, 1.19);
    check_angles(&rope, 8193, wanted_far, 1.19);
    CHECK(!paged__rope_is_long(&rope, 8192) && paged__rope_is_long(&rope, 8193));
}

/* clang-format off */
#define TESTS(X) X(llama3_factors) X(linear) X(yarn) X(longrope)
/* clang-format on */
TEST_MAIN(TESTS)
