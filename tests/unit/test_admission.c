/* Goal: who gets in, who waits, and what that costs. Method: a tiny random model; prompts that arrive
 * together, pools that are too small, requests that fail or leave at the worst moment; answers are compared
 * bit by bit with those of a request alone; the cache is checked after every step. */
#include <unistd.h>

#include "engine/engine.h"
#include "test.h"
#include "tiny_model.h"

enum { N_PROMPT = 150, N_NEW = 12 };

static const tiny_shape shape = {2, 4, 2, 16, 96, 1024, GGML_TYPE_F32};

static paged_model *load(void) {
    char path[64];
    paged_model *m = NULL;
    snprintf(path, sizeof path, "/tmp/paged-admission-%d.gguf", (int)getpid());
    CHECK(tiny_model_write(path, &shape, test_seed));
    const paged_status s = paged_model_load(path, NULL, &m, NULL);
    unlink(path);
    CHECK_EQ(s, PAGED_OK);
    return m;
}

static paged_engine *make(const paged_model *m, paged_engine_config c) {
    paged_engine *e = NULL;
    c.struct_size = sizeof c;
    c.poison = true;
    if (!c.n_ctx) c.n_ctx = 1024;
    c.n_threads = 1;
    CHECK_EQ(paged_engine_create(m, &c, &e, NULL), PAGED_OK);
    return e;
}

static size_t pool_of(const paged_model *m, int32_t n_blocks) {
    paged_engine_info info;
    paged_engine *e = make(m, (paged_engine_config){0});
    paged_engine_get_info(e, &info);
    paged_engine_free(e);
    return info.pool_bytes / (size_t)info.n_blocks * (size_t)n_blocks;
}

static void fill_prompt(int32_t *tokens, int32_t n, uint64_t seed) {
    for (int32_t i = 0; i < n; i++) tokens[i] = (int32_t)(paged__rand(&seed) % 256);
}

static uint64_t submit(paged_engine *e, const int32_t *tokens, int32_t n, int32_t max_tokens) {
    uint64_t id = 0;
    paged_request q;
    paged_request_init(&q);
    q.tokens = tokens;
    q.n_tokens = n;
    q.max_tokens = max_tokens;
    q.ignore_eos = q.logprobs = true;
    CHECK_EQ(paged_engine_submit(e, &q, &id, NULL), PAGED_OK);
    return id;
}

