/* Goal: requests through the engine give the same bits however they are computed, use exactly their blocks
 * and leave nothing behind. Method: tiny random models written here, and SmolLM2 where PAGED_MODEL names it;
 * every comparison is of float bits; NaN lies in every slot that holds no token; the cache is checked after
 * every step. */
#include <math.h>
#include <pthread.h>
#include <unistd.h>

#include "engine/engine.h"
#include "test.h"
#include "tiny_model.h"

enum { N_PROMPT = 150, N_NEW = 24 };

static const tiny_shape shapes[] = {
    {2, 4, 2, 16, 96, 1024, GGML_TYPE_F32},
    {2, 6, 2, 32, 128, 1024, GGML_TYPE_F16},
    {2, 9, 3, 32, 160, 1024, GGML_TYPE_Q8_0},
    {2, 4, 4, 64, 256, 1024, GGML_TYPE_Q4_1},
};
enum { N_SHAPES = sizeof shapes / sizeof shapes[0] };

static paged_model *load_tiny(int i) {
    char path[64];
    paged_model *m = NULL;
    paged_error err = {0};
    snprintf(path, sizeof path, "/tmp/paged-test-%d-%d.gguf", (int)getpid(), i);
    CHECK(tiny_model_write(path, &shapes[i], test_seed + (uint64_t)i));
    const paged_status s = paged_model_load(path, NULL, &m, &err);
    unlink(path);
    if (s) printf("%s\n", err.message);
    CHECK_EQ(s, PAGED_OK);
    return m;
}

static void fill_prompt(int32_t *tokens, int32_t n, uint64_t seed) {
    for (int32_t i = 0; i < n; i++) tokens[i] = (int32_t)(paged__rand(&seed) % 256);
}

static paged_engine *make(const paged_model *m, paged_engine_config c) {
    paged_engine *e = NULL;
    paged_error err = {0};
    c.struct_size = sizeof c;
    c.poison = true;
    if (!c.n_ctx) c.n_ctx = 512;
    if (!c.n_threads) c.n_threads = 1;
    const paged_status s = paged_engine_create(m, &c, &e, &err);
    if (s) printf("%s\n", err.message);
    CHECK_EQ(s, PAGED_OK);
    return e;
}

static void check_cache(const paged_engine *e) {
    paged_error err = {0};
    if (paged_engine_check(e, &err)) printf("%s\n", err.message);
    CHECK_STR(err.message, "");
}

static void run_all(paged_engine *e) {
    int32_t active = 1;
    paged_error err = {0};
    for (int i = 0; active && i < 100000; i++) {
        CHECK_EQ(paged_engine_step(e, &active, &err), PAGED_OK);
        check_cache(e);
    }
    CHECK_EQ(active, 0);
}

typedef struct result {
    float prompt[N_PROMPT], made[N_NEW];
    int32_t tokens[N_NEW], n_tokens;
} result;

static paged_request request_for(const int32_t *tokens, int32_t n) {
    paged_request q;
    paged_request_init(&q);
    q.tokens = tokens;
    q.n_tokens = n;
    q.max_tokens = N_NEW;
    q.ignore_eos = q.logprobs = q.prompt_logprobs = true;
    return q;
}

static void collect(paged_engine *e, uint64_t id, result *out) {
    paged_output o;
    const float *lp;
    const int32_t *top1;
    int32_t n;
    memset(out, 0, sizeof *out);
    CHECK_EQ(paged_engine_read(e, id, &o), PAGED_OK);
    CHECK_EQ(o.finish, PAGED_FINISH_LENGTH);
    CHECK_EQ(o.n_tokens, N_NEW);
    CHECK_EQ(paged_engine_prompt_logprobs(e, id, &lp, &top1, &n), PAGED_OK);
    CHECK(n < N_PROMPT);
    memcpy(out->prompt, lp, (size_t)n * sizeof *lp);
    memcpy(out->made, o.logprobs, sizeof out->made);
    memcpy(out->tokens, o.tokens, sizeof out->tokens);
    out->n_tokens = o.n_tokens;
    for (int32_t i = 0; i < n; i++) CHECK(isfinite(lp[i]) && lp[i] <= 0);
}

static void run_one(const paged_model *m, paged_engine_config c, uint64_t shuffle, result *out) {
    int32_t tokens[N_PROMPT];
    uint64_t id;
    paged_engine *e = make(m, c);
    fill_prompt(tokens, N_PROMPT, 3);
    if (shuffle) paged__cache_shuffle(e->cache, shuffle);
    paged_request q = request_for(tokens, N_PROMPT);
    CHECK_EQ(paged_engine_submit(e, &q, &id, NULL), PAGED_OK);
    run_all(e);
    collect(e, id, out);
    paged_engine_free(e);
}

static void same(const result *a, const result *b) {
    CHECK(memcmp(a, b, sizeof *a) == 0);
}

