/* ops/linear_lanes.h: what linear layers compute besides products: RMS norm and quantisation of activations,
 * and what becomes of the sums. Each file of kernels includes it and compiles it for its instruction set.
 *
 * Written in vectors as wide as the machine's, with the compilers' operators. No multiply-add is fused (the
 * room is compiled with -ffp-contract=off), lanes do not meet but in integers and in one sum of a fixed
 * order, so all instruction sets give the same bits. Vectors are passed by address: by value, their place
 * would depend on the instruction set.
 */
#ifndef PAGED_OPS_LINEAR_LANES_H
#define PAGED_OPS_LINEAR_LANES_H

#include <math.h>

#include "ops/linear_kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define PAGED__LANES_FN static inline __attribute__((always_inline))

#if defined(__AVX512F__)
enum { PAGED__N_LANES = 16 };
#elif defined(__AVX2__)
enum { PAGED__N_LANES = 8 };
#else
enum { PAGED__N_LANES = 4 };
#endif
enum { PAGED__ACT_VECTORS = PAGED__ACT_BLOCK / PAGED__N_LANES };

typedef float paged__f32s __attribute__((vector_size(4 * PAGED__N_LANES)));
typedef uint32_t paged__u32s __attribute__((vector_size(4 * PAGED__N_LANES)));
typedef int32_t paged__i32s __attribute__((vector_size(4 * PAGED__N_LANES)));
typedef float paged__f32_half __attribute__((vector_size(2 * PAGED__N_LANES)));
typedef double paged__f64s __attribute__((vector_size(4 * PAGED__N_LANES)));

/* A float of this size has units of 1 in its last place: adding it rounds to nearest even, and its low bits
 * are the integer. */
#define PAGED__ROUNDER      12582912.0f /* 1.5 * 2^23 */
#define PAGED__ROUNDER_BITS 0x4b400000u

/* *x where the mask is zero, `other` where it is ones. */
PAGED__LANES_FN void paged__blend(paged__f32s *x, float other, const paged__i32s *mask) {
    const paged__f32s all = other - (paged__f32s){0};
    *x = (paged__f32s)((*mask & (paged__i32s)all) | (~*mask & (paged__i32s)*x));
}

/* *x = exp(*x); from 88 on as at 88, up to -87 as at -87; NaN stays NaN. Relative error 2e-7. */
PAGED__LANES_FN void paged__exp(paged__f32s *io) {
    paged__f32s x = *io;
    const paged__i32s above = x > 88.0f, below = x < -87.0f;
    paged__blend(&x, 88.0f, &above);
    paged__blend(&x, -87.0f, &below);
    const paged__f32s shifted = x * 1.44269504f + PAGED__ROUNDER, n = shifted - PAGED__ROUNDER;
    /* ln 2 in two parts; n times the first is exact. */
    const paged__f32s r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    paged__f32s p = r * 1.98756915e-4f + 1.39819995e-3f;
    p = p * r + 8.33345199e-3f;
    p = p * r + 4.16657962e-2f;
    p = p * r + 1.66666657e-1f;
    p = p * r + 5.00000000e-1f;
    p = (p * r) * r + r + 1.0f;
    *io = p * (paged__f32s)(((paged__u32s)shifted - PAGED__ROUNDER_BITS + 127u) << 23);
}

/* *x = x / (1 + exp(-x)) */
PAGED__LANES_FN void paged__silu(paged__f32s *x) {
    paged__f32s e = -*x;
    paged__exp(&e);
    *x = *x / (e + 1.0f);
}

/* *x = x / 2 * (1 + tanh u) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x^3) */
PAGED__LANES_FN void paged__gelu(paged__f32s *x) {
    paged__f32s e = *x * -1.59576912f * (*x * *x * 0.044715f + 1.0f);
    paged__exp(&e);
    *x = *x / (e + 1.0f);
}

/* ---- epilogue ---- */

PAGED__LANES_FN void paged__finish_lanes(float *y, const float *a, const float *b, const float *bias_a,
                                         const float *bias_b, const paged__epilogue epilogue) {
    paged__f32s g, u, bias;
    memcpy(&g, a, sizeof g);
    if (bias_a) {
        memcpy(&bias, bias_a, sizeof bias);
        g += bias;
    }
    if (epilogue != PAGED__STORE) {
        memcpy(&u, b, sizeof u);
        if (bias_b) {
            memcpy(&bias, bias_b, sizeof bias);
            u += bias;
        }
        if (epilogue == PAGED__SWIGLU) paged__silu(&g);
        if (epilogue == PAGED__GEGLU) paged__gelu(&g);
        g = epilogue == PAGED__ADD ? u + g : g * u;
    }
    memcpy(y, &g, sizeof g);
}

