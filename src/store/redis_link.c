/* store/redis_link.c: see redis_link.h. */
#include "store/redis_link.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "mem/hash.h"

enum {
    READ_BYTES = 64 << 10, /* at once from a socket */
    ELEMENTS_MAX = 4096,   /* of an array in a reply; what we ask for has fewer */
    TEXT_MAX = 255         /* of a server's name */
};

struct paged__redis_server {
    char name[TEXT_MAX + 1]; /* as given, with its port: for the ranking and for messages */
    char host[TEXT_MAX + 1]; /* or the path of a socket */
    char port[8];            /* empty: a socket */
    uint64_t rank_seed;
    redisContext *context; /* NULL: not connected */
    redisReplyObjectFunctions functions;
    int32_t n_pending;      /* replies that are still to come */
    uint64_t n_call;        /* the last call that looked whether the line is still good */
    uint64_t retry_at_ns;   /* left alone until then; 0: not */
    uint64_t waited_ns;     /* in the call under way */
    struct addrinfo *found; /* addresses of host; owned by the resolver's library */
    struct gaicb search;    /* a search under way, which may outlive a call */
    struct gaicb *searches; /* &search */
    struct addrinfo hints;
    bool is_searching, is_known_down;
};

/* ---- configuration ---- */

/* "host:port", "host", "[v6]:port", "unix:/path"; text of len bytes. */
static bool parse_server(const char *text, size_t len, paged__redis_server *s) {
    if (len == 0 || len > TEXT_MAX - sizeof ":6379") return false;
    for (size_t i = 0; i < len; i++)
        if (!isgraph((unsigned char)text[i])) return false;
    char copy[TEXT_MAX + 1];
    memcpy(copy, text, len);
    copy[len] = 0;
    if (strncmp(copy, "unix:", 5) == 0) {
        struct sockaddr_un address;
        if (copy[5] != '/' || len - 5 >= sizeof address.sun_path) return false;
        snprintf(s->host, sizeof s->host, "%s", copy + 5);
        snprintf(s->name, sizeof s->name, "%s", copy);
        return true;
    }
    char *host = copy, *port = NULL, *end;
    if (copy[0] == '[') {
        host = copy + 1;
        end = strchr(host, ']');
        if (!end || (end[1] && end[1] != ':')) return false;
        port = end[1] ? end + 2 : NULL;
        *end = 0;
    } else if ((port = strchr(copy, ':'))) {
        *port++ = 0;
        if (strchr(port, ':')) return false; /* an IPv6 address without brackets */
    }
    long number = 6379;
    if (port) {
        number = strtol(port, &end, 10);
        if (!isdigit((unsigned char)port[0]) || *end || number < 1 || number > 65535) return false;
    }
    if (!host[0]) return false;
    snprintf(s->host, sizeof s->host, "%s", host);
    snprintf(s->port, sizeof s->port, "%ld", number);
    snprintf(s->name, sizeof s->name, strchr(host, ':') ? "[%.240s]:%ld" : "%.240s:%ld", host, number);
    return true;
}

static paged_status parse_servers(paged__redis_link *l, const char *text, paged_error *err) {
    l->servers = paged__calloc(PAGED__REDIS_SERVERS_MAX, sizeof *l->servers);
    if (!l->servers) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for the list of Redis servers");
    while (text) {
        const size_t len = strcspn(text, ",");
        if (l->n_servers == PAGED__REDIS_SERVERS_MAX)
            return paged__fail(err, PAGED_ERR_INVALID_ARG, "more than %d Redis servers",
                               PAGED__REDIS_SERVERS_MAX);
        paged__redis_server *s = &l->servers[l->n_servers];
        /* What a URL would carry before an @ may be a password: such text is not repeated. */
        if (!parse_server(text, len, s) || strchr(s->host, '@'))
            return paged__fail(err, PAGED_ERR_INVALID_ARG,
                               "Redis server %d of the list is not host:port, [v6]:port or unix:/path",
                               l->n_servers + 1);
        for (int32_t i = 0; i < l->n_servers; i++)
            if (strcmp(l->servers[i].name, s->name) == 0)
                return paged__fail(err, PAGED_ERR_INVALID_ARG, "Redis server %s is in the list twice",
                                   s->name);
        s->rank_seed = XXH3_64bits(s->name, strlen(s->name));
        l->n_servers++;
        text = text[len] ? text + len + 1 : NULL;
    }
    return PAGED_OK;
}

