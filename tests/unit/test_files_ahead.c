/* test_files_ahead.c: what the file store is told that it will be asked for is there when it is asked for,
 * and is never anything else.
 *
 * Method: reads that are as late as can be (late_reads.h) into buffers that are poisoned, so that whoever
 * looks before they are over finds no record and reads it again, which is counted.
 */
#include <errno.h>
#include <fcntl.h>

#include "base/system.h"
#include "file_world.h"
#include "late_reads.h"

static paged_store store;

static void open_slots(int64_t n_slots) {
    const paged_file_store_config config = world_config(world_dir, n_slots);
    CHECK_EQ(paged_file_store_create(&config, &store, NULL, NULL), PAGED_OK);
    CHECK_EQ(store.open(store.self, &world_shape, NULL), PAGED_OK);
}

static void put(int64_t number) {
    CHECK_EQ(put_number(&store, number, NULL), PAGED_OK);
}

enum { N_AHEAD = 300 }; /* of more than two halves of what is read at a time */
static int32_t n_read_now, n_started;
static bool is_refused; /* nothing is read beside the caller */

static ssize_t counted_read(int fd, const struct iovec *parts, int n_parts, off_t offset) {
    n_read_now++;
    return preadv(fd, parts, n_parts, offset);
}
static int counted_start(aio_context_t reads, int n, struct iocb **of) {
    n_started += n;
    return late_reads_start(reads, n, of);
}
static int open_reads(int n_max, aio_context_t *out) {
    errno = ENOSYS;
    return is_refused ? -1 : late_reads_open(n_max, out);
}

static bool misfits; /* other sizes or places are wanted */
static int misfit_wait(aio_context_t reads, int n, struct io_event *out) {
    n = late_reads_wait(reads, n, out);
    if (misfits) out[0].res = -EINVAL;
    return n;
}

static int32_t n_warnings;
static void count_warnings(void *user, paged_log_level level, const char *line) {
    (void)user;
    n_warnings += level == PAGED_LOG_WARN && strstr(line, "read ahead") != NULL;
}

/* All records, in an order; says first which. */
static void get_all(const int32_t *order, bool is_told) {
    static paged_key keys[N_AHEAD];
    for (int i = 0; i < N_AHEAD; i++) keys[i] = world_key(order[i]);
    n_read_now = n_started = 0;
    if (is_told) store.expect(store.self, keys, N_AHEAD);
    for (int i = 0; i < N_AHEAD; i++) CHECK_EQ(get_number(&store, order[i]), PAGED_OK);
}

static void what_is_expected_is_read_ahead(void) {
    paged__system_calls calls = late_calls();
    int32_t forwards[N_AHEAD], mixed[N_AHEAD];
    for (int i = 0; i < N_AHEAD; i++) {
        forwards[i] = i;
        mixed[i] = i % 2 ? N_AHEAD - i : i; /* no two neighbours */
    }
    calls.readv = counted_read;
    calls.reads_start = counted_start;
    calls.reads_open = open_reads;
    paged__system_set(&calls);
    for (int refused = 0; refused < 2; refused++) {
        is_refused = refused;
        new_dir();
        open_slots(0);
        for (int i = 0; i < N_AHEAD; i++) put(i);
        get_all(forwards, false);
        CHECK_EQ(n_read_now, N_AHEAD);
        get_all(forwards, true);
        CHECK_EQ(n_read_now, refused ? N_AHEAD : 0);
        CHECK(refused || n_started < 10);
        get_all(mixed, true);
        CHECK_EQ(n_read_now, refused ? N_AHEAD : 0);
        CHECK_EQ(n_started, refused ? 0 : N_AHEAD);
        CHECK_EQ(stats_of(&store).n_damaged, 0);
        store.close(store.self);
    }
    paged__system_set(NULL);
}

/* What is expected anew takes the place of reads that are under way; nobody comes for the last of them. */
static void expected_anew(void) {
    paged__system_calls calls = late_calls();
    static paged_key keys[N_AHEAD];
    calls.readv = counted_read;
    paged__system_set(&calls);
    new_dir();
    open_slots(0);
    for (int i = 0; i < N_AHEAD; i++) put(i);
    for (int i = 0; i < N_AHEAD; i++) keys[i] = world_key(i);
    n_read_now = 0;
    for (int first = 0; first < N_AHEAD; first += 30) {
        store.expect(store.self, keys + first, N_AHEAD - first);
        for (int i = 0; i < 5; i++) CHECK_EQ(get_number(&store, first + i), PAGED_OK);
    }
    CHECK_EQ(n_read_now, 0);
    store.expect(store.self, keys, N_AHEAD);
    CHECK(n_late > 0);
    store.close(store.self);
    CHECK(n_late == 0 && !late_is_open);
    paged__system_set(NULL);
}

