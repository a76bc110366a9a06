/* model/gguf.c: the one parser of GGUF files, over the mapped file.
 *
 * A walk goes through header, keys and tensor infos and believes no number before it has been compared with
 * the bytes that are left. It is done twice with the same code: the first time it only checks and measures
 * the arena, the second time it fills it. So the one big allocation is exact, comes after the whole structure
 * is known to be good, and is at most a small multiple of the metadata. After the walk come the questions
 * that need all entries at once: alignment, places in the file, overlaps, duplicates. Tensor data is never
 * touched.
 *
 * ggml's own reader is not used: it does not compare a tensor's bytes with the file's size, takes any power
 * of two as alignment, and gives its reasons to a log and not to the caller. ggml only tells the names and
 * block sizes of its types.
 *
 * Ownership: a paged__gguf owns the map and the arena. The arena holds the path, all keys, names and strings
 * (each with a NUL behind it), the tables of string arrays, and aligned copies of the arrays of 4-byte
 * elements; every other value stays in the map, where it may be unaligned, and is read with memcpy.
 */
#include "model/gguf.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/base.h"

enum {
    TYPE_U8,
    TYPE_I8,
    TYPE_U16,
    TYPE_I16,
    TYPE_U32,
    TYPE_I32,
    TYPE_F32,
    TYPE_BOOL,
    TYPE_STR,
    TYPE_ARR,
    TYPE_U64,
    TYPE_I64,
    TYPE_F64,
    N_TYPES
};

/* Size 0: a string's size is in its length; arrays of arrays are refused. */
static const struct {
    const char *name, *array_name;
    size_t size_bytes;
} types[N_TYPES] = {
    [TYPE_U8] = {"u8", "[u8]", 1},    [TYPE_I8] = {"i8", "[i8]", 1},
    [TYPE_U16] = {"u16", "[u16]", 2}, [TYPE_I16] = {"i16", "[i16]", 2},
    [TYPE_U32] = {"u32", "[u32]", 4}, [TYPE_I32] = {"i32", "[i32]", 4},
    [TYPE_F32] = {"f32", "[f32]", 4}, [TYPE_BOOL] = {"bool", "[bool]", 1},
    [TYPE_STR] = {"str", "[str]", 0}, [TYPE_ARR] = {"array", "[array]", 0},
    [TYPE_U64] = {"u64", "[u64]", 8}, [TYPE_I64] = {"i64", "[i64]", 8},
    [TYPE_F64] = {"f64", "[f64]", 8},
};

/* The least that an entry can take in the file: what bounds the counts of the header. */
#define MIN_KEY_BYTES    (8 + 1 + 4 + 1)
#define MIN_TENSOR_BYTES (8 + 1 + 4 + 8 + 4 + 8)

#define MAX_KEY_BYTES 65535 /* the format's own limit */
/* The format asks for a multiple of 8. That also keeps every ggml block aligned in the map. */
#define MIN_ALIGNMENT     8
#define DEFAULT_ALIGNMENT 32
#define MAX_ALIGNMENT     65536

typedef struct entry {
    const char *key;
    uint32_t type; /* of the elements, if is_array */
    bool is_array;
    uint64_t n; /* elements; bytes of a plain string */
    /* A string: its bytes. An array of strings: const char *[n + 1], one behind the other, so that string i
     * has table[i + 1] - table[i] - 1 bytes. Arrays of 4-byte elements: aligned. Anything else: unaligned, in
     * the map. */
    const void *value;
} entry;

typedef struct tensor {
    paged__gguf_tensor info;
    uint64_t offset; /* from the start of the data section; not believed before place_tensors() */
} tensor;

struct paged__gguf {
    paged__file_map map;
    const char *path;
    void *arena;
    entry *entries;         /* [n_entries], in the order of the file */
    const entry **by_key;   /* [n_entries], sorted */
    tensor *tensors;        /* [n_tensors], in the order of the file */
    const tensor **by_name; /* [n_tensors], sorted */
    size_t n_entries, n_tensors, data_bytes;
};

typedef struct walk {
    paged__gguf *g;
    paged_error *err;
    size_t pos; /* in the map; never beyond its end */
    /* Where we are, for messages: "header"; or "key" or "tensor", its index, and its name once that is
     * read. */
    const char *kind;
    uint64_t idx;
    const uint8_t *name;
    size_t name_bytes;
    /* The arena; NULL while measuring. */
    uint8_t *arena;
    size_t used, capacity;
} walk;

