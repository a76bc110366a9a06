/* server/conversation.c: see conversation.h.
 *
 *   POST   /v1/conversations           {"messages": […], "title", "pinned", "expires_at", "cache_salt"}:
 *                                      a new one
 *   GET    /v1/conversations           ?limit=N&after=ID: newest change first, without their messages
 *   GET    /v1/conversations/ID        one, with its messages
 *   PATCH  /v1/conversations/ID        {"title", "pinned", "expires_at"}
 *   DELETE /v1/conversations/ID
 *   POST   /v1/conversations/ID/turns  {"content": …} and the fields of a chat completion: says something
 *                                      and is answered like one; both are kept before its end is told.
 *                                      "n_messages": how many the client knows of; others: 409
 *   POST   /v1/conversations/ID/fork   {"messages": n}       a new one with the first n (all) messages
 *   POST   /v1/conversations/ID/drop   {"turns": n}          without its n oldest turns; a turn is what a
 *                                      user said and what follows it; a system message before them stays
 *
 * A request is a *visit*: what it needs is read by the keeper's thread (keeper.h), changed here, and written
 * by the keeper again. Nothing is remembered between visits, so that what another server wrote meanwhile is
 * seen. While one visit changes a conversation the others that would are answered 409; between servers the
 * balancer sees to it (docs/stores.md), and the last one to write has written.
 *
 * Behind the messages of a note (note.h) are "tokens" and "tokens_at": the tokens of the first tokens_at
 * messages as they were computed, which their text need not give again.
 */
#include "server/conversation.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>

#include "base/base.h"
#include "server/generate.h"
#include "server/keeper.h"
#include "server/note.h"
#include "server/route.h"
#include "server/text.h"

enum { ID_BYTES = 40, SALT_MAX = 256 };
enum { TITLE_MAX = 200, TITLE_TAKEN = 60, LIST_DEFAULT = 100, LIST_MAX = 1000 };

typedef struct paged__visit {
    paged__job job;
    struct paged__visit *next; /* of the server's, as long as it changes something */
    paged__conn *conn;         /* NULL: the client has left */
    char id[ID_BYTES], action[8];
    json_t *body;                                            /* owned, or NULL */
    json_t *note;                                            /* owned, or NULL: the conversation */
    json_t *said;                                            /* owned, or NULL: what a turn adds */
    paged__generation *generation;                           /* of a turn that waits to be kept */
    void (*go_on)(paged__server *s, struct paged__visit *v); /* when the job is done */
    bool changes, was_pinned;
    paged_service *service; /* for pins; NULL: there is none yet */
    int64_t until;
    /* of a list */
    int32_t limit;
    char after[ID_BYTES];
    /* how the job ended */
    paged_status status;
    paged_error err;
} visit;

/* ---- visits ---- */

static void free_visit(paged__server *s, visit *v) {
    for (visit **at = &s->visits; *at; at = &(*at)->next)
        if (*at == v) {
            *at = v->next;
            break;
        }
    json_decref(v->body);
    json_decref(v->note);
    json_decref(v->said);
    paged__free(v);
}

static void on_gone(paged__conn *conn) {
    visit *v = conn->work;
    v->conn = NULL;
}

static void on_done(paged__server *s, paged__job *job) {
    visit *v = (visit *)(void *)job;
    v->go_on(s, v);
}

/* Answers with an error, if there is somebody to answer, and ends the visit. */
__attribute__((format(printf, 6, 7))) static void
refuse(paged__server *s, visit *v, int status, const char *param, const char *code, const char *fmt, ...) {
    char message[600];
    va_list args;
    va_start(args, fmt);
    vsnprintf(message, sizeof message, fmt, args);
    va_end(args);
    paged__conn *conn = v->conn;
    free_visit(s, v);
    if (conn) paged__reply_error(conn, status, param, code, "%s", message);
}

