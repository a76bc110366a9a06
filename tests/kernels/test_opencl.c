/* Goal: the OpenCL device computes what the CPU does: the textbook answer for every shape, the same bits
 * whatever does not matter, the same bytes in the cache; and it fails like the CPU. Method: the worlds of
 * world.h on the first device of this machine (PoCL in our tests), against the dense oracle in double.
 * Without a device there is nothing to test, and that is printed. */
#include "kernels/world.h"

#include <time.h>
#include <unistd.h>

#include "ops/opencl/cl.h"
#include "paged/mem.h"
#include "paged/opencl.h"

static paged_cl *device; /* of the whole program */

/* False: no device here, and that has been said. Programs are kept where run-tests says, since building them
 * is most of the time. */
static bool device_open(void) {
    const char *cache = getenv("PAGED_CACHE_DIR");
    char dir[512] = "";
    const paged_cl_config config = {.struct_size = sizeof config, .cache_dir = dir};
    paged_error err;
    if (device) return true;
    if (cache) snprintf(dir, sizeof dir, "%s/opencl", cache);
    paged_status s = paged_cl_open(&config, &device, &err);
    if (s == PAGED_ERR_UNSUPPORTED) printf("skipped: %s\n", err.message);
    CHECK(s == PAGED_OK || s == PAGED_ERR_UNSUPPORTED);
    return s == PAGED_OK;
}

/* ---- a place on the device ---- */

typedef struct away {
    paged_arena arena;
    paged_kv kv;
} away;

static paged_kv kv_away(const place *p) {
    paged_kv kv = p->kv;
    uint8_t **const parts[] = {&kv.k, &kv.v, &kv.k_scale, &kv.v_scale};
    for (int i = 0; i < 4; i++)
        if (*parts[i]) *parts[i] = (uint8_t *)(uintptr_t)(PAGED_ARENA_AWAY + (size_t)(*parts[i] - p->bytes));
    return kv;
}

static size_t place_bytes(const place *p) {
    return (size_t)(p->kv.block_stride * p->kv.n_blocks);
}

/* The bytes of the place as they are now. */
static away away_make(const place *p) {
    away a = {.kv = kv_away(p)};
    paged_error err;
    if (paged_cl_arena_create(device, place_bytes(p), &a.arena, &err))
        test_fail(__FILE__, __LINE__, "%s", err.message);
    CHECK_EQ(paged_cl_block_write(&a.arena, 0, place_bytes(p), p->bytes, NULL, &err), PAGED_OK);
    CHECK_EQ(paged_cl_transfers_wait(&a.arena, &err), PAGED_OK);
    return a;
}

static void away_free(away *a) {
    a->arena.destroy(a->arena.ctx);
}

static paged_attn_config config_of(const world *w, const place *p) {
    int32_t max_k = 1;
    for (int32_t i = 0; i < w->n_seqs; i++) max_k = PAGED_MAX(max_k, w->n_keys[i]);
    return (paged_attn_config){.struct_size = sizeof(paged_attn_config),
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
                               .max_shared_q = w->n_q,
                               .max_q = PAGED_MAX(w->n_q, 1),
                               .max_seqs = PAGED_MAX(w->n_seqs, 1),
                               .max_k = max_k};
}

static paged_cl_attn *attn_away(const world *w, const place *p, const away *a) {
    const paged_attn_config config = config_of(w, p);
    paged_cl_attn *attn = NULL;
    paged_error err;
    if (paged_cl_attn_create(device, &a->arena, &config, &attn, &err))
        test_fail(__FILE__, __LINE__, "%s", err.message);
    return attn;
}

/* ---- runs ---- */

