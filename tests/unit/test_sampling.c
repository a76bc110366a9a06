/* Goal: what a request says about its answer holds: stop strings and tokens, bans, the shortest length, the
 * most likely tokens. Method: the answer without the wish is the oracle of the answer with it. Tiny random
 * models, and SmolLM2 where PAGED_MODEL names it. */
#include <math.h>
#include <unistd.h>

#include "engine/engine.h"
#include "test.h"
#include "tiny_model.h"

enum { N_NEW = 60, TEXT_MAX = 1 << 16 };

typedef struct answer {
    char text[TEXT_MAX];
    size_t text_len;
    int32_t tokens[N_NEW], n_tokens;
    float logprobs[N_NEW];
    paged_top_logprob top[N_NEW][5];
    paged_output end; /* of the last read; its pointers are stale */
} answer;

static paged_model *load(void) {
    const char *real = getenv("PAGED_MODEL");
    const tiny_shape shape = {2, 4, 2, 16, 96, 1024, GGML_TYPE_F32};
    char path[64];
    paged_model *m = NULL;
    if (real && *real) {
        CHECK_EQ(paged_model_load(real, NULL, &m, NULL), PAGED_OK);
        return m;
    }
    snprintf(path, sizeof path, "/tmp/paged-test-%d-s.gguf", (int)getpid());
    CHECK(tiny_model_write(path, &shape, test_seed));
    CHECK_EQ(paged_model_load(path, NULL, &m, NULL), PAGED_OK);
    unlink(path);
    return m;
}

static paged_engine *make(const paged_model *m) {
    const paged_engine_config c = {.struct_size = sizeof c, .n_ctx = 256, .n_threads = 2, .poison = true};
    paged_engine *e = NULL;
    CHECK_EQ(paged_engine_create(m, &c, &e, NULL), PAGED_OK);
    return e;
}

/* Tokens 20 … 39 as a prompt: any model has them. */
static paged_request request(void) {
    static int32_t tokens[20];
    for (int32_t i = 0; i < 20; i++) tokens[i] = 20 + i;
    paged_request q;
    paged_request_init(&q);
    q.tokens = tokens;
    q.n_tokens = 20;
    q.max_tokens = N_NEW;
    q.ignore_eos = q.logprobs = true;
    return q;
}

