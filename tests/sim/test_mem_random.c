/* Goal: no order of operations breaks an invariant, loses a block or lets one sequence see another's keys
 * and values. Method: random operations on a cache and on a naive model (mem_model.h), paged_cache_check()
 * after each. */
#include "book_arena.h"
#include "sim/mem_model.h"

static uint32_t pick(uint64_t *rand, uint32_t n) {
    return (uint32_t)(paged__rand(rand) % n);
}

static int32_t random_window(uint64_t *rand, const paged_cache_config *config) {
    return 1 + (int32_t)pick(rand, 3 * (uint32_t)config->block_size + 2);
}

static struct book book;
static paged_arena arena;
static int32_t n_pool; /* n_pages_max without a limit */

/* A pool of 2 … 40 blocks a group. K and V are in f32, so that the payload has room. */
static void open_random(struct model *m, uint64_t *rand) {
    static paged_group_config groups[3];
    static const int32_t block_sizes[] = {1, 2, 3, 4, 7, 8, 16, 32, 64};
    paged_cache_config config = {
        .struct_size = sizeof config, .groups = groups, .max_seqs = MODEL_SEQS, .poison = true};
    bool equal = pick(rand, 2), windowed = pick(rand, 2), any_window = false;
    int32_t n_blocks = 2 + (int32_t)pick(rand, 39);
    config.n_groups = 1 + (int32_t)pick(rand, 3);
    config.block_size = block_sizes[pick(rand, 9)];
    config.packed_tails = config.block_size >= 32 && pick(rand, 4);
    for (int32_t g = 0; g < config.n_groups; g++) {
        int32_t head_dim = equal ? 1 : 1 + (int32_t)pick(rand, 4);
        groups[g] =
            (paged_group_config){.n_layers = 1 + (int32_t)(equal ? 0 : pick(rand, 2)),
                                 .n_kv_heads = 1 + (int32_t)(equal ? 0 : pick(rand, 2)),
                                 .layout = config.packed_tails ? PAGED_LAYOUT_PACKED : PAGED_LAYOUT_PLAIN,
                                 .head_dim_k = head_dim,
                                 .type = PAGED_TYPE_F32,
                                 .window = windowed && pick(rand, 3) ? random_window(rand, &config) : 0};
        any_window |= groups[g].window > 0;
    }
    int32_t n_tokens = n_blocks * config.block_size;
    config.pool_bytes = paged_pool_bytes_for(groups, config.n_groups, config.block_size, n_tokens);
    CHECK(config.pool_bytes > 0);
    config.max_seq_tokens = n_tokens + 3; /* longer than the pool, so that both refusals occur */
    if (any_window)                       /* and so long that windows slide over more than the pool holds */
        config.max_seq_tokens = (n_blocks > 60 / config.n_groups ? 60 : 3 * n_blocks) * config.block_size;
    memset(m, 0, sizeof *m);
    if (pick(rand, 4)) { /* else the host's, where all of so small a pool is one granule */
        book_open(&book, config.pool_bytes, (size_t)64 << pick(rand, 8), &arena);
        config.arena = &arena;
    }
    m->salt = paged__rand(rand);
    config.trim_after = pick(rand, 3) * 5;
    model_open(m, &config);
    if (pick(rand, 2)) paged__cache_shuffle(m->cache, *rand);
    if (pick(rand, 2)) paged__cache_cut_hash(m->cache, 15); /* collisions are certain */
    if (config.n_groups == 1 || (equal && !any_window)) m->n_pages_max = n_blocks;
    n_pool = m->n_pages_max;
}

/* Tokens that may well be cached: what some row holds or held last, to some length, perhaps with an end of
 * its own. */
static int32_t likely_tokens(const struct model *m, uint64_t *rand, int32_t *tokens) {
    const struct model_seq *s = &m->seqs[pick(rand, MODEL_SEQS)];
    int32_t n_max = 4 * m->block_size + 3, n = (int32_t)pick(rand, (uint32_t)n_max);
    int32_t n_same = pick(rand, 3) ? n : (int32_t)pick(rand, (uint32_t)n + 1);
    memcpy(tokens, s->tokens, (size_t)n * sizeof *tokens);
    for (int32_t i = n_same; i < n; i++) tokens[i] = (int32_t)pick(rand, 3);
    return n;
}

