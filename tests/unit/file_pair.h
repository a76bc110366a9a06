/* file_pair.h: for tests of the file store: a store and its notes in world_dir, as one opens and closes them,
 * and their index as SQL sees it. */
#ifndef PAGED_TESTS_FILE_PAIR_H
#define PAGED_TESTS_FILE_PAIR_H

#include <sqlite3.h>

#include "file_world.h"

static paged_store store;
static paged_notes notes;

static inline void open_with(const paged_file_store_config *config) {
    paged_error err = {0};
    if (paged_file_store_create(config, &store, &notes, &err))
        test_fail(__FILE__, __LINE__, "%s", err.message);
    if (store.open(store.self, &world_shape, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
}

static inline void open_slots(int64_t n_slots) {
    const paged_file_store_config config = world_config(world_dir, n_slots);
    open_with(&config);
}

static inline void close_both(void) {
    store.close(store.self);
    notes.close(notes.self);
}

static inline void put(int64_t number) {
    paged_error err = {0};
    if (put_number(&store, number, &err))
        test_fail(__FILE__, __LINE__, "%lld: %s", (long long)number, err.message);
}

/* Into pin `name`. */
static inline paged_status pin_numbers(const char *name, int64_t first, int32_t n) {
    paged_key keys[100];
    for (int32_t i = 0; i < n; i++) keys[i] = world_key(first + i);
    return store.pin(store.self, name, keys, n, NULL);
}

/* How many of them the store gives back. */
static inline int32_t n_there(int64_t first, int32_t n) {
    int32_t n_found = 0;
    for (int32_t i = 0; i < n; i++) n_found += get_number(&store, first + i) == PAGED_OK;
    return n_found;
}

static inline void sql(const char *text) {
    char path[256];
    sqlite3 *db;
    path_of(path, "index.sqlite");
    CHECK_EQ(sqlite3_open(path, &db), SQLITE_OK);
    CHECK_EQ(sqlite3_exec(db, text, NULL, NULL, NULL), SQLITE_OK);
    sqlite3_close(db);
}

/* The number that a query begins with. */
static inline int64_t ask(const char *text) {
    char path[256];
    sqlite3 *db;
    sqlite3_stmt *stmt = NULL;
    path_of(path, "index.sqlite");
    CHECK_EQ(sqlite3_open(path, &db), SQLITE_OK);
    CHECK_EQ(sqlite3_prepare_v2(db, text, -1, &stmt, NULL), SQLITE_OK);
    CHECK_EQ(sqlite3_step(stmt), SQLITE_ROW);
    const int64_t n = sqlite3_column_int64(stmt, 0);
    sqlite3_finalize(stmt);
    sqlite3_close(db);
    return n;
}

#endif
