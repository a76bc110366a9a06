/* file_index.c: what is where, in SQLite (WAL, one connection that nobody shares). Durable with each
 * commit. */
#include <stdio.h>
#include <stdlib.h>

#include "store/file.h"

/* 'PGKV', by which file(1) and we tell our databases from others. */
enum { APPLICATION_ID = 0x50474b56 };

/* used: a turn, larger with each use; used_at: the clock, for the time to live. tail: the tokens of a sealed
 * tail, big-endian, so that the one that agrees longest with a prompt lies beside it in the order. */
static const char schema[] =
    "CREATE TABLE shapes(id INTEGER PRIMARY KEY AUTOINCREMENT, fingerprint BLOB NOT NULL,"
    " block_size INTEGER NOT NULL, block_bytes BLOB NOT NULL, slot_bytes INTEGER NOT NULL);"
    "CREATE TABLE records(shape INTEGER NOT NULL, key BLOB NOT NULL, slot INTEGER NOT NULL,"
    " parent BLOB NOT NULL, first INTEGER NOT NULL, n_tokens INTEGER NOT NULL, groups INTEGER NOT NULL,"
    " used INTEGER NOT NULL, used_at INTEGER NOT NULL, tail BLOB,"
    " PRIMARY KEY(shape, key)) WITHOUT ROWID;"
    "CREATE INDEX records_used ON records(shape, used, slot, used_at);"
    "CREATE INDEX records_tail ON records(shape, parent, tail) WHERE tail IS NOT NULL;"
    "CREATE TABLE notes(name TEXT PRIMARY KEY, data BLOB NOT NULL, turn INTEGER NOT NULL,"
    " changed INTEGER NOT NULL, until INTEGER NOT NULL);"
    "CREATE INDEX notes_turn ON notes(turn);"
    "PRAGMA user_version=1; PRAGMA application_id=1346849622;";
/* No index of slots: a slot is asked for by nobody while records are written, and which are taken the store
 * knows itself. One of before that goes with its first opening for writing. */
static const char slots_schema[] = "DROP INDEX IF EXISTS records_slot";
static const char twice[] = "SELECT EXISTS (SELECT 1 FROM records GROUP BY shape, slot HAVING count(*) > 1)";
/* An index from before there were pins gets them when it is opened for writing; for reading it has none. */
#define PINS_COLUMNS                                                                                         \
    "pins(shape INTEGER NOT NULL, key BLOB NOT NULL, name TEXT NOT NULL,"                                    \
    " PRIMARY KEY(shape, key, name)) WITHOUT ROWID;"
static const char pins_schema[] =
    "CREATE TABLE IF NOT EXISTS " PINS_COLUMNS "CREATE INDEX IF NOT EXISTS pins_name ON pins(name);";
static const char no_pins_schema[] = "CREATE TEMP TABLE " PINS_COLUMNS;
_Static_assert(PAGED__INDEX_VERSION == 1 && APPLICATION_ID == 1346849622, "the schema says these numbers");

#define ENTRY "key, slot, parent, first, n_tokens, groups, used_at"
#define NOT_PINNED                                                                                           \
    " AND NOT EXISTS (SELECT 1 FROM pins WHERE pins.shape = records.shape AND pins.key = records.key)"
#define PINNED_OF                                                                                            \
    " FROM pins JOIN records ON records.shape = pins.shape AND records.key = pins.key WHERE pins.shape = "
