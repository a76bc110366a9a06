/* check_tail.c: the part of paged_cache_check() that walks packed tails and divided blocks. */
#include "mem/check.h"

/* The tile stands at the same place in every row that names it, and they agree on what is committed in it. */
static paged_status check_shared_tile(const paged_cache *cache, int32_t g, int32_t row, int32_t i,
                                      paged_error *err) {
    const paged__seq *seq = &cache->seqs[row];
    int32_t tile = paged__seq_tiles(cache, g, seq)[i];
    int32_t first = (seq->n_entries - 1) * cache->block_size + i * PAGED_TILE;
    for (int32_t r = 0; r < row; r++) {
        const paged__seq *other = &cache->seqs[r];
        if (!other->has_tail || paged__seq_tiles(cache, g, other)[i] != tile) continue;
        REQUIRE(other->n_entries == seq->n_entries,
                "tile %d of group %d is in entry %d of row %d and %d of %d", tile, g, other->n_entries - 1, r,
                seq->n_entries - 1, row);
        int32_t end = PAGED_MIN(first + PAGED_TILE, PAGED_MIN(seq->len, other->len));
        REQUIRE(end <= first || memcmp(seq->tokens + first, other->tokens + first,
                                       (size_t)(end - first) * sizeof *seq->tokens) == 0,
                "rows %d and %d share tile %d of group %d, their tokens differ", r, row, tile, g);
        REQUIRE(end == first + PAGED_TILE || !seq->reserved || !other->reserved,
                "rows %d and %d may both write tile %d of group %d", r, row, tile, g);
    }
    return PAGED_OK;
}

static paged_status check_row(const paged_cache *cache, int32_t g, int32_t row, paged_error *err) {
    const paged__group *gr = &cache->groups[g];
    const paged__seq *seq = &cache->seqs[row];
    const int32_t *tiles = paged__seq_tiles(cache, g, seq);
    int32_t n_tiles = paged__seq_n_tiles(cache, seq);
    REQUIRE(!seq->has_tail || (n_tiles > 0 && n_tiles <= cache->n_tiles &&
                               (seq->len + seq->reserved) % cache->block_size != 0),
            "row %d has a tail of %d tiles in entry %d for %d tokens and %d reserved", row, n_tiles,
            seq->n_entries - 1, seq->len, seq->reserved);
    for (int32_t i = 0; i < cache->n_tiles; i++) {
        int32_t tile = tiles[i];
        if (i >= n_tiles) {
            REQUIRE(tile == -1, "group %d row %d: tile %d of %d is %d, not -1", g, row, i, n_tiles, tile);
            continue;
        }
        REQUIRE(tile >= 0 && tile / cache->n_tiles < gr->n_ids &&
                    gr->blocks[tile / cache->n_tiles].state == PAGED__BLOCK_DIVIDED,
                "group %d row %d: tile %d is %d, of no divided block", g, row, i, tile);
        gr->tiles[tile].recount++;
        paged_status status = check_shared_tile(cache, g, row, i, err);
        if (status != PAGED_OK) return status;
    }
    return PAGED_OK;
}

static paged_status check_divided(const paged_cache *cache, int32_t g, paged_error *err) {
    const paged__group *gr = &cache->groups[g];
    int32_t n_divided = 0, n_used = 0, n_open = 0;
    for (int32_t b = 0; b < gr->n_ids; b++) {
        bool divided = gr->blocks[b].state == PAGED__BLOCK_DIVIDED;
        int32_t n_before = n_used;
        for (int32_t t = b * cache->n_tiles; t < (b + 1) * cache->n_tiles; t++) {
            REQUIRE(gr->tiles[t].refs == gr->tiles[t].recount,
                    "tile %d of group %d has %d references, %d rows name it", t, g, gr->tiles[t].refs,
                    gr->tiles[t].recount);
            n_used += gr->tiles[t].refs > 0;
        }
        if (!divided) continue;
        bool open = n_used - n_before < cache->n_tiles;
        int32_t place = gr->blocks[b].open_place;
        int32_t n = n_used - n_before;
        REQUIRE(open == (place >= 0) &&
                    (!open || (place < gr->n_open && gr->open[place] == b && place >= gr->open_begin[n] &&
                               place < gr->open_begin[n + 1])),
                "divided block %d of group %d has %d tiles in use and place %d among the open ones", b, g, n,
                place);
        gr->recount[b].n_refs += n_used - n_before;
        n_divided++;
        n_open += open;
    }
    REQUIRE(n_divided == gr->n_divided && n_open == gr->n_open &&
                n_divided * cache->n_tiles - n_used == gr->n_free_tiles,
            "group %d: %d divided blocks, %d open, %d tiles used; %d, %d and %d free counted", g, n_divided,
            n_open, n_used, gr->n_divided, gr->n_open, gr->n_free_tiles);
    return PAGED_OK;
}

paged_status paged__check_tails(const paged_cache *cache, paged_error *err) {
    paged_status status = PAGED_OK;
    for (int32_t row = 0; row < cache->max_seqs && !cache->n_tiles; row++)
        REQUIRE(!cache->seqs[row].has_tail, "row %d has a tail", row);
    for (int32_t g = 0; g < cache->n_groups && cache->n_tiles; g++) {
        for (int32_t row = 0; row < cache->max_seqs && status == PAGED_OK; row++)
            status = check_row(cache, g, row, err);
        if (status == PAGED_OK) status = check_divided(cache, g, err);
        if (status != PAGED_OK) return status;
    }
    return PAGED_OK;
}
