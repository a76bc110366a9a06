/* engine/service.c: an engine with a thread of its own; see service.h.
 *
 *   lock ─ read, submit, release … ─ unlock                      callers
 *   lock ─ end step, tell ─ unlock ─ lock ─ begin step, tell ─ unlock ─ compute ─ lock …    the thread
 *
 * One lock guards the engine, and is free while a step is computed: that is the long part, and it looks only
 * at the requests that run and at the step's own arrays (see paged__step_compute). So callers use the engine
 * as if they were alone, except that a request that runs stays until the step's end: its release is noted.
 * What a reader gets are the engine's own arrays, which never move; there is no second copy of an answer, and
 * the ring of a request is the part of them that was not read.
 *
 * The thread sleeps on a semaphore, which a signal handler may post. It is posted once between two looks
 * (`roused`), so that it counts nothing that is over; whoever changes something does so before he posts, and
 * the thread looks after it has cleared the mark. Readers sleep on a condition of their slot.
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "engine/engine.h"

enum {
    DEFAULT_RING = 256,
    DEFAULT_READER_TIMEOUT_MS = 60000,
    NS_PER_MS = 1000000,
    NS_PER_S = 1000000000,
    SPINS = 512 /* some 10 µs */
};

/* How far a request was when its callers were last told. */
typedef struct progress {
    uint64_t id;
    int32_t n_made, n_prompt_done;
    bool ended;
} progress;

/* What the service keeps of a slot of the engine. */
typedef struct desk {
    pthread_cond_t news;
    int32_t n_readers; /* that wait for news */
    bool listed;       /* has news that nobody has asked for */
    bool released;     /* but in the step that is computed */
    progress told;
} desk;

struct paged_service {
    paged_engine *engine;
    desk *desks;        /* [engine->n_slots] */
    int32_t n_used;     /* slots before this one may be taken, the others are free and their desks empty */
    int32_t n_released; /* desks */
    pthread_mutex_t lock;
    pthread_cond_t computed, called; /* the step is over; the calls that waited for it are */
    bool computing, ends;
    int32_t n_calls;  /* that wait for the step's end */
    int32_t n_listed; /* desks; the descriptor is readable while there are any */
    bool rings;       /* the descriptor is to become readable; of the thread alone */
    int32_t next;     /* desk that paged_service_ready() looks at first */
    atomic_int cpu;   /* that the thread was last seen on; -1: not yet */
    int fd;
    sem_t wake;
    atomic_bool roused;
    pthread_t thread;
};

/* ---- waking and sleeping ---- */

static void rouse(paged_service *s) {
    if (!atomic_exchange(&s->roused, true)) sem_post(&s->wake);
}

static void rouse_for_store(void *user) {
    rouse(user);
}

static void clear_roused(paged_service *s) {
    while (sem_trywait(&s->wake) == 0) {
    }
    atomic_store(&s->roused, false);
}

static struct timespec at(uint64_t ns) {
    return (struct timespec){.tv_sec = (time_t)(ns / NS_PER_S), .tv_nsec = (long)(ns % NS_PER_S)};
}

/* Without the lock, which the one who wakes up takes at once. By then the news may have been taken: see
 * hush. */
static void ring(paged_service *s) {
    if (!s->rings) return;
    s->rings = false;
    eventfd_write(s->fd, 1);
}

/* The lock, for a caller. Where the thread has it, it has it for microseconds, and is about to compute: to
 * sleep for so little would cost both more. */
static void enter(paged_service *s) {
    for (int32_t i = 0; i < SPINS; i++) {
        if (pthread_mutex_trylock(&s->lock) == 0) return;
        paged__pause_core();
    }
    pthread_mutex_lock(&s->lock);
}

/* Until somebody rouses it or the time has come; the lock is free meanwhile. */
static void sleep_until(paged_service *s, uint64_t ns) {
    pthread_mutex_unlock(&s->lock);
    ring(s);
    if (ns == UINT64_MAX) {
        sem_wait(&s->wake);
    } else {
        const struct timespec end = at(ns);
        sem_clockwait(&s->wake, CLOCK_MONOTONIC, &end);
    }
    pthread_mutex_lock(&s->lock);
}

/* ---- requests and their desks ---- */

static desk *desk_of(const paged_service *s, const paged__request *r) {
    return &s->desks[r - s->engine->slots];
}

static paged__request *find(const paged_service *s, uint64_t id) {
    paged__request *r = paged__request_find(s->engine, id);
    return r && !desk_of(s, r)->released ? r : NULL;
}