/* The answer of an error of the notes. */
static void refuse_by(paged__server *s, visit *v) {
    char message[sizeof v->err.message];
    snprintf(message, sizeof message, "%s", v->err.message);
    if (v->status == PAGED_ERR_NOT_FOUND)
        refuse(s, v, 404, NULL, "not_found", "there is no conversation %.40s here", v->id);
    else if (v->status == PAGED_ERR_LIMIT)
        refuse(s, v, 429, NULL, "conversations_full", "the conversation cannot be kept: %s", message);
    else if (v->status == PAGED_ERR_INVALID_ARG)
        refuse(s, v, 413, NULL, "conversation_too_large", "the conversation cannot be kept: %s", message);
    else if (v->status == PAGED_ERR_FORMAT)
        refuse(s, v, 404, NULL, "damaged", "conversation %.40s cannot be read: %s", v->id, message);
    else
        refuse(s, v, 503, NULL, "store_down", "%s", message);
}

static void reply(paged__server *s, visit *v, json_t *value) {
    paged__conn *conn = v->conn;
    free_visit(s, v);
    if (conn)
        paged__reply_json(conn, 200, value);
    else
        json_decref(value);
}

/* Has the keeper do something, and goes on after it. */
static void ask(paged__server *s, visit *v, void (*work)(const paged_notes *, paged__job *),
                void (*go_on)(paged__server *, visit *)) {
    v->job.work = work;
    v->job.done = on_done;
    v->go_on = go_on;
    if (v->conn && !v->generation) {
        v->conn->work = v;
        v->conn->on_gone = on_gone;
    }
    if (paged__keeper_ask(s->keeper, &v->job)) return;
    v->status = paged__fail(&v->err, PAGED_ERR_IO, "too much waits to be read and written; try again");
    go_on(s, v);
}

/* ---- what the keeper's thread does ---- */

static void work_load(const paged_notes *notes, paged__job *job) {
    visit *v = (visit *)(void *)job;
    v->note = paged__note_read(notes, v->id, &v->status, &v->err);
}

/* The tokens of all messages that there are; owned by the caller. NULL: they are not known. */
static int32_t *known_tokens(const json_t *note, int32_t *n) {
    const json_t *list = json_object_get(note, "tokens");
    paged_error err;
    int32_t *tokens = NULL;
    if (json_integer_value(json_object_get(note, "tokens_at")) !=
            (json_int_t)json_array_size(json_object_get(note, "messages")) ||
        !paged__openai_tokens(list, "tokens", &tokens, n, &err))
        return NULL;
    return tokens;
}

/* It is no error where the store keeps no pins. */
static void pin(paged_service *service, const char *id, const char *salt, const int32_t *tokens, int32_t n) {
    paged_error err;
    const paged_status status = service ? paged_service_pin(service, id, salt, tokens, n, &err) : PAGED_OK;
    if (status && status != PAGED_ERR_UNSUPPORTED)
        paged__log(PAGED_LOG_WARN, "conversation %s: its pin is not changed: %s", id, err.message);
}

/* Blocks of a pinned conversation stay in the store, of another one they may go. The note comes first: what a
 * crash between the two leaves is mended by work_mend, or when the conversation is used. */
static void pin_blocks(const visit *v) {
    const bool is_pinned = json_is_true(json_object_get(v->note, "pinned"));
    const char *salt = json_string_value(json_object_get(v->note, "cache_salt"));
    int32_t n = 0;
    if (!is_pinned && !v->was_pinned) return;
    int32_t *tokens = is_pinned ? known_tokens(v->note, &n) : NULL;
    if (tokens || !is_pinned) pin(v->service, v->id, salt, tokens, n);
    paged__free(tokens);
}

static void work_save(const paged_notes *notes, paged__job *job) {
    visit *v = (visit *)(void *)job;
    v->status = paged__note_write(notes, v->note, v->until, &v->err);
    if (!v->status) pin_blocks(v);
}

/* One that is not there may have been erased by another server, or before a crash. */
static void work_erase(const paged_notes *notes, paged__job *job) {
    visit *v = (visit *)(void *)job;
    v->status = notes->erase(notes->self, v->id, &v->err);
    if (!v->status || v->status == PAGED_ERR_NOT_FOUND) pin(v->service, v->id, NULL, NULL, 0);
}

