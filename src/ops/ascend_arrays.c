/* ascend_arrays.c: what the operators of Ascend cards take unchecked: block tables, lengths, slots. */
#include <stdio.h>
#include <stdlib.h>

#include "ops/ascend.h"

#define INVALID(...) return paged__fail(err, PAGED_ERR_INVALID_ARG, __VA_ARGS__)

typedef struct report {
    const paged_ascend_config *c;
    const paged_ascend_arrays *a;
    paged_ascend_finding *out;
    int32_t max, n;
    bool sums; /* lens_q are running sums */
} report;

__attribute__((format(printf, 5, 6))) static void tell(report *r, const char *rule, int64_t value,
                                                       int64_t entry, const char *fmt, ...) {
    if (r->n++ >= r->max) return;
    paged_ascend_finding *f = &r->out[r->n - 1];
    *f = (paged_ascend_finding){.rule = paged__ascend_rule(rule), .value = value, .entry = entry};
    va_list args;
    va_start(args, fmt);
    int len = vsnprintf(f->message, sizeof f->message, fmt, args);
    va_end(args);
    if (len >= 0 && (size_t)len < sizeof f->message)
        snprintf(f->message + len, sizeof f->message - (size_t)len, ": %s", f->rule->text);
}

static bool of_path(const report *r, const char *rule) {
    return paged__ascend_rule(rule)->paths & 1u << r->c->path;
}

/* One length may stand for all, but where they are counted out. */
static int64_t length_of(const int64_t *lens, int32_t n, int32_t seq) {
    return lens[n == 1 ? 0 : seq];
}

/* ---- keys ---- */

static void check_lens_k(report *r) {
    const paged_ascend_config *c = r->c;
    const paged_ascend_arrays *a = r->a;
    bool one_for_all = c->path != PAGED_ASCEND_TND && c->path != PAGED_ASCEND_GATHER;
    if (a->n_lens_k != c->batch && !(one_for_all && a->n_lens_k == 1)) {
        tell(r, "lens_k.count", a->n_lens_k, -1, "lens_k has %d entries for %d sequences", a->n_lens_k,
             c->batch);
        return;
    }
    int64_t covered = (int64_t)c->table_cols * c->block_size, n_blocks = 0;
    bool told = false;
    /* One length for all is looked at once. */
    for (int32_t s = 0; s < a->n_lens_k; s++) {
        int64_t len = a->lens_k[s];
        if ((len < 0 || len > covered) && !told) {
            tell(r, "lens_k.table", len, s, "sequence %d has %lld keys, %d entries of %d tokens cover %lld",
                 s, (long long)len, c->table_cols, c->block_size, (long long)covered);
            told = true;
        }
        if (len > 0) n_blocks += (PAGED_MIN(len, covered) - 1) / c->block_size + 1;
    }
    if (a->n_lens_k == 1) n_blocks *= c->batch;
    if (of_path(r, "lens_k.blocks") && n_blocks > c->n_blocks)
        tell(r, "lens_k.blocks", n_blocks, -1, "%d sequences take %lld blocks, the pool has %d", c->batch,
             (long long)n_blocks, c->n_blocks);
}

/* Entries that a sequence's keys need; without lengths all of its row. */
static int32_t entries_of(const report *r, int32_t seq) {
    const paged_ascend_config *c = r->c;
    if (!r->a->lens_k) return c->table_cols;
    if (r->a->n_lens_k != 1 && r->a->n_lens_k < c->batch) return 0;
    int64_t len = length_of(r->a->lens_k, r->a->n_lens_k, seq);
    if (len <= 0) return 0;
    return (int32_t)PAGED_MIN((len - 1) / c->block_size + 1, (int64_t)c->table_cols);
}

