/* prefix.c: the index from content to blocks.
 *
 * A node is a block (one of each group) with its tokens and the node before it. Full nodes are found by a
 * chained hash: XXH3-128 over the parent's hash and the tokens. The hash only says where to look; parent and
 * tokens are compared, so a collision is a miss. The children of a parent are besides a tree ordered by their
 * tokens (a treap: link by tokens, heap by a hash of the id), in which the child that agrees longest with
 * given tokens lies on the way to them.
 *
 * A group with a window may give its block of a node up and the node stays; the next sequence that computes
 * the same tokens puts its own block there.
 *
 * Nothing here allocates: there are as many nodes as can be of use, from the start. */
#include "mem/hash.h"
#include "mem/mem.h"

size_t paged__prefix_nodes_max(const paged_cache *cache) {
    size_t n_most = 0;
    for (int32_t g = 0; g < cache->n_groups; g++) {
        /* No node without a block of such a group. */
        if (!cache->groups[g].config.window) return (size_t)cache->groups[g].n_ids;
        n_most = PAGED_MAX(n_most, (size_t)cache->groups[g].n_ids);
    }
    /* What sequences stand on, what pins hold, and as much again of what is only cached. */
    return (size_t)cache->max_seqs * (size_t)cache->max_blocks + 2 * n_most;
}

void paged__prefix_init(paged_cache *cache) {
    for (size_t i = 0; i < cache->n_buckets; i++) cache->buckets[i] = -1;
    for (int32_t i = 0; i < cache->n_nodes_max; i++)
        cache->nodes[i].hash_next = i + 1 < cache->n_nodes_max ? i + 1 : -1;
    cache->free_node = 0;
    cache->hash_mask = UINT64_MAX;
    cache->free_space = -1;
}

void paged__cache_cut_hash(paged_cache *cache, uint64_t mask) {
    cache->hash_mask = mask;
}

/* ---- hash ---- */

static const uint64_t *hash_of(const paged_cache *cache, int32_t parent) {
    return parent >= 0 ? cache->nodes[parent].hash : cache->spaces[-2 - parent].hash;
}

static void hash_block(const paged_cache *cache, int32_t parent, const int32_t *tokens, uint64_t hash[2]) {
    uint8_t buffer[2 * sizeof(uint64_t) + PAGED__BLOCK_SIZE_MAX * sizeof(int32_t)];
    size_t head_bytes = 2 * sizeof(uint64_t), tokens_bytes = (size_t)cache->block_size * sizeof *tokens;
    memcpy(buffer, hash_of(cache, parent), head_bytes);
    memcpy(buffer + head_bytes, tokens, tokens_bytes);
    XXH128_hash_t h = XXH3_128bits(buffer, head_bytes + tokens_bytes);
    hash[0] = h.low64 & cache->hash_mask;
    hash[1] = h.high64 & cache->hash_mask;
}

static size_t bucket_of(const paged_cache *cache, const uint64_t hash[2]) {
    return (size_t)hash[0] & (cache->n_buckets - 1);
}

size_t paged__prefix_first(const paged_cache *cache, const int32_t *tokens) {
    uint64_t hash = XXH3_64bits(tokens, (size_t)cache->block_size * sizeof *tokens);
    return (size_t)(hash & cache->hash_mask) & (cache->n_buckets - 1);
}

int32_t paged__prefix_find(const paged_cache *cache, int32_t parent, const int32_t *tokens,
                           uint64_t hash[2]) {
    hash_block(cache, parent, tokens, hash);
    int32_t node = cache->buckets[bucket_of(cache, hash)];
    for (; node >= 0; node = cache->nodes[node].hash_next) {
        const paged__node *n = &cache->nodes[node];
        if (n->hash[0] == hash[0] && n->hash[1] == hash[1] && n->parent == parent &&
            memcmp(paged__node_tokens(cache, node), tokens, (size_t)cache->block_size * sizeof *tokens) == 0)
            break;
    }
    return node;
}

/* ---- the tree of a parent's children ---- */

static int32_t *children_of(const paged_cache *cache, int32_t parent) {
    return parent >= 0 ? &cache->nodes[parent].children : &cache->spaces[-2 - parent].children;
}

static int32_t common(const int32_t *a, int32_t n_a, const int32_t *b, int32_t n_b) {
    int32_t i = 0, n = PAGED_MIN(n_a, n_b);
    while (i < n && a[i] == b[i]) i++;
    return i;
}

