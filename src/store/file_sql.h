/* file_sql.h: the words of the index: its tables, and all that is asked of them. For file_index.c alone.
 * A record is in one of two tables (file.h), so what counts, lists or changes all of them goes over both. */
#ifndef PAGED_STORE_FILE_SQL_H
#define PAGED_STORE_FILE_SQL_H

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
    "PRAGMA application_id=1346849622;";
/* No index of slots: a slot is asked for by nobody while records are written, and which are taken the store
 * knows itself. One of before that goes with its first opening for writing. */
static const char slots_schema[] = "DROP INDEX IF EXISTS records_slot";
static const char slot_twice[] =
    "SELECT EXISTS (SELECT 1 FROM (SELECT shape, slot FROM records UNION ALL SELECT shape, slot FROM recent)"
    " GROUP BY shape, slot HAVING count(*) > 1)";
static const char key_twice[] = "SELECT EXISTS (SELECT 1 FROM recent GROUP BY shape, key HAVING count(*) > 1)"
                                " OR EXISTS (SELECT 1 FROM recent JOIN records USING (shape, key))";
static const char row_wrong[] = "SELECT EXISTS (SELECT 1 FROM recent WHERE row NOT BETWEEN 1 AND 1000000000)";
/* What is recent, without an index: paged__known has the rows. Version 1 had no such table, and would give
 * their slots away. */
#define RECENT_COLUMNS                                                                                       \
    "recent(row INTEGER PRIMARY KEY, shape INTEGER NOT NULL, key BLOB NOT NULL, slot INTEGER NOT NULL,"      \
    " parent BLOB NOT NULL, first INTEGER NOT NULL, n_tokens INTEGER NOT NULL, groups INTEGER NOT NULL,"     \
    " used INTEGER NOT NULL, used_at INTEGER NOT NULL)"
static const char recent_schema[] = "PRAGMA user_version=2; CREATE TABLE IF NOT EXISTS " RECENT_COLUMNS;
static const char no_recent_schema[] = "CREATE TEMP TABLE " RECENT_COLUMNS;
/* An index from before there were pins gets them when it is opened for writing; for reading it has none. */
#define PINS_COLUMNS                                                                                         \
    "pins(shape INTEGER NOT NULL, key BLOB NOT NULL, name TEXT NOT NULL,"                                    \
    " PRIMARY KEY(shape, key, name)) WITHOUT ROWID;"
static const char pins_schema[] =
    "CREATE TABLE IF NOT EXISTS " PINS_COLUMNS "CREATE INDEX IF NOT EXISTS pins_name ON pins(name);";
static const char no_pins_schema[] = "CREATE TEMP TABLE " PINS_COLUMNS;
_Static_assert(PAGED__INDEX_VERSION == 2 && APPLICATION_ID == 1346849622, "the schema says these numbers");

#define ENTRY "key, slot, parent, first, n_tokens, groups, used_at"
#define ROW   ENTRY ", used, shape"
#define NOT_PINNED(table)                                                                                    \
    " AND NOT EXISTS (SELECT 1 FROM pins WHERE pins.shape = " table ".shape AND pins.key = " table ".key)"
/* For each row of `outer` one look into `inner`, which has an index of keys: `recent` has none. */
#define PINNED_OF(outer, inner, shape)                                                                       \
    " FROM " outer " CROSS JOIN " inner " ON " inner ".shape = " outer ".shape"                              \
    " AND " inner ".key = " outer ".key WHERE " outer ".shape = " shape
