/* model/vocab.c: the pieces of a vocabulary, and the memory of an encoder.
 *
 * Pieces only ever grow. The map from bytes to id is open addressing with linear probing, at most half full.
 */
#include "model/vocab.h"

static uint64_t hash_bytes(const char *bytes, size_t len) {
    uint64_t h = len, word;
    while (len >= sizeof word) {
        memcpy(&word, bytes, sizeof word);
        h = paged__mix(h ^ word);
        bytes += sizeof word;
        len -= sizeof word;
    }
    word = 0;
    memcpy(&word, bytes, len);
    return paged__mix(h ^ word);
}

/* The slot of these bytes, or the empty one where they would go. */
static uint32_t *find_slot(const paged__pieces *p, const char *bytes, size_t len) {
    for (uint32_t i = (uint32_t)hash_bytes(bytes, len) & p->mask;; i = (i + 1) & p->mask) {
        if (!p->slots[i]) return &p->slots[i];
        size_t have_len;
        const char *have = paged__piece(p, (int32_t)(p->slots[i] - 1), &have_len);
        if (have_len == len && memcmp(have, bytes, len) == 0) return &p->slots[i];
    }
}

paged_status paged__pieces_init(paged__pieces *p) {
    *p = (paged__pieces){.mask = 1023};
    p->slots = paged__calloc(p->mask + 1, sizeof *p->slots);
    return p->slots ? PAGED_OK : PAGED_ERR_NO_MEMORY;
}

void paged__pieces_free(paged__pieces *p) {
    paged__free(p->bytes);
    paged__free(p->ends);
    paged__free(p->slots);
    *p = (paged__pieces){0};
}

static bool grow_bytes(paged__pieces *p, size_t len) {
    size_t cap;
    if (p->n_bytes + len <= p->cap_bytes) return true;
    if (!paged__add(p->n_bytes * 2 + 4096, len, &cap)) return false;
    char *bytes = paged__alloc(cap, 1);
    if (!bytes) return false;
    if (p->n_bytes) memcpy(bytes, p->bytes, p->n_bytes);
    paged__free(p->bytes);
    p->bytes = bytes;
    p->cap_bytes = cap;
    return true;
}

static bool grow_ends(paged__pieces *p) {
    if (p->n < p->cap) return true;
    if (p->cap > INT32_MAX / 4) return false;
    int32_t cap = p->cap * 2 + 256;
    size_t *ends = paged__alloc((size_t)cap, sizeof *ends);
    if (!ends) return false;
    if (p->n) memcpy(ends, p->ends, (size_t)p->n * sizeof *ends);
    paged__free(p->ends);
    p->ends = ends;
    p->cap = cap;
    return true;
}

static bool grow_slots(paged__pieces *p) {
    if (p->n_found < (p->mask + 1) / 2) return true;
    uint32_t *old = p->slots, old_mask = p->mask;
    uint32_t *slots = paged__calloc(2 * ((size_t)old_mask + 1), sizeof *slots);
    if (!slots) return false;
    p->slots = slots;
    p->mask = old_mask * 2 + 1;
    for (size_t i = 0; i <= old_mask; i++) {
        if (!old[i]) continue;
        size_t len;
        const char *bytes = paged__piece(p, (int32_t)(old[i] - 1), &len);
        *find_slot(p, bytes, len) = old[i];
    }
    paged__free(old);
    return true;
}

bool paged__pieces_add(paged__pieces *p, const char *bytes, size_t len, bool findable) {
    if (!grow_bytes(p, len) || !grow_ends(p) || !grow_slots(p)) return false;
    if (len) memcpy(p->bytes + p->n_bytes, bytes, len);
    p->n_bytes += len;
    p->ends[p->n++] = p->n_bytes;
    if (!findable) return true;
    uint32_t *slot = find_slot(p, bytes, len);
    p->n_found += *slot == 0;
    *slot = (uint32_t)p->n;
    p->max_len = PAGED_MAX(p->max_len, len);
    return true;
}

int32_t paged__pieces_find(const paged__pieces *p, const char *bytes, size_t len) {
    if (len > p->max_len) return -1;
    return (int32_t)*find_slot(p, bytes, len) - 1;
}

paged_status paged__emit(paged__encoder *e, int32_t id) {
    if (e->n_out == e->cap_out) {
        size_t cap = e->cap_out * 2 + 64;
        int32_t *out = paged__alloc(cap, sizeof *out);
        if (!out) return paged__fail(e->err, PAGED_ERR_NO_MEMORY, "no memory for %zu tokens", cap);
        if (e->n_out) memcpy(out, e->out, e->n_out * sizeof *out);
        paged__free(e->out);
        e->out = out;
        e->cap_out = cap;
    }
    e->out[e->n_out++] = id;
    return PAGED_OK;
}

paged_status paged__encoder_reserve(paged__encoder *e, size_t n) {
    if (n <= e->cap_symbols) return PAGED_OK;
    if (n > INT32_MAX / 2) return paged__fail(e->err, PAGED_ERR_LIMIT, "a word of %zu bytes is too long", n);
    size_t cap = PAGED_MAX(n, PAGED_MIN(2 * n, 4096));
    paged__free(e->prev);
    paged__free(e->heap);
    e->cap_symbols = 0;
    e->prev = paged__alloc(cap, 4 * sizeof *e->prev);
    e->heap = paged__alloc(cap, 2 * sizeof *e->heap);
    if (!e->prev || !e->heap)
        return paged__fail(e->err, PAGED_ERR_NO_MEMORY, "no memory for a word of %zu bytes", n);
    e->next = e->prev + cap;
    e->sym = e->next + cap;
    e->len = e->sym + cap;
    e->cap_symbols = cap;
    return PAGED_OK;
}
