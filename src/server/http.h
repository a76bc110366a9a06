/* server/http.h: HTTP/1.1 requests out of bytes. It knows no sockets, no clock and no routes; conn.c
 * feeds it.
 *
 * Strict where the RFCs (9110, 9112) let a server be: CRLF only, no folded headers, one Host, one meaning of
 * the length of a body. Whatever the bytes and however they are cut: the same request, or the same refusal,
 * with the status to answer. Bounds: PAGED__HEAD_MAX for the head, the caller's for the body.
 */
#ifndef PAGED_SERVER_HTTP_H
#define PAGED_SERVER_HTTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/text.h"

enum {
    PAGED__HEAD_MAX = 16384, /* bytes of request line and headers; of trailers and chunk sizes as well */
    PAGED__HEADERS_MAX = 100
};

typedef enum paged__http_state {
    PAGED__HTTP_HEAD = 0, /* a zeroed request waits for its first byte */
    PAGED__HTTP_BODY,
    PAGED__HTTP_CHUNK_SIZE,
    PAGED__HTTP_CHUNK_DATA,
    PAGED__HTTP_CHUNK_END,
    PAGED__HTTP_TRAILER,
    PAGED__HTTP_DONE,
    PAGED__HTTP_FAILED /* status and error say why; nothing more can be read from this connection */
} paged__http_state;

typedef struct paged__http {
    paged__http_state state;
    size_t body_max;

    paged__buffer head; /* the bytes so far; cut into strings when it is complete */
    int32_t n_headers;
    struct {
        const char *name, *value; /* into head; value without blanks around it */
    } headers[PAGED__HEADERS_MAX];
    const char *method, *query; /* into head; query "" if there is none */
    char *path;                 /* into head; percent-decoded */
    bool keep_alive, is_1_0, expects_continue;

    paged__buffer body;
    size_t n_left; /* bytes of the body, or of its chunk, that are to come */
    bool chunked;
    char line[32]; /* of a chunk's size */
    size_t n_line, n_overhead;

    int status; /* of FAILED */
    const char *error;
} paged__http;

/* Takes bytes up to the end of the request and returns how many. state tells the rest. */
size_t paged__http_feed(paged__http *http, const char *data, size_t n);

/* Frees and zeroes all but body_max. */
void paged__http_reset(paged__http *http);

/* The first header of that name, in any case of letters; NULL: none. */
const char *paged__http_header(const paged__http *http, const char *name);

/* The value of name in the query, decoded into out [capacity, at least 2]; "?" if it is too long or cannot be
 * decoded, so that whoever looks at it finds no number and no name. False: there is none. */
bool paged__http_query(const paged__http *http, const char *name, char *out, size_t capacity);

#endif
