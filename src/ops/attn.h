/* ops/attn.h: the attention object, shared by attn.c (create, plan), attn_cut.c (which thread does
 * what), attn_run.c and tiles.c.
 *
 * Work is a line of entries: a few query rows of one sequence, up to `q_tile` queries with all query heads
 * of a group, for every KV head. Their tokens are walked split by split. An item is what can be given to a
 * thread: all splits of a KV head, of all rows or, where these are many, of an eighth of them; or, in entries
 * of few rows (decode), which may be cut, one split of a head.
 *
 *     entry 0: seq 0, queries 0…20   entry 1: seq 1, one query             entry 2: …
 *     |h0 s0…s1|h1 s0…s1|h2 s0…s1|   |s0 h0|s0 h1|s0 h2|s1 h0|s1 h1|s1 h2|
 *     thread 0 ─────────────────────────────────────────┘└── thread 1 ──── …
 *
 * In one layer of a block the keys of all KV heads lie side by side, and memory is read fastest in long runs:
 * so where rows are few, a thread takes as many heads as it has room for along, step by step.
 *
 * Thread ith of nth has a share, the part of the line between the cuts ith and ith + 1, which have nearly
 * equal cost between them. It takes its share from begin to end, and then helps: it takes, from the shares of
 * others, what nobody has begun, in the same order: memory does not serve threads alike.
 *
 * For that the splits of the entry in which a share ends go to the workspace, one state each, but for those
 * that the thread where the entry begins has folded before anyone else took one; paged_attn_merge folds them.
 * Of other entries all are folded as they come. Everywhere it is in ascending order, with the same function,
 * so where the cuts lie and who takes what changes no bit.
 *
 * Where nothing is cut and there are entries of many rows (a prompt), threads claim heads of entries in turn,
 * from the end of the line, where the longest are: no estimate of costs is as good as seeing who is free.
 *
 * With a window, the splits of an entry begin with the one that holds the first key it sees.
 *
 * A cascade is a few sequences whose first splits lie in the same blocks. Its queries, which are neighbours
 * in the batch, make prefix entries, which see just those splits; each has entries of its own for what its
 * sequences see behind them. Its items are, for one KV head after the other, the common splits and then the
 * entries of its own. A head that one thread has for itself is folded as it comes, first the common splits,
 * then each sequence's, which is the order without a cascade. Many rows wait for arithmetic, few for memory:
 * so keys and values of the sequences come into the cache beside those of the prefix, and what has come is
 * attended to between two of its splits. With AMX memory brings little beside arithmetic: there a thread does
 * the prefix of some heads and then what the sequences see behind it, of all these heads in one stream, as in
 * decode. Of a head that a cut goes through all states go to the workspace.
 *
 * A state is what is known of a row after some tokens: o[head_dim_v] = sum of exp2(s - m) * v, the maximum
 * m and the sum l of exp2(s - m), with scores s in units of log2.
 */
#ifndef PAGED_OPS_ATTN_H
#define PAGED_OPS_ATTN_H

#include "ops/ops.h"
#include "ops/tables.h"

enum {
    PAGED__UNIT_ROWS = 96,    /* rows that a thread aims to have at work, of several KV heads */
    PAGED__TILE_ROWS = 192,   /* the same of one: more share what is read of the cache, fewer stay in L2 */
    PAGED__SHARED_ROWS = 256, /* of a cascade, of several KV heads, whose own keys are read side by side */
    PAGED__ROW_PARTS = 8,     /* of an entry of at least PAGED__UNIT_ROWS rows, between which it may be cut */
    PAGED__CUT_ROWS = 64,     /* entries of up to so many rows of all heads, or of one query, may be cut */
    PAGED__STATE_TAIL = 16    /* floats behind o in a state: m, l, padding */
};

typedef struct paged__entry {
    int64_t cost_before;  /* of all entries before this one */
    int64_t cost;         /* of one KV head; with all entries of its own */
    int32_t seq, q_first; /* q_first: row of the first query in the batch; seq: whose table it is */
    int32_t n_rows;       /* queries * group, of each KV head */
    int32_t n_keys;       /* keys before this one are seen by the last row */
    int32_t first_keys;   /* the same of the first query, before clamping at 0 */
    int32_t split_first;  /* splits split_first … split_first + n_splits - 1 */
    int32_t n_splits;     /* at least 1, so that one without keys is still visited */
    bool is_prefix;       /* cascade: the common splits of several sequences, seen by all rows; and then */
    int32_t own, n_own;   /* … `owns` own … own + n_own - 1 are of the same rows, one after the other */
} paged__entry;

/* A place on the line: before an item of an entry. Item: the KV head; or KV head * PAGED__ROW_PARTS + part of
 * the rows; or split * n_kv_heads + KV head, with splits counted from split_first; of a cascade
 * KV head * paged__head_items + split, or + n_splits + entry of its own. */
typedef struct paged__cut {
    int32_t entry, item;
} paged__cut;

