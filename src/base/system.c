/* system.c: the seam to files that are written, and to the clock on the wall. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/system.h"

static int real_open(int dir, const char *name, int flags, mode_t mode) {
    return openat(dir, name, flags, mode);
}

static int real_stat_at(int dir, const char *name, struct stat *out) {
    return fstatat(dir, name, out, AT_SYMLINK_NOFOLLOW);
}

static int real_allocate(int fd, off_t offset, off_t n_bytes) {
    return fallocate(fd, 0, offset, n_bytes);
}

static int real_punch(int fd, off_t offset, off_t n_bytes) {
    return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, n_bytes);
}

static int real_start_sync(int fd, off_t offset, off_t n_bytes) {
    return sync_file_range(fd, offset, n_bytes, SYNC_FILE_RANGE_WRITE);
}

static int real_rename(int dir, const char *from, const char *to) {
    return renameat(dir, from, dir, to);
}

static int real_unlink(int dir, const char *name) {
    return unlinkat(dir, name, 0);
}

static int64_t real_wall_s(void) {
    return (int64_t)time(NULL);
}

/* libc has no words for these. */
static int real_reads_open(int n_max, aio_context_t *out) {
    *out = 0;
    return (int)syscall(SYS_io_setup, n_max, out);
}

static int real_reads_start(aio_context_t reads, int n, struct iocb **of) {
    return (int)syscall(SYS_io_submit, reads, (long)n, of);
}

static int real_reads_wait(aio_context_t reads, int n, struct io_event *out) {
    return (int)syscall(SYS_io_getevents, reads, 1L, (long)n, out, NULL);
}

static void real_reads_close(aio_context_t reads) {
    syscall(SYS_io_destroy, reads);
}

const paged__system_calls paged__system_real = {.open = real_open,
                                                .mkdir = mkdirat,
                                                .readv = preadv,
                                                .writev = pwritev,
                                                .allocate = real_allocate,
                                                .punch = real_punch,
                                                .start_sync = real_start_sync,
                                                .sync_data = fdatasync,
                                                .sync = fsync,
                                                .truncate = ftruncate,
                                                .stat = fstat,
                                                .stat_at = real_stat_at,
                                                .stat_fs = fstatvfs,
                                                .rename = real_rename,
                                                .unlink = real_unlink,
                                                .wall_s = real_wall_s,
                                                .reads_open = real_reads_open,
                                                .reads_start = real_reads_start,
                                                .reads_wait = real_reads_wait,
                                                .reads_close = real_reads_close};
static const paged__system_calls *current = &paged__system_real;

const paged__system_calls *paged__system(void) {
    return current;
}

void paged__system_set(const paged__system_calls *calls) {
    current = calls ? calls : &paged__system_real;
}

typedef ssize_t transfer_fn(int fd, const struct iovec *parts, int n_parts, off_t offset);

static int transfer_all(transfer_fn *transfer, int fd, struct iovec *parts, int n_parts, int64_t offset) {
    while (n_parts > 0) {
        if (parts->iov_len == 0) {
            parts++, n_parts--;
            continue;
        }
        ssize_t n = transfer(fd, parts, n_parts, (off_t)offset);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return errno;
        if (n == 0) return ENODATA;
        offset += n;
        for (size_t left = (size_t)n; left > 0;) {
            const size_t taken = PAGED_MIN(left, parts->iov_len);
            parts->iov_base = (char *)parts->iov_base + taken;
            parts->iov_len -= taken;
            left -= taken;
            if (parts->iov_len == 0 && left > 0) parts++, n_parts--;
        }
    }
    return 0;
}

int paged__read_all(int fd, struct iovec *parts, int n_parts, int64_t offset) {
    return transfer_all(current->readv, fd, parts, n_parts, offset);
}

int paged__write_all(int fd, struct iovec *parts, int n_parts, int64_t offset) {
    return transfer_all(current->writev, fd, parts, n_parts, offset);
}

paged_status paged__io_fail(paged_error *err, const char *what, int error) {
    char reason[128];
    /* GNU's strerror_r: the returned string, which need not lie in the buffer, is the answer. */
    return paged__fail(err, PAGED_ERR_IO, "%s: %s", what, strerror_r(error, reason, sizeof reason));
}
