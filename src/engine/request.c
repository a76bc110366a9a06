/* engine/request.c: the table of requests. A slot belongs to a request from submit to release; ids never come
 * again. */
#include <math.h>

#include "engine/engine.h"

enum {
    SALT_MAX = 1024,        /* bytes */
    KEEP_SINK_MAX = 1 << 24 /* tokens of an answer that outlives its context */
};

void paged_request_init(paged_request *request) {
    *request = (paged_request){.struct_size = sizeof *request, .top_p = 1.0f};
}

const char *paged_finish_name(paged_finish finish) {
    switch (finish) {
    case PAGED_FINISH_NONE:
        return "none";
    case PAGED_FINISH_STOP:
        return "stop";
    case PAGED_FINISH_LENGTH:
        return "length";
    case PAGED_FINISH_CANCELLED:
        return "cancelled";
    case PAGED_FINISH_ERROR:
        return "error";
    case PAGED_FINISH_DEADLINE:
        return "deadline";
    case PAGED_FINISH_READER:
        return "reader";
    case PAGED_FINISH_KINDS:
        break;
    }
    return "unknown";
}

const char *paged_wait_name(paged_wait wait) {
    static const char *const names[PAGED_WAIT_KINDS] = {
        [PAGED_WAIT_NONE] = "none",           [PAGED_WAIT_QUEUE] = "queue",
        [PAGED_WAIT_BLOCKS] = "blocks",       [PAGED_WAIT_PROMISE] = "promise",
        [PAGED_WAIT_PREEMPTED] = "preempted", [PAGED_WAIT_READER] = "reader",
        [PAGED_WAIT_STORE] = "store",
    };
    return wait >= 0 && wait < PAGED_WAIT_KINDS ? names[wait] : "unknown";
}

paged__request *paged__request_find(const paged_engine *e, uint64_t id) {
    for (int32_t i = 0; id && i < e->n_slots; i++)
        if (e->slots[i].id == id) return &e->slots[i];
    return NULL;
}

bool paged__request_is_parked(const paged_engine *e, const paged__request *r) {
    return e->max_unread > 0 && paged__n_made(r) - r->n_read >= e->max_unread;
}

static int32_t prompt_done(const paged__request *r) {
    return r->n_dropped ? r->n_prompt : PAGED_MIN(r->n_cached, r->n_prompt);
}

bool paged__request_has_news(const paged__request *r) {
    return paged__n_made(r) > r->n_read || prompt_done(r) > r->n_told ||
           (r->state == PAGED__FINISHED && !r->read_to_end);
}

/* ---- the two lists ---- */

static void remove_from(paged__request **list, int32_t *n, const paged__request *r) {
    int32_t i = 0;
    while (i < *n && list[i] != r) i++;
    if (i == *n) return;
    (*n)--;
    for (; i < *n; i++) list[i] = list[i + 1];
}

static bool ranks_before(const paged__request *a, const paged__request *b) {
    return a->rank_ns != b->rank_ns ? a->rank_ns < b->rank_ns : a->id < b->id;
}

static void insert_into(paged__request **list, int32_t *n, paged__request *r) {
    int32_t i = (*n)++;
    for (; i > 0 && ranks_before(r, list[i - 1]); i--) list[i] = list[i - 1];
    list[i] = r;
}

/* Out of its list, and out of the cache, where what it computed stays as long as there is room. */
static void leave(paged_engine *e, paged__request *r) {
    if (r->state == PAGED__RUNNING) {
        remove_from(e->running, &e->n_running, r);
        paged__load_leave(e, r);
        PAGED_ASSERT(paged_seq_free(e->cache, r->seq) == PAGED_OK);
        paged__stores_take(e); /* its last block may be wanted by others at once */
        r->seq = 0;
        r->awaits = false;
    } else if (r->state == PAGED__WAITING) {
        remove_from(e->waiting, &e->n_waiting, r);
    }
}

void paged__request_wait(paged_engine *e, paged__request *r, paged_wait why) {
    leave(e, r);
    r->state = PAGED__WAITING;
    r->wait = why;
    r->n_cached = r->blocks_used = 0;
    insert_into(e->waiting, &e->n_waiting, r);
}

