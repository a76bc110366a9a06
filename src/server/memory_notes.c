/* server/memory_notes.c: notes in memory (keeper.h), for a server that keeps nothing elsewhere. A list,
 * newest first: there are few, and they are asked for by people. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/base.h"
#include "server/keeper.h"

typedef struct note {
    struct note *next;
    char name[129];
    void *data; /* [size_bytes], owned */
    size_t size_bytes;
    int64_t until, changed;
} note;

typedef struct memory {
    note *first;
    int32_t n_notes, n_max;
    size_t n_bytes, bytes_max;
} memory;

static void free_note(memory *m, note *n) {
    m->n_notes--;
    m->n_bytes -= n->size_bytes;
    paged__free(n->data);
    paged__free(n);
}

/* Where the link to a note is; those whose time is over go on the way. NULL: there is none of that name. */
static note **find(memory *m, const char *name) {
    const int64_t now = (int64_t)time(NULL);
    for (note **at = &m->first; *at;) {
        note *n = *at;
        if (n->until && n->until <= now) {
            *at = n->next;
            free_note(m, n);
        } else if (strcmp(n->name, name) == 0) {
            return at;
        } else {
            at = &n->next;
        }
    }
    return NULL;
}

static paged_status erase_note(void *self, const char *name, paged_error *err) {
    memory *m = self;
    note **at = find(m, name);
    if (!at) return paged__fail(err, PAGED_ERR_NOT_FOUND, "there is no %s", name);
    note *n = *at;
    *at = n->next;
    free_note(m, n);
    return PAGED_OK;
}

static paged_status put_note(void *self, const char *name, const void *data, size_t size_bytes, int64_t until,
                             paged_error *err) {
    memory *m = self;
    note **at = find(m, name);
    const size_t others = m->n_bytes - (at ? (*at)->size_bytes : 0);
    if ((!at && m->n_notes >= m->n_max) || size_bytes > m->bytes_max || others > m->bytes_max - size_bytes)
        return paged__fail(err, PAGED_ERR_LIMIT, "%d are kept in memory, %zu bytes; at most %d, %zu",
                           m->n_notes, m->n_bytes, m->n_max, m->bytes_max);
    note *fresh = paged__calloc(1, sizeof *fresh);
    void *copy = fresh ? paged__alloc(size_bytes, 1) : NULL;
    if (!copy || strlen(name) >= sizeof fresh->name) {
        paged__free(fresh);
        paged__free(copy);
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for %zu bytes", size_bytes);
    }
    memcpy(copy, data, size_bytes);
    strcpy(fresh->name, name);
    fresh->data = copy;
    fresh->size_bytes = size_bytes;
    fresh->until = until;
    fresh->changed = (int64_t)time(NULL);
    if (at) erase_note(m, name, NULL);
    fresh->next = m->first;
    m->first = fresh;
    m->n_notes++;
    m->n_bytes += size_bytes;
    return PAGED_OK;
}

static paged_status get_note(void *self, const char *name, size_t max_bytes, void **data, size_t *size_bytes,
                             paged_error *err) {
    memory *m = self;
    note **at = find(m, name);
    if (!at) return paged__fail(err, PAGED_ERR_NOT_FOUND, "there is no %s", name);
    const size_t n = PAGED_MIN((*at)->size_bytes, max_bytes);
    void *copy = malloc(n + 1);
    if (!copy) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for %zu bytes", n);
    memcpy(copy, (*at)->data, n);
    *data = copy;
    *size_bytes = n;
    return PAGED_OK;
}

static paged_status list_notes(void *self, bool (*fn)(void *user, const char *name, int64_t changed),
                               void *user, paged_error *err) {
    memory *m = self;
    (void)err;
    find(m, ""); /* no name: those go whose time is over */
    for (const note *n = m->first; n; n = n->next)
        if (!fn(user, n->name, n->changed)) break;
    return PAGED_OK;
}

static void close_notes(void *self) {
    memory *m = self;
    while (m->first) {
        note *next = m->first->next;
        free_note(m, m->first);
        m->first = next;
    }
    paged__free(m);
}

paged_status paged__memory_notes(int32_t n_max, size_t bytes_max, paged_notes *out, paged_error *err) {
    memory *m = paged__calloc(1, sizeof *m);
    if (!m) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for notes");
    m->n_max = n_max;
    m->bytes_max = bytes_max;
    *out = (paged_notes){m, put_note, get_note, erase_note, list_notes, close_notes};
    return PAGED_OK;
}