/* Of both tables, one after the other. */
#define BOTH(X, name, before, after)                                                                         \
    X(name, before " records" after("records"))                                                              \
    X(name##_RECENT, before " recent" after("recent"))
#define IF_OLD(table)             " WHERE used_at < ?1" NOT_PINNED(table)
#define IF_UNPINNED(table)        " WHERE shape = ?1" NOT_PINNED(table)
#define IF_OF_SHAPE(table)        " WHERE shape = ?1"
#define IF_BEHIND(table)          " WHERE shape = ?1 AND slot >= ?2"
#define IF_FUTURE(table)          " SET used_at = ?1 WHERE used_at > ?1"
#define IF_KEY(table)             " WHERE shape = ?1 AND key = ?2"
#define IF_ROW                    " AND row = ?3"
#define N_PINNED(outer, inner)    "(SELECT count(DISTINCT pins.key)" PINNED_OF(outer, inner, "id") ")"
#define N_PINNED_ALL              N_PINNED("pins", "records") " + " N_PINNED("recent", "pins")
#define PINNED_SLOT(outer, inner) "(SELECT ifnull(max(slot), -1)" PINNED_OF(outer, inner, "?1") ")"
#define HAS_PINS                  "EXISTS (SELECT 1 FROM pins WHERE pins.shape = id)"
#define SHAPES_SQL                                                                                           \
    "SELECT id, fingerprint, block_size, block_bytes, slot_bytes,"                                           \
    " (SELECT count(*) FROM records WHERE shape = id) + (SELECT count(*) FROM recent WHERE shape = id),"     \
    " max((SELECT ifnull(max(slot), -1) FROM records WHERE shape = id),"                                     \
    " (SELECT ifnull(max(slot), -1) FROM recent WHERE shape = id)),"                                         \
    " max((SELECT ifnull(max(used), 0) FROM records WHERE shape = id),"                                      \
    " (SELECT ifnull(max(used), 0) FROM recent WHERE shape = id)) AS last,"                                  \
    " max((SELECT ifnull(max(used_at), 0) FROM records WHERE shape = id),"                                   \
    " (SELECT ifnull(max(used_at), 0) FROM recent WHERE shape = id)),"                                       \
    " " N_PINNED_ALL ", " HAS_PINS " FROM shapes ORDER BY last, id"
#define STATEMENTS(X)                                                                                        \
    X(BEGIN, "BEGIN IMMEDIATE")                                                                              \
    X(COMMIT, "COMMIT")                                                                                      \
    X(ROLLBACK, "ROLLBACK")                                                                                  \
    X(SHAPES, SHAPES_SQL)                                                                                    \
    X(ADD_SHAPE, "INSERT INTO shapes(fingerprint, block_size, block_bytes, slot_bytes) VALUES(?1,?2,?3,?4)") \
    BOTH(X, DROP_RECORDS, "DELETE FROM", IF_OF_SHAPE)                                                        \
    X(DROP_PINS, "DELETE FROM pins WHERE shape = ?1")                                                        \
    X(DROP_SHAPE, "DELETE FROM shapes WHERE id = ?1")                                                        \
    X(GET, "SELECT " ENTRY ", 0 FROM records" IF_KEY(""))                                                    \
    X(GET_RECENT, "SELECT " ENTRY ", row FROM recent" IF_KEY("") IF_ROW)                                     \
    X(TAIL_BEFORE, "SELECT " ENTRY ", 0, tail FROM records WHERE shape = ?1 AND parent = ?2 AND tail <= ?3"  \
                   " ORDER BY tail DESC LIMIT 1")                                                            \
    X(TAIL_AFTER, "SELECT " ENTRY ", 0, tail FROM records WHERE shape = ?1 AND parent = ?2 AND tail > ?3"    \
                  " ORDER BY tail LIMIT 1")                                                                  \
    X(PUT_TAIL, "INSERT INTO records(" ROW ", tail) VALUES(?1,?2,?3,?4,?5,?6,?7,?8,?9,?10)")                 \
    X(PUT_RECENT, "INSERT INTO recent(" ROW ", row) VALUES(?1,?2,?3,?4,?5,?6,?7,?8,?9,?10)")                 \
    X(MERGE, "INSERT INTO records(" ROW ") SELECT " ROW " FROM recent ORDER BY shape, key")                  \
    X(MERGED, "DELETE FROM recent")                                                                          \
    X(TOUCH, "UPDATE records SET used = ?4, used_at = ?5" IF_KEY(""))                                        \
    X(TOUCH_RECENT, "UPDATE recent SET used = ?4, used_at = ?5" IF_KEY("") IF_ROW)                           \
    X(ERASE, "DELETE FROM records" IF_KEY(""))                                                               \
    X(ERASE_RECENT, "DELETE FROM recent" IF_KEY("") IF_ROW)                                                  \
    X(OLDEST, "SELECT slot, used, key FROM records" IF_UNPINNED("records") " ORDER BY used LIMIT ?2")        \
    BOTH(X, EXPIRE, "DELETE FROM", IF_OLD)                                                                   \
    BOTH(X, ERASE_UNPINNED, "DELETE FROM", IF_UNPINNED)                                                      \
    X(PIN, "INSERT INTO pins(name, shape, key) VALUES(?1,?2,?3) ON CONFLICT(shape, key, name) DO NOTHING")   \
    X(UNPIN, "DELETE FROM pins WHERE name = ?1 AND shape = ?2 AND key = ?3")                                 \
    X(PINS_OF, "SELECT shape, key FROM pins WHERE name = ?1 ORDER BY shape, key")                            \
    X(PINS_EACH, "SELECT DISTINCT name FROM pins")                                                           \
    X(IS_PINNED, "SELECT 1 FROM pins WHERE shape = ?1 AND key = ?2 LIMIT 1")                                 \
    X(LAST_PINNED, "SELECT max(" PINNED_SLOT("pins", "records") ", " PINNED_SLOT("recent", "pins") ")")      \
    BOTH(X, CUT, "DELETE FROM", IF_BEHIND)                                                                   \
    BOTH(X, SET_BACK, "UPDATE", IF_FUTURE)                                                                   \
    X(COUNTS, "SELECT sum(n), max(u) FROM (SELECT count(*) AS n, ifnull(max(used), 0) AS u FROM records"     \
              " UNION ALL SELECT count(*), ifnull(max(used), 0) FROM recent)")                               \
    X(KEYS, "SELECT key, 0, 0 FROM records UNION ALL SELECT key, row, used FROM recent UNION ALL"            \
            " SELECT parent, -1, 0 FROM records WHERE tail IS NOT NULL")                                     \
    X(SLOTS, "SELECT slot FROM records WHERE shape = ?1 UNION ALL SELECT slot FROM recent WHERE shape = ?1") \
    X(EACH, "SELECT " ENTRY ", 0 FROM records WHERE shape = ?1 UNION ALL"                                    \
            " SELECT " ENTRY ", row FROM recent WHERE shape = ?1 ORDER BY slot")                             \
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

#endif