static char *copy_text(const char *text) {
    char *copy = paged__alloc(strlen(text) + 1, 1);
    if (copy) memcpy(copy, text, strlen(text) + 1);
    return copy;
}

static paged_status check(const paged_redis_store_config *c, paged_error *err) {
    if (!c->servers) return paged__fail(err, PAGED_ERR_INVALID_ARG, "no Redis servers given");
    if (c->user && !c->password)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "a Redis user without a password");
    if (c->timeout_ms < 0 || c->timeout_ms > 60000)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "timeout_ms is %d, not 0 to 60000", c->timeout_ms);
    if (c->retry_ms < 0) return paged__fail(err, PAGED_ERR_INVALID_ARG, "retry_ms is %d", c->retry_ms);
    if (c->ttl_s < -1) return paged__fail(err, PAGED_ERR_INVALID_ARG, "ttl_s is %d", c->ttl_s);
    if (c->part_bytes && (c->part_bytes < 4096 || c->part_bytes > (size_t)256 << 20))
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "part_bytes is %zu, not 4096 to %d", c->part_bytes,
                           256 << 20);
    const size_t n = c->prefix ? strlen(c->prefix) : 0;
    if (n > PAGED__REDIS_PREFIX_MAX)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "the prefix has %zu bytes, more than %d", n,
                           PAGED__REDIS_PREFIX_MAX);
    for (size_t i = 0; i < n; i++)
        if (!isgraph((unsigned char)c->prefix[i]))
            return paged__fail(err, PAGED_ERR_INVALID_ARG, "byte %zu of the prefix is no visible character",
                               i);
    return PAGED_OK;
}

paged_status paged__redis_link_init(paged__redis_link *l, const paged_redis_store_config *config,
                                    paged_error *err) {
    paged_redis_store_config c = {0};
    if (!config || config->struct_size < sizeof config->struct_size || config->struct_size > sizeof c)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "struct_size is %zu, this library knows up to %zu",
                           config ? config->struct_size : 0, sizeof c);
    memcpy(&c, config, config->struct_size);
    paged_status status = check(&c, err);
    if (status) return status;
    memset(l, 0, sizeof *l);
    l->timeout_ms = c.timeout_ms ? c.timeout_ms : 200;
    l->retry_ms = c.retry_ms ? c.retry_ms : 2000;
    l->ttl_s = c.ttl_s == 0 ? 24 * 3600 : c.ttl_s < 0 ? 0 : c.ttl_s;
    l->part_bytes = c.part_bytes ? c.part_bytes : (size_t)4 << 20;
    l->up = true;
    snprintf(l->prefix, sizeof l->prefix, "%s", c.prefix ? c.prefix : "paged:");
    status = parse_servers(l, c.servers, err);
    if (!status && ((c.user && !(l->user = copy_text(c.user))) ||
                    (c.password && !(l->password = copy_text(c.password)))))
        status = paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for the password of Redis");
    if (status) paged__redis_link_free(l);
    return status;
}

static void forget_addresses(paged__redis_server *s) {
    if (s->found) freeaddrinfo(s->found);
    s->found = NULL;
}

static void wipe(char *text) {
    if (text) explicit_bzero(text, strlen(text));
    paged__free(text);
}

void paged__redis_link_free(paged__redis_link *l) {
    for (int32_t i = 0; l->servers && i < l->n_servers; i++) {
        paged__redis_server *s = &l->servers[i];
        if (s->context) redisFree(s->context);
        if (s->is_searching) {
            /* The resolver's thread writes here until it says that it is done. */
            gai_cancel(&s->search);
            while (gai_error(&s->search) == EAI_INPROGRESS)
                gai_suspend((const struct gaicb *const *)&s->searches, 1, NULL);
            if (gai_error(&s->search) == 0) s->found = s->search.ar_result;
        }
        forget_addresses(s);
    }
    paged__free(l->servers);
    wipe(l->user);
    wipe(l->password);
    l->servers = NULL;
    l->user = l->password = NULL;
}

/* ---- time, and failure ---- */

void paged__redis_start(paged__redis_link *l, int32_t timeout_ms) {
    l->n_calls++;
    l->started_ns = paged__now_ns();
    l->deadline_ns = l->started_ns + (uint64_t)timeout_ms * 1000000;
    for (int32_t i = 0; i < l->n_servers; i++) l->servers[i].waited_ns = 0;
}

