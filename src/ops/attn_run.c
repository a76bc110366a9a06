/* attn_run.c: paged_attn_run and paged_attn_merge. Nothing here can fail; the plan has checked everything. */
#include <float.h>
#include <math.h>

#include "ops/attn.h"

#define LOG2_E 1.44269504088896340736

/* What a cascade brings into the cache while its prefix is at work: steps of the entries of its own. */
typedef struct beside {
    int32_t n_before, n_steps;   /* of the prefix: behind us, of all */
    int32_t n_brought, n_wanted; /* of the entries of its own */
    int32_t own, t0;             /* the step that comes next; entries before are there */
} beside;

/* Some KV heads of an entry, at work. Row r of head h is row (h * head_rows + first_row + r) of the scratch,
 * with h counted from `head`. */
typedef struct unit {
    const paged_attn *attn;
    const paged_kv *kv;
    const paged__entry *entry;
    int32_t head, n_heads;
    int32_t head_rows, first_row;
    beside *beside; /* NULL: nothing */
} unit;

static int64_t row_at(const unit *u, int32_t h, int32_t r) {
    return (int64_t)h * u->head_rows + u->first_row + r;
}

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

/* Writes out and lse of row r of a KV head. A sink is one more score, without a value. */
static void finish_row(const paged_attn *attn, const paged__entry *entry, int32_t kv_head, int32_t r,
                       float *state, const paged_attn_io *io) {
    int32_t n_heads = attn->config.n_heads, dv = attn->config.head_dim_v;
    int64_t q = entry->q_first + r / attn->group, head = kv_head * attn->group + r % attn->group;
    int64_t stride = io->out_stride ? io->out_stride : (int64_t)n_heads * dv;
    float *out = io->out + q * stride + head * dv;
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

static split_run split_run_of(const unit *u, float *states) {
    const paged__kernels *kernels = u->attn->kernels;
    split_run run = {
        .tiles = kernels->of[u->kv->type], .pack = u->kv->layout == PAGED_LAYOUT_PLAIN, .states = states};
    run.widen = run.tiles->widen_k && u->entry->n_rows > PAGED__FEW_ROWS;
    run.kernels = run.widen ? kernels->of[PAGED_TYPE_F32] : run.tiles;
    return run;
}

/* The rows of head h of the unit that see a token of the step; where its tiles lie is written elsewhere. */
static paged__step *rows_of(const unit *u, const split_run *run, const paged__scratch *scratch, int32_t h,
                            paged__range rows) {
    const paged_attn *attn = u->attn;
    paged__step *step = &scratch->steps[h];
    int64_t first = row_at(u, h, rows.first);
    step->n_rows = rows.end - rows.first;
    step->head_dim_k = attn->config.head_dim_k;
    step->head_dim_v = attn->config.head_dim_v;
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
static void adjust_scores(const unit *u, const paged__scratch *scratch, int32_t h, paged__range rows,
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
static bool attends_at_once(const unit *u, const split_run *run, paged__range rows) {
    const paged_attn *attn = u->attn;
    return run->kernels->attend && rows.end - rows.first > PAGED__FEW_ROWS && attn->softcap_log2 == 0 &&
           !attn->slopes_log2;
}

static void weigh(const unit *u, const split_run *run, const paged__scratch *scratch, const paged__step *step,
                  int32_t h, paged__range rows, int32_t t0) {
    run->kernels->qk(step);
    adjust_scores(u, scratch, h, rows, t0);
    run->kernels->softmax(step);
}

static paged__attn_step step_at(const unit *u, const paged__table *table, int32_t head, int32_t t0,
                                int32_t first) {
    return (paged__attn_step){.kv = u->kv,
                              .table = table,
                              .head = head,
                              .t0 = t0,
                              .n_tokens = PAGED_MIN(u->entry->n_keys - t0, PAGED_ATTN_STEP),
                              .n_before = PAGED_MAX(first - t0, 0)};
}

/* Of tiles of the cache, which follow. */
static void set_lines(const unit *u, paged__tiles *k, paged__tiles *v) {
    int32_t row = PAGED_TILE * (int32_t)paged__type_bytes(u->kv->type);
    k->next_lines = (row * u->kv->head_dim_k + 63) / 64;
    v->next_lines = (row * u->kv->head_dim_v + 63) / 64;
    k->n_next = v->n_next = PAGED__STEP_TILES;
}

/* A step of which K and V have to be brought into another form: head by head, since there is room for one. */
static void attend_brought(const unit *u, const split_run *run, const paged__scratch *scratch, int32_t t0,
                           int32_t first, paged__range rows) {
    const paged_tables *tables = &u->attn->tables;
    int32_t seq = u->entry->seq, t1 = t0 + PAGED_ATTN_STEP;
    for (int32_t h = 0; h < u->n_heads; h++) {
        int32_t head = u->head + h, next_head = h + 1 < u->n_heads ? head + 1 : u->head;
        paged__table table = paged__table_of(u->kv, tables, seq, head),
                     next_table = paged__table_of(u->kv, tables, seq, next_head);
        paged__attn_step at = step_at(u, &table, head, t0, first), next;
        bool ends = next_head == u->head && t1 >= u->entry->n_keys;
        if (next_head > head)
            next = step_at(u, &next_table, next_head, t0, first);
        else if (!ends)
            next = step_at(u, &next_table, next_head, t1, 0); /* what rows see here reaches beyond the step */
        paged__step *step = rows_of(u, run, scratch, h, rows);
        paged__tiles *k = &step->k, *v = &step->v;
        if (run->pack)
            paged__tiles_pack(run->tiles, &at, ends ? NULL : &next, scratch, run->widen, k->at, v->at);
        else
            paged__tiles_widen(run->tiles, &at, scratch, k->at, v->at);
        memcpy(k->next, k->at, sizeof k->at);
        memcpy(v->next, v->at, sizeof v->at);
        k->next_lines = v->next_lines = 0;
        bool at_once = attends_at_once(u, run, rows);
        if (at_once && !run->pack && !ends) {
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
static void find_tiles(const unit *u, int32_t h, int32_t t0, int32_t first, paged__tiles *k,
                       paged__tiles *v) {
    paged__table table = paged__table_of(u->kv, &u->attn->tables, u->entry->seq, u->head + h);
    paged__attn_step step = step_at(u, &table, u->head + h, t0, first);
    paged__tiles_find(&step, k->at, v->at);
    if (u->kv->type == PAGED_TYPE_I8) paged__scales_find(&step, k->scale, v->scale);
}

static void set_next(paged__tiles *tiles, const paged__tiles *next) {
    memcpy(tiles->next, next->at, sizeof next->at);
    memcpy(tiles->next_scale, next->scale, sizeof tiles->next_scale);
}

/* The tiles of all heads: first K of one head after the other, then V, then K of the next step; or, at once,
 * K and V of one head after the other. */
static void find_all(const unit *u, const paged__scratch *scratch, int32_t t0, int32_t first, bool at_once) {
    paged__step *steps = scratch->steps;
    int32_t n = u->n_heads, t1 = t0 + PAGED_ATTN_STEP;
    for (int32_t h = 0; h < n; h++) find_tiles(u, h, t0, first, &steps[h].k, &steps[h].v);
    paged__tiles k_after = steps[n - 1].v, v_after = k_after;
    if (t1 < u->entry->n_keys)
        find_tiles(u, 0, t1, 0, &k_after, &v_after); /* what the rows of this step see reaches beyond it */
    for (int32_t h = 0; h < n; h++) {
        const paged__tiles *k_end = at_once ? &k_after : &steps[0].v, *v_end = at_once ? &v_after : &k_after;
        set_next(&steps[h].k, h + 1 < n ? &steps[h + 1].k : k_end);
        set_next(&steps[h].v, h + 1 < n ? &steps[h + 1].v : v_end);
        set_lines(u, &steps[h].k, &steps[h].v);
    }
    /* Scales of V are wanted with those of K. */
    memcpy(steps[n - 1].k.next_scale, v_after.scale, sizeof v_after.scale);
}

/* A step of the entries of its own, if one is due after so many of the prefix, to be brought as well. */
static void add_beside(const unit *u, const paged__scratch *scratch) {
    const paged_attn *attn = u->attn;
    beside *b = u->beside;
    bool is_due = b->n_brought < b->n_wanted &&
                  (int64_t)b->n_brought * b->n_steps <= (int64_t)b->n_before * b->n_wanted;
    b->n_before++;
    if (!is_due) return;
    const paged__entry *own = &attn->owns[u->entry->own + b->own];
    while (b->t0 >= own->n_keys) { /* one without keys */
        own = &attn->owns[u->entry->own + ++b->own];
        b->t0 = own->split_first * PAGED_ATTN_SPLIT;
    }
    for (int32_t h = 0; h < u->n_heads; h++) {
        paged__table table = paged__table_of(u->kv, &attn->tables, own->seq, u->head + h);
        paged__attn_step step = {.kv = u->kv,
                                 .table = &table,
                                 .head = u->head + h,
                                 .t0 = b->t0,
                                 .n_tokens = PAGED_MIN(own->n_keys - b->t0, PAGED_ATTN_STEP)};
        paged__tiles *k = &scratch->steps[h].k, *v = &scratch->steps[h].v;
        paged__tiles_find(&step, k->next + PAGED__STEP_TILES, v->next + PAGED__STEP_TILES);
        k->n_next = v->n_next = 2 * PAGED__STEP_TILES;
    }
    b->t0 += PAGED_ATTN_STEP;
    b->n_brought++;
    if (b->t0 < own->n_keys || b->n_brought == b->n_wanted) return;
    b->own++;
    b->t0 = own[1].split_first * PAGED_ATTN_SPLIT;
}

/* The rows of all heads of the unit that see a token of the step at t0, against its tokens, of which the
 * first that counts is `first`. */
static void attend_step(const unit *u, split_run *run, const paged__scratch *scratch, int32_t t0,
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
    if (at_once && u->beside) add_beside(u, scratch);
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

/* Rows of a head that see a token of t0 … t1 - 1: neighbours, since what rows see ascends. */
static paged__range rows_between(const unit *u, const paged__scratch *scratch, int32_t t0, int32_t t1) {
    paged__range rows = {0, u->entry->n_rows};
    while (rows.first < rows.end && scratch->n_keys[rows.first] <= t0) rows.first++;
    while (rows.end > rows.first && scratch->first_key[rows.end - 1] >= t1) rows.end--;
    return rows;
}

static void begin_states(const unit *u, const paged__scratch *scratch, paged__range rows, float *states) {
    const paged_attn *attn = u->attn;
    for (int32_t h = 0; h < u->n_heads; h++)
        for (int64_t i = row_at(u, h, rows.first); i < row_at(u, h, rows.end); i++) {
            memset(states + i * attn->state_floats, 0, (size_t)o_floats(attn) * sizeof(float));
            memset(scratch->l + i * PAGED__L_LANES, 0, PAGED__L_LANES * sizeof(float));
            *state_m(attn, states + i * attn->state_floats) = -INFINITY;
        }
}

static void end_states(const unit *u, const paged__scratch *scratch, paged__range rows, float *states) {
    const paged_attn *attn = u->attn;
    for (int32_t h = 0; h < u->n_heads; h++)
        for (int64_t i = row_at(u, h, rows.first); i < row_at(u, h, rows.end); i++)
            *state_l(attn, states + i * attn->state_floats) = sum_lanes(scratch->l + i * PAGED__L_LANES);
}

/* The states of all rows that see a token of this split, and which of each head those are; others are left
 * alone. */
static paged__range attend_split(const unit *u, const paged__scratch *scratch, int32_t split, float *states) {
    int32_t begin = split * PAGED_ATTN_SPLIT;
    paged__range all = rows_between(u, scratch, begin, begin + PAGED_ATTN_SPLIT);
    if (all.first == all.end) return all;
    begin_states(u, scratch, all, states);
    split_run run = split_run_of(u, states);
    int32_t first = PAGED_MAX(scratch->first_key[all.first], begin),
            end = PAGED_MIN(scratch->n_keys[all.end - 1], begin + PAGED_ATTN_SPLIT);
    for (int32_t t0 = first / PAGED_ATTN_STEP * PAGED_ATTN_STEP; t0 < end; t0 += PAGED_ATTN_STEP) {
        paged__range rows = rows_between(u, scratch, t0, t0 + PAGED_ATTN_STEP);
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

/* What each row sees, which is the same in all heads. */
static void set_rows(const unit *u, const paged__scratch *scratch) {
    const paged_attn *attn = u->attn;
    int32_t seq = u->entry->seq;
    for (int32_t r = 0; r < u->entry->n_rows; r++) {
        scratch->n_keys[r] = paged__row_keys(attn, u->entry, r);
        scratch->first_key[r] = paged__row_first(attn, u->entry, r);
        if (attn->slopes_log2)
            scratch->position[r] = position_of(attn, u->entry->q_first + r / attn->group, &seq);
    }
}

/* Queries into rows [KV head, query, head of the group], scaled, so that exp2 of a score is exp of the scaled
 * product; and what they see. */
static void load_queries(const unit *u, const paged__scratch *scratch, const paged_attn_io *io) {
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
    set_rows(u, scratch);
}

/* Folds a split of some rows of each head into what came before. */
static void fold_split(const unit *u, const paged__scratch *scratch, int32_t split, float *states,
                       paged__range rows) {
    const paged_attn *attn = u->attn;
    int64_t n = attn->state_floats;
    for (int32_t h = 0; h < u->n_heads; h++)
        for (int32_t r = rows.first; r < rows.end; r++) {
            int64_t at = row_at(u, h, r) * n;
            if (scratch->first_key[r] >= split * PAGED_ATTN_SPLIT && split > u->entry->split_first)
                memcpy(scratch->acc + at, states + at,
                       (size_t)n * sizeof(float)); /* its window begins here */
            else
                merge_state(attn, scratch->acc + at, states + at);
        }
}

static void finish_rows(const unit *u, const paged__scratch *scratch, const paged_attn_io *io) {
    for (int32_t h = 0; h < u->n_heads; h++)
        for (int32_t r = 0; r < u->entry->n_rows; r++)
            finish_row(u->attn, u->entry, u->head + h, r,
                       scratch->acc + row_at(u, h, r) * u->attn->state_floats, io);
}

/* All splits, folded as they come. */
static void run_whole(const unit *u, const paged__scratch *scratch, const paged_attn_io *io) {
    int32_t first = u->entry->split_first;
    load_queries(u, scratch, io);
    attend_split(u, scratch, first, scratch->acc);
    for (int32_t split = first + 1; split < first + u->entry->n_splits; split++)
        fold_split(u, scratch, split, scratch->cur, attend_split(u, scratch, split, scratch->cur));
    finish_rows(u, scratch, io);
}

/* One split of the unit, to where the merge finds it. `cut` is the first to go through the entry. */
static void run_split(const unit *u, const paged__scratch *scratch, int32_t split, int32_t cut,
                      const paged_attn_io *io) {
    const paged_attn *attn = u->attn;
    int32_t n_rows = u->entry->n_rows;
    int64_t n = n_rows * attn->state_floats;
    load_queries(u, scratch, io);
    attend_split(u, scratch, u->entry->split_first + split, scratch->cur);
    for (int32_t h = 0; h < u->n_heads; h++)
        memcpy(paged__workspace(attn, cut, split, u->head + h), scratch->cur + h * n,
               (size_t)n * sizeof(float));
}

/* ---- a unit of a cascade ---- */

/* Entry i of its own, with the rows of the prefix, whose queries are loaded. */
static unit own_of(const unit *prefix, const paged__scratch *scratch, int32_t i) {
    unit u = *prefix;
    u.entry = &u.attn->owns[prefix->entry->own + i];
    u.first_row = (u.entry->q_first - prefix->entry->q_first) * u.attn->group;
    u.beside = NULL;
    set_rows(&u, scratch);
    return u;
}

/* Whether the states of an entry of its own, of one split, wait for those of the prefix. */
static bool can_keep(const unit *prefix, int32_t i) {
    return prefix->entry->n_splits > 1 && prefix->attn->owns[prefix->entry->own + i].n_splits == 1;
}

static beside beside_of(const unit *u) {
    const paged__entry *owns = &u->attn->owns[u->entry->own];
    beside b = {.n_steps = u->entry->n_keys / PAGED_ATTN_STEP, .t0 = owns[0].split_first * PAGED_ATTN_SPLIT};
    for (int32_t i = 0; i < u->entry->n_own; i++) {
        int32_t n = owns[i].n_keys - owns[i].split_first * PAGED_ATTN_SPLIT;
        b.n_wanted += (PAGED_MAX(n, 0) + PAGED_ATTN_STEP - 1) / PAGED_ATTN_STEP;
    }
    return b;
}

/* Folds entry i of its own into the prefix. */
static void finish_own(const unit *prefix, const paged__scratch *scratch, int32_t i, bool is_kept,
                       const paged_attn_io *io) {
    unit u = own_of(prefix, scratch, i);
    int32_t first = u.entry->split_first;
    for (int32_t split = first; split < first + u.entry->n_splits; split++) {
        float *states = is_kept ? scratch->kept : scratch->cur;
        int32_t t0 = split * PAGED_ATTN_SPLIT;
        paged__range rows = is_kept ? rows_between(&u, scratch, t0, t0 + PAGED_ATTN_SPLIT)
                                    : attend_split(&u, scratch, split, states);
        fold_split(&u, scratch, split, states, rows);
    }
    finish_rows(&u, scratch, io);
}

/* All of some heads, folded as it comes. */
static void run_cascade(unit *u, const paged__scratch *scratch, const paged_attn_io *io) {
    beside b = beside_of(u);
    u->beside = &b;
    load_queries(u, scratch, io);
    attend_split(u, scratch, 0, scratch->acc);
    int32_t n_there = 0;
    for (int32_t split = 1; split < u->entry->n_splits; split++) {
        for (; n_there < b.own; n_there++) {
            unit own = own_of(u, scratch, n_there);
            if (can_keep(u, n_there)) attend_split(&own, scratch, own.entry->split_first, scratch->kept);
        }
        set_rows(u, scratch);
        fold_split(u, scratch, split, scratch->cur, attend_split(u, scratch, split, scratch->cur));
    }
    for (int32_t i = 0; i < u->entry->n_own; i++)
        finish_own(u, scratch, i, i < n_there && can_keep(u, i), io);
    u->beside = NULL;
}

/* One split of one head of a unit, to where the merge finds it. `cut` is the first to go through the head. */
static void keep_split(const unit *u, const paged__scratch *scratch, const paged__entry *prefix,
                       int32_t split, int32_t cut) {
    int64_t n = u->attn->state_floats;
    paged__range rows = attend_split(u, scratch, split, scratch->cur);
    memcpy(paged__cascade(u->attn, prefix, cut, split, u->first_row + rows.first),
           scratch->cur + row_at(u, 0, rows.first) * n,
           (size_t)((rows.end - rows.first) * n) * sizeof(float));
}

/* The items from … until - 1 of a head. */
static void run_cascade_items(const unit *u, const paged__scratch *scratch, int32_t from, int32_t until,
                              int32_t cut, const paged_attn_io *io) {
    int32_t n_splits = u->entry->n_splits;
    load_queries(u, scratch, io);
    for (int32_t item = from; item < PAGED_MIN(until, n_splits); item++)
        keep_split(u, scratch, u->entry, item, cut);
    for (int32_t item = PAGED_MAX(from, n_splits); item < until; item++) {
        unit own = own_of(u, scratch, item - n_splits);
        for (int32_t i = 0; i < own.entry->n_splits; i++)
            keep_split(&own, scratch, u->entry, own.entry->split_first + i, cut);
    }
}

/* How many KV heads are taken along at once: more than one where they lie side by side. */
static int32_t heads_at_once(const paged_attn *attn, const paged_kv *kv, const paged__entry *entry) {
    if (kv->k_head_stride > kv->block_stride) return 1;
    return PAGED_MIN(PAGED_MAX(PAGED__UNIT_ROWS / entry->n_rows, 1), attn->heads_max);
}

/* Whether a cut goes through a piece, whose states are then kept: an entry, or a head of a cascade. */
static bool goes_through(const paged_attn *attn, paged__cut cut) {
    if (cut.item == 0) return false;
    const paged__entry *entry = &attn->entries[cut.entry];
    return entry->is_prefix ? cut.item % paged__head_items(entry) != 0 : true;
}

/* The cut, at or before b, that is the first to go through the piece of cut b; cut b goes through it. */
static int32_t first_cut_of_piece(const paged_attn *attn, int32_t b, int32_t nth) {
    paged__cut at = paged__cut_at(attn, b, nth);
    const paged__entry *entry = &attn->entries[at.entry];
    int32_t begin = entry->is_prefix ? at.item - at.item % paged__head_items(entry) : 0;
    for (; b > 1; b--) {
        paged__cut before = paged__cut_at(attn, b - 1, nth);
        if (before.entry != at.entry || before.item <= begin) break;
    }
    return b;
}

/* The items from … until - 1 of a cascade, whose thread is ith of nth. */
static void run_cascades(paged_attn *attn, const paged_kv *kv, const paged__entry *entry, int32_t from,
                         int32_t until, const paged_attn_io *io, int32_t ith, int32_t nth) {
    /* Of many rows one head at a time, so that what is brought beside them stays near. */
    int32_t n = paged__head_items(entry),
            most = entry->n_rows > PAGED__FEW_ROWS ? 1 : heads_at_once(attn, kv, entry);
    unit u = {.attn = attn, .kv = kv, .entry = entry, .head_rows = entry->n_rows};
    for (int32_t item = from, next; item < until; item = next) {
        int32_t first = item % n;
        u.head = item / n;
        u.n_heads = first > 0 ? 0 : PAGED_MIN(most, (until - item) / n);
        if (u.n_heads > 0) {
            run_cascade(&u, &attn->scratch[ith], io);
            next = item + u.n_heads * n;
        } else {
            u.n_heads = 1;
            next = PAGED_MIN(item - first + n, until);
            run_cascade_items(&u, &attn->scratch[ith], first, first + next - item,
                              first > 0 ? first_cut_of_piece(attn, ith, nth) : ith + 1, io);
        }
    }
}

/* The items from … until - 1 of an entry. */
static void run_items(paged_attn *attn, const paged_kv *kv, const paged__entry *entry, int32_t from,
                      int32_t until, int32_t cut, const paged_attn_io *io, int32_t ith) {
    int32_t n_heads = attn->config.n_kv_heads, most = heads_at_once(attn, kv, entry);
    bool is_whole = from == 0 && until == paged__entry_items(attn, entry);
    bool by_split = paged__entry_can_cut(attn, entry) && !is_whole;
    if (!by_split) until = PAGED_MIN(until, n_heads);
    unit u = {.attn = attn, .kv = kv, .entry = entry, .head_rows = entry->n_rows};
    for (int32_t item = from; item < until; item += u.n_heads) {
        u.head = item % n_heads;
        u.n_heads = PAGED_MIN(PAGED_MIN(most, n_heads - u.head), until - item);
        if (by_split)
            run_split(&u, &attn->scratch[ith], item / n_heads, cut, io);
        else
            run_whole(&u, &attn->scratch[ith], io);
    }
}

void paged_attn_run(paged_attn *attn, const paged_kv *kv, const paged_attn_io *io, int32_t ith, int32_t nth) {
    if (attn->n_entries == 0) return;
    paged__cut begin = paged__cut_at(attn, ith, nth), end = paged__cut_at(attn, ith + 1, nth);

    for (int32_t index = begin.entry; index < end.entry + (end.item > 0); index++) {
        const paged__entry *entry = &attn->entries[index];
        int32_t from = index == begin.entry ? begin.item : 0,
                until = index == end.entry ? end.item : paged__entry_items(attn, entry);
        /* Cut ith goes through the entry, or cut ith + 1 does, as its first, or neither. */
        if (from >= until) continue;
        if (entry->is_prefix) {
            run_cascades(attn, kv, entry, from, until, io, ith, nth);
            continue;
        }
        int32_t cut = from > 0 ? first_cut_of_piece(attn, ith, nth) : ith + 1;
        run_items(attn, kv, entry, from, until, cut, io, ith);
    }
}

/* ---- merge ---- */

/* Folds the states of all splits that row r of a KV head sees. With `prefix` the entry is one of its own. */
static void merge_row(const paged_attn *attn, const paged__entry *entry, const paged__entry *prefix,
                      int32_t cut, int32_t head, int32_t r, float *acc, const paged_attn_io *io) {
    int32_t n_keys = paged__row_keys(attn, entry, r),
            first = paged__row_first(attn, entry, r) / PAGED_ATTN_SPLIT;
    for (int32_t split = first; split * PAGED_ATTN_SPLIT < n_keys; split++) {
        float *state =
            prefix ? paged__cascade(attn, prefix, cut, split,
                                    (entry->q_first - prefix->q_first) * attn->group + r)
                   : paged__workspace(attn, cut, split - entry->split_first, head) + r * attn->state_floats;
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
    for (int32_t b = 1; b < nth; b++) {
        paged__cut cut = paged__cut_at(attn, b, nth);
        if (!goes_through(attn, cut) || first_cut_of_piece(attn, b, nth) != b) continue;
        const paged__entry *entry = &attn->entries[cut.entry];
        if (entry->is_prefix) {
            int32_t head = cut.item / paged__head_items(entry);
            for (int32_t i = entry->own; i < entry->own + entry->n_own; i++)
                for (int32_t r = 0; r < attn->owns[i].n_rows; r++, n_rows++)
                    if (n_rows % nth == ith) merge_row(attn, &attn->owns[i], entry, b, head, r, acc, io);
            continue;
        }
        if (!paged__entry_can_cut(attn, entry)) continue;
        for (int32_t head = 0; head < attn->config.n_kv_heads; head++)
            for (int32_t r = 0; r < entry->n_rows; r++, n_rows++)
                if (n_rows % nth == ith) merge_row(attn, entry, NULL, b, head, r, acc, io);
    }
}
