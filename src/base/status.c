/* status.c: names and texts of the status codes, errors with their numbers, the version. All strings are
 * static. */
#include <stdio.h>

#include "base/base.h"

const char *paged_status_name(paged_status status) {
    switch (status) {
#define STATUS_NAME(name, value, text)                                                                       \
    case PAGED_##name:                                                                                       \
        return "PAGED_" #name;
        PAGED_STATUS_MAP(STATUS_NAME)
#undef STATUS_NAME
    }
    return "unknown status";
}

const char *paged_status_text(paged_status status) {
    switch (status) {
#define STATUS_TEXT(name, value, text)                                                                       \
    case PAGED_##name:                                                                                       \
        return text;
        PAGED_STATUS_MAP(STATUS_TEXT)
#undef STATUS_TEXT
    }
    return "unknown status";
}

const char *paged_version(void) {
    return PAGED_VERSION_STRING;
}

paged_status paged__fail(paged_error *err, paged_status status, const char *fmt, ...) {
    if (err) {
        va_list args;
        err->status = status;
        va_start(args, fmt);
        if (vsnprintf(err->message, sizeof err->message, fmt, args) < 0) err->message[0] = '\0';
        va_end(args);
        /* Names from files and users end up in here, and an error is one line. */
        for (char *c = err->message; *c; c++) {
            if ((unsigned char)*c < ' ' || *c == 0x7f) *c = ' ';
        }
    }
    return status;
}
