/* model/runner.h: one step of a model: tokens, positions, slots and block tables in, logits out.
 *
 * The runner owns the ggml graph, its memory and the thread pool. It sees keys and values only as paged_kv
 * (strides) and never knows who owns a block. Per layer the graph has two operators of ours: one turns
 * queries and keys (RoPE) and writes keys and values into their slots; attention then reads them back through
 * the block tables. So nothing in the graph holds a K or V row beyond those of the step itself.
 *
 * A graph depends on the shape (n_tokens, n_outputs, merge) only: everything else is read from the runner
 * while it computes. The graph of the last shape is kept.
 *
 * May include base/, ops, model/, ggml. Thread rule: one thread per runner; its pool computes.
 */
#ifndef PAGED_MODEL_RUNNER_H
#define PAGED_MODEL_RUNNER_H

#include "model/model.h"
#include "paged/ops.h"

typedef struct paged__runner paged__runner;

typedef struct paged__runner_config {
    int32_t max_tokens, max_seqs, max_outputs; /* largest step */
    int32_t max_k;                             /* longest sequence */
    int32_t n_threads;
    const paged_kv *kv; /* [n_layers] copied; what they point to is borrowed */
} paged__runner_config;

typedef struct paged__step {
    int32_t n_tokens;
    const int32_t *tokens, *positions; /* [n_tokens] */
    const int64_t *slots;              /* [n_tokens] where the keys and values of each token go */
    paged_batch batch;                 /* the rows of tokens by sequence, and their block tables */
    int32_t n_outputs;
    const int32_t *outputs; /* [n_outputs] ascending rows whose logits are wanted */
} paged__step;

/* Takes all memory, reserves the largest graph, starts the threads. Errors: INVALID_ARG, NO_MEMORY. */
paged_status paged__runner_create(const paged_model *model, const paged__runner_config *config,
                                  paged__runner **out, paged_error *err);
void paged__runner_free(paged__runner *r); /* NULL is fine */

/* logits: [n_outputs, n_vocab], borrowed until the next step. Errors: INVALID_ARG (before anything was
 * written). */
paged_status paged__runner_step(paged__runner *r, const paged__step *step, const float **logits,
                                paged_error *err);

size_t paged__runner_compute_bytes(const paged__runner *r);
const char *paged__runner_attn_kernels(const paged__runner *r);

/* Time spent in attention (our two operators) and in whole steps since create, for `bench engine`. */
void paged__runner_times(const paged__runner *r, uint64_t *attn_ns, uint64_t *step_ns);

/* The largest tensor of the current graph that is not a weight and not logits, in rows: shows that no K/V
 * cache is in it. */
int64_t paged__runner_max_rows(const paged__runner *r);

/* Scratch of one thread, paged__fused_scratch_bytes long. */
uint8_t *paged__runner_scratch(paged__runner *r, int ith);

/* ---- for arch/: the graph under construction ---- */

typedef struct paged__graph {
    struct ggml_context *ctx;
    struct ggml_cgraph *cgraph;
    paged__runner *runner;
    const paged_model *model;
    int32_t n_tokens, n_outputs;
    struct ggml_tensor *tokens;  /* [n_tokens] i32 */
    struct ggml_tensor *outputs; /* [n_outputs] i32 */
    struct ggml_tensor *logits;  /* set by build: [n_vocab, n_outputs]; NULL if n_outputs is 0 */
} paged__graph;

/* q [head_dim_k * n_heads, n_tokens], k and v likewise with n_kv_heads, as the projections give them. Turns q
 * and k in place, writes K and V to the cache, attends. Gives [head_dim_v * n_heads, n_tokens]; NULL if only
 * the cache is wanted (keep = false). */
struct ggml_tensor *paged__graph_attention(paged__graph *g, int32_t layer, struct ggml_tensor *q,
                                           struct ggml_tensor *k, struct ggml_tensor *v, bool keep);

#endif
