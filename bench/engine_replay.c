/* Replays requests through an engine: they arrive at their times, are computed, and read after every step as
 * someone would who streams the text.
 *
 *     engine_replay MODEL N_THREADS N_CTX POOL_TOKENS MAX_RUNNING [contiguous]
 *
 * A line on stdin is the name of a file; in it a request is a line: ARRIVAL_MS PROMPT OUTPUT …  (tokens; what
 * follows is not used). Prompts are scattered over the vocabulary and all different, and no prefix is cached,
 * so that every request computes all it asks for. Choice is greedy, and no token ends an answer early.
 *
 * For each file one line of JSON: "tokens" generated, "prompt_tokens", "seconds" until the last one ended,
 * "cpu_seconds"; "running" and "most_running": requests that compute at once, the first a mean over time;
 * "preemptions". */
#include <time.h>

#include "base/base.h"
#include "bench/protocol.h"
#include "paged/engine.h"

typedef struct entry {
    double arrival, last; /* seconds; of the latest token */
    int32_t n_prompt, n_output;
    uint64_t id; /* 0: not yet here, or over */
} entry;

typedef struct replay {
    paged_model *model;
    paged_engine *engine;
    paged_error err;
    int32_t n_ctx, n_vocab;
    int32_t *prompt; /* [n_ctx] */

    entry *entries; /* [n] in the order of their arrival */
    int32_t n, n_here, n_over;
    double *ttft, *itl; /* [n], [all output tokens] seconds */
    int64_t n_ttft, n_itl, n_tokens, n_prompt_tokens;
    double start, running_seconds, most_running;
} replay;

static int by_value(const void *pa, const void *pb) {
    const double a = *(const double *)pa, b = *(const double *)pb;
    return (a > b) - (a < b);
}

/* Milliseconds below which a share of n seconds lies. */
static double percentile(double *seconds, int64_t n, double share) {
    if (n == 0) return 0;
    qsort(seconds, (size_t)n, sizeof *seconds, by_value);
    return 1e3 * seconds[PAGED_MIN((int64_t)((double)n * share), n - 1)];
}

static void forget(replay *r) {
    paged__free(r->entries);
    paged__free(r->ttft);
    paged__free(r->itl);
    r->entries = NULL;
    r->ttft = r->itl = NULL;
    r->n = r->n_here = r->n_over = 0;
    r->n_ttft = r->n_itl = r->n_tokens = r->n_prompt_tokens = 0;
    r->running_seconds = r->most_running = 0;
}

static bool fail(replay *r, const char *what, const char *name) {
    return !paged__fail(&r->err, PAGED_ERR_INVALID_ARG, "%s: %s", what, name);
}

/* Twice: to count, and to take. */
static bool read_entries(replay *r, const char *path) {
    char line[1 << 16];
    int64_t n_output = 0;
    FILE *file = fopen(path, "r");
    if (!file) return fail(r, "cannot read", path);
    for (int pass = 0; pass < 2; pass++) {
        int32_t n = 0;
        while (fgets(line, sizeof line, file)) {
            entry e = {0};
            if (sscanf(line, "%lf %d %d", &e.arrival, &e.n_prompt, &e.n_output) != 3 || e.n_prompt < 1 ||
                e.n_output < 1 || e.n_prompt + e.n_output > r->n_ctx) {
                fclose(file);
                return fail(r, "not a request that fits the context", line);
            }
            e.arrival *= 1e-3;
            if (pass) r->entries[n] = e;
            n_output += pass ? 0 : e.n_output;
            n++;
        }
        r->n = n;
        rewind(file);
        if (pass) break;
        r->entries = paged__calloc((size_t)n + 1, sizeof *r->entries);
        r->ttft = paged__calloc((size_t)n + 1, sizeof *r->ttft);
        r->itl = paged__calloc((size_t)n_output + 1, sizeof *r->itl);
        if (!r->entries || !r->ttft || !r->itl) break;
    }
    fclose(file);
    return (r->entries && r->ttft && r->itl) || fail(r, "no memory for", path);
}

static double now(const replay *r) {
    return bench_seconds(CLOCK_MONOTONIC) - r->start;
}

/* Those whose time has come. */
static bool submit(replay *r) {
    for (; r->n_here < r->n && r->entries[r->n_here].arrival <= now(r); r->n_here++) {
        entry *e = &r->entries[r->n_here];
        paged_request q;
        paged_request_init(&q);
        for (int32_t i = 0; i < e->n_prompt; i++) r->prompt[i] = bench_token(r->n_here, i, r->n_vocab);
        q.tokens = r->prompt;
        q.n_tokens = e->n_prompt;
        q.max_tokens = e->n_output;
        q.ignore_eos = true;
        if (paged_engine_submit(r->engine, &q, &e->id, &r->err)) return false;
        e->last = e->arrival;
        r->n_prompt_tokens += e->n_prompt;
    }
    return true;
}

