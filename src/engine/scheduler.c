/* engine/scheduler.c: who runs, and what the next step computes.
 *
 *   1 requests whose wait for another one's prompt, or for an answer of stores, is over begin
 *   2 each one that decodes gets the slot of its newest token. Where the pool has no block for it, the one
 *     that ranks last of those that run is preempted (it may be itself), until there is one
 *   3 from the queue, best rank first, requests begin: only if nobody had to give a block in this step, and
 *     nobody passes one that does not fit
 *   4 what is left of the token budget goes to prompts
 *
 * A request that begins reserves all that it needs until its next token, at once or not at all. So 4 cannot
 * fail, and whoever is short of a block in 2 has made a token since he came.
 *
 * Where layers have windows, that would take blocks of the whole prompt for a window of it. There 4 takes the
 * blocks of each chunk, and what fell out of the windows has gone back by then. An admission counts the
 * windows, and what prompts that are being computed are still going to take; blocks of several groups may lie
 * scattered all the same, so that a chunk can lack one, as a token in 2. One that is alone gathers them.
 *
 * Who gives a block: never the oldest, and nobody a second time before he has made a token. If then all
 * others are of that kind, the request that is short sits out the step and keeps what it has: they hold all
 * that they need to get on, and afterwards they may give again. If there are no others it goes back into the
 * queue and begins again, since tiles of packed tails may lie scattered; if that finds no room it has filled
 * the pool alone and ends. So the oldest always gets on, some request makes progress in every step, and each
 * one makes a token between two preemptions. (With windows the oldest may take from everybody, however often,
 * and the last of these does not hold.)
 *
 * Who is parked is not one of those that run in any of this: it neither protects nor blocks anybody, gives
 * its blocks and its place before all others do, and is passed over in the queue.
 *
 * Blocks that the store thread reads or writes come back by themselves. What is only queued for it is given
 * up for a request that needs the room; for the rest a request waits as for another one. Who is filled by
 * that thread is no victim: his blocks would not come free.
 *
 * Progress: if nothing runs and nothing is on its way to or from a store, the first of the queue is admitted
 * or fails. */
#include "engine/engine.h"

static int32_t blocks_for(const paged_engine *e, int32_t n_tokens) {
    return (n_tokens + e->config.block_size - 1) / e->config.block_size;
}

/* Bytes of blocks that a reservation may take: free ones and cached ones, which go for it, within the pool's
 * limit. */
static int64_t available(const paged_engine *e) {
    const paged_cache *c = e->cache;
    const size_t left = c->used_bytes < c->max_bytes ? c->max_bytes - c->used_bytes : 0;
    if (e->n_groups > 1) return (int64_t)left;
    return (int64_t)PAGED_MIN((size_t)(e->n_blocks - c->groups[0].n_used) * c->groups[0].block_bytes, left);
}

static bool is_active(const paged__request *r) {
    return r->state == PAGED__WAITING || r->state == PAGED__RUNNING;
}

/* When its reader is given up: parked, it has made no token since. UINT64_MAX: never. */
static uint64_t reader_end(const paged_engine *e, const paged__request *r) {
    return e->reader_timeout_ns && paged__request_is_parked(e, r) ? r->last_ns + e->reader_timeout_ns
                                                                  : UINT64_MAX;
}

void paged__drop_ended(paged_engine *e) {
    const uint64_t now = paged__engine_now(e);
    for (int32_t i = 0; i < e->n_slots; i++) {
        paged__request *r = &e->slots[i];
        if (!is_active(r)) continue;
        if (r->cancel_id == r->id)
            paged__request_finish(e, r, PAGED_FINISH_CANCELLED);
        else if (r->deadline_ns && now >= r->deadline_ns)
            paged__request_finish(e, r, PAGED_FINISH_DEADLINE);
        else if (now >= reader_end(e, r))
            paged__request_finish(e, r, PAGED_FINISH_READER);
    }
}

