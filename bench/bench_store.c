/* bench/bench_store.c: what a store costs and brings, for bench_store.py, which drives it.
 *
 *     bench_store MODEL DIR [N_THREADS [REDIS]]        REDIS: its servers, as in redis_store.h
 *
 * One command a line on stdin, one line of JSON on stdout for each:
 *
 *     ttft ID N   seconds to the first token of prompt ID of N tokens: computed ("cold"), from memory
 *                 ("memory"), by a new engine from files that the system has forgotten ("disk") and from
 *                 files that it was not told to forget ("warm"); by one from Redis ("redis", if there is
 *                 one); "cached": tokens that were not computed
 *     slow ID P N the same work (prompts of P tokens, then N tokens of several requests) by an engine without
 *                 a store ("plain") and by one that writes all its blocks ("writing"): of each step its
 *                 tokens, seconds, CPU seconds and blocks that were written meanwhile; the blocks that the
 *                 work fills ("made"), those that were lost in the round ("lost"), and how often the
 *                 store failed in it ("failed")
 *     write MIB   writes so much, in records of the model's size, into a new store, until it is durable
 *     read        reads it all, once the system has forgotten it, as an engine does: prompt by prompt, each
 *                 looked for and announced first
 *
 * The clock runs around the work alone.
 */
#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <unistd.h>

#include "base/base.h"
#include "bench/protocol.h"
#include "paged/engine.h"
#include "paged/file_store.h"
#include "paged/redis_store.h"

enum { BLOCK_SIZE = 16, N_REQUESTS = 4, WORK_MAX = 304 /* tokens of a request */, FLUSH_MS = 50 };
enum { PROMPT_RECORDS = 256 /* of a prompt that is read */ };

typedef struct bench {
    paged_model *model;
    paged_model_info info;
    const char *dir, *redis; /* NULL: there is none */
    int32_t n_threads;
    int32_t *prompt; /* [n_prompt_max] */
    size_t block_bytes;
    int64_t n_records; /* of the latest `write` */
} bench;

static bool fail(const char *what, const paged_error *err) {
    fprintf(stderr, "bench_store: %s: %s\n", what, err->message);
    return false;
}

/* ---- directories ---- */

static int remove_one(const char *path, const struct stat *info, int type, struct FTW *ftw) {
    (void)info, (void)type, (void)ftw;
    return remove(path);
}

static void path_in(const bench *b, const char *name, char out[600]) {
    snprintf(out, 600, "%s/%s", b->dir, name);
}

/* The system forgets what it has of the files of a directory, which were synced. */
static void forget(const char *dir) {
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d)) != NULL;) {
        const int fd = openat(dirfd(d), e->d_name, O_RDONLY | O_CLOEXEC);
        if (fd < 0) continue;
        fdatasync(fd);
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
    if (d) closedir(d);
}

static bool open_store(const char *dir, paged_store *out) {
    paged_error err;
    const paged_file_store_config config = {.struct_size = sizeof config, .dir = dir};
    return paged_file_store_create(&config, out, NULL, &err) == PAGED_OK || fail("store", &err);
}

/* ---- engines ---- */

static bool open_redis(const char *servers, paged_store *out) {
    paged_error err;
    const paged_redis_store_config config = {
        .struct_size = sizeof config, .servers = servers, .timeout_ms = 2000};
    return paged_redis_store_create(&config, out, NULL, &err) == PAGED_OK || fail("redis", &err);
}

/* dir, redis NULL: without that store. */
static paged_engine *new_engine(const bench *b, const char *dir, const char *redis, int32_t n_ctx) {
    paged_engine *engine = NULL;
    paged_store stores[2];
    paged_error err;
    int32_t n = 0;
    if (dir && !open_store(dir, &stores[n++])) return NULL;
    if (redis && !open_redis(redis, &stores[n++])) return NULL;
    const paged_engine_config config = {.struct_size = sizeof config,
                                        .kv_type = PAGED_KV_AUTO,
                                        .n_ctx = n_ctx,
                                        .pool_bytes = b->block_bytes * (size_t)(n_ctx / BLOCK_SIZE) * 3,
                                        .block_size = BLOCK_SIZE,
                                        .n_threads = b->n_threads,
                                        .max_running = N_REQUESTS,
                                        .max_waiting = N_REQUESTS,
                                        .warm_up = true,
                                        .stores = stores,
                                        .n_stores = n};
    if (paged_engine_create(b->model, &config, &engine, &err) == PAGED_OK) return engine;
    fail("engine", &err);
    while (n-- > 0) stores[n].close(stores[n].self);
    return NULL;
}

