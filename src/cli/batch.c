/* cli/batch.c: paged batch: a file of requests in, a file of answers out, in the format of the OpenAI batch
 * API.
 *
 * Requests run side by side; an answer is written, in one line, when it is there. With --output a run that
 * was stopped goes on where it was: what has an answer in the file (by its custom_id; a request without one
 * by its line) is left out, and a last line that is not complete is removed first.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"
#include "cli/cli.h"
#include "cli/plan.h"
#include "cli/session.h"
#include "server/openai.h"

enum { PARALLEL_MAX = 1024 };

typedef struct batch_options {
    const char *model, *input, *output;
    int32_t parallel, log_level;
    bool quiet, stats;
    paged__sampling_options sampling;
    paged__memory_options memory;
    paged__places_options places;
} batch_options;

#define AT(field) offsetof(batch_options, field)
static const paged__option options_table[] = {
    {.kind = PAGED__OPTION_HEADING, .name = "What to run"},
    {PAGED__OPTION_OPERAND, 0, "FILE", NULL, AT(input), 0, 0, NULL,
     "requests, a line each ('-': stdin): {\"custom_id\": \"1\", \"url\":\n\"/v1/chat/completions\", "
     "\"body\": {\"messages\": "
     "[…]}}"},
    {PAGED__OPTION_TEXT, 'o', "output", "FILE", AT(output), 0, 0, NULL,
     "answers, a line each; what is in it already is not computed\nagain (default: stdout)"},
    PAGED__MODEL_ROW(batch_options, model),
    {PAGED__OPTION_INT, 0, "parallel", "N", AT(parallel), 1, PARALLEL_MAX, NULL,
     "requests at once at most (default: 8)"},
    {.kind = PAGED__OPTION_HEADING, .name = "Generation, where a request says nothing else"},
    PAGED__SAMPLING_ROWS(batch_options, sampling),
    {.kind = PAGED__OPTION_HEADING, .name = "Memory and threads"},
    PAGED__MEMORY_ROWS(batch_options, memory),
    {.kind = PAGED__OPTION_HEADING, .name = "What outlives this process"},
    PAGED__PLACES_ROWS(batch_options, places),
    {.kind = PAGED__OPTION_HEADING, .name = "Output"},
    {PAGED__OPTION_FLAG, 0, "stats", NULL, AT(stats), 0, 0, NULL,
     "what the scheduler and the cache counted on stderr at the end"},
    {PAGED__OPTION_FLAG, 'q', "quiet", NULL, AT(quiet), 0, 0, NULL,
     "no memory plan, no notes, no progress bar"},
    {PAGED__OPTION_CHOICE, 0, "log-level", "LEVEL", AT(log_level), 0, 0, paged__log_levels,
     "error, warn, info or debug (default: warn; with --quiet error)"},
};
#undef AT

typedef struct job {
    json_t *line; /* owned; NULL: the slot is free */
    uint64_t id;
    paged__openai_request request;
    paged__openai_answer answer;
} job;

typedef struct batch {
    paged__session session;
    paged__openai_world world;
    batch_options options;
    FILE *in, *out;   /* out NULL: stdout */
    bool made_output; /* there was none */
    char *line;       /* of getline(); owned */
    size_t line_capacity;
    json_t *done;    /* set of custom_ids that have an answer */
    json_t *refused; /* set of lines without one that were answered by an earlier run */
    job *jobs;       /* [parallel] */
    int32_t n_running;
    int64_t n_lines, n_read, n_answered, n_refused, n_skipped, n_tokens;
    bool at_end;
} batch;

/* Requests without a usable custom_id are refused, and told apart by their line. */
static json_t *find_line(const batch *b, int64_t n, bool add) {
    char key[32];
    snprintf(key, sizeof key, "%lld", (long long)n);
    if (add) json_object_set_new(b->refused, key, json_true());
    return json_object_get(b->refused, key);
}

static const char *custom_id(const json_t *line) {
    const char *id = json_string_value(json_object_get(line, "custom_id"));
    return id ? id : "";
}

/* ---- files ---- */

