/* server/generate.c: see generate.h.
 *
 *   generation ── conn (whose work it is) ── request, body
 *       └── answers [n_answers]: id ─> server->running[id % BUCKETS] ─> next in the bucket
 *
 * An answer whose client is full is left alone: the service parks the request and keeps what it made, at most
 * ring_tokens of it. on_room goes on.
 */
#include "server/generate.h"

#include <stdlib.h>
#include <time.h>

#include "base/base.h"
#include "server/metrics.h"
#include "server/route.h"
#include "server/slots.h"

typedef paged__generation generation;

typedef struct paged__running {
    struct paged__running *next; /* in its bucket */
    generation *owner;
    uint64_t id; /* 0: not submitted, or released */
    int32_t index;
    bool has_begun, has_ended, is_blocked;
    int32_t slot; /* see slots.h */
    int64_t text_offset;
    uint64_t last_ns; /* of its newest token */
    paged__openai_answer answer;
    paged__buffer plain; /* of a stream: what a chunk of nothing but text begins with */
} paged__running;

struct generation {
    paged__conn *conn;
    json_t *body; /* owned; the request borrows from it */
    paged__openai_request request;
    paged__running *answers;
    int32_t n_answers, n_ended;
    uint64_t submit_ns;
    int64_t created;
    char id[64];
    paged__buffer event; /* of a stream, used again and again */
    paged__buffer head;  /* what every chunk begins with */
    paged__ending ending;
    paged__buffer made; /* int32_t: the tokens of the first answer, if somebody wants to know its ending */
};

/* ---- the table of answers ---- */

static paged__running **bucket_of(paged__server *s, uint64_t id) {
    return &s->running[id % PAGED__RUNNING_BUCKETS];
}

static void add_running(paged__server *s, paged__running *a) {
    paged__running **bucket = bucket_of(s, a->id);
    a->next = *bucket;
    *bucket = a;
    s->n_running++;
}

static void set_blocked(paged__running *a, bool blocked) {
    a->owner->conn->server->n_blocked += blocked - a->is_blocked;
    a->is_blocked = blocked;
}

/* Out of the table, and the engine's blocks with it. */
static void release(paged__running *a) {
    paged__server *s = a->owner->conn->server;
    if (a->id == 0) return;
    paged__slots_end(s, a->slot);
    paged__running **at = bucket_of(s, a->id);
    while (*at != a) at = &(*at)->next;
    *at = a->next;
    set_blocked(a, false);
    if (!a->has_ended) s->n_running--;
    paged_service_release(s->service, a->id);
    a->id = 0;
}

static void free_generation(generation *g) {
    for (int32_t i = 0; g->answers && i < g->n_answers; i++) {
        release(&g->answers[i]);
        paged__openai_answer_free(&g->answers[i].answer);
        paged__buffer_free(&g->answers[i].plain);
    }
    paged__free(g->answers);
    paged__openai_free(&g->request);
    paged__buffer_free(&g->event);
    paged__buffer_free(&g->head);
    paged__buffer_free(&g->made);
    json_decref(g->body);
    paged__free(g);
}

/* Detached from its connection, so that the answer may be ended after it. */
static void tell_gone(generation *g) {
    if (g->ending.gone) g->ending.gone(g->conn->server, g->ending.user);
    g->ending = (paged__ending){0};
}

static void on_gone(paged__conn *conn) {
    generation *g = conn->work;
    static const paged_output left = {0};
    for (int32_t i = 0; i < g->n_answers; i++)
        if (!g->answers[i].has_ended)
            paged__metrics_ended(conn->server->metrics, &left,
                                 (double)(paged__now_ns() - g->submit_ns) * 1e-9);
    tell_gone(g);
    free_generation(g);
}

/* ---- streams ---- */

static bool wants_prompt_only(const generation *g) {
    return g->request.echo && g->request.request.max_tokens == 0;
}

