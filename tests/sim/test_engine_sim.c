/* Goal: whatever happens, every request ends, with the text that it has alone, and nothing stays behind.
 * Method: the real scheduler and memory under a virtual clock, with a model that is a hash. For each token it
 * stores the hash of all tokens up to it in the token's slot, and the next token is drawn from a hash
 * of everything that it reads back through the block table; so one wrong, foreign or stale slot changes the
 * text. What a request should say is computed from its tokens alone, without engine or cache.
 *
 * A run has a phase with faults (allocations that fail, steps that fail, pinned blocks, cancels, releases,
 * deadlines, readers that fall asleep, a store whose every call may fail or lie), then one without, in which
 * all must end in bounded time. The store's thread is the test, a few of its jobs a step. Everything
 * comes from the seed: `test_engine_sim --seed N` begins with run N. */
#include <unistd.h>

#include "engine/engine.h"
#include "memory_store.h"
#include "test.h"
#include "tiny_model.h"

enum { N_REQUESTS = 24, N_CTX = 320, N_NEW_MAX = 60, N_FAMILIES = 3, FAULT_TICKS = 160 };

/* ---- the model ---- */

typedef struct fake {
    paged_kv kv[2]; /* the second: of layers with a window */
    paged_group_config groups[2];
    int32_t window; /* 0: there are none */
    uint64_t now_ns;
    float *logits; /* [max_outputs, TINY_VOCAB] */
    bool fails;    /* the next step */
} fake;

static uint64_t next_hash(uint64_t before, int32_t token, int32_t position) {
    return paged__mix(before + paged__mix((uint64_t)token << 32 | (uint32_t)position));
}

static uint64_t fold(uint64_t sum, uint64_t hash) {
    return paged__mix(sum * 31 + hash);
}

static void fill_logits(uint64_t sum, float *row /* [TINY_VOCAB] */) {
    for (int32_t v = 0; v < TINY_VOCAB; v++)
        row[v] = (float)(paged__mix(sum + (uint64_t)v) >> 40) * 0x1p-24f * 10;
}

static paged_status fake_bind(void *self, const paged_kv *kv, paged_error *err) {
    (void)err;
    fake *f = self;
    memcpy(f->kv, kv, (f->window ? 2 : 1) * sizeof *kv);
    return PAGED_OK;
}

static uint64_t fake_now(void *self) {
    return ((fake *)self)->now_ns;
}

/* Where the hash of a token lies: in the first four elements of its key, which are 32 bytes apart. */
static uint8_t *at_slot(const paged_kv *kv, int64_t slot) {
    CHECK(slot >= 0 && slot < (int64_t)kv->n_blocks * kv->block_size);
    const int64_t block = slot / kv->block_size, offset = slot % kv->block_size;
    return kv->k + block * kv->block_stride + offset / PAGED_TILE * PAGED_TILE * kv->head_dim_k * 2 +
           offset % PAGED_TILE * 2;
}

static void put_hash(const paged_kv *kv, int64_t slot, uint64_t hash) {
    uint8_t *to = at_slot(kv, slot);
    for (int d = 0; d < 4; d++) memcpy(to + d * PAGED_TILE * 2, (uint8_t *)&hash + d * 2, 2);
}

static uint64_t get_hash(const paged_kv *kv, int64_t slot) {
    const uint8_t *from = at_slot(kv, slot);
    uint64_t hash;
    for (int d = 0; d < 4; d++) memcpy((uint8_t *)&hash + d * 2, from + d * PAGED_TILE * 2, 2);
    return hash;
}

static uint64_t read_token(const paged_kv *kv, const paged_tables *t, int32_t seq, int32_t position) {
    const int32_t bs = kv->block_size, offset = position % bs, *tail = NULL;
    const int32_t block = t->blocks[t->rows[seq] * t->seq_stride + position / bs];
    int64_t slot = (int64_t)block * bs + offset;
    if (block < 0) {
        CHECK(t->tail_tiles && (t->seqlens_k[seq] - 1) / bs == position / bs);
        tail = t->tail_tiles + (ptrdiff_t)t->rows[seq] * (bs / PAGED_TILE);
        slot = (int64_t)tail[offset / PAGED_TILE] * PAGED_TILE + offset % PAGED_TILE;
    }
    return get_hash(kv, slot);
}

