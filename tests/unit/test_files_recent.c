/* test_files_recent.c: rows of the index that have not been merged yet are found, used, replaced and dropped
 * as all others are, whatever interrupts their merging; and old indexes, which have no table for them, open.
 *
 * Method: the index of a store that was closed is brought into the state that a kill leaves, by SQL; merging
 * is interrupted at one step of SQLite's after the other. What no program of ours writes is damage.
 */
#include <sqlite3.h>

#include "file_pair.h"
#include "store/file.h"

/* As a process that was killed has left it: no row has been merged. */
static void unmerge(void) {
    sql("INSERT INTO recent(row, shape, key, slot, parent, first, n_tokens, groups, used, used_at)"
        " SELECT row_number() OVER (ORDER BY used), shape, key, slot, parent, first, n_tokens, groups, used,"
        " used_at FROM records WHERE tail IS NULL; DELETE FROM records WHERE tail IS NULL");
}

static int64_t n_recent(void) { /* of the store that is open */
    sqlite3_stmt *stmt = NULL;
    sqlite3 *db = ((paged__file_store *)store.self)->index.db;
    CHECK_EQ(sqlite3_prepare_v2(db, "SELECT count(*) FROM recent", -1, &stmt, NULL), SQLITE_OK);
    CHECK_EQ(sqlite3_step(stmt), SQLITE_ROW);
    const int64_t n = sqlite3_column_int64(stmt, 0);
    sqlite3_finalize(stmt);
    return n;
}

/* Nothing is new to an index of version 1, and all of it is there. */
static void old_indexes_are_complete(void) {
    static const char n_tables[] = "SELECT count(*) FROM sqlite_master WHERE name = 'recent'";
    new_dir();
    open_slots(10);
    for (int i = 0; i < 8; i++) put(i);
    close_both();
    sql("DROP TABLE recent; PRAGMA user_version=1");
    paged_file_store_config config = world_config(world_dir, 10);
    config.read_only = true;
    open_with(&config); /* which changes nothing */
    CHECK_EQ(n_there(0, 8), 8);
    CHECK_EQ(stats_of(&store).n_records, 8);
    close_both();
    CHECK_EQ(ask("PRAGMA user_version"), 1);
    CHECK_EQ(ask(n_tables), 0);
    open_slots(10);
    CHECK_EQ(n_there(0, 8), 8);
    for (int i = 8; i < 13; i++) put(i);
    CHECK_EQ(n_there(3, 10), 10);
    CHECK_EQ(n_there(0, 3), 0);
    close_both();
    CHECK_EQ(ask("PRAGMA user_version"), 2);
    CHECK_EQ(ask("SELECT count(*) FROM records"), 10);
    /* What a crash has left between two statements of that. */
    sql("DROP TABLE recent");
    open_slots(10);
    CHECK_EQ(n_there(3, 10), 10);
    close_both();
    CHECK_EQ(ask(n_tables), 1);
}

static void recent_rows_are_found_by_all(void) {
    new_dir();
    open_slots(10);
    for (int i = 0; i < 8; i++) put(i);
    CHECK_EQ(pin_numbers("conv-a", 7, 1), PAGED_OK);
    close_both();
    CHECK_EQ(ask("SELECT count(*) FROM recent"), 0); /* it was closed */
    unmerge();
    CHECK_EQ(ask("SELECT count(*) FROM recent"), 8);
    paged_file_store_config config = world_config(world_dir, 10);
    config.read_only = true;
    open_with(&config);
    CHECK_EQ(n_there(0, 8), 8);
    CHECK_EQ(stats_of(&store).n_records, 8);
    paged__shape_row *rows = NULL;
    int32_t n_rows = 0;
    CHECK_EQ(paged__index_shapes(&((paged__file_store *)store.self)->index, &rows, &n_rows, NULL), PAGED_OK);
    CHECK_EQ(n_rows, 1);
    CHECK_EQ(rows[0].n_records, 8);
    CHECK_EQ(rows[0].n_pinned, 1);
    CHECK_EQ(rows[0].last_slot, 7);
    paged__shape_rows_free(rows, n_rows);
    close_both();
    open_slots(10);
    CHECK_EQ(n_recent(), 8);
    for (int i = 8; i < 10; i++) put(i);
    CHECK_EQ(n_there(0, 10), 10); /* in slots of their own */
    put(1);
    CHECK_EQ(stats_of(&store).n_records, 10);
    close_both();
    CHECK_EQ(ask("SELECT count(*) FROM recent"), 0);
    CHECK_EQ(ask("SELECT count(DISTINCT slot) FROM records"), 10);
}

