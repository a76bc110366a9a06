/* store/redis_link.h: several Redis servers on the other end of a line, none of which is believed.
 *
 * A call has one deadline, whatever it asks of however many servers: sockets do not block, and all waiting is
 * in one place that knows the time. A server that refuses, breaks the protocol or lets half of a call's time
 * pass is closed and left alone for retry_ms; until then its share belongs to the next one in the ranking of
 * each key. hiredis makes the sockets, writes commands and parses replies; reading, sending and the limits of
 * both are here.
 *
 *     paged__redis_start(l, ms);                       a call begins, and with it the time
 *     s = paged__redis_at(l, hash)                     the server of a key, connected; NULL: none is up
 *     paged__redis_ask(l, s, "GET %s", key)            any number of commands …
 *     reply = paged__redis_reply(l, s, limit)          … then as many replies, in order
 *
 * Thread rule: one thread at a time; the counters may be read beside it.
 */
#ifndef PAGED_STORE_REDIS_LINK_H
#define PAGED_STORE_REDIS_LINK_H

#include <hiredis.h>
#include <stdatomic.h>

#include "base/base.h"
#include "paged/redis_store.h"

enum { PAGED__REDIS_SERVERS_MAX = 64, PAGED__REDIS_PREFIX_MAX = 64 };

typedef struct paged__redis_server paged__redis_server;

typedef struct paged__redis_link {
    paged__redis_server *servers;
    int32_t n_servers;
    char *user, *password; /* owned; wiped before they are freed */
    char prefix[PAGED__REDIS_PREFIX_MAX + 1];
    int32_t timeout_ms, retry_ms, ttl_s; /* ttl_s 0: for ever */
    size_t part_bytes;
    uint64_t n_calls, started_ns, deadline_ns; /* of the call under way */
    char reason[288];                          /* why the last failure was one */
    _Atomic bool up;
    _Atomic uint64_t n_failures, read_bytes, written_bytes;
} paged__redis_link;

/* Reads the config into *link. Errors: INVALID_ARG, NO_MEMORY; then there is nothing to free. */
paged_status paged__redis_link_init(paged__redis_link *link, const paged_redis_store_config *config,
                                    paged_error *err);
void paged__redis_link_free(paged__redis_link *link);

void paged__redis_start(paged__redis_link *link, int32_t timeout_ms);

/* The server of highest rank for `hash` that is up. NULL: none is. */
paged__redis_server *paged__redis_at(paged__redis_link *link, uint64_t hash);

/* The server of highest rank whether it is up or not, connected; NULL: it is not up. */
paged__redis_server *paged__redis_home(paged__redis_link *link, uint64_t hash);

/* The i-th server, connected; NULL: it is not up. */
paged__redis_server *paged__redis_nth(paged__redis_link *link, int32_t i);

/* A command in hiredis's words (%s, %b with a size_t, %d, %llu; no %zu). False: the server is gone. */
bool paged__redis_ask(paged__redis_link *link, paged__redis_server *server, const char *format, ...);

/* The next reply, to be freed by freeReplyObject; of at most limit bytes, or it is none. NULL: the server is
 * gone, as after anything that is no reply. A reply of type ERROR that says that the server does not serve
 * us now (loading, no rights, read-only …) counts as gone too; others are the caller's to judge. */
redisReply *paged__redis_reply(paged__redis_link *link, paged__redis_server *server, size_t limit);

/* What a reply says that is not what was asked for; never the password. As long as the reply. */
const char *paged__redis_text(const paged__redis_link *link, const redisReply *reply);

/* Whether an error reply says that memory is full. */
bool paged__redis_is_full(const redisReply *reply);

#endif
