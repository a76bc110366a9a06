/* Goal: the memory of a pool follows its blocks, up and down, and its limit can change while it is in use.
 * Method: an arena that keeps books of its own and forgets what it gives back; and the resident memory of
 * this process, as the system counts it. */
#include <unistd.h>

#include "book_arena.h"

#define MIB ((size_t)1 << 20)

/* 8 bytes a token and layer. */
static const paged_group_config tiny = {
    .n_layers = 1, .n_kv_heads = 1, .head_dim_k = 1, .type = PAGED_TYPE_F32};

static struct book *open_book(paged_cache_config *config) {
    static struct book book;
    static paged_arena arena;
    book_open(&book, config->pool_bytes, 64, &arena);
    config->arena = &arena;
    return &book;
}

/* Blocks of 4 tokens, 32 bytes: two in a granule and an extent. */
static paged_cache *open_tiny(int32_t n_blocks, size_t max_bytes, uint64_t trim_after, struct book **book) {
    paged_cache_config config = {.struct_size = sizeof config,
                                 .groups = &tiny,
                                 .n_groups = 1,
                                 .block_size = 4,
                                 .pool_bytes = (size_t)n_blocks * 32,
                                 .max_seqs = 64,
                                 .max_bytes = max_bytes,
                                 .trim_after = trim_after};
    paged_error err = {0};
    paged_cache *cache = NULL;
    *book = open_book(&config);
    if (paged_cache_create(&config, &cache, &err) != PAGED_OK)
        test_fail(__FILE__, __LINE__, "%s", err.message);
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

static int32_t entry(const paged_cache *cache, paged_seq seq, int32_t idx) {
    paged_tables tables = {0};
    CHECK_EQ(paged_cache_tables(cache, 0, &tables), PAGED_OK);
    return tables.blocks[paged_seq_row(cache, seq) * tables.seq_stride + idx];
}

/* A new sequence of n tokens, which begin with `first`; in the namespace without fields if it is shared. */
static paged_seq open_seq(paged_cache *cache, int32_t first, int32_t n_tokens, bool shared) {
    int32_t tokens[64];
    paged_seq seq = 0;
    for (int32_t i = 0; i < n_tokens; i++) tokens[i] = first + i;
    CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
    if (shared) CHECK_EQ(paged_seq_match(cache, seq, &(paged_namespace){0}, NULL, 0, NULL), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(cache, seq, n_tokens), PAGED_OK);
    CHECK_EQ(paged_seq_commit(cache, seq, tokens, n_tokens), PAGED_OK);
    return seq;
}

/* ---- memory ---- */

static void idle_memory_is_kept_then_trimmed(void) {
    struct book *book;
    paged_cache *cache = open_tiny(16, 0, 0, &book);
    paged_seq seq = open_seq(cache, 0, 32, false); /* 8 blocks, 4 granules */
    CHECK_EQ(stats_of(cache).backed_bytes, 256);
    CHECK_EQ(paged_seq_truncate(cache, seq, 12), PAGED_OK);
    CHECK_EQ(stats_of(cache).backed_bytes, 256);
    CHECK_EQ(stats_of(cache).idle_bytes, 128); /* three blocks are in two granules */
    check_cache(cache);
    CHECK_EQ(paged_seq_reserve(cache, seq, 8), PAGED_OK); /* takes the idle ones again */
    CHECK_EQ(book->n_backs, 4);
    CHECK_EQ(paged_seq_reserve(cache, seq, 0), PAGED_OK);
    CHECK_EQ(paged_cache_trim(cache, 64), PAGED_OK);
    CHECK_EQ(stats_of(cache).idle_bytes, 64);
    CHECK_EQ(stats_of(cache).backed_bytes, 192);
    CHECK_EQ(paged_cache_trim(cache, 0), PAGED_OK);
    CHECK_EQ(paged_cache_trim(cache, 0), PAGED_OK);
    CHECK_EQ(stats_of(cache).backed_bytes, 128);
    CHECK_EQ(book->n_unbacks, 2);
    CHECK_EQ(stats_of(cache).n_unbacked, 2);
    CHECK_EQ(stats_of(cache).n_backed, 4);
    CHECK_EQ(paged_seq_reserve(cache, seq, 20), PAGED_OK);
    CHECK_EQ(stats_of(cache).backed_bytes, 256);
    check_cache(cache);
    CHECK_EQ(paged_cache_trim(NULL, 0), PAGED_ERR_INVALID_ARG);
    paged_cache_free(cache);
}

static void time_trims_what_was_idle_for_long(void) {
    struct book *book;
    paged_cache *cache = open_tiny(64, 0, 10, &book);
    paged_seq a = open_seq(cache, 0, 16, false), b = open_seq(cache, 0, 16, false);
    paged_cache_set_clock(cache, 100);
    CHECK_EQ(paged_seq_free(cache, a), PAGED_OK);
    paged_cache_set_clock(cache, 105);
    CHECK_EQ(paged_seq_free(cache, b), PAGED_OK);
    paged_cache_set_clock(cache, 109);
    CHECK_EQ(stats_of(cache).idle_bytes, 256);
    paged_cache_set_clock(cache, 110);
    CHECK_EQ(stats_of(cache).idle_bytes, 128);
    paged_cache_set_clock(cache, 114);
    CHECK_EQ(stats_of(cache).backed_bytes, 128);
    book->refuses = true; /* nothing happens but that it stays */
    paged_cache_set_clock(cache, 115);
    CHECK_EQ(stats_of(cache).backed_bytes, 128);
    CHECK_EQ(paged_cache_trim(cache, 0), PAGED_ERR_IO);
    check_cache(cache);
    book->refuses = false;
    paged_cache_set_clock(cache, 0); /* time does not go back */
    CHECK_EQ(stats_of(cache).backed_bytes, 0);
    check_cache(cache);
    paged_cache_free(cache);
}

/* A load that goes up and down costs no call of the arena, if its rhythm is shorter than trim_after. */
static void steady_load_does_not_thrash(void) {
    struct book *book;
    paged_cache *cache = open_tiny(64, 0, 50, &book);
    for (uint64_t now = 1; now < 1000; now++) {
        paged_seq seqs[3];
        paged_cache_set_clock(cache, now);
        for (int32_t i = 0; i < 3; i++) seqs[i] = open_seq(cache, i, 4 + (int32_t)(now * 7 % 40), false);
        for (int32_t i = 0; i < 3; i++) CHECK_EQ(paged_seq_free(cache, seqs[i]), PAGED_OK);
    }
    check_cache(cache);
    CHECK(book->n_backs <= 32 && book->n_unbacks == 0);
    paged_cache_free(cache);
}

static void blocks_come_from_the_fullest_extent(void) {
    const paged_group_config group = {
        .n_layers = 1, .n_kv_heads = 1, .head_dim_k = 1, .type = PAGED_TYPE_F16};
    paged_cache_config config = {
        .struct_size = sizeof config, .groups = &group, .n_groups = 1, .block_size = 2, .pool_bytes = 32 * 8};
    paged_cache *cache = NULL;
    paged_seq seqs[32];
    open_book(&config);
    CHECK_EQ(paged_cache_create(&config, &cache, NULL), PAGED_OK); /* 8 blocks in an extent */
    for (int32_t i = 0; i < 32; i++) seqs[i] = open_seq(cache, i, 2, false);
    /* Extent 0 keeps 1 block, extent 1 keeps 6, extent 2 keeps 3, extent 3 is full. */
    for (int32_t i = 0; i < 24; i++) {
        bool stays = i == 3 || (i >= 8 && i < 14) || i >= 21;
        if (!stays) CHECK_EQ(paged_seq_free(cache, seqs[i]), PAGED_OK);
    }
    check_cache(cache);
    const int32_t want[] = {1, 1, 2, 2, 2, 2, 2, 0, 0};
    for (int32_t i = 0; i < 9; i++) CHECK_EQ(entry(cache, open_seq(cache, 0, 2, false), 0) / 8, want[i]);
    check_cache(cache);
    paged_cache_free(cache);
}

/* ---- the limit ---- */

static void limit_refuses_and_grows(void) {
    struct book *book;
    paged_cache *cache = open_tiny(16, 4 * 32, 0, &book);
    paged_seq seq = open_seq(cache, 0, 16, false), other = 0;
    CHECK_EQ(stats_of(cache).n_blocks, 16);
    CHECK_EQ(stats_of(cache).n_free, 12);
    CHECK_EQ(stats_of(cache).n_available, 0);
    CHECK_EQ(stats_of(cache).max_bytes, 128);
    CHECK_EQ(paged_seq_reserve(cache, seq, 1), PAGED_ERR_NO_BLOCKS);
    CHECK_EQ(paged_cache_set_max_bytes(cache, 5 * 32 + 31), PAGED_OK);
    CHECK_EQ(stats_of(cache).n_available, 1);
    CHECK_EQ(paged_seq_reserve(cache, seq, 5), PAGED_ERR_NO_BLOCKS);
    CHECK_EQ(paged_seq_reserve(cache, seq, 4), PAGED_OK);
    CHECK_EQ(paged_cache_set_max_bytes(cache, 16 * 32 + 1), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_cache_set_max_bytes(NULL, 0), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_cache_set_max_bytes(cache, 0), PAGED_OK);
    CHECK_EQ(stats_of(cache).n_available, 11);
    CHECK_EQ(paged_seq_create(cache, &other), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(cache, other, 44), PAGED_OK);
    check_cache(cache);
    paged_cache_free(cache);
}

/* Below the use it is a target. */
static void limit_below_the_use_is_approached(void) {
    struct book *book;
    paged_cache *cache = open_tiny(16, 0, 0, &book);
    paged_seq a = open_seq(cache, 0, 16, false), b = open_seq(cache, 0, 14, false);
    CHECK_EQ(paged_cache_set_max_bytes(cache, 3 * 32), PAGED_OK);
    CHECK_EQ(stats_of(cache).n_used, 8);
    CHECK_EQ(stats_of(cache).n_available, 0);
    check_cache(cache);
    CHECK_EQ(paged_seq_reserve(cache, b, 2), PAGED_OK); /* needs no block */
    CHECK_EQ(paged_seq_reserve(cache, b, 3), PAGED_ERR_NO_BLOCKS);
    CHECK_EQ(paged_seq_reserve(cache, b, 0), PAGED_OK);
    CHECK_EQ(paged_seq_truncate(cache, a, 8), PAGED_OK);
    CHECK_EQ(stats_of(cache).backed_bytes, 6 * 32); /* no memory stays idle beyond the limit */
    CHECK_EQ(paged_seq_free(cache, a), PAGED_OK);
    CHECK_EQ(stats_of(cache).backed_bytes, 4 * 32);
    CHECK_EQ(paged_seq_truncate(cache, b, 7), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(cache, b, 6), PAGED_ERR_NO_BLOCKS);
    CHECK_EQ(paged_seq_reserve(cache, b, 5), PAGED_OK);
    CHECK_EQ(stats_of(cache).n_used, 3);
    check_cache(cache);
    paged_cache_free(cache);
}

static void limit_evicts_what_is_cached(void) {
    struct book *book;
    paged_cache *cache = open_tiny(16, 0, 0, &book);
    paged_seq a = open_seq(cache, 0, 16, true), b = open_seq(cache, 100, 16, true);
    CHECK_EQ(paged_seq_free(cache, a), PAGED_OK);
    CHECK_EQ(stats_of(cache).n_cached, 4);
    CHECK_EQ(paged_cache_set_max_bytes(cache, 6 * 32), PAGED_OK);
    CHECK_EQ(stats_of(cache).n_cached, 2); /* the end of a went */
    CHECK_EQ(stats_of(cache).n_available, 2);
    check_cache(cache);
    CHECK_EQ(paged_cache_set_max_bytes(cache, 2 * 32), PAGED_OK);
    CHECK_EQ(stats_of(cache).n_cached, 0);
    CHECK_EQ(stats_of(cache).n_used, 4);
    CHECK_EQ(paged_seq_free(cache, b), PAGED_OK); /* half of it may stay */
    CHECK_EQ(stats_of(cache).n_cached, 2);
    CHECK_EQ(stats_of(cache).cached_bytes, 64);
    CHECK(stats_of(cache).backed_bytes <= 64);
    check_cache(cache);
    paged_cache_free(cache);
}

/* What an arena refuses to take back stays, and everything else goes on. */
static void arena_that_refuses_harms_nobody(void) {
    struct book *book;
    paged_cache *cache = open_tiny(16, 0, 1, &book);
    paged_seq seq = open_seq(cache, 0, 32, false);
    book->refuses = true;
    CHECK_EQ(paged_cache_set_max_bytes(cache, 4 * 32), PAGED_OK);
    CHECK_EQ(paged_seq_truncate(cache, seq, 16), PAGED_OK);
    paged_cache_set_clock(cache, 100);
    CHECK_EQ(stats_of(cache).backed_bytes, 256);
    CHECK_EQ(paged_cache_trim(cache, 0), PAGED_ERR_IO);
    check_cache(cache);
    CHECK_EQ(paged_seq_truncate(cache, seq, 8), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(cache, seq, 8), PAGED_OK);
    CHECK_EQ(stats_of(cache).idle_bytes, 128);
    check_cache(cache);
    book->refuses = false;
    CHECK_EQ(paged_seq_truncate(cache, seq, 8), PAGED_OK); /* then the limit is kept again */
    CHECK_EQ(stats_of(cache).backed_bytes, 128);
    check_cache(cache);
    paged_cache_free(cache);
}

/* ---- compaction ---- */

/* One of eight sequences of one block stays in each of eight granules. */
static void compaction_gathers_blocks_in_use(void) {
    struct book *book;
    paged_cache *cache = open_tiny(16, 0, 0, &book);
    paged_seq seqs[16];
    size_t moved_bytes = 99;
    for (int32_t i = 0; i < 16; i++) {
        seqs[i] = open_seq(cache, i, 3, false);
        memset(book->bytes + entry(cache, seqs[i], 0) * 32, i, 32);
    }
    for (int32_t i = 0; i < 16; i += 2) CHECK_EQ(paged_seq_free(cache, seqs[i]), PAGED_OK);
    CHECK_EQ(paged_cache_trim(cache, 0), PAGED_OK);
    CHECK_EQ(stats_of(cache).backed_bytes, 512);
    CHECK_EQ(paged_cache_compact(cache, SIZE_MAX, false, &moved_bytes), PAGED_OK);
    CHECK_EQ(moved_bytes, 0);
    CHECK_EQ(paged_cache_compact(cache, 31, true, &moved_bytes), PAGED_OK);
    CHECK_EQ(moved_bytes, 0);
    CHECK_EQ(paged_cache_compact(cache, 95, true, &moved_bytes), PAGED_OK);
    CHECK_EQ(moved_bytes, 64);
    check_cache(cache);
    CHECK_EQ(paged_cache_compact(cache, SIZE_MAX, true, &moved_bytes), PAGED_OK);
    CHECK_EQ(moved_bytes, 64);
    check_cache(cache);
    CHECK_EQ(stats_of(cache).n_moves, 4);
    CHECK_EQ(paged_cache_trim(cache, 0), PAGED_OK);
    CHECK_EQ(stats_of(cache).backed_bytes, 256);
    for (int32_t i = 1; i < 16; i += 2) {
        CHECK_EQ(book->bytes[entry(cache, seqs[i], 0) * 32 + 31], i);
        CHECK_EQ(paged_seq_tokens(cache, seqs[i])[2], i + 2);
    }
    CHECK_EQ(paged_cache_compact(cache, SIZE_MAX, true, &moved_bytes), PAGED_OK);
    CHECK_EQ(moved_bytes, 0); /* there is an end */
    CHECK_EQ(book->n_copies, 4);
    CHECK_EQ(paged_cache_compact(NULL, 1, true, NULL), PAGED_ERR_INVALID_ARG);
    paged_cache_free(cache);
}

/* ---- contiguous mode ---- */

static void contiguous_sequences_take_the_maximum(void) {
    paged_cache_config config = {.struct_size = sizeof config,
                                 .groups = &tiny,
                                 .n_groups = 1,
                                 .block_size = 4,
                                 .pool_bytes = 11 * 32,
                                 .max_seqs = 4,
                                 .contiguous = true};
    const int32_t tokens[10] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
    const paged_namespace names = {0};
    static struct book odd;
    paged_arena arena;
    paged_match got;
    paged_error err = {0};
    paged_cache *cache = NULL;
    paged_seq a, b, c;
    CHECK_EQ(paged_cache_create(&config, &cache, &err), PAGED_ERR_INVALID_ARG);
    CHECK(strstr(err.message, "max_seq_tokens"));
    config.max_seq_tokens = 45;
    CHECK_EQ(paged_cache_create(&config, &cache, &err), PAGED_ERR_NO_BLOCKS);
    CHECK(strstr(err.message, "45"));
    book_open(&odd, config.pool_bytes, 64, &arena);
    arena.granule_bytes = 48;
    config.arena = &arena;
    CHECK_EQ(paged_cache_create(&config, &cache, &err), PAGED_ERR_INVALID_ARG);
    CHECK(strstr(err.message, "48"));
    config.max_seq_tokens = 14; /* 4 blocks: two sequences and 3 blocks that nobody can use */
    struct book *book = open_book(&config);
    CHECK_EQ(paged_cache_create(&config, &cache, &err), PAGED_OK);
    CHECK_EQ(stats_of(cache).n_blocks, 8);
    CHECK_EQ(stats_of(cache).waste_bytes, 96);
    CHECK_EQ(paged_seq_create(cache, &a), PAGED_OK);
    CHECK_EQ(stats_of(cache).n_used, 0);
    CHECK_EQ(paged_seq_match(cache, a, &names, tokens, 10, &got), PAGED_OK);
    CHECK_EQ(paged_seq_blocks_needed(cache, a, 0, 1), 4);
    CHECK_EQ(paged_seq_reserve(cache, a, 10), PAGED_OK);
    CHECK_EQ(paged_seq_commit(cache, a, tokens, 10), PAGED_OK);
    check_cache(cache);
    CHECK_EQ(stats_of(cache).used_bytes, 128);
    CHECK_EQ(stats_of(cache).n_slots_used, 10);
    for (int32_t i = 0; i < 4; i++) CHECK_EQ(entry(cache, a, i), i);
    memset(book->bytes, 7, 80);
    CHECK_EQ(paged_seq_truncate(cache, a, 9), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(cache, a, 5), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(cache, a, 6), PAGED_ERR_TOO_LONG);
    CHECK_EQ(paged_seq_reserve(cache, a, 0), PAGED_OK);
    CHECK_EQ(stats_of(cache).n_used, 4); /* kept to the end */
    CHECK_EQ(paged_seq_fork(cache, a, &b), PAGED_OK);
    CHECK_EQ(paged_seq_len(cache, b), 9);
    CHECK_EQ(entry(cache, b, 0), 4);
    CHECK(memcmp(book->bytes + 128, book->bytes, 72) == 0);
    CHECK_EQ(stats_of(cache).n_copies, 3);
    check_cache(cache);
    CHECK_EQ(paged_seq_fork(cache, a, &c), PAGED_ERR_NO_BLOCKS);
    CHECK_EQ(stats_of(cache).n_seqs, 2);
    CHECK_EQ(paged_seq_create(cache, &c), PAGED_OK);
    CHECK_EQ(paged_seq_match(cache, c, &names, tokens, 10, &got), PAGED_OK);
    CHECK(got.n_matched == 0 && got.why == PAGED_MISS_NO_MATCH);
    CHECK_EQ(paged_seq_reserve(cache, c, 1),
             PAGED_ERR_NO_BLOCKS); /* 3 blocks are free, but no sequence fits */
    CHECK_EQ(paged_seq_truncate(cache, a, 0), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(cache, c, 1), PAGED_ERR_NO_BLOCKS);
    CHECK_EQ(paged_seq_free(cache, a), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(cache, c, 1), PAGED_OK);
    CHECK_EQ(entry(cache, c, 3), 3);
    CHECK_EQ(paged_cache_compact(cache, SIZE_MAX, true, NULL), PAGED_OK);
    check_cache(cache);
    paged_cache_free(cache);
}

/* Sequences of random lengths in groups of different blocks, one with a window: always consecutive. */
static void contiguous_with_several_groups(void) {
    const paged_group_config groups[2] = {
        {.n_layers = 3, .n_kv_heads = 1, .head_dim_k = 1, .type = PAGED_TYPE_F32},
        {.n_layers = 1, .n_kv_heads = 1, .head_dim_k = 5, .type = PAGED_TYPE_F16, .window = 3}};
    paged_cache_config config = {.struct_size = sizeof config,
                                 .groups = groups,
                                 .n_groups = 2,
                                 .block_size = 4,
                                 .pool_bytes = 4096,
                                 .max_seqs = 8,
                                 .max_seq_tokens = 15,
                                 .contiguous = true};
    static const int32_t tokens[15];
    uint64_t rand = test_seed, n_full = 0;
    paged_cache *cache = NULL;
    paged_seq seqs[8] = {0};
    open_book(&config);
    CHECK_EQ(paged_cache_create(&config, &cache, NULL), PAGED_OK);
    for (int32_t round = 0; round < 1000; round++) {
        paged_seq *seq = &seqs[paged__rand(&rand) % 8];
        if (!*seq && paged__rand(&rand) % 2) {
            CHECK_EQ(paged_seq_create(cache, seq), PAGED_OK);
        } else if (*seq && paged__rand(&rand) % 8 == 0) {
            CHECK_EQ(paged_seq_free(cache, *seq), PAGED_OK);
            *seq = 0;
        } else if (*seq) {
            int32_t n = (int32_t)(paged__rand(&rand) % 4), len = paged_seq_len(cache, *seq);
            if (len + n > 15) {
                CHECK_EQ(paged_seq_truncate(cache, *seq, len / 2), PAGED_OK);
                continue;
            }
            paged_status status = paged_seq_reserve(cache, *seq, n);
            CHECK(status == PAGED_OK || (status == PAGED_ERR_NO_BLOCKS && len == 0));
            n_full += status != PAGED_OK;
            if (status == PAGED_OK) CHECK_EQ(paged_seq_commit(cache, *seq, tokens, n), PAGED_OK);
            CHECK_EQ(paged_seq_first_k(cache, *seq, 1), 0);
        }
        check_cache(cache); /* says that blocks are consecutive */
    }
    CHECK(n_full > 10);
    paged_cache_free(cache);
}

/* ---- what the system says ---- */

static size_t resident_bytes(void) {
    unsigned long total, resident;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file);
    CHECK_EQ(fscanf(file, "%lu %lu", &total, &resident), 2);
    fclose(file);
    return resident * (size_t)sysconf(_SC_PAGESIZE);
}

