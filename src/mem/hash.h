/* mem/hash.h: xxHash, compiled into the one who includes this. Short keys are hashed without a
 * call, and no library is linked. */
#ifndef PAGED_MEM_HASH_H
#define PAGED_MEM_HASH_H

#define XXH_INLINE_ALL
#include <xxhash.h>

#endif
