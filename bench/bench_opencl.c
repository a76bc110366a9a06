/* bench_opencl.c: attention on an OpenCL device: what a driver's compiler costs before the first answer, what
 * block tables cost in attention, and decode beside the kernels of this processor. One JSON object a row.
 *
 *     ./x bench opencl [build|lookup|decode] [--json]
 *
 * Others may work on this machine, so the two of a pair take turns, and what is compared is the CPU time
 * of all threads of the process, which waiting for a core does not change. The processor's own kernels run
 * on one thread, the device's on all that it has: neither spins while it waits. A figure is the median of
 * the rounds, of a ratio that of the ratios of each round. The device must be this processor (PoCL) for CPU
 * time to mean anything.
 *
 * "Without" a table, the same code takes the blocks of a sequence to lie in order behind its first one, as
 * they do here. On the device that is an option of the program; of the processor's kernels this file compiles
 * the code between tables and kernels (attn_run.c, tiles.c) a second time, with a paged__table_at that does
 * either. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"
#include "ops/opencl/cl.h"
#include "ops/tables.h"
#include "paged/opencl.h"

/* ---- the CPU's kernels, with and without tables ---- */

static bool is_direct;

static inline paged__slot with_or_without(const paged_kv *kv, const paged__table *table, int32_t block,
                                          int32_t offset) {
    if (is_direct) return (paged__slot){table->blocks[0] + block, offset};
    return paged__table_at(kv, table, block, offset);
}
#define paged__table_at      with_or_without
#define paged__tiles_find    copy_tiles_find
#define paged__scales_find   copy_scales_find
#define paged__tiles_pack    copy_tiles_pack
#define paged__tiles_widen   copy_tiles_widen
#define paged__heads_at_once copy_heads_at_once
#define paged__unit_set_rows copy_unit_set_rows
#define paged__unit_load     copy_unit_load
#define paged__unit_begin    copy_unit_begin
#define paged__unit_attend   copy_unit_attend
#define paged__unit_rows     copy_unit_rows
#define paged__unit_fold     copy_unit_fold
#define paged__unit_finish   copy_unit_finish
#define paged_attn_run       copy_run
#define paged_attn_merge     copy_merge
void copy_run(paged_attn *attn, const paged_kv *kv, const paged_attn_io *io, int32_t ith, int32_t nth);
void copy_merge(paged_attn *attn, const paged_attn_io *io, int32_t ith, int32_t nth);
#include "ops/attn_run.c"
#include "ops/tiles.c"
#undef paged_attn_run
#undef paged_attn_merge

/* ---- a case: sequences that decode ---- */

typedef struct shape {
    const char *name;
    int32_t n_heads, n_kv_heads, head_dim;
} shape;

static const shape shapes[] = {{"smollm2-135m", 9, 3, 64}, {"llama-3-8b", 32, 8, 128}};
enum { SEQS_MAX = 16, ROUNDS_MAX = 2401 };

typedef struct world {
    shape shape;
    paged_type type;
    int32_t n_seqs, n_keys, block_size;
    paged_kv here, away;
    uint8_t *bytes;
    size_t size_bytes;
    int32_t *blocks, cu[SEQS_MAX + 1], lens[SEQS_MAX];
    paged_batch batch;
    float *q, *out;
    paged_attn *attn;
    paged_arena arena;
    paged_cl_attn *cl_attn, *cl_direct; /* NULL: not asked for */
} world;

static paged_cl *device;

static void quit(const char *what, const paged_error *err) {
    fprintf(stderr, "bench opencl: %s: %s\n", what, err ? err->message : "");
    exit(EXIT_FAILURE);
}

static void *take(size_t n) {
    void *p = aligned_alloc(64, (n + 63) / 64 * 64);
    if (!p) quit("no memory", NULL);
    memset(p, 0, n);
    return p;
}

static uint8_t *away_of(const world *w, const uint8_t *part) {
    return part ? (uint8_t *)(uintptr_t)(PAGED_ARENA_AWAY + (size_t)(part - w->bytes)) : NULL;
}

