/* world.h: keys, values and queries of a batch; ways to place them in a cache and to run attention over
 * it; and the textbook answer in double. Nothing in the oracle comes from src/ops.
 *
 * world   what is to be computed, free of any placement: the stored values of all keys, all queries place
 * a world in blocks: layout, block size, order of the physical blocks, one table or one per KV head,
 *         poison; then, by place_drop, place_tails and place_share, without the blocks before a window, with
 *         packed tails, with common prefixes
 * piece   queries q_begin … q_end - 1 of a sequence; a run computes any set of pieces in one batch
 */
#ifndef PAGED_TESTS_KERNELS_WORLD_H
#define PAGED_TESTS_KERNELS_WORLD_H

#include <math.h>

#include "base/base.h"
#include "ops/i8.h"
#include "paged/kv.h"
#include "paged/ops.h"
#include "test.h"

enum { SEQS_MAX = 8 };

typedef enum fill {
    FILL_UNIFORM,
    FILL_EQUAL,
    FILL_HUGE,
    FILL_LOW,
    FILL_DENORMAL,
    FILL_OUTLIER,
    N_FILLS
} fill;

typedef struct shape {
    paged_type type;
    paged_layout layout;
    int32_t block_size, n_heads, n_kv_heads, dk, dv;
    bool non_causal, alibi, sinks;
    int32_t window;
    float softcap;
} shape;

typedef struct world {
    shape s;
    int32_t n_seqs, n_q;
    int32_t n_keys[SEQS_MAX], n_queries[SEQS_MAX];
    int32_t first_key[SEQS_MAX], first_q[SEQS_MAX];
    float *k, *v;         /* [all keys, n_kv_heads, dk or dv], as the cache stores them */
    float *q;             /* [n_q, n_heads, dk] */
    float *alibi, *sinks; /* [n_heads] or NULL */
} world;

typedef struct place {
    paged_kv kv;
    uint8_t *bytes;
    int32_t *blocks; /* [n_seqs, n_kv_heads or 1, max_blocks] */
    int32_t max_blocks;
    bool per_head;
    int32_t *free_blocks, n_free; /* the ids that no table names */
    int32_t *first_k;             /* [n_seqs] or NULL */
    int32_t *tail_tiles;          /* [n_seqs, block_size / 16] or NULL */
    int32_t n_shared;
    paged_shared shared[SEQS_MAX];
} place;

typedef struct piece {
    int32_t seq, q_begin, q_end;
} piece;

typedef struct result {
    float *out, *lse; /* [n_q, n_heads, dv], [n_q, n_heads] */
} result;

/* Emulated processors and TSan take tens of times as long, so less is tested; run-tests sets this. */
static inline bool is_slow(void) {
    return getenv("PAGED_TESTS_SLOW") != NULL;
}

static inline int32_t draw(uint64_t *rng, int32_t n) {
    return (int32_t)(paged__rand(rng) % (uint64_t)n);
}

static inline float draw_unit(uint64_t *rng) {
    return (float)(int32_t)(paged__rand(rng) >> 40) / (float)(1 << 23) - 1.0f; /* [-1, 1) */
}

static inline void *take(size_t n, size_t elem) {
    void *p = calloc(n ? n : 1, elem);
    CHECK(p != NULL);
    return p;
}

static inline float stored(paged_type type, float x) {
    if (type == PAGED_TYPE_F16) return paged__f16_to_f32(paged__f32_to_f16(x));
    if (type == PAGED_TYPE_BF16) return paged__bf16_to_f32(paged__f32_to_bf16(x));
    return x;
}

static inline const char *type_name(paged_type type) {
    static const char *const names[] = {"f16", "f32", "bf16", "i8"};
    return names[type];
}

/* ---- worlds ---- */

static inline void fill_keys(world *w, fill how, uint64_t *rng, int64_t n_keys) {
    int64_t dk = w->s.dk, row_k = w->s.n_kv_heads * dk, row_v = (int64_t)w->s.n_kv_heads * w->s.dv;
    for (int64_t i = 0; i < n_keys * row_k; i++) {
        float x = draw_unit(rng);
        if (how == FILL_EQUAL) x = 0.5f;
        if (how == FILL_HUGE) x = i / row_k == 1 ? 40.0f : x; /* key 1 wins by far */
        if (how == FILL_LOW) x = -60.0f;
        if (how == FILL_DENORMAL) x *= w->s.type == PAGED_TYPE_F16 ? 0x1p-15f : 0x1p-127f;
        if (how == FILL_OUTLIER && i % dk == dk / 2) x = 300.0f;
        w->k[i] = stored(w->s.type, x);
    }
    for (int64_t i = 0; i < n_keys * row_v; i++) {
        float x = draw_unit(rng);
        if (how == FILL_EQUAL) x = 0.25f;
        if (how == FILL_DENORMAL) x *= w->s.type == PAGED_TYPE_F16 ? 0x1p-15f : 0x1p-120f;
        w->v[i] = stored(w->s.type, x);
    }
}

/* Rows as int8 stores them (test_int8.c holds that against its definition). Storing the result again
 * changes no byte, since the largest of a row is ±127. */