/* A name that pins something, one after the other with their NULs. */
static bool add_name(void *user, const char *name) {
    return strncmp(name, "conv-", 5) != 0 || paged__buffer_append(user, name, strlen(name) + 1);
}

/* Takes back the pins of conversations that are no more, or not pinned: a crash left them, or another server
 * erased the note. Pins are changed by this thread alone, so none of a note that was read comes meanwhile. */
static void work_mend(const paged_notes *notes, paged__job *job) {
    visit *v = (visit *)(void *)job;
    paged__buffer names = {0};
    if (paged_service_pins(v->service, add_name, &names, NULL) == PAGED_OK)
        for (size_t at = 0; at < names.len; at += strlen(names.data + at) + 1) {
            const char *id = names.data + at;
            paged_status status;
            json_t *note = paged__note_read(notes, id, &status, NULL);
            /* One that cannot be read now may be pinned. */
            if (status == PAGED_ERR_NOT_FOUND || (note && !json_is_true(json_object_get(note, "pinned"))))
                pin(v->service, id, NULL, NULL, 0);
            json_decref(note);
        }
    paged__free(names.data);
}

static json_t *describe(const json_t *note, bool with_messages) {
    json_t *messages = json_object_get(note, "messages");
    const json_int_t n_messages = messages ? (json_int_t)json_array_size(messages)
                                           : json_integer_value(json_object_get(note, "n_messages"));
    json_t *value = json_pack("{s:O, s:s, s:O, s:O, s:O, s:O, s:O, s:I}", "id", json_object_get(note, "id"),
                              "object", "conversation", "created_at", json_object_get(note, "created_at"),
                              "updated_at", json_object_get(note, "updated_at"), "title",
                              json_object_get(note, "title"), "pinned", json_object_get(note, "pinned"),
                              "expires_at", json_object_get(note, "expires_at"), "n_messages", n_messages);
    if (value && with_messages) json_object_set(value, "messages", messages);
    return value;
}

typedef struct page {
    const char *after; /* "": nothing is passed over any more */
    int32_t n, n_max;
    char (*ids)[ID_BYTES]; /* [n_max] */
    bool has_more;
} page;

static bool add_to_page(void *user, const char *name, int64_t changed) {
    page *p = user;
    (void)changed;
    if (strncmp(name, "conv-", 5) != 0 || strlen(name) >= ID_BYTES) return true;
    if (p->after[0]) {
        if (strcmp(name, p->after) == 0) p->after = "";
        return true;
    }
    p->has_more = p->n == p->n_max;
    if (p->has_more) return false;
    strcpy(p->ids[p->n++], name);
    return true;
}

static void work_list(const paged_notes *notes, paged__job *job) {
    visit *v = (visit *)(void *)job;
    page p = {.after = v->after, .n_max = v->limit, .ids = paged__calloc((size_t)v->limit, ID_BYTES)};
    json_t *data = json_array();
    v->status = p.ids && data ? notes->list(notes->self, add_to_page, &p, &v->err)
                              : paged__fail(&v->err, PAGED_ERR_NO_MEMORY, "no memory for a list");
    for (int32_t i = 0; v->status == PAGED_OK && i < p.n; i++) {
        json_t *note = paged__note_outline(notes, p.ids[i]);
        /* One that went meanwhile, or is damaged, is not in the list. */
        if (note) json_array_append_new(data, describe(note, false));
        json_decref(note);
    }
    paged__free(p.ids);
    v->note = json_pack("{s:s, s:o, s:b}", "object", "list", "data", data, "has_more", p.has_more);
}

/* ---- one conversation, here ---- */

static int64_t now_s(void) {
    return (int64_t)time(NULL);
}

