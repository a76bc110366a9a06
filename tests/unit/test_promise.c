/* Goal: of prompts that arrive together one is computed, whoever goes away. Method: small pools in which
 * every computed token is counted; then random arrivals and departures. */
#include "mem/mem.h"
#include "test.h"

enum { B = 4, N = 11 };

static const paged_namespace nowhere = {0};

static paged_cache *open_cache(int32_t n_blocks, bool packed_tails) {
    const paged_group_config group = {.n_layers = 1,
                                      .n_kv_heads = 1,
                                      .head_dim_k = 1,
                                      .type = PAGED_TYPE_F32,
                                      .layout = packed_tails ? PAGED_LAYOUT_PACKED : PAGED_LAYOUT_PLAIN};
    const int32_t block_size = packed_tails ? 32 : B;
    const paged_cache_config config = {.struct_size = sizeof config,
                                       .groups = &group,
                                       .n_groups = 1,
                                       .block_size = block_size,
                                       .pool_bytes = (size_t)(n_blocks * block_size) * 8,
                                       .max_seqs = 16,
                                       .packed_tails = packed_tails,
                                       .poison = true};
    paged_cache *cache = NULL;
    CHECK_EQ(paged_cache_create(&config, &cache, NULL), PAGED_OK);
    return cache;
}

static void check_cache(const paged_cache *cache) {
    paged_error err = {0};
    if (paged_cache_check(cache, &err) != PAGED_OK) test_fail(__FILE__, __LINE__, "%s", err.message);
}

static const int32_t *row(int32_t start, int32_t n) {
    static int32_t tokens[256];
    for (int32_t i = 0; i < n; i++) tokens[i] = start + i;
    return tokens;
}

static int32_t n_used(const paged_cache *cache) {
    paged_cache_stats stats;
    paged_cache_get_stats(cache, &stats);
    return stats.n_used;
}

static paged_seq arrive(paged_cache *cache, const int32_t *tokens, int32_t n, bool must_wait) {
    paged_seq seq;
    bool waits;
    CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
    CHECK_EQ(paged_seq_promise(cache, seq, &nowhere, tokens, n, &waits), PAGED_OK);
    CHECK_EQ(waits, must_wait);
    CHECK_EQ(paged_seq_waits(cache, seq), must_wait);
    check_cache(cache);
    return seq;
}

/* Matches, then computes up to n_end tokens, one at least; returns how many were computed. */
static int32_t compute(paged_cache *cache, paged_seq seq, const int32_t *tokens, int32_t n, int32_t n_end) {
    paged_match got = {.n_matched = paged_seq_len(cache, seq)};
    if (got.n_matched == 0) CHECK_EQ(paged_seq_match(cache, seq, &nowhere, tokens, n, &got), PAGED_OK);
    int32_t n_more = PAGED_MAX(n_end - got.n_matched, 1);
    CHECK_EQ(paged_seq_reserve(cache, seq, n_more), PAGED_OK);
    CHECK_EQ(paged_seq_commit(cache, seq, tokens + got.n_matched, n_more), PAGED_OK);
    check_cache(cache);
    return n_more;
}

/* Five times the same prompt: n tokens are computed once, and of each of the others the last one. */
static void one_computes_for_all(void) {
    for (int32_t packed = 0; packed < 2; packed++) {
        int32_t n = packed ? 75 : N, n_computed = 0;
        paged_cache *cache = open_cache(16, packed);
        paged_seq seqs[5];
        for (int32_t i = 0; i < 5; i++) seqs[i] = arrive(cache, row(0, n), n, i > 0);
        CHECK_EQ(n_used(cache), 0);
        n_computed += compute(cache, seqs[0], row(0, n), n, n - 3); /* a chunk: not enough yet */
        int32_t n_held = n_used(cache);
        for (int32_t i = 1; i < 5; i++) CHECK_EQ(paged_seq_waits(cache, seqs[i]), 1);
        CHECK_EQ(n_held, packed ? 3 : 2); /* those who wait hold nothing */
        n_computed += compute(cache, seqs[0], row(0, n), n, n);
        for (int32_t i = 1; i < 5; i++) {
            CHECK_EQ(paged_seq_waits(cache, seqs[i]), 0);
            n_computed += compute(cache, seqs[i], row(0, n), n, n);
        }
        CHECK_EQ(n_computed, n + 4);
        for (int32_t i = 0; i < 5; i++) CHECK_EQ(paged_seq_free(cache, seqs[i]), PAGED_OK);
        check_cache(cache);
        CHECK_EQ(n_used(cache), 0);
        paged_cache_free(cache);
    }
}

