/* store/file.h: the parts of the file store, from the bottom up: the keys that the index may have, the index
 * (SQLite), the slots of one data file, what is read of them ahead, the store that joins them, its files, its
 * notes, the tools of `paged store`.
 *
 * What holds, whatever call fails and whenever the process ends:
 *  - The index names a record only after the data file was synced with it. A batch is one transaction of the
 *    index: data, fdatasync, COMMIT; if the sync fails, the batch is rolled back and never tried again.
 *  - A slot is written again only after the COMMIT that took its record out of the index.
 *  - Records that are staged (file_slots.c) are in the open transaction and not in the file yet; whoever
 *    reads a slot or commits drains them first.
 *  - A record is believed for its own checksums, key and shape, so nothing above is needed for right answers;
 *    it is needed so that records are found again and files do not grow.
 */
#ifndef PAGED_STORE_FILE_H
#define PAGED_STORE_FILE_H

#include <pthread.h>
#include <sqlite3.h>

#include "base/system.h"
#include "paged/file_store.h"
#include "store/store.h"

/* ---- file_known.c: which keys the index may have ---- */

typedef struct paged__known {
    uint64_t *at;       /* [n_room] the upper half of a key's hash, and its row + 1; 0: nothing */
    uint64_t n, n_room; /* n_room: a power of two; 0: nothing is known yet */
} paged__known;

/* Empty, with room for more than n keys. False: no memory. */
bool paged__known_make(paged__known *known, int64_t n);
void paged__known_free(paged__known *known); /* a zeroed one is fine */
enum { PAGED__ROW_MAX = INT32_MAX };
/* row: of `recent`, where to look first; 0: of `records`. What is there is there once. False: there is no
 * room; it is to be made anew. */
bool paged__known_add(paged__known *known, const paged_key *key, uint32_t row);
/* The next row that this key may have; *n_seen begins with 0. False: it has no other. */
bool paged__known_next(const paged__known *known, const paged_key *key, uint64_t *n_seen, uint32_t *row);
void paged__known_merged(paged__known *known); /* no row is recent any more */

/* ---- file_index.c: what is where ---- */

enum { PAGED__INDEX_VERSION = 2, PAGED__INDEX_STATEMENTS = 56 };
enum { PAGED__RECENT_MAX = 4096 /* rows, then they are merged */, PAGED__WAITING_MAX = 128 };

typedef struct paged__entry { /* a record as the index knows it */
    paged_key key, parent;
    int64_t slot, used_at; /* used_at: seconds since 1970 */
    int32_t first, n_tokens;
    uint32_t groups, row; /* row: in `recent`, if it is there; 0: it is in `records` */
} paged__entry;

typedef struct paged__waiting {
    paged__entry entry;
    int64_t shape, used;
    uint8_t *tail; /* the tokens of a sealed tail, or NULL */
} paged__waiting;

/* New rows go to a table of their own, `recent`, in the order of their coming: a commit then writes its last
 * pages, and not a page for each row, since keys are random. Together and in the order of keys they cost
 * `records` a fraction of that (paged__index_merge). A row is in one of the two; that of a sealed tail, which
 * is looked for by its tokens, always in `records`. Until they are committed, or something else is changed,
 * rows wait here: many of them cost SQLite little more than one. */
typedef struct paged__index {
    sqlite3 *db;
    sqlite3_stmt *statements[PAGED__INDEX_STATEMENTS];
    const char *path; /* of the owner, for messages */
    paged__known known;
    int64_t next_row;     /* of `recent`; rows and since are known when `known` is */
    int64_t recent_since; /* a turn of use: nothing recent was used before it */
    int64_t merge_at;     /* rows */
    int32_t n_waiting;    /* the last rows before next_row; that of a tail stays free */
    bool has_tails;       /* some of them */
    bool is_begun;        /* a transaction of SQLite's, which it may have given up since */
    bool is_torn;         /* some of what waited may be in it, and some not */
    paged__waiting waiting[PAGED__WAITING_MAX];
} paged__index;

typedef struct paged__shape_row {
    int64_t id, slot_bytes;
    int64_t n_records, last_slot; /* last_slot: -1 without records */
    int64_t last_used, last_used_at, n_pinned;
    bool has_pins; /* though their records may not be there yet */
    paged__shape shape;
} paged__shape_row;

/* Opens or begins an index. Errors: CORRUPT (damaged: to be set aside), FORMAT (of a newer version, or no
 * index of ours), LIMIT (somebody else has it open), IO, NO_MEMORY. */
