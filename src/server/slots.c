/* server/slots.c: see slots.h. A slot's text is kept as tokens; keys and values are the engine's, which may
 * have evicted them by the time somebody saves. Steps wait while they are copied, not while the copy is
 * written, by a thread; and while a file is read. There is one copy at most: a slot may be gigabytes, and a
 * disk that hangs would collect them.
 *
 * Names of files come from clients. They never become paths: 1 … 200 bytes of [0-9A-Za-z._-] that do not
 * begin with a dot, in a directory that was opened when the server began. */
#include "server/slots.h"

#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"
#include "engine/save.h"
#include "server/keeper.h"
#include "server/route.h"

enum { NAME_BYTES = 200 };

typedef struct slot {
    int32_t *tokens; /* [n_tokens], owned */
    int32_t n_tokens, capacity;
    char *salt; /* owned; NULL: none */
    bool is_used;
    uint64_t used; /* the count of requests, then */
} slot;

struct paged__slots {
    int dir_fd;
    paged__keeper *writer; /* of files */
    struct event *writer_event;
    bool is_saving; /* the writer has a job */
    slot *all;      /* [n] NULL until the first request */
    int32_t n;
    uint64_t n_requests;
};

static void on_writer(evutil_socket_t fd, short what, void *user) {
    paged__server *server = user;
    (void)fd, (void)what;
    paged__keeper_news(server->slots->writer, server);
}

static paged_status start_writer(paged__server *server, paged__slots *s, paged_error *err) {
    const paged_status status = paged__keeper_create(NULL, &s->writer, err);
    if (status) return status;
    s->writer_event =
        event_new(server->base, paged__keeper_fd(s->writer), EV_READ | EV_PERSIST, on_writer, server);
    if (s->writer_event && event_add(s->writer_event, NULL) == 0) return PAGED_OK;
    return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for slots");
}

paged_status paged__slots_create(paged__server *server, const char *dir, paged__slots **out,
                                 paged_error *err) {
    char reason[128];
    paged__slots *s = paged__calloc(1, sizeof *s);
    if (!s) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for slots");
    s->dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (s->dir_fd < 0) {
        paged__free(s);
        return paged__fail(err, PAGED_ERR_IO, "%s: %s", dir, strerror_r(errno, reason, sizeof reason));
    }
    const paged_status status = start_writer(server, s, err);
    if (status) {
        paged__slots_free(s, server);
        return status;
    }
    paged__save_sweep(s->dir_fd);
    *out = s;
    return PAGED_OK;
}

bool paged__slots_is_saving(const paged__slots *s) {
    return s && s->is_saving;
}

void paged__slots_free(paged__slots *s, paged__server *server) {
    if (!s) return;
    if (s->writer_event) event_free(s->writer_event);
    if (s->is_saving) paged__keeper_news(s->writer, server);
    if (s->is_saving) {
        paged__keeper_leave(s->writer);
        return;
    }
    paged__keeper_free(s->writer, server);
    for (int32_t i = 0; i < s->n; i++) {
        paged__free(s->all[i].tokens);
        paged__free(s->all[i].salt);
    }
    paged__free(s->all);
    close(s->dir_fd);
    paged__free(s);
}

/* As many as requests can run at once. */
static bool make(paged__server *server) {
    paged__slots *s = server->slots;
    if (!s || s->all) return s != NULL;
    s->all = paged__calloc((size_t)server->info.max_running, sizeof *s->all);
    if (s->all) s->n = server->info.max_running;
    return s->all != NULL;
}

/* ---- what ran there ---- */

static void forget(slot *s) {
    paged__free(s->salt);
    s->salt = NULL;
    s->n_tokens = 0;
}

/* False, and nothing is known of the slot any more: no memory. */
static bool append(slot *s, const int32_t *tokens, int32_t n) {
    if (s->n_tokens + n > s->capacity) {
        const int32_t capacity = PAGED_MAX(2 * s->capacity, s->n_tokens + n);
        int32_t *grown = paged__alloc((size_t)capacity, sizeof *grown);
        if (!grown) {
            forget(s);
            return false;
        }
        if (s->n_tokens) memcpy(grown, s->tokens, (size_t)s->n_tokens * sizeof *grown);
        paged__free(s->tokens);
        s->tokens = grown;
        s->capacity = capacity;
    }
    if (n) memcpy(s->tokens + s->n_tokens, tokens, (size_t)n * sizeof *tokens);
    s->n_tokens += n;
    return true;
}

static bool remember(slot *s, const int32_t *tokens, int32_t n, const char *salt) {
    forget(s);
    if (salt) {
        s->salt = paged__alloc(strlen(salt) + 1, 1);
        if (!s->salt) return false;
        memcpy(s->salt, salt, strlen(salt) + 1);
    }
    return append(s, tokens, n);
}

