/* ops/select.c: chooses the instruction set of select.h. */
#include "ops/select.h"

#include "ops/ops.h"

/* name(…) of the best instruction set that there is. */
#if defined(__x86_64__)
#define CALL(name, ...)                                                                                      \
    (paged_cpu_flags() & PAGED_CPU_AVX512 ? paged__select_##name##_avx512(__VA_ARGS__)                       \
     : paged_cpu_flags() & PAGED_CPU_AVX2 ? paged__select_##name##_avx2(__VA_ARGS__)                         \
                                          : paged__select_##name##_ref(__VA_ARGS__))
#else
#define CALL(name, ...) paged__select_##name##_ref(__VA_ARGS__)
#endif

#define DECLARE(set)                                                                                         \
    void paged__select_maxima_##set(const float *x, int32_t n, float *maxima);                               \
    void paged__select_sums_##set(const float *x, int32_t n, float max, float scale, double *sums);          \
    void paged__select_weights_##set(const float *x, int32_t n, float max, float scale, float *weights);     \
    int32_t paged__select_gather_##set(const float *x, int32_t n, float floor, float *values,                \
                                       int32_t *places);
DECLARE(ref)
#if defined(__x86_64__)
DECLARE(avx2)
DECLARE(avx512)
#endif

void paged__select_maxima(const float *x, int32_t n, float *maxima) {
    CALL(maxima, x, n, maxima);
}

void paged__select_sums(const float *x, int32_t n, float max, float scale, double *sums) {
    CALL(sums, x, n, max, scale, sums);
}

void paged__select_weights(const float *x, int32_t n, float max, float scale, float *weights) {
    CALL(weights, x, n, max, scale, weights);
}

int32_t paged__select_gather(const float *x, int32_t n, float floor, float *values, int32_t *places) {
    return CALL(gather, x, n, floor, values, places);
}