static void list(paged_service *s, desk *d) {
    if (d->listed) return;
    d->listed = true;
    if (s->n_listed++ == 0) s->rings = true;
}

static void hush(paged_service *s) {
    eventfd_t n;
    if (s->n_listed == 0) eventfd_read(s->fd, &n);
}

static void unlist(paged_service *s, desk *d) {
    if (!d->listed) return;
    d->listed = false;
    s->n_listed--;
    hush(s);
}

static void tell_of(paged_service *s, int32_t i) {
    const paged__request *r = &s->engine->slots[i];
    desk *d = &s->desks[i];
    const progress now = {.id = r->id,
                          .n_made = paged__n_made(r),
                          .n_prompt_done = PAGED_MIN(r->n_cached, r->n_prompt),
                          .ended = r->state == PAGED__FINISHED};
    const bool is_new = now.id != d->told.id || now.n_made > d->told.n_made ||
                        now.n_prompt_done > d->told.n_prompt_done || now.ended != d->told.ended;
    d->told = now;
    if (!is_new || !now.id || d->released || !paged__request_has_news(r)) return;
    if (d->n_readers)
        pthread_cond_broadcast(&d->news);
    else
        list(s, d);
}

/* Of what is new since the last time: readers that wait, else the event loop. */
static void tell(paged_service *s) {
    for (int32_t i = 0; i < s->n_used; i++) tell_of(s, i);
    while (s->n_used > 0 && s->engine->slots[s->n_used - 1].id == 0) s->n_used--;
}

/* ---- the thread ---- */

static void clear_released(paged_service *s) {
    for (int32_t i = 0; i < s->n_used && s->n_released > 0; i++) {
        if (!s->desks[i].released) continue;
        s->desks[i].released = false;
        s->n_released--;
        paged__request_clear(s->engine, &s->engine->slots[i]);
    }
}

/* Tokens go out while the next step is prepared, which one core does: the event loop has the other. */
static void tell_early(paged_service *s) {
    atomic_store_explicit(&s->cpu, sched_getcpu(), memory_order_relaxed);
    tell(s);
    if (!s->rings) return;
    pthread_mutex_unlock(&s->lock);
    ring(s);
    pthread_mutex_lock(&s->lock);
}

static void compute(paged_service *s) {
    paged_error err;
    s->computing = true;
    pthread_mutex_unlock(&s->lock);
    ring(s);
    const paged_status status = paged__step_compute(s->engine, &err);
    pthread_mutex_lock(&s->lock);
    s->computing = false;
    if (status) paged__log(PAGED_LOG_ERROR, "%s", err.message);
    paged__step_end(s->engine, status);
    clear_released(s);
    tell_early(s);
    if (s->n_calls) pthread_cond_broadcast(&s->computed);
    while (s->n_calls) pthread_cond_wait(&s->called, &s->lock);
}

