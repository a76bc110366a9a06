/* attn_run.c: paged_attn_run and paged_attn_merge. Nothing here can fail; the plan has checked everything. */
#include <float.h>
#include <math.h>

#include "ops/attn.h"

/* One unit at work. */
typedef struct unit {
    const paged_attn *attn;
    const paged_kv *kv;
    const paged__entry *entry;
    const int32_t *table; /* of the sequence and head */
    int32_t head;         /* KV head */
} unit;

static int64_t o_floats(const paged_attn *attn) {
    return attn->state_floats - PAGED__STATE_TAIL;
}
static float *state_m(const paged_attn *attn, float *state) {
    return state + o_floats(attn);
}
static float *state_l(const paged_attn *attn, float *state) {
    return state + o_floats(attn) + 1;
}

static unit unit_at(const paged_attn *attn, const paged_kv *kv, int64_t index) {
    const paged_tables *tables = &attn->tables;
    unit u = {.attn = attn, .kv = kv, .entry = &attn->entries[index / attn->config.n_kv_heads]};
    u.head = (int32_t)(index % attn->config.n_kv_heads);
    int64_t row = tables->rows ? tables->rows[u.entry->seq] : u.entry->seq;
    u.table = tables->blocks + row * tables->seq_stride + u.head * tables->head_stride;
    return u;
}

/* ---- the end of a row ---- */

/* Adds the state of the next split. Here and only here are splits put together. */
static void merge_state(const paged_attn *attn, float *acc, float *part) {
    float m = PAGED_MAX(*state_m(attn, acc), *state_m(attn, part));
    float a = paged__exp2(*state_m(attn, acc) - m), b = paged__exp2(*state_m(attn, part) - m);
    attn->kernels->merge(acc, a, part, b, (int32_t)o_floats(attn));
    *state_m(attn, acc) = m;
    *state_l(attn, acc) = *state_l(attn, acc) * a + *state_l(attn, part) * b;
}

/* Writes out and lse of row r of the unit. */
static void finish_row(const unit *u, int32_t r, float *state, const paged_attn_io *io) {
    const paged_attn *attn = u->attn;
    int32_t n_heads = attn->config.n_heads, dv = attn->config.head_dim_v;
    int64_t q = u->entry->q_first + r / attn->group, head = u->head * attn->group + r % attn->group;
    int64_t stride = io->out_stride ? io->out_stride : (int64_t)n_heads * dv;
    float *out = io->out + q * stride + head * dv, lse = -INFINITY;
    float l = paged__row_keys(attn, u->entry, r) > 0 ? *state_l(attn, state) : 0;
    if (l != 0) {
        attn->kernels->divide(out, state, l, dv);
        lse = (float)((*state_m(attn, state) + log2((double)l)) * 0.69314718055994530942);
    } else {
        memset(out, 0, (size_t)dv * sizeof(float));
    }
    if (io->lse) io->lse[q * n_heads + head] = lse;
}

/* ---- a split of a unit ---- */

/* Rows of at most `n` at a time, as equal as possible: 8 rows are 4 + 4, which is faster than 6 + 2. */
static int32_t next_rows(int32_t n) {
    int32_t n_calls = (n + PAGED__ROWS - 1) / PAGED__ROWS;
    return (n + n_calls - 1) / n_calls;
}

/* o += p · V. Each row stops at its own last token, since the V of a token that it must not see may be NaN
 * or Inf, which a weight of zero would not stop. Rows of a call share their tokens as far as the first of
 * them goes; n_keys is ascending. */
static void add_values(const unit *u, const paged__scratch *scratch, const paged__tiles *tiles,
                       paged_type type, int32_t t0, int32_t first_row, float *states) {
    const paged_attn *attn = u->attn;
    int64_t stride = attn->state_floats;
    int32_t dv = attn->config.head_dim_v, n_rows = u->entry->n_rows;
    for (int32_t r = first_row, n; r < n_rows; r += n) {
        n = next_rows(n_rows - r);
        int32_t shared = PAGED_MIN(scratch->n_keys[r] - t0, PAGED_ATTN_STEP);
        attn->kernels->pv[type](states + r * stride, stride, scratch->s + r * PAGED_ATTN_STEP, n, tiles, 0,
                                shared, dv);
        for (int32_t i = r + 1; i < r + n; i++) {
            int32_t end = PAGED_MIN(scratch->n_keys[i] - t0, PAGED_ATTN_STEP);
            if (end > shared)
                attn->kernels->pv[type](states + i * stride, stride, scratch->s + i * PAGED_ATTN_STEP, 1,
                                        tiles, shared, end, dv);
        }
    }
}

