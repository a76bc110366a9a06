/* file_index.c: what is where, in SQLite (WAL, one connection that nobody shares). Durable with each
 * commit. */
#include <stdio.h>
#include <stdlib.h>

#include "store/file_sql.h"

static paged_status fail(const paged__index *index, int code, paged_error *err) {
    paged_status status = PAGED_ERR_IO;
    switch (code & 0xff) {
    /* The words are ours and right, so what they speak of is wrong. */
    case SQLITE_ERROR:
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
        status = PAGED_ERR_CORRUPT;
        break;
    case SQLITE_NOMEM:
        status = PAGED_ERR_NO_MEMORY;
        break;
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
        status = PAGED_ERR_LIMIT;
        break;
    default:
        break;
    }
    return paged__fail(err, status, "%s: %s (SQLite %d)", index->path, sqlite3_errstr(code), code);
}

static int code_of(const paged__index *index) {
    return sqlite3_extended_errcode(index->db);
}

/* ---- running statements ---- */

static sqlite3_stmt *prepared(paged__index *index, statement which) {
    return index->statements[which];
}

/* Ends a statement whose last step gave `code`. */
static paged_status end(paged__index *index, sqlite3_stmt *stmt, int code, paged_error *err) {
    const int extended = code == SQLITE_ROW || code == SQLITE_DONE ? SQLITE_OK : code_of(index);
    sqlite3_reset(stmt);
    sqlite3_clear_bindings(stmt);
    return extended == SQLITE_OK ? PAGED_OK : fail(index, extended, err);
}

static void bind_key(sqlite3_stmt *stmt, int at, const paged_key *key) {
    sqlite3_bind_blob(stmt, at, key->bytes, sizeof key->bytes, SQLITE_STATIC);
}

/* A binding that had no memory leaves a NULL there, which the schema or the comparison refuses. */
static paged_status run(paged__index *index, statement which, paged_error *err) {
    sqlite3_stmt *stmt = prepared(index, which);
    return end(index, stmt, sqlite3_step(stmt), err);
}

bool paged__index_is_open(const paged__index *index) {
    return index->n_waiting || index->is_begun;
}

bool paged__index_is_lost(const paged__index *index) {
    return index->is_torn || (index->is_begun && sqlite3_get_autocommit(index->db));
}

static paged_status put_waiting(paged__index *index, paged_error *err);
static void drop_waiting(paged__index *index);

/* A change, inside of the transaction, whose statement has its values already. */
static paged_status change(paged__index *index, statement which, paged_error *err) {
    const bool waited = which == PUT_RECENT || which == PUT_TAIL;
    paged_status status = waited ? PAGED_OK : put_waiting(index, err);
    if (!status && !index->is_begun) {
        status = run(index, BEGIN, err);
        index->is_begun = !status;
    }
    if (status) {
        sqlite3_clear_bindings(prepared(index, which));
        return status;
    }
    return run(index, which, err);
}

/* Nothing waits. If it fails, a rollback is to follow. */
static paged_status commit(paged__index *index, paged_error *err) {
    const paged_status status = index->is_begun ? run(index, COMMIT, err) : PAGED_OK;
    if (!status) index->is_begun = false;
    return status;
}

paged_status paged__index_commit(paged__index *index, paged_error *err) {
    paged_status status = put_waiting(index, err);
    if (!status) status = commit(index, err);
    if (!status && index->next_row > index->merge_at) paged__index_merge(index);
    return status;
}

void paged__index_rollback(paged__index *index) {
    if (!sqlite3_get_autocommit(index->db)) run(index, ROLLBACK, NULL);
    index->is_begun = index->is_torn = false;
    drop_waiting(index);
    paged__known_free(&index->known); /* rows may be where they were before */
}

/* Inside of the transaction. */
static paged_status merge(paged__index *index, paged_error *err) {
    paged_status status = change(index, MERGE, err);
    if (!status && sqlite3_changes64(index->db)) status = change(index, MERGED, err);
    if (status) return status;
    paged__known_merged(&index->known);
    index->next_row = 1;
    index->recent_since = INT64_MAX;
    index->merge_at = PAGED__RECENT_MAX;
    return PAGED_OK;
}

void paged__index_merge(paged__index *index) {
    const int64_t next_row = index->next_row;
    paged_status status = merge(index, NULL);
    if (!status) status = commit(index, NULL);
    if (!status) return;
    paged__index_rollback(index);
    index->merge_at = next_row + PAGED__RECENT_MAX; /* not at once again */
}

/* ---- open and close ---- */

static paged_status exec(paged__index *index, const char *sql, paged_error *err) {
    return sqlite3_exec(index->db, sql, NULL, NULL, NULL) == SQLITE_OK ? PAGED_OK
                                                                       : fail(index, code_of(index), err);
}

/* The first column of the first row. */
static paged_status ask(paged__index *index, const char *sql, int64_t *out, char *text, size_t text_bytes,
                        paged_error *err) {
    sqlite3_stmt *stmt = NULL;
    int code = sqlite3_prepare_v2(index->db, sql, -1, &stmt, NULL);
    if (code == SQLITE_OK) code = sqlite3_step(stmt);
    if (code == SQLITE_ROW && out) *out = sqlite3_column_int64(stmt, 0);
    if (code == SQLITE_ROW && text) {
        const char *found = (const char *)sqlite3_column_text(stmt, 0);
        snprintf(text, text_bytes, "%s", found ? found : "");
    }
    const int extended = code == SQLITE_ROW ? SQLITE_OK : code_of(index);
    sqlite3_finalize(stmt);
    if (code == SQLITE_DONE) return paged__fail(err, PAGED_ERR_CORRUPT, "%s: no answer", index->path);
    return extended == SQLITE_OK ? PAGED_OK : fail(index, extended, err);
}

