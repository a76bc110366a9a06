/* Goal: on the real model, whatever happens to a request beside others, its tokens and every log-probability
 * have the bits that it has alone. Method: requests with a long common beginning in a pool too small for
 * them; counters prove that at least eight shared a step, and that requests were preempted, found their
 * beginning in the cache, read it once together and ended in packed tails. $PAGED_MODEL; skipped without. */
#include <stdlib.h>

#include "engine/engine.h"
#include "memory_store.h"
#include "test.h"

enum { N_SHARED = 544, N_OWN = 16, N_REQUESTS = 9, N_NEW = 20, N_PROMPT = N_SHARED + N_OWN };

typedef struct answer {
    int32_t tokens[N_NEW];
    float logprobs[N_NEW];
    int32_t n;
} answer;

static paged_engine *make(const paged_model *m, paged_engine_config c) {
    paged_engine *e = NULL;
    paged_error err = {0};
    c.struct_size = sizeof c;
    c.n_ctx = N_PROMPT + N_NEW;
    c.poison = true;
    if (paged_engine_create(m, &c, &e, &err)) printf("%s\n", err.message);
    CHECK(e != NULL);
    return e;
}

/* Request i: half of them are sampled, each in a way of its own. */
static uint64_t submit(paged_engine *e, int32_t i) {
    int32_t tokens[N_PROMPT];
    uint64_t shared = 7, own = 100 + (uint64_t)i, id = 0;
    paged_request q;
    for (int32_t k = 0; k < N_SHARED; k++) tokens[k] = (int32_t)(paged__rand(&shared) % 40000);
    for (int32_t k = N_SHARED; k < N_PROMPT; k++) tokens[k] = (int32_t)(paged__rand(&own) % 40000);
    paged_request_init(&q);
    q.tokens = tokens;
    q.n_tokens = N_PROMPT;
    q.max_tokens = N_NEW;
    q.logprobs = q.ignore_eos = true;
    q.temperature = i % 2 ? 0.7f + 0.1f * (float)i : 0;
    q.top_p = i % 4 == 1 ? 0.9f : 1;
    q.top_k = i % 4 == 3 ? 40 : 0;
    q.frequency_penalty = i == 5 ? 0.5f : 0;
    q.seed = (uint64_t)i;
    CHECK_EQ(paged_engine_submit(e, &q, &id, NULL), PAGED_OK);
    return id;
}

static void take(paged_engine *e, uint64_t id, answer *a) {
    paged_output o;
    CHECK_EQ(paged_engine_read(e, id, &o), PAGED_OK);
    CHECK_EQ(o.finish, PAGED_FINISH_LENGTH);
    a->n = o.n_tokens;
    CHECK_EQ(a->n, N_NEW);
    memcpy(a->tokens, o.tokens, sizeof a->tokens);
    memcpy(a->logprobs, o.logprobs, sizeof a->logprobs);
    CHECK_EQ(paged_engine_release(e, id), PAGED_OK);
}

/* All at once. Returns how many took part in the largest step. */
static int32_t run_together(paged_engine *e, answer *answers) {
    uint64_t ids[N_REQUESTS];
    int32_t n_active = 1, most = 0;
    for (int32_t i = 0; i < N_REQUESTS; i++) ids[i] = submit(e, i);
    while (n_active) {
        CHECK_EQ(paged_engine_step(e, &n_active, NULL), PAGED_OK);
        most = PAGED_MAX(most, e->n_pieces);
        CHECK_EQ(paged_engine_check(e, NULL), PAGED_OK);
    }
    for (int32_t i = 0; i < N_REQUESTS; i++) take(e, ids[i], &answers[i]);
    return most;
}

