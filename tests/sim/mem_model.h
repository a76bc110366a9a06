/* mem_model.h: a naive model of a cache for the random and the exhaustive tester, and the operations
 * applied to both.
 *
 * A model sequence is its tokens and a list of pages; a page is a number that was never used before.
 * References are not counted but looked up: a page is shared if another sequence lists it. What a position
 * holds follows from the tokens up to it, so keys and values that were written through one sequence and
 * appear in another show every wrong sharing. */
#ifndef PAGED_TESTS_SIM_MEM_MODEL_H
#define PAGED_TESTS_SIM_MEM_MODEL_H

#include "mem/mem.h"
#include "test.h"

enum { MODEL_SEQS = 8, MODEL_TOKENS = 4096, MODEL_PAGES = 256 };

struct model_seq {
    paged_seq handle; /* 0: not live */
    int32_t len, reserved, n_pages;
    int32_t tokens[MODEL_TOKENS];
    int64_t pages[MODEL_PAGES];
};

struct model {
    paged_cache *cache;
    paged_kv kv[PAGED_GROUPS_MAX]; /* of layer 0 */
    int32_t n_groups, block_size, max_seq_tokens;
    int32_t n_pages_max; /* of the pool; 0: not known, the groups' blocks differ */
    int64_t next_page;
    uint64_t n_refused, n_copies;
    paged_seq stale; /* a handle that was freed */
    struct model_seq seqs[MODEL_SEQS];
};

static int32_t model_sharers(const struct model *m, int64_t page) {
    int32_t n = 0;
    for (int32_t s = 0; s < MODEL_SEQS; s++) {
        for (int32_t i = 0; i < m->seqs[s].n_pages; i++) n += m->seqs[s].pages[i] == page;
    }
    return n;
}

static int32_t model_used(const struct model *m) {
    int32_t n = 0;
    for (int32_t s = 0; s < MODEL_SEQS; s++) {
        for (int32_t i = 0; i < m->seqs[s].n_pages; i++) {
            int64_t page = m->seqs[s].pages[i];
            bool seen = false;
            for (int32_t t = 0; t < s && !seen; t++) {
                for (int32_t j = 0; j < m->seqs[t].n_pages && !seen; j++) seen = m->seqs[t].pages[j] == page;
            }
            n += !seen;
        }
    }
    return n;
}

/* ---- keys and values: one number for K, one for V, from the tokens up to the position ---- */

static uint32_t *model_cell(const struct model *m, int32_t g, int64_t slot, bool v) {
    const paged_kv *kv = &m->kv[g];
    int64_t block = slot / kv->block_size, offset = slot % kv->block_size;
    uint8_t *base = (v ? kv->v : kv->k) + block * kv->block_stride;
    return (uint32_t *)(void *)(base + offset * (v ? kv->head_dim_v : kv->head_dim_k) * 4);
}

static uint64_t model_step(uint64_t path, int32_t token) {
    return paged__mix(path ^ (uint64_t)(uint32_t)token);
}

/* Writes, or compares, the positions first … first + n - 1 of a sequence whose tokens are known. */
static void model_payload(const struct model *m, const struct model_seq *s, int32_t first, int32_t n,
                          bool write) {
    static int64_t slots[MODEL_TOKENS];
    uint64_t start = 0;
    for (int32_t p = 0; p < first; p++) start = model_step(start, s->tokens[p]);
    for (int32_t g = 0; g < m->n_groups; g++) {
        uint64_t path = start;
        CHECK_EQ(paged_seq_slots(m->cache, s->handle, g, first, n, slots), PAGED_OK);
        for (int32_t i = 0; i < n; i++) {
            path = model_step(path, s->tokens[first + i]);
            uint32_t k = (uint32_t)(path + (uint64_t)g), v = (uint32_t)(path >> 32);
            if (write) {
                *model_cell(m, g, slots[i], false) = k;
                *model_cell(m, g, slots[i], true) = v;
            }
            CHECK(*model_cell(m, g, slots[i], false) == k && *model_cell(m, g, slots[i], true) == v);
        }
    }
}

/* ---- what must hold between model and cache ---- */

