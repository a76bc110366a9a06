/* server/slots.h: what llama.cpp calls slots: places among those that run at once, each of which remembers
 * the text that ran there last, so that it can be saved to a file and restored by hand. */
#ifndef PAGED_SERVER_SLOTS_H
#define PAGED_SERVER_SLOTS_H

#include "server/server.h"

typedef struct paged__slots paged__slots;

/* Files lie in a directory, which is opened here, and rid of what a server that was killed left half written.
 * Errors: IO, NO_MEMORY. */
paged_status paged__slots_create(paged__server *server, const char *dir, paged__slots **out,
                                 paged_error *err);
/* NULL is fine. A file that is being written is left to its thread, which ends with the process. */
void paged__slots_free(paged__slots *slots, paged__server *server);

/* A file is being written. NULL: false. */
bool paged__slots_is_saving(const paged__slots *slots);

/* A request is about to run in slot `wanted` if that is free, else in the one that knows most of it; -1 in
 * return: there is none free, or nobody wants to know (server->slots is NULL). */
int32_t paged__slots_begin(paged__server *server, const paged_request *request, int32_t wanted);
void paged__slots_take(paged__server *server, int32_t slot, const paged_output *out);
void paged__slots_end(paged__server *server, int32_t slot);

/* POST /slots/{id}?action=save|restore|erase */
void paged__slot_action(paged__conn *conn, const char *rest);

#endif
