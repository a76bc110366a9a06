/* fuzz_plan.c: no batch makes paged_attn_plan accept what a run then reads outside of. Bytes become an
 * attention object, a cache, tables and a batch, most of them nearly right; every array and the cache have
 * exactly the size that their shape says, so that AddressSanitizer sees one entry too many. Where a plan is
 * accepted, the promises of ops.h are checked too: finite results for finite inputs, the same bits for other
 * threads and without a cascade. A refused plan names its reason and leaves a run nothing to do.
 *
 * With libFuzzer (-DPAGED_FUZZ=ON):
 *     fuzz_plan -max_len=512 NEW_FOLDER tests/fuzz/corpus/plan
 * Without, it replays files, and the files of folders:
 *     fuzz_plan tests/fuzz/corpus/plan
 *
 * The corpus was found by the fuzzer from random bytes; it is what -set_cover_merge=1 -use_counters=0 left.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/base.h"
#include "paged/ops.h"

#define MUST(cond)                                                                                           \
    do {                                                                                                     \
        if (!(cond)) {                                                                                       \
            fprintf(stderr, "%s:%d: broken promise: %s\n", __FILE__, __LINE__, #cond);                       \
            __builtin_trap();                                                                                \
        }                                                                                                    \
    } while (0)

enum { SEQS = 6, POOL_MAX = 1 << 20, HEADS_MAX = 8, QUERIES_MAX = 40 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

/* ---- bytes to numbers ---- */

typedef struct reader {
    const uint8_t *data;
    size_t n_bytes;
} reader;

static uint8_t byte(reader *r) {
    if (r->n_bytes == 0) return 0;
    r->n_bytes--;
    return *r->data++;
}

/* low … high, and rarely anything. */
static int32_t number(reader *r, int32_t low, int32_t high) {
    uint8_t b = byte(r);
    if (b == 255) {
        uint32_t any = 0;
        for (int32_t i = 0; i < 4; i++) any = any << 8 | byte(r);
        return (int32_t)any;
    }
    uint32_t wide = high - low > 200 ? (uint32_t)b << 8 | byte(r) : b;
    return low + (int32_t)(wide % (uint32_t)(high - low + 1));
}

static void *take(int64_t n, size_t elem) {
    void *p = calloc(n > 0 ? (size_t)n : 1, elem); /* at least one, since a size of 0 has no end to cross */
    MUST(p);
    return p;
}

/* ---- the scene ---- */

typedef struct scene {
    paged_attn_config config;
    float slopes[HEADS_MAX], sinks[HEADS_MAX];
    paged_kv kv;
    uint8_t *pool;
    paged_batch batch;
    int32_t *blocks, *rows, *seqlens_k, *first_k, *tail_tiles, *cu;
    paged_shared *shared;
    int32_t nth;
} scene;

static void read_config(reader *r, scene *s) {
    static const int32_t kv_heads[] = {1, 2, 3, 4}, dims[] = {8, 16, 18, 33},
                         sizes[] = {16, 32, 48, 64, 1, 3, 100, 1024};
    int32_t n_kv = kv_heads[byte(r) % 4], group = 1 + byte(r) % 2;
    s->config = (paged_attn_config){.struct_size = sizeof s->config,
                                    .n_heads = n_kv * group,
                                    .n_kv_heads = n_kv,
                                    .head_dim_k = dims[byte(r) % 4],
                                    .head_dim_v = dims[byte(r) % 4],
                                    .block_size = sizes[byte(r) % 8],
                                    .type = (paged_type)(byte(r) % 3),
                                    .layout = (paged_layout)(byte(r) % 2),
                                    .n_threads_max = 4,
                                    .max_q = number(r, 1, QUERIES_MAX),
                                    .max_seqs = number(r, 1, SEQS),
                                    .max_k = number(r, 1, 2000),
                                    .max_shared_q = number(r, 0, QUERIES_MAX)};
    uint8_t flags = byte(r);
    s->config.non_causal = flags & 1;
    s->config.window = flags & 2 ? number(r, 1, 700) : 0;
    s->config.softcap = flags & 4 ? 20 : 0;
    s->config.alibi = flags & 8 ? s->slopes : NULL;
    for (int32_t h = 0; h < HEADS_MAX; h++) s->slopes[h] = 0.5f / (float)(h + 1);
    for (int32_t h = 0; h < HEADS_MAX; h++) s->sinks[h] = flags & 16 ? (float)h : -INFINITY;
    /* Larger ones only cost time. */
    s->config.max_q = PAGED_MIN(s->config.max_q, QUERIES_MAX);
    s->config.max_seqs = PAGED_MIN(s->config.max_seqs, SEQS);
    s->config.max_k = PAGED_MIN(s->config.max_k, 4000);
    s->config.max_shared_q = PAGED_MIN(s->config.max_shared_q, QUERIES_MAX);
}

/* Strides as small as can be, or with a gap, or anything. The pool ends with the last element; NULL where it
 * would be too large. */
