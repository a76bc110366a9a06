/* engine/stop.c: see stop.h. */
#include "engine/stop.h"

paged_status paged__stop_init(paged__stop *stop, const char *const *strings, int32_t n, paged_error *err) {
    if (n < 0 || n > PAGED__STOP_STRINGS_MAX)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "%d stop strings; at most %d", n,
                           PAGED__STOP_STRINGS_MAX);
    if (n > 0 && !strings)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "%d stop strings, but none given", n);
    memset(stop, 0, sizeof *stop);
    stop->found = -1;
    for (int32_t i = 0; i < n; i++) {
        const size_t len = strings[i] ? strnlen(strings[i], PAGED__STOP_BYTES_MAX + 1) : 0;
        if (len < 1 || len > PAGED__STOP_BYTES_MAX)
            return paged__fail(err, PAGED_ERR_INVALID_ARG, "stop string %d has %s; 1 … %d bytes are allowed",
                               i, len < 1 ? "no bytes" : "more bytes", PAGED__STOP_BYTES_MAX);
        memcpy(stop->strings[i], strings[i], len);
        stop->lens[i] = (int32_t)len;
    }
    stop->n = n;
    return PAGED_OK;
}

/* Byte `back` bytes before the end of what came; 0: the newest. */
static char byte_at(const paged__stop *stop, int64_t back) {
    return stop->window[(stop->n_pushed - 1 - back) % PAGED__STOP_BYTES_MAX];
}

/* Whether the first n bytes of string i are the last n that came. */
static bool ends_with(const paged__stop *stop, int32_t i, int32_t n) {
    if (n > stop->n_pushed) return false;
    for (int32_t j = 0; j < n; j++)
        if (byte_at(stop, j) != stop->strings[i][n - 1 - j]) return false;
    return true;
}

/* The longest string that is complete; -1: none. */
static int32_t find_complete(const paged__stop *stop) {
    int32_t found = -1;
    for (int32_t i = 0; i < stop->n; i++)
        if ((found < 0 || stop->lens[i] > stop->lens[found]) && ends_with(stop, i, stop->lens[i])) found = i;
    return found;
}

/* Bytes at the end of what came that may be the beginning of a stop string. */
static int32_t longest_begun(const paged__stop *stop) {
    int32_t longest = 0;
    for (int32_t i = 0; i < stop->n; i++)
        for (int32_t n = stop->lens[i] - 1; n > longest; n--)
            if (ends_with(stop, i, n)) longest = n;
    return longest;
}

bool paged__stop_push(paged__stop *stop, const char *bytes, size_t n_bytes, bool armed) {
    for (size_t i = 0; i < n_bytes && stop->found < 0; i++) {
        stop->window[stop->n_pushed++ % PAGED__STOP_BYTES_MAX] = bytes[i];
        const int32_t i_found = armed ? find_complete(stop) : -1;
        if (i_found < 0) continue;
        stop->which = i_found;
        stop->found = stop->n_pushed - stop->lens[i_found];
    }
    stop->safe = stop->found >= 0 ? stop->found : stop->n_pushed - longest_begun(stop);
    return stop->found < 0;
}

void paged__stop_finish(paged__stop *stop) {
    if (stop->found < 0) stop->safe = stop->n_pushed;
}