/* `data: {…}` and a blank line, from a JSON value that it takes. */
static void send_value(generation *g, json_t *value) {
    char *text = value ? json_dumps(value, JSON_COMPACT | JSON_REAL_PRECISION(9)) : NULL;
    json_decref(value);
    g->event.len = 0;
    if (text && paged__buffer_printf(&g->event, "data: %s\n\n", text))
        paged__stream_write(g->conn, g->event.data, g->event.len);
    free(text);
}

static bool begin_chunk(generation *g) {
    json_t *name = paged__json_text(g->conn->server->world.name, strlen(g->conn->server->world.name));
    char *model = name ? json_dumps(name, JSON_ENCODE_ANY) : NULL;
    const bool ok = model && paged__buffer_printf(
                                 &g->head,
                                 "data: {\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":"
                                 "%s,\"system_fingerprint\":\"paged-" PAGED_VERSION_STRING "\",\"choices\":[",
                                 g->id, g->request.is_chat ? "chat.completion.chunk" : "text_completion",
                                 (long long)g->created, model);
    json_decref(name);
    free(model);
    return ok;
}

/* Text and nothing else: what there is once a token, so the rest is made once. */
static void send_text(generation *g, paged__running *a, const char *text, size_t len) {
    static const char end[] = ",\"logprobs\":null,\"finish_reason\":null}]}\n\n";
    const char *chat_end = g->request.is_chat ? "}" : "";
    paged__buffer *e = &g->event;
    bool ok = true;
    if (a->plain.len == 0)
        ok = paged__buffer_append(&a->plain, g->head.data, g->head.len) &&
             paged__buffer_printf(&a->plain, "{\"index\":%d,%s:", a->index,
                                  g->request.is_chat ? "\"delta\":{\"content\"" : "\"text\"");
    e->len = 0;
    ok = ok && paged__buffer_append(e, a->plain.data, a->plain.len) && paged__buffer_json(e, text, len) &&
         paged__buffer_append(e, chat_end, strlen(chat_end)) && paged__buffer_append(e, end, sizeof end - 1);
    if (ok) paged__stream_write(g->conn, e->data, e->len);
}

/* One chunk of one choice. finish NULL: not yet. */
static void send_chunk(generation *g, paged__running *a, const char *text, size_t len, int32_t n_tokens,
                       bool with_role, const char *finish) {
    paged__buffer *e = &g->event;
    bool ok;
    e->len = 0;
    ok = paged__buffer_append(e, g->head.data, g->head.len) &&
         paged__buffer_printf(e, "{\"index\":%d,", a->index);
    if (g->request.is_chat) {
        ok = ok && paged__buffer_printf(e, "\"delta\":{%s", with_role ? "\"role\":\"assistant\"," : "");
        if (!finish || len > 0)
            ok = ok && paged__buffer_printf(e, "\"content\":") && paged__buffer_json(e, text, len);
        ok = ok && paged__buffer_append(e, "}", 1);
    } else {
        ok = ok && paged__buffer_printf(e, "\"text\":") && paged__buffer_json(e, text, len);
    }
    ok = ok && paged__buffer_printf(e, ",\"logprobs\":");
    if (n_tokens > 0 && g->request.request.logprobs) {
        json_t *value = paged__openai_logprobs(&g->conn->server->world, &g->request, &a->answer, NULL, 0,
                                               n_tokens, &a->text_offset);
        char *dump = json_dumps(value, JSON_COMPACT | JSON_REAL_PRECISION(9));
        ok = ok && dump && paged__buffer_append(e, dump, strlen(dump));
        json_decref(value);
        free(dump);
    } else {
        ok = ok && paged__buffer_printf(e, "null");
    }
    ok = ok && (finish ? paged__buffer_printf(e, ",\"finish_reason\":\"%s\"}]}\n\n", finish)
                       : paged__buffer_printf(e, ",\"finish_reason\":null}]}\n\n"));
    if (ok) paged__stream_write(g->conn, e->data, e->len);
}

