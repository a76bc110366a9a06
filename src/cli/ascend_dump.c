/* cli/ascend_dump.c: a call with random inputs and its golden result as files: arrays (.npy), manifest.json,
 * and compare.py of src/cli/static/. Who has a card runs the call there and compares; nothing here did.
 *
 * The golden result is computed in double precision from the inputs as they are stored, over rows of keys in
 * the order of tokens: no block, no layout and no kernel has a part in it. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/base.h"
#include "cli/ascend.h"
#include "cli/session.h"
#include "paged/kv.h"

#define MAX_BYTES ((int64_t)1 << 30) /* of a cache, of rows, of queries, of the table */
#define MAX_WORK  1e10               /* multiplications, of about 5 ns each: less than a minute */

/* K, V or the rotated part of K: rows [n_keys, n_heads, dim] in the order of tokens, and the cache. */
typedef struct part {
    const char *name; /* "k" */
    int32_t dim;
    uint8_t *rows, *cache;
    float *scale; /* int8: [n_heads, dim], per channel */
} part;

typedef struct dump {
    paged__cli *cli;
    const paged_ascend_config *c;
    const char *path;
    uint64_t rng;
    int32_t *table; /* [batch, table_cols] */
    int64_t *lens_q, *lens_k, *starts_k, *starts_q, *slots;
    int64_t n_keys, n_queries; /* rows of all sequences; of queries with those that pad */
    part parts[3];
    int32_t n_parts;
    uint8_t *q, *q_rope;
    float *out, *lse;
    json_t *files, *results;
} dump;

static bool has_queries(const paged_ascend_config *c) {
    return c->path != PAGED_ASCEND_SCATTER && c->path != PAGED_ASCEND_GATHER;
}
static bool is_tnd(const paged_ascend_config *c) {
    return c->path == PAGED_ASCEND_ATB || c->q_layout == PAGED_ASCEND_Q_TND;
}
static int64_t elem_of(int32_t type) {
    return type == PAGED_TYPE_F32 ? 4 : type == PAGED_TYPE_I8 ? 1 : 2;
}

static void free_dump(dump *d) {
    void *const all[] = {d->table, d->lens_q, d->lens_k, d->starts_k, d->starts_q,
                         d->slots, d->q,      d->q_rope, d->out,      d->lse};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) paged__free(all[i]);
    for (int32_t i = 0; i < 3; i++) {
        paged__free(d->parts[i].rows);
        paged__free(d->parts[i].cache);
        paged__free(d->parts[i].scale);
    }
    json_decref(d->files);
    json_decref(d->results);
}

