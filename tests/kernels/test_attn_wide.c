/* Goal: what goes beyond plain attention: softcap, ALiBi, windows, sinks, packed tails, cascades, and the
 * page of the document that the project started from, are right where other engines failed (D14, D15 of the
 * required behaviours), give the same bits whatever does not matter, and never read what is not there.
 * Method: known answers and the dense oracle of world.h, with every kernel of this machine; memory that ends
 * at a page which must not be touched. */
#include <float.h>
#include <sys/mman.h>

#include "kernels/world.h"
#include "ops/attn.h"

#define EACH_ISA(isa)                                                                                        \
    for (int32_t isa = 0; isa < N_ISAS; isa++)                                                               \
        if (isa_use(isa))
#define EACH_TYPE(type) for (int32_t type = 0; type < 4; type++)

static shape shape_of(int32_t type, int32_t layout, int32_t n_heads, int32_t n_kv_heads, int32_t dim,
                      int32_t block_size) {
    return (shape){.type = (paged_type)type,
                   .layout = (paged_layout)layout,
                   .block_size = block_size,
                   .n_heads = n_heads,
                   .n_kv_heads = n_kv_heads,
                   .dk = dim,
                   .dv = dim};
}

/* A type that exists in the layout. */
static int32_t draw_type(uint64_t *rng, int32_t layout) {
    return draw(rng, layout == PAGED_LAYOUT_PACKED ? 4 : 3);
}

/* ---- shapes ---- */

static void check_shape(shape s, int32_t n_keys, int32_t n_queries, uint64_t *rng) {
    world w = world_make(s, 1, &n_keys, &n_queries, FILL_UNIFORM, rng);
    place p = place_make(&w, s.layout, s.block_size, false, false, true, rng);
    result r = run_all(&w, &p, 2);
    check_some(&w, &r, 3, rng);
    result_free(&r);
    place_free(&p);
    world_free(&w);
}

/* D13: every head count up to 128 with every number of KV heads that divides it. */
static void every_head_ratio(void) {
    EACH_ISA(isa) {
        uint64_t rng = test_seed;
        for (int32_t n = 1; n <= 128; n++)
            for (int32_t n_kv = 1; n_kv <= n; n_kv++)
                if (n % n_kv == 0 && (test_long || draw(&rng, is_slow() ? 150 : n_kv == 1 ? 1 : 4) == 0)) {
                    int32_t layout = draw(&rng, 2);
                    check_shape(shape_of(draw_type(&rng, layout), layout, n, n_kv, 16, 16), 21,
                                1 + draw(&rng, 3), &rng);
                }
    }
}

/* Every block size, and K and V of different size among those that models have. */
static void every_block_size(void) {
    static const int32_t dims[] = {64, 80, 96, 112, 128, 192, 256};
    EACH_ISA(isa) {
        uint64_t rng = test_seed;
        int32_t step = test_long ? 1 : is_slow() ? 300 : isa == 0 ? 41 : 11;
        for (int32_t b = 1 + draw(&rng, step); b <= 1024; b += step) {
            int32_t layout = b % PAGED_TILE == 0 && draw(&rng, 2);
            shape s = shape_of(draw_type(&rng, layout), layout, 2, 1, dims[draw(&rng, 7)], b);
            s.dv = dims[draw(&rng, 7)];
            check_shape(s, b + 1 + draw(&rng, 100), 2, &rng);
        }
        for (int32_t b = 16; b <= 1024; b += 16 * step) {
            shape s = shape_of(draw(&rng, 4), PAGED_LAYOUT_PACKED, 2, 1, dims[draw(&rng, 7)], b);
            s.dv = dims[draw(&rng, 7)];
            check_shape(s, b + 1 + draw(&rng, 100), 2, &rng);
        }
    }
}

/* ---- scores ---- */

