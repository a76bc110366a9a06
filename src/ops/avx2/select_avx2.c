/* select.h for AVX2: gather takes eight elements at a time and looks at those that are large enough. */
#define NAME(x) paged__select_##x##_avx2

#include "ops/select_body.h"

int32_t paged__select_gather_avx2(const float *x, int32_t n, float floor, float *values, int32_t *places) {
    const __m256 least = _mm256_set1_ps(floor);
    int32_t n_found = 0, i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 large = _mm256_cmp_ps(_mm256_loadu_ps(x + i), least, _CMP_GE_OQ);
        for (uint32_t found = (uint32_t)_mm256_movemask_ps(large); found; found &= found - 1) {
            const int32_t at = i + __builtin_ctz(found);
            values[n_found] = x[at];
            places[n_found++] = at;
        }
    }
    for (; i < n; i++) {
        if (!(x[i] >= floor)) continue;
        values[n_found] = x[i];
        places[n_found++] = i;
    }
    return n_found;
}
