/* test_file_store.c: whatever call to the system fails, and wherever the power goes, the file store is
 * consistent and never answers wrong.
 *
 * Method: one scenario (open, write beyond the limit, read, notes, close) over a seam in which the n-th
 * call fails, for n = 1, 2, … until none fires, once for each way to fail; SQLite's calls go through a
 * file system of ours that counts along. After each the directory is opened without faults: everything
 * found is right, nothing is damaged, and sizes are bounded. At every moment at which the index becomes
 * durable or a slot is written, what a loss of power would leave is opened beside it and read in full.
 * Then files are damaged in every way.
 */
#include <errno.h>
#include <fcntl.h>
#include <sqlite3.h>

#include "base/system.h"
#include "file_world.h"
#include "late_reads.h"
#include "store/file.h"

enum { N_SLOTS = 12, N_RECORDS = 30, ALL_BOUND = N_SLOTS * WORLD_SLOT + (512 << 10) };

/* ---- the seam: the n-th call fails ---- */

enum fault_kind { NO_FAULT, FAIL_EIO, FAIL_ENOSPC, FAIL_EINVAL, FAIL_EINTR, FAIL_SHORT, FAIL_FOR_EVER };
static enum fault_kind fault_kind;
static int64_t n_calls, fault_at;
static bool is_spied;          /* look at what a loss of power would leave */
static void power_cut(void);   /* … at this moment */
static void data_synced(void); /* the data file as it is now is durable */

static bool fires(void) {
    n_calls++;
    if (fault_kind == NO_FAULT) return false;
    return fault_kind == FAIL_FOR_EVER ? n_calls >= fault_at : n_calls == fault_at;
}

static int failing(int result) {
    errno = fault_kind == FAIL_ENOSPC ? ENOSPC : fault_kind == FAIL_EINVAL ? EINVAL : EIO;
    return result;
}

/* What becomes of writes past the system's memory: they are, cannot be opened, or want another alignment. */
enum direct { IS_DIRECT, REFUSES_DIRECT, DIRECT_MISFITS, N_DIRECT };
static enum direct direct;

static int f_open(int dir, const char *name, int flags, mode_t mode) {
    if (fires()) return failing(-1);
    if (!(flags & O_DIRECT) || direct != REFUSES_DIRECT) return late_open(dir, name, flags, mode);
    errno = EINVAL;
    return -1;
}
static int f_mkdir(int dir, const char *name, mode_t mode) {
    return fires() ? failing(-1) : mkdirat(dir, name, mode);
}

typedef ssize_t vector_fn(int fd, const struct iovec *parts, int n_parts, off_t offset);
static ssize_t transfer(vector_fn *fn, int fd, const struct iovec *parts, int n_parts, off_t offset) {
    if (!fires()) return fn(fd, parts, n_parts, offset);
    if (fault_kind == FAIL_EINTR) {
        errno = EINTR;
        return -1;
    }
    if (fault_kind == FAIL_SHORT && parts->iov_len > 1)
        return fn(fd, &(struct iovec){parts->iov_base, parts->iov_len / 2}, 1, offset);
    return failing(-1);
}
static ssize_t f_readv(int fd, const struct iovec *parts, int n_parts, off_t offset) {
    return transfer(preadv, fd, parts, n_parts, offset);
}
static ssize_t f_writev(int fd, const struct iovec *parts, int n_parts, off_t offset) {
    if (direct == DIRECT_MISFITS && late_is_direct[fd]) {
        errno = EINVAL;
        return -1;
    }
    const ssize_t n = transfer(pwritev, fd, parts, n_parts, offset);
    if (is_spied) power_cut();
    return n;
}
static int f_allocate(int fd, off_t offset, off_t n_bytes) {
    return fires() ? failing(-1) : fallocate(fd, 0, offset, n_bytes);
}
static int f_punch(int fd, off_t offset, off_t n_bytes) {
    return fires() ? failing(-1) : paged__system_real.punch(fd, offset, n_bytes);
}
static int f_start_sync(int fd, off_t offset, off_t n_bytes) {
    (void)fd, (void)offset, (void)n_bytes;
    return fires() ? failing(-1) : 0;
}
static int f_sync_data(int fd) {
    (void)fd;
    if (fires()) return failing(-1);
    if (is_spied) data_synced();
    return 0;
}
static int f_sync(int fd) {
    (void)fd;
    return fires() ? failing(-1) : 0;
}
static int f_truncate(int fd, off_t size) {
    return fires() ? failing(-1) : ftruncate(fd, size);
}
static int f_stat(int fd, struct stat *out) {
    return fires() ? failing(-1) : fstat(fd, out);
}
static int f_stat_at(int dir, const char *name, struct stat *out) {
    return fires() ? failing(-1) : fstatat(dir, name, out, AT_SYMLINK_NOFOLLOW);
}
static int f_stat_fs(int fd, struct statvfs *out) {
    return fires() ? failing(-1) : fstatvfs(fd, out);
}
static int f_rename(int dir, const char *from, const char *to) {
    return fires() ? failing(-1) : renameat(dir, from, dir, to);
}
static int f_unlink(int dir, const char *name) {
    return fires() ? failing(-1) : unlinkat(dir, name, 0);
}
static int64_t f_wall_s(void) {
    return 1700000000;
}

