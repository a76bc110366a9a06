/* opencl/attn.c: plans of a step, and what runs by them on the device. What a caller can get wrong is found
 * by the checks of ops/attn.c and tables.c, before anything is sent. */
#include "ops/attn.h"

#include <math.h>
#include <stdio.h>

#include "ops/opencl/cl.h"

enum { STATES_BYTES_MAX = 32 << 20, OPTIONS_BYTES = 512 };

#define LOG2_E       1.44269504088896340736
#define INVALID(...) return paged__fail(err, PAGED_ERR_INVALID_ARG, __VA_ARGS__)

/* Items of the same rows, a split each, one after the other. As in kernels.cl. */
typedef struct merge {
    int32_t first_item, n_items;
} merge;

struct paged_cl_attn {
    paged_cl *cl;
    paged__cl_pool *pool;
    paged_attn_config config; /* defaults filled in */
    int32_t group;
    int32_t state_rows; /* of an item that decodes */
    float scale_log2, softcap_log2;
    cl_program program;
    cl_kernel write, attend, merge;
    paged__cl_buffer tables, items, merges, slots, q, k, v, out, lse, sinks, slopes, states, n_nan;

    /* The plan, here before it is sent. */
    int32_t *table_entries;
    paged__cl_item *item_list;
    merge *merge_list; /* in the memory of item_list's end */
    size_t n_entries, entries_capacity, n_items, n_merges, items_capacity;
    int32_t n_q, n_states, n_states_max;
    int32_t n_tokens; /* of slots */
};

/* ---- create ---- */

static void make_options(const paged_cl_attn *a, bool direct, char options[OPTIONS_BYTES]) {
    const paged_attn_config *c = &a->config;
    snprintf(options, OPTIONS_BYTES,
             "-cl-std=CL1.2%s -DDK=%d -DDV=%d -DBLOCK=%d -DHEADS=%d -DKV_HEADS=%d -DTYPE=%d -DPACKED=%d "
             "-DCAUSAL=%d -DWINDOW=%d -DSOFTCAP=%d -DALIBI=%d -DROWS=%d -DSTEP=%d -DSPLIT=%d -DDIRECT=%d",
             a->cl->divides_exactly ? " -cl-fp32-correctly-rounded-divide-sqrt" : "", c->head_dim_k,
             c->head_dim_v, c->block_size, c->n_heads, c->n_kv_heads, (int)c->type,
             c->layout == PAGED_LAYOUT_PACKED, !c->non_causal, c->window, c->softcap != 0, c->alibi != NULL,
             PAGED__CL_ROWS, PAGED_ATTN_STEP, PAGED_ATTN_SPLIT, direct);
}

static paged_status make_kernels(paged_cl_attn *a, paged_error *err) {
    const struct {
        const char *name;
        cl_kernel *kernel;
    } kernels[] = {{"write_kv", &a->write}, {"attend", &a->attend}, {"merge", &a->merge}};
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++) {
        int32_t code;
        *kernels[i].kernel = a->cl->api->CreateKernel(a->program, kernels[i].name, &code);
        if (!*kernels[i].kernel) return paged__cl_fail(err, kernels[i].name, code);
    }
    return PAGED_OK;
}

static size_t state_bytes(const paged_cl_attn *a) {
    const size_t width = ((size_t)a->config.head_dim_v + 15) / 16 * 16;
    return (width + PAGED__CL_STATE_TAIL) * sizeof(float);
}