static int ms_left(const paged__redis_link *l) {
    const uint64_t now = paged__now_ns();
    /* Rounded up: a poll of 0 ms would burn the last one. */
    return now >= l->deadline_ns ? 0 : (int)((l->deadline_ns - now + 999999) / 1000000);
}

static void disconnect(paged__redis_server *s) {
    if (s->context) redisFree(s->context);
    s->context = NULL;
    s->n_pending = 0;
}

/* Closes the line; is_fault: it is the server's, which is left alone for a while. Returns false. */
__attribute__((format(printf, 4, 5))) static bool drop(paged__redis_link *l, paged__redis_server *s,
                                                       bool is_fault, const char *fmt, ...) {
    va_list args;
    char why[160];
    va_start(args, fmt);
    vsnprintf(why, sizeof why, fmt, args);
    va_end(args);
    /* A server may have chosen these bytes. */
    for (char *p = why; *p; p++)
        if (!isprint((unsigned char)*p)) *p = '?';
    snprintf(l->reason, sizeof l->reason, "Redis %.90s: %s", s->name, why);
    disconnect(s);
    l->n_failures++;
    if (!is_fault) return false;
    s->retry_at_ns = paged__now_ns() + (uint64_t)l->retry_ms * 1000000;
    l->up = false;
    if (!s->is_known_down)
        paged__log(PAGED_LOG_WARN, "%s; left alone for %d ms at a time", l->reason, l->retry_ms);
    s->is_known_down = true;
    return false;
}

static bool too_late(paged__redis_link *l, paged__redis_server *s) {
    /* A server that came last because others were slow is not to blame. */
    const bool is_fault = s->waited_ns >= (l->deadline_ns - l->started_ns) / 2;
    return drop(l, s, is_fault, "no answer in %llu ms",
                (unsigned long long)((l->deadline_ns - l->started_ns) / 1000000));
}

/* Waits until the socket is ready for `events`. False: the time is over, and the server dropped. */
static bool wait_for(paged__redis_link *l, paged__redis_server *s, short events) {
    for (;;) {
        const int left = ms_left(l);
        if (left == 0) return too_late(l, s);
        struct pollfd fd = {.fd = s->context->fd, .events = events};
        const uint64_t from = paged__now_ns();
        const int n = poll(&fd, 1, left);
        s->waited_ns += paged__now_ns() - from;
        if (n > 0) return true;
        if (n < 0 && errno != EINTR) return drop(l, s, true, "poll: %s", strerror(errno));
    }
}

/* ---- connecting ---- */

/* The addresses of the host, within the time of the call; a slow search goes on and is met by a later one. */
static bool find_addresses(paged__redis_link *l, paged__redis_server *s) {
    if (s->found) return true;
    if (!s->is_searching) {
        s->hints = (struct addrinfo){.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV};
        if (getaddrinfo(s->host, s->port, &s->hints, &s->found) == 0) return true;
        s->found = NULL;
        s->hints.ai_flags = AI_NUMERICSERV;
        s->search = (struct gaicb){.ar_name = s->host, .ar_service = s->port, .ar_request = &s->hints};
        s->searches = &s->search;
        const int code = getaddrinfo_a(GAI_NOWAIT, &s->searches, 1, NULL);
        if (code) return drop(l, s, true, "%s", gai_strerror(code));
        s->is_searching = true;
    }
    const int left = ms_left(l);
    const struct timespec time = {left / 1000, (long)(left % 1000) * 1000000};
    const uint64_t from = paged__now_ns();
    gai_suspend((const struct gaicb *const *)&s->searches, 1, &time);
    s->waited_ns += paged__now_ns() - from;
    const int code = gai_error(&s->search);
    if (code == EAI_INPROGRESS) return too_late(l, s);
    s->is_searching = false;
    if (code) return drop(l, s, true, "%s", gai_strerror(code));
    s->found = s->search.ar_result;
    return true;
}

/* Waits for the connection and says what became of it: 0 or errno; -1: the server has been dropped. */
static int connected(paged__redis_link *l, paged__redis_server *s) {
    int code = 0;
    socklen_t size = sizeof code;
    if (!s->context) return ENOMEM;
    if (s->context->err) {
        code = errno ? errno : ECONNREFUSED;
    } else {
        if (!wait_for(l, s, POLLOUT)) return -1;
        if (getsockopt(s->context->fd, SOL_SOCKET, SO_ERROR, &code, &size) != 0) code = errno;
    }
    if (code) disconnect(s);
    return code;
}

