/* cli/bench.c: paged bench: how fast a model is on this machine, by context and by number of requests.
 *
 * prefill  one prompt of so many tokens, in chunks, to its first token
 * decode   so many requests of that context, a token each a step
 *
 * Prompts are made up and share nothing. Each figure is the median of --rounds, with the fastest and the
 * slowest beside it; other work on the machine shows there.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "cli/cli.h"
#include "cli/plan.h"
#include "cli/session.h"

enum { LIST_MAX = 16, ROUNDS_MAX = 100 };

typedef struct bench_options {
    const char *model, *contexts, *requests;
    int32_t tokens, rounds, log_level;
    bool json, quiet, stats;
    paged__memory_options memory;
} bench_options;

#define AT(field) offsetof(bench_options, field)
static const paged__option options_table[] = {
    {.kind = PAGED__OPTION_HEADING, .name = "What to measure"},
    PAGED__MODEL_ROW(bench_options, model),
    {PAGED__OPTION_TEXT, 0, "contexts", "LIST", AT(contexts), 0, 0, NULL,
     "prompt lengths (default: 128,512,2048; those that fit)"},
    {PAGED__OPTION_TEXT, 0, "requests", "LIST", AT(requests), 0, 0, NULL,
     "requests at once, for decode (default: 1,4,16)"},
    {PAGED__OPTION_INT, 0, "tokens", "N", AT(tokens), 1, 4096, NULL, "decode steps a round (default: 32)"},
    {PAGED__OPTION_INT, 0, "rounds", "N", AT(rounds), 1, ROUNDS_MAX, NULL, "rounds a figure (default: 3)"},
    {.kind = PAGED__OPTION_HEADING, .name = "Memory and threads"},
    PAGED__MEMORY_ROWS(bench_options, memory),
    {.kind = PAGED__OPTION_HEADING, .name = "Output"},
    {PAGED__OPTION_FLAG, 0, "json", NULL, AT(json), 0, 0, NULL, "one JSON object a row"},
    {PAGED__OPTION_FLAG, 0, "stats", NULL, AT(stats), 0, 0, NULL,
     "what the scheduler and the cache counted on stderr at the end"},
    {PAGED__OPTION_FLAG, 'q', "quiet", NULL, AT(quiet), 0, 0, NULL,
     "no memory plan, no notes, no progress bar"},
    {PAGED__OPTION_CHOICE, 0, "log-level", "LEVEL", AT(log_level), 0, 0, paged__log_levels,
     "error, warn, info or debug (default: warn; with --quiet error)"},
};
#undef AT

typedef struct bench {
    paged__session session;
    bench_options options;
    int32_t contexts[LIST_MAX], requests[LIST_MAX], n_contexts, n_requests;
    int32_t *prompt; /* [longest context] */
    uint64_t seed;   /* of the next prompt */
    int32_t n_done, n_figures;
} bench;

typedef struct figure {
    double values[ROUNDS_MAX]; /* tokens/s, sorted at the end */
    int32_t n;
} figure;

/* "1,4,16" */
static int parse_list(paged__cli *cli, const char *name, const char *text, int32_t *list, int32_t *n) {
    *n = 0;
    for (const char *at = text; *n < LIST_MAX;) {
        char *end;
        const long value = strtol(at, &end, 10);
        if (end == at || value < 1 || value > INT32_MAX || (*end && *end != ',')) break;
        list[(*n)++] = (int32_t)value;
        if (!*end) return PAGED__EXIT_OK;
        at = end + 1;
    }
    return paged__usage_error(cli, "--%s takes 1 … %d whole numbers, such as 128,512, not '%s'", name,
                              LIST_MAX, text);
}

/* ---- measuring ---- */

static int submit(bench *b, int32_t n_tokens, int32_t n_new, uint64_t *id) {
    uint64_t state = paged__mix(b->seed++);
    for (int32_t i = 0; i < n_tokens; i++)
        b->prompt[i] = (int32_t)(paged__rand(&state) % (uint64_t)b->session.info.n_vocab);
    paged_request request;
    paged_request_init(&request);
    request.tokens = b->prompt;
    request.n_tokens = n_tokens;
    request.max_tokens = n_new;
    request.ignore_eos = true;
    return paged__session_submit(&b->session, &request, id);
}