/* Tokens are compared in order; what is a beginning of the other comes first. */
static bool less(const paged_cache *cache, int32_t a, int32_t b) {
    const int32_t *x = paged__node_tokens(cache, a), *y = paged__node_tokens(cache, b);
    int32_t n_x = cache->nodes[a].n_tokens, n_y = cache->nodes[b].n_tokens, i = common(x, n_x, y, n_y);
    return i < n_x && i < n_y ? x[i] < y[i] : n_x < n_y;
}

static uint64_t weight(int32_t node) {
    return paged__mix((uint64_t)node);
}

static void tree_insert(paged_cache *cache, int32_t *link, int32_t node) {
    paged__node *nodes = cache->nodes;
    while (*link >= 0 && weight(*link) >= weight(node))
        link = less(cache, node, *link) ? &nodes[*link].left : &nodes[*link].right;
    /* What lies below is split at the new node. */
    int32_t rest = *link, *low = &nodes[node].left, *high = &nodes[node].right;
    *link = node;
    while (rest >= 0) {
        if (less(cache, node, rest)) {
            *high = rest;
            high = &nodes[rest].left;
            rest = *high;
        } else {
            *low = rest;
            low = &nodes[rest].right;
            rest = *low;
        }
    }
    *low = *high = -1;
}

static void tree_remove(paged_cache *cache, int32_t *link, int32_t node) {
    paged__node *nodes = cache->nodes;
    while (*link != node) link = less(cache, node, *link) ? &nodes[*link].left : &nodes[*link].right;
    int32_t low = nodes[node].left, high = nodes[node].right;
    while (low >= 0 && high >= 0) {
        if (weight(low) >= weight(high)) {
            *link = low;
            link = &nodes[low].right;
            low = *link;
        } else {
            *link = high;
            link = &nodes[high].left;
            high = *link;
        }
    }
    *link = low >= 0 ? low : high;
}

int32_t paged__prefix_best(const paged_cache *cache, int32_t parent, const int32_t *tokens, int32_t n_tokens,
                           int32_t *n_common) {
    int32_t best = -1, node = *children_of(cache, parent);
    *n_common = 0;
    while (node >= 0 && *n_common < n_tokens) {
        const paged__node *n = &cache->nodes[node];
        const int32_t *theirs = paged__node_tokens(cache, node);
        int32_t k = common(theirs, n->n_tokens, tokens, n_tokens);
        if (k > *n_common) {
            *n_common = k;
            best = node;
        }
        node = k < n_tokens && (k == n->n_tokens || theirs[k] < tokens[k]) ? n->right : n->left;
    }
    return best;
}

/* ---- in and out ---- */

static int32_t *block_of(const paged_cache *cache, int32_t node, int32_t group) {
    return &cache->node_blocks[(int64_t)node * cache->n_groups + group];
}

static void tell(const paged_cache *cache, paged_event_kind kind, int32_t node) {
    const paged__node *n = &cache->nodes[node];
    if (!cache->event) return;
    paged_event event = {.kind = kind,
                         .entry = node,
                         .parent = PAGED_MAX(n->parent, -1),
                         .n_tokens = n->n_tokens,
                         .tokens = paged__node_tokens(cache, node)};
    if (n->parent < 0) memcpy(event.namespace_hash, hash_of(cache, n->parent), sizeof event.namespace_hash);
    for (int32_t g = 0; g < cache->n_groups; g++)
        event.groups |= (uint32_t)(*block_of(cache, node, g) >= 0) << g;
    cache->event(cache->event_user, &event);
}

/* A block in use becomes the node's. */
static void give_to(paged_cache *cache, int32_t node, int32_t group, int32_t block) {
    paged__block *b = &cache->groups[group].blocks[block];
    PAGED_ASSERT(!b->indexed && b->refs > 0);
    b->indexed = true;
    b->node = node;
    *block_of(cache, node, group) = block;
    cache->nodes[node].n_blocks++;
    cache->nodes[node].n_held++;
}

/* A cached block leaves its node and is free. */
static void take_from(paged_cache *cache, int32_t node, int32_t group) {
    int32_t block = *block_of(cache, node, group);
    paged__block_forgotten(cache, group, block);
    cache->groups[group].blocks[block].indexed = false;
    *block_of(cache, node, group) = -1;
    cache->nodes[node].n_blocks--;
    paged__block_drop(cache, group, block);
}

/* Takes a node from the list of free ones. Where no group keeps whole sequences the list may be empty; then
 * most nodes are in no sequence and no pin. */
static int32_t open_node(paged_cache *cache) {
    if (cache->free_node < 0) PAGED_ASSERT(paged__evict_leaf(cache));
    int32_t node = cache->free_node;
    cache->free_node = cache->nodes[node].hash_next;
    return node;
}

