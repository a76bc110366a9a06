/* server/conn.c: see conn.h. */
#include "server/conn.h"

#include <errno.h>
#include <event2/buffer.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/base.h"
#include "server/server.h"

enum {
    INPUT_MAX = 65536,
    OUTPUT_HIGH = 65536,
    OUTPUT_LOW = 16384,
    SOCKET_BYTES = 65536, /* of the kernel's buffer for output; it would grow to megabytes by itself */
    LINGER_MS = 2000,
    TICK_MS = 10000,
    GONE = 499 /* for the log, as nginx has it: the client left before the end */
};

static void serve_input(paged__conn *c);
static void forget_output(paged__conn *c);

/* ---- time ---- */

static void arm(paged__conn *c, int32_t ms) {
    const struct timeval time = {ms / 1000, (ms % 1000) * 1000};
    event_add(c->timer, &time);
}

/* ---- the life of a connection ---- */

void paged__conn_free(paged__conn *c) {
    if (c->state == PAGED__CONN_ANSWERING) {
        if (c->on_gone) c->on_gone(c);
        c->status = GONE;
        paged__server_log(c->server, c);
    }
    forget_output(c);
    paged__server_forget(c->server, c);
    event_free(c->timer);
    bufferevent_free(c->bev);
    paged__http_reset(&c->http);
    paged__buffer_free(&c->out);
    paged__free(c);
}

/* What the client still sends is read and thrown away for a while: a socket that is closed with unread input
 * takes the answer away from the client. */
static void linger(paged__conn *c) {
    c->state = PAGED__CONN_LINGERING;
    shutdown(bufferevent_getfd(c->bev), SHUT_WR);
    evbuffer_drain(bufferevent_get_input(c->bev), SIZE_MAX);
    arm(c, LINGER_MS);
}

static size_t backlog(const paged__conn *c) {
    return evbuffer_get_length(bufferevent_get_output(c->bev)) + c->out.len;
}

static void set_slow(paged__conn *c, bool slow) {
    c->is_slow = slow;
    if (slow)
        bufferevent_enable(c->bev, EV_WRITE);
    else
        bufferevent_disable(c->bev, EV_WRITE);
}

static void on_read(struct bufferevent *bev, void *user) {
    paged__conn *c = user;
    if (c->state == PAGED__CONN_READING)
        serve_input(c);
    else if (c->state != PAGED__CONN_ANSWERING)
        evbuffer_drain(bufferevent_get_input(bev), SIZE_MAX);
}

/* Output is scarce again: to libevent, and to paged__conn_flush_all. */
static void on_write(struct bufferevent *bev, void *user) {
    paged__conn *c = user;
    (void)bev;
    if (c->is_slow && backlog(c) == 0) set_slow(c, false); /* what comes is written by flush again */
    if (c->state == PAGED__CONN_ANSWERING && c->on_room)
        c->on_room(c);
    else if (c->state == PAGED__CONN_READING)
        serve_input(c);
    if (c->state == PAGED__CONN_CLOSING && backlog(c) == 0) linger(c);
}

/* ---- output ---- */

/* What was put into the output goes out when all that happens now is over: an answer in one piece, and the
 * tokens of a step in one. libevent would ask the kernel for a turn first, three calls for each write, which
 * is as much as all the rest. It gets what the socket does not take. */
static void flush_later(paged__conn *c) {
    paged__server *s = c->server;
    if (c->is_unflushed || c->is_slow) return;
    if (!s->unflushed && !s->reads_news) event_active(s->flush_event, EV_WRITE, 0);
    c->is_unflushed = true;
    c->next_unflushed = NULL;
    paged__conn **at = s->unflushed ? &s->last_unflushed->next_unflushed : &s->unflushed;
    *at = s->last_unflushed = c;
}

static void on_output(struct evbuffer *output, const struct evbuffer_cb_info *info, void *user) {
    (void)output;
    if (info->n_added > 0) flush_later(user);
}

