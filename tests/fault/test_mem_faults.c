/* Goal: whichever allocation, backing or copy fails, a call changes nothing, and it works once the fault
 * is gone. Method: let the n-th one fail for n = 1, 2, 3 … until none does; compare everything that can be
 * seen before and after. */
#include "mem/mem.h"
#include "test.h"

enum { N_SEQS = 4, MAX_ENTRIES = 16, MAX_TILES = 2, GROUPS = 2, POOL_BYTES = 32 << 20 };

/* Blocks of 4; or of 32 with packed tails, then all lengths are eight times as many; or windows. */
static const struct kind {
    int32_t unit;
    bool packed_tails;
    int32_t window; /* of group 1 */
} kinds[] = {{1, false, 0}, {8, true, 0}, {1, false, 3}, {8, true, 24}};
static const struct kind *kind = kinds;

/* ---- what fails ---- */

static struct {
    int64_t countdown; /* the countdown-th operation fails; 0: none */
    bool fired;
    int64_t n_live; /* allocations */
} fault;

static bool fails(void) {
    if (fault.countdown == 0 || --fault.countdown > 0) return false;
    fault.fired = true;
    return true;
}

static void *fault_alloc(void *user, size_t size_bytes, size_t align) {
    (void)user;
    if (fails()) return NULL;
    fault.n_live++;
    return aligned_alloc(align, (size_bytes + align - 1) / align * align);
}

static void fault_free(void *user, void *ptr) {
    (void)user;
    fault.n_live--;
    free(ptr);
}

static const paged_allocator allocator = {fault_alloc, fault_free, NULL};

/* A host arena whose operations count too. */
static paged_status fault_back(void *ctx, size_t offset, size_t size_bytes) {
    const paged_arena *host = ctx;
    return fails() ? PAGED_ERR_NO_MEMORY : host->back(host->ctx, offset, size_bytes);
}

static paged_status fault_unback(void *ctx, size_t offset, size_t size_bytes) {
    const paged_arena *host = ctx;
    return fails() ? PAGED_ERR_IO : host->unback(host->ctx, offset, size_bytes);
}

static paged_status fault_copy(void *ctx, size_t dst, size_t src, size_t size_bytes) {
    const paged_arena *host = ctx;
    return fails() ? PAGED_ERR_IO : host->copy(host->ctx, dst, src, size_bytes);
}

/* ---- a world with everything in it ---- */

struct world {
    paged_arena host, arena;
    paged_cache *cache;
    paged_seq seqs[N_SEQS];
};

/* Blocks of 1 MiB and of 768 KiB, so that most blocks that are taken back a granule. */
static paged_status create_cache(struct world *w, bool own_arena, paged_cache **out) {
    paged_group_config groups[GROUPS] = {{.n_layers = 4, .head_dim_k = 128, .type = PAGED_TYPE_F32},
                                         {.n_layers = 3, .head_dim_k = 128, .type = PAGED_TYPE_F32}};
    for (int32_t g = 0; g < GROUPS; g++) {
        groups[g].n_kv_heads = 64 / kind->unit;
        groups[g].layout = kind->packed_tails ? PAGED_LAYOUT_PACKED : PAGED_LAYOUT_PLAIN;
    }
    groups[1].window = kind->window;
    const paged_cache_config config = {.struct_size = sizeof config,
                                       .groups = groups,
                                       .n_groups = GROUPS,
                                       .block_size = 4 * kind->unit,
                                       .pool_bytes = POOL_BYTES,
                                       .max_seqs = N_SEQS,
                                       .max_seq_tokens = 50 * 4 * kind->unit,
                                       .packed_tails = kind->packed_tails,
                                       .arena = own_arena ? NULL : &w->arena};
    return paged_cache_create(&config, out, NULL);
}

/* Sequence 0 has 6 tokens, sequence 1 is its fork, sequence 2 is empty; row 3 is free. A prompt of 10
 * tokens is cached: two full blocks and a sealed tail. */
static int32_t prompt[11 * 8]; /* 1, 2, 3 … */

