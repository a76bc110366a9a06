/* Goal: the mode without paging gives each sequence one run for its whole length, whatever comes and goes.
 * Method: random operations beside a model that knows tokens and counts runs; what was written is read back
 * through the slots, which must be consecutive; paged_cache_check after every operation. */
#include "base/base.h"
#include "paged/mem.h"
#include "test.h"

enum { N_SEQS = 6, MAX_TOKENS = 50, BLOCK = 16, RUNS_MAX = 5 };

typedef struct row {
    paged_seq seq; /* 0: none */
    int32_t tokens[MAX_TOKENS], len, reserved;
    bool has_run;
} row;

typedef struct world {
    paged_cache *cache;
    paged_kv kv[2];
    int32_t n_groups, n_runs; /* that the pool holds, at least */
    uint64_t random;
    row rows[N_SEQS];
    int n_refused, n_forks;
} world;

static int32_t below(world *w, int32_t n) {
    return (int32_t)(paged__rand(&w->random) % (uint64_t)n);
}

static int32_t runs_in_use(const world *w) {
    int32_t n = 0;
    for (int32_t i = 0; i < N_SEQS; i++) n += w->rows[i].has_run;
    return n;
}

static float *key_at(const paged_kv *kv, int64_t slot) {
    return (float *)(void *)(kv->k + slot / kv->block_size * kv->block_stride) + slot % kv->block_size;
}

/* Its tokens lie where they were written, one behind the other. */
static void check_row(const world *w, const row *r) {
    int64_t slots[MAX_TOKENS];
    CHECK_EQ(paged_seq_len(w->cache, r->seq), r->len);
    CHECK_EQ(paged_seq_reserved(w->cache, r->seq), r->reserved);
    for (int32_t g = 0; g < w->n_groups; g++) {
        CHECK_EQ(paged_seq_slots(w->cache, r->seq, g, 0, r->len + r->reserved, slots), PAGED_OK);
        CHECK_EQ(paged_seq_first_k(w->cache, r->seq, g), 0); /* a window gives nothing back */
        for (int32_t i = 1; i < r->len + r->reserved; i++) CHECK_EQ(slots[i], slots[0] + i);
        for (int32_t i = 0; i < r->len; i++) CHECK(*key_at(&w->kv[g], slots[i]) == (float)(r->tokens[i] + g));
    }
}

static void create(world *w, row *r) {
    paged_match match;
    CHECK_EQ(paged_seq_create(w->cache, &r->seq), PAGED_OK);
    for (int32_t i = 0; i < MAX_TOKENS; i++) r->tokens[i] = below(w, 3); /* much would be common */
    CHECK_EQ(paged_seq_match(w->cache, r->seq, &(paged_namespace){0}, r->tokens, MAX_TOKENS, &match),
             PAGED_OK);
    CHECK_EQ(match.n_matched, 0);
    r->len = r->reserved = 0;
    r->has_run = false;
}

static void reserve(world *w, row *r) {
    const int32_t n = below(w, 30);
    const paged_status s = paged_seq_reserve(w->cache, r->seq, n);
    if (r->len + n > MAX_TOKENS) {
        CHECK_EQ(s, PAGED_ERR_TOO_LONG);
    } else if (s == PAGED_ERR_NO_BLOCKS) {
        CHECK(!r->has_run && runs_in_use(w) >= w->n_runs);
        w->n_refused++;
    } else {
        CHECK_EQ(s, PAGED_OK);
        r->reserved = n;
        r->has_run |= n > 0;
    }
}

static void commit(world *w, row *r) {
    int64_t slots[MAX_TOKENS];
    const int32_t n = below(w, r->reserved + 1);
    for (int32_t g = 0; g < w->n_groups; g++) {
        CHECK_EQ(paged_seq_slots(w->cache, r->seq, g, r->len, n, slots), PAGED_OK);
        for (int32_t i = 0; i < n; i++) *key_at(&w->kv[g], slots[i]) = (float)(r->tokens[r->len + i] + g);
    }
    CHECK_EQ(paged_seq_commit(w->cache, r->seq, r->tokens + r->len, n), PAGED_OK);
    r->len += n;
    r->reserved -= n;
}