static paged_status check_version(paged__index *index, bool *is_new, paged_error *err) {
    int64_t version, id, n_tables;
    paged_status status = ask(index, "SELECT count(*) FROM sqlite_master", &n_tables, NULL, 0, err);
    if (!status) status = ask(index, "PRAGMA user_version", &version, NULL, 0, err);
    if (!status) status = ask(index, "PRAGMA application_id", &id, NULL, 0, err);
    if (status) return status;
    *is_new = n_tables == 0 && version == 0 && id == 0;
    if (*is_new) return PAGED_OK;
    if (id != APPLICATION_ID)
        return paged__fail(err, PAGED_ERR_FORMAT,
                           "%s is a database, but not of paged; give another directory", index->path);
    if (version < 1 || version > PAGED__INDEX_VERSION)
        return paged__fail(
            err, PAGED_ERR_FORMAT,
            "%s has version %lld, and this program knows %d: give another directory, or run the "
            "program that made it",
            index->path, (long long)version, PAGED__INDEX_VERSION);
    char said[200];
    status = ask(index, "PRAGMA integrity_check(1)", NULL, said, sizeof said, err);
    if (!status && strcmp(said, "ok") != 0)
        return paged__fail(err, PAGED_ERR_CORRUPT, "%s: %s", index->path, said);
    return status;
}

/* What integrity_check does not know of: no two records have a slot or a key in common. */
static paged_status check_rows(paged__index *index, paged_error *err) {
    int64_t slot = 0, key = 0, row = 0;
    paged_status status = ask(index, slot_twice, &slot, NULL, 0, err);
    if (!status) status = ask(index, key_twice, &key, NULL, 0, err);
    if (!status) status = ask(index, row_wrong, &row, NULL, 0, err);
    if (status || !(slot || key || row)) return status;
    return paged__fail(err, PAGED_ERR_CORRUPT, "%s: %s", index->path,
                       slot  ? "two records in one slot"
                       : key ? "two records of one key"
                             : "a row that cannot be");
}

static paged_status prepare(paged__index *index, paged_error *err) {
    static const char *const texts[] = {
#define STATEMENT_TEXT(name, sql) sql,
        STATEMENTS(STATEMENT_TEXT)
#undef STATEMENT_TEXT
    };
    for (int i = 0; i < N_STATEMENTS; i++) {
        const int code = sqlite3_prepare_v3(index->db, texts[i], -1, SQLITE_PREPARE_PERSISTENT,
                                            &index->statements[i], NULL);
        /* A table or a column that is not there is damage that no check sees. */
        if (code == SQLITE_ERROR)
            return paged__fail(err, PAGED_ERR_CORRUPT, "%s: %s", index->path, sqlite3_errmsg(index->db));
        if (code != SQLITE_OK) return fail(index, code_of(index), err);
    }
    return PAGED_OK;
}

/* As a URI that says nothing else will change it, so that neither locks nor files beside it are made. */
static char *immutable_uri(const char *path) {
    char *uri = paged__alloc(strlen(path) + 1, 3);
    if (!uri) return NULL;
    char *full = paged__alloc(3 * strlen(path) + 32, 1);
    if (full) {
        char *out = uri;
        for (const char *c = path; *c; c++)
            if (*c == '%' || *c == '?' || *c == '#')
                out += snprintf(out, 4, "%%%02x", (unsigned char)*c);
            else
                *out++ = *c;
        *out = 0;
        snprintf(full, 3 * strlen(path) + 32, "file:%s?immutable=1", uri);
    }
    paged__free(uri);
    return full;
}

/* Tables that an older index lacks. */
static paged_status see_newer(paged__index *index, bool read_only, paged_error *err) {
    int64_t pins = 0, recent = 0;
    paged_status status =
        ask(index, "SELECT count(*) FROM sqlite_master WHERE name = 'pins'", &pins, NULL, 0, err);
    if (!status)
        status =
            ask(index, "SELECT count(*) FROM sqlite_master WHERE name = 'recent'", &recent, NULL, 0, err);
    if (!status && !pins) status = exec(index, read_only ? no_pins_schema : pins_schema, err);
    if (!status && !recent) status = exec(index, read_only ? no_recent_schema : recent_schema, err);
    return status;
}