uint64_t paged__next_event(const paged_engine *e) {
    uint64_t next = paged__loads_event(e);
    if (e->cache->idle_bytes) next = PAGED_MIN(next, paged__engine_now(e) + e->cache->trim_after);
    for (int32_t i = 0; i < e->n_slots; i++) {
        const paged__request *r = &e->slots[i];
        if (!is_active(r)) continue;
        if (r->deadline_ns) next = PAGED_MIN(next, r->deadline_ns);
        next = PAGED_MIN(next, reader_end(e, r));
    }
    return next;
}

/* ---- to give ---- */

static bool computes(const paged_engine *e, const paged__request *r) {
    return !r->awaits && !paged__request_is_parked(e, r);
}

/* Of those that run and are parked, the one that ranks last; NULL: there is none. */
static paged__request *find_parked(const paged_engine *e) {
    for (int32_t i = e->n_running - 1; i >= 0; i--)
        if (paged__request_is_parked(e, e->running[i])) return e->running[i];
    return NULL;
}

/* Of those that run, the one that is to give its blocks to `taker`; NULL: nobody. */
static paged__request *find_victim(const paged_engine *e, const paged__request *taker) {
    paged__request *victim = find_parked(e);
    uint64_t oldest = UINT64_MAX;
    for (int32_t i = 0; i < e->n_running; i++)
        if (!paged__request_is_parked(e, e->running[i])) oldest = PAGED_MIN(oldest, e->running[i]->id);
    for (int32_t i = e->n_running - 1; i >= 0 && !victim; i--) {
        paged__request *r = e->running[i];
        const bool must_get_on = r->n_preemptions > 0 && r->n_tokens == r->n_came_with;
        const bool must_give = e->windowed && taker->id == oldest;
        if (r->id != oldest && !r->awaits && !r->load && (must_give || !must_get_on)) victim = r;
    }
    return victim;
}

static void remove_piece(paged_engine *e, const paged__request *r) {
    int32_t n_kept = 0;
    for (int32_t i = 0; i < e->n_pieces; i++)
        if (e->pieces[i].request != r) e->pieces[n_kept++] = e->pieces[i];
    e->n_pieces = n_kept;
}

static void preempt(paged_engine *e, paged__request *r) {
    remove_piece(e, r);
    r->n_preemptions++;
    e->stats.n_preemptions++;
    paged__request_wait(e, r, paged__request_is_parked(e, r) ? PAGED_WAIT_READER : PAGED_WAIT_PREEMPTED);
}

/* ---- to begin ---- */

const paged_namespace *paged__names_of(const paged_engine *e, const char *salt, paged__names *n) {
    n->kv[0] = (int32_t)e->config.kv_type;
    n->kv[1] = e->config.kv_plain;
    n->all = (paged_namespace){.fields = n->fields};
    n->fields[n->all.n_fields++] = (paged_ns_field){PAGED_NS_MODEL, e->fingerprint, sizeof e->fingerprint};
    if (salt) n->fields[n->all.n_fields++] = (paged_ns_field){PAGED_NS_SALT, salt, strlen(salt)};
    n->fields[n->all.n_fields++] = (paged_ns_field){PAGED_NS_KV_TYPE, n->kv, sizeof n->kv};
    return &n->all;
}

/* Whoever wants to see the prompt's logits needs all of it computed; when it has made a token it has seen
 * them. */
static bool may_reuse(const paged_engine *e, const paged__request *r) {
    return !e->config.no_prefix_cache && (!r->params.prompt_logprobs || paged__n_made(r) > 0);
}