#define STATEMENTS(X)                                                                                        \
    X(BEGIN, "BEGIN IMMEDIATE")                                                                              \
    X(COMMIT, "COMMIT")                                                                                      \
    X(ROLLBACK, "ROLLBACK")                                                                                  \
    X(SHAPES, "SELECT id, fingerprint, block_size, block_bytes, slot_bytes,"                                 \
              " (SELECT count(*) FROM records WHERE shape = id),"                                            \
              " ifnull((SELECT max(slot) FROM records WHERE shape = id), -1),"                               \
              " ifnull((SELECT max(used) FROM records WHERE shape = id), 0) AS last,"                        \
              " ifnull((SELECT max(used_at) FROM records WHERE shape = id), 0),"                             \
              " (SELECT count(DISTINCT records.key)" PINNED_OF "id),"                                        \
              " EXISTS (SELECT 1 FROM pins WHERE pins.shape = id)"                                           \
              " FROM shapes ORDER BY last, id")                                                              \
    X(ADD_SHAPE, "INSERT INTO shapes(fingerprint, block_size, block_bytes, slot_bytes) VALUES(?1,?2,?3,?4)") \
    X(DROP_RECORDS, "DELETE FROM records WHERE shape = ?1")                                                  \
    X(DROP_PINS, "DELETE FROM pins WHERE shape = ?1")                                                        \
    X(DROP_SHAPE, "DELETE FROM shapes WHERE id = ?1")                                                        \
    X(GET, "SELECT " ENTRY " FROM records WHERE shape = ?1 AND key = ?2")                                    \
    X(TAIL_BEFORE, "SELECT " ENTRY ", tail FROM records WHERE shape = ?1 AND parent = ?2 AND tail <= ?3"     \
                   " ORDER BY tail DESC LIMIT 1")                                                            \
    X(TAIL_AFTER, "SELECT " ENTRY ", tail FROM records WHERE shape = ?1 AND parent = ?2 AND tail > ?3"       \
                  " ORDER BY tail LIMIT 1")                                                                  \
    X(PUT, "INSERT INTO records(shape, key, slot, parent, first, n_tokens, groups, used, used_at, tail)"     \
           " VALUES(?1,?2,?3,?4,?5,?6,?7,?8,?9,?10)")                                                        \
    X(TOUCH, "UPDATE records SET used = ?3, used_at = ?4 WHERE shape = ?1 AND key = ?2")                     \
    X(ERASE, "DELETE FROM records WHERE shape = ?1 AND key = ?2")                                            \
    X(OLDEST, "SELECT slot, used, key FROM records WHERE shape = ?1" NOT_PINNED " ORDER BY used LIMIT ?2")   \
    X(EXPIRE, "DELETE FROM records WHERE used_at < ?1" NOT_PINNED)                                           \
    X(ERASE_UNPINNED, "DELETE FROM records WHERE shape = ?1" NOT_PINNED)                                     \
    X(PIN, "INSERT INTO pins(name, shape, key) VALUES(?1,?2,?3) ON CONFLICT(shape, key, name) DO NOTHING")   \
    X(UNPIN, "DELETE FROM pins WHERE name = ?1 AND shape = ?2 AND key = ?3")                                 \
    X(PINS_OF, "SELECT shape, key FROM pins WHERE name = ?1 ORDER BY shape, key")                            \
    X(PINS_EACH, "SELECT DISTINCT name FROM pins")                                                           \
    X(IS_PINNED, "SELECT 1 FROM pins WHERE shape = ?1 AND key = ?2 LIMIT 1")                                 \
    X(LAST_PINNED, "SELECT ifnull(max(records.slot), -1)" PINNED_OF "?1")                                    \
    X(CUT, "DELETE FROM records WHERE shape = ?1 AND slot >= ?2")                                            \
    X(SET_BACK, "UPDATE records SET used_at = ?1 WHERE used_at > ?1")                                        \
    X(COUNTS, "SELECT count(*), ifnull(max(used), 0) FROM records")                                          \
    X(SLOTS, "SELECT slot FROM records WHERE shape = ?1")                                                    \
    X(EACH, "SELECT " ENTRY " FROM records WHERE shape = ?1 ORDER BY slot")                                  \
    X(NOTE_PUT, "INSERT OR REPLACE INTO notes(name, data, turn, changed, until)"                             \
                " VALUES(?1, ?2, (SELECT ifnull(max(turn), 0) + 1 FROM notes), ?3, ?4)")                     \
    X(NOTE_GET, "SELECT rowid FROM notes WHERE name = ?1 AND (until = 0 OR until > ?2)")                     \
    X(NOTE_ERASE, "DELETE FROM notes WHERE name = ?1")                                                       \
    X(NOTE_EXPIRE, "DELETE FROM notes WHERE until <> 0 AND until <= ?1")                                     \
    X(NOTE_EACH, "SELECT name, changed FROM notes WHERE until = 0 OR until > ?1 ORDER BY turn DESC")