static inline void store_i8(float *x, int64_t n_rows, int32_t n, bool rotate) {
    for (int64_t row = 0; row < n_rows; row++, x += n) {
        int8_t bytes[PAGED_HEAD_DIM_MAX];
        float scale;
        paged__i8_from_f32(bytes, &scale, x, 1, n, rotate);
        paged__i8_to_f32(x, bytes, scale, n, rotate);
    }
}

/* Slopes as ALiBi was published: powers of 2^(-8 / n) for n heads, n a power of two; otherwise those of the
 * next smaller power of two, and then every second one of the next larger. */
static inline void fill_slopes(float *slopes, int32_t n_heads) {
    int32_t n = 1;
    while (2 * n <= n_heads) n *= 2;
    for (int32_t h = 0; h < n_heads; h++)
        slopes[h] = (float)(h < n ? exp2(-8.0 / n * (h + 1)) : exp2(-4.0 / n * (2 * (h - n) + 1)));
}

static inline world world_make(shape s, int32_t n_seqs, const int32_t *n_keys, const int32_t *n_queries,
                               fill how, uint64_t *rng) {
    world w = {.s = s, .n_seqs = n_seqs};
    int32_t all_keys = 0;
    for (int32_t i = 0; i < n_seqs; i++) {
        w.n_keys[i] = n_keys[i];
        w.n_queries[i] = n_queries[i];
        w.first_key[i] = all_keys;
        w.first_q[i] = w.n_q;
        all_keys += n_keys[i];
        w.n_q += n_queries[i];
    }
    w.k = take((size_t)all_keys * (size_t)(s.n_kv_heads * s.dk), sizeof(float));
    w.v = take((size_t)all_keys * (size_t)(s.n_kv_heads * s.dv), sizeof(float));
    w.q = take((size_t)w.n_q * (size_t)(s.n_heads * s.dk), sizeof(float));
    if (s.alibi) fill_slopes(w.alibi = take((size_t)s.n_heads, sizeof(float)), s.n_heads);
    if (s.sinks) w.sinks = take((size_t)s.n_heads, sizeof(float));
    for (int32_t h = 0; s.sinks && h < s.n_heads; h++)
        w.sinks[h] = h % 5 == 4 ? -INFINITY : 4 * draw_unit(rng);
    fill_keys(&w, how, rng, all_keys);
    if (s.type == PAGED_TYPE_I8) {
        store_i8(w.k, (int64_t)all_keys * s.n_kv_heads, s.dk, true);
        store_i8(w.v, (int64_t)all_keys * s.n_kv_heads, s.dv, false);
    }
    for (int64_t i = 0; i < (int64_t)w.n_q * s.n_heads * s.dk; i++) {
        w.q[i] = draw_unit(rng);
        if (how == FILL_HUGE || how == FILL_LOW) w.q[i] = fabsf(w.q[i]) * 60.0f;
        if (how == FILL_OUTLIER && i % s.dk == s.dk / 2) w.q[i] = 300.0f;
    }
    return w;
}

static inline void world_free(world *w) {
    free(w->k);
    free(w->v);
    free(w->q);
    free(w->alibi);
    free(w->sinks);
}

/* Gives sequences the same first keys. */
static inline void world_share(world *w, paged_shared g) {
    int64_t row_k = (int64_t)w->s.n_kv_heads * w->s.dk, row_v = (int64_t)w->s.n_kv_heads * w->s.dv;
    int64_t from = w->first_key[g.first_seq];
    for (int32_t i = g.first_seq + 1; i < g.first_seq + g.n_seqs; i++) {
        memcpy(w->k + w->first_key[i] * row_k, w->k + from * row_k,
               (size_t)(g.n_tokens * row_k) * sizeof(float));
        memcpy(w->v + w->first_key[i] * row_v, w->v + from * row_v,
               (size_t)(g.n_tokens * row_v) * sizeof(float));
    }
}

/* Query i of a sequence sees the keys first_visible … visible - 1. */
static inline int32_t visible(const world *w, int32_t seq, int32_t i) {
    int32_t n = w->n_keys[seq] - w->n_queries[seq] + i + 1;
    return w->s.non_causal ? w->n_keys[seq] : n < 0 ? 0 : n;
}

static inline int32_t first_visible(const world *w, int32_t seq, int32_t i) {
    int32_t n = visible(w, seq, i);
    return w->s.window > 0 && n > w->s.window ? n - w->s.window : 0;
}

/* Softcap, then ALiBi. */
static inline double adjusted(const world *w, double score, int32_t head, int32_t distance) {
    if (w->s.softcap != 0) score = w->s.softcap * tanh(score / w->s.softcap);
    return w->alibi ? score + (double)w->alibi[head] * distance : score;
}

/* softmax(scale * q · K) · V, as in the textbook. `size` is the largest |scale * q| · |K| and bias: what
 * rounding errors grow with. */