/* States for every split of everything that decodes, unless that is very much. */
static paged_status take_states(paged_cl_attn *a, paged_error *err) {
    const paged_attn_config *c = &a->config;
    const size_t of_item = (size_t)c->n_kv_heads * (size_t)a->state_rows;
    const size_t n_splits = ((size_t)c->max_k + PAGED_ATTN_SPLIT - 1) / PAGED_ATTN_SPLIT;
    const size_t n_items = n_splits * (size_t)PAGED_MIN(c->max_seqs, c->max_q) *
                           ((size_t)(a->group + PAGED__CL_ROWS - 1) / PAGED__CL_ROWS);
    const size_t n_most = PAGED_MIN(STATES_BYTES_MAX / (of_item * state_bytes(a)), n_items);
    a->n_states_max = n_splits > 1 ? (int32_t)(n_most * of_item) : 0;
    return paged__cl_buffer_reserve(a->cl, &a->states, (size_t)a->n_states_max * state_bytes(a),
                                    &a->cl->stats.state_bytes, err);
}

/* ---- arguments of kernels ---- */

static int32_t set_bytes(const paged_cl_attn *a, cl_kernel kernel, uint32_t i, size_t n, const void *value) {
    return a->cl->api->SetKernelArg(kernel, i, n, value);
}
static int32_t set_buffer(const paged_cl_attn *a, cl_kernel kernel, uint32_t i,
                          const paged__cl_buffer *buffer) {
    return set_bytes(a, kernel, i, sizeof buffer->mem, buffer ? (const void *)&buffer->mem : NULL);
}

static paged_status start(paged_cl_attn *a, cl_kernel kernel, uint32_t n_dims, const size_t *size,
                          uint32_t n_before, const cl_event *before, cl_event *ended, paged_error *err) {
    static const size_t one[3] = {1, 1, 1};
    const int32_t code = a->cl->api->EnqueueNDRangeKernel(a->cl->compute, kernel, n_dims, NULL, size, one,
                                                          n_before, before, ended);
    if (code != CL_SUCCESS) return paged__cl_fail(err, "clEnqueueNDRangeKernel", code);
    a->cl->stats.n_kernels++;
    return PAGED_OK;
}

static paged_status start_write(paged_cl_attn *a, const paged__cl_kv *kv, int64_t k_stride, int64_t v_stride,
                                paged_error *err) {
    const size_t size[] = {(size_t)a->n_tokens, (size_t)a->config.n_kv_heads};
    const cl_event *before;
    cl_event ended;
    int32_t code = set_bytes(a, a->write, 0, sizeof a->pool->mem, &a->pool->mem);
    code |= set_bytes(a, a->write, 1, sizeof *kv, kv);
    code |= set_buffer(a, a->write, 2, &a->k);
    code |= set_bytes(a, a->write, 3, sizeof k_stride, &k_stride);
    code |= set_buffer(a, a->write, 4, &a->v);
    code |= set_bytes(a, a->write, 5, sizeof v_stride, &v_stride);
    code |= set_buffer(a, a->write, 6, &a->slots);
    code |= set_buffer(a, a->write, 7, &a->n_nan);
    if (code != CL_SUCCESS) return paged__cl_fail(err, "arguments of write_kv", code);
    const uint32_t n_before = paged__cl_pool_before(a->pool, true, &before);
    paged_status s = start(a, a->write, 2, size, n_before, before, &ended, err);
    if (!s) paged__cl_pool_touch(a->pool, ended);
    return s;
}

static paged_status start_attend(paged_cl_attn *a, const paged__cl_kv *kv, int64_t q_stride, bool lse,
                                 bool sinks, paged_error *err) {
    const size_t size[] = {(size_t)a->config.n_kv_heads, a->n_items};
    const float scale = a->scale_log2, softcap = a->softcap_log2;
    const cl_event *before;
    cl_event ended;
    int32_t code = set_bytes(a, a->attend, 0, sizeof a->pool->mem, &a->pool->mem);
    code |= set_bytes(a, a->attend, 1, sizeof *kv, kv);
    code |= set_buffer(a, a->attend, 2, &a->tables);
    code |= set_buffer(a, a->attend, 3, &a->items);
    code |= set_buffer(a, a->attend, 4, &a->q);
    code |= set_bytes(a, a->attend, 5, sizeof q_stride, &q_stride);
    code |= set_buffer(a, a->attend, 6, &a->out);
    code |= set_buffer(a, a->attend, 7, lse ? &a->lse : NULL);
    code |= set_buffer(a, a->attend, 8, sinks ? &a->sinks : NULL);
    code |= set_buffer(a, a->attend, 9, &a->slopes);
    code |= set_buffer(a, a->attend, 10, &a->states);
    code |= set_bytes(a, a->attend, 11, sizeof scale, &scale);
    code |= set_bytes(a, a->attend, 12, sizeof softcap, &softcap);
    if (code != CL_SUCCESS) return paged__cl_fail(err, "arguments of attend", code);
    const uint32_t n_before = paged__cl_pool_before(a->pool, false, &before);
    paged_status s = start(a, a->attend, 2, size, n_before, before, &ended, err);
    if (!s) paged__cl_pool_touch(a->pool, ended);
    return s;
}