/* Takes over what is cached of its tokens. What is told of it is told of the first time. */
static paged_status reuse(paged_engine *e, paged__request *r) {
    paged__names names;
    paged_match match = {.why = PAGED_MISS_OFF};
    if (!e->config.no_prefix_cache) {
        const int32_t n_wanted = paged__load_want(e, r);
        int32_t n_tokens = may_reuse(e, r) ? r->n_tokens : 0;
        if (n_wanted >= 0) n_tokens = n_wanted * e->config.block_size + 1; /* whole blocks only */
        paged_status s = paged_seq_match(e->cache, r->seq, paged__names_of(e, r->salt, &names), r->tokens,
                                         n_tokens, &match);
        if (s) return s;
        if (!may_reuse(e, r)) match.why = PAGED_MISS_OFF;
        if (n_wanted >= 0) match.why = PAGED_MISS_NO_MATCH; /* until it is read */
    }
    r->n_cached = match.n_matched;
    r->blocks_used = blocks_for(e, r->n_cached);
    if (r->start_ns) return PAGED_OK;
    r->n_reused = match.n_matched;
    r->miss = match.why;
    return PAGED_OK;
}

static bool others_compute(const paged_engine *e, const paged__request *r) {
    for (int32_t i = 0; i < e->n_running; i++)
        if (e->running[i] != r && computes(e, e->running[i])) return true;
    return false;
}

/* Bytes for all that is left to compute; of a group with a window, for what there is of it at a time. */
static int64_t needed_by(const paged_engine *e, const paged__request *r) {
    int64_t bytes = 0;
    for (int32_t g = 0; g < e->n_groups; g++) {
        const paged__group *group = &e->cache->groups[g];
        int32_t n = paged_seq_blocks_needed(e->cache, r->seq, g, r->n_tokens - r->n_cached);
        if (e->windowed && group->config.window)
            n = PAGED_MIN(n, blocks_for(e, group->config.window + e->config.chunk_tokens) + 1);
        bytes += (int64_t)group->block_bytes * n;
    }
    return bytes;
}

/* What the prompts of others are going to take, where they take it chunk by chunk. */
static int64_t promised(const paged_engine *e, const paged__request *r) {
    int64_t bytes = 0;
    for (int32_t i = 0; e->windowed && i < e->n_running; i++)
        if (e->running[i] != r && !e->running[i]->awaits) bytes += needed_by(e, e->running[i]);
    return bytes;
}

/* Leaves a request that begins the whole blocks of what it found. */
static void cut_to_blocks(paged_engine *e, paged__request *r) {
    r->n_cached -= r->n_cached % e->config.block_size;
    PAGED_ASSERT(paged_seq_truncate(e->cache, r->seq, r->n_cached) == PAGED_OK);
    if (!r->start_ns) r->n_reused = r->n_cached;
    r->blocks_used = blocks_for(e, r->n_cached);
}

/* What an admission leaves to those that run, so that they do not throw each other out at once: each may fill
 * one more block. */
static int64_t left_to_others(const paged_engine *e, const paged__request *r) {
    int64_t bytes = 0;
    for (int32_t g = 0; g < e->n_groups; g++) bytes += (int64_t)e->cache->groups[g].block_bytes;
    return others_compute(e, r) ? PAGED_MIN(e->watermark, e->n_running) * bytes : 0;
}

/* The slots of all that is left to compute, from *available_bytes, which follow what those give that are
 * parked. Tiles of packed tails may be short where blocks are not. Where layers have windows nothing is taken
 * yet; what was found of a window is counted twice, so that the sum says nothing about one that is alone. */
static paged_status reserve_all(paged_engine *e, const paged__request *r, int64_t *available_bytes) {
    for (;;) {
        paged_status s = PAGED_ERR_NO_BLOCKS;
        if (e->windowed && (r->needed_bytes <= *available_bytes || !others_compute(e, r)))
            s = PAGED_OK;
        else if (r->needed_bytes <= *available_bytes)
            s = paged_seq_reserve(e->cache, r->seq, r->n_tokens - r->n_cached);
        if (s != PAGED_ERR_NO_BLOCKS) return s;
        const int64_t before = available(e);
        if (!paged__stores_give(e)) {
            paged__request *gives = find_parked(e);
            if (!gives) return s;
            preempt(e, gives);
        }
        *available_bytes += available(e) - before;
    }
}

