/* bench_attn.c: attention over a paged cache as an instrument that bench_attn.py plays: it places keys and
 * values, runs, and measures the machine's limits between the runs. It knows no case and no requirement.
 *
 * One command a line on stdin, one line of JSON on stdout for each; it ends when stdin does. A command that
 * the library refuses is answered {"skip": why}; one that makes no sense ends the program.
 *
 *     open NAME KEY=VALUE…   a cache of `layers` layers and what attends to it; KEY: see `spec` below
 *     run NAME N             plans once, then N times all layers; N * layers are the "calls" of the answer
 *     plan NAME N            plans N times, on one thread
 *     out NAME FILE          writes the result of the last layer: f32 [queries, heads, dim]
 *     close NAME
 *     probe                  reads memory; the answer has its "bytes"
 *     peak f32|bf16|i8|amx   products in registers; the answer has their "ops"
 *
 *     {"seconds": wall, "cpu_seconds": of all threads, "calls" or "bytes" or "ops": how many}
 *
 * Peers speak the same (bench/peers): open, run, out, close. The clock runs around the work alone. Every
 * layer is run as an engine does it: all threads run, meet, merge where the plan asks for it, meet again. */
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"
#include "bench/probe.h"
#include "bench/team.h"
#include "paged/ops.h"

enum { SLOTS_MAX = 16, SEQS_MAX = 128, LAYERS_MAX = 256, PATTERN = 1024 /* generated tokens, then again */ };

/* What `open` is told. Numbers default to 0 where nothing else is said. */
typedef struct spec {
    int32_t heads, kv_heads, dim;
    int32_t block, layers; /* 32, 1 */
    int32_t batch;         /* sequences; 1 */
    int32_t ctx;           /* keys of each, those of the queries included */
    int32_t q;             /* queries of each; 1 */
    int32_t shared;        /* leading tokens that all sequences have in the same blocks */
    int32_t cascade;       /* 1: attention is told of them */
    int32_t shuffled;      /* 1: physical blocks in random order */
    int32_t contiguous;    /* 1: K of a head is one run of bytes, layer after layer; 0: block-major */
    int32_t gather;        /* 1: each layer is first copied to one run of bytes */
    int32_t write;         /* 1: each layer first writes the keys and values of its queries; needs `data` */
    int32_t n_lens, *lens; /* lens=a,b,…: keys of each sequence, instead of batch and ctx */
    paged_type type;       /* type=f16|f32|bf16|i8 */
    paged_layout layout;   /* layout=packed|plain */
    /* Folder of q.f32 [batch * q, heads, dim], k.f32 and v.f32 [batch, ctx, kv_heads, dim]; or generated. */
    const char *data;
} spec;

typedef struct file_map {
    const float *data;
    size_t size_bytes;
} file_map;

/* An open cache. Everything belongs to it. */
typedef struct slot {
    char name[16];
    spec spec;
    int32_t lens[SEQS_MAX], cu[SEQS_MAX + 1];
    int32_t max_blocks;
    int32_t *table; /* [n_seqs, max_blocks] */
    uint8_t *bytes; /* all layers */
    size_t size_bytes;
    paged_kv kv[LAYERS_MAX];
    paged_kv dense;     /* gather: a layer of one sequence, each head's keys and values one run of bytes */
    double layer_bytes; /* of K and V that one run reads, each once */
    paged_attn *attn;
    paged_shared shared;
    paged_batch batch, dense_batch; /* dense_batch: over `dense`, block i in place i */
    int32_t *dense_table;           /* [max_blocks] */
    float *q, *out;                 /* [queries, heads, dim] */
    float *fresh_k, *fresh_v;       /* write: [queries, kv_heads, dim] */
    int64_t *fresh_slots;           /* write: [queries] */
} slot;

static team threads;
static slot slots[SLOTS_MAX];

__attribute__((noreturn, format(printf, 1, 2))) static void quit(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    fputs("bench_attn: ", stderr);
    vfprintf(stderr, fmt, args);
    fputc('\n', stderr);
    va_end(args);
    exit(EXIT_FAILURE);
}

