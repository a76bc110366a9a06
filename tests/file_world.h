/* file_world.h: for tests of the file store: a directory that goes with the test, and records of which
 * every bit follows from a number, so that what comes back can be told right from wrong. */
#ifndef PAGED_TESTS_FILE_WORLD_H
#define PAGED_TESTS_FILE_WORLD_H

#include <dirent.h>
#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

#include "paged/file_store.h"
#include "store/store.h"
#include "test.h"

enum { WORLD_BLOCK = 16, WORLD_GROUPS = 2, WORLD_SLOT = 8192 };
static const size_t world_bytes[WORLD_GROUPS] = {5000, 900};
static const char world_fingerprint[] = "a model of tests, f16, packed, avx2";

static const paged_store_shape world_shape = {
    (const uint8_t *)world_fingerprint, sizeof world_fingerprint, WORLD_BLOCK, WORLD_GROUPS, {5000, 900}};

/* ---- a directory ---- */

static char world_dir[128];

static int world_remove(const char *path, const struct stat *info, int type, struct FTW *ftw) {
    (void)info, (void)type, (void)ftw;
    return remove(path);
}

__attribute__((unused)) static void remove_tree(const char *path) {
    nftw(path, world_remove, 8, FTW_DEPTH | FTW_PHYS);
}

/* An empty directory of this process; the one before is removed. */
__attribute__((unused)) static void new_dir(void) {
    /* In memory where there is such a place: what is durable is not for a disk to say here. */
    const char *tmp = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    snprintf(world_dir, sizeof world_dir, "%s/paged-store-%d", tmp, (int)getpid());
    remove_tree(world_dir);
    CHECK(mkdir(world_dir, 0700) == 0);
}

/* Bytes of all files below. */
static int64_t tree_bytes;
static int world_add(const char *path, const struct stat *info, int type, struct FTW *ftw) {
    (void)path, (void)ftw;
    if (type == FTW_F) tree_bytes += info->st_size;
    return 0;
}
__attribute__((unused)) static int64_t dir_bytes(const char *path) {
    tree_bytes = 0;
    nftw(path, world_add, 8, FTW_PHYS);
    return tree_bytes;
}

static inline void path_of(char out[256], const char *name) {
    snprintf(out, 256, "%s/%s", world_dir, name);
}

static inline int64_t size_of(const char *name) {
    char path[256];
    struct stat info;
    path_of(path, name);
    return stat(path, &info) == 0 ? (int64_t)info.st_size : -1;
}

static inline bool exists(const char *name) {
    char path[256];
    struct stat info;
    path_of(path, name);
    return lstat(path, &info) == 0;
}

/* ---- records ---- */

typedef struct world_record {
    paged_record is;
    int32_t tokens[WORLD_BLOCK];
    uint8_t bytes[WORLD_GROUPS][5000];
} world_record;

static paged_key world_key(int64_t number) {
    paged_key key = {{0}};
    if (number < 0) return key;
    for (uint64_t i = 0; i < 2; i++) {
        const uint64_t half = paged__mix(2 * (uint64_t)number + i);
        memcpy(key.bytes + 8 * i, &half, 8);
    }
    return key;
}

/* Empty, with its buffers. */
static void world_blank(world_record *r, int64_t number) {
    memset(r, 0xa5, sizeof *r);
    r->is = (paged_record){.key = world_key(number), .tokens = r->tokens};
    for (int g = 0; g < WORLD_GROUPS; g++) r->is.bytes[g] = r->bytes[g];
}

/* Number n has n - 1 for its parent, and the second group if it is no multiple of 3. */
static void world_fill(world_record *r, int64_t number) {
    uint64_t state = (uint64_t)number * 1000003;
    world_blank(r, number);
    r->is.parent = world_key(number - 1);
    r->is.first = (int32_t)(number % 1000) * WORLD_BLOCK;
    r->is.n_tokens = WORLD_BLOCK;
    r->is.groups = number % 3 ? 3 : 1;
    for (int i = 0; i < WORLD_BLOCK; i++) r->tokens[i] = (int32_t)(paged__rand(&state) >> 40);
    for (int g = 0; g < WORLD_GROUPS; g++)
        for (size_t i = 0; i < world_bytes[g]; i += 4) {
            const uint32_t word = (uint32_t)paged__rand(&state);
            memcpy(r->bytes[g] + i, &word, 4);
        }
}

/* Whether a record that was read is that of its number; the wanted groups are looked at. */
static bool world_right(const world_record *r, int64_t number, uint32_t wanted) {
    world_record want;
    world_fill(&want, number);
    bool right = paged__key_equal(&r->is.parent, &want.is.parent) && r->is.first == want.is.first &&
                 r->is.n_tokens == want.is.n_tokens && r->is.groups == want.is.groups &&
                 memcmp(r->tokens, want.tokens, sizeof want.tokens) == 0;
    for (int g = 0; g < WORLD_GROUPS; g++)
        if ((want.is.groups & wanted) >> g & 1)
            right = right && memcmp(r->bytes[g], want.bytes[g], world_bytes[g]) == 0;
    return right;
}

__attribute__((unused)) static paged_status put_number(paged_store *store, int64_t number, paged_error *err) {
    world_record r; /* not static: tests read and write inside of a write */
    world_fill(&r, number);
    return store->write(store->self, &r.is, err);
}

/* PAGED_OK only if every bit is right; a wrong answer fails the test. */
__attribute__((unused)) static paged_status get_number(paged_store *store, int64_t number) {
    world_record r; /* not static: tests read and write inside of a write */
    world_blank(&r, number);
    const paged_status status = store->read(store->self, &r.is, UINT32_MAX);
    if (status == PAGED_OK && !world_right(&r, number, UINT32_MAX))
        test_fail(__FILE__, __LINE__, "record %lld came back wrong", (long long)number);
    return status;
}

__attribute__((unused)) static int32_t count_found(paged_store *store, int64_t n) {
    int32_t found = 0;
    for (int64_t i = 0; i < n; i++) found += get_number(store, i) == PAGED_OK;
    return found;
}

__attribute__((unused)) static paged_store_stats stats_of(paged_store *store) {
    paged_store_stats stats;
    store->get_stats(store->self, &stats);
    return stats;
}

/* 0 slots: the default limit. */
__attribute__((unused)) static paged_file_store_config world_config(const char *dir, int64_t n_slots) {
    return (paged_file_store_config){.struct_size = sizeof(paged_file_store_config),
                                     .dir = dir,
                                     .max_bytes = (uint64_t)n_slots * WORLD_SLOT,
                                     .keep_free_bytes = 1};
}

#endif
