/* file_tools.c: `paged store` without its options: over the parts of the file store, one fingerprint
 * after the other.
 *
 * An exported file, all little-endian:
 *   head     "PAGEDEXP", u32 version
 *   sections u32 'SECT', i32 block_size, i32 n_groups, u32 fingerprint_bytes, u64 block_bytes
 * [PAGED_GROUPS_MAX],            the fingerprint, u64 XXH3-64 of all this; then records: u32 groups (not
 * 0), front and bytes as in a slot;            then u32 0
 *   end      u32 'END ', u64 number of records
 * The bytes of a record carry their own checksums (store.h).
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include "mem/hash.h"
#include "store/file.h"
#include "store/tools.h"

static const char export_magic[8] = "PAGEDEXP";
enum { EXPORT_VERSION = 1, SECTION = 0x54434553, THE_END = 0x20444e45 };

static paged__file_store *store_of(const paged_store *store) {
    return store->self;
}

static void tell(const paged__tool_watch *watch, int64_t done, int64_t all) {
    if (watch && watch->fn) watch->fn(watch->user, done, all);
}

/* ---- looking ---- */

static paged__tool_shape shown(paged__file_store *s, const paged__shape_row *row) {
    paged__tool_shape shape = {.id = row->id,
                               .n_records = row->n_records,
                               .n_pinned = row->n_pinned,
                               .bytes = PAGED_MAX(paged__file_store_bytes(s, row), 0),
                               .last_used_at = row->last_used_at,
                               .block_size = row->shape.is.block_size,
                               .n_groups = row->shape.is.n_groups};
    memcpy(shape.block_bytes, row->shape.is.block_bytes, sizeof shape.block_bytes);
    memcpy(shape.hash, row->shape.id, sizeof shape.hash);
    return shape;
}

paged_status paged__tool_shapes(const paged_store *store,
                                bool (*fn)(void *user, const paged__tool_shape *shape), void *user,
                                paged_error *err) {
    paged__file_store *s = store_of(store);
    paged__shape_row *rows = NULL;
    int32_t n_rows = 0;
    const paged_status status = paged__index_shapes(&s->index, &rows, &n_rows, err);
    for (int32_t i = 0; i < n_rows && !status; i++) {
        const paged__tool_shape shape = shown(s, &rows[i]);
        if (!fn(user, &shape)) break;
    }
    paged__shape_rows_free(rows, n_rows);
    return status;
}

typedef struct record_teller {
    bool (*fn)(void *user, const paged__tool_record *record);
    void *user;
} record_teller;

static bool tell_record(void *user, const paged__entry *entry) {
    const record_teller *teller = user;
    const paged__tool_record record = {.key = entry->key,
                                       .parent = entry->parent,
                                       .first = entry->first,
                                       .n_tokens = entry->n_tokens,
                                       .groups = entry->groups,
                                       .used_at = entry->used_at};
    return teller->fn(teller->user, &record);
}

paged_status paged__tool_records(const paged_store *store, int64_t shape,
                                 bool (*fn)(void *user, const paged__tool_record *record), void *user,
                                 paged_error *err) {
    record_teller teller = {fn, user};
    return paged__index_each(&store_of(store)->index, shape, tell_record, &teller, err);
}

/* ---- the records of one fingerprint ---- */

typedef struct key_list {
    paged_key *keys; /* [n_room] */
    int64_t n, n_room;
} key_list;

static bool add_key(void *user, const paged__entry *entry) {
    key_list *list = user;
    if (list->n < list->n_room) list->keys[list->n++] = entry->key;
    return list->n < list->n_room;
}

static paged_status list_keys(paged__file_store *s, const paged__shape_row *row, key_list *out,
                              paged_error *err) {
    *out =
        (key_list){.keys = paged__alloc((size_t)row->n_records, sizeof(paged_key)), .n_room = row->n_records};
    if (!out->keys) return paged__fail(err, PAGED_ERR_NO_MEMORY, "%" PRId64 " keys", row->n_records);
    return row->n_records ? paged__index_each(&s->index, row->id, add_key, out, err) : PAGED_OK;
}

/* Buffers for a record of a shape. */
static paged_status take_record(const paged__shape *shape, paged_record *record, paged_error *err) {
    *record = (paged_record){.tokens = paged__calloc((size_t)shape->is.block_size, sizeof(int32_t))};
    bool is_full = record->tokens != NULL;
    for (int32_t g = 0; g < shape->is.n_groups && is_full; g++)
        is_full = (record->bytes[g] = paged__alloc(shape->is.block_bytes[g], 1)) != NULL;
    return is_full ? PAGED_OK
                   : paged__fail(err, PAGED_ERR_NO_MEMORY, "a record of %d tokens", shape->is.block_size);
}

