/* bench/bench_engine.c: the engine behind the protocol of bench/protocol.h. bench_engine.py drives it beside
 * its peers.
 *
 *     bench_engine MODEL [N_THREADS [N_CTX [BLOCK_SIZE [cache|none [int8|bf16]]]]]   0: the default
 *
 * Every answer also says "attn_seconds", the part of it spent in our operators (RoPE, kv_write,
 * attention), and "chunks", one entry for each step of a prefill: [[prompt tokens done, seconds,
 * attn_seconds], …]. They show the share of attention by context length. "own_seconds" is the part of the
 * steps that the model did not compute in: scheduling and choosing tokens. `read` reads the packed weights
 * where they lie, with all threads: no step can take less time. The program reaches inside the engine and
 * the model for these three only.
 *
 * `sampling`: 0 the most likely token, 1 temperature 0.8 and top-p 0.9, 2 the same with log-probabilities.
 */
#include "base/team.h"
#include "bench/probe.h"
#include "bench/protocol.h"
#include "engine/engine.h"
#include "paged/engine.h"

enum { CHUNKS_MAX = 1024, REQUESTS_MAX = 32, BATCH_TOKENS = 2048 /* a request of a batch makes at most */ };

typedef struct chunk {
    int32_t done; /* tokens in the cache after it */
    double seconds, attn_seconds;
} chunk;

typedef struct ours {
    paged_model *model;
    paged_engine *engine;
    paged_error err;
    int32_t n_vocab, n_ctx, n_threads;
    uint64_t open[REQUESTS_MAX]; /* the requests that `decode` goes on with */
    int32_t n_open;
    paged__team *team; /* for `read` */
    _Atomic uint64_t sink;
    int32_t *prompt;     /* [n_ctx] */
    int32_t token;       /* the newest of the first */
    double attn_seconds; /* of the latest command */
    double own_seconds;  /* the same */
    int32_t how;         /* tokens are chosen */
    chunk chunks[CHUNKS_MAX];
    int32_t n_chunks;
} ours;

static double attn_seconds(const ours *o) {
    uint64_t attn_ns, step_ns;
    paged__runner_times(o->engine->runner, &attn_ns, &step_ns);
    return (double)attn_ns * 1e-9;
}

static double model_seconds(const ours *o) {
    uint64_t attn_ns, step_ns;
    paged__runner_times(o->engine->runner, &attn_ns, &step_ns);
    return (double)step_ns * 1e-9;
}

static bool submit(ours *o, int32_t request, int32_t n_requests, int32_t n_tokens) {
    paged_request r;
    paged_request_init(&r);
    for (int32_t i = 0; i < PAGED_MIN(n_tokens, o->n_ctx); i++)
        o->prompt[i] = bench_token(request, i, o->n_vocab);
    r.tokens = o->prompt;
    r.n_tokens = n_tokens;
    r.max_tokens = n_requests > 1 ? PAGED_MIN(BATCH_TOKENS, o->n_ctx - n_tokens) : 0;
    r.ignore_eos = true;
    r.temperature = o->how > 0 ? 0.8f : 0;
    r.top_p = o->how > 0 ? 0.9f : 1;
    r.logprobs = o->how > 1;
    r.seed = (uint64_t)request;
    return paged_engine_submit(o->engine, &r, &o->open[request], &o->err) == PAGED_OK;
}

/* One step of everything; *n_made: requests that have made a token in it, *done: prompt tokens of the first
 * that are in the cache. Reads after every step, as someone would who streams the text. */
static bool step(ours *o, int32_t *n_made, int32_t *done) {
    *n_made = 0;
    const double start = bench_seconds(CLOCK_MONOTONIC), model = model_seconds(o);
    if (paged_engine_step(o->engine, NULL, &o->err)) return false;
    o->own_seconds += bench_seconds(CLOCK_MONOTONIC) - start - (model_seconds(o) - model);
    for (int32_t i = 0; i < o->n_open; i++) {
        paged_output out;
        if (paged_engine_read(o->engine, o->open[i], &out)) return false;
        *n_made += out.n_tokens > 0;
        if (i > 0) continue;
        *done = out.prompt_done;
        if (out.n_tokens) o->token = out.tokens[0];
    }
    return true;
}

static bool open_requests(void *self, int32_t n_requests, int32_t n_tokens) {
    ours *o = self;
    const double attn_start = attn_seconds(o);
    if (n_requests > REQUESTS_MAX)
        return !paged__fail(&o->err, PAGED_ERR_INVALID_ARG, "%d requests; at most %d", n_requests,
                            REQUESTS_MAX);
    for (int32_t i = 0; i < o->n_open; i++) paged_engine_release(o->engine, o->open[i]);
    o->n_chunks = 0;
    o->own_seconds = 0;
    for (o->n_open = 0; o->n_open < n_requests; o->n_open++)
        if (!submit(o, o->n_open, n_requests, n_tokens)) return false;
    /* Those whose prompts come first already go on while the others' are read. */
    for (bool all = false; !all;) {
        const double start = bench_seconds(CLOCK_MONOTONIC), attn = attn_seconds(o);
        int32_t n_made, done;
        if (!step(o, &n_made, &done)) return false;
        all = n_made == n_requests;
        if (o->n_chunks < CHUNKS_MAX)
            o->chunks[o->n_chunks++] = (chunk){.done = done,
                                               .seconds = bench_seconds(CLOCK_MONOTONIC) - start,
                                               .attn_seconds = attn_seconds(o) - attn};
    }
    o->attn_seconds = attn_seconds(o) - attn_start;
    return true;
}

