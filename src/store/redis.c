/* redis.c: records and notes on Redis servers (paged/redis_store.h).
 *
 *   PREFIX b:SHAPE:KEY          the first part_bytes of a record (store.h: front, then bytes)
 *   PREFIX b:SHAPE:KEY:i        its i-th further part, on the same server
 *   PREFIX t:SHAPE:PARENT       list of the sealed tails behind PARENT, newest first: key, n, tokens
 *   PREFIX n:NAME               a note; on its own server always, up or not: there is one truth
 *   PREFIX notes                sorted set of the names on that server, by the ms of their last change
 *
 * SHAPE is a hash of all that the engine is, and of the size of the parts, so that engines of different kinds
 * never meet. KEY and PARENT are hashes already: no name tells anything of a prompt.
 *
 * The first part is written last. So a record that was begun and not finished is not found; one that has lost
 * a part since is found, not believed, and deleted, so that the next one to compute it may write it again.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "mem/hash.h"
#include "store/redis_link.h"
#include "store/store.h"

enum {
    NAME_BYTES = PAGED__REDIS_PREFIX_MAX + 160, /* of a key, with its 0 */
    FIND_AT_ONCE = 256,                         /* keys asked for before the first answer is read */
    TAILS_MAX = 16,                             /* behind one parent */
    SMALL = 4096,                               /* bytes of a reply that is a number, a status or an error */
    NOTE_PATIENCE = 10,                         /* times timeout_ms, for a call about notes */
    NOTE_NAME_MAX = 128,                        /* paged/store.h says so */
    LIST_MAX = 100000,                          /* notes listed */
    LIST_AT_ONCE = 1000
};

typedef struct redis {
    paged__redis_link link;
    paged__shape shape;
    uint64_t shape_id;   /* in names */
    uint8_t *stream;     /* [stream_bytes] a record on its way */
    size_t stream_bytes; /* of a record with all groups */
    _Atomic uint64_t n_reads, n_hits, n_writes, n_damaged;
} redis;

/* How a part of a record ended. */
typedef enum outcome { WENT_WELL, IS_GONE, IS_DAMAGED, NO_ANSWER } outcome;

static uint64_t hash_of(const paged_key *key) {
    return XXH3_64bits(key->bytes, sizeof key->bytes);
}

static void name_of(const redis *r, char kind, const paged_key *key, int32_t part, char out[NAME_BYTES]) {
    char hex[2 * sizeof key->bytes + 1], suffix[16] = "";
    for (size_t i = 0; i < sizeof key->bytes; i++) snprintf(hex + 2 * i, 3, "%02x", key->bytes[i]);
    if (part) snprintf(suffix, sizeof suffix, ":%d", part);
    snprintf(out, NAME_BYTES, "%s%c:%016" PRIx64 ":%s%s", r->link.prefix, kind, r->shape_id, hex, suffix);
}

static int32_t n_parts_of(const redis *r, size_t n_bytes) {
    return (int32_t)((n_bytes + r->link.part_bytes - 1) / r->link.part_bytes);
}

/* Reads a reply that nobody looks at, but for its being one. */
static bool skip_reply(redis *r, paged__redis_server *s) {
    redisReply *reply = paged__redis_reply(&r->link, s, SMALL);
    if (!reply) return false;
    freeReplyObject(reply);
    return true;
}

/* The number of a reply; -1: it is none, or there is no reply. */
static long long take_number(paged__redis_link *l, paged__redis_server *s) {
    redisReply *reply = paged__redis_reply(l, s, SMALL);
    const long long n = reply && reply->type == REDIS_REPLY_INTEGER ? reply->integer : -1;
    if (reply) freeReplyObject(reply);
    return n;
}

/* Asks for the life of a name to begin again, or whether it is there: a reply of 1 or 0. */
static bool ask_touch(redis *r, paged__redis_server *s, const char *name) {
    return r->link.ttl_s ? paged__redis_ask(&r->link, s, "EXPIRE %s %d", name, r->link.ttl_s)
                         : paged__redis_ask(&r->link, s, "EXISTS %s", name);
}

/* ---- open, close ---- */

static void close_store(void *self) {
    redis *r = self;
    paged__redis_link_free(&r->link);
    paged__shape_free(&r->shape);
    paged__free(r->stream);
    paged__free(r);
}

