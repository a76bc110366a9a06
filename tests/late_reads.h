/* late_reads.h: for tests of reads beside the caller: the seam of base/system.h with reads that are as late
 * as can be, on any file system.
 *
 * reads_start only remembers what is wanted and poisons the buffers; reads_wait does one of the reads, by
 * chance, and says so; reads_close does the rest, as io_destroy waits for it. A buffer that is asked for
 * while a read into it is under way fails the test, as does a context that is left open. O_DIRECT, which the
 * file system of the test may refuse, is told to be there and left out.
 */
#ifndef PAGED_TESTS_LATE_READS_H
#define PAGED_TESTS_LATE_READS_H

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "base/system.h"
#include "test.h"

enum { LATE_MAX = 512, LATE_FDS = 1024 };
static struct iocb late_reads[LATE_MAX];
static struct iocb *late_of[LATE_MAX]; /* whose copies these are: what an event names */
static int32_t n_late, n_late_max;
static bool late_is_open, late_is_direct[LATE_FDS]; /* of the descriptors that were asked to be so */
static uint64_t late_state;

static int late_open(int dir, const char *name, int flags, mode_t mode) {
    const int fd = openat(dir, name, flags & ~O_DIRECT, mode);
    if (fd >= 0 && fd < LATE_FDS) late_is_direct[fd] = flags & O_DIRECT;
    return fd;
}

static int late_reads_open(int n_max, aio_context_t *out) {
    CHECK(!late_is_open && n_late == 0 && n_max <= LATE_MAX);
    late_is_open = true;
    n_late_max = n_max;
    late_state = test_seed;
    *out = 1;
    return 0;
}

static int late_reads_start(aio_context_t reads, int n, struct iocb **of) {
    CHECK(late_is_open && reads == 1 && n_late + n <= n_late_max);
    for (int i = 0; i < n; i++) {
        for (int32_t k = 0; k < n_late; k++)
            CHECK(of[i]->aio_buf + of[i]->aio_nbytes <= late_reads[k].aio_buf ||
                  late_reads[k].aio_buf + late_reads[k].aio_nbytes <= of[i]->aio_buf);
        memset((void *)(uintptr_t)of[i]->aio_buf, 0xee, of[i]->aio_nbytes);
        late_of[n_late] = of[i];
        late_reads[n_late++] = *of[i];
    }
    return n;
}

static int64_t late_read(int32_t i) {
    const struct iocb read = late_reads[i];
    late_of[i] = late_of[--n_late];
    late_reads[i] = late_reads[n_late];
    const ssize_t n =
        pread((int)read.aio_fildes, (void *)(uintptr_t)read.aio_buf, read.aio_nbytes, (off_t)read.aio_offset);
    return n < 0 ? -errno : n;
}

static int late_reads_wait(aio_context_t reads, int n, struct io_event *out) {
    CHECK(late_is_open && reads == 1 && n > 0 && n_late > 0);
    const int32_t i = (int32_t)(paged__rand(&late_state) % (uint64_t)n_late);
    out[0] = (struct io_event){.obj = (uintptr_t)late_of[i]};
    out[0].res = late_read(i);
    return 1;
}

static void late_reads_close(aio_context_t reads) {
    CHECK(late_is_open && reads == 1);
    while (n_late) late_read(n_late - 1);
    late_is_open = false;
}

/* Calls of which only these are other than the real ones. */
__attribute__((unused)) static paged__system_calls late_calls(void) {
    paged__system_calls calls = paged__system_real;
    calls.open = late_open;
    calls.reads_open = late_reads_open;
    calls.reads_start = late_reads_start;
    calls.reads_wait = late_reads_wait;
    calls.reads_close = late_reads_close;
    return calls;
}

#endif
