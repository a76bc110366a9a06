/* ops/linear_lanes.h: what linear layers compute besides products: RMS norm and quantisation of activations,
 * what becomes of the sums, and RoPE. Each file of kernels includes it and compiles it for its instruction
 * set.
 *
 * Written in vectors as wide as the machine's, with the compilers' operators. No multiply-add is fused (the
 * room is compiled with -ffp-contract=off) but with exact products, lanes do not meet but in integers and in
 * one sum of a fixed order, so all instruction sets give the same bits. Vectors are passed by address: by
 * value, their place would depend on the instruction set.
 */
#ifndef PAGED_OPS_LINEAR_LANES_H
#define PAGED_OPS_LINEAR_LANES_H

#include <math.h>

#include "ops/linear_kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

/* Loops over the vectors of a block: an array of vectors is to lie in registers. */
#if defined(__clang__)
#define PAGED__UNROLL _Pragma("clang loop unroll(full)")
#else
#define PAGED__UNROLL _Pragma("GCC unroll 8")
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

/* *x between low and high; NaN stays NaN. */
PAGED__LANES_FN void paged__clamp(paged__f32s *x, float low, float high) {
    const paged__f32s lows = low - (paged__f32s){0}, highs = high - (paged__f32s){0};
#if defined(__AVX512F__)
    *x = (paged__f32s)_mm512_max_ps((__m512)lows, _mm512_min_ps((__m512)highs, (__m512)*x));
#elif defined(__AVX2__)
    *x = (paged__f32s)_mm256_max_ps((__m256)lows, _mm256_min_ps((__m256)highs, (__m256)*x));
#else
    const paged__i32s above = *x > highs, below = *x < lows, inside = ~(above | below);
    *x = (paged__f32s)((above & (paged__i32s)highs) | (below & (paged__i32s)lows) |
                       (inside & (paged__i32s)*x));
#endif
}

/* *x = exp(*x); from 88 on as at 88, up to -87 as at -87; NaN stays NaN. Relative error 2e-7. */
PAGED__LANES_FN void paged__exp(paged__f32s *io) {
    paged__f32s x = *io;
    paged__clamp(&x, -87.0f, 88.0f);
    const paged__f32s shifted = x * 1.44269504f + PAGED__ROUNDER, n = shifted - PAGED__ROUNDER;
    /* ln 2 in two parts; n times the first is exact. */
    const paged__f32s r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    paged__f32s p = r * 1.98756915e-4f + 1.39819995e-3f;
    p = p * r + 8.33345199e-3f;
    p = p * r + 4.16657962e-2f;
    p = p * r + 1.66666657e-1f;
    p = p * r + 5.00000000e-1f;
    p = (p * r) * r + r + 1.0f;
#if defined(__AVX512F__)
    *io = (paged__f32s)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    *io = p * (paged__f32s)(((paged__u32s)shifted - PAGED__ROUNDER_BITS + 127u) << 23);
#endif
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
    PAGED__UNROLL for (int v = 0; v < 32 / PAGED__N_LANES; v++) {
        paged__f32_half part;
        memcpy(&part, x + v * PAGED__N_LANES / 2, sizeof part);
        const paged__f64s wide = __builtin_convertvector(part, paged__f64s);
#if defined(__AVX512F__)
        sums[v] = (paged__f64s)_mm512_fmadd_pd((__m512d)wide, (__m512d)wide, (__m512d)sums[v]);
#else
        sums[v] += wide * wide; /* a square is exact, so this is what a fused multiply-add gives */
#endif
    }
}

/* Of 16: i and i + 8, of the 8 sums i and i + 4, … */
PAGED__LANES_FN double paged__sum_pairs(const paged__f64s sums[32 / PAGED__N_LANES]) {
#if defined(__AVX512F__)
    const __m512d eight = _mm512_add_pd((__m512d)sums[0], (__m512d)sums[1]);
    const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1));
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(two) + _mm_cvtsd_f64(_mm_unpackhi_pd(two, two));
#else
    double all[16];
    memcpy(all, sums, sizeof all);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) all[i] += all[i + width];
    return all[0];
#endif
}