static bool submit(const bench *b, paged_engine *engine, int32_t prompt, int32_t n_tokens, int32_t n_new,
                   uint64_t *id) {
    paged_request request;
    paged_error err;
    paged_request_init(&request);
    for (int32_t i = 0; i < n_tokens; i++) b->prompt[i] = bench_token(prompt, i, b->info.n_vocab);
    request.tokens = b->prompt;
    request.n_tokens = n_tokens;
    request.max_tokens = n_new;
    request.ignore_eos = true;
    return paged_engine_submit(engine, &request, id, &err) == PAGED_OK || fail("submit", &err);
}

/* Seconds from here to the first token of a prompt; *cached: tokens of it that were not computed. */
static bool first_token(const bench *b, paged_engine *engine, int32_t prompt, int32_t n_tokens,
                        double *seconds, int32_t *cached) {
    paged_error err;
    paged_output out = {0};
    uint64_t id;
    const double start = bench_seconds(CLOCK_MONOTONIC);
    if (!engine || !submit(b, engine, prompt, n_tokens, 1, &id)) return false;
    while (out.n_tokens == 0) {
        if (paged_engine_step(engine, NULL, &err)) return fail("step", &err);
        if (paged_engine_read(engine, id, &out) || out.finish == PAGED_FINISH_ERROR) return false;
    }
    *seconds = bench_seconds(CLOCK_MONOTONIC) - start;
    *cached = out.cached_tokens;
    paged_engine_release(engine, id);
    return true;
}

static bool ttft(bench *b, int32_t id, int32_t n) {
    static const char *const names[] = {"cold", "memory", "disk", "warm", "redis"};
    const int n_ways = b->redis ? 5 : 4;
    double seconds[5];
    int32_t cached[5];
    char dir[600];
    path_in(b, "blocks", dir);
    paged_engine *engine = new_engine(b, dir, b->redis, n + 64);
    bool ok = first_token(b, engine, id, n, &seconds[0], &cached[0]) &&
              first_token(b, engine, id, n, &seconds[1], &cached[1]);
    paged_engine_free(engine);
    for (int i = 2; i < n_ways && ok; i++) {
        engine = new_engine(b, i < 4 ? dir : NULL, i < 4 ? NULL : b->redis, n + 64);
        if (i == 2) forget(dir);
        ok = first_token(b, engine, id, n, &seconds[i], &cached[i]);
        paged_engine_free(engine);
    }
    printf("{");
    for (int i = 0; i < n_ways && ok; i++) printf("\"%s\": %.6f, ", names[i], seconds[i]);
    if (ok)
        printf("\"cached\": [%d, %d, %d, %d, %d]", cached[0], cached[1], cached[2], cached[3],
               b->redis ? cached[4] : 0);
    puts("}");
    return ok;
}

typedef struct task {
    int32_t n_prompt, n_decode;
} task;

/* A step, and what went on meanwhile. */
typedef struct step {
    double seconds, cpu_seconds;
    int64_t n_tokens, n_written; /* computed; blocks */
} step;

enum { STEPS_MAX = 2 * WORK_MAX };
typedef struct steps {
    step of[STEPS_MAX];
    int32_t n;
} steps;

/* Several prompts of their own, then tokens of all. What is not computing (a look into the store) is a part
 * of the step behind it, so that both engines have the same steps; what comes after the last, of that one. */
static bool work(const bench *b, paged_engine *engine, int32_t prompt, task what, steps *out) {
    uint64_t ids[N_REQUESTS];
    paged_error err;
    paged_engine_stats stats;
    int32_t n_active = 1;
    paged_engine_get_stats(engine, &stats);
    double start = bench_seconds(CLOCK_MONOTONIC), cpu_start = bench_seconds(CLOCK_PROCESS_CPUTIME_ID);
    uint64_t written = stats.n_store_writes, n_steps = stats.n_steps, n_tokens = stats.n_tokens;
    out->n = 0;
    for (int32_t i = 0; i < N_REQUESTS; i++)
        if (!engine || !submit(b, engine, prompt + i, what.n_prompt, what.n_decode, &ids[i])) return false;
    while (n_active) {
        if (paged_engine_step(engine, &n_active, &err)) return fail("step", &err);
        for (int32_t i = 0; i < N_REQUESTS; i++) {
            paged_output output;
            if (paged_engine_read(engine, ids[i], &output)) return false;
        }
        paged_engine_get_stats(engine, &stats);
        const bool computed = stats.n_steps != n_steps;
        if (!computed && n_active) continue;
        if (out->n + computed > STEPS_MAX || out->n + computed == 0) return false;
        if (computed) out->of[out->n++] = (step){0};
        const double now = bench_seconds(CLOCK_MONOTONIC), cpu_now = bench_seconds(CLOCK_PROCESS_CPUTIME_ID);
        step *latest = &out->of[out->n - 1];
        latest->seconds += now - start;
        latest->cpu_seconds += cpu_now - cpu_start;
        latest->n_tokens += (int64_t)(stats.n_tokens - n_tokens);
        latest->n_written += (int64_t)(stats.n_store_writes - written);
        start = now;
        cpu_start = cpu_now;
        written = stats.n_store_writes;
        n_steps = stats.n_steps;
        n_tokens = stats.n_tokens;
    }
    for (int32_t i = 0; i < N_REQUESTS; i++) paged_engine_release(engine, ids[i]);
    return true;
}