/* Chunks, threads, physical order, layout and block size must not change a bit. */
static void same_bits(void) {
    for (int i = 0; i < N_SHAPES; i++) {
        paged_model *m = load_tiny(i);
        static result want, got;
        run_one(m, (paged_engine_config){0}, 0, &want);
        const int32_t chunks[] = {1, 2, 4, 5, 7, 16, 64};
        for (int c = 0; c < 7; c++) {
            run_one(m, (paged_engine_config){.chunk_tokens = chunks[c]}, 0, &got);
            same(&want, &got);
        }
        run_one(m, (paged_engine_config){.n_threads = 2, .chunk_tokens = 33}, 5, &got);
        same(&want, &got);
        for (uint64_t seed = 1; seed < 4; seed++) {
            run_one(m, (paged_engine_config){0}, seed, &got);
            same(&want, &got);
        }
        for (int b = 32; b <= 128; b *= 2) {
            run_one(m, (paged_engine_config){.block_size = b, .chunk_tokens = 50}, 2, &got);
            same(&want, &got);
        }
        run_one(m, (paged_engine_config){.kv_plain = true, .block_size = 10, .chunk_tokens = 9}, 7, &got);
        same(&want, &got);
        paged_model_free(m);
    }
}

/* Tokens generated one by one, then given again as a prompt: the log-probabilities must be the same bits. */
static void decode_is_prefill(void) {
    for (int i = 0; i < N_SHAPES; i++) {
        for (int type = 0; type < 4; type++) {
            paged_model *m = load_tiny(i);
            static result r;
            int32_t tokens[N_PROMPT + N_NEW];
            run_one(m, (paged_engine_config){.kv_type = type}, 0, &r);
            fill_prompt(tokens, N_PROMPT, 3);
            memcpy(tokens + N_PROMPT, r.tokens, sizeof r.tokens);
            paged_engine *e = make(m, (paged_engine_config){.kv_type = type});
            paged_request q = request_for(tokens, N_PROMPT + N_NEW);
            q.max_tokens = 1;
            uint64_t id;
            const float *lp;
            const int32_t *top1;
            int32_t n;
            CHECK_EQ(paged_engine_submit(e, &q, &id, NULL), PAGED_OK);
            run_all(e);
            CHECK_EQ(paged_engine_prompt_logprobs(e, id, &lp, &top1, &n), PAGED_OK);
            CHECK(memcmp(lp, r.prompt, (N_PROMPT - 1) * sizeof *lp) == 0);
            CHECK(memcmp(lp + N_PROMPT - 1, r.made, sizeof r.made) == 0);
            for (int t = 0; t < N_NEW; t++) CHECK_EQ(top1[N_PROMPT - 1 + t], r.tokens[t]); /* greedy */
            paged_engine_free(e);
            paged_model_free(m);
        }
    }
}

/* The rule of PAGED_KV_AUTO, said again: what the flags have, what a device is, what bf16 does not have. */
static void auto_is_by_the_flags(void) {
    const uint32_t masks[] = {0, PAGED_CPU_AVX2, ~(uint32_t)PAGED_CPU_AVX512_BF16, ~0u};
    const struct {
        const char *device;
        int32_t head_dim;
        bool may_pair;
    } cases[] = {{NULL, 64, true},   {"cpu", 2, true},      {NULL, 0, true},
                 {"cpu", 63, false}, {"opencl", 64, false}, {"opencl:0", 64, false}};
    for (size_t k = 0; k < sizeof masks / sizeof masks[0]; k++) {
        paged_cpu_mask(masks[k]);
        const bool pairs = paged_cpu_flags() & PAGED_CPU_AVX512_BF16;
        CHECK(!pairs || k == 3);
        for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
            CHECK_EQ(paged_engine_kv_type(PAGED_KV_AUTO, cases[c].device, cases[c].head_dim),
                     pairs && cases[c].may_pair ? PAGED_TYPE_BF16 : PAGED_TYPE_F16);
            for (int32_t type = PAGED_TYPE_F16; type <= PAGED_TYPE_I8; type++)
                CHECK_EQ(paged_engine_kv_type(type, cases[c].device, cases[c].head_dim), type);
        }
    }
    paged_cpu_mask(~0u);
}

static paged_type type_of(const paged_engine *e) {
    paged_engine_info info;
    paged_engine_get_info(e, &info);
    CHECK_EQ(e->cache->groups[0].config.type, info.kv_type);
    return info.kv_type;
}

/* Whoever says nothing gets auto, zero is f16, and behind create there is no auto: bits, key of stores and
 * namespace are those of the type itself. */
