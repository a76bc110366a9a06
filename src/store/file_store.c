/* file_store.c: the file store: when it is written, what goes for it, and what a crash has left.
 *
 * Everything between two commits is one transaction of the index; file.h says what follows from that. One
 * lock guards all but the counters, since notes come from other threads.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <unistd.h>

#include "store/file.h"

enum {
    BATCH_RECORDS = 512,    /* of a transaction */
    BATCH_BYTES = 64 << 20, /* of a transaction: what a crash may lose, and how long a sync takes */
    SYNC_AHEAD = 8 << 20,   /* the disk begins with so many at a time */
    GROW_BYTES = 64 << 20,  /* a data file becomes longer by */
    BATCH_TOUCHES = 1024,   /* a transaction of nothing but times of use waits for so many … */
    BATCH_TOUCH_S = 60,     /* … or so long */
    EVICT_SHARE = 64,       /* of the records go at once, up to PAGED__EVICT_MAX */
    EXPIRE_EVERY_S = 60
};
static const char index_name[] = "index.sqlite";

static int64_t now_s(void) {
    return paged__system()->wall_s();
}

/* ---- counters ---- */

static void count(paged__file_store *s, uint64_t *counter, int64_t n) {
    pthread_mutex_lock(&s->stats_lock);
    *counter += (uint64_t)n;
    pthread_mutex_unlock(&s->stats_lock);
}

static void is_up(paged__file_store *s, bool up) {
    pthread_mutex_lock(&s->stats_lock);
    s->stats.up = up;
    s->stats.n_failures += !up;
    pthread_mutex_unlock(&s->stats_lock);
}

static void show_bytes(paged__file_store *s) {
    const int64_t own = s->slots.fd >= 0 ? s->slots.n_slots * s->slots.slot_bytes : 0;
    pthread_mutex_lock(&s->stats_lock);
    s->stats.bytes = (uint64_t)(own + s->other_bytes);
    pthread_mutex_unlock(&s->stats_lock);
}

static void get_stats(void *self, paged_store_stats *out) {
    paged__file_store *s = self;
    pthread_mutex_lock(&s->stats_lock);
    *out = s->stats;
    pthread_mutex_unlock(&s->stats_lock);
}

/* ---- transactions ---- */

static void mark_used(void *user, int64_t slot) {
    paged__slots_mark(user, slot, PAGED__SLOT_USED);
}

/* Counts and slots as the index says, after a transaction was lost. */
static paged_status read_again(paged__file_store *s, paged_error *err) {
    int64_t n_records, used;
    paged_status status = paged__index_counts(&s->index, &n_records, &used, err);
    if (!status && s->slots.fd >= 0) {
        status = paged__slots_reset(&s->slots, s->slots.n_slots, err);
        if (!status) status = paged__index_slots(&s->index, s->shape_id, mark_used, &s->slots, err);
    }
    s->stale = status != PAGED_OK;
    s->nothing_goes = false;
    if (status) return status;
    s->used = PAGED_MAX(s->used, used);
    pthread_mutex_lock(&s->stats_lock);
    s->stats.n_records = (uint64_t)n_records;
    pthread_mutex_unlock(&s->stats_lock);
    show_bytes(s);
    return PAGED_OK;
}

static void nothing_open(paged__file_store *s) {
    s->slots.stage.n = 0;
    s->n_new = s->n_going = s->n_touched = 0;
    s->file_is_new = false;
}

/* What was written since the last commit is taken for lost, and is not in the index. */
static void lose_batch(paged__file_store *s) {
    paged__index_rollback(&s->index);
    /* Its shape's row went as well, if it was new; the file is empty as far as anybody knows. */
    if (s->file_is_new) {
        paged__slots_close(&s->slots);
        s->shape_id = 0;
    }
    nothing_open(s);
    s->n_lost++;
    s->stale = true;
    read_again(s, NULL);
}

/* A change that failed takes its transaction with it, whatever SQLite made of that. */
static paged_status after_change(paged__file_store *s, paged_status status) {
    if (status && status != PAGED_ERR_NOT_FOUND) lose_batch(s);
    return status;
}

static paged_status drain(paged__file_store *s, paged_error *err);

paged_status paged__file_store_commit(paged__file_store *s, paged_error *err) {
    paged_status status = PAGED_OK;
    if (!paged__index_is_open(&s->index)) return PAGED_OK;
    const paged_status drained = drain(s, err);
    if (drained == PAGED_ERR_IO) is_up(s, false);
    if (drained && !paged__index_is_open(&s->index)) return drained;
    if (s->n_new) {
        const int error = paged__system()->sync_data(s->slots.fd) ? errno : 0;
        if (error) status = paged__io_fail(err, s->dir, error);
    }
    if (!status && s->file_is_new) {
        const int error = paged__system()->sync(s->dir_fd) ? errno : 0;
        if (error) status = paged__io_fail(err, s->dir, error);
    }
    if (!status) status = paged__index_commit(&s->index, err);
    if (status) {
        lose_batch(s);
        is_up(s, false);
        return status;
    }
    if (s->n_new || s->n_going) paged__slots_settle(&s->slots);
    nothing_open(s);
    return drained; /* the others of the batch are kept */
}

paged_status paged__file_store_enter(paged__file_store *s, paged_error *err) {
    pthread_mutex_lock(&s->lock);
    return s->stale ? read_again(s, err) : PAGED_OK;
}

paged_status paged__file_store_leave(paged__file_store *s, paged_status status) {
    if (paged__index_is_lost(&s->index)) lose_batch(s);
    pthread_mutex_unlock(&s->lock);
    return status;
}

