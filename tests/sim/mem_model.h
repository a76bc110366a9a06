/* mem_model.h: a naive model of a cache for the random and the exhaustive tester, and the operations
 * applied to both.
 *
 * A model sequence is its tokens and for each group a list of pages; a page is a number that was never used
 * before. With packed tails the last one may be tiles instead, numbers of the same kind; which blocks they
 * lie in is the cache's matter. What a group with a window has of a sequence follows from its length.
 * References are not counted but looked up: a page is shared if another sequence lists it. The model's
 * index is what the events say and nothing else; what a match must give follows from it by comparing
 * everything. When an entry was used last is known to the call; what is evicted must be a leaf, and no other
 * one that could go may be wanted less. What a position holds follows from the tokens up to it, so keys and
 * values that were written through one sequence and appear in another show every wrong sharing. */
#ifndef PAGED_TESTS_SIM_MEM_MODEL_H
#define PAGED_TESTS_SIM_MEM_MODEL_H

#include "mem/mem.h"
#include "test.h"

enum {
    MODEL_SEQS = 8,
    MODEL_TOKENS = 4096,
    MODEL_PAGES = 256,
    MODEL_ENTRIES = 4096,
    MODEL_SPACES = 3,
    MODEL_PINS = 64,
    MODEL_GROUPS = 3,
    MODEL_LAYERS = 2,
    MODEL_TILES = 16
};

/* An entry of the index; its place is what the event named it. */
struct model_entry {
    bool live;
    int32_t parent, depth, n_tokens, space;
    int32_t tokens[64];
    uint32_t groups;             /* that have a block of it */
    int64_t pages[MODEL_GROUPS]; /* of those */
    uint64_t used, maybe_used;   /* number of the check at which it was in use last, and may have been */
};

struct model_seq {
    paged_seq handle; /* 0: not live */
    int32_t len, reserved, n_pages;
    int32_t space; /* -1: none */
    int32_t tokens[MODEL_TOKENS];
    int64_t pages[MODEL_GROUPS][MODEL_PAGES];
    int32_t n_tiles; /* of the entry behind the pages; 0: there is none */
    int64_t tiles[MODEL_GROUPS][MODEL_TILES];
};

struct model {
    paged_cache *cache;
    paged_kv kv[MODEL_GROUPS][MODEL_LAYERS];
    int32_t n_layers[MODEL_GROUPS];
    int32_t n_groups, block_size, max_seq_tokens;
    int32_t windows[MODEL_GROUPS]; /* 0: none */
    int32_t n_pages_max;           /* of the pool; 0: not known, the groups' blocks differ */
    int64_t next_page;
    int32_t tiles_a_block; /* 0: no packed tails */
    uint64_t n_refused, n_copies, n_packed;
    paged_seq stale; /* a handle that was freed */
    struct model_seq seqs[MODEL_SEQS];
    int32_t promised_spaces[MODEL_SEQS]; /* of those with a promise */
    /* the index */
    struct model_seq *acting;  /* whose content is stored by the call under way */
    struct model_seq *leaving; /* freed by the call under way: what it lists may be evicted at its end */
    bool surprise;             /* an event that makes no sense; checked after the call */
    bool misplaced;            /* something was evicted before what is wanted less */
    bool *failed; /* of the call under way, an allocation or an operation of the arena; NULL: they never do */
    uint64_t salt; /* part of the namespaces */
    uint64_t n_checks, n_evicted;
    int32_t n_entries; /* ids lie below */
    int32_t n_pins, pins[MODEL_PINS];
    uint64_t now, n_hits, n_tails, n_moved, n_waits;
    uint64_t space_hash[MODEL_SPACES][2];
    struct model_entry entries[MODEL_ENTRIES];
};

/* First page that the token at position pos sees: row i sees the keys i - window + 1 … i. */
static int32_t model_first(const struct model *m, int32_t g, int32_t pos) {
    int32_t first = m->windows[g] && pos >= m->windows[g] ? pos - m->windows[g] + 1 : 0;
    return first / m->block_size;
}

static bool model_windowed(const struct model *m) {
    bool any = false;
    for (int32_t g = 0; g < m->n_groups; g++) any |= m->windows[g] > 0;
    return any;
}

/* Other sequences that list the page. */
static bool model_shared(const struct model *m, const struct model_seq *s, int32_t g, int64_t page) {
    for (int32_t o = 0; o < MODEL_SEQS; o++) {
        const struct model_seq *other = &m->seqs[o];
        for (int32_t i = model_first(m, g, other->len); i < other->n_pages && other != s; i++) {
            if (other->pages[g][i] == page) return true;
        }
    }
    return false;
}

/* The page is listed by a sequence before number n_seqs, or by a pin before number n_pins: of the entries on
 * its path, those that are seen from the first position inside the last one. */
static bool model_listed(const struct model *m, int32_t g, int64_t page, int32_t n_seqs, int32_t n_pins) {
    for (int32_t s = 0; s < n_seqs; s++) {
        for (int32_t i = model_first(m, g, m->seqs[s].len); i < m->seqs[s].n_pages; i++) {
            if (&m->seqs[s] != m->leaving && m->seqs[s].pages[g][i] == page) return true;
        }
    }
    for (int32_t p = 0; p < n_pins; p++) {
        int32_t first = model_first(m, g, m->entries[m->pins[p]].depth * m->block_size + 1);
        for (int32_t e = m->pins[p]; e >= 0 && m->entries[e].depth >= first; e = m->entries[e].parent) {
            if (m->entries[e].pages[g] == page) return true;
        }
    }
    return false;
}

