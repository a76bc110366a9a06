/* bench/probe.h: what the machine can do at most: bytes read from memory, and products in registers. Each is
 * a job of a team (team.h); a share of a limit is worth something only if both come from the same round.
 *
 * Without AVX-512 memory is read by the widest loads that the compiler makes of plain C, and a peak that the
 * machine has no instruction for is 0. */
#ifndef PAGED_BENCH_PROBE_H
#define PAGED_BENCH_PROBE_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "bench/team.h"
#include "paged/base.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define PROBE_BYTES ((size_t)1 << 30)
#define HUGE_PAGE   ((size_t)2 << 20)

/* Zeroed memory in huge pages where the system gives them; munmap gives it back. NULL: there is none. */
static inline void *probe_map(size_t size_bytes) {
    uint8_t *map =
        mmap(NULL, size_bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) return NULL;
    size_t skip = (HUGE_PAGE - (uintptr_t)map % HUGE_PAGE) % HUGE_PAGE;
    if (skip > 0) munmap(map, skip);
    if (HUGE_PAGE - skip > 0) munmap(map + skip + size_bytes, HUGE_PAGE - skip);
    madvise(map + skip, size_bytes, MADV_HUGEPAGE);
    return map + skip;
}

/* Share of this process's anonymous memory that lies in huge pages; -1: unknown. */
static inline double probe_huge_share(void) {
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    if (!file) return -1;
    char line[256];
    double all = 0, huge = 0;
    while (fgets(line, sizeof line, file)) {
        sscanf(line, "Anonymous: %lf", &all);
        sscanf(line, "AnonHugePages: %lf", &huge);
    }
    fclose(file);
    return all > 0 ? huge / all : -1;
}

/* ---- reading ---- */

typedef struct probe_read {
    const uint8_t *bytes; /* [PROBE_BYTES] */
    _Atomic uint64_t sink;
} probe_read;

#if defined(__x86_64__)
/* What read fastest of several widths and distances: four lines at a time, 1 KiB ahead, on Zen 4 and 5; on a
 * Xeon with AMX that is a tenth slower than two at a time, 2 KiB ahead. */
__attribute__((target("avx512f"))) static inline uint64_t probe_read_four(const uint8_t *p, size_t n) {
    __m512i a = _mm512_setzero_si512(), b = a;
    for (size_t i = 0; i < n; i += 256) {
        for (size_t j = 0; j < 256; j += 64) _mm_prefetch((const char *)p + i + 1024 + j, _MM_HINT_T0);
        a = _mm512_or_si512(a, _mm512_load_si512(p + i));
        b = _mm512_or_si512(b, _mm512_load_si512(p + i + 64));
        a = _mm512_or_si512(a, _mm512_load_si512(p + i + 128));
        b = _mm512_or_si512(b, _mm512_load_si512(p + i + 192));
    }
    return (uint64_t)_mm512_reduce_or_epi64(_mm512_or_si512(a, b));
}

__attribute__((target("avx512f"))) static inline uint64_t probe_read_two(const uint8_t *p, size_t n) {
    __m512i a = _mm512_setzero_si512(), b = a;
    for (size_t i = 0; i < n; i += 128) {
        _mm_prefetch((const char *)p + i + 2048, _MM_HINT_T1);
        _mm_prefetch((const char *)p + i + 2048 + 64, _MM_HINT_T1);
        a = _mm512_or_si512(a, _mm512_load_si512(p + i));
        b = _mm512_or_si512(b, _mm512_load_si512(p + i + 64));
    }
    return (uint64_t)_mm512_reduce_or_epi64(_mm512_or_si512(a, b));
}
#endif

static inline uint64_t probe_read_plain(const uint8_t *p, size_t n) {
    uint64_t sum[8] = {0}, line[8];
    for (size_t i = 0; i < n; i += sizeof line) {
        __builtin_prefetch(p + i + 1024);
        memcpy(line, p + i, sizeof line);
        for (size_t j = 0; j < 8; j++) sum[j] |= line[j];
    }
    for (size_t j = 1; j < 8; j++) sum[0] |= sum[j];
    return sum[0];
}

/* Of all bytes, so that they are read. */
static inline uint64_t probe_read_all(const uint8_t *p, size_t n) {
#if defined(__x86_64__)
    if (paged_cpu_flags() & PAGED_CPU_AMX) return probe_read_two(p, n);
    if (paged_cpu_flags() & PAGED_CPU_AVX512) return probe_read_four(p, n);
#endif
    return probe_read_plain(p, n);
}

/* Each thread reads its part of one long run. */
static inline void probe_read_job(void *arg, team *t, int32_t ith) {
    probe_read *probe = arg;
    size_t part = PROBE_BYTES / (size_t)t->n / HUGE_PAGE * HUGE_PAGE;
    const uint8_t *begin = probe->bytes + (size_t)ith * part;
    atomic_fetch_or_explicit(&probe->sink, probe_read_all(begin, part), memory_order_relaxed);
}

static inline size_t probe_read_bytes(const team *t) {
    return PROBE_BYTES / (size_t)t->n / HUGE_PAGE * HUGE_PAGE * (size_t)t->n;
}

/* ---- products ---- */

typedef enum probe_kind { PROBE_F32, PROBE_BF16, PROBE_I8, PROBE_AMX, PROBE_N_KINDS } probe_kind;

enum { PROBE_LOOPS = 1 << 22, PROBE_CHAINS = 16, PROBE_AMX_PART = 64 };

