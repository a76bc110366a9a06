/* cli/places.h: the places outside memory that a command line names, and the notes that go with them. */
#ifndef PAGED_CLI_PLACES_H
#define PAGED_CLI_PLACES_H

#include "cli/redis.h"
#include "paged/store.h"

enum { PAGED__PLACES_MAX = 2 };

typedef struct paged__places_options {
    const char *dir;
    size_t max_bytes;
    int32_t ttl_s;
    paged__redis_options redis;
} paged__places_options;

#define PAGED__PLACES_DEFAULTS                                                                               \
    { .redis = PAGED__REDIS_DEFAULTS }

#define PAGED__PLACES_ROWS(T, s)                                                                             \
    {PAGED__OPTION_TEXT,                                                                                     \
     0,                                                                                                      \
     "store",                                                                                                \
     "DIR",                                                                                                  \
     offsetof(T, s.dir),                                                                                     \
     0,                                                                                                      \
     0,                                                                                                      \
     NULL,                                                                                                   \
     "keep keys and values in files there, over restarts"},                                                  \
        {PAGED__OPTION_BYTES,                                                                                \
         0,                                                                                                  \
         "store-bytes",                                                                                      \
         "N",                                                                                                \
         offsetof(T, s.max_bytes),                                                                           \
         0,                                                                                                  \
         0,                                                                                                  \
         NULL,                                                                                               \
         "bytes of these files at most (default: 10GiB; the disk keeps\n1 GiB free in any case)"},           \
        {PAGED__OPTION_INT,                                                                                  \
         0,                                                                                                  \
         "store-ttl",                                                                                        \
         "S",                                                                                                \
         offsetof(T, s.ttl_s),                                                                               \
         1,                                                                                                  \
         INT32_MAX,                                                                                          \
         NULL,                                                                                               \
         "seconds from its last use that a block lives there (default: as\nlong as there is room)"},         \
        PAGED__REDIS_ROWS(T, s.redis)

typedef struct paged__places {
    paged_store all[PAGED__PLACES_MAX]; /* the fastest first */
    int32_t n;
    paged_notes notes; /* of Redis, which others share, before those of files */
    bool has_notes;
} paged__places;

/* Opens what is named, which may be nothing. Returns an exit code; the error has been told. */
int paged__places_open(paged__cli *cli, const paged__places_options *options, paged__places *out);

/* Closes what nobody has taken; who takes stores sets n to 0, who takes notes has_notes to false. */
void paged__places_close(paged__places *places);

#endif
