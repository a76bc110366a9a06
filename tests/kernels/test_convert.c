/* Goal: what leaves the cache in another shape is what is in it, bit for bit, and comes back so; attention
 * over gathered blocks equals attention over the blocks; merged states equal attention over all keys. Method:
 * the formulas of kv.h against random bytes (NaN among them); the dense oracle of world.h; then what callers
 * can get wrong. */
#include "kernels/world.h"

/* ---- dense arrays ---- */

typedef struct boxed {
    paged_kv kv;
    uint8_t *bytes;
    size_t size;
} boxed;

/* Three blocks of two heads with gaps, or heads outside and blocks inside; random bytes with an rng. */
static boxed boxed_make(paged_type type, paged_layout layout, int32_t block_size, int32_t dk, int32_t dv,
                        bool heads_outside, uint64_t *rng) {
    int64_t elem = type == PAGED_TYPE_F32 ? 4 : 2, k = elem * block_size * dk, v = elem * block_size * dv;
    boxed b = {.kv = {.n_blocks = 3,
                      .block_size = block_size,
                      .n_kv_heads = 2,
                      .head_dim_k = dk,
                      .head_dim_v = dv,
                      .type = type,
                      .layout = layout}};
    b.kv.block_stride = heads_outside ? k + v + 8 : 2 * (k + v) + 64;
    b.kv.k_head_stride = heads_outside ? 3 * b.kv.block_stride : k;
    b.kv.v_head_stride = heads_outside ? 3 * b.kv.block_stride : v;
    b.size = (size_t)(6 * (k + v + 64));
    b.bytes = take(b.size, 1);
    b.kv.k = b.bytes;
    b.kv.v = b.bytes + (heads_outside ? k : 2 * k);
    for (size_t i = 0; i < b.size; i++) b.bytes[i] = rng ? (uint8_t)paged__rand(rng) : 0xee;
    return b;
}

static int64_t dense_at(const paged_kv *kv, paged_dense form, bool value, int64_t b, int64_t o, int64_t h,
                        int64_t d) {
    int64_t n = value ? kv->head_dim_v : kv->head_dim_k;
    return form == PAGED_DENSE_HEADS_FIRST ? ((b * 2 + h) * kv->block_size + o) * n + d
                                           : ((b * kv->block_size + o) * 2 + h) * n + d;
}

static void check_dense(const boxed *b, paged_dense form, const uint8_t *dense, bool value) {
    int64_t elem = b->kv.type == PAGED_TYPE_F32 ? 4 : 2, size = b->kv.block_size;
    for (int64_t slot = 0; slot < 3 * size; slot++)
        for (int64_t h = 0; h < 2; h++)
            for (int64_t d = 0; d < (value ? b->kv.head_dim_v : b->kv.head_dim_k); d++) {
                uint32_t bits = 0;
                memcpy(&bits, dense + dense_at(&b->kv, form, value, slot / size, slot % size, h, d) * elem,
                       (size_t)elem);
                CHECK_EQ(bits, kv_bits_at(&b->kv, value, slot, h, d));
            }
}

static void round_trip(boxed *b, paged_dense form, bool heads_outside) {
    size_t elem = b->kv.type == PAGED_TYPE_F32 ? 4 : 2, n_slots = 6 * (size_t)b->kv.block_size;
    uint8_t *k = take(n_slots * (size_t)b->kv.head_dim_k, elem),
            *v = take(n_slots * (size_t)b->kv.head_dim_v, elem);
    paged_error err;
    for (int32_t i = 0; i < 4; i++) CHECK_EQ(paged_kv_export(&b->kv, form, k, v, i, 4, &err), PAGED_OK);
    check_dense(b, form, k, false);
    check_dense(b, form, v, true);
    boxed back = boxed_make(b->kv.type, b->kv.layout, b->kv.block_size, b->kv.head_dim_k, b->kv.head_dim_v,
                            heads_outside, NULL);
    CHECK_EQ(paged_kv_import(&back.kv, form, k, NULL, 0, 1, &err), PAGED_OK);
    for (int32_t i = 0; i < 2; i++) CHECK_EQ(paged_kv_import(&back.kv, form, NULL, v, i, 2, &err), PAGED_OK);
    check_dense(&back, form, k, false);
    check_dense(&back, form, v, true);
    free(back.bytes);
    free(k);
    free(v);
}

