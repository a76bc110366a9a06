/* store/tools.h: what `paged store` does with a file store: look, check, clean up, take out, put in.
 *
 * All functions take a store of paged_file_store_create, with or without notes, whose open() was not
 * called, and are called by one thread. They know nothing of options and print nothing.
 */
#ifndef PAGED_STORE_TOOLS_H
#define PAGED_STORE_TOOLS_H

#include "paged/file_store.h"

typedef struct paged__tool_shape { /* a fingerprint, and what there is of it */
    int64_t id, n_records, bytes;  /* bytes: of its data file */
    int64_t n_pinned;              /* of the records */
    int64_t last_used_at;          /* seconds since 1970; 0: it has no record */
    int32_t block_size, n_groups;
    size_t block_bytes[PAGED_GROUPS_MAX];
    uint8_t hash[16]; /* of fingerprint and sizes */
} paged__tool_shape;

typedef struct paged__tool_record {
    paged_key key, parent;
    int32_t first, n_tokens;
    uint32_t groups;
    int64_t used_at;
} paged__tool_record;

typedef struct paged__tool_report {
    int64_t n_records; /* that were right; of an import: that are there now */
    int64_t n_damaged;
    int64_t n_known; /* of an import: that were there before */
    int64_t bytes;
} paged__tool_report;

typedef struct paged__tool_watch { /* told now and then how far it is; may be NULL */
    void (*fn)(void *user, int64_t done, int64_t all);
    void *user;
} paged__tool_watch;

/* Each fingerprint, the one that was used last at the end; each record of one, in the order of the file.
 * Until fn says false. */
paged_status paged__tool_shapes(const paged_store *store,
                                bool (*fn)(void *user, const paged__tool_shape *shape), void *user,
                                paged_error *err);
paged_status paged__tool_records(const paged_store *store, int64_t shape,
                                 bool (*fn)(void *user, const paged__tool_record *record), void *user,
                                 paged_error *err);

/* Reads every record. Damaged ones go into quarantine, unless the store is read-only. Times of use stay. */
paged_status paged__tool_check(const paged_store *store, const paged__tool_watch *watch,
                               paged__tool_report *out, paged_error *err);

/* Keeps to the limit of the store's configuration, removes what was put aside, and packs the index. What
 * is too old went when the store was created. */
paged_status paged__tool_gc(const paged_store *store, paged_error *err);

/* Writes the record of a key and all before it, or (key NULL) all records of all fingerprints, into one
 * file, which is there in full or not at all. Errors: NOT_FOUND (of the path something is missing), IO. */
paged_status paged__tool_export(const paged_store *store, const paged_key *key, const char *path,
                                const paged__tool_watch *watch, paged__tool_report *out, paged_error *err);

/* Reads the whole file and believes nothing; then writes its records. Errors: FORMAT (nothing was
 * written), LIMIT (what fits is there), IO. */
paged_status paged__tool_import(const paged_store *store, const char *path, const paged__tool_watch *watch,
                                paged__tool_report *out, paged_error *err);

#endif
