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

/* bytes[n] and *scale of src[n] * factor, n a multiple of 4. Returns the number of NaN; a row with one is
 * all NaN: its scale is. */
int64_t paged__i8_from_f32(int8_t *bytes, float *scale, const float *src, float factor, int32_t n,
                           bool rotate);
/* The row that bytes and scale stand for. */
void paged__i8_to_f32(float *dst, const int8_t *bytes, float scale, int32_t n, bool rotated);

/* paged_kv_write and paged_kv_read of i8, for the tokens begin … end - 1. */
int64_t paged__i8_write(const paged_kv *kv, const float *k, int64_t k_stride, const float *v,
                        int64_t v_stride, const int64_t *slots, int64_t begin, int64_t end);
void paged__i8_read(const paged_kv *kv, const int64_t *slots, int32_t n_tokens, float *k_out, float *v_out);

#endif