static int32_t common(const slot *s, const paged_request *q) {
    int32_t n = 0;
    if ((s->salt || q->salt) && (!s->salt || !q->salt || strcmp(s->salt, q->salt) != 0)) return 0;
    while (n < s->n_tokens && n < q->n_tokens && s->tokens[n] == q->tokens[n]) n++;
    return n;
}

static int32_t choose(const paged__slots *s, const paged_request *q, int32_t wanted) {
    int32_t best = -1, most = 0;
    if (wanted >= 0 && wanted < s->n && !s->all[wanted].is_used) return wanted;
    for (int32_t i = 0; i < s->n; i++) {
        if (s->all[i].is_used) continue;
        const int32_t n = common(&s->all[i], q);
        if (best >= 0 && (n < most || (n == most && s->all[i].used >= s->all[best].used))) continue;
        best = i;
        most = n;
    }
    return best;
}

int32_t paged__slots_begin(paged__server *server, const paged_request *q, int32_t wanted) {
    if (!make(server)) return -1;
    paged__slots *s = server->slots;
    const int32_t i = choose(s, q, wanted);
    if (i < 0 || !remember(&s->all[i], q->tokens, q->n_tokens, q->salt)) return -1;
    s->all[i].is_used = true;
    s->all[i].used = ++s->n_requests;
    return i;
}

void paged__slots_take(paged__server *server, int32_t i, const paged_output *out) {
    if (i < 0) return;
    slot *s = &server->slots->all[i];
    if (s->n_tokens) append(s, out->tokens, out->n_tokens);
}

void paged__slots_end(paged__server *server, int32_t i) {
    if (i >= 0) server->slots->all[i].is_used = false;
}

/* ---- files ---- */

/* What is asked for, and how it went. */
typedef struct action {
    paged__job job;    /* of a save: its file is written while steps go on */
    paged__conn *conn; /* NULL: the client has left */
    paged__slots *slots;
    slot *slot;
    int32_t i; /* the slot's number */
    char name[NAME_BYTES + 1];
    const char *salt;
    int32_t n_ctx;
    uint64_t start_ns;
    paged__saving saving;
    paged_saved done;
    paged_error err;
    paged_status status;
} action;

static void take(paged_engine *e, void *user) {
    action *a = user;
    a->status = paged__save_take(e, a->slot->tokens, PAGED_MIN(a->slot->n_tokens, a->n_ctx + 1),
                                 a->slot->salt, a->name, &a->saving, &a->err);
    a->done = a->saving.facts;
}

static void restore(paged_engine *e, void *user) {
    action *a = user;
    int32_t *tokens = paged__alloc((size_t)a->n_ctx, sizeof *tokens);
    a->status = PAGED_ERR_NO_MEMORY;
    if (!tokens) {
        paged__fail(&a->err, PAGED_ERR_NO_MEMORY, "no memory for %d tokens", a->n_ctx);
        return;
    }
    a->status = paged_engine_load(e, a->salt, a->slots->dir_fd, a->name, tokens, &a->done, &a->err);
    if (!a->status) remember(a->slot, tokens, a->done.n_tokens, a->salt);
    paged__free(tokens);
}

static void reply(paged__conn *c, const action *a, bool saves) {
    const double ms = (double)(paged__now_ns() - a->start_ns) * 1e-6;
    if (a->status == PAGED_ERR_NOT_FOUND)
        paged__reply_error(c, 404, "filename", "not_found", "%s", a->err.message);
    else if (saves && a->status == PAGED_ERR_IO) /* of the disk; what the client names is looked at before */
        paged__reply_error(c, 500, "filename", "io_error", "%s", a->err.message);
    else if (a->status)
        paged__reply_status(c, &a->err, "filename");
    else
        paged__reply_json(c, 200,
                          json_pack("{s:i, s:s, s:i, s:I, s:{s:f}}", "id_slot", (int)a->i, "filename",
                                    a->name, saves ? "n_saved" : "n_restored", (int)a->done.n_tokens,
                                    saves ? "n_written" : "n_read", (json_int_t)a->done.file_bytes, "timings",
                                    saves ? "save_ms" : "restore_ms", ms));
}

static void on_gone(paged__conn *conn) {
    action *a = conn->work;
    a->conn = NULL;
}