static void begin_choice(generation *g, paged__running *a) {
    if (a->has_begun) return;
    a->has_begun = true;
    if (g->request.is_chat) send_chunk(g, a, "", 0, 0, true, NULL);
    if (!g->request.echo) return;
    paged__buffer text = {0};
    const paged__openai_prompt *prompt = &g->request.prompts[a->index / g->request.request.n];
    if (paged__openai_echo(&g->conn->server->world, prompt, &text))
        send_chunk(g, a, text.data ? text.data : "", text.len, 0, false, NULL);
    paged__buffer_free(&text);
}

static void stream_news(generation *g, paged__running *a, const paged_output *out) {
    const bool silent = wants_prompt_only(g);
    if (out->text_len == 0 && out->n_tokens == 0 && out->finish == PAGED_FINISH_NONE) return;
    begin_choice(g, a);
    if (!silent && out->n_tokens > 0 && g->request.request.logprobs)
        send_chunk(g, a, out->text, out->text_len, out->n_tokens, false, NULL);
    else if (!silent && out->text_len > 0)
        send_text(g, a, out->text, out->text_len);
    if (out->finish == PAGED_FINISH_STOP || out->finish == PAGED_FINISH_LENGTH)
        send_chunk(g, a, "", 0, 0, false, silent ? "length" : paged__openai_finish(out->finish));
}

/* ---- the end ---- */

static void count_tokens(const generation *g) {
    g->conn->prompt_tokens = g->conn->completion_tokens = 0;
    for (int32_t i = 0; i < g->n_answers; i++) {
        const paged_output *end = &g->answers[i].answer.end;
        if (i % g->request.request.n == 0) g->conn->prompt_tokens += end->prompt_tokens;
        g->conn->completion_tokens += end->completion_tokens;
    }
}

/* The answers of all, in one array as openai.h wants them; NULL: no memory. */
static paged__openai_answer *all_answers(const generation *g) {
    paged__openai_answer *all = paged__calloc((size_t)g->n_answers, sizeof *all);
    for (int32_t i = 0; all && i < g->n_answers; i++) all[i] = g->answers[i].answer;
    return all;
}

static json_t *usage_event(const generation *g) {
    const paged__server *s = g->conn->server;
    paged__openai_answer *all = all_answers(g);
    json_t *usage = all ? paged__openai_usage(&g->request, all) : NULL;
    paged__free(all);
    return json_pack("{s:s, s:s, s:I, s:o, s:s, s:[], s:o}", "id", g->id, "object",
                     g->request.is_chat ? "chat.completion.chunk" : "text_completion", "created",
                     (json_int_t)g->created, "model", paged__json_text(s->world.name, strlen(s->world.name)),
                     "system_fingerprint", "paged-" PAGED_VERSION_STRING, "choices", "usage", usage);
}

static void tell_end(generation *g) {
    paged__conn *conn = g->conn;
    g->ending = (paged__ending){0};
    if (g->request.stream) {
        if (g->request.include_usage) send_value(g, usage_event(g));
        paged__stream_write(conn, "data: [DONE]\n\n", 14);
        free_generation(g);
        paged__stream_end(conn);
        return;
    }
    if (g->request.request.prompt_logprobs) {
        for (int32_t i = 0; i < g->n_answers; i += g->request.request.n) {
            paged__openai_answer *first = &g->answers[i].answer;
            const int32_t *top1;
            int32_t n;
            if (paged_service_prompt_logprobs(conn->server->service, g->answers[i].id,
                                              &first->prompt_logprobs, &top1, &n) != PAGED_OK)
                first->prompt_logprobs = NULL;
            for (int32_t j = 1; j < g->request.request.n; j++)
                g->answers[i + j].answer.prompt_logprobs = first->prompt_logprobs;
        }
    }
    paged__openai_answer *all = all_answers(g);
    json_t *body = all ? paged__openai_body(&conn->server->world, &g->request, all, g->id, g->created) : NULL;
    paged__free(all);
    free_generation(g);
    paged__reply_json(conn, 200, body);
}

