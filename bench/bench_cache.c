/* What the bookkeeping of the cache costs, one thread: first without any keys and values, in an arena without
 * memory; then what memory costs and gives back, in SmolLM2's shape.
 *
 *     bench_cache [--json] [N_BLOCKS]      default 1048576
 *
 * A row a figure, median of rounds; with --json one object with every round, for bench_cache.py:
 *   cycle    alloc + append + free of a block of 16 tokens: 1024 sequences grow block by block in turns
 * until the
 *            pool is full, then all are freed. Alone, and with every block going through the prefix index
 * without
 *            a hit; the difference a token is what the index costs
 *   refill   the same in a full cache: every block that is taken evicts one
 *   match    of a prompt of 100,000 tokens that is cached to the end
 *   metadata everything the cache keeps, tables included, by pool bytes, for LLaMA-3-8B in f16
 *   touch    taking and writing memory that the system has yet to give, against memory that was in use before
 *   burst    1024 sequences decode in turns, then all but a random tenth end; a step each second compacts
 *            64 MiB and tells the time; what is free against what left the resident set */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "paged/mem.h"

enum { BLOCK = 16, N_SEQS = 1024, N_ROUNDS = 5, N_MATCHES = 9, N_PROMPT = 100000, N_TOUCH = 8192 };

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); /* what else runs on the machine does not count */
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void must(paged_status status) {
    if (status == PAGED_OK) return;
    fprintf(stderr, "bench_cache: %s\n", paged_status_text(status));
    exit(EXIT_FAILURE);
}

static paged_status back_nothing(void *ctx, size_t offset, size_t size_bytes) {
    (void)ctx, (void)offset, (void)size_bytes;
    return PAGED_OK;
}

static paged_status copy_nothing(void *ctx, size_t dst, size_t src, size_t size_bytes) {
    (void)ctx, (void)dst, (void)src, (void)size_bytes;
    return PAGED_OK;
}

static paged_cache *open_cache(const paged_group_config *group, size_t n_blocks, int32_t n_seqs,
                               int32_t max_seq_tokens) {
    size_t pool_bytes = n_blocks * paged_block_bytes(group, BLOCK);
    const paged_arena arena = {
        .size_bytes = pool_bytes, .back = back_nothing, .unback = back_nothing, .copy = copy_nothing};
    const paged_cache_config config = {.struct_size = sizeof config,
                                       .groups = group,
                                       .n_groups = 1,
                                       .block_size = BLOCK,
                                       .pool_bytes = pool_bytes,
                                       .max_seqs = n_seqs,
                                       .max_seq_tokens = max_seq_tokens,
                                       .arena = &arena};
    paged_cache *cache = NULL;
    must(paged_cache_create(&config, &cache, NULL));
    return cache;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int n) {
    qsort(values, (size_t)n, sizeof *values, by_value);
    return values[n / 2];
}

/* ns a block. No two sequences of all rounds begin with the same block, as `first` says. */
static double cycle(paged_cache *cache, int32_t blocks_each, bool indexed, int32_t first) {
    static paged_seq seqs[N_SEQS];
    int32_t tokens[BLOCK];
    double start = now_ns();
    for (int32_t s = 0; s < N_SEQS; s++) {
        must(paged_seq_create(cache, &seqs[s]));
        if (indexed) must(paged_seq_match(cache, seqs[s], &(paged_namespace){0}, NULL, 0, NULL));
    }
    for (int32_t b = 0; b < blocks_each; b++) {
        for (int32_t s = 0; s < N_SEQS; s++) {
            for (int32_t i = 0; i < BLOCK; i++) tokens[i] = first + s + i * b;
            must(paged_seq_reserve(cache, seqs[s], BLOCK));
            must(paged_seq_commit(cache, seqs[s], tokens, BLOCK));
        }
    }
    for (int32_t s = 0; s < N_SEQS; s++) must(paged_seq_free(cache, seqs[s]));
    return (now_ns() - start) / ((double)blocks_each * N_SEQS);
}

static void match_ms(paged_cache *cache, double *ms) {
    static int32_t tokens[N_PROMPT];
    paged_match got;
    paged_seq seq;
    const paged_namespace names = {0};
    for (int32_t i = 0; i < N_PROMPT; i++) tokens[i] = i * 7 % 50000;
    must(paged_seq_create(cache, &seq));
    must(paged_seq_match(cache, seq, &names, NULL, 0, NULL));
    must(paged_seq_reserve(cache, seq, N_PROMPT));
    must(paged_seq_commit(cache, seq, tokens, N_PROMPT));
    must(paged_seq_free(cache, seq));
    for (int32_t i = 0; i < N_MATCHES; i++) {
        must(paged_seq_create(cache, &seq));
        double start = now_ns();
        must(paged_seq_match(cache, seq, &names, tokens, N_PROMPT, &got));
        ms[i] = (now_ns() - start) * 1e-6;
        if (got.n_matched != N_PROMPT - 1) must(PAGED_ERR_CORRUPT);
        must(paged_seq_free(cache, seq));
    }
}

