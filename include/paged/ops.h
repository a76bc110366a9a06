/* ops.h: pure functions on arrays: writing keys and values into blocks, and attention over them.
 *
 * Attention is planned once per step (all validation happens there) and run once per layer (cannot fail). One
 * entry point serves decode, prefill, chunked prefill and ragged batches of all of them.
 *
 *     paged_attn_create -> per step: paged_attn_plan -> per layer, on every thread: paged_kv_write, barrier,
 *                                                       paged_attn_run, barrier, paged_attn_merge
 *
 * Query i of a sequence with n_q queries and n_k keys sits at position p = n_k - n_q + i and sees the keys
 * 0 … p (causal, bottom-right aligned), of these the last `window`, its own included, if there is a window;
 * with `non_causal` it sees all n_k. The score of key j is
 *
 *     s = scale * q · k;   softcap: s = softcap * tanh(s / softcap);   ALiBi: s = s + slope[head] * (j - p)
 *
 * and a sink is one more score without a value. A row that sees no key gives zeros; its LSE is its sink, or
 * -inf without one. A key that a row does not see may hold NaN or Inf and changes nothing.
 *
 * The same bits. The result of a row depends on its query and on the keys it sees and on nothing else: not on
 * the batch, the number of threads, the chunking of a prefill, or the physical blocks. What makes it true:
 * keys and values are always read back from the cache; softmax steps (64 tokens) and splits (PAGED_ATTN_SPLIT
 * tokens) sit at absolute positions, with a window too; each output element is one accumulation chain in
 * ascending token order; partial states of splits are merged in ascending order by one function, those of a
 * cascade like all others; a sink enters after the last. Bits differ between instruction sets:
 * paged_attn_kernels() names the set. With "avx512_bf16", keys and values of bf16 meet queries and weights
 * that are rounded to bf16 (by up to 2^-8 of their value), and denormals of all four count as zero; with
 * "amx" too, in another order of sums.
 *
 * Method: online softmax (Milakov & Gimelshein 2018), tiling as in FlashAttention-2 (Dao 2023), split-KV
 * merge by LSE as in Flash-Decoding (Dao et al. 2023), block tables as in PagedAttention (Kwon et al. 2023),
 * cascade as in Hydragen (Juravsky et al. 2024) and FlashInfer's cascade inference (Ye et al. 2024), sinks as
 * in StreamingLLM (Xiao et al. 2023) with a learnt score in place of a key.
 */
#ifndef PAGED_OPS_H
#define PAGED_OPS_H

#include "paged/base.h"
#include "paged/kv.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    PAGED_ATTN_STEP = 64,   /* tokens of one softmax step */
    PAGED_ATTN_SPLIT = 512, /* tokens of one split; part of the numerics */
    PAGED_HEAD_DIM_MAX = 512
};

/* Writes n_tokens keys and values into their slots.
 *   k     [n_tokens, n_kv_heads, head_dim_k] f32, rows of k_stride elements (0: dense)
 *   v     [n_tokens, n_kv_heads, head_dim_v] f32, rows of v_stride elements (0: dense)
 *   slots [n_tokens] block * block_size + offset; a negative slot skips its token
 * f32 -> f16/bf16 rounds to nearest even and saturates to the largest finite value; i8 as kv.h says. NaN is
 * stored as NaN (in i8 its whole row is) and counted. Thread rule: tokens are divided among ith of nth
 * callers; two tokens of one call must not share a slot. Returns the number of NaN seen by this thread.
 * Cannot fail: check slots with paged_kv_check_slots first. */
PAGED_API int64_t paged_kv_write(const paged_kv *kv, const float *k, int64_t k_stride, const float *v,
                                 int64_t v_stride, const int64_t *slots, int32_t n_tokens, int32_t ith,
                                 int32_t nth);

/* PAGED_ERR_INVALID_ARG, naming the first slot that lies outside [0, n_blocks * block_size) and is not
 * negative. */
PAGED_API paged_status paged_kv_check_slots(const paged_kv *kv, const int64_t *slots, int32_t n_tokens,
                                            paged_error *err);

/* Reads keys and values back as f32, dense, the inverse of paged_kv_write; k_out or v_out may be NULL. */
PAGED_API void paged_kv_read(const paged_kv *kv, const int64_t *slots, int32_t n_tokens, float *k_out,
                             float *v_out);

/* ---- the cache in other shapes; bytes are moved, never rounded ---- */

