/* redis_store.h: a store (store.h) on one or several Redis servers, shared by any number of engines.
 *
 * A record is one value, or several parts of part_bytes where it is larger; which server has it is decided by
 * rendezvous hashing (Thaler, Ravishankar 1998) of its key, so that a server that is added or lost moves its
 * own share and no other. A server that does not answer in time is left alone for a while: a miss, no stall.
 * A note is on its own server, whether that is up or not (IO), so that there is one truth; a call about notes
 * may take ten times timeout_ms.
 * This hiredis speaks no TLS: for networks that are not yours, put a tunnel before it (docs/stores.md).
 *
 * Thread rule: as in store.h.
 */
#ifndef PAGED_REDIS_STORE_H
#define PAGED_REDIS_STORE_H

#include "paged/store.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct paged_redis_store_config {
    size_t struct_size;
    const char *servers; /* "host:port,host:port,…", [v6]:port, or unix:/path; the order does not matter; at
                          * most 64; a port left out is 6379 */
    const char *user, *password; /* NULL: none. Copied, and never said in a message */
    const char *prefix;          /* of all keys; NULL: "paged:" */
    int32_t timeout_ms;          /* of a call; 0: 200 */
    int32_t retry_ms;            /* a server that failed is left alone for so long; 0: 2000 */
    int32_t ttl_s;               /* of a record, from its last use on; 0: a day; -1: it stays */
    size_t part_bytes;           /* 0: 4 MiB */
} paged_redis_store_config;

/* Does not connect. Errors: INVALID_ARG, NO_MEMORY. */
PAGED_API paged_status paged_redis_store_create(const paged_redis_store_config *config, paged_store *out,
                                                paged_notes *notes /* may be NULL */, paged_error *err);

#ifdef __cplusplus
}
#endif
#endif
