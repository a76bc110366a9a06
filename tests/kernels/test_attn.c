/* Goal: attention gives the textbook answer for every shape, and the same bits whatever does not matter.
 * Method: random batches over all types, layouts, head counts, head sizes, block sizes and lengths,
 * against a dense oracle in double; then the same batch in other threads, chunks, blocks, layouts, tables
 * and company, bit for bit. Every slot that is not written holds NaN or Inf. */
#include "kernels/world.h"

static const int32_t head_dims[] = {16, 64, 80, 96, 112, 128, 192, 256, 72, 40};
static const int32_t heads[][2] = {{1, 1}, {9, 3}, {28, 4}, {24, 8}, {14, 2}, {40, 8}, {32, 1}, {7, 7}};
static const int32_t block_sizes[] = {1, 3, 16, 32, 48, 64, 100, 1024};
static const int32_t thread_counts[] = {2, 3, 7, 64};
static const int32_t chunk_sizes[] = {1, 7, 16, 64};
static const int32_t windows[] = {1, 4, 17, 63, 64, 65, 200, 512, 700};

#define PICK(rng, array) (array)[draw(rng, (int32_t)(sizeof(array) / sizeof(array)[0]))]

static int32_t draw_length(uint64_t *rng, int32_t b) {
    const int32_t lengths[] = {0, 1, b - 1, b, b + 1, 63, 64, 65, 511, 512, 513, 1100, 3 * b + 5};
    return PICK(rng, lengths);
}

/* Decode, prefill, chunk, queries before all keys, or none, within a budget of multiplications. */
static int32_t draw_queries(uint64_t *rng, const shape *s, int32_t n_keys, int64_t budget) {
    int32_t n = 1;
    switch (draw(rng, 6)) {
    case 0:
        n = 0;
        break;
    case 1:
        n = n_keys;
        break;
    case 2:
        n = n_keys + 1 + draw(rng, 5);
        break;
    case 3:
        n = 1 + draw(rng, PAGED_MAX(n_keys, 1));
        break;
    default:
        break;
    }
    int64_t n_max = budget / ((int64_t)s->n_heads * s->dk * PAGED_MAX(n_keys, 1));
    return (int32_t)PAGED_MIN((int64_t)n, PAGED_MAX(n_max, 1));
}

static bool can_pack(const world *w, int32_t block_size) {
    int32_t unit = w->s.type == PAGED_TYPE_BF16 ? 2 : w->s.type == PAGED_TYPE_I8 ? 4 : 1;
    return block_size % PAGED_TILE == 0 && w->s.dk % unit == 0 && w->s.dv % unit == 0;
}

/* The same world elsewhere: other blocks, other layout, other block size, tables per head. */
static void same_bits_elsewhere(const world *w, const result *want, uint64_t *rng) {
    int32_t other_size = PICK(rng, block_sizes);
    if (w->s.type == PAGED_TYPE_I8 && other_size % PAGED_TILE) other_size = 48;
    place ordered = place_make(w, w->s.layout, w->s.block_size, true, false, true, rng);
    result r = run_all(w, &ordered, 1);
    must_equal(w, want, &r, "ordered blocks");
    place_free(&ordered);
    place per_head = place_make(w, w->s.layout, w->s.block_size, false, true, false, rng);
    r = run_all(w, &per_head, PICK(rng, thread_counts));
    must_equal(w, want, &r, "a table per head");
    place_free(&per_head);
    paged_layout layout = can_pack(w, other_size) && (draw(rng, 2) || w->s.type == PAGED_TYPE_I8)
                              ? PAGED_LAYOUT_PACKED
                              : PAGED_LAYOUT_PLAIN;
    place other = place_make(w, layout, other_size, false, false, true, rng);
    r = run_all(w, &other, 1);
    must_equal(w, want, &r, layout == w->s.layout ? "another block size" : "another layout and block size");
    place_free(&other);
}

/* Half of the cases are plain attention, the others have some of the rest. */
static void draw_features(shape *s, uint64_t *rng) {
    s->non_causal = draw(rng, 4) == 0;
    if (draw(rng, 2)) return;
    if (!s->non_causal && draw(rng, 2)) s->window = PICK(rng, windows);
    if (draw(rng, 3) == 0) s->softcap = draw(rng, 2) ? 5 : 50;
    s->alibi = draw(rng, 3) == 0;
    s->sinks = draw(rng, 3) == 0;
}

/* Where a query stands follows from the keys behind it, which a chunk that is not causal has already. */
static bool can_chunk(const world *w) {
    return !(w->s.non_causal && w->alibi);
}

