/* space.c: namespaces. A namespace is the bytes of its fields, each with kind and length, interned: equal
 * ones are one entry, found by hash and compared in full. It lives as long as a sequence or a node is in
 * it. */
#include "mem/hash.h"
#include "mem/mem.h"

enum { SPACE_BYTES_MAX = 64 << 10, SPACES_FIRST = 16 };

static int32_t *bucket_of(const paged_cache *cache, uint64_t hash) {
    return &cache->space_buckets[hash & (uint64_t)(cache->n_spaces_max - 1)];
}

uint8_t *paged__namespace_encode(const paged_namespace *names, size_t *n_bytes, paged_status *status) {
    size_t size_bytes = 0;
    int32_t last_kind = 0;
    *status = PAGED_ERR_INVALID_ARG;
    if (!names || names->n_fields < 0 || (names->n_fields > 0 && !names->fields)) return NULL;
    for (int32_t i = 0; i < names->n_fields; i++) {
        const paged_ns_field *field = &names->fields[i];
        if (field->kind <= last_kind || field->size_bytes > SPACE_BYTES_MAX ||
            (field->size_bytes > 0 && !field->data))
            return NULL;
        last_kind = field->kind;
        size_bytes += 2 * sizeof(uint32_t) + field->size_bytes;
        if (size_bytes > SPACE_BYTES_MAX) return NULL;
    }
    *status = PAGED_ERR_NO_MEMORY;
    uint8_t *bytes = paged__alloc(PAGED_MAX(size_bytes, 1), 1), *at = bytes;
    if (!bytes) return NULL;
    for (int32_t i = 0; i < names->n_fields; i++) {
        const paged_ns_field *field = &names->fields[i];
        const uint32_t head[2] = {(uint32_t)field->kind, (uint32_t)field->size_bytes};
        memcpy(at, head, sizeof head);
        if (field->size_bytes) memcpy(at + sizeof head, field->data, field->size_bytes);
        at += sizeof head + field->size_bytes;
    }
    *n_bytes = size_bytes;
    *status = PAGED_OK;
    return bytes;
}

/* Doubles the arrays, so that a free entry exists. */
static paged_status grow(paged_cache *cache) {
    int32_t n_old = cache->n_spaces_max, n_new = n_old ? 2 * n_old : SPACES_FIRST;
    paged__space *spaces = paged__calloc((size_t)n_new, sizeof *spaces);
    int32_t *buckets = paged__alloc((size_t)n_new, sizeof *buckets);
    if (!spaces || !buckets) {
        paged__free(spaces);
        paged__free(buckets);
        return PAGED_ERR_NO_MEMORY;
    }
    if (n_old) memcpy(spaces, cache->spaces, (size_t)n_old * sizeof *spaces);
    paged__free(cache->spaces);
    paged__free(cache->space_buckets);
    cache->spaces = spaces;
    cache->space_buckets = buckets;
    cache->n_spaces_max = n_new;
    cache->space_bytes += (size_t)(n_new - n_old) * (sizeof *spaces + sizeof *buckets);
    for (int32_t i = 0; i < n_new; i++) buckets[i] = -1;
    for (int32_t i = 0; i < n_old; i++) { /* none of them is free */
        int32_t *bucket = bucket_of(cache, spaces[i].hash[0]);
        spaces[i].next = *bucket;
        *bucket = i;
    }
    for (int32_t i = n_new - 1; i >= n_old; i--) {
        spaces[i].next = cache->free_space;
        cache->free_space = i;
    }
    return PAGED_OK;
}

paged_status paged__space_open(paged_cache *cache, const paged_namespace *names, int32_t *space) {
    size_t n_bytes = 0;
    paged_status status;
    uint8_t *bytes = paged__namespace_encode(names, &n_bytes, &status);
    if (!bytes) return status;
    XXH128_hash_t hash = XXH3_128bits(bytes, n_bytes);
    int32_t found = cache->n_spaces_max ? *bucket_of(cache, hash.low64) : -1;
    while (found >= 0 && (cache->spaces[found].n_bytes != n_bytes ||
                          memcmp(cache->spaces[found].bytes, bytes, n_bytes) != 0))
        found = cache->spaces[found].next;
    if (found >= 0) {
        paged__free(bytes);
        cache->spaces[found].n_refs++;
        *space = found;
        return PAGED_OK;
    }
    if (cache->free_space < 0) status = grow(cache);
    if (status != PAGED_OK) {
        paged__free(bytes);
        return status;
    }
    *space = cache->free_space;
    paged__space *s = &cache->spaces[*space];
    cache->free_space = s->next;
    int32_t *bucket = bucket_of(cache, hash.low64);
    *s = (paged__space){.hash = {hash.low64, hash.high64},
                        .bytes = bytes,
                        .n_bytes = n_bytes,
                        .n_refs = 1,
                        .next = *bucket,
                        .children = -1};
    *bucket = *space;
    cache->space_bytes += n_bytes;
    return PAGED_OK;
}

void paged__space_unref(paged_cache *cache, int32_t space) {
    paged__space *s = &cache->spaces[space];
    PAGED_ASSERT(s->n_refs > 0);
    if (--s->n_refs > 0) return;
    PAGED_ASSERT(s->children == -1);
    int32_t *link = bucket_of(cache, s->hash[0]);
    while (*link != space) link = &cache->spaces[*link].next;
    *link = s->next;
    cache->space_bytes -= s->n_bytes;
    paged__free(s->bytes);
    *s = (paged__space){.next = cache->free_space};
    cache->free_space = space;
}

void paged__spaces_free(paged_cache *cache) {
    for (int32_t i = 0; i < cache->n_spaces_max; i++) paged__free(cache->spaces[i].bytes);
    paged__free(cache->spaces);
    paged__free(cache->space_buckets);
}