/* ---- messages ---- */

/* Writes at most capacity - 1 bytes of printable ASCII: what a file says must not break the one line of a
 * message. */
static void put_text(char *out, size_t capacity, const void *text, size_t n_bytes) {
    const uint8_t *bytes = text;
    size_t n = 0;
    for (size_t i = 0; i < n_bytes; i++) {
        const bool plain = bytes[i] >= 0x20 && bytes[i] < 0x7f && bytes[i] != '\\';
        const size_t need = (plain ? 1u : 4u) + (i + 1 < n_bytes ? 3u : 0u);
        if (n + need >= capacity) {
            snprintf(out + n, capacity - n, "...");
            return;
        }
        n += (size_t)snprintf(out + n, capacity - n, plain ? "%c" : "\\x%02x", bytes[i]);
    }
    out[n] = '\0';
}

__attribute__((format(printf, 5, 0))) static paged_status fail_at(const paged__gguf *g, paged_error *err,
                                                                  paged_status status, const char *where,
                                                                  const char *fmt, va_list args) {
    char text[220];
    vsnprintf(text, sizeof text, fmt, args);
    /* The end of a long path says more than its start, and the numbers behind it must fit. */
    const size_t path_bytes = strlen(g->path), max = 120;
    const char *path = path_bytes > max ? g->path + path_bytes - max : g->path;
    while ((*path & 0xc0) == 0x80) path++;
    return paged__fail(err, status, "%s%s: %s: %s", path_bytes > max ? "..." : "", path, where, text);
}

__attribute__((format(printf, 3, 4))) static paged_status fail_walk(const walk *w, paged_status status,
                                                                    const char *fmt, ...) {
    char name[80], where[120];
    if (w->name) {
        put_text(name, sizeof name, w->name, w->name_bytes);
        snprintf(where, sizeof where, "%s '%s'", w->kind, name);
    } else if (strcmp(w->kind, "header") == 0) {
        snprintf(where, sizeof where, "header");
    } else {
        snprintf(where, sizeof where, "%s number %" PRIu64, w->kind, w->idx);
    }
    va_list args;
    va_start(args, fmt);
    const paged_status s = fail_at(w->g, w->err, status, where, fmt, args);
    va_end(args);
    return s;
}

__attribute__((format(printf, 5, 6))) static paged_status
fail_named(const paged__gguf *g, paged_error *err, const char *kind, const char *name, const char *fmt, ...) {
    char text[80], where[120];
    put_text(text, sizeof text, name, strlen(name));
    snprintf(where, sizeof where, "%s '%s'", kind, text);
    va_list args;
    va_start(args, fmt);
    const paged_status s = fail_at(g, err, PAGED_ERR_FORMAT, where, fmt, args);
    va_end(args);
    return s;
}

/* ---- the walk ---- */

static size_t left(const walk *w) {
    return w->g->map.size_bytes - w->pos;
}

static paged_status cut_short(const walk *w, uint64_t need_bytes) {
    return fail_walk(w, PAGED_ERR_FORMAT,
                     "the file ends too early: %" PRIu64 " bytes needed at offset %zu of %zu", need_bytes,
                     w->pos, w->g->map.size_bytes);
}

static paged_status read_raw(walk *w, void *out, size_t n_bytes) {
    if (n_bytes > left(w)) return cut_short(w, n_bytes);
    memcpy(out, w->g->map.data + w->pos, n_bytes);
    w->pos += n_bytes;
    return PAGED_OK;
}

/* The bytes stay in the map. */
static paged_status read_text(walk *w, const uint8_t **out, size_t *n_bytes) {
    uint64_t n = 0;
    paged_status s = read_raw(w, &n, sizeof n);
    if (s) return s;
    if (n > left(w)) return cut_short(w, n);
    *out = w->g->map.data + w->pos;
    *n_bytes = (size_t)n;
    w->pos += (size_t)n;
    return PAGED_OK;
}

/* NULL while measuring, and if the file has changed between the two walks, which load() notices. `used`
 * cannot wrap: what is taken is at most a small multiple of bytes that exist. */
