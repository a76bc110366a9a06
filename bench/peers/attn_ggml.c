/* bench/peers/attn_ggml.c: ggml's flash attention as a peer of `./x bench attn`; its protocol is that of
 * bench/peers/attn_peer.py. Compiled by setup-attn once for each ggml that there is.
 *
 * A setting is TYPE/ORDER: f16, bf16, f32 or q8_0, and whether the rows of a head follow each other (heads)
 * or those of a token (tokens, as llama.cpp has them). Its thread pool is pinned, polls while it works, and
 * sleeps otherwise. One sequence only. */
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <ggml-cpu.h>
#include <ggml.h>

enum { NAME_MAX_BYTES = 16, LAYERS_MAX = 64, WORKS_MAX = 4, MASK_PAD = 64, HUGE_PAGE = 2 << 20 };

typedef struct work {
    char name[NAME_MAX_BYTES];
    int heads, kv_heads, dim, ctx, q, layers;
    enum ggml_type type;
    bool by_token;
    struct ggml_context *ctx_ggml;
    void *maps[2 * LAYERS_MAX + 4];
    size_t map_bytes[2 * LAYERS_MAX + 4];
    int n_maps;
    struct ggml_tensor *result;
    struct ggml_cgraph *graphs[LAYERS_MAX];
    struct ggml_cplan plans[LAYERS_MAX];
} work;

static work works[WORKS_MAX];
static struct ggml_threadpool *pool;
static int n_threads;

static void quit(const char *what, const char *why) {
    fprintf(stderr, "attn_ggml: %s: %s\n", what, why);
    exit(EXIT_FAILURE);
}

static double seconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Zeroed, on huge pages where there are some; kept in the list of the work. */
static void *map_bytes(work *w, size_t n) {
    size_t size = n + 2 * HUGE_PAGE;
    uint8_t *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) quit("no memory", strerror(errno));
    madvise(p, size, MADV_HUGEPAGE);
    w->maps[w->n_maps] = p;
    w->map_bytes[w->n_maps++] = size;
    return p + (HUGE_PAGE - (uintptr_t)p % HUGE_PAGE) % HUGE_PAGE;
}

static float *read_file(const char *folder, const char *name, size_t n_floats) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s.f32", folder, name);
    float *data = malloc(n_floats * sizeof(float));
    FILE *file = fopen(path, "rb");
    if (!data || !file || fread(data, sizeof(float), n_floats, file) != n_floats)
        quit(path, "cannot be read");
    fclose(file);
    return data;
}

/* ---- open ---- */

/* K or V of one layer: rows [ctx, kv_heads, dim] in the order and type of the work. */
static struct ggml_tensor *make_rows(work *w, const float *rows) {
    size_t row_bytes = ggml_row_size(w->type, w->dim);
    int n1 = w->by_token ? w->kv_heads : w->ctx, n2 = w->by_token ? w->ctx : w->kv_heads;
    struct ggml_tensor *t = ggml_new_tensor_3d(w->ctx_ggml, w->type, w->dim, n1, n2);
    t->data = map_bytes(w, ggml_nbytes(t));
    for (int token = 0; rows && token < w->ctx; token++)
        for (int head = 0; head < w->kv_heads; head++) {
            const float *src = rows + ((size_t)token * (size_t)w->kv_heads + (size_t)head) * (size_t)w->dim;
            size_t at = w->by_token ? (size_t)token * (size_t)w->kv_heads + (size_t)head
                                    : (size_t)head * (size_t)w->ctx + (size_t)token;
            uint8_t *dst = (uint8_t *)t->data + at * row_bytes;
            if (w->type == GGML_TYPE_F32)
                memcpy(dst, src, row_bytes);
            else
                ggml_quantize_chunk(w->type, src, dst, 0, 1, w->dim, NULL);
        }
    return t;
}

static struct ggml_tensor *as_heads(work *w, struct ggml_tensor *t) {
    return w->by_token ? ggml_permute(w->ctx_ggml, t, 0, 2, 1, 3) : t;
}

