/* tests/diff/tool_score.c: what the engine thinks of given tokens, for the comparisons with oracles.
 *
 * Every line of the input is one request: token ids, separated by white space. For each one a line of JSON
 * comes out: the log-probability of every token but the first, the most likely token there, a hash over the
 * bits of these numbers, and the blocks that were held. After each request the cache is checked, and every
 * block must be free again.
 *
 *     tool_score --model FILE [--tokens FILE] [--hash] …      exit code 0, 1 on any error, 2 on wrong usage
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "paged/engine.h"

enum { REQUEST_TOKENS_MAX = 1 << 20 };

typedef struct options {
    const char *model_path, *tokens_path; /* tokens_path NULL: stdin */
    paged_engine_config engine;
    int32_t n_generate; /* tokens to generate greedily after the prompt, with their log-probabilities */
    bool hash_only;     /* leave the arrays out */
    bool unscored;      /* nothing of the prompt */
} options;

static int fail(const char *what, const paged_error *err) {
    fprintf(stderr, "tool_score: %s: %s\n", what,
            err->message[0] ? err->message : paged_status_text(err->status));
    return 1;
}

static int32_t parse_int(const char *flag, const char *text, int32_t min, int32_t max) {
    char *end;
    const long value = strtol(text, &end, 10);
    if (*text == 0 || *end != 0 || value < min || value > max) {
        fprintf(stderr, "tool_score: %s %s: not a number in %d … %d\n", flag, text, min, max);
        exit(2);
    }
    return (int32_t)value;
}

static paged_type parse_type(const char *text) {
    if (strcmp(text, "f16") == 0) return PAGED_TYPE_F16;
    if (strcmp(text, "f32") == 0) return PAGED_TYPE_F32;
    if (strcmp(text, "bf16") == 0) return PAGED_TYPE_BF16;
    if (strcmp(text, "int8") == 0) return PAGED_TYPE_I8;
    fprintf(stderr, "tool_score: --kv-type %s: not f16, f32, bf16 or int8\n", text);
    exit(2);
}

/* Returns how many arguments the option took: 1 for a switch, 2 with a value, 0 for an unknown one. */
static int parse_option(options *o, const char *flag, const char *value) {
    paged_engine_config *e = &o->engine;
    if (strcmp(flag, "--kv-plain") == 0) return e->kv_plain = true, 1;
    if (strcmp(flag, "--poison") == 0) return e->poison = true, 1;
    if (strcmp(flag, "--hash") == 0) return o->hash_only = true, 1;
    if (strcmp(flag, "--unscored") == 0) return o->unscored = true, 1;
    if (!value) return 0;
    if (strcmp(flag, "--model") == 0) return o->model_path = value, 2;
    if (strcmp(flag, "--tokens") == 0) return o->tokens_path = value, 2;
    if (strcmp(flag, "--kv-type") == 0) return e->kv_type = (int32_t)parse_type(value), 2;
    if (strcmp(flag, "--block-size") == 0) return e->block_size = parse_int(flag, value, 1, 1024), 2;
    if (strcmp(flag, "--chunk") == 0) return e->chunk_tokens = parse_int(flag, value, 1, 65536), 2;
    if (strcmp(flag, "--threads") == 0) return e->n_threads = parse_int(flag, value, 1, 512), 2;
    if (strcmp(flag, "--ctx") == 0) return e->n_ctx = parse_int(flag, value, 1, INT32_MAX), 2;
    if (strcmp(flag, "--generate") == 0) return o->n_generate = parse_int(flag, value, 1, 65536), 2;
    return 0;
}

static bool parse(options *o, int argc, char **argv) {
    for (int i = 1; i < argc;) {
        const int taken = parse_option(o, argv[i], i + 1 < argc ? argv[i + 1] : NULL);
        if (taken == 0) {
            fprintf(stderr, "tool_score: unknown option, or one without its value: %s\n", argv[i]);
            return false;
        }
        i += taken;
    }
    if (!o->model_path) fprintf(stderr, "tool_score: --model FILE is missing\n");
    return o->model_path != NULL;
}

/* FNV-1a over bytes: two results have equal hashes only if all bits are equal, as far as a test can tell. */
static uint64_t hash_bytes(uint64_t hash, const void *data, size_t size_bytes) {
    const uint8_t *bytes = data;
    for (size_t i = 0; i < size_bytes; i++) hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}

static void print_floats(const char *name, const float *values, int32_t n) {
    printf(", \"%s\": [", name);
    for (int32_t i = 0; i < n; i++) {
        if (i) printf(", ");
        if (isfinite(values[i]))
            printf("%.9g", (double)values[i]);
        else
            printf("%s", isnan(values[i]) ? "NaN" : values[i] < 0 ? "-Infinity" : "Infinity");
    }
    printf("]");
}

static void print_ints(const char *name, const int32_t *values, int32_t n) {
    printf(", \"%s\": [", name);
    for (int32_t i = 0; i < n; i++) printf("%s%d", i ? ", " : "", values[i]);
    printf("]");
}

/* Runs the request to its end; collects generated tokens and their log-probabilities, [n_generate] each. */
static int run(paged_engine *engine, uint64_t id, int32_t *generated, float *logprobs, int32_t *n_generated,
               paged_output *last) {
    paged_error err = {0};
    for (int32_t n_active = 1, n_out = 0;;) {
        if (n_active && paged_engine_step(engine, &n_active, &err)) return fail("step", &err);
        if (paged_engine_read(engine, id, last)) return fail("read", &err);
        for (int32_t i = 0; i < last->n_tokens; i++) {
            generated[n_out + i] = last->tokens[i];
            logprobs[n_out + i] = last->logprobs[i];
        }
        *n_generated = n_out += last->n_tokens;
        if (last->finish == PAGED_FINISH_ERROR) return fail("the request ended with an error", &err);
        if (last->finish != PAGED_FINISH_NONE) return 0;
    }
}