/* The kernels' own functions on 64 scores against double. */
static void softcap_and_alibi_of_scores(void) {
    EACH_ISA(isa) {
        const paged__kernels *kernels = paged__kernels_choose(paged_cpu_flags());
        uint64_t rng = test_seed;
        for (int32_t n = 0; n < 20000; n++) {
            float cap = exp2f(12 * draw_unit(&rng)), slope = draw_unit(&rng), s[64], x[64];
            int32_t first = draw(&rng, 100000) - 100000;
            for (int32_t i = 0; i < 64; i++)
                x[i] = s[i] = cap * draw_unit(&rng) * exp2f(12 * draw_unit(&rng));
            kernels->softcap(s, cap);
            for (int32_t i = 0; i < 64; i++) {
                double want = cap * tanh((double)x[i] / cap);
                CHECK(fabs(s[i] - want) <= 4e-7 * fabs(want));
            }
            memcpy(s, x, sizeof s);
            kernels->alibi(s, slope, first);
            for (int32_t i = 0; i < 64; i++) {
                double want = x[i] + (double)slope * (first + i);
                CHECK(fabs(s[i] - want) <= 0x1p-24 * fabs(want));
            }
        }
        float edge[64] = {0, INFINITY, -INFINITY, NAN, FLT_MAX, -FLT_MAX, 1e-38f, 0x1p-149f};
        kernels->softcap(edge, 50);
        CHECK(edge[0] == 0 && edge[1] == 50 && edge[2] == -50 && isnan(edge[3]));
        CHECK(edge[4] == 50 && edge[5] == -50 && fabsf(edge[6]) <= 1.1e-38f && fabsf(edge[7]) <= 0x1p-148f);
    }
}

/* D14: the cap is used, 0 is off, and off differs from on. */
static void softcap_matters(void) {
    EACH_ISA(isa) EACH_TYPE(type) {
        const float caps[] = {0, 5, 50};
        result r[3];
        uint64_t rng = test_seed;
        const int32_t n_keys[] = {70, 5}, n_queries[] = {3, 1};
        shape s = shape_of(type, PAGED_LAYOUT_PACKED, 6, 2, 64, 16);
        world w = world_make(s, 2, n_keys, n_queries, FILL_UNIFORM, &rng);
        for (int64_t i = 0; i < (int64_t)w.n_q * 6 * 64; i++) w.q[i] *= 20; /* scores of some tens */
        for (int32_t i = 0; i < 3; i++) {
            w.s.softcap = caps[i];
            place p = place_make(&w, s.layout, 16, false, false, true, &rng);
            r[i] = run_all(&w, &p, 1);
            check_all(&w, &r[i]);
            place_free(&p);
        }
        CHECK(!result_equal(&w, &r[0], &r[1]) && !result_equal(&w, &r[1], &r[2]));
        for (int32_t i = 0; i < 3; i++) result_free(&r[i]);
        world_free(&w);
    }
}

/* D14: the published slopes for 6 and 12 heads; every context as a prefill and as steps of one token. */
static void alibi_of_any_head_count(void) {
    static const int32_t heads[] = {6, 12, 1, 71};
    float slopes[12];
    fill_slopes(slopes, 12); /* the values of the ALiBi paper's code for 12 heads */
    const double first[] = {0.5, 0.25, 0.125}, extra[] = {0.70710678, 0.35355339, 0.17677670, 0.08838835};
    for (int32_t i = 0; i < 3; i++) CHECK(fabs(slopes[i] - first[i]) < 1e-7);
    for (int32_t i = 0; i < 4; i++) CHECK(fabs(slopes[8 + i] - extra[i]) < 1e-7);
    EACH_ISA(isa) for (int32_t h = 0; h < 4; h++) for (int32_t n = 1; n <= 70; n += n < 17 ? 1 : 23) {
        uint64_t rng = test_seed;
        shape s = shape_of(PAGED_TYPE_F16, PAGED_LAYOUT_PACKED, heads[h], 1, 32, 16);
        s.alibi = true;
        world w = world_make(s, 1, &n, &n, FILL_UNIFORM, &rng);
        place p = place_make(&w, s.layout, 16, false, false, false, &rng);
        result want = run_all(&w, &p, 1), r = run_chunked(&w, &p, 1);
        check_all(&w, &want);
        must_equal(&w, &want, &r, "token by token");
        result_free(&want);
        place_free(&p);
        world_free(&w);
    }
}

