/* engine/request.c: the table of requests. A slot belongs to a request from submit to release; ids never come
 * again. */
#include <math.h>

#include "engine/engine.h"

enum { SALT_MAX = 1024 }; /* bytes */

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
    }
    return "unknown";
}

paged__request *paged__request_find(const paged_engine *e, uint64_t id) {
    for (int32_t i = 0; id && i < e->n_slots; i++)
        if (e->slots[i].id == id) return &e->slots[i];
    return NULL;
}

static void remove_from(paged__request **list, int32_t *n, const paged__request *r) {
    int32_t i = 0;
    while (i < *n && list[i] != r) i++;
    if (i == *n) return;
    (*n)--;
    for (; i < *n; i++) list[i] = list[i + 1];
}

void paged__request_finish(paged_engine *e, paged__request *r, paged_finish finish) {
    if (r->state == PAGED__RUNNING) {
        remove_from(e->running, &e->n_running, r);
        PAGED_ASSERT(paged_seq_free(e->cache, r->seq) == PAGED_OK);
        r->seq = 0;
    } else {
        remove_from(e->waiting, &e->n_waiting, r);
    }
    r->state = PAGED__FINISHED;
    r->finish = finish;
    r->last_ns = paged__now_ns();
}

void paged__request_clear(paged_engine *e, paged__request *r) {
    if (r->state == PAGED__WAITING || r->state == PAGED__RUNNING)
        paged__request_finish(e, r, PAGED_FINISH_CANCELLED);
    paged__free(r->tokens);
    paged__free(r->logprobs);
    paged__free(r->prompt_logprobs);
    paged__free(r->prompt_top1);
    paged__free(r->text);
    paged__free(r->salt);
    r->id = 0; /* first, so that a cancel from elsewhere no longer finds it */
    r->cancel_id = 0;
    r->state = PAGED__FREE;
    r->finish = PAGED_FINISH_NONE;
    r->error = PAGED_OK;
    r->tokens = NULL;
    r->logprobs = r->prompt_logprobs = NULL;
    r->prompt_top1 = NULL;
    r->text = r->salt = NULL;
    r->text_capacity = 0;
    r->n_prompt = r->max_new = r->n_tokens = r->n_cached = r->n_read = r->n_reused = r->blocks_used = 0;
    r->read_to_end = r->awaits = false;
    r->miss = PAGED_MISS_NONE;
    r->submit_ns = r->start_ns = r->first_ns = r->last_ns = 0;
}

static paged_status check_request(const paged_engine *e, const paged_request *q, paged_error *err) {
    if (!q->tokens || q->n_tokens < 1)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "the prompt is empty: %d tokens, at least 1 is needed",
                           q->n_tokens);
    if (q->max_tokens < 0)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "max_tokens is %d, less than 0", q->max_tokens);
    if (!isfinite(q->temperature) || q->temperature < 0)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "temperature is %g; it must be 0 or more",
                           (double)q->temperature);
    if (!(q->top_p >= 0 && q->top_p <= 1))
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "top_p is %g; it must lie in 0 … 1", (double)q->top_p);
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

