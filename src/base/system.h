/* base/system.h: the seam to files that are written, and to the clock on the wall: whoever keeps data calls
 * the system through paged__system(), so that tests can make the n-th call fail, and the time jump.
 */
#ifndef PAGED_BASE_SYSTEM_H
#define PAGED_BASE_SYSTEM_H

#include <linux/aio_abi.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "base/base.h"

/* As in POSIX: -1 and errno. Names are relative to the descriptor of their directory. */
typedef struct paged__system_calls {
    int (*open)(int dir, const char *name, int flags, mode_t mode);
    int (*mkdir)(int dir, const char *name, mode_t mode);
    ssize_t (*readv)(int fd, const struct iovec *parts, int n_parts, off_t offset);
    ssize_t (*writev)(int fd, const struct iovec *parts, int n_parts, off_t offset);
    int (*allocate)(int fd, off_t offset, off_t n_bytes); /* fallocate: the size follows */
    int (*punch)(int fd, off_t offset, off_t n_bytes);    /* fallocate: a hole there, the size stays */
    int (*start_sync)(int fd, off_t offset,
                      off_t n_bytes); /* a hint: begin to write these bytes to the disk */
    int (*sync_data)(int fd);         /* fdatasync */
    int (*sync)(int fd);              /* fsync, of directories */
    int (*truncate)(int fd, off_t size);
    int (*stat)(int fd, struct stat *out);
    int (*stat_at)(int dir, const char *name, struct stat *out); /* does not follow links */
    int (*stat_fs)(int fd, struct statvfs *out);
    int (*rename)(int dir, const char *from, const char *to);
    int (*unlink)(int dir, const char *name);
    int64_t (*wall_s)(void); /* seconds since 1970 */
    /* Reads that go on beside the caller, as in io_submit(2); of wait the count is of reads that are over. */
    int (*reads_open)(int n_max, aio_context_t *out);
    int (*reads_start)(aio_context_t reads, int n, struct iocb **of);
    int (*reads_wait)(aio_context_t reads, int n, struct io_event *out); /* for one of up to n */
    void (*reads_close)(aio_context_t reads);                            /* waits for what is under way */
} paged__system_calls;

const paged__system_calls *paged__system(void);
extern const paged__system_calls paged__system_real;

/* NULL: the real ones again. Not while another thread is inside the library. */
void paged__system_set(const paged__system_calls *calls);

/* All of the parts, over as many calls as it takes. They return 0 or an errno; of a file that ends too early
 * ENODATA. parts is used up. */
int paged__read_all(int fd, struct iovec *parts, int n_parts, int64_t offset);
int paged__write_all(int fd, struct iovec *parts, int n_parts, int64_t offset);

/* PAGED_ERR_IO, "what: reason". */
paged_status paged__io_fail(paged_error *err, const char *what, int error);

#endif