/* Blocks before the window go, then last blocks become packed tails. */
static void same_bits_with_less(const world *w, place *p, const result *want, uint64_t *rng) {
    result r;
    if (w->s.window) {
        place_drop(w, p);
        r = run_all(w, p, PICK(rng, thread_counts));
        must_equal(w, want, &r, "without the blocks before the window");
        r = run_chunked(w, p, PICK(rng, chunk_sizes));
        must_equal(w, want, &r, "in chunks without the blocks before the window");
    }
    if (p->kv.layout != PAGED_LAYOUT_PACKED) return;
    place_tails(w, p);
    r = run_all(w, p, PICK(rng, thread_counts));
    must_equal(w, want, &r, "packed tails");
    if (!can_chunk(w)) return;
    r = run_chunked(w, p, PICK(rng, chunk_sizes));
    must_equal(w, want, &r, "in chunks with packed tails");
}

static void run_case(shape s, int64_t budget, uint64_t *rng) {
    int32_t n_seqs = 1 + draw(rng, 4), n_keys[SEQS_MAX], n_queries[SEQS_MAX];
    for (int32_t i = 0; i < n_seqs; i++) {
        n_keys[i] = draw_length(rng, s.block_size);
        n_queries[i] = draw_queries(rng, &s, n_keys[i], budget);
    }
    draw_features(&s, rng);
    world w = world_make(s, n_seqs, n_keys, n_queries,
                         (fill)(draw(rng, 2) ? draw(rng, N_FILLS) : FILL_UNIFORM), rng);
    place p = place_make(&w, s.layout, s.block_size, false, false, draw(rng, 2), rng);
    result want = run_all(&w, &p, 1), r;
    check_some(&w, &want, 4, rng);

    int32_t nth = PICK(rng, thread_counts);
    r = run_all(&w, &p, nth);
    must_equal(&w, &want, &r, "more threads");
    r = run_alone(&w, &p);
    must_equal(&w, &want, &r, "alone");
    if (can_chunk(&w)) {
        r = run_chunked(&w, &p, PICK(rng, chunk_sizes));
        must_equal(&w, &want, &r, "in chunks");
    }
    same_bits_elsewhere(&w, &want, rng);
    same_bits_with_less(&w, &p, &want, rng);
    result_free(&want);
    place_free(&p);
    world_free(&w);
}

/* A random batch of this shape; false where the layout does not allow it. */
static bool try_case(int32_t isa, shape s, uint64_t *rng) {
    if (s.layout == PAGED_LAYOUT_PACKED && s.block_size % PAGED_TILE) return false;
    if (s.layout == PAGED_LAYOUT_PLAIN && s.type == PAGED_TYPE_I8) return false;
    /* The reference is slow, above all in f16, so it gets smaller prefills. */
    run_case(s, is_slow() ? 100000 : isa == 0 ? 400000 : 4000000, rng);
    return true;
}

static void sample(int32_t isa, int32_t n_cases) {
    uint64_t rng = test_seed * 1000 + (uint64_t)isa;
    for (int32_t n = 0; n < n_cases;) {
        shape s = {.type = (paged_type)draw(&rng, 4),
                   .layout = (paged_layout)draw(&rng, 2),
                   .block_size = PICK(&rng, block_sizes),
                   .dk = PICK(&rng, head_dims)};
        int32_t pair = draw(&rng, (int32_t)(sizeof heads / sizeof heads[0]));
        s.n_heads = heads[pair][0];
        s.n_kv_heads = heads[pair][1];
        s.dv = draw(&rng, 4) ? s.dk : PICK(&rng, head_dims);
        n += try_case(isa, s, &rng);
    }
}

static void every_shape(int32_t isa) {
    uint64_t rng = test_seed * 1000 + (uint64_t)isa;
    for (int32_t type = 0; type < 4; type++)
        for (int32_t layout = 0; layout < 2; layout++)
            for (size_t d = 0; d < sizeof head_dims / sizeof head_dims[0]; d++)
                for (size_t h = 0; h < sizeof heads / sizeof heads[0]; h++)
                    for (size_t b = 0; b < sizeof block_sizes / sizeof block_sizes[0]; b++) {
                        shape s = {.type = (paged_type)type,
                                   .layout = (paged_layout)layout,
                                   .block_size = block_sizes[b],
                                   .n_heads = heads[h][0],
                                   .n_kv_heads = heads[h][1],
                                   .dk = head_dims[d],
                                   .dv = head_dims[d]};
                        try_case(isa, s, &rng);
                    }
}

static void grid_of(int32_t isa, int32_t n_cases) {
    if (!isa_use(isa)) {
        printf("%s: not on this machine\n", isa_names[isa]);
        return;
    }
    if (test_long && !is_slow())
        every_shape(isa);
    else
        sample(isa, is_slow() ? n_cases / 5 : n_cases);
}