static int no_memory(dump *d) {
    return paged__error(d->cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
}

/* ---- files ---- */

static FILE *open_file(dump *d, const char *name, char *path, size_t size) {
    if (snprintf(path, size, "%s/%s", d->path, name) >= (int)size) {
        paged__error(d->cli, "the name of the folder is too long");
        return NULL;
    }
    FILE *file = fopen(path, "we");
    if (!file) paged__error(d->cli, "cannot write %s: %s", path, strerror(errno));
    return file;
}

static int write_file(dump *d, const char *name, const void *head, size_t head_bytes, const void *data,
                      size_t size_bytes) {
    char path[1024];
    FILE *file = open_file(d, name, path, sizeof path);
    if (!file) return PAGED__EXIT_ERROR;
    bool whole = fwrite(head, 1, head_bytes, file) == head_bytes;
    if (size_bytes) whole = fwrite(data, 1, size_bytes, file) == size_bytes && whole;
    if (fclose(file) != 0 || !whole)
        return paged__error(d->cli, "cannot write %s: %s", path, strerror(errno));
    return PAGED__EXIT_OK;
}

/* NumPy's format, version 1.0: magic, length of the header, a Python dict that ends at a multiple of 64. */
static int write_npy(dump *d, const char *name, const char *descr, const int64_t *axes, int32_t n_axes,
                     const void *data, const char *what) {
    char head[256] = "\x93NUMPY\x01\x00..", shape[128] = "", file_name[64];
    json_t *list = json_array();
    int64_t n = descr[2] - '0';
    for (int32_t i = 0; i < n_axes; i++) {
        size_t len = strlen(shape);
        snprintf(shape + len, sizeof shape - len, "%lld, ", (long long)axes[i]);
        json_array_append_new(list, json_integer(axes[i]));
        n *= axes[i];
    }
    int len = snprintf(head + 10, sizeof head - 10,
                       "{'descr': '%s', 'fortran_order': False, 'shape': (%s), }", descr, shape);
    size_t end = ((size_t)len + 10 + 1 + 63) / 64 * 64;
    memset(head + 10 + len, ' ', end - 10 - (size_t)len);
    head[end - 1] = '\n';
    head[8] = (char)((end - 10) & 0xff);
    head[9] = (char)((end - 10) >> 8);
    snprintf(file_name, sizeof file_name, "%s.npy", name);
    json_array_append_new(d->files, json_pack("{s:s, s:s, s:o, s:s}", "file", file_name, "dtype", descr,
                                              "shape", list, "what", what));
    return write_file(d, file_name, head, end, data, (size_t)n);
}

/* bf16 as its bits. */
static const char *descr_of(int32_t type) {
    static const char *const names[] = {"<f2", "<f4", "<u2", "|i1"};
    return names[type];
}

/* ---- inputs ---- */

static double uniform(dump *d) {
    return (double)(paged__rand(&d->rng) >> 11) * 0x1p-52 - 1;
} /* [-1, 1) */

static void fill_random(dump *d, int32_t type, uint8_t *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float x = (float)uniform(d);
        uint16_t half = type == PAGED_TYPE_BF16 ? paged__f32_to_bf16(x) : paged__f32_to_f16(x);
        int8_t byte = (int8_t)(x * 127);
        if (type == PAGED_TYPE_I8)
            memcpy(out + i, &byte, 1);
        else
            memcpy(out + 2 * i, &half, 2);
    }
}

static double value_at(int32_t type, const uint8_t *data, int64_t i) {
    uint16_t half;
    if (type == PAGED_TYPE_I8) return (double)(int8_t)data[i];
    memcpy(&half, data + 2 * i, 2);
    return (double)(type == PAGED_TYPE_BF16 ? paged__bf16_to_f32(half) : paged__f16_to_f32(half));
}

/* The first sequence is as long as it can be, the others are of any length. */
static int make_lengths(dump *d) {
    const paged_ascend_config *c = d->c;
    size_t n = (size_t)c->batch;
    d->lens_q = paged__alloc(n, sizeof *d->lens_q);
    d->lens_k = paged__alloc(n, sizeof *d->lens_k);
    d->starts_q = paged__alloc(n, sizeof *d->starts_q);
    d->starts_k = paged__alloc(n, sizeof *d->starts_k);
    if (!d->lens_q || !d->lens_k || !d->starts_q || !d->starts_k) return no_memory(d);
    for (int32_t s = 0; s < c->batch; s++) {
        int64_t k =
            s == 0 || c->max_k == 0 ? c->max_k : 1 + (int64_t)(paged__rand(&d->rng) % (uint64_t)c->max_k);
        int64_t most = PAGED_MAX(PAGED_MIN(k, (int64_t)c->max_q), 1);
        int64_t q = s == 0 ? PAGED_MIN(most, c->max_q) : 1 + (int64_t)(paged__rand(&d->rng) % (uint64_t)most);
        d->lens_k[s] = k;
        d->lens_q[s] = has_queries(c) ? q : 0;
        d->starts_k[s] = d->n_keys;
        d->starts_q[s] = d->n_queries;
        d->n_keys += k;
        d->n_queries += is_tnd(c) ? d->lens_q[s] : has_queries(c) ? c->max_q : 0;
    }
    return PAGED__EXIT_OK;
}

