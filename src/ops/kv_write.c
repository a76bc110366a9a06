/* kv_write.c: keys and values into their slots and back, in every layout and type of paged/kv.h. */
#include "ops/i8.h"
#include "ops/ops.h"

enum { MAX_BLOCK_SIZE = 1024 };

#define INVALID(...) return paged__fail(err, PAGED_ERR_INVALID_ARG, __VA_ARGS__)

/* K, V or the scales, as the strides lay them out. */
typedef struct part {
    const char *name, *block_name; /* of the strides: name_head_stride, block_name */
    int64_t head_stride, block_stride;
    int64_t elem, bytes; /* of an element, of a block of a head */
} part;

/* Blocks, and the heads in them, must not overlap, whichever of the two is the outer dimension. */
static paged_status check_strides(const paged_kv *kv, part p, paged_error *err) {
    /* Addresses have 47 bits, so no product of a valid stride leaves them. */
    const int64_t address_max = (int64_t)1 << 47;
    if (p.head_stride < 0 || p.head_stride > address_max / kv->n_kv_heads || p.head_stride % p.elem ||
        (kv->n_kv_heads > 1 && p.head_stride < p.bytes))
        INVALID("%s_head_stride is %lld bytes; a block of a head takes %lld", p.name,
                (long long)p.head_stride, (long long)p.bytes);
    if (p.block_stride < 0 || p.block_stride > address_max / PAGED_MAX(kv->n_blocks, 1) ||
        p.block_stride % p.elem || (kv->n_blocks > 1 && p.block_stride < p.bytes))
        INVALID("%s is %lld bytes; a block of a head takes %lld of %s", p.block_name,
                (long long)p.block_stride, (long long)p.bytes, p.name);
    int64_t head_span = (kv->n_kv_heads - 1) * p.head_stride + p.bytes;
    int64_t block_span = (kv->n_blocks - 1) * p.block_stride + p.bytes;
    if (kv->n_blocks > 1 && kv->n_kv_heads > 1 && p.block_stride < head_span && p.head_stride < block_span)
        INVALID("%s %lld and %s_head_stride %lld let blocks overlap", p.block_name, (long long)p.block_stride,
                p.name, (long long)p.head_stride);
    return PAGED_OK;
}

/* What i8 asks for beyond the other types. */
static paged_status check_i8(const paged_kv *kv, paged_error *err) {
    if (kv->layout != PAGED_LAYOUT_PACKED) INVALID("i8 exists in the packed layout only");
    if (kv->head_dim_k % 4 || kv->head_dim_v % 4)
        INVALID("head_dim_k %d and head_dim_v %d must be multiples of 4 in i8", kv->head_dim_k,
                kv->head_dim_v);
    if (kv->n_blocks > 0 && (!kv->k_scale || !kv->v_scale))
        INVALID("%s of the cache is NULL, and its type is i8", kv->k_scale ? "v_scale" : "k_scale");
    if (((uintptr_t)kv->k_scale | (uintptr_t)kv->v_scale) % sizeof(float))
        INVALID("k_scale or v_scale of the cache is not aligned to its elements");
    return check_strides(kv,
                         (part){"scale", "scale_block_stride", kv->scale_head_stride, kv->scale_block_stride,
                                sizeof(float), (int64_t)sizeof(float) * kv->block_size},
                         err);
}

paged_status paged__kv_check(const paged_kv *kv, paged_error *err) {
    uint32_t type = (uint32_t)kv->type, layout = (uint32_t)kv->layout;
    if (type > PAGED_TYPE_I8) INVALID("type of the cache is %u", type);
    if (layout > PAGED_LAYOUT_PACKED) INVALID("layout of the cache is %u", layout);
    if (kv->block_size < 1 || kv->block_size > MAX_BLOCK_SIZE)
        INVALID("block_size is %d, not in 1 ... %d", kv->block_size, MAX_BLOCK_SIZE);
    if (layout == PAGED_LAYOUT_PACKED && kv->block_size % PAGED_TILE)
        INVALID("block_size %d is no multiple of %d, which the packed layout asks for", kv->block_size,
                PAGED_TILE);
    if (kv->n_blocks < 0 || kv->n_kv_heads < 1)
        INVALID("n_blocks is %d, n_kv_heads %d", kv->n_blocks, kv->n_kv_heads);
    if (kv->head_dim_k < 1 || kv->head_dim_k > PAGED_HEAD_DIM_MAX || kv->head_dim_v < 1 ||
        kv->head_dim_v > PAGED_HEAD_DIM_MAX)
        INVALID("head_dim_k is %d, head_dim_v %d, not in 1 ... %d", kv->head_dim_k, kv->head_dim_v,
                PAGED_HEAD_DIM_MAX);
    if (layout == PAGED_LAYOUT_PACKED && type == PAGED_TYPE_BF16 &&
        (kv->head_dim_k % 2 || kv->head_dim_v % 2))
        INVALID("head_dim_k %d and head_dim_v %d must be even in the packed layout of bf16", kv->head_dim_k,
                kv->head_dim_v);
    if (((uintptr_t)kv->k | (uintptr_t)kv->v) % paged__type_bytes(kv->type))
        INVALID("k or v of the cache is not aligned to its elements");
    int64_t elem = (int64_t)paged__type_bytes(kv->type), slots = elem * kv->block_size;
    const part parts[] = {
        {"k", "block_stride", kv->k_head_stride, kv->block_stride, elem, slots * kv->head_dim_k},
        {"v", "block_stride", kv->v_head_stride, kv->block_stride, elem, slots * kv->head_dim_v},
    };
    paged_status status = type == PAGED_TYPE_I8 ? check_i8(kv, err) : PAGED_OK;
    for (int32_t i = 0; i < 2 && !status; i++) status = check_strides(kv, parts[i], err);
    return status;
}

