/* Goal: the inputs on which other engines failed (D10 to D13 of the required behaviours, and the
 * addressing of the sample kernel that the project started from) give right answers, and what is wrong is
 * refused with its numbers. Method: one small batch per case against the dense oracle of world.h, with
 * every kernel of this machine. */
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/world.h"

static shape plain_shape(paged_type type, int32_t n_heads, int32_t n_kv_heads, int32_t dim,
                         int32_t block_size) {
    return (shape){.type = type,
                   .layout = PAGED_LAYOUT_PACKED,
                   .block_size = block_size,
                   .n_heads = n_heads,
                   .n_kv_heads = n_kv_heads,
                   .dk = dim,
                   .dv = dim};
}

/* Makes the world and checks every row, in the shape's layout. */
static void check_world(shape s, int32_t n_seqs, const int32_t *n_keys, const int32_t *n_queries, fill how,
                        bool infinite) {
    uint64_t rng = test_seed;
    world w = world_make(s, n_seqs, n_keys, n_queries, how, &rng);
    place p = place_make(&w, s.layout, s.block_size, false, false, infinite, &rng);
    result r = run_all(&w, &p, 2);
    check_all(&w, &r);
    result_free(&r);
    place_free(&p);
    world_free(&w);
}

#define EACH_ISA(isa)                                                                                        \
    for (int32_t isa = 0; isa < N_ISAS; isa++)                                                               \
        if (isa_use(isa) && !(isa == 0 && is_slow())) /* plain C is the same everywhere */
#define EACH_TYPE(type) for (int32_t type = 0; type < 4; type++)

/* D10: NaN, then Inf, in every slot that is not written. */
static void unused_tail(void) {
    EACH_ISA(isa)
    EACH_TYPE(type)
    for (int32_t infinite = 0; infinite < 2; infinite++)
        for (int32_t b = 16; b <= (is_slow() ? 16 : 64); b *= 2) {
            const int32_t n_keys[] = {1, b - 1, b, b + 1, 3 * b + 5}, decode[] = {1, 1, 1, 1, 1};
            shape s = plain_shape((paged_type)type, 6, 2, 64, b);
            check_world(s, 5, n_keys, decode, FILL_UNIFORM, infinite);
            check_world(s, 5, n_keys, n_keys, FILL_UNIFORM, infinite);
            s.layout = PAGED_LAYOUT_PLAIN;
            if (type != PAGED_TYPE_I8) check_world(s, 5, n_keys, n_keys, FILL_UNIFORM, infinite);
        }
}

/* kv_write stores no Inf, so a stored quiet NaN is made one: the scales of `slot`, or every NaN but the other
 * one that unused slots hold. */
static void nan_to_inf(place *p, int64_t slot) {
    if (p->kv.type == PAGED_TYPE_I8) {
        const float inf = INFINITY;
        int64_t at = slot / p->kv.block_size * p->kv.scale_block_stride + slot % p->kv.block_size * 4;
        for (int64_t h = 0; h < p->kv.n_kv_heads; h++, at += p->kv.scale_head_stride) {
            memcpy(p->kv.k_scale + at, &inf, sizeof inf);
            memcpy(p->kv.v_scale + at, &inf, sizeof inf);
        }
        return;
    }
    static const uint16_t nan_bits[3] = {0x7e00, 0x7fc0, 0x7fc0}, inf_bits[3] = {0x7c00, 0x7f80, 0x7f80};
    size_t size = (size_t)(p->kv.block_stride * p->kv.n_blocks), step = p->kv.type == PAGED_TYPE_F32 ? 4 : 2;
    for (size_t i = step - 2; i < size; i += step)
        if (memcmp(p->bytes + i, &nan_bits[p->kv.type], 2) == 0)
            memcpy(p->bytes + i, &inf_bits[p->kv.type], 2);
}

/* Key `bad` holds NaN or Inf: rows before it keep their bits, rows from it on show it. */
static void check_bad_key(const world *w, const result *want, int32_t bad, bool infinite) {
    uint64_t rng = test_seed;
    int32_t dim = w->s.dk, n_heads = w->s.n_heads, n = w->s.n_kv_heads * dim;
    place p = place_make(w, w->s.layout, w->s.block_size, true, false, false, &rng);
    float *x = take((size_t)n, sizeof *x);
    int64_t slot = bad;
    for (int32_t i = 0; i < n; i++) x[i] = NAN;
    CHECK_EQ(paged_kv_write(&p.kv, x, 0, x, 0, &slot, 1, 0, 1), 2 * n);
    free(x);
    if (infinite) nan_to_inf(&p, slot);
    result r = run_all(w, &p, 1);
    CHECK(memcmp(r.out, want->out, (size_t)(bad * n_heads * dim) * sizeof(float)) == 0);
    CHECK(memcmp(r.lse, want->lse, (size_t)(bad * n_heads) * sizeof(float)) == 0);
    CHECK(!isfinite(r.out[bad * n_heads * dim]));
    result_free(&r);
    place_free(&p);
}

/* Also D10: keys that are valid, but behind a causal row, must not reach it even where 0 * Inf would be
 * NaN. */