/* Blocks in any order, none twice; -1 behind the keys. */
static int make_table(dump *d) {
    const paged_ascend_config *c = d->c;
    int64_t cols = ((int64_t)c->max_k + c->block_size - 1) / c->block_size, taken = 0;
    cols = has_queries(c) || c->path == PAGED_ASCEND_GATHER ? c->table_cols : PAGED_MAX(cols, 1);
    int32_t *free_blocks = paged__alloc((size_t)c->n_blocks, sizeof *free_blocks);
    d->table = paged__alloc((size_t)(c->batch * cols), sizeof *d->table);
    d->slots = paged__alloc((size_t)d->n_keys, sizeof *d->slots);
    if (!free_blocks || !d->table || !d->slots) {
        paged__free(free_blocks);
        return no_memory(d);
    }
    for (int32_t i = 0; i < c->n_blocks; i++) free_blocks[i] = i;
    for (int32_t s = 0; s < c->batch; s++)
        for (int64_t i = 0; i < cols; i++) {
            int32_t *entry = &d->table[s * cols + i];
            *entry = -1;
            if (i * c->block_size >= d->lens_k[s]) continue;
            if (taken == c->n_blocks) {
                paged__free(free_blocks);
                return paged__error(d->cli,
                                    "the sequences of the dump take more than the %d blocks of the pool",
                                    c->n_blocks);
            }
            int64_t pick = taken + (int64_t)(paged__rand(&d->rng) % (uint64_t)(c->n_blocks - taken));
            *entry = free_blocks[pick];
            free_blocks[pick] = free_blocks[taken++];
            int64_t end = PAGED_MIN((i + 1) * c->block_size, d->lens_k[s]);
            for (int64_t t = i * c->block_size; t < end; t++)
                d->slots[d->starts_k[s] + t] = (int64_t)*entry * c->block_size + t % c->block_size;
        }
    paged__free(free_blocks);
    const int64_t axes[2] = {c->batch, cols};
    return write_npy(d, "block_table", "<i4", axes, 2, d->table,
                     "logical to physical block, -1 behind the keys");
}

/* Rows, and the cache with the rows in their slots and zeros elsewhere. */
static int make_part(dump *d, const char *name, int32_t dim) {
    const paged_ascend_config *c = d->c;
    part *p = &d->parts[d->n_parts++];
    int64_t elem = elem_of(c->kv_type), row = (int64_t)c->n_kv_heads * dim,
            n = (int64_t)c->n_blocks * c->block_size;
    *p = (part){.name = name, .dim = dim};
    p->rows = paged__alloc((size_t)(d->n_keys * row), (size_t)elem);
    p->cache = paged__calloc((size_t)(n * row), (size_t)elem);
    if (!p->rows || !p->cache) return no_memory(d);
    fill_random(d, c->kv_type, p->rows, d->n_keys * row);
    for (int64_t t = 0; t < d->n_keys; t++)
        memcpy(p->cache + d->slots[t] * row * elem, p->rows + t * row * elem, (size_t)(row * elem));
    if (c->kv_type != PAGED_TYPE_I8 || !has_queries(c)) return PAGED__EXIT_OK;
    uint16_t *scale = paged__alloc((size_t)row, sizeof *scale);
    p->scale = paged__alloc((size_t)row, sizeof *p->scale);
    if (!scale || !p->scale) {
        paged__free(scale);
        return no_memory(d);
    }
    for (int64_t i = 0; i < row; i++) {
        float x = (float)((1.5 + 0.5 * uniform(d)) / 127);
        scale[i] = c->q_type == PAGED_TYPE_BF16 ? paged__f32_to_bf16(x) : paged__f32_to_f16(x);
        p->scale[i] =
            c->q_type == PAGED_TYPE_BF16 ? paged__bf16_to_f32(scale[i]) : paged__f16_to_f32(scale[i]);
    }
    char file[32];
    const int64_t axes[2] = {c->n_kv_heads, dim};
    snprintf(file, sizeof file, "%s_scale", name);
    int code = write_npy(d, file, descr_of(c->q_type), axes, 2, scale,
                         "per channel: an element is value × scale, mode 0");
    paged__free(scale);
    return code;
}