/* 1 / sqrt(mean(x^2) + eps). Sum i of 16 has the squares of i, i + 16, … in double; then they are added in
 * pairs. */
static float paged__rms_scale(const float *x, int32_t n, float eps) {
    paged__f64s sums[32 / PAGED__N_LANES] = {{0}};
    int32_t j = 0;
    for (; j + 16 <= n; j += 16) paged__add_squares(sums, x + j);
    if (j < n) {
        float part[16] = {0};
        memcpy(part, x + j, (size_t)(n - j) * sizeof *x);
        paged__add_squares(sums, part);
    }
    return (float)(1.0 / sqrt(paged__sum_pairs(sums) / n + (double)eps));
}

/* The largest bits without sign: as integers they are ordered as the sizes; infinity and NaN come last. */
PAGED__LANES_FN int32_t paged__largest(const paged__f32s x[PAGED__ACT_VECTORS]) {
#if defined(__AVX512F__)
    const __m512i bits = _mm512_set1_epi32(INT32_MAX);
    const __m512i most =
        _mm512_max_epi32(_mm512_and_si512((__m512i)x[0], bits), _mm512_and_si512((__m512i)x[1], bits));
    return _mm512_reduce_max_epi32(most);
#else
    paged__i32s most = (paged__i32s)x[0] & INT32_MAX;
    PAGED__UNROLL for (int v = 1; v < PAGED__ACT_VECTORS; v++) {
        const paged__i32s size = (paged__i32s)x[v] & INT32_MAX, less = most < size;
        most = (less & size) | (~less & most);
    }
    int32_t all = most[0];
    for (int i = 1; i < PAGED__N_LANES; i++) all = PAGED_MAX(all, most[i]);
    return all;
#endif
}

/* The low bits of *x are *x * inverse, rounded to an integer. */
PAGED__LANES_FN void paged__scale_to_int(paged__i32s *q, const paged__f32s *x, float inverse) {
    const paged__f32s shifted = *x * inverse + PAGED__ROUNDER;
    *q = (paged__i32s)((paged__u32s)shifted - PAGED__ROUNDER_BITS);
}

/* 32 numbers of -127 … 127 to bytes, and the sums of both halves. */
PAGED__LANES_FN void paged__narrow(int8_t *out, const paged__i32s q[PAGED__ACT_VECTORS], int32_t sums[2]) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    const __m128i low = _mm512_cvtepi32_epi8((__m512i)q[0]), high = _mm512_cvtepi32_epi8((__m512i)q[1]);
#else
    /* Packing works in halves of 128 bits, whose words then lie in the order 0, 2, 1, 3. */
    const __m256i first = _mm256_packs_epi32((__m256i)q[0], (__m256i)q[1]),
                  second = _mm256_packs_epi32((__m256i)q[2], (__m256i)q[3]),
                  a = _mm256_permute4x64_epi64(first, 0xd8), b = _mm256_permute4x64_epi64(second, 0xd8);
    const __m128i low = _mm_packs_epi16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)),
                  high = _mm_packs_epi16(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
#endif
    const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    _mm256_storeu_si256((__m256i *)(void *)out, bytes);
    /* Unsigned by + 128, so that the sum of absolute differences from zero is the sum. */
    const __m256i sad =
        _mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    const __m256i all = _mm256_add_epi32(sad, _mm256_shuffle_epi32(sad, 0x4e));
    sums[0] = _mm_cvtsi128_si32(_mm256_castsi256_si128(all)) - 16 * 128;
    sums[1] = _mm_cvtsi128_si32(_mm256_extracti128_si256(all, 1)) - 16 * 128;
#else
    sums[0] = sums[1] = 0;
    for (int i = 0; i < PAGED__ACT_BLOCK; i++) {
        const int32_t one = q[i / PAGED__N_LANES][i % PAGED__N_LANES];
        out[i] = (int8_t)one;
        sums[i / 16] += one;
    }
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
    paged__i32s q[PAGED__ACT_VECTORS];
    int32_t sums[2];
    PAGED__UNROLL for (int v = 0; v < PAGED__ACT_VECTORS; v++) paged__scale_to_int(&q[v], &x[v], inverse);
    paged__narrow(out->q, q, sums);
    out->s = amax / 127.0f;
    out->s_sum = out->s * (float)(sums[0] + sums[1]);
    out->neg_sum = -(sums[0] + sums[1]);
    out->neg_first = -sums[0];
}

