/* lru.c: which cached block goes next, and which may not go.
 *
 * Only leaves without references can be evicted. They lie in a heap, lowest priority first and among equals
 * the one used longest ago; when a node's last child goes, the node takes the place that its own last use
 * gives it. A pin holds a reference to each block of a path, so a pinned path is out of the heap without a
 * further rule; its end lies in a second heap. Everything is O(log n) but pinning, which walks the path.
 *
 * A group with a window has a heap of its cached blocks besides: they can go before their node does, and what
 * fell out of the windows of a long sequence has nothing else to wait for. When such a group needs room, the
 * older of its oldest block and the first leaf goes; when another one does, leaves go as long as there are
 * any. */
#include "mem/mem.h"

enum { TRIM_STEP = 64 }; /* granules that paged_cache_set_clock() gives back at most */

/* ---- heaps ---- */

/* What the order is made of: of a node, or of a block that waits for its end alone. */
static uint8_t priority_of(const paged_cache *cache, const paged__heap *heap, int32_t id) {
    if (heap->group >= 0) id = cache->groups[heap->group].blocks[id].node;
    return cache->nodes[id].priority;
}

static uint64_t tick_of(const paged_cache *cache, const paged__heap *heap, int32_t id) {
    return heap->group >= 0 ? cache->groups[heap->group].loose_tick[id] : cache->nodes[id].tick;
}

/* Across two heaps, none of them that of the pins. */
static bool is_before(const paged_cache *cache, const paged__heap *x, int32_t a, const paged__heap *y,
                      int32_t b) {
    uint8_t of_a = priority_of(cache, x, a), of_b = priority_of(cache, y, b);
    return of_a != of_b ? of_a < of_b : tick_of(cache, x, a) < tick_of(cache, y, b);
}

bool paged__heap_before(const paged_cache *cache, const paged__heap *heap, int32_t a, int32_t b) {
    if (heap == &cache->pins) return cache->nodes[a].until < cache->nodes[b].until;
    return is_before(cache, heap, a, heap, b);
}

static int32_t *place_of(const paged_cache *cache, const paged__heap *heap, int32_t id) {
    return heap->group >= 0 ? &cache->groups[heap->group].loose_place[id] : &cache->nodes[id].heap_pos;
}

static void put(paged_cache *cache, const paged__heap *heap, int32_t pos, int32_t id) {
    heap->items[pos] = id;
    *place_of(cache, heap, id) = pos;
}

/* Moves what is at pos to where its key belongs. */
static void sift(paged_cache *cache, const paged__heap *heap, int32_t pos) {
    int32_t id = heap->items[pos];
    while (pos > 0 && paged__heap_before(cache, heap, id, heap->items[(pos - 1) / 2])) {
        put(cache, heap, pos, heap->items[(pos - 1) / 2]);
        pos = (pos - 1) / 2;
    }
    for (int32_t child = 2 * pos + 1; child < heap->n; child = 2 * pos + 1) {
        if (child + 1 < heap->n &&
            paged__heap_before(cache, heap, heap->items[child + 1], heap->items[child]))
            child++;
        if (!paged__heap_before(cache, heap, heap->items[child], id)) break;
        put(cache, heap, pos, heap->items[child]);
        pos = child;
    }
    put(cache, heap, pos, id);
}

static void heap_add(paged_cache *cache, paged__heap *heap, int32_t id) {
    put(cache, heap, heap->n, id);
    sift(cache, heap, heap->n++);
}

static void heap_remove(paged_cache *cache, paged__heap *heap, int32_t id) {
    int32_t pos = *place_of(cache, heap, id), last = heap->items[--heap->n];
    *place_of(cache, heap, id) = -1;
    if (last == id) return;
    put(cache, heap, pos, last);
    sift(cache, heap, pos);
}

/* ---- eviction ---- */

void paged__node_settle(paged_cache *cache, int32_t node) {
    const paged__node *n = &cache->nodes[node];
    if (n->until) return;
    bool goes = paged__node_idle(n);
    if (goes && n->heap_pos < 0)
        heap_add(cache, &cache->evictable, node);
    else if (goes)
        sift(cache, &cache->evictable, n->heap_pos);
    else if (n->heap_pos >= 0)
        heap_remove(cache, &cache->evictable, node);
}

