/* seq.c: sequences: handles, block tables, reserve, commit, truncate, fork.
 *
 * Each call first finds out whether it can succeed, then changes things. Only reserve takes
 * blocks; what it took is given back in reverse order if the arena fails halfway. (Granules that were
 * backed by then stay backed; nobody sees them.) */
#include "mem/mem.h"

static const uint64_t tag_mask = (1ull << (64 - PAGED__SEQ_BITS)) - 1;

paged__seq *paged__seq_find(const paged_cache *cache, paged_seq handle) {
    if (!cache) return NULL;
    uint64_t row = handle & (PAGED__MAX_SEQS - 1);
    if (row >= (uint64_t)cache->max_seqs) return NULL;
    paged__seq *seq = &cache->seqs[row];
    return seq->live && seq->tag == handle >> PAGED__SEQ_BITS ? seq : NULL;
}

static int32_t row_of(const paged_cache *cache, const paged__seq *seq) {
    return (int32_t)(seq - cache->seqs);
}

int32_t *paged__seq_table(const paged_cache *cache, int32_t group, const paged__seq *seq) {
    return cache->groups[group].tables + (int64_t)row_of(cache, seq) * cache->table_stride;
}

void paged__seqs_init(paged_cache *cache) {
    /* Tags count up from a number that no other cache is likely to be near, so a foreign handle is as good
     * as a stale one. */
    uint64_t salt = paged__mix((uint64_t)(uintptr_t)cache ^ paged__mix(paged__now_ns())) & tag_mask;
    for (int32_t i = 0; i < cache->max_seqs; i++) {
        cache->seqs[i] = (paged__seq){.tag = salt,
                                      .space = -1,
                                      .tip = -1,
                                      .next_free = i + 1 < cache->max_seqs ? i + 1 : -1,
                                      .tokens = cache->tokens + i * cache->token_stride};
    }
    cache->free_seq = 0;
    for (int32_t g = 0; g < cache->n_groups; g++) {
        int64_t n_entries = cache->max_seqs * cache->table_stride;
        for (int64_t i = 0; i < n_entries; i++) cache->groups[g].tables[i] = -1;
    }
}

/* Takes the first free row, which exists. */
static paged__seq *open_row(paged_cache *cache, paged_seq *out) {
    int32_t row = cache->free_seq;
    paged__seq *seq = &cache->seqs[row];
    uint64_t tag = (seq->tag + 1) & tag_mask;
    cache->free_seq = seq->next_free;
    cache->n_seqs++;
    *seq = (paged__seq){.tag = tag ? tag : 1, /* handle 0 is never valid */
                        .live = true,
                        .space = -1,
                        .tip = -1,
                        .next_free = -1,
                        .tokens = seq->tokens};
    *out = seq->tag << PAGED__SEQ_BITS | (uint64_t)row;
    return seq;
}

paged_status paged_seq_create(paged_cache *cache, paged_seq *out) {
    if (!cache || !out) return PAGED_ERR_INVALID_ARG;
    if (cache->free_seq < 0) return PAGED_ERR_NO_SEQS;
    open_row(cache, out);
    return PAGED_OK;
}

/* Drops the entries from n_entries on, last first, so that the next one to be taken is the first of them. */
static void drop_entries(paged_cache *cache, paged__seq *seq, int32_t n_entries) {
    for (int32_t g = 0; g < cache->n_groups; g++) {
        int32_t *table = paged__seq_table(cache, g, seq);
        int32_t first = PAGED_MAX(n_entries, paged__seq_first(cache, g, seq));
        for (int32_t i = seq->n_entries - 1; i >= first; i--) {
            cache->n_frees += paged__block_unref(cache, g, table[i]);
            table[i] = -1;
        }
    }
    seq->n_entries = PAGED_MIN(seq->n_entries, n_entries);
}

paged_status paged_seq_free(paged_cache *cache, paged_seq handle) {
    paged__seq *seq = paged__seq_find(cache, handle);
    if (!seq) return PAGED_ERR_STALE;
    if (seq->space >= 0) paged__prefix_seal(cache, seq);
    drop_entries(cache, seq, 0);
    paged__node_leave(cache, seq->tip);
    if (seq->space >= 0) paged__space_unref(cache, seq->space);
    cache->n_tokens -= seq->len;
    *seq = (paged__seq){
        .tag = seq->tag, .space = -1, .tip = -1, .next_free = cache->free_seq, .tokens = seq->tokens};
    cache->free_seq = row_of(cache, seq);
    cache->n_seqs--;
    paged__settle_limit(cache);
    return PAGED_OK;
}