static void *take(walk *w, size_t n_bytes, size_t align) {
    const size_t start = (w->used + align - 1) & ~(align - 1);
    w->used = start + n_bytes;
    return w->arena && w->used <= w->capacity ? w->arena + start : NULL;
}

static const char *take_text(walk *w, const void *text, size_t n_bytes) {
    char *copy = take(w, n_bytes + 1, 1);
    if (!copy) return NULL;
    memcpy(copy, text, n_bytes);
    copy[n_bytes] = '\0';
    return copy;
}

/* Names are looked up as C strings, so a NUL inside would make two different names one. */
static paged_status read_name(walk *w, size_t max_bytes, const char **out) {
    const uint8_t *text;
    size_t n;
    paged_status s = read_text(w, &text, &n);
    if (s) return s;
    if (n == 0) return fail_walk(w, PAGED_ERR_FORMAT, "its name is empty");
    w->name = text;
    w->name_bytes = n;
    if (n > max_bytes)
        return fail_walk(w, PAGED_ERR_FORMAT, "its name has %zu bytes, the limit is %zu", n, max_bytes);
    const uint8_t *nul = memchr(text, 0, n);
    if (nul)
        return fail_walk(w, PAGED_ERR_FORMAT, "its name has a NUL at byte %zu of %zu", (size_t)(nul - text),
                         n);
    *out = take_text(w, text, n);
    return PAGED_OK;
}

static paged_status read_type(walk *w, uint32_t *type) {
    paged_status s = read_raw(w, type, sizeof *type);
    if (!s && *type >= N_TYPES) s = fail_walk(w, PAGED_ERR_FORMAT, "unknown value type %" PRIu32, *type);
    return s;
}

static paged_status walk_strings(walk *w, entry *e) {
    if (e->n > left(w) / sizeof(uint64_t))
        return fail_walk(w, PAGED_ERR_FORMAT, "%" PRIu64 " strings cannot lie in the %zu bytes that are left",
                         e->n, left(w));
    const char **table = take(w, ((size_t)e->n + 1) * sizeof *table, sizeof *table);
    e->value = table;
    for (size_t i = 0; i < e->n; i++) {
        const uint8_t *text;
        size_t n;
        paged_status s = read_text(w, &text, &n);
        if (s) return s;
        const char *copy = take_text(w, text, n);
        if (table) table[i] = copy;
    }
    /* Where the next string would start. */
    if (table) table[e->n] = (const char *)w->arena + w->used;
    return PAGED_OK;
}

static paged_status walk_plain(walk *w, entry *e) {
    const size_t size_bytes = types[e->type].size_bytes;
    if (e->n > left(w) / size_bytes)
        return fail_walk(w, PAGED_ERR_FORMAT,
                         "%" PRIu64 " values of type %s cannot lie in the %zu bytes that are left", e->n,
                         types[e->type].name, left(w));
    const uint8_t *bytes = w->g->map.data + w->pos;
    const size_t n_bytes = (size_t)e->n * size_bytes;
    w->pos += n_bytes;
    e->value = bytes;
    if (e->type == TYPE_BOOL) {
        for (size_t i = 0; i < n_bytes; i++)
            if (bytes[i] > 1)
                return fail_walk(w, PAGED_ERR_FORMAT, "bool number %zu is %d, not 0 or 1", i, bytes[i]);
    }
    if (e->is_array && size_bytes == 4) {
        void *copy = take(w, n_bytes, 4);
        if (copy) memcpy(copy, bytes, n_bytes);
        e->value = copy;
    }
    return PAGED_OK;
}

static paged_status walk_entry(walk *w, entry *e) {
    paged_status s;
    if ((s = read_name(w, MAX_KEY_BYTES, &e->key))) return s;
    if ((s = read_type(w, &e->type))) return s;
    e->n = 1;
    e->is_array = e->type == TYPE_ARR;
    if (e->is_array) {
        if ((s = read_type(w, &e->type))) return s;
        if (e->type == TYPE_ARR)
            return fail_walk(w, PAGED_ERR_UNSUPPORTED, "arrays of arrays are not supported");
        if ((s = read_raw(w, &e->n, sizeof e->n))) return s;
    }
    if (e->type != TYPE_STR) return walk_plain(w, e);
    if (e->is_array) return walk_strings(w, e);
    const uint8_t *text;
    size_t n;
    if ((s = read_text(w, &text, &n))) return s;
    e->value = take_text(w, text, n);
    e->n = n;
    return PAGED_OK;
}

