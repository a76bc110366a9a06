/* engine.h: requests in, text out. Joins a model with a paged cache and runs many requests through them.
 *
 *     paged_engine_create -> submit … -> { step -> read … } … -> release -> paged_engine_free
 *
 * A step computes one chunk of tokens for every request that is running: prefill chunks and decode tokens
 * together. A request is admitted when the pool has the blocks for the tokens that it has. When those that
 * run need more than there is, the one that ranks last gives its blocks back, waits, and goes on later where
 * it stopped; its answer has the same bits. Rank is the time of submission, each level of priority worth
 * PAGED_AGING_MS of it, so that nobody waits for ever; the oldest one that runs is never thrown out. Between
 * two preemptions a request makes a token at least, and one that is alone and fills the pool ends by length.
 *
 * Keys and values of ended requests stay cached as long as there is room; a request whose prompt begins
 * with the same tokens takes them over and computes the rest. Of prompts that arrive together and begin alike
 * one is computed; the others wait for it, without blocks, and if it goes the oldest of them takes its place.
 * The answer has the same bits as without, where paged_engine_info says deterministic. A request with
 * prompt_logprobs computes its whole prompt.
 *
 * With stores (store.h) keys and values outlive memory. Each block is written to all of them when it is full,
 * and a last, partly filled one when its request has ended, by a thread of the engine's own: no step waits
 * for it, and what its queue does not hold is not written. A request whose beginning is not in memory asks
 * them while it waits (PAGED_WAIT_STORE), and what they have is read instead of computed where that is
 * faster. The answer has the same bits here, too.
 *
 * Thread rule: one thread at a time per engine, paged_engine_cancel aside, which any thread or signal handler
 * may call. An engine for many threads: service.h.
 */
#ifndef PAGED_ENGINE_H
#define PAGED_ENGINE_H

#include "paged/base.h"
#include "paged/mem.h"
#include "paged/model.h"
#include "paged/opencl.h"
#include "paged/store.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct paged_engine paged_engine;

typedef struct paged_engine_config {
    size_t struct_size;
    int32_t n_ctx; /* tokens of the longest request; 0: the model's context, or less if the pool is smaller */
    size_t pool_bytes;   /* 0: what max_running requests of n_ctx need */
    int32_t block_size;  /* 0: 16 */
    int32_t kv_type;     /* a paged_type, of which 0 is f16, or PAGED_KV_AUTO; i8 asks for head sizes that are
                           * multiples of 4 */
    bool kv_plain;       /* keys and values in the plain layout instead of the packed one */
    int32_t max_running; /* requests in one step; 0: 1 */
    int32_t max_waiting; /* beyond max_running; more are refused. 0: 64 */
    int32_t chunk_tokens; /* tokens of one step at most; 0: 512 */
    int32_t n_threads;    /* 0: paged_cpu_count() */
    bool poison;          /* for tests: NaN in every slot that holds no token */
    bool no_prefix_cache; /* requests share nothing, and nothing is kept when they end */
    paged_event_fn event; /* what happens to the index (mem.h), on the thread that steps; NULL: not told */
    void *event_user;
    bool no_packed_tails; /* last blocks are blocks also where packed tails (mem.h) are possible: block_size
                           * 32 … 256, packed layout */
    bool contiguous;      /* no paging, to compare with (enable_paged false): a request takes room for n_ctx
                           * tokens in one run before it begins and keeps it until it ends; nothing is shared,
                           * nobody is preempted. Answers have the same bits */
    /* Create computes a token, so that the first request finds pages and threads in place. */
    bool warm_up;
    /* Places for keys and values outside memory, the fastest first; the array is copied. The engine opens
     * them, and closes them when it is freed; if create fails they are still the caller's. Not with
     * no_prefix_cache, contiguous, nor a device (UNSUPPORTED). */
    const paged_store *stores; /* [n_stores] */
    int32_t n_stores;          /* at most PAGED_STORES_MAX */
    /* Where the pool lies and who attends: NULL or "cpu": here; "opencl": the first OpenCL device, "opencl:N"
     * or "opencl:NAME": that one (opencl.h). All else is computed here. Answers have the same bits in any
     * batch, others than on the CPU. Not with poison. */
    const char *device;
} paged_engine_config;