static paged_status open_store(void *self, const paged_store_shape *shape, paged_error *err) {
    redis *r = self;
    paged__shape copy;
    PAGED_ASSERT(!r->stream);
    const paged_status status = paged__shape_copy(&copy, shape, err);
    if (status) return status;
    const size_t n_bytes =
        copy.front_bytes + paged__record_payload(&copy, (uint32_t)((1ull << copy.is.n_groups) - 1));
    /* One byte more, to see that there is more than there should be. */
    r->stream = paged__alloc(n_bytes + 1, 1);
    if (!r->stream) {
        paged__shape_free(&copy);
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a record of %zu bytes", n_bytes);
    }
    r->shape = copy;
    r->stream_bytes = n_bytes;
    r->shape_id = XXH3_64bits_withSeed(copy.id, sizeof copy.id, r->link.part_bytes);
    return PAGED_OK;
}

/* ---- find ---- */

/* The same for at most FIND_AT_ONCE keys: all are asked, then all answers read. */
static int32_t find_some(redis *r, const paged_key *keys, int32_t n) {
    paged__redis_server *servers[FIND_AT_ONCE];
    char name[NAME_BYTES];
    int32_t n_found = 0;
    bool goes_on = true;
    for (int32_t i = 0; i < n; i++) {
        servers[i] = paged__redis_at(&r->link, hash_of(&keys[i]));
        name_of(r, 'b', &keys[i], 0, name);
        if (servers[i] && !paged__redis_ask(&r->link, servers[i], "EXISTS %s", name)) servers[i] = NULL;
        if (!servers[i]) n = i;
    }
    for (int32_t i = 0; i < n; i++) {
        /* Every answer is read, so that the line is free for the next call. */
        goes_on &= take_number(&r->link, servers[i]) == 1;
        n_found += goes_on;
    }
    return n_found;
}

static int32_t find_keys(void *self, const paged_key *keys, int32_t n) {
    redis *r = self;
    int32_t n_found = 0;
    paged__redis_start(&r->link, r->link.timeout_ms);
    while (n_found < n) {
        const int32_t n_asked = PAGED_MIN(n - n_found, FIND_AT_ONCE);
        const int32_t n_here = find_some(r, keys + n_found, n_asked);
        n_found += n_here;
        if (n_here < n_asked) break;
    }
    return n_found;
}

/* ---- read ---- */

/* Reads a reply of exactly `size` bytes, or at most that if *size_out is given, into `to`. */
static outcome take_bytes(redis *r, paged__redis_server *s, uint8_t *to, size_t size, size_t *size_out) {
    redisReply *reply = paged__redis_reply(&r->link, s, size + SMALL);
    if (!reply) return NO_ANSWER;
    outcome out = IS_DAMAGED;
    if (reply->type == REDIS_REPLY_STRING && reply->len <= size && (size_out || reply->len == size)) {
        memcpy(to, reply->str, reply->len);
        if (size_out) *size_out = reply->len;
        out = WENT_WELL;
    }
    freeReplyObject(reply);
    return out;
}

/* The first part, which says how large the whole is: n_bytes. */
static outcome read_first(redis *r, paged__redis_server *s, paged_record *record, size_t *n_bytes) {
    char name[NAME_BYTES];
    size_t size = 0;
    const size_t most = PAGED_MIN(r->stream_bytes, r->link.part_bytes);
    name_of(r, 'b', &record->key, 0, name);
    /* A range of a name that is not there is empty, and no range is longer than agreed. */
    if (!paged__redis_ask(&r->link, s, "GETRANGE %s 0 %llu", name, (unsigned long long)most) ||
        !ask_touch(r, s, name))
        return NO_ANSWER;
    const outcome first = take_bytes(r, s, r->stream, most + 1, &size);
    if (first == NO_ANSWER || !skip_reply(r, s)) return NO_ANSWER;
    if (first != WENT_WELL) return first;
    if (size == 0) return IS_GONE;
    if (size < r->shape.front_bytes || !paged__record_open(&r->shape, r->stream, record)) return IS_DAMAGED;
    *n_bytes = r->shape.front_bytes + paged__record_payload(&r->shape, record->groups);
    return size == PAGED_MIN(*n_bytes, r->link.part_bytes) ? WENT_WELL : IS_DAMAGED;
}