static void check_shared(const fake *f, const paged_batch *b) {
    int32_t before = 0;
    for (int32_t i = 0; i < b->n_shared; i++) {
        const paged_shared g = b->shared[i];
        CHECK(g.first_seq >= before && g.n_seqs >= 2 && g.n_tokens > 0);
        before = g.first_seq + g.n_seqs;
        CHECK(before <= b->tables.n_seqs);
        for (int32_t s = g.first_seq; s < before; s++)
            for (int32_t k = 0; k < g.n_tokens; k += f->kv->block_size)
                CHECK_EQ(read_token(f->kv, &b->tables, s, k), read_token(f->kv, &b->tables, g.first_seq, k));
    }
}

/* Stores the hash of token i of a sequence in the windowed layers, and sees what is in its window there. */
static uint64_t through_window(const fake *f, const paged__step *step, int32_t seq, int32_t i, uint64_t hash,
                               uint64_t sum) {
    const paged_tables *t = &step->batch[1].tables;
    const int32_t pos = step->positions[i], first = PAGED_MAX(pos - f->window + 1, 0);
    CHECK(t->first_k[seq] <= first);
    put_hash(&f->kv[1], step->slots[1][i], paged__mix(hash + 1));
    for (int32_t p = first; p <= pos; p++) sum = fold(sum, read_token(&f->kv[1], t, seq, p));
    return sum;
}

static paged_status fake_step(void *self, const paged__step *step, const float **logits, paged_error *err) {
    fake *f = self;
    const paged_batch *b = &step->batch[0];
    int32_t n_out = 0;
    f->now_ns += 1000000;
    if (f->fails) return paged__fail(err, PAGED_ERR_IO, "the device is gone");
    for (int32_t s = 0; s < b->tables.n_seqs; s++) {
        for (int32_t i = b->cu_seqlens_q[s]; i < b->cu_seqlens_q[s + 1]; i++) {
            const int32_t pos = step->positions[i];
            const uint64_t before = pos ? read_token(f->kv, &b->tables, s, pos - 1) : 0,
                           hash = next_hash(before, step->tokens[i], pos);
            uint64_t sum = 0;
            put_hash(f->kv, step->slots[0][i], hash);
            for (int32_t p = 0; p <= pos; p++) sum = fold(sum, read_token(f->kv, &b->tables, s, p));
            if (f->window) sum = through_window(f, step, s, i, hash, sum);
            if (n_out == step->n_outputs || step->outputs[n_out] != i) continue;
            fill_logits(sum, f->logits + (ptrdiff_t)n_out++ * TINY_VOCAB);
        }
    }
    CHECK_EQ(n_out, step->n_outputs);
    check_shared(f, b);
    *logits = f->logits;
    return PAGED_OK;
}

/* ---- memory that fails on demand ---- */

static int fail_in; /* the fail_in-th allocation from now on fails; 0: none */
static long n_live;

static void *sim_alloc(void *user, size_t size, size_t align) {
    (void)user;
    if (fail_in > 0 && --fail_in == 0) return NULL;
    n_live++;
    return aligned_alloc(align, (size + align - 1) / align * align);
}

static void sim_free(void *user, void *ptr) {
    (void)user;
    n_live--;
    free(ptr);
}

/* ---- a run ---- */

typedef struct record {
    uint64_t id; /* 0: not submitted */
    int32_t choice;
    paged_request params;
    int32_t tokens[N_CTX];
    int32_t want[N_NEW_MAX], n_want; /* the answer alone */
    paged_finish want_finish;
    int32_t got[N_NEW_MAX], n_got;
    char text[N_NEW_MAX * PAGED_DETOK_MAX + 1];
    size_t text_len;
    int32_t n_preemptions, made_then; /* tokens of the answer at the last preemption */
    paged_finish finish;
    bool over, released;
    bool asleep; /* its reader */
} record;