void paged__request_run(paged_engine *e, paged__request *r) {
    remove_from(e->waiting, &e->n_waiting, r);
    r->state = PAGED__RUNNING;
    r->wait = PAGED_WAIT_NONE;
    r->n_came_with = r->n_tokens;
    insert_into(e->running, &e->n_running, r);
}

static int32_t whole_blocks(const paged_engine *e, int32_t n_tokens) {
    return (n_tokens + e->config.block_size - 1) / e->config.block_size * e->config.block_size;
}

/* What is kept is a prompt like any other: the request goes into the queue with it, finds the sink in the
 * cache and computes the rest at its new positions. So the answer goes on as that of a fresh request with
 * these tokens, bit for bit. Half of the others go at once, so that each is computed twice on average. */
void paged__request_drop_middle(paged_engine *e, paged__request *r) {
    const int32_t sink = whole_blocks(e, r->params.keep_sink), n_prompt = r->n_prompt - r->n_dropped_prompt;
    const int32_t n_drop = (r->n_tokens - sink) / 2 / e->config.block_size * e->config.block_size;
    r->n_tokens -= n_drop;
    memmove(r->tokens + sink, r->tokens + sink + n_drop, (size_t)(r->n_tokens - sink) * sizeof *r->tokens);
    r->n_dropped += n_drop;
    r->n_dropped_prompt += PAGED_MIN(n_drop, PAGED_MAX(n_prompt - sink, 0));
    e->stats.n_dropped += (uint64_t)n_drop;
    paged__request_wait(e, r, PAGED_WAIT_QUEUE);
}

void paged__request_finish(paged_engine *e, paged__request *r, paged_finish finish) {
    leave(e, r);
    if (r->stop && r->stop->found < 0) { /* what was held back is text after all */
        char bytes[PAGED_DETOK_MAX];
        const int32_t n = paged_detok_finish(&r->stop_detok, bytes);
        paged__stop_push(r->stop, bytes, (size_t)n, false);
        paged__stop_finish(r->stop);
    }
    r->state = PAGED__FINISHED;
    r->wait = PAGED_WAIT_NONE;
    r->finish = finish;
    r->last_ns = paged__engine_now(e);
    e->stats.n_finished[finish]++;
}

void paged__request_clear(paged_engine *e, paged__request *r) {
    if (r->state == PAGED__WAITING || r->state == PAGED__RUNNING)
        paged__request_finish(e, r, PAGED_FINISH_CANCELLED);
    if (r->params.keep_sink) paged__free(r->made);
    paged__free(r->tokens);
    paged__free(r->logprobs);
    paged__free(r->prompt_logprobs);
    paged__free(r->prompt_top1);
    paged__free(r->top_logprobs);
    paged__free((void *)(uintptr_t)r->params.logit_bias);
    paged__free((void *)(uintptr_t)r->params.stop_tokens);
    paged__free(r->stop);
    paged__free(r->text);
    paged__free(r->salt);
    r->id = 0; /* first, so that a cancel from elsewhere no longer finds it */
    r->cancel_id = 0;
    r->state = PAGED__FREE;
    r->finish = PAGED_FINISH_NONE;
    r->error = PAGED_OK;
    r->tokens = r->made = NULL;
    r->logprobs = r->prompt_logprobs = NULL;
    r->prompt_top1 = NULL;
    r->top_logprobs = NULL;
    r->params = (paged_request){0};
    r->stop = NULL;
    r->text = r->salt = NULL;
    r->text_capacity = r->text_len = r->n_given = 0;
    r->n_shown = 0;
    r->n_dropped = r->n_dropped_prompt = 0;
    r->n_prompt = r->max_new = r->n_tokens = r->n_cached = r->n_read = r->n_told = r->n_reused = r->n_loaded =
        r->blocks_used = 0;
    r->read_to_end = r->awaits = false;
    r->miss = PAGED_MISS_NONE;
    r->wait = PAGED_WAIT_NONE;
    r->choice = r->n_came_with = r->n_preemptions = 0;
    r->needed_bytes = 0;
    r->submit_ns = r->start_ns = r->first_ns = r->last_ns = r->deadline_ns = 0;
}