static paged_status start_merge(paged_cl_attn *a, bool lse, bool sinks, paged_error *err) {
    const size_t size[] = {(size_t)a->config.n_kv_heads, (size_t)a->state_rows, a->n_merges};
    int32_t code = set_buffer(a, a->merge, 0, &a->items);
    code |= set_buffer(a, a->merge, 1, &a->merges);
    code |= set_buffer(a, a->merge, 2, &a->out);
    code |= set_buffer(a, a->merge, 3, lse ? &a->lse : NULL);
    code |= set_buffer(a, a->merge, 4, sinks ? &a->sinks : NULL);
    code |= set_buffer(a, a->merge, 5, &a->states);
    if (code != CL_SUCCESS) return paged__cl_fail(err, "arguments of merge", code);
    return start(a, a->merge, 3, size, 0, NULL, NULL, err);
}

/* Every kernel once, on nothing: drivers finish a program when it runs first. */
static paged_status warm_up(paged_cl_attn *a, paged_error *err) {
    paged_cl *cl = a->cl;
    paged_cl_stats *stats = &cl->stats;
    const int64_t no_slot = -1;
    const paged__cl_item no_rows = {.state = -1};
    const merge nothing = {0};
    const paged__cl_kv kv = {0};
    paged_status s = paged__cl_buffer_send(cl, &a->slots, &no_slot, sizeof no_slot, &stats->table_bytes, err);
    if (!s) s = paged__cl_buffer_send(cl, &a->items, &no_rows, sizeof no_rows, &stats->table_bytes, err);
    if (!s) s = paged__cl_buffer_send(cl, &a->merges, &nothing, sizeof nothing, &stats->table_bytes, err);
    if (!s) s = paged__cl_buffer_reserve(cl, &a->tables, 1, &stats->table_bytes, err);
    paged__cl_buffer *const io[] = {&a->q, &a->k, &a->v, &a->out, &a->lse, &a->sinks};
    for (size_t i = 0; i < sizeof io / sizeof io[0] && !s; i++)
        s = paged__cl_buffer_reserve(cl, io[i], 1, &stats->io_bytes, err);
    a->n_tokens = 1;
    a->n_items = a->n_merges = 1;
    if (!s) s = start_write(a, &kv, 0, 0, err);
    if (!s) s = start_attend(a, &kv, 0, true, true, err);
    if (!s) s = start_merge(a, true, true, err);
    a->n_tokens = 0;
    a->n_items = a->n_merges = 0;
    if (s) return s;
    const int32_t code = cl->api->Finish(cl->compute);
    return code == CL_SUCCESS ? PAGED_OK : paged__cl_fail(err, "the first run of the kernels", code);
}

static paged_status make_program(paged_cl_attn *a, bool direct, paged_error *err) {
    const uint64_t begin = paged__now_ns();
    char options[OPTIONS_BYTES];
    bool from_cache;
    make_options(a, direct, options);
    paged_status s = paged__cl_program_build(a->cl, options, &a->program, &from_cache, err);
    if (!s) s = make_kernels(a, err);
    if (!s) s = warm_up(a, err);
    if (!s && !from_cache) paged__cl_program_keep(a->cl, options, a->program);
    a->cl->stats.build_ns += paged__now_ns() - begin;
    return s;
}

