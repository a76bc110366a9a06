/* Goal: int8 keys and values are what paged/kv.h says. Method: the rotation by its definition, in double and
 * element by element, against the bytes; rows whose bytes are known by hand; what callers can get wrong. */
#include "kernels/world.h"

typedef struct cache {
    paged_kv kv;
    uint8_t *bytes;
    size_t size;
} cache;

/* Four blocks [K | gap | V | gap | scales of K | scales of V | gap], all bytes 0xff. */
static cache cache_make(int32_t block_size, int32_t n_kv_heads, int32_t dk, int32_t dv) {
    cache c = {.kv = {.n_blocks = 4,
                      .block_size = block_size,
                      .n_kv_heads = n_kv_heads,
                      .head_dim_k = dk,
                      .head_dim_v = dv,
                      .type = PAGED_TYPE_I8,
                      .layout = PAGED_LAYOUT_PACKED}};
    int64_t scales = 4LL * block_size + 8;
    c.kv.k_head_stride = block_size * dk + 16;
    c.kv.v_head_stride = block_size * dv + 32;
    c.kv.scale_head_stride = scales;
    c.kv.block_stride = n_kv_heads * (c.kv.k_head_stride + c.kv.v_head_stride + 2 * scales) + 64;
    c.kv.scale_block_stride = c.kv.block_stride;
    c.size = (size_t)(c.kv.block_stride * c.kv.n_blocks);
    c.bytes = take(c.size, 1);
    memset(c.bytes, 0xff, c.size);
    c.kv.k = c.bytes;
    c.kv.v = c.kv.k + n_kv_heads * c.kv.k_head_stride;
    c.kv.k_scale = c.kv.v + n_kv_heads * c.kv.v_head_stride;
    c.kv.v_scale = c.kv.k_scale + n_kv_heads * scales;
    return c;
}

/* The table of kv.h: the integer that stands for element d of a slot, and the scale of its row. */
static int32_t value_at(const paged_kv *kv, bool is_v, int64_t slot, int64_t h, int64_t d) {
    int64_t b = slot / kv->block_size, o = slot % kv->block_size, t = o / 16, i = o % 16;
    int64_t dk = kv->head_dim_k, dv = kv->head_dim_v;
    if (!is_v)
        return (int32_t)kv->k[b * kv->block_stride + h * kv->k_head_stride + t * 16 * dk + d / 4 * 64 +
                              i * 4 + d % 4] -
               128;
    return (int8_t)
        kv->v[b * kv->block_stride + h * kv->v_head_stride + t * 16 * dv + i / 4 * 4 * dv + d * 4 + i % 4];
}

static float scale_at(const paged_kv *kv, bool is_v, int64_t slot, int64_t h) {
    const uint8_t *base = is_v ? kv->v_scale : kv->k_scale;
    float scale;
    memcpy(&scale,
           base + slot / kv->block_size * kv->scale_block_stride + h * kv->scale_head_stride +
               slot % kv->block_size * 4,
           sizeof scale);
    return scale;
}

/* The rotation by its definition. */
static void rotate_exactly(double *out, const float *x, int32_t n) {
    int32_t order = 1;
    while (n % (2 * order) == 0) order *= 2;
    for (int32_t i = 0; i < n; i++) {
        out[i] = 0;
        for (int32_t j = 0; j < order; j++) {
            double term = (double)x[i / order * order + j];
            out[i] += __builtin_popcount((unsigned)(i % order & j)) % 2 ? -term : term;
        }
        out[i] /= sqrt((double)order);
    }
}

/* The stored row against the exact one: the scale is its largest magnitude / 127, and each element is off by
 * half a step, and by roundings of f32. */