static void model_check_seq(const struct model *m, const struct model_seq *s) {
    CHECK_EQ(paged_seq_len(m->cache, s->handle), s->len);
    CHECK_EQ(paged_seq_reserved(m->cache, s->handle), s->reserved);
    const int32_t *tokens = paged_seq_tokens(m->cache, s->handle);
    CHECK(tokens && memcmp(tokens, s->tokens, (size_t)s->len * sizeof *tokens) == 0);
    model_payload(m, s, 0, s->len, false);
}

/* After every operation. */
static void model_check(const struct model *m) {
    paged_error err = {0};
    paged_cache_stats stats;
    if (paged_cache_check(m->cache, &err) != PAGED_OK) test_fail(__FILE__, __LINE__, "%s", err.message);
    paged_cache_get_stats(m->cache, &stats);
    CHECK_EQ(stats.n_used, model_used(m) * m->n_groups);
    CHECK_EQ(stats.n_refused, m->n_refused);
    CHECK_EQ(stats.n_copies, m->n_copies);
    int32_t n_live = 0;
    for (int32_t i = 0; i < MODEL_SEQS; i++) n_live += m->seqs[i].handle != 0;
    CHECK_EQ(stats.n_seqs, n_live);
}

static void model_check_all(const struct model *m) {
    for (int32_t i = 0; i < MODEL_SEQS; i++) {
        if (m->seqs[i].handle) model_check_seq(m, &m->seqs[i]);
    }
    model_check(m);
}

/* ---- operations, applied to both ---- */

/* Opens a model sequence; the cache has as many rows as the model. */
static void model_create(struct model *m) {
    struct model_seq *s = NULL;
    paged_seq handle = 12345;
    for (int32_t i = 0; i < MODEL_SEQS && !s; i++) s = m->seqs[i].handle ? NULL : &m->seqs[i];
    paged_status status = paged_seq_create(m->cache, &handle);
    CHECK_EQ(status, s ? PAGED_OK : PAGED_ERR_NO_SEQS);
    if (!s) {
        CHECK_EQ(handle, 12345);
        return;
    }
    s->handle = handle;
    s->len = s->reserved = s->n_pages = 0;
}

static void model_fork(struct model *m, struct model_seq *parent) {
    struct model_seq *s = NULL;
    paged_seq handle = 12345;
    for (int32_t i = 0; i < MODEL_SEQS && !s; i++) s = m->seqs[i].handle ? NULL : &m->seqs[i];
    paged_status status = paged_seq_fork(m->cache, parent->handle, &handle);
    CHECK_EQ(status, s ? PAGED_OK : PAGED_ERR_NO_SEQS);
    if (!s) {
        CHECK_EQ(handle, 12345);
        return;
    }
    s->handle = handle;
    s->len = parent->len;
    s->reserved = 0;
    s->n_pages = (s->len + m->block_size - 1) / m->block_size;
    memcpy(s->tokens, parent->tokens, (size_t)s->len * sizeof *s->tokens);
    memcpy(s->pages, parent->pages, (size_t)s->n_pages * sizeof *s->pages);
}

static void model_reserve(struct model *m, struct model_seq *s, int32_t n) {
    int32_t want = (s->len + n + m->block_size - 1) / m->block_size, tail = s->len / m->block_size;
    bool copies = n > 0 && s->len % m->block_size && model_sharers(m, s->pages[tail]) > 1;
    int32_t need = (want > s->n_pages ? want - s->n_pages : 0) + copies;
    for (int32_t g = 0; g < m->n_groups; g++)
        CHECK_EQ(paged_seq_blocks_needed(m->cache, s->handle, g, n), need);
    paged_status status = paged_seq_reserve(m->cache, s->handle, n);
    if (s->len + n > m->max_seq_tokens) {
        CHECK_EQ(status, PAGED_ERR_TOO_LONG);
        return;
    }
    if (m->n_pages_max)
        CHECK_EQ(status, model_used(m) + need > m->n_pages_max ? PAGED_ERR_NO_BLOCKS : PAGED_OK);
    if (status != PAGED_OK) {
        CHECK_EQ(status, PAGED_ERR_NO_BLOCKS);
        CHECK(need > 0);
        m->n_refused++;
        return;
    }
    if (copies) s->pages[tail] = m->next_page++;
    m->n_copies += copies ? (uint64_t)m->n_groups : 0;
    for (int32_t i = s->n_pages; i < want; i++) s->pages[i] = m->next_page++;
    s->n_pages = want;
    s->reserved = n;
}