static void *take(size_t n, size_t elem_bytes) {
    void *p = paged__calloc(n, elem_bytes);
    if (!p) quit("no memory for %zu times %zu bytes", n, elem_bytes);
    return p;
}

/* ---- what is asked for ---- */

static int32_t choice(const char *key, const char *value, const char *const *names, int32_t n) {
    for (int32_t i = 0; i < n; i++)
        if (strcmp(value, names[i]) == 0) return i;
    quit("%s=%s", key, value);
}

static int32_t parse_number(const char *key, const char *value) {
    char *end;
    errno = 0;
    long n = strtol(value, &end, 10);
    if (errno || end == value || *end || n < 0 || n > INT32_MAX) quit("%s=%s", key, value);
    return (int32_t)n;
}

static void parse_lens(spec *s, char *value, int32_t *lens) {
    s->n_lens = 0;
    s->lens = lens;
    for (char *rest = NULL, *word = strtok_r(value, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
        if (s->n_lens == SEQS_MAX) quit("lens: more than %d", SEQS_MAX);
        lens[s->n_lens++] = parse_number("lens", word);
    }
}

/* What would lead the program astray; the rest is the library's to refuse. */
static void check_spec(const spec *s) {
    if (s->heads < 1 || s->kv_heads < 1 || s->dim < 1 || s->block < 1 || s->layers < 1 ||
        s->layers > LAYERS_MAX)
        quit("heads %d, kv_heads %d, dim %d, block %d, layers %d", s->heads, s->kv_heads, s->dim, s->block,
             s->layers);
    if (s->write && !s->data) quit("write=1 needs data");
    if (s->gather && (s->n_lens != 1 || s->contiguous || s->type == PAGED_TYPE_I8))
        quit("gather=1 is for one sequence in the pool, and not for i8");
    if (s->shared % s->block) quit("shared=%d is no multiple of block=%d", s->shared, s->block);
    for (int32_t i = 0; i < s->n_lens; i++)
        if (s->lens[i] < PAGED_MAX(s->shared, s->q))
            quit("%d keys, %d shared, %d queries", s->lens[i], s->shared, s->q);
}

/* `words` is what follows the name; it is cut up, and `data` points into it. */
static spec parse_spec(char *words, int32_t *lens) {
    static const char *const types[] = {"f16", "f32", "bf16", "i8"}, *const layouts[] = {"plain", "packed"};
    spec s = {.block = 32, .layers = 1, .batch = 1, .q = 1, .layout = PAGED_LAYOUT_PACKED};
    struct {
        const char *key;
        int32_t *value;
    } numbers[] = {{"heads", &s.heads},       {"kv_heads", &s.kv_heads},
                   {"dim", &s.dim},           {"block", &s.block},
                   {"layers", &s.layers},     {"batch", &s.batch},
                   {"ctx", &s.ctx},           {"q", &s.q},
                   {"shared", &s.shared},     {"cascade", &s.cascade},
                   {"shuffled", &s.shuffled}, {"contiguous", &s.contiguous},
                   {"gather", &s.gather},     {"write", &s.write}};
    for (char *rest = NULL, *word = strtok_r(words, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        char *value = strchr(word, '=');
        if (!value) quit("`%s` is no KEY=VALUE", word);
        *value++ = 0;
        size_t i = 0, n = sizeof numbers / sizeof numbers[0];
        while (i < n && strcmp(numbers[i].key, word) != 0) i++;
        if (i < n)
            *numbers[i].value = parse_number(word, value);
        else if (strcmp(word, "type") == 0)
            s.type = (paged_type)choice(word, value, types, 4);
        else if (strcmp(word, "layout") == 0)
            s.layout = (paged_layout)choice(word, value, layouts, 2);
        else if (strcmp(word, "lens") == 0)
            parse_lens(&s, value, lens);
        else if (strcmp(word, "data") == 0)
            s.data = value;
        else
            quit("open knows no %s", word);
    }
    if (!s.lens) {
        if (s.batch < 1 || s.batch > SEQS_MAX) quit("batch=%d", s.batch);
        for (int32_t i = 0; i < s.batch; i++) lens[i] = s.ctx;
        s.lens = lens;
        s.n_lens = s.batch;
    }
    check_spec(&s);
    return s;
}

/* ---- placing ---- */

static size_t elem_bytes(paged_type type) {
    return type == PAGED_TYPE_F32 ? 4 : type == PAGED_TYPE_I8 ? 1 : 2;
}

static int32_t blocks_of(const slot *s, int32_t n_tokens) {
    return (n_tokens + s->spec.block - 1) / s->spec.block;
}

/* Tables, and the number of physical blocks. Shared tokens have the blocks of sequence 0. */
static int32_t fill_table(slot *s) {
    const int32_t n_shared = s->spec.shared / s->spec.block;
    int32_t n_blocks = 0;
    for (int32_t i = 0; i < s->spec.n_lens; i++)
        s->max_blocks = PAGED_MAX(s->max_blocks, blocks_of(s, s->lens[i]));
    s->table = take((size_t)s->spec.n_lens * (size_t)s->max_blocks, sizeof *s->table);
    for (int32_t i = 0; i < s->spec.n_lens; i++)
        for (int32_t b = 0; b < s->max_blocks; b++) {
            bool absent = b >= blocks_of(s, s->lens[i]), again = i > 0 && b < n_shared;
            s->table[i * s->max_blocks + b] = absent ? -1 : again ? s->table[b] : n_blocks++;
        }
    if (!s->spec.shuffled) return n_blocks;

    int32_t *order = take((size_t)n_blocks, sizeof *order);
    uint64_t rng = 4;
    for (int32_t i = 0; i < n_blocks; i++) order[i] = i;
    for (int32_t i = n_blocks - 1; i > 0; i--) {
        int32_t j = (int32_t)(paged__rand(&rng) % (uint64_t)(i + 1)), kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
    for (int32_t i = 0; i < s->spec.n_lens * s->max_blocks; i++)
        if (s->table[i] >= 0) s->table[i] = order[s->table[i]];
    paged__free(order);
    return n_blocks;
}

/* Block-major, as mem has it: [block][layer][K | V | scales of K | of V][kv_head]… Or contiguous:
 * [layer][K | V][kv_head][block]…, in which the blocks of a head follow each other. */
static bool map_layers(slot *s, int32_t n_blocks) {
    const spec *c = &s->spec;
    int64_t piece =
        (int64_t)c->block * c->dim * (int64_t)elem_bytes(c->type); /* K of one head in one block */
    int64_t scales = c->type == PAGED_TYPE_I8 ? (int64_t)c->block * (int64_t)sizeof(float) : 0;
    int64_t per_block = 2 * c->kv_heads * (piece + scales);
    s->size_bytes = (size_t)(per_block * n_blocks) * (size_t)c->layers;
    s->bytes = probe_map(s->size_bytes);
    if (!s->bytes) return false;
    for (int32_t l = 0; l < c->layers; l++) {
        paged_kv kv = {.n_blocks = n_blocks,
                       .block_size = c->block,
                       .n_kv_heads = c->kv_heads,
                       .head_dim_k = c->dim,
                       .head_dim_v = c->dim,
                       .type = c->type,
                       .layout = c->layout};
        if (c->contiguous) {
            kv.k = s->bytes + l * per_block * n_blocks;
            kv.block_stride = piece;
            kv.k_head_stride = piece * n_blocks;
        } else {
            kv.k = s->bytes + l * per_block;
            kv.block_stride = per_block * c->layers;
            kv.k_head_stride = piece;
        }
        kv.v = kv.k + c->kv_heads * kv.k_head_stride;
        kv.v_head_stride = kv.k_head_stride;
        if (scales) {
            kv.k_scale = kv.v + c->kv_heads * kv.v_head_stride;
            kv.v_scale = kv.k_scale + c->kv_heads * scales;
            kv.scale_block_stride = kv.block_stride;
            kv.scale_head_stride = scales;
        }
        s->kv[l] = kv;
    }
    return true;
}

static file_map map_file(const char *folder, const char *name, size_t n_floats) {
    char path[512];
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path)
        quit("data: the path is too long");
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0) quit("%s: %s", path, strerror(errno));
    file_map map = {.size_bytes = (size_t)st.st_size};
    if (map.size_bytes < n_floats * sizeof(float))
        quit("%s has %zu bytes, not %zu", path, map.size_bytes, n_floats * sizeof(float));
    map.data = mmap(NULL, map.size_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    if (map.data == MAP_FAILED) quit("%s: %s", path, strerror(errno));
    close(fd);
    return map;
}

static void unmap_file(const file_map *map) {
    munmap((void *)(uintptr_t)map->data, map->size_bytes);
}

/* Where a layer is gathered to. Sequence 0 only. */
static bool map_dense(slot *s) {
    const spec *c = &s->spec;
    int64_t piece = s->kv[0].k_head_stride, n = s->max_blocks;
    s->dense = s->kv[0];
    s->dense.k = probe_map((size_t)(2 * c->kv_heads * piece * n));
    if (!s->dense.k) return false;
    s->dense.v = s->dense.k + c->kv_heads * piece * n;
    s->dense.n_blocks = s->max_blocks;
    s->dense.block_stride = piece;
    s->dense.k_head_stride = s->dense.v_head_stride = piece * n;
    s->dense_table = take((size_t)n, sizeof *s->dense_table);
    for (int32_t i = 0; i < s->max_blocks; i++) s->dense_table[i] = i;
    s->dense_batch = s->batch;
    s->dense_batch.tables.blocks = s->dense_table;
    return true;
}

/* Sums of four are near enough to a normal distribution with deviation 1. */
static void generate(float *out, size_t n, uint64_t seed) {
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = paged__rand(&seed);
        int32_t sum = 0;
        for (int32_t j = 0; j < 64; j += 16) sum += (int32_t)(bits >> j & 0xffff) - 0x8000;
        out[i] = paged__bf16_to_f32(paged__f32_to_bf16((float)sum * (1.0f / 37837.0f)));
    }
}

typedef struct fill {
    const slot *slot;
    const float *k, *v; /* [sum of lens or PATTERN, kv_heads, dim] */
    bool is_pattern;
} fill;

static int64_t slot_of(const slot *s, int32_t seq, int32_t token) {
    return (int64_t)s->table[seq * s->max_blocks + token / s->spec.block] * s->spec.block +
           token % s->spec.block;
}

/* Layer 0 is written as an engine writes it, in chunks of tokens that the threads divide among them. */
static void fill_layer_0(void *arg, team *t, int32_t ith) {
    const fill *f = arg;
    const slot *s = f->slot;
    const int64_t row = (int64_t)s->spec.kv_heads * s->spec.dim;
    int64_t at[PATTERN], before = 0;
    for (int32_t i = 0; i < s->spec.n_lens; before += s->lens[i++]) {
        for (int32_t begin = 0; begin < s->lens[i]; begin += PATTERN) {
            int32_t n = PAGED_MIN(PATTERN, s->lens[i] - begin);
            for (int32_t j = 0; j < n; j++) at[j] = slot_of(s, i, begin + j);
            int64_t first = f->is_pattern ? 0 : (before + begin) * row;
            paged_kv_write(&s->kv[0], f->k + first, 0, f->v + first, 0, at, n, ith, t->n);
        }
    }
}

static void copy_layers(void *arg, team *t, int32_t ith) {
    const fill *f = arg;
    const slot *s = f->slot;
    const paged_kv *kv = &s->kv[0];
    if (s->spec.layers == 1) return;
    size_t layer = (size_t)(s->kv[1].k - kv->k); /* bytes of a layer, in a block or in all */
    int64_t stride = s->spec.contiguous ? (int64_t)layer : kv->block_stride;
    int32_t n = s->spec.contiguous ? 1 : kv->n_blocks;
    for (int32_t l = 1; l < s->spec.layers; l++)
        for (int32_t b = ith; b < n; b += t->n) memcpy(s->kv[l].k + b * stride, kv->k + b * stride, layer);
}

/* Keys and values of the last q tokens of every sequence, of all. */
static void take_fresh(slot *s, const float *k, const float *v) {
    const int64_t row = (int64_t)s->spec.kv_heads * s->spec.dim, n_q = s->cu[s->spec.n_lens], q = s->spec.q;
    s->fresh_k = take((size_t)(n_q * row), sizeof(float));
    s->fresh_v = take((size_t)(n_q * row), sizeof(float));
    s->fresh_slots = take((size_t)n_q, sizeof *s->fresh_slots);
    int64_t before = 0;
    for (int32_t i = 0; i < s->spec.n_lens; before += s->lens[i++]) {
        int64_t from = (before + s->lens[i] - q) * row, to = s->cu[i] * row;
        memcpy(s->fresh_k + to, k + from, (size_t)(q * row) * sizeof(float));
        memcpy(s->fresh_v + to, v + from, (size_t)(q * row) * sizeof(float));
        for (int32_t j = 0; j < q; j++)
            s->fresh_slots[s->cu[i] + j] = slot_of(s, i, s->lens[i] - (int32_t)q + j);
    }
}

static void fill_cache(slot *s) {
    const spec *c = &s->spec;
    const size_t row = (size_t)c->kv_heads * (size_t)c->dim, n_q = (size_t)s->cu[c->n_lens];
    const size_t q_floats = n_q * (size_t)c->heads * (size_t)c->dim;
    fill f = {.slot = s, .is_pattern = !c->data};
    s->q = take(q_floats, sizeof(float));
    s->out = take(q_floats, sizeof(float));
    if (c->data) {
        int64_t n_keys = 0;
        for (int32_t i = 0; i < c->n_lens; i++) n_keys += s->lens[i];
        file_map q = map_file(c->data, "q.f32", q_floats),
                 k = map_file(c->data, "k.f32", (size_t)n_keys * row),
                 v = map_file(c->data, "v.f32", (size_t)n_keys * row);
        memcpy(s->q, q.data, q_floats * sizeof(float));
        f.k = k.data;
        f.v = v.data;
        team_do(&threads, fill_layer_0, &f);
        if (c->write) take_fresh(s, k.data, v.data);
        unmap_file(&q);
        unmap_file(&k);
        unmap_file(&v);
    } else {
        float *k = take(PATTERN * row, sizeof(float)), *v = take(PATTERN * row, sizeof(float));
        generate(k, PATTERN * row, 1);
        generate(v, PATTERN * row, 2);
        generate(s->q, q_floats, 3);
        f.k = k;
        f.v = v;
        team_do(&threads, fill_layer_0, &f);
        paged__free(k);
        paged__free(v);
    }
    team_do(&threads, copy_layers, &f);
}

/* ---- open, close ---- */

static void close_slot(slot *s) {
    paged_attn_free(s->attn);
    if (s->bytes) munmap(s->bytes, s->size_bytes);
    if (s->dense.k) munmap(s->dense.k, (size_t)(2 * s->spec.kv_heads * s->dense.k_head_stride));
    paged__free(s->dense_table);
    paged__free(s->table);
    paged__free(s->q);
    paged__free(s->fresh_k);
    paged__free(s->fresh_v);
    paged__free(s->fresh_slots);
    paged__free(s->out);
    *s = (slot){0};
}

static slot *find_slot(const char *name) {
    for (int32_t i = 0; i < SLOTS_MAX; i++)
        if (strcmp(slots[i].name, name) == 0) return &slots[i];
    return NULL;
}

static paged_status make_attention(slot *s, paged_error *err) {
    const spec *c = &s->spec;
    int32_t max_k = 0, n_keys = 0;
    for (int32_t i = 0; i < c->n_lens; i++) {
        max_k = PAGED_MAX(max_k, s->lens[i]);
        s->cu[i + 1] = s->cu[i] + c->q;
        n_keys += i > 0 && c->cascade ? s->lens[i] - c->shared : s->lens[i];
    }
    s->layer_bytes = 2.0 * n_keys * c->kv_heads * (c->dim * (double)elem_bytes(c->type));
    if (c->type == PAGED_TYPE_I8) s->layer_bytes += 2.0 * n_keys * c->kv_heads * (double)sizeof(float);
    const paged_attn_config config = {.struct_size = sizeof config,
                                      .n_heads = c->heads,
                                      .n_kv_heads = c->kv_heads,
                                      .head_dim_k = c->dim,
                                      .block_size = c->block,
                                      .type = c->type,
                                      .layout = c->layout,
                                      .n_threads_max = threads.n,
                                      .max_q = s->cu[c->n_lens],
                                      .max_seqs = c->n_lens,
                                      .max_k = max_k,
                                      .max_shared_q = c->cascade ? s->cu[c->n_lens] : 0};
    return paged_attn_create(&config, &s->attn, err);
}

static paged_status plan(slot *s, paged_error *err) {
    if (s->spec.gather) return paged_attn_plan(s->attn, &s->dense_batch, &s->dense, err);
    return paged_attn_plan(s->attn, &s->batch, &s->kv[0], err);
}

static paged_status fill_slot(slot *s, paged_error *err) {
    const spec *c = &s->spec;
    paged_status status = make_attention(s, err);
    if (status) return status;
    int32_t n_blocks = fill_table(s);
    if (!map_layers(s, n_blocks))
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for %zu bytes of keys and values",
                           s->size_bytes);
    s->shared = (paged_shared){.first_seq = 0, .n_seqs = c->n_lens, .n_tokens = c->shared};
    s->batch = (paged_batch){.cu_seqlens_q = s->cu,
                             .tables = {.blocks = s->table,
                                        .seq_stride = s->max_blocks,
                                        .seqlens_k = s->lens,
                                        .n_seqs = c->n_lens,
                                        .max_blocks = s->max_blocks},
                             .n_shared = c->cascade,
                             .shared = &s->shared};
    if (c->gather && !map_dense(s))
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory to gather %d blocks", s->max_blocks);
    status = plan(s, err);
    if (!status && c->gather) status = paged_kv_gather(&s->kv[0], &s->batch.tables, 0, &s->dense, 0, 1, err);
    if (!status) fill_cache(s);
    return status;
}

