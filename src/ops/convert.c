/* convert.c: the cache in other shapes: dense arrays of all blocks, and a sequence gathered to one run of
 * blocks. Elements are moved as bytes, so every bit of them arrives, NaN included. */
#include "ops/tables.h"

#define INVALID(...) return paged__fail(err, PAGED_ERR_INVALID_ARG, __VA_ARGS__)

/* ---- dense arrays ---- */

/* K or V of one block and head: where element d of token o lies on each side, in elements. */
typedef struct pair {
    uint8_t *cache; /* the block of the head */
    uint8_t *dense; /* its token 0 */
    int64_t dense_stride;
    int32_t block_size, head_dim;
    paged_layout layout;
    bool value, pairs; /* bf16 is packed in pairs */
    size_t elem;
} pair;

static inline int64_t cache_element(const pair *p, int64_t o, int64_t d) {
    int64_t n = p->head_dim, tile = o / PAGED_TILE * PAGED_TILE * n, i = o % PAGED_TILE;
    if (p->layout == PAGED_LAYOUT_PLAIN) return o * n + d;
    if (p->value) return tile + (p->pairs ? i / 2 * 2 * n + d * 2 + i % 2 : i * n + d);
    return tile + (p->pairs ? d / 2 * 32 + i * 2 + d % 2 : d * PAGED_TILE + i);
}

/* `elem` is 2 or 4 and constant in each call, so that a copy is a move. */
static inline void move_block(const pair *p, bool to_dense, size_t elem) {
    for (int64_t o = 0; o < p->block_size; o++)
        for (int64_t d = 0; d < p->head_dim; d++) {
            uint8_t *cache = p->cache + (size_t)cache_element(p, o, d) * elem;
            uint8_t *dense = p->dense + (size_t)(o * p->dense_stride + d) * elem;
            memcpy(to_dense ? dense : cache, to_dense ? cache : dense, elem);
        }
}

/* The part of thread ith of one array, k or v. */
static void move_all(const paged_kv *kv, bool value, paged_dense shape, uint8_t *dense, bool to_dense,
                     int32_t ith, int32_t nth) {
    int64_t n_heads = kv->n_kv_heads, head_dim = value ? kv->head_dim_v : kv->head_dim_k,
            head_stride = value ? kv->v_head_stride : kv->k_head_stride;
    int64_t begin = (int64_t)kv->n_blocks * ith / nth, end = (int64_t)kv->n_blocks * (ith + 1) / nth;
    bool tokens_first = shape == PAGED_DENSE_TOKENS_FIRST;
    pair p = {.dense_stride = tokens_first ? n_heads * head_dim : head_dim,
              .block_size = kv->block_size,
              .head_dim = (int32_t)head_dim,
              .layout = kv->layout,
              .value = value,
              .pairs = kv->type == PAGED_TYPE_BF16,
              .elem = paged__type_bytes(kv->type)};
    for (int64_t b = begin; b < end; b++)
        for (int64_t h = 0; h < n_heads; h++) {
            int64_t first =
                b * n_heads * kv->block_size * head_dim + h * head_dim * (tokens_first ? 1 : kv->block_size);
            p.cache = (value ? kv->v : kv->k) + b * kv->block_stride + h * head_stride;
            p.dense = dense + (size_t)first * p.elem;
            if (p.elem == 4)
                move_block(&p, to_dense, 4);
            else
                move_block(&p, to_dense, 2);
        }
}

static paged_status check_dense(const paged_kv *kv, paged_dense shape, const void *k, const void *v,
                                int32_t ith, int32_t nth, paged_error *err) {
    if (!kv) INVALID("kv is NULL");
    if (kv->type == PAGED_TYPE_I8)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED, "i8 has no dense form without its scales");
    if ((uint32_t)shape > PAGED_DENSE_TOKENS_FIRST) INVALID("the dense shape is %d", (int)shape);
    if (nth < 1 || ith < 0 || ith >= nth) INVALID("thread %d of %d", ith, nth);
    if ((k && !kv->k) || (v && !kv->v)) INVALID("%s of the cache is NULL", k && !kv->k ? "k" : "v");
    return paged__kv_check(kv, err);
}

paged_status paged_kv_export(const paged_kv *kv, paged_dense shape, void *k, void *v, int32_t ith,
                             int32_t nth, paged_error *err) {
    paged_status status = check_dense(kv, shape, k, v, ith, nth, err);
    if (status) return status;
    if (k) move_all(kv, false, shape, k, true, ith, nth);
    if (v) move_all(kv, true, shape, v, true, ith, nth);
    return PAGED_OK;
}

paged_status paged_kv_import(const paged_kv *kv, paged_dense shape, const void *k, const void *v, int32_t ith,
                             int32_t nth, paged_error *err) {
    paged_status status = check_dense(kv, shape, k, v, ith, nth, err);
    if (status) return status;
    /* Only read: the direction is the other one. */
    if (k) move_all(kv, false, shape, (uint8_t *)(uintptr_t)k, false, ith, nth);
    if (v) move_all(kv, true, shape, (uint8_t *)(uintptr_t)v, false, ith, nth);
    return PAGED_OK;
}

