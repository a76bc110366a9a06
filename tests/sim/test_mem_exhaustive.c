/* Goal: small worlds have no corner that chance missed. Method: every sequence of up to 7 operations (8
 * with --long; one less where prefixes are reused or a window slides) on a pool of 3 blocks of 2 tokens, or
 * of 32 with packed tails, on a cache and on the naive model; the cache is used again from one sequence of
 * operations to the next, so that old state would show. */
#include "book_arena.h"
#include "sim/mem_model.h"

enum { N_DEEP = 8, N_OPERATIONS = 17 };

static bool reuses;  /* sequences are matched when they are made */
static bool elastic; /* the limit changes, blocks move, memory comes and goes */

/* Tokens: a piece of a block, more than one block, what truncate cuts, a prompt. Blocks of 2; of 32, where a
 * piece ends inside a tile. */
static const struct sizes {
    int32_t block, piece, more, cut, prompt;
} two = {2, 1, 3, 1, 5}, packed = {32, 11, 40, 9, 75}, *sizes;

/* Applies operation `op`; false if it makes no sense here, because its sequence does not live. */
static bool apply(struct model *m, int32_t op, uint64_t *rand) {
    struct model_seq *s = op < 8 ? &m->seqs[0] : &m->seqs[1];
    if (op == 0) {
        model_create(m);
        for (int32_t i = 0; reuses && i < MODEL_SEQS; i++) {
            struct model_seq *created = &m->seqs[i];
            if (!created->handle || created->len || created->reserved || created->space >= 0) continue;
            bool promised = model_promise_of(m, created)->n_tokens > 0; /* that it waits, then, ends */
            if (!promised) model_promise(m, created, 0, m->seqs[0].tokens, sizes->prompt);
            if (promised || !paged_seq_waits(m->cache, created->handle))
                model_match(m, created, 0, m->seqs[0].tokens, sizes->prompt);
        }
        return true;
    }
    if (op == 16 && elastic) {
        bool limits = m->n_pages_max == 3;
        m->n_pages_max = limits ? 1 : 3;
        CHECK_EQ(paged_cache_set_max_bytes(m->cache, limits ? m->cache->groups[0].block_bytes : 0), PAGED_OK);
        CHECK_EQ(paged_cache_compact(m->cache, SIZE_MAX, true, NULL), PAGED_OK);
        CHECK_EQ(paged_cache_trim(m->cache, 0), PAGED_OK);
        return true;
    }
    if (op == 16) { /* pinned until the next clear() */
        if (reuses) model_keep(m, 0, m->seqs[0].tokens, 2 * sizes->block, 1, m->now + 1);
        return reuses;
    }
    if (op == 8) s = &m->seqs[2];
    if (!s->handle) return false;
    switch (op) {
    case 1:
    case 9:
        model_reserve(m, s, sizes->piece);
        break;
    case 2:
    case 10:
        model_reserve(m, s, sizes->more);
        break;
    case 3:
    case 11:
        model_commit(m, s, s->reserved, rand);
        break;
    case 4:
    case 12:
        model_truncate(m, s, s->len > sizes->cut ? s->len - sizes->cut : 0);
        break;
    case 5:
    case 13:
        model_fork(m, s);
        break;
    case 6:
    case 8:
    case 14:
        model_free(m, s);
        break;
    case 7:
        model_reserve(m, s, 0);
        break;
    case 15:
        model_commit(m, s, s->reserved < sizes->piece ? s->reserved : sizes->piece, rand);
        break;
    }
    return true;
}

static void clear(struct model *m) {
    for (int32_t i = 0; i < MODEL_SEQS; i++) {
        if (m->seqs[i].handle) model_free(m, &m->seqs[i]);
    }
    if (!reuses) model_wrong_handle(m, m->stale);
    model_clock(m, m->now + 1);
    paged_cache_clear(m->cache);
    if (elastic) CHECK_EQ(paged_cache_set_max_bytes(m->cache, 0), PAGED_OK);
    m->n_pages_max = 3;
}

/* Depth first without recursion: `path` is the current sequence of operations; after a change at place
 * `depth` everything up to it is played again from an empty cache. The checks run after its last
 * operation; the shorter ones had their turn. */
static int64_t enumerate(struct model *m, int32_t n_deep) {
    int32_t path[N_DEEP] = {0}, depth = 0;
    int64_t n_paths = 0;
    while (depth >= 0) {
        uint64_t rand = 7;
        bool valid = true;
        clear(m);
        for (int32_t i = 0; i <= depth; i++) valid = apply(m, path[i], &rand);
        if (valid) {
            n_paths++;
            model_check_all(m);
        }
        if (valid && depth + 1 < n_deep) {
            path[++depth] = 0;
            continue;
        }
        while (depth >= 0 && ++path[depth] == N_OPERATIONS) depth--;
    }
    return n_paths;
}

static void every_short_sequence_of(const struct sizes *of, bool with_reuse, int32_t window) {
    reuses = with_reuse;
    sizes = of;
    static struct model m;
    paged_group_config group = {.n_layers = 1,
                                .n_kv_heads = 1,
                                .head_dim_k = 1,
                                .type = PAGED_TYPE_F32,
                                .layout = of->block > 2 ? PAGED_LAYOUT_PACKED : PAGED_LAYOUT_PLAIN,
                                .window = window};
    paged_cache_config config = {.struct_size = sizeof config,
                                 .groups = &group,
                                 .n_groups = 1,
                                 .block_size = of->block,
                                 .pool_bytes = (size_t)(3 * 8 * of->block),
                                 .max_seqs = MODEL_SEQS,
                                 .max_seq_tokens = 7 * of->block / 2,
                                 .packed_tails = of->block > 2,
                                 .poison = true};
    static struct book book;
    paged_arena arena;
    if (elastic) { /* two blocks in a granule */
        book_open(&book, config.pool_bytes, (size_t)(2 * 8 * of->block), &arena);
        config.arena = &arena;
    }
    memset(&m, 0, sizeof m);
    m.n_pages_max = 3;
    model_open(&m, &config);
    int64_t n_paths = enumerate(&m, (test_long ? 8 : 7) - (reuses || window > 0));
    printf("%lld sequences of operations\n", (long long)n_paths);
    CHECK(n_paths > 10000);
    model_close(&m);
}

static void every_short_sequence(void) {
    every_short_sequence_of(&two, false, 0);
}

static void every_short_sequence_with_reuse(void) {
    every_short_sequence_of(&two, true, 0);
}

static void every_short_sequence_in_a_window(void) {
    every_short_sequence_of(&two, false, 3);
    every_short_sequence_of(&two, true, 1);
    every_short_sequence_of(&two, true, 2);
}

static void every_short_sequence_in_an_elastic_pool(void) {
    elastic = true;
    every_short_sequence_of(&two, true, 0);
    every_short_sequence_of(&packed, true, 0);
    elastic = false;
}

static void every_short_sequence_with_tails(void) {
    every_short_sequence_of(&packed, false, 0);
    every_short_sequence_of(&packed, true, 0);
    every_short_sequence_of(&packed, true, 40);
}

#define TESTS(X)                                                                                             \
    X(every_short_sequence)                                                                                  \
    X(every_short_sequence_with_reuse)                                                                       \
    X(every_short_sequence_in_a_window)                                                                      \
    X(every_short_sequence_with_tails) X(every_short_sequence_in_an_elastic_pool)
TEST_MAIN(TESTS)