/* From ne and type: the checks of the type, and size_bytes. */
static paged_status size_tensor(const walk *w, paged__gguf_tensor *t, uint32_t type) {
    /* The enum has holes: types that were removed have no block size. */
    if (type >= GGML_TYPE_COUNT || ggml_blck_size((enum ggml_type)type) <= 0 ||
        ggml_type_size((enum ggml_type)type) == 0)
        return fail_walk(w, PAGED_ERR_UNSUPPORTED, "unknown tensor type %" PRIu32, type);
    t->type = (enum ggml_type)type;
    const int64_t block = ggml_blck_size(t->type);
    if (t->ne[0] % block != 0)
        return fail_walk(w, PAGED_ERR_FORMAT,
                         "a row of %" PRId64 " values is not whole blocks of %" PRId64 " (type %s)", t->ne[0],
                         block, ggml_type_name(t->type));
    int64_t n_values = 1;
    bool wraps = false;
    for (int d = 0; d < 4; d++) wraps = wraps || __builtin_mul_overflow(n_values, t->ne[d], &n_values);
    if (wraps || !paged__mul((size_t)(n_values / block), ggml_type_size(t->type), &t->size_bytes))
        return fail_walk(w, PAGED_ERR_FORMAT,
                         "%" PRId64 " x %" PRId64 " x %" PRId64 " x %" PRId64
                         " values of type %s wrap around",
                         t->ne[0], t->ne[1], t->ne[2], t->ne[3], ggml_type_name(t->type));
    return PAGED_OK;
}

static paged_status walk_tensor(walk *w, tensor *t) {
    paged_status s;
    if ((s = read_name(w, GGML_MAX_NAME - 1, &t->info.name))) return s;
    uint32_t n_dims = 0, type = 0;
    if ((s = read_raw(w, &n_dims, sizeof n_dims))) return s;
    if (n_dims < 1 || n_dims > 4)
        return fail_walk(w, PAGED_ERR_FORMAT, "%" PRIu32 " dimensions, must be 1 to 4", n_dims);
    t->info.n_dims = (int32_t)n_dims;
    for (uint32_t d = 0; d < 4; d++) {
        uint64_t ne = 1;
        if (d < n_dims && (s = read_raw(w, &ne, sizeof ne))) return s;
        if (ne < 1 || ne > INT64_MAX)
            return fail_walk(w, PAGED_ERR_FORMAT,
                             "dimension %" PRIu32 " is %" PRIu64 ", must be 1 to 2^63 - 1", d, ne);
        t->info.ne[d] = (int64_t)ne;
    }
    if ((s = read_raw(w, &type, sizeof type))) return s;
    if ((s = read_raw(w, &t->offset, sizeof t->offset))) return s;
    return size_tensor(w, &t->info, type);
}

static paged_status walk_version(walk *w) {
    uint8_t magic[4];
    uint32_t version = 0;
    paged_status s;
    if ((s = read_raw(w, magic, sizeof magic))) return s;
    if (memcmp(magic, "GGUF", 4) != 0)
        return fail_walk(w, PAGED_ERR_FORMAT, "not a GGUF file: it starts with %02x %02x %02x %02x", magic[0],
                         magic[1], magic[2], magic[3]);
    if ((s = read_raw(w, &version, sizeof version))) return s;
    if (version != 0 && (version & 0xffff) == 0)
        return fail_walk(w, PAGED_ERR_UNSUPPORTED,
                         "a big-endian GGUF file (version %" PRIu32 " the other way round)",
                         __builtin_bswap32(version));
    if (version != 2 && version != 3)
        return fail_walk(w, PAGED_ERR_UNSUPPORTED, "GGUF version %" PRIu32 ", versions 2 and 3 are supported",
                         version);
    return PAGED_OK;
}

static paged_status walk_count(walk *w, const char *what, size_t min_bytes, size_t *out) {
    uint64_t n = 0;
    paged_status s = read_raw(w, &n, sizeof n);
    if (s) return s;
    if (n > left(w) / min_bytes || n > INT32_MAX)
        return fail_walk(w, PAGED_ERR_FORMAT, "%" PRIu64 " %s cannot lie in the %zu bytes that are left", n,
                         what, left(w));
    *out = (size_t)n;
    return PAGED_OK;
}

