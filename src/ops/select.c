/* ops/select.c: chooses the instruction set of select.h. */
#include "ops/select.h"

#include "ops/ops.h"

void paged__select_maxima_ref(const float *x, int32_t n, float *maxima);
void paged__select_sums_ref(const float *x, int32_t n, float max, float scale, double *sums);
#if defined(__x86_64__)
void paged__select_maxima_avx2(const float *x, int32_t n, float *maxima);
void paged__select_sums_avx2(const float *x, int32_t n, float max, float scale, double *sums);
void paged__select_maxima_avx512(const float *x, int32_t n, float *maxima);
void paged__select_sums_avx512(const float *x, int32_t n, float max, float scale, double *sums);
#endif

void paged__select_maxima(const float *x, int32_t n, float *maxima) {
#if defined(__x86_64__)
    if (paged_cpu_flags() & PAGED_CPU_AVX512) {
        paged__select_maxima_avx512(x, n, maxima);
        return;
    }
    if (paged_cpu_flags() & PAGED_CPU_AVX2) {
        paged__select_maxima_avx2(x, n, maxima);
        return;
    }
#endif
    paged__select_maxima_ref(x, n, maxima);
}

void paged__select_sums(const float *x, int32_t n, float max, float scale, double *sums) {
#if defined(__x86_64__)
    if (paged_cpu_flags() & PAGED_CPU_AVX512) {
        paged__select_sums_avx512(x, n, max, scale, sums);
        return;
    }
    if (paged_cpu_flags() & PAGED_CPU_AVX2) {
        paged__select_sums_avx2(x, n, max, scale, sums);
        return;
    }
#endif
    paged__select_sums_ref(x, n, max, scale, sums);
}

float paged__select_weight(float x, float max, float scale) {
    const float y = (x - max) * scale;
    return y == y ? paged__exp2(y) : 0;
}