static void free_record(paged_record *record) {
    for (int32_t g = 0; g < PAGED_GROUPS_MAX; g++) paged__free(record->bytes[g]);
    paged__free(record->tokens);
}

/* Calls fn with each record of the keys; damaged ones are counted and go. */
typedef paged_status record_fn(void *user, const paged_record *record, paged_error *err);

static paged_status each_record(paged__file_store *s, const key_list *list, record_fn *fn, void *user,
                                const paged__tool_watch *watch, int64_t all, paged__tool_report *out,
                                paged_error *err) {
    paged_record record;
    paged_status status = take_record(&s->shape, &record, err);
    for (int64_t i = 0; i < list->n && !status; i++) {
        record.key = list->keys[i];
        if (paged__file_store_read(s, &record, UINT32_MAX, false) == PAGED_OK) {
            out->n_records++;
            out->bytes += (int64_t)(s->shape.front_bytes + paged__record_payload(&s->shape, record.groups));
            if (fn) status = fn(user, &record, err);
        } else {
            out->n_damaged++;
        }
        tell(watch, out->n_records + out->n_damaged, all);
    }
    free_record(&record);
    return status;
}

static int64_t count_all(const paged__shape_row *rows, int32_t n_rows) {
    int64_t n = 0;
    for (int32_t i = 0; i < n_rows; i++) n += rows[i].n_records;
    return n;
}

/* ---- check and gc ---- */

paged_status paged__tool_check(const paged_store *store, const paged__tool_watch *watch,
                               paged__tool_report *out, paged_error *err) {
    paged__file_store *s = store_of(store);
    paged__shape_row *rows = NULL;
    int32_t n_rows = 0;
    *out = (paged__tool_report){0};
    paged_status status = paged__index_shapes(&s->index, &rows, &n_rows, err);
    const int64_t all = count_all(rows, n_rows);
    for (int32_t i = 0; i < n_rows && !status; i++) {
        key_list list;
        status = paged__file_store_use(s, &rows[i].shape.is, err);
        if (status) break;
        status = list_keys(s, &rows[i], &list, err);
        if (!status) status = each_record(s, &list, NULL, NULL, watch, all, out, err);
        paged__free(list.keys);
    }
    paged__shape_rows_free(rows, n_rows);
    if (!status) status = paged__file_store_commit(s, err);
    return status;
}

/* The damaged slots that were kept; the folder stays. */
static void empty_quarantine(paged__file_store *s) {
    const paged__system_calls *sys = paged__system();
    const int fd = sys->open(s->dir_fd, "quarantine", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW, 0);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    if (!dir && fd >= 0) close(fd);
    if (!dir) return;
    for (struct dirent *e; (e = readdir(dir)) != NULL;)
        if (e->d_name[0] != '.') sys->unlink(dirfd(dir), e->d_name);
    closedir(dir);
    s->n_quarantined = 0;
}

paged_status paged__tool_gc(const paged_store *store, paged_error *err) {
    paged__file_store *s = store_of(store);
    paged__shape_row *rows = NULL;
    int32_t n_rows = 0;
    if (s->config.read_only) return paged__fail(err, PAGED_ERR_LIMIT, "%s is open for reading only", s->dir);
    paged_status status = paged__index_shapes(&s->index, &rows, &n_rows, err);
    /* The one that was used last is the one to keep; using it keeps to the limit. */
    if (!status && n_rows) status = paged__file_store_use(s, &rows[n_rows - 1].shape.is, err);
    paged__shape_rows_free(rows, n_rows);
    if (!status) status = paged__file_store_commit(s, err);
    if (!status) status = paged__file_store_tidy(s, err);
    if (status) return status;
    empty_quarantine(s);
    paged__system()->unlink(s->dir_fd, "index.sqlite.damaged");
    return paged__index_vacuum(&s->index, err);
}

/* ---- export ---- */

typedef struct out_file {
    paged__file_store *s;
    uint8_t *front; /* of the section's shape */
    const char *path;
    int fd;
    int64_t at;
} out_file;

static paged_status put_parts(out_file *out, struct iovec *parts, int n_parts, paged_error *err) {
    int64_t bytes = 0;
    for (int i = 0; i < n_parts; i++) bytes += (int64_t)parts[i].iov_len;
    const int error = paged__write_all(out->fd, parts, n_parts, out->at);
    if (error) return paged__io_fail(err, out->path, error);
    out->at += bytes;
    return PAGED_OK;
}