static inline void dense_row(const world *w, int32_t seq, int32_t i, int32_t head, double *out, double *lse,
                             double *size) {
    int64_t dk = w->s.dk, dv = w->s.dv, n_kv = w->s.n_kv_heads,
            kv_head = head / (w->s.n_heads / w->s.n_kv_heads);
    const float *q = w->q + ((int64_t)(w->first_q[seq] + i) * w->s.n_heads + head) * dk;
    int32_t n = visible(w, seq, i), first = first_visible(w, seq, i),
            position = w->n_keys[seq] - w->n_queries[seq] + i;
    double *score = take((size_t)n, sizeof(double)), sink = w->sinks ? w->sinks[head] : -INFINITY;
    double top = sink, sum = 0;
    *size = 0;
    for (int32_t j = first; j < n; j++) {
        const float *k = w->k + ((w->first_key[seq] + j) * n_kv + kv_head) * dk;
        double dot = 0, abs_dot = 0;
        for (int64_t d = 0; d < dk; d++) {
            dot += (double)q[d] * k[d];
            abs_dot += fabs((double)q[d] * k[d]);
        }
        score[j] = adjusted(w, dot / sqrt((double)dk), head, j - position);
        top = fmax(top, score[j]);
        abs_dot = abs_dot / sqrt((double)dk) + (w->alibi ? fabs((double)w->alibi[head] * (j - position)) : 0);
        *size = fmax(*size, abs_dot);
    }
    for (int64_t d = 0; d < dv; d++) out[d] = 0;
    if (sink != -INFINITY) sum = exp(sink - top);
    for (int32_t j = first; j < n; j++) {
        const float *v = w->v + ((w->first_key[seq] + j) * n_kv + kv_head) * dv;
        double p = exp(score[j] - top);
        sum += p;
        for (int64_t d = 0; d < dv; d++) out[d] += p * v[d];
    }
    for (int64_t d = 0; d < dv && n > 0; d++) out[d] /= sum;
    *lse = n > 0 ? top + log(sum) : sink;
    free(score);
}

/* ---- places ---- */

/* The table of kv.h: element d of slot offset o. */
static inline int64_t kv_element(const paged_kv *kv, bool value, int64_t o, int64_t d) {
    int64_t t = o / 16, i = o % 16, hd = value ? kv->head_dim_v : kv->head_dim_k;
    if (kv->layout == PAGED_LAYOUT_PLAIN) return o * hd + d;
    if (kv->type == PAGED_TYPE_I8)
        return value ? t * 16 * hd + i / 4 * 4 * hd + d * 4 + i % 4
                     : t * 16 * hd + d / 4 * 64 + i * 4 + d % 4;
    if (kv->type != PAGED_TYPE_BF16) return value ? t * 16 * hd + i * hd + d : t * 16 * hd + d * 16 + i;
    return value ? t * 16 * hd + (i / 2) * 2 * hd + d * 2 + i % 2
                 : t * 16 * hd + (d / 2) * 32 + i * 2 + d % 2;
}

/* The bits of one element, as they lie in the cache. */
static inline uint32_t kv_bits_at(const paged_kv *kv, bool value, int64_t slot, int64_t head, int64_t d) {
    int64_t elem = (int64_t)paged__type_bytes(kv->type), block = slot / kv->block_size,
            o = slot % kv->block_size;
    const uint8_t *base = (value ? kv->v + head * kv->v_head_stride : kv->k + head * kv->k_head_stride);
    uint32_t bits = 0;
    memcpy(&bits, base + block * kv->block_stride + kv_element(kv, value, o, d) * elem, (size_t)elem);
    return bits;
}

static inline paged_kv view_of_head(const paged_kv *kv, int32_t head) {
    paged_kv view = *kv;
    view.k += head * kv->k_head_stride;
    view.v += head * kv->v_head_stride;
    if (kv->type == PAGED_TYPE_I8) {
        view.k_scale += head * kv->scale_head_stride;
        view.v_scale += head * kv->scale_head_stride;
    }
    view.n_kv_heads = 1;
    return view;
}

/* Writes the world through paged_kv_write; for a table per head, head by head. */
static inline void place_write(const world *w, const place *p) {
    int64_t dk = w->s.dk, dv = w->s.dv, n_kv = w->s.n_kv_heads;
    int32_t n_tables = p->per_head ? w->s.n_kv_heads : 1;
    for (int32_t seq = 0; seq < w->n_seqs; seq++)
        for (int32_t h = 0; h < n_tables; h++) {
            const int32_t *table = p->blocks + ((int64_t)seq * n_tables + h) * p->max_blocks;
            int64_t *slots = take((size_t)w->n_keys[seq], sizeof *slots);
            for (int32_t t = 0; t < w->n_keys[seq]; t++)
                slots[t] = (int64_t)table[t / p->kv.block_size] * p->kv.block_size + t % p->kv.block_size;
            paged_kv view = p->per_head ? view_of_head(&p->kv, h) : p->kv;
            CHECK_EQ(paged_kv_check_slots(&view, slots, w->n_keys[seq], NULL), PAGED_OK);
            int64_t n_nan = paged_kv_write(&view, w->k + (w->first_key[seq] * n_kv + h) * dk, n_kv * dk,
                                           w->v + (w->first_key[seq] * n_kv + h) * dv, n_kv * dv, slots,
                                           w->n_keys[seq], 0, 1);
            CHECK_EQ(n_nan, 0);
            free(slots);
        }
}

static inline void poison_bytes(uint8_t *bytes, size_t n, paged_type type, bool infinite) {
    /* f16; upper half of f32; bf16; i8, as the upper half of its scales */
    static const uint16_t inf[4] = {0x7c00, 0x7f80, 0x7f80, 0x7f80};
    memset(bytes, infinite ? 0 : 0xff, n); /* all ones is NaN in every type */
    if (!infinite) return;
    size_t step = type == PAGED_TYPE_F32 || type == PAGED_TYPE_I8 ? 4 : 2;
    for (size_t i = step - 2; i + 2 <= n; i += step) memcpy(bytes + i, &inf[type], 2);
}

