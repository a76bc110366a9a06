/* hold.c: transfers: blocks whose bytes somebody else reads or writes while the cache goes on.
 *
 * A transfer is a reference like any other, counted in the block besides, so that compaction leaves it where
 * it is. One of an entry makes the node a used one, and takes references to what is before it in groups
 * without a window: so parents of blocks in use are in use, as everywhere (mem.h). */
#include "mem/mem.h"

static void hold_block(paged_cache *cache, int32_t group, int32_t block) {
    paged__block_ref(cache, group, block);
    cache->groups[group].blocks[block].n_transfers++;
}

static void release_block(paged_cache *cache, int32_t group, int32_t block) {
    PAGED_ASSERT(cache->groups[group].blocks[block].n_transfers > 0);
    cache->groups[group].blocks[block].n_transfers--;
    cache->n_frees += paged__block_unref(cache, group, block);
}

paged_status paged_block_hold(paged_cache *cache, int32_t group, int32_t block) {
    if (!cache || group < 0 || group >= cache->n_groups || block < 0 || block >= cache->groups[group].n_ids ||
        cache->groups[group].blocks[block].state != PAGED__BLOCK_USED)
        return PAGED_ERR_INVALID_ARG;
    if (cache->groups[group].blocks[block].n_transfers == UINT16_MAX) return PAGED_ERR_LIMIT;
    hold_block(cache, group, block);
    return PAGED_OK;
}

void paged_block_release(paged_cache *cache, int32_t group, int32_t block) {
    release_block(cache, group, block);
    paged__settle_limit(cache);
}

paged_status paged_entry_hold(paged_cache *cache, int32_t entry, paged_hold *out) {
    if (!cache || !out) return PAGED_ERR_INVALID_ARG;
    if (entry < 0 || entry >= cache->n_nodes_max || cache->nodes[entry].n_tokens == 0)
        return PAGED_ERR_NOT_FOUND;
    paged__node *n = &cache->nodes[entry];
    int32_t depth = paged__node_depth(cache, entry);
    if (n->n_transfers == UINT16_MAX || !paged__may_pin(cache, depth)) return PAGED_ERR_LIMIT;
    for (int32_t g = 0; g < cache->n_groups; g++) {
        int32_t block = paged__node_block(cache, entry, g);
        if (block >= 0 && cache->groups[g].blocks[block].n_transfers == UINT16_MAX) return PAGED_ERR_LIMIT;
    }
    *out = (paged_hold){.entry = entry,
                        .first = depth * cache->block_size,
                        .n_tokens = n->n_tokens,
                        .tokens = paged__node_tokens(cache, entry)};
    for (int32_t g = 0; g < cache->n_groups; g++) {
        out->blocks[g] = paged__node_block(cache, entry, g);
        if (out->blocks[g] >= 0) hold_block(cache, g, out->blocks[g]);
        for (int32_t i = n->parent; i >= 0 && !cache->groups[g].config.window; i = cache->nodes[i].parent)
            paged__block_ref(cache, g, paged__node_block(cache, i, g));
    }
    cache->n_pinned += depth + 1;
    paged__node_enter(cache, entry);
    n->n_transfers++;
    return PAGED_OK;
}

void paged_entry_release(paged_cache *cache, const paged_hold *hold) {
    paged__node *n = &cache->nodes[hold->entry];
    PAGED_ASSERT(n->n_transfers > 0);
    n->n_transfers--;
    /* From its end up, so that what comes later goes earlier. */
    for (int32_t g = 0; g < cache->n_groups; g++) {
        if (hold->blocks[g] >= 0) release_block(cache, g, hold->blocks[g]);
        for (int32_t i = n->parent; i >= 0 && !cache->groups[g].config.window; i = cache->nodes[i].parent)
            PAGED_ASSERT(!paged__block_unref(cache, g, paged__node_block(cache, i, g)));
    }
    cache->n_pinned -= hold->first / cache->block_size + 1;
    paged__node_leave(cache, hold->entry);
    paged__settle_limit(cache);
}

/* ---- bytes ---- */

/* Keys or values of one head in a block, from slot n_tokens on. Packed, a tile is [dim / run][16][run] of
 * keys and [16 / run][dim][run] of values (see kv.h). */
static void clear_head(uint8_t *head, const paged_group_config *group, int32_t block_size, int32_t dim,
                       bool is_k, int32_t n_tokens) {
    size_t elem = group->type == PAGED_TYPE_F32 ? 4 : group->type == PAGED_TYPE_I8 ? 1 : 2;
    size_t row = (size_t)dim * elem;
    if (group->layout == PAGED_LAYOUT_PLAIN) {
        memset(head + (size_t)n_tokens * row, 0, (size_t)(block_size - n_tokens) * row);
        return;
    }
    int32_t run = group->type == PAGED_TYPE_BF16 ? 2 : group->type == PAGED_TYPE_I8 ? 4 : 1;
    int32_t n_tiles = block_size / PAGED_TILE, whole = (n_tokens + PAGED_TILE - 1) / PAGED_TILE;
    memset(head + (size_t)(whole * PAGED_TILE) * row, 0, (size_t)((n_tiles - whole) * PAGED_TILE) * row);
    uint8_t *tile = head + (size_t)(n_tokens / PAGED_TILE * PAGED_TILE) * row;
    for (int32_t i = n_tokens % PAGED_TILE; i > 0 && i < PAGED_TILE; i++) {
        for (int32_t d = 0; d < dim; d++) {
            int32_t at = is_k ? d / run * PAGED_TILE * run + i * run + d % run
                              : i / run * dim * run + d * run + i % run;
            memset(tile + (size_t)at * elem, 0, elem);
        }
    }
}

void paged_block_clear(const paged_group_config *group, int32_t block_size, void *bytes, int32_t n_tokens) {
    size_t elem = group->type == PAGED_TYPE_F32 ? 4 : group->type == PAGED_TYPE_I8 ? 1 : 2;
    int32_t dim_v = group->head_dim_v ? group->head_dim_v : group->head_dim_k;
    size_t k_head = (size_t)block_size * (size_t)group->head_dim_k * elem,
           v_head = (size_t)block_size * (size_t)dim_v * elem;
    size_t scale_head = group->type == PAGED_TYPE_I8 ? (size_t)block_size * sizeof(float) : 0;
    uint8_t *at = bytes;
    for (int32_t layer = 0; layer < group->n_layers; layer++) {
        for (int32_t h = 0; h < group->n_kv_heads; h++, at += k_head)
            clear_head(at, group, block_size, group->head_dim_k, true, n_tokens);
        for (int32_t h = 0; h < group->n_kv_heads; h++, at += v_head)
            clear_head(at, group, block_size, dim_v, false, n_tokens);
        for (int32_t h = 0; h < 2 * group->n_kv_heads && scale_head; h++, at += scale_head)
            memset(at + (size_t)n_tokens * sizeof(float), 0, (size_t)(block_size - n_tokens) * sizeof(float));
    }
}
