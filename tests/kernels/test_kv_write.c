/* Goal: keys and values lie where paged/kv.h says, rounded to nearest even, whatever instruction set wrote
 * them. Method: the formulas of kv.h, written down again here, against the bytes; conversion against
 * base's plain C on every f16, every bf16 and a million floats; then what callers can get wrong. */
#include <sys/mman.h>

#include "kernels/world.h"

typedef struct cache {
    paged_kv kv;
    uint8_t *bytes;
    size_t size;
} cache;

static cache cache_make(paged_type type, paged_layout layout, int32_t block_size, int32_t n_kv_heads,
                        int32_t dk, int32_t dv) {
    int64_t elem = type == PAGED_TYPE_F32 ? 4 : 2;
    cache c = {.kv = {.n_blocks = 5,
                      .block_size = block_size,
                      .n_kv_heads = n_kv_heads,
                      .head_dim_k = dk,
                      .head_dim_v = dv,
                      .type = type,
                      .layout = layout}};
    c.kv.k_head_stride = elem * block_size * dk;
    c.kv.v_head_stride = elem * block_size * dv + 32; /* a gap */
    c.kv.block_stride = n_kv_heads * (c.kv.k_head_stride + c.kv.v_head_stride) + 64;
    c.size = (size_t)(c.kv.block_stride * c.kv.n_blocks);
    c.bytes = take(c.size, 1);
    memset(c.bytes, 0xff, c.size);
    c.kv.k = c.bytes;
    c.kv.v = c.bytes + n_kv_heads * c.kv.k_head_stride;
    return c;
}

/* The table of kv.h: element d of slot offset o. */
static int64_t element(const paged_kv *kv, bool value, int64_t o, int64_t d) {
    int64_t t = o / 16, i = o % 16, hd = value ? kv->head_dim_v : kv->head_dim_k;
    if (kv->layout == PAGED_LAYOUT_PLAIN) return o * hd + d;
    if (kv->type != PAGED_TYPE_BF16) return value ? t * 16 * hd + i * hd + d : t * 16 * hd + d * 16 + i;
    return value ? t * 16 * hd + (i / 2) * 2 * hd + d * 2 + i % 2
                 : t * 16 * hd + (d / 2) * 32 + i * 2 + d % 2;
}

static uint32_t bits_at(const cache *c, bool value, int64_t slot, int64_t head, int64_t d) {
    const paged_kv *kv = &c->kv;
    int64_t elem = kv->type == PAGED_TYPE_F32 ? 4 : 2, block = slot / kv->block_size,
            o = slot % kv->block_size;
    const uint8_t *base = (value ? kv->v + head * kv->v_head_stride : kv->k + head * kv->k_head_stride);
    uint32_t bits = 0;
    memcpy(&bits, base + block * kv->block_stride + element(kv, value, o, d) * elem, (size_t)elem);
    return bits;
}

static uint32_t bits_of(paged_type type, float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return type == PAGED_TYPE_F32   ? bits
           : type == PAGED_TYPE_F16 ? paged__f32_to_f16(x)
                                    : paged__f32_to_bf16(x);
}

static void check_written(const cache *c, const float *k, const float *v, int64_t slot, int64_t stride_k,
                          int64_t stride_v, int64_t t) {
    const paged_kv *kv = &c->kv;
    for (int64_t h = 0; h < kv->n_kv_heads; h++) {
        for (int64_t d = 0; d < kv->head_dim_k; d++)
            CHECK_EQ(bits_at(c, false, slot, h, d),
                     bits_of(kv->type, k[t * stride_k + h * kv->head_dim_k + d]));
        for (int64_t d = 0; d < kv->head_dim_v; d++)
            CHECK_EQ(bits_at(c, true, slot, h, d),
                     bits_of(kv->type, v[t * stride_v + h * kv->head_dim_v + d]));
    }
}

/* Some slots in a random order, one skipped; everything else keeps its bytes; reading gives the stored
 * values back. */
