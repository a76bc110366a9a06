/* ops/ops.h: inside of ops: the table of kernels that attention and kv_write call, one table for each
 * instruction set.
 *
 * The driver (attn_run.c) is plain C and knows blocks, splits, bounds and merging. A kernel knows one
 * step: up to PAGED__ROWS query rows against the 4 tiles of 16 tokens of a softmax step. Prefill and
 * decode call the same kernels with different numbers of rows, so that their bits are equal by
 * construction. For that every kernel keeps two rules:
 *  - an element of S or O is one chain of operations in ascending order, and no other row or element
 *    changes it;
 *  - numbers of masked tokens are never multiplied into a result: their V may be NaN.
 *
 * Tiles are in the packed layout of paged/kv.h, of the type by which the kernel is indexed. The driver
 * brings the plain layout into f32 tiles first; conversion to f32 is exact, so both layouts give the same
 * bits.
 */
#ifndef PAGED_OPS_OPS_H
#define PAGED_OPS_OPS_H

#include "base/base.h"
#include "paged/ops.h"

enum {
    PAGED__N_TYPES = 3,
    PAGED__ROWS = 6,                                  /* most rows of one call of qk and pv */
    PAGED__STEP_TILES = PAGED_ATTN_STEP / PAGED_TILE, /* 4 */
    PAGED__L_LANES = 16 /* partial sums of the denominator, token t in lane t % 16 */
};

/* K or V of one step. Kernels bring `next` into the cache while they work on `at`, line by line, since a
 * burst of prefetches would stall; `next` is the same as `at` where nothing follows. */
typedef struct paged__tiles {
    const void *at[PAGED__STEP_TILES], *next[PAGED__STEP_TILES];
} paged__tiles;

typedef struct paged__kernels {
    const char *name;

    /* s[n_rows, 64] = q[n_rows, head_dim] · K: lanes are tokens, one multiply-add chain per score over
     * ascending d. */
    void (*qk[PAGED__N_TYPES])(float *s, const float *q, int64_t q_stride, int32_t n_rows,
                               const paged__tiles *tiles, int32_t head_dim);

    /* One row, one step. s[64] holds scores in units of log2, of which the first n_valid ≥ 1 count;
     * becomes the weights exp2(s - m), zero behind n_valid. When the maximum grew by more than
     * PAGED__RESCALE, *m moves to it and l[16] and o[n] shrink accordingly. */
    void (*softmax)(float *s, int32_t n_valid, float *m, float *l, float *o, int32_t n);

    /* o[n_rows, head_dim] += p[n_rows, 64] · V for the tokens t0 … t1 - 1 of the step, ascending. Rows of
     * o have room up to a multiple of 16; what is written there is in no result. */
    void (*pv[PAGED__N_TYPES])(float *o, int64_t o_stride, const float *p, int32_t n_rows,
                               const paged__tiles *tiles, int32_t t0, int32_t t1, int32_t head_dim);

    /* acc[n] = acc * a + part * b, n a multiple of 16. */
    void (*merge)(float *acc, float a, const float *part, float b, int32_t n);
    void (*divide)(float *out, const float *o, float l, int32_t n); /* out[n] = o / l, never -0 */

    void (*to_f32[PAGED__N_TYPES])(float *dst, const void *src, int64_t n);
    /* bf16 in pairs [n_pairs][width][2] -> f32 [2 * n_pairs][width]: the packed K tile (width 16) and V
     * tile (head_dim). */
    void (*unpack_bf16)(float *dst, const void *src, int32_t n_pairs, int32_t width);
    /* Round to nearest even, saturate; returns the number of NaN. */
    int64_t (*from_f32[PAGED__N_TYPES])(void *dst, const float *src, int64_t n);
} paged__kernels;

/* Weights may grow to 2^8 before the state is rescaled: rare rescaling, and still far from overflow. */
#define PAGED__RESCALE 8.0f

/* 2^f = 1 + f * (C1 + f * (C2 + …)) for |f| ≤ 0.5, relative error 2e-9 (fitted for the least maximum), and
 * exact at 0. */
#define PAGED__EXP2_C1 0.693147182f
#define PAGED__EXP2_C2 0.240226477f
#define PAGED__EXP2_C3 0.0555033237f
#define PAGED__EXP2_C4 0.00961843692f
#define PAGED__EXP2_C5 0.00133988739f
#define PAGED__EXP2_C6 0.00015353362f
/* Below, a weight is zero: nothing that f32 could add to a denominator of at least 2^-8. */
#define PAGED__EXP2_MIN (-126.0f)

/* Plain C, for the reference kernels and for the factors of merging. x ≤ 8. */
static inline float paged__exp2(float x) {
    const float magic =
        12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits */
    if (!(x >= PAGED__EXP2_MIN)) return x < PAGED__EXP2_MIN ? 0.0f : x;
    float shifted = x + magic, f = x - (shifted - magic), p;
    uint32_t n, u;
    memcpy(&n, &shifted, sizeof n);
    p = PAGED__EXP2_C5 + f * PAGED__EXP2_C6;
    p = PAGED__EXP2_C4 + f * p;
    p = PAGED__EXP2_C3 + f * p;
    p = PAGED__EXP2_C2 + f * p;
    p = PAGED__EXP2_C1 + f * p;
    p = 1.0f + f * p;
    memcpy(&u, &p, sizeof u);
    u += n << 23; /* the bits of magic above the integer are shifted out */
    memcpy(&p, &u, sizeof p);
    return p;
}

static inline size_t paged__type_bytes(paged_type type) {
    return type == PAGED_TYPE_F32 ? 4 : type == PAGED_TYPE_I8 ? 1 : 2;
}

/* The best table for the flags; a static object. */
const paged__kernels *paged__kernels_choose(uint32_t cpu_flags);

extern const paged__kernels paged__kernels_ref;
#if defined(__x86_64__)
extern const paged__kernels paged__kernels_avx2;
extern const paged__kernels paged__kernels_avx512;
#endif

/* PAGED_ERR_INVALID_ARG, naming the field, if the shape of `kv` is none that ops can work on. */
paged_status paged__kv_check(const paged_kv *kv, paged_error *err);

#endif
