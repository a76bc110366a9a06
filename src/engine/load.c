/* engine/load.c: what a request gets from stores instead of computing it. See stores.h for the states.
 *
 * The unit is the whole block, from a border on: what memory has of the block that comes next is left aside.
 * Behind the last whole block comes a piece of a sealed tail, or of a whole one whose last token the request
 * has to compute itself.
 *
 * Whether to load at all is a matter of time: bytes against the speed of the last reads, tokens against that
 * of the last prompts, each as long as it is known; a run that takes four times as long as computing would is
 * stopped. What came by then counts.
 *
 * Where layers have windows, whole records are read, chunk by chunk, and what falls out of a window goes
 * again; a record that lacks the block of a group is a miss.
 */
#include "engine/engine.h"

enum { PATIENCE = 4, PATIENCE_MS = 200, NS_PER_MS = 1000000 };

/* ---- the thread ---- */

static uint64_t thread_now(const paged__stores *st) {
    return st->now_ns(st->clock);
}

static const paged_key *key_at(const paged__load *l, int32_t i) {
    return i >= 0 ? &l->keys[i] : &l->parent;
}

static void find(const paged__stores *st, paged__load *l) {
    for (int32_t s = 0; s < st->n_stores && l->n_found < l->n_keys; s++) {
        const paged_store *store = &st->stores[s];
        const int32_t n_left = l->n_keys - l->n_found,
                      n = store->find(store->self, l->keys + l->n_found, n_left);
        if (n <= 0 || n > n_left) continue;
        memset(l->from + l->n_found, s, (size_t)n);
        l->n_found += n;
    }
}

/* The longest piece behind what was found. */
static void find_tail(const paged__stores *st, paged__load *l) {
    const int32_t at = l->n_found * st->block_size, n_max = PAGED_MIN(l->n_tokens - at, st->block_size);
    if (n_max < 0) { /* the request computes the last token of the last block */
        l->n_found--;
        l->n_tail = st->block_size - 1;
        return;
    }
    for (int32_t s = 0; s < st->n_stores && n_max > 0; s++) {
        const paged_store *store = &st->stores[s];
        paged_key key;
        int32_t n = 0;
        if (!store->tail ||
            store->tail(store->self, key_at(l, l->n_found - 1), l->tokens + at, n_max, &key, &n) != PAGED_OK)
            continue;
        if (n <= l->n_tail || n > n_max) continue;
        l->n_tail = n;
        l->keys[l->n_found] = key;
        l->from[l->n_found] = (uint8_t)s;
    }
}

/* Whether a record is what was asked for: n tokens of block i. */
static bool is_right(const paged__stores *st, const paged__load *l, const paged_record *r, int32_t i,
                     int32_t n_tokens) {
    const int32_t *tokens = l->tokens + (ptrdiff_t)i * st->block_size;
    const uint32_t all = (uint32_t)((1ull << st->n_groups) - 1);
    return (r->groups & all) == all && r->first == (l->first + i) * st->block_size &&
           r->n_tokens >= n_tokens && r->n_tokens <= st->block_size &&
           memcmp(&r->parent, key_at(l, i - 1), sizeof r->parent) == 0 &&
           memcmp(r->tokens, tokens, (size_t)n_tokens * sizeof *tokens) == 0;
}

