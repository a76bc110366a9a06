/* copy.c: the copy and sum of copy.h for whichever processor. */
#include "store/copy.h"

uint64_t paged__copy_summed(void *to, const void *from, size_t n) {
#if defined(__x86_64__)
    if (paged_cpu_flags() & PAGED_CPU_AVX2) return paged__copy_summed_avx2(to, from, n);
#endif
    return paged__copy_pieces(to, from, n);
}