static void open_world(struct world *w) {
    const int32_t n = kind->unit;
    for (int32_t i = 0; i < 11 * 8; i++) prompt[i] = i + 1;
    memset(w, 0, sizeof *w);
    CHECK_EQ(paged_arena_create_host(POOL_BYTES, &w->host, NULL), PAGED_OK);
    w->arena = w->host;
    w->arena.ctx = &w->host;
    w->arena.back = fault_back;
    w->arena.unback = fault_unback;
    w->arena.copy = fault_copy;
    CHECK_EQ(create_cache(w, false, &w->cache), PAGED_OK);
    CHECK_EQ(paged_seq_create(w->cache, &w->seqs[3]), PAGED_OK);
    CHECK_EQ(paged_seq_match(w->cache, w->seqs[3], &(paged_namespace){0}, NULL, 0, NULL), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(w->cache, w->seqs[3], 10 * n), PAGED_OK);
    CHECK_EQ(paged_seq_commit(w->cache, w->seqs[3], prompt, 10 * n), PAGED_OK);
    CHECK_EQ(paged_seq_free(w->cache, w->seqs[3]), PAGED_OK);
    w->seqs[3] = 0;
    CHECK_EQ(paged_seq_create(w->cache, &w->seqs[0]), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(w->cache, w->seqs[0], 6 * n), PAGED_OK);
    CHECK_EQ(paged_seq_commit(w->cache, w->seqs[0], prompt, 6 * n), PAGED_OK);
    CHECK_EQ(paged_seq_fork(w->cache, w->seqs[0], &w->seqs[1]), PAGED_OK);
    CHECK_EQ(paged_seq_create(w->cache, &w->seqs[2]), PAGED_OK);
}

static void close_world(struct world *w) {
    paged_cache_free(w->cache);
    w->host.destroy(w->host.ctx);
}

/* Everything that a caller can see, but the memory backed so far: granules that were backed stay so. */
struct view {
    paged_cache_stats stats;
    int32_t lens[N_SEQS], reserved[N_SEQS], tokens[N_SEQS][6 * 8];
    int32_t tables[GROUPS][N_SEQS][MAX_ENTRIES];
    int32_t tiles[GROUPS][N_SEQS][MAX_TILES];
    int32_t refs[GROUPS][40];
};

static void look(const struct world *w, struct view *view) {
    memset(view, 0, sizeof *view);
    paged_cache_get_stats(w->cache, &view->stats);
    /* The gap behind it, which nobody sets. */
    const size_t gap = offsetof(paged_cache_stats, n_available) + sizeof view->stats.n_available;
    memset((uint8_t *)&view->stats + gap, 0, offsetof(paged_cache_stats, max_bytes) - gap);
    view->stats.backed_bytes = view->stats.idle_bytes = 0;
    view->stats.n_backed = view->stats.n_unbacked = 0;
    for (int32_t s = 0; s < N_SEQS; s++) {
        view->lens[s] = paged_seq_len(w->cache, w->seqs[s]);
        view->reserved[s] = paged_seq_reserved(w->cache, w->seqs[s]);
        if (view->lens[s] > 0)
            memcpy(view->tokens[s], paged_seq_tokens(w->cache, w->seqs[s]),
                   (size_t)view->lens[s] * sizeof(int32_t));
    }
    for (int32_t g = 0; g < GROUPS; g++) {
        paged_tables tables = {0};
        CHECK_EQ(paged_cache_tables(w->cache, g, &tables), PAGED_OK);
        for (int32_t s = 0; s < N_SEQS; s++)
            memcpy(view->tables[g][s], tables.blocks + s * tables.seq_stride, sizeof view->tables[g][s]);
        if (tables.tail_tiles) memcpy(view->tiles[g], tables.tail_tiles, sizeof view->tiles[g]);
        for (int32_t b = 0; b < 40; b++) view->refs[g][b] = paged_block_refs(w->cache, g, b);
    }
}

static void check_world(const struct world *w) {
    paged_error err = {0};
    if (paged_cache_check(w->cache, &err) != PAGED_OK) test_fail(__FILE__, __LINE__, "%s", err.message);
}

typedef paged_status (*operation)(struct world *w);

