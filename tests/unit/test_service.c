/* Goal: whoever calls the service, from however many threads, gets each answer whole and as it is alone;
 * nobody waits for another one's reader, nothing stays behind, and an idle service uses no CPU. Method: a
 * tiny random model whose answers are computed before by an engine alone; threads with random patience; a
 * backend whose steps last until the test ends them, where something has to happen during a step. */
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "engine/engine.h"
#include "test.h"
#include "tiny_model.h"

enum { N_PROMPTS = 12, FIRST_LONG = 8, N_NEW = 40, N_CTX = 256, LONG = 100 };

static const tiny_shape shape = {2, 4, 2, 16, 96, 1024, GGML_TYPE_F32};

static atomic_long n_live;

static void *count_alloc(void *user, size_t size, size_t align) {
    (void)user;
    n_live++;
    return aligned_alloc(align, (size + align - 1) / align * align);
}

static void count_free(void *user, void *ptr) {
    (void)user;
    n_live--;
    free(ptr);
}

/* ---- what requests say alone ---- */

typedef struct answer {
    int32_t prompt[150], n_prompt;
    paged_request params;
    int32_t tokens[N_NEW], n_tokens;
    float logprobs[N_NEW];
    char text[N_NEW * PAGED_DETOK_MAX];
    size_t text_len;
    paged_finish finish;
} answer;

static paged_model *model;
static answer alone[N_PROMPTS];

static paged_service_config small_config(void) {
    return (paged_service_config){.struct_size = sizeof(paged_service_config),
                                  .engine = {.n_ctx = N_CTX,
                                             .n_threads = 1,
                                             .chunk_tokens = 48,
                                             .max_running = 4,
                                             .max_waiting = 64,
                                             .poison = true}};
}

static void answer_alone(answer *a) {
    paged_engine *e = NULL;
    paged_engine_config c = small_config().engine;
    paged_output o = {0};
    uint64_t id;
    c.struct_size = sizeof c;
    CHECK_EQ(paged_engine_create(model, &c, &e, NULL), PAGED_OK);
    CHECK_EQ(paged_engine_submit(e, &a->params, &id, NULL), PAGED_OK);
    while (!o.finish) {
        CHECK_EQ(paged_engine_step(e, NULL, NULL), PAGED_OK);
        CHECK_EQ(paged_engine_read(e, id, &o), PAGED_OK);
        for (int32_t i = 0; i < o.n_tokens; i++) {
            a->logprobs[a->n_tokens] = o.logprobs[i];
            a->tokens[a->n_tokens++] = o.tokens[i];
        }
        memcpy(a->text + a->text_len, o.text, o.text_len);
        a->text_len += o.text_len;
    }
    a->finish = o.finish;
    paged_engine_free(e);
}

static void begin(void) {
    char path[64];
    if (model) return;
    snprintf(path, sizeof path, "/tmp/paged-service-%d.gguf", (int)getpid());
    CHECK(tiny_model_write(path, &shape, test_seed));
    const paged_status s = paged_model_load(path, NULL, &model, NULL);
    unlink(path);
    CHECK_EQ(s, PAGED_OK);
    uint64_t random = test_seed;
    for (int i = 0; i < N_PROMPTS; i++) {
        answer *a = &alone[i];
        uint64_t common = 7;
        a->n_prompt = i < FIRST_LONG ? 1 + (int32_t)(paged__rand(&random) % 150) : LONG;
        for (int32_t k = 0; k < a->n_prompt; k++)
            a->prompt[k] = (int32_t)(paged__rand(k < 40 && i % 2 ? &common : &random) % 256);
        paged_request_init(&a->params);
        a->params.tokens = a->prompt;
        a->params.n_tokens = a->n_prompt;
        a->params.max_tokens = N_NEW;
        a->params.logprobs = true;
        a->params.ignore_eos = i % 3 == 0 || i >= FIRST_LONG;
        a->params.temperature = i % 4 ? 1.2f : 0;
        a->params.seed = (uint64_t)i;
        answer_alone(a);
    }
}

