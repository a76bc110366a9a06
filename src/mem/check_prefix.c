/* check_prefix.c: the part of paged_cache_check() that walks the index, its heaps and its namespaces.
 *
 * It looks up each node by its hash and by its tokens, so it trusts that the links of chains and trees are
 * ids. */
#include "mem/check.h"

static bool is_node(const paged_cache *cache, int32_t id) {
    return id >= 0 && id < cache->groups[0].n_ids && cache->nodes[id].n_tokens > 0;
}

static bool is_parent(const paged_cache *cache, int32_t id) {
    if (id >= 0) return is_node(cache, id) && cache->nodes[id].n_tokens == cache->block_size;
    return id <= -2 && -2 - id < cache->n_spaces_max && cache->spaces[-2 - id].n_refs > 0;
}

/* A path that is longer than there are blocks would be a circle. */
paged_status paged__check_pins(const paged_cache *cache, paged_error *err) {
    const paged__group *first = &cache->groups[0];
    for (int32_t i = 0; i < cache->pins.n; i++) {
        int32_t n_steps = 0;
        for (int32_t node = cache->pins.items[i]; node >= 0; node = cache->nodes[node].parent) {
            REQUIRE(is_node(cache, node) && n_steps++ < first->n_ids, "pin %d leads to block %d", i, node);
            for (int32_t g = 0; g < cache->n_groups; g++) {
                int32_t block = paged__node_block(cache, node, g);
                REQUIRE(block >= 0 && block < cache->groups[g].n_ids, "node %d names block %d of group %d",
                        node, block, g);
                cache->groups[g].recount[block].n_refs++;
            }
        }
    }
    return PAGED_OK;
}

static paged_status check_heap(const paged_cache *cache, const paged__heap *heap, bool pins,
                               paged_error *err) {
    for (int32_t i = 0; i < heap->n; i++) {
        int32_t node = heap->items[i];
        REQUIRE(is_node(cache, node) && cache->nodes[node].heap_pos == i &&
                    (cache->nodes[node].until > 0) == pins,
                "place %d of the heap of %s holds block %d wrongly", i, pins ? "pins" : "leaves", node);
        REQUIRE(i == 0 || !paged__heap_before(cache, heap, node, heap->items[(i - 1) / 2]),
                "place %d of the heap of %s is before its parent", i, pins ? "pins" : "leaves");
    }
    return PAGED_OK;
}

static paged_status check_node(const paged_cache *cache, int32_t node, paged_error *err) {
    const paged__node *n = &cache->nodes[node];
    const int32_t *tokens = paged__node_tokens(cache, node);
    int32_t refs = cache->groups[0].blocks[node].refs, n_common;
    REQUIRE(n->n_tokens <= cache->block_size && is_parent(cache, n->parent), "node %d: %d tokens, parent %d",
            node, n->n_tokens, n->parent);
    REQUIRE(n->parent < 0 || refs == 0 || cache->groups[0].blocks[n->parent].refs > 0,
            "node %d is in use, its parent %d is not", node, n->parent);
    for (int32_t g = 0; g < cache->n_groups; g++) {
        int32_t id = paged__node_block(cache, node, g);
        REQUIRE(id >= 0 && id < cache->groups[g].n_ids, "node %d names block %d of group %d", node, id, g);
        const paged__block *block = &cache->groups[g].blocks[id];
        REQUIRE(block->indexed && block->refs == refs,
                "node %d has %d references, its block %d of group %d has %d, indexed: %d", node, refs,
                paged__node_block(cache, node, g), g, block->refs, block->indexed);
    }
    if (n->n_tokens == cache->block_size) {
        uint64_t hash[2];
        int32_t found = paged__prefix_find(cache, n->parent, tokens, hash);
        REQUIRE(found == node && n->hash[0] == hash[0] && n->hash[1] == hash[1],
                "the hash of node %d leads to %d", node, found);
    }
    /* An exact match ends the walk down the tree, unless a longer sibling begins with the same tokens. */
    int32_t best = paged__prefix_best(cache, n->parent, tokens, n->n_tokens, &n_common);
    REQUIRE(is_node(cache, best) && n_common == n->n_tokens &&
                (best == node || cache->nodes[best].n_tokens > n->n_tokens),
            "the tree of parent %d leads to %d with %d tokens, not to %d", n->parent, best, n_common, node);
    bool leaf = refs == 0 && n->children < 0;
    REQUIRE((n->heap_pos >= 0) == (leaf || n->until > 0) && (!n->until || refs > 0),
            "node %d has place %d in a heap; references %d, children %d, pinned until %llu", node,
            n->heap_pos, refs, n->children, (unsigned long long)n->until);
    return PAGED_OK;
}

