/* engine/stop.h: stop strings in a stream of bytes that comes piece by piece.
 *
 *   pushed bytes     … a b c | d e f          the answer's text, as the detokeniser gives it
 *   safe             ────────┘                may be shown: no stop string begins before here
 *   found            -1, or where the first one that is complete begins
 *
 * A stop string is found when its last byte comes, wherever pieces are cut; of several that end at the same
 * byte the one that begins first counts. Nothing after it is looked at. No allocation.
 */
#ifndef PAGED_ENGINE_STOP_H
#define PAGED_ENGINE_STOP_H

#include "base/base.h"

enum { PAGED__STOP_STRINGS_MAX = 16, PAGED__STOP_BYTES_MAX = 256 };

typedef struct paged__stop {
    int32_t n;
    int32_t lens[PAGED__STOP_STRINGS_MAX];                        /* bytes */
    char strings[PAGED__STOP_STRINGS_MAX][PAGED__STOP_BYTES_MAX]; /* without final 0 */
    char window[PAGED__STOP_BYTES_MAX];                           /* ring: the last bytes that came */
    int64_t n_pushed, safe, found;
    int32_t which; /* string that was found */
} paged__stop;

/* Errors: INVALID_ARG naming the string (too many, empty, too long). */
paged_status paged__stop_init(paged__stop *stop, const char *const *strings, int32_t n, paged_error *err);

/* False as soon as a stop string is complete. While `armed` is false none counts, but one may begin. */
bool paged__stop_push(paged__stop *stop, const char *bytes, size_t n_bytes, bool armed);

/* No more bytes: what was held back is safe, unless a stop string was found. */
void paged__stop_finish(paged__stop *stop);

#endif