/* The producer is freed at every stage; the oldest waiter takes over, the others wait for it. */
static void the_oldest_waiter_takes_over(void) {
    for (int32_t done = 0; done < N; done++) {
        paged_cache *cache = open_cache(16, false);
        paged_seq a = arrive(cache, row(0, N), N, false), b = arrive(cache, row(0, N), N, true),
                  c = arrive(cache, row(0, N), N, true);
        if (done > 0) compute(cache, a, row(0, N), N, done);
        /* One that came before b has the row that b had: who is oldest is not who is first in the table. */
        if (done % 2) {
            CHECK_EQ(paged_seq_free(cache, b), PAGED_OK);
            b = c;
            c = arrive(cache, row(0, N), N, N - 1 - done >= B);
        }
        CHECK_EQ(paged_seq_free(cache, a), PAGED_OK);
        check_cache(cache);
        CHECK_EQ(paged_seq_waits(cache, b), 0);
        /* What a did is cached, its last block sealed: b does the rest. If that is less than a block, c does
         * not wait for it. */
        CHECK_EQ(paged_seq_waits(cache, c), N - 1 - done >= B);
        CHECK_EQ(compute(cache, b, row(0, N), N, N), N - done);
        CHECK_EQ(paged_seq_waits(cache, c), 0);
        CHECK_EQ(compute(cache, c, row(0, N), N, N), 1);
        CHECK_EQ(paged_seq_free(cache, b), PAGED_OK);
        CHECK_EQ(paged_seq_free(cache, c), PAGED_OK);
        check_cache(cache);
        paged_cache_free(cache);
    }
}

static void a_broken_promise_hands_over(void) {
    const int32_t other[] = {0, 1, 99, 98, 97};
    for (int32_t how = 0; how < 3; how++) {
        paged_cache *cache = open_cache(16, false);
        paged_seq a = arrive(cache, row(0, N), N, false), b = arrive(cache, row(0, N), N, true);
        const paged_namespace elsewhere = {&(paged_ns_field){PAGED_NS_SALT, "x", 1}, 1};
        if (how == 0) { /* other tokens */
            CHECK_EQ(paged_seq_match(cache, a, &nowhere, row(0, N), N, NULL), PAGED_OK);
            CHECK_EQ(paged_seq_reserve(cache, a, 5), PAGED_OK);
            CHECK_EQ(paged_seq_commit(cache, a, other, 2), PAGED_OK);
            CHECK_EQ(paged_seq_waits(cache, b), 1);
            CHECK_EQ(paged_seq_commit(cache, a, other + 2, 3), PAGED_OK);
        } else if (how == 1) { /* truncated */
            compute(cache, a, row(0, N), N, 5);
            CHECK_EQ(paged_seq_waits(cache, b), 1);
            CHECK_EQ(paged_seq_truncate(cache, a, 4), PAGED_OK);
        } else { /* in another namespace */
            CHECK_EQ(paged_seq_match(cache, a, &elsewhere, row(0, N), N, NULL), PAGED_OK);
        }
        check_cache(cache);
        CHECK_EQ(paged_seq_waits(cache, b), 0);
        /* The block in which they part is cached; the truncated one was full; nothing. */
        CHECK_EQ(compute(cache, b, row(0, N), N, N), N - (how == 0 ? 2 : how == 1 ? 4 : 0));
        paged_cache_free(cache);
    }
}

