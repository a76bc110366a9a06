/* pool.c: takes blocks from extents and gives them back. Everything here is O(1) but
 * paged__pool_can_take(), which walks the free extents that it would need. */
#include "mem/mem.h"

void paged__pool_init(paged_cache *cache) {
    cache->n_free_extents = cache->n_extents;
    for (int32_t i = 0; i < cache->n_extents; i++) {
        cache->extents[i].owner = -1;
        cache->free_extents[i] = cache->n_extents - 1 - i; /* low addresses first */
    }
    for (int32_t g = 0; g < cache->n_groups; g++) cache->groups[g].partial = -1;
}

void paged__extent_range(const paged_cache *cache, int32_t group, int32_t extent, int32_t *first,
                         int32_t *n_blocks) {
    const paged__group *gr = &cache->groups[group];
    size_t begin = (size_t)extent * cache->extent_bytes, end = begin + cache->extent_bytes;
    size_t first_id = (begin + gr->block_bytes - 1) / gr->block_bytes, end_id;
    if (cache->n_groups == 1) {
        /* Blocks that begin here; the pool ends with the last whole block. */
        end_id = PAGED_MIN((end + gr->block_bytes - 1) / gr->block_bytes, (size_t)gr->n_ids);
    } else {
        end_id = end / gr->block_bytes;
    }
    *first = (int32_t)first_id;
    *n_blocks = first_id < end_id ? (int32_t)(end_id - first_id) : 0;
}

int32_t paged__extent_of(const paged_cache *cache, int32_t group, int32_t block) {
    return (int32_t)((size_t)block * cache->groups[group].block_bytes / cache->extent_bytes);
}

bool paged__pool_can_take(const paged_cache *cache, const int32_t *need) {
    int32_t top = cache->n_free_extents;
    for (int32_t g = 0; g < cache->n_groups; g++) {
        int32_t missing = need[g] - cache->groups[g].n_free, first, n_blocks;
        while (missing > 0) {
            if (top == 0) return false;
            paged__extent_range(cache, g, cache->free_extents[--top], &first, &n_blocks);
            missing -= n_blocks;
        }
    }
    return true;
}

/* ---- memory behind the blocks ---- */

static void poison_bytes(const paged_cache *cache, size_t offset, size_t size_bytes) {
    /* All ones are a NaN in f32, f16 and bf16. */
    if (cache->poison) memset(cache->arena.base + offset, 0xff, size_bytes);
}

static void poison_block(const paged_cache *cache, int32_t group, int32_t block) {
    size_t block_bytes = cache->groups[group].block_bytes;
    poison_bytes(cache, (size_t)block * block_bytes, block_bytes);
}

static paged_status back_block(paged_cache *cache, int32_t group, int32_t block) {
    size_t block_bytes = cache->groups[group].block_bytes, begin = (size_t)block * block_bytes;
    for (size_t i = begin / PAGED__GRANULE; i <= (begin + block_bytes - 1) / PAGED__GRANULE; i++) {
        size_t offset = i * PAGED__GRANULE;
        size_t size_bytes = PAGED_MIN((size_t)PAGED__GRANULE, cache->pool_bytes - offset);
        if (cache->backed[i]) continue;
        paged_status status = cache->arena.back(cache->arena.ctx, offset, size_bytes);
        if (status != PAGED_OK) return status;
        cache->backed[i] = 1;
        cache->backed_bytes += size_bytes;
        poison_bytes(cache, offset, size_bytes);
    }
    return PAGED_OK;
}

/* ---- extents ---- */

static void link_partial(paged_cache *cache, int32_t extent) {
    paged__extent *e = &cache->extents[extent];
    paged__group *gr = &cache->groups[e->owner];
    e->prev = -1;
    e->next = gr->partial;
    if (e->next >= 0) cache->extents[e->next].prev = extent;
    gr->partial = extent;
}

static void unlink_partial(paged_cache *cache, int32_t extent) {
    paged__extent *e = &cache->extents[extent];
    if (e->prev >= 0)
        cache->extents[e->prev].next = e->next;
    else
        cache->groups[e->owner].partial = e->next;
    if (e->next >= 0) cache->extents[e->next].prev = e->prev;
}

/* Puts all free blocks of an extent on its list, in an order that the generator decides. */
static void shuffle_extent(paged_cache *cache, paged__extent *e) {
    paged__block *blocks = cache->groups[e->owner].blocks;
    int32_t n = 0, *ids = paged__alloc((size_t)e->n_blocks, sizeof *ids);
    if (!ids) return; /* a test loses randomness, nothing else */
    for (int32_t b = e->first; b < e->first + e->n_blocks; b++) {
        if (blocks[b].state == PAGED__BLOCK_FREE) ids[n++] = b;
    }
    e->free_head = -1;
    e->n_fresh = e->n_blocks;
    while (n > 0) {
        int32_t i = (int32_t)(paged__rand(&cache->shuffle) % (uint64_t)n), b = ids[i];
        ids[i] = ids[--n];
        blocks[b].next_free = e->free_head;
        e->free_head = b;
    }
    paged__free(ids);
}

