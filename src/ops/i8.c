/* i8.c: rows of i8 (i8.h), into their slots and back. */
#include "ops/i8.h"

#include <math.h>

/* ---- vectors: those of gcc and clang, which every machine has in some form ---- */

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef int8_t i8x4 __attribute__((vector_size(4)));

static inline f32x4 all(float x) {
    return (f32x4){x, x, x, x};
}
static inline f32x4 load4(const float *x) {
    f32x4 v;
    memcpy(&v, x, sizeof v);
    return v;
}
static inline void store4(float *x, f32x4 v) {
    memcpy(x, &v, sizeof v);
}
static inline f32x4 choose(i32x4 mask, f32x4 yes, f32x4 no) {
    return (f32x4)((mask & (i32x4)yes) | (~mask & (i32x4)no));
}
static inline f32x4 magnitude(f32x4 x) {
    return (f32x4)((i32x4)x & 0x7fffffff);
}

/* ---- rotation ---- */

/* The largest power of two that divides n. */
static int32_t rotation_order(int32_t n) {
    return n & -n;
}

/* Multiplies each block of `order` ≥ 4 elements of x[n] by the Hadamard matrix,
 * H[i][j] = (-1)^popcount(i & j). The fast transform: log2(order) rounds of sums and differences; every
 * element is one tree of additions. */
static void hadamard(float *x, int32_t n, int32_t order) {
    for (int32_t i = 0; i < n; i += 4) {
        f32x4 v = load4(x + i);
        v = __builtin_shufflevector(v, v, 0, 0, 2, 2) + __builtin_shufflevector(v, -v, 1, 5, 3, 7);
        v = __builtin_shufflevector(v, v, 0, 1, 0, 1) + __builtin_shufflevector(v, -v, 2, 3, 6, 7);
        store4(x + i, v);
    }
    for (int32_t half = 4; half < order; half *= 2)
        for (int32_t block = 0; block < n; block += 2 * half)
            for (int32_t i = block; i < block + half; i += 4) {
                f32x4 a = load4(x + i), b = load4(x + i + half);
                store4(x + i, a + b);
                store4(x + i + half, a - b);
            }
}

/* ---- rows ---- */

/* dst[n] = src[n] * factor, limited to ±PAGED__I8_MAX. Returns the number of NaN. */
static int64_t load_limited(float *dst, const float *src, float factor, int32_t n) {
    const f32x4 most = all(PAGED__I8_MAX), least = all(-PAGED__I8_MAX);
    i32x4 n_nan = {0};
    for (int32_t i = 0; i < n; i += 4) {
        f32x4 x = load4(src + i) * factor;
        n_nan -= x != x;
        x = choose(x > most, most, x);
        store4(dst + i, choose(x < least, least, x));
    }
    return (int64_t)n_nan[0] + n_nan[1] + n_nan[2] + n_nan[3];
}

static float largest(const float *x, int32_t n) {
    f32x4 top = all(0);
    for (int32_t i = 0; i < n; i += 4) {
        f32x4 v = magnitude(load4(x + i));
        top = choose(v > top, v, top);
    }
    float a = top[0] > top[1] ? top[0] : top[1], b = top[2] > top[3] ? top[2] : top[3];
    return a > b ? a : b;
}

/* bytes[n] = x[n] * by, rounded to nearest even; |x * by| ≤ 127.5. */
static void round_to_bytes(int8_t *bytes, const float *x, float by, int32_t n) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it leaves the integer in the low bits */
    for (int32_t i = 0; i < n; i += 4) {
        i8x4 four = __builtin_convertvector((i32x4)(load4(x + i) * by + magic), i8x4);
        memcpy(bytes + i, &four, sizeof four);
    }
}

int64_t paged__i8_from_f32(int8_t *bytes, float *scale, const float *src, float factor, int32_t n,
                           bool rotate) {
    float x[PAGED_HEAD_DIM_MAX], norm = 1;
    int64_t n_nan = load_limited(x, src, factor, n);
    if (rotate && !n_nan) {
        int32_t order = rotation_order(n);
        hadamard(x, n, order);
        norm = 1 / sqrtf((float)order);
    }
    float top = n_nan ? 0 : largest(x, n);
    if (top < PAGED__I8_MIN) {
        for (int32_t i = 0; i < n; i++) bytes[i] = 0;
        *scale = n_nan ? NAN : 0;
        return n_nan;
    }
    round_to_bytes(bytes, x, 127 / top, n);
    *scale = top * norm / 127;
    return 0;
}

float paged__i8_scale_max(int32_t n, bool rotate) {
    /* A block of `order` times PAGED__I8_MAX has their sum as its first element, exactly, and zeros. */
    float order = (float)(rotate ? rotation_order(n) : 1);
    return order * PAGED__I8_MAX * (1 / sqrtf(order)) / 127;
}