/* Each time in a world to which prepare was done (may be NULL). Returns how many places failed. */
static int32_t fail_each(operation run, operation prepare) {
    int32_t n_failed = 0;
    paged_allocator_set(&allocator);
    for (int64_t n = 1;; n++) {
        struct world w;
        struct view before, after;
        open_world(&w);
        if (prepare) CHECK_EQ(prepare(&w), PAGED_OK);
        look(&w, &before);
        fault.fired = false;
        fault.countdown = n;
        paged_status status = run(&w);
        fault.countdown = 0;
        check_world(&w);
        CHECK_EQ(status != PAGED_OK, fault.fired);
        if (fault.fired) {
            look(&w, &after);
            CHECK(memcmp(&before, &after, sizeof before) == 0);
            CHECK_EQ(run(&w), PAGED_OK);
            check_world(&w);
            n_failed++;
        }
        close_world(&w);
        CHECK_EQ(fault.n_live, 0);
        if (!fault.fired) break;
    }
    paged_allocator_set(NULL);
    return n_failed;
}

/* ---- operations ---- */

static paged_status create_seq(struct world *w) {
    return w->seqs[3] ? PAGED_OK : paged_seq_create(w->cache, &w->seqs[3]);
}

static paged_status fork_seq(struct world *w) {
    return paged_seq_fork(w->cache, w->seqs[0], &w->seqs[3]);
}

/* Takes blocks of both groups, copies the shared tail, grows the tokens. */
static paged_status reserve_shared(struct world *w) {
    return paged_seq_reserve(w->cache, w->seqs[1], 30 * kind->unit);
}

static paged_status reserve_empty(struct world *w) {
    return paged_seq_reserve(w->cache, w->seqs[2], 20 * kind->unit);
}

static paged_status commit_and_truncate(struct world *w) {
    paged_status status = paged_seq_commit(w->cache, w->seqs[0], NULL, 0);
    return status == PAGED_OK ? paged_seq_truncate(w->cache, w->seqs[0], 6 * kind->unit) : status;
}

/* Shares two blocks, copies the tail in both groups. */
static paged_status match_prompt(struct world *w) {
    paged_match got = {0};
    paged_status status =
        paged_seq_match(w->cache, w->seqs[2], &(paged_namespace){0}, prompt, 10 * kind->unit + 1, &got);
    if (status == PAGED_OK) CHECK_EQ(got.n_matched, 10 * kind->unit);
    return status;
}

/* The first namespace with a name: its bytes, and no array grows. */
static paged_status match_elsewhere(struct world *w) {
    const paged_ns_field field = {PAGED_NS_SALT, "x", 1};
    return paged_seq_match(w->cache, w->seqs[2], &(paged_namespace){&field, 1}, prompt, 11, NULL);
}

/* Two extents of each group are sparse, and granules are idle. */
static paged_status spread(struct world *w) {
    CHECK_EQ(paged_seq_create(w->cache, &w->seqs[3]), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(w->cache, w->seqs[2], 20), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(w->cache, w->seqs[3], 12), PAGED_OK);
    return paged_seq_reserve(w->cache, w->seqs[2], 0);
}

static paged_status compact(struct world *w) {
    size_t moved_bytes = 0;
    paged_status status = paged_cache_compact(w->cache, SIZE_MAX, true, &moved_bytes);
    CHECK_EQ(moved_bytes > 0, status == PAGED_OK);
    return status;
}

static paged_status trim(struct world *w) {
    return paged_cache_trim(w->cache, 0);
}

static void memory_survives_faults(void) {
    kind = &kinds[0];
    CHECK(fail_each(compact, spread) >= 2); /* a copy in each group */
    CHECK(fail_each(trim, spread) >= 2);
}