static outcome read_further(redis *r, paged__redis_server *s, const paged_record *record, size_t n_bytes) {
    const int32_t n_parts = n_parts_of(r, n_bytes);
    const size_t part = r->link.part_bytes;
    char name[NAME_BYTES];
    outcome all = WENT_WELL;
    for (int32_t i = 1; i < n_parts; i++) {
        name_of(r, 'b', &record->key, i, name);
        if (!paged__redis_ask(&r->link, s, "GETRANGE %s 0 %llu", name, (unsigned long long)part) ||
            !ask_touch(r, s, name))
            return NO_ANSWER;
    }
    for (int32_t i = 1; i < n_parts; i++) {
        const size_t at = (size_t)i * part;
        const outcome one = take_bytes(r, s, r->stream + at, PAGED_MIN(part, n_bytes - at), NULL);
        if (one == NO_ANSWER || !skip_reply(r, s)) return NO_ANSWER;
        if (one != WENT_WELL) all = one;
    }
    return all;
}

static outcome copy_groups(redis *r, paged_record *record, uint32_t wanted) {
    const uint8_t *at = r->stream + r->shape.front_bytes;
    for (int32_t g = 0; g < r->shape.is.n_groups; g++) {
        if (!(record->groups >> g & 1)) continue;
        const size_t n = r->shape.is.block_bytes[g];
        if (wanted >> g & 1) {
            if (!paged__record_group_right(&r->shape, r->stream, g, at)) return IS_DAMAGED;
            memcpy(record->bytes[g], at, n);
        }
        at += n;
    }
    return WENT_WELL;
}

/* The first part alone is enough: without it the others are not found, and end by themselves. */
static void delete_record(redis *r, paged__redis_server *s, const paged_key *key) {
    char name[NAME_BYTES];
    name_of(r, 'b', key, 0, name);
    if (paged__redis_ask(&r->link, s, "DEL %s", name)) skip_reply(r, s);
}

static paged_status read_record(void *self, paged_record *record, uint32_t wanted) {
    redis *r = self;
    size_t n_bytes = 0;
    r->n_reads++;
    paged__redis_start(&r->link, r->link.timeout_ms);
    paged__redis_server *s = paged__redis_at(&r->link, hash_of(&record->key));
    if (!s) return PAGED_ERR_NOT_FOUND;
    outcome how = read_first(r, s, record, &n_bytes);
    if (how == WENT_WELL) how = read_further(r, s, record, n_bytes);
    if (how == WENT_WELL) how = copy_groups(r, record, wanted);
    if (how == WENT_WELL) {
        r->n_hits++;
        return PAGED_OK;
    }
    if (how == IS_DAMAGED) {
        r->n_damaged++;
        delete_record(r, s, &record->key);
    }
    return PAGED_ERR_NOT_FOUND;
}

/* ---- tails ---- */

typedef struct tail_entry {
    paged_key key;
    int32_t n_tokens;
} tail_entry; /* the tokens follow */

static void note_tail(redis *r, const paged_record *record) {
    char name[NAME_BYTES];
    const tail_entry head = {record->key, record->n_tokens};
    const size_t tokens_bytes = (size_t)record->n_tokens * sizeof(int32_t), size = sizeof head + tokens_bytes;
    paged__redis_server *s = paged__redis_at(&r->link, hash_of(&record->parent));
    if (!s) return;
    /* Of the stream, which has been written. */
    memcpy(r->stream, &head, sizeof head);
    memcpy(r->stream + sizeof head, record->tokens, tokens_bytes);
    name_of(r, 't', &record->parent, 0, name);
    if (!paged__redis_ask(&r->link, s, "LREM %s 0 %b", name, r->stream, size) ||
        !paged__redis_ask(&r->link, s, "LPUSH %s %b", name, r->stream, size) ||
        !paged__redis_ask(&r->link, s, "LTRIM %s 0 %d", name, TAILS_MAX - 1) || !ask_touch(r, s, name))
        return;
    for (int i = 0; i < 4; i++)
        if (!skip_reply(r, s)) return;
}

