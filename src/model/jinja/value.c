/* model/jinja/value.c: memory and errors of a run, and what values are: truth, order, equality, members.
 *
 * Rules are Python's: booleans are integers, lists and tuples are ordered item by item, values of different
 * types are unequal and have no order.
 */
#include "model/jinja/value.h"

#include <math.h>
#include <stdio.h>

/* ---- errors, memory, steps ---- */

j_value paged__j_fail(paged__j_run *run, paged_status status, const char *fmt, ...) {
    if (run->status == PAGED_OK) {
        va_list args;
        run->status = status;
        va_start(args, fmt);
        vsnprintf(run->message, sizeof run->message, fmt, args);
        va_end(args);
    }
    return paged__j_undefined();
}

void *paged__j_alloc(paged__j_run *run, size_t n, size_t elem_bytes) {
    size_t bytes;
    if (run->status) return NULL;
    if (!paged__mul(n, elem_bytes, &bytes) || bytes > run->limits.memory_bytes - run->memory_used) {
        paged__j_fail(run, PAGED_ERR_LIMIT, "it needs more than %zu bytes of memory",
                      run->limits.memory_bytes);
        return NULL;
    }
    bytes = (bytes + 15) / 16 * 16;
    j_chunk *chunk = run->chunks;
    if (!chunk || bytes > chunk->size - chunk->used) {
        const size_t size = PAGED_MAX(bytes, run->limits.chunk_bytes);
        j_chunk *fresh = paged__alloc(sizeof *fresh + 15 + size, 1);
        if (!fresh) {
            paged__j_fail(run, PAGED_ERR_NO_MEMORY, "no memory for %zu bytes", size);
            return NULL;
        }
        *fresh = (j_chunk){.size = size};
        /* A large piece goes behind the current chunk, whose rest stays in use. */
        if (chunk && size - bytes < chunk->size - chunk->used) {
            fresh->next = chunk->next;
            chunk->next = fresh;
        } else {
            fresh->next = chunk;
            run->chunks = fresh;
        }
        chunk = fresh;
    }
    uint8_t *base = (uint8_t *)(((uintptr_t)(chunk + 1) + 15) & ~(uintptr_t)15);
    void *piece = base + chunk->used;
    chunk->used += bytes;
    run->memory_used += PAGED_MIN(bytes, run->limits.memory_bytes - run->memory_used);
    return piece;
}

void *paged__j_grow(paged__j_run *run, void *items, size_t n, size_t *cap, size_t elem_bytes) {
    if (n < *cap) return items;
    const size_t wanted = PAGED_MAX(*cap * 2, 4);
    void *fresh = paged__j_alloc(run, wanted, elem_bytes);
    if (!fresh) return NULL;
    if (n) memcpy(fresh, items, n * elem_bytes);
    *cap = wanted;
    return fresh;
}

bool paged__j_step(paged__j_run *run, size_t n) {
    if (run->status) return false;
    if ((uint64_t)n > (uint64_t)run->steps) {
        paged__j_fail(run, PAGED_ERR_LIMIT, "it needs more than %lld steps", (long long)run->limits.steps);
        return false;
    }
    run->steps -= (int64_t)n;
    return true;
}

void paged__j_arena_free(paged__j_run *run) {
    for (j_chunk *chunk = run->chunks, *next; chunk; chunk = next) {
        next = chunk->next;
        paged__free(chunk);
    }
    run->chunks = NULL;
}

/* ---- making values ---- */

j_value paged__j_string(paged__j_run *run, j_string s) {
    j_string *copy = paged__j_alloc(run, 1, sizeof *copy);
    if (!copy) return paged__j_undefined();
    *copy = s;
    return (j_value){.kind = J_STRING, .s = copy};
}

j_value paged__j_text(paged__j_run *run, const char *text) {
    return paged__j_string(run, (j_string){.bytes = text, .len = strlen(text)});
}

j_value paged__j_seq(paged__j_run *run, j_form form) {
    j_seq *seq = paged__j_alloc(run, 1, sizeof *seq);
    if (!seq) return paged__j_undefined();
    *seq = (j_seq){.form = (uint8_t)form};
    return (j_value){.kind = J_SEQ, .seq = seq};
}

void paged__j_push(paged__j_run *run, j_value v, j_value item) {
    if (v.kind != J_SEQ || !paged__j_step(run, 1)) return;
    j_value *items = paged__j_grow(run, v.seq->items, v.seq->n, &v.seq->cap, sizeof *items);
    if (!items) return;
    v.seq->items = items;
    items[v.seq->n++] = item;
}

