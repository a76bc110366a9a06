/* Goal: what comes back from a store is what was written, for the one who wrote it, and nothing else; a store
 * that fails, lies, blocks or is slow costs time at most. Method: a tiny random model under NaN in every
 * unused slot and a store in memory that is told how to misbehave; every answer's bits are those of a run
 * without stores; the cache is checked after each step. */
#include <unistd.h>

#include "engine/engine.h"
#include "memory_store.h"
#include "paged/ops.h"
#include "test.h"
#include "tiny_model.h"

enum { N_PROMPT = 150, N_NEW = 24, N_CTX = 512 };

static const tiny_shape shape = {2, 4, 2, 16, 96, 1024, GGML_TYPE_F32};

static paged_model *load(uint64_t seed) {
    char path[64];
    paged_model *m = NULL;
    snprintf(path, sizeof path, "/tmp/paged-stores-%d.gguf", (int)getpid());
    CHECK(tiny_model_write(path, &shape, seed));
    const paged_status s = paged_model_load(path, NULL, &m, NULL);
    unlink(path);
    CHECK_EQ(s, PAGED_OK);
    return m;
}

static paged_engine *make(const paged_model *m, memory_store *memory, paged_engine_config c) {
    paged_engine *e = NULL;
    paged_error err = {0};
    const paged_store store = memory_as_store(memory);
    c.struct_size = sizeof c;
    c.poison = true;
    c.n_threads = 1;
    if (!c.n_ctx) c.n_ctx = N_CTX;
    c.stores = &store;
    c.n_stores = 1;
    if (paged_engine_create(m, &c, &e, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
    return e;
}

static void fill_prompt(int32_t *tokens, int32_t n, uint64_t seed) {
    for (int32_t i = 0; i < n; i++) tokens[i] = (int32_t)(paged__rand(&seed) % 256);
}

static uint64_t submit(paged_engine *e, const int32_t *tokens, int32_t n, int32_t n_new, const char *salt) {
    uint64_t id = 0;
    paged_request q;
    paged_request_init(&q);
    q.tokens = tokens;
    q.n_tokens = n;
    q.max_tokens = n_new;
    q.ignore_eos = q.logprobs = true;
    q.salt = salt;
    CHECK_EQ(paged_engine_submit(e, &q, &id, NULL), PAGED_OK);
    return id;
}

static bool clock_counts; /* what is measured decides, as it does outside of tests */

static int32_t step(paged_engine *e) {
    int32_t active;
    paged_error err = {0};
    if (e->stores && !clock_counts) { /* a busy machine must not */
        e->stores->prefill = (paged__rate){0};
        for (paged__load *l = e->stores->loads; l; l = l->all_next)
            if (l->state == PAGED__LOAD_ASKED) l->since_ns = paged__now_ns();
    }
    CHECK_EQ(paged_engine_step(e, &active, &err), PAGED_OK);
    if (paged_engine_check(e, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
    return active;
}

static void run_all(paged_engine *e) {
    for (int32_t n = 0; step(e); n++) CHECK(n < 100000);
}

typedef struct answer {
    int32_t tokens[256], n, cached, from_store;
    float logprobs[256];
    paged_miss miss;
} answer;

static answer take(paged_engine *e, uint64_t id) {
    paged_output o;
    answer a = {0};
    CHECK_EQ(paged_engine_read(e, id, &o), PAGED_OK);
    CHECK_EQ(o.finish, PAGED_FINISH_LENGTH);
    a.n = o.n_tokens;
    a.cached = o.cached_tokens;
    a.from_store = o.store_tokens;
    a.miss = o.miss;
    memcpy(a.tokens, o.tokens, (size_t)o.n_tokens * sizeof *a.tokens);
    memcpy(a.logprobs, o.logprobs, (size_t)o.n_tokens * sizeof *a.logprobs);
    CHECK_EQ(paged_engine_release(e, id), PAGED_OK);
    return a;
}

static answer ask(paged_engine *e, const int32_t *tokens, int32_t n, int32_t n_new, const char *salt) {
    const uint64_t id = submit(e, tokens, n, n_new, salt);
    run_all(e);
    return take(e, id);
}

static void same(const answer *a, const answer *b) {
    CHECK_EQ(a->n, b->n);
    CHECK(memcmp(a->tokens, b->tokens, sizeof a->tokens) == 0);
    CHECK(memcmp(a->logprobs, b->logprobs, sizeof a->logprobs) == 0);
}

/* Without stores and cache. */
static answer alone(const paged_model *m, paged_engine_config c, const int32_t *tokens, int32_t n,
                    int32_t n_new) {
    paged_engine *e = NULL;
    c.struct_size = sizeof c;
    c.n_threads = 1;
    c.no_prefix_cache = true;
    c.pool_bytes = 0;
    if (!c.n_ctx) c.n_ctx = N_CTX;
    CHECK_EQ(paged_engine_create(m, &c, &e, NULL), PAGED_OK);
    const answer a = ask(e, tokens, n, n_new, NULL);
    paged_engine_free(e);
    return a;
}

static paged_engine_stats stats_of(const paged_engine *e) {
    paged_engine_stats s;
    paged_engine_get_stats(e, &s);
    return s;
}

/* ---- bytes ---- */

/* The first n tokens keep their values, the others are zeros; cleared from the first on there is nothing else
 * in the block. */
static void clears_what_is_nobodys(void) {
    static const paged_type types[] = {PAGED_TYPE_F16, PAGED_TYPE_F32, PAGED_TYPE_BF16, PAGED_TYPE_I8};
    enum { BS = 48, HEADS = 2, DK = 8, DV = 12 };
    for (int t = 0; t < 4; t++) {
        for (int packed = t == 3; packed < 2; packed++) {
            const paged_group_config group = {.n_layers = 2,
                                              .n_kv_heads = HEADS,
                                              .head_dim_k = DK,
                                              .head_dim_v = DV,
                                              .type = types[t],
                                              .layout = (paged_layout)packed};
            paged_cache_config cc = {.struct_size = sizeof cc,
                                     .groups = &group,
                                     .n_groups = 1,
                                     .block_size = BS,
                                     .pool_bytes = paged_block_bytes(&group, BS)};
            paged_cache *cache = NULL;
            paged_seq seq;
            int64_t slots[BS];
            static float k[BS][HEADS][DK], v[BS][HEADS][DV], k2[BS][HEADS][DK], v2[BS][HEADS][DV];
            uint64_t random = test_seed;
            CHECK_EQ(paged_cache_create(&cc, &cache, NULL), PAGED_OK);
            CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
            CHECK_EQ(paged_seq_reserve(cache, seq, BS), PAGED_OK);
            CHECK_EQ(paged_seq_slots(cache, seq, 0, 0, BS, slots), PAGED_OK);
            for (int n = BS; n >= 0; n--) {
                for (int layer = 0; layer < 2; layer++) {
                    paged_kv kv;
                    CHECK_EQ(paged_cache_kv(cache, 0, layer, &kv), PAGED_OK);
                    if (n == BS) {
                        for (int i = 0; i < BS * HEADS * DK; i++)
                            (&k[0][0][0])[i] = (float)(1 + paged__rand(&random) % 100);
                        for (int i = 0; i < BS * HEADS * DV; i++)
                            (&v[0][0][0])[i] = (float)(1 + paged__rand(&random) % 100);
                        paged_kv_write(&kv, &k[0][0][0], HEADS * DK, &v[0][0][0], HEADS * DV, slots, BS, 0,
                                       1);
                    }
                    paged_kv_read(&kv, slots, BS, &k[0][0][0], &v[0][0][0]);
                    paged_block_clear(&group, BS, cache->arena.base, n);
                    paged_kv_read(&kv, slots, BS, &k2[0][0][0], &v2[0][0][0]);
                    for (int i = 0; i < BS; i++) {
                        for (int d = 0; d < HEADS * DK; d++)
                            CHECK(i < n ? (&k[i][0][0])[d] == (&k2[i][0][0])[d] : (&k2[i][0][0])[d] == 0);
                        for (int d = 0; d < HEADS * DV; d++)
                            CHECK(i < n ? (&v[i][0][0])[d] == (&v2[i][0][0])[d] : (&v2[i][0][0])[d] == 0);
                    }
                    if (n == BS) CHECK(k2[BS - 1][0][0] != 0 || k2[BS - 1][0][1] != 0);
                }
            }
            for (size_t i = 0; i < paged_block_bytes(&group, BS); i++) CHECK_EQ(cache->arena.base[i], 0);
            paged_cache_free(cache);
        }
    }
}

/* ---- there and back ---- */

/* A prompt, then the next turn in a second process, all types, layouts and block sizes. */
static void comes_back_with_the_same_bits(void) {
    static const struct {
        paged_engine_config c;
    } cases[] = {
        {{.block_size = 16}},
        {{.block_size = 32}},
        {{.block_size = 64, .no_packed_tails = true}},
        {{.block_size = 64, .chunk_tokens = 7}},
        {{.block_size = 16, .kv_type = PAGED_TYPE_F32}},
        {{.block_size = 32, .kv_type = PAGED_TYPE_BF16}},
        {{.block_size = 32, .kv_type = PAGED_TYPE_I8}},
        {{.block_size = 5, .kv_plain = true}},
        {{.block_size = 1, .kv_plain = true}},
    };
    paged_model *m = load(test_seed);
    int32_t tokens[N_CTX];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        memory_store *memory = memory_create();
        const paged_engine_config c = cases[i].c;
        fill_prompt(tokens, N_PROMPT, test_seed);
        paged_engine *e = make(m, memory, c);
        answer first = ask(e, tokens, N_PROMPT, N_NEW, NULL);
        CHECK_EQ(first.cached, 0);
        paged_engine_free(e);
        CHECK_EQ(memory->n_closed, 1);
        CHECK(memory->n_calls[MEMORY_FLUSH] > 0);
        const answer want = alone(m, c, tokens, N_PROMPT, N_NEW);
        same(&first, &want);

        e = make(m, memory, c);
        answer again = ask(e, tokens, N_PROMPT, N_NEW, NULL);
        same(&again, &want);
        /* A piece of a block comes from a sealed tail, not from a block that the answer has filled. */
        const bool sealed = (N_PROMPT - 1) / c.block_size == (N_PROMPT + N_NEW - 1) / c.block_size ||
                            N_PROMPT % c.block_size == 0;
        const int32_t n_back = sealed ? N_PROMPT - 1 : (N_PROMPT - 1) / c.block_size * c.block_size;
        CHECK_EQ(again.cached, n_back);
        CHECK_EQ(again.from_store, n_back);
        CHECK_EQ(again.miss == PAGED_MISS_NONE, n_back == N_PROMPT - 1);
        CHECK_EQ(stats_of(e).n_store_hits, 1);
        CHECK_EQ(stats_of(e).n_store_tokens, n_back);
        CHECK_EQ(stats_of(e).n_store_failures, 0);
        paged_engine_free(e);

        /* The next turn: prompt, answer, and more. All but the answer's last token was written. */
        const int32_t n_turn = N_PROMPT + N_NEW + 40;
        memcpy(tokens + N_PROMPT, want.tokens, N_NEW * sizeof *tokens);
        fill_prompt(tokens + N_PROMPT + N_NEW, 40, 77);
        const answer want_turn = alone(m, c, tokens, n_turn, N_NEW);
        e = make(m, memory, c);
        answer turn = ask(e, tokens, n_turn, N_NEW, NULL);
        same(&turn, &want_turn);
        CHECK_EQ(turn.cached, N_PROMPT + N_NEW - 1);
        CHECK_EQ(turn.from_store, turn.cached);
        CHECK_EQ(ask(e, tokens, n_turn, N_NEW, NULL).from_store, 0); /* from memory now */
        paged_engine_free(e);
        CHECK_EQ(memory->n_conflicts, 0);
        CHECK_EQ(memory->n_unexpected, 0); /* each read was announced, the tail's too */
        memory_destroy(memory);
    }
    paged_model_free(m);
}

/* What is pinned are the records of these tokens under this salt, whole blocks and the sealed tail, and no
 * others. */
static void pins_are_of_tokens(void) {
    paged_model *m = load(test_seed);
    int32_t tokens[N_CTX];
    fill_prompt(tokens, N_CTX, test_seed);
    for (int salted = 0; salted < 2; salted++) {
        memory_store *memory = memory_create();
        paged_engine *e = make(m, memory, (paged_engine_config){0});
        const char *salt = salted ? "mine" : NULL;
        /* Before anything is there, which is no matter. */
        CHECK_EQ(paged_engine_pin(e, "conv-1", salt, tokens, 100, NULL), PAGED_OK);
        CHECK_EQ(paged_engine_pin(e, "", salt, tokens, 100, NULL), PAGED_ERR_INVALID_ARG);
        CHECK_EQ(paged_engine_pin(e, "x", salt, NULL, 100, NULL), PAGED_ERR_INVALID_ARG);
        CHECK_EQ(paged_engine_pin(e, "../x", salt, tokens, 100, NULL), PAGED_ERR_INVALID_ARG);
        CHECK_EQ(paged_engine_pin(e, ".x", salt, tokens, 100, NULL), PAGED_ERR_INVALID_ARG);
        CHECK_EQ(paged_engine_pin(e, "x y", salt, tokens, 100, NULL), PAGED_ERR_INVALID_ARG);
        CHECK_EQ(paged_engine_pin(e, NULL, salt, tokens, 100, NULL), PAGED_ERR_INVALID_ARG);
        ask(e, tokens, 100, 1, salt);
        ask(e, tokens, 100, 1, salted ? NULL : "yours");
        paged_engine_free(e);
        CHECK_EQ(memory->n_pins, 1);
        CHECK(strcmp(memory->pinned_by, "conv-1") == 0);
        CHECK_EQ(memory->n_pinned, 8); /* 6 blocks of 16, 4 tokens, and 3 of them, which are no record */
        CHECK(memory_find_record(memory, &memory->pinned[7]) == NULL);
        int32_t n_there = 0;
        for (int32_t i = 0; i < 7; i++) {
            const memory_record *r = memory_find_record(memory, &memory->pinned[i]);
            n_there += r && r->first == i * 16 && memcmp(r->tokens, tokens + i * 16, i < 6 ? 64 : 16) == 0;
        }
        CHECK_EQ(n_there, 7);
        CHECK_EQ(memory->n_records, 14);
        e = make(m, memory, (paged_engine_config){0});
        CHECK_EQ(paged_engine_pin(e, "conv-1", NULL, NULL, 0, NULL), PAGED_OK);
        paged_engine_free(e);
        CHECK_EQ(memory->n_pins, 2);
        CHECK_EQ(memory->n_pinned, 0);
        memory_destroy(memory);
    }
    paged_engine *none = NULL;
    paged_engine_config c = {.struct_size = sizeof c, .n_threads = 1, .n_ctx = N_CTX};
    CHECK_EQ(paged_engine_create(m, &c, &none, NULL), PAGED_OK);
    CHECK_EQ(paged_engine_pin(none, "conv-1", NULL, tokens, 100, NULL), PAGED_ERR_UNSUPPORTED);
    paged_engine_free(none);
    paged_model_free(m);
}

static int32_t n_there(memory_store *memory) {
    int32_t n = 0;
    for (int32_t i = 0; i < memory->n_pinned; i++)
        n += memory_find_record(memory, &memory->pinned[i]) != NULL;
    return n;
}

/* Behind n tokens of `path` what the model says: 12 tokens, or what comes before `stop`. How many. */
static int32_t say(paged_engine *e, int32_t *path, int32_t n, const int32_t *stop) {
    paged_request q;
    paged_output o;
    uint64_t id = 0;
    paged_request_init(&q);
    q.tokens = path;
    q.n_tokens = n;
    q.max_tokens = 12;
    q.temperature = 2;
    q.ignore_eos = true;
    q.stop_tokens = stop;
    q.n_stop_tokens = stop != NULL;
    CHECK_EQ(paged_engine_submit(e, &q, &id, NULL), PAGED_OK);
    run_all(e);
    CHECK_EQ(paged_engine_read(e, id, &o), PAGED_OK);
    CHECK_EQ(o.finish, stop ? PAGED_FINISH_STOP : PAGED_FINISH_LENGTH);
    const int32_t n_new = o.n_tokens;
    memcpy(path + n, o.tokens, (size_t)n_new * sizeof *path);
    CHECK_EQ(paged_engine_release(e, id), PAGED_OK);
    return n_new;
}

/* Of an answer that length ends the last token is not computed, of one that a token ends which is no part of
 * it all are: in both cases all that there is of the path is pinned. */
static void pins_are_of_whole_answers(void) {
    paged_model *m = load(test_seed);
    int32_t path[N_CTX], n_stopped = 0;
    fill_prompt(path, N_CTX, test_seed);
    for (int32_t n = 60; n < 100; n++) {
        memory_store *memory = memory_create();
        const bool by_token = n % 2;
        int32_t stop = 0;
        if (by_token) {
            paged_engine *e = make(m, memory, (paged_engine_config){0});
            say(e, path, n, NULL);
            stop = path[n + 11];
            paged_engine_free(e);
            memory_clear(memory);
        }
        paged_engine *e = make(m, memory, (paged_engine_config){0});
        const int32_t n_all = n + say(e, path, n, by_token ? &stop : NULL);
        CHECK_EQ(paged_engine_pin(e, "conv-1", NULL, path, n_all, NULL), PAGED_OK);
        paged_engine_free(e);
        CHECK_EQ(n_there(memory), (n_all - !by_token + 15) / 16);
        n_stopped += by_token && n_all > n + 1;
        memory_destroy(memory);
    }
    CHECK(n_stopped > 10);
    paged_model_free(m);
}

static bool add_name(void *user, const char *name) {
    char *names = user;
    strcat(strcat(names, name), " ");
    return strlen(names) < 100;
}

/* What waits under a name is replaced, and not in its place: names are told as they are after all that was
 * pinned before. Not more than so many wait. */
static void pins_wait_in_order(void) {
    paged_model *m = load(test_seed);
    memory_store *memory = memory_create();
    int32_t tokens[N_CTX];
    char names[200] = "", name[16];
    fill_prompt(tokens, N_CTX, test_seed);
    paged_engine *e = make(m, memory, (paged_engine_config){0});
    CHECK_EQ(paged_engine_pin(e, "conv-0", NULL, tokens, 100, NULL), PAGED_OK);
    CHECK_EQ(paged_engine_pin(e, "conv-1", NULL, tokens, 100, NULL), PAGED_OK);
    CHECK_EQ(paged_engine_pins(e, add_name, names, NULL), PAGED_OK);
    CHECK(strcmp(names, "conv-0 conv-1 ") == 0);
    memory_block(memory, true); /* holds the thread in a write */
    submit(e, tokens, 100, 1, NULL);
    run_all(e);
    memory_wait_blocked(memory);
    for (int i = 0; i < 3000; i++) CHECK_EQ(paged_engine_pin(e, "conv-0", NULL, tokens, 100, NULL), PAGED_OK);
    CHECK_EQ(paged_engine_pin(e, "conv-1", NULL, NULL, 0, NULL), PAGED_OK);
    for (int i = 0; i < 1022; i++) {
        snprintf(name, sizeof name, "x%d", i);
        CHECK_EQ(paged_engine_pin(e, name, NULL, NULL, 0, NULL), PAGED_OK);
    }
    CHECK_EQ(paged_engine_pin(e, "conv-2", NULL, tokens, 100, NULL), PAGED_ERR_LIMIT);
    CHECK_EQ(paged_engine_pins(e, add_name, names, NULL), PAGED_ERR_LIMIT);
    CHECK_EQ(paged_engine_pin(e, "x7", NULL, tokens, 100, NULL), PAGED_OK); /* in place of another */
    CHECK_EQ(paged_engine_pin(e, "x1021", NULL, NULL, 0, NULL), PAGED_OK);  /* the last one */
    CHECK_EQ(memory->n_pins, 2);
    memory_block(memory, false);
    while (paged_engine_pins(e, add_name, strcpy(names, "") ? names : NULL, NULL)) usleep(1000);
    CHECK(strcmp(names, "conv-0 x7 ") == 0);
    CHECK_EQ(memory->n_pins, 2 + 1024);
    paged_engine_free(e);
    memory_destroy(memory);
    paged_model_free(m);
}

static memory_fault slow_to_expect(void *user, memory_call call) {
    (void)user;
    return call == MEMORY_EXPECT ? MEMORY_SLOW : MEMORY_FINE;
}

/* Two stores, each with a part of the path: whichever has the end, each is told of its part, once, and the
 * time that this takes counts as reading. */
static void each_store_is_told_once(void) {
    paged_model *m = load(test_seed);
    int32_t tokens[N_CTX];
    fill_prompt(tokens, N_CTX, test_seed);
    for (int tail_in = 0; tail_in < 2; tail_in++) {
        memory_store *stores[2] = {memory_create(), memory_create()};
        const paged_store both[2] = {memory_as_store(stores[0]), memory_as_store(stores[1])};
        for (int i = 0; i < 2; i++) { /* the first two blocks in store 0, all whole ones in store 1 */
            paged_engine *e = make(m, stores[i], (paged_engine_config){0});
            ask(e, tokens, i ? 112 : 32, 1, NULL);
            paged_engine_free(e);
        }
        memory_store *other = memory_create(); /* whose tail goes to one of the two */
        paged_engine *e = make(m, other, (paged_engine_config){0});
        ask(e, tokens, 120, 1, NULL);
        paged_engine_free(e);
        for (int32_t i = 0; i < other->n_records; i++) {
            const memory_record *r = &other->records[i];
            paged_record out = {r->key,    r->parent, r->first,     r->n_tokens,
                                r->tokens, r->groups, {r->bytes[0]}};
            if (r->n_tokens < 16) CHECK_EQ(both[tail_in].write(both[tail_in].self, &out, NULL), PAGED_OK);
        }
        for (int i = 0; i < 2; i++) {
            stores[i]->fault = slow_to_expect;
            stores[i]->slow_ms = 30;
            stores[i]->n_unexpected = 0;
        }
        paged_engine_config c = {
            .struct_size = sizeof c, .n_threads = 1, .n_ctx = N_CTX, .stores = both, .n_stores = 2};
        CHECK_EQ(paged_engine_create(m, &c, &e, NULL), PAGED_OK);
        const answer a = ask(e, tokens, 121, 1, NULL);
        CHECK_EQ(a.from_store, 120);
        for (int i = 0; i < 2; i++) {
            CHECK_EQ(stores[i]->n_calls[MEMORY_EXPECT], 1);
            CHECK_EQ(stores[i]->n_unexpected, 0);
            CHECK(e->stores->read[i].ns >= 30e6 * 0.6); /* older ones fade, by a sixteenth each */
        }
        CHECK_EQ(stores[tail_in]->n_expected, tail_in ? 6 : 3);
        CHECK(stats_of(e).store_read_ms >= 60);
        paged_engine_free(e);
        memory_destroy(other);
        for (int i = 0; i < 2; i++) memory_destroy(stores[i]);
    }
    paged_model_free(m);
}

/* Lengths around block borders: at most one block is computed, and one token at least. */
static void comes_back_at_every_length(void) {
    paged_model *m = load(test_seed);
    memory_store *memory = memory_create();
    int32_t tokens[N_CTX];
    fill_prompt(tokens, N_CTX, test_seed);
    paged_engine *e = make(m, memory, (paged_engine_config){0});
    ask(e, tokens, 200, 1, NULL);
    paged_engine_free(e);
    for (int32_t n = 17; n <= 100; n++) {
        e = make(m, memory, (paged_engine_config){.no_packed_tails = n % 2});
        const answer a = ask(e, tokens, n, 1, NULL);
        CHECK_EQ(a.cached, n - 1);
        CHECK_EQ(a.from_store, n - 1);
        paged_engine_free(e);
    }
    CHECK_EQ(memory->n_conflicts, 0);
    CHECK_EQ(memory->n_unexpected, 0);
    memory_destroy(memory);
    paged_model_free(m);
}

/* Until the thread has written what it was given: what it has not is not written if memory is short. */
static void wait_written(const paged_engine *e) {
    while (stats_of(e).n_store_queued > 0) usleep(100);
}

/* Prompts in turn in a pool that holds two of them: the first comes back from the store; and requests side by
 * side that throw each other out get their tokens back from there. */
static void memory_may_be_small(void) {
    enum { N = 6 };
    paged_model *m = load(test_seed);
    memory_store *memory = memory_create();
    static int32_t tokens[N][N_PROMPT];
    static answer want[N];
    uint64_t ids[N];
    paged_engine_config c = {.max_running = 3, .chunk_tokens = 64};
    paged_engine *e = make(m, memory, c);
    const size_t block_bytes = e->cache->groups[0].block_bytes;
    paged_engine_free(e);
    c.pool_bytes = 23 * block_bytes; /* 150 + 100 tokens are 16 */
    for (int i = 0; i < N; i++) {
        fill_prompt(tokens[i], N_PROMPT, test_seed + (uint64_t)i);
        want[i] = alone(m, c, tokens[i], N_PROMPT, 100);
    }
    e = make(m, memory, c);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < N; i++) {
            const answer a = ask(e, tokens[i], N_PROMPT, 100, NULL);
            same(&a, &want[i]);
            CHECK(round == 0 || a.cached >= N_PROMPT * 9 / 10);
            CHECK(round == 0 || a.from_store > 0);
            wait_written(e);
        }
    }
    paged_engine_free(e);
    memory_clear(memory);

    e = make(m, memory, c);
    for (int i = 0; i < N; i++) ids[i] = submit(e, tokens[i], N_PROMPT, 100, NULL);
    while (step(e)) wait_written(e);
    for (int i = 0; i < N; i++) {
        const answer a = take(e, ids[i]);
        same(&a, &want[i]);
    }
    CHECK(stats_of(e).n_preemptions > 0);
    CHECK(stats_of(e).n_store_tokens > 0);
    paged_engine_free(e);
    CHECK_EQ(memory->n_conflicts, 0);
    CHECK_EQ(memory->n_unexpected, 0);
    memory_destroy(memory);
    paged_model_free(m);
}

/* ---- whose it is ---- */

static void nobody_elses(void) {
    paged_model *m = load(test_seed), *other = load(test_seed + 1);
    memory_store *memory = memory_create();
    int32_t tokens[N_PROMPT];
    fill_prompt(tokens, N_PROMPT, test_seed);
    paged_engine *e = make(m, memory, (paged_engine_config){0});
    ask(e, tokens, N_PROMPT, N_NEW, "x");
    paged_engine_free(e);
    const struct {
        const paged_model *model;
        paged_engine_config c;
        const char *salt;
    } foreign[] = {
        {m, {0}, NULL},
        {m, {0}, "y"},
        {m, {0}, "xx"},
        {other, {0}, "x"}, /* the same names and sizes, other weights */
        {m, {.kv_type = PAGED_TYPE_BF16}, "x"},
        {m, {.kv_plain = true}, "x"},
        {m, {.block_size = 32}, "x"},
    };
    for (size_t i = 0; i < sizeof foreign / sizeof foreign[0]; i++) {
        e = make(foreign[i].model, memory, foreign[i].c);
        CHECK_EQ(ask(e, tokens, N_PROMPT, 1, foreign[i].salt).cached, 0);
        CHECK_EQ(stats_of(e).n_store_asks, 1);
        paged_engine_free(e);
        memory_clear(memory); /* what this one has written has other sizes */
        e = make(m, memory, (paged_engine_config){0});
        ask(e, tokens, N_PROMPT, N_NEW, "x");
        paged_engine_free(e);
    }
    e = make(m, memory, (paged_engine_config){.n_ctx = 300, .max_running = 2, .chunk_tokens = 32});
    CHECK_EQ(ask(e, tokens, N_PROMPT, 1, "x").from_store, (N_PROMPT - 1) / 16 * 16);
    paged_engine_free(e);
    memory_destroy(memory);
    paged_model_free(other);
    paged_model_free(m);
}

static void together_they_load_once(void) {
    paged_model *m = load(test_seed);
    memory_store *memory = memory_create();
    int32_t tokens[N_PROMPT];
    uint64_t ids[4];
    fill_prompt(tokens, N_PROMPT, test_seed);
    paged_engine *e = make(m, memory, (paged_engine_config){0});
    ask(e, tokens, N_PROMPT, 1, NULL);
    paged_engine_free(e);
    memory->n_calls[MEMORY_READ] = 0;
    e = make(m, memory, (paged_engine_config){.max_running = 4});
    for (int i = 0; i < 4; i++) ids[i] = submit(e, tokens, N_PROMPT, 1, NULL);
    run_all(e);
    for (int i = 0; i < 4; i++) CHECK_EQ(take(e, ids[i]).cached, N_PROMPT - 1);
    CHECK_EQ(memory->n_calls[MEMORY_READ], (N_PROMPT - 1 + 15) / 16);
    CHECK_EQ(stats_of(e).n_store_hits, 1);
    paged_engine_free(e);
    memory_destroy(memory);
    paged_model_free(m);
}

/* ---- stores that misbehave ---- */

typedef struct mischief {
    memory_call call;
    memory_fault fault;
    int32_t nth; /* call from now on; less than 0: every one */
} mischief;

static memory_fault misbehave(void *user, memory_call call) {
    mischief *x = user;
    if (call != x->call) return MEMORY_FINE;
    if (x->nth < 0) return x->fault;
    if (x->nth > 0) {
        x->nth--;
        return MEMORY_FINE;
    }
    x->nth = INT32_MAX;
    return x->fault;
}

/* Whatever is wrong with the n-th call of a kind: what came before counts, and the answer is right. */
static void failures_are_misses(void) {
    enum { N_BLOCKS = (N_PROMPT - 1) / 16 + 1 };
    paged_model *m = load(test_seed);
    memory_store *memory = memory_create();
    int32_t tokens[N_PROMPT];
    fill_prompt(tokens, N_PROMPT, test_seed);
    const answer want = alone(m, (paged_engine_config){0}, tokens, N_PROMPT, N_NEW);
    paged_engine *e = make(m, memory, (paged_engine_config){0});
    ask(e, tokens, N_PROMPT, 1, NULL); /* so that there is a tail */
    ask(e, tokens, N_PROMPT, N_NEW, NULL);
    paged_engine_free(e);
    mischief x;
    memory->user = &x;
    memory->slow_ms = 1;
    for (int call = MEMORY_FIND; call < MEMORY_CALLS; call++) {
        for (int fault = MEMORY_FAILS; fault < MEMORY_FAULTS; fault++) {
            const bool reads = call == MEMORY_READ, harmless = fault == MEMORY_SLOW || fault == MEMORY_LIES;
            if (!reads && fault > MEMORY_FAILS && !harmless) continue;
            for (int nth = -1; nth < (reads ? N_BLOCKS : 1); nth++) {
                x = (mischief){(memory_call)call, (memory_fault)fault, nth};
                memory->fault = misbehave;
                e = make(m, memory, (paged_engine_config){.no_packed_tails = nth % 2});
                const answer a = ask(e, tokens, N_PROMPT, N_NEW, NULL);
                same(&a, &want);
                int32_t at_least = N_PROMPT - 1;
                if (reads && !harmless) at_least = PAGED_MAX(nth, 0) * 16;
                if (call == MEMORY_FIND && fault == MEMORY_FAILS) at_least = 0;
                if (call == MEMORY_TAIL && !(fault == MEMORY_SLOW)) at_least = (N_PROMPT - 1) / 16 * 16;
                CHECK(a.cached >= at_least);
                if (reads && !harmless) CHECK_EQ(a.cached, at_least);
                paged_engine_free(e);
                memory->fault = NULL;
            }
        }
    }
    CHECK_EQ(memory->n_conflicts, 0);
    CHECK_EQ(memory->n_unexpected, 0);

    /* A find that says yes to everything: what is not there is a miss. */
    memory_clear(memory);
    x = (mischief){MEMORY_FIND, MEMORY_LIES, -1};
    memory->fault = misbehave;
    e = make(m, memory, (paged_engine_config){0});
    const answer a = ask(e, tokens, N_PROMPT, N_NEW, NULL);
    same(&a, &want);
    CHECK_EQ(a.cached, 0);
    paged_engine_free(e);
    memory_destroy(memory);
    paged_model_free(m);
}

/* A store that takes longer than computing is measured once, and left alone. */
static void slow_ones_are_not_asked_for_bytes(void) {
    paged_model *m = load(test_seed);
    memory_store *memory = memory_create();
    int32_t tokens[N_PROMPT];
    fill_prompt(tokens, N_PROMPT, test_seed);
    paged_engine *e = make(m, memory, (paged_engine_config){0});
    ask(e, tokens, N_PROMPT, 1, NULL);
    ask(e, tokens, N_PROMPT, 1, "s");
    ask(e, tokens, N_PROMPT, 1, "t");
    paged_engine_free(e);
    mischief x = {MEMORY_READ, MEMORY_SLOW, -1};
    memory->user = &x;
    memory->fault = misbehave;
    memory->slow_ms = 10;
    clock_counts = true;
    e = make(m, memory, (paged_engine_config){0});
    ask(e, tokens + 50, 50, 1, NULL);                        /* so that the speed of prompts is known */
    CHECK(ask(e, tokens, N_PROMPT, 1, NULL).from_store > 0); /* and that of the store is not */
    const int32_t n_reads = memory->n_calls[MEMORY_READ];
    CHECK_EQ(ask(e, tokens, N_PROMPT, 1, "s").from_store, 0);
    CHECK_EQ(memory->n_calls[MEMORY_READ], n_reads);
    CHECK_EQ(stats_of(e).n_store_asks, 3);
    CHECK_EQ(stats_of(e).n_store_hits, 1);
    /* Measurements are forgotten in time. */
    e->stores->read[0].at_ns -= (PAGED__RATE_MS + 1) * 1000000ull;
    CHECK(ask(e, tokens, N_PROMPT, 1, "t").from_store > 0);
    paged_engine_free(e);
    clock_counts = false;
    /* Less than a block is not worth a question. */
    memory->fault = NULL;
    e = make(m, memory, (paged_engine_config){0});
    CHECK_EQ(ask(e, tokens, PAGED__LOAD_TOKENS, 1, NULL).from_store, 0);
    CHECK_EQ(stats_of(e).n_store_asks, 0);
    paged_engine_free(e);
    memory_destroy(memory);
    paged_model_free(m);
}

/* ---- while the thread is at it ---- */

/* The one request that there is. */
static void step_until_it_reads(paged_engine *e, memory_store *memory) {
    while (e->n_running == 0 || !e->running[0]->load || e->running[0]->load->state != PAGED__LOAD_READING)
        step(e);
    memory_wait_blocked(memory);
}

/* A request that goes while its blocks are being filled: they are nobody's until the store is done. */
static void may_go_while_it_loads(void) {
    paged_model *m = load(test_seed);
    memory_store *memory = memory_create();
    int32_t tokens[N_PROMPT], others[N_PROMPT];
    fill_prompt(tokens, N_PROMPT, test_seed);
    fill_prompt(others, N_PROMPT, test_seed + 1);
    paged_engine_config c = {.max_running = 2};
    const answer want = alone(m, c, others, N_PROMPT, N_NEW);
    paged_engine *e = make(m, memory, c);
    ask(e, tokens, N_PROMPT, 1, NULL);
    const size_t block_bytes = e->cache->groups[0].block_bytes;
    paged_engine_free(e);
    c.pool_bytes = 24 * block_bytes;
    for (int how = 0; how < 3; how++) {
        e = make(m, memory, c);
        memory_block(memory, true);
        const uint64_t id = submit(e, tokens, N_PROMPT, 1, NULL);
        step_until_it_reads(e, memory);
        if (how == 0) CHECK_EQ(paged_engine_release(e, id), PAGED_OK);
        if (how == 1) paged_engine_cancel(e, id);
        if (how == 2) e->running[0]->deadline_ns = 1;
        step(e);
        CHECK_EQ(e->n_running, 0);
        CHECK(e->cache->groups[0].n_used > 0); /* held */
        CHECK(paged__stores_hold(e));
        const uint64_t other = submit(e, others, N_PROMPT, N_NEW, NULL);
        for (int i = 0; i < 3; i++) step(e); /* asks, and has no room */
        memory_block(memory, false);
        run_all(e);
        const answer a = take(e, other);
        same(&a, &want);
        paged_engine_free(e);
        memory_clear(memory);
        e = make(m, memory, (paged_engine_config){0});
        ask(e, tokens, N_PROMPT, 1, NULL);
        paged_engine_free(e);
    }
    /* An engine that is freed in the middle. */
    e = make(m, memory, c);
    memory_block(memory, true);
    submit(e, tokens, N_PROMPT, 1, NULL);
    step_until_it_reads(e, memory);
    memory_block(memory, false);
    paged_engine_free(e);
    memory_destroy(memory);
    paged_model_free(m);
}

/* A store that does not come back from a write: requests go on, and what cannot be kept is counted. */
static void nobody_waits_for_writes(void) {
    enum { N = 12 };
    paged_model *m = load(test_seed);
    memory_store *memory = memory_create();
    static int32_t tokens[N][N_PROMPT];
    static answer want[N];
    paged_engine_config c = {.max_running = 2};
    paged_engine *e = make(m, memory, c);
    c.pool_bytes = 26 * e->cache->groups[0].block_bytes;
    paged_engine_free(e);
    for (int i = 0; i < N; i++) {
        fill_prompt(tokens[i], N_PROMPT, test_seed + (uint64_t)i);
        want[i] = alone(m, c, tokens[i], N_PROMPT, N_NEW);
    }
    e = make(m, memory, c);
    memory_block(memory, true);
    clock_counts = true;
    for (int i = 0; i < N; i++) {
        const answer a = ask(e, tokens[i], N_PROMPT, N_NEW, NULL);
        same(&a, &want[i]);
    }
    clock_counts = false;
    const paged_engine_stats s = stats_of(e);
    CHECK(s.n_store_dropped > 0);
    CHECK_EQ(s.n_store_writes, 0);
    memory_block(memory, false);
    paged_engine_free(e);
    CHECK(memory->n_records > 0);
    CHECK_EQ(memory->n_conflicts, 0);
    CHECK_EQ(memory->n_unexpected, 0);
    memory_destroy(memory);
    paged_model_free(m);
}

/* While requests come a flush waits for its time; when they end it does not. */
static void flushes_seldom(void) {
    enum { N = 6 };
    paged_model *m = load(test_seed);
    memory_store *memory = memory_create();
    paged_engine *e = make(m, memory, (paged_engine_config){.max_running = 2});
    static int32_t tokens[N][N_PROMPT];
    uint64_t ids[N];
    const uint64_t start = paged__now_ns();
    for (int i = 0; i < N; i++) {
        fill_prompt(tokens[i], N_PROMPT, test_seed + (uint64_t)i);
        ids[i] = submit(e, tokens[i], N_PROMPT, N_NEW, NULL);
    }
    run_all(e);
    /* The engine rests: what is left is written and flushed at once, without another step. */
    int32_t n_flushes = 0;
    for (int i = 0; i < 10000 && (stats_of(e).n_store_queued || !n_flushes); i++) {
        usleep(1000);
        pthread_mutex_lock(&memory->lock);
        n_flushes = memory->n_calls[MEMORY_FLUSH];
        pthread_mutex_unlock(&memory->lock);
    }
    const uint64_t ms = (paged__now_ns() - start) / 1000000;
    CHECK(n_flushes >= 1 && n_flushes <= 2 + (int32_t)(ms / PAGED__FLUSH_MS));
    CHECK(stats_of(e).n_store_writes > 2 * N);
    for (int i = 0; i < N; i++) take(e, ids[i]);
    paged_engine_free(e);
    memory_destroy(memory);
    paged_model_free(m);
}

/* An engine with a thread is woken by the store's; many requests from many prompts, there and back. */
static void a_service_is_told(void) {
    enum { N = 8 };
    paged_model *m = load(test_seed);
    memory_store *memory = memory_create();
    static int32_t tokens[N][N_PROMPT];
    static float first[N][N_NEW];
    for (int i = 0; i < N; i++) fill_prompt(tokens[i], N_PROMPT, test_seed + (uint64_t)i);
    for (int round = 0; round < 2; round++) {
        int32_t n_from_store = 0;
        const paged_store store = memory_as_store(memory);
        const paged_service_config c = {.struct_size = sizeof c,
                                        .engine = {.n_ctx = N_CTX,
                                                   .max_running = 3,
                                                   .n_threads = 1,
                                                   .poison = true,
                                                   .stores = &store,
                                                   .n_stores = 1}};
        paged_service *s = NULL;
        uint64_t ids[N];
        CHECK_EQ(paged_service_create(m, &c, &s, NULL), PAGED_OK);
        for (int i = 0; i < N; i++) {
            paged_request q;
            paged_request_init(&q);
            q.tokens = tokens[i];
            q.n_tokens = N_PROMPT;
            q.max_tokens = N_NEW;
            q.ignore_eos = q.logprobs = true;
            CHECK_EQ(paged_service_submit(s, &q, &ids[i], NULL), PAGED_OK);
        }
        for (int i = 0; i < N; i++) {
            paged_output o = {0};
            for (int n = 0; !o.finish; n += o.n_tokens) {
                CHECK_EQ(paged_service_read(s, ids[i], -1, &o), PAGED_OK);
                for (int k = 0; k < o.n_tokens && round == 0; k++) first[i][n + k] = o.logprobs[k];
                for (int k = 0; k < o.n_tokens && round == 1; k++) CHECK(first[i][n + k] == o.logprobs[k]);
            }
            CHECK_EQ(o.finish, PAGED_FINISH_LENGTH);
            n_from_store += o.store_tokens; /* of some at least: a busy machine makes stores look slow */
            if (i % 2) CHECK_EQ(paged_service_release(s, ids[i]), PAGED_OK);
        }
        paged_service_free(s);
        CHECK_EQ(n_from_store > 0, round == 1);
    }
    CHECK_EQ(memory->n_conflicts, 0);
    CHECK_EQ(memory->n_unexpected, 0);
    memory_destroy(memory);
    paged_model_free(m);
}

/* ---- create and free ---- */

static void who_closes(void) {
    paged_model *m = load(test_seed);
    memory_store *memory = memory_create();
    paged_engine *e = NULL;
    mischief x = {MEMORY_OPEN, MEMORY_FAILS, 0};
    const paged_store store = memory_as_store(memory);
    paged_engine_config c = {.struct_size = sizeof c, .n_ctx = N_CTX, .stores = &store, .n_stores = 1};
    paged_store_stats stats;
    const char *name;
    memory->user = &x;
    memory->fault = misbehave;
    CHECK_EQ(paged_engine_create(m, &c, &e, NULL), PAGED_ERR_IO);
    CHECK_EQ(memory->n_closed, 0);
    c.n_stores = PAGED_STORES_MAX + 1;
    CHECK_EQ(paged_engine_create(m, &c, &e, NULL), PAGED_ERR_INVALID_ARG);
    c.n_stores = 1;
    c.no_prefix_cache = true;
    CHECK_EQ(paged_engine_create(m, &c, &e, NULL), PAGED_ERR_INVALID_ARG);
    c.no_prefix_cache = false;
    CHECK_EQ(memory->n_closed, 0);
    CHECK_EQ(paged_engine_create(m, &c, &e, NULL), PAGED_OK);
    CHECK(paged_engine_get_store(e, 0, &name, &stats));
    CHECK_STR(name, "memory");
    CHECK(!paged_engine_get_store(e, 1, &name, &stats));
    paged_engine_free(e);
    CHECK_EQ(memory->n_closed, 1);
    memory_destroy(memory);
    paged_model_free(m);
}

#define TESTS(X)                                                                                             \
    X(clears_what_is_nobodys)                                                                                \
    X(comes_back_with_the_same_bits)                                                                         \
    X(pins_are_of_whole_answers)                                                                             \
    X(pins_wait_in_order)                                                                                    \
    X(each_store_is_told_once)                                                                               \
    X(pins_are_of_tokens)                                                                                    \
    X(comes_back_at_every_length)                                                                            \
    X(memory_may_be_small)                                                                                   \
    X(nobody_elses)                                                                                          \
    X(together_they_load_once)                                                                               \
    X(failures_are_misses)                                                                                   \
    X(slow_ones_are_not_asked_for_bytes)                                                                     \
    X(may_go_while_it_loads)                                                                                 \
    X(nobody_waits_for_writes)                                                                               \
    X(flushes_seldom)                                                                                        \
    X(a_service_is_told)                                                                                     \
    X(who_closes)
TEST_MAIN(TESTS)