static bool is_expired(paged__file_store *s, const paged__entry *entry) {
    return s->config.ttl_s > 0 && entry->used_at < now_s() - s->config.ttl_s &&
           !paged__index_is_pinned(&s->index, s->shape_id, &entry->key);
}

static paged_status erase(paged__file_store *s, const paged__entry *entry, paged_error *err) {
    paged_status status = after_change(s, paged__index_erase(&s->index, s->shape_id, entry, err));
    if (status) return status;
    paged__slots_mark(&s->slots, entry->slot, PAGED__SLOT_GOING);
    s->n_going++;
    s->nothing_goes = false;
    count(s, &s->stats.n_records, -1);
    return PAGED_OK;
}

static paged_status write_fail(const paged__file_store *s, int error, paged_error *err) {
    paged__io_fail(err, s->dir, error);
    const paged_status status = error == ENOSPC || error == EDQUOT ? PAGED_ERR_LIMIT : PAGED_ERR_IO;
    if (err) err->status = status;
    return status;
}

/* Records that could not be written never were: they leave the index before anybody was told of them. */
static paged_status drain(paged__file_store *s, paged_error *err) {
    const int32_t n = s->slots.stage.n;
    const int error = n ? paged__slots_drain(&s->slots) : 0;
    for (int32_t i = 0; i < n && error; i++) {
        paged__entry lost;
        const paged_status found =
            paged__index_get(&s->index, s->shape_id, &s->slots.stage.of[i].key, &lost, NULL);
        if (found == PAGED_ERR_NOT_FOUND) continue;
        if (after_change(s, found) || erase(s, &lost, NULL)) break; /* the whole batch is lost */
        count(s, &s->stats.n_writes, -1);
    }
    return error ? write_fail(s, error, err) : PAGED_OK;
}

static void touch(paged__file_store *s, const paged__entry *entry) {
    if (s->config.read_only) return;
    if (s->n_touched == 0) s->touched_at = now_s();
    if (after_change(s, paged__index_touch(&s->index, s->shape_id, entry, ++s->used, now_s(), NULL))) return;
    if (++s->n_touched >= BATCH_TOUCHES) paged__file_store_commit(s, NULL);
}

/* ---- files ---- */

paged_status paged__file_store_drop(paged__file_store *s, int64_t shape, paged_error *err) {
    char name[32];
    paged_status status = after_change(s, paged__index_drop_shape(&s->index, shape, err));
    /* Out of the index first: a name without a file would be damage. */
    if (!status) status = paged__file_store_commit(s, err);
    if (status) return status;
    paged__slots_name(shape, name);
    paged__system()->unlink(s->dir_fd, name);
    return read_again(s, err);
}

/* Of another shape that has pins what is not pinned goes, and the room that its file had for it: what lies
 * behind its last record, and holes before that where the file system has such. */
static paged_status drop_unpinned(paged__file_store *s, const paged__shape_row *row, paged_error *err) {
    int64_t n_erased = 0;
    paged_status status = after_change(s, paged__index_erase_unpinned(&s->index, row->id, &n_erased, err));
    if (!status) status = paged__file_store_commit(s, err);
    if (!status) status = paged__file_store_punch(s, row, err);
    if (status) return status;
    count(s, &s->stats.n_evicted, n_erased);
    return read_again(s, err);
}

/* A shape goes, or what it can miss; *bytes become those that it has from then on. */
static paged_status make_less(paged__file_store *s, const paged__shape_row *row, int64_t *bytes,
                              paged_error *err) {
    if (row->has_pins) {
        const paged_status status = drop_unpinned(s, row, err);
        *bytes = PAGED_MAX(paged__file_store_bytes(s, row), 0);
        return status;
    }
    const paged_status status = paged__file_store_drop(s, row->id, err);
    if (status) return status;
    count(s, &s->stats.n_evicted, row->n_records);
    *bytes = 0;
    return PAGED_OK;
}

/* ---- create ---- */

/* Every data file has its row, and every row what it says; the rest goes. */
static paged_status tidy_shapes(paged__file_store *s, paged_error *err) {
    paged__shape_row *rows = NULL;
    int32_t n_rows = 0;
    paged_status status = paged__index_shapes(&s->index, &rows, &n_rows, err);
    for (int32_t i = 0; i < n_rows && !status; i++) {
        const int64_t bytes = paged__file_store_length(s, &rows[i]);
        const int64_t n_slots = bytes < 0 ? 0 : (bytes + rows[i].slot_bytes - 1) / rows[i].slot_bytes;
        int64_t n_cut = 0;
        if (rows[i].last_slot >= n_slots)
            status = paged__index_cut(&s->index, rows[i].id, n_slots, &n_cut, err);
        s->stats.n_damaged += (uint64_t)n_cut;
        /* One that has pins waits for its records. */
        if (!status && n_cut == rows[i].n_records && (!rows[i].has_pins || bytes < 0))
            status = paged__index_drop_shape(&s->index, rows[i].id, err);
    }
    paged__shape_rows_free(rows, n_rows);
    if (!status) status = paged__index_commit(&s->index, err);
    return status;
}

static bool is_shape(const paged__shape_row *rows, int32_t n_rows, int64_t id) {
    for (int32_t i = 0; i < n_rows; i++)
        if (rows[i].id == id) return true;
    return false;
}