static void check_stored(const paged_kv *kv, bool is_v, int64_t slot, int64_t h, const float *x) {
    int32_t n = is_v ? kv->head_dim_v : kv->head_dim_k;
    double want[PAGED_HEAD_DIM_MAX], top = 0, scale = (double)scale_at(kv, is_v, slot, h);
    if (is_v)
        for (int32_t d = 0; d < n; d++) want[d] = (double)x[d];
    else
        rotate_exactly(want, x, n);
    for (int32_t d = 0; d < n; d++) top = fmax(top, fabs(want[d]));
    CHECK(fabs(scale - top / 127) <= 2e-6 * top / 127);
    for (int32_t d = 0; d < n; d++) {
        double error = fabs(value_at(kv, is_v, slot, h, d) * scale - want[d]);
        if (!(error <= 0.5 * scale + 1e-5 * top))
            test_fail(__FILE__, __LINE__, "element %d of %d is off by %g steps", d, n, error / scale);
    }
}

/* ---- bytes ---- */

static void rows_of(int32_t block_size, int32_t dk, int32_t dv, uint64_t *rng) {
    enum { N = 9, H = 3 };
    cache c = cache_make(block_size, H, dk, dv);
    int64_t stride_k = H * dk + 5, stride_v = H * dv + 1, slots[N];
    float *k = take((size_t)(N * stride_k), sizeof *k), *v = take((size_t)(N * stride_v), sizeof *v);
    for (int64_t i = 0; i < N * stride_k; i++) k[i] = draw_unit(rng) * (i % 7 == 0 ? 100.0f : 1.0f);
    for (int64_t i = 0; i < N * stride_v; i++) v[i] = draw_unit(rng);
    for (int64_t t = 0; t < N; t++) slots[t] = t == 2 ? -1 : t * 7919 % (4LL * block_size);
    CHECK_EQ(paged_kv_check_slots(&c.kv, slots, N, NULL), PAGED_OK);
    for (int32_t ith = 0; ith < 4; ith++)
        CHECK_EQ(paged_kv_write(&c.kv, k, stride_k, v, stride_v, slots, N, ith, 4), 0);

    float *k_out = take((size_t)(N * H * dk), sizeof *k_out),
          *v_out = take((size_t)(N * H * dv), sizeof *v_out);
    paged_kv_read(&c.kv, slots, N, k_out, NULL);
    paged_kv_read(&c.kv, slots, N, NULL, v_out);
    for (int64_t t = 0; t < N; t++)
        for (int64_t h = 0; h < H && t != 2; h++) {
            const float *k_row = k + t * stride_k + h * dk, *v_row = v + t * stride_v + h * dv;
            check_stored(&c.kv, false, slots[t], h, k_row);
            check_stored(&c.kv, true, slots[t], h, v_row);
            double k_scale = (double)scale_at(&c.kv, false, slots[t], h), error = 0, top = 0,
                   v_scale = (double)scale_at(&c.kv, true, slots[t], h);
            for (int64_t d = 0; d < dk; d++) {
                double x = (double)k_out[(t * H + h) * dk + d] - (double)k_row[d];
                error += x * x;
                top = fmax(top, fabs((double)k_row[d]));
            }
            /* A rotation keeps lengths. */
            CHECK(sqrt(error) <= (0.5 * k_scale + 1e-5 * top) * sqrt((double)dk));
            for (int64_t d = 0; d < dv; d++)
                CHECK(fabs((double)v_out[(t * H + h) * dv + d] - (double)v_row[d]) <= 0.501 * v_scale);
        }
    /* Every row is one whose scale changed; slots that were not written keep all their bytes. */
    int64_t n_rows = 0;
    for (int64_t slot = 0; slot < 4LL * block_size; slot++)
        for (int64_t h = 0; h < H; h++) {
            bool is_written = !isnan(scale_at(&c.kv, false, slot, h));
            n_rows += is_written;
            for (int64_t d = 0; d < dk && !is_written; d++)
                CHECK_EQ(value_at(&c.kv, false, slot, h, d), 0xff - 128);
            for (int64_t d = 0; d < dv && !is_written; d++) CHECK_EQ(value_at(&c.kv, true, slot, h, d), -1);
        }
    CHECK_EQ(n_rows, (N - 1) * H);
    free(k);
    free(v);
    free(k_out);
    free(v_out);
    free(c.bytes);
}

