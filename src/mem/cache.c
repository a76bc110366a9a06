/* cache.c: makes and frees a cache; what others may know about it. */
#include "mem/mem.h"

/* ---- create ---- */

static paged_status check_group(const paged_group_config *gc, int32_t g, int32_t block_size,
                                bool packed_tails, paged_error *err) {
    if (gc->n_layers < 1 || gc->n_kv_heads < 1 || gc->head_dim_k < 1 || gc->head_dim_v < 0)
        return paged__fail(err, PAGED_ERR_INVALID_ARG,
                           "groups[%d]: n_layers %d, n_kv_heads %d, head_dim_k %d, head_dim_v %d", g,
                           gc->n_layers, gc->n_kv_heads, gc->head_dim_k, gc->head_dim_v);
    if (gc->window < 0)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "groups[%d].window is %d", g, gc->window);
    if (gc->type != PAGED_TYPE_F16 && gc->type != PAGED_TYPE_F32 && gc->type != PAGED_TYPE_BF16 &&
        gc->type != PAGED_TYPE_I8)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "groups[%d].type %d is unknown", g, (int)gc->type);
    if (gc->layout != PAGED_LAYOUT_PLAIN && gc->layout != PAGED_LAYOUT_PACKED)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "groups[%d].layout %d is unknown", g, (int)gc->layout);
    if (gc->layout == PAGED_LAYOUT_PACKED && block_size % PAGED_TILE != 0)
        return paged__fail(err, PAGED_ERR_INVALID_ARG,
                           "groups[%d].layout is packed, and block_size %d is not a multiple of %d", g,
                           block_size, PAGED_TILE);
    if (gc->layout == PAGED_LAYOUT_PACKED && gc->type == PAGED_TYPE_BF16 && gc->head_dim_k % 2 != 0)
        return paged__fail(err, PAGED_ERR_INVALID_ARG,
                           "groups[%d].head_dim_k %d is odd, packed bf16 asks for even", g, gc->head_dim_k);
    if (gc->type == PAGED_TYPE_I8 &&
        (gc->layout == PAGED_LAYOUT_PLAIN || gc->head_dim_k % 4 != 0 || gc->head_dim_v % 4 != 0))
        return paged__fail(err, PAGED_ERR_INVALID_ARG,
                           "groups[%d]: i8 asks for the packed layout and head dims that are multiples of 4; "
                           "layout %d, head_dim_k %d, head_dim_v %d",
                           g, (int)gc->layout, gc->head_dim_k, gc->head_dim_v);
    if (packed_tails && gc->layout != PAGED_LAYOUT_PACKED)
        return paged__fail(err, PAGED_ERR_INVALID_ARG,
                           "packed_tails asks for the packed layout in groups[%d]", g);
    if (!paged_block_bytes(gc, block_size))
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "groups[%d]: the bytes of a block overflow", g);
    return PAGED_OK;
}