enum { PAGED_STORES_MAX = 4 };

/* As kv_type: bf16 where the processor multiplies pairs of it (PAGED_CPU_AVX512_BF16), else f16; f16 also on
 * a device, and for keys of an odd head size, which bf16 does not have. Only the engine knows it: a cache is
 * always of one type. */
enum { PAGED_KV_AUTO = -1 };

/* The defaults: kv_type PAGED_KV_AUTO, and zeros. Call it first, then set what differs. A config that was
 * only set to zero has keys and values in f16 on every machine. */
PAGED_API void paged_engine_config_init(paged_engine_config *config);

/* The type that an engine with this kv_type and device (NULL: "cpu") has here, for a model with keys of
 * head_dim_k elements. paged_engine_info says it of an engine. */
PAGED_API paged_type paged_engine_kv_type(int32_t kv_type, const char *device, int32_t head_dim_k);

enum {
    PAGED_AGING_MS = 1000, /* a level of priority is worth so much waiting */
    PAGED_PRIORITY_MAX = 1000
};

/* Takes all memory and the largest graph. config NULL: the defaults. Errors: INVALID_ARG, NO_MEMORY,
 * NO_BLOCKS (with both numbers), UNSUPPORTED. The model is borrowed and must outlive the engine. */
PAGED_API paged_status paged_engine_create(const paged_model *model, const paged_engine_config *config,
                                           paged_engine **out, paged_error *err);
PAGED_API void paged_engine_free(paged_engine *engine); /* NULL is fine */

typedef struct paged_logit_bias {
    int32_t token;
    float bias; /* added to the logit; -100 and below: the token never comes */
} paged_logit_bias;

typedef struct paged_top_logprob {
    int32_t token;
    float logprob;
} paged_top_logprob;

enum {
    PAGED_TOP_LOGPROBS_MAX = 20,
    PAGED_LOGIT_BIAS_MAX = 1024,
    PAGED_STOP_TOKENS_MAX = 64,
    PAGED_STOPS_MAX = 16,
    PAGED_CHOICES_MAX = 128
};

typedef struct paged_request {
    size_t struct_size;
    const int32_t *tokens; /* [n_tokens] prompt; copied */
    int32_t n_tokens;
    int32_t max_tokens; /* tokens to generate; 0: until the context is full */
    float temperature;  /* below 1e-5: greedy */
    int32_t top_k;      /* ≤ 0: off */
    float top_p;        /* 1: off; 0: greedy */
    uint64_t seed;      /* randomness is a function of (seed, choice, position) alone */
    bool ignore_eos;
    bool logprobs;        /* log-probability of each generated token, before temperature and cuts */
    bool prompt_logprobs; /* for every prompt token but the first; see paged_engine_prompt_logprobs */
    bool control_text;    /* control tokens appear in the text */
    const char *salt; /* requests share keys and values only with the same salt; NULL: with those that have
                           * none. At most 1024 bytes; copied */

    float min_p;                               /* keeps what has min_p times the best probability; 0: off */
    float repetition_penalty;                  /* of tokens of prompt and answer; 0 or 1: off */
    float presence_penalty, frequency_penalty; /* of tokens of the answer, once and by count; 0: off */
    const paged_logit_bias *logit_bias;        /* [n_logit_bias] copied */
    int32_t n_logit_bias;
    int32_t n_top_logprobs;  /* most likely tokens at each place, with logprobs; at most 20 */
    int32_t min_tokens;      /* before so many tokens nothing ends the answer */
    const char *const *stop; /* [n_stop] strings of 1 … 256 bytes that end the answer and are not part of its
                              * text, wherever tokens cut them; copied */
    int32_t n_stop;
    const int32_t *stop_tokens; /* [n_stop_tokens] end the answer, also with ignore_eos; copied */
    int32_t n_stop_tokens;

    int32_t priority;    /* larger: sooner; -PAGED_PRIORITY_MAX … PAGED_PRIORITY_MAX */
    int32_t deadline_ms; /* after submission it ends with what it has, by DEADLINE; 0: none */
    int32_t n; /* answers, 1 … PAGED_CHOICES_MAX; 0: 1. They have the ids *id … *id + n - 1, and each is read,
                * cancelled and released as if it were alone. The prompt is computed once; its blocks are
                * shared, and the last one is copied by whoever writes into it. Only the first has
                * prompt_logprobs */

    /* 0: exact; a full context ends the answer by LENGTH. More: when the context is full it keeps so many
     * first tokens (rounded up to whole blocks) and the newest half of the others, drops whole blocks
     * between, computes what it keeps anew, as if that were the prompt, and goes on; n_dropped of the output
     * tells. Asks for max_tokens (2^24 at most are made), and for two blocks more than the sink in the
     * context. Penalties see what is kept. An approximation of an endless context, after StreamingLLM (Xiao
     * et al. 2023). */
    int32_t keep_sink;
} paged_request;

