/* Goal: reuse, eviction and pins do what mem.h says. Method: small pools in which every hit, copy and
 * eviction is known beforehand; block size 4, 8 bytes a token. */
#include "mem/mem.h"
#include "test.h"

enum { B = 4 };

static paged_cache *open_cache(int32_t n_blocks) {
    static const paged_group_config group = {
        .n_layers = 1, .n_kv_heads = 1, .head_dim_k = 1, .type = PAGED_TYPE_F32};
    const paged_cache_config config = {.struct_size = sizeof config,
                                       .groups = &group,
                                       .n_groups = 1,
                                       .block_size = B,
                                       .pool_bytes = (size_t)n_blocks * B * 8,
                                       .max_seqs = 8,
                                       .poison = true};
    paged_cache *cache = NULL;
    CHECK_EQ(paged_cache_create(&config, &cache, NULL), PAGED_OK);
    return cache;
}

static void check_cache(const paged_cache *cache) {
    paged_error err = {0};
    if (paged_cache_check(cache, &err) != PAGED_OK) test_fail(__FILE__, __LINE__, "%s", err.message);
}

static paged_cache_stats stats_of(const paged_cache *cache) {
    paged_cache_stats stats;
    paged_cache_get_stats(cache, &stats);
    return stats;
}

/* Tokens start, start + 1, start + 2 … */
static const int32_t *row(int32_t start, int32_t n) {
    static int32_t tokens[256];
    for (int32_t i = 0; i < n; i++) tokens[i] = start + i;
    return tokens;
}

static const paged_namespace nowhere = {0};

static paged_seq match(paged_cache *cache, const paged_namespace *names, const int32_t *tokens, int32_t n,
                       paged_match *got) {
    paged_seq seq;
    CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
    CHECK_EQ(paged_seq_match(cache, seq, names, tokens, n, got), PAGED_OK);
    check_cache(cache);
    return seq;
}

/* A prompt computed to its end; returns how much of it was reused. */
static int32_t run(paged_cache *cache, const paged_namespace *names, const int32_t *tokens, int32_t n) {
    paged_match got;
    paged_seq seq = match(cache, names, tokens, n, &got);
    CHECK_EQ(paged_seq_reserve(cache, seq, n - got.n_matched), PAGED_OK);
    CHECK_EQ(paged_seq_commit(cache, seq, tokens + got.n_matched, n - got.n_matched), PAGED_OK);
    check_cache(cache);
    CHECK_EQ(paged_seq_free(cache, seq), PAGED_OK);
    check_cache(cache);
    return got.n_matched;
}

/* Only looks. */
static int32_t cached(paged_cache *cache, const paged_namespace *names, const int32_t *tokens, int32_t n,
                      paged_miss *why) {
    paged_match got;
    paged_seq seq = match(cache, names, tokens, n, &got);
    CHECK_EQ(paged_seq_free(cache, seq), PAGED_OK);
    check_cache(cache);
    if (why) *why = got.why;
    return got.n_matched;
}

/* D05: at every length around a block's edge the second prompt reuses all but the last token. */
static void one_token_is_always_left(void) {
    for (int32_t n = 1; n <= 4 * B + 1; n++) {
        paged_cache *cache = open_cache(32);
        paged_match got;
        CHECK_EQ(run(cache, &nowhere, row(0, n), n), 0);
        paged_seq seq = match(cache, &nowhere, row(0, n), n, &got);
        CHECK_EQ(got.n_matched, n - 1);
        CHECK_EQ(got.n_copied, (n - 1) % B);
        CHECK_EQ(got.why, n < 2 ? PAGED_MISS_TOO_SHORT : PAGED_MISS_NONE);
        CHECK_EQ(paged_seq_len(cache, seq), n - 1);
        CHECK(memcmp(paged_seq_tokens(cache, seq), row(0, n), (size_t)(n - 1) * sizeof(int32_t)) == 0);
        /* The last token makes the block of the cached one again: there is one in the end. */
        CHECK_EQ(paged_seq_reserve(cache, seq, 1), PAGED_OK);
        CHECK_EQ(paged_seq_commit(cache, seq, row(0, n) + n - 1, 1), PAGED_OK);
        check_cache(cache);
        CHECK_EQ(paged_seq_free(cache, seq), PAGED_OK);
        check_cache(cache);
        CHECK_EQ(stats_of(cache).n_cached, (n + B - 1) / B);
        CHECK_EQ(stats_of(cache).n_used, 0);
        paged_cache_free(cache);
    }
}

/* D06: the same name in another field, or none, is another namespace; inside one there is reuse, though every
 * hash is the same. */