/* ---- reserve ---- */

/* What a reservation does, to every group alike. */
typedef struct change {
    int32_t want;      /* entries afterwards */
    int32_t n_entries; /* blocks to take for new entries */
    int32_t copy_idx;  /* entry that is shared or indexed and will be written, so that it needs a copy; -1:
                        * none */
} change;

bool paged__seq_shares(const paged_cache *cache, const paged__seq *seq, int32_t idx) {
    for (int32_t g = 0; g < cache->n_groups; g++) {
        const paged__block *block = &cache->groups[g].blocks[paged__seq_table(cache, g, seq)[idx]];
        if (block->refs > 1 || block->indexed) return true;
    }
    return false;
}

static void plan_change(const paged_cache *cache, const paged__seq *seq, int32_t n_tokens, change *c) {
    int64_t want = paged__entries_for(cache, (int64_t)seq->len + n_tokens, seq->n_entries);
    int32_t idx = seq->len / cache->block_size;
    c->want = (int32_t)PAGED_MIN(want, (int64_t)INT32_MAX - 1);
    c->n_entries = PAGED_MAX(c->want - seq->n_entries, 0);
    c->copy_idx =
        n_tokens > 0 && seq->len % cache->block_size != 0 && paged__seq_shares(cache, seq, idx) ? idx : -1;
}

static int32_t n_taken_by(const change *c) {
    return c->n_entries + (c->copy_idx >= 0);
}

/* Gives back what take_blocks() took: n_entries entries and, if it is not -1, the copy. */
static void untake_blocks(paged_cache *cache, const paged__seq *seq, int32_t group, int32_t n_entries,
                          int32_t copy) {
    int32_t *table = paged__seq_table(cache, group, seq);
    for (int32_t i = seq->n_entries + n_entries - 1; i >= seq->n_entries; i--) {
        paged__block_unref(cache, group, table[i]);
        table[i] = -1;
    }
    if (copy >= 0) paged__block_unref(cache, group, copy);
}

/* Takes the blocks of a change, all or none. New entries are put behind the table's end, the copied block
 * comes out in *copy. */
static paged_status take_blocks(paged_cache *cache, const paged__seq *seq, int32_t group, const change *c,
                                int32_t *copy) {
    int32_t *table = paged__seq_table(cache, group, seq), n_entries = 0;
    size_t block_bytes = cache->groups[group].block_bytes;
    paged_status status = PAGED_OK;
    *copy = -1;
    if (c->copy_idx >= 0) {
        status = paged__block_take(cache, group, copy);
        if (status != PAGED_OK) return status;
        status = cache->arena.copy(cache->arena.ctx, (size_t)*copy * block_bytes,
                                   (size_t)table[c->copy_idx] * block_bytes, block_bytes);
    }
    while (n_entries < c->n_entries && status == PAGED_OK) {
        status = paged__block_take(cache, group, &table[seq->n_entries + n_entries]);
        n_entries += status == PAGED_OK;
    }
    if (status != PAGED_OK) untake_blocks(cache, seq, group, n_entries, *copy);
    return status;
}

/* Makes a change whose blocks are taken. Cannot fail. */
static void apply_change(paged_cache *cache, const paged__seq *seq, int32_t group, const change *c,
                         int32_t copy) {
    int32_t *table = paged__seq_table(cache, group, seq);
    cache->n_allocs += (uint64_t)n_taken_by(c);
    if (copy >= 0) {
        cache->n_frees += paged__block_unref(cache, group, table[c->copy_idx]);
        cache->n_copies++;
        table[c->copy_idx] = copy;
    }
    for (int32_t i = seq->n_entries - 1; i >= c->want; i--) {
        cache->n_frees += paged__block_unref(cache, group, table[i]);
        table[i] = -1;
    }
}