paged_status paged__index_open(paged__index *index, const char *path, bool read_only, paged_error *err) {
    *index = (paged__index){.path = path, .merge_at = PAGED__RECENT_MAX};
    char *uri = read_only ? immutable_uri(path) : NULL;
    if (read_only && !uri) return paged__fail(err, PAGED_ERR_NO_MEMORY, "%s", path);
    const int flags =
        read_only ? SQLITE_OPEN_READONLY | SQLITE_OPEN_URI : SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE;
    const int code = sqlite3_open_v2(uri ? uri : path, &index->db, flags | SQLITE_OPEN_NOMUTEX, NULL);
    paged__free(uri);
    paged_status status = PAGED_OK;
    bool is_new = false;
    if (code != SQLITE_OK) status = fail(index, index->db ? code_of(index) : code, err);
    /* Before anything is sorted: there may be no room for files. */
    if (!status) status = exec(index, "PRAGMA temp_store=MEMORY", err);
    /* Exclusive: nobody else has the directory, and no shared memory is needed. */
    if (!status && !read_only) status = exec(index, "PRAGMA locking_mode=EXCLUSIVE", err);
    if (!status) status = check_version(index, &is_new, err);
    if (!status && is_new && read_only) status = paged__fail(err, PAGED_ERR_NOT_FOUND, "%s is empty", path);
    if (!status && !read_only && sqlite3_db_readonly(index->db, "main"))
        status = paged__fail(err, PAGED_ERR_CORRUPT, "%s: its header says that it cannot be written", path);
    if (!status && !read_only)
        status =
            exec(index, "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA journal_size_limit=4194304",
                 err);
    if (!status && is_new) {
        status = exec(index, "BEGIN IMMEDIATE", err);
        if (!status) status = exec(index, pins_schema, err);
        if (!status) status = exec(index, schema, err);
        if (!status) status = exec(index, recent_schema, err);
        if (!status) status = exec(index, "COMMIT", err);
    }
    if (!status && !is_new) status = see_newer(index, read_only, err);
    if (!status && !is_new) status = check_rows(index, err);
    if (!status && !is_new && !read_only)
        exec(index, slots_schema, NULL); /* a full disk has no room for it */
    if (!status) status = prepare(index, err);
    /* What a crash has left in the log goes into the file, so that the log begins anew. */
    if (!status && !read_only) status = exec(index, "PRAGMA wal_checkpoint(TRUNCATE)", err);
    if (status) paged__index_close(index);
    return status;
}

void paged__index_close(paged__index *index) {
    for (int i = 0; i < N_STATEMENTS; i++) sqlite3_finalize(index->statements[i]);
    sqlite3_close(index->db);
    drop_waiting(index);
    paged__known_free(&index->known);
    *index = (paged__index){0};
}

paged_status paged__index_vacuum(paged__index *index, paged_error *err) {
    paged_status status = exec(index, "VACUUM", err);
    return status ? status : exec(index, "PRAGMA wal_checkpoint(TRUNCATE)", err);
}

/* ---- shapes ---- */

/* False: what the row says cannot be. */
static bool read_shape(sqlite3_stmt *stmt, paged__shape_row *row, paged_status *status, paged_error *err) {
    uint64_t block_bytes[PAGED_GROUPS_MAX] = {0};
    const size_t n_bytes = (size_t)sqlite3_column_bytes(stmt, 3);
    paged_store_shape shape = {.fingerprint = sqlite3_column_blob(stmt, 1),
                               .fingerprint_bytes = (size_t)sqlite3_column_bytes(stmt, 1),
                               .block_size = sqlite3_column_int(stmt, 2),
                               .n_groups = (int32_t)(n_bytes / sizeof block_bytes[0])};
    *row = (paged__shape_row){.id = sqlite3_column_int64(stmt, 0),
                              .slot_bytes = sqlite3_column_int64(stmt, 4),
                              .n_records = sqlite3_column_int64(stmt, 5),
                              .last_slot = sqlite3_column_int64(stmt, 6),
                              .last_used = sqlite3_column_int64(stmt, 7),
                              .last_used_at = sqlite3_column_int64(stmt, 8),
                              .n_pinned = sqlite3_column_int64(stmt, 9),
                              .has_pins = sqlite3_column_int(stmt, 10) != 0};
    if (n_bytes > sizeof block_bytes || n_bytes % sizeof block_bytes[0] || row->slot_bytes < 1) return false;
    if (n_bytes) memcpy(block_bytes, sqlite3_column_blob(stmt, 3), n_bytes);
    for (int32_t g = 0; g < shape.n_groups; g++) shape.block_bytes[g] = block_bytes[g];
    *status = paged__shape_copy(&row->shape, &shape, err);
    return *status == PAGED_OK;
}

paged_status paged__index_shapes(paged__index *index, paged__shape_row **rows, int32_t *n_rows,
                                 paged_error *err) {
    sqlite3_stmt *stmt = prepared(index, SHAPES);
    paged__shape_row *list = NULL;
    int32_t n = 0, n_room = 0;
    int code;
    paged_status status = put_waiting(index, err);
    if (status) return status;
    while ((code = sqlite3_step(stmt)) == SQLITE_ROW) {
        if (n == n_room) {
            n_room = n_room ? 2 * n_room : 4;
            paged__shape_row *more = paged__alloc((size_t)n_room, sizeof *more);
            if (!more) {
                status = paged__fail(err, PAGED_ERR_NO_MEMORY, "%d shapes", n_room);
                break;
            }
            if (n) memcpy(more, list, (size_t)n * sizeof *more);
            paged__free(list);
            list = more;
        }
        if (!read_shape(stmt, &list[n], &status, err)) {
            if (status != PAGED_ERR_NO_MEMORY)
                status = paged__fail(err, PAGED_ERR_CORRUPT, "%s: shape %lld cannot be", index->path,
                                     (long long)sqlite3_column_int64(stmt, 0));
            break;
        }
        n++;
    }
    const paged_status ended = end(index, stmt, code, status ? NULL : err);
    if (!status) status = ended;
    if (status) {
        paged__shape_rows_free(list, n);
        return status;
    }
    *rows = list;
    *n_rows = n;
    return PAGED_OK;
}

void paged__shape_rows_free(paged__shape_row *rows, int32_t n_rows) {
    for (int32_t i = 0; i < n_rows; i++) paged__shape_free(&rows[i].shape);
    paged__free(rows);
}

