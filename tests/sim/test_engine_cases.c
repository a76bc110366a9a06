/* Goal: what a request gets does not depend on who is there besides it, and who gets what first is as
 * paged/engine.h says. Method: a tiny random model; bits of log-probabilities against those of the request
 * alone without a cache; cases D01, D16 and D34 of known failures of other engines; a clock of the test's own
 * where time matters. */
#include <unistd.h>

#include "engine/engine.h"
#include "test.h"
#include "tiny_model.h"

enum { N_NEW = 64 };

static const tiny_shape shape = {2, 4, 2, 16, 96, 1024, GGML_TYPE_F32};

static paged_model *load(void) {
    char path[64];
    paged_model *m = NULL;
    snprintf(path, sizeof path, "/tmp/paged-cases-%d.gguf", (int)getpid());
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
    if (!c.n_threads) c.n_threads = 1;
    CHECK_EQ(paged_engine_create(m, &c, &e, NULL), PAGED_OK);
    return e;
}

static void fill_prompt(int32_t *tokens, int32_t n, uint64_t seed) {
    for (int32_t i = 0; i < n; i++) tokens[i] = (int32_t)(paged__rand(&seed) % 256);
}

static paged_request request_for(const int32_t *tokens, int32_t n, int32_t max_tokens) {
    paged_request q;
    paged_request_init(&q);
    q.tokens = tokens;
    q.n_tokens = n;
    q.max_tokens = max_tokens;
    q.ignore_eos = q.logprobs = true;
    return q;
}