static paged_status check_config(const paged_cache_config *config, paged_error *err) {
    if (config->n_groups < 1 || config->n_groups > PAGED_GROUPS_MAX || !config->groups)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "n_groups is %d, not 1 … %d, or groups is NULL",
                           config->n_groups, PAGED_GROUPS_MAX);
    if (config->block_size < 0 || config->block_size > PAGED__BLOCK_SIZE_MAX)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "block_size is %d, not 1 … %d", config->block_size,
                           PAGED__BLOCK_SIZE_MAX);
    if (config->packed_tails &&
        (config->block_size < 2 * PAGED_TILE || config->block_size > PAGED__TAIL_BLOCK_MAX ||
         config->block_size % PAGED_TILE))
        return paged__fail(err, PAGED_ERR_INVALID_ARG,
                           "packed_tails asks for a block_size of %d … %d, a multiple of %d; it is %d",
                           2 * PAGED_TILE, PAGED__TAIL_BLOCK_MAX, PAGED_TILE, config->block_size);
    if (config->max_seqs < 0 || config->max_seqs > PAGED__MAX_SEQS)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "max_seqs is %d, not 1 … %d", config->max_seqs,
                           PAGED__MAX_SEQS);
    if (config->max_seq_tokens < 0)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "max_seq_tokens is %d", config->max_seq_tokens);
    if (config->pool_bytes == 0 || config->pool_bytes > PTRDIFF_MAX)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "pool_bytes is %zu", config->pool_bytes);
    const paged_arena *arena = config->arena;
    if (arena && (!arena->back || !arena->copy || arena->size_bytes < config->pool_bytes))
        return paged__fail(err, PAGED_ERR_INVALID_ARG,
                           "arena has %zu bytes for pool_bytes %zu, or no back or no copy", arena->size_bytes,
                           config->pool_bytes);
    size_t granule_bytes = arena && arena->granule_bytes ? arena->granule_bytes : PAGED__GRANULE;
    if (arena &&
        (granule_bytes & (granule_bytes - 1) || (config->pool_bytes - 1) / granule_bytes >= INT32_MAX))
        return paged__fail(err, PAGED_ERR_INVALID_ARG,
                           "arena.granule_bytes %zu is no power of two, or too small for pool_bytes %zu",
                           granule_bytes, config->pool_bytes);
    if (config->max_bytes > config->pool_bytes)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "max_bytes %zu, pool_bytes %zu", config->max_bytes,
                           config->pool_bytes);
    if (config->contiguous && config->packed_tails)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "contiguous, and packed_tails, which share blocks");
    if (config->contiguous && config->max_seq_tokens == 0)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "contiguous asks for max_seq_tokens");
    if (config->poison && arena && !arena->base)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "poison asks for an arena with a base");
    return PAGED_OK;
}

/* Extents of contiguous mode: the whole of one sequence in the group with the largest blocks, wherever the
 * extent begins. */
static paged_status size_runs(paged_cache *cache, paged_error *err) {
    size_t largest = 0;
    for (int32_t g = 0; g < cache->n_groups; g++) largest = PAGED_MAX(largest, cache->groups[g].block_bytes);
    size_t n_blocks = (size_t)cache->max_blocks + (cache->n_groups > 1);
    bool fits = paged__mul(n_blocks, largest, &cache->extent_bytes);
    size_t n_extents = fits ? cache->pool_bytes / cache->extent_bytes : 0;
    if (n_extents < (size_t)cache->n_groups)
        return paged__fail(err, PAGED_ERR_NO_BLOCKS,
                           "pool_bytes %zu do not hold one sequence of max_seq_tokens %d, contiguous",
                           cache->pool_bytes, cache->max_seq_tokens);
    cache->n_extents = (int32_t)n_extents;
    return PAGED_OK;
}

/* Ids, extents and how many tokens one sequence can have. */
static paged_status size_pool(paged_cache *cache, int64_t *n_blocks_max, paged_error *err) {
    paged__shapes shapes = {.n_groups = cache->n_groups};
    for (int32_t g = 0; g < cache->n_groups; g++) {
        paged__group *gr = &cache->groups[g];
        size_t n_ids = cache->pool_bytes / gr->block_bytes;
        if (n_ids > INT32_MAX)
            return paged__fail(err, PAGED_ERR_INVALID_ARG,
                               "pool_bytes %zu make %zu blocks of group %d, too many", cache->pool_bytes,
                               n_ids, g);
        gr->n_ids = (int32_t)n_ids;
        shapes.block_bytes[g] = gr->block_bytes;
    }
    if (cache->contiguous) return size_runs(cache, err);
    if (cache->n_groups == 1) {
        size_t block_bytes = shapes.block_bytes[0];
        if (cache->groups[0].n_ids == 0)
            return paged__fail(err, PAGED_ERR_NO_BLOCKS, "pool_bytes %zu, a block has %zu", cache->pool_bytes,
                               block_bytes);
        /* At least one block begins in each. The last one may reach into the next extent and keep a granule
         * of it backed; so where blocks do not end with extents, extents are long. */
        cache->extent_bytes =
            (block_bytes + cache->granule_bytes - 1) / cache->granule_bytes * cache->granule_bytes;
        if (cache->extent_bytes % block_bytes != 0 && cache->extent_bytes <= cache->pool_bytes / 8)
            cache->extent_bytes *= 8;
        cache->n_extents = paged__extent_of(cache, 0, cache->groups[0].n_ids - 1) + 1;
        *n_blocks_max = cache->groups[0].n_ids;
        return PAGED_OK;
    }
    cache->extent_bytes = paged__extent_bytes(&shapes, cache->pool_bytes);
    if (!cache->extent_bytes)
        return paged__fail(err, PAGED_ERR_NO_BLOCKS,
                           "pool_bytes %zu do not hold one block of each of %d groups", cache->pool_bytes,
                           cache->n_groups);
    size_t n_extents = cache->pool_bytes / cache->extent_bytes, low = 1, high = cache->pool_bytes;
    cache->n_extents = (int32_t)n_extents;
    while (low < high) { /* the largest number of blocks that fits for certain */
        size_t middle = low + (high - low + 1) / 2;
        if (paged__extents_needed(&shapes, cache->extent_bytes, middle) <= n_extents)
            low = middle;
        else
            high = middle - 1;
    }
    *n_blocks_max = (int64_t)low;
    return PAGED_OK;
}