static paged_status check_sampling(const paged_engine *e, const paged_request *q, paged_error *err) {
    const struct {
        const char *name;
        float value, low, high;
    } ranges[] = {
        {"temperature", q->temperature, 0, INFINITY},
        {"top_p", q->top_p, 0, 1},
        {"min_p", q->min_p, 0, 1},
        {"repetition_penalty", q->repetition_penalty, 0, 100},
        {"presence_penalty", q->presence_penalty, -100, 100},
        {"frequency_penalty", q->frequency_penalty, -100, 100},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof ranges[0]; i++)
        if (!(ranges[i].value >= ranges[i].low && ranges[i].value <= ranges[i].high) ||
            isinf(ranges[i].value))
            return paged__fail(err, PAGED_ERR_INVALID_ARG, "%s is %g; it must lie in %g … %g", ranges[i].name,
                               (double)ranges[i].value, (double)ranges[i].low, (double)ranges[i].high);
    const struct {
        const char *name;
        const void *array;
        int32_t n, max;
    } lists[] = {
        {"logit_bias", q->logit_bias, q->n_logit_bias, PAGED_LOGIT_BIAS_MAX},
        {"stop_tokens", q->stop_tokens, q->n_stop_tokens, PAGED_STOP_TOKENS_MAX},
        {"stop", q->stop, q->n_stop, PAGED_STOPS_MAX},
    };
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++)
        if (lists[i].n < 0 || lists[i].n > lists[i].max || (lists[i].n > 0 && !lists[i].array))
            return paged__fail(err, PAGED_ERR_INVALID_ARG, "%s has %d entries%s; at most %d", lists[i].name,
                               lists[i].n, lists[i].array ? "" : " and is NULL", lists[i].max);
    for (int32_t i = 0; i < q->n_logit_bias; i++) {
        const paged_logit_bias b = q->logit_bias[i];
        if (b.token < 0 || b.token >= e->n_vocab || !isfinite(b.bias))
            return paged__fail(err, PAGED_ERR_INVALID_ARG,
                               "logit_bias %d is %g for token %d; the vocabulary ends at %d", i,
                               (double)b.bias, b.token, e->n_vocab - 1);
    }
    for (int32_t i = 0; i < q->n_stop_tokens; i++)
        if (q->stop_tokens[i] < 0 || q->stop_tokens[i] >= e->n_vocab)
            return paged__fail(err, PAGED_ERR_INVALID_ARG, "stop token %d is %d; the vocabulary ends at %d",
                               i, q->stop_tokens[i], e->n_vocab - 1);
    if (q->n_top_logprobs < 0 || q->n_top_logprobs > PAGED_TOP_LOGPROBS_MAX ||
        (q->n_top_logprobs && !q->logprobs))
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "n_top_logprobs is %d%s; 0 … %d", q->n_top_logprobs,
                           q->logprobs ? "" : " without logprobs", PAGED_TOP_LOGPROBS_MAX);
    if (q->min_tokens < 0 || (q->max_tokens > 0 && q->min_tokens > q->max_tokens))
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "min_tokens is %d, max_tokens %d", q->min_tokens,
                           q->max_tokens);
    return PAGED_OK;
}

static paged_status check_request(const paged_engine *e, const paged_request *q, paged_error *err) {
    if (!q->tokens || q->n_tokens < 1)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "the prompt is empty: %d tokens, at least 1 is needed",
                           q->n_tokens);
    if (q->max_tokens < 0)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "max_tokens is %d, less than 0", q->max_tokens);
    paged_status s = check_sampling(e, q, err);
    if (s) return s;
    if (q->priority < -PAGED_PRIORITY_MAX || q->priority > PAGED_PRIORITY_MAX || q->deadline_ms < 0)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "priority is %d (-%d … %d), deadline_ms %d (≥ 0)",
                           q->priority, PAGED_PRIORITY_MAX, PAGED_PRIORITY_MAX, q->deadline_ms);
    if (q->n < 1 || q->n > PAGED_CHOICES_MAX)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "n is %d; 1 … %d answers", q->n, PAGED_CHOICES_MAX);
    const int32_t sink = PAGED_MIN(q->keep_sink, e->n_ctx);
    if (sink < 0 || (sink && (!q->max_tokens || whole_blocks(e, sink) + 2 * e->config.block_size > e->n_ctx)))
        return paged__fail(
            err, PAGED_ERR_INVALID_ARG,
            "keep_sink is %d with max_tokens %d; it asks for max_tokens, and for two blocks of "
            "%d more in the context of %d",
            q->keep_sink, q->max_tokens, e->config.block_size, e->n_ctx);
    if (q->salt && strnlen(q->salt, SALT_MAX + 1) > SALT_MAX)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "the salt has more than %d bytes", SALT_MAX);
    if (q->n_tokens > e->n_ctx)
        return paged__fail(err, PAGED_ERR_TOO_LONG, "the prompt has %d tokens, the context %d", q->n_tokens,
                           e->n_ctx);
    for (int32_t i = 0; i < q->n_tokens; i++)
        if (q->tokens[i] < 0 || q->tokens[i] >= e->n_vocab)
            return paged__fail(err, PAGED_ERR_INVALID_ARG, "prompt token %d is %d; the vocabulary ends at %d",
                               i, q->tokens[i], e->n_vocab - 1);
    return PAGED_OK;
}