static uint64_t submit(paged_engine *e, const paged_request *q) {
    uint64_t id = 0;
    CHECK_EQ(paged_engine_submit(e, q, &id, NULL), PAGED_OK);
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

/* One token after the other, no cache, one thread. */
static void alone(const paged_model *m, paged_type type, const int32_t *tokens, int32_t n, int32_t n_new,
                  float *logprobs) {
    paged_engine *e = make(m, (paged_engine_config){.no_prefix_cache = true, .kv_type = (int32_t)type});
    const paged_request q = request_for(tokens, n, n_new);
    uint64_t id = submit(e, &q);
    run_all(e);
    paged_output o = read_end(e, id, PAGED_FINISH_LENGTH);
    CHECK_EQ(o.n_tokens, n_new);
    memcpy(logprobs, o.logprobs, (size_t)n_new * sizeof *logprobs);
    paged_engine_free(e);
}

static size_t pool_of(const paged_model *m, int32_t block_size, int32_t n_blocks) {
    paged_engine_info info;
    paged_engine *e = make(m, (paged_engine_config){.block_size = block_size});
    paged_engine_get_info(e, &info);
    paged_engine_free(e);
    return info.pool_bytes / (size_t)info.n_blocks * (size_t)n_blocks;
}

/* ---- D01: nothing stays behind ---- */

static void nothing_stays_behind(void) {
    paged_model *m = load();
    int32_t tokens[200];
    fill_prompt(tokens, 200, 1);
    for (int b = 16; b <= 64; b *= 4) {
        const int32_t lens[] = {1, b - 1, b, b + 1, 2 * b, 2 * b + 1}, news[] = {1, b - 1, b, b + 1};
        paged_engine *e = make(m, (paged_engine_config){.block_size = b,
                                                        .max_running = 8,
                                                        .max_waiting = 150,
                                                        .n_ctx = 256,
                                                        .no_prefix_cache = true});
        paged_cache_stats before, after;
        uint64_t ids[150];
        int32_t n_sent = 0, n_done = 0;
        paged_engine_get_cache_stats(e, &before);
        while (n_done < 150) {
            for (; n_sent < 150 && n_sent < n_done + 8; n_sent++) {
                const paged_request q = request_for(tokens, lens[n_sent % 6], news[n_sent / 6 % 4]);
                ids[n_sent] = submit(e, &q);
            }
            step(e);
            paged_engine_stats stats;
            paged_engine_get_stats(e, &stats);
            n_done = (int32_t)stats.n_finished[PAGED_FINISH_LENGTH];
        }
        paged_engine_get_cache_stats(e, &after);
        CHECK_EQ(after.n_used, before.n_used);
        CHECK_EQ(after.n_free + after.n_cached + after.n_used, after.n_blocks);
        CHECK_EQ(after.n_seqs, 0);
        for (int i = 0; i < 150; i++)
            CHECK_EQ(read_end(e, ids[i], PAGED_FINISH_LENGTH).n_tokens, news[i / 6 % 4]);
        paged_engine_free(e);
    }
    paged_model_free(m);
}

/* ---- D16: the same bits in any company ---- */

static void same_bits_in_any_company(void) {
    paged_model *m = load();
    static int32_t tokens[8][300];
    static float want[N_NEW];
    const int32_t n_others[] = {0, 3, 7}, chunks[] = {512, 48}, threads[] = {1, 4};
    for (int i = 0; i < 8; i++) fill_prompt(tokens[i], 300, 40 + (uint64_t)i);
    alone(m, PAGED_TYPE_F16, tokens[0], 100, N_NEW, want);
    for (int k = 0; k < 12; k++) {
        paged_engine *e = make(m, (paged_engine_config){.max_running = 8,
                                                        .block_size = k % 3 ? 64 : 16,
                                                        .chunk_tokens = chunks[k / 3 % 2],
                                                        .n_threads = threads[k / 6]});
        uint64_t id = 0;
        for (int i = 0; i <= n_others[k % 3]; i++) {
            paged_request q = request_for(tokens[i], i ? 30 * i : 100, i ? 20 * i : N_NEW);
            q.temperature = i % 2 ? 1.0f : 0.0f;
            const uint64_t new_id = submit(e, &q);
            if (i == 0) id = new_id;
        }
        run_all(e);
        paged_output o = read_end(e, id, PAGED_FINISH_LENGTH);
        CHECK(memcmp(o.logprobs, want, sizeof want) == 0);
        paged_engine_free(e);
    }
    paged_model_free(m);
}

/* ---- D34: prompts and the context ---- */

static void prompts_and_the_context(void) {
    paged_model *m = load();
    static int32_t tokens[5000];
    const struct {
        int32_t n, max_tokens, n_made; /* n_made 0: refused */
    } cases[] = {{255, 0, 2}, {256, 0, 1}, {257, 0, 0}, {5000, 0, 0}, {200, 100, 57}, {200, 20, 20}};
    fill_prompt(tokens, 5000, 9);
    paged_engine *e = make(m, (paged_engine_config){.n_ctx = 256});
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const paged_request q = request_for(tokens, cases[i].n, cases[i].max_tokens);
        paged_error err = {0};
        char number[16];
        uint64_t id;
        const paged_status s = paged_engine_submit(e, &q, &id, &err);
        CHECK_EQ(s, cases[i].n_made ? PAGED_OK : PAGED_ERR_TOO_LONG);
        snprintf(number, sizeof number, "%d", cases[i].n);
        if (s) CHECK(strstr(err.message, number) && strstr(err.message, "256"));
        if (s) continue;
        run_all(e);
        CHECK_EQ(read_end(e, id, PAGED_FINISH_LENGTH).n_tokens, cases[i].n_made);
    }
    paged_engine_free(e);
    paged_model_free(m);
}

/* ---- cascade and packed tails run, and change nothing ---- */

