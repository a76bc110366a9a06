/* Goal: no order of operations breaks an invariant, loses a block or lets one sequence see another's keys
 * and values. Method: random operations on a cache and on a naive model (mem_stream.h, mem_model.h), and
 * paged_cache_check() after each. A stream that fails is repeated in child processes without this or that
 * operation, as long as it fails still; what is left is printed. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sim/mem_stream.h"

enum { STREAM_OPERATIONS = 4000, STREAM_BYTES = 1 << 20, SHRINK_SECONDS = 5 };

/* of all seeds */
static uint64_t n_hits, n_tails, n_evicted, n_packed, n_loose, n_waits, n_handovers, n_moved, n_unbacked;

/* Ends a stream. */
static void add_up(struct model *m) {
    paged_cache_stats stats;
    model_check_all(m);
    paged_cache_get_stats(m->cache, &stats);
    n_hits += m->n_hits;
    n_tails += m->n_tails;
    n_evicted += stats.n_evicted;
    n_moved += m->n_moved;
    n_unbacked += stats.n_unbacked;
    n_packed += m->n_packed;
    n_waits += m->n_waits;
    n_handovers += stats.n_handovers;
    CHECK_EQ(stats.n_waits, m->n_waits);
    n_loose += stats.n_evicted_blocks;
    CHECK(stats.n_packed >= m->n_packed); /* those that were sealed besides */
    CHECK_EQ(stats.n_hit_tokens, m->n_hits);
    model_close(m);
}

/* ---- a stream and what is left of it ---- */

/* What was chosen, for the cache and for each operation. */
static struct stream {
    uint8_t bytes[STREAM_BYTES];
    size_t ends[STREAM_OPERATIONS + 1]; /* of the bytes for the cache, and of each operation */
    int32_t kept[STREAM_OPERATIONS];    /* [n_kept] operations that are played */
    int32_t n_kept;
} stream;
static struct model model;

static void record(uint64_t seed) {
    struct choices c = {.rand = paged__mix(seed), .log = stream.bytes, .n_log_max = STREAM_BYTES};
    stream.n_kept = 0;
    stream_open(&model, &c);
    stream.ends[0] = c.n_log;
    for (int32_t i = 0; i < STREAM_OPERATIONS; i++) {
        stream.kept[stream.n_kept++] = i; /* before it is played, and perhaps fails */
        stream.ends[i + 1] = STREAM_BYTES;
        stream_step(&model, &c);
        stream.ends[i + 1] = c.n_log;
        if (i % 64 == 0) model_check_all(&model);
    }
    CHECK(c.n_log < STREAM_BYTES);
    add_up(&model);
}

static void play(const int32_t *kept, int32_t n_kept) {
    struct choices c = {.bytes = stream.bytes, .n = stream.ends[0]};
    stream_open(&model, &c);
    for (int32_t i = 0; i < n_kept; i++) {
        size_t begin = stream.ends[kept[i]];
        c = (struct choices){.bytes = stream.bytes + begin, .n = stream.ends[kept[i] + 1] - begin};
        stream_step(&model, &c);
        model_check_all(&model);
    }
    model_close(&model);
}

/* In a child, since it may end in any way; true if it failed. */
static bool fails_still(const int32_t *kept, int32_t n_kept, bool trace) {
    int status = 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        stream_trace = trace;
        if (!trace && !freopen("/dev/null", "w", stdout)) _exit(0);
        alarm(SHRINK_SECONDS);
        if (setjmp(test_jump) == 0) {
            play(kept, n_kept);
            _exit(0);
        }
        fflush(stdout);
        _exit(1);
    }
    return child > 0 && waitpid(child, &status, 0) == child && status != 0;
}

/* Leaves out runs of operations, shorter and shorter ones, for some seconds. */
static void shrink(void) {
    static int32_t fewer[STREAM_OPERATIONS];
    uint64_t end_ns = paged__now_ns() + SHRINK_SECONDS * 1000000000ull;
    int32_t n_all = stream.n_kept;
    if (!fails_still(stream.kept, stream.n_kept, false)) return; /* it failed at the end of all */
    for (int32_t run = n_all / 2; run > 0; run /= 2) {
        for (int32_t i = stream.n_kept - run; i >= 0 && paged__now_ns() < end_ns; i -= run) {
            int32_t n_fewer = stream.n_kept - run;
            memcpy(fewer, stream.kept, (size_t)i * sizeof *fewer);
            memcpy(fewer + i, stream.kept + i + run, (size_t)(n_fewer - i) * sizeof *fewer);
            if (!fails_still(fewer, n_fewer, false)) continue;
            memcpy(stream.kept, fewer, (size_t)n_fewer * sizeof *fewer);
            stream.n_kept = n_fewer;
        }
    }
    printf("---- seed %" PRIu64 ", %d of %d operations are left ----\n", test_seed, stream.n_kept, n_all);
    fails_still(stream.kept, stream.n_kept, true);
}