static paged_status create(paged_cl_attn *a, const paged_attn_config *config, bool direct, paged_error *err) {
    paged_cl_stats *stats = &a->cl->stats;
    const int32_t zero = 0;
    paged_status s = paged__attn_config_check(config, &a->config, err);
    if (s) return s;
    const paged_attn_config *c = &a->config;
    a->group = c->n_heads / c->n_kv_heads;
    if ((int64_t)c->max_q * a->group > INT32_MAX)
        return paged__fail(err, PAGED_ERR_LIMIT, "max_q %d times %d heads of a group", c->max_q, a->group);
    a->state_rows = PAGED_MIN(a->group, (int32_t)PAGED__CL_ROWS);
    a->scale_log2 = (float)(c->scale * LOG2_E);
    a->softcap_log2 = (float)(c->softcap * LOG2_E);
    s = take_states(a, err);
    if (!s) s = paged__cl_buffer_send(a->cl, &a->n_nan, &zero, sizeof zero, &stats->table_bytes, err);
    float *slopes = paged__calloc((size_t)c->n_heads, sizeof *slopes);
    if (!s && !slopes) s = paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for %d slopes", c->n_heads);
    for (int32_t h = 0; !s && c->alibi && h < c->n_heads; h++) slopes[h] = (float)(c->alibi[h] * LOG2_E);
    if (!s)
        s = paged__cl_buffer_send(a->cl, &a->slopes, slopes, (size_t)c->n_heads * sizeof *slopes,
                                  &stats->table_bytes, err);
    paged__free(slopes);
    if (!s) s = make_program(a, direct, err);
    a->config.alibi = NULL; /* the caller's */
    if (!s && c->type == PAGED_TYPE_I8) {
        /* mem.h: two scales of f32 for each key and value of a head. */
        const size_t share = a->pool->size_bytes / (size_t)(c->head_dim_k + c->head_dim_v + 8) * 8;
        stats->scale_bytes = PAGED_MAX(stats->scale_bytes, share);
    }
    return s;
}

paged_status paged__cl_attn_create(paged_cl *cl, const paged_arena *arena, const paged_attn_config *config,
                                   bool direct, paged_cl_attn **out, paged_error *err) {
    paged__cl_pool *pool = paged__cl_pool_of(arena);
    if (!cl || !out) INVALID("%s is NULL", cl ? "out" : "cl");
    if (!pool || pool->cl != cl) INVALID("the arena is none of this device");
    paged_cl_attn *a = paged__calloc(1, sizeof *a);
    if (!a) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for an attention object");
    a->cl = cl;
    a->pool = pool;
    paged_status s = create(a, config, direct, err);
    if (s) {
        paged_cl_attn_free(a);
        return s;
    }
    *out = a;
    return PAGED_OK;
}

paged_status paged_cl_attn_create(paged_cl *cl, const paged_arena *arena, const paged_attn_config *config,
                                  paged_cl_attn **out, paged_error *err) {
    return paged__cl_attn_create(cl, arena, config, false, out, err);
}

void paged_cl_attn_free(paged_cl_attn *a) {
    if (!a) return;
    const paged__cl_api *api = a->cl->api;
    paged_cl_stats *stats = &a->cl->stats;
    api->Finish(a->cl->compute);
    paged__cl_buffer *const of_tables[] = {&a->tables, &a->items,  &a->merges,
                                           &a->slots,  &a->slopes, &a->n_nan};
    paged__cl_buffer *const of_io[] = {&a->q, &a->k, &a->v, &a->out, &a->lse, &a->sinks};
    for (size_t i = 0; i < sizeof of_tables / sizeof of_tables[0]; i++)
        paged__cl_buffer_free(a->cl, of_tables[i], &stats->table_bytes);
    for (size_t i = 0; i < sizeof of_io / sizeof of_io[0]; i++)
        paged__cl_buffer_free(a->cl, of_io[i], &stats->io_bytes);
    paged__cl_buffer_free(a->cl, &a->states, &stats->state_bytes);
    if (a->merge) api->ReleaseKernel(a->merge);
    if (a->attend) api->ReleaseKernel(a->attend);
    if (a->write) api->ReleaseKernel(a->write);
    if (a->program) api->ReleaseProgram(a->program);
    paged__free(a->merge_list);
    paged__free(a->item_list);
    paged__free(a->table_entries);
    paged__free(a);
}