/* All rows from first_row on against the tokens of one step. `type` is that of the tiles. */
static void attend_step(const unit *u, const paged__scratch *scratch, const paged__tiles *k,
                        const paged__tiles *v, paged_type type, int32_t t0, int32_t first_row,
                        float *states) {
    const paged_attn *attn = u->attn;
    const paged__kernels *kernels = attn->kernels;
    int32_t n_rows = u->entry->n_rows, dk = attn->config.head_dim_k;
    for (int32_t r = first_row, n; r < n_rows; r += n) {
        n = next_rows(n_rows - r);
        kernels->qk[type](scratch->s + r * PAGED_ATTN_STEP, scratch->q + (int64_t)r * dk, dk, n, k, dk);
    }
    for (int32_t r = first_row; r < n_rows; r++) {
        float *state = states + r * attn->state_floats;
        int32_t n_valid = PAGED_MIN(scratch->n_keys[r] - t0, PAGED_ATTN_STEP);
        kernels->softmax(scratch->s + r * PAGED_ATTN_STEP, n_valid, state_m(attn, state),
                         scratch->l + r * PAGED__L_LANES, state, (int32_t)o_floats(attn));
    }
    add_values(u, scratch, v, type, t0, first_row, states);
}

/* Tiles of the step at t0, in the cache or brought to f32. */
static void step_tiles(const unit *u, const paged__scratch *scratch, bool gather, int32_t t0, const void **k,
                       const void **v) {
    paged__attn_step step = {u->kv, u->table, u->head, t0, PAGED_MIN(u->entry->n_keys - t0, PAGED_ATTN_STEP)};
    if (gather)
        paged__tiles_gather(u->attn->kernels, &step, scratch, k, v);
    else
        paged__tiles_find(&step, k, v);
}