static void rows_are_what_kv_h_says(void) {
    static const int32_t dims[] = {4, 16, 40, 64, 72, 80, 96, 112, 128, 192, 256, 512};
    uint64_t rng = test_seed;
    for (int32_t i = 0; i < 12; i++)
        for (int32_t block_size = 16; block_size <= 48; block_size += 16)
            rows_of(block_size, dims[i], dims[11 - i], &rng);
}

/* One row of K and V at slot 17 of a cache of one head. */
static void write_one(cache *c, const float *k, const float *v, int64_t n_nan) {
    int64_t slot = 17;
    CHECK_EQ(paged_kv_write(&c->kv, k, 0, v, 0, &slot, 1, 0, 1), n_nan);
}

static void rows_known_by_hand(void) {
    cache c = cache_make(32, 1, 64, 8);
    float k[64] = {2.54f}, v[8] = {127, -127, 0.5f, 1.5f, 2.5f, -0.5f, 63.7f, -0.0f};
    write_one(&c, k, v, 0);
    /* A unit vector becomes the first row of the matrix; ties of V go to the even neighbour. */
    for (int32_t d = 0; d < 64; d++) CHECK_EQ(value_at(&c.kv, false, 17, 0, d), 127);
    CHECK(fabsf(scale_at(&c.kv, false, 17, 0) - 2.54f / 127 / 8) < 1e-9f);
    const int32_t want[8] = {127, -127, 0, 2, 2, 0, 64, 0};
    for (int32_t d = 0; d < 8; d++) CHECK_EQ(value_at(&c.kv, true, 17, 0, d), want[d]);
    CHECK(scale_at(&c.kv, true, 17, 0) == 1.0f);

    /* + - + - … is row 1, so all of it ends in element 1 of its block; 48 = 3 blocks of 16. */
    cache three = cache_make(32, 1, 48, 4);
    float alternating[48], zero[4] = {0};
    for (int32_t d = 0; d < 48; d++)
        alternating[d] = (d < 16 ? 1.0f : d < 32 ? 0.5f : -0.25f) * (d % 2 ? -1 : 1);
    write_one(&three, alternating, zero, 0);
    for (int32_t d = 0; d < 48; d++)
        CHECK_EQ(value_at(&three.kv, false, 17, 0, d), d == 1 ? 127 : d == 17 ? 64 : d == 33 ? -32 : 0);
    CHECK(fabsf(scale_at(&three.kv, false, 17, 0) - 4.0f / 127) < 1e-8f);
    free(c.bytes);
    free(three.bytes);
}

static void extreme_rows(void) {
    cache c = cache_make(32, 1, 16, 16);
    int64_t slot = 17;
    float x[16] = {0}, k_out[16], v_out[16];
    write_one(&c, x, x, 0); /* zeros */
    CHECK(scale_at(&c.kv, false, 17, 0) == 0.0f && scale_at(&c.kv, true, 17, 0) == 0.0f);
    paged_kv_read(&c.kv, &slot, 1, k_out, v_out);
    for (int32_t d = 0; d < 16; d++) CHECK(k_out[d] == 0 && v_out[d] == 0);

    for (int32_t d = 0; d < 16; d++) x[d] = d % 3 ? 1e-40f : -0.0f; /* denormal */
    write_one(&c, x, x, 0);
    CHECK(scale_at(&c.kv, false, 17, 0) == 0.0f && scale_at(&c.kv, true, 17, 0) == 0.0f);

    for (int32_t d = 0; d < 16; d++) x[d] = d % 2 ? INFINITY : -3e38f; /* saturates */
    write_one(&c, x, x, 0);
    paged_kv_read(&c.kv, &slot, 1, k_out, v_out);
    for (int32_t d = 0; d < 16; d++) {
        CHECK(fabsf(k_out[d] / 0x1p100f - (d % 2 ? 1 : -1)) < 1e-5f);
        CHECK(fabsf(v_out[d] / 0x1p100f - (d % 2 ? 1 : -1)) < 1e-5f);
    }

    x[3] = NAN; /* makes its row NaN, counts once in K and once in V */
    x[4] = -NAN;
    write_one(&c, x, x, 4);
    CHECK(isnan(scale_at(&c.kv, false, 17, 0)) && isnan(scale_at(&c.kv, true, 17, 0)));
    paged_kv_read(&c.kv, &slot, 1, k_out, v_out);
    for (int32_t d = 0; d < 16; d++) {
        CHECK(isnan(k_out[d]) && isnan(v_out[d]));
        CHECK_EQ(value_at(&c.kv, false, 17, 0, d), 0);
        CHECK_EQ(value_at(&c.kv, true, 17, 0, d), 0);
    }
    free(c.bytes);
}

