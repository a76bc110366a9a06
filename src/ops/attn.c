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

#define LOG2_E 1.44269504088896340736

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
        {"max_shared_q", c->max_shared_q, 0, MAX_BATCH},
        {"window", c->window, 0, INT32_MAX},
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
    if (c->window && c->non_causal) INVALID("a window of %d asks for causal attention", c->window);
    if (!isfinite(c->softcap) || c->softcap < 0 || (c->softcap != 0 && c->softcap < 1e-30f))
        INVALID("softcap is %g, not 0 and no finite number of at least 1e-30", (double)c->softcap);
    for (int32_t h = 0; c->alibi && h < c->n_heads; h++)
        if (!isfinite(c->alibi[h])) INVALID("ALiBi slope of head %d is not finite", h);
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
    c.window = PAGED_MIN(c.window, c.max_k); /* no more keys are ever there */
    return c;
}

paged_status paged__attn_config_check(const paged_attn_config *config, paged_attn_config *out,
                                      paged_error *err) {
    if (!config) INVALID("config is NULL");
    if (config->struct_size != sizeof *config)
        INVALID("struct_size is %zu, not %zu", config->struct_size, sizeof *config);
    *out = with_defaults(config);
    return check_config(out, err);
}

static size_t round_up_16(size_t n) {
    return (n + 15) / 16 * 16;
}

/* Lays out the scratch of one thread from `at` on and returns its size in floats; with `at` NULL only
 * that. */
