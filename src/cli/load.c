/* cli/load.c: see load.h. */
#include "cli/load.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

enum { TOKENS_MAX = 1 << 29 }; /* of a prompt or an answer; both together are an int32_t */

/* What is read: lines of a text that ends with a 0. */
typedef struct reader {
    paged__cli *cli;
    const char *path;
    char *at;
    int32_t line; /* number of the last line taken */
    paged__buffer requests;
} reader;

/* The next line with something in it, ended by a 0; NULL: none is left. */
static char *next_line(reader *r) {
    while (*r->at) {
        char *line = r->at, *end = strchr(line, '\n');
        r->at = end ? end + 1 : line + strlen(line);
        r->line++;
        if (end) *end = 0;
        line[strcspn(line, "\r")] = 0;
        if (line[strspn(line, " \t")]) return line;
    }
    return NULL;
}

static int add(reader *r, int64_t n_prompt, int64_t n_output) {
    if (n_prompt < 0 || n_output < 0 || n_prompt > TOKENS_MAX || n_output > TOKENS_MAX)
        return paged__error(r->cli,
                            "%s, line %d: a prompt of %lld and an answer of %lld tokens; 0 to %d each",
                            r->path, r->line, (long long)n_prompt, (long long)n_output, TOKENS_MAX);
    paged_plan_request request = {(int32_t)n_prompt, PAGED_MAX(1, (int32_t)n_output)};
    if (n_prompt == 0 || paged__buffer_append(&r->requests, &request, sizeof request)) return PAGED__EXIT_OK;
    return paged__error(r->cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
}

/* ---- CSV ---- */

static const char *const columns[][2] = {{"ContextTokens", "GeneratedTokens"},
                                         {"Request tokens", "Response tokens"},
                                         {"num_prefill_tokens", "num_decode_tokens"}};

/* Field i of a line, its length in *len; NULL: the line has no so many. */
static const char *field(const char *line, int32_t i, size_t *len) {
    while (i-- > 0) {
        line = strchr(line, ',');
        if (!line) return NULL;
        line++;
    }
    *len = strcspn(line, ",");
    return line;
}

static int32_t find_column(const char *heading, const char *name) {
    const char *text;
    size_t len;
    for (int32_t i = 0; (text = field(heading, i, &len)) != NULL; i++) {
        if (len == strlen(name) && memcmp(text, name, len) == 0) return i;
    }
    return -1;
}

static bool take_number(const char *line, int32_t column, int64_t *n) {
    size_t len;
    char *end;
    const char *text = field(line, column, &len);
    if (!text || len == 0) return false;
    errno = 0;
    *n = strtoll(text, &end, 10);
    return errno == 0 && end == text + len;
}

static int read_csv(reader *r, const char *heading) {
    int32_t prompt = -1, output = -1;
    for (size_t i = 0; i < sizeof columns / sizeof columns[0] && (prompt < 0 || output < 0); i++) {
        prompt = find_column(heading, columns[i][0]);
        output = find_column(heading, columns[i][1]);
    }
    if (prompt < 0 || output < 0)
        return paged__error(r->cli,
                            "%s is no trace that this reads: its first line has neither the columns "
                            "ContextTokens and GeneratedTokens, Request tokens and Response tokens, "
                            "num_prefill_tokens and num_decode_tokens, nor is it a JSON object",
                            r->path);
    const char *line;
    int code = PAGED__EXIT_OK;
    while (code == PAGED__EXIT_OK && (line = next_line(r)) != NULL) {
        int64_t n_prompt, n_output;
        if (!take_number(line, prompt, &n_prompt) || !take_number(line, output, &n_output))
            return paged__error(r->cli, "%s, line %d: columns %d and %d are no numbers of tokens", r->path,
                                r->line, prompt + 1, output + 1);
        code = add(r, n_prompt, n_output);
    }
    return code;
}

/* ---- JSON lines ---- */

static int read_json(reader *r, const char *line) {
    int code = PAGED__EXIT_OK;
    for (; line && code == PAGED__EXIT_OK; line = next_line(r)) {
        json_error_t error;
        json_t *row = json_loads(line, 0, &error);
        if (!row) return paged__error(r->cli, "%s, line %d: %s", r->path, r->line, error.text);
        const json_t *n_prompt = json_object_get(row, "input_length");
        const json_t *n_output = json_object_get(row, "output_length");
        if (json_is_integer(n_prompt) && json_is_integer(n_output))
            code = add(r, json_integer_value(n_prompt), json_integer_value(n_output));
        else
            code = paged__error(r->cli, "%s, line %d: input_length and output_length are no whole numbers",
                                r->path, r->line);
        json_decref(row);
    }
    return code;
}

/* ---- all of it ---- */

int paged__load_read(paged__cli *cli, const char *path, paged__load *load) {
    paged__buffer text = {0};
    int code = paged__text_take(cli, NULL, path, &text);
    if (code != PAGED__EXIT_OK) return code;
    reader r = {.cli = cli, .path = path, .at = text.data};
    if (strlen(text.data) != text.len) {
        code = paged__error(cli, "%s is no text: byte %zu is 0", path, strlen(text.data));
    } else {
        const char *first = next_line(&r);
        if (!first)
            code = paged__error(cli, "%s is empty", path);
        else
            code = first[strspn(first, " \t")] == '{' ? read_json(&r, first) : read_csv(&r, first);
    }
    if (code == PAGED__EXIT_OK && r.requests.len == 0)
        code = paged__error(cli, "%s has no request with a prompt", path);
    paged__buffer_free(&text);
    if (code != PAGED__EXIT_OK) {
        paged__buffer_free(&r.requests);
        return code;
    }
    *load = (paged__load){.name = path,
                          .requests = (paged_plan_request *)(void *)r.requests.data,
                          .n_requests = (int32_t)(r.requests.len / sizeof(paged_plan_request))};
    return PAGED__EXIT_OK;
}

/* Log-normal, cut to 1 … longest. The state is moved on by two. */
static int32_t draw(uint64_t *state, double median, double mean, int32_t longest) {
    const double scale = 0x1p-53;
    double u = ((double)(paged__rand(state) >> 11) + 0.5) * scale;
    double v = ((double)(paged__rand(state) >> 11) + 0.5) * scale;
    /* Box and Muller's method. The mean of a log-normal is its median × exp(sigma² / 2). */
    double normal = sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
    double length = median * exp(normal * sqrt(2 * log(mean / median)));
    return (int32_t)PAGED_MAX(1, PAGED_MIN(longest, lround(length)));
}

int paged__load_generate(paged__cli *cli, paged__load *load) {
    enum { N = 1000 };
    uint64_t state = 1;
    *load = (paged__load){.name = "made up, with the lengths of ShareGPT", .n_requests = N};
    load->requests = paged__alloc(N, sizeof *load->requests);
    if (!load->requests) return paged__error(cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
    for (int32_t i = 0; i < N; i++) {
        load->requests[i].n_prompt = draw(&state, 731, 857, 3998);
        load->requests[i].n_output = draw(&state, 632, 652, 1021);
    }
    return PAGED__EXIT_OK;
}

int paged__load_cut(paged__cli *cli, paged__load *load, int32_t max_tokens) {
    int32_t n = 0, shortest = INT32_MAX;
    int64_t n_steps = 0;
    for (int32_t i = 0; i < load->n_requests; i++) {
        int32_t n_tokens = load->requests[i].n_prompt + load->requests[i].n_output;
        shortest = PAGED_MIN(shortest, n_tokens);
        if (n_tokens > max_tokens) continue;
        n_steps += load->requests[i].n_output;
        load->requests[n++] = load->requests[i];
    }
    load->n_left_out = load->n_requests - n;
    load->n_requests = n;
    if (n_steps > PAGED__STEPS_MAX)
        return paged__error(cli, "the answers of the load have %lld tokens; at most %d can be planned",
                            (long long)n_steps, PAGED__STEPS_MAX);
    if (n) return PAGED__EXIT_OK;
    return paged__error(cli,
                        "the shortest request of the load has %d tokens, the context %d; give a larger --ctx",
                        shortest, max_tokens);
}

void paged__load_free(paged__load *load) {
    paged__free(load->requests);
    *load = (paged__load){0};
}