/* One batch of pieces, with gaps in q and out; as run_pieces of world.h. */
static void run_batch(const world *w, const place *p, const away *a, paged_cl_attn *attn, const piece *pieces,
                      int32_t n, result *r) {
    int32_t cu[SEQS_MAX + 1] = {0}, rows[SEQS_MAX], n_keys[SEQS_MAX], first_k[SEQS_MAX];
    const int64_t q_row = (int64_t)w->s.n_heads * w->s.dk, out_row = (int64_t)w->s.n_heads * w->s.dv;
    const int64_t q_stride = q_row + 5, out_stride = out_row + 3,
                  n_tables = p->per_head ? w->s.n_kv_heads : 1;
    for (int32_t i = 0; i < n; i++) {
        int32_t seq = pieces[i].seq, behind = w->n_queries[seq] - pieces[i].q_end;
        cu[i + 1] = cu[i] + pieces[i].q_end - pieces[i].q_begin;
        rows[i] = seq;
        n_keys[i] = w->s.non_causal ? w->n_keys[seq] : PAGED_MAX(w->n_keys[seq] - behind, 0);
        first_k[i] = p->first_k ? PAGED_MIN(p->first_k[seq], n_keys[i]) : 0;
    }
    float *q = take((size_t)(cu[n] * q_stride), sizeof *q), *out = take((size_t)(cu[n] * out_stride), 4);
    float *lse = take((size_t)cu[n] * (size_t)w->s.n_heads, sizeof *lse);
    memset(out, 0xff, (size_t)(cu[n] * out_stride) * sizeof *out);
    for (int32_t i = 0; i < n; i++)
        for (int32_t j = 0; j < cu[i + 1] - cu[i]; j++)
            memcpy(q + (cu[i] + j) * q_stride,
                   w->q + (w->first_q[pieces[i].seq] + pieces[i].q_begin + j) * q_row,
                   (size_t)q_row * sizeof *q);
    const paged_batch batch = {.cu_seqlens_q = cu,
                               .tables = {.blocks = p->blocks,
                                          .rows = rows,
                                          .seq_stride = n_tables * p->max_blocks,
                                          .head_stride = p->per_head ? p->max_blocks : 0,
                                          .seqlens_k = n_keys,
                                          .first_k = p->first_k ? first_k : NULL,
                                          .tail_tiles = p->tail_tiles,
                                          .n_seqs = n,
                                          .max_blocks = p->max_blocks}};
    const paged_attn_io io = {
        .q = q, .q_stride = q_stride, .out = out, .out_stride = out_stride, .lse = lse, .sinks = w->sinks};
    paged_error err;
    if (paged_cl_attn_plan(attn, &batch, &a->kv, &err) || paged_cl_attn_run(attn, &a->kv, &io, &err))
        test_fail(__FILE__, __LINE__, "%s", err.message);
    for (int32_t i = 0; i < n; i++)
        for (int32_t j = cu[i]; j < cu[i + 1]; j++) {
            int64_t row = w->first_q[pieces[i].seq] + pieces[i].q_begin + j - cu[i];
            memcpy(r->out + row * out_row, out + j * out_stride, (size_t)out_row * sizeof *out);
            memcpy(r->lse + row * w->s.n_heads, lse + j * w->s.n_heads, (size_t)w->s.n_heads * sizeof *lse);
            for (int64_t gap = out_row; gap < out_stride; gap++) CHECK(isnan(out[j * out_stride + gap]));
        }
    free(q);
    free(out);
    free(lse);
}

static result whole(const world *w, const place *p, const away *a, paged_cl_attn *attn) {
    piece pieces[SEQS_MAX];
    for (int32_t i = 0; i < w->n_seqs; i++) pieces[i] = (piece){i, 0, w->n_queries[i]};
    result r = result_make(w);
    run_batch(w, p, a, attn, pieces, w->n_seqs, &r);
    return r;
}

static result alone(const world *w, const place *p, const away *a, paged_cl_attn *attn) {
    result r = result_make(w);
    for (int32_t seq = w->n_seqs - 1; seq >= 0; seq--)
        run_batch(w, p, a, attn, &(piece){seq, 0, w->n_queries[seq]}, 1, &r);
    return r;
}

static result chunked(const world *w, const place *p, const away *a, paged_cl_attn *attn, int32_t chunk) {
    result r = result_make(w);
    for (int32_t begin = 0, more = 1; more; begin += chunk) {
        piece pieces[SEQS_MAX];
        int32_t n = 0;
        for (int32_t seq = 0; seq < w->n_seqs; seq++)
            if (begin < w->n_queries[seq])
                pieces[n++] = (piece){seq, begin, PAGED_MIN(begin + chunk, w->n_queries[seq])};
        more = n > 0;
        if (more) run_batch(w, p, a, attn, pieces, n, &r);
    }
    return r;
}

/* The world with its blocks elsewhere. */
static result elsewhere(const world *w, const place *p, paged_cl_attn *same_shape) {
    away a = away_make(p);
    paged_cl_attn *attn = same_shape ? same_shape : attn_away(w, p, &a);
    result r = whole(w, p, &a, attn);
    if (!same_shape) paged_cl_attn_free(attn);
    away_free(&a);
    return r;
}

/* ---- the grid ---- */

#define PICK(rng, array) (array)[draw(rng, (int32_t)(sizeof(array) / sizeof(array)[0]))]

