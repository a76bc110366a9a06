/* Goal: threads that take what others have not begun change no bit. Method: real threads, more than cores,
 * begin a run at random times, on batches whose shares cost what the plan does not know (a thread that is
 * late), each row against one thread's. The last test calls one thread's part after another's, in any order.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "kernels/world.h"
#include "ops/attn.h"

enum { THREADS_MAX = 5 };

typedef struct crew {
    paged_attn *attn;
    const world *w;
    const place *p;
    const result *want, *r;
    pthread_barrier_t barrier;
    int32_t n, n_repeats;
    _Atomic int32_t n_wrong;
} crew;

typedef struct member {
    crew *crew;
    int32_t ith;
    uint64_t rng;
} member;

static void wait_a_little(uint64_t *rng) {
    const struct timespec t = {.tv_nsec = (long)(paged__rand(rng) % 200) * 1000};
    if (paged__rand(rng) % 2) nanosleep(&t, NULL);
}

static void *work(void *user) {
    member *self = user;
    crew *c = self->crew;
    const paged_attn_io io = {.q = c->w->q, .out = c->r->out, .lse = c->r->lse, .sinks = c->w->sinks};
    for (int32_t i = 0; i < c->n_repeats; i++) {
        wait_a_little(&self->rng);
        paged_attn_run(c->attn, &c->p->kv, &io, self->ith, c->n);
        pthread_barrier_wait(&c->barrier);
        paged_attn_merge(c->attn, &io, self->ith, c->n);
        pthread_barrier_wait(&c->barrier);
        if (self->ith == 0) {
            c->n_wrong += !result_equal(c->w, c->want, c->r);
            memset(c->r->out, 0xff,
                   (size_t)c->w->n_q * (size_t)(c->w->s.n_heads * c->w->s.dv) * sizeof(float));
            memset(c->r->lse, 0xff, (size_t)c->w->n_q * (size_t)c->w->s.n_heads * sizeof(float));
        }
        pthread_barrier_wait(&c->barrier);
    }
    return NULL;
}

/* The world as a batch. */
static void plan(paged_attn *attn, const world *w, const place *p) {
    int32_t cu[SEQS_MAX + 1] = {0};
    for (int32_t i = 0; i < w->n_seqs; i++) cu[i + 1] = cu[i] + w->n_queries[i];
    int32_t n_tables = p->per_head ? w->s.n_kv_heads : 1;
    static int32_t kept[SEQS_MAX + 1]; /* the plan borrows it */
    memcpy(kept, cu, sizeof kept);
    paged_batch batch = {.cu_seqlens_q = kept,
                         .tables = {.blocks = p->blocks,
                                    .seq_stride = n_tables * p->max_blocks,
                                    .head_stride = p->per_head ? p->max_blocks : 0,
                                    .seqlens_k = w->n_keys,
                                    .first_k = p->first_k,
                                    .tail_tiles = p->tail_tiles,
                                    .n_seqs = w->n_seqs,
                                    .max_blocks = p->max_blocks},
                         .n_shared = p->n_shared,
                         .shared = p->shared};
    paged_error err;
    if (paged_attn_plan(attn, &batch, &p->kv, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
}

static void run_crew(crew *c) {
    pthread_t threads[THREADS_MAX];
    member members[THREADS_MAX];
    pthread_barrier_init(&c->barrier, NULL, (unsigned)c->n);
    for (int32_t i = 0; i < c->n; i++) {
        members[i] = (member){c, i, test_seed + (uint64_t)i};
        CHECK_EQ(pthread_create(&threads[i], NULL, work, &members[i]), 0);
    }
    for (int32_t i = 0; i < c->n; i++) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&c->barrier);
}

typedef struct batch_case {
    shape s;
    int32_t n_seqs, n_keys[4], n_queries[4];
} batch_case;

#define SHAPE(t, heads, kv_heads, dim, win)                                                                  \
    {                                                                                                        \
        .type = (t), .layout = PAGED_LAYOUT_PACKED, .block_size = 16, .n_heads = (heads),                    \
        .n_kv_heads = (kv_heads), .dk = (dim), .dv = (dim), .window = (win)                                  \
    }

static const batch_case batches[] = {
    {SHAPE(PAGED_TYPE_BF16, 8, 2, 64, 0), 1, {4300}, {1}},
    {SHAPE(PAGED_TYPE_I8, 6, 3, 64, 0), 4, {1500, 1501, 1499, 1502}, {1, 1, 1, 1}},
    {SHAPE(PAGED_TYPE_BF16, 9, 3, 64, 0), 4, {3000, 40, 2000, 1}, {1, 2, 3, 1}},
    {SHAPE(PAGED_TYPE_F32, 4, 2, 32, 0), 4, {700, 1, 900, 1200}, {300, 1, 1, 2}}, /* and a prompt */
    {SHAPE(PAGED_TYPE_F16, 2, 1, 64, 700), 3, {2600, 1300, 511}, {3, 1, 2}},
    {SHAPE(PAGED_TYPE_BF16, 128, 128, 16, 0), 1, {1700}, {1}}, /* more heads than one takes along */
};

#define EACH_BATCH(c)                                                                                        \
    for (const batch_case *c = batches; c < batches + sizeof batches / sizeof batches[0]; c++)

/* n threads, several times. */
static void check_crew(const world *w, const place *p, const result *want, int32_t n, int32_t n_repeats,
                       bool must_merge) {
    result r = result_make(w);
    crew c = {.attn = attn_make(w, p, n), .w = w, .p = p, .want = want, .r = &r, .n = n};
    c.n_repeats = n_repeats;
    plan(c.attn, w, p);
    CHECK(!must_merge || paged_attn_needs_merge(c.attn));
    CHECK_EQ(c.attn->n_owns > 0, p->n_shared > 0);
    run_crew(&c);
    CHECK_EQ(c.n_wrong, 0);
    paged_attn_free(c.attn);
    result_free(&r);
}

static void threads_help(void) {
    uint64_t rng = test_seed;
    paged_cpu_mask(~0u);
    EACH_BATCH(bc)
    for (int32_t n = 2; n <= THREADS_MAX; n++) {
        world w = world_make(bc->s, bc->n_seqs, bc->n_keys, bc->n_queries, FILL_UNIFORM, &rng);
        place p = place_make(&w, bc->s.layout, 16, false, false, false, &rng);
        result want = run_all(&w, &p, 1);
        check_crew(&w, &p, &want, n, test_long ? 2000 : 30, true);
        result_free(&want);
        place_free(&p);
        world_free(&w);
    }
}

enum { N_SEQS = 6, PREFIX = 1024 };
static const struct {
    shape s;
    paged_shared shared;
    int32_t n_keys[N_SEQS], n_queries[N_SEQS];
} cascades[] = {
    {SHAPE(PAGED_TYPE_BF16, 8, 2, 64, 0),
     {0, N_SEQS, PREFIX},
     {1025, 1100, 1024, 1700, 1060, 1030},
     {1, 1, 1, 1, 2, 1}},
    {SHAPE(PAGED_TYPE_F16, 4, 4, 32, 0), {0, 3, PREFIX}, {1025, 1100, 1024, 70, 1, 2}, {1, 1, 1, 1, 1, 1}},
    {SHAPE(PAGED_TYPE_I8, 3, 3, 64, 0),
     {1, 4, PREFIX},
     {900, 1025, 1026, 1600, 1090, 70},
     {1, 1, 1, 1, 1, 1}},
};

#define EACH_CASCADE(i) for (size_t i = 0; i < sizeof cascades / sizeof cascades[0]; i++)

static world cascade_world(size_t i, uint64_t *rng) {
    world w = world_make(cascades[i].s, N_SEQS, cascades[i].n_keys, cascades[i].n_queries, FILL_UNIFORM, rng);
    world_share(&w, cascades[i].shared);
    return w;
}

/* Each has its own share of a cascade; states of a head that is cut are merged by all. */
static void threads_share_prefixes(void) {
    uint64_t rng = test_seed;
    paged_cpu_mask(~0u);
    EACH_CASCADE(i)
    for (int32_t n = 2; n <= THREADS_MAX; n += 3) {
        world w = cascade_world(i, &rng);
        place p = place_make(&w, PAGED_LAYOUT_PACKED, 16, false, false, true, &rng);
        result want = run_all(&w, &p, 1);
        place_share(&w, &p, cascades[i].shared);
        check_crew(&w, &p, &want, n, test_long ? 1000 : 8, n == THREADS_MAX);
        result_free(&want);
        place_free(&p);
        world_free(&w);
    }
}

/* Whoever takes a share does it alone here: there is nobody to help. */
static void one_after_the_other(void) {
    uint64_t rng = test_seed;
    EACH_BATCH(bc)
    for (int32_t n = 1; n <= 7; n++) {
        world w = world_make(bc->s, bc->n_seqs, bc->n_keys, bc->n_queries, FILL_UNIFORM, &rng);
        place p = place_make(&w, bc->s.layout, 16, false, false, false, &rng);
        result want = run_all(&w, &p, 1), r = result_make(&w);
        paged_attn *attn = attn_make(&w, &p, n);
        plan(attn, &w, &p);
        const paged_attn_io io = {.q = w.q, .out = r.out, .lse = r.lse, .sinks = w.sinks};
        int32_t first = (int32_t)(paged__rand(&rng) % (uint64_t)n);
        for (int32_t i = 0; i < n; i++) paged_attn_run(attn, &p.kv, &io, (first + i) % n, n);
        for (int32_t i = 0; i < n; i++) paged_attn_merge(attn, &io, (first + i) % n, n);
        must_equal(&w, &want, &r, "shares in another order");
        paged_attn_free(attn);
        result_free(&want);
        place_free(&p);
        world_free(&w);
    }
}

/* The piece that the last item before a cut belongs to: an entry, or a head of a cascade. */
static int64_t piece_before(const paged_attn *attn, paged__cut cut) {
    const int32_t index = cut.item > 0 ? cut.entry : cut.entry - 1;
    if (index < 0) return -1;
    const paged__entry *entry = &attn->entries[index];
    const int32_t of_head = entry->n_splits + entry->n_own,
                  item = cut.item > 0 ? cut.item - 1 : attn->config.n_kv_heads * of_head - 1;
    return ((int64_t)index << 32) + (entry->is_prefix ? item / of_head : 0);
}

/* Which cut is the first to have a piece: found by halving, here by looking at all. */
static void check_first_cuts(const world *w, const place *p) {
    for (int32_t n = 1; n <= 80; n += 1 + n / 4) {
        paged_attn *attn = attn_make(w, p, n);
        plan(attn, w, p);
        for (int32_t b = 1; b <= n; b++) {
            const paged__cut cut = paged__cut_at(attn, b, n);
            if (!paged__cut_keeps(attn, cut, n)) continue;
            int32_t first = 1;
            while (piece_before(attn, paged__cut_at(attn, first, n)) != piece_before(attn, cut)) first++;
            CHECK_EQ(paged__first_cut(attn, b, n), first);
            const paged__cut before = paged__cut_at(attn, b - 1, n);
            CHECK_EQ(paged__cuts_share_piece(attn, before, cut), first < b);
        }
        paged_attn_free(attn);
    }
}

static void first_cuts(void) {
    uint64_t rng = test_seed;
    EACH_BATCH(bc) {
        world w = world_make(bc->s, bc->n_seqs, bc->n_keys, bc->n_queries, FILL_UNIFORM, &rng);
        place p = place_make(&w, bc->s.layout, 16, false, false, false, &rng);
        check_first_cuts(&w, &p);
        place_free(&p);
        world_free(&w);
    }
    EACH_CASCADE(i) {
        world w = cascade_world(i, &rng);
        place p = place_make(&w, PAGED_LAYOUT_PACKED, 16, false, false, true, &rng);
        place_share(&w, &p, cascades[i].shared);
        check_first_cuts(&w, &p);
        place_free(&p);
        world_free(&w);
    }
}

#define TESTS(X) X(threads_help) X(first_cuts) X(threads_share_prefixes) X(one_after_the_other)
TEST_MAIN(TESTS)