/* A copy of n elements in *out; NULL for none. False: no memory. */
static bool copy_of(const void *array, int32_t n, size_t elem_bytes, void **out) {
    *out = NULL;
    if (n == 0) return true;
    *out = paged__alloc((size_t)n, elem_bytes);
    if (*out) memcpy(*out, array, (size_t)n * elem_bytes);
    return *out != NULL;
}

/* What `params` points to. */
static bool take_lists(paged__request *r, const paged_request *q) {
    void *bias, *stops = NULL;
    const bool ok = copy_of(q->logit_bias, q->n_logit_bias, sizeof *q->logit_bias, &bias) &&
                    copy_of(q->stop_tokens, q->n_stop_tokens, sizeof *q->stop_tokens, &stops);
    r->params = *q;
    r->params.logit_bias = bias;
    r->params.stop_tokens = stops;
    r->params.stop = NULL;
    r->params.tokens = NULL;
    r->params.salt = NULL;
    if (q->n_stop) r->stop = paged__alloc(1, sizeof *r->stop);
    return ok && (r->stop || !q->n_stop);
}

/* Everything that the request will need until it is released, but for the text of a read. */
static bool take_memory(const paged_engine *e, paged__request *r, const paged_request *q) {
    const int64_t n_tokens_max = PAGED_MIN((int64_t)r->n_prompt + r->max_new, (int64_t)e->n_ctx + 1);
    if (!take_lists(r, q)) return false;
    const size_t n_scores = (size_t)PAGED_MAX(q->n_tokens - 1, 1);
    r->tokens = paged__alloc((size_t)n_tokens_max, sizeof *r->tokens);
    r->made = q->keep_sink ? paged__alloc((size_t)r->max_new, sizeof *r->made)
              : r->tokens  ? r->tokens + r->n_prompt
                           : NULL;
    if (q->logprobs) r->logprobs = paged__alloc((size_t)r->max_new, sizeof *r->logprobs);
    if (q->n_top_logprobs)
        r->top_logprobs =
            paged__alloc((size_t)r->max_new * (size_t)q->n_top_logprobs, sizeof *r->top_logprobs);
    if (q->prompt_logprobs) {
        r->prompt_logprobs = paged__alloc(n_scores, sizeof *r->prompt_logprobs);
        r->prompt_top1 = paged__alloc(n_scores, sizeof *r->prompt_top1);
    }
    if (q->salt) r->salt = paged__alloc(strlen(q->salt) + 1, 1);
    return r->tokens && r->made && (r->salt || !q->salt) && (r->logprobs || !q->logprobs) &&
           (r->top_logprobs || !q->n_top_logprobs) &&
           ((r->prompt_logprobs && r->prompt_top1) || !q->prompt_logprobs);
}

/* What is not memory: texts as streams. Errors: as paged__stop_init(). */
static paged_status begin_text(const paged_engine *e, paged__request *r, const paged_request *q,
                               paged_error *err) {
    paged_detok_init(&r->detok, e->tok, q->control_text);
    r->detok.started = true; /* it continues the prompt: a leading space is a space */
    r->stop_detok = r->detok;
    r->stop_token = -1;
    return r->stop ? paged__stop_init(r->stop, q->stop, q->n_stop, err) : PAGED_OK;
}