static int32_t model_used(const struct model *m, int32_t g) {
    int32_t n = m->cache->groups[g].n_divided;
    for (int32_t s = 0; s < MODEL_SEQS; s++) {
        for (int32_t i = model_first(m, g, m->seqs[s].len); i < m->seqs[s].n_pages; i++)
            n += !model_listed(m, g, m->seqs[s].pages[g][i], s, 0);
    }
    for (int32_t p = 0; p < m->n_pins; p++) {
        int32_t first = model_first(m, g, m->entries[m->pins[p]].depth * m->block_size + 1);
        for (int32_t e = m->pins[p]; e >= 0 && m->entries[e].depth >= first; e = m->entries[e].parent)
            n += !model_listed(m, g, m->entries[e].pages[g], MODEL_SEQS, p);
    }
    return n;
}

static bool model_indexed(const struct model *m, int32_t g, int64_t page) {
    for (int32_t e = 0; e < m->n_entries; e++) {
        const struct model_entry *entry = &m->entries[e];
        if (entry->live && (entry->groups >> g & 1) && entry->pages[g] == page) return true;
    }
    return false;
}

/* Tile idx of the sequence's tail has another owner, in any group. */
static bool model_tile_shared(const struct model *m, const struct model_seq *s, int32_t idx) {
    for (int32_t g = 0; g < m->n_groups; g++) {
        for (int32_t o = 0; o < MODEL_SEQS; o++) {
            const struct model_seq *other = &m->seqs[o];
            if (other != s && idx < other->n_tiles && other->tiles[g][idx] == s->tiles[g][idx]) return true;
        }
    }
    return false;
}

/* How many tiles there are, in any group. */
static int32_t model_tiles(const struct model *m) {
    int32_t n = 0;
    for (int32_t s = 0; s < MODEL_SEQS; s++) {
        for (int32_t i = 0; i < m->seqs[s].n_tiles; i++) {
            bool first = true; /* shared ones stand at the same place */
            for (int32_t o = 0; o < s; o++)
                first &= i >= m->seqs[o].n_tiles || m->seqs[o].tiles[0][i] != m->seqs[s].tiles[0][i];
            n += first;
        }
    }
    return n;
}

static void model_new_tile(struct model *m, struct model_seq *s, int32_t idx) {
    for (int32_t g = 0; g < m->n_groups; g++) s->tiles[g][idx] = m->next_page;
    m->next_page++;
}

/* Somebody else has the page that the sequence writes in next, in any group. */
static bool model_must_copy(const struct model *m, const struct model_seq *s) {
    int32_t idx = s->len / m->block_size;
    bool must = false;
    for (int32_t g = 0; g < m->n_groups && s->len % m->block_size; g++)
        must |= model_shared(m, s, g, s->pages[g][idx]) || model_indexed(m, g, s->pages[g][idx]);
    return must;
}

static void model_new_pages(struct model *m, struct model_seq *s, int32_t idx) {
    for (int32_t g = 0; g < m->n_groups; g++) s->pages[g][idx] = m->next_page;
    m->next_page++;
}

/* ---- the index, from events ---- */

static bool model_held(const struct model *m, const struct model_entry *e) {
    bool held = false;
    for (int32_t g = 0; g < m->n_groups; g++)
        held |= (e->groups >> g & 1) && model_listed(m, g, e->pages[g], MODEL_SEQS, m->n_pins);
    return held;
}

static bool model_leaf(const struct model *m, int32_t id) {
    for (int32_t i = 0; i < m->n_entries; i++)
        if (m->entries[i].live && m->entries[i].parent == id) return false;
    return true;
}

/* Another leaf that could have gone instead of this one, and is wanted less: of a lower priority, or of the
 * same and used longer ago for certain. What was in use when the call began does not count. */
static bool model_less_wanted(const struct model *m, int32_t id) {
    const struct model_entry *e = &m->entries[id];
    int32_t priority = m->cache->nodes[id].priority;
    for (int32_t i = 0; i < m->n_entries; i++) {
        const struct model_entry *other = &m->entries[i];
        int32_t of_other = m->cache->nodes[i].priority;
        if (i == id || !other->live || other->maybe_used >= m->n_checks || of_other > priority) continue;
        if (of_other == priority && other->maybe_used >= e->used) continue;
        if (model_leaf(m, i) && !model_held(m, other)) return true;
    }
    return false;
}

