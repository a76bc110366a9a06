/* test_files.c: the file store keeps what it is given within its limits, and knows what is not its own.
 *
 * Method: records whose bits follow from a number are written and read across restarts; limits, time to live,
 * other fingerprints, other versions, foreign files and notes are each tried with the result stated.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sqlite3.h>
#include <sys/file.h>
#include <sys/resource.h>

#include "base/system.h"
#include "file_pair.h"
#include "store/file.h"

/* ---- records ---- */

static void comes_back_after_a_restart(void) {
    new_dir();
    open_slots(0);
    for (int i = 0; i < 100; i++) put(i);
    CHECK_EQ(count_found(&store, 101), 100); /* before any commit of the last ones, too */
    close_both();
    CHECK(!exists("index.sqlite-wal") && !exists("index.sqlite-shm"));
    open_slots(0);
    CHECK_EQ(count_found(&store, 101), 100);
    paged_key keys[101];
    for (int i = 0; i < 101; i++) keys[i] = world_key(i);
    CHECK_EQ(store.find(store.self, keys, 101), 100);
    keys[40].bytes[0] ^= 1;
    CHECK_EQ(store.find(store.self, keys, 101), 40);
    const paged_store_stats stats = stats_of(&store);
    CHECK_EQ(stats.n_records, 100);
    CHECK_EQ(stats.bytes, 100 * WORLD_SLOT);
    CHECK_EQ(stats.n_reads, 101);
    CHECK_EQ(stats.n_hits, 100);
    CHECK_EQ(stats.n_damaged, 0);
    close_both();
}

static void twice_is_once(void) {
    new_dir();
    open_slots(0);
    for (int i = 0; i < 50; i++) put(i % 10);
    CHECK_EQ(stats_of(&store).n_records, 10);
    CHECK_EQ(stats_of(&store).n_writes, 10);
    close_both();
    open_slots(0);
    put(3);
    CHECK_EQ(stats_of(&store).n_writes, 0);
    close_both();
}

/* A record with fewer groups is replaced by one with more, and not the other way round. */
static void more_groups_replace_fewer(void) {
    static world_record r;
    new_dir();
    open_slots(0);
    world_fill(&r, 1);
    r.is.groups = 1;
    CHECK_EQ(store.write(store.self, &r.is, NULL), PAGED_OK);
    world_blank(&r, 1);
    CHECK_EQ(store.read(store.self, &r.is, 3), PAGED_OK);
    CHECK_EQ(r.is.groups, 1);
    put(1);
    CHECK_EQ(get_number(&store, 1), PAGED_OK);
    world_fill(&r, 1);
    r.is.groups = 1;
    CHECK_EQ(store.write(store.self, &r.is, NULL), PAGED_OK);
    CHECK_EQ(get_number(&store, 1), PAGED_OK);
    CHECK_EQ(stats_of(&store).n_records, 1);
    /* Only what is wanted is read. */
    world_blank(&r, 1);
    CHECK_EQ(store.read(store.self, &r.is, 2), PAGED_OK);
    CHECK(world_right(&r, 1, 2) && r.bytes[0][0] == 0xa5 && r.bytes[0][4999] == 0xa5);
    close_both();
}