/* In one batch, alone, in chunks, in other blocks, with a table per head, with holes and packed tails. */
static void run_case(shape s, int32_t n_seqs, const int32_t *n_keys, const int32_t *n_queries, fill how,
                     uint64_t *rng) {
    world w = world_make(s, n_seqs, n_keys, n_queries, how, rng);
    place p = place_make(&w, s.layout, s.block_size, false, false, draw(rng, 2), rng);
    away a = away_make(&p);
    paged_cl_attn *attn = attn_away(&w, &p, &a);
    result want = whole(&w, &p, &a, attn), r;
    check_some(&w, &want, 6, rng);
    r = alone(&w, &p, &a, attn);
    must_equal(&w, &want, &r, "alone");
    if (!(w.s.non_causal && w.alibi)) {
        r = chunked(&w, &p, &a, attn, 1 + draw(rng, 40));
        must_equal(&w, &want, &r, "in chunks");
    }
    paged_cl_attn_free(attn);
    away_free(&a);
    place per_head = place_make(&w, s.layout, s.block_size, false, true, true, rng);
    r = elsewhere(&w, &per_head, NULL);
    must_equal(&w, &want, &r, "a table per head");
    place_free(&per_head);
    if (w.s.window) place_drop(&w, &p);
    if (p.kv.layout == PAGED_LAYOUT_PACKED) place_tails(&w, &p);
    r = elsewhere(&w, &p, NULL);
    must_equal(&w, &want, &r, "without what no query sees, with packed tails");
    place_free(&p);
    result_free(&want);
    world_free(&w);
}

/* Every type and layout, decode and prefill, splits, and a feature or two. */
static void grid(void) {
    static const int32_t heads[][2] = {{9, 3}, {4, 4}, {14, 2}, {20, 1}, {6, 2}, {8, 8}, {3, 1}};
    static const int32_t dims[] = {64, 128, 16, 80, 40, 72}, windows[] = {0, 0, 17, 200, 600};
    static const int32_t lengths[] = {0, 1, 15, 16, 17, 63, 64, 65, 200, 511, 512, 513, 1100};
    uint64_t rng = test_seed;
    if (!device_open()) return;
    for (int32_t n = 0; n < (test_long ? 140 : 7); n++) {
        const int32_t *pair = heads[n % 7];
        shape s = {.type = (paged_type)(n / 2 % 4),
                   .layout = (paged_layout)(n % 2),
                   .block_size = n % 2 ? 16 << draw(&rng, 3) : 1 + draw(&rng, 100),
                   .n_heads = pair[0],
                   .n_kv_heads = pair[1],
                   .dk = PICK(&rng, dims)};
        int32_t n_keys[4], n_queries[4];
        s.dv = draw(&rng, 3) ? s.dk : PICK(&rng, dims);
        if (s.type == PAGED_TYPE_I8) {
            s.layout = PAGED_LAYOUT_PACKED;
            s.block_size = 32;
        }
        s.non_causal = n % 7 == 3;
        s.window = s.non_causal ? 0 : PICK(&rng, windows);
        s.softcap = n % 3 == 1 ? 20 : 0;
        s.alibi = n % 5 == 2;
        s.sinks = n % 4 == 1;
        for (int32_t i = 0; i < 4; i++) {
            n_keys[i] = PICK(&rng, lengths);
            n_queries[i] = i % 2 ? PAGED_MIN(n_keys[i] + draw(&rng, 3), 70) : 1;
        }
        run_case(s, 4, n_keys, n_queries, (fill)(n % 3 ? FILL_UNIFORM : draw(&rng, N_FILLS)), &rng);
    }
}

/* Later keys that are NaN or Inf do not reach a row; and its own do. */
static void bad_keys_stay_where_they_are(void) {
    if (!device_open()) return;
    for (int32_t type = 0; type < 4; type++) {
        uint64_t rng = test_seed;
        const shape s = {.type = (paged_type)type,
                         .layout = type == PAGED_TYPE_F32 ? PAGED_LAYOUT_PLAIN : PAGED_LAYOUT_PACKED,
                         .block_size = 16,
                         .n_heads = 3,
                         .n_kv_heads = 3,
                         .dk = 48,
                         .dv = 48};
        const int32_t n = 100, bad = 37, row = 3 * 48;
        world w = world_make(s, 1, &n, &n, FILL_UNIFORM, &rng);
        place p = place_make(&w, s.layout, 16, false, false, false, &rng);
        result want = elsewhere(&w, &p, NULL);
        int64_t slot = (int64_t)p.blocks[bad / 16] * 16 + bad % 16;
        float x[3 * 48];
        for (int32_t i = 0; i < row; i++) x[i] = NAN;
        CHECK_EQ(paged_kv_write(&p.kv, x, 0, x, 0, &slot, 1, 0, 1), 2 * row);
        result r = elsewhere(&w, &p, NULL);
        CHECK(memcmp(r.out, want.out, (size_t)(bad * row) * sizeof(float)) == 0);
        CHECK(memcmp(r.lse, want.lse, (size_t)(bad * 3) * sizeof(float)) == 0);
        for (int32_t i = bad * row; i < n * row; i++) CHECK(!isfinite(r.out[i]));
        result_free(&r);
        result_free(&want);
        place_free(&p);
        world_free(&w);
    }
}

/* ---- writing ---- */