static bool open_line(paged__redis_link *l, paged__redis_server *s) {
    int code = ECONNREFUSED;
    if (!s->port[0]) {
        s->context = redisConnectUnixNonBlock(s->host);
        code = connected(l, s);
    } else {
        if (!find_addresses(l, s)) return false;
        for (const struct addrinfo *a = s->found; a && code > 0; a = a->ai_next) {
            char text[INET6_ADDRSTRLEN + 32];
            if (getnameinfo(a->ai_addr, a->ai_addrlen, text, sizeof text, NULL, 0, NI_NUMERICHOST) != 0)
                continue;
            s->context = redisConnectNonBlock(text, atoi(s->port));
            code = connected(l, s);
        }
        /* A name may stand for another address by the next time. */
        if (code != 0) forget_addresses(s);
    }
    if (code < 0) return false;
    return code == 0 || drop(l, s, true, "%s", strerror(code));
}

/* An array as long as a reply says may take seconds to free, if it says two thousand million. */
static void *make_array(const redisReadTask *task, int n) {
    const redisReplyObjectFunctions *own = task->privdata;
    return n > ELEMENTS_MAX ? NULL : own->createArray(task, n);
}

static bool connect_to(paged__redis_link *l, paged__redis_server *s) {
    if (!open_line(l, s)) return false;
    redisReader *reader = s->context->reader;
    s->functions = *reader->fn;
    s->functions.createArray = make_array;
    reader->privdata = reader->fn; /* hiredis's own, static */
    reader->fn = &s->functions;
    if (!l->password) return true;
    const bool asked = l->user ? paged__redis_ask(l, s, "AUTH %s %s", l->user, l->password)
                               : paged__redis_ask(l, s, "AUTH %s", l->password);
    redisReply *reply = asked ? paged__redis_reply(l, s, 1024) : NULL;
    if (!reply) return false;
    const bool ok = reply->type == REDIS_REPLY_STATUS;
    freeReplyObject(reply);
    /* What the server says of it is not repeated: it might be the password. */
    return ok || drop(l, s, true, "it refused the user or the password");
}

/* Whether the line can be used in this call, which may have to open it. */
static bool begin(paged__redis_link *l, paged__redis_server *s) {
    if (s->retry_at_ns) {
        if (paged__now_ns() < s->retry_at_ns) return false;
        s->retry_at_ns = 0;
    }
    if (s->context && s->n_call != l->n_calls) {
        /* Closed meanwhile, or something that nobody asked for: not the server's fault, but of no use. */
        char byte;
        const ssize_t n = recv(s->context->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        const bool is_quiet = n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
        if (!is_quiet || s->n_pending || s->context->reader->pos < s->context->reader->len) disconnect(s);
    }
    s->n_call = l->n_calls;
    return s->context || connect_to(l, s);
}

static uint64_t rank_of(const paged__redis_server *s, uint64_t hash) {
    return paged__mix(hash ^ s->rank_seed);
}

static paged__redis_server *highest(paged__redis_link *l, uint64_t hash, bool only_up) {
    const uint64_t now = only_up ? paged__now_ns() : 0;
    paged__redis_server *best = NULL;
    for (int32_t i = 0; i < l->n_servers; i++) {
        paged__redis_server *s = &l->servers[i];
        if (only_up && now < s->retry_at_ns) continue;
        if (!best || rank_of(s, hash) > rank_of(best, hash)) best = s;
    }
    return best;
}

paged__redis_server *paged__redis_at(paged__redis_link *l, uint64_t hash) {
    for (int32_t i = 0; i < l->n_servers; i++) {
        paged__redis_server *s = highest(l, hash, true);
        if (!s) return NULL;
        if (begin(l, s)) return s;
    }
    return NULL;
}

paged__redis_server *paged__redis_home(paged__redis_link *l, uint64_t hash) {
    paged__redis_server *s = highest(l, hash, false);
    return begin(l, s) ? s : NULL;
}

paged__redis_server *paged__redis_nth(paged__redis_link *l, int32_t i) {
    return begin(l, &l->servers[i]) ? &l->servers[i] : NULL;
}

/* ---- commands and replies ---- */

bool paged__redis_ask(paged__redis_link *l, paged__redis_server *s, const char *format, ...) {
    if (!s->context) return false;
    va_list args;
    va_start(args, format);
    const int code = redisvAppendCommand(s->context, format, args);
    va_end(args);
    if (code != REDIS_OK) return drop(l, s, false, "no memory for a command");
    s->n_pending++;
    return true;
}

/* hiredis would write() and die of SIGPIPE when the server has gone. */
static bool flush(paged__redis_link *l, paged__redis_server *s) {
    redisContext *c = s->context;
    const size_t size = sdslen(c->obuf);
    for (size_t sent = 0; sent < size;) {
        const ssize_t n = send(c->fd, c->obuf + sent, size - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) {
            sent += (size_t)n;
            l->written_bytes += (uint64_t)n;
        } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            if (!wait_for(l, s, POLLOUT)) return false;
        } else if (n < 0 && errno != EINTR) {
            return drop(l, s, true, "%s", strerror(errno));
        }
    }
    if (size == 0) return true;
    sdsfree(c->obuf);
    c->obuf = sdsempty();
    return c->obuf || drop(l, s, false, "no memory for a command");
}

