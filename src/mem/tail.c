/* tail.c: packed tails. The last, partly filled block of a sequence need not be a block: it may be tiles of
 * 16 tokens, taken one by one from blocks that are divided among sequences. So a table of large blocks wastes
 * no more than one of blocks of 16.
 *
 *   divided block   state DIVIDED, refs = its tiles in use; at least one, else it is a free block again
 *   open            divided blocks with a free tile, by their tiles in use, the fullest last: from it the
 *                   next tile is taken, so that the emptiest become whole again. Those with k used ones begin
 *                   at open_begin[k]; blocks[b].open_place leads back
 *   tile id         block * n_tiles + tile in it, so that its slots are tile * 16 …; a tile of an ordinary
 *                   block has an id too, which is how tails become blocks and blocks tails
 *   tail_tiles      [max_seqs, n_tiles] of the entry n_entries - 1 of a row with has_tail; -1 behind them
 *
 * Tiles have references like blocks: a fork shares them, and the one that is written next is copied first. A
 * tail becomes a block inside the reservation that will fill it, or when it is sealed; each token is moved
 * once. A compaction empties the emptiest divided block whenever the others have room for its tiles. This
 * file knows how a tile lies in a block and who has it; seq.c decides when. */
#include "mem/mem.h"

int32_t paged__tiles_blocks(const paged_cache *cache, int32_t group, int32_t n_tiles) {
    int32_t missing = n_tiles - cache->groups[group].n_free_tiles;
    return missing > 0 ? paged__ceil_div(missing, cache->n_tiles) : 0;
}

/* ---- bytes ---- */

/* What a layer of a block consists of: runs of 16 tokens, one a tile, one row of tiles a KV head. */
typedef struct part {
    size_t offset, tile_bytes; /* of head 0 in the layer; of a tile of one head */
} part;

enum { PARTS_MAX = 4 };

static int32_t parts_of(const paged_cache *cache, const paged__group *gr, part parts[PARTS_MAX]) {
    size_t n_rows = (size_t)gr->config.n_kv_heads * (size_t)cache->n_tiles;
    parts[0] = (part){0, gr->k_bytes / n_rows};
    parts[1] = (part){gr->k_bytes, gr->v_bytes / n_rows};
    if (!gr->scale_bytes) return 2;
    parts[2] = (part){gr->k_bytes + gr->v_bytes, gr->scale_bytes / n_rows};
    parts[3] = (part){gr->k_bytes + gr->v_bytes + gr->scale_bytes, gr->scale_bytes / n_rows};
    return 4;
}

/* Byte offset of the tile's run of a head, relative to that of head 0 in tile 0 of block 0. */
static size_t tile_offset(const paged_cache *cache, const paged__group *gr, int32_t tile, int32_t head,
                          size_t tile_bytes) {
    size_t n_tiles = (size_t)cache->n_tiles, block = (size_t)tile / n_tiles,
           in_block = (size_t)tile % n_tiles;
    return block * gr->block_bytes + ((size_t)head * n_tiles + in_block) * tile_bytes;
}

paged_status paged__tile_copy(paged_cache *cache, int32_t group, int32_t dst, int32_t src) {
    const paged__group *gr = &cache->groups[group];
    size_t layer_bytes = gr->block_bytes / (size_t)gr->config.n_layers;
    part parts[PARTS_MAX];
    int32_t n_parts = parts_of(cache, gr, parts);
    for (int32_t layer = 0; layer < gr->config.n_layers; layer++) {
        for (int32_t i = 0; i < n_parts; i++) {
            size_t begin = (size_t)layer * layer_bytes + parts[i].offset, bytes = parts[i].tile_bytes;
            for (int32_t head = 0; head < gr->config.n_kv_heads; head++) {
                paged_status status =
                    cache->arena.copy(cache->arena.ctx, begin + tile_offset(cache, gr, dst, head, bytes),
                                      begin + tile_offset(cache, gr, src, head, bytes), bytes);
                if (status != PAGED_OK) return status;
            }
        }
    }
    return PAGED_OK;
}

/* All ones are a NaN in f32, f16 and bf16. */
static void poison_tile(const paged_cache *cache, int32_t group, int32_t tile) {
    const paged__group *gr = &cache->groups[group];
    size_t layer_bytes = gr->block_bytes / (size_t)gr->config.n_layers;
    part parts[PARTS_MAX];
    int32_t n_parts = parts_of(cache, gr, parts);
    for (int32_t layer = 0; layer < gr->config.n_layers && cache->poison; layer++) {
        for (int32_t i = 0; i < n_parts; i++) {
            uint8_t *begin = cache->arena.base + (size_t)layer * layer_bytes + parts[i].offset;
            for (int32_t head = 0; head < gr->config.n_kv_heads; head++)
                memset(begin + tile_offset(cache, gr, tile, head, parts[i].tile_bytes), 0xff,
                       parts[i].tile_bytes);
        }
    }
}