void paged__block_used(paged_cache *cache, int32_t group, int32_t block) {
    paged__group *gr = &cache->groups[group];
    int32_t node = gr->blocks[block].node;
    if (gr->config.window) heap_remove(cache, &gr->loose, block);
    cache->nodes[node].n_held++;
    paged__node_settle(cache, node);
}

void paged__block_released(paged_cache *cache, int32_t group, int32_t block) {
    paged__group *gr = &cache->groups[group];
    int32_t node = gr->blocks[block].node;
    cache->nodes[node].n_held--;
    cache->nodes[node].tick = ++cache->tick;
    if (gr->config.window) {
        gr->loose_tick[block] = cache->tick;
        heap_add(cache, &gr->loose, block);
    }
    paged__node_settle(cache, node);
}

void paged__block_forgotten(paged_cache *cache, int32_t group, int32_t block) {
    if (cache->groups[group].config.window) heap_remove(cache, &cache->groups[group].loose, block);
}

void paged__block_renamed(paged_cache *cache, int32_t group, int32_t from, int32_t to) {
    paged__group *gr = &cache->groups[group];
    int32_t node = gr->blocks[from].node;
    gr->blocks[to].indexed = true;
    gr->blocks[to].node = node;
    gr->blocks[from].indexed = false;
    cache->node_blocks[(int64_t)node * cache->n_groups + group] = to;
    if (!gr->config.window || gr->blocks[to].state != PAGED__BLOCK_CACHED) return; /* in no heap */
    gr->loose_tick[to] = gr->loose_tick[from];
    gr->loose_place[to] = gr->loose_place[from];
    gr->loose.items[gr->loose_place[to]] = to;
}

bool paged__evict_leaf(paged_cache *cache) {
    if (cache->evictable.n == 0) return false;
    cache->n_evicted++;
    paged__prefix_remove(cache, cache->evictable.items[0]);
    return true;
}

static bool evict_block(paged_cache *cache, int32_t group) {
    const paged__heap *loose = &cache->groups[group].loose;
    if (loose->n == 0) return false;
    cache->n_evicted_blocks++;
    paged__prefix_drop_block(cache, group, loose->items[0]);
    return true;
}

/* The first group that has too few blocks in the extents it owns. */
static int32_t short_group(const paged_cache *cache, const int32_t *need) {
    int32_t g = 0;
    while (g < cache->n_groups - 1 && need[g] <= cache->groups[g].n_free) g++;
    return g;
}

/* Evicts for a group that needs room. What other groups hold only helps when it empties an extent. */
static bool evict_for(paged_cache *cache, int32_t group) {
    const paged__heap *loose = &cache->groups[group].loose, *leaves = &cache->evictable;
    if (loose->n > 0 &&
        (leaves->n == 0 || is_before(cache, loose, loose->items[0], leaves, leaves->items[0])))
        return evict_block(cache, group);
    if (paged__evict_leaf(cache)) return true;
    for (int32_t g = 0; g < cache->n_groups; g++)
        if (evict_block(cache, g)) return true;
    return false;
}

/* True if evicting all that can be evicted would make room. Exact with one group; with several it may say yes
 * too often, since extents go from group to group as wholes only. */
static bool room_possible(const paged_cache *cache, const int32_t *need) {
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
    if (paged__pool_can_take(cache, need)) return true;
    if (!room_possible(cache, need)) return false;
    while (!paged__pool_can_take(cache, need)) {
        if (!evict_for(cache, short_group(cache, need))) return false;
    }
    return true;
}

void paged__evict_to_limit(paged_cache *cache) {
    while (cache->taken_bytes > cache->max_bytes && evict_for(cache, 0)) continue;
}

void paged_cache_clear(paged_cache *cache) {
    while (cache && evict_for(cache, 0)) continue;
}

/* ---- pins ---- */

int32_t paged__node_depth(const paged_cache *cache, int32_t node) {
    int32_t depth = 0;
    while ((node = cache->nodes[node].parent) >= 0) depth++;
    return depth;
}