/* Until nothing waits to be written any more, and the flush that then begins is over. */
static void settle(paged_engine *engine) {
    paged_engine_stats stats;
    do {
        usleep(FLUSH_MS * 1000);
        paged_engine_get_stats(engine, &stats);
    } while (stats.n_store_queued);
}

/* Blocks that found no place to wait in to be written. */
static int64_t n_lost(paged_engine *engine) {
    paged_engine_stats stats;
    paged_engine_get_stats(engine, &stats);
    return (int64_t)stats.n_store_dropped;
}

static int64_t n_failed(paged_engine *engine) {
    paged_engine_stats stats;
    paged_engine_get_stats(engine, &stats);
    return (int64_t)stats.n_store_failures;
}

static void print_steps(const char *name, const steps *s, const char *end) {
    printf("\"%s\": [", name);
    for (int32_t i = 0; i < s->n; i++)
        printf("%s[%lld, %.6f, %.6f, %lld]", i ? ", " : "", (long long)s->of[i].n_tokens, s->of[i].seconds,
               s->of[i].cpu_seconds, (long long)s->of[i].n_written);
    printf("]%s", end);
}

/* Both engines live on from round to round: their making is not measured. The one that writes begins anew
 * every REOPEN rounds, before its store is full. Which comes first changes with ID.
 * Of each the second of two turns is measured, so that the threads are awake, and the one with a store writes
 * what the first turn's end left, as its own end is left to nobody: a turn's worth of blocks in a turn. */