/* ---- windows ---- */

/* D15: W = 4, 10 tokens, equal scores: row i is the mean of its min(i + 1, 4) last values. */
static void window_counts_itself(void) {
    static const int32_t sizes[] = {4, 1, 16}, chunks[] = {10, 3, 1};
    EACH_ISA(isa) for (int32_t b = 0; b < 3; b++) {
        uint64_t rng = test_seed;
        const int32_t n = 10;
        shape s = shape_of(PAGED_TYPE_F32, sizes[b] == 16, 1, 1, 8, sizes[b]);
        s.window = 4;
        world w = world_make(s, 1, &n, &n, FILL_EQUAL, &rng);
        for (int32_t i = 0; i < 10 * 8; i++) w.v[i] = (float)(i / 8);
        place p = place_make(&w, s.layout, sizes[b], false, false, true, &rng);
        for (int32_t c = 0; c < 3; c++) {
            result r = run_chunked(&w, &p, chunks[c]);
            for (int32_t i = 0; i < 10; i++) {
                float mean = i < 4 ? (float)i / 2 : (float)i - 1.5f;
                CHECK(fabsf(r.out[i * 8] - mean) < 1e-5f);
            }
            check_all(&w, &r);
            result_free(&r);
        }
        place_free(&p);
        world_free(&w);
    }
}

/* Windows that begin and end everywhere in steps and splits, without the blocks that are not needed. */
static void windows_of_long_sequences(void) {
    static const int32_t windows[] = {1, 100, 511, 512, 513, 1500, 4096};
    for (int32_t isa = 1; isa < N_ISAS; isa++) {
        if (!isa_use(isa)) continue;
        EACH_TYPE(type) for (int32_t i = type == PAGED_TYPE_I8; i < 7; i += type == PAGED_TYPE_I8 ? 2 : 1) {
            if (is_slow() && i % 3) continue;
            uint64_t rng = test_seed + (uint64_t)i;
            const int32_t n_keys[] = {1024, 1025, 2000, 3000}, n_queries[] = {1, 1, 4, 60};
            shape s = shape_of(type, i % 2, 8, 2, 64, i % 2 ? 32 : 24);
            s.window = windows[i];
            world w = world_make(s, 4, n_keys, n_queries, FILL_UNIFORM, &rng);
            place p = place_make(&w, s.layout, s.block_size, false, i % 3 == 0, true, &rng);
            result want = run_all(&w, &p, 1);
            check_some(&w, &want, 5, &rng);
            place_drop(&w, &p);
            for (int32_t nth = 2; nth <= 64; nth = nth * 3 + 1) {
                result r = run_all(&w, &p, nth);
                must_equal(&w, &want, &r, "threads");
            }
            result r = run_chunked(&w, &p, 7);
            must_equal(&w, &want, &r, "in chunks");
            result_free(&want);
            place_free(&p);
            world_free(&w);
        }
    }
}

/* ---- sinks ---- */

/* One key of score 0 and a sink of x: the weight of the key is 1 / (1 + e^x), for any x. */
static void sinks_of_any_size(void) {
    EACH_ISA(isa) {
        static const float sizes[] = {-INFINITY, -1e30f, -200, -1, 0, 1, 80, 95, 200, 3000, 1e30f};
        uint64_t rng = test_seed;
        const int32_t n_keys[] = {1, 0}, n_queries[] = {2, 1}; /* query 0 and sequence 1 see no key */
        shape s = shape_of(PAGED_TYPE_F32, PAGED_LAYOUT_PLAIN, 1, 1, 8, 16);
        s.sinks = true;
        world w = world_make(s, 2, n_keys, n_queries, FILL_EQUAL, &rng);
        memset(w.q, 0, 3 * 8 * sizeof(float));
        place p = place_make(&w, s.layout, 16, false, false, true, &rng);
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
            double x = w.sinks[0] = sizes[i];
            result r = run_all(&w, &p, 1);
            CHECK(r.out[0] == 0 && r.out[16] == 0 && r.lse[0] == sizes[i] && r.lse[2] == sizes[i]);
            CHECK(fabs(r.out[8] - 0.25 / (1 + exp(x))) <= 1e-7);
            CHECK(fabs(r.lse[1] - (x > 700 ? x : log1p(exp(x)))) <= 2e-7 * (1 + fabs(x)));
            result_free(&r);
        }
        place_free(&p);
        world_free(&w);
    }
}