static void auto_is_a_type_behind_create(void) {
    const paged_type wanted = paged_cpu_flags() & PAGED_CPU_AVX512_BF16 ? PAGED_TYPE_BF16 : PAGED_TYPE_F16;
    paged_model *m = load_tiny(0);
    paged_engine_config config;
    paged_engine_config_init(&config);
    CHECK_EQ(config.struct_size, sizeof config);
    CHECK_EQ(config.kv_type, PAGED_KV_AUTO);
    config.kv_type = 0;
    CHECK(memcmp(&config, &(paged_engine_config){.struct_size = sizeof config}, sizeof config) == 0);

    paged_engine *e = make(m, (paged_engine_config){0});
    CHECK_EQ(type_of(e), PAGED_TYPE_F16);
    paged_engine_free(e);
    CHECK_EQ(paged_engine_create(m, NULL, &e, NULL), PAGED_OK);
    CHECK_EQ(type_of(e), wanted);
    paged_engine_free(e);

    static result by_itself, by_name;
    run_one(m, (paged_engine_config){.kv_type = PAGED_KV_AUTO}, 0, &by_itself);
    run_one(m, (paged_engine_config){.kv_type = (int32_t)wanted}, 0, &by_name);
    same(&by_itself, &by_name);

    static char texts[2][PAGED__FINGERPRINT_MAX];
    for (int i = 0; i < 2; i++) {
        paged__names names;
        e = make(m, (paged_engine_config){.kv_type = i ? (int32_t)wanted : PAGED_KV_AUTO});
        CHECK_EQ(type_of(e), wanted);
        paged__fingerprint(e, (paged_type)e->config.kv_type, texts[i]);
        paged__names_of(e, NULL, &names);
        CHECK_EQ(names.kv[0], wanted);
        paged_engine_free(e);
    }
    CHECK_STR(texts[0], texts[1]);
    paged_model_free(m);
}

/* Alone, and among eight others of other lengths, some of which are cancelled. */
static void batch_is_alone(void) {
    for (int i = 0; i < N_SHAPES; i++) {
        paged_model *m = load_tiny(i);
        static result want, got;
        run_one(m, (paged_engine_config){0}, 0, &want);
        paged_engine *e =
            make(m, (paged_engine_config){.max_running = 9, .chunk_tokens = 40, .n_threads = 2});
        uint64_t ids[9];
        int32_t tokens[9][N_PROMPT];
        for (int k = 0; k < 9; k++) {
            fill_prompt(tokens[k], N_PROMPT, k == 4 ? 3 : (uint64_t)(100 + k));
            paged_request q = request_for(tokens[k], k == 4 ? N_PROMPT : 1 + 17 * k);
            CHECK_EQ(paged_engine_submit(e, &q, &ids[k], NULL), PAGED_OK);
        }
        for (int k = 0; k < 3; k++) CHECK_EQ(paged_engine_step(e, NULL, NULL), PAGED_OK);
        paged_engine_cancel(e, ids[0]);
        paged_engine_cancel(e, ids[7]);
        run_all(e);
        collect(e, ids[4], &got);
        same(&want, &got);
        paged_output o;
        CHECK_EQ(paged_engine_read(e, ids[7], &o), PAGED_OK);
        CHECK_EQ(o.finish, PAGED_FINISH_CANCELLED);
        paged_cache_stats stats;
        paged_engine_get_cache_stats(e, &stats);
        CHECK_EQ(stats.n_used, 0);
        CHECK_EQ(stats.n_seqs, 0);
        paged_engine_free(e);
        paged_model_free(m);
    }
}

/* One step of one token on a sequence; logits of it. */
static const float *decode(paged_engine *e, paged_seq seq, int32_t token, bool commit) {
    const int32_t pos = paged_seq_len(e->cache, seq), cu[] = {0, 1}, out[] = {0}, len = pos + 1,
                  row = paged_seq_row(e->cache, seq);
    int64_t slot;
    const float *logits = NULL;
    CHECK_EQ(paged_seq_reserve(e->cache, seq, 1), PAGED_OK);
    CHECK_EQ(paged_seq_slots(e->cache, seq, 0, pos, 1, &slot), PAGED_OK);
    paged__step step = {
        .n_tokens = 1, .tokens = &token, .positions = &pos, .slots = {&slot}, .n_outputs = 1, .outputs = out};
    step.batch[0].cu_seqlens_q = cu;
    CHECK_EQ(paged_cache_tables(e->cache, 0, &step.batch[0].tables), PAGED_OK);
    step.batch[0].tables.rows = &row;
    step.batch[0].tables.seqlens_k = &len;
    step.batch[0].tables.n_seqs = 1;
    CHECK_EQ(paged__runner_step(e->runner, &step, &logits, NULL), PAGED_OK);
    if (commit) CHECK_EQ(paged_seq_commit(e->cache, seq, &token, 1), PAGED_OK);
    return logits;
}

/* It leaves nothing behind, and changes no bit of what comes. */
static void warm_up_leaves_nothing(void) {
    paged_model *m = load_tiny(0);
    paged_engine *cold = make(m, (paged_engine_config){0}),
                 *warm = make(m, (paged_engine_config){.warm_up = true, .poison = true});
    paged_cache_stats stats;
    paged_seq a, b;
    paged_engine_get_cache_stats(warm, &stats);
    CHECK(stats.n_used == 0 && stats.n_cached == 0 && stats.n_seqs == 0 && stats.n_allocs == 1);
    CHECK_EQ(paged_engine_check(warm, NULL), PAGED_OK);
    CHECK_EQ(paged_seq_create(cold->cache, &a), PAGED_OK);
    CHECK_EQ(paged_seq_create(warm->cache, &b), PAGED_OK);
    for (int i = 0; i < 3; i++) {
        float want[TINY_VOCAB];
        memcpy(want, decode(cold, a, 7 + i, true), sizeof want);
        CHECK(memcmp(want, decode(warm, b, 7 + i, true), sizeof want) == 0);
    }
    paged_engine_free(warm);
    paged_engine_free(cold);
    paged_model_free(m);
}