paged_status paged_kv_check_slots(const paged_kv *kv, const int64_t *slots, int32_t n_tokens,
                                  paged_error *err) {
    if (!kv || (!slots && n_tokens > 0)) INVALID("%s is NULL", kv ? "slots" : "kv");
    paged_status status = paged__kv_check(kv, err);
    if (status) return status;
    int64_t n_slots = (int64_t)kv->n_blocks * kv->block_size;
    for (int32_t i = 0; i < n_tokens; i++)
        if (slots[i] >= n_slots)
            INVALID("slot %lld of token %d is not below %lld (%d blocks of %d)", (long long)slots[i], i,
                    (long long)n_slots, kv->n_blocks, kv->block_size);
    return PAGED_OK;
}

/* ---- where the elements of a row lie ---- */

/* A row of one token and head: elements in runs of `run`, each run `step` elements after the one before. */
typedef struct row_shape {
    int64_t offset; /* elements, of element 0 in the block of the head */
    int32_t run;    /* 0: the whole row in one */
    int64_t step;
} row_shape;

static row_shape k_shape(const paged_kv *kv, int32_t o) {
    int64_t tile = (int64_t)(o / PAGED_TILE) * PAGED_TILE * kv->head_dim_k, i = o % PAGED_TILE;
    if (kv->layout == PAGED_LAYOUT_PLAIN) return (row_shape){(int64_t)o * kv->head_dim_k, 0, 0};
    if (kv->type == PAGED_TYPE_BF16) return (row_shape){tile + 2 * i, 2, 2 * PAGED_TILE};
    return (row_shape){tile + i, 1, PAGED_TILE};
}

static row_shape v_shape(const paged_kv *kv, int32_t o) {
    int64_t tile = (int64_t)(o / PAGED_TILE) * PAGED_TILE * kv->head_dim_v, i = o % PAGED_TILE;
    if (kv->layout == PAGED_LAYOUT_PLAIN) return (row_shape){(int64_t)o * kv->head_dim_v, 0, 0};
    if (kv->type == PAGED_TYPE_BF16) return (row_shape){tile + i / 2 * 2 * kv->head_dim_v + i % 2, 1, 2};
    return (row_shape){tile + i * kv->head_dim_v, 0, 0};
}

/* Between a dense row and its place in the cache. `elem` is 2 or 4 and constant in each call, so that a
 * copy is a move. */
static inline void scatter(uint8_t *to, const uint8_t *row, row_shape s, int32_t n, size_t elem) {
    for (int32_t d = 0; d < n; d += s.run, to += s.step * (int64_t)elem)
        for (int32_t i = 0; i < s.run; i++) memcpy(to + (size_t)i * elem, row + (size_t)(d + i) * elem, elem);
}

static inline void collect(uint8_t *row, const uint8_t *from, row_shape s, int32_t n, size_t elem) {
    for (int32_t d = 0; d < n; d += s.run, from += s.step * (int64_t)elem)
        for (int32_t i = 0; i < s.run; i++)
            memcpy(row + (size_t)(d + i) * elem, from + (size_t)i * elem, elem);
}

/* ---- write and read ---- */

typedef struct writer {
    const paged__kernels *kernels;
    paged_type type;
    size_t elem;
} writer;

static int64_t write_row(const writer *w, uint8_t *head_block, row_shape s, const float *src, int32_t n) {
    uint8_t *to = head_block + s.offset * (int64_t)w->elem;
    float row[PAGED_HEAD_DIM_MAX]; /* room for any type */
    if (s.run == 0) return w->kernels->of[w->type]->from_f32(to, src, n);
    int64_t n_nan = w->kernels->of[w->type]->from_f32(row, src, n);
    if (w->elem == 4)
        scatter(to, (const uint8_t *)row, s, n, 4);
    else
        scatter(to, (const uint8_t *)row, s, n, 2);
    return n_nan;
}

static void read_row(const writer *w, const uint8_t *head_block, row_shape s, float *dst, int32_t n) {
    const uint8_t *from = head_block + s.offset * (int64_t)w->elem;
    float row[PAGED_HEAD_DIM_MAX];
    if (s.run != 0) {
        if (w->elem == 4)
            collect((uint8_t *)row, from, s, n, 4);
        else
            collect((uint8_t *)row, from, s, n, 2);
        from = (const uint8_t *)row;
    }
    w->kernels->of[w->type]->to_f32(dst, from, n);
}