static void common_beginnings_are_read_once(void) {
    enum { N = 6, LEN = 620 };
    paged_model *m = load();
    static int32_t tokens[N][LEN];
    static float want[2][N][N_NEW]; /* f16, i8 */
    for (int i = 0; i < N; i++) {
        fill_prompt(tokens[i], LEN, 70 + (uint64_t)i);
        fill_prompt(tokens[i], i < 4 ? 600 : 520, i < 4 ? 3 : 4); /* two groups */
        alone(m, PAGED_TYPE_F16, tokens[i], LEN - i, N_NEW, want[0][i]);
        alone(m, PAGED_TYPE_I8, tokens[i], LEN - i, N_NEW, want[1][i]);
    }
    const paged_engine_config cases[] = {
        {.block_size = 16},
        {.block_size = 64},
        {.block_size = 64, .no_packed_tails = true},
        {.block_size = 128, .n_threads = 3},
        {.block_size = 40, .kv_plain = true},
        {.block_size = 16, .kv_type = PAGED_TYPE_I8},
        {.block_size = 64, .kv_type = PAGED_TYPE_I8},
        {.block_size = 16, .pool_bytes = pool_of(m, 16, 58)}, /* some are thrown out */
        {.block_size = 64, .pool_bytes = pool_of(m, 64, 12)},
    };
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        paged_engine_config config = cases[c];
        config.max_running = N;
        paged_engine *e = make(m, config);
        paged_cache_stats cache;
        paged_engine_stats stats;
        paged_engine_info info;
        uint64_t ids[N];
        for (int i = 0; i < N; i++) {
            const paged_request q = request_for(tokens[i], LEN - i, N_NEW);
            ids[i] = submit(e, &q);
        }
        run_all(e);
        for (int i = 0; i < N; i++) {
            paged_output o = read_end(e, ids[i], PAGED_FINISH_LENGTH);
            CHECK_EQ(o.n_tokens, N_NEW);
            CHECK(memcmp(o.logprobs, want[config.kv_type == PAGED_TYPE_I8][i], sizeof want[0][i]) == 0);
        }
        paged_engine_get_stats(e, &stats);
        paged_engine_get_cache_stats(e, &cache);
        paged_engine_get_info(e, &info);
        CHECK(stats.n_cascade_steps > 20 && stats.n_cascade_rows >= 2 * stats.n_cascade_steps);
        CHECK_EQ(info.packed_tails, config.block_size >= 64 && !config.no_packed_tails);
        CHECK_EQ(cache.n_packed > 0, info.packed_tails);
        CHECK_EQ(stats.n_preemptions > 0, config.pool_bytes > 0);
        paged_engine_free(e);
    }
    paged_model_free(m);
}

/* ---- several answers to one prompt ---- */

/* Each is the answer of that choice whatever happens beside it; the prompt is computed once, and its last
 * block is copied by all but one. */
static void choices_are_forks(void) {
    enum { N = 4, LEN = 100 };
    paged_model *m = load();
    int32_t tokens[LEN];
    static float want[N][N_NEW];
    fill_prompt(tokens, LEN, 5);
    const paged_engine_config cases[] = {{.max_running = N},
                                         {.max_running = N, .block_size = 64, .chunk_tokens = 30},
                                         {.max_running = N, .no_prefix_cache = true},
                                         {.max_running = N, .pool_bytes = pool_of(m, 16, 20)},
                                         {.max_running = 2, .no_prefix_cache = true},
                                         {.max_running = 1}};
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        paged_engine *e = make(m, cases[c]);
        paged_cache_stats cache;
        paged_engine_stats stats;
        const float *logprobs;
        const int32_t *top1;
        int32_t n_scores;
        paged_request q = request_for(tokens, LEN, N_NEW);
        q.temperature = 50; /* the logits of a random model lie far apart */
        q.seed = 7;
        q.n = N;
        q.prompt_logprobs = true;
        const uint64_t id = submit(e, &q);
        run_all(e);
        for (uint64_t i = 0; i < N; i++) {
            paged_output o = read_end(e, id + i, PAGED_FINISH_LENGTH);
            CHECK_EQ(o.n_tokens, N_NEW);
            if (c == 0) memcpy(want[i], o.logprobs, sizeof want[i]);
            CHECK(memcmp(want[i], o.logprobs, sizeof want[i]) == 0);
            CHECK_EQ(paged_engine_prompt_logprobs(e, id + i, &logprobs, &top1, &n_scores),
                     i ? PAGED_ERR_INVALID_ARG : PAGED_OK);
            for (uint64_t k = 0; k < i; k++) CHECK(memcmp(want[i], want[k], sizeof want[i]) != 0);
        }
        paged_engine_get_cache_stats(e, &cache);
        paged_engine_get_stats(e, &stats);
        CHECK_EQ(cache.n_used, 0);
        if (c == 2) CHECK_EQ(cache.n_copies, N - 1);
        if (c < 3) CHECK_EQ(stats.n_tokens, LEN + N * (N_NEW - 1));
        paged_engine_free(e);
    }
    paged_engine *e = make(m, (paged_engine_config){.max_running = 1, .max_waiting = N - 2});
    paged_request q = request_for(tokens, LEN, 1);
    uint64_t id = 0;
    q.n = N;
    CHECK_EQ(paged_engine_submit(e, &q, &id, NULL), PAGED_ERR_LIMIT);
    q.n = -1;
    CHECK_EQ(paged_engine_submit(e, &q, &id, NULL), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(id, 0);
    paged_engine_free(e);
    paged_model_free(m);
}