void paged__i8_to_f32(float *dst, const int8_t *bytes, float scale, int32_t n, bool rotated) {
    for (int32_t i = 0; i < n; i++) dst[i] = bytes[i];
    if (rotated) {
        int32_t order = rotation_order(n);
        hadamard(dst, n, order); /* its own inverse, but for 1 / order */
        scale *= 1 / sqrtf((float)order);
    }
    for (int32_t i = 0; i < n; i++) dst[i] *= scale;
}

/* ---- slots ---- */

/* Where the row of one slot and head lies. */
typedef struct row {
    uint8_t *k; /* element d at k[d / 4 * 64 + d % 4] */
    uint8_t *v; /* element d at v[d * 4] */
    uint8_t *k_scale, *v_scale;
} row;

static row row_at(const paged_kv *kv, int64_t slot, int64_t head) {
    int64_t block = slot / kv->block_size, o = slot % kv->block_size, i = o % PAGED_TILE, tile = o - i;
    int64_t scale = block * kv->scale_block_stride + head * kv->scale_head_stride + o * 4;
    uint8_t *k = kv->k + block * kv->block_stride + head * kv->k_head_stride + tile * kv->head_dim_k;
    uint8_t *v = kv->v + block * kv->block_stride + head * kv->v_head_stride + tile * kv->head_dim_v;
    return (row){.k = k + i * 4,
                 .v = v + i / 4 * 4 * kv->head_dim_v + i % 4,
                 .k_scale = kv->k_scale + scale,
                 .v_scale = kv->v_scale + scale};
}

static int64_t write_k(const row *to, const float *src, int32_t n) {
    int8_t bytes[PAGED_HEAD_DIM_MAX];
    float scale;
    int64_t n_nan = paged__i8_from_f32(bytes, &scale, src, 1, n, true);
    for (int64_t d = 0; d < n; d += 4) {
        uint32_t four;
        memcpy(&four, bytes + d, sizeof four);
        four ^= 0x80808080u; /* adds the bias to each byte */
        memcpy(to->k + d * PAGED_TILE, &four, sizeof four);
    }
    memcpy(to->k_scale, &scale, sizeof scale);
    return n_nan;
}

static int64_t write_v(const row *to, const float *src, int32_t n) {
    int8_t bytes[PAGED_HEAD_DIM_MAX];
    float scale;
    int64_t n_nan = paged__i8_from_f32(bytes, &scale, src, 1, n, false);
    for (int64_t d = 0; d < n; d++) to->v[d * 4] = (uint8_t)bytes[d];
    memcpy(to->v_scale, &scale, sizeof scale);
    return n_nan;
}

int64_t paged__i8_write(const paged_kv *kv, const float *k, int64_t k_stride, const float *v,
                        int64_t v_stride, const int64_t *slots, int64_t begin, int64_t end) {
    int64_t dk = kv->head_dim_k, dv = kv->head_dim_v, n_nan = 0;
    for (int64_t t = begin; t < end; t++) {
        if (slots[t] < 0) continue;
        for (int64_t h = 0; h < kv->n_kv_heads; h++) {
            row to = row_at(kv, slots[t], h);
            n_nan += write_k(&to, k + t * k_stride + h * dk, (int32_t)dk);
            n_nan += write_v(&to, v + t * v_stride + h * dv, (int32_t)dv);
        }
    }
    return n_nan;
}

static void read_k(float *dst, const row *from, int32_t n) {
    int8_t bytes[PAGED_HEAD_DIM_MAX];
    float scale;
    for (int32_t d = 0; d < n; d++)
        bytes[d] = (int8_t)(from->k[d / 4 * 4 * PAGED_TILE + d % 4] - PAGED__I8_BIAS);
    memcpy(&scale, from->k_scale, sizeof scale);
    paged__i8_to_f32(dst, bytes, scale, n, true);
}

static void read_v(float *dst, const row *from, int32_t n) {
    int8_t bytes[PAGED_HEAD_DIM_MAX];
    float scale;
    for (int64_t d = 0; d < n; d++) bytes[d] = (int8_t)from->v[d * 4];
    memcpy(&scale, from->v_scale, sizeof scale);
    paged__i8_to_f32(dst, bytes, scale, n, false);
}

void paged__i8_read(const paged_kv *kv, const int64_t *slots, int32_t n_tokens, float *k_out, float *v_out) {
    int64_t dk = kv->head_dim_k, dv = kv->head_dim_v;
    for (int64_t t = 0; t < n_tokens; t++) {
        if (slots[t] < 0) continue;
        for (int64_t h = 0; h < kv->n_kv_heads; h++) {
            row from = row_at(kv, slots[t], h);
            if (k_out) read_k(k_out + (t * kv->n_kv_heads + h) * dk, &from, (int32_t)dk);
            if (v_out) read_v(v_out + (t * kv->n_kv_heads + h) * dv, &from, (int32_t)dv);
        }
    }
}