static void model_event(void *user, const paged_event *event) {
    struct model *m = user;
    int32_t id = event->entry;
    struct model_entry *e = &m->entries[id];
    uint32_t all = (1u << m->n_groups) - 1;
    bool bad = id < 0 || id >= MODEL_ENTRIES || event->n_tokens < 1 || event->n_tokens > m->block_size;
    if (bad || e->live == (event->kind == PAGED_EVENT_STORED)) {
        m->surprise = true;
        return;
    }
    for (int32_t g = 0; g < m->n_groups && event->kind != PAGED_EVENT_STORED; g++) {
        uint32_t had = e->groups >> g & 1, has = event->groups >> g & 1;
        if (event->kind == PAGED_EVENT_REMOVED) has = 0;
        if (had && !has) m->surprise |= model_listed(m, g, e->pages[g], MODEL_SEQS, m->n_pins);
        if (had != has && event->kind == PAGED_EVENT_CHANGED) m->surprise |= !m->windows[g];
        if (!had && has && m->acting) e->pages[g] = m->acting->pages[g][e->depth];
        if (!had && has) m->surprise |= !m->acting;
    }
    if (event->kind == PAGED_EVENT_CHANGED) {
        m->surprise |= e->groups == event->groups;
        e->groups = event->groups;
        return;
    }
    if (event->kind == PAGED_EVENT_REMOVED) {
        m->surprise |= event->groups != e->groups || event->n_tokens != e->n_tokens || !model_leaf(m, id);
        /* Blocks of windows have an order of their own. */
        if (m->cache->n_evicted != m->n_evicted && !model_windowed(m))
            m->misplaced |= model_less_wanted(m, id);
        m->n_evicted = m->cache->n_evicted;
        e->live = false;
        return;
    }
    if (!m->acting || m->acting->space < 0 || event->groups != all) {
        m->surprise = true;
        return;
    }
    uint64_t *hash = m->space_hash[m->acting->space];
    if (event->parent < 0 && !hash[0]) memcpy(hash, event->namespace_hash, 2 * sizeof *hash);
    bad = event->parent < 0 ? memcmp(hash, event->namespace_hash, 2 * sizeof *hash) != 0
                            : !m->entries[event->parent].live;
    *e = (struct model_entry){.live = true,
                              .parent = event->parent,
                              .depth = event->parent < 0 ? 0 : m->entries[event->parent].depth + 1,
                              .n_tokens = event->n_tokens,
                              .groups = all,
                              .used = m->n_checks,
                              .maybe_used = m->n_checks,
                              .space = m->acting->space};
    memcpy(e->tokens, event->tokens, (size_t)event->n_tokens * sizeof *e->tokens);
    for (int32_t g = 0; g < m->n_groups; g++) /* a sealed tail becomes a page */
        e->pages[g] = e->depth < m->acting->n_pages ? m->acting->pages[g][e->depth] : m->next_page++;
    if (id >= m->n_entries) m->n_entries = id + 1;
    m->surprise |= bad;
}

/* The longest common beginning of the tokens with the path to an entry; the path comes out in path. */
static int32_t model_common(const struct model *m, int32_t id, const int32_t *tokens, int32_t n,
                            int32_t path[MODEL_PAGES]) {
    int32_t n_path = m->entries[id].depth + 1, k = 0;
    for (int32_t i = n_path - 1; i >= 0; i--, id = m->entries[id].parent) path[i] = id;
    for (int32_t i = 0; i < n_path; i++) {
        const struct model_entry *e = &m->entries[path[i]];
        for (int32_t t = 0; t < e->n_tokens; t++, k++) {
            if (k == n || e->tokens[t] != tokens[k]) return k;
        }
    }
    return k;
}

/* Entries that agree with a beginning of the tokens may be used by a match, whatever becomes of it. */
static void model_use(struct model *m, int32_t space, const int32_t *tokens, int32_t n) {
    int32_t path[MODEL_PAGES];
    for (int32_t e = 0; e < m->n_entries; e++) {
        struct model_entry *entry = &m->entries[e];
        if (entry->live && entry->space == space &&
            model_common(m, e, tokens, n, path) > entry->depth * m->block_size)
            entry->maybe_used = m->n_checks;
    }
}

/* Every group has what the token at position pos sees of a path that agrees so far. */
static bool model_covers(const struct model *m, const int32_t *path, int32_t pos) {
    for (int32_t g = 0; g < m->n_groups; g++) {
        for (int32_t i = model_first(m, g, pos); i * m->block_size < pos; i++) {
            if (!(m->entries[path[i]].groups >> g & 1)) return false;
        }
    }
    return true;
}

/* The most tokens that could be reused of these; and in *least, in whole blocks. */
static int32_t model_reusable(const struct model *m, int32_t space, const int32_t *tokens, int32_t n,
                              int32_t *least) {
    int32_t best = 0, path[MODEL_PAGES];
    *least = 0;
    for (int32_t e = 0; e < m->n_entries; e++) {
        if (!m->entries[e].live || m->entries[e].space != space) continue;
        int32_t k = model_common(m, e, tokens, n, path);
        if (k > best && model_covers(m, path, k)) best = k;
        for (int32_t pos = k - k % m->block_size; pos > *least; pos -= m->block_size) {
            if (model_covers(m, path, pos)) *least = pos;
        }
    }
    if (*least > best) best = *least;
    return best;
}