typedef struct sim {
    uint64_t seed, random;
    paged_engine *e;
    fake f;
    const paged_tokenizer *tok;
    paged__sampler *sampler;
    record r[N_REQUESTS];
    int32_t n_submitted;
    int32_t n_kinds; /* of faults, of which the first few are real: many kinds are few faults */
    bool had_pins, faults;
    memory_store *store; /* NULL: none */
} sim;

static uint64_t n_preempted, n_ended[PAGED_FINISH_KINDS], n_cascades, n_stalls, n_tails, n_parked,
    n_dropped_tokens, n_windowed, n_loaded, n_loaded_windowed, n_hits_windowed, n_store_dropped;

static int32_t below(sim *s, int32_t n) {
    return (int32_t)(paged__rand(&s->random) % (uint64_t)n);
}

static memory_fault store_fault(void *user, memory_call call) {
    sim *s = user;
    (void)call;
    if (!s->faults || below(s, s->n_kinds) > 2) return MEMORY_FINE;
    return (memory_fault)(1 + below(s, MEMORY_SLOW - 1));
}

/* Some of what the store's thread has to do, or all. */
static void store_works(sim *s, int32_t n) {
    while (s->store && n-- > 0 && paged__stores_work(s->e)) continue;
}

/* What the model reads behind n tokens; of layers with a window, the end of it. */
static uint64_t sum_of(const sim *s, const int32_t *tokens, int32_t n) {
    uint64_t hashes[N_CTX + N_NEW_MAX + 1], sum = 0;
    for (int32_t i = 0; i < n; i++)
        sum = fold(sum, hashes[i] = next_hash(i ? hashes[i - 1] : 0, tokens[i], i));
    for (int32_t p = PAGED_MAX(n - s->f.window, 0); s->f.window && p < n; p++)
        sum = fold(sum, paged__mix(hashes[p] + 1));
    return sum;
}

/* The first blocks and the newest half of the rest stay. Returns how many go. */
static int32_t drop_middle(const sim *s, const record *r, int32_t *tokens, int32_t n) {
    const int32_t bs = s->e->config.block_size, sink = (r->params.keep_sink + bs - 1) / bs * bs;
    const int32_t n_drop = (n - sink) / 2 / bs * bs;
    memmove(tokens + sink, tokens + sink + n_drop, (size_t)(n - sink - n_drop) * sizeof *tokens);
    return n_drop;
}

/* The answer of a request, from its tokens and parameters alone. */
static void answer_alone(sim *s, record *r) {
    int32_t tokens[N_CTX + N_NEW_MAX + 1], n = r->params.n_tokens, n_dropped = 0;
    const int32_t max_new =
        r->params.keep_sink ? r->params.max_tokens : PAGED_MIN(s->e->n_ctx - n + 1, r->params.max_tokens);
    float row[TINY_VOCAB];
    memcpy(tokens, r->tokens, (size_t)n * sizeof *tokens);
    for (r->n_want = 0; r->n_want < max_new;) {
        if (n > s->e->n_ctx) {
            const int32_t n_drop = drop_middle(s, r, tokens, n);
            n_dropped += n_drop;
            n -= n_drop;
        }
        fill_logits(sum_of(s, tokens, n), row);
        const paged__choice how = {.params = &r->params,
                                   .tokens = tokens,
                                   .n_prompt = PAGED_MAX(n - r->n_want, 0),
                                   .n_tokens = n,
                                   .n_dropped = n_dropped,
                                   .choice = r->choice,
                                   .ban_eog = r->params.ignore_eos};
        const int32_t token = paged__sample(s->sampler, row, &how);
        r->want_finish = PAGED_FINISH_STOP;
        if (!r->params.ignore_eos && paged_token_is_eog(s->tok, token)) return;
        r->want[r->n_want++] = tokens[n++] = token;
    }
    r->want_finish = PAGED_FINISH_LENGTH;
    n_dropped_tokens += (uint64_t)n_dropped;
}

