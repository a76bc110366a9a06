/* base/team.c: see team.h.
 *
 * Everything that a thread waits for is a counter that only grows, a *gate*: `job` opens for each run,
 * `barrier` for each barrier, `phase` for each phase. Who waits remembers the value it has seen and waits for
 * another one. A gate has its own cache line: the others spin on it while the last thread writes.
 *
 * No wake-up is lost: a thread counts itself as a sleeper before the kernel compares the gate with the value
 * seen; who opens it writes the gate before it looks for sleepers. Three of them are sequentially consistent
 * here, and the kernel's comparison, behind a full barrier and under the lock that a wake-up takes, is as
 * good. So one of the two sees the other. Our own look at the gate before that proves nothing and only saves
 * the call.
 *
 * A share belongs to a member, which notes in `taken` the latest phase in which somebody took it. It is on
 * its owner's cache line, where nobody else looks before he has waited for a moment: where threads finish
 * together, a phase costs what a barrier costs.
 */
#include "base/team.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    CACHE_LINE = 64,
    SPINS = 256,  /* about 3 µs of pauses */
    YIELDS = 512, /* about 200 µs when nobody else wants the core: longer than sampling takes between steps */
    PATIENCE = 48,     /* pauses, about 1 µs, before one looks for shares of others */
    LINES_AHEAD = 4,   /* asked for between two looks at a gate */
    MOVE_NS = 20000000 /* between two moves of a thread: whoever else uses the cores may want it otherwise */
};

typedef struct gate {
    _Alignas(CACHE_LINE) _Atomic uint32_t value;
    _Atomic uint32_t n_sleepers;
} gate;

typedef struct member {
    _Alignas(CACHE_LINE) _Atomic uint32_t taken; /* the phase in which its share was taken last */
    struct paged__team *team;
    int32_t ith, cpu;   /* cpu -1: any */
    _Atomic int32_t at; /* the CPU that it was on when the latest run began; -1: none yet */
    uint64_t moved_ns;
    pthread_t thread;
} member;

struct paged__team {
    gate job, barrier, phase;
    _Alignas(CACHE_LINE) _Atomic uint32_t n_arrived; /* at the next barrier */
    _Alignas(CACHE_LINE) _Atomic uint32_t n_done;    /* shares of this phase */
    uint32_t first_phase;                            /* of this run */
    paged__team_fn fn;                               /* of this run; NULL: the end */
    void *user;
    int32_t n_threads;
    member *members; /* [n_threads], the caller first */
};