static int32_t step(paged_engine *e) {
    int32_t active;
    paged_error err = {0};
    CHECK_EQ(paged_engine_step(e, &active, &err), PAGED_OK);
    if (paged_engine_check(e, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
    return active;
}

static void run_all(paged_engine *e) {
    int32_t n_steps = 0;
    while (step(e)) CHECK(n_steps++ < 10000);
}

static paged_output read_end(paged_engine *e, uint64_t id, paged_finish finish) {
    paged_output o;
    CHECK_EQ(paged_engine_read(e, id, &o), PAGED_OK);
    CHECK_EQ(o.finish, finish);
    return o;
}

/* What a request alone answers; no cache. */
static void alone(const paged_model *m, const int32_t *tokens, int32_t n, int32_t n_new, float *logprobs) {
    paged_engine *e = make(m, (paged_engine_config){.no_prefix_cache = true});
    uint64_t id = submit(e, tokens, n, n_new);
    run_all(e);
    paged_output o = read_end(e, id, PAGED_FINISH_LENGTH);
    CHECK_EQ(o.n_tokens, n_new);
    CHECK_EQ(o.miss, PAGED_MISS_OFF);
    memcpy(logprobs, o.logprobs, (size_t)n_new * sizeof *logprobs);
    paged_engine_free(e);
}

/* Four equal prompts, submitted together: the prompt is computed once, and the last token of each of the
 * others, whatever the chunks. */
static void equal_prompts_compute_once(void) {
    paged_model *m = load();
    int32_t tokens[N_PROMPT];
    float want[N_NEW];
    const int32_t chunks[] = {512, 64, 7};
    fill_prompt(tokens, N_PROMPT, 3);
    alone(m, tokens, N_PROMPT, N_NEW, want);
    for (int c = 0; c < 3; c++) {
        paged_engine *e = make(m, (paged_engine_config){.max_running = 4, .chunk_tokens = chunks[c]});
        paged_cache_stats stats;
        uint64_t ids[4];
        int32_t n_computed = 0;
        for (int i = 0; i < 4; i++) ids[i] = submit(e, tokens, N_PROMPT, N_NEW);
        step(e);
        paged_engine_get_cache_stats(e, &stats);
        CHECK_EQ(stats.n_used, (N_PROMPT + 15) / 16); /* those who wait hold nothing */
        CHECK_EQ(stats.n_waits, 3);
        run_all(e);
        for (int i = 0; i < 4; i++) {
            paged_output o = read_end(e, ids[i], PAGED_FINISH_LENGTH);
            CHECK_EQ(o.cached_tokens, i ? N_PROMPT - 1 : 0);
            CHECK_EQ(o.miss, i ? PAGED_MISS_NONE : PAGED_MISS_NO_MATCH);
            CHECK(memcmp(o.logprobs, want, sizeof want) == 0);
            n_computed += o.prompt_tokens - o.cached_tokens;
        }
        CHECK_EQ(n_computed, N_PROMPT + 3);
        paged_engine_get_cache_stats(e, &stats);
        CHECK_EQ(stats.n_used, 0);
        paged_engine_free(e);
    }
    paged_model_free(m);
}

/* Prompts with a common beginning wait for that beginning and go on by themselves. */
static void common_beginnings_compute_once(void) {
    paged_model *m = load();
    paged_engine *e = make(m, (paged_engine_config){.max_running = 3, .chunk_tokens = 40});
    int32_t tokens[3][N_PROMPT];
    float want[3][N_NEW];
    uint64_t ids[3];
    for (int i = 0; i < 3; i++) {
        fill_prompt(tokens[i], N_PROMPT, 10 + (uint64_t)i);
        fill_prompt(tokens[i], 70, 3);
        alone(m, tokens[i], N_PROMPT, N_NEW, want[i]);
        ids[i] = submit(e, tokens[i], N_PROMPT, N_NEW);
    }
    run_all(e);
    for (int i = 0; i < 3; i++) {
        paged_output o = read_end(e, ids[i], PAGED_FINISH_LENGTH);
        CHECK_EQ(o.cached_tokens, i ? 70 : 0);
        CHECK(memcmp(o.logprobs, want[i], sizeof want[i]) == 0);
    }
    paged_engine_free(e);
    paged_model_free(m);
}

/* The producer leaves after each number of steps, by cancel and by release; the next one takes over, and the
 * answers are the same. */
static void a_producer_that_leaves_hands_over(void) {
    paged_model *m = load();
    int32_t tokens[N_PROMPT];
    float want[N_NEW];
    fill_prompt(tokens, N_PROMPT, 3);
    alone(m, tokens, N_PROMPT, N_NEW, want);
    for (int n_steps = 0; n_steps < 7; n_steps++) {
        paged_engine *e = make(m, (paged_engine_config){.max_running = 3, .chunk_tokens = 32});
        paged_cache_stats stats;
        uint64_t ids[3];
        for (int i = 0; i < 3; i++) ids[i] = submit(e, tokens, N_PROMPT, N_NEW);
        for (int i = 0; i < n_steps; i++) step(e);
        if (n_steps % 2)
            paged_engine_cancel(e, ids[0]);
        else
            CHECK_EQ(paged_engine_release(e, ids[0]), PAGED_OK);
        run_all(e);
        for (int i = 1; i < 3; i++) {
            paged_output o = read_end(e, ids[i], PAGED_FINISH_LENGTH);
            int32_t n_done = PAGED_MIN(32 * n_steps, N_PROMPT - 1);
            CHECK_EQ(o.cached_tokens, i == 1 ? n_done : N_PROMPT - 1);
            CHECK(memcmp(o.logprobs, want, sizeof want) == 0);
        }
        paged_engine_get_cache_stats(e, &stats);
        CHECK_EQ(stats.n_used, 0);
        paged_engine_free(e);
    }
    paged_model_free(m);
}

/* ---- memory that runs out ---- */

static int fail_at, n_allocs;

static void *failing_alloc(void *user, size_t size, size_t align) {
    (void)user;
    if (++n_allocs == fail_at) return NULL;
    return aligned_alloc(align, (size + align - 1) / align * align);
}

static void freeing(void *user, void *ptr) {
    (void)user;
    free(ptr);
}

/* A request that fails at its admission costs no room: the next one, which needs the whole pool, is admitted
 * in the same step. The same for those who fail when their wait ends. */
static void a_failed_admission_costs_no_room(void) {
    static const paged_allocator allocator = {failing_alloc, freeing, NULL};
    const int n_whole = 40 * 16 - N_NEW + 1;
    paged_allocator_set(&allocator);
    paged_model *m = load();
    int32_t tokens[2][640];
    int n_failed = 0;
    fill_prompt(tokens[0], 640, 3);
    fill_prompt(tokens[1], 640, 4);
    const size_t pool_bytes = pool_of(m, 40);
    for (int n = 1; n_failed == n - 1; n++) {
        paged_engine *e = make(m, (paged_engine_config){.max_running = 2, .pool_bytes = pool_bytes});
        uint64_t first = submit(e, tokens[0], n_whole, N_NEW), second = submit(e, tokens[1], n_whole, N_NEW);
        paged_output o;
        paged_cache_stats stats;
        fail_at = n;
        n_allocs = 0;
        int32_t active = step(e);
        fail_at = 0;
        CHECK_EQ(paged_engine_read(e, first, &o), PAGED_OK);
        if (o.finish == PAGED_FINISH_ERROR) {
            CHECK_EQ(o.error, PAGED_ERR_NO_MEMORY);
            CHECK_EQ(active, 1);
            CHECK_EQ(e->n_waiting, 0);
            n_failed++;
        }
        run_all(e);
        if (n_failed == n) read_end(e, second, PAGED_FINISH_LENGTH); /* else it was the second that failed */
        paged_engine_get_cache_stats(e, &stats);
        CHECK_EQ(stats.n_used, 0);
        paged_engine_free(e);
    }
    CHECK(n_failed >= 3); /* the namespace, its bytes, the tokens */

    /* Three equal ones; an allocation of the step in which the others go on fails. */
    bool fired = true;
    for (int n = 1; fired; n++) {
        paged_engine *e = make(m, (paged_engine_config){.max_running = 3});
        uint64_t ids[3];
        paged_cache_stats stats;
        for (int i = 0; i < 3; i++) ids[i] = submit(e, tokens[0], N_PROMPT, N_NEW);
        step(e);
        fail_at = n;
        n_allocs = 0;
        step(e);
        fired = n_allocs >= n;
        fail_at = 0;
        run_all(e);
        int n_ended = 0;
        for (int i = 0; i < 3; i++) {
            paged_output o;
            CHECK_EQ(paged_engine_read(e, ids[i], &o), PAGED_OK);
            n_ended += o.finish == PAGED_FINISH_LENGTH;
            if (o.finish != PAGED_FINISH_LENGTH) CHECK_EQ(o.error, PAGED_ERR_NO_MEMORY);
        }
        CHECK_EQ(n_ended, fired ? 2 : 3);
        paged_engine_get_cache_stats(e, &stats);
        CHECK_EQ(stats.n_used, 0);
        paged_engine_free(e);
    }
    paged_model_free(m);
    paged_allocator_set(NULL);
}

/* ---- pools that are too small ---- */

/* D03: 40 blocks of 16. What can never fit is refused with both numbers; what fits now and not to its end
 * ends by length when the pool is full; the small ones beside it finish. */
static void what_can_never_fit(void) {
    paged_model *m = load();
    paged_engine *e =
        make(m, (paged_engine_config){.max_running = 4, .pool_bytes = pool_of(m, 40), .max_waiting = 8});
    static int32_t tokens[4][800];
    paged_request q;
    paged_error err = {0};
    uint64_t id, ids[4];
    for (int i = 0; i < 4; i++) fill_prompt(tokens[i], 800, (uint64_t)i);
    paged_request_init(&q);
    q.tokens = tokens[0];
    q.n_tokens = 800;
    CHECK_EQ(paged_engine_submit(e, &q, &id, &err), PAGED_ERR_TOO_LONG);
    CHECK(strstr(err.message, "800") && strstr(err.message, "640"));
    for (int i = 1; i < 4; i++) ids[i] = submit(e, tokens[i], 20, N_NEW);
    ids[0] = submit(e, tokens[0], 600, 200);
    run_all(e);
    for (int i = 1; i < 4; i++) CHECK_EQ(read_end(e, ids[i], PAGED_FINISH_LENGTH).n_tokens, N_NEW);
    CHECK_EQ(read_end(e, ids[0], PAGED_FINISH_LENGTH).n_tokens, 640 - 600 + 1);
    paged_engine_free(e);
    paged_model_free(m);
}

/* D04: a pool for 2.3 requests, five of them at once: all end, with the answers of a request alone. Some are
 * thrown out, a few times each and never the oldest, and go on where they stopped. Without a prefix cache all
 * that they had is computed again. */
static void more_than_the_pool_holds(void) {
    enum { EACH = (100 + 200 - 1 + 15) / 16 };
    paged_model *m = load();
    static int32_t tokens[5][100];
    static float want[5][200];
    for (int i = 0; i < 5; i++) {
        fill_prompt(tokens[i], 100, 20 + (uint64_t)i);
        alone(m, tokens[i], 100, 200, want[i]);
    }
    for (int no_cache = 0; no_cache < 2; no_cache++) {
        paged_engine *e = make(m, (paged_engine_config){.max_running = 5,
                                                        .pool_bytes = pool_of(m, EACH * 23 / 10),
                                                        .no_prefix_cache = no_cache});
        uint64_t ids[5], n_preemptions = 0;
        int32_t n_steps = 0, most_running = 0;
        for (int i = 0; i < 5; i++) ids[i] = submit(e, tokens[i], 100, 200);
        while (step(e)) {
            CHECK(n_steps++ < 3 * 210); /* 2.3 at a time */
            most_running = PAGED_MAX(most_running, e->n_running);
        }
        CHECK_EQ(most_running, 5);
        for (int i = 0; i < 5; i++) {
            paged_output o = read_end(e, ids[i], PAGED_FINISH_LENGTH);
            CHECK_EQ(o.n_tokens, 200);
            CHECK(memcmp(o.logprobs, want[i], sizeof want[i]) == 0);
            CHECK(o.n_preemptions <= (i ? 3 : 0));
            n_preemptions += (uint64_t)o.n_preemptions;
        }
        paged_engine_stats stats;
        paged_engine_get_stats(e, &stats);
        CHECK(n_preemptions >= 3);
        CHECK_EQ(stats.n_preemptions, n_preemptions);
        paged_engine_free(e);
    }
    paged_model_free(m);
}

/* Without paging a request holds room for the whole context, so that fewer run at once in the same pool; the
 * answers have the same bits, nobody is preempted, and a fork is a copy. */
static void contiguous_is_the_same_with_fewer_at_once(void) {
    enum { CTX = 128, N = 10 };
    paged_model *m = load();
    static int32_t tokens[N][60];
    static float want[N][40];
    int32_t most_running[2] = {0};
    for (int i = 0; i < N; i++) {
        fill_prompt(tokens[i], 60, 40 + (uint64_t)(i / 2)); /* pairs of equal prompts */
        alone(m, tokens[i], 20 + 4 * i, 40, want[i]);
    }
    for (int contiguous = 0; contiguous < 2; contiguous++) {
        paged_engine_config c = {.n_ctx = CTX, .max_running = N, .pool_bytes = pool_of(m, 3 * CTX / 16)};
        c.contiguous = contiguous;
        paged_engine *e = make(m, c);
        uint64_t ids[N], choices;
        paged_request q;
        paged_engine_stats stats;
        paged_cache_stats cache;
        for (int i = 0; i < N; i++) ids[i] = submit(e, tokens[i], 20 + 4 * i, 40);
        while (step(e)) most_running[contiguous] = PAGED_MAX(most_running[contiguous], e->n_running);
        for (int i = 0; i < N; i++) {
            paged_output o = read_end(e, ids[i], PAGED_FINISH_LENGTH);
            CHECK(memcmp(o.logprobs, want[i], sizeof want[i]) == 0);
            if (contiguous) CHECK(o.miss == PAGED_MISS_OFF && o.n_preemptions == 0);
        }
        paged_request_init(&q);
        q.tokens = tokens[3];
        q.n_tokens = 20 + 4 * 3;
        q.max_tokens = 40;
        q.n = 4; /* one more than have room at once */
        q.ignore_eos = q.logprobs = true;
        CHECK_EQ(paged_engine_submit(e, &q, &choices, NULL), PAGED_OK);
        run_all(e);
        for (int k = 0; k < 4; k++) {
            paged_output o = read_end(e, choices + (uint64_t)k, PAGED_FINISH_LENGTH);
            CHECK(memcmp(o.logprobs, want[3], sizeof want[3]) == 0);
        }
        paged_engine_get_stats(e, &stats);
        paged_engine_get_cache_stats(e, &cache);
        if (contiguous) CHECK_EQ(stats.n_preemptions + stats.n_cascade_steps + cache.n_hit_tokens, 0);
        CHECK_EQ(cache.n_used, 0);
        paged_engine_free(e);
    }
    CHECK_EQ(most_running[1], 3);
    CHECK(most_running[0] >= 6);
    paged_engine *e = NULL; /* a pool for less than the context: the context shrinks, and one request runs */
    paged_engine_config c = {.struct_size = sizeof c, .n_ctx = CTX, .contiguous = true};
    paged_engine_info info;
    c.pool_bytes = pool_of(m, 5);
    CHECK_EQ(paged_engine_create(m, &c, &e, NULL), PAGED_OK);
    paged_engine_get_info(e, &info);
    CHECK(info.contiguous && info.n_ctx == 5 * 16);
    paged_engine_free(e);
    paged_model_free(m);
}

/* ---- why a prompt was not reused ---- */

static void misses_have_reasons(void) {
    paged_model *m = load();
    paged_engine *e = make(m, (paged_engine_config){.pool_bytes = pool_of(m, 20), .n_ctx = 320});
    static int32_t tokens[2][320];
    fill_prompt(tokens[0], 320, 3);
    fill_prompt(tokens[1], 320, 4);
    const struct {
        const int32_t *tokens;
        int32_t n;
        const char *salt;
        bool prompt_logprobs;
        int32_t cached;
        paged_miss miss;
        const char *name;
    } cases[] = {
        {tokens[0], 64, NULL, false, 0, PAGED_MISS_NO_MATCH, "no-match"},
        {tokens[0], 64, NULL, false, 63, PAGED_MISS_NONE, "none"},
        {tokens[0], 64, "x", false, 0, PAGED_MISS_NAMESPACE, "namespace"},
        {tokens[0], 1, NULL, false, 0, PAGED_MISS_TOO_SHORT, "too-short"},
        {tokens[0], 64, NULL, true, 0, PAGED_MISS_OFF, "off"},
        {tokens[1], 310, NULL, false, 0, PAGED_MISS_NO_MATCH, "no-match"}, /* needs the whole pool */
        {tokens[0], 64, NULL, false, 0, PAGED_MISS_EVICTED, "evicted"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        paged_request q;
        uint64_t id;
        paged_request_init(&q);
        q.tokens = cases[i].tokens;
        q.n_tokens = cases[i].n;
        q.salt = cases[i].salt;
        q.prompt_logprobs = cases[i].prompt_logprobs;
        q.max_tokens = 2;
        q.ignore_eos = true;
        CHECK_EQ(paged_engine_submit(e, &q, &id, NULL), PAGED_OK);
        run_all(e);
        paged_output o = read_end(e, id, PAGED_FINISH_LENGTH);
        CHECK_EQ(o.cached_tokens, cases[i].cached);
        CHECK_STR(paged_miss_name(o.miss), cases[i].name);
        CHECK_EQ(o.miss, cases[i].miss);
        CHECK_EQ(paged_engine_release(e, id), PAGED_OK);
    }
    CHECK_STR(paged_miss_name((paged_miss)99), "unknown");
    paged_engine_free(e);
    paged_model_free(m);
}

#define TESTS(X)                                                                                             \
    X(equal_prompts_compute_once)                                                                            \
    X(common_beginnings_compute_once)                                                                        \
    X(a_producer_that_leaves_hands_over)                                                                     \
    X(a_failed_admission_costs_no_room)                                                                      \
    X(what_can_never_fit)                                                                                    \
    X(more_than_the_pool_holds)                                                                              \
    X(contiguous_is_the_same_with_fewer_at_once)                                                             \
    X(misses_have_reasons)
TEST_MAIN(TESTS)