static void end_well(generation *g) {
    const paged__buffer *text = &g->answers[0].answer.text;
    const paged__ending ending = g->ending;
    count_tokens(g);
    /* Who holds it back may have ended it already. */
    if (ending.done && ending.done(g->conn->server, ending.user, text->data ? text->data : "", text->len, g))
        return;
    tell_end(g);
}

static void end_badly(generation *g, int status, const char *code, const char *message) {
    paged__conn *conn = g->conn;
    const bool stream = g->request.stream;
    count_tokens(g);
    tell_gone(g);
    if (stream) send_value(g, paged__openai_error(message, paged__error_type(status), NULL, code));
    free_generation(g);
    if (stream)
        paged__stream_end(conn);
    else
        paged__reply_error(conn, status, NULL, code, "%s", message);
}

void paged__generation_tokens(const generation *g, const int32_t **prompt, int32_t *n_prompt,
                              const int32_t **answer, int32_t *n_answer) {
    *prompt = g->request.prompts[0].tokens;
    *n_prompt = g->request.prompts[0].n_tokens;
    *answer = (const int32_t *)(const void *)g->made.data;
    *n_answer = (int32_t)(g->made.len / sizeof **answer);
}

void paged__generation_end(generation *g, const paged_error *err) {
    g->ending = (paged__ending){0};
    if (err) /* Not 503, which a balancer may take for "nothing has been done": it would be computed again. */
        end_badly(g, 500, "not_kept", err->message);
    else
        tell_end(g);
}

/* What happened to an answer that ended neither by stop nor by length; it ends the whole request. */
static void end_by(generation *g, const paged_output *end) {
    if (end->finish == PAGED_FINISH_READER)
        end_badly(g, 408, "reader_timeout", "the client took nothing for too long");
    else if (end->finish == PAGED_FINISH_ERROR)
        end_badly(g, 500, "failed", paged_status_text(end->error));
    else
        end_badly(g, 503, "cancelled", "the request was cancelled");
}

/* ---- news ---- */

static void measure(generation *g, paged__running *a, const paged_output *out) {
    paged__metrics *m = g->conn->server->metrics;
    const uint64_t now = paged__now_ns();
    if (out->n_tokens > 0) {
        const uint64_t before = a->last_ns ? a->last_ns : g->submit_ns;
        paged__metrics_tokens(m, a->last_ns == 0, out->n_tokens, (double)(now - before) * 1e-9);
        a->last_ns = now;
    }
    /* What was found in the cache was computed by no step. */
    const int32_t done = PAGED_MAX(a->answer.end.prompt_done, out->cached_tokens);
    g->conn->server->n_news_tokens += out->n_tokens + PAGED_MAX(out->prompt_done - done, 0);
    if (out->finish != PAGED_FINISH_NONE) paged__metrics_ended(m, out, (double)(now - g->submit_ns) * 1e-9);
}

