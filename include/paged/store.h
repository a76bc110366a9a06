/* store.h: what a place outside memory has to be able to do, so that an engine keeps keys and values there.
 *
 * Each indexed block leaves memory as one *record*: its bytes, its tokens, and a key that stands for all that
 * they depend on: what the engine is (model, types, layout, kernels: the fingerprint), whose it is (the
 * namespace with its salt) and every token up to its end. A record never changes: the same key is the same
 * content, so that writing it twice is writing it once, and several engines may share a store.
 *
 * The engine calls a store from one thread of its own, one call at a time, and never while its steps wait for
 * the answer. So the functions may block, but not for ever: a store on a network has time limits, and says
 * NOT_FOUND when they have passed. What a store gives back is believed only if its checksum, the
 * fingerprint, the parent and the tokens are right; anything else is a miss, never an answer.
 *
 * Implementations: file_store.h, redis_store.h; a store in memory, for tests and to begin one of your own, is
 * in tests/memory_store.h.
 */
#ifndef PAGED_STORE_H
#define PAGED_STORE_H

#include "paged/base.h"
#include "paged/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct paged_key {
    uint8_t bytes[16]; /* XXH3-128 with a seed; no prompt can be read from it. All zero: none */
} paged_key;

/* What all records of an engine have in common. */
typedef struct paged_store_shape {
    const uint8_t
        *fingerprint;         /* [fingerprint_bytes] compared byte by byte; of another one nothing is found */
    size_t fingerprint_bytes; /* at most 4 KiB */
    int32_t block_size, n_groups;
    size_t block_bytes[PAGED_GROUPS_MAX]; /* of a block of each group */
} paged_store_shape;

typedef struct paged_record {
    paged_key key, parent; /* parent: of the block before; of a first one, what stands for its namespace */
    int32_t first;         /* position of its first token */
    int32_t n_tokens;      /* of this block; less than block_size: a sealed tail */
    int32_t *tokens;       /* [block_size] of the caller */
    uint32_t groups; /* bit g: the bytes of group g are there; of a group with a window they may not be */
    void *bytes[PAGED_GROUPS_MAX]; /* [block_bytes[g]] of the caller, for each group; slots without a token
                                    * are zeros */
} paged_record;

typedef struct paged_store_stats {
    uint64_t n_records, bytes, max_bytes; /* there now, of all fingerprints; 0: not known */
    uint64_t n_reads, n_hits, n_writes, n_evicted;
    uint64_t n_damaged;  /* records that were not what they should be, and went */
    uint64_t n_failures; /* calls that the place itself refused, or that took too long */
    uint64_t read_bytes, written_bytes;
    bool up; /* the last call got through; false: for some time nothing is asked any more */
} paged_store_stats;

typedef struct paged_store {
    void *self;       /* what the functions get; owned by the store */
    const char *name; /* "file", "redis"; static */

    /* Once, before all others but close. Errors: INVALID_ARG, IO, NO_MEMORY. The shape is copied. */
    paged_status (*open)(void *self, const paged_store_shape *shape, paged_error *err);

    /* How many of these keys, from the first on, are there without a gap. May be wrong by the time they are
     * read. */
    int32_t (*find)(void *self, const paged_key *keys, int32_t n);

    /* These will be read next, in this order, so that they may be fetched before they are asked for. Nobody
     * hears of what fails, and all of it may come to nothing. NULL: the store has no use for it. */
    void (*expect)(void *self, const paged_key *keys, int32_t n);

    /* Fills the record of record->key: everything else is out, the buffers are the caller's. Groups of
     * `wanted` that are not there are left as they are. Errors: NOT_FOUND (also: too slow, damaged, foreign,
     * larger than it should be), and then the buffers may hold anything. */
    paged_status (*read)(void *self, paged_record *record, uint32_t wanted);

    /* The longest sealed tail behind `parent` that begins as these tokens do, up to n_tokens: its key, and
     * how many of the tokens it has in common. NOT_FOUND. NULL: the store knows no tails. */
    paged_status (*tail)(void *self, const paged_key *parent, const int32_t *tokens, int32_t n_tokens,
                         paged_key *key, int32_t *n_common);

    /* Keeps a record; one that is there already is used again (LRU), not written. Errors: LIMIT (no room, and
     * nothing may go), IO, NO_MEMORY; the store is as before. */
    paged_status (*write)(void *self, const paged_record *record, paged_error *err);

    /* The records of these keys, whether they are there yet or not, stay until the same name pins others
     * (n = 0: none): limits then refuse what is new. Names are those of notes. Errors: LIMIT, IO, NO_MEMORY.
     * NULL: the store promises nothing. */
    paged_status (*pin)(void *self, const char *name, const paged_key *keys, int32_t n, paged_error *err);

    /* What was written is durable, as far as the place knows. Called when there is nothing else to do. */
    paged_status (*flush)(void *self, paged_error *err);

    /* From any thread, beside all other calls. */
    void (*get_stats)(void *self, paged_store_stats *out);

    void (*close)(void *self); /* flushes and frees */

    /* Each name that pins something, once, until fn says false; fn calls nothing of the store. Errors: IO,
     * NO_MEMORY. NULL: as without pins, or names cannot be told. */
    paged_status (*pins)(void *self, bool (*fn)(void *user, const char *name), void *user, paged_error *err);
} paged_store;

/* Texts under names, for what is not keys and values: conversations. Functions as above, but of any thread,
 * one at a time; they may block. Names: 1 … 128 bytes of [0-9A-Za-z._-], not beginning with a dot. */
typedef struct paged_notes {
    void *self;
    /* until: seconds since 1970 when it goes by itself; 0: it stays. At most 16 MiB. */
    paged_status (*put)(void *self, const char *name, const void *data, size_t size_bytes, int64_t until,
                        paged_error *err);
    /* A note, or its first max_bytes: *data is the caller's to free with free(). NOT_FOUND. */
    paged_status (*get)(void *self, const char *name, size_t max_bytes, void **data, size_t *size_bytes,
                        paged_error *err);
    paged_status (*erase)(void *self, const char *name, paged_error *err); /* NOT_FOUND */
    /* Each name, newest change first, until fn says false. */
    paged_status (*list)(void *self, bool (*fn)(void *user, const char *name, int64_t changed), void *user,
                         paged_error *err);
    void (*close)(void *self);
} paged_notes;

#ifdef __cplusplus
}
#endif
#endif
