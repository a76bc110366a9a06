/* Goal: a team runs everything exactly once, in step, sleeps when idle, and stays usable with more threads
 * than cores. Method: plain data that only the barriers order, so that a barrier that leaks shows as a wrong
 * sum, and as a race under TSan; CPU clocks. */
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#include "base/team.h"
#include "test.h"

enum { MAX_THREADS = 8 };

static double seconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static paged__team *make(int32_t n) {
    paged__team *team = NULL;
    CHECK_EQ(paged__team_create(n, false, &team, NULL), PAGED_OK);
    return team;
}

/* Each round every thread adds up what all wrote in the round before: a sum that is right for all proves that
 * nobody ran ahead and nobody stayed behind. */
typedef struct ring {
    paged__team *team;
    int32_t n_rounds;
    struct {
        _Alignas(64) int64_t values[2]; /* by parity of the round */
        int64_t wrong;
    } of[MAX_THREADS];
} ring;

static void turn(void *user, int32_t ith, int32_t nth) {
    ring *r = user;
    for (int32_t round = 0; round < r->n_rounds; round++) {
        r->of[ith].values[round & 1] = (int64_t)round * nth + ith;
        paged__team_barrier(r->team);
        int64_t sum = 0;
        for (int32_t i = 0; i < nth; i++) sum += r->of[i].values[round & 1];
        r->of[ith].wrong += sum != (int64_t)round * nth * nth + (int64_t)nth * (nth - 1) / 2;
    }
}

static void barriers_hold(void) {
    for (int32_t n = 1; n <= MAX_THREADS; n = n < 4 ? n + 1 : 2 * n) {
        ring r = {.team = make(n), .n_rounds = test_long ? 100000 : 500};
        paged__team_run(r.team, turn, &r);
        for (int32_t i = 0; i < n; i++) {
            CHECK_EQ(r.of[i].wrong, 0);
            CHECK_EQ(r.of[i].values[(r.n_rounds - 1) & 1], (int64_t)(r.n_rounds - 1) * n + i);
        }
        paged__team_free(r.team);
    }
}

/* The same of phases: each share of the ring is worked on by whoever takes it, once a phase. */
static void share_turn(void *user, int32_t ith, int32_t nth) {
    ring *r = user;
    paged__team_place place = {.ith = ith};
    for (int32_t round = 0; round < r->n_rounds; round++) {
        for (int32_t s; (s = paged__team_share(r->team, &place)) >= 0;) {
            int64_t sum = 0;
            for (int32_t i = 0; i < nth; i++) sum += r->of[i].values[(round & 1) ^ 1];
            r->of[s].wrong +=
                round > 0 && sum != (int64_t)(round - 1) * nth * nth + (int64_t)nth * (nth - 1) / 2;
            r->of[s].wrong += round > 1 && r->of[s].values[round & 1] != (int64_t)(round - 2) * nth + s;
            r->of[s].values[round & 1] = (int64_t)round * nth + s;
        }
        if (round % 64 == 63) paged__team_barrier(r->team); /* both are there */
    }
}

static void phases_hold(void) {
    for (int32_t n = 1; n <= MAX_THREADS; n = n < 4 ? n + 1 : 2 * n) {
        ring r = {.team = make(n), .n_rounds = test_long ? 50000 : 500};
        for (int32_t run = 0; run < 3; run++) {
            for (int32_t i = 0; i < n; i++) r.of[i].values[0] = r.of[i].values[1] = 0;
            paged__team_run(r.team, share_turn, &r);
            for (int32_t i = 0; i < n; i++) {
                CHECK_EQ(r.of[i].wrong, 0);
                CHECK_EQ(r.of[i].values[(r.n_rounds - 1) & 1], (int64_t)(r.n_rounds - 1) * n + i);
            }
        }
        paged__team_free(r.team);
    }
}