static void print_list(const char *name, const double *values, int n) {
    printf("\"%s\": [", name);
    for (int i = 0; i < n; i++) printf("%s%.4f", i ? ", " : "", values[i]);
    printf("], ");
}

/* ---- memory ---- */

static const paged_group_config smol = {.n_layers = 30, .n_kv_heads = 3, .head_dim_k = 64};

static paged_cache *open_smol(int32_t n_seqs, int32_t n_tokens) {
    const paged_cache_config config = {.struct_size = sizeof config,
                                       .groups = &smol,
                                       .n_groups = 1,
                                       .block_size = BLOCK,
                                       .pool_bytes =
                                           paged_pool_bytes_for(&smol, 1, BLOCK, (int64_t)n_seqs * n_tokens),
                                       .max_seqs = n_seqs,
                                       .max_seq_tokens = n_tokens,
                                       .trim_after = 10};
    paged_cache *cache = NULL;
    must(paged_cache_create(&config, &cache, NULL));
    return cache;
}

/* Another block for the sequence, written to the last byte. */
static void append_block(paged_cache *cache, paged_seq seq) {
    static const int32_t tokens[BLOCK];
    paged_kv kv;
    int64_t slot;
    int32_t len = paged_seq_len(cache, seq);
    must(paged_cache_kv(cache, 0, 0, &kv));
    must(paged_seq_reserve(cache, seq, BLOCK));
    must(paged_seq_slots(cache, seq, 0, len, 1, &slot));
    memset(kv.k + slot / BLOCK * kv.block_stride, 1, (size_t)kv.block_stride);
    must(paged_seq_commit(cache, seq, tokens, BLOCK));
}

static double touch_ms_a_mib(paged_cache *cache, int32_t n_tokens) {
    paged_seq seq;
    double start = now_ns();
    must(paged_seq_create(cache, &seq));
    for (int32_t n = 0; n < n_tokens; n += BLOCK) append_block(cache, seq);
    must(paged_seq_free(cache, seq));
    double mib = (double)paged_pool_bytes_for(&smol, 1, BLOCK, n_tokens) / (1 << 20);
    return (now_ns() - start) * 1e-6 / mib;
}

/* ms a MiB, in a pool whose memory the system has yet to give, and in one that was in use before. */
static void touch(double *cold, double *warm) {
    paged_cache *cache = open_smol(1, N_TOUCH);
    for (int32_t i = 0; i < N_ROUNDS; i++) {
        must(paged_cache_trim(cache, 0));
        cold[i] = touch_ms_a_mib(cache, N_TOUCH);
        warm[i] = touch_ms_a_mib(cache, N_TOUCH);
    }
    paged_cache_free(cache);
}

static double resident_mib(void) {
    unsigned long total, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%lu %lu", &total, &resident) != 2) must(PAGED_ERR_IO);
    fclose(file);
    return (double)resident * (double)sysconf(_SC_PAGESIZE) / (1 << 20);
}

typedef struct burst_result {
    double free_mib, returned, seconds; /* returned: share of what is free; seconds until nothing more came */
    double ms;                          /* CPU time of compaction, in all */
    uint64_t n_moves;
} burst_result;

static burst_result burst(void) {
    enum { N_BURST = 1024, N_TOKENS = 48 };
    static paged_seq seqs[N_BURST];
    paged_cache *cache = open_smol(N_BURST, N_TOKENS);
    paged_cache_stats stats;
    burst_result r = {0};
    uint64_t rand = 1;
    for (int32_t s = 0; s < N_BURST; s++) must(paged_seq_create(cache, &seqs[s]));
    for (int32_t n = 0; n < N_TOKENS; n += BLOCK) {
        for (int32_t s = 0; s < N_BURST; s++) append_block(cache, seqs[s]);
    }
    double before = resident_mib(), last = before;
    for (int32_t s = 0; s < N_BURST; s++) {
        rand = rand * 6364136223846793005u + 1442695040888963407u;
        if (rand >> 32 > UINT32_MAX / 10) must(paged_seq_free(cache, seqs[s]));
    }
    for (uint64_t second = 1; second <= 60; second++) {
        double start = now_ns();
        paged_cache_set_clock(cache, second);
        must(paged_cache_compact(cache, 64 << 20, true, NULL));
        r.ms += (now_ns() - start) * 1e-6;
        double now = resident_mib();
        if (now < last - 1) r.seconds = (double)second;
        last = now;
    }
    paged_cache_get_stats(cache, &stats);
    r.free_mib = (double)(stats.pool_bytes - stats.used_bytes) / (1 << 20);
    r.returned = (before - last) / r.free_mib;
    r.n_moves = stats.n_moves;
    paged_cache_free(cache);
    return r;
}