/* The same bytes as the CPU writes, for values of every kind; slots that are skipped keep theirs. */
static void writes_the_same_bytes(void) {
    static const float odd[] = {0,      -0.0f,    1e-7f, -6e-8f, 65519,     65520,
                                -1e30f, INFINITY, NAN,   1e-40f, 0x1p-110f, 3.4e38f};
    if (!device_open()) return;
    for (int32_t type = 0; type < 4; type++)
        for (int32_t layout = type == PAGED_TYPE_I8; layout < 2; layout++) {
            uint64_t rng = test_seed;
            const int32_t n = 40, row = 3 * 48;
            const shape s = {.type = (paged_type)type,
                             .block_size = 16,
                             .n_heads = 3,
                             .n_kv_heads = 3,
                             .dk = 48,
                             .dv = 48};
            world w = world_make(s, 1, &n, &n, FILL_UNIFORM, &rng);
            place p = place_make(&w, (paged_layout)layout, 16, false, false, false, &rng);
            away a = away_make(&p);
            paged_cl_attn *attn = attn_away(&w, &p, &a);
            float *k = take((size_t)(n * row), sizeof *k), *v = take((size_t)(n * row), sizeof *v);
            int64_t *slots = take((size_t)n, sizeof *slots), n_nan, want_nan;
            for (int32_t i = 0; i < n * row; i++) {
                k[i] = draw(&rng, 30) ? 4 * draw_unit(&rng) : PICK(&rng, odd);
                v[i] = draw(&rng, 40) ? draw_unit(&rng) : PICK(&rng, odd);
            }
            for (int32_t i = 0; i < n; i++) slots[i] = i % 7 == 3 ? -1 : i * p.kv.n_blocks * 16 / n;
            paged_error err;
            CHECK_EQ(paged_cl_slots_plan(attn, &a.kv, slots, n, &err), PAGED_OK);
            CHECK_EQ(paged_cl_kv_write(attn, &a.kv, k, 0, v, 0, &n_nan, &err), PAGED_OK);
            want_nan = paged_kv_write(&p.kv, k, 0, v, 0, slots, n, 0, 1);
            CHECK_EQ(n_nan, want_nan);
            uint8_t *got = take(place_bytes(&p), 1);
            CHECK_EQ(paged_cl_block_read(&a.arena, 0, place_bytes(&p), got, NULL, &err), PAGED_OK);
            CHECK_EQ(paged_cl_transfers_wait(&a.arena, &err), PAGED_OK);
            for (size_t i = 0; i < place_bytes(&p); i++)
                if (got[i] != p.bytes[i])
                    test_fail(__FILE__, __LINE__, "%s, layout %d: byte %zu of %zu is %02x, not %02x",
                              type_name((paged_type)type), layout, i, place_bytes(&p), got[i], p.bytes[i]);
            slots[5] = (int64_t)p.kv.n_blocks * 16;
            CHECK_EQ(paged_cl_slots_plan(attn, &a.kv, slots, n, &err), PAGED_ERR_INVALID_ARG);
            free(got);
            free(slots);
            free(k);
            free(v);
            paged_cl_attn_free(attn);
            away_free(&a);
            place_free(&p);
            world_free(&w);
        }
}

/* ---- refusals ---- */

