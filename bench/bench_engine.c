/* bench/bench_engine.c: the engine behind the protocol of bench/protocol.h. bench_engine.py drives it beside
 * llama.cpp.
 *
 *     bench_engine MODEL [N_THREADS [N_CTX [BLOCK_SIZE]]]      0: the engine's default
 *
 * Every answer also says "attn_seconds", the part of it spent in our operators (RoPE, kv_write,
 * attention), and "chunks", one entry for each step of a prefill: [[prompt tokens done, seconds,
 * attn_seconds], …]. They show the share of attention by context length. It reaches inside the engine
 * for these times only.
 */
#include "bench/protocol.h"
#include "engine/engine.h"
#include "paged/engine.h"

enum { CHUNKS_MAX = 1024 };

typedef struct chunk {
    int32_t done; /* tokens in the cache after it */
    double seconds, attn_seconds;
} chunk;

typedef struct ours {
    paged_model *model;
    paged_engine *engine;
    paged_error err;
    int32_t n_vocab, n_ctx;
    uint64_t open;       /* the request that `decode` goes on with; 0: none */
    int32_t *prompt;     /* [n_ctx] */
    int32_t token;       /* the newest */
    double attn_seconds; /* of the latest command */
    chunk chunks[CHUNKS_MAX];
    int32_t n_chunks;
} ours;

static double attn_seconds(const ours *o) {
    uint64_t attn_ns, step_ns;
    paged__runner_times(o->engine->runner, &attn_ns, &step_ns);
    return (double)attn_ns * 1e-9;
}

static bool submit(ours *o, int32_t n_tokens) {
    if (o->open) paged_engine_release(o->engine, o->open);
    o->open = 0;
    paged_request r;
    paged_request_init(&r);
    for (int32_t i = 0; i < PAGED_MIN(n_tokens, o->n_ctx); i++) o->prompt[i] = bench_token(i, o->n_vocab);
    r.tokens = o->prompt;
    r.n_tokens = n_tokens;
    r.ignore_eos = true;
    return paged_engine_submit(o->engine, &r, &o->open, &o->err) == PAGED_OK;
}

static bool prefill(void *self, int32_t n_tokens) {
    ours *o = self;
    const double attn_start = attn_seconds(o);
    o->n_chunks = 0;
    if (!submit(o, n_tokens)) return false;
    paged_output out = {0};
    while (out.prompt_done < n_tokens) {
        const double start = bench_seconds(CLOCK_MONOTONIC), attn = attn_seconds(o);
        if (paged_engine_step(o->engine, NULL, &o->err) || paged_engine_read(o->engine, o->open, &out))
            return false;
        if (o->n_chunks < CHUNKS_MAX)
            o->chunks[o->n_chunks++] = (chunk){.done = out.prompt_done,
                                               .seconds = bench_seconds(CLOCK_MONOTONIC) - start,
                                               .attn_seconds = attn_seconds(o) - attn};
    }
    o->attn_seconds = attn_seconds(o) - attn_start;
    if (out.n_tokens == 1) o->token = out.tokens[0];
    return out.n_tokens == 1;
}

/* Reads after every step, as someone would who streams the text. */
static bool decode(void *self, int32_t n_tokens) {
    ours *o = self;
    const double attn_start = attn_seconds(o);
    o->n_chunks = 0;
    if (!o->open) return !paged__fail(&o->err, PAGED_ERR_INVALID_ARG, "nothing is open; prefill first");
    for (int32_t i = 0; i < n_tokens; i++) {
        paged_output out;
        if (paged_engine_step(o->engine, NULL, &o->err) || paged_engine_read(o->engine, o->open, &out))
            return false;
        if (out.n_tokens != 1)
            return !paged__fail(&o->err, PAGED_ERR_TOO_LONG, "the context of %d is full", o->n_ctx);
        o->token = out.tokens[0];
    }
    o->attn_seconds = attn_seconds(o) - attn_start;
    return true;
}

static int32_t last_token(const void *self) {
    return ((const ours *)self)->token;
}

static void report(const void *self, FILE *out) {
    const ours *o = self;
    fprintf(out, ", \"attn_seconds\": %.6f, \"chunks\": [", o->attn_seconds);
    for (int32_t i = 0; i < o->n_chunks; i++)
        fprintf(out, "%s[%d, %.6f, %.6f]", i ? ", " : "", o->chunks[i].done, o->chunks[i].seconds,
                o->chunks[i].attn_seconds);
    fputc(']', out);
}

static bool open_ours(ours *o, int argc, char **argv) {
    const paged_model_config mc = {.struct_size = sizeof mc};
    /* The same prompt comes again and again, and is to be computed each time. */
    paged_engine_config ec = {.struct_size = sizeof ec, .no_prefix_cache = true};
    if (argc > 2) ec.n_threads = atoi(argv[2]);
    if (argc > 3) ec.n_ctx = atoi(argv[3]);
    if (argc > 4) ec.block_size = atoi(argv[4]);
    if (paged_model_load(argv[1], &mc, &o->model, &o->err)) return false;
    if (paged_engine_create(o->model, &ec, &o->engine, &o->err)) return false;
    paged_model_info model;
    paged_engine_info engine;
    paged_model_get_info(o->model, &model);
    paged_engine_get_info(o->engine, &engine);
    o->n_vocab = model.n_vocab;
    o->n_ctx = engine.n_ctx;
    o->prompt = paged__alloc((size_t)o->n_ctx, sizeof *o->prompt);
    return o->prompt != NULL;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fputs("bench_engine MODEL [N_THREADS [N_CTX [BLOCK_SIZE]]]\n", stderr);
        return 2;
    }
    ours *o = paged__calloc(1, sizeof *o);
    if (!o) return EXIT_FAILURE;
    int status = EXIT_FAILURE;
    if (open_ours(o, argc, argv)) {
        const bench_side side = {
            .self = o, .prefill = prefill, .decode = decode, .last_token = last_token, .report = report};
        status = bench_serve(&side);
    }
    if (status && o->err.status) fprintf(stderr, "bench_engine: %s\n", o->err.message);
    paged_engine_free(o->engine);
    paged_model_free(o->model);
    paged__free(o->prompt);
    paged__free(o);
    return status;
}