/* What an earlier run has answered; cuts off a line that it did not finish. */
static int read_output(batch *b) {
    const char *path = b->options.output;
    FILE *file = fopen(path, "r+e");
    b->made_output = !file && errno == ENOENT;
    if (b->made_output) return PAGED__EXIT_OK;
    if (!file) return paged__error(b->session.cli, "cannot open %s: %s", path, strerror(errno));
    off_t good = 0;
    int code = PAGED__EXIT_OK;
    for (ssize_t n; (n = getline(&b->line, &b->line_capacity, file)) > 0;) {
        json_t *line = b->line[n - 1] == '\n' ? json_loadb(b->line, (size_t)n, 0, NULL) : NULL;
        if (!line && b->line[n - 1] != '\n') break; /* the last one, cut off */
        const char *id = custom_id(line);
        if (!line || !json_object_get(line, "custom_id")) {
            code =
                paged__error(b->session.cli,
                             "%s holds a line that is no answer; it is left alone: name another file", path);
        } else if (id[0]) {
            json_object_set_new(b->done, id, json_true());
        } else {
            find_line(b, json_integer_value(json_object_get(line, "line")), true);
        }
        json_decref(line);
        if (code != PAGED__EXIT_OK) break;
        good += n;
    }
    if (code == PAGED__EXIT_OK && ftruncate(fileno(file), good) != 0)
        code = paged__error(b->session.cli, "cannot write %s: %s", path, strerror(errno));
    fclose(file);
    return code;
}

static int open_files(batch *b) {
    const batch_options *o = &b->options;
    paged__cli *cli = b->session.cli;
    if (!o->input)
        return paged__usage_error(cli, "no file of requests: paged batch FILE ('-' for standard input)");
    b->in = strcmp(o->input, "-") == 0 ? stdin : fopen(o->input, "re");
    struct stat facts;
    if (!b->in) return paged__error(cli, "cannot open %s: %s", o->input, strerror(errno));
    if (fstat(fileno(b->in), &facts) == 0 && S_ISDIR(facts.st_mode))
        return paged__error(cli, "%s is a folder", o->input);
    if (b->in != stdin && S_ISREG(facts.st_mode)) {
        for (int c = 0, last = '\n'; c != EOF; last = c) {
            c = getc_unlocked(b->in);
            b->n_lines += c == '\n' || (c == EOF && last != '\n');
        }
        rewind(b->in);
    }
    if (!o->output) return PAGED__EXIT_OK;
    const int code = read_output(b);
    if (code != PAGED__EXIT_OK) return code;
    b->out = fopen(o->output, "ae");
    return b->out ? PAGED__EXIT_OK : paged__error(cli, "cannot open %s: %s", o->output, strerror(errno));
}

/* ---- answers ---- */