/* What comes from a store is read into whole blocks; if there is no room for one more, without the last
 * piece. Where layers have windows it begins with the prompts (add_prompts). */
static void begin_load(paged_engine *e, paged__request *r) {
    if (!r->load || e->windowed) return;
    const int32_t n_left = r->n_tokens - r->n_cached;
    if (paged__load_slots(e, r) > n_left) (void)paged_seq_reserve(e->cache, r->seq, paged__load_slots(e, r));
    paged__load_begin(e, r);
}

/* From here on the request computes, and without windows lacks nothing until it has made its next token.
 * NO_BLOCKS: it does not fit beside those that run. */
static paged_status begin(paged_engine *e, paged__request *r) {
    const int64_t kept = left_to_others(e, r) + promised(e, r);
    int64_t before = available(e);
    paged_status s = reuse(e, r);
    if (s) return s;
    r->needed_bytes = before - available(e) + needed_by(e, r) + kept;
    s = reserve_all(e, r, &before);
    if (s == PAGED_ERR_NO_BLOCKS && e->packed_tails && r->n_cached % e->config.block_size) {
        /* What was found of a block lies in tiles, which take room until they have become a block. */
        cut_to_blocks(e, r);
        r->needed_bytes = before - available(e) + needed_by(e, r) + kept;
        s = reserve_all(e, r, &before);
    }
    if (s) return s;
    r->needed_bytes = 0;
    begin_load(e, r);
    if (!r->start_ns) r->start_ns = paged__engine_now(e);
    return PAGED_OK;
}

/* Begins, or fails, or goes back into the queue. False: that. */
static bool try_to_begin(paged_engine *e, paged__request *r) {
    r->error = begin(e, r);
    if (r->error == PAGED_ERR_NO_BLOCKS && (others_compute(e, r) || paged__stores_hold(e))) {
        r->error = PAGED_OK;
        paged__request_wait(e, r, r->n_preemptions ? PAGED_WAIT_PREEMPTED : PAGED_WAIT_BLOCKS);
        return false;
    }
    if (r->error == PAGED_ERR_NO_BLOCKS && paged__n_made(r) > 0) { /* it has filled the pool alone */
        r->error = PAGED_OK;
        paged__request_finish(e, r, PAGED_FINISH_LENGTH);
    } else if (r->error) {
        paged__request_finish(e, r, PAGED_FINISH_ERROR);
    }
    return true;
}

/* Those whose wait for another one is over. One that fails there may end the wait of others, before it in the
 * list too, and so may one that gives its blocks. */
static void wake(paged_engine *e) {
    for (int32_t i = 0; i < e->n_running;) {
        paged__request *r = e->running[i++];
        if (!r->awaits || paged_seq_waits(e->cache, r->seq) || paged__load_asks(e, r)) continue;
        r->awaits = false;
        r->wait = PAGED_WAIT_NONE;
        if (paged__load_ask(e, r)) continue;
        try_to_begin(e, r);
        i = 0;
    }
}

/* Lets a request wait for one that computes what it needs. */
static paged_status promise(paged_engine *e, paged__request *r) {
    paged__names names;
    if (!may_reuse(e, r)) return PAGED_OK;
    paged_status s = paged_seq_promise(e->cache, r->seq, paged__names_of(e, r->salt, &names), r->tokens,
                                       r->n_tokens, &r->awaits);
    if (r->awaits) r->wait = PAGED_WAIT_PROMISE;
    return s;
}

/* One of n answers, the first of which computes the prompt for all: see fork_choices(). */
static bool waits_for_first(const paged_engine *e, const paged__request *r) {
    const paged__request *first = r->choice ? paged__request_find(e, r->id - (uint64_t)r->choice) : NULL;
    return first && first->state == PAGED__RUNNING && paged__n_made(first) == 0;
}