static void namespaces_never_share(void) {
    const paged_ns_field fields[][2] = {
        {{PAGED_NS_SALT, "x", 1}},
        {{PAGED_NS_SALT, "y", 1}},
        {{PAGED_NS_ADAPTER, "x", 1}},
        {{PAGED_NS_MODEL, "x", 1}},
        {{PAGED_NS_MODEL, "x", 1}, {PAGED_NS_ADAPTER, "x", 1}},
        {{PAGED_NS_MODEL, "xx", 2}},
        {{PAGED_NS_MODEL, "", 0}},
    };
    for (int cut = 0; cut < 2; cut++) {
        paged_cache *cache = open_cache(400);
        if (cut) paged__cache_cut_hash(cache, 0);
        for (int i = 0; i < 8; i++) {
            const paged_namespace names = {fields[i], i == 7 ? 0 : 1 + (i == 4)};
            const paged_namespace *where = i == 7 ? &nowhere : &names;
            paged_miss why;
            CHECK_EQ(cached(cache, where, row(0, 64), 64, &why), 0);
            CHECK_EQ(why, i ? PAGED_MISS_NAMESPACE : PAGED_MISS_NO_MATCH);
            CHECK_EQ(run(cache, where, row(0, 64), 64), 0);
            CHECK_EQ(run(cache, where, row(0, 64), 64), 63);
            CHECK_EQ(cached(cache, where, row(1, 64), 64, NULL), 0);
        }
        paged_cache_free(cache);
    }
}

static void wrong_arguments_change_nothing(void) {
    paged_cache *cache = open_cache(8);
    paged_seq seq;
    const paged_ns_field descending[] = {{2, "a", 1}, {1, "b", 1}}, twice[] = {{2, "a", 1}, {2, "b", 1}},
                         null[] = {{1, NULL, 1}}, huge[] = {{1, "a", 70000}};
    const paged_namespace wrong[] = {{descending, 2}, {twice, 2}, {null, 1},
                                     {huge, 1},       {NULL, 1},  {NULL, -1}};
    CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        CHECK_EQ(paged_seq_match(cache, seq, &wrong[i], row(0, 5), 5, NULL), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_seq_match(cache, seq, NULL, row(0, 5), 5, NULL), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_seq_match(cache, seq, &nowhere, NULL, 5, NULL), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_seq_match(cache, seq, &nowhere, row(0, 33), 33, NULL), PAGED_ERR_TOO_LONG);
    CHECK_EQ(stats_of(cache).n_queries, 0);
    CHECK_EQ(paged_seq_match(cache, seq, &nowhere, NULL, 0, NULL), PAGED_OK);
    CHECK_EQ(paged_seq_match(cache, seq, &nowhere, NULL, 0, NULL), PAGED_ERR_INVALID_ARG);
    check_cache(cache);
    paged_cache_free(cache);
}

/* A chat: each turn goes on where the one before ended, in the middle of a block. Sealed tails that are
 * outgrown do not pile up. */
static void turns_of_a_chat_reuse_all(void) {
    paged_cache *cache = open_cache(64);
    int32_t n = 0;
    for (int32_t turn = 0; turn < 20; turn++) {
        int32_t longer = n + 1 + turn % 7;
        CHECK_EQ(run(cache, &nowhere, row(0, longer), longer), PAGED_MIN(n, longer - 1));
        n = longer;
        CHECK_EQ(stats_of(cache).n_cached, (n + B - 1) / B);
    }
    paged_cache_free(cache);
}

/* What is indexed never changes: whoever writes on in such a block gets a copy. */
static void indexed_blocks_are_copied_before_writing(void) {
    paged_cache *cache = open_cache(16);
    paged_match got;
    const int32_t other[] = {90, 91};
    paged_seq seq = match(cache, &nowhere, NULL, 0, &got);
    CHECK_EQ(paged_seq_reserve(cache, seq, 8), PAGED_OK);
    CHECK_EQ(paged_seq_commit(cache, seq, row(0, 8), 8), PAGED_OK);
    CHECK_EQ(paged_seq_truncate(cache, seq, 6), PAGED_OK);
    CHECK_EQ(paged_seq_blocks_needed(cache, seq, 0, 2), 1);
    CHECK_EQ(paged_seq_reserve(cache, seq, 2), PAGED_OK);
    CHECK_EQ(paged_seq_commit(cache, seq, other, 2), PAGED_OK);
    check_cache(cache);
    CHECK_EQ(stats_of(cache).n_copies, 1);
    CHECK_EQ(cached(cache, &nowhere, row(0, 9), 9, NULL), 8);
    CHECK_EQ(paged_seq_free(cache, seq), PAGED_OK);
    paged_cache_free(cache);
}