/* Block i from one of the stores, beginning with the one that said it had it; `place` of l->blocks. */
static bool read_block(paged__stores *st, const paged__load *l, int32_t i, int32_t place, int32_t n_tokens) {
    uint64_t bytes = 0, n_failed = 0;
    bool ok = false;
    for (int32_t s = l->from[i]; s < st->n_stores && !ok; s++) {
        paged_record r = {.key = l->keys[i], .tokens = st->tokens};
        for (int32_t g = 0; g < st->n_groups; g++) {
            bytes += st->block_bytes[g];
            r.bytes[g] = st->arena + (size_t)l->blocks[place * st->n_groups + g] * st->block_bytes[g];
        }
        const uint64_t start = thread_now(st);
        const paged_status status =
            st->stores[s].read(st->stores[s].self, &r, (uint32_t)((1ull << st->n_groups) - 1));
        const uint64_t end = thread_now(st);
        ok = status == PAGED_OK && is_right(st, l, &r, i, n_tokens);
        n_failed += !ok;
        pthread_mutex_lock(&st->lock);
        /* A read that fails takes time, too, and gives nothing. */
        paged__rate_add(&st->read[s], ok ? (double)bytes : 0, end - start, end);
        st->counted.read_ns += end - start;
        st->counted.n_read_bytes += ok ? bytes : 0;
        pthread_mutex_unlock(&st->lock);
        bytes = 0;
    }
    pthread_mutex_lock(&st->lock);
    st->counted.n_failures += n_failed;
    pthread_mutex_unlock(&st->lock);
    return ok;
}

/* Tells each store what of blocks i … n - 1 it will be asked for: once, for what it is told replaces what it
 * was told before. That may be the first part of reading, so it counts as such. */
static void expect(paged__stores *st, const paged__load *l, int32_t i, int32_t n) {
    for (int32_t s = 0; s < st->n_stores; s++) {
        int32_t n_told = 0;
        for (int32_t k = i; k < n; k++)
            if (l->from[k] == s) l->told[n_told++] = l->keys[k];
        if (!n_told || !st->stores[s].expect) continue;
        const uint64_t start = thread_now(st);
        st->stores[s].expect(st->stores[s].self, l->told, n_told);
        const uint64_t ns = thread_now(st) - start;
        pthread_mutex_lock(&st->lock);
        st->read[s].ns += (double)ns;
        st->counted.read_ns += ns;
        pthread_mutex_unlock(&st->lock);
    }
}

static void read_run(paged__stores *st, paged__load *l) {
    int32_t i = atomic_load(&l->n_read);
    expect(st, l, i, l->n_begun + l->tail_begun);
    for (; i < l->n_begun && !atomic_load(&l->stop); atomic_store(&l->n_read, ++i))
        if (!read_block(st, l, i, i, st->block_size)) return;
    if (l->tail_begun && i == l->n_found && !atomic_load(&l->stop))
        l->tail_read = read_block(st, l, i, l->n_keys, l->n_tail);
}

void paged__load_work(paged__stores *st, paged__load *l) {
    if (atomic_load(&l->stop)) return;
    if (l->n_begun > 0 || l->tail_begun) {
        read_run(st, l);
        return;
    }
    find(st, l);
    find_tail(st, l);
}

/* ---- memory of a load ---- */

static void free_load(paged__load *l) {
    paged__free(l->tokens);
    paged__free(l->keys);
    paged__free(l->told);
    paged__free(l->blocks);
    paged__free(l->from);
    paged__free(l);
}

static paged__load *create_load(const paged_engine *e, const paged__request *r, int32_t first) {
    const int32_t size = e->config.block_size, rest = r->n_tokens - first * size;
    paged__load *l = paged__calloc(1, sizeof *l);
    if (!l) return NULL;
    l->first = first;
    l->n_tokens = rest - 1;
    l->n_keys = rest / size;
    l->tokens = paged__alloc((size_t)rest, sizeof *l->tokens);
    l->keys = paged__alloc((size_t)l->n_keys + 1, sizeof *l->keys);
    l->told = paged__alloc((size_t)l->n_keys + 1, sizeof *l->told);
    l->from = paged__calloc((size_t)l->n_keys + 1, 1);
    l->blocks = paged__calloc(((size_t)l->n_keys + 1) * (size_t)e->n_groups, sizeof *l->blocks);
    if (l->tokens && l->keys && l->told && l->from && l->blocks) return l;
    free_load(l);
    return NULL;
}

