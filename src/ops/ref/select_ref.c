/* select.h in plain C. */
#define NAME(x) paged__select_##x##_ref

#include "ops/select_body.h"

int32_t paged__select_gather_ref(const float *x, int32_t n, float floor, float *values, int32_t *places) {
    int32_t n_found = 0;
    for (int32_t i = 0; i < n; i++) {
        values[n_found] = x[i];
        places[n_found] = i;
        n_found += x[i] >= floor;
    }
    return n_found;
}