/* How many tokens an entry has in common with these; 0: it is no entry, too. */
static int32_t common_with(const redis *r, const redisReply *entry, const int32_t *tokens, int32_t n,
                           paged_key *key) {
    tail_entry head;
    if (entry->type != REDIS_REPLY_STRING || entry->len < sizeof head) return 0;
    memcpy(&head, entry->str, sizeof head);
    if (head.n_tokens < 1 || head.n_tokens > r->shape.is.block_size ||
        entry->len != sizeof head + (size_t)head.n_tokens * sizeof(int32_t))
        return 0;
    int32_t n_common = 0;
    n = PAGED_MIN(n, head.n_tokens);
    while (n_common < n && memcmp(entry->str + sizeof head + (size_t)n_common * sizeof(int32_t),
                                  &tokens[n_common], sizeof(int32_t)) == 0)
        n_common++;
    *key = head.key;
    return n_common;
}

static paged_status find_tail(void *self, const paged_key *parent, const int32_t *tokens, int32_t n_tokens,
                              paged_key *key, int32_t *n_common) {
    redis *r = self;
    char name[NAME_BYTES];
    int32_t best = 0;
    paged__redis_start(&r->link, r->link.timeout_ms);
    paged__redis_server *s = paged__redis_at(&r->link, hash_of(parent));
    name_of(r, 't', parent, 0, name);
    if (!s || !paged__redis_ask(&r->link, s, "LRANGE %s 0 %d", name, TAILS_MAX - 1) || !ask_touch(r, s, name))
        return PAGED_ERR_NOT_FOUND;
    const size_t entry_bytes = sizeof(tail_entry) + (size_t)r->shape.is.block_size * sizeof(int32_t);
    redisReply *reply = paged__redis_reply(&r->link, s, TAILS_MAX * (entry_bytes + 32) + SMALL);
    if (!reply) return PAGED_ERR_NOT_FOUND;
    for (size_t i = 0; reply->type == REDIS_REPLY_ARRAY && i < reply->elements; i++) {
        paged_key found;
        const int32_t n = common_with(r, reply->element[i], tokens, n_tokens, &found);
        if (n <= best) continue;
        best = n;
        *key = found;
    }
    freeReplyObject(reply);
    skip_reply(r, s);
    *n_common = best;
    return best ? PAGED_OK : PAGED_ERR_NOT_FOUND;
}

/* ---- write ---- */

/* Whether all parts are there already; each lives on. */
static outcome touch_all(redis *r, paged__redis_server *s, const paged_key *key, int32_t n_parts) {
    char name[NAME_BYTES];
    outcome all = WENT_WELL;
    for (int32_t i = 0; i < n_parts; i++) {
        name_of(r, 'b', key, i, name);
        if (!ask_touch(r, s, name)) return NO_ANSWER;
    }
    for (int32_t i = 0; i < n_parts; i++) {
        redisReply *reply = paged__redis_reply(&r->link, s, SMALL);
        if (!reply) return NO_ANSWER;
        if (reply->type != REDIS_REPLY_INTEGER || reply->integer != 1) all = IS_GONE;
        freeReplyObject(reply);
    }
    return all;
}

/* Asks to set a name for as long as records live. */
static bool ask_set(redis *r, paged__redis_server *s, const char *name, const uint8_t *bytes, size_t size) {
    return r->link.ttl_s ? paged__redis_ask(&r->link, s, "SET %s %b EX %d", name, bytes, size, r->link.ttl_s)
                         : paged__redis_ask(&r->link, s, "SET %s %b", name, bytes, size);
}

/* Whether the reply to a change is the one that means it was made. */
static paged_status take_ok(paged__redis_link *l, paged__redis_server *s, paged_error *err) {
    redisReply *reply = paged__redis_reply(l, s, SMALL);
    if (!reply) return paged__fail(err, PAGED_ERR_IO, "%s", l->reason);
    paged_status status = PAGED_OK;
    if (paged__redis_is_full(reply)) {
        status = paged__fail(err, PAGED_ERR_LIMIT, "Redis is full, and may not evict anything");
    } else if (reply->type == REDIS_REPLY_ERROR) {
        l->n_failures++;
        status = paged__fail(err, PAGED_ERR_IO, "Redis refused: %.200s", paged__redis_text(l, reply));
    }
    freeReplyObject(reply);
    return status;
}