static void lay_out(world *w) {
    const shape *s = &w->shape;
    const int32_t n_each = (w->n_keys + w->block_size - 1) / w->block_size;
    const int64_t elem = (int64_t)paged__type_bytes(w->type), part = elem * w->block_size * s->head_dim;
    const int64_t scales = w->type == PAGED_TYPE_I8 ? 4LL * w->block_size : 0;
    paged_kv *kv = &w->here;
    *kv = (paged_kv){.n_blocks = n_each * w->n_seqs,
                     .block_size = w->block_size,
                     .n_kv_heads = s->n_kv_heads,
                     .head_dim_k = s->head_dim,
                     .head_dim_v = s->head_dim,
                     .type = w->type,
                     .layout = PAGED_LAYOUT_PACKED,
                     .block_stride = s->n_kv_heads * 2 * (part + scales),
                     .k_head_stride = part,
                     .v_head_stride = part,
                     .scale_head_stride = scales};
    kv->scale_block_stride = scales ? kv->block_stride : 0;
    w->size_bytes = (size_t)(kv->block_stride * kv->n_blocks);
    kv->k = w->bytes = take(w->size_bytes);
    kv->v = kv->k + s->n_kv_heads * part;
    kv->k_scale = scales ? kv->v + s->n_kv_heads * part : NULL;
    kv->v_scale = scales ? kv->k_scale + s->n_kv_heads * scales : NULL;
    w->away = *kv;
    w->away.k = away_of(w, kv->k);
    w->away.v = away_of(w, kv->v);
    w->away.k_scale = away_of(w, kv->k_scale);
    w->away.v_scale = away_of(w, kv->v_scale);
    w->blocks = take((size_t)kv->n_blocks * sizeof(int32_t));
    for (int32_t i = 0; i < kv->n_blocks; i++) w->blocks[i] = i;
    for (int32_t i = 0; i < w->n_seqs; i++) {
        w->lens[i] = w->n_keys;
        w->cu[i + 1] = i + 1;
    }
    w->batch = (paged_batch){.cu_seqlens_q = w->cu,
                             .tables = {.blocks = w->blocks,
                                        .seq_stride = n_each,
                                        .seqlens_k = w->lens,
                                        .n_seqs = w->n_seqs,
                                        .max_blocks = n_each}};
}

static void fill(world *w) {
    const size_t row = (size_t)w->shape.n_kv_heads * (size_t)w->shape.head_dim;
    const size_t n_q = (size_t)w->n_seqs * (size_t)w->shape.n_heads * (size_t)w->shape.head_dim;
    float *k = take(row * sizeof *k), *v = take(row * sizeof *v);
    uint64_t state = 1;
    for (int64_t slot = 0; slot < (int64_t)w->here.n_blocks * w->block_size; slot++) {
        for (size_t i = 0; i < row; i++) {
            k[i] = (float)(paged__rand(&state) >> 40) / (float)(1 << 23) - 1;
            v[i] = (float)(paged__rand(&state) >> 40) / (float)(1 << 23) - 1;
        }
        paged_kv_write(&w->here, k, 0, v, 0, &slot, 1, 0, 1);
    }
    free(k);
    free(v);
    w->q = take(n_q * sizeof *w->q);
    w->out = take(n_q * sizeof *w->out);
    for (size_t i = 0; i < n_q; i++) w->q[i] = (float)(paged__rand(&state) >> 40) / (float)(1 << 23) - 1;
}

static void open_world(world *w, bool direct) {
    paged_error err;
    lay_out(w);
    fill(w);
    const paged_attn_config config = {.struct_size = sizeof config,
                                      .n_heads = w->shape.n_heads,
                                      .n_kv_heads = w->shape.n_kv_heads,
                                      .head_dim_k = w->shape.head_dim,
                                      .block_size = w->block_size,
                                      .type = w->type,
                                      .layout = PAGED_LAYOUT_PACKED,
                                      .max_q = w->n_seqs,
                                      .max_seqs = w->n_seqs,
                                      .max_k = w->n_keys};
    paged_status s = paged_attn_create(&config, &w->attn, &err);
    if (!s) s = paged_attn_plan(w->attn, &w->batch, &w->here, &err);
    if (!s) s = paged_cl_arena_create(device, w->size_bytes, &w->arena, &err);
    if (!s) s = paged_cl_block_write(&w->arena, 0, w->size_bytes, w->bytes, NULL, &err);
    if (!s) s = paged_cl_transfers_wait(&w->arena, &err);
    if (!s) s = paged_cl_attn_create(device, &w->arena, &config, &w->cl_attn, &err);
    if (!s) s = paged_cl_attn_plan(w->cl_attn, &w->batch, &w->away, &err);
    if (!s && direct) s = paged__cl_attn_create(device, &w->arena, &config, true, &w->cl_direct, &err);
    if (!s && direct) s = paged_cl_attn_plan(w->cl_direct, &w->batch, &w->away, &err);
    if (s) quit(w->shape.name, &err);
}

