/* attn.c: makes attention objects and plans a step. All that a caller can get wrong is found here. */
#include <math.h>

#include "ops/attn.h"

/* Far above what anyone needs, and low enough that no product below overflows 64 bits. */
enum {
    MAX_HEADS = 1 << 12,
    MAX_THREADS = 1 << 10,
    MAX_BATCH = 1 << 22, /* queries, sequences */
    MAX_KEYS = 1 << 27,
    MAX_BLOCK_SIZE = 1024
};
#define MAX_STRIDE ((int64_t)1 << 30) /* entries of a table */

#define INVALID(...) return paged__fail(err, PAGED_ERR_INVALID_ARG, __VA_ARGS__)

/* ---- create ---- */

static paged_status check_range(const char *name, int32_t value, int32_t low, int32_t high,
                                paged_error *err) {
    if (value < low || value > high) INVALID("%s is %d, not in %d ... %d", name, value, low, high);
    return PAGED_OK;
}

static paged_status check_config(const paged_attn_config *c, paged_error *err) {
    const struct {
        const char *name;
        int32_t value, low, high;
    } ranges[] = {
        {"n_heads", c->n_heads, 1, MAX_HEADS},
        {"n_kv_heads", c->n_kv_heads, 1, MAX_HEADS},
        {"head_dim_k", c->head_dim_k, 1, PAGED_HEAD_DIM_MAX},
        {"head_dim_v", c->head_dim_v, 1, PAGED_HEAD_DIM_MAX},
        {"block_size", c->block_size, 1, MAX_BLOCK_SIZE},
        {"type", (int32_t)c->type, 0, PAGED__N_TYPES - 1},
        {"layout", (int32_t)c->layout, PAGED_LAYOUT_PLAIN, PAGED_LAYOUT_PACKED},
        {"n_threads_max", c->n_threads_max, 1, MAX_THREADS},
        {"max_q", c->max_q, 1, MAX_BATCH},
        {"max_seqs", c->max_seqs, 1, MAX_BATCH},
        {"max_k", c->max_k, 1, MAX_KEYS},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof ranges[0]; i++) {
        paged_status status =
            check_range(ranges[i].name, ranges[i].value, ranges[i].low, ranges[i].high, err);
        if (status) return status;
    }
    if (c->n_heads % c->n_kv_heads)
        INVALID("n_heads %d is no multiple of n_kv_heads %d", c->n_heads, c->n_kv_heads);
    if (c->layout == PAGED_LAYOUT_PACKED && c->block_size % PAGED_TILE)
        INVALID("block_size %d is no multiple of %d, which the packed layout asks for", c->block_size,
                PAGED_TILE);
    if (c->layout == PAGED_LAYOUT_PACKED && c->type == PAGED_TYPE_BF16 &&
        (c->head_dim_k % 2 || c->head_dim_v % 2))
        INVALID("head_dim_k %d and head_dim_v %d must be even in the packed layout of bf16", c->head_dim_k,
                c->head_dim_v);
    if (c->type == PAGED_TYPE_I8 &&
        (c->layout != PAGED_LAYOUT_PACKED || c->head_dim_k % 4 || c->head_dim_v % 4))
        INVALID(
            "i8 asks for the packed layout and head dims that are multiples of 4; layout %d, head_dim_k %d, "
            "head_dim_v %d",
            (int)c->layout, c->head_dim_k, c->head_dim_v);
    if (!isfinite(c->scale)) INVALID("scale is not finite");
    if (c->window || c->softcap != 0 || c->alibi)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED, "window, softcap and ALiBi are not there yet");
    return PAGED_OK;
}

static paged_attn_config with_defaults(const paged_attn_config *config) {
    paged_attn_config c = *config;
    if (c.head_dim_v == 0) c.head_dim_v = c.head_dim_k;
    if (c.scale == 0 && c.head_dim_k > 0) c.scale = (float)(1 / sqrt((double)c.head_dim_k));
    if (c.n_threads_max == 0) c.n_threads_max = 1;
    if (c.max_q == 0) c.max_q = 1;
    if (c.max_seqs == 0) c.max_seqs = 1;
    if (c.max_k == 0) c.max_k = 4096;
    return c;
}

static size_t round_up_16(size_t n) {
    return (n + 15) / 16 * 16;
}

/* Lays out the scratch of one thread from `at` on and returns its size in floats; with `at` NULL only
 * that. */
