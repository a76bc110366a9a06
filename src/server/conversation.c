/* server/conversation.c: see conversation.h.
 *
 *   POST   /v1/conversations           {"messages": […]}     a new one
 *   GET    /v1/conversations                                 all of them
 *   GET    /v1/conversations/ID                              one, with its messages
 *   DELETE /v1/conversations/ID
 *   POST   /v1/conversations/ID/turns  {"content": …} and the fields of a chat completion: says something
 *                                      and is answered like one; both are kept when it has ended well
 *   POST   /v1/conversations/ID/fork   {"messages": n}       a new one with the first n (all) messages
 *   POST   /v1/conversations/ID/drop   {"turns": n}          without its n oldest turns; a turn is what a
 *                                      user said and what follows it; a system message before them stays
 *
 * While a turn is under way everything that would change the conversation is answered 409. What is kept is
 * bounded: COUNT_MAX conversations, BYTES_MAX of their JSON.
 */
#include "server/conversation.h"

#include <stdlib.h>
#include <time.h>

#include "base/base.h"
#include "server/generate.h"
#include "server/route.h"

enum { COUNT_MAX = 10000, BYTES_MAX = 256 << 20 };

typedef struct paged__conversation {
    struct paged__conversation *next;
    char id[40];
    int64_t created;
    json_t *messages; /* owned */
    size_t n_bytes;
    bool is_busy;
} conversation;

/* A turn under way; user of its ending. */
typedef struct turn {
    conversation *conversation;
    json_t *said; /* messages that it adds; owned */
} turn;

static conversation *find(const paged__server *s, const char *id) {
    conversation *c = s->conversations;
    while (c && strcmp(c->id, id) != 0) c = c->next;
    return c;
}

static size_t all_bytes(const paged__server *s) {
    size_t n = 0;
    for (const conversation *c = s->conversations; c; c = c->next) n += c->n_bytes;
    return n;
}

static size_t size_of(const json_t *messages) {
    return json_dumpb(messages, NULL, 0, JSON_COMPACT);
}

static void free_conversation(conversation *c) {
    json_decref(c->messages);
    paged__free(c);
}

void paged__conversations_free(paged__server *s) {
    while (s->conversations) {
        conversation *next = s->conversations->next;
        free_conversation(s->conversations);
        s->conversations = next;
    }
    s->n_conversations = 0;
}

static json_t *describe(const conversation *c, bool with_messages) {
    json_t *value = json_pack("{s:s, s:s, s:I, s:I}", "id", c->id, "object", "conversation", "created_at",
                              (json_int_t)c->created, "n_messages", (json_int_t)json_array_size(c->messages));
    if (value && with_messages) json_object_set(value, "messages", c->messages);
    return value;
}

/* ---- messages ---- */

static bool is_message(const json_t *message) {
    const json_t *content = json_object_get(message, "content");
    return json_is_string(json_object_get(message, "role")) &&
           (json_is_string(content) || json_is_array(content));
}

/* The messages of a body, a new reference; an empty list if it has none. NULL: they are none. */
static json_t *take_messages(paged__conn *conn, const json_t *body) {
    json_t *list = json_object_get(body, "messages");
    if (!list || json_is_null(list)) return json_array();
    bool ok = json_is_array(list);
    for (size_t i = 0; ok && i < json_array_size(list); i++) ok = is_message(json_array_get(list, i));
    if (ok) return json_incref(list);
    paged__reply_error(conn, 400, "messages", NULL,
                       "messages must be a list of objects with role and content");
    return NULL;
}

/* Takes messages. */
static void create(paged__conn *conn, json_t *messages) {
    paged__server *s = conn->server;
    const size_t n_bytes = size_of(messages);
    conversation *c = NULL;
    if (s->n_conversations < COUNT_MAX && n_bytes <= BYTES_MAX && all_bytes(s) <= BYTES_MAX - n_bytes)
        c = paged__calloc(1, sizeof *c);
    if (!c) {
        json_decref(messages);
        paged__reply_error(conn, 429, NULL, "conversations_full",
                           "%d conversations are kept; delete some (at most %d, %d MiB)", s->n_conversations,
                           COUNT_MAX, BYTES_MAX >> 20);
        return;
    }
    *c = (conversation){.next = s->conversations,
                        .created = (int64_t)time(NULL),
                        .messages = json_deep_copy(messages),
                        .n_bytes = n_bytes};
    json_decref(messages);
    snprintf(c->id, sizeof c->id, "conv-%016llx",
             (unsigned long long)paged__mix(s->boot * 3 + ++s->n_requests));
    s->conversations = c;
    s->n_conversations++;
    paged__reply_json(conn, 200, describe(c, true));
}

static void list_all(paged__conn *conn) {
    json_t *list = json_array();
    for (const conversation *c = conn->server->conversations; c; c = c->next)
        json_array_append_new(list, describe(c, false));
    paged__reply_json(conn, 200, json_pack("{s:s, s:o}", "object", "list", "data", list));
}

static void delete_one(paged__conn *conn, conversation *c) {
    conversation **at = &conn->server->conversations;
    while (*at != c) at = &(*at)->next;
    *at = c->next;
    conn->server->n_conversations--;
    json_t *value = json_pack("{s:s, s:s, s:b}", "id", c->id, "object", "conversation.deleted", "deleted", 1);
    free_conversation(c);
    paged__reply_json(conn, 200, value);
}

/* ---- turns ---- */

static void end_turn(turn *t) {
    t->conversation->is_busy = false;
    json_decref(t->said);
    paged__free(t);
}

