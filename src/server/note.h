/* server/note.h: a conversation as a note (paged/store.h), as `paged serve` and `paged chat` keep it.
 *
 *   {"paged": 1, "id", "created_at", "updated_at", "title", "pinned", "expires_at", "cache_salt",
 *    "n_messages", "messages", …}
 *
 * What a list shows stands before the messages, so that a list reads the beginning of a note and no more.
 * A note is no more believed than a client is.
 */
#ifndef PAGED_SERVER_NOTE_H
#define PAGED_SERVER_NOTE_H

#include <jansson.h>

#include "paged/store.h"

/* A new one of these messages, which are taken; salt may be a JSON null. NULL: no memory. */
json_t *paged__note_create(const char *id, json_t *salt, json_t *messages);

/* A list of objects with role and content. */
bool paged__note_are_messages(const json_t *list);

/* NULL: *status and err say why; FORMAT if it is no conversation. */
json_t *paged__note_read(const paged_notes *notes, const char *id, paged_status *status, paged_error *err);

/* What a list shows, "n_messages" in any case. NULL: there is none, or it is no conversation. */
json_t *paged__note_outline(const paged_notes *notes, const char *id);

paged_status paged__note_write(const paged_notes *notes, json_t *note, int64_t until, paged_error *err);

#endif
