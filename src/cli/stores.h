/* cli/stores.h: the places outside memory that a command line names, and the notes that go with them. */
#ifndef PAGED_CLI_STORES_H
#define PAGED_CLI_STORES_H

#include "cli/redis.h"
#include "paged/store.h"

enum { PAGED__STORES_MAX = 2 };

typedef struct paged__stores_options {
    const char *dir;
    paged__redis_options redis;
} paged__stores_options;

#define PAGED__STORES_DEFAULTS                                                                               \
    { .redis = PAGED__REDIS_DEFAULTS }

#define PAGED__STORES_ROWS(T, s)                                                                             \
    {PAGED__OPTION_TEXT,                                                                                     \
     0,                                                                                                      \
     "store",                                                                                                \
     "DIR",                                                                                                  \
     offsetof(T, s.dir),                                                                                     \
     0,                                                                                                      \
     0,                                                                                                      \
     NULL,                                                                                                   \
     "keep keys and values in files there, over restarts"},                                                  \
        PAGED__REDIS_ROWS(T, s.redis)

typedef struct paged__stores {
    paged_store all[PAGED__STORES_MAX]; /* the fastest first */
    int32_t n;
    paged_notes notes; /* of Redis, which others share, before those of files */
    bool has_notes;
} paged__stores;

/* Opens what is named, which may be nothing. Returns an exit code; the error has been told. */
int paged__stores_open(paged__cli *cli, const paged__stores_options *options, paged__stores *out);

/* Closes what nobody has taken; who takes stores sets n to 0, who takes notes has_notes to false. */
void paged__stores_close(paged__stores *stores);

#endif