int main(int argc, char **argv) {
    const bool json = argc > 1 && strcmp(argv[1], "--json") == 0;
    int32_t blocks_each = (argc > 1 + json ? atoi(argv[1 + json]) : 1 << 20) / N_SEQS;
    if (blocks_each < 1) {
        fputs("bench_cache [--json] [N_BLOCKS]: at least 1024\n", stderr);
        return 2;
    }
    const paged_group_config small = {
        .n_layers = 1, .n_kv_heads = 1, .head_dim_k = 1, .type = PAGED_TYPE_F32};
    const paged_group_config llama = {.n_layers = 32, .n_kv_heads = 8, .head_dim_k = 128};
    double plain[N_ROUNDS], indexed[N_ROUNDS], refill[N_ROUNDS], match[N_MATCHES];
    paged_cache *cache = open_cache(&small, (size_t)blocks_each * N_SEQS, N_SEQS, blocks_each * BLOCK);
    cycle(cache, blocks_each, true, 0); /* touches all memory */
    paged_cache_clear(cache);
    for (int32_t round = 0; round < N_ROUNDS; round++) {
        plain[round] = cycle(cache, blocks_each, false, 0);
        indexed[round] = cycle(cache, blocks_each, true, (2 * round + 1) * N_SEQS);
        refill[round] = cycle(cache, blocks_each, true, (2 * round + 2) * N_SEQS);
        paged_cache_clear(cache);
    }
    paged_cache_free(cache);

    cache = open_cache(&small, 1 << 16, 4, N_PROMPT);
    match_ms(cache, match);
    paged_cache_free(cache);

    paged_cache_stats stats;
    cache = open_cache(&llama, 32768, 256, 32768); /* 64 GiB */
    paged_cache_get_stats(cache, &stats);
    paged_cache_free(cache);
    double cold[N_ROUNDS], warm[N_ROUNDS];
    touch(cold, warm);
    const burst_result back = burst();
    const double metadata = (double)(stats.metadata_bytes + stats.table_bytes) / (double)stats.pool_bytes;

    if (json) {
        putchar('{');
        print_list("cycle_ns", plain, N_ROUNDS);
        print_list("indexed_ns", indexed, N_ROUNDS);
        print_list("refill_ns", refill, N_ROUNDS);
        print_list("match_ms", match, N_MATCHES);
        print_list("cold_ms", cold, N_ROUNDS);
        print_list("warm_ms", warm, N_ROUNDS);
        printf("\"metadata_share\": %.8f, \"returned_share\": %.5f, \"returned_s\": %.0f, \"free_mib\": %.1f, "
               "\"n_moves\": %llu, \"compact_ms\": %.1f}\n",
               metadata, back.returned, back.seconds, back.free_mib, (unsigned long long)back.n_moves, back.ms);
        return EXIT_SUCCESS;
    }
    double p = median(plain, N_ROUNDS), x = median(indexed, N_ROUNDS);
    printf("cycle     %8.1f ns a block (%d blocks)\n", p, blocks_each * N_SEQS);
    printf("cycle     %8.1f ns a block with the index, 0 %% hits: %.1f ns a token more\n", x,
           (x - p) / BLOCK);
    printf("refill    %8.1f ns a block with the index, each evicts one\n", median(refill, N_ROUNDS));
    printf("match     %8.3f ms for %d cached tokens\n", median(match, N_MATCHES), N_PROMPT);
    printf("metadata  %8.4f %% of the pool, LLaMA-3-8B f16, 64 GiB, 256 sequences of 32768 tokens\n",
           metadata * 100);
    double c = median(cold, N_ROUNDS), w = median(warm, N_ROUNDS);
    printf("touch     %8.3f ms a MiB of new memory, %.3f of warm: a prompt of %d tokens waits %.0f ms more\n",
           c, w, N_TOUCH, (c - w) * (double)paged_pool_bytes_for(&smol, 1, BLOCK, N_TOUCH) / (1 << 20));
    printf("burst     %8.1f %% of %.0f free MiB went back to the system in %.0f s; %llu blocks moved, %.0f ms in all\n",
           back.returned * 100, back.free_mib, back.seconds, (unsigned long long)back.n_moves, back.ms);
    return EXIT_SUCCESS;
}