/* Keys of the whole blocks, and the one before them. */
static void fill_keys(const paged_engine *e, const paged__request *r, int32_t space, paged__load *l) {
    const int32_t size = e->config.block_size;
    l->parent = paged__store_space_key(e, space);
    for (int32_t i = 0; i < l->first; i++)
        l->parent = paged__store_key(&l->parent, r->tokens + (ptrdiff_t)i * size, size);
    memcpy(l->tokens, r->tokens + (ptrdiff_t)l->first * size, (size_t)(l->n_tokens + 1) * sizeof *l->tokens);
    for (int32_t i = 0; i < l->n_keys; i++)
        l->keys[i] = paged__store_key(key_at(l, i - 1), l->tokens + (ptrdiff_t)i * size, size);
}

static void unlink_load(paged__stores *st, paged__load *l) {
    paged__load **link = &st->loads;
    while (*link != l) link = &(*link)->all_next;
    *link = l->all_next;
    free_load(l);
}

static bool is_done(paged__stores *st, const paged__load *l) {
    pthread_mutex_lock(&st->lock);
    const bool done = l->done;
    pthread_mutex_unlock(&st->lock);
    return done;
}

/* ---- to ask ---- */

/* A question that nobody waits for any more has no answer yet: the thread is with a store that is slow. */
static bool is_stuck(const paged__stores *st) {
    for (const paged__load *l = st->loads; l; l = l->all_next)
        if (!l->request && l->state == PAGED__LOAD_ASKED) return true;
    return false;
}

bool paged__load_ask(paged_engine *e, paged__request *r) {
    paged__stores *st = e->stores;
    const paged__promise *p = &e->cache->promises[paged_seq_row(e->cache, r->seq)];
    if (!st || is_stuck(st) || r->asked || !p->n_tokens || p->n_tokens != r->n_tokens) return false;
    r->asked = true;
    const int32_t reach = paged_seq_reach(e->cache, r->seq);
    if (r->n_tokens - 1 - reach < PAGED__LOAD_TOKENS) return false;
    paged__load *l = create_load(e, r, reach / e->config.block_size);
    if (!l) return false;
    fill_keys(e, r, p->space, l);
    l->request = r;
    l->state = PAGED__LOAD_ASKED;
    l->since_ns = paged__engine_now(e);
    l->all_next = st->loads;
    st->loads = l;
    r->load = l;
    r->awaits = true;
    r->wait = PAGED_WAIT_STORE;
    e->stats.n_store_asks++;
    paged__stores_give_load(st, l);
    return true;
}

static uint64_t patience_until(const paged__load *l) {
    return l->since_ns + (uint64_t)PAGED__ASK_MS * NS_PER_MS;
}

bool paged__load_asks(const paged_engine *e, paged__request *r) {
    paged__load *l = r->load;
    if (!l || l->state != PAGED__LOAD_ASKED) return false;
    if (is_done(e->stores, l)) {
        l->state = PAGED__LOAD_ANSWERED;
        return false;
    }
    if (paged__engine_now(e) < patience_until(l)) return true;
    l->request = NULL; /* the answer will be of no use */
    r->load = NULL;
    atomic_store(&l->stop, true);
    return false;
}

uint64_t paged__loads_event(const paged_engine *e) {
    uint64_t next = UINT64_MAX;
    for (const paged__load *l = e->stores ? e->stores->loads : NULL; l; l = l->all_next)
        if (l->request && l->state == PAGED__LOAD_ASKED) next = PAGED_MIN(next, patience_until(l));
    return next;
}

/* ---- to load or to compute ---- */

static size_t block_bytes(const paged__stores *st) {
    size_t bytes = 0;
    for (int32_t g = 0; g < st->n_groups; g++) bytes += st->block_bytes[g];
    return bytes;
}

/* Nanoseconds that reading would take; 0: it is not known of one of the stores. */
static double ns_to_read(paged__stores *st, const paged__load *l, uint64_t at) {
    double ns = 0, one;
    bool known = true;
    pthread_mutex_lock(&st->lock);
    for (int32_t i = 0; i < l->n_found && known; i++, ns += one)
        known = (one = paged__rate_ns(&st->read[l->from[i]], (double)block_bytes(st), at)) > 0;
    if (l->n_tail && known) {
        known = (one = paged__rate_ns(&st->read[l->from[l->n_found]], (double)block_bytes(st), at)) > 0;
        ns += one;
    }
    pthread_mutex_unlock(&st->lock);
    return known ? ns : 0;
}

