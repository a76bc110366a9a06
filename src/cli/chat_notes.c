/* cli/chat_notes.c: see chat_notes.h. */
#include "cli/chat_notes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "base/base.h"
#include "server/note.h"
#include "server/text.h"

enum { ID_BYTES = 40, TITLE_BYTES = 60, KEEP_DAYS = 30, LISTED_MAX = 1000 };

void paged__chat_note_free(paged__chat_note *n) {
    json_decref(n->note);
    n->note = NULL;
}

int paged__chat_note_begin(paged__cli *cli, paged__chat_note *n, const char *system) {
    uint64_t id[2];
    char name[ID_BYTES];
    if (!n->notes) return PAGED__EXIT_OK;
    if (getrandom(id, sizeof id, 0) != sizeof id) id[0] = paged__now_ns(), id[1] = paged__mix(id[0]);
    snprintf(name, sizeof name, "conv-%016llx%016llx", (unsigned long long)id[0], (unsigned long long)id[1]);
    json_t *messages = system ? json_pack("[{s:s, s:o}]", "role", "system", "content",
                                          paged__json_text(system, strlen(system)))
                              : json_array();
    json_t *note = paged__note_create(name, json_null(), messages);
    if (!note) return paged__error(cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
    json_decref(n->note);
    n->note = note;
    return PAGED__EXIT_OK;
}

/* ---- reading ---- */

static const char *text_of(const json_t *object, const char *name) {
    return json_string_value(json_object_get(object, name));
}

static json_t *read_note(const paged_notes *notes, const char *id, paged_status *status, paged_error *err) {
    void *data = NULL;
    size_t size = 0;
    *status = notes->get(notes->self, id, SIZE_MAX, &data, &size, err);
    if (*status) return NULL;
    json_t *note = json_loadb(data, size, JSON_REJECT_DUPLICATES, NULL);
    free(data);
    const char *own = text_of(note, "id");
    if (own && strcmp(own, id) == 0 && json_is_array(json_object_get(note, "messages"))) return note;
    json_decref(note);
    *status = paged__fail(err, PAGED_ERR_FORMAT, "%s cannot be read: it is no conversation", id);
    return NULL;
}

typedef struct names {
    char (*ids)[ID_BYTES];
    int32_t n, n_max;
} names;

static bool add_name(void *user, const char *name, int64_t changed) {
    names *to = user;
    (void)changed;
    if (strncmp(name, "conv-", 5) == 0 && strlen(name) < ID_BYTES) strcpy(to->ids[to->n++], name);
    return to->n < to->n_max;
}

int paged__chat_note_open(paged__cli *cli, paged__chat_note *n, const char *id) {
    char newest[1][ID_BYTES];
    names found = {.ids = newest, .n_max = 1};
    paged_error err;
    paged_status status = PAGED_OK;
    if (!n->notes)
        return paged__usage_error(cli, "--resume needs the place where conversations are kept: --store");
    if (!id) {
        status = n->notes->list(n->notes->self, add_name, &found, &err);
        if (status == PAGED_OK && found.n == 0)
            return paged__error(cli, "there is no conversation to resume");
        id = newest[0];
    }
    json_t *note = status == PAGED_OK ? read_note(n->notes, id, &status, &err) : NULL;
    if (!note) return paged__error(cli, "%s", err.message);
    json_decref(n->note);
    n->note = note;
    return PAGED__EXIT_OK;
}

/* The content of a message of this role; NULL: it is none. */
static const char *content_of(const json_t *message, const char *role) {
    const char *own = text_of(message, "role");
    const json_t *content = json_object_get(message, "content");
    if (!own || strcmp(own, role) != 0) return NULL;
    if (json_is_array(content)) content = json_object_get(json_array_get(content, 0), "text");
    return json_string_value(content);
}

const char *paged__chat_note_system(const paged__chat_note *n) {
    return content_of(json_array_get(json_object_get(n->note, "messages"), 0), "system");
}

/* A list of numbers; NULL: it is none, or there is no memory. */
static int32_t *numbers_of(const json_t *list, int32_t *n) {
    const size_t size = json_array_size(list);
    int32_t *numbers =
        json_is_array(list) && size <= INT32_MAX / 8 ? paged__alloc(size, sizeof *numbers) : NULL;
    for (size_t i = 0; numbers && i < size; i++) {
        const json_int_t value = json_integer_value(json_array_get(list, i));
        /* What is none of a model's ids is refused by whoever takes them. */
        numbers[i] = value < 0 || value > INT32_MAX ? -1 : (int32_t)value;
    }
    *n = (int32_t)size;
    return numbers;
}

/* The tokens as they were, if they are those of all messages. */
static bool restore_tokens(const paged__chat_note *n, paged_conversation *talk) {
    const size_t n_messages = json_array_size(json_object_get(n->note, "messages"));
    int32_t n_tokens, n_turns;
    if ((size_t)json_integer_value(json_object_get(n->note, "tokens_at")) != n_messages) return false;
    int32_t *tokens = numbers_of(json_object_get(n->note, "tokens"), &n_tokens);
    int32_t *turns = numbers_of(json_object_get(n->note, "turns"), &n_turns);
    const bool ok = tokens && turns &&
                    paged_conversation_restore(talk, tokens, n_tokens, turns, n_turns, NULL) == PAGED_OK;
    paged__free(tokens);
    paged__free(turns);
    return ok;
}

int paged__chat_note_restore(paged__cli *cli, const paged__chat_note *n, paged_conversation *talk) {
    const json_t *messages = json_object_get(n->note, "messages");
    if (restore_tokens(n, talk)) return PAGED__EXIT_OK;
    /* Another model's, or somebody has added turns elsewhere: what was said is said again. */
    for (size_t i = 0; i + 1 < json_array_size(messages); i++) {
        const char *user = content_of(json_array_get(messages, i), "user"),
                   *answer = content_of(json_array_get(messages, i + 1), "assistant");
        paged_error err;
        if (!user || !answer) continue;
        if (paged_conversation_add_turn(talk, user, answer, &err) != PAGED_OK)
            return paged__error(cli, "%s", err.message);
    }
    return PAGED__EXIT_OK;
}

/* ---- writing ---- */

static json_t *json_numbers(const int32_t *numbers, int32_t n) {
    json_t *list = json_array();
    for (int32_t i = 0; i < n; i++) json_array_append_new(list, json_integer(numbers[i]));
    return list;
}

static json_t *sizes_of(const paged_conversation *talk) {
    paged_conversation_info info;
    json_t *list = json_array();
    paged_conversation_get_info(talk, &info);
    for (int32_t i = 0, first, n; i < info.n_turns; i++)
        if (paged_conversation_turn(talk, i, &first, &n) == PAGED_OK)
            json_array_append_new(list, json_integer(n));
    return list;
}

/* The beginning of what was said first, cut between characters. */
static json_t *title_of(const char *user) {
    size_t n = strcspn(user, "\r\n");
    if (n > TITLE_BYTES)
        for (n = TITLE_BYTES; n > 0 && ((unsigned char)user[n] & 0xc0) == 0x80;) n--;
    return paged__json_text(user, n);
}

static paged_status save(paged__chat_note *n, paged_error *err) {
    const json_int_t now = (json_int_t)time(NULL),
                     expires = json_integer_value(json_object_get(n->note, "expires_at"));
    const bool is_pinned = json_is_true(json_object_get(n->note, "pinned"));
    json_object_set_new(n->note, "updated_at", json_integer(now));
    const int64_t until = is_pinned ? 0 : expires > 0 ? expires : now + KEEP_DAYS * 86400;
    return paged__note_write(n->notes, n->note, until, err);
}

void paged__chat_note_add(paged__cli *cli, paged__chat_note *n, const paged_conversation *talk,
                          const char *user, const char *answer, size_t answer_len) {
    int32_t n_tokens;
    paged_error err;
    if (!n->note) return;
    json_t *messages = json_object_get(n->note, "messages");
    const int32_t *tokens = paged_conversation_tokens(talk, &n_tokens);
    json_array_append_new(
        messages, json_pack("{s:s, s:o}", "role", "user", "content", paged__json_text(user, strlen(user))));
    json_array_append_new(messages, json_pack("{s:s, s:o}", "role", "assistant", "content",
                                              paged__json_text(answer, answer_len)));
    if (!json_is_string(json_object_get(n->note, "title")))
        json_object_set_new(n->note, "title", title_of(user));
    json_object_set_new(n->note, "tokens", json_numbers(tokens, n_tokens));
    json_object_set_new(n->note, "turns", sizes_of(talk));
    json_object_set_new(n->note, "tokens_at", json_integer((json_int_t)json_array_size(messages)));
    if (save(n, &err) == PAGED_OK || n->has_told) return;
    n->has_told = true;
    paged__error(cli, "the conversation is not kept: %s", err.message);
}

/* ---- the list ---- */

static void print_note(paged__cli *cli, const json_t *note) {
    const time_t changed = (time_t)json_integer_value(json_object_get(note, "updated_at"));
    const char *title = text_of(note, "title");
    char when[32], name[TITLE_BYTES * 4 + 1];
    struct tm tm;
    strftime(when, sizeof when, "%Y-%m-%d %H:%M", localtime_r(&changed, &tm));
    /* A terminal obeys control characters, and a title is anybody's. */
    snprintf(name, sizeof name, "%s", title ? title : "");
    for (char *c = name; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 0x7f) *c = ' ';
    paged__out_printf(cli, "%s  %s  %3lld messages  %s%s\n", text_of(note, "id"), when,
                      (long long)json_integer_value(json_object_get(note, "n_messages")),
                      json_is_true(json_object_get(note, "pinned")) ? "* " : "", name);
}

int paged__chat_note_list(paged__cli *cli, const paged_notes *notes) {
    names found = {.n_max = LISTED_MAX, .ids = paged__calloc(LISTED_MAX, ID_BYTES)};
    paged_error err;
    if (!found.ids) return paged__error(cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
    const paged_status status = notes->list(notes->self, add_name, &found, &err);
    for (int32_t i = 0; status == PAGED_OK && i < found.n; i++) {
        json_t *note = paged__note_outline(notes, found.ids[i]);
        if (note) print_note(cli, note);
        json_decref(note);
    }
    paged__free(found.ids);
    return status == PAGED_OK ? PAGED__EXIT_OK : paged__error(cli, "%s", err.message);
}