/* The last thread is away until the others are in phase `back`; with a barrier they would wait for it. */
typedef struct absence {
    paged__team *team;
    int32_t n_phases, back;
    _Atomic int32_t at; /* the phase that thread 0 has reached */
    int32_t n_done[MAX_THREADS][200], n_by[MAX_THREADS], n_forgotten[MAX_THREADS];
} absence;

static void be_away(void *user, int32_t ith, int32_t nth) {
    absence *a = user;
    paged__team_place place = {.ith = ith};
    while (ith == nth - 1 && atomic_load(&a->at) < a->back) sched_yield();
    for (int32_t phase = 0; phase < a->n_phases; phase++) {
        bool helped = false;
        if (ith == 0) atomic_store(&a->at, phase);
        for (int32_t s; (s = paged__team_share(a->team, &place)) >= 0;) {
            a->n_done[s][phase]++;
            a->n_by[ith]++;
            helped = helped || s != ith;
            if (nth > 2 && s == 1) usleep(50); /* who has helped looks once more in vain */
        }
        a->n_forgotten[ith] += place.helps != helped; /* in the next phase it knows */
    }
    if (ith == 0) atomic_store(&a->at, a->n_phases);
}

static void who_is_away_is_not_waited_for(void) {
    for (int32_t n = 2; n <= 4; n++)
        for (int32_t back = 0; back <= 200; back += 100) {
            absence a = {.team = make(n), .n_phases = 200, .back = back};
            paged__team_run(a.team, be_away, &a);
            int32_t n_all = 0;
            for (int32_t i = 0; i < n; i++) {
                n_all += a.n_by[i];
                CHECK_EQ(a.n_forgotten[i], 0);
            }
            CHECK_EQ(n_all, n * 200);
            for (int32_t s = 0; s < n; s++)
                for (int32_t phase = 0; phase < 200; phase++) CHECK_EQ(a.n_done[s][phase], 1);
            if (back == 200) CHECK_EQ(a.n_by[n - 1], 0);
            paged__team_free(a.team);
        }
}

/* Who waits asks for what lies ahead of it, all of it but not more; who is waited for does not. */
typedef struct looking {
    paged__team *team;
    const uint8_t *end[2]; /* of what was asked for */
    int32_t last;          /* the thread that did share 1, for which the other waits */
} looking;

static const uint8_t ahead_bytes[100 * 64 + 1];

static void look(void *user, int32_t ith, int32_t nth) {
    looking *l = user;
    paged__team_place place = {.ith = ith, .ahead = ahead_bytes, .ahead_end = ahead_bytes + 100 * 64};
    (void)nth;
    paged__team_barrier(l->team); /* both are awake */
    for (int32_t s; (s = paged__team_share(l->team, &place)) >= 0;) {
        if (s != 1) continue;
        l->last = ith;
        usleep(20000);
    }
    l->end[ith] = place.ahead;
}

static void who_waits_looks_ahead(void) {
    looking l = {.team = make(2)};
    paged__team_run(l.team, look, &l);
    CHECK(l.end[!l.last] == ahead_bytes + 100 * 64);
    CHECK(l.end[l.last] == ahead_bytes);
    paged__team_free(l.team);
}

/* What run's caller wrote before is seen inside, and what the threads wrote is seen after. */
typedef struct count {
    int32_t add, n_seen[MAX_THREADS], nth[MAX_THREADS];
} count;

static void add(void *user, int32_t ith, int32_t nth) {
    count *c = user;
    c->n_seen[ith] += c->add;
    c->nth[ith] = nth;
}

static void runs_follow_each_other(void) {
    for (int32_t n = 1; n <= 4; n++) {
        paged__team *team = make(n);
        count c = {0};
        int32_t want = 0;
        for (int32_t i = 0; i < 300; i++) {
            c.add = i;
            want += i;
            if (i % 100 == 99) usleep(2000); /* long enough for the others to fall asleep */
            paged__team_run(team, add, &c);
            for (int32_t t = 0; t < MAX_THREADS; t++) {
                CHECK_EQ(c.n_seen[t], t < n ? want : 0);
                CHECK_EQ(c.nth[t], t < n ? n : 0);
            }
        }
        paged__team_free(team);
    }
}