/* A fork computes what a fresh sequence computes, before and after its parent went another way. */
static void fork_is_fresh(void) {
    for (int i = 0; i < N_SHAPES; i++) {
        paged_model *m = load_tiny(i);
        paged_engine *e = make(m, (paged_engine_config){.max_running = 3});
        paged_seq parent, child, fresh;
        float want[TINY_VOCAB];
        CHECK_EQ(paged_seq_create(e->cache, &parent), PAGED_OK);
        CHECK_EQ(paged_seq_create(e->cache, &fresh), PAGED_OK);
        for (int32_t t = 0; t < 37; t++) {
            decode(e, parent, t * 5 % 256, true);
            decode(e, fresh, t * 5 % 256, true);
        }
        CHECK_EQ(paged_seq_fork(e->cache, parent, &child), PAGED_OK);
        for (int32_t t = 0; t < 20; t++) {
            decode(e, parent, 200 - t, true); /* the parent writes on: the shared block is copied first */
            memcpy(want, decode(e, fresh, 50 + t, true), sizeof want);
            CHECK(memcmp(want, decode(e, child, 50 + t, true), sizeof want) == 0);
            check_cache(e);
        }
        CHECK_EQ(paged_seq_free(e->cache, parent), PAGED_OK);
        memcpy(want, decode(e, fresh, 9, true), sizeof want);
        CHECK(memcmp(want, decode(e, child, 9, true), sizeof want) == 0);
        paged_engine_free(e);
        paged_model_free(m);
    }
}

/* The answer really comes through the block table and out of the blocks: the runner has room for the rows of
 * one step only, and what it holds can be destroyed between steps. */
static void reads_through_the_table(void) {
    paged_model *m = load_tiny(0);
    paged_engine *e = make(m, (paged_engine_config){.chunk_tokens = 4});
    paged_seq seq;
    paged_tables tables;
    paged_kv kv;
    float want[TINY_VOCAB];
    CHECK_EQ(paged_seq_create(e->cache, &seq), PAGED_OK);
    for (int32_t t = 0; t < 100; t++) decode(e, seq, t * 7 % 256, true);
    CHECK_EQ(paged__runner_max_rows(e->runner), 4);
    CHECK_EQ(paged_cache_tables(e->cache, 0, &tables), PAGED_OK);
    CHECK_EQ(paged_cache_kv(e->cache, 0, 0, &kv), PAGED_OK);
    int32_t *row =
        (int32_t *)(uintptr_t)tables.blocks + (int64_t)paged_seq_row(e->cache, seq) * tables.seq_stride;

    memcpy(want, decode(e, seq, 1, false), sizeof want);
    CHECK(memcmp(want, decode(e, seq, 1, false), sizeof want) == 0);
    size_t n_bytes;
    void *activations = paged__runner_activations(e->runner, &n_bytes);
    CHECK_EQ(n_bytes, paged__runner_compute_bytes(e->runner));
    memset(activations, 0xff, n_bytes); /* NaN */
    CHECK(memcmp(want, decode(e, seq, 1, false), sizeof want) == 0);
    const int32_t block = row[1];
    row[1] = row[3];
    row[3] = block;
    CHECK(memcmp(want, decode(e, seq, 1, false), sizeof want) != 0);
    row[3] = row[1];
    row[1] = block;
    CHECK(memcmp(want, decode(e, seq, 1, false), sizeof want) == 0);

    memset(kv.k + block * kv.block_stride, 0, 64);
    CHECK(memcmp(want, decode(e, seq, 1, false), sizeof want) != 0);
    paged_engine_free(e);
    paged_model_free(m);
}

static void blocks_are_counted(void) {
    paged_model *m = load_tiny(0);
    paged_engine *e = make(m, (paged_engine_config){.n_ctx = 256});
    paged_cache_stats before, during;
    paged_engine_get_cache_stats(e, &before);
    int32_t tokens[256];
    fill_prompt(tokens, 256, 1);
    const int32_t lens[] = {1, 15, 16, 17, 31, 32, 33, 255, 256};
    for (int i = 0; i < 9; i++) {
        uint64_t id;
        paged_output o;
        int32_t active;
        paged_request q = request_for(tokens, lens[i]);
        q.max_tokens = 20;
        CHECK_EQ(paged_engine_submit(e, &q, &id, NULL), PAGED_OK);
        do {
            CHECK_EQ(paged_engine_step(e, &active, NULL), PAGED_OK);
            check_cache(e);
            CHECK_EQ(paged_engine_read(e, id, &o), PAGED_OK);
            const int32_t in_cache = o.prompt_tokens + o.completion_tokens - 1;
            CHECK_EQ(o.blocks_used, (in_cache + 15) / 16);
            paged_engine_get_cache_stats(e, &during);
            CHECK_EQ(during.n_used, active ? o.blocks_used : 0);
        } while (active);
        CHECK_EQ(o.finish, PAGED_FINISH_LENGTH);
        CHECK_EQ(o.completion_tokens, lens[i] + 20 <= 257 ? 20 : 257 - lens[i]);
        CHECK_EQ(paged_engine_release(e, id), PAGED_OK);
        CHECK_EQ(paged_engine_release(e, id), PAGED_ERR_NOT_FOUND);
        paged_engine_get_cache_stats(e, &during);
        CHECK_EQ(during.n_used, before.n_used);
        CHECK_EQ(during.n_free + during.n_cached, before.n_free);
    }
    paged_engine_free(e);
    paged_model_free(m);
}