static void refuses_what_the_cpu_refuses(void) {
    if (!device_open()) return;
    uint64_t rng = test_seed;
    const shape s = {
        .layout = PAGED_LAYOUT_PACKED, .block_size = 16, .n_heads = 3, .n_kv_heads = 3, .dk = 48, .dv = 48};
    const int32_t n_keys = 40, n_q = 1, cu[] = {0, 1};
    world w = world_make(s, 1, &n_keys, &n_q, FILL_UNIFORM, &rng);
    place p = place_make(&w, s.layout, 16, false, false, false, &rng);
    away a = away_make(&p);
    paged_cl_attn *attn = attn_away(&w, &p, &a);
    paged_batch batch = {
        .cu_seqlens_q = cu,
        .tables = {.blocks = p.blocks, .seqlens_k = &n_keys, .n_seqs = 1, .max_blocks = p.max_blocks}};
    paged_error err;
    CHECK_EQ(paged_cl_attn_plan(attn, &batch, &a.kv, &err), PAGED_OK);
    p.blocks[1] = p.kv.n_blocks;
    CHECK_EQ(paged_cl_attn_plan(attn, &batch, &a.kv, &err), PAGED_ERR_INVALID_ARG);
    CHECK(strstr(err.message, "entry 1 of its table"));
    p.blocks[1] = -1;
    CHECK_EQ(paged_cl_attn_plan(attn, &batch, &a.kv, &err), PAGED_ERR_INVALID_ARG);
    p.blocks[1] = 0;
    CHECK_EQ(paged_cl_attn_plan(attn, &batch, &p.kv, &err), PAGED_ERR_INVALID_ARG); /* host memory */
    paged_kv beyond = a.kv;
    beyond.n_blocks++;
    CHECK_EQ(paged_cl_attn_plan(attn, &batch, &beyond, &err), PAGED_ERR_INVALID_ARG);
    CHECK(strstr(err.message, "do not lie in the pool"));
    float none = 7;
    const paged_attn_io io = {.q = &none, .out = &none};
    CHECK_EQ(paged_cl_attn_run(attn, &a.kv, &io, &err), PAGED_OK); /* no plan: nothing is done */
    CHECK(none == 7);

    paged_attn_config config = config_of(&w, &p);
    paged_cl_attn *other = NULL;
    config.head_dim_k = 0;
    CHECK_EQ(paged_cl_attn_create(device, &a.arena, &config, &other, &err), PAGED_ERR_INVALID_ARG);
    paged_arena host;
    CHECK_EQ(paged_arena_create_host(1 << 20, &host, &err), PAGED_OK);
    config = config_of(&w, &p);
    CHECK_EQ(paged_cl_attn_create(device, &host, &config, &other, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_cl_block_read(&host, 0, 1, &none, NULL, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_cl_block_read(&a.arena, place_bytes(&p), 1, &none, NULL, &err), PAGED_ERR_INVALID_ARG);
    CHECK(!other);
    host.destroy(host.ctx);
    paged_cl_attn_free(attn);
    away_free(&a);
    place_free(&p);
    world_free(&w);
}

static void devices_are_named(void) {
    paged_cl_device all[8];
    paged_cl *cl = NULL;
    paged_error err;
    if (!device_open()) return;
    const int32_t n = paged_cl_list(all, 8);
    CHECK(n >= 1);
    CHECK_EQ(paged_cl_list(NULL, 0), n);
    CHECK_STR(paged_cl_get_device(device)->name, all[0].name);
    CHECK(all[0].memory_bytes >= all[0].max_alloc_bytes && all[0].max_alloc_bytes > 0 && all[0].n_units > 0);
    paged_cl_config config = {.struct_size = sizeof config, .device = "0", .cache_dir = ""};
    CHECK_EQ(paged_cl_open(&config, &cl, &err), PAGED_OK);
    paged_cl_close(cl);
    config.device = all[0].name + 2;
    CHECK_EQ(paged_cl_open(&config, &cl, &err), PAGED_OK);
    paged_cl_close(cl);
    config.device = "no such device";
    CHECK_EQ(paged_cl_open(&config, &cl, &err), PAGED_ERR_UNSUPPORTED);
    CHECK(strstr(err.message, "no such device"));
    config.device = "99";
    CHECK_EQ(paged_cl_open(&config, &cl, &err), PAGED_ERR_UNSUPPORTED);
}

/* ---- memory ---- */

static void too_much_is_a_status(void) {
    if (!device_open()) return;
    paged_arena arena = {0};
    paged_error err;
    char asked[32];
    const size_t most = paged_cl_get_device(device)->max_alloc_bytes;
    const size_t sizes[] = {most, most + 1, SIZE_MAX / 2, SIZE_MAX};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        CHECK_EQ(paged_cl_arena_create(device, sizes[i], &arena, &err), PAGED_ERR_NO_MEMORY);
        snprintf(asked, sizeof asked, "%zu", sizes[i]);
        CHECK(strstr(err.message, asked));
        snprintf(asked, sizeof asked, "%zu", most);
        CHECK(strstr(err.message, asked));
    }
    CHECK_EQ(paged_cl_arena_create(device, 0, &arena, &err), PAGED_ERR_INVALID_ARG);
    CHECK(!arena.ctx);
}

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KEEPS_FREED_MEMORY 1
#endif
#endif

/* 0 where freed memory stays in the process on purpose. */
static size_t resident_kib(void) {
#if defined(KEEPS_FREED_MEMORY)
    return 0;
#endif
    FILE *file = fopen("/proc/self/status", "r");
    char line[128];
    size_t kib = 0;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "VmRSS: %zu", &kib) == 1) break;
    if (file) fclose(file);
    return kib;
}

