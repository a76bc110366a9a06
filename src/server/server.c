/* server/server.c: see server.h. Listening, the loop, signals and how it ends. */
#include "server/server.h"

#include <arpa/inet.h>
#include <errno.h>
#include <event2/listener.h>
#include <fcntl.h>
#include <netdb.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"
#include "server/blocks.h"
#include "server/conversation.h"
#include "server/generate.h"
#include "server/keeper.h"
#include "server/metrics.h"
#include "server/slots.h"

enum {
    BACKLOG = 1024,
    LISTEN_AGAIN_MS = 100,
    LOOK_MS = 500,
    /* conversations in memory */
    CONVERSATIONS_MAX = 10000,
    CONVERSATION_BYTES_MAX = 256 << 20
};

/* ---- connections ---- */

void paged__server_remember(paged__server *s, paged__conn *c) {
    c->next = s->conns;
    if (s->conns) s->conns->prev = c;
    s->conns = c;
    s->n_conns++;
}

void paged__server_settle(paged__server *s) {
    if (s->draining && s->n_conns == 0 && !paged__slots_is_saving(s->slots))
        event_base_loopexit(s->base, NULL);
}

void paged__server_forget(paged__server *s, paged__conn *c) {
    if (c->prev)
        c->prev->next = c->next;
    else
        s->conns = c->next;
    if (c->next) c->next->prev = c->prev;
    s->n_conns--;
    paged__server_settle(s);
}

static void name_peer(const struct sockaddr *address, char *out, size_t capacity) {
    char host[INET6_ADDRSTRLEN] = "?";
    int port = 0;
    if (address->sa_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)(const void *)address;
        inet_ntop(AF_INET, &in->sin_addr, host, sizeof host);
        port = ntohs(in->sin_port);
    } else if (address->sa_family == AF_INET6) {
        const struct sockaddr_in6 *in = (const struct sockaddr_in6 *)(const void *)address;
        inet_ntop(AF_INET6, &in->sin6_addr, host, sizeof host);
        port = ntohs(in->sin6_port);
    }
    snprintf(out, capacity, strchr(host, ':') ? "[%s]:%d" : "%s:%d", host, port);
}

/* One more than there may be: it is told, as far as its socket takes it, and closed. */
static void refuse_connection(int fd) {
    static const char body[] =
        "{\"error\":{\"message\":\"too many connections\",\"type\":\"unavailable_error\","
        "\"param\":null,\"code\":503}}";
    char reply[400];
    const int n = snprintf(reply, sizeof reply,
                           "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
                           "Content-Length: %zu\r\nRetry-After: 1\r\nConnection: close\r\n\r\n%s",
                           sizeof body - 1, body);
    (void)!write(fd, reply, (size_t)n);
    close(fd);
}

static void on_accept(struct evconnlistener *listener, evutil_socket_t fd, struct sockaddr *address, int len,
                      void *user) {
    paged__server *s = user;
    (void)listener, (void)len;
    if (s->n_conns >= s->config.max_connections) {
        refuse_connection(fd);
        return;
    }
    char peer[64];
    name_peer(address, peer, sizeof peer);
    paged__conn_open(s, fd, peer);
}

static void on_listen_again(evutil_socket_t fd, short what, void *user) {
    paged__server *s = user;
    (void)fd, (void)what;
    if (s->listener) evconnlistener_enable(s->listener);
}

/* Out of descriptors, as a rule: without a pause the loop would turn at full speed. */
static void on_accept_error(struct evconnlistener *listener, void *user) {
    paged__server *s = user;
    const struct timeval pause = {0, LISTEN_AGAIN_MS * 1000};
    evconnlistener_disable(listener);
    event_add(s->listen_again, &pause);
}

static void on_flush(evutil_socket_t fd, short what, void *user) {
    (void)fd, (void)what;
    paged__conn_flush_all(user);
}

/* ---- the end ---- */

static void on_drained(evutil_socket_t fd, short what, void *user) {
    paged__server *s = user;
    (void)fd, (void)what;
    event_base_loopexit(s->base, NULL);
}

static void drain(paged__server *s) {
    const struct timeval most = {s->config.drain_timeout_ms / 1000,
                                 (s->config.drain_timeout_ms % 1000) * 1000};
    s->draining = true;
    if (s->listener) evconnlistener_free(s->listener);
    s->listener = NULL;
    event_add(s->drain_timer, &most);
    for (paged__conn *c = s->conns, *next; c; c = next) {
        next = c->next;
        paged__conn_drain(c);
    }
    paged__server_settle(s);
}

static void on_signal(evutil_socket_t fd, short what, void *user) {
    paged__server *s = user;
    (void)fd, (void)what;
    if (s->draining)
        event_base_loopexit(s->base, NULL);
    else
        drain(s);
}

/* ---- the model ---- */

/* The scheduler wakes the loop where it was, also where the engine's thread is busy and another core is not.
 */
static void keep_off(paged__server *s, int cpu) {
    cpu_set_t others = s->cpus;
    if (cpu < 0 || sched_getcpu() != cpu) return;
    CPU_CLR((size_t)cpu, &others);
    if (CPU_COUNT(&others) > 0) sched_setaffinity(0, sizeof others, &others);
}