/* ---- where a cache lies in the pool ---- */

/* The bytes of a part (K, V, scales) of `bytes` a block of a head, in the pool? */
static bool lies_inside(const paged_cl_attn *a, const uint8_t *at, int64_t block_stride, int64_t head_stride,
                        int64_t bytes, const paged_kv *kv, int64_t *offset) {
    const int64_t size = (int64_t)a->pool->size_bytes;
    const int64_t span = (kv->n_blocks - 1) * block_stride + (kv->n_kv_heads - 1) * head_stride + bytes;
    const uintptr_t address = (uintptr_t)at;
    if (address < PAGED_ARENA_AWAY || address - PAGED_ARENA_AWAY > (uintptr_t)size) return false;
    *offset = (int64_t)(address - PAGED_ARENA_AWAY);
    return span <= size - *offset;
}

/* For a cache whose shape and strides are right. */
static paged_status locate(const paged_cl_attn *a, const paged_kv *kv, paged__cl_kv *out, paged_error *err) {
    const int64_t row = (int64_t)paged__type_bytes(kv->type) * kv->block_size;
    *out = (paged__cl_kv){.block_stride = kv->block_stride,
                          .k_head_stride = kv->k_head_stride,
                          .v_head_stride = kv->v_head_stride,
                          .scale_block_stride = kv->scale_block_stride,
                          .scale_head_stride = kv->scale_head_stride};
    if (kv->n_blocks == 0) return PAGED_OK; /* no table, and no slot, names a block */
    bool inside =
        lies_inside(a, kv->k, kv->block_stride, kv->k_head_stride, row * kv->head_dim_k, kv, &out->k) &&
        lies_inside(a, kv->v, kv->block_stride, kv->v_head_stride, row * kv->head_dim_v, kv, &out->v);
    const int64_t scales = 4LL * kv->block_size;
    if (inside && kv->type == PAGED_TYPE_I8)
        inside = lies_inside(a, kv->k_scale, kv->scale_block_stride, kv->scale_head_stride, scales, kv,
                             &out->k_scale) &&
                 lies_inside(a, kv->v_scale, kv->scale_block_stride, kv->scale_head_stride, scales, kv,
                             &out->v_scale);
    if (!inside)
        INVALID("%d blocks with a stride of %lld bytes do not lie in the pool of %zu bytes on the device",
                kv->n_blocks, (long long)kv->block_stride, a->pool->size_bytes);
    return PAGED_OK;
}

/* ---- plan ---- */

/* Room for n more things of elem bytes; what is there stays. */
static bool grow(void **list, size_t n, size_t more, size_t *capacity, size_t elem) {
    if (n + more <= *capacity) return true;
    const size_t wanted = PAGED_MAX(n + more, *capacity + *capacity / 2);
    void *larger = paged__alloc(wanted, elem);
    if (!larger) return false;
    if (n) memcpy(larger, *list, n * elem);
    paged__free(*list);
    *list = larger;
    *capacity = wanted;
    return true;
}