static void fork(world *w, const row *parent, row *child) {
    paged_seq seq;
    const paged_status s = paged_seq_fork(w->cache, parent->seq, &seq);
    if (s) {
        CHECK_EQ(s, PAGED_ERR_NO_BLOCKS);
        CHECK(parent->len > 0 && runs_in_use(w) >= w->n_runs);
        return;
    }
    *child = *parent;
    child->seq = seq;
    child->reserved = 0;
    child->has_run = parent->len > 0;
    for (int32_t i = child->len; i < MAX_TOKENS; i++) child->tokens[i] = below(w, 3);
    w->n_forks++;
}

static void operate(world *w) {
    row *r = &w->rows[below(w, N_SEQS)], *other = &w->rows[below(w, N_SEQS)];
    if (!r->seq) {
        create(w, r);
        return;
    }
    switch (below(w, 8)) {
    case 0:
        CHECK_EQ(paged_seq_free(w->cache, r->seq), PAGED_OK);
        memset(r, 0, sizeof *r);
        return;
    case 1:
        if (!other->seq) fork(w, r, other);
        break;
    case 2:
        r->len = below(w, r->len + 1);
        r->reserved = 0;
        CHECK_EQ(paged_seq_truncate(w->cache, r->seq, r->len), PAGED_OK);
        break;
    case 3:
    case 4:
        commit(w, r);
        break;
    default:
        reserve(w, r);
        break;
    }
    check_row(w, r);
}

static void run(uint64_t seed) {
    world w = {.random = seed};
    paged_error err = {0};
    paged_cache_stats stats;
    w.n_groups = 1 + below(&w, 2);
    w.n_runs = 1 + below(&w, RUNS_MAX);
    const paged_group_config groups[2] = {
        {.n_layers = 1, .n_kv_heads = 1, .head_dim_k = 1, .type = PAGED_TYPE_F32},
        {.n_layers = 2, .n_kv_heads = 1, .head_dim_k = 1, .type = PAGED_TYPE_F32, .window = 20}};
    /* In the group with the largest blocks a run of several groups may begin inside a block. */
    const int32_t n_blocks = (MAX_TOKENS + BLOCK - 1) / BLOCK + (w.n_groups > 1);
    const size_t run_bytes = paged_block_bytes(&groups[w.n_groups - 1], BLOCK) * (size_t)n_blocks;
    const paged_cache_config config = {.struct_size = sizeof config,
                                       .groups = groups,
                                       .n_groups = w.n_groups,
                                       .block_size = BLOCK,
                                       .pool_bytes = run_bytes * (size_t)(w.n_runs * w.n_groups),
                                       .max_seqs = N_SEQS,
                                       .max_seq_tokens = MAX_TOKENS,
                                       .poison = true,
                                       .contiguous = true};
    CHECK_EQ(paged_cache_create(&config, &w.cache, &err), PAGED_OK);
    for (int32_t g = 0; g < w.n_groups; g++) CHECK_EQ(paged_cache_kv(w.cache, g, 0, &w.kv[g]), PAGED_OK);
    for (int32_t i = 0; i < 300; i++) {
        operate(&w);
        if (paged_cache_check(w.cache, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
    }
    for (int32_t i = 0; i < N_SEQS; i++) {
        if (!w.rows[i].seq) continue;
        check_row(&w, &w.rows[i]);
        CHECK_EQ(paged_seq_free(w.cache, w.rows[i].seq), PAGED_OK);
    }
    paged_cache_get_stats(w.cache, &stats);
    CHECK_EQ(stats.n_used + stats.n_cached, 0);
    paged_cache_free(w.cache);
    CHECK(w.n_runs >= 4 || w.n_refused > 0);
}

static void many_seeds(void) {
    const uint64_t first = test_seed;
    for (uint64_t i = 0; i < (test_long ? 20000u : 400u); i++) {
        test_seed = first + i; /* a failure prints it */
        run(test_seed);
    }
    test_seed = first;
}

#define TESTS(X) X(many_seeds)
TEST_MAIN(TESTS)
