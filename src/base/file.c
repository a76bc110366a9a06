/* file.c: the seam to files. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"

static paged_status io_error(paged_error *err, const char *path, int error) {
    char reason[128];
    /* GNU's strerror_r: the returned string, which need not lie in the buffer, is the answer. */
    return paged__fail(err, PAGED_ERR_IO, "%s: %s", path, strerror_r(error, reason, sizeof reason));
}

paged_status paged__file_map_open(const char *path, paged__file_map *out, paged_error *err) {
    struct stat info;
    void *data;
    /* O_NONBLOCK: opening a pipe without a writer would wait for ever. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), error;
    if (fd < 0) return io_error(err, path, errno);
    if (fstat(fd, &info) != 0) goto fail;
    if (!S_ISREG(info.st_mode)) {
        close(fd);
        return paged__fail(err, PAGED_ERR_IO, "%s: not a regular file%s", path,
                           S_ISDIR(info.st_mode) ? " but a directory" : "");
    }
    if (info.st_size == 0) {
        close(fd);
        *out = (paged__file_map){.fd = -1};
        return PAGED_OK;
    }
    data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) goto fail;
    *out = (paged__file_map){data, (size_t)info.st_size, fd};
    return PAGED_OK;
fail:
    error = errno;
    close(fd);
    return io_error(err, path, error);
}

void paged__file_map_close(paged__file_map *map) {
    if (map->data) {
        /* munmap takes what mmap gave, which was not const. */
        munmap((void *)(uintptr_t)map->data, map->size_bytes);
        close(map->fd);
    }
    *map = (paged__file_map){.fd = -1};
}
