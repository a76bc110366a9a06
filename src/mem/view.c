/* mem/view.c: the cache for those who look at it: what each block is, and which tokens it holds. */
#include "mem/mem.h"

/* A block of the group lies there: it does not go across the border of two extents. */
static bool exists(const paged_cache *cache, int32_t group, int32_t block) {
    if (!cache || group < 0 || group >= cache->n_groups || block < 0 || block >= cache->groups[group].n_ids)
        return false;
    const int32_t extent = paged__extent_of(cache, group, block);
    int32_t first, n_blocks;
    if (extent >= cache->n_extents) return false;
    paged__extent_range(cache, group, extent, &first, &n_blocks);
    return block >= first && block < first + n_blocks;
}

int32_t paged_block_refs(const paged_cache *cache, int32_t group, int32_t block) {
    return exists(cache, group, block) ? cache->groups[group].blocks[block].refs : -1;
}

static bool is_backed(const paged_cache *cache, const paged__group *g, int32_t block) {
    const size_t begin = (size_t)block * g->block_bytes, end = begin + g->block_bytes;
    for (size_t i = begin >> cache->granule_shift; i << cache->granule_shift < end; i++)
        if (!cache->granules[i].backed) return false;
    return true;
}

int32_t paged_cache_blocks(const paged_cache *cache, int32_t group, int32_t first, int32_t n,
                           paged_block_view *out) {
    if (!cache || group < 0 || group >= cache->n_groups || first < 0 || n < 0) return -1;
    const paged__group *g = &cache->groups[group];
    n = PAGED_MAX(0, PAGED_MIN(n, g->n_ids - first));
    for (int32_t i = 0; i < n; i++) {
        const int32_t block = first + i;
        out[i] = (paged_block_view){.state = PAGED_BLOCK_ABSENT};
        if (!exists(cache, group, block)) continue;
        const int32_t owner = cache->extents[paged__extent_of(cache, group, block)].owner;
        if (owner >= 0 && owner != group) continue;
        const paged__block *b = &g->blocks[block];
        out[i].backed = is_backed(cache, g, block);
        out[i].state = PAGED_BLOCK_FREE;
        if (owner < 0) continue;
        out[i].refs = b->refs;
        out[i].indexed = b->state != PAGED__BLOCK_FREE && b->indexed;
        out[i].state = b->state == PAGED__BLOCK_USED      ? PAGED_BLOCK_USED
                       : b->state == PAGED__BLOCK_CACHED  ? PAGED_BLOCK_CACHED
                       : b->state == PAGED__BLOCK_DIVIDED ? PAGED_BLOCK_TAILS
                                                          : PAGED_BLOCK_FREE;
    }
    return n;
}

/* How many nodes come before it. */
static int32_t depth_of(const paged_cache *cache, int32_t node) {
    int32_t depth = 0;
    while ((node = cache->nodes[node].parent) >= 0) depth++;
    return depth;
}

int32_t paged_block_tokens(const paged_cache *cache, int32_t group, int32_t block, int32_t *tokens,
                           int32_t *position) {
    if (!exists(cache, group, block)) return -1;
    const paged__group *g = &cache->groups[group];
    const paged__block *b = &g->blocks[block];
    const int32_t extent = paged__extent_of(cache, group, block);
    *position = 0;
    if (cache->extents[extent].owner != group || b->state == PAGED__BLOCK_FREE) return 0;
    if (b->indexed) {
        const int32_t n = cache->nodes[b->node].n_tokens;
        memcpy(tokens, paged__node_tokens(cache, b->node), (size_t)n * sizeof *tokens);
        *position = depth_of(cache, b->node) * cache->block_size;
        return n;
    }
    /* Sequences that share it agree on its place and tokens; the longest has them all. */
    int32_t n_best = 0;
    for (int32_t row = 0; row < cache->max_seqs; row++) {
        const paged__seq *seq = &cache->seqs[row];
        if (!seq->live) continue;
        const int32_t *table = paged__seq_table(cache, group, seq);
        for (int32_t i = 0; i < seq->n_entries; i++) {
            const int32_t n = PAGED_MIN(seq->len - i * cache->block_size, cache->block_size);
            if (table[i] != block || n <= n_best) continue;
            memcpy(tokens, seq->tokens + (int64_t)i * cache->block_size, (size_t)n * sizeof *tokens);
            *position = i * cache->block_size;
            n_best = n;
        }
    }
    return n_best;
}