/* ---- divided blocks ---- */

static void open_put(paged__group *gr, int32_t place, int32_t block) {
    gr->open[place] = block;
    gr->blocks[block].open_place = place;
}

static void open_swap(paged__group *gr, int32_t a, int32_t b) {
    int32_t block = gr->open[a];
    open_put(gr, a, gr->open[b]);
    open_put(gr, b, block);
}

/* From n tiles in use to n + 1: to the end of its part of the array, which the next part then begins with. */
static void open_raise(paged__group *gr, int32_t block, int32_t n) {
    open_swap(gr, gr->blocks[block].open_place, --gr->open_begin[n + 1]);
}

static void open_lower(paged__group *gr, int32_t block, int32_t n) {
    open_swap(gr, gr->blocks[block].open_place, gr->open_begin[n]++);
}

/* The part of full blocks, n_tiles in use, is empty between calls: blocks come and go through it. */
static void open_add(const paged_cache *cache, paged__group *gr, int32_t block, int32_t n_used) {
    open_put(gr, gr->n_open++, block);
    for (int32_t n = cache->n_tiles; n > n_used; n--) open_lower(gr, block, n);
}

static void open_remove(const paged_cache *cache, paged__group *gr, int32_t block, int32_t n_used) {
    for (int32_t n = n_used; n < cache->n_tiles; n++) open_raise(gr, block, n);
    gr->n_open--;
    gr->blocks[block].open_place = -1;
}

static paged_status divide_block(paged_cache *cache, int32_t group) {
    paged__group *gr = &cache->groups[group];
    int32_t block;
    paged_status status = paged__block_take(cache, group, &block);
    if (status != PAGED_OK) return status;
    gr->blocks[block].state = PAGED__BLOCK_DIVIDED;
    gr->blocks[block].refs = 0;
    gr->n_divided++;
    gr->n_free_tiles += cache->n_tiles;
    cache->n_allocs++;
    open_add(cache, gr, block, 0);
    return PAGED_OK;
}

paged_status paged__tile_take(paged_cache *cache, int32_t group, int32_t *tile) {
    paged__group *gr = &cache->groups[group];
    if (gr->n_open == 0) {
        paged_status status = divide_block(cache, group);
        if (status != PAGED_OK) return status;
    }
    int32_t block = gr->open[gr->n_open - 1], id = block * cache->n_tiles;
    while (gr->tiles[id].refs > 0) id++; /* an open block has a free one */
    gr->tiles[id].refs = 1;
    gr->n_free_tiles--;
    int32_t n_used = gr->blocks[block].refs++;
    if (n_used + 1 == cache->n_tiles)
        open_remove(cache, gr, block, n_used);
    else
        open_raise(gr, block, n_used);
    *tile = id;
    return PAGED_OK;
}

void paged__tile_ref(paged_cache *cache, int32_t group, int32_t tile) {
    PAGED_ASSERT(cache->groups[group].tiles[tile].refs > 0);
    cache->groups[group].tiles[tile].refs++;
}

bool paged__tile_unref(paged_cache *cache, int32_t group, int32_t tile) {
    paged__group *gr = &cache->groups[group];
    int32_t id = tile / cache->n_tiles;
    paged__block *block = &gr->blocks[id];
    PAGED_ASSERT(block->state == PAGED__BLOCK_DIVIDED && gr->tiles[tile].refs > 0);
    if (--gr->tiles[tile].refs > 0) return false;
    poison_tile(cache, group, tile);
    gr->n_free_tiles++;
    if (block->refs-- == cache->n_tiles)
        open_add(cache, gr, id, block->refs);
    else
        open_lower(gr, id, block->refs + 1);
    if (block->refs > 0) return false;
    open_remove(cache, gr, id, 0);
    gr->n_divided--;
    gr->n_free_tiles -= cache->n_tiles;
    block->state = PAGED__BLOCK_USED; /* whole again, and nobody has it */
    block->refs = 1;
    return paged__block_unref(cache, group, id);
}

/* ---- compaction ---- */

/* The one entry that names the tile; NULL: several do, or it is not known which. */
static int32_t *only_entry(const paged_cache *cache, int32_t group, int32_t tile) {
    const paged__tile *t = &cache->groups[group].tiles[tile];
    const paged__seq *seq = &cache->seqs[t->row];
    if (t->refs != 1 || !seq->live || !seq->has_tail) return NULL;
    int32_t *tiles = paged__seq_tiles(cache, group, seq);
    for (int32_t i = 0; i < cache->n_tiles; i++)
        if (tiles[i] == tile) return &tiles[i];
    return NULL;
}

