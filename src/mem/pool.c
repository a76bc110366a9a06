/* pool.c: takes blocks from extents and gives them back, and memory with them.
 *
 * Blocks come from the fullest extent of their group that has a free one, so that the others run empty and
 * their memory can go back. What is full is a class of a 64th: the right list is found in a bit mask, so
 * everything here is O(1) but paged__pool_can_take(), which walks the free extents that it would need.
 *
 * Memory follows the blocks granule by granule, whatever the extents are: a granule that the last block left
 * is idle. It stays backed, since a load that goes up and down would else pay for a page fault and a cleared
 * page each time, until it was idle for long (paged_cache_set_clock), somebody asks (paged_cache_trim), or
 * the limit leaves no room for it. */
#include "mem/mem.h"

void paged__pool_init(paged_cache *cache) {
    cache->n_free_extents = cache->n_extents;
    for (int32_t i = 0; i < cache->n_extents; i++) {
        cache->extents[i].owner = -1;
        cache->free_extents[i] = cache->n_extents - 1 - i; /* low addresses first */
    }
    for (int32_t g = 0; g < cache->n_groups; g++) {
        paged__group *gr = &cache->groups[g];
        int32_t first, n_blocks, n_most = 0;
        for (int32_t f = 0; f < PAGED__FULLNESS; f++) gr->partial[f] = -1;
        for (int32_t i = 0; i < cache->n_extents; i++) {
            paged__extent_range(cache, g, i, &first, &n_blocks);
            n_most = PAGED_MAX(n_most, n_blocks);
        }
        while (n_most >> gr->fullness_shift >= PAGED__FULLNESS) gr->fullness_shift++;
    }
    cache->idle_first = cache->idle_last = -1;
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
    if (cache->contiguous) end_id = PAGED_MIN(end_id, first_id + (size_t)cache->max_blocks);
    *first = (int32_t)first_id;
    *n_blocks = first_id < end_id ? (int32_t)(end_id - first_id) : 0;
}

int32_t paged__extent_of(const paged_cache *cache, int32_t group, int32_t block) {
    return (int32_t)((size_t)block * cache->groups[group].block_bytes / cache->extent_bytes);
}