/* ---- cascade ---- */

/* Sequences with common prefixes of 512 to 1100 tokens among others; every thread count, with and without. */
static void cascade_case(shape s, const paged_shared *groups, int32_t n_groups, bool tails, uint64_t *rng) {
    const int32_t n_keys[] = {700, 1100, 1030, 3, 1024, 600, 1700, 1024},
                  n_queries[] = {1, 1, 7, 1, 1, 2, 0, s.alibi ? 1 : 30};
    world w = world_make(s, 8, n_keys, n_queries, FILL_UNIFORM, rng);
    for (int32_t i = 0; i < n_groups; i++) world_share(&w, groups[i]);
    place p = place_make(&w, s.layout, s.block_size, false, draw(rng, 2), true, rng);
    result want = run_all(&w, &p, 1);
    check_some(&w, &want, 3, rng);
    for (int32_t i = 0; i < n_groups; i++) place_share(&w, &p, groups[i]);
    if (tails) place_tails(&w, &p);
    for (int32_t nth = 1; nth <= 64; nth = nth * 2 + 1) {
        result r = run_all(&w, &p, nth);
        must_equal(&w, &want, &r, "cascade");
    }
    p.n_shared = 0;
    result r = run_all(&w, &p, 3);
    must_equal(&w, &want, &r, "common blocks without a cascade");
    result_free(&want);
    place_free(&p);
    world_free(&w);
}

static void cascades(void) {
    static const paged_shared groups[][2] = {{{0, 3, 700}, {4, 4, 600}},  {{1, 2, 1030}, {4, 2, 512}},
                                             {{0, 2, 511}, {4, 1, 1024}}, /* nothing to share */
                                             {{0, 8, 3}, {8, 0, 0}},      {{4, 4, 600}, {8, 0, 0}},
                                             {{6, 2, 1024}, {8, 0, 0}}};
    EACH_ISA(isa) {
        uint64_t rng = test_seed;
        for (int32_t i = 0; i < (isa == 0 || is_slow() ? 6 : 36); i++) {
            shape s = shape_of(draw_type(&rng, i % 2), i % 2, 4, 2, 32,
                               i % 2 ? 16 << draw(&rng, 4) : 1 + draw(&rng, 90));
            s.non_causal = draw(&rng, 6) == 0;
            s.alibi = draw(&rng, 3) == 0;
            s.sinks = draw(&rng, 2);
            s.softcap = draw(&rng, 3) ? 0 : 5;
            s.window = s.non_causal || draw(&rng, 4) ? 0 : 900;
            cascade_case(s, groups[i % 6], i % 6 < 3 ? 2 : 1,
                         s.layout == PAGED_LAYOUT_PACKED && draw(&rng, 2), &rng);
        }
    }
}

