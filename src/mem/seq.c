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
        cache->promises[i].producer = -1;
        cache->seqs[i] = (paged__seq){.tag = salt,
                                      .space = -1,
                                      .tip = -1,
                                      .next_free = i + 1 < cache->max_seqs ? i + 1 : -1,
                                      .tokens = cache->tokens + i * cache->token_stride};
    }
    cache->free_seq = 0;
    int64_t n_entries = cache->max_seqs * cache->table_stride;
    int64_t n_tiles = (int64_t)cache->max_seqs * cache->n_tiles;
    for (int32_t g = 0; g < cache->n_groups; g++) {
        for (int64_t i = 0; i < n_entries; i++) cache->groups[g].tables[i] = -1;
        for (int64_t i = 0; i < n_tiles; i++) cache->groups[g].tail_tiles[i] = -1;
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
    bool drops_tail = seq->has_tail && n_entries < seq->n_entries;
    for (int32_t g = 0; g < cache->n_groups; g++) {
        if (drops_tail) paged__tail_cut(cache, seq, g, 0);
        int32_t *table = paged__seq_table(cache, g, seq);
        int32_t first = PAGED_MAX(n_entries, paged__seq_first(cache, g, seq));
        for (int32_t i = seq->n_entries - 1 - drops_tail; i >= first; i--) {
            cache->n_frees += paged__block_unref(cache, g, table[i]);
            table[i] = -1;
        }
    }
    seq->has_tail &= !drops_tail;
    seq->n_entries = PAGED_MIN(seq->n_entries, n_entries);
}