static void check_table(report *r) {
    const paged_ascend_config *c = r->c;
    int64_t head = (int64_t)c->block_size * PAGED_MAX(c->head_dim_k, 1), block, wide = INT64_MAX;
    if (!__builtin_mul_overflow(head, (int64_t)PAGED_MAX(c->n_kv_heads, 1), &block))
        wide = (((int64_t)1 << 32) - 1) / PAGED_MAX(block, 1) + 1;
    bool range = false, absent = false, far = false;
    for (int32_t s = 0; s < c->table_rows; s++)
        for (int32_t i = 0; i < entries_of(r, s); i++) {
            int64_t at = (int64_t)s * c->table_cols + i;
            int32_t id = r->a->table[at];
            if (id == -1 && !absent) {
                tell(r, "table.absent", id, at, "sequence %d: entry %d is -1 among its keys", s, i);
                absent = true;
            } else if ((id < -1 || id >= c->n_blocks) && !range) {
                tell(r, "table.range", id, at, "sequence %d: entry %d is %d, the pool has blocks 0 to %d", s,
                     i, id, c->n_blocks - 1);
                range = true;
            } else if (id >= wide && id < c->n_blocks && !far) {
                tell(r, "table.wide", id, at, "sequence %d: entry %d is block %d of %lld elements each", s, i,
                     id, (long long)block);
                far = true;
            }
        }
}

/* ---- queries ---- */

static int64_t queries_of(const report *r, int32_t seq) {
    const int64_t *lens = r->a->lens_q;
    if (!r->sums) return length_of(lens, r->a->n_lens_q, seq);
    return lens[seq] - (seq > 0 ? lens[seq - 1] : 0);
}

static void check_lens_q(report *r) {
    const paged_ascend_config *c = r->c;
    const paged_ascend_arrays *a = r->a;
    if (a->n_lens_q != c->batch && (r->sums || a->n_lens_q != 1)) {
        tell(r, "lens_q.count", a->n_lens_q, -1, "lens_q has %d entries for %d sequences", a->n_lens_q,
             c->batch);
        return;
    }
    for (int32_t s = 0; s < c->batch && r->sums; s++) {
        int64_t before = s > 0 ? a->lens_q[s - 1] : 0;
        if (a->lens_q[s] >= before && a->lens_q[s] >= 0) continue;
        tell(r, "lens_q.order", a->lens_q[s], s, "the running sum falls from %lld to %lld at sequence %d",
             (long long)before, (long long)a->lens_q[s], s);
        return;
    }
    if (r->sums && c->batch > 0 && a->n_tokens && a->lens_q[c->batch - 1] != a->n_tokens)
        tell(r, "lens_q.total", a->lens_q[c->batch - 1], c->batch - 1,
             "the last running sum is %lld with %lld rows of queries", (long long)a->lens_q[c->batch - 1],
             (long long)a->n_tokens);
    bool has_k = a->lens_k && (a->n_lens_k == 1 || a->n_lens_k == c->batch), max = false, keys = false;
    int32_t n_pairs = PAGED_MAX(a->n_lens_q, has_k ? a->n_lens_k : 1);
    for (int32_t s = 0; s < n_pairs; s++) {
        int64_t n = queries_of(r, s), n_keys = has_k ? length_of(a->lens_k, a->n_lens_k, s) : n;
        if ((n < 0 || n > c->max_q) && !max) {
            tell(r, "lens_q.max", n, s, "sequence %d has %lld queries, max_q is %d", s, (long long)n,
                 c->max_q);
            max = true;
        }
        if (c->sparse_mode == 3 && n > n_keys && !keys) {
            tell(r, "lens_q.keys", n, s, "sequence %d has %lld queries and %lld keys", s, (long long)n,
                 (long long)n_keys);
            keys = true;
        }
    }
}

/* ---- slots ---- */

typedef struct slot_row {
    int64_t slot, row;
} slot_row;

static int by_slot(const void *a, const void *b) {
    const slot_row *x = a, *y = b;
    if (x->slot != y->slot) return x->slot < y->slot ? -1 : 1;
    return x->row < y->row ? -1 : x->row > y->row;
}