static void on_done(paged__server *s, void *user, const char *text, size_t len) {
    turn *t = user;
    conversation *c = t->conversation;
    (void)s;
    json_array_extend(c->messages, t->said);
    json_array_append_new(
        c->messages, json_pack("{s:s, s:o}", "role", "assistant", "content", paged__json_text(text, len)));
    c->n_bytes = size_of(c->messages);
    end_turn(t);
}

static void on_gone(paged__server *s, void *user) {
    (void)s;
    end_turn(user);
}

/* What a turn adds: "content" of a user, or messages. NULL: neither, and that has been answered. */
static json_t *take_said(paged__conn *conn, const json_t *body) {
    json_t *content = json_object_get(body, "content");
    if (json_is_string(content) || json_is_array(content))
        return json_pack("[{s:s, s:O}]", "role", "user", "content", content);
    json_t *said = take_messages(conn, body);
    if (said && json_array_size(said) == 0) {
        json_decref(said);
        paged__reply_error(conn, 400, "content", NULL,
                           "a turn needs content (what the user says) or messages");
        said = NULL;
    }
    return said;
}

/* Takes body. */
static void add_turn(paged__conn *conn, conversation *c, json_t *body) {
    json_t *said = take_said(conn, body);
    json_t *messages = said ? json_copy(c->messages) : NULL;
    turn *t = said ? paged__calloc(1, sizeof *t) : NULL;
    if (!said) {
        json_decref(body);
        return;
    }
    if (!t || !messages || json_array_extend(messages, said) != 0 ||
        json_object_set_new(body, "messages", messages) != 0) {
        json_decref(said);
        json_decref(body);
        paged__free(t);
        paged__reply_error(conn, 503, NULL, NULL, "no memory for a turn");
        return;
    }
    *t = (turn){c, said};
    c->is_busy = true;
    paged__generate(conn, body, true, &(paged__ending){on_done, on_gone, t});
}

/* A field that counts; false: it is none, and that has been answered. */
static bool take_count(paged__conn *conn, const json_t *body, const char *name, size_t most, size_t *to) {
    const json_t *value = json_object_get(body, name);
    if (!value || json_is_null(value)) return true;
    const json_int_t n = json_integer_value(value);
    if (!json_is_integer(value) || n < 0 || (size_t)n > most) {
        paged__reply_error(conn, 400, name, NULL, "%s must be a whole number from 0 to %zu", name, most);
        return false;
    }
    *to = (size_t)n;
    return true;
}

static void fork_one(paged__conn *conn, const conversation *c, const json_t *body) {
    size_t n = json_array_size(c->messages);
    if (!take_count(conn, body, "messages", n, &n)) return;
    json_t *messages = json_array();
    for (size_t i = 0; i < n; i++) json_array_append(messages, json_array_get(c->messages, i));
    create(conn, messages);
}

static bool is_role(const json_t *message, const char *role) {
    const char *own = json_string_value(json_object_get(message, "role"));
    return own && strcmp(own, role) == 0;
}

static void drop_turns(paged__conn *conn, conversation *c, const json_t *body) {
    size_t n_turns = 1, first = 0;
    if (!take_count(conn, body, "turns", json_array_size(c->messages), &n_turns)) return;
    while (is_role(json_array_get(c->messages, first), "system")) first++;
    for (size_t i = 0; i < n_turns; i++) {
        if (first == json_array_size(c->messages)) break;
        do json_array_remove(c->messages, first);
        while (first < json_array_size(c->messages) && !is_role(json_array_get(c->messages, first), "user"));
    }
    c->n_bytes = size_of(c->messages);
    paged__reply_json(conn, 200, describe(c, true));
}

/* Takes body, which is an object. */
static void change(paged__conn *conn, conversation *c, const char *action, json_t *body) {
    if (strcmp(action, "turns") == 0) {
        add_turn(conn, c, body);
        return;
    }
    if (strcmp(action, "fork") == 0)
        fork_one(conn, c, body);
    else
        drop_turns(conn, c, body);
    json_decref(body);
}

void paged__conversation_route(paged__conn *conn, const char *id, const char *action) {
    const char *method = conn->http.method;
    const bool reads = strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0;
    conversation *c = id[0] ? find(conn->server, id) : NULL;
    const bool known =
        strcmp(action, "turns") == 0 || strcmp(action, "fork") == 0 || strcmp(action, "drop") == 0;
    if (id[0] && (!c || (action[0] && !known))) {
        paged__reply_error(conn, 404, NULL, "not_found", "there is no %.100s here", conn->http.path);
        return;
    }
    const char *methods = !id[0] ? "GET POST" : action[0] ? "POST" : "GET DELETE";
    if ((reads && action[0]) || (!reads && !strstr(methods, method))) {
        conn->allow = methods;
        paged__reply_error(conn, 405, NULL, "method_not_allowed", "%.100s takes %s", conn->http.path,
                           methods);
        return;
    }
    if (reads) {
        if (c)
            paged__reply_json(conn, 200, describe(c, true));
        else
            list_all(conn);
        return;
    }
    if (c && c->is_busy) {
        paged__reply_error(conn, 409, NULL, "busy", "a turn of this conversation is under way");
        return;
    }
    if (strcmp(method, "DELETE") == 0) {
        delete_one(conn, c);
        return;
    }
    json_t *body = paged__body_json(conn);
    if (!body) return;
    if (c) {
        change(conn, c, action, body);
        return;
    }
    json_t *messages = take_messages(conn, body);
    json_decref(body);
    if (messages) create(conn, messages);
}
