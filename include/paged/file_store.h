/* file_store.h: a store (store.h) in a directory of this machine. Survives kill -9.
 *
 *   DIR/index.sqlite     what is where (SQLite, WAL): the truth after a crash
 *   DIR/data-N           fixed slots of records of one fingerprint each
 *   DIR/quarantine/      slots whose content was not what the index says
 *
 * Thread rule: as in store.h. One process at a time has a directory; a second one is refused.
 */
#ifndef PAGED_FILE_STORE_H
#define PAGED_FILE_STORE_H

#include "paged/store.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct paged_file_store_config {
    size_t struct_size;
    const char *dir;          /* made if it is not there (mode 0700) */
    uint64_t max_bytes;       /* of data files; 0: 10 GiB. Tested before a write */
    uint64_t keep_free_bytes; /* of the file system, that others may need; 0: 1 GiB */
    int32_t ttl_s;            /* a record that was not used for so long goes; 0: it stays */
    bool read_only;           /* nothing is written, not even the time of use */
} paged_file_store_config;

/* Takes the directory (a lock), and drops what a crash has left. Errors: INVALID_ARG, IO (with the path and
 * what the system says), LIMIT (another process has it), FORMAT (the index is of a newer version). An index
 * that is damaged is set aside, not an error. */
PAGED_API paged_status paged_file_store_create(const paged_file_store_config *config, paged_store *out,
                                               paged_notes *notes /* may be NULL */, paged_error *err);

#ifdef __cplusplus
}
#endif
#endif