/* Heads that a thread takes along, of 8, 16 and 32 rows each; own keys: none, some, more than a split. */
static void cascade_of_many_heads(void) {
    enum { N = SEQS_MAX };
    static const int32_t heads[][2] = {{14, 14}, {20, 10}, {24, 6}},
                         n_own[] = {1, 0, 70, 600, 33, 0, 130, 64};
    int32_t n_keys[N], n_queries[N];
    for (int32_t i = 0; i < N; i++) n_keys[i] = 1024 + n_own[i % 8], n_queries[i] = 1;
    EACH_ISA(isa) {
        uint64_t rng = test_seed;
        for (int32_t i = 0; i < (isa == 0 || is_slow() ? 3 : 12); i++) {
            int32_t type = is_slow() ? draw_type(&rng, PAGED_LAYOUT_PACKED) : i / 3;
            shape s = shape_of(type, PAGED_LAYOUT_PACKED, heads[i % 3][0], heads[i % 3][1], 16, 32);
            world w = world_make(s, N, n_keys, n_queries, FILL_UNIFORM, &rng);
            world_share(&w, (paged_shared){0, N, 1024});
            place p = place_make(&w, s.layout, 32, false, draw(&rng, 2), true, &rng);
            result want = run_all(&w, &p, 1);
            check_some(&w, &want, 3, &rng);
            place_share(&w, &p, (paged_shared){0, N, 1024});
            for (int32_t nth = 1; nth <= 9; nth += 1 + nth / 3) {
                result r = run_all(&w, &p, nth);
                must_equal(&w, &want, &r, "cascade");
            }
            result_free(&want);
            place_free(&p);
            world_free(&w);
        }
    }
}

/* The common blocks are read once: where they are shared by many, the plan has far less to do. */
static void cascade_reads_once(void) {
    enum { N = SEQS_MAX };
    uint64_t rng = test_seed;
    int32_t n_keys[N], n_queries[N];
    for (int32_t i = 0; i < N; i++) n_keys[i] = 2048 + 10 * i + 1, n_queries[i] = 1;
    shape s = shape_of(PAGED_TYPE_F16, PAGED_LAYOUT_PACKED, 2, 1, 32, 64);
    paged_cpu_mask(~0u);
    world w = world_make(s, N, n_keys, n_queries, FILL_UNIFORM, &rng);
    world_share(&w, (paged_shared){0, N, 2048});
    place p = place_make(&w, s.layout, 64, false, false, true, &rng);
    result want = run_all(&w, &p, 1);
    place_share(&w, &p, (paged_shared){0, N, 2048});
    piece pieces[N];
    for (int32_t i = 0; i < N; i++) pieces[i] = (piece){i, 0, 1};
    paged_attn *attn = attn_make(&w, &p, 2);
    result r = result_make(&w);
    run_pieces(&w, &p, attn, pieces, N, 2, &r);
    int64_t cost = attn->cost, n_steps = 0, n_units = attn->n_entries;
    for (int32_t i = 0; i < attn->n_entries + attn->n_owns; i++) {
        const paged__entry *entry =
            i < attn->n_entries ? &attn->entries[i] : &attn->owns[i - attn->n_entries];
        n_steps += (entry->n_keys - entry->split_first * PAGED_ATTN_SPLIT + 63) / 64;
    }
    CHECK_EQ(n_units, 1);
    CHECK_EQ(attn->n_owns, N);
    CHECK_EQ(n_steps, 2048 / 64 + 7 + 2); /* 1, 11 … 61 own keys are a step, 71 are two */
    p.n_shared = 0;
    run_pieces(&w, &p, attn, pieces, N, 2, &r);
    CHECK(cost * 2 < attn->cost);
    paged_attn_free(attn);
    must_equal(&w, &want, &r, "cascade");
    result_free(&want);
    place_free(&p);
    world_free(&w);
}

/* ---- the page of the first document ---- */

/* 16 KiB pages with a K half and a V half of one head, f16, head size 64: 64 tokens a page. A table a head,
 * in one of two pools: a region of pages a head (kv_cache of shape [1, heads, pages]), or one pool for all
 * heads, in which page p of any head lies at p * 16 KiB. */
enum { PAGE_BYTES = 16 * 1024, PAGE_TOKENS = 64, PAGES = 40, PAGE_HEADS = 4 };

static paged_kv page_kv(uint8_t *pool, bool regions) {
    return (paged_kv){.k = pool,
                      .v = pool + PAGE_BYTES / 2,
                      .block_stride = PAGE_BYTES,
                      .k_head_stride = regions ? (int64_t)PAGES * PAGE_BYTES : 0,
                      .v_head_stride = regions ? (int64_t)PAGES * PAGE_BYTES : 0,
                      .n_blocks = PAGES,
                      .block_size = PAGE_TOKENS,
                      .n_kv_heads = PAGE_HEADS,
                      .head_dim_k = 64,
                      .head_dim_v = 64};
}