/* Where a block of a token goes and how; other forms of activations define it otherwise. */
#ifndef PAGED__PUT_BLOCK
#define PAGED__PUT_BLOCK(act, group, inside, block, x)                                                       \
    paged__quantise(paged__group_blocks(act, group) + (int64_t)(block) * (group).width + (inside), x)
#endif

/* 32 of x, or of (x * scale) * weight. */
PAGED__LANES_FN void paged__load_block(paged__f32s part[PAGED__ACT_VECTORS], const float *x,
                                       const float *weight, float scale) {
    PAGED__UNROLL for (int v = 0; v < PAGED__ACT_VECTORS; v++) {
        paged__f32s w;
        memcpy(&part[v], x + v * PAGED__N_LANES, sizeof part[v]);
        if (!weight) continue;
        memcpy(&w, weight + v * PAGED__N_LANES, sizeof w);
        part[v] = (part[v] * scale) * w;
    }
}

static void paged__act_quantised(const paged__act *act, int32_t token, const float *x, const float *weight,
                                 float scale) {
    const paged__group group = paged__group_of(act, token);
    const int32_t n = act->n_cols;
    for (int32_t b = 0; b < paged__act_blocks(n); b++) {
        paged__f32s part[PAGED__ACT_VECTORS] = {{0}};
        if (b * PAGED__ACT_BLOCK < n)
            paged__load_block(part, x + b * PAGED__ACT_BLOCK, weight ? weight + b * PAGED__ACT_BLOCK : NULL,
                              scale);
        PAGED__PUT_BLOCK(act, group, token - group.first, b, part);
    }
}

static void paged__act_set_lanes(const paged__act *act, int32_t token, const float *x, const float *weight,
                                 float eps) {
    const float scale = weight ? paged__rms_scale(x, act->n_cols, eps) : 1.0f;
    if (act->kind != PAGED__ACT_F32) {
        paged__act_quantised(act, token, x, weight, scale);
        return;
    }
    const paged__group group = paged__group_of(act, token);
    float *out = paged__group_floats(act, group) + (token - group.first);
    for (int64_t k = 0; k < act->n_cols; k++)
        out[k * group.width] = weight ? (x[k] * scale) * weight[k] : x[k];
}

/* Tokens whose outputs are made before the first of them is quantised: two short chains of many blocks keep
 * the processor busier than a long one of few. */
enum { PAGED__MADE_TOKENS = 8 };

/* 32 outputs from row r on of tokens t … t + n - 1. */
PAGED__LANES_FN void paged__finish_block(float made[][PAGED__ACT_BLOCK], const paged__outcome *o, int32_t t,
                                         int32_t n, int32_t r, const paged__epilogue epilogue) {
    const float *a = o->sums + t * o->stride + r, *b = o->other + t * o->other_stride + r;
    const float *bias_a = o->bias ? o->bias + r : NULL, *bias_b = o->bias_other ? o->bias_other + r : NULL;
    for (int32_t i = 0; i < n; i++, a += o->stride, b += o->other_stride)
        PAGED__UNROLL for (int v = 0; v < PAGED__ACT_BLOCK; v += PAGED__N_LANES) paged__finish_lanes(
            made[i] + v, a + v, b + v, bias_a ? bias_a + v : NULL, bias_b ? bias_b + v : NULL, epilogue);
}

