/* record.c: a record as bytes, and what is checked before it is believed. */
#include "mem/hash.h"
#include "store/store.h"

static const char magic[8] = "PAGEDREC";
enum { RECORD_VERSION = 1 };

typedef struct head {
    char magic[8];
    uint32_t version, front_bytes;
    uint64_t sum; /* XXH3-64 over the front, this field being 0 */
    paged_key key, parent;
    uint8_t shape[16];
    int32_t first, n_tokens, block_size;
    uint32_t groups;
    uint64_t sums[PAGED_GROUPS_MAX]; /* XXH3-64 over a group's bytes; 0 where it is not there */
    uint8_t zeros[PAGED__RECORD_HEAD - 88 - 8 * PAGED_GROUPS_MAX];
} head;
_Static_assert(sizeof(head) == PAGED__RECORD_HEAD, "the head is what the format says");

static size_t align64(size_t n) {
    return (n + 63) / 64 * 64;
}

paged_status paged__shape_copy(paged__shape *out, const paged_store_shape *shape, paged_error *err) {
    if (!shape || !shape->fingerprint || shape->fingerprint_bytes == 0 ||
        shape->fingerprint_bytes > PAGED__FINGERPRINT_MAX)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "fingerprint of %zu bytes, not 1 to %d",
                           shape ? shape->fingerprint_bytes : 0, PAGED__FINGERPRINT_MAX);
    if (shape->block_size < 1 || shape->block_size > 1 << 20)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "block of %d tokens", shape->block_size);
    if (shape->n_groups < 1 || shape->n_groups > PAGED_GROUPS_MAX)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "%d groups, not 1 to %d", shape->n_groups,
                           PAGED_GROUPS_MAX);
    for (int32_t g = 0; g < shape->n_groups; g++)
        if (shape->block_bytes[g] == 0 || shape->block_bytes[g] > (size_t)1 << 32)
            return paged__fail(err, PAGED_ERR_INVALID_ARG, "group %d: block of %zu bytes", g,
                               shape->block_bytes[g]);
    paged__shape copy = {.is = *shape};
    uint8_t *fingerprint = paged__alloc(shape->fingerprint_bytes, 1);
    if (!fingerprint)
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "fingerprint of %zu bytes", shape->fingerprint_bytes);
    memcpy(fingerprint, shape->fingerprint, shape->fingerprint_bytes);
    copy.is.fingerprint = fingerprint;
    for (int32_t g = shape->n_groups; g < PAGED_GROUPS_MAX; g++) copy.is.block_bytes[g] = 0;
    copy.front_bytes = align64(PAGED__RECORD_HEAD + (size_t)shape->block_size * sizeof(int32_t));

    XXH3_state_t state;
    XXH3_128bits_reset(&state);
    XXH3_128bits_update(&state, fingerprint, shape->fingerprint_bytes);
    XXH3_128bits_update(&state, &copy.is.block_size, sizeof copy.is.block_size);
    XXH3_128bits_update(&state, &copy.is.n_groups, sizeof copy.is.n_groups);
    for (int32_t g = 0; g < PAGED_GROUPS_MAX; g++) {
        uint64_t bytes = copy.is.block_bytes[g];
        XXH3_128bits_update(&state, &bytes, sizeof bytes);
    }
    XXH128_hash_t hash = XXH3_128bits_digest(&state);
    memcpy(copy.id, &hash.low64, 8);
    memcpy(copy.id + 8, &hash.high64, 8);
    *out = copy;
    return PAGED_OK;
}

void paged__shape_free(paged__shape *shape) {
    /* What paged__shape_copy took, which was not const. */
    paged__free((void *)(uintptr_t)shape->is.fingerprint);
    *shape = (paged__shape){0};
}

bool paged__key_equal(const paged_key *a, const paged_key *b) {
    return memcmp(a, b, sizeof *a) == 0;
}

size_t paged__record_payload(const paged__shape *shape, uint32_t groups) {
    size_t n = 0;
    for (int32_t g = 0; g < shape->is.n_groups; g++)
        if (groups >> g & 1) n += shape->is.block_bytes[g];
    return n;
}

bool paged__record_possible(const paged__shape *shape, const paged_record *record) {
    static const paged_key none;
    return !paged__key_equal(&record->key, &none) && record->first >= 0 && record->n_tokens >= 1 &&
           record->n_tokens <= shape->is.block_size && record->groups != 0 &&
           record->groups >> shape->is.n_groups == 0;
}

