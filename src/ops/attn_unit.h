/* ops/attn_unit.h: what a thread has at work, shared by attn_run.c and attn_cascade.c. */
#ifndef PAGED_OPS_ATTN_UNIT_H
#define PAGED_OPS_ATTN_UNIT_H

#include "ops/attn.h"

/* What a cascade brings into the cache while its prefix is at work: steps of the entries of its own. */
typedef struct paged__beside {
    int32_t n_before, n_steps;   /* of the prefix: behind us, of all */
    int32_t n_brought, n_wanted; /* of the entries of its own */
    int32_t own, t0;             /* the step that comes next; entries before are there */
} paged__beside;

/* Some KV heads of an entry, at work. Row r of head h is row (h * head_rows + first_row + r) of the scratch,
 * with h counted from `head`. */
typedef struct paged__unit {
    const paged_attn *attn;
    const paged_kv *kv;
    const paged__entry *entry;
    int32_t head, n_heads;
    int32_t head_rows, first_row;
    paged__beside *beside; /* NULL: nothing */
} paged__unit;

static inline int64_t paged__unit_row(const paged__unit *u, int32_t h, int32_t r) {
    return (int64_t)h * u->head_rows + u->first_row + r;
}

/* How many KV heads are taken along at once: more than one where they lie side by side. */
int32_t paged__heads_at_once(const paged_attn *attn, const paged_kv *kv, const paged__entry *entry);

/* What each row sees, which is the same in all heads. */
void paged__unit_set_rows(const paged__unit *u, const paged__scratch *scratch);

/* Queries into rows [KV head, query, head of the group], scaled, so that exp2 of a score is exp of the scaled
 * product; and what they see. */
void paged__unit_load(const paged__unit *u, const paged__scratch *scratch, const paged_attn_io *io);

/* States of no token, of all rows of the unit. */
void paged__unit_begin(const paged__unit *u, float *states);

/* The states of all rows that see a token of this split, which have begun, and which of each head those are;
 * others are left alone. The lanes of the denominator are zero before and after. */
paged__range paged__unit_attend(const paged__unit *u, const paged__scratch *scratch, int32_t split,
                                float *states);

/* Rows of a head that see a token of t0 … t1 - 1: neighbours, since what rows see ascends. */
paged__range paged__unit_rows(const paged__unit *u, const paged__scratch *scratch, int32_t t0, int32_t t1);

/* Adds what a split gave to the rows that see a token of it, and begins their states anew while they are at
 * hand in the cache. */
void paged__unit_fold(const paged__unit *u, const paged__scratch *scratch, int32_t split, float *states,
                      paged__range rows);

/* Writes the results. */
void paged__unit_finish(const paged__unit *u, const paged__scratch *scratch, const paged_attn_io *io);

/* ---- attn_cascade.c ---- */

/* A step of the entries of its own, if one is due after so many of the prefix, to be brought as well. */
void paged__cascade_beside(const paged__unit *u, const paged__scratch *scratch);

/* The items from … until - 1 of a cascade, whose thread is ith of nth. */
void paged__cascade_run(paged_attn *attn, const paged_kv *kv, const paged__entry *entry, int32_t from,
                        int32_t until, const paged_attn_io *io, int32_t ith, int32_t nth);

#endif
