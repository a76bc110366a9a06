/* cli/term.h: the progress bar on stderr. It is drawn only on a terminal that can move its cursor, never
 * wider than the terminal, and erased before anything else is written.
 */
#ifndef PAGED_CLI_TERM_H
#define PAGED_CLI_TERM_H

#include <stdatomic.h>
#include <stdbool.h>

typedef struct paged__term {
    bool enabled, color;
    atomic_bool drawn; /* log lines may come from any thread and have to know */
    int percent;       /* last drawn */
    const char *label; /* last drawn; static text */
} paged__term;

/* Looks at stderr, TERM and NO_COLOR. */
void paged__term_init(paged__term *term);

/* Draws "label [###---] 42%" if it differs from what is there. */
void paged__term_progress(paged__term *term, const char *label, double fraction);

/* Erases the bar, if there is one. Async-signal-safe. */
void paged__term_clear(paged__term *term);

#endif