static uint64_t front_sum(const uint8_t *front, size_t front_bytes) {
    static const uint64_t zero;
    const size_t at = offsetof(head, sum);
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    XXH3_64bits_update(&state, front, at);
    XXH3_64bits_update(&state, &zero, sizeof zero);
    XXH3_64bits_update(&state, front + at + sizeof zero, front_bytes - at - sizeof zero);
    return XXH3_64bits_digest(&state);
}

static void seal(const paged__shape *shape, const paged_record *record, const uint64_t sums[PAGED_GROUPS_MAX],
                 uint8_t *front) {
    head h = {.version = RECORD_VERSION,
              .front_bytes = (uint32_t)shape->front_bytes,
              .key = record->key,
              .parent = record->parent,
              .first = record->first,
              .n_tokens = record->n_tokens,
              .block_size = shape->is.block_size,
              .groups = record->groups};
    PAGED_ASSERT(paged__record_possible(shape, record));
    memcpy(h.magic, magic, sizeof magic);
    memcpy(h.shape, shape->id, sizeof h.shape);
    memcpy(h.sums, sums, sizeof h.sums);
    memset(front, 0, shape->front_bytes);
    memcpy(front, &h, sizeof h);
    memcpy(front + sizeof h, record->tokens, (size_t)record->n_tokens * sizeof(int32_t));
    h.sum = front_sum(front, shape->front_bytes);
    memcpy(front, &h, sizeof h);
}

void paged__record_seal(const paged__shape *shape, const paged_record *record, uint8_t *front) {
    uint64_t sums[PAGED_GROUPS_MAX] = {0};
    for (int32_t g = 0; g < shape->is.n_groups; g++)
        if (record->groups >> g & 1) sums[g] = XXH3_64bits(record->bytes[g], shape->is.block_bytes[g]);
    seal(shape, record, sums, front);
}

size_t paged__record_pack(const paged__shape *shape, const paged_record *record, uint8_t *to) {
    uint64_t sums[PAGED_GROUPS_MAX] = {0};
    size_t at = shape->front_bytes;
    for (int32_t g = 0; g < shape->is.n_groups; g++) {
        if (!(record->groups >> g & 1)) continue;
        sums[g] = paged__copy_summed(to + at, record->bytes[g], shape->is.block_bytes[g]);
        at += shape->is.block_bytes[g];
    }
    seal(shape, record, sums, to);
    return at;
}

int paged__record_parts(const paged__shape *shape, const paged_record *record, uint32_t groups,
                        uint8_t *front, struct iovec parts[PAGED__RECORD_PARTS]) {
    int n = 0;
    parts[n++] = (struct iovec){front, shape->front_bytes};
    for (int32_t g = 0; g < shape->is.n_groups; g++)
        if (groups >> g & 1) parts[n++] = (struct iovec){record->bytes[g], shape->is.block_bytes[g]};
    return n;
}

paged_key paged__record_key(const uint8_t *front) {
    paged_key key;
    memcpy(&key, front + offsetof(head, key), sizeof key);
    return key;
}

bool paged__record_open(const paged__shape *shape, const uint8_t *front, paged_record *record) {
    head h;
    memcpy(&h, front, sizeof h);
    if (memcmp(h.magic, magic, sizeof magic) != 0 || h.version != RECORD_VERSION ||
        h.front_bytes != shape->front_bytes || h.sum != front_sum(front, shape->front_bytes))
        return false;
    paged_record found = *record;
    found.parent = h.parent;
    found.first = h.first;
    found.n_tokens = h.n_tokens;
    found.groups = h.groups;
    if (memcmp(h.shape, shape->id, sizeof h.shape) != 0 || h.block_size != shape->is.block_size ||
        !paged__key_equal(&h.key, &record->key) || !paged__record_possible(shape, &found))
        return false;
    *record = found;
    memset(record->tokens, 0, (size_t)shape->is.block_size * sizeof(int32_t));
    memcpy(record->tokens, front + sizeof h, (size_t)h.n_tokens * sizeof(int32_t));
    return true;
}

bool paged__record_group_right(const paged__shape *shape, const uint8_t *front, int32_t group,
                               const void *bytes) {
    head h;
    memcpy(&h, front, sizeof h);
    return h.sums[group] == XXH3_64bits(bytes, shape->is.block_bytes[group]);
}
