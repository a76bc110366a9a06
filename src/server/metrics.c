/* server/metrics.c: see metrics.h. Counts are kept here, facts about engine and memory are asked for when
 * somebody reads. */
#include "server/metrics.h"

#include <dirent.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"

enum { BOUNDS_MAX = 24 };

typedef struct histogram {
    const char *name, *help;
    const double *bounds; /* [n_bounds] ascending; the last bucket is +Inf */
    int32_t n_bounds;
    uint64_t counts[BOUNDS_MAX + 1];
    double sum;
} histogram;

static const double first_bounds[] = {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5,  .75,
                                      1,    2.5,  5,   7.5, 10,  20,  40,  80, 160, 640, 2560};
static const double next_bounds[] = {.01, .025, .05, .075, .1,  .15, .2, .3, .4, .5,
                                     .75, 1,    2.5, 5,    7.5, 10,  20, 40, 80};
static const double request_bounds[] = {.3, .5, .8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                                        30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
static const double token_bounds[] = {1,   2,    5,    10,   20,    50,    100,   200,
                                      500, 1000, 2000, 5000, 10000, 20000, 50000, 100000};

enum { FIRST, NEXT, WHOLE, QUEUE, PREFILL, DECODE, PROMPT, GENERATED, STEP, N_HISTOGRAMS };

#define BOUNDS(list) list, (int32_t)(sizeof list / sizeof list[0])
static const histogram histograms[N_HISTOGRAMS] = {
    [FIRST] = {"time_to_first_token_seconds", "Time to first token.", BOUNDS(first_bounds), {0}, 0},
    [NEXT] =
        {"inter_token_latency_seconds", "Time between two tokens of a request.", BOUNDS(next_bounds), {0}, 0},
    [WHOLE] = {"e2e_request_latency_seconds", "Time of a request.", BOUNDS(request_bounds), {0}, 0},
    [QUEUE] = {"request_queue_time_seconds", "Time in the queue.", BOUNDS(request_bounds), {0}, 0},
    [PREFILL] = {"request_prefill_time_seconds", "Time of the prompt.", BOUNDS(request_bounds), {0}, 0},
    [DECODE] = {"request_decode_time_seconds", "Time of the answer.", BOUNDS(request_bounds), {0}, 0},
    [PROMPT] = {"request_prompt_tokens", "Tokens of a prompt.", BOUNDS(token_bounds), {0}, 0},
    [GENERATED] = {"request_generation_tokens", "Tokens of an answer.", BOUNDS(token_bounds), {0}, 0},
    [STEP] = {"iteration_tokens_total",
              "Tokens of a step; of two, where they were told together.",
              BOUNDS(token_bounds),
              {0},
              0},
};

enum { STATUS_MIN = 100, N_STATUS = 500 };

typedef struct engine_facts {
    paged_engine_stats engine;
    paged_cache_stats cache;
    const char *store_names[PAGED_STORES_MAX];
    paged_store_stats stores[PAGED_STORES_MAX];
    int32_t n_stores;
} engine_facts;

struct paged__metrics {
    histogram histograms[N_HISTOGRAMS];
    uint64_t n_finished[PAGED_FINISH_KINDS]; /* NONE: the client has left */
    uint64_t n_prompt, n_cached, n_generated;
    uint64_t n_replies[N_STATUS]; /* by status - STATUS_MIN */
    engine_facts facts;           /* of the latest look */
};

paged__metrics *paged__metrics_create(void) {
    paged__metrics *m = paged__calloc(1, sizeof *m);
    if (m) memcpy(m->histograms, histograms, sizeof histograms);
    return m;
}

void paged__metrics_free(paged__metrics *m) {
    paged__free(m);
}

static void observe(histogram *h, double value, uint64_t n) {
    int32_t i = 0;
    while (i < h->n_bounds && value > h->bounds[i]) i++;
    h->counts[i] += n;
    h->sum += value * (double)n;
}

void paged__metrics_http(paged__metrics *m, int status) {
    if (status >= STATUS_MIN && status < STATUS_MIN + N_STATUS) m->n_replies[status - STATUS_MIN]++;
}

void paged__metrics_tokens(paged__metrics *m, bool first, int32_t n, double seconds) {
    m->n_generated += (uint64_t)n;
    if (first)
        observe(&m->histograms[FIRST], seconds, 1);
    else
        observe(&m->histograms[NEXT], seconds / n, (uint64_t)n);
}

void paged__metrics_step(paged__metrics *m, int64_t n_tokens) {
    if (n_tokens > 0) observe(&m->histograms[STEP], (double)n_tokens, 1);
}

void paged__metrics_ended(paged__metrics *m, const paged_output *end, double seconds) {
    m->n_finished[end->finish]++;
    if (end->finish != PAGED_FINISH_STOP && end->finish != PAGED_FINISH_LENGTH) return;
    m->n_prompt += (uint64_t)end->prompt_tokens;
    m->n_cached += (uint64_t)end->cached_tokens;
    observe(&m->histograms[WHOLE], seconds, 1);
    observe(&m->histograms[QUEUE], end->queue_ms / 1e3, 1);
    observe(&m->histograms[PREFILL], end->prefill_ms / 1e3, 1);
    observe(&m->histograms[DECODE], end->decode_ms / 1e3, 1);
    observe(&m->histograms[PROMPT], end->prompt_tokens, 1);
    observe(&m->histograms[GENERATED], end->completion_tokens, 1);
}

/* ---- the text ---- */

typedef struct page {
    paged__buffer text;
    const char *labels; /* of all metrics of the model */
} page;

static void get_facts(paged_engine *engine, void *user) {
    engine_facts *f = user;
    paged_engine_get_stats(engine, &f->engine);
    paged_engine_get_cache_stats(engine, &f->cache);
    f->n_stores = 0;
    while (paged_engine_get_store(engine, f->n_stores, &f->store_names[f->n_stores], &f->stores[f->n_stores]))
        f->n_stores++;
}

static void head(page *p, const char *name, const char *type, const char *help) {
    paged__buffer_printf(&p->text, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void one(page *p, const char *name, const char *type, const char *help, double value) {
    head(p, name, type, help);
    paged__buffer_printf(&p->text, "%s{%s} %.17g\n", name, p->labels, value);
}

/* "is one of a few": a line for each. */
static void each(page *p, const char *name, const char *label, const char *value, double count) {
    paged__buffer_printf(&p->text, "%s{%s,%s=\"%s\"} %.17g\n", name, p->labels, label, value, count);
}

static void put_histogram(page *p, const histogram *h) {
    char name[80];
    uint64_t n = 0;
    snprintf(name, sizeof name, "vllm:%s", h->name);
    head(p, name, "histogram", h->help);
    for (int32_t i = 0; i <= h->n_bounds; i++) {
        n += h->counts[i];
        char bound[32] = "+Inf";
        if (i < h->n_bounds) snprintf(bound, sizeof bound, "%.10g", h->bounds[i]);
        paged__buffer_printf(&p->text, "%s_bucket{%s,le=\"%s\"} %llu\n", name, p->labels, bound,
                             (unsigned long long)n);
    }
    paged__buffer_printf(&p->text, "%s_sum{%s} %.17g\n%s_count{%s} %llu\n", name, p->labels, h->sum, name,
                         p->labels, (unsigned long long)n);
}

static void put_requests(page *p, const paged__metrics *m, const engine_facts *f) {
    const struct {
        paged_finish finish;
        const char *reason;
    } reasons[] = {{PAGED_FINISH_STOP, "stop"},        {PAGED_FINISH_LENGTH, "length"},
                   {PAGED_FINISH_NONE, "abort"},       {PAGED_FINISH_ERROR, "error"},
                   {PAGED_FINISH_READER, "reader"},    {PAGED_FINISH_CANCELLED, "cancelled"},
                   {PAGED_FINISH_DEADLINE, "deadline"}};
    one(p, "vllm:num_requests_running", "gauge", "Requests that run.", f->engine.n_running);
    one(p, "vllm:num_requests_waiting", "gauge", "Requests that wait.", f->engine.n_waiting);
    one(p, "vllm:num_preemptions_total", "counter", "Preemptions.", (double)f->engine.n_preemptions);
    head(p, "vllm:request_success_total", "counter", "Requests that have ended, by reason.");
    for (size_t i = 0; i < sizeof reasons / sizeof reasons[0]; i++)
        each(p, "vllm:request_success_total", "finished_reason", reasons[i].reason,
             (double)m->n_finished[reasons[i].finish]);
    one(p, "vllm:prompt_tokens_total", "counter", "Prompt tokens of requests that have ended.",
        (double)m->n_prompt);
    one(p, "vllm:prompt_tokens_cached_total", "counter", "Of these, those found in the cache.",
        (double)m->n_cached);
    one(p, "vllm:generation_tokens_total", "counter", "Tokens generated.", (double)m->n_generated);
    for (int32_t i = 0; i < N_HISTOGRAMS; i++) put_histogram(p, &m->histograms[i]);
    head(p, "paged_requests_waiting_by_reason", "gauge", "Requests without a part in the steps, by reason.");
    for (int32_t i = PAGED_WAIT_QUEUE; i < PAGED_WAIT_KINDS; i++)
        each(p, "paged_requests_waiting_by_reason", "reason", paged_wait_name((paged_wait)i),
             f->engine.n_wait[i]);
    one(p, "paged_steps_total", "counter", "Steps of the engine that computed.", (double)f->engine.n_steps);
    one(p, "paged_step_tokens_total", "counter", "Tokens that these steps computed.",
        (double)f->engine.n_tokens);
}

static void put_memory(page *p, const engine_facts *f) {
    const paged_cache_stats *c = &f->cache;
    const int32_t n_real = PAGED_MAX(c->n_blocks, 1);
    one(p, "vllm:kv_cache_usage_perc", "gauge", "Part of the blocks in use, 0 to 1.",
        (double)c->n_used / n_real);
    one(p, "vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked up in the cache.",
        (double)c->n_query_tokens);
    one(p, "vllm:prefix_cache_hits_total", "counter", "Prompt tokens found in the cache.",
        (double)c->n_hit_tokens);
    head(p, "vllm:cache_config_info", "gauge", "How the cache is configured.");
    paged__buffer_printf(&p->text, "vllm:cache_config_info{%s,block_size=\"%d\",num_gpu_blocks=\"%d\"} 1\n",
                         p->labels, c->block_size, c->n_blocks);
    head(p, "paged_blocks", "gauge", "Blocks of the pool, by state.");
    each(p, "paged_blocks", "state", "free", c->n_free);
    each(p, "paged_blocks", "state", "used", c->n_used);
    each(p, "paged_blocks", "state", "cached", c->n_cached);
    head(p, "paged_kv_bytes", "gauge", "Bytes of the pool, by what they are for.");
    each(p, "paged_kv_bytes", "kind", "limit", (double)c->max_bytes);
    each(p, "paged_kv_bytes", "kind", "backed", (double)c->backed_bytes);
    each(p, "paged_kv_bytes", "kind", "used", (double)c->used_bytes);
    each(p, "paged_kv_bytes", "kind", "cached", (double)c->cached_bytes);
    one(p, "paged_tail_tiles", "gauge", "Tiles of packed tails in use.", c->n_tail_tiles);
    one(p, "paged_evictions_total", "counter", "Entries evicted from the cache.", (double)c->n_evicted);
    one(p, "paged_copies_on_write_total", "counter", "Blocks copied before they were written.",
        (double)c->n_copies);
    head(p, "paged_prefix_misses_total", "counter", "Lookups in the cache, by why they ended.");
    for (int32_t i = 0; i < PAGED_MISS_KINDS; i++)
        each(p, "paged_prefix_misses_total", "reason", paged_miss_name((paged_miss)i),
             (double)c->n_misses[i]);
}

/* Of an engine without stores there is nothing to say. */
static void put_stores(page *p, const engine_facts *f) {
    const paged_engine_stats *e = &f->engine;
    if (f->n_stores == 0) return;
    one(p, "paged_store_asks_total", "counter", "Requests that asked stores.", (double)e->n_store_asks);
    one(p, "paged_store_hits_total", "counter", "Of these, those that got tokens.", (double)e->n_store_hits);
    one(p, "paged_store_tokens_total", "counter", "Tokens that came from stores.", (double)e->n_store_tokens);
    head(p, "paged_store_bytes_total", "counter", "Bytes to and from stores.");
    each(p, "paged_store_bytes_total", "way", "read", (double)e->n_store_read_bytes);
    each(p, "paged_store_bytes_total", "way", "written", (double)e->n_store_written_bytes);
    head(p, "paged_store_seconds_total", "counter", "Seconds spent with stores.");
    each(p, "paged_store_seconds_total", "way", "read", e->store_read_ms / 1e3);
    each(p, "paged_store_seconds_total", "way", "written", e->store_write_ms / 1e3);
    one(p, "paged_store_dropped_total", "counter", "Blocks that were not written for want of time or memory.",
        (double)e->n_store_dropped);
    one(p, "paged_store_failures_total", "counter", "Reads and writes of stores that failed.",
        (double)e->n_store_failures);
    one(p, "paged_store_queued", "gauge", "Blocks that wait to be written.", e->n_store_queued);
    head(p, "paged_store_records", "gauge", "Records in a store.");
    for (int32_t i = 0; i < f->n_stores; i++)
        each(p, "paged_store_records", "store", f->store_names[i], (double)f->stores[i].n_records);
    head(p, "paged_store_stored_bytes", "gauge", "Bytes in a store.");
    for (int32_t i = 0; i < f->n_stores; i++)
        each(p, "paged_store_stored_bytes", "store", f->store_names[i], (double)f->stores[i].bytes);
    head(p, "paged_store_damaged_total", "counter", "Records of a store that were not what they should be.");
    for (int32_t i = 0; i < f->n_stores; i++)
        each(p, "paged_store_damaged_total", "store", f->store_names[i], (double)f->stores[i].n_damaged);
    head(p, "paged_store_up", "gauge", "1: the last call of a store got through.");
    for (int32_t i = 0; i < f->n_stores; i++)
        each(p, "paged_store_up", "store", f->store_names[i], f->stores[i].up);
}

static double resident_bytes(void) {
    double pages = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    if (!file) return 0;
    if (fscanf(file, "%*d %lf", &pages) != 1) pages = 0;
    fclose(file);
    return pages * (double)sysconf(_SC_PAGESIZE);
}

static int32_t open_fds(void) {
    int32_t n = 0;
    DIR *folder = opendir("/proc/self/fd");
    if (!folder) return 0;
    for (const struct dirent *e; (e = readdir(folder)) != NULL;) n += e->d_name[0] != '.';
    closedir(folder);
    return n - 1; /* the folder itself */
}

static void put_process(page *p, const paged__server *s) {
    struct timespec cpu;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
    const struct {
        const char *name, *type, *help;
        double value;
    } rows[] = {
        {"process_resident_memory_bytes", "gauge", "Resident memory.", resident_bytes()},
        {"process_open_fds", "gauge", "Open file descriptors.", open_fds()},
        {"process_cpu_seconds_total", "counter", "CPU time.",
         (double)cpu.tv_sec + (double)cpu.tv_nsec * 1e-9},
        {"process_start_time_seconds", "gauge", "Start, in seconds since 1970.", (double)s->started},
        {"paged_http_connections", "gauge", "Open connections.", s->n_conns},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        head(p, rows[i].name, rows[i].type, rows[i].help);
        paged__buffer_printf(&p->text, "%s %.17g\n", rows[i].name, rows[i].value);
    }
    head(p, "paged_http_replies_total", "counter", "Answers, by status.");
    for (int32_t i = 0; i < N_STATUS; i++)
        if (s->metrics->n_replies[i])
            paged__buffer_printf(&p->text, "paged_http_replies_total{code=\"%d\"} %llu\n", STATUS_MIN + i,
                                 (unsigned long long)s->metrics->n_replies[i]);
}

/* The value of a label: its quotes, backslashes and newlines are escaped. */
static void put_label(paged__buffer *out, const char *text) {
    for (const char *c = text; *c; c++) {
        if (*c == '"' || *c == '\\' || *c == '\n') paged__buffer_append(out, "\\", 1);
        paged__buffer_append(out, *c == '\n' ? "n" : c, 1);
    }
}

void paged__metrics_reply(paged__conn *conn) {
    const paged__server *s = conn->server;
    const engine_facts *f = &s->metrics->facts;
    paged__buffer labels = {0};
    page p = {0};
    /* While a step lasts too long what was true before it is told: a scrape must not fail just then. */
    paged__server_look(conn->server, get_facts, &s->metrics->facts);
    paged__buffer_printf(&labels, "model_name=\"");
    put_label(&labels, s->world.name);
    paged__buffer_append(&labels, "\",engine=\"0\"", sizeof "\",engine=\"0\"");
    p.labels = labels.data ? labels.data : "";
    put_requests(&p, s->metrics, f);
    put_memory(&p, f);
    put_stores(&p, f);
    put_process(&p, s);
    paged__reply(conn, 200, "text/plain; version=0.0.4; charset=utf-8", NULL, p.text.data, p.text.len);
    paged__buffer_free(&p.text);
    paged__buffer_free(&labels);
}
