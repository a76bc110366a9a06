/* ops/i8.h: rows of head_dim floats as bytes with one scale, x ≈ scale * byte.
 *
 * A key is rotated before: each block of B elements, B the largest power of two that divides head_dim, is
 * multiplied by the Hadamard matrix of order B and by 1 / sqrt(B). A channel that is far larger than all
 * others, as keys of real models have them, spreads over the block, so that it does not take the others'
 * precision away (the idea is that of QuIP#, Tseng et al. 2024, and QuaRot, Ashkboos et al. 2024). The
 * rotation is orthogonal: a query that is rotated too has the same product with the key, and nothing has to
 * be rotated back. A value is not rotated, since the sum of values would have to be rotated back.
 *
 * All this is plain C that is compiled once, for the cache as for the queries, so that the bytes are the same
 * whatever kernels are in use.
 */
#ifndef PAGED_OPS_I8_H
#define PAGED_OPS_I8_H

#include "ops/ops.h"

/* Rows saturate at ±PAGED__I8_MAX and are zero where no element reaches PAGED__I8_MIN: within that range,
 * far beyond that of any model, no product of scales, weights and sums leaves f32. */
#define PAGED__I8_MAX 0x1p100f
#define PAGED__I8_MIN 0x1p-100f

/* K is stored with this added, as unsigned bytes, which VPDPBUSD asks for in one of its operands. */
enum { PAGED__I8_BIAS = 128 };

/* A row of q as kernels of i8 see it. Σ q * (k + 128) - 128 * Σ q = Σ q * k, so sums begin at `bias`. */
typedef struct paged__i8_q {
    float scale;
    int32_t bias; /* -128 * Σ q */
    int8_t q[];   /* [head_dim_k] rotated */
} paged__i8_q;

/* A row of p. The scale of each value is folded into its weight, and the weights of a tile have one scale:
 * Σ weight * v over a tile is a sum of integers, p · V the sum of scale * that over the tiles, ascending. */
typedef struct paged__i8_p {
    uint8_t weight[PAGED_ATTN_STEP]; /* zero where the row sees nothing */
    float scale[PAGED__STEP_TILES];
} paged__i8_p;

/* The weights of a tile are zero where the largest, times the scale of its value, is below. */
#define PAGED__I8_P_MIN 0x1p-118f

enum { PAGED__I8_P_BYTES = 128 }; /* sizeof(paged__i8_p), rounded up to PAGED__ROW_ALIGN */

static inline const paged__i8_q *paged__i8_q_row(const paged__step *step, int32_t r) {
    return (const paged__i8_q *)(const void *)(step->q + r * step->q_stride);
}
static inline paged__i8_p *paged__i8_p_row(const paged__step *step, int32_t r) {
    return (paged__i8_p *)(void *)(step->p + r * step->p_stride);
}

int32_t paged__q_bytes_i8(int32_t head_dim);
void paged__load_q_i8(void *q, const float *src, float scale, int32_t head_dim);

/* The softmax of the f32 kernels, which leaves the weights in s. */
static inline void paged__i8_softmax(const paged__step *step, const paged__type_kernels *f32) {
    paged__step in_place = *step;
    in_place.p = (uint8_t *)step->s;
    in_place.p_stride = PAGED_ATTN_STEP * (int64_t)sizeof(float);
    f32->softmax(&in_place);
}

/* What follows, in plain C: from the weights in s to the rows of p. */
void paged__i8_weights(const paged__step *step);

/* bytes[n] and *scale of src[n] * factor, n a multiple of 4. Returns the number of NaN; a row with one is
 * all NaN: its scale is. */
int64_t paged__i8_from_f32(int8_t *bytes, float *scale, const float *src, float factor, int32_t n,
                           bool rotate);
/* The largest scale that the above gives. */
float paged__i8_scale_max(int32_t n, bool rotate);
/* The row that bytes and scale stand for. */
void paged__i8_to_f32(float *dst, const int8_t *bytes, float scale, int32_t n, bool rotated);

/* paged_kv_write and paged_kv_read of i8, for the tokens begin … end - 1. */
int64_t paged__i8_write(const paged_kv *kv, const float *k, int64_t k_stride, const float *v,
                        int64_t v_stride, const int64_t *slots, int64_t begin, int64_t end);
void paged__i8_read(const paged_kv *kv, const int64_t *slots, int32_t n_tokens, float *k_out, float *v_out);

#endif
