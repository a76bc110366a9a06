/* server/keeper.c: see keeper.h. */
#include "server/keeper.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/base.h"

typedef struct jobs {
    paged__job *first, **last;
} jobs;

struct paged__keeper {
    paged_notes notes;
    pthread_t thread;
    pthread_mutex_t lock; /* of all below */
    pthread_cond_t more;
    jobs asked, done;
    int32_t n_asked;
    int fd;
    bool ends;
};

static void append(jobs *list, paged__job *job) {
    job->next = NULL;
    *list->last = job;
    list->last = &job->next;
}

static paged__job *take_first(jobs *list) {
    paged__job *job = list->first;
    if (job) list->first = job->next;
    if (!list->first) list->last = &list->first;
    return job;
}

static void tell(const paged__keeper *k) {
    const uint64_t one = 1;
    /* It can only fail when the counter is full, and then the loop knows. */
    (void)!write(k->fd, &one, sizeof one);
}

static void *keep(void *user) {
    paged__keeper *k = user;
    pthread_mutex_lock(&k->lock);
    for (;;) {
        paged__job *job = take_first(&k->asked);
        if (!job) {
            if (k->ends) break;
            pthread_cond_wait(&k->more, &k->lock);
            continue;
        }
        k->n_asked--;
        pthread_mutex_unlock(&k->lock);
        job->work(&k->notes, job);
        pthread_mutex_lock(&k->lock);
        append(&k->done, job);
        tell(k);
    }
    pthread_mutex_unlock(&k->lock);
    return NULL;
}

paged_status paged__keeper_create(const paged_notes *notes, paged__keeper **out, paged_error *err) {
    paged__keeper *k = paged__calloc(1, sizeof *k);
    if (!k) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a thread");
    if (notes) k->notes = *notes;
    k->asked.last = &k->asked.first;
    k->done.last = &k->done.first;
    pthread_mutex_init(&k->lock, NULL);
    pthread_cond_init(&k->more, NULL);
    k->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (k->fd < 0 || pthread_create(&k->thread, NULL, keep, k) != 0) {
        if (k->fd >= 0) close(k->fd);
        pthread_mutex_destroy(&k->lock);
        pthread_cond_destroy(&k->more);
        paged__free(k);
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no thread for notes and files");
    }
    *out = k;
    return PAGED_OK;
}

void paged__keeper_free(paged__keeper *k, paged__server *server) {
    if (!k) return;
    pthread_mutex_lock(&k->lock);
    k->ends = true;
    pthread_cond_signal(&k->more);
    pthread_mutex_unlock(&k->lock);
    pthread_join(k->thread, NULL);
    paged__keeper_news(k, server);
    if (k->notes.close) k->notes.close(k->notes.self);
    close(k->fd);
    pthread_mutex_destroy(&k->lock);
    pthread_cond_destroy(&k->more);
    paged__free(k);
}

void paged__keeper_leave(paged__keeper *k) {
    pthread_detach(k->thread);
}

int paged__keeper_fd(const paged__keeper *k) {
    return k->fd;
}

void paged__keeper_news(paged__keeper *k, paged__server *server) {
    uint64_t n;
    (void)!read(k->fd, &n, sizeof n);
    for (;;) {
        pthread_mutex_lock(&k->lock);
        paged__job *job = take_first(&k->done);
        pthread_mutex_unlock(&k->lock);
        if (!job) return;
        job->done(server, job);
    }
}

bool paged__keeper_ask(paged__keeper *k, paged__job *job) {
    pthread_mutex_lock(&k->lock);
    const bool ok = !k->ends && k->n_asked < PAGED__JOBS_MAX;
    if (ok) {
        append(&k->asked, job);
        k->n_asked++;
        pthread_cond_signal(&k->more);
    }
    pthread_mutex_unlock(&k->lock);
    return ok;
}
