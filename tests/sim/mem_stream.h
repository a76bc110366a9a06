/* mem_stream.h: bytes become operations on a cache and its model (mem_model.h): what is made, what is asked
 * of it, and which allocation or operation of the arena fails in between. Where the bytes come from is the
 * caller's: a generator (test_mem_random.c) or a file (fuzz_mem.c). A choice behind the last byte is 0. */
#ifndef PAGED_TESTS_SIM_MEM_STREAM_H
#define PAGED_TESTS_SIM_MEM_STREAM_H

#include "book_arena.h"
#include "sim/mem_model.h"

/* ---- choices ---- */

struct choices {
    const uint8_t *bytes; /* [n]; NULL: the generator's */
    size_t n, at;
    uint64_t rand;
    uint8_t *log; /* [n_log_max] what was chosen; NULL: nobody asks */
    size_t n_log, n_log_max;
};

static uint8_t choose_byte(struct choices *c) {
    uint8_t byte = 0;
    if (!c->bytes)
        byte = (uint8_t)(paged__rand(&c->rand) >> 32);
    else if (c->at < c->n)
        byte = c->bytes[c->at++];
    if (c->log && c->n_log < c->n_log_max) c->log[c->n_log++] = byte;
    return byte;
}

/* 0 … n - 1, n at most 65536. */
static uint32_t pick(struct choices *c, uint32_t n) {
    uint32_t value = choose_byte(c);
    if (n > 256) value = value << 8 | choose_byte(c);
    return value % n;
}

static size_t part_of(struct choices *c, size_t size) {
    return (size_t)((uint64_t)pick(c, 65536) * size >> 16);
}

/* What is done, where somebody wants to read it. */
static bool stream_trace;

__attribute__((format(printf, 1, 2))) static void say(const char *fmt, ...) {
    va_list args;
    if (!stream_trace) return;
    va_start(args, fmt);
    vprintf(fmt, args);
    va_end(args);
}

/* ---- what fails ---- */

static struct {
    int32_t countdown; /* the countdown-th allocation or operation of the arena fails; 0: none */
    bool fired;
} fault;

static bool fails(void) {
    if (fault.countdown == 0 || --fault.countdown > 0) return false;
    fault.fired = true;
    return true;
}

static void *stream_alloc(void *user, size_t size_bytes, size_t align) {
    (void)user;
    return fails() ? NULL : aligned_alloc(align, (size_bytes + align - 1) / align * align);
}

static void stream_free(void *user, void *ptr) {
    (void)user;
    free(ptr);
}

static const paged_allocator stream_allocator = {stream_alloc, stream_free, NULL};

static paged_status stream_back(void *ctx, size_t offset, size_t size_bytes) {
    return fails() ? PAGED_ERR_NO_MEMORY : book_back(ctx, offset, size_bytes);
}

static paged_status stream_copy(void *ctx, size_t dst, size_t src, size_t size_bytes) {
    return fails() ? PAGED_ERR_IO : book_copy(ctx, dst, src, size_bytes);
}

/* ---- operations ---- */

static int32_t random_window(struct choices *c, const paged_cache_config *config) {
    return 1 + (int32_t)pick(c, 3 * (uint32_t)config->block_size + 2);
}

static struct book book;
static paged_arena arena;
static int32_t n_pool; /* n_pages_max without a limit */

/* A pool of 2 … 40 blocks a group. K and V are in f32, so that the payload has room. */
static void stream_open(struct model *m, struct choices *c) {
    static paged_group_config groups[3];
    static const int32_t block_sizes[] = {1, 2, 3, 4, 7, 8, 16, 32, 64};
    paged_cache_config config = {
        .struct_size = sizeof config, .groups = groups, .max_seqs = MODEL_SEQS, .poison = true};
    bool equal = pick(c, 2), windowed = pick(c, 2), any_window = false;
    int32_t n_blocks = 2 + (int32_t)pick(c, 39);
    config.n_groups = 1 + (int32_t)pick(c, 3);
    config.block_size = block_sizes[pick(c, 9)];
    config.packed_tails = config.block_size >= 32 && pick(c, 4);
    for (int32_t g = 0; g < config.n_groups; g++) {
        int32_t head_dim = equal ? 1 : 1 + (int32_t)pick(c, 4);
        groups[g] =
            (paged_group_config){.n_layers = 1 + (int32_t)(equal ? 0 : pick(c, 2)),
                                 .n_kv_heads = 1 + (int32_t)(equal ? 0 : pick(c, 2)),
                                 .layout = config.packed_tails ? PAGED_LAYOUT_PACKED : PAGED_LAYOUT_PLAIN,
                                 .head_dim_k = head_dim,
                                 .type = PAGED_TYPE_F32,
                                 .window = windowed && pick(c, 3) ? random_window(c, &config) : 0};
        any_window |= groups[g].window > 0;
    }
    int32_t n_tokens = n_blocks * config.block_size;
    config.pool_bytes = paged_pool_bytes_for(groups, config.n_groups, config.block_size, n_tokens);
    CHECK(config.pool_bytes > 0);
    config.max_seq_tokens = n_tokens + 3; /* longer than the pool, so that both refusals occur */
    if (any_window)                       /* and so long that windows slide over more than the pool holds */
        config.max_seq_tokens = (n_blocks > 60 / config.n_groups ? 60 : 3 * n_blocks) * config.block_size;
    memset(m, 0, sizeof *m);
    fault.countdown = 0;
    fault.fired = false;
    paged_allocator_set(&stream_allocator);
    if (pick(c, 4)) { /* else the host's, where all of so small a pool is one granule */
        book_open(&book, config.pool_bytes, (size_t)64 << pick(c, 8), &arena);
        arena.back = stream_back;
        arena.copy = stream_copy;
        config.arena = &arena;
    }
    m->salt = pick(c, 256);
    config.trim_after = pick(c, 3) * 5;
    model_open(m, &config);
    m->failed = &fault.fired;
    say("%d groups, blocks of %d, %zu bytes, windows %d %d %d, tails %d\n", config.n_groups,
        config.block_size, config.pool_bytes, m->windows[0], m->windows[1], m->windows[2], m->tiles_a_block);
    if (pick(c, 2)) paged__cache_shuffle(m->cache, pick(c, 256));
    if (pick(c, 2)) paged__cache_cut_hash(m->cache, 15); /* collisions are certain */
    if (config.n_groups == 1 || (equal && !any_window)) m->n_pages_max = n_blocks;
    n_pool = m->n_pages_max;
}