static void on_service(evutil_socket_t fd, short what, void *user) {
    paged__server *s = user;
    (void)fd, (void)what;
    paged__generate_news(s);
    keep_off(s, paged_service_cpu(s->service));
}

typedef struct facts {
    paged_engine_info info;
} facts;

static void get_facts(paged_engine *engine, void *user) {
    facts *f = user;
    paged_engine_get_info(engine, &f->info);
}

static void on_opened(evutil_socket_t fd, short what, void *user) {
    paged__server *s = user;
    paged__server_model *model = NULL;
    (void)what;
    if (read(fd, &model, sizeof model) != sizeof model) return;
    if (model->service) {
        facts f;
        paged_service_call(model->service, get_facts, &f);
        s->info = f.info;
        s->world = model->world;
        s->path = model->path;
        s->service = model->service;
        s->news_ns = paged__now_ns();
        paged_model_get_info(s->world.model, &s->model_info);
        s->service_event =
            event_new(s->base, paged_service_fd(s->service), EV_READ | EV_PERSIST, on_service, s);
        s->failed = !s->service_event || event_add(s->service_event, NULL) != 0;
        paged__conversation_mend(s);
    } else {
        s->failed = true;
    }
    paged__free(model);
    if (s->failed)
        event_base_loopexit(s->base, NULL);
    else if (s->config.on_ready)
        s->config.on_ready(s->config.user, s->port);
}

void paged__server_open(paged__server *s, const paged__server_model *model) {
    /* A copy travels through the pipe, so that the caller's may go. */
    paged__server_model *copy = paged__alloc(1, sizeof *copy);
    if (copy) *copy = *model;
    if (!copy || write(s->opened_fds[1], &copy, sizeof copy) != sizeof copy) raise(SIGTERM);
}

/* Once is enough: until the engine has told something nobody waits again. */
bool paged__server_look(paged__server *s, void (*fn)(paged_engine *engine, void *user), void *user) {
    const bool waits = s->deaf_ns <= s->news_ns;
    const bool done = paged_service_call_within(s->service, waits ? LOOK_MS : 0, fn, user);
    s->deaf_ns = done ? 0 : paged__now_ns();
    return done;
}

bool paged__server_is_stalled(const paged__server *s) {
    const uint64_t quiet_ms = (paged__now_ns() - s->news_ns) / 1000000;
    return s->n_running > s->n_blocked && quiet_ms > (uint64_t)s->config.stall_ms;
}

/* ---- the log ---- */

void paged__server_log(paged__server *s, const paged__conn *c) {
    const double ms = (double)(paged__now_ns() - c->start_ns) / 1e6;
    paged__metrics_http(s->metrics, c->status);
    if (!s->config.access_log) return;
    char now[40];
    const time_t seconds = time(NULL);
    struct tm tm;
    strftime(now, sizeof now, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&seconds, &tm));
    const char *method = c->http.method ? c->http.method : "", *path = c->http.path ? c->http.path : "";
    json_t *line = json_pack("{s:s, s:s, s:s, s:o, s:o, s:i, s:f, s:I}", "time", now, "id", c->request_id,
                             "client", c->peer, "method", paged__json_text(method, strlen(method)), "path",
                             paged__json_text(path, strlen(path)), "status", c->status, "ms", ms, "bytes",
                             (json_int_t)c->n_sent);
    if (line && c->prompt_tokens >= 0) {
        json_object_set_new(line, "prompt_tokens", json_integer(c->prompt_tokens));
        json_object_set_new(line, "completion_tokens", json_integer(c->completion_tokens));
    }
    char *text = line ? json_dumps(line, JSON_COMPACT | JSON_REAL_PRECISION(6)) : NULL;
    json_decref(line);
    if (text) {
        fprintf(s->config.access_log, "%s\n", text);
        fflush(s->config.access_log);
    }
    free(text);
}

/* ---- conversations ---- */

static void on_keeper(evutil_socket_t fd, short what, void *user) {
    paged__server *s = user;
    (void)fd, (void)what;
    paged__keeper_news(s->keeper, s);
}

static paged_status start_keeper(paged__server *s, const paged_notes *given, paged_error *err) {
    paged_notes notes = {0};
    paged_status status = PAGED_OK;
    if (given)
        notes = *given;
    else
        status = paged__memory_notes(CONVERSATIONS_MAX, CONVERSATION_BYTES_MAX, &notes, err);
    if (status == PAGED_OK) status = paged__keeper_create(&notes, &s->keeper, err);
    if (status != PAGED_OK) {
        if (notes.close) notes.close(notes.self);
        return status;
    }
    s->keeper_event = event_new(s->base, paged__keeper_fd(s->keeper), EV_READ | EV_PERSIST, on_keeper, s);
    if (s->keeper_event && event_add(s->keeper_event, NULL) == 0) return PAGED_OK;
    return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a server");
}

/* ---- create, run, free ---- */

