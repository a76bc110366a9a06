/* Goal: a group with a window holds what later tokens see, no less and no more. Method: window 4 and other
 * small ones, in which every block and every visible key can be named by hand. */
#include "mem/mem.h"
#include "test.h"

static const paged_namespace nowhere = {0};

/* Groups with these windows; a block of each has the same bytes. */
static paged_cache *open_cache(int32_t block_size, int32_t n_blocks, int32_t n_groups,
                               const int32_t *windows) {
    paged_group_config groups[3];
    for (int32_t g = 0; g < n_groups; g++)
        groups[g] = (paged_group_config){
            .n_layers = 1, .n_kv_heads = 1, .head_dim_k = 1, .type = PAGED_TYPE_F32, .window = windows[g]};
    const paged_cache_config config = {.struct_size = sizeof config,
                                       .groups = groups,
                                       .n_groups = n_groups,
                                       .block_size = block_size,
                                       .pool_bytes = (size_t)(n_blocks * block_size) * 8,
                                       .max_seqs = 8,
                                       .max_seq_tokens = 200,
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

static const int32_t *row(int32_t start, int32_t n) {
    static int32_t tokens[256];
    for (int32_t i = 0; i < n; i++) tokens[i] = start + i;
    return tokens;
}

static paged_seq start(paged_cache *cache, const int32_t *tokens, int32_t n, paged_match *got) {
    paged_seq seq;
    CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
    CHECK_EQ(paged_seq_match(cache, seq, &nowhere, tokens, n, got), PAGED_OK);
    check_cache(cache);
    return seq;
}

static void grow(paged_cache *cache, paged_seq seq, const int32_t *tokens, int32_t n) {
    CHECK_EQ(paged_seq_reserve(cache, seq, n), PAGED_OK);
    CHECK_EQ(paged_seq_commit(cache, seq, tokens, n), PAGED_OK);
    check_cache(cache);
}

/* The prompt computed in pieces; returns how much of it was reused. */
static int32_t run(paged_cache *cache, const int32_t *tokens, int32_t n, int32_t chunk) {
    paged_match got;
    paged_seq seq = start(cache, tokens, n, &got);
    for (int32_t pos = got.n_matched; pos < n; pos += chunk)
        grow(cache, seq, tokens + pos, PAGED_MIN(chunk, n - pos));
    CHECK_EQ(paged_seq_free(cache, seq), PAGED_OK);
    check_cache(cache);
    return got.n_matched;
}

static int32_t entry_of(const paged_cache *cache, paged_seq seq, int32_t group, int32_t idx) {
    paged_tables tables = {0};
    CHECK_EQ(paged_cache_tables(cache, group, &tables), PAGED_OK);
    return tables.blocks[paged_seq_row(cache, seq) * tables.seq_stride + idx];
}

/* D15: window 4, ten tokens, blocks of 4 and of 1, as one prefill, in chunks of 3, token by token. Row i of a
 * piece sees the keys max(0, i - 3) … i, so all of those have slots of this sequence; after it the blocks
 * that no later row sees are gone. */
static void window_of_four(void) {
    const int32_t block_sizes[] = {4, 1}, chunks[] = {10, 3, 1}, window = 4;
    for (int32_t b = 0; b < 2; b++) {
        for (int32_t c = 0; c < 3; c++) {
            int32_t bs = block_sizes[b];
            paged_cache *cache = open_cache(bs, 12, 1, &window);
            paged_seq seq;
            int64_t slots[10];
            CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
            for (int32_t pos = 0; pos < 10; pos += chunks[c]) {
                int32_t n = PAGED_MIN(chunks[c], 10 - pos), first = PAGED_MAX(0, pos - 3);
                CHECK_EQ(paged_seq_reserve(cache, seq, n), PAGED_OK);
                check_cache(cache);
                CHECK_EQ(paged_seq_slots(cache, seq, 0, first, pos + n - first, slots), PAGED_OK);
                for (int32_t i = 0; i < pos + n - first; i++) CHECK(slots[i] >= 0);
                CHECK_EQ(paged_seq_commit(cache, seq, row(pos, n), n), PAGED_OK);
                check_cache(cache);
                int32_t len = pos + n, gone = PAGED_MAX(0, len - 3) / bs;
                CHECK_EQ(paged_seq_first_k(cache, seq, 0), gone * bs);
                CHECK_EQ(stats_of(cache).n_used, (len + bs - 1) / bs - gone);
                for (int32_t i = 0; i < gone; i++) CHECK_EQ(entry_of(cache, seq, 0, i), -1);
                for (int32_t i = gone; i * bs < len; i++) CHECK(entry_of(cache, seq, 0, i) >= 0);
                if (gone)
                    CHECK_EQ(paged_seq_slots(cache, seq, 0, gone * bs - 1, 1, slots), PAGED_ERR_INVALID_ARG);
            }
            /* Ten tokens: the next row sees 7, 8, 9. */
            CHECK_EQ(paged_seq_first_k(cache, seq, 0), bs == 4 ? 4 : 7);
            CHECK_EQ(paged_seq_free(cache, seq), PAGED_OK);
            CHECK_EQ(stats_of(cache).n_free, 12);
            paged_cache_free(cache);
        }
    }
}

/* A sequence of any length needs the blocks of its window and no more. */
static void a_window_slides_for_ever(void) {
    const int32_t window = 6;
    paged_cache *cache = open_cache(4, 3, 1, &window);
    paged_seq seq;
    CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
    for (int32_t i = 0; i < 200; i++) grow(cache, seq, row(i, 1), 1);
    CHECK_EQ(paged_seq_reserve(cache, seq, 1), PAGED_ERR_TOO_LONG);
    CHECK(stats_of(cache).n_used <= 3);
    CHECK_EQ(paged_seq_first_k(cache, seq, 0), 192);
    paged_cache_free(cache);
}

/* Cut to a length whose window is still there, or to nothing; otherwise refused, and nothing changes. */
static void truncate_inside_the_window(void) {
    const int32_t window = 6;
    paged_cache *cache = open_cache(4, 30, 1, &window);
    paged_match got;
    paged_seq seq = start(cache, NULL, 0, &got);
    grow(cache, seq, row(0, 30), 30); /* the next row sees 25 … 29: entries 6 and 7 */
    CHECK_EQ(paged_seq_first_k(cache, seq, 0), 24);
    CHECK_EQ(paged_seq_truncate(cache, seq, 28), PAGED_ERR_INVALID_ARG); /* would see 23 */
    CHECK_EQ(paged_seq_len(cache, seq), 30);
    CHECK_EQ(paged_seq_truncate(cache, seq, 29), PAGED_OK); /* sees 24 */
    CHECK_EQ(paged_seq_first_k(cache, seq, 0), 24);
    check_cache(cache);
    grow(cache, seq, row(500, 3), 3);
    CHECK_EQ(paged_seq_truncate(cache, seq, 0), PAGED_OK);
    check_cache(cache);
    CHECK_EQ(stats_of(cache).n_used, 0);
    grow(cache, seq, row(0, 10), 10);
    paged_cache_free(cache);
}

/* Two groups over the heads of one layer, one with a window: per-head windows. What falls out of one stays in
 * the other. */
static void heads_with_windows_of_their_own(void) {
    const int32_t windows[] = {0, 5};
    paged_cache *cache = open_cache(4, 200, 2, windows);
    paged_seq seq, child;
    CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
    grow(cache, seq, row(0, 22), 22); /* 6 blocks; the window begins at 18: 2 of them */
    CHECK_EQ(stats_of(cache).n_used, 6 + 2);
    CHECK_EQ(paged_seq_first_k(cache, seq, 0), 0);
    CHECK_EQ(paged_seq_first_k(cache, seq, 1), 16);
    CHECK(entry_of(cache, seq, 0, 0) >= 0);
    CHECK_EQ(entry_of(cache, seq, 1, 3), -1);
    CHECK_EQ(paged_seq_fork(cache, seq, &child), PAGED_OK);
    check_cache(cache);
    grow(cache, child, row(50, 8), 8); /* a copy in both, then its own window moves on */
    CHECK_EQ(stats_of(cache).n_copies, 2);
    CHECK_EQ(paged_seq_first_k(cache, child, 1), 24);
    CHECK_EQ(paged_seq_first_k(cache, seq, 1), 16);
    CHECK_EQ(paged_seq_free(cache, seq), PAGED_OK);
    CHECK_EQ(paged_seq_free(cache, child), PAGED_OK);
    check_cache(cache);
    CHECK_EQ(stats_of(cache).n_used, 0);
    paged_cache_free(cache);
}

/* A hit needs every block of the first group and the last window of the second. */
static void a_hit_needs_the_last_window(void) {
    const int32_t windows[] = {0, 5};
    paged_cache *cache = open_cache(4, 200, 2, windows);
    paged_match got;
    CHECK_EQ(run(cache, row(0, 32), 32, 32), 0);
    CHECK_EQ(run(cache, row(0, 32), 32, 1), 31);
    CHECK_EQ(stats_of(cache).n_cached, 16);
    /* What fell out of the window first goes first: blocks 0 … 5 of the second group. */
    paged__group *windowed = &cache->groups[1];
    while (windowed->loose.n > 2) paged__prefix_drop_block(cache, 1, windowed->loose.items[0]);
    check_cache(cache);
    CHECK_EQ(stats_of(cache).n_cached, 8 + 2);
    CHECK_EQ(run(cache, row(0, 33), 33, 1), 32); /* sees 28 … 31: entry 7 */
    paged_seq seq = start(cache, row(0, 30), 30, &got);
    CHECK_EQ(got.n_matched, 29); /* sees 25 … 28: entries 6 and 7, the last of them copied */
    CHECK_EQ(paged_seq_free(cache, seq), PAGED_OK);
    seq = start(cache, row(0, 28), 28, &got);
    CHECK_EQ(got.n_matched, 0); /* 27 would see 23 … 26, and entry 5 is gone; so is all before it */
    CHECK_EQ(got.why, PAGED_MISS_EVICTED);
    /* It computes them again, and puts what was missing back. */
    grow(cache, seq, row(0, 28), 28);
    CHECK_EQ(paged_seq_free(cache, seq), PAGED_OK);
    check_cache(cache);
    CHECK_EQ(stats_of(cache).n_cached, 16 + 2); /* and entry 8, of the 33 tokens, sealed */
    CHECK_EQ(run(cache, row(0, 28), 28, 1), 27);
    paged_cache_free(cache);
}

/* Blocks that fell out of the window of a sequence that lives are evicted for it when the pool is full. */
static void out_of_the_window_is_free_room(void) {
    const int32_t window = 6;
    paged_cache *cache = open_cache(4, 5, 1, &window);
    paged_match got;
    paged_seq seq = start(cache, row(0, 1), 1, &got);
    for (int32_t i = 0; i < 120; i++) grow(cache, seq, row(i, 1), 1);
    CHECK_EQ(stats_of(cache).n_refused, 0);
    CHECK(stats_of(cache).n_evicted_blocks > 20);
    CHECK_EQ(paged_seq_free(cache, seq), PAGED_OK);
    CHECK_EQ(run(cache, row(0, 121), 121, 1), 120);
    paged_cache_clear(cache);
    check_cache(cache);
    CHECK_EQ(stats_of(cache).n_free, 5);
    paged_cache_free(cache);
}

/* A pin holds what its end needs: in a group with a window the last window. */
static void pins_hold_the_last_window(void) {
    const int32_t windows[] = {0, 5};
    paged_cache *cache = open_cache(4, 200, 2, windows);
    int32_t n_kept;
    CHECK_EQ(run(cache, row(0, 32), 32, 32), 0);
    CHECK_EQ(paged_prefix_keep(cache, &nowhere, row(0, 32), 32, 0, 10, &n_kept), PAGED_OK);
    CHECK_EQ(n_kept, 32);
    check_cache(cache);
    CHECK_EQ(stats_of(cache).n_used, 8 + 2); /* 29 sees 25 … 28: entries 6 and 7 */
    paged_cache_clear(cache);
    CHECK_EQ(stats_of(cache).n_cached, 0);
    CHECK_EQ(run(cache, row(0, 32), 32, 1), 31);
    paged_cache_set_clock(cache, 10);
    paged_cache_clear(cache);
    check_cache(cache);
    CHECK_EQ(stats_of(cache).n_used + stats_of(cache).n_cached, 0);
    paged_cache_free(cache);
}

/* Where all groups have windows an entry may stay without a block, on the way to others. There are entries
 * for what sequences and pins need; the rest goes, oldest first. */
static void index_entries_run_out(void) {
    const int32_t window = 6;
    paged_cache *cache = open_cache(4, 30, 1, &window);
    int32_t n_kept = -1;
    CHECK_EQ(cache->n_nodes_max, 8 * 50 + 2 * 30);
    for (int32_t i = 0; i < 30; i++) {
        CHECK_EQ(run(cache, row(1000 * i, 200), 200, 1), 0);
        CHECK_EQ(run(cache, row(1000 * i, 200), 200, 1), 199);
    }
    CHECK(stats_of(cache).n_evicted > 10);
    CHECK(cache->free_node >= 0);
    paged_cache_stats before = stats_of(cache);
    CHECK_EQ(paged_prefix_keep(cache, &nowhere, row(29000, 200), 200, 3, 10, &n_kept), PAGED_ERR_LIMIT);
    CHECK_EQ(n_kept, -1);
    CHECK_EQ(stats_of(cache).n_used, before.n_used);
    CHECK_EQ(cache->nodes[cache->evictable.items[0]].priority, 0);
    CHECK_EQ(run(cache, row(0, 100), 100, 100), 0);
    CHECK_EQ(paged_prefix_keep(cache, &nowhere, row(0, 100), 100, 3, 10, &n_kept), PAGED_OK);
    CHECK_EQ(n_kept, 100);
    check_cache(cache);
    for (int32_t i = 0; i < 30; i++) run(cache, row(1000 * i + 500, 200), 200, 1);
    CHECK_EQ(run(cache, row(0, 101), 101, 1), 100);
    paged_cache_set_clock(cache, 10);
    paged_cache_clear(cache);
    check_cache(cache);
    CHECK_EQ(stats_of(cache).n_free, 30);
    paged_cache_free(cache);
}

static void check_names_what_is_broken(void) {
    const int32_t windows[] = {0, 5};
    paged_cache *cache = open_cache(4, 200, 2, windows);
    paged_match got;
    paged_error err;
    CHECK_EQ(run(cache, row(0, 32), 32, 1), 0);
    paged_seq seq = start(cache, row(0, 32), 32, &got);
    paged__group *windowed = &cache->groups[1];
    int32_t *table = paged__seq_table(cache, 1, paged__seq_find(cache, seq));
    int32_t loose = windowed->loose.items[1];
#define BROKEN(field, value, says)                                                                           \
    do {                                                                                                     \
        int64_t was = (int64_t)(field);                                                                      \
        (field) = (value);                                                                                   \
        CHECK_EQ(paged_cache_check(cache, &err), PAGED_ERR_CORRUPT);                                         \
        if (!strstr(err.message, says)) test_fail(__FILE__, __LINE__, "%s", err.message);                    \
        (field) = (__typeof__(field))was;                                                                    \
        check_cache(cache);                                                                                  \
    } while (0)
    BROKEN(table[0], 3, "before the window");
    BROKEN(table[6], -1, "free or does not exist");
    BROKEN(windowed->loose.n, 1, "in a heap");
    BROKEN(windowed->loose_place[loose], 0, "heap of group 1");
    BROKEN(windowed->loose_tick[loose], 0, "before its parent");
    BROKEN(windowed->blocks[loose].node, 7, "is not of node");
    paged_cache_free(cache);
}

#define TESTS(X)                                                                                             \
    X(window_of_four)                                                                                        \
    X(a_window_slides_for_ever)                                                                              \
    X(truncate_inside_the_window)                                                                            \
    X(heads_with_windows_of_their_own)                                                                       \
    X(a_hit_needs_the_last_window)                                                                           \
    X(out_of_the_window_is_free_room)                                                                        \
    X(index_entries_run_out)                                                                                 \
    X(pins_hold_the_last_window)                                                                             \
    X(check_names_what_is_broken)
TEST_MAIN(TESTS)