/* ---- a reader ---- */

typedef struct reading {
    const answer *want;
    int32_t n_tokens;
    size_t text_len;
    paged_output last;
} reading;

/* Checks what a read gave out against the answer alone. */
static bool fits(reading *r, const paged_output *o) {
    const answer *w = r->want;
    r->last = *o;
    if (r->n_tokens + o->n_tokens > w->n_tokens || r->text_len + o->text_len > w->text_len) return false;
    if (o->n_tokens &&
        (memcmp(o->tokens, w->tokens + r->n_tokens, (size_t)o->n_tokens * sizeof *o->tokens) ||
         memcmp(o->logprobs, w->logprobs + r->n_tokens, (size_t)o->n_tokens * sizeof *o->logprobs)))
        return false;
    r->n_tokens += o->n_tokens;
    if (o->finish == PAGED_FINISH_STOP || o->finish == PAGED_FINISH_LENGTH) {
        /* A character that is cut by another end has other replacements, so text is compared here only. */
        if (memcmp(o->text, w->text + r->text_len, o->text_len) != 0) return false;
        r->text_len += o->text_len;
        return r->n_tokens == w->n_tokens && r->text_len == w->text_len && o->finish == w->finish;
    }
    if (!o->finish) {
        if (memcmp(o->text, w->text + r->text_len, o->text_len) != 0) return false;
        r->text_len += o->text_len;
    }
    return true;
}

static void read_to_end(paged_service *s, uint64_t id, reading *r) {
    paged_output o = {0};
    while (!o.finish) {
        CHECK_EQ(paged_service_read(s, id, 10000, &o), PAGED_OK);
        CHECK(fits(r, &o));
    }
}

static paged_service *make(paged_service_config c) {
    paged_service *s = NULL;
    paged_error err = {0};
    begin();
    const paged_status status = paged_service_create(model, &c, &s, &err);
    if (status) printf("%s\n", err.message);
    CHECK_EQ(status, PAGED_OK);
    return s;
}

typedef struct facts {
    paged_engine_stats engine;
    paged_cache_stats cache;
    paged_status check;
    paged_error err;
} facts;

static void get_facts(paged_engine *e, void *user) {
    facts *f = user;
    paged_engine_get_stats(e, &f->engine);
    paged_engine_get_cache_stats(e, &f->cache);
    f->check = paged_engine_check(e, &f->err);
}

static facts facts_of(paged_service *s) {
    facts f = {0};
    paged_service_call(s, get_facts, &f);
    if (f.check) printf("%s\n", f.err.message);
    CHECK_EQ(f.check, PAGED_OK);
    return f;
}

/* Waits, since a parked request or an end needs a step that is under way. */
static facts wait_for(paged_service *s, bool (*holds)(const facts *f)) {
    for (int i = 0; i < 5000; i++) {
        const facts f = facts_of(s);
        if (holds(&f)) return f;
        usleep(1000);
    }
    test_fail(__FILE__, __LINE__, "it never came");
}

static bool is_idle(const facts *f) {
    return f->engine.n_running + f->engine.n_waiting == 0;
}

static bool one_is_parked(const facts *f) {
    return f->engine.n_wait[PAGED_WAIT_READER] == 1;
}

static bool two_are_parked(const facts *f) {
    return f->engine.n_wait[PAGED_WAIT_READER] == 2;
}

static bool three_are_parked(const facts *f) {
    return f->engine.n_wait[PAGED_WAIT_READER] == 3;
}

/* ---- many threads ---- */

typedef struct caller {
    paged_service *s;
    uint64_t random;
    int32_t n_requests, n_whole, n_wrong;
    uint64_t ids[64];
} caller;

