/* ops/ascend.h: what the files of the contract with Ascend's operators share.
 *
 *   ascend_rules.c     the table of rules, and what each allows in a call
 *   ascend.c           judging a call by the table: findings, nearest legal values
 *   ascend_arrays.c    tables, lengths, slots
 *   ascend_layout.c    layouts
 */
#ifndef PAGED_OPS_ASCEND_H
#define PAGED_OPS_ASCEND_H

#include "base/base.h"
#include "paged/ascend.h"

/* What a rule allows its field to be: one of the list or, without one, a multiple of step in lo … hi that
 * divides `divides` with a quotient of at most max_ratio. */
typedef struct paged__legal {
    int64_t lo, hi, step;
    const int32_t *list; /* [n_list] ascending; NULL: no list */
    int32_t n_list;
    int64_t divides, max_ratio; /* 0: any */
} paged__legal;

/* A row of the table. `narrow` starts from the row's own lo, hi, step and list, and may look at all fields of
 * the call; false: the rule does not bear on this call. */
typedef struct paged__ascend_row {
    paged_ascend_rule rule;
    paged__legal legal;
    bool (*narrow)(const paged_ascend_config *c, paged__legal *legal); /* NULL: it always holds as it is */
} paged__ascend_row;

/* The rules of calls, in the order of the fields, then those of arrays, which have no legal values. */
extern const paged__ascend_row paged__ascend_rows[];
extern const int32_t paged__ascend_n_rows;

const paged_ascend_rule *paged__ascend_rule(const char *id); /* of a rule that is there */

/* Bytes of an element; and elements of 32 bytes, the C0 of PA_NZ. */
static inline int32_t paged__ascend_elem(int32_t type) {
    return type == PAGED_TYPE_F32 ? 4 : type == PAGED_TYPE_I8 ? 1 : 2;
}
static inline int32_t paged__ascend_c0(int32_t type) {
    return 32 / paged__ascend_elem(type);
}

#endif