/* ---- gather ---- */

static paged_status check_same_shape(const paged_kv *kv, const paged_kv *to, paged_error *err) {
    const struct {
        const char *name;
        int32_t from, to;
    } pairs[] = {
        {"type", (int32_t)kv->type, (int32_t)to->type}, {"layout", (int32_t)kv->layout, (int32_t)to->layout},
        {"block_size", kv->block_size, to->block_size}, {"n_kv_heads", kv->n_kv_heads, to->n_kv_heads},
        {"head_dim_k", kv->head_dim_k, to->head_dim_k}, {"head_dim_v", kv->head_dim_v, to->head_dim_v},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++)
        if (pairs[i].from != pairs[i].to)
            INVALID("%s of the cache is %d, that of the copy %d", pairs[i].name, pairs[i].from, pairs[i].to);
    return PAGED_OK;
}

static paged_status check_gather(const paged_kv *kv, const paged_tables *t, int32_t seq, const paged_kv *to,
                                 paged_error *err) {
    paged_status status = paged__kv_check_tabled(kv, t, err);
    if (!status) status = check_same_shape(kv, to, err);
    if (!status) status = paged__kv_check(to, err);
    if (!status) status = paged__tables_check(kv, t, err);
    if (status) return status;
    if (seq < 0 || seq >= t->n_seqs) INVALID("sequence %d of %d", seq, t->n_seqs);
    status = paged__tables_check_seq(kv, t, seq, t->first_k ? t->first_k[seq] : 0, err);
    if (status) return status;
    int64_t n_blocks = ((int64_t)t->seqlens_k[seq] + kv->block_size - 1) / kv->block_size;
    if (n_blocks > to->n_blocks)
        INVALID("sequence %d: %d keys need %lld blocks of %d, the copy has %d", seq, t->seqlens_k[seq],
                (long long)n_blocks, kv->block_size, to->n_blocks);
    if (n_blocks > 0 && (!to->k || !to->v)) INVALID("%s of the copy is NULL", to->k ? "v" : "k");
    return PAGED_OK;
}

/* Tokens begin … end - 1 of logical block `block`, in pieces that lie together: the whole block, or the tiles
 * of a packed tail. In the packed layout begin and end are multiples of a tile. */
static void copy_tokens(const paged_kv *kv, const paged__table *table, int32_t head, int32_t block,
                        int32_t begin, int32_t end, const paged_kv *to) {
    bool tail = block == table->tail_block;
    int64_t elem = (int64_t)paged__type_bytes(kv->type), k_row = elem * kv->head_dim_k,
            v_row = elem * kv->head_dim_v;
    for (int32_t o = begin, n; o < end; o += n) {
        n = tail ? PAGED_TILE : end - o;
        paged__slot slot = paged__table_at(kv, table, block, o);
        int64_t from = slot.block * kv->block_stride, at = block * to->block_stride;
        memcpy(to->k + at + head * to->k_head_stride + o * k_row,
               kv->k + from + head * kv->k_head_stride + slot.offset * k_row, (size_t)(n * k_row));
        memcpy(to->v + at + head * to->v_head_stride + o * v_row,
               kv->v + from + head * kv->v_head_stride + slot.offset * v_row, (size_t)(n * v_row));
    }
}

paged_status paged_kv_gather(const paged_kv *kv, const paged_tables *tables, int32_t seq, const paged_kv *to,
                             int32_t ith, int32_t nth, paged_error *err) {
    if (!kv || !tables || !to) INVALID("%s is NULL", !kv ? "kv" : !tables ? "tables" : "to");
    if (kv->type == PAGED_TYPE_I8)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED, "i8 is not gathered yet: it has scales besides");
    if (nth < 1 || ith < 0 || ith >= nth) INVALID("thread %d of %d", ith, nth);
    paged_status status = check_gather(kv, tables, seq, to, err);
    if (status) return status;
    int32_t unit = kv->layout == PAGED_LAYOUT_PACKED ? PAGED_TILE : 1, size = kv->block_size;
    int32_t n_keys = (tables->seqlens_k[seq] + unit - 1) / unit * unit,
            first = tables->first_k ? tables->first_k[seq] / unit * unit : 0;
    int64_t first_block = first / size, n_blocks = (n_keys + size - 1) / size - first_block;
    int64_t n = n_blocks * kv->n_kv_heads;
    for (int64_t i = n * ith / nth; i < n * (ith + 1) / nth; i++) {
        int32_t head = (int32_t)(i / n_blocks), block = (int32_t)(first_block + i % n_blocks);
        paged__table table = paged__table_of(kv, tables, seq, head);
        copy_tokens(kv, &table, head, block, PAGED_MAX(first - block * size, 0),
                    PAGED_MIN(n_keys - block * size, size), to);
    }
    return PAGED_OK;
}
