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

/* What a split of a unit is worked on with. */
typedef struct split_run {
    const paged__type_kernels *tiles; /* of the cache's type, for packing and widening */
    const paged__type_kernels *kernels;
    bool pack, widen; /* bring tiles of the plain layout to packed ones, tiles to f32 */
    paged__step step; /* rows of the whole unit; attend_step narrows it */
} split_run;

static split_run split_run_of(const unit *u, const paged__scratch *scratch, float *states) {
    const paged_attn *attn = u->attn;
    split_run run = {.tiles = attn->kernels->of[u->kv->type], .pack = u->kv->layout == PAGED_LAYOUT_PLAIN};
    run.widen = run.tiles->widen_k && u->entry->n_rows > PAGED__WIDEN_ROWS;
    run.kernels = run.widen ? attn->kernels->of[PAGED_TYPE_F32] : run.tiles;
    run.step = (paged__step){.n_rows = u->entry->n_rows,
                             .head_dim_k = attn->config.head_dim_k,
                             .head_dim_v = attn->config.head_dim_v,
                             .q = scratch->q,
                             .q_stride = attn->q_stride,
                             .s = scratch->s,
                             .p = scratch->p,
                             .p_stride = attn->p_stride,
                             .l = scratch->l,
                             .o = states,
                             .o_stride = attn->state_floats,
                             .o_floats = (int32_t)o_floats(attn)};
    return run;
}

/* Rows first_row … of the unit against the tokens from t0 on. */
static void attend_step(const unit *u, const split_run *run, const paged__scratch *scratch, int32_t t0,
                        int32_t first_row) {
    paged__step step = run->step;
    for (int32_t r = first_row; r < u->entry->n_rows; r++)
        scratch->seen[r] = (paged__range){0, PAGED_MIN(scratch->n_keys[r] - t0, PAGED_ATTN_STEP)};
    step.n_rows -= first_row;
    step.seen = scratch->seen + first_row;
    step.q += first_row * step.q_stride;
    step.s += first_row * PAGED_ATTN_STEP;
    step.p += first_row * step.p_stride;
    step.l += first_row * PAGED__L_LANES;
    step.o += first_row * step.o_stride;
    run->kernels->qk(&step);
    run->kernels->softmax(&step);
    run->kernels->pv(&step);
}

/* Tiles of the step at t0, and where those of the step after it lie. */
static void step_tiles(const unit *u, split_run *run, const paged__scratch *scratch, int32_t t0) {
    int32_t n_keys = u->entry->n_keys, t1 = t0 + PAGED_ATTN_STEP;
    paged__attn_step at = {u->kv, u->table, u->head, t0, PAGED_MIN(n_keys - t0, PAGED_ATTN_STEP)};
    paged__tiles *k = &run->step.k, *v = &run->step.v;
    if (run->pack)
        paged__tiles_pack(run->tiles, &at, scratch, run->widen, k->at, v->at);
    else if (run->widen)
        paged__tiles_widen(run->tiles, &at, scratch, k->at, v->at);
    else
        paged__tiles_find(&at, k->at, v->at);
    if (u->kv->type == PAGED_TYPE_I8) {
        paged__scales_find(&at, k->scale, v->scale);
        memcpy(k->next_scale, k->scale, sizeof k->next_scale);
        memcpy(v->next_scale, v->scale, sizeof v->next_scale);
    }
    if (run->pack || run->widen || t1 >= n_keys) {
        memcpy(k->next, k->at, sizeof k->next);
        memcpy(v->next, v->at, sizeof v->next);
    } else {
        paged__attn_step next = {u->kv, u->table, u->head, t1, PAGED_MIN(n_keys - t1, PAGED_ATTN_STEP)};
        paged__tiles_find(&next, k->next, v->next);
        if (u->kv->type == PAGED_TYPE_I8) paged__scales_find(&next, k->next_scale, v->next_scale);
    }
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
    split_run run = split_run_of(u, scratch, states);
    for (int32_t t0 = begin, row = first_row; t0 < end; t0 += PAGED_ATTN_STEP) {
        while (scratch->n_keys[row] <= t0) row++;
        step_tiles(u, &run, scratch, t0);
        attend_step(u, &run, scratch, t0, row);
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
    void (*load_q)(void *, const float *, float, int32_t) = attn->kernels->of[attn->config.type]->load_q;
    int32_t dk = attn->config.head_dim_k;
    int64_t stride = io->q_stride ? io->q_stride : (int64_t)attn->config.n_heads * dk;
    for (int32_t r = 0; r < u->entry->n_rows; r++) {
        int64_t head = u->head * attn->group + r % attn->group;
        const float *src = io->q + (u->entry->q_first + r / attn->group) * stride + head * dk;
        load_q(scratch->q + r * attn->q_stride, src, attn->scale_log2, dk);
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
