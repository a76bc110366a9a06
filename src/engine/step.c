/* engine/step.c: one step of everything that runs: schedule -> lay out -> backend -> commit -> sample. */
#include "engine/engine.h"

enum {
    COMPACT_BYTES = 1 << 20, /* of keys and values that a step moves at most, a tenth of a millisecond */
    RATE_TOKENS = 16         /* steps of so many tokens say how fast prompts are */
};

/* Which rows of a piece need logits: all but those whose next token nobody asks about. */
static void lay_out_outputs(paged_engine *e, paged__piece *p, int32_t first_row, int32_t *n_outputs) {
    const paged__request *r = p->request;
    const bool ends_known = r->n_cached + p->n_tokens == r->n_tokens; /* the last row predicts a new token */
    const bool scores = paged__request_scores(r);
    p->first_output = *n_outputs;
    for (int32_t i = 0; i < p->n_tokens; i++)
        if (scores || (ends_known && i == p->n_tokens - 1)) e->outputs[(*n_outputs)++] = first_row + i;
    p->n_outputs = *n_outputs - p->first_output;
}

/* ---- cascade: requests that decode behind a common beginning ---- */

/* Blocks that a sequence must have in common with another one for a split to be read once for both. */
static int32_t blocks_of_split(const paged_engine *e) {
    return (PAGED_ATTN_SPLIT + e->config.block_size - 1) / e->config.block_size;
}

static const int32_t *table_of(const paged_engine *e, const paged_tables *t, const paged__piece *p) {
    return t->blocks + (int64_t)paged_seq_row(e->cache, p->request->seq) * t->seq_stride;
}

static bool may_share(const paged_engine *e, const paged__piece *p) {
    return p->n_tokens == 1 && p->request->n_cached >= blocks_of_split(e) * e->config.block_size;
}

/* Tokens in blocks that all pieces first … end - 1 have in common. */
static int32_t common_tokens(const paged_engine *e, const paged_tables *t, int32_t first, int32_t end) {
    const int32_t *like = table_of(e, t, &e->pieces[first]);
    int32_t n = e->pieces[first].request->n_cached / e->config.block_size;
    for (int32_t i = first + 1; i < end; i++) {
        const int32_t *table = table_of(e, t, &e->pieces[i]);
        int32_t k = 0, n_own = PAGED_MIN(n, e->pieces[i].request->n_cached / e->config.block_size);
        while (k < n_own && table[k] == like[k]) k++;
        n = k;
    }
    return n * e->config.block_size;
}

/* Brings pieces with the same first split together. The block that ends it tells them apart: where it is the
 * same, those before it are too, since a block is shared with all that comes before it, or not at all. */
static void find_shared(paged_engine *e, const paged_tables *t) {
    const int32_t last = blocks_of_split(e) - 1;
    e->n_shared = 0;
    if (e->windowed) return; /* what is in common of one group is no longer there in another */
    for (int32_t first = 0, end; first < e->n_pieces; first = end) {
        end = first + 1;
        if (!may_share(e, &e->pieces[first])) continue;
        const int32_t block = table_of(e, t, &e->pieces[first])[last];
        for (int32_t i = end; i < e->n_pieces; i++) {
            const paged__piece p = e->pieces[i];
            if (!may_share(e, &p) || table_of(e, t, &p)[last] != block) continue;
            e->pieces[i] = e->pieces[end];
            e->pieces[end++] = p;
        }
        if (end == first + 1) continue;
        e->shared[e->n_shared++] = (paged_shared){first, end - first, common_tokens(e, t, first, end)};
        e->stats.n_cascade_rows += (uint64_t)(end - first);
    }
    e->stats.n_cascade_steps += e->n_shared > 0;
}

static void lay_out(paged_engine *e, paged__step *step) {
    paged_tables tables[PAGED__MODEL_GROUPS] = {0};
    const int32_t n_groups = e->n_groups;
    for (int32_t g = 0; g < n_groups; g++)
        PAGED_ASSERT(paged_cache_tables(e->cache, g, &tables[g]) == PAGED_OK);
    find_shared(e, &tables[0]);
    int32_t n = 0, n_outputs = 0;
    for (int32_t i = 0; i < e->n_pieces; i++) {
        paged__piece *p = &e->pieces[i];
        const paged__request *r = p->request;
        for (int32_t g = 0; g < n_groups; g++) {
            PAGED_ASSERT(
                !paged_seq_slots(e->cache, r->seq, g, r->n_cached, p->n_tokens, e->step_slots[g] + n));
            e->first_k[g][i] = paged_seq_first_k(e->cache, r->seq, g);
        }
        lay_out_outputs(e, p, n, &n_outputs);
        e->cu_seqlens_q[i] = n;
        e->seqlens_k[i] = r->n_cached + p->n_tokens;
        e->rows[i] = paged_seq_row(e->cache, r->seq);
        for (int32_t t = 0; t < p->n_tokens; t++, n++) {
            e->step_tokens[n] = r->tokens[r->n_cached + t];
            e->positions[n] = r->n_cached + t;
        }
    }
    e->cu_seqlens_q[e->n_pieces] = n;
    *step = (paged__step){.n_tokens = n,
                          .tokens = e->step_tokens,
                          .positions = e->positions,
                          .n_outputs = n_outputs,
                          .outputs = e->outputs};
    for (int32_t g = 0; g < n_groups; g++) {
        paged_batch *batch = &step->batch[g];
        step->slots[g] = e->step_slots[g];
        batch->cu_seqlens_q = e->cu_seqlens_q;
        batch->n_shared = e->n_shared;
        batch->shared = e->shared;
        batch->tables = tables[g];
        batch->tables.rows = e->rows;
        batch->tables.seqlens_k = e->seqlens_k;
        batch->tables.first_k = e->cache->groups[g].config.window ? e->first_k[g] : NULL;
        batch->tables.n_seqs = e->n_pieces;
    }
}