j_value paged__j_pair(paged__j_run *run, j_value a, j_value b) {
    j_value pair = paged__j_seq(run, J_TUPLE);
    paged__j_push(run, pair, a);
    paged__j_push(run, pair, b);
    return pair;
}

j_value paged__j_dict(paged__j_run *run) {
    j_dict *dict = paged__j_alloc(run, 1, sizeof *dict);
    if (!dict) return paged__j_undefined();
    *dict = (j_dict){0};
    return (j_value){.kind = J_DICT, .dict = dict};
}

static uint64_t hash_bytes(const char *bytes, size_t n) {
    uint64_t h = 0xcbf29ce484222325u; /* FNV-1a */
    for (size_t i = 0; i < n; i++) h = (h ^ (uint8_t)bytes[i]) * 0x100000001b3u;
    return h;
}

/* Equal keys have equal hashes: 1, 1.0 and True are one key. False: not hashable. */
static bool hash_value(paged__j_run *run, j_value v, uint64_t *hash) {
    if (v.kind == J_STRING) {
        *hash = hash_bytes(v.s->bytes, v.s->len);
        return paged__j_step(run, v.s->len / 64);
    }
    if (v.kind == J_NONE || v.kind == J_UNDEFINED) {
        *hash = v.kind;
        return true;
    }
    if (paged__j_is_number(v)) {
        double real = paged__j_real(v);
        if (real == 0) real = 0; /* -0.0 */
        memcpy(hash, &real, sizeof real);
        *hash = paged__mix(*hash);
        return true;
    }
    if (v.kind == J_SEQ && v.seq->form == J_TUPLE && run->value_depth < J_VALUE_DEPTH) {
        bool ok = true;
        run->value_depth++;
        *hash = 7;
        for (size_t i = 0; ok && i < v.seq->n; i++) {
            uint64_t h = 0;
            ok = hash_value(run, v.seq->items[i], &h);
            *hash = paged__mix(*hash ^ h);
        }
        run->value_depth--;
        return ok;
    }
    paged__j_fail(run, PAGED_ERR_INVALID_ARG, "a %s cannot be a key", paged__j_type(v));
    return false;
}

static j_entry *find_entry(paged__j_run *run, const j_dict *dict, j_value key, uint64_t hash) {
    if (!paged__j_step(run, dict->n / 16)) return NULL;
    for (size_t i = 0; i < dict->n; i++)
        if (dict->entries[i].hash == hash && paged__j_equal(run, dict->entries[i].key, key))
            return &dict->entries[i];
    return NULL;
}

const j_entry *paged__j_dict_find(paged__j_run *run, const j_dict *dict, j_value key) {
    uint64_t hash;
    return hash_value(run, key, &hash) ? find_entry(run, dict, key, hash) : NULL;
}

void paged__j_dict_set(paged__j_run *run, j_dict *dict, j_value key, j_value value) {
    uint64_t hash;
    if (!hash_value(run, key, &hash)) return;
    j_entry *entry = find_entry(run, dict, key, hash);
    if (run->status) return;
    if (entry) {
        entry->value = value;
        return;
    }
    j_entry *entries = paged__j_grow(run, dict->entries, dict->n, &dict->cap, sizeof *entries);
    if (!entries) return;
    dict->entries = entries;
    entries[dict->n++] = (j_entry){key, value, hash};
}

const j_value *paged__j_dict_get(const j_dict *dict, const char *name, size_t len) {
    const uint64_t hash = hash_bytes(name, len);
    for (size_t i = 0; i < dict->n; i++) {
        const j_entry *e = &dict->entries[i];
        if (e->hash == hash && e->key.kind == J_STRING && e->key.s->len == len &&
            (len == 0 || memcmp(e->key.s->bytes, name, len) == 0))
            return &e->value;
    }
    return NULL;
}

/* ---- what values are ---- */

const char *paged__j_type(j_value v) {
    static const char *const names[] = {[J_UNDEFINED] = "undefined value",
                                        [J_NONE] = "none",
                                        [J_BOOL] = "boolean",
                                        [J_INT] = "integer",
                                        [J_FLOAT] = "float",
                                        [J_STRING] = "string",
                                        [J_SEQ] = "list",
                                        [J_DICT] = "dict",
                                        [J_NAMESPACE] = "namespace",
                                        [J_LOOP] = "loop",
                                        [J_MACRO] = "macro",
                                        [J_FUNCTION] = "function",
                                        [J_METHOD] = "method",
                                        [J_ABSENT] = "missing value"};
    static const char *const forms[] = {
        [J_LIST] = "list",         [J_TUPLE] = "tuple",           [J_RANGE] = "range",
        [J_KEYS] = "view of keys", [J_VALUES] = "view of values", [J_ITEMS] = "view of items",
        [J_ITERATOR] = "iterator"};
    return v.kind == J_SEQ ? forms[v.seq->form] : names[v.kind];
}