static void claim_extent(paged_cache *cache, int32_t group) {
    PAGED_ASSERT(cache->n_free_extents > 0);
    int32_t extent = cache->free_extents[--cache->n_free_extents];
    paged__extent *e = &cache->extents[extent];
    *e = (paged__extent){.owner = group, .free_head = -1};
    paged__extent_range(cache, group, extent, &e->first, &e->n_blocks);
    PAGED_ASSERT(e->n_blocks > 0);
    cache->groups[group].n_free += e->n_blocks;
    link_partial(cache, extent);
    if (cache->shuffle) shuffle_extent(cache, e);
}

/* ---- blocks ---- */

static void give_block(paged_cache *cache, int32_t group, int32_t block) {
    paged__group *gr = &cache->groups[group];
    int32_t extent = paged__extent_of(cache, group, block);
    paged__extent *e = &cache->extents[extent];
    paged__block *b = &gr->blocks[block];
    PAGED_ASSERT(e->owner == group && b->state != PAGED__BLOCK_FREE && b->refs == 0 && !b->indexed);
    if (e->n_taken == e->n_blocks) link_partial(cache, extent);
    if (b->state == PAGED__BLOCK_USED) {
        gr->n_used--;
        cache->used_bytes -= gr->block_bytes;
    } else {
        gr->n_cached--;
    }
    b->state = PAGED__BLOCK_FREE;
    b->next_free = e->free_head; /* LIFO: the block freed last is still in cache */
    e->free_head = block;
    e->n_taken--;
    gr->n_free++;
    if (e->n_taken == 0) {
        unlink_partial(cache, extent);
        gr->n_free -= e->n_blocks;
        e->owner = -1;
        cache->free_extents[cache->n_free_extents++] = extent;
    }
}

paged_status paged__block_take(paged_cache *cache, int32_t group, int32_t *block) {
    paged__group *gr = &cache->groups[group];
    if (gr->partial < 0) claim_extent(cache, group);
    int32_t extent = gr->partial, taken;
    paged__extent *e = &cache->extents[extent];
    if (e->free_head >= 0) {
        taken = e->free_head;
        e->free_head = gr->blocks[taken].next_free;
    } else {
        taken = e->first + e->n_fresh++;
    }
    PAGED_ASSERT(gr->blocks[taken].state == PAGED__BLOCK_FREE && gr->blocks[taken].refs == 0);
    gr->blocks[taken].state = PAGED__BLOCK_USED;
    e->n_taken++;
    gr->n_used++;
    gr->n_free--;
    cache->used_bytes += gr->block_bytes;
    if (e->n_taken == e->n_blocks) unlink_partial(cache, extent);
    paged_status status = back_block(cache, group, taken);
    if (status != PAGED_OK) {
        give_block(cache, group, taken);
        return status;
    }
    gr->blocks[taken].refs = 1;
    poison_block(cache, group, taken);
    *block = taken;
    return PAGED_OK;
}

/* Between in use and cached; the extent does not notice. */
static void set_state(paged_cache *cache, int32_t group, int32_t block, paged__block_state state) {
    paged__group *gr = &cache->groups[group];
    int32_t step = state == PAGED__BLOCK_USED ? 1 : -1;
    gr->blocks[block].state = (uint8_t)state;
    gr->n_used += step;
    gr->n_cached -= step;
    if (step > 0)
        cache->used_bytes += gr->block_bytes;
    else
        cache->used_bytes -= gr->block_bytes;
}

void paged__block_ref(paged_cache *cache, int32_t group, int32_t block) {
    paged__block *b = &cache->groups[group].blocks[block];
    PAGED_ASSERT(b->state != PAGED__BLOCK_FREE);
    if (b->refs++ > 0) return;
    set_state(cache, group, block, PAGED__BLOCK_USED);
    if (b->indexed) paged__block_used(cache, group, block);
}

bool paged__block_unref(paged_cache *cache, int32_t group, int32_t block) {
    paged__block *b = &cache->groups[group].blocks[block];
    PAGED_ASSERT(b->refs > 0);
    if (--b->refs > 0) return false;
    if (b->indexed) {
        set_state(cache, group, block, PAGED__BLOCK_CACHED);
        paged__block_released(cache, group, block);
        return false;
    }
    poison_block(cache, group, block);
    give_block(cache, group, block);
    return true;
}

void paged__block_drop(paged_cache *cache, int32_t group, int32_t block) {
    PAGED_ASSERT(cache->groups[group].blocks[block].state == PAGED__BLOCK_CACHED);
    poison_block(cache, group, block);
    give_block(cache, group, block);
    cache->n_frees++;
}

void paged__cache_shuffle(paged_cache *cache, uint64_t seed) {
    cache->shuffle = paged__mix(seed) | 1;
    for (int32_t n = cache->n_free_extents; n > 1; n--) {
        int32_t i = (int32_t)(paged__rand(&cache->shuffle) % (uint64_t)n), last = cache->free_extents[n - 1];
        cache->free_extents[n - 1] = cache->free_extents[i];
        cache->free_extents[i] = last;
    }
    for (int32_t i = 0; i < cache->n_extents; i++) {
        if (cache->extents[i].owner >= 0) shuffle_extent(cache, &cache->extents[i]);
    }
}