paged_status paged__index_add_shape(paged__index *index, const paged__shape *shape, int64_t slot_bytes,
                                    int64_t *id, paged_error *err) {
    sqlite3_stmt *stmt = prepared(index, ADD_SHAPE);
    uint64_t block_bytes[PAGED_GROUPS_MAX];
    for (int32_t g = 0; g < shape->is.n_groups; g++) block_bytes[g] = shape->is.block_bytes[g];
    sqlite3_bind_blob(stmt, 1, shape->is.fingerprint, (int)shape->is.fingerprint_bytes, SQLITE_STATIC);
    sqlite3_bind_int(stmt, 2, shape->is.block_size);
    sqlite3_bind_blob(stmt, 3, block_bytes, shape->is.n_groups * (int)sizeof block_bytes[0], SQLITE_STATIC);
    sqlite3_bind_int64(stmt, 4, slot_bytes);
    const paged_status status = change(index, ADD_SHAPE, err);
    if (!status) *id = sqlite3_last_insert_rowid(index->db);
    return status;
}

static paged_status change_by_number(paged__index *index, statement which, int64_t first, paged_error *err) {
    sqlite3_bind_int64(prepared(index, which), 1, first);
    return change(index, which, err);
}

/* Of both tables: `which` is of `records`, and the next of `recent`. n: how many rows that were, or NULL. */
static paged_status change_both(paged__index *index, statement which, int64_t first, int64_t second,
                                int64_t *n, paged_error *err) {
    int64_t n_rows = 0;
    paged_status status = PAGED_OK;
    for (int i = 0; i < 2 && !status; i++) {
        sqlite3_stmt *stmt = prepared(index, which + (statement)i);
        if (sqlite3_bind_parameter_count(stmt) > 1) sqlite3_bind_int64(stmt, 2, second);
        status = change_by_number(index, which + (statement)i, first, err);
        if (!status) n_rows += sqlite3_changes64(index->db);
    }
    if (n) *n = status ? 0 : n_rows;
    return status;
}

paged_status paged__index_drop_shape(paged__index *index, int64_t id, paged_error *err) {
    paged_status status = change_both(index, DROP_RECORDS, id, 0, NULL, err);
    if (!status) status = change_by_number(index, DROP_PINS, id, err);
    return status ? status : change_by_number(index, DROP_SHAPE, id, err);
}

/* ---- records ---- */

static void read_key(sqlite3_stmt *stmt, int column, paged_key *out) {
    *out = (paged_key){{0}};
    if (sqlite3_column_bytes(stmt, column) == sizeof *out)
        memcpy(out, sqlite3_column_blob(stmt, column), sizeof *out);
}

static void read_entry(sqlite3_stmt *stmt, paged__entry *out) {
    read_key(stmt, 0, &out->key);
    out->slot = sqlite3_column_int64(stmt, 1);
    read_key(stmt, 2, &out->parent);
    out->first = sqlite3_column_int(stmt, 3);
    out->n_tokens = sqlite3_column_int(stmt, 4);
    out->groups = (uint32_t)sqlite3_column_int64(stmt, 5);
    out->used_at = sqlite3_column_int64(stmt, 6);
    out->row = (uint32_t)sqlite3_column_int64(stmt, 7);
}

/* Stands in the table of keys for the tails behind a record. */
static paged_key tails_of(const paged_key *parent) {
    paged_key key = *parent;
    for (size_t i = 0; i < sizeof key.bytes; i++) key.bytes[i] ^= 0xff;
    return key;
}

/* Reads again which keys there are. */
static paged_status read_known(paged__index *index, paged_error *err) {
    int64_t n, used;
    paged_status status = put_waiting(index, err);
    if (!status) status = paged__index_counts(index, &n, &used, err);
    if (status) return status;
    index->next_row = 1;
    index->recent_since = INT64_MAX;
    if (!paged__known_make(&index->known, 2 * n)) /* each may be a tail */
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "%lld keys", (long long)n);
    sqlite3_stmt *stmt = prepared(index, KEYS);
    int code;
    while ((code = sqlite3_step(stmt)) == SQLITE_ROW) {
        paged_key key;
        int64_t row = sqlite3_column_int64(stmt, 1);
        read_key(stmt, 0, &key);
        if (row == -1) {
            key = tails_of(&key);
            row = 0;
        }
        if (row < 0 || row > PAGED__ROW_MAX || !paged__known_add(&index->known, &key, (uint32_t)row)) {
            status =
                paged__fail(err, PAGED_ERR_CORRUPT, "%s: row %lld cannot be", index->path, (long long)row);
            break;
        }
        if (row > 0) index->recent_since = PAGED_MIN(index->recent_since, sqlite3_column_int64(stmt, 2));
        index->next_row = PAGED_MAX(index->next_row, row + 1);
    }
    const paged_status ended = end(index, stmt, code, status ? NULL : err);
    if (!status) status = ended;
    if (status) paged__known_free(&index->known);
    return status;
}

static paged_status get_from(paged__index *index, statement which, int64_t shape, const paged_key *key,
                             uint32_t row, paged__entry *out, paged_error *err) {
    sqlite3_stmt *stmt = prepared(index, which);
    sqlite3_bind_int64(stmt, 1, shape);
    bind_key(stmt, 2, key);
    if (row) sqlite3_bind_int64(stmt, 3, row);
    const int code = sqlite3_step(stmt);
    if (code == SQLITE_ROW) read_entry(stmt, out);
    const paged_status status = end(index, stmt, code, err);
    return status ? status : code == SQLITE_ROW ? PAGED_OK : PAGED_ERR_NOT_FOUND;
}

