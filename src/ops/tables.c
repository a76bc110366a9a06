/* tables.c: block tables as they come from outside: checked here before anything is read through them. After
 * paged__tables_check and, for a sequence, paged__tables_check_seq, every entry that paged__table_at looks at
 * names a block, or a tail tile, of the cache. */
#include "ops/tables.h"

#define MAX_STRIDE ((int64_t)1 << 30) /* entries: far above what anyone needs, and no product overflows */

#define INVALID(...) return paged__fail(err, PAGED_ERR_INVALID_ARG, __VA_ARGS__)

paged_status paged__kv_check_tabled(const paged_kv *kv, const paged_tables *tables, paged_error *err) {
    paged_kv one_head = *kv;
    bool has_scales = kv->type == PAGED_TYPE_I8;
    if (tables->head_stride == 0 || kv->k_head_stride != 0 || kv->v_head_stride != 0 ||
        (has_scales && kv->scale_head_stride != 0))
        return paged__kv_check(kv, err);
    /* Heads share a pool of blocks, and the table of each says which are its own. */
    if (kv->n_kv_heads < 1) INVALID("n_kv_heads is %d", kv->n_kv_heads);
    one_head.n_kv_heads = 1;
    return paged__kv_check(&one_head, err);
}

paged_status paged__tables_check(const paged_kv *kv, const paged_tables *t, paged_error *err) {
    int64_t n_head_rows = t->head_stride ? kv->n_kv_heads : 1;
    if (t->n_seqs < 0 || t->max_blocks < 0) INVALID("n_seqs is %d, max_blocks %d", t->n_seqs, t->max_blocks);
    if (t->n_seqs == 0) return PAGED_OK;
    if (!t->seqlens_k || !t->blocks) INVALID("%s is NULL", t->seqlens_k ? "blocks" : "seqlens_k");
    if (t->head_stride < 0 || t->head_stride > MAX_STRIDE ||
        (t->head_stride && t->head_stride < t->max_blocks))
        INVALID("head_stride is %lld with rows of %d blocks", (long long)t->head_stride, t->max_blocks);
    /* One sequence in row 0 needs no stride. */
    if ((t->n_seqs > 1 || t->rows) &&
        (t->seq_stride > MAX_STRIDE || t->seq_stride < (n_head_rows - 1) * t->head_stride + t->max_blocks))
        INVALID("seq_stride is %lld with %lld rows of %d blocks a sequence", (long long)t->seq_stride,
                (long long)n_head_rows, t->max_blocks);
    if (t->tail_tiles && kv->layout != PAGED_LAYOUT_PACKED)
        INVALID("tail_tiles are given, but the layout of the cache is plain");
    return PAGED_OK;
}

/* The tiles of the last block, from that of key `first` to that of the last key. */
static paged_status check_tail(const paged_kv *kv, const paged_tables *t, int32_t seq, int32_t first,
                               paged_error *err) {
    int32_t block_tiles = kv->block_size / PAGED_TILE, last = t->seqlens_k[seq] - 1;
    int32_t begin = last / kv->block_size * kv->block_size;
    int64_t row = t->rows ? t->rows[seq] : seq, n_tiles = (int64_t)kv->n_blocks * block_tiles;
    const int32_t *tiles = t->tail_tiles + row * block_tiles;
    for (int32_t i = PAGED_MAX(first - begin, 0) / PAGED_TILE; i <= (last - begin) / PAGED_TILE; i++)
        if (tiles[i] < 0 || tiles[i] >= n_tiles)
            INVALID("sequence %d (row %lld): tail tile %d is %d, not in 0 ... %lld, with %d keys", seq,
                    (long long)row, i, tiles[i], (long long)n_tiles - 1, last + 1);
    return PAGED_OK;
}

/* Entries begin … end - 1 of a table; the first that names no block, or end. A plan reads every entry, so
 * they are looked at in bulk, by a union of signs (of b, and of n_blocks - 1 - b) that compilers turn into
 * vectors, where there is no `exist`. */
