/* Replays requests through a real cache, without computing: no keys and values, no memory behind the blocks.
 *
 *     cache_replay MODE [--block N] [--pool TOKENS] [--run N] [--step MS] [--no-index] [--tails] < requests
 *
 * A request is a line on stdin: ARRIVAL_MS PROMPT OUTPUT ID…  (tokens; ids in ascending order of place). Id x
 * stands for one fixed run of --run tokens, so equal ids are equal tokens; a prompt longer than its ids goes
 * on with tokens of its own, and so does every output.
 *
 *   serial    one request after the other in an unbounded pool: the prompt tokens that each reused; without
 *             the index the tokens stored and the slots taken, summed over all requests, each when it ends
 *   clock     requests arrive at their times; all that arrived run, each makes a token a step of --step ms.
 *             Every 16 steps the tokens and the slots of blocks in use are read from the statistics
 *   saturate  all requests wait from the start; as many run as the pool of --pool tokens holds, a newcomer
 *             leaving 1 % of it free. When a block is missing the youngest gives its own back and starts
 *             again later
 *   lru       as serial, in a pool of --pool tokens: what eviction leaves of the reuse
 *
 * The answer is one JSON object on stdout. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "paged/mem.h"

enum { SAMPLE_STEPS = 16, CHUNK = 4096, VOCAB = 50000 };

typedef struct request {
    double arrival_ms;
    int32_t n_prompt, n_output, n_ids, first_id; /* first_id: in replay.ids */
} request;

typedef struct running {
    paged_seq seq;
    int32_t request, n_done; /* n_done: output tokens so far */
} running;

typedef struct replay {
    request *requests;
    int32_t n_requests, capacity;
    int64_t *ids, n_ids, ids_capacity;
    int32_t block, run;
    int64_t pool_tokens;
    double step_ms;
    bool no_index, tails;
    paged_cache *cache;
    int32_t *tokens; /* [longest request] of the request at hand */
    int32_t longest;
    running *run_list; /* [n_running] oldest first */
    int32_t n_running, most_running;
    /* what is measured */
    int64_t n_steps, sum_running, sum_tokens, sum_slots, sum_best, n_preempted, n_reused, n_prompt;
} replay;

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void die(const char *text) {
    fprintf(stderr, "cache_replay: %s\n", text);
    exit(EXIT_FAILURE);
}

static void must(paged_status status) {
    if (status != PAGED_OK) die(paged_status_text(status));
}

static void *grow(void *p, int64_t n, size_t elem) {
    p = realloc(p, (size_t)n * elem);
    if (!p) die("no memory");
    return p;
}

/* ---- requests ---- */

static void read_requests(replay *r) {
    char *line = NULL;
    size_t capacity = 0;
    while (getline(&line, &capacity, stdin) > 0) {
        char *at = line;
        if (r->n_requests == r->capacity) {
            r->capacity = r->capacity ? 2 * r->capacity : 1024;
            r->requests = grow(r->requests, r->capacity, sizeof *r->requests);
        }
        request *q = &r->requests[r->n_requests++];
        *q = (request){.arrival_ms = strtod(at, &at), .first_id = (int32_t)r->n_ids};
        q->n_prompt = (int32_t)strtol(at, &at, 10);
        q->n_output = (int32_t)strtol(at, &at, 10);
        if (q->n_prompt < 1 || q->n_output < 0) die("a request needs a prompt of at least one token");
        for (char *end = at;; at = end) {
            int64_t id = strtoll(at, &end, 10);
            if (end == at) break;
            if (r->n_ids == r->ids_capacity) {
                r->ids_capacity = r->ids_capacity ? 2 * r->ids_capacity : 4096;
                r->ids = grow(r->ids, r->ids_capacity, sizeof *r->ids);
            }
            r->ids[r->n_ids++] = id;
            q->n_ids++;
        }
        int32_t n = q->n_prompt + q->n_output;
        r->longest = n > r->longest ? n : r->longest;
    }
    free(line);
    if (!r->n_requests) die("no requests on stdin");
}

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Tokens of the runs lie in the vocabulary; what belongs to one request alone lies above it and never meets
 * anything else by chance. bench_cache.py makes the same tokens by the same rule. */
static const int32_t *tokens_of(replay *r, int32_t index) {
    const request *q = &r->requests[index];
    for (int32_t i = 0; i < q->n_prompt + q->n_output; i++) {
        int32_t run = r->run ? i / r->run : 0;
        if (r->run && i < q->n_prompt && run < q->n_ids)
            r->tokens[i] =
                (int32_t)(mix((uint64_t)(r->ids[q->first_id + run] * r->run + i % r->run)) % VOCAB);
        else
            r->tokens[i] = VOCAB + (int32_t)(mix(((uint64_t)index << 32) + (uint64_t)i) % 2000000000u);
    }
    return r->tokens;
}

/* ---- the cache ---- */

static paged_status do_nothing(void *ctx, size_t offset, size_t size_bytes) {
    (void)ctx, (void)offset, (void)size_bytes;
    return PAGED_OK;
}