/* From [slot][head][d], which is BnBsH, to the layout of the call. */
static int write_cache(dump *d, const part *p, const char *prefix) {
    const paged_ascend_config *c = d->c;
    paged_error err;
    int64_t axes[5];
    int32_t n_axes;
    char name[48];
    size_t n = (size_t)c->n_blocks * (size_t)c->block_size * (size_t)c->n_kv_heads * (size_t)p->dim;
    if (paged_ascend_shape((paged_ascend_layout)c->kv_layout, (paged_type)c->kv_type, c->n_blocks,
                           c->block_size, c->n_kv_heads, p->dim, axes, &n_axes, &err) != PAGED_OK)
        return paged__error(d->cli, "%s", err.message);
    void *cache = paged__alloc(n, (size_t)elem_of(c->kv_type));
    if (!cache) return no_memory(d);
    int code = PAGED__EXIT_OK;
    if (paged_ascend_convert(PAGED_ASCEND_BNBSH, (paged_ascend_layout)c->kv_layout, (paged_type)c->kv_type,
                             c->n_blocks, c->block_size, c->n_kv_heads, p->dim, p->cache, cache,
                             &err) != PAGED_OK)
        code = paged__error(d->cli, "%s", err.message);
    snprintf(name, sizeof name, "%s%s_cache", prefix, p->name);
    if (code == PAGED__EXIT_OK)
        code = write_npy(d, name, descr_of(c->kv_type), axes, n_axes, cache,
                         prefix[0] ? "the cache after the call; it is all zeros before"
                                   : "the cache, zeros in unused slots");
    paged__free(cache);
    return code;
}

static int write_rows(dump *d, const part *p, const char *prefix) {
    const int64_t axes[3] = {d->n_keys, d->c->n_kv_heads, p->dim};
    char name[48];
    snprintf(name, sizeof name, "%s%s_rows", prefix, p->name);
    return write_npy(d, name, descr_of(d->c->kv_type), axes, 3, p->rows,
                     "a row for each token of each sequence");
}

/* ---- queries and the golden result ---- */

/* Of query i of sequence s and head h, in rows of one head. */
static int64_t q_row(const dump *d, int32_t s, int64_t i, int32_t h) {
    const paged_ascend_config *c = d->c;
    if (!is_tnd(c) && c->q_layout == PAGED_ASCEND_Q_BNSD) return ((int64_t)s * c->n_heads + h) * c->max_q + i;
    return (d->starts_q[s] + i) * c->n_heads + h;
}

static int64_t lse_row(const dump *d, int32_t s, int64_t i, int32_t h) {
    const paged_ascend_config *c = d->c;
    if (is_tnd(c)) return (d->starts_q[s] + i) * c->n_heads + h;
    return ((int64_t)s * c->n_heads + h) * c->max_q + i;
}

/* Axes of an array with dim elements in a head, as the query layout has them. */
static int32_t q_axes(const dump *d, int32_t dim, int64_t axes[4]) {
    const paged_ascend_config *c = d->c;
    int64_t b = c->batch, s = c->max_q, n = c->n_heads;
    if (is_tnd(c)) {
        memcpy(axes, (const int64_t[]){d->n_queries, n, dim}, 3 * sizeof *axes);
        return 3;
    }
    if (c->q_layout == PAGED_ASCEND_Q_BSH) {
        memcpy(axes, (const int64_t[]){b, s, n * dim}, 3 * sizeof *axes);
        return 3;
    }
    bool bnsd = c->q_layout == PAGED_ASCEND_Q_BNSD;
    memcpy(axes, (const int64_t[]){b, bnsd ? n : s, bnsd ? s : n, dim}, 4 * sizeof *axes);
    return 4;
}

static int make_queries(dump *d, const char *name, int32_t dim, uint8_t **out) {
    int64_t n = d->n_queries * d->c->n_heads * dim, axes[4];
    int32_t n_axes = q_axes(d, dim, axes);
    *out = paged__alloc((size_t)n, 2);
    if (!*out) return no_memory(d);
    fill_random(d, d->c->q_type, *out, n);
    return write_npy(d, name, descr_of(d->c->q_type), axes, n_axes, *out,
                     "queries; padding holds numbers, too");
}