/* The beginning of what the user said first, cut between characters. */
static void name_by_content(json_t *note) {
    const json_t *messages = json_object_get(note, "messages");
    if (json_is_string(json_object_get(note, "title"))) return;
    for (size_t i = 0; i < json_array_size(messages); i++) {
        const json_t *message = json_array_get(messages, i), *content = json_object_get(message, "content");
        const char *role = json_string_value(json_object_get(message, "role"));
        if (!role || strcmp(role, "user") != 0) continue;
        if (json_is_array(content)) content = json_object_get(json_array_get(content, 0), "text");
        const char *text = json_string_value(content);
        size_t n = text ? strcspn(text, "\r\n") : 0;
        if (n > TITLE_TAKEN)
            for (n = TITLE_TAKEN; n > 0 && ((unsigned char)text[n] & 0xc0) == 0x80;) n--;
        if (n) json_object_set_new(note, "title", json_stringn(text, n));
        return;
    }
}

/* Writes the note and goes on. */
static void save(paged__server *s, visit *v, void (*go_on)(paged__server *, visit *)) {
    const json_t *expires = json_object_get(v->note, "expires_at");
    const bool is_pinned = json_is_true(json_object_get(v->note, "pinned"));
    const int64_t days = s->config.conversation_days;
    json_object_set_new(v->note, "updated_at", json_integer((json_int_t)now_s()));
    name_by_content(v->note);
    v->until = is_pinned                  ? 0
               : json_is_integer(expires) ? PAGED_MAX((int64_t)json_integer_value(expires), 1)
               : days                     ? now_s() + days * 86400
                                          : 0;
    ask(s, v, work_save, go_on);
}

static void tell_saved(paged__server *s, visit *v) {
    if (v->status)
        refuse_by(s, v);
    else
        reply(s, v, describe(v->note, true));
}

/* The fields that a client may set, from the body into the note. False: refused, and the visit is over. */
static bool take_fields(paged__server *s, visit *v) {
    json_t *title = json_object_get(v->body, "title"), *pinned = json_object_get(v->body, "pinned"),
           *expires = json_object_get(v->body, "expires_at");
    if (title && !json_is_null(title) && (!json_is_string(title) || json_string_length(title) > TITLE_MAX)) {
        refuse(s, v, 400, "title", NULL, "title must be a string of at most %d bytes, or null", TITLE_MAX);
        return false;
    }
    if (pinned && !json_is_boolean(pinned)) {
        refuse(s, v, 400, "pinned", NULL, "pinned must be true or false");
        return false;
    }
    if (expires && !json_is_null(expires) &&
        (!json_is_integer(expires) || json_integer_value(expires) <= now_s() ||
         json_integer_value(expires) > (json_int_t)1 << 40)) {
        refuse(s, v, 400, "expires_at", NULL,
               "expires_at must be seconds since 1970, in the future, or null");
        return false;
    }
    if (title) json_object_set(v->note, "title", title);
    if (pinned) json_object_set(v->note, "pinned", pinned);
    if (expires) json_object_set(v->note, "expires_at", expires);
    return true;
}

/* A new id, which nobody guesses, and a note of these messages, which are taken. False: no memory. */
static bool make_note(visit *v, json_t *messages, json_t *salt) {
    uint64_t id[2];
    if (getrandom(id, sizeof id, 0) != sizeof id)
        id[0] = paged__mix(paged__now_ns()), id[1] = paged__mix(id[0]);
    snprintf(v->id, sizeof v->id, "conv-%016llx%016llx", (unsigned long long)id[0],
             (unsigned long long)id[1]);
    json_decref(v->note);
    v->note = paged__note_create(v->id, salt, messages);
    return v->note != NULL;
}

/* ---- turns ---- */

/* What a turn adds: "content" of a user, or messages; an empty list: neither. NULL: no memory. */
static json_t *take_said(const json_t *body) {
    json_t *content = json_object_get(body, "content"), *messages = json_object_get(body, "messages");
    if (json_is_string(content) || json_is_array(content))
        return json_pack("[{s:s, s:O}]", "role", "user", "content", content);
    return messages && paged__note_are_messages(messages) ? json_incref(messages) : json_array();
}