paged_status paged__index_get(paged__index *index, int64_t shape, const paged_key *key, paged__entry *out,
                              paged_error *err) {
    uint64_t n_seen = 0;
    uint32_t row;
    bool may_be = false;
    paged_status status = index->known.n_room ? PAGED_OK : read_known(index, err);
    if (status) return status;
    const int64_t first_waiting = index->next_row - index->n_waiting;
    while (paged__known_next(&index->known, key, &n_seen, &row)) {
        may_be = true;
        const paged__waiting *waiting = row >= first_waiting ? &index->waiting[row - first_waiting] : NULL;
        if (waiting && waiting->shape == shape && paged__key_equal(&waiting->entry.key, key)) {
            *out = waiting->entry;
            return PAGED_OK;
        }
        status = row ? get_from(index, GET_RECENT, shape, key, row, out, err) : PAGED_ERR_NOT_FOUND;
        if (status != PAGED_ERR_NOT_FOUND) return status;
    }
    return may_be ? get_from(index, GET, shape, key, 0, out, err) : PAGED_ERR_NOT_FOUND;
}

static uint8_t *big_endian(const int32_t *tokens, int32_t n_tokens) {
    uint8_t *bytes = paged__alloc((size_t)n_tokens, 4);
    for (int32_t i = 0; bytes && i < n_tokens; i++) {
        const uint32_t swapped = __builtin_bswap32((uint32_t)tokens[i]);
        memcpy(bytes + 4 * (size_t)i, &swapped, 4);
    }
    return bytes;
}

static int32_t common_tokens(sqlite3_stmt *stmt, int column, const uint8_t *bytes, int32_t n_tokens) {
    const uint8_t *tail = sqlite3_column_blob(stmt, column);
    const int32_t n = PAGED_MIN(sqlite3_column_bytes(stmt, column) / 4, n_tokens);
    int32_t i = 0;
    while (i < n && memcmp(tail + 4 * (size_t)i, bytes + 4 * (size_t)i, 4) == 0) i++;
    return i;
}

/* In the order of tokens the tail that agrees longest is the one before the prompt or the one behind it. */
paged_status paged__index_tail(paged__index *index, int64_t shape, const paged_key *parent,
                               const int32_t *tokens, int32_t n_tokens, paged__entry *out, int32_t *n_common,
                               paged_error *err) {
    const paged_key tails = tails_of(parent);
    uint64_t n_seen = 0;
    uint32_t row;
    paged_status status = index->known.n_room ? PAGED_OK : read_known(index, err);
    if (status) return status;
    if (!paged__known_next(&index->known, &tails, &n_seen, &row)) return PAGED_ERR_NOT_FOUND;
    if (index->has_tails) status = put_waiting(index, err);
    if (status) return status;
    uint8_t *bytes = big_endian(tokens, n_tokens);
    if (!bytes) return paged__fail(err, PAGED_ERR_NO_MEMORY, "%d tokens", n_tokens);
    int32_t best = 0;
    for (int side = 0; side < 2 && !status; side++) {
        sqlite3_stmt *stmt = prepared(index, side ? TAIL_AFTER : TAIL_BEFORE);
        sqlite3_bind_int64(stmt, 1, shape);
        bind_key(stmt, 2, parent);
        sqlite3_bind_blob(stmt, 3, bytes, 4 * n_tokens, SQLITE_STATIC);
        const int code = sqlite3_step(stmt);
        const int32_t n = code == SQLITE_ROW ? common_tokens(stmt, 8, bytes, n_tokens) : 0;
        if (n > best) {
            read_entry(stmt, out);
            best = n;
        }
        status = end(index, stmt, code, err);
    }
    paged__free(bytes);
    if (status) return status;
    if (best == 0) return PAGED_ERR_NOT_FOUND;
    *n_common = best;
    return PAGED_OK;
}

static void bind_row(sqlite3_stmt *stmt, int64_t shape, const paged__entry *entry, int64_t used) {
    bind_key(stmt, 1, &entry->key);
    sqlite3_bind_int64(stmt, 2, entry->slot);
    bind_key(stmt, 3, &entry->parent);
    sqlite3_bind_int(stmt, 4, entry->first);
    sqlite3_bind_int(stmt, 5, entry->n_tokens);
    sqlite3_bind_int64(stmt, 6, entry->groups);
    sqlite3_bind_int64(stmt, 7, entry->used_at);
    sqlite3_bind_int64(stmt, 8, used);
    sqlite3_bind_int64(stmt, 9, shape);
}

static void drop_waiting(paged__index *index) {
    for (int32_t i = 0; i < index->n_waiting; i++) paged__free(index->waiting[i].tail);
    index->n_waiting = 0;
    index->has_tails = false;
}

/* All at once, since what SQLite needs has left the caches by the time of the next record. If it fails, they
 * are lost with the transaction. They are, too, if that was lost before: a row that waits may be there in the
 * place of one that was erased. */
static paged_status put_waiting(paged__index *index, paged_error *err) {
    if (paged__index_is_lost(index))
        return paged__fail(err, PAGED_ERR_IO, "%s: SQLite has given up the transaction", index->path);
    for (int32_t i = 0; i < index->n_waiting; i++) {
        const paged__waiting *w = &index->waiting[i];
        const statement which = w->tail ? PUT_TAIL : PUT_RECENT;
        sqlite3_stmt *stmt = prepared(index, which);
        bind_row(stmt, w->shape, &w->entry, w->used);
        if (w->tail)
            sqlite3_bind_blob(stmt, 10, w->tail, 4 * w->entry.n_tokens, SQLITE_STATIC);
        else
            sqlite3_bind_int64(stmt, 10, w->entry.row);
        const paged_status status = change(index, which, err);
        index->is_torn = status != PAGED_OK;
        if (status) return status;
    }
    drop_waiting(index);
    return PAGED_OK;
}