/* Promises what somebody else has promised, or something likely. */
static void random_promise(struct model *m, struct model_seq *s, uint64_t *rand, int32_t space,
                           int32_t *tokens, int32_t n) {
    for (int32_t i = 0; i < MODEL_SEQS; i++) {
        const struct model_seq *other = &m->seqs[i];
        const paged__promise *promise = other->handle ? model_promise_of(m, other) : NULL;
        if (!promise || promise->n_tokens <= other->len || pick(rand, 3) == 0) continue;
        n = promise->n_tokens;
        memcpy(tokens, m->cache->seqs[promise - m->cache->promises].tokens, (size_t)n * sizeof *tokens);
        for (int32_t t = (int32_t)pick(rand, 2 * (uint32_t)n); t < n; t++) tokens[t] = (int32_t)pick(rand, 3);
        break;
    }
    model_promise(m, s, space, tokens, n);
}

static void random_prefix_operation(struct model *m, uint64_t *rand) {
    static int32_t tokens[MODEL_TOKENS];
    int32_t n = likely_tokens(m, rand, tokens), space = (int32_t)pick(rand, 12) / 5;
    switch (pick(rand, 4)) {
    case 0:
        model_clock(m, m->now + pick(rand, 10));
        break;
    case 1:
        if (m->n_pins < MODEL_PINS - 1)
            model_keep(m, space, tokens, n, (int32_t)pick(rand, 3), m->now + pick(rand, 30));
        break;
    default:
        for (int32_t i = 0; i < MODEL_SEQS; i++) {
            struct model_seq *s = &m->seqs[i];
            if (!s->handle || s->len || s->reserved || s->space >= 0) continue;
            if (pick(rand, 2)) random_promise(m, s, rand, space, tokens, n);
            if (paged_seq_waits(m->cache, s->handle) && pick(rand, 4)) break;
            if (model_promise_of(m, s)->n_tokens > 0 && pick(rand, 4)) { /* as it promised */
                const int32_t row = paged_seq_row(m->cache, s->handle);
                n = m->cache->promises[row].n_tokens;
                memcpy(tokens, m->cache->seqs[row].tokens, (size_t)n * sizeof *tokens);
            }
            model_match(m, s, space, tokens, n);
            model_check_seq(m, s);
            break;
        }
        break;
    }
}

/* ---- the pool itself ---- */

static void model_limit(struct model *m, size_t max_bytes) {
    int32_t n_pages = n_pool;
    size_t row_bytes = 0;
    paged_cache_stats stats;
    for (int32_t g = 0; g < m->n_groups; g++) row_bytes += m->cache->groups[g].block_bytes;
    CHECK_EQ(paged_cache_set_max_bytes(m->cache, max_bytes), PAGED_OK);
    if (n_pages && max_bytes && max_bytes / row_bytes < (size_t)n_pages)
        n_pages = (int32_t)(max_bytes / row_bytes);
    m->n_pages_max = n_pages;
    paged_cache_get_stats(m->cache, &stats);
    CHECK(stats.backed_bytes <= stats.max_bytes || stats.idle_bytes == 0);
    CHECK(stats.used_bytes + stats.cached_bytes <= stats.max_bytes || stats.n_cached == 0);
}

static void model_trim(struct model *m, size_t keep_bytes) {
    paged_cache_stats before, after;
    paged_cache_get_stats(m->cache, &before);
    CHECK_EQ(paged_cache_trim(m->cache, keep_bytes), PAGED_OK);
    paged_cache_get_stats(m->cache, &after);
    CHECK(after.idle_bytes <= keep_bytes);
    CHECK_EQ(before.backed_bytes - before.idle_bytes, after.backed_bytes - after.idle_bytes);
}

/* Without a limit there is an end. */
static void model_compact(struct model *m, size_t budget_bytes, bool in_use) {
    size_t moved_bytes = SIZE_MAX;
    CHECK_EQ(paged_cache_compact(m->cache, budget_bytes, in_use, &moved_bytes), PAGED_OK);
    CHECK(moved_bytes <= budget_bytes);
    m->n_moved += moved_bytes > 0;
    for (int32_t n = 0; budget_bytes == SIZE_MAX && moved_bytes > 0; n++) {
        CHECK_EQ(paged_cache_compact(m->cache, budget_bytes, in_use, &moved_bytes), PAGED_OK);
        CHECK(n < m->cache->n_extents);
    }
}

static void random_pool_operation(struct model *m, uint64_t *rand) {
    size_t pool_bytes = m->cache->pool_bytes;
    switch (pick(rand, 4)) {
    case 0: /* two times of three without a limit, so that the pool is not always too small */
        model_limit(m, pick(rand, 3) ? 0 : 1 + paged__rand(rand) % pool_bytes);
        break;
    case 1:
        model_trim(m, pick(rand, 2) ? 0 : paged__rand(rand) % pool_bytes);
        break;
    default:
        model_compact(m, pick(rand, 2) ? SIZE_MAX : paged__rand(rand) % pool_bytes, pick(rand, 4) > 0);
        for (int32_t i = 0; i < MODEL_SEQS; i++)
            if (m->seqs[i].handle) model_check_seq(m, &m->seqs[i]);
        break;
    }
}