paged_status paged__index_open(paged__index *index, const char *path, bool read_only, paged_error *err);
void paged__index_close(paged__index *index);

/* All between two commits is one transaction. A commit that leaves PAGED__RECENT_MAX recent rows merges them,
 * in a transaction of its own. */
bool paged__index_is_open(const paged__index *index);
/* SQLite gives a transaction up when a statement has no memory or cannot read, one that only asks included.
 * From then on all changes and the commit fail until a rollback, after which nothing of it is there. */
bool paged__index_is_lost(const paged__index *index);
paged_status paged__index_commit(paged__index *index, paged_error *err);
void paged__index_rollback(paged__index *index);
/* Puts what is recent in its place, by a transaction of its own (none is open). It is no loss if that fails:
 * they stay recent. */
void paged__index_merge(paged__index *index);

/* Each shape, the one that was used last at the end. `rows` are the caller's to free by
 * paged__shape_rows_free. */
paged_status paged__index_shapes(paged__index *index, paged__shape_row **rows, int32_t *n_rows,
                                 paged_error *err);
void paged__shape_rows_free(paged__shape_row *rows, int32_t n_rows);
paged_status paged__index_add_shape(paged__index *index, const paged__shape *shape, int64_t slot_bytes,
                                    int64_t *id, paged_error *err);
paged_status paged__index_drop_shape(paged__index *index, int64_t id, paged_error *err);

/* NOT_FOUND without a word in err. */
paged_status paged__index_get(paged__index *index, int64_t shape, const paged_key *key, paged__entry *out,
                              paged_error *err);
paged_status paged__index_tail(paged__index *index, int64_t shape, const paged_key *parent,
                               const int32_t *tokens, int32_t n_tokens, paged__entry *out, int32_t *n_common,
                               paged_error *err);
/* tokens: of a sealed tail, to be found by them; NULL of a whole block. */
paged_status paged__index_put(paged__index *index, int64_t shape, const paged__entry *entry, int64_t used,
                              const int32_t *tokens, paged_error *err);
/* entry: as get has given it. */
paged_status paged__index_touch(paged__index *index, int64_t shape, const paged__entry *entry, int64_t used,
                                int64_t used_at, paged_error *err);
paged_status paged__index_erase(paged__index *index, int64_t shape, const paged__entry *entry,
                                paged_error *err);

/* Takes out up to n <= PAGED__EVICT_MAX records, those not used for longest first, and says which slots they
 * had. */
enum { PAGED__EVICT_MAX = 64 };
paged_status paged__index_evict(paged__index *index, int64_t shape, int64_t *slots, int32_t n,
                                int32_t *n_evicted, paged_error *err);
paged_status paged__index_oldest_use(paged__index *index, int64_t shape, int64_t *used, paged_error *err);
/* Takes out what was not used since `before` (seconds), and what lies at `slot` or behind it. */
paged_status paged__index_expire(paged__index *index, int64_t before, int64_t *n_erased, paged_error *err);
paged_status paged__index_erase_unpinned(paged__index *index, int64_t shape, int64_t *n_erased,
                                         paged_error *err);
paged_status paged__index_cut(paged__index *index, int64_t shape, int64_t slot, int64_t *n_erased,
                              paged_error *err);
/* Records whose time of use is in the future were used now. */
paged_status paged__index_set_back(paged__index *index, int64_t now, paged_error *err);
paged_status paged__index_counts(paged__index *index, int64_t *n_records, int64_t *last_used,
                                 paged_error *err);

/* Instead of what `name` pinned before, these; of no shape, when n is 0. A pinned record is neither evicted
 * nor expired; it goes if it is damaged, cut off, or with its shape. differs: nothing is changed, but it says
 * whether anything would be; or NULL. */
paged_status paged__index_pin(paged__index *index, int64_t shape, const char *name, const paged_key *keys,
                              int32_t n, bool *differs, paged_error *err);
/* Each name that pins something, of all shapes, until fn says false. fn may not change the index. */
paged_status paged__index_pins_each(paged__index *index, bool (*fn)(void *user, const char *name), void *user,
                                    paged_error *err);
bool paged__index_is_pinned(paged__index *index, int64_t shape, const paged_key *key);
paged_status paged__index_last_pinned(paged__index *index, int64_t shape, int64_t *slot,
                                      paged_error *err); /* -1: none is there */

