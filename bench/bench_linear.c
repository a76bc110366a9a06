/* bench/bench_linear.c: linear layers beside the machine's limits and beside ggml's matrix product.
 *
 *     bench_linear [--json] [--quick] [--loaded] [--case FILTER]
 *
 * A round is: limits, ours, ggml (every other round ggml, ours), limits. A row is the median of the ratios of
 * the clean rounds with its 95 % bootstrap interval. A round is clean when all threads had a CPU for
 * themselves (CPU time against wall; what was not clean is measured again, a few times, within the round; of
 * ggml, whose time does not show it, the faster of two) and the limits before and after agree within a tenth.
 * Weights are
 * random and cold: copies of the matrix are walked in turns, 256 MB of them. Both sides start from f32
 * activations and end with f32 outputs; quantisation is part of the time.
 *
 * A full run takes up to a quarter of an hour, --quick three minutes.
 *
 * --loaded: for trying the bench beside other work; CPU time instead of wall, and no verdicts.
 *
 * Limits: 64-byte loads by all threads over 256 MB with prefetch, and products in registers: chains of
 * VPDPBUSD, and where the kernels use it TDPBSSD on whole tiles (twice the columns that a block has).
 */
#include <ggml-cpu.h>
#include <ggml.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "ops/linear.h"

enum { THREADS_MAX = 64, ROUNDS_MAX = 64, ROUNDS_LEAST = 15, TRIES = 6 };
static const size_t cold_bytes = (size_t)256 << 20;

static struct {
    bool json, quick, loaded;
    const char *filter;
} options;

static const struct {
    const char *name;
    enum ggml_type ggml;
} types[PAGED__N_WEIGHT_TYPES] = {
    [PAGED__W_F32] = {"F32", GGML_TYPE_F32},          [PAGED__W_F16] = {"F16", GGML_TYPE_F16},
    [PAGED__W_BF16] = {"BF16", GGML_TYPE_BF16},       [PAGED__W_Q4_0] = {"Q4_0", GGML_TYPE_Q4_0},
    [PAGED__W_Q4_1] = {"Q4_1", GGML_TYPE_Q4_1},       [PAGED__W_Q5_0] = {"Q5_0", GGML_TYPE_Q5_0},
    [PAGED__W_Q8_0] = {"Q8_0", GGML_TYPE_Q8_0},       [PAGED__W_Q4_K] = {"Q4_K", GGML_TYPE_Q4_K},
    [PAGED__W_Q5_K] = {"Q5_K", GGML_TYPE_Q5_K},       [PAGED__W_Q6_K] = {"Q6_K", GGML_TYPE_Q6_K},
    [PAGED__W_IQ4_NL] = {"IQ4_NL", GGML_TYPE_IQ4_NL},
};

static void must(bool ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "bench_linear: %s failed\n", what);
    exit(EXIT_FAILURE);
}

