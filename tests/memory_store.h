/* memory_store.h: a store (paged/store.h) in memory, for tests, and to begin one of your own. Each call first
 * asks the test how it is to go wrong. It looks at what it is given: a record that comes twice must have the
 * same bytes, and a sealed tail zeros where it has no tokens. */
#ifndef PAGED_TESTS_MEMORY_STORE_H
#define PAGED_TESTS_MEMORY_STORE_H

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "paged/store.h"

enum { MEMORY_RECORDS = 4096 };

/* How a call goes wrong. */
typedef enum memory_fault {
    MEMORY_FINE = 0,
    MEMORY_FAILS,        /* NOT_FOUND or IO, and garbage in the buffers */
    MEMORY_WRONG_TOKENS, /* of a read: a record of another content */
    MEMORY_WRONG_PARENT,
    MEMORY_WRONG_FIRST,
    MEMORY_SHORT,    /* fewer tokens than asked for */
    MEMORY_NO_GROUP, /* the bytes of the last group are not there */
    MEMORY_LIES,     /* find and tail say yes to everything */
    MEMORY_SLOW,     /* takes slow_ms */
    MEMORY_FAULTS
} memory_fault;

typedef enum memory_call {
    MEMORY_OPEN,
    MEMORY_FIND,
    MEMORY_EXPECT,
    MEMORY_READ,
    MEMORY_TAIL,
    MEMORY_WRITE,
    MEMORY_FLUSH,
    MEMORY_CALLS
} memory_call;

typedef struct memory_record {
    paged_key key, parent;
    int32_t first, n_tokens;
    uint32_t groups;
    int32_t *tokens;
    uint8_t *bytes[PAGED_GROUPS_MAX];
} memory_record;

typedef struct memory_store {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    uint8_t fingerprint[4096]; /* of the engine that has it open; others are never seen here */
    paged_store_shape shape;
    memory_record records[MEMORY_RECORDS];
    int32_t n_records;
    memory_fault (*fault)(void *user, memory_call call);
    void *user;
    int32_t slow_ms;
    int32_t n_calls[MEMORY_CALLS], n_closed;
    int32_t n_conflicts;                /* a key that came with other content */
    paged_key expected[MEMORY_RECORDS]; /* [n_expected] of the latest expect; next: the one to be read now */
    int32_t n_expected, next;
    int32_t n_unexpected; /* reads of others */
    char pinned_by[129];
    paged_key pinned[MEMORY_RECORDS]; /* [n_pinned] of the latest pin */
    int32_t n_pinned, n_pins;
    char names[8][129]; /* [n_names] that pin something */
    int32_t n_names;
    bool blocked;      /* reads and writes wait until memory_let_go() */
    int32_t n_blocked; /* that wait now */
} memory_store;

static memory_store *memory_create(void) {
    memory_store *m = calloc(1, sizeof *m);
    pthread_mutex_init(&m->lock, NULL);
    pthread_cond_init(&m->moved, NULL);
    return m;
}

static void memory_clear(memory_store *m) {
    for (int32_t i = 0; i < m->n_records; i++) {
        free(m->records[i].tokens);
        for (int32_t g = 0; g < PAGED_GROUPS_MAX; g++) free(m->records[i].bytes[g]);
    }
    memset(m->records, 0, sizeof m->records);
    m->n_records = 0;
}

static void memory_destroy(memory_store *m) {
    memory_clear(m);
    pthread_cond_destroy(&m->moved);
    pthread_mutex_destroy(&m->lock);
    free(m);
}

static memory_fault memory_begin(memory_store *m, memory_call call) {
    pthread_mutex_lock(&m->lock);
    m->n_calls[call]++;
    if (m->blocked && (call == MEMORY_READ || call == MEMORY_WRITE)) {
        m->n_blocked++;
        pthread_cond_broadcast(&m->moved);
        while (m->blocked) pthread_cond_wait(&m->moved, &m->lock);
        m->n_blocked--;
    }
    const memory_fault fault = m->fault ? m->fault(m->user, call) : MEMORY_FINE;
    if (fault == MEMORY_SLOW) {
        const struct timespec ts = {.tv_sec = m->slow_ms / 1000, .tv_nsec = m->slow_ms % 1000 * 1000000l};
        nanosleep(&ts, NULL);
    }
    return fault;
}

__attribute__((unused)) static void memory_block(memory_store *m, bool blocked) {
    pthread_mutex_lock(&m->lock);
    m->blocked = blocked;
    pthread_cond_broadcast(&m->moved);
    pthread_mutex_unlock(&m->lock);
}