static void same_bits_whatever_happens(void) {
    static answer alone[N_REQUESTS], together[N_REQUESTS];
    const char *path = getenv("PAGED_MODEL");
    paged_model *m = NULL;
    if (!path || !*path) {
        printf("skipped: PAGED_MODEL is not set\n");
        return;
    }
    CHECK_EQ(paged_model_load(path, NULL, &m, NULL), PAGED_OK);
    const struct {
        int32_t block_size, n_threads, chunk, pool_tokens;
        paged_type type;
    } cases[] = {{64, 2, 512, 960, PAGED_TYPE_F16}, {64, 1, 100, 960, PAGED_TYPE_I8}};
    for (size_t c = 0; c < (test_long ? 2 : 1); c++) {
        paged_engine *e = make(m, (paged_engine_config){.n_threads = 2,
                                                        .kv_type = (int32_t)cases[c].type,
                                                        .block_size = 16,
                                                        .no_prefix_cache = true});
        for (int32_t i = 0, n_active = 1; i < N_REQUESTS; i++, n_active = 1) {
            const uint64_t id = submit(e, i);
            while (n_active) CHECK_EQ(paged_engine_step(e, &n_active, NULL), PAGED_OK);
            take(e, id, &alone[i]);
        }
        paged_engine_info info;
        paged_engine_get_info(e, &info);
        paged_engine_free(e);
        e = make(m,
                 (paged_engine_config){.n_threads = cases[c].n_threads,
                                       .chunk_tokens = cases[c].chunk,
                                       .kv_type = (int32_t)cases[c].type,
                                       .block_size = cases[c].block_size,
                                       .max_running = N_REQUESTS,
                                       .max_waiting = N_REQUESTS,
                                       .pool_bytes = info.kv_bytes_per_token * (size_t)cases[c].pool_tokens});
        const int32_t most = run_together(e, together);
        for (int32_t i = 0; i < N_REQUESTS; i++)
            if (memcmp(&alone[i], &together[i], sizeof alone[i]) != 0)
                test_fail(__FILE__, __LINE__, "request %d of case %d differs from itself alone", i, (int)c);
        paged_engine_stats stats;
        paged_cache_stats cache;
        paged_engine_get_stats(e, &stats);
        paged_engine_get_cache_stats(e, &cache);
        printf(
            "case %d: %d in a step, %d preemptions, %d tokens found, %d rows in cascades, %d tails packed\n",
            (int)c, most, (int)stats.n_preemptions, (int)cache.n_hit_tokens, (int)stats.n_cascade_rows,
            (int)cache.n_packed);
        CHECK(most >= 8 && stats.n_preemptions > 0 && cache.n_hit_tokens >= 8 * 512 &&
              stats.n_cascade_rows > 0);
        CHECK(info.deterministic && cache.n_packed > 0);
        CHECK_EQ(cache.n_used, 0);
        paged_engine_free(e);
    }
    paged_model_free(m);
}

/* What an engine leaves in a store is for the next one what it was for itself: bits, and all but a token. */
static void stores_give_the_same_bits(void) {
    static answer want, got;
    const char *path = getenv("PAGED_MODEL");
    paged_model *m = NULL;
    if (!path || !*path) {
        printf("skipped: PAGED_MODEL is not set\n");
        return;
    }
    CHECK_EQ(paged_model_load(path, NULL, &m, NULL), PAGED_OK);
    memory_store *memory = memory_create();
    const paged_store store = memory_as_store(memory);
    const paged_type types[] = {PAGED_TYPE_F16, PAGED_TYPE_I8};
    for (int t = 0; t < (test_long ? 2 : 1); t++) {
        paged_engine_config c = {
            .n_threads = 2, .kv_type = (int32_t)types[t], .stores = &store, .n_stores = 1};
        for (int round = 0; round < 2; round++) {
            paged_engine *e = make(m, c);
            const uint64_t id = submit(e, 1);
            paged_output o;
            for (int32_t n_active = 1; n_active;) {
                if (e->stores->loads) e->stores->loads->since_ns = paged__now_ns(); /* be patient */
                CHECK_EQ(paged_engine_step(e, &n_active, NULL), PAGED_OK);
            }
            CHECK_EQ(paged_engine_read(e, id, &o), PAGED_OK);
            CHECK_EQ(o.cached_tokens, round ? N_PROMPT - 1 : 0);
            CHECK_EQ(o.store_tokens, o.cached_tokens);
            answer *a = round ? &got : &want;
            a->n = o.n_tokens;
            memcpy(a->tokens, o.tokens, sizeof a->tokens);
            memcpy(a->logprobs, o.logprobs, sizeof a->logprobs);
            CHECK_EQ(paged_engine_check(e, NULL), PAGED_OK);
            paged_engine_free(e);
        }
        CHECK(memcmp(&want, &got, sizeof want) == 0);
        CHECK_EQ(memory->n_conflicts, 0);
        memory_clear(memory);
    }
    memory_destroy(memory);
    paged_model_free(m);
}

#define TESTS(X) X(same_bits_whatever_happens) X(stores_give_the_same_bits)
TEST_MAIN(TESTS)