/* Zeros, in huge pages where the system gives them; munmap gives them back. */
static uint8_t *map_bytes(size_t bytes) {
    uint8_t *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(p != MAP_FAILED, "mmap");
    madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

/* ---- threads ---- */

typedef void (*work_fn)(void *arg, int32_t ith, int32_t nth);

typedef struct crew {
    work_fn work;
    void *arg;
    int32_t nth;
    int cpus[THREADS_MAX];
    _Atomic int32_t n_here, phase;
} crew;

typedef struct member {
    crew *crew;
    int32_t ith;
    double cpu; /* seconds of the last job */
} member;

static crew the_crew;

/* All threads of the job are here. */
static void meet(void) {
    crew *c = &the_crew;
    const int32_t phase = atomic_load(&c->phase);
    if (atomic_fetch_add(&c->n_here, 1) == c->nth - 1) {
        atomic_store(&c->n_here, 0);
        atomic_store(&c->phase, phase + 1);
        return;
    }
    for (int64_t spins = 0; atomic_load(&c->phase) == phase; spins++)
        if (options.loaded && spins > 100) sched_yield();
}

static void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

static double clock_s(clockid_t id) {
    struct timespec t;
    clock_gettime(id, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Each thread reads its own clock: that of the process lags behind for threads on other CPUs. */
static void do_part(member *m) {
    m->cpu = clock_s(CLOCK_THREAD_CPUTIME_ID);
    meet();
    m->crew->work(m->crew->arg, m->ith, m->crew->nth);
    meet();
    m->cpu = clock_s(CLOCK_THREAD_CPUTIME_ID) - m->cpu;
}

static void *member_main(void *arg) {
    member *m = arg;
    pin(m->crew->cpus[m->ith]);
    meet();
    do_part(m);
    return NULL;
}

typedef struct timing {
    double seconds;
    bool clean;
} timing;

static timing timing_of(double wall, double cpu) {
    const double n = the_crew.nth;
    return (timing){options.loaded ? cpu / n : wall, options.loaded || cpu >= 0.98 * n * wall};
}

/* The clock runs from when all threads are awake. */
static timing do_all(work_fn work, void *arg) {
    crew *c = &the_crew;
    pthread_t threads[THREADS_MAX];
    member members[THREADS_MAX];
    c->work = work;
    c->arg = arg;
    for (int32_t i = 1; i < c->nth; i++) {
        members[i] = (member){c, i, 0};
        must(pthread_create(&threads[i], NULL, member_main, &members[i]) == 0, "pthread_create");
    }
    members[0] = (member){c, 0, 0};
    meet();
    double wall = clock_s(CLOCK_MONOTONIC), cpu = 0;
    do_part(&members[0]);
    wall = clock_s(CLOCK_MONOTONIC) - wall;
    for (int32_t i = 1; i < c->nth; i++) pthread_join(threads[i], NULL);
    for (int32_t i = 0; i < c->nth; i++) cpu += members[i].cpu;
    return timing_of(wall, cpu);
}

static void find_cpus(void) {
    cpu_set_t set;
    must(sched_getaffinity(0, sizeof set, &set) == 0, "sched_getaffinity");
    for (int cpu = 0; cpu < CPU_SETSIZE && the_crew.nth < THREADS_MAX; cpu++)
        if (CPU_ISSET((size_t)cpu, &set)) the_crew.cpus[the_crew.nth++] = cpu;
    pin(the_crew.cpus[0]);
}

/* ---- limits ---- */

static uint8_t *probe_bytes; /* [cold_bytes] */
static _Atomic int64_t sink;
enum { PEAK_LOOPS = 1 << 20, PEAK_CHAINS = 16 };
enum { TILE_LOOPS = 1 << 17, TILE_CHAINS = 4, TILE_OPS = 2 * 16 * 16 * 64 };

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static int64_t read_512(const uint8_t *p, size_t n) {
    __m512i a = _mm512_setzero_si512(), b = a;
    for (size_t i = 0; i < n; i += 128) {
        _mm_prefetch((const char *)p + i + 1024, _MM_HINT_T0);
        _mm_prefetch((const char *)p + i + 1088, _MM_HINT_T0);
        a = _mm512_or_si512(a, _mm512_load_si512(p + i));
        b = _mm512_or_si512(b, _mm512_load_si512(p + i + 64));
    }
    return _mm512_reduce_or_epi64(_mm512_or_si512(a, b));
}

/* Registers only; the empty statement hides that x never changes. */
__attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni"))) static int64_t products_i8(void) {
    __m512i acc[PEAK_CHAINS], x = _mm512_set1_epi8(3), y = _mm512_set1_epi8(-2);
    for (int i = 0; i < PEAK_CHAINS; i++) acc[i] = _mm512_setzero_si512();
#define STEP(i) acc[i] = _mm512_dpbusd_epi32(acc[i], x, y);
    for (int32_t n = 0; n < PEAK_LOOPS; n++) {
        __asm__ volatile("" : "+v"(x));
        STEP(0)
        STEP(1)
        STEP(2)
        STEP(3)
        STEP(4) STEP(5) STEP(6) STEP(7) STEP(8) STEP(9) STEP(10) STEP(11) STEP(12) STEP(13) STEP(14) STEP(15)
    }
#undef STEP
    for (int i = 1; i < PEAK_CHAINS; i++) acc[0] = _mm512_add_epi32(acc[0], acc[i]);
    return _mm512_reduce_add_epi32(acc[0]);
}

/* What LDTILECFG reads: all tiles 16 rows of 64 bytes. */
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t n_rows[16];
} whole_tiles = {
    .palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .n_rows = {16, 16, 16, 16, 16, 16, 16, 16}};

/* In assembly, so that this file needs no option of the compiler. */
static void products_tiles(void) {
    __asm__ volatile("ldtilecfg %0" : : "m"(whole_tiles)); /* and all tiles are zero */
    for (int32_t n = 0; n < TILE_LOOPS; n++)
        __asm__ volatile("tdpbssd %%tmm2, %%tmm0, %%tmm4\n\ttdpbssd %%tmm3, %%tmm0, %%tmm5\n\t"
                         "tdpbssd %%tmm2, %%tmm1, %%tmm6\n\ttdpbssd %%tmm3, %%tmm1, %%tmm7"
                         :
                         : "r"(n));
    __asm__ volatile("tilerelease");
}
#endif

static void read_work(void *arg, int32_t ith, int32_t nth) {
    const size_t part = cold_bytes / (size_t)nth / 4096 * 4096;
    const uint8_t *p = probe_bytes + (size_t)ith * part;
    int64_t seen = 0;
    (void)arg;
#if defined(__x86_64__)
    if (paged_cpu_flags() & PAGED_CPU_AVX512)
        seen = read_512(p, part);
    else
#endif
        for (size_t i = 0; i < part; i += 8) {
            int64_t word;
            memcpy(&word, p + i, sizeof word);
            seen |= word;
        }
    atomic_fetch_or(&sink, seen);
}

static void peak_work(void *arg, int32_t ith, int32_t nth) {
    (void)arg, (void)ith, (void)nth;
#if defined(__x86_64__)
    atomic_fetch_or(&sink, products_i8());
#endif
}

static void tiles_work(void *arg, int32_t ith, int32_t nth) {
    (void)arg, (void)ith, (void)nth;
#if defined(__x86_64__)
    products_tiles();
#endif
}

/* The first time that all threads had a CPU for themselves, or the last of a few: some virtual machines lose
 * a core for a few milliseconds some times a second, and hardly a whole round would be clean there. */
static timing settled(work_fn work, void *arg) {
    timing t = do_all(work, arg);
    for (int32_t i = 1; i < TRIES && !t.clean; i++) t = do_all(work, arg);
    return t;
}

typedef enum limit { LIMIT_NONE, LIMIT_READ, LIMIT_I8, LIMIT_TILES } limit;

static const struct {
    work_fn work;
    double amount; /* bytes or operations: of all threads; of each */
} limits[] = {[LIMIT_READ] = {read_work, 0},
              [LIMIT_I8] = {peak_work, (double)PEAK_LOOPS *PEAK_CHAINS * 128},
              [LIMIT_TILES] = {tiles_work, (double)TILE_LOOPS *TILE_CHAINS *TILE_OPS}};

/* Bytes or operations a second of all threads. */
static double limit_of(limit which, bool *clean) {
    if (which == LIMIT_NONE) return 1;
    const timing t = settled(limits[which].work, NULL);
    *clean = *clean && t.clean;
    return (which == LIMIT_READ ? (double)cold_bytes : the_crew.nth * limits[which].amount) / t.seconds;
}

/* ---- the two sides ---- */

/* Copies of one matrix, and the same product by both. */
typedef struct product {
    paged__weight_type type;
    int32_t n_rows, n_cols, n_tokens, n_copies;
    size_t row_bytes, gguf_bytes; /* gguf_bytes: of one copy */
    uint8_t *gguf, *packed;       /* [n_copies] */
    size_t packed_bytes;
    float *x, *y; /* [n_tokens, n_cols], [n_tokens, n_rows] */
    paged__act act;
    struct ggml_context *ctx;
    struct ggml_cgraph *graph;
    struct ggml_threadpool *pool;
    struct ggml_cplan plan;
} product;

static void ours_work(void *arg, int32_t ith, int32_t nth) {
    const product *p = arg;
    for (int32_t i = 0; i < p->n_copies; i++) {
        paged__matrix w;
        paged__matrix_init(&w, p->type, p->n_rows, p->n_cols, p->packed + (size_t)i * p->packed_bytes);
        for (int32_t t = ith; t < p->n_tokens; t += nth)
            paged__act_set(&p->act, t, p->x + (int64_t)t * p->n_cols, NULL, 0);
        meet();
        const paged__linear_job job = {
            .w = {&w}, .n_w = 1, .x = &p->act, .y = p->y, .y_stride = p->n_rows, .epilogue = PAGED__STORE};
        paged__linear_run(&job, ith, nth);
        meet();
    }
}

/* ggml's threads look for work for a while after it and would have a CPU of ours; so they are left to fall
 * asleep. They cannot be asked for their time. */
static timing theirs_once(product *p) {
    pin(the_crew.cpus[the_crew.nth - 1]); /* where its pool has the caller: behind its workers */
    double wall = clock_s(CLOCK_MONOTONIC), cpu = clock_s(CLOCK_PROCESS_CPUTIME_ID);
    must(ggml_graph_compute(p->graph, &p->plan) == GGML_STATUS_SUCCESS, "ggml_graph_compute");
    wall = clock_s(CLOCK_MONOTONIC) - wall;
    cpu = clock_s(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    pin(the_crew.cpus[0]);
    if (!options.loaded) nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    timing t = timing_of(wall, cpu);
    t.clean = true;
    return t;
}

/* Whether somebody else was there does not show, so the faster of two counts. */
static timing theirs(product *p) {
    const timing one = theirs_once(p), other = theirs_once(p);
    return one.seconds < other.seconds ? one : other;
}

/* A node a copy, so that starting the threads is paid once for all. */
static void open_ggml(product *p) {
    const struct ggml_init_params params = {.mem_size =
                                                ggml_tensor_overhead() * (size_t)(2 * p->n_copies + 8) +
                                                ggml_graph_overhead_custom((size_t)p->n_copies + 8, false) +
                                                (size_t)(p->n_copies + 1) * (size_t)p->n_tokens *
                                                    sizeof(float) * (size_t)PAGED_MAX(p->n_rows, p->n_cols) +
                                                (1 << 20),
                                            .no_alloc = false};
    p->ctx = ggml_init(params);
    must(p->ctx != NULL, "ggml_init");
    struct ggml_tensor *x = ggml_new_tensor_2d(p->ctx, GGML_TYPE_F32, p->n_cols, p->n_tokens);
    memcpy(x->data, p->x, (size_t)p->n_tokens * (size_t)p->n_cols * sizeof(float));
    p->graph = ggml_new_graph_custom(p->ctx, (size_t)p->n_copies + 8, false);
    for (int32_t i = 0; i < p->n_copies; i++) {
        ggml_set_no_alloc(p->ctx, true);
        struct ggml_tensor *w = ggml_new_tensor_2d(p->ctx, types[p->type].ggml, p->n_cols, p->n_rows);
        ggml_set_no_alloc(p->ctx, false);
        w->data = p->gguf + (size_t)i * p->gguf_bytes;
        ggml_build_forward_expand(p->graph, ggml_mul_mat(p->ctx, w, x));
    }
    struct ggml_threadpool_params pool = ggml_threadpool_params_default(the_crew.nth);
    for (int32_t i = 0; i < the_crew.nth; i++) pool.cpumask[the_crew.cpus[i]] = true;
    pool.strict_cpu = true;
    pool.poll = options.loaded ? 0 : 10; /* within a graph that is enough, and the rounds go on sooner */
    p->pool = ggml_threadpool_new(&pool);
    must(p->pool != NULL, "ggml_threadpool_new");
    p->plan = ggml_graph_plan(p->graph, the_crew.nth, p->pool);
    p->plan.work_data = malloc(p->plan.work_size + 64);
    must(p->plan.work_data != NULL, "malloc");
}

static uint32_t random_state = 1;
static float random_unit(void) {
    random_state = random_state * 1664525u + 1013904223u;
    return (float)(random_state >> 8) / (float)(1 << 23) - 1.0f;
}

static product open_product(paged__weight_type type, int32_t n_rows, int32_t n_cols, int32_t n_tokens,
                            bool with_ggml) {
    product p = {.type = type, .n_rows = n_rows, .n_cols = n_cols, .n_tokens = n_tokens};
    p.row_bytes = ggml_row_size(types[type].ggml, n_cols);
    p.gguf_bytes = p.row_bytes * (size_t)n_rows;
    p.packed_bytes = paged__matrix_bytes(type, n_rows, n_cols);
    /* Cold weights, but no more operations a round than let some rounds pass in a few seconds. */
    const int64_t cold = (int64_t)((cold_bytes + p.gguf_bytes - 1) / p.gguf_bytes);
    const int64_t few = (int64_t)4000000000 / (2 * (int64_t)n_rows * n_cols * n_tokens);
    p.n_copies = (int32_t)(n_tokens == 1 ? cold : PAGED_MIN(cold, PAGED_MAX(few, 1)));
    float *row = malloc((size_t)n_cols * sizeof *row);
    p.x = malloc((size_t)n_tokens * (size_t)n_cols * sizeof(float));
    p.y = malloc((size_t)n_tokens * (size_t)n_rows * sizeof(float));
    must(row && p.x && p.y, "malloc");
    for (int64_t i = 0; i < (int64_t)n_tokens * n_cols; i++) p.x[i] = random_unit();
    p.gguf = map_bytes((size_t)p.n_copies * p.gguf_bytes);
    p.packed = map_bytes((size_t)p.n_copies * p.packed_bytes);
    const int32_t n_different = PAGED_MIN(n_rows, 64); /* quantising all would take longer than measuring */
    for (int32_t r = 0; r < n_different; r++) {
        for (int32_t k = 0; k < n_cols; k++) row[k] = random_unit();
        ggml_quantize_chunk(types[type].ggml, row, p.gguf + (size_t)r * p.row_bytes, 0, 1, n_cols, NULL);
    }
    for (int64_t r = n_different; r < (int64_t)n_rows * p.n_copies; r++)
        memcpy(p.gguf + (size_t)r * p.row_bytes, p.gguf + (size_t)(r % n_different) * p.row_bytes,
               p.row_bytes);
    for (int32_t i = 0; i < p.n_copies; i++) {
        paged__matrix w;
        paged__matrix_init(&w, type, n_rows, n_cols, p.packed + (size_t)i * p.packed_bytes);
        paged__matrix_pack(&w, p.gguf + (size_t)i * p.gguf_bytes, p.row_bytes, 0, 1);
    }
    const bool quantised = paged__wants_quantised(type);
    p.act = paged__act_make(quantised, n_tokens, n_cols,
                            map_bytes(paged__act_bytes(quantised, n_tokens, n_cols)));
    if (with_ggml) open_ggml(&p);
    free(row);
    return p;
}

static void close_product(product *p) {
    munmap(p->gguf, (size_t)p->n_copies * p->gguf_bytes);
    munmap(p->packed, (size_t)p->n_copies * p->packed_bytes);
    munmap(p->act.data, paged__act_bytes(p->act.kind, p->n_tokens, p->n_cols));
    free(p->x);
    free(p->y);
    if (!p->ctx) return;
    free(p->plan.work_data);
    ggml_threadpool_free(p->pool);
    ggml_free(p->ctx);
}

/* Both must have computed the same before their times mean anything. */
static void check_same(product *p) {
    do_all(ours_work, p);
    theirs(p);
    const float *y = ggml_graph_node(p->graph, -1)->data;
    double error = 0, size = 0;
    for (int64_t i = 0; i < (int64_t)p->n_tokens * p->n_rows; i++) {
        error += ((double)y[i] - (double)p->y[i]) * ((double)y[i] - (double)p->y[i]);
        size += (double)y[i] * (double)y[i];
    }
    must(error <= size * 0.05 * 0.05, "the comparison of ours with ggml's outputs");
}

/* ---- rows ---- */

typedef struct row {
    const char *metric, *unit;
    bool lower_is_better;
    double must, aim; /* 0: none */
} row;

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int32_t n) {
    qsort(values, (size_t)n, sizeof *values, by_value);
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

static void bootstrap(const double *values, int32_t n, double *low, double *high) {
    enum { DRAWS = 1000 };
    static double medians[DRAWS];
    double draw[ROUNDS_MAX];
    uint64_t rng = 1;
    for (int32_t i = 0; i < DRAWS; i++) {
        for (int32_t k = 0; k < n; k++) draw[k] = values[paged__rand(&rng) % (uint64_t)n];
        medians[i] = median(draw, n);
    }
    qsort(medians, DRAWS, sizeof *medians, by_value);
    *low = medians[DRAWS / 40];
    *high = medians[DRAWS - 1 - DRAWS / 40];
}

static bool failed; /* any row */

static const char *verdict_of(const row *r, double low, double high, int32_t n) {
    if (options.loaded || n < ROUNDS_LEAST) return "inconclusive";
    if (r->must <= 0) return "pass";
    const bool good = r->lower_is_better ? high <= r->must : low >= r->must;
    const bool bad = r->lower_is_better ? low > r->must : high < r->must;
    failed = failed || bad;
    return good ? "pass" : bad ? "fail" : "inconclusive";
}

static void print_bound(const char *name, double bound) {
    if (bound > 0)
        printf("\"%s\": %g, ", name, bound);
    else
        printf("\"%s\": null, ", name);
}

static void print_row(const char *name, const row *r, double *values, int32_t n) {
    double value = 0, low = 0, high = 0;
    if (n > 0) {
        bootstrap(values, n, &low, &high);
        value = median(values, n);
    }
    const char *verdict = verdict_of(r, low, high, n);
    if (!options.json) {
        printf("%-34s %-26s %8.3f %-5s (%.3f … %.3f)", name, r->metric, value, r->unit, low, high);
        if (r->must > 0) printf("  must %g, aim %g: %s", r->must, r->aim, verdict);
        printf("  [%d rounds]\n", n);
    } else {
        printf("{\"bench\": \"linear\", \"case\": \"%s\", \"metric\": \"%s\", \"unit\": \"%s\", \"better\": "
               "\"%s\", ",
               name, r->metric, r->unit, r->lower_is_better ? "lower" : "higher");
        printf("\"value\": %.5g, \"low\": %.5g, \"high\": %.5g, ", value, low, high);
        print_bound("must", r->must);
        print_bound("aim", r->aim);
        printf("\"verdict\": \"%s\", \"rounds\": %d}\n", verdict, n);
    }
    fflush(stdout);
}

/* Values of clean rounds; `value` gives that of one, from the limit at the time. */
typedef double (*round_fn)(void *arg, int32_t index, double limit, bool *clean);

static int32_t rounds(limit which, round_fn value, void *arg, double *values) {
    const int32_t wanted = options.quick ? ROUNDS_LEAST : 40;
    const double give_up = clock_s(CLOCK_MONOTONIC) + (options.quick ? 2 : 20);
    int32_t n = 0;
    for (int32_t i = 0; n < wanted && (i == 0 || clock_s(CLOCK_MONOTONIC) < give_up); i++) {
        bool clean = true;
        const double before = limit_of(which, &clean);
        const double v = value(arg, i, before, &clean), after = limit_of(which, &clean);
        if (!options.loaded && (before > after * 1.1 || after > before * 1.1)) clean = false;
        if (clean) values[n++] = v * before * 2 / (before + after);
    }
    return n;
}

static bool wanted_case(const char *name) {
    return !options.filter || strstr(name, options.filter);
}

/* ---- cases ---- */

static double share_of_peak(void *arg, int32_t index, double peak, bool *clean) {
    const product *p = arg;
    const timing t = settled(ours_work, arg);
    (void)index;
    *clean = *clean && t.clean;
    return 2.0 * p->n_rows * p->n_cols * p->n_tokens * p->n_copies / t.seconds / peak;
}

static double share_of_read(void *arg, int32_t index, double bandwidth, bool *clean) {
    const product *p = arg;
    const timing t = settled(ours_work, arg);
    (void)index;
    *clean = *clean && t.clean;
    return (double)p->packed_bytes * p->n_copies / t.seconds / bandwidth;
}

static double times_ggml(void *arg, int32_t index, double none, bool *clean) {
    product *p = arg;
    timing mine, other;
    (void)none;
    if (index % 2) other = theirs(p);
    mine = settled(ours_work, p);
    if (index % 2 == 0) other = theirs(p);
    *clean = *clean && mine.clean && other.clean;
    return other.seconds / mine.seconds;
}

static void product_case(const char *kind, paged__weight_type type, int32_t n_rows, int32_t n_cols,
                         int32_t n_tokens, limit which, round_fn value, row r) {
    char name[96];
    double values[ROUNDS_MAX];
    snprintf(name, sizeof name, "%s %s %dx%d N=%d", kind, types[type].name, n_rows, n_cols, n_tokens);
    if (!wanted_case(name) || !paged__linear_supports(type, n_rows, n_cols)) return;
    product p = open_product(type, n_rows, n_cols, n_tokens, value == times_ggml);
    if (p.ctx)
        check_same(&p);
    else
        do_all(ours_work, &p);
    print_row(name, &r, values, rounds(which, value, &p, values));
    close_product(&p);
}

static void gemm(void) {
    static const paged__weight_type list[] = {PAGED__W_Q4_1, PAGED__W_Q8_0, PAGED__W_Q4_K, PAGED__W_Q6_K};
    static const int32_t tokens[] = {64, 128, 512};
    if (!(paged_cpu_flags() & PAGED_CPU_AVX512_VNNI)) return;
    for (size_t t = 0; t < 4; t++)
        for (size_t n = 0; n < 3; n++) {
            product_case("gemm", list[t], 4096, 4096, tokens[n], LIMIT_I8, share_of_peak,
                         (row){"share of int8 peak", "share", false, t < 3 ? 0.45 : 0, t < 3 ? 0.7 : 0});
            if (paged_cpu_flags() & PAGED_CPU_AMX)
                product_case("gemm", list[t], 4096, 4096, tokens[n], LIMIT_TILES, share_of_peak,
                             (row){"share of AMX peak", "share", false, 0, 0});
        }
    product_case("gemm", PAGED__W_Q4_1, 3072, 576, 512, LIMIT_I8, share_of_peak,
                 (row){"share of int8 peak", "share", false, 0.45, 0.7});
}

static void gemv(void) {
    static const paged__weight_type list[] = {PAGED__W_Q4_1, PAGED__W_Q8_0, PAGED__W_Q4_K,
                                              PAGED__W_Q6_K, PAGED__W_F16,  PAGED__W_BF16};
    for (size_t t = 0; t < 6; t++)
        product_case("gemv", list[t], 14336, 4096, 1, LIMIT_READ, share_of_read,
                     (row){"share of read bandwidth", "share", false, 0.85, 0.95});
    product_case("gemv", PAGED__W_Q4_1, 49152, 576, 1, LIMIT_READ, share_of_read,
                 (row){"share of read bandwidth", "share", false, 0.85, 0.95});
    product_case("gemv", PAGED__W_Q4_1, 14336, 4096, 8, LIMIT_READ, share_of_read,
                 (row){"share of read bandwidth", "share", false, 0, 0});
    product_case("gemv", PAGED__W_Q4_1, 14336, 4096, 16, LIMIT_READ, share_of_read,
                 (row){"share of read bandwidth", "share", false, 0, 0});
}

static void beside_ggml(void) {
    static const paged__weight_type list[] = {PAGED__W_Q4_1, PAGED__W_Q8_0, PAGED__W_Q4_K};
    static const int32_t shapes[][2] = {{576, 576},   {192, 576},   {3072, 576},   {576, 1536},  {49152, 576},
                                        {4096, 4096}, {1024, 4096}, {28672, 4096}, {4096, 14336}};
    static const struct {
        int32_t n;
        double must, aim;
    } batches[] = {{1, 1.0, 1.2}, {8, 2, 4}, {64, 4, 8}};
    const size_t step = options.quick ? 4 : 1;
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s += step)
        for (size_t t = 0; t < 3; t++)
            for (size_t b = 0; b < 3; b++)
                product_case("ggml", list[t], shapes[s][0], shapes[s][1], batches[b].n, LIMIT_NONE,
                             times_ggml,
                             (row){"times ggml's speed", "ratio", false, batches[b].must, batches[b].aim});
}

/* The tensors of SmolLM2-135M in Q4_1, one buffer for all layers: 85 MB with the embedding. */
static const int32_t smollm2[][3] = {
    {576, 576, 60}, {192, 576, 60}, {1536, 576, 60}, {576, 1536, 30}, {49152, 576, 1}};

typedef struct packing {
    uint8_t *gguf, *packed;
} packing;

static void pack_work(void *arg, int32_t ith, int32_t nth) {
    const packing *p = arg;
    const uint8_t *from = p->gguf;
    uint8_t *to = p->packed;
    for (size_t s = 0; s < 5; s++)
        for (int32_t i = 0; i < smollm2[s][2]; i++) {
            paged__matrix w;
            const size_t row_bytes = ggml_row_size(GGML_TYPE_Q4_1, smollm2[s][1]);
            paged__matrix_init(&w, PAGED__W_Q4_1, smollm2[s][0], smollm2[s][1], to);
            paged__matrix_pack(&w, from, row_bytes, ith, nth);
            from += row_bytes * (size_t)smollm2[s][0];
            to += paged__matrix_bytes(PAGED__W_Q4_1, smollm2[s][0], smollm2[s][1]);
        }
}

/* Into fresh memory, as at load. */
static double pack_seconds(void *arg, int32_t index, double none, bool *clean) {
    packing *p = arg;
    (void)index, (void)none;
    p->packed = map_bytes((size_t)128 << 20);
    const timing t = do_all(pack_work, p);
    *clean = *clean && t.clean;
    munmap(p->packed, (size_t)128 << 20);
    return t.seconds;
}

static void loading(void) {
    double values[ROUNDS_MAX];
    if (!wanted_case("load SmolLM2-135M Q4_1")) return;
    packing p = {.gguf = map_bytes((size_t)128 << 20)};
    memset(p.gguf, 0x21, (size_t)128 << 20);
    const row r = {"packing, all threads", "s", true, 0.5, 0.2};
    print_row("load SmolLM2-135M Q4_1", &r, values, rounds(LIMIT_NONE, pack_seconds, &p, values));
    munmap(p.gguf, (size_t)128 << 20);
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0)
            options.json = true;
        else if (strcmp(argv[i], "--quick") == 0)
            options.quick = true;
        else if (strcmp(argv[i], "--loaded") == 0)
            options.loaded = true;
        else if (strcmp(argv[i], "--case") == 0 && i + 1 < argc)
            options.filter = argv[++i];
        else {
            fprintf(stderr, "usage: bench_linear [--json] [--quick] [--loaded] [--case FILTER]\n");
            return 2;
        }
    }
    find_cpus();
    ggml_cpu_init();
    probe_bytes = map_bytes(cold_bytes);
    memset(probe_bytes, 1, cold_bytes);
    if (!options.json) printf("kernels: %s, %d threads\n", paged__linear_kernels(), the_crew.nth);
    loading();
    gemm();
    gemv();
    beside_ggml();
    return failed;
}