static size_t place_scratch(const paged_attn *attn, float *at, paged__scratch *out) {
    size_t rows = (size_t)attn->rows_max, dk = (size_t)attn->config.head_dim_k,
           dv = (size_t)attn->config.head_dim_v;
    float *q, *p,
        **arrays[] = {&q,          &p, &out->s, &out->l, &out->acc, &out->cur, &out->k_tiles, &out->v_tiles,
                      &out->narrow};
    size_t sizes[] = {rows * (size_t)attn->q_stride / sizeof(float),
                      rows * (size_t)attn->p_stride / sizeof(float),
                      rows * PAGED_ATTN_STEP,
                      rows * PAGED__L_LANES,
                      rows * (size_t)attn->state_floats,
                      rows * (size_t)attn->state_floats,
                      PAGED_ATTN_STEP * (dk + 1),
                      PAGED_ATTN_STEP * dv,
                      PAGED_TILE * (PAGED_MAX(dk, dv) + 1)};
    size_t total = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (at) *arrays[i] = at + total;
        total += round_up_16(sizes[i]);
    }
    if (at) {
        out->q = (uint8_t *)q;
        out->p = (uint8_t *)p;
    }
    return total;
}

static paged_status take_memory(paged_attn *attn, paged_error *err) {
    const paged_attn_config *c = &attn->config;
    size_t n_threads = (size_t)c->n_threads_max, rows = round_up_16((size_t)attn->rows_max);
    paged__scratch none;
    size_t n_scratch = place_scratch(attn, NULL, &none), n_workspace = 0;
    if (n_threads > 1 && attn->n_splits_max > 1)
        n_workspace = (n_threads - 1) * (size_t)attn->n_splits_max * (size_t)attn->rows_cut *
                      (size_t)attn->state_floats;

    attn->entries = paged__alloc((size_t)attn->n_entries_max, sizeof *attn->entries);
    attn->scratch = paged__calloc(n_threads, sizeof *attn->scratch);
    attn->scratch_memory = paged__calloc(n_threads * n_scratch, sizeof(float));
    attn->n_keys_memory = paged__calloc(n_threads * rows, sizeof(int32_t));
    attn->seen_memory = paged__calloc(n_threads * rows, sizeof(paged__range));
    attn->workspace = paged__alloc(n_workspace, sizeof(float));
    if (!attn->entries || !attn->scratch || !attn->scratch_memory || !attn->n_keys_memory ||
        !attn->seen_memory || !attn->workspace)
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "attention needs %zu bytes for %zu threads and %d keys",
                           (n_threads * n_scratch + n_workspace) * sizeof(float), n_threads, c->max_k);
    for (size_t i = 0; i < n_threads; i++) {
        place_scratch(attn, attn->scratch_memory + i * n_scratch, &attn->scratch[i]);
        attn->scratch[i].n_keys = attn->n_keys_memory + i * rows;
        attn->scratch[i].seen = attn->seen_memory + i * rows;
    }
    return PAGED_OK;
}

paged_status paged_attn_create(const paged_attn_config *config, paged_attn **out, paged_error *err) {
    if (!config || !out) INVALID("%s is NULL", config ? "out" : "config");
    if (config->struct_size != sizeof *config)
        INVALID("struct_size is %zu, not %zu", config->struct_size, sizeof *config);
    paged_attn_config c = with_defaults(config);
    paged_status status = check_config(&c, err);
    if (status) return status;

    paged_attn *attn = paged__calloc(1, sizeof *attn);
    if (!attn) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for an attention object");
    attn->config = c;
    attn->kernels = paged__kernels_choose(paged_cpu_flags());
    attn->q_stride = attn->kernels->of[c.type]->q_bytes(c.head_dim_k);
    attn->p_stride = attn->kernels->of[c.type]->p_bytes;
    attn->scale_log2 = (float)(c.scale * 1.44269504088896340736);
    attn->group = c.n_heads / c.n_kv_heads;
    attn->q_tile = PAGED_MIN(PAGED_MAX(PAGED__UNIT_ROWS / attn->group, 1), c.max_q);
    attn->rows_max = attn->q_tile * attn->group;
    attn->rows_cut = PAGED_MIN(PAGED_MAX(PAGED__CUT_ROWS, attn->group), attn->rows_max);
    attn->n_splits_max = (c.max_k + PAGED_ATTN_SPLIT - 1) / PAGED_ATTN_SPLIT;
    attn->state_floats = (int64_t)round_up_16((size_t)c.head_dim_v) + PAGED__STATE_TAIL;
    attn->n_entries_max = c.max_q / attn->q_tile + PAGED_MIN(c.max_seqs, c.max_q);
    status = take_memory(attn, err);
    if (status) {
        paged_attn_free(attn);
        return status;
    }
    *out = attn;
    return PAGED_OK;
}

