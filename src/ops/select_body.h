/* ops/select_body.h: select.h in vector extensions of the compiler, which turns them into whatever
 * instruction set the including file is built for. That file has gather() of its own, since the extensions
 * have nothing for it. NAME(x) gives the names of that set. No file but select_*.c includes this. */
#include <math.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "ops/ops.h"
#include "ops/select.h"

enum { LANES = 16, GROUP = 4 * LANES };

typedef float floats __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef double doubles __attribute__((vector_size(128)));

void NAME(maxima)(const float *x, int32_t n, float *maxima);
void NAME(sums)(const float *x, int32_t n, float max, float scale, double *sums);
void NAME(weights)(const float *x, int32_t n, float max, float scale, float *weights);
int32_t NAME(gather)(const float *x, int32_t n, float floor, float *values, int32_t *places);

/* A macro, since vectors wider than the machine's are not passed to functions. */
#define PICK(mask, yes, no) ((floats)(((mask) & (ints)(yes)) | (~(mask) & (ints)(no))))

/* The 64 elements at x[at …], or a copy with -inf behind the n-th. */
static inline const float *group_at(const float *x, int64_t at, int64_t n, float *copy /* [GROUP] */) {
    if (at + GROUP <= n) return x + at;
    for (int64_t i = 0; i < GROUP; i++) copy[i] = at + i < n ? x[at + i] : -INFINITY;
    return copy;
}

static inline void load(floats *v, const float *x) {
    memcpy(v, x, sizeof *v);
}

/* False for NaN. */
static inline void keep_larger(floats *m, const float *x) {
    floats v;
    load(&v, x);
    *m = PICK(v > *m, v, *m);
}

void NAME(maxima)(const float *x, int32_t n, float *maxima) {
    const floats none = (floats){0} - INFINITY;
    float copy[GROUP], lanes[LANES];
    for (int64_t at = 0; at < n; at += PAGED__SELECT_BLOCK) {
        const int64_t end = PAGED_MIN(at + PAGED__SELECT_BLOCK, (int64_t)n);
        floats a = none, b = none, c = none, d = none;
        for (int64_t i = at; i < end; i += GROUP) {
            const float *group = group_at(x, i, n, copy);
            keep_larger(&a, group);
            keep_larger(&b, group + LANES);
            keep_larger(&c, group + 2 * LANES);
            keep_larger(&d, group + 3 * LANES);
        }
        a = PICK(b > a, b, a);
        c = PICK(d > c, d, c);
        a = PICK(c > a, c, a);
        memcpy(lanes, &a, sizeof a);
        float most = lanes[0];
        for (int32_t i = 1; i < LANES; i++) most = lanes[i] > most ? lanes[i] : most;
        maxima[at / PAGED__SELECT_BLOCK] = most;
    }
}

/* p * f + c, rounded once: six of twenty operations less in what follows. */
static inline void multiply_add(floats *p, const floats *f, float c) {
#if defined(__AVX512F__)
    *p = (floats)_mm512_fmadd_ps((__m512)*p, (__m512)*f, _mm512_set1_ps(c));
#elif defined(__FMA__)
    __m256 a[2], b[2];
    memcpy(a, p, sizeof a);
    memcpy(b, f, sizeof b);
    for (int32_t i = 0; i < 2; i++) a[i] = _mm256_fmadd_ps(a[i], b[i], _mm256_set1_ps(c));
    memcpy(p, a, sizeof a);
#else
    for (int32_t i = 0; i < LANES; i++) (*p)[i] = fmaf((*p)[i], (*f)[i], c);
#endif
}

/* exp2((x - max) * scale) of each lane, x ≤ max, by the polynomial of ops.h. */
static inline void weigh(floats *x, float max, float scale) {
    const floats zero = {0}, magic = zero + 12582912.0f; /* 1.5 * 2^23 rounds to an integer */
    const floats y = (*x - max) * scale, shifted = y + magic, f = y - (shifted - magic);
    const ints live = y >= zero + PAGED__EXP2_MIN; /* false for NaN */
    floats p = zero + PAGED__EXP2_C6;
    multiply_add(&p, &f, PAGED__EXP2_C5);
    multiply_add(&p, &f, PAGED__EXP2_C4);
    multiply_add(&p, &f, PAGED__EXP2_C3);
    multiply_add(&p, &f, PAGED__EXP2_C2);
    multiply_add(&p, &f, PAGED__EXP2_C1);
    multiply_add(&p, &f, 1.0f);
    *x = (floats)(((ints)p + ((ints)shifted << 23)) & live);
}

void NAME(sums)(const float *x, int32_t n, float max, float scale, double *sums) {
    float copy[GROUP];
    for (int64_t at = 0; at < n; at += PAGED__SELECT_BLOCK) {
        const int64_t end = PAGED_MIN(at + PAGED__SELECT_BLOCK, (int64_t)n);
        doubles sum = {0};
        for (int64_t i = at; i < end; i += GROUP) {
            const float *group = group_at(x, i, n, copy);
            floats a, b, c, d;
            load(&a, group);
            load(&b, group + LANES);
            load(&c, group + 2 * LANES);
            load(&d, group + 3 * LANES);
            weigh(&a, max, scale);
            weigh(&b, max, scale);
            weigh(&c, max, scale);
            weigh(&d, max, scale);
            a = (a + b) + (c + d);
            sum += __builtin_convertvector(a, doubles);
        }
        double total = 0;
        for (int32_t i = 0; i < LANES; i++) total += sum[i];
        sums[at / PAGED__SELECT_BLOCK] = total;
    }
}

void NAME(weights)(const float *x, int32_t n, float max, float scale, float *weights) {
    float copy[GROUP];
    for (int64_t at = 0; at < n; at += GROUP) {
        const float *group = group_at(x, at, n, copy);
        for (int32_t p = 0; p < GROUP; p += LANES) {
            floats v;
            load(&v, group + p);
            weigh(&v, max, scale);
            if (group == copy)
                memcpy(copy + p, &v, sizeof v);
            else
                memcpy(weights + at + p, &v, sizeof v);
        }
        if (group == copy) memcpy(weights + at, copy, (size_t)(n - at) * sizeof *copy);
    }
}
