/* check_prefix.c: the part of paged_cache_check() that walks the index, its heaps and its namespaces.
 *
 * It looks up each node by its hash and by its tokens, so it trusts that the links of chains and trees are
 * ids. */
#include "mem/check.h"

static bool is_node(const paged_cache *cache, int32_t id) {
    return id >= 0 && id < cache->n_nodes_max && cache->nodes[id].n_tokens > 0;
}

static bool is_parent(const paged_cache *cache, int32_t id) {
    if (id >= 0) return is_node(cache, id) && cache->nodes[id].n_tokens == cache->block_size;
    return id <= -2 && -2 - id < cache->n_spaces_max && cache->spaces[-2 - id].n_refs > 0;
}

/* A path that is longer than there are nodes would be a circle. */
static paged_status path_depth(const paged_cache *cache, int32_t pin, int32_t *depth, paged_error *err) {
    *depth = -1;
    for (int32_t node = cache->pins.items[pin]; node >= 0; node = cache->nodes[node].parent)
        REQUIRE(is_node(cache, node) && ++*depth < cache->n_nodes_max, "pin %d leads to node %d", pin, node);
    return PAGED_OK;
}

/* What n transfers of a node hold of those before it. Returns the nodes of its path, at most as many as there
 * are. */
static int32_t count_path(const paged_cache *cache, int32_t node, int32_t n) {
    int32_t n_nodes = 1;
    while (is_node(cache, node = cache->nodes[node].parent) && n_nodes < cache->n_nodes_max) {
        n_nodes++;
        for (int32_t g = 0; g < cache->n_groups; g++) {
            int32_t block = paged__node_block(cache, node, g);
            if (!cache->groups[g].config.window && block >= 0 && block < cache->groups[g].n_ids)
                cache->groups[g].recount[block].n_refs += n;
        }
    }
    return n_nodes;
}

paged_status paged__check_pins(const paged_cache *cache, paged_error *err) {
    int64_t n_pinned = 0;
    for (int32_t pin = 0; pin < cache->pins.n; pin++) {
        int32_t depth;
        paged_status status = path_depth(cache, pin, &depth, err);
        if (status != PAGED_OK) return status;
        n_pinned += depth + 1;
        for (int32_t node = cache->pins.items[pin], i = depth; i >= 0;
             node = cache->nodes[node].parent, i--) {
            for (int32_t g = 0; g < cache->n_groups; g++) {
                int32_t block = paged__node_block(cache, node, g);
                if (!paged__pin_holds(cache, g, depth, i)) continue;
                REQUIRE(block >= 0 && block < cache->groups[g].n_ids,
                        "node %d is pinned and has block %d of group %d", node, block, g);
                cache->groups[g].recount[block].n_refs++;
            }
        }
    }
    for (int32_t node = 0; node < cache->n_nodes_max; node++) {
        const int32_t n = cache->nodes[node].n_tokens ? cache->nodes[node].n_transfers : 0;
        if (n) n_pinned += n * (int64_t)count_path(cache, node, n);
    }
    REQUIRE(n_pinned == cache->n_pinned, "%lld nodes pinned or in transfer, %lld counted",
            (long long)n_pinned, (long long)cache->n_pinned);
    for (int32_t g = 0; g < cache->n_groups; g++)
        for (int32_t b = 0; b < cache->groups[g].n_ids; b++)
            cache->groups[g].recount[b].n_refs += cache->groups[g].blocks[b].n_transfers;
    return PAGED_OK;
}