static void forget_output(paged__conn *c) {
    paged__server *s = c->server;
    paged__conn **at = &s->unflushed, *before = NULL;
    if (!c->is_unflushed) return;
    for (; *at != c; at = &before->next_unflushed) before = *at;
    *at = c->next_unflushed;
    if (s->last_unflushed == c) s->last_unflushed = before;
    c->is_unflushed = false;
}

/* `out` goes behind what is in the output: something else is to follow it, or the socket is full. */
static void spill(paged__conn *c, size_t n_sent) {
    const size_t n = c->out.len - n_sent;
    c->out.len = 0;
    if (n > 0) evbuffer_add(bufferevent_get_output(c->bev), c->out.data + n_sent, n);
    if (c->out.capacity > OUTPUT_HIGH) paged__buffer_free(&c->out);
}

/* The way of a token: one call. An error comes again in libevent's own write. */
static void send_out(paged__conn *c) {
    const ssize_t n = send(c->fd, c->out.data, c->out.len, MSG_NOSIGNAL | MSG_DONTWAIT);
    const size_t n_sent = n > 0 ? (size_t)n : 0;
    if (n_sent < c->out.len) set_slow(c, true);
    spill(c, n_sent);
}

static void write_output(paged__conn *c) {
    struct evbuffer *output = bufferevent_get_output(c->bev);
    evbuffer_unfreeze(output, 1);
    evbuffer_write(output, c->fd); /* as there */
    evbuffer_freeze(output, 1);
    if (backlog(c) > 0) set_slow(c, true);
}

void paged__conn_flush_all(paged__server *s) {
    while (s->unflushed) {
        paged__conn *c = s->unflushed;
        forget_output(c);
        if (c->out.len > 0)
            send_out(c);
        else
            write_output(c);
        if (backlog(c) <= OUTPUT_LOW) on_write(c->bev, c);
    }
}

/* ---- events ---- */

/* The client's own id where it can be repeated as it is. */
static void name_request(paged__conn *c) {
    const char *given = paged__http_header(&c->http, "x-request-id");
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:";
    if (given && given[0] && strlen(given) < sizeof c->request_id && !given[strspn(given, allowed)])
        snprintf(c->request_id, sizeof c->request_id, "%s", given);
    else
        snprintf(c->request_id, sizeof c->request_id, "req-%016llx",
                 (unsigned long long)paged__mix(c->server->boot + ++c->server->n_requests));
}

static void on_event(struct bufferevent *bev, short what, void *user) {
    paged__conn *c = user;
    (void)bev;
    /* The client has said all and waits for the rest of what was answered. */
    const bool rests = c->state == PAGED__CONN_READING || c->state == PAGED__CONN_CLOSING;
    if ((what & BEV_EVENT_EOF) && rests && backlog(c) > 0)
        c->state = PAGED__CONN_CLOSING;
    else
        paged__conn_free(c);
}

static void on_timer(evutil_socket_t fd, short what, void *user) {
    paged__conn *c = user;
    (void)fd, (void)what;
    if (c->state == PAGED__CONN_READING && c->http.head.len > 0) {
        name_request(c);
        c->http.keep_alive = false;
        c->state = PAGED__CONN_ANSWERING;
        paged__reply_error(c, 408, NULL, "timeout", "the request did not come in time");
    } else if (c->state == PAGED__CONN_ANSWERING) {
        /* Setting the timer for each token would cost more than this look. */
        if (!c->has_spoken && c->on_tick) c->on_tick(c);
        c->has_spoken = false;
        arm(c, TICK_MS);
    } else {
        paged__conn_free(c);
    }
}