/* Greedy, no limits, top_p 1. Call it first, then set what differs. */
PAGED_API void paged_request_init(paged_request *request);

/* Copies the request and queues it. Errors: TOO_LONG (prompt against context, both numbers), LIMIT (queue
 * full), INVALID_ARG (empty prompt, token outside the vocabulary, values that are not numbers), NO_MEMORY.
 * Ids never come again. */
PAGED_API paged_status paged_engine_submit(paged_engine *engine, const paged_request *request, uint64_t *id,
                                           paged_error *err);

/* One step for everything that runs. *n_active: requests that run or wait afterwards; 0: nothing to do.
 * Errors: INVALID_ARG; anything that concerns one request only is told by its finish reason. */
PAGED_API paged_status paged_engine_step(paged_engine *engine, int32_t *n_active, paged_error *err);

typedef enum paged_finish {
    PAGED_FINISH_NONE = 0, /* waits or runs */
    PAGED_FINISH_STOP,     /* a token that ends the generation */
    PAGED_FINISH_LENGTH,   /* max_tokens, the context, or all of the pool */
    PAGED_FINISH_CANCELLED,
    PAGED_FINISH_ERROR,
    PAGED_FINISH_DEADLINE,
    PAGED_FINISH_READER, /* its reader took nothing for too long; see service.h */
    PAGED_FINISH_KINDS
} paged_finish;

PAGED_API const char *paged_finish_name(paged_finish finish); /* "stop", "length" … */

/* Why a request has no part in the steps. */
typedef enum paged_wait {
    PAGED_WAIT_NONE = 0,  /* it runs, or has ended */
    PAGED_WAIT_QUEUE,     /* others come before it */
    PAGED_WAIT_BLOCKS,    /* the pool has too few blocks for it */
    PAGED_WAIT_PROMISE,   /* another one computes what it needs */
    PAGED_WAIT_PREEMPTED, /* it ran, and gave its blocks to others */
    PAGED_WAIT_READER,    /* its output waits for its reader; see service.h */
    PAGED_WAIT_STORE,     /* what it needs is looked for in stores, or read from them */
    PAGED_WAIT_KINDS
} paged_wait;

PAGED_API const char *paged_wait_name(paged_wait wait); /* "queue", "blocks" …; static */

/* What is new since the last read; borrowed until the next call on this engine. Text is whole UTF-8
 * characters; what may be the beginning of a stop string is held back until that is decided. Tokens are not
 * held back. */
typedef struct paged_output {
    const char *text;
    size_t text_len;
    const int32_t *tokens;                 /* [n_tokens], the ending token not among them */
    const float *logprobs;                 /* [n_tokens] or NULL */
    const paged_top_logprob *top_logprobs; /* [n_tokens, n_top_logprobs] best first, or NULL */
    int32_t n_tokens;
    paged_finish finish;
    paged_status error;  /* why, when finish is PAGED_FINISH_ERROR */
    int32_t stop_string; /* index of the stop string that ended it; -1: none did */
    int32_t stop_token;  /* token that ended it; -1: none did */
    int32_t prompt_tokens, completion_tokens;
    int32_t
        cached_tokens;   /* prompt tokens that were not computed but found in the cache: to the token, at most
                            * prompt_tokens - 1 */
    int32_t prompt_done; /* prompt tokens computed or found so far */
    int32_t blocks_used; /* blocks held now; after the end: held when it ended */
    double queue_ms, prefill_ms,
        decode_ms; /* waiting; first step to first token; first token to now or end */
    paged_miss
        miss; /* why not more of the prompt was found in the cache; NONE also before it was looked up */
    paged_wait wait;
    int32_t n_preemptions;
    int32_t n_dropped; /* tokens of prompt and answer that keep_sink has taken out of the context; 0: exact */
    int32_t store_tokens; /* of cached_tokens: those that came from a store */
} paged_output;

