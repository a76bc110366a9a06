/* engine/stores.c: the thread that talks to the stores, and what goes out to them. See stores.h.
 *
 * Keys. That of a block is XXH3-128 over the key before it and its tokens; before the first one comes a key
 * over the fingerprint and all bytes of the namespace. So equal keys mean equal tokens from the beginning on,
 * in the same namespace, of the same model in the same numerics. Each entry of the index has its key from the
 * event that tells of it.
 *
 * What is written holds its blocks. When a request lacks some that only writes hold, these are not written
 * (paged__stores_give), the newest first: they are ends of paths, and of use to nobody without what is before
 * them. The one that is being written is waited for, like another request's blocks.
 */
#include <signal.h>
#include <time.h>

#include "engine/engine.h"
#include "mem/hash.h"
#include "mem/mem.h"

enum {
    KEY_SEED = 11,   /* of blocks */
    SPACE_SEED = 12, /* of namespaces */
    NEWS_MS = 50,    /* an engine without a thread looks again after that */
    NS_PER_MS = 1000000
};

/* ---- keys ---- */

static paged_key key_from(XXH128_hash_t hash) {
    paged_key key;
    memcpy(key.bytes, &hash.low64, 8);
    memcpy(key.bytes + 8, &hash.high64, 8);
    return key;
}

paged_key paged__store_key(const paged_key *parent, const int32_t *tokens, int32_t n_tokens) {
    uint8_t buffer[sizeof *parent + PAGED__BLOCK_SIZE_MAX * sizeof *tokens];
    const size_t tokens_bytes = (size_t)n_tokens * sizeof *tokens;
    memcpy(buffer, parent, sizeof *parent);
    memcpy(buffer + sizeof *parent, tokens, tokens_bytes);
    return key_from(XXH3_128bits_withSeed(buffer, sizeof *parent + tokens_bytes, KEY_SEED));
}

paged_key paged__store_names_key(const paged__stores *st, const uint8_t *names, size_t n_bytes) {
    XXH3_state_t state;
    XXH3_INITSTATE(&state);
    XXH3_128bits_reset_withSeed(&state, SPACE_SEED);
    XXH3_128bits_update(&state, &st->fingerprint_bytes, sizeof st->fingerprint_bytes);
    XXH3_128bits_update(&state, st->fingerprint, st->fingerprint_bytes);
    XXH3_128bits_update(&state, names, n_bytes);
    return key_from(XXH3_128bits_digest(&state));
}

paged_key paged__store_space_key(const paged_engine *e, int32_t space) {
    const paged__space *names = &e->cache->spaces[space];
    return paged__store_names_key(e->stores, names->bytes, names->n_bytes);
}

static paged_key key_before(const paged_engine *e, int32_t entry) {
    const int32_t parent = e->cache->nodes[entry].parent;
    return parent >= 0 ? e->stores->keys[parent] : paged__store_space_key(e, -2 - parent);
}

/* ---- out: the engine's side ---- */

void paged__stores_event(void *user, const paged_event *event) {
    paged_engine *e = user;
    paged__stores *st = e->stores;
    if (st && st->opened && event->kind == PAGED_EVENT_STORED) {
        const paged_key parent = key_before(e, event->entry);
        st->keys[event->entry] = paged__store_key(&parent, event->tokens, event->n_tokens);
        if (st->n_fresh < PAGED__FRESH)
            st->fresh[st->n_fresh++] = event->entry;
        else
            e->stats.n_store_dropped++;
    }
    if (e->config.event) e->config.event(e->config.event_user, event);
}

static paged__write *write_at(const paged__stores *st, uint64_t n) {
    return &st->writes[n % PAGED__WRITES];
}

