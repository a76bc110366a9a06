/* engine/scheduler.c: who runs, and what the next step computes. First come, first served; no preemption: see
 * engine.h. */
#include "engine/engine.h"

static int32_t blocks_for(const paged_engine *e, int32_t n_tokens) {
    return (n_tokens + e->config.block_size - 1) / e->config.block_size;
}

/* The newest token of a request never needs a slot. */
static int32_t blocks_at_most(const paged_engine *e, const paged__request *r) {
    return blocks_for(e, r->n_prompt + r->max_new - 1);
}

void paged__drop_cancelled(paged_engine *e) {
    for (int32_t i = 0; i < e->n_slots; i++) {
        paged__request *r = &e->slots[i];
        if ((r->state == PAGED__WAITING || r->state == PAGED__RUNNING) && r->cancel_id == r->id)
            paged__request_finish(e, r, PAGED_FINISH_CANCELLED);
    }
}

/* What must be equal for keys and values to be the same, besides the tokens: the model, how they are stored,
 * the caller's salt. */
typedef struct request_space {
    paged_ns_field fields[4];
    int32_t kv[2];
    paged_namespace names;
} request_space;

static const paged_namespace *space_of(const paged_engine *e, const paged__request *r, request_space *s) {
    s->kv[0] = (int32_t)e->config.kv_type;
    s->kv[1] = e->config.kv_plain;
    s->names = (paged_namespace){.fields = s->fields};
    s->fields[s->names.n_fields++] = (paged_ns_field){PAGED_NS_MODEL, e->fingerprint, sizeof e->fingerprint};
    if (r->salt) s->fields[s->names.n_fields++] = (paged_ns_field){PAGED_NS_SALT, r->salt, strlen(r->salt)};
    s->fields[s->names.n_fields++] = (paged_ns_field){PAGED_NS_KV_TYPE, s->kv, sizeof s->kv};
    return &s->names;
}

/* Whoever wants to see the prompt's logits needs all of it computed. */
static bool may_reuse(const paged_engine *e, const paged__request *r) {
    return !e->config.no_prefix_cache && !r->params.prompt_logprobs;
}

/* Takes over what is cached of the prompt; from here on the request computes. */
static paged_status reuse(paged_engine *e, paged__request *r) {
    request_space space;
    paged_match match;
    r->start_ns = paged__now_ns();
    r->miss = PAGED_MISS_OFF;
    if (e->config.no_prefix_cache) return PAGED_OK;
    const int32_t n_tokens = may_reuse(e, r) ? r->n_prompt : 0;
    paged_status s = paged_seq_match(e->cache, r->seq, space_of(e, r, &space), r->tokens, n_tokens, &match);
    if (s) return s;
    if (may_reuse(e, r)) r->miss = match.why;
    r->n_cached = r->n_reused = match.n_matched;
    r->blocks_used = blocks_for(e, r->n_cached);
    return PAGED_OK;
}

/* Starts a request that was just admitted, or lets it wait for one that computes what it needs. */
static paged_status start(paged_engine *e, paged__request *r) {
    request_space space;
    if (may_reuse(e, r)) {
        paged_status s =
            paged_seq_promise(e->cache, r->seq, space_of(e, r, &space), r->tokens, r->n_prompt, &r->awaits);
        if (s || r->awaits) return s;
    }
    return reuse(e, r);
}

/* Those whose wait is over go on. One that fails there may end the wait of others, before it in the list too.
 */
static void wake(paged_engine *e) {
    for (int32_t i = 0; i < e->n_running;) {
        paged__request *r = e->running[i++];
        if (!r->awaits || paged_seq_waits(e->cache, r->seq)) continue;
        r->awaits = false;
        r->error = reuse(e, r);
        if (!r->error) continue;
        paged__request_finish(e, r, PAGED_FINISH_ERROR);
        i = 0;
    }
}

static void admit(paged_engine *e) {
    paged_cache_stats stats;
    paged_cache_get_stats(e->cache, &stats);
    int64_t free_blocks = (int64_t)stats.n_free + stats.n_cached;
    for (int32_t i = 0; i < e->n_running; i++)
        free_blocks -= blocks_at_most(e, e->running[i]) - blocks_for(e, e->running[i]->n_cached);

    while (e->n_waiting > 0 && e->n_running < e->config.max_running) {
        paged__request *r = e->waiting[0];
        if (blocks_at_most(e, r) > free_blocks || paged_seq_create(e->cache, &r->seq) != PAGED_OK) return;
        e->n_waiting--;
        for (int32_t i = 0; i < e->n_waiting; i++) e->waiting[i] = e->waiting[i + 1];
        e->running[e->n_running++] = r;
        r->state = PAGED__RUNNING;
        r->error = start(e, r);
        if (r->error)
            paged__request_finish(e, r, PAGED_FINISH_ERROR);
        else
            free_blocks -= blocks_at_most(e, r);
    }
}

static void add_piece(paged_engine *e, paged__request *r, int32_t n_tokens) {
    e->pieces[e->n_pieces++] = (paged__piece){.request = r, .n_tokens = n_tokens, .first_output = -1};
}

void paged__schedule(paged_engine *e) {
    wake(e);
    admit(e);
    e->n_pieces = 0;
    int32_t budget = e->config.chunk_tokens;
    /* Those that decode first: one token each keeps their streams moving while a long prompt is computed
     * beside them. */
    for (int32_t i = 0; i < e->n_running && budget > 0; i++) {
        paged__request *r = e->running[i];
        if (r->awaits || r->n_tokens - r->n_cached > 1 || r->n_tokens == r->n_prompt) continue;
        add_piece(e, r, 1);
        budget--;
    }
    for (int32_t i = 0; i < e->n_running && budget > 0; i++) {
        paged__request *r = e->running[i];
        if (r->awaits || r->n_tokens > r->n_prompt) continue;
        const int32_t n = PAGED_MIN(r->n_tokens - r->n_cached, budget);
        add_piece(e, r, n);
        budget -= n;
    }
}