/* The reason, without what would end a JSON string. */
static void answer_skip(paged_error *err) {
    for (char *c = err->message; *c; c++)
        if (*c == '"' || *c == '\\' || (unsigned char)*c < ' ') *c = '\'';
    printf("{\"skip\": \"%s\"}\n", err->message);
}

static void command_open(const char *name, char *words) {
    slot *s = find_slot("");
    if (!*name || strlen(name) >= sizeof s->name || find_slot(name) || !s)
        quit("open %s: no, or too many", name);
    s->spec = parse_spec(words, s->lens);
    paged_error err = {0};
    paged_status status = fill_slot(s, &err);
    if (status) {
        close_slot(s);
        answer_skip(&err);
        return;
    }
    memcpy(s->name, name, strlen(name) + 1);
    s->spec.data = NULL; /* pointed into the line */
    printf("{\"bytes\": %.0f, \"layers\": %d, \"kernels\": \"%s\", \"threads\": %d, \"huge\": %.3f}\n",
           s->layer_bytes, s->spec.layers, paged_attn_kernels(s->attn), threads.n, probe_huge_share());
}

/* ---- measuring ---- */

typedef struct run {
    slot *slot;
    int32_t n_times;
} run;

static void run_job(void *arg, team *t, int32_t ith) {
    const run *r = arg;
    slot *s = r->slot;
    const paged_attn_io io = {.q = s->q, .out = s->out};
    if (ith == 0) {
        paged_status status = plan(s, NULL);
        if (status) quit("plan: %s", paged_status_text(status)); /* it went well before */
    }
    team_wait(t);
    const bool merges = paged_attn_needs_merge(s->attn);
    for (int32_t n = 0; n < r->n_times; n++) {
        for (int32_t l = 0; l < s->spec.layers; l++) {
            if (s->fresh_slots) {
                paged_kv_write(&s->kv[l], s->fresh_k, 0, s->fresh_v, 0, s->fresh_slots, s->cu[s->spec.n_lens],
                               ith, t->n);
                team_wait(t);
            }
            const paged_kv *kv = &s->kv[l];
            if (s->spec.gather) {
                paged_kv_gather(kv, &s->batch.tables, 0, &s->dense, ith, t->n, NULL);
                team_wait(t);
                kv = &s->dense;
            }
            paged_attn_run(s->attn, kv, &io, ith, t->n);
            team_wait(t);
            if (!merges) continue;
            paged_attn_merge(s->attn, &io, ith, t->n);
            team_wait(t);
        }
    }
}