paged_status paged_seq_reserve(paged_cache *cache, paged_seq handle, int32_t n_tokens) {
    paged__seq *seq = paged__seq_find(cache, handle);
    change c;
    int32_t need[PAGED_GROUPS_MAX], copies[PAGED_GROUPS_MAX], g;
    if (!seq) return PAGED_ERR_STALE;
    if (n_tokens < 0) return PAGED_ERR_INVALID_ARG;
    if (n_tokens > cache->max_seq_tokens - seq->len) return PAGED_ERR_TOO_LONG;
    plan_change(cache, seq, n_tokens, &c);
    for (g = 0; g < cache->n_groups; g++) need[g] = n_taken_by(&c);
    if (!paged__room_possible(cache, need) || !paged__make_room(cache, need)) {
        cache->n_refused++;
        return PAGED_ERR_NO_BLOCKS;
    }
    paged_status status = PAGED_OK;
    for (g = 0; g < cache->n_groups && status == PAGED_OK; g++) {
        status = take_blocks(cache, seq, g, &c, &copies[g]);
    }
    if (status != PAGED_OK) {
        /* Group g - 1 is the one that failed; it has undone its own. */
        for (g -= 2; g >= 0; g--) untake_blocks(cache, seq, g, c.n_entries, copies[g]);
        return status;
    }
    for (g = 0; g < cache->n_groups; g++) apply_change(cache, seq, g, &c, copies[g]);
    seq->n_entries = c.want;
    seq->reserved = n_tokens;
    paged__settle_limit(cache);
    return PAGED_OK;
}

int32_t paged_seq_blocks_needed(const paged_cache *cache, paged_seq handle, int32_t group, int32_t n_tokens) {
    const paged__seq *seq = paged__seq_find(cache, handle);
    if (!seq || group < 0 || group >= cache->n_groups || n_tokens < 0) return -1;
    change c;
    plan_change(cache, seq, n_tokens, &c);
    return n_taken_by(&c);
}

/* ---- what needs no blocks ---- */

paged_status paged_seq_slots(const paged_cache *cache, paged_seq handle, int32_t group, int32_t first,
                             int32_t n, int64_t *slots) {
    const paged__seq *seq = paged__seq_find(cache, handle);
    if (!seq) return PAGED_ERR_STALE;
    if (group < 0 || group >= cache->n_groups || first < 0 || n < 0 || (n > 0 && !slots) ||
        (int64_t)first + n > (int64_t)seq->len + seq->reserved)
        return PAGED_ERR_INVALID_ARG;
    const int32_t *table = paged__seq_table(cache, group, seq);
    if (n > 0 && first / cache->block_size < paged__seq_first(cache, group, seq))
        return PAGED_ERR_INVALID_ARG;
    for (int32_t i = 0; i < n; i++) {
        int32_t pos = first + i;
        slots[i] = (int64_t)table[pos / cache->block_size] * cache->block_size + pos % cache->block_size;
    }
    return PAGED_OK;
}

/* Gives back the blocks that the token behind a sequence of len tokens saw and the next one does not. */
static void leave_window(paged_cache *cache, const paged__seq *seq, int32_t group, int32_t len) {
    int32_t *table = paged__seq_table(cache, group, seq), end = paged__seq_first(cache, group, seq);
    for (int32_t i = paged__window_first(cache, group, len); i < end; i++) {
        cache->n_frees += paged__block_unref(cache, group, table[i]);
        table[i] = -1;
    }
}

paged_status paged_seq_commit(paged_cache *cache, paged_seq handle, const int32_t *tokens, int32_t n_tokens) {
    paged__seq *seq = paged__seq_find(cache, handle);
    if (!seq) return PAGED_ERR_STALE;
    if (n_tokens < 0 || n_tokens > seq->reserved || (n_tokens > 0 && !tokens)) return PAGED_ERR_INVALID_ARG;
    if (n_tokens > 0) memcpy(seq->tokens + seq->len, tokens, (size_t)n_tokens * sizeof *tokens);
    seq->len += n_tokens;
    seq->reserved -= n_tokens;
    cache->n_tokens += n_tokens;
    if (seq->space >= 0) paged__prefix_commit(cache, seq, seq->len - n_tokens);
    for (int32_t g = 0; g < cache->n_groups; g++) leave_window(cache, seq, g, seq->len - n_tokens);
    paged__settle_limit(cache);
    return PAGED_OK;
}

/* The tip of a sequence that is cut to n_full full blocks. */
static void step_back(paged_cache *cache, paged__seq *seq, int32_t n_full) {
    int32_t node = seq->tip, before = seq->tip;
    for (int32_t i = seq->len / cache->block_size; i > n_full; i--) node = cache->nodes[node].parent;
    if (node == before) return;
    paged__node_enter(cache, node);
    seq->tip = node;
    paged__node_leave(cache, before);
}