void paged_attn_free(paged_attn *attn) {
    if (!attn) return;
    paged__free(attn->workspace);
    paged__free(attn->seen_memory);
    paged__free(attn->n_keys_memory);
    paged__free(attn->scratch_memory);
    paged__free(attn->scratch);
    paged__free(attn->entries);
    paged__free(attn);
}

/* ---- plan ---- */

/* The cache must be the one that the object was made for. */
static paged_status check_kv(const paged_attn_config *c, const paged_kv *kv, paged_error *err) {
    const struct {
        const char *name;
        int32_t is, planned;
    } pairs[] = {
        {"type", (int32_t)kv->type, (int32_t)c->type}, {"layout", (int32_t)kv->layout, (int32_t)c->layout},
        {"block_size", kv->block_size, c->block_size}, {"n_kv_heads", kv->n_kv_heads, c->n_kv_heads},
        {"head_dim_k", kv->head_dim_k, c->head_dim_k}, {"head_dim_v", kv->head_dim_v, c->head_dim_v},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++)
        if (pairs[i].is != pairs[i].planned)
            INVALID("%s of the cache is %d, the attention object was made for %d", pairs[i].name, pairs[i].is,
                    pairs[i].planned);
    return paged__kv_check(kv, err);
}

static paged_status check_tables(const paged_attn_config *c, const paged_batch *batch, paged_error *err) {
    const paged_tables *t = &batch->tables;
    int64_t n_head_rows = t->head_stride ? c->n_kv_heads : 1;
    if (t->n_seqs < 0 || t->max_blocks < 0) INVALID("n_seqs is %d, max_blocks %d", t->n_seqs, t->max_blocks);
    if (t->n_seqs > c->max_seqs)
        return paged__fail(err, PAGED_ERR_LIMIT, "%d sequences, made for %d", t->n_seqs, c->max_seqs);
    if (t->n_seqs == 0) return PAGED_OK;
    if (t->first_k || t->tail_tiles || batch->n_shared)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED, "windows, packed tails, cascade are not there yet");
    if (!batch->cu_seqlens_q || !t->seqlens_k || !t->blocks)
        INVALID("%s is NULL", !batch->cu_seqlens_q ? "cu_seqlens_q" : !t->seqlens_k ? "seqlens_k" : "blocks");
    if (t->head_stride < 0 || t->head_stride > MAX_STRIDE ||
        (t->head_stride && t->head_stride < t->max_blocks))
        INVALID("head_stride is %lld with rows of %d blocks", (long long)t->head_stride, t->max_blocks);
    /* One sequence in row 0 needs no stride. */
    if ((t->n_seqs > 1 || t->rows) &&
        (t->seq_stride > MAX_STRIDE || t->seq_stride < (n_head_rows - 1) * t->head_stride + t->max_blocks))
        INVALID("seq_stride is %lld with %lld rows of %d blocks a sequence", (long long)t->seq_stride,
                (long long)n_head_rows, t->max_blocks);
    if (batch->cu_seqlens_q[0] != 0) INVALID("cu_seqlens_q[0] is %d, not 0", batch->cu_seqlens_q[0]);
    return PAGED_OK;
}

/* Every entry of the table that the n_keys keys of a sequence lie in. */
static paged_status check_blocks(const paged_attn_config *c, const paged_tables *t, int32_t seq,
                                 const paged_kv *kv, paged_error *err) {
    int64_t row = t->rows ? t->rows[seq] : seq;
    int32_t n_blocks = (int32_t)(((int64_t)t->seqlens_k[seq] + c->block_size - 1) / c->block_size);
    for (int32_t head = 0; head < (t->head_stride ? c->n_kv_heads : 1); head++) {
        const int32_t *blocks = t->blocks + row * t->seq_stride + head * t->head_stride;
        for (int32_t i = 0; i < n_blocks; i++)
            if ((uint32_t)blocks[i] >= (uint32_t)kv->n_blocks)
                INVALID("sequence %d (row %lld, KV head %d): entry %d of its table is %d, not in 0 ... %d, "
                        "with %d keys",
                        seq, (long long)row, head, i, blocks[i], kv->n_blocks - 1, t->seqlens_k[seq]);
    }
    return PAGED_OK;
}

