/* check.c: paged_cache_check(): recounts everything that is kept as a number and names the first thing
 * that does not hold.
 *
 * It trusts the sizes of the arrays and nothing in them: every index is tested before it is used and every
 * list is walked at most as far as it can be long. Cost: O(blocks + table entries + committed tokens). */
#include "mem/check.h"

/* ---- sequences ---- */

static paged_status check_row(const paged_cache *cache, int32_t row, paged_error *err) {
    const paged__seq *seq = &cache->seqs[row];
    if (!seq->live) {
        REQUIRE(seq->len == 0 && seq->reserved == 0 && seq->n_entries == 0,
                "row %d is free but has %d tokens, %d reserved, %d entries", row, seq->len, seq->reserved,
                seq->n_entries);
        return PAGED_OK;
    }
    int64_t n_tokens = (int64_t)seq->len + seq->reserved;
    REQUIRE(seq->tag != 0, "row %d has tag 0", row);
    REQUIRE(seq->len >= 0 && seq->reserved >= 0 && n_tokens <= cache->max_seq_tokens,
            "row %d: %d tokens and %d reserved, %d allowed", row, seq->len, seq->reserved,
            cache->max_seq_tokens);
    REQUIRE(seq->n_entries == paged__entries_for(cache, n_tokens, seq->n_entries),
            "row %d: %d entries for %lld tokens in blocks of %d", row, seq->n_entries, (long long)n_tokens,
            cache->block_size);
    REQUIRE(seq->tokens == cache->tokens + row * cache->token_stride, "row %d has the tokens of another",
            row);
    return PAGED_OK;
}

static paged_status check_rows(const paged_cache *cache, paged_error *err) {
    int32_t n_live = 0, n_free = 0;
    int64_t n_tokens = 0;
    for (int32_t row = 0; row < cache->max_seqs; row++) {
        paged_status status = check_row(cache, row, err);
        if (status != PAGED_OK) return status;
        n_live += cache->seqs[row].live;
        n_tokens += cache->seqs[row].len;
    }
    /* A walk over free rows only, as long as there are free rows, has met each once. */
    for (int32_t row = cache->free_seq; row >= 0; row = cache->seqs[row].next_free) {
        REQUIRE(row < cache->max_seqs && !cache->seqs[row].live && n_free < cache->max_seqs,
                "the list of free rows leads to row %d", row);
        n_free++;
    }
    REQUIRE(n_live == cache->n_seqs && n_live + n_free == cache->max_seqs,
            "%d rows live, %d counted, %d on the free list, %d in all", n_live, cache->n_seqs, n_free,
            cache->max_seqs);
    REQUIRE(n_tokens == cache->n_tokens, "%lld tokens, %lld counted", (long long)n_tokens,
            (long long)cache->n_tokens);
    return PAGED_OK;
}

/* ---- tables ---- */

/* The sequence that named the block before has the same tokens in it, as far as both have committed. */
static paged_status check_sharing(const paged_cache *cache, int32_t g, int32_t row, int32_t idx,
                                  const paged__recount *count, paged_error *err) {
    int32_t block = cache->groups[g].tables[row * cache->table_stride + idx];
    if (count->last_row == 0) return PAGED_OK;
    const paged__seq *seq = &cache->seqs[row], *other = &cache->seqs[count->last_row - 1];
    REQUIRE(seq != other, "row %d names block %d of group %d twice, at %d and %d", row, block, g,
            count->last_idx, idx);
    REQUIRE(count->last_idx == idx, "block %d of group %d is entry %d of row %d and %d of row %d", block, g,
            count->last_idx, count->last_row - 1, idx, row);
    int32_t first = idx * cache->block_size;
    int32_t end = PAGED_MIN(first + cache->block_size, PAGED_MIN(seq->len, other->len));
    for (int32_t i = first; i < end; i++) {
        REQUIRE(seq->tokens[i] == other->tokens[i],
                "rows %d and %d share block %d of group %d, token %d differs", count->last_row - 1, row,
                block, g, i);
    }
    return PAGED_OK;
}

