/* Goal: a conversation asks with the tokens of the template, reuses what the turns before computed, to the
 * token, and what is left after turns went is a conversation like any other, bit for bit; keep-sink goes on
 * as a fresh request with the kept tokens. Method: a tiny random model under NaN in every unused slot;
 * paged_chat_tokenize says what the tokens have to be, a second, fresh engine what the bits have to be. */
#include <unistd.h>

#include "engine/engine.h"
#include "paged/conversation.h"
#include "test.h"
#include "tiny_model.h"

enum { N_CTX = 512, N_NEW = 30, BLOCK = 16 };

static paged_model *load(void) {
    static const tiny_shape shape = {2, 4, 2, 16, 96, 1024, GGML_TYPE_F32};
    char path[64];
    paged_model *m = NULL;
    snprintf(path, sizeof path, "/tmp/paged-conversation-%d.gguf", (int)getpid());
    CHECK(tiny_model_write(path, &shape, test_seed));
    const paged_status s = paged_model_load(path, NULL, &m, NULL);
    unlink(path);
    CHECK_EQ(s, PAGED_OK);
    return m;
}

static paged_engine *make(const paged_model *m, int32_t n_ctx) {
    const paged_engine_config c = {.struct_size = sizeof c,
                                   .n_ctx = n_ctx,
                                   .n_threads = 1,
                                   .max_running = 2,
                                   .chunk_tokens = 64,
                                   .poison = true};
    paged_engine *e = NULL;
    CHECK_EQ(paged_engine_create(m, &c, &e, NULL), PAGED_OK);
    return e;
}

static paged_conversation *talk(const paged_model *m, paged_conversation_config c) {
    paged_conversation *t = NULL;
    c.struct_size = sizeof c;
    CHECK_EQ(paged_conversation_create(m, &c, &t, NULL), PAGED_OK);
    return t;
}

typedef struct answer {
    int32_t tokens[4096], n_tokens;
    float logprobs[4096];
    paged_output last;
} answer;