static bool take_index(paged_cache *cache) {
    size_t n = (size_t)cache->n_nodes_max;
    cache->n_buckets = 1;
    while (cache->n_buckets < n) cache->n_buckets *= 2;
    cache->nodes = paged__calloc(n, sizeof *cache->nodes);
    cache->node_tokens = paged__alloc(n, (size_t)cache->block_size * sizeof *cache->node_tokens);
    cache->node_blocks = paged__alloc(n, (size_t)cache->n_groups * sizeof *cache->node_blocks);
    cache->buckets = paged__alloc(cache->n_buckets, sizeof *cache->buckets);
    cache->evicted_tags = paged__calloc(cache->n_buckets, sizeof *cache->evicted_tags);
    cache->first_counts = paged__calloc(cache->n_buckets, sizeof *cache->first_counts);
    cache->evictable.items = paged__alloc(n, sizeof *cache->evictable.items);
    cache->pins.items = paged__alloc(n, sizeof *cache->pins.items);
    return cache->nodes && cache->node_tokens && cache->node_blocks && cache->buckets &&
           cache->evicted_tags && cache->first_counts && cache->evictable.items && cache->pins.items;
}

static bool take_tails(const paged_cache *cache, paged__group *gr) {
    size_t n = (size_t)gr->n_ids, n_tiles = (size_t)cache->n_tiles;
    if (!n_tiles) return true;
    gr->tail_tiles = paged__alloc((size_t)cache->max_seqs, n_tiles * sizeof *gr->tail_tiles);
    gr->tiles = paged__calloc(n, n_tiles * sizeof *gr->tiles);
    gr->open = paged__alloc(n, sizeof *gr->open);
    return gr->tail_tiles && gr->tiles && gr->open;
}

static bool take_window(paged__group *gr) {
    size_t n = (size_t)gr->n_ids;
    if (!gr->config.window) return true;
    gr->loose.items = paged__alloc(n, sizeof *gr->loose.items);
    gr->loose_place = paged__alloc(n, sizeof *gr->loose_place);
    gr->loose_tick = paged__alloc(n, sizeof *gr->loose_tick);
    return gr->loose.items && gr->loose_place && gr->loose_tick;
}

static size_t row_bytes(int64_t stride) {
    return (size_t)stride * sizeof(int32_t);
}

