/* server/server.h: the HTTP server over an engine (paged/service.h): one thread with an event loop, which
 * never waits for a client, and for a step half a second at most: for facts about memory, which are told
 * between two steps (paged__server_look).
 *
 *   http.c      bytes -> requests                 openai.c        JSON -> paged_request, answers -> JSON
 *   conn.c      connections, limits, streams      generate.c      requests that run
 *   route.c     who answers what, keys, CORS      conversation.c  /v1/conversations
 *   server.c    listening, signals, draining      facts.c         models, tokens, health
 *   metrics.c   counters and histograms           blocks.c        /paged/blocks, /paged/events, /slots
 *   keeper.c    threads that may block            memory_notes.c  conversations of a server without a store
 *
 * Everything here belongs to the thread of paged__server_run, but paged__server_open.
 */
#ifndef PAGED_SERVER_SERVER_H
#define PAGED_SERVER_SERVER_H

#include <sched.h>
#include <stdio.h>

#include "paged/service.h"
#include "paged/store.h"
#include "server/conn.h"
#include "server/openai.h"

typedef struct paged__server_config {
    const char *host;
    int32_t port;            /* 0: any */
    const char *api_key;     /* "": none is asked for */
    const char *cors_origin; /* "": no such headers */
    size_t body_max;
    int32_t max_connections;
    int32_t head_timeout_ms, body_timeout_ms, idle_timeout_ms, write_timeout_ms;
    int32_t drain_timeout_ms, stall_ms;
    FILE *access_log;          /* NULL: none */
    const paged_notes *notes;  /* where conversations are kept, the server's from then on; NULL: in memory */
    const char *slot_dir;      /* where slots are saved to; NULL or "": they are not */
    int32_t conversation_days; /* that one lives after its last change; 0: for ever */
    void (*on_ready)(void *user, int32_t port); /* in the loop, when the model is there */
    void *user;
} paged__server_config;

typedef struct paged__metrics paged__metrics;
struct paged__slots;

enum { PAGED__RUNNING_BUCKETS = 1024 };

struct paged__server {
    paged__server_config config;
    struct event_base *base;
    struct evconnlistener *listener;
    struct event *listen_again, *drain_timer, *service_event, *opened_event, *flush_event;
    struct event *signals[2];
    int opened_fds[2]; /* a pipe: paged__server_open tells the loop */
    int32_t port;
    paged__conn *conns;
    int32_t n_conns;
    paged__conn *unflushed, *last_unflushed; /* their output waits for flush_event */
    bool reads_news;                         /* whose end it waits for instead */
    bool draining, failed;
    cpu_set_t cpus;            /* that the loop may use; none: not known */
    uint64_t boot, n_requests; /* for ids */
    int64_t started;           /* seconds since 1970 */

    struct paged__slots *slots; /* NULL: not saved */

    /* NULL until the model is there */
    paged_service *service;
    paged__openai_world world;
    paged_engine_info info;
    paged_model_info model_info;
    const char *path; /* of the model */

    struct paged__running *running[PAGED__RUNNING_BUCKETS]; /* answers, by id; see generate.c */
    int32_t n_running;                                      /* of them, not ended */
    int32_t n_blocked;     /* of these, those whose client has to read first */
    int64_t n_news_tokens; /* of the news at hand */
    uint64_t news_ns;      /* when the engine last told something, or was given something to do */
    uint64_t deaf_ns;      /* when it last let somebody wait for a step's end in vain */
    paged__metrics *metrics;
    struct paged__map *map;       /* of blocks; NULL: nobody has asked; see blocks.c */
    struct paged__keeper *keeper; /* of conversations; see keeper.h */
    struct event *keeper_event;
    struct paged__visit *visits; /* that change a conversation; see conversation.c */
};

/* Listens. Answers 503 until paged__server_open. Errors: INVALID_ARG (host), IO (port taken …), NO_MEMORY;
 * notes are closed then. */
paged_status paged__server_create(const paged__server_config *config, paged__server **out, paged_error *err);

/* Until a SIGTERM or SIGINT has been obeyed; a second one ends at once. False: paged__server_open told of a
 * failure. */
bool paged__server_run(paged__server *server);
/* NULL is fine; not the service. From here on signals do what they did before paged__server_create. */
void paged__server_free(paged__server *server);

typedef struct paged__server_model {
    paged_service *service; /* NULL: it could not be loaded, and the loop ends */
    paged__openai_world world;
    const char *path;
} paged__server_model;

/* From any thread, once: here is what to serve. Borrowed until the server is freed. */
void paged__server_open(paged__server *server, const paged__server_model *model);

/* ---- between the files of this room ---- */

void paged__server_remember(paged__server *server, paged__conn *conn);
void paged__server_forget(paged__server *server, paged__conn *conn);
void paged__server_settle(paged__server *server); /* drains and nothing is left: ends the loop */
void paged__server_log(paged__server *server, const paged__conn *conn); /* an answer has ended */

/* The engine has not moved for config.stall_ms though there is work. */
bool paged__server_is_stalled(const paged__server *server);

/* Calls fn between two steps, as paged_service_call; false: the step at hand lasts too long, and fn was not
 * called. */
bool paged__server_look(paged__server *server, void (*fn)(paged_engine *engine, void *user), void *user);

void paged__reply_stalled(paged__conn *conn); /* 503: paged__server_is_stalled() */
void paged__reply_busy(paged__conn *conn);    /* 503: paged__server_look() could not look */

void paged__route(paged__conn *conn); /* answers the request that conn has read */

#endif