/* Reads in the background, which are late: none may begin, some may, or they end badly. */
static int f_reads_open(int n_max, aio_context_t *out) {
    return fires() ? failing(-1) : late_reads_open(n_max, out);
}
static int f_reads_start(aio_context_t reads, int n, struct iocb **of) {
    if (direct == DIRECT_MISFITS) {
        errno = EINVAL;
        return -1;
    }
    if (!fires()) return late_reads_start(reads, n, of);
    if (fault_kind == FAIL_SHORT && n > 1) return late_reads_start(reads, n / 2, of);
    return failing(-1);
}
static int f_reads_wait(aio_context_t reads, int n, struct io_event *out) {
    if (!fires()) return late_reads_wait(reads, n, out);
    if (fault_kind == FAIL_EINTR) {
        errno = EINTR;
        return -1;
    }
    if (fault_kind == FAIL_FOR_EVER) return failing(-1);
    n = late_reads_wait(reads, n, out);
    if (n > 0)
        out[0].res = fault_kind == FAIL_SHORT ? out[0].res / 2 : fault_kind == FAIL_EINVAL ? -EINVAL : -EIO;
    return n;
}
static void f_reads_close(aio_context_t reads) {
    late_reads_close(reads);
}

static const paged__system_calls faulty = {
    f_open,      f_mkdir,  f_readv,      f_writev,      f_allocate,   f_punch,      f_start_sync,
    f_sync_data, f_sync,   f_truncate,   f_stat,        f_stat_at,    f_stat_fs,    f_rename,
    f_unlink,    f_wall_s, f_reads_open, f_reads_start, f_reads_wait, f_reads_close};

/* ---- SQLite's files, counted along ---- */

typedef struct shim_file {
    sqlite3_file base;
    sqlite3_file *real; /* behind this struct */
} shim_file;

static sqlite3_vfs *real_vfs;
static sqlite3_file *real_of(sqlite3_file *file) {
    return ((shim_file *)file)->real;
}
static int v_close(sqlite3_file *f) {
    return real_of(f)->pMethods ? real_of(f)->pMethods->xClose(real_of(f)) : SQLITE_OK;
}
static int v_read(sqlite3_file *f, void *data, int n, sqlite3_int64 at) {
    return fires() ? SQLITE_IOERR_READ : real_of(f)->pMethods->xRead(real_of(f), data, n, at);
}
static int v_write(sqlite3_file *f, const void *data, int n, sqlite3_int64 at) {
    if (!fires()) return real_of(f)->pMethods->xWrite(real_of(f), data, n, at);
    if (fault_kind == FAIL_SHORT) real_of(f)->pMethods->xWrite(real_of(f), data, n / 2, at);
    return fault_kind == FAIL_ENOSPC ? SQLITE_FULL : SQLITE_IOERR_WRITE;
}
static int v_truncate(sqlite3_file *f, sqlite3_int64 size) {
    return fires() ? SQLITE_IOERR_TRUNCATE : real_of(f)->pMethods->xTruncate(real_of(f), size);
}
static int v_sync(sqlite3_file *f, int flags) {
    (void)f, (void)flags;
    if (fires()) return SQLITE_IOERR_FSYNC;
    if (is_spied) power_cut();
    return SQLITE_OK;
}
static int v_file_size(sqlite3_file *f, sqlite3_int64 *size) {
    return fires() ? SQLITE_IOERR_FSTAT : real_of(f)->pMethods->xFileSize(real_of(f), size);
}
static int v_lock(sqlite3_file *f, int level) {
    return fires() ? SQLITE_IOERR_LOCK : real_of(f)->pMethods->xLock(real_of(f), level);
}
static int v_unlock(sqlite3_file *f, int level) {
    return real_of(f)->pMethods->xUnlock(real_of(f), level);
}
static int v_check(sqlite3_file *f, int *out) {
    return real_of(f)->pMethods->xCheckReservedLock(real_of(f), out);
}
static int v_control(sqlite3_file *f, int what, void *arg) {
    return real_of(f)->pMethods->xFileControl(real_of(f), what, arg);
}
static int v_sector(sqlite3_file *f) {
    return real_of(f)->pMethods->xSectorSize(real_of(f));
}
static int v_device(sqlite3_file *f) {
    return real_of(f)->pMethods->xDeviceCharacteristics(real_of(f));
}
static const sqlite3_io_methods shim_methods = {
    1,         v_close,  v_read,   v_write, v_truncate, v_sync, v_file_size, v_lock, v_unlock, v_check,
    v_control, v_sector, v_device, NULL,    NULL,       NULL,   NULL,        NULL,   NULL};

static int v_open(sqlite3_vfs *vfs, const char *name, sqlite3_file *file, int flags, int *out) {
    (void)vfs;
    shim_file *shim = (shim_file *)file;
    shim->base.pMethods = NULL;
    shim->real = (sqlite3_file *)(shim + 1);
    if (fires()) return SQLITE_CANTOPEN;
    const int code = real_vfs->xOpen(real_vfs, name, shim->real, flags, out);
    if (code == SQLITE_OK) shim->base.pMethods = &shim_methods;
    return code;
}
static int v_delete(sqlite3_vfs *vfs, const char *name, int sync) {
    (void)vfs, (void)sync;
    return fires() ? SQLITE_IOERR_DELETE : real_vfs->xDelete(real_vfs, name, 0);
}

/* ---- memory that ends ---- */

static void *no_alloc(void *user, size_t size_bytes, size_t align) {
    (void)user;
    return fires() ? NULL : aligned_alloc(align, (size_bytes + align - 1) / align * align);
}
static void plain_free(void *user, void *ptr) {
    (void)user;
    free(ptr);
}
static const paged_allocator faulty_allocator = {no_alloc, plain_free, NULL};