static paged_status check_twice(report *r, paged_error *err) {
    int64_t n = r->a->n_slots, first = -1;
    slot_row *rows = paged__alloc((size_t)n, sizeof *rows);
    if (!rows) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory to sort %lld slots", (long long)n);
    for (int64_t i = 0; i < n; i++) rows[i] = (slot_row){r->a->slots[i], i};
    qsort(rows, (size_t)n, sizeof *rows, by_slot);
    for (int64_t i = 1; i < n; i++)
        if (rows[i].slot >= 0 && rows[i].slot == rows[i - 1].slot &&
            (first < 0 || rows[i].row < rows[first].row))
            first = i;
    if (first > 0)
        tell(r, "slots.twice", rows[first].slot, rows[first].row, "rows %lld and %lld both go to slot %lld",
             (long long)rows[first - 1].row, (long long)rows[first].row, (long long)rows[first].slot);
    paged__free(rows);
    return PAGED_OK;
}

static paged_status check_slots(report *r, paged_error *err) {
    const paged_ascend_config *c = r->c;
    const paged_ascend_arrays *a = r->a;
    int64_t end = (int64_t)c->n_blocks * c->block_size;
    bool negative = false, range = false;
    if (a->n_tokens && a->n_slots != a->n_tokens)
        tell(r, "slots.count", a->n_slots, -1, "%lld slots for %lld rows", (long long)a->n_slots,
             (long long)a->n_tokens);
    for (int64_t i = 0; i < a->n_slots; i++) {
        int64_t slot = a->slots[i];
        if (slot < 0 && !negative) {
            tell(r, "slots.negative", slot, i, "row %lld goes to slot %lld", (long long)i, (long long)slot);
            negative = true;
        }
        if (slot >= end && !range) {
            tell(r, "slots.range", slot, i, "row %lld goes to slot %lld of 0 to %lld", (long long)i,
                 (long long)slot, (long long)end - 1);
            range = true;
        }
    }
    return check_twice(r, err);
}

/* ---- all ---- */

static paged_status check_sizes(const paged_ascend_config *c, const paged_ascend_arrays *a,
                                paged_error *err) {
    if (!c || !a || c->struct_size != sizeof *c)
        INVALID("config or arrays is NULL, or struct_size is not %zu", sizeof *c);
    if (!paged_ascend_path_name(c->path)) INVALID("path is %d", c->path);
    if (c->block_size < 1 || c->n_blocks < 1 || c->batch < 1)
        INVALID("block_size is %d, n_blocks %d, batch %d", c->block_size, c->n_blocks, c->batch);
    if (c->table_rows < 0 || c->table_cols < 0)
        INVALID("the table is [%d, %d]", c->table_rows, c->table_cols);
    if (a->table && c->table_rows > c->batch)
        INVALID("the table has %d rows for %d sequences", c->table_rows, c->batch);
    if (a->n_lens_q < 0 || a->n_lens_k < 0 || a->n_slots < 0 || a->n_tokens < 0)
        INVALID("%d and %d lengths, %lld slots, %lld tokens", a->n_lens_q, a->n_lens_k, (long long)a->n_slots,
                (long long)a->n_tokens);
    return PAGED_OK;
}

paged_status paged_ascend_check_arrays(const paged_ascend_config *config, const paged_ascend_arrays *arrays,
                                       paged_ascend_finding *out, int32_t max, int32_t *n, paged_error *err) {
    paged_status status = check_sizes(config, arrays, err);
    if (status) return status;
    bool tnd = config->path == PAGED_ASCEND_TND ||
               (config->path == PAGED_ASCEND_MLA && config->q_layout == PAGED_ASCEND_Q_TND);
    report r = {.c = config, .a = arrays, .out = out, .max = max, .sums = tnd};
    if (arrays->table && of_path(&r, "table.range")) check_table(&r);
    if (arrays->lens_q && of_path(&r, "lens_q.count")) check_lens_q(&r);
    if (arrays->lens_k && of_path(&r, "lens_k.count")) check_lens_k(&r);
    if (arrays->slots && of_path(&r, "slots.range")) status = check_slots(&r, err);
    if (status) return status;
    *n = r.n;
    return PAGED_OK;
}