void paged__conn_open(paged__server *server, int fd, const char *peer) {
    const int on = 1, bytes = SOCKET_BYTES;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    paged__conn *c = paged__calloc(1, sizeof *c);
    if (!c) {
        close(fd);
        return;
    }
    c->server = server;
    c->fd = fd;
    c->http.body_max = server->config.body_max;
    snprintf(c->peer, sizeof c->peer, "%s", peer);
    c->bev = bufferevent_socket_new(server->base, fd, BEV_OPT_CLOSE_ON_FREE);
    c->timer = c->bev ? evtimer_new(server->base, on_timer, c) : NULL;
    if (!c->timer) {
        if (c->bev)
            bufferevent_free(c->bev);
        else
            close(fd);
        paged__free(c);
        return;
    }
    const int32_t ms = server->config.write_timeout_ms;
    const struct timeval write_time = {ms / 1000, (ms % 1000) * 1000};
    bufferevent_setcb(c->bev, on_read, on_write, on_event, c);
    bufferevent_setwatermark(c->bev, EV_READ, 0, INPUT_MAX);
    bufferevent_setwatermark(c->bev, EV_WRITE, OUTPUT_LOW, 0);
    bufferevent_set_timeouts(c->bev, NULL, &write_time);
    set_slow(c, false);
    evbuffer_add_cb(bufferevent_get_output(c->bev), on_output, c);
    paged__server_remember(server, c);
    arm(c, server->config.head_timeout_ms);
    bufferevent_enable(c->bev, EV_READ);
}

void paged__conn_drain(paged__conn *c) {
    c->http.keep_alive = false;
    const bool is_idle = c->state == PAGED__CONN_READING && c->http.head.len == 0;
    if (!is_idle && !c->is_endless) return;
    if (is_idle && backlog(c) > 0)
        c->state = PAGED__CONN_CLOSING;
    else
        paged__conn_free(c);
}

/* ---- requests ---- */

static void begin_request(paged__conn *c) {
    c->start_ns = paged__now_ns();
    c->status = 0;
    c->n_sent = 0;
    c->is_stream = c->is_chunked = c->sent_continue = c->is_endless = false;
    c->prompt_tokens = c->completion_tokens = -1;
    c->request_id[0] = 0;
    c->allow = NULL;
}

/* Takes input until an answer is under way. A loop and no recursion: a client may send a thousand requests at
 * once. */
static void serve_input(paged__conn *c) {
    struct evbuffer *input = bufferevent_get_input(c->bev);
    if (c->in_input) return;
    c->in_input = true;
    while (c->state == PAGED__CONN_READING && backlog(c) < OUTPUT_HIGH) {
        const size_t n = evbuffer_get_contiguous_space(input);
        if (n == 0) break;
        if (c->http.head.len == 0) begin_request(c);
        const bool was_empty = c->http.head.len == 0, was_head = c->http.state == PAGED__HTTP_HEAD;
        evbuffer_drain(input,
                       paged__http_feed(&c->http, (const char *)evbuffer_pullup(input, (ev_ssize_t)n), n));
        const bool in_head = c->http.state == PAGED__HTTP_HEAD;
        if (was_empty && in_head && c->http.head.len > 0) arm(c, c->server->config.head_timeout_ms);
        if (was_head && !in_head) arm(c, c->server->config.body_timeout_ms);
        if (c->http.state < PAGED__HTTP_DONE) {
            if (!in_head && c->http.expects_continue && !c->sent_continue) {
                static const char line[] = "HTTP/1.1 100 Continue\r\n\r\n";
                bufferevent_write(c->bev, line, sizeof line - 1);
                c->sent_continue = true;
            }
            continue;
        }
        name_request(c);
        c->state = PAGED__CONN_ANSWERING;
        c->head_only = c->http.method && strcmp(c->http.method, "HEAD") == 0;
        if (c->http.state == PAGED__HTTP_FAILED) {
            c->http.keep_alive = false;
            paged__reply_error(c, c->http.status, NULL, NULL, "%s", c->http.error);
        } else {
            arm(c, TICK_MS);
            paged__route(c);
        }
    }
    c->in_input = false;
}

/* ---- answers ---- */