PAGED_API paged_status paged_engine_read(paged_engine *engine, uint64_t id,
                                         paged_output *out); /* NOT_FOUND */

/* logprobs [n_tokens - 1]: of prompt token i + 1 given those before it; top1 [n_tokens - 1]: the most likely
 * token there. Borrowed until release. Errors: NOT_FOUND, INVALID_ARG (not asked for, or not finished). */
PAGED_API paged_status paged_engine_prompt_logprobs(paged_engine *engine, uint64_t id, const float **logprobs,
                                                    const int32_t **top1, int32_t *n);

/* Ends a request at its next step. Safe from any thread and from a signal handler. Unknown ids are ignored.
 */
PAGED_API void paged_engine_cancel(paged_engine *engine, uint64_t id);

/* Forgets a request, running or finished, and gives its blocks back. NOT_FOUND. */
PAGED_API paged_status paged_engine_release(paged_engine *engine, uint64_t id);

/* ---- what stores are to keep ---- */

/* Has the stores keep what was computed of these tokens under this salt (NULL: none), and what will be,
 * beyond limits and time to live, in place of what this name had them keep before; n_tokens 0: nothing any
 * more. Whether the last token was computed (that of an answer often was not) is no matter. Names are those
 * of notes (store.h). It is done soon, by the thread of the stores, in place of what waits under the same
 * name; one that fails is counted. From any thread, beside all other calls. Errors: INVALID_ARG, NO_MEMORY,
 * LIMIT (1024 names wait), UNSUPPORTED (no store that can). */
PAGED_API paged_status paged_engine_pin(paged_engine *engine, const char *name, const char *salt,
                                        const int32_t *tokens, int32_t n_tokens, paged_error *err);

/* Each name that keeps something, of one store after the other, each until fn says false; what was pinned
 * before the call counts. Waits for
 * the thread of the stores, which calls fn: it must be quick, and call nothing of the engine. From any other
 * thread, beside all other calls, while the engine lives. Errors: INVALID_ARG, LIMIT as above, IO, NO_MEMORY,
 * UNSUPPORTED (no store that can). */
PAGED_API paged_status paged_engine_pins(paged_engine *engine, bool (*fn)(void *user, const char *name),
                                         void *user, paged_error *err);

/* ---- files, by hand ---- */

typedef struct paged_saved {
    int32_t n_tokens;
    size_t file_bytes;
} paged_saved;

/* Writes what is cached of these tokens, under this salt (NULL: none), to one file that says what it is: of
 * which model, types, layout and kernels, with checksums of every part. The file takes its name when it is
 * whole and durable; one that had it is replaced. `name` is looked up in the directory dir_fd, or, with
 * AT_FDCWD, is a path. Between steps. Errors: NOT_FOUND (none of the tokens is cached), IO, NO_MEMORY,
 * TOO_LONG, UNSUPPORTED (layers with windows have given up what is before them; an engine that keeps
 * nothing), INVALID_ARG. */
PAGED_API paged_status paged_engine_save(paged_engine *engine, const int32_t *tokens, int32_t n_tokens,
                                         const char *salt, int dir_fd, const char *name, paged_saved *out,
                                         paged_error *err);

/* Puts what a file has into the cache, for requests with this salt, whatever it was saved under: who has a
 * file has the text. All of it is checked first: with any error the cache is as it was, but for cached blocks
 * that had to go for room. No link is followed and nothing but a regular file is read. Errors: NOT_FOUND, IO,
 * FORMAT (damaged, cut, longer than it says), UNSUPPORTED (of another model, types, layout or kernels: the
 * message has both), TOO_LONG, NO_BLOCKS (both numbers), NO_MEMORY, INVALID_ARG. */
