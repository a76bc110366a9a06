/* Goal: packed tails waste no more than blocks of 16 and hold the same bytes. Method: blocks of 64, in which
 * each tile can be named by hand; payload in every layer, head and type, compared through tables and kv.h's
 * formulas; required behaviour D01 as a loop over lengths around the edges. */
#include "mem/mem.h"
#include "test.h"

enum { B = 64, T = B / PAGED_TILE };

static const paged_namespace nowhere = {0};

static paged_cache *open_cache(int32_t n_blocks, paged_type type) {
    const paged_group_config group = {.n_layers = 2,
                                      .n_kv_heads = 3,
                                      .head_dim_k = 8,
                                      .head_dim_v = 4,
                                      .type = type,
                                      .layout = PAGED_LAYOUT_PACKED};
    const paged_cache_config config = {.struct_size = sizeof config,
                                       .groups = &group,
                                       .n_groups = 1,
                                       .block_size = B,
                                       .pool_bytes = (size_t)n_blocks * paged_block_bytes(&group, B),
                                       .max_seqs = 16,
                                       .packed_tails = true,
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
    static int32_t tokens[1024];
    for (int32_t i = 0; i < n; i++) tokens[i] = start + i;
    return tokens;
}

static paged_seq open_seq(paged_cache *cache) {
    paged_seq seq;
    CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
    return seq;
}

static void grow(paged_cache *cache, paged_seq seq, int32_t start, int32_t n) {
    CHECK_EQ(paged_seq_reserve(cache, seq, n), PAGED_OK);
    check_cache(cache);
    CHECK_EQ(paged_seq_commit(cache, seq, row(start, n), n), PAGED_OK);
    check_cache(cache);
}

static int32_t entry_of(const paged_cache *cache, paged_seq seq, int32_t idx) {
    paged_tables tables = {0};
    CHECK_EQ(paged_cache_tables(cache, 0, &tables), PAGED_OK);
    return tables.blocks[paged_seq_row(cache, seq) * tables.seq_stride + idx];
}

static int32_t tile_of(const paged_cache *cache, paged_seq seq, int32_t idx) {
    paged_tables tables = {0};
    CHECK_EQ(paged_cache_tables(cache, 0, &tables), PAGED_OK);
    return tables.tail_tiles[paged_seq_row(cache, seq) * T + idx];
}

static void tiles_come_and_go(void) {
    paged_cache *cache = open_cache(8, PAGED_TYPE_F16);
    paged_seq a = open_seq(cache), b = open_seq(cache);
    int64_t slots[B];
    grow(cache, a, 0, 20); /* two tiles */
    grow(cache, b, 0, 1);  /* one, of the same block */
    CHECK_EQ(stats_of(cache).n_used, 1);
    CHECK_EQ(stats_of(cache).n_divided, 1);
    CHECK_EQ(stats_of(cache).n_tail_tiles, 3);
    CHECK_EQ(stats_of(cache).n_slots_used, 21);
    CHECK_EQ(entry_of(cache, a, 0), -1);
    CHECK(tile_of(cache, a, 1) >= 0 && tile_of(cache, a, 2) == -1);
    CHECK(tile_of(cache, b, 0) / T == tile_of(cache, a, 0) / T);
    CHECK_EQ(paged_seq_slots(cache, a, 0, 0, 20, slots), PAGED_OK);
    for (int32_t i = 0; i < 20; i++) CHECK_EQ(slots[i], tile_of(cache, a, i / 16) * 16 + i % 16);
    CHECK_EQ(paged_seq_blocks_needed(cache, a, 0, 28), 0); /* 48 tokens: the last tile of the block */
    CHECK_EQ(paged_seq_blocks_needed(cache, a, 0, 29), 1); /* two tiles: another block is divided */
    CHECK_EQ(paged_seq_blocks_needed(cache, a, 0, 44), 1); /* full: becomes a block */
    CHECK_EQ(paged_seq_blocks_needed(cache, a, 0, 45), 1); /* and one tile, which is free */
    CHECK_EQ(paged_seq_blocks_needed(cache, a, 0, 45 + 16), 2);
    CHECK_EQ(paged_seq_reserve(cache, a, 29), PAGED_OK);
    CHECK_EQ(stats_of(cache).n_divided, 2);
    CHECK_EQ(paged_seq_reserve(cache, a, 0), PAGED_OK); /* gives the tiles back, and the block */
    check_cache(cache);
    CHECK_EQ(stats_of(cache).n_divided, 1);
    grow(cache, a, 20, 44);
    CHECK(entry_of(cache, a, 0) >= 0);
    CHECK_EQ(tile_of(cache, a, 0), -1);
    CHECK_EQ(stats_of(cache).n_packed, 1);
    CHECK_EQ(stats_of(cache).n_used, 2);
    CHECK_EQ(stats_of(cache).n_tail_tiles, 1);
    /* Cut into the block: it stays one. Written on in, it is still one. */
    CHECK_EQ(paged_seq_truncate(cache, a, 10), PAGED_OK);
    grow(cache, a, 90, 3);
    CHECK(entry_of(cache, a, 0) >= 0);
    CHECK_EQ(stats_of(cache).n_tail_tiles, 1);
    CHECK_EQ(paged_seq_free(cache, a), PAGED_OK);
    CHECK_EQ(paged_seq_free(cache, b), PAGED_OK);
    check_cache(cache);
    CHECK_EQ(stats_of(cache).n_free, 8);
    CHECK_EQ(stats_of(cache).n_allocs, stats_of(cache).n_frees);
    paged_cache_free(cache);
}

static void forks_share_tiles(void) {
    paged_cache *cache = open_cache(8, PAGED_TYPE_F16);
    paged_seq a = open_seq(cache), b, c;
    grow(cache, a, 0, 20);
    CHECK_EQ(paged_seq_fork(cache, a, &b), PAGED_OK);
    CHECK_EQ(paged_seq_fork(cache, a, &c), PAGED_OK);
    check_cache(cache);
    CHECK_EQ(stats_of(cache).n_tail_tiles, 2);
    CHECK_EQ(stats_of(cache).n_slots_used, 20);
    grow(cache, b, 50, 1); /* copies the tile it writes in, shares the one before */
    CHECK_EQ(stats_of(cache).n_copies, 1);
    CHECK_EQ(tile_of(cache, b, 0), tile_of(cache, a, 0));
    CHECK(tile_of(cache, b, 1) != tile_of(cache, a, 1));
    CHECK_EQ(stats_of(cache).n_tail_tiles, 3);
    grow(cache, c, 60, 44); /* becomes a block of its own */
    CHECK_EQ(stats_of(cache).n_copies, 1);
    CHECK_EQ(stats_of(cache).n_packed, 1);
    CHECK_EQ(paged_seq_truncate(cache, b, 16), PAGED_OK);
    CHECK_EQ(stats_of(cache).n_tail_tiles, 2);
    grow(cache, b, 70, 1); /* a new tile; the full one before stays shared */
    CHECK_EQ(stats_of(cache).n_copies, 1);
    CHECK_EQ(tile_of(cache, b, 0), tile_of(cache, a, 0));
    CHECK_EQ(paged_seq_free(cache, a), PAGED_OK);
    CHECK_EQ(paged_seq_free(cache, c), PAGED_OK);
    check_cache(cache);
    CHECK_EQ(stats_of(cache).n_tail_tiles, 2);
    CHECK_EQ(paged_seq_free(cache, b), PAGED_OK);
    CHECK_EQ(stats_of(cache).n_free, 8);
    paged_cache_free(cache);
}

/* Sealed when its owner leaves, found again to the token, copied into tiles. */
static void tails_are_reused(void) {
    for (int32_t n = 1; n <= 2 * B + 2; n++) {
        paged_cache *cache = open_cache(8, PAGED_TYPE_F16);
        paged_match got;
        paged_seq seq = open_seq(cache);
        CHECK_EQ(paged_seq_match(cache, seq, &nowhere, row(0, n), n, &got), PAGED_OK);
        grow(cache, seq, 0, n);
        CHECK_EQ(paged_seq_free(cache, seq), PAGED_OK);
        check_cache(cache);
        CHECK_EQ(stats_of(cache).n_cached, (n + B - 1) / B);
        CHECK_EQ(stats_of(cache).n_used, 0);
        seq = open_seq(cache);
        CHECK_EQ(paged_seq_match(cache, seq, &nowhere, row(0, n), n, &got), PAGED_OK);
        check_cache(cache);
        CHECK_EQ(got.n_matched, n - 1);
        CHECK_EQ(stats_of(cache).n_tail_tiles, ((n - 1) % B + PAGED_TILE - 1) / PAGED_TILE);
        grow(cache, seq, n - 1, 1);
        CHECK_EQ(paged_seq_free(cache, seq), PAGED_OK);
        check_cache(cache);
        CHECK_EQ(stats_of(cache).n_cached, (n + B - 1) / B);
        paged_cache_free(cache);
    }
}

/* ---- bytes ---- */

/* Byte `byte` of element d of a slot of a layer and head, where kv.h says that it lies. */
static uint8_t *element(const paged_kv *kv, int32_t head, int64_t slot, int32_t d, bool v, int32_t byte) {
    int64_t block = slot / B, o = slot % B, t = o / 16, i = o % 16, dim = v ? kv->head_dim_v : kv->head_dim_k,
            at;
    int64_t bytes = kv->type == PAGED_TYPE_F32 ? 4 : kv->type == PAGED_TYPE_I8 ? 1 : 2;
    int64_t pack = kv->type == PAGED_TYPE_I8 ? 4 : kv->type == PAGED_TYPE_BF16 ? 2 : 1;
    if (v)
        at = t * 16 * dim + i / pack * pack * dim + d * pack + i % pack;
    else
        at = t * 16 * dim + d / pack * 16 * pack + i * pack + d % pack;
    return (v ? kv->v : kv->k) + block * kv->block_stride +
           head * (v ? kv->v_head_stride : kv->k_head_stride) + at * bytes + byte;
}

/* Calls for every byte of a position: writes it, or compares. */
static void payload(const paged_cache *cache, paged_seq seq, int32_t pos, uint64_t salt, bool write) {
    int64_t slot;
    CHECK_EQ(paged_seq_slots(cache, seq, 0, pos, 1, &slot), PAGED_OK);
    for (int32_t layer = 0; layer < 2; layer++) {
        paged_kv kv;
        CHECK_EQ(paged_cache_kv(cache, 0, layer, &kv), PAGED_OK);
        int32_t bytes = kv.type == PAGED_TYPE_F32 ? 4 : kv.type == PAGED_TYPE_I8 ? 1 : 2;
        uint64_t value = salt ^ (uint64_t)(pos * 2 + layer);
        for (int32_t head = 0; head < 3; head++) {
            for (int32_t e = 0; e < (8 + 4) * bytes; e++) {
                bool v = e >= 8 * bytes;
                int32_t at = v ? e - 8 * bytes : e;
                uint8_t *p = element(&kv, head, slot, at / bytes, v, at % bytes);
                value = paged__mix(value + 1);
                if (write) *p = (uint8_t)value;
                CHECK_EQ(*p, (uint8_t)value);
            }
            for (int32_t s = 0; s < 2 && kv.k_scale; s++) {
                uint8_t *at = (s ? kv.v_scale : kv.k_scale) + slot / B * kv.scale_block_stride +
                              head * kv.scale_head_stride + slot % B * 4;
                value = paged__mix(value + 1);
                if (write) memcpy(at, &value, 4);
                CHECK(memcmp(at, &value, 4) == 0);
            }
        }
    }
}

static void write_on(paged_cache *cache, paged_seq seq, int32_t n, uint64_t salt) {
    int32_t len = paged_seq_len(cache, seq);
    CHECK_EQ(paged_seq_reserve(cache, seq, n), PAGED_OK);
    for (int32_t i = 0; i < n; i++) payload(cache, seq, len + i, salt, true);
    CHECK_EQ(paged_seq_commit(cache, seq, row(len, n), n), PAGED_OK);
    check_cache(cache);
}

static void compare(const paged_cache *cache, paged_seq seq, int32_t first, int32_t end, uint64_t salt) {
    for (int32_t i = first; i < end; i++) payload(cache, seq, i, salt, false);
}

/* Every byte of every layer, head and scale moves with its token: into a copied tile, a block, the index, and
 * back into tiles. */
static void bytes_stay_what_they_were(void) {
    const paged_type types[] = {PAGED_TYPE_F16, PAGED_TYPE_F32, PAGED_TYPE_BF16, PAGED_TYPE_I8};
    for (int32_t i = 0; i < 4; i++) {
        paged_cache *cache = open_cache(16, types[i]);
        paged_match got;
        paged_seq noise = open_seq(cache), a = open_seq(cache), b;
        paged__cache_shuffle(cache, 5);
        write_on(cache, noise, 17, 99);
        CHECK_EQ(paged_seq_match(cache, a, &nowhere, NULL, 0, NULL), PAGED_OK);
        write_on(cache, a, 37, 1);
        CHECK_EQ(paged_seq_fork(cache, a, &b), PAGED_OK);
        write_on(cache, b, 3, 2); /* a copied tile */
        compare(cache, b, 0, 37, 1);
        compare(cache, a, 0, 37, 1);
        write_on(cache, a, 30, 1); /* a block, and a new tail */
        compare(cache, a, 0, 67, 1);
        compare(cache, b, 37, 40, 2);
        CHECK_EQ(paged_seq_free(cache, a), PAGED_OK); /* sealed */
        a = open_seq(cache);
        CHECK_EQ(paged_seq_match(cache, a, &nowhere, row(0, 68), 68, &got), PAGED_OK);
        CHECK_EQ(got.n_matched, 67);
        compare(cache, a, 0, 67, 1);
        compare(cache, noise, 0, 17, 99);
        paged_cache_free(cache);
    }
}

/* ---- waste and leaks ---- */

/* Many sequences of all lengths: the memory beyond their tokens is less than a tile each, and less than a
 * block for all of them. */
static void waste_is_that_of_blocks_of_16(void) {
    paged_cache *cache = open_cache(64, PAGED_TYPE_F16);
    int32_t n_blocks = 0, n_tiles = 0;
    for (int32_t i = 0; i < 16; i++) {
        int32_t n = 1 + (i * 37) % (3 * B);
        grow(cache, open_seq(cache), 0, n);
        n_blocks += n / B;
        n_tiles += (n % B + PAGED_TILE - 1) / PAGED_TILE;
    }
    CHECK_EQ(stats_of(cache).n_tail_tiles, n_tiles);
    CHECK_EQ(stats_of(cache).n_used, n_blocks + (n_tiles + T - 1) / T);
    paged_cache_free(cache);
}

/* D01: 150 requests, eight at a time, of all mixes of lengths around the edges; prefix cache off and on.
 * When idle, everything that is in use is cached, and nothing where there is no cache. D02: some are aborted,
 * at any step, reservations open. */
/* Sixteen tails of one to four tiles in turns; half of them leave, and no whole block may be lost between the
 * tiles of the others. Their bytes are where their tables say, and a tile with two owners stays. */
static void compaction_loses_no_block(void) {
    for (int32_t type = 0; type < 4; type++) {
        paged_cache *cache = open_cache(64, (paged_type)type);
        paged_seq seqs[15], twin;
        int32_t n_tiles = 0;
        size_t moved = 0;
        for (int32_t s = 0; s < 15; s++) seqs[s] = open_seq(cache);
        for (int32_t t = 0; t < T; t++) {
            for (int32_t s = 0; s < 15; s++)
                if (t <= s % T) write_on(cache, seqs[s], t < s % T ? PAGED_TILE : 5, (uint64_t)s);
        }
        for (int32_t s = 0; s < 15; s += 2) CHECK_EQ(paged_seq_free(cache, seqs[s]), PAGED_OK);
        for (int32_t s = 1; s < 15; s += 2) n_tiles += s % T + 1;
        CHECK_EQ(stats_of(cache).n_tail_tiles, n_tiles);
        CHECK(stats_of(cache).n_divided > (n_tiles + T - 1) / T);
        CHECK_EQ(paged_cache_compact(cache, SIZE_MAX, false, NULL), PAGED_OK); /* nothing in use may move */
        CHECK(stats_of(cache).n_divided > (n_tiles + T - 1) / T);
        CHECK_EQ(paged_cache_compact(cache, SIZE_MAX, true, &moved), PAGED_OK);
        check_cache(cache);
        CHECK(moved > 0);
        CHECK_EQ(stats_of(cache).n_divided, (n_tiles + T - 1) / T);
        for (int32_t s = 1; s < 15; s += 2)
            compare(cache, seqs[s], 0, paged_seq_len(cache, seqs[s]), (uint64_t)s);
        CHECK_EQ(paged_seq_fork(cache, seqs[1], &twin), PAGED_OK);
        for (int32_t s = 3; s < 15; s += 2) CHECK_EQ(paged_seq_free(cache, seqs[s]), PAGED_OK);
        CHECK_EQ(paged_cache_compact(cache, SIZE_MAX, true, NULL), PAGED_OK);
        check_cache(cache);
        compare(cache, seqs[1], 0, paged_seq_len(cache, seqs[1]), 1);
        compare(cache, twin, 0, paged_seq_len(cache, twin), 1);
        paged_cache_free(cache);
    }
}

static void nothing_is_left_behind(void) {
    const int32_t edges[] = {1, B - 1, B, B + 1, 2 * B, 2 * B + 1};
    for (int32_t reuse = 0; reuse < 2; reuse++) {
        paged_cache *cache = open_cache(60, PAGED_TYPE_F16);
        paged_seq seqs[8] = {0};
        int32_t lens[8] = {0}, ends[8] = {0}, n_started = 0, n_live = 0, n_aborted = 0;
        for (int32_t step = 0; n_started < 150 || n_live > 0; step++) {
            int32_t i = step % 8;
            if (!seqs[i] && n_started == 150) continue;
            if (!seqs[i]) {
                seqs[i] = open_seq(cache);
                lens[i] = edges[n_started % 6];
                ends[i] = lens[i] + edges[n_started / 6 % 4];
                if (reuse) {
                    paged_match got;
                    CHECK_EQ(
                        paged_seq_match(cache, seqs[i], &nowhere, row(n_started % 5, lens[i]), lens[i], &got),
                        PAGED_OK);
                    lens[i] -= got.n_matched;
                }
                grow(cache, seqs[i], n_started % 5 + paged_seq_len(cache, seqs[i]), lens[i]);
                n_started++;
                n_live++;
                continue;
            }
            bool aborts = paged__mix((uint64_t)step) % 97 == 0;
            CHECK_EQ(paged_seq_reserve(cache, seqs[i], 1), PAGED_OK);
            if (!aborts) CHECK_EQ(paged_seq_commit(cache, seqs[i], row(step, 1), 1), PAGED_OK);
            if (!aborts && paged_seq_len(cache, seqs[i]) < ends[i]) continue;
            CHECK_EQ(paged_seq_free(cache, seqs[i]), PAGED_OK);
            check_cache(cache);
            seqs[i] = 0;
            n_live--;
            n_aborted += aborts;
        }
        CHECK(n_aborted > 5);
        CHECK_EQ(stats_of(cache).n_used, 0);
        CHECK_EQ(stats_of(cache).n_free + stats_of(cache).n_cached, 60);
        CHECK_EQ(stats_of(cache).n_cached > 0, reuse);
        paged_cache_clear(cache);
        CHECK_EQ(stats_of(cache).n_free, 60);
        paged_cache_free(cache);
    }
}

static void create_refuses(void) {
    paged_group_config group = {
        .n_layers = 1, .n_kv_heads = 1, .head_dim_k = 4, .layout = PAGED_LAYOUT_PACKED};
    paged_cache_config config = {.struct_size = sizeof config,
                                 .groups = &group,
                                 .n_groups = 1,
                                 .pool_bytes = 1 << 20,
                                 .packed_tails = true};
    const int32_t wrong[] = {0, 16, 33, 40, 272, 512}, right[] = {32, 48, 64, 128, 256};
    paged_cache *cache = NULL;
    paged_error err;
    for (int32_t i = 0; i < 6; i++) {
        config.block_size = wrong[i];
        CHECK_EQ(paged_cache_create(&config, &cache, &err), PAGED_ERR_INVALID_ARG);
        CHECK(strstr(err.message, "packed"));
    }
    for (int32_t i = 0; i < 5; i++) {
        config.block_size = right[i];
        CHECK_EQ(paged_cache_create(&config, &cache, &err), PAGED_OK);
        paged_cache_free(cache);
    }
    group.layout = PAGED_LAYOUT_PLAIN;
    CHECK_EQ(paged_cache_create(&config, &cache, &err), PAGED_ERR_INVALID_ARG);
    CHECK(strstr(err.message, "packed_tails"));
}

static void check_names_what_is_broken(void) {
    paged_cache *cache = open_cache(8, PAGED_TYPE_F16);
    paged_error err;
    paged_seq a = open_seq(cache), b;
    grow(cache, a, 0, 20);
    CHECK_EQ(paged_seq_fork(cache, a, &b), PAGED_OK);
    paged__group *gr = &cache->groups[0];
    int32_t *tiles = gr->tail_tiles, tile = tiles[0], block = tile / T;
#define BROKEN(field, value, says)                                                                           \
    do {                                                                                                     \
        int64_t was = (int64_t)(field);                                                                      \
        (field) = (value);                                                                                   \
        CHECK_EQ(paged_cache_check(cache, &err), PAGED_ERR_CORRUPT);                                         \
        if (!strstr(err.message, says)) test_fail(__FILE__, __LINE__, "%s", err.message);                    \
        (field) = (__typeof__(field))was;                                                                    \
        check_cache(cache);                                                                                  \
    } while (0)
    BROKEN(tiles[0], -1, "of no divided block");
    BROKEN(tiles[0], tile + 2, "references");
    BROKEN(tiles[3], tile, "not -1");
    BROKEN(gr->tiles[tile].refs, 1, "rows name it");
    BROKEN(gr->n_free_tiles, 1, "free counted");
    BROKEN(gr->n_divided, 2, "counted");
    BROKEN(gr->blocks[block].open_place, -1, "among the open ones");
    BROKEN(gr->blocks[block].refs, 1, "has 1 references");
    BROKEN(gr->blocks[block].state, PAGED__BLOCK_USED, "of no divided block");
    BROKEN(cache->seqs[0].has_tail, false, "");
    BROKEN(cache->seqs[1].tokens[3], 77, "share tile");
    BROKEN(cache->groups[0].tables[0], 1, "not -1");
    paged_cache_free(cache);
}

#define TESTS(X)                                                                                             \
    X(tiles_come_and_go)                                                                                     \
    X(forks_share_tiles)                                                                                     \
    X(tails_are_reused)                                                                                      \
    X(bytes_stay_what_they_were)                                                                             \
    X(compaction_loses_no_block)                                                                             \
    X(waste_is_that_of_blocks_of_16)                                                                         \
    X(nothing_is_left_behind)                                                                                \
    X(create_refuses)                                                                                        \
    X(check_names_what_is_broken)
TEST_MAIN(TESTS)
