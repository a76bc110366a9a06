/* Goal: what every room builds on does what base.h says. Method: exact values, all 2^16 halves, and a
 * made-up /proc for the CPU count. */
#include <math.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"
#include "base/cgroup.h"
#include "test.h"

/* ---- status, errors, log ---- */

static void status_names_and_texts(void) {
    CHECK_STR(paged_status_name(PAGED_OK), "PAGED_OK");
    CHECK_STR(paged_status_name(PAGED_ERR_NO_BLOCKS), "PAGED_ERR_NO_BLOCKS");
    CHECK_STR(paged_status_text(PAGED_ERR_NO_BLOCKS), "the pool has no free block");
    CHECK_STR(paged_status_name((paged_status)99), "unknown status");
    CHECK_STR(paged_status_text((paged_status)-1), "unknown status");
    CHECK_EQ(PAGED_ERR_NOT_FOUND, 13);
    for (int i = 0; i <= 13; i++) CHECK(strcmp(paged_status_name((paged_status)i), "unknown status") != 0);
    CHECK_STR(paged_version(), PAGED_VERSION_STRING);
}

static void errors_are_one_line(void) {
    paged_error err = {0};
    char big[2000];
    CHECK_EQ(paged__fail(NULL, PAGED_ERR_IO, "%d", 1), PAGED_ERR_IO);
    CHECK_EQ(paged__fail(&err, PAGED_ERR_LIMIT, "%d of %d\nin \"%s\"", 3, 2, "a\tb"), PAGED_ERR_LIMIT);
    CHECK_EQ(err.status, PAGED_ERR_LIMIT);
    CHECK_STR(err.message, "3 of 2 in \"a b\"");
    memset(big, 'x', sizeof big - 1);
    big[sizeof big - 1] = '\0';
    paged__fail(&err, PAGED_ERR_IO, "%s", big);
    CHECK_EQ(strlen(err.message), sizeof err.message - 1);
}

struct lines {
    int n;
    paged_log_level level;
    char last[1200];
};

static void keep_line(void *user, paged_log_level level, const char *line) {
    struct lines *lines = user;
    lines->n++;
    lines->level = level;
    snprintf(lines->last, sizeof lines->last, "%s", line);
}

static void log_goes_to_the_callback(void) {
    struct lines lines = {0};
    paged__log(PAGED_LOG_ERROR, "nobody hears this");
    paged_log_set(keep_line, &lines, PAGED_LOG_INFO);
    paged__log(PAGED_LOG_INFO, "%d blocks\n", 7);
    CHECK_STR(lines.last, "7 blocks ");
    CHECK_EQ(lines.level, PAGED_LOG_INFO);
    paged__log(PAGED_LOG_DEBUG, "too fine");
    paged_log_set(NULL, NULL, PAGED_LOG_DEBUG);
    paged__log(PAGED_LOG_ERROR, "nobody again");
    CHECK_EQ(lines.n, 1);
}

/* ---- memory ---- */

struct counting {
    int n_live;
    size_t last_bytes;
    bool refuse;
};

static void *counting_alloc(void *user, size_t size_bytes, size_t align) {
    struct counting *counting = user;
    if (counting->refuse) return NULL;
    counting->n_live++;
    counting->last_bytes = size_bytes;
    return aligned_alloc(align, (size_bytes + align - 1) / align * align);
}

static void counting_free(void *user, void *ptr) {
    ((struct counting *)user)->n_live--;
    free(ptr);
}

