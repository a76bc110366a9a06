/* log.c: the log callback and the end of a program whose own invariant broke.
 *
 * The callback is process-wide state; whoever sets it does so before other threads come into the library. */
#include <stdio.h>
#include <stdlib.h>

#include "base/base.h"

static struct {
    paged_log_fn fn; /* NULL: silence */
    void *user;
    paged_log_level max_level;
} logger;

void paged_log_set(paged_log_fn fn, void *user, paged_log_level max_level) {
    logger.fn = fn;
    logger.user = user;
    logger.max_level = max_level;
}

void paged__log(paged_log_level level, const char *fmt, ...) {
    char line[1000];
    va_list args;
    if (!logger.fn || level > logger.max_level) return;
    va_start(args, fmt);
    int n = vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    if (n < 0) return;
    for (char *c = line; *c; c++) {
        if ((unsigned char)*c < ' ' || *c == 0x7f) *c = ' ';
    }
    logger.fn(logger.user, level, line);
}

void paged__assert_failed(const char *expr, const char *file, int line) {
    paged__log(PAGED_LOG_ERROR, "%s:%d: broken invariant: %s", file, line, expr);
    abort();
}