/* In one fixed order: lane i with i + 8, then 4, 2, 1. */
static float sum_lanes(const float *lanes) {
    float x[PAGED__L_LANES];
    memcpy(x, lanes, sizeof x);
    for (int32_t width = PAGED__L_LANES / 2; width > 0; width /= 2)
        for (int32_t i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}

/* The states of all rows that see a token of this split. Returns the first such row; those before are left
 * alone. */
static int32_t attend_split(const unit *u, const paged__scratch *scratch, int32_t split, float *states) {
    const paged_attn *attn = u->attn;
    int32_t n_rows = u->entry->n_rows, begin = split * PAGED_ATTN_SPLIT, first_row = 0;
    int32_t end = PAGED_MIN(begin + PAGED_ATTN_SPLIT, u->entry->n_keys);
    while (first_row < n_rows && scratch->n_keys[first_row] <= begin) first_row++;
    for (int32_t r = first_row; r < n_rows; r++) {
        memset(states + r * attn->state_floats, 0, (size_t)o_floats(attn) * sizeof(float));
        memset(scratch->l + r * PAGED__L_LANES, 0, PAGED__L_LANES * sizeof(float));
        *state_m(attn, states + r * attn->state_floats) = -INFINITY;
    }
    /* The kernels of f16 and bf16 convert K and V once per PAGED__ROWS rows; with more rows it is cheaper
     * to do it before. */
    bool gather =
        u->kv->layout == PAGED_LAYOUT_PLAIN || (u->kv->type != PAGED_TYPE_F32 && n_rows > 2 * PAGED__ROWS);
    paged__tiles k, v;
    for (int32_t t0 = begin, row = first_row; t0 < end; t0 += PAGED_ATTN_STEP) {
        while (scratch->n_keys[row] <= t0) row++;
        if (gather || t0 == begin) {
            step_tiles(u, scratch, gather, t0, k.at, v.at);
        } else {
            memcpy(k.at, k.next, sizeof k.at);
            memcpy(v.at, v.next, sizeof v.at);
        }
        memcpy(k.next, k.at, sizeof k.at);
        memcpy(v.next, v.at, sizeof v.at);
        if (!gather && t0 + PAGED_ATTN_STEP < u->entry->n_keys)
            step_tiles(u, scratch, false, t0 + PAGED_ATTN_STEP, k.next, v.next);
        attend_step(u, scratch, &k, &v, gather ? PAGED_TYPE_F32 : u->kv->type, t0, row, states);
    }
    for (int32_t r = first_row; r < n_rows; r++)
        *state_l(attn, states + r * attn->state_floats) = sum_lanes(scratch->l + r * PAGED__L_LANES);
    return first_row;
}

/* ---- a unit ---- */

/* Queries into rows [query, head of the group], scaled, so that exp2 of a score is exp of the scaled
 * product. */
static void load_queries(const unit *u, const paged__scratch *scratch, const paged_attn_io *io) {
    const paged_attn *attn = u->attn;
    int32_t dk = attn->config.head_dim_k;
    int64_t stride = io->q_stride ? io->q_stride : (int64_t)attn->config.n_heads * dk;
    for (int32_t r = 0; r < u->entry->n_rows; r++) {
        int64_t head = u->head * attn->group + r % attn->group;
        const float *src = io->q + (u->entry->q_first + r / attn->group) * stride + head * dk;
        float *dst = scratch->q + (int64_t)r * dk;
        for (int32_t d = 0; d < dk; d++) dst[d] = src[d] * attn->scale_log2;
        scratch->n_keys[r] = paged__row_keys(attn, u->entry, r);
    }
}

/* All splits, folded as they come. */
static void run_whole(const unit *u, const paged__scratch *scratch, const paged_attn_io *io) {
    const paged_attn *attn = u->attn;
    int32_t n_rows = u->entry->n_rows;
    attend_split(u, scratch, 0, scratch->acc);
    for (int32_t split = 1; split < u->entry->n_splits; split++)
        for (int32_t r = attend_split(u, scratch, split, scratch->cur); r < n_rows; r++)
            merge_state(attn, scratch->acc + r * attn->state_floats, scratch->cur + r * attn->state_floats);
    for (int32_t r = 0; r < n_rows; r++) finish_row(u, r, scratch->acc + r * attn->state_floats, io);
}

/* The cut, at or before b, that is the first to go through the unit of cut b; cut b goes through its unit. */
static int32_t first_cut_of_unit(const paged_attn *attn, int32_t b, int32_t nth) {
    int64_t unit_index = paged__cut_at(attn, b, nth).unit;
    for (; b > 1; b--) {
        paged__cut before = paged__cut_at(attn, b - 1, nth);
        if (before.unit != unit_index || before.split == 0) break;
    }
    return b;
}

void paged_attn_run(paged_attn *attn, const paged_kv *kv, const paged_attn_io *io, int32_t ith, int32_t nth) {
    if (attn->n_entries == 0) return;
    const paged__scratch *scratch = &attn->scratch[ith];
    paged__cut begin = paged__cut_at(attn, ith, nth), end = paged__cut_at(attn, ith + 1, nth);

    for (int64_t index = begin.unit; index < end.unit + (end.split > 0); index++) {
        unit u = unit_at(attn, kv, index);
        int32_t from = index == begin.unit ? begin.split : 0,
                until = index == end.unit ? end.split : u.entry->n_splits;
        if (from == until) continue;
        load_queries(&u, scratch, io);
        if (from == 0 && until == u.entry->n_splits) {
            run_whole(&u, scratch, io);
            continue;
        }
        /* Cut ith goes through the unit, or cut ith + 1 does, as its first. */
        int32_t cut = from > 0 ? first_cut_of_unit(attn, ith, nth) : ith + 1;
        for (int32_t split = from; split < until; split++)
            attend_split(&u, scratch, split, paged__workspace(attn, cut, split));
    }
}

/* ---- merge ---- */

static void merge_row(const unit *u, int32_t cut, int32_t r, float *acc, const paged_attn_io *io) {
    const paged_attn *attn = u->attn;
    int32_t n_keys = paged__row_keys(attn, u->entry, r);
    for (int32_t split = 0; split * PAGED_ATTN_SPLIT < n_keys; split++) {
        float *state = paged__workspace(attn, cut, split) + r * attn->state_floats;
        if (split == 0)
            memcpy(acc, state, (size_t)attn->state_floats * sizeof(float));
        else
            merge_state(attn, acc, state);
    }
    finish_row(u, r, acc, io);
}

void paged_attn_merge(paged_attn *attn, const paged_attn_io *io, int32_t ith, int32_t nth) {
    if (!attn->needs_merge) return;
    int64_t n_rows = 0; /* of all units before; threads take them in turn */
    for (int32_t b = 1; b < nth; b++) {
        paged__cut cut = paged__cut_at(attn, b, nth);
        if (cut.split == 0 || first_cut_of_unit(attn, b, nth) != b) continue;
        unit u = unit_at(attn, NULL, cut.unit);
        for (int32_t r = 0; r < u.entry->n_rows; r++)
            if ((n_rows + r) % nth == ith) merge_row(&u, b, r, attn->scratch[ith].acc, io);
        n_rows += u.entry->n_rows;
    }
}
