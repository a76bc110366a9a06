/* server/route.h: what every route shares. A handler answers its connection before it returns, or leaves work
 * (conn.h). */
#ifndef PAGED_SERVER_ROUTE_H
#define PAGED_SERVER_ROUTE_H

#include "server/server.h"

/* The body as a JSON object, owned by the caller; NULL: it is none, and that has been answered. */
json_t *paged__body_json(paged__conn *conn);

/* What a paged_error is over HTTP. */
void paged__reply_status(paged__conn *conn, const paged_error *err, const char *param);

/* Those of src/server/static/. */
extern const paged__file paged__files[]; /* ends with a path of NULL */

/* ---- facts.c ---- */

void paged__health(paged__conn *conn);
void paged__version_route(paged__conn *conn);
void paged__models(paged__conn *conn, const char *id); /* id "": the list */
void paged__tokenize_route(paged__conn *conn);
void paged__detokenize_route(paged__conn *conn);
void paged__apply_template(paged__conn *conn);
void paged__check_route(paged__conn *conn);

#endif
