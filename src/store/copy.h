/* store/copy.h: bytes copied and summed piece by piece, so that each is read from memory once: a piece is
 * still in L1 when it is summed. The sum is of what was copied, which nobody may change meanwhile. XXH3-64 is
 * xxHash's own; whoever includes this compiles it for its instruction set.
 *
 * Where it can, the copy goes past the caches: the next to read it is the disk, so there it would only be in
 * the way of what the engine has there, and each of its lines would be read before it is written.
 */
#ifndef PAGED_STORE_COPY_H
#define PAGED_STORE_COPY_H

#include "mem/hash.h"
#include "store/store.h"

#if defined(__AVX2__)
#include <immintrin.h>

/* Two lines at a time. Ends with the fence that makes them plain stores to everybody else. */
static inline void copy_piece(uint8_t *to, const uint8_t *from, size_t n) {
    enum { VECTOR = sizeof(__m256i), AT_ONCE = 4 * VECTOR };
    size_t at = 0;
    for (; (uintptr_t)to % VECTOR == 0 && at + AT_ONCE <= n; at += AT_ONCE)
        for (size_t i = at; i < at + AT_ONCE; i += VECTOR)
            _mm256_stream_si256((void *)(to + i), _mm256_loadu_si256((const void *)(from + i)));
    memcpy(to + at, from + at, n - at);
    _mm_sfence();
}
#else
static inline void copy_piece(uint8_t *to, const uint8_t *from, size_t n) {
    memcpy(to, from, n);
}
#endif

static inline uint64_t paged__copy_pieces(void *to, const void *from, size_t n) {
    enum { PIECE = 8192 }; /* of 4, 8 and 16 KiB the fastest */
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    for (size_t at = 0; at < n; at += PIECE) {
        const size_t piece = PAGED_MIN(n - at, (size_t)PIECE);
        copy_piece((uint8_t *)to + at, (const uint8_t *)from + at, piece);
        XXH3_64bits_update(&state, (const uint8_t *)from + at, piece);
    }
    return XXH3_64bits_digest(&state);
}

#if defined(__x86_64__)
uint64_t paged__copy_summed_avx2(void *to, const void *from, size_t n);
#endif

#endif