bool paged__pool_can_take(const paged_cache *cache, const int32_t *need) {
    int32_t top = cache->n_free_extents;
    size_t need_bytes = 0;
    for (int32_t g = 0; g < cache->n_groups; g++) {
        int32_t missing = need[g] - cache->groups[g].n_free, first, n_blocks;
        while (missing > 0) {
            if (top == 0) return false;
            paged__extent_range(cache, g, cache->free_extents[--top], &first, &n_blocks);
            missing -= n_blocks;
        }
        need_bytes += (size_t)need[g] * cache->groups[g].block_bytes; /* so many exist: no overflow */
    }
    return need_bytes == 0 || cache->taken_bytes + need_bytes <= cache->max_bytes;
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

/* The last one may be shorter. */
static size_t bytes_of_granule(const paged_cache *cache, int32_t granule) {
    return PAGED_MIN(cache->granule_bytes, cache->pool_bytes - (size_t)granule * cache->granule_bytes);
}

static void link_idle(paged_cache *cache, int32_t granule) {
    paged__granule *m = &cache->granules[granule];
    m->since = cache->now;
    m->next = -1;
    m->prev = cache->idle_last;
    *(m->prev >= 0 ? &cache->granules[m->prev].next : &cache->idle_first) = granule;
    cache->idle_last = granule;
    cache->idle_bytes += bytes_of_granule(cache, granule);
}

static void unlink_idle(paged_cache *cache, int32_t granule) {
    const paged__granule *m = &cache->granules[granule];
    *(m->prev >= 0 ? &cache->granules[m->prev].next : &cache->idle_first) = m->next;
    *(m->next >= 0 ? &cache->granules[m->next].prev : &cache->idle_last) = m->prev;
    cache->idle_bytes -= bytes_of_granule(cache, granule);
}

static paged_status back(paged_cache *cache, int32_t granule) {
    size_t offset = (size_t)granule * cache->granule_bytes, size_bytes = bytes_of_granule(cache, granule);
    paged_status status = cache->arena.back(cache->arena.ctx, offset, size_bytes);
    if (status != PAGED_OK) return status;
    cache->granules[granule].backed = true;
    cache->backed_bytes += size_bytes;
    cache->n_backed++;
    poison_bytes(cache, offset, size_bytes);
    return PAGED_OK;
}

/* Of an idle granule. */
static paged_status unback(paged_cache *cache, int32_t granule) {
    size_t offset = (size_t)granule * cache->granule_bytes, size_bytes = bytes_of_granule(cache, granule);
    paged_status status = cache->arena.unback(cache->arena.ctx, offset, size_bytes);
    if (status != PAGED_OK) return status;
    unlink_idle(cache, granule);
    cache->granules[granule].backed = false;
    cache->backed_bytes -= size_bytes;
    cache->n_unbacked++;
    return PAGED_OK;
}

paged_status paged__pool_trim(paged_cache *cache, size_t keep_bytes, uint64_t until, size_t n_max) {
    paged_status status = PAGED_OK;
    if (!cache->arena.unback) return PAGED_OK;
    for (size_t n = 0; n < n_max && cache->idle_bytes > keep_bytes && status == PAGED_OK; n++) {
        if (cache->granules[cache->idle_first].since > until) break;
        status = unback(cache, cache->idle_first);
    }
    return status;
}

/* Idle memory goes as far as the limit wants it, with more_bytes that are about to be backed. That an arena
 * refuses to take its memory back harms nobody here. */
static void trim_to_limit(paged_cache *cache, size_t more_bytes) {
    size_t want_bytes = cache->backed_bytes + more_bytes;
    if (want_bytes <= cache->max_bytes || cache->idle_bytes == 0) return;
    size_t surplus_bytes = PAGED_MIN(want_bytes - cache->max_bytes, cache->idle_bytes);
    paged__pool_trim(cache, cache->idle_bytes - surplus_bytes, UINT64_MAX, SIZE_MAX);
}

/* The granules that a block touches: first … last. */
static void granules_of(const paged_cache *cache, int32_t group, int32_t block, int32_t *first,
                        int32_t *last) {
    size_t block_bytes = cache->groups[group].block_bytes, begin = (size_t)block * block_bytes;
    *first = (int32_t)(begin >> cache->granule_shift); /* on every take and release: no division */
    *last = (int32_t)((begin + block_bytes - 1) >> cache->granule_shift);
}

/* A block leaves the granules first … last. */
static void leave_granules(paged_cache *cache, int32_t first, int32_t last) {
    for (int32_t i = first; i <= last; i++) {
        if (--cache->granules[i].n_taken == 0) link_idle(cache, i);
    }
    trim_to_limit(cache, 0);
}

/* Backs what a block touches and counts it there. Errors: of the arena; what was backed by then is idle. */
static paged_status enter_granules(paged_cache *cache, int32_t first, int32_t last) {
    for (int32_t i = first; i <= last; i++) {
        paged__granule *m = &cache->granules[i];
        if (m->n_taken == 0 && m->backed) {
            unlink_idle(cache, i);
        } else if (m->n_taken == 0) {
            trim_to_limit(cache, bytes_of_granule(cache, i));
            paged_status status = back(cache, i);
            if (status != PAGED_OK) {
                leave_granules(cache, first, i - 1);
                return status;
            }
        }
        m->n_taken++;
    }
    return PAGED_OK;
}

/* ---- extents ---- */

static bool is_partial(const paged__extent *e) {
    return e->n_taken > 0 && e->n_taken < e->n_blocks;
}

static void link_partial(paged_cache *cache, int32_t extent) {
    paged__extent *e = &cache->extents[extent];
    paged__group *gr = &cache->groups[e->owner];
    int32_t fullness = e->n_taken >> gr->fullness_shift;
    e->prev = -1;
    e->next = gr->partial[fullness];
    if (e->next >= 0) cache->extents[e->next].prev = extent;
    gr->partial[fullness] = extent;
    gr->fullness |= 1ull << fullness;
}

static void unlink_partial(paged_cache *cache, int32_t extent) {
    const paged__extent *e = &cache->extents[extent];
    paged__group *gr = &cache->groups[e->owner];
    int32_t fullness = e->n_taken >> gr->fullness_shift;
    if (e->next >= 0) cache->extents[e->next].prev = e->prev;
    if (e->prev >= 0)
        cache->extents[e->prev].next = e->next;
    else
        gr->partial[fullness] = e->next;
    if (gr->partial[fullness] < 0) gr->fullness &= ~(1ull << fullness);
}

/* Changes how many blocks of an extent are taken, and its list with it. */
static inline void count_taken(paged_cache *cache, const paged__group *gr, int32_t extent, int32_t step) {
    paged__extent *e = &cache->extents[extent];
    int32_t before = e->n_taken, after = before + step, most = PAGED_MAX(before, after);
    /* Neither full nor empty, and of the same class, which is the rule where extents have many blocks. */
    bool stays = before > 0 && after > 0 && most < e->n_blocks && (before ^ after) >> gr->fullness_shift == 0;
    if (!stays && is_partial(e)) unlink_partial(cache, extent);
    e->n_taken = after;
    if (!stays && is_partial(e)) link_partial(cache, extent);
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

/* The new owner takes a block of it at once. */
static int32_t claim_extent(paged_cache *cache, int32_t group) {
    PAGED_ASSERT(cache->n_free_extents > 0);
    int32_t extent = cache->free_extents[--cache->n_free_extents];
    paged__extent *e = &cache->extents[extent];
    *e = (paged__extent){.owner = group, .free_head = -1};
    paged__extent_range(cache, group, extent, &e->first, &e->n_blocks);
    PAGED_ASSERT(e->n_blocks > 0);
    cache->groups[group].n_free += e->n_blocks;
    if (cache->shuffle && !cache->contiguous) shuffle_extent(cache, e);
    return extent;
}

void paged__extent_detach(paged_cache *cache, int32_t extent) {
    const paged__extent *e = &cache->extents[extent];
    cache->groups[e->owner].n_free -= e->n_blocks - e->n_taken;
    unlink_partial(cache, extent);
}

void paged__extent_attach(paged_cache *cache, int32_t extent) {
    const paged__extent *e = &cache->extents[extent];
    cache->groups[e->owner].n_free += e->n_blocks - e->n_taken;
    link_partial(cache, extent);
}

static int32_t fullest_extent(const paged__group *gr) {
    return gr->fullness ? gr->partial[63 - __builtin_clzll(gr->fullness)] : -1;
}

/* ---- blocks ---- */

/* Back to its extent, without its memory. */
static void put_block(paged_cache *cache, int32_t group, int32_t block) {
    paged__group *gr = &cache->groups[group];
    int32_t extent = paged__extent_of(cache, group, block);
    paged__extent *e = &cache->extents[extent];
    paged__block *b = &gr->blocks[block];
    PAGED_ASSERT(e->owner == group && b->state != PAGED__BLOCK_FREE && b->refs == 0 && !b->indexed);
    if (b->state == PAGED__BLOCK_USED) {
        gr->n_used--;
        cache->used_bytes -= gr->block_bytes;
    } else {
        gr->n_cached--;
    }
    cache->taken_bytes -= gr->block_bytes;
    b->state = PAGED__BLOCK_FREE;
    b->next_free = e->free_head; /* LIFO: the block freed last is still in cache */
    e->free_head = block;
    gr->n_free++;
    count_taken(cache, gr, extent, -1);
    if (e->n_taken == 0) {
        gr->n_free -= e->n_blocks;
        e->owner = -1;
        cache->free_extents[cache->n_free_extents++] = extent;
    }
}

static void give_block(paged_cache *cache, int32_t group, int32_t block) {
    int32_t first, last;
    poison_block(cache, group, block);
    put_block(cache, group, block);
    granules_of(cache, group, block, &first, &last);
    leave_granules(cache, first, last);
}

paged_status paged__block_take(paged_cache *cache, int32_t group, int32_t *block) {
    paged__group *gr = &cache->groups[group];
    int32_t extent = fullest_extent(gr), taken, first, last;
    if (extent < 0) extent = claim_extent(cache, group);
    paged__extent *e = &cache->extents[extent];
    if (e->free_head >= 0) {
        taken = e->free_head;
        e->free_head = gr->blocks[taken].next_free;
    } else {
        taken = e->first + e->n_fresh++;
    }
    PAGED_ASSERT(gr->blocks[taken].state == PAGED__BLOCK_FREE && gr->blocks[taken].refs == 0);
    gr->blocks[taken].state = PAGED__BLOCK_USED;
    gr->n_used++;
    gr->n_free--;
    cache->used_bytes += gr->block_bytes;
    cache->taken_bytes += gr->block_bytes;
    count_taken(cache, gr, extent, 1);
    granules_of(cache, group, taken, &first, &last);
    paged_status status = enter_granules(cache, first, last);
    if (status != PAGED_OK) {
        put_block(cache, group, taken);
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
    give_block(cache, group, block);
    return true;
}

void paged__block_drop(paged_cache *cache, int32_t group, int32_t block) {
    PAGED_ASSERT(cache->groups[group].blocks[block].state == PAGED__BLOCK_CACHED);
    give_block(cache, group, block);
    cache->n_frees++;
}

void paged__block_move(paged_cache *cache, int32_t group, int32_t from, int32_t to) {
    paged__block *source = &cache->groups[group].blocks[from], *target = &cache->groups[group].blocks[to];
    PAGED_ASSERT(source->state != PAGED__BLOCK_FREE && target->refs == 1 && !target->indexed);
    if (source->state == PAGED__BLOCK_CACHED) set_state(cache, group, to, PAGED__BLOCK_CACHED);
    target->refs = source->refs;
    source->refs = 0;
    if (source->indexed) paged__block_renamed(cache, group, from, to);
    give_block(cache, group, from);
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

/* ---- the limit ---- */

paged_status paged_cache_trim(paged_cache *cache, size_t keep_bytes) {
    return cache ? paged__pool_trim(cache, keep_bytes, UINT64_MAX, SIZE_MAX) : PAGED_ERR_INVALID_ARG;
}

paged_status paged_cache_set_max_bytes(paged_cache *cache, size_t max_bytes) {
    if (!cache || max_bytes > cache->pool_bytes) return PAGED_ERR_INVALID_ARG;
    cache->max_bytes = max_bytes ? max_bytes : cache->pool_bytes;
    paged__settle_limit(cache);
    trim_to_limit(cache, 0);
    return PAGED_OK;
}