static void close_world(world *w) {
    paged_cl_attn_free(w->cl_direct);
    paged_cl_attn_free(w->cl_attn);
    w->arena.destroy(w->arena.ctx);
    paged_attn_free(w->attn);
    free(w->q);
    free(w->out);
    free(w->blocks);
    free(w->bytes);
}

/* ---- sides ---- */

typedef struct side {
    void (*run)(world *w);
    double seconds[ROUNDS_MAX]; /* CPU time of a call */
    int32_t n_rounds;
} side;

static void run_cpu(world *w) {
    paged_attn_run(w->attn, &w->here, &(paged_attn_io){.q = w->q, .out = w->out}, 0, 1);
}
static void run_cpu_tables(world *w) {
    is_direct = false;
    copy_run(w->attn, &w->here, &(paged_attn_io){.q = w->q, .out = w->out}, 0, 1);
}
static void run_cpu_direct(world *w) {
    is_direct = true;
    copy_run(w->attn, &w->here, &(paged_attn_io){.q = w->q, .out = w->out}, 0, 1);
}
static void run_on(world *w, paged_cl_attn *attn) {
    paged_error err;
    if (paged_cl_attn_run(attn, &w->away, &(paged_attn_io){.q = w->q, .out = w->out}, &err))
        quit("attention", &err);
}
static void run_cl(world *w) {
    run_on(w, w->cl_attn);
}
static void run_cl_direct(world *w) {
    run_on(w, w->cl_direct);
}

static double now(void) {
    return 1e-9 * (double)paged__now_ns();
}