static void print_line(void *user, paged_log_level level, const char *line) {
    (void)user;
    (void)level;
    printf("%s\n", line);
}

/* A broken invariant of the library is a failure like others, so that it is shrunk too. abort() raises the
 * signal in the thread that calls it. */
static void on_abort(int number) {
    (void)number;
    test_fail(__FILE__, __LINE__, "aborted");
}

static void one_seed(uint64_t seed) {
    jmp_buf outer;
    struct sigaction act = {.sa_handler = on_abort, .sa_flags = SA_NODEFER}, old;
    test_seed = seed; /* so that a failure names it */
    paged_log_set(print_line, NULL, PAGED_LOG_ERROR);
    sigaction(SIGABRT, &act, &old);
    memcpy(outer, test_jump, sizeof outer);
    bool failed = setjmp(test_jump) != 0;
    if (!failed)
        record(seed);
    else
        shrink();
    memcpy(test_jump, outer, sizeof outer);
    sigaction(SIGABRT, &old, NULL);
    paged_log_set(NULL, NULL, PAGED_LOG_ERROR);
    if (failed) longjmp(test_jump, 1);
}

static uint32_t below(uint64_t *rand, uint32_t n) {
    return (uint32_t)(paged__rand(rand) % n);
}

static void random_operations(void) {
    uint64_t first = test_seed, n_seeds = test_long ? 30000 : 300;
    for (uint64_t i = 0; i < n_seeds; i++) one_seed(first + i);
    test_seed = first;
    printf("%llu tokens reused, %llu tails copied, %llu entries evicted\n", (unsigned long long)n_hits,
           (unsigned long long)n_tails, (unsigned long long)n_evicted);
    printf("%llu tails packed into blocks, %llu blocks of windows evicted\n", (unsigned long long)n_packed,
           (unsigned long long)n_loose);
    printf("%llu compactions moved blocks, %llu granules returned\n", (unsigned long long)n_moved,
           (unsigned long long)n_unbacked);
    printf("%llu sequences waited for others, %llu took over\n", (unsigned long long)n_waits,
           (unsigned long long)n_handovers);
    printf("%llu faults fired\n", (unsigned long long)n_fired);
    CHECK(n_fired > 10 * n_seeds);
    CHECK(n_waits > n_seeds && n_handovers > n_seeds / 4);
    CHECK(n_packed > 10 * n_seeds && n_loose > 10 * n_seeds);
    CHECK(n_hits > 100 * n_seeds && n_tails > 10 * n_seeds && n_evicted > 10 * n_seeds);
    CHECK(n_moved > 2 * n_seeds && n_unbacked > 10 * n_seeds);
}

/* In a pool that never evicts, reuse is the longest common beginning with any earlier prompt, to the token.
 * */