/* Queries [dim, q, heads] of [q, heads, dim]. */
static struct ggml_tensor *make_queries(work *w, const float *rows) {
    struct ggml_tensor *t = ggml_new_tensor_3d(w->ctx_ggml, GGML_TYPE_F32, w->dim, w->q, w->heads);
    float *dst = t->data = map_bytes(w, ggml_nbytes(t));
    for (int h = 0; h < w->heads; h++)
        for (int i = 0; i < w->q; i++)
            memcpy(dst + ((size_t)h * (size_t)w->q + (size_t)i) * (size_t)w->dim,
                   rows + ((size_t)i * (size_t)w->heads + (size_t)h) * (size_t)w->dim,
                   (size_t)w->dim * sizeof(float));
    return t;
}

/* Causal; one query sees everything and needs none. */
static struct ggml_tensor *make_mask(work *w) {
    if (w->q == 1) return NULL;
    int n_rows = (w->q + MASK_PAD - 1) / MASK_PAD * MASK_PAD;
    struct ggml_tensor *t = ggml_new_tensor_2d(w->ctx_ggml, GGML_TYPE_F16, w->ctx, n_rows);
    ggml_fp16_t *mask = t->data = map_bytes(w, ggml_nbytes(t));
    const ggml_fp16_t hidden = ggml_fp32_to_fp16(-INFINITY);
    for (int i = 0; i < n_rows; i++)
        for (int j = 0; j < w->ctx; j++)
            if (j > w->ctx - w->q + i) mask[(size_t)i * (size_t)w->ctx + (size_t)j] = hidden;
    return t;
}

static bool parse_setting(work *w, char *setting) {
    static const struct {
        const char *name;
        enum ggml_type type;
    } types[] = {
        {"f16", GGML_TYPE_F16}, {"bf16", GGML_TYPE_BF16}, {"f32", GGML_TYPE_F32}, {"q8_0", GGML_TYPE_Q8_0}};
    char *order = strchr(setting, '/');
    if (!order) return false;
    *order++ = 0;
    w->by_token = strcmp(order, "tokens") == 0;
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if (strcmp(types[i].name, setting) == 0) {
            w->type = types[i].type;
            return true;
        }
    return false;
}

static void make_layers(work *w, const char *data) {
    const size_t n_rows = (size_t)w->ctx * (size_t)w->kv_heads * (size_t)w->dim;
    float *q = read_file(data, "q", (size_t)w->q * (size_t)w->heads * (size_t)w->dim);
    float *k = read_file(data, "k", n_rows), *v = read_file(data, "v", n_rows);
    struct ggml_tensor *queries = make_queries(w, q), *mask = make_mask(w), *first[2];
    void *out = NULL, *scratch = NULL;
    for (int l = 0; l < w->layers; l++) {
        struct ggml_tensor *kv[2] = {make_rows(w, l ? NULL : k), make_rows(w, l ? NULL : v)};
        for (int i = 0; i < 2; i++) {
            if (l == 0) first[i] = kv[i];
            if (l > 0) memcpy(kv[i]->data, first[i]->data, ggml_nbytes(kv[i]));
        }
        w->result = ggml_flash_attn_ext(w->ctx_ggml, queries, as_heads(w, kv[0]), as_heads(w, kv[1]), mask,
                                        1.0f / sqrtf((float)w->dim), 0, 0);
        ggml_flash_attn_ext_set_prec(w->result, GGML_PREC_F32);
        if (l == 0) out = map_bytes(w, ggml_nbytes(w->result));
        w->result->data = out;
        w->graphs[l] = ggml_new_graph_custom(w->ctx_ggml, 16, false);
        ggml_build_forward_expand(w->graphs[l], w->result);
        w->plans[l] = ggml_graph_plan(w->graphs[l], n_threads, pool);
        if (l == 0) scratch = map_bytes(w, w->plans[0].work_size + 64);
        w->plans[l].work_data = scratch;
    }
    free(q);
    free(k);
    free(v);
}

static void close_work(work *w) {
    for (int i = 0; i < w->n_maps; i++) munmap(w->maps[i], w->map_bytes[i]);
    if (w->ctx_ggml) ggml_free(w->ctx_ggml);
    *w = (work){0};
}

static void run_work(work *w) {
    ggml_threadpool_resume(pool);
    for (int l = 0; l < w->layers; l++) ggml_graph_compute(w->graphs[l], &w->plans[l]);
    ggml_threadpool_pause(pool);
}