/* Reads after every step, as a stream would. */
static void run(paged_engine *e, const paged_request *q, answer *a) {
    uint64_t id;
    paged_error err = {0};
    int32_t active = 1;
    const int32_t k = q->n_top_logprobs;
    memset(a, 0, sizeof *a);
    if (paged_engine_submit(e, q, &id, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
    while (active || a->end.finish == PAGED_FINISH_NONE) {
        if (active) CHECK_EQ(paged_engine_step(e, &active, NULL), PAGED_OK);
        CHECK_EQ(paged_engine_read(e, id, &a->end), PAGED_OK);
        memcpy(a->text + a->text_len, a->end.text, a->end.text_len);
        a->text_len += a->end.text_len;
        for (int32_t i = 0; i < a->end.n_tokens; i++, a->n_tokens++) {
            a->tokens[a->n_tokens] = a->end.tokens[i];
            a->logprobs[a->n_tokens] = a->end.logprobs[i];
            if (k) memcpy(a->top[a->n_tokens], a->end.top_logprobs + i * k, (size_t)k * sizeof **a->top);
        }
    }
    CHECK_EQ(paged_engine_release(e, id), PAGED_OK);
}

/* Any piece of the free answer as a stop string: the text ends where it occurs first. */
static void stop_strings(void) {
    static answer whole, got;
    paged_model *m = load();
    paged_engine *e = make(m);
    paged_request q = request();
    run(e, &q, &whole);
    CHECK_EQ(whole.end.finish, PAGED_FINISH_LENGTH);
    CHECK_EQ(whole.end.stop_string, -1);
    uint64_t state = test_seed;
    for (int32_t round = 0; round < 12; round++) {
        char piece[64];
        const size_t at = paged__rand(&state) % (whole.text_len - 1);
        size_t len = 1 + paged__rand(&state) % 20;
        if (at + len > whole.text_len) len = whole.text_len - at;
        memcpy(piece, whole.text + at, len);
        piece[len] = 0;
        if (strlen(piece) != len) continue;
        const char *stops[] = {"does not occur here, ever", piece};
        q.stop = stops;
        q.n_stop = 2;
        run(e, &q, &got);
        const char *first = memmem(whole.text, whole.text_len, piece, len);
        CHECK_EQ(got.text_len, first - whole.text);
        CHECK(memcmp(got.text, whole.text, got.text_len) == 0);
        CHECK_EQ(got.end.finish, PAGED_FINISH_STOP);
        CHECK_EQ(got.end.stop_string, 1);
        CHECK_EQ(got.end.completion_tokens, got.n_tokens);
        for (int32_t i = 0; i < got.n_tokens; i++) CHECK_EQ(got.tokens[i], whole.tokens[i]);
        /* Not one token was computed beyond it. */
        CHECK(got.n_tokens >= 1);
    }
    const char *never[] = {"does not occur here, ever"};
    q.stop = never;
    q.n_stop = 1;
    run(e, &q, &got);
    CHECK_EQ(got.text_len, whole.text_len);
    CHECK(memcmp(got.text, whole.text, got.text_len) == 0);
    paged_engine_free(e);
    paged_model_free(m);
}

static void stop_tokens_and_shortest_length(void) {
    static answer whole, got;
    paged_model *m = load();
    paged_engine *e = make(m);
    paged_request q = request();
    run(e, &q, &whole);
    const int32_t stop = whole.tokens[N_NEW / 2];
    int32_t first = 0;
    while (whole.tokens[first] != stop) first++;
    q.stop_tokens = &stop;
    q.n_stop_tokens = 1;
    run(e, &q, &got);
    CHECK_EQ(got.end.finish, PAGED_FINISH_STOP);
    CHECK_EQ(got.end.stop_token, stop);
    CHECK_EQ(got.n_tokens, first);
    q.min_tokens = first + 5;
    run(e, &q, &got);
    CHECK(got.n_tokens >= first + 5);
    for (int32_t i = 0; i < first + 5; i++) CHECK(got.tokens[i] != stop);
    for (int32_t i = 0; i < first; i++) CHECK_EQ(got.tokens[i], whole.tokens[i]);
    paged_engine_free(e);
    paged_model_free(m);
}

static void bans_and_most_likely(void) {
    static answer whole, got;
    paged_model *m = load();
    paged_engine *e = make(m);
    paged_request q = request();
    q.n_top_logprobs = 5;
    run(e, &q, &whole);
    for (int32_t i = 0; i < whole.n_tokens; i++) {
        CHECK_EQ(whole.top[i][0].token, whole.tokens[i]); /* greedy */
        CHECK(whole.top[i][0].logprob == whole.logprobs[i]);
        for (int32_t j = 1; j < 5; j++) CHECK(whole.top[i][j].logprob <= whole.top[i][j - 1].logprob);
    }
    /* The first token banned: the second most likely comes instead, with the log-probability it had. */
    const paged_logit_bias ban = {whole.tokens[0], -100};
    q.logit_bias = &ban;
    q.n_logit_bias = 1;
    run(e, &q, &got);
    CHECK_EQ(got.tokens[0], whole.top[0][1].token);
    CHECK(got.logprobs[0] == whole.top[0][1].logprob);
    for (int32_t i = 0; i < got.n_tokens; i++) CHECK(got.tokens[i] != ban.token);
    paged_engine_free(e);
    paged_model_free(m);
}

static void refused(void) {
    paged_model *m = load();
    paged_engine *e = make(m);
    const paged_logit_bias beyond = {99999999, 5}, below = {-1, 1}, nan_bias = {5, NAN};
    const int32_t bad_token = -7;
    const char *empty[] = {""};
    const struct {
        paged_request q;
        const char *says;
    } cases[] = {
        {{.logit_bias = &beyond, .n_logit_bias = 1}, "99999999"},
        {{.logit_bias = &below, .n_logit_bias = 1}, "token -1"},
        {{.logit_bias = &nan_bias, .n_logit_bias = 1}, "logit_bias 0"},
        {{.n_logit_bias = 1}, "NULL"},
        {{.stop_tokens = &bad_token, .n_stop_tokens = 1}, "-7"},
        {{.stop = empty, .n_stop = 1}, "stop string 0"},
        {{.stop = empty, .n_stop = 17}, "17"},
        {{.min_p = 1.5f}, "min_p is 1.5"},
        {{.min_p = NAN}, "min_p"},
        {{.temperature = INFINITY}, "temperature"},
        {{.frequency_penalty = 101}, "frequency_penalty is 101"},
        {{.repetition_penalty = -1}, "repetition_penalty is -1"},
        {{.n_top_logprobs = 21, .logprobs = true}, "21"},
        {{.n_top_logprobs = 2}, "without logprobs"},
        {{.min_tokens = 61}, "min_tokens is 61"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        paged_request q = cases[i].q;
        const paged_request valid = request();
        paged_error err = {0};
        uint64_t id;
        q.struct_size = sizeof q;
        q.tokens = valid.tokens;
        q.n_tokens = valid.n_tokens;
        q.max_tokens = N_NEW;
        CHECK_EQ(paged_engine_submit(e, &q, &id, &err), PAGED_ERR_INVALID_ARG);
        if (!strstr(err.message, cases[i].says))
            test_fail(__FILE__, __LINE__, "\"%s\" does not say \"%s\"", err.message, cases[i].says);
    }
    static answer got;
    paged_request q = request();
    run(e, &q, &got); /* nothing was lost */
    CHECK_EQ(got.n_tokens, N_NEW);
    paged_engine_free(e);
    paged_model_free(m);
}

#define TESTS(X) X(stop_strings) X(stop_tokens_and_shortest_length) X(bans_and_most_likely) X(refused)
TEST_MAIN(TESTS)