static void dense_arrays(void) {
    static const int32_t sizes[] = {16, 48, 1, 5};
    uint64_t rng = test_seed;
    for (int32_t type = 0; type < 3; type++)
        for (int32_t layout = 0; layout < 2; layout++)
            for (int32_t i = 0; i < (layout ? 2 : 4); i++)
                for (int32_t outside = 0; outside < 2; outside++) {
                    boxed b =
                        boxed_make((paged_type)type, (paged_layout)layout, sizes[i], 6, 34, outside, &rng);
                    round_trip(&b, PAGED_DENSE_HEADS_FIRST, outside);
                    round_trip(&b, PAGED_DENSE_TOKENS_FIRST, outside);
                    free(b.bytes);
                }
}

static void dense_refuses(void) {
    uint64_t rng = test_seed;
    boxed b = boxed_make(PAGED_TYPE_F16, PAGED_LAYOUT_PACKED, 16, 8, 8, false, &rng);
    uint8_t out[4096];
    paged_error err;
    paged_kv i8 = b.kv;
    i8.type = PAGED_TYPE_I8;
    CHECK_EQ(paged_kv_export(&i8, PAGED_DENSE_HEADS_FIRST, out, out, 0, 1, &err), PAGED_ERR_UNSUPPORTED);
    CHECK_EQ(paged_kv_export(NULL, PAGED_DENSE_HEADS_FIRST, out, out, 0, 1, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_kv_export(&b.kv, (paged_dense)2, out, out, 0, 1, &err), PAGED_ERR_INVALID_ARG);
    CHECK_STR(err.message, "the dense shape is 2");
    CHECK_EQ(paged_kv_export(&b.kv, PAGED_DENSE_HEADS_FIRST, out, out, 2, 2, &err), PAGED_ERR_INVALID_ARG);
    CHECK_STR(err.message, "thread 2 of 2");
    paged_kv bad = b.kv;
    bad.v = NULL;
    CHECK_EQ(paged_kv_import(&bad, PAGED_DENSE_HEADS_FIRST, NULL, out, 0, 1, &err), PAGED_ERR_INVALID_ARG);
    bad = b.kv;
    bad.block_size = 17;
    CHECK_EQ(paged_kv_export(&bad, PAGED_DENSE_HEADS_FIRST, out, out, 0, 1, &err), PAGED_ERR_INVALID_ARG);
    free(b.bytes);
}

/* ---- gather ---- */

static paged_tables tables_of(const world *w, const place *p) {
    int64_t n_tables = p->per_head ? w->s.n_kv_heads : 1;
    return (paged_tables){.blocks = p->blocks,
                          .seq_stride = n_tables * p->max_blocks,
                          .head_stride = p->per_head ? p->max_blocks : 0,
                          .seqlens_k = w->n_keys,
                          .n_seqs = w->n_seqs,
                          .max_blocks = p->max_blocks};
}

/* A place for one sequence, its blocks one after the other; with `dense` K is [n_kv_heads, max_k, dim]. */
static place run_make(const world *w, const place *like, int32_t n_blocks, bool dense) {
    place p = {.kv = like->kv, .max_blocks = n_blocks};
    int64_t elem = (int64_t)paged__type_bytes(w->s.type), n_kv = w->s.n_kv_heads;
    int64_t k = elem * p.kv.block_size * w->s.dk, v = elem * p.kv.block_size * w->s.dv,
            scales = w->s.type == PAGED_TYPE_I8 ? 4LL * p.kv.block_size : 0; /* of a head and block */
    p.kv.n_blocks = n_blocks;
    if (dense) {
        CHECK(k == v);
        p.kv.block_stride = k;
        p.kv.k_head_stride = p.kv.v_head_stride = k * n_blocks;
    }
    size_t size = (size_t)(n_blocks * n_kv * (k + v + 2 * scales));
    p.bytes = take(size, 1);
    memset(p.bytes, 0xff, size);
    p.kv.k = p.bytes;
    p.kv.v = p.bytes + n_kv * k * (dense ? n_blocks : 1);
    if (scales > 0) {
        p.kv.scale_head_stride = scales * n_blocks; /* elsewhere than in the cache: head by head */
        p.kv.scale_block_stride = scales;
        p.kv.block_stride = n_kv * (k + v);
        p.kv.k_scale = p.bytes + n_blocks * n_kv * (k + v);
        p.kv.v_scale = p.kv.k_scale + n_kv * n_blocks * scales;
    }
    p.blocks = take((size_t)n_blocks, sizeof *p.blocks);
    for (int32_t i = 0; i < n_blocks; i++) p.blocks[i] = i;
    return p;
}

static void check_gathered(const world *w, const place *p, const result *want, bool dense) {
    paged_tables tables = tables_of(w, p);
    for (int32_t seq = 0; seq < w->n_seqs; seq++) {
        int32_t n_blocks = PAGED_MAX((w->n_keys[seq] + p->kv.block_size - 1) / p->kv.block_size, 1);
        place to = run_make(w, p, n_blocks, dense);
        paged_error err;
        for (int32_t ith = 0; ith < 3; ith++)
            if (paged_kv_gather(&p->kv, &tables, seq, &to.kv, ith, 3, &err))
                test_fail(__FILE__, __LINE__, "%s", err.message);
        /* The sequence alone, in row 0. */
        world one = *w;
        one.n_seqs = 1;
        one.n_keys[0] = w->n_keys[seq];
        one.n_queries[0] = one.n_q = w->n_queries[seq];
        one.q = w->q + (int64_t)w->first_q[seq] * w->s.n_heads * w->s.dk;
        result r = run_all(&one, &to, 1);
        int64_t row = (int64_t)w->first_q[seq] * w->s.n_heads;
        CHECK(result_equal(&one, &r, &(result){want->out + row * w->s.dv, want->lse + row}));
        result_free(&r);
        place_free(&to);
    }
}

/* The first document's own way: gather, then attention over the copy. */
static void gathered_attention(void) {
    uint64_t rng = test_seed;
    paged_cpu_mask(~0u);
    for (int32_t type = 0; type < 4; type++)
        for (int32_t layout = type == PAGED_TYPE_I8; layout < 2; layout++)
            for (int32_t per_head = 0; per_head < 2; per_head++) {
                shape s = {.type = (paged_type)type,
                           .layout = (paged_layout)layout,
                           .block_size = layout ? 32 : 20,
                           .n_heads = 6,
                           .n_kv_heads = 3,
                           .dk = 32,
                           .dv = 32};
                const int32_t n_keys[] = {70, 0, 1, 640}, n_queries[] = {3, 1, 1, 2};
                world w = world_make(s, 4, n_keys, n_queries, FILL_UNIFORM, &rng);
                place p = place_make(&w, s.layout, s.block_size, false, per_head, false, &rng);
                result want = run_all(&w, &p, 1);
                check_all(&w, &want);
                check_gathered(&w, &p, &want, false);
                if (type != PAGED_TYPE_I8) check_gathered(&w, &p, &want, true);
                result_free(&want);
                place_free(&p);
                world_free(&w);
            }
}

/* Nothing is written where a gather is refused. */
static void gather_refuses(void) {
    uint64_t rng = test_seed;
    shape s = {
        .layout = PAGED_LAYOUT_PACKED, .block_size = 16, .n_heads = 2, .n_kv_heads = 2, .dk = 16, .dv = 16};
    const int32_t n_keys[] = {40, 20}, n_queries[] = {1, 1};
    world w = world_make(s, 2, n_keys, n_queries, FILL_UNIFORM, &rng);
    place p = place_make(&w, s.layout, 16, true, false, false, &rng), to = run_make(&w, &p, 2, false);
    paged_tables t = tables_of(&w, &p);
    paged_error err;
    CHECK_EQ(paged_kv_gather(&p.kv, &t, 0, &to.kv, 0, 1, &err), PAGED_ERR_INVALID_ARG);
    CHECK_STR(err.message, "sequence 0: 40 keys need 3 blocks of 16, the copy has 2");
    CHECK_EQ(paged_kv_gather(&p.kv, &t, 2, &to.kv, 0, 1, &err), PAGED_ERR_INVALID_ARG);
    CHECK_STR(err.message, "sequence 2 of 2");
    p.blocks[p.max_blocks + 1] = 9;
    CHECK_EQ(paged_kv_gather(&p.kv, &t, 1, &to.kv, 0, 1, &err), PAGED_ERR_INVALID_ARG);
    CHECK_STR(err.message,
              "sequence 1 (row 1, KV head 0): entry 1 of its table is 9, not in 0 ... 8, with 20 keys");
    to.kv.head_dim_v = 8;
    CHECK_EQ(paged_kv_gather(&p.kv, &t, 1, &to.kv, 0, 1, &err), PAGED_ERR_INVALID_ARG);
    CHECK_STR(err.message, "head_dim_v of the cache is 16, that of the copy 8");
    CHECK_EQ(paged_kv_gather(&p.kv, NULL, 1, &to.kv, 0, 1, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_kv_gather(&p.kv, &t, 1, &to.kv, 1, 1, &err), PAGED_ERR_INVALID_ARG);
    for (size_t i = 0; i < (size_t)(2 * p.kv.block_stride); i++) CHECK(to.bytes[i] == 0xff);
    place_free(&to);
    place_free(&p);
    world_free(&w);
}

/* ---- dense arrays of i8 ---- */

/* As boxed_make, with scales behind, all bytes 0xee. */
static boxed boxed_i8(int32_t block_size, int32_t dk, int32_t dv, bool heads_outside) {
    int64_t k = (int64_t)block_size * dk, v = (int64_t)block_size * dv, scales = 4LL * block_size + 12;
    boxed b = {.kv = {.n_blocks = 3,
                      .block_size = block_size,
                      .n_kv_heads = 2,
                      .head_dim_k = dk,
                      .head_dim_v = dv,
                      .type = PAGED_TYPE_I8,
                      .layout = PAGED_LAYOUT_PACKED}};
    b.kv.block_stride = heads_outside ? k + v + 8 : 2 * (k + v) + 64;
    b.kv.k_head_stride = heads_outside ? 3 * b.kv.block_stride : k;
    b.kv.v_head_stride = heads_outside ? 3 * b.kv.block_stride : v;
    b.kv.scale_block_stride = heads_outside ? 2 * scales : scales;
    b.kv.scale_head_stride = heads_outside ? scales : 3 * scales;
    int64_t values = 6 * (k + v + 64);
    b.size = (size_t)(values + 12 * scales);
    b.bytes = take(b.size, 1);
    memset(b.bytes, 0xee, b.size);
    b.kv.k = b.bytes;
    b.kv.v = b.bytes + (heads_outside ? k : 2 * k);
    b.kv.k_scale = b.bytes + values;
    b.kv.v_scale = b.kv.k_scale + 6 * scales;
    return b;
}

/* The table of kv.h: the byte of an element, and those of the scale of its row. */
static uint8_t *byte_at(const paged_kv *kv, bool value, int64_t slot, int64_t h, int64_t d) {
    int64_t head_stride = value ? kv->v_head_stride : kv->k_head_stride;
    return (value ? kv->v : kv->k) + slot / kv->block_size * kv->block_stride + h * head_stride +
           kv_element(kv, value, slot % kv->block_size, d);
}

static uint8_t *scale_at(const paged_kv *kv, bool value, int64_t slot, int64_t h) {
    return (value ? kv->v_scale : kv->k_scale) + slot / kv->block_size * kv->scale_block_stride +
           h * kv->scale_head_stride + slot % kv->block_size * 4;
}

/* The largest scale that kv.h allows: a key whose B elements are all 2^100 has sqrt(B) * 2^100 first. */
static float largest_scale(int32_t n, bool value) {
    int32_t order = 1;
    while (!value && n % (2 * order) == 0) order *= 2;
    return (float)(ldexp(1, 100) * sqrt(order) / 127 * (1 - 1e-6));
}

/* Any value but -128; scales 0, the largest, and between. */
static void fill_i8(const boxed *b, uint64_t *rng) {
    for (int32_t value = 0; value < 2; value++) {
        int32_t n = value ? b->kv.head_dim_v : b->kv.head_dim_k;
        for (int64_t slot = 0; slot < 3LL * b->kv.block_size; slot++)
            for (int64_t h = 0; h < 2; h++) {
                float scale = draw(rng, 8) ? 1e-3f * (float)draw(rng, 5000) : largest_scale(n, value);
                memcpy(scale_at(&b->kv, value, slot, h), &scale, 4);
                for (int64_t d = 0; d < n; d++)
                    *byte_at(&b->kv, value, slot, h, d) = (uint8_t)(draw(rng, 255) - 127 + (value ? 0 : 128));
            }
    }
}

typedef struct dense_i8 {
    paged_dense_i8 at;
    size_t n_k, n_v, n_scales;
} dense_i8;

static dense_i8 dense_i8_make(const paged_kv *kv) {
    size_t n = (size_t)kv->n_blocks * (size_t)kv->n_kv_heads * (size_t)kv->block_size;
    dense_i8 d = {.n_k = n * (size_t)kv->head_dim_k, .n_v = n * (size_t)kv->head_dim_v, .n_scales = n};
    d.at = (paged_dense_i8){take(d.n_k, 1), take(d.n_v, 1), take(n, 4), take(n, 4)};
    return d;
}

static void dense_i8_free(dense_i8 *d) {
    free(d->at.k);
    free(d->at.v);
    free(d->at.k_scale);
    free(d->at.v_scale);
}

/* All of the dense arrays is what the cache holds, one by one. */
static void check_dense_i8(const paged_kv *kv, paged_dense form, const paged_dense_i8 *dense) {
    for (int32_t value = 0; value < 2; value++)
        for (int64_t slot = 0, size = kv->block_size; slot < kv->n_blocks * size; slot++)
            for (int64_t h = 0; h < kv->n_kv_heads; h++) {
                int64_t n = value ? kv->head_dim_v : kv->head_dim_k,
                        at = dense_at(kv, form, value, slot / size, slot % size, h, 0);
                const int8_t *row = (value ? dense->v : dense->k) + at;
                for (int64_t d = 0; d < n; d++) {
                    int32_t byte = *byte_at(kv, value, slot, h, d);
                    CHECK_EQ(row[d], value ? byte - 256 * (byte > 127) : byte - 128);
                }
                CHECK(!memcmp((value ? dense->v_scale : dense->k_scale) + at / n,
                              scale_at(kv, value, slot, h), 4));
            }
}

/* Bytes between the rows and the scales are as they were. */
static void check_gaps(boxed *b) {
    for (int32_t value = 0; value < 2; value++)
        for (int64_t slot = 0; slot < 3LL * b->kv.block_size; slot++)
            for (int64_t h = 0; h < 2; h++) {
                memset(scale_at(&b->kv, value, slot, h), 0xee, 4);
                for (int64_t d = 0; d < (value ? b->kv.head_dim_v : b->kv.head_dim_k); d++)
                    *byte_at(&b->kv, value, slot, h, d) = 0xee;
            }
    for (size_t i = 0; i < b->size; i++) CHECK_EQ(b->bytes[i], 0xee);
}

static void round_trip_i8(const boxed *b, paged_dense form, bool heads_outside) {
    dense_i8 d = dense_i8_make(&b->kv), again = dense_i8_make(&b->kv);
    paged_error err;
    for (int32_t i = 0; i < 4; i++) CHECK_EQ(paged_kv_export_i8(&b->kv, form, &d.at, i, 4, &err), PAGED_OK);
    check_dense_i8(&b->kv, form, &d.at);

    boxed back = boxed_i8(b->kv.block_size, b->kv.head_dim_k, b->kv.head_dim_v, heads_outside);
    const paged_dense_i8 k = {.k = d.at.k, .k_scale = d.at.k_scale},
                         v = {.v = d.at.v, .v_scale = d.at.v_scale};
    if (paged_kv_import_i8(&back.kv, form, &k, 0, 1, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
    CHECK(back.kv.v[0] == 0xee && back.kv.v_scale[0] == 0xee);
    for (int32_t i = 0; i < 2; i++) CHECK_EQ(paged_kv_import_i8(&back.kv, form, &v, i, 2, &err), PAGED_OK);
    check_dense_i8(&back.kv, form, &d.at);
    CHECK_EQ(paged_kv_export_i8(&back.kv, form, &again.at, 0, 1, &err), PAGED_OK);
    CHECK(!memcmp(d.at.k, again.at.k, d.n_k) && !memcmp(d.at.v, again.at.v, d.n_v));
    CHECK(!memcmp(d.at.k_scale, again.at.k_scale, 4 * d.n_scales) &&
          !memcmp(d.at.v_scale, again.at.v_scale, 4 * d.n_scales));
    check_gaps(&back);
    free(back.bytes);
    dense_i8_free(&d);
    dense_i8_free(&again);
}

static void dense_i8_arrays(void) {
    static const int32_t sizes[] = {16, 32, 48, 256}, dims[] = {4, 12, 64, 80, 128, 512};
    uint64_t rng = test_seed;
    for (int32_t i = 0; i < 4; i++)
        for (int32_t j = 0; j < 6; j++)
            for (int32_t outside = 0; outside < 2; outside++) {
                if (is_slow() && (i + j) % 3) continue;
                boxed b = boxed_i8(sizes[i], dims[j], dims[(j + 1 + i) % 6], outside);
                fill_i8(&b, &rng);
                round_trip_i8(&b, PAGED_DENSE_HEADS_FIRST, !outside);
                round_trip_i8(&b, PAGED_DENSE_TOKENS_FIRST, outside);
                free(b.bytes);
            }
}

/* What paged_kv_write leaves at its limits comes back; the NaN that it stores leaves, and is refused. */
static void dense_i8_limits(void) {
    boxed b = boxed_i8(16, 24, 4, false), back = boxed_i8(16, 24, 4, true);
    fill_i8(&b, &(uint64_t){test_seed});
    float k[2 * 24], v[2 * 4];
    int64_t slot = 17;
    for (int32_t i = 0; i < 48; i++) k[i] = i % 2 && i > 24 ? -INFINITY : INFINITY;
    for (int32_t i = 0; i < 8; i++) v[i] = i % 2 ? 1e38f : 0x1p-101f;
    CHECK_EQ(paged_kv_write(&b.kv, k, 0, v, 0, &slot, 1, 0, 1), 0);
    dense_i8 d = dense_i8_make(&b.kv);
    paged_error err;
    CHECK_EQ(paged_kv_export_i8(&b.kv, PAGED_DENSE_TOKENS_FIRST, &d.at, 0, 1, &err), PAGED_OK);
    CHECK_EQ(paged_kv_import_i8(&back.kv, PAGED_DENSE_TOKENS_FIRST, &d.at, 0, 1, &err), PAGED_OK);
    check_dense_i8(&back.kv, PAGED_DENSE_TOKENS_FIRST, &d.at);

    v[5] = NAN;
    CHECK_EQ(paged_kv_write(&b.kv, k, 0, v, 0, &slot, 1, 0, 1), 1);
    CHECK_EQ(paged_kv_export_i8(&b.kv, PAGED_DENSE_TOKENS_FIRST, &d.at, 0, 1, &err), PAGED_OK);
    CHECK(isnan(d.at.v_scale[17 * 2 + 1]) && d.at.v[(17 * 2 + 1) * 4] == 0);
    CHECK_EQ(paged_kv_import_i8(&back.kv, PAGED_DENSE_TOKENS_FIRST, &d.at, 0, 1, &err),
             PAGED_ERR_INVALID_ARG);
    CHECK(strstr(err.message, "v_scale of slot 17 (block 1, offset 1), KV head 1 is "));
    dense_i8_free(&d);
    free(b.bytes);
    free(back.bytes);
}

/* An import that is refused says `words`, on every thread, and writes nothing. */
static void refused_i8(const boxed *to, const paged_dense_i8 *from, const char *words) {
    for (int32_t i = 0; i < 3; i++) {
        paged_error err = {0};
        CHECK_EQ(paged_kv_import_i8(&to->kv, PAGED_DENSE_HEADS_FIRST, from, i, 3, &err),
                 PAGED_ERR_INVALID_ARG);
        if (!strstr(err.message, words))
            test_fail(__FILE__, __LINE__, "\"%s\" without \"%s\"", err.message, words);
    }
    for (size_t i = 0; i < to->size; i++) CHECK_EQ(to->bytes[i], 0xee);
}

static void dense_i8_refuses_numbers(void) {
    boxed b = boxed_i8(16, 8, 12, false);
    dense_i8 d = dense_i8_make(&b.kv);
    static const float bad[] = {NAN, INFINITY, -INFINITY, -1e-30f, 3e38f};
    /* [3, 2, 16]: block 2, head 1, offset 5 */
    int64_t at = (2 * 2 + 1) * 16 + 5;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        for (int32_t value = 0; value < 2; value++) {
            float *scale = (value ? d.at.v_scale : d.at.k_scale) + at;
            *scale = bad[i];
            refused_i8(&b, &d.at,
                       value ? "v_scale of slot 37 (block 2, offset 5), KV head 1 is "
                             : "k_scale of slot 37 (block 2, offset 5), KV head 1 is ");
            *scale = 0;
        }
    d.at.k_scale[at] = -2.5f;
    refused_i8(&b, &d.at, "KV head 1 is -2.5, not in 0 ... ");
    d.at.k_scale[at] = 0;
    for (int32_t value = 0; value < 2; value++) {
        d.at.v_scale[at] = largest_scale(12, true) * (value ? 1 : 1.01f);
        if (!value) refused_i8(&b, &d.at, "not in 0 ... 9.98");
    }
    d.at.v[at * 12 + 7] = -128;
    refused_i8(&b, &d.at,
               "v of slot 37 (block 2, offset 5), KV head 1: element 7 is -128, not in -127 ... 127");
    d.at.k[at * 8] = -128;
    refused_i8(&b, &d.at, "k of slot 37 (block 2, offset 5), KV head 1: element 0 is -128");
    dense_i8_free(&d);
    free(b.bytes);
}

static void dense_i8_refuses(void) {
    boxed b = boxed_i8(16, 8, 8, false);
    dense_i8 d = dense_i8_make(&b.kv);
    paged_error err;
    const paged_dense form = PAGED_DENSE_HEADS_FIRST;
    refused_i8(&b, NULL, "the dense side is NULL");
    refused_i8(&b, &(paged_dense_i8){.k = d.at.k}, "k_scale is NULL and k is not");
    refused_i8(&b, &(paged_dense_i8){.k_scale = d.at.k_scale}, "k is NULL and k_scale is not");
    refused_i8(&b, &(paged_dense_i8){.v = d.at.v}, "v_scale is NULL and v is not");
    refused_i8(&b, &(paged_dense_i8){.v_scale = d.at.v_scale}, "v is NULL and v_scale is not");
    CHECK_EQ(paged_kv_export_i8(&b.kv, form, NULL, 0, 1, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_kv_export_i8(NULL, form, &d.at, 0, 1, &err), PAGED_ERR_INVALID_ARG);
    CHECK_STR(err.message, "kv is NULL");
    CHECK_EQ(paged_kv_export_i8(&b.kv, (paged_dense)2, &d.at, 0, 1, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_kv_import_i8(&b.kv, form, &d.at, -1, 1, &err), PAGED_ERR_INVALID_ARG);
    CHECK_STR(err.message, "thread -1 of 1");
    CHECK_EQ(paged_kv_export(&b.kv, form, d.at.k, d.at.v, 0, 1, &err), PAGED_ERR_UNSUPPORTED);
    CHECK_EQ(paged_kv_import(&b.kv, form, d.at.k, d.at.v, 0, 1, &err), PAGED_ERR_UNSUPPORTED);

    boxed bad = b;
    bad.kv.k = NULL;
    refused_i8(&bad, &d.at, "k of the cache is NULL");
    bad = b;
    bad.kv.v_scale = NULL;
    refused_i8(&bad, &d.at, "v_scale of the cache is NULL");
    bad = b;
    bad.kv.scale_head_stride = 60;
    refused_i8(&bad, &d.at, "scale_head_stride is 60 bytes");
    bad = b;
    bad.kv.layout = PAGED_LAYOUT_PLAIN;
    refused_i8(&bad, &d.at, "packed layout only");
    bad = b;
    bad.kv.type = PAGED_TYPE_F16;
    bad.kv.k_head_stride = bad.kv.v_head_stride = 256;
    bad.kv.block_stride = 1024;
    refused_i8(&bad, &d.at, "type of the cache is 0, not 3 (i8)");
    dense_i8_free(&d);
    free(b.bytes);
}

/* Another pool with the keys and values of the first answers with the same bits, packed tails and tables a
 * head among them. */
static void imported_attention(void) {
    uint64_t rng = test_seed;
    paged_cpu_mask(~0u);
    for (int32_t how = 0; how < 4; how++) {
        shape s = {.type = PAGED_TYPE_I8,
                   .layout = PAGED_LAYOUT_PACKED,
                   .block_size = 48,
                   .n_heads = 6,
                   .n_kv_heads = 2,
                   .dk = 64,
                   .dv = 32};
        const int32_t n_keys[] = {70, 0, 1, 640}, n_queries[] = {3, 1, 1, 2};
        world w = world_make(s, 4, n_keys, n_queries, how % 2 ? FILL_OUTLIER : FILL_UNIFORM, &rng);
        place p = place_make(&w, s.layout, s.block_size, false, how == 3, false, &rng);
        if (how == 2) place_tails(&w, &p);
        result want = run_all(&w, &p, 1);
        check_all(&w, &want);

        place fresh = run_make(&w, &p, p.kv.n_blocks, false), other = p;
        other.kv = fresh.kv;
        dense_i8 d = dense_i8_make(&p.kv);
        paged_dense form = how % 2 ? PAGED_DENSE_TOKENS_FIRST : PAGED_DENSE_HEADS_FIRST;
        paged_error err;
        for (int32_t i = 0; i < 2; i++)
            CHECK_EQ(paged_kv_export_i8(&p.kv, form, &d.at, i, 2, &err), PAGED_OK);
        for (size_t i = 0; i < d.n_scales; i++) { /* of slots that no sequence has, which are poison */
            if (isnan(d.at.k_scale[i])) d.at.k_scale[i] = 0;
            if (isnan(d.at.v_scale[i])) d.at.v_scale[i] = 0;
        }
        for (int32_t i = 0; i < 3; i++)
            if (paged_kv_import_i8(&other.kv, form, &d.at, i, 3, &err))
                test_fail(__FILE__, __LINE__, "%s", err.message);
        memset(p.bytes, 0xff, (size_t)(p.kv.block_stride * p.kv.n_blocks));
        result got = run_all(&w, &other, 2);
        must_equal(&w, &want, &got, "an imported cache");
        dense_i8_free(&d);
        result_free(&want);
        place_free(&fresh);
        place_free(&p);
        world_free(&w);
    }
}

/* ---- merge ---- */

/* Attention over the keys from …, then merged with that over the keys before, equals attention over all. */
static void merged_states(void) {
    uint64_t rng = test_seed;
    shape s = {.type = PAGED_TYPE_F32, .block_size = 16, .n_heads = 4, .n_kv_heads = 2, .dk = 24, .dv = 40};
    s.non_causal = true;
    paged_cpu_mask(~0u);
    for (int32_t cut = 0; cut <= 96; cut += 32)
        for (int32_t how = 0; how < N_FILLS; how++) {
            const int32_t n_keys = 96, n_queries = 5;
            world w = world_make(s, 1, &n_keys, &n_queries, (fill)how, &rng), half = w;
            place p = place_make(&w, PAGED_LAYOUT_PLAIN, 16, false, false, true, &rng), behind = p;
            half.n_keys[0] = cut;
            result a = run_all(&half, &p, 1);
            half.n_keys[0] = n_keys - cut;
            behind.blocks = p.blocks + cut / 16;
            result b = run_all(&half, &behind, 1);
            paged_attn_merge_states(a.out, a.lse, b.out, b.lse, n_queries * 4, 40);
            check_all(&w, &a);
            result_free(&a);
            result_free(&b);
            place_free(&p);
            world_free(&w);
        }
}

static void merges_of_nothing(void) {
    float out_a[3][2] = {{1, 2}, {NAN, INFINITY}, {NAN, NAN}}, lse_a[3] = {0.5f, -INFINITY, -INFINITY};
    const float out_b[3][2] = {{NAN, NAN}, {3, -4}, {INFINITY, NAN}}, lse_b[3] = {-INFINITY, 7, -INFINITY};
    paged_attn_merge_states(out_a[0], lse_a, out_b[0], lse_b, 3, 2);
    CHECK(out_a[0][0] == 1 && out_a[0][1] == 2 && lse_a[0] == 0.5f);
    CHECK(out_a[1][0] == 3 && out_a[1][1] == -4 && lse_a[1] == 7);
    CHECK(out_a[2][0] == 0 && out_a[2][1] == 0 && lse_a[2] == -INFINITY);

    /* A side that is e^1000 times heavier; equal sides; a broken side stays broken. */
    float out[3] = {1, 1, 1}, lse[3] = {-1000, 2, NAN};
    const float other[3] = {5, 3, 1}, other_lse[3] = {0, 2, 0};
    paged_attn_merge_states(out, lse, other, other_lse, 3, 1);
    CHECK(out[0] == 5 && lse[0] == 0);
    CHECK(out[1] == 2 && fabs((double)lse[1] - (2 + log(2))) < 1e-6);
    CHECK(isnan(out[2]) && isnan(lse[2]));
}

#define TESTS(X)                                                                                             \
    X(dense_arrays)                                                                                          \
    X(dense_refuses)                                                                                         \
    X(dense_i8_arrays)                                                                                       \
    X(dense_i8_limits)                                                                                       \
    X(dense_i8_refuses_numbers)                                                                              \
    X(dense_i8_refuses)                                                                                      \
    X(imported_attention) X(gathered_attention) X(gather_refuses) X(merged_states) X(merges_of_nothing)
TEST_MAIN(TESTS)