static int step(bench *b, int32_t *n_active) {
    paged_error err;
    if (paged__interrupt_taken()) return PAGED__EXIT_INTERRUPTED;
    return paged_engine_step(b->session.engine, n_active, &err)
               ? paged__error(b->session.cli, "%s", err.message)
               : PAGED__EXIT_OK;
}

static int measure_prefill(bench *b, int32_t context, double *speed) {
    uint64_t id;
    int32_t n_active = 1;
    int code = submit(b, context, 1, &id);
    const uint64_t start = paged__now_ns();
    while (code == PAGED__EXIT_OK && n_active) code = step(b, &n_active);
    *speed = context / ((double)(paged__now_ns() - start) * 1e-9);
    if (code == PAGED__EXIT_OK) paged_engine_release(b->session.engine, id);
    return code;
}

/* Whether every prompt has given its first token. */
static bool all_decode(bench *b, const uint64_t *ids, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        paged_output out;
        if (paged_engine_read(b->session.engine, ids[i], &out) || out.completion_tokens == 0) return false;
    }
    return true;
}

/* The first request decodes while the last one is read, so that it must live that long. */
static int32_t tokens_needed(const bench *b, int32_t context, int32_t n_requests) {
    const int32_t chunk = b->options.memory.chunk ? b->options.memory.chunk : 512;
    return b->options.tokens + 2 + n_requests * (context / PAGED_MAX(chunk - n_requests, 1) + 2);
}

