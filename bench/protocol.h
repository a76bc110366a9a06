/* bench/protocol.h: how a driver talks to a program that runs a model, ours or a peer's, so that both are
 * asked the same.
 *
 * One command a line on stdin, one line of JSON on stdout for each; a program ends when stdin does.
 *
 *     prefill N    forget what is open; N prompt tokens, and the first token that follows, chosen greedily
 *     decode N     N more tokens of what is open, one step each
 *
 *     {"tokens": N, "seconds": wall, "cpu_seconds": of all threads, "token": the newest one, …}
 *
 * The clock runs around the call alone: no I/O, and nothing that happens before the command was read.
 */
#ifndef PAGED_BENCH_PROTOCOL_H
#define PAGED_BENCH_PROTOCOL_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct bench_side {
    void *self;
    bool (*prefill)(void *self, int32_t n_tokens);
    bool (*decode)(void *self, int32_t n_tokens);
    int32_t (*last_token)(const void *self);
    /* More fields of the answer, each with a comma before it; may be NULL. */
    void (*report)(const void *self, FILE *out);
} bench_side;

static inline double bench_seconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Token `i` of every prompt: scattered over the vocabulary, so that embedding rows are not all in cache. */
static inline int32_t bench_token(int32_t i, int32_t n_vocab) {
    return (int32_t)(((int64_t)i * 7919 + 1000) % n_vocab);
}

static inline bool bench_answer(const bench_side *side, bool is_prefill, int32_t n_tokens) {
    const double cpu = bench_seconds(CLOCK_PROCESS_CPUTIME_ID), wall = bench_seconds(CLOCK_MONOTONIC);
    if (!(is_prefill ? side->prefill : side->decode)(side->self, n_tokens)) return false;
    const double seconds = bench_seconds(CLOCK_MONOTONIC) - wall;
    const double cpu_seconds = bench_seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    printf("{\"tokens\": %d, \"seconds\": %.6f, \"cpu_seconds\": %.6f, \"token\": %d", n_tokens, seconds,
           cpu_seconds, side->last_token(side->self));
    if (side->report) side->report(side->self, stdout);
    puts("}");
    return fflush(stdout) == 0;
}

/* Answers until stdin ends. Returns the exit status of the program. */
static inline int bench_serve(const bench_side *side) {
    char line[64], verb[16];
    int n_tokens;
    while (fgets(line, sizeof line, stdin)) {
        const bool is_pair = sscanf(line, "%15s %d", verb, &n_tokens) == 2 && n_tokens > 0;
        const bool is_prefill = is_pair && strcmp(verb, "prefill") == 0;
        if (!is_prefill && !(is_pair && strcmp(verb, "decode") == 0)) {
            fprintf(stderr, "neither `prefill N` nor `decode N`: %s", line);
            return EXIT_FAILURE;
        }
        if (!bench_answer(side, is_prefill, n_tokens)) return EXIT_FAILURE;
    }
    return EXIT_SUCCESS;
}

#endif