/* Gives back what the pin of a path of depth + 1 nodes holds, from its end up. */
static void unpin(paged_cache *cache, int32_t tip) {
    int32_t depth = paged__node_depth(cache, tip), i = depth;
    heap_remove(cache, &cache->pins, tip);
    cache->nodes[tip].until = 0;
    for (int32_t node = tip; node >= 0; node = cache->nodes[node].parent, i--) {
        for (int32_t g = 0; g < cache->n_groups; g++)
            if (paged__pin_holds(cache, g, depth, i))
                PAGED_ASSERT(!paged__block_unref(cache, g, paged__node_block(cache, node, g)));
    }
    cache->n_pinned -= depth + 1;
    paged__node_leave(cache, tip);
}

bool paged__may_pin(const paged_cache *cache, int32_t depth) {
    return !cache->all_windowed || cache->n_pinned + depth < cache->groups[0].n_ids;
}

static paged_status pin(paged_cache *cache, int32_t tip, uint64_t until) {
    paged__node *n = &cache->nodes[tip];
    if (n->until && until <= cache->now) {
        unpin(cache, tip);
    } else if (n->until) {
        n->until = until;
        sift(cache, &cache->pins, n->heap_pos);
    } else if (until > cache->now) {
        int32_t depth = paged__node_depth(cache, tip), i = depth;
        if (!paged__may_pin(cache, depth)) return PAGED_ERR_LIMIT;
        for (int32_t node = tip; node >= 0; node = cache->nodes[node].parent, i--) {
            for (int32_t g = 0; g < cache->n_groups; g++)
                if (paged__pin_holds(cache, g, depth, i))
                    paged__block_ref(cache, g, paged__node_block(cache, node, g));
        }
        cache->n_pinned += depth + 1;
        paged__node_enter(cache, tip);
        n->until = until;
        heap_add(cache, &cache->pins, tip);
    }
    return PAGED_OK;
}

static void set_priority(paged_cache *cache, int32_t node, int32_t priority) {
    cache->nodes[node].priority = (uint8_t)priority;
    paged__node_settle(cache, node);
    for (int32_t g = 0; g < cache->n_groups; g++) {
        int32_t block = paged__node_block(cache, node, g);
        if (cache->groups[g].config.window && block >= 0 && cache->groups[g].blocks[block].refs == 0)
            sift(cache, &cache->groups[g].loose, cache->groups[g].loose_place[block]);
    }
}

paged_status paged_prefix_keep(paged_cache *cache, const paged_namespace *names, const int32_t *tokens,
                               int32_t n_tokens, int32_t priority, uint64_t until, int32_t *n_kept) {
    if (!cache || n_tokens < 0 || (n_tokens > 0 && !tokens) || priority < 0 || priority > UINT8_MAX ||
        !n_kept)
        return PAGED_ERR_INVALID_ARG;
    int32_t space, n_common;
    paged_status status = paged__space_open(cache, names, &space);
    if (status != PAGED_OK) return status;
    paged__walk walk = paged__walk_start(cache, space);
    int32_t tip = -1, n_tip = 0; /* the last node that a match would get to, and the tokens up to its end */
    for (;;) {
        int32_t rest = n_tokens - walk.n_full * cache->block_size, child = -1;
        const int32_t *at = tokens + (n_tokens - rest);
        uint64_t hash[2];
        n_common = cache->block_size;
        if (rest >= cache->block_size) child = paged__prefix_find(cache, walk.node, at, hash);
        if (child < 0)
            child = paged__prefix_best(cache, walk.node, at, PAGED_MIN(rest, cache->block_size), &n_common);
        if (child < 0) break;
        paged__walk_add(cache, &walk, child);
        if (paged__walk_covers(cache, &walk, (walk.n_full - 1) * cache->block_size + 1)) {
            tip = child;
            n_tip = (walk.n_full - 1) * cache->block_size + n_common;
        }
        if (n_common < cache->block_size) break;
    }
    if (tip >= 0) status = pin(cache, tip, until);
    for (int32_t node = walk.node; node >= 0 && status == PAGED_OK; node = cache->nodes[node].parent)
        set_priority(cache, node, priority);
    paged__settle_limit(cache); /* an earlier pin may have ended */
    paged__space_unref(cache, space);
    if (status == PAGED_OK) *n_kept = n_tip;
    return status;
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