/* Into the queue, with an id. */
static void enter(paged_engine *e, paged__request *r, const paged_request *q) {
    const int64_t ms = 1000000;
    r->submit_ns = paged__engine_now(e);
    r->deadline_ns = q->deadline_ms ? r->submit_ns + (uint64_t)(q->deadline_ms * ms) : 0;
    r->rank_ns = (int64_t)r->submit_ns - q->priority * PAGED_AGING_MS * ms;
    r->id = ++e->next_id;
    paged__request_wait(e, r, PAGED_WAIT_QUEUE);
    e->stats.n_submitted++;
}

static paged_status fail_full(const paged_engine *e, const paged_request *q, paged_error *err) {
    return paged__fail(err, PAGED_ERR_LIMIT,
                       "%d requests wait and %d run; at most %d and %d, and this is %d more", e->n_waiting,
                       e->n_running, e->config.max_waiting, e->config.max_running, q->n);
}

/* A slot with all that an answer to the request needs, not yet in the queue. */
static paged_status prepare(paged_engine *e, const paged_request *request, int32_t choice, paged_error *err) {
    paged_request q = *request;
    paged__request *r = NULL;
    for (int32_t i = 0; i < e->n_slots && !r; i++)
        if (e->slots[i].state == PAGED__FREE) r = &e->slots[i];
    if (!r) return fail_full(e, request, err);
    r->state = PAGED__NEW;
    r->choice = choice;
    if (choice > 0) q.prompt_logprobs = false;
    r->n_prompt = r->n_tokens = q.n_tokens;
    /* The newest token needs no slot, so a prompt that fills the context still gets one token. */
    r->max_new = e->n_ctx - q.n_tokens + 1;
    if (q.max_tokens > 0) r->max_new = PAGED_MIN(q.keep_sink ? KEEP_SINK_MAX : r->max_new, q.max_tokens);
    if (!take_memory(e, r, &q))
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a request of %d + %d tokens", q.n_tokens,
                           r->max_new);
    memcpy(r->tokens, q.tokens, (size_t)q.n_tokens * sizeof *r->tokens);
    if (q.salt) memcpy(r->salt, q.salt, strlen(q.salt) + 1);
    return begin_text(e, r, &q, err);
}

static paged__request *find_new(const paged_engine *e, int32_t choice) {
    int32_t i = 0;
    while (e->slots[i].state != PAGED__NEW || e->slots[i].choice != choice) i++;
    return &e->slots[i];
}

paged_status paged_engine_submit(paged_engine *e, const paged_request *request, uint64_t *id,
                                 paged_error *err) {
    if (!e || !request || !id)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "engine, request or id is NULL");
    if (request->struct_size < sizeof request->struct_size || request->struct_size > sizeof *request)
        return paged__fail(err, PAGED_ERR_INVALID_ARG,
                           "struct_size is %zu, this library knows up to %zu; call paged_request_init",
                           request->struct_size, sizeof *request);
    paged_request q;
    paged_request_init(&q);
    memcpy(&q, request, request->struct_size);
    if (q.n == 0) q.n = 1;
    paged_status s = check_request(e, &q, err);
    if (s) return s;

    const uint64_t first = e->next_id + 1;
    if (e->n_waiting + q.n > e->config.max_waiting) return fail_full(e, &q, err);
    for (int32_t k = 0; k < q.n && !s; k++) s = prepare(e, &q, k, err);
    if (s) {
        for (int32_t i = 0; i < e->n_slots; i++)
            if (e->slots[i].state == PAGED__NEW) paged__request_clear(e, &e->slots[i]);
        return s;
    }
    for (int32_t k = 0; k < q.n; k++) enter(e, find_new(e, k), &q);
    *id = first;
    return PAGED_OK;
}

void paged_engine_cancel(paged_engine *e, uint64_t id) {
    for (int32_t i = 0; id && i < e->n_slots; i++)
        if (e->slots[i].id == id) e->slots[i].cancel_id = id;
}