/* What is between two cuts. All but n_left is written by the thread whose share it is, while n_left is 0, so
 * that others see it with a number that is more. A KV head of an entry that is folded as it comes counts as
 * one item. */
typedef struct paged__share {
    _Alignas(64) _Atomic int64_t n_left; /* items that nobody has begun; 0 also before the share is begun */
    int64_t n_items;
    paged__cut begin, end;
    int32_t begin_cut, end_cut; /* the workspaces of the entries at both ends; 0: none */
    int32_t n_folded; /* of the entry at the end, if it begins here: its first splits, folded in one state */
} paged__share;

/* Of one thread. */
typedef struct paged__scratch {
    uint8_t *q, *p;   /* [rows_max] rows of the kernels' own form (ops.h), of q_stride and p_stride bytes */
    float *s;         /* [rows_max, 64] scores, of one head */
    float *l;         /* [rows_max, 16] lanes of the denominator */
    float *acc, *cur; /* [rows_max] states: of all splits so far; of the split at hand */
    float *kept;      /* [rows_max, or 0 without cascades] states of sequences whose prefix is not yet done */
    float *k_tiles;   /* [4, head_dim_k + 1, 16] a step packed or widened (tiles.c), of any type */
    float *v_tiles;   /* [4, 16, head_dim_v] */
    float *narrow;    /* [16, larger head_dim + 1] a tile between packing and widening */
    int32_t *n_keys;  /* [rows_max] each row sees the keys first_key … n_keys - 1; both ascend */
    int32_t *first_key;     /* [rows_max] */
    int32_t *position;      /* [rows_max] of the query of each row; of use with ALiBi only */
    paged__range *seen;     /* [rows_max] of the step at hand */
    paged__range *seen_all; /* [rows_max] all of a step */
    paged__step *steps;     /* [heads_max] likewise, of each head */
} paged__scratch;

struct paged_attn {
    const paged__kernels *kernels;
    void (*softcap)(float *s, float cap);
    void (*alibi)(float *s, float slope, int32_t first);
    paged_attn_config config; /* defaults filled in */
    float scale_log2;         /* scale * log2(e) */
    float softcap_log2;       /* softcap * log2(e); 0: off */
    float *slopes_log2;       /* [n_heads] ALiBi slopes * log2(e); NULL: off */
    int32_t group;            /* query heads of a KV head */
    int32_t q_tile;           /* queries of an entry, at most */
    int32_t heads_max;        /* KV heads that a thread has at work, at most */
    int32_t rows_max;         /* their rows, at most */
    int32_t rows_cut;         /* rows of a KV head in an entry with items of a split, at most */
    int32_t n_splits_max;
    int32_t n_splits_cut; /* of such an entry, at most */
    int64_t state_floats; /* head_dim_v rounded up to 16, and PAGED__STATE_TAIL */
    int64_t q_stride, p_stride;

    /* The plan: empty when n_entries is 0. */
    paged_tables tables; /* borrowed, as cu_seqlens_q */
    const int32_t *cu_seqlens_q;
    paged__entry *entries;
    int32_t n_entries, n_entries_max;
    paged__entry *owns; /* not on the line themselves */
    int32_t n_owns, n_owns_max;
    int64_t cost;
    bool needs_merge;
    bool is_claimed;           /* threads claim what they do; else they have shares */
    _Atomic int64_t n_claimed; /* of the run: heads of entries; 0 between runs, … */
    _Atomic int32_t n_done;    /* … as the threads that have done their part */
    paged__share *shares;      /* [n_threads_max] of the run */

    paged__scratch *scratch; /* [n_threads_max] */
    float *scratch_memory;   /* what the arrays of scratch are cut from */
    int32_t *rows_memory;
    paged__range *seen_memory;
    paged__step *steps_memory;
    /* [n_threads_max cuts, 0 of one thread] states of entries in which a share ends: [n_splits_cut,
     * n_kv_heads, rows_cut], or of a head of a cascade [n_splits_max, rows of the prefix entry] */
    float *workspace;
    int64_t workspace_states; /* of one cut */
};

/* What create and plan refuse, for whoever computes attention: the configuration, with its defaults filled
 * in; a batch against it, where `exist` may be NULL. */
paged_status paged__attn_config_check(const paged_attn_config *config, paged_attn_config *out,
                                      paged_error *err);
paged_status paged__attn_check(const paged_attn_config *config, const paged_batch *batch, const paged_kv *kv,
                               paged__blocks_exist *exist, paged_error *err);

/* Up to so many rows of a head memory is what one waits for. */
static inline int32_t paged__few_rows(const paged__type_kernels *kernels) {
    return PAGED_MAX(kernels->few_rows, PAGED__FEW_ROWS);
}

/* Whether the items of the entry are splits of a head. */
static inline bool paged__entry_can_cut(const paged_attn *attn, const paged__entry *entry) {
    return entry->n_splits > 1 && !entry->is_prefix && entry->n_rows <= attn->rows_cut;
}