static void on_kept(paged__server *s, visit *v) {
    paged__generation *g = v->generation;
    paged_error err = v->err;
    const paged_status status = v->status;
    if (status) paged__log(PAGED_LOG_WARN, "conversation %s: a turn is not kept: %s", v->id, err.message);
    free_visit(s, v);
    if (g) paged__generation_end(g, status ? &err : NULL);
}

static void add_tokens(json_t *list, const int32_t *tokens, int32_t n) {
    for (int32_t i = 0; i < n; i++) json_array_append_new(list, json_integer(tokens[i]));
}

/* The tokens of all messages that there are, so that the next turn begins with them. */
static void keep_tokens(json_t *note, const paged__generation *g) {
    const int32_t *prompt, *answer;
    int32_t n_prompt, n_answer;
    json_t *list = json_array();
    paged__generation_tokens(g, &prompt, &n_prompt, &answer, &n_answer);
    add_tokens(list, prompt, n_prompt);
    add_tokens(list, answer, n_answer);
    json_object_set_new(note, "tokens", list);
    json_object_set_new(note, "tokens_at",
                        json_integer((json_int_t)json_array_size(json_object_get(note, "messages"))));
    json_object_del(note, "turns"); /* of paged chat, which writes other tokens */
}

/* The answer is there; its end is told when it has been kept. */
static bool on_answered(paged__server *s, void *user, const char *text, size_t len, paged__generation *g) {
    visit *v = user;
    json_t *messages = json_object_get(v->note, "messages");
    json_array_extend(messages, v->said);
    json_array_append_new(
        messages, json_pack("{s:s, s:o}", "role", "assistant", "content", paged__json_text(text, len)));
    keep_tokens(v->note, g);
    v->generation = g;
    save(s, v, on_kept);
    return true;
}

/* Refused, failed, or the client left: nothing has changed. While it is kept, only the client is gone. */
static void on_turn_gone(paged__server *s, void *user) {
    visit *v = user;
    if (v->generation)
        v->generation = NULL;
    else
        free_visit(s, v);
}

/* "n_messages": how many its client knows of. So one that tries again after a broken connection, or speaks
 * through another server, adds nothing to what it has not seen. False: refused, and the visit is over. */
static bool is_as_known(paged__server *s, visit *v) {
    const json_t *known = json_object_get(v->body, "n_messages");
    const size_t n = json_array_size(json_object_get(v->note, "messages"));
    if (!known || json_is_null(known)) return true;
    if (!json_is_integer(known))
        refuse(s, v, 400, "n_messages", NULL, "n_messages must be a whole number");
    else if (json_integer_value(known) != (json_int_t)n)
        refuse(s, v, 409, "n_messages", "changed", "the conversation has %zu messages, not %lld", n,
               (long long)json_integer_value(known));
    else
        return true;
    return false;
}

static void add_turn(paged__server *s, visit *v) {
    if (!is_as_known(s, v)) return;
    json_t *salt = json_object_get(v->note, "cache_salt"), *own = json_object_get(v->body, "cache_salt");
    json_t *body = v->body, *messages = json_copy(json_object_get(v->note, "messages"));
    if (own && !json_is_null(own) && !json_equal(own, salt)) {
        json_decref(messages);
        refuse(s, v, 400, "cache_salt", NULL, "this conversation has another cache_salt");
        return;
    }
    v->said = take_said(body);
    if (v->said && json_array_size(v->said) == 0) {
        json_decref(messages);
        refuse(s, v, 400, "content", NULL, "a turn needs content (what the user says) or messages");
        return;
    }
    if (!v->said || !messages || json_array_extend(messages, v->said) != 0 ||
        json_object_set(body, "messages", messages) != 0 || json_object_set(body, "cache_salt", salt) != 0) {
        json_decref(messages);
        refuse(s, v, 503, NULL, NULL, "no memory for a turn");
        return;
    }
    json_decref(messages);
    paged__conn *conn = v->conn;
    v->body = NULL;
    v->conn = NULL; /* its work is the generation now */
    conn->work = NULL;
    conn->on_gone = NULL;
    paged__ending ending = {.done = on_answered, .gone = on_turn_gone, .user = v};
    int32_t *known = known_tokens(v->note, &ending.n_known);
    ending.known = known;
    paged__generate(conn, body, true, &ending);
    paged__free(known);
}