void paged__stores_take(paged_engine *e) {
    paged__stores *st = e->stores;
    const bool rests = e->n_running + e->n_waiting == 0;
    if (!st || (st->n_fresh == 0 && rests == st->rested)) return;
    pthread_mutex_lock(&st->lock);
    uint64_t n_queued = st->n_queued;
    pthread_mutex_unlock(&st->lock);
    const uint64_t n_before = n_queued;
    for (int32_t i = 0; i < st->n_fresh; i++) {
        /* Of numbers from n_queued on the thread knows nothing yet. */
        paged__write *w = write_at(st, n_queued);
        if (n_queued - st->n_released == PAGED__WRITES ||
            paged_entry_hold(e->cache, st->fresh[i], &w->hold)) {
            e->stats.n_store_dropped++;
            continue;
        }
        w->key = st->keys[st->fresh[i]];
        w->parent = key_before(e, st->fresh[i]);
        w->dropped = false;
        n_queued++;
    }
    st->n_fresh = 0;
    if (n_queued == n_before && rests == st->rested) return;
    pthread_mutex_lock(&st->lock);
    st->n_queued = n_queued;
    st->rests = st->rested = rests;
    pthread_cond_signal(&st->work);
    pthread_mutex_unlock(&st->lock);
}

/* Nobody but transfers has the blocks of the entry, so that they come free with them. */
static bool only_held(const paged_engine *e, const paged_hold *hold) {
    for (int32_t g = 0; g < e->n_groups; g++) {
        if (hold->blocks[g] < 0) continue;
        const paged__block *b = &e->cache->groups[g].blocks[hold->blocks[g]];
        if (b->refs == b->n_transfers) return true;
    }
    return false;
}

bool paged__stores_give(paged_engine *e) {
    paged__stores *st = e->stores;
    paged__write *found = NULL;
    if (!st) return false;
    pthread_mutex_lock(&st->lock);
    for (uint64_t n = st->n_queued; n > st->n_written + st->writing && !found; n--) {
        paged__write *w = write_at(st, n - 1);
        if (!w->dropped && only_held(e, &w->hold)) found = w;
    }
    if (found) found->dropped = true;
    pthread_mutex_unlock(&st->lock);
    if (!found) return false;
    paged_entry_release(e->cache, &found->hold);
    e->stats.n_store_dropped++;
    return true;
}

void paged__stores_poll(paged_engine *e) {
    paged__stores *st = e->stores;
    if (!st) return;
    pthread_mutex_lock(&st->lock);
    const uint64_t n_written = st->n_written;
    st->n_seen = st->n_over;
    st->starved = false;
    pthread_mutex_unlock(&st->lock);
    for (; st->n_released < n_written; st->n_released++) {
        const paged__write *w = write_at(st, st->n_released);
        if (!w->dropped) paged_entry_release(e->cache, &w->hold);
    }
    paged__loads_poll(e);
}

bool paged__stores_hold(const paged_engine *e) {
    paged__stores *st = e->stores;
    if (!st) return false;
    pthread_mutex_lock(&st->lock);
    const bool holds = st->n_queued > st->n_released || paged__loads_hold(st);
    st->starved = st->starved || holds;
    pthread_mutex_unlock(&st->lock);
    return holds;
}

bool paged__stores_pending(const paged_engine *e) {
    return e->stores && (e->stores->loads || paged__stores_hold(e));
}

/* ---- the thread ---- */

static uint64_t now(const paged__stores *st) {
    return st->now_ns(st->clock);
}

void paged__rate_add(paged__rate *rate, double amount, uint64_t ns, uint64_t at) {
    const double kept = 15.0 / 16; /* so that the last dozen counts */
    rate->amount = rate->amount * kept + amount;
    rate->ns = rate->ns * kept + (double)ns;
    rate->at_ns = at;
}

double paged__rate_ns(const paged__rate *rate, double amount, uint64_t at) {
    if (rate->amount <= 0 || at > rate->at_ns + (uint64_t)PAGED__RATE_MS * NS_PER_MS) return 0;
    return amount * rate->ns / rate->amount;
}

/* By pieces of a page: as one, libc takes the instruction for long copies. */
static void copy(uint8_t *to, const uint8_t *from, size_t n_bytes) {
    enum { PIECE = 4096 };
    for (size_t at = 0; at < n_bytes; at += PIECE) memcpy(to + at, from + at, PAGED_MIN(n_bytes - at, PIECE));
}

