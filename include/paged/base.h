/* base.h: what every part of libpaged shares: status codes, errors with their numbers, log, allocator, CPU
 * features.
 *
 * Rules that hold for the whole library:
 *  - A function that can fail returns a paged_status. On failure every object and every out parameter is as
 * it was before the call, except *err, which then says what went wrong and with which numbers.
 *  - `paged_error *err` may be NULL everywhere.
 *  - Config structs begin with `struct_size`; set it to sizeof of the struct and everything else that you do
 * not name to zero. Zero always means the default, but for the few fields that have an init function (of
 * paged_request, paged_engine_config), which say what zero means. So the structs can grow without breaking a
 * caller that was built earlier.
 *  - The library never prints, exits or aborts because of its input. A broken invariant of its own does abort
 *    (PAGED_ASSERT), after a line through the log callback.
 */
#ifndef PAGED_BASE_H
#define PAGED_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "paged/version.h"

#ifdef __cplusplus
extern "C" {
#endif

#if defined(PAGED_STATIC)
#define PAGED_API
#else
#define PAGED_API __attribute__((visibility("default")))
#endif

/* name, value, text. One list makes the enum, paged_status_name() and paged_status_text(). Values never
 * change. */
#define PAGED_STATUS_MAP(X)                                                                                  \
    X(OK, 0, "success")                                                                                      \
    X(ERR_INVALID_ARG, 1, "invalid argument")                                                                \
    X(ERR_NO_MEMORY, 2, "the system has no memory left")                                                     \
    X(ERR_NO_BLOCKS, 3, "the pool has no free block")                                                        \
    X(ERR_NO_SEQS, 4, "all sequence slots are in use")                                                       \
    X(ERR_STALE, 5, "the handle is stale or foreign")                                                        \
    X(ERR_TOO_LONG, 6, "longer than the context allows")                                                     \
    X(ERR_IO, 7, "input/output error")                                                                       \
    X(ERR_FORMAT, 8, "malformed data")                                                                       \
    X(ERR_UNSUPPORTED, 9, "not supported")                                                                   \
    X(ERR_CANCELLED, 10, "cancelled")                                                                        \
    X(ERR_LIMIT, 11, "a limit was reached")                                                                  \
    X(ERR_CORRUPT, 12, "an invariant does not hold")                                                         \
    X(ERR_NOT_FOUND, 13, "not found")

typedef enum paged_status {
#define PAGED_STATUS_ENUM(name, value, text) PAGED_##name = (value),
    PAGED_STATUS_MAP(PAGED_STATUS_ENUM)
#undef PAGED_STATUS_ENUM
} paged_status;

/* Both return static strings, "unknown status" for values that are not in the list. Safe from any thread. */
PAGED_API const char *paged_status_name(paged_status status); /* "PAGED_ERR_NO_BLOCKS" */
PAGED_API const char *paged_status_text(paged_status status); /* "the pool has no free block" */

/* What went wrong, in one line without a newline, with the numbers in it. Owned by the caller, no allocation
 * inside. */
typedef struct paged_error {
    paged_status status;
    char message[500];
} paged_error;

PAGED_API const char *paged_version(void); /* "0.1.0"; static */

typedef enum paged_log_level {
    PAGED_LOG_ERROR = 0,
    PAGED_LOG_WARN = 1,
    PAGED_LOG_INFO = 2,
    PAGED_LOG_DEBUG = 3
} paged_log_level;

/* Receives one line without a newline. May be called from any thread that runs library code. */
typedef void (*paged_log_fn)(void *user, paged_log_level level, const char *line);

/* Process-wide; NULL (the default) is silence. Not safe while other threads are inside the library. */
PAGED_API void paged_log_set(paged_log_fn fn, void *user, paged_log_level max_level);

/* `alloc` returns memory aligned to `align` (a power of two, at least 8) or NULL; `free` takes what alloc
 * returned. */
typedef struct paged_allocator {
    void *(*alloc)(void *user, size_t size_bytes, size_t align);
    void (*free)(void *user, void *ptr);
    void *user;
} paged_allocator;

/* The hook for all heap memory of the library; NULL goes back to the default (aligned_alloc, free). Set it
 * before any object is made and do not change it while one lives. Tests use it to make the n-th allocation
 * fail. */
PAGED_API void paged_allocator_set(const paged_allocator *allocator);

/* Instruction sets, as the kernels are grouped. */
enum {
    PAGED_CPU_AVX2 = 1u << 0,        /* AVX2, FMA, F16C, BMI2 */
    PAGED_CPU_AVX512 = 1u << 1,      /* F, BW, DQ, VL */
    PAGED_CPU_AVX512_BF16 = 1u << 2, /* VDPBF16PS */
    PAGED_CPU_AVX512_VNNI = 1u << 3, /* VPDPBUSD */
    PAGED_CPU_NEON = 1u << 4,        /* every aarch64 has it */
    PAGED_CPU_NEON_DOT = 1u << 5,    /* SDOT */
    PAGED_CPU_AMX = 1u << 6          /* tiles of int8 and bf16, AVX512-FP16; the system permits tiles */
};

/* What this machine has, less what paged_cpu_mask() took away. Safe from any thread. Where the processor has
 * AMX, the first call asks Linux to let this process use its tile registers, unless PAGED_CPU leaves it out;
 * where that is refused, AMX counts as missing. They are saved in 8 KiB more of each thread that used them
 * and of signal frames, for which stacks given to sigaltstack() must have room. */
PAGED_API uint32_t paged_cpu_flags(void);

/* Keeps only the given flags, for tests and for comparing kernels; ~0u restores all. AMX goes with any of the
 * AVX flags. Objects made before keep theirs; products with weights ask anew (but those of a model that
 * multiplies as bf16), so do not call it while an engine computes. The environment variable PAGED_CPU (ref,
 * neon, avx2, avx512: without the ones below, avx512_vnni, avx512_bf16: with VNNI, amx: with both) does the
 * same for a whole process. */
PAGED_API void paged_cpu_mask(uint32_t keep);

/* CPUs this process may use: affinity and cgroup quota (v1 and v2) respected; at least 1. */
PAGED_API int32_t paged_cpu_count(void);

/* Bytes that this process may still take before the system has to swap or to refuse: what the system says is
 * available, cgroup limits (v1 and v2) respected. 0: not known. */
PAGED_API size_t paged_memory_available(void);

#ifdef __cplusplus
}
#endif
#endif
