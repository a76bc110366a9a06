/* cli/term.c: see term.h. */
#include "cli/term.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { BAR_MAX = 40 };

void paged__term_init(paged__term *term) {
    const char *kind = getenv("TERM"), *no_color = getenv("NO_COLOR");
    *term = (paged__term){.percent = -1};
    term->enabled = isatty(STDERR_FILENO) && kind && kind[0] && strcmp(kind, "dumb") != 0;
    term->color = term->enabled && !(no_color && no_color[0]);
}

static int columns(void) {
    struct winsize size;
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
    const char *text = getenv("COLUMNS");
    long n = text ? strtol(text, NULL, 10) : 0;
    return n > 0 && n < 10000 ? (int)n : 80;
}

void paged__term_progress(paged__term *term, const char *label, double fraction) {
    if (!term->enabled) return;
    int percent = fraction >= 1 ? 100 : fraction > 0 ? (int)(fraction * 100) : 0;
    if (atomic_load(&term->drawn) && percent == term->percent && label == term->label) return;
    term->percent = percent;
    term->label = label;

    /* The last column stays free: many terminals wrap as soon as it is written, and a wrapped bar cannot
     * be erased. */
    int width = columns() - 1;
    int room = width - (int)strlen(label) - 8; /* of " [", "] " and "100%" */
    int bar = room < BAR_MAX ? room : BAR_MAX;
    char line[BAR_MAX + 128];
    int n;
    if (bar >= 5) {
        int done = bar * percent / 100;
        char cells[BAR_MAX + 1];
        memset(cells, '-', (size_t)bar);
        memset(cells, '#', (size_t)done);
        cells[bar] = 0;
        n = snprintf(line, sizeof line, "\r\033[K%s [%s%s%s] %3d%%", label, term->color ? "\033[36m" : "",
                     cells, term->color ? "\033[0m" : "", percent);
    } else if (width >= 4) {
        n = snprintf(line, sizeof line, "\r\033[K%3d%%", percent);
    } else {
        return;
    }
    atomic_store(&term->drawn, true);
    /* Nothing depends on the bar, so a failed write is no error. */
    ssize_t written = write(STDERR_FILENO, line, (size_t)n);
    (void)written;
}

void paged__term_clear(paged__term *term) {
    static const char erase[] = "\r\033[K";
    if (!atomic_exchange(&term->drawn, false)) return;
    ssize_t written = write(STDERR_FILENO, erase, sizeof erase - 1);
    (void)written;
}