/* What leaves of a block. A sealed tail is copied, for its free slots have somebody else's bytes. */
static void fill_record(const paged__stores *st, const paged__write *w, paged_record *r) {
    *r = (paged_record){.key = w->key,
                        .parent = w->parent,
                        .first = w->hold.first,
                        .n_tokens = w->hold.n_tokens,
                        .tokens = st->tokens};
    memset(st->tokens, 0, (size_t)st->block_size * sizeof *st->tokens);
    memcpy(st->tokens, w->hold.tokens, (size_t)w->hold.n_tokens * sizeof *st->tokens);
    for (int32_t g = 0; g < st->n_groups; g++) {
        if (w->hold.blocks[g] < 0) continue;
        r->groups |= 1u << g;
        uint8_t *bytes = st->arena + (size_t)w->hold.blocks[g] * st->block_bytes[g];
        r->bytes[g] = bytes;
        if (r->n_tokens == st->block_size) continue;
        copy(st->bytes[g], bytes, st->block_bytes[g]);
        paged_block_clear(&st->groups[g], st->block_size, st->bytes[g], r->n_tokens);
        r->bytes[g] = st->bytes[g];
    }
}

static void write_one(paged__stores *st, const paged__write *w) {
    const uint64_t start = now(st);
    paged_record record;
    uint64_t n_failed = 0, bytes = 0;
    fill_record(st, w, &record);
    for (int32_t g = 0; g < st->n_groups; g++)
        if (record.groups >> g & 1) bytes += st->block_bytes[g];
    for (int32_t i = 0; i < st->n_stores; i++)
        n_failed += st->stores[i].write(st->stores[i].self, &record, NULL) != PAGED_OK;
    pthread_mutex_lock(&st->lock);
    st->counted.n_failures += n_failed;
    st->counted.n_writes++;
    st->counted.n_written_bytes += bytes * ((uint64_t)st->n_stores - n_failed);
    st->counted.write_ns += now(st) - start;
    pthread_mutex_unlock(&st->lock);
}

/* The flush that is due, or 0: at once. */
static uint64_t flush_at(const paged__stores *st) {
    return st->by_hand || st->ends || st->rests ? 0 : st->dirty_ns + (uint64_t)PAGED__FLUSH_MS * NS_PER_MS;
}

/* Does one thing, without the lock. False: there is nothing to do now. */
static bool work_once(paged__stores *st) {
    paged__load *load = st->first_load;
    if (load) {
        st->first_load = load->next;
        if (!st->first_load) st->last_load = NULL;
        pthread_mutex_unlock(&st->lock);
        paged__load_work(st, load);
        pthread_mutex_lock(&st->lock);
        load->done = true;
    } else if (st->first_pin) {
        paged__pin *pin = st->first_pin;
        st->first_pin = pin->next;
        if (!st->first_pin) st->last_pin = &st->first_pin;
        st->n_pins--;
        pthread_mutex_unlock(&st->lock);
        const uint64_t n_failed = paged__pin_work(st, pin);
        pthread_mutex_lock(&st->lock);
        st->counted.n_failures += n_failed;
        return true;
    } else if (st->n_written < st->n_queued) {
        const paged__write *w = write_at(st, st->n_written);
        const bool goes = !w->dropped;
        st->writing = true;
        pthread_mutex_unlock(&st->lock);
        if (goes) write_one(st, w);
        pthread_mutex_lock(&st->lock);
        st->writing = false;
        if (goes && !st->dirty) st->dirty_ns = now(st);
        st->dirty |= goes;
        st->n_written++;
        if (!st->starved && st->n_written < st->n_queued) return true;
    } else if (st->dirty && now(st) >= flush_at(st)) {
        st->dirty = false;
        pthread_mutex_unlock(&st->lock);
        uint64_t n_failed = 0;
        for (int32_t i = 0; i < st->n_stores; i++)
            n_failed += st->stores[i].flush(st->stores[i].self, NULL) != PAGED_OK;
        pthread_mutex_lock(&st->lock);
        st->counted.n_failures += n_failed;
        return true;
    } else {
        return false;
    }
    st->n_over++;
    pthread_cond_broadcast(&st->news);
    return true;
}

static struct timespec in_ns(uint64_t ns) {
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    ns += (uint64_t)end.tv_nsec;
    end.tv_sec += (time_t)(ns / 1000000000);
    end.tv_nsec = (long)(ns % 1000000000);
    return end;
}

