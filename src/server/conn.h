/* server/conn.h: one client's connection: bytes in, a request at a time, an answer out.
 *
 *   READING ──request──> ANSWERING ──answer──> READING …   (keep-alive; pipelined ones in order)
 *      │                     │
 *      └──refused, close─────┴──> CLOSING ──flushed──> LINGERING ──the client has closed, or time──> gone
 *
 * Bounds: the head and the body of a request (http.h) and their time; input that comes while an answer is
 * under way (INPUT_MAX, then the socket is left alone); output that is not taken (OUTPUT_HIGH: who makes a
 * stream stops until on_room, and a client that takes nothing for write_timeout is cut off).
 *
 * A connection belongs to the server and is freed by its own events only, never inside a function that
 * answers: an answer may be ended anywhere. Whoever answers later sets `work` and on_gone before
 * returning from the route; on_gone is called once if the client goes first, and the connection must not
 * be touched after it.
 */
#ifndef PAGED_SERVER_CONN_H
#define PAGED_SERVER_CONN_H

#include <event2/bufferevent.h>
#include <event2/event.h>

#include "server/http.h"

typedef struct paged__server paged__server;
typedef struct paged__conn paged__conn;

typedef enum paged__conn_state {
    PAGED__CONN_READING = 0,
    PAGED__CONN_ANSWERING,
    PAGED__CONN_CLOSING,
    PAGED__CONN_LINGERING
} paged__conn_state;

struct paged__conn {
    paged__server *server;
    paged__conn *prev, *next;
    struct bufferevent *bev;
    struct event *timer; /* of the state */
    paged__conn_state state;
    paged__http http;
    char peer[64];
    bool in_input; /* serve_input is at work: what it calls must not call it again */
    bool sent_continue;
    int fd;       /* of bev */
    bool is_slow; /* the socket was full: libevent writes when it is not (EV_WRITE) */
    bool is_unflushed;
    paged__conn *next_unflushed;
    paged__buffer out; /* of a stream, behind an output that is empty: goes to the socket without libevent */
    bool has_spoken;   /* as a stream, since the timer was set */

    /* the request at hand */
    char request_id[64];
    uint64_t start_ns;
    int status;
    uint64_t n_sent;
    bool is_stream, is_chunked, head_only;
    bool is_endless;                          /* a stream that has no end of its own */
    const char *allow;                        /* of a 405: the methods, divided by blanks */
    int32_t prompt_tokens, completion_tokens; /* for the log; -1: none */

    void *work;                         /* of whoever answers later */
    void (*on_room)(paged__conn *conn); /* a stream's output has been taken */
    void (*on_gone)(paged__conn *conn);
    void (*on_tick)(paged__conn *conn); /* a stream had nothing to say for a while */
};

/* Takes the socket. */
void paged__conn_open(paged__server *server, int fd, const char *peer);
void paged__conn_free(paged__conn *conn); /* with on_gone if an answer is under way */

/* Writes what was put into outputs; the server's flush_event calls it, and whoever reads news. */
void paged__conn_flush_all(paged__server *server);

/* An idle or an endless one is freed, the others end with their answer. */
void paged__conn_drain(paged__conn *conn);

/* ---- a whole answer ---- */

/* headers: NULL, or lines that each end in CRLF. */
void paged__reply(paged__conn *conn, int status, const char *type, const char *headers, const void *data,
                  size_t size_bytes);
/* Takes the reference; NULL: no memory. */
void paged__reply_json(paged__conn *conn, int status, json_t *value);
/* An error object of the OpenAI API. param and code may be NULL; its type follows from the status. */
void paged__reply_error(paged__conn *conn, int status, const char *param, const char *code, const char *fmt,
                        ...) __attribute__((format(printf, 5, 6)));

/* ---- a stream ---- */

void paged__stream_begin(paged__conn *conn, const char *type);
void paged__stream_write(paged__conn *conn, const char *data, size_t size_bytes);
void paged__stream_end(paged__conn *conn);
/* The client has as much as it should have; on_room will come. */
bool paged__stream_is_full(const paged__conn *conn);

/* "Allow: OPTIONS, HEAD, GET, POST" and CRLF of "GET POST", in out [capacity]. */
const char *paged__allow_header(const char *methods, char *out, size_t capacity);

/* The type that goes with a status in error objects: "invalid_request_error" … */
const char *paged__error_type(int status);

#endif