static paged_status take_memory(paged_cache *cache, paged_error *err) {
    cache->table_stride = paged__row_stride(cache->max_blocks);
    cache->token_stride = paged__row_stride(cache->max_seq_tokens);
    cache->extents = paged__calloc((size_t)cache->n_extents, sizeof *cache->extents);
    cache->free_extents = paged__calloc((size_t)cache->n_extents, sizeof *cache->free_extents);
    cache->granules = paged__calloc(cache->n_granules, sizeof *cache->granules);
    cache->seqs = paged__calloc((size_t)cache->max_seqs, sizeof *cache->seqs);
    cache->tokens = paged__alloc((size_t)cache->max_seqs, row_bytes(cache->token_stride));
    cache->promises = paged__calloc((size_t)cache->max_seqs, sizeof *cache->promises);
    bool complete = cache->extents && cache->free_extents && cache->granules && cache->seqs &&
                    cache->tokens && cache->promises;
    for (int32_t g = 0; g < cache->n_groups && complete; g++) {
        paged__group *gr = &cache->groups[g];
        gr->blocks = paged__calloc((size_t)gr->n_ids, sizeof *gr->blocks);
        gr->recount = paged__calloc((size_t)gr->n_ids, sizeof *gr->recount);
        gr->tables = paged__alloc((size_t)cache->max_seqs, row_bytes(cache->table_stride));
        complete = gr->blocks && gr->recount && gr->tables && take_tails(cache, gr) && take_window(gr);
    }
    if (complete && take_index(cache)) return PAGED_OK;
    return paged__fail(err, PAGED_ERR_NO_MEMORY,
                       "no memory to manage %zu bytes for %d sequences of %d tokens", cache->pool_bytes,
                       cache->max_seqs, cache->max_seq_tokens);
}

static void set_groups(paged_cache *cache, const paged_cache_config *config) {
    cache->evictable.group = cache->pins.group = -1;
    cache->all_windowed = true;
    for (int32_t g = 0; g < cache->n_groups; g++) {
        paged__group *gr = &cache->groups[g];
        gr->config = config->groups[g];
        gr->loose.group = g;
        if (!gr->config.head_dim_v) gr->config.head_dim_v = gr->config.head_dim_k;
        gr->block_bytes = paged_block_bytes(&gr->config, cache->block_size);
        cache->all_windowed &= gr->config.window > 0;
        size_t layer_bytes = gr->block_bytes / (size_t)gr->config.n_layers;
        size_t head_dims = (size_t)gr->config.head_dim_k + (size_t)gr->config.head_dim_v;
        if (gr->config.type == PAGED_TYPE_I8)
            gr->scale_bytes = (size_t)gr->config.n_kv_heads * (size_t)cache->block_size * sizeof(float);
        layer_bytes -= 2 * gr->scale_bytes;
        gr->k_bytes = layer_bytes / head_dims * (size_t)gr->config.head_dim_k;
        gr->v_bytes = layer_bytes - gr->k_bytes;
    }
}

paged_status paged_cache_create(const paged_cache_config *config, paged_cache **out, paged_error *err) {
    if (!config || !out) return paged__fail(err, PAGED_ERR_INVALID_ARG, "config or out is NULL");
    if (config->struct_size != sizeof *config)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "struct_size is %zu, not %zu", config->struct_size,
                           sizeof *config);
    int32_t block_size = config->block_size ? config->block_size : PAGED__BLOCK_SIZE_DEFAULT;
    int64_t n_blocks_max = 0;
    paged_status status = check_config(config, err);
    for (int32_t g = 0; g < config->n_groups && status == PAGED_OK; g++) {
        status = check_group(&config->groups[g], g, block_size, config->packed_tails, err);
    }
    if (status != PAGED_OK) return status;
    paged_cache *cache = paged__calloc(1, sizeof *cache);
    if (!cache) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a cache");
    cache->n_groups = config->n_groups;
    cache->block_size = block_size;
    cache->pool_bytes = config->pool_bytes;
    cache->max_seqs = config->max_seqs ? config->max_seqs : 64;
    cache->max_bytes = config->max_bytes ? config->max_bytes : config->pool_bytes;
    cache->trim_after = config->trim_after;
    cache->granule_bytes =
        config->arena && config->arena->granule_bytes ? config->arena->granule_bytes : PAGED__GRANULE;
    cache->granule_shift = __builtin_ctzll(cache->granule_bytes);
    cache->n_granules = (cache->pool_bytes - 1) / cache->granule_bytes + 1;
    cache->poison = config->poison;
    cache->n_tiles = config->packed_tails ? block_size / PAGED_TILE : 0;
    cache->event = config->event;
    cache->event_user = config->event_user;
    set_groups(cache, config);
    cache->contiguous = config->contiguous;
    cache->max_seq_tokens = config->max_seq_tokens;
    cache->max_blocks = paged__ceil_div(cache->max_seq_tokens, block_size);
    status = size_pool(cache, &n_blocks_max, err);
    if (status != PAGED_OK) goto fail;
    if (!cache->max_seq_tokens)
        cache->max_seq_tokens = (int32_t)PAGED_MIN(n_blocks_max * block_size, (int64_t)INT32_MAX);
    cache->max_blocks = paged__ceil_div(cache->max_seq_tokens, block_size);
    size_t n_nodes = paged__prefix_nodes_max(cache);
    if (n_nodes > INT32_MAX) {
        status = paged__fail(err, PAGED_ERR_INVALID_ARG, "max_seqs %d of %d tokens make %zu index entries",
                             cache->max_seqs, cache->max_seq_tokens, n_nodes);
        goto fail;
    }
    cache->n_nodes_max = (int32_t)n_nodes;
    if (config->arena) {
        cache->arena = *config->arena;
    } else {
        status = paged_arena_create_host(cache->pool_bytes, &cache->arena, err);
        if (status != PAGED_OK) goto fail;
        cache->owns_arena = true;
    }
    status = take_memory(cache, err);
    if (status != PAGED_OK) goto fail;
    paged__pool_init(cache);
    paged__seqs_init(cache);
    paged__prefix_init(cache);
    *out = cache;
    return PAGED_OK;