/* Two sequences that compute the same at once end with the same blocks. */
static void twins_become_one(void) {
    paged_cache *cache = open_cache(16);
    paged_seq a = match(cache, &nowhere, row(0, 12), 12, NULL),
              b = match(cache, &nowhere, row(0, 12), 12, NULL);
    CHECK_EQ(paged_seq_reserve(cache, a, 12), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(cache, b, 12), PAGED_OK);
    CHECK_EQ(stats_of(cache).n_used, 6);
    CHECK_EQ(paged_seq_commit(cache, a, row(0, 12), 12), PAGED_OK);
    CHECK_EQ(paged_seq_commit(cache, b, row(0, 12), 12), PAGED_OK);
    check_cache(cache);
    CHECK_EQ(stats_of(cache).n_used, 3);
    CHECK_EQ(paged_seq_free(cache, a), PAGED_OK);
    CHECK_EQ(paged_seq_free(cache, b), PAGED_OK);
    check_cache(cache);
    CHECK_EQ(stats_of(cache).n_cached, 3);
    paged_cache_free(cache);
}

/* Free blocks first; then leaves, the one used longest ago first; a prefix outlives what hangs on it. */
static void evicts_old_leaves_first(void) {
    paged_cache *cache = open_cache(8);
    paged_miss why;
    int32_t branch[8] = {0, 1, 2, 3, 70, 71, 72, 73};
    CHECK_EQ(run(cache, &nowhere, row(0, 8), 8), 0);     /* 2 blocks */
    CHECK_EQ(run(cache, &nowhere, row(100, 8), 8), 0);   /* 2 */
    CHECK_EQ(run(cache, &nowhere, branch, 8), 4);        /* 1 beside the first one's second */
    CHECK_EQ(run(cache, &nowhere, row(200, 12), 12), 0); /* 3: full */
    CHECK_EQ(stats_of(cache).n_evicted, 0);
    CHECK_EQ(stats_of(cache).n_cached, 8);
    CHECK_EQ(run(cache, &nowhere, row(300, 4), 4), 0); /* takes the second block of the first prompt */
    CHECK_EQ(stats_of(cache).n_evicted, 1);
    CHECK_EQ(cached(cache, &nowhere, row(0, 8), 8, &why), 4);
    CHECK_EQ(why, PAGED_MISS_EVICTED);
    CHECK_EQ(run(cache, &nowhere, row(400, 8), 8), 0); /* the leaf of the second prompt, then its root */
    CHECK_EQ(cached(cache, &nowhere, row(100, 8), 8, &why), 0);
    CHECK_EQ(why, PAGED_MISS_EVICTED);
    CHECK_EQ(stats_of(cache).n_evicted, 3);
    CHECK_EQ(stats_of(cache).n_misses[PAGED_MISS_EVICTED], 2);
    CHECK_EQ(paged_seq_reserve(cache, match(cache, &nowhere, NULL, 0, NULL), 33), PAGED_ERR_TOO_LONG);
    CHECK_EQ(stats_of(cache).n_evicted, 3);
    paged_cache_clear(cache);
    check_cache(cache);
    CHECK_EQ(stats_of(cache).n_free, 8);
    paged_cache_free(cache);
}

static void priorities_and_pins_hold(void) {
    paged_cache *cache = open_cache(8);
    int32_t n_kept;
    paged_seq seq;
    for (int32_t i = 0; i < 4; i++) CHECK_EQ(run(cache, &nowhere, row(100 * i, 8), 8), 0);
    CHECK_EQ(paged_prefix_keep(cache, &nowhere, row(0, 10), 10, 2, 0, &n_kept), PAGED_OK);
    CHECK_EQ(n_kept, 8);
    CHECK_EQ(paged_prefix_keep(cache, &nowhere, row(100, 6), 6, 0, 50, &n_kept), PAGED_OK);
    CHECK_EQ(n_kept, 6);
    check_cache(cache);
    CHECK_EQ(stats_of(cache).n_used, 2); /* a pin is a reference */
    CHECK_EQ(stats_of(cache).n_pins, 1);
    /* Oldest first it would be prompts 0 and 1; it is 2, then 3. */
    CHECK_EQ(run(cache, &nowhere, row(1000, 8), 8), 0);
    CHECK_EQ(cached(cache, &nowhere, row(200, 8), 8, NULL), 0);
    CHECK_EQ(cached(cache, &nowhere, row(300, 5), 5, NULL), 4);
    CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(cache, seq, 28), PAGED_ERR_NO_BLOCKS); /* 7 blocks; 2 are pinned */
    CHECK_EQ(stats_of(cache).n_cached, 6);
    CHECK_EQ(paged_seq_reserve(cache, seq, 20), PAGED_OK);
    check_cache(cache);
    paged_cache_set_clock(cache, 49);
    CHECK_EQ(cached(cache, &nowhere, row(100, 5), 5, NULL), 4);
    CHECK_EQ(cached(cache, &nowhere, row(0, 5), 5, NULL), 4); /* priority: its root is the last to go */
    CHECK_EQ(paged_seq_reserve(cache, seq, 28), PAGED_ERR_NO_BLOCKS);
    paged_cache_set_clock(cache, 50);
    check_cache(cache);
    CHECK_EQ(stats_of(cache).n_used, 5);
    CHECK_EQ(paged_seq_reserve(cache, seq, 28), PAGED_OK);
    check_cache(cache);
    CHECK_EQ(cached(cache, &nowhere, row(0, 5), 5, NULL), 4);
    paged_cache_free(cache);
}