static void page_of_the_document(void) {
    EACH_ISA(isa)
    for (int32_t regions = 0; regions < 2; regions++)
        for (int32_t layout = 0; layout < 2; layout++) {
            uint64_t rng = test_seed;
            const int32_t n_keys = 500, n_queries = 3;
            shape s = shape_of(PAGED_TYPE_F16, layout, PAGE_HEADS, PAGE_HEADS, 64, PAGE_TOKENS);
            world w = world_make(s, 1, &n_keys, &n_queries, FILL_UNIFORM, &rng);
            place p = {.per_head = true, .max_blocks = 8};
            size_t size = (size_t)PAGES * PAGE_BYTES * (regions ? PAGE_HEADS : 1);
            p.bytes = take(size, 1);
            memset(p.bytes, 0xff, size);
            p.kv = page_kv(p.bytes, regions);
            p.kv.layout = (paged_layout)layout;
            p.blocks = take(PAGE_HEADS * 8, sizeof *p.blocks);
            for (int32_t h = 0; h < PAGE_HEADS; h++)
                for (int32_t i = 0; i < 8; i++) p.blocks[h * 8 + i] = (i * 5 + h * 11 + 3) % PAGES;
            place_write(&w, &p);
            /* Head 1, token 64: page blocks[1][1] of its region or of the pool; both halves. */
            int64_t at = (regions ? PAGES : 0) + p.blocks[8 + 1];
            if (layout == PAGED_LAYOUT_PLAIN) {
                uint16_t k, v;
                memcpy(&k, p.bytes + at * PAGE_BYTES, 2);
                memcpy(&v, p.bytes + at * PAGE_BYTES + PAGE_BYTES / 2, 2);
                CHECK(paged__f16_to_f32(k) == w.k[(64 * PAGE_HEADS + 1) * 64]);
                CHECK(paged__f16_to_f32(v) == w.v[(64 * PAGE_HEADS + 1) * 64]);
            }
            for (int32_t nth = 1; nth < 4; nth++) {
                result r = run_all(&w, &p, nth);
                check_all(&w, &r);
                result_free(&r);
            }
            place_free(&p);
            world_free(&w);
        }
}

/* The document's own arithmetic, in halves: AllocateBlock, and where WriteKVToPages writes and
 * ComputePagedAttention reads. (test_attn_cases.c computes with it.) */
enum { CAPACITY = PAGE_BYTES / 2 };

static int32_t sample_allocate(const uint32_t *table, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        bool used = false;
        for (int32_t j = 0; j < n; j++) used = used || table[j] == (uint32_t)i;
        if (!used) return i;
    }
    return 0;
}

static void sample_of_the_document_is_wrong(void) {
    int64_t written[2][2], read[2][2];
    for (int64_t head = 0; head < 2; head++)
        for (int64_t id = 0; id < 2; id++) {
            written[head][id] = head * CAPACITY + id * CAPACITY;
            read[head][id] = id * CAPACITY;
        }
    CHECK(written[0][1] == written[1][0]); /* two heads write one page */
    CHECK(written[0][1] == read[0][1] && written[1][1] != read[1][1]);
    /* It copies a whole page for each half: K lies where V belongs, V ends behind the page. */
    int64_t v_end = written[0][0] + CAPACITY / 2 + CAPACITY;
    CHECK(v_end > written[0][0] + CAPACITY);
    uint32_t table[4] = {0, 1, 2, 3};
    CHECK_EQ(sample_allocate(table, 4), 0); /* none is free, and block 0 is given away again */

    /* Ours: heads of one pool take different pages, and a write touches the slot that it names, no more. */
    uint8_t *pool = take((size_t)4 * PAGE_BYTES, 1);
    paged_kv kv = page_kv(pool, false);
    kv.n_blocks = 4;
    kv.n_kv_heads = 1;
    float k[64], v[64];
    for (int32_t d = 0; d < 64; d++) k[d] = 1, v[d] = 2;
    int64_t slot = 2 * PAGE_TOKENS + PAGE_TOKENS - 1; /* the last of page 2 */
    paged_kv_write(&kv, k, 0, v, 0, &slot, 1, 0, 1);
    for (int64_t i = 0; i < 4 * PAGE_BYTES; i++) {
        int64_t o = i - 2 * PAGE_BYTES;
        bool is_k = o >= CAPACITY - 128 && o < CAPACITY, is_v = o >= 2 * CAPACITY - 128 && o < 2 * CAPACITY;
        CHECK(is_k || is_v || pool[i] == 0);
        if (i % 2) CHECK_EQ(pool[i], is_k ? 0x3c : is_v ? 0x40 : 0);
    }
    free(pool);
}

