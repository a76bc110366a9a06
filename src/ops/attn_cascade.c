/* attn_cascade.c: cascades (attn.h): the heads of a prefix, with what its sequences see behind it. */
#include "ops/attn_unit.h"

void paged__cascade_beside(const paged__unit *u, const paged__scratch *scratch) {
    const paged_attn *attn = u->attn;
    paged__beside *b = u->beside;
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

/* Entry i of its own, with the rows of the prefix, whose queries are loaded. */
static paged__unit own_of(const paged__unit *prefix, const paged__scratch *scratch, int32_t i) {
    paged__unit u = *prefix;
    u.entry = &u.attn->owns[prefix->entry->own + i];
    u.first_row = (u.entry->q_first - prefix->entry->q_first) * u.attn->group;
    u.beside = NULL;
    paged__unit_set_rows(&u, scratch);
    return u;
}

/* Whether the states of an entry of its own, of one split, wait for those of the prefix. */
static bool can_keep(const paged__unit *prefix, int32_t i) {
    return prefix->entry->n_splits > 1 && prefix->attn->owns[prefix->entry->own + i].n_splits == 1;
}

static paged__beside beside_of(const paged__unit *u) {
    const paged__entry *owns = &u->attn->owns[u->entry->own];
    paged__beside b = {.n_steps = u->entry->n_keys / PAGED_ATTN_STEP,
                       .t0 = owns[0].split_first * PAGED_ATTN_SPLIT};
    for (int32_t i = 0; i < u->entry->n_own; i++) {
        int32_t n = owns[i].n_keys - owns[i].split_first * PAGED_ATTN_SPLIT;
        b.n_wanted += (PAGED_MAX(n, 0) + PAGED_ATTN_STEP - 1) / PAGED_ATTN_STEP;
    }
    return b;
}

/* Folds entry i of its own into the prefix. */
static void finish_own(const paged__unit *prefix, const paged__scratch *scratch, int32_t i, bool is_kept,
                       const paged_attn_io *io) {
    paged__unit u = own_of(prefix, scratch, i);
    int32_t first = u.entry->split_first;
    for (int32_t split = first; split < first + u.entry->n_splits; split++) {
        float *states = is_kept ? scratch->kept : scratch->cur;
        int32_t t0 = split * PAGED_ATTN_SPLIT;
        paged__range rows = is_kept ? paged__unit_rows(&u, scratch, t0, t0 + PAGED_ATTN_SPLIT)
                                    : paged__unit_attend(&u, scratch, split, states);
        paged__unit_fold(&u, scratch, split, states, rows);
    }
    paged__unit_finish(&u, scratch, io);
}

/* All of a head, folded as it comes, with own keys beside those of the prefix. */
static void run_beside(paged__unit *u, const paged__scratch *scratch, const paged_attn_io *io) {
    paged__beside b = beside_of(u);
    u->beside = &b;
    paged__unit_load(u, scratch, io);
    paged__unit_begin(u, scratch->acc);
    paged__unit_begin(u, scratch->cur);
    paged__unit_begin(u, scratch->kept);
    paged__unit_attend(u, scratch, 0, scratch->acc);
    int32_t n_there = 0;
    for (int32_t split = 1; split < u->entry->n_splits; split++) {
        for (; n_there < b.own; n_there++) {
            paged__unit own = own_of(u, scratch, n_there);
            if (can_keep(u, n_there))
                paged__unit_attend(&own, scratch, own.entry->split_first, scratch->kept);
        }
        paged__unit_set_rows(u, scratch);
        paged__unit_fold(u, scratch, split, scratch->cur,
                         paged__unit_attend(u, scratch, split, scratch->cur));
    }
    for (int32_t i = 0; i < u->entry->n_own; i++)
        finish_own(u, scratch, i, i < n_there && can_keep(u, i), io);
    u->beside = NULL;
}

/* Heads h … h + n - 1 of the unit, counted from its first. */
static paged__unit heads_of(const paged__unit *u, int32_t h, int32_t n) {
    paged__unit part = *u;
    part.head += h;
    part.n_heads = n;
    part.first_row += h * u->head_rows;
    return part;
}

/* All of some heads, folded as it comes: the prefix, `at_once` of them at a time, then own keys of all. */
static void run_side_by_side(const paged__unit *u, const paged__scratch *scratch, int32_t at_once,
                             const paged_attn_io *io) {
    paged__unit_load(u, scratch, io);
    paged__unit_begin(u, scratch->acc);
    paged__unit_begin(u, scratch->cur);
    for (int32_t h = 0; h < u->n_heads; h += at_once) {
        paged__unit part = heads_of(u, h, PAGED_MIN(at_once, u->n_heads - h));
        paged__unit_attend(&part, scratch, 0, scratch->acc);
        for (int32_t split = 1; split < u->entry->n_splits; split++)
            paged__unit_fold(&part, scratch, split, scratch->cur,
                             paged__unit_attend(&part, scratch, split, scratch->cur));
    }
    for (int32_t i = 0; i < u->entry->n_own; i++) finish_own(u, scratch, i, false, io);
}

/* One split of one head of a unit, to where the merge finds it. `cut` is the first to go through the head. */
static void keep_split(const paged__unit *u, const paged__scratch *scratch, const paged__entry *prefix,
                       int32_t split, int32_t cut) {
    int64_t n = u->attn->state_floats;
    paged__unit_begin(u, scratch->cur);
    paged__range rows = paged__unit_attend(u, scratch, split, scratch->cur);
    memcpy(paged__cascade(u->attn, prefix, cut, split, u->first_row + rows.first),
           scratch->cur + paged__unit_row(u, 0, rows.first) * n,
           (size_t)((rows.end - rows.first) * n) * sizeof(float));
}

/* The items from … until - 1 of a head. */
static void run_cascade_items(const paged__unit *u, const paged__scratch *scratch, int32_t from,
                              int32_t until, int32_t cut, const paged_attn_io *io) {
    int32_t n_splits = u->entry->n_splits;
    paged__unit_load(u, scratch, io);
    for (int32_t item = from; item < PAGED_MIN(until, n_splits); item++)
        keep_split(u, scratch, u->entry, item, cut);
    for (int32_t item = PAGED_MAX(from, n_splits); item < until; item++) {
        paged__unit own = own_of(u, scratch, item - n_splits);
        for (int32_t i = 0; i < own.entry->n_splits; i++)
            keep_split(&own, scratch, u->entry, own.entry->split_first + i, cut);
    }
}

/* How a thread goes about heads that it has for itself. */
typedef struct head_order {
    bool beside;    /* own keys come beside those of the prefix; else they follow it */
    int32_t most;   /* heads of a unit */
    int32_t prefix; /* of these with the prefix at once */
} head_order;

/* Beside where many rows of the prefix wait for arithmetic and `attend` brings what they leave time for. A
 * processor that hardly brings anything beside arithmetic (`looks_near`) reads own keys as in decode: many
 * heads, which lie side by side, in long runs. */
static head_order order_of(const paged_attn *attn, const paged_kv *kv, const paged__entry *entry) {
    const paged__type_kernels *kernels = attn->kernels->of[kv->type];
    bool many = entry->n_rows > paged__few_rows(kernels);
    if (many && kernels->attend && !attn->kernels->looks_near) return (head_order){true, 1, 1};
    head_order order = {.most = 1, .prefix = many ? 1 : paged__heads_at_once(attn, kv, entry)};
    if (kv->k_head_stride <= kv->block_stride)
        order.most = PAGED_MIN(PAGED_MAX(attn->rows_max / entry->n_rows, 1), attn->heads_max);
    return order;
}

void paged__cascade_run(paged_attn *attn, const paged_kv *kv, const paged__entry *entry, int32_t from,
                        int32_t until, const paged_attn_io *io, int32_t ith, int32_t nth) {
    const head_order order = order_of(attn, kv, entry);
    int32_t n = paged__head_items(entry);
    paged__unit u = {.attn = attn, .kv = kv, .entry = entry, .head_rows = entry->n_rows};
    for (int32_t item = from, next; item < until; item = next) {
        int32_t first = item % n;
        u.head = item / n;
        u.n_heads = first > 0 ? 0 : PAGED_MIN(order.most, (until - item) / n);
        if (u.n_heads > 0) {
            if (order.beside)
                run_beside(&u, &attn->scratch[ith], io);
            else
                run_side_by_side(&u, &attn->scratch[ith], order.prefix, io);
            next = item + u.n_heads * n;
        } else {
            u.n_heads = 1;
            next = PAGED_MIN(item - first + n, until);
            run_cascade_items(&u, &attn->scratch[ith], first, first + next - item,
                              first > 0 ? paged__first_cut(attn, ith, nth) : ith + 1, io);
        }
    }
}