/* The record as one run of bytes. */
static void fill_stream(redis *r, const paged_record *record) {
    struct iovec parts[PAGED__RECORD_PARTS];
    size_t at = r->shape.front_bytes;
    paged__record_seal(&r->shape, record, r->stream);
    const int n = paged__record_parts(&r->shape, record, record->groups, r->stream, parts);
    for (int i = 1; i < n; i++) {
        memcpy(r->stream + at, parts[i].iov_base, parts[i].iov_len);
        at += parts[i].iov_len;
    }
}

static paged_status write_parts(redis *r, paged__redis_server *s, const paged_key *key, size_t n_bytes,
                                paged_error *err) {
    const size_t part = r->link.part_bytes;
    char name[NAME_BYTES];
    for (int32_t i = n_parts_of(r, n_bytes) - 1; i >= 0; i--) {
        const size_t at = (size_t)i * part;
        name_of(r, 'b', key, i, name);
        if (!ask_set(r, s, name, r->stream + at, PAGED_MIN(part, n_bytes - at)))
            return paged__fail(err, PAGED_ERR_IO, "%s", r->link.reason);
        const paged_status status = take_ok(&r->link, s, err);
        if (status) return status;
    }
    return PAGED_OK;
}

static paged_status write_record(void *self, const paged_record *record, paged_error *err) {
    redis *r = self;
    if (!paged__record_possible(&r->shape, record))
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "record with %d tokens, groups %x", record->n_tokens,
                           record->groups);
    paged__redis_start(&r->link, r->link.timeout_ms);
    paged__redis_server *s = paged__redis_at(&r->link, hash_of(&record->key));
    if (!s) return paged__fail(err, PAGED_ERR_IO, "no Redis server is up: %s", r->link.reason);
    const size_t n_bytes = r->shape.front_bytes + paged__record_payload(&r->shape, record->groups);
    const outcome there = touch_all(r, s, &record->key, n_parts_of(r, n_bytes));
    if (there == NO_ANSWER) return paged__fail(err, PAGED_ERR_IO, "%s", r->link.reason);
    if (there != WENT_WELL) {
        fill_stream(r, record);
        const paged_status status = write_parts(r, s, &record->key, n_bytes, err);
        if (status) return status;
        r->n_writes++;
    }
    if (record->n_tokens < r->shape.is.block_size) note_tail(r, record);
    return PAGED_OK;
}

static paged_status flush_nothing(void *self, paged_error *err) {
    (void)self;
    (void)err;
    return PAGED_OK; /* each write has been answered */
}

static void get_stats(void *self, paged_store_stats *out) {
    redis *r = self;
    const uint64_t n_hits = r->n_hits; /* before the reads, so that there are never more of them */
    *out = (paged_store_stats){.n_reads = r->n_reads,
                               .n_hits = n_hits,
                               .n_writes = r->n_writes,
                               .n_damaged = r->n_damaged,
                               .n_failures = r->link.n_failures,
                               .read_bytes = r->link.read_bytes,
                               .written_bytes = r->link.written_bytes,
                               .up = r->link.up};
}

/* ---- notes ---- */

typedef struct note {
    char name[NOTE_NAME_MAX + 1];
    int64_t changed_ms;
} note;

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static paged__redis_server *start_note(redis *r, const char *name, char key[NAME_BYTES],
                                       char index[NAME_BYTES], paged_status *status, paged_error *err) {
    paged__redis_server *s = NULL;
    *status = paged__note_check(name, 0, err);
    if (*status) return NULL;
    snprintf(key, NAME_BYTES, "%sn:%s", r->link.prefix, name);
    snprintf(index, NAME_BYTES, "%snotes", r->link.prefix);
    paged__redis_start(&r->link, r->link.timeout_ms * NOTE_PATIENCE);
    s = paged__redis_home(&r->link, XXH3_64bits(name, strlen(name)));
    if (!s) *status = paged__fail(err, PAGED_ERR_IO, "the server of this note is not up: %s", r->link.reason);
    return s;
}