/* Prompts of a few families have beginnings in common, of any length. */
static void submit(sim *s) {
    record *r = &s->r[s->n_submitted];
    const char *const salts[] = {NULL, NULL, NULL, "x", "y"};
    const int32_t n = below(s, 8) ? 1 + below(s, PAGED_MIN(s->e->n_ctx, 150)) : s->e->n_ctx - below(s, 3);
    uint64_t family = s->seed + 1000 * (uint64_t)below(s, N_FAMILIES), own = paged__rand(&s->random);
    const int32_t n_common = below(s, 3) ? below(s, n + 1) : 0;
    memset(r, 0, sizeof *r);
    for (int32_t i = 0; i < n; i++)
        r->tokens[i] = (int32_t)(paged__rand(i < n_common ? &family : &own) % 256);
    paged_request_init(&r->params);
    r->params.tokens = r->tokens;
    r->params.n_tokens = n;
    r->params.max_tokens = 1 + below(s, N_NEW_MAX);
    r->params.temperature = below(s, 2) ? 0 : 1.5f;
    r->params.repetition_penalty = below(s, 4) ? 0 : 1.2f;
    r->params.seed = own;
    r->params.ignore_eos = below(s, 2);
    r->params.prompt_logprobs = below(s, 8) == 0;
    r->params.priority = below(s, 3) ? 0 : below(s, 5) - 2;
    r->params.deadline_ms = below(s, 10) ? 0 : 20 + below(s, 200);
    r->params.salt = salts[below(s, 5)];
    r->params.keep_sink = below(s, 3) || s->e->n_ctx < 4 * s->e->config.block_size
                              ? 0
                              : 1 + below(s, 2 * s->e->config.block_size);
    r->params.n = below(s, 5) ? 0 : 1 + below(s, PAGED_MIN(4, N_REQUESTS - s->n_submitted));
    const paged_status status = paged_engine_submit(s->e, &r->params, &r->id, NULL);
    if (status) {
        CHECK(status == PAGED_ERR_LIMIT || (s->faults && status == PAGED_ERR_NO_MEMORY));
        r->id = 0;
        return;
    }
    for (int32_t k = 0; k < PAGED_MAX(r->params.n, 1); k++) {
        record *one = &s->r[s->n_submitted++];
        if (k > 0) *one = *r;
        one->choice = k;
        one->id = r->id + (uint64_t)k;
        answer_alone(s, one);
    }
}

/* The text that the answer's tokens have by themselves. */
static void check_text(const sim *s, const record *r) {
    char want[sizeof r->text];
    size_t n = 0;
    paged_detok d;
    paged_detok_init(&d, s->tok, false);
    d.started = true;
    for (int32_t i = 0; i < r->n_got; i++) n += (size_t)paged_detok_push(&d, r->got[i], want + n);
    n += (size_t)paged_detok_finish(&d, want + n);
    CHECK_EQ(r->text_len, n);
    CHECK(memcmp(r->text, want, n) == 0);
}

static void check_end(sim *s, record *r, const paged_output *o) {
    r->over = true;
    n_ended[r->finish]++;
    check_text(s, r);
    CHECK_EQ(o->wait, PAGED_WAIT_NONE);
    if (r->finish == PAGED_FINISH_STOP || (r->finish == PAGED_FINISH_LENGTH && !s->had_pins)) {
        if (r->n_got != r->n_want || r->finish != r->want_finish)
            test_fail(__FILE__, __LINE__, "request %d + %d ends by %s after %d tokens, alone by %s after %d",
                      r->params.n_tokens, r->params.max_tokens, paged_finish_name(r->finish), r->n_got,
                      paged_finish_name(r->want_finish), r->n_want);
    }
    if (r->finish == PAGED_FINISH_DEADLINE) CHECK(r->params.deadline_ms > 0);
    if (r->finish == PAGED_FINISH_READER) {
        CHECK(s->e->reader_timeout_ns > 0);
        CHECK_EQ(o->n_tokens, s->e->max_unread);
    }
    if (r->finish == PAGED_FINISH_ERROR)
        CHECK(o->error == PAGED_ERR_NO_MEMORY || o->error == PAGED_ERR_IO ||
              (o->error == PAGED_ERR_NO_BLOCKS && s->had_pins));
}

