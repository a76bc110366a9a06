/* compact.c: gathers blocks, so that memory between them can go back.
 *
 * The emptiest extents are drained into the fullest ones. An extent is begun only if the free blocks of the
 * others hold all of its own; so each step ends nearer to one more empty extent, and there is an end. First
 * everything is copied, which can fail and is undone then; after that names change, which cannot.
 * Tiles of packed tails go before, each for itself (tail.c).
 *
 * A move is written into the working space of check and stats, which is zero between calls: recount[from] has
 * the target + 1 in last_row and the next move's source + 1 in last_idx; recount[target] has n_writers 1. */
#include "mem/mem.h"

enum { N_LOOKED_AT = 64 }; /* extents that are tried as a source each time */

typedef struct compaction {
    size_t rest_bytes;               /* of the budget */
    bool in_use;                     /* blocks in use may move */
    int32_t moves[PAGED_GROUPS_MAX]; /* source of the newest move + 1; 0: none */
    int32_t drained;                 /* extents taken off their lists, linked by next; -1: end */
} compaction;

/* Somebody reads or writes the bytes of one in transfer. */
static bool may_move(const compaction *c, const paged__block *block) {
    if (block->n_transfers) return false;
    return block->state == PAGED__BLOCK_CACHED || (block->state == PAGED__BLOCK_USED && c->in_use);
}

/* All blocks of the extent can go, none of them has just come, and there is room for them elsewhere. */
static bool is_source(const paged_cache *cache, const compaction *c, const paged__group *gr, int32_t extent) {
    const paged__extent *e = &cache->extents[extent];
    if (gr->n_free < e->n_blocks) return false;
    for (int32_t b = e->first; b < e->first + e->n_fresh; b++) {
        if (gr->blocks[b].state == PAGED__BLOCK_FREE) continue;
        if (!may_move(c, &gr->blocks[b]) || gr->recount[b].n_writers) return false;
    }
    return true;
}

/* The emptiest extent that can be drained; -1: none of those looked at. */
static int32_t find_source(const paged_cache *cache, const compaction *c, const paged__group *gr) {
    int32_t n_left = N_LOOKED_AT;
    for (uint64_t rest = gr->fullness; rest; rest &= rest - 1) {
        for (int32_t i = gr->partial[__builtin_ctzll(rest)]; i >= 0; i = cache->extents[i].next) {
            if (n_left-- == 0) return -1;
            if (is_source(cache, c, gr, i)) return i;
        }
    }
    return -1;
}

/* Takes a target for each block of the extent and copies, as far as the budget goes. Errors: of the arena. */
static paged_status drain(paged_cache *cache, compaction *c, int32_t group, int32_t extent) {
    const paged__extent *e = &cache->extents[extent];
    const paged__group *gr = &cache->groups[group];
    for (int32_t b = e->first; b < e->first + e->n_fresh && c->rest_bytes >= gr->block_bytes; b++) {
        int32_t to;
        if (gr->blocks[b].state == PAGED__BLOCK_FREE) continue;
        paged_status status = paged__block_take(cache, group, &to);
        if (status != PAGED_OK) return status;
        gr->recount[to].n_writers = 1;
        gr->recount[b].last_row = to + 1;
        gr->recount[b].last_idx = c->moves[group];
        c->moves[group] = b + 1;
        status = cache->arena.copy(cache->arena.ctx, (size_t)to * gr->block_bytes,
                                   (size_t)b * gr->block_bytes, gr->block_bytes);
        if (status != PAGED_OK) return status;
        c->rest_bytes -= gr->block_bytes;
    }
    return PAGED_OK;
}

static paged_status copy_blocks(paged_cache *cache, compaction *c, int32_t group) {
    paged_status status = PAGED_OK;
    while (c->rest_bytes >= cache->groups[group].block_bytes && status == PAGED_OK) {
        int32_t extent = find_source(cache, c, &cache->groups[group]);
        if (extent < 0) break;
        paged__extent_detach(cache, extent); /* nothing is taken from it now */
        cache->extents[extent].next = c->drained;
        c->drained = extent;
        status = drain(cache, c, group, extent);
    }
    return status;
}

/* In every table, what moved gets its new name. */
static void rewrite_tables(paged_cache *cache) {
    for (int32_t g = 0; g < cache->n_groups; g++) {
        const paged__group *gr = &cache->groups[g];
        for (int32_t row = 0; row < cache->max_seqs; row++) {
            int32_t *table = paged__seq_table(cache, g, &cache->seqs[row]);
            for (int32_t i = 0; i < cache->seqs[row].n_entries; i++) {
                int32_t to = table[i] >= 0 ? gr->recount[table[i]].last_row : 0;
                if (to > 0) table[i] = to - 1;
            }
        }
    }
}

/* Ends all moves of a group, done or not, and clears the working space. */
static void finish_moves(paged_cache *cache, compaction *c, int32_t group, bool done) {
    paged__group *gr = &cache->groups[group];
    while (c->moves[group] > 0) {
        int32_t from = c->moves[group] - 1, to = gr->recount[from].last_row - 1;
        c->moves[group] = gr->recount[from].last_idx;
        gr->recount[from] = gr->recount[to] = (paged__recount){0};
        if (done)
            paged__block_move(cache, group, from, to);
        else
            paged__block_unref(cache, group, to);
        cache->n_moves += done;
    }
}

paged_status paged_cache_compact(paged_cache *cache, size_t budget_bytes, bool in_use, size_t *moved_bytes) {
    compaction c = {.rest_bytes = budget_bytes, .in_use = in_use, .drained = -1};
    paged_status status = PAGED_OK;
    if (!cache) return PAGED_ERR_INVALID_ARG;
    for (int32_t g = 0; g < cache->n_groups && in_use && cache->n_tiles && status == PAGED_OK; g++)
        status = paged__tails_compact(cache, g, &c.rest_bytes);
    if (status != PAGED_OK) return status;
    size_t for_blocks = c.rest_bytes;
    for (int32_t g = 0; g < cache->n_groups && status == PAGED_OK; g++) status = copy_blocks(cache, &c, g);
    for (int32_t next, e = c.drained; e >= 0; e = next) {
        next = cache->extents[e].next;
        paged__extent_attach(cache, e);
    }
    if (status == PAGED_OK && in_use && c.rest_bytes < for_blocks) rewrite_tables(cache);
    for (int32_t g = 0; g < cache->n_groups; g++) finish_moves(cache, &c, g, status == PAGED_OK);
    if (status == PAGED_OK && moved_bytes) *moved_bytes = budget_bytes - c.rest_bytes;
    return status;
}