/* Where it cannot be, that is told once, and records come from the file. */
static void reading_ahead_that_cannot_be_is_told_once(void) {
    paged__system_calls calls = late_calls();
    static paged_key keys[N_AHEAD];
    calls.readv = counted_read;
    calls.reads_open = open_reads;
    calls.reads_wait = misfit_wait;
    paged__system_set(&calls);
    paged_log_set(count_warnings, NULL, PAGED_LOG_WARN);
    for (int i = 0; i < N_AHEAD; i++) keys[i] = world_key(i);
    for (int refused = 0; refused < 2; refused++) {
        is_refused = refused;
        misfits = !refused;
        new_dir();
        open_slots(0);
        for (int i = 0; i < N_AHEAD; i++) put(i);
        n_warnings = n_read_now = 0;
        for (int round = 0; round < 3; round++) {
            store.expect(store.self, keys, N_AHEAD);
            CHECK_EQ(count_found(&store, N_AHEAD), N_AHEAD);
        }
        CHECK_EQ(n_warnings, 1);
        CHECK(n_read_now > 2 * N_AHEAD);
        CHECK_EQ(stats_of(&store).n_damaged, 0);
        store.close(store.self);
    }
    is_refused = misfits = false;
    paged_log_set(NULL, NULL, PAGED_LOG_ERROR);
    paged__system_set(NULL);
}

/* What is expected may be read in another order, written, damaged or gone by then: what comes is right, and
 * what does not is a miss as ever. */
static void what_was_expected_and_is_not_so(void) {
    const paged__system_calls calls = late_calls();
    uint64_t state = test_seed;
    paged_key keys[N_AHEAD];
    paged__system_set(&calls);
    new_dir();
    open_slots(N_AHEAD);
    for (int i = 0; i < N_AHEAD; i++) put(i);
    for (int i = 0; i < N_AHEAD; i++) keys[i] = world_key(i);
    for (int round = 0; round < (test_long ? 2000 : 40); round++) {
        const int32_t first = (int32_t)(paged__rand(&state) % N_AHEAD);
        store.expect(store.self, keys + first,
                     (int32_t)(paged__rand(&state) % (uint64_t)(N_AHEAD - first + 1)));
        for (int i = 0; i < 100; i++) {
            const int64_t number = (first + i + (paged__rand(&state) % 16 ? 0 : 7)) % N_AHEAD;
            const paged_status status = get_number(&store, number);
            CHECK(status == PAGED_OK || status == PAGED_ERR_NOT_FOUND);
            if (status || paged__rand(&state) % 8 == 0) put(paged__rand(&state) % 4 ? number : 1000 + number);
            if (paged__rand(&state) % 16 == 0) store.flush(store.self, NULL);
        }
    }
    CHECK_EQ(stats_of(&store).n_damaged, 0);
    CHECK(stats_of(&store).n_evicted > 0);
    keys[10].bytes[0] ^= 1; /* one that is not there */
    store.expect(store.self, keys, N_AHEAD);
    store.close(store.self); /* and nobody comes for it */
    paged__system_set(NULL);
}

/* A record that is damaged on the disk is no other one when it is read ahead. */
static void damage_that_is_read_ahead(void) {
    const paged__system_calls calls = late_calls();
    paged_key keys[20];
    char path[256];
    paged__system_set(&calls);
    new_dir();
    open_slots(0);
    for (int i = 0; i < 20; i++) put(i);
    for (int i = 0; i < 20; i++) keys[i] = world_key(i);
    CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
    snprintf(path, sizeof path, "%s/data-1", world_dir);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0 && pwrite(fd, "?", 1, 7 * WORLD_SLOT + 700) == 1);
    CHECK(pwrite(fd, "?", 1, 9 * WORLD_SLOT + 4) == 1);
    close(fd);
    store.expect(store.self, keys, 20);
    for (int i = 0; i < 20; i++)
        CHECK_EQ(get_number(&store, i), i == 7 || i == 9 ? PAGED_ERR_NOT_FOUND : PAGED_OK);
    CHECK_EQ(stats_of(&store).n_damaged, 2);
    store.close(store.self);
    paged__system_set(NULL);
}

#define TESTS(X)                                                                                             \
    X(what_is_expected_is_read_ahead)                                                                        \
    X(what_was_expected_and_is_not_so)                                                                       \
    X(expected_anew)                                                                                         \
    X(reading_ahead_that_cannot_be_is_told_once)                                                             \
    X(damage_that_is_read_ahead)
TEST_MAIN(TESTS)