/* Cascade: items of a KV head. */
static inline int32_t paged__head_items(const paged__entry *entry) {
    return entry->n_splits + entry->n_own;
}

/* Whether the items of the entry are parts of the rows of a head. */
static inline bool paged__entry_has_parts(const paged_attn *attn, const paged__entry *entry) {
    return !entry->is_prefix && !paged__entry_can_cut(attn, entry) && entry->n_rows >= PAGED__UNIT_ROWS &&
           entry->n_rows / attn->group >= PAGED__ROW_PARTS;
}

/* Items of a KV head. */
static inline int32_t paged__entry_parts(const paged_attn *attn, const paged__entry *entry) {
    if (paged__entry_can_cut(attn, entry)) return entry->n_splits;
    return paged__entry_has_parts(attn, entry) ? PAGED__ROW_PARTS : 1;
}

static inline int32_t paged__entry_items(const paged_attn *attn, const paged__entry *entry) {
    if (entry->is_prefix) return attn->config.n_kv_heads * paged__head_items(entry);
    return attn->config.n_kv_heads * paged__entry_parts(attn, entry);
}

/* Row r of the entry sees the keys paged__row_first … paged__row_keys - 1. */
static inline int32_t paged__row_keys(const paged_attn *attn, const paged__entry *entry, int32_t r) {
    if (attn->config.non_causal || entry->is_prefix) return entry->n_keys;
    return PAGED_MAX(entry->first_keys + r / attn->group, 0);
}

static inline int32_t paged__row_first(const paged_attn *attn, const paged__entry *entry, int32_t r) {
    int32_t window = attn->config.window;
    return window ? PAGED_MAX(paged__row_keys(attn, entry, r) - window, 0) : 0;
}

/* Cut b of nth: 0 is the begin of the line, nth its end. A function of the plan, b and nth alone. */
paged__cut paged__cut_at(const paged_attn *attn, int32_t b, int32_t nth);

/* The entry of the last item before the cut; -1: none. */
static inline int32_t paged__entry_before(paged__cut cut) {
    return cut.item > 0 ? cut.entry : cut.entry - 1;
}

/* Whether a cut of nth has a piece whose states are kept: the entry before it, if that may be cut, or the
 * head of a cascade that it goes through. */
bool paged__cut_keeps(const paged_attn *attn, paged__cut cut, int32_t nth);

/* Whether the piece of `cut`, which has one, is that of a cut before it. */
bool paged__cuts_share_piece(const paged_attn *attn, paged__cut before, paged__cut cut);

/* The number of the first cut of nth, at or before b, to have the piece of cut b, which has one. */
int32_t paged__first_cut(const paged_attn *attn, int32_t b, int32_t nth);

/* States of a split, counted from split_first, and head, in the workspace of the entry that cut b is the
 * first to have. */
static inline float *paged__workspace(const paged_attn *attn, int32_t b, int32_t split, int32_t head) {
    int64_t index = ((int64_t)split * attn->config.n_kv_heads + head) * attn->rows_cut;
    return attn->workspace + ((b - 1) * attn->workspace_states + index) * attn->state_floats;
}

/* States of a split, counted from 0, of the rows from `row` on of the head of a cascade that cut b is the
 * first to have. */
static inline float *paged__cascade(const paged_attn *attn, const paged__entry *prefix, int32_t b,
                                    int32_t split, int32_t row) {
    int64_t index = (int64_t)split * prefix->n_rows + row;
    return attn->workspace + ((b - 1) * attn->workspace_states + index) * attn->state_floats;
}

/* ---- tiles.c: from a block table to the tiles of a step ---- */

/* The tokens of one step of one KV head. */
typedef struct paged__attn_step {
    const paged_kv *kv;
    const paged__table *table; /* of the sequence and head */
    int32_t head;
    int32_t t0, n_tokens; /* tokens t0 … t0 + n_tokens - 1, 1 … 64 of them, t0 % 64 == 0 */
    int32_t n_before;     /* of these, the first ones that no row sees: their blocks may be absent */
} paged__attn_step;

/* Packed layout: where the tiles lie. Tiles that no row sees repeat the first one that some row does, so
 * that 4 may always be read. */
void paged__tiles_find(const paged__attn_step *step, const void **k, const void **v);

/* i8: where the scales of the tiles lie, likewise. */
void paged__scales_find(const paged__attn_step *step, const float **k, const float **v);

/* Plain layout: packs the step into tiles in the thread's scratch, zeros where there is no token. With
 * `widen` they become f32 tiles. Meanwhile the rows of `next` come into the cache; NULL: nothing follows. */
void paged__tiles_pack(const paged__type_kernels *kernels, const paged__attn_step *step,
                       const paged__attn_step *next, const paged__scratch *scratch, bool widen,
                       const void **k, const void **v);

/* Packed layout: brings the step to f32 tiles in the thread's scratch. */
void paged__tiles_widen(const paged__type_kernels *kernels, const paged__attn_step *step,
                        const paged__scratch *scratch, const void **k, const void **v);

#endif