static void refuses(void) {
    paged_model *m = load_tiny(0);
    paged_engine *e = make(m, (paged_engine_config){.n_ctx = 64, .max_waiting = 2});
    int32_t tokens[100] = {0};
    uint64_t id = 0, first;
    paged_error err;
    paged_request q = request_for(tokens, 65);
    CHECK_EQ(paged_engine_submit(e, &q, &id, &err), PAGED_ERR_TOO_LONG);
    CHECK_STR(err.message, "the prompt has 65 tokens, the context 64");
    q.n_tokens = 0;
    CHECK_EQ(paged_engine_submit(e, &q, &id, &err), PAGED_ERR_INVALID_ARG);
    q.n_tokens = 10;
    tokens[4] = TINY_VOCAB;
    CHECK_EQ(paged_engine_submit(e, &q, &id, &err), PAGED_ERR_INVALID_ARG);
    CHECK(strstr(err.message, "262") && strstr(err.message, "261"));
    tokens[4] = -1;
    CHECK_EQ(paged_engine_submit(e, &q, &id, &err), PAGED_ERR_INVALID_ARG);
    tokens[4] = 0;
    const float bad[] = {NAN, INFINITY, -1};
    for (int i = 0; i < 3; i++) {
        q.temperature = bad[i];
        CHECK_EQ(paged_engine_submit(e, &q, &id, &err), PAGED_ERR_INVALID_ARG);
        q.temperature = 0;
        q.top_p = bad[i];
        CHECK_EQ(paged_engine_submit(e, &q, &id, &err), PAGED_ERR_INVALID_ARG);
        q.top_p = 1;
    }
    CHECK_EQ(id, 0);
    CHECK_EQ(paged_engine_submit(e, &q, &first, &err), PAGED_OK);
    for (int i = 0; i < 2; i++) CHECK_EQ(paged_engine_submit(e, &q, &id, &err), PAGED_OK);
    CHECK_EQ(paged_engine_submit(e, &q, &id, &err), PAGED_ERR_LIMIT);
    CHECK_STR(err.message,
              "0 requests run, 3 wait and 0 have ended without a release; 1 may run and 2 wait, and this "
              "is 1 more");
    paged_engine_cancel(e, first);
    paged_engine_cancel(e, 12345);
    run_all(e);
    paged_output o;
    CHECK_EQ(paged_engine_read(e, first, &o), PAGED_OK);
    CHECK_EQ(o.finish, PAGED_FINISH_CANCELLED);
    CHECK_EQ(o.completion_tokens, 0);
    CHECK_EQ(paged_engine_read(e, 999, &o), PAGED_ERR_NOT_FOUND);
    paged_engine_free(e);

    const struct {
        paged_engine_config c;
        const char *says;
    } wrong[] = {{{.block_size = 24}, "24"},   {{.block_size = 2048}, "2048"}, {{.n_ctx = 1025}, "1025"},
                 {{.pool_bytes = 100}, "100"}, {{.n_threads = -1}, "-1"},      {{.chunk_tokens = -5}, "-5"},
                 {{.kv_type = 9}, "9"},        {{.kv_type = -2}, "-2"},        {{.max_running = -1}, "-1"}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        paged_engine_config c = wrong[i].c;
        c.struct_size = sizeof c;
        e = NULL;
        CHECK(paged_engine_create(m, &c, &e, &err) != PAGED_OK);
        CHECK(e == NULL && strstr(err.message, wrong[i].says));
    }
    paged_model_free(m);
}

/* The pool is smaller than the context asked for: the context shrinks to it, requests queue for blocks, all
 * end. */
static void small_pool(void) {
    paged_model *m = load_tiny(0);
    const size_t block = (size_t)2 * 2 * 2 * 16 * 2 * 16; /* layers, K and V, heads, dim, f16, tokens */
    paged_engine *e =
        make(m, (paged_engine_config){.n_ctx = 512, .pool_bytes = 10 * block + 100, .max_running = 8});
    paged_engine_info info;
    paged_engine_get_info(e, &info);
    CHECK_EQ(info.n_ctx, 160);
    CHECK_EQ(info.n_blocks, 10);
    int32_t tokens[160];
    uint64_t ids[20];
    fill_prompt(tokens, 160, 8);
    for (int i = 0; i < 20; i++) {
        paged_request q = request_for(tokens, 1 + i * 7);
        CHECK_EQ(paged_engine_submit(e, &q, &ids[i], NULL), PAGED_OK);
    }
    run_all(e);
    for (int i = 0; i < 20; i++) {
        paged_output o;
        CHECK_EQ(paged_engine_read(e, ids[i], &o), PAGED_OK);
        CHECK_EQ(o.finish, PAGED_FINISH_LENGTH);
        CHECK_EQ(o.completion_tokens, N_NEW);
    }
    paged_engine_free(e);
    paged_model_free(m);
}