/* What would become rows of y becomes blocks of activations while it is at hand. */
PAGED__LANES_FN void paged__finish_into_act(const paged__outcome *o, const paged__epilogue epilogue) {
    _Alignas(64) float made[PAGED__MADE_TOKENS][PAGED__ACT_BLOCK];
    for (int32_t r = 0; r < o->n_rows; r += PAGED__ACT_BLOCK) {
        paged__group group = paged__group_of(o->act, o->act_token);
        int32_t inside = o->act_token - group.first;
        const int32_t column = (o->act_col + r) / PAGED__ACT_BLOCK;
        for (int32_t t = 0; t < o->n_tokens; t += PAGED__MADE_TOKENS) {
            const int32_t n = PAGED_MIN(o->n_tokens - t, (int32_t)PAGED__MADE_TOKENS);
            paged__finish_block(made, o, t, n, r, epilogue);
            for (int32_t i = 0; i < n; i++) {
                paged__f32s part[PAGED__ACT_VECTORS];
                paged__load_block(part, made[i], NULL, 1.0f);
                PAGED__PUT_BLOCK(o->act, group, inside, column, part);
                if (++inside < group.width) continue;
                group = paged__group_after(o->act, group);
                inside = 0;
            }
        }
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

/* ---- rows between products ---- */

static void paged__rms_norm_lanes(float *out, const float *x, int32_t n, const float *weight, float eps) {
    const float scale = paged__rms_scale(x, n, eps);
    int32_t i = 0;
    for (; i + PAGED__N_LANES <= n; i += PAGED__N_LANES) {
        paged__f32s v, w;
        memcpy(&v, x + i, sizeof v);
        memcpy(&w, weight + i, sizeof w);
        v = (v * scale) * w;
        memcpy(out + i, &v, sizeof v);
    }
    for (; i < n; i++) out[i] = (x[i] * scale) * weight[i];
}

PAGED__LANES_FN void paged__swap_neighbours(paged__f32s *x) {
#if defined(__AVX512F__)
    *x = (paged__f32s)_mm512_permute_ps((__m512)*x, 0xb1);
#elif defined(__AVX2__)
    *x = (paged__f32s)_mm256_permute_ps((__m256)*x, 0xb1);
#else
    *x = __builtin_shufflevector(*x, *x, 1, 0, 3, 2);
#endif
}

PAGED__LANES_FN void paged__turn_neighbours(float *x, const paged__turns *t) {
    int32_t i = 0;
    for (; i + PAGED__N_LANES <= t->n_rot; i += PAGED__N_LANES) {
        paged__f32s v, other, c, s;
        memcpy(&v, x + i, sizeof v);
        memcpy(&c, t->cos + i, sizeof c);
        memcpy(&s, t->sin + i, sizeof s);
        other = v;
        paged__swap_neighbours(&other);
        v = v * c + other * s;
        memcpy(x + i, &v, sizeof v);
    }
    for (; i < t->n_rot; i += 2) {
        const float a = x[i], b = x[i + 1];
        x[i] = a * t->cos[i] + b * t->sin[i];
        x[i + 1] = b * t->cos[i + 1] + a * t->sin[i + 1];
    }
}

PAGED__LANES_FN void paged__turn_halves(float *x, const paged__turns *t) {
    const int32_t half = t->n_rot / 2;
    int32_t i = 0;
    for (; i + PAGED__N_LANES <= half; i += PAGED__N_LANES) {
        paged__f32s a, b, c, s;
        memcpy(&a, x + i, sizeof a);
        memcpy(&b, x + half + i, sizeof b);
        memcpy(&c, t->cos + i, sizeof c);
        memcpy(&s, t->sin + i, sizeof s);
        const paged__f32s first = a * c - b * s, second = a * s + b * c;
        memcpy(x + i, &first, sizeof first);
        memcpy(x + half + i, &second, sizeof second);
    }
    for (; i < half; i++) {
        const float a = x[i], b = x[half + i];
        x[i] = a * t->cos[i] - b * t->sin[i];
        x[half + i] = a * t->sin[i] + b * t->cos[i];
    }
}

static void paged__turn_lanes(float *x, const paged__turns *turns, int32_t n_heads, int32_t head_dim) {
    for (int32_t h = 0; h < n_heads; h++, x += head_dim)
        if (turns->neighbours)
            paged__turn_neighbours(x, turns);
        else
            paged__turn_halves(x, turns);
}

/* Of a table of kernels. */
#define PAGED__LANES                                                                                         \
    .finish = paged__finish, .act_set = paged__act_set_lanes, .rms_norm = paged__rms_norm_lanes,             \
    .turn = paged__turn_lanes

#endif