static paged_status check_table(const paged_cache *cache, int32_t g, int32_t row, paged_error *err) {
    const paged__group *gr = &cache->groups[g];
    const paged__seq *seq = &cache->seqs[row];
    const int32_t *table = gr->tables + row * cache->table_stride;
    int32_t n_gone = paged__seq_first(cache, g, seq);
    for (int32_t i = 0; i < n_gone; i++)
        REQUIRE(table[i] == -1, "group %d row %d entry %d is %d, not -1, before the window", g, row, i,
                table[i]);
    for (int32_t i = n_gone; i < seq->n_entries - seq->has_tail; i++) {
        REQUIRE(table[i] >= 0 && table[i] < gr->n_ids && gr->blocks[table[i]].state == PAGED__BLOCK_USED,
                "group %d row %d entry %d names block %d, which is free or does not exist (%d blocks)", g,
                row, i, table[i], gr->n_ids);
        REQUIRE(!cache->contiguous || (table[i] == table[0] + i && gr->blocks[table[i]].refs == 1),
                "group %d row %d entry %d is block %d, which is shared or not the one after the last", g, row,
                i, table[i]);
        paged__recount *count = &gr->recount[table[i]];
        paged_status status = check_sharing(cache, g, row, i, count, err);
        if (status != PAGED_OK) return status;
        count->n_refs++;
        count->last_row = row + 1;
        count->last_idx = i;
        count->n_writers += (int64_t)(i + 1) * cache->block_size > seq->len && seq->reserved > 0;
        REQUIRE(i * cache->block_size < seq->len ||
                    gr->blocks[table[i]].refs - gr->blocks[table[i]].n_transfers == 1,
                "group %d row %d entry %d is only reserved, but block %d has %d references", g, row, i,
                table[i], gr->blocks[table[i]].refs);
        REQUIRE(count->n_writers <= 1, "%d sequences may write block %d of group %d", count->n_writers,
                table[i], g);
    }
    for (int32_t i = seq->n_entries - seq->has_tail; i < cache->max_blocks; i++) {
        REQUIRE(table[i] == -1, "group %d row %d entry %d is %d, not -1, beyond %d entries", g, row, i,
                table[i], seq->n_entries);
    }
    return PAGED_OK;
}

/* ---- blocks and extents ---- */

static paged_status check_backed(const paged_cache *cache, int32_t g, int32_t block, paged_error *err) {
    size_t block_bytes = cache->groups[g].block_bytes, begin = (size_t)block * block_bytes;
    for (size_t i = begin / cache->granule_bytes; i <= (begin + block_bytes - 1) / cache->granule_bytes;
         i++) {
        REQUIRE(i < cache->n_granules && cache->granules[i].backed,
                "block %d of group %d is in use, granule %zu is not backed", block, g, i);
        cache->granules[i].recount++;
    }
    return PAGED_OK;
}

/* The free blocks of an extent: on the list, or never taken. */
static paged_status check_free_list(const paged_cache *cache, int32_t extent, paged_error *err) {
    const paged__extent *e = &cache->extents[extent];
    const paged__block *blocks = cache->groups[e->owner].blocks;
    int32_t n_listed = 0;
    for (int32_t b = e->free_head; b >= 0; b = blocks[b].next_free) {
        REQUIRE(b >= e->first && b < e->first + e->n_fresh && blocks[b].state == PAGED__BLOCK_FREE &&
                    n_listed < e->n_blocks,
                "the free list of extent %d leads to block %d of group %d", extent, b, e->owner);
        n_listed++;
    }
    REQUIRE(e->n_taken + n_listed + e->n_blocks - e->n_fresh == e->n_blocks,
            "extent %d: %d taken, %d on the list, %d never taken, %d in all", extent, e->n_taken, n_listed,
            e->n_blocks - e->n_fresh, e->n_blocks);
    return PAGED_OK;
}