static int32_t first_bad(const int32_t *blocks, int32_t begin, int32_t end, int32_t n_blocks,
                         paged__blocks_exist *exist) {
    enum { BULK = 64 };
    if (exist && begin < end && exist(blocks + begin, end - begin, n_blocks)) return end;
    for (; end - begin >= BULK; begin += BULK) {
        uint32_t signs = 0;
        for (int32_t i = 0; i < BULK; i++) {
            uint32_t b = (uint32_t)blocks[begin + i];
            signs |= b | ((uint32_t)n_blocks - 1 - b);
        }
        if (signs >> 31) break;
    }
    while (begin < end && (uint32_t)blocks[begin] < (uint32_t)n_blocks) begin++;
    return begin;
}

static paged_status check_entries(const paged_kv *kv, const paged_tables *t, int32_t seq, int32_t first,
                                  paged__blocks_exist *exist, paged_error *err) {
    int64_t row = t->rows ? t->rows[seq] : seq;
    int32_t n_keys = t->seqlens_k[seq], last_block = (n_keys - 1) / kv->block_size;
    bool has_tail = false;
    for (int32_t head = 0; head < (t->head_stride ? kv->n_kv_heads : 1); head++) {
        const int32_t *blocks = t->blocks + row * t->seq_stride + head * t->head_stride;
        const bool is_tail = t->tail_tiles && blocks[last_block] == -1;
        const int32_t end = last_block + !is_tail;
        const int32_t bad = first_bad(blocks, first / kv->block_size, end, kv->n_blocks, exist);
        has_tail |= is_tail;
        if (bad < end)
            INVALID("sequence %d (row %lld, KV head %d): entry %d of its table is %d, not in 0 ... %d, "
                    "with %d keys",
                    seq, (long long)row, head, bad, blocks[bad], kv->n_blocks - 1, n_keys);
    }
    return has_tail ? check_tail(kv, t, seq, first, err) : PAGED_OK;
}

paged_status paged__tables_check_seq(const paged_kv *kv, const paged_tables *t, int32_t seq, int32_t first,
                                     paged__blocks_exist *exist, paged_error *err) {
    int32_t n_keys = t->seqlens_k[seq], first_k = t->first_k ? t->first_k[seq] : 0;
    if (n_keys < 0) INVALID("sequence %d: seqlens_k is %d", seq, n_keys);
    if (n_keys > (int64_t)t->max_blocks * kv->block_size)
        INVALID("sequence %d: %d keys do not fit %d blocks of %d", seq, n_keys, t->max_blocks,
                kv->block_size);
    if (t->rows && t->rows[seq] < 0) INVALID("sequence %d: row %d", seq, t->rows[seq]);
    if (first_k < 0 || first_k > n_keys)
        INVALID("sequence %d: first_k is %d, not in 0 ... %d", seq, first_k, n_keys);
    if (first >= n_keys) return PAGED_OK; /* nothing is read */
    if (first < first_k) INVALID("sequence %d: key %d is needed, but first_k is %d", seq, first, first_k);
    if (!kv->k || !kv->v) INVALID("%s of the cache is NULL", kv->k ? "v" : "k");
    return check_entries(kv, t, seq, first, exist, err);
}

paged__table paged__table_of(const paged_kv *kv, const paged_tables *t, int32_t seq, int32_t head) {
    int64_t row = t->rows ? t->rows[seq] : seq;
    int32_t n_keys = t->seqlens_k[seq];
    paged__table table = {t->blocks + row * t->seq_stride + head * t->head_stride, NULL, -1};
    int32_t last_block = n_keys > 0 ? (n_keys - 1) / kv->block_size : -1;
    if (t->tail_tiles && last_block >= 0 && table.blocks[last_block] < 0) {
        table.tail = t->tail_tiles + row * (kv->block_size / PAGED_TILE);
        table.tail_block = last_block;
    }
    return table;
}