static void model_commit(struct model *m, struct model_seq *s, int32_t n, uint64_t *rand) {
    int32_t *tokens = s->tokens + s->len;
    if (n > s->reserved) {
        CHECK_EQ(paged_seq_commit(m->cache, s->handle, tokens, n), PAGED_ERR_INVALID_ARG);
        return;
    }
    for (int32_t i = 0; i < n; i++) tokens[i] = (int32_t)(paged__rand(rand) % 3);
    model_payload(m, s, s->len, n, true);
    CHECK_EQ(paged_seq_commit(m->cache, s->handle, tokens, n), PAGED_OK);
    s->len += n;
    s->reserved -= n;
}

static void model_truncate(struct model *m, struct model_seq *s, int32_t n) {
    paged_status status = paged_seq_truncate(m->cache, s->handle, n);
    CHECK_EQ(status, n > s->len ? PAGED_ERR_INVALID_ARG : PAGED_OK);
    if (status != PAGED_OK) return;
    s->len = n;
    s->reserved = 0;
    s->n_pages = (n + m->block_size - 1) / m->block_size;
}

static void model_free(struct model *m, struct model_seq *s) {
    CHECK_EQ(paged_seq_free(m->cache, s->handle), PAGED_OK);
    CHECK_EQ(paged_seq_free(m->cache, s->handle), PAGED_ERR_STALE);
    m->stale = s->handle;
    s->handle = 0;
    s->len = s->reserved = s->n_pages = 0;
}

/* Every call with a handle that is not valid. */
static void model_wrong_handle(struct model *m, paged_seq handle) {
    int64_t slot = -7;
    int32_t token = 1;
    paged_seq out = 12345;
    CHECK_EQ(paged_seq_free(m->cache, handle), PAGED_ERR_STALE);
    CHECK_EQ(paged_seq_reserve(m->cache, handle, 1), PAGED_ERR_STALE);
    CHECK_EQ(paged_seq_commit(m->cache, handle, &token, 1), PAGED_ERR_STALE);
    CHECK_EQ(paged_seq_truncate(m->cache, handle, 0), PAGED_ERR_STALE);
    CHECK_EQ(paged_seq_fork(m->cache, handle, &out), PAGED_ERR_STALE);
    CHECK_EQ(paged_seq_slots(m->cache, handle, 0, 0, 1, &slot), PAGED_ERR_STALE);
    CHECK_EQ(paged_seq_blocks_needed(m->cache, handle, 0, 1), -1);
    CHECK_EQ(paged_seq_len(m->cache, handle), -1);
    CHECK_EQ(paged_seq_reserved(m->cache, handle), -1);
    CHECK_EQ(paged_seq_row(m->cache, handle), -1);
    CHECK(!paged_seq_tokens(m->cache, handle));
    CHECK(slot == -7 && out == 12345);
}

/* The structures that the model needs from a cache that was just made. */
static void model_open(struct model *m, const paged_cache_config *config) {
    paged_error err = {0};
    if (paged_cache_create(config, &m->cache, &err) != PAGED_OK)
        test_fail(__FILE__, __LINE__, "%s", err.message);
    m->n_groups = config->n_groups;
    m->block_size = config->block_size;
    m->max_seq_tokens = config->max_seq_tokens;
    for (int32_t g = 0; g < m->n_groups; g++) CHECK_EQ(paged_cache_kv(m->cache, g, 0, &m->kv[g]), PAGED_OK);
}

/* Frees what is left; the pool is as it was when it was new. */
static void model_close(struct model *m) {
    paged_cache_stats stats;
    for (int32_t i = 0; i < MODEL_SEQS; i++) {
        if (m->seqs[i].handle) model_free(m, &m->seqs[i]);
    }
    model_check(m);
    paged_cache_get_stats(m->cache, &stats);
    CHECK_EQ(stats.n_used, 0);
    CHECK_EQ(stats.used_bytes, 0);
    CHECK_EQ(stats.n_tokens, 0);
    CHECK_EQ(stats.n_allocs, stats.n_frees);
    paged_cache_free(m->cache);
    m->cache = NULL;
}

#endif
