/* cli/redis.h: the options of the Redis store, and the store by them. */
#ifndef PAGED_CLI_REDIS_H
#define PAGED_CLI_REDIS_H

#include "cli/cli.h"
#include "paged/redis_store.h"

typedef struct paged__redis_options {
    const char *servers, *user, *password_file, *prefix;
    int32_t ttl_s, timeout_ms;
} paged__redis_options;

#define PAGED__REDIS_DEFAULTS                                                                                \
    { .prefix = "paged:" }

#define PAGED__REDIS_ROWS(T, r)                                                                              \
    {PAGED__OPTION_TEXT,                                                                                     \
     0,                                                                                                      \
     "redis",                                                                                                \
     "SERVERS",                                                                                              \
     offsetof(T, r.servers),                                                                                 \
     0,                                                                                                      \
     0,                                                                                                      \
     NULL,                                                                                                   \
     "keep keys and values on Redis servers, too: HOST:PORT,…, or\nunix:/PATH"},                             \
        {PAGED__OPTION_TEXT,                                                                                 \
         0,                                                                                                  \
         "redis-user",                                                                                       \
         "NAME",                                                                                             \
         offsetof(T, r.user),                                                                                \
         0,                                                                                                  \
         0,                                                                                                  \
         NULL,                                                                                               \
         "who we are there (default: nobody in particular)"},                                                \
        {PAGED__OPTION_TEXT,                                                                                 \
         0,                                                                                                  \
         "redis-password-file",                                                                              \
         "FILE",                                                                                             \
         offsetof(T, r.password_file),                                                                       \
         0,                                                                                                  \
         0,                                                                                                  \
         NULL,                                                                                               \
         "the password, its first line (default: $PAGED_REDIS_PASSWORD)"},                                   \
        {PAGED__OPTION_TEXT,                                                                                 \
         0,                                                                                                  \
         "redis-prefix",                                                                                     \
         "TEXT",                                                                                             \
         offsetof(T, r.prefix),                                                                              \
         0,                                                                                                  \
         0,                                                                                                  \
         NULL,                                                                                               \
         "what all names there begin with (default: paged:)"},                                               \
        {PAGED__OPTION_INT,                                                                                  \
         0,                                                                                                  \
         "redis-ttl",                                                                                        \
         "S",                                                                                                \
         offsetof(T, r.ttl_s),                                                                               \
         -1,                                                                                                 \
         INT32_MAX,                                                                                          \
         NULL,                                                                                               \
         "seconds from its last use that a block lives there; -1: for\never (default: 86400)"},              \
    {                                                                                                        \
        PAGED__OPTION_INT, 0, "redis-timeout", "MS", offsetof(T, r.timeout_ms), 1, 60000, NULL,              \
            "that an answer may take before it counts as a miss\n(default: 200)"                             \
    }

/* *is_there: whether servers were named, and so store and notes (which may be NULL) are filled. Returns an
 * exit code; the error has been told, and never the password. */
int paged__redis_open(paged__cli *cli, const paged__redis_options *options, paged_store *store,
                      paged_notes *notes, bool *is_there);

#endif