/* Who waits holds nothing, waits for one that produces what it wants, and is counted there. */
paged_status paged__check_promises(const paged_cache *cache, paged_error *err) {
    int64_t n_waiting = 0, n_waiters = 0;
    for (int32_t row = 0; row < cache->max_seqs; row++) {
        const paged__promise *p = &cache->promises[row];
        const paged__seq *seq = &cache->seqs[row];
        n_waiters += p->n_waiters;
        REQUIRE(p->n_tokens > 0 || (p->producer == -1 && p->n_waiters == 0),
                "row %d promised nothing, waits for %d, has %d waiters", row, p->producer, p->n_waiters);
        if (p->n_tokens == 0) continue;
        REQUIRE(seq->live && p->n_tokens <= cache->max_seq_tokens && p->space >= 0 &&
                    p->space < cache->n_spaces_max && cache->spaces[p->space].n_refs > 0,
                "row %d promised %d tokens, room %d, namespace %d", row, p->n_tokens, cache->max_seq_tokens,
                p->space);
        if (p->producer < 0) continue;
        n_waiting++;
        REQUIRE(p->producer < cache->max_seqs && p->producer != row, "row %d waits for row %d", row,
                p->producer);
        const paged__promise *other = &cache->promises[p->producer];
        REQUIRE(other->n_tokens >= p->n_common && other->producer < 0 && other->space == p->space &&
                    cache->seqs[p->producer].len < p->n_common && p->n_waiters == 0,
                "row %d waits for %d tokens of row %d, which promised %d, waits for %d, has %d", row,
                p->n_common, p->producer, other->n_tokens, other->producer, cache->seqs[p->producer].len);
        REQUIRE(seq->len == 0 && seq->reserved == 0 && seq->space < 0, "row %d waits and has %d tokens", row,
                seq->len);
    }
    REQUIRE(n_waiting == n_waiters, "%lld rows wait, %lld counted", (long long)n_waiting,
            (long long)n_waiters);
    return PAGED_OK;
}

static paged_status check_heap(const paged_cache *cache, const paged__heap *heap, bool pins,
                               paged_error *err) {
    for (int32_t i = 0; i < heap->n; i++) {
        int32_t node = heap->items[i];
        REQUIRE(is_node(cache, node) && cache->nodes[node].heap_pos == i &&
                    (cache->nodes[node].until > 0) == pins,
                "place %d of the heap of %s holds node %d wrongly", i, pins ? "pins" : "leaves", node);
        REQUIRE(i == 0 || !paged__heap_before(cache, heap, node, heap->items[(i - 1) / 2]),
                "place %d of the heap of %s is before its parent", i, pins ? "pins" : "leaves");
    }
    return PAGED_OK;
}

/* The heap of a group's blocks that may go before their nodes: all cached ones. */
static paged_status check_loose(const paged_cache *cache, int32_t g, paged_error *err) {
    const paged__group *gr = &cache->groups[g];
    REQUIRE(gr->loose.n == (gr->config.window ? gr->n_cached : 0),
            "%d cached blocks of group %d in a heap, not %d", gr->loose.n, g, gr->n_cached);
    for (int32_t i = 0; i < gr->loose.n; i++) {
        int32_t block = gr->loose.items[i];
        REQUIRE(block >= 0 && block < gr->n_ids && gr->blocks[block].state == PAGED__BLOCK_CACHED &&
                    gr->loose_place[block] == i,
                "place %d of the heap of group %d holds block %d wrongly", i, g, block);
        REQUIRE(i == 0 || !paged__heap_before(cache, &gr->loose, block, gr->loose.items[(i - 1) / 2]),
                "place %d of the heap of group %d is before its parent", i, g);
    }
    return PAGED_OK;
}

/* The blocks of a node: theirs is the node, and they are counted. */
static paged_status check_node_blocks(const paged_cache *cache, int32_t node, paged_error *err) {
    const paged__node *n = &cache->nodes[node];
    int32_t n_blocks = 0, n_held = 0;
    for (int32_t g = 0; g < cache->n_groups; g++) {
        int32_t id = paged__node_block(cache, node, g);
        if (id == -1 && cache->groups[g].config.window) continue;
        REQUIRE(id >= 0 && id < cache->groups[g].n_ids, "node %d names block %d of group %d", node, id, g);
        const paged__block *block = &cache->groups[g].blocks[id];
        REQUIRE(block->indexed && block->node == node, "block %d of group %d, indexed: %d, is not of node %d",
                id, g, block->indexed, node);
        n_blocks++;
        n_held += block->refs > 0;
    }
    REQUIRE(n->n_blocks == n_blocks && n->n_held == n_held,
            "node %d has %d blocks, %d of them in use; %d and %d counted", node, n_blocks, n_held,
            n->n_blocks, n->n_held);
    REQUIRE(n_blocks > 0 || !paged__node_idle(n), "node %d has no block and no use", node);
    REQUIRE(n->n_users >= (n->until > 0), "node %d is pinned and has %d users", node, n->n_users);
    return PAGED_OK;
}