static const char *reason(int status) {
    static const struct {
        int status;
        const char *text;
    } reasons[] = {{200, "OK"},
                   {204, "No Content"},
                   {304, "Not Modified"},
                   {400, "Bad Request"},
                   {401, "Unauthorized"},
                   {404, "Not Found"},
                   {405, "Method Not Allowed"},
                   {408, "Request Timeout"},
                   {409, "Conflict"},
                   {413, "Content Too Large"},
                   {415, "Unsupported Media Type"},
                   {417, "Expectation Failed"},
                   {429, "Too Many Requests"},
                   {431, "Request Header Fields Too Large"},
                   {500, "Internal Server Error"},
                   {501, "Not Implemented"},
                   {503, "Service Unavailable"},
                   {505, "HTTP Version Not Supported"}};
    for (size_t i = 0; i < sizeof reasons / sizeof reasons[0]; i++)
        if (reasons[i].status == status) return reasons[i].text;
    return "Status";
}

const char *paged__error_type(int status) {
    switch (status) {
    case 401:
        return "authentication_error";
    case 404:
        return "not_found_error";
    case 429:
        return "rate_limit_error";
    case 501:
        return "not_supported_error";
    case 503:
        return "unavailable_error";
    default:
        return status < 500 ? "invalid_request_error" : "server_error";
    }
}

/* length: of the body; -1: it is not known. */
static void send_head(paged__conn *c, int status, const char *type, const char *headers, int64_t length) {
    struct evbuffer *out = bufferevent_get_output(c->bev);
    char date[40];
    spill(c, 0);
    const time_t now = time(NULL);
    struct tm tm;
    strftime(date, sizeof date, "%a, %d %b %Y %H:%M:%S GMT", gmtime_r(&now, &tm));
    if (c->server->draining) c->http.keep_alive = false;
    c->status = status;
    evbuffer_add_printf(out, "HTTP/1.1 %d %s\r\nDate: %s\r\nx-request-id: %s\r\n", status, reason(status),
                        date, c->request_id);
    if (type) evbuffer_add_printf(out, "Content-Type: %s\r\n", type);
    if (length >= 0 && status != 204) evbuffer_add_printf(out, "Content-Length: %lld\r\n", (long long)length);
    if (c->is_chunked) evbuffer_add_printf(out, "Transfer-Encoding: chunked\r\n");
    if (c->server->config.cors_origin[0])
        evbuffer_add_printf(out,
                            "Access-Control-Allow-Origin: %s\r\nAccess-Control-Expose-Headers: x-request-id, "
                            "retry-after\r\n%s",
                            c->server->config.cors_origin,
                            strcmp(c->server->config.cors_origin, "*") == 0 ? "" : "Vary: Origin\r\n");
    evbuffer_add_printf(out, "X-Content-Type-Options: nosniff\r\n%sConnection: %s\r\n\r\n",
                        headers ? headers : "", c->http.keep_alive ? "keep-alive" : "close");
}

const char *paged__allow_header(const char *methods, char *out, size_t capacity) {
    size_t n = (size_t)snprintf(out, capacity, "Allow: OPTIONS%s", strstr(methods, "GET") ? ", HEAD" : "");
    for (const char *m = methods; *m && n < capacity; m += strcspn(m, " "), m += *m == ' ')
        n += (size_t)snprintf(out + n, capacity - n, ", %.*s", (int)strcspn(m, " "), m);
    if (n < capacity) snprintf(out + n, capacity - n, "\r\n");
    return out;
}

static void end_answer(paged__conn *c) {
    paged__server_log(c->server, c);
    spill(c, 0);
    paged__buffer_free(&c->out);
    c->work = NULL;
    c->on_room = c->on_gone = c->on_tick = NULL;
    const bool keep = c->http.keep_alive && !c->server->draining;
    paged__http_reset(&c->http);
    if (!keep) {
        /* CLOSING first: flushing goes on in on_write, which comes at once if there is nothing left. */
        c->state = PAGED__CONN_CLOSING;
        event_del(c->timer);
        if (backlog(c) == 0) linger(c);
        return;
    }
    c->state = PAGED__CONN_READING;
    arm(c, c->server->config.idle_timeout_ms);
    serve_input(c);
}

