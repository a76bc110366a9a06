/* attn_run.c: paged_attn_run and paged_attn_merge. Nothing here can fail; the plan has checked everything. */
#include <float.h>
#include <math.h>
#include <stdatomic.h>

#include "ops/attn_unit.h"

#define LOG2_E 1.44269504088896340736

static int64_t o_floats(const paged_attn *attn) {
    return attn->state_floats - PAGED__STATE_TAIL;
}
static float *state_m(const paged_attn *attn, float *state) {
    return state + o_floats(attn);
}
static float *state_l(const paged_attn *attn, float *state) {
    return state + o_floats(attn) + 1;
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

/* Where the result of row r of a KV head goes. */
static float *out_of(const paged_attn *attn, const paged__entry *entry, int32_t kv_head, int32_t r,
                     const paged_attn_io *io) {
    int32_t dv = attn->config.head_dim_v;
    int64_t q = entry->q_first + r / attn->group, head = kv_head * attn->group + r % attn->group;
    int64_t stride = io->out_stride ? io->out_stride : (int64_t)attn->config.n_heads * dv;
    return io->out + q * stride + head * dv;
}

/* Writes out and lse of row r of a KV head. A sink is one more score, without a value. */
static void finish_row(const paged_attn *attn, const paged__entry *entry, int32_t kv_head, int32_t r,
                       float *state, const paged_attn_io *io) {
    int32_t n_heads = attn->config.n_heads, dv = attn->config.head_dim_v;
    int64_t q = entry->q_first + r / attn->group, head = kv_head * attn->group + r % attn->group;
    float *out = out_of(attn, entry, kv_head, r, io);
    float l = paged__row_keys(attn, entry, r) > 0 ? *state_l(attn, state) : 0;
    double m = *state_m(attn, state), sink = io->sinks ? io->sinks[head] * LOG2_E : -INFINITY;
    if (l != 0)
        attn->kernels->divide(out, state,
                              sink == -INFINITY ? l : (float)PAGED_MIN(FLT_MAX, l + exp2(sink - m)), dv);
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
    bool sees_all;    /* the step at hand: every row that sees a token of it sees all */
    float *states;    /* of all rows of the unit */
} split_run;

static split_run split_run_of(const paged__unit *u, float *states) {
    const paged__kernels *kernels = u->attn->kernels;
    split_run run = {
        .tiles = kernels->of[u->kv->type], .pack = u->kv->layout == PAGED_LAYOUT_PLAIN, .states = states};
    run.widen = run.tiles->widen_k && u->entry->n_rows > PAGED__FEW_ROWS;
    run.kernels = run.widen ? kernels->of[PAGED_TYPE_F32] : run.tiles;
    return run;
}

/* The rows of head h of the unit that see a token of the step; where its tiles lie is written elsewhere. */
static paged__step *rows_of(const paged__unit *u, const split_run *run, const paged__scratch *scratch,
                            int32_t h, paged__range rows) {
    const paged_attn *attn = u->attn;
    paged__step *step = &scratch->steps[h];
    int64_t first = paged__unit_row(u, h, rows.first);
    step->n_rows = rows.end - rows.first;
    step->head_dim_k = attn->config.head_dim_k;
    step->head_dim_v = attn->config.head_dim_v;
    step->k.looks_near = step->v.looks_near = attn->kernels->looks_near;
    step->seen = (run->sees_all ? scratch->seen_all : scratch->seen) + rows.first;
    step->q = scratch->q + first * attn->q_stride;
    step->q_stride = attn->q_stride;
    step->s = scratch->s;
    step->p = scratch->p + first * attn->p_stride;
    step->p_stride = attn->p_stride;
    step->l = scratch->l + first * PAGED__L_LANES;
    step->o = run->states + first * attn->state_floats;
    step->o_stride = attn->state_floats;
    step->o_floats = (int32_t)o_floats(attn);
    return step;
}

/* Softcap, then ALiBi, of the scores of a head. */
static void adjust_scores(const paged__unit *u, const paged__scratch *scratch, int32_t h, paged__range rows,
                          int32_t t0) {
    const paged_attn *attn = u->attn;
    if (attn->softcap_log2 == 0 && !attn->slopes_log2) return;
    for (int32_t r = rows.first; r < rows.end; r++) {
        float *s = scratch->s + (r - rows.first) * PAGED_ATTN_STEP;
        if (attn->softcap_log2 != 0) attn->softcap(s, attn->softcap_log2);
        if (attn->slopes_log2)
            attn->alibi(s, attn->slopes_log2[(u->head + h) * attn->group + r % attn->group],
                        t0 - scratch->position[r]);
    }
}

/* Whether the kernels have one call for a step of so many rows. */
static bool attends_at_once(const paged__unit *u, const split_run *run, paged__range rows) {
    const paged_attn *attn = u->attn;
    return run->kernels->attend && rows.end - rows.first > paged__few_rows(run->kernels) &&
           attn->softcap_log2 == 0 && !attn->slopes_log2;
}

static void weigh(const paged__unit *u, const split_run *run, const paged__scratch *scratch,
                  const paged__step *step, int32_t h, paged__range rows, int32_t t0) {
    run->kernels->qk(step);
    adjust_scores(u, scratch, h, rows, t0);
    run->kernels->softmax(step);
}

static paged__attn_step step_at(const paged__unit *u, const paged__table *table, int32_t head, int32_t t0,
                                int32_t first) {
    return (paged__attn_step){.kv = u->kv,
                              .table = table,
                              .head = head,
                              .t0 = t0,
                              .n_tokens = PAGED_MIN(u->entry->n_keys - t0, PAGED_ATTN_STEP),
                              .n_before = PAGED_MAX(first - t0, 0)};
}

/* Of tiles of the cache, which follow. */
static void set_lines(const paged__unit *u, paged__tiles *k, paged__tiles *v) {
    int32_t row = PAGED_TILE * (int32_t)paged__type_bytes(u->kv->type);
    k->next_lines = (row * u->kv->head_dim_k + 63) / 64;
    v->next_lines = (row * u->kv->head_dim_v + 63) / 64;
    k->n_next = v->n_next = PAGED__STEP_TILES;
}

/* What is worked on after `tiles`: first this, then that. */
static void set_next(paged__tiles *tiles, const paged__tiles *first, const paged__tiles *then) {
    memcpy(tiles->next, first->at, sizeof first->at);
    memcpy(tiles->next + PAGED__STEP_TILES, then->at, sizeof then->at);
    memcpy(tiles->next_scale, first->scale, sizeof tiles->next_scale);
}

/* The first key that a row of the entry sees. */
static int32_t first_key_of(const paged__unit *u) {
    return PAGED_MAX(paged__row_first(u->attn, u->entry, 0), u->entry->split_first * PAGED_ATTN_SPLIT);
}

/* What comes after the step of head h at t0: the next head, the next step, or, after the last one, likely the
 * next KV head of the entry. False: not known. */
static bool step_after(const paged__unit *u, int32_t h, int32_t t0, int32_t first, paged__table *table,
                       paged__attn_step *next) {
    int32_t head = u->head + h + 1;
    if (h + 1 == u->n_heads && t0 + PAGED_ATTN_STEP < u->entry->n_keys) {
        head = u->head;
        t0 += PAGED_ATTN_STEP;
        first = 0; /* what rows see here reaches beyond the step */
    } else if (h + 1 == u->n_heads) {
        first = first_key_of(u);
        t0 = first / PAGED_ATTN_STEP * PAGED_ATTN_STEP;
    }
    if (head >= u->attn->config.n_kv_heads) return false;
    *table = paged__table_of(u->kv, &u->attn->tables, u->entry->seq, head);
    *next = step_at(u, table, head, t0, first);
    return true;
}

/* A step of which K and V have to be brought into another form: head by head, since there is room for one. */
static void attend_brought(const paged__unit *u, const split_run *run, const paged__scratch *scratch,
                           int32_t t0, int32_t first, paged__range rows) {
    for (int32_t h = 0; h < u->n_heads; h++) {
        int32_t head = u->head + h;
        paged__table table = paged__table_of(u->kv, &u->attn->tables, u->entry->seq, head), next_table;
        paged__attn_step at = step_at(u, &table, head, t0, first), next;
        bool follows = step_after(u, h, t0, first, &next_table, &next);
        paged__step *step = rows_of(u, run, scratch, h, rows);
        paged__tiles *k = &step->k, *v = &step->v;
        if (run->pack)
            paged__tiles_pack(run->tiles, &at, follows ? &next : NULL, scratch, run->widen, k->at, v->at);
        else
            paged__tiles_widen(run->tiles, &at, scratch, k->at, v->at);
        set_next(k, k, k);
        set_next(v, v, v);
        k->next_lines = v->next_lines = 0;
        bool at_once = attends_at_once(u, run, rows);
        if (at_once && !run->pack && follows) {
            paged__tiles_find(&next, k->next, v->next);
            set_lines(u, k, v);
        }
        if (at_once) {
            run->kernels->attend(step);
        } else {
            weigh(u, run, scratch, step, h, rows, t0);
            run->kernels->pv(step);
        }
    }
}

/* Where the tiles of head h of the unit lie. */
static void find_tiles(const paged__unit *u, int32_t h, int32_t t0, int32_t first, paged__tiles *k,
                       paged__tiles *v) {
    paged__table table = paged__table_of(u->kv, &u->attn->tables, u->entry->seq, u->head + h);
    paged__attn_step step = step_at(u, &table, u->head + h, t0, first);
    paged__tiles_find(&step, k->at, v->at);
    if (u->kv->type == PAGED_TYPE_I8) paged__scales_find(&step, k->scale, v->scale);
}

/* Of head h where those of head 0 of the unit, with the same table, are at k0 and v0. */
static void find_beside(const paged__unit *u, int32_t h, const paged__tiles *k0, const paged__tiles *v0,
                        paged__tiles *k, paged__tiles *v) {
    int64_t to_k = h * u->kv->k_head_stride, to_v = h * u->kv->v_head_stride;
    for (int32_t j = 0; j < PAGED__STEP_TILES; j++) {
        k->at[j] = (const uint8_t *)k0->at[j] + to_k;
        v->at[j] = (const uint8_t *)v0->at[j] + to_v;
    }
    int64_t to_scale = h * (u->kv->scale_head_stride / (int64_t)sizeof(float));
    for (int32_t j = 0; j < PAGED__STEP_TILES && u->kv->type == PAGED_TYPE_I8; j++) {
        k->scale[j] = k0->scale[j] + to_scale;
        v->scale[j] = v0->scale[j] + to_scale;
    }
}

/* Place i of the order in which few rows take the tiles of n heads: K of one head after the other, then V,
 * then what follows. */
static paged__tiles *place(paged__step *steps, int32_t n, int32_t i, paged__tiles after[2]) {
    return i < n ? &steps[i].k : i < 2 * n ? &steps[i - n].v : &after[i - 2 * n];
}

/* The tiles of all heads, and which come after them: in the order of `place`, on to K of the next step; or,
 * at once, K and V of one head after the other. */
static void find_all(const paged__unit *u, const paged__scratch *scratch, int32_t t0, int32_t first,
                     bool at_once) {
    paged__step *steps = scratch->steps;
    int32_t n = u->n_heads, t1 = t0 + PAGED_ATTN_STEP;
    bool has_one_table = u->attn->tables.head_stride == 0;
    for (int32_t h = 0; h < n; h++) {
        if (h == 0 || !has_one_table)
            find_tiles(u, h, t0, first, &steps[h].k, &steps[h].v);
        else
            find_beside(u, h, &steps[0].k, &steps[0].v, &steps[h].k, &steps[h].v);
        set_lines(u, &steps[h].k, &steps[h].v);
    }
    paged__tiles after[2] = {steps[n - 1].v, steps[n - 1].v}, v_after = after[0], unused;
    if (t1 < u->entry->n_keys) { /* what the rows of this step see reaches beyond it */
        find_tiles(u, 0, t1, 0, &after[0], &v_after);
        after[1] = v_after;
        if (n > 1 && !at_once && has_one_table)
            find_beside(u, 1, &after[0], &v_after, &after[1], &unused);
        else if (n > 1 && !at_once)
            find_tiles(u, 1, t1, 0, &after[1], &unused);
    } else if (at_once && u->head + n < u->attn->config.n_kv_heads) { /* likely the entry's next KV head */
        int32_t key = first_key_of(u);
        find_tiles(u, n, key / PAGED_ATTN_STEP * PAGED_ATTN_STEP, key, &after[0], &v_after);
    }
    for (int32_t i = 0; i < 2 * n && !at_once; i++)
        set_next(place(steps, n, i, after), place(steps, n, i + 1, after), place(steps, n, i + 2, after));
    for (int32_t h = 0; h < n && at_once; h++) {
        const paged__step *next = &steps[PAGED_MIN(h + 1, n - 1)];
        set_next(&steps[h].k, h + 1 < n ? &next->k : &after[0], &after[0]);
        set_next(&steps[h].v, h + 1 < n ? &next->v : &v_after, &v_after);
    }
    /* Scales of V are wanted with those of K. */
    memcpy(steps[n - 1].k.next_scale, v_after.scale, sizeof v_after.scale);
}

/* The rows of all heads of the unit that see a token of the step at t0, against its tokens, of which the
 * first that counts is `first`. */
static void attend_step(const paged__unit *u, split_run *run, const paged__scratch *scratch, int32_t t0,
                        int32_t first, paged__range rows) {
    run->sees_all =
        scratch->first_key[rows.end - 1] <= t0 && scratch->n_keys[rows.first] >= t0 + PAGED_ATTN_STEP;
    for (int32_t r = rows.first; r < rows.end && !run->sees_all; r++)
        scratch->seen[r] = (paged__range){PAGED_MAX(scratch->first_key[r] - t0, 0),
                                          PAGED_MIN(scratch->n_keys[r] - t0, PAGED_ATTN_STEP)};
    if (run->pack || run->widen) {
        attend_brought(u, run, scratch, t0, first, rows);
        return;
    }
    bool at_once = attends_at_once(u, run, rows);
    find_all(u, scratch, t0, first, at_once);
    if (at_once && u->beside) paged__cascade_beside(u, scratch);
    for (int32_t h = 0; h < u->n_heads; h++) {
        const paged__step *step = rows_of(u, run, scratch, h, rows);
        if (at_once)
            run->kernels->attend(step);
        else
            weigh(u, run, scratch, step, h, rows, t0);
    }
    for (int32_t h = 0; h < u->n_heads && !at_once; h++) run->kernels->pv(&scratch->steps[h]);
}

/* In one fixed order: lane i with i + 8, then 4, 2, 1. */
static float sum_lanes(const float *lanes) {
    float x[8], y[4];
    for (int32_t i = 0; i < 8; i++) x[i] = lanes[i] + lanes[i + 8];
    for (int32_t i = 0; i < 4; i++) y[i] = x[i] + x[i + 4];
    return (y[0] + y[2]) + (y[1] + y[3]);
}

paged__range paged__unit_rows(const paged__unit *u, const paged__scratch *scratch, int32_t t0, int32_t t1) {
    paged__range rows = {0, u->entry->n_rows};
    while (rows.first < rows.end && scratch->n_keys[rows.first] <= t0) rows.first++;
    while (rows.end > rows.first && scratch->first_key[rows.end - 1] >= t1) rows.end--;
    return rows;
}

static void begin_state(const paged_attn *attn, float *state) {
    memset(state, 0, (size_t)o_floats(attn) * sizeof(float));
    *state_m(attn, state) = -INFINITY;
}

void paged__unit_begin(const paged__unit *u, float *states) {
    for (int32_t h = 0; h < u->n_heads; h++)
        for (int32_t r = 0; r < u->entry->n_rows; r++)
            begin_state(u->attn, states + paged__unit_row(u, h, r) * u->attn->state_floats);
}

static void end_states(const paged__unit *u, const paged__scratch *scratch, paged__range rows,
                       float *states) {
    const paged_attn *attn = u->attn;
    for (int32_t h = 0; h < u->n_heads; h++)
        for (int32_t r = rows.first; r < rows.end; r++) {
            int64_t i = paged__unit_row(u, h, r);
            float *lanes = scratch->l + i * PAGED__L_LANES;
            *state_l(attn, states + i * attn->state_floats) = sum_lanes(lanes);
            memset(lanes, 0, PAGED__L_LANES * sizeof(float));
        }
}

paged__range paged__unit_attend(const paged__unit *u, const paged__scratch *scratch, int32_t split,
                                float *states) {
    int32_t begin = split * PAGED_ATTN_SPLIT;
    paged__range all = paged__unit_rows(u, scratch, begin, begin + PAGED_ATTN_SPLIT);
    if (all.first == all.end) return all;
    split_run run = split_run_of(u, states);
    int32_t first = PAGED_MAX(scratch->first_key[all.first], begin),
            end = PAGED_MIN(scratch->n_keys[all.end - 1], begin + PAGED_ATTN_SPLIT);
    for (int32_t t0 = first / PAGED_ATTN_STEP * PAGED_ATTN_STEP; t0 < end; t0 += PAGED_ATTN_STEP) {
        paged__range rows = paged__unit_rows(u, scratch, t0, t0 + PAGED_ATTN_STEP);
        attend_step(u, &run, scratch, t0, scratch->first_key[rows.first], rows);
    }
    end_states(u, scratch, all, states);
    return all;
}

/* ---- a unit ---- */

/* Position of query q, which belongs to sequence *seq or one behind it. */
static int32_t position_of(const paged_attn *attn, int32_t q, int32_t *seq) {
    while (q >= attn->cu_seqlens_q[*seq + 1]) ++*seq;
    return attn->tables.seqlens_k[*seq] - (attn->cu_seqlens_q[*seq + 1] - q);
}

void paged__unit_set_rows(const paged__unit *u, const paged__scratch *scratch) {
    const paged_attn *attn = u->attn;
    int32_t seq = u->entry->seq;
    for (int32_t r = 0; r < u->entry->n_rows; r++) {
        scratch->n_keys[r] = paged__row_keys(attn, u->entry, r);
        scratch->first_key[r] = paged__row_first(attn, u->entry, r);
        if (attn->slopes_log2)
            scratch->position[r] = position_of(attn, u->entry->q_first + r / attn->group, &seq);
    }
}

void paged__unit_load(const paged__unit *u, const paged__scratch *scratch, const paged_attn_io *io) {
    const paged_attn *attn = u->attn;
    const paged_attn_config *c = &attn->config;
    void (*load_q)(void *, const float *, float, int32_t) = attn->kernels->of[c->type]->load_q;
    int32_t dk = c->head_dim_k, n_q = u->entry->n_rows / attn->group;
    int64_t stride = io->q_stride ? io->q_stride : (int64_t)c->n_heads * dk;
    uint8_t *row = scratch->q;
    for (int32_t h = u->head; h < u->head + u->n_heads; h++) {
        const float *src = io->q + u->entry->q_first * stride + (int64_t)h * attn->group * dk;
        for (int32_t q = 0; q < n_q; q++, src += stride)
            for (int32_t i = 0; i < attn->group; i++, row += attn->q_stride) {
                /* Rows lie far apart, where no hardware prefetcher looks. */
                const float *at = src + (int64_t)i * dk, *ahead = q + 8 < n_q ? at + 8 * stride : at;
                for (int32_t d = 0; d < dk; d += 16) __builtin_prefetch(ahead + d);
                load_q(row, at, attn->scale_log2, dk);
            }
    }
    paged__unit_set_rows(u, scratch);
}

void paged__unit_fold(const paged__unit *u, const paged__scratch *scratch, int32_t split, float *states,
                      paged__range rows) {
    const paged_attn *attn = u->attn;
    int64_t n = attn->state_floats;
    for (int32_t h = 0; h < u->n_heads; h++)
        for (int32_t r = rows.first; r < rows.end; r++) {
            int64_t at = paged__unit_row(u, h, r) * n;
            float *acc = scratch->acc + at, *state = states + at;
            if (scratch->first_key[r] >= split * PAGED_ATTN_SPLIT) /* its window begins here */
                memcpy(acc, state, (size_t)n * sizeof(float));
            else
                merge_state(attn, acc, state);
            begin_state(attn, state);
        }
}

void paged__unit_finish(const paged__unit *u, const paged__scratch *scratch, const paged_attn_io *io) {
    const paged_attn *attn = u->attn;
    int32_t n_rows = u->entry->n_rows;
    for (int32_t h = 0; h < u->n_heads; h++)
        for (int32_t r = 0; r < n_rows; r++) {
            /* Rows lie far apart, and a store waits for its line. */
            const float *ahead = out_of(attn, u->entry, u->head + h, PAGED_MIN(r + 8, n_rows - 1), io);
            for (int32_t d = 0; d < attn->config.head_dim_v && n_rows > PAGED__FEW_ROWS; d += 16)
                __builtin_prefetch(ahead + d, 1);
            finish_row(attn, u->entry, u->head + h, r,
                       scratch->acc + paged__unit_row(u, h, r) * attn->state_floats, io);
        }
}

/* All splits, folded as they come. */
static void run_whole(const paged__unit *u, const paged__scratch *scratch, const paged_attn_io *io) {
    int32_t first = u->entry->split_first, end = first + u->entry->n_splits;
    float *cur = scratch->cur;
    paged__unit_load(u, scratch, io);
    paged__unit_begin(u, scratch->acc);
    paged__unit_attend(u, scratch, first, scratch->acc);
    if (end > first + 1) paged__unit_begin(u, cur);
    for (int32_t split = first + 1; split < end; split++)
        paged__unit_fold(u, scratch, split, cur, paged__unit_attend(u, scratch, split, cur));
    paged__unit_finish(u, scratch, io);
}

/* States of a split to where the merge finds them. `cut` is the first to have the entry. */
static void keep_states(const paged__unit *u, const float *states, int32_t split, int32_t cut) {
    int64_t n = u->entry->n_rows * u->attn->state_floats;
    for (int32_t h = 0; h < u->n_heads; h++)
        memcpy(paged__workspace(u->attn, cut, split, u->head + h), states + h * n, (size_t)n * sizeof(float));
}

int32_t paged__heads_at_once(const paged_attn *attn, const paged_kv *kv, const paged__entry *entry) {
    if (kv->k_head_stride > kv->block_stride) return 1;
    return PAGED_MIN(PAGED_MAX(PAGED__UNIT_ROWS / entry->n_rows, 1), attn->heads_max);
}

/* Parts first … end - 1 of the rows of an entry, as one of its own. */
static paged__entry parts_of(const paged_attn *attn, const paged__entry *entry, int32_t first, int32_t end) {
    int32_t n_q = entry->n_rows / attn->group, q0 = n_q * first / PAGED__ROW_PARTS,
            q1 = n_q * end / PAGED__ROW_PARTS;
    paged__entry part = *entry;
    part.q_first += q0;
    part.first_keys += q0;
    part.n_rows = (q1 - q0) * attn->group;
    part.n_keys = PAGED_MAX(paged__row_keys(attn, &part, part.n_rows - 1), 0);
    part.n_splits = PAGED_MAX((part.n_keys + PAGED_ATTN_SPLIT - 1) / PAGED_ATTN_SPLIT - part.split_first, 1);
    return part;
}

/* What a thread has at hand of a run. */
typedef struct worker {
    paged_attn *attn;
    const paged_kv *kv;
    const paged_attn_io *io;
    const paged__scratch *scratch; /* the thread's own */
    paged__unit loaded;            /* whose queries are in the scratch, if it has heads */
    bool may_fold;                 /* the share is its own, so that nobody else folds */
    int32_t n_folded; /* first splits of the share's last entry, of all heads; they are in scratch->acc */
} worker;

static paged__unit unit_of(const worker *w, const paged__entry *entry, int32_t head, int32_t n_heads) {
    return (paged__unit){.attn = w->attn,
                         .kv = w->kv,
                         .entry = entry,
                         .head_rows = entry->n_rows,
                         .head = head,
                         .n_heads = n_heads};
}

/* All splits of some heads. */
static void run_heads(worker *w, const paged__entry *entry, int32_t head, int32_t n_heads) {
    paged__unit u = unit_of(w, entry, head, n_heads);
    run_whole(&u, w->scratch, w->io);
    w->loaded.n_heads = 0;
}

/* Some parts of the rows of a head. */
static void run_parts(worker *w, const paged__entry *entry, int32_t head, int32_t first, int32_t n) {
    paged__entry part = parts_of(w->attn, entry, first, first + n);
    run_heads(w, &part, head, 1);
}

/* A split of some heads. Often they are those of the split before, whose queries are still there. */
static void run_split(worker *w, const paged__entry *entry, int32_t split, int32_t head, int32_t n_heads,
                      int32_t cut) {
    const paged__scratch *scratch = w->scratch;
    paged__unit u = unit_of(w, entry, head, n_heads);
    if (w->loaded.entry != entry || w->loaded.head != head || w->loaded.n_heads < n_heads) {
        paged__unit_load(&u, scratch, w->io);
        w->loaded = u;
    }
    bool folds = w->may_fold && split == w->n_folded && n_heads == w->attn->config.n_kv_heads;
    float *states = folds && split == 0 ? scratch->acc : scratch->cur;
    int32_t nth_split = entry->split_first + split;
    paged__unit_begin(&u, states);
    paged__range rows = paged__unit_attend(&u, scratch, nth_split, states);
    if (folds && split > 0) paged__unit_fold(&u, scratch, nth_split, states, rows);
    if (folds)
        w->n_folded++;
    else
        keep_states(&u, states, split, cut);
}

/* Claims in turn until there are none: KV heads of an entry, as many as are taken along at once. */
static void run_claimed(worker *w, int32_t nth) {
    paged_attn *attn = w->attn;
    int64_t n_heads = attn->config.n_kv_heads, n_claims = attn->n_entries * n_heads, claim;
    while ((claim = atomic_fetch_add_explicit(&attn->n_claimed, 1, memory_order_relaxed)) < n_claims) {
        const paged__entry *entry = &attn->entries[attn->n_entries - 1 - claim / n_heads];
        int32_t head = (int32_t)(claim % n_heads), most = paged__heads_at_once(attn, w->kv, entry);
        if (head % most == 0) run_heads(w, entry, head, PAGED_MIN(most, (int32_t)n_heads - head));
    }
    /* The last one leaves all as it was; the caller's barrier is before the next run. */
    if (atomic_fetch_add(&attn->n_done, 1) + 1 < nth) return;
    attn->n_claimed = 0;
    attn->n_done = 0;
}

/* ---- shares ---- */

/* A piece of a share: n items from `item` on of an entry, as the entry has them, or KV heads of one that is
 * folded as it comes. */
typedef struct piece {
    int32_t entry, item, n;
    int32_t cut; /* the workspace that the states go to; 0: folded as they come */
} piece;

/* A place in a share that goes ahead: an entry, and how many items of the share come before it. */
typedef struct share_place {
    int32_t entry;
    int64_t n_before;
} share_place;

/* All of the share that is of an entry. */
static piece all_of(const paged_attn *attn, const paged__share *share, int32_t index) {
    const paged__entry *entry = &attn->entries[index];
    piece all = {.entry = index, .item = index == share->begin.entry ? share->begin.item : 0};
    bool is_cut = paged__entry_can_cut(attn, entry);
    if (is_cut && index == paged__entry_before(share->end)) all.cut = share->end_cut;
    if (is_cut && all.item > 0) all.cut = share->begin_cut;
    int32_t n = is_cut && !all.cut ? attn->config.n_kv_heads : paged__entry_items(attn, entry);
    all.n = (index == share->end.entry ? share->end.item : n) - all.item;
    return all;
}

/* How many items, from `item` on, one takes at once where n_left of the entry are left. */
static int32_t items_at_once(const worker *w, const paged__entry *entry, int32_t item, int32_t n_left) {
    const paged_attn *attn = w->attn;
    int32_t n_heads = attn->config.n_kv_heads, most;
    if (entry->is_prefix) return n_left;
    if (paged__entry_has_parts(attn, entry))
        most = PAGED__ROW_PARTS - item % PAGED__ROW_PARTS;
    else
        most = PAGED_MIN(paged__heads_at_once(attn, w->kv, entry), n_heads - item % n_heads);
    return PAGED_MIN(most, n_left);
}

/* The next piece of a share, in which `at` is this thread's place. False: all is taken. */
static bool claim(const worker *w, paged__share *share, share_place *at, piece *out) {
    int64_t n_left = atomic_load_explicit(&share->n_left, memory_order_acquire);
    while (n_left > 0) {
        int64_t item = share->n_items - n_left;
        piece all = all_of(w->attn, share, at->entry);
        for (; item >= at->n_before + all.n; all = all_of(w->attn, share, ++at->entry)) at->n_before += all.n;
        *out = all;
        out->item = all.item + (int32_t)(item - at->n_before);
        out->n = items_at_once(w, &w->attn->entries[all.entry], out->item, all.item + all.n - out->item);
        if (atomic_compare_exchange_weak_explicit(&share->n_left, &n_left, n_left - out->n,
                                                  memory_order_acquire, memory_order_acquire))
            return true;
    }
    return false;
}

static void run_piece(worker *w, const piece *p, int32_t ith, int32_t nth) {
    paged_attn *attn = w->attn;
    const paged__entry *entry = &attn->entries[p->entry];
    int32_t n_heads = attn->config.n_kv_heads;
    if (entry->is_prefix) w->loaded.n_heads = 0;
    if (entry->is_prefix)
        paged__cascade_run(attn, w->kv, entry, p->item, p->item + p->n, w->io, ith, nth);
    else if (paged__entry_has_parts(attn, entry))
        run_parts(w, entry, p->item / PAGED__ROW_PARTS, p->item % PAGED__ROW_PARTS, p->n);
    else if (p->cut)
        run_split(w, entry, p->item / n_heads, p->item % n_heads, p->n, p->cut);
    else
        run_heads(w, entry, p->item, p->n);
}

/* What nobody has begun of a share. */
static void run_share(worker *w, paged__share *share, int32_t ith, int32_t nth) {
    if (atomic_load_explicit(&share->n_left, memory_order_acquire) == 0) return;
    share_place at = {.entry = share->begin.entry};
    for (piece p; claim(w, share, &at, &p);) run_piece(w, &p, ith, nth);
}

/* From here on others may take of it. */
static void begin_share(const paged_attn *attn, paged__share *share, int32_t ith, int32_t nth) {
    share->begin = paged__cut_at(attn, ith, nth);
    share->end = paged__cut_at(attn, ith + 1, nth);
    bool keeps = paged__cut_keeps(attn, share->end, nth);
    share->begin_cut = share->begin.item > 0 ? paged__first_cut(attn, ith, nth) : 0;
    share->end_cut = keeps ? paged__first_cut(attn, ith + 1, nth) : 0;
    share->n_items = 0;
    for (int32_t i = share->begin.entry; i < share->end.entry + (share->end.item > 0); i++)
        share->n_items += all_of(attn, share, i).n;
    atomic_store_explicit(&share->n_left, share->n_items, memory_order_release);
}

/* A share, and then of others. Of a cascade each thread has its own. */
static void run_shares(worker *w, int32_t ith, int32_t nth) {
    paged_attn *attn = w->attn;
    paged__share *share = &attn->shares[ith];
    begin_share(attn, share, ith, nth);
    w->may_fold = true;
    run_share(w, share, ith, nth);
    w->may_fold = false;
    share->n_folded = w->n_folded;
    if (w->n_folded > 0) keep_states(&w->loaded, w->scratch->acc, w->n_folded - 1, share->end_cut);
    for (int32_t i = 1; i < nth && attn->n_owns == 0; i++)
        run_share(w, &attn->shares[(ith + i) % nth], ith, nth);
}

void paged_attn_run(paged_attn *attn, const paged_kv *kv, const paged_attn_io *io, int32_t ith, int32_t nth) {
    if (attn->n_entries == 0) return;
    worker w = {.attn = attn, .kv = kv, .io = io, .scratch = &attn->scratch[ith]};
    if (attn->is_claimed && nth > 1)
        run_claimed(&w, nth);
    else
        run_shares(&w, ith, nth);
    void (*end)(void) = attn->kernels->of[kv->type]->end;
    if (end) end();
}

/* ---- merge ---- */

/* Folds the states of all splits that row r of a KV head sees; of those before `folded` they are in that of
 * `folded`. With `prefix` the entry is one of its own. nth: from this thread's row to its next. */
static void merge_row(const paged_attn *attn, const paged__entry *entry, const paged__entry *prefix,
                      int32_t cut, int32_t folded, int32_t head, int32_t r, float *acc,
                      const paged_attn_io *io, int32_t nth) {
    const uintptr_t next = (uintptr_t)attn->state_floats * (uintptr_t)nth * sizeof(float);
    int32_t n_keys = paged__row_keys(attn, entry, r),
            first = PAGED_MAX(paged__row_first(attn, entry, r) / PAGED_ATTN_SPLIT, folded);
    for (int32_t split = first; split == first || split * PAGED_ATTN_SPLIT < n_keys; split++) {
        float *state =
            prefix ? paged__cascade(attn, prefix, cut, split,
                                    (entry->q_first - prefix->q_first) * attn->group + r)
                   : paged__workspace(attn, cut, split - entry->split_first, head) + r * attn->state_floats;
        /* Half of them were written by others. */
        for (int64_t i = 0; i < attn->state_floats; i += 16)
            __builtin_prefetch((const void *)((uintptr_t)(state + i) + next));
        if (split == first)
            memcpy(acc, state, (size_t)attn->state_floats * sizeof(float));
        else
            merge_state(attn, acc, state);
    }
    finish_row(attn, entry, head, r, acc, io);
}

void paged_attn_merge(paged_attn *attn, const paged_attn_io *io, int32_t ith, int32_t nth) {
    if (!attn->needs_merge) return;
    int64_t n_rows = 0; /* threads take the rows of all pieces in turn */
    float *acc = attn->scratch[ith].acc;
    paged__cut before, cut = {0, 0};
    for (int32_t b = 1; b <= nth; b++) {
        before = cut;
        cut = paged__cut_at(attn, b, nth);
        if (!paged__cut_keeps(attn, cut, nth) || paged__cuts_share_piece(attn, before, cut)) continue;
        const paged__entry *entry = &attn->entries[paged__entry_before(cut)];
        if (entry->is_prefix) {
            int32_t head = cut.item / paged__head_items(entry);
            for (int32_t i = entry->own; i < entry->own + entry->n_own; i++)
                for (int32_t r = 0; r < attn->owns[i].n_rows; r++, n_rows++)
                    if (n_rows % nth == ith)
                        merge_row(attn, &attn->owns[i], entry, b, 0, head, r, acc, io, nth);
            continue;
        }
        int32_t folded = entry->split_first + PAGED_MAX(attn->shares[b - 1].n_folded - 1, 0);
        for (int32_t head = 0; head < attn->config.n_kv_heads; head++)
            for (int32_t r = 0; r < entry->n_rows; r++, n_rows++)
                if (n_rows % nth == ith) merge_row(attn, entry, NULL, b, folded, head, r, acc, io, nth);
    }
}