static void write_saving(const paged_notes *notes, paged__job *job) {
    action *a = (action *)(void *)job;
    struct stat info;
    (void)notes;
    if (fstatat(a->slots->dir_fd, a->name, &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(info.st_mode))
        a->status = paged__fail(&a->err, PAGED_ERR_INVALID_ARG, "%s is a directory", a->name);
    else
        a->status = paged__save_write(&a->saving, a->slots->dir_fd, a->name, &a->err);
}

static void on_written(paged__server *server, paged__job *job) {
    action *a = (action *)(void *)job;
    paged__conn *c = a->conn;
    a->slots->is_saving = false;
    paged__save_free(&a->saving);
    if (c) reply(c, a, true);
    paged__free(a);
    paged__server_settle(server);
}

/* `with` is what was asked for; its own memory is gone before the file is written. */
static void save(paged__conn *c, const action *with) {
    if (with->slots->is_saving) {
        paged__reply_error(c, 503, NULL, NULL, "another slot's file is being written; try again");
        return;
    }
    action *a = paged__alloc(1, sizeof *a);
    if (!a) {
        paged__reply_error(c, 503, NULL, NULL, "no memory for a file");
        return;
    }
    *a = *with;
    a->job = (paged__job){.work = write_saving, .done = on_written};
    const bool looked = paged__server_look(c->server, take, a);
    if (looked && !a->status && paged__keeper_ask(a->slots->writer, &a->job)) {
        a->slots->is_saving = true;
        c->work = a;
        c->on_gone = on_gone;
        return;
    }
    if (looked)
        reply(c, a, true);
    else
        paged__reply_busy(c);
    paged__save_free(&a->saving);
    paged__free(a);
}

static bool is_name(const json_t *name) {
    static const char allowed[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ._-";
    const char *text = json_string_value(name);
    const size_t n = json_string_length(name);
    return text && n >= 1 && n <= NAME_BYTES && text[0] != '.' && strspn(text, allowed) == n;
}

static void with_file(paged__conn *c, paged__slots *slots, int32_t i, bool saves) {
    json_t *body = paged__body_json(c);
    if (!body) return;
    const json_t *name = json_object_get(body, "filename"), *salt = json_object_get(body, "cache_salt");
    action a = {.conn = c,
                .slots = slots,
                .slot = &slots->all[i],
                .i = i,
                .salt = json_string_value(salt),
                .n_ctx = c->server->info.n_ctx,
                .start_ns = paged__now_ns()};
    if (!is_name(name)) {
        paged__reply_error(c, 400, "filename", "invalid_name",
                           "filename must be 1 … %d characters of 0-9 A-Z a-z . _ - and not begin with a dot",
                           NAME_BYTES);
    } else if (salt && (!json_is_string(salt) || strlen(a.salt) != json_string_length(salt))) {
        paged__reply_error(c, 400, "cache_salt", NULL, "cache_salt must be a string without NUL");
    } else if (saves && a.slot->n_tokens == 0) {
        paged__reply_error(c, 400, NULL, "empty_slot", "nothing has run in slot %d yet", i);
    } else {
        snprintf(a.name, sizeof a.name, "%s", json_string_value(name));
        if (saves)
            save(c, &a);
        else if (paged__server_look(c->server, restore, &a))
            reply(c, &a, false);
        else
            paged__reply_busy(c);
    }
    json_decref(body);
}

/* A number of a slot; -1: none. */
static int32_t number_of(const char *text, int32_t n) {
    char *end;
    if (text[0] < '0' || text[0] > '9') return -1;
    const unsigned long i = strtoul(text, &end, 10);
    return *end || i >= (unsigned long)n ? -1 : (int32_t)i;
}

void paged__slot_action(paged__conn *c, const char *rest) {
    char what[16];
    paged__slots *s = c->server->slots;
    if (!s) {
        paged__reply_error(c, 501, NULL, "unsupported",
                           "this server saves no slots: it was started without --slot-save-path DIR");
        return;
    }
    const int32_t i = make(c->server) ? number_of(rest, s->n) : -1;
    if (i < 0) {
        paged__reply_error(c, 404, NULL, "not_found", "there is no slot %.20s; there are %d", rest, s->n);
    } else if (s->all[i].is_used) {
        paged__reply_error(c, 409, NULL, "slot_busy", "slot %d is at work", i);
    } else if (!paged__http_query(&c->http, "action", what, sizeof what)) {
        paged__reply_error(c, 400, "action", NULL, "say what is to be done: ?action=save, restore or erase");
    } else if (strcmp(what, "save") == 0 || strcmp(what, "restore") == 0) {
        with_file(c, s, i, what[0] == 's');
    } else if (strcmp(what, "erase") == 0) {
        const int32_t n = s->all[i].n_tokens;
        forget(&s->all[i]);
        paged__reply_json(c, 200, json_pack("{s:i, s:i}", "id_slot", (int)i, "n_erased", (int)n));
    } else {
        paged__reply_error(c, 400, "action", NULL, "action is '%s'; it can be save, restore or erase", what);
    }
}