/* Of prompt tokens, each from the row before it. */
static void score_prompt(const paged_engine *e, paged__sampler *sampler, const paged__piece *p) {
    paged__request *r = p->request;
    for (int32_t i = 0; i < p->n_outputs; i++) {
        const int32_t at = r->n_cached + i; /* this row predicts token at + 1 */
        if (at + 1 >= r->n_prompt) break;
        r->prompt_logprobs[at] =
            paged__logprob(sampler, e->logits + (size_t)(p->first_output + i) * (size_t)e->n_vocab,
                           r->tokens[at + 1], &r->prompt_top1[at]);
    }
}

static bool is_stop_token(const paged__request *r, int32_t token) {
    for (int32_t i = 0; i < r->params.n_stop_tokens; i++)
        if (r->params.stop_tokens[i] == token) return true;
    return false;
}

/* Looks for stop strings in the text of a new token. False: one is complete. */
static bool text_goes_on(paged__request *r, int32_t token, bool armed) {
    char bytes[PAGED_DETOK_MAX];
    if (!r->stop) return true;
    const int32_t n = paged_detok_push(&r->stop_detok, token, bytes);
    return paged__stop_push(r->stop, bytes, (size_t)n, armed);
}

/* The token after those that the request has, and its log-probabilities. Different requests may do this at
 * the same time, each with a sampler of its own. */
static int32_t choose(paged__sampler *sampler, paged__request *r, const float *row) {
    const paged_request *q = &r->params;
    const int32_t n_new = paged__n_made(r), n_top = q->n_top_logprobs;
    const paged__choice how = {.params = q,
                               .tokens = r->tokens,
                               .n_prompt = r->n_prompt - r->n_dropped_prompt,
                               .n_tokens = r->n_tokens,
                               .n_dropped = r->n_dropped,
                               .choice = r->choice,
                               .ban_eog = q->ignore_eos || n_new < q->min_tokens,
                               .ban_stops = n_new < q->min_tokens};
    if (!r->logprobs) return paged__sample(sampler, row, &how);
    return paged__sample_scored(sampler, row, &how, &r->logprobs[n_new],
                                r->top_logprobs ? r->top_logprobs + (ptrdiff_t)n_new * n_top : NULL);
}

static void add_token(paged_engine *e, paged__request *r, int32_t token) {
    const paged_request *q = &r->params;
    const int32_t n_new = paged__n_made(r);
    r->last_ns = paged__engine_now(e);
    if (!r->first_ns) r->first_ns = r->last_ns;
    if (is_stop_token(r, token) || (!q->ignore_eos && paged_token_is_eog(e->tok, token))) {
        r->stop_token = token;
        paged__request_finish(e, r, PAGED_FINISH_STOP);
        return;
    }
    r->tokens[r->n_tokens++] = r->made[n_new] = token;
    if (!text_goes_on(r, token, n_new + 1 >= q->min_tokens))
        paged__request_finish(e, r, PAGED_FINISH_STOP);
    else if (n_new + 1 == r->max_new)
        paged__request_finish(e, r, PAGED_FINISH_LENGTH);
    else if (r->n_tokens > e->n_ctx)
        paged__request_drop_middle(e, r);
}

/* The first of n answers has computed the prompt: the others start from there, with its blocks. Those for
 * whom there is no room now wait in the queue like everybody. */
static void fork_choices(paged_engine *e, const paged__request *first, const float *row) {
    for (int32_t k = 1; k < first->params.n && e->n_running < e->config.max_running; k++) {
        paged__request *r = paged__request_find(e, first->id + (uint64_t)k);
        paged_seq seq;
        if (!r || r->state != PAGED__WAITING || r->start_ns) continue;
        if (paged_seq_fork(e->cache, first->seq, &seq) != PAGED_OK) return;
        r->seq = seq;
        paged__request_run(e, r);
        r->n_cached = r->n_prompt;
        r->n_reused = r->n_prompt - 1;
        r->blocks_used = first->blocks_used;
        r->start_ns = paged__engine_now(e);
        add_token(e, r, choose(e->samplers[0], r, row));
    }
}

/* The row that predicts the token after the request's newest one; NULL: the piece ends before that. */
static const float *last_row(const paged_engine *e, const paged__piece *p) {
    if (p->request->n_cached + p->n_tokens < p->request->n_tokens) return NULL;
    return e->logits + (size_t)(p->first_output + p->n_outputs - 1) * (size_t)e->n_vocab;
}