/* Physical blocks are shuffled unless `ordered`; a few of them stay free. The memory has exactly the size of
 * the blocks. */
static inline place place_make(const world *w, paged_layout layout, int32_t block_size, bool ordered,
                               bool per_head, bool infinite, uint64_t *rng) {
    place p = {.per_head = per_head, .max_blocks = 1};
    int64_t elem = (int64_t)paged__type_bytes(w->s.type), n_used = 0, n_kv = w->s.n_kv_heads,
            n_tables = per_head ? n_kv : 1;
    for (int32_t i = 0; i < w->n_seqs; i++) {
        int32_t n = (w->n_keys[i] + block_size - 1) / block_size;
        n_used += n * n_tables;
        p.max_blocks = PAGED_MAX(p.max_blocks, n + 1); /* a tail of -1 */
    }
    p.n_free = 2 + w->n_seqs;
    p.kv = (paged_kv){.n_blocks = (int32_t)n_used + p.n_free,
                      .block_size = block_size,
                      .n_kv_heads = w->s.n_kv_heads,
                      .head_dim_k = w->s.dk,
                      .head_dim_v = w->s.dv,
                      .type = w->s.type,
                      .layout = layout};
    p.kv.k_head_stride = elem * block_size * w->s.dk;
    p.kv.v_head_stride = elem * block_size * w->s.dv;
    if (w->s.type == PAGED_TYPE_I8) p.kv.scale_head_stride = 4LL * block_size;
    p.kv.block_stride = n_kv * (p.kv.k_head_stride + p.kv.v_head_stride + 2 * p.kv.scale_head_stride);
    size_t size = (size_t)(p.kv.block_stride * p.kv.n_blocks);
    p.bytes = take(size, 1);
    poison_bytes(p.bytes, size, w->s.type, infinite);
    p.kv.k = p.bytes;
    p.kv.v = p.bytes + n_kv * p.kv.k_head_stride;
    if (w->s.type == PAGED_TYPE_I8) {
        p.kv.k_scale = p.kv.v + n_kv * p.kv.v_head_stride;
        p.kv.v_scale = p.kv.k_scale + n_kv * p.kv.scale_head_stride;
        p.kv.scale_block_stride = p.kv.block_stride;
    }

    int32_t *ids = take((size_t)p.kv.n_blocks, sizeof *ids);
    for (int32_t i = 0; i < p.kv.n_blocks; i++) ids[i] = i;
    for (int32_t i = p.kv.n_blocks - 1; i > 0 && !ordered; i--) {
        int32_t j = draw(rng, i + 1), id = ids[i];
        ids[i] = ids[j];
        ids[j] = id;
    }
    p.blocks = take((size_t)(w->n_seqs * n_tables * p.max_blocks), sizeof *p.blocks);
    int32_t next = 0;
    for (int64_t row = 0; row < w->n_seqs * n_tables; row++)
        for (int32_t b = 0; b < p.max_blocks; b++)
            p.blocks[row * p.max_blocks + b] =
                b < (w->n_keys[row / n_tables] + block_size - 1) / block_size ? ids[next++] : -1;
    p.free_blocks = take((size_t)p.n_free, sizeof *ids);
    memcpy(p.free_blocks, ids + next, (size_t)p.n_free * sizeof *ids);
    free(ids);
    place_write(w, &p);
    return p;
}

static inline void place_free(place *p) {
    free(p->bytes);
    free(p->blocks);
    free(p->free_blocks);
    free(p->first_k);
    free(p->tail_tiles);
}

/* NaN into the slot of one token, for one KV head. */
static inline void poison_slot(const place *p, int32_t head, int64_t slot) {
    const paged_kv *kv = &p->kv;
    int64_t elem = (int64_t)paged__type_bytes(kv->type), block = slot / kv->block_size * kv->block_stride,
            o = slot % kv->block_size;
    if (kv->type == PAGED_TYPE_I8) {
        int64_t scale = slot / kv->block_size * kv->scale_block_stride + head * kv->scale_head_stride + o * 4;
        memset(kv->k_scale + scale, 0xff, 4);
        memset(kv->v_scale + scale, 0xff, 4);
    }
    for (int64_t d = 0; d < kv->head_dim_k; d++)
        memset(kv->k + block + head * kv->k_head_stride + kv_element(kv, false, o, d) * elem, 0xff,
               (size_t)elem);
    for (int64_t d = 0; d < kv->head_dim_v; d++)
        memset(kv->v + block + head * kv->v_head_stride + kv_element(kv, true, o, d) * elem, 0xff,
               (size_t)elem);
}

/* What no query of the world sees, since its window has passed, is gone: entries of whole blocks are -1, and
 * the slots hold NaN. */
