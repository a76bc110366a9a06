/* engine/engine.h: the engine's parts as they see each other. May include everything below: base, mem, ops,
 * model.
 *
 *   request.c     slots of requests: submit, read, cancel, release
 *   scheduler.c   who runs: admission, and which tokens of whom make the next step
 *   step.c        one step: reserve -> runner -> commit -> sample
 *   service.c     an engine with a thread of its own
 *   sampler.c     logits -> one token
 *   stop.c        stop strings in the text of an answer
 *   stores.c      the thread that writes blocks to stores and reads them
 *   load.c        what a request gets from stores
 *   save.c        a text's keys and values in a file, by hand
 *   engine.c      create, free, facts
 *
 *              ┌──preempt──┐
 *              ▼           │
 *   waiting ──admit──> running ──ends──> finished ──release──> free
 *
 * Both lists are kept by rank (rank_ns), best first. A request is admitted when the pool has the blocks for
 * all tokens that it has and does not find cached; it takes them at once. So it lacks nothing until it has
 * made its next token, and only a request that decodes may lack a block. scheduler.c says who gives one then.
 *
 * An admitted request takes over what is cached of its tokens (of the prompt: n_reused) and goes on behind
 * it. If another one that runs is about to compute more of it, it waits for that first, among the running
 * ones: it has a row of the cache, no blocks and no part in steps.
 *
 * With stores, one that begins asks them first, without blocks like one that waits for another. If they have
 * more than memory has, it takes its blocks, and is filled by the store thread (load.c) before it has a part
 * in steps. Nobody takes its blocks meanwhile.
 *
 * A request with max_unread tokens that nobody has read is *parked*: it has no part in the steps until it is
 * read, and keeps its blocks and its place until somebody else wants them; then it is preempted before anyone
 * else, and waits in the queue.
 *
 * A preempted request keeps its tokens and frees its sequence. Its blocks stay cached until their room is
 * needed, and what is gone by the time it comes back is computed again, with the same bits.
 *
 * What lies in the cache: the tokens of a request but the newest one, whose key and value are written by the
 * step that computes the next. n_cached counts them; tokens[n_cached …] are what a step has to compute.
 */
#ifndef PAGED_ENGINE_ENGINE_H
#define PAGED_ENGINE_ENGINE_H

#include <stdatomic.h>

#include "base/base.h"
#include "engine/stop.h"
#include "engine/stores.h"
#include "mem/mem.h"
#include "model/runner.h"
#include "paged/engine.h"
#include "paged/service.h"

typedef enum paged__state {
    PAGED__FREE = 0,
    PAGED__NEW,
    PAGED__WAITING,
    PAGED__RUNNING,
    PAGED__FINISHED
} paged__state;

typedef struct paged__request {
    _Atomic uint64_t id;        /* 0: the slot is free. Read by cancel from any thread */
    _Atomic uint64_t cancel_id; /* the id that is to be cancelled */
    paged__state state;
    paged_finish finish;
    paged_status error;   /* why, when finish is PAGED_FINISH_ERROR */
    paged_request params; /* its arrays are owned; of tokens and salt, see below; of stop, see `stop` */
    paged__stop *stop;    /* NULL: no stop strings; owned */
    paged_detok stop_detok;
    int32_t stop_token; /* that ended it; -1: none */
    paged_seq seq;      /* valid while running */
    int32_t choice;     /* of the n answers to one prompt; the first one's id is id - choice */
    int64_t rank_ns;    /* when it was submitted, less what its priority is worth */
    paged_wait wait;
    int32_t n_came_with;  /* tokens that it had when it was admitted, the last time */
    int64_t needed_bytes; /* that there have to be before it is worth another try; 0: not known */
    int32_t n_preemptions;
    bool awaits;       /* runs, and waits for what another one computes, or for what stores answer */
    bool asked;        /* stores, since it runs */
    paged__load *load; /* what they have of it; NULL: nothing, or not asked */
    paged_miss miss;   /* why no more was reused */

    int32_t *tokens; /* [n_prompt + max_new, at most n_ctx + 1] prompt and answer, less what keep_sink has
                      * dropped; owned */
    int32_t *made;   /* [max_new] the answer: behind the prompt, or, with keep_sink, owned */
    int32_t n_prompt, max_new, n_tokens, n_cached;
    int32_t n_dropped, n_dropped_prompt; /* out of tokens; of the prompt's */
    int32_t n_reused;                    /* of n_cached: found, not computed */
    int32_t n_loaded;                    /* of n_reused: from a store */
    char *salt;                          /* NULL: none; owned */
    int32_t blocks_used;                 /* while running and when it ended */
    float *logprobs;                     /* [max_new] of generated tokens, or NULL; owned */
    paged_top_logprob *top_logprobs;     /* [max_new, n_top_logprobs] or NULL; owned */
    float *prompt_logprobs;              /* [n_prompt - 1] or NULL; owned */
    int32_t *prompt_top1;                /* [n_prompt - 1] or NULL; owned */

    paged_detok detok; /* of read */
    int32_t n_read;    /* generated tokens already read */
    int32_t n_told;    /* prompt_done of the last read */
    bool read_to_end;
    char *text; /* [text_len] what the last read gave out, then what it held back; owned */
    size_t text_capacity, text_len, n_given; /* n_given: of text, by the last read */
    int64_t n_shown;                         /* bytes that all reads gave out */

    uint64_t submit_ns, start_ns, first_ns, last_ns; /* submitted, first step, first token, latest token */
    uint64_t deadline_ns;                            /* 0: none */
} paged__request;