/* The first n_full blocks of a sequence are those of the index. */
static void model_adopt(const struct model *m, struct model_seq *s, int32_t n_full) {
    int32_t parent = -1;
    for (int32_t i = 0; i < n_full; i++) {
        int32_t found = -1;
        for (int32_t e = 0; e < m->n_entries && found < 0; e++) {
            const struct model_entry *entry = &m->entries[e];
            if (entry->live && entry->space == s->space && entry->parent == parent &&
                entry->n_tokens == m->block_size &&
                memcmp(entry->tokens, s->tokens + i * m->block_size,
                       (size_t)m->block_size * sizeof *s->tokens) == 0)
                found = e;
        }
        CHECK(found >= 0);
        for (int32_t g = 0; g < m->n_groups; g++) {
            if (i < model_first(m, g, s->len)) continue;
            CHECK(m->entries[found].groups >> g & 1);
            s->pages[g][i] = m->entries[found].pages[g];
        }
        parent = found;
    }
}

/* Which pins there are is the cache's word; that they are right shows in what is used and evicted. */
static void model_read_pins(struct model *m) {
    m->n_pins = m->cache->pins.n;
    CHECK(m->n_pins <= MODEL_PINS);
    for (int32_t i = 0; i < m->n_pins; i++) {
        m->pins[i] = m->cache->pins.items[i];
        CHECK(m->entries[m->pins[i]].live && m->cache->nodes[m->pins[i]].until > m->now);
    }
}

/* What the events said is what the cache has. */
static void model_check_index(const struct model *m) {
    int32_t n_cached = 0, n_nodes = 0;
    CHECK(!m->surprise);
    CHECK(!m->misplaced);
    for (int32_t e = 0; e < m->n_entries; e++) {
        const struct model_entry *entry = &m->entries[e];
        if (!entry->live) continue;
        const paged__node *node = &m->cache->nodes[e];
        CHECK_EQ(node->n_tokens, entry->n_tokens);
        CHECK_EQ(node->parent < 0 ? -1 : node->parent, entry->parent);
        CHECK(memcmp(paged__node_tokens(m->cache, e), entry->tokens,
                     (size_t)entry->n_tokens * sizeof *entry->tokens) == 0);
        for (int32_t g = 0; g < m->n_groups; g++) {
            uint32_t has = entry->groups >> g & 1;
            CHECK_EQ(paged__node_block(m->cache, e, g) >= 0, has);
            n_cached += has && !model_listed(m, g, entry->pages[g], MODEL_SEQS, m->n_pins);
        }
        n_nodes++;
    }
    for (int32_t e = 0; e < m->cache->n_nodes_max; e++) n_nodes -= m->cache->nodes[e].n_tokens > 0;
    CHECK_EQ(n_nodes, 0);
    paged_cache_stats stats;
    paged_cache_get_stats(m->cache, &stats);
    CHECK_EQ(stats.n_cached, n_cached);
    for (int32_t a = 0; a < MODEL_SPACES; a++) {
        for (int32_t b = 0; b < a; b++)
            CHECK(!m->space_hash[a][0] || m->space_hash[a][0] != m->space_hash[b][0]);
    }
}

/* ---- keys and values: one number for K, one for V, from the tokens up to the position ---- */

static uint32_t *model_cell(const paged_kv *kv, int32_t head, int64_t slot, bool v) {
    int64_t block = slot / kv->block_size, offset = slot % kv->block_size,
            first = offset - offset % PAGED_TILE;
    int64_t head_dim = v ? kv->head_dim_v : kv->head_dim_k, at = offset * head_dim;
    if (kv->layout == PAGED_LAYOUT_PACKED && !v) at = first * head_dim + offset - first;
    return (uint32_t *)(void *)((v ? kv->v : kv->k) + block * kv->block_stride +
                                head * (v ? kv->v_head_stride : kv->k_head_stride) + at * 4);
}

/* All layers and heads of a slot. */
static void model_slot(const struct model *m, int32_t g, int64_t slot, uint64_t path, bool write) {
    for (int32_t layer = 0; layer < m->n_layers[g]; layer++) {
        const paged_kv *kv = &m->kv[g][layer];
        for (int32_t head = 0; head < kv->n_kv_heads; head++) {
            uint32_t *k = model_cell(kv, head, slot, false), *v = model_cell(kv, head, slot, true);
            uint64_t want = path + (uint64_t)(g + 7 * layer + 31 * head) * 0x100000001;
            if (write) {
                *k = (uint32_t)want;
                *v = (uint32_t)(want >> 32);
            }
            CHECK(*k == (uint32_t)want && *v == (uint32_t)(want >> 32));
        }
    }
}

static uint64_t model_step(uint64_t path, int32_t token) {
    return paged__mix(path ^ (uint64_t)(uint32_t)token);
}

/* Writes, or compares, the positions first … first + n - 1 of a sequence whose tokens are known; of a group
 * with a window those that are still there. */
