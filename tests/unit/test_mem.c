/* Goal: every call of mem.h does what it says, errors included. Method: small pools whose every number is
 * known. */
#include "mem/mem.h"
#include "test.h"

#define MIB ((size_t)1 << 20)

/* 8 bytes a token and layer. */
static const paged_group_config tiny = {
    .n_layers = 1, .n_kv_heads = 1, .head_dim_k = 1, .type = PAGED_TYPE_F32};

static paged_cache *open_cache(const paged_group_config *groups, int32_t n_groups, int32_t block_size,
                               size_t pool_bytes) {
    const paged_cache_config config = {.struct_size = sizeof config,
                                       .groups = groups,
                                       .n_groups = n_groups,
                                       .block_size = block_size,
                                       .pool_bytes = pool_bytes,
                                       .max_seqs = 4,
                                       .poison = true};
    paged_error err = {0};
    paged_cache *cache = NULL;
    if (paged_cache_create(&config, &cache, &err) != PAGED_OK)
        test_fail(__FILE__, __LINE__, "%s", err.message);
    return cache;
}

/* A pool of n blocks of 4 tokens. */
static paged_cache *open_tiny(int32_t n_blocks) {
    return open_cache(&tiny, 1, 4, (size_t)n_blocks * 32);
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

/* A new sequence of the tokens 0, 1, 2 … */
static paged_seq open_seq(paged_cache *cache, int32_t n_tokens) {
    static const int32_t tokens[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19};
    paged_seq seq = 0;
    CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(cache, seq, n_tokens), PAGED_OK);
    CHECK_EQ(paged_seq_commit(cache, seq, tokens, n_tokens), PAGED_OK);
    return seq;
}

static int32_t entry(const paged_cache *cache, paged_seq seq, int32_t group, int32_t idx) {
    paged_tables tables = {0};
    CHECK_EQ(paged_cache_tables(cache, group, &tables), PAGED_OK);
    CHECK_EQ(tables.head_stride, 0);
    CHECK(idx < tables.max_blocks);
    return tables.blocks[paged_seq_row(cache, seq) * tables.seq_stride + idx];
}

/* ---- arena ---- */

