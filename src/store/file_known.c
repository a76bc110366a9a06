/* file_known.c: which keys the index may have, in memory: a table of parts of their hashes. A key that is not
 * in it is not in the index. SQLite would say so, too, but what it runs for that has left the caches by the
 * next time. What went from the index stays until the table is made anew. */
#include "store/file.h"

enum { ROOM_MIN = 1024 };

static uint64_t hash_of(const paged_key *key) {
    uint64_t halves[2];
    memcpy(halves, key->bytes, sizeof halves);
    return paged__mix(halves[0] ^ paged__mix(halves[1]));
}

bool paged__known_make(paged__known *known, int64_t n) {
    uint64_t n_room = ROOM_MIN;
    while (n_room < 2 * (uint64_t)n) n_room *= 2;
    paged__known_free(known);
    known->at = paged__calloc(n_room, sizeof *known->at);
    if (known->at) known->n_room = n_room;
    return known->at != NULL;
}

void paged__known_free(paged__known *known) {
    paged__free(known->at);
    *known = (paged__known){0};
}

bool paged__known_add(paged__known *known, const paged_key *key, uint32_t row) {
    const uint64_t hash = hash_of(key), mask = known->n_room - 1;
    if (known->n >= known->n_room / 4 * 3) return false;
    const uint64_t value = hash >> 32 << 32 | ((uint64_t)row + 1);
    uint64_t at = hash & mask;
    /* The same may come any number of times: a parent has many tails. */
    while (known->at[at] && known->at[at] != value) at = (at + 1) & mask;
    known->n += known->at[at] == 0;
    known->at[at] = value;
    return true;
}

bool paged__known_next(const paged__known *known, const paged_key *key, uint64_t *n_seen, uint32_t *row) {
    const uint64_t hash = hash_of(key), mask = known->n_room - 1;
    for (; known->n_room; ++*n_seen) {
        const uint64_t found = known->at[(hash + *n_seen) & mask];
        if (!found) break;
        if (found >> 32 != hash >> 32) continue;
        *row = (uint32_t)found - 1;
        ++*n_seen;
        return true;
    }
    return false;
}

void paged__known_merged(paged__known *known) {
    for (uint64_t i = 0; i < known->n_room; i++)
        if (known->at[i]) known->at[i] = known->at[i] >> 32 << 32 | 1;
}
