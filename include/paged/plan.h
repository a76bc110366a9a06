/* plan.h: what keys and values will take, before there are any. Plain arithmetic: no model, no memory, no
 * cache.
 *
 *   paged_shape    layers, KV heads and head sizes of well-known models, by name
 *   paged_plan     bytes that a sequence of n tokens takes, in one of three ways of giving out memory
 *   paged_plan_life, paged_plan_replay    the same for a load of requests, without and with a pool
 *
 * Thread rule: nothing here has state; every function may be called from any thread.
 */
#ifndef PAGED_PLAN_H
#define PAGED_PLAN_H

#include "paged/base.h"
#include "paged/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- shapes ---- */

enum { PAGED_SHAPE_GROUPS_MAX = 2 };

/* As the model's makers published it. Where some layers have a window, they are the second group. */
typedef struct paged_shape {
    const char *name; /* "llama-2-13b" */
    int32_t n_heads;  /* of queries, in a layer */
    int32_t n_ctx;    /* tokens that the model was made for */
    int64_t n_params; /* of the text model, an embedding that is the output matrix too counted once */
    int32_t n_groups;
    paged_group_config groups[PAGED_SHAPE_GROUPS_MAX]; /* [n_groups]; type and layout are 0 */
} paged_shape;

PAGED_API int32_t paged_shape_count(void);
PAGED_API const paged_shape *paged_shape_at(int32_t i);          /* static; NULL: no such index */
PAGED_API const paged_shape *paged_shape_find(const char *name); /* in any case; NULL: none of this name */

/* ---- one sequence ---- */

/* How memory is given out. */
typedef enum paged_plan_way {
    PAGED_PLAN_PAGED = 0,  /* blocks as tokens come */
    PAGED_PLAN_CONTIGUOUS, /* one run for max_seq_tokens, from the first token on */
    PAGED_PLAN_PACKED,     /* blocks, and tiles of 16 tokens for the last, partly filled one (packed tails) */
    PAGED_PLAN_WAYS
} paged_plan_way;

PAGED_API const char *paged_plan_way_name(paged_plan_way way); /* "paged", "contiguous", "packed tails" */

/* Filled by paged_plan_init() and not changed afterwards. */
typedef struct paged_plan {
    paged_plan_way way;
    int32_t block_size, max_seq_tokens, n_groups;
    struct {
        size_t token_bytes, block_bytes;
        int32_t window;
    } groups[PAGED_GROUPS_MAX]; /* [n_groups] */
} paged_plan;

/* block_size 0: 16. Errors: INVALID_ARG (a group, block_size, max_seq_tokens below 1; packed tails ask for a
 * block_size of 32 … 256, a multiple of 16), LIMIT (a sequence of max_seq_tokens is larger than the address
 * space). */
PAGED_API paged_status paged_plan_init(paged_plan *plan, paged_plan_way way, const paged_group_config *groups,
                                       int32_t n_groups, int32_t block_size, int32_t max_seq_tokens,
                                       paged_error *err);

/* Below, n_tokens counts from 0 to max_seq_tokens; what lies outside is moved to the nearer end. */

/* Keys and values that the newest of n_tokens tokens sees: of a group with a window, those of the window. */
PAGED_API size_t paged_plan_stored_bytes(const paged_plan *plan, int32_t n_tokens);

/* What the sequence takes while its newest token is computed; the most of it on the way to n_tokens, which
 * differs only where blocks fall out of windows. */
PAGED_API size_t paged_plan_taken_bytes(const paged_plan *plan, int32_t n_tokens);
PAGED_API size_t paged_plan_peak_bytes(const paged_plan *plan, int32_t n_tokens);

/* Sequences of n_tokens that a pool holds at once. Exact for one group; with several, an extent of the pool
 * belongs to one group at a time, which costs a little more. */
PAGED_API int64_t paged_plan_fit(const paged_plan *plan, size_t pool_bytes, int32_t n_tokens);

/* Entries of the block table of a sequence of max_seq_tokens, in one group; bytes of the tables of n_seqs
 * sequences in all groups, as paged_cache_stats.table_bytes counts them (rows are padded; see there). */
PAGED_API int32_t paged_plan_table_entries(const paged_plan *plan);
PAGED_API size_t paged_plan_table_bytes(const paged_plan *plan, int32_t n_seqs);

/* ---- a load ---- */

typedef struct paged_plan_request {
    int32_t n_prompt, n_output; /* at least 1 each; a request of p and o tokens is in o steps, with p …
                                 * p + o - 1 tokens in the cache */
} paged_plan_request;

typedef struct paged_plan_load {
    int64_t n_steps;                /* life: of all requests, one after the other; replay: of the pool */
    int64_t sum_running;            /* over steps: requests */
    uint64_t sum_stored, sum_taken; /* over steps: bytes */
    int32_t max_running;
    int64_t n_preempted;
} paged_plan_load;

/* Every step of every request, as if each were alone. Errors: INVALID_ARG (counts, a request longer than
 * max_seq_tokens, with both numbers), LIMIT (sums beyond 2^64). */
PAGED_API paged_status paged_plan_life(const paged_plan *plan, const paged_plan_request *requests,
                                       int32_t n_requests, paged_plan_load *out, paged_error *err);

typedef struct paged_plan_step {
    int64_t step; /* from 0 on */
    int32_t n_running;
    size_t stored_bytes, taken_bytes;
} paged_plan_step;

/* A pool under full load: all requests wait from the start and are taken in order as long as one fits (with
 * 1 % of the pool left to those that run, as the engine does); each makes a token a step. When bytes are
 * missing, the youngest gives way, waits in front, and goes on with its tokens. each is called once a step;
 * it may be NULL. Errors: those of paged_plan_life(), NO_BLOCKS (a request that does not fit alone, with both
 * numbers), NO_MEMORY. */
PAGED_API paged_status paged_plan_replay(const paged_plan *plan, size_t pool_bytes,
                                         const paged_plan_request *requests, int32_t n_requests,
                                         void (*each)(void *user, const paged_plan_step *step), void *user,
                                         paged_plan_load *out, paged_error *err);

#ifdef __cplusplus
}
#endif
#endif