static void arena_backs_and_gives_back(void) {
    paged_arena arena = {0};
    paged_error err = {0};
    CHECK_EQ(paged_arena_create_host(5 * MIB + 1, &arena, &err), PAGED_OK);
    CHECK_EQ((uintptr_t)arena.base % (2 * MIB), 0);
    CHECK(arena.size_bytes >= 5 * MIB + 1);
    CHECK_EQ(arena.back(arena.ctx, 2 * MIB, 2 * MIB), PAGED_OK);
    CHECK_EQ(arena.back(arena.ctx, 2 * MIB, 2 * MIB), PAGED_OK);
    memset(arena.base + 2 * MIB, 0x5a, MIB);
    CHECK_EQ(arena.copy(arena.ctx, 3 * MIB, 2 * MIB, MIB), PAGED_OK);
    CHECK_EQ(arena.base[4 * MIB - 1], 0x5a);
    CHECK_EQ(arena.unback(arena.ctx, 2 * MIB, 2 * MIB), PAGED_OK);
    CHECK_EQ(arena.back(arena.ctx, 2 * MIB, 2 * MIB), PAGED_OK);
    CHECK_EQ(arena.base[2 * MIB], 0); /* the old bytes are gone */
    CHECK_EQ(arena.back(arena.ctx, 5 * MIB, 1), PAGED_OK);
    CHECK_EQ(arena.back(arena.ctx, 4 * MIB, 4 * MIB), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(arena.unback(arena.ctx, SIZE_MAX, 2), PAGED_ERR_INVALID_ARG);
    arena.destroy(arena.ctx);
}

static void arena_errors(void) {
    paged_arena arena = {.size_bytes = 7};
    paged_error err = {0};
    CHECK_EQ(paged_arena_create_host(0, &arena, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_arena_create_host((size_t)1 << 60, &arena, &err), PAGED_ERR_NO_MEMORY);
    CHECK(strstr(err.message, "1152921504606846976"));
    CHECK_EQ(paged_arena_create_host(SIZE_MAX, &arena, NULL), PAGED_ERR_NO_MEMORY);
    CHECK_EQ(paged_arena_create_host(1, NULL, NULL), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(arena.size_bytes, 7);
}

/* ---- sizes ---- */

static void bytes_of_blocks_and_pools(void) {
    const paged_group_config smol = {.n_layers = 30, .n_kv_heads = 3, .head_dim_k = 64};
    const paged_group_config mla = {.n_layers = 2, .n_kv_heads = 1, .head_dim_k = 576, .head_dim_v = 512};
    paged_group_config bad = smol;
    CHECK_EQ(paged_block_bytes(&smol, 16), 16 * 30 * 3 * (64 + 64) * 2);
    CHECK_EQ(paged_block_bytes(&smol, 0), paged_block_bytes(&smol, 16));
    CHECK_EQ(paged_block_bytes(&mla, 1), 2 * (576 + 512) * 2);
    CHECK_EQ(paged_block_bytes(&tiny, 4), 32);
    CHECK_EQ(paged_block_bytes(&smol, 1025), 0);
    CHECK_EQ(paged_block_bytes(NULL, 16), 0);
    bad.n_layers = bad.n_kv_heads = bad.head_dim_k = INT32_MAX;
    CHECK_EQ(paged_block_bytes(&bad, 1024), 0);
    bad = smol;
    bad.type = (paged_type)9;
    CHECK_EQ(paged_block_bytes(&bad, 16), 0);
    CHECK_EQ(paged_pool_bytes_for(&smol, 1, 16, 8192), 512 * paged_block_bytes(&smol, 16));
    CHECK_EQ(paged_pool_bytes_for(&tiny, 1, 4, 9), 3 * 32);
    CHECK_EQ(paged_pool_bytes_for(&tiny, 1, 4, 0), 0);
    CHECK_EQ(paged_pool_bytes_for(&smol, 1, 16, INT64_MAX), 0);
    CHECK_EQ(paged_pool_bytes_for(&bad, 1, 16, 5), 0);
}

/* What paged_pool_bytes_for() says is enough, for groups of many shapes and from one block to gigabytes. */
static void pool_bytes_are_enough(void) {
    static uint8_t none;
    uint64_t rand = test_seed;
    for (int32_t round = 0; round < 300; round++) {
        paged_group_config groups[PAGED_GROUPS_MAX];
        int32_t n_groups = 1 + (int32_t)(paged__rand(&rand) % (round % 3 ? 3 : PAGED_GROUPS_MAX));
        int32_t block_size = 1 << paged__rand(&rand) % 7, large = round % 2;
        for (int32_t g = 0; g < n_groups; g++) {
            groups[g] =
                (paged_group_config){.n_layers = 1 + (int32_t)(paged__rand(&rand) % (large ? 60 : 3)),
                                     .n_kv_heads = 1 + (int32_t)(paged__rand(&rand) % 8),
                                     .head_dim_k = large ? 32 + (int32_t)(paged__rand(&rand) % 200) : 1,
                                     .type = (paged_type)(paged__rand(&rand) % 3)};
        }
        int64_t n_tokens = 1 + (int64_t)(paged__rand(&rand) % (large ? 20000 : 200));
        paged__shapes shapes = {.n_groups = n_groups};
        size_t sum = 0, n_blocks = (size_t)((n_tokens + block_size - 1) / block_size);
        for (int32_t g = 0; g < n_groups; g++) {
            shapes.block_bytes[g] = paged_block_bytes(&groups[g], block_size);
            sum += n_blocks * shapes.block_bytes[g];
        }
        size_t pool_bytes = paged_pool_bytes_for(groups, n_groups, block_size, n_tokens);
        CHECK(pool_bytes >= sum);
        if (n_groups == 1) CHECK(pool_bytes == sum);
        size_t extent_bytes = n_groups == 1 ? pool_bytes : paged__extent_bytes(&shapes, pool_bytes);
        CHECK(extent_bytes > 0);
        if (n_groups == 1) continue;
        CHECK(paged__extents_needed(&shapes, extent_bytes, n_blocks) <= pool_bytes / extent_bytes);
        /* And ids do what the size promises, in every extent. */
        paged_cache cache = {.n_groups = n_groups, .extent_bytes = extent_bytes, .arena.base = &none};
        for (int32_t g = 0; g < n_groups; g++) {
            int32_t first, n, n_min = (int32_t)paged__extent_blocks_min(extent_bytes, shapes.block_bytes[g]);
            cache.groups[g].block_bytes = shapes.block_bytes[g];
            for (int32_t e = 0; e < (int32_t)PAGED_MIN(pool_bytes / extent_bytes, (size_t)100); e++) {
                paged__extent_range(&cache, g, e, &first, &n);
                CHECK(n >= n_min && n_min > 0 && n <= n_min + 1);
                CHECK_EQ(paged__extent_of(&cache, g, first), e);
                CHECK_EQ(paged__extent_of(&cache, g, first + n - 1), e);
                CHECK((size_t)(first + n) * shapes.block_bytes[g] <= (size_t)(e + 1) * extent_bytes);
            }
        }
    }
}

static void extents_of_usual_models_waste_little(void) {
    /* Gemma-like: 5 windowed layers to 1 full one. */
    const paged__shapes shapes = {{16 * 20 * 4 * 512 * 2, 16 * 4 * 4 * 512 * 2}, 2};
    size_t pool_bytes = (size_t)4 << 30, extent_bytes = paged__extent_bytes(&shapes, pool_bytes);
    CHECK_EQ(extent_bytes % (2 * MIB), 0);
    CHECK(extent_bytes <= 64 * MIB);
    for (int32_t g = 0; g < 2; g++) {
        size_t filled = paged__extent_blocks_min(extent_bytes, shapes.block_bytes[g]) * shapes.block_bytes[g];
        CHECK(pool_bytes / extent_bytes * filled >= pool_bytes / 100 * 99);
    }
}

/* ---- create ---- */

static void create_names_what_is_wrong(void) {
    const paged_group_config groups[2] = {tiny, tiny};
    const paged_cache_config good = {
        .struct_size = sizeof good, .groups = groups, .n_groups = 1, .block_size = 4, .pool_bytes = 320};
    paged_arena arena = {.size_bytes = 319};
    paged_group_config group = tiny;
    paged_cache *cache = NULL;
    paged_error err;
#define REFUSED(want, word, ...)                                                                             \
    do {                                                                                                     \
        paged_cache_config config = good;                                                                    \
        __VA_ARGS__;                                                                                         \
        memset(&err, 0, sizeof err);                                                                         \
        CHECK_EQ(paged_cache_create(&config, &cache, &err), want);                                           \
        CHECK_EQ(err.status, want);                                                                          \
        if (!strstr(err.message, word)) test_fail(__FILE__, __LINE__, "%s", err.message);                    \
        CHECK(!cache);                                                                                       \
    } while (0)
    REFUSED(PAGED_ERR_INVALID_ARG, "struct_size", config.struct_size = 8);
    REFUSED(PAGED_ERR_INVALID_ARG, "n_groups", config.n_groups = 0);
    REFUSED(PAGED_ERR_INVALID_ARG, "n_groups is 17", config.n_groups = 17);
    REFUSED(PAGED_ERR_INVALID_ARG, "groups", config.groups = NULL);
    REFUSED(PAGED_ERR_INVALID_ARG, "block_size", config.block_size = -1);
    REFUSED(PAGED_ERR_INVALID_ARG, "block_size is 1025", config.block_size = 1025);
    REFUSED(PAGED_ERR_INVALID_ARG, "pool_bytes", config.pool_bytes = 0);
    REFUSED(PAGED_ERR_INVALID_ARG, "max_seqs", config.max_seqs = -1);
    REFUSED(PAGED_ERR_INVALID_ARG, "max_seq_tokens", config.max_seq_tokens = -1);
    REFUSED(PAGED_ERR_INVALID_ARG, "arena", config.arena = &arena);
    REFUSED(PAGED_ERR_INVALID_ARG, "max_bytes 321", config.max_bytes = 321);
    arena = (paged_arena){.size_bytes = 320, .granule_bytes = 48};
    REFUSED(PAGED_ERR_INVALID_ARG, "no back", config.arena = &arena);
    REFUSED(PAGED_ERR_INVALID_ARG, "contiguous", config.contiguous = true);
    REFUSED(PAGED_ERR_INVALID_ARG, "too many", config.pool_bytes = (size_t)1 << 40; config.block_size = 1);
    REFUSED(PAGED_ERR_NO_BLOCKS, "31", config.pool_bytes = 31);
    REFUSED(PAGED_ERR_NO_BLOCKS, "63", config.pool_bytes = 63; config.n_groups = 2);
    REFUSED(PAGED_ERR_NO_MEMORY, "address space", config.pool_bytes = (size_t)1 << 60; group = tiny;
            group.n_layers = 1 << 28; config.groups = &group; config.block_size = 1024);
    REFUSED(PAGED_ERR_INVALID_ARG, "n_layers 0", group = tiny; group.n_layers = 0; config.groups = &group);
    REFUSED(PAGED_ERR_INVALID_ARG, "type", group = tiny; group.type = (paged_type)7; config.groups = &group);
    REFUSED(PAGED_ERR_INVALID_ARG, "layout", group = tiny; group.layout = (paged_layout)7;
            config.groups = &group);
    REFUSED(PAGED_ERR_INVALID_ARG, "multiple of 16", group = tiny; group.layout = PAGED_LAYOUT_PACKED;
            config.groups = &group);
    REFUSED(PAGED_ERR_INVALID_ARG, "even", group = tiny; group.layout = PAGED_LAYOUT_PACKED;
            config.block_size = 16; group.type = PAGED_TYPE_BF16; config.groups = &group);
    CHECK_EQ(paged_cache_create(NULL, &cache, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_cache_create(&good, NULL, &err), PAGED_ERR_INVALID_ARG);
    paged_cache_free(NULL);
}

static void defaults_and_numbers(void) {
    const paged_cache_config config = {
        .struct_size = sizeof config, .groups = &tiny, .n_groups = 1, .pool_bytes = 10 * 128 + 5};
    paged_cache *cache = NULL;
    CHECK_EQ(paged_cache_create(&config, &cache, NULL), PAGED_OK);
    paged_cache_stats s = stats_of(cache);
    CHECK_EQ(s.block_size, 16);
    CHECK_EQ(s.max_seqs, 64);
    CHECK_EQ(s.n_blocks, 10);
    CHECK_EQ(s.n_free, 10);
    CHECK_EQ(s.block_bytes, 128);
    CHECK_EQ(s.waste_bytes, 5);
    CHECK_EQ(s.backed_bytes, 0);
    CHECK_EQ(s.table_bytes, 64 * 16 * 4); /* rows of whole cache lines */
    CHECK(s.metadata_bytes > 0);
    paged_seq seq = open_seq(cache, 17);
    s = stats_of(cache);
    CHECK_EQ(s.n_used, 2);
    CHECK_EQ(s.used_bytes, 256);
    CHECK_EQ(s.backed_bytes, config.pool_bytes);
    CHECK_EQ(s.n_tokens, 17);
    CHECK_EQ(s.n_slots_used, 17);
    CHECK_EQ(paged_seq_reserve(cache, seq, 160 - 17), PAGED_OK); /* the longest that the pool holds */
    CHECK_EQ(paged_seq_reserve(cache, seq, 160 - 16), PAGED_ERR_TOO_LONG);
    check_cache(cache);
    paged_cache_free(cache);
}

static void kv_strides(void) {
    const paged_group_config groups[2] = {
        {.n_layers = 3, .n_kv_heads = 2, .head_dim_k = 8, .head_dim_v = 6, .type = PAGED_TYPE_BF16},
        {.n_layers = 1,
         .n_kv_heads = 5,
         .head_dim_k = 4,
         .type = PAGED_TYPE_F32,
         .layout = PAGED_LAYOUT_PACKED}};
    paged_cache *cache = open_cache(groups, 2, 16, paged_pool_bytes_for(groups, 2, 16, 100));
    paged_kv first = {0}, kv = {0};
    CHECK_EQ(paged_cache_kv(cache, 0, 0, &first), PAGED_OK);
    CHECK_EQ(paged_cache_kv(cache, 0, 2, &kv), PAGED_OK);
    CHECK_EQ(kv.k - first.k, 2 * 16 * 2 * (8 + 6) * 2);
    CHECK_EQ(kv.v - kv.k, 16 * 2 * 8 * 2);
    CHECK_EQ(kv.k_head_stride, 16 * 8 * 2);
    CHECK_EQ(kv.v_head_stride, 16 * 6 * 2);
    CHECK_EQ(kv.block_stride, 3 * 16 * 2 * (8 + 6) * 2);
    CHECK(kv.block_size == 16 && kv.n_kv_heads == 2 && kv.head_dim_k == 8 && kv.head_dim_v == 6);
    CHECK(kv.type == PAGED_TYPE_BF16 && kv.layout == PAGED_LAYOUT_PLAIN);
    CHECK_EQ(paged_cache_kv(cache, 1, 0, &kv), PAGED_OK);
    CHECK(kv.k == first.k && kv.head_dim_v == 4 && kv.layout == PAGED_LAYOUT_PACKED);
    first = kv;
    CHECK_EQ(paged_cache_kv(cache, 2, 0, &kv), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_cache_kv(cache, -1, 0, &kv), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_cache_kv(cache, 1, 1, &kv), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_cache_kv(cache, 0, -1, &kv), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_cache_tables(cache, 2, &(paged_tables){0}), PAGED_ERR_INVALID_ARG);
    CHECK(memcmp(&first, &kv, sizeof kv) == 0);
    paged_cache_free(cache);
}

static paged_status back_nothing(void *ctx, size_t offset, size_t size_bytes) {
    (void)ctx;
    (void)offset;
    (void)size_bytes;
    return PAGED_OK;
}
static paged_status copy_nothing(void *ctx, size_t dst, size_t src, size_t size_bytes) {
    (void)dst;
    return back_nothing(ctx, src, size_bytes);
}

/* Bytes that are elsewhere have addresses that nobody here may follow: byte 0 of the arena is
 * PAGED_ARENA_AWAY. */
static void kv_of_an_arena_without_a_base(void) {
    const paged_arena arena = {.size_bytes = 64 << 10, .back = back_nothing, .copy = copy_nothing};
    const paged_group_config group = {.n_layers = 2, .n_kv_heads = 2, .head_dim_k = 8};
    const paged_cache_config config = {.struct_size = sizeof config,
                                       .groups = &group,
                                       .n_groups = 1,
                                       .pool_bytes = 64 << 10,
                                       .arena = &arena};
    paged_cache *cache = NULL;
    paged_kv kv;
    paged_seq seq;
    CHECK_EQ(paged_cache_create(&config, &cache, NULL), PAGED_OK);
    CHECK_EQ(paged_cache_kv(cache, 0, 0, &kv), PAGED_OK);
    CHECK_EQ((uintptr_t)kv.k, PAGED_ARENA_AWAY);
    CHECK_EQ(paged_cache_kv(cache, 0, 1, &kv), PAGED_OK);
    CHECK_EQ((uintptr_t)kv.k, PAGED_ARENA_AWAY + 2 * 16 * 2 * (8 + 8));
    CHECK_EQ((uintptr_t)kv.v - (uintptr_t)kv.k, 2 * 16 * 2 * 8);
    CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(cache, seq, 20), PAGED_OK);
    CHECK_EQ(paged_cache_check(cache, NULL), PAGED_OK);
    paged_cache_free(cache);
}

/* Bytes of i8, counted by hand: 16 tokens of 2 heads, K of 8 and V of 12 bytes, and 4 + 4 bytes of scales. */
static void kv_strides_of_i8(void) {
    paged_group_config group = {.n_layers = 3,
                                .n_kv_heads = 2,
                                .head_dim_k = 8,
                                .head_dim_v = 12,
                                .type = PAGED_TYPE_I8,
                                .layout = PAGED_LAYOUT_PACKED};
    CHECK_EQ(paged_block_bytes(&group, 16), 3 * 16 * 2 * (8 + 12 + 4 + 4));
    paged_cache *cache = open_cache(&group, 1, 16, paged_pool_bytes_for(&group, 1, 16, 100));
    paged_kv first, kv;
    CHECK_EQ(paged_cache_kv(cache, 0, 0, &first), PAGED_OK);
    CHECK_EQ(paged_cache_kv(cache, 0, 2, &kv), PAGED_OK);
    CHECK_EQ(kv.k - first.k, 2 * 896);
    CHECK_EQ(kv.v - kv.k, 16 * 2 * 8);
    CHECK_EQ(kv.k_scale - kv.k, 16 * 2 * (8 + 12));
    CHECK_EQ(kv.v_scale - kv.k_scale, 16 * 2 * 4);
    CHECK_EQ(kv.k_head_stride, 16 * 8);
    CHECK_EQ(kv.v_head_stride, 16 * 12);
    CHECK_EQ(kv.scale_head_stride, 16 * 4);
    CHECK_EQ(kv.scale_block_stride, 3 * 896);
    CHECK_EQ(kv.block_stride, 3 * 896);

    /* A shared, partly filled block is copied with its scales. */
    paged_seq seq = open_seq(cache, 5), fork = 0;
    int32_t old = entry(cache, seq, 0, 0);
    memset(first.k + old * first.block_stride, 0x5a, 3 * 896);
    CHECK_EQ(paged_seq_fork(cache, seq, &fork), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(cache, fork, 1), PAGED_OK);
    int32_t copy = entry(cache, fork, 0, 0);
    CHECK(copy != old);
    CHECK(memcmp(first.k + copy * first.block_stride, first.k + old * first.block_stride, 3 * 896) == 0);
    check_cache(cache);
    paged_cache_free(cache);

    paged_error err;
    const paged_cache_config config = {
        .struct_size = sizeof config, .groups = &group, .n_groups = 1, .pool_bytes = MIB};
    group.head_dim_v = 10;
    CHECK_EQ(paged_cache_create(&config, &cache, &err), PAGED_ERR_INVALID_ARG);
    CHECK(strstr(err.message, "head_dim_v 10"));
    group.head_dim_v = 0;
    group.layout = PAGED_LAYOUT_PLAIN;
    CHECK_EQ(paged_cache_create(&config, &cache, &err), PAGED_ERR_INVALID_ARG);
    CHECK(strstr(err.message, "packed"));
}

/* ---- sequences ---- */

static void reserve_commit_slots(void) {
    paged_cache *cache = open_tiny(4);
    const int32_t tokens[9] = {9, 8, 7, 6, 5, 4, 3, 2, 1};
    int64_t slots[9] = {0};
    paged_seq seq = 0;
    CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
    CHECK(seq != 0);
    CHECK_EQ(paged_seq_len(cache, seq), 0);
    CHECK(paged_seq_tokens(cache, seq));
    CHECK_EQ(paged_seq_blocks_needed(cache, seq, 0, 9), 3);
    CHECK_EQ(paged_seq_reserve(cache, seq, 9), PAGED_OK);
    CHECK_EQ(paged_seq_reserved(cache, seq), 9);
    CHECK_EQ(stats_of(cache).n_used, 3);
    CHECK_EQ(paged_seq_slots(cache, seq, 0, 0, 9, slots), PAGED_OK);
    for (int32_t i = 0; i < 9; i++) CHECK_EQ(slots[i], entry(cache, seq, 0, i / 4) * 4 + i % 4);
    CHECK_EQ(entry(cache, seq, 0, 3), -1);
    CHECK_EQ(paged_seq_slots(cache, seq, 0, 0, 10, slots), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_seq_slots(cache, seq, 0, -1, 1, slots), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_seq_slots(cache, seq, 0, INT32_MAX, INT32_MAX, slots), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_seq_slots(cache, seq, 1, 0, 1, slots), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_seq_slots(cache, seq, 0, 0, 1, NULL), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_seq_slots(cache, seq, 0, 9, 0, NULL), PAGED_OK);
    CHECK_EQ(paged_seq_commit(cache, seq, tokens, 10), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_seq_commit(cache, seq, NULL, 1), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_seq_commit(cache, seq, tokens, -1), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_seq_commit(cache, seq, tokens, 5), PAGED_OK);
    CHECK_EQ(paged_seq_commit(cache, seq, NULL, 0), PAGED_OK);
    CHECK_EQ(paged_seq_len(cache, seq), 5);
    CHECK_EQ(paged_seq_reserved(cache, seq), 4);
    CHECK(memcmp(paged_seq_tokens(cache, seq), tokens, 5 * sizeof *tokens) == 0);
    CHECK_EQ(paged_seq_reserve(cache, seq, 2), PAGED_OK); /* a smaller one gives a block back */
    CHECK_EQ(stats_of(cache).n_used, 2);
    CHECK_EQ(paged_seq_reserve(cache, seq, 0), PAGED_OK);
    CHECK_EQ(paged_seq_reserved(cache, seq), 0);
    CHECK_EQ(stats_of(cache).n_used, 2);
    CHECK_EQ(paged_seq_reserve(cache, seq, -1), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_seq_reserve(cache, seq, 12), PAGED_ERR_TOO_LONG);
    CHECK_EQ(paged_seq_reserve(cache, seq, INT32_MAX), PAGED_ERR_TOO_LONG);
    check_cache(cache);
    paged_cache_free(cache);
}

static void no_blocks_changes_nothing(void) {
    paged_cache *cache = open_tiny(3);
    paged_seq a = open_seq(cache, 5), b = 0;
    CHECK_EQ(paged_seq_create(cache, &b), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(cache, b, 5), PAGED_ERR_NO_BLOCKS);
    CHECK_EQ(stats_of(cache).n_refused, 1);
    CHECK_EQ(stats_of(cache).n_used, 2);
    CHECK_EQ(paged_seq_reserved(cache, b), 0);
    check_cache(cache);
    CHECK_EQ(paged_seq_reserve(cache, b, 4), PAGED_OK);
    CHECK_EQ(paged_seq_free(cache, a), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(cache, b, 12), PAGED_OK);
    check_cache(cache);
    paged_cache_free(cache);
}

static void free_list_is_lifo(void) {
    paged_cache *cache = open_tiny(8);
    paged_seq a = open_seq(cache, 4), b = open_seq(cache, 4), c = open_seq(cache, 4);
    int32_t of_b = entry(cache, b, 0, 0);
    CHECK_EQ(entry(cache, a, 0, 0), 0);
    CHECK_EQ(entry(cache, c, 0, 0), 2);
    CHECK_EQ(paged_seq_free(cache, b), PAGED_OK);
    CHECK_EQ(entry(cache, open_seq(cache, 4), 0, 0), of_b);
    CHECK_EQ(paged_block_refs(cache, 0, of_b), 1);
    CHECK_EQ(paged_block_refs(cache, 0, 7), 0);
    CHECK_EQ(paged_block_refs(cache, 0, 8), -1);
    CHECK_EQ(paged_block_refs(cache, 0, -1), -1);
    CHECK_EQ(paged_block_refs(cache, 1, 0), -1);
    paged_cache_free(cache);
}

/* Fills the K and V of a token with a value. */
static float *slot_of(const paged_cache *cache, paged_seq seq, int32_t pos) {
    paged_kv kv = {0};
    int64_t slot = 0;
    CHECK_EQ(paged_cache_kv(cache, 0, 0, &kv), PAGED_OK);
    CHECK_EQ(paged_seq_slots(cache, seq, 0, pos, 1, &slot), PAGED_OK);
    return (float *)(void *)(kv.k + slot / 4 * kv.block_stride + slot % 4 * 4);
}

static void fork_shares_and_copies_on_write(void) {
    paged_cache *cache = open_tiny(5);
    paged_seq parent = open_seq(cache, 6), child = 0;
    const int32_t token = 77;
    *slot_of(cache, parent, 5) = 5.0f;
    CHECK_EQ(paged_seq_fork(cache, parent, &child), PAGED_OK);
    CHECK_EQ(paged_seq_len(cache, child), 6);
    CHECK(child != parent && paged_seq_row(cache, child) != paged_seq_row(cache, parent));
    CHECK_EQ(stats_of(cache).n_used, 2);
    CHECK_EQ(stats_of(cache).n_tokens, 12);
    CHECK_EQ(stats_of(cache).n_slots_used, 6);
    CHECK_EQ(paged_block_refs(cache, 0, entry(cache, child, 0, 1)), 2);
    CHECK_EQ(paged_seq_blocks_needed(cache, child, 0, 1), 1);
    CHECK_EQ(paged_seq_reserve(cache, child, 1), PAGED_OK);
    CHECK_EQ(stats_of(cache).n_copies, 1);
    CHECK(entry(cache, child, 0, 0) == entry(cache, parent, 0, 0));
    CHECK(entry(cache, child, 0, 1) != entry(cache, parent, 0, 1));
    CHECK(*slot_of(cache, child, 5) == 5.0f);
    CHECK_EQ(paged_seq_commit(cache, child, &token, 1), PAGED_OK);
    CHECK_EQ(paged_seq_blocks_needed(cache, parent, 0, 2), 0); /* sole owner again */
    CHECK_EQ(stats_of(cache).n_slots_used, 4 + 2 + 3);
    check_cache(cache);
    CHECK_EQ(paged_seq_free(cache, parent), PAGED_OK);
    CHECK_EQ(paged_seq_tokens(cache, child)[6], 77);
    check_cache(cache);
    paged_cache_free(cache);
}

/* The reservation of a parent stays good after a fork, and neither sees the other's tokens. */
static void fork_of_a_reserving_parent(void) {
    paged_cache *cache = open_tiny(4);
    paged_seq parent = open_seq(cache, 5), child = 0;
    const int32_t token = 8;
    CHECK_EQ(paged_seq_reserve(cache, parent, 2), PAGED_OK);
    CHECK_EQ(paged_seq_fork(cache, parent, &child), PAGED_OK);
    CHECK_EQ(paged_seq_reserved(cache, child), 0);
    check_cache(cache);
    CHECK_EQ(paged_seq_commit(cache, parent, &token, 1), PAGED_OK);
    check_cache(cache);
    CHECK_EQ(stats_of(cache).n_slots_used, 6);
    CHECK_EQ(paged_seq_reserve(cache, child, 1), PAGED_OK);
    CHECK_EQ(stats_of(cache).n_copies, 1);
    check_cache(cache);
    paged_cache_free(cache);
}

static void truncate_gives_blocks_back(void) {
    paged_cache *cache = open_tiny(5);
    paged_seq seq = open_seq(cache, 10);
    CHECK_EQ(paged_seq_reserve(cache, seq, 8), PAGED_OK);
    CHECK_EQ(stats_of(cache).n_used, 5);
    CHECK_EQ(paged_seq_truncate(cache, seq, 11), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_seq_truncate(cache, seq, -1), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_seq_reserved(cache, seq), 8);
    CHECK_EQ(paged_seq_truncate(cache, seq, 10), PAGED_OK); /* drops the reservation */
    CHECK_EQ(paged_seq_reserved(cache, seq), 0);
    CHECK_EQ(stats_of(cache).n_used, 3);
    CHECK_EQ(paged_seq_truncate(cache, seq, 4), PAGED_OK);
    CHECK_EQ(stats_of(cache).n_used, 1);
    CHECK_EQ(entry(cache, seq, 0, 1), -1);
    CHECK_EQ(paged_seq_truncate(cache, seq, 0), PAGED_OK);
    CHECK_EQ(stats_of(cache).n_used, 0);
    check_cache(cache);
    paged_cache_free(cache);
}

static void handles_are_refused(void) {
    paged_cache *cache = open_tiny(4), *other = open_tiny(4);
    paged_seq seqs[4], foreign = open_seq(other, 1), out = 99;
    for (int32_t i = 0; i < 4; i++) CHECK_EQ(paged_seq_create(cache, &seqs[i]), PAGED_OK);
    CHECK_EQ(paged_seq_create(cache, &out), PAGED_ERR_NO_SEQS);
    CHECK_EQ(paged_seq_fork(cache, seqs[0], &out), PAGED_ERR_NO_SEQS);
    CHECK_EQ(paged_seq_fork(cache, seqs[0], NULL), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(out, 99);
    CHECK_EQ(paged_seq_free(cache, foreign), PAGED_ERR_STALE);
    CHECK_EQ(paged_seq_free(cache, 0), PAGED_ERR_STALE);
    CHECK_EQ(paged_seq_free(cache, UINT64_MAX), PAGED_ERR_STALE);
    CHECK_EQ(paged_seq_free(cache, seqs[1]), PAGED_OK);
    CHECK_EQ(paged_seq_free(cache, seqs[1]), PAGED_ERR_STALE);
    CHECK_EQ(paged_seq_create(cache, &out), PAGED_OK); /* the same row, another handle */
    CHECK(out != seqs[1]);
    CHECK_EQ(paged_seq_row(cache, out), 1);
    CHECK_EQ(paged_seq_len(cache, seqs[1]), -1);
    CHECK(!paged_seq_tokens(cache, seqs[1]));
    CHECK_EQ(paged_seq_create(NULL, &out), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_seq_create(cache, NULL), PAGED_ERR_INVALID_ARG);
    check_cache(cache);
    paged_cache_free(cache);
    paged_cache_free(other);
}

/* ---- poison, memory ---- */

static void poison_fills_free_blocks(void) {
    paged_cache *cache = open_tiny(3);
    paged_seq seq = open_seq(cache, 2);
    const float *cell = slot_of(cache, seq, 0), *rest = slot_of(cache, seq, 1);
    CHECK(cell[0] != cell[0]);
    *slot_of(cache, seq, 0) = 1.0f;
    CHECK_EQ(paged_seq_free(cache, seq), PAGED_OK);
    CHECK(cell[0] != cell[0]);
    seq = open_seq(cache, 1);
    CHECK(rest[0] != rest[0]);
    paged_cache_free(cache);
}

static void memory_is_backed_lazily(void) {
    paged_group_config group = {.n_layers = 8, .n_kv_heads = 8, .head_dim_k = 128, .type = PAGED_TYPE_F16};
    size_t block_bytes = paged_block_bytes(&group, 16); /* 512 KiB */
    paged_cache *cache = open_cache(&group, 1, 16, 20 * block_bytes);
    paged_seq seq = open_seq(cache, 16);
    CHECK_EQ(stats_of(cache).n_blocks, 20);
    CHECK_EQ(stats_of(cache).backed_bytes, 2 * MIB);
    CHECK_EQ(paged_seq_reserve(cache, seq, 4 * 16), PAGED_OK);
    CHECK_EQ(stats_of(cache).backed_bytes, 4 * MIB);
    CHECK_EQ(paged_seq_reserve(cache, seq, 19 * 16), PAGED_OK);
    CHECK_EQ(stats_of(cache).backed_bytes, 10 * MIB);
    CHECK_EQ(stats_of(cache).n_free, 0);
    check_cache(cache);
    paged_cache_free(cache);
}

/* A block that is larger than an extent's granule and divides nothing. */
static void large_odd_blocks(void) {
    paged_group_config group = {.n_layers = 61, .n_kv_heads = 7, .head_dim_k = 131, .type = PAGED_TYPE_F32};
    size_t block_bytes = paged_block_bytes(&group, 13);
    paged_cache *cache = open_cache(&group, 1, 13, 11 * block_bytes + 77);
    paged_seq seq = 0;
    CHECK(block_bytes > 2 * MIB);
    CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(cache, seq, 11 * 13), PAGED_OK);
    for (int32_t i = 0; i < 11; i++) CHECK_EQ(entry(cache, seq, 0, i), i);
    CHECK_EQ(stats_of(cache).waste_bytes, 77);
    check_cache(cache);
    paged_cache_free(cache);
}

/* ---- groups ---- */

/* A group may take what another has given back, down to the last extent. */
static void extents_change_owner(void) {
    const paged_group_config groups[2] = {tiny, tiny};
    paged_cache *cache = open_cache(groups, 2, 4, 8 * 32);
    paged_seq seq = open_seq(cache, 16); /* 4 blocks in each group: all of the pool */
    int32_t need[2] = {1, 0};
    CHECK_EQ(stats_of(cache).n_free, 0);
    CHECK(!paged__pool_can_take(cache, need));
    CHECK_EQ(paged_seq_truncate(cache, seq, 4), PAGED_OK);
    need[0] = 6;
    CHECK(paged__pool_can_take(cache, need));
    need[1] = 1;
    CHECK(!paged__pool_can_take(cache, need));
    int32_t taken[6];
    for (int32_t i = 0; i < 6; i++) CHECK_EQ(paged__block_take(cache, 1, &taken[i]), PAGED_OK);
    CHECK_EQ(stats_of(cache).n_free, 0);
    for (int32_t i = 0; i < 6; i++) CHECK(paged__block_unref(cache, 1, taken[i]));
    CHECK_EQ(paged_seq_reserve(cache, seq, 12), PAGED_OK);
    check_cache(cache);
    paged_cache_free(cache);
}

static void blocks_of_groups_never_overlap(void) {
    const paged_group_config groups[3] = {
        {.n_layers = 3, .n_kv_heads = 2, .head_dim_k = 5, .type = PAGED_TYPE_F32},
        {.n_layers = 1, .n_kv_heads = 1, .head_dim_k = 7, .type = PAGED_TYPE_F16},
        {.n_layers = 2, .n_kv_heads = 2, .head_dim_k = 3, .head_dim_v = 4, .type = PAGED_TYPE_BF16}};
    size_t pool_bytes = paged_pool_bytes_for(groups, 3, 4, 400);
    paged_cache *cache = open_cache(groups, 3, 4, pool_bytes);
    uint8_t *owner = calloc(pool_bytes, 1);
    for (int32_t s = 0; s < 4; s++) {
        paged_seq seq = 0;
        CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
        CHECK_EQ(paged_seq_reserve(cache, seq, 100), PAGED_OK);
        for (int32_t g = 0; g < 3; g++) {
            size_t block_bytes = paged_block_bytes(&groups[g], 4);
            for (int32_t i = 0; i < 25; i++) {
                size_t begin = (size_t)entry(cache, seq, g, i) * block_bytes;
                CHECK(begin + block_bytes <= pool_bytes);
                for (size_t j = begin; j < begin + block_bytes; j++) CHECK_EQ(owner[j]++, 0);
            }
        }
    }
    free(owner);
    paged_cache_stats s = stats_of(cache);
    CHECK_EQ(s.n_blocks, s.n_free + s.n_used);
    CHECK_EQ(s.n_used, 300);
    check_cache(cache);
    paged_cache_free(cache);
}

static void shuffle_scatters(void) {
    paged_cache *cache = open_tiny(64);
    paged_seq seq = open_seq(cache, 16);
    int32_t n_ascending = 0;
    paged__cache_shuffle(cache, test_seed);
    check_cache(cache);
    CHECK_EQ(paged_seq_reserve(cache, seq, 60 * 4), PAGED_OK);
    for (int32_t i = 5; i < 64; i++)
        n_ascending += entry(cache, seq, 0, i) == entry(cache, seq, 0, i - 1) + 1;
    CHECK(n_ascending < 10);
    check_cache(cache);
    CHECK_EQ(paged_seq_free(cache, seq), PAGED_OK);
    seq = open_seq(cache, 20); /* extents that are claimed anew are shuffled too */
    CHECK(entry(cache, seq, 0, 0) != 0 || entry(cache, seq, 0, 1) != 1 || entry(cache, seq, 0, 2) != 2);
    check_cache(cache);
    paged_cache_free(cache);
}

/* ---- check ---- */

static void expect_corrupt(paged_cache *cache, const char *word) {
    paged_error err = {0};
    CHECK_EQ(paged_cache_check(cache, &err), PAGED_ERR_CORRUPT);
    if (!strstr(err.message, word)) test_fail(__FILE__, __LINE__, "\"%s\" lacks \"%s\"", err.message, word);
}

/* Breaks one number at a time and puts it back. */
static void check_finds_each_violation(void) {
    const paged_group_config groups[2] = {tiny, tiny};
    paged_cache *c = open_cache(groups, 2, 4, 16 * 32);
    paged_seq parent = open_seq(c, 6), child = 0;
    CHECK_EQ(paged_seq_fork(c, parent, &child), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(c, parent, 7), PAGED_OK);
    CHECK_EQ(paged_seq_free(c, open_seq(c, 4)), PAGED_OK);
    check_cache(c);
#define BROKEN(lvalue, value, word)                                                                          \
    do {                                                                                                     \
        __typeof__(lvalue) old_ = (lvalue);                                                                  \
        (lvalue) = (value);                                                                                  \
        expect_corrupt(c, word);                                                                             \
        (lvalue) = old_;                                                                                     \
        check_cache(c);                                                                                      \
    } while (0)
    int32_t *table = c->groups[1].tables, *child_table = table + c->table_stride, shared = child_table[0];
    BROKEN(c->groups[1].blocks[shared].refs, 3, "3 references; 2 table entries");
    BROKEN(c->groups[1].blocks[shared].state, 0, "free or does not exist");
    BROKEN(table[1], table[0], "twice");
    BROKEN(child_table[1], 1 << 20, "free or does not exist");
    BROKEN(child_table[1], -1, "free or does not exist");
    BROKEN(child_table[0], table[1], "is entry");
    BROKEN(child_table[2], 3, "not -1");
    BROKEN(c->seqs[1].tokens[2], 99, "token 2 differs");
    BROKEN(c->seqs[1].n_entries, 1, "1 entries");
    BROKEN(c->seqs[1].len, 5, "counted");
    BROKEN(c->seqs[1].reserved, -1, "-1 reserved");
    BROKEN(c->seqs[1].reserved, 1000, "1000 reserved");
    BROKEN(c->seqs[1].tag, 0, "tag 0");
    BROKEN(c->seqs[3].len, 1, "is free but has 1 tokens");
    BROKEN(c->free_seq, 1, "list of free rows");
    BROKEN(c->seqs[2].next_free, 2, "list of free rows");
    BROKEN(c->n_seqs, 3, "3 counted");
    BROKEN(c->n_tokens, 1, "1 counted");
    BROKEN(c->seqs[1].tokens, c->seqs[0].tokens, "tokens of another");
    BROKEN(c->groups[0].n_used, 9, "group 0");
    BROKEN(c->groups[0].n_free, 9, "group 0");
    BROKEN(c->used_bytes, 1, "bytes used");
    BROKEN(c->taken_bytes, 1, "cached");
    BROKEN(c->backed_bytes, 1, "backed");
    BROKEN(c->idle_bytes, 1, "idle");
    BROKEN(c->granules[0].backed, 0, "not backed");
    BROKEN(c->granules[0].n_taken, 3, "touched by");
    BROKEN(c->idle_first, 0, "list of idle granules");
    BROKEN(c->idle_last, 0, "ends in 0");
    BROKEN(c->n_frees, 0, "given back");
    BROKEN(c->free_extents[0], c->free_extents[1], "twice");
    BROKEN(c->n_free_extents, c->n_free_extents - 1, "on the stack");
    int32_t extent = paged__extent_of(c, 1, shared);
    BROKEN(c->extents[extent].n_taken, 0, "counted");
    BROKEN(c->extents[extent].first, 0, "instead of");
    BROKEN(c->extents[extent].owner, 0, "extent");
    BROKEN(c->extents[extent].owner, 7, "belongs to group 7");
    paged_cache_free(c);
    CHECK_EQ(paged_cache_check(NULL, NULL), PAGED_ERR_INVALID_ARG);
    c = open_tiny(4);
    CHECK_EQ(paged_seq_create(c, &child), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(c, child, 8), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(c, child, 4), PAGED_OK);
    BROKEN(c->extents[0].free_head, 0, "free list");
    BROKEN(c->extents[0].free_head, -1, "on the list");
    BROKEN(c->groups[0].blocks[1].next_free, 1, "free list");
    BROKEN(c->extents[0].n_fresh, 3, "never taken");
    BROKEN(c->groups[0].partial[1], -1, "marked wrongly");
    BROKEN(c->groups[0].fullness, 0, "marked wrongly");
    BROKEN(c->extents[0].prev, 0, "of fullness 1 leads to extent 0");
    BROKEN(c->groups[0].blocks[0].refs, 2, "only reserved");
    paged_cache_free(c);
}

/* clang-format off */
#define TESTS(X) \
    X(arena_backs_and_gives_back) X(arena_errors) X(bytes_of_blocks_and_pools) X(pool_bytes_are_enough) \
    X(extents_of_usual_models_waste_little) X(create_names_what_is_wrong) X(defaults_and_numbers) \
    X(kv_strides) X(kv_of_an_arena_without_a_base) X(kv_strides_of_i8) \
    X(reserve_commit_slots) X(no_blocks_changes_nothing) X(free_list_is_lifo) \
    X(fork_shares_and_copies_on_write) X(fork_of_a_reserving_parent) X(truncate_gives_blocks_back) \
    X(handles_are_refused) X(poison_fills_free_blocks) X(memory_is_backed_lazily) X(large_odd_blocks) \
    X(extents_change_owner) X(blocks_of_groups_never_overlap) X(shuffle_scatters) \
    X(check_finds_each_violation)
/* clang-format on */
TEST_MAIN(TESTS)