static void later_keys_never_leak(void) {
    EACH_ISA(isa) EACH_TYPE(type) for (int32_t layout = 0; layout < 2; layout++) {
        uint64_t rng = test_seed;
        shape s = plain_shape((paged_type)type, 6, 2, 72, 16);
        s.layout = (paged_layout)layout;
        if (type == PAGED_TYPE_I8 && s.layout == PAGED_LAYOUT_PLAIN) continue;
        const int32_t n = 150;
        world w = world_make(s, 1, &n, &n, FILL_UNIFORM, &rng);
        place clean = place_make(&w, s.layout, 16, true, false, false, &rng);
        result want = run_all(&w, &clean, 1);
        for (int32_t bad = 1; bad < n; bad += isa == 0 || is_slow() ? 67 : 13)
            check_bad_key(&w, &want, bad, bad % 2 == 0);
        result_free(&want);
        place_free(&clean);
        world_free(&w);
    }
}

/* The same with bits compared in every grouping, where windows begin and end among the rows of a step: rows
 * that see the bad key too, alone and with others that do not. */
static void bad_keys_in_groups(void) {
    EACH_ISA(isa)
    for (int32_t window = 0; window <= 20; window += 20)
        for (int32_t bad = 3; bad < 90; bad += 17) {
            uint64_t rng = test_seed + (uint64_t)bad;
            shape s = plain_shape(PAGED_TYPE_BF16, 8, 2, window ? 128 : 40, 32);
            s.window = window;
            const int32_t n = 97;
            world w = world_make(s, 1, &n, &n, FILL_UNIFORM, &rng);
            place p = place_make(&w, s.layout, 32, true, false, false, &rng);
            int64_t row = 2 * s.dv, slot = bad, n_bad = 0;
            for (int64_t i = 0; i < row; i += 7, n_bad++) w.v[bad * row + i] = NAN; /* of some elements */
            CHECK_EQ(paged_kv_write(&p.kv, w.k + bad * row, 0, w.v + bad * row, 0, &slot, 1, 0, 1), n_bad);
            for (int32_t infinite = 0; infinite < 2; infinite++) {
                if (infinite) nan_to_inf(&p, bad);
                result want = run_all(&w, &p, 1), r;
                for (int32_t q = 0; q < n; q++)
                    for (int32_t h = 0; h < 8; h++) {
                        const float *out = want.out + (q * 8 + h) * s.dv;
                        bool sees = bad <= q && (window == 0 || bad > q - window);
                        for (int32_t d = 0; d < s.dv; d++)
                            CHECK_EQ(isfinite(out[d]), !sees || (h / 4 * s.dv + d) % 7 != 0);
                    }
                for (int32_t chunk = 1; chunk < 30; chunk = 2 * chunk + 1) {
                    r = run_chunked(&w, &p, chunk);
                    must_equal(&w, &want, &r, "in chunks");
                }
                r = run_all(&w, &p, 5);
                must_equal(&w, &want, &r, "more threads");
                result_free(&want);
            }
            place_free(&p);
            world_free(&w);
        }
}

/* D11: rows that may look at no key. */
static void empty_rows(void) {
    EACH_ISA(isa) EACH_TYPE(type) {
        const int32_t n_keys[] = {0, 1, 17, 3, 0}, one[] = {1, 1, 1, 1, 1}, before[] = {4, 3, 30, 3, 1};
        shape s = plain_shape((paged_type)type, 9, 3, 64, 16);
        check_world(s, 5, n_keys, one, FILL_UNIFORM, false);
        check_world(s, 5, n_keys, before, FILL_UNIFORM, true);
        uint64_t rng = test_seed;
        world w = world_make(s, 5, n_keys, before, FILL_UNIFORM, &rng);
        place p = place_make(&w, s.layout, 16, false, false, false, &rng);
        result r = run_all(&w, &p, 1);
        /* Sequence 2 has 17 keys and 30 queries: the first 13 see nothing. */
        for (int32_t i = 0; i < 13 * 9; i++) {
            CHECK(r.lse[w.first_q[2] * 9 + i] == -INFINITY);
            for (int32_t d = 0; d < 64; d++) {
                float x = r.out[(w.first_q[2] * 9 + i) * 64 + d];
                CHECK(x == 0 && !signbit(x));
            }
        }
        CHECK(isfinite(r.lse[(w.first_q[2] + 13) * 9]));
        result_free(&r);
        place_free(&p);
        world_free(&w);
    }
}

/* D12: products of 9e4, rows of equal huge scores, differences of hundreds between scores. */
static void no_overflow(void) {
    EACH_ISA(isa) EACH_TYPE(type) {
        const int32_t n_keys[] = {1, 70, 600, 33}, n_queries[] = {1, 3, 2, 33};
        shape s = plain_shape((paged_type)type, 8, 2, 128, 32);
        check_world(s, 4, n_keys, n_queries, FILL_OUTLIER, false);
        check_world(s, 4, n_keys, n_queries, FILL_LOW, false);
        check_world(s, 4, n_keys, n_queries, FILL_HUGE, false);
        check_world(s, 4, n_keys, n_queries, FILL_DENORMAL, false);
    }
}

