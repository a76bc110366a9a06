/* server/route.c: who answers what; keys, CORS, and what is answered where nobody does. */
#include "server/route.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/base.h"
#include "server/blocks.h"
#include "server/conversation.h"
#include "server/generate.h"
#include "server/metrics.h"
#include "server/slots.h"

/* ---- what handlers share ---- */

json_t *paged__body_json(paged__conn *c) {
    const paged__buffer *body = &c->http.body;
    const char *coding = paged__http_header(&c->http, "Content-Encoding");
    json_error_t where = {0};
    if (coding && strcasecmp(coding, "identity") != 0) {
        paged__reply_error(c, 415, NULL, NULL, "a body in %.40s is not read here", coding);
        return NULL;
    }
    json_t *value = json_loadb(body->data ? body->data : "", body->len, JSON_REJECT_DUPLICATES, &where);
    if (json_is_object(value)) return value;
    if (value)
        paged__reply_error(c, 400, NULL, "invalid_json", "the body must be a JSON object");
    else
        paged__reply_error(c, 400, NULL, "invalid_json", "the body is no JSON: %s (line %d, column %d)",
                           where.text, where.line, where.column);
    json_decref(value);
    return NULL;
}

void paged__reply_status(paged__conn *c, const paged_error *err, const char *param) {
    switch (err->status) {
    case PAGED_ERR_TOO_LONG:
        paged__reply_error(c, 400, param, "context_length_exceeded", "%s", err->message);
        break;
    case PAGED_ERR_UNSUPPORTED:
        paged__reply_error(c, 400, param, "unsupported", "%s", err->message);
        break;
    case PAGED_ERR_LIMIT:
        paged__reply_error(c, 429, NULL, "queue_full", "%s", err->message);
        break;
    case PAGED_ERR_NO_MEMORY:
        paged__reply_error(c, 503, NULL, NULL, "%s", err->message);
        break;
    default:
        paged__reply_error(c, 400, param, NULL, "%s", err->message);
        break;
    }
}

/* ---- the handlers that need a word ---- */

static void generate(paged__conn *c, bool is_chat) {
    json_t *body = paged__body_json(c);
    if (body) paged__generate(c, body, is_chat, NULL);
}

static void chat(paged__conn *c, const char *rest) {
    (void)rest;
    generate(c, true);
}

static void complete(paged__conn *c, const char *rest) {
    (void)rest;
    generate(c, false);
}

enum { CONVERSATION_ID = 64 };

/* ID/ACTION; a name that is too long is none of ours, and neither is "?". Returns the action, "" for none. */
static const char *split_conversation(const char *rest, char id[CONVERSATION_ID]) {
    const char *slash = strchr(rest, '/');
    const size_t n = slash ? (size_t)(slash - rest) : strlen(rest);
    snprintf(id, CONVERSATION_ID, "%.*s", n < CONVERSATION_ID ? (int)n : 1, n < CONVERSATION_ID ? rest : "?");
    return slash ? slash + 1 : "";
}

static void conversation(paged__conn *c, const char *rest) {
    char id[CONVERSATION_ID];
    const char *action = split_conversation(rest, id);
    paged__conversation_route(c, id, action);
}

static void unsupported(paged__conn *c, const char *rest) {
    (void)rest;
    paged__reply_error(c, 501, NULL, "unsupported", "%.100s is not supported by this server (yet)",
                       c->http.path);
}

#define PLAIN(name, call)                                                                                    \
    static void name(paged__conn *c, const char *rest) {                                                     \
        (void)rest;                                                                                          \
        call(c);                                                                                             \
    }
PLAIN(health, paged__health)
PLAIN(metrics, paged__metrics_reply)
PLAIN(version, paged__version_route)
PLAIN(tokenize, paged__tokenize_route)
PLAIN(detokenize, paged__detokenize_route)
PLAIN(apply_template, paged__apply_template)
PLAIN(slots, paged__slots_route)
PLAIN(events, paged__events_route)
PLAIN(check, paged__check_route)

/* ---- the table ---- */

typedef struct route {
    const char *methods; /* in capitals, divided by blanks */
    const char *path; /* one that ends in '/' stands for all that begin with it; the handler gets the rest */
    void (*handle)(paged__conn *c, const char *rest);
    bool is_open;    /* without a key */
    bool at_loading; /* also while there is no model yet */
} route;

/* "/v1/x" is found as "/x", too. */
static const route routes[] = {
    {"GET", "/health", health, true, true},
    {"GET", "/metrics", metrics, false, false},
    {"GET", "/version", version, false, true},
    {"GET", "/v1/models", paged__models, false, false},
    {"GET", "/v1/models/", paged__models, false, false},
    {"POST", "/v1/chat/completions", chat, false, false},
    {"POST", "/v1/completions", complete, false, false},
    {"POST", "/tokenize", tokenize, false, false},
    {"POST", "/detokenize", detokenize, false, false},
    {"POST", "/apply-template", apply_template, false, false},
    {"GET", "/slots", slots, false, false},
    {"POST", "/slots/", paged__slot_action, false, false},
    {"GET POST", "/v1/conversations", conversation, false, false},
    {"GET POST PATCH DELETE", "/v1/conversations/", conversation, false, false},
    {"GET", "/paged/blocks", paged__blocks_route, false, false},
    {"GET", "/paged/blocks/", paged__blocks_route, false, false},
    {"GET", "/paged/events", events, false, false},
    {"GET", "/paged/check", check, false, false},
    {"POST", "/v1/responses", unsupported, false, true},
    {"POST", "/v1/embeddings", unsupported, false, true},
    {"POST", "/v1/messages", unsupported, false, true},
    {"GET POST", "/props", unsupported, false, true},
    {"GET POST", "/api/", unsupported, false, true},
};