static paged_status put_bytes(out_file *out, const void *bytes, size_t n, paged_error *err) {
    /* writev takes what it does not change as if it might. */
    return put_parts(out, &(struct iovec){(void *)(uintptr_t)bytes, n}, 1, err);
}

static paged_status put_number(out_file *out, uint32_t number, paged_error *err) {
    return put_bytes(out, &number, sizeof number, err);
}

typedef struct section {
    uint32_t mark;
    int32_t block_size, n_groups;
    uint32_t fingerprint_bytes;
    uint64_t block_bytes[PAGED_GROUPS_MAX];
} section;

static uint64_t section_sum(const section *sec, const uint8_t *fingerprint) {
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    XXH3_64bits_update(&state, sec, sizeof *sec);
    XXH3_64bits_update(&state, fingerprint, sec->fingerprint_bytes);
    return XXH3_64bits_digest(&state);
}

static paged_status put_section(out_file *out, const paged__shape *shape, paged_error *err) {
    section sec = {.mark = SECTION,
                   .block_size = shape->is.block_size,
                   .n_groups = shape->is.n_groups,
                   .fingerprint_bytes = (uint32_t)shape->is.fingerprint_bytes};
    for (int32_t g = 0; g < shape->is.n_groups; g++) sec.block_bytes[g] = shape->is.block_bytes[g];
    const uint64_t sum = section_sum(&sec, shape->is.fingerprint);
    paged_status status = put_bytes(out, &sec, sizeof sec, err);
    if (!status) status = put_bytes(out, shape->is.fingerprint, sec.fingerprint_bytes, err);
    return status ? status : put_bytes(out, &sum, sizeof sum, err);
}

static paged_status put_record(void *user, const paged_record *record, paged_error *err) {
    out_file *out = user;
    const paged__shape *shape = &out->s->shape;
    struct iovec parts[PAGED__RECORD_PARTS];
    paged__record_seal(shape, record, out->front);
    const int n_parts = paged__record_parts(shape, record, record->groups, out->front, parts);
    const paged_status status = put_number(out, record->groups, err);
    return status ? status : put_parts(out, parts, n_parts, err);
}

/* The key and all before it, from its end to the beginning. */
static paged_status list_path(paged__file_store *s, const paged__shape_row *row, const paged_key *key,
                              key_list *out, paged_error *err) {
    paged__entry entry = {.parent = *key, .first = 1};
    *out =
        (key_list){.keys = paged__alloc((size_t)row->n_records, sizeof(paged_key)), .n_room = row->n_records};
    if (!out->keys) return paged__fail(err, PAGED_ERR_NO_MEMORY, "%" PRId64 " keys", row->n_records);
    /* No longer than there are records, so that a ring of parents ends. */
    while (entry.first > 0 && out->n < out->n_room) {
        const paged_key next = entry.parent;
        const paged_status status = paged__index_get(&s->index, row->id, &next, &entry, err);
        if (status == PAGED_ERR_NOT_FOUND)
            return paged__fail(err, status, "block %" PRId64 " before the one of this key is not there",
                               out->n);
        if (status) return status;
        out->keys[out->n++] = next;
    }
    return PAGED_OK;
}

static paged_status export_shape(out_file *out, const paged__shape_row *row, const paged_key *key,
                                 int64_t all, const paged__tool_watch *watch, paged__tool_report *report,
                                 paged_error *err) {
    paged__file_store *s = out->s;
    key_list list = {0};
    paged_status status = paged__file_store_use(s, &row->shape.is, err);
    if (status) return status;
    status = key ? list_path(s, row, key, &list, err) : list_keys(s, row, &list, err);
    if (!status && !(out->front = paged__alloc(s->shape.front_bytes, 1)))
        status = paged__fail(err, PAGED_ERR_NO_MEMORY, "%zu bytes", s->shape.front_bytes);
    if (!status) status = put_section(out, &s->shape, err);
    if (!status) status = each_record(s, &list, put_record, out, watch, key ? list.n : all, report, err);
    if (!status) status = put_number(out, 0, err);
    if (!status && key && report->n_damaged)
        status = paged__fail(err, PAGED_ERR_NOT_FOUND, "%" PRId64 " blocks of this path were damaged",
                             report->n_damaged);
    paged__free(out->front);
    paged__free(list.keys);
    out->front = NULL;
    return status;
}