static bool is_worth_it(const paged_engine *e, const paged__load *l) {
    paged__stores *st = e->stores;
    const int32_t n_tokens = l->n_found * st->block_size + l->n_tail;
    if (n_tokens < PAGED__LOAD_TOKENS) return false;
    const double read = ns_to_read(st, l, thread_now(st)),
                 compute = paged__rate_ns(&st->prefill, n_tokens, paged__engine_now(e));
    return read <= 0 || compute <= 0 || read < compute;
}

static void forget(const paged_engine *e, paged__request *r) {
    unlink_load(e->stores, r->load);
    r->load = NULL;
}

int32_t paged__load_want(const paged_engine *e, paged__request *r) {
    if (!r->load) return -1;
    r->load->counts = !r->start_ns; /* what is told of it is told of the first time */
    if (is_worth_it(e, r->load)) return r->load->first;
    forget(e, r);
    return -1;
}

/* ---- to load ---- */

int32_t paged__load_slots(const paged_engine *e, const paged__request *r) {
    const paged__load *l = r->load;
    const int32_t size = e->config.block_size, n_left = l->n_found - l->n_taken;
    const int32_t n_chunk = e->windowed ? PAGED_MAX(e->config.chunk_tokens / size, 1) : INT32_MAX;
    const int32_t n = n_left > n_chunk ? n_chunk : n_left + (l->n_tail > 0);
    return PAGED_MIN(n * size, e->cache->max_seq_tokens - r->n_cached);
}

/* The block of every group that has slot 0 at this position; false: it has none, or one that others have. */
static bool find_blocks(const paged_engine *e, const paged__request *r, int32_t position, int32_t *blocks) {
    for (int32_t g = 0; g < e->n_groups; g++) {
        int64_t first, last;
        const int32_t size = e->config.block_size,
                      n = paged_seq_len(e->cache, r->seq) + paged_seq_reserved(e->cache, r->seq);
        if (position + size > n || paged_seq_slots(e->cache, r->seq, g, position, 1, &first) ||
            paged_seq_slots(e->cache, r->seq, g, position + size - 1, 1, &last) || first % size ||
            last != first + size - 1)
            return false;
        blocks[g] = (int32_t)(first / size);
    }
    return true;
}

static void hold(const paged_engine *e, const int32_t *blocks) {
    for (int32_t g = 0; g < e->n_groups; g++)
        PAGED_ASSERT(paged_block_hold(e->cache, g, blocks[g]) == PAGED_OK);
}

static void unhold(const paged_engine *e, const int32_t *blocks) {
    for (int32_t g = 0; g < e->n_groups; g++) paged_block_release(e->cache, g, blocks[g]);
}

bool paged__load_begin(paged_engine *e, paged__request *r) {
    paged__load *l = r->load;
    if (!l) return false;
    const int32_t size = e->config.block_size, n_groups = e->n_groups;
    /* Something of what was to be in memory has gone since. */
    if (r->n_cached != (l->first + l->n_taken) * size) {
        forget(e, r);
        return false;
    }
    while (l->n_begun < l->n_found &&
           find_blocks(e, r, (l->first + l->n_begun) * size, l->blocks + (ptrdiff_t)l->n_begun * n_groups)) {
        hold(e, l->blocks + (ptrdiff_t)l->n_begun * n_groups);
        l->n_begun++;
    }
    int32_t *tail = l->blocks + (ptrdiff_t)l->n_keys * n_groups;
    if (l->n_tail && l->n_begun == l->n_found && find_blocks(e, r, (l->first + l->n_found) * size, tail)) {
        hold(e, tail);
        l->tail_begun = true;
    }
    if (l->n_begun == l->n_taken && !l->tail_begun) {
        forget(e, r);
        return false;
    }
    l->state = PAGED__LOAD_READING;
    l->since_ns = paged__engine_now(e);
    r->wait = PAGED_WAIT_STORE;
    paged__stores_give_load(e->stores, l);
    return true;
}