static void read_kv(reader *r, scene *s) {
    const paged_attn_config *c = &s->config;
    int64_t elem = c->type == PAGED_TYPE_F32 ? 4 : 2, k = elem * c->block_size * c->head_dim_k,
            v = elem * c->block_size * c->head_dim_v;
    uint8_t flags = byte(r);
    s->kv = (paged_kv){.block_size = c->block_size,
                       .n_kv_heads = c->n_kv_heads,
                       .head_dim_k = c->head_dim_k,
                       .head_dim_v = c->head_dim_v,
                       .type = c->type,
                       .layout = c->layout};
    s->kv.n_blocks = number(r, 0, 40);
    s->kv.k_head_stride = flags & 1 ? 0 : k + (flags & 2 ? elem * byte(r) : 0);
    s->kv.v_head_stride = flags & 1 ? 0 : v + (flags & 4 ? elem * byte(r) : 0);
    s->kv.block_stride = (flags & 1 ? 1 : c->n_kv_heads) * (k + v) + (flags & 8 ? elem * (byte(r) - 64) : 0);
    if (flags & 16) s->kv.k_head_stride = number(r, -9, 9) * elem;
    int64_t n_blocks = s->kv.n_blocks, heads = c->n_kv_heads - 1, size = 0,
            v_at = flags & 1 ? k : c->n_kv_heads * k;
    if (n_blocks > 0 && n_blocks < 100 && s->kv.k_head_stride >= 0 && s->kv.block_stride >= 0)
        size = PAGED_MAX((n_blocks - 1) * s->kv.block_stride + heads * s->kv.k_head_stride + k,
                         (n_blocks - 1) * s->kv.block_stride + heads * s->kv.v_head_stride + v + v_at);
    if (size <= 0 || size > POOL_MAX) return;
    s->pool = take(size / 2, 2);
    for (int64_t i = 0; i < size / 2; i++) { /* finite and of moderate size in every type */
        uint16_t half = (uint16_t)(0x3800 | (paged__mix((uint64_t)i) & 0x87ff));
        memcpy(s->pool + 2 * i, &half, 2);
    }
    s->kv.k = s->pool;
    s->kv.v = s->pool + v_at;
}

/* An id below n, rarely another. */
static int32_t id(reader *r, int32_t n) {
    uint8_t b = byte(r);
    return b >= 250 ? number(r, -2, n + 1) : n > 0 ? b % n : 0;
}

/* As many as the arrays are for: more are refused, so nobody looks at them. */
static int32_t n_seqs_of(const scene *s) {
    int32_t n = s->batch.tables.n_seqs;
    return n < 0 || n > SEQS ? 0 : n;
}

static void read_tables(reader *r, scene *s) {
    paged_tables *t = &s->batch.tables;
    uint8_t flags = byte(r);
    t->n_seqs = number(r, 0, SEQS);
    t->max_blocks = number(r, 0, 40);
    int32_t n_seqs = n_seqs_of(s), n_rows = SEQS;
    t->head_stride = flags & 1 ? t->max_blocks + (byte(r) >> 6) - 1 : 0;
    t->seq_stride = (flags & 1 ? s->config.n_kv_heads : 1) * (int64_t)t->max_blocks + (byte(r) >> 6) - 1;
    bool small = t->max_blocks >= 0 && t->max_blocks < 1000 && t->seq_stride < 10000;
    int64_t row = small ? PAGED_MAX(t->seq_stride, 0) : 0, head = small ? PAGED_MAX(t->head_stride, 0) : 0,
            n = small ? (n_rows - 1) * row + (s->config.n_kv_heads - 1) * head + t->max_blocks : 0;
    s->seqlens_k = take(n_seqs, sizeof(int32_t));
    s->first_k = take(n_seqs, sizeof(int32_t));
    s->rows = take(n_seqs, sizeof(int32_t));
    for (int32_t i = 0; i < n_seqs; i++) {
        s->seqlens_k[i] = number(r, 0, 2000);
        s->first_k[i] = number(r, 0, 300);
        s->rows[i] = flags & 2 ? id(r, n_rows) : i;
        if (s->rows[i] >= n_rows) s->rows[i] = 0; /* how many rows there are is the caller's to know */
    }
    s->blocks = take(n, sizeof(int32_t));
    int32_t common = number(r, 0, 40); /* so that prefixes may be common: the first entries of all rows */
    for (int64_t i = 0; i < n; i++)
        s->blocks[i] = row > 0 && i >= row && i % row < common ? s->blocks[i % row] : id(r, s->kv.n_blocks);
    int32_t block_tiles = s->config.block_size / PAGED_TILE;
    s->tail_tiles = take((int64_t)n_rows * block_tiles, sizeof(int32_t));
    for (int32_t i = 0; flags & 8 && i < n_rows * block_tiles; i++)
        s->tail_tiles[i] = id(r, PAGED_MAX(PAGED_MIN(s->kv.n_blocks, 40), 0) * block_tiles);
    t->blocks = small ? s->blocks : NULL; /* else as large as no table is */
    t->rows = flags & 2 ? s->rows : NULL;
    t->seqlens_k = s->seqlens_k;
    t->first_k = flags & 4 ? s->first_k : NULL;
    t->tail_tiles = flags & 8 ? s->tail_tiles : NULL;
}