fail:
    paged_cache_free(cache);
    return status;
}

void paged_cache_free(paged_cache *cache) {
    if (!cache) return;
    for (int32_t g = 0; g < cache->n_groups; g++) {
        paged__free(cache->groups[g].blocks);
        paged__free(cache->groups[g].recount);
        paged__free(cache->groups[g].tables);
        paged__free(cache->groups[g].tail_tiles);
        paged__free(cache->groups[g].tiles);
        paged__free(cache->groups[g].open);
        paged__free(cache->groups[g].loose.items);
        paged__free(cache->groups[g].loose_place);
        paged__free(cache->groups[g].loose_tick);
    }
    paged__spaces_free(cache);
    paged__free(cache->pins.items);
    paged__free(cache->evictable.items);
    paged__free(cache->first_counts);
    paged__free(cache->evicted_tags);
    paged__free(cache->buckets);
    paged__free(cache->node_blocks);
    paged__free(cache->node_tokens);
    paged__free(cache->nodes);
    paged__free(cache->tokens);
    paged__free(cache->seqs);
    paged__free(cache->promises);
    paged__free(cache->granules);
    paged__free(cache->free_extents);
    paged__free(cache->extents);
    if (cache->owns_arena) cache->arena.destroy(cache->arena.ctx);
    paged__free(cache);
}

/* ---- the structures of kv.h ---- */

paged_status paged_cache_tables(const paged_cache *cache, int32_t group, paged_tables *out) {
    if (!cache || !out || group < 0 || group >= cache->n_groups) return PAGED_ERR_INVALID_ARG;
    out->blocks = cache->groups[group].tables;
    out->seq_stride = cache->table_stride;
    out->head_stride = 0;
    out->max_blocks = cache->max_blocks;
    out->tail_tiles = cache->groups[group].tail_tiles;
    return PAGED_OK;
}