static void idle_uses_no_cpu(void) {
    paged__team *team = make(4);
    count c = {0};
    paged__team_run(team, add, &c);
    usleep(50000);
    const double before = seconds(CLOCK_PROCESS_CPUTIME_ID);
    usleep(300000);
    const double used = seconds(CLOCK_PROCESS_CPUTIME_ID) - before;
    if (used > 0.015) test_fail(__FILE__, __LINE__, "an idle team used %.1f ms of CPU in 300 ms", used * 1e3);
    paged__team_free(team);
}

/* One thread works a while in each round, the others wait: twice as many threads as cores must cost about
 * what the work costs and not a time slice a barrier. */
static void uneven(void *user, int32_t ith, int32_t nth) {
    ring *r = user;
    for (int32_t round = 0; round < r->n_rounds; round++) {
        if (round % nth == ith)
            for (const double end = seconds(CLOCK_THREAD_CPUTIME_ID) + 100e-6;
                 seconds(CLOCK_THREAD_CPUTIME_ID) < end;) {
            }
        paged__team_barrier(r->team);
    }
}

static void more_threads_than_cores(void) {
    cpu_set_t before, two;
    CHECK_EQ(sched_getaffinity(0, sizeof before, &before), 0);
    CPU_ZERO(&two);
    for (int32_t cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&two) < 2; cpu++)
        if (CPU_ISSET((size_t)cpu, &before)) CPU_SET((size_t)cpu, &two);
    CHECK_EQ(sched_setaffinity(0, sizeof two, &two), 0);
    ring r = {.team = make(4), .n_rounds = 500};
    const double wall = seconds(CLOCK_MONOTONIC), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
    paged__team_run(r.team, uneven, &r);
    const double took = seconds(CLOCK_MONOTONIC) - wall, used = seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    sched_setaffinity(0, sizeof before, &before);
    paged__team_free(r.team);
    /* 50 ms of work. A barrier that only spins holds its core for a time slice (3 ms and more) in most
     * rounds: 2 s of CPU and more. CPU time, because other processes do not add to it. */
    printf("  4 threads on %d cores: %.0f ms, %.0f ms of CPU for 50 ms of work\n", CPU_COUNT(&two),
           took * 1e3, used * 1e3);
    if (used > 0.8) test_fail(__FILE__, __LINE__, "500 rounds of 0.1 ms used %.0f ms of CPU", used * 1e3);
}

static volatile sig_atomic_t handled_by_main;
static pthread_t main_thread;

static void on_signal(int number) {
    (void)number;
    handled_by_main = pthread_equal(pthread_self(), main_thread) ? 1 : -1;
}

static void signals_are_for_the_program(void) {
    paged__team *team = make(4);
    main_thread = pthread_self();
    signal(SIGUSR1, on_signal);
    for (int32_t i = 0; i < 20; i++) {
        handled_by_main = 0;
        kill(getpid(), SIGUSR1);
        for (int32_t wait = 0; wait < 1000 && !handled_by_main; wait++) usleep(1000);
        CHECK_EQ(handled_by_main, 1);
    }
    signal(SIGUSR1, SIG_DFL);
    paged__team_free(team);
}

static void note_cpus(void *user, int32_t ith, int32_t nth) {
    (void)nth;
    cpu_set_t *sets = user;
    sched_getaffinity(0, sizeof *sets, &sets[ith]);
}

