/* server/conversation.h: /v1/conversations: messages that the server keeps, so that a client sends only the
 * new one. They are notes (paged/store.h): in a file or on Redis, where several servers find them, or in the
 * memory of this process, with which they end. */
#ifndef PAGED_SERVER_CONVERSATION_H
#define PAGED_SERVER_CONVERSATION_H

#include "server/server.h"

/* What methods a path takes, if there is a conversation of that name; NULL: there is no such path. id: of the
 * path, "" for the collection; action: what follows it, "" for nothing. */
const char *paged__conversation_methods(const char *id, const char *action);

/* The method is one of them, if there are any. */
void paged__conversation_route(paged__conn *conn, const char *id, const char *action);

/* When the model is there: takes back what stores keep for conversations that are no more, or not pinned. */
void paged__conversation_mend(paged__server *server);

#endif