typedef enum statement {
#define STATEMENT_NAME(name, sql) name,
    STATEMENTS(STATEMENT_NAME)
#undef STATEMENT_NAME
        N_STATEMENTS
} statement;
_Static_assert((int)N_STATEMENTS <= (int)PAGED__INDEX_STATEMENTS, "the struct has room for all");

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
    return index->db && !sqlite3_get_autocommit(index->db);
}

static paged_status begin(paged__index *index, paged_error *err) {
    return paged__index_is_open(index) ? PAGED_OK : run(index, BEGIN, err);
}

/* A change, inside of the transaction, whose statement has its values already. */
static paged_status change(paged__index *index, statement which, paged_error *err) {
    const paged_status status = begin(index, err);
    if (status) {
        sqlite3_clear_bindings(prepared(index, which));
        return status;
    }
    return run(index, which, err);
}

paged_status paged__index_commit(paged__index *index, paged_error *err) {
    return paged__index_is_open(index) ? run(index, COMMIT, err) : PAGED_OK;
}

void paged__index_rollback(paged__index *index) {
    if (paged__index_is_open(index)) run(index, ROLLBACK, NULL);
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
    if (version != PAGED__INDEX_VERSION)
        return paged__fail(
            err, PAGED_ERR_FORMAT,
            "%s has version %lld, and this program knows %d: give another directory, or run the "
            "program that made it",
            index->path, (long long)version, PAGED__INDEX_VERSION);
    char said[200];
    int64_t is_twice = 0;
    status = ask(index, "PRAGMA integrity_check(1)", NULL, said, sizeof said, err);
    if (!status && strcmp(said, "ok") != 0)
        return paged__fail(err, PAGED_ERR_CORRUPT, "%s: %s", index->path, said);
    if (!status) status = ask(index, twice, &is_twice, NULL, 0, err);
    if (!status && is_twice)
        return paged__fail(err, PAGED_ERR_CORRUPT, "%s: two records in one slot", index->path);
    return status;
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

static paged_status see_pins(paged__index *index, bool read_only, paged_error *err) {
    int64_t n = 0;
    if (!read_only) return exec(index, pins_schema, err);
    const paged_status status =
        ask(index, "SELECT count(*) FROM sqlite_master WHERE name = 'pins'", &n, NULL, 0, err);
    return status || n ? status : exec(index, no_pins_schema, err);
}

paged_status paged__index_open(paged__index *index, const char *path, bool read_only, paged_error *err) {
    *index = (paged__index){.path = path};
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
        if (!status) status = exec(index, "COMMIT", err);
    }
    if (!status && !is_new) status = see_pins(index, read_only, err);
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
    paged_status status = PAGED_OK;
    int code;
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

static paged_status change_by_numbers(paged__index *index, statement which, int64_t first, int64_t second,
                                      paged_error *err) {
    sqlite3_bind_int64(prepared(index, which), 2, second);
    return change_by_number(index, which, first, err);
}

paged_status paged__index_drop_shape(paged__index *index, int64_t id, paged_error *err) {
    paged_status status = change_by_number(index, DROP_RECORDS, id, err);
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
}

paged_status paged__index_get(paged__index *index, int64_t shape, const paged_key *key, paged__entry *out,
                              paged_error *err) {
    sqlite3_stmt *stmt = prepared(index, GET);
    sqlite3_bind_int64(stmt, 1, shape);
    bind_key(stmt, 2, key);
    const int code = sqlite3_step(stmt);
    if (code == SQLITE_ROW) read_entry(stmt, out);
    const paged_status status = end(index, stmt, code, err);
    return status ? status : code == SQLITE_ROW ? PAGED_OK : PAGED_ERR_NOT_FOUND;
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
    uint8_t *bytes = big_endian(tokens, n_tokens);
    if (!bytes) return paged__fail(err, PAGED_ERR_NO_MEMORY, "%d tokens", n_tokens);
    paged_status status = PAGED_OK;
    int32_t best = 0;
    for (int side = 0; side < 2 && !status; side++) {
        sqlite3_stmt *stmt = prepared(index, side ? TAIL_AFTER : TAIL_BEFORE);
        sqlite3_bind_int64(stmt, 1, shape);
        bind_key(stmt, 2, parent);
        sqlite3_bind_blob(stmt, 3, bytes, 4 * n_tokens, SQLITE_STATIC);
        const int code = sqlite3_step(stmt);
        const int32_t n = code == SQLITE_ROW ? common_tokens(stmt, 7, bytes, n_tokens) : 0;
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

paged_status paged__index_put(paged__index *index, int64_t shape, const paged__entry *entry, int64_t used,
                              const int32_t *tokens, paged_error *err) {
    uint8_t *tail = tokens ? big_endian(tokens, entry->n_tokens) : NULL;
    if (tokens && !tail) return paged__fail(err, PAGED_ERR_NO_MEMORY, "%d tokens", entry->n_tokens);
    sqlite3_stmt *stmt = prepared(index, PUT);
    sqlite3_bind_int64(stmt, 1, shape);
    bind_key(stmt, 2, &entry->key);
    sqlite3_bind_int64(stmt, 3, entry->slot);
    bind_key(stmt, 4, &entry->parent);
    sqlite3_bind_int(stmt, 5, entry->first);
    sqlite3_bind_int(stmt, 6, entry->n_tokens);
    sqlite3_bind_int64(stmt, 7, entry->groups);
    sqlite3_bind_int64(stmt, 8, used);
    sqlite3_bind_int64(stmt, 9, entry->used_at);
    if (tail) sqlite3_bind_blob(stmt, 10, tail, 4 * entry->n_tokens, SQLITE_STATIC);
    const paged_status status = change(index, PUT, err);
    paged__free(tail);
    return status;
}

paged_status paged__index_touch(paged__index *index, int64_t shape, const paged_key *key, int64_t used,
                                int64_t used_at, paged_error *err) {
    sqlite3_stmt *stmt = prepared(index, TOUCH);
    sqlite3_bind_int64(stmt, 1, shape);
    bind_key(stmt, 2, key);
    sqlite3_bind_int64(stmt, 3, used);
    sqlite3_bind_int64(stmt, 4, used_at);
    return change(index, TOUCH, err);
}

paged_status paged__index_erase(paged__index *index, int64_t shape, const paged_key *key, paged_error *err) {
    sqlite3_stmt *stmt = prepared(index, ERASE);
    sqlite3_bind_int64(stmt, 1, shape);
    bind_key(stmt, 2, key);
    return change(index, ERASE, err);
}

typedef struct aged {
    int64_t slot, used;
    paged_key key;
} aged;

/* Up to n of those that may go, the one that was not used for longest first. */
static paged_status oldest(paged__index *index, int64_t shape, aged *out, int32_t n, int32_t *n_found,
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
        status = paged__index_erase(index, shape, &found[*n_evicted].key, err);
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

static paged_status count_changes(paged__index *index, paged_status status, int64_t *n) {
    *n = status ? 0 : sqlite3_changes64(index->db);
    return status;
}

paged_status paged__index_expire(paged__index *index, int64_t before, int64_t *n_erased, paged_error *err) {
    return count_changes(index, change_by_number(index, EXPIRE, before, err), n_erased);
}

paged_status paged__index_erase_unpinned(paged__index *index, int64_t shape, int64_t *n_erased,
                                         paged_error *err) {
    return count_changes(index, change_by_number(index, ERASE_UNPINNED, shape, err), n_erased);
}

paged_status paged__index_cut(paged__index *index, int64_t shape, int64_t slot, int64_t *n_erased,
                              paged_error *err) {
    return count_changes(index, change_by_numbers(index, CUT, shape, slot, err), n_erased);
}

paged_status paged__index_set_back(paged__index *index, int64_t now, paged_error *err) {
    return change_by_number(index, SET_BACK, now, err);
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
