/* ascend.h: what the paged-attention operators of Ascend cards accept, before a card is touched.
 *
 *   paged_ascend_check          shapes and types of a call: the rule that refuses it, the nearest legal value
 *   paged_ascend_check_arrays   what those operators leave unchecked: tables, lengths, slots
 *   paged_ascend_export/import  the cache of paged/kv.h in the three layouts of such cards, to the byte
 *
 * Nothing here ran on such a card. The rules are facts of public documentation (each names its page, see
 * paged_ascend_rule.source), as of PAGED_ASCEND_FACTS. Where releases differ, the narrowest of those that
 * page at all is taken, so that what is accepted here should run with each of them. Nothing of CANN is in
 * here, no code and no header.
 *
 * Layouts of K or V of all blocks, d = head_dim, C0 = 32 bytes of elements (16 of f16 and bf16, 32 of int8, 8
 * of f32):
 *
 *   BnBsH    [n_blocks, block_size, n_kv_heads * d]
 *   BnNBsD   [n_blocks, n_kv_heads, block_size, d]
 *   PA_NZ    [n_blocks, n_kv_heads, d / C0, block_size, C0]
 *
 * Thread rule: nothing here has state; every function may be called from any thread.
 */
#ifndef PAGED_ASCEND_H
#define PAGED_ASCEND_H

#include "paged/base.h"
#include "paged/kv.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PAGED_ASCEND_FACTS "2026-11"

/* Who is called. One rule never serves all: each has block sizes, types and layouts of its own. */
typedef enum paged_ascend_path {
    PAGED_ASCEND_DECODE = 0, /* FusedInferAttentionScore or IncreFlashAttention, one query a sequence */
    PAGED_ASCEND_PREFILL,    /* FusedInferAttentionScore, several queries a sequence */
    PAGED_ASCEND_TND,        /* FusedInferAttentionScore, queries of all sequences one after the other */
    PAGED_ASCEND_MLA,        /* FusedInferAttentionScore with query_rope and key_rope, head_dim 512 */
    PAGED_ASCEND_ATB,        /* PagedAttention of the transformer boost library */
    PAGED_ASCEND_SCATTER,    /* ScatterPaKvCache, ReshapeAndCache: rows to slots */
    PAGED_ASCEND_GATHER,     /* GatherPaKvCache: blocks to rows */
    PAGED_ASCEND_PATHS
} paged_ascend_path;

typedef enum paged_ascend_layout {
    PAGED_ASCEND_BNBSH = 0,
    PAGED_ASCEND_BNNBSD,
    PAGED_ASCEND_PA_NZ,
    PAGED_ASCEND_LAYOUTS
} paged_ascend_layout;

/* input_layout of the queries. */
typedef enum paged_ascend_q_layout {
    PAGED_ASCEND_Q_BNSD = 0,
    PAGED_ASCEND_Q_BSND,
    PAGED_ASCEND_Q_BSH,
    PAGED_ASCEND_Q_TND,
    PAGED_ASCEND_Q_LAYOUTS
} paged_ascend_q_layout;

/* Static; NULL: no such value. "decode", "prefill", "tnd", "mla", "atb", "scatter", "gather"; "bnbsh",
 * "bnnbsd", "pa_nz"; "bnsd", "bsnd", "bsh", "tnd". */
PAGED_API const char *paged_ascend_path_name(int32_t path);
PAGED_API const char *paged_ascend_layout_name(int32_t layout);
PAGED_API const char *paged_ascend_q_layout_name(int32_t layout);

/* A call as it is meant. All fields are judged by the rules of their path and by no others; a path leaves
 * unread what it does not know (SCATTER and GATHER the queries, for example). */
typedef struct paged_ascend_config {
    size_t struct_size;
    int32_t path;              /* paged_ascend_path */
    int32_t q_type, kv_type;   /* paged_type */
    int32_t q_layout;          /* paged_ascend_q_layout */
    int32_t kv_layout;         /* paged_ascend_layout */
    int32_t n_heads;           /* of queries */
    int32_t n_kv_heads;        /* of keys and values */
    int32_t head_dim_k;        /* of keys; MLA: without the rotated part */
    int32_t head_dim_v;        /* of values; 0: as head_dim_k */
    int32_t rope_dim;          /* MLA: elements of query_rope and key_rope in a head */
    int32_t block_size;        /* tokens */
    int32_t writer_block_size; /* block_size on the side that writes; 0: the same */
    int32_t engine_block_size; /* block of the scheduler above, such as vLLM's; 0: the same */
    int32_t pool_block_bytes;  /* bytes of a block of the pool that this layer shares; 0: its own pool */
    int32_t batch;             /* sequences */
    int32_t max_q, max_k;      /* tokens of the longest query, of the longest sequence of keys */
    int32_t n_blocks;          /* of the pool */
    int32_t table_rows;        /* first axis of block_table */
    int32_t table_cols;        /* second axis */
    int32_t sparse_mode;       /* 0 … 4 */
    int32_t mask_rows;         /* the two last axes of atten_mask; 0: no mask */
    int32_t mask_cols;
    int32_t lse; /* 1: softmax_lse is asked for */
} paged_ascend_config;

/* For callers that know a part only: all fields but the path (DECODE) are unset; then what is still unset
 * becomes what one would take: 128 heads of 512 on one in MLA, else 32 of 128; blocks of 128; one sequence of
 * 1024 keys, one query, 128 in PREFILL; the causal mask from the right where there are several; a pool, a
 * table and a mask as large as needed. What was set stays. */