static size_t place_scratch(const paged_attn *attn, float *at, paged__scratch *out) {
    size_t rows = (size_t)attn->rows_max, dk = (size_t)attn->config.head_dim_k,
           dv = (size_t)attn->config.head_dim_v;
    float *q, *p, **arrays[] = {&q,        &p,         &out->s,       &out->l,       &out->acc,
                                &out->cur, &out->kept, &out->k_tiles, &out->v_tiles, &out->narrow};
    size_t sizes[] = {rows * (size_t)attn->q_stride / sizeof(float),
                      rows * (size_t)attn->p_stride / sizeof(float),
                      rows * PAGED_ATTN_STEP,
                      rows * PAGED__L_LANES,
                      rows * (size_t)attn->state_floats,
                      rows * (size_t)attn->state_floats,
                      attn->config.max_shared_q > 0 ? rows * (size_t)attn->state_floats : 0,
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
    size_t n_scratch = place_scratch(attn, NULL, &none), n_cuts = n_threads > 1 ? n_threads : 0,
           n_workspace = n_cuts * (size_t)attn->workspace_states * (size_t)attn->state_floats;

    attn->owns = paged__alloc((size_t)attn->n_owns_max, sizeof *attn->owns);
    attn->entries = paged__alloc((size_t)attn->n_entries_max, sizeof *attn->entries);
    attn->shares = paged__calloc(n_threads, sizeof *attn->shares);
    attn->scratch = paged__calloc(n_threads, sizeof *attn->scratch);
    attn->scratch_memory = paged__calloc(n_threads * n_scratch, sizeof(float));
    attn->rows_memory = paged__calloc(n_threads * rows, 3 * sizeof(int32_t));
    attn->seen_memory = paged__calloc((n_threads + 1) * rows, sizeof(paged__range));
    attn->steps_memory = paged__calloc(n_threads * (size_t)attn->heads_max, sizeof(paged__step));
    attn->workspace = paged__alloc(n_workspace, sizeof(float));
    if (c->alibi) attn->slopes_log2 = paged__alloc((size_t)c->n_heads, sizeof(float));
    if (!attn->entries || !attn->owns || !attn->shares || !attn->scratch || !attn->scratch_memory ||
        !attn->rows_memory || !attn->seen_memory || !attn->steps_memory || !attn->workspace ||
        (c->alibi && !attn->slopes_log2))
        return paged__fail(err, PAGED_ERR_NO_MEMORY,
                           "attention needs %zu bytes for %zu threads, %d keys and %d queries that share",
                           (n_threads * n_scratch + n_workspace) * sizeof(float), n_threads, c->max_k,
                           c->max_shared_q);
    for (size_t i = 0; i < rows; i++) attn->seen_memory[i] = (paged__range){0, PAGED_ATTN_STEP};
    for (size_t i = 0; i < n_threads; i++) {
        place_scratch(attn, attn->scratch_memory + i * n_scratch, &attn->scratch[i]);
        attn->scratch[i].n_keys = attn->rows_memory + i * 3 * rows;
        attn->scratch[i].first_key = attn->rows_memory + (i * 3 + 1) * rows;
        attn->scratch[i].position = attn->rows_memory + (i * 3 + 2) * rows;
        attn->scratch[i].seen = attn->seen_memory + (i + 1) * rows;
        attn->scratch[i].seen_all = attn->seen_memory;
        attn->scratch[i].steps = attn->steps_memory + i * (size_t)attn->heads_max;
    }
    return PAGED_OK;
}

/* Everything that follows from the configuration alone. */
static void derive(paged_attn *attn) {
    const paged_attn_config *c = &attn->config;
    attn->softcap = attn->kernels->softcap ? attn->kernels->softcap : paged__kernels_ref.softcap;
    attn->alibi = attn->kernels->alibi ? attn->kernels->alibi : paged__kernels_ref.alibi;
    attn->q_stride = attn->kernels->of[c->type]->q_bytes(c->head_dim_k);
    attn->p_stride = attn->kernels->of[c->type]->p_bytes;
    attn->scale_log2 = (float)(c->scale * LOG2_E);
    attn->softcap_log2 = (float)(c->softcap * LOG2_E);
    attn->group = c->n_heads / c->n_kv_heads;
    int32_t of_heads = PAGED_MAX(PAGED__UNIT_ROWS / attn->group, 1); /* queries, of several heads */
    attn->q_tile = PAGED_MIN(PAGED_MAX(PAGED__TILE_ROWS / attn->group, 1), c->max_q);
    attn->heads_max = PAGED_MIN(of_heads, c->n_kv_heads);
    of_heads = (int32_t)PAGED_MIN(of_heads, (int64_t)c->max_q * c->n_kv_heads);
    attn->rows_max = PAGED_MAX(attn->q_tile, of_heads) * attn->group;
    int32_t shared_rows = PAGED_MIN(attn->q_tile, c->max_shared_q) * attn->group;
    attn->rows_max = PAGED_MAX(attn->rows_max,
                               (int32_t)PAGED_MIN(PAGED__SHARED_ROWS, (int64_t)shared_rows * c->n_kv_heads));
    attn->rows_cut =
        PAGED_MIN(PAGED_MAX(PAGED__CUT_ROWS / c->n_kv_heads, attn->group), attn->q_tile * attn->group);
    attn->n_splits_max = (c->max_k + PAGED_ATTN_SPLIT - 1) / PAGED_ATTN_SPLIT;
    attn->n_splits_cut = attn->n_splits_max;
    if (c->window) /* the keys of PAGED__CUT_ROWS queries, wherever they begin in a split */
        attn->n_splits_cut =
            PAGED_MIN(attn->n_splits_max, (c->window + PAGED__CUT_ROWS) / PAGED_ATTN_SPLIT + 2);
    attn->state_floats = (int64_t)round_up_16((size_t)c->head_dim_v) + PAGED__STATE_TAIL;
    /* Prefix entries: of each group as many as its queries need, rounded up. Where two of them meet, a
     * sequence may have entries in both. */
    int32_t n_seqs_shared = PAGED_MIN(c->max_seqs, c->max_shared_q),
            n_prefixes = c->max_shared_q / attn->q_tile + n_seqs_shared;
    attn->n_entries_max = c->max_q / attn->q_tile + PAGED_MIN(c->max_seqs, c->max_q) + n_prefixes;
    attn->n_owns_max = n_seqs_shared + n_prefixes;
    if (attn->n_splits_cut > 1)
        attn->workspace_states = (int64_t)attn->n_splits_cut * c->n_kv_heads * attn->rows_cut;
    attn->workspace_states = PAGED_MAX(attn->workspace_states, (int64_t)attn->n_splits_max * shared_rows);
}

paged_status paged_attn_create(const paged_attn_config *config, paged_attn **out, paged_error *err) {
    paged_attn_config c;
    if (!out) INVALID("out is NULL");
    paged_status status = paged__attn_config_check(config, &c, err);
    if (status) return status;

    paged_attn *attn = paged__calloc(1, sizeof *attn);
    if (!attn) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for an attention object");
    attn->config = c;
    attn->kernels = paged__kernels_choose(paged_cpu_flags());
    derive(attn);
    status = take_memory(attn, err);
    if (status) {
        paged_attn_free(attn);
        return status;
    }
    if (c.alibi)
        for (int32_t h = 0; h < c.n_heads; h++) attn->slopes_log2[h] = (float)(c.alibi[h] * LOG2_E);
    attn->config.alibi = NULL; /* the caller's */
    *out = attn;
    return PAGED_OK;
}

void paged_attn_free(paged_attn *attn) {
    if (!attn) return;
    paged__free(attn->workspace);
    paged__free(attn->steps_memory);
    paged__free(attn->seen_memory);
    paged__free(attn->rows_memory);
    paged__free(attn->slopes_log2);
    paged__free(attn->owns);
    paged__free(attn->scratch_memory);
    paged__free(attn->scratch);
    paged__free(attn->shares);
    paged__free(attn->entries);
    paged__free(attn);
}

/* ---- plan ---- */

/* The cache must be the one that the object was made for. */
static paged_status check_kv(const paged_attn_config *c, const paged_batch *batch, const paged_kv *kv,
                             paged_error *err) {
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
    return paged__kv_check_tabled(kv, &batch->tables, err);
}

static paged_status check_batch(const paged_attn_config *c, const paged_batch *batch, const paged_kv *kv,
                                paged_error *err) {
    const paged_tables *t = &batch->tables;
    paged_status status = paged__tables_check(kv, t, err);
    if (status) return status;
    if (batch->n_shared < 0 || (batch->n_shared > 0 && !batch->shared))
        INVALID("n_shared is %d%s", batch->n_shared, batch->n_shared > 0 ? ", shared is NULL" : "");
    if (t->n_seqs == 0) return PAGED_OK;
    if (t->n_seqs > c->max_seqs)
        return paged__fail(err, PAGED_ERR_LIMIT, "%d sequences, made for %d", t->n_seqs, c->max_seqs);
    if (!batch->cu_seqlens_q) INVALID("cu_seqlens_q is NULL");
    if (batch->cu_seqlens_q[0] != 0) INVALID("cu_seqlens_q[0] is %d, not 0", batch->cu_seqlens_q[0]);
    return PAGED_OK;
}

static paged_status check_seq(const paged_attn_config *c, const paged_batch *batch, int32_t seq,
                              const paged_kv *kv, paged__blocks_exist *exist, paged_error *err) {
    const paged_tables *t = &batch->tables;
    int32_t q_begin = batch->cu_seqlens_q[seq], q_end = batch->cu_seqlens_q[seq + 1],
            n_keys = t->seqlens_k[seq];
    if (q_end < q_begin) INVALID("sequence %d: cu_seqlens_q goes down from %d to %d", seq, q_begin, q_end);
    if (q_end > c->max_q)
        return paged__fail(err, PAGED_ERR_LIMIT, "sequence %d: query %d is beyond max_q %d", seq, q_end - 1,
                           c->max_q);
    if (n_keys > c->max_k)
        return paged__fail(err, PAGED_ERR_LIMIT, "sequence %d: %d keys, made for %d", seq, n_keys, c->max_k);
    /* The first key that any query sees. */
    int32_t first = c->window ? PAGED_MAX(n_keys - (q_end - q_begin) + 1 - c->window, 0) : 0;
    return paged__tables_check_seq(kv, t, seq, q_end == q_begin ? n_keys : first, exist, err);
}

/* ---- plan: cascade ---- */

/* Table entries for the first n_tokens must be those of sequence `like`. */
static paged_status check_same_blocks(const paged_batch *batch, const paged_kv *kv, int32_t like, int32_t seq,
                                      int32_t n_tokens, paged_error *err) {
    const paged_tables *t = &batch->tables;
    /* Blocks that are common as a whole, and those that whole splits touch. */
    int32_t split_tokens = n_tokens / PAGED_ATTN_SPLIT * PAGED_ATTN_SPLIT,
            n_blocks =
                PAGED_MAX(n_tokens / kv->block_size, (split_tokens + kv->block_size - 1) / kv->block_size);
    for (int32_t head = 0; head < (t->head_stride ? kv->n_kv_heads : 1); head++) {
        const int32_t *a = paged__table_of(kv, t, like, head).blocks,
                      *b = paged__table_of(kv, t, seq, head).blocks;
        for (int32_t i = 0; i < n_blocks; i++)
            if (a[i] != b[i])
                INVALID(
                    "sequences %d and %d (KV head %d) share %d tokens, but entry %d of their tables is %d "
                    "and %d",
                    like, seq, head, n_tokens, i, a[i], b[i]);
    }
    return PAGED_OK;
}

/* The first sequence from `seq` on that has a query, or `end`. */
static int32_t next_with_queries(const paged_batch *batch, int32_t seq, int32_t end) {
    while (seq < end && batch->cu_seqlens_q[seq + 1] == batch->cu_seqlens_q[seq]) seq++;
    return seq;
}

/* Group `i` against the sequences, all of which are checked; n_q: queries of groups before. */
static paged_status check_shared(const paged_attn_config *c, const paged_batch *batch, const paged_kv *kv,
                                 int32_t i, int32_t *n_q, paged_error *err) {
    const paged_shared *g = &batch->shared[i];
    int32_t before = i > 0 ? g[-1].first_seq + g[-1].n_seqs : 0; /* checked with that group */
    if (g->n_seqs < 1 || g->first_seq < before || g->n_seqs > batch->tables.n_seqs - g->first_seq)
        INVALID("shared[%d]: %d sequences from %d on, not in %d ... %d", i, g->n_seqs, g->first_seq, before,
                batch->tables.n_seqs - 1);
    if (g->n_tokens < 0) INVALID("shared[%d]: n_tokens is %d", i, g->n_tokens);
    int32_t end = g->first_seq + g->n_seqs, like = next_with_queries(batch, g->first_seq, end);
    for (int32_t seq = like; seq < end; seq = next_with_queries(batch, seq + 1, end)) {
        if (g->n_tokens > batch->tables.seqlens_k[seq])
            INVALID("shared[%d]: sequence %d has %d keys, fewer than the %d that are shared", i, seq,
                    batch->tables.seqlens_k[seq], g->n_tokens);
        paged_status status = check_same_blocks(batch, kv, like, seq, g->n_tokens, err);
        if (status) return status;
    }
    *n_q += batch->cu_seqlens_q[end] - batch->cu_seqlens_q[g->first_seq];
    if (*n_q > c->max_shared_q)
        return paged__fail(err, PAGED_ERR_LIMIT, "shared[%d]: query %d of sequences that share, made for %d",
                           i, *n_q - 1, c->max_shared_q);
    return PAGED_OK;
}

paged_status paged__attn_check(const paged_attn_config *c, const paged_batch *batch, const paged_kv *kv,
                               paged__blocks_exist *exist, paged_error *err) {
    int32_t n_shared_q = 0;
    paged_status status = check_kv(c, batch, kv, err);
    if (!status) status = check_batch(c, batch, kv, err);
    for (int32_t seq = 0; !status && seq < batch->tables.n_seqs; seq++)
        status = check_seq(c, batch, seq, kv, exist, err);
    for (int32_t i = 0; i < batch->n_shared && !status; i++)
        status = check_shared(c, batch, kv, i, &n_shared_q, err);
    return status;
}

/* Splits of the group that are read once: whole, and seen by all its queries. */
static int32_t shared_splits(const paged_attn *attn, const paged_batch *batch, const paged_kv *kv,
                             const paged_shared *g) {
    const paged_tables *t = &batch->tables;
    int32_t n_tokens = g->n_tokens, end = g->first_seq + g->n_seqs, n_seqs = 0;
    if (attn->config.window) return 0;
    for (int32_t seq = next_with_queries(batch, g->first_seq, end); seq < end;
         seq = next_with_queries(batch, seq + 1, end)) {
        int32_t n_keys = t->seqlens_k[seq], n_q = batch->cu_seqlens_q[seq + 1] - batch->cu_seqlens_q[seq];
        n_tokens = PAGED_MIN(n_tokens, attn->config.non_causal ? n_keys : n_keys - n_q + 1);
        /* Tokens of a packed tail are not in the tables that were compared. */
        if (t->tail_tiles) n_tokens = PAGED_MIN(n_tokens, (n_keys - 1) / kv->block_size * kv->block_size);
        n_seqs++;
    }
    return n_seqs > 1 ? PAGED_MAX(n_tokens, 0) / PAGED_ATTN_SPLIT : 0;
}

/* ---- plan: layout ---- */

/* Completes the entry, so that its place on the line is all that it lacks. */
static paged__entry complete(const paged_attn *attn, paged__entry entry) {
    int32_t first = PAGED_MAX(paged__row_first(attn, &entry, 0), entry.split_first * PAGED_ATTN_SPLIT);
    entry.split_first = first / PAGED_ATTN_SPLIT;
    entry.n_splits =
        PAGED_MAX((entry.n_keys + PAGED_ATTN_SPLIT - 1) / PAGED_ATTN_SPLIT - entry.split_first, 1);
    /* Time goes with rows * keys that they see; a row has its own price, as much as a step, and a step too,
     * as much as some rows. */
    int32_t middle = entry.n_rows / 2, seen = paged__row_keys(attn, &entry, middle) -
                                              PAGED_MAX(paged__row_first(attn, &entry, middle), first);
    int64_t n_steps = (entry.n_keys + PAGED_ATTN_STEP - 1) / PAGED_ATTN_STEP - first / PAGED_ATTN_STEP;
    entry.cost = entry.n_rows * (int64_t)(PAGED_MAX(seen, 0) + PAGED_ATTN_STEP) / PAGED_TILE +
                 (PAGED_MAX(n_steps, 0) + 1) * (8 * PAGED__STEP_TILES);
    return entry;
}

/* Puts the entry, which is complete, at the end of the line. */
static void add_entry(paged_attn *attn, paged__entry entry) {
    entry.cost_before = attn->cost;
    attn->cost += entry.cost * attn->config.n_kv_heads;
    if (attn->config.n_threads_max > 1 && (entry.is_prefix || paged__entry_can_cut(attn, &entry)))
        attn->needs_merge = true;
    attn->entries[attn->n_entries++] = entry;
}

/* The queries first … end - 1 of the batch, which are of one sequence, from split_first on. */
static paged__entry entry_of(const paged_attn *attn, const paged_batch *batch, int32_t seq, int32_t first,
                             int32_t end, int32_t split_first) {
    int32_t n_keys = batch->tables.seqlens_k[seq],
            first_keys = n_keys - batch->cu_seqlens_q[seq + 1] + first + 1;
    return complete(
        attn, (paged__entry){
                  .seq = seq,
                  .q_first = first,
                  .n_rows = (end - first) * attn->group,
                  .first_keys = first_keys,
                  .n_keys = attn->config.non_causal ? n_keys : PAGED_MAX(first_keys + end - first - 1, 0),
                  .split_first = split_first,
              });
}

/* In entries of nearly as many queries each. */
static void add_seq(paged_attn *attn, const paged_batch *batch, int32_t seq) {
    int32_t end = batch->cu_seqlens_q[seq + 1];
    for (int32_t q = batch->cu_seqlens_q[seq], n; q < end; q += n) {
        n = paged__next_rows(end - q, attn->q_tile);
        add_entry(attn, entry_of(attn, batch, seq, q, q + n, 0));
    }
}

/* The common splits for the queries first … end - 1, and what their sequences see behind them; *seq is the
 * sequence of the first, then of the last. */
static void add_prefix(paged_attn *attn, const paged_batch *batch, int32_t *seq, int32_t first, int32_t end,
                       int32_t n_splits) {
    paged__entry prefix = complete(attn, (paged__entry){.seq = *seq,
                                                        .q_first = first,
                                                        .n_rows = (end - first) * attn->group,
                                                        .n_keys = n_splits * PAGED_ATTN_SPLIT,
                                                        .is_prefix = true,
                                                        .own = attn->n_owns});
    for (int32_t q = first, next; q < end; q = next) {
        while (batch->cu_seqlens_q[*seq + 1] <= q) ++*seq;
        next = PAGED_MIN(batch->cu_seqlens_q[*seq + 1], end);
        paged__entry own = entry_of(attn, batch, *seq, q, next, n_splits);
        prefix.cost += own.cost;
        prefix.n_own++;
        attn->owns[attn->n_owns++] = own;
    }
    add_entry(attn, prefix);
}

/* In prefix entries of nearly as many queries each. */
static void add_shared(paged_attn *attn, const paged_batch *batch, const paged_shared *g, int32_t n_splits) {
    int32_t end = g->first_seq + g->n_seqs, seq = next_with_queries(batch, g->first_seq, end),
            first = batch->cu_seqlens_q[seq];
    int64_t n_q = batch->cu_seqlens_q[end] - first, n = (n_q + attn->q_tile - 1) / attn->q_tile;
    for (int64_t i = 0; i < n; i++)
        add_prefix(attn, batch, &seq, first + (int32_t)(n_q * i / n), first + (int32_t)(n_q * (i + 1) / n),
                   n_splits);
}

static void add_all(paged_attn *attn, const paged_batch *batch, const paged_kv *kv) {
    int32_t seq = 0;
    for (int32_t i = 0; i < batch->n_shared; i++) {
        const paged_shared *g = &batch->shared[i];
        int32_t n_splits = shared_splits(attn, batch, kv, g);
        if (n_splits == 0) continue;
        for (; seq < g->first_seq; seq++) add_seq(attn, batch, seq);
        add_shared(attn, batch, g, n_splits);
        seq += g->n_seqs;
    }
    for (; seq < batch->tables.n_seqs; seq++) add_seq(attn, batch, seq);
}

paged_status paged_attn_plan(paged_attn *attn, const paged_batch *batch, const paged_kv *kv,
                             paged_error *err) {
    if (!attn || !batch || !kv) INVALID("%s is NULL", !attn ? "attn" : !batch ? "batch" : "kv");
    attn->n_entries = 0;
    attn->cost = 0;
    attn->n_owns = 0;
    attn->needs_merge = attn->is_claimed = false;
    attn->n_claimed = 0;
    attn->n_done = 0;
    paged_status status = paged__attn_check(&attn->config, batch, kv, attn->kernels->blocks_exist, err);
    if (status) return status;
    attn->tables = batch->tables;
    attn->cu_seqlens_q = batch->cu_seqlens_q;
    add_all(attn, batch, kv);
    for (int32_t i = 0; i < attn->n_entries; i++)
        attn->is_claimed |= !attn->needs_merge && attn->entries[i].n_rows > PAGED__FEW_ROWS;
    return PAGED_OK;
}

bool paged_attn_needs_merge(const paged_attn *attn) {
    return attn->needs_merge;
}

const char *paged_attn_kernels(const paged_attn *attn) {
    return attn->kernels->name;
}