static inline void place_drop(const world *w, place *p) {
    int32_t n_tables = p->per_head ? w->s.n_kv_heads : 1, b = p->kv.block_size;
    p->first_k = take((size_t)w->n_seqs, sizeof *p->first_k);
    for (int32_t seq = 0; seq < w->n_seqs; seq++) {
        int32_t first = w->n_queries[seq] > 0 ? first_visible(w, seq, 0) : w->n_keys[seq];
        p->first_k[seq] = first;
        for (int32_t h = 0; h < w->s.n_kv_heads; h++) {
            int32_t *table = p->blocks + ((int64_t)seq * n_tables + (p->per_head ? h : 0)) * p->max_blocks;
            for (int32_t t = 0; t < first; t++) poison_slot(p, h, (int64_t)table[t / b] * b + t % b);
        }
        for (int32_t i = 0; i < n_tables; i++)
            for (int32_t t = 0; t < first / b; t++)
                p->blocks[((int64_t)seq * n_tables + i) * p->max_blocks + t] = -1;
    }
}

/* The last block of every sequence goes to free-standing tiles, with those of other sequences between. */
static inline void place_tails(const world *w, place *p) {
    int32_t b = p->kv.block_size, block_tiles = b / PAGED_TILE, n_tables = p->per_head ? w->s.n_kv_heads : 1;
    int64_t row_k = (int64_t)w->s.n_kv_heads * w->s.dk, row_v = (int64_t)w->s.n_kv_heads * w->s.dv;
    CHECK(p->kv.layout == PAGED_LAYOUT_PACKED && p->n_free >= w->n_seqs);
    p->tail_tiles = take((size_t)(w->n_seqs * block_tiles), sizeof *p->tail_tiles);
    for (int32_t seq = 0; seq < w->n_seqs; seq++) {
        int32_t last = (w->n_keys[seq] - 1) / b, *tiles = p->tail_tiles + seq * block_tiles;
        for (int32_t i = 0; i < block_tiles; i++) tiles[i] = -1;
        if (w->n_keys[seq] == 0) continue;
        for (int32_t i = 0; i * PAGED_TILE < w->n_keys[seq] - last * b; i++) {
            int32_t nth = i * w->n_seqs + seq; /* tiles of all sequences, one after the other */
            tiles[i] = p->free_blocks[nth / block_tiles] * block_tiles + nth % block_tiles;
        }
        for (int32_t t = last * b; t < w->n_keys[seq]; t++) {
            int64_t slot = (int64_t)tiles[t % b / PAGED_TILE] * PAGED_TILE + t % PAGED_TILE;
            paged_kv_write(&p->kv, w->k + (w->first_key[seq] + t) * row_k, 0,
                           w->v + (w->first_key[seq] + t) * row_v, 0, &slot, 1, 0, 1);
            if (p->first_k && t < p->first_k[seq])
                for (int32_t h = 0; h < w->s.n_kv_heads; h++) poison_slot(p, h, slot);
        }
        for (int32_t i = 0; i < n_tables; i++) {
            int32_t *entry = p->blocks + ((int64_t)seq * n_tables + i) * p->max_blocks + last;
            for (int32_t o = 0; o < b && *entry >= 0; o++)
                for (int32_t h = p->per_head ? i : 0; h < (p->per_head ? i + 1 : w->s.n_kv_heads); h++)
                    poison_slot(p, h, (int64_t)*entry * b + o);
            *entry = -1;
        }
    }
}

/* The sequences of the group use the blocks of the first for what they share; their own are poisoned. */
static inline void place_share(const world *w, place *p, paged_shared g) {
    int32_t b = p->kv.block_size, n_tables = p->per_head ? w->s.n_kv_heads : 1;
    for (int32_t seq = g.first_seq + 1; seq < g.first_seq + g.n_seqs; seq++)
        for (int32_t i = 0; i < n_tables; i++) {
            const int32_t *from = p->blocks + ((int64_t)g.first_seq * n_tables + i) * p->max_blocks;
            int32_t *to = p->blocks + ((int64_t)seq * n_tables + i) * p->max_blocks;
            for (int32_t t = 0; t < g.n_tokens / b * b; t++)
                for (int32_t h = p->per_head ? i : 0; h < (p->per_head ? i + 1 : w->s.n_kv_heads); h++)
                    poison_slot(p, h, (int64_t)to[t / b] * b + t % b);
            for (int32_t t = 0; t < g.n_tokens / b; t++) to[t] = from[t];
        }
    p->shared[p->n_shared++] = g;
}

/* ---- runs ---- */

static inline result result_make(const world *w) {
    size_t n_rows = (size_t)w->n_q * (size_t)w->s.n_heads;
    result r = {take(n_rows * (size_t)w->s.dv, sizeof(float)), take(n_rows, sizeof(float))};
    memset(r.out, 0xff, n_rows * (size_t)w->s.dv * sizeof(float));
    memset(r.lse, 0xff, n_rows * sizeof(float));
    return r;
}

static inline void result_free(result *r) {
    free(r->out);
    free(r->lse);
}

static inline bool result_equal(const world *w, const result *a, const result *b) {
    size_t n_rows = (size_t)w->n_q * (size_t)w->s.n_heads;
    return memcmp(a->out, b->out, n_rows * (size_t)w->s.dv * sizeof(float)) == 0 &&
           memcmp(a->lse, b->lse, n_rows * sizeof(float)) == 0;
}