#define PAGED_ASCEND_UNSET INT32_MIN
PAGED_API void paged_ascend_unset(paged_ascend_config *config);
PAGED_API void paged_ascend_fill(paged_ascend_config *config);

/* The fields but struct_size and path by their names, in their order, for those who show or set them. Static;
 * NULL: no such index. `value` points into the config. */
PAGED_API const char *paged_ascend_field_name(int32_t i);
PAGED_API int32_t *paged_ascend_field_value(paged_ascend_config *config, int32_t i);

typedef struct paged_ascend_rule {
    const char *id;     /* "prefill.block_size"; never changes its meaning */
    const char *field;  /* of paged_ascend_config, or an array of paged_ascend_arrays */
    uint32_t paths;     /* bit 1 << paged_ascend_path of each path that has it */
    bool warning;       /* accepted, but advised against or seen to go wrong */
    const char *text;   /* what it says, in our words */
    const char *source; /* the public page that says it, or who met it */
} paged_ascend_rule;

PAGED_API int32_t paged_ascend_rule_count(void);
PAGED_API const paged_ascend_rule *paged_ascend_rule_at(int32_t i); /* static; NULL: no such index */

typedef struct paged_ascend_finding {
    const paged_ascend_rule *rule; /* static */
    int64_t value;                 /* what the field, or the entry of the array, is */
    int64_t entry;                 /* of the array, counted through all its axes; -1: a field */
    bool has_nearest;              /* false: none, as long as the other fields are what they are */
    int64_t nearest;               /* the value nearest to it (of types and layouts: the first) that all rules
                                    * of this field accept */
    char message[360];             /* one sentence with the numbers */
} paged_ascend_finding;

/* Every rule that the call breaks, in the order of the fields, at most max of them; returns how many there
 * are, warnings included. 0: nothing is wrong. */
PAGED_API int32_t paged_ascend_check(const paged_ascend_config *config, paged_ascend_finding *out,
                                     int32_t max);

/* True: no rule refuses it; warnings do not count. */
PAGED_API bool paged_ascend_accepts(const paged_ascend_config *config);

/* Field after field moves to its nearest legal value, so that the call is accepted. False: there is no way to
 * (the path is none), and the config is as it was. */
PAGED_API bool paged_ascend_nearest(paged_ascend_config *config);

/* Every array may be NULL: it is not looked at then. */
typedef struct paged_ascend_arrays {
    const int32_t *table;  /* [table_rows, table_cols]; what lies behind a sequence's keys is not judged */
    const int64_t *lens_q; /* [n_lens_q] queries of each sequence; path TND, and MLA with it: running sums */
    const int64_t *lens_k; /* [n_lens_k] keys of each sequence */
    const int64_t *slots;  /* [n_slots] block * block_size + offset */
    int64_t n_slots;
    int64_t n_tokens; /* rows of queries in TND, of keys in SCATTER; 0: not known */
    int32_t n_lens_q, n_lens_k;
} paged_ascend_arrays;

/* What those operators take as it comes, and answer with wrong numbers, with a fault, or by writing into
 * somebody else's memory. Of each rule the first entry that breaks it is told. *n as the result of
 * paged_ascend_check. Errors: INVALID_ARG (a size that arrays can not have), NO_MEMORY (looking for slots
 * that are named twice takes 16 bytes a slot). */
PAGED_API paged_status paged_ascend_check_arrays(const paged_ascend_config *config,
                                                 const paged_ascend_arrays *arrays, paged_ascend_finding *out,
                                                 int32_t max, int32_t *n, paged_error *err);

/* ---- layouts ---- */

/* Axes of K (or V) in a layout, [*n_axes] of them. Errors: INVALID_ARG: a head_dim that is no multiple of C0
 * (PA_NZ), sizes below 1, no such type or layout. */
PAGED_API paged_status paged_ascend_shape(paged_ascend_layout layout, paged_type type, int32_t n_blocks,
                                          int32_t block_size, int32_t n_kv_heads, int32_t head_dim,
                                          int64_t axes[5], int32_t *n_axes, paged_error *err);

/* All blocks of a cache to dense arrays in a layout of the card, and back; bytes are moved, never rounded. k
 * or v NULL leaves that part alone. Of int8 the values come as int8 (K without the 128 of kv.h) and the
 * scales apart, [n_blocks, n_kv_heads, block_size] f32, as the paged mode "per token and head" takes them;
 * NULL leaves them alone. Keys stay rotated as kv.h says, so queries have to be rotated too: the scores are
 * then the same. Thread rule: blocks are divided among ith of nth callers. Errors: those of
 * paged_ascend_shape. */
typedef struct paged_ascend_dense {
    void *k, *v;
    float *k_scale, *v_scale;
} paged_ascend_dense;

PAGED_API paged_status paged_ascend_export(const paged_kv *kv, paged_ascend_layout layout,
                                           const paged_ascend_dense *to, int32_t ith, int32_t nth,
                                           paged_error *err);
PAGED_API paged_status paged_ascend_import(const paged_kv *kv, paged_ascend_layout layout,
                                           const paged_ascend_dense *from, int32_t ith, int32_t nth,
                                           paged_error *err);

/* K (or V) of all blocks from one layout to another; src and dst must not overlap. Errors: as above, for
 * either layout. */
PAGED_API paged_status paged_ascend_convert(paged_ascend_layout from, paged_ascend_layout to, paged_type type,
                                            int32_t n_blocks, int32_t block_size, int32_t n_kv_heads,
                                            int32_t head_dim, const void *src, void *dst, paged_error *err);

#ifdef __cplusplus
}
#endif
#endif