/* Tables of a sequence, one or one a head, then the tiles of its packed tail. */
static bool add_table(paged_cl_attn *a, const paged_batch *batch, const paged_kv *kv, int32_t seq,
                      paged__cl_item *item) {
    const paged_tables *t = &batch->tables;
    const int32_t n_keys = t->seqlens_k[seq], n_tables = t->head_stride ? kv->n_kv_heads : 1;
    const int32_t n_blocks = (int32_t)(((int64_t)n_keys + kv->block_size - 1) / kv->block_size);
    const int32_t n_tail = t->tail_tiles ? kv->block_size / PAGED_TILE : 0;
    const int64_t row = t->rows ? t->rows[seq] : seq;
    const size_t n = (size_t)n_tables * (size_t)n_blocks + (size_t)n_tail;
    void *list = a->table_entries;
    const bool has_room = grow(&list, a->n_entries, n, &a->entries_capacity, sizeof *a->table_entries);
    a->table_entries = list;
    if (!has_room || a->n_entries + n > INT32_MAX) return false;
    item->table = (int32_t)a->n_entries;
    item->head_stride = t->head_stride ? n_blocks : 0;
    item->tail = item->table + n_tables * n_blocks;
    for (int32_t i = 0; i < n_tables && n_blocks > 0; i++, a->n_entries += (size_t)n_blocks)
        memcpy(a->table_entries + a->n_entries, t->blocks + row * t->seq_stride + i * t->head_stride,
               (size_t)n_blocks * sizeof(int32_t));
    if (n_tail)
        memcpy(a->table_entries + a->n_entries, t->tail_tiles + row * n_tail,
               (size_t)n_tail * sizeof(int32_t));
    a->n_entries += (size_t)n_tail;
    return true;
}

static bool add_item(paged_cl_attn *a, const paged__cl_item *item) {
    void *list = a->item_list;
    size_t capacity = a->items_capacity;
    bool has_room = grow(&list, a->n_items, 1, &a->items_capacity, sizeof *a->item_list);
    a->item_list = list;
    list = a->merge_list;
    /* As many merges as items at most, so that one capacity serves both. */
    if (has_room && capacity != a->items_capacity)
        has_room =
            grow(&list, a->n_merges, a->items_capacity - a->n_merges, &capacity, sizeof *a->merge_list);
    a->merge_list = list;
    if (has_room) a->item_list[a->n_items++] = *item;
    return has_room;
}

/* The splits of an item that decodes go to states, one each, as long as there are some left. */
static bool add_splits(paged_cl_attn *a, paged__cl_item item) {
    const int32_t of_item = a->config.n_kv_heads * a->state_rows, end = item.split_end,
                  n = end - item.split_first;
    if (n < 2 || (int64_t)n * of_item > a->n_states_max - a->n_states) return add_item(a, &item);
    const merge m = {(int32_t)a->n_items, n};
    for (int32_t split = item.split_first; split < end; split++) {
        item.split_first = split;
        item.split_end = split + 1;
        item.state = a->n_states;
        if (!add_item(a, &item)) return false;
        a->n_states += of_item;
    }
    a->merge_list[a->n_merges++] = m;
    return true;
}

static bool add_seq(paged_cl_attn *a, const paged_batch *batch, const paged_kv *kv, int32_t seq) {
    const paged_attn_config *c = &a->config;
    const int32_t n_q = batch->cu_seqlens_q[seq + 1] - batch->cu_seqlens_q[seq];
    paged__cl_item item = {.q_first = batch->cu_seqlens_q[seq], .n_keys = batch->tables.seqlens_k[seq]};
    item.first_keys = item.n_keys - n_q + 1;
    if (n_q == 0) return true;
    if (!add_table(a, batch, kv, seq, &item)) return false;
    for (int64_t row = 0, n_rows = (int64_t)n_q * a->group; row < n_rows; row += item.n_rows) {
        item.row_first = (int32_t)row;
        item.n_rows = (int32_t)PAGED_MIN(PAGED__CL_ROWS, n_rows - row);
        const int32_t first = item.first_keys + item.row_first / a->group,
                      last = item.first_keys + (item.row_first + item.n_rows - 1) / a->group;
        const int32_t n_seen = c->non_causal ? item.n_keys : PAGED_MAX(last, 0);
        item.split_first = c->window ? PAGED_MAX(first - c->window, 0) / PAGED_ATTN_SPLIT : 0;
        item.split_end = (n_seen + PAGED_ATTN_SPLIT - 1) / PAGED_ATTN_SPLIT;
        item.state = -1;
        if (!(n_q == 1 ? add_splits(a, item) : add_item(a, &item))) return false;
    }
    return true;
}