/* ---- who comes first ---- */

static uint64_t test_now_ns;

static uint64_t now(void *self) {
    (void)self;
    return test_now_ns;
}

/* The order in which requests of these priorities, submitted so many ms after each other, are served one at a
 * time. */
static void order_of(const paged_model *m, int32_t n, const int32_t *priorities, int32_t ms, int32_t *order) {
    paged_engine *e = make(m, (paged_engine_config){.n_ctx = 64});
    int32_t token = 1, n_done = 0;
    uint64_t ids[8];
    e->backend.now_ns = now;
    test_now_ns = 1;
    for (int32_t i = 0; i < n; i++, test_now_ns += (uint64_t)ms * 1000000) {
        paged_request q = request_for(&token, 1, 1);
        q.priority = priorities[i];
        ids[i] = submit(e, &q);
    }
    while (n_done < n) {
        step(e);
        for (int32_t i = 0; i < n; i++) {
            paged_output o;
            if (paged_engine_read(e, ids[i], &o) || !o.finish) continue;
            order[n_done++] = i;
            CHECK_EQ(paged_engine_release(e, ids[i]), PAGED_OK);
        }
    }
    paged_engine_free(e);
}

static void priority_and_age(void) {
    paged_model *m = load();
    int32_t got[4];
    order_of(m, 4, (const int32_t[]){0, 2, 0, 1}, 1, got);
    CHECK(got[0] == 1 && got[1] == 3 && got[2] == 0 && got[3] == 2);
    /* A level is worth a second: whoever waited longer than that comes first. */
    order_of(m, 4, (const int32_t[]){0, 1, 1, 1}, PAGED_AGING_MS / 2 + 1, got);
    CHECK(got[0] == 1 && got[1] == 0 && got[2] == 2 && got[3] == 3);
    paged_engine *e = make(m, (paged_engine_config){.n_ctx = 64});
    paged_request q = request_for(&(int32_t){1}, 1, 1);
    uint64_t id;
    q.priority = PAGED_PRIORITY_MAX + 1;
    CHECK_EQ(paged_engine_submit(e, &q, &id, NULL), PAGED_ERR_INVALID_ARG);
    q.priority = 0;
    q.deadline_ms = -1;
    CHECK_EQ(paged_engine_submit(e, &q, &id, NULL), PAGED_ERR_INVALID_ARG);
    paged_engine_free(e);
    paged_model_free(m);
}

