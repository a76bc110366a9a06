/* engine/stores.h: blocks on their way to and from stores (store.h); between stores.c, load.c and the
 * scheduler.
 *
 *   index ─ event ─> fresh ─ hold ─> writes [ring] ─┐                  the engine's thread
 *   request ─ ask ─────────────────> loads ─────────┤ lock
 *   anybody ─ pin ─────────────────> pins ──────────┤
 *                                                   ▼
 *                              store thread: loads first, then pins, then writes, then flush
 *
 * A flush costs syncs and commits, and each time that the thread wakes it takes a core from a step whose
 * other threads wait for it. So it waits until there is enough to flush, or nobody to disturb.
 *
 * A write is a hold of an entry (mem.h), so the thread reads tokens and bytes where they lie. A load first
 * asks which of a request's blocks the stores have; then the thread reads them into blocks that the request
 * has reserved and that the load holds besides, so that they are nobody else's until it is over, whatever
 * becomes of the request. What was read is committed by the engine's thread, in order, as far as it goes.
 *
 *   load:   ASKED ──> ANSWERED ──begin──> READING ──> READY ──begin──> READING …
 *
 * It is freed when there is nothing to read (any more); of a request that leaves, when the thread is done.
 *
 * The thread touches: what is under the lock, the loads it was given, the blocks and tokens held. Everything
 * else is the engine's.
 */
#ifndef PAGED_ENGINE_STORES_H
#define PAGED_ENGINE_STORES_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/base.h"
#include "paged/engine.h"

enum {
    PAGED__WRITES = 1024,    /* blocks that wait to be written, at most */
    PAGED__FRESH = 4096,     /* entries of the index between two looks at them */
    PAGED__LOAD_TOKENS = 16, /* less than that is computed */
    PAGED__ASK_MS = 250,     /* after that a request does not wait for an answer */
    PAGED__FLUSH_MS = 500,   /* what was written is made durable after that, or when the engine rests */
    PAGED__RATE_MS = 30000,  /* a speed that was measured before that is not known any more */
    PAGED__PINS = 1024       /* names that wait to be pinned, at most */
};

typedef struct paged__write {
    paged_hold hold;
    paged_key key, parent;
    bool dropped; /* the hold is released */
} paged__write;

typedef enum paged__load_state {
    PAGED__LOAD_ASKED,
    PAGED__LOAD_ANSWERED,
    PAGED__LOAD_READING,
    PAGED__LOAD_READY
} paged__load_state;

typedef struct paged__load {
    struct paged__load *next; /* in the thread's queue */
    /* the engine's thread */
    struct paged__load *all_next;
    struct paged__request *request; /* NULL: it has left; then it goes when the thread is done with it */
    paged__load_state state;
    bool counts;       /* what is read counts as found by the request */
    int32_t n_begun;   /* blocks of the runs that were begun */
    int32_t n_taken;   /* blocks that are committed, or given up */
    bool tail_begun;   /* the tail is in the run */
    uint64_t since_ns; /* of the question, of the run */
    /* before the thread gets it, constant from then on */
    int32_t first;    /* blocks before it, which are in memory */
    int32_t n_tokens; /* behind them, without the request's last one */
    int32_t n_keys;
    int32_t *tokens;  /* [n_tokens + 1] */
    paged_key parent; /* of the first key */
    paged_key *keys;  /* [n_keys + 1] of whole blocks; [n_found]: of the tail, once there is one */
    int32_t *blocks;  /* [n_keys + 1, n_groups] where they go, as far as begun; [n_keys]: the tail */
    /* the thread, and the engine's after it */
    uint8_t *from;   /* [n_keys + 1] store, as in keys */
    paged_key *told; /* [n_keys + 1] of a run, what a store is told that it will be asked for */
    int32_t n_found;
    int32_t n_tail; /* tokens of a partly filled block behind them; 0: none */
    bool tail_read;
    /* both */
    atomic_int n_read; /* blocks, in order */
    atomic_bool stop;  /* no more than the block at hand */
    bool done;         /* under the lock: the thread has answered, or has read what it will */
} paged__load;

/* What is to be pinned (pin.c), in place of what the name pinned before; or somebody who waits to hear which
 * names there are, and then it is that caller's. */
typedef struct paged__pin {
    struct paged__pin *next;
    char name[PAGED__LABEL_MAX + 1];
    bool (*tell)(void *user, const char *name); /* NULL: to be pinned */
    void *user;
    bool told; /* under the lock */
    paged_status status;
    int32_t n_keys;
    paged_key keys[]; /* [n_keys] */
} paged__pin;

/* Bytes in so many nanoseconds, of late. */
typedef struct paged__rate {
    double amount, ns;
    uint64_t at_ns;
} paged__rate;

typedef struct paged__stores {
    paged_store stores[PAGED_STORES_MAX];
    int32_t n_stores;
    bool opened, by_hand;
    char fingerprint[4096]; /* [fingerprint_bytes] text */
    size_t fingerprint_bytes;
    int32_t n_groups, block_size;
    paged_group_config groups[PAGED_GROUPS_MAX];
    size_t block_bytes[PAGED_GROUPS_MAX];
    uint8_t *arena;
    uint64_t (*now_ns)(void *self);
    void *clock;

    /* the engine's thread */
    paged_key *keys; /* [n_nodes_max] of the entries of the index */
    int32_t *fresh;  /* [PAGED__FRESH] entries that are not queued yet */
    int32_t n_fresh;
    bool rested;         /* as told to the thread */
    uint64_t n_released; /* writes that are over and have given their hold back */
    uint64_t n_seen;     /* of n_over */
    paged__rate prefill; /* tokens */
    paged__load *loads;  /* all of them */

    /* the store thread */
    int32_t *tokens;                  /* [block_size] of what it reads */
    uint8_t *bytes[PAGED_GROUPS_MAX]; /* [block_bytes] of a sealed tail on its way out */

    pthread_mutex_t lock;
    pthread_cond_t work, news;
    pthread_t thread;
    bool has_thread, ends;
    bool starved; /* a request waits for blocks that writes hold */
    bool rests;   /* the engine has no request */
    void (*notify)(void *user);
    void *notify_user;
    paged__write *writes; /* [PAGED__WRITES] number n at n % PAGED__WRITES */
    uint64_t n_queued, n_written;
    bool writing, dirty;
    uint64_t dirty_ns; /* since when */
    paged__load *first_load, *last_load;
    paged__pin *first_pin, **last_pin; /* last_pin: where the next one goes */
    int32_t n_pins;
    uint64_t n_over; /* loads and writes that the thread has done */
    paged__rate read[PAGED_STORES_MAX];
    struct {
        uint64_t n_read_bytes, n_writes, n_written_bytes, n_failures, read_ns, write_ns;
    } counted;
} paged__stores;

#endif