/* Tokens that may well be cached: what some row holds or held last, to some length, perhaps with an end of
 * its own. */
static int32_t likely_tokens(const struct model *m, struct choices *c, int32_t *tokens) {
    const struct model_seq *s = &m->seqs[pick(c, MODEL_SEQS)];
    int32_t n_max = 4 * m->block_size + 3, n = (int32_t)pick(c, (uint32_t)n_max);
    int32_t n_same = pick(c, 3) ? n : (int32_t)pick(c, (uint32_t)n + 1);
    memcpy(tokens, s->tokens, (size_t)n * sizeof *tokens);
    for (int32_t i = n_same; i < n; i++) tokens[i] = (int32_t)pick(c, 3);
    return n;
}

/* Promises what somebody else has promised, or something likely. */
static void random_promise(struct model *m, struct model_seq *s, struct choices *c, int32_t space,
                           int32_t *tokens, int32_t n) {
    for (int32_t i = 0; i < MODEL_SEQS; i++) {
        const struct model_seq *other = &m->seqs[i];
        const paged__promise *promise = other->handle ? model_promise_of(m, other) : NULL;
        if (!promise || promise->n_tokens <= other->len || pick(c, 3) == 0) continue;
        n = promise->n_tokens;
        memcpy(tokens, m->cache->seqs[promise - m->cache->promises].tokens, (size_t)n * sizeof *tokens);
        for (int32_t t = (int32_t)pick(c, 2 * (uint32_t)n); t < n; t++) tokens[t] = (int32_t)pick(c, 3);
        break;
    }
    say("%d: promise %d tokens in %d\n", (int)(s - m->seqs), n, space);
    model_promise(m, s, space, tokens, n);
}

static void random_prefix_operation(struct model *m, struct choices *c) {
    static int32_t tokens[MODEL_TOKENS];
    int32_t n = likely_tokens(m, c, tokens), space = (int32_t)pick(c, 12) / 5;
    switch (pick(c, 4)) {
    case 0:
        say("clock\n");
        model_clock(m, m->now + pick(c, 10));
        break;
    case 1:
        say("keep %d tokens in %d\n", n, space);
        if (m->n_pins < MODEL_PINS - 1)
            model_keep(m, space, tokens, n, (int32_t)pick(c, 3), m->now + pick(c, 30));
        break;
    default:
        for (int32_t i = 0; i < MODEL_SEQS; i++) {
            struct model_seq *s = &m->seqs[i];
            if (!s->handle || s->len || s->reserved || s->space >= 0) continue;
            if (pick(c, 2)) random_promise(m, s, c, space, tokens, n);
            if (paged_seq_waits(m->cache, s->handle) && pick(c, 4)) break;
            if (model_promise_of(m, s)->n_tokens > 0 && pick(c, 4)) { /* as it promised */
                const int32_t row = paged_seq_row(m->cache, s->handle);
                n = m->cache->promises[row].n_tokens;
                memcpy(tokens, m->cache->seqs[row].tokens, (size_t)n * sizeof *tokens);
            }
            say("%d: match %d tokens in %d\n", i, n, space);
            model_match(m, s, space, tokens, n);
            model_check_seq(m, s);
            break;
        }
        break;
    }
}

/* ---- the pool itself ---- */