paged_status paged_cache_kv(const paged_cache *cache, int32_t group, int32_t layer, paged_kv *out) {
    if (!cache || !out || group < 0 || group >= cache->n_groups) return PAGED_ERR_INVALID_ARG;
    const paged__group *gr = &cache->groups[group];
    const paged_group_config *gc = &gr->config;
    if (layer < 0 || layer >= gc->n_layers) return PAGED_ERR_INVALID_ARG;
    uintptr_t k = cache->arena.base ? (uintptr_t)cache->arena.base : PAGED_ARENA_AWAY;
    k += (size_t)layer * (gr->block_bytes / (size_t)gc->n_layers);
    *out = (paged_kv){
        .k = (uint8_t *)k,
        .v = (uint8_t *)(k + gr->k_bytes),
        .block_stride = (int64_t)gr->block_bytes,
        .k_head_stride = (int64_t)(gr->k_bytes / (size_t)gc->n_kv_heads),
        .v_head_stride = (int64_t)(gr->v_bytes / (size_t)gc->n_kv_heads),
        .n_blocks = gr->n_ids,
        .block_size = cache->block_size,
        .n_kv_heads = gc->n_kv_heads,
        .head_dim_k = gc->head_dim_k,
        .head_dim_v = gc->head_dim_v,
        .type = gc->type,
        .layout = gc->layout,
    };
    if (gr->scale_bytes) {
        k += gr->k_bytes + gr->v_bytes;
        out->k_scale = (uint8_t *)k;
        out->v_scale = (uint8_t *)(k + gr->scale_bytes);
        out->scale_block_stride = (int64_t)gr->block_bytes;
        out->scale_head_stride = (int64_t)(gr->scale_bytes / (size_t)gc->n_kv_heads);
    }
    return PAGED_OK;
}

/* ---- numbers ---- */

/* The same for the tail of a sequence, tile by tile. */
static int64_t count_tail(const paged_cache *cache, int32_t g, const paged__seq *seq, int32_t round) {
    const paged__group *gr = &cache->groups[g];
    const int32_t *tiles = paged__seq_tiles(cache, g, seq);
    int64_t n_slots = 0;
    for (int32_t i = 0; i < paged__seq_n_tiles(cache, seq); i++) {
        int32_t *credit = &gr->tiles[tiles[i]].recount;
        int32_t first = (seq->n_entries - 1) * cache->block_size + i * PAGED_TILE;
        int32_t fill = PAGED_MAX(PAGED_MIN(seq->len - first, PAGED_TILE), 0);
        if (round == 0 && fill > *credit) n_slots += fill - *credit;
        *credit = round == 0 ? PAGED_MAX(*credit, fill) : 0;
    }
    return n_slots;
}

/* Slots of used blocks that hold a committed token. Of the sequences that share a block, the one with most
 * tokens counts. */
static int64_t count_slots(const paged_cache *cache) {
    int64_t n_slots = 0;
    for (int32_t g = 0; g < cache->n_groups; g++) {
        const paged__group *gr = &cache->groups[g];
        /* Each entry adds what it brings beyond what the block was credited with before; the second round
         * clears. */
        for (int32_t round = 0; round < 2; round++) {
            for (int32_t row = 0; row < cache->max_seqs; row++) {
                const paged__seq *seq = &cache->seqs[row];
                const int32_t *table = gr->tables + row * cache->table_stride;
                n_slots += count_tail(cache, g, seq, round);
                for (int32_t i = paged__seq_first(cache, g, seq); i < seq->n_entries - seq->has_tail; i++) {
                    int32_t *credit = &gr->recount[table[i]].n_refs;
                    int32_t fill = PAGED_MIN(seq->len - i * cache->block_size, cache->block_size);
                    if (round == 0 && fill > *credit) n_slots += fill - *credit;
                    *credit = round == 0 ? PAGED_MAX(*credit, fill) : 0;
                }
            }
        }
    }
    return n_slots;
}

static size_t index_bytes(const paged_cache *cache) {
    size_t node_bytes = sizeof *cache->nodes + (size_t)cache->block_size * sizeof *cache->node_tokens +
                        sizeof *cache->evictable.items + sizeof *cache->pins.items;
    node_bytes += (size_t)cache->n_groups * sizeof *cache->node_blocks;
    return (size_t)cache->n_nodes_max * node_bytes +
           cache->n_buckets *
               (sizeof *cache->buckets + sizeof *cache->evicted_tags + sizeof *cache->first_counts);
}