static void model_payload(const struct model *m, const struct model_seq *s, int32_t first, int32_t n,
                          bool write) {
    static int64_t slots[MODEL_TOKENS];
    for (int32_t g = 0; g < m->n_groups; g++) {
        uint64_t path = (uint64_t)(s->space + 1);
        int32_t from = paged_seq_first_k(m->cache, s->handle, g);
        CHECK_EQ(from, model_first(m, g, s->len) * m->block_size);
        from = from > first ? from : first;
        if (from > first)
            CHECK_EQ(paged_seq_slots(m->cache, s->handle, g, from - 1, 1, slots), PAGED_ERR_INVALID_ARG);
        for (int32_t i = 0; i < from; i++) path = model_step(path, s->tokens[i]);
        CHECK_EQ(paged_seq_slots(m->cache, s->handle, g, from, first + n - from, slots), PAGED_OK);
        for (int32_t i = 0; i < first + n - from; i++) {
            path = model_step(path, s->tokens[from + i]);
            model_slot(m, g, slots[i], path, write);
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
static void model_check(struct model *m) {
    paged_error err = {0};
    paged_cache_stats stats;
    int32_t n_used = 0;
    if (paged_cache_check(m->cache, &err) != PAGED_OK) test_fail(__FILE__, __LINE__, "%s", err.message);
    paged_cache_get_stats(m->cache, &stats);
    for (int32_t g = 0; g < m->n_groups; g++) n_used += model_used(m, g);
    CHECK_EQ(stats.n_used, n_used);
    CHECK_EQ(stats.n_refused, m->n_refused);
    CHECK_EQ(stats.n_copies, m->n_copies);
    CHECK_EQ(stats.n_tail_tiles, model_tiles(m) * m->n_groups);
    CHECK_EQ(stats.n_divided == 0, stats.n_tail_tiles == 0);
    int32_t n_live = 0;
    for (int32_t i = 0; i < MODEL_SEQS; i++) n_live += m->seqs[i].handle != 0;
    CHECK_EQ(stats.n_seqs, n_live);
    model_check_index(m);
    m->n_checks++;
    for (int32_t e = 0; e < m->n_entries; e++)
        if (m->entries[e].live && model_held(m, &m->entries[e]))
            m->entries[e].used = m->entries[e].maybe_used = m->n_checks;
}

static void model_check_all(struct model *m) {
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
    s->len = s->reserved = s->n_pages = s->n_tiles = 0;
    s->space = -1;
}

/* Names that share their bytes, and so their length, and differ in kind; with an even salt the first one is
 * empty. Salts differ, so that some share a bucket. */
static void model_space(const struct model *m, int32_t space, paged_ns_field field[1],
                        paged_namespace *names) {
    field[0] = (paged_ns_field){.kind = space + 1, .data = &m->salt, .size_bytes = sizeof m->salt};
    *names = (paged_namespace){.fields = field, .n_fields = space > 0 || m->salt % 2};
}

/* The call under way may not have been able to do what it should: an allocation or the arena failed. */
static bool model_failed(const struct model *m, paged_status status) {
    return m->failed && *m->failed && (status == PAGED_ERR_NO_MEMORY || status == PAGED_ERR_IO);
}

static const paged__promise *model_promise_of(const struct model *m, const struct model_seq *s) {
    return &m->cache->promises[paged_seq_row(m->cache, s->handle)];
}

/* The longest common beginning with a living sequence that promised its tokens, which is copied from it. */
static int32_t model_promised(const struct model *m, int32_t space, const int32_t *tokens, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 0; i < MODEL_SEQS; i++) {
        const struct model_seq *s = &m->seqs[i];
        int32_t k = 0;
        if (!s->handle || s->space != space || !model_promise_of(m, s)->n_tokens) continue;
        while (k < n && k < s->len && s->tokens[k] == tokens[k]) k++;
        best = k > best ? k : best;
    }
    return best;
}

/* Somebody else is going to compute a block more of the tokens than there is. */
static bool model_worth_waiting(const struct model *m, const struct model_seq *s, int32_t space,
                                const int32_t *tokens, int32_t n) {
    int32_t least, reach = model_reusable(m, space, tokens, n - 1, &least);
    int32_t promised = model_promised(m, space, tokens, n - 1);
    bool worth = false;
    reach = promised > reach ? promised : reach;
    for (int32_t i = 0; i < MODEL_SEQS; i++) {
        const struct model_seq *other = &m->seqs[i];
        if (!other->handle || other == s) continue;
        const paged__promise *promise = model_promise_of(m, other);
        const int32_t *theirs = m->cache->seqs[promise - m->cache->promises].tokens;
        int32_t k = 0, there = promise->n_tokens < n - 1 ? promise->n_tokens : n - 1;
        if (!promise->n_tokens || promise->producer >= 0 || m->promised_spaces[i] != space) continue;
        while (k < there && theirs[k] == tokens[k]) k++;
        worth |= k >= reach + m->block_size && k > other->len;
    }
    return worth;
}

/* A promise changes nothing that the model knows. */
static void model_promise(struct model *m, struct model_seq *s, int32_t space, const int32_t *tokens,
                          int32_t n) {
    paged_ns_field field[1];
    paged_namespace names;
    bool waits = false, promised = model_promise_of(m, s)->n_tokens > 0;
    model_space(m, space, field, &names);
    bool worth = n > 0 && model_worth_waiting(m, s, space, tokens, n);
    paged_status status = paged_seq_promise(m->cache, s->handle, &names, tokens, n, &waits);
    if (model_failed(m, status)) return;
    if (n < 1 || s->len || s->reserved || s->space >= 0 || promised)
        CHECK_EQ(status, PAGED_ERR_INVALID_ARG);
    else
        CHECK_EQ(status, n > m->max_seq_tokens ? PAGED_ERR_TOO_LONG : PAGED_OK);
    if (status == PAGED_OK) CHECK_EQ(paged_seq_waits(m->cache, s->handle), waits);
    /* Of what windows leave several entries may be found; then the cache decides. */
    if (status == PAGED_OK && !model_windowed(m)) CHECK_EQ(waits, worth);
    m->n_waits += waits;
    if (status == PAGED_OK) m->promised_spaces[s - m->seqs] = space;
}

/* On an empty sequence. */
static void model_match(struct model *m, struct model_seq *s, int32_t space, const int32_t *tokens,
                        int32_t n) {
    paged_ns_field field[1];
    paged_namespace names;
    paged_match got = {-1, -1, PAGED_MISS_NONE};
    model_space(m, space, field, &names);
    int32_t least = 0, want = n > 0 ? model_reusable(m, space, tokens, n - 1, &least) : 0;
    int32_t promised = n > 0 ? model_promised(m, space, tokens, n - 1) : 0;
    want = promised > want ? promised : want;
    if (n > 0) model_use(m, space, tokens, n - 1);
    paged_status status = paged_seq_match(m->cache, s->handle, &names, tokens, n, &got);
    if (model_failed(m, status)) return;
    if (s->len || s->reserved || s->space >= 0 || n > m->max_seq_tokens) {
        CHECK_EQ(status, n > m->max_seq_tokens && !s->len && !s->reserved && s->space < 0
                             ? PAGED_ERR_TOO_LONG
                             : PAGED_ERR_INVALID_ARG);
        return;
    }
    CHECK_EQ(status, PAGED_OK);
    /* Of entries that agree equally long one is looked at, and it may be the one that lacks a block. */
    CHECK(got.n_matched >= least && got.n_matched <= want);
    if (got.why == PAGED_MISS_NO_BLOCK)
        want = least;
    else if (model_windowed(m))
        want = got.n_matched;
    int32_t n_full = want / m->block_size;
    s->space = space;
    s->len = got.n_matched;
    memcpy(s->tokens, tokens, (size_t)s->len * sizeof *tokens);
    CHECK_EQ(got.n_matched, want);
    CHECK_EQ(got.n_copied, want % m->block_size);
    model_adopt(m, s, n_full);
    s->n_pages = n_full;
    if (got.why == PAGED_MISS_NO_BLOCK && m->n_pages_max) CHECK(model_used(m, 0) + 2 > m->n_pages_max);
    if (got.n_copied) {
        if (!m->tiles_a_block) model_new_pages(m, s, s->n_pages++);
        while (m->tiles_a_block && s->n_tiles * PAGED_TILE < got.n_copied) model_new_tile(m, s, s->n_tiles++);
        m->n_copies += (uint64_t)m->n_groups;
        m->n_tails++;
    }
    m->n_hits += (uint64_t)got.n_matched;
    if (got.n_matched == n - 1) CHECK_EQ(got.why, n < 2 ? PAGED_MISS_TOO_SHORT : PAGED_MISS_NONE);
}

/* All whole blocks of the tokens that are cached have it. */
static void model_check_priority(const struct model *m, int32_t space, const int32_t *tokens, int32_t n,
                                 int32_t priority) {
    int32_t path[MODEL_PAGES];
    for (int32_t e = 0; e < m->n_entries; e++) {
        const struct model_entry *entry = &m->entries[e];
        int32_t end = (entry->depth + 1) * m->block_size;
        if (entry->live && entry->space == space && end <= n && model_common(m, e, tokens, n, path) == end)
            CHECK_EQ(m->cache->nodes[e].priority, priority);
    }
}

static void model_keep(struct model *m, int32_t space, const int32_t *tokens, int32_t n, int32_t priority,
                       uint64_t until) {
    paged_ns_field field[1];
    paged_namespace names;
    int32_t n_kept = -1, least, most = model_reusable(m, space, tokens, n, &least);
    model_space(m, space, field, &names);
    if (until <= m->now) m->n_pins = 0; /* one may end, and what it held be evicted; they are read again */
    paged_status status = paged_prefix_keep(m->cache, &names, tokens, n, priority, until, &n_kept);
    if (model_failed(m, status)) CHECK_EQ(n_kept, -1);
    if (status == PAGED_ERR_LIMIT) CHECK(m->cache->all_windowed && n_kept == -1);
    if (status == PAGED_OK) CHECK(model_windowed(m) ? n_kept <= most : n_kept == most);
    if (status == PAGED_OK) model_check_priority(m, space, tokens, n, priority);
    model_read_pins(m);
}

static void model_clock(struct model *m, uint64_t now) {
    m->now = now > m->now ? now : m->now;
    for (int32_t i = m->n_pins - 1; i >= 0; i--) {
        if (m->cache->nodes[m->pins[i]].until <= m->now) m->pins[i] = m->pins[--m->n_pins];
    }
    paged_cache_set_clock(m->cache, now);
    model_read_pins(m);
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
    s->space = parent->space;
    s->n_pages = (s->len + m->block_size - 1) / m->block_size;
    s->n_tiles = 0;
    if (s->n_pages > parent->n_pages) {
        s->n_pages = parent->n_pages;
        s->n_tiles = (s->len - s->n_pages * m->block_size + PAGED_TILE - 1) / PAGED_TILE;
        memcpy(s->tiles, parent->tiles, sizeof s->tiles);
    }
    memcpy(s->tokens, parent->tokens, (size_t)s->len * sizeof *s->tokens);
    memcpy(s->pages, parent->pages, sizeof s->pages);
}

/* What a reservation takes, and with `apply` takes it: entry by entry from the one that is written next. */
struct model_need {
    int32_t pages, tiles, copies, packed;
};

static struct model_need model_grow(struct model *m, struct model_seq *s, int32_t n, bool apply) {
    struct model_need need = {0};
    int32_t end = s->len + n, want = (end + m->block_size - 1) / m->block_size, n_tiles = 0;
    int32_t tail = s->n_tiles ? s->n_pages : -1, n_entries = s->n_pages + (tail >= 0);
    for (int32_t i = s->len / m->block_size; i < want; i++) {
        int32_t in_last = end - i * m->block_size, offset = s->len - i * m->block_size;
        bool small = m->tiles_a_block && in_last<m->block_size, content = offset> 0;
        int32_t small_tiles = small ? (in_last + PAGED_TILE - 1) / PAGED_TILE : 0;
        bool fresh = i >= n_entries, copies = i < s->n_pages && content && n > 0 && model_must_copy(m, s);
        if (i == tail && small) {
            n_tiles = small_tiles;
            bool one =
                content && n > 0 && offset % PAGED_TILE && model_tile_shared(m, s, offset / PAGED_TILE);
            need.copies += one;
            need.tiles += one + (n_tiles > s->n_tiles ? n_tiles - s->n_tiles : 0);
            if (apply && one) model_new_tile(m, s, offset / PAGED_TILE);
            for (int32_t t = s->n_tiles; apply && t < n_tiles; t++) model_new_tile(m, s, t);
        } else if (fresh || copies || i == tail) {
            need.copies += copies;
            need.packed += i == tail && content;
            need.pages += !small;
            need.tiles += small_tiles;
            n_tiles = small_tiles;
            if (apply && !small) model_new_pages(m, s, i);
            for (int32_t t = 0; apply && t < n_tiles; t++) model_new_tile(m, s, t);
        }
    }
    if (n == 0 && tail >= 0 && tail == want - 1)
        n_tiles = (end - tail * m->block_size + PAGED_TILE - 1) / PAGED_TILE;
    if (!apply) return need;
    s->n_tiles = n_tiles;
    s->n_pages = want - (n_tiles > 0);
    s->reserved = n;
    return need;
}

static void model_reserve(struct model *m, struct model_seq *s, int32_t n) {
    static struct model_seq before;
    struct model_need need = model_grow(m, s, n, false);
    int32_t blocks = 0, most = 0;
    for (int32_t g = 0; g < m->n_groups; g++) {
        int32_t more = need.tiles - m->cache->groups[g].n_free_tiles;
        blocks = need.pages + (more > 0 ? (more + m->tiles_a_block - 1) / m->tiles_a_block : 0);
        CHECK_EQ(paged_seq_blocks_needed(m->cache, s->handle, g, n), blocks);
        /* Groups differ where a compaction ended between them. */
        most = PAGED_MAX(most, model_used(m, g) + blocks);
    }
    if (s->len + n > m->max_seq_tokens) {
        CHECK_EQ(paged_seq_reserve(m->cache, s->handle, n), PAGED_ERR_TOO_LONG);
        return;
    }
    before = *s;
    model_grow(m, s, n, true); /* what it lets go may be evicted by the same call */
    paged_status status = paged_seq_reserve(m->cache, s->handle, n);
    if (status != PAGED_OK) {
        *s = before;
        if (model_failed(m, status)) return;
        CHECK_EQ(status, PAGED_ERR_NO_BLOCKS);
        CHECK(need.pages + need.tiles > 0);
        if (m->n_pages_max) CHECK(most > m->n_pages_max);
        m->n_refused++;
        return;
    }
    m->n_copies += (uint64_t)(need.copies * m->n_groups);
    m->n_packed += (uint64_t)(need.packed * m->n_groups);
    /* Before the reservation they fitted; what it let go can only make it less. */
    for (int32_t g = 0; m->n_pages_max && blocks > 0 && g < m->n_groups; g++)
        CHECK(m->n_groups > 1 || model_used(m, g) <= m->n_pages_max);
}

static void model_commit(struct model *m, struct model_seq *s, int32_t n, uint64_t *rand) {
    int32_t *tokens = s->tokens + s->len;
    if (n > s->reserved) {
        CHECK_EQ(paged_seq_commit(m->cache, s->handle, tokens, n), PAGED_ERR_INVALID_ARG);
        return;
    }
    const paged__promise *promise = model_promise_of(m, s);
    bool keeps = paged__rand(rand) % 8 != 0;
    for (int32_t i = 0; i < n; i++) {
        tokens[i] = (int32_t)(paged__rand(rand) % 3);
        if (keeps && s->len + i < promise->n_tokens)
            tokens[i] = m->cache->seqs[promise - m->cache->promises].tokens[s->len + i];
    }
    model_payload(m, s, s->len, n, true);
    m->acting = s;
    s->len += n; /* what falls out of a window then may be evicted by the same call */
    s->reserved -= n;
    CHECK_EQ(paged_seq_commit(m->cache, s->handle, tokens, n), PAGED_OK);
    if (s->space >= 0) model_adopt(m, s, s->len / m->block_size);
}

static void model_truncate(struct model *m, struct model_seq *s, int32_t n) {
    bool refused = n > s->len;
    for (int32_t g = 0; g < m->n_groups; g++)
        refused |= n > 0 && model_first(m, g, n) < model_first(m, g, s->len);
    if (!refused) { /* what goes may be evicted by the same call */
        int32_t n_entries = (n + m->block_size - 1) / m->block_size;
        s->len = n;
        s->reserved = 0;
        s->n_tiles =
            n_entries > s->n_pages ? (n - s->n_pages * m->block_size + PAGED_TILE - 1) / PAGED_TILE : 0;
        s->n_pages = n_entries - (s->n_tiles > 0);
    }
    CHECK_EQ(paged_seq_truncate(m->cache, s->handle, n), refused ? PAGED_ERR_INVALID_ARG : PAGED_OK);
}

static void model_free(struct model *m, struct model_seq *s) {
    m->acting = m->leaving = s;
    CHECK_EQ(paged_seq_free(m->cache, s->handle), PAGED_OK);
    CHECK_EQ(paged_seq_free(m->cache, s->handle), PAGED_ERR_STALE);
    m->stale = s->handle;
    m->acting = m->leaving = NULL;
    s->handle = 0;
    s->len = s->reserved = s->n_pages = s->n_tiles = 0;
}

/* Every call with a handle that is not valid. */
static void model_wrong_handle(struct model *m, paged_seq handle) {
    int64_t slot = -7;
    bool waits;
    int32_t token = 1;
    paged_seq out = 12345;
    CHECK_EQ(paged_seq_free(m->cache, handle), PAGED_ERR_STALE);
    CHECK_EQ(paged_seq_match(m->cache, handle, &(paged_namespace){0}, &token, 1, NULL), PAGED_ERR_STALE);
    CHECK_EQ(paged_seq_reserve(m->cache, handle, 1), PAGED_ERR_STALE);
    CHECK_EQ(paged_seq_commit(m->cache, handle, &token, 1), PAGED_ERR_STALE);
    CHECK_EQ(paged_seq_truncate(m->cache, handle, 0), PAGED_ERR_STALE);
    CHECK_EQ(paged_seq_fork(m->cache, handle, &out), PAGED_ERR_STALE);
    CHECK_EQ(paged_seq_slots(m->cache, handle, 0, 0, 1, &slot), PAGED_ERR_STALE);
    CHECK_EQ(paged_seq_blocks_needed(m->cache, handle, 0, 1), -1);
    CHECK_EQ(paged_seq_len(m->cache, handle), -1);
    CHECK_EQ(paged_seq_reserved(m->cache, handle), -1);
    CHECK_EQ(paged_seq_row(m->cache, handle), -1);
    CHECK_EQ(paged_seq_first_k(m->cache, handle, 0), -1);
    CHECK_EQ(paged_seq_waits(m->cache, handle), -1);
    CHECK_EQ(paged_seq_promise(m->cache, handle, &(paged_namespace){0}, &token, 1, &waits), PAGED_ERR_STALE);
    CHECK(!paged_seq_tokens(m->cache, handle));
    CHECK(slot == -7 && out == 12345);
}

/* The structures that the model needs from a cache that was just made. */
static void model_open(struct model *m, const paged_cache_config *config) {
    paged_error err = {0};
    paged_cache_config with_events = *config;
    with_events.event = model_event;
    with_events.event_user = m;
    if (paged_cache_create(&with_events, &m->cache, &err) != PAGED_OK)
        test_fail(__FILE__, __LINE__, "%s", err.message);
    CHECK(m->cache->n_nodes_max <= MODEL_ENTRIES);
    m->n_groups = config->n_groups;
    m->block_size = config->block_size;
    m->max_seq_tokens = config->max_seq_tokens;
    m->tiles_a_block = config->packed_tails ? config->block_size / PAGED_TILE : 0;
    CHECK(m->n_groups <= MODEL_GROUPS);
    for (int32_t g = 0; g < m->n_groups; g++) {
        m->n_layers[g] = config->groups[g].n_layers;
        CHECK(m->n_layers[g] <= MODEL_LAYERS);
        for (int32_t layer = 0; layer < m->n_layers[g]; layer++)
            CHECK_EQ(paged_cache_kv(m->cache, g, layer, &m->kv[g][layer]), PAGED_OK);
        m->windows[g] = config->groups[g].window;
    }
}

/* Frees and evicts what is left; the pool is as it was when it was new. */
static void model_close(struct model *m) {
    paged_cache_stats stats;
    for (int32_t i = 0; i < MODEL_SEQS; i++) {
        if (m->seqs[i].handle) model_free(m, &m->seqs[i]);
    }
    model_check(m);
    model_clock(m, UINT64_MAX);
    paged_cache_clear(m->cache);
    model_check(m);
    paged_cache_get_stats(m->cache, &stats);
    CHECK_EQ(stats.n_cached, 0);
    CHECK_EQ(stats.n_used, 0);
    CHECK_EQ(stats.used_bytes, 0);
    CHECK_EQ(stats.n_tokens, 0);
    CHECK_EQ(stats.n_allocs, stats.n_frees);
    paged_cache_free(m->cache);
    m->cache = NULL;
}

#endif