/* The slot of each record of a shape, in no order. fn may not change the index. */
paged_status paged__index_slots(paged__index *index, int64_t shape, void (*fn)(void *user, int64_t slot),
                                void *user, paged_error *err);
/* Each record of a shape in the order of slots, until fn says false. fn may not change the index. */
paged_status paged__index_each(paged__index *index, int64_t shape,
                               bool (*fn)(void *user, const paged__entry *entry), void *user,
                               paged_error *err);
paged_status paged__index_vacuum(paged__index *index, paged_error *err);

paged_status paged__index_note_put(paged__index *index, const char *name, const void *data, size_t size_bytes,
                                   int64_t now, int64_t until, paged_error *err);
paged_status paged__index_note_get(paged__index *index, const char *name, int64_t now, size_t max_bytes,
                                   void **data, size_t *size_bytes, paged_error *err);
paged_status paged__index_note_erase(paged__index *index, const char *name, paged_error *err);
paged_status paged__index_note_expire(paged__index *index, int64_t now, paged_error *err);
paged_status paged__index_note_each(paged__index *index, int64_t now,
                                    bool (*fn)(void *user, const char *name, int64_t changed), void *user,
                                    paged_error *err);

/* ---- file_slots.c: the slots of one data file ---- */

typedef enum paged__slot_state {
    PAGED__SLOT_FREE,
    PAGED__SLOT_USED,
    PAGED__SLOT_NEW,  /* written, not in the index for good */
    PAGED__SLOT_GOING /* out of the index, not for good */
} paged__slot_state;

/* Slots that are on their way to the file, which get there some at a time and past the system's memory
 * (O_DIRECT): a copy less, and no pages to be found, marked and written by the kernel's threads. */
typedef struct paged__stage {
    uint8_t *bytes; /* [n_max, slot_bytes]; NULL before the first */
    int32_t n, n_max;
    struct {
        int64_t slot;
        paged_key key;
    } of[64];
} paged__stage;

/* Records that will be read, on their way from the file (file_ahead.c). */
enum { PAGED__AHEAD_MAX = 64 };
typedef struct paged__ahead_half {
    uint8_t *bytes;                  /* [n_max, slot_bytes] */
    int64_t slots[PAGED__AHEAD_MAX]; /* [n] whose bytes these are */
    int32_t n;                       /* 0: none, and none under way */
    int32_t n_under_way;             /* of the reads */
    bool failed;                     /* of one of them, so none is believed */
    struct iocb reads[PAGED__AHEAD_MAX];
} paged__ahead_half;

typedef struct paged__ahead {
    aio_context_t reads; /* 0: not opened yet */
    bool off;            /* nothing more is read ahead of this file */
    uint8_t *bytes;      /* of both halves; NULL before the first */
    int32_t n_max;
    paged_key *keys; /* [n_keys] what will be read, [next …] not asked for yet */
    int32_t n_keys, n_keys_max, next;
    paged__ahead_half halves[2];
    int32_t at; /* the half that is looked at; the other one is under way */
} paged__ahead;

typedef struct paged__slots {
    int fd;     /* -1: no file */
    int direct; /* of the same file, past the system's memory; -1: the file system has no such way, and
                 * records are written one by one, and read when they are asked for */
    paged__stage stage;
    paged__ahead ahead;
    int64_t slot_bytes, n_slots, n_free;
    uint8_t *states;        /* [n_states >= n_slots] paged__slot_state */
    int64_t n_states, next; /* next: where to look for a free one */
} paged__slots;

enum { PAGED__SLOT_ALIGN = 4096 };

void paged__slots_name(int64_t shape, char name[32]);
/* The file of a shape: made if need be; one that is no regular file is an error. */
paged_status paged__slots_open(paged__slots *slots, int dir, int64_t shape, int64_t slot_bytes,
                               bool read_only, bool create, paged_error *err);
void paged__slots_close(paged__slots *slots);
/* All free, then told which are not. Errors: NO_MEMORY. */
paged_status paged__slots_reset(paged__slots *slots, int64_t n_slots, paged_error *err);
void paged__slots_mark(paged__slots *slots, int64_t slot, paged__slot_state state);
int64_t paged__slots_find_free(paged__slots *slots); /* -1: none */
/* By n, at the end, where the file system gives them a place. */
paged_status paged__slots_grow(paged__slots *slots, int64_t n, paged_error *err);
int64_t paged__slots_used(const paged__slots *slots); /* up to and with the last that is not free */
void paged__slots_settle(paged__slots *slots); /* after a commit: what is new is used, what goes is free */