/* A burst of a small model's sequences that decode in turns; then all but one in ten end, by chance. What
 * compaction and a clock return is seen in the resident memory of this process. */
static void memory_of_a_burst_goes_back(void) {
    enum { N_SEQS = 200, N_TOKENS = 64 };
    const paged_group_config smol = {.n_layers = 30, .n_kv_heads = 3, .head_dim_k = 64};
    const paged_cache_config config = {.struct_size = sizeof config,
                                       .groups = &smol,
                                       .n_groups = 1,
                                       .block_size = 16,
                                       .pool_bytes = paged_pool_bytes_for(&smol, 1, 16, N_SEQS * N_TOKENS),
                                       .max_seqs = N_SEQS,
                                       .max_seq_tokens = N_TOKENS,
                                       .trim_after = 10};
    paged_cache *cache = NULL;
    paged_kv kv = {0};
    static paged_seq seqs[N_SEQS];
    const int32_t tokens[16] = {1, 2, 3};
    uint64_t rand = test_seed;
    CHECK_EQ(paged_cache_create(&config, &cache, NULL), PAGED_OK);
    CHECK_EQ(paged_cache_kv(cache, 0, 0, &kv), PAGED_OK);
    size_t before = resident_bytes(), moved_bytes = 1;
    for (int32_t i = 0; i < N_SEQS; i++) CHECK_EQ(paged_seq_create(cache, &seqs[i]), PAGED_OK);
    for (int32_t n = 0; n < N_TOKENS; n += 16) {
        for (int32_t i = 0; i < N_SEQS; i++) {
            CHECK_EQ(paged_seq_reserve(cache, seqs[i], 16), PAGED_OK);
            memset(kv.k + entry(cache, seqs[i], n / 16) * kv.block_stride, i, (size_t)kv.block_stride);
            CHECK_EQ(paged_seq_commit(cache, seqs[i], tokens, 16), PAGED_OK);
        }
    }
    size_t burst = resident_bytes();
    CHECK(burst - before >= config.pool_bytes);
    for (int32_t i = 0; i < N_SEQS; i++) {
        if (paged__rand(&rand) % 10 == 0) continue;
        CHECK_EQ(paged_seq_free(cache, seqs[i]), PAGED_OK);
        seqs[i] = 0;
    }
    for (uint64_t second = 1; second < 60; second++) { /* a step each */
        paged_cache_set_clock(cache, second);
        CHECK_EQ(paged_cache_compact(cache, 64 * MIB, true, &moved_bytes), PAGED_OK);
    }
    CHECK_EQ(moved_bytes, 0);
    size_t free_bytes = config.pool_bytes - stats_of(cache).used_bytes;
    double share = (double)(burst - resident_bytes()) / (double)free_bytes;
    printf("%.1f %% of %zu free MiB went back\n", share * 100, free_bytes / MIB);
    CHECK(share >= 0.95);
    check_cache(cache);
    for (int32_t i = 0; i < N_SEQS; i++) {
        for (int32_t b = 0; seqs[i] && b < N_TOKENS / 16; b++) {
            const uint8_t *bytes = kv.k + entry(cache, seqs[i], b) * kv.block_stride;
            for (int64_t j = 0; j < kv.block_stride; j += 997) CHECK_EQ(bytes[j], i);
        }
    }
    paged_cache_free(cache);
}

/* clang-format off */
#define TESTS(X) \
    X(idle_memory_is_kept_then_trimmed) X(time_trims_what_was_idle_for_long) X(steady_load_does_not_thrash) \
    X(blocks_come_from_the_fullest_extent) X(limit_refuses_and_grows) X(limit_below_the_use_is_approached) \
    X(limit_evicts_what_is_cached) X(arena_that_refuses_harms_nobody) X(compaction_gathers_blocks_in_use) \
    X(contiguous_sequences_take_the_maximum) X(contiguous_with_several_groups) X(memory_of_a_burst_goes_back)
/* clang-format on */
TEST_MAIN(TESTS)