static bool has_method(const char *methods, const char *method) {
    const size_t n = strlen(method);
    for (const char *m = methods; *m; m += strcspn(m, " "), m += *m == ' ')
        if (strncmp(m, method, n) == 0 && (m[n] == ' ' || m[n] == 0)) return true;
    return strcmp(method, "HEAD") == 0 && has_method(methods, "GET");
}

static bool path_matches(const char *pattern, const char *path, const char **rest) {
    const size_t n = strlen(pattern);
    const bool is_folder = pattern[n - 1] == '/';
    if (strncmp(pattern, path, n) != 0) return false;
    if (!is_folder && path[n]) return false;
    if (is_folder && !path[n]) return false;
    *rest = path + n;
    return true;
}

static const route *find_route(const char *path, const char **rest) {
    for (size_t i = 0; i < sizeof routes / sizeof routes[0]; i++) {
        const char *pattern = routes[i].path;
        if (path_matches(pattern, path, rest)) return &routes[i];
        if (strncmp(pattern, "/v1/", 4) == 0 && path_matches(pattern + 3, path, rest)) return &routes[i];
    }
    return NULL;
}

/* What lies below a conversation is something else than it; of what does not exist the handler tells. */
static const char *methods_of(const route *r, const char *rest) {
    if (r->handle != conversation) return r->methods;
    char id[CONVERSATION_ID];
    const char *action = split_conversation(rest, id), *methods = paged__conversation_methods(id, action);
    return methods ? methods : r->methods;
}

/* ---- keys, CORS ---- */

/* In a time that depends on the length of what was sent and on nothing of the key. */
static bool is_key(const char *key, const char *sent) {
    const size_t n_key = strlen(key), n_sent = strlen(sent);
    volatile unsigned char differs = n_key != n_sent;
    for (size_t i = 0; i < n_sent; i++) differs |= (unsigned char)(sent[i] ^ key[i % n_key]);
    return !differs;
}

static bool has_key(const paged__conn *c) {
    const char *key = c->server->config.api_key, *sent = paged__http_header(&c->http, "Authorization");
    if (!key[0]) return true;
    if (!sent || strncasecmp(sent, "Bearer ", 7) != 0) return false;
    return is_key(key, sent + 7 + strspn(sent + 7, " "));
}

/* What a browser asks before a request of its own; it sends no key with it. methods: those of the path. */
static void preflight(paged__conn *c, const char *methods) {
    const char *wanted = paged__http_header(&c->http, "Access-Control-Request-Headers");
    char headers[1024], allow[80];
    if (!wanted || strlen(wanted) > 600) wanted = "authorization, content-type, x-request-id";
    snprintf(headers, sizeof headers,
             "%sAccess-Control-Allow-Methods: GET, HEAD, POST, PATCH, DELETE, OPTIONS\r\n"
             "Access-Control-Allow-Headers: %s\r\nAccess-Control-Max-Age: 86400\r\n",
             paged__allow_header(methods, allow, sizeof allow), wanted);
    paged__reply(c, 204, NULL, headers, NULL, 0);
}

/* ---- files ---- */

static const char *type_of(const char *path) {
    static const char *const types[][2] = {{".html", "text/html; charset=utf-8"},
                                           {".css", "text/css; charset=utf-8"},
                                           {".js", "text/javascript; charset=utf-8"},
                                           {".svg", "image/svg+xml"},
                                           {".json", "application/json"}};
    const char *dot = strrchr(path, '.');
    for (size_t i = 0; dot && i < sizeof types / sizeof types[0]; i++)
        if (strcmp(dot, types[i][0]) == 0) return types[i][1];
    return "application/octet-stream";
}

static const paged__file *find_file(const char *path) {
    if (strcmp(path, "/") == 0) path = "/index.html";
    for (const paged__file *f = paged__files; f->path; f++)
        if (strcmp(f->path, path) == 0) return f;
    return NULL;
}

/* Of the files only the description of the API is behind the key: a browser asks for a page without one. */
static bool is_page(const paged__file *file) {
    return file && strcmp(file->path, "/openapi.json") != 0;
}

void paged__route(paged__conn *c) {
    const paged__http *http = &c->http;
    const char *rest = "";
    const paged__file *file = find_file(http->path);
    const route *r = find_route(http->path, &rest);
    const char *methods = file ? "GET" : r ? methods_of(r, rest) : "GET POST PATCH DELETE";
    if (strcmp(http->method, "OPTIONS") == 0) {
        preflight(c, methods);
    } else if (!(r && r->is_open) && !is_page(file) && !has_key(c)) {
        paged__reply_error(c, 401, NULL, "invalid_api_key",
                           "this server asks for an API key: Authorization: Bearer KEY");
    } else if (!file && !r) {
        paged__reply_error(c, 404, NULL, "not_found", "there is no %.100s here", http->path);
    } else if (!has_method(methods, http->method)) {
        c->allow = methods;
        paged__reply_error(c, 405, NULL, "method_not_allowed", "%.100s takes %s", http->path, methods);
    } else if (file) {
        paged__reply(c, 200, type_of(file->path), "Cache-Control: no-cache\r\n", file->data,
                     file->size_bytes);
    } else if (!c->server->service && !r->at_loading) {
        paged__reply_error(c, 503, NULL, NULL, "Loading model");
    } else if (c->server->draining && strcmp(http->method, "POST") == 0) {
        paged__reply_error(c, 503, NULL, NULL, "the server is about to end");
    } else {
        r->handle(c, rest);
    }
}