static paged_status send_plan(paged_cl_attn *a, paged_error *err) {
    size_t *kind = &a->cl->stats.table_bytes;
    paged_status s = paged__cl_buffer_send(a->cl, &a->tables, a->table_entries,
                                           a->n_entries * sizeof *a->table_entries, kind, err);
    if (!s)
        s = paged__cl_buffer_send(a->cl, &a->items, a->item_list, a->n_items * sizeof *a->item_list, kind,
                                  err);
    if (!s)
        s = paged__cl_buffer_send(a->cl, &a->merges, a->merge_list, a->n_merges * sizeof *a->merge_list, kind,
                                  err);
    return s;
}

paged_status paged_cl_attn_plan(paged_cl_attn *a, const paged_batch *batch, const paged_kv *kv,
                                paged_error *err) {
    if (!a || !batch || !kv) INVALID("%s is NULL", !a ? "attn" : !batch ? "batch" : "kv");
    paged__cl_kv place;
    a->n_q = 0;
    a->n_entries = a->n_items = a->n_merges = 0;
    a->n_states = 0;
    paged_status s = paged__attn_check(&a->config, batch, kv, NULL, err);
    if (!s) s = locate(a, kv, &place, err);
    bool has_room = true;
    const int32_t n_seqs = s ? 0 : batch->tables.n_seqs;
    for (int32_t seq = 0; seq < n_seqs && has_room; seq++) has_room = add_seq(a, batch, kv, seq);
    if (!has_room) s = paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a plan of %d sequences", n_seqs);
    if (!s) s = send_plan(a, err);
    if (s)
        a->n_items = 0;
    else
        a->n_q = n_seqs ? batch->cu_seqlens_q[n_seqs] : 0;
    return s;
}

/* ---- run ---- */

/* Rows of `width` floats, `stride` apart: the span of all of them goes as it is. */
static paged_status send_rows(paged_cl_attn *a, paged__cl_buffer *buffer, const float *rows, int64_t n,
                              int64_t width, int64_t stride, paged_error *err) {
    return paged__cl_buffer_send(a->cl, buffer, rows, (size_t)((n - 1) * stride + width) * sizeof *rows,
                                 &a->cl->stats.io_bytes, err);
}

static paged_status fetch_rows(paged_cl_attn *a, const paged__cl_buffer *buffer, float *rows, int64_t n,
                               int64_t width, int64_t stride, paged_error *err) {
    const size_t origin[3] = {0}, row = (size_t)width * sizeof *rows;
    const size_t region[3] = {row, (size_t)n, 1};
    const int32_t code =
        a->cl->api->EnqueueReadBufferRect(a->cl->compute, buffer->mem, CL_TRUE, origin, origin, region, row,
                                          0, (size_t)stride * sizeof *rows, 0, rows, 0, NULL, NULL);
    if (code != CL_SUCCESS) return paged__cl_fail(err, "the results of attention", code);
    a->cl->stats.received_bytes += row * (size_t)n;
    return PAGED_OK;
}