static void read_one(sim *s, record *r) {
    paged_output o;
    const paged_status status = paged_engine_read(s->e, r->id, &o);
    if (status == PAGED_ERR_NO_MEMORY && s->faults) return;
    CHECK_EQ(status, PAGED_OK);
    CHECK(r->n_got + o.n_tokens <= r->n_want);
    for (int32_t i = 0; i < o.n_tokens; i++) {
        CHECK_EQ(o.tokens[i], r->want[r->n_got]);
        r->got[r->n_got++] = o.tokens[i];
    }
    memcpy(r->text + r->text_len, o.text, o.text_len);
    r->text_len += o.text_len;
    r->finish = o.finish;
    if (o.finish && !r->over) check_end(s, r, &o);
}

static void release(sim *s, record *r) {
    CHECK_EQ(paged_engine_release(s->e, r->id), PAGED_OK);
    r->released = true;
}

/* Pins what is cached of a prompt for a while. */
static void pin(sim *s) {
    int32_t kv[2] = {(int32_t)s->e->config.kv_type, s->e->config.kv_plain}, n_kept;
    const paged_ns_field fields[] = {{PAGED_NS_MODEL, s->e->fingerprint, sizeof s->e->fingerprint},
                                     {PAGED_NS_KV_TYPE, kv, sizeof kv}};
    const record *r = &s->r[below(s, s->n_submitted)];
    s->had_pins = true;
    paged_prefix_keep(s->e->cache, &(paged_namespace){fields, 2}, r->tokens, r->params.n_tokens, 0,
                      s->f.now_ns + (uint64_t)(1 + below(s, 40)) * 1000000, &n_kept);
}