static int print_result(const options *o, paged_engine *engine, uint64_t id, const paged_output *last,
                        const int32_t *generated, const float *gen_logprobs, int32_t n_generated) {
    paged_error err = {0};
    const float *logprobs = NULL;
    const int32_t *top1 = NULL;
    int32_t n = 0;
    if (!o->unscored) err.status = paged_engine_prompt_logprobs(engine, id, &logprobs, &top1, &n);
    if (err.status) return fail("prompt_logprobs", &err);

    uint64_t hash = hash_bytes(0xcbf29ce484222325u, logprobs, (size_t)n * sizeof *logprobs);
    hash = hash_bytes(hash, top1, (size_t)n * sizeof *top1);
    hash = hash_bytes(hash, generated, (size_t)n_generated * sizeof *generated);
    hash = hash_bytes(hash, gen_logprobs, (size_t)n_generated * sizeof *gen_logprobs);
    printf("{\"n\": %d, \"hash\": \"%016llx\", \"blocks_used\": %d", n, (unsigned long long)hash,
           last->blocks_used);
    if (!o->hash_only) {
        print_floats("logprobs", logprobs, n);
        print_ints("top1", top1, n);
        print_ints("generated", generated, n_generated);
        print_floats("generated_logprobs", gen_logprobs, n_generated);
    }
    printf("}\n");
    return 0;
}

static int score(const options *o, paged_engine *engine, const int32_t *tokens, int32_t n_tokens,
                 int32_t *generated, float *gen_logprobs) {
    paged_error err = {0};
    paged_request request;
    uint64_t id;
    paged_request_init(&request);
    request.tokens = tokens;
    request.n_tokens = n_tokens;
    request.max_tokens = o->n_generate ? o->n_generate : 1;
    request.ignore_eos = request.logprobs = true;
    request.prompt_logprobs = !o->unscored;
    if (paged_engine_submit(engine, &request, &id, &err)) return fail("submit", &err);

    paged_output last;
    int32_t n_generated = 0;
    int rc = run(engine, id, generated, gen_logprobs, &n_generated, &last);
    if (rc == 0)
        rc = print_result(o, engine, id, &last, generated, gen_logprobs, o->n_generate ? n_generated : 0);
    err.status = paged_engine_release(engine, id);
    if (err.status) return fail("release", &err);
    if (paged_engine_check(engine, &err)) return fail("cache check", &err);

    paged_cache_stats stats;
    paged_engine_get_cache_stats(engine, &stats);
    if (stats.n_used == 0 && stats.n_seqs == 0) return rc;
    fprintf(stderr, "tool_score: %d blocks and %d sequences are left after the request\n", stats.n_used,
            stats.n_seqs);
    return 1;
}

/* Ids of one line into tokens [REQUEST_TOKENS_MAX]; -1: something else than numbers, or too many. */
static int32_t parse_tokens(const char *line, int32_t *tokens) {
    int32_t n = 0;
    for (const char *at = line;;) {
        char *end;
        const long value = strtol(at, &end, 10);
        if (end == at) return at[strspn(at, " \t\r\n")] == 0 ? n : -1;
        if (n == REQUEST_TOKENS_MAX || value < INT32_MIN || value > INT32_MAX) return -1;
        tokens[n++] = (int32_t)value;
        at = end;
    }
}

static int score_lines(const options *o, paged_engine *engine, FILE *in) {
    char *line = NULL;
    size_t capacity = 0;
    int32_t *tokens = malloc(REQUEST_TOKENS_MAX * sizeof *tokens);
    int32_t *generated = malloc(((size_t)o->n_generate + 1) * sizeof *generated);
    float *gen_logprobs = malloc(((size_t)o->n_generate + 1) * sizeof *gen_logprobs);
    int rc = tokens && generated && gen_logprobs ? 0 : 1;
    while (rc == 0 && getline(&line, &capacity, in) > 0) {
        const int32_t n = parse_tokens(line, tokens);
        if (n > 0) rc = score(o, engine, tokens, n, generated, gen_logprobs);
        if (n < 0) rc = (fprintf(stderr, "tool_score: a line that is not a list of token ids\n"), 1);
    }
    free(gen_logprobs);
    free(generated);
    free(tokens);
    free(line);
    return rc;
}

static void log_line(void *user, paged_log_level level, const char *line) {
    (void)user;
    (void)level;
    fprintf(stderr, "%s\n", line);
}

int main(int argc, char **argv) {
    options o = {.engine = {.struct_size = sizeof o.engine}};
    if (!parse(&o, argc, argv)) return 2;
    paged_log_set(log_line, NULL, PAGED_LOG_WARN);

    paged_error err = {0};
    paged_model *model = NULL;
    paged_engine *engine = NULL;
    FILE *in = o.tokens_path ? fopen(o.tokens_path, "r") : stdin;
    int rc = 1;
    if (!in)
        perror(o.tokens_path);
    else if (paged_model_load(o.model_path, NULL, &model, &err))
        rc = fail("load", &err);
    else if (paged_engine_create(model, &o.engine, &engine, &err))
        rc = fail("engine", &err);
    else
        rc = score_lines(&o, engine, in);

    paged_engine_free(engine);
    paged_model_free(model);
    if (in && in != stdin) fclose(in);
    return rc;
}