static void write_and_read(paged_type type, paged_layout layout, int32_t block_size, int32_t dk, int32_t dv,
                           uint64_t *rng) {
    enum { N = 9 };
    cache c = cache_make(type, layout, block_size, 3, dk, dv);
    int64_t stride_k = 3 * dk + 5, stride_v = 3 * dv + 1, slots[N], n_slots = 5LL * block_size;
    float *k = take((size_t)(N * stride_k), sizeof *k), *v = take((size_t)(N * stride_v), sizeof *v);
    for (int64_t i = 0; i < N * stride_k; i++) k[i] = draw_unit(rng) * 100;
    for (int64_t i = 0; i < N * stride_v; i++) v[i] = draw_unit(rng);
    int64_t n = PAGED_MIN(n_slots, N);
    for (int64_t t = 0; t < n; t++) slots[t] = t == 2 ? -1 : t * 7919 % n_slots;
    for (int64_t t = 0; t < n; t++) /* distinct: 7919 is a prime that divides no number of slots here */
        for (int64_t u = 0; u < t; u++) CHECK(slots[t] != slots[u]);
    CHECK_EQ(paged_kv_check_slots(&c.kv, slots, (int32_t)n, NULL), PAGED_OK);
    for (int32_t ith = 0; ith < 4; ith++)
        CHECK_EQ(paged_kv_write(&c.kv, k, stride_k, v, stride_v, slots, (int32_t)n, ith, 4), 0);
    size_t n_changed = 0, elem = type == PAGED_TYPE_F32 ? 4 : 2;
    for (int64_t t = 0; t < n; t++)
        if (t != 2) check_written(&c, k, v, slots[t], stride_k, stride_v, t);
    for (size_t i = 0; i < c.size; i += elem) n_changed += memcmp(c.bytes + i, "\xff\xff\xff\xff", elem) != 0;
    CHECK_EQ(n_changed, (n - (n > 2)) * 3 * (dk + dv));

    float *k_out = take((size_t)(N * 3 * dk), sizeof *k_out),
          *v_out = take((size_t)(N * 3 * dv), sizeof *v_out);
    paged_kv_read(&c.kv, slots, (int32_t)n, k_out, NULL);
    paged_kv_read(&c.kv, slots, (int32_t)n, NULL, v_out);
    for (int64_t t = 0; t < n; t++)
        for (int64_t e = 0; e < 3 * dk && t != 2; e++)
            CHECK(k_out[t * 3 * dk + e] == stored(type, k[t * stride_k + e]));
    for (int64_t t = 0; t < n; t++)
        for (int64_t e = 0; e < 3 * dv && t != 2; e++)
            CHECK(v_out[t * 3 * dv + e] == stored(type, v[t * stride_v + e]));
    free(k);
    free(v);
    free(k_out);
    free(v_out);
    free(c.bytes);
}

/* Tokens in order, from the middle of a tile over whole ones, which are written at once, to the middle of
 * one, with a hole; other slots keep their bytes. */
static void write_run(paged_type type, int32_t block_size, int32_t dk, int32_t dv, uint64_t *rng) {
    enum { N = 52, FIRST = 11, HOLE = 40 };
    cache c = cache_make(type, PAGED_LAYOUT_PACKED, block_size, 2, dk, dv);
    int64_t stride_k = 2 * dk + 3, stride_v = 2 * dv, slots[N], n_slots = 5LL * block_size;
    float *k = take((size_t)(N * stride_k), sizeof *k), *v = take((size_t)(N * stride_v), sizeof *v);
    for (int64_t i = 0; i < N * stride_k; i++) k[i] = draw_unit(rng) * 100;
    for (int64_t i = 0; i < N * stride_v; i++) v[i] = draw_unit(rng);
    for (int64_t t = 0; t < N; t++) slots[t] = t == HOLE ? -1 : FIRST + t;
    k[20 * stride_k] = NAN;
    CHECK_EQ(paged_kv_write(&c.kv, k, stride_k, v, stride_v, slots, N, 0, 1), 1);
    for (int64_t t = 0; t < N; t++)
        if (t != HOLE && t != 20) check_written(&c, k, v, FIRST + t, stride_k, stride_v, t);
    for (int64_t slot = 0; slot < n_slots; slot++) {
        bool written = slot >= FIRST && slot < FIRST + N && slot != FIRST + HOLE;
        if (!written) CHECK_EQ(bits_at(&c, false, slot, 1, 0), type == PAGED_TYPE_F32 ? UINT32_MAX : 0xffff);
        if (!written) CHECK_EQ(bits_at(&c, true, slot, 1, 0), type == PAGED_TYPE_F32 ? UINT32_MAX : 0xffff);
    }
    free(c.bytes);
    free(k);
    free(v);
}