/* ---- guard pages ---- */

/* The cache ends where memory ends, its last block partly filled; before it is nothing either. */
static void reads_no_further(void) {
    EACH_ISA(isa) EACH_TYPE(type) for (int32_t layout = type == PAGED_TYPE_I8; layout < 2; layout++) {
        uint64_t rng = test_seed;
        const int32_t n_keys = 150, n_queries = 20;
        shape s = shape_of(type, layout, 3, 1, 40, layout ? 16 : 5);
        s.window = 70;
        world w = world_make(s, 1, &n_keys, &n_queries, FILL_UNIFORM, &rng);
        place p = place_make(&w, s.layout, s.block_size, true, false, false, &rng);
        result want = run_all(&w, &p, 1);
        place_drop(&w, &p);
        int32_t n_blocks = (n_keys + s.block_size - 1) / s.block_size, first = p.first_k[0] / s.block_size;
        int64_t stride = p.kv.block_stride, page = 4096, size = (n_blocks * stride + page - 1) / page * page;
        uint8_t *map = mmap(NULL, (size_t)(size + 2 * page), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(map != MAP_FAILED);
        CHECK_EQ(mprotect(map + page, (size_t)size, PROT_READ | PROT_WRITE), 0);
        uint8_t *begin =
            map + page + size - n_blocks * stride; /* of block 0; the last one ends at the guard */
        memcpy(begin, p.bytes, (size_t)(n_blocks * stride));
        /* Pages wholly before the first block that is still there. */
        int64_t gone = (begin + first * stride - map) / page * page;
        CHECK_EQ(mprotect(map, (size_t)gone, PROT_NONE), 0);
        uint8_t *bytes = p.bytes;
        p.kv.v = begin + (p.kv.v - p.kv.k);
        if (type == PAGED_TYPE_I8) {
            p.kv.k_scale = begin + (p.kv.k_scale - p.kv.k);
            p.kv.v_scale = begin + (p.kv.v_scale - p.kv.k);
        }
        p.kv.k = begin;
        p.kv.n_blocks = n_blocks;
        for (int32_t chunk = 1; chunk <= 20; chunk += 19) {
            result r = run_chunked(&w, &p, chunk);
            must_equal(&w, &want, &r, "beside guard pages");
        }
        munmap(map, (size_t)(size + 2 * page));
        p.bytes = bytes;
        result_free(&want);
        place_free(&p);
        world_free(&w);
    }
}

#define SHAPES(X)   X(every_head_ratio) X(every_block_size)
#define SCORES(X)   X(softcap_and_alibi_of_scores) X(softcap_matters) X(alibi_of_any_head_count)
#define WINDOWS(X)  X(window_counts_itself) X(windows_of_long_sequences) X(sinks_of_any_size)
#define CASCADES(X) X(cascades) X(cascade_of_many_heads) X(cascade_reads_once)
#define PAGES(X)    X(page_of_the_document) X(sample_of_the_document_is_wrong) X(reads_no_further)
#define TESTS(X)    SHAPES(X) SCORES(X) WINDOWS(X) CASCADES(X) PAGES(X)
TEST_MAIN(TESTS)