static void wait_for_work(paged__stores *st) {
    const uint64_t at = now(st), flush = flush_at(st);
    if (!st->dirty) {
        pthread_cond_wait(&st->work, &st->lock);
    } else if (flush > at) {
        const struct timespec end = in_ns(flush - at);
        pthread_cond_timedwait(&st->work, &st->lock, &end);
    }
}

/* notify has locks of its own, whose owners may want ours. */
static void *work(void *arg) {
    paged__stores *st = arg;
    pthread_mutex_lock(&st->lock);
    for (;;) {
        const uint64_t n_before = st->n_over;
        if (!work_once(st)) {
            if (st->ends) break;
            wait_for_work(st);
        } else if (st->n_over > n_before && st->notify) {
            pthread_mutex_unlock(&st->lock);
            st->notify(st->notify_user);
            pthread_mutex_lock(&st->lock);
        }
    }
    pthread_mutex_unlock(&st->lock);
    return NULL;
}

bool paged__stores_work(paged_engine *e) {
    pthread_mutex_lock(&e->stores->lock);
    const bool did = work_once(e->stores);
    pthread_mutex_unlock(&e->stores->lock);
    return did;
}

void paged__stores_give_load(paged__stores *st, paged__load *load) {
    load->next = NULL;
    load->done = false;
    pthread_mutex_lock(&st->lock);
    if (st->last_load)
        st->last_load->next = load;
    else
        st->first_load = load;
    st->last_load = load;
    pthread_cond_signal(&st->work);
    pthread_mutex_unlock(&st->lock);
}

void paged__stores_wait(paged_engine *e) {
    paged__stores *st = e->stores;
    if (!st || st->by_hand || !paged__stores_pending(e)) return;
    const struct timespec end = in_ns((uint64_t)NEWS_MS * NS_PER_MS);
    pthread_mutex_lock(&st->lock);
    int why = 0;
    while (st->n_over == st->n_seen && !why) why = pthread_cond_timedwait(&st->news, &st->lock, &end);
    pthread_mutex_unlock(&st->lock);
}

/* ---- open, close ---- */

static uint64_t real_now(void *self) {
    (void)self;
    return paged__now_ns();
}

static paged_status take_memory(const paged_engine *e, paged__stores *st, paged_error *err) {
    bool ok = true;
    st->keys = paged__calloc((size_t)e->cache->n_nodes_max, sizeof *st->keys);
    st->fresh = paged__calloc(PAGED__FRESH, sizeof *st->fresh);
    st->writes = paged__calloc(PAGED__WRITES, sizeof *st->writes);
    st->tokens = paged__calloc((size_t)st->block_size, sizeof *st->tokens);
    for (int32_t g = 0; g < st->n_groups; g++) {
        st->bytes[g] = paged__alloc(st->block_bytes[g], 1);
        ok = ok && st->bytes[g];
    }
    if (ok && st->keys && st->fresh && st->writes && st->tokens) return PAGED_OK;
    return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for the keys of %d blocks",
                       e->cache->n_nodes_max);
}

static paged_status open_stores(paged_engine *e, paged__stores *st, paged_error *err) {
    const paged_engine_config *c = &e->config;
    st->block_size = c->block_size;
    st->n_groups = e->n_groups;
    st->arena = e->cache->arena.base;
    st->by_hand = e->backend.stores_by_hand;
    st->now_ns = st->by_hand ? e->backend.now_ns : real_now;
    st->clock = e->backend.self;
    for (int32_t g = 0; g < e->n_groups; g++) {
        st->groups[g] = e->cache->groups[g].config;
        st->block_bytes[g] = e->cache->groups[g].block_bytes;
    }
    st->fingerprint_bytes = paged__fingerprint(e, (paged_type)c->kv_type, st->fingerprint);
    paged_status s = take_memory(e, st, err);
    if (s) return s;
    paged_store_shape shape = {.fingerprint = (const uint8_t *)st->fingerprint,
                               .fingerprint_bytes = st->fingerprint_bytes,
                               .block_size = st->block_size,
                               .n_groups = st->n_groups};
    memcpy(shape.block_bytes, st->block_bytes, sizeof shape.block_bytes);
    for (int32_t i = 0; i < c->n_stores && !s; i++) s = c->stores[i].open(c->stores[i].self, &shape, err);
    return s;
}