bool paged__j_is_number(j_value v) {
    return v.kind == J_INT || v.kind == J_FLOAT || v.kind == J_BOOL;
}

double paged__j_real(j_value v) {
    return v.kind == J_FLOAT ? v.f : (double)paged__j_integer(v);
}

int64_t paged__j_integer(j_value v) {
    return v.kind == J_BOOL ? v.b : v.i;
}

bool paged__j_truth(j_value v) {
    switch (v.kind) {
    case J_UNDEFINED:
    case J_NONE:
        return false;
    case J_BOOL:
        return v.b;
    case J_INT:
        return v.i != 0;
    case J_FLOAT:
        return v.f != 0;
    case J_STRING:
        return v.s->len != 0;
    case J_SEQ:
        return v.seq->n != 0 || v.seq->form == J_ITERATOR;
    case J_DICT:
        return v.dict->n != 0;
    default:
        return true;
    }
}

/* The order of an integer and a float, without rounding the integer. NaN: 2. */
static int compare_int_float(int64_t i, double f) {
    if (isnan(f)) return 2;
    if (f >= 0x1p63) return -1;
    if (f < -0x1p63) return 1;
    const int64_t whole = (int64_t)f;
    if (i != whole) return i < whole ? -1 : 1;
    const double rest = f - (double)whole;
    return rest > 0 ? -1 : rest < 0;
}

/* -1, 0, 1; 2: no order (NaN). */
static int compare_numbers(j_value a, j_value b) {
    if (a.kind == J_FLOAT && b.kind == J_FLOAT)
        return isnan(a.f) || isnan(b.f) ? 2 : a.f < b.f ? -1 : a.f > b.f;
    if (a.kind == J_FLOAT) {
        const int order = compare_int_float(paged__j_integer(b), a.f);
        return order == 2 ? 2 : -order;
    }
    if (b.kind == J_FLOAT) return compare_int_float(paged__j_integer(a), b.f);
    const int64_t x = paged__j_integer(a), y = paged__j_integer(b);
    return x < y ? -1 : x > y;
}

static int compare_strings(const j_string *a, const j_string *b) {
    const size_t n = PAGED_MIN(a->len, b->len);
    const int order = n ? memcmp(a->bytes, b->bytes, n) : 0;
    if (order) return order < 0 ? -1 : 1;
    return a->len < b->len ? -1 : a->len > b->len;
}

/* Enters a value inside a value; false: too deep. */
static bool enter(paged__j_run *run) {
    if (!paged__j_step(run, 1)) return false;
    if (run->value_depth >= J_VALUE_DEPTH) {
        paged__j_fail(run, PAGED_ERR_LIMIT, "a value is nested deeper than %d", J_VALUE_DEPTH);
        return false;
    }
    run->value_depth++;
    return true;
}

static bool equal_dicts(paged__j_run *run, const j_dict *a, const j_dict *b) {
    if (a->n != b->n) return false;
    for (size_t i = 0; i < a->n && !run->status; i++) {
        const j_entry *other = find_entry(run, b, a->entries[i].key, a->entries[i].hash);
        if (!other || !paged__j_equal(run, a->entries[i].value, other->value)) return false;
    }
    return true;
}

static bool equal_seqs(paged__j_run *run, const j_seq *a, const j_seq *b) {
    if (a->form != b->form || a->form > J_RANGE || a->n != b->n) return false;
    for (size_t i = 0; i < a->n && !run->status; i++)
        if (!paged__j_equal(run, a->items[i], b->items[i])) return false;
    return true;
}

bool paged__j_equal(paged__j_run *run, j_value a, j_value b) {
    if (paged__j_is_number(a) && paged__j_is_number(b)) return compare_numbers(a, b) == 0;
    if (a.kind != b.kind) return false;
    switch (a.kind) {
    case J_UNDEFINED:
    case J_NONE:
        return true;
    case J_STRING:
        return paged__j_step(run, a.s->len / 64) && paged__j_same(a.s, b.s);
    case J_SEQ:
    case J_DICT: {
        if ((a.kind == J_SEQ ? a.seq == b.seq : a.dict == b.dict)) return true;
        if (!enter(run)) return false;
        const bool same = a.kind == J_SEQ ? equal_seqs(run, a.seq, b.seq) : equal_dicts(run, a.dict, b.dict);
        run->value_depth--;
        return same;
    }
    case J_METHOD:
        return false;
    default:
        return a.dict == b.dict; /* the same object */
    }
}