/* Everything is made and freed many times: bytes by kind go back to nothing, the process does not grow. */
static void nothing_leaks(void) {
    if (!device_open()) return;
    uint64_t rng = test_seed;
    const shape s = {.type = PAGED_TYPE_I8,
                     .layout = PAGED_LAYOUT_PACKED,
                     .block_size = 16,
                     .n_heads = 3,
                     .n_kv_heads = 3,
                     .dk = 48,
                     .dv = 48};
    const int32_t n_keys = 2000, n_q = 1;
    world w = world_make(s, 1, &n_keys, &n_q, FILL_UNIFORM, &rng);
    place p = place_make(&w, s.layout, 16, false, false, false, &rng);
    paged_cl_stats before, during, after;
    paged_cl_get_stats(device, &before);
    size_t warm_kib = 0;
    const int32_t n_rounds = test_long ? 400 : 40;
    for (int32_t i = 0; i < n_rounds; i++) {
        away a = away_make(&p);
        paged_cl_attn *attn = attn_away(&w, &p, &a);
        result r = whole(&w, &p, &a, attn);
        paged_cl_get_stats(device, &during);
        CHECK_EQ(during.pool_bytes, before.pool_bytes + place_bytes(&p));
        CHECK_EQ(during.scale_bytes, place_bytes(&p) / 104 * 8); /* 8 of 48 + 48 + 8 bytes */
        CHECK(during.table_bytes > before.table_bytes && during.io_bytes > before.io_bytes);
        CHECK(during.state_bytes > before.state_bytes);
        result_free(&r);
        paged_cl_attn_free(attn);
        away_free(&a);
        if (i == n_rounds / 4) warm_kib = resident_kib();
    }
    paged_cl_get_stats(device, &after);
    CHECK_EQ(after.pool_bytes, before.pool_bytes);
    CHECK_EQ(after.table_bytes, before.table_bytes);
    CHECK_EQ(after.io_bytes, before.io_bytes);
    CHECK_EQ(after.state_bytes, before.state_bytes);
    const size_t now_kib = resident_kib(), allowed = 100 * (size_t)n_rounds; /* one pool alone has 190 KiB */
    if (now_kib > warm_kib + allowed)
        test_fail(__FILE__, __LINE__, "%zu KiB resident, %zu before %d rounds", now_kib, warm_kib, n_rounds);
    place_free(&p);
    world_free(&w);
}

/* The second object of a shape finds its program; a damaged file is built anew. */
static void programs_are_kept(void) {
    if (!device_open()) return;
    char dir[] = "/tmp/paged-opencl-XXXXXX", command[256];
    CHECK(mkdtemp(dir) != NULL);
    const paged_cl_config config = {.struct_size = sizeof config, .cache_dir = dir};
    const paged_attn_config shape_of = {.struct_size = sizeof shape_of,
                                        .n_heads = 2,
                                        .n_kv_heads = 1,
                                        .head_dim_k = 24,
                                        .block_size = 112,
                                        .layout = PAGED_LAYOUT_PACKED};
    paged_error err;
    paged_cl *cl = NULL;
    paged_arena arena;
    paged_cl_stats stats;
    CHECK_EQ(paged_cl_open(&config, &cl, &err), PAGED_OK);
    CHECK_EQ(paged_cl_arena_create(cl, 1 << 20, &arena, &err), PAGED_OK);
    for (uint64_t i = 0; i < 3; i++) {
        paged_cl_attn *attn = NULL;
        CHECK_EQ(paged_cl_attn_create(cl, &arena, &shape_of, &attn, &err), PAGED_OK);
        paged_cl_attn_free(attn);
        paged_cl_get_stats(cl, &stats);
        CHECK_EQ(stats.n_loaded, i > 0);
        CHECK_EQ(stats.n_built, i > 1 ? 2 : 1);
        snprintf(command, sizeof command,
                 "printf xyz | dd of=$(echo %s/*.bin) bs=1 seek=900 conv=notrunc 2>/dev/null", dir);
        if (i == 1) CHECK_EQ(system(command), 0);
    }
    arena.destroy(arena.ctx);
    paged_cl_close(cl);
    snprintf(command, sizeof command, "rm -r %s", dir);
    CHECK_EQ(system(command), 0);
}

/* ---- transfers ---- */

static void pause_ms(long ms) {
    nanosleep(&(struct timespec){.tv_nsec = ms * 1000000}, NULL);
}

/* A block that is being read out is not written before that has ended, and one that comes in is not read:
 * transfers are held back by an event of ours while writes and attention wait behind them. */
