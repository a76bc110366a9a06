/* kernels.c: the choice of a table of kernels. */
#include "ops/ops.h"

const paged__kernels *paged__kernels_choose(uint32_t cpu_flags) {
#if defined(__x86_64__)
    if (cpu_flags & PAGED_CPU_AMX) return &paged__kernels_amx;
    if (cpu_flags & PAGED_CPU_AVX512_BF16) return &paged__kernels_avx512_bf16;
    if (cpu_flags & PAGED_CPU_AVX512_VNNI) return &paged__kernels_avx512_vnni;
    if (cpu_flags & PAGED_CPU_AVX512) return &paged__kernels_avx512;
    if (cpu_flags & PAGED_CPU_AVX2) return &paged__kernels_avx2;
#elif defined(__aarch64__)
    if (cpu_flags & PAGED_CPU_NEON) return &paged__kernels_neon;
#else
    (void)cpu_flags;
#endif
    return &paged__kernels_ref;
}