/* Runs a request; the conversation, if there is one, takes what comes. */
static void run(paged_engine *e, const paged_request *q, paged_conversation *t, answer *a) {
    uint64_t id;
    paged_error err = {0};
    a->n_tokens = 0;
    a->last = (paged_output){0};
    CHECK_EQ(paged_engine_submit(e, q, &id, NULL), PAGED_OK);
    while (!a->last.finish) {
        CHECK_EQ(paged_engine_step(e, NULL, NULL), PAGED_OK);
        CHECK_EQ(paged_engine_read(e, id, &a->last), PAGED_OK);
        for (int32_t i = 0; i < a->last.n_tokens; i++) {
            a->logprobs[a->n_tokens] = a->last.logprobs[i];
            a->tokens[a->n_tokens++] = a->last.tokens[i];
        }
        if (t) CHECK_EQ(paged_conversation_take(t, &a->last, NULL), PAGED_OK);
    }
    CHECK_EQ(paged_engine_release(e, id), PAGED_OK);
    if (paged_engine_check(e, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
}

static paged_request request(const paged_conversation *t) {
    paged_request q;
    paged_request_init(&q);
    q.max_tokens = N_NEW;
    q.logprobs = q.ignore_eos = true;
    CHECK_EQ(paged_conversation_request(t, &q, NULL), PAGED_OK);
    return q;
}

static void ask(paged_engine *e, paged_conversation *t, const char *text, answer *a) {
    CHECK_EQ(paged_conversation_add_user(t, text, NULL), PAGED_OK);
    const paged_request q = request(t);
    run(e, &q, t, a);
}

static void same(const answer *a, const answer *b) {
    CHECK_EQ(a->n_tokens, b->n_tokens);
    CHECK(memcmp(a->tokens, b->tokens, (size_t)a->n_tokens * sizeof *a->tokens) == 0);
    CHECK(memcmp(a->logprobs, b->logprobs, (size_t)a->n_tokens * sizeof *a->logprobs) == 0);
}

static answer got, want;

/* With texts on both sides the tokens are those of the template, with and without a system message. */
static void tokens_of_the_template(void) {
    paged_model *m = load();
    const char *const systems[] = {NULL, "", "Be brief. <|im_end|>"};
    for (int i = 0; i < 3; i++) {
        paged_conversation *t = talk(m, (paged_conversation_config){.system = systems[i], .salt = "s"});
        const paged_message all[] = {{"system", systems[i]}, {"user", "hello, hello"},
                                     {"assistant", "hell"},  {"user", "<|im_start|>?\n"},
                                     {"assistant", ""},      {"user", "é"}};
        int32_t tokens[1024], n, first, n_turn;
        paged_conversation_info info;
        CHECK_EQ(
            paged_chat_tokenize(m, all + !systems[i], 6 - !systems[i], true, tokens, 1024, &n, NULL, 0, NULL),
            PAGED_OK);
        CHECK_EQ(paged_conversation_add_turn(t, all[1].content, all[2].content, NULL), PAGED_OK);
        CHECK_EQ(paged_conversation_add_turn(t, all[3].content, all[4].content, NULL), PAGED_OK);
        CHECK_EQ(paged_conversation_add_user(t, all[5].content, NULL), PAGED_OK);
        const paged_request q = request(t);
        CHECK_EQ(q.n_tokens, n);
        CHECK(memcmp(q.tokens, tokens, (size_t)n * sizeof *tokens) == 0);
        CHECK_STR(q.salt, "s");
        paged_conversation_get_info(t, &info);
        CHECK_EQ(info.n_turns, 3);
        CHECK_EQ(info.n_tokens, n);
        CHECK(info.begun);
        int32_t end = info.n_system_tokens;
        for (int k = 0; k < 3; k++) {
            CHECK_EQ(paged_conversation_turn(t, k, &first, &n_turn), PAGED_OK);
            CHECK_EQ(first, end);
            end += n_turn;
        }
        CHECK_EQ(end, n);
        CHECK_EQ(paged_conversation_turn(t, 3, &first, &n_turn), PAGED_ERR_INVALID_ARG);
        CHECK_EQ(paged_conversation_add_user(t, "x", NULL), PAGED_ERR_INVALID_ARG);
        CHECK_EQ(paged_conversation_add_turn(t, "x", "y", NULL), PAGED_ERR_INVALID_ARG);
        paged_conversation_undo(t);
        paged_conversation_undo(t); /* nothing has begun now */
        paged_conversation_get_info(t, &info);
        CHECK_EQ(info.n_turns, 2);
        CHECK(!info.begun);
        paged_request none;
        CHECK_EQ(paged_conversation_request(t, &none, NULL), PAGED_ERR_INVALID_ARG);
        paged_conversation_free(t);
    }
    paged_model_free(m);
}

/* Each turn computes its own message and the newest token of the answer before, nothing else. */
static void turns_reuse_to_the_token(void) {
    paged_model *m = load();
    paged_engine *e = make(m, N_CTX);
    paged_conversation *t = talk(m, (paged_conversation_config){.system = "hello"});
    paged_conversation_info info;
    int32_t n_known = 0;
    for (int turn = 0; turn < 5; turn++) {
        ask(e, t, "and then?", &got);
        paged_conversation_get_info(t, &info);
        CHECK_EQ(got.last.finish, PAGED_FINISH_LENGTH);
        CHECK_EQ(got.last.cached_tokens, n_known);
        CHECK_EQ(info.cached_tokens, n_known);
        CHECK_EQ(info.completion_tokens, N_NEW);
        CHECK_EQ(info.prompt_tokens, got.last.prompt_tokens);
        n_known = got.last.prompt_tokens + N_NEW - 1;
    }
    paged_conversation_free(t);
    paged_engine_free(e);
    paged_model_free(m);
}

/* The tokens and turns of another one: the next answer has the bits of one that was never interrupted. */
static void restored_goes_on(void) {
    paged_model *m = load();
    paged_engine *e = make(m, N_CTX);
    paged_conversation *t = talk(m, (paged_conversation_config){.system = "Be brief."});
    paged_conversation *u = talk(m, (paged_conversation_config){.system = "Be brief."});
    paged_conversation *other = talk(m, (paged_conversation_config){.system = "Be long."});
    paged_conversation *small = talk(m, (paged_conversation_config){.system = "Be brief.", .max_tokens = 60});
    int32_t turns[2], tokens[N_CTX], n, first;
    ask(e, t, "hello", &want);
    ask(e, t, "and?", &want);
    const int32_t *all = paged_conversation_tokens(t, &n);
    CHECK(n > 60);
    memcpy(tokens, all, (size_t)n * sizeof *tokens);
    for (int32_t i = 0; i < 2; i++) CHECK_EQ(paged_conversation_turn(t, i, &first, &turns[i]), PAGED_OK);

    /* What cannot be is refused, and nothing has changed. */
    CHECK_EQ(paged_conversation_restore(other, tokens, n, turns, 2, NULL), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_conversation_restore(small, tokens, n, turns, 2, NULL), PAGED_ERR_TOO_LONG);
    CHECK_EQ(paged_conversation_restore(u, tokens, n - 1, turns, 2, NULL), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_conversation_restore(u, tokens, n, turns, 1, NULL), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_conversation_restore(u, tokens, 1, turns, 0, NULL), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_conversation_restore(u, NULL, n, turns, 2, NULL), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_conversation_restore(u, tokens, n, (int32_t[]){turns[0] + turns[1], 0}, 2, NULL),
             PAGED_ERR_INVALID_ARG);
    for (int i = 0; i < 2; i++) {
        const int32_t right = tokens[n - 1];
        tokens[n - 1] = i ? -1 : INT32_MAX;
        CHECK_EQ(paged_conversation_restore(u, tokens, n, turns, 2, NULL), PAGED_ERR_INVALID_ARG);
        tokens[n - 1] = right;
    }
    paged_conversation_info info;
    paged_conversation_get_info(u, &info);
    CHECK(info.n_turns == 0 && info.n_tokens == info.n_system_tokens);

    CHECK_EQ(paged_conversation_restore(u, tokens, n, turns, 2, NULL), PAGED_OK);
    CHECK_EQ(paged_conversation_restore(u, tokens, n, turns, 2, NULL), PAGED_ERR_INVALID_ARG);
    ask(e, t, "more", &want);
    paged_engine_free(e);
    e = make(m, N_CTX);
    ask(e, u, "more", &got);
    same(&got, &want);
    CHECK_EQ(paged_conversation_keep(u, 1), 2); /* its turns are turns */
    paged_conversation_free(t);
    paged_conversation_free(u);
    paged_conversation_free(other);
    paged_conversation_free(small);
    paged_engine_free(e);
    paged_model_free(m);
}

/* Turns that a limit or a call drops: the next answer is that of a fresh conversation with those that stayed,
 * in an engine that never saw the others; and a pool full of what was dropped holds it. */
static void dropped_is_fresh(void) {
    paged_model *m = load();
    paged_engine *e = make(m, N_CTX);
    for (int by_limit = 0; by_limit < 2; by_limit++) {
        paged_conversation *t = talk(m, (paged_conversation_config){.max_tokens = by_limit ? 200 : 0});
        paged_conversation_info info;
        static int32_t kept[4096];
        for (int turn = 0; turn < 12; turn++) {
            if (!by_limit && turn % 4 == 3) CHECK_EQ(paged_conversation_keep(t, 1), turn == 3 ? 2 : 4);
            char text[32];
            snprintf(text, sizeof text, "question %d", turn);
            CHECK_EQ(paged_conversation_add_user(t, text, NULL), PAGED_OK);
            const paged_request q = request(t);
            CHECK(q.n_tokens <= (by_limit ? 200 : 500));
            memcpy(kept, q.tokens, (size_t)q.n_tokens * sizeof *kept);
            run(e, &q, t, &got);
            paged_engine *fresh = make(m, N_CTX);
            paged_request alone = q;
            alone.tokens = kept; /* the conversation has moved on */
            run(fresh, &alone, NULL, &want);
            same(&got, &want);
            CHECK_EQ(want.last.cached_tokens, 0);
            paged_engine_free(fresh);
        }
        paged_conversation_get_info(t, &info);
        CHECK(info.n_dropped_turns > 3);
        CHECK_EQ(info.n_dropped_turns + info.n_turns, 12);
        paged_conversation_free(t);
    }
    paged_cache_stats stats;
    paged_engine_get_cache_stats(e, &stats);
    CHECK(stats.n_evicted > 0); /* blocks of dropped turns went to others */
    CHECK_EQ(stats.n_used, 0);
    paged_engine_free(e);
    paged_model_free(m);
}

/* An exact conversation equals one that was begun with the turns that are left. */
static void keep_equals_added(void) {
    paged_model *m = load();
    paged_engine *e = make(m, N_CTX), *fresh = make(m, N_CTX);
    const char *const said[][2] = {{"a", "hello"}, {"b", "he he"}, {"c", "all"}};
    paged_conversation *t = talk(m, (paged_conversation_config){.system = "s"}),
                       *other = talk(m, (paged_conversation_config){.system = "s"});
    for (int i = 0; i < 3; i++)
        CHECK_EQ(paged_conversation_add_turn(t, said[i][0], said[i][1], NULL), PAGED_OK);
    ask(e, t, "first", &got);
    paged_conversation_undo(t); /* it has ended: nothing to undo */
    CHECK_EQ(paged_conversation_keep(t, 2), 2);
    CHECK_EQ(paged_conversation_add_turn(other, said[2][0], said[2][1], NULL), PAGED_OK);
    CHECK_EQ(paged_conversation_add_user(other, "first", NULL), PAGED_OK);
    paged_output o = {.tokens = got.tokens, .n_tokens = got.n_tokens, .finish = PAGED_FINISH_LENGTH};
    CHECK_EQ(paged_conversation_take(other, &o, NULL), PAGED_OK);
    ask(e, t, "second", &got);
    ask(fresh, other, "second", &want);
    same(&got, &want);
    paged_conversation_free(t);
    paged_conversation_free(other);
    paged_engine_free(e);
    paged_engine_free(fresh);
    paged_model_free(m);
}

/* A request that outlives its context: the answer goes on as that of a fresh request with the kept tokens. */
static void keep_sink_goes_on(void) {
    enum { CTX = 160, SINK = 20, WHOLE_SINK = 32, MANY = 700, PROMPT = 90 };
    paged_model *m = load();
    paged_engine *e = make(m, CTX);
    static int32_t context[PROMPT + MANY];
    paged_request q;
    paged_request_init(&q);
    for (int32_t i = 0; i < PROMPT; i++) context[i] = (i * 7 + 3) % 256;
    q.tokens = context;
    q.n_tokens = PROMPT;
    q.logprobs = q.ignore_eos = true;
    q.max_tokens = MANY;
    run(e, &q, NULL, &got);
    CHECK_EQ(got.last.finish, PAGED_FINISH_LENGTH); /* exact: the context is the end */
    CHECK_EQ(got.n_tokens, CTX - PROMPT + 1);
    CHECK_EQ(got.last.n_dropped, 0);
    q.keep_sink = SINK;
    run(e, &q, NULL, &got);
    CHECK_EQ(got.last.finish, PAGED_FINISH_LENGTH);
    CHECK_EQ(got.n_tokens, MANY);
    CHECK_EQ(got.last.completion_tokens, MANY);
    CHECK_EQ(got.last.prompt_tokens, PROMPT);
    paged_engine_stats stats;
    paged_engine_get_stats(e, &stats);
    CHECK_EQ(stats.n_dropped, got.last.n_dropped);

    /* The same by hand: whenever the context is full, a fresh engine is asked with what is kept. */
    int32_t n = PROMPT, n_made = 0, n_dropped = 0;
    while (n_made < MANY) {
        paged_engine *fresh = make(m, CTX);
        q.keep_sink = 0;
        q.n_tokens = n;
        q.max_tokens = PAGED_MIN(CTX + 1 - n, MANY - n_made);
        run(fresh, &q, NULL, &want);
        paged_engine_free(fresh);
        CHECK(memcmp(want.tokens, got.tokens + n_made, (size_t)want.n_tokens * sizeof *got.tokens) == 0);
        CHECK(memcmp(want.logprobs, got.logprobs + n_made, (size_t)want.n_tokens * sizeof(float)) == 0);
        memcpy(context + n, want.tokens, (size_t)want.n_tokens * sizeof *context);
        n += want.n_tokens;
        n_made += want.n_tokens;
        if (n_made == MANY) break;
        const int32_t n_drop = (n - WHOLE_SINK) / 2 / BLOCK * BLOCK;
        memmove(context + WHOLE_SINK, context + WHOLE_SINK + n_drop,
                (size_t)(n - WHOLE_SINK - n_drop) * sizeof *context);
        n -= n_drop;
        n_dropped += n_drop;
    }
    CHECK_EQ(got.last.n_dropped, n_dropped);
    CHECK(n_dropped > 500);

    paged_error err;
    uint64_t id;
    q.n_tokens = PROMPT;
    q.keep_sink = CTX - 2 * BLOCK + 1;
    CHECK_EQ(paged_engine_submit(e, &q, &id, &err), PAGED_ERR_INVALID_ARG);
    q.keep_sink = INT32_MAX;
    CHECK_EQ(paged_engine_submit(e, &q, &id, &err), PAGED_ERR_INVALID_ARG);
    q.keep_sink = -1;
    CHECK_EQ(paged_engine_submit(e, &q, &id, &err), PAGED_ERR_INVALID_ARG);
    q.keep_sink = SINK;
    q.max_tokens = 0;
    CHECK_EQ(paged_engine_submit(e, &q, &id, &err), PAGED_ERR_INVALID_ARG);
    CHECK_STR(err.message, "keep_sink is 20 with max_tokens 0; it asks for max_tokens, and for two blocks of "
                           "16 more in the context of 160");
    paged_engine_free(e);
    paged_model_free(m);
}

/* Penalties, stop strings, n answers, preemption and a pool for one and a half: each answer is as it is
 * alone. */
static void keep_sink_among_others(void) {
    enum { CTX = 128, MANY = 300, N = 3 };
    paged_model *m = load();
    static answer alone[N], together;
    int32_t prompt[40];
    uint64_t id;
    paged_output o;
    for (int32_t i = 0; i < 40; i++) prompt[i] = (i * 5 + 1) % 256;
    paged_request q;
    paged_request_init(&q);
    q.tokens = prompt;
    q.n_tokens = 40;
    q.logprobs = q.ignore_eos = true;
    q.max_tokens = MANY;
    q.keep_sink = 16;
    q.temperature = 1.1f;
    q.seed = test_seed;
    q.presence_penalty = 0.5f;
    q.frequency_penalty = 0.1f;
    q.repetition_penalty = 1.1f;
    q.prompt_logprobs = true;
    for (int k = 0; k < N; k++) {
        paged_engine *e = make(m, CTX);
        q.seed = test_seed + (uint64_t)k;
        run(e, &q, NULL, &alone[k]);
        CHECK_EQ(alone[k].n_tokens, MANY);
        paged_engine_free(e);
    }
    const paged_group_config group = {
        .n_layers = 2, .n_kv_heads = 2, .head_dim_k = 16, .head_dim_v = 16, .layout = PAGED_LAYOUT_PACKED};
    const paged_engine_config c = {.struct_size = sizeof c,
                                   .n_ctx = CTX,
                                   .n_threads = 1,
                                   .max_running = N,
                                   .chunk_tokens = 20,
                                   .pool_bytes = 12 * paged_block_bytes(&group, BLOCK),
                                   .poison = true};
    paged_engine *e = NULL;
    CHECK_EQ(paged_engine_create(m, &c, &e, NULL), PAGED_OK);
    uint64_t first = 0;
    for (int k = 0; k < N; k++) {
        q.seed = test_seed + (uint64_t)k;
        CHECK_EQ(paged_engine_submit(e, &q, &id, NULL), PAGED_OK);
        if (k == 0) first = id;
    }
    for (int32_t active = 1; active;) CHECK_EQ(paged_engine_step(e, &active, NULL), PAGED_OK);
    int32_t n_preemptions = 0;
    for (int k = 0; k < N; k++) {
        CHECK_EQ(paged_engine_read(e, first + (uint64_t)k, &o), PAGED_OK);
        together.n_tokens = o.n_tokens;
        memcpy(together.tokens, o.tokens, (size_t)o.n_tokens * sizeof *o.tokens);
        memcpy(together.logprobs, o.logprobs, (size_t)o.n_tokens * sizeof *o.logprobs);
        same(&together, &alone[k]);
        CHECK_EQ(o.n_dropped, alone[k].last.n_dropped);
        n_preemptions += o.n_preemptions;
    }
    CHECK(n_preemptions > 0);
    paged_engine_free(e);
    paged_model_free(m);
}

/* A conversation that keeps the sink goes on without end inside its context. */
static void keep_sink_conversation(void) {
    paged_model *m = load();
    paged_engine *e = make(m, 256);
    paged_conversation *t =
        talk(m, (paged_conversation_config){
                    .system = "hello", .max_tokens = 150, .mode = PAGED_CONVERSATION_KEEP_SINK});
    paged_conversation_info info;
    static int32_t head[256];
    for (int turn = 0; turn < 20; turn++) {
        CHECK_EQ(paged_conversation_add_user(t, "go on, go on", NULL), PAGED_OK);
        const paged_request q = request(t);
        paged_conversation_get_info(t, &info);
        CHECK(q.n_tokens <= 150 && q.keep_sink == info.n_system_tokens);
        if (turn == 0) memcpy(head, q.tokens, (size_t)info.n_system_tokens * sizeof *head);
        CHECK(memcmp(head, q.tokens, (size_t)info.n_system_tokens * sizeof *head) == 0);
        run(e, &q, t, &got);
        int32_t n_sum = info.n_system_tokens, first, n;
        paged_conversation_get_info(t, &info);
        for (int32_t k = 0; k < info.n_turns; k++) {
            CHECK_EQ(paged_conversation_turn(t, k, &first, &n), PAGED_OK);
            CHECK_EQ(first, n_sum);
            n_sum += n;
        }
        CHECK_EQ(n_sum, info.n_tokens);
    }
    CHECK(info.n_dropped_tokens > 500 && info.n_turns < 6);
    paged_conversation_free(t);
    paged_engine_free(e);
    paged_model_free(m);
}

static void refusals(void) {
    paged_model *m = load();
    paged_error err;
    paged_conversation *t = NULL;
    paged_conversation_config c = {.struct_size = sizeof c, .system = "hello", .max_tokens = 3};
    CHECK_EQ(paged_conversation_create(m, &c, &t, &err), PAGED_ERR_TOO_LONG);
    c.max_tokens = -1;
    CHECK_EQ(paged_conversation_create(m, &c, &t, &err), PAGED_ERR_INVALID_ARG);
    c.max_tokens = 80;
    CHECK_EQ(paged_conversation_create(NULL, &c, &t, &err), PAGED_ERR_INVALID_ARG);
    CHECK(!t);
    CHECK_EQ(paged_conversation_create(m, &c, &t, &err), PAGED_OK);
    CHECK_EQ(paged_conversation_add_turn(t, "one", "two", &err), PAGED_OK);
    paged_conversation_info before, after;
    paged_conversation_get_info(t, &before);
    char text[200];
    memset(text, 'z', sizeof text - 1);
    text[sizeof text - 1] = 0;
    CHECK_EQ(paged_conversation_add_user(t, text, &err), PAGED_ERR_TOO_LONG);
    CHECK(strstr(err.message, "may have 80"));
    CHECK_EQ(paged_conversation_add_turn(t, "x", text, &err), PAGED_ERR_TOO_LONG);
    CHECK_EQ(paged_conversation_take(t, &(paged_output){0}, &err), PAGED_ERR_INVALID_ARG);
    paged_conversation_get_info(t, &after);
    CHECK(memcmp(&before, &after, sizeof before) == 0);
    paged_conversation_free(t);
    paged_conversation_free(NULL);
    paged_model_free(m);
}

/* ---- allocations that fail ---- */

static int fail_in;
static long n_live;

static void *failing_alloc(void *user, size_t size, size_t align) {
    (void)user;
    if (fail_in > 0 && --fail_in == 0) return NULL;
    n_live++;
    return aligned_alloc(align, (size + align - 1) / align * align);
}

static void counted_free(void *user, void *ptr) {
    (void)user;
    n_live--;
    free(ptr);
}

/* The n-th allocation fails, for all n: an error, and everything is as it was. */
static void allocation_fails(void) {
    paged_allocator_set(&(paged_allocator){failing_alloc, counted_free, NULL});
    paged_model *m = load();
    const long n_before = n_live;
    bool failed = true;
    int n_failed = 0;
    for (int n = 1; failed; n++) {
        paged_conversation *t = NULL;
        paged_conversation_info before, after;
        fail_in = n;
        const paged_conversation_config c = {.struct_size = sizeof c, .salt = "s"};
        paged_status s = paged_conversation_create(m, &c, &t, NULL);
        if (!s) {
            paged_conversation_get_info(t, &before);
            s = paged_conversation_add_turn(t, "one", "two", NULL);
            if (s) {
                paged_conversation_get_info(t, &after);
                CHECK(memcmp(&before, &after, sizeof before) == 0);
            }
        }
        failed = fail_in == 0;
        fail_in = 0;
        CHECK(!s || (failed && s == PAGED_ERR_NO_MEMORY)); /* PCRE2 does without some of its memory */
        n_failed += s != PAGED_OK;
        paged_conversation_free(t);
        CHECK_EQ(n_live, n_before);
    }
    CHECK(n_failed > 20);
    paged_model_free(m);
    paged_allocator_set(NULL);
}

#define TESTS(X)                                                                                             \
    X(tokens_of_the_template)                                                                                \
    X(turns_reuse_to_the_token)                                                                              \
    X(restored_goes_on)                                                                                      \
    X(dropped_is_fresh)                                                                                      \
    X(keep_equals_added)                                                                                     \
    X(keep_sink_goes_on)                                                                                     \
    X(keep_sink_among_others)                                                                                \
    X(keep_sink_conversation)                                                                                \
    X(refusals)                                                                                              \
    X(allocation_fails)
TEST_MAIN(TESTS)