static bool read_all(replay *r) {
    const double at = now(r);
    for (int32_t i = 0; i < r->n_here; i++) {
        entry *e = &r->entries[i];
        paged_output out;
        if (!e->id) continue;
        if (paged_engine_read(r->engine, e->id, &out)) return false;
        if (out.n_tokens) {
            const bool first = out.completion_tokens == out.n_tokens;
            if (first)
                r->ttft[r->n_ttft++] = at - e->last;
            else
                r->itl[r->n_itl++] = at - e->last;
            e->last = at;
            r->n_tokens += out.n_tokens;
        }
        if (out.finish == PAGED_FINISH_NONE) continue;
        if (out.finish != PAGED_FINISH_LENGTH || out.completion_tokens != e->n_output)
            return fail(r, "a request ended by", paged_finish_name(out.finish));
        paged_engine_release(r->engine, e->id);
        e->id = 0;
        r->n_over++;
    }
    return true;
}

static void sleep_until_next(const replay *r) {
    const double wait = r->entries[r->n_here].arrival - now(r);
    if (wait <= 0) return;
    const struct timespec t = {(time_t)wait, (long)((wait - (double)(time_t)wait) * 1e9)};
    nanosleep(&t, NULL);
}

static bool run(replay *r) {
    int32_t n_active;
    r->start = bench_seconds(CLOCK_MONOTONIC);
    while (r->n_over < r->n) {
        const double before = now(r);
        paged_engine_stats stats;
        if (!submit(r) || paged_engine_step(r->engine, &n_active, &r->err)) return false;
        paged_engine_get_stats(r->engine, &stats);
        r->most_running = PAGED_MAX(r->most_running, (double)stats.n_running);
        r->running_seconds += stats.n_running * (now(r) - before);
        if (!read_all(r)) return false;
        if (n_active == 0 && r->n_here < r->n) sleep_until_next(r);
    }
    return true;
}

static bool answer(replay *r, const char *path) {
    paged_engine_stats before, after;
    forget(r);
    if (!read_entries(r, path)) return false;
    paged_engine_get_stats(r->engine, &before);
    const double cpu = bench_seconds(CLOCK_PROCESS_CPUTIME_ID);
    if (!run(r)) return false;
    const double seconds = now(r), cpu_seconds = bench_seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    paged_engine_get_stats(r->engine, &after);
    printf("{\"tokens\": %lld, \"prompt_tokens\": %lld, \"seconds\": %.6f, \"cpu_seconds\": %.6f",
           (long long)r->n_tokens, (long long)r->n_prompt_tokens, seconds, cpu_seconds);
    printf(", \"running\": %.3f, \"most_running\": %.0f", r->running_seconds / seconds, r->most_running);
    const double ttft = percentile(r->ttft, r->n_ttft, 0.5), itl = percentile(r->itl, r->n_itl, 0.5);
    printf(", \"ttft_ms\": [%.3f, %.3f], \"itl_ms\": [%.3f, %.3f]", ttft,
           percentile(r->ttft, r->n_ttft, 0.99), itl, percentile(r->itl, r->n_itl, 0.99));
    printf(", \"preemptions\": %llu}\n", (unsigned long long)(after.n_preemptions - before.n_preemptions));
    return fflush(stdout) == 0;
}

static bool open_replay(replay *r, char **argv, bool contiguous) {
    const paged_model_config mc = {.struct_size = sizeof mc};
    if (paged_model_load(argv[1], &mc, &r->model, &r->err)) return false;
    paged_model_info info;
    paged_model_get_info(r->model, &info);
    const paged_group_config group = {.n_layers = info.n_layers,
                                      .n_kv_heads = info.n_kv_heads,
                                      .head_dim_k = info.head_dim_k,
                                      .head_dim_v = info.head_dim_v,
                                      .layout = PAGED_LAYOUT_PACKED};
    const paged_engine_config ec = {.struct_size = sizeof ec,
                                    .kv_type = PAGED_KV_AUTO,
                                    .n_threads = atoi(argv[2]),
                                    .n_ctx = atoi(argv[3]),
                                    .pool_bytes = paged_pool_bytes_for(&group, 1, 16, atoi(argv[4])),
                                    .max_running = atoi(argv[5]),
                                    .max_waiting = 4096,
                                    .no_prefix_cache = true,
                                    .contiguous = contiguous};
    if (paged_engine_create(r->model, &ec, &r->engine, &r->err)) return false;
    r->n_ctx = ec.n_ctx;
    r->n_vocab = info.n_vocab;
    r->prompt = paged__alloc((size_t)r->n_ctx, sizeof *r->prompt);
    return r->prompt != NULL;
}

int main(int argc, char **argv) {
    if (argc < 6) {
        fputs("engine_replay MODEL N_THREADS N_CTX POOL_TOKENS MAX_RUNNING [contiguous] < names\n", stderr);
        return 2;
    }
    replay r = {0};
    char path[4096];
    bool ok = open_replay(&r, argv, argc > 6);
    while (ok && fgets(path, sizeof path, stdin)) {
        path[strcspn(path, "\n")] = 0;
        ok = answer(&r, path);
    }
    if (!ok) fprintf(stderr, "engine_replay: %s\n", r.err.message);
    forget(&r);
    paged_engine_free(r.engine);
    paged_model_free(r.model);
    paged__free(r.prompt);
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}
