/* model/runner.h: one step of a model: tokens, positions, slots and block tables in, logits out.
 *
 * The runner owns a team of threads and the memory of a step's activations. It sees keys and values only as
 * paged_kv (strides) and never knows who owns a block; attention reads them back through the block tables. So
 * nothing of the runner grows with the length of a sequence, and nothing in it lives longer than a step.
 *
 * May include base/, ops, model/. Thread rule: one thread per runner; its team computes.
 */
#ifndef PAGED_MODEL_RUNNER_H
#define PAGED_MODEL_RUNNER_H

#include "model/model.h"
#include "paged/opencl.h"
#include "paged/ops.h"

typedef struct paged__runner paged__runner;

typedef struct paged__runner_config {
    int32_t max_tokens, max_seqs, max_outputs; /* largest step */
    int32_t max_k;                             /* longest sequence */
    int32_t max_shared_q;                      /* cascade: most rows of all sequences that share */
    int32_t n_threads;
    const paged_kv *kv; /* [n_layers] copied; what they point to is borrowed */
    /* Where keys and values lie on a device, which then writes them and attends: its arena, which `kv` has
     * addresses in. Borrowed. NULL: they lie here. */
    paged_cl *cl;
    const paged_arena *arena;
} paged__runner_config;

typedef struct paged__step {
    int32_t n_tokens;
    const int32_t *tokens, *positions; /* [n_tokens] */
    /* By group of layers: where the keys and values of each token go [n_tokens]; the rows of tokens by
     * sequence, and their block tables. */
    const int64_t *slots[PAGED__MODEL_GROUPS];
    paged_batch batch[PAGED__MODEL_GROUPS];
    int32_t n_outputs;
    const int32_t *outputs; /* [n_outputs] ascending rows whose logits are wanted */
} paged__step;

/* Takes all memory and starts the threads. Errors: INVALID_ARG, NO_MEMORY. */
paged_status paged__runner_create(const paged_model *model, const paged__runner_config *config,
                                  paged__runner **out, paged_error *err);
void paged__runner_free(paged__runner *r); /* NULL is fine */

/* logits: [n_outputs, n_vocab], borrowed until the next step; NULL without outputs. Errors: INVALID_ARG
 * (before anything was written); IO, NO_MEMORY of a device. */
paged_status paged__runner_step(paged__runner *r, const paged__step *step, const float **logits,
                                paged_error *err);

/* fn(user, ith, nth) on all threads of the runner, between steps. */
void paged__runner_run(paged__runner *r, void (*fn)(void *user, int32_t ith, int32_t nth), void *user);

size_t paged__runner_compute_bytes(const paged__runner *r); /* activations and logits */
const char *paged__runner_attn_kernels(const paged__runner *r);

/* Time spent in attention (RoPE, writing K and V, attending) and in whole steps since create, for `bench
 * engine`. */
void paged__runner_times(const paged__runner *r, uint64_t *attn_ns, uint64_t *step_ns);

/* All memory that a step computes in, for tests: it holds max_tokens rows and no K/V cache, so it may be
 * overwritten between steps without a change of the results. */
void *paged__runner_activations(paged__runner *r, size_t *size_bytes);
/* The rows of the largest buffer in it. */
int64_t paged__runner_max_rows(const paged__runner *r);

/* ---- for forward.c ---- */

/* Plans the attention of the layer anew for the rows of r->kept, whose queries and outputs then lie one
 * behind the other. By one thread, while no other attends. */
void paged__runner_plan_kept(paged__runner *r, const paged__layer *l);

enum {
    PAGED__FEW_ROWS = 4, /* inputs of so few rows each thread makes for itself: cheaper than a phase */
    PAGED__AHEAD_BYTES = 64 << 10 /* of a thread's weights come nearer while it waits: a part of any L2 */
};

struct paged__team;

/* The rows that the last layer attends: those whose logits are wanted, and of each sequence what follows its
 * first of them, since the queries of a sequence are its newest. Of the others it needs K and V only. */
typedef struct paged__kept {
    bool is_fewer;         /* than all; else the rest is not set */
    int32_t n_rows;        /* 0: no logits are wanted */
    int32_t *rows;         /* [n_rows] rows of the step */
    int32_t *outputs;      /* [n_outputs] which of them each output is */
    int32_t *cu_seqlens_q; /* [n_seqs + 1] */
    bool needs_merge;      /* of paged__runner_plan_kept() */
} paged__kept;

struct paged__runner {
    const paged_model *model;
    paged__runner_config config;              /* config.kv is not kept */
    paged_attn *attn[PAGED__MODEL_GROUPS];    /* where keys and values lie here */
    paged_cl_attn *away[PAGED__MODEL_GROUPS]; /* where they lie on a device */
    paged_kv *kv;                             /* [n_layers] */
    struct paged__team *team;
    double *inv_freq[PAGED__MODEL_GROUPS]; /* [n_rot / 2] radians a position, by hp.rope; NULL: not used */
    double magnitude[PAGED__MODEL_GROUPS]; /* of cos and sin */

    uint8_t *arena; /* what follows lies in it */
    size_t arena_bytes;
    int64_t qkv_dim, a_dim, turns_dim[PAGED__MODEL_GROUPS];
    float *x;      /* [max_tokens, n_embd] */
    float *x_kept; /* [max_outputs, n_embd] of the rows whose logits are wanted */
    float *y;      /* [max_tokens, n_embd] what is normed before it is added to x */
    float *qkv;    /* [max_tokens, qkv_dim] */
    float *a;      /* [max_tokens, a_dim] */
    float *h, *up; /* [max_tokens, n_ff]; `up` where gate and up want different forms of input */
    float *turns[PAGED__MODEL_GROUPS]; /* [max_tokens][cos, sin] of paged__turns, by hp.rope */
    float *normed;                     /* [n_threads, n_embd] a row of each thread's own */
    float *logits;                     /* [max_outputs, n_vocab] */
    uint8_t *input;                    /* of a product, for all threads */
    uint8_t *own_inputs;               /* [n_threads][own_bytes] the same for up to PAGED__FEW_ROWS rows */
    size_t own_bytes;
    float *rooms; /* [n_threads][PAGED__ROOM_BYTES] if the model has weights of bf16 products; else NULL */

    const paged__step *step;                  /* while a step computes */
    bool needs_merge[PAGED__MODEL_GROUPS];    /* of the plans of the step */
    paged__kept kept;                         /* of the step */
    paged_status device;                      /* the first failure of a device in this step, */
    paged_error device_error;                 /* and what it said */
    uint64_t attn_start_ns, attn_ns, step_ns; /* attn_start_ns: 0, but during attention */
};

#endif