void paged__reply(paged__conn *c, int status, const char *type, const char *headers, const void *data,
                  size_t size_bytes) {
    send_head(c, status, type, headers, (int64_t)size_bytes);
    if (!c->head_only && size_bytes > 0) bufferevent_write(c->bev, data, size_bytes);
    c->n_sent = size_bytes;
    end_answer(c);
}

void paged__reply_json(paged__conn *c, int status, json_t *value) {
    char *text = value ? json_dumps(value, JSON_COMPACT | JSON_REAL_PRECISION(9)) : NULL;
    json_decref(value);
    static const char no_memory[] =
        "{\"error\":{\"message\":\"no memory\",\"type\":\"unavailable_error\",\"param\":null,\"code\":null}}";
    const char *body = text ? text : no_memory;
    paged__reply(c, text ? status : 503, "application/json", NULL, body, strlen(body));
    free(text);
}

void paged__reply_error(paged__conn *c, int status, const char *param, const char *code, const char *fmt,
                        ...) {
    char message[600];
    va_list args;
    va_start(args, fmt);
    vsnprintf(message, sizeof message, fmt, args);
    va_end(args);
    json_t *error = paged__openai_error(message, paged__error_type(status), param, code);
    if (status == 503) { /* as load balancers and llama.cpp's clients know it */
        json_object_set_new(json_object_get(error, "error"), "code", json_integer(503));
    }
    char *text = error ? json_dumps(error, JSON_COMPACT) : NULL;
    json_decref(error);
    char allow[80];
    const char *headers = status == 405 && c->allow ? paged__allow_header(c->allow, allow, sizeof allow)
                          : status == 401           ? "WWW-Authenticate: Bearer\r\n"
                          : status == 429 || status == 503 ? "Retry-After: 1\r\n"
                                                           : NULL;
    const char *body = text ? text : "{\"error\":{\"message\":\"no memory\"}}";
    paged__reply(c, status, "application/json", headers, body, strlen(body));
    free(text);
}

void paged__stream_begin(paged__conn *c, const char *type) {
    c->is_stream = true;
    c->is_chunked = !c->http.is_1_0;
    if (!c->is_chunked) c->http.keep_alive = false;
    send_head(c, 200, type, "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n", -1);
}

/* The size of a chunk and CRLF, in out; its length. */
static size_t chunk_head(size_t n, char out[2 * sizeof n + 2]) {
    static const char digits[] = "0123456789abcdef";
    size_t len = 0;
    int shift = 0;
    while (n >> shift > 15) shift += 4;
    for (; shift >= 0; shift -= 4) out[len++] = digits[n >> shift & 15];
    out[len++] = '\r';
    out[len++] = '\n';
    return len;
}

static void put(paged__conn *c, const char *data, size_t size_bytes) {
    struct evbuffer *output = bufferevent_get_output(c->bev);
    if (!c->is_slow && evbuffer_get_length(output) == 0 && paged__buffer_append(&c->out, data, size_bytes)) {
        flush_later(c);
        return;
    }
    spill(c, 0);
    evbuffer_add(output, data, size_bytes);
}

void paged__stream_write(paged__conn *c, const char *data, size_t size_bytes) {
    char head[2 * sizeof size_bytes + 2];
    if (size_bytes == 0 || c->head_only) return;
    if (c->is_chunked) put(c, head, chunk_head(size_bytes, head));
    put(c, data, size_bytes);
    if (c->is_chunked) put(c, "\r\n", 2);
    c->n_sent += size_bytes;
    c->has_spoken = true;
}

void paged__stream_end(paged__conn *c) {
    if (c->is_chunked && !c->head_only) put(c, "0\r\n\r\n", 5);
    end_answer(c);
}

bool paged__stream_is_full(const paged__conn *c) {
    return backlog(c) >= OUTPUT_HIGH;
}