/* Takes the reference to body. */
static int write_answer(batch *b, const json_t *line, int status, json_t *body, uint64_t id) {
    char name[40], request[40];
    snprintf(name, sizeof name, "batch_req_%lld", (long long)b->n_answered + 1);
    snprintf(request, sizeof request, "req_%llu", (unsigned long long)id);
    json_t *own_id = json_object_get(line, "custom_id");
    json_t *answer = json_pack("{s:s, s:O, s:{s:i, s:s, s:o}, s:n}", "id", name, "custom_id",
                               own_id ? own_id : json_null(), "response", "status_code", status, "request_id",
                               request, "body", body, "error");
    if (answer && !own_id) json_object_set_new(answer, "line", json_integer(b->n_read));
    char *text = answer ? json_dumps(answer, JSON_COMPACT | JSON_REAL_PRECISION(9)) : NULL;
    json_decref(answer);
    if (!text) return paged__error(b->session.cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
    int code = PAGED__EXIT_OK;
    b->n_answered++;
    if (!b->out) {
        paged__term_clear(&b->session.cli->term);
        paged__out_write(b->session.cli, text, strlen(text));
        paged__out_write(b->session.cli, "\n", 1);
        if (!paged__out_flush(b->session.cli)) code = PAGED__EXIT_ERROR; /* told by paged__out_end() */
    } else if (fprintf(b->out, "%s\n", text) < 0 || fflush(b->out) != 0) {
        code = paged__error(b->session.cli,
                            "cannot write %s: %s; %lld answers are in it, the same command goes on",
                            b->options.output, strerror(errno), (long long)b->n_answered - 1);
    }
    free(text);
    return code;
}

static int refuse(batch *b, const json_t *line, const paged_error *err) {
    const char *code = err->status == PAGED_ERR_TOO_LONG      ? "context_length_exceeded"
                       : err->status == PAGED_ERR_UNSUPPORTED ? "unsupported"
                                                              : "invalid_request";
    b->n_refused++;
    return write_answer(b, line, err->status == PAGED_ERR_UNSUPPORTED ? 501 : 400,
                        paged__openai_error(err->message, "invalid_request_error", NULL, code), 0);
}

/* ---- requests ---- */

/* What the server does besides, and a file does not need. */
static bool one_answer(const paged__openai_request *request, paged_error *err) {
    const char *what = request->n_prompts > 1 || request->request.n > 1 ? "more than one answer to a request"
                       : request->echo                                  ? "echo"
                       : request->stream                                ? "stream"
                                                                        : NULL;
    if (what) paged__fail(err, PAGED_ERR_UNSUPPORTED, "%s is not supported in a batch", what);
    return !what;
}

static bool submit(batch *b, job *j, paged_error *err) {
    const json_t *url = json_object_get(j->line, "url");
    const char *path = json_string_value(url);
    const bool is_chat = path && strcmp(path, "/v1/chat/completions") == 0;
    if (!is_chat && !(path && strcmp(path, "/v1/completions") == 0)) {
        paged__fail(err, PAGED_ERR_UNSUPPORTED,
                    "url is '%.100s'; /v1/chat/completions and /v1/completions are answered",
                    path ? path : "");
        return false;
    }
    const json_t *body = json_object_get(j->line, "body");
    return paged__openai_parse(&b->world, body, is_chat, &j->request, err) && one_answer(&j->request, err) &&
           paged_engine_submit(b->session.engine, &j->request.request, &j->id, err) == PAGED_OK;
}

static void clear_job(job *j) {
    json_decref(j->line);
    paged__openai_free(&j->request);
    paged__openai_answer_free(&j->answer);
    *j = (job){0};
}

/* The next request that has no answer yet, submitted in slot j. False, with *code: the file has ended or
 * cannot be read. */
static bool next_request(batch *b, job *j, int *code) {
    ssize_t n;
    while (*code == PAGED__EXIT_OK && (n = getline(&b->line, &b->line_capacity, b->in)) > 0) {
        paged_error err = {0};
        json_error_t where;
        b->n_read++;
        if ((size_t)n == strspn(b->line, " \t\r\n")) continue;
        if (find_line(b, b->n_read, false)) {
            b->n_skipped++;
            continue;
        }
        j->line = json_loadb(b->line, (size_t)n, JSON_REJECT_DUPLICATES, &where);
        const char *id = custom_id(j->line);
        if (!json_is_object(j->line)) {
            paged__fail(&err, PAGED_ERR_INVALID_ARG, "line %lld is no JSON object: %s", (long long)b->n_read,
                        j->line ? "another value" : where.text);
        } else if (!id[0]) {
            paged__fail(&err, PAGED_ERR_INVALID_ARG, "line %lld has no custom_id, a string",
                        (long long)b->n_read);
        } else if (json_object_get(b->done, id)) {
            b->n_skipped++;
            clear_job(j);
            continue;
        } else {
            json_object_set_new(b->done, id,
                                json_true()); /* the second of two equal ones is left out as well */
            if (submit(b, j, &err)) return true;
        }
        *code = refuse(b, j->line, &err);
        clear_job(j);
    }
    if (*code == PAGED__EXIT_OK && ferror(b->in))
        *code = paged__error(b->session.cli, "cannot read %s: %s", b->options.input, strerror(errno));
    b->at_end = true;
    return false;
}

static int fill(batch *b) {
    int code = PAGED__EXIT_OK;
    for (int32_t i = 0; i < b->options.parallel && !b->at_end && code == PAGED__EXIT_OK; i++)
        if (!b->jobs[i].line && next_request(b, &b->jobs[i], &code)) b->n_running++;
    return code;
}

static json_t *body_of(const batch *b, const job *j) {
    char id[40];
    snprintf(id, sizeof id, "%s-%llu", j->request.is_chat ? "chatcmpl" : "cmpl", (unsigned long long)j->id);
    return paged__openai_body(&b->world, &j->request, &j->answer, id, (int64_t)time(NULL));
}

/* Takes what is new of every request, and writes those that ended. */
static int collect(batch *b) {
    int code = PAGED__EXIT_OK;
    for (int32_t i = 0; i < b->options.parallel && code == PAGED__EXIT_OK; i++) {
        job *j = &b->jobs[i];
        paged_output out;
        if (!j->line) continue;
        const paged_status status = paged_engine_read(b->session.engine, j->id, &out);
        if (status != PAGED_OK) return paged__error(b->session.cli, "%s", paged_status_text(status));
        if (!paged__openai_take(&j->answer, &j->request, &out))
            return paged__error(b->session.cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
        if (out.finish == PAGED_FINISH_NONE) continue;
        b->n_tokens += out.completion_tokens;
        if (out.finish == PAGED_FINISH_ERROR)
            code = write_answer(
                b, j->line, 500,
                paged__openai_error(paged_status_text(out.error), "server_error", NULL, "failed"), j->id);
        else
            code = write_answer(b, j->line, 200, body_of(b, j), j->id);
        paged_engine_release(b->session.engine, j->id);
        clear_job(j);
        b->n_running--;
    }
    return code;
}

static int run_all(batch *b) {
    int code = PAGED__EXIT_OK;
    const uint64_t start = paged__now_ns();
    paged__interrupt_keep(true);
    while (code == PAGED__EXIT_OK) {
        if (!b->at_end) code = fill(b);
        if (code != PAGED__EXIT_OK || b->n_running == 0) break;
        paged_error err;
        if (paged_engine_step(b->session.engine, NULL, &err))
            return paged__error(b->session.cli, "%s", err.message);
        code = collect(b);
        if (!b->options.quiet && b->n_lines > 0)
            paged__term_progress(&b->session.cli->term, "requests",
                                 (double)(b->n_answered + b->n_skipped) / (double)b->n_lines);
        if (paged__interrupt_taken()) code = PAGED__EXIT_INTERRUPTED;
    }
    const double seconds = (double)(paged__now_ns() - start) * 1e-9;
    paged__term_clear(&b->session.cli->term);
    paged__note(b->session.cli,
                "%lld answered (%lld refused), %lld were answered before; %lld tokens in %.1f s, %.1f/s%s",
                (long long)b->n_answered, (long long)b->n_refused, (long long)b->n_skipped,
                (long long)b->n_tokens, seconds, seconds > 0 ? (double)b->n_tokens / seconds : 0.0,
                code == PAGED__EXIT_INTERRUPTED && b->out ? "; the same command goes on" : "");
    if (b->options.stats) paged__session_print_stats(&b->session);
    return code;
}

static int batch_command(paged__cli *cli, int argc, char **argv) {
    static const batch_options defaults = {.parallel = 8,
                                           .sampling = PAGED__SAMPLING_DEFAULTS,
                                           .memory = PAGED__MEMORY_DEFAULTS,
                                           .places = PAGED__PLACES_DEFAULTS,
                                           .log_level = -1};
    batch b = {.options = defaults, .session.cli = cli};
    batch_options *o = &b.options;
    int code;
    if (!paged__args_parse(cli, &paged__command_batch, argc, argv, o, &code)) return code;
    cli->quiet = o->quiet;
    if (o->log_level < 0) o->log_level = o->quiet ? PAGED_LOG_ERROR : PAGED_LOG_WARN;
    paged__log_to_stderr(cli, (paged_log_level)o->log_level);
    paged__interrupt_catch(cli);
    b.done = json_object();
    b.refused = json_object();
    b.jobs = paged__calloc((size_t)o->parallel, sizeof *b.jobs);
    code = b.done && b.refused && b.jobs ? open_files(&b)
                                         : paged__error(cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
    if (code == PAGED__EXIT_OK)
        code = paged__session_load(&b.session, cli, o->model, (paged_linear)o->memory.linear);
    if (code == PAGED__EXIT_OK) code = paged__session_start(&b.session, &o->memory, o->parallel, &o->places);
    if (code == PAGED__EXIT_OK) {
        paged_engine_info info;
        paged_engine_get_info(b.session.engine, &info);
        paged__plan_note(cli, &b.session.info, &info, b.session.model_path);
        b.world = paged__session_world(&b.session, &o->sampling);
        code = run_all(&b);
    } else if (b.out && b.made_output) { /* nothing ran; another run may have begun to write there */
        struct stat facts;
        if (fstat(fileno(b.out), &facts) == 0 && facts.st_size == 0) unlink(o->output);
    }
    for (int32_t i = 0; b.jobs && i < o->parallel; i++) clear_job(&b.jobs[i]);
    paged__session_close(&b.session);
    if (b.in && b.in != stdin) fclose(b.in);
    if (b.out && fclose(b.out) != 0 && code == PAGED__EXIT_OK)
        code = paged__error(cli, "cannot write %s: %s", o->output, strerror(errno));
    json_decref(b.done);
    json_decref(b.refused);
    paged__free(b.jobs);
    free(b.line);
    return code;
}

const paged__command paged__command_batch = {
    .name = "batch",
    .purpose = "answer a file of requests (OpenAI batch format)",
    .usage = "FILE --output FILE --model FILE [options]",
    .example = "paged batch requests.jsonl --output answers.jsonl --model model.gguf",
    .options = options_table,
    .n_options = sizeof options_table / sizeof options_table[0],
    .run = batch_command,
};
