/* attn_run.c: paged_attn_run and paged_attn_merge. Nothing here can fail; the plan has checked everything. */
#include <float.h>
#include <math.h>

#include "ops/attn.h"

#define LOG2_E 1.44269504088896340736

/* One unit at work. */
typedef struct unit {
    const paged_attn *attn;
    const paged_kv *kv;
    const paged__entry *entry;
    paged__table table; /* of the sequence and head */
    int32_t head;       /* KV head */
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
    unit u = {.attn = attn, .kv = kv, .entry = &attn->entries[index / attn->config.n_kv_heads]};
    u.head = (int32_t)(index % attn->config.n_kv_heads);
    if (kv) u.table = paged__table_of(kv, &attn->tables, u.entry->seq, u.head);
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

/* log2 of 2^a + 2^b; one of the two is finite. */
static double add_log2(double a, double b) {
    double high = PAGED_MAX(a, b);
    return high + log2(exp2(a - high) + exp2(b - high));
}

/* Writes out and lse of row r of the unit. A sink is one more score, without a value. */
static void finish_row(const unit *u, int32_t r, float *state, const paged_attn_io *io) {
    const paged_attn *attn = u->attn;
    int32_t n_heads = attn->config.n_heads, dv = attn->config.head_dim_v;
    int64_t q = u->entry->q_first + r / attn->group, head = u->head * attn->group + r % attn->group;
    int64_t stride = io->out_stride ? io->out_stride : (int64_t)n_heads * dv;
    float *out = io->out + q * stride + head * dv;
    float l = paged__row_keys(attn, u->entry, r) > 0 ? *state_l(attn, state) : 0;
    double m = *state_m(attn, state), sink = io->sinks ? io->sinks[head] * LOG2_E : -INFINITY;
    if (l != 0)
        attn->kernels->divide(out, state,
                              sink == -INFINITY ? l : (float)PAGED_MIN(l + exp2(sink - m), FLT_MAX), dv);
    else
        memset(out, 0, (size_t)dv * sizeof(float));
    if (!io->lse) return;
    double lse = l != 0 ? m + log2((double)l) : -INFINITY; /* in units of log2 */
    if (sink != -INFINITY) lse = l != 0 ? add_log2(lse, sink) : sink;
    io->lse[q * n_heads + head] = (float)(lse / LOG2_E);
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

/* Softcap, then ALiBi. */
static void adjust_scores(const unit *u, const paged__scratch *scratch, paged__range rows, int32_t t0) {
    const paged_attn *attn = u->attn;
    for (int32_t r = rows.first; r < rows.end; r++) {
        float *s = scratch->s + r * PAGED_ATTN_STEP;
        if (attn->softcap_log2 != 0) attn->softcap(s, attn->softcap_log2);
        if (attn->slopes_log2)
            attn->alibi(s, attn->slopes_log2[u->head * attn->group + r % attn->group],
                        t0 - scratch->position[r]);
    }
}

/* Rows of the unit, which all see a token of the step at t0, against these tokens. */
static void attend_step(const unit *u, const split_run *run, const paged__scratch *scratch, int32_t t0,
                        paged__range rows) {
    paged__step step = run->step;
    for (int32_t r = rows.first; r < rows.end; r++)
        scratch->seen[r] = (paged__range){PAGED_MAX(scratch->first_key[r] - t0, 0),
                                          PAGED_MIN(scratch->n_keys[r] - t0, PAGED_ATTN_STEP)};
    step.n_rows = rows.end - rows.first;
    step.seen = scratch->seen + rows.first;
    step.q += rows.first * step.q_stride;
    step.s += rows.first * PAGED_ATTN_STEP;
    step.p += rows.first * step.p_stride;
    step.l += rows.first * PAGED__L_LANES;
    step.o += rows.first * step.o_stride;
    run->kernels->qk(&step);
    if (u->attn->softcap_log2 != 0 || u->attn->slopes_log2) adjust_scores(u, scratch, rows, t0);
    run->kernels->softmax(&step);
    run->kernels->pv(&step);
}

/* Tiles of the step at t0, of which the first token that counts is `first`, and where those of the step after
 * it lie. */
static void step_tiles(const unit *u, split_run *run, const paged__scratch *scratch, int32_t t0,
                       int32_t first) {
    int32_t n_keys = u->entry->n_keys, t1 = t0 + PAGED_ATTN_STEP;
    paged__attn_step at = {.kv = u->kv,
                           .table = &u->table,
                           .head = u->head,
                           .t0 = t0,
                           .n_tokens = PAGED_MIN(n_keys - t0, PAGED_ATTN_STEP),
                           .n_before = PAGED_MAX(first - t0, 0)};
    paged__tiles *k = &run->step.k, *v = &run->step.v;
    paged__attn_step next = at;
    next.t0 = t1;
    next.n_tokens = PAGED_MIN(n_keys - t1, PAGED_ATTN_STEP);
    next.n_before = 0; /* what the rows of this step see reaches beyond it */
    if (run->pack)
        paged__tiles_pack(run->tiles, &at, t1 < n_keys ? &next : NULL, scratch, run->widen, k->at, v->at);
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
        paged__tiles_find(&next, k->next, v->next);
        if (u->kv->type == PAGED_TYPE_I8) paged__scales_find(&next, k->next_scale, v->next_scale);
    }
}

/* In one fixed order: lane i with i + 8, then 4, 2, 1. */
static float sum_lanes(const float *lanes) {
    float x[8], y[4];
    for (int32_t i = 0; i < 8; i++) x[i] = lanes[i] + lanes[i + 8];
    for (int32_t i = 0; i < 4; i++) y[i] = x[i] + x[i + 4];
    return (y[0] + y[2]) + (y[1] + y[3]);
}

/* Rows of the unit that see a token of t0 … t1 - 1: neighbours, since what rows see ascends. */
static paged__range rows_between(const unit *u, const paged__scratch *scratch, int32_t t0, int32_t t1) {
    paged__range rows = {0, 0};
    while (rows.first < u->entry->n_rows && scratch->n_keys[rows.first] <= t0) rows.first++;
    rows.end = rows.first;
    while (rows.end < u->entry->n_rows && scratch->first_key[rows.end] < t1) rows.end++;
    return rows;
}

/* The states of all rows that see a token of this split, and which those are; others are left alone. */
static paged__range attend_split(const unit *u, const paged__scratch *scratch, int32_t split, float *states) {
    const paged_attn *attn = u->attn;
    int32_t begin = split * PAGED_ATTN_SPLIT;
    paged__range all = rows_between(u, scratch, begin, begin + PAGED_ATTN_SPLIT);
    if (all.first == all.end) return all;
    for (int32_t r = all.first; r < all.end; r++) {
        memset(states + r * attn->state_floats, 0, (size_t)o_floats(attn) * sizeof(float));
        memset(scratch->l + r * PAGED__L_LANES, 0, PAGED__L_LANES * sizeof(float));
        *state_m(attn, states + r * attn->state_floats) = -INFINITY;
    }
    split_run run = split_run_of(u, scratch, states);
    int32_t first = PAGED_MAX(scratch->first_key[all.first], begin),
            end = PAGED_MIN(scratch->n_keys[all.end - 1], begin + PAGED_ATTN_SPLIT);
    for (int32_t t0 = first / PAGED_ATTN_STEP * PAGED_ATTN_STEP; t0 < end; t0 += PAGED_ATTN_STEP) {
        paged__range rows = rows_between(u, scratch, t0, t0 + PAGED_ATTN_STEP);
        step_tiles(u, &run, scratch, t0, scratch->first_key[rows.first]);
        attend_step(u, &run, scratch, t0, rows);
    }
    for (int32_t r = all.first; r < all.end; r++)
        *state_l(attn, states + r * attn->state_floats) = sum_lanes(scratch->l + r * PAGED__L_LANES);
    return all;
}

/* ---- a unit ---- */

static const float *q_row(const unit *u, const paged_attn_io *io, int32_t r) {
    const paged_attn_config *c = &u->attn->config;
    int64_t stride = io->q_stride ? io->q_stride : (int64_t)c->n_heads * c->head_dim_k;
    int64_t head = u->head * u->attn->group + r % u->attn->group;
    return io->q + (u->entry->q_first + r / u->attn->group) * stride + head * c->head_dim_k;
}

/* Position of query q, which belongs to sequence *seq or one behind it. */
static int32_t position_of(const paged_attn *attn, int32_t q, int32_t *seq) {
    while (q >= attn->cu_seqlens_q[*seq + 1]) ++*seq;
    return attn->tables.seqlens_k[*seq] - (attn->cu_seqlens_q[*seq + 1] - q);
}

/* Queries into rows [query, head of the group], scaled, so that exp2 of a score is exp of the scaled
 * product. */
static void load_queries(const unit *u, const paged__scratch *scratch, const paged_attn_io *io) {
    const paged_attn *attn = u->attn;
    void (*load_q)(void *, const float *, float, int32_t) = attn->kernels->of[attn->config.type]->load_q;
    int32_t dk = attn->config.head_dim_k, seq = u->entry->seq;
    for (int32_t r = 0; r < u->entry->n_rows; r++) {
        /* Rows lie far apart, where no hardware prefetcher looks. */
        const float *src = q_row(u, io, r), *ahead = q_row(u, io, PAGED_MIN(r + 8, u->entry->n_rows - 1));
        for (int32_t d = 0; d < dk; d += 16) __builtin_prefetch(ahead + d);
        load_q(scratch->q + r * attn->q_stride, src, attn->scale_log2, dk);
        scratch->n_keys[r] = paged__row_keys(attn, u->entry, r);
        scratch->first_key[r] = paged__row_first(attn, u->entry, r);
        if (attn->slopes_log2)
            scratch->position[r] = position_of(attn, u->entry->q_first + r / attn->group, &seq);
    }
}

/* All splits, folded as they come. */
static void run_whole(const unit *u, const paged__scratch *scratch, const paged_attn_io *io) {
    const paged_attn *attn = u->attn;
    int64_t n = attn->state_floats;
    int32_t first = u->entry->split_first;
    attend_split(u, scratch, first, scratch->acc);
    for (int32_t split = first + 1; split < first + u->entry->n_splits; split++) {
        paged__range rows = attend_split(u, scratch, split, scratch->cur);
        for (int32_t r = rows.first; r < rows.end; r++)
            if (scratch->first_key[r] >= split * PAGED_ATTN_SPLIT) /* its window begins here */
                memcpy(scratch->acc + r * n, scratch->cur + r * n, (size_t)n * sizeof(float));
            else
                merge_state(attn, scratch->acc + r * n, scratch->cur + r * n);
    }
    for (int32_t r = 0; r < u->entry->n_rows; r++) finish_row(u, r, scratch->acc + r * n, io);
}

/* Splits from … until - 1 of the unit, counted from its first, to where the merge finds them. */
static void run_part(const unit *u, const paged__scratch *scratch, int32_t from, int32_t until, int32_t cut) {
    for (int32_t split = from; split < until; split++) {
        int32_t absolute = u->entry->split_first + split;
        float *states = u->entry->shared_q < 0 ? paged__workspace(u->attn, cut, split)
                                               : paged__cascade(u->attn, u->entry, u->head, absolute);
        attend_split(u, scratch, absolute, states);
    }
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
        if (u.entry->shared_q < 0 && from == 0 && until == u.entry->n_splits)
            run_whole(&u, scratch, io);
        else /* cut ith goes through the unit, or cut ith + 1 does, as its first, or it is one of a cascade */
            run_part(&u, scratch, from, until, from > 0 ? first_cut_of_unit(attn, ith, nth) : ith + 1);
    }
}