/* Scores that are exactly s0 - step * t, so that the answer is known without a tolerance for the scores. */
static void ladder(float first, float step) {
    uint64_t rng = test_seed;
    shape s = plain_shape(PAGED_TYPE_F32, 1, 1, 1, 16);
    const int32_t n = 200, one = 1;
    world w = world_make(s, 1, &n, &one, FILL_UNIFORM, &rng);
    for (int32_t t = 0; t < n; t++) w.k[t] = first - step * (float)t;
    w.q[0] = 1;
    place p = place_make(&w, s.layout, 16, false, false, false, &rng);
    result r = run_all(&w, &p, 1);
    check_all(&w, &r);
    CHECK(isfinite(r.out[0]) && isfinite(r.lse[0]));
    result_free(&r);
    place_free(&p);
    world_free(&w);
}

static void ladders(void) {
    EACH_ISA(isa) {
        ladder(0, 200);
        ladder(-6e4f, 0);
        ladder(6e4f, 600);
        ladder(-3e4f, -200); /* grows with every key: the state is rescaled in every step */
        ladder(0, -0.02f);   /* grows by less than the threshold */
        ladder(1e30f, 1e28f);
        ladder(-1e38f, -5e35f);
        ladder(0, 1.6e36f); /* the last scores overflow to -inf: weights of zero */
    }
}

/* D13: head counts and head sizes, prefill and decode. */
static void head_counts_and_sizes(void) {
    static const int32_t heads[][2] = {{28, 4}, {24, 8}, {14, 2}, {9, 3}, {40, 8}, {71, 1}, {128, 1}};
    static const int32_t dims[] = {64, 80, 96, 112, 128, 192, 256};
    EACH_ISA(isa) EACH_TYPE(type) for (size_t h = 0; h < 7; h++) for (size_t d = 0; d < 7; d++) {
        if (isa == 0 && (h + d) % 7) continue;
        const int32_t n_keys[] = {19, 5}, prefill[] = {19, 2}, decode[] = {1, 1};
        shape s = plain_shape((paged_type)type, heads[h][0], heads[h][1], dims[d], 16);
        check_world(s, 2, n_keys, prefill, FILL_UNIFORM, false);
        check_world(s, 2, n_keys, decode, FILL_UNIFORM, false);
    }
}

/* Strides of q, a NULL lse, an own scale. */
static void strides_and_scale(void) {
    uint64_t rng = test_seed;
    shape s = plain_shape(PAGED_TYPE_F16, 6, 2, 64, 16);
    const int32_t n_keys = 40, n_queries = 7;
    world w = world_make(s, 1, &n_keys, &n_queries, FILL_UNIFORM, &rng);
    place p = place_make(&w, s.layout, 16, false, false, false, &rng);
    result want = run_all(&w, &p, 1);
    paged_attn_config config = {.struct_size = sizeof config,
                                .n_heads = 6,
                                .n_kv_heads = 2,
                                .head_dim_k = 64,
                                .block_size = 16,
                                .layout = PAGED_LAYOUT_PACKED,
                                .max_q = 7,
                                .max_k = 40,
                                .scale = 0.25f};
    paged_attn *attn;
    CHECK_EQ(paged_attn_create(&config, &attn, NULL), PAGED_OK);
    const int32_t cu[] = {0, 7};
    paged_batch batch = {
        .cu_seqlens_q = cu,
        .tables = {.blocks = p.blocks, .seqlens_k = &n_keys, .n_seqs = 1, .max_blocks = p.max_blocks}};
    CHECK_EQ(paged_attn_plan(attn, &batch, &p.kv, NULL), PAGED_OK);
    float q[7 * 400], out[7 * 384];
    /* Half the query with twice the scale of 1/8: powers of two, so the same bits. */
    for (int32_t i = 0; i < 7; i++)
        for (int32_t d = 0; d < 384; d++) q[i * 400 + d] = w.q[i * 384 + d] / 2;
    paged_attn_run(attn, &p.kv, &(paged_attn_io){.q = q, .q_stride = 400, .out = out}, 0, 1);
    CHECK(memcmp(out, want.out, sizeof out) == 0);
    paged_attn_free(attn);
    paged_attn_free(NULL);
    result_free(&want);
    place_free(&p);
    world_free(&w);
}

/* ---- real threads ---- */

typedef struct worker {
    paged_attn *attn;
    const world *w;
    const place *p;
    const result *r;
    pthread_barrier_t *barrier;
    int32_t ith, nth;
} worker;

static void *work(void *user) {
    worker *self = user;
    for (int32_t repeat = 0; repeat < 20; repeat++) {
        paged_attn_run(self->attn, &self->p->kv,
                       &(paged_attn_io){.q = self->w->q, .out = self->r->out, .lse = self->r->lse}, self->ith,
                       self->nth);
        pthread_barrier_wait(self->barrier);
        paged_attn_merge(self->attn, &(paged_attn_io){.out = self->r->out, .lse = self->r->lse}, self->ith,
                         self->nth);
        pthread_barrier_wait(self->barrier);
    }
    return NULL;
}