/* Thread ith of nth chooses for every nth piece. */
static void choose_some(void *user, int32_t ith, int32_t nth) {
    paged_engine *e = user;
    for (int32_t i = ith; i < e->n_pieces; i += nth) {
        paged__piece *p = &e->pieces[i];
        paged__request *r = p->request;
        const float *row = last_row(e, p);
        if (row) p->token = choose(e->samplers[ith], r, row);
        if (paged__request_scores(r)) score_prompt(e, e->samplers[ith], p);
    }
}

static void take_results(paged_engine *e) {
    for (int32_t i = 0; i < e->n_pieces; i++) {
        const paged__piece *p = &e->pieces[i];
        const float *row = last_row(e, p);
        paged__request *r = p->request;
        PAGED_ASSERT(!paged_seq_commit(e->cache, r->seq, r->tokens + r->n_cached, p->n_tokens));
        r->n_cached += p->n_tokens;
        r->blocks_used = (r->n_cached + e->config.block_size - 1) / e->config.block_size;
        if (!row) continue;
        if (r->params.n > 1 && r->choice == 0 && paged__n_made(r) == 0) fork_choices(e, r, row);
        add_token(e, r, p->token);
    }
}

/* Nothing was committed; what these requests hold goes back with them. */
static void fail_pieces(paged_engine *e, paged_status s) {
    for (int32_t i = 0; i < e->n_pieces; i++) {
        e->pieces[i].request->error = s;
        paged__request_finish(e, e->pieces[i].request, PAGED_FINISH_ERROR);
    }
}

bool paged__step_begin(paged_engine *e) {
    paged__stores_poll(e);
    paged__drop_ended(e);
    paged__schedule(e);
    /* Progress: an idle engine with a queue would be our bug. */
    const bool is_stuck = e->n_pieces == 0 && !paged__stores_pending(e);
    for (int32_t i = 0; i < e->n_running && is_stuck; i++)
        PAGED_ASSERT(paged__request_is_parked(e, e->running[i]));
    for (int32_t i = 0; i < e->n_waiting && is_stuck; i++)
        PAGED_ASSERT(paged__request_is_parked(e, e->waiting[i]));
    if (e->n_pieces == 0) return false;
    lay_out(e, &e->step);
    return true;
}

paged_status paged__step_compute(paged_engine *e, paged_error *err) {
    paged_error why = {0};
    const uint64_t start = paged__engine_now(e);
    paged_status s = e->backend.step(e->backend.self, &e->step, &e->logits, &why);
    e->step_ns = paged__engine_now(e) - start;
    if (s) return paged__fail(err, s, "the step failed: %s", why.message);
    if (e->n_pieces > 1 && e->backend.run)
        e->backend.run(e->backend.self, choose_some, e);
    else
        choose_some(e, 0, 1);
    return PAGED_OK;
}

void paged__step_end(paged_engine *e, paged_status computed) {
    if (computed) {
        fail_pieces(e, computed);
        return;
    }
    e->stats.n_steps++;
    e->stats.n_tokens += (uint64_t)e->step.n_tokens;
    if (e->stores && e->step.n_tokens >= RATE_TOKENS)
        paged__rate_add(&e->stores->prefill, e->step.n_tokens, e->step_ns, paged__engine_now(e));
    take_results(e);
    paged__stores_take(e);
    /* Nothing holds a slot or a table now, so tiles of tails may move together. A failed copy loses nothing,
     * and the next step tries again. */
    if (e->packed_tails) (void)paged_cache_compact(e->cache, COMPACT_BYTES, true, NULL);
}

paged_status paged_engine_step(paged_engine *e, int32_t *n_active, paged_error *err) {
    if (!e) return paged__fail(err, PAGED_ERR_INVALID_ARG, "engine is NULL");
    if (paged__step_begin(e)) {
        const paged_status s = paged__step_compute(e, err);
        paged__step_end(e, s);
        if (s) return s;
    } else if (e->n_running + e->n_waiting > 0) {
        paged__stores_wait(e);
    }
    if (n_active) *n_active = e->n_running + e->n_waiting;
    return PAGED_OK;
}

paged_status paged__engine_warm_up(paged_engine *e, paged_error *err) {
    int32_t token = 0;
    paged__request r = {.tokens = &token, .n_prompt = 1, .n_tokens = 1};
    paged__step step;
    paged_status s = paged_seq_create(e->cache, &r.seq);
    if (s) return paged__fail(err, s, "no sequence to warm up with");
    s = paged_seq_reserve(e->cache, r.seq, 1);
    if (s) {
        paged__fail(err, s, "no block to warm up with");
    } else {
        e->pieces[0] = (paged__piece){.request = &r, .n_tokens = 1};
        e->n_pieces = 1;
        lay_out(e, &step);
        s = e->backend.step(e->backend.self, &step, &e->logits, err);
        e->n_pieces = 0;
    }
    PAGED_ASSERT(paged_seq_free(e->cache, r.seq) == PAGED_OK);
    return s;
}