static void sampling_repeats(void) {
    paged_model *m = load_tiny(2);
    int32_t tokens[20], got[2][N_NEW];
    fill_prompt(tokens, 20, 8);
    for (int run = 0; run < 3; run++) {
        paged_engine *e = make(m, (paged_engine_config){.max_running = run == 1 ? 4 : 1});
        uint64_t id, other;
        paged_request q = request_for(tokens, 20);
        paged_output o;
        q.temperature = 100; /* the logits of a random model lie far apart */
        q.seed = run == 2 ? 43 : 42;
        if (run == 1)
            CHECK_EQ(paged_engine_submit(e,
                                         &(paged_request){.struct_size = sizeof q,
                                                          .tokens = tokens,
                                                          .n_tokens = 3,
                                                          .top_p = 1,
                                                          .temperature = 1,
                                                          .max_tokens = 9},
                                         &other, NULL),
                     PAGED_OK);
        CHECK_EQ(paged_engine_submit(e, &q, &id, NULL), PAGED_OK);
        run_all(e);
        CHECK_EQ(paged_engine_read(e, id, &o), PAGED_OK);
        CHECK_EQ(o.n_tokens, N_NEW);
        if (run < 2)
            memcpy(got[run], o.tokens, sizeof got[run]);
        else
            CHECK(memcmp(got[0], o.tokens, sizeof got[0]) != 0);
        paged_engine_free(e);
    }
    CHECK(memcmp(got[0], got[1], sizeof got[0]) == 0);
    paged_model_free(m);
}

/* What a request made, without its prompt's log-probabilities. Returns cached_tokens. */
static int32_t run_reusing(paged_engine *e, const int32_t *tokens, int32_t n, const char *salt, result *out) {
    uint64_t id;
    paged_output o;
    paged_request q = request_for(tokens, n);
    q.prompt_logprobs = false;
    q.salt = salt;
    memset(out, 0, sizeof *out);
    CHECK_EQ(paged_engine_submit(e, &q, &id, NULL), PAGED_OK);
    run_all(e);
    CHECK_EQ(paged_engine_read(e, id, &o), PAGED_OK);
    CHECK_EQ(o.finish, PAGED_FINISH_LENGTH);
    CHECK_EQ(o.n_tokens, N_NEW);
    CHECK(o.cached_tokens < n && o.prompt_done == n);
    memcpy(out->made, o.logprobs, sizeof out->made);
    memcpy(out->tokens, o.tokens, sizeof out->tokens);
    CHECK_EQ(paged_engine_release(e, id), PAGED_OK);
    return o.cached_tokens;
}

/* D05: prompts around the edges of blocks, each after itself, after a longer one and after one that parts
 * from it inside a block, have the bits of a cold run; all but the last token is reused. */
static void prefix_hit_is_cold_run(void) {
    enum { B = 16 };
    const int32_t lens[] = {1, 2, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 100};
    for (int i = 0; i < N_SHAPES; i++) {
        paged_model *m = load_tiny(i);
        for (int type = i % 4; type < 4; type += test_long ? 1 : 4) {
            const paged_engine_config c = {.kv_type = type, .kv_plain = type == 1, .chunk_tokens = 40};
            paged_engine_config cold_config = c;
            cold_config.no_prefix_cache = true;
            paged_engine *cold = make(m, cold_config);
            for (size_t l = 0; l < sizeof lens / sizeof lens[0]; l++) {
                static result want, got;
                int32_t tokens[N_PROMPT], n = lens[l];
                paged_engine *e = make(m, c);
                fill_prompt(tokens, N_PROMPT, 3);
                CHECK_EQ(run_reusing(cold, tokens, n, NULL, &want), 0);
                CHECK_EQ(run_reusing(e, tokens, n, NULL, &got), 0);
                same(&want, &got);
                for (int again = 0; again < 2; again++) {
                    CHECK_EQ(run_reusing(e, tokens, n, NULL, &got), n - 1);
                    same(&want, &got);
                }
                /* The next turn: prompt, answer, and some more. */
                memcpy(tokens + n, got.tokens, sizeof got.tokens);
                CHECK_EQ(run_reusing(cold, tokens, n + N_NEW + 5, NULL, &want), 0);
                CHECK_EQ(run_reusing(e, tokens, n + N_NEW + 5, NULL, &got), n + N_NEW - 1);
                same(&want, &got);
                /* Another end from the middle on. */
                for (int32_t t = n / 2; t < N_PROMPT; t++) tokens[t] = (tokens[t] + 1) % 256;
                CHECK_EQ(run_reusing(cold, tokens, n + 3, NULL, &want), 0);
                CHECK_EQ(run_reusing(e, tokens, n + 3, NULL, &got), n / 2);
                same(&want, &got);
                paged_engine_free(e);
            }
            paged_engine_free(cold);
        }
        paged_model_free(m);
    }
}

