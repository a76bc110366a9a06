/* model/fused.h: linear layers as graph nodes.
 *
 * A step of one token over 30 small layers spends more time in barriers between nodes than in reading
 * weights. So for few tokens a node of ours does what several of ggml's do (q, k and v; gate, up and SiLU;
 * output projection and residual), and every thread quantises the activation row for itself instead of
 * waiting for the others. For more tokens ggml's own matmul is used. Both call ggml's dot product of the
 * weight type row by row, so the bits are the same (the start-up self-test and tests check it).
 */
#ifndef PAGED_MODEL_FUSED_H
#define PAGED_MODEL_FUSED_H

#include "model/runner.h"

/* Rows that every thread quantises for itself; above it ggml's matmul. */
enum { PAGED_FUSED_MAX_ROWS = 4 };

/* Bytes of scratch each thread needs for a model: PAGED_FUSED_MAX_ROWS quantised rows of its widest
 * activation. */
size_t paged__fused_scratch_bytes(const paged_model *m);

/* w [k, rows], x [k, n] f32 -> [rows, n] f32 */
struct ggml_tensor *paged__linear(paged__graph *g, struct ggml_tensor *w, struct ggml_tensor *x);

/* w x + residual; `residual` [rows, n] */
struct ggml_tensor *paged__linear_add(paged__graph *g, struct ggml_tensor *w, struct ggml_tensor *x,
                                      struct ggml_tensor *residual);

/* The three projections of a layer. q, k, v are contiguous [rows, n]. */
void paged__linear_qkv(paged__graph *g, const paged__layer *l, struct ggml_tensor *x, struct ggml_tensor **q,
                       struct ggml_tensor **k, struct ggml_tensor **v);

/* silu(gate x) * (up x) -> [n_ff, n] */
struct ggml_tensor *paged__linear_swiglu(paged__graph *g, const paged__layer *l, struct ggml_tensor *x);

#endif