static paged_status check_extent(const paged_cache *cache, int32_t extent, paged_error *err) {
    const paged__extent *e = &cache->extents[extent];
    int32_t first, n_blocks, n_taken = 0;
    if (e->owner == -1) return PAGED_OK;
    REQUIRE(e->owner >= 0 && e->owner < cache->n_groups, "extent %d belongs to group %d", extent, e->owner);
    const paged__group *gr = &cache->groups[e->owner];
    paged__extent_range(cache, e->owner, extent, &first, &n_blocks);
    REQUIRE(e->first == first && e->n_blocks == n_blocks && e->n_fresh >= 0 && e->n_fresh <= n_blocks,
            "extent %d has blocks %d + %d, %d taken once, instead of %d + %d", extent, e->first, e->n_blocks,
            e->n_fresh, first, n_blocks);
    for (int32_t b = first; b < first + n_blocks; b++) {
        if (gr->blocks[b].state == PAGED__BLOCK_FREE) continue;
        REQUIRE(b < first + e->n_fresh, "block %d of group %d is in use but was never taken", b, e->owner);
        paged_status status = check_backed(cache, e->owner, b, err);
        if (status != PAGED_OK) return status;
        n_taken++;
    }
    REQUIRE(n_taken == e->n_taken && n_taken > 0,
            "extent %d of group %d has %d blocks in use or cached, %d counted", extent, e->owner, n_taken,
            e->n_taken);
    return check_free_list(cache, extent, err);
}

static paged_status check_free_extents(const paged_cache *cache, paged_error *err) {
    int32_t n_unowned = 0;
    REQUIRE(cache->n_free_extents >= 0 && cache->n_free_extents <= cache->n_extents, "%d free extents of %d",
            cache->n_free_extents, cache->n_extents);
    for (int32_t i = 0; i < cache->n_extents; i++) n_unowned += cache->extents[i].owner == -1;
    REQUIRE(n_unowned == cache->n_free_extents, "%d extents without an owner, %d on the stack", n_unowned,
            cache->n_free_extents);
    /* Owner -1 and the right number of them; a double one would leave its field `first` marked. */
    for (int32_t i = 0; i < cache->n_free_extents; i++) {
        int32_t extent = cache->free_extents[i];
        REQUIRE(extent >= 0 && extent < cache->n_extents && cache->extents[extent].owner == -1 &&
                    cache->extents[extent].first != -1,
                "the stack of free extents names extent %d wrongly or twice", extent);
        cache->extents[extent].first = -1;
    }
    return PAGED_OK;
}

/* The lists of a group's extents with free blocks, n_partial of them. */
static paged_status check_partial(const paged_cache *cache, int32_t g, int32_t n_partial, paged_error *err) {
    const paged__group *gr = &cache->groups[g];
    int32_t n_listed = 0;
    for (int32_t f = 0; f < PAGED__FULLNESS; f++) {
        int32_t prev = -1;
        REQUIRE((gr->partial[f] >= 0) == (gr->fullness >> f & 1), "group %d: fullness %d is marked wrongly",
                g, f);
        for (int32_t i = gr->partial[f]; i >= 0; i = cache->extents[i].next) {
            const paged__extent *e = &cache->extents[i];
            REQUIRE(i < cache->n_extents && n_listed < n_partial && e->owner == g && e->prev == prev &&
                        e->n_taken < e->n_blocks && e->n_taken >> gr->fullness_shift == f,
                    "the list of group %d's extents of fullness %d leads to extent %d", g, f, i);
            prev = i;
            n_listed++;
        }
    }
    REQUIRE(n_listed == n_partial, "group %d: %d extents have free blocks, %d are on the list", g, n_partial,
            n_listed);
    return PAGED_OK;
}