/* The order of dense arrays that others use, of the element type of the cache. */
typedef enum paged_dense {
    PAGED_DENSE_HEADS_FIRST = 0, /* [n_blocks, n_kv_heads, block_size, head_dim] */
    PAGED_DENSE_TOKENS_FIRST = 1 /* [n_blocks, block_size, n_kv_heads, head_dim] */
} paged_dense;

/* All blocks of the cache, of either layout, to dense arrays k and v, and back. NULL for k or v leaves that
 * part alone. Thread rule: blocks are divided among ith of nth callers. Errors: INVALID_ARG; UNSUPPORTED for
 * i8, whose numbers mean nothing without their scales: that is what follows. */
PAGED_API paged_status paged_kv_export(const paged_kv *kv, paged_dense shape, void *k, void *v, int32_t ith,
                                       int32_t nth, paged_error *err);
PAGED_API paged_status paged_kv_import(const paged_kv *kv, paged_dense shape, const void *k, const void *v,
                                       int32_t ith, int32_t nth, paged_error *err);

/* Keys and values of an i8 cache as dense arrays; the caller's, borrowed for the call. An element is
 * value * scale (no unit). K stays rotated as kv.h says, so a query has to be rotated too, and the scores are
 * then the same; it comes signed, without the 128 that the cache adds. */
typedef struct paged_dense_i8 {
    int8_t *k, *v;            /* as paged_dense says */
    float *k_scale, *v_scale; /* the same without the last axis: [n_blocks, n_kv_heads, block_size] or
                               * [n_blocks, block_size, n_kv_heads] */
} paged_dense_i8;

/* The same for i8: all blocks, to the bit. NULL for k and k_scale, or for v and v_scale, leaves that part
 * alone; the arrays must not overlap the cache. Export tells what is there. Import only reads `from`, and
 * takes what paged_kv_write can have left of finite input: values from -127 to 127, scales from 0 to
 * 2^100 / 127 (of K sqrt(B) times that, B as in kv.h). A row that was written with a NaN has the scale NaN,
 * so it leaves but does not come back. All slots count, those that nobody wrote too: where they may hold
 * garbage, set their scales to 0 before an import. Thread rule: blocks are divided among ith of nth callers;
 * every caller of an import checks all of them before it writes, so that all refuse alike. Errors:
 * INVALID_ARG (another type than i8, NULL, strides, thread, a value without its scale), of an import naming
 * slot, head and number; nothing is written then. */
PAGED_API paged_status paged_kv_export_i8(const paged_kv *kv, paged_dense shape, const paged_dense_i8 *to,
                                          int32_t ith, int32_t nth, paged_error *err);
PAGED_API paged_status paged_kv_import_i8(const paged_kv *kv, paged_dense shape, const paged_dense_i8 *from,
                                          int32_t ith, int32_t nth, paged_error *err);

/* Copies the keys and values of sequence `seq` to one run of blocks: its block i becomes block i of `to`,
 * which has the type, layout, block size and heads of `kv` and as many blocks as the sequence needs. What
 * lies between the strides is the caller's choice: with the plain layout, block_stride = block_size *
 * head_dim * element and head strides of max_k times that, `to` is a dense [n_kv_heads, max_k, head_dim].
 * This is attention by gathering first, the way of engines without a paged kernel; ours needs no copy.
 * Packed tails become ordinary blocks, blocks before first_k are left out, slots behind the last key are not
 * written. Thread rule: heads and blocks are divided among ith of nth callers. Errors: INVALID_ARG naming
 * sequence, entry and value; nothing is written then. */
PAGED_API paged_status paged_kv_gather(const paged_kv *kv, const paged_tables *tables, int32_t seq,
                                       const paged_kv *to, int32_t ith, int32_t nth, paged_error *err);

/* ---- attention ---- */

typedef struct paged_attn_config {
    size_t struct_size;
    int32_t n_heads, n_kv_heads;    /* query head h uses KV head h / (n_heads / n_kv_heads) */
    int32_t head_dim_k, head_dim_v; /* 1 … PAGED_HEAD_DIM_MAX; head_dim_v 0: as head_dim_k */
    int32_t block_size;             /* 1 … 1024, a multiple of 16 in the packed layout */
    paged_type type;
    paged_layout layout;
    float scale;             /* 0: 1 / sqrt(head_dim_k) */
    bool non_causal;         /* false: causal */
    int32_t window;          /* keys that a query sees at most, its own included; 0: all. Causal only */
    float softcap;           /* 0: off */
    const float *alibi;      /* [n_heads] slopes, copied; NULL: off */
    int32_t n_threads_max;   /* largest nth that run will be called with; 0: 1 */
    int32_t max_q, max_seqs; /* largest batch that plan will be given; 0: 1 */
    int32_t max_k;           /* largest seqlens_k; 0: 4096 */
    int32_t max_shared_q;    /* cascade: most queries of all sequences that share; 0: none */
} paged_attn_config;