static paged_status copy_nothing(void *ctx, size_t dst, size_t src, size_t size_bytes) {
    (void)ctx, (void)dst, (void)src, (void)size_bytes;
    return PAGED_OK;
}

static void open_cache(replay *r, int64_t pool_tokens, int32_t max_seqs) {
    const paged_group_config group = {.n_layers = 1,
                                      .n_kv_heads = 1,
                                      .head_dim_k = 2,
                                      .layout = r->tails ? PAGED_LAYOUT_PACKED : PAGED_LAYOUT_PLAIN};
    int64_t n_blocks = (pool_tokens + r->block - 1) / r->block;
    const size_t pool_bytes = (size_t)n_blocks * paged_block_bytes(&group, r->block);
    const paged_arena arena = {
        .size_bytes = pool_bytes, .back = do_nothing, .unback = do_nothing, .copy = copy_nothing};
    const paged_cache_config config = {.struct_size = sizeof config,
                                       .groups = &group,
                                       .n_groups = 1,
                                       .block_size = r->block,
                                       .pool_bytes = pool_bytes,
                                       .max_seqs = max_seqs,
                                       .max_seq_tokens = r->longest,
                                       .packed_tails = r->tails,
                                       .arena = &arena};
    paged_error err;
    if (paged_cache_create(&config, &r->cache, &err)) die(err.message);
}

/* Creates, matches and fills the prompt of a request; false, with nothing held: the blocks do not suffice. */
static bool start(replay *r, int32_t index, paged_seq *seq) {
    const request *q = &r->requests[index];
    const int32_t *tokens = tokens_of(r, index);
    paged_match got = {0};
    must(paged_seq_create(r->cache, seq));
    if (!r->no_index) must(paged_seq_match(r->cache, *seq, &(paged_namespace){0}, tokens, q->n_prompt, &got));
    for (int32_t at = got.n_matched; at < q->n_prompt;) {
        int32_t n = q->n_prompt - at < CHUNK ? q->n_prompt - at : CHUNK;
        paged_status status = paged_seq_reserve(r->cache, *seq, n);
        if (status == PAGED_ERR_NO_BLOCKS) {
            must(paged_seq_free(r->cache, *seq));
            return false;
        }
        must(status);
        must(paged_seq_commit(r->cache, *seq, tokens + at, n));
        at += n;
    }
    r->n_reused += got.n_matched;
    r->n_prompt += q->n_prompt;
    return true;
}

static bool grow_by_one(replay *r, int32_t index, paged_seq seq, int32_t n_done) {
    paged_status status = paged_seq_reserve(r->cache, seq, 1);
    if (status == PAGED_ERR_NO_BLOCKS) return false;
    must(status);
    int32_t token =
        VOCAB + (int32_t)(mix(((uint64_t)index << 32) + (uint64_t)(r->requests[index].n_prompt + n_done)) %
                          2000000000u);
    must(paged_seq_commit(r->cache, seq, &token, 1));
    return true;
}

/* Adds what the statistics say now, and the least slots that the same lengths could take in whole tiles. */
static void sample(replay *r) {
    paged_cache_stats stats;
    paged_cache_get_stats(r->cache, &stats);
    r->sum_tokens += stats.n_slots_used;
    r->sum_slots += (int64_t)(stats.used_bytes / stats.block_bytes) * r->block;
    for (int32_t i = 0; i < r->n_running; i++)
        r->sum_best += (paged_seq_len(r->cache, r->run_list[i].seq) + 15) / 16 * 16;
}

/* ---- modes ---- */

static void serial(replay *r, bool bounded) {
    int64_t total = 0;
    for (int32_t i = 0; i < r->n_requests; i++)
        total += (r->requests[i].n_prompt + r->requests[i].n_output + r->block - 1) / r->block * r->block;
    open_cache(r, bounded ? r->pool_tokens : total, 1);
    printf("{\"reused\": [");
    for (int32_t i = 0; i < r->n_requests; i++) {
        paged_seq seq;
        int64_t before = r->n_reused;
        if (!start(r, i, &seq)) die("a request does not fit the pool");
        for (int32_t t = 0; t < r->requests[i].n_output; t++)
            if (!grow_by_one(r, i, seq, t)) die("a request does not fit the pool");
        r->run_list[0].seq = seq;
        r->n_running = 1;
        if (r->no_index) sample(r);
        must(paged_seq_free(r->cache, seq));
        printf("%s%lld", i ? ", " : "", (long long)(r->n_reused - before));
    }
    printf("], ");
}

static void remove_at(replay *r, int32_t i) {
    memmove(&r->run_list[i], &r->run_list[i + 1], (size_t)(r->n_running - i - 1) * sizeof *r->run_list);
    r->n_running--;
}

/* One token for each running request. Returns the first request that had to go, or n_requests. Between steps
 * tails are compacted, as the engine does. */