static void random_operation(struct model *m, uint64_t *rand) {
    struct model_seq *s = &m->seqs[pick(rand, MODEL_SEQS)];
    int32_t step = pick(rand, 4) ? m->block_size + 2 : 4 * m->block_size + 2, n;
    if (pick(rand, 4) == 0) {
        random_prefix_operation(m, rand);
        return;
    }
    if (pick(rand, 16) == 0) {
        random_pool_operation(m, rand);
        return;
    }
    if (!s->handle) {
        if (pick(rand, 3))
            model_create(m);
        else
            model_wrong_handle(m, pick(rand, 2) ? m->stale : paged__rand(rand));
        return;
    }
    switch (pick(rand, 12)) {
    case 0:
        model_free(m, s);
        break;
    case 1:
    case 2:
        model_fork(m, s);
        break;
    case 3:
        n = (int32_t)pick(rand, (uint32_t)s->len + 2);
        model_truncate(m, s, n);
        break;
    case 4:
    case 5:
    case 6:
    case 7:
        model_reserve(m, s, (int32_t)pick(rand, (uint32_t)step));
        break;
    default:
        n = (int32_t)pick(rand, (uint32_t)s->reserved + 2);
        model_commit(m, s, n, rand);
        break;
    }
    if (s->handle) model_check_seq(m, s);
}

/* of all seeds */
static uint64_t n_hits, n_tails, n_evicted, n_packed, n_loose, n_waits, n_handovers, n_moved, n_unbacked;

static void one_seed(uint64_t seed, int32_t n_operations) {
    static struct model m;
    paged_cache_stats stats;
    uint64_t rand = paged__mix(seed);
    test_seed = seed; /* so that a failure names it */
    open_random(&m, &rand);
    for (int32_t i = 0; i < n_operations; i++) {
        random_operation(&m, &rand);
        model_check(&m);
        if (i % 64 == 0) model_check_all(&m);
    }
    model_check_all(&m);
    paged_cache_get_stats(m.cache, &stats);
    n_hits += m.n_hits;
    n_tails += m.n_tails;
    n_evicted += stats.n_evicted;
    n_moved += m.n_moved;
    n_unbacked += stats.n_unbacked;
    n_packed += m.n_packed;
    n_waits += m.n_waits;
    n_handovers += stats.n_handovers;
    CHECK_EQ(stats.n_waits, m.n_waits);
    n_loose += stats.n_evicted_blocks;
    CHECK(stats.n_packed >= m.n_packed); /* those that were sealed besides */
    CHECK_EQ(stats.n_hit_tokens, m.n_hits);
    model_close(&m);
}

static void random_operations(void) {
    uint64_t first = test_seed, n_seeds = test_long ? 30000 : 300;
    for (uint64_t i = 0; i < n_seeds; i++) one_seed(first + i, 4000);
    test_seed = first;
    printf("%llu tokens reused, %llu tails copied, %llu entries evicted\n", (unsigned long long)n_hits,
           (unsigned long long)n_tails, (unsigned long long)n_evicted);
    printf("%llu tails packed into blocks, %llu blocks of windows evicted\n", (unsigned long long)n_packed,
           (unsigned long long)n_loose);
    printf("%llu compactions moved blocks, %llu granules returned\n", (unsigned long long)n_moved,
           (unsigned long long)n_unbacked);
    printf("%llu sequences waited for others, %llu took over\n", (unsigned long long)n_waits,
           (unsigned long long)n_handovers);
    CHECK(n_waits > n_seeds && n_handovers > n_seeds / 4);
    CHECK(n_packed > 10 * n_seeds && n_loose > 10 * n_seeds);
    CHECK(n_hits > 100 * n_seeds && n_tails > 10 * n_seeds && n_evicted > 10 * n_seeds);
    CHECK(n_moved > 2 * n_seeds && n_unbacked > 10 * n_seeds);
}

/* In a pool that never evicts, reuse is the longest common beginning with any earlier prompt, to the token.
 * */