static sqlite3_mem_methods real_memory;
static bool is_memory; /* calls of memory are counted instead of calls to files */
static void *m_alloc(int n) {
    return is_memory && fires() ? NULL : real_memory.xMalloc(n);
}
static void *m_realloc(void *ptr, int n) {
    return is_memory && fires() ? NULL : real_memory.xRealloc(ptr, n);
}

/* Once, before SQLite does anything. */
static void set_up(void) {
    static sqlite3_vfs shim;
    if (real_vfs) return;
    CHECK_EQ(sqlite3_config(SQLITE_CONFIG_GETMALLOC, &real_memory), SQLITE_OK);
    sqlite3_mem_methods memory = real_memory;
    memory.xMalloc = m_alloc;
    memory.xRealloc = m_realloc;
    CHECK_EQ(sqlite3_config(SQLITE_CONFIG_MALLOC, &memory), SQLITE_OK);
    /* Without pools of memory, so that each piece is asked for. */
    CHECK_EQ(sqlite3_config(SQLITE_CONFIG_LOOKASIDE, 0, 0), SQLITE_OK);
    CHECK_EQ(sqlite3_initialize(), SQLITE_OK);
    real_vfs = sqlite3_vfs_find(NULL);
    shim = *real_vfs;
    shim.zName = "shim";
    shim.szOsFile = (int)sizeof(shim_file) + real_vfs->szOsFile;
    shim.xOpen = v_open;
    shim.xDelete = v_delete;
    CHECK_EQ(sqlite3_vfs_register(&shim, 1), SQLITE_OK);
}

/* ---- the scenario ---- */

/* A record that first has one group of two, and then both: the second takes the place of the first. What is
 * asked before that is committed may take the transaction with it. */
enum { GROWING = 2000 };

static void put_growing(paged_store *store) {
    world_record r;
    world_fill(&r, GROWING);
    r.is.groups = 1;
    store->write(store->self, &r.is, NULL);
    store->flush(store->self, NULL);
    put_number(store, GROWING, NULL);
    const paged_key other = world_key(8);
    store->find(store->self, &other, 1);
    put_number(store, GROWING + 1, NULL);
}

static void get_growing(paged_store *store) {
    world_record r, want;
    world_fill(&want, GROWING);
    world_blank(&r, GROWING);
    if (store->read(store->self, &r.is, 1) != PAGED_OK) return;
    CHECK(r.is.groups == 1 || r.is.groups == 3);
    CHECK(memcmp(r.bytes[0], want.bytes[0], world_bytes[0]) == 0);
}

/* Records from `first` on, as an engine gets them: it says beforehand which. */
static int32_t get_expected(paged_store *store, int64_t first, int32_t n) {
    paged_key keys[N_RECORDS];
    int32_t n_right = 0;
    for (int32_t i = 0; i < n; i++) keys[i] = world_key(first + i);
    store->expect(store->self, keys, n);
    while (n_right < n && get_number(store, first + n_right) == PAGED_OK) n_right++;
    return n_right;
}

/* Failures are its lot; wrong answers are not. */
static void scenario(void) {
    paged_store store;
    paged_notes notes;
    paged_error err;
    void *data;
    size_t n_bytes;
    const paged_file_store_config config = world_config(world_dir, N_SLOTS);
    if (paged_file_store_create(&config, &store, &notes, &err)) {
        CHECK(err.message[0] != 0);
        return;
    }
    if (store.open(store.self, &world_shape, &err) == PAGED_OK) {
        for (int i = 0; i < N_RECORDS; i++) {
            const paged_status status = put_number(&store, i, &err);
            CHECK(status == PAGED_OK || err.message[0] != 0);
            if (i % 4 == 3) store.flush(store.self, NULL);
            if (i % 5 == 4) get_number(&store, i - 3);
            if (i % 6 == 5) get_expected(&store, i - 5, 6);
            if (i == 9) put_growing(&store);
            if (i == 7) store.pin(store.self, "conv-1", (paged_key[]){world_key(6), world_key(7)}, 2, NULL);
            if (i == 25) store.pin(store.self, "conv-1", NULL, 0, NULL);
            if (i == 12) notes.put(notes.self, "turns", "hello", 5, 0, NULL);
            if (i == 13 && notes.get(notes.self, "turns", SIZE_MAX, &data, &n_bytes, NULL) == PAGED_OK) {
                CHECK(n_bytes == 5 && memcmp(data, "hello", 5) == 0);
                free(data);
            }
        }
        paged_key key;
        int32_t n_common;
        store.tail(store.self, &(paged_key){{1}}, &(int32_t){1}, 1, &key, &n_common);
    }
    store.close(store.self);
    notes.close(notes.self);
}

/* Without faults: opens, everything found is right and nothing damaged; takes new records, within its
 * bounds. */
