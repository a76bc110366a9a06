/* server/note.c: see note.h. */
#include "server/note.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/base.h"

enum { OUTLINE_BYTES = 2048 /* a title has 200 bytes, a salt 256 */ };

json_t *paged__note_create(const char *id, json_t *salt, json_t *messages) {
    const json_int_t now = (json_int_t)time(NULL);
    return json_pack("{s:i, s:s, s:I, s:I, s:n, s:b, s:n, s:O, s:I, s:o}", "paged", 1, "id", id, "created_at",
                     now, "updated_at", now, "title", "pinned", 0, "expires_at", "cache_salt", salt,
                     "n_messages", (json_int_t)json_array_size(messages), "messages", messages);
}

static bool is_message(const json_t *message) {
    const json_t *content = json_object_get(message, "content");
    return json_is_string(json_object_get(message, "role")) &&
           (json_is_string(content) || json_is_array(content));
}

bool paged__note_are_messages(const json_t *list) {
    bool ok = json_is_array(list);
    for (size_t i = 0; ok && i < json_array_size(list); i++) ok = is_message(json_array_get(list, i));
    return ok;
}

static bool is_outline(const json_t *note, const char *id) {
    const char *own = json_string_value(json_object_get(note, "id"));
    const json_t *title = json_object_get(note, "title"), *salt = json_object_get(note, "cache_salt"),
                 *expires = json_object_get(note, "expires_at");
    return own && strcmp(own, id) == 0 && json_integer_value(json_object_get(note, "paged")) == 1 &&
           json_is_integer(json_object_get(note, "created_at")) &&
           json_is_integer(json_object_get(note, "updated_at")) &&
           (json_is_string(title) || json_is_null(title)) &&
           json_is_boolean(json_object_get(note, "pinned")) &&
           (json_is_integer(expires) || json_is_null(expires)) &&
           (json_is_string(salt) || json_is_null(salt));
}

json_t *paged__note_read(const paged_notes *notes, const char *id, paged_status *status, paged_error *err) {
    void *data = NULL;
    size_t size = 0;
    *status = notes->get(notes->self, id, SIZE_MAX, &data, &size, err);
    if (*status) return NULL;
    json_t *note = json_loadb(data, size, JSON_REJECT_DUPLICATES, NULL);
    free(data);
    if (is_outline(note, id) && paged__note_are_messages(json_object_get(note, "messages"))) return note;
    json_decref(note);
    *status = paged__fail(err, PAGED_ERR_FORMAT, "its note of %zu bytes is no conversation", size);
    return NULL;
}

static void set_count(json_t *note) {
    const size_t n = json_array_size(json_object_get(note, "messages"));
    json_object_set_new(note, "n_messages", json_integer((json_int_t)n));
}

json_t *paged__note_outline(const paged_notes *notes, const char *id) {
    /* A quotation mark in a text would have a backslash before it, so this stands where it says. */
    static const char rest[] = ",\"messages\":";
    void *data = NULL;
    size_t size = 0;
    paged_status status = notes->get(notes->self, id, OUTLINE_BYTES, &data, &size, NULL);
    if (status) return NULL;
    char *end = memmem(data, size, rest, strlen(rest));
    json_t *note = NULL;
    if (end) {
        *end = '}';
        note = json_loadb(data, (size_t)(end + 1 - (char *)data), JSON_REJECT_DUPLICATES, NULL);
    }
    free(data);
    if (is_outline(note, id) && json_is_integer(json_object_get(note, "n_messages"))) return note;
    json_decref(note);
    /* Its fields stand in another order, or are longer. */
    note = paged__note_read(notes, id, &status, NULL);
    if (note) set_count(note);
    return note;
}

/* As note.h has it, whatever order the fields of the note that was read had. NULL: no memory. */
static json_t *in_order(json_t *note) {
    static const char *const first[] = {"paged",  "id",         "created_at", "updated_at", "title",
                                        "pinned", "expires_at", "cache_salt", "n_messages", "messages"};
    json_t *ordered = json_object();
    for (size_t i = 0; i < sizeof first / sizeof first[0]; i++) {
        json_t *value = json_object_get(note, first[i]);
        if (value) json_object_set(ordered, first[i], value);
    }
    if (json_object_update_missing(ordered, note) == 0) return ordered;
    json_decref(ordered);
    return NULL;
}

paged_status paged__note_write(const paged_notes *notes, json_t *note, int64_t until, paged_error *err) {
    set_count(note);
    json_t *ordered = in_order(note);
    char *text = ordered ? json_dumps(ordered, JSON_COMPACT) : NULL;
    json_decref(ordered);
    if (!text) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a conversation");
    const char *id = json_string_value(json_object_get(note, "id"));
    const paged_status status = notes->put(notes->self, id, text, strlen(text), until, err);
    free(text);
    return status;
}