static paged_status walk_file(walk *w) {
    paged__gguf *g = w->g;
    paged_status s;
    w->kind = "header";
    w->name = NULL;
    w->pos = w->used = 0;
    if ((s = walk_version(w))) return s;
    if ((s = walk_count(w, "tensors", MIN_TENSOR_BYTES, &g->n_tensors))) return s;
    if ((s = walk_count(w, "keys", MIN_KEY_BYTES, &g->n_entries))) return s;
    g->entries = take(w, g->n_entries * sizeof *g->entries, 8);
    g->by_key = take(w, g->n_entries * sizeof *g->by_key, 8);
    g->tensors = take(w, g->n_tensors * sizeof *g->tensors, 8);
    g->by_name = take(w, g->n_tensors * sizeof *g->by_name, 8);

    w->kind = "key";
    for (w->idx = 0; w->idx < g->n_entries; w->idx++) {
        entry e;
        w->name = NULL;
        if ((s = walk_entry(w, &e))) return s;
        if (g->entries) g->entries[w->idx] = e;
    }
    w->kind = "tensor";
    for (w->idx = 0; w->idx < g->n_tensors; w->idx++) {
        tensor t = {0};
        w->name = NULL;
        if ((s = walk_tensor(w, &t))) return s;
        if (g->tensors) g->tensors[w->idx] = t;
    }
    const char *path = take_text(w, g->path, strlen(g->path));
    if (path) g->path = path;
    return PAGED_OK;
}

/* ---- after the walk ---- */

static int compare_keys(const void *a, const void *b) {
    return strcmp((*(const entry *const *)a)->key, (*(const entry *const *)b)->key);
}

static int compare_names(const void *a, const void *b) {
    return strcmp((*(const tensor *const *)a)->info.name, (*(const tensor *const *)b)->info.name);
}

static int compare_offsets(const void *a, const void *b) {
    const uint64_t x = (*(const tensor *const *)a)->offset, y = (*(const tensor *const *)b)->offset;
    return (x > y) - (x < y);
}

static paged_status index_keys(paged__gguf *g, paged_error *err) {
    for (size_t i = 0; i < g->n_entries; i++) g->by_key[i] = &g->entries[i];
    qsort(g->by_key, g->n_entries, sizeof *g->by_key, compare_keys);
    for (size_t i = 1; i < g->n_entries; i++)
        if (compare_keys(&g->by_key[i - 1], &g->by_key[i]) == 0)
            return fail_named(g, err, "key", g->by_key[i]->key, "there are two keys of this name among %zu",
                              g->n_entries);
    return PAGED_OK;
}

/* Gives every tensor its bytes in the map. infos_end is where the tensor infos end. */
static paged_status place_tensors(paged__gguf *g, size_t infos_end, paged_error *err) {
    uint32_t alignment = DEFAULT_ALIGNMENT;
    paged_status s =
        paged__gguf_u32(g, "general.alignment", false, MIN_ALIGNMENT, MAX_ALIGNMENT, &alignment, err);
    if (s) return s;
    if ((alignment & (alignment - 1)) != 0)
        return fail_named(g, err, "key", "general.alignment", "%" PRIu32 " is not a power of two", alignment);
    const size_t file_bytes = g->map.size_bytes;
    const size_t start = PAGED_MIN((infos_end + alignment - 1) & ~((size_t)alignment - 1), file_bytes);
    const size_t room = file_bytes - start;
    for (size_t i = 0; i < g->n_tensors; i++) {
        tensor *t = &g->tensors[i];
        g->by_name[i] = t;
        if (t->offset % alignment != 0)
            return fail_named(g, err, "tensor", t->info.name,
                              "offset %" PRIu64 " is not a multiple of %" PRIu32, t->offset, alignment);
        if (t->offset > room || t->info.size_bytes > room - t->offset)
            return fail_named(g, err, "tensor", t->info.name,
                              "%zu bytes at data offset %" PRIu64
                              " do not lie in the file: it has %zu bytes, %zu of them data",
                              t->info.size_bytes, t->offset, file_bytes, room);
        t->info.data = g->map.data + start + t->offset;
        g->data_bytes += t->info.size_bytes; /* if this wraps, two of them overlap */
    }
    return PAGED_OK;
}

