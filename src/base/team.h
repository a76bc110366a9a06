/* base/team.h: a team of threads that run one function together, in step.
 *
 *     paged__team_run(team, fn, user)     fn(user, ith, nth) on every thread; the caller is thread 0
 *     paged__team_barrier(team)           inside fn, by every thread: all arrive before any goes on
 *     paged__team_share(team, &place)     inside fn: a phase, whose shares are done by whoever is there
 *
 * A phase is work cut into as many shares as there are threads, all of which are done before any thread goes
 * on to the next phase:
 *
 *     for (int32_t share; (share = paged__team_share(team, &place)) >= 0;) work(share);
 *
 * A thread takes its own share, and then what nobody has begun. So a thread whose core somebody else uses for
 * a while (the event loop of a server, another program) is not waited for: the others do its shares, phase
 * after phase, and when it comes back it passes through what is over and joins them. It is waited for only
 * where it has begun a share, and at the end of the run.
 *
 * Waiting, for a barrier or for the next run, goes through three stages: a few microseconds of spinning, for
 * threads that have a core each and finish together; then sched_yield, which costs as little but gives the
 * core to whoever has work, so that more threads than cores, or another process, do not multiply the time;
 * then sleep in the kernel. An idle team uses no CPU. Where there are as many cores, threads that a run finds
 * on one core part.
 *
 * Thread rule: one thread at a time may run, and free; run does not nest. May include base/ only.
 */
#ifndef PAGED_BASE_TEAM_H
#define PAGED_BASE_TEAM_H

#include "base/base.h"

enum { PAGED__TEAM_MAX = 512 }; /* threads */

typedef struct paged__team paged__team;
typedef void (*paged__team_fn)(void *user, int32_t ith, int32_t nth);

/* Starts n_threads - 1 threads; they take no signals. With `pin`, each of them stays on one CPU of those that
 * the caller may use, the first left to the caller, who is not pinned. Errors: INVALID_ARG (1 …
 * PAGED__TEAM_MAX), NO_MEMORY (the system gives no memory or no thread). */
paged_status paged__team_create(int32_t n_threads, bool pin, paged__team **out, paged_error *err);
void paged__team_free(paged__team *team); /* NULL is fine */

void paged__team_run(paged__team *team, paged__team_fn fn, void *user);
void paged__team_barrier(paged__team *team);

/* Where a thread is among the phases of a run; {.ith = ith} at first. All threads go through the same phases.
 * One place a thread and run, kept for the whole run: a new one would begin with the phases that are over.
 * Barriers may stand between phases, not inside one, and a loop over shares is not left early. */
typedef struct paged__team_place {
    int32_t ith;
    uint32_t phase;     /* of this run */
    bool in_phase;      /* has looked at its own share */
    bool holds;         /* a share */
    bool helped, helps; /* had to take another's in this phase; in the one before */
    /* Bytes that the thread will read in a later phase: while it waits for others they come to its cache, and
     * ahead moves on. Nothing if ahead is at the end. */
    const uint8_t *ahead, *ahead_end;
} paged__team_place;

/* The next share, 0 … nth - 1, for this thread to do; -1: all shares of the phase are done, what they wrote
 * is seen, and the next call begins the next phase. */
int32_t paged__team_share(paged__team *team, paged__team_place *place);

#endif