static paged_status erase_note(void *self, const char *name, paged_error *err) {
    redis *r = self;
    char key[NAME_BYTES], index[NAME_BYTES];
    paged_status status;
    paged__redis_server *s = start_note(r, name, key, index, &status, err);
    if (!s) return status;
    if (!paged__redis_ask(&r->link, s, "DEL %s", key) ||
        !paged__redis_ask(&r->link, s, "ZREM %s %s", index, name))
        return paged__fail(err, PAGED_ERR_IO, "%s", r->link.reason);
    const long long n = take_number(&r->link, s), n_listed = take_number(&r->link, s);
    if (n < 0 || n_listed < 0) return paged__fail(err, PAGED_ERR_IO, "%s", r->link.reason);
    return n ? PAGED_OK : paged__fail(err, PAGED_ERR_NOT_FOUND, "there is no %s", name);
}

static paged_status put_note(void *self, const char *name, const void *data, size_t size_bytes, int64_t until,
                             paged_error *err) {
    redis *r = self;
    char key[NAME_BYTES], index[NAME_BYTES];
    paged_status status = paged__note_check(name, size_bytes, err);
    if (status) return status;
    const int64_t now = now_ms();
    if (until && until <= now / 1000) {
        status = erase_note(self, name, err);
        return status == PAGED_ERR_NOT_FOUND ? PAGED_OK : status;
    }
    paged__redis_server *s = start_note(r, name, key, index, &status, err);
    if (!s) return status;
    const bool asked = until ? paged__redis_ask(&r->link, s, "SET %s %b PX %lld", key, data, size_bytes,
                                                (long long)(until * 1000 - now))
                             : paged__redis_ask(&r->link, s, "SET %s %b", key, data, size_bytes);
    if (!asked || !paged__redis_ask(&r->link, s, "ZADD %s %lld %s", index, (long long)now, name))
        return paged__fail(err, PAGED_ERR_IO, "%s", r->link.reason);
    status = take_ok(&r->link, s, err);
    const paged_status listed = take_ok(&r->link, s, status ? NULL : err);
    return status ? status : listed;
}

static paged_status get_note(void *self, const char *name, size_t max_bytes, void **data, size_t *size_bytes,
                             paged_error *err) {
    redis *r = self;
    char key[NAME_BYTES], index[NAME_BYTES];
    paged_status status;
    paged__redis_server *s = start_note(r, name, key, index, &status, err);
    if (!s) return status;
    const size_t n_max = PAGED_MAX(PAGED_MIN(max_bytes, (size_t)PAGED__NOTE_MAX + 1), (size_t)1);
    /* A range is never longer than agreed, and one of a name that is not there is empty. */
    const bool asked = paged__redis_ask(&r->link, s, "EXISTS %s", key) &&
                       paged__redis_ask(&r->link, s, "GETRANGE %s 0 %d", key, (int)n_max - 1);
    const long long n_there = asked ? take_number(&r->link, s) : -1;
    redisReply *reply = n_there >= 0 ? paged__redis_reply(&r->link, s, PAGED__NOTE_MAX + SMALL) : NULL;
    if (!reply) return paged__fail(err, PAGED_ERR_IO, "%s", r->link.reason);
    if (n_there == 0) {
        status = paged__fail(err, PAGED_ERR_NOT_FOUND, "there is no %s", name);
    } else if (reply->type != REDIS_REPLY_STRING) {
        status = paged__fail(err, PAGED_ERR_IO, "Redis: %.200s", paged__redis_text(&r->link, reply));
    } else if (reply->len > PAGED__NOTE_MAX) {
        status = paged__fail(err, PAGED_ERR_IO, "%s has more than %d bytes", name, PAGED__NOTE_MAX);
    } else {
        const size_t n = PAGED_MIN(reply->len, max_bytes);
        void *copy = paged__note_copy(reply->str, n);
        if (copy) {
            *data = copy;
            *size_bytes = n;
        } else {
            status = paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for %zu bytes", n);
        }
    }
    freeReplyObject(reply);
    return status;
}

