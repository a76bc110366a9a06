/* size.c: how many bytes blocks and pools take. Pure arithmetic, overflow checked. */
#include "mem/mem.h"

static size_t type_bytes(paged_type type) {
    switch (type) {
    case PAGED_TYPE_F16:
        return 2;
    case PAGED_TYPE_BF16:
        return 2;
    case PAGED_TYPE_F32:
        return 4;
    case PAGED_TYPE_I8:
        return 1;
    }
    return 0;
}

size_t paged_block_bytes(const paged_group_config *group, int32_t block_size) {
    size_t bytes;
    if (block_size == 0) block_size = PAGED__BLOCK_SIZE_DEFAULT;
    if (!group || block_size < 1 || block_size > PAGED__BLOCK_SIZE_MAX) return 0;
    if (group->n_layers < 1 || group->n_kv_heads < 1 || group->head_dim_k < 1 || group->head_dim_v < 0)
        return 0;
    int64_t head_dims =
        (int64_t)group->head_dim_k + (group->head_dim_v ? group->head_dim_v : group->head_dim_k);
    /* A row of i8 has a scale, for the key and for the value. */
    size_t scale_bytes = group->type == PAGED_TYPE_I8 ? 2 * sizeof(float) : 0;
    bool fits = paged__mul((size_t)head_dims, type_bytes(group->type), &bytes) &&
                paged__add(bytes, scale_bytes, &bytes) && paged__mul(bytes, (size_t)block_size, &bytes) &&
                paged__mul(bytes, (size_t)group->n_kv_heads, &bytes) &&
                paged__mul(bytes, (size_t)group->n_layers, &bytes);
    return fits && bytes <= PTRDIFF_MAX ? bytes : 0;
}

/* Entries of a row of an array of rows: an odd number of cache lines, so that the same place of all rows,
 * which sequences that grow in turns touch, does not fall into one set of the processor's caches. */
int64_t paged__row_stride(int32_t n_entries) {
    const int32_t per_line = 64 / (int32_t)sizeof(int32_t);
    return (int64_t)(paged__ceil_div(n_entries, per_line) | 1) * per_line;
}

/* The bytes of the pool that the group which fares worst could fill; 0: a group gets no block in an
 * extent, or there are fewer than n_extents_min extents. */
static size_t usable_bytes(const paged__shapes *shapes, size_t pool_bytes, size_t extent_bytes,
                           size_t n_extents_min) {
    size_t n_extents = pool_bytes / extent_bytes, least = pool_bytes;
    if (n_extents < n_extents_min) return 0;
    for (int32_t g = 0; g < shapes->n_groups; g++) {
        size_t usable = n_extents * paged__extent_blocks_min(extent_bytes, shapes->block_bytes[g]) *
                        shapes->block_bytes[g];
        least = PAGED_MIN(least, usable);
    }
    return least;
}

/* The best of unit, 2 * unit … 32 * unit. */
static size_t best_multiple(const paged__shapes *shapes, size_t pool_bytes, size_t unit,
                            size_t n_extents_min) {
    size_t best = 0, most = 0;
    for (size_t m = 1; m <= 32 && unit <= pool_bytes / m; m++) {
        size_t usable = usable_bytes(shapes, pool_bytes, m * unit, n_extents_min);
        if (usable > most) {
            most = usable;
            best = m * unit;
        }
        if (usable >= pool_bytes - pool_bytes / 100) break;
    }
    return best;
}

size_t paged__extent_bytes(const paged__shapes *shapes, size_t pool_bytes) {
    size_t largest = 0, n_groups = (size_t)shapes->n_groups;
    for (int32_t g = 0; g < shapes->n_groups; g++) largest = PAGED_MAX(largest, shapes->block_bytes[g]);
    size_t extent_bytes = best_multiple(shapes, pool_bytes, PAGED__GRANULE, 4 * n_groups);
    if (!extent_bytes) extent_bytes = best_multiple(shapes, pool_bytes, largest, 4 * n_groups);
    if (!extent_bytes) extent_bytes = best_multiple(shapes, pool_bytes, largest, n_groups);
    return extent_bytes;
}

size_t paged__extents_needed(const paged__shapes *shapes, size_t extent_bytes, size_t n_blocks) {
    size_t n_extents = 0;
    for (int32_t g = 0; g < shapes->n_groups; g++) {
        size_t n_min = paged__extent_blocks_min(extent_bytes, shapes->block_bytes[g]);
        n_extents += (n_blocks + n_min - 1) / n_min;
    }
    return n_extents;
}

size_t paged_pool_bytes_for(const paged_group_config *groups, int32_t n_groups, int32_t block_size,
                            int64_t n_tokens) {
    paged__shapes shapes = {.n_groups = n_groups};
    size_t pool_bytes = 0, largest = 0;
    if (!groups || n_groups < 1 || n_groups > PAGED_GROUPS_MAX || n_tokens < 1) return 0;
    if (block_size == 0) block_size = PAGED__BLOCK_SIZE_DEFAULT;
    if (block_size < 1) return 0;
    size_t n_blocks = (size_t)(n_tokens / block_size + (n_tokens % block_size != 0));
    for (int32_t g = 0; g < n_groups; g++) {
        size_t block_bytes = paged_block_bytes(&groups[g], block_size), bytes;
        if (!block_bytes || !paged__mul(n_blocks, block_bytes, &bytes) ||
            !paged__add(pool_bytes, bytes, &pool_bytes) || pool_bytes > PTRDIFF_MAX / 4)
            return 0;
        shapes.block_bytes[g] = block_bytes;
        largest = PAGED_MAX(largest, block_bytes);
    }
    /* The size of the extents follows from the pool. There are few such sizes and the pool only grows, so
     * this ends. */
    while (n_groups > 1) {
        size_t extent_bytes = paged__extent_bytes(&shapes, pool_bytes), wanted;
        if (!extent_bytes) {
            wanted = pool_bytes + largest;
        } else if (!paged__mul(paged__extents_needed(&shapes, extent_bytes, n_blocks), extent_bytes,
                               &wanted)) {
            return 0;
        }
        if (wanted <= pool_bytes) break;
        if (wanted > PTRDIFF_MAX / 2) return 0;
        pool_bytes = wanted;
    }
    return pool_bytes;
}