static bool slow(bench *b, int32_t id, task what) {
    enum { REOPEN = 64 }; /* some 3.5 GB */
    static paged_engine *engines[2];
    char dir[600];
    static steps of[2];
    const int32_t first = 2 * N_REQUESTS * id + 1000000;
    path_in(b, "written", dir);
    if (engines[1] && id % REOPEN == 0) {
        paged_engine_free(engines[1]);
        engines[1] = NULL;
        nftw(dir, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    }
    for (int i = 0; i < 2; i++)
        if (!engines[i]) engines[i] = new_engine(b, i ? dir : NULL, NULL, 2 * WORK_MAX);
    if (!engines[0] || !engines[1]) return false;
    const int64_t lost_before = n_lost(engines[1]), failed_before = n_failed(engines[1]);
    for (int i = 0; i < 2; i++) {
        const int which = (i + id) % 2;
        for (int32_t k = 0; k < 2; k++)
            if (!work(b, engines[which], first + k * N_REQUESTS, what, &of[which])) return false;
        if (which == 1) settle(engines[1]);
    }
    const int32_t n_made = N_REQUESTS * ((what.n_prompt + what.n_decode - 1 + BLOCK_SIZE - 1) / BLOCK_SIZE);
    printf("{\"made\": %d, \"lost\": %lld, \"failed\": %lld, ", n_made,
           (long long)(n_lost(engines[1]) - lost_before), (long long)(n_failed(engines[1]) - failed_before));
    print_steps("plain", &of[0], ", ");
    print_steps("writing", &of[1], "}\n");
    return true;
}

/* ---- records alone ---- */

static paged_key key_of(int64_t number) {
    paged_key key = {{0}};
    const uint64_t half = paged__mix((uint64_t)number);
    memcpy(key.bytes, &half, sizeof half);
    memcpy(key.bytes + 8, &number, sizeof number);
    return key;
}

/* As an engine begins to read a prompt: it asks what is there, and says what it will want of that. */
static bool begin_prompt(paged_store *store, int64_t first, int64_t n_records) {
    paged_key keys[PROMPT_RECORDS];
    const int32_t n = (int32_t)PAGED_MIN(n_records - first, PROMPT_RECORDS);
    for (int32_t i = 0; i < n; i++) keys[i] = key_of(first + i);
    if (store->find(store->self, keys, n) != n) return false;
    store->expect(store->self, keys, n);
    return true;
}

static bool records(bench *b, int64_t n_records, bool is_write) {
    char dir[600];
    paged_store store;
    paged_error err = {0};
    int32_t tokens[BLOCK_SIZE] = {0};
    uint8_t *bytes = malloc(b->block_bytes);
    const paged_store_shape shape = {(const uint8_t *)"bench", 5, BLOCK_SIZE, 1, {b->block_bytes}};
    path_in(b, "records", dir);
    if (is_write) nftw(dir, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    if (!bytes || !open_store(dir, &store)) return false;
    paged_status status = store.open(store.self, &shape, &err);
    for (size_t i = 0; i < b->block_bytes; i++) bytes[i] = (uint8_t)paged__mix(i);
    if (!is_write) forget(dir);
    const double start = bench_seconds(CLOCK_MONOTONIC), cpu = bench_seconds(CLOCK_PROCESS_CPUTIME_ID);
    for (int64_t i = 0; i < n_records && !status; i++) {
        if (!is_write && i % PROMPT_RECORDS == 0 && !begin_prompt(&store, i, n_records))
            status = paged__fail(&err, PAGED_ERR_NOT_FOUND, "record %lld", (long long)i);
        paged_record record = {
            .key = key_of(i), .n_tokens = BLOCK_SIZE, .tokens = tokens, .groups = 1, .bytes = {bytes}};
        status = is_write ? store.write(store.self, &record, &err) : store.read(store.self, &record, 1);
    }
    if (!status) status = store.flush(store.self, &err);
    const double seconds = bench_seconds(CLOCK_MONOTONIC) - start;
    const double cpu_seconds = bench_seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    store.close(store.self);
    free(bytes);
    if (status) return fail(is_write ? "write" : "read", &err);
    printf("{\"bytes\": %lld, \"seconds\": %.6f, \"cpu_seconds\": %.6f}\n",
           (long long)n_records * (long long)b->block_bytes, seconds, cpu_seconds);
    return true;
}

static bool answer(bench *b, const char *line) {
    int id, n;
    if (sscanf(line, "ttft %d %d", &id, &n) == 2 && n > 0) {
        free(b->prompt);
        b->prompt = malloc((size_t)PAGED_MAX(n, WORK_MAX) * sizeof *b->prompt);
        return b->prompt && ttft(b, id, n);
    }
    task what;
    if (sscanf(line, "slow %d %d %d", &id, &what.n_prompt, &what.n_decode) == 3 && what.n_prompt > 0 &&
        what.n_decode > 0 && what.n_prompt + what.n_decode <= WORK_MAX) {
        if (!b->prompt) b->prompt = malloc(WORK_MAX * sizeof *b->prompt);
        return b->prompt && slow(b, id, what);
    }
    if (sscanf(line, "write %d", &n) == 1 && n > 0) {
        b->n_records = ((int64_t)n << 20) / (int64_t)b->block_bytes;
        return records(b, b->n_records, true);
    }
    if (strncmp(line, "read", 4) == 0) return records(b, b->n_records, false);
    fprintf(stderr, "bench_store: no such command: %s", line);
    return false;
}

int main(int argc, char **argv) {
    bench b = {.dir = argc > 2 ? argv[2] : NULL,
               .redis = argc > 4 ? argv[4] : NULL,
               .n_threads = argc > 3 ? atoi(argv[3]) : 0};
    char line[64];
    paged_error err;
    if (argc < 3) {
        fprintf(stderr, "usage: bench_store MODEL DIR [N_THREADS [REDIS]]\n");
        return EXIT_FAILURE;
    }
    const paged_model_config config = {.struct_size = sizeof config};
    if (paged_model_load(argv[1], &config, &b.model, &err)) return fail(argv[1], &err), EXIT_FAILURE;
    paged_model_get_info(b.model, &b.info);
    b.block_bytes = (size_t)BLOCK_SIZE * (size_t)b.info.n_layers * (size_t)b.info.n_kv_heads *
                    (size_t)(b.info.head_dim_k + b.info.head_dim_v) * 2;
    while (fgets(line, sizeof line, stdin)) {
        if (!answer(&b, line)) return EXIT_FAILURE;
        fflush(stdout);
    }
    return EXIT_SUCCESS;
}