/* A piece of a request in a step. */
typedef struct paged__piece {
    paged__request *request;
    int32_t n_tokens;     /* of request->tokens from n_cached on */
    int32_t first_output; /* index of its first output row; -1: none */
    int32_t n_outputs;
    int32_t token; /* the next one, where the last row predicts one */
} paged__piece;

/* What computes a step and tells the time: the runner and the machine's clock, or something else in tests. */
typedef struct paged__backend {
    void *self; /* borrowed */
    /* Once, before anything else. kv: [layers of all groups] where keys and values lie; what they point to
     * lives as long as the engine. */
    paged_status (*bind)(void *self, const paged_kv *kv, paged_error *err);
    /* As paged__runner_step. */
    paged_status (*step)(void *self, const paged__step *step, const float **logits, paged_error *err);
    uint64_t (*now_ns)(void *self); /* never goes back, never 0 */
    /* fn(user, ith, nth) on all threads, at most config.n_threads; NULL: there is one. */
    void (*run)(void *self, void (*fn)(void *user, int32_t ith, int32_t nth), void *user);
    /* The groups of layers of its model; NULL: one, of the sizes of the model that the engine was given. */
    const paged_group_config *groups;
    int32_t n_groups;
    /* Stores have no thread: the caller does its work, one thing at a time (paged__stores_work). */
    bool stores_by_hand;
} paged__backend;

struct paged_engine {
    const paged_model *model;
    const paged_tokenizer *tok;
    paged_engine_config config; /* all defaults filled in; kv_type is a paged_type */
    int32_t n_ctx, n_vocab;
    int32_t max_outputs; /* rows of logits that a step can make */
    paged_cl *cl;        /* NULL: the pool lies here */
    paged_arena arena;   /* of cl */
    paged_cache *cache;
    paged__backend backend;
    paged__runner *runner; /* NULL: the backend is not ours */

    paged__request *slots; /* [n_slots] */
    int32_t n_slots;
    paged__request **waiting; /* [n_slots] best rank first */
    paged__request **running; /* [max_running] best rank first */
    int32_t n_waiting, n_running;
    bool packed_tails;
    int32_t n_groups;
    bool windowed; /* a group has a window, so that prompts take their blocks chunk by chunk */
    int32_t n_blocks;
    int32_t watermark;        /* blocks that an admission leaves to those that run, one each at most */
    paged_engine_stats stats; /* what is counted since create */
    uint64_t next_id;
    int32_t max_unread;         /* tokens of a request that wait to be read at most; 0: any number */
    uint64_t reader_timeout_ns; /* of a parked one, after its newest token; 0: none */
    uint64_t fingerprint[2];    /* of the model: its numbers and weights */
    paged__stores *stores;      /* NULL: none */