/* What was read is part of the sequence from now on. */
static void commit(paged_engine *e, paged__load *l, int32_t n_tokens) {
    paged__request *r = l->request;
    PAGED_ASSERT(paged_seq_commit(e->cache, r->seq, r->tokens + r->n_cached, n_tokens) == PAGED_OK);
    r->n_cached += n_tokens;
    r->blocks_used = (r->n_cached + e->config.block_size - 1) / e->config.block_size;
    e->stats.n_store_tokens += (uint64_t)n_tokens;
    if (!l->counts) return;
    if (r->n_loaded == 0) e->stats.n_store_hits++;
    r->n_loaded += n_tokens;
    r->n_reused += n_tokens;
    if (r->n_cached == r->n_tokens - 1) r->miss = PAGED_MISS_NONE;
}

/* Blocks that were read, as far as it has got. */
static void take_read(paged_engine *e, paged__load *l) {
    const int32_t n = atomic_load(&l->n_read) - l->n_taken;
    for (int32_t i = 0; i < n; i++) unhold(e, l->blocks + (ptrdiff_t)(l->n_taken + i) * e->n_groups);
    l->n_taken += n;
    if (n > 0 && l->request) commit(e, l, n * e->config.block_size);
}

/* The thread is done: gives back what it has not filled. */
static void take_rest(paged_engine *e, paged__load *l) {
    for (int32_t i = l->n_taken; i < l->n_begun; i++) unhold(e, l->blocks + (ptrdiff_t)i * e->n_groups);
    if (l->tail_begun) unhold(e, l->blocks + (ptrdiff_t)l->n_keys * e->n_groups);
    if (l->tail_read && l->request) commit(e, l, l->n_tail);
}

static bool takes_too_long(const paged_engine *e, const paged__load *l) {
    const int32_t n_tokens = (l->n_begun - l->n_taken) * e->config.block_size;
    const double compute = paged__rate_ns(&e->stores->prefill, n_tokens, paged__engine_now(e));
    return compute > 0 && (double)(paged__engine_now(e) - l->since_ns) >
                              PATIENCE * compute + (double)PATIENCE_MS * NS_PER_MS;
}

static void poll_one(paged_engine *e, paged__load *l) {
    const bool done = is_done(e->stores, l); /* before what it has read is looked at */
    const bool reads = l->state == PAGED__LOAD_READING;
    if (reads) take_read(e, l);
    if (!done) {
        if (reads && takes_too_long(e, l)) atomic_store(&l->stop, true);
        return;
    }
    if (!reads && l->request) return; /* an answer, which the scheduler will look at */
    if (reads) take_rest(e, l);
    const bool goes_on = e->windowed && reads && l->request && l->n_taken == l->n_begun && !l->tail_begun &&
                         l->n_begun < l->n_found + (l->n_tail > 0) && !atomic_load(&l->stop);
    l->state = PAGED__LOAD_READY;
    if (goes_on) return;
    if (l->request) l->request->load = NULL;
    unlink_load(e->stores, l);
}

void paged__loads_poll(paged_engine *e) {
    for (paged__load *next, *l = e->stores->loads; l; l = next) {
        next = l->all_next;
        if (l->state == PAGED__LOAD_ASKED || l->state == PAGED__LOAD_READING) poll_one(e, l);
    }
}

void paged__load_leave(paged_engine *e, paged__request *r) {
    paged__load *l = r->load;
    r->asked = false;
    if (!l) return;
    if (l->state == PAGED__LOAD_ANSWERED || l->state == PAGED__LOAD_READY) {
        forget(e, r);
        return;
    }
    l->request = NULL;
    r->load = NULL;
    atomic_store(&l->stop, true);
}

bool paged__loads_hold(const paged__stores *st) {
    for (const paged__load *l = st->loads; l; l = l->all_next)
        if (!l->request && l->state == PAGED__LOAD_READING) return true;
    return false;
}