/* by_name has all tensors, in any order. */
static paged_status index_tensors(paged__gguf *g, paged_error *err) {
    qsort(g->by_name, g->n_tensors, sizeof *g->by_name, compare_offsets);
    for (size_t i = 1; i < g->n_tensors; i++) {
        const tensor *a = g->by_name[i - 1], *b = g->by_name[i];
        if (b->offset - a->offset < a->info.size_bytes)
            return fail_named(g, err, "tensor", b->info.name,
                              "at data offset %" PRIu64 " it overlaps '%.63s', %zu bytes at %" PRIu64,
                              b->offset, a->info.name, a->info.size_bytes, a->offset);
    }
    qsort(g->by_name, g->n_tensors, sizeof *g->by_name, compare_names);
    for (size_t i = 1; i < g->n_tensors; i++)
        if (compare_names(&g->by_name[i - 1], &g->by_name[i]) == 0)
            return fail_named(g, err, "tensor", g->by_name[i]->info.name,
                              "there are two tensors of this name among %zu", g->n_tensors);
    return PAGED_OK;
}

static paged_status load(paged__gguf *g, paged_error *err) {
    walk w = {.g = g, .err = err};
    paged_status s = walk_file(&w);
    if (s) return s;
    w.capacity = w.used;
    g->arena = w.arena = paged__alloc(w.capacity, 1);
    if (!g->arena)
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for %zu bytes of metadata of %s", w.capacity,
                           g->path);
    if ((s = walk_file(&w))) return s;
    if (w.used != w.capacity) {
        w.name = NULL;
        w.kind = "header";
        return fail_walk(&w, PAGED_ERR_IO, "the file changed while it was read");
    }
    if ((s = index_keys(g, err))) return s;
    if ((s = place_tensors(g, w.pos, err))) return s;
    return index_tensors(g, err);
}

paged_status paged__gguf_open(const char *path, paged__gguf **out, paged_error *err) {
    paged__gguf *g = paged__calloc(1, sizeof *g);
    if (!g) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory to open %s", path);
    g->path = path;
    paged_status s = paged__file_map_open(path, &g->map, err);
    if (!s) s = load(g, err);
    if (s) {
        paged__gguf_close(g);
        return s;
    }
    *out = g;
    return PAGED_OK;
}

void paged__gguf_close(paged__gguf *g) {
    if (!g) return;
    paged__file_map_close(&g->map);
    paged__free(g->arena);
    paged__free(g);
}

/* ---- keys ---- */

size_t paged__gguf_file_bytes(const paged__gguf *g) {
    return g->map.size_bytes;
}

size_t paged__gguf_data_bytes(const paged__gguf *g) {
    return g->data_bytes;
}

const void *paged__gguf_map(const paged__gguf *g, size_t *size_bytes) {
    *size_bytes = g->map.size_bytes;
    return g->map.data;
}

static const entry *find_entry(const paged__gguf *g, const char *key) {
    const entry wanted = {.key = key}, *wanted_at = &wanted;
    if (g->n_entries == 0) return NULL;
    const entry **found = bsearch(&wanted_at, g->by_key, g->n_entries, sizeof *g->by_key, compare_keys);
    return found ? *found : NULL;
}

bool paged__gguf_has(const paged__gguf *g, const char *key) {
    return find_entry(g, key) != NULL;
}

static bool is_integer(uint32_t type) {
    return type <= TYPE_I32 || type == TYPE_U64 || type == TYPE_I64;
}

/* *negative says that the value is an int64_t below zero. `value` may be unaligned. */
static uint64_t load_integer(uint32_t type, const void *value, bool *negative) {
    uint64_t u = 0;
    memcpy(&u, value, types[type].size_bytes);
    const bool is_signed = type == TYPE_I8 || type == TYPE_I16 || type == TYPE_I32 || type == TYPE_I64;
    const unsigned shift = 64 - 8 * (unsigned)types[type].size_bytes;
    *negative = is_signed && (u << shift) >> 63 != 0;
    return *negative && shift ? u | (UINT64_MAX << (64 - shift)) : u;
}

