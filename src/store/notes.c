/* notes.c: what all places that keep notes have in common: which names there are, and copies for callers. */
#include <stdlib.h>

#include "store/store.h"

paged_status paged__note_check(const char *name, size_t size_bytes, paged_error *err) {
    if (!paged__is_name(name))
        return paged__fail(err, PAGED_ERR_INVALID_ARG,
                           "a name has 1 to %d of 0-9 A-Z a-z . _ - and does not begin with a dot",
                           PAGED__LABEL_MAX);
    if (size_bytes > PAGED__NOTE_MAX)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "%zu bytes; the limit is %d", size_bytes,
                           PAGED__NOTE_MAX);
    return PAGED_OK;
}

void *paged__note_copy(const void *data, size_t size_bytes) {
    char *copy = malloc(size_bytes + 1);
    if (!copy) return NULL;
    if (size_bytes && data) memcpy(copy, data, size_bytes);
    copy[size_bytes] = 0;
    return copy;
}