/* ---- the other changes ---- */

/* A field that counts. False: it is none; refused, and the visit is over. */
static bool take_count(paged__server *s, visit *v, const char *name, size_t most, size_t *to) {
    const json_t *value = json_object_get(v->body, name);
    if (!value || json_is_null(value)) return true;
    const json_int_t n = json_integer_value(value);
    if (!json_is_integer(value) || n < 0 || (size_t)n > most) {
        refuse(s, v, 400, name, NULL, "%s must be a whole number from 0 to %zu", name, most);
        return false;
    }
    *to = (size_t)n;
    return true;
}

static void fork_one(paged__server *s, visit *v) {
    const json_t *from = json_object_get(v->note, "messages");
    size_t n = json_array_size(from);
    if (!take_count(s, v, "messages", n, &n)) return;
    json_t *messages = json_array();
    for (size_t i = 0; i < n; i++) json_array_append(messages, json_array_get(from, i));
    json_t *salt = json_incref(json_object_get(v->note, "cache_salt"));
    const bool ok = make_note(v, messages, salt);
    json_decref(salt);
    v->was_pinned = false;
    if (ok)
        save(s, v, tell_saved);
    else
        refuse(s, v, 503, NULL, NULL, "no memory for a conversation");
}

static bool is_role(const json_t *message, const char *role) {
    const char *own = json_string_value(json_object_get(message, "role"));
    return own && strcmp(own, role) == 0;
}

static void drop_turns(paged__server *s, visit *v) {
    json_t *messages = json_object_get(v->note, "messages");
    size_t n_turns = 1, first = 0;
    if (!take_count(s, v, "turns", json_array_size(messages), &n_turns)) return;
    while (is_role(json_array_get(messages, first), "system")) first++;
    for (size_t i = 0; i < n_turns; i++) {
        if (first == json_array_size(messages)) break;
        do json_array_remove(messages, first);
        while (first < json_array_size(messages) && !is_role(json_array_get(messages, first), "user"));
    }
    json_object_del(v->note, "tokens");
    save(s, v, tell_saved);
}

/* The conversation has been read, for a request that has to do with it. */
static void on_loaded(paged__server *s, visit *v) {
    v->was_pinned = json_is_true(json_object_get(v->note, "pinned"));
    if (v->status) {
        refuse_by(s, v);
    } else if (!v->conn) {
        free_visit(s, v);
    } else if (!v->changes) {
        reply(s, v, describe(v->note, true));
    } else if (strcmp(v->action, "turns") == 0) {
        add_turn(s, v);
    } else if (strcmp(v->action, "fork") == 0) {
        fork_one(s, v);
    } else if (strcmp(v->action, "drop") == 0) {
        drop_turns(s, v);
    } else if (take_fields(s, v)) { /* PATCH */
        save(s, v, tell_saved);
    }
}

static void on_erased(paged__server *s, visit *v) {
    if (v->status)
        refuse_by(s, v);
    else
        reply(s, v,
              json_pack("{s:s, s:s, s:b}", "id", v->id, "object", "conversation.deleted", "deleted", 1));
}

static void on_listed(paged__server *s, visit *v) {
    if (v->status)
        refuse_by(s, v);
    else
        reply(s, v, json_incref(v->note));
}

