/* server/generate.h: requests that run. A generation is one HTTP request; it has an answer
 * (paged__running) for each prompt and choice, and it goes when its client does or when the last answer
 * has ended. */
#ifndef PAGED_SERVER_GENERATE_H
#define PAGED_SERVER_GENERATE_H

#include "server/server.h"

/* For who wants to know how it ended: one of the two is called, once, before the client is told the end. */
typedef struct paged__ending {
    void (*done)(paged__server *server, void *user, const char *text, size_t len); /* of the first answer */
    void (*gone)(paged__server *server, void *user);                               /* refused, failed, left */
    void *user;
} paged__ending;

/* Answers conn with a generation of the body, which is taken. ending: copied; NULL: nobody wants to know. */
void paged__generate(paged__conn *conn, json_t *body, bool is_chat, const paged__ending *ending);

/* The engine has news. */
void paged__generate_news(paged__server *server);

#endif
