/* store/copy.h: bytes copied and summed piece by piece, so that each is read from memory once: a piece is
 * still in L1 when it is summed. The sum is of what was copied, which nobody may change meanwhile. XXH3-64 is
 * xxHash's own; whoever includes this compiles it for its instruction set.
 */
#ifndef PAGED_STORE_COPY_H
#define PAGED_STORE_COPY_H

#include "mem/hash.h"
#include "store/store.h"

static inline uint64_t paged__copy_pieces(void *to, const void *from, size_t n) {
    enum { PIECE = 8192 }; /* of 4, 8 and 16 KiB the fastest */
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    for (size_t at = 0; at < n; at += PIECE) {
        const size_t piece = PAGED_MIN(n - at, (size_t)PIECE);
        memcpy((uint8_t *)to + at, (const uint8_t *)from + at, piece);
        XXH3_64bits_update(&state, (const uint8_t *)to + at, piece);
    }
    return XXH3_64bits_digest(&state);
}

#if defined(__x86_64__)
uint64_t paged__copy_summed_avx2(void *to, const void *from, size_t n);
#endif

#endif
