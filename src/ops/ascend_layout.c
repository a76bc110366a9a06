/* ascend_layout.c: keys and values in the layouts of Ascend cards. Elements are moved as bytes, one by one,
 * by two functions that say where an element lies; so each layout is one formula, and it is the same in both
 * directions. */
#include "ops/ascend.h"
#include "ops/ops.h"

#define INVALID(...) return paged__fail(err, PAGED_ERR_INVALID_ARG, __VA_ARGS__)

/* Sizes of K or V of all blocks. */
typedef struct sizes {
    int64_t n_blocks, block_size, n_heads, head_dim, elem, c0;
} sizes;

/* Element d of token o of head h in block b. */
typedef struct where {
    int64_t b, h, o, d;
} where;

static int64_t dense_element(const sizes *s, paged_ascend_layout layout, where e) {
    int64_t heads = e.b * s->n_heads + e.h;
    switch (layout) {
    case PAGED_ASCEND_BNBSH:
        return ((e.b * s->block_size + e.o) * s->n_heads + e.h) * s->head_dim + e.d;
    case PAGED_ASCEND_BNNBSD:
        return (heads * s->block_size + e.o) * s->head_dim + e.d;
    default:
        return ((heads * (s->head_dim / s->c0) + e.d / s->c0) * s->block_size + e.o) * s->c0 + e.d % s->c0;
    }
}

/* In one block and head of the cache; the formulas of paged/kv.h. `run` elements of the packed layouts lie
 * together that belong to one token (K) or to one element (V). */
static int64_t cache_element(const paged_kv *kv, bool value, int64_t n, where e) {
    int64_t run = kv->type == PAGED_TYPE_BF16 ? 2 : kv->type == PAGED_TYPE_I8 ? 4 : 1;
    int64_t tile = e.o / PAGED_TILE * PAGED_TILE * n, i = e.o % PAGED_TILE;
    if (kv->layout == PAGED_LAYOUT_PLAIN) return e.o * n + e.d;
    if (value) return tile + i / run * run * n + e.d * run + i % run;
    return tile + e.d / run * run * PAGED_TILE + i * run + e.d % run;
}

static paged_status check_sizes(const sizes *s, paged_ascend_layout layout, paged_type type,
                                paged_error *err) {
    int64_t bytes = s->elem;
    if ((uint32_t)layout >= PAGED_ASCEND_LAYOUTS) INVALID("layout %d is none", (int)layout);
    if ((uint32_t)type > PAGED_TYPE_I8) INVALID("type %d is none", (int)type);
    if (s->n_blocks < 1 || s->block_size < 1 || s->n_heads < 1 || s->head_dim < 1)
        INVALID("%lld blocks of %lld tokens, %lld heads of %lld", (long long)s->n_blocks,
                (long long)s->block_size, (long long)s->n_heads, (long long)s->head_dim);
    if (layout == PAGED_ASCEND_PA_NZ && s->head_dim % s->c0)
        INVALID("head_dim is %lld; PA_NZ takes multiples of %lld elements, 32 bytes", (long long)s->head_dim,
                (long long)s->c0);
    if (__builtin_mul_overflow(bytes, s->n_blocks, &bytes) ||
        __builtin_mul_overflow(bytes, s->block_size, &bytes) ||
        __builtin_mul_overflow(bytes, s->n_heads, &bytes) ||
        __builtin_mul_overflow(bytes, s->head_dim, &bytes))
        INVALID("%lld blocks of %lld tokens, %lld heads of %lld: more than 2^63 bytes",
                (long long)s->n_blocks, (long long)s->block_size, (long long)s->n_heads,
                (long long)s->head_dim);
    return PAGED_OK;
}

static sizes sizes_of(paged_type type, int32_t n_blocks, int32_t block_size, int32_t n_heads,
                      int32_t head_dim) {
    return (sizes){n_blocks,
                   block_size,
                   n_heads,
                   head_dim,
                   paged__ascend_elem((int32_t)type),
                   paged__ascend_c0((int32_t)type)};
}

paged_status paged_ascend_shape(paged_ascend_layout layout, paged_type type, int32_t n_blocks,
                                int32_t block_size, int32_t n_kv_heads, int32_t head_dim, int64_t axes[5],
                                int32_t *n_axes, paged_error *err) {
    sizes s = sizes_of(type, n_blocks, block_size, n_kv_heads, head_dim);
    paged_status status = check_sizes(&s, layout, type, err);
    if (status) return status;
    const int64_t shapes[PAGED_ASCEND_LAYOUTS][5] = {
        {n_blocks, block_size, (int64_t)n_kv_heads * head_dim},
        {n_blocks, n_kv_heads, block_size, head_dim},
        {n_blocks, n_kv_heads, head_dim / s.c0, block_size, s.c0},
    };
    memcpy(axes, shapes[layout], sizeof shapes[layout]);
    *n_axes = 3 + (int32_t)layout;
    return PAGED_OK;
}

/* ---- between dense layouts ---- */