static void reuse_is_the_longest_common_prefix(void) {
    enum { N_PROMPTS = 300, LENGTH_MAX = 120 };
    static int32_t prompts[N_PROMPTS][LENGTH_MAX], lens[N_PROMPTS];
    static const int32_t block_sizes[] = {1, 2, 5, 16, 64};
    paged_group_config group = {.n_layers = 1, .n_kv_heads = 1, .head_dim_k = 1, .type = PAGED_TYPE_F32};
    const paged_namespace names = {0};
    uint64_t rand = test_seed, n_reused = 0;
    for (int32_t b = 0; b < 10; b++) {
        const paged_cache_config config = {.struct_size = sizeof config,
                                           .groups = &group,
                                           .n_groups = 1,
                                           .block_size = block_sizes[b / 2],
                                           .pool_bytes = (size_t)N_PROMPTS * 2 * LENGTH_MAX * 64,
                                           .max_seq_tokens = LENGTH_MAX};
        paged_cache *cache = NULL;
        CHECK_EQ(paged_cache_create(&config, &cache, NULL), PAGED_OK);
        if (b % 2) paged__cache_cut_hash(cache, 15);
        for (int32_t p = 0; p < N_PROMPTS; p++) {
            int32_t from = (int32_t)pick(&rand, (uint32_t)p + 1), want = 0, k;
            int32_t n = lens[p] = 1 + (int32_t)pick(&rand, LENGTH_MAX), n_same = (int32_t)pick(&rand, 130);
            for (int32_t i = 0; i < n; i++)
                prompts[p][i] =
                    from < p && i < n_same && i < lens[from] ? prompts[from][i] : (int32_t)pick(&rand, 4);
            for (int32_t q = 0; q < p; q++) {
                for (k = 0; k < n - 1 && k < lens[q] && prompts[p][k] == prompts[q][k];) k++;
                want = k > want ? k : want;
            }
            paged_seq seq;
            paged_match got;
            CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
            CHECK_EQ(paged_seq_match(cache, seq, &names, prompts[p], n, &got), PAGED_OK);
            CHECK_EQ(got.n_matched, want);
            CHECK_EQ(paged_seq_reserve(cache, seq, n - want), PAGED_OK);
            CHECK_EQ(paged_seq_commit(cache, seq, prompts[p] + want, n - want), PAGED_OK);
            CHECK_EQ(paged_seq_free(cache, seq), PAGED_OK);
            n_reused += (uint64_t)want;
        }
        CHECK_EQ(paged_cache_check(cache, NULL), PAGED_OK);
        paged_cache_free(cache);
    }
    CHECK(n_reused > 10000);
}

/* A hundred thousand times the same: if anything leaked, even one byte, the numbers would differ. */
static void fork_and_free_leave_nothing(void) {
    static struct model m;
    paged_group_config group = {.n_layers = 1, .n_kv_heads = 1, .head_dim_k = 1, .type = PAGED_TYPE_F32};
    paged_cache_config config = {.struct_size = sizeof config,
                                 .groups = &group,
                                 .n_groups = 1,
                                 .block_size = 4,
                                 .pool_bytes = 10 * 4 * 8,
                                 .max_seqs = MODEL_SEQS,
                                 .max_seq_tokens = 40};
    paged_cache_stats before, after;
    uint64_t rand = test_seed;
    paged_seq child;
    memset(&m, 0, sizeof m);
    model_open(&m, &config);
    model_create(&m);
    model_reserve(&m, &m.seqs[0], 10);
    model_commit(&m, &m.seqs[0], 10, &rand);
    paged_cache_get_stats(m.cache, &before);
    for (int32_t i = 0; i < 100000; i++) {
        int32_t token = i % 5;
        CHECK_EQ(paged_seq_fork(m.cache, m.seqs[0].handle, &child), PAGED_OK);
        CHECK_EQ(paged_seq_reserve(m.cache, child, 1 + i % 7), PAGED_OK);
        CHECK_EQ(paged_seq_commit(m.cache, child, &token, 1), PAGED_OK);
        CHECK_EQ(paged_seq_free(m.cache, child), PAGED_OK);
    }
    paged_cache_get_stats(m.cache, &after);
    CHECK_EQ(after.n_copies - before.n_copies, 100000);
    after.n_copies = before.n_copies;
    CHECK_EQ(after.n_allocs - after.n_frees, before.n_allocs - before.n_frees);
    after.n_allocs = before.n_allocs;
    after.n_frees = before.n_frees;
    CHECK(memcmp(&before, &after, sizeof before) == 0);
    m.n_copies = before.n_copies + 100000;
    model_check_all(&m);
    model_close(&m);
}

#define TESTS(X) X(random_operations) X(reuse_is_the_longest_common_prefix) X(fork_and_free_leave_nothing)
TEST_MAIN(TESTS)