static paged_status check_seq(const paged_attn_config *c, const paged_batch *batch, int32_t seq,
                              const paged_kv *kv, paged_error *err) {
    const paged_tables *t = &batch->tables;
    int32_t q_begin = batch->cu_seqlens_q[seq], q_end = batch->cu_seqlens_q[seq + 1],
            n_keys = t->seqlens_k[seq];
    if (q_end < q_begin) INVALID("sequence %d: cu_seqlens_q goes down from %d to %d", seq, q_begin, q_end);
    if (q_end > c->max_q)
        return paged__fail(err, PAGED_ERR_LIMIT, "sequence %d: query %d is beyond max_q %d", seq, q_end - 1,
                           c->max_q);
    if (n_keys < 0) INVALID("sequence %d: seqlens_k is %d", seq, n_keys);
    if (n_keys > c->max_k)
        return paged__fail(err, PAGED_ERR_LIMIT, "sequence %d: %d keys, made for %d", seq, n_keys, c->max_k);
    if (n_keys > (int64_t)t->max_blocks * c->block_size)
        INVALID("sequence %d: %d keys do not fit %d blocks of %d", seq, n_keys, t->max_blocks, c->block_size);
    if (t->rows && t->rows[seq] < 0) INVALID("sequence %d: row %d", seq, t->rows[seq]);
    if (q_end == q_begin || n_keys == 0) return PAGED_OK; /* nothing is read */
    if (!kv->k || !kv->v) INVALID("%s of the cache is NULL", kv->k ? "v" : "k");
    return check_blocks(c, t, seq, kv, err);
}

static void add_entries(paged_attn *attn, const paged_batch *batch, int32_t seq) {
    int32_t q_begin = batch->cu_seqlens_q[seq], n_q = batch->cu_seqlens_q[seq + 1] - q_begin;
    int32_t n_keys = batch->tables.seqlens_k[seq];
    for (int32_t i = 0; i < n_q; i += attn->q_tile) {
        int32_t n = PAGED_MIN(attn->q_tile, n_q - i);
        paged__entry *entry = &attn->entries[attn->n_entries++];
        *entry = (paged__entry){
            .seq = seq, .q_first = q_begin + i, .n_rows = n * attn->group, .cost_before = attn->cost};
        entry->first_keys = n_keys - n_q + i + 1;
        entry->n_keys = attn->config.non_causal ? n_keys : PAGED_MAX(entry->first_keys + n - 1, 0);
        entry->n_splits = PAGED_MAX((entry->n_keys + PAGED_ATTN_SPLIT - 1) / PAGED_ATTN_SPLIT, 1);
        /* Time goes with rows * steps, and each step and unit has its own price, as much as some rows. */
        int64_t n_steps = (entry->n_keys + PAGED_ATTN_STEP - 1) / PAGED_ATTN_STEP;
        entry->cost = (n_steps + 1) * (entry->n_rows + 8);
        attn->cost += entry->cost * attn->config.n_kv_heads;
        if (attn->config.n_threads_max > 1 && paged__entry_can_cut(attn, entry)) attn->needs_merge = true;
    }
}

paged_status paged_attn_plan(paged_attn *attn, const paged_batch *batch, const paged_kv *kv,
                             paged_error *err) {
    if (!attn || !batch || !kv) INVALID("%s is NULL", !attn ? "attn" : !batch ? "batch" : "kv");
    attn->n_entries = 0;
    attn->cost = 0;
    attn->needs_merge = false;
    paged_status status = check_kv(&attn->config, kv, err);
    if (!status) status = check_tables(&attn->config, batch, err);
    for (int32_t seq = 0; !status && seq < batch->tables.n_seqs; seq++)
        status = check_seq(&attn->config, batch, seq, kv, err);
    if (status) return status;
    attn->tables = batch->tables;
    for (int32_t seq = 0; seq < batch->tables.n_seqs; seq++) add_entries(attn, batch, seq);
    return PAGED_OK;
}

bool paged_attn_needs_merge(const paged_attn *attn) {
    return attn->needs_merge;
}

const char *paged_attn_kernels(const paged_attn *attn) {
    return attn->kernels->name;
}