/* One step, and what must hold across it. */
static void step(sim *s, int32_t *active) {
    uint64_t oldest = UINT64_MAX;
    paged_error err = {0};
    for (int32_t i = 0; i < s->e->n_running; i++)
        if (!paged__request_is_parked(s->e, s->e->running[i]))
            oldest = PAGED_MIN(oldest, s->e->running[i]->id);
    paged_cache_set_clock(s->e->cache, s->f.now_ns);
    s->f.now_ns += 1000;
    const paged_status status = paged_engine_step(s->e, active, &err);
    if (status) {
        CHECK(s->f.fails && status == PAGED_ERR_IO);
        *active = s->e->n_running + s->e->n_waiting;
    }
    for (int32_t i = 0; i < s->n_submitted; i++) {
        record *r = &s->r[i];
        const paged__request *q = r->released ? NULL : paged__request_find(s->e, r->id);
        if (!q) continue;
        CHECK(!s->e->max_unread || paged__n_made(q) - q->n_read <= s->e->max_unread);
        n_parked += q->wait == PAGED_WAIT_READER;
        if (q->n_preemptions == r->n_preemptions) continue;
        if (!s->f.window) {
            CHECK_EQ(q->n_preemptions, r->n_preemptions + 1);
            CHECK(r->id != oldest);
            CHECK(r->n_preemptions == 0 || paged__n_made(q) > r->made_then);
        }
        r->n_preemptions = q->n_preemptions;
        r->made_then = paged__n_made(q);
        n_preempted++;
    }
    for (int32_t i = 0; i < s->e->n_waiting; i++) CHECK(s->e->waiting[i]->wait != PAGED_WAIT_NONE);
    store_works(s, s->faults ? below(s, 4) : INT32_MAX);
    if (below(s, 4) == 0 && paged_engine_check(s->e, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
}

static void fault(sim *s) {
    record *r = s->n_submitted ? &s->r[below(s, s->n_submitted)] : NULL;
    switch (below(s, s->n_kinds)) {
    case 0:
        if (r) paged_engine_cancel(s->e, r->id);
        break;
    case 1:
        if (r && !r->released) release(s, r);
        break;
    case 2:
        fail_in = 1 + below(s, 12);
        break;
    case 3:
        s->f.fails = below(s, 8) == 0;
        break;
    case 4:
        if (r) pin(s);
        break;
    case 5:
        s->f.now_ns += (uint64_t)below(s, 100) * 1000000;
        break;
    case 6:
        if (r) r->asleep = !r->asleep;
        break;
    default:
        break;
    }
}

static void make(sim *s, const paged_model *m) {
    const int32_t sizes[] = {16, 16, 32, 64};
    paged_engine_config c = {.struct_size = sizeof c, .n_threads = 1, .poison = true, .n_ctx = N_CTX};
    c.block_size = sizes[below(s, 4)];
    c.max_running = 1 + below(s, 6);
    c.chunk_tokens = below(s, 3) ? 8 + below(s, 60) : 1 + below(s, 8);
    c.max_waiting = 1 + below(s, 12);
    c.no_prefix_cache = below(s, 5) == 0;
    c.no_packed_tails = below(s, 3) == 0;
    s->store = c.no_prefix_cache || below(s, 3) ? NULL : memory_create();
    const paged_store store = memory_as_store(s->store);
    c.stores = &store;
    c.n_stores = s->store != NULL;
    s->n_kinds = 12 << below(s, 5);
    s->f = (fake){.now_ns = 1, .window = below(s, 3) ? 0 : 1 + below(s, 90)};
    for (int32_t g = 0; g < 2; g++)
        s->f.groups[g] = (paged_group_config){.n_layers = 1,
                                              .n_kv_heads = 1 + g,
                                              .head_dim_k = 16,
                                              .head_dim_v = 16,
                                              .window = g * s->f.window};
    s->f.groups[0].layout = s->f.groups[1].layout = PAGED_LAYOUT_PACKED;
    c.pool_bytes = paged_pool_bytes_for(s->f.groups, s->f.window ? 2 : 1, c.block_size,
                                        (int64_t)c.block_size * (2 + below(s, 240 / c.block_size)));
    s->f.logits = malloc((size_t)c.chunk_tokens * TINY_VOCAB * sizeof *s->f.logits);
    const paged__backend backend = {.self = &s->f,
                                    .bind = fake_bind,
                                    .step = fake_step,
                                    .now_ns = fake_now,
                                    .groups = s->f.groups,
                                    .n_groups = s->f.window ? 2 : 1,
                                    .stores_by_hand = true};
    CHECK_EQ(paged__engine_create(m, &c, &backend, &s->e, NULL), PAGED_OK);
    if (s->store) {
        s->store->fault = store_fault;
        s->store->user = s;
    }
    s->e->max_unread = below(s, 2) ? 0 : 1 + below(s, 6);
    s->e->reader_timeout_ns = below(s, 2) ? 0 : (uint64_t)(1 + below(s, 80)) * 1000000;
    s->tok = s->e->tok;
    s->sampler = paged__sampler_create(TINY_VOCAB, s->tok);
}

/* Steps in which all that is left must end: each makes a token or computes a chunk, and what is preempted is
 * computed again, after a token at least. */
static int32_t steps_to_end(const sim *s) {
    int64_t n = 100;
    for (int32_t i = 0; i < s->n_submitted; i++)
        n += 3 * (s->r[i].params.n_tokens / s->e->config.chunk_tokens + 1 + s->r[i].params.max_tokens);
    return (int32_t)n * (s->store ? 2 : 1);
}

static void finish(sim *s) {
    paged_cache_stats cache;
    paged_engine_stats stats;
    paged_error err = {0};
    for (int32_t i = 0; i < s->n_submitted; i++) {
        record *r = &s->r[i];
        if (r->released) continue;
        read_one(s, r);
        CHECK(r->over);
        release(s, r);
    }
    paged_cache_set_clock(s->e->cache, UINT64_MAX);
    store_works(s, INT32_MAX);
    paged__stores_poll(s->e);
    if (paged_engine_check(s->e, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
    paged_engine_get_cache_stats(s->e, &cache);
    paged_engine_get_stats(s->e, &stats);
    CHECK_EQ(cache.n_used, 0);
    CHECK_EQ(cache.n_seqs, 0);
    CHECK_EQ(cache.n_free + cache.n_cached, cache.n_blocks);
    CHECK_EQ(stats.n_running + stats.n_waiting, 0);
    CHECK_EQ(stats.n_submitted, s->n_submitted);
    n_cascades += stats.n_cascade_steps;
    n_stalls += stats.n_stalls;
    n_tails += cache.n_packed;
    if (s->f.window) n_windowed += stats.n_preemptions;
    if (s->f.window) n_loaded_windowed += stats.n_store_tokens;
    if (s->f.window) n_hits_windowed += stats.n_store_hits;
    n_loaded += stats.n_store_tokens;
    n_store_dropped += stats.n_store_dropped;
}

/* Some of the readers that are awake. */
static void read_some(sim *s, int32_t one_of) {
    for (int32_t i = 0; i < s->n_submitted; i++)
        if (!s->r[i].released && !s->r[i].asleep && below(s, one_of) == 0) read_one(s, &s->r[i]);
}

static void run(uint64_t seed, const paged_model *m) {
    static sim s;
    int32_t active = 1, n_left;
    memset(&s, 0, sizeof s);
    s.seed = s.random = seed;
    s.faults = true;
    make(&s, m);
    for (int32_t tick = 0; tick < FAULT_TICKS; tick++) {
        fault(&s);
        if (s.n_submitted < N_REQUESTS && below(&s, 4) == 0) submit(&s);
        step(&s, &active);
        read_some(&s, 6);
        fail_in = 0;
        s.f.fails = false;
    }
    s.faults = false;
    paged_cache_set_clock(s.e->cache, s.f.now_ns += 1000000000);
    for (int32_t i = 0; i < s.n_submitted; i++) s.r[i].asleep = false;
    for (n_left = steps_to_end(&s); active && n_left > 0; n_left--) {
        if (s.e->max_unread) read_some(&s, 1);
        step(&s, &active);
    }
    CHECK_EQ(active, 0);
    finish(&s);
    paged__sampler_free(s.sampler);
    paged_engine_free(s.e);
    if (s.store) memory_destroy(s.store);
    free(s.f.logits);
}

static paged_model *load(void) {
    static const tiny_shape shape = {1, 1, 1, 16, 32, 1024, GGML_TYPE_F32};
    char path[64];
    paged_model *m = NULL;
    snprintf(path, sizeof path, "/tmp/paged-sim-%d.gguf", (int)getpid());
    CHECK(tiny_model_write(path, &shape, 1));
    const paged_status status = paged_model_load(path, NULL, &m, NULL);
    unlink(path);
    CHECK_EQ(status, PAGED_OK);
    return m;
}

/* Layers with a window, eight times the size of the others: two prompts of 300 tokens run side by side in a
 * pool that holds one of them whole, in no more blocks than windows and a chunk need. */
static void windows_take_what_they_see(void) {
    enum { WINDOW = 32, CHUNK = 64, EACH = (WINDOW + CHUNK) / 16 + 1 };
    static sim s;
    paged_model *m = load();
    memset(&s, 0, sizeof s);
    s.random = s.seed = test_seed;
    s.f = (fake){.now_ns = 1, .window = WINDOW};
    for (int32_t g = 0; g < 2; g++)
        s.f.groups[g] = (paged_group_config){.n_layers = 1,
                                             .n_kv_heads = g ? 8 : 1,
                                             .head_dim_k = 16,
                                             .head_dim_v = 16,
                                             .window = g * WINDOW,
                                             .layout = PAGED_LAYOUT_PACKED};
    const size_t pool_bytes = paged_block_bytes(&s.f.groups[1], 16) * 24;
    const paged_engine_config c = {.struct_size = sizeof c,
                                   .n_ctx = N_CTX,
                                   .max_running = 2,
                                   .chunk_tokens = CHUNK,
                                   .n_threads = 1,
                                   .poison = true,
                                   .no_prefix_cache = true,
                                   .pool_bytes = pool_bytes};
    s.f.logits = malloc((size_t)CHUNK * TINY_VOCAB * sizeof *s.f.logits);
    const paged__backend backend = {.self = &s.f,
                                    .bind = fake_bind,
                                    .step = fake_step,
                                    .now_ns = fake_now,
                                    .groups = s.f.groups,
                                    .n_groups = 2};
    CHECK_EQ(paged__engine_create(m, &c, &backend, &s.e, NULL), PAGED_OK);
    CHECK_EQ(s.e->n_ctx, N_CTX);
    s.tok = s.e->tok;
    s.sampler = paged__sampler_create(TINY_VOCAB, s.tok);
    for (int32_t i = 0; i < 2; i++, s.n_submitted++) {
        record *r = &s.r[i];
        for (int32_t k = 0; k < 300; k++) r->tokens[k] = below(&s, 256);
        paged_request_init(&r->params);
        r->params.tokens = r->tokens;
        r->params.n_tokens = 300;
        r->params.max_tokens = 20;
        r->params.ignore_eos = true;
        CHECK_EQ(paged_engine_submit(s.e, &r->params, &r->id, NULL), PAGED_OK);
        answer_alone(&s, r);
    }
    int32_t active = 1, most_at_once = 0;
    while (active) {
        step(&s, &active);
        most_at_once = PAGED_MAX(most_at_once, s.e->n_pieces);
        CHECK(s.e->cache->groups[1].n_used <= 2 * EACH);
        for (int32_t i = 0; i < 2; i++) read_one(&s, &s.r[i]);
    }
    CHECK_EQ(most_at_once, 2);
    for (int32_t i = 0; i < 2; i++) CHECK(s.r[i].over && s.r[i].finish == PAGED_FINISH_LENGTH);
    CHECK_EQ(s.e->stats.n_preemptions, 0);
    paged__sampler_free(s.sampler);
    paged_engine_free(s.e);
    free(s.f.logits);
    paged_model_free(m);
}

static void many_seeds(void) {
    const uint64_t first = test_seed, n_runs = test_long ? 100000 : 3000;
    paged_allocator_set(&(paged_allocator){sim_alloc, sim_free, NULL});
    paged_model *m = load();
    const long n_before = n_live;
    for (uint64_t i = 0; i < n_runs; i++) {
        test_seed = first + i; /* a failure prints it */
        run(test_seed, m);
        CHECK_EQ(n_live, n_before);
    }
    test_seed = first;
    paged_model_free(m);
    paged_allocator_set(NULL);
    printf(
        "%d runs: %d preemptions, %d stalls, %d tails packed, %d steps parked, %d tokens dropped; ended by",
        (int)n_runs, (int)n_preempted, (int)n_stalls, (int)n_tails, (int)n_parked, (int)n_dropped_tokens);
    for (int i = 1; i < PAGED_FINISH_KINDS; i++)
        printf(" %s %d", paged_finish_name((paged_finish)i), (int)n_ended[i]);
    printf("\n");
    CHECK(n_preempted > n_runs / 4 && n_stalls > 0 && n_tails > 0 && n_parked > n_runs &&
          n_dropped_tokens > n_runs);
    CHECK(n_windowed > 0);
    printf("%d tokens from stores, %d of them with windows; %d blocks not written\n", (int)n_loaded,
           (int)n_loaded_windowed, (int)n_store_dropped);
    CHECK(n_loaded > 10 * n_runs && n_loaded_windowed > n_runs && n_hits_windowed > n_runs / 100 &&
          n_store_dropped > 0);
    for (int i = 1; i < PAGED_FINISH_KINDS; i++) CHECK(n_ended[i] > 0);
}

#define TESTS(X) X(windows_take_what_they_see) X(many_seeds)
TEST_MAIN(TESTS)