/* Nobody can ever use it again. */
static bool is_useless(const paged_cache *cache, int32_t node) {
    return node >= 0 && paged__node_idle(&cache->nodes[node]) && cache->nodes[node].n_blocks == 0;
}

/* Returns the parent. */
static int32_t remove_one(paged_cache *cache, int32_t node) {
    paged__node *n = &cache->nodes[node];
    int32_t parent = n->parent;
    PAGED_ASSERT(paged__node_idle(n));
    tell(cache, PAGED_EVENT_REMOVED, node);
    tree_remove(cache, children_of(cache, parent), node);
    if (n->n_tokens == cache->block_size) {
        size_t bucket = bucket_of(cache, n->hash);
        int32_t *link = &cache->buckets[bucket];
        while (*link != node) link = &cache->nodes[*link].hash_next;
        *link = n->hash_next;
        cache->evicted_tags[bucket] = (uint32_t)n->hash[1] | 1;
        if (parent < 0) cache->first_counts[paged__prefix_first(cache, paged__node_tokens(cache, node))]--;
    }
    n->n_tokens = 0;
    paged__node_settle(cache, node); /* out of the heap */
    for (int32_t g = 0; g < cache->n_groups; g++)
        if (*block_of(cache, node, g) >= 0) take_from(cache, node, g);
    n->hash_next = cache->free_node;
    cache->free_node = node;
    if (parent >= 0)
        paged__node_settle(cache, parent);
    else
        paged__space_unref(cache, -2 - parent);
    return parent;
}

void paged__prefix_remove(paged_cache *cache, int32_t node) {
    do {
        node = remove_one(cache, node);
    } while (is_useless(cache, node));
}

void paged__prefix_drop_block(paged_cache *cache, int32_t group, int32_t block) {
    int32_t node = cache->groups[group].blocks[block].node;
    const paged__node *n = &cache->nodes[node];
    /* What hits this node from now on would have hit the block. */
    if (n->n_tokens == cache->block_size)
        cache->evicted_tags[bucket_of(cache, n->hash)] = (uint32_t)n->hash[1] | 1;
    if (paged__node_idle(n) && n->n_blocks == 1) { /* its last one: nobody can use the node without */
        paged__prefix_remove(cache, node);
        return;
    }
    take_from(cache, node, group);
    tell(cache, PAGED_EVENT_CHANGED, node);
}

void paged__node_enter(paged_cache *cache, int32_t node) {
    if (node < 0) return;
    cache->nodes[node].n_users++;
    paged__node_settle(cache, node);
}

void paged__node_leave(paged_cache *cache, int32_t node) {
    if (node < 0) return;
    PAGED_ASSERT(cache->nodes[node].n_users > 0);
    cache->nodes[node].n_users--;
    if (is_useless(cache, node))
        paged__prefix_remove(cache, node);
    else
        paged__node_settle(cache, node);
}

/* A sealed tail that the new tokens go beyond says nothing any more. */
static void drop_superseded(paged_cache *cache, int32_t parent, const int32_t *tokens, int32_t n_tokens) {
    int32_t n_common, node = paged__prefix_best(cache, parent, tokens, n_tokens, &n_common);
    if (node >= 0 && n_common == cache->nodes[node].n_tokens && paged__node_idle(&cache->nodes[node]))
        paged__prefix_remove(cache, node);
}

/* A new node after the sequence's tip. hash: of a full block, else NULL. blocks: of each group, in use. */
static int32_t insert(paged_cache *cache, const paged__seq *seq, const int32_t *tokens, int32_t n_tokens,
                      const uint64_t *hash, const int32_t *blocks) {
    int32_t parent = seq->tip;
    drop_superseded(cache, parent, tokens, n_tokens);
    int32_t node = open_node(cache);
    paged__node *n = &cache->nodes[node];
    *n = (paged__node){.parent = parent,
                       .n_tokens = n_tokens,
                       .children = -1,
                       .left = -1,
                       .right = -1,
                       .hash_next = -1,
                       .heap_pos = -1};
    memcpy(cache->node_tokens + (int64_t)node * cache->block_size, tokens, (size_t)n_tokens * sizeof *tokens);
    for (int32_t g = 0; g < cache->n_groups; g++) give_to(cache, node, g, blocks[g]);
    tree_insert(cache, children_of(cache, parent), node);
    if (parent >= 0)
        paged__node_settle(cache, parent);
    else
        cache->spaces[-2 - parent].n_refs++;
    if (hash) {
        n->hash[0] = hash[0];
        n->hash[1] = hash[1];
        n->hash_next = cache->buckets[bucket_of(cache, hash)];
        cache->buckets[bucket_of(cache, hash)] = node;
        if (parent < 0) cache->first_counts[paged__prefix_first(cache, tokens)]++;
    }
    cache->n_stored++;
    tell(cache, PAGED_EVENT_STORED, node);
    return node;
}