/* One value that is not a string. */
static void put_number(char *out, size_t capacity, uint32_t type, const void *value) {
    if (type == TYPE_F32) {
        float f;
        memcpy(&f, value, sizeof f);
        snprintf(out, capacity, "%.9g", (double)f);
    } else if (type == TYPE_F64) {
        double f;
        memcpy(&f, value, sizeof f);
        snprintf(out, capacity, "%.17g", f);
    } else if (type == TYPE_BOOL) {
        snprintf(out, capacity, "%s", *(const uint8_t *)value ? "true" : "false");
    } else {
        bool negative;
        const uint64_t u = load_integer(type, value, &negative);
        if (negative)
            snprintf(out, capacity, "%" PRId64, (int64_t)u);
        else
            snprintf(out, capacity, "%" PRIu64, u);
    }
}

static const char *type_name(const entry *e) {
    return e->is_array ? types[e->type].array_name : types[e->type].name;
}

static paged_status fail_missing(const paged__gguf *g, const char *key, paged_error *err) {
    return fail_named(g, err, "key", key, "it is missing");
}

static paged_status fail_type(const paged__gguf *g, const entry *e, const char *wanted, paged_error *err) {
    return fail_named(g, err, "key", e->key, "its type is %s, not %s", type_name(e), wanted);
}

paged_status paged__gguf_u32(const paged__gguf *g, const char *key, bool required, uint32_t min, uint32_t max,
                             uint32_t *out, paged_error *err) {
    const entry *e = find_entry(g, key);
    if (!e) return required ? fail_missing(g, key, err) : PAGED_OK;
    if (e->is_array || !is_integer(e->type)) return fail_type(g, e, "an integer", err);
    bool negative;
    const uint64_t value = load_integer(e->type, e->value, &negative);
    if (negative || value < min || value > max) {
        char text[32];
        put_number(text, sizeof text, e->type, e->value);
        return fail_named(g, err, "key", key, "%s is outside %" PRIu32 " to %" PRIu32, text, min, max);
    }
    *out = (uint32_t)value;
    return PAGED_OK;
}

paged_status paged__gguf_f32(const paged__gguf *g, const char *key, bool required, float min, float max,
                             float *out, paged_error *err) {
    const entry *e = find_entry(g, key);
    if (!e) return required ? fail_missing(g, key, err) : PAGED_OK;
    if (e->is_array || e->type != TYPE_F32) return fail_type(g, e, "f32", err);
    float value;
    memcpy(&value, e->value, sizeof value);
    /* Written so that NaN is outside. */
    if (!(value >= min && value <= max))
        return fail_named(g, err, "key", key, "%.9g is outside %.9g to %.9g", (double)value, (double)min,
                          (double)max);
    *out = value;
    return PAGED_OK;
}

paged_status paged__gguf_bool(const paged__gguf *g, const char *key, bool required, bool *out,
                              paged_error *err) {
    const entry *e = find_entry(g, key);
    if (!e) return required ? fail_missing(g, key, err) : PAGED_OK;
    if (e->is_array || e->type != TYPE_BOOL) return fail_type(g, e, "bool", err);
    *out = *(const uint8_t *)e->value != 0;
    return PAGED_OK;
}

paged_status paged__gguf_str(const paged__gguf *g, const char *key, bool required, const char **out,
                             paged_error *err) {
    const entry *e = find_entry(g, key);
    if (!e) return required ? fail_missing(g, key, err) : PAGED_OK;
    if (e->is_array || e->type != TYPE_STR) return fail_type(g, e, "str", err);
    const char *text = e->value;
    if (strlen(text) != e->n)
        return fail_named(g, err, "key", key, "the string has a NUL at byte %zu of %" PRIu64, strlen(text),
                          e->n);
    *out = text;
    return PAGED_OK;
}

/* *out is NULL for a key that is absent and not required. */
static paged_status find_array(const paged__gguf *g, const char *key, bool required, uint32_t type,
                               uint32_t other_type, const entry **out, paged_error *err) {
    const entry *e = find_entry(g, key);
    if (!e && required) return fail_missing(g, key, err);
    if (e && (!e->is_array || (e->type != type && e->type != other_type)))
        return fail_type(g, e, types[type].array_name, err);
    *out = e;
    return PAGED_OK;
}