/* Keys that query i of sequence s sees: 0 … n - 1. */
static int64_t seen(const dump *d, int32_t s, int64_t i) {
    int64_t n_k = d->lens_k[s], n_q = d->lens_q[s];
    if (d->c->sparse_mode == 3) return PAGED_MAX(PAGED_MIN(n_k - n_q + i + 1, n_k), 0);
    if (d->c->sparse_mode == 2) return PAGED_MIN(i + 1, n_k);
    return n_k;
}

static double element(const dump *d, const part *p, int64_t row, int32_t head, int32_t i) {
    int64_t at = (int64_t)head * p->dim + i;
    double x = value_at(d->c->kv_type, p->rows, row * d->c->n_kv_heads * p->dim + at);
    return p->scale ? x * (double)p->scale[at] : x;
}

static double scale_of(const paged_ascend_config *c) {
    return 1 / sqrt((double)(c->head_dim_k + c->rope_dim));
}

/* One query and head: softmax over its scores, in two passes. score: room for the longest sequence. */
static void golden_row(dump *d, int32_t s, int64_t i, int32_t h, double *score, double *sum) {
    const paged_ascend_config *c = d->c;
    const part *k = &d->parts[0], *v = &d->parts[c->path == PAGED_ASCEND_MLA ? 0 : 1], *rope = &d->parts[1];
    int64_t row = q_row(d, s, i, h), n = seen(d, s, i), first = d->starts_k[s];
    int32_t kv_head = h / (c->n_heads / c->n_kv_heads);
    double max = -INFINITY, total = 0;
    for (int64_t j = 0; j < n; j++) {
        double dot = 0;
        for (int32_t e = 0; e < k->dim; e++)
            dot += value_at(c->q_type, d->q, row * k->dim + e) * element(d, k, first + j, kv_head, e);
        for (int32_t e = 0; e < c->rope_dim; e++)
            dot += value_at(c->q_type, d->q_rope, row * c->rope_dim + e) *
                   element(d, rope, first + j, kv_head, e);
        score[j] = dot * scale_of(c);
        max = fmax(max, score[j]);
    }
    memset(sum, 0, (size_t)v->dim * sizeof *sum);
    for (int64_t j = 0; j < n; j++) {
        double weight = exp(score[j] - max);
        total += weight;
        for (int32_t e = 0; e < v->dim; e++) sum[e] += weight * element(d, v, first + j, kv_head, e);
    }
    for (int32_t e = 0; e < v->dim && n > 0; e++) d->out[row * v->dim + e] = (float)(sum[e] / total);
    d->lse[lse_row(d, s, i, h)] = n > 0 ? (float)(max + log(total)) : -INFINITY;
}

static int make_golden(dump *d) {
    const paged_ascend_config *c = d->c;
    int64_t n_rows = d->n_queries * c->n_heads, axes[4];
    double *score = paged__alloc((size_t)PAGED_MAX(c->max_k, 1), sizeof *score);
    double *sum = paged__alloc((size_t)c->head_dim_v, sizeof *sum);
    d->out = paged__calloc((size_t)(n_rows * c->head_dim_v), sizeof *d->out);
    d->lse = paged__calloc((size_t)n_rows, sizeof *d->lse);
    bool room = score && sum && d->out && d->lse;
    for (int32_t s = 0; s < c->batch && room; s++)
        for (int64_t i = 0; i < d->lens_q[s]; i++)
            for (int32_t h = 0; h < c->n_heads; h++) golden_row(d, s, i, h, score, sum);
    paged__free(score);
    paged__free(sum);
    if (!room) return no_memory(d);
    int32_t n_axes = q_axes(d, c->head_dim_v, axes);
    int code =
        write_npy(d, "golden_out", "<f4", axes, n_axes, d->out, "attention, computed in double precision");
    if (code != PAGED__EXIT_OK) return code;
    const int64_t tnd[3] = {d->n_queries, c->n_heads, 1}, padded[4] = {c->batch, c->n_heads, c->max_q, 1};
    json_array_append_new(d->results, json_string("out"));
    json_array_append_new(d->results, json_string("lse"));
    return write_npy(d, "golden_lse", "<f4", is_tnd(c) ? tnd : padded, is_tnd(c) ? 3 : 4, d->lse,
                     "natural logarithm of the sum of exp(score); -inf: no key");
}