/* Behind the last row nothing is read or written. */
PAGED__LANES_FN void paged__finish_as(float *y, const float *a, const float *b, const float *bias_a,
                                      const float *bias_b, int32_t n, const paged__epilogue epilogue) {
    int32_t r = 0;
    for (; r + PAGED__N_LANES <= n; r += PAGED__N_LANES)
        paged__finish_lanes(y + r, a + r, b ? b + r : NULL, bias_a ? bias_a + r : NULL,
                            bias_b ? bias_b + r : NULL, epilogue);
    if (r == n) return;
    float in[4][PAGED__N_LANES] = {{0}}, out[PAGED__N_LANES];
    const size_t bytes = (size_t)(n - r) * sizeof(float);
    memcpy(in[0], a + r, bytes);
    if (b) memcpy(in[1], b + r, bytes);
    if (bias_a) memcpy(in[2], bias_a + r, bytes);
    if (bias_b) memcpy(in[3], bias_b + r, bytes);
    paged__finish_lanes(out, in[0], in[1], bias_a ? in[2] : NULL, bias_b ? in[3] : NULL, epilogue);
    memcpy(y + r, out, bytes);
}

/* Rows of y are far apart, each a miss of its own, so they are asked for some tokens ahead. */
enum { PAGED__Y_AHEAD = 12 };

PAGED__LANES_FN void paged__finish_into_rows(const paged__outcome *o, const paged__epilogue epilogue) {
    const float *a = o->sums, *b = o->other;
    float *y = o->y;
    for (int32_t t = 0; t < o->n_tokens; t++, a += o->stride, y += o->y_stride) {
        for (int32_t r = 0; r < o->n_rows && t + PAGED__Y_AHEAD < o->n_tokens; r += 16)
            __builtin_prefetch(y + PAGED__Y_AHEAD * o->y_stride + r, 1);
        paged__finish_as(y, a, b, o->bias, o->bias_other, o->n_rows, epilogue);
        if (b) b += o->other_stride;
    }
}

/* ---- activations ---- */

/* 16 sums of squares go on: the i-th by that of x[i]. */
PAGED__LANES_FN void paged__add_squares(paged__f64s sums[32 / PAGED__N_LANES], const float *x) {
    for (int v = 0; v < 32 / PAGED__N_LANES; v++) {
        paged__f32_half part;
        memcpy(&part, x + v * PAGED__N_LANES / 2, sizeof part);
        const paged__f64s wide = __builtin_convertvector(part, paged__f64s);
        sums[v] += wide * wide;
    }
}

/* 1 / sqrt(mean(x^2) + eps). Sum i of 16 has the squares of i, i + 16, … in double; then they are added in
 * pairs. */
static float paged__rms_scale(const float *x, int32_t n, float eps) {
    paged__f64s sums[32 / PAGED__N_LANES] = {{0}};
    double all[16];
    int32_t j = 0;
    for (; j + 16 <= n; j += 16) paged__add_squares(sums, x + j);
    if (j < n) {
        float part[16] = {0};
        memcpy(part, x + j, (size_t)(n - j) * sizeof *x);
        paged__add_squares(sums, part);
    }
    memcpy(all, sums, sizeof all);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) all[i] += all[i + width];
    return (float)(1.0 / sqrt(all[0] / n + (double)eps));
}

/* The largest bits without sign: as integers they are ordered as the sizes; infinity and NaN come last. */
PAGED__LANES_FN int32_t paged__largest(const paged__f32s x[PAGED__ACT_VECTORS]) {
    paged__i32s most = (paged__i32s)x[0] & INT32_MAX;
    for (int v = 1; v < PAGED__ACT_VECTORS; v++) {
        const paged__i32s size = (paged__i32s)x[v] & INT32_MAX, less = most < size;
        most = (less & size) | (~less & most);
    }
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)most);
#else
    int32_t all = most[0];
    for (int i = 1; i < PAGED__N_LANES; i++) all = PAGED_MAX(all, most[i]);
    return all;
#endif
}

/* Numbers of -127 … 127. */
PAGED__LANES_FN void paged__narrow(int8_t *out, const paged__i32s *q) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)(void *)out, _mm512_cvtepi32_epi8((__m512i)*q));
#elif defined(__AVX2__)
    const __m256i wide = (__m256i)*q;
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64((__m128i *)(void *)out, _mm_packs_epi16(words, words));
#else
    for (int i = 0; i < PAGED__N_LANES; i++) out[i] = (int8_t)(*q)[i];
#endif
}

PAGED__LANES_FN int32_t paged__sum_16(const int8_t *q) {
#if defined(__AVX2__)
    /* Unsigned by + 128, so that the sum of absolute differences from zero is the sum. */
    const __m128i bytes =
        _mm_xor_si128(_mm_loadu_si128((const __m128i *)(const void *)q), _mm_set1_epi8(-128));
    const __m128i sums = _mm_sad_epu8(bytes, _mm_setzero_si128());
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
#else
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += q[i];
    return sum;
#endif
}