paged_status paged_cl_attn_run(paged_cl_attn *a, const paged_kv *kv, const paged_attn_io *io,
                               paged_error *err) {
    const paged_attn_config *c = &a->config;
    const int64_t n = a->n_q, q_row = (int64_t)c->n_heads * c->head_dim_k,
                  out_row = (int64_t)c->n_heads * c->head_dim_v;
    const int64_t q_stride = io->q_stride ? io->q_stride : q_row,
                  out_stride = io->out_stride ? io->out_stride : out_row;
    size_t *kind = &a->cl->stats.io_bytes;
    paged__cl_kv place;
    if (a->n_items == 0) return PAGED_OK;
    paged_status s = locate(a, kv, &place, err);
    if (!s) s = send_rows(a, &a->q, io->q, n, q_row, q_stride, err);
    if (!s && io->sinks)
        s = paged__cl_buffer_send(a->cl, &a->sinks, io->sinks, (size_t)c->n_heads * sizeof(float), kind, err);
    if (!s) s = paged__cl_buffer_reserve(a->cl, &a->out, (size_t)(n * out_row) * sizeof(float), kind, err);
    if (!s && io->lse)
        s = paged__cl_buffer_reserve(a->cl, &a->lse, (size_t)(n * c->n_heads) * sizeof(float), kind, err);
    if (!s) s = start_attend(a, &place, q_stride, io->lse, io->sinks, err);
    if (!s && a->n_merges) s = start_merge(a, io->lse, io->sinks, err);
    if (!s) s = fetch_rows(a, &a->out, io->out, n, out_row, out_stride, err);
    if (!s && io->lse) s = fetch_rows(a, &a->lse, io->lse, n, c->n_heads, c->n_heads, err);
    return s;
}

/* ---- writing ---- */

paged_status paged_cl_slots_plan(paged_cl_attn *a, const paged_kv *kv, const int64_t *slots, int32_t n_tokens,
                                 paged_error *err) {
    const paged_attn_config *c = &a->config;
    paged__cl_kv place;
    a->n_tokens = 0;
    paged_status s = paged_kv_check_slots(kv, slots, n_tokens, err);
    if (s) return s;
    if (n_tokens < 0) INVALID("n_tokens is %d", n_tokens);
    if (kv->type != c->type || kv->layout != c->layout || kv->block_size != c->block_size ||
        kv->n_kv_heads != c->n_kv_heads || kv->head_dim_k != c->head_dim_k || kv->head_dim_v != c->head_dim_v)
        INVALID("the cache is not of the shape that the attention object was made for");
    s = locate(a, kv, &place, err);
    if (!s)
        s = paged__cl_buffer_send(a->cl, &a->slots, slots, (size_t)n_tokens * sizeof *slots,
                                  &a->cl->stats.table_bytes, err);
    if (!s) a->n_tokens = n_tokens;
    return s;
}

static paged_status fetch_nan(paged_cl_attn *a, int64_t *n_nan, paged_error *err) {
    const paged__cl_api *api = a->cl->api;
    int32_t n;
    int32_t code =
        api->EnqueueReadBuffer(a->cl->compute, a->n_nan.mem, CL_TRUE, 0, sizeof n, &n, 0, NULL, NULL);
    if (code != CL_SUCCESS) return paged__cl_fail(err, "writing keys and values", code);
    *n_nan = n;
    n = 0;
    return paged__cl_buffer_send(a->cl, &a->n_nan, &n, sizeof n, &a->cl->stats.table_bytes, err);
}

paged_status paged_cl_kv_write(paged_cl_attn *a, const paged_kv *kv, const float *k, int64_t k_stride,
                               const float *v, int64_t v_stride, int64_t *n_nan, paged_error *err) {
    const int64_t k_row = (int64_t)kv->n_kv_heads * kv->head_dim_k,
                  v_row = (int64_t)kv->n_kv_heads * kv->head_dim_v;
    paged__cl_kv place;
    if (k_stride == 0) k_stride = k_row;
    if (v_stride == 0) v_stride = v_row;
    if (n_nan) *n_nan = 0;
    if (a->n_tokens == 0) return PAGED_OK;
    paged_status s = locate(a, kv, &place, err);
    if (!s) s = send_rows(a, &a->k, k, a->n_tokens, k_row, k_stride, err);
    if (!s) s = send_rows(a, &a->v, v, a->n_tokens, v_row, v_stride, err);
    if (!s) s = start_write(a, &place, k_stride, v_stride, err);
    return !s && n_nan ? fetch_nan(a, n_nan, err) : s;
}
