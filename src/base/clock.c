/* clock.c: the monotonic clock. */
#include <time.h>

#include "base/base.h"

uint64_t paged__now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