/* D06 at the engine: no reuse between salts, between a salt and none; reuse within each. And where reuse
 * has to fight for room, with several requests at once, the answers stay the same. */
static void salts_and_pressure(void) {
    paged_model *m = load_tiny(1);
    static result want[6], got;
    int32_t tokens[6][N_PROMPT];
    const char *salts[] = {NULL, "x", "y", ""};
    paged_engine *e = make(m, (paged_engine_config){.max_running = 3, .n_ctx = 512});
    fill_prompt(tokens[0], N_PROMPT, 3);
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < 4; i++)
            CHECK_EQ(run_reusing(e, tokens[0], 64, salts[i], round || i ? &got : &want[0]), round ? 63 : 0);
    same(&want[0], &got);
    paged_request q = request_for(tokens[0], 64);
    static char long_salt[2000];
    memset(long_salt, 'a', sizeof long_salt - 1);
    q.salt = long_salt;
    CHECK_EQ(paged_engine_submit(e, &q, &(uint64_t){0}, NULL), PAGED_ERR_INVALID_ARG);
    paged_engine_free(e);

    /* Six prompts with the same beginning, three at a time, in a pool that holds about two of them. */
    for (int i = 0; i < 6; i++) {
        fill_prompt(tokens[i], N_PROMPT, 50 + (uint64_t)i);
        fill_prompt(tokens[i], 20 + 9 * i, 3);
        e = make(m, (paged_engine_config){.no_prefix_cache = true});
        CHECK_EQ(run_reusing(e, tokens[i], 100, NULL, &want[i]), 0);
        paged_engine_free(e);
    }
    paged_engine_info info;
    e = make(m, (paged_engine_config){0});
    paged_engine_get_info(e, &info);
    const size_t pool = info.pool_bytes / (size_t)info.n_blocks * 18;
    paged_engine_free(e);
    e = make(m, (paged_engine_config){.max_running = 3, .pool_bytes = pool, .chunk_tokens = 50});
    int32_t n_reused = 0;
    for (int round = 0; round < 4; round++) {
        uint64_t ids[6];
        for (int i = 0; i < 6; i++) {
            q = request_for(tokens[i], 100);
            q.prompt_logprobs = false;
            CHECK_EQ(paged_engine_submit(e, &q, &ids[i], NULL), PAGED_OK);
        }
        run_all(e);
        for (int i = 0; i < 6; i++) {
            paged_output o;
            CHECK_EQ(paged_engine_read(e, ids[i], &o), PAGED_OK);
            CHECK_EQ(o.n_tokens, N_NEW);
            CHECK(memcmp(o.logprobs, want[i].made, sizeof want[i].made) == 0);
            n_reused += o.cached_tokens;
            CHECK_EQ(paged_engine_release(e, ids[i]), PAGED_OK);
        }
    }
    paged_cache_stats stats;
    paged_engine_get_cache_stats(e, &stats);
    CHECK(stats.n_hit_tokens >= (uint64_t)n_reused); /* those that were preempted find their own again */
    CHECK(n_reused > 300 && stats.n_evicted > 0);
    paged_engine_free(e);
    paged_model_free(m);
}

static void *cancel_soon(void *engine) {
    usleep(20000);
    for (uint64_t id = 1; id < 200; id++) paged_engine_cancel(engine, id);
    return NULL;
}

static void cancel_from_a_thread(void) {
    paged_model *m = load_tiny(1);
    paged_engine *e = make(m, (paged_engine_config){.n_ctx = 1024, .max_running = 4, .n_threads = 2});
    int32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8}, active = 1;
    pthread_t thread;
    pthread_create(&thread, NULL, cancel_soon, e);
    for (int i = 0; i < 40; i++) {
        uint64_t id;
        paged_request q = request_for(tokens, 8);
        q.max_tokens = 0;
        CHECK_EQ(paged_engine_submit(e, &q, &id, NULL), PAGED_OK);
    }
    while (active) CHECK_EQ(paged_engine_step(e, &active, NULL), PAGED_OK);
    pthread_join(thread, NULL);
    check_cache(e);
    paged_engine_free(e);
    paged_model_free(m);
}

/* ---- the n-th allocation fails ---- */

static int fail_at, n_allocs, n_live;

static void *failing_alloc(void *user, size_t size, size_t align) {
    (void)user;
    if (++n_allocs == fail_at) return NULL;
    n_live++;
    return aligned_alloc(align, (size + align - 1) / align * align);
}

static void counting_free(void *user, void *ptr) {
    (void)user;
    n_live--;
    free(ptr);
}

/* One whole life of a model; the status of the first call that failed, else how the request ended and what it
 * made. */