static void allocations_are_checked_and_aligned(void) {
    for (size_t n = 0; n < 300; n += 7) {
        unsigned char *p = paged__calloc(n, 1);
        CHECK(p && (uintptr_t)p % 64 == 0);
        for (size_t i = 0; i < n; i++) CHECK_EQ(p[i], 0);
        paged__free(p);
    }
    CHECK(!paged__alloc(SIZE_MAX / 2, 3));
    CHECK(!paged__calloc((size_t)1 << 62, 8));
    CHECK(!paged__alloc(1, SIZE_MAX));
    CHECK(!paged__alloc(1, (size_t)PTRDIFF_MAX));
    for (size_t n = 0; n <= (size_t)8 << 20; n += (size_t)1 << 20) {
        unsigned char *p = paged__alloc_huge(n);
        CHECK(p && (uintptr_t)p % (n < (size_t)2 << 20 ? 64 : 2 << 20) == 0);
        memset(p, 1, n);
        paged__free(p);
    }
    CHECK(!paged__alloc_huge(SIZE_MAX));
    CHECK(!paged__alloc_huge((size_t)PTRDIFF_MAX));
    paged__free(NULL);
}

static void allocator_hook_sees_everything(void) {
    struct counting counting = {0};
    const paged_allocator allocator = {counting_alloc, counting_free, &counting};
    paged_allocator_set(&allocator);
    void *a = paged__alloc(3, 5), *b = paged__calloc(2, 9);
    CHECK_EQ(counting.n_live, 2);
    CHECK_EQ(counting.last_bytes, 18);
    counting.refuse = true;
    CHECK(!paged__alloc(1, 1));
    CHECK(!paged__calloc(1, 1));
    paged__free(a);
    paged__free(b);
    CHECK_EQ(counting.n_live, 0);
    paged_allocator_set(NULL);
    paged__free(paged__alloc(1, 1));
    CHECK_EQ(counting.n_live, 0);
}

/* ---- half precision ---- */