PAGED_API paged_status paged_engine_load(paged_engine *engine, const char *salt, int dir_fd, const char *name,
                                         int32_t *tokens /* [n_ctx], or NULL: out */, paged_saved *out,
                                         paged_error *err);

typedef struct paged_engine_info {
    int32_t n_ctx, block_size, chunk_tokens, n_threads, max_running;
    paged_type kv_type;
    paged_layout kv_layout;
    const char *attn_kernels;   /* "avx512" …; "opencl" */
    const char *linear_kernels; /* "avx512_vnni, packed q8_0, q4_1": kernels, layout, types */
    size_t weight_bytes, pool_bytes, compute_bytes, kv_bytes_per_token;
    int32_t n_blocks;
    bool packed_tails, contiguous;
    bool deterministic;    /* every weight type passed the self-test of products */
    char determinism[200]; /* "q4_1: yes, q8_0: yes" */
} paged_engine_info;

PAGED_API void paged_engine_get_info(const paged_engine *engine, paged_engine_info *out);
/* What a device did and holds; false: there is none. */
PAGED_API bool paged_engine_get_device(const paged_engine *engine, paged_cl_device *device,
                                       paged_cl_stats *stats);
PAGED_API void paged_engine_get_cache_stats(const paged_engine *engine, paged_cache_stats *out);

typedef struct paged_engine_stats {
    int32_t n_running, n_waiting;     /* now; those that wait for a promise run */
    int32_t n_wait[PAGED_WAIT_KINDS]; /* of both, now, by reason */
    uint64_t n_steps, n_tokens;       /* since create: steps that computed, rows of them */
    uint64_t n_submitted, n_preemptions;
    uint64_t n_finished[PAGED_FINISH_KINDS];
    uint64_t n_cascade_steps, n_cascade_rows; /* steps in which a common beginning was read once for several
                                               * requests; rows that this served */
    uint64_t n_stalls;                        /* tokens put off by a step because nobody could give a block */
    uint64_t n_dropped;                       /* tokens, by keep_sink */
    /* stores: requests that asked them; that got tokens from them; tokens and bytes that they got */
    uint64_t n_store_asks, n_store_hits, n_store_tokens, n_store_read_bytes;
    uint64_t n_store_writes, n_store_written_bytes; /* blocks that were given to them, to all together */
    uint64_t n_store_dropped;  /* blocks that were to be written and are not: no place in the queue, or the
                                * memory was needed */
    uint64_t n_store_failures; /* reads that gave something else than was asked for; writes that failed */
    double store_read_ms, store_write_ms; /* of the thread that does it */
    int32_t n_store_queued;               /* blocks that wait to be written, now */
} paged_engine_stats;

PAGED_API void paged_engine_get_stats(const paged_engine *engine, paged_engine_stats *out);

/* The name of a store, and what it says of itself. False: it has no store of that number. */
PAGED_API bool paged_engine_get_store(const paged_engine *engine, int32_t i, const char **name,
                                      paged_store_stats *out);

/* The engine's cache, to look at with the functions of mem.h that take a const one. Borrowed. */
PAGED_API const paged_cache *paged_engine_cache(const paged_engine *engine);

/* A request that waits or runs. */
typedef struct paged_request_view {
    uint64_t id;
    paged_wait wait;
    paged_seq seq;              /* in the cache, while it runs; else 0 */
    int32_t n_prompt, n_tokens; /* of the prompt; with those generated */
    int32_t n_cached;           /* of n_tokens: keys and values lie in the cache */
    int32_t n_reused;           /* of n_cached: found there, not computed */
    int32_t n_preemptions;
} paged_request_view;

/* Those that run, then those that wait, best rank first; at most `capacity`. How many there are. */
PAGED_API int32_t paged_engine_requests(const paged_engine *engine, paged_request_view *out,
                                        int32_t capacity);

PAGED_API paged_status paged_engine_check(const paged_engine *engine,
                                          paged_error *err); /* paged_cache_check of its cache */

#ifdef __cplusplus
}
#endif
#endif