static void deadlines_end_requests(void) {
    paged_model *m = load();
    paged_engine *e = make(m, (paged_engine_config){.n_ctx = 256});
    int32_t tokens[40];
    uint64_t ids[2];
    fill_prompt(tokens, 40, 3);
    e->backend.now_ns = now;
    test_now_ns = 1;
    paged_request q = request_for(tokens, 40, 100);
    q.deadline_ms = 50;
    for (int i = 0; i < 2; i++) ids[i] = submit(e, &q); /* the second one waits all the time */
    for (int i = 0; i < 49; i++, test_now_ns += 1000000) CHECK_EQ(step(e), 2);
    test_now_ns += 1000000;
    CHECK_EQ(step(e), 0);
    CHECK_EQ(read_end(e, ids[0], PAGED_FINISH_DEADLINE).n_tokens, 49);
    CHECK_EQ(read_end(e, ids[1], PAGED_FINISH_DEADLINE).n_tokens, 0);
    CHECK_STR(paged_finish_name(PAGED_FINISH_DEADLINE), "deadline");
    paged_engine_free(e);
    paged_model_free(m);
}

/* ---- waits have reasons ---- */

static paged_wait wait_of(paged_engine *e, uint64_t id) {
    paged_output o;
    CHECK_EQ(paged_engine_read(e, id, &o), PAGED_OK);
    return o.wait;
}

static void waits_have_reasons(void) {
    paged_model *m = load();
    paged_engine *e = make(
        m, (paged_engine_config){.max_running = 3, .pool_bytes = pool_of(m, 16, 12), .chunk_tokens = 40});
    static int32_t tokens[4][150];
    uint64_t ids[5];
    for (int i = 0; i < 4; i++) fill_prompt(tokens[i], 150, 20 + (uint64_t)i);
    const paged_request first = request_for(tokens[0], 100, 80), large = request_for(tokens[1], 150, 5),
                        small = request_for(tokens[2], 10, 5);
    ids[0] = submit(e, &first);
    ids[1] = submit(e, &first);
    ids[2] = submit(e, &large);
    ids[3] = submit(e, &small);
    CHECK_EQ(wait_of(e, ids[0]), PAGED_WAIT_QUEUE);
    step(e);
    CHECK_EQ(wait_of(e, ids[0]), PAGED_WAIT_NONE);
    CHECK_EQ(wait_of(e, ids[1]), PAGED_WAIT_PROMISE);
    CHECK_EQ(wait_of(e, ids[2]), PAGED_WAIT_BLOCKS);
    CHECK_EQ(wait_of(e, ids[3]), PAGED_WAIT_QUEUE); /* nobody passes */
    paged_engine_stats stats;
    paged_engine_get_stats(e, &stats);
    CHECK_EQ(stats.n_running, 2);
    CHECK_EQ(stats.n_waiting, 2);
    CHECK(stats.n_wait[PAGED_WAIT_PROMISE] == 1 && stats.n_wait[PAGED_WAIT_BLOCKS] == 1);
    int32_t n_seen = 0;
    while (step(e)) n_seen += wait_of(e, ids[1]) == PAGED_WAIT_PREEMPTED;
    CHECK(n_seen > 0); /* both grow until the pool is full */
    for (int i = 0; i < 4; i++) CHECK_EQ(wait_of(e, ids[i]), PAGED_WAIT_NONE);
    for (int i = 0; i < PAGED_WAIT_KINDS; i++) CHECK(strcmp(paged_wait_name((paged_wait)i), "unknown") != 0);
    paged_engine_free(e);
    paged_model_free(m);
}

#define TESTS(X)                                                                                             \
    X(nothing_stays_behind)                                                                                  \
    X(same_bits_in_any_company)                                                                              \
    X(prompts_and_the_context)                                                                               \
    X(common_beginnings_are_read_once)                                                                       \
    X(choices_are_forks)                                                                                     \
    X(priority_and_age)                                                                                      \
    X(deadlines_end_requests)                                                                                \
    X(waits_have_reasons)
TEST_MAIN(TESTS)