/* Reads until there is a reply; NULL: the server has been dropped. */
static redisReply *receive(paged__redis_link *l, paged__redis_server *s, size_t limit) {
    redisReader *reader = s->context->reader;
    char bytes[READ_BYTES];
    size_t n_read = 0;
    for (;;) {
        void *reply = NULL;
        if (redisReaderGetReply(reader, &reply) != REDIS_OK) {
            drop(l, s, true, "no Redis protocol: %.100s", reader->errstr);
            return NULL;
        }
        if (reply) return reply;
        /* What came with the reply before may be here already: less than what one read brings. */
        if (n_read > limit && n_read - limit > READ_BYTES) {
            drop(l, s, true, "a reply of more than %zu bytes", limit);
            return NULL;
        }
        const ssize_t n = recv(s->context->fd, bytes, sizeof bytes, MSG_DONTWAIT);
        if (n > 0) {
            n_read += (size_t)n;
            l->read_bytes += (uint64_t)n;
            /* One that drips without end never lets the poll below see the time. */
            if (ms_left(l) == 0) return too_late(l, s), NULL;
            if (redisReaderFeed(reader, bytes, (size_t)n) != REDIS_OK) {
                drop(l, s, false, "no memory for a reply");
                return NULL;
            }
        } else if (n == 0) {
            drop(l, s, true, "it closed the connection");
            return NULL;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            if (!wait_for(l, s, POLLIN)) return NULL;
        } else if (errno != EINTR) {
            drop(l, s, true, "%s", strerror(errno));
            return NULL;
        }
    }
}

/* Errors that are not about the command, but about the server or our rights there. */
static bool is_unfit(const redisReply *reply) {
    static const char *const CODES[] = {"NOAUTH",      "NOPERM",     "LOADING", "READONLY",
                                        "MISCONF",     "MASTERDOWN", "BUSY",    "NOREPLICAS",
                                        "CLUSTERDOWN", "MOVED",      "ASK",     "TRYAGAIN"};
    for (size_t i = 0; i < sizeof CODES / sizeof *CODES; i++) {
        const size_t n = strlen(CODES[i]);
        if (strncmp(reply->str, CODES[i], n) == 0 && (reply->str[n] == ' ' || !reply->str[n])) return true;
    }
    return false;
}

const char *paged__redis_text(const paged__redis_link *l, const redisReply *reply) {
    if (reply->type != REDIS_REPLY_ERROR) return "an answer of another type than the question's";
    const bool tells = l->password && l->password[0] && strstr(reply->str, l->password);
    return tells ? "an error that is not repeated here" : reply->str;
}

redisReply *paged__redis_reply(paged__redis_link *l, paged__redis_server *s, size_t limit) {
    if (!s->context || !flush(l, s)) return NULL;
    redisReply *reply = receive(l, s, limit);
    if (!reply) return NULL;
    s->n_pending--;
    if (reply->type == REDIS_REPLY_ERROR && is_unfit(reply)) {
        drop(l, s, true, "%.100s", paged__redis_text(l, reply));
        freeReplyObject(reply);
        return NULL;
    }
    if (s->is_known_down) paged__log(PAGED_LOG_INFO, "Redis %s: up again", s->name);
    s->is_known_down = false;
    l->up = true;
    return reply;
}

bool paged__redis_is_full(const redisReply *reply) {
    return reply->type == REDIS_REPLY_ERROR && strncmp(reply->str, "OOM ", 4) == 0;
}