static uint32_t bits(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static float from_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static void f16_round_trip(void) {
    for (uint32_t h = 0; h < 0x10000; h++) {
        float f = paged__f16_to_f32((uint16_t)h);
        uint32_t magnitude = h & 0x7fff;
        if (magnitude > 0x7c00) {
            CHECK(isnan(f) && isnan(paged__f16_to_f32(paged__f32_to_f16(f))));
        } else if (magnitude == 0x7c00) {
            CHECK(isinf(f));
            CHECK_EQ(paged__f32_to_f16(f), (h & 0x8000) | 0x7bff);
        } else {
            /* The value by its definition, in double. */
            int e = (int)(magnitude >> 10);
            double want = e ? ldexp(1024 + (magnitude & 1023), e - 25) : ldexp(magnitude & 1023, -24);
            CHECK((double)f == (h & 0x8000 ? -want : want));
            CHECK_EQ(paged__f32_to_f16(f), h);
        }
    }
}

/* The middle between two neighbours goes to the even one, a hair beside it to the nearer one. */
static void f16_rounds_to_nearest_even(void) {
    for (uint32_t h = 0; h < 0x7bff; h++) {
        float low = paged__f16_to_f32((uint16_t)h), high = paged__f16_to_f32((uint16_t)(h + 1));
        float middle = (low + high) / 2;
        CHECK_EQ(paged__f32_to_f16(middle), h + (h & 1));
        CHECK_EQ(paged__f32_to_f16(nextafterf(middle, 0)), h);
        CHECK_EQ(paged__f32_to_f16(nextafterf(middle, INFINITY)), h + 1);
        CHECK_EQ(paged__f32_to_f16(-middle), 0x8000 | (h + (h & 1)));
    }
}

static void f16_saturates(void) {
    CHECK_EQ(paged__f32_to_f16(65519.0f), 0x7bff);
    CHECK_EQ(paged__f32_to_f16(65520.0f), 0x7bff);
    CHECK_EQ(paged__f32_to_f16(-1e30f), 0xfbff);
    CHECK_EQ(paged__f32_to_f16(INFINITY), 0x7bff);
    CHECK_EQ(paged__f32_to_f16(-0.0f), 0x8000);
    CHECK_EQ(paged__f32_to_f16(from_bits(1)), 0);
    CHECK_EQ(paged__f32_to_f16(NAN) & 0x7e00, 0x7e00);
    CHECK_EQ(paged__f32_to_f16(from_bits(0x7f800001)) & 0x7e00, 0x7e00);
}

static void bf16_all_cases(void) {
    for (uint32_t h = 0; h < 0x10000; h++) {
        float f = paged__bf16_to_f32((uint16_t)h);
        uint32_t magnitude = h & 0x7fff;
        CHECK_EQ(bits(f), h << 16);
        if (magnitude > 0x7f80)
            CHECK(isnan(paged__bf16_to_f32(paged__f32_to_bf16(f))));
        else
            CHECK_EQ(paged__f32_to_bf16(f), magnitude == 0x7f80 ? h - 1 : h);
        if (magnitude < 0x7f7f) {
            CHECK_EQ(paged__f32_to_bf16(from_bits(h << 16 | 0x8000)), h + (h & 1));
            CHECK_EQ(paged__f32_to_bf16(from_bits(h << 16 | 0x7fff)), h);
            CHECK_EQ(paged__f32_to_bf16(from_bits(h << 16 | 0x8001)), h + 1);
        }
    }
    CHECK_EQ(paged__f32_to_bf16(from_bits(0x7f7fffff)), 0x7f7f); /* would round to infinity */
    CHECK(isnan(paged__bf16_to_f32(paged__f32_to_bf16(from_bits(0x7f800001)))));
}

/* ---- processor ---- */

static void cpu_flags_and_mask(void) {
    uint32_t flags = paged_cpu_flags();
    CHECK(!(flags & PAGED_CPU_AVX512) || (flags & PAGED_CPU_AVX2));
    CHECK(!(flags & (PAGED_CPU_AVX512_BF16 | PAGED_CPU_AVX512_VNNI)) || (flags & PAGED_CPU_AVX512));
    CHECK(!(flags & PAGED_CPU_AMX) || (flags & PAGED_CPU_AVX512_BF16 && flags & PAGED_CPU_AVX512_VNNI));
    paged_cpu_mask(PAGED_CPU_AVX2);
    CHECK_EQ(paged_cpu_flags(), flags & PAGED_CPU_AVX2);
    paged_cpu_mask(0);
    CHECK_EQ(paged_cpu_flags(), 0);
    for (uint32_t flag = PAGED_CPU_AVX2; flag <= PAGED_CPU_AVX512_VNNI; flag <<= 1) {
        paged_cpu_mask(~flag); /* AMX needs each of them */
        CHECK_EQ(paged_cpu_flags(), flags & ~flag & ~(uint32_t)PAGED_CPU_AMX);
    }
    paged_cpu_mask(~(uint32_t)PAGED_CPU_AMX);
    CHECK_EQ(paged_cpu_flags(), flags & ~(uint32_t)PAGED_CPU_AMX);
    paged_cpu_mask(~0u);
    CHECK_EQ(paged_cpu_flags(), flags);
    CHECK(paged_cpu_count() >= 1);
}

#if defined(__x86_64__)
/* A process whose PAGED_CPU leaves AMX out does not ask the system for its registers. The first test, since a
 * process that has asked, and its children, keep them. */
static void amx_is_not_asked_for(void) {
    enum { GET_PERMISSION = 0x1022, TILE_DATA = 18 };
    int status;
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        uint64_t permitted = 0;
        setenv("PAGED_CPU", "avx512_bf16", 1);
        paged_cpu_flags();
        const bool known = syscall(SYS_arch_prctl, GET_PERMISSION, &permitted) == 0; /* since Linux 5.16 */
        _exit(known && permitted >> TILE_DATA & 1);
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
}
#else
static void amx_is_not_asked_for(void) {}
#endif

static char root[64]; /* of the made-up files */

static void put(const char *path, const char *text) {
    char full[512];
    snprintf(full, sizeof full, "%s%s", root, path);
    for (char *slash = full + strlen(root) + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = '\0';
        mkdir(full, 0777);
        *slash = '/';
    }
    FILE *file = fopen(full, "w");
    CHECK(file);
    fputs(text, file);
    fclose(file);
}

static void new_root(void) {
    snprintf(root, sizeof root, "/tmp/paged-test-XXXXXX");
    CHECK(mkdtemp(root));
}

static void drop_root(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    CHECK_EQ(system(command), 0);
}

static void quota_v2(void) {
    new_root();
    CHECK_EQ(paged__cgroup_cpus(root), INT32_MAX); /* no files at all */
    put("/proc/self/cgroup", "0::/a/b\n");
    put("/proc/self/mountinfo",
        "22 1 0:5 / /proc rw - proc proc rw\n31 22 0:28 / /cg rw - cgroup2 cgroup2 rw\n");
    put("/cg/a/b/cpu.max", "max 100000\n");
    CHECK_EQ(paged__cgroup_cpus(root), INT32_MAX);
    put("/cg/a/cpu.max", "350000 100000\n"); /* an ancestor binds too */
    CHECK_EQ(paged__cgroup_cpus(root), 4);
    put("/cg/a/b/cpu.max", "50000 100000\n");
    CHECK_EQ(paged__cgroup_cpus(root), 1);
    put("/cg/a/b/cpu.max", "garbage");
    CHECK_EQ(paged__cgroup_cpus(root), 4);
    put("/cg/a/b/cpu.max", "100000 0\n");
    CHECK_EQ(paged__cgroup_cpus(root), 4);
    put("/cg/a/b/cpu.max", "99999999999999999999 1\n");
    CHECK_EQ(paged__cgroup_cpus(root), 4);
    drop_root();
}

static void memory_v2(void) {
    new_root();
    CHECK(paged__cgroup_memory(root) == INT64_MAX);
    put("/proc/self/cgroup", "0::/a/b\n");
    put("/proc/self/mountinfo", "31 22 0:28 / /cg rw - cgroup2 cgroup2 rw\n");
    put("/cg/a/b/memory.max", "max\n");
    put("/cg/a/b/memory.current", "1000\n");
    CHECK(paged__cgroup_memory(root) == INT64_MAX);
    put("/cg/a/b/memory.max", "5000\n");
    CHECK(paged__cgroup_memory(root) == 4000);
    put("/cg/a/b/memory.stat", "anon 600\ninactive_file 300\nactive_file 100\n");
    CHECK(paged__cgroup_memory(root) == 4300);
    put("/cg/a/memory.max", "7000\n"); /* an ancestor, whose other groups have taken more */
    put("/cg/a/memory.current", "6500\n");
    CHECK(paged__cgroup_memory(root) == 500);
    put("/cg/a/memory.current", "9000\n");
    CHECK(paged__cgroup_memory(root) == 0);
    put("/cg/a/memory.current", "garbage\n");
    CHECK(paged__cgroup_memory(root) == 4300);
    drop_root();
}

static void memory_v1(void) {
    new_root();
    put("/proc/self/cgroup", "4:memory:/x\n3:cpu:/y\n");
    put("/proc/self/mountinfo", "31 22 0:28 / /m rw - cgroup cgroup rw,memory\n");
    put("/m/x/memory.limit_in_bytes", "9223372036854771712\n"); /* v1's way to say none */
    put("/m/x/memory.usage_in_bytes", "4096\n");
    CHECK(paged__cgroup_memory(root) > INT64_MAX / 2);
    put("/m/x/memory.limit_in_bytes", "100000\n");
    put("/m/x/memory.stat", "inactive_file 1\ntotal_inactive_file 96\n");
    CHECK(paged__cgroup_memory(root) == 96000);
    CHECK(paged_memory_available() > 0);
    drop_root();
}

static void quota_v1(void) {
    new_root();
    put("/proc/self/cgroup", "5:cpuset:/x\n4:cpuacct,cpu:/docker/abc\n0::/\n");
    /* A container: its own group is mounted as the whole hierarchy. */
    put("/proc/self/mountinfo",
        "1 2 3:4 /docker/abc /cg/cpuset rw shared:1 - cgroup cgroup rw,cpuset\n"
        "1 2 3:4 /docker/abc /cg/cpu rw shared:1 master:2 - cgroup cgroup rw,cpuacct,cpu\n");
    put("/cg/cpu/cpu.cfs_quota_us", "200000\n");
    CHECK_EQ(paged__cgroup_cpus(root), INT32_MAX); /* no period */
    put("/cg/cpu/cpu.cfs_period_us", "100000\n");
    CHECK_EQ(paged__cgroup_cpus(root), 2);
    put("/cg/cpu/cpu.cfs_quota_us", "-1\n");
    CHECK_EQ(paged__cgroup_cpus(root), INT32_MAX);
    put("/proc/self/mountinfo", "1 2 3:4 /docker/abc\nshort - cgroup\n - cgroup cgroup cpu\n");
    CHECK_EQ(paged__cgroup_cpus(root), INT32_MAX);
    drop_root();
}

/* ---- files, clock, randomness ---- */

static void files_are_mapped(void) {
    paged__file_map map = {0}, same = {(const uint8_t *)"x", 1, 77};
    paged_error err = {0};
    char path[128];
    new_root();
    put("/full", "paged");
    put("/empty", "");
    snprintf(path, sizeof path, "%s/full", root);
    CHECK_EQ(paged__file_map_open(path, &map, &err), PAGED_OK);
    CHECK_EQ(map.size_bytes, 5);
    CHECK(memcmp(map.data, "paged", 5) == 0);
    paged__file_map_close(&map);
    paged__file_map_close(&map);
    map = (paged__file_map){0};
    paged__file_map_close(&map); /* and descriptor 0 is still open */
    CHECK(dup2(0, 0) == 0);
    snprintf(path, sizeof path, "%s/empty", root);
    CHECK_EQ(paged__file_map_open(path, &map, &err), PAGED_OK);
    CHECK(!map.data && map.size_bytes == 0);
    paged__file_map_close(&map);
    snprintf(path, sizeof path, "%s/missing", root);
    CHECK_EQ(paged__file_map_open(path, &same, &err), PAGED_ERR_IO);
    CHECK(strstr(err.message, path) && strstr(err.message, "No such file"));
    CHECK_EQ(paged__file_map_open(root, &same, &err), PAGED_ERR_IO);
    CHECK(strstr(err.message, "directory"));
    snprintf(path, sizeof path, "%s/pipe", root);
    CHECK_EQ(mkfifo(path, 0600), 0);
    CHECK_EQ(paged__file_map_open(path, &same, &err), PAGED_ERR_IO); /* and does not wait for a writer */
    CHECK_EQ(same.fd, 77);
    drop_root();
}

static void clock_and_randomness(void) {
    uint64_t before = paged__now_ns(), state = 5, again = 5;
    CHECK(paged__now_ns() >= before);
    for (int i = 0; i < 100; i++) CHECK(paged__rand(&state) == paged__rand(&again));
    CHECK(paged__mix(1) != paged__mix(2));
    size_t out;
    CHECK(!paged__mul(SIZE_MAX, 2, &out) && paged__mul(3, 5, &out) && out == 15);
    CHECK(!paged__add(SIZE_MAX, 1, &out) && paged__add(3, 5, &out) && out == 8);
}

/* clang-format off */
#define TESTS(X) \
    X(amx_is_not_asked_for) X(status_names_and_texts) X(errors_are_one_line) X(log_goes_to_the_callback) \
    X(allocations_are_checked_and_aligned) X(allocator_hook_sees_everything) X(f16_round_trip) \
    X(f16_rounds_to_nearest_even) X(f16_saturates) X(bf16_all_cases) X(cpu_flags_and_mask) X(quota_v2) \
    X(memory_v2) X(memory_v1) X(quota_v1) X(files_are_mapped) X(clock_and_randomness)
/* clang-format on */
TEST_MAIN(TESTS)