static void recent_rows_change(void) {
    world_record r;
    new_dir();
    open_slots(4);
    for (int i = 0; i < 4; i++) put(i);
    CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
    CHECK_EQ(n_recent(), 4);
    /* The oldest is used again; the one that was oldest after it makes room. */
    CHECK_EQ(get_number(&store, 0), PAGED_OK);
    put(4);
    CHECK_EQ(n_there(1, 1), 0);
    CHECK_EQ(n_there(0, 1) + n_there(2, 3), 4);
    CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
    CHECK_EQ(n_recent(), 1);
    /* More groups than there were, while it waits, and while it is recent. */
    for (int k = 0; k < 2; k++) {
        world_fill(&r, 10 + k);
        r.is.groups = 1;
        CHECK_EQ(store.write(store.self, &r.is, NULL), PAGED_OK);
        if (k) CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
        r.is.groups = 3;
        CHECK_EQ(store.write(store.self, &r.is, NULL), PAGED_OK);
        world_blank(&r, 10 + k);
        CHECK_EQ(store.read(store.self, &r.is, 3), PAGED_OK);
        CHECK_EQ(r.is.groups, 3);
    }
    CHECK_EQ(stats_of(&store).n_damaged, 0);
    CHECK(stats_of(&store).n_records <= 4);
    close_both();
    CHECK_EQ(ask("SELECT count(*) - count(DISTINCT slot) FROM records"), 0);
}

/* A sealed tail is found by its key and by its tokens while its row waits, and when it is committed. */
static void tails_wait_too(void) {
    world_record r;
    paged_key found;
    int32_t n_common = 0;
    new_dir();
    open_slots(10);
    put(1);
    for (int k = 0; k < 3; k++) {
        world_fill(&r, 20);
        r.is.n_tokens = 5;
        if (k == 0) CHECK_EQ(store.write(store.self, &r.is, NULL), PAGED_OK);
        if (k == 1) CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
        CHECK_EQ(store.find(store.self, &r.is.key, 1), 1);
        if (k == 2) CHECK_EQ(store.write(store.self, &r.is, NULL), PAGED_OK);
        CHECK_EQ(stats_of(&store).n_records, 2);
        CHECK_EQ(store.tail(store.self, &r.is.parent, r.tokens, 7, &found, &n_common), PAGED_OK);
        CHECK(paged__key_equal(&found, &r.is.key));
        CHECK_EQ(n_common, 5);
    }
    const paged_key other = world_key(1);
    CHECK_EQ(store.tail(store.self, &other, r.tokens, 7, &found, &n_common), PAGED_ERR_NOT_FOUND);
    CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
    CHECK_EQ(n_recent(), 1);
    close_both();
    CHECK_EQ(ask("SELECT count(*) FROM records"), 2);
    open_slots(10);
    CHECK_EQ(store.tail(store.self, &r.is.parent, r.tokens, 7, &found, &n_common), PAGED_OK);
    CHECK_EQ(store.tail(store.self, &other, r.tokens, 7, &found, &n_common), PAGED_ERR_NOT_FOUND);
    close_both();
}

/* What nobody uses for long enough goes from both tables, and what lies behind the limit. */
static void recent_rows_go(void) {
    new_dir();
    open_slots(10);
    for (int i = 0; i < 8; i++) put(i);
    close_both();
    unmerge();
    sql("UPDATE recent SET used_at = 1000 WHERE slot < 2");
    paged_file_store_config config = world_config(world_dir, 5);
    config.ttl_s = 100;
    open_with(&config);
    CHECK_EQ(n_there(0, 2), 0);
    CHECK_EQ(n_there(2, 3), 3);
    CHECK_EQ(n_there(5, 3), 0);
    CHECK_EQ(stats_of(&store).n_records, 3);
    close_both();
}

