/* prefix.c: the index from content to blocks.
 *
 * A node is a block (one of each group) with its tokens and the node before it. Full nodes are found by a
 * chained hash: XXH3-128 over the parent's hash and the tokens. The hash only says where to look; parent and
 * tokens are compared, so a collision is a miss. The children of a parent are besides a tree ordered by their
 * tokens (a treap: link by tokens, heap by a hash of the id), in which the child that agrees longest with
 * given tokens lies on the way to them.
 *
 * Nothing here allocates: node b belongs to block b of group 0, and everything is there from the start. */
#include "mem/hash.h"
#include "mem/mem.h"

void paged__prefix_init(paged_cache *cache) {
    for (size_t i = 0; i < cache->n_buckets; i++) cache->buckets[i] = -1;
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

static void tell(const paged_cache *cache, paged_event_kind kind, int32_t node) {
    const paged__node *n = &cache->nodes[node];
    if (!cache->event) return;
    paged_event event = {.kind = kind,
                         .block = node,
                         .parent = PAGED_MAX(n->parent, -1),
                         .n_tokens = n->n_tokens,
                         .tokens = paged__node_tokens(cache, node)};
    if (n->parent < 0) memcpy(event.namespace_hash, hash_of(cache, n->parent), sizeof event.namespace_hash);
    cache->event(cache->event_user, &event);
}

/* A sealed tail that the new tokens go beyond says nothing any more. */
static void drop_superseded(paged_cache *cache, int32_t parent, const int32_t *tokens, int32_t n_tokens) {
    int32_t n_common, node = paged__prefix_best(cache, parent, tokens, n_tokens, &n_common);
    if (node >= 0 && n_common == cache->nodes[node].n_tokens && cache->groups[0].blocks[node].refs == 0)
        paged__prefix_remove(cache, node);
}

/* hash: of a full block, else NULL. The block of each group is entry idx of the sequence, in use. */
static void insert(paged_cache *cache, const paged__seq *seq, int32_t idx, int32_t parent, int32_t n_tokens,
                   const uint64_t *hash) {
    const int32_t *tokens = seq->tokens + (int64_t)idx * cache->block_size;
    int32_t node = paged__seq_table(cache, 0, seq)[idx];
    drop_superseded(cache, parent, tokens, n_tokens);
    paged__node *n = &cache->nodes[node];
    *n = (paged__node){.parent = parent,
                       .n_tokens = n_tokens,
                       .children = -1,
                       .left = -1,
                       .right = -1,
                       .hash_next = -1,
                       .heap_pos = -1};
    memcpy(cache->node_tokens + (int64_t)node * cache->block_size, tokens, (size_t)n_tokens * sizeof *tokens);
    for (int32_t g = 0; g < cache->n_groups; g++) {
        int32_t block = paged__seq_table(cache, g, seq)[idx];
        if (cache->node_blocks) cache->node_blocks[(int64_t)node * cache->n_groups + g] = block;
        PAGED_ASSERT(!cache->groups[g].blocks[block].indexed);
        cache->groups[g].blocks[block].indexed = true;
    }
    tree_insert(cache, children_of(cache, parent), node);
    if (parent < 0) cache->spaces[-2 - parent].n_refs++;
    if (hash) {
        n->hash[0] = hash[0];
        n->hash[1] = hash[1];
        n->hash_next = cache->buckets[bucket_of(cache, hash)];
        cache->buckets[bucket_of(cache, hash)] = node;
        if (parent < 0) cache->first_counts[paged__prefix_first(cache, tokens)]++;
    }
    cache->n_stored++;
    tell(cache, PAGED_EVENT_STORED, node);
}

void paged__prefix_remove(paged_cache *cache, int32_t node) {
    paged__node *n = &cache->nodes[node];
    int32_t parent = n->parent;
    PAGED_ASSERT(n->n_tokens > 0 && n->children < 0 && cache->groups[0].blocks[node].refs == 0);
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
    if (parent >= 0)
        paged__node_settle(cache, parent);
    else
        paged__space_unref(cache, -2 - parent);
    for (int32_t g = 0; g < cache->n_groups; g++) {
        int32_t block = paged__node_block(cache, node, g);
        cache->groups[g].blocks[block].indexed = false;
        paged__block_drop(cache, g, block);
    }
}

/* The sequence takes the cached blocks of the same content and gives its own back. */
static void replace(paged_cache *cache, const paged__seq *seq, int32_t idx, int32_t node) {
    for (int32_t g = 0; g < cache->n_groups; g++) {
        int32_t *entry = &paged__seq_table(cache, g, seq)[idx];
        paged__block_ref(cache, g, paged__node_block(cache, node, g));
        cache->n_frees += paged__block_unref(cache, g, *entry);
        *entry = paged__node_block(cache, node, g);
    }
}

static int32_t parent_of(const paged_cache *cache, const paged__seq *seq, int32_t idx) {
    return idx > 0 ? paged__seq_table(cache, 0, seq)[idx - 1] : -2 - seq->space;
}

void paged__prefix_commit(paged_cache *cache, paged__seq *seq, int32_t first_len) {
    for (int32_t idx = first_len / cache->block_size; idx < seq->len / cache->block_size; idx++) {
        int32_t parent = parent_of(cache, seq, idx);
        uint64_t hash[2];
        int32_t node =
            paged__prefix_find(cache, parent, seq->tokens + (int64_t)idx * cache->block_size, hash);
        if (node >= 0)
            replace(cache, seq, idx, node);
        else
            insert(cache, seq, idx, parent, cache->block_size, hash);
    }
}

void paged__prefix_seal(paged_cache *cache, const paged__seq *seq) {
    int32_t idx = seq->len / cache->block_size, n_tokens = seq->len % cache->block_size, n_common;
    if (n_tokens == 0) return;
    const paged__block *block = &cache->groups[0].blocks[paged__seq_table(cache, 0, seq)[idx]];
    /* Whoever else holds the block may write on in it; the last one to leave seals it. */
    if (block->refs > 1 || block->indexed) return;
    int32_t parent = parent_of(cache, seq, idx);
    const int32_t *tokens = seq->tokens + (int64_t)idx * cache->block_size;
    paged__prefix_best(cache, parent, tokens, n_tokens, &n_common);
    if (n_common < n_tokens) insert(cache, seq, idx, parent, n_tokens, NULL);
}