/* The sequence takes the node's blocks for its own ones of the same content, and leaves its own where the
 * node has none. */
static void adopt(paged_cache *cache, const paged__seq *seq, int32_t idx, int32_t node) {
    bool changed = false;
    for (int32_t g = 0; g < cache->n_groups; g++) {
        int32_t *entry = &paged__seq_table(cache, g, seq)[idx], theirs = paged__node_block(cache, node, g);
        if (theirs < 0) {
            give_to(cache, node, g, *entry);
            changed = true;
            continue;
        }
        paged__block_ref(cache, g, theirs);
        cache->n_frees += paged__block_unref(cache, g, *entry);
        *entry = theirs;
    }
    if (changed) tell(cache, PAGED_EVENT_CHANGED, node);
}

void paged__prefix_commit(paged_cache *cache, paged__seq *seq, int32_t first_len) {
    int32_t blocks[PAGED_GROUPS_MAX];
    for (int32_t idx = first_len / cache->block_size; idx < seq->len / cache->block_size; idx++) {
        const int32_t *tokens = seq->tokens + (int64_t)idx * cache->block_size;
        int32_t before = seq->tip;
        uint64_t hash[2];
        int32_t node = paged__prefix_find(cache, before, tokens, hash);
        for (int32_t g = 0; g < cache->n_groups; g++) blocks[g] = paged__seq_table(cache, g, seq)[idx];
        if (node >= 0)
            adopt(cache, seq, idx, node);
        else
            node = insert(cache, seq, tokens, cache->block_size, hash, blocks);
        seq->tip = node;
        paged__node_enter(cache, node);
        paged__node_leave(cache, before);
    }
}

/* The tail as a block of each group, with one reference, if there is room for it. */
static bool pack_tail(paged_cache *cache, const paged__seq *seq, int32_t *blocks) {
    int32_t need[PAGED_GROUPS_MAX], n_tokens = seq->len % cache->block_size, g;
    paged_status status = PAGED_OK;
    for (g = 0; g < cache->n_groups; g++) need[g] = 1;
    if (!paged__make_room(cache, need)) return false;
    for (g = 0; g < cache->n_groups && status == PAGED_OK; g++) {
        status = paged__block_take(cache, g, &blocks[g]);
        if (status != PAGED_OK) break;
        status = paged__tail_to_block(cache, seq, g, blocks[g], n_tokens);
    }
    cache->n_allocs += (uint64_t)g;
    if (status == PAGED_OK) {
        cache->n_packed += (uint64_t)cache->n_groups;
        return true;
    }
    while (--g >= 0) cache->n_frees += paged__block_unref(cache, g, blocks[g]);
    return false;
}

/* A tail consists of tiles, and a node of blocks. Without room, or if the copy fails, it is not indexed. */
static void seal_tail(paged_cache *cache, const paged__seq *seq, const int32_t *tokens, int32_t n_tokens) {
    int32_t blocks[PAGED_GROUPS_MAX];
    if (paged__tail_shares(cache, seq, (n_tokens - 1) / PAGED_TILE) || !pack_tail(cache, seq, blocks)) return;
    insert(cache, seq, tokens, n_tokens, NULL, blocks);
    for (int32_t g = 0; g < cache->n_groups; g++) PAGED_ASSERT(!paged__block_unref(cache, g, blocks[g]));
}

void paged__prefix_seal(paged_cache *cache, const paged__seq *seq) {
    int32_t idx = seq->len / cache->block_size, n_tokens = seq->len % cache->block_size, n_common;
    int32_t blocks[PAGED_GROUPS_MAX];
    bool is_tail = seq->has_tail && idx == seq->n_entries - 1;
    if (n_tokens == 0) return;
    /* Whoever else holds the block may write on in it; the last one to leave seals it. */
    if (!is_tail && paged__seq_shares(cache, seq, idx)) return;
    const int32_t *tokens = seq->tokens + (int64_t)idx * cache->block_size;
    paged__prefix_best(cache, seq->tip, tokens, n_tokens, &n_common);
    if (n_common == n_tokens) return;
    if (is_tail) {
        seal_tail(cache, seq, tokens, n_tokens);
        return;
    }
    for (int32_t g = 0; g < cache->n_groups; g++) blocks[g] = paged__seq_table(cache, g, seq)[idx];
    insert(cache, seq, tokens, n_tokens, NULL, blocks);
}