paged_status paged_engine_release(paged_engine *e, uint64_t id) {
    paged__request *r = paged__request_find(e, id);
    if (!r) return PAGED_ERR_NOT_FOUND;
    paged__request_clear(e, r);
    return PAGED_OK;
}

static double ms_between(uint64_t from, uint64_t to) {
    return from && to > from ? (double)(to - from) * 1e-6 : 0.0;
}

/* Bytes of the text so far that may be shown. */
static int64_t shown_until(const paged__request *r) {
    return r->stop ? r->stop->safe : INT64_MAX;
}

/* Text of the tokens that were not read yet goes behind what was held back; then as much as may be shown. */
static paged_status read_text(paged__request *r, int32_t n_new, bool ends) {
    const size_t n_held = r->text_len - r->n_given, need = n_held + ((size_t)n_new + 1) * PAGED_DETOK_MAX;
    if (need > r->text_capacity) {
        char *text = paged__alloc(need, 1);
        if (!text) return PAGED_ERR_NO_MEMORY;
        if (n_held) memcpy(text, r->text + r->n_given, n_held);
        paged__free(r->text);
        r->text = text;
        r->text_capacity = need;
    } else if (n_held && r->n_given) {
        memmove(r->text, r->text + r->n_given, n_held);
    }
    size_t len = n_held;
    for (int32_t i = 0; i < n_new; i++)
        len += (size_t)paged_detok_push(&r->detok, r->made[r->n_read + i], r->text + len);
    if (ends) len += (size_t)paged_detok_finish(&r->detok, r->text + len);
    r->text_len = len;
    r->n_given = (size_t)PAGED_MIN((int64_t)len, shown_until(r) - r->n_shown);
    r->n_shown += (int64_t)r->n_given;
    return PAGED_OK;
}

paged_status paged_engine_read(paged_engine *e, uint64_t id, paged_output *out) {
    paged__request *r = paged__request_find(e, id);
    if (!r) return PAGED_ERR_NOT_FOUND;
    const int32_t n_done = paged__n_made(r), n_new = n_done - r->n_read;
    const bool ends = r->state == PAGED__FINISHED && !r->read_to_end;
    paged_status s = read_text(r, n_new, ends);
    if (s) return s;
    const uint64_t now = r->state == PAGED__FINISHED ? r->last_ns : paged__engine_now(e);
    *out = (paged_output){
        .text = r->text ? r->text : "",
        .text_len = r->n_given,
        .tokens = r->made + r->n_read,
        .logprobs = r->logprobs ? r->logprobs + r->n_read : NULL,
        .top_logprobs =
            r->top_logprobs ? r->top_logprobs + (ptrdiff_t)r->n_read * r->params.n_top_logprobs : NULL,
        .n_tokens = n_new,
        .finish = r->finish,
        .error = r->error,
        .stop_string = r->stop && r->stop->found >= 0 ? r->stop->which : -1,
        .stop_token = r->stop_token,
        .prompt_tokens = r->n_prompt,
        .cached_tokens = r->n_reused,
        .completion_tokens = n_done,
        .prompt_done = prompt_done(r),
        .blocks_used = r->blocks_used,
        .queue_ms = ms_between(r->submit_ns, r->start_ns ? r->start_ns : now),
        .prefill_ms = ms_between(r->start_ns, r->first_ns ? r->first_ns : now),
        .decode_ms = ms_between(r->first_ns, now),
        .miss = r->miss,
        .wait = r->wait,
        .n_preemptions = r->n_preemptions,
        .n_dropped = r->n_dropped,
        .store_tokens = r->n_loaded,
    };
    r->n_read = n_done;
    r->n_told = out->prompt_done;
    r->read_to_end = r->read_to_end || ends;
    return PAGED_OK;
}

paged_status paged_engine_prompt_logprobs(paged_engine *e, uint64_t id, const float **logprobs,
                                          const int32_t **top1, int32_t *n) {
    const paged__request *r = paged__request_find(e, id);
    if (!r) return PAGED_ERR_NOT_FOUND;
    if (!r->prompt_logprobs || prompt_done(r) < r->n_prompt) return PAGED_ERR_INVALID_ARG;
    *logprobs = r->prompt_logprobs;
    *top1 = r->prompt_top1;
    *n = r->n_prompt - 1;
    return PAGED_OK;
}