/* Reads what is new of an answer. False: the generation is gone. */
static bool take_news(paged__running *a) {
    generation *g = a->owner;
    paged__server *s = g->conn->server;
    paged_output out;
    if (a->has_ended || a->id == 0) return true;
    if (g->request.stream && paged__stream_is_full(g->conn)) {
        set_blocked(a, true);
        return true;
    }
    set_blocked(a, false);
    const paged_status status = paged_service_read(s->service, a->id, 0, &out);
    if (status != PAGED_OK) {
        end_badly(g, 500, "failed", paged_status_text(status));
        return false;
    }
    measure(g, a, &out);
    paged__slots_take(s, a->slot, &out);
    /* Of a stream only what somebody waits for is kept. */
    if (g->request.stream) {
        if (!g->ending.done) a->answer.text.len = 0;
        a->answer.tokens.len = a->answer.logprobs.len = a->answer.top_logprobs.len = 0;
    }
    const bool is_wanted = g->ending.done && a->index == 0;
    if ((is_wanted &&
         !paged__buffer_append(&g->made, out.tokens, (size_t)out.n_tokens * sizeof *out.tokens)) ||
        !paged__openai_take(&a->answer, &g->request, &out)) {
        end_badly(g, 503, "no_memory", "no memory for the answer");
        return false;
    }
    if (g->request.stream) stream_news(g, a, &out);
    if (out.finish == PAGED_FINISH_NONE) return true;
    a->has_ended = true;
    s->n_running--;
    if (out.finish != PAGED_FINISH_STOP && out.finish != PAGED_FINISH_LENGTH) {
        end_by(g, &out);
        return false;
    }
    /* The log-probabilities of the prompt are borrowed until the release. */
    if (!g->request.request.prompt_logprobs) release(a);
    if (++g->n_ended < g->n_answers) return true;
    end_well(g);
    return false;
}

void paged__generate_news(paged__server *s) {
    enum { BATCH = 64 };
    uint64_t ids[BATCH];
    int32_t n;
    s->n_news_tokens = 0;
    s->reads_news = true;
    do {
        n = paged_service_ready(s->service, ids, BATCH);
        s->news_ns = paged__now_ns();
        for (int32_t i = 0; i < n; i++) {
            paged__running *a = *bucket_of(s, ids[i]);
            while (a && a->id != ids[i]) a = a->next;
            if (a) take_news(a);
        }
    } while (n == BATCH);
    paged__conn_flush_all(s);
    s->reads_news = false;
    paged__metrics_step(s->metrics, s->n_news_tokens);
}

static void on_room(paged__conn *conn) {
    generation *g = conn->work;
    for (int32_t i = 0; i < g->n_answers; i++)
        if (g->answers[i].is_blocked && !take_news(&g->answers[i])) return;
}

static void on_tick(paged__conn *conn) {
    const generation *g = conn->work;
    if (g->request.stream && !paged__stream_is_full(conn)) paged__stream_write(conn, ": ping\n\n", 8);
}

/* ---- the beginning ---- */

/* llama.cpp's word for it; -1: any. */
static int32_t wanted_slot(const generation *g) {
    const json_t *value = json_object_get(g->body, "id_slot");
    const json_int_t slot = json_is_integer(value) ? json_integer_value(value) : -1;
    return slot >= 0 && slot <= INT32_MAX ? (int32_t)slot : -1;
}

static bool submit_all(generation *g, paged_error *err) {
    const int32_t n = g->request.request.n;
    paged__server *s = g->conn->server;
    for (int32_t i = 0; i < g->request.n_prompts; i++) {
        paged_request request = g->request.request;
        uint64_t id;
        request.tokens = g->request.prompts[i].tokens;
        request.n_tokens = g->request.prompts[i].n_tokens;
        if (wants_prompt_only(g)) request.max_tokens = 1;
        if (!g->request.has_seed && request.seed == 0) request.seed = paged__mix(s->boot ^ ++s->n_requests);
        if (paged_service_submit(s->service, &request, &id, err) != PAGED_OK) return false;
        for (int32_t j = 0; j < n; j++) {
            paged__running *a = &g->answers[i * n + j];
            a->id = id + (uint64_t)j;
            a->slot = paged__slots_begin(s, &request, wanted_slot(g));
            add_running(s, a);
        }
    }
    s->news_ns = paged__now_ns();
    return true;
}

/* The name under which this model is served, the file's, or nothing. */
static bool is_known_model(const paged__server *s, const char *name) {
    const char *slash = strrchr(s->path, '/'), *file = slash ? slash + 1 : s->path;
    const size_t n = strlen(file), stem = n > 5 && strcmp(file + n - 5, ".gguf") == 0 ? n - 5 : n;
    return strcmp(name, s->world.name) == 0 || strcmp(name, s->path) == 0 || strcmp(name, file) == 0 ||
           (strlen(name) == stem && strncmp(name, file, stem) == 0);
}