/* Blocks whose largest value is below 2^-100 count as zero; one that holds NaN or an infinity makes every
 * output of its token NaN. */
PAGED__LANES_FN void paged__quantise(paged__act_block *out, const paged__f32s x[PAGED__ACT_VECTORS]) {
    const int32_t largest = paged__largest(x);
    float amax;
    memcpy(&amax, &largest, sizeof amax);
    if (largest >= 0x7f800000 || amax < 0x1p-100f) {
        *out = (paged__act_block){.s = largest >= 0x7f800000 ? NAN : 0.0f};
        out->s_sum = out->s;
        return;
    }
    const float inverse = 127.0f / amax;
    for (int v = 0; v < PAGED__ACT_VECTORS; v++) {
        const paged__f32s shifted = x[v] * inverse + PAGED__ROUNDER;
        const paged__i32s q = (paged__i32s)((paged__u32s)shifted - PAGED__ROUNDER_BITS);
        paged__narrow(out->q + v * PAGED__N_LANES, &q);
    }
    const int32_t first = paged__sum_16(out->q), sum = first + paged__sum_16(out->q + 16);
    out->s = amax / 127.0f;
    out->s_sum = out->s * (float)sum;
    out->neg_sum = -sum;
    out->neg_first = -first;
}

static void paged__act_quantised(const paged__act *act, int32_t token, const float *x, const float *weight,
                                 float scale) {
    const paged__group group = paged__group_of(act, token);
    const int32_t n = act->n_cols;
    paged__act_block *out = paged__group_blocks(act, group) + (token - group.first);
    for (int32_t b = 0; b < paged__act_blocks(n); b++, out += group.width) {
        paged__f32s part[PAGED__ACT_VECTORS] = {{0}}, w;
        for (int v = 0; v < PAGED__ACT_VECTORS && b * PAGED__ACT_BLOCK < n; v++) {
            const int32_t k = b * PAGED__ACT_BLOCK + v * PAGED__N_LANES;
            memcpy(&part[v], x + k, sizeof part[v]);
            if (weight) {
                memcpy(&w, weight + k, sizeof w);
                part[v] = (part[v] * scale) * w;
            }
        }
        paged__quantise(out, part);
    }
}

static void paged__act_set_lanes(const paged__act *act, int32_t token, const float *x, const float *weight,
                                 float eps) {
    const float scale = weight ? paged__rms_scale(x, act->n_cols, eps) : 1.0f;
    if (act->quantised) {
        paged__act_quantised(act, token, x, weight, scale);
        return;
    }
    const paged__group group = paged__group_of(act, token);
    float *out = paged__group_floats(act, group) + (token - group.first);
    for (int64_t k = 0; k < act->n_cols; k++)
        out[k * group.width] = weight ? (x[k] * scale) * weight[k] : x[k];
}

/* What would become rows of y becomes blocks of activations while it is at hand. */
PAGED__LANES_FN void paged__finish_into_act(const paged__outcome *o, const paged__epilogue epilogue) {
    paged__group group = paged__group_of(o->act, o->act_token);
    int32_t inside = o->act_token - group.first;
    for (int32_t t = 0; t < o->n_tokens; t++) {
        paged__act_block *out = paged__group_blocks(o->act, group) +
                                (int64_t)(o->act_col / PAGED__ACT_BLOCK) * group.width + inside;
        for (int32_t r = 0; r < o->n_rows; r += PAGED__ACT_BLOCK, out += group.width) {
            paged__f32s part[PAGED__ACT_VECTORS];
            for (int32_t v = 0; v < PAGED__ACT_VECTORS; v++) {
                const int32_t at = r + v * PAGED__N_LANES;
                paged__finish_lanes((float *)&part[v], o->sums + t * o->stride + at,
                                    o->other ? o->other + t * o->other_stride + at : NULL,
                                    o->bias ? o->bias + at : NULL, o->bias_other ? o->bias_other + at : NULL,
                                    epilogue);
            }
            paged__quantise(out, part);
        }
        if (++inside < group.width) continue;
        group = paged__group_after(o->act, group);
        inside = 0;
    }
}

PAGED__LANES_FN void paged__finish_with(const paged__outcome *o, const paged__epilogue epilogue) {
    if (o->act)
        paged__finish_into_act(o, epilogue);
    else
        paged__finish_into_rows(o, epilogue);
}

static void paged__finish(const paged__outcome *o) {
    if (o->epilogue == PAGED__STORE) paged__finish_into_rows(o, PAGED__STORE);
    if (o->epilogue == PAGED__ADD) paged__finish_into_rows(o, PAGED__ADD);
    if (o->epilogue == PAGED__SWIGLU) paged__finish_with(o, PAGED__SWIGLU);
    if (o->epilogue == PAGED__GEGLU) paged__finish_with(o, PAGED__GEGLU);
}

#endif