static paged_status check_node(const paged_cache *cache, int32_t node, paged_error *err) {
    const paged__node *n = &cache->nodes[node];
    const int32_t *tokens = paged__node_tokens(cache, node);
    int32_t n_common;
    REQUIRE(n->n_tokens <= cache->block_size && is_parent(cache, n->parent), "node %d: %d tokens, parent %d",
            node, n->n_tokens, n->parent);
    paged_status status = check_node_blocks(cache, node, err);
    if (status != PAGED_OK) return status;
    for (int32_t g = 0; g < cache->n_groups && n->parent >= 0; g++) {
        int32_t own = paged__node_block(cache, node, g), before = paged__node_block(cache, n->parent, g);
        if (cache->groups[g].config.window) continue;
        REQUIRE(cache->groups[g].blocks[own].refs == 0 || cache->groups[g].blocks[before].refs > 0,
                "node %d is in use, its parent %d is not", node, n->parent);
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
    REQUIRE((n->heap_pos >= 0) == (paged__node_idle(n) || n->until > 0),
            "node %d has place %d in a heap; %d blocks in use, %d users, children %d, pinned until %llu",
            node, n->heap_pos, n->n_held, n->n_users, n->children, (unsigned long long)n->until);
    return PAGED_OK;
}

/* Every full block of a sequence in a namespace is a node, in order up from its tip, and what the sequence
 * has of it is the node's; of one without, none is. */
static paged_status check_path(const paged_cache *cache, int32_t row, paged_error *err) {
    const paged__seq *seq = &cache->seqs[row];
    for (int32_t i = paged__seq_first(cache, 0, seq); i < seq->n_entries && seq->space < 0; i++) {
        int32_t block = paged__seq_table(cache, 0, seq)[i];
        REQUIRE(block < 0 || !cache->groups[0].blocks[block].indexed,
                "row %d has no namespace, entry %d is indexed", row, i);
    }
    if (seq->space < 0) {
        REQUIRE(seq->tip == -1, "row %d has no namespace and stands on node %d", row, seq->tip);
        return PAGED_OK;
    }
    int32_t node = seq->tip;
    for (int32_t i = seq->len / cache->block_size - 1; i >= 0; i--) {
        const int32_t *tokens = seq->tokens + (int64_t)i * cache->block_size;
        REQUIRE(node >= 0 && is_parent(cache, node), "row %d entry %d: %d is no full node", row, i, node);
        REQUIRE(memcmp(paged__node_tokens(cache, node), tokens, (size_t)cache->block_size * sizeof *tokens) ==
                    0,
                "row %d entry %d: the tokens of node %d differ", row, i, node);
        for (int32_t g = 0; g < cache->n_groups; g++)
            REQUIRE(i < paged__seq_first(cache, g, seq) ||
                        paged__node_block(cache, node, g) == paged__seq_table(cache, g, seq)[i],
                    "row %d entry %d: group %d has a block of another node than %d", row, i, g, node);
        node = cache->nodes[node].parent;
    }
    REQUIRE(node == -2 - seq->space, "row %d: its path begins at %d, not in namespace %d", row, node,
            seq->space);
    return PAGED_OK;
}

/* What is kept as a number about all nodes, recounted. */
typedef struct counts {
    int64_t n_nodes, n_placed, n_full, n_firsts, n_blocks, n_users, n_space_refs;
} counts;

static counts count_nodes(const paged_cache *cache) {
    counts c = {0};
    for (int32_t b = 0; b < cache->n_nodes_max; b++) {
        const paged__node *n = &cache->nodes[b];
        if (!n->n_tokens) continue;
        c.n_nodes++;
        c.n_blocks += n->n_blocks;
        c.n_users += n->n_users;
        c.n_placed += n->heap_pos >= 0;
        c.n_full += n->n_tokens == cache->block_size;
        c.n_space_refs += n->parent < 0;
        c.n_firsts += n->parent < 0 && n->n_tokens == cache->block_size;
    }
    return c;
}

static paged_status check_lists(const paged_cache *cache, const counts *c, paged_error *err) {
    int64_t n_free = 0, n_hashed = 0, n_firsts = 0;
    for (int32_t i = cache->free_node; i >= 0 && n_free <= cache->n_nodes_max;
         i = cache->nodes[i].hash_next) {
        REQUIRE(i < cache->n_nodes_max && cache->nodes[i].n_tokens == 0, "the list of free nodes leads to %d",
                i);
        n_free++;
    }
    REQUIRE(n_free + c->n_nodes == cache->n_nodes_max, "%lld free nodes and %lld others of %d",
            (long long)n_free, (long long)c->n_nodes, cache->n_nodes_max);
    for (size_t i = 0; i < cache->n_buckets; i++) {
        for (int32_t b = cache->buckets[i]; b >= 0 && n_hashed <= c->n_full; b = cache->nodes[b].hash_next)
            n_hashed++;
        n_firsts += cache->first_counts[i];
    }
    REQUIRE(n_hashed == c->n_full && n_firsts == c->n_firsts,
            "%lld full nodes, %lld hashed; %lld first ones, %lld counted", (long long)c->n_full,
            (long long)n_hashed, (long long)c->n_firsts, (long long)n_firsts);
    return PAGED_OK;
}

/* References of nodes and namespaces, and indexed blocks that no node has. */
static paged_status check_counts(const paged_cache *cache, paged_error *err) {
    counts c = count_nodes(cache);
    int64_t n_refs = c.n_space_refs, n_counted = 0, n_indexed = 0, n_tips = 0, n_transfers = 0;
    for (int32_t row = 0; row < cache->max_seqs; row++) {
        n_refs += cache->seqs[row].space >= 0;
        n_tips += cache->seqs[row].tip >= 0;
        n_refs += cache->promises[row].n_tokens > 0;
    }
    for (int32_t i = 0; i < cache->n_nodes_max; i++)
        n_transfers += cache->nodes[i].n_tokens ? cache->nodes[i].n_transfers : 0;
    REQUIRE(c.n_users == n_tips + cache->pins.n + n_transfers,
            "nodes have %lld users; %lld tips, %d pins and %lld transfers", (long long)c.n_users,
            (long long)n_tips, cache->pins.n, (long long)n_transfers);
    REQUIRE(c.n_placed == (int64_t)cache->evictable.n + cache->pins.n,
            "%lld nodes in a heap, %d and %d counted", (long long)c.n_placed, cache->evictable.n,
            cache->pins.n);
    for (int32_t i = 0; i < cache->n_spaces_max; i++) n_counted += cache->spaces[i].n_refs;
    REQUIRE(n_refs == n_counted, "namespaces have %lld references, %lld counted", (long long)n_refs,
            (long long)n_counted);
    for (int32_t g = 0; g < cache->n_groups; g++) {
        for (int32_t b = 0; b < cache->groups[g].n_ids; b++) n_indexed += cache->groups[g].blocks[b].indexed;
    }
    REQUIRE(n_indexed == c.n_blocks, "nodes have %lld blocks, %lld are indexed", (long long)c.n_blocks,
            (long long)n_indexed);
    return check_lists(cache, &c, err);
}

paged_status paged__check_prefix(const paged_cache *cache, paged_error *err) {
    paged_status status = check_heap(cache, &cache->evictable, false, err);
    if (status == PAGED_OK) status = check_heap(cache, &cache->pins, true, err);
    for (int32_t g = 0; g < cache->n_groups && status == PAGED_OK; g++) status = check_loose(cache, g, err);
    for (int32_t b = 0; b < cache->n_nodes_max && status == PAGED_OK; b++) {
        if (cache->nodes[b].n_tokens) status = check_node(cache, b, err);
    }
    for (int32_t row = 0; row < cache->max_seqs && status == PAGED_OK; row++)
        status = check_path(cache, row, err);
    if (status == PAGED_OK) status = check_counts(cache, err);
    return status;
}