static void a_block_waits_for_its_transfer(void) {
    if (!device_open()) return;
    uint64_t rng = test_seed;
    const shape s = {.type = PAGED_TYPE_F32,
                     .layout = PAGED_LAYOUT_PACKED,
                     .block_size = 16,
                     .n_heads = 3,
                     .n_kv_heads = 3,
                     .dk = 48,
                     .dv = 48};
    const int32_t n_keys = 16, n_q = 1;
    world w = world_make(s, 1, &n_keys, &n_q, FILL_UNIFORM, &rng);
    place p = place_make(&w, s.layout, 16, true, false, false, &rng);
    away a = away_make(&p);
    paged_cl_attn *attn = attn_away(&w, &p, &a);
    const size_t size = (size_t)p.kv.block_stride, at = (size_t)p.blocks[0] * size;
    uint8_t *out = take(size, 1), *old = take(size, 1);
    memcpy(old, p.bytes + at, size);
    float x[3 * 48] = {0};
    int64_t slots[16];
    uint64_t ticket;
    paged_error err;
    int32_t code;
    for (int32_t i = 0; i < 16; i++) slots[i] = (int64_t)p.blocks[0] * 16 + i;

    cl_event gate = device->api->CreateUserEvent(device->context, &code);
    CHECK(gate != NULL);
    CHECK_EQ(paged__cl_transfer(&a.arena, false, at, size, out, gate, &ticket, &err), PAGED_OK);
    CHECK_EQ(paged_cl_slots_plan(attn, &a.kv, slots, 1, &err), PAGED_OK);
    CHECK_EQ(paged_cl_kv_write(attn, &a.kv, x, 0, x, 0, NULL, &err), PAGED_OK); /* waits on the device */
    CHECK(!paged_cl_transfer_done(&a.arena, ticket));
    pause_ms(20);
    CHECK(!paged_cl_transfer_done(&a.arena, ticket));
    CHECK_EQ(device->api->SetUserEventStatus(gate, CL_COMPLETE), CL_SUCCESS);
    device->api->ReleaseEvent(gate);
    CHECK_EQ(paged_cl_transfers_wait(&a.arena, &err), PAGED_OK);
    CHECK(paged_cl_transfer_done(&a.arena, ticket));
    CHECK(memcmp(out, old, size) == 0); /* as it was before the write */
    CHECK_EQ(paged_cl_block_read(&a.arena, at, size, out, &ticket, &err), PAGED_OK);
    CHECK_EQ(paged_cl_transfers_wait(&a.arena, &err), PAGED_OK);
    CHECK(memcmp(out, old, size) != 0); /* and now as after it */

    /* Back in, and attention over it. */
    gate = device->api->CreateUserEvent(device->context, &code);
    CHECK_EQ(paged__cl_transfer(&a.arena, true, at, size, old, gate, &ticket, &err), PAGED_OK);
    const cl_event *before;
    CHECK_EQ(paged__cl_pool_before(paged__cl_pool_of(&a.arena), false, &before), 1);
    CHECK_EQ(device->api->SetUserEventStatus(gate, CL_COMPLETE), CL_SUCCESS);
    device->api->ReleaseEvent(gate);
    result r = whole(&w, &p, &a, attn);
    check_all(&w, &r);
    CHECK_EQ(paged_cl_transfers_wait(&a.arena, &err), PAGED_OK);
    CHECK_EQ(paged__cl_pool_before(paged__cl_pool_of(&a.arena), true, &before), 0);
    result_free(&r);
    free(out);
    free(old);
    paged_cl_attn_free(attn);
    away_free(&a);
    place_free(&p);
    world_free(&w);
}

/* More transfers than there is room for are a status, and all that were taken arrive. */
static void transfers_have_a_limit(void) {
    if (!device_open()) return;
    paged_arena arena;
    paged_error err;
    static uint8_t in[PAGED_CL_TRANSFERS_MAX + 1], out[PAGED_CL_TRANSFERS_MAX + 1];
    int32_t code;
    CHECK_EQ(paged_cl_arena_create(device, sizeof in, &arena, &err), PAGED_OK);
    cl_event gate = device->api->CreateUserEvent(device->context, &code);
    for (int32_t i = 0; i <= PAGED_CL_TRANSFERS_MAX; i++) {
        in[i] = (uint8_t)(i * 7 + 1);
        CHECK_EQ(paged__cl_transfer(&arena, true, (size_t)i, 1, &in[i], gate, NULL, &err),
                 i < PAGED_CL_TRANSFERS_MAX ? PAGED_OK : PAGED_ERR_LIMIT);
    }
    CHECK_EQ(device->api->SetUserEventStatus(gate, CL_COMPLETE), CL_SUCCESS);
    device->api->ReleaseEvent(gate);
    CHECK_EQ(paged_cl_transfers_wait(&arena, &err), PAGED_OK);
    CHECK_EQ(paged_cl_block_read(&arena, 0, PAGED_CL_TRANSFERS_MAX, out, NULL, &err), PAGED_OK);
    CHECK_EQ(paged_cl_transfers_wait(&arena, &err), PAGED_OK);
    CHECK(memcmp(in, out, PAGED_CL_TRANSFERS_MAX) == 0);
    arena.destroy(arena.ctx);
}

/* ---- over a cache ---- */

