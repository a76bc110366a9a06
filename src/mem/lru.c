/* lru.c: which cached block goes next, and which may not go.
 *
 * Only leaves without references can be evicted. They lie in a heap, lowest priority first and among equals
 * the one used longest ago; when a node's last child goes, the node takes the place that its own last use
 * gives it. A pin holds a reference to each block of a path, so a pinned path is out of the heap without a
 * further rule; its end lies in a second heap. Everything is O(log n) but pinning, which walks the path. */
#include "mem/mem.h"

enum { TRIM_STEP = 64 }; /* granules that paged_cache_set_clock() gives back at most */

/* ---- heaps ---- */

bool paged__heap_before(const paged_cache *cache, const paged__heap *heap, int32_t a, int32_t b) {
    const paged__node *x = &cache->nodes[a], *y = &cache->nodes[b];
    if (heap == &cache->pins) return x->until < y->until;
    return x->priority != y->priority ? x->priority < y->priority : x->tick < y->tick;
}

static void put(paged_cache *cache, const paged__heap *heap, int32_t pos, int32_t node) {
    heap->items[pos] = node;
    cache->nodes[node].heap_pos = pos;
}

/* Moves the node at pos to where its key belongs. */
static void sift(paged_cache *cache, const paged__heap *heap, int32_t pos) {
    int32_t node = heap->items[pos];
    while (pos > 0 && paged__heap_before(cache, heap, node, heap->items[(pos - 1) / 2])) {
        put(cache, heap, pos, heap->items[(pos - 1) / 2]);
        pos = (pos - 1) / 2;
    }
    for (int32_t child = 2 * pos + 1; child < heap->n; child = 2 * pos + 1) {
        if (child + 1 < heap->n &&
            paged__heap_before(cache, heap, heap->items[child + 1], heap->items[child]))
            child++;
        if (!paged__heap_before(cache, heap, heap->items[child], node)) break;
        put(cache, heap, pos, heap->items[child]);
        pos = child;
    }
    put(cache, heap, pos, node);
}

static void heap_add(paged_cache *cache, paged__heap *heap, int32_t node) {
    put(cache, heap, heap->n, node);
    sift(cache, heap, heap->n++);
}

static void heap_remove(paged_cache *cache, paged__heap *heap, int32_t node) {
    int32_t pos = cache->nodes[node].heap_pos, last = heap->items[--heap->n];
    cache->nodes[node].heap_pos = -1;
    if (last == node) return;
    put(cache, heap, pos, last);
    sift(cache, heap, pos);
}

/* ---- eviction ---- */

void paged__node_settle(paged_cache *cache, int32_t node) {
    const paged__node *n = &cache->nodes[node];
    if (n->until) return;
    bool goes = n->n_tokens > 0 && n->children < 0 && cache->groups[0].blocks[node].refs == 0;
    if (goes && n->heap_pos < 0)
        heap_add(cache, &cache->evictable, node);
    else if (goes)
        sift(cache, &cache->evictable, n->heap_pos);
    else if (n->heap_pos >= 0)
        heap_remove(cache, &cache->evictable, node);
}

void paged__node_used(paged_cache *cache, int32_t node) {
    paged__node_settle(cache, node);
}

void paged__node_released(paged_cache *cache, int32_t node) {
    cache->nodes[node].tick = ++cache->tick;
    paged__node_settle(cache, node);
}

static bool evict_one(paged_cache *cache) {
    if (cache->evictable.n == 0) return false;
    cache->n_evicted++;
    paged__prefix_remove(cache, cache->evictable.items[0]);
    return true;
}

bool paged__room_possible(const paged_cache *cache, const int32_t *need) {
    size_t need_bytes = 0, bytes;
    for (int32_t g = 0; g < cache->n_groups; g++) {
        const paged__group *gr = &cache->groups[g];
        if (cache->n_groups == 1 && need[g] > gr->n_ids - gr->n_used) return false;
        if (!paged__mul((size_t)need[g], gr->block_bytes, &bytes) ||
            !paged__add(need_bytes, bytes, &need_bytes))
            return false;
    }
    /* What is in use may be beyond a limit that was lowered. */
    return need_bytes == 0 ||
           (cache->used_bytes <= cache->max_bytes && need_bytes <= cache->max_bytes - cache->used_bytes);
}