static paged_status one_life(const char *path, paged_output *o, float made[N_NEW]) {
    paged_model *m = NULL;
    paged_engine *e = NULL;
    uint64_t id = 0;
    int32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8}, active = 1;
    const paged_engine_config c = {.struct_size = sizeof c, .n_threads = 1, .n_ctx = 64};
    paged_request q = request_for(tokens, 8);
    paged_status s = paged_model_load(path, NULL, &m, NULL);
    if (!s) s = paged_engine_create(m, &c, &e, NULL);
    if (!s) s = paged_engine_submit(e, &q, &id, NULL);
    while (!s && active) s = paged_engine_step(e, &active, NULL);
    if (!s) {
        check_cache(e);
        s = paged_engine_read(e, id, o);
    }
    if (!s && o->finish == PAGED_FINISH_LENGTH) memcpy(made, o->logprobs, N_NEW * sizeof *made);
    paged_engine_free(e);
    paged_model_free(m);
    return s;
}

/* Memory that runs out is told, by a status or by how the request ended, or did not matter (a regex without
 * JIT); the answer is never another one. */
static void allocation_fails(void) {
    char path[64];
    float want[N_NEW], made[N_NEW];
    paged_output o = {0};
    snprintf(path, sizeof path, "/tmp/paged-test-%d-f.gguf", (int)getpid());
    CHECK(tiny_model_write(path, &shapes[0], 5));
    paged_allocator_set(&(paged_allocator){failing_alloc, counting_free, NULL});
    fail_at = 0;
    CHECK_EQ(one_life(path, &o, want), PAGED_OK);
    const int n_needed = n_allocs;
    CHECK(n_needed > 20);
    for (fail_at = 1; fail_at <= n_needed; fail_at++) {
        n_allocs = 0;
        const paged_status s = one_life(path, &o, made);
        CHECK(s == PAGED_OK || s == PAGED_ERR_NO_MEMORY);
        if (s == PAGED_OK && o.finish == PAGED_FINISH_LENGTH)
            CHECK(memcmp(want, made, sizeof want) == 0);
        else
            CHECK(s == PAGED_ERR_NO_MEMORY || o.finish == PAGED_FINISH_ERROR);
        CHECK_EQ(n_live, 0);
    }
    paged_allocator_set(NULL);
    unlink(path);
}

/* ---- the real model ---- */

static void real_model(void) {
    const char *path = getenv("PAGED_MODEL");
    if (!path || !*path) {
        printf("skipped: PAGED_MODEL is not set\n");
        return;
    }
    paged_model *m = NULL;
    static result want, got;
    CHECK_EQ(paged_model_load(path, NULL, &m, NULL), PAGED_OK);
    run_one(m, (paged_engine_config){.n_threads = 2}, 0, &want);
    const paged_engine_config cases[] = {{.n_threads = 1},
                                         {.n_threads = 2, .chunk_tokens = 7},
                                         {.n_threads = 2, .chunk_tokens = 64, .block_size = 32},
                                         {.n_threads = 2, .kv_plain = true, .block_size = 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        run_one(m, cases[i], i, &got);
        same(&want, &got);
    }
    paged_engine *e = make(m, (paged_engine_config){.no_prefix_cache = true, .n_threads = 2});
    int32_t tokens[N_PROMPT];
    fill_prompt(tokens, N_PROMPT, 3);
    CHECK_EQ(run_reusing(e, tokens, N_PROMPT, NULL, &want), 0);
    paged_engine_free(e);
    e = make(m, (paged_engine_config){.n_threads = 2});
    CHECK_EQ(run_reusing(e, tokens, 77, NULL, &got), 0);
    CHECK_EQ(run_reusing(e, tokens, N_PROMPT, NULL, &got), 77);
    same(&want, &got);
    CHECK_EQ(run_reusing(e, tokens, N_PROMPT, NULL, &got), N_PROMPT - 1);
    same(&want, &got);
    paged_engine_free(e);
    e = make(m, (paged_engine_config){0});
    paged_engine_info info;
    paged_engine_get_info(e, &info);
    CHECK_STR(info.determinism, "q8_0: yes, q4_1: yes");
    CHECK(info.deterministic);
    paged_engine_free(e);
    paged_model_free(m);
}

#define TESTS(X)                                                                                             \
    X(same_bits)                                                                                             \
    X(decode_is_prefill)                                                                                     \
    X(auto_is_by_the_flags)                                                                                  \
    X(auto_is_a_type_behind_create)                                                                          \
    X(batch_is_alone)                                                                                        \
    X(warm_up_leaves_nothing)                                                                                \
    X(fork_is_fresh)                                                                                         \
    X(reads_through_the_table)                                                                               \
    X(blocks_are_counted)                                                                                    \
    X(refuses)                                                                                               \
    X(small_pool)                                                                                            \
    X(prefix_hit_is_cold_run)                                                                                \
    X(salts_and_pressure)                                                                                    \
    X(sampling_repeats)                                                                                      \
    X(cancel_from_a_thread)                                                                                  \
    X(allocation_fails)                                                                                      \
    X(real_model)
TEST_MAIN(TESTS)
