/* server/keeper.h: a thread that does what may block: notes (paged/store.h) are read and written there, never
 * in the event loop. Files of slots have a keeper of their own, so that conversations do not wait for them.
 *
 *   loop:    job ──paged__keeper_ask──> queue ──> keeper's thread: work()
 *   loop:    done() <──descriptor, paged__keeper_news── done jobs
 *
 * A job belongs to whoever asked until it asks, to the keeper's thread until work() has returned, and to its
 * done() then. The order of jobs is kept. At most PAGED__JOBS_MAX wait.
 */
#ifndef PAGED_SERVER_KEEPER_H
#define PAGED_SERVER_KEEPER_H

#include "paged/store.h"
#include "server/server.h"

enum { PAGED__JOBS_MAX = 1024 };

typedef struct paged__job {
    struct paged__job *next;
    void (*work)(const paged_notes *notes, struct paged__job *job); /* in the keeper's thread */
    void (*done)(paged__server *server, struct paged__job *job);    /* in the loop's */
} paged__job;

typedef struct paged__keeper paged__keeper;

/* Takes the notes (NULL: its jobs need none), and closes them when it is freed. Errors: NO_MEMORY, and then
 * they are the caller's. */
paged_status paged__keeper_create(const paged_notes *notes, paged__keeper **out, paged_error *err);
/* Waits for the jobs that were asked for, and calls done() of all. NULL is fine. */
void paged__keeper_free(paged__keeper *keeper, paged__server *server);
/* Instead of paged__keeper_free, where a job does not come back: the process is about to end, and what the
 * thread uses stays. */
void paged__keeper_leave(paged__keeper *keeper);

/* Readable when there are done jobs. */
int paged__keeper_fd(const paged__keeper *keeper);
void paged__keeper_news(paged__keeper *keeper, paged__server *server);

/* False: too many wait, or the server is about to end; the job is as before. */
bool paged__keeper_ask(paged__keeper *keeper, paged__job *job);

/* Notes in memory, which end with the process: at most n_max of them, bytes_max bytes. */
paged_status paged__memory_notes(int32_t n_max, size_t bytes_max, paged_notes *out, paged_error *err);

#endif