/* Whether the tokens from t on are the 16 of a tile. */
static bool is_tile(const paged_kv *kv, const int64_t *slots, int64_t t, int64_t end) {
    if (kv->layout != PAGED_LAYOUT_PACKED || end - t < PAGED_TILE || slots[t] < 0 || slots[t] % PAGED_TILE)
        return false;
    for (int64_t i = 1; i < PAGED_TILE; i++)
        if (slots[t + i] != slots[t] + i) return false;
    return true;
}

/* K or V of a whole tile and head. */
static int64_t write_tile(const writer *w, uint8_t *tile, const float *src, int64_t stride, int32_t n,
                          bool value) {
    const paged__type_kernels *kernels = w->kernels->of[w->type];
    float rows[PAGED_TILE][PAGED_HEAD_DIM_MAX]; /* room for any type */
    const void *at[PAGED_TILE];
    int64_t n_nan = 0;
    for (int64_t i = 0; i < PAGED_TILE; i++) {
        at[i] = rows[i];
        n_nan += kernels->from_f32(rows[i], src + i * stride, n);
    }
    (value ? kernels->pack_v : kernels->pack_k)(tile, at, n);
    return n_nan;
}

static writer writer_of(const paged_kv *kv) {
    return (writer){paged__kernels_choose(paged_cpu_flags()), kv->type, paged__type_bytes(kv->type)};
}

int64_t paged_kv_write(const paged_kv *kv, const float *k, int64_t k_stride, const float *v, int64_t v_stride,
                       const int64_t *slots, int32_t n_tokens, int32_t ith, int32_t nth) {
    int64_t dk = kv->head_dim_k, dv = kv->head_dim_v, n_nan = 0;
    int64_t begin = (int64_t)n_tokens * ith / nth, end = (int64_t)n_tokens * (ith + 1) / nth;
    if (k_stride == 0) k_stride = kv->n_kv_heads * dk;
    if (v_stride == 0) v_stride = kv->n_kv_heads * dv;
    if (kv->type == PAGED_TYPE_I8) return paged__i8_write(kv, k, k_stride, v, v_stride, slots, begin, end);
    writer w = writer_of(kv);
    for (int64_t t = begin, n; t < end; t += n) {
        n = is_tile(kv, slots, t, end) ? PAGED_TILE : 1;
        if (slots[t] < 0) continue;
        int64_t block = slots[t] / kv->block_size;
        int32_t o = (int32_t)(slots[t] % kv->block_size);
        uint8_t *k_block = kv->k + block * kv->block_stride, *v_block = kv->v + block * kv->block_stride;
        row_shape k_row = k_shape(kv, o), v_row = v_shape(kv, o);
        for (int64_t h = 0; h < kv->n_kv_heads; h++) {
            if (n == PAGED_TILE) {
                n_nan += write_tile(&w, k_block + h * kv->k_head_stride + o * dk * (int64_t)w.elem,
                                    k + t * k_stride + h * dk, k_stride, (int32_t)dk, false);
                n_nan += write_tile(&w, v_block + h * kv->v_head_stride + o * dv * (int64_t)w.elem,
                                    v + t * v_stride + h * dv, v_stride, (int32_t)dv, true);
                continue;
            }
            n_nan +=
                write_row(&w, k_block + h * kv->k_head_stride, k_row, k + t * k_stride + h * dk, (int32_t)dk);
            n_nan +=
                write_row(&w, v_block + h * kv->v_head_stride, v_row, v + t * v_stride + h * dv, (int32_t)dv);
        }
    }
    return n_nan;
}

void paged_kv_read(const paged_kv *kv, const int64_t *slots, int32_t n_tokens, float *k_out, float *v_out) {
    if (kv->type == PAGED_TYPE_I8) {
        paged__i8_read(kv, slots, n_tokens, k_out, v_out);
        return;
    }
    writer w = writer_of(kv);
    int64_t dk = kv->head_dim_k, dv = kv->head_dim_v;
    for (int64_t t = 0; t < n_tokens; t++) {
        if (slots[t] < 0) continue;
        int64_t block = slots[t] / kv->block_size;
        int32_t o = (int32_t)(slots[t] % kv->block_size);
        for (int64_t h = 0; h < kv->n_kv_heads; h++) {
            const uint8_t *k_block = kv->k + block * kv->block_stride + h * kv->k_head_stride;
            const uint8_t *v_block = kv->v + block * kv->block_stride + h * kv->v_head_stride;
            if (k_out)
                read_row(&w, k_block, k_shape(kv, o), k_out + (t * kv->n_kv_heads + h) * dk, (int32_t)dk);
            if (v_out)
                read_row(&w, v_block, v_shape(kv, o), v_out + (t * kv->n_kv_heads + h) * dv, (int32_t)dv);
        }
    }
}