static void create(paged__server *s, visit *v) {
    json_t *messages = json_object_get(v->body, "messages"), *salt = json_object_get(v->body, "cache_salt");
    paged_error err = {0};
    if (messages && !json_is_null(messages) && !paged__openai_check_messages(messages, &err)) {
        refuse(s, v, err.status == PAGED_ERR_NO_MEMORY ? 503 : 400, "messages", NULL, "%s", err.message);
        return;
    }
    if (salt && !json_is_null(salt) &&
        (!json_is_string(salt) || strlen(json_string_value(salt)) != json_string_length(salt) ||
         json_string_length(salt) > SALT_MAX)) {
        refuse(s, v, 400, "cache_salt", NULL, "cache_salt must be a string without NUL of at most %d bytes",
               SALT_MAX);
        return;
    }
    messages = messages && !json_is_null(messages) ? json_copy(messages) : json_array();
    salt = salt ? json_incref(salt) : json_null();
    const bool ok = make_note(v, messages, salt);
    json_decref(salt);
    if (!ok)
        refuse(s, v, 503, NULL, NULL, "no memory for a conversation");
    else if (take_fields(s, v))
        save(s, v, tell_saved);
}

static void list_all(paged__server *s, visit *v) {
    char limit[16] = "";
    v->limit = LIST_DEFAULT;
    if (paged__http_query(&v->conn->http, "limit", limit, sizeof limit)) {
        char *end;
        const long n = strtol(limit, &end, 10);
        if (end == limit || *end || n < 1 || n > LIST_MAX) {
            refuse(s, v, 400, "limit", NULL, "limit must be a whole number from 1 to %d", LIST_MAX);
            return;
        }
        v->limit = (int32_t)n;
    }
    paged__http_query(&v->conn->http, "after", v->after, sizeof v->after);
    ask(s, v, work_list, on_listed);
}

void paged__conversation_mend(paged__server *s) {
    visit *v = paged__calloc(1, sizeof *v);
    if (!v) return;
    v->service = s->service;
    ask(s, v, work_mend, free_visit);
}

/* ---- the route ---- */

static bool is_busy(const paged__server *s, const char *id) {
    for (const visit *v = s->visits; v; v = v->next)
        if (strcmp(v->id, id) == 0) return true;
    return false;
}

const char *paged__conversation_methods(const char *id, const char *action) {
    if (!id[0]) return "GET POST";
    if (!action[0]) return "GET PATCH DELETE";
    return strcmp(action, "turns") == 0 || strcmp(action, "fork") == 0 || strcmp(action, "drop") == 0 ? "POST"
                                                                                                      : NULL;
}

/* A name that is none of ours is nobody's; what is not in it cannot be in the name of a note. */
static bool is_id(const char *id) {
    return strncmp(id, "conv-", 5) == 0 && strspn(id + 5, "0123456789abcdef") == strlen(id + 5) &&
           strlen(id) < ID_BYTES;
}

void paged__conversation_route(paged__conn *conn, const char *id, const char *action) {
    paged__server *s = conn->server;
    const char *method = conn->http.method;
    const bool reads = strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0;
    if (!paged__conversation_methods(id, action) || (id[0] && !is_id(id))) {
        paged__reply_error(conn, 404, NULL, "not_found", "there is no %.100s here", conn->http.path);
        return;
    }
    const bool erases = strcmp(method, "DELETE") == 0;
    if (!reads && id[0] && is_busy(s, id)) {
        paged__reply_error(conn, 409, NULL, "busy", "a turn of this conversation is under way");
        return;
    }
    json_t *body = reads || erases ? NULL : paged__body_json(conn);
    if (!body && !reads && !erases) return;
    visit *v = paged__calloc(1, sizeof *v);
    if (!v) {
        json_decref(body);
        paged__reply_error(conn, 503, NULL, NULL, "no memory for a request");
        return;
    }
    *v = (visit){.conn = conn, .body = body, .changes = !reads, .service = s->service};
    strcpy(v->id, id);
    snprintf(v->action, sizeof v->action, "%s", action);
    if (v->changes && id[0]) {
        v->next = s->visits;
        s->visits = v;
    }
    if (!id[0] && reads)
        list_all(s, v);
    else if (!id[0])
        create(s, v);
    else if (erases)
        ask(s, v, work_erase, on_erased);
    else
        ask(s, v, work_load, on_loaded);
}