static void *serve(void *arg) {
    paged_service *s = arg;
    pthread_mutex_lock(&s->lock);
    while (!s->ends) {
        clear_roused(s);
        const bool has_work = paged__step_begin(s->engine);
        tell(s);
        if (has_work)
            compute(s);
        else
            sleep_until(s, paged__next_event(s->engine));
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* The system's number; 0: it runs. */
static int start(paged_service *s) {
    sigset_t all, before;
    /* A new thread inherits the mask: signals are for the threads of the program. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int why = pthread_create(&s->thread, NULL, serve, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!why) pthread_setname_np(s->thread, "paged-engine");
    return why;
}

/* ---- create, free ---- */

/* What is there of a service whose thread does not run. */
static void free_parts(paged_service *s) {
    for (int32_t i = 0; s->desks && i < s->engine->n_slots; i++) pthread_cond_destroy(&s->desks[i].news);
    paged__free(s->desks);
    paged_engine_free(s->engine);
    if (s->fd >= 0) close(s->fd);
    sem_destroy(&s->wake);
    pthread_cond_destroy(&s->called);
    pthread_cond_destroy(&s->computed);
    pthread_mutex_destroy(&s->lock);
    paged__free(s);
}

static paged_status read_config(const paged_service_config *config, paged_service_config *c,
                                paged_error *err) {
    *c = (paged_service_config){0};
    if (!config) paged_engine_config_init(&c->engine);
    if (config) {
        if (config->struct_size < sizeof config->struct_size || config->struct_size > sizeof *config)
            return paged__fail(err, PAGED_ERR_INVALID_ARG, "struct_size is %zu, this library knows up to %zu",
                               config->struct_size, sizeof *config);
        memcpy(c, config, config->struct_size);
    }
    c->engine.struct_size = sizeof c->engine;
    if (c->ring_tokens < 0 || c->reader_timeout_ms < 0)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "ring_tokens is %d, reader_timeout_ms %d; at least 0",
                           c->ring_tokens, c->reader_timeout_ms);
    if (c->ring_tokens == 0) c->ring_tokens = DEFAULT_RING;
    if (c->reader_timeout_ms == 0) c->reader_timeout_ms = DEFAULT_READER_TIMEOUT_MS;
    return PAGED_OK;
}

/* One whose waits end by the clock of paged__now_ns(). */
static void init_cond(pthread_cond_t *cond) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

static paged_status create_parts(paged_service *s, const paged_model *model, const paged_service_config *c,
                                 const paged__backend *backend, paged_error *err) {
    paged_status status = paged__engine_create(model, &c->engine, backend, &s->engine, err);
    if (status) return status;
    s->engine->max_unread = c->ring_tokens;
    s->engine->reader_timeout_ns = (uint64_t)c->reader_timeout_ms * NS_PER_MS;
    if (s->engine->stores) { /* nothing was asked or written yet, so the thread has not looked */
        s->engine->stores->notify_user = s;
        s->engine->stores->notify = rouse_for_store;
    }
    s->desks = paged__calloc((size_t)s->engine->n_slots, sizeof *s->desks);
    if (!s->desks)
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for %d requests", s->engine->n_slots);
    for (int32_t i = 0; i < s->engine->n_slots; i++) init_cond(&s->desks[i].news);
    s->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    const int why = s->fd < 0 ? errno : start(s);
    char reason[128];
    if (why)
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "the system gives no %s: %s",
                           s->fd < 0 ? "descriptor" : "thread", strerror_r(why, reason, sizeof reason));
    return PAGED_OK;
}

paged_status paged__service_create(const paged_model *model, const paged_service_config *config,
                                   const paged__backend *backend, paged_service **out, paged_error *err) {
    paged_service_config c;
    if (!model || !out) return paged__fail(err, PAGED_ERR_INVALID_ARG, "%s is NULL", model ? "out" : "model");
    paged_status status = read_config(config, &c, err);
    if (status) return status;
    paged_service *s = paged__calloc(1, sizeof *s);
    if (!s) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a service");
    s->fd = -1;
    atomic_init(&s->cpu, -1);
    init_cond(&s->computed);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->called, NULL);
    sem_init(&s->wake, 0, 0);
    status = create_parts(s, model, &c, backend, err);
    if (status) {
        free_parts(s);
        return status;
    }
    *out = s;
    return PAGED_OK;
}

paged_status paged_service_create(const paged_model *model, const paged_service_config *config,
                                  paged_service **out, paged_error *err) {
    return paged__service_create(model, config, NULL, out, err);
}

void paged_service_free(paged_service *s) {
    if (!s) return;
    pthread_mutex_lock(&s->lock);
    s->ends = true;
    pthread_mutex_unlock(&s->lock);
    rouse(s);
    pthread_join(s->thread, NULL);
    free_parts(s);
}

/* ---- calls ---- */

paged_status paged_service_submit(paged_service *s, const paged_request *request, uint64_t *id,
                                  paged_error *err) {
    if (!s) return paged__fail(err, PAGED_ERR_INVALID_ARG, "service is NULL");
    enter(s);
    const paged_status status = paged_engine_submit(s->engine, request, id, err);
    for (int32_t i = s->n_used; i < s->engine->n_slots; i++)
        if (s->engine->slots[i].id) s->n_used = i + 1;
    pthread_mutex_unlock(&s->lock);
    if (!status) rouse(s);
    return status;
}

/* The request, once it has news or has ended or the time is over; NULL: there is none by that id (any
 * more). */
static paged__request *wait_for_news(paged_service *s, uint64_t id, int32_t timeout_ms) {
    const struct timespec end =
        at(paged__now_ns() + (uint64_t)PAGED_MAX(timeout_ms, 0) * (uint64_t)NS_PER_MS);
    paged__request *r = find(s, id);
    for (int why = 0; r && !why && timeout_ms != 0;) {
        desk *d = desk_of(s, r);
        if (r->state == PAGED__FINISHED || paged__request_has_news(r)) break;
        d->n_readers++;
        if (timeout_ms < 0)
            pthread_cond_wait(&d->news, &s->lock);
        else
            why = pthread_cond_timedwait(&d->news, &s->lock, &end);
        r = find(s, id);
        if (r) d->n_readers--; /* who released it has counted it out */
    }
    return r;
}

