/* arena.c: memory of this machine behind the paged_arena seam.
 *
 * The address space is reserved once and never moves; a page costs memory only between back and unback.
 *
 * Memory goes back by MADV_DONTNEED: it is gone from the process at once, a huge page in one piece if the
 * range covers it. MADV_FREE would leave it in the process until the system runs short, where nobody could
 * see or promise anything, and splits huge pages. The pages stay writable: to protect them again each time
 * would cut the mapping into as many pieces as there are borders between backed and not; the system allows
 * 65530.
 *
 * The base lies on a 2 MiB border, so that the system can give huge pages: random blocks of many KiB else
 * miss the TLB on every head. */
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "mem/mem.h"

typedef struct host_arena {
    uint8_t *base;
    size_t size_bytes; /* whole pages */
    size_t page_bytes;
} host_arena;

/* The pages that the bytes touch. */
static bool page_range(const host_arena *host, size_t offset, size_t size_bytes, size_t *first, size_t *end) {
    if (offset > host->size_bytes || size_bytes > host->size_bytes - offset) return false;
    *first = offset / host->page_bytes * host->page_bytes;
    *end = (offset + size_bytes + host->page_bytes - 1) / host->page_bytes * host->page_bytes;
    return true;
}

static paged_status host_back(void *ctx, size_t offset, size_t size_bytes) {
    const host_arena *host = ctx;
    size_t first, end;
    if (!page_range(host, offset, size_bytes, &first, &end)) return PAGED_ERR_INVALID_ARG;
    if (mprotect(host->base + first, end - first, PROT_READ | PROT_WRITE) != 0) return PAGED_ERR_NO_MEMORY;
    return PAGED_OK;
}

static paged_status host_unback(void *ctx, size_t offset, size_t size_bytes) {
    const host_arena *host = ctx;
    size_t first, end;
    if (!page_range(host, offset, size_bytes, &first, &end)) return PAGED_ERR_INVALID_ARG;
    if (madvise(host->base + first, end - first, MADV_DONTNEED) != 0) return PAGED_ERR_IO;
    return PAGED_OK;
}

static paged_status host_copy(void *ctx, size_t dst, size_t src, size_t size_bytes) {
    const host_arena *host = ctx;
    memcpy(host->base + dst, host->base + src, size_bytes);
    return PAGED_OK;
}

static void host_destroy(void *ctx) {
    host_arena *host = ctx;
    munmap(host->base, host->size_bytes);
    paged__free(host);
}

paged_status paged_arena_create_host(size_t size_bytes, paged_arena *out, paged_error *err) {
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE), map_bytes;
    if (!out || size_bytes == 0)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "an arena of %zu bytes", size_bytes);
    if (!paged__add(size_bytes, PAGED__GRANULE + page_bytes, &map_bytes))
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no address space for an arena of %zu bytes",
                           size_bytes);
    size_t arena_bytes = (size_bytes + page_bytes - 1) / page_bytes * page_bytes;
    host_arena *host = paged__alloc(1, sizeof *host);
    if (!host) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for an arena");
    map_bytes = arena_bytes + PAGED__GRANULE;
    void *map = mmap(NULL, map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) {
        int error = errno;
        char reason[128];
        paged__free(host);
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no address space for an arena of %zu bytes: %s",
                           size_bytes, strerror_r(error, reason, sizeof reason));
    }
    /* Trim what lies before the 2 MiB border and behind the end. */
    uint8_t *start = map;
    size_t head = (PAGED__GRANULE - (uintptr_t)start % PAGED__GRANULE) % PAGED__GRANULE;
    if (head) munmap(start, head);
    if (head < PAGED__GRANULE) munmap(start + head + arena_bytes, PAGED__GRANULE - head);
    *host = (host_arena){start + head, arena_bytes, page_bytes};
    /* A wish; where the system has no huge pages it stays with small ones. */
    madvise(host->base, arena_bytes, MADV_HUGEPAGE);
    *out = (paged_arena){.ctx = host,
                         .base = host->base,
                         .size_bytes = arena_bytes,
                         .granule_bytes = PAGED__GRANULE,
                         .back = host_back,
                         .unback = host_unback,
                         .copy = host_copy,
                         .destroy = host_destroy};
    return PAGED_OK;
}