static paged__request *first_waiting(const paged_engine *e) {
    for (int32_t i = 0; i < e->n_waiting; i++)
        if (!paged__request_is_parked(e, e->waiting[i])) return e->waiting[i];
    return NULL;
}

static void admit(paged_engine *e) {
    for (paged__request *r; (r = first_waiting(e));) {
        paged__request *parked = find_parked(e);
        if (waits_for_first(e, r)) {
            r->wait = PAGED_WAIT_PROMISE;
            return;
        }
        while (r->needed_bytes > available(e) && paged__stores_give(e)) continue;
        if (e->n_running > 0 && !parked && r->needed_bytes > available(e)) return;
        if (e->n_running == e->config.max_running) {
            if (!parked) return;
            preempt(e, parked);
        }
        if (paged_seq_create(e->cache, &r->seq) != PAGED_OK) return;
        paged__request_run(e, r);
        r->error = promise(e, r);
        if (r->error)
            paged__request_finish(e, r, PAGED_FINISH_ERROR);
        else if (!r->awaits && !paged__load_ask(e, r) && !try_to_begin(e, r))
            return;
    }
}

/* ---- the step ---- */

static void add_piece(paged_engine *e, paged__request *r, int32_t n_tokens) {
    e->pieces[e->n_pieces++] = (paged__piece){.request = r, .n_tokens = n_tokens, .first_output = -1};
}

/* All that it needs for its next token is the slot of its newest one. */
static bool decodes(const paged__request *r) {
    return !r->awaits && r->n_tokens > r->n_came_with && r->n_tokens - r->n_cached == 1;
}

/* The request has no room, and there is nobody to give some or to wait for. Tiles of packed tails may lie
 * scattered, so that it begins again; otherwise it has filled the pool. */
static void give_up(paged_engine *e, paged__request *r, paged_status why) {
    if (why == PAGED_ERR_NO_BLOCKS && !e->windowed) {
        paged__request_wait(e, r, PAGED_WAIT_BLOCKS);
    } else if (why == PAGED_ERR_NO_BLOCKS && paged__n_made(r) > 0) {
        paged__request_finish(e, r, PAGED_FINISH_LENGTH);
    } else {
        r->error = why;
        paged__request_finish(e, r, PAGED_FINISH_ERROR);
    }
}

/* Blocks of a group may lie scattered over memory that another one needs. True: over less now. Nothing holds
 * a slot or a table yet. */
static bool gathers(paged_engine *e) {
    size_t moved_bytes = 0;
    return e->n_groups > 1 && !paged_cache_compact(e->cache, SIZE_MAX, true, &moved_bytes) && moved_bytes > 0;
}

/* Slots for the next n_tokens of the request in place *at of the running ones. False: it has no part in this
 * step. *at moves with it, or, if it left the list, to the place before. */
static bool reserve_next(paged_engine *e, int32_t *at, int32_t n_tokens) {
    paged__request *r = e->running[*at];
    for (;;) {
        paged_status s = paged_seq_reserve(e->cache, r->seq, n_tokens);
        if (!s) return true;
        if (s == PAGED_ERR_NO_BLOCKS && paged__stores_give(e)) continue;
        paged__request *gives = s == PAGED_ERR_NO_BLOCKS ? find_victim(e, r) : NULL;
        if (gives) {
            for (int32_t i = *at; i >= 0; i--) *at -= e->running[i] == gives;
            preempt(e, gives);
            if (gives == r) return false;
        } else if (s == PAGED_ERR_NO_BLOCKS && (others_compute(e, r) || paged__stores_hold(e))) {
            r->wait = PAGED_WAIT_BLOCKS;
            e->stats.n_stalls++;
            return false;
        } else if (s != PAGED_ERR_NO_BLOCKS || !gathers(e)) {
            give_up(e, r, s);
            --*at;
            return false;
        }
    }
}

/* One token each, before any prompt: their streams keep moving while a long prompt is computed beside
 * them. */
