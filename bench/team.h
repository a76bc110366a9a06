/* bench/team.h: the threads of a bench, one pinned to each CPU of the process, and a barrier that spins.
 *
 * A team sleeps while it has nothing to do, so that whoever is measured next has the cores for itself. The
 * clock of a job starts when all threads are awake and before the barrier that lets them go: a thread that
 * is late costs time, and does not hide it.
 *
 * CPU time is read by each thread for itself: the clock of the process lags behind by up to a tick of the
 * scheduler for threads that run on other CPUs, which is a tenth of a short job.
 *
 * The caller is thread 0. A team belongs to the thread that made it. */
#ifndef PAGED_BENCH_TEAM_H
#define PAGED_BENCH_TEAM_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

enum { TEAM_MAX = 64 };

typedef struct team team;
typedef void team_job(void *arg, team *team, int32_t ith);

/* Sense-reversing: `phase` tells the waiting ones that everyone has come. */
typedef struct team_barrier {
    _Alignas(64) _Atomic int32_t n_here;
    _Alignas(64) _Atomic int32_t phase;
} team_barrier;

typedef struct team_member {
    team *team;
    int32_t ith, cpu;
    pthread_t thread;
    double cpu_seconds; /* of the last job */
} team_member;

struct team {
    team_barrier barrier;
    int32_t n; /* threads, the caller among them */
    team_member members[TEAM_MAX];
    pthread_mutex_t lock; /* of the four below */
    pthread_cond_t wake;
    int64_t n_jobs;
    bool ends;
    team_job *job;
    void *arg;
};

typedef struct team_time {
    double seconds, cpu_seconds; /* wall; CPU time of all threads */
} team_time;

static inline double team_clock(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static inline void team_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static inline void team_wait(team *t) {
    int32_t phase = atomic_load_explicit(&t->barrier.phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&t->barrier.n_here, 1, memory_order_acq_rel) == t->n - 1) {
        atomic_store_explicit(&t->barrier.n_here, 0, memory_order_relaxed);
        atomic_store_explicit(&t->barrier.phase, phase + 1, memory_order_release);
    } else {
        while (atomic_load_explicit(&t->barrier.phase, memory_order_acquire) == phase) team_relax();
    }
}

static inline void team_pin(int32_t cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

/* What a thread does of a job; returns when all have done theirs. */
static inline void team_part(team_member *self, team_job *job, void *arg) {
    double before = team_clock(CLOCK_THREAD_CPUTIME_ID);
    team_wait(self->team);
    job(arg, self->team, self->ith);
    team_wait(self->team);
    self->cpu_seconds = team_clock(CLOCK_THREAD_CPUTIME_ID) - before;
}

static inline void *team_member_main(void *arg) {
    team_member *self = arg;
    team *t = self->team;
    team_pin(self->cpu);
    for (int64_t n_done = 0;; n_done++) {
        pthread_mutex_lock(&t->lock);
        while (t->n_jobs == n_done && !t->ends) pthread_cond_wait(&t->wake, &t->lock);
        bool ends = t->ends;
        team_job *job = t->job;
        void *job_arg = t->arg;
        pthread_mutex_unlock(&t->lock);
        if (ends) return NULL;
        team_wait(t); /* all are awake, and the caller starts its clock */
        team_part(self, job, job_arg);
        team_wait(t); /* all have said what they used */
    }
}

/* Does the job on all threads, at once. */
static inline team_time team_do(team *t, team_job *job, void *arg) {
    pthread_mutex_lock(&t->lock);
    t->job = job;
    t->arg = arg;
    t->n_jobs++;
    pthread_cond_broadcast(&t->wake);
    pthread_mutex_unlock(&t->lock);
    team_wait(t);
    double wall = team_clock(CLOCK_MONOTONIC);
    team_part(&t->members[0], job, arg);
    team_time time = {.seconds = team_clock(CLOCK_MONOTONIC) - wall};
    team_wait(t);
    for (int32_t i = 0; i < t->n; i++) time.cpu_seconds += t->members[i].cpu_seconds;
    return time;
}

/* One thread for each CPU that this process may use. */
static inline bool team_start(team *t) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return false;
    for (int32_t cpu = 0; cpu < CPU_SETSIZE && t->n < TEAM_MAX; cpu++)
        if (CPU_ISSET((size_t)cpu, &set)) {
            t->members[t->n] = (team_member){.team = t, .ith = t->n, .cpu = cpu};
            t->n++;
        }
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->wake, NULL);
    team_pin(t->members[0].cpu);
    for (int32_t i = 1; i < t->n; i++)
        if (pthread_create(&t->members[i].thread, NULL, team_member_main, &t->members[i]) != 0) return false;
    return true;
}

static inline void team_end(team *t) {
    pthread_mutex_lock(&t->lock);
    t->ends = true;
    pthread_cond_broadcast(&t->wake);
    pthread_mutex_unlock(&t->lock);
    for (int32_t i = 1; i < t->n; i++) pthread_join(t->members[i].thread, NULL);
    pthread_cond_destroy(&t->wake);
    pthread_mutex_destroy(&t->lock);
}

#endif