static void reuse_is_the_longest_common_prefix(void) {
    enum { N_PROMPTS = 300, LENGTH_MAX = 120 };
    static int32_t prompts[N_PROMPTS][LENGTH_MAX], lens[N_PROMPTS];
    static const int32_t block_sizes[] = {1, 2, 5, 16, 64};
    paged_group_config group = {.n_layers = 1, .n_kv_heads = 1, .head_dim_k = 1, .type = PAGED_TYPE_F32};
    const paged_namespace names = {0};
    uint64_t rand = test_seed, n_reused = 0;
    for (int32_t b = 0; b < 10; b++) {
        const paged_cache_config config = {.struct_size = sizeof config,
                                           .groups = &group,
                                           .n_groups = 1,
                                           .block_size = block_sizes[b / 2],
                                           .pool_bytes = (size_t)N_PROMPTS * 2 * LENGTH_MAX * 64,
                                           .max_seq_tokens = LENGTH_MAX};
        paged_cache *cache = NULL;
        CHECK_EQ(paged_cache_create(&config, &cache, NULL), PAGED_OK);
        if (b % 2) paged__cache_cut_hash(cache, 15);
        for (int32_t p = 0; p < N_PROMPTS; p++) {
            int32_t from = (int32_t)below(&rand, (uint32_t)p + 1), want = 0, k;
            int32_t n = lens[p] = 1 + (int32_t)below(&rand, LENGTH_MAX), n_same = (int32_t)below(&rand, 130);
            for (int32_t i = 0; i < n; i++)
                prompts[p][i] =
                    from < p && i < n_same && i < lens[from] ? prompts[from][i] : (int32_t)below(&rand, 4);
            for (int32_t q = 0; q < p; q++) {
                for (k = 0; k < n - 1 && k < lens[q] && prompts[p][k] == prompts[q][k];) k++;
                want = k > want ? k : want;
            }
            paged_seq seq;
            paged_match got;
            CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
            CHECK_EQ(paged_seq_match(cache, seq, &names, prompts[p], n, &got), PAGED_OK);
            CHECK_EQ(got.n_matched, want);
            CHECK_EQ(paged_seq_reserve(cache, seq, n - want), PAGED_OK);
            CHECK_EQ(paged_seq_commit(cache, seq, prompts[p] + want, n - want), PAGED_OK);
            CHECK_EQ(paged_seq_free(cache, seq), PAGED_OK);
            n_reused += (uint64_t)want;
        }
        CHECK_EQ(paged_cache_check(cache, NULL), PAGED_OK);
        paged_cache_free(cache);
    }
    CHECK(n_reused > 10000);
}

/* All fields; there is a gap before max_bytes, and nobody sets it. */
static bool same_stats(const paged_cache_stats *a, const paged_cache_stats *b) {
    const size_t gap = offsetof(paged_cache_stats, n_available) + sizeof a->n_available,
                 rest = offsetof(paged_cache_stats, max_bytes);
    return memcmp(a, b, gap) == 0 &&
           memcmp((const uint8_t *)a + rest, (const uint8_t *)b + rest, sizeof *a - rest) == 0;
}

/* A hundred thousand times the same: if anything leaked, even one byte, the numbers would differ. */
static void fork_and_free_leave_nothing(void) {
    static struct model m;
    paged_group_config group = {.n_layers = 1, .n_kv_heads = 1, .head_dim_k = 1, .type = PAGED_TYPE_F32};
    paged_cache_config config = {.struct_size = sizeof config,
                                 .groups = &group,
                                 .n_groups = 1,
                                 .block_size = 4,
                                 .pool_bytes = 10 * 4 * 8,
                                 .max_seqs = MODEL_SEQS,
                                 .max_seq_tokens = 40};
    paged_cache_stats before, after;
    uint64_t rand = test_seed;
    paged_seq child;
    memset(&m, 0, sizeof m);
    model_open(&m, &config);
    model_create(&m);
    model_reserve(&m, &m.seqs[0], 10);
    model_commit(&m, &m.seqs[0], 10, &rand);
    paged_cache_get_stats(m.cache, &before);
    for (int32_t i = 0; i < 100000; i++) {
        int32_t token = i % 5;
        CHECK_EQ(paged_seq_fork(m.cache, m.seqs[0].handle, &child), PAGED_OK);
        CHECK_EQ(paged_seq_reserve(m.cache, child, 1 + i % 7), PAGED_OK);
        CHECK_EQ(paged_seq_commit(m.cache, child, &token, 1), PAGED_OK);
        CHECK_EQ(paged_seq_free(m.cache, child), PAGED_OK);
    }
    paged_cache_get_stats(m.cache, &after);
    CHECK_EQ(after.n_copies - before.n_copies, 100000);
    after.n_copies = before.n_copies;
    CHECK_EQ(after.n_allocs - after.n_frees, before.n_allocs - before.n_frees);
    after.n_allocs = before.n_allocs;
    after.n_frees = before.n_frees;
    CHECK(same_stats(&before, &after));
    m.n_copies = before.n_copies + 100000;
    model_check_all(&m);
    model_close(&m);
}

#define TESTS(X) X(random_operations) X(reuse_is_the_longest_common_prefix) X(fork_and_free_leave_nothing)
TEST_MAIN(TESTS)