static void consistent(const char *dir, const char *what, int64_t n, uint64_t max_damaged) {
    paged_store store;
    paged_error err;
    const paged_file_store_config config = world_config(dir, N_SLOTS);
    const enum fault_kind kind = fault_kind;
    const int64_t calls = n_calls;
    fault_kind = NO_FAULT;
    if (paged_file_store_create(&config, &store, NULL, &err))
        test_fail(__FILE__, __LINE__, "%s %lld: %s", what, (long long)n, err.message);
    CHECK_EQ(store.open(store.self, &world_shape, NULL), PAGED_OK);
    paged_key key_of[N_RECORDS];
    int32_t n_named = 0;
    for (int64_t i = 0; i < N_RECORDS; i++) key_of[i] = world_key(i);
    for (int64_t i = 0; i < N_RECORDS; i++) n_named += store.find(store.self, &key_of[i], 1);
    const int32_t n_found = count_found(&store, N_RECORDS);
    get_growing(&store);
    const paged_store_stats stats = stats_of(&store);
    if (stats.n_damaged > max_damaged || (uint64_t)(n_named - n_found) > stats.n_damaged)
        test_fail(__FILE__, __LINE__, "%s %lld: %llu damaged, %d found of %d", what, (long long)n,
                  (unsigned long long)stats.n_damaged, n_found, n_named);
    CHECK(stats.bytes <= N_SLOTS * WORLD_SLOT);
    /* The second time, if it was there already and its slot was hit; that is found out by reading. */
    paged_status status = PAGED_ERR_NOT_FOUND;
    for (int i = 0; i < 2 && status; i++) {
        CHECK_EQ(put_number(&store, 1000, NULL), PAGED_OK);
        CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
        status = get_number(&store, 1000);
    }
    CHECK_EQ(status, PAGED_OK);
    store.close(store.self);
    if (dir_bytes(dir) > ALL_BOUND)
        test_fail(__FILE__, __LINE__, "%s %lld: %lld bytes", what, (long long)n, (long long)dir_bytes(dir));
    fault_kind = kind;
    n_calls = calls;
}

/* A directory that has records already, so that opening has something to do; of another shape one is pinned,
 * so that the others make room. */
static void old_dir(void) {
    new_dir();
    fault_kind = NO_FAULT;
    scenario();
    paged_store store;
    const paged_file_store_config config = world_config(world_dir, N_SLOTS + 4);
    paged_store_shape shape = world_shape;
    shape.fingerprint_bytes--;
    CHECK_EQ(paged_file_store_create(&config, &store, NULL, NULL), PAGED_OK);
    CHECK_EQ(store.open(store.self, &shape, NULL), PAGED_OK);
    for (int i = 0; i < 3; i++) CHECK_EQ(put_number(&store, i, NULL), PAGED_OK);
    CHECK_EQ(store.pin(store.self, "conv-2", (paged_key[]){world_key(1)}, 1, NULL), PAGED_OK);
    store.close(store.self);
}

static int64_t every_call_fails(enum fault_kind kind, const char *what, bool is_old) {
    for (int64_t n = 1;; n += test_long || n < 30 ? 1 : 1 + n / 15) {
        if (is_old)
            old_dir();
        else
            new_dir();
        fault_kind = kind;
        fault_at = n;
        n_calls = 0;
        scenario();
        const bool none = n_calls < n;
        fault_kind = NO_FAULT;
        consistent(world_dir, what, n, 0);
        if (none) return n;
    }
}

static void with_seam(void) {
    set_up();
    is_spied = is_memory = false;
    fault_kind = NO_FAULT;
    paged__system_set(&faulty);
}

static void without_seam(void) {
    paged__system_set(NULL);
    paged_allocator_set(NULL);
    is_memory = is_spied = false;
    direct = IS_DIRECT;
    remove_tree(world_dir);
}

