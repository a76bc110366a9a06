/* convert.c: the cache in other shapes: dense arrays of all blocks, and a sequence gathered to one run of
 * blocks. Elements are moved as bytes, so every bit of them arrives, NaN included. */
#include "ops/i8.h"
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
    bool value;
} pair;

/* The element of a cache: constant in each call of move_block, so that a copy is a move. */
typedef struct element {
    size_t bytes;
    int64_t group; /* how many lie together in a packed tile: of d for K, of tokens for V */
    uint8_t flip;  /* keys of i8 have PAGED__I8_BIAS added: the highest bit the other way round */
} element;

static inline int64_t cache_element(const pair *p, int64_t group, int64_t o, int64_t d) {
    int64_t n = p->head_dim, tile = o / PAGED_TILE * PAGED_TILE * n, i = o % PAGED_TILE;
    if (p->layout == PAGED_LAYOUT_PLAIN) return o * n + d;
    if (p->value) return tile + i / group * group * n + d * group + i % group;
    return tile + d / group * group * PAGED_TILE + i * group + d % group;
}

static inline void move_block(const pair *p, bool to_dense, element e) {
    for (int64_t o = 0; o < p->block_size; o++)
        for (int64_t d = 0; d < p->head_dim; d++) {
            uint8_t *cache = p->cache + (size_t)cache_element(p, e.group, o, d) * e.bytes;
            uint8_t *dense = p->dense + (size_t)(o * p->dense_stride + d) * e.bytes;
            uint8_t *to = to_dense ? dense : cache;
            memcpy(to, to_dense ? cache : dense, e.bytes);
            if (e.flip) *to ^= e.flip;
        }
}

static void move_block_of(const pair *p, paged_type type, bool to_dense) {
    if (type == PAGED_TYPE_F32)
        move_block(p, to_dense, (element){4, 1, 0});
    else if (type == PAGED_TYPE_F16)
        move_block(p, to_dense, (element){2, 1, 0});
    else if (type == PAGED_TYPE_BF16)
        move_block(p, to_dense, (element){2, 2, 0});
    else if (p->value)
        move_block(p, to_dense, (element){1, 4, 0});
    else
        move_block(p, to_dense, (element){1, 4, PAGED__I8_BIAS});
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
              .value = value};
    int64_t elem = (int64_t)paged__type_bytes(kv->type);
    for (int64_t b = begin; b < end; b++)
        for (int64_t h = 0; h < n_heads; h++) {
            int64_t first =
                b * n_heads * kv->block_size * head_dim + h * head_dim * (tokens_first ? 1 : kv->block_size);
            p.cache = (value ? kv->v : kv->k) + b * kv->block_stride + h * head_stride;
            p.dense = dense + first * elem;
            move_block_of(&p, kv->type, to_dense);
        }
}

static paged_status check_dense(const paged_kv *kv, paged_dense shape, const void *k, const void *v,
                                int32_t ith, int32_t nth, paged_error *err) {
    if (!kv) INVALID("kv is NULL");
    if ((uint32_t)shape > PAGED_DENSE_TOKENS_FIRST) INVALID("the dense shape is %d", (int)shape);
    if (nth < 1 || ith < 0 || ith >= nth) INVALID("thread %d of %d", ith, nth);
    if ((k && !kv->k) || (v && !kv->v)) INVALID("%s of the cache is NULL", k && !kv->k ? "k" : "v");
    return paged__kv_check(kv, err);
}

static paged_status check_not_i8(const paged_kv *kv, paged_error *err) {
    if (!kv || kv->type != PAGED_TYPE_I8) return PAGED_OK; /* NULL is told later */
    return paged__fail(err, PAGED_ERR_UNSUPPORTED,
                       "i8 has no dense form without its scales: paged_kv_export_i8 and paged_kv_import_i8");
}

paged_status paged_kv_export(const paged_kv *kv, paged_dense shape, void *k, void *v, int32_t ith,
                             int32_t nth, paged_error *err) {
    paged_status status = check_not_i8(kv, err);
    if (!status) status = check_dense(kv, shape, k, v, ith, nth, err);
    if (status) return status;
    if (k) move_all(kv, false, shape, k, true, ith, nth);
    if (v) move_all(kv, true, shape, v, true, ith, nth);
    return PAGED_OK;
}

paged_status paged_kv_import(const paged_kv *kv, paged_dense shape, const void *k, const void *v, int32_t ith,
                             int32_t nth, paged_error *err) {
    paged_status status = check_not_i8(kv, err);
    if (!status) status = check_dense(kv, shape, k, v, ith, nth, err);
    if (status) return status;
    /* Only read: the direction is the other one. */
    if (k) move_all(kv, false, shape, (uint8_t *)(uintptr_t)k, false, ith, nth);
    if (v) move_all(kv, true, shape, (uint8_t *)(uintptr_t)v, false, ith, nth);
    return PAGED_OK;
}

/* ---- dense arrays of i8 ---- */

/* Where the scale of a slot and head lies in a dense array. */
static int64_t dense_scale(const paged_kv *kv, paged_dense shape, int64_t b, int64_t h, int64_t o) {
    return shape == PAGED_DENSE_TOKENS_FIRST ? (b * kv->block_size + o) * kv->n_kv_heads + h
                                             : (b * kv->n_kv_heads + h) * kv->block_size + o;
}

static void move_scales(const paged_kv *kv, bool value, paged_dense shape, float *dense, bool to_dense,
                        int32_t ith, int32_t nth) {
    int64_t begin = (int64_t)kv->n_blocks * ith / nth, end = (int64_t)kv->n_blocks * (ith + 1) / nth;
    for (int64_t b = begin; b < end; b++)
        for (int64_t h = 0; h < kv->n_kv_heads; h++)
            for (int64_t o = 0; o < kv->block_size; o++) {
                void *there = dense + dense_scale(kv, shape, b, h, o),
                     *here = (value ? kv->v_scale : kv->k_scale) + b * kv->scale_block_stride +
                             h * kv->scale_head_stride + o * (int64_t)sizeof(float);
                memcpy(to_dense ? there : here, to_dense ? here : there, sizeof(float));
            }
}