static size_t metadata_bytes(const paged_cache *cache) {
    size_t bytes =
        sizeof *cache + cache->n_granules * sizeof *cache->granules + cache->space_bytes + index_bytes(cache);
    bytes += (size_t)cache->n_extents * (sizeof *cache->extents + sizeof *cache->free_extents);
    bytes += (size_t)cache->max_seqs *
             (sizeof *cache->seqs + sizeof *cache->promises + row_bytes(cache->token_stride));
    for (int32_t g = 0; g < cache->n_groups; g++) {
        const paged__group *gr = &cache->groups[g];
        bytes += (size_t)gr->n_ids * (sizeof(paged__block) + sizeof(paged__recount));
        if (cache->n_tiles)
            bytes += (size_t)gr->n_ids * ((size_t)cache->n_tiles * sizeof *gr->tiles + sizeof *gr->open) +
                     (size_t)cache->max_seqs * (size_t)cache->n_tiles * sizeof *gr->tail_tiles;
        if (gr->config.window)
            bytes += (size_t)gr->n_ids *
                     (sizeof *gr->loose.items + sizeof *gr->loose_place + sizeof *gr->loose_tick);
    }
    return bytes;
}

void paged_cache_get_stats(const paged_cache *cache, paged_cache_stats *out) {
    paged_cache_stats s = {
        .n_seqs = cache->n_seqs,
        .max_seqs = cache->max_seqs,
        .block_size = cache->block_size,
        .n_pins = cache->pins.n,
        .n_tokens = cache->n_tokens,
        .n_slots_used = count_slots(cache),
        .pool_bytes = cache->pool_bytes,
        .used_bytes = cache->used_bytes,
        .backed_bytes = cache->backed_bytes,
        .block_bytes = cache->groups[0].block_bytes,
        .metadata_bytes = metadata_bytes(cache),
        .n_allocs = cache->n_allocs,
        .n_frees = cache->n_frees,
        .n_copies = cache->n_copies,
        .n_refused = cache->n_refused,
        .n_queries = cache->n_queries,
        .n_query_tokens = cache->n_query_tokens,
        .n_hit_tokens = cache->n_hit_tokens,
        .n_stored = cache->n_stored,
        .n_evicted = cache->n_evicted,
        .max_bytes = cache->max_bytes,
        .cached_bytes = cache->taken_bytes - cache->used_bytes,
        .idle_bytes = cache->idle_bytes,
        .n_backed = cache->n_backed,
        .n_unbacked = cache->n_unbacked,
        .n_moves = cache->n_moves,
        .n_packed = cache->n_packed,
        .n_waits = cache->n_waits,
        .n_handovers = cache->n_handovers,
        .n_evicted_blocks = cache->n_evicted_blocks,
    };
    memcpy(s.n_misses, cache->n_misses, sizeof s.n_misses);
    size_t block_bytes = 0;
    for (int32_t e = 0; e < cache->n_extents; e++) {
        /* An extent that nobody owns counts as if group 0 did. */
        int32_t owner = PAGED_MAX(cache->extents[e].owner, 0), first, n_blocks;
        paged__extent_range(cache, owner, e, &first, &n_blocks);
        s.n_blocks += n_blocks;
        block_bytes += (size_t)n_blocks * cache->groups[owner].block_bytes;
    }
    for (int32_t g = 0; g < cache->n_groups; g++) {
        s.n_used += cache->groups[g].n_used;
        s.n_cached += cache->groups[g].n_cached;
        s.n_divided += cache->groups[g].n_divided;
        s.n_tail_tiles += cache->groups[g].n_divided * cache->n_tiles - cache->groups[g].n_free_tiles;
    }
    s.n_free = s.n_blocks - s.n_used - s.n_cached;
    if (cache->used_bytes < cache->max_bytes) {
        size_t within = (cache->max_bytes - cache->used_bytes) / cache->groups[0].block_bytes;
        s.n_available = (int32_t)PAGED_MIN((size_t)(s.n_free + s.n_cached), within);
    }
    s.waste_bytes = cache->pool_bytes - block_bytes;
    s.table_bytes = (size_t)cache->n_groups * (size_t)cache->max_seqs * row_bytes(cache->table_stride);
    *out = s;
}