static void many_rows_are_merged(void) {
    enum { N = PAGED__RECENT_MAX + 300 };
    new_dir();
    open_slots(N);
    for (int i = 0; i < N; i++) put(i);
    CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
    CHECK(n_recent() < 1000);
    const int64_t log_bytes = size_of("index.sqlite-wal"), index_bytes = size_of("index.sqlite");
    CHECK(log_bytes > 0 && log_bytes < 8 << 20 && index_bytes > 0 && index_bytes < 4 << 20);
    put(N - 1); /* it is known where it is now */
    CHECK_EQ(stats_of(&store).n_records, N);
    for (int i = 0; i < N; i += 13) CHECK_EQ(get_number(&store, i), PAGED_OK);
    close_both();
    open_slots(N);
    CHECK_EQ(count_found(&store, N), N);
    close_both();
}

static int interrupted(void *user) {
    int32_t *n_left = user;
    return --*n_left == 0;
}

/* Whatever step of it is the last, nothing is lost or twice, and the store goes on. */
static void merges_that_are_interrupted(void) {
    int32_t n_broken = 0;
    for (int32_t step = 1;; step = step * 5 / 4 + 1, n_broken++) {
        int32_t n_left = step;
        int64_t oldest;
        new_dir();
        open_slots(60);
        paged__index *index = &((paged__file_store *)store.self)->index;
        for (int i = 0; i < 40; i++) put(i);
        CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
        sqlite3_progress_handler(index->db, 1, interrupted, &n_left);
        paged__index_merge(index);
        sqlite3_progress_handler(index->db, 0, NULL, NULL);
        const bool ended = n_recent() == 0;
        CHECK(ended || n_recent() == 40);
        CHECK(ended || index->merge_at > PAGED__RECENT_MAX); /* not at once again */
        CHECK_EQ(n_there(0, 40), 40);
        for (int i = 30; i < 50; i++) put(i);
        CHECK_EQ(n_there(0, 50), 50);
        CHECK_EQ(stats_of(&store).n_records, 50);
        CHECK_EQ(paged__index_oldest_use(index, 1, &oldest, NULL), PAGED_OK); /* which merges them */
        CHECK_EQ(index->merge_at, PAGED__RECENT_MAX);
        close_both();
        CHECK_EQ(ask("SELECT count(*) FROM records"), 50);
        CHECK_EQ(ask("SELECT count(*) FROM recent"), 0);
        CHECK_EQ(ask("SELECT count(DISTINCT slot) FROM records"), 50);
        if (ended) break;
    }
    CHECK(n_broken > 10);
}

/* One key in two rows, one slot in two tables, a row that nobody counts to. */
static void recent_rows_that_cannot_be(void) {
    static const char *const damage[][2] = {
        {"UPDATE recent SET slot = 2 WHERE slot = 4", "two records in one slot"},
        {"INSERT INTO recent SELECT 50, shape, key, 50, parent, first, n_tokens, groups, used, used_at"
         " FROM recent WHERE slot = 3",
         "two records of one key"},
        {"INSERT INTO records SELECT shape, key, 50, parent, first, n_tokens, groups, used, used_at, NULL"
         " FROM recent WHERE slot = 3",
         "two records of one key"},
        {"INSERT INTO records SELECT shape, zeroblob(16), slot, parent, first, n_tokens, groups, used,"
         " used_at, NULL FROM recent WHERE slot = 3",
         "two records in one slot"},
        {"UPDATE recent SET row = -5 WHERE slot = 4", "a row that cannot be"},
        {"UPDATE recent SET row = 1 << 40 WHERE slot = 4", "a row that cannot be"}};
    paged_error err;
    for (int i = 0; i < 6; i++) {
        paged_file_store_config config = world_config(world_dir, 10);
        new_dir();
        open_slots(10);
        for (int k = 0; k < 5; k++) put(k);
        close_both();
        unmerge();
        sql(damage[i][0]);
        config.read_only = true;
        CHECK_EQ(paged_file_store_create(&config, &store, NULL, &err), PAGED_ERR_CORRUPT);
        CHECK(strstr(err.message, damage[i][1]));
        open_slots(10);
        CHECK(exists("index.sqlite.damaged"));
        CHECK_EQ(n_there(0, 5), 0);
        put(0);
        CHECK_EQ(n_there(0, 5), 1);
        close_both();
    }
}