paged_status paged__index_put(paged__index *index, int64_t shape, const paged__entry *entry, int64_t used,
                              const int32_t *tokens, paged_error *err) {
    paged_status status = index->known.n_room ? PAGED_OK : read_known(index, err);
    if (!status && index->n_waiting == PAGED__WAITING_MAX) status = put_waiting(index, err);
    if (status) return status;
    uint8_t *tail = tokens ? big_endian(tokens, entry->n_tokens) : NULL;
    if (tokens && !tail) return paged__fail(err, PAGED_ERR_NO_MEMORY, "%d tokens", entry->n_tokens);
    paged__waiting *w = &index->waiting[index->n_waiting++];
    *w = (paged__waiting){.entry = *entry, .shape = shape, .used = used, .tail = tail};
    w->entry.row = (uint32_t)index->next_row++;
    index->has_tails = index->has_tails || tail;
    index->recent_since = PAGED_MIN(index->recent_since, used);
    const paged_key tails = tails_of(&entry->parent);
    if (paged__known_add(&index->known, &entry->key, w->entry.row) &&
        (!tail || paged__known_add(&index->known, &tails, 0)))
        return PAGED_OK;
    return read_known(index, err);
}

/* A statement of an entry's row, which has its other values. What was recent may have been merged. */
static paged_status change_row(paged__index *index, statement which, statement of_recent, int64_t shape,
                               const paged__entry *entry, const int64_t more[2], paged_error *err) {
    for (int i = entry->row == 0; i < 2; i++) {
        sqlite3_stmt *stmt = prepared(index, i ? which : of_recent);
        sqlite3_bind_int64(stmt, 1, shape);
        bind_key(stmt, 2, &entry->key);
        if (i == 0) sqlite3_bind_int64(stmt, 3, entry->row);
        for (int k = 0; more && k < 2; k++) sqlite3_bind_int64(stmt, 4 + k, more[k]);
        const paged_status status = change(index, i ? which : of_recent, err);
        if (status || sqlite3_changes(index->db)) return status;
    }
    return PAGED_OK;
}

paged_status paged__index_touch(paged__index *index, int64_t shape, const paged__entry *entry, int64_t used,
                                int64_t used_at, paged_error *err) {
    return change_row(index, TOUCH, TOUCH_RECENT, shape, entry, (int64_t[]){used, used_at}, err);
}

paged_status paged__index_erase(paged__index *index, int64_t shape, const paged__entry *entry,
                                paged_error *err) {
    return change_row(index, ERASE, ERASE_RECENT, shape, entry, NULL, err);
}

typedef struct aged {
    int64_t slot, used;
    paged_key key;
} aged;

/* Up to n of `records` that may go, the one that was not used for longest first. */
static paged_status oldest_merged(paged__index *index, int64_t shape, aged *out, int32_t n, int32_t *n_found,
                                  paged_error *err) {
    sqlite3_stmt *stmt = prepared(index, OLDEST);
    int code = SQLITE_DONE;
    sqlite3_bind_int64(stmt, 1, shape);
    sqlite3_bind_int64(stmt, 2, n);
    for (*n_found = 0; *n_found < n && (code = sqlite3_step(stmt)) == SQLITE_ROW; (*n_found)++) {
        out[*n_found] = (aged){.slot = sqlite3_column_int64(stmt, 0), .used = sqlite3_column_int64(stmt, 1)};
        read_key(stmt, 2, &out[*n_found].key);
    }
    return end(index, stmt, code, err);
}

/* Up to n of all. Where one that is recent might be older, it is recent no more: the order of use is that of
 * `records` alone. */
static paged_status oldest(paged__index *index, int64_t shape, aged *out, int32_t n, int32_t *n_found,
                           paged_error *err) {
    paged_status status = index->known.n_room ? PAGED_OK : read_known(index, err);
    if (!status) status = oldest_merged(index, shape, out, n, n_found, err);
    if (status || (*n_found == n && out[n - 1].used < index->recent_since)) return status;
    if (index->recent_since == INT64_MAX) return PAGED_OK; /* there are none */
    status = merge(index, err);
    return status ? status : oldest_merged(index, shape, out, n, n_found, err);
}

paged_status paged__index_oldest_use(paged__index *index, int64_t shape, int64_t *used, paged_error *err) {
    aged first;
    int32_t n_found;
    const paged_status status = oldest(index, shape, &first, 1, &n_found, err);
    if (!status && n_found) *used = first.used;
    return status || n_found ? status : PAGED_ERR_NOT_FOUND;
}

paged_status paged__index_evict(paged__index *index, int64_t shape, int64_t *slots, int32_t n,
                                int32_t *n_evicted, paged_error *err) {
    aged found[PAGED__EVICT_MAX];
    int32_t n_found;
    PAGED_ASSERT(n <= PAGED__EVICT_MAX);
    paged_status status = oldest(index, shape, found, n, &n_found, err);
    *n_evicted = 0;
    while (*n_evicted < n_found && !status) {
        status = paged__index_erase(index, shape, &(paged__entry){.key = found[*n_evicted].key}, err);
        /* Its slot would be given away while it is still there. */
        if (!status && sqlite3_changes(index->db) != 1)
            status = paged__fail(err, PAGED_ERR_CORRUPT, "%s: the record in slot %lld has no key",
                                 index->path, (long long)found[*n_evicted].slot);
        if (status) break;
        slots[*n_evicted] = found[*n_evicted].slot;
        (*n_evicted)++;
    }
    return status;
}

/* ---- pins ---- */

typedef struct pin {
    int64_t shape;
    paged_key key;
} pin;