static void read_batch(reader *r, scene *s) {
    int32_t n_seqs = n_seqs_of(s);
    s->cu = take(n_seqs + 1, sizeof(int32_t));
    for (int32_t i = 0; i < n_seqs; i++) {
        int64_t end = (int64_t)s->cu[i] + number(r, 0, 5);
        s->cu[i + 1] = (int32_t)PAGED_MIN(PAGED_MAX(end, INT32_MIN), INT32_MAX);
    }
    s->batch.cu_seqlens_q = s->cu;
    s->batch.n_shared = number(r, 0, 2);
    int32_t n_shared = s->batch.n_shared < 0 || s->batch.n_shared > 50 ? 0 : s->batch.n_shared;
    if (n_shared != s->batch.n_shared) s->batch.n_shared = -1;
    s->shared = take(n_shared, sizeof *s->shared);
    for (int32_t i = 0; i < n_shared; i++)
        s->shared[i] = (paged_shared){number(r, 0, 4), number(r, 1, 4), number(r, 500, 1600)};
    s->batch.shared = s->shared;
    s->nth = 1 + byte(r) % 4;
}

static void scene_free(scene *s) {
    free(s->pool);
    free(s->blocks);
    free(s->rows);
    free(s->seqlens_k);
    free(s->first_k);
    free(s->tail_tiles);
    free(s->cu);
    free(s->shared);
}

/* ---- promises ---- */

static void run_all(const scene *s, paged_attn *attn, int32_t nth, const float *q, float *out) {
    const paged_attn_io io = {.q = q, .out = out, .sinks = s->sinks};
    for (int32_t i = 0; i < nth; i++) paged_attn_run(attn, &s->kv, &io, i, nth);
    for (int32_t i = 0; i < nth; i++) paged_attn_merge(attn, &io, i, nth);
}

static void check_accepted(const scene *s, paged_attn *attn) {
    int64_t n_q = s->cu[n_seqs_of(s)];
    int64_t n_in = n_q * s->config.n_heads * s->config.head_dim_k,
            n_out = n_q * s->config.n_heads * s->config.head_dim_v;
    float *q = take(n_in, sizeof *q), *out = take(n_out, sizeof *out), *other = take(n_out, sizeof *other);
    for (int64_t i = 0; i < n_in; i++) q[i] = (float)(paged__mix((uint64_t)i) % 64) / 32 - 1;
    run_all(s, attn, s->nth, q, out);
    for (int64_t i = 0; i < n_out; i++) MUST(isfinite(out[i]));
    paged_batch plain = s->batch;
    plain.n_shared = 0;
    MUST(paged_attn_plan(attn, &plain, &s->kv, NULL) == PAGED_OK);
    run_all(s, attn, 1, q, other);
    MUST(memcmp(out, other, (size_t)n_out * sizeof *out) == 0);
    free(q);
    free(out);
    free(other);
}

/* A copy of each sequence, whatever the plan said. */
static void check_gather(const scene *s) {
    int64_t elem = s->kv.type == PAGED_TYPE_F32 ? 4 : 2;
    paged_kv to = s->kv;
    to.n_blocks = 20;
    to.k_head_stride = elem * to.block_size * to.head_dim_k;
    to.v_head_stride = elem * to.block_size * to.head_dim_v;
    to.block_stride = to.n_kv_heads * (to.k_head_stride + to.v_head_stride);
    uint8_t *bytes = take(to.n_blocks * to.block_stride, 1);
    to.k = bytes;
    to.v = bytes + to.n_kv_heads * to.k_head_stride;
    for (int32_t seq = 0; seq < n_seqs_of(s); seq++) {
        paged_error err = {.status = PAGED_OK};
        if (paged_kv_gather(&s->kv, &s->batch.tables, seq, &to, 0, 1, &err)) MUST(err.message[0]);
    }
    free(bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    reader r = {data, n_bytes};
    scene s = {.pool = NULL};
    paged_attn *attn = NULL;
    paged_error err = {.status = PAGED_OK};
    read_config(&r, &s);
    if (paged_attn_create(&s.config, &attn, &err)) {
        MUST(!attn && err.message[0]);
        return 0;
    }
    read_kv(&r, &s);
    read_tables(&r, &s);
    read_batch(&r, &s);
    paged_status status = paged_attn_plan(attn, &s.batch, &s.kv, &err);
    if (status == PAGED_OK) {
        check_accepted(&s, attn);
    } else {
        MUST(err.status == status && err.message[0] && !paged_attn_needs_merge(attn));
        run_all(&s, attn, 1, NULL, NULL);
    }
    check_gather(&s);
    paged_attn_free(attn);
    scene_free(&s);
    return 0;
}

#ifndef PAGED_LIBFUZZER
#include "replay.h"

int main(int argc, char **argv) {
    return replay_main(argc, argv, LLVMFuzzerTestOneInput);
}
#endif