/* Until a call waits. */
__attribute__((unused)) static void memory_wait_blocked(memory_store *m) {
    pthread_mutex_lock(&m->lock);
    while (m->n_blocked == 0) pthread_cond_wait(&m->moved, &m->lock);
    pthread_mutex_unlock(&m->lock);
}

static bool memory_same_key(const paged_key *a, const paged_key *b) {
    return memcmp(a, b, sizeof *a) == 0;
}

static memory_record *memory_find_record(memory_store *m, const paged_key *key) {
    for (int32_t i = 0; i < m->n_records; i++)
        if (memory_same_key(&m->records[i].key, key)) return &m->records[i];
    return NULL;
}

static paged_status memory_open(void *self, const paged_store_shape *shape, paged_error *err) {
    memory_store *m = self;
    const memory_fault fault = memory_begin(m, MEMORY_OPEN);
    (void)err;
    m->shape = *shape;
    memcpy(m->fingerprint, shape->fingerprint, shape->fingerprint_bytes);
    m->shape.fingerprint = m->fingerprint;
    pthread_mutex_unlock(&m->lock);
    return fault == MEMORY_FAILS ? PAGED_ERR_IO : PAGED_OK;
}

static int32_t memory_find(void *self, const paged_key *keys, int32_t n) {
    memory_store *m = self;
    const memory_fault fault = memory_begin(m, MEMORY_FIND);
    int32_t i = 0;
    while (i < n && memory_find_record(m, &keys[i])) i++;
    if (fault == MEMORY_FAILS) i = 0;
    if (fault == MEMORY_LIES) i = n;
    pthread_mutex_unlock(&m->lock);
    return i;
}

static void memory_expect(void *self, const paged_key *keys, int32_t n) {
    memory_store *m = self;
    memory_begin(m, MEMORY_EXPECT);
    m->n_expected = n < MEMORY_RECORDS ? n : MEMORY_RECORDS;
    memcpy(m->expected, keys, (size_t)m->n_expected * sizeof *keys);
    m->next = 0;
    pthread_mutex_unlock(&m->lock);
}

static void memory_lie(paged_record *r, memory_fault fault, int32_t n_groups) {
    if (fault == MEMORY_WRONG_TOKENS) r->tokens[0] ^= 1;
    if (fault == MEMORY_WRONG_PARENT) r->parent.bytes[3] ^= 1;
    if (fault == MEMORY_WRONG_FIRST) r->first++;
    if (fault == MEMORY_SHORT) r->n_tokens = r->n_tokens / 2;
    if (fault == MEMORY_NO_GROUP) r->groups &= (1u << (n_groups - 1)) - 1;
}

static paged_status memory_read(void *self, paged_record *r, uint32_t wanted) {
    memory_store *m = self;
    const memory_fault fault = memory_begin(m, MEMORY_READ);
    const memory_record *from = memory_find_record(m, &r->key);
    const bool fails = !from || fault == MEMORY_FAILS;
    if (m->next < m->n_expected && memory_same_key(&m->expected[m->next], &r->key))
        m->next++;
    else
        m->n_unexpected++;
    for (int32_t g = 0; g < m->shape.n_groups; g++) {
        if (!(wanted >> g & 1)) continue;
        if (fails)
            memset(r->bytes[g], 0xa5, m->shape.block_bytes[g]);
        else if (from->groups >> g & 1)
            memcpy(r->bytes[g], from->bytes[g], m->shape.block_bytes[g]);
    }
    if (!fails) {
        r->parent = from->parent;
        r->first = from->first;
        r->n_tokens = from->n_tokens;
        r->groups = from->groups & wanted;
        memcpy(r->tokens, from->tokens, (size_t)m->shape.block_size * sizeof *r->tokens);
        memory_lie(r, fault, m->shape.n_groups);
    }
    pthread_mutex_unlock(&m->lock);
    return fails ? PAGED_ERR_NOT_FOUND : PAGED_OK;
}

static paged_status memory_tail(void *self, const paged_key *parent, const int32_t *tokens, int32_t n_tokens,
                                paged_key *key, int32_t *n_common) {
    memory_store *m = self;
    const memory_fault fault = memory_begin(m, MEMORY_TAIL);
    int32_t best = 0;
    for (int32_t i = 0; i < m->n_records; i++) {
        const memory_record *r = &m->records[i];
        int32_t n = 0;
        if (!memory_same_key(&r->parent, parent) || r->n_tokens == m->shape.block_size) continue;
        while (n < n_tokens && n < r->n_tokens && r->tokens[n] == tokens[n]) n++;
        if (fault == MEMORY_LIES) n = n_tokens;
        if (n <= best) continue;
        best = n;
        *key = r->key;
        *n_common = n;
    }
    pthread_mutex_unlock(&m->lock);
    return best && fault != MEMORY_FAILS ? PAGED_OK : PAGED_ERR_NOT_FOUND;
}