static bool listen_on(paged__server *s, const struct addrinfo *a) {
    s->listener = evconnlistener_new_bind(s->base, on_accept, s,
                                          LEV_OPT_CLOSE_ON_FREE | LEV_OPT_CLOSE_ON_EXEC | LEV_OPT_REUSEABLE,
                                          BACKLOG, a->ai_addr, (int)a->ai_addrlen);
    if (!s->listener) return false;
    evconnlistener_set_error_cb(s->listener, on_accept_error);
    struct sockaddr_storage bound;
    socklen_t len = sizeof bound;
    if (getsockname(evconnlistener_get_fd(s->listener), (struct sockaddr *)&bound, &len) == 0)
        s->port =
            ntohs(bound.ss_family == AF_INET6 ? ((const struct sockaddr_in6 *)(const void *)&bound)->sin6_port
                                              : ((const struct sockaddr_in *)(const void *)&bound)->sin_port);
    return true;
}

static paged_status start_listening(paged__server *s, paged_error *err) {
    const struct addrinfo hints = {
        .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *found = NULL;
    char port[16];
    snprintf(port, sizeof port, "%d", s->config.port);
    const int rc = getaddrinfo(s->config.host, port, &hints, &found);
    if (rc != 0)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "host '%s': %s", s->config.host, gai_strerror(rc));
    for (const struct addrinfo *a = found; a && !s->listener; a = a->ai_next) listen_on(s, a);
    const int reason = errno;
    freeaddrinfo(found);
    if (s->listener) return PAGED_OK;
    return paged__fail(err, PAGED_ERR_IO, "cannot listen on %s port %d: %s", s->config.host, s->config.port,
                       strerror(reason));
}

paged_status paged__server_create(const paged__server_config *config, paged__server **out, paged_error *err) {
    paged__server *s = paged__calloc(1, sizeof *s);
    if (!s) {
        if (config->notes) config->notes->close(config->notes->self);
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a server");
    }
    s->config = *config;
    s->config.notes = NULL;
    s->started = (int64_t)time(NULL);
    s->opened_fds[0] = s->opened_fds[1] = -1;
    if (getrandom(&s->boot, sizeof s->boot, 0) != sizeof s->boot) s->boot = paged__now_ns();
    s->base = event_base_new();
    s->metrics = paged__metrics_create();
    paged_status status = PAGED_ERR_NO_MEMORY;
    if (!s->base) {
        if (config->notes) config->notes->close(config->notes->self);
        goto fail;
    }
    status = start_keeper(s, config->notes, err);
    if (status == PAGED_OK && config->slot_dir && config->slot_dir[0])
        status = paged__slots_create(s, config->slot_dir, &s->slots, err);
    if (status != PAGED_OK) goto fail;
    status = PAGED_ERR_NO_MEMORY;
    if (!s->metrics || pipe2(s->opened_fds, O_CLOEXEC) != 0) goto fail;
    s->listen_again = evtimer_new(s->base, on_listen_again, s);
    s->drain_timer = evtimer_new(s->base, on_drained, s);
    s->flush_event = event_new(s->base, -1, 0, on_flush, s);
    s->opened_event = event_new(s->base, s->opened_fds[0], EV_READ, on_opened, s);
    s->signals[0] = evsignal_new(s->base, SIGTERM, on_signal, s);
    s->signals[1] = evsignal_new(s->base, SIGINT, on_signal, s);
    if (!s->listen_again || !s->drain_timer || !s->flush_event || !s->opened_event ||
        event_add(s->opened_event, NULL) != 0)
        goto fail;
    for (int32_t i = 0; i < 2; i++)
        if (!s->signals[i] || event_add(s->signals[i], NULL) != 0) goto fail;
    status = start_listening(s, err);
    if (status != PAGED_OK) goto fail;
    *out = s;
    return PAGED_OK;
fail:
    if (status == PAGED_ERR_NO_MEMORY) paged__fail(err, status, "no memory for a server");
    paged__server_free(s);
    return status;
}

bool paged__server_run(paged__server *s) {
    if (sched_getaffinity(0, sizeof s->cpus, &s->cpus) != 0) CPU_ZERO(&s->cpus);
    event_base_dispatch(s->base);
    return !s->failed;
}

void paged__server_free(paged__server *s) {
    if (!s) return;
    s->draining = true;
    /* First of all: whoever does not want to wait for what follows ends the process. */
    for (int32_t i = 0; i < 2; i++)
        if (s->signals[i]) event_free(s->signals[i]);
    while (s->conns) paged__conn_free(s->conns);
    paged__keeper_free(s->keeper, s);
    paged__map_free(s);
    if (s->listener) evconnlistener_free(s->listener);
    struct event *events[] = {s->listen_again, s->drain_timer, s->service_event,
                              s->opened_event, s->flush_event, s->keeper_event};
    for (size_t i = 0; i < sizeof events / sizeof events[0]; i++)
        if (events[i]) event_free(events[i]);
    for (int32_t i = 0; i < 2; i++)
        if (s->opened_fds[i] >= 0) close(s->opened_fds[i]);
    paged__slots_free(s->slots, s);
    if (s->base) event_base_free(s->base);
    paged__metrics_free(s->metrics);
    paged__free(s);
}