/* Every full block of a sequence in a namespace is a node, in order; of one without, none. */
static paged_status check_path(const paged_cache *cache, int32_t row, paged_error *err) {
    const paged__seq *seq = &cache->seqs[row];
    const int32_t *table = paged__seq_table(cache, 0, seq);
    int32_t parent = -2 - seq->space;
    for (int32_t i = 0; i < seq->n_entries && seq->space < 0; i++)
        REQUIRE(!cache->groups[0].blocks[table[i]].indexed, "row %d has no namespace, entry %d is indexed",
                row, i);
    for (int32_t i = 0; i < seq->len / cache->block_size && seq->space >= 0; i++) {
        const int32_t *tokens = seq->tokens + (int64_t)i * cache->block_size;
        REQUIRE(is_parent(cache, table[i]) && cache->nodes[table[i]].parent == parent,
                "row %d entry %d: block %d is no node after %d", row, i, table[i], parent);
        REQUIRE(memcmp(paged__node_tokens(cache, table[i]), tokens,
                       (size_t)cache->block_size * sizeof *tokens) == 0,
                "row %d entry %d: the tokens of node %d differ", row, i, table[i]);
        for (int32_t g = 1; g < cache->n_groups; g++)
            REQUIRE(paged__node_block(cache, table[i], g) == paged__seq_table(cache, g, seq)[i],
                    "row %d entry %d: group %d has a block of another node", row, i, g);
        parent = table[i];
    }
    return PAGED_OK;
}

/* References of the namespaces, the number of hashed nodes, and indexed blocks that no node has. */
static paged_status check_counts(const paged_cache *cache, paged_error *err) {
    int64_t n_refs = 0, n_counted = 0, n_nodes = 0, n_placed = 0, n_full = 0, n_hashed = 0, n_indexed = 0,
            n_firsts = 0;
    for (int32_t row = 0; row < cache->max_seqs; row++) n_refs += cache->seqs[row].space >= 0;
    for (int32_t b = 0; b < cache->groups[0].n_ids; b++) {
        const paged__node *n = &cache->nodes[b];
        if (!n->n_tokens) continue;
        n_nodes++;
        n_placed += n->heap_pos >= 0;
        n_full += n->n_tokens == cache->block_size;
        n_refs += n->parent < 0;
        n_firsts += n->parent < 0 && n->n_tokens == cache->block_size;
    }
    REQUIRE(n_placed == (int64_t)cache->evictable.n + cache->pins.n,
            "%lld nodes in a heap, %d and %d counted", (long long)n_placed, cache->evictable.n,
            cache->pins.n);
    for (int32_t i = 0; i < cache->n_spaces_max; i++) n_counted += cache->spaces[i].n_refs;
    REQUIRE(n_refs == n_counted, "namespaces have %lld references, %lld counted", (long long)n_refs,
            (long long)n_counted);
    for (size_t i = 0; i < cache->n_buckets; i++) {
        for (int32_t b = cache->buckets[i]; b >= 0 && n_hashed <= n_full; b = cache->nodes[b].hash_next)
            n_hashed++;
        n_firsts -= cache->first_counts[i];
    }
    REQUIRE(n_hashed == n_full && n_firsts == 0, "%lld full nodes, %lld hashed; first ones off by %lld",
            (long long)n_full, (long long)n_hashed, (long long)n_firsts);
    for (int32_t g = 0; g < cache->n_groups; g++) {
        for (int32_t b = 0; b < cache->groups[g].n_ids; b++) n_indexed += cache->groups[g].blocks[b].indexed;
    }
    REQUIRE(n_indexed == n_nodes * cache->n_groups, "%lld nodes, %lld indexed blocks in %d groups",
            (long long)n_nodes, (long long)n_indexed, cache->n_groups);
    return PAGED_OK;
}

paged_status paged__check_prefix(const paged_cache *cache, paged_error *err) {
    paged_status status = check_heap(cache, &cache->evictable, false, err);
    if (status == PAGED_OK) status = check_heap(cache, &cache->pins, true, err);
    for (int32_t b = 0; b < cache->groups[0].n_ids && status == PAGED_OK; b++) {
        if (cache->nodes[b].n_tokens) status = check_node(cache, b, err);
    }
    for (int32_t row = 0; row < cache->max_seqs && status == PAGED_OK; row++)
        status = check_path(cache, row, err);
    if (status == PAGED_OK) status = check_counts(cache, err);
    return status;
}