static void model_limit(struct model *m, size_t max_bytes) {
    int32_t n_pages = n_pool;
    size_t row_bytes = 0;
    say("limit %zu\n", max_bytes);
    paged_cache_stats stats;
    for (int32_t g = 0; g < m->n_groups; g++) row_bytes += m->cache->groups[g].block_bytes;
    CHECK_EQ(paged_cache_set_max_bytes(m->cache, max_bytes), PAGED_OK);
    if (n_pages && max_bytes && max_bytes / row_bytes < (size_t)n_pages)
        n_pages = (int32_t)(max_bytes / row_bytes);
    m->n_pages_max = n_pages;
    paged_cache_get_stats(m->cache, &stats);
    CHECK(stats.backed_bytes <= stats.max_bytes || stats.idle_bytes == 0);
    CHECK(stats.used_bytes + stats.cached_bytes <= stats.max_bytes || stats.n_cached == 0);
}

static void model_trim(struct model *m, size_t keep_bytes) {
    paged_cache_stats before, after;
    say("trim to %zu\n", keep_bytes);
    paged_cache_get_stats(m->cache, &before);
    CHECK_EQ(paged_cache_trim(m->cache, keep_bytes), PAGED_OK);
    paged_cache_get_stats(m->cache, &after);
    CHECK(after.idle_bytes <= keep_bytes);
    CHECK_EQ(before.backed_bytes - before.idle_bytes, after.backed_bytes - after.idle_bytes);
}

/* Without a limit there is an end. */
static void model_compact(struct model *m, size_t budget_bytes, bool in_use) {
    size_t moved_bytes = SIZE_MAX;
    say("compact %zu%s\n", budget_bytes, in_use ? " in use" : "");
    paged_status status = paged_cache_compact(m->cache, budget_bytes, in_use, &moved_bytes);
    if (model_failed(m, status)) return;
    CHECK_EQ(status, PAGED_OK);
    CHECK(moved_bytes <= budget_bytes);
    m->n_moved += moved_bytes > 0;
    for (int32_t n = 0; budget_bytes == SIZE_MAX && moved_bytes > 0; n++) {
        status = paged_cache_compact(m->cache, budget_bytes, in_use, &moved_bytes);
        if (model_failed(m, status)) return;
        CHECK_EQ(status, PAGED_OK);
        CHECK(n < m->cache->n_extents);
    }
}

static void random_pool_operation(struct model *m, struct choices *c) {
    size_t pool_bytes = m->cache->pool_bytes;
    switch (pick(c, 4)) {
    case 0: /* two times of three without a limit, so that the pool is not always too small */
        model_limit(m, pick(c, 3) ? 0 : 1 + part_of(c, pool_bytes - 1));
        break;
    case 1:
        model_trim(m, pick(c, 2) ? 0 : part_of(c, pool_bytes));
        break;
    default:
        model_compact(m, pick(c, 2) ? SIZE_MAX : part_of(c, pool_bytes), pick(c, 4) > 0);
        for (int32_t i = 0; i < MODEL_SEQS; i++)
            if (m->seqs[i].handle) model_check_seq(m, &m->seqs[i]);
        break;
    }
}

static void any_operation(struct model *m, struct choices *c) {
    struct model_seq *s = &m->seqs[pick(c, MODEL_SEQS)];
    int32_t row = (int32_t)(s - m->seqs), step = pick(c, 4) ? m->block_size + 2 : 4 * m->block_size + 2, n;
    uint64_t tokens;
    if (pick(c, 4) == 0) {
        random_prefix_operation(m, c);
        return;
    }
    if (pick(c, 16) == 0) {
        random_pool_operation(m, c);
        return;
    }
    if (!s->handle) {
        if (pick(c, 3)) {
            say("create\n");
            model_create(m);
            return;
        }
        say("wrong handle\n");
        model_wrong_handle(m, pick(c, 2) ? m->stale : paged__mix(pick(c, 65536)));
        return;
    }
    switch (pick(c, 12)) {
    case 0:
        say("%d: free\n", row);
        model_free(m, s);
        break;
    case 1:
    case 2:
        say("%d: fork\n", row);
        model_fork(m, s);
        break;
    case 3:
        n = (int32_t)pick(c, (uint32_t)s->len + 2);
        say("%d: truncate from %d to %d\n", row, s->len, n);
        model_truncate(m, s, n);
        break;
    case 4:
    case 5:
    case 6:
    case 7:
        n = (int32_t)pick(c, (uint32_t)step);
        say("%d: reserve %d behind %d\n", row, n, s->len);
        model_reserve(m, s, n);
        break;
    default:
        n = (int32_t)pick(c, (uint32_t)s->reserved + 2);
        say("%d: commit %d of %d\n", row, n, s->reserved);
        tokens = pick(c, 65536);
        model_commit(m, s, n, &tokens);
        break;
    }
    if (s->handle) model_check_seq(m, s);
}

static uint64_t n_fired; /* faults, of all streams */

/* One operation, in one of eight something fails, and what must hold after it. */
static void stream_step(struct model *m, struct choices *c) {
    fault.countdown = pick(c, 8) == 7 ? 1 + (int32_t)pick(c, 6) : 0;
    if (fault.countdown) say("[%d fails] ", fault.countdown);
    any_operation(m, c);
    n_fired += fault.fired;
    fault.countdown = 0;
    fault.fired = false;
    model_check(m);
}

#endif
