/* store/store.h: inside tools of this room: a record as bytes, the same in every place that keeps records.
 *
 *   front   head (256 bytes: magic, version, checksums, key, parent, fingerprint, counts), then the tokens
 *           [block_size] int32, zeros behind n_tokens; padded with zeros to 64 bytes
 *   bytes   of each group that is there, in ascending order, block_bytes[g] each
 *
 * The head has a checksum of each group's bytes and one of the front, so that a part can be read and believed
 * without the others. All numbers are little-endian, as this library's machines are. May include what
 * tools/tidy says, SQLite and hiredis.
 */
#ifndef PAGED_STORE_STORE_H
#define PAGED_STORE_STORE_H

#include <sys/uio.h>

#include "base/base.h"
#include "paged/store.h"

enum { PAGED__RECORD_HEAD = 256, PAGED__RECORD_PARTS = 1 + PAGED_GROUPS_MAX, PAGED__FINGERPRINT_MAX = 4096 };

/* A copy of a store's shape. */
typedef struct paged__shape {
    paged_store_shape is; /* is.fingerprint is owned */
    uint8_t id[16];       /* XXH3-128 over all of it */
    size_t front_bytes;
} paged__shape;

/* Errors: INVALID_ARG, NO_MEMORY. */
paged_status paged__shape_copy(paged__shape *out, const paged_store_shape *shape, paged_error *err);
void paged__shape_free(paged__shape *shape); /* a zeroed one is fine */

bool paged__key_equal(const paged_key *a, const paged_key *b);

/* Bytes of the groups that are there. */
size_t paged__record_payload(const paged__shape *shape, uint32_t groups);

/* Whether counts and groups are what a record of this shape may have. */
bool paged__record_possible(const paged__shape *shape, const paged_record *record);

/* Writes the front of a record: front [front_bytes]. */
void paged__record_seal(const paged__shape *shape, const paged_record *record, uint8_t *front);

/* Writes all of a record, front and groups, to one place: to [front_bytes + its payload], whose size it
 * returns. */
size_t paged__record_pack(const paged__shape *shape, const paged_record *record, uint8_t *to);

/* The record's bytes in order: the front, then each group of `groups`. Returns how many parts. */
int paged__record_parts(const paged__shape *shape, const paged_record *record, uint32_t groups,
                        uint8_t *front, struct iovec parts[PAGED__RECORD_PARTS]);

/* The key that a front says it has; not to be believed before it was opened. */
paged_key paged__record_key(const uint8_t *front);

/* The front of the record that has this key, as it was found: fills parent, first, n_tokens, tokens and
 * groups. False: it is damaged, foreign or another one's, and the record is as it was. */
bool paged__record_open(const paged__shape *shape, const uint8_t *front, paged_record *record);

/* Whether the bytes of a group are those that the front was sealed over. */
bool paged__record_group_right(const paged__shape *shape, const uint8_t *front, int32_t group,
                               const void *bytes);

/* ---- copy.c ---- */

/* Copies n bytes, and gives XXH3-64 over them. */
uint64_t paged__copy_summed(void *to, const void *from, size_t n);

/* ---- notes.c: what all places that keep notes have in common ---- */

enum { PAGED__NOTE_MAX = 16 << 20 };

/* PAGED_OK, or INVALID_ARG with what is wrong with the name or the size. */
paged_status paged__note_check(const char *name, size_t size_bytes, paged_error *err);

/* A copy for a caller, who frees it with free(); a 0 that the size does not count follows. data NULL: room
 * for one. NULL: no memory. */
void *paged__note_copy(const void *data, size_t size_bytes);

#endif