bool paged__make_room(paged_cache *cache, const int32_t *need) {
    while (!paged__pool_can_take(cache, need)) {
        if (!evict_one(cache)) return false;
    }
    return true;
}

void paged__settle_limit(paged_cache *cache) {
    while (cache->taken_bytes > cache->max_bytes && evict_one(cache)) continue;
}

void paged_cache_clear(paged_cache *cache) {
    while (cache && evict_one(cache)) continue;
}

/* ---- pins ---- */

static void unpin(paged_cache *cache, int32_t tip) {
    heap_remove(cache, &cache->pins, tip);
    cache->nodes[tip].until = 0;
    for (int32_t node = tip; node >= 0; node = cache->nodes[node].parent) {
        for (int32_t g = 0; g < cache->n_groups; g++)
            PAGED_ASSERT(!paged__block_unref(cache, g, paged__node_block(cache, node, g)));
    }
}

static void pin(paged_cache *cache, int32_t tip, uint64_t until) {
    paged__node *n = &cache->nodes[tip];
    if (n->until && until <= cache->now) {
        unpin(cache, tip);
    } else if (n->until) {
        n->until = until;
        sift(cache, &cache->pins, n->heap_pos);
    } else if (until > cache->now) {
        for (int32_t node = tip; node >= 0; node = cache->nodes[node].parent) {
            for (int32_t g = 0; g < cache->n_groups; g++)
                paged__block_ref(cache, g, paged__node_block(cache, node, g));
        }
        n->until = until;
        heap_add(cache, &cache->pins, tip);
    }
}

static void set_priority(paged_cache *cache, int32_t node, int32_t priority) {
    cache->nodes[node].priority = (uint8_t)priority;
    paged__node_settle(cache, node);
}

paged_status paged_prefix_keep(paged_cache *cache, const paged_namespace *names, const int32_t *tokens,
                               int32_t n_tokens, int32_t priority, uint64_t until, int32_t *n_kept) {
    if (!cache || n_tokens < 0 || (n_tokens > 0 && !tokens) || priority < 0 || priority > UINT8_MAX ||
        !n_kept)
        return PAGED_ERR_INVALID_ARG;
    int32_t space, n_common, pos = 0, child;
    paged_status status = paged__space_open(cache, names, &space);
    if (status != PAGED_OK) return status;
    int32_t tip = -2 - space;
    while (pos + cache->block_size <= n_tokens) {
        uint64_t hash[2];
        child = paged__prefix_find(cache, tip, tokens + pos, hash);
        if (child < 0) break;
        set_priority(cache, child, priority);
        tip = child;
        pos += cache->block_size;
    }
    child =
        paged__prefix_best(cache, tip, tokens + pos, PAGED_MIN(n_tokens - pos, cache->block_size), &n_common);
    if (child >= 0) {
        set_priority(cache, child, priority);
        tip = child;
        pos += n_common;
    }
    if (tip >= 0) pin(cache, tip, until);
    paged__settle_limit(cache); /* an earlier pin may have ended */
    paged__space_unref(cache, space);
    *n_kept = pos;
    return PAGED_OK;
}

void paged_cache_set_clock(paged_cache *cache, uint64_t now) {
    if (!cache) return;
    cache->now = PAGED_MAX(cache->now, now);
    while (cache->pins.n > 0 && cache->nodes[cache->pins.items[0]].until <= cache->now)
        unpin(cache, cache->pins.items[0]);
    paged__settle_limit(cache);
    /* A few steps a call, so that no call takes long; an arena that refuses keeps its memory. */
    if (cache->trim_after && cache->now >= cache->trim_after)
        paged__pool_trim(cache, 0, cache->now - cache->trim_after, TRIM_STEP);
}
