/* base/base.h: inside tools of every room. May include nothing but include/paged/base.h and libc.
 *
 * The rules of errors: the caller's mistake -> paged__fail(err, PAGED_ERR_INVALID_ARG, …) before anything has
 * changed; an expected shortage -> a status; our own bug -> PAGED_ASSERT, which stays on in release.
 */
#ifndef PAGED_BASE_BASE_H
#define PAGED_BASE_BASE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "paged/base.h"

/* ---- errors, asserts, log ---- */

/* Fills *err (if not NULL) and returns status. Use: return paged__fail(err, PAGED_ERR_X, "%d blocks, %d
 * free", a, b); */
paged_status paged__fail(paged_error *err, paged_status status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

void paged__log(paged_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

__attribute__((noreturn)) void paged__assert_failed(const char *expr, const char *file, int line);
#define PAGED_ASSERT(cond) ((cond) ? (void)0 : paged__assert_failed(#cond, __FILE__, __LINE__))

#define PAGED_MIN(a, b) ((a) < (b) ? (a) : (b))
#define PAGED_MAX(a, b) ((a) > (b) ? (a) : (b))

/* ---- memory: everything goes through the allocator hook ---- */

void *paged__alloc(size_t n,
                   size_t elem_bytes); /* checked multiply, 64-byte aligned, not cleared; NULL on failure */
void *paged__calloc(size_t n, size_t elem_bytes); /* cleared; n * elem_bytes == 0 gives a valid pointer too */
/* For large arrays that are read over and over: on a 2 MiB border and in huge pages where the system gives
 * them (a page table walk less for each 4 KiB). Not cleared; NULL on failure. */
void *paged__alloc_huge(size_t size_bytes);
void paged__free(void *ptr); /* of any of the three; NULL is fine */

static inline bool paged__mul(size_t a, size_t b, size_t *out) {
    return !__builtin_mul_overflow(a, b, out);
}
static inline bool paged__add(size_t a, size_t b, size_t *out) {
    return !__builtin_add_overflow(a, b, out);
}

/* ---- clock, randomness ---- */

uint64_t paged__now_ns(void); /* monotonic */

/* splitmix64's finaliser: a good hash of 64 bits, and a counter-based generator: paged__mix(seed + i * odd
 * constant). */
static inline uint64_t paged__mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* A small sequential generator for tests and tools; state is the seed. */
static inline uint64_t paged__rand(uint64_t *state) {
    return paged__mix((*state)++ * 0xd1342543de82ef95u + 1);
}

/* ---- spinning ---- */

/* To a core that waits for another one. */
static inline void paged__pause_core(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* ---- half precision, round to nearest even ---- */

float paged__f16_to_f32(uint16_t h);
uint16_t paged__f32_to_f16(float f); /* saturates finite and infinite values to ±65504; NaN stays NaN */

static inline float paged__bf16_to_f32(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}
uint16_t paged__f32_to_bf16(float f); /* saturates to the largest finite value; NaN stays NaN */

/* ---- files: the seam that tests replace to make I/O fail ---- */

typedef struct paged__file_map {
    const uint8_t *data; /* read-only; NULL for an empty file */
    size_t size_bytes;
    int fd; /* kept open while mapped */
} paged__file_map;

/* Maps a regular file for reading. Errors: IO with the path and the system's reason (also for directories,
 * pipes). */
paged_status paged__file_map_open(const char *path, paged__file_map *out, paged_error *err);
void paged__file_map_close(paged__file_map *map); /* a zeroed map is fine */

/* ---- names ---- */

enum { PAGED__LABEL_MAX = 128 }; /* bytes */

/* Of notes and of pins, which come from outside and are looked for in stores: 1 to PAGED__LABEL_MAX letters
 * that mean nothing to a file system or a server, and no dot first. NULL is none. */
static inline bool paged__is_name(const char *name) {
    static const char letters[] = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz._-";
    const size_t len = name ? strnlen(name, PAGED__LABEL_MAX + 1) : 0;
    return len > 0 && len <= PAGED__LABEL_MAX && strspn(name, letters) == len && name[0] != '.';
}

#endif