static double cpu_seconds(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)u.ru_utime.tv_sec + (double)u.ru_stime.tv_sec +
           1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static void measure(world *w, side *s, int32_t round, int32_t n_times) {
    const double before = cpu_seconds();
    for (int32_t i = 0; i < n_times; i++) s->run(w);
    s->seconds[round] = (cpu_seconds() - before) / n_times;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Of n values, the one at `part` of their order: 0.5 is the median. */
static double middle(const double *values, int32_t n, double part) {
    double sorted[ROUNDS_MAX];
    memcpy(sorted, values, (size_t)n * sizeof *sorted);
    qsort(sorted, (size_t)n, sizeof *sorted, ascending);
    return sorted[(int32_t)((n - 1) * part + 0.5)];
}

static double typical(const side *s) {
    return middle(s->seconds, s->n_rounds, 0.5);
}

static void ratios(const side *a, const side *b, double *out) {
    for (int32_t i = 0; i < a->n_rounds; i++) out[i] = a->seconds[i] / b->seconds[i];
}

/* Rounds of both, each first in turns, of so many seconds each. */
static void compare(world *w, side *a, side *b, int32_t n_rounds, double seconds) {
    a->n_rounds = b->n_rounds = n_rounds;
    measure(w, a, 0, 3);
    measure(w, b, 0, 3);
    const int32_t n_a = 1 + (int32_t)(seconds / a->seconds[0]), n_b = 1 + (int32_t)(seconds / b->seconds[0]);
    for (int32_t i = 0; i < n_rounds; i++) {
        if (i % 2) measure(w, a, i, n_a);
        measure(w, b, i, n_b);
        if (i % 2 == 0) measure(w, a, i, n_a);
    }
}

static const char *type_name(paged_type type) {
    static const char *const names[] = {"f16", "f32", "bf16", "i8"};
    return names[type];
}

/* ---- the rows ---- */

/* One object a row, as of all benches; less is better in all of these. low above high: no interval; must, aim
 * 0: none. */
static void print_row(const char *name, const char *metric, const char *in, double value, double low,
                      double high, double must, double aim) {
    const char *verdict = must == 0 || high <= must ? "pass" : low > must ? "fail" : "inconclusive";
    printf("{\"bench\": \"opencl\", \"case\": \"%s\", \"metric\": \"%s\", \"unit\": \"%s\", \"better\": "
           "\"lower\", "
           "\"value\": %.5g, ",
           name, metric, in, value);
    if (low <= high)
        printf("\"low\": %.5g, \"high\": %.5g, ", low, high);
    else
        printf("\"low\": null, \"high\": null, ");
    if (must != 0)
        printf("\"must\": %.5g, ", must);
    else
        printf("\"must\": null, ");
    if (aim != 0)
        printf("\"aim\": %.5g, ", aim);
    else
        printf("\"aim\": null, ");
    printf("\"verdict\": \"%s\"}\n", verdict);
    fflush(stdout);
}

static void print_value(const char *name, const char *metric, const char *in, double value) {
    print_row(name, metric, in, value, 1, 0, 0, 0);
}

/* The median lies between these two places of the order with 95 %: 0.5 - and + this. */
static double half_interval(int32_t n_rounds) {
    return 0.98 / sqrt(n_rounds);
}

static void print_lookup(world *w, const char *where, void (*with)(world *), void (*without)(world *)) {
    enum { N = ROUNDS_MAX };
    side a = {.run = with}, b = {.run = without};
    double ratio[N];
    compare(w, &a, &b, N, 0.005);
    ratios(&b, &a, ratio);
    const double half = half_interval(N);
    char name[120];
    snprintf(name, sizeof name, "look-ups, %s, %s, %s, %d x %d keys, blocks of %d", where, w->shape.name,
             type_name(w->type), w->n_seqs, w->n_keys, w->block_size);
    print_row(name, "share of attention", "share", 1 - middle(ratio, N, 0.5),
              1 - middle(ratio, N, 0.5 + half), 1 - middle(ratio, N, 0.5 - half), 0.005, 0.001);
    print_value(name, "CPU time with tables", "us", 1e6 * typical(&a));
    print_value(name, "CPU time without tables", "us", 1e6 * typical(&b));
}

static void lookups(void) {
    static const int32_t block_sizes[] = {16, 64};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (size_t b = 0; b < sizeof block_sizes / sizeof block_sizes[0]; b++) {
            /* Less than caches hold: a look-up weighs most where nothing waits for memory. */
            world w = {.shape = shapes[i], .n_seqs = 2, .n_keys = 2048, .block_size = block_sizes[b]};
            open_world(&w, true);
            print_lookup(&w, "opencl", run_cl, run_cl_direct);
            print_lookup(&w, paged_attn_kernels(w.attn), run_cpu_tables, run_cpu_direct);
            close_world(&w);
        }
}

static void decodes(void) {
    static const paged_type types[] = {PAGED_TYPE_F16, PAGED_TYPE_F32, PAGED_TYPE_BF16, PAGED_TYPE_I8};
    /* What the driver compiles for, at most, then all that there is. */
    static const uint32_t sets[] = {PAGED_CPU_AVX2 | PAGED_CPU_AVX512, ~0u};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (size_t t = 0; t < 4; t++)
            for (size_t k = 0; k < sizeof sets / sizeof sets[0]; k++) {
                paged_cpu_mask(sets[k]);
                world w = {
                    .shape = shapes[i], .type = types[t], .n_seqs = 4, .n_keys = 4096, .block_size = 64};
                side cl = {.run = run_cl}, cpu = {.run = run_cpu};
                double ratio[ROUNDS_MAX];
                open_world(&w, false);
                compare(&w, &cl, &cpu, 25, 0.02);
                ratios(&cl, &cpu, ratio);
                const double half = half_interval(cl.n_rounds);
                char name[120];
                snprintf(name, sizeof name, "decode, %s, %s, %d x %d keys, beside %s", w.shape.name,
                         type_name(w.type), w.n_seqs, w.n_keys, paged_attn_kernels(w.attn));
                /* Only the first set is what the driver has, too. */
                print_row(name, "CPU time, OpenCL / our kernels", "ratio", middle(ratio, cl.n_rounds, 0.5),
                          middle(ratio, cl.n_rounds, 0.5 - half), middle(ratio, cl.n_rounds, 0.5 + half),
                          k == 0 ? 2 : 0, 0);
                print_value(name, "CPU time, OpenCL", "us", 1e6 * typical(&cl));
                print_value(name, "CPU time, our kernels", "us", 1e6 * typical(&cpu));
                close_world(&w);
            }
    paged_cpu_mask(~0u);
}

/* One process, from nothing to answers: opening with the attention object, the first call, a later one. */
static void first_call(const char *state, const char *dir, const char *driver_dir) {
    setenv("POCL_CACHE_DIR", driver_dir, 1);
    const paged_cl_config config = {.struct_size = sizeof config, .cache_dir = dir};
    paged_cl_stats stats;
    paged_error err;
    world w = {.shape = shapes[0], .n_seqs = 1, .n_keys = 1024, .block_size = 16};
    const double begin = now(), cpu = cpu_seconds();
    if (paged_cl_open(&config, &device, &err)) quit("open", &err);
    const double opened = now();
    open_world(&w, false);
    paged_cl_get_stats(device, &stats);
    double calls[3];
    for (int32_t i = 0; i < 3; i++) {
        const double start = now();
        run_cl(&w);
        calls[i] = now() - start;
    }
    char name[120];
    snprintf(name, sizeof name, "program, %s", state);
    print_value(name, "opening", "ms", 1e3 * (opened - begin));
    print_value(name, "the attention object", "ms", 1e-6 * (double)stats.build_ns);
    print_value(name, "CPU time of all", "ms", 1e3 * (cpu_seconds() - cpu));
    print_value(name, "first call", "ms", 1e3 * calls[0]);
    print_value(name, "third call", "ms", 1e3 * calls[2]);
    close_world(&w);
    paged_cl_close(device);
}

/* Before anything of OpenCL is in this process: drivers do not bear a fork. */
static void builds(void) {
    static const struct {
        const char *state, *dir, *driver_dir;
    } rows[] = {{"cold", "ours", "driver"},
                {"cached", "ours", "driver"},
                {"cached, the driver's own cache empty", "ours", "other"},
                {"only the driver's own cache", "", "driver"}};
    char base[] = "/tmp/paged-opencl-XXXXXX", dir[64], driver_dir[64], command[96];
    if (!mkdtemp(base)) quit("no folder in /tmp", NULL);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        snprintf(dir, sizeof dir, "%s%s%s", *rows[i].dir ? base : "", *rows[i].dir ? "/" : "", rows[i].dir);
        snprintf(driver_dir, sizeof driver_dir, "%s/%s", base, rows[i].driver_dir);
        const pid_t child = fork();
        if (child == 0) {
            first_call(rows[i].state, dir, driver_dir);
            exit(EXIT_SUCCESS);
        }
        int status;
        if (child < 0 || waitpid(child, &status, 0) < 0 || status != 0) quit("a child failed", NULL);
    }
    snprintf(command, sizeof command, "rm -r %s", base);
    if (system(command) != 0) quit(base, NULL);
}

int main(int argc, char **argv) {
    const char *only = "";
    for (int i = 1; i < argc; i++) /* it prints JSON in any case */
        if (strcmp(argv[i], "--json") != 0) only = argv[i];
    const bool all = !*only;
    if (!all && strcmp(only, "build") != 0 && strcmp(only, "lookup") != 0 && strcmp(only, "decode") != 0) {
        fprintf(stderr, "bench opencl: there are build, lookup and decode, no \"%s\"\n", only);
        return 2;
    }
    const paged_cl_config config = {.struct_size = sizeof config};
    paged_error err;
    if (all || strcmp(only, "build") == 0) builds();
    if (!all && strcmp(only, "build") == 0) return EXIT_SUCCESS;
    if (paged_cl_open(&config, &device, &err)) quit("open", &err);
    fprintf(stderr, "device: %s, driver %s\n", paged_cl_get_device(device)->name,
            paged_cl_get_device(device)->driver);
    if (all || strcmp(only, "lookup") == 0) lookups();
    if (all || strcmp(only, "decode") == 0) decodes();
    paged_cl_close(device);
    return EXIT_SUCCESS;
}