paged_status paged__gguf_arr_i32(const paged__gguf *g, const char *key, bool required, const int32_t **out,
                                 int64_t *n, paged_error *err) {
    const entry *e = NULL;
    paged_status s = find_array(g, key, required, TYPE_I32, TYPE_U32, &e, err);
    if (s) return s;
    if (e) *out = e->value;
    *n = e ? (int64_t)e->n : 0;
    return PAGED_OK;
}

paged_status paged__gguf_arr_f32(const paged__gguf *g, const char *key, bool required, const float **out,
                                 int64_t *n, paged_error *err) {
    const entry *e = NULL;
    paged_status s = find_array(g, key, required, TYPE_F32, TYPE_F32, &e, err);
    if (s) return s;
    if (e) *out = e->value;
    *n = e ? (int64_t)e->n : 0;
    return PAGED_OK;
}

paged_status paged__gguf_arr_str(const paged__gguf *g, const char *key, bool required, int64_t *n,
                                 paged_error *err) {
    const entry *e = NULL;
    paged_status s = find_array(g, key, required, TYPE_STR, TYPE_STR, &e, err);
    if (s) return s;
    *n = e ? (int64_t)e->n : 0;
    return PAGED_OK;
}

/* The table of a string array that the caller knows to be there. */
static const char *const *string_table(const paged__gguf *g, const char *key, int64_t i) {
    const entry *e = find_entry(g, key);
    PAGED_ASSERT(e && e->is_array && e->type == TYPE_STR && i >= 0 && (uint64_t)i < e->n);
    return e->value;
}

const char *paged__gguf_arr_str_at(const paged__gguf *g, const char *key, int64_t i) {
    return string_table(g, key, i)[i];
}

size_t paged__gguf_arr_str_bytes(const paged__gguf *g, const char *key, int64_t i) {
    const char *const *table = string_table(g, key, i);
    return (size_t)(table[i + 1] - table[i]) - 1;
}

int32_t paged__gguf_n_keys(const paged__gguf *g) {
    return (int32_t)g->n_entries;
}

/* "49152: <|a|>, <|b|>, ..." */
static void put_array(char *out, size_t capacity, const entry *e) {
    size_t n = (size_t)snprintf(out, capacity, "%" PRIu64, e->n);
    const uint64_t n_shown = PAGED_MIN(e->n, 4u);
    for (uint64_t i = 0; i < n_shown; i++) {
        char text[40];
        if (e->type == TYPE_STR) {
            const char *const *table = e->value;
            put_text(text, sizeof text, table[i], (size_t)(table[i + 1] - table[i]) - 1);
        } else {
            put_number(text, sizeof text, e->type, (const uint8_t *)e->value + i * types[e->type].size_bytes);
        }
        if (n < capacity) n += (size_t)snprintf(out + n, capacity - n, "%s%s", i ? ", " : ": ", text);
    }
    if (n_shown < e->n && n < capacity) snprintf(out + n, capacity - n, ", ...");
}

const char *paged__gguf_key_at(const paged__gguf *g, int32_t i, const char **type, char *value,
                               size_t value_capacity) {
    PAGED_ASSERT(i >= 0 && (size_t)i < g->n_entries && value_capacity > 0);
    const entry *e = &g->entries[i];
    *type = type_name(e);
    if (e->is_array)
        put_array(value, value_capacity, e);
    else if (e->type == TYPE_STR)
        put_text(value, value_capacity, e->value, (size_t)e->n);
    else
        put_number(value, value_capacity, e->type, e->value);
    return e->key;
}

/* ---- tensors ---- */

int32_t paged__gguf_n_tensors(const paged__gguf *g) {
    return (int32_t)g->n_tensors;
}

const paged__gguf_tensor *paged__gguf_tensor_at(const paged__gguf *g, int32_t i) {
    PAGED_ASSERT(i >= 0 && (size_t)i < g->n_tensors);
    return &g->tensors[i].info;
}

const paged__gguf_tensor *paged__gguf_find(const paged__gguf *g, const char *name) {
    const tensor wanted = {.info = {.name = name}}, *wanted_at = &wanted;
    if (g->n_tensors == 0) return NULL;
    const tensor **found = bsearch(&wanted_at, g->by_name, g->n_tensors, sizeof *g->by_name, compare_names);
    return found ? &(*found)->info : NULL;
}