/* Sequences of a paged_cache whose blocks are on the device: fork copies there, before its first write. */
static void a_cache_lives_on_the_device(void) {
    if (!device_open()) return;
    const paged_group_config group = {.n_layers = 2,
                                      .n_kv_heads = 3,
                                      .head_dim_k = 48,
                                      .type = PAGED_TYPE_F32,
                                      .layout = PAGED_LAYOUT_PACKED};
    paged_arena arena;
    paged_cache *cache = NULL;
    paged_error err;
    CHECK_EQ(paged_cl_arena_create(device, 512 << 10, &arena, &err), PAGED_OK);
    const paged_cache_config config = {.struct_size = sizeof config,
                                       .groups = &group,
                                       .n_groups = 1,
                                       .pool_bytes = 512 << 10,
                                       .arena = &arena};
    CHECK_EQ(paged_cache_create(&config, &cache, &err), PAGED_OK);
    paged_kv kv;
    CHECK_EQ(paged_cache_kv(cache, 0, 1, &kv), PAGED_OK);
    CHECK_EQ((uintptr_t)kv.k - PAGED_ARENA_AWAY, (uintptr_t)kv.block_stride / 2);
    const paged_attn_config ac = {.struct_size = sizeof ac,
                                  .n_heads = 3,
                                  .n_kv_heads = 3,
                                  .head_dim_k = 48,
                                  .block_size = 16,
                                  .type = PAGED_TYPE_F32,
                                  .layout = PAGED_LAYOUT_PACKED,
                                  .max_q = 20};
    paged_cl_attn *attn = NULL;
    CHECK_EQ(paged_cl_attn_create(device, &arena, &ac, &attn, &err), PAGED_OK);

    /* 20 tokens whose keys are all zero, so that a result is the mean of the values: 0 … 19. */
    paged_seq parent, child;
    enum { ROW = 3 * 48 };
    float k[21 * ROW] = {0}, v[21 * ROW], q[ROW] = {0}, out[ROW];
    int32_t tokens[21] = {0};
    int64_t slots[21];
    for (int32_t i = 0; i < 21 * ROW; i++) v[i] = (float)(i / ROW);
    CHECK_EQ(paged_seq_create(cache, &parent), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(cache, parent, 20), PAGED_OK);
    CHECK_EQ(paged_seq_slots(cache, parent, 0, 0, 20, slots), PAGED_OK);
    CHECK_EQ(paged_cl_slots_plan(attn, &kv, slots, 20, &err), PAGED_OK);
    CHECK_EQ(paged_cl_kv_write(attn, &kv, k, 0, v, 0, NULL, &err), PAGED_OK);
    CHECK_EQ(paged_seq_commit(cache, parent, tokens, 20), PAGED_OK);
    CHECK_EQ(paged_seq_fork(cache, parent, &child), PAGED_OK);
    CHECK_EQ(paged_seq_reserve(cache, child, 1), PAGED_OK); /* copies the second block */
    CHECK_EQ(paged_seq_slots(cache, child, 0, 20, 1, slots), PAGED_OK);
    CHECK_EQ(paged_cl_slots_plan(attn, &kv, slots, 1, &err), PAGED_OK);
    CHECK_EQ(paged_cl_kv_write(attn, &kv, k, 0, v + 20 * ROW, 0, NULL, &err), PAGED_OK);
    CHECK_EQ(paged_seq_commit(cache, child, tokens, 1), PAGED_OK);

    const paged_seq seqs[] = {parent, child};
    for (int32_t i = 0; i < 2; i++) {
        const int32_t cu[] = {0, 1}, row = paged_seq_row(cache, seqs[i]), n_keys = 20 + i;
        paged_batch batch = {.cu_seqlens_q = cu};
        CHECK_EQ(paged_cache_tables(cache, 0, &batch.tables), PAGED_OK);
        batch.tables.rows = &row;
        batch.tables.seqlens_k = &n_keys;
        batch.tables.n_seqs = 1;
        CHECK_EQ(paged_cl_attn_plan(attn, &batch, &kv, &err), PAGED_OK);
        CHECK_EQ(paged_cl_attn_run(attn, &kv, &(paged_attn_io){.q = q, .out = out}, &err), PAGED_OK);
        for (int32_t d = 0; d < ROW; d++) CHECK(fabsf(out[d] - (float)(n_keys - 1) / 2) < 1e-5f);
    }
    CHECK_EQ(paged_cache_check(cache, &err), PAGED_OK);
    paged_cl_attn_free(attn);
    paged_cache_free(cache);
    arena.destroy(arena.ctx);
}

#define TESTS(X)                                                                                             \
    X(grid)                                                                                                  \
    X(bad_keys_stay_where_they_are)                                                                          \
    X(writes_the_same_bytes)                                                                                 \
    X(refuses_what_the_cpu_refuses)                                                                          \
    X(devices_are_named)                                                                                     \
    X(too_much_is_a_status)                                                                                  \
    X(nothing_leaks)                                                                                         \
    X(programs_are_kept)                                                                                     \
    X(a_block_waits_for_its_transfer) X(transfers_have_a_limit) X(a_cache_lives_on_the_device)
TEST_MAIN(TESTS)
