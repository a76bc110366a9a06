/* select.h for this folder's instruction set. */
#define NAME(x) paged__select_##x##_avx2
void paged__select_maxima_avx2(const float *x, int n, float *maxima);
void paged__select_sums_avx2(const float *x, int n, float max, float scale, double *sums);

#include "ops/select_body.h"
