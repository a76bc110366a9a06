/* Goal: who looks at the cache sees what it is. Method: a small pool in which each block's state is known by
 * hand, from fresh to cached to evicted; with the statistics as a second count. */
#include "mem/mem.h"
#include "test.h"

enum { B = 32, N = 8 };

static const paged_namespace nowhere = {0};

static paged_cache *open_cache(bool tails) {
    const paged_group_config group = {.n_layers = 1,
                                      .n_kv_heads = 2,
                                      .head_dim_k = 8,
                                      .type = PAGED_TYPE_F16,
                                      .layout = PAGED_LAYOUT_PACKED};
    const paged_cache_config config = {.struct_size = sizeof config,
                                       .groups = &group,
                                       .n_groups = 1,
                                       .block_size = B,
                                       .pool_bytes = N * paged_block_bytes(&group, B),
                                       .max_seqs = 4,
                                       .packed_tails = tails};
    paged_cache *cache = NULL;
    CHECK_EQ(paged_cache_create(&config, &cache, NULL), PAGED_OK);
    return cache;
}

static const int32_t *row(int32_t first, int32_t n) {
    static int32_t tokens[N * B];
    for (int32_t i = 0; i < n; i++) tokens[i] = first + i;
    return tokens;
}

static paged_seq open_seq(paged_cache *cache, int32_t first, int32_t n) {
    paged_seq seq;
    paged_match got;
    CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
    CHECK_EQ(paged_seq_match(cache, seq, &nowhere, row(first, n), n, &got), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(cache, seq, n - got.n_matched), PAGED_OK);
    CHECK_EQ(paged_seq_commit(cache, seq, row(first + got.n_matched, n - got.n_matched), n - got.n_matched),
             PAGED_OK);
    return seq;
}

static int32_t block_of(const paged_cache *cache, paged_seq seq, int32_t idx) {
    paged_tables tables = {0};
    CHECK_EQ(paged_cache_tables(cache, 0, &tables), PAGED_OK);
    return tables.blocks[paged_seq_row(cache, seq) * tables.seq_stride + idx];
}

/* The view of one block; the sums of all agree with the statistics. */
static paged_block_view look(const paged_cache *cache, int32_t block) {
    paged_block_view all[N + 3];
    paged_cache_stats stats;
    int32_t n[PAGED_BLOCK_TAILS + 1] = {0};
    paged_cache_get_stats(cache, &stats);
    CHECK_EQ(paged_cache_blocks(cache, 0, 0, N + 3, all), N);
    for (int32_t i = 0; i < N; i++) {
        n[all[i].state]++;
        CHECK_EQ(all[i].refs, paged_block_refs(cache, 0, i));
        CHECK(all[i].backed || all[i].state == PAGED_BLOCK_FREE);
    }
    CHECK_EQ(n[PAGED_BLOCK_FREE], stats.n_free);
    CHECK_EQ(n[PAGED_BLOCK_CACHED], stats.n_cached);
    CHECK_EQ(n[PAGED_BLOCK_USED] + n[PAGED_BLOCK_TAILS], stats.n_used);
    CHECK_EQ(n[PAGED_BLOCK_TAILS], stats.n_divided);
    return all[block];
}

static void states_from_fresh_to_cached(void) {
    paged_cache *cache = open_cache(false);
    CHECK(!look(cache, 0).backed);
    paged_seq a = open_seq(cache, 100, 2 * B + 5);
    const int32_t full = block_of(cache, a, 1), last = block_of(cache, a, 2);
    CHECK(look(cache, full).state == PAGED_BLOCK_USED && look(cache, full).indexed);
    CHECK(look(cache, last).state == PAGED_BLOCK_USED && !look(cache, last).indexed);
    paged_seq b = open_seq(cache, 100, 2 * B + 1);
    CHECK_EQ(look(cache, full).refs, 2);
    CHECK_EQ(paged_seq_free(cache, a), PAGED_OK);
    CHECK_EQ(paged_seq_free(cache, b), PAGED_OK);
    CHECK(look(cache, full).state == PAGED_BLOCK_CACHED && look(cache, full).refs == 0);
    paged_cache_clear(cache);
    CHECK(look(cache, full).state == PAGED_BLOCK_FREE && look(cache, full).backed);
    CHECK_EQ(paged_cache_trim(cache, 0), PAGED_OK);
    CHECK(!look(cache, full).backed);
    paged_cache_free(cache);
}

static void tokens_of_blocks(void) {
    paged_cache *cache = open_cache(false);
    int32_t tokens[B], position;
    paged_seq a = open_seq(cache, 100, 2 * B + 5);
    for (int32_t i = 0; i < 3; i++) {
        const int32_t n = i < 2 ? B : 5;
        CHECK_EQ(paged_block_tokens(cache, 0, block_of(cache, a, i), tokens, &position), n);
        CHECK_EQ(position, i * B);
        for (int32_t j = 0; j < n; j++) CHECK_EQ(tokens[j], 100 + i * B + j);
    }
    const int32_t last = block_of(cache, a, 2);
    CHECK_EQ(paged_seq_free(cache, a), PAGED_OK); /* the last one is sealed */
    CHECK_EQ(paged_block_tokens(cache, 0, last, tokens, &position), 5);
    CHECK(position == 2 * B && tokens[4] == 100 + 2 * B + 4);
    paged_cache_clear(cache);
    CHECK_EQ(paged_block_tokens(cache, 0, last, tokens, &position), 0);
    CHECK_EQ(paged_block_tokens(cache, 0, N, tokens, &position), -1);
    CHECK_EQ(paged_block_tokens(cache, 1, 0, tokens, &position), -1);
    CHECK_EQ(paged_cache_blocks(cache, 1, 0, 1, NULL), -1);
    CHECK_EQ(paged_cache_blocks(cache, 0, N, 1, NULL), 0);
    paged_cache_free(cache);
}

static void tails_are_seen(void) {
    paged_cache *cache = open_cache(true);
    int32_t tokens[B], position;
    paged_seq a = open_seq(cache, 100, 3), b = open_seq(cache, 900, 4);
    paged_tables tables = {0};
    CHECK_EQ(paged_cache_tables(cache, 0, &tables), PAGED_OK);
    const int32_t shared = tables.tail_tiles[paged_seq_row(cache, a) * (B / PAGED_TILE)] / (B / PAGED_TILE);
    CHECK(look(cache, shared).state == PAGED_BLOCK_TAILS);
    CHECK_EQ(look(cache, shared).refs, 2);
    CHECK_EQ(paged_block_tokens(cache, 0, shared, tokens, &position), 0);
    CHECK_EQ(paged_seq_free(cache, a), PAGED_OK);
    CHECK_EQ(paged_seq_free(cache, b), PAGED_OK);
    look(cache, shared);
    paged_cache_free(cache);
}

#define TESTS(X) X(states_from_fresh_to_cached) X(tokens_of_blocks) X(tails_are_seen)
TEST_MAIN(TESTS)