/* Where the record of this key is to be put that is to go to this slot, [slot_bytes]; NULL: there is no
 * stage, or it is full. */
uint8_t *paged__slots_stage(paged__slots *slots, int64_t slot, const paged_key *key);
bool paged__slots_is_staged(const paged__slots *slots, int64_t slot);
/* Writes what is staged: 0, or an errno, and then whether any of it was written is not known. Nothing is
 * staged afterwards; stage.of still says what was. */
int paged__slots_drain(paged__slots *slots);

/* ---- file_ahead.c: what will be read ---- */

/* These will be read next, in this order; what was expected before is not any more. */
void paged__slots_expect(paged__slots *slots, const paged_key *keys, int32_t n);
/* Asks for as many of them as there is room for. slot_of: where one is; -1: nowhere. */
void paged__slots_read_ahead(paged__slots *slots, int64_t (*slot_of)(void *user, const paged_key *key),
                             void *user);
/* Whether a slot was asked for; then paged__slots_ahead is to follow. Those of the half before it are not
 * wanted any more: there is room again. */
bool paged__slots_is_ahead(paged__slots *slots, int64_t slot);
/* Waits for its bytes, [slot_bytes] until the next call; NULL: it could not be read. */
const uint8_t *paged__slots_ahead(paged__slots *slots, int64_t slot);
void paged__slots_end_ahead(paged__slots *slots);

/* ---- file_store.c: the store ---- */

typedef struct paged__file_store {
    pthread_mutex_t lock;       /* all but stats */
    pthread_mutex_t stats_lock; /* stats; taken inside lock, never the other way */
    int32_t n_users;            /* the store and its notes */
    paged_file_store_config config;
    char *dir, *index_path;
    int dir_fd;
    paged__index index;
    int64_t used; /* the last turn of use: records are in the order of their turns, whatever the clock does */

    paged__shape shape; /* of open() */
    int64_t shape_id;   /* 0: it has no row, and so no record */
    paged__slots slots;
    uint8_t *front;      /* [front_bytes] */
    int64_t other_bytes; /* of the data files of other shapes */
    bool nothing_goes;   /* all that could go is pinned, and nothing has changed since */
    uint32_t n_lost;     /* transactions */

    int32_t n_new, n_going, n_touched; /* in the open transaction */
    int64_t touched_at;                /* of the oldest touch of it */
    int64_t expired_at;                /* when old records were looked for */
    bool file_is_new;                  /* the directory is to be synced with the next commit */
    bool stale; /* a transaction was lost, and slots are to be read from the index again */
    int32_t n_quarantined;
    paged_store_stats stats;
} paged__file_store;

/* Every call begins and ends so: it may have lost a transaction, by a mere question as well, and not been
 * able to read what is left. */
paged_status paged__file_store_enter(paged__file_store *s, paged_error *err);
paged_status paged__file_store_leave(paged__file_store *s, paged_status status); /* gives status back */

/* For the tools (tools.h), which go from one shape to the next. */
paged_status paged__file_store_use(paged__file_store *s, const paged_store_shape *shape, paged_error *err);
/* is_use: it counts as one, for the order in which records go. */
paged_status paged__file_store_read(paged__file_store *s, paged_record *record, uint32_t wanted, bool is_use);
paged_status paged__file_store_tidy(paged__file_store *s, paged_error *err);
paged_status paged__file_store_commit(paged__file_store *s, paged_error *err);
paged_status paged__file_store_drop(paged__file_store *s, int64_t shape, paged_error *err);

/* ---- file_disk.c: its files ---- */

/* Of a data file: how long it is, and how much of that the disk has (holes are not there); -1: there is
 * none. */
int64_t paged__file_store_length(paged__file_store *s, const paged__shape_row *row);
int64_t paged__file_store_bytes(paged__file_store *s, const paged__shape_row *row);
void paged__file_store_trim(paged__file_store *s, int64_t shape, int64_t size_bytes);
/* What no record of the index has goes: what lies behind the last, and holes before it where the file system
 * has such. */
paged_status paged__file_store_punch(paged__file_store *s, const paged__shape_row *row, paged_error *err);

void paged__file_store_count_quarantined(paged__file_store *s);
/* Keeps a copy of a damaged slot for whoever wants to know why. It is no loss if that fails. */
void paged__file_store_quarantine(paged__file_store *s, const paged__entry *entry);

/* ---- file_notes.c ---- */

paged_notes paged__file_notes(paged__file_store *s, void (*close)(void *self));

#endif