typedef struct pin_list { /* in the order of compare_pins, each once */
    pin *pins;            /* [n_room] */
    int32_t n, n_room;
} pin_list;

static int compare_pins(const void *left, const void *right) {
    const pin *a = left, *b = right;
    if (a->shape != b->shape) return a->shape < b->shape ? -1 : 1;
    return memcmp(a->key.bytes, b->key.bytes, sizeof a->key.bytes);
}

static paged_status make_room(pin_list *list, int32_t n, paged_error *err) {
    if (n <= list->n_room) return PAGED_OK;
    const int32_t n_room = PAGED_MAX(n, 2 * list->n_room);
    pin *pins = paged__alloc((size_t)n_room, sizeof *pins);
    if (!pins) return paged__fail(err, PAGED_ERR_NO_MEMORY, "%d pins", n_room);
    if (list->n) memcpy(pins, list->pins, (size_t)list->n * sizeof *pins);
    paged__free(list->pins);
    list->pins = pins;
    list->n_room = n_room;
    return PAGED_OK;
}

/* What a name pins, as SQLite gives it: in the order that compare_pins has, too. */
static paged_status list_pinned(paged__index *index, const char *name, pin_list *out, paged_error *err) {
    sqlite3_stmt *stmt = prepared(index, PINS_OF);
    paged_status status = PAGED_OK;
    int code;
    sqlite3_bind_text(stmt, 1, name, -1, SQLITE_STATIC);
    while ((code = sqlite3_step(stmt)) == SQLITE_ROW) {
        status = make_room(out, out->n + 1, err);
        if (status) break;
        out->pins[out->n].shape = sqlite3_column_int64(stmt, 0);
        read_key(stmt, 1, &out->pins[out->n++].key);
    }
    const paged_status ended = end(index, stmt, code, status ? NULL : err);
    return status ? status : ended;
}

static paged_status list_wanted(int64_t shape, const paged_key *keys, int32_t n, pin_list *out,
                                paged_error *err) {
    const paged_status status = make_room(out, n, err);
    if (status || n == 0) return status;
    for (int32_t i = 0; i < n; i++) out->pins[i] = (pin){shape, keys[i]};
    qsort(out->pins, (size_t)n, sizeof *out->pins, compare_pins);
    for (int32_t i = 0; i < n; i++)
        if (i == 0 || compare_pins(&out->pins[i], &out->pins[i - 1]) != 0) out->pins[out->n++] = out->pins[i];
    return PAGED_OK;
}

static paged_status change_pin(paged__index *index, statement which, const char *name, const pin *of,
                               paged_error *err) {
    sqlite3_stmt *stmt = prepared(index, which);
    sqlite3_bind_text(stmt, 1, name, -1, SQLITE_STATIC);
    sqlite3_bind_int64(stmt, 2, of->shape);
    bind_key(stmt, 3, &of->key);
    return change(index, which, err);
}

paged_status paged__index_pin(paged__index *index, int64_t shape, const char *name, const paged_key *keys,
                              int32_t n, bool *differs, paged_error *err) {
    pin_list had = {0}, want = {0};
    paged_status status = list_pinned(index, name, &had, err);
    if (!status) status = list_wanted(shape, keys, n, &want, err);
    if (differs) *differs = false;
    for (int32_t h = 0, w = 0; (h < had.n || w < want.n) && !status;) {
        const int order = h == had.n ? 1 : w == want.n ? -1 : compare_pins(&had.pins[h], &want.pins[w]);
        if (differs && order) {
            *differs = true;
            break;
        }
        if (order < 0) status = change_pin(index, UNPIN, name, &had.pins[h], err);
        if (order > 0) status = change_pin(index, PIN, name, &want.pins[w], err);
        h += order <= 0;
        w += order >= 0;
    }
    paged__free(had.pins);
    paged__free(want.pins);
    return status;
}

paged_status paged__index_pins_each(paged__index *index, bool (*fn)(void *user, const char *name), void *user,
                                    paged_error *err) {
    sqlite3_stmt *stmt = prepared(index, PINS_EACH);
    int code;
    while ((code = sqlite3_step(stmt)) == SQLITE_ROW) {
        const char *name = (const char *)sqlite3_column_text(stmt, 0);
        if (name && !fn(user, name)) break;
    }
    return end(index, stmt, code, err);
}

bool paged__index_is_pinned(paged__index *index, int64_t shape, const paged_key *key) {
    sqlite3_stmt *stmt = prepared(index, IS_PINNED);
    sqlite3_bind_int64(stmt, 1, shape);
    bind_key(stmt, 2, key);
    const int code = sqlite3_step(stmt);
    end(index, stmt, code, NULL);
    return code == SQLITE_ROW;
}

paged_status paged__index_last_pinned(paged__index *index, int64_t shape, int64_t *slot, paged_error *err) {
    sqlite3_stmt *stmt = prepared(index, LAST_PINNED);
    sqlite3_bind_int64(stmt, 1, shape);
    const int code = sqlite3_step(stmt);
    *slot = code == SQLITE_ROW ? sqlite3_column_int64(stmt, 0) : -1;
    return end(index, stmt, code, err);
}

paged_status paged__index_expire(paged__index *index, int64_t before, int64_t *n_erased, paged_error *err) {
    return change_both(index, EXPIRE, before, 0, n_erased, err);
}

paged_status paged__index_erase_unpinned(paged__index *index, int64_t shape, int64_t *n_erased,
                                         paged_error *err) {
    return change_both(index, ERASE_UNPINNED, shape, 0, n_erased, err);
}