/* Too little in common, another namespace, cached already: nobody waits. */
static void nobody_waits_in_vain(void) {
    paged_cache *cache = open_cache(16, false);
    bool waits;
    paged_seq a = arrive(cache, row(0, N), N, false), seq, b;
    arrive(cache, row(0, B), B, false); /* of four tokens three could be reused: less than a block */
    b = arrive(cache, row(0, B + 1), B + 1, true); /* four */
    const paged_namespace elsewhere = {&(paged_ns_field){PAGED_NS_SALT, "x", 1}, 1};
    CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
    CHECK_EQ(paged_seq_promise(cache, seq, &elsewhere, row(0, N), N, &waits), PAGED_OK);
    CHECK(!waits);
    CHECK_EQ(paged_seq_promise(cache, seq, &elsewhere, row(0, N), N, &waits), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
    CHECK_EQ(paged_seq_promise(cache, seq, NULL, row(0, N), N, &waits), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_seq_promise(cache, seq, &nowhere, row(0, N), 0, &waits), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_seq_promise(cache, seq, &nowhere, row(0, N), N, NULL), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_seq_promise(cache, seq, &nowhere, row(0, 65), 65, &waits), PAGED_ERR_TOO_LONG);
    check_cache(cache);
    compute(cache, a, row(0, N), N, 8);
    CHECK_EQ(paged_seq_waits(cache, b), 0); /* it has all that they share */
    arrive(cache, row(0, N), N, false);     /* two more tokens are not worth it */
    paged_cache_free(cache);
}

/* Who waits may change his mind. */
static void a_waiter_may_go_on(void) {
    paged_cache *cache = open_cache(16, false);
    paged_seq a = arrive(cache, row(0, N), N, false), b = arrive(cache, row(0, N), N, true);
    CHECK_EQ(compute(cache, b, row(0, N), N, N), N);
    CHECK_EQ(paged_seq_waits(cache, b), 0);
    CHECK_EQ(compute(cache, a, row(0, N), N, N), 1);
    paged_cache_free(cache);
}

static int32_t pick(uint64_t *rand, uint32_t n) {
    return (int32_t)(paged__rand(rand) % n);
}

/* Prompts of a few families come and go while chunks are computed; nobody waits when nobody computes. */
static void random_arrivals(void) {
    enum { SEQS = 16, LENGTH = 40, BLOCKS = 400 };
    uint64_t rand = paged__mix(test_seed);
    int32_t n_seeds = test_long ? 5000 : 50, n_finished = 0;
    for (int32_t round = 0; round < n_seeds; round++) {
        paged_cache *cache = open_cache(BLOCKS, false);
        paged_seq seqs[SEQS] = {0};
        static int32_t tokens[SEQS][LENGTH];
        int32_t lens[SEQS];
        bool waits;
        for (int32_t step = 0; step < 300; step++) {
            int32_t i = pick(&rand, SEQS), n_waiting = 0, n_going = 0;
            if (!seqs[i]) {
                lens[i] = 1 + pick(&rand, LENGTH);
                int32_t family = pick(&rand, 3), fork = pick(&rand, 2 * LENGTH);
                for (int32_t t = 0; t < lens[i]; t++) tokens[i][t] = t < fork ? family : pick(&rand, 3);
                CHECK_EQ(paged_seq_create(cache, &seqs[i]), PAGED_OK);
                CHECK_EQ(paged_seq_promise(cache, seqs[i], &nowhere, tokens[i], lens[i], &waits), PAGED_OK);
            } else if (pick(&rand, 10) == 0) {
                CHECK_EQ(paged_seq_free(cache, seqs[i]), PAGED_OK);
                seqs[i] = 0;
            } else if (!paged_seq_waits(cache, seqs[i])) {
                int32_t end = paged_seq_len(cache, seqs[i]) + 1 + pick(&rand, 9);
                compute(cache, seqs[i], tokens[i], lens[i], PAGED_MIN(end, lens[i]));
                if (paged_seq_len(cache, seqs[i]) == lens[i]) {
                    CHECK_EQ(paged_seq_free(cache, seqs[i]), PAGED_OK);
                    seqs[i] = 0;
                    n_finished++;
                }
            }
            check_cache(cache);
            for (int32_t s = 0; s < SEQS; s++) {
                if (!seqs[s]) continue;
                n_waiting += paged_seq_waits(cache, seqs[s]);
                n_going += !paged_seq_waits(cache, seqs[s]);
            }
            CHECK(n_waiting == 0 || n_going > 0);
        }
        paged_cache_free(cache);
    }
    CHECK(n_finished > 20 * n_seeds);
}

#define TESTS(X)                                                                                             \
    X(one_computes_for_all)                                                                                  \
    X(the_oldest_waiter_takes_over)                                                                          \
    X(a_broken_promise_hands_over)                                                                           \
    X(nobody_waits_in_vain)                                                                                  \
    X(a_waiter_may_go_on)                                                                                    \
    X(random_arrivals)
TEST_MAIN(TESTS)
