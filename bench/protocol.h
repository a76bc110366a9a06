/* bench/protocol.h: how a driver talks to a program that runs a model, ours or a peer's, so that both are
 * asked the same.
 *
 * One command a line on stdin, one line of JSON on stdout for each; a program ends when stdin does.
 *
 *     prefill N       forget what is open; N prompt tokens, and the first token that follows, chosen greedily
 *     requests B N    the same with B requests of N tokens each, all different
 *     decode N        N more tokens of everything that is open, one step each
 *     decode N W      the same after W others, which nobody measures: threads that slept are awake then
 *     decode N W P    the same, N tokens P times, each of these parts measured for itself
 *     read N          read the weights N times, as fast as memory gives them (ours only)
 *     sampling N      how tokens are chosen from now on, a number of the side's own (ours only)
 *
 *     {"tokens": of all requests, "seconds": wall, "cpu_seconds": of all threads, "token": the newest one of
 *      the first request, …, "parts": of P, [[tokens, seconds, cpu_seconds], …]}
 *
 * What else an answer with parts says is of the last of them. The clock runs around the call alone: no I/O,
 * and nothing that happens before the command was read.
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
    bool (*open)(void *self, int32_t n_requests, int32_t n_tokens);
    bool (*decode)(void *self, int32_t n_tokens);
    int64_t (*read)(void *self); /* reads the weights once, returns the bytes; NULL: cannot */
    bool (*sampling)(void *self, int32_t how);
    int32_t (*last_token)(const void *self);
    /* More fields of the answer, each with a comma before it; may be NULL. */
    void (*report)(const void *self, FILE *out);
} bench_side;

static inline double bench_seconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Token `i` of prompt `request`: scattered over the vocabulary, so that embedding rows are not all in
 * cache. */
static inline int32_t bench_token(int32_t request, int32_t i, int32_t n_vocab) {
    return (int32_t)(((int64_t)i * 7919 + 1000 + (int64_t)request * 12345) % n_vocab);
}

typedef enum bench_verb { BENCH_OPEN, BENCH_DECODE, BENCH_READ, BENCH_SAMPLING } bench_verb;

typedef struct bench_command {
    bench_verb verb;
    int n_requests, n; /* tokens, or times */
    int n_before;      /* tokens that nobody measures */
    int n_parts;       /* 0: the answer does not show them, and there is one */
} bench_command;

enum { BENCH_PARTS_MAX = 64 };

typedef struct bench_part {
    double seconds, cpu_seconds;
} bench_part;

static inline bool bench_parse(const char *line, bench_command *c) {
    *c = (bench_command){.verb = BENCH_OPEN, .n_requests = 1};
    if (sscanf(line, "requests %d %d", &c->n_requests, &c->n) == 2) return c->n_requests > 0 && c->n > 0;
    if (sscanf(line, "prefill %d", &c->n) == 1) return c->n > 0;
    c->verb = BENCH_SAMPLING;
    if (sscanf(line, "sampling %d", &c->n) == 1) return c->n >= 0;
    c->verb =
        sscanf(line, "decode %d %d %d", &c->n, &c->n_before, &c->n_parts) >= 1 ? BENCH_DECODE : BENCH_READ;
    const bool has_parts = c->n_parts >= 0 && c->n_parts <= BENCH_PARTS_MAX;
    return (c->n > 0 && c->n_before >= 0 && has_parts) || (sscanf(line, "read %d", &c->n) == 1 && c->n > 0);
}

/* *bytes: what a `read` has read. */
static inline bool bench_do(const bench_side *side, const bench_command *c, int64_t *bytes) {
    if (c->verb == BENCH_OPEN) return side->open(side->self, c->n_requests, c->n);
    if (c->verb == BENCH_DECODE) return side->decode(side->self, c->n);
    if (c->verb == BENCH_SAMPLING) return side->sampling && side->sampling(side->self, c->n);
    for (int i = 0; side->read && i < c->n; i++) *bytes += side->read(side->self);
    return *bytes > 0;
}

/* One part, measured. */
static inline bool bench_measure(const bench_side *side, const bench_command *c, int64_t *bytes,
                                 bench_part *part) {
    const double cpu = bench_seconds(CLOCK_PROCESS_CPUTIME_ID), wall = bench_seconds(CLOCK_MONOTONIC);
    if (!bench_do(side, c, bytes)) return false;
    part->seconds = bench_seconds(CLOCK_MONOTONIC) - wall;
    part->cpu_seconds = bench_seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    return true;
}

static inline void bench_print_parts(const bench_part *parts, int n_parts, long long n_tokens) {
    fputs(", \"parts\": [", stdout);
    for (int i = 0; i < n_parts; i++)
        printf("%s[%lld, %.6f, %.6f]", i ? ", " : "", n_tokens, parts[i].seconds, parts[i].cpu_seconds);
    fputc(']', stdout);
}

/* *n_open: how many requests a `decode` advances. */
static inline bool bench_answer(const bench_side *side, const bench_command *c, int *n_open) {
    bench_part parts[BENCH_PARTS_MAX] = {{0}}, all = {0};
    const int n_parts = c->n_parts ? c->n_parts : 1;
    int64_t bytes = 0;
    if (c->verb == BENCH_OPEN) *n_open = c->n_requests;
    if (c->n_before > 0 && !side->decode(side->self, c->n_before)) return false;
    for (int i = 0; i < n_parts; i++) {
        if (!bench_measure(side, c, &bytes, &parts[i])) return false;
        all.seconds += parts[i].seconds;
        all.cpu_seconds += parts[i].cpu_seconds;
    }
    const long long n_tokens = c->verb <= BENCH_DECODE ? (long long)c->n * *n_open : 0;
    printf("{\"tokens\": %lld, \"seconds\": %.6f, \"cpu_seconds\": %.6f, \"token\": %d", n_tokens * n_parts,
           all.seconds, all.cpu_seconds, side->last_token(side->self));
    if (bytes) printf(", \"bytes\": %lld", (long long)bytes);
    if (c->n_parts) bench_print_parts(parts, n_parts, n_tokens);
    if (side->report) side->report(side->self, stdout);
    puts("}");
    return fflush(stdout) == 0;
}

/* Answers until stdin ends. Returns the exit status of the program. */
static inline int bench_serve(const bench_side *side) {
    char line[64];
    bench_command c;
    int n_open = 0;
    while (fgets(line, sizeof line, stdin)) {
        if (!bench_parse(line, &c)) {
            fprintf(stderr, "none of the commands of bench/protocol.h: %s", line);
            return EXIT_FAILURE;
        }
        if (!bench_answer(side, &c, &n_open)) return EXIT_FAILURE;
    }
    return EXIT_SUCCESS;
}

#endif