#define FAULT_TEST(name, kind)                                                                               \
    static void name(void) {                                                                                 \
        with_seam();                                                                                         \
        for (direct = 0; direct < N_DIRECT; direct++) CHECK(every_call_fails(kind, #name, false) > 100);     \
        direct = IS_DIRECT;                                                                                  \
        CHECK(every_call_fails(kind, #name, true) > 100);                                                    \
        without_seam();                                                                                      \
    }
FAULT_TEST(an_error, FAIL_EIO)
FAULT_TEST(a_full_disk, FAIL_ENOSPC)
FAULT_TEST(an_invalid_argument, FAIL_EINVAL)
FAULT_TEST(an_interruption, FAIL_EINTR)
FAULT_TEST(a_short_count, FAIL_SHORT)
FAULT_TEST(errors_for_ever, FAIL_FOR_EVER)

/* An interruption and a short count are nothing that anybody hears of. */
static void interruptions_are_no_failures(void) {
    with_seam();
    for (int kind = FAIL_EINTR; kind <= FAIL_SHORT; kind++)
        for (int is_write = 0; is_write < 2; is_write++) {
            static world_record r;
            new_dir();
            fault_kind = NO_FAULT;
            paged_store store;
            const paged_file_store_config config = world_config(world_dir, N_SLOTS);
            CHECK_EQ(paged_file_store_create(&config, &store, NULL, NULL), PAGED_OK);
            CHECK_EQ(store.open(store.self, &world_shape, NULL), PAGED_OK);
            CHECK_EQ(put_number(&store, 0, NULL), PAGED_OK);
            CHECK_EQ(put_number(&store, 1, NULL), PAGED_OK);
            CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
            world_fill(&r, 2);
            struct iovec part = {r.bytes[0], 5000};
            const int fd = open(world_dir, O_TMPFILE | O_RDWR, 0600);
            CHECK(fd >= 0);
            fault_kind = (enum fault_kind)kind;
            n_calls = 0;
            fault_at = 1;
            CHECK_EQ(paged__write_all(fd, &part, 1, 100), 0);
            world_blank(&r, 2);
            part = (struct iovec){r.bytes[0], 5000};
            n_calls = 0;
            CHECK_EQ(paged__read_all(fd, &part, 1, 100), 0);
            part = (struct iovec){r.bytes[0], 5000};
            CHECK_EQ(paged__read_all(fd, &part, 1, 101), ENODATA);
            fault_kind = NO_FAULT;
            close(fd);
            CHECK_EQ(count_found(&store, 3), 2);
            store.close(store.self);
        }
    without_seam();
}

static void no_memory(void) {
    with_seam();
    paged__system_set(NULL);
    is_memory = true;
    int64_t n = 1;
    for (;; n += test_long || n < 100 ? 1 : 1 + n / 20) {
        new_dir();
        paged_allocator_set(&faulty_allocator);
        fault_kind = FAIL_EIO;
        fault_at = n;
        n_calls = 0;
        /* Files and memory are counted apart: SQLite's files are plain here. */
        sqlite3_vfs_register(real_vfs, 1);
        scenario();
        const bool none = n_calls < n;
        fault_kind = NO_FAULT;
        consistent(world_dir, "memory", n, 0);
        sqlite3_vfs_register(sqlite3_vfs_find("shim"), 1);
        if (none) break;
    }
    CHECK(n > 100);
    without_seam();
}

/* ---- a question that fails ---- */

enum question { FIND, TAIL, PINS, NOTE, N_QUESTIONS };
static bool next_name(void *user, const char *name) {
    (void)user, (void)name;
    return true;
}

static void ask_one(enum question which, paged_store *store, paged_notes *notes) {
    paged_key key = world_key(3);
    int32_t n_common;
    void *data = NULL;
    size_t n_bytes;
    if (which == FIND) store->find(store->self, &key, 1);
    if (which == TAIL) store->tail(store->self, &(paged_key){{1}}, &(int32_t){1}, 1, &key, &n_common);
    if (which == PINS) store->pins(store->self, next_name, NULL, NULL);
    if (which == NOTE && !notes->get(notes->self, "turns", SIZE_MAX, &data, &n_bytes, NULL)) free(data);
}

/* While a record takes the place of another, SQLite has no memory for the n-th thing that an answer takes. It
 * gives the transaction up, so that the record before is there again; the one that waits is lost with it.
 * Whether the transaction was lost is `is_lost`; true: n were not needed. */
static bool ask_without_memory(enum question which, int64_t n, bool *is_lost) {
    paged_store store;
    paged_notes notes;
    world_record r;
    const paged_file_store_config config = world_config(world_dir, 50);
    new_dir();
    CHECK_EQ(paged_file_store_create(&config, &store, &notes, NULL), PAGED_OK);
    CHECK_EQ(store.open(store.self, &world_shape, NULL), PAGED_OK);
    CHECK_EQ(notes.put(notes.self, "turns", "hello", 5, 0, NULL), PAGED_OK);
    for (int i = 0; i < 10; i++) CHECK_EQ(put_number(&store, i, NULL), PAGED_OK);
    world_fill(&r, 30);
    r.is.parent = (paged_key){{1}};
    r.is.n_tokens = 5;
    CHECK_EQ(store.write(store.self, &r.is, NULL), PAGED_OK);
    world_fill(&r, GROWING);
    r.is.groups = 1;
    CHECK_EQ(store.write(store.self, &r.is, NULL), PAGED_OK);
    CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
    CHECK_EQ(put_number(&store, GROWING, NULL), PAGED_OK);
    fault_kind = FAIL_EIO;
    fault_at = n;
    n_calls = 0;
    ask_one(which, &store, &notes);
    fault_kind = NO_FAULT;
    const bool none = n_calls < n;
    *is_lost = ((paged__file_store *)store.self)->n_lost > 0;
    CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
    for (int i = 10; i < 20; i++) CHECK_EQ(put_number(&store, i, NULL), PAGED_OK);
    CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
    CHECK_EQ(count_found(&store, 20), 20);
    store.close(store.self);
    notes.close(notes.self);
    CHECK_EQ(paged_file_store_create(&config, &store, NULL, NULL), PAGED_OK);
    CHECK_EQ(store.open(store.self, &world_shape, NULL), PAGED_OK);
    CHECK_EQ(count_found(&store, 20), 20);
    world_blank(&r, GROWING);
    CHECK_EQ(store.read(store.self, &r.is, 1), PAGED_OK);
    CHECK_EQ(r.is.groups, *is_lost ? 1 : 3);
    CHECK_EQ(stats_of(&store).n_records, 22);
    CHECK_EQ(stats_of(&store).n_damaged, 0);
    store.close(store.self);
    return none;
}

static void a_question_that_loses_the_batch(void) {
    with_seam();
    paged__system_set(NULL);
    sqlite3_vfs_register(real_vfs, 1);
    is_memory = true;
    for (int which = 0; which < N_QUESTIONS; which++) {
        int32_t n_lost = 0;
        bool is_lost;
        for (int64_t n = 1; !ask_without_memory((enum question)which, n, &is_lost); n++) n_lost += is_lost;
        CHECK(!is_lost && n_lost > 0);
    }
    sqlite3_vfs_register(sqlite3_vfs_find("shim"), 1);
    without_seam();
}

/* ---- a sync that fails ---- */

static bool next_sync_fails;
static int one_bad_sync(int fd) {
    const bool fails = next_sync_fails;
    next_sync_fails = false;
    errno = EIO;
    return fails ? -1 : fdatasync(fd);
}

/* What a failed sync was to make durable is lost, though the pages may be there and the next sync be
 * happy. */
static void a_failed_sync_loses_its_batch(void) {
    paged__system_calls calls = paged__system_real;
    paged_error err;
    paged_store store;
    set_up();
    calls.sync_data = one_bad_sync;
    new_dir();
    const paged_file_store_config config = world_config(world_dir, N_SLOTS);
    CHECK_EQ(paged_file_store_create(&config, &store, NULL, NULL), PAGED_OK);
    CHECK_EQ(store.open(store.self, &world_shape, NULL), PAGED_OK);
    for (int i = 0; i < 4; i++) CHECK_EQ(put_number(&store, i, NULL), PAGED_OK);
    CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
    for (int i = 4; i < 8; i++) CHECK_EQ(put_number(&store, i, NULL), PAGED_OK);
    paged__system_set(&calls);
    next_sync_fails = true;
    CHECK_EQ(store.flush(store.self, &err), PAGED_ERR_IO);
    CHECK(strstr(err.message, world_dir) && strstr(err.message, "Input/output error"));
    CHECK_EQ(stats_of(&store).n_failures, 1);
    CHECK(!stats_of(&store).up);
    CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
    for (int i = 0; i < 8; i++) CHECK_EQ(get_number(&store, i), i < 4 ? PAGED_OK : PAGED_ERR_NOT_FOUND);
    CHECK_EQ(put_number(&store, 4, NULL), PAGED_OK);
    CHECK(stats_of(&store).up);
    store.close(store.self);
    paged__system_set(NULL);
    CHECK_EQ(paged_file_store_create(&config, &store, NULL, NULL), PAGED_OK);
    CHECK_EQ(store.open(store.self, &world_shape, NULL), PAGED_OK);
    CHECK_EQ(count_found(&store, 8), 5);
    store.close(store.self);
}

/* ---- a write that fails ---- */

static int32_t n_writes_fail, n_written;
static ssize_t some_bad_writes(int fd, const struct iovec *parts, int n_parts, off_t offset) {
    n_written++;
    errno = EIO;
    return n_writes_fail-- > 0 ? -1 : pwritev(fd, parts, n_parts, offset);
}

/* Records are written some at a time; when that fails these are lost, and no others of the batch. */
static void a_failed_write_loses_what_it_wrote(void) {
    paged__system_calls calls = paged__system_real;
    paged_error err;
    paged_store store;
    set_up();
    calls.writev = some_bad_writes;
    new_dir();
    const paged_file_store_config config = world_config(world_dir, 0);
    CHECK_EQ(paged_file_store_create(&config, &store, NULL, NULL), PAGED_OK);
    paged__system_set(&calls);
    CHECK_EQ(store.open(store.self, &world_shape, NULL), PAGED_OK);
    n_written = n_writes_fail = 0;
    for (int i = 0; i < 4; i++) CHECK_EQ(put_number(&store, i, NULL), PAGED_OK);
    CHECK_EQ(n_written, 0);
    CHECK_EQ(get_number(&store, 3), PAGED_OK); /* one that is staged is written before it is read */
    CHECK_EQ(n_written, 1);
    for (int i = 4; i < 8; i++) CHECK_EQ(put_number(&store, i, NULL), PAGED_OK);
    CHECK_EQ(stats_of(&store).n_records, 8);
    n_writes_fail = 1;
    CHECK_EQ(store.flush(store.self, &err), PAGED_ERR_IO);
    CHECK(strstr(err.message, world_dir) && strstr(err.message, "Input/output error"));
    CHECK_EQ(n_written, 2);
    const paged_store_stats stats = stats_of(&store);
    CHECK(!stats.up && stats.n_failures == 1 && stats.n_writes == 4 && stats.n_records == 4);
    for (int i = 0; i < 8; i++) CHECK_EQ(get_number(&store, i), i < 4 ? PAGED_OK : PAGED_ERR_NOT_FOUND);
    for (int i = 4; i < 7; i++) CHECK_EQ(put_number(&store, i, NULL), PAGED_OK);
    n_writes_fail = 1;
    CHECK_EQ(get_number(&store, 5), PAGED_ERR_NOT_FOUND);
    CHECK_EQ(put_number(&store, 6, NULL), PAGED_OK);
    CHECK(stats_of(&store).up);
    CHECK_EQ(stats_of(&store).n_damaged, 0);
    store.close(store.self);
    paged__system_set(NULL);
    CHECK_EQ(paged_file_store_create(&config, &store, NULL, NULL), PAGED_OK);
    CHECK_EQ(store.open(store.self, &world_shape, NULL), PAGED_OK);
    CHECK_EQ(count_found(&store, 8), 5);
    store.close(store.self);
    remove_tree(world_dir);
}

/* A record that is to be read ahead has to be written first, and where that fails and the index, too, the
 * transaction and the new file are gone while another one is read. */
static bool is_breaking, is_interrupted;
static sqlite3 *broken_db;
static int interrupt_once(void *user) {
    const bool interrupts = is_interrupted;
    (void)user;
    is_interrupted = false;
    return interrupts;
}
static ssize_t breaking_write(int fd, const struct iovec *parts, int n_parts, off_t offset) {
    if (!is_breaking) return pwritev(fd, parts, n_parts, offset);
    is_breaking = false;
    is_interrupted = true;
    sqlite3_progress_handler(broken_db, 1, interrupt_once, NULL);
    errno = EIO;
    return -1;
}

static void a_batch_that_is_lost_by_reading_ahead(void) {
    enum { N = 130 }; /* two halves of what is read ahead, and two records that are staged */
    paged__system_calls calls = late_calls();
    paged_store store;
    paged_key keys[N];
    set_up();
    calls.writev = breaking_write;
    paged__system_set(&calls);
    new_dir();
    const paged_file_store_config config = world_config(world_dir, 0);
    CHECK_EQ(paged_file_store_create(&config, &store, NULL, NULL), PAGED_OK);
    CHECK_EQ(store.open(store.self, &world_shape, NULL), PAGED_OK);
    broken_db = ((paged__file_store *)store.self)->index.db;
    is_breaking = false;
    for (int i = 0; i < N; i++) CHECK_EQ(put_number(&store, i, NULL), PAGED_OK);
    for (int i = 0; i < N; i++) keys[i] = world_key(i);
    store.expect(store.self, keys, N);
    for (int i = 0; i < 64; i++) CHECK_EQ(get_number(&store, i), PAGED_OK);
    is_breaking = true;
    CHECK_EQ(get_number(&store, 64), PAGED_ERR_NOT_FOUND);
    CHECK(!is_breaking && !is_interrupted); /* it came to that */
    CHECK_EQ(stats_of(&store).n_records, 0);
    CHECK_EQ(stats_of(&store).n_damaged, 0);
    CHECK_EQ(count_found(&store, N), 0);
    for (int i = 0; i < 3; i++) CHECK_EQ(put_number(&store, i, NULL), PAGED_OK);
    CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
    CHECK_EQ(count_found(&store, N), 3);
    CHECK_EQ(stats_of(&store).n_records, 3);
    store.close(store.self);
    paged__system_set(NULL);
    remove_tree(world_dir);
}

/* ---- the power goes ---- */

static char cut_dir[160];
static int64_t n_cuts;

static void copy_file(const char *from_dir, const char *from, const char *to_dir, const char *to) {
    static uint8_t bytes[4 << 20];
    char path[400];
    snprintf(path, sizeof path, "%s/%s", from_dir, from);
    const int in = open(path, O_RDONLY);
    snprintf(path, sizeof path, "%s/%s", to_dir, to);
    unlink(path);
    if (in < 0) return;
    const ssize_t n = read(in, bytes, sizeof bytes);
    const int out = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(n >= 0 && n < (ssize_t)sizeof bytes && out >= 0 && write(out, bytes, (size_t)n) == n);
    close(in);
    close(out);
}

static void data_synced(void) {
    copy_file(world_dir, "data-1", cut_dir, "durable");
}

/* The index as it was synced, with the data as it was synced (of what came later nothing is on the disk),
 * and with the data as it is (all of it is). */
static void power_cut(void) {
    char dir[200];
    is_spied = false;
    n_cuts++;
    for (int late = 0; late < 2; late++) {
        snprintf(dir, sizeof dir, "%s/state", cut_dir);
        remove_tree(dir);
        CHECK(mkdir(dir, 0700) == 0);
        copy_file(world_dir, "index.sqlite", dir, "index.sqlite");
        copy_file(world_dir, "index.sqlite-wal", dir, "index.sqlite-wal");
        copy_file(late ? world_dir : cut_dir, late ? "data-1" : "durable", dir, "data-1");
        consistent(dir, late ? "power, all written" : "power, synced only", n_cuts, 0);
    }
    is_spied = true;
}

static void the_power_goes(void) {
    with_seam();
    new_dir();
    snprintf(cut_dir, sizeof cut_dir, "%s-cut", world_dir);
    remove_tree(cut_dir);
    CHECK(mkdir(cut_dir, 0700) == 0);
    n_cuts = 0;
    is_spied = true;
    scenario();
    is_spied = false;
    CHECK(n_cuts > N_RECORDS);
    remove_tree(cut_dir);
    without_seam();
}

/* ---- damage ---- */

static void full_dir(void) {
    set_up();
    new_dir();
    fault_kind = NO_FAULT;
    scenario();
}

static void flip_bit(const char *name, int64_t bit) {
    char path[256];
    uint8_t byte;
    path_of(path, name);
    const int fd = open(path, O_RDWR);
    CHECK(fd >= 0 && pread(fd, &byte, 1, bit / 8) == 1);
    byte ^= (uint8_t)(1u << bit % 8);
    CHECK(pwrite(fd, &byte, 1, bit / 8) == 1);
    close(fd);
}

static void bits_of_data(void) {
    uint64_t state = test_seed;
    full_dir();
    for (int i = 0; i < (test_long ? 5000 : 150); i++) {
        flip_bit("data-1", (int64_t)(paged__rand(&state) % (uint64_t)(8 * size_of("data-1"))));
        consistent(world_dir, "bit", i, 1);
    }
    char quarantine[256];
    int n_files = 0;
    path_of(quarantine, "quarantine");
    DIR *dir = opendir(quarantine);
    CHECK(dir != NULL);
    for (struct dirent *e; (e = readdir(dir)) != NULL;) n_files += e->d_name[0] != '.';
    closedir(dir);
    CHECK(n_files >= 1 && n_files <= 16);
    remove_tree(world_dir);
}

/* Of a turned bit in the index the store may believe another time of use, or another slot; never a wrong
 * record. Where it is no index any more, it is set aside. */
static void bits_of_the_index(void) {
    uint64_t state = test_seed + 1;
    paged_store store;
    paged_error err;
    const paged_file_store_config config = world_config(world_dir, N_SLOTS);
    for (int i = 0; i < (test_long ? 3000 : 100); i++) {
        full_dir();
        const int64_t header = 100 * 8, all = 8 * size_of("index.sqlite");
        const int64_t bit = (int64_t)(paged__rand(&state) % (uint64_t)(i % 4 == 0 ? header : all));
        flip_bit("index.sqlite", bit);
        const paged_status status = paged_file_store_create(&config, &store, NULL, &err);
        if (status == PAGED_ERR_FORMAT) continue; /* of another version, or of nobody we know */
        if (status) test_fail(__FILE__, __LINE__, "bit %lld: %s", (long long)bit, err.message);
        CHECK_EQ(store.open(store.self, &world_shape, NULL), PAGED_OK);
        count_found(&store, N_RECORDS);
        for (int k = 0; k < 30; k++) put_number(&store, 100 + k, NULL);
        store.flush(store.self, NULL);
        for (int k = 0; k < 30; k++) get_number(&store, 100 + k);
        store.close(store.self);
        CHECK(dir_bytes(world_dir) < 2 * ALL_BOUND);
    }
    remove_tree(world_dir);
}

static void truncate_to(const char *name, int64_t size) {
    char path[256];
    path_of(path, name);
    CHECK(truncate(path, size) == 0);
}

static void compact_index(void) {
    char path[256];
    sqlite3 *db;
    path_of(path, "index.sqlite");
    CHECK_EQ(sqlite3_open_v2(path, &db, SQLITE_OPEN_READWRITE, real_vfs->zName), SQLITE_OK);
    CHECK_EQ(sqlite3_exec(db, "VACUUM", NULL, NULL, NULL), SQLITE_OK);
    sqlite3_close(db);
}

static void cut_and_swapped_files(void) {
    static const int percents[] = {0, 10, 50, 99};
    char a[256], b[256];
    for (int i = 0; i < 4; i++) {
        full_dir();
        truncate_to("data-1", size_of("data-1") * percents[i] / 100);
        consistent(world_dir, "cut data", percents[i], N_SLOTS);
        full_dir();
        compact_index(); /* no page of it can be missed */
        truncate_to("index.sqlite", size_of("index.sqlite") * percents[i] / 100);
        consistent(world_dir, "cut index", percents[i], 1);
        CHECK(i == 0 || size_of("index.sqlite.damaged") > 0);
        CHECK(size_of("index.sqlite") > 0);
    }
    full_dir();
    path_of(a, "data-1");
    CHECK(unlink(a) == 0);
    consistent(world_dir, "no data", 0, N_SLOTS);
    full_dir();
    path_of(b, "index.sqlite");
    CHECK(unlink(b) == 0);
    consistent(world_dir, "no index", 0, 0);
    /* Data that another shape wrote, and more of it. */
    with_seam();
    old_dir();
    paged__system_set(NULL);
    path_of(a, "data-1");
    path_of(b, "data-2");
    char c[256];
    path_of(c, "data-3");
    CHECK(rename(a, c) == 0 && rename(b, a) == 0 && rename(c, b) == 0);
    consistent(world_dir, "swapped", 0, N_SLOTS);
    full_dir();
    const int fd = open(a, O_WRONLY | O_APPEND);
    CHECK(fd >= 0 && write(fd, world_fingerprint, sizeof world_fingerprint) > 0);
    close(fd);
    truncate_to("data-1", 100 << 20);
    consistent(world_dir, "longer", 0, 1);
    CHECK(size_of("data-1") <= (int64_t)N_SLOTS * WORLD_SLOT);
    remove_tree(world_dir);
}

/* A slot that holds another record's right bytes is a wrong record all the same. */
static void swapped_slots(void) {
    uint8_t one[WORLD_SLOT], two[WORLD_SLOT];
    char path[256];
    full_dir();
    path_of(path, "data-1");
    const int fd = open(path, O_RDWR);
    CHECK(fd >= 0 && pread(fd, one, WORLD_SLOT, 0) == WORLD_SLOT &&
          pread(fd, two, WORLD_SLOT, WORLD_SLOT) == WORLD_SLOT);
    CHECK(pwrite(fd, two, WORLD_SLOT, 0) == WORLD_SLOT &&
          pwrite(fd, one, WORLD_SLOT, WORLD_SLOT) == WORLD_SLOT);
    close(fd);
    consistent(world_dir, "swapped slots", 0, 2);
    remove_tree(world_dir);
}

#define TESTS(X)                                                                                             \
    X(an_error)                                                                                              \
    X(a_full_disk)                                                                                           \
    X(an_invalid_argument)                                                                                   \
    X(an_interruption)                                                                                       \
    X(a_short_count)                                                                                         \
    X(errors_for_ever)                                                                                       \
    X(interruptions_are_no_failures)                                                                         \
    X(no_memory)                                                                                             \
    X(a_question_that_loses_the_batch)                                                                       \
    X(a_failed_sync_loses_its_batch)                                                                         \
    X(a_failed_write_loses_what_it_wrote)                                                                    \
    X(a_batch_that_is_lost_by_reading_ahead)                                                                 \
    X(the_power_goes) X(bits_of_data) X(bits_of_the_index) X(cut_and_swapped_files) X(swapped_slots)
TEST_MAIN(TESTS)