static void gate_open(gate *g) {
    atomic_fetch_add(&g->value, 1);
    if (atomic_load(&g->n_sleepers))
        syscall(SYS_futex, &g->value, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static bool gate_has_opened(gate *g, uint32_t seen) {
    return atomic_load_explicit(&g->value, memory_order_acquire) != seen;
}

/* A moment of waiting: some of what lies ahead is asked for, or the core pauses, which takes as long. */
static void wait_a_moment(paged__team_place *place) {
    if (!place || place->ahead >= place->ahead_end) {
        paged__pause_core();
        return;
    }
    for (int32_t i = 0; i < LINES_AHEAD && place->ahead < place->ahead_end; i++, place->ahead += CACHE_LINE)
        __builtin_prefetch(place->ahead, 0, 2 /* L2: L1 waits for far fewer lines at once */);
}

/* place: NULL, or of the thread. */
static void gate_wait(gate *g, uint32_t seen, paged__team_place *place) {
    for (int32_t i = 0; i < SPINS; i++) {
        if (gate_has_opened(g, seen)) return;
        wait_a_moment(place);
    }
    for (int32_t i = 0; i < YIELDS; i++) {
        if (gate_has_opened(g, seen)) return;
        sched_yield();
    }
    atomic_fetch_add(&g->n_sleepers, 1);
    while (!gate_has_opened(g, seen)) syscall(SYS_futex, &g->value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&g->n_sleepers, 1);
}

void paged__team_barrier(paged__team *team) {
    if (team->n_threads == 1) return;
    const uint32_t seen = atomic_load_explicit(&team->barrier.value, memory_order_relaxed);
    if (atomic_fetch_add(&team->n_arrived, 1) + 1 == (uint32_t)team->n_threads) {
        /* Before the gate opens, so that nobody arrives at the next barrier earlier. */
        atomic_store_explicit(&team->n_arrived, 0, memory_order_relaxed);
        gate_open(&team->barrier);
    } else {
        gate_wait(&team->barrier, seen, NULL);
    }
}

/* ---- phases ---- */

/* True for one thread in each phase. Where the phase is over, everything has been taken. */
static bool take(member *owner, uint32_t phase) {
    uint32_t taken = atomic_load_explicit(&owner->taken, memory_order_relaxed);
    return taken == phase - 1 && atomic_compare_exchange_strong(&owner->taken, &taken, phase);
}

static void share_is_done(paged__team *team) {
    if (atomic_fetch_add(&team->n_done, 1) + 1 < (uint32_t)team->n_threads) return;
    atomic_store_explicit(&team->n_done, 0, memory_order_relaxed);
    gate_open(&team->phase);
}

/* One of the others' that nobody has begun, or -1. Who does not answer at once may be away; who was away a
 * phase ago likely is. */
static int32_t take_another(paged__team *team, paged__team_place *place, uint32_t phase) {
    for (int32_t i = 0; i < PATIENCE && !place->helps; i++) {
        if (gate_has_opened(&team->phase, phase)) return -1;
        wait_a_moment(place);
    }
    for (int32_t i = 1; i < team->n_threads; i++) {
        const int32_t other = (place->ith + i) % team->n_threads;
        if (take(&team->members[other], phase)) return other;
    }
    return -1;
}

int32_t paged__team_share(paged__team *team, paged__team_place *place) {
    const uint32_t phase = team->first_phase + place->phase;
    if (place->holds) share_is_done(team);
    int32_t share = -1;
    if (!place->in_phase) {
        place->in_phase = true;
        if (take(&team->members[place->ith], phase)) share = place->ith;
    }
    if (share < 0 && !gate_has_opened(&team->phase, phase)) {
        share = take_another(team, place, phase);
        if (share >= 0) place->helped = true;
    }
    place->holds = share >= 0;
    if (place->holds) return share;
    gate_wait(&team->phase, phase, place);
    place->in_phase = false;
    place->helps = place->helped;
    place->helped = false;
    place->phase++;
    return -1;
}

static void stay_on(int32_t cpu) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET((size_t)cpu, &one);
    /* A wish: the CPU may have gone since. */
    pthread_setaffinity_np(pthread_self(), sizeof one, &one);
}

/* ---- a core each ---- */

static int32_t note_cpu(member *me) {
    const int32_t here = sched_getcpu();
    if (atomic_load_explicit(&me->at, memory_order_relaxed) != here)
        atomic_store_explicit(&me->at, here, memory_order_relaxed);
    return here;
}

/* To a CPU where nobody of the team is. It is free to go on from there. */
static void move(member *me) {
    paged__team *team = me->team;
    cpu_set_t allowed, others;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    others = allowed;
    for (int32_t i = 0; i < team->n_threads; i++) {
        const int32_t at = atomic_load_explicit(&team->members[i].at, memory_order_relaxed);
        if (at >= 0) CPU_CLR((size_t)at, &others);
    }
    if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return;
    note_cpu(me);
    sched_setaffinity(0, sizeof allowed, &allowed);
}

/* Linux may wake a thread beside the one that wakes it, with another core idle, and leaves it there for tens
 * of milliseconds: two that give the core to each other at each barrier do not look as if they needed two. */
static void keep_apart(member *me) {
    const int32_t here = note_cpu(me);
    bool meets = false;
    for (int32_t i = 0; i < me->ith && !meets; i++)
        meets = atomic_load_explicit(&me->team->members[i].at, memory_order_relaxed) == here;
    if (!meets || here < 0 || me->cpu >= 0) return;
    const uint64_t now = paged__now_ns();
    if (me->moved_ns && now - me->moved_ns < MOVE_NS) return;
    me->moved_ns = now;
    move(me);
}

static void *work(void *arg) {
    member *me = arg;
    paged__team *team = me->team;
    if (me->cpu >= 0) stay_on(me->cpu);
    for (uint32_t seen = 0;; seen++) {
        gate_wait(&team->job, seen, NULL);
        if (!team->fn) return NULL;
        keep_apart(me);
        team->fn(team->user, me->ith, team->n_threads);
        paged__team_barrier(team);
    }
}

void paged__team_run(paged__team *team, paged__team_fn fn, void *user) {
    team->fn = fn;
    team->user = user;
    team->first_phase = atomic_load_explicit(&team->phase.value, memory_order_relaxed);
    note_cpu(&team->members[0]);
    gate_open(&team->job);
    fn(user, 0, team->n_threads);
    paged__team_barrier(team);
}

/* The CPUs of the caller in turn, beginning with the second; -1 where they are not known. */
static void choose_cpus(paged__team *team) {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) == 0) return;
    int32_t cpu = -1;
    for (int32_t i = 0; i < team->n_threads; i++) {
        do cpu = (cpu + 1) % CPU_SETSIZE;
        while (!CPU_ISSET((size_t)cpu, &allowed));
        team->members[i].cpu = cpu;
    }
}

/* The number of threads that could be started; on failure *why is the system's number. */
static int32_t start(paged__team *team, int *why) {
    sigset_t all, before;
    int32_t n = 1;
    /* A new thread inherits the mask: signals are for the threads of the program. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (*why = 0; n < team->n_threads; n++) {
        char name[16];
        if ((*why = pthread_create(&team->members[n].thread, NULL, work, &team->members[n])) != 0) break;
        snprintf(name, sizeof name, "paged-%d", n % 1000);
        pthread_setname_np(team->members[n].thread, name);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return n;
}

/* Ends the threads 1 … n_started - 1. */
static void stop(paged__team *team, int32_t n_started) {
    team->fn = NULL;
    gate_open(&team->job);
    for (int32_t i = 1; i < n_started; i++) pthread_join(team->members[i].thread, NULL);
}

paged_status paged__team_create(int32_t n_threads, bool pin, paged__team **out, paged_error *err) {
    if (n_threads < 1 || n_threads > PAGED__TEAM_MAX)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "%d threads; 1 … %d", n_threads, PAGED__TEAM_MAX);
    paged__team *team = paged__calloc(1, sizeof *team);
    member *members = paged__calloc((size_t)n_threads, sizeof *members);
    if (!team || !members) {
        paged__free(team);
        paged__free(members);
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for %d threads", n_threads);
    }
    team->n_threads = n_threads;
    team->members = members;
    for (int32_t i = 0; i < n_threads; i++)
        members[i] = (member){.team = team, .ith = i, .cpu = -1, .at = -1, .taken = UINT32_MAX};
    if (pin) choose_cpus(team);
    int why;
    const int32_t n_started = start(team, &why);
    if (n_started < n_threads) {
        char reason[128];
        stop(team, n_started);
        paged__free(members);
        paged__free(team);
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "the system started %d of %d threads: %s", n_started,
                           n_threads, strerror_r(why, reason, sizeof reason));
    }
    *out = team;
    return PAGED_OK;
}

void paged__team_free(paged__team *team) {
    if (!team) return;
    stop(team, team->n_threads);
    paged__free(team->members);
    paged__free(team);
}