static void open_work(work *w, const char *name, char *words) {
    struct {
        const char *key;
        int *value;
    } numbers[] = {{"heads", &w->heads}, {"kv_heads", &w->kv_heads}, {"dim", &w->dim}, {"ctx", &w->ctx},
                   {"q", &w->q},         {"layers", &w->layers}};
    const char *data = "", *skip = NULL;
    *w = (work){.q = 1, .layers = 1};
    for (char *rest = NULL, *word = strtok_r(words, " \n", &rest); word;
         word = strtok_r(NULL, " \n", &rest)) {
        char *value = strchr(word, '=');
        if (!value) quit(word, "is no KEY=VALUE");
        *value++ = 0;
        for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
            if (strcmp(word, numbers[i].key) == 0) *numbers[i].value = atoi(value);
        if (strcmp(word, "data") == 0) data = value;
        if (strcmp(word, "batch") == 0 && atoi(value) != 1) skip = "one sequence only";
        if (strcmp(word, "setting") == 0 && !parse_setting(w, value)) skip = "no such setting";
    }
    if (w->layers > LAYERS_MAX) skip = "too many layers";
    if (skip) {
        printf("{\"skip\": \"%s\"}\n", skip);
        *w = (work){0};
        return;
    }
    struct ggml_init_params params = {(size_t)16 << 20, NULL, true};
    w->ctx_ggml = ggml_init(params);
    if (!w->ctx_ggml) quit("ggml_init", "no context");
    make_layers(w, data);
    run_work(w);
    snprintf(w->name, sizeof w->name, "%s", name);
    puts("{}");
}

/* ---- the protocol ---- */

static work *find_work(const char *name) {
    for (int i = 0; i < WORKS_MAX; i++)
        if (strcmp(works[i].name, name) == 0) return &works[i];
    quit(name, "not open, or too many are");
    return NULL;
}

static void time_work(work *w, int n_times) {
    double cpu = seconds(CLOCK_PROCESS_CPUTIME_ID), wall = seconds(CLOCK_MONOTONIC);
    for (int i = 0; i < n_times; i++) run_work(w);
    wall = seconds(CLOCK_MONOTONIC) - wall;
    cpu = seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    printf("{\"seconds\": %.9f, \"cpu_seconds\": %.9f, \"calls\": %d}\n", wall, cpu, n_times * w->layers);
}

/* The result of ggml is [dim, heads, q], which is what is asked for. */
static void write_out(const work *w, const char *path) {
    FILE *file = fopen(path, "wb");
    size_t n = (size_t)ggml_nelements(w->result);
    if (!file || fwrite(w->result->data, sizeof(float), n, file) != n || fclose(file) != 0)
        quit(path, "cannot be written");
    puts("{}");
}

static void command(char *line) {
    char *rest = NULL, *verb = strtok_r(line, " \n", &rest), *name = strtok_r(NULL, " \n", &rest),
         *words = strtok_r(NULL, "\n", &rest);
    if (verb && strcmp(verb, "hello") == 0)
        printf("{\"version\": \"%s\", \"settings\": [\"f16/heads\", \"f16/tokens\", \"bf16/heads\", "
               "\"f32/heads\", "
               "\"q8_0/heads\", \"q8_0/tokens\"]}\n",
               ggml_version());
    else if (!verb || !name)
        quit("command", "too short");
    else if (strcmp(verb, "open") == 0 && words)
        open_work(find_work(""), name, words);
    else if (strcmp(verb, "run") == 0 && words)
        time_work(find_work(name), atoi(words));
    else if (strcmp(verb, "out") == 0 && words)
        write_out(find_work(name), words);
    else if (strcmp(verb, "close") == 0)
        close_work(find_work(name)), puts("{}");
    else
        quit(verb, "no such command");
    fflush(stdout);
}

int main(void) {
    static char line[4096];
    const char *threads = getenv("OMP_NUM_THREADS");
    n_threads = threads ? atoi(threads) : 1;
    struct ggml_threadpool_params params;
    ggml_threadpool_params_init(&params, n_threads);
    for (int i = 0; i < n_threads; i++) params.cpumask[i] = true;
    params.strict_cpu = true;
    params.poll = 100;
    params.paused = true;
    pool = ggml_threadpool_new(&params);
    if (!pool) quit("ggml_threadpool_new", "no threads");
    ggml_cpu_init();
    while (fgets(line, sizeof line, stdin)) command(line);
    for (int i = 0; i < WORKS_MAX; i++)
        if (*works[i].name) close_work(&works[i]);
    ggml_threadpool_free(pool);
    return EXIT_SUCCESS;
}