static bool decode(void *self, int32_t n_tokens) {
    ours *o = self;
    const double attn_start = attn_seconds(o);
    o->n_chunks = 0;
    o->own_seconds = 0;
    if (!o->n_open) return !paged__fail(&o->err, PAGED_ERR_INVALID_ARG, "nothing is open; prefill first");
    for (int32_t i = 0; i < n_tokens; i++) {
        int32_t n_made, done;
        if (!step(o, &n_made, &done)) return false;
        if (n_made < o->n_open)
            return !paged__fail(&o->err, PAGED_ERR_TOO_LONG, "%d of %d requests are at their end",
                                o->n_open - n_made, o->n_open);
    }
    o->attn_seconds = attn_seconds(o) - attn_start;
    return true;
}

/* Each thread reads its part of the packed weights. */
static void read_part(void *user, int32_t ith, int32_t nth) {
    ours *o = user;
    const size_t part = o->model->packed_bytes / (size_t)nth / 4096 * 4096;
    const uint8_t *begin = o->model->packed + (size_t)ith * part;
    atomic_fetch_or_explicit(&o->sink, probe_read_all(begin, part), memory_order_relaxed);
}

static int64_t read_weights(void *self) {
    ours *o = self;
    const size_t n = (size_t)o->n_threads;
    paged__team_run(o->team, read_part, o);
    return (int64_t)(o->model->packed_bytes / n / 4096 * 4096 * n);
}

static bool set_sampling(void *self, int32_t how) {
    ((ours *)self)->how = how;
    return how <= 2;
}

static int32_t last_token(const void *self) {
    return ((const ours *)self)->token;
}

static void report(const void *self, FILE *out) {
    const ours *o = self;
    fprintf(out, ", \"attn_seconds\": %.6f, \"own_seconds\": %.6f, \"chunks\": [", o->attn_seconds,
            o->own_seconds);
    for (int32_t i = 0; i < o->n_chunks; i++)
        fprintf(out, "%s[%d, %.6f, %.6f]", i ? ", " : "", o->chunks[i].done, o->chunks[i].seconds,
                o->chunks[i].attn_seconds);
    fputc(']', out);
}

static bool open_ours(ours *o, int argc, char **argv) {
    paged_model_config mc = {.struct_size = sizeof mc};
    /* The same prompt comes again and again, and is to be computed each time, unless told otherwise. */
    paged_engine_config ec = {.struct_size = sizeof ec,
                              .kv_type = PAGED_KV_AUTO,
                              .no_prefix_cache = argc <= 5 || strcmp(argv[5], "cache") != 0,
                              .max_running = REQUESTS_MAX};
    if (argc > 2) ec.n_threads = atoi(argv[2]);
    if (argc > 3) ec.n_ctx = atoi(argv[3]);
    if (argc > 4) ec.block_size = atoi(argv[4]);
    if (argc > 6) {
        const bool bf16 = strcmp(argv[6], "bf16") == 0;
        if (!bf16 && strcmp(argv[6], "int8") != 0)
            return !paged__fail(&o->err, PAGED_ERR_INVALID_ARG, "linear %s; int8 or bf16", argv[6]);
        mc.linear = bf16 ? PAGED_LINEAR_BF16 : PAGED_LINEAR_I8;
    }
    if (paged_model_load(argv[1], &mc, &o->model, &o->err)) return false;
    if (paged_engine_create(o->model, &ec, &o->engine, &o->err)) return false;
    paged_model_info model;
    paged_engine_info engine;
    paged_model_get_info(o->model, &model);
    paged_engine_get_info(o->engine, &engine);
    o->n_vocab = model.n_vocab;
    o->n_ctx = engine.n_ctx;
    o->n_threads = engine.n_threads;
    o->prompt = paged__alloc((size_t)o->n_ctx, sizeof *o->prompt);
    return o->prompt && !paged__team_create(o->n_threads, false, &o->team, &o->err);
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fputs("bench_engine MODEL [N_THREADS [N_CTX [BLOCK_SIZE [cache|none [int8|bf16]]]]]\n", stderr);
        return 2;
    }
    ours *o = paged__calloc(1, sizeof *o);
    if (!o) return EXIT_FAILURE;
    int status = EXIT_FAILURE;
    if (open_ours(o, argc, argv)) {
        const bench_side side = {.self = o,
                                 .open = open_requests,
                                 .decode = decode,
                                 .read = read_weights,
                                 .sampling = set_sampling,
                                 .last_token = last_token,
                                 .report = report};
        status = bench_serve(&side);
    }
    if (status && o->err.status) fprintf(stderr, "bench_engine: %s\n", o->err.message);
    paged__team_free(o->team);
    paged_engine_free(o->engine);
    paged_model_free(o->model);
    paged__free(o->prompt);
    paged__free(o);
    return status;
}