/* A channel that is a hundred times larger than the others costs them little. */
static void outlier_channel(void) {
    uint64_t rng = test_seed;
    cache c = cache_make(16, 1, 128, 4);
    float k[128], v[4] = {0}, out[128];
    int64_t slot = 5;
    for (int32_t round = 0; round < 100; round++) {
        double error = 0;
        for (int32_t d = 0; d < 128; d++) k[d] = draw_unit(&rng);
        k[37] = 100;
        paged_kv_write(&c.kv, k, 0, v, 0, &slot, 1, 0, 1);
        paged_kv_read(&c.kv, &slot, 1, out, NULL);
        for (int32_t d = 0; d < 128; d++) error += pow((double)(out[d] - k[d]), 2) / 128;
        /* Without rotation the step is 100 / 127, the error 0.23; with it, 1 / sqrt(128) of that. */
        CHECK(sqrt(error) < 0.035);
    }
    free(c.bytes);
}

/* ---- refusals ---- */

static void must_refuse(const paged_kv *kv, const char *what) {
    int64_t slot = 0;
    paged_error err = {0};
    CHECK_EQ(paged_kv_check_slots(kv, &slot, 1, &err), PAGED_ERR_INVALID_ARG);
    if (!strstr(err.message, what)) test_fail(__FILE__, __LINE__, "'%s' is not in '%s'", what, err.message);
}

static void wrong_caches_are_refused(void) {
    cache c = cache_make(32, 3, 16, 8);
    paged_kv kv = c.kv;
    kv.layout = PAGED_LAYOUT_PLAIN;
    must_refuse(&kv, "packed");
    kv = c.kv, kv.head_dim_k = 18;
    must_refuse(&kv, "head_dim_k 18");
    kv = c.kv, kv.head_dim_v = 2;
    must_refuse(&kv, "head_dim_v 2");
    kv = c.kv, kv.k_scale = NULL;
    must_refuse(&kv, "k_scale");
    kv = c.kv, kv.v_scale = NULL;
    must_refuse(&kv, "v_scale");
    kv = c.kv, kv.v_scale++;
    must_refuse(&kv, "aligned");
    kv = c.kv, kv.scale_head_stride = 124;
    must_refuse(&kv, "scale_head_stride is 124");
    kv = c.kv, kv.scale_block_stride = 124;
    must_refuse(&kv, "scale_block_stride is 124");
    kv = c.kv, kv.scale_block_stride = kv.scale_head_stride = 256;
    must_refuse(&kv, "overlap");
    kv = c.kv, kv.scale_block_stride = -4;
    must_refuse(&kv, "scale_block_stride is -4");
    kv = c.kv, kv.type = (paged_type)4;
    must_refuse(&kv, "type of the cache is 4");
    free(c.bytes);
}

#define TESTS(X)                                                                                             \
    X(rows_are_what_kv_h_says)                                                                               \
    X(rows_known_by_hand) X(extreme_rows) X(outlier_channel) X(wrong_caches_are_refused)
TEST_MAIN(TESTS)