static int one_more(void *user) {
    ++*(int64_t *)user;
    return 0;
}

/* What pins and rows cost is their sum, not their product. */
static void pins_and_recent_rows(void) {
    paged__shape_row *rows = NULL;
    int32_t n_rows = 0;
    int64_t n_steps = 0, slot;
    new_dir();
    open_slots(400);
    for (int i = 0; i < 300; i++) put(i);
    CHECK_EQ(pin_numbers("conv-a", 100, 50), PAGED_OK);
    close_both();
    unmerge();
    sql("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000)"
        " INSERT INTO pins(shape, key, name) SELECT 1, randomblob(16), 'conv-b' FROM n");
    open_slots(400);
    CHECK_EQ(n_recent(), 300);
    paged__index *index = &((paged__file_store *)store.self)->index;
    sqlite3_progress_handler(index->db, 1, one_more, &n_steps);
    CHECK_EQ(paged__index_shapes(index, &rows, &n_rows, NULL), PAGED_OK);
    CHECK_EQ(paged__index_last_pinned(index, 1, &slot, NULL), PAGED_OK);
    sqlite3_progress_handler(index->db, 0, NULL, NULL);
    CHECK(n_rows == 1 && rows[0].n_pinned == 50 && rows[0].n_records == 300);
    CHECK_EQ(slot, 149);
    CHECK(n_steps > 300 && n_steps < 200000);
    paged__shape_rows_free(rows, n_rows);
    close_both();
}

/* That a note is not there says nothing of the keys, which need not be read again. */
static void notes_that_are_not_there(void) {
    new_dir();
    open_slots(10);
    put(1);
    const paged__known *known = &((paged__file_store *)store.self)->index.known;
    CHECK(known->n == 1);
    CHECK_EQ(notes.erase(notes.self, "none", NULL), PAGED_ERR_NOT_FOUND);
    CHECK(known->n == 1);
    put(2);
    CHECK_EQ(n_there(1, 2), 2);
    close_both();
    CHECK_EQ(ask("SELECT count(*) FROM records"), 2);
}

/* A key that is there is never said not to be, however full the table; one that comes again is there once. */
static void what_is_known(void) {
    uint64_t state = test_seed;
    paged__known known = {0};
    const int64_t n_room = 1000 + (int64_t)(paged__rand(&state) % 5000);
    int64_t n = 0, n_false = 0;
    CHECK(paged__known_make(&known, n_room));
    const paged_key parent = world_key(1 << 30);
    for (int i = 0; i < 100000; i++) CHECK(paged__known_add(&known, &parent, 0));
    for (paged_key key = world_key(0); paged__known_add(&known, &key, (uint32_t)n); key = world_key(n)) n++;
    CHECK(n > n_room);
    CHECK_EQ(known.n, n + 1);
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < 2 * n; i++) {
            const paged_key key = world_key(i);
            uint64_t n_seen = 0;
            uint32_t row;
            bool found = false, any = false;
            while (paged__known_next(&known, &key, &n_seen, &row)) {
                any = true;
                found = found || row == (pass ? 0 : (uint32_t)i);
            }
            CHECK(i >= n || found);
            n_false += i >= n && any;
        }
        paged__known_merged(&known);
    }
    CHECK(n_false < 4); /* of some ten thousand, each right but for one in 2^32 */
    paged__known_free(&known);
}

#define TESTS(X)                                                                                             \
    X(old_indexes_are_complete)                                                                              \
    X(recent_rows_are_found_by_all)                                                                          \
    X(recent_rows_change)                                                                                    \
    X(tails_wait_too)                                                                                        \
    X(recent_rows_go)                                                                                        \
    X(many_rows_are_merged)                                                                                  \
    X(merges_that_are_interrupted)                                                                           \
    X(recent_rows_that_cannot_be)                                                                            \
    X(pins_and_recent_rows)                                                                                  \
    X(notes_that_are_not_there)                                                                              \
    X(what_is_known)
TEST_MAIN(TESTS)