static const struct {
    const char *name;
    uint32_t cpu_flag;
    int32_t ops; /* of one instruction on 64 bytes; a product and a sum are two */
} probe_kinds[PROBE_N_KINDS] = {{"f32", PAGED_CPU_AVX512, 32},
                                {"bf16", PAGED_CPU_AVX512_BF16, 64},
                                {"i8", PAGED_CPU_AVX512_VNNI, 128},
                                /* TDPBF16PS, one for every 64 of the others: 16 * 16 sums of 32 products. */
                                {"amx", PAGED_CPU_AMX, 2 * 16 * 16 * 32 / PROBE_AMX_PART}};

#if defined(__x86_64__)
/* Independent chains, more than latency times width, in registers only. The empty statement hides from the
 * compiler that the factors never change. */
#define PROBE_CHAIN_LOOP(type, zero, step, factors)                                                          \
    type acc[PROBE_CHAINS];                                                                                  \
    for (int32_t i = 0; i < PROBE_CHAINS; i++) acc[i] = zero;                                                \
    for (int32_t n = 0; n < PROBE_LOOPS; n++) {                                                              \
        __asm__ volatile("" : factors);                                                                      \
        acc[0] = step(acc[0]), acc[1] = step(acc[1]), acc[2] = step(acc[2]);                                 \
        acc[3] = step(acc[3]), acc[4] = step(acc[4]), acc[5] = step(acc[5]);                                 \
        acc[6] = step(acc[6]), acc[7] = step(acc[7]), acc[8] = step(acc[8]);                                 \
        acc[9] = step(acc[9]), acc[10] = step(acc[10]), acc[11] = step(acc[11]);                             \
        acc[12] = step(acc[12]), acc[13] = step(acc[13]), acc[14] = step(acc[14]);                           \
        acc[15] = step(acc[15]);                                                                             \
    }

__attribute__((target("avx512f"))) static inline float probe_products_f32(void) {
    __m512 x = _mm512_set1_ps(0.5f), y = _mm512_set1_ps(0.25f);
#define STEP(a) _mm512_fmadd_ps(x, y, a)
    PROBE_CHAIN_LOOP(__m512, _mm512_setzero_ps(), STEP, "+v"(x))
#undef STEP
    for (int32_t i = 1; i < PROBE_CHAINS; i++) acc[0] = _mm512_add_ps(acc[0], acc[i]);
    return _mm512_reduce_add_ps(acc[0]);
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))) static inline float
probe_products_bf16(void) {
    __m512i pairs = _mm512_set1_epi16(0x3f00), other = _mm512_set1_epi16(0x3e80);
#define STEP(a) _mm512_dpbf16_ps(a, (__m512bh)pairs, (__m512bh)other)
    PROBE_CHAIN_LOOP(__m512, _mm512_setzero_ps(), STEP, "+v"(pairs))
#undef STEP
    for (int32_t i = 1; i < PROBE_CHAINS; i++) acc[0] = _mm512_add_ps(acc[0], acc[i]);
    return _mm512_reduce_add_ps(acc[0]);
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni"))) static inline float probe_products_i8(void) {
    __m512i x = _mm512_set1_epi8(3), y = _mm512_set1_epi8(-2);
#define STEP(a) _mm512_dpbusd_epi32(a, x, y)
    PROBE_CHAIN_LOOP(__m512i, _mm512_setzero_si512(), STEP, "+v"(x))
#undef STEP
    for (int32_t i = 1; i < PROBE_CHAINS; i++) acc[0] = _mm512_add_epi32(acc[0], acc[i]);
    return (float)_mm512_reduce_add_epi32(acc[0]);
}

/* Tiles of zeros, which take as long as others. */
static inline float probe_products_amx(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t n_rows[16];
    } shapes = {.palette = 1};
    for (int32_t i = 0; i < 8; i++) shapes.row_bytes[i] = 64, shapes.n_rows[i] = 16;
    __asm__ volatile("ldtilecfg %0" : : "m"(shapes));
    for (int32_t n = 0; n < PROBE_LOOPS / PROBE_AMX_PART * PROBE_CHAINS; n += 4)
        __asm__ volatile("tdpbf16ps %tmm5, %tmm4, %tmm0\n\ttdpbf16ps %tmm5, %tmm4, %tmm1\n\t"
                         "tdpbf16ps %tmm5, %tmm4, %tmm2\n\ttdpbf16ps %tmm5, %tmm4, %tmm3");
    __asm__ volatile("tilerelease");
    return 0;
}
#endif

typedef struct probe_products {
    probe_kind kind;
    _Atomic int32_t sink;
} probe_products;

static inline void probe_products_job(void *arg, team *t, int32_t ith) {
    probe_products *probe = arg;
    float seen = 0;
    (void)t, (void)ith;
#if defined(__x86_64__)
    if (probe->kind == PROBE_F32) seen = probe_products_f32();
    if (probe->kind == PROBE_BF16) seen = probe_products_bf16();
    if (probe->kind == PROBE_I8) seen = probe_products_i8();
    if (probe->kind == PROBE_AMX) seen = probe_products_amx();
#endif
    atomic_fetch_add_explicit(&probe->sink, seen > 0, memory_order_relaxed);
}

/* Operations that all threads do in one job; 0: this machine has no instruction for it. */
static inline double probe_products_ops(probe_kind kind, const team *t) {
    if (!(paged_cpu_flags() & probe_kinds[kind].cpu_flag)) return 0;
    return (double)t->n * PROBE_LOOPS * PROBE_CHAINS * probe_kinds[kind].ops;
}

#endif