static void layouts(void) {
    static const int32_t dims[] = {16, 64, 80, 256, 40, 2, 22}, sizes[] = {16, 48, 1, 3, 100};
    for (int32_t isa = 0; isa < N_ISAS; isa++) {
        uint64_t rng = test_seed;
        if (!isa_use(isa)) continue;
        for (int32_t type = 0; type < 3; type++)
            for (size_t b = 0; b < 5; b++)
                for (size_t d = 0; d < 7; d++) {
                    write_and_read((paged_type)type, PAGED_LAYOUT_PLAIN, sizes[b], dims[d], dims[6 - d],
                                   &rng);
                    if (sizes[b] % 16 == 0)
                        write_and_read((paged_type)type, PAGED_LAYOUT_PACKED, sizes[b], dims[d], dims[6 - d],
                                       &rng);
                }
        write_and_read(PAGED_TYPE_F16, PAGED_LAYOUT_PACKED, 16, 7, 13, &rng);
        write_and_read(PAGED_TYPE_BF16, PAGED_LAYOUT_PLAIN, 5, 1, 19, &rng);
    }
}

/* ---- conversion ---- */

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* 512 floats through a plain cache of one head; the bits must be base's, and every NaN counted. */
static void check_conversion(paged_type type, const float *x) {
    cache c = cache_make(type, PAGED_LAYOUT_PLAIN, 1, 1, 512, 512);
    int64_t slot = 3, n_nan = 0;
    for (int32_t i = 0; i < 512; i++) n_nan += isnan(x[i]) != 0;
    CHECK_EQ(paged_kv_write(&c.kv, x, 0, x, 0, &slot, 1, 0, 1), 2 * n_nan);
    for (int32_t i = 0; i < 512; i++) {
        uint32_t got = bits_at(&c, false, slot, 0, i), want = bits_of(type, x[i]), in;
        memcpy(&in, &x[i], sizeof in);
        if (got != want)
            test_fail(__FILE__, __LINE__, "%08x becomes %x, not %x, in %s", in, got, want, type_name(type));
        CHECK_EQ(bits_at(&c, true, slot, 0, i), want);
    }
    free(c.bytes);
}

static void rounding(void) {
    static const uint32_t special[] = {0x00000000, 0x80000000, 0x7f800000, 0xff800000,
                                       0x7fc00000, 0xffc00001, 0x7f800001, 0x7fbfffff, /* 0, inf, NaN */
                                       0x477fe000, 0x477fefff, 0x477ff000, 0x47800000,
                                       0xc77fffff, 0x7f7fffff, 0xff7fffff, 0x7f7f8000, /* f16 and bf16 max */
                                       0x7f7f7fff, 0x7f7f0000, 0x33000000, 0x33000001,
                                       0x33800000, 0x387fffff, 0x38800000, 0x387fe000, /* subnormal f16 */
                                       0x00000001, 0x007fffff, 0x00008000, 0x00018000,
                                       0x3f801000, 0x3f803000, 0x3f808000, 0x3f818000}; /* ties */
    for (int32_t isa = 0; isa < N_ISAS; isa++) {
        uint64_t rng = test_seed;
        float x[512];
        if (!isa_use(isa)) continue;
        for (int32_t round = 0; round < (test_long ? 8000 : 800); round++) {
            for (int32_t i = 0; i < 512; i++) {
                uint32_t bits = (uint32_t)(paged__rand(&rng) >> 32);
                /* Half of them in the range of f16, near its ties. */
                if (i % 2) bits = (bits & 0x87ffe000u) + 0x30000000u + 0xfffu + bits % 3;
                if (round == 0 && i < 32) bits = special[i];
                x[i] = float_of(bits);
            }
            check_conversion(PAGED_TYPE_F16, x);
            check_conversion(PAGED_TYPE_BF16, x);
        }
    }
}

/* Every value of f16 and bf16 is read back as base reads it. */
static void every_half(void) {
    for (int32_t isa = 0; isa < N_ISAS; isa++)
        for (int32_t type = 0; type < 3; type += 2) {
            if (!isa_use(isa)) continue;
            cache c = cache_make((paged_type)type, PAGED_LAYOUT_PLAIN, 1, 1, 512, 512);
            for (uint32_t first = 0; first < 65536; first += 512) {
                float out[512];
                int64_t slot = 0;
                for (uint32_t i = 0; i < 512; i++) {
                    uint16_t h = (uint16_t)(first + i);
                    memcpy(c.bytes + 2 * i, &h, 2);
                }
                paged_kv_read(&c.kv, &slot, 1, out, NULL);
                for (uint32_t i = 0; i < 512; i++) {
                    uint16_t h = (uint16_t)(first + i);
                    float want = type == PAGED_TYPE_F16 ? paged__f16_to_f32(h) : paged__bf16_to_f32(h);
                    CHECK(memcmp(&out[i], &want, 4) == 0 || (isnan(out[i]) && isnan(want)));
                }
            }
            free(c.bytes);
        }
}