static void answer_time(team_time time, const char *what, double amount) {
    printf("{\"seconds\": %.9f, \"cpu_seconds\": %.9f, \"%s\": %.0f}\n", time.seconds, time.cpu_seconds, what,
           amount);
}

static void command_run(slot *s, int32_t n_times) {
    run r = {s, n_times};
    answer_time(team_do(&threads, run_job, &r), "calls", (double)n_times * s->spec.layers);
}

static void command_plan(slot *s, int32_t n_times) {
    double cpu = team_clock(CLOCK_THREAD_CPUTIME_ID), wall = team_clock(CLOCK_MONOTONIC);
    for (int32_t i = 0; i < n_times; i++) {
        paged_status status = plan(s, NULL);
        if (status) quit("plan: %s", paged_status_text(status));
    }
    team_time time = {team_clock(CLOCK_MONOTONIC) - wall, team_clock(CLOCK_THREAD_CPUTIME_ID) - cpu};
    answer_time(time, "calls", n_times);
}

static void command_out(const slot *s, const char *path) {
    size_t n = (size_t)s->cu[s->spec.n_lens] * (size_t)s->spec.heads * (size_t)s->spec.dim;
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(s->out, sizeof(float), n, file) != n || fclose(file) != 0)
        quit("%s: %s", path, strerror(errno));
    puts("{}");
}