static void pinned_threads_stay(void) {
    cpu_set_t mine, sets[4];
    paged__team *team = NULL;
    sched_getaffinity(0, sizeof mine, &mine);
    CHECK_EQ(paged__team_create(4, true, &team, NULL), PAGED_OK);
    paged__team_run(team, note_cpus, sets);
    CHECK(CPU_EQUAL(&sets[0], &mine)); /* the caller is left alone */
    for (int32_t i = 1; i < 4; i++) {
        CHECK_EQ(CPU_COUNT(&sets[i]), 1);
        CPU_AND(&sets[i], &sets[i], &mine);
        CHECK_EQ(CPU_COUNT(&sets[i]), 1);
    }
    paged__team_free(team);
}

/* The second thread, sent to the first one's CPU at the end of a run, is elsewhere when the next one begins,
 * and may still go where it likes. */
typedef struct meeting {
    paged__team *team;
    int32_t at[2];
    cpu_set_t allowed;
} meeting;

static void go_where_the_first_is(void *user, int32_t ith, int32_t nth) {
    meeting *m = user;
    (void)nth;
    m->at[ith] = sched_getcpu();
    paged__team_barrier(m->team);
    if (ith == 0) return;
    cpu_set_t first, mine;
    sched_getaffinity(0, sizeof mine, &mine);
    CHECK(CPU_EQUAL(&mine, &m->allowed));
    CPU_ZERO(&first);
    CPU_SET((size_t)m->at[0], &first);
    sched_setaffinity(0, sizeof first, &first);
    sched_setaffinity(0, sizeof mine, &mine);
}

static void two_part(void) {
    meeting m;
    cpu_set_t here;
    int32_t n_apart = 0;
    sched_getaffinity(0, sizeof m.allowed, &m.allowed);
    if (CPU_COUNT(&m.allowed) < 2) return;
    m.team = make(2);
    CPU_ZERO(&here);
    CPU_SET((size_t)sched_getcpu(), &here);
    sched_setaffinity(0, sizeof here, &here); /* so that only the second one can part */
    for (int32_t i = 0; i < 20; i++) {
        paged__team_run(m.team, go_where_the_first_is, &m);
        n_apart += i > 0 && m.at[0] != m.at[1];
        usleep(30000); /* it is moved once in twenty milliseconds */
    }
    sched_setaffinity(0, sizeof m.allowed, &m.allowed);
    paged__team_free(m.team);
    CHECK(n_apart >= 10); /* all, as a rule; but others may use the machine */
}

static int32_t n_until_failure;

static void *failing_alloc(void *user, size_t size_bytes, size_t align) {
    (void)user;
    return n_until_failure-- > 0 ? aligned_alloc(align, (size_bytes + align - 1) / align * align) : NULL;
}

static void failing_free(void *user, void *ptr) {
    (void)user;
    free(ptr);
}

static void create_refuses(void) {
    paged__team *team = NULL;
    paged_error err;
    const int32_t wrong[] = {0, -1, PAGED__TEAM_MAX + 1};
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(paged__team_create(wrong[i], false, &team, &err), PAGED_ERR_INVALID_ARG);
        char number[16];
        snprintf(number, sizeof number, "%d", wrong[i]);
        CHECK(strstr(err.message, number));
    }
    paged_allocator_set(&(paged_allocator){failing_alloc, failing_free, NULL});
    for (int n = 0; n < 2; n++) {
        n_until_failure = n;
        CHECK_EQ(paged__team_create(2, false, &team, &err), PAGED_ERR_NO_MEMORY);
    }
    paged_allocator_set(NULL);
    CHECK(team == NULL);
    paged__team_free(NULL);
}

#define TESTS(X)                                                                                             \
    X(barriers_hold)                                                                                         \
    X(phases_hold)                                                                                           \
    X(who_is_away_is_not_waited_for)                                                                         \
    X(who_waits_looks_ahead)                                                                                 \
    X(runs_follow_each_other)                                                                                \
    X(idle_uses_no_cpu)                                                                                      \
    X(more_threads_than_cores)                                                                               \
    X(signals_are_for_the_program)                                                                           \
    X(pinned_threads_stay)                                                                                   \
    X(two_part)                                                                                              \
    X(create_refuses)
TEST_MAIN(TESTS)
