/* ops/linear_vnni.h: what the files of AVX-512 kernels of linear layers share. */
#ifndef PAGED_OPS_LINEAR_VNNI_H
#define PAGED_OPS_LINEAR_VNNI_H

#include "ops/linear_kernels.h"

#define INLINE static inline __attribute__((always_inline))
/* Loops whose bounds are constants once a function is inlined; loops that stay loops, as there are many
 * variants. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#define ROLLED _Pragma("clang loop unroll(disable)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#define ROLLED _Pragma("GCC unroll 1")
#endif

/* sums of paged__linear_kernels_table for F32, F16 and BF16; `tile` is the first. */
void paged__vnni_float_sums(float *out, const paged__matrix *w, const uint8_t *tile, int32_t n_tiles,
                            const paged__act *x, int32_t token0, int32_t n_tokens);

#endif