    /* the step under construction, sized by the configuration */
    paged__piece *pieces; /* [max_running] */
    int32_t n_pieces;
    int32_t *step_tokens, *positions, *outputs; /* [chunk_tokens] */
    int64_t *step_slots[PAGED__MODEL_GROUPS];   /* [chunk_tokens] */
    paged_shared *shared;                       /* [max_running / 2] */
    int32_t n_shared;
    int32_t *cu_seqlens_q;                 /* [max_running + 1] */
    int32_t *seqlens_k, *rows;             /* [max_running] */
    int32_t *first_k[PAGED__MODEL_GROUPS]; /* [max_running] */
    struct paged__sampler **samplers;      /* [n_threads] */
    paged__step step;
    const float *logits; /* of the step at hand */
    uint64_t step_ns;    /* that it took */

    bool deterministic;
    char determinism[200];
};

/* engine.c: with a backend of the caller's, or NULL. Only the model's vocabulary and shape are used then. */
paged_status paged__engine_create(const paged_model *model, const paged_engine_config *config,
                                  const paged__backend *backend, paged_engine **out, paged_error *err);

/* service.c: the same for a service. */
paged_status paged__service_create(const paged_model *model, const paged_service_config *config,
                                   const paged__backend *backend, paged_service **out, paged_error *err);

/* All that keys and values depend on but tokens and salt, as text, for an engine like this one with keys and
 * values of kv_type; its length. */
enum { PAGED__FINGERPRINT_MAX = 4096, PAGED__NAME_MAX = 4095 };
size_t paged__fingerprint(const paged_engine *e, paged_type kv_type, char text[PAGED__FINGERPRINT_MAX]);

/* scheduler.c: what must be equal for keys and values to be the same, besides the tokens: the model, how they
 * are stored, the caller's salt. */
typedef struct paged__names {
    paged_ns_field fields[4];
    int32_t kv[2];
    paged_namespace all;
} paged__names;
const paged_namespace *paged__names_of(const paged_engine *e, const char *salt, paged__names *names);

/* request.c */
paged__request *paged__request_find(const paged_engine *e, uint64_t id); /* NULL: unknown */
void paged__request_finish(paged_engine *e, paged__request *r,
                           paged_finish finish);               /* gives its blocks back */
void paged__request_clear(paged_engine *e, paged__request *r); /* back to a free slot */
void paged__request_wait(paged_engine *e, paged__request *r,
                         paged_wait why);                            /* into the queue, from where it was */
void paged__request_drop_middle(paged_engine *e, paged__request *r); /* its context is full: keep_sink */
void paged__request_run(paged_engine *e, paged__request *r);         /* out of the queue; it has a sequence */
bool paged__request_is_parked(const paged_engine *e, const paged__request *r);
bool paged__request_has_news(const paged__request *r); /* that read would tell */

/* scheduler.c */
void paged__drop_ended(paged_engine *e); /* those that were cancelled or whose time is over */
/* When an engine that has nothing to compute is to step again: somebody's time is over, or idle memory goes
 * back. UINT64_MAX: never. */
uint64_t paged__next_event(const paged_engine *e);
/* Who takes part in the next step: e->pieces, all of them with their slots reserved. Admits and preempts. */
void paged__schedule(paged_engine *e);

/* step.c: paged_engine_step() in three parts. compute changes nothing that anything but a step looks at, so
 * that meanwhile another thread may do with the engine whatever leaves the running requests where they
 * are. */
bool paged__step_begin(paged_engine *e); /* false: there is nothing to compute */
paged_status paged__step_compute(paged_engine *e, paged_error *err);
void paged__step_end(paged_engine *e, paged_status computed);

/* stores.c. Errors of open: those of the stores, INVALID_ARG, NO_MEMORY; then they are still the caller's.
 * close writes what is queued, and comes before the cache goes. */