/* Everything that the request will need until it is released, but for the text of a read. */
static bool take_memory(paged__request *r, const paged_request *q) {
    const size_t n_scores = (size_t)PAGED_MAX(q->n_tokens - 1, 1);
    r->tokens = paged__alloc((size_t)r->n_prompt + (size_t)r->max_new, sizeof *r->tokens);
    if (q->logprobs) r->logprobs = paged__alloc((size_t)r->max_new, sizeof *r->logprobs);
    if (q->prompt_logprobs) {
        r->prompt_logprobs = paged__alloc(n_scores, sizeof *r->prompt_logprobs);
        r->prompt_top1 = paged__alloc(n_scores, sizeof *r->prompt_top1);
    }
    if (q->salt) r->salt = paged__alloc(strlen(q->salt) + 1, 1);
    return r->tokens && (r->salt || !q->salt) && (r->logprobs || !q->logprobs) &&
           ((r->prompt_logprobs && r->prompt_top1) || !q->prompt_logprobs);
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
    paged_status s = check_request(e, &q, err);
    if (s) return s;

    paged__request *r = NULL;
    for (int32_t i = 0; i < e->n_slots && !r; i++)
        if (e->slots[i].state == PAGED__FREE) r = &e->slots[i];
    if (!r || e->n_waiting >= e->config.max_waiting)
        return paged__fail(err, PAGED_ERR_LIMIT, "%d requests wait and %d run; at most %d and %d",
                           e->n_waiting, e->n_running, e->config.max_waiting, e->config.max_running);
    r->n_prompt = r->n_tokens = q.n_tokens;
    /* The newest token needs no slot, so a prompt that fills the context still gets one token. */
    r->max_new = e->n_ctx - q.n_tokens + 1;
    if (q.max_tokens > 0) r->max_new = PAGED_MIN(r->max_new, q.max_tokens);
    if (!take_memory(r, &q)) {
        paged__request_clear(e, r);
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a request of %d + %d tokens", q.n_tokens,
                           r->max_new);
    }
    memcpy(r->tokens, q.tokens, (size_t)q.n_tokens * sizeof *r->tokens);
    r->params = q;
    r->params.tokens = NULL;
    if (q.salt) memcpy(r->salt, q.salt, strlen(q.salt) + 1);
    r->params.salt = NULL;
    paged_detok_init(&r->detok, e->tok, q.control_text);
    r->detok.started = true; /* it continues the prompt: a leading space is a space */
    r->submit_ns = paged__now_ns();
    r->state = PAGED__WAITING;
    e->waiting[e->n_waiting++] = r;
    *id = ++e->next_id;
    r->id = *id;
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

/* Text of the tokens that were not read yet. */
static paged_status read_text(paged__request *r, int32_t n_new, bool ends, size_t *len) {
    const size_t need = ((size_t)n_new + 1) * PAGED_DETOK_MAX;
    *len = 0;
    if (n_new == 0 && !ends) return PAGED_OK;
    if (need > r->text_capacity) {
        char *text = paged__alloc(need, 1);
        if (!text) return PAGED_ERR_NO_MEMORY;
        paged__free(r->text);
        r->text = text;
        r->text_capacity = need;
    }
    for (int32_t i = 0; i < n_new; i++)
        *len += (size_t)paged_detok_push(&r->detok, r->tokens[r->n_prompt + r->n_read + i], r->text + *len);
    if (ends) *len += (size_t)paged_detok_finish(&r->detok, r->text + *len);
    return PAGED_OK;
}

paged_status paged_engine_read(paged_engine *e, uint64_t id, paged_output *out) {
    paged__request *r = paged__request_find(e, id);
    if (!r) return PAGED_ERR_NOT_FOUND;
    const int32_t n_done = r->n_tokens - r->n_prompt, n_new = n_done - r->n_read;
    const bool ends = r->state == PAGED__FINISHED && !r->read_to_end;
    size_t len;
    paged_status s = read_text(r, n_new, ends, &len);
    if (s) return s;
    const uint64_t now = r->state == PAGED__FINISHED ? r->last_ns : paged__now_ns();
    *out = (paged_output){
        .text = r->text ? r->text : "",
        .text_len = len,
        .tokens = r->tokens + r->n_prompt + r->n_read,
        .logprobs = r->logprobs ? r->logprobs + r->n_read : NULL,
        .n_tokens = n_new,
        .finish = r->finish,
        .error = r->error,
        .prompt_tokens = r->n_prompt,
        .cached_tokens = r->n_reused,
        .completion_tokens = n_done,
        .prompt_done = PAGED_MIN(r->n_cached, r->n_prompt),
        .blocks_used = r->blocks_used,
        .queue_ms = ms_between(r->submit_ns, r->start_ns ? r->start_ns : now),
        .prefill_ms = ms_between(r->start_ns, r->first_ns ? r->first_ns : now),
        .decode_ms = ms_between(r->first_ns, now),
        .miss = r->miss,
    };
    r->n_read = n_done;
    r->read_to_end = r->read_to_end || ends;
    return PAGED_OK;
}

paged_status paged_engine_prompt_logprobs(paged_engine *e, uint64_t id, const float **logprobs,
                                          const int32_t **top1, int32_t *n) {
    const paged__request *r = paged__request_find(e, id);
    if (!r) return PAGED_ERR_NOT_FOUND;
    if (!r->prompt_logprobs || r->n_cached < r->n_prompt) return PAGED_ERR_INVALID_ARG;
    *logprobs = r->prompt_logprobs;
    *top1 = r->prompt_top1;
    *n = r->n_prompt - 1;
    return PAGED_OK;
}
