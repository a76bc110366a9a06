/* cli/stores.h: the places outside memory that a command line names, and the notes that go with them. */
#ifndef PAGED_CLI_STORES_H
#define PAGED_CLI_STORES_H

#include "cli/redis.h"
#include "paged/store.h"

enum { PAGED__CLI_STORES_MAX = 2 };

typedef struct paged__files_options {
    const char *dir;
    size_t max_bytes;
    int32_t ttl_s;
} paged__files_options;

typedef struct paged__stores_options {
    paged__files_options files;
    paged__redis_options redis;
} paged__stores_options;

#define PAGED__STORES_DEFAULTS                                                                               \
    { .redis = PAGED__REDIS_DEFAULTS }

#define PAGED__FILES_ROWS(T, f)                                                                              \
    {PAGED__OPTION_TEXT,                                                                                     \
     0,                                                                                                      \
     "store",                                                                                                \
     "DIR",                                                                                                  \
     offsetof(T, f.dir),                                                                                     \
     0,                                                                                                      \
     0,                                                                                                      \
     NULL,                                                                                                   \
     "keep keys and values in files there, over restarts"},                                                  \
        {PAGED__OPTION_BYTES,                                                                                \
         0,                                                                                                  \
         "store-bytes",                                                                                      \
         "N",                                                                                                \
         offsetof(T, f.max_bytes),                                                                           \
         0,                                                                                                  \
         0,                                                                                                  \
         NULL,                                                                                               \
         "bytes of these files at most (default: 10GiB; the disk keeps\n1 GiB free in any case)"},           \
    {                                                                                                        \
        PAGED__OPTION_INT, 0, "store-ttl", "S", offsetof(T, f.ttl_s), 1, INT32_MAX, NULL,                    \
            "seconds from its last use that a block lives there (default: as\nlong as there is room)"        \
    }

#define PAGED__STORES_ROWS(T, s) PAGED__FILES_ROWS(T, s.files), PAGED__REDIS_ROWS(T, s.redis)

typedef struct paged__cli_stores {
    paged_store all[PAGED__CLI_STORES_MAX]; /* the fastest first */
    int32_t n;
    paged_notes notes; /* of Redis, which others share, before those of files */
    bool has_notes;
} paged__cli_stores;

/* Opens what is named, which may be nothing. Returns an exit code; the error has been told. */
int paged__cli_stores_open(paged__cli *cli, const paged__stores_options *options, paged__cli_stores *out);

/* Closes what nobody has taken; who takes stores sets n to 0, who takes notes has_notes to false. */
void paged__cli_stores_close(paged__cli_stores *stores);

#endif