/* ---- addresses and refusals ---- */

/* Slots far beyond 2^32 bytes: only the pages that are touched exist. */
static void far_slots(void) {
    paged_kv kv = {.block_stride = 1 << 20,
                   .k_head_stride = 16 * 64 * 2,
                   .v_head_stride = 16 * 64 * 2,
                   .n_blocks = 20000,
                   .block_size = 16,
                   .n_kv_heads = 1,
                   .head_dim_k = 64,
                   .head_dim_v = 64};
    size_t size = (size_t)kv.block_stride * (size_t)kv.n_blocks;
    void *memory =
        mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        printf("far_slots: no address space\n");
        return;
    }
    paged_cpu_mask(~0u);
    kv.k = memory;
    kv.v = kv.k + 4096;
    float in[64], out[64];
    for (int32_t i = 0; i < 64; i++) in[i] = (float)i;
    int64_t slots[] = {19999 * 16 + 5};
    CHECK_EQ(paged_kv_check_slots(&kv, slots, 1, NULL), PAGED_OK);
    paged_kv_write(&kv, in, 0, in, 0, slots, 1, 0, 1);
    uint16_t h;
    memcpy(&h, kv.k + (size_t)19999 * (1 << 20) + 5 * 64 * 2 + 2 * 63, sizeof h);
    CHECK(paged__f16_to_f32(h) == 63.0f);
    paged_kv_read(&kv, slots, 1, NULL, out);
    CHECK(memcmp(in, out, sizeof in) == 0);

    /* Attention over that last block. */
    paged_attn_config config = {
        .struct_size = sizeof config, .n_heads = 1, .n_kv_heads = 1, .head_dim_k = 64, .block_size = 16};
    const int32_t block = 19999, n_keys = 6, cu[] = {0, 1};
    paged_batch batch = {.cu_seqlens_q = cu,
                         .tables = {.blocks = &block, .seqlens_k = &n_keys, .n_seqs = 1, .max_blocks = 1}};
    paged_attn *attn;
    CHECK_EQ(paged_attn_create(&config, &attn, NULL), PAGED_OK);
    CHECK_EQ(paged_attn_plan(attn, &batch, &kv, NULL), PAGED_OK);
    const float q[64] = {[63] = 100}; /* only key 5 is not zero, and wins */
    paged_attn_run(attn, &kv, &(paged_attn_io){.q = q, .out = out}, 0, 1);
    CHECK(fabsf(out[63] - 63.0f) < 1e-3f);
    paged_attn_free(attn);
    munmap(memory, size);
}

static void bad_slots(void) {
    cache c = cache_make(PAGED_TYPE_F16, PAGED_LAYOUT_PACKED, 16, 1, 16, 16);
    paged_error err;
    int64_t slots[] = {0, 79, -1, INT64_MIN, 80, INT64_MAX};
    CHECK_EQ(paged_kv_check_slots(&c.kv, slots, 4, &err), PAGED_OK);
    CHECK_EQ(paged_kv_check_slots(&c.kv, slots, 6, &err), PAGED_ERR_INVALID_ARG);
    CHECK_STR(err.message, "slot 80 of token 4 is not below 80 (5 blocks of 16)");
    CHECK_EQ(paged_kv_check_slots(&c.kv, slots + 5, 1, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_kv_check_slots(&c.kv, NULL, 1, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_kv_check_slots(&c.kv, NULL, 0, &err), PAGED_OK);
    c.kv.block_size = 17;
    CHECK_EQ(paged_kv_check_slots(&c.kv, slots, 1, &err), PAGED_ERR_INVALID_ARG);
    free(c.bytes);
}

static void runs(void) {
    static const int32_t dims[] = {16, 64, 80, 256, 40, 2, 22};
    for (int32_t isa = 0; isa < N_ISAS; isa++) {
        uint64_t rng = test_seed;
        if (!isa_use(isa)) continue;
        for (int32_t i = 0; i < 7; i++)
            for (int32_t type = 0; type < 3; type++)
                write_run((paged_type)type, i % 2 ? 16 : 48, dims[i], dims[6 - i], &rng);
    }
}

#define TESTS(X) X(layouts) X(runs) X(rounding) X(every_half) X(far_slots) X(bad_slots)
TEST_MAIN(TESTS)
