/* Goal: a list of conversations reads the beginning of each note, and shows what the whole note says,
 * whatever was written there and by whom. Method: notes in memory behind a get that counts bytes; titles
 * and messages that look like the note's own words; notes in other orders, cut and damaged. */
#include <stdlib.h>
#include <string.h>

#include "server/keeper.h"
#include "server/note.h"
#include "test.h"

static paged_notes memory;
static size_t n_read;
static int32_t n_gets;

static paged_status counted_get(void *self, const char *name, size_t max_bytes, void **data,
                                size_t *size_bytes, paged_error *err) {
    const paged_status status = memory.get(self, name, max_bytes, data, size_bytes, err);
    n_gets++;
    if (!status) n_read += *size_bytes;
    return status;
}

static paged_notes open_notes(void) {
    CHECK_EQ(paged__memory_notes(100, 64 << 20, &memory, NULL), PAGED_OK);
    paged_notes notes = memory;
    notes.get = counted_get;
    n_read = 0;
    n_gets = 0;
    return notes;
}

/* n messages of a user, 1000 bytes each. */
static json_t *messages_of(int n, const char *text) {
    static char long_text[1001];
    memset(long_text, 'x', 1000);
    json_t *list = json_array();
    for (int i = 0; i < n; i++)
        json_array_append_new(list, json_pack("{s:s, s:s}", "role", "user", "content", i ? long_text : text));
    return list;
}

static void check_outline(const paged_notes *notes, const char *id, const char *title, int n_messages) {
    json_t *outline = paged__note_outline(notes, id);
    CHECK(outline != NULL);
    CHECK(strcmp(json_string_value(json_object_get(outline, "title")), title) == 0);
    CHECK_EQ(json_integer_value(json_object_get(outline, "n_messages")), n_messages);
    CHECK_EQ(json_integer_value(json_object_get(outline, "updated_at")), 1700000000);
    json_decref(outline);
}

static void write_note(const paged_notes *notes, const char *id, const char *title, int n_messages) {
    json_t *note = paged__note_create(id, json_null(), messages_of(n_messages - 1, title));
    /* A turn later, as the server and the terminal do it. */
    json_array_append_new(json_object_get(note, "messages"),
                          json_pack("{s:s, s:s}", "role", "assistant", "content", title));
    json_object_set_new(note, "title", json_string(title));
    json_object_set_new(note, "updated_at", json_integer(1700000000));
    json_object_set_new(note, "tokens", json_pack("[i, i]", 1, 2));
    CHECK_EQ(paged__note_write(notes, note, 0, NULL), PAGED_OK);
    json_decref(note);
}

static void a_list_reads_beginnings(void) {
    static const char *const titles[] = {"Sums", ",\"messages\":[]", "\"},\"messages\":\"",
                                         "a\\\",\"messages\":", "\xe4\xbd\xa0\xe5\xa5\xbd \x01\x1f"};
    for (int t = 0; t < 5; t++) {
        paged_notes notes = open_notes();
        write_note(&notes, "conv-a", titles[t], 500);
        check_outline(&notes, "conv-a", titles[t], 500);
        CHECK_EQ(n_gets, 1);
        CHECK(n_read <= 2048);
        /* Read and written again it is as short. */
        paged_status status;
        json_t *note = paged__note_read(&notes, "conv-a", &status, NULL);
        CHECK(note && json_array_size(json_object_get(note, "messages")) == 500);
        json_array_append_new(json_object_get(note, "messages"),
                              json_pack("{s:s, s:s}", "role", "user", "content", "more"));
        CHECK_EQ(paged__note_write(&notes, note, 0, NULL), PAGED_OK);
        json_decref(note);
        n_read = 0;
        check_outline(&notes, "conv-a", titles[t], 501);
        CHECK(n_read <= 2048);
        notes.close(notes.self);
    }
}

/* The longest title, and each byte of it six in JSON: the beginning may not reach. */
static void long_beginnings(void) {
    char title[801];
    paged_notes notes = open_notes();
    memset(title, 'x', 200);
    title[200] = 0;
    write_note(&notes, "conv-a", title, 10);
    check_outline(&notes, "conv-a", title, 10);
    CHECK_EQ(n_gets, 1);
    memset(title, 1, 800);
    title[800] = 0;
    write_note(&notes, "conv-b", title, 10);
    check_outline(&notes, "conv-b", title, 10);
    CHECK_EQ(n_gets, 3);
    notes.close(notes.self);
}

static void put_text(const paged_notes *notes, const char *id, const char *text) {
    CHECK_EQ(notes->put(notes->self, id, text, strlen(text), 0, NULL), PAGED_OK);
}

static void other_notes(void) {
    paged_notes notes = open_notes();
    /* Without a count, with the count behind the messages, in another order and with spaces. */
    put_text(&notes, "conv-a",
             "{\"paged\":1,\"id\":\"conv-a\",\"created_at\":1,\"updated_at\":1700000000,\"title\":\"old\","
             "\"pinned\":false,\"expires_at\":null,\"cache_salt\":null,\"messages\":[{\"role\":\"user\","
             "\"content\":\"hi\"}],\"n_messages\":7}");
    check_outline(&notes, "conv-a", "old", 1);
    put_text(
        &notes, "conv-b",
        "{ \"messages\": [], \"paged\": 1, \"id\": \"conv-b\", \"created_at\": 1, \"updated_at\": 1700000000,"
        "\"title\": \"mixed\", \"pinned\": true, \"expires_at\": 5, \"cache_salt\": \"s\"}");
    check_outline(&notes, "conv-b", "mixed", 0);
    /* Once written again they have it before the messages, and nothing is lost. */
    for (char c = 'a'; c <= 'b'; c++) {
        const char id[] = {'c', 'o', 'n', 'v', '-', c, 0};
        paged_status status;
        json_t *note = paged__note_read(&notes, id, &status, NULL);
        json_t *more = messages_of(300, "more");
        json_array_extend(json_object_get(note, "messages"), more);
        json_decref(more);
        json_object_set_new(note, "turns", json_pack("[i]", 9));
        CHECK_EQ(paged__note_write(&notes, note, 0, NULL), PAGED_OK);
        n_read = 0;
        n_gets = 0;
        check_outline(&notes, id, c == 'a' ? "old" : "mixed", c == 'a' ? 301 : 300);
        CHECK_EQ(n_gets, 1);
        CHECK(n_read <= 2048);
        json_t *again = paged__note_read(&notes, id, &status, NULL);
        CHECK(json_equal(again, note));
        json_decref(again);
        json_decref(note);
    }
    /* None at all: cut, of another id, of another kind. */
    put_text(&notes, "conv-c", "{\"paged\":1,\"id\":\"conv-c\",\"title\":\"x\"");
    put_text(&notes, "conv-d", "{\"paged\":1,\"id\":\"conv-a\",\"messages\":[]}");
    put_text(&notes, "conv-e", ",\"messages\":");
    put_text(&notes, "conv-f", "");
    for (char c = 'c'; c <= 'g'; c++) {
        const char id[] = {'c', 'o', 'n', 'v', '-', c, 0};
        CHECK(paged__note_outline(&notes, id) == NULL);
    }
    notes.close(notes.self);
}

#define TESTS(X) X(a_list_reads_beginnings) X(long_beginnings) X(other_notes)
TEST_MAIN(TESTS)