static paged_status memory_write(void *self, const paged_record *r, paged_error *err) {
    memory_store *m = self;
    const memory_fault fault = memory_begin(m, MEMORY_WRITE);
    memory_record *to = memory_find_record(m, &r->key);
    const bool fails = fault == MEMORY_FAILS || (!to && m->n_records == MEMORY_RECORDS);
    const size_t tokens_bytes = (size_t)m->shape.block_size * sizeof *r->tokens;
    (void)err;
    if (!fails && !to) {
        to = &m->records[m->n_records++];
        *to = (memory_record){r->key, r->parent, r->first, r->n_tokens, r->groups, malloc(tokens_bytes), {0}};
        memcpy(to->tokens, r->tokens, tokens_bytes);
    }
    for (int32_t g = 0; g < m->shape.n_groups && !fails; g++) {
        const size_t size = m->shape.block_bytes[g];
        if (!(r->groups >> g & 1)) continue;
        if (to->bytes[g] && memcmp(to->bytes[g], r->bytes[g], size) != 0) m->n_conflicts++;
        if (to->bytes[g]) continue;
        to->bytes[g] = malloc(size);
        memcpy(to->bytes[g], r->bytes[g], size);
        to->groups |= 1u << g;
    }
    if (!fails && (memcmp(to->tokens, r->tokens, tokens_bytes) != 0 || to->first != r->first ||
                   !memory_same_key(&to->parent, &r->parent)))
        m->n_conflicts++;
    pthread_mutex_unlock(&m->lock);
    return fails ? PAGED_ERR_IO : PAGED_OK;
}

static paged_status memory_pin(void *self, const char *name, const paged_key *keys, int32_t n,
                               paged_error *err) {
    memory_store *m = self;
    (void)err;
    pthread_mutex_lock(&m->lock);
    m->n_pins++;
    strncpy(m->pinned_by, name, sizeof m->pinned_by - 1);
    m->n_pinned = n < MEMORY_RECORDS ? n : MEMORY_RECORDS;
    if (n) memcpy(m->pinned, keys, (size_t)m->n_pinned * sizeof *keys);
    int32_t at = 0;
    while (at < m->n_names && strcmp(m->names[at], name) != 0) at++;
    if (n == 0 && at < m->n_names)
        memmove(m->names[at], m->names[at + 1], (size_t)(--m->n_names - at) * sizeof *m->names);
    else if (n && at == m->n_names && at < 8)
        strncpy(m->names[m->n_names++], name, sizeof *m->names - 1);
    pthread_mutex_unlock(&m->lock);
    return PAGED_OK;
}

static paged_status memory_pins(void *self, bool (*fn)(void *user, const char *name), void *user,
                                paged_error *err) {
    memory_store *m = self;
    (void)err;
    pthread_mutex_lock(&m->lock);
    for (int32_t i = 0; i < m->n_names && fn(user, m->names[i]); i++) continue;
    pthread_mutex_unlock(&m->lock);
    return PAGED_OK;
}

static paged_status memory_flush(void *self, paged_error *err) {
    memory_store *m = self;
    const memory_fault fault = memory_begin(m, MEMORY_FLUSH);
    (void)err;
    pthread_mutex_unlock(&m->lock);
    return fault == MEMORY_FAILS ? PAGED_ERR_IO : PAGED_OK;
}

static void memory_stats(void *self, paged_store_stats *out) {
    memory_store *m = self;
    pthread_mutex_lock(&m->lock);
    *out = (paged_store_stats){.n_records = (uint64_t)m->n_records, .up = true};
    pthread_mutex_unlock(&m->lock);
}

/* The records stay, for the next engine. */
static void memory_close(void *self) {
    memory_store *m = self;
    m->n_closed++;
}

static paged_store memory_as_store(memory_store *m) {
    return (paged_store){.self = m,
                         .name = "memory",
                         .open = memory_open,
                         .find = memory_find,
                         .expect = memory_expect,
                         .read = memory_read,
                         .tail = memory_tail,
                         .write = memory_write,
                         .pin = memory_pin,
                         .flush = memory_flush,
                         .get_stats = memory_stats,
                         .close = memory_close,
                         .pins = memory_pins};
}

#endif