static void add_decoding(paged_engine *e, int32_t budget) {
    for (int32_t i = 0; i < e->n_running && e->n_pieces < budget; i++) {
        paged__request *r = e->running[i];
        if (!decodes(r) || paged__request_is_parked(e, r)) continue;
        r->wait = PAGED_WAIT_NONE;
        if (reserve_next(e, &i, 1)) add_piece(e, r, 1);
    }
}

/* Rows of logits that a step has for prompts that want all of theirs: the others want one at most. */
static int32_t rows_to_score(const paged_engine *e) {
    const bool has_all = e->max_outputs == e->config.chunk_tokens;
    return has_all ? e->max_outputs : e->max_outputs - (e->config.max_running - 1);
}

/* A request that gets its tokens from a store, and so has no part in this step. Where layers have windows,
 * the next chunk of them is asked for here; without room for it, which nobody gives for that, it computes
 * the rest. */
static bool fills(paged_engine *e, paged__request *r) {
    if (!r->load || r->load->state == PAGED__LOAD_READING) return r->load != NULL;
    paged_status s;
    while ((s = paged_seq_reserve(e->cache, r->seq, paged__load_slots(e, r))) == PAGED_ERR_NO_BLOCKS &&
           paged__stores_give(e))
        continue;
    if (!s) return paged__load_begin(e, r);
    paged__load_leave(e, r);
    return false;
}

/* Without windows what begins lacks nothing (see begin). */
static void add_prompts(paged_engine *e, int32_t budget) {
    int32_t n_rows = rows_to_score(e);
    for (int32_t i = 0; i < e->n_running && budget > 0; i++) {
        paged__request *r = e->running[i];
        if (r->awaits || decodes(r) || fills(e, r)) continue;
        int32_t n = PAGED_MIN(r->n_tokens - r->n_cached, budget);
        if (paged__request_scores(r)) n_rows -= n = PAGED_MIN(n, n_rows);
        if (n == 0) continue;
        r->wait = PAGED_WAIT_NONE;
        if (e->windowed && !reserve_next(e, &i, n)) continue;
        add_piece(e, r, n);
        budget -= n;
    }
}

static void tell_parked(paged_engine *e) {
    for (int32_t i = 0; i < e->n_running; i++)
        if (paged__request_is_parked(e, e->running[i])) e->running[i]->wait = PAGED_WAIT_READER;
    for (int32_t i = 0; i < e->n_waiting; i++) {
        paged__request *r = e->waiting[i];
        if (paged__request_is_parked(e, r))
            r->wait = PAGED_WAIT_READER;
        else if (r->wait == PAGED_WAIT_READER)
            r->wait = PAGED_WAIT_PREEMPTED;
    }
}

/* Somebody is there who is not parked. */
static bool wants_a_step(const paged_engine *e) {
    for (int32_t i = 0; i < e->n_running; i++)
        if (!paged__request_is_parked(e, e->running[i])) return true;
    return first_waiting(e) != NULL;
}

void paged__schedule(paged_engine *e) {
    const uint64_t n_preemptions = e->stats.n_preemptions, n_stalls = e->stats.n_stalls;
    paged_cache_set_clock(e->cache, paged__engine_now(e)); /* memory that was idle for long goes back */
    e->n_pieces = 0;
    tell_parked(e);
    wake(e);
    add_decoding(e, e->config.chunk_tokens);
    if ((n_preemptions == e->stats.n_preemptions && n_stalls == e->stats.n_stalls) ||
        !others_compute(e, NULL))
        admit(e);
    add_prompts(e, e->config.chunk_tokens - e->n_pieces);
    /* One that ended in its prompt for want of blocks was perhaps what all the others waited for. Each turn
     * ends one or makes a piece. */
    while (e->windowed && e->n_pieces == 0 && wants_a_step(e) && !paged__stores_pending(e)) {
        wake(e);
        admit(e);
        add_prompts(e, e->config.chunk_tokens);
    }
}