/* No block is left for a copy: the match ends at the block's edge, and says so. */
static void no_block_for_the_copy(void) {
    paged_cache *cache = open_cache(2);
    paged_match got;
    CHECK_EQ(run(cache, &nowhere, row(0, 8), 8), 0);
    paged_seq seq = match(cache, &nowhere, row(0, 7), 7, &got);
    CHECK_EQ(got.n_matched, 4);
    CHECK_EQ(got.why, PAGED_MISS_NO_BLOCK);
    CHECK_EQ(paged_seq_reserve(cache, seq, 3), PAGED_OK); /* evicts what could not be copied */
    check_cache(cache);
    paged_cache_free(cache);
}

static void check_names_what_is_broken(void) {
    paged_cache *cache = open_cache(8);
    paged_error err;
    CHECK_EQ(run(cache, &nowhere, row(0, 10), 10), 0);
    paged_seq seq = match(cache, &nowhere, row(0, 6), 6, NULL);
    CHECK_EQ(paged_seq_reserve(cache, seq, 1), PAGED_OK);
    int32_t root = paged__seq_find(cache, seq)->tip, leaf = cache->evictable.items[0];
    int32_t leaf_block = paged__node_block(cache, leaf, 0);
#define BROKEN(field, value, says)                                                                           \
    do {                                                                                                     \
        int64_t was = (int64_t)(field);                                                                      \
        (field) = (value);                                                                                   \
        CHECK_EQ(paged_cache_check(cache, &err), PAGED_ERR_CORRUPT);                                         \
        if (!strstr(err.message, says)) test_fail(__FILE__, __LINE__, "%s", err.message);                    \
        (field) = (__typeof__(field))was;                                                                    \
        check_cache(cache);                                                                                  \
    } while (0)
    BROKEN(cache->nodes[root].parent, -9, "parent -9");
    BROKEN(cache->nodes[root].n_tokens, 3, "parent");
    BROKEN(cache->nodes[root].hash[1], 5, "hash");
    BROKEN(cache->nodes[root].children, -1, "leads to");
    BROKEN(cache->nodes[root].heap_pos, 0, "heap");
    BROKEN(cache->nodes[leaf].heap_pos, -1, "heap");
    BROKEN(cache->node_tokens[root * B], 77, "hash");
    BROKEN(cache->spaces[0].n_refs, 9, "counted");
    BROKEN(cache->nodes[root].n_users, 2, "users");
    BROKEN(cache->nodes[leaf].n_held, 1, "in use");
    BROKEN(cache->nodes[leaf].n_blocks, 0, "blocks");
    BROKEN(cache->node_blocks[leaf], -1, "names block -1");
    BROKEN(cache->free_node, -1, "free nodes");
    BROKEN(cache->seqs[0].tip, leaf, "full node");
    BROKEN(cache->groups[0].blocks[leaf_block].node, root, "not of node");
    BROKEN(cache->groups[0].blocks[leaf_block].indexed, false, "state");
    BROKEN(cache->groups[0].n_cached, 7, "cached");
    BROKEN(cache->evictable.n, 0, "heap");
    paged_cache_free(cache);
}

#define TESTS(X)                                                                                             \
    X(one_token_is_always_left)                                                                              \
    X(namespaces_never_share)                                                                                \
    X(wrong_arguments_change_nothing)                                                                        \
    X(turns_of_a_chat_reuse_all)                                                                             \
    X(indexed_blocks_are_copied_before_writing)                                                              \
    X(twins_become_one)                                                                                      \
    X(evicts_old_leaves_first)                                                                               \
    X(priorities_and_pins_hold)                                                                              \
    X(no_block_for_the_copy)                                                                                 \
    X(check_names_what_is_broken)
TEST_MAIN(TESTS)
