/* alloc.c: all heap memory of the library. Aligned to a cache line, so that an array of vectors needs no
 * special case. */
#include <stdlib.h>
#include <sys/mman.h>

#include "base/base.h"

enum { ALIGN = 64, HUGE_PAGE = 2 << 20 };

static void *system_alloc(void *user, size_t size_bytes, size_t align) {
    (void)user;
    /* aligned_alloc wants a multiple of the alignment. */
    return aligned_alloc(align, (size_bytes + align - 1) / align * align);
}

static void system_free(void *user, void *ptr) {
    (void)user;
    free(ptr);
}

static const paged_allocator system_allocator = {system_alloc, system_free, NULL};
static paged_allocator current = {system_alloc, system_free, NULL};

void paged_allocator_set(const paged_allocator *allocator) {
    current = allocator ? *allocator : system_allocator;
}

void *paged__alloc(size_t n, size_t elem_bytes) {
    size_t size_bytes;
    if (!paged__mul(n, elem_bytes, &size_bytes) || size_bytes > PTRDIFF_MAX - ALIGN) return NULL;
    return current.alloc(current.user, PAGED_MAX(size_bytes, (size_t)1), ALIGN);
}

void *paged__calloc(size_t n, size_t elem_bytes) {
    void *ptr = paged__alloc(n, elem_bytes);
    if (ptr) memset(ptr, 0, n * elem_bytes);
    return ptr;
}

void *paged__alloc_huge(size_t size_bytes) {
    if (size_bytes < HUGE_PAGE) return paged__alloc(size_bytes, 1);
    if (size_bytes > PTRDIFF_MAX - HUGE_PAGE) return NULL;
    void *ptr = current.alloc(current.user, size_bytes, HUGE_PAGE);
    /* A wish. The pages lie inside what was allocated, so nobody else's are touched. */
    if (ptr) madvise(ptr, size_bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);
    return ptr;
}

void paged__free(void *ptr) {
    if (ptr) current.free(current.user, ptr);
}