static bool can_empty(const paged_cache *cache, int32_t group, int32_t block) {
    const paged__group *gr = &cache->groups[group];
    for (int32_t t = block * cache->n_tiles; t < (block + 1) * cache->n_tiles; t++)
        if (gr->tiles[t].refs > 0 && !only_entry(cache, group, t)) return false;
    return true;
}

/* The emptiest block's tile goes where the next one would be taken, which is in a fuller block. */
static paged_status move_tile(paged_cache *cache, int32_t group, int32_t tile) {
    int32_t to, *entry = only_entry(cache, group, tile), row = cache->groups[group].tiles[tile].row;
    paged_status status = paged__tile_take(cache, group, &to);
    if (status != PAGED_OK) return status;
    status = paged__tile_copy(cache, group, to, tile);
    if (status != PAGED_OK) {
        paged__tile_unref(cache, group, to);
        return status;
    }
    paged__tile_name(cache, group, row, entry, to);
    cache->n_frees += paged__tile_unref(cache, group, tile);
    cache->n_moves++;
    return PAGED_OK;
}

paged_status paged__tails_compact(paged_cache *cache, int32_t group, size_t *rest_bytes) {
    paged__group *gr = &cache->groups[group];
    size_t tile_bytes = gr->block_bytes / (size_t)cache->n_tiles;
    while (gr->n_free_tiles >= cache->n_tiles) { /* without the block, the others have room for its tiles */
        int32_t block = gr->open[0], first = block * cache->n_tiles;
        size_t bytes = (size_t)gr->blocks[block].refs * tile_bytes;
        if (bytes > *rest_bytes || !can_empty(cache, group, block)) return PAGED_OK;
        for (int32_t t = first; t < first + cache->n_tiles; t++) {
            paged_status status = gr->tiles[t].refs > 0 ? move_tile(cache, group, t) : PAGED_OK;
            if (status != PAGED_OK) return status;
        }
        *rest_bytes -= bytes;
    }
    return PAGED_OK;
}

/* ---- the tail of a sequence ---- */

void paged__tile_name(paged_cache *cache, int32_t group, int32_t row, int32_t *entry, int32_t tile) {
    *entry = tile;
    cache->groups[group].tiles[tile].row = row;
}

int32_t paged__seq_n_tiles(const paged_cache *cache, const paged__seq *seq) {
    if (!seq->has_tail) return 0;
    int32_t first = (seq->n_entries - 1) * cache->block_size;
    return paged__ceil_div((int64_t)seq->len + seq->reserved - first, PAGED_TILE);
}

void paged__tail_cut(paged_cache *cache, paged__seq *seq, int32_t group, int32_t n_tiles) {
    int32_t *tiles = paged__seq_tiles(cache, group, seq);
    for (int32_t i = cache->n_tiles - 1; i >= n_tiles; i--) {
        if (tiles[i] < 0) continue;
        cache->n_frees += paged__tile_unref(cache, group, tiles[i]);
        tiles[i] = -1;
    }
}

bool paged__tail_shares(const paged_cache *cache, const paged__seq *seq, int32_t idx) {
    for (int32_t g = 0; g < cache->n_groups; g++)
        if (cache->groups[g].tiles[paged__seq_tiles(cache, g, seq)[idx]].refs > 1) return true;
    return false;
}

paged_status paged__tail_to_block(paged_cache *cache, const paged__seq *seq, int32_t group, int32_t block,
                                  int32_t n_tokens) {
    const int32_t *tiles = paged__seq_tiles(cache, group, seq);
    paged_status status = PAGED_OK;
    for (int32_t i = 0; i * PAGED_TILE < n_tokens && status == PAGED_OK; i++)
        status = paged__tile_copy(cache, group, block * cache->n_tiles + i, tiles[i]);
    return status;
}

paged_status paged__tail_from_block(paged_cache *cache, int32_t group, const int32_t *tiles, int32_t block,
                                    int32_t n_tokens) {
    paged_status status = PAGED_OK;
    for (int32_t i = 0; i * PAGED_TILE < n_tokens && status == PAGED_OK; i++)
        status = paged__tile_copy(cache, group, tiles[i], block * cache->n_tiles + i);
    return status;
}

paged_status paged__tiles_take(paged_cache *cache, int32_t group, int32_t n, int32_t *tiles) {
    paged_status status = PAGED_OK;
    int32_t n_taken = 0;
    while (n_taken < n && status == PAGED_OK) {
        status = paged__tile_take(cache, group, &tiles[n_taken]);
        n_taken += status == PAGED_OK;
    }
    if (status != PAGED_OK) paged__tiles_untake(cache, group, n_taken, tiles);
    return status;
}

void paged__tiles_untake(paged_cache *cache, int32_t group, int32_t n, const int32_t *tiles) {
    while (n > 0) cache->n_allocs -= paged__tile_unref(cache, group, tiles[--n]);
}