static void tails_by_their_tokens(void) {
    static world_record r;
    paged_key key;
    int32_t n_common, prompt[16];
    const paged_key parent = world_key(500);
    new_dir();
    open_slots(0);
    for (int i = 0; i < 3; i++) { /* 10 20 30, 10 20 40 50, 70 */
        static const int32_t tails[3][4] = {{10, 20, 30}, {10, 20, 40, 50}, {70}};
        world_fill(&r, 1000 + i);
        r.is.parent = parent;
        r.is.n_tokens = i == 0 ? 3 : i == 1 ? 4 : 1;
        memcpy(r.tokens, tails[i], sizeof tails[i]);
        CHECK_EQ(store.write(store.self, &r.is, NULL), PAGED_OK);
    }
    put(501); /* a whole block behind the same parent */
    const struct {
        int32_t prompt[5], n, want, n_common;
    } cases[] = {{{10, 20, 30, 99}, 4, 1000, 3}, {{10, 20, 40, 50, 60}, 5, 1001, 4},
                 {{10, 20, 40}, 3, 1001, 3},     {{70, 1}, 2, 1002, 1},
                 {{10, 20, 35}, 3, 0, 2},        {{11}, 1, -1, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        memcpy(prompt, cases[i].prompt, sizeof cases[i].prompt);
        const paged_status status = store.tail(store.self, &parent, prompt, cases[i].n, &key, &n_common);
        CHECK_EQ(status, cases[i].want < 0 ? PAGED_ERR_NOT_FOUND : PAGED_OK);
        if (cases[i].want < 0) continue;
        CHECK_EQ(n_common, cases[i].n_common);
        const paged_key want = world_key(cases[i].want);
        if (cases[i].want) CHECK(paged__key_equal(&key, &want));
    }
    CHECK_EQ(store.tail(store.self, &(paged_key){{1}}, prompt, 1, &key, &n_common), PAGED_ERR_NOT_FOUND);
    close_both();
}

/* ---- limits ---- */

static void the_least_recently_used_goes(void) {
    new_dir();
    open_slots(10);
    for (int i = 0; i < 10; i++) put(i);
    for (int i = 0; i < 5; i++) CHECK_EQ(get_number(&store, i), PAGED_OK);
    for (int i = 10; i < 15; i++) put(i); /* 5 … 9 go */
    for (int i = 0; i < 15; i++)
        CHECK_EQ(get_number(&store, i), i >= 5 && i < 10 ? PAGED_ERR_NOT_FOUND : PAGED_OK);
    close_both();
    for (int round = 0; round < 4; round++) {
        open_slots(10);
        for (int i = 0; i < 100; i++) put(100 * round + i);
        CHECK_EQ(stats_of(&store).bytes, 10 * WORLD_SLOT);
        CHECK_EQ(stats_of(&store).n_records, 10);
        close_both();
        CHECK(dir_bytes(world_dir) < 10 * WORLD_SLOT + (256 << 10));
    }
}

/* The order of use outlives a restart, and does not depend on the clock. */
static int64_t jumped_to;
static int64_t jumping_clock(void) {
    return jumped_to;
}

static void clocks_that_jump(void) {
    paged__system_calls calls = paged__system_real;
    calls.wall_s = jumping_clock;
    paged__system_set(&calls);
    new_dir();
    paged_file_store_config config = world_config(world_dir, 10);
    config.ttl_s = 1000;
    jumped_to = 2000000000;
    open_with(&config);
    for (int i = 0; i < 5; i++) put(i);
    jumped_to = 1000000000; /* back by 31 years */
    for (int i = 5; i < 12; i++) put(i);
    CHECK_EQ(get_number(&store, 0),
             PAGED_ERR_NOT_FOUND); /* the oldest by use, though the newest by the clock */
    CHECK_EQ(get_number(&store, 1), PAGED_ERR_NOT_FOUND);
    for (int i = 2; i < 12; i++) CHECK_EQ(get_number(&store, i), PAGED_OK);
    close_both();
    open_with(&config);
    jumped_to += 999;
    CHECK_EQ(get_number(&store, 11), PAGED_OK);
    jumped_to += 500; /* of the others nobody said a thing for 1499 s, of no. 2 … 4 neither */
    CHECK_EQ(count_found(&store, 12), 1);
    close_both();
    open_with(&config);
    CHECK_EQ(stats_of(&store).n_records, 1);
    jumped_to += 5000;
    CHECK_EQ(store.flush(store.self, NULL), PAGED_OK); /* a running store forgets as well */
    CHECK_EQ(stats_of(&store).n_records, 0);
    close_both();
    paged__system_set(NULL);
}

static int64_t shown_free;
static int small_disk(int fd, struct statvfs *out) {
    const int result = fstatvfs(fd, out);
    out->f_bavail = (fsblkcnt_t)shown_free / out->f_frsize;
    return result;
}

static void keeps_the_disk_free(void) {
    paged__system_calls calls = paged__system_real;
    paged_error err;
    calls.stat_fs = small_disk;
    paged__system_set(&calls);
    new_dir();
    paged_file_store_config config = world_config(world_dir, 100);
    config.keep_free_bytes = 1 << 20;
    shown_free = 1 << 20;
    open_with(&config);
    CHECK_EQ(put_number(&store, 1, &err), PAGED_ERR_LIMIT);
    CHECK(strstr(err.message, "1048576"));
    shown_free = 1 << 30;
    for (int i = 0; i < 20; i++) put(i);
    const uint64_t bytes = stats_of(&store).bytes;
    CHECK(bytes >= 20 * WORLD_SLOT && bytes <= 40 * WORLD_SLOT); /* it doubles */
    shown_free = 0;
    for (int i = 20; i < 40; i++) put(i); /* in place of others */
    CHECK_EQ(stats_of(&store).bytes, bytes);
    CHECK_EQ(get_number(&store, 39), PAGED_OK);
    close_both();
    paged__system_set(NULL);
}

static void a_smaller_limit_shrinks(void) {
    new_dir();
    open_slots(50);
    for (int i = 0; i < 50; i++) put(i);
    close_both();
    open_slots(20);
    CHECK_EQ(stats_of(&store).bytes, 20 * WORLD_SLOT);
    CHECK_EQ(stats_of(&store).n_records, 20);
    CHECK_EQ(count_found(&store, 50), 20);
    close_both();
    open_slots(1);
    CHECK_EQ(stats_of(&store).n_records, 1);
    for (int i = 50; i < 60; i++) put(i);
    CHECK_EQ(count_found(&store, 60), 1);
    CHECK_EQ(get_number(&store, 59), PAGED_OK);
    close_both();
    CHECK(dir_bytes(world_dir) < WORLD_SLOT + (256 << 10));
    paged_file_store_config config = world_config(world_dir, 1);
    config.max_bytes = WORLD_SLOT - 1;
    open_with(&config);
    CHECK_EQ(put_number(&store, 1, NULL), PAGED_ERR_LIMIT);
    close_both();
}

/* ---- pins ---- */

static void pinned_records_stay(void) {
    new_dir();
    open_slots(20);
    CHECK_EQ(pin_numbers("later", 5, 3), PAGED_OK); /* 5 … 7, which are not there yet */
    for (int i = 0; i < 10; i++) put(i);
    CHECK_EQ(pin_numbers("conv-a", 0, 4), PAGED_OK);
    CHECK_EQ(pin_numbers("conv-b", 2, 3), PAGED_OK); /* 2 and 3 of both */
    CHECK_EQ(pin_numbers("../x", 2, 3), PAGED_ERR_INVALID_ARG);
    for (int i = 100; i < 150; i++) put(i);
    CHECK_EQ(n_there(0, 10), 8);
    CHECK_EQ(n_there(100, 50), 12);
    close_both();
    open_slots(20); /* after a restart, too */
    for (int i = 200; i < 250; i++) put(i);
    CHECK_EQ(n_there(0, 10), 8);
    /* What one name gives up another one has still. */
    CHECK_EQ(pin_numbers("conv-a", 0, 0), PAGED_OK);
    CHECK_EQ(pin_numbers("later", 6, 1), PAGED_OK);
    for (int i = 300; i < 350; i++) put(i);
    CHECK_EQ(n_there(0, 10), 4);
    CHECK_EQ(n_there(2, 3) + n_there(6, 1), 4);
    /* Nothing may go: what is new is refused, and all is as it was. */
    CHECK_EQ(pin_numbers("rest", 334, 16), PAGED_OK);
    CHECK_EQ(n_there(334, 16), 16);
    CHECK_EQ(put_number(&store, 400, NULL), PAGED_ERR_LIMIT);
    CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
    CHECK_EQ(n_there(334, 16) + n_there(2, 3) + n_there(6, 1), 20);
    put(335); /* one that is there is used again as ever */
    CHECK_EQ(pin_numbers("rest", 334, 15), PAGED_OK);
    put(400);
    CHECK_EQ(n_there(349, 1), 0);
    close_both();
}

static void pins_and_limits(void) {
    paged__system_calls calls = paged__system_real;
    calls.wall_s = jumping_clock;
    paged__system_set(&calls);
    jumped_to = 1000000000;
    new_dir();
    paged_file_store_config config = world_config(world_dir, 20);
    config.ttl_s = 1000;
    open_with(&config);
    for (int i = 0; i < 20; i++) put(i);
    CHECK_EQ(pin_numbers("conv-a", 3, 3), PAGED_OK); /* 3 … 5 */
    jumped_to += 5000;
    CHECK_EQ(n_there(0, 20), 3);
    CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
    CHECK_EQ(stats_of(&store).n_records, 3);
    close_both();
    jumped_to += 5000;
    open_with(&config);
    CHECK_EQ(n_there(0, 20), 3);
    for (int i = 20; i < 40; i++) put(i);
    close_both();
    /* A smaller limit takes what lies behind the last pinned record. */
    config.max_bytes = 2 * WORLD_SLOT;
    open_with(&config);
    CHECK_EQ(n_there(3, 3), 3);
    CHECK_EQ(stats_of(&store).bytes, 6 * WORLD_SLOT);
    close_both();
    /* Another model's records do not take their place, and its file stays. */
    jumped_to += 10;
    paged_store_shape shape = world_shape;
    shape.fingerprint_bytes--;
    CHECK_EQ(paged_file_store_create(&config, &store, &notes, NULL), PAGED_OK);
    CHECK_EQ(store.open(store.self, &shape, NULL), PAGED_OK);
    CHECK_EQ(put_number(&store, 1, NULL), PAGED_ERR_LIMIT);
    close_both();
    config.read_only = true;
    open_with(&config);
    CHECK_EQ(n_there(3, 3), 3);
    CHECK_EQ(pin_numbers("conv-a", 3, 1), PAGED_ERR_LIMIT);
    close_both();
    config.read_only = false;
    open_with(&config);
    CHECK_EQ(pin_numbers("conv-a", 0, 0), PAGED_OK);
    jumped_to += 5000;
    CHECK_EQ(n_there(3, 3), 0);
    close_both();
    paged__system_set(NULL);
}

/* An index from before there were pins is as good. */
static void pins_come_to_old_indexes(void) {
    new_dir();
    open_slots(10);
    for (int i = 0; i < 5; i++) put(i);
    close_both();
    sql("DROP TABLE pins");
    paged_file_store_config config = world_config(world_dir, 10);
    config.read_only = true;
    open_with(&config); /* which changes nothing */
    CHECK_EQ(n_there(0, 5), 5);
    CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
    close_both();
    open_slots(10);
    CHECK_EQ(n_there(0, 5), 5);
    CHECK_EQ(pin_numbers("conv-a", 0, 2), PAGED_OK);
    for (int i = 10; i < 30; i++) put(i);
    CHECK_EQ(n_there(0, 5), 2);
    close_both();
}

/* ---- the index and the slots ---- */

/* One that has an index of slots, too, as they had before. */
static void old_indexes_lose_their_slots(void) {
    static const char count[] = "SELECT count(*) FROM sqlite_master WHERE name = 'records_slot'";
    new_dir();
    open_slots(10);
    for (int i = 0; i < 10; i++) put(i);
    close_both();
    CHECK_EQ(ask(count), 0);
    sql("CREATE UNIQUE INDEX records_slot ON records(shape, slot)");
    paged_file_store_config config = world_config(world_dir, 10);
    config.read_only = true;
    open_with(&config); /* which changes nothing */
    CHECK_EQ(n_there(0, 10), 10);
    close_both();
    CHECK_EQ(ask(count), 1);
    open_slots(10);
    CHECK_EQ(n_there(0, 10), 10);
    for (int i = 10; i < 25; i++) put(i);
    CHECK_EQ(n_there(0, 15), 0);
    CHECK_EQ(n_there(15, 10), 10);
    close_both();
    CHECK_EQ(ask(count), 0);
    CHECK_EQ(ask("SELECT count(DISTINCT slot) FROM records"), 10);
}

static void two_records_in_one_slot_are_damage(void) {
    paged_error err;
    paged_file_store_config config = world_config(world_dir, 10);
    new_dir();
    open_slots(10);
    for (int i = 0; i < 5; i++) put(i);
    close_both();
    sql("UPDATE records SET slot = 2 WHERE slot = 4");
    config.read_only = true;
    CHECK_EQ(paged_file_store_create(&config, &store, NULL, &err), PAGED_ERR_CORRUPT);
    CHECK(strstr(err.message, "two records in one slot"));
    open_slots(10);
    CHECK(exists("index.sqlite.damaged"));
    CHECK_EQ(stats_of(&store).n_damaged, 1);
    CHECK_EQ(n_there(0, 5), 0);
    put(0);
    CHECK_EQ(n_there(0, 5), 1);
    close_both();
}

/* A row with a slot that no file has is a miss, and goes. */
static void slots_that_cannot_be(void) {
    new_dir();
    open_slots(10);
    for (int i = 0; i < 5; i++) put(i);
    close_both();
    sql("UPDATE records SET slot = -7 WHERE slot = 4");
    open_slots(10);
    CHECK_EQ(n_there(0, 5), 4);
    CHECK_EQ(stats_of(&store).n_damaged, 1);
    put(4);
    CHECK_EQ(n_there(0, 5), 5);
    close_both();
}

/* What goes makes room by its key; a row whose time of use is no whole number still goes. */
static void what_goes_is_gone(void) {
    new_dir();
    open_slots(10);
    for (int i = 0; i < 10; i++) put(i);
    close_both();
    sql("UPDATE records SET used = used + 0.5");
    open_slots(10);
    for (int i = 10; i < 15; i++) put(i);
    CHECK_EQ(n_there(10, 5), 5);
    close_both();
    CHECK_EQ(ask("SELECT count(*) - count(DISTINCT slot) FROM records"), 0);
    CHECK_EQ(ask("SELECT count(*) FROM records"), 10);
}

/* Rows are sorted in memory: there may be no room for files, as in a container that is read only. */
static void many_rows_take_no_file(void) {
    struct rlimit before, none;
    paged_file_store_config config = world_config(world_dir, 10);
    new_dir();
    open_slots(10);
    put(0);
    close_both();
    sql("INSERT INTO records(shape, key, slot, parent, first, n_tokens, groups, used, used_at)"
        " WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200000)"
        " SELECT shape, randomblob(length(key)), i, parent, first, n_tokens, groups, i, used_at FROM "
        "records, n");
    config.read_only = true;
    CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
    none = (struct rlimit){.rlim_cur = 0, .rlim_max = before.rlim_max};
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    CHECK(setrlimit(RLIMIT_FSIZE, &none) == 0);
    open_with(&config);
    CHECK_EQ(n_there(0, 1), 1);
    close_both();
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
    signal(SIGXFSZ, handler);
}

/* ---- other shapes ---- */

static void open_other(const char *fingerprint, int64_t n_slots) {
    const paged_file_store_config config = world_config(world_dir, n_slots);
    paged_store_shape shape = world_shape;
    shape.fingerprint = (const uint8_t *)fingerprint;
    shape.fingerprint_bytes = strlen(fingerprint);
    CHECK_EQ(paged_file_store_create(&config, &store, &notes, NULL), PAGED_OK);
    CHECK_EQ(store.open(store.self, &shape, NULL), PAGED_OK);
}

/* Of another fingerprint that has pins only what is pinned counts; the rest goes for what is new. */
static void pins_of_others_leave_the_rest(void) {
    for (int is_smaller = 0; is_smaller < 2; is_smaller++) {
        const int64_t n_slots = is_smaller ? 10 : 20;
        new_dir();
        open_slots(20);
        for (int i = 0; i < 20; i++) put(i);
        CHECK_EQ(pin_numbers("conv-a", 3, 2), PAGED_OK); /* 3 and 4 */
        CHECK_EQ(pin_numbers("conv-b", 7, 1), PAGED_OK);
        close_both();
        open_other("another", n_slots);
        for (int i = 100; i < 150; i++) put(i);
        const paged_store_stats stats = stats_of(&store);
        CHECK(stats.bytes <= (uint64_t)n_slots * WORLD_SLOT);
        /* All but the slots of the three, or up to the last of them where files have no holes. */
        const int64_t n_found = n_there(100, 50);
        CHECK(n_found == n_slots - 3 || n_found == n_slots - 8);
        CHECK_EQ(stats.n_records, n_found + 3);
        CHECK_EQ(stats.n_evicted, 17 + 50 - n_found);
        close_both();
        open_slots(20);
        CHECK_EQ(n_there(0, 20), 3);
        CHECK_EQ(stats_of(&store).n_damaged, 0);
        close_both();
    }
}

/* What others have pinned is a part of the limit, also of one that became smaller. */
static void a_smaller_limit_beside_pins(void) {
    new_dir();
    open_slots(20);
    for (int i = 0; i < 8; i++) put(i);
    CHECK_EQ(pin_numbers("conv-a", 0, 5), PAGED_OK);
    close_both();
    open_other("another", 20);
    for (int i = 0; i < 12; i++) put(100 + i);
    CHECK_EQ(stats_of(&store).n_records, 20);
    close_both();
    open_other("another", 10);
    CHECK_EQ(stats_of(&store).bytes, 10 * WORLD_SLOT);
    CHECK_EQ(n_there(100, 12), 5); /* what is not pinned of the others goes first */
    for (int i = 0; i < 15; i++) put(200 + i);
    CHECK_EQ(stats_of(&store).bytes, 10 * WORLD_SLOT);
    close_both();
    open_other("another", 3); /* of which the others have more than all */
    CHECK_EQ(stats_of(&store).bytes, 5 * WORLD_SLOT);
    CHECK_EQ(put_number(&store, 300, NULL), PAGED_ERR_LIMIT);
    close_both();
    open_slots(3);
    CHECK_EQ(n_there(0, 5), 5);
    close_both();
}

/* Pins whose records are not there yet outlive a restart, and another fingerprint at its limit. */
static void pins_wait_for_their_records(void) {
    new_dir();
    open_slots(20);
    CHECK_EQ(pin_numbers("later", 5, 3), PAGED_OK);
    close_both();
    open_other("another", 20);
    for (int i = 0; i < 50; i++) put(i);
    CHECK_EQ(stats_of(&store).n_records, 20);
    close_both();
    open_other("another", 10);
    close_both();
    open_slots(20);
    for (int i = 0; i < 10; i++) put(i);
    for (int i = 100; i < 150; i++) put(i);
    CHECK_EQ(n_there(5, 3), 3);
    CHECK_EQ(pin_numbers("later", 0, 0), PAGED_OK);
    close_both();
}

/* Once it is known that all is pinned a refusal costs nothing, until something may go. */
static void refused_at_once(void) {
    const paged__file_store *s;
    paged__system_calls calls = paged__system_real;
    calls.stat_fs = small_disk;
    paged__system_set(&calls);
    shown_free = 1 << 30;
    new_dir();
    open_slots(10);
    s = store.self;
    for (int i = 0; i < 10; i++) put(i);
    CHECK_EQ(pin_numbers("conv-a", 0, 10), PAGED_OK);
    CHECK_EQ(put_number(&store, 100, NULL), PAGED_ERR_LIMIT);
    CHECK_EQ(get_number(&store, 1), PAGED_OK);
    CHECK_EQ(s->n_touched, 1);
    for (int i = 100; i < 110; i++) CHECK_EQ(put_number(&store, i, NULL), PAGED_ERR_LIMIT);
    CHECK_EQ(s->n_touched, 1); /* nothing was committed for it */
    CHECK_EQ(pin_numbers("conv-a", 1, 9), PAGED_OK);
    put(100);
    CHECK_EQ(n_there(0, 1), 0);
    close_both();
    /* A disk that was full. */
    new_dir();
    open_slots(100);
    put(0);
    CHECK_EQ(pin_numbers("conv-a", 0, 1), PAGED_OK);
    shown_free = 0;
    for (int i = 100; i < 103; i++) CHECK_EQ(put_number(&store, i, NULL), PAGED_ERR_LIMIT);
    shown_free = 1 << 30;
    put(100);
    CHECK_EQ(n_there(100, 1) + n_there(0, 1), 2);
    close_both();
    paged__system_set(NULL);
}

/* To pin again what is pinned changes nothing; one key more is one row more. */
static void only_what_differs_is_pinned(void) {
    new_dir();
    open_slots(50);
    paged__file_store *s = store.self;
    for (int i = 0; i < 20; i++) put(i);
    CHECK_EQ(pin_numbers("conv-a", 0, 10), PAGED_OK);
    CHECK_EQ(pin_numbers("conv-b", 5, 10), PAGED_OK);
    put(20);
    CHECK_EQ(paged__index_commit(&s->index, NULL), PAGED_OK); /* what waits is a change, too */
    int64_t n = sqlite3_total_changes64(s->index.db);
    CHECK_EQ(pin_numbers("conv-a", 0, 10), PAGED_OK);
    CHECK_EQ(pin_numbers("conv-c", 0, 0), PAGED_OK);
    CHECK_EQ(sqlite3_total_changes64(s->index.db), n);
    CHECK_EQ(s->n_new, 1); /* nothing was committed for it */
    paged_key twice[] = {world_key(12), world_key(12), world_key(3)};
    CHECK_EQ(pin_numbers("conv-a", 0, 11), PAGED_OK);
    CHECK_EQ(sqlite3_total_changes64(s->index.db), ++n);
    CHECK_EQ(pin_numbers("conv-a", 2, 10), PAGED_OK); /* two go, one comes */
    CHECK_EQ(sqlite3_total_changes64(s->index.db), n += 3);
    CHECK_EQ(store.pin(store.self, "conv-b", twice, 3, NULL), PAGED_OK); /* nine go, one comes */
    CHECK_EQ(sqlite3_total_changes64(s->index.db), n += 10);
    for (int i = 0; i < 20; i++) {
        const paged_key key = world_key(i);
        CHECK_EQ(paged__index_is_pinned(&s->index, s->shape_id, &key), (i >= 2 && i < 12) || i == 12);
    }
    close_both();
}

static void other_fingerprints_are_not_seen(void) {
    new_dir();
    open_slots(20);
    for (int i = 0; i < 10; i++) put(i);
    close_both();
    open_other("another", 20);
    CHECK_EQ(count_found(&store, 10), 0);
    CHECK_EQ(stats_of(&store).n_records, 10);
    for (int i = 0; i < 5; i++) put(i);
    CHECK_EQ(count_found(&store, 10), 5);
    close_both();
    CHECK(exists("data-1") && exists("data-2"));
    open_slots(20);
    CHECK_EQ(count_found(&store, 10), 10);
    CHECK_EQ(stats_of(&store).n_records, 15);
    close_both();
    /* What was used longest ago goes first, and its file with it. */
    open_other("third", 20);
    for (int i = 0; i < 8; i++) put(100 + i);
    close_both();
    CHECK(exists("data-1") && !exists("data-2") && exists("data-3"));
    open_other("third", 20);
    for (int i = 0; i < 20; i++) put(200 + i);
    CHECK_EQ(stats_of(&store).bytes, 20 * WORLD_SLOT);
    close_both();
    CHECK(!exists("data-1"));
    /* Looking leaves nothing behind. */
    for (int i = 0; i < 5; i++) {
        open_other("fourth", 20);
        close_both();
    }
    CHECK(!exists("data-4"));
}

/* ---- the directory ---- */

static void one_process_at_a_time(void) {
    paged_error err;
    paged_store second;
    new_dir();
    open_slots(10);
    const paged_file_store_config config = world_config(world_dir, 10);
    CHECK_EQ(paged_file_store_create(&config, &second, NULL, &err), PAGED_ERR_LIMIT);
    CHECK(strstr(err.message, world_dir) && strstr(err.message, "another process"));
    store.close(store.self);
    CHECK_EQ(paged_file_store_create(&config, &second, NULL, &err), PAGED_ERR_LIMIT); /* its notes live */
    notes.close(notes.self);
    CHECK_EQ(paged_file_store_create(&config, &second, NULL, &err), PAGED_OK);
    second.close(second.self);
}

static void refused_configurations(void) {
    paged_error err;
    paged_file_store_config config = world_config(world_dir, 10);
    new_dir();
    config.struct_size = 4;
    CHECK_EQ(paged_file_store_create(&config, &store, NULL, &err), PAGED_ERR_INVALID_ARG);
    config = world_config("", 10);
    CHECK_EQ(paged_file_store_create(&config, &store, NULL, &err), PAGED_ERR_INVALID_ARG);
    config = world_config(world_dir, 10);
    config.ttl_s = -1;
    CHECK_EQ(paged_file_store_create(&config, &store, NULL, &err), PAGED_ERR_INVALID_ARG);
    config = world_config("/no/such/place", 10);
    CHECK_EQ(paged_file_store_create(&config, &store, NULL, &err), PAGED_ERR_IO);
    CHECK(strstr(err.message, "/no/such/place") && strstr(err.message, "No such file"));
    open_slots(10);
    CHECK_EQ(store.open(store.self, &world_shape, &err), PAGED_ERR_INVALID_ARG);
    static world_record r;
    world_fill(&r, 1);
    r.is.n_tokens = WORLD_BLOCK + 1;
    CHECK_EQ(store.write(store.self, &r.is, &err), PAGED_ERR_INVALID_ARG);
    r.is.n_tokens = 1;
    r.is.groups = 4;
    CHECK_EQ(store.write(store.self, &r.is, &err), PAGED_ERR_INVALID_ARG);
    close_both();
}

static void other_versions_are_refused(void) {
    paged_error err;
    const paged_file_store_config config = world_config(world_dir, 10);
    new_dir();
    open_slots(10);
    put(1);
    close_both();
    sql("PRAGMA user_version=3");
    CHECK_EQ(paged_file_store_create(&config, &store, NULL, &err), PAGED_ERR_FORMAT);
    CHECK(strstr(err.message, "version 3"));
    sql("PRAGMA user_version=2; PRAGMA application_id=7");
    CHECK_EQ(paged_file_store_create(&config, &store, NULL, &err), PAGED_ERR_FORMAT);
    sql("PRAGMA application_id=1346849622");
    open_slots(10);
    CHECK_EQ(get_number(&store, 1), PAGED_OK);
    close_both();
}

static void reading_only_writes_nothing(void) {
    paged_file_store_config config = world_config(world_dir, 10);
    char path[256];
    struct stat before, after;
    new_dir();
    open_slots(10);
    for (int i = 0; i < 5; i++) put(i);
    CHECK_EQ(notes.put(notes.self, "a", "b", 1, 0, NULL), PAGED_OK);
    close_both();
    path_of(path, "index.sqlite");
    CHECK(stat(path, &before) == 0);
    CHECK(chmod(world_dir, 0500) == 0);
    config.read_only = true;
    open_with(&config);
    CHECK_EQ(count_found(&store, 10), 5);
    CHECK_EQ(put_number(&store, 7, NULL), PAGED_ERR_LIMIT);
    void *data;
    size_t n_bytes;
    CHECK_EQ(notes.get(notes.self, "a", SIZE_MAX, &data, &n_bytes, NULL), PAGED_OK);
    CHECK_EQ(n_bytes, 1);
    free(data);
    CHECK_EQ(notes.put(notes.self, "a", "b", 1, 0, NULL), PAGED_ERR_LIMIT);
    CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
    close_both();
    CHECK(chmod(world_dir, 0700) == 0);
    CHECK(stat(path, &after) == 0);
    CHECK(before.st_mtim.tv_sec == after.st_mtim.tv_sec && before.st_mtim.tv_nsec == after.st_mtim.tv_nsec);
    CHECK(!exists("index.sqlite-wal"));
}

/* Links and pipes where files should be are not followed and not waited for. */
static void links_and_pipes(void) {
    char path[256], target[256];
    paged_error err;
    const paged_file_store_config config = world_config(world_dir, 10);
    new_dir();
    open_slots(10);
    put(1);
    close_both();
    path_of(path, "data-1");
    path_of(target, "elsewhere");
    CHECK(rename(path, target) == 0 && symlink(target, path) == 0);
    open_slots(10);
    CHECK_EQ(get_number(&store, 1), PAGED_ERR_NOT_FOUND);
    CHECK_EQ(stats_of(&store).n_damaged, 1);
    put(1);
    close_both();
    struct stat info;
    CHECK(stat(target, &info) == 0 && info.st_size <= WORLD_SLOT);
    path_of(path, "data-2");
    CHECK(unlink(path) == 0 && mkfifo(path, 0600) == 0);
    open_slots(10);
    CHECK_EQ(get_number(&store, 1), PAGED_ERR_NOT_FOUND);
    close_both();
    path_of(path, "index.sqlite");
    CHECK(unlink(path) == 0 && symlink(target, path) == 0);
    CHECK_EQ(paged_file_store_create(&config, &store, NULL, &err), PAGED_ERR_IO);
    CHECK(unlink(path) == 0 && mkfifo(path, 0600) == 0);
    CHECK_EQ(paged_file_store_create(&config, &store, NULL, &err), PAGED_ERR_IO);
}

static void nobody_else_may_read(void) {
    struct stat info;
    char path[256];
    static const char *const names[] = {"", "index.sqlite", "index.sqlite-wal", "data-1"};
    new_dir();
    CHECK(rmdir(world_dir) == 0);
    const mode_t mask = umask(0);
    open_slots(10);
    put(1);
    CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
    umask(mask);
    for (int i = 0; i < 4; i++) {
        path_of(path, names[i]);
        CHECK(stat(path, &info) == 0);
        CHECK_EQ(info.st_mode & 0777, i ? 0600 : 0700);
    }
    close_both();
}

/* ---- notes ---- */

static char seen[100];
static bool list_name(void *user, const char *name, int64_t changed) {
    snprintf(seen + strlen(seen), sizeof seen - strlen(seen), "%s ", name);
    CHECK(changed > 1600000000);
    if (user) CHECK_EQ(notes.put(notes.self, name, "x", 1, 0, NULL), PAGED_OK); /* as a caller may */
    return strlen(seen) < 12;
}

static void notes_are_kept(void) {
    void *data;
    size_t n_bytes;
    new_dir();
    open_slots(10);
    static char big[PAGED__NOTE_MAX];
    memset(big, 'z', sizeof big);
    CHECK_EQ(notes.put(notes.self, "a", "first", 5, 0, NULL), PAGED_OK);
    CHECK_EQ(notes.put(notes.self, "b", "", 0, 0, NULL), PAGED_OK);
    CHECK_EQ(notes.put(notes.self, "c", big, sizeof big, 0, NULL), PAGED_OK);
    CHECK_EQ(notes.put(notes.self, "old", "x", 1, 1000, NULL), PAGED_OK);
    CHECK_EQ(notes.put(notes.self, "a", "second", 6, 0, NULL), PAGED_OK);
    CHECK_EQ(notes.put(notes.self, "../a", "x", 1, 0, NULL), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(notes.put(notes.self, "d", big, sizeof big + 1, 0, NULL), PAGED_ERR_INVALID_ARG);
    close_both();
    open_slots(10);
    seen[0] = 0;
    CHECK_EQ(notes.list(notes.self, list_name, NULL, NULL), PAGED_OK);
    CHECK_STR(seen, "a c b ");
    CHECK_EQ(notes.get(notes.self, "a", SIZE_MAX, &data, &n_bytes, NULL), PAGED_OK);
    CHECK_STR(data, "second");
    free(data);
    CHECK_EQ(notes.get(notes.self, "b", SIZE_MAX, &data, &n_bytes, NULL), PAGED_OK);
    CHECK_EQ(n_bytes, 0);
    free(data);
    CHECK_EQ(notes.get(notes.self, "c", SIZE_MAX, &data, &n_bytes, NULL), PAGED_OK);
    CHECK(n_bytes == sizeof big && memcmp(data, big, sizeof big) == 0);
    free(data);
    for (size_t n = 0; n < 2 * sizeof big; n = 100 * n + 7) { /* its beginning */
        CHECK_EQ(notes.get(notes.self, "c", n, &data, &n_bytes, NULL), PAGED_OK);
        CHECK(n_bytes == PAGED_MIN(n, sizeof big) && memcmp(data, big, n_bytes) == 0);
        free(data);
    }
    CHECK_EQ(notes.get(notes.self, "old", SIZE_MAX, &data, &n_bytes, NULL), PAGED_ERR_NOT_FOUND);
    CHECK_EQ(notes.erase(notes.self, "c", NULL), PAGED_OK);
    CHECK_EQ(notes.erase(notes.self, "c", NULL), PAGED_ERR_NOT_FOUND);
    CHECK_EQ(notes.get(notes.self, "c", SIZE_MAX, &data, &n_bytes, NULL), PAGED_ERR_NOT_FOUND);
    seen[0] = 0;
    CHECK_EQ(notes.list(notes.self, list_name, &seen, NULL), PAGED_OK);
    /* Without a shape, and beside a store that is gone. */
    store.close(store.self);
    CHECK_EQ(notes.get(notes.self, "a", SIZE_MAX, &data, &n_bytes, NULL), PAGED_OK);
    free(data);
    notes.close(notes.self);
    remove_tree(world_dir);
}

/* Counters are asked for, and notes written, by other threads than the one that has the store. */
static void *beside(void *user) {
    _Atomic bool *is_over = user;
    char text[32];
    int64_t n_notes = 0;
    while (!*is_over) {
        if (stats_of(&store).n_records > 20) return (void *)(intptr_t)-1; /* a CHECK is the main thread's */
        snprintf(text, sizeof text, "%lld", (long long)n_notes);
        if (notes.put(notes.self, "count", text, strlen(text), 0, NULL) == PAGED_OK) n_notes++;
    }
    return (void *)(intptr_t)n_notes;
}

static void beside_other_threads(void) {
    _Atomic bool is_over = false;
    pthread_t thread;
    void *n_notes, *data;
    size_t n_bytes;
    char text[32];
    new_dir();
    open_slots(20);
    CHECK(pthread_create(&thread, NULL, beside, (void *)&is_over) == 0);
    for (int i = 0; i < 300; i++) {
        put(i);
        CHECK_EQ(get_number(&store, i), PAGED_OK);
        if (i % 7 == 0) CHECK_EQ(store.flush(store.self, NULL), PAGED_OK);
    }
    is_over = true;
    CHECK(pthread_join(thread, &n_notes) == 0);
    CHECK((intptr_t)n_notes > 0);
    snprintf(text, sizeof text, "%lld", (long long)(intptr_t)n_notes - 1);
    CHECK_EQ(notes.get(notes.self, "count", SIZE_MAX, &data, &n_bytes, NULL), PAGED_OK);
    CHECK_STR(data, text);
    free(data);
    close_both();
}

#define TESTS(X)                                                                                             \
    X(comes_back_after_a_restart)                                                                            \
    X(twice_is_once)                                                                                         \
    X(more_groups_replace_fewer)                                                                             \
    X(tails_by_their_tokens)                                                                                 \
    X(the_least_recently_used_goes)                                                                          \
    X(clocks_that_jump)                                                                                      \
    X(keeps_the_disk_free)                                                                                   \
    X(a_smaller_limit_shrinks)                                                                               \
    X(pinned_records_stay)                                                                                   \
    X(pins_and_limits)                                                                                       \
    X(pins_come_to_old_indexes)                                                                              \
    X(old_indexes_lose_their_slots)                                                                          \
    X(two_records_in_one_slot_are_damage)                                                                    \
    X(slots_that_cannot_be)                                                                                  \
    X(what_goes_is_gone)                                                                                     \
    X(many_rows_take_no_file)                                                                                \
    X(pins_of_others_leave_the_rest)                                                                         \
    X(a_smaller_limit_beside_pins)                                                                           \
    X(pins_wait_for_their_records)                                                                           \
    X(refused_at_once)                                                                                       \
    X(only_what_differs_is_pinned)                                                                           \
    X(other_fingerprints_are_not_seen)                                                                       \
    X(one_process_at_a_time)                                                                                 \
    X(refused_configurations)                                                                                \
    X(other_versions_are_refused)                                                                            \
    X(reading_only_writes_nothing)                                                                           \
    X(links_and_pipes) X(nobody_else_may_read) X(beside_other_threads) X(notes_are_kept)
TEST_MAIN(TESTS)