static paged_status export_all(out_file *out, const paged_key *key, const paged__tool_watch *watch,
                               paged__tool_report *report, paged_error *err) {
    paged__shape_row *rows = NULL;
    int32_t n_rows = 0, n_done = 0;
    uint32_t version = EXPORT_VERSION;
    paged_status status = put_bytes(out, export_magic, sizeof export_magic, err);
    if (!status) status = put_bytes(out, &version, sizeof version, err);
    if (!status) status = paged__index_shapes(&out->s->index, &rows, &n_rows, err);
    for (int32_t i = 0; i < n_rows && !status; i++) {
        paged__entry entry;
        if (key && paged__index_get(&out->s->index, rows[i].id, key, &entry, NULL) != PAGED_OK) continue;
        status = export_shape(out, &rows[i], key, count_all(rows, n_rows), watch, report, err);
        n_done++;
    }
    paged__shape_rows_free(rows, n_rows);
    if (!status && key && !n_done)
        status = paged__fail(err, PAGED_ERR_NOT_FOUND, "there is no record of this key");
    if (!status) status = put_number(out, THE_END, err);
    if (!status) status = put_bytes(out, &(uint64_t){(uint64_t)report->n_records}, 8, err);
    return status;
}

paged_status paged__tool_export(const paged_store *store, const paged_key *key, const char *path,
                                const paged__tool_watch *watch, paged__tool_report *report,
                                paged_error *err) {
    const paged__system_calls *sys = paged__system();
    const size_t path_bytes = strlen(path) + sizeof ".part";
    char *part = paged__alloc(path_bytes, 1);
    *report = (paged__tool_report){0};
    if (!part) return paged__fail(err, PAGED_ERR_NO_MEMORY, "%zu bytes", path_bytes);
    snprintf(part, path_bytes, "%s.part", path);
    out_file out = {.s = store_of(store), .path = path};
    out.fd = sys->open(AT_FDCWD, part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    paged_status status =
        out.fd < 0 ? paged__io_fail(err, part, errno) : export_all(&out, key, watch, report, err);
    if (!status && sys->sync_data(out.fd) != 0) status = paged__io_fail(err, part, errno);
    if (out.fd >= 0) close(out.fd);
    if (!status && sys->rename(AT_FDCWD, part, path) != 0) status = paged__io_fail(err, path, errno);
    if (status && out.fd >= 0) sys->unlink(AT_FDCWD, part);
    paged__free(part);
    return status;
}

/* ---- import ---- */

typedef struct in_file {
    const char *path;
    int fd;
    int64_t at, size;
    int64_t n_records;
} in_file;

static paged_status take_parts(in_file *in, struct iovec *parts, int n_parts, paged_error *err) {
    int64_t bytes = 0;
    for (int i = 0; i < n_parts; i++) bytes += (int64_t)parts[i].iov_len;
    const int error = paged__read_all(in->fd, parts, n_parts, in->at);
    if (error == ENODATA)
        return paged__fail(err, PAGED_ERR_FORMAT,
                           "%s is cut: %" PRId64 " bytes wanted at %" PRId64 " of %" PRId64, in->path, bytes,
                           in->at, in->size);
    if (error) return paged__io_fail(err, in->path, error);
    in->at += bytes;
    return PAGED_OK;
}

static paged_status take_bytes(in_file *in, void *bytes, size_t n, paged_error *err) {
    return take_parts(in, &(struct iovec){bytes, n}, 1, err);
}

static paged_status bad(const in_file *in, paged_error *err, const char *what) {
    return paged__fail(err, PAGED_ERR_FORMAT, "%s: %s (at byte %" PRId64 ", after %" PRId64 " records)",
                       in->path, what, in->at, in->n_records);
}

/* What follows its mark. The shape is the caller's to free. */
static paged_status take_section(in_file *in, paged__shape *out, paged_error *err) {
    section sec = {.mark = SECTION};
    uint8_t fingerprint[PAGED__FINGERPRINT_MAX];
    uint64_t sum;
    paged_status status =
        take_bytes(in, (uint8_t *)&sec + sizeof sec.mark, sizeof sec - sizeof sec.mark, err);
    if (status) return status;
    if (sec.fingerprint_bytes < 1 || sec.fingerprint_bytes > sizeof fingerprint)
        return bad(in, err, "a section is damaged");
    status = take_bytes(in, fingerprint, sec.fingerprint_bytes, err);
    if (!status) status = take_bytes(in, &sum, sizeof sum, err);
    if (status) return status;
    if (sum != section_sum(&sec, fingerprint)) return bad(in, err, "a section is damaged");
    paged_store_shape shape = {.fingerprint = fingerprint,
                               .fingerprint_bytes = sec.fingerprint_bytes,
                               .block_size = sec.block_size,
                               .n_groups = sec.n_groups};
    for (int32_t g = 0; g < PAGED_GROUPS_MAX; g++) shape.block_bytes[g] = sec.block_bytes[g];
    status = paged__shape_copy(out, &shape, err);
    return status == PAGED_ERR_INVALID_ARG ? bad(in, err, "a section cannot be") : status;
}

/* What follows its groups; record has buffers, front [front_bytes]. */
static paged_status take_one(in_file *in, const paged__shape *shape, uint32_t groups, paged_record *record,
                             uint8_t *front, paged_error *err) {
    struct iovec parts[PAGED__RECORD_PARTS];
    if (groups >> shape->is.n_groups) return bad(in, err, "a record is damaged");
    const int n_parts = paged__record_parts(shape, record, groups, front, parts);
    const paged_status status = take_parts(in, parts, n_parts, err);
    if (status) return status;
    record->key = paged__record_key(front);
    bool is_right = paged__record_open(shape, front, record) && record->groups == groups;
    for (int32_t g = 0; g < shape->is.n_groups && is_right; g++)
        if (groups >> g & 1) is_right = paged__record_group_right(shape, front, g, record->bytes[g]);
    in->n_records++;
    return is_right ? PAGED_OK : bad(in, err, "a record is damaged");
}

/* One pass: s NULL: only looks. */
static paged_status take_records(in_file *in, const paged__shape *shape, const paged_store *store,
                                 const paged__tool_watch *watch, paged__tool_report *report,
                                 paged_error *err) {
    paged_record record;
    uint32_t groups = 0;
    uint8_t *front = paged__alloc(shape->front_bytes, 1);
    paged_status status = take_record(shape, &record, err);
    if (!status && !front) status = paged__fail(err, PAGED_ERR_NO_MEMORY, "%zu bytes", shape->front_bytes);
    while (!status) {
        status = take_bytes(in, &groups, sizeof groups, err);
        if (status || groups == 0) break;
        status = take_one(in, shape, groups, &record, front, err);
        if (!status && store) {
            report->n_known += store->find(store->self, &record.key, 1);
            status = store->write(store->self, &record, err);
            report->n_records += !status;
            report->bytes += (int64_t)(shape->front_bytes + paged__record_payload(shape, groups));
        }
        tell(watch, in->at + (store ? in->size : 0), 2 * in->size);
    }
    free_record(&record);
    paged__free(front);
    return status;
}

static paged_status import_pass(in_file *in, const paged_store *store, const paged__tool_watch *watch,
                                paged__tool_report *report, paged_error *err) {
    char found[sizeof export_magic];
    uint32_t version = 0, mark = 0;
    uint64_t n_records = 0;
    in->at = in->n_records = 0;
    paged_status status = take_bytes(in, found, sizeof found, err);
    if (!status) status = take_bytes(in, &version, sizeof version, err);
    if (status) return status;
    if (memcmp(found, export_magic, sizeof found) != 0)
        return bad(in, err, "not a file of paged store export");
    if (version != EXPORT_VERSION) return bad(in, err, "of another version");
    for (;;) {
        paged__shape shape;
        status = take_bytes(in, &mark, sizeof mark, err);
        if (status || mark == THE_END) break;
        if (mark != SECTION) return bad(in, err, "no section where one should be");
        status = take_section(in, &shape, err);
        if (status) return status;
        if (store) status = paged__file_store_use(store_of(store), &shape.is, err);
        if (!status) status = take_records(in, &shape, store, watch, report, err);
        paged__shape_free(&shape);
        if (status) return status;
    }
    if (!status) status = take_bytes(in, &n_records, sizeof n_records, err);
    if (!status && n_records != (uint64_t)in->n_records) status = bad(in, err, "records are missing");
    if (!status && in->at != in->size) status = bad(in, err, "something follows its end");
    return status;
}

paged_status paged__tool_import(const paged_store *store, const char *path, const paged__tool_watch *watch,
                                paged__tool_report *report, paged_error *err) {
    struct stat info;
    in_file in = {.path = path};
    *report = (paged__tool_report){0};
    in.fd = paged__system()->open(AT_FDCWD, path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
    if (in.fd < 0) return paged__io_fail(err, path, errno);
    paged_status status = PAGED_OK;
    if (paged__system()->stat(in.fd, &info) != 0)
        status = paged__io_fail(err, path, errno);
    else if (!S_ISREG(info.st_mode))
        status = paged__fail(err, PAGED_ERR_IO, "%s: not a regular file", path);
    else
        in.size = info.st_size;
    if (!status) status = import_pass(&in, NULL, watch, report, err);
    if (!status) status = import_pass(&in, store, watch, report, err);
    close(in.fd);
    const paged_status flushed = paged__file_store_commit(store_of(store), status ? NULL : err);
    return status ? status : flushed;
}
