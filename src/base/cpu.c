/* cpu.c: instruction sets and the number of CPUs. */
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/base.h"
#include "base/cgroup.h"

enum {
    AVX512 = PAGED_CPU_AVX2 | PAGED_CPU_AVX512,
    VNNI = AVX512 | PAGED_CPU_AVX512_VNNI,
    BF16 = VNNI | PAGED_CPU_AVX512_BF16
};

static const struct {
    const char *name;
    uint32_t flags;
} sets[] = {
    {"ref", 0},
    {"neon", PAGED_CPU_NEON},
    {"neon_dot", PAGED_CPU_NEON | PAGED_CPU_NEON_DOT},
    {"avx2", PAGED_CPU_AVX2},
    {"avx512", AVX512},
    {"avx512_vnni", VNNI},
    {"avx512_bf16", BF16},
    {"amx", BF16 | PAGED_CPU_AMX},
};

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>

/* Linux gives tile registers to a process that asks for them (since 5.16). The numbers are those of its
 * interface; the headers of gcc 12 and of older systems lack some. Vectors of f16 (AVX512-FP16) and
 * moves of bytes (AVX512-VBMI) come with tiles in every processor so far; our kernels use them. */
static bool amx_permitted(void) {
    enum {
        LEAF = 7,
        VBMI_BIT = 1 << 1,
        BF16_BIT = 1 << 22,
        F16_BIT = 1 << 23,
        TILE_BIT = 1 << 24,
        INT8_BIT = 1 << 25
    };
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    const unsigned all = BF16_BIT | F16_BIT | TILE_BIT | INT8_BIT;
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(LEAF, 0, &eax, &ebx, &ecx, &edx) && (edx & all) == all && (ecx & VBMI_BIT) &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

/* The compiler's run-time tests include that the operating system saves the wide registers. Nothing is asked
 * of the system for a set that is not wanted. */
static uint32_t probe(uint32_t wanted) {
    unsigned eax, ebx, ecx, edx;
    uint32_t flags = 0;
    __builtin_cpu_init();
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return 0;
    /* clang 14 does not know the name of F16C. */
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
        (ecx & bit_F16C))
        flags |= PAGED_CPU_AVX2;
    if (!flags || !__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return flags;
    flags |= PAGED_CPU_AVX512;
    if (__builtin_cpu_supports("avx512bf16")) flags |= PAGED_CPU_AVX512_BF16;
    if (__builtin_cpu_supports("avx512vnni")) flags |= PAGED_CPU_AVX512_VNNI;
    if ((flags & BF16) == BF16 && wanted & PAGED_CPU_AMX && amx_permitted()) flags |= PAGED_CPU_AMX;
    return flags;
}
#elif defined(__aarch64__)
#include <sys/auxv.h>

static uint32_t probe(uint32_t wanted) {
    (void)wanted;
    enum { ASIMDDP = 1 << 20 }; /* of AT_HWCAP */
    return PAGED_CPU_NEON | (getauxval(AT_HWCAP) & ASIMDDP ? PAGED_CPU_NEON_DOT : 0);
}
#else
static uint32_t probe(uint32_t wanted) {
    (void)wanted;
    return 0;
}
#endif

static uint32_t environment_mask(void) {
    const char *value = getenv("PAGED_CPU");
    if (!value || !*value) return ~0u;
    for (size_t i = 0; i < sizeof sets / sizeof sets[0]; i++)
        if (strcmp(value, sets[i].name) == 0) return sets[i].flags;
    paged__log(PAGED_LOG_WARN,
               "PAGED_CPU=%s is none of ref, neon, neon_dot, avx2, avx512, avx512_vnni, avx512_bf16, amx and "
               "is ignored",
               value);
    return ~0u;
}

static const uint32_t known = 1u << 31;
static _Atomic uint32_t machine;    /* flags | known, 0 before the first call */
static _Atomic uint32_t keep = ~0u; /* paged_cpu_mask() */

uint32_t paged_cpu_flags(void) {
    uint32_t flags = atomic_load_explicit(&machine, memory_order_relaxed);
    if (!flags) {
        /* Threads that come here together find the same, so the last write may win. */
        const uint32_t wanted = environment_mask();
        flags = (probe(wanted) & wanted) | known;
        atomic_store_explicit(&machine, flags, memory_order_relaxed);
    }
    flags &= atomic_load_explicit(&keep, memory_order_relaxed) & ~known;
    /* Kernels for AMX have the instructions of all below it. */
    return (flags & BF16) == BF16 ? flags : flags & ~(uint32_t)PAGED_CPU_AMX;
}

void paged_cpu_mask(uint32_t flags) {
    atomic_store_explicit(&keep, flags, memory_order_relaxed);
}

static int32_t affinity_cpus(void) {
    cpu_set_t few;
    if (sched_getaffinity(0, sizeof few, &few) == 0) return CPU_COUNT(&few);
    /* More than 1024 CPUs: the kernel refuses a set that is too small. */
    enum { MANY = 1 << 17 };
    size_t size_bytes = CPU_ALLOC_SIZE(MANY);
    cpu_set_t *many = paged__calloc(1, size_bytes);
    int32_t n = 0;
    if (many && sched_getaffinity(0, size_bytes, many) == 0) n = CPU_COUNT_S(size_bytes, many);
    paged__free(many);
    return n ? n : (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
}

int32_t paged_cpu_count(void) {
    int32_t by_affinity = affinity_cpus(), by_quota = paged__cgroup_cpus("");
    return PAGED_MAX(1, PAGED_MIN(by_affinity, by_quota));
}