static paged_status check_group(const paged_cache *cache, int32_t g, paged_error *err) {
    const paged__group *gr = &cache->groups[g];
    int32_t n_used = 0, n_cached = 0, n_free = 0, n_partial = 0;
    for (int32_t b = 0; b < gr->n_ids; b++) {
        const paged__block *block = &gr->blocks[b];
        int32_t extent = paged__extent_of(cache, g, b);
        REQUIRE(block->refs == gr->recount[b].n_refs,
                "block %d of group %d has %d references; %d table entries, pins and transfers name it", b, g,
                block->refs, gr->recount[b].n_refs);
        bool cached = block->indexed && block->refs == 0;
        bool divided = block->state == PAGED__BLOCK_DIVIDED && !block->indexed; /* see check_tail.c */
        REQUIRE((block->state == PAGED__BLOCK_USED || divided) == (block->refs > 0) &&
                    (block->state == PAGED__BLOCK_CACHED) == cached && block->state <= PAGED__BLOCK_DIVIDED,
                "block %d of group %d has state %d and %d references, indexed: %d", b, g, block->state,
                block->refs, block->indexed);
        REQUIRE(block->state == PAGED__BLOCK_FREE ||
                    (extent < cache->n_extents && cache->extents[extent].owner == g),
                "block %d of group %d is in use in an extent of another", b, g);
        n_used += block->refs > 0;
        n_cached += cached;
    }
    for (int32_t i = 0; i < cache->n_extents; i++) {
        const paged__extent *e = &cache->extents[i];
        if (e->owner != g) continue;
        n_free += e->n_blocks - e->n_taken;
        n_partial += e->n_taken < e->n_blocks;
    }
    REQUIRE(n_used == gr->n_used && n_cached == gr->n_cached && n_free == gr->n_free,
            "group %d: %d used, %d cached and %d free, %d, %d and %d counted", g, n_used, n_cached, n_free,
            gr->n_used, gr->n_cached, gr->n_free);
    return check_partial(cache, g, n_partial, err);
}

/* Granules count their blocks (the walk over extents has recounted them); the idle list has the idle ones,
 * the longest idle first. */
static paged_status check_granules(const paged_cache *cache, paged_error *err) {
    size_t backed_bytes = 0, idle_bytes = 0, listed_bytes = 0;
    int32_t n_idle = 0, prev = -1;
    uint64_t since = 0;
    for (size_t i = 0; i < cache->n_granules; i++) {
        const paged__granule *m = &cache->granules[i];
        size_t size_bytes = PAGED_MIN(cache->granule_bytes, cache->pool_bytes - i * cache->granule_bytes);
        REQUIRE(m->n_taken == m->recount, "granule %zu is touched by %d blocks, %d counted", i, m->recount,
                m->n_taken);
        backed_bytes += m->backed ? size_bytes : 0;
        idle_bytes += m->backed && m->n_taken == 0 ? size_bytes : 0;
        n_idle += m->backed && m->n_taken == 0;
    }
    for (int32_t i = cache->idle_first; i >= 0; i = cache->granules[i].next) {
        const paged__granule *m = &cache->granules[i];
        REQUIRE((size_t)i < cache->n_granules && n_idle-- > 0 && m->backed && m->n_taken == 0 &&
                    m->prev == prev && m->since >= since && m->since <= cache->now,
                "the list of idle granules leads to %d", i);
        listed_bytes += PAGED_MIN(cache->granule_bytes, cache->pool_bytes - (size_t)i * cache->granule_bytes);
        since = m->since;
        prev = i;
    }
    REQUIRE(listed_bytes == idle_bytes && prev == cache->idle_last && idle_bytes == cache->idle_bytes,
            "%zu bytes idle, %zu on the list, which ends in %d, %zu counted", idle_bytes, listed_bytes,
            cache->idle_last, cache->idle_bytes);
    REQUIRE(backed_bytes == cache->backed_bytes && backed_bytes <= cache->pool_bytes,
            "%zu bytes backed, %zu counted, pool %zu", backed_bytes, cache->backed_bytes, cache->pool_bytes);
    return PAGED_OK;
}

