/* Goal: what somebody holds stays where it is and what it is, whatever happens to the cache. Method: the
 * bytes and tokens of held entries are compared after each step of a random life of the cache around them;
 * the check of every invariant counts the holds. */
#include "mem/mem.h"
#include "test.h"

enum { BS = 16, N_BLOCKS = 24, N_HOLDS = 6 };

static const paged_namespace nobody = {NULL, 0};

static paged_cache *make(int32_t window) {
    static paged_group_config groups[2];
    for (int g = 0; g < 2; g++)
        groups[g] = (paged_group_config){.n_layers = 1,
                                         .n_kv_heads = 1,
                                         .head_dim_k = 4,
                                         .type = PAGED_TYPE_F32,
                                         .window = g ? window : 0};
    const int32_t n_groups = window ? 2 : 1;
    const paged_cache_config c = {.struct_size = sizeof c,
                                  .groups = groups,
                                  .n_groups = n_groups,
                                  .block_size = BS,
                                  .pool_bytes = paged_pool_bytes_for(groups, n_groups, BS, N_BLOCKS * BS),
                                  .max_seqs = 4,
                                  .max_seq_tokens = 8 * BS,
                                  .poison = true};
    paged_cache *cache = NULL;
    CHECK_EQ(paged_cache_create(&c, &cache, NULL), PAGED_OK);
    return cache;
}