static int write_lengths(dump *d) {
    const paged_ascend_config *c = d->c;
    const int64_t axes[1] = {c->batch};
    int code = write_npy(d, "lens_k", "<i8", axes, 1, d->lens_k, "keys of each sequence");
    if (code == PAGED__EXIT_OK && has_queries(c))
        code = write_npy(d, "lens_q", "<i8", axes, 1, d->lens_q, "queries of each sequence");
    if (code != PAGED__EXIT_OK || !has_queries(c)) return code;
    for (int32_t s = 0; s < c->batch && is_tnd(c); s++) d->starts_q[s] += d->lens_q[s];
    code = write_npy(d, "actual_seq_lengths", "<i8", axes, 1, is_tnd(c) ? d->starts_q : d->lens_q,
                     "lens_q as the operator takes it: in TND running sums");
    for (int32_t s = 0; s < c->batch && is_tnd(c); s++) d->starts_q[s] -= d->lens_q[s];
    return code;
}

/* ---- the whole ---- */

static int check_size(paged__cli *cli, const paged_ascend_config *c) {
    double bytes = (double)c->n_blocks * c->block_size * c->n_kv_heads *
                   PAGED_MAX(c->head_dim_k, c->head_dim_v) * (double)elem_of(c->kv_type);
    double work = (double)c->batch * c->max_q * c->max_k * c->n_heads *
                  ((double)c->head_dim_k + c->rope_dim + c->head_dim_v);
    double dims = PAGED_MAX(c->head_dim_k, c->head_dim_v);
    double rows = (double)c->batch * c->max_k * c->n_kv_heads * dims * (double)elem_of(c->kv_type);
    double queries = (double)c->batch * c->max_q * c->n_heads * dims * sizeof(float);
    double table = (double)c->batch * c->table_cols * sizeof(int32_t);
    double largest = fmax(fmax(rows, table), has_queries(c) ? queries : 0);
    if (largest > (double)MAX_BYTES)
        return paged__error(cli,
                            "a dump has at most %lld MiB an array, this one %.0f; take a smaller --batch, "
                            "--max-q or --max-k",
                            (long long)(MAX_BYTES >> 20), largest / 0x1p20);
    if (bytes > (double)MAX_BYTES)
        return paged__error(cli, "a dump has at most %lld MiB a cache, this one %.0f; take fewer --blocks",
                            (long long)(MAX_BYTES >> 20), bytes / 0x1p20);
    if (has_queries(c) && work > MAX_WORK)
        return paged__error(cli,
                            "a dump takes at most %.3g multiplications, this one %.3g; take a smaller "
                            "--batch, --max-q or --max-k",
                            MAX_WORK, work);
    bool masked = c->sparse_mode == 1 || c->sparse_mode == 4 || (c->sparse_mode == 0 && c->mask_rows > 0);
    if (has_queries(c) && masked)
        return paged__error(cli,
                            "a dump knows no mask of your own: take --sparse-mode 0 without a mask, 2 or 3");
    if (has_queries(c) && c->sparse_mode == 3 && c->max_q > c->max_k)
        return paged__error(cli, "%d queries and %d keys: with mode 3 a sequence has at least as many keys",
                            c->max_q, c->max_k);
    return PAGED__EXIT_OK;
}

