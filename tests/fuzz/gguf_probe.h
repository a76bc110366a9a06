/* gguf_probe.h: opens bytes as a GGUF file, uses everything that the reader then offers, and checks what it
 * promises. Shared by fuzz_gguf.c and test_gguf_hostile.c; included by one file of a program.
 *
 * It replaces the two functions of base/file.c, so that the "file" is a heap buffer of exactly its size:
 * under AddressSanitizer a read one byte behind it is seen, which a real map, padded to whole pages, would
 * hide. And it counts memory: the most that is in use at once must stay in proportion to the file.
 *
 * A broken promise traps, for the fuzzer to notice.
 */
#ifndef PAGED_TESTS_GGUF_PROBE_H
#define PAGED_TESTS_GGUF_PROBE_H

#include "model/gguf.h"
#include "probe.h"

#define PROBE_PATH "memory.gguf"

static const uint8_t *probe_data;
static size_t probe_bytes;

paged_status paged__file_map_open(const char *path, paged__file_map *out, paged_error *err) {
    (void)path, (void)err;
    *out = (paged__file_map){.fd = -1};
    if (probe_bytes == 0) return PAGED_OK;
    uint8_t *copy = malloc(probe_bytes);
    PROBE_MUST(copy);
    memcpy(copy, probe_data, probe_bytes);
    out->data = copy;
    out->size_bytes = probe_bytes;
    return PAGED_OK;
}

void paged__file_map_close(paged__file_map *map) {
    free((void *)(uintptr_t)map->data);
    *map = (paged__file_map){.fd = -1};
}

/* ---- use of an open file ---- */

static volatile uint64_t probe_sink; /* what is read must not be optimised away */

static void probe_status(paged_status s, const paged_error *err) {
    PROBE_MUST(s == PAGED_OK || s == PAGED_ERR_FORMAT);
    PROBE_MUST(!s || (err->status == s && strstr(err->message, PROBE_PATH) && !strchr(err->message, '\n')));
}

static void probe_strings(const paged__gguf *g, const char *key, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const char *text = paged__gguf_arr_str_at(g, key, i);
        const size_t n_bytes = paged__gguf_arr_str_bytes(g, key, i);
        PROBE_MUST(strlen(text) <= n_bytes && text[n_bytes] == '\0');
    }
}

static void probe_key(const paged__gguf *g, int32_t i) {
    paged_error err = {0};
    const char *type, *text = "";
    char value[48], tiny[3];
    const char *key = paged__gguf_key_at(g, i, &type, value, sizeof value);
    PROBE_MUST(key[0] != '\0' && strlen(value) < sizeof value && paged__gguf_has(g, key));
    PROBE_MUST(paged__gguf_key_at(g, i, &type, tiny, sizeof tiny) == key && strlen(tiny) < sizeof tiny);
    uint32_t u = 0;
    float f = 0.0f;
    bool b = false;
    int64_t n = 0;
    const int32_t *ints = NULL;
    const float *floats = NULL;
    probe_status(paged__gguf_u32(g, key, true, 3, 1000, &u, &err), &err);
    probe_status(paged__gguf_f32(g, key, true, -1.0f, 1e6f, &f, &err), &err);
    probe_status(paged__gguf_bool(g, key, true, &b, &err), &err);
    probe_status(paged__gguf_str(g, key, true, &text, &err), &err);
    probe_sink += u + (uint64_t)b + strlen(text);
    paged_status s = paged__gguf_arr_i32(g, key, true, &ints, &n, &err);
    probe_status(s, &err);
    for (int64_t k = 0; !s && k < n; k++) probe_sink += (uint64_t)(int64_t)ints[k];
    s = paged__gguf_arr_f32(g, key, true, &floats, &n, &err);
    probe_status(s, &err);
    for (int64_t k = 0; !s && k < n; k++) probe_sink += floats[k] > 0.0f;
    s = paged__gguf_arr_str(g, key, true, &n, &err);
    probe_status(s, &err);
    if (!s) probe_strings(g, key, n);
}

static void probe_tensors(const paged__gguf *g) {
    size_t map_bytes, sum = 0;
    const uint8_t *map = paged__gguf_map(g, &map_bytes);
    PROBE_MUST(map_bytes == paged__gguf_file_bytes(g));
    for (int32_t i = 0; i < paged__gguf_n_tensors(g); i++) {
        const paged__gguf_tensor *t = paged__gguf_tensor_at(g, i);
        const uint8_t *data = t->data;
        PROBE_MUST(t->name[0] != '\0' && strlen(t->name) < GGML_MAX_NAME &&
                   paged__gguf_find(g, t->name) == t);
        PROBE_MUST(t->n_dims >= 1 && t->n_dims <= 4 && t->type < GGML_TYPE_COUNT &&
                   ggml_type_size(t->type) > 0);
        size_t want = ggml_row_size(t->type, t->ne[0]);
        for (int d = 0; d < 4; d++) {
            PROBE_MUST(t->ne[d] >= 1 && (d < t->n_dims || t->ne[d] == 1));
            if (d > 0) want *= (size_t)t->ne[d];
        }
        PROBE_MUST(t->size_bytes == want && want > 0 && t->ne[0] % ggml_blck_size(t->type) == 0);
        PROBE_MUST(data >= map && (size_t)(data - map) <= map_bytes - want && (size_t)(data - map) % 8 == 0);
        for (size_t k = 0; k < want; k++) probe_sink += data[k];
        sum += want;
    }
    /* Without overlaps the sum fits; the hostile tests look at overlaps one by one. */
    PROBE_MUST(sum == paged__gguf_data_bytes(g) && sum <= map_bytes);
}

/* Whatever the bytes are, this returns. *err has one line if the status is not OK. */
__attribute__((unused)) static paged_status probe(const uint8_t *data, size_t n_bytes, paged_error *err) {
    probe_memory memory = {.n_left = -1};
    const paged_allocator allocator = {probe_alloc, probe_free, &memory};
    paged__gguf *const untouched = (paged__gguf *)(uintptr_t)&memory;
    paged__gguf *g = untouched;
    paged_allocator_set(&allocator);
    probe_data = data;
    probe_bytes = n_bytes;
    *err = (paged_error){0};
    const paged_status s = paged__gguf_open(PROBE_PATH, &g, err);
    if (s) {
        PROBE_MUST(g == untouched && (s == PAGED_ERR_FORMAT || s == PAGED_ERR_UNSUPPORTED));
        PROBE_MUST(err->status == s && strstr(err->message, PROBE_PATH) && !strchr(err->message, '\n'));
    } else {
        for (int32_t i = 0; i < paged__gguf_n_keys(g); i++) probe_key(g, i);
        probe_tensors(g);
        paged__gguf_close(g);
    }
    PROBE_MUST(memory.used_bytes == 0 && memory.peak_bytes <= 4 * n_bytes + 4096);
    paged_allocator_set(NULL);
    return s;
}

#endif