static void check(const paged_cache *cache) {
    paged_error err = {0};
    if (paged_cache_check(cache, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
}

static uint8_t *bytes_of(const paged_cache *cache, int32_t group, int32_t block) {
    return cache->arena.base + (size_t)block * cache->groups[group].block_bytes;
}

/* A text of a family, whose blocks are filled with their first token. Returns its sequence, or 0. */
static paged_seq write_text(paged_cache *cache, uint64_t *random) {
    int32_t tokens[8 * BS], n = 1 + (int32_t)(paged__rand(random) % (8 * BS));
    uint64_t family = paged__rand(random) % 5;
    paged_seq seq;
    paged_match match;
    for (int32_t i = 0; i < n; i++) tokens[i] = (int32_t)(paged__rand(&family) % 100);
    if (paged_seq_create(cache, &seq)) return 0;
    CHECK_EQ(paged_seq_match(cache, seq, &nobody, tokens, n, &match), PAGED_OK);
    if (paged_seq_reserve(cache, seq, n - match.n_matched)) {
        CHECK_EQ(paged_seq_free(cache, seq), PAGED_OK);
        return 0;
    }
    for (int32_t i = match.n_matched; i < n; i++) {
        for (int32_t g = 0; g < cache->n_groups; g++) {
            int64_t slot;
            CHECK_EQ(paged_seq_slots(cache, seq, g, i, 1, &slot), PAGED_OK);
            memset(bytes_of(cache, g, (int32_t)(slot / BS)) + slot % BS * 16, tokens[i], 16);
        }
    }
    CHECK_EQ(paged_seq_commit(cache, seq, tokens + match.n_matched, n - match.n_matched), PAGED_OK);
    return seq;
}

static void same_bytes(const paged_cache *cache, const paged_hold *h, const int32_t *tokens) {
    CHECK(memcmp(h->tokens, tokens, (size_t)h->n_tokens * sizeof *tokens) == 0);
    for (int32_t g = 0; g < cache->n_groups; g++) {
        if (h->blocks[g] < 0) continue;
        const uint8_t *bytes = bytes_of(cache, g, h->blocks[g]);
        for (int32_t i = 0; i < h->n_tokens * 16; i++) CHECK_EQ(bytes[i], tokens[i / 16]);
        CHECK(paged_block_refs(cache, g, h->blocks[g]) >= 1);
    }
}

static void held_entries_stay(void) {
    uint64_t random = test_seed;
    int32_t n_held = 0, n_windowed = 0;
    for (int run = 0; run < (test_long ? 400 : 40); run++) {
        paged_cache *cache = make(run % 3 == 0 ? 1 + (int32_t)(paged__rand(&random) % 40) : 0);
        paged_seq seqs[3] = {0};
        paged_hold holds[N_HOLDS];
        int32_t tokens[N_HOLDS][BS];
        bool live[N_HOLDS] = {false};
        for (int step = 0; step < 200; step++) {
            const int k = (int)(paged__rand(&random) % N_HOLDS), s = (int)(paged__rand(&random) % 3);
            switch (paged__rand(&random) % 7) {
            case 0:
            case 1:
                if (seqs[s]) CHECK_EQ(paged_seq_free(cache, seqs[s]), PAGED_OK);
                seqs[s] = write_text(cache, &random);
                break;
            case 2:
                if (seqs[s]) CHECK_EQ(paged_seq_free(cache, seqs[s]), PAGED_OK);
                seqs[s] = 0;
                break;
            case 3:
            case 4:
                if (live[k]) {
                    paged_entry_release(cache, &holds[k]);
                    live[k] = false;
                } else {
                    const int32_t entry = (int32_t)(paged__rand(&random) % (uint64_t)cache->n_nodes_max);
                    const paged_status status = paged_entry_hold(cache, entry, &holds[k]);
                    live[k] = status == PAGED_OK;
                    CHECK(live[k] || status == PAGED_ERR_NOT_FOUND);
                    if (live[k]) memcpy(tokens[k], holds[k].tokens, sizeof tokens[k]);
                    n_held += live[k];
                    n_windowed += live[k] && cache->n_groups > 1;
                }
                break;
            case 5:
                CHECK_EQ(paged_cache_compact(cache, 1 << 20, true, NULL), PAGED_OK);
                break;
            default:
                paged_cache_clear(cache);
                CHECK_EQ(paged_cache_trim(cache, 0), PAGED_OK);
                break;
            }
            check(cache);
            for (int i = 0; i < N_HOLDS; i++)
                if (live[i]) same_bytes(cache, &holds[i], tokens[i]);
        }
        for (int i = 0; i < N_HOLDS; i++)
            if (live[i]) paged_entry_release(cache, &holds[i]);
        for (int i = 0; i < 3; i++)
            if (seqs[i]) CHECK_EQ(paged_seq_free(cache, seqs[i]), PAGED_OK);
        check(cache);
        paged_cache_clear(cache);
        paged_cache_stats stats;
        paged_cache_get_stats(cache, &stats);
        CHECK_EQ(stats.n_used + stats.n_cached, 0);
        paged_cache_free(cache);
    }
    CHECK(n_held > 100 && n_windowed > 20);
}

/* Blocks that a sequence has reserved are nobody's after it has gone, until the last of who holds them. */
static void held_blocks_outlive_their_sequence(void) {
    paged_cache *cache = make(0);
    paged_seq seq, other;
    int64_t slot;
    CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(cache, seq, 8 * BS), PAGED_OK);
    CHECK_EQ(paged_seq_slots(cache, seq, 0, 3 * BS, 1, &slot), PAGED_OK);
    const int32_t block = (int32_t)(slot / BS);
    CHECK_EQ(paged_block_hold(cache, 0, block), PAGED_OK);
    CHECK_EQ(paged_block_hold(cache, 0, block), PAGED_OK);
    check(cache);
    CHECK_EQ(paged_seq_free(cache, seq), PAGED_OK);
    check(cache);
    CHECK_EQ(cache->groups[0].n_used, 1);
    memset(bytes_of(cache, 0, block), 7, cache->groups[0].block_bytes);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(paged_seq_create(cache, &other), PAGED_OK);
        const paged_status status = paged_seq_reserve(cache, other, 8 * BS);
        CHECK_EQ(status, i < 2 ? PAGED_OK : PAGED_ERR_NO_BLOCKS); /* one of 24 is missing */
    }
    CHECK_EQ(paged_cache_compact(cache, 1 << 20, true, NULL), PAGED_OK);
    check(cache);
    for (size_t i = 0; i < cache->groups[0].block_bytes; i++) CHECK_EQ(bytes_of(cache, 0, block)[i], 7);
    paged_block_release(cache, 0, block);
    CHECK_EQ(paged_block_refs(cache, 0, block), 1);
    paged_block_release(cache, 0, block);
    CHECK_EQ(paged_block_refs(cache, 0, block), 0);
    check(cache);
    CHECK_EQ(paged_seq_reserve(cache, other, 8 * BS), PAGED_OK);
    CHECK_EQ(paged_block_hold(cache, 0, -1), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_block_hold(cache, 1, 0), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_block_hold(cache, 0, cache->groups[0].n_ids), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_entry_hold(cache, -1, &(paged_hold){0}), PAGED_ERR_NOT_FOUND);
    CHECK_EQ(paged_entry_hold(cache, cache->n_nodes_max, &(paged_hold){0}), PAGED_ERR_NOT_FOUND);
    CHECK_EQ(paged_entry_hold(cache, 0, &(paged_hold){0}), PAGED_ERR_NOT_FOUND);
    paged_cache_free(cache);
}

#define TESTS(X) X(held_entries_stay) X(held_blocks_outlive_their_sequence)
TEST_MAIN(TESTS)