static int write_manifest(dump *d, uint64_t seed) {
    const paged_ascend_config *c = d->c;
    bool bf16 = c->q_type == PAGED_TYPE_BF16;
    json_t *call = json_object();
    for (int32_t i = 0; paged_ascend_field_name(i); i++) {
        paged_ascend_config copy = *c;
        json_object_set_new(call, paged_ascend_field_name(i),
                            json_integer(*paged_ascend_field_value(&copy, i)));
    }
    json_t *manifest = json_pack(
        "{s:s, s:b, s:s, s:s, s:s, s:s, s:s, s:I, s:O, s:O, s:o}", "note",
        "Golden results of a CPU, in double precision. Nothing of this ran on an Ascend card.",
        "ran_on_a_card", 0, "facts", PAGED_ASCEND_FACTS, "path", paged_ascend_path_name(c->path), "q_type",
        paged__kv_types[c->q_type], "q_layout", is_tnd(c) ? "tnd" : paged_ascend_q_layout_name(c->q_layout),
        "kv_layout", paged_ascend_layout_name(c->kv_layout), "seed", (json_int_t)seed, "results", d->results,
        "files", d->files, "call", call);
    if (has_queries(c)) {
        json_object_set_new(manifest, "scale", json_real(scale_of(c)));
        json_object_set_new(manifest, "tolerance",
                            json_pack("{s:f, s:f}", "out", bf16 ? 1e-2 : 2e-3, "lse", bf16 ? 1e-2 : 2e-3));
        if (c->sparse_mode >= 2)
            json_object_set_new(manifest, "mask",
                                json_string("atten_mask is 2048 × 2048, 1 above the diagonal, else 0"));
    }
    char *text = manifest ? json_dumps(manifest, JSON_INDENT(2)) : NULL;
    json_decref(manifest);
    if (!text) return no_memory(d);
    int code = write_file(d, "manifest.json", text, strlen(text), "\n", 1);
    free(text);
    return code;
}

static int make_caches(dump *d) {
    const paged_ascend_config *c = d->c;
    bool scatter = c->path == PAGED_ASCEND_SCATTER, gather = c->path == PAGED_ASCEND_GATHER;
    bool mla = c->path == PAGED_ASCEND_MLA;
    int code = make_part(d, "k", c->head_dim_k);
    if (code == PAGED__EXIT_OK) code = make_part(d, mla ? "k_rope" : "v", mla ? c->rope_dim : c->head_dim_v);
    for (int32_t i = 0; i < d->n_parts && code == PAGED__EXIT_OK; i++) {
        part *p = &d->parts[i];
        code = write_cache(d, p, scatter ? "golden_" : "");
        if (code == PAGED__EXIT_OK) code = write_rows(d, p, gather ? "golden_" : "");
        if (!scatter && !gather) continue;
        char name[32];
        snprintf(name, sizeof name, "%s_%s", p->name, scatter ? "cache" : "rows");
        json_array_append_new(d->results, json_string(name));
    }
    const int64_t axes[1] = {d->n_keys};
    if (code == PAGED__EXIT_OK)
        code = write_npy(d, "slots", "<i8", axes, 1, d->slots, "block × block_size + offset of each row");
    return code;
}

int paged__ascend_dump(paged__cli *cli, const paged_ascend_config *c, const char *path, uint64_t seed) {
    dump d = {.cli = cli, .c = c, .path = path, .rng = seed, .files = json_array(), .results = json_array()};
    int code = check_size(cli, c);
    if (code == PAGED__EXIT_OK && mkdir(path, 0777) != 0 && errno != EEXIST)
        code = paged__error(cli, "cannot make %s: %s", path, strerror(errno));
    if (code == PAGED__EXIT_OK) code = make_lengths(&d);
    if (code == PAGED__EXIT_OK) code = make_table(&d);
    if (code == PAGED__EXIT_OK) code = write_lengths(&d);
    if (code == PAGED__EXIT_OK) code = make_caches(&d);
    if (code == PAGED__EXIT_OK && has_queries(c)) {
        code = make_queries(&d, "q", c->head_dim_k, &d.q);
        if (code == PAGED__EXIT_OK && c->rope_dim) code = make_queries(&d, "q_rope", c->rope_dim, &d.q_rope);
        if (code == PAGED__EXIT_OK) code = make_golden(&d);
    }
    for (const paged__file *f = paged__dump_files; f->path && code == PAGED__EXIT_OK; f++)
        code = write_file(&d, f->path + 1, f->data, f->size_bytes, NULL, 0);
    if (code == PAGED__EXIT_OK) code = write_manifest(&d, seed);
    free_dump(&d);
    return code;
}