static int no_order(paged__j_run *run, j_value a, j_value b) {
    paged__j_fail(run, PAGED_ERR_INVALID_ARG, "a %s and a %s have no order", paged__j_type(a),
                  paged__j_type(b));
    return 0;
}

int paged__j_compare(paged__j_run *run, j_value a, j_value b) {
    if (paged__j_is_number(a) && paged__j_is_number(b)) return compare_numbers(a, b);
    if (a.kind != b.kind) return no_order(run, a, b);
    if (a.kind == J_STRING) return paged__j_step(run, a.s->len / 64) ? compare_strings(a.s, b.s) : 0;
    if (a.kind != J_SEQ || a.seq->form != b.seq->form || a.seq->form > J_TUPLE) return no_order(run, a, b);
    if (!enter(run)) return 0;
    int order = 0;
    const size_t n = PAGED_MIN(a.seq->n, b.seq->n);
    for (size_t i = 0; order == 0 && i < n && !run->status; i++)
        if (!paged__j_equal(run, a.seq->items[i], b.seq->items[i]))
            order = paged__j_compare(run, a.seq->items[i], b.seq->items[i]);
    if (order == 0) order = a.seq->n < b.seq->n ? -1 : a.seq->n > b.seq->n;
    run->value_depth--;
    return order;
}

bool paged__j_contains(paged__j_run *run, j_value container, j_value item) {
    if (container.kind == J_STRING) {
        if (item.kind == J_STRING)
            return paged__j_step(run, container.s->len / 64) &&
                   paged__j_find(container.s, item.s, 0) != SIZE_MAX;
        paged__j_fail(run, PAGED_ERR_INVALID_ARG, "a %s cannot be in a string", paged__j_type(item));
        return false;
    }
    if (container.kind == J_DICT) return paged__j_dict_find(run, container.dict, item) != NULL;
    const j_seq *seq = paged__j_iterate(run, container);
    for (size_t i = 0; seq && i < seq->n && paged__j_step(run, 1); i++)
        if (paged__j_equal(run, seq->items[i], item)) return true;
    return false;
}

static j_seq *chars_of(paged__j_run *run, const j_string *s) {
    j_value list = paged__j_seq(run, J_LIST);
    for (size_t pos = 0, n; pos < s->len && !run->status; pos += n) {
        uint32_t code;
        n = paged__j_char(s->bytes + pos, s->len - pos, &code);
        paged__j_push(run, list, paged__j_string(run, paged__j_cut(s, pos, pos + n)));
    }
    return run->status ? NULL : list.seq;
}

j_seq *paged__j_iterate(paged__j_run *run, j_value v) {
    j_value list;
    switch (v.kind) {
    case J_SEQ: {
        if (v.seq->form != J_ITERATOR) return v.seq;
        list = paged__j_seq(run, J_LIST);
        if (run->status) return NULL;
        j_seq *used = list.seq;
        *used = *v.seq;
        used->form = J_LIST;
        *v.seq = (j_seq){.form = J_ITERATOR};
        return used;
    }
    case J_STRING:
        return chars_of(run, v.s);
    case J_UNDEFINED:
        list = paged__j_seq(run, J_LIST);
        return run->status ? NULL : list.seq;
    case J_DICT:
        list = paged__j_seq(run, J_LIST);
        for (size_t i = 0; i < v.dict->n && !run->status; i++)
            paged__j_push(run, list, v.dict->entries[i].key);
        return run->status ? NULL : list.seq;
    default:
        paged__j_fail(run, PAGED_ERR_INVALID_ARG, "a %s cannot be iterated", paged__j_type(v));
        return NULL;
    }
}

bool paged__j_length(paged__j_run *run, j_value v, int64_t *n) {
    if (v.kind == J_STRING && paged__j_step(run, v.s->len / 64))
        *n = (int64_t)paged__j_count_chars(v.s);
    else if (v.kind == J_SEQ && v.seq->form != J_ITERATOR)
        *n = (int64_t)v.seq->n;
    else if (v.kind == J_DICT)
        *n = (int64_t)v.dict->n;
    else if (v.kind == J_UNDEFINED)
        *n = 0;
    else /* or too many steps, which stays the error */
        paged__j_fail(run, PAGED_ERR_INVALID_ARG, "a %s has no length", paged__j_type(v));
    return run->status == PAGED_OK;
}