static void grid_ref(void) {
    grid_of(0, 30);
}
static void grid_avx2(void) {
    grid_of(1, 150);
}
static void grid_avx512(void) {
    grid_of(2, 150);
}
static void grid_avx512_vnni(void) {
    grid_of(3, 150);
}
static void grid_avx512_bf16(void) {
    grid_of(4, 150);
}
static void grid_neon(void) {
    grid_of(5, 150);
}
static void grid_amx(void) {
    grid_of(6, 150);
}

/* Uneven head sizes take the tail paths of the kernels. */
static void odd_head_dims(void) {
    for (int32_t isa = 0; isa < N_ISAS; isa++) {
        uint64_t rng = test_seed + (uint64_t)isa;
        if (!isa_use(isa)) continue;
        for (int32_t dim = 1; dim <= 40; dim += isa == 0 ? 13 : is_slow() ? 5 : 1)
            for (int32_t type = 0; type < 4; type++) {
                shape s = {.type = (paged_type)type,
                           .n_heads = 6,
                           .n_kv_heads = 2,
                           .dk = dim,
                           .dv = 41 - dim,
                           .block_size = 16,
                           .layout = (paged_layout)draw(&rng, 2)};
                if (type == PAGED_TYPE_BF16) s.layout = PAGED_LAYOUT_PLAIN;
                if (type == PAGED_TYPE_I8) { /* every multiple of 4 */
                    s.layout = PAGED_LAYOUT_PACKED;
                    s.dk *= 4;
                    s.dv *= 4;
                }
                run_case(s, 20000, &rng);
            }
    }
}

/* One long sequence: many splits, cut between 64 threads, with rows that end in different splits. */
static void many_splits(void) {
    for (int32_t isa = 1; isa < N_ISAS; isa++) {
        if (!isa_use(isa)) continue;
        uint64_t rng = test_seed;
        shape s = {.type = PAGED_TYPE_F16,
                   .layout = PAGED_LAYOUT_PACKED,
                   .block_size = 32,
                   .n_heads = 4,
                   .n_kv_heads = 2,
                   .dk = 64,
                   .dv = 64};
        const int32_t n_keys[] = {is_slow() ? 1100 : 9000, 515, is_slow() ? 1030 : 4100},
                      n_queries[] = {1, 5, 8};
        world w = world_make(s, 3, n_keys, n_queries, FILL_UNIFORM, &rng);
        place p = place_make(&w, s.layout, s.block_size, false, false, false, &rng);
        result want = run_all(&w, &p, 1);
        check_all(&w, &want);
        for (int32_t nth = 2; nth <= 70; nth += nth < 10 ? 1 : 20) {
            result r = run_all(&w, &p, nth);
            must_equal(&w, &want, &r, "more threads");
        }
        result r = run_chunked(&w, &p, 1);
        must_equal(&w, &want, &r, "decode");
        result_free(&want);
        place_free(&p);
        world_free(&w);
    }
}

/* Prefill of 1100 tokens at once, in chunks of every size, token by token, and by many threads. */
static void chunks_of_a_prefill(void) {
    for (int32_t isa = 1; isa < N_ISAS; isa++) {
        if (!isa_use(isa)) continue;
        for (int32_t type = 0; type < 4; type++) {
            uint64_t rng = test_seed;
            shape s = {.type = (paged_type)type,
                       .layout = PAGED_LAYOUT_PACKED,
                       .block_size = 16,
                       .n_heads = 9,
                       .n_kv_heads = 3,
                       .dk = 64,
                       .dv = 64};
            const int32_t n = is_slow() ? 140 : 1100;
            world w = world_make(s, 1, &n, &n, FILL_UNIFORM, &rng);
            place p = place_make(&w, s.layout, s.block_size, false, false, false, &rng);
            result want = run_all(&w, &p, 2);
            check_some(&w, &want, 40, &rng);
            for (size_t i = 0; i < sizeof chunk_sizes / sizeof chunk_sizes[0]; i++) {
                result r = run_chunked(&w, &p, chunk_sizes[i]);
                must_equal(&w, &want, &r, "in chunks");
            }
            for (int32_t nth = 1; nth <= 64; nth = 3 * nth + 1) { /* cuts go between the rows of a head */
                result r = run_all(&w, &p, nth);
                must_equal(&w, &want, &r, "other threads");
            }
            result_free(&want);
            place_free(&p);
            world_free(&w);
        }
    }
}

#define TESTS(X)                                                                                             \
    X(grid_ref)                                                                                              \
    X(grid_avx2)                                                                                             \
    X(grid_avx512)                                                                                           \
    X(grid_avx512_vnni)                                                                                      \
    X(grid_avx512_bf16) X(grid_neon) X(grid_amx) X(odd_head_dims) X(many_splits) X(chunks_of_a_prefill)
TEST_MAIN(TESTS)