static void command_probe(void) {
    static probe_read probe;
    if (!probe.bytes) {
        uint8_t *bytes = probe_map(PROBE_BYTES);
        if (!bytes) quit("no memory for the probe");
        memset(bytes, 1, PROBE_BYTES); /* untouched pages would all be one page of zeros */
        probe.bytes = bytes;
    }
    answer_time(team_do(&threads, probe_read_job, &probe), "bytes", (double)probe_read_bytes(&threads));
}

static void command_peak(const char *kind_name) {
    for (int32_t kind = 0; kind < PROBE_N_KINDS; kind++) {
        if (strcmp(probe_kinds[kind].name, kind_name) != 0) continue;
        double ops = probe_products_ops((probe_kind)kind, &threads);
        probe_products probe = {.kind = (probe_kind)kind};
        if (ops > 0)
            answer_time(team_do(&threads, probe_products_job, &probe), "ops", ops);
        else
            puts("{\"skip\": \"the CPU has no such instruction\"}");
        return;
    }
    quit("peak %s: not f32, bf16, i8 or amx", kind_name);
}

static slot *need_slot(const char *name) {
    slot *s = *name ? find_slot(name) : NULL;
    if (!s) quit("nothing is open under the name `%s`", name);
    return s;
}

static void command(char *line) {
    char *rest = NULL, *verb = strtok_r(line, " \n", &rest), *name = strtok_r(NULL, " \n", &rest),
         *words = strtok_r(NULL, "\n", &rest);
    if (!verb) quit("an empty command");
    if (!name) name = "";
    char none[] = "";
    if (!words) words = none;
    if (strcmp(verb, "open") == 0)
        command_open(name, words);
    else if (strcmp(verb, "run") == 0)
        command_run(need_slot(name), parse_number(verb, words));
    else if (strcmp(verb, "plan") == 0)
        command_plan(need_slot(name), parse_number(verb, words));
    else if (strcmp(verb, "out") == 0)
        command_out(need_slot(name), words);
    else if (strcmp(verb, "close") == 0)
        close_slot(need_slot(name)), puts("{}");
    else if (strcmp(verb, "probe") == 0)
        command_probe();
    else if (strcmp(verb, "peak") == 0)
        command_peak(name);
    else
        quit("no command `%s`", verb);
    fflush(stdout);
}

int main(void) {
    static char line[4096];
    if (!team_start(&threads)) quit("no threads: %s", strerror(errno));
    while (fgets(line, sizeof line, stdin)) command(line);
    for (int32_t i = 0; i < SLOTS_MAX; i++)
        if (*slots[i].name) close_slot(&slots[i]);
    team_end(&threads);
    return EXIT_SUCCESS;
}