static int measure_decode(bench *b, int32_t context, int32_t n_requests, double *speed) {
    uint64_t *ids = paged__alloc((size_t)n_requests, sizeof *ids);
    int32_t n_active = 1, n_steps = b->options.tokens;
    if (!ids) return paged__error(b->session.cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
    int code = PAGED__EXIT_OK;
    const int32_t n_new = tokens_needed(b, context, n_requests);
    for (int32_t i = 0; i < n_requests && code == PAGED__EXIT_OK; i++)
        code = submit(b, context, n_new, &ids[i]);
    while (code == PAGED__EXIT_OK && !all_decode(b, ids, n_requests)) code = step(b, &n_active);
    const uint64_t start = paged__now_ns();
    for (int32_t i = 0; i < n_steps && code == PAGED__EXIT_OK; i++) code = step(b, &n_active);
    *speed = (double)n_steps * n_requests / ((double)(paged__now_ns() - start) * 1e-9);
    if (code == PAGED__EXIT_OK && n_active < n_requests)
        code = paged__error(b->session.cli, "a request ended too early; this is a fault of paged bench");
    for (int32_t i = 0; i < n_requests && code == PAGED__EXIT_OK; i++)
        paged_engine_release(b->session.engine, ids[i]);
    paged__free(ids);
    return code;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* n_requests 0: prefill. */
static int measure(bench *b, int32_t context, int32_t n_requests, figure *f) {
    int code = PAGED__EXIT_OK;
    f->n = 0;
    if (!b->options.quiet)
        paged__term_progress(&b->session.cli->term, n_requests ? "decode" : "prefill",
                             (double)b->n_done++ / b->n_figures);
    while (f->n < b->options.rounds && code == PAGED__EXIT_OK) {
        code = n_requests ? measure_decode(b, context, n_requests, &f->values[f->n])
                          : measure_prefill(b, context, &f->values[f->n]);
        f->n++;
    }
    qsort(f->values, (size_t)f->n, sizeof *f->values, by_value);
    return code;
}

/* ---- report ---- */

static int print_figure(bench *b, int32_t context, int32_t n_requests, const figure *f) {
    paged__cli *cli = b->session.cli;
    paged__term_clear(&cli->term);
    const double value = f->values[f->n / 2], low = f->values[0], high = f->values[f->n - 1];
    if (b->options.json)
        return paged__out_json(cli,
                               json_pack("{s:s, s:s, s:i, s:i, s:s, s:f, s:f, s:f}", "bench", "model", "case",
                                         n_requests ? "decode" : "prefill", "context", (int)context,
                                         "requests", n_requests ? (int)n_requests : 1, "unit", "tokens/s",
                                         "value", value, "low", low, "high", high),
                               true);
    paged__out_printf(cli, "%-8s %8d %9d %12.1f   %.1f … %.1f\n", n_requests ? "decode" : "prefill", context,
                      n_requests ? n_requests : 1, value, low, high);
    paged__out_flush(cli);
    return PAGED__EXIT_OK;
}

static int run_all(bench *b) {
    figure f;
    int code = PAGED__EXIT_OK;
    if (!b->options.json)
        paged__out_printf(b->session.cli, "%-8s %8s %9s %12s   %s\n", "", "context", "requests", "tokens/s",
                          "slowest … fastest");
    for (int32_t i = 0; i < b->n_contexts && code == PAGED__EXIT_OK; i++) {
        code = measure(b, b->contexts[i], 0, &f);
        if (code == PAGED__EXIT_OK) code = print_figure(b, b->contexts[i], 0, &f);
        for (int32_t r = 0; r < b->n_requests && code == PAGED__EXIT_OK; r++) {
            code = measure(b, b->contexts[i], b->requests[r], &f);
            if (code == PAGED__EXIT_OK) code = print_figure(b, b->contexts[i], b->requests[r], &f);
        }
    }
    return code;
}

/* ---- all of it ---- */

static int32_t most_of(const int32_t *list, int32_t n) {
    int32_t most = list[0];
    for (int32_t i = 1; i < n; i++) most = PAGED_MAX(most, list[i]);
    return most;
}

/* Drops the contexts that the model does not have; an engine for the longest one left. */
static int start(bench *b) {
    bench_options *o = &b->options;
    paged__cli *cli = b->session.cli;
    const int32_t most = most_of(b->requests, b->n_requests), room = b->session.info.n_ctx_train;
    int32_t n = 0;
    for (int32_t i = 0; i < b->n_contexts; i++) {
        const int64_t need = (int64_t)b->contexts[i] + tokens_needed(b, b->contexts[i], most);
        if (need <= room)
            b->contexts[n++] = b->contexts[i];
        else
            paged__note(cli,
                        "context %d with %d requests and %d tokens needs %lld tokens each, the model has %d: "
                        "left out",
                        b->contexts[i], most, o->tokens, (long long)need, room);
    }
    b->n_contexts = n;
    if (n == 0) return paged__error(cli, "no context is left; give shorter --contexts");
    const int32_t longest = most_of(b->contexts, n);
    if (o->memory.ctx == 0) o->memory.ctx = longest + tokens_needed(b, longest, most);
    b->n_figures = n * (1 + b->n_requests);
    b->prompt = paged__alloc((size_t)longest, sizeof *b->prompt);
    if (!b->prompt) return paged__error(cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
    return paged__session_start(&b->session, &o->memory, most, NULL);
}

static int bench_command(paged__cli *cli, int argc, char **argv) {
    static const bench_options defaults = {.contexts = "128,512,2048",
                                           .requests = "1,4,16",
                                           .tokens = 32,
                                           .rounds = 3,
                                           .memory = PAGED__MEMORY_DEFAULTS,
                                           .log_level = -1};
    bench b = {.options = defaults};
    bench_options *o = &b.options;
    int code;
    if (!paged__args_parse(cli, &paged__command_bench, argc, argv, o, &code)) return code;
    code = parse_list(cli, "contexts", o->contexts, b.contexts, &b.n_contexts);
    if (code == PAGED__EXIT_OK) code = parse_list(cli, "requests", o->requests, b.requests, &b.n_requests);
    if (code != PAGED__EXIT_OK) return code;
    cli->quiet = o->quiet;
    if (o->log_level < 0) o->log_level = o->quiet ? PAGED_LOG_ERROR : PAGED_LOG_WARN;
    paged__log_to_stderr(cli, (paged_log_level)o->log_level);
    paged__interrupt_catch(cli);
    code = paged__session_load(&b.session, cli, o->model, (paged_linear)o->memory.linear);
    if (code == PAGED__EXIT_OK) code = start(&b);
    if (code == PAGED__EXIT_OK) {
        paged_engine_info info;
        paged_engine_get_info(b.session.engine, &info);
        if (!o->json) paged__plan_note(cli, &b.session.info, &info, b.session.model_path);
        paged__interrupt_keep(true);
        code = run_all(&b);
        if (code == PAGED__EXIT_OK && o->stats) paged__session_print_stats(&b.session);
    }
    paged__session_close(&b.session);
    paged__free(b.prompt);
    return code;
}

const paged__command paged__command_bench = {
    .name = "bench",
    .purpose = "measure how fast a model is here",
    .usage = "--model FILE [options]",
    .example = "paged bench --model model.gguf --contexts 512,4096 --requests 1,8",
    .options = options_table,
    .n_options = sizeof options_table / sizeof options_table[0],
    .run = bench_command,
};
