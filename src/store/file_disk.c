/* file_disk.c: the data files of a store as the disk has them, and copies of what was damaged. Nothing here
 * changes the index. */
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include "store/file.h"

enum { QUARANTINE_MAX = 16 /* files of damaged slots are kept */ };

void paged__file_store_count_quarantined(paged__file_store *s) {
    const int fd =
        paged__system()->open(s->dir_fd, "quarantine", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW, 0);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    s->n_quarantined = 0;
    if (!dir && fd >= 0) close(fd);
    if (!dir) return;
    for (struct dirent *e; (e = readdir(dir)) != NULL;) s->n_quarantined += e->d_name[0] != '.';
    closedir(dir);
}

void paged__file_store_quarantine(paged__file_store *s, const paged__entry *entry) {
    enum { PIECE = 1 << 20 };
    char name[64];
    if (s->n_quarantined >= QUARANTINE_MAX) return;
    uint8_t *piece = paged__alloc(PIECE, 1);
    if (!piece) return;
    snprintf(name, sizeof name, "quarantine/%" PRId64 "-%" PRId64 "-%" PRId64, s->shape_id, entry->slot,
             paged__system()->wall_s());
    paged__system()->mkdir(s->dir_fd, "quarantine", 0700);
    const int fd =
        paged__system()->open(s->dir_fd, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    const int64_t from = entry->slot * s->slots.slot_bytes;
    for (int64_t at = 0; fd >= 0 && at < s->slots.slot_bytes;) {
        const size_t n = (size_t)PAGED_MIN(s->slots.slot_bytes - at, (int64_t)PIECE);
        if (paged__read_all(s->slots.fd, &(struct iovec){piece, n}, 1, from + at) ||
            paged__write_all(fd, &(struct iovec){piece, n}, 1, at))
            break;
        at += (int64_t)n;
    }
    if (fd >= 0) {
        close(fd);
        s->n_quarantined++;
    }
    paged__free(piece);
}

static bool find_file(paged__file_store *s, const paged__shape_row *row, struct stat *info) {
    char name[32];
    paged__slots_name(row->id, name);
    return paged__system()->stat_at(s->dir_fd, name, info) == 0 && S_ISREG(info->st_mode);
}

int64_t paged__file_store_length(paged__file_store *s, const paged__shape_row *row) {
    struct stat info;
    return find_file(s, row, &info) ? (int64_t)info.st_size : -1;
}

int64_t paged__file_store_bytes(paged__file_store *s, const paged__shape_row *row) {
    struct stat info;
    if (!find_file(s, row, &info)) return -1;
    return PAGED_MIN((int64_t)info.st_size, (int64_t)info.st_blocks * 512); /* holes are not there */
}

static int open_data(paged__file_store *s, int64_t shape) {
    char name[32];
    paged__slots_name(shape, name);
    return paged__system()->open(s->dir_fd, name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0);
}

void paged__file_store_trim(paged__file_store *s, int64_t shape, int64_t size_bytes) {
    const int fd = open_data(s, shape);
    if (fd < 0) return;
    paged__system()->truncate(fd, (off_t)size_bytes);
    close(fd);
}

typedef struct hole_maker {
    int fd;
    int64_t slot_bytes, next; /* next: behind the last record */
} hole_maker;

static bool make_hole(void *user, const paged__entry *entry) {
    hole_maker *h = user;
    if (entry->slot > h->next)
        paged__system()->punch(h->fd, h->next * h->slot_bytes, (entry->slot - h->next) * h->slot_bytes);
    h->next = PAGED_MAX(h->next, entry->slot + 1);
    return true;
}

paged_status paged__file_store_punch(paged__file_store *s, const paged__shape_row *row, paged_error *err) {
    hole_maker h = {.fd = open_data(s, row->id), .slot_bytes = row->slot_bytes};
    if (h.fd < 0) return PAGED_OK;
    const paged_status status = paged__index_each(&s->index, row->id, make_hole, &h, err);
    if (!status) paged__system()->truncate(h.fd, (off_t)(h.next * h.slot_bytes));
    close(h.fd);
    return status;
}
