/* ops/tables.h: a block table of one sequence and KV head, and what makes it safe to read through. */
#ifndef PAGED_OPS_TABLES_H
#define PAGED_OPS_TABLES_H

#include "ops/ops.h"

/* Borrowed from a paged_tables. */
typedef struct paged__table {
    const int32_t *blocks; /* [max_blocks] */
    const int32_t *tail;   /* [block_size / 16] tiles of logical block tail_block, or NULL */
    int32_t tail_block;    /* -1: the sequence has no packed tail */
} paged__table;

/* Where a token lies. */
typedef struct paged__slot {
    int64_t block;
    int32_t offset; /* in tokens */
} paged__slot;

/* The shape of the cache, as paged__kv_check; with a table a head, head strides of 0 are right as well: the
 * heads then take their blocks from one pool. */
paged_status paged__kv_check_tabled(const paged_kv *kv, const paged_tables *tables, paged_error *err);

/* Strides and pointers, for a cache whose shape is right. */
paged_status paged__tables_check(const paged_kv *kv, const paged_tables *t, paged_error *err);

/* Whether n entries all name a block: they are in 0 … n_blocks - 1. Of the kernels (ops.h). */
typedef bool paged__blocks_exist(const int32_t *blocks, int32_t n, int32_t n_blocks);

/* Length, row, and every entry for the keys first … seqlens_k - 1; none is read if first ≥ seqlens_k. `exist`
 * may be NULL. */
paged_status paged__tables_check_seq(const paged_kv *kv, const paged_tables *t, int32_t seq, int32_t first,
                                     paged__blocks_exist *exist, paged_error *err);

/* For a checked sequence. */
paged__table paged__table_of(const paged_kv *kv, const paged_tables *t, int32_t seq, int32_t head);

/* Of the token at `offset` in logical block `block`. */
static inline paged__slot paged__table_at(const paged_kv *kv, const paged__table *table, int32_t block,
                                          int32_t offset) {
    if (block != table->tail_block) return (paged__slot){table->blocks[block], offset};
    int32_t tile = table->tail[offset / PAGED_TILE], block_tiles = kv->block_size / PAGED_TILE;
    return (paged__slot){tile / block_tiles, tile % block_tiles * PAGED_TILE + offset % PAGED_TILE};
}

#endif
