/* book_arena.h: an arena for tests that keeps books: what is backed, how often it was asked, and that nobody
 * asks twice or touches what is not backed. What it gives back it forgets. */
#ifndef PAGED_TESTS_BOOK_ARENA_H
#define PAGED_TESTS_BOOK_ARENA_H

#include "mem/mem.h"
#include "test.h"

struct book {
    uint8_t *bytes; /* [size_bytes] */
    bool *backed;   /* [n_granules] */
    size_t size_bytes, granule_bytes, n_granules;
    int32_t n_backs, n_unbacks, n_copies;
    bool refuses; /* to take memory back */
};

static void book_mark(struct book *book, size_t offset, size_t size_bytes, bool backed) {
    size_t granule = offset / book->granule_bytes, left_bytes = book->size_bytes - offset;
    CHECK(offset % book->granule_bytes == 0 && granule < book->n_granules);
    CHECK_EQ(size_bytes, left_bytes < book->granule_bytes ? left_bytes : book->granule_bytes);
    CHECK_EQ(book->backed[granule], !backed);
    book->backed[granule] = backed;
    memset(book->bytes + offset, 0x5a, size_bytes);
}

static void book_touch(const struct book *book, size_t offset, size_t size_bytes) {
    CHECK(offset + size_bytes <= book->size_bytes);
    for (size_t i = offset / book->granule_bytes; i <= (offset + size_bytes - 1) / book->granule_bytes; i++)
        CHECK(book->backed[i]);
}

static paged_status book_back(void *ctx, size_t offset, size_t size_bytes) {
    struct book *book = ctx;
    book_mark(book, offset, size_bytes, true);
    book->n_backs++;
    return PAGED_OK;
}

static paged_status book_unback(void *ctx, size_t offset, size_t size_bytes) {
    struct book *book = ctx;
    if (book->refuses) return PAGED_ERR_IO;
    book_mark(book, offset, size_bytes, false);
    book->n_unbacks++;
    return PAGED_OK;
}

static paged_status book_copy(void *ctx, size_t dst, size_t src, size_t size_bytes) {
    struct book *book = ctx;
    book_touch(book, dst, size_bytes);
    book_touch(book, src, size_bytes);
    memcpy(book->bytes + dst, book->bytes + src, size_bytes);
    book->n_copies++;
    return PAGED_OK;
}

static void book_close(void *ctx) {
    struct book *book = ctx;
    free(book->bytes);
    free(book->backed);
    memset(book, 0, sizeof *book);
}

/* Closes what the book held before. */
static void book_open(struct book *book, size_t size_bytes, size_t granule_bytes, paged_arena *arena) {
    book_close(book);
    *book = (struct book){.size_bytes = size_bytes,
                          .granule_bytes = granule_bytes,
                          .n_granules = (size_bytes - 1) / granule_bytes + 1};
    book->bytes = aligned_alloc(64, (size_bytes + 63) / 64 * 64);
    book->backed = calloc(book->n_granules, sizeof *book->backed);
    CHECK(book->bytes && book->backed);
    *arena = (paged_arena){.ctx = book,
                           .base = book->bytes,
                           .size_bytes = size_bytes,
                           .back = book_back,
                           .unback = book_unback,
                           .copy = book_copy,
                           .destroy = book_close,
                           .granule_bytes = granule_bytes};
}

#endif
