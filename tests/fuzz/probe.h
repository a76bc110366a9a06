/* probe.h: what fuzz targets share: a promise that traps when it is broken, for the fuzzer to notice, and an
 * allocator that counts, for the most memory that is in use at once. Included by one file of a program.
 */
#ifndef PAGED_TESTS_PROBE_H
#define PAGED_TESTS_PROBE_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

#define PROBE_MUST(cond)                                                                                     \
    do {                                                                                                     \
        if (!(cond)) {                                                                                       \
            fprintf(stderr, "%s:%d: broken promise: %s\n", __FILE__, __LINE__, #cond);                       \
            __builtin_trap();                                                                                \
        }                                                                                                    \
    } while (0)

/* ---- an allocator that counts ---- */

typedef struct probe_memory {
    size_t used_bytes, peak_bytes;
    int64_t n_left; /* allocations that succeed before one fails; below zero: none fails */
} probe_memory;

enum { PROBE_HEAD = 64 }; /* in front of each allocation, with its size; keeps the alignment */

static void *probe_alloc(void *user, size_t size_bytes, size_t align) {
    probe_memory *m = user;
    PROBE_MUST(align <= PROBE_HEAD);
    if (m->n_left >= 0 && m->n_left-- == 0) return NULL;
    uint8_t *block = NULL;
    if (posix_memalign((void **)&block, PROBE_HEAD, PROBE_HEAD + size_bytes) != 0) return NULL;
    memcpy(block, &size_bytes, sizeof size_bytes);
    m->used_bytes += size_bytes;
    m->peak_bytes = PAGED_MAX(m->peak_bytes, m->used_bytes);
    return block + PROBE_HEAD;
}

static void probe_free(void *user, void *ptr) {
    probe_memory *m = user;
    uint8_t *block = (uint8_t *)ptr - PROBE_HEAD;
    size_t size_bytes;
    memcpy(&size_bytes, block, sizeof size_bytes);
    m->used_bytes -= size_bytes;
    free(block);
}

#endif