/* Sealing a tail takes a block and copies; if that fails it is not sealed, and nothing else is different. */
static paged_status free_unsealed(struct world *w) {
    static int32_t others[6 * 8];
    for (int32_t i = 0; i < 6 * 8; i++) others[i] = 1000 + i;
    paged_status status = paged_seq_match(w->cache, w->seqs[2], &(paged_namespace){0}, NULL, 0, NULL);
    if (status == PAGED_OK) status = paged_seq_reserve(w->cache, w->seqs[2], 6 * kind->unit);
    if (status != PAGED_OK) return status;
    CHECK_EQ(paged_seq_commit(w->cache, w->seqs[2], others, 6 * kind->unit), PAGED_OK);
    CHECK_EQ(paged_seq_free(w->cache, w->seqs[2]), PAGED_OK);
    return PAGED_OK;
}

static void sealing_survives_faults(void) {
    paged_cache_stats stats;
    bool fired = true;
    kind = &kinds[1];
    for (int64_t n = 1; fired; n++) {
        struct world w;
        paged_allocator_set(&allocator);
        open_world(&w);
        fault.fired = false;
        fault.countdown = n;
        paged_status status = free_unsealed(&w);
        fault.countdown = 0;
        fired = fault.fired;
        check_world(&w);
        if (status == PAGED_OK) {
            paged_cache_get_stats(w.cache, &stats);
            CHECK_EQ(stats.n_seqs, 2);
            CHECK_EQ(stats.n_cached, fired ? 8 : 10); /* the full block, and the sealed one or not */
        }
        close_world(&w);
        CHECK_EQ(fault.n_live, 0);
        paged_allocator_set(NULL);
    }
}

/* The namespace's bytes. */
static paged_status promise_prompt(struct world *w) {
    const paged_ns_field field = {PAGED_NS_SALT, "x", 1};
    bool waits;
    return paged_seq_promise(w->cache, w->seqs[2], &(paged_namespace){&field, 1}, prompt, 11, &waits);
}

static void sequences_of_kind_survive_faults(void) {
    CHECK_EQ(fail_each(create_seq, NULL), 0);
    CHECK_EQ(fail_each(commit_and_truncate, NULL), 0);
    CHECK_EQ(fail_each(fork_seq, NULL), 0);
    /* The namespace's bytes, a block to back and a copy in each group. */
    CHECK(fail_each(match_prompt, NULL) >= 1 + 2);
    CHECK_EQ(fail_each(match_elsewhere, NULL), 1);
    CHECK_EQ(fail_each(promise_prompt, NULL), 1);
    CHECK(fail_each(reserve_empty, NULL) >= 2);
    /* A copy in each group, and granules for 8 + 8 blocks. */
    CHECK(fail_each(reserve_shared, NULL) >= 2 + 4);
}

static void sequences_survive_faults(void) {
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        kind = &kinds[i];
        sequences_of_kind_survive_faults();
    }
}

static void create_survives_faults(void) {
    for (int i = 0; i < 8; i++) {
        bool own_arena = i % 2;
        kind = &kinds[i / 2];
        bool fired = true;
        int32_t n_failed = 0;
        for (int64_t n = 1; fired; n++) {
            struct world w;
            paged_cache *cache = NULL;
            paged_allocator_set(&allocator);
            open_world(&w);
            int64_t n_live = fault.n_live;
            fault.fired = false;
            fault.countdown = n;
            paged_status status = create_cache(&w, own_arena, &cache);
            fault.countdown = 0;
            fired = fault.fired;
            CHECK_EQ(status, fired ? PAGED_ERR_NO_MEMORY : PAGED_OK);
            CHECK((cache == NULL) == fired);
            if (fired) CHECK_EQ(fault.n_live, n_live);
            paged_cache_free(cache);
            n_failed += fired;
            close_world(&w);
            CHECK_EQ(fault.n_live, 0);
            paged_allocator_set(NULL);
        }
        /* The cache, its arena, extents, their stack, granules, rows, tokens, promises, three arrays a
         * group, eight of the index. */
        int32_t n_more = (kind->packed_tails ? 3 * GROUPS : 0) + (kind->window ? 3 : 0);
        CHECK_EQ(n_failed, 7 + own_arena + 3 * GROUPS + 8 + n_more);
    }
}

#define TESTS(X)                                                                                             \
    X(sequences_survive_faults) X(memory_survives_faults) X(sealing_survives_faults) X(create_survives_faults)
TEST_MAIN(TESTS)
