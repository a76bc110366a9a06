/* server/generate.h: requests that run. A generation is one HTTP request; it has an answer
 * (paged__running) for each prompt and choice, and it goes when its client does or when the last answer
 * has ended. */
#ifndef PAGED_SERVER_GENERATE_H
#define PAGED_SERVER_GENERATE_H

#include "server/server.h"

typedef struct generation paged__generation;

/* For who wants to know how it ended: done or gone is called, once, before the client is told the end. */
typedef struct paged__ending {
    /* With the text of the first answer. True: the client is told later, by paged__generation_end; if it goes
     * before that, gone is called too, and the generation is no more. */
    bool (*done)(paged__server *server, void *user, const char *text, size_t len,
                 paged__generation *generation);
    void (*gone)(paged__server *server, void *user); /* refused, failed, left */
    /* What the prompt begins with, as tokens, if that is so (paged__openai_splice); borrowed until
     * paged__generate returns. */
    const int32_t *known;
    int32_t n_known;
    void *user;
} paged__ending;

/* Answers conn with a generation of the body, which is taken. ending: copied; NULL: nobody wants to know. */
void paged__generate(paged__conn *conn, json_t *body, bool is_chat, const paged__ending *ending);

/* The tokens of the prompt and of the first answer; borrowed from a generation that is done. */
void paged__generation_tokens(const paged__generation *generation, const int32_t **prompt, int32_t *n_prompt,
                              const int32_t **answer, int32_t *n_answer);

/* Tells the client the end that done() held back; err: that it is a bad one, NULL for a good one. */
void paged__generation_end(paged__generation *generation, const paged_error *err);

/* The engine has news. */
void paged__generate_news(paged__server *server);

#endif