/* Of a page of names and scores, those that are still there into notes; the others leave the index. */
static bool take_page(redis *r, paged__redis_server *s, const redisReply *page, note *notes,
                      int32_t *n_notes) {
    const size_t n = page->elements / 2;
    char key[NAME_BYTES];
    for (size_t i = 0; i < n; i++) {
        const redisReply *name = page->element[2 * i];
        if (name->type != REDIS_REPLY_STRING || paged__note_check(name->str, 0, NULL)) return false;
        snprintf(key, sizeof key, "%sn:%s", r->link.prefix, name->str);
        if (!paged__redis_ask(&r->link, s, "EXISTS %s", key)) return false;
    }
    int32_t n_gone = 0;
    for (size_t i = 0; i < n; i++) {
        const redisReply *name = page->element[2 * i], *score = page->element[2 * i + 1];
        const long long there = take_number(&r->link, s);
        if (there < 0) return false;
        if (there == 0) {
            if (!paged__redis_ask(&r->link, s, "ZREM %snotes %s", r->link.prefix, name->str)) return false;
            n_gone++;
        } else if (score->type == REDIS_REPLY_STRING && *n_notes < LIST_MAX) {
            note *to = &notes[(*n_notes)++];
            snprintf(to->name, sizeof to->name, "%s", name->str);
            to->changed_ms = strtoll(score->str, NULL, 10);
        }
    }
    while (n_gone-- > 0)
        if (!skip_reply(r, s)) return false;
    return true;
}

static bool list_server(redis *r, paged__redis_server *s, note *notes, int32_t *n_notes) {
    for (int32_t at = 0; at < LIST_MAX; at += LIST_AT_ONCE) {
        if (!paged__redis_ask(&r->link, s, "ZREVRANGE %snotes %d %d WITHSCORES", r->link.prefix, at,
                              at + LIST_AT_ONCE - 1))
            return false;
        redisReply *page = paged__redis_reply(&r->link, s, LIST_AT_ONCE * 256);
        if (!page) return false;
        const bool ok = page->type == REDIS_REPLY_ARRAY && take_page(r, s, page, notes, n_notes);
        const bool is_last = !ok || page->elements < 2 * LIST_AT_ONCE;
        freeReplyObject(page);
        if (is_last) return ok;
    }
    return true;
}

static int by_change(const void *a, const void *b) {
    const note *x = a, *y = b;
    if (x->changed_ms != y->changed_ms) return x->changed_ms < y->changed_ms ? 1 : -1;
    return strcmp(x->name, y->name);
}

static paged_status list_notes(void *self, bool (*fn)(void *user, const char *name, int64_t changed),
                               void *user, paged_error *err) {
    redis *r = self;
    int32_t n_notes = 0, n_up = 0;
    note *notes = paged__alloc(LIST_MAX, sizeof *notes);
    if (!notes) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a list of %d notes", LIST_MAX);
    paged__redis_start(&r->link, r->link.timeout_ms * NOTE_PATIENCE);
    for (int32_t i = 0; i < r->link.n_servers; i++) {
        paged__redis_server *s = paged__redis_nth(&r->link, i);
        n_up += s && list_server(r, s, notes, &n_notes);
    }
    qsort(notes, (size_t)n_notes, sizeof *notes, by_change);
    for (int32_t i = 0; i < n_notes; i++)
        if (!fn(user, notes[i].name, notes[i].changed_ms / 1000)) break;
    paged__free(notes);
    return n_up ? PAGED_OK : paged__fail(err, PAGED_ERR_IO, "no Redis server is up: %s", r->link.reason);
}

/* ---- create ---- */

static redis *create(const paged_redis_store_config *config, paged_status *status, paged_error *err) {
    redis *r = paged__calloc(1, sizeof *r);
    *status = r ? paged__redis_link_init(&r->link, config, err)
                : paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a Redis store");
    if (*status) {
        paged__free(r);
        r = NULL;
    }
    return r;
}

/* Records and notes have lines of their own: they are used by two threads, and one must not wait for the
 * other's server. */
paged_status paged_redis_store_create(const paged_redis_store_config *config, paged_store *out,
                                      paged_notes *notes, paged_error *err) {
    paged_status status;
    redis *r = create(config, &status, err);
    if (!r) return status;
    if (notes) {
        redis *for_notes = create(config, &status, err);
        if (!for_notes) {
            close_store(r);
            return status;
        }
        *notes = (paged_notes){for_notes, put_note, get_note, erase_note, list_notes, close_store};
    }
    *out = (paged_store){.self = r,
                         .name = "redis",
                         .open = open_store,
                         .find = find_keys,
                         .read = read_record,
                         .tail = find_tail,
                         .write = write_record,
                         .flush = flush_nothing,
                         .get_stats = get_stats,
                         .close = close_store};
    return PAGED_OK;
}