static int32_t step(replay *r, int32_t next) {
    if (r->tails) must(paged_cache_compact(r->cache, 1 << 20, true, NULL));
    for (int32_t i = 0; i < r->n_running;) {
        running *run = &r->run_list[i];
        if (run->n_done == r->requests[run->request].n_output) {
            must(paged_seq_free(r->cache, run->seq));
            remove_at(r, i);
            continue;
        }
        while (!grow_by_one(r, run->request, run->seq, run->n_done)) {
            if (r->n_running == 1) die("a request does not fit the pool");
            running *youngest = &r->run_list[--r->n_running];
            must(paged_seq_free(r->cache, youngest->seq));
            next = youngest->request;
            r->n_preempted++;
            if (youngest == run) return next;
        }
        run->n_done++;
        i++;
    }
    return next;
}

static void admit(replay *r, int32_t index, paged_seq seq) {
    r->run_list[r->n_running++] = (running){.seq = seq, .request = index};
    r->most_running = r->n_running > r->most_running ? r->n_running : r->most_running;
}

static void by_clock(replay *r) {
    open_cache(r, r->pool_tokens, r->n_requests < 1 << 19 ? r->n_requests : 1 << 19);
    int32_t next = 0;
    for (double now = r->requests[0].arrival_ms; next < r->n_requests || r->n_running; now += r->step_ms) {
        if (!r->n_running && r->requests[next].arrival_ms > now) now = r->requests[next].arrival_ms;
        paged_seq seq;
        for (; next < r->n_requests && r->requests[next].arrival_ms <= now; next++) {
            if (!start(r, next, &seq)) die("the pool is too small for this load");
            admit(r, next, seq);
        }
        step(r, next);
        r->sum_running += r->n_running;
        if (r->n_steps++ % SAMPLE_STEPS == 0) sample(r);
    }
}

/* Without sharing, which is what this mode is for. */
static bool has_room(const replay *r, int32_t index) {
    int64_t held = 0;
    for (int32_t i = 0; i < r->n_running; i++)
        held += (paged_seq_len(r->cache, r->run_list[i].seq) + r->block - 1) / r->block * r->block;
    return r->n_running == 0 || held + r->requests[index].n_prompt <= r->pool_tokens / 100 * 99;
}

static void saturate(replay *r) {
    open_cache(r, r->pool_tokens, r->n_requests);
    for (int32_t next = 0; next < r->n_requests || r->n_running;) {
        paged_seq seq;
        while (next < r->n_requests && has_room(r, next) && start(r, next, &seq)) admit(r, next++, seq);
        if (!r->n_running) die("a request does not fit the pool");
        next = step(r, next);
        r->sum_running += r->n_running;
        if (r->n_steps++ % SAMPLE_STEPS == 0) sample(r);
    }
}

/* ---- */

static void read_options(replay *r, int argc, char **argv) {
    for (int i = 2; i < argc; i++) {
        const char *name = argv[i];
        if (strcmp(name, "--no-index") == 0)
            r->no_index = true;
        else if (strcmp(name, "--tails") == 0)
            r->tails = true;
        else if (i + 1 == argc)
            die("an option lacks its value");
        else if (strcmp(name, "--block") == 0)
            r->block = atoi(argv[++i]);
        else if (strcmp(name, "--run") == 0)
            r->run = atoi(argv[++i]);
        else if (strcmp(name, "--pool") == 0)
            r->pool_tokens = atoll(argv[++i]);
        else if (strcmp(name, "--step") == 0)
            r->step_ms = atof(argv[++i]);
        else
            die("no such option");
    }
}

int main(int argc, char **argv) {
    replay r = {.block = 16, .step_ms = 30};
    if (argc < 2) die("a mode is missing: serial, clock, saturate or lru");
    read_options(&r, argc, argv);
    read_requests(&r);
    r.tokens = grow(NULL, r.longest, sizeof *r.tokens);
    r.run_list = grow(NULL, r.n_requests, sizeof *r.run_list);
    double begin = now_ns();
    if (strcmp(argv[1], "serial") == 0)
        serial(&r, false);
    else if (strcmp(argv[1], "lru") == 0)
        serial(&r, true);
    else if (strcmp(argv[1], "clock") == 0)
        putchar('{'), by_clock(&r);
    else if (strcmp(argv[1], "saturate") == 0)
        putchar('{'), saturate(&r);
    else
        die("no such mode");
    double seconds = (now_ns() - begin) * 1e-9;
    printf("\"cpu_seconds\": %.6f, \"steps\": %lld, \"running\": %.3f, \"most_running\": %d, \"preempted\": "
           "%lld, "
           "\"prompt_tokens\": %lld, \"reused_tokens\": %lld, \"tokens\": %lld, \"slots\": %lld, \"best\": "
           "%lld}\n",
           seconds, (long long)r.n_steps, r.n_steps ? (double)r.sum_running / (double)r.n_steps : 0.0,
           r.most_running, (long long)r.n_preempted, (long long)r.n_prompt, (long long)r.n_reused,
           (long long)r.sum_tokens, (long long)r.sum_slots, (long long)r.sum_best);
    paged_cache_free(r.cache);
    free(r.requests);
    free(r.ids);
    free(r.tokens);
    free(r.run_list);
    return EXIT_SUCCESS;
}