paged_status paged_ascend_convert(paged_ascend_layout from, paged_ascend_layout to, paged_type type,
                                  int32_t n_blocks, int32_t block_size, int32_t n_kv_heads, int32_t head_dim,
                                  const void *src, void *dst, paged_error *err) {
    sizes s = sizes_of(type, n_blocks, block_size, n_kv_heads, head_dim);
    paged_status status = check_sizes(&s, from, type, err);
    if (!status) status = check_sizes(&s, to, type, err);
    if (status) return status;
    if (!src || !dst) INVALID("%s is NULL", src ? "dst" : "src");
    where e;
    for (e.b = 0; e.b < s.n_blocks; e.b++)
        for (e.h = 0; e.h < s.n_heads; e.h++)
            for (e.o = 0; e.o < s.block_size; e.o++)
                for (e.d = 0; e.d < s.head_dim; e.d++)
                    memcpy((uint8_t *)dst + dense_element(&s, to, e) * s.elem,
                           (const uint8_t *)src + dense_element(&s, from, e) * s.elem, (size_t)s.elem);
    return PAGED_OK;
}

/* ---- between the cache and a dense layout ---- */

typedef struct transfer {
    const paged_kv *kv;
    paged_ascend_layout layout;
    bool to_dense;
    int32_t ith, nth;
} transfer;

/* Keys of int8 have 128 added in the cache: the highest bit the other way round. */
static void move(const transfer *t, uint8_t *cache, uint8_t *dense, size_t elem, bool flip) {
    uint8_t *to = t->to_dense ? dense : cache;
    memcpy(to, t->to_dense ? cache : dense, elem);
    if (flip) *to ^= 0x80;
}

static void move_all(const transfer *t, bool value, uint8_t *dense) {
    const paged_kv *kv = t->kv;
    sizes s = sizes_of(kv->type, kv->n_blocks, kv->block_size, kv->n_kv_heads,
                       value ? kv->head_dim_v : kv->head_dim_k);
    bool flip = !value && kv->type == PAGED_TYPE_I8;
    where e;
    for (e.b = s.n_blocks * t->ith / t->nth; e.b < s.n_blocks * (t->ith + 1) / t->nth; e.b++)
        for (e.h = 0; e.h < s.n_heads; e.h++) {
            uint8_t *block = (value ? kv->v : kv->k) + e.b * kv->block_stride +
                             e.h * (value ? kv->v_head_stride : kv->k_head_stride);
            for (e.o = 0; e.o < s.block_size; e.o++)
                for (e.d = 0; e.d < s.head_dim; e.d++)
                    move(t, block + cache_element(kv, value, s.head_dim, e) * s.elem,
                         dense + dense_element(&s, t->layout, e) * s.elem, (size_t)s.elem, flip);
        }
}

static void move_scales(const transfer *t, uint8_t *cache, float *dense) {
    const paged_kv *kv = t->kv;
    int64_t n_blocks = kv->n_blocks, size = kv->block_size;
    for (int64_t b = n_blocks * t->ith / t->nth; b < n_blocks * (t->ith + 1) / t->nth; b++)
        for (int64_t h = 0; h < kv->n_kv_heads; h++)
            for (int64_t o = 0; o < size; o++)
                move(t, cache + b * kv->scale_block_stride + h * kv->scale_head_stride + o * 4,
                     (uint8_t *)&dense[(b * kv->n_kv_heads + h) * size + o], sizeof *dense, false);
}

static paged_status transfer_all(const transfer *t, const paged_ascend_dense *dense, paged_error *err) {
    const paged_kv *kv = t->kv;
    if (!kv || !dense) INVALID("%s is NULL", kv ? "the dense side" : "kv");
    if (t->nth < 1 || t->ith < 0 || t->ith >= t->nth) INVALID("thread %d of %d", t->ith, t->nth);
    paged_status status = paged__kv_check(kv, err);
    if (status) return status;
    bool scales = dense->k_scale || dense->v_scale;
    if ((dense->k && !kv->k) || (dense->v && !kv->v))
        INVALID("%s of the cache is NULL", dense->k && !kv->k ? "k" : "v");
    if (scales && kv->type != PAGED_TYPE_I8) INVALID("only int8 has scales");
    for (int32_t value = 0; value < 2; value++) {
        if (!(value ? dense->v : dense->k)) continue;
        sizes s = sizes_of(kv->type, kv->n_blocks, kv->block_size, kv->n_kv_heads,
                           value ? kv->head_dim_v : kv->head_dim_k);
        status = check_sizes(&s, t->layout, kv->type, err);
        if (status) return status;
    }
    if (dense->k) move_all(t, false, dense->k);
    if (dense->v) move_all(t, true, dense->v);
    if (dense->k_scale) move_scales(t, kv->k_scale, dense->k_scale);
    if (dense->v_scale) move_scales(t, kv->v_scale, dense->v_scale);
    return PAGED_OK;
}

paged_status paged_ascend_export(const paged_kv *kv, paged_ascend_layout layout, const paged_ascend_dense *to,
                                 int32_t ith, int32_t nth, paged_error *err) {
    transfer t = {kv, layout, true, ith, nth};
    return transfer_all(&t, to, err);
}

paged_status paged_ascend_import(const paged_kv *kv, paged_ascend_layout layout,
                                 const paged_ascend_dense *from, int32_t ith, int32_t nth, paged_error *err) {
    transfer t = {kv, layout, false, ith, nth};
    return transfer_all(&t, from, err);
}