static paged_status check_bytes(const paged_cache *cache, paged_error *err) {
    size_t used_bytes = 0, cached_bytes = 0;
    for (int32_t g = 0; g < cache->n_groups; g++) {
        used_bytes += (size_t)cache->groups[g].n_used * cache->groups[g].block_bytes;
        cached_bytes += (size_t)cache->groups[g].n_cached * cache->groups[g].block_bytes;
    }
    REQUIRE(used_bytes == cache->used_bytes && used_bytes + cached_bytes == cache->taken_bytes,
            "%zu bytes used and %zu cached, %zu and %zu counted", used_bytes, cached_bytes, cache->used_bytes,
            cache->taken_bytes - cache->used_bytes);
    for (int32_t g = 0; g < cache->n_groups; g++) {
        REQUIRE(cache->taken_bytes <= cache->max_bytes ||
                    (cache->evictable.n == 0 && cache->groups[g].loose.n == 0),
                "%zu bytes used and cached, limit %zu, %d leaves or %d blocks of group %d could go",
                cache->taken_bytes, cache->max_bytes, cache->evictable.n, cache->groups[g].loose.n, g);
    }
    REQUIRE(cache->n_allocs >= cache->n_frees, "%llu blocks taken, %llu given back",
            (unsigned long long)cache->n_allocs, (unsigned long long)cache->n_frees);
    uint64_t n_taken = 0;
    for (int32_t g = 0; g < cache->n_groups; g++)
        n_taken += (uint64_t)(cache->groups[g].n_used + cache->groups[g].n_cached);
    REQUIRE(cache->n_allocs - cache->n_frees == n_taken,
            "%llu blocks taken, %llu given back, %llu in use or cached", (unsigned long long)cache->n_allocs,
            (unsigned long long)cache->n_frees, (unsigned long long)n_taken);
    return PAGED_OK;
}

static paged_status check_all(const paged_cache *cache, paged_error *err) {
    paged_status status = check_rows(cache, err);
    for (int32_t g = 0; g < cache->n_groups && status == PAGED_OK; g++) {
        for (int32_t row = 0; row < cache->max_seqs && status == PAGED_OK; row++)
            status = check_table(cache, g, row, err);
    }
    if (status == PAGED_OK) status = paged__check_tails(cache, err);
    if (status == PAGED_OK) status = paged__check_pins(cache, err);
    for (int32_t e = 0; e < cache->n_extents && status == PAGED_OK; e++) status = check_extent(cache, e, err);
    for (int32_t g = 0; g < cache->n_groups && status == PAGED_OK; g++) status = check_group(cache, g, err);
    if (status == PAGED_OK) status = check_free_extents(cache, err);
    if (status == PAGED_OK) status = check_granules(cache, err);
    if (status == PAGED_OK) status = check_bytes(cache, err);
    if (status == PAGED_OK) status = paged__check_promises(cache, err);
    if (status == PAGED_OK) status = paged__check_prefix(cache, err);
    return status;
}

paged_status paged_cache_check(const paged_cache *cache, paged_error *err) {
    if (!cache) return paged__fail(err, PAGED_ERR_INVALID_ARG, "cache is NULL");
    paged_status status = check_all(cache, err);
    /* The working space is zero between calls; an extent without an owner may say anything in `first`. */
    for (int32_t g = 0; g < cache->n_groups; g++)
        memset(cache->groups[g].recount, 0,
               (size_t)cache->groups[g].n_ids * sizeof *cache->groups[g].recount);
    for (int32_t g = 0; g < cache->n_groups; g++) {
        for (int64_t i = 0; i < (int64_t)cache->groups[g].n_ids * cache->n_tiles; i++)
            cache->groups[g].tiles[i].recount = 0;
    }
    for (int32_t e = 0; e < cache->n_extents; e++) {
        if (cache->extents[e].owner == -1) cache->extents[e].first = 0;
    }
    for (size_t i = 0; i < cache->n_granules; i++) cache->granules[i].recount = 0;
    return status;
}