/* Data files that no row names are what a crash has left, or an index that was set aside. */
static paged_status tidy_files(paged__file_store *s, paged_error *err) {
    paged__shape_row *rows = NULL;
    int32_t n_rows = 0;
    paged_status status = paged__index_shapes(&s->index, &rows, &n_rows, err);
    const int fd = status ? -1 : paged__system()->open(s->dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    if (!dir && !status) status = paged__io_fail(err, s->dir, errno);
    if (!dir && fd >= 0) close(fd);
    for (struct dirent *e; dir && (e = readdir(dir)) != NULL;) {
        char *rest = NULL;
        if (strncmp(e->d_name, "data-", 5) != 0) continue;
        const int64_t id = strtoll(e->d_name + 5, &rest, 10);
        if (*rest == 0 && !is_shape(rows, n_rows, id)) paged__system()->unlink(s->dir_fd, e->d_name);
    }
    if (dir) closedir(dir);
    for (int32_t i = 0; i < n_rows && !status; i++) {
        const int64_t kept = (rows[i].last_slot + 1) * rows[i].slot_bytes;
        if (paged__file_store_length(s, &rows[i]) > kept) paged__file_store_trim(s, rows[i].id, kept);
    }
    paged__shape_rows_free(rows, n_rows);
    return status;
}

/* What nobody used for long enough, of all shapes. */
static paged_status expire(paged__file_store *s, paged_error *err) {
    int64_t n_erased = 0;
    s->expired_at = now_s();
    paged_status status = after_change(s, paged__index_note_expire(&s->index, s->expired_at, err));
    if (!status && s->config.ttl_s > 0)
        status =
            after_change(s, paged__index_expire(&s->index, s->expired_at - s->config.ttl_s, &n_erased, err));
    if (!status) status = paged__file_store_commit(s, err);
    if (status || n_erased == 0) return status;
    count(s, &s->stats.n_evicted, n_erased);
    return read_again(s, err);
}

paged_status paged__file_store_tidy(paged__file_store *s, paged_error *err) {
    paged_status status = after_change(s, paged__index_set_back(&s->index, now_s(), err));
    if (!status) status = expire(s, err);
    if (!status) status = tidy_shapes(s, err);
    if (!status) status = tidy_files(s, err);
    return status;
}

/* An index that is damaged makes room for a new one; what it was is kept once. */
static paged_status set_aside(paged__file_store *s, paged_error *err) {
    const paged__system_calls *sys = paged__system();
    paged__log(PAGED_LOG_WARN, "%s is damaged (%s); it is kept as %s.damaged, and a new one begun",
               s->index_path, err->message, index_name);
    if (sys->rename(s->dir_fd, index_name, "index.sqlite.damaged") != 0)
        return paged__io_fail(err, s->index_path, errno);
    if (sys->unlink(s->dir_fd, "index.sqlite-wal") != 0 && errno != ENOENT)
        return paged__io_fail(err, s->index_path, errno);
    s->stats.n_damaged++;
    return paged__index_open(&s->index, s->index_path, false, err);
}

/* A file of the index that is a link or a pipe is none. */
static paged_status check_index_file(paged__file_store *s, paged_error *err) {
    static const char *const names[] = {"index.sqlite", "index.sqlite-wal", "index.sqlite-journal"};
    struct stat info;
    for (int i = 0; i < 3; i++) {
        if (paged__system()->stat_at(s->dir_fd, names[i], &info) != 0) {
            if (errno != ENOENT) return paged__io_fail(err, s->index_path, errno);
        } else if (!S_ISREG(info.st_mode)) {
            return paged__fail(err, PAGED_ERR_IO, "%s/%s: not a regular file", s->dir, names[i]);
        } else if (i == 1 && s->config.read_only && info.st_size > 0) {
            return paged__fail(err, PAGED_ERR_IO,
                               "%s/%s: a crash left changes; open the store for writing once", s->dir,
                               names[i]);
        }
    }
    return PAGED_OK;
}

static paged_status open_index(paged__file_store *s, paged_error *err) {
    paged_error local;
    paged_error *why = err ? err : &local;
    paged_status status = check_index_file(s, why);
    if (status) return status;
    if (!s->config.read_only) {
        /* Made here, since SQLite would let others of the machine read it. */
        const int fd =
            paged__system()->open(s->dir_fd, index_name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (fd < 0) return paged__io_fail(why, s->index_path, errno);
        close(fd);
    }
    status = paged__index_open(&s->index, s->index_path, s->config.read_only, why);
    if (status == PAGED_ERR_CORRUPT && !s->config.read_only) status = set_aside(s, why);
    return status;
}

/* The directory, and the lock on it. */
static paged_status open_dir(paged__file_store *s, paged_error *err) {
    if (!s->config.read_only && paged__system()->mkdir(AT_FDCWD, s->dir, 0700) != 0 && errno != EEXIST)
        return paged__io_fail(err, s->dir, errno);
    s->dir_fd = paged__system()->open(AT_FDCWD, s->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (s->dir_fd < 0) return paged__io_fail(err, s->dir, errno);
    if (flock(s->dir_fd, (s->config.read_only ? LOCK_SH : LOCK_EX) | LOCK_NB) == 0) return PAGED_OK;
    if (errno != EWOULDBLOCK) return paged__io_fail(err, s->dir, errno);
    return paged__fail(err, PAGED_ERR_LIMIT,
                       "%s is in use by another process: end that one, or give another directory", s->dir);
}

static void free_store(paged__file_store *s) {
    if (s->index.db) paged__index_close(&s->index);
    paged__slots_close(&s->slots);
    if (s->dir_fd >= 0) close(s->dir_fd);
    paged__shape_free(&s->shape);
    paged__free(s->front);
    paged__free(s->dir);
    paged__free(s->index_path);
    pthread_mutex_destroy(&s->lock);
    pthread_mutex_destroy(&s->stats_lock);
    paged__free(s);
}

static void close_one(void *self) {
    paged__file_store *s = self;
    pthread_mutex_lock(&s->lock);
    const bool is_last = --s->n_users == 0;
    if (!s->stale) paged__file_store_commit(s, NULL);
    if (is_last && !s->stale && !s->config.read_only) paged__index_merge(&s->index);
    /* What was allocated in advance goes back. */
    if (is_last && !s->stale && !s->config.read_only && s->slots.fd >= 0)
        paged__system()->truncate(s->slots.fd, paged__slots_used(&s->slots) * s->slots.slot_bytes);
    pthread_mutex_unlock(&s->lock);
    if (is_last) free_store(s);
}

/* ---- open ---- */

static paged_status use_shape(paged__file_store *s, const paged__shape_row *row, paged_error *err) {
    paged_status status =
        paged__slots_open(&s->slots, s->dir_fd, row->id, row->slot_bytes, s->config.read_only, false, err);
    if (status) return status;
    s->shape_id = row->id;
    status = paged__index_slots(&s->index, s->shape_id, mark_used, &s->slots, err);
    if (status) {
        paged__slots_close(&s->slots);
        s->shape_id = 0;
    }
    return status;
}

static bool same_shape(const paged_store_shape *a, const paged_store_shape *b) {
    return a->fingerprint_bytes == b->fingerprint_bytes &&
           memcmp(a->fingerprint, b->fingerprint, a->fingerprint_bytes) == 0 &&
           a->block_size == b->block_size && a->n_groups == b->n_groups &&
           memcmp(a->block_bytes, b->block_bytes, sizeof a->block_bytes) == 0;
}

static int64_t slot_bytes_of(const paged__shape *shape) {
    const size_t bytes = shape->front_bytes + paged__record_payload(shape, UINT32_MAX);
    return (int64_t)((bytes + PAGED__SLOT_ALIGN - 1) / PAGED__SLOT_ALIGN * PAGED__SLOT_ALIGN);
}

/* Of the own file what lies behind the limit goes, up to the last record that is pinned. */
static paged_status shrink_own(paged__file_store *s, int64_t max, paged_error *err) {
    int64_t n_cut = 0, last_pinned = -1;
    paged_status status = paged__index_last_pinned(&s->index, s->shape_id, &last_pinned, err);
    const int64_t n_slots = PAGED_MAX(max / s->slots.slot_bytes, last_pinned + 1);
    if (status || n_slots >= s->slots.n_slots) return status;
    status = after_change(s, paged__index_cut(&s->index, s->shape_id, n_slots, &n_cut, err));
    if (!status) status = paged__file_store_commit(s, err);
    if (!status && paged__system()->truncate(s->slots.fd, n_slots * s->slots.slot_bytes) != 0)
        status = paged__io_fail(err, s->dir, errno);
    if (status) return status;
    count(s, &s->stats.n_evicted, n_cut);
    s->slots.n_slots = n_slots;
    return PAGED_OK;
}

/* A limit that became smaller: shapes that were not used for longest go, and of the own one what lies behind
 * what pinned records of others leave of the limit. */
static paged_status shrink(paged__file_store *s, paged_error *err) {
    paged__shape_row *rows = NULL;
    int32_t n_rows = 0;
    paged_status status = paged__index_shapes(&s->index, &rows, &n_rows, err);
    const int64_t max = (int64_t)s->config.max_bytes;
    const int64_t own = s->slots.fd >= 0 ? s->slots.n_slots * s->slots.slot_bytes : 0;
    int64_t others = 0;
    for (int32_t i = 0; i < n_rows; i++)
        if (rows[i].id != s->shape_id) others += PAGED_MAX(paged__file_store_bytes(s, &rows[i]), 0);
    for (int32_t i = 0; i < n_rows && !status && own + others > max; i++) {
        if (rows[i].id == s->shape_id) continue;
        int64_t bytes = PAGED_MAX(paged__file_store_bytes(s, &rows[i]), 0);
        others -= bytes;
        status = make_less(s, &rows[i], &bytes, err);
        others += bytes;
    }
    paged__shape_rows_free(rows, n_rows);
    s->other_bytes = others;
    if (!status && own + others > max && own > 0) status = shrink_own(s, PAGED_MAX(max - others, 0), err);
    return status ? status : read_again(s, err);
}

static paged_status open_locked(paged__file_store *s, const paged_store_shape *shape, paged_error *err) {
    if (s->front) return paged__fail(err, PAGED_ERR_INVALID_ARG, "the store is open");
    paged__shape_row *rows = NULL;
    int32_t n_rows = 0;
    paged_status status = paged__shape_copy(&s->shape, shape, err);
    if (!status && !(s->front = paged__alloc(s->shape.front_bytes, 1)))
        status = paged__fail(err, PAGED_ERR_NO_MEMORY, "%zu bytes", s->shape.front_bytes);
    if (!status) status = paged__index_shapes(&s->index, &rows, &n_rows, err);
    for (int32_t i = 0; i < n_rows && !status; i++)
        if (same_shape(&rows[i].shape.is, &s->shape.is) && rows[i].slot_bytes == slot_bytes_of(&s->shape))
            status = use_shape(s, &rows[i], err);
    paged__shape_rows_free(rows, n_rows);
    if (!status && !s->config.read_only) status = shrink(s, err);
    if (!status) status = read_again(s, err);
    if (status) {
        paged__slots_close(&s->slots);
        paged__shape_free(&s->shape);
        paged__free(s->front);
        s->front = NULL;
        s->shape_id = 0;
    }
    return status;
}

paged_status paged__file_store_use(paged__file_store *s, const paged_store_shape *shape, paged_error *err) {
    const paged_status status = paged__file_store_commit(s, err);
    if (status) return status;
    if (s->front) {
        paged__slots_close(&s->slots);
        paged__shape_free(&s->shape);
        paged__free(s->front);
        s->front = NULL;
        s->shape_id = 0;
    }
    return open_locked(s, shape, err);
}

static paged_status open_store(void *self, const paged_store_shape *shape, paged_error *err) {
    paged__file_store *s = self;
    const paged_status status = paged__file_store_enter(s, err);
    return paged__file_store_leave(s, status ? status : open_locked(s, shape, err));
}

/* ---- find, read, tail ---- */

static paged_status look_up(paged__file_store *s, const paged_key *key, paged__entry *entry) {
    if (!s->shape_id) return PAGED_ERR_NOT_FOUND;
    const paged_status status = paged__index_get(&s->index, s->shape_id, key, entry, NULL);
    if (status && status != PAGED_ERR_NOT_FOUND) is_up(s, false);
    return status || is_expired(s, entry) ? PAGED_ERR_NOT_FOUND : PAGED_OK;
}

static int32_t find(void *self, const paged_key *keys, int32_t n) {
    paged__file_store *s = self;
    paged__entry entry;
    int32_t found = 0;
    if (paged__file_store_enter(s, NULL) == PAGED_OK)
        while (found < n && look_up(s, &keys[found], &entry) == PAGED_OK) found++;
    paged__file_store_leave(s, PAGED_OK);
    return found;
}

/* Where a record is that will be read. */
static int64_t slot_of(void *user, const paged_key *key) {
    paged__file_store *s = user;
    paged__entry entry;
    if (look_up(s, key, &entry)) return -1;
    return paged__slots_is_staged(&s->slots, entry.slot) && drain(s, NULL) ? -1 : entry.slot;
}

static void expect(void *self, const paged_key *keys, int32_t n) {
    paged__file_store *s = self;
    if (paged__file_store_enter(s, NULL) == PAGED_OK) {
        paged__slots_expect(&s->slots, keys, n);
        paged__slots_read_ahead(&s->slots, slot_of, s);
    }
    paged__file_store_leave(s, PAGED_OK);
}

/* A record that was read ahead. False: it was not, or is not what it should be; the file knows better. */
static bool take_ahead(paged__file_store *s, const paged__entry *entry, paged_record *record,
                       uint32_t wanted) {
    if (!paged__slots_is_ahead(&s->slots, entry->slot)) return false;
    paged__slots_read_ahead(&s->slots, slot_of, s);
    const uint8_t *front = paged__slots_ahead(&s->slots, entry->slot);
    paged_record found = *record;
    if (!front || !paged__record_open(&s->shape, front, &found) || found.groups != entry->groups)
        return false;
    const uint8_t *bytes = front + s->shape.front_bytes;
    for (int32_t g = 0; g < s->shape.is.n_groups; g++) {
        if (!(entry->groups >> g & 1)) continue;
        if (wanted >> g & 1) {
            if (!paged__record_group_right(&s->shape, front, g, bytes)) return false;
            memcpy(record->bytes[g], bytes, s->shape.is.block_bytes[g]);
        }
        bytes += s->shape.is.block_bytes[g];
    }
    *record = found;
    return true;
}

/* Reads front and wanted groups. Returns 0, an errno, or EBADMSG for what is not what it should be. */
static int read_slot(paged__file_store *s, const paged__entry *entry, paged_record *record, uint32_t wanted) {
    struct iovec parts[PAGED__RECORD_PARTS];
    paged_record found = *record;
    int64_t at = entry->slot * s->slots.slot_bytes;
    int error = 0;
    if (take_ahead(s, entry, record, wanted)) return 0;
    if ((wanted & entry->groups) == entry->groups) {
        const int n_parts = paged__record_parts(&s->shape, record, entry->groups, s->front, parts);
        error = paged__read_all(s->slots.fd, parts, n_parts, at);
    } else {
        parts[0] = (struct iovec){s->front, s->shape.front_bytes};
        error = paged__read_all(s->slots.fd, parts, 1, at);
        at += (int64_t)s->shape.front_bytes;
        for (int32_t g = 0; g < s->shape.is.n_groups && !error; g++) {
            if (!(entry->groups >> g & 1)) continue;
            parts[0] = (struct iovec){record->bytes[g], s->shape.is.block_bytes[g]};
            if (wanted >> g & 1) error = paged__read_all(s->slots.fd, parts, 1, at);
            at += (int64_t)s->shape.is.block_bytes[g];
        }
    }
    if (error) return error;
    if (!paged__record_open(&s->shape, s->front, &found) || found.groups != entry->groups) return EBADMSG;
    for (int32_t g = 0; g < s->shape.is.n_groups; g++)
        if ((found.groups & wanted) >> g & 1 &&
            !paged__record_group_right(&s->shape, s->front, g, record->bytes[g]))
            return EBADMSG;
    *record = found;
    return 0;
}

paged_status paged__file_store_read(paged__file_store *s, paged_record *record, uint32_t wanted,
                                    bool is_use) {
    paged__entry entry;
    if (look_up(s, &record->key, &entry)) return PAGED_ERR_NOT_FOUND;
    /* A row that says what no record can be: as damaged as a slot. */
    const bool possible = entry.groups && entry.groups >> s->shape.is.n_groups == 0 && entry.slot >= 0 &&
                          entry.slot < s->slots.n_slots;
    if (paged__slots_is_staged(&s->slots, entry.slot) && drain(s, NULL)) {
        is_up(s, false);
        return PAGED_ERR_NOT_FOUND;
    }
    const uint32_t n_lost = s->n_lost;
    const int error = possible ? read_slot(s, &entry, record, wanted) : EBADMSG;
    /* What was to be read ahead had to be written first, and that took the transaction with it: nothing is
     * known of the entry any more. */
    if (error && s->n_lost != n_lost) return PAGED_ERR_NOT_FOUND;
    if (error == 0) {
        if (is_use) touch(s, &entry);
        count(s, &s->stats.n_hits, 1);
        count(s, &s->stats.read_bytes,
              (int64_t)(s->shape.front_bytes + paged__record_payload(&s->shape, record->groups & wanted)));
        is_up(s, true);
        return PAGED_OK;
    }
    if (error == EBADMSG || error == ENODATA)
        count(s, &s->stats.n_damaged, 1);
    else
        is_up(s, false);
    if (!s->config.read_only) {
        if (error == EBADMSG && possible) paged__file_store_quarantine(s, &entry);
        /* What cannot be read is not asked for again, whatever the reason. */
        erase(s, &entry, NULL);
    }
    return PAGED_ERR_NOT_FOUND;
}

static paged_status read_record(void *self, paged_record *record, uint32_t wanted) {
    paged__file_store *s = self;
    paged_status status = paged__file_store_enter(s, NULL);
    count(s, &s->stats.n_reads, 1);
    status = status ? PAGED_ERR_NOT_FOUND : paged__file_store_read(s, record, wanted, true);
    return paged__file_store_leave(s, status);
}

static paged_status tail(void *self, const paged_key *parent, const int32_t *tokens, int32_t n_tokens,
                         paged_key *key, int32_t *n_common) {
    paged__file_store *s = self;
    paged__entry entry;
    int32_t n = 0;
    paged_status status = paged__file_store_enter(s, NULL);
    if (!status && (!s->shape_id || n_tokens < 1)) status = PAGED_ERR_NOT_FOUND;
    if (!status) {
        n_tokens = PAGED_MIN(n_tokens, s->shape.is.block_size);
        status = paged__index_tail(&s->index, s->shape_id, parent, tokens, n_tokens, &entry, &n, NULL);
        if (status && status != PAGED_ERR_NOT_FOUND) is_up(s, false);
    }
    if (!status && is_expired(s, &entry)) status = PAGED_ERR_NOT_FOUND;
    if (!status) {
        *key = entry.key;
        *n_common = n;
    }
    return paged__file_store_leave(s, status ? PAGED_ERR_NOT_FOUND : PAGED_OK);
}

/* ---- write ---- */

/* How many slots longer the data file may become: it doubles, up to a step of so many bytes. */
static int64_t may_grow(paged__file_store *s, int64_t *free_bytes) {
    struct statvfs fs;
    const int64_t slot = s->slots.slot_bytes, bytes = s->slots.n_slots * slot + s->other_bytes;
    *free_bytes = -1;
    if (paged__system()->stat_fs(s->dir_fd, &fs) != 0) return 0;
    *free_bytes = (int64_t)(fs.f_bavail * fs.f_frsize);
    const int64_t room =
        PAGED_MIN((int64_t)s->config.max_bytes - bytes, *free_bytes - (int64_t)s->config.keep_free_bytes);
    const int64_t step = PAGED_MAX(PAGED_MIN(s->slots.n_slots, GROW_BYTES / slot), 1);
    return PAGED_MAX(PAGED_MIN(step, room / slot), 0);
}

/* Of other shapes the one that was not used for longest, if that is longer than for the oldest own record. */
static paged_status evict_shape(paged__file_store *s, bool *went, paged_error *err) {
    paged__shape_row *rows = NULL;
    int32_t n_rows = 0;
    int64_t own = INT64_MAX;
    *went = false;
    if (s->other_bytes == 0) return PAGED_OK; /* to look at all rows of a full store takes milliseconds */
    paged_status status = paged__index_shapes(&s->index, &rows, &n_rows, err);
    if (!status) status = after_change(s, paged__index_oldest_use(&s->index, s->shape_id, &own, err));
    if (status == PAGED_ERR_NOT_FOUND) status = PAGED_OK;
    for (int32_t i = 0; i < n_rows && !status && !*went; i++) {
        const bool may_go = !rows[i].has_pins || rows[i].n_records > rows[i].n_pinned;
        if (rows[i].id == s->shape_id || !may_go || rows[i].last_used > own) continue;
        const int64_t bytes = PAGED_MAX(paged__file_store_bytes(s, &rows[i]), 0);
        int64_t left = bytes;
        status = make_less(s, &rows[i], &left, err);
        if (status) break;
        *went = true; /* it will not be seen again, though a file system without holes has got nothing back */
        s->other_bytes = PAGED_MAX(s->other_bytes - bytes + left, 0);
    }
    paged__shape_rows_free(rows, n_rows);
    return status;
}

static paged_status evict_records(paged__file_store *s, paged_error *err) {
    int64_t slots[PAGED__EVICT_MAX];
    int32_t n_evicted = 0;
    const int64_t n_used = s->slots.n_slots - s->slots.n_free;
    const int32_t n = (int32_t)PAGED_MIN(PAGED_MAX(n_used / EVICT_SHARE, 1), PAGED__EVICT_MAX);
    const paged_status status =
        after_change(s, paged__index_evict(&s->index, s->shape_id, slots, n, &n_evicted, err));
    if (status) return status;
    for (int32_t i = 0; i < n_evicted; i++) paged__slots_mark(&s->slots, slots[i], PAGED__SLOT_GOING);
    s->n_going += n_evicted;
    count(s, &s->stats.n_evicted, n_evicted);
    count(s, &s->stats.n_records, -n_evicted);
    return PAGED_OK;
}

static paged_status no_room(const paged__file_store *s, int64_t free_bytes, paged_error *err) {
    return paged__fail(err, PAGED_ERR_LIMIT,
                       "%s: no room for %" PRId64 " bytes: limit %" PRIu64 ", free on the disk %" PRId64
                       " of which %" PRIu64 " are kept free",
                       s->dir, s->slots.slot_bytes, s->config.max_bytes, free_bytes,
                       s->config.keep_free_bytes);
}

/* A free slot: one that is there, one more, or one whose record goes for it. */
static paged_status make_room(paged__file_store *s, int64_t *slot, paged_error *err) {
    int64_t free_bytes;
    bool went = false;
    paged_status status;
    while ((*slot = paged__slots_find_free(&s->slots)) < 0) {
        const int64_t n = may_grow(s, &free_bytes);
        if (n && paged__slots_grow(&s->slots, n, NULL) == PAGED_OK) {
            show_bytes(s);
            continue;
        }
        if (s->nothing_goes) return no_room(s, free_bytes, err);
        /* What goes has to be gone for good before its place is written. */
        status = paged__file_store_commit(s, err);
        if (!status && s->slots.n_free == 0) status = evict_shape(s, &went, err);
        if (!status && s->slots.n_free == 0 && !went) {
            status = evict_records(s, err);
            if (!status) status = paged__file_store_commit(s, err);
            if (!status && s->slots.n_free == 0) {
                s->nothing_goes = true;
                status = no_room(s, free_bytes, err);
            }
        }
        if (status) return status;
    }
    return PAGED_OK;
}

/* The first record of a shape brings its row and its file. */
static paged_status begin_shape(paged__file_store *s, paged_error *err) {
    int64_t id = 0;
    const int64_t slot_bytes = slot_bytes_of(&s->shape);
    if (s->shape_id) return PAGED_OK;
    paged_status status = after_change(s, paged__index_add_shape(&s->index, &s->shape, slot_bytes, &id, err));
    if (status) return status;
    /* What it holds, if it is there, is of a shape that did not come to be. */
    status = paged__slots_open(&s->slots, s->dir_fd, id, slot_bytes, false, true, err);
    s->file_is_new = true;
    if (status) {
        lose_batch(s);
        return status;
    }
    s->shape_id = id;
    return PAGED_OK;
}

static paged_status write_slot(paged__file_store *s, const paged_record *record, int64_t slot,
                               paged_error *err) {
    struct iovec parts[PAGED__RECORD_PARTS];
    paged__record_seal(&s->shape, record, s->front);
    const int n_parts = paged__record_parts(&s->shape, record, record->groups, s->front, parts);
    const int error = paged__write_all(s->slots.fd, parts, n_parts, slot * s->slots.slot_bytes);
    /* The disk has begun by the time of the sync. Whether it did well is for the sync to say. */
    const int64_t slot_bytes = s->slots.slot_bytes, n_bytes = s->n_new * slot_bytes;
    if (!error && n_bytes / SYNC_AHEAD != (n_bytes + slot_bytes) / SYNC_AHEAD)
        paged__system()->start_sync(s->slots.fd, 0, 0);
    return error ? write_fail(s, error, err) : PAGED_OK;
}

/* False: there is no stage. */
static bool stage_slot(paged__file_store *s, const paged_record *record, int64_t slot) {
    uint8_t *to = paged__slots_stage(&s->slots, slot, &record->key);
    if (!to) return false;
    const size_t n = paged__record_pack(&s->shape, record, to);
    memset(to + n, 0, (size_t)s->slots.slot_bytes - n);
    return true;
}

static paged_status write_locked(paged__file_store *s, const paged_record *record, paged_error *err) {
    paged__entry entry;
    int64_t slot;
    if (!s->front) return paged__fail(err, PAGED_ERR_INVALID_ARG, "the store was not opened");
    if (s->config.read_only) return paged__fail(err, PAGED_ERR_LIMIT, "%s is open for reading only", s->dir);
    if (!paged__record_possible(&s->shape, record))
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "record of %d tokens from %d on, groups %x",
                           record->n_tokens, record->first, record->groups);
    paged_status status = s->shape_id ? paged__index_get(&s->index, s->shape_id, &record->key, &entry, err)
                                      : PAGED_ERR_NOT_FOUND;
    /* More groups than were there are a reason to write it again. */
    const bool is_more = !status && record->groups != entry.groups && (entry.groups & ~record->groups) == 0;
    if (status == PAGED_OK && !is_more) {
        touch(s, &entry);
        return PAGED_OK;
    }
    if (status == PAGED_OK && paged__slots_is_staged(&s->slots, entry.slot)) status = drain(s, err);
    if (status == PAGED_OK) status = erase(s, &entry, err);
    if (status && status != PAGED_ERR_NOT_FOUND) return status;
    status = begin_shape(s, err);
    if (!status && s->slots.stage.n && s->slots.stage.n == s->slots.stage.n_max) status = drain(s, err);
    if (!status) status = make_room(s, &slot, err);
    if (!status && !stage_slot(s, record, slot)) status = write_slot(s, record, slot, err);
    if (status) return status;
    entry = (paged__entry){.key = record->key,
                           .parent = record->parent,
                           .slot = slot,
                           .used_at = now_s(),
                           .first = record->first,
                           .n_tokens = record->n_tokens,
                           .groups = record->groups};
    const int32_t *tail_tokens = record->n_tokens < s->shape.is.block_size ? record->tokens : NULL;
    status = after_change(s, paged__index_put(&s->index, s->shape_id, &entry, ++s->used, tail_tokens, err));
    if (status) return status;
    paged__slots_mark(&s->slots, slot, PAGED__SLOT_NEW);
    s->n_new++;
    s->nothing_goes = false; /* it may, the next time */
    count(s, &s->stats.n_records, 1);
    count(s, &s->stats.n_writes, 1);
    count(s, &s->stats.written_bytes,
          (int64_t)(s->shape.front_bytes + paged__record_payload(&s->shape, record->groups)));
    if (s->n_new >= BATCH_RECORDS || s->n_new * s->slots.slot_bytes >= BATCH_BYTES)
        return paged__file_store_commit(s, err);
    return PAGED_OK;
}

static paged_status write_record(void *self, const paged_record *record, paged_error *err) {
    paged__file_store *s = self;
    paged_status status = paged__file_store_enter(s, err);
    if (!status) status = write_locked(s, record, err);
    if (status == PAGED_OK || status == PAGED_ERR_IO) is_up(s, status == PAGED_OK);
    return paged__file_store_leave(s, status);
}

static paged_status flush(void *self, paged_error *err) {
    paged__file_store *s = self;
    paged_status status = paged__file_store_enter(s, err);
    /* Times of use alone are worth no sync of their own. */
    if (!status && (s->n_new || s->n_going || (s->n_touched && now_s() - s->touched_at >= BATCH_TOUCH_S)))
        status = paged__file_store_commit(s, err);
    if (!status && !s->config.read_only && now_s() - s->expired_at >= EXPIRE_EVERY_S) status = expire(s, err);
    return paged__file_store_leave(s, status);
}

/* ---- pins ---- */

static paged_status pin(void *self, const char *name, const paged_key *keys, int32_t n, paged_error *err) {
    paged__file_store *s = self;
    paged_status status = paged__note_check(name, 0, err);
    if (status) return status;
    if (s->config.read_only) return paged__fail(err, PAGED_ERR_LIMIT, "%s is open for reading only", s->dir);
    status = paged__file_store_enter(s, err);
    if (!status && !s->front) status = paged__fail(err, PAGED_ERR_INVALID_ARG, "the store was not opened");
    bool differs = false;
    if (!status) status = paged__index_pin(&s->index, s->shape_id, name, keys, n, &differs, err);
    if (status || !differs) return paged__file_store_leave(s, status);
    /* A transaction of its own, as a note is. */
    paged__file_store_commit(s, NULL);
    s->nothing_goes = false;
    if (n) status = begin_shape(s, err);
    if (!status) status = after_change(s, paged__index_pin(&s->index, s->shape_id, name, keys, n, NULL, err));
    if (!status) status = paged__file_store_commit(s, err);
    return paged__file_store_leave(s, status);
}

static paged_status pins(void *self, bool (*fn)(void *user, const char *name), void *user, paged_error *err) {
    paged__file_store *s = self;
    paged_status status = paged__file_store_enter(s, err);
    if (!status) status = paged__index_pins_each(&s->index, fn, user, err);
    return paged__file_store_leave(s, status);
}

/* ---- create ---- */

static char *join(const char *dir, const char *name) {
    const size_t n = strlen(dir) + strlen(name) + 2;
    char *path = paged__alloc(n, 1);
    if (path && name[0]) snprintf(path, n, "%s/%s", dir, name);
    if (path && !name[0]) snprintf(path, n, "%s", dir);
    return path;
}

static paged_status start(paged__file_store *s, paged_error *err) {
    paged_status status = s->dir && s->index_path ? open_dir(s, err)
                                                  : paged__fail(err, PAGED_ERR_NO_MEMORY, "path of %zu bytes",
                                                                strlen(s->config.dir));
    if (!status) status = open_index(s, err);
    if (!status && !s->config.read_only) status = paged__file_store_tidy(s, err);
    if (!status) status = read_again(s, err);
    if (!status) paged__file_store_count_quarantined(s);
    return status;
}

paged_status paged_file_store_create(const paged_file_store_config *config, paged_store *out,
                                     paged_notes *notes, paged_error *err) {
    if (!config || config->struct_size < sizeof *config || !config->dir || !config->dir[0] || !out)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "no directory, or no store to fill");
    if (config->ttl_s < 0)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "time to live of %d s", config->ttl_s);
    paged__file_store *s = paged__calloc(1, sizeof *s);
    if (!s) return paged__fail(err, PAGED_ERR_NO_MEMORY, "%zu bytes", sizeof *s);
    s->config = *config;
    s->dir_fd = s->slots.fd = s->slots.direct = -1;
    if (!s->config.max_bytes) s->config.max_bytes = (uint64_t)10 << 30;
    if (!s->config.keep_free_bytes) s->config.keep_free_bytes = (uint64_t)1 << 30;
    s->config.max_bytes = PAGED_MIN(s->config.max_bytes, (uint64_t)INT64_MAX / 2);
    s->config.keep_free_bytes = PAGED_MIN(s->config.keep_free_bytes, (uint64_t)INT64_MAX / 2);
    s->stats.max_bytes = s->config.max_bytes;
    s->stats.up = true;
    s->n_users = notes ? 2 : 1;
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_init(&s->stats_lock, NULL);
    s->dir = join(config->dir, "");
    s->index_path = join(config->dir, index_name);
    const paged_status status = start(s, err);
    if (status) {
        free_store(s);
        return status;
    }
    *out = (paged_store){.self = s,
                         .name = "file",
                         .open = open_store,
                         .find = find,
                         .expect = expect,
                         .read = read_record,
                         .tail = tail,
                         .write = write_record,
                         .pin = pin,
                         .flush = flush,
                         .get_stats = get_stats,
                         .close = close_one,
                         .pins = pins};
    if (notes) *notes = paged__file_notes(s, close_one);
    return PAGED_OK;
}