paged_status paged__stores_open(paged_engine *e, paged_error *err);
void paged__stores_close(paged_engine *e);
void paged__stores_event(void *user, const paged_event *event); /* of the cache; user: the engine */
void paged__stores_take(paged_engine *e);                       /* queues what was indexed */
void paged__stores_poll(paged_engine *e);                       /* takes what the thread has done */
bool paged__stores_give(paged_engine *e);       /* drops a write, for its blocks; false: that helps nobody */
bool paged__stores_hold(const paged_engine *e); /* blocks that come back by themselves */
bool paged__stores_pending(const paged_engine *e); /* there will be news */
void paged__stores_wait(paged_engine *e);          /* for news, a little while */
bool paged__stores_work(paged_engine *e);          /* by hand; false: nothing was to be done */
void paged__stores_stats(const paged_engine *e, paged_engine_stats *out);
/* For load.c. */
paged_key paged__store_key(const paged_key *parent, const int32_t *tokens, int32_t n_tokens);
paged_key paged__store_space_key(const paged_engine *e, int32_t space);
paged_key paged__store_names_key(const paged__stores *st, const uint8_t *names, size_t n_bytes);
uint64_t paged__pin_work(paged__stores *st, paged__pin *pin); /* by the thread; how many stores failed */
void paged__stores_give_load(paged__stores *st, paged__load *load); /* to the thread */
void paged__rate_add(paged__rate *rate, double amount, uint64_t ns, uint64_t at);
double paged__rate_ns(const paged__rate *rate, double amount, uint64_t at); /* that it takes; 0: not known */

/* load.c. ask: a request that is about to begin waits for an answer; false: it has nothing to ask, or has
 * asked. want: how many whole blocks of its tokens are to be in memory for what it is going to load; -1: it
 * loads nothing. begin: of a request that has reserved its slots: what is reserved is read; false: nothing
 * is, and it computes the rest. */
bool paged__load_ask(paged_engine *e, paged__request *r);
bool paged__load_asks(const paged_engine *e, paged__request *r); /* still */
int32_t paged__load_want(const paged_engine *e, paged__request *r);
int32_t paged__load_slots(const paged_engine *e, const paged__request *r); /* that the next run wants */
bool paged__load_begin(paged_engine *e, paged__request *r);
void paged__load_leave(paged_engine *e, paged__request *r); /* the request has no sequence any more */
void paged__loads_poll(paged_engine *e);
bool paged__loads_hold(const paged__stores *st);
uint64_t paged__loads_event(const paged_engine *e);          /* when somebody has waited for long enough */
void paged__load_work(paged__stores *st, paged__load *load); /* on the store thread */

/* Tokens of the answer so far. */
static inline int32_t paged__n_made(const paged__request *r) {
    return r->n_tokens + r->n_dropped - r->n_prompt;
}

/* Whether all of its prompt's rows have to be seen. */
static inline bool paged__request_scores(const paged__request *r) {
    return r->params.prompt_logprobs && paged__n_made(r) == 0;
}

/* step.c: one token through the whole model, of which nothing stays. Errors: those of a step. */
paged_status paged__engine_warm_up(paged_engine *e, paged_error *err);

static inline uint64_t paged__engine_now(const paged_engine *e) {
    return e->backend.now_ns(e->backend.self);
}

/* sampler.c: randomness is a function of (seed, choice, position), so that a request repeats whatever runs
 * beside it, and so do its forks. */

/* How a token is chosen. */
typedef struct paged__choice {
    const paged_request *params;
    const int32_t *tokens;      /* [n_tokens] prompt, then the answer so far */
    int32_t n_prompt, n_tokens; /* of penalties: the whole; the answer */
    int32_t n_dropped;          /* tokens that are not there any more, for the position */
    int32_t choice;             /* of n */
    bool ban_eog, ban_stops;    /* no token that ends a generation; none of params->stop_tokens */
} paged__choice;

typedef struct paged__sampler paged__sampler; /* scratch of one thread */
paged__sampler *paged__sampler_create(int32_t n_vocab, const paged_tokenizer *tok); /* NULL: no memory */
void paged__sampler_free(paged__sampler *s);
/* logits [n_vocab]. Not-a-number logits never win. */
int32_t paged__sample(paged__sampler *s, const float *logits, const paged__choice *how);
/* log softmax(logits)[token]; and the most likely token (lowest id on ties) if top1 is not NULL. */
float paged__logprob(paged__sampler *s, const float *logits, int32_t token, int32_t *top1);
/* paged__sample(), and the token's log-probability in *score; with params->n_top_logprobs also so many most
 * likely tokens, best first. */
int32_t paged__sample_scored(paged__sampler *s, const float *logits, const paged__choice *how, float *score,
                             paged_top_logprob *top);

#endif