/* Cascade: n_seqs consecutive sequences of the batch whose first n_tokens lie in the same blocks. Every whole
 * split (PAGED_ATTN_SPLIT tokens) of them that all queries of these sequences see is read once for all of
 * them (where they are many, once for each tile of them). The result has the bits that it has without. With
 * a window nothing is read together. */
typedef struct paged_shared {
    int32_t first_seq, n_seqs, n_tokens;
} paged_shared;

/* Queries of a step: sequence s owns the rows cu_seqlens_q[s] … cu_seqlens_q[s + 1] - 1. All arrays are
 * borrowed and must not change between plan and the last run. */
typedef struct paged_batch {
    const int32_t *cu_seqlens_q; /* [n_seqs + 1], ascending from 0 */
    paged_tables tables;
    int32_t n_shared;
    const paged_shared *shared; /* [n_shared] ascending, disjoint */
} paged_batch;

typedef struct paged_attn paged_attn;

/* Takes all memory that plan and run will ever use. Errors: INVALID_ARG (names the field), NO_MEMORY.
 * The object belongs to the caller; plan from one thread, run from many. */
PAGED_API paged_status paged_attn_create(const paged_attn_config *config, paged_attn **out, paged_error *err);
PAGED_API void paged_attn_free(paged_attn *attn); /* NULL is fine */

/* Checks the whole batch against `kv` (shapes, lengths, every table entry that a run will read) and lays out
 * the work. `kv` stands for all layers of the group: run may be given another one that differs in `k`, `v`
 * and the addresses of their scales only. On failure the plan of before is gone and run does nothing. Errors:
 * INVALID_ARG naming sequence, entry and value; LIMIT. */
PAGED_API paged_status paged_attn_plan(paged_attn *attn, const paged_batch *batch, const paged_kv *kv,
                                       paged_error *err);

/* What one layer brings. Borrowed; the same in run and merge. */
typedef struct paged_attn_io {
    const float *q;     /* [n_q, n_heads, head_dim_k] f32 */
    int64_t q_stride;   /* elements from one row of q to the next; 0: dense */
    float *out;         /* [n_q, n_heads, head_dim_v] f32 */
    int64_t out_stride; /* elements; 0: dense */
    float *lse; /* [n_q, n_heads] natural logarithm of the sum of exp(score), sink included; or NULL */
    const float
        *sinks; /* [n_heads] a score that takes part in the sum and has no value, -inf: none; or NULL */
} paged_attn_io;

/* The part of thread ith of nth (nth ≤ n_threads_max; the same in every call of the step), and what others
 * have not begun of theirs: the nth calls are the run, at once or one after the other. All threads must
 * return from run before any enters merge or the next run. Cannot fail. */
PAGED_API void paged_attn_run(paged_attn *attn, const paged_kv *kv, const paged_attn_io *io, int32_t ith,
                              int32_t nth);
PAGED_API void paged_attn_merge(paged_attn *attn, const paged_attn_io *io, int32_t ith, int32_t nth);

/* False when the plan left nothing for paged_attn_merge to do, however many threads ran. */
PAGED_API bool paged_attn_needs_merge(const paged_attn *attn);

/* Attention over two disjoint sets of keys -> attention over both, in place of the first: for sets that were
 * not computed in one run (another machine, another cache). lse is the natural logarithm that run writes. A
 * side whose lse is -inf has seen no key: its row of out is not read, and the other side is taken as it is.
 * A sink may be in one of the sides only.
 *   out_a, out_b [n_rows, head_dim], lse_a, lse_b [n_rows]; a row is one query and one head */
PAGED_API void paged_attn_merge_states(float *out_a, float *lse_a, const float *out_b, const float *lse_b,
                                       int64_t n_rows, int32_t head_dim);

/* "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "neon" or "ref": the kernels chosen at create.
 * Static. */
PAGED_API const char *paged_attn_kernels(const paged_attn *attn);

#ifdef __cplusplus
}
#endif
#endif