/* ---- merge ---- */

/* Folds the states of all splits that row r sees. */
static void merge_row(const unit *u, int32_t cut, int32_t r, float *acc, const paged_attn_io *io) {
    const paged_attn *attn = u->attn;
    const paged__entry *entry = u->entry;
    int32_t n_keys = paged__row_keys(attn, entry, r),
            first = paged__row_first(attn, entry, r) / PAGED_ATTN_SPLIT;
    for (int32_t split = first; split * PAGED_ATTN_SPLIT < n_keys; split++) {
        float *states = entry->shared_q < 0 ? paged__workspace(attn, cut, split - entry->split_first)
                                            : paged__cascade(attn, entry, u->head, split);
        float *state = states + r * attn->state_floats;
        if (split == first)
            memcpy(acc, state, (size_t)attn->state_floats * sizeof(float));
        else
            merge_state(attn, acc, state);
    }
    finish_row(u, r, acc, io);
}

/* Rows of a unit; threads take the rows of all units in turn, of which n_before came before. */
static void merge_unit(const unit *u, int32_t cut, int64_t n_before, const paged_attn_io *io, int32_t ith,
                       int32_t nth) {
    for (int32_t r = 0; r < u->entry->n_rows; r++)
        if ((n_before + r) % nth == ith) merge_row(u, cut, r, u->attn->scratch[ith].acc, io);
}

void paged_attn_merge(paged_attn *attn, const paged_attn_io *io, int32_t ith, int32_t nth) {
    if (!attn->needs_merge) return;
    int64_t n_rows = 0, n_heads = attn->config.n_kv_heads;
    for (int32_t b = 1; b < nth; b++) {
        paged__cut cut = paged__cut_at(attn, b, nth);
        if (cut.split == 0 || first_cut_of_unit(attn, b, nth) != b) continue;
        unit u = unit_at(attn, NULL, cut.unit);
        if (u.entry->shared_q >= 0) continue;
        merge_unit(&u, b, n_rows, io, ith, nth);
        n_rows += u.entry->n_rows;
    }
    for (int64_t i = 0; attn->n_shared_q > 0 && i < attn->n_entries * n_heads; i++) {
        unit u = unit_at(attn, NULL, i);
        if (u.entry->shared_q < 0 || u.entry->is_prefix) continue;
        merge_unit(&u, 0, n_rows, io, ith, nth);
        n_rows += u.entry->n_rows;
    }
}