paged_status paged_seq_truncate(paged_cache *cache, paged_seq handle, int32_t n_tokens) {
    paged__seq *seq = paged__seq_find(cache, handle);
    if (!seq) return PAGED_ERR_STALE;
    if (n_tokens < 0 || n_tokens > seq->len) return PAGED_ERR_INVALID_ARG;
    for (int32_t g = 0; g < cache->n_groups && n_tokens > 0; g++)
        if (paged__window_first(cache, g, n_tokens) < paged__seq_first(cache, g, seq))
            return PAGED_ERR_INVALID_ARG; /* what it would see is gone */
    if (seq->space >= 0) step_back(cache, seq, n_tokens / cache->block_size);
    drop_entries(cache, seq, paged__entries_for(cache, n_tokens, seq->n_entries));
    cache->n_tokens -= seq->len - n_tokens;
    seq->len = n_tokens;
    seq->reserved = 0;
    paged__settle_limit(cache);
    return PAGED_OK;
}

/* A fork in contiguous mode: blocks of its own, and a copy. */
static paged_status fork_copied(paged_cache *cache, const paged__seq *parent, paged_seq *out) {
    paged_seq handle;
    paged__seq *child = open_row(cache, &handle);
    int32_t n_blocks = paged__ceil_div(parent->len, cache->block_size);
    paged_status status = paged_seq_reserve(cache, handle, parent->len);
    for (int32_t g = 0; g < cache->n_groups && n_blocks > 0 && status == PAGED_OK; g++) {
        size_t block_bytes = cache->groups[g].block_bytes;
        status = cache->arena.copy(
            cache->arena.ctx, (size_t)paged__seq_table(cache, g, child)[0] * block_bytes,
            (size_t)paged__seq_table(cache, g, parent)[0] * block_bytes, (size_t)n_blocks * block_bytes);
    }
    if (status == PAGED_OK) status = paged_seq_commit(cache, handle, parent->tokens, parent->len);
    if (status != PAGED_OK) {
        paged_seq_free(cache, handle);
        return status;
    }
    cache->n_copies += (uint64_t)n_blocks * (uint64_t)cache->n_groups;
    *out = handle;
    return PAGED_OK;
}

paged_status paged_seq_fork(paged_cache *cache, paged_seq parent_handle, paged_seq *out) {
    const paged__seq *parent = paged__seq_find(cache, parent_handle);
    if (!parent) return PAGED_ERR_STALE;
    if (!out) return PAGED_ERR_INVALID_ARG;
    if (cache->free_seq < 0) return PAGED_ERR_NO_SEQS;
    if (cache->contiguous) return fork_copied(cache, parent, out);
    int32_t n_entries = paged__ceil_div(parent->len, cache->block_size);
    paged__seq *child = open_row(cache, out);
    memcpy(child->tokens, parent->tokens, (size_t)parent->len * sizeof *child->tokens);
    child->len = parent->len;
    child->n_entries = n_entries;
    child->space = parent->space;
    child->tip = parent->tip;
    paged__node_enter(cache, child->tip);
    if (child->space >= 0) cache->spaces[child->space].n_refs++;
    cache->n_tokens += child->len;
    for (int32_t g = 0; g < cache->n_groups; g++) {
        const int32_t *from = paged__seq_table(cache, g, parent);
        int32_t *to = paged__seq_table(cache, g, child);
        for (int32_t i = paged__seq_first(cache, g, parent); i < n_entries; i++) {
            paged__block_ref(cache, g, from[i]);
            to[i] = from[i];
        }
    }
    return PAGED_OK;
}

int32_t paged_seq_len(const paged_cache *cache, paged_seq handle) {
    const paged__seq *seq = paged__seq_find(cache, handle);
    return seq ? seq->len : -1;
}

int32_t paged_seq_reserved(const paged_cache *cache, paged_seq handle) {
    const paged__seq *seq = paged__seq_find(cache, handle);
    return seq ? seq->reserved : -1;
}

const int32_t *paged_seq_tokens(const paged_cache *cache, paged_seq handle) {
    const paged__seq *seq = paged__seq_find(cache, handle);
    return seq ? seq->tokens : NULL;
}

int32_t paged_seq_first_k(const paged_cache *cache, paged_seq handle, int32_t group) {
    const paged__seq *seq = paged__seq_find(cache, handle);
    if (!seq || group < 0 || group >= cache->n_groups) return -1;
    return paged__seq_first(cache, group, seq) * cache->block_size;
}

int32_t paged_seq_row(const paged_cache *cache, paged_seq handle) {
    const paged__seq *seq = paged__seq_find(cache, handle);
    return seq ? row_of(cache, seq) : -1;
}
