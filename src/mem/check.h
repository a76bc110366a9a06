/* check.h: how the walks over the invariants say what is wrong. */
#ifndef PAGED_MEM_CHECK_H
#define PAGED_MEM_CHECK_H

#include "mem/mem.h"

#define REQUIRE(cond, ...)                                                                                   \
    do {                                                                                                     \
        if (!(cond)) return paged__fail(err, PAGED_ERR_CORRUPT, __VA_ARGS__);                                \
    } while (0)

#endif