static bool check_model(paged__conn *conn, const json_t *body) {
    const json_t *model = json_object_get(body, "model");
    if (!model || json_is_null(model)) return true;
    if (!json_is_string(model)) {
        paged__reply_error(conn, 400, "model", NULL, "model must be a string");
        return false;
    }
    if (is_known_model(conn->server, json_string_value(model))) return true;
    paged__reply_error(conn, 404, "model", "model_not_found",
                       "there is no model '%.100s' here; this is '%.200s'", json_string_value(model),
                       conn->server->world.name);
    return false;
}

/* The memory of a generation whose request has been read. */
static bool make_answers(generation *g) {
    g->n_answers = g->request.n_prompts * g->request.request.n;
    g->answers = paged__calloc((size_t)g->n_answers, sizeof *g->answers);
    if (!g->answers) return false;
    for (int32_t i = 0; i < g->n_answers; i++) {
        g->answers[i].owner = g;
        g->answers[i].index = i;
    }
    g->created = (int64_t)time(NULL);
    g->submit_ns = paged__now_ns();
    return true;
}

/* The answer's name ends in the engine's id of the request, so that it is found in /paged/blocks. */
static bool name_answer(generation *g, paged_error *err) {
    snprintf(g->id, sizeof g->id, "%s-%08x%08llx", g->request.is_chat ? "chatcmpl" : "cmpl",
             (unsigned)g->conn->server->boot, (unsigned long long)g->answers[0].id);
    if (!g->request.stream || begin_chunk(g)) return true;
    paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a stream");
    return false;
}

void paged__generate(paged__conn *conn, json_t *body, bool is_chat, const paged__ending *ending) {
    paged__server *s = conn->server;
    paged_error err = {.status = PAGED_ERR_NO_MEMORY, .message = "no memory for a request"};
    const char *param = NULL;
    if (paged__server_is_stalled(s)) {
        if (ending && ending->gone) ending->gone(s, ending->user);
        json_decref(body);
        paged__reply_stalled(conn);
        return;
    }
    generation *g = paged__calloc(1, sizeof *g);
    if (g) {
        *g = (generation){.conn = conn, .body = body};
        if (ending) g->ending = *ending;
    } else {
        if (ending && ending->gone) ending->gone(s, ending->user);
        json_decref(body);
        paged__reply_status(conn, &err, NULL);
        return;
    }
    bool ok = check_model(conn, body);
    const bool told = !ok;
    if (ok) {
        ok = paged__openai_parse(&s->world, body, is_chat, &g->request, &err);
        param = g->request.param;
        /* Here a limit is the client's; from the engine it says that the queue is full. */
        if (!ok && err.status == PAGED_ERR_LIMIT) err.status = PAGED_ERR_INVALID_ARG;
    }
    if (ok && g->request.stream && g->request.request.prompt_logprobs) {
        param = "stream";
        paged__fail(&err, PAGED_ERR_UNSUPPORTED, "logprobs of an echoed prompt cannot be streamed");
        ok = false;
    }
    if (ok && g->ending.n_known > 0)
        paged__openai_splice(&s->world, &g->request.prompts[0], g->ending.known, g->ending.n_known);
    ok = ok && make_answers(g) && submit_all(g, &err) && name_answer(g, &err);
    if (!ok) {
        tell_gone(g);
        free_generation(g);
        if (!told) paged__reply_status(conn, &err, param);
        return;
    }
    conn->work = g;
    conn->on_gone = on_gone;
    conn->on_room = on_room;
    conn->on_tick = on_tick;
    if (g->request.stream) paged__stream_begin(conn, "text/event-stream; charset=utf-8");
}
