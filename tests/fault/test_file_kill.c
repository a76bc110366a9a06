/* test_file_kill.c: a process that is killed while it writes leaves a store that opens, answers right and
 * does not grow; and what `paged store` does with one is true.
 *
 * Method: a child writes, reads and evicts as fast as it can and is killed by SIGKILL at a random moment,
 * over and over in one directory; after each the store is opened, every record that is found is compared
 * bit by bit with what its number says, nothing may be damaged, and the directory is no larger than its
 * limit. Of what a flush said is durable, everything that was not evicted is there.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>

#include "file_world.h"
#include "store/tools.h"

enum { N_SLOTS = 100, NUMBERS = 400, DIR_BOUND = N_SLOTS * WORLD_SLOT + (6 << 20) };

/* Between parent and child: the numbers below are durable as far as the store has said. */
static volatile int64_t *durable;

/* ---- the child ---- */

__attribute__((noreturn)) static void write_for_ever(uint64_t seed, int64_t next) {
    const paged_file_store_config config = world_config(world_dir, N_SLOTS);
    paged_store store;
    paged_notes notes;
    uint64_t state = seed;
    char note[64];
    if (paged_file_store_create(&config, &store, &notes, NULL)) _exit(2);
    if (store.open(store.self, &world_shape, NULL)) _exit(3);
    for (;; next++) {
        if (put_number(&store, next, NULL)) _exit(4);
        if (paged__rand(&state) % 8 == 0) get_number(&store, next - (int64_t)(paged__rand(&state) % 50));
        if (paged__rand(&state) % 8 == 0) {
            if (store.flush(store.self, NULL)) _exit(5);
            *durable = next;
        }
        if (paged__rand(&state) % 20 == 0) {
            snprintf(note, sizeof note, "%lld", (long long)next);
            if (notes.put(notes.self, "last", note, strlen(note), 0, NULL)) _exit(6);
        }
    }
}

/* Ends the child at a moment between nothing and a few commits. Returns how it ended. */
static int kill_after(pid_t child, int64_t us) {
    const struct timespec wait = {us / 1000000, us % 1000000 * 1000};
    int how;
    nanosleep(&wait, NULL);
    kill(child, SIGKILL);
    CHECK(waitpid(child, &how, 0) == child);
    return how;
}

static int64_t look(int64_t first, int64_t last, int64_t durable_now) {
    const paged_file_store_config config = world_config(world_dir, N_SLOTS);
    paged_store store;
    paged_error err;
    int64_t n_found = 0, newest = -1;
    if (paged_file_store_create(&config, &store, NULL, &err))
        test_fail(__FILE__, __LINE__, "%s", err.message);
    CHECK_EQ(store.open(store.self, &world_shape, NULL), PAGED_OK);
    for (int64_t i = first; i < last; i++)
        if (get_number(&store, i) == PAGED_OK) n_found++, newest = i;
    const paged_store_stats stats = stats_of(&store);
    CHECK_EQ(stats.n_damaged, 0);
    CHECK_EQ(stats.n_records, n_found);
    CHECK(stats.bytes <= N_SLOTS * WORLD_SLOT);
    /* Reads make old records young, so which ones are evicted is not told by the numbers; the newest are
     * not. */
    if (newest < durable_now)
        test_fail(__FILE__, __LINE__, "%lld is the newest, and %lld was durable", (long long)newest,
                  (long long)durable_now);
    store.close(store.self);
    if (dir_bytes(world_dir) > DIR_BOUND)
        test_fail(__FILE__, __LINE__, "the directory has %lld bytes", (long long)dir_bytes(world_dir));
    return newest;
}

static void killed_while_it_writes(void) {
    uint64_t state = test_seed;
    int64_t next = 1, newest = 0;
    int32_t n_killed_writing = 0;
    const int32_t n_rounds = test_long ? 600 : 25;
    new_dir();
    durable = mmap(NULL, sizeof *durable, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(durable != MAP_FAILED);
    for (int32_t round = 0; round < n_rounds; round++) {
        const uint64_t seed = paged__rand(&state);
        *durable = -1;
        fflush(stdout);
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) write_for_ever(seed, next);
        const int how = kill_after(child, (int64_t)(paged__rand(&state) % 60000));
        if (!WIFSIGNALED(how))
            test_fail(__FILE__, __LINE__, "the child ended by itself: %d", WEXITSTATUS(how));
        n_killed_writing += *durable >= 0;
        /* Older ones are gone by then: there is room for 100, and few of them are read again. */
        const int64_t found = look(PAGED_MAX(0, next - NUMBERS), next + 40 * NUMBERS, *durable);
        newest = PAGED_MAX(newest, found);
        next = newest + 1;
    }
    if (n_killed_writing < n_rounds / 4)
        test_fail(__FILE__, __LINE__, "only %d of %d were writing when they were killed", n_killed_writing,
                  n_rounds);
    munmap((void *)(uintptr_t)durable, sizeof *durable);
    remove_tree(world_dir);
}

/* ---- the tools ---- */

static paged_store open_tool(const char *dir) {
    paged_store store;
    paged_error err;
    paged_file_store_config config = world_config(dir, 0);
    config.max_bytes = UINT64_MAX;
    if (paged_file_store_create(&config, &store, NULL, &err))
        test_fail(__FILE__, __LINE__, "%s", err.message);
    return store;
}