/* Submits and treats one request in one of the ways in which callers do. */
static void one_request(caller *c, int32_t nth) {
    const int kind = (int)(paged__rand(&c->random) % 8);
    reading r = {.want = &alone[paged__rand(&c->random) % N_PROMPTS]};
    paged_request q = r.want->params;
    paged_output o = {0};
    uint64_t id;
    q.priority = (int32_t)(paged__rand(&c->random) % 3);
    q.deadline_ms = kind == 7 ? 1 + (int32_t)(paged__rand(&c->random) % 20) : 0;
    if (paged_service_submit(c->s, &q, &id, NULL)) {
        c->n_wrong++;
        return;
    }
    c->ids[nth] = id;
    const int32_t n_reads = (int32_t)(paged__rand(&c->random) % 12);
    for (int32_t i = 0; !o.finish; i++) {
        if (kind == 0 && i == n_reads) break;                                /* releases it as it runs */
        if (kind == 1 && i == n_reads) paged_service_cancel(c->s, id);       /* reads the end, too */
        if (kind == 2) usleep((useconds_t)(paged__rand(&c->random) % 3000)); /* is slow: it parks */
        const int32_t timeout_ms = kind == 3 ? (int32_t)(paged__rand(&c->random) % 2) : -1; /* looks in */
        if (paged_service_read(c->s, id, timeout_ms, &o) || !fits(&r, &o)) {
            c->n_wrong++;
            break;
        }
    }
    c->n_whole += o.finish == PAGED_FINISH_STOP || o.finish == PAGED_FINISH_LENGTH;
    c->n_wrong += paged_service_release(c->s, id) != PAGED_OK;
    c->n_wrong += paged_service_read(c->s, id, 0, &o) != PAGED_ERR_NOT_FOUND;
}

static void *call_often(void *arg) {
    caller *c = arg;
    for (int32_t i = 0; i < c->n_requests; i++) one_request(c, i);
    return NULL;
}