paged_status paged__index_cut(paged__index *index, int64_t shape, int64_t slot, int64_t *n_erased,
                              paged_error *err) {
    return change_both(index, CUT, shape, slot, n_erased, err);
}

paged_status paged__index_set_back(paged__index *index, int64_t now, paged_error *err) {
    return change_both(index, SET_BACK, now, 0, NULL, err);
}

paged_status paged__index_counts(paged__index *index, int64_t *n_records, int64_t *last_used,
                                 paged_error *err) {
    sqlite3_stmt *stmt = prepared(index, COUNTS);
    const int code = sqlite3_step(stmt);
    if (code == SQLITE_ROW) {
        *n_records = sqlite3_column_int64(stmt, 0);
        *last_used = sqlite3_column_int64(stmt, 1);
    }
    return end(index, stmt, code, err);
}

paged_status paged__index_slots(paged__index *index, int64_t shape, void (*fn)(void *user, int64_t slot),
                                void *user, paged_error *err) {
    sqlite3_stmt *stmt = prepared(index, SLOTS);
    int code;
    sqlite3_bind_int64(stmt, 1, shape);
    while ((code = sqlite3_step(stmt)) == SQLITE_ROW) fn(user, sqlite3_column_int64(stmt, 0));
    return end(index, stmt, code, err);
}

paged_status paged__index_each(paged__index *index, int64_t shape,
                               bool (*fn)(void *user, const paged__entry *entry), void *user,
                               paged_error *err) {
    sqlite3_stmt *stmt = prepared(index, EACH);
    paged__entry entry;
    int code;
    const paged_status status = put_waiting(index, err);
    if (status) return status;
    sqlite3_bind_int64(stmt, 1, shape);
    while ((code = sqlite3_step(stmt)) == SQLITE_ROW) {
        read_entry(stmt, &entry);
        if (!fn(user, &entry)) break;
    }
    return end(index, stmt, code, err);
}

/* ---- notes ---- */

static void bind_name(sqlite3_stmt *stmt, const char *name) {
    sqlite3_bind_text(stmt, 1, name, -1, SQLITE_STATIC);
}

paged_status paged__index_note_put(paged__index *index, const char *name, const void *data, size_t size_bytes,
                                   int64_t now, int64_t until, paged_error *err) {
    sqlite3_stmt *stmt = prepared(index, NOTE_PUT);
    bind_name(stmt, name);
    /* A NULL pointer would be a NULL and not an empty value. */
    sqlite3_bind_blob64(stmt, 2, size_bytes ? data : "", size_bytes, SQLITE_STATIC);
    sqlite3_bind_int64(stmt, 3, now);
    sqlite3_bind_int64(stmt, 4, until);
    return change(index, NOTE_PUT, err);
}

/* Up to max_bytes of the note in this row: of a long one, no more of its pages are read. */
static paged_status read_note(paged__index *index, int64_t row, size_t max_bytes, void **data,
                              size_t *size_bytes, paged_error *err) {
    sqlite3_blob *blob = NULL;
    int code = sqlite3_blob_open(index->db, "main", "notes", "data", row, 0, &blob);
    const size_t n = code ? 0 : PAGED_MIN((size_t)sqlite3_blob_bytes(blob), max_bytes);
    void *found = code ? NULL : paged__note_copy(NULL, n);
    if (found) code = sqlite3_blob_read(blob, found, (int)n, 0);
    if (code) code = code_of(index);
    sqlite3_blob_close(blob);
    if (code) free(found);
    if (code) return fail(index, code, err);
    if (!found) return paged__fail(err, PAGED_ERR_NO_MEMORY, "note of %zu bytes", n);
    *data = found;
    *size_bytes = n;
    return PAGED_OK;
}

paged_status paged__index_note_get(paged__index *index, const char *name, int64_t now, size_t max_bytes,
                                   void **data, size_t *size_bytes, paged_error *err) {
    sqlite3_stmt *stmt = prepared(index, NOTE_GET);
    bind_name(stmt, name);
    sqlite3_bind_int64(stmt, 2, now);
    const int code = sqlite3_step(stmt);
    const int64_t row = code == SQLITE_ROW ? sqlite3_column_int64(stmt, 0) : 0;
    const paged_status status = end(index, stmt, code, err);
    if (status) return status;
    if (code != SQLITE_ROW) return paged__fail(err, PAGED_ERR_NOT_FOUND, "there is no note '%s'", name);
    return read_note(index, row, max_bytes, data, size_bytes, err);
}

paged_status paged__index_note_erase(paged__index *index, const char *name, paged_error *err) {
    bind_name(prepared(index, NOTE_ERASE), name);
    const paged_status status = change(index, NOTE_ERASE, err);
    if (!status && sqlite3_changes(index->db) == 0)
        return paged__fail(err, PAGED_ERR_NOT_FOUND, "there is no note '%s'", name);
    return status;
}

paged_status paged__index_note_expire(paged__index *index, int64_t now, paged_error *err) {
    return change_by_number(index, NOTE_EXPIRE, now, err);
}

paged_status paged__index_note_each(paged__index *index, int64_t now,
                                    bool (*fn)(void *user, const char *name, int64_t changed), void *user,
                                    paged_error *err) {
    sqlite3_stmt *stmt = prepared(index, NOTE_EACH);
    int code;
    sqlite3_bind_int64(stmt, 1, now);
    while ((code = sqlite3_step(stmt)) == SQLITE_ROW)
        if (!fn(user, (const char *)sqlite3_column_text(stmt, 0), sqlite3_column_int64(stmt, 1))) break;
    return end(index, stmt, code, err);
}