static void fill_dir(int64_t n) {
    paged_store store = open_tool(world_dir);
    CHECK_EQ(store.open(store.self, &world_shape, NULL), PAGED_OK);
    for (int64_t i = 0; i < n; i++) CHECK_EQ(put_number(&store, i, NULL), PAGED_OK);
    store.close(store.self);
}

static int32_t found_in(const char *dir, int64_t n) {
    paged_store store = open_tool(dir);
    CHECK_EQ(store.open(store.self, &world_shape, NULL), PAGED_OK);
    const int32_t found = count_found(&store, n);
    store.close(store.self);
    return found;
}

static void flip_byte(const char *path, int64_t at) {
    uint8_t byte;
    const int fd = open(path, O_RDWR);
    CHECK(fd >= 0 && pread(fd, &byte, 1, at) == 1);
    byte ^= 0x10;
    CHECK(pwrite(fd, &byte, 1, at) == 1);
    close(fd);
}

static void check_finds_what_is_damaged(void) {
    char path[256];
    paged__tool_report report;
    new_dir();
    fill_dir(40);
    paged_store store = open_tool(world_dir);
    CHECK_EQ(paged__tool_check(&store, NULL, &report, NULL), PAGED_OK);
    CHECK_EQ(report.n_records, 40);
    CHECK_EQ(report.n_damaged, 0);
    store.close(store.self);
    snprintf(path, sizeof path, "%s/data-1", world_dir);
    flip_byte(path, 3 * WORLD_SLOT + 1000);
    flip_byte(path, 17 * WORLD_SLOT);
    store = open_tool(world_dir);
    CHECK_EQ(paged__tool_check(&store, NULL, &report, NULL), PAGED_OK);
    CHECK_EQ(report.n_damaged, 2);
    CHECK_EQ(report.n_records, 38);
    CHECK_EQ(paged__tool_gc(&store, NULL), PAGED_OK);
    store.close(store.self);
    CHECK_EQ(found_in(world_dir, 40), 38);
    remove_tree(world_dir);
}

/* The first is that of number 0, so a path from `key` on has key + 1 records. */
static void exported_and_imported(void) {
    char file[300], other[300];
    paged__tool_report report;
    paged_error err;
    new_dir();
    fill_dir(40);
    snprintf(file, sizeof file, "%s/out.kv", world_dir);
    snprintf(other, sizeof other, "%s/other", world_dir);
    paged_store store = open_tool(world_dir);
    CHECK_EQ(paged__tool_export(&store, NULL, file, NULL, &report, NULL), PAGED_OK);
    CHECK_EQ(report.n_records, 40);
    store.close(store.self);
    for (int round = 0; round < 2; round++) {
        store = open_tool(other);
        CHECK_EQ(paged__tool_import(&store, file, NULL, &report, NULL), PAGED_OK);
        CHECK_EQ(report.n_records, 40);
        CHECK_EQ(report.n_known, round ? 40 : 0);
        store.close(store.self);
        CHECK_EQ(found_in(other, 50), 40);
    }
    /* A path: records begin anew every 1000 tokens blocks, so number 7 has 0 … 7. */
    const paged_key seven = world_key(7), none = world_key(1234);
    store = open_tool(world_dir);
    CHECK_EQ(paged__tool_export(&store, &seven, file, NULL, &report, NULL), PAGED_OK);
    CHECK_EQ(report.n_records, 8);
    CHECK_EQ(paged__tool_export(&store, &none, file, NULL, &report, &err), PAGED_ERR_NOT_FOUND);
    store.close(store.self);
    remove_tree(other);
    store = open_tool(other);
    CHECK_EQ(paged__tool_import(&store, file, NULL, &report, NULL), PAGED_OK);
    store.close(store.self);
    CHECK_EQ(found_in(other, 40), 8);
    remove_tree(world_dir);
}

/* Any byte that differs, any cut: nothing is written. */
static void damaged_imports(void) {
    char file[300], other[300];
    paged__tool_report report;
    paged_error err;
    struct stat info;
    new_dir();
    fill_dir(3);
    snprintf(file, sizeof file, "%s/out.kv", world_dir);
    snprintf(other, sizeof other, "%s/other", world_dir);
    paged_store store = open_tool(world_dir);
    CHECK_EQ(paged__tool_export(&store, NULL, file, NULL, &report, NULL), PAGED_OK);
    store.close(store.self);
    store = open_tool(other);
    CHECK(stat(file, &info) == 0);
    for (int64_t at = 0; at < info.st_size; at += test_long || at < 1000 ? 1 : 37) {
        flip_byte(file, at);
        const paged_status status = paged__tool_import(&store, file, NULL, &report, &err);
        if (status != PAGED_ERR_FORMAT)
            test_fail(__FILE__, __LINE__, "byte %lld: status %d, %s", (long long)at, status, err.message);
        flip_byte(file, at);
    }
    CHECK_EQ(stats_of(&store).n_records, 0);
    for (int64_t size = info.st_size - 1; size >= 0; size -= test_long ? 1 : 41) {
        CHECK(truncate(file, size) == 0);
        CHECK_EQ(paged__tool_import(&store, file, NULL, &report, &err), PAGED_ERR_FORMAT);
    }
    CHECK_EQ(paged__tool_import(&store, world_dir, NULL, &report, &err), PAGED_ERR_IO);
    CHECK_EQ(stats_of(&store).n_records, 0);
    store.close(store.self);
    remove_tree(world_dir);
}

#define TESTS(X)                                                                                             \
    X(killed_while_it_writes) X(check_finds_what_is_damaged) X(exported_and_imported) X(damaged_imports)
TEST_MAIN(TESTS)