static int by_value(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* 200 mixed requests from 8 threads; a pool that forces preemption, a ring that parks. */
static void many_callers(void) {
    enum { N_CALLERS = 8, N_EACH = 25 };
    static caller callers[N_CALLERS];
    static uint64_t ids[N_CALLERS * N_EACH];
    pthread_t threads[N_CALLERS];
    paged_service_config c = small_config();
    const paged_group_config group = {.n_layers = shape.n_layers,
                                      .n_kv_heads = shape.n_kv_heads,
                                      .head_dim_k = shape.head_dim,
                                      .head_dim_v = shape.head_dim,
                                      .layout = PAGED_LAYOUT_PACKED};
    begin();
    const long n_before = n_live;
    c.ring_tokens = 3;
    c.engine.pool_bytes = paged_block_bytes(&group, 16) * 26;
    paged_service *s = make(c);
    const facts first = facts_of(s);
    int32_t n_whole = 0;
    for (int round = 0; round < (test_long ? 50 : 1); round++) {
        for (int i = 0; i < N_CALLERS; i++) {
            callers[i] = (caller){
                .s = s, .random = test_seed * 100 + (uint64_t)(round * N_CALLERS + i), .n_requests = N_EACH};
            CHECK_EQ(pthread_create(&threads[i], NULL, call_often, &callers[i]), 0);
        }
        for (int i = 0; i < N_CALLERS; i++) CHECK_EQ(pthread_join(threads[i], NULL), 0);
        for (int i = 0; i < N_CALLERS; i++) {
            CHECK_EQ(callers[i].n_wrong, 0);
            n_whole += callers[i].n_whole;
            memcpy(ids + (ptrdiff_t)i * N_EACH, callers[i].ids, N_EACH * sizeof *ids);
        }
        qsort(ids, N_CALLERS * N_EACH, sizeof *ids, by_value);
        for (int i = 0; i < N_CALLERS * N_EACH; i++)
            CHECK_EQ(ids[i], round * N_CALLERS * N_EACH + i + 1); /* each once, and none again */
        const facts f = wait_for(s, is_idle);
        CHECK_EQ(f.cache.n_used, first.cache.n_used);
        CHECK_EQ(f.cache.n_seqs, 0);
        CHECK_EQ(f.cache.n_free + f.cache.n_cached, f.cache.n_blocks);
        CHECK_EQ(f.engine.n_submitted, (round + 1) * N_CALLERS * N_EACH);
    }
    const facts f = facts_of(s);
    CHECK(n_whole > N_CALLERS * N_EACH / 3 && f.engine.n_preemptions > 0 && f.cache.n_hit_tokens > 0);
    CHECK(f.engine.n_finished[PAGED_FINISH_CANCELLED] > 0);
    paged_service_free(s);
    CHECK_EQ(n_live, n_before);
}

/* ---- slow readers ---- */

static uint64_t submit(paged_service *s, const answer *a) {
    uint64_t id = 0;
    CHECK_EQ(paged_service_submit(s, &a->params, &id, NULL), PAGED_OK);
    return id;
}

/* An answer of full length to a prompt of LONG tokens. */
static const answer *long_answer(int nth) {
    begin();
    CHECK_EQ(alone[FIRST_LONG + nth].n_tokens, N_NEW);
    return &alone[FIRST_LONG + nth];
}

/* A parked request keeps its blocks, others run beside it, and it goes on where it stopped. */
static void slow_reader_is_parked(void) {
    paged_service_config c = small_config();
    reading slow = {.want = long_answer(0)}, fast = {.want = long_answer(1)};
    c.ring_tokens = 5;
    paged_service *s = make(c);
    const uint64_t id = submit(s, slow.want);
    facts f = wait_for(s, one_is_parked);
    CHECK_EQ(f.engine.n_running, 1);
    CHECK_EQ(f.cache.n_used, (slow.want->n_prompt + 4 + 15) / 16); /* the newest has no slot yet */
    const uint64_t steps = f.engine.n_steps;
    const uint64_t other = submit(s, fast.want);
    read_to_end(s, other, &fast);
    CHECK_EQ(paged_service_release(s, other), PAGED_OK);
    f = facts_of(s);
    CHECK(f.engine.n_steps >= steps + N_NEW);
    CHECK_EQ(f.engine.n_wait[PAGED_WAIT_READER], 1);
    paged_output o;
    CHECK_EQ(paged_service_read(s, id, 0, &o), PAGED_OK);
    CHECK_EQ(o.wait, PAGED_WAIT_READER);
    CHECK_EQ(o.n_tokens, 5);
    CHECK(fits(&slow, &o));
    f = wait_for(s, one_is_parked); /* five more */
    read_to_end(s, id, &slow);
    CHECK_EQ(slow.last.n_preemptions, 0);
    paged_service_free(s);
}

/* With one place, and with a pool for one, those that are parked make way for others, and come back. */
static void parked_make_way(void) {
    const paged_group_config group = {.n_layers = shape.n_layers,
                                      .n_kv_heads = shape.n_kv_heads,
                                      .head_dim_k = shape.head_dim,
                                      .head_dim_v = shape.head_dim,
                                      .layout = PAGED_LAYOUT_PACKED};
    for (int small_pool = 0; small_pool < 2; small_pool++) {
        paged_service_config c = small_config();
        reading slow[3] = {{.want = long_answer(0)}, {.want = long_answer(1)}, {.want = long_answer(2)}};
        reading fast = {.want = long_answer(3)};
        uint64_t ids[3];
        c.ring_tokens = 1;
        c.engine.max_running = small_pool ? 4 : 1;
        c.engine.no_prefix_cache = true;
        if (small_pool) c.engine.pool_bytes = paged_block_bytes(&group, 16) * 13;
        paged_service *s = make(c);
        for (int i = 0; i < 3; i++) ids[i] = submit(s, slow[i].want);
        wait_for(s, three_are_parked);
        const uint64_t id = submit(s, fast.want);
        read_to_end(s, id, &fast);
        for (int i = 2; i >= 0; i--) read_to_end(s, ids[i], &slow[i]);
        const facts f = facts_of(s);
        CHECK(f.engine.n_preemptions >= 3);
        CHECK_EQ(f.cache.n_used, 0);
        paged_service_free(s);
    }
}

static void reader_timeout(void) {
    paged_service_config c = small_config();
    reading r = {.want = long_answer(0)};
    paged_output o;
    c.ring_tokens = 4;
    c.reader_timeout_ms = 40;
    paged_service *s = make(c);
    const uint64_t id = submit(s, r.want);
    wait_for(s, one_is_parked);
    wait_for(s, is_idle);
    CHECK_EQ(paged_service_read(s, id, -1, &o), PAGED_OK); /* what there is can still be read */
    CHECK_EQ(o.finish, PAGED_FINISH_READER);
    CHECK_EQ(o.n_tokens, 4);
    CHECK(memcmp(o.tokens, r.want->tokens, 4 * sizeof *o.tokens) == 0);
    CHECK_EQ(facts_of(s).engine.n_finished[PAGED_FINISH_READER], 1);
    /* A deadline runs on while it is parked; so does a cancel, from a service that sleeps. */
    paged_service_free(s);
    c.reader_timeout_ms = 0;
    s = make(c);
    paged_request q = r.want->params;
    uint64_t dead, gone;
    q.deadline_ms = 30;
    CHECK_EQ(paged_service_submit(s, &q, &dead, NULL), PAGED_OK);
    wait_for(s, is_idle);
    CHECK_EQ(paged_service_read(s, dead, 0, &o), PAGED_OK);
    CHECK_EQ(o.finish, PAGED_FINISH_DEADLINE);
    gone = submit(s, r.want);
    wait_for(s, one_is_parked);
    paged_service_cancel(s, gone);
    wait_for(s, is_idle);
    CHECK_EQ(paged_service_read(s, gone, 0, &o), PAGED_OK);
    CHECK_EQ(o.finish, PAGED_FINISH_CANCELLED);
    paged_service_free(s);
}

/* ---- sleep ---- */

static double cpu_seconds(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

/* Until its threads are asleep, which takes them a while beside other programs. */
static void wait_asleep(void) {
    double before = cpu_seconds(), now;
    for (int n = 0; n < 50; n++, before = now) {
        usleep(100000);
        now = cpu_seconds();
        if (now - before < 0.001) return;
    }
}

/* Before any request, after one, and while one is parked. */
static void idle_burns_nothing(void) {
    paged_service_config c = small_config();
    c.ring_tokens = 2;
    c.engine.n_threads = 2;
    paged_service *s = make(c);
    for (int i = 0; i < 3; i++) {
        reading r = {.want = long_answer(0)};
        if (i == 1) read_to_end(s, submit(s, r.want), &r);
        if (i == 2) {
            submit(s, r.want);
            wait_for(s, one_is_parked);
        }
        wait_asleep();
        const double before = cpu_seconds();
        usleep(300000);
        CHECK(cpu_seconds() - before < 0.015);
    }
    paged_service_free(s);
}

static void trim_soon(paged_engine *e, void *user) {
    (void)user;
    e->cache->trim_after = 30000000;
}

/* Memory that has become idle goes back to the system while the service sleeps. */
static void idle_memory_goes_back(void) {
    paged_service_config c = small_config();
    reading r = {.want = long_answer(0)};
    c.engine.no_prefix_cache = true;
    paged_service *s = make(c);
    paged_service_call(s, trim_soon, NULL);
    read_to_end(s, submit(s, r.want), &r);
    usleep(800000);
    const facts f = facts_of(s); /* before the step that follows a call */
    CHECK_EQ(f.cache.idle_bytes, 0);
    CHECK(f.cache.n_unbacked > 0);
    paged_service_free(s);
}

/* ---- event loops ---- */

static bool readable(const paged_service *s, int timeout_ms) {
    struct pollfd p = {.fd = paged_service_fd(s), .events = POLLIN};
    return poll(&p, 1, timeout_ms) == 1;
}

static void ready_list(void) {
    paged_service_config c = small_config();
    reading r[3] = {{.want = long_answer(0)}, {.want = long_answer(1)}, {.want = long_answer(2)}};
    uint64_t ids[3], ready[8];
    int32_t n_ended = 0;
    c.ring_tokens = 6;
    paged_service *s = make(c);
    CHECK(!readable(s, 0));
    CHECK_EQ(paged_service_ready(s, ready, 8), 0);
    CHECK_EQ(paged_service_cpu(s), -1);
    for (int i = 0; i < 3; i++) ids[i] = submit(s, r[i].want);
    wait_for(s, three_are_parked);
    CHECK(paged_service_cpu(s) >= 0 && paged_service_cpu(s) < sysconf(_SC_NPROCESSORS_CONF));
    CHECK(readable(s, 0));
    CHECK_EQ(paged_service_ready(s, ready, 2), 2); /* room for two: the third one is next */
    CHECK(readable(s, 0));
    CHECK_EQ(paged_service_ready(s, ready + 2, 2), 1);
    qsort(ready, 3, sizeof *ready, by_value);
    for (int i = 0; i < 3; i++) CHECK_EQ(ready[i], ids[i]);
    CHECK(!readable(s, 20)); /* they are parked, and their news are known */
    CHECK_EQ(paged_service_ready(s, ready, 8), 0);
    paged_output o;
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(paged_service_read(s, ids[i], 0, &o), PAGED_OK);
        CHECK(fits(&r[i], &o));
    }
    while (n_ended < 3) { /* a loop as a server has it */
        CHECK(readable(s, 10000));
        const int32_t n = paged_service_ready(s, ready, 2);
        for (int32_t i = 0; i < n; i++) {
            reading *one = &r[ready[i] - ids[0]];
            CHECK_EQ(paged_service_read(s, ready[i], 0, &o), PAGED_OK);
            CHECK(fits(one, &o));
            n_ended += o.finish != PAGED_FINISH_NONE;
        }
    }
    CHECK(!readable(s, 20));
    /* Whoever reads has asked, and what is released has no news. */
    const uint64_t read_first = submit(s, r[0].want), released = submit(s, r[1].want);
    wait_for(s, two_are_parked);
    CHECK_EQ(paged_service_release(s, released), PAGED_OK);
    paged_service_cancel(s, read_first);
    wait_for(s, is_idle);
    CHECK_EQ(paged_service_read(s, read_first, 0, &o), PAGED_OK);
    CHECK(!readable(s, 20));
    paged_service_free(s);
}

/* ---- during a step ---- */

/* A model whose steps last until the test lets them go; every logit is 0. */
typedef struct held {
    sem_t began, goes_on;
    float logits[64 * TINY_VOCAB];
} held;

static paged_status held_step(void *self, const paged__step *step, const float **logits, paged_error *err) {
    held *h = self;
    (void)step;
    (void)err;
    sem_post(&h->began);
    while (sem_wait(&h->goes_on)) {
    }
    *logits = h->logits;
    return PAGED_OK;
}

static uint64_t held_now(void *self) {
    (void)self;
    return paged__now_ns();
}

static double now_s(void) {
    return (double)paged__now_ns() * 1e-9;
}

static paged_service *signal_service;
static uint64_t signal_id;

static void cancel_in_handler(int signal) {
    (void)signal;
    paged_service_cancel(signal_service, signal_id);
}

typedef struct visit {
    paged_service *s;
    atomic_bool was_there;
} visit;

static void be_there(paged_engine *e, void *user) {
    paged_engine_stats stats;
    paged_engine_get_stats(e, &stats);
    ((visit *)user)->was_there = true;
}

static void *visit_engine(void *user) {
    paged_service_call(((visit *)user)->s, be_there, user);
    return NULL;
}

/* Everything but a call comes back while a step is computed. */
static void nothing_waits_for_a_step(void) {
    static held h;
    paged_service_config c = small_config();
    paged_service *s = NULL;
    paged_output o;
    paged_error err;
    uint64_t a, b, other, id;
    sem_init(&h.began, 0, 0);
    sem_init(&h.goes_on, 0, 0);
    begin();
    c.engine.max_running = 2;
    c.engine.max_waiting = 2;
    const paged__backend backend = {.self = &h, .step = held_step, .now_ns = held_now};
    CHECK_EQ(paged__service_create(model, &c, &backend, &s, NULL), PAGED_OK);
    paged_request q = alone[0].params;
    q.n_tokens = 20;
    q.ignore_eos = true;
    CHECK_EQ(paged_service_submit(s, &q, &a, NULL), PAGED_OK);
    while (sem_wait(&h.began)) {
    }

    CHECK_EQ(paged_service_submit(s, &q, &b, NULL), PAGED_OK);
    CHECK_EQ(paged_service_submit(s, &q, &other, NULL), PAGED_OK);
    q.n = 2; /* one of them would find a place to wait */
    CHECK_EQ(paged_service_submit(s, &q, &id, &err), PAGED_ERR_LIMIT);
    CHECK_STR(err.message,
              "1 requests run, 2 wait and 0 have ended without a release; 2 may run and 2 wait, and this "
              "is 2 more");
    q.n = 1;
    q.n_tokens = N_CTX + 1;
    q.tokens = calloc((size_t)q.n_tokens, sizeof *q.tokens);
    CHECK_EQ(paged_service_submit(s, &q, &id, &err), PAGED_ERR_TOO_LONG);
    CHECK_STR(err.message, "the prompt has 257 tokens, the context 256");
    free((void *)(uintptr_t)q.tokens);
    double before = now_s();
    CHECK_EQ(paged_service_read(s, a, 50, &o), PAGED_OK);
    CHECK(now_s() - before > 0.045);
    CHECK_EQ(o.n_tokens, 0);
    CHECK_EQ(o.prompt_tokens, 20);
    CHECK_EQ(o.finish, PAGED_FINISH_NONE);
    CHECK_EQ(paged_service_read(s, 99, 50, &o), PAGED_ERR_NOT_FOUND);
    CHECK_EQ(paged_service_read(s, b, 0, &o), PAGED_OK);
    CHECK_EQ(o.wait, PAGED_WAIT_QUEUE);
    CHECK_EQ(paged_service_release(s, b), PAGED_OK); /* one that waits goes at once, one that runs later */
    CHECK_EQ(paged_service_release(s, b), PAGED_ERR_NOT_FOUND);
    CHECK_EQ(paged_service_release(s, a), PAGED_OK);
    CHECK_EQ(paged_service_release(s, a), PAGED_ERR_NOT_FOUND);
    CHECK_EQ(paged_service_read(s, a, -1, &o), PAGED_ERR_NOT_FOUND);
    signal_service = s;
    signal_id = other;
    signal(SIGUSR1, cancel_in_handler);
    raise(SIGUSR1);

    visit v = {.s = s};
    pthread_t visitor;
    before = now_s();
    CHECK(!paged_service_call_within(s, 50, be_there, &v) && !v.was_there);
    CHECK(now_s() - before > 0.045);
    CHECK_EQ(pthread_create(&visitor, NULL, visit_engine, &v), 0);
    usleep(30000);
    CHECK(!v.was_there);
    sem_post(&h.goes_on);
    pthread_join(visitor, NULL);
    CHECK(v.was_there);
    v.was_there = false;
    const facts f = wait_for(s, is_idle);
    CHECK(paged_service_call_within(s, 0, be_there, &v) && v.was_there);
    CHECK_EQ(f.cache.n_used, 0);
    CHECK_EQ(paged_service_read(s, other, -1, &o), PAGED_OK);
    CHECK_EQ(o.finish, PAGED_FINISH_CANCELLED);
    paged_service_free(s);
}

/* ---- ends ---- */

static void *read_until_gone(void *arg) {
    const visit *v = arg;
    paged_output o;
    return (void *)(uintptr_t)paged_service_read(v->s, signal_id, -1, &o);
}

/* A reader that waits hears of a release, and a service with work under way can be freed. */
static void free_with_work(void) {
    paged_service_config c = small_config();
    begin();
    const long n_before = n_live;
    c.ring_tokens = 1;
    paged_service *s = make(c);
    pthread_t reader;
    void *status;
    visit v;
    for (int i = 0; i < 20; i++) submit(s, &alone[i % N_PROMPTS]);
    paged_service_free(s);
    CHECK_EQ(n_live, n_before);

    static held h;
    sem_init(&h.began, 0, 0);
    sem_init(&h.goes_on, 0, 0);
    const paged__backend backend = {.self = &h, .step = held_step, .now_ns = held_now};
    CHECK_EQ(paged__service_create(model, &c, &backend, &s, NULL), PAGED_OK);
    v.s = s;
    signal_id = submit(s, &alone[0]);
    while (sem_wait(&h.began)) {
    }
    CHECK_EQ(pthread_create(&reader, NULL, read_until_gone, &v), 0);
    usleep(20000);
    CHECK_EQ(paged_service_release(s, signal_id), PAGED_OK);
    pthread_join(reader, &status);
    CHECK_EQ((uintptr_t)status, PAGED_ERR_NOT_FOUND);
    submit(s, &alone[1]);
    for (int i = 0; i < 1000; i++) sem_post(&h.goes_on);
    paged_service_free(s);
    CHECK_EQ(n_live, n_before);
}

static void refusals(void) {
    paged_service_config c = small_config();
    paged_service *s = NULL;
    paged_error err;
    begin();
    const long n_before = n_live;
    CHECK_EQ(paged_service_create(NULL, &c, &s, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_service_create(model, &c, NULL, &err), PAGED_ERR_INVALID_ARG);
    c.struct_size = sizeof c + 1;
    CHECK_EQ(paged_service_create(model, &c, &s, &err), PAGED_ERR_INVALID_ARG);
    c = small_config();
    c.ring_tokens = -1;
    CHECK_EQ(paged_service_create(model, &c, &s, &err), PAGED_ERR_INVALID_ARG);
    CHECK_STR(err.message, "ring_tokens is -1, reader_timeout_ms 0; at least 0");
    c = small_config();
    c.engine.n_ctx = 100000;
    CHECK_EQ(paged_service_create(model, &c, &s, &err), PAGED_ERR_TOO_LONG);
    CHECK(!s);
    CHECK_EQ(n_live, n_before);
    paged_service_free(NULL);
}

static void get_info(paged_engine *e, void *user) {
    paged_engine_get_info(e, user);
}

/* NULL is the defaults, so keys and values are of the type that is fastest here; what is zero is f16. */
static void defaults(void) {
    const paged_service_config zero = {.struct_size = sizeof zero}, *const configs[] = {NULL, &zero};
    const paged_type types[] = {paged_engine_kv_type(PAGED_KV_AUTO, NULL, shape.head_dim), PAGED_TYPE_F16};
    for (int i = 0; i < 2; i++) {
        paged_service *s = NULL;
        paged_engine_info info;
        CHECK_EQ(paged_service_create(model, configs[i], &s, NULL), PAGED_OK);
        paged_service_call(s, get_info, &info);
        CHECK_EQ(info.kv_type, types[i]);
        paged_service_free(s);
    }
}

static void counted(void) {
    paged_model_free(model);
    model = NULL;
    CHECK_EQ(n_live, 0);
}

#define TESTS(X)                                                                                             \
    X(many_callers)                                                                                          \
    X(slow_reader_is_parked)                                                                                 \
    X(parked_make_way)                                                                                       \
    X(reader_timeout)                                                                                        \
    X(idle_burns_nothing)                                                                                    \
    X(idle_memory_goes_back)                                                                                 \
    X(ready_list)                                                                                            \
    X(nothing_waits_for_a_step)                                                                              \
    X(free_with_work)                                                                                        \
    X(refusals)                                                                                              \
    X(defaults)                                                                                              \
    X(counted)

int main(int argc, char **argv) {
    static const struct test_case cases[] = {TESTS(TEST_CASE_)};
    paged_allocator_set(&(paged_allocator){count_alloc, count_free, NULL});
    return test_main(argc, argv, cases, (int)(sizeof cases / sizeof cases[0]));
}