paged_status paged_service_read(paged_service *s, uint64_t id, int32_t timeout_ms, paged_output *out) {
    enter(s);
    const paged__request *r = wait_for_news(s, id, timeout_ms);
    const bool was_parked = r && paged__request_is_parked(s->engine, r);
    const paged_status status = r ? paged_engine_read(s->engine, id, out) : PAGED_ERR_NOT_FOUND;
    if (!status) unlist(s, desk_of(s, r));
    pthread_mutex_unlock(&s->lock);
    if (was_parked) rouse(s);
    return status;
}

paged_status paged_service_prompt_logprobs(paged_service *s, uint64_t id, const float **logprobs,
                                           const int32_t **top1, int32_t *n) {
    enter(s);
    const paged_status status =
        find(s, id) ? paged_engine_prompt_logprobs(s->engine, id, logprobs, top1, n) : PAGED_ERR_NOT_FOUND;
    pthread_mutex_unlock(&s->lock);
    return status;
}

void paged_service_cancel(paged_service *s, uint64_t id) {
    const int kept = errno; /* a signal handler may have interrupted somebody who looks at it */
    paged_engine_cancel(s->engine, id);
    rouse(s);
    errno = kept;
}

paged_status paged_service_release(paged_service *s, uint64_t id) {
    enter(s);
    paged__request *r = find(s, id);
    if (r) {
        desk *d = desk_of(s, r);
        unlist(s, d);
        pthread_cond_broadcast(&d->news);
        d->n_readers = 0;
        if (s->computing && r->state == PAGED__RUNNING) {
            d->released = true;
            s->n_released++;
        } else {
            paged__request_clear(s->engine, r);
        }
    }
    pthread_mutex_unlock(&s->lock);
    rouse(s);
    return r ? PAGED_OK : PAGED_ERR_NOT_FOUND;
}

int paged_service_fd(const paged_service *s) {
    return s->fd;
}

int32_t paged_service_cpu(const paged_service *s) {
    return atomic_load_explicit(&s->cpu, memory_order_relaxed);
}

int32_t paged_service_ready(paged_service *s, uint64_t *ids, int32_t capacity) {
    int32_t n = 0;
    enter(s);
    /* It begins behind the last one, so that a small capacity passes nobody over. */
    for (int32_t i = 0; i < s->n_used && n < capacity && s->n_listed > 0; i++) {
        const int32_t slot = s->next < s->n_used ? s->next : 0;
        s->next = slot + 1;
        if (!s->desks[slot].listed) continue;
        ids[n++] = s->engine->slots[slot].id;
        s->desks[slot].listed = false;
        s->n_listed--;
    }
    hush(s);
    pthread_mutex_unlock(&s->lock);
    return n;
}

bool paged_service_call_within(paged_service *s, int32_t timeout_ms, void (*fn)(paged_engine *, void *),
                               void *user) {
    const struct timespec end =
        at(paged__now_ns() + (uint64_t)PAGED_MAX(timeout_ms, 0) * (uint64_t)NS_PER_MS);
    enter(s);
    s->n_calls++;
    for (int why = 0; s->computing && !why;)
        why = timeout_ms < 0 ? pthread_cond_wait(&s->computed, &s->lock)
                             : pthread_cond_timedwait(&s->computed, &s->lock, &end);
    const bool may = !s->computing;
    if (may) fn(s->engine, user);
    if (--s->n_calls == 0) pthread_cond_signal(&s->called);
    pthread_mutex_unlock(&s->lock);
    rouse(s);
    return may;
}

void paged_service_call(paged_service *s, void (*fn)(paged_engine *engine, void *user), void *user) {
    paged_service_call_within(s, -1, fn, user);
}

paged_status paged_service_pin(paged_service *s, const char *name, const char *salt, const int32_t *tokens,
                               int32_t n_tokens, paged_error *err) {
    return paged_engine_pin(s->engine, name, salt, tokens, n_tokens, err);
}

paged_status paged_service_pins(paged_service *s, bool (*fn)(void *user, const char *name), void *user,
                                paged_error *err) {
    return paged_engine_pins(s->engine, fn, user, err);
}