static void real_threads(void) {
    enum { N = 4 };
    uint64_t rng = test_seed;
    shape s = plain_shape(PAGED_TYPE_F16, 4, 2, 64, 16);
    const int32_t n_keys[] = {2100, 700, 5}, n_queries[] = {1, 2, 5};
    paged_cpu_mask(~0u);
    world w = world_make(s, 3, n_keys, n_queries, FILL_UNIFORM, &rng);
    place p = place_make(&w, s.layout, 16, false, false, false, &rng);
    result want = run_all(&w, &p, 1), r = result_make(&w);
    paged_attn *attn = attn_make(&w, &p, N);
    const int32_t cu[] = {0, 1, 3, 8};
    paged_batch batch = {.cu_seqlens_q = cu,
                         .tables = {.blocks = p.blocks,
                                    .seq_stride = p.max_blocks,
                                    .seqlens_k = n_keys,
                                    .n_seqs = 3,
                                    .max_blocks = p.max_blocks}};
    CHECK_EQ(paged_attn_plan(attn, &batch, &p.kv, NULL), PAGED_OK);
    CHECK(paged_attn_needs_merge(attn));
    pthread_barrier_t barrier;
    pthread_t threads[N];
    worker workers[N];
    pthread_barrier_init(&barrier, NULL, N);
    for (int32_t i = 0; i < N; i++) {
        workers[i] = (worker){attn, &w, &p, &r, &barrier, i, N};
        CHECK_EQ(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    for (int32_t i = 0; i < N; i++) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&barrier);
    CHECK(result_equal(&w, &want, &r));
    paged_attn_free(attn);
    result_free(&want);
    result_free(&r);
    place_free(&p);
    world_free(&w);
}

/* ---- the sample kernel ---- */

/* The kernel of the document that started the project, in its own arithmetic: pages of PAGE bytes with a K
 * half and a V half; the write goes to page (head + id), the read to page id, and it reads one page
 * whatever the length. */
enum { PAGE = 4096, PAGE_TOKENS = PAGE / 2 / (64 * 4), HEADS = 2 };

static void sample_write(uint8_t *pool, const int32_t *table, int32_t head, int32_t t, const float *k,
                         const float *v) {
    size_t page = (size_t)(head + table[t / PAGE_TOKENS]) * PAGE, offset = (size_t)(t % PAGE_TOKENS) * 256;
    memcpy(pool + page + offset, k, 256);
    memcpy(pool + page + PAGE / 2 + offset, v, 256);
}

static void sample_attend(const uint8_t *pool, const int32_t *table, const float *q, int32_t n_keys,
                          double *out) {
    double sum = 0;
    for (int32_t d = 0; d < 64; d++) out[d] = 0;
    for (int32_t t = 0; t < PAGED_MIN(n_keys, PAGE_TOKENS); t++) {
        float k[64], v[64];
        double dot = 0;
        memcpy(k, pool + (size_t)table[0] * PAGE + (size_t)t * 256, sizeof k);
        memcpy(v, pool + (size_t)table[0] * PAGE + PAGE / 2 + (size_t)t * 256, sizeof v);
        for (int32_t d = 0; d < 64; d++) dot += (double)q[d] * k[d];
        double weight = exp(dot / 8);
        sum += weight;
        for (int32_t d = 0; d < 64; d++) out[d] += weight * v[d];
    }
    for (int32_t d = 0; d < 64; d++) out[d] /= sum;
}

static double sample_error(const world *w, int32_t n_keys, int32_t head) {
    static uint8_t pool[PAGE * 64];
    const int32_t tables[HEADS][4] = {{0, 1, 2, 3}, {4, 5, 6, 7}}; /* as its AllocateBlock hands them out */
    memset(pool, 0, sizeof pool);
    for (int32_t h = 0; h < HEADS; h++)
        for (int32_t t = 0; t < n_keys; t++)
            sample_write(pool, tables[h], h, t, w->k + (t * HEADS + h) * 64, w->v + (t * HEADS + h) * 64);
    double got[64], want[64], lse, size, worst = 0;
    sample_attend(pool, tables[head], w->q + head * 64, n_keys, got);
    dense_row(w, 0, 0, head, want, &lse, &size);
    for (int32_t d = 0; d < 64; d++) worst = fmax(worst, fabs(got[d] - want[d]));
    return worst;
}

static void sample_kernel_is_wrong(void) {
    const int32_t lengths[] = {PAGE_TOKENS, 3 * PAGE_TOKENS}, one = 1;
    paged_cpu_mask(~0u);
    for (int32_t i = 0; i < 2; i++) {
        uint64_t rng = test_seed;
        shape s = {.type = PAGED_TYPE_F32,
                   .block_size = PAGE_TOKENS,
                   .n_heads = HEADS,
                   .n_kv_heads = HEADS,
                   .dk = 64,
                   .dv = 64};
        world w = world_make(s, 1, &lengths[i], &one, FILL_UNIFORM, &rng);
        /* Head 0 of one page is the one case that it gets right. */
        CHECK((sample_error(&w, lengths[i], 0) < 1e-5) == (lengths[i] == PAGE_TOKENS));
        CHECK(sample_error(&w, lengths[i], 1) > 1e-2);
        place p = place_make(&w, PAGED_LAYOUT_PLAIN, PAGE_TOKENS, false, true, false, &rng);
        result r = run_all(&w, &p, 1);
        check_all(&w, &r);
        result_free(&r);
        place_free(&p);
        world_free(&w);
    }
}

/* ---- refusals ---- */

typedef struct setting {
    paged_attn_config config;
    paged_kv kv;
    int32_t blocks[2][8], n_keys[2], cu[3], rows[2], first_k[2], tails[2][1];
    paged_shared shared[2];
    paged_batch batch;
    float q[6 * 64 * 8], out[6 * 64 * 8];
    uint16_t pool[8 * 2 * 2 * 16 * 64];
} setting;

static void setting_init(setting *s) {
    memset(s, 0, sizeof *s);
    s->config = (paged_attn_config){.struct_size = sizeof s->config,
                                    .n_heads = 6,
                                    .n_kv_heads = 2,
                                    .head_dim_k = 64,
                                    .block_size = 16,
                                    .layout = PAGED_LAYOUT_PACKED,
                                    .max_q = 8,
                                    .max_seqs = 2,
                                    .max_k = 100};
    s->kv = (paged_kv){.k = (uint8_t *)s->pool,
                       .v = (uint8_t *)s->pool + 4096,
                       .block_stride = 8192,
                       .k_head_stride = 2048,
                       .v_head_stride = 2048,
                       .n_blocks = 8,
                       .block_size = 16,
                       .n_kv_heads = 2,
                       .head_dim_k = 64,
                       .head_dim_v = 64,
                       .layout = PAGED_LAYOUT_PACKED};
    for (int32_t i = 0; i < 8; i++) s->blocks[0][i] = s->blocks[1][i] = i < 3 ? i : -1;
    s->n_keys[0] = 40;
    s->n_keys[1] = 20;
    s->cu[1] = 1;
    s->cu[2] = 5;
    s->rows[1] = 1;
    s->batch = (paged_batch){
        .cu_seqlens_q = s->cu,
        .tables = {
            .blocks = s->blocks[0], .seq_stride = 8, .seqlens_k = s->n_keys, .n_seqs = 2, .max_blocks = 8}};
}

/* Plans the setting; then run and merge must leave the output alone. */
static void check_refused(setting *s, paged_status status, const char *says, int line) {
    paged_attn *attn;
    paged_error err = {.status = PAGED_OK};
    setting good;
    setting_init(&good);
    CHECK_EQ(paged_attn_create(&s->config, &attn, NULL), PAGED_OK);
    CHECK_EQ(paged_attn_plan(attn, &good.batch, &good.kv, NULL), PAGED_OK);
    paged_status got = paged_attn_plan(attn, &s->batch, &s->kv, &err);
    if (got != status || err.status != status || !strstr(err.message, says))
        test_fail(__FILE__, line, "status %d, \"%s\" does not say \"%s\"", (int)got, err.message, says);
    memset(s->out, 1, sizeof s->out);
    paged_attn_run(attn, &s->kv, &(paged_attn_io){.q = s->q, .out = s->out}, 0, 1);
    paged_attn_merge(attn, &(paged_attn_io){.out = s->out}, 0, 1);
    for (size_t i = 0; i < sizeof s->out; i++) CHECK(((const uint8_t *)s->out)[i] == 1);
    CHECK(!paged_attn_needs_merge(attn));
    paged_attn_free(attn);
}

#define REFUSED(change, status, says)                                                                        \
    do {                                                                                                     \
        static setting s;                                                                                    \
        setting_init(&s);                                                                                    \
        change;                                                                                              \
        check_refused(&s, PAGED_ERR_##status, says, __LINE__);                                               \
    } while (0)

/* Tables are read in bulk: a wrong entry is found wherever it lies, and what lies behind the last one is not
 * looked at. */
static void plan_reads_entries(void) {
    enum { N = 150 };
    static const int32_t wrong[] = {-1, N, INT32_MIN, INT32_MAX};
    static setting s;
    setting_init(&s);
    const long page = sysconf(_SC_PAGESIZE);
    uint8_t *pages =
        mmap(NULL, (size_t)(2 * page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED && mprotect(pages + page, (size_t)page, PROT_NONE) == 0);
    s.kv.n_blocks = N;
    s.config.max_k = N * 16;
    s.batch.tables.n_seqs = 1;
    s.batch.tables.max_blocks = N;
    EACH_ISA(isa) {
        paged_attn *attn;
        CHECK_EQ(paged_attn_create(&s.config, &attn, NULL), PAGED_OK);
        for (int32_t n = 1; n <= N; n++) {
            int32_t *blocks = (int32_t *)(void *)(pages + page) - n; /* nothing lies behind the last one */
            for (int32_t i = 0; i < n; i++) blocks[i] = (i * 7) % N;
            s.batch.tables.blocks = blocks;
            s.n_keys[0] = n * 16;
            CHECK_EQ(paged_attn_plan(attn, &s.batch, &s.kv, NULL), PAGED_OK);
            for (int32_t at = 0; at < n; at++) {
                char says[64];
                int32_t kept = blocks[at];
                blocks[at] = wrong[(at + n) % 4];
                snprintf(says, sizeof says, "entry %d of its table is %d,", at, blocks[at]);
                paged_error err = {.status = PAGED_OK};
                CHECK_EQ(paged_attn_plan(attn, &s.batch, &s.kv, &err), PAGED_ERR_INVALID_ARG);
                CHECK(strstr(err.message, says) != NULL);
                blocks[at] = kept;
            }
        }
        paged_attn_free(attn);
    }
    munmap(pages, (size_t)(2 * page));
    paged_cpu_mask(~0u);
}

static void plan_refuses(void) {
    paged_cpu_mask(~0u);
    REFUSED(s.blocks[0][2] = 8, INVALID_ARG, "sequence 0 (row 0, KV head 0): entry 2 of its table is 8");
    REFUSED(s.blocks[1][1] = -1, INVALID_ARG, "sequence 1 (row 1, KV head 0): entry 1 of its table is -1");
    REFUSED((s.blocks[1][0] = 99, s.rows[0] = 1, s.batch.tables.rows = s.rows), INVALID_ARG,
            "sequence 0 (row 1,");
    REFUSED((s.batch.tables.head_stride = 8, s.batch.tables.seq_stride = 16, s.batch.tables.n_seqs = 1,
             s.blocks[1][1] = 70),
            INVALID_ARG, "sequence 0 (row 0, KV head 1): entry 1 of its table is 70");
    REFUSED(s.n_keys[1] = -1, INVALID_ARG, "sequence 1: seqlens_k is -1");
    REFUSED(s.n_keys[1] = 101, LIMIT, "sequence 1: 101 keys, made for 100");
    REFUSED((s.n_keys[0] = 65, s.batch.tables.max_blocks = 4), INVALID_ARG,
            "sequence 0: 65 keys do not fit 4 blocks of 16");
    REFUSED(s.cu[0] = 1, INVALID_ARG, "cu_seqlens_q[0] is 1");
    REFUSED(s.cu[2] = 0, INVALID_ARG, "sequence 1: cu_seqlens_q goes down from 1 to 0");
    REFUSED(s.cu[2] = 9, LIMIT, "query 8 is beyond max_q 8");
    REFUSED(s.batch.tables.n_seqs = 3, LIMIT, "3 sequences, made for 2");
    REFUSED(s.batch.tables.n_seqs = -1, INVALID_ARG, "n_seqs is -1");
    REFUSED((s.rows[1] = -5, s.batch.tables.rows = s.rows), INVALID_ARG, "sequence 1: row -5");
    REFUSED(s.batch.tables.seq_stride = 7, INVALID_ARG, "seq_stride is 7");
    REFUSED(s.batch.tables.seq_stride = INT64_MAX, INVALID_ARG, "seq_stride");
    REFUSED(s.batch.tables.head_stride = -8, INVALID_ARG, "head_stride is -8");
    REFUSED(s.batch.tables.head_stride = 8, INVALID_ARG, "seq_stride is 8 with 2 rows");
    REFUSED(s.batch.tables.seqlens_k = NULL, INVALID_ARG, "seqlens_k is NULL");
    REFUSED(s.batch.tables.blocks = NULL, INVALID_ARG, "blocks is NULL");
    REFUSED(s.batch.cu_seqlens_q = NULL, INVALID_ARG, "cu_seqlens_q is NULL");
    REFUSED(s.kv.block_stride = 2046, INVALID_ARG,
            "block_stride is 2046 bytes; a block of a head takes 2048");
    REFUSED(s.kv.block_stride = 4094, INVALID_ARG, "let blocks overlap");
    REFUSED(s.kv.block_stride = 8193, INVALID_ARG, "block_stride is 8193");
    REFUSED(s.kv.block_stride = INT64_MAX, INVALID_ARG, "block_stride");
    REFUSED(s.kv.k_head_stride = 2000, INVALID_ARG, "k_head_stride is 2000");
    REFUSED(s.kv.v_head_stride = -2048, INVALID_ARG, "v_head_stride is -2048");
    REFUSED(s.kv.n_blocks = 2, INVALID_ARG, "entry 2 of its table is 2, not in 0 ... 1");
    REFUSED(s.kv.n_blocks = 0, INVALID_ARG, "entry 0");
    REFUSED(s.kv.head_dim_v = 32, INVALID_ARG,
            "head_dim_v of the cache is 32, the attention object was made for 64");
    REFUSED(s.kv.type = PAGED_TYPE_BF16, INVALID_ARG, "type of the cache is 2");
    REFUSED(s.kv.layout = PAGED_LAYOUT_PLAIN, INVALID_ARG, "layout of the cache is 0");
    REFUSED(s.kv.block_size = 32, INVALID_ARG, "block_size of the cache is 32");
    REFUSED(s.kv.k++, INVALID_ARG, "not aligned");
    REFUSED(s.kv.v = NULL, INVALID_ARG, "v of the cache is NULL");
}

static void plan_refuses_windows_and_tails(void) {
    paged_cpu_mask(~0u);
#define FIRST_K (s.batch.tables.first_k = s.first_k)
#define TAILS   (s.batch.tables.tail_tiles = s.tails[0])
    /* Sequence 0 has 40 keys and one query, sequence 1 has 20 and four, which stand at 16 … 19. */
    REFUSED((FIRST_K, s.first_k[0] = 1), INVALID_ARG, "sequence 0: key 0 is needed, but first_k is 1");
    REFUSED((FIRST_K, s.config.window = 10, s.first_k[1] = 8), INVALID_ARG,
            "sequence 1: key 7 is needed, but first_k is 8");
    REFUSED((FIRST_K, s.config.window = 10, s.first_k[0] = 41), INVALID_ARG,
            "sequence 0: first_k is 41, not in 0 ... 40");
    REFUSED((FIRST_K, s.first_k[1] = -1), INVALID_ARG, "sequence 1: first_k is -1, not in 0 ... 20");
    REFUSED((FIRST_K, s.config.window = 9, s.first_k[0] = 31, s.blocks[0][0] = -1, s.blocks[0][1] = -7),
            INVALID_ARG, "sequence 0 (row 0, KV head 0): entry 1 of its table is -7");
    REFUSED((TAILS, s.blocks[0][2] = -1, s.tails[0][0] = -1), INVALID_ARG,
            "sequence 0 (row 0): tail tile 0 is -1, not in 0 ... 7, with 40 keys");
    REFUSED((TAILS, s.blocks[1][1] = -1, s.tails[1][0] = 8), INVALID_ARG,
            "sequence 1 (row 1): tail tile 0 is 8, not in 0 ... 7, with 20 keys");
    REFUSED((TAILS, s.blocks[0][1] = -1), INVALID_ARG,
            "sequence 0 (row 0, KV head 0): entry 1 of its table is -1"); /* not the last block */
    REFUSED((TAILS, s.blocks[0][2] = -2), INVALID_ARG,
            "sequence 0 (row 0, KV head 0): entry 2 of its table is -2"); /* only -1 means a tail */
    REFUSED((s.kv.k_head_stride = s.kv.v_head_stride = 0), INVALID_ARG, "k_head_stride is 0");
}

static void plan_refuses_cascades(void) {
    paged_cpu_mask(~0u);
#define SHARED(first, n, tokens)                                                                             \
    (s.batch.shared = s.shared, s.batch.n_shared = 1, s.config.max_shared_q = 8,                             \
     s.shared[0] = (paged_shared){first, n, tokens})
    REFUSED((SHARED(0, 2, 20), s.blocks[1][0] = 4), INVALID_ARG,
            "sequences 0 and 1 (KV head 0) share 20 tokens, but entry 0 of their tables is 0 and 4");
    REFUSED(SHARED(0, 2, 21), INVALID_ARG, "shared[0]: sequence 1 has 20 keys, fewer than the 21");
    REFUSED(SHARED(0, 3, 20), INVALID_ARG, "shared[0]: 3 sequences from 0 on, not in 0 ... 1");
    REFUSED(SHARED(-1, 2, 20), INVALID_ARG, "shared[0]: 2 sequences from -1 on");
    REFUSED(SHARED(INT32_MAX, INT32_MAX, 20), INVALID_ARG, "shared[0]: 2147483647 sequences");
    REFUSED(SHARED(0, 0, 20), INVALID_ARG, "shared[0]: 0 sequences");
    REFUSED(SHARED(0, 2, -1), INVALID_ARG, "shared[0]: n_tokens is -1");
    REFUSED((SHARED(0, 2, 20), s.shared[1] = (paged_shared){1, 1, 0}, s.batch.n_shared = 2), INVALID_ARG,
            "shared[1]: 1 sequences from 1 on, not in 2 ... 1");
    REFUSED((SHARED(0, 2, 20), s.config.max_shared_q = 4), LIMIT,
            "shared[0]: query 4 of sequences that share, made for 4");
    REFUSED(s.batch.n_shared = -1, INVALID_ARG, "n_shared is -1");
    REFUSED(s.batch.n_shared = 1, INVALID_ARG, "n_shared is 1, shared is NULL");
}

/* A plain layout has no tiles. */
static void tails_are_packed(void) {
    static setting s;
    paged_attn *attn;
    paged_error err;
    setting_init(&s);
    s.config.layout = s.kv.layout = PAGED_LAYOUT_PLAIN;
    TAILS;
    CHECK_EQ(paged_attn_create(&s.config, &attn, NULL), PAGED_OK);
    CHECK_EQ(paged_attn_plan(attn, &s.batch, &s.kv, &err), PAGED_ERR_INVALID_ARG);
    CHECK_STR(err.message, "tail_tiles are given, but the layout of the cache is plain");
    paged_attn_free(attn);
}

/* Entries that no query reads are not looked at. */
static void plan_accepts(void) {
    static setting s;
    paged_attn *attn;
    setting_init(&s);
    CHECK_EQ(paged_attn_create(&s.config, &attn, NULL), PAGED_OK);
    s.blocks[0][3] = 1000;
    CHECK_EQ(paged_attn_plan(attn, &s.batch, &s.kv, NULL), PAGED_OK);
    s.cu[1] = 0; /* sequence 0 has no query */
    s.blocks[0][0] = -1;
    CHECK_EQ(paged_attn_plan(attn, &s.batch, &s.kv, NULL), PAGED_OK);
    s.batch.tables.n_seqs = 0;
    CHECK_EQ(paged_attn_plan(attn, &s.batch, &s.kv, NULL), PAGED_OK);
    paged_attn_run(attn, &s.kv, &(paged_attn_io){.q = s.q, .out = s.out}, 0, 1);
    paged_attn_free(attn);
}

#define NOT_MADE(change, says)                                                                               \
    do {                                                                                                     \
        static setting s;                                                                                    \
        paged_attn *attn = (paged_attn *)(void *)&s;                                                         \
        paged_error err;                                                                                     \
        setting_init(&s);                                                                                    \
        change;                                                                                              \
        CHECK_EQ(paged_attn_create(&s.config, &attn, &err), PAGED_ERR_INVALID_ARG);                          \
        CHECK(attn == (paged_attn *)(void *)&s);                                                             \
        if (!strstr(err.message, says)) test_fail(__FILE__, __LINE__, "%s", err.message);                    \
    } while (0)

static void create_refuses(void) {
    NOT_MADE(s.config.struct_size = 0, "struct_size is 0");
    NOT_MADE(s.config.n_heads = 0, "n_heads is 0");
    NOT_MADE(s.config.n_heads = 7, "n_heads 7 is no multiple of n_kv_heads 2");
    NOT_MADE(s.config.n_kv_heads = -2, "n_kv_heads is -2");
    NOT_MADE(s.config.head_dim_k = 513, "head_dim_k is 513");
    NOT_MADE(s.config.head_dim_v = -1, "head_dim_v is -1");
    NOT_MADE(s.config.block_size = 24, "block_size 24 is no multiple of 16");
    NOT_MADE(s.config.block_size = 1040, "block_size is 1040");
    NOT_MADE(s.config.type = (paged_type)4, "type is 4");
    NOT_MADE(s.config.layout = (paged_layout)2, "layout is 2");
    NOT_MADE((s.config.type = PAGED_TYPE_BF16, s.config.head_dim_k = 63), "must be even");
    NOT_MADE((s.config.type = PAGED_TYPE_I8, s.config.head_dim_k = 62), "multiples of 4");
    NOT_MADE((s.config.type = PAGED_TYPE_I8, s.config.head_dim_v = 62), "multiples of 4");
    NOT_MADE((s.config.type = PAGED_TYPE_I8, s.config.layout = PAGED_LAYOUT_PLAIN), "packed layout");
    static const float slopes[] = {1, 1, 1, NAN, 1, 1};
    NOT_MADE(s.config.window = -1, "window is -1");
    NOT_MADE((s.config.window = 5, s.config.non_causal = true), "a window of 5 asks for causal attention");
    NOT_MADE(s.config.softcap = -50, "softcap is -50");
    NOT_MADE(s.config.softcap = NAN, "softcap is nan");
    NOT_MADE(s.config.alibi = slopes, "ALiBi slope of head 3 is not finite");
    NOT_MADE(s.config.max_shared_q = -1, "max_shared_q is -1");
    NOT_MADE(s.config.scale = INFINITY, "scale is not finite");
    NOT_MADE(s.config.n_threads_max = -1, "n_threads_max is -1");
    NOT_MADE(s.config.max_k = INT32_MAX, "max_k is 2147483647");
}

/* ---- allocations that fail ---- */

static int32_t n_allowed, n_live;

static void *failing_alloc(void *user, size_t size, size_t align) {
    (void)user;
    if (n_allowed-- <= 0) return NULL;
    n_live++;
    return aligned_alloc(align, (size + align - 1) / align * align + (size ? 0 : align));
}

static void counting_free(void *user, void *ptr) {
    (void)user;
    n_live -= ptr != NULL;
    free(ptr);
}

static void allocations_fail(void) {
    const paged_allocator allocator = {failing_alloc, counting_free, NULL};
    static setting s;
    int32_t n_failed = 0;
    setting_init(&s);
    s.config.n_threads_max = 4;
    s.config.max_k = 2000;
    s.config.max_shared_q = 8;
    static const float slopes[6] = {1};
    s.config.alibi = slopes;
    paged_allocator_set(&allocator);
    for (int32_t n = 0;; n++) {
        paged_attn *attn = NULL;
        paged_error err;
        n_allowed = n;
        paged_status status = paged_attn_create(&s.config, &attn, &err);
        if (status == PAGED_OK) {
            n_allowed = 0; /* the plan takes nothing */
            CHECK_EQ(paged_attn_plan(attn, &s.batch, &s.kv, &err), PAGED_OK);
            paged_attn_run(attn, &s.kv, &(paged_attn_io){.q = s.q, .out = s.out}, 0, 1);
            paged_attn_free(attn);
            break;
        }
        CHECK_EQ(status, PAGED_ERR_NO_MEMORY);
        CHECK(attn == NULL);
        CHECK_EQ(n_live, 0);
        n_failed++;
    }
    paged_allocator_set(NULL);
    CHECK_EQ(n_live, 0);
    CHECK(n_failed >= 7);
}

static void names_its_kernels(void) {
    static setting s;
    setting_init(&s);
    EACH_ISA(isa) {
        paged_attn *attn;
        CHECK_EQ(paged_attn_create(&s.config, &attn, NULL), PAGED_OK);
        CHECK_STR(paged_attn_kernels(attn), isa_names[isa]);
        paged_attn_free(attn);
    }
    paged_cpu_mask(~0u);
}

#define TESTS(X)                                                                                             \
    X(unused_tail)                                                                                           \
    X(later_keys_never_leak)                                                                                 \
    X(bad_keys_in_groups)                                                                                    \
    X(empty_rows)                                                                                            \
    X(no_overflow)                                                                                           \
    X(ladders)                                                                                               \
    X(head_counts_and_sizes)                                                                                 \
    X(strides_and_scale)                                                                                     \
    X(real_threads)                                                                                          \
    X(sample_kernel_is_wrong)                                                                                \
    X(plan_reads_entries)                                                                                    \
    X(plan_refuses)                                                                                          \
    X(plan_refuses_windows_and_tails)                                                                        \
    X(plan_refuses_cascades)                                                                                 \
    X(tails_are_packed) X(plan_accepts) X(create_refuses) X(allocations_fail) X(names_its_kernels)
TEST_MAIN(TESTS)
