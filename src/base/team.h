/* base/team.h: a team of threads that run one function together, with barriers inside it.
 *
 *     paged__team_run(team, fn, user)     fn(user, ith, nth) on every thread; the caller is thread 0
 *     paged__team_barrier(team)           inside fn, by every thread: all arrive before any goes on
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

#endif