static inline paged_attn *attn_make(const world *w, const place *p, int32_t nth) {
    int32_t max_k = 1;
    for (int32_t i = 0; i < w->n_seqs; i++) max_k = PAGED_MAX(max_k, w->n_keys[i]);
    paged_attn_config config = {.struct_size = sizeof config,
                                .n_heads = w->s.n_heads,
                                .n_kv_heads = w->s.n_kv_heads,
                                .head_dim_k = w->s.dk,
                                .head_dim_v = w->s.dv,
                                .block_size = p->kv.block_size,
                                .type = w->s.type,
                                .layout = p->kv.layout,
                                .non_causal = w->s.non_causal,
                                .window = w->s.window,
                                .softcap = w->s.softcap,
                                .alibi = w->alibi,
                                .max_shared_q = p->n_shared > 0 ? w->n_q : 0,
                                .n_threads_max = nth,
                                .max_q = PAGED_MAX(w->n_q, 1),
                                .max_seqs = PAGED_MAX(w->n_seqs, 1),
                                .max_k = max_k};
    paged_attn *attn = NULL;
    paged_error err;
    if (paged_attn_create(&config, &attn, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
    return attn;
}

/* One batch of pieces, by nth threads one after the other. Rows of the result that belong to no piece
 * stay. */
static inline void run_pieces(const world *w, const place *p, paged_attn *attn, const piece *pieces,
                              int32_t n, int32_t nth, result *r) {
    int32_t cu[SEQS_MAX + 1] = {0}, rows[SEQS_MAX], n_keys[SEQS_MAX], first_k[SEQS_MAX];
    bool whole = n == w->n_seqs; /* the world as it is, so that its cascades hold */
    int64_t q_row = (int64_t)w->s.n_heads * w->s.dk, out_row = (int64_t)w->s.n_heads * w->s.dv,
            stride = out_row + 3;
    int32_t n_rows_all = 0; /* of the batch: few in a chunk of many */
    for (int32_t i = 0; i < n; i++) n_rows_all += pieces[i].q_end - pieces[i].q_begin;
    float *q = take((size_t)(n_rows_all * q_row), sizeof(float)),
          *out = take((size_t)(n_rows_all * stride), sizeof(float));
    float *lse = take((size_t)n_rows_all * (size_t)w->s.n_heads, sizeof(float));
    CHECK(n <= SEQS_MAX);
    for (int32_t i = 0; i < n; i++) {
        int32_t seq = pieces[i].seq, n_rows = pieces[i].q_end - pieces[i].q_begin;
        int32_t behind =
            w->n_queries[seq] - pieces[i].q_end; /* queries to come, whose keys are not there yet */
        cu[i + 1] = cu[i] + n_rows;
        rows[i] = seq;
        n_keys[i] = w->s.non_causal ? w->n_keys[seq] : PAGED_MAX(w->n_keys[seq] - behind, 0);
        first_k[i] = p->first_k ? PAGED_MIN(p->first_k[seq], n_keys[i]) : 0;
        whole = whole && seq == i && n_rows == w->n_queries[seq];
        memcpy(q + cu[i] * q_row, w->q + (w->first_q[seq] + pieces[i].q_begin) * q_row,
               (size_t)(n_rows * q_row) * sizeof(float));
    }
    int64_t n_tables = p->per_head ? w->s.n_kv_heads : 1;
    paged_batch batch = {.cu_seqlens_q = cu,
                         .tables = {.blocks = p->blocks,
                                    .rows = rows,
                                    .seq_stride = n_tables * p->max_blocks,
                                    .head_stride = p->per_head ? p->max_blocks : 0,
                                    .seqlens_k = n_keys,
                                    .first_k = p->first_k ? first_k : NULL,
                                    .tail_tiles = p->tail_tiles,
                                    .n_seqs = n,
                                    .max_blocks = p->max_blocks},
                         .n_shared = whole ? p->n_shared : 0,
                         .shared = p->shared};
    paged_error err;
    if (paged_attn_plan(attn, &batch, &p->kv, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
    memset(out, 0xff, (size_t)(n_rows_all * stride) * sizeof(float));
    const paged_attn_io io = {.q = q, .out = out, .out_stride = stride, .lse = lse, .sinks = w->sinks};
    for (int32_t ith = 0; ith < nth; ith++) paged_attn_run(attn, &p->kv, &io, ith, nth);
    if (paged_attn_needs_merge(attn))
        for (int32_t ith = 0; ith < nth; ith++) paged_attn_merge(attn, &io, ith, nth);
    for (int32_t i = 0; i < n; i++)
        for (int32_t j = cu[i]; j < cu[i + 1]; j++) {
            int64_t row = w->first_q[pieces[i].seq] + pieces[i].q_begin + j - cu[i];
            memcpy(r->out + row * out_row, out + j * stride, (size_t)out_row * sizeof(float));
            memcpy(r->lse + row * w->s.n_heads, lse + j * w->s.n_heads, (size_t)w->s.n_heads * sizeof(float));
        }
    free(q);
    free(out);
    free(lse);
}

/* Everything in one batch. */
static inline result run_all(const world *w, const place *p, int32_t nth) {
    piece pieces[SEQS_MAX];
    for (int32_t i = 0; i < w->n_seqs; i++) pieces[i] = (piece){i, 0, w->n_queries[i]};
    paged_attn *attn = attn_make(w, p, nth);
    result r = result_make(w);
    run_pieces(w, p, attn, pieces, w->n_seqs, nth, &r);
    paged_attn_free(attn);
    return r;
}

/* ---- checks ---- */

/* What int8 may add to the errors of a row: *score to a score, *weights, in units of the largest |v|, to the
 * result. Keys and values are exact here. An element of the rotated query is off by half a step, so a score
 * by half a step times the sum of |k| rotated, which is at most sqrt(head_dim) * |k|. A weight is off by half
 * of its tile's largest / 255. */
static inline void i8_error(const world *w, int32_t seq, int32_t i, int32_t head, double *score,
                            double *weights) {
    int64_t dk = w->s.dk, n_kv = w->s.n_kv_heads, kv_head = head / (w->s.n_heads / w->s.n_kv_heads);
    const float *q = w->q + ((int64_t)(w->first_q[seq] + i) * w->s.n_heads + head) * dk;
    int8_t bytes[PAGED_HEAD_DIM_MAX];
    float step;
    paged__i8_from_f32(bytes, &step, q, 1, (int32_t)dk, true);
    int32_t n = visible(w, seq, i), first = first_visible(w, seq, i),
            position = w->n_keys[seq] - w->n_queries[seq] + i;
    double *scores = take((size_t)n, sizeof *scores), sink = w->sinks ? w->sinks[head] : -INFINITY;
    double k_max = 0, top = sink, sum, tops = 0;
    for (int32_t j = first; j < n; j++) {
        const float *k = w->k + ((w->first_key[seq] + j) * n_kv + kv_head) * dk;
        double dot = 0, square = 0;
        for (int64_t d = 0; d < dk; d++) {
            dot += (double)q[d] * (double)k[d];
            square += (double)k[d] * (double)k[d];
        }
        scores[j] = adjusted(w, dot / sqrt((double)dk), head, j - position);
        k_max = fmax(k_max, sqrt(square));
        top = fmax(top, scores[j]);
    }
    sum = sink == -INFINITY ? 0 : exp(sink - top);
    for (int32_t tile = first / 16; tile * 16 < n; tile++) {
        double tile_top = 0;
        for (int32_t t = PAGED_MAX(first, tile * 16); t < n && t < tile * 16 + 16; t++) {
            sum += exp(scores[t] - top);
            tile_top = fmax(tile_top, exp(scores[t] - top));
        }
        tops += tile_top;
    }
    *score = 0.501 * (double)step * k_max;
    *weights = n > 0 ? 16 * tops / 510 / sum : 0;
    free(scores);
}

/* The relative error of q and of the weights: kernels of AVX-512 BF16 round both to bf16. */
static inline double operand_rounding(paged_type type) {
    return type == PAGED_TYPE_BF16 && paged_cpu_flags() & PAGED_CPU_AVX512_BF16 ? 0x1p-8 : 0;
}

/* One row against the oracle. Inputs are exact, so the only errors are those of f32 arithmetic: some
 * roundings of the result (2e-6 of the largest |v|), and roundings of the scores, sums of head_dim terms.
 * Where operands are rounded by u, a score is off by at most a = u * size, so a weight by a factor between
 * 1 / (1 + e) and 1 + e = exp(a) * (1 + u), so the weights of a row, which sum to 1, by 2 e / (1 - e) in all,
 * and never by more than 2. Such kernels also take denormals for zero, in each of n_keys sums.
 * v_max is the sequence's largest |v|. Returns the error in units of what is allowed. */
static inline double row_error(const world *w, const result *r, int32_t seq, int32_t i, int32_t head,
                               double v_max) {
    int64_t dv = w->s.dv, row = (int64_t)(w->first_q[seq] + i) * w->s.n_heads + head;
    double want[PAGED_HEAD_DIM_MAX], lse, size, worst = 0;
    dense_row(w, seq, i, head, want, &lse, &size);
    double score_error = 0x1p-24 * (4 + sqrt((double)w->s.dk)) * size,
           allowed = v_max * (2e-6 + score_error) + 1e-44, u = operand_rounding(w->s.type);
    if (u > 0) {
        double e = exp(u * size) * (1 + u) - 1;
        allowed += v_max * (e < 0.5 ? 2 * e / (1 - e) : 2) + w->n_keys[seq] * 0x1p-126;
        score_error += u * (size + 1);
    }
    double i8_score = 0, i8_weights = 0;
    if (w->s.type == PAGED_TYPE_I8) {
        i8_error(w, seq, i, head, &i8_score, &i8_weights);
        /* Weights with errors of e^±x, of which the larger ones make the row's result at most 2 * v_max. */
        allowed += v_max * fmin(2, (exp(2 * i8_score) - 1) + exp(2 * i8_score) * i8_weights) + 0x1p-90;
    }
    for (int64_t d = 0; d < dv; d++) {
        double error = fabs((double)r->out[row * dv + d] - want[d]) / allowed;
        worst = error <= worst ? worst : error; /* NaN is kept */
        if (isnan(error)) return INFINITY;
    }
    if (isinf(lse)) return (double)r->lse[row] == lse ? worst : INFINITY;
    double error = fabs((double)r->lse[row] - lse) / (1e-6 + score_error + i8_score + 2e-7 * fabs(lse));
    return isnan(error) ? INFINITY : fmax(worst, error);
}

static inline void check_row(const world *w, const result *r, int32_t seq, int32_t i, int32_t head,
                             double v_max) {
    double error = row_error(w, r, seq, i, head, v_max);
    if (error > 1)
        test_fail(
            __FILE__, __LINE__,
            "%s, heads %d/%d, head_dim %d/%d, block %d, window %d, softcap %g%s%s, sequence %d (%d keys, "
            "%d queries), query %d, head %d: %g times the allowed error",
            type_name(w->s.type), w->s.n_heads, w->s.n_kv_heads, w->s.dk, w->s.dv, w->s.block_size,
            w->s.window, (double)w->s.softcap, w->alibi ? ", ALiBi" : "", w->sinks ? ", sinks" : "", seq,
            w->n_keys[seq], w->n_queries[seq], i, head, error);
}

/* The largest |v| of a sequence: once for all its rows, since it takes longer than a row. */
static inline double largest_v(const world *w, int32_t seq) {
    int64_t row = (int64_t)w->s.n_kv_heads * w->s.dv;
    const float *v = w->v + w->first_key[seq] * row;
    float largest = 0;
    for (int64_t j = 0; j < w->n_keys[seq] * row; j++) largest = PAGED_MAX(fabsf(v[j]), largest);
    return (double)largest;
}

static inline void check_all(const world *w, const result *r) {
    for (int32_t seq = 0; seq < w->n_seqs; seq++) {
        double v_max = largest_v(w, seq);
        for (int32_t i = 0; i < w->n_queries[seq]; i += is_slow() ? 13 : 1)
            for (int32_t head = 0; head < w->s.n_heads; head++) check_row(w, r, seq, i, head, v_max);
    }
}

/* First, last and `n` random rows of every sequence. */
static inline void check_some(const world *w, const result *r, int32_t n, uint64_t *rng) {
    for (int32_t seq = 0; seq < w->n_seqs; seq++) {
        if (w->n_queries[seq] == 0) continue;
        double v_max = largest_v(w, seq);
        check_row(w, r, seq, 0, 0, v_max);
        check_row(w, r, seq, w->n_queries[seq] - 1, w->s.n_heads - 1, v_max);
        for (int32_t j = 0; j < n; j++)
            check_row(w, r, seq, draw(rng, w->n_queries[seq]), draw(rng, w->s.n_heads), v_max);
    }
}

/* ---- the same bits ---- */

static inline void must_equal(const world *w, const result *want, result *got, const char *what) {
    if (!result_equal(w, want, got))
        test_fail(__FILE__, __LINE__,
                  "bits differ: %s; %s, layout %d, heads %d/%d, head_dim %d/%d, block %d, window %d, softcap "
                  "%g%s%s",
                  what, type_name(w->s.type), w->s.layout, w->s.n_heads, w->s.n_kv_heads, w->s.dk, w->s.dv,
                  w->s.block_size, w->s.window, (double)w->s.softcap, w->alibi ? ", ALiBi" : "",
                  w->sinks ? ", sinks" : "");
    result_free(got);
}

/* Every sequence by itself, in chunks; in a random order, so that chunks of other sequences lie between. */
static inline result run_chunked(const world *w, const place *p, int32_t chunk) {
    paged_attn *attn = attn_make(w, p, 2);
    result r = result_make(w);
    for (int32_t begin = 0, more = 1; more; begin += chunk) {
        piece pieces[SEQS_MAX];
        int32_t n = 0;
        for (int32_t seq = 0; seq < w->n_seqs; seq++)
            if (begin < w->n_queries[seq])
                pieces[n++] = (piece){seq, begin, PAGED_MIN(begin + chunk, w->n_queries[seq])};
        more = n > 0;
        if (more) run_pieces(w, p, attn, pieces, n, 2, &r);
    }
    paged_attn_free(attn);
    return r;
}

static inline result run_alone(const world *w, const place *p) {
    paged_attn *attn = attn_make(w, p, 1);
    result r = result_make(w);
    for (int32_t seq = w->n_seqs - 1; seq >= 0; seq--) {
        piece one = {seq, 0, w->n_queries[seq]};
        run_pieces(w, p, attn, &one, 1, 1, &r);
    }
    paged_attn_free(attn);
    return r;
}

/* ---- instruction sets ---- */

static const uint32_t isa_flags[] = {
    0,
    PAGED_CPU_AVX2,
    PAGED_CPU_AVX2 | PAGED_CPU_AVX512,
    PAGED_CPU_AVX2 | PAGED_CPU_AVX512 | PAGED_CPU_AVX512_VNNI,
    PAGED_CPU_AVX2 | PAGED_CPU_AVX512 | PAGED_CPU_AVX512_VNNI | PAGED_CPU_AVX512_BF16,
    PAGED_CPU_NEON,
    PAGED_CPU_AVX2 | PAGED_CPU_AVX512 | PAGED_CPU_AVX512_VNNI | PAGED_CPU_AVX512_BF16 | PAGED_CPU_AMX};
static const char *const isa_names[] = {"ref", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "neon", "amx"};
enum { N_ISAS = 7 };

/* From now on kernels of this set are chosen; false where the machine lacks it. */
static inline bool isa_use(int32_t isa) {
    paged_cpu_mask(~0u);
    if ((paged_cpu_flags() & isa_flags[isa]) != isa_flags[isa]) return false;
    paged_cpu_mask(isa_flags[isa]);
    return true;
}

#endif