/* Signals are for the threads of the program. */
static bool start(paged__stores *st) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    st->has_thread = pthread_create(&st->thread, NULL, work, st) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (st->has_thread) pthread_setname_np(st->thread, "paged-store");
    return st->has_thread;
}

paged_status paged__stores_open(paged_engine *e, paged_error *err) {
    const paged_engine_config *c = &e->config;
    if (c->n_stores == 0) return PAGED_OK;
    if (c->n_stores < 0 || c->n_stores > PAGED_STORES_MAX || !c->stores)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "n_stores is %d (0 … %d)%s", c->n_stores,
                           PAGED_STORES_MAX, c->stores ? "" : ", stores is NULL");
    if (c->no_prefix_cache)
        return paged__fail(err, PAGED_ERR_INVALID_ARG,
                           "%d stores, and nothing is kept (no_prefix_cache or contiguous)", c->n_stores);
    if (e->cl)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED, "n_stores is %d, and the pool lies on a device",
                           c->n_stores);
    paged__stores *st = paged__calloc(1, sizeof *st);
    if (!st) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for stores");
    pthread_mutex_init(&st->lock, NULL);
    pthread_cond_init(&st->work, NULL);
    pthread_cond_init(&st->news, NULL);
    st->last_pin = &st->first_pin;
    e->stores = st;
    paged_status s = open_stores(e, st, err);
    if (s) return s;
    /* From here on they are ours, if there is a thread. */
    memcpy(st->stores, c->stores, (size_t)c->n_stores * sizeof *st->stores);
    st->n_stores = c->n_stores;
    if (!st->by_hand && !start(st)) {
        st->n_stores = 0;
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "the system gives no thread for stores");
    }
    st->opened = true;
    return PAGED_OK;
}

void paged__stores_close(paged_engine *e) {
    paged__stores *st = e->stores;
    if (!st) return;
    paged__stores_take(e);
    pthread_mutex_lock(&st->lock);
    st->ends = true;
    pthread_cond_signal(&st->work);
    pthread_mutex_unlock(&st->lock);
    if (st->has_thread) pthread_join(st->thread, NULL);
    while (st->opened && st->by_hand && paged__stores_work(e)) continue;
    if (st->opened) paged__stores_poll(e);
    for (int32_t i = 0; i < st->n_stores; i++) st->stores[i].close(st->stores[i].self);
    for (int32_t g = 0; g < st->n_groups; g++) paged__free(st->bytes[g]);
    paged__free(st->tokens);
    paged__free(st->writes);
    paged__free(st->fresh);
    paged__free(st->keys);
    pthread_cond_destroy(&st->news);
    pthread_cond_destroy(&st->work);
    pthread_mutex_destroy(&st->lock);
    paged__free(st);
    e->stores = NULL;
}

/* ---- facts ---- */

void paged__stores_stats(const paged_engine *e, paged_engine_stats *out) {
    paged__stores *st = e->stores;
    if (!st) return;
    pthread_mutex_lock(&st->lock);
    out->n_store_read_bytes = st->counted.n_read_bytes;
    out->n_store_writes = st->counted.n_writes;
    out->n_store_written_bytes = st->counted.n_written_bytes;
    out->n_store_failures = st->counted.n_failures;
    out->store_read_ms = (double)st->counted.read_ns / NS_PER_MS;
    out->store_write_ms = (double)st->counted.write_ns / NS_PER_MS;
    out->n_store_queued = (int32_t)(st->n_queued - st->n_written);
    pthread_mutex_unlock(&st->lock);
}

bool paged_engine_get_store(const paged_engine *e, int32_t i, const char **name, paged_store_stats *out) {
    const paged__stores *st = e->stores;
    if (!st || i < 0 || i >= st->n_stores) return false;
    if (name) *name = st->stores[i].name;
    if (out) st->stores[i].get_stats(st->stores[i].self, out);
    return true;
}
