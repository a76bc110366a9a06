/* file_notes.c: the notes of the file store, which lie in its index. */
#include <stdio.h>

#include "store/file.h"

/* A note is a transaction of its own, so that it does not fail with records that are lost. */
static paged_status enter_notes(paged__file_store *s, paged_error *err) {
    const paged_status status = paged__file_store_enter(s, err);
    if (!status && !s->config.read_only) paged__file_store_commit(s, NULL);
    return status;
}

/* One that was not there to be erased has changed nothing, and a rollback would forget which keys there
 * are. */
static paged_status commit_note(paged__file_store *s, paged_status status, paged_error *err) {
    const bool is_kept = !status || status == PAGED_ERR_NOT_FOUND;
    const paged_status ended = is_kept ? paged__index_commit(&s->index, status ? NULL : err) : status;
    if (ended) paged__index_rollback(&s->index);
    return status ? status : ended;
}

static paged_status note_put(void *self, const char *name, const void *data, size_t size_bytes, int64_t until,
                             paged_error *err) {
    paged__file_store *s = self;
    paged_status status = paged__note_check(name, size_bytes, err);
    if (status) return status;
    if (s->config.read_only) return paged__fail(err, PAGED_ERR_LIMIT, "%s is open for reading only", s->dir);
    status = enter_notes(s, err);
    if (!status) {
        status =
            paged__index_note_put(&s->index, name, data, size_bytes, paged__system()->wall_s(), until, err);
        status = commit_note(s, status, err);
    }
    return paged__file_store_leave(s, status);
}

static paged_status note_get(void *self, const char *name, size_t max_bytes, void **data, size_t *size_bytes,
                             paged_error *err) {
    paged__file_store *s = self;
    paged_status status = paged__note_check(name, 0, err);
    if (status) return status;
    status = paged__file_store_enter(s, err);
    if (!status)
        status = paged__index_note_get(&s->index, name, paged__system()->wall_s(), max_bytes, data,
                                       size_bytes, err);
    return paged__file_store_leave(s, status);
}

static paged_status note_erase(void *self, const char *name, paged_error *err) {
    paged__file_store *s = self;
    paged_status status = paged__note_check(name, 0, err);
    if (status) return status;
    if (s->config.read_only) return paged__fail(err, PAGED_ERR_LIMIT, "%s is open for reading only", s->dir);
    status = enter_notes(s, err);
    if (!status) status = commit_note(s, paged__index_note_erase(&s->index, name, err), err);
    return paged__file_store_leave(s, status);
}

typedef struct note_list {
    struct note_line {
        char name[136];
        int64_t changed;
    } * lines; /* [n_room] */
    int32_t n, n_room;
    bool no_memory;
} note_list;

static bool add_note(void *user, const char *name, int64_t changed) {
    note_list *list = user;
    if (list->n == list->n_room) {
        const int32_t n_room = list->n_room ? 2 * list->n_room : 64;
        struct note_line *lines = paged__alloc((size_t)n_room, sizeof *lines);
        if (lines && list->n) memcpy(lines, list->lines, (size_t)list->n * sizeof *lines);
        list->no_memory = lines == NULL;
        if (!lines) return false;
        paged__free(list->lines);
        list->lines = lines;
        list->n_room = n_room;
    }
    snprintf(list->lines[list->n].name, sizeof list->lines->name, "%s", name ? name : "");
    list->lines[list->n++].changed = changed;
    return true;
}

/* fn runs outside of the lock, since it may want the notes it hears of. */
static paged_status note_each(void *self, bool (*fn)(void *user, const char *name, int64_t changed),
                              void *user, paged_error *err) {
    paged__file_store *s = self;
    note_list list = {0};
    paged_status status = paged__file_store_enter(s, err);
    if (!status) status = paged__index_note_each(&s->index, paged__system()->wall_s(), add_note, &list, err);
    if (!status && list.no_memory) status = paged__fail(err, PAGED_ERR_NO_MEMORY, "%d names", list.n);
    paged__file_store_leave(s, status);
    for (int32_t i = 0; i < list.n && !status; i++)
        if (!fn(user, list.lines[i].name, list.lines[i].changed)) break;
    paged__free(list.lines);
    return status;
}

paged_notes paged__file_notes(paged__file_store *s, void (*close)(void *self)) {
    return (paged_notes){s, note_put, note_get, note_erase, note_each, close};
}