static paged_status check_dense_i8(const paged_kv *kv, paged_dense shape, const paged_dense_i8 *dense,
                                   int32_t ith, int32_t nth, paged_error *err) {
    if (!dense) INVALID("the dense side is NULL");
    paged_status status = check_dense(kv, shape, dense->k, dense->v, ith, nth, err);
    if (status) return status;
    if (kv->type != PAGED_TYPE_I8)
        INVALID("type of the cache is %d, not %d (i8)", (int)kv->type, (int)PAGED_TYPE_I8);
    if (!dense->k != !dense->k_scale)
        INVALID("%s is NULL and %s is not", dense->k ? "k_scale" : "k", dense->k ? "k" : "k_scale");
    if (!dense->v != !dense->v_scale)
        INVALID("%s is NULL and %s is not", dense->v ? "v_scale" : "v", dense->v ? "v" : "v_scale");
    if (((uintptr_t)dense->k_scale | (uintptr_t)dense->v_scale) % sizeof(float))
        INVALID("k_scale or v_scale is not aligned to its elements");
    return PAGED_OK;
}

/* The first of n bytes that is -128, or n. The common answer is found in bulk. */
static int64_t first_low(const int8_t *x, int64_t n) {
    bool low = false;
    for (int64_t i = 0; i < n; i++) low |= x[i] == INT8_MIN;
    if (!low) return n;
    int64_t i = 0;
    while (x[i] != INT8_MIN) i++;
    return i;
}

/* What import takes: rows as paged_kv_write could have left them, but for the largest value of a row. */
static paged_status check_rows(const paged_kv *kv, bool value, paged_dense shape, const int8_t *x,
                               const float *scale, paged_error *err) {
    int32_t head_dim = value ? kv->head_dim_v : kv->head_dim_k;
    const char *name = value ? "v" : "k";
    float most = paged__i8_scale_max(head_dim, !value);
    for (int64_t b = 0; b < kv->n_blocks; b++)
        for (int64_t o = 0; o < kv->block_size; o++)
            for (int64_t h = 0; h < kv->n_kv_heads; h++) {
                int64_t at = dense_scale(kv, shape, b, h, o), d = first_low(x + at * head_dim, head_dim);
                if (!(scale[at] >= 0 && scale[at] <= most)) /* NaN as well */
                    INVALID("%s_scale of slot %lld (block %lld, offset %lld), KV head %lld is %g, not in "
                            "0 ... %g",
                            name, (long long)(b * kv->block_size + o), (long long)b, (long long)o,
                            (long long)h, (double)scale[at], (double)most);
                if (d < head_dim)
                    INVALID("%s of slot %lld (block %lld, offset %lld), KV head %lld: element %lld is -128, "
                            "not in -127 ... 127",
                            name, (long long)(b * kv->block_size + o), (long long)b, (long long)o,
                            (long long)h, (long long)d);
            }
    return PAGED_OK;
}

static void move_i8(const paged_kv *kv, paged_dense shape, const paged_dense_i8 *dense, bool to_dense,
                    int32_t ith, int32_t nth) {
    if (dense->k) move_all(kv, false, shape, (uint8_t *)dense->k, to_dense, ith, nth);
    if (dense->v) move_all(kv, true, shape, (uint8_t *)dense->v, to_dense, ith, nth);
    if (dense->k) move_scales(kv, false, shape, dense->k_scale, to_dense, ith, nth);
    if (dense->v) move_scales(kv, true, shape, dense->v_scale, to_dense, ith, nth);
}

paged_status paged_kv_export_i8(const paged_kv *kv, paged_dense shape, const paged_dense_i8 *to, int32_t ith,
                                int32_t nth, paged_error *err) {
    paged_status status = check_dense_i8(kv, shape, to, ith, nth, err);
    if (status) return status;
    move_i8(kv, shape, to, true, ith, nth);
    return PAGED_OK;
}

paged_status paged_kv_import_i8(const paged_kv *kv, paged_dense shape, const paged_dense_i8 *from,
                                int32_t ith, int32_t nth, paged_error *err) {
    paged_status status = check_dense_i8(kv, shape, from, ith, nth, err);
    /* All blocks, not this caller's alone: all callers refuse alike, and nobody has written by then. */
    if (!status && from->k) status = check_rows(kv, false, shape, from->k, from->k_scale, err);
    if (!status && from->v) status = check_rows(kv, true, shape, from->v, from->v_scale, err);
    if (status) return status;
    move_i8(kv, shape, from, false, ith, nth);
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
    status = paged__tables_check_seq(kv, t, seq, t->first_k ? t->first_k[seq] : 0, NULL, err);
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
        if (kv->type != PAGED_TYPE_I8) continue;
        from = slot.block * kv->scale_block_stride + head * kv->scale_head_stride + slot.offset * 4;
        at = block * to->scale_block_stride + head * to->scale_head_stride + o * 4;
        memcpy(to->k_scale + at, kv->k_scale + from, (size_t)n * 4);
        memcpy(to->v_scale + at, kv->v_scale + from, (size_t)n * 4);
    }
}

paged_status paged_kv_gather(const paged_kv *kv, const paged_tables *tables, int32_t seq, const paged_kv *to,
                             int32_t ith, int32_t nth, paged_error *err) {
    if (!kv || !tables || !to) INVALID("%s is NULL", !kv ? "kv" : !tables ? "tables" : "to");
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