paged_status paged_seq_free(paged_cache *cache, paged_seq handle) {
    paged__seq *seq = paged__seq_find(cache, handle);
    if (!seq) return PAGED_ERR_STALE;
    if (seq->space >= 0) paged__prefix_seal(cache, seq);
    paged__promise_end(cache, row_of(cache, seq)); /* those who wait find what was sealed */
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

/* What a reservation does, to every group alike. Entries that hold nothing committed keep the blocks that
 * they have. With packed tails the last entry, if it is not filled, becomes a tail or stays one; a tail that
 * more follows after becomes a block. */
typedef struct change {
    int32_t want;     /* entries afterwards */
    int32_t n_blocks; /* blocks to take for new entries */
    /* Entry with committed tokens that is shared, indexed or a tail, and cannot be written as it is, so that
     * it needs a copy; -1: none. What it is and what it becomes: a tail, else a block. */
    int32_t copy_idx;
    bool from_tail, to_tail;
    int32_t fill_idx;        /* a tail without committed tokens that becomes a block; -1: none */
    bool drops_tail;         /* the old tail is none any more */
    int32_t n_tiles, n_keep; /* of the tail afterwards; the first n_keep are those it has */
    int32_t copy_tile;       /* of those: the one that is shared and will be written; -1: none */
} change;

bool paged__seq_shares(const paged_cache *cache, const paged__seq *seq, int32_t idx) {
    for (int32_t g = 0; g < cache->n_groups; g++) {
        const paged__block *block = &cache->groups[g].blocks[paged__seq_table(cache, g, seq)[idx]];
        if (block->refs > 1 || block->indexed) return true;
    }
    return false;
}

static void plan_tail(const paged_cache *cache, const paged__seq *seq, int32_t n_tokens, change *c) {
    /* In the last entry. Where more is asked for than a table holds it is nonsense, which nobody uses. */
    int64_t in_last = (int64_t)seq->len + n_tokens - ((int64_t)c->want - 1) * cache->block_size;
    int32_t end = (int32_t)PAGED_MIN(in_last, (int64_t)cache->block_size);
    int32_t idx = seq->len / cache->block_size, offset = seq->len % cache->block_size;
    int32_t tail = seq->has_tail ? seq->n_entries - 1 : -1;
    bool partial = end < cache->block_size, keeps = partial && tail == c->want - 1;
    bool adds = partial && c->want > seq->n_entries;
    c->to_tail = partial && c->copy_idx == c->want - 1;
    if (c->want == 0 || !(keeps || adds || c->to_tail)) end = 0;
    c->n_blocks -= adds;
    c->n_tiles = paged__ceil_div(end, PAGED_TILE);
    c->drops_tail = tail >= 0 && !keeps;
    if (keeps) {
        c->n_keep = PAGED_MIN(paged__seq_n_tiles(cache, seq), c->n_tiles);
        if (n_tokens > 0 && tail == idx && offset % PAGED_TILE &&
            paged__tail_shares(cache, seq, offset / PAGED_TILE))
            c->copy_tile = offset / PAGED_TILE;
    } else if (tail >= 0 && tail < c->want) {
        c->from_tail = tail == idx && offset > 0;
        if (c->from_tail)
            c->copy_idx = tail;
        else
            c->fill_idx = tail;
    }
}

static void plan_change(const paged_cache *cache, const paged__seq *seq, int32_t n_tokens, change *c) {
    int64_t want = paged__entries_for(cache, (int64_t)seq->len + n_tokens, seq->n_entries);
    int32_t idx = seq->len / cache->block_size;
    *c = (change){.copy_idx = -1, .fill_idx = -1, .copy_tile = -1};
    c->want = (int32_t)PAGED_MIN(want, (int64_t)INT32_MAX - 1);
    c->n_blocks = PAGED_MAX(c->want - seq->n_entries, 0);
    if (n_tokens > 0 && seq->len % cache->block_size != 0 && !(seq->has_tail && idx == seq->n_entries - 1) &&
        paged__seq_shares(cache, seq, idx))
        c->copy_idx = idx;
    if (cache->n_tiles) plan_tail(cache, seq, n_tokens, c);
}

/* Blocks that are taken as such. */
static int32_t n_taken_by(const change *c) {
    return c->n_blocks + (c->copy_idx >= 0 && !c->to_tail) + (c->fill_idx >= 0);
}

static int32_t n_tiles_taken_by(const change *c) {
    return c->n_tiles - c->n_keep + (c->copy_tile >= 0);
}

static int32_t blocks_needed(const paged_cache *cache, int32_t group, const change *c) {
    int32_t n_tiles = n_tiles_taken_by(c);
    return n_taken_by(c) + (n_tiles ? paged__tiles_blocks(cache, group, n_tiles) : 0);
}

/* What was taken for a change in one group. New entries are put behind the table's end at once. */
typedef struct taken {
    int32_t copy, fill, n_blocks, n_tiles; /* -1: none */
    int32_t tiles[PAGED__TILES_MAX + 1];   /* [n_tiles] the copied one first */
} taken;

static void untake(paged_cache *cache, const paged__seq *seq, int32_t group, taken *t) {
    int32_t *table = paged__seq_table(cache, group, seq);
    paged__tiles_untake(cache, group, t->n_tiles, t->tiles);
    for (int32_t i = seq->n_entries + t->n_blocks - 1; i >= seq->n_entries; i--) {
        paged__block_unref(cache, group, table[i]);
        table[i] = -1;
    }
    if (t->fill >= 0) paged__block_unref(cache, group, t->fill);
    if (t->copy >= 0) paged__block_unref(cache, group, t->copy);
}

/* The committed tokens of an entry that cannot be written as it is, to where they will be. */
static paged_status copy_committed(paged_cache *cache, const paged__seq *seq, int32_t group, const change *c,
                                   const taken *t) {
    int32_t from = paged__seq_table(cache, group, seq)[PAGED_MAX(c->copy_idx, 0)];
    int32_t n_tokens = seq->len % cache->block_size;
    size_t block_bytes = cache->groups[group].block_bytes;
    if (c->copy_tile >= 0)
        return paged__tile_copy(cache, group, t->tiles[0], paged__seq_tiles(cache, group, seq)[c->copy_tile]);
    if (c->copy_idx < 0) return PAGED_OK;
    if (c->from_tail) return paged__tail_to_block(cache, seq, group, t->copy, n_tokens);
    if (c->to_tail) return paged__tail_from_block(cache, group, t->tiles, from, n_tokens);
    return cache->arena.copy(cache->arena.ctx, (size_t)t->copy * block_bytes, (size_t)from * block_bytes,
                             block_bytes);
}

/* Takes what a change needs, all or nothing. */
static paged_status take(paged_cache *cache, const paged__seq *seq, int32_t group, const change *c,
                         taken *t) {
    int32_t *table = paged__seq_table(cache, group, seq), n_tiles = n_tiles_taken_by(c);
    paged_status status = PAGED_OK;
    t->copy = t->fill = -1;
    t->n_blocks = t->n_tiles = 0;
    if (c->copy_idx >= 0 && !c->to_tail) status = paged__block_take(cache, group, &t->copy);
    if (c->fill_idx >= 0 && status == PAGED_OK) status = paged__block_take(cache, group, &t->fill);
    while (t->n_blocks < c->n_blocks && status == PAGED_OK) {
        status = paged__block_take(cache, group, &table[seq->n_entries + t->n_blocks]);
        t->n_blocks += status == PAGED_OK;
    }
    if (n_tiles > 0 && status == PAGED_OK) {
        status = paged__tiles_take(cache, group, n_tiles, t->tiles);
        if (status == PAGED_OK) t->n_tiles = n_tiles;
    }
    if (status == PAGED_OK) status = copy_committed(cache, seq, group, c, t);
    if (status != PAGED_OK) untake(cache, seq, group, t);
    return status;
}

static void apply_tail(paged_cache *cache, paged__seq *seq, int32_t group, const change *c, const taken *t) {
    int32_t *tiles = paged__seq_tiles(cache, group, seq);
    const int32_t *next = t->tiles;
    paged__tail_cut(cache, seq, group, c->drops_tail ? 0 : c->n_tiles);
    if (c->copy_tile >= 0) {
        cache->n_frees += paged__tile_unref(cache, group, tiles[c->copy_tile]);
        cache->n_copies++;
        paged__tile_name(cache, group, row_of(cache, seq), &tiles[c->copy_tile], *next++);
    }
    for (int32_t i = c->n_keep; i < c->n_tiles; i++)
        paged__tile_name(cache, group, row_of(cache, seq), &tiles[i], *next++);
}

/* Makes a change whose blocks are taken. Cannot fail. */
static void apply_change(paged_cache *cache, paged__seq *seq, int32_t group, const change *c,
                         const taken *t) {
    int32_t *table = paged__seq_table(cache, group, seq);
    cache->n_allocs += (uint64_t)n_taken_by(c);
    if (c->copy_idx >= 0) {
        if (c->from_tail) {
            cache->n_packed++;
        } else {
            cache->n_frees += paged__block_unref(cache, group, table[c->copy_idx]);
            cache->n_copies++;
        }
        table[c->copy_idx] = t->copy;
    }
    if (c->fill_idx >= 0) table[c->fill_idx] = t->fill;
    for (int32_t i = seq->n_entries - 1; i >= c->want; i--) {
        if (table[i] < 0) continue; /* the tail */
        cache->n_frees += paged__block_unref(cache, group, table[i]);
        table[i] = -1;
    }
    if (cache->n_tiles) apply_tail(cache, seq, group, c, t);
}

paged_status paged_seq_reserve(paged_cache *cache, paged_seq handle, int32_t n_tokens) {
    paged__seq *seq = paged__seq_find(cache, handle);
    change c;
    taken got[PAGED_GROUPS_MAX];
    int32_t need[PAGED_GROUPS_MAX], g;
    if (!seq) return PAGED_ERR_STALE;
    if (n_tokens < 0) return PAGED_ERR_INVALID_ARG;
    if (n_tokens > cache->max_seq_tokens - seq->len) return PAGED_ERR_TOO_LONG;
    plan_change(cache, seq, n_tokens, &c);
    for (g = 0; g < cache->n_groups; g++) need[g] = blocks_needed(cache, g, &c);
    if (!paged__make_room(cache, need)) {
        cache->n_refused++;
        return PAGED_ERR_NO_BLOCKS;
    }
    paged_status status = PAGED_OK;
    for (g = 0; g < cache->n_groups && status == PAGED_OK; g++) {
        status = take(cache, seq, g, &c, &got[g]);
    }
    if (status != PAGED_OK) {
        /* Group g - 1 is the one that failed; it has undone its own. */
        for (g -= 2; g >= 0; g--) untake(cache, seq, g, &got[g]);
        return status;
    }
    for (g = 0; g < cache->n_groups; g++) apply_change(cache, seq, g, &c, &got[g]);
    if (n_tokens > 0) paged__promise_check(cache, row_of(cache, seq), seq->len, NULL, 0);
    seq->n_entries = c.want;
    seq->has_tail = c.n_tiles > 0;
    seq->reserved = n_tokens;
    paged__settle_limit(cache);
    return PAGED_OK;
}

int32_t paged_seq_blocks_needed(const paged_cache *cache, paged_seq handle, int32_t group, int32_t n_tokens) {
    const paged__seq *seq = paged__seq_find(cache, handle);
    if (!seq || group < 0 || group >= cache->n_groups || n_tokens < 0) return -1;
    change c;
    plan_change(cache, seq, n_tokens, &c);
    return blocks_needed(cache, group, &c);
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
    int32_t n_blocks = seq->n_entries - seq->has_tail;
    for (int32_t i = 0; i < n; i++) {
        int32_t pos = first + i, idx = pos / cache->block_size, offset = pos % cache->block_size;
        slots[i] = idx < n_blocks
                       ? (int64_t)table[idx] * cache->block_size + offset
                       : (int64_t)paged__seq_tiles(cache, group, seq)[offset / PAGED_TILE] * PAGED_TILE +
                             offset % PAGED_TILE;
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
    int32_t row = row_of(cache, seq);
    if (cache->promises[row].n_tokens) paged__promise_check(cache, row, seq->len, tokens, n_tokens);
    if (n_tokens > 0) memcpy(seq->tokens + seq->len, tokens, (size_t)n_tokens * sizeof *tokens);
    seq->len += n_tokens;
    seq->reserved -= n_tokens;
    cache->n_tokens += n_tokens;
    if (seq->space >= 0) paged__prefix_commit(cache, seq, seq->len - n_tokens);
    for (int32_t g = 0; g < cache->n_groups; g++) leave_window(cache, seq, g, seq->len - n_tokens);
    if (cache->promises[row].n_waiters) paged__promise_kept(cache, row);
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
    if (n_tokens < seq->len) paged__promise_end(cache, row_of(cache, seq));
    if (seq->space >= 0) step_back(cache, seq, n_tokens / cache->block_size);
    drop_entries(cache, seq, paged__entries_for(cache, n_tokens, seq->n_entries));
    cache->n_tokens -= seq->len - n_tokens;
    seq->len = n_tokens;
    seq->reserved = 0;
    for (int32_t g = 0; g < cache->n_groups && seq->has_tail; g++)
        paged__tail_cut(cache, seq, g, paged__seq_n_tiles(cache, seq));
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
    child->has_tail = parent->has_tail && n_entries == parent->n_entries;
    child->space = parent->space;
    child->tip = parent->tip;
    paged__node_enter(cache, child->tip);
    if (child->space >= 0) cache->spaces[child->space].n_refs++;
    cache->n_tokens += child->len;
    for (int32_t g = 0; g < cache->n_groups; g++) {
        const int32_t *from = paged__seq_table(cache, g, parent);
        int32_t *to = paged__seq_table(cache, g, child);
        for (int32_t i = paged__seq_first(cache, g, parent); i < n_entries; i++) {
            if (from[i] < 0) continue; /* the tail */
            paged__block_ref(cache, g, from[i]);
            to[i] = from[i];
        }
        for (int32_t i = 0; i < paged__seq_n_tiles(cache, child); i++) {
            int32_t tile = paged__seq_tiles(cache, g, parent)[i];
            paged__tile_ref(cache, g, tile);
            paged__seq_tiles(cache, g, child)[i] = tile;
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
