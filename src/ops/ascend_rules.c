/* ascend_rules.c: the rules of the operators on Ascend cards as one table: what each says, where that is
 * written, and what it allows.
 *
 * Each rule bears on one field, and looks only at fields that stand before it in paged_ascend_config (or in
 * rows above); so fields can be put right one after the other. Sources are pages of public documentation:
 *
 *   FIA       op-plugin, docs/context: torch_npu-npu_fused_infer_attention_score(_v2).md
 *   IFA       op-plugin, docs/context: torch_npu-npu_incre_flash_attention.md
 *   ATB       Ascend Transformer Boost API, PagedAttentionOperation: constraints
 *   SCATTER   CANN operator API, aclnnScatterPaKvCache, and ATB's ReshapeAndCacheOperation
 *   GATHER    CANN operator API, aclnnGatherPaKvCache
 *   vllm-ascend, users: what its code takes for granted, and what users of these operators reported
 */
#include "ops/ascend.h"

enum { KEYS_MAX = 20971520, MASK_FIXED = 2048, GATHER_TOKEN_BYTES = 148 << 10 };

#define BIT(path) (1u << PAGED_ASCEND_##path)
#define FUSED     (BIT(DECODE) | BIT(PREFILL) | BIT(TND) | BIT(MLA))
#define ATTENTION (FUSED | BIT(ATB))
#define MOVERS    (BIT(SCATTER) | BIT(GATHER))
#define ALL       (ATTENTION | MOVERS)

#define LIST(...)                                                                                            \
    { .list = (const int32_t[]){__VA_ARGS__}, .n_list = sizeof(int32_t[]){__VA_ARGS__} / sizeof(int32_t) }
#define RANGE(lo_, hi_, step_)                                                                               \
    { .lo = (lo_), .hi = (hi_), .step = (step_) }
#define TYPES_16 LIST(PAGED_TYPE_F16, PAGED_TYPE_BF16)
#define TYPES_KV LIST(PAGED_TYPE_F16, PAGED_TYPE_BF16, PAGED_TYPE_I8)
#define ANY      RANGE(INT32_MIN, INT32_MAX, 1)

typedef const paged_ascend_config call;

static bool is_nz(call *c) {
    return c->kv_layout == PAGED_ASCEND_PA_NZ;
}
static bool is_int8(call *c) {
    return c->kv_type == PAGED_TYPE_I8;
}
static bool is_nz_int8(call *c) {
    return c->path == PAGED_ASCEND_DECODE && is_nz(c) && is_int8(c);
}

static bool exactly(paged__legal *l, int64_t value) {
    l->lo = l->hi = value;
    return true;
}
static bool at_most(paged__legal *l, int64_t hi) {
    l->hi = PAGED_MIN(l->hi, hi);
    return true;
}
static bool at_least(paged__legal *l, int64_t lo) {
    l->lo = PAGED_MAX(l->lo, lo);
    return true;
}

/* Blocks that so many keys take. */
static int64_t blocks_of(call *c) {
    int64_t size = PAGED_MAX(c->block_size, 1);
    return (PAGED_MAX(c->max_k, 0) + size - 1) / size;
}

/* ---- types and layouts ---- */

static bool kv_as_q(call *c, paged__legal *l) {
    return !is_int8(c) && exactly(l, c->q_type);
}

static bool kv_of_bsh(call *c, paged__legal *l) {
    static const int32_t without_bnnbsd[] = {PAGED_ASCEND_BNBSH, PAGED_ASCEND_PA_NZ};
    if (c->q_layout != PAGED_ASCEND_Q_BSH && c->q_layout != PAGED_ASCEND_Q_BSND) return false;
    l->list = without_bnnbsd;
    l->n_list = 2;
    return true;
}

static bool nz_is_int8(call *c, paged__legal *l) {
    bool can = is_int8(c) && c->q_type == PAGED_TYPE_BF16;
    return !can && at_most(l, PAGED_ASCEND_BNNBSD);
}

static bool no_nz_for_bnsd(call *c, paged__legal *l) {
    return c->q_layout == PAGED_ASCEND_Q_BNSD && at_most(l, PAGED_ASCEND_BNNBSD);
}

/* ---- heads ---- */

static bool heads_of_nz_int8(call *c, paged__legal *l) {
    (void)l;
    return is_nz_int8(c);
}

static bool kv_heads_divide(call *c, paged__legal *l) {
    l->divides = c->n_heads;
    return true;
}

static bool kv_heads_of_nz_int8(call *c, paged__legal *l) {
    return is_nz_int8(c) && exactly(l, c->n_heads == 10 ? 1 : c->n_heads == 80 ? 8 : c->n_heads / 8);
}

static bool gather_heads(call *c, paged__legal *l) {
    int32_t elem = paged__ascend_elem(c->kv_type), d = is_nz(c) ? paged__ascend_c0(c->kv_type) : 1;
    return at_most(l, GATHER_TOKEN_BYTES / (elem * d));
}

/* ---- head_dim ---- */

static bool dim_step(call *c, paged__legal *l) {
    l->step = is_int8(c) ? 32 : 16;
    return true;
}

static bool dim_of_nz_int8(call *c, paged__legal *l) {
    return is_nz_int8(c) && exactly(l, 128);
}

static bool dim_of_bnbsh(call *c, paged__legal *l) {
    return c->kv_layout == PAGED_ASCEND_BNBSH && at_most(l, 65535 / PAGED_MAX(c->n_kv_heads, 1));
}

static bool dim_of_nz(call *c, paged__legal *l) {
    l->step = paged__ascend_c0(c->kv_type);
    return is_nz(c);
}

static bool dim_of_atb(call *c, paged__legal *l) {
    return at_most(l, is_int8(c) ? 256 : 576);
}

static bool dim_of_gather(call *c, paged__legal *l) {
    int64_t token = (int64_t)PAGED_MAX(c->n_kv_heads, 1) * paged__ascend_elem(c->kv_type);
    return at_most(l, GATHER_TOKEN_BYTES / token);
}

static bool v_as_k(call *c, paged__legal *l) {
    return exactly(l, c->head_dim_k);
}
static bool v_of_int8(call *c, paged__legal *l) {
    return is_int8(c) && exactly(l, c->head_dim_k);
}
static bool v_of_tnd(call *c, paged__legal *l) {
    return exactly(l, PAGED_MIN(c->head_dim_k, 128));
}

/* ---- blocks ---- */

static bool block_step(call *c, paged__legal *l) {
    l->step = is_int8(c) ? 32 : 16;
    return true;
}

static bool block_of_nz_int8(call *c, paged__legal *l) {
    (void)l;
    return is_nz_int8(c);
}

static bool block_of_mla_nz(call *c, paged__legal *l) {
    return is_nz(c) && exactly(l, 128);
}

static bool block_of_atb(call *c, paged__legal *l) {
    int32_t d = PAGED_MAX(c->head_dim_k, c->head_dim_v);
    return at_most(l, d > 256 ? 128 : 128 * 128 / PAGED_MAX(d, 1));
}

static bool writer_as_reader(call *c, paged__legal *l) {
    return c->writer_block_size != 0 && exactly(l, c->block_size);
}

static bool engine_over_kernel(call *c, paged__legal *l) {
    l->step = PAGED_MAX(c->block_size, 1);
    return c->engine_block_size != 0 && at_least(l, l->step);
}

static bool pool_as_layer(call *c, paged__legal *l) {
    int64_t dims = (int64_t)c->head_dim_k + c->head_dim_v, bytes;
    if (c->pool_block_bytes == 0) return false;
    if (__builtin_mul_overflow(dims * paged__ascend_elem(c->kv_type), (int64_t)c->n_kv_heads, &bytes) ||
        __builtin_mul_overflow(bytes, (int64_t)c->block_size, &bytes) || bytes > INT32_MAX)
        bytes = 0; /* no pool that is counted in 32 bits has such blocks */
    return exactly(l, bytes);
}

/* ---- batch, lengths, table ---- */

static bool enough_blocks(call *c, paged__legal *l) {
    return at_least(l, PAGED_MAX(blocks_of(c), 1));
}
static bool enough_cols(call *c, paged__legal *l) {
    return at_least(l, PAGED_MAX(blocks_of(c), 1));
}
static bool countable_cols(call *c, paged__legal *l) {
    return at_most(l, INT32_MAX / PAGED_MAX(c->block_size, 1));
}
static bool as_batch(call *c, paged__legal *l) {
    return exactly(l, c->batch);
}

/* ---- masks ---- */

static bool sparse_of_mla(call *c, paged__legal *l) {
    return exactly(l, c->max_q > 1 ? 3 : 0);
}

static bool has_fixed_mask(call *c) {
    return c->sparse_mode >= 2;
}
static bool fixed_mask(call *c, paged__legal *l) {
    return has_fixed_mask(c) && exactly(l, MASK_FIXED);
}
static bool no_mask(call *c, paged__legal *l) {
    return c->sparse_mode == 0 && exactly(l, 0);
}

static int64_t table_keys(call *c) {
    return (int64_t)c->table_cols * PAGED_MAX(c->block_size, 1);
}

/* Mode 1 always has a mask, mode 0 may. */
static bool mask_rows_of_queries(call *c, paged__legal *l) {
    bool given = c->sparse_mode == 1 || c->mask_rows != 0;
    return !has_fixed_mask(c) && given && at_least(l, PAGED_MAX(c->max_q, 1));
}
static bool mask_as_wide(call *c, paged__legal *l) {
    if (has_fixed_mask(c) && c->path != PAGED_ASCEND_DECODE) return false;
    return c->mask_rows == 0 ? exactly(l, 0) : at_least(l, table_keys(c));
}

/* ---- the table ---- */

/* clang-format off */
const paged__ascend_row paged__ascend_rows[] = {
    {.rule = {"q_type", "q_type", ATTENTION, false, "queries are f16 or bf16", "FIA: query; ATB: query"},
     .legal = TYPES_16},

    {.rule = {"kv_type", "kv_type", BIT(DECODE) | BIT(ATB) | MOVERS, false,
              "keys and values are f16, bf16 or int8", "FIA: key, value; ATB, SCATTER, GATHER: keyCache"},
     .legal = TYPES_KV},
    {.rule = {"kv_type.paged_prefill", "kv_type", BIT(PREFILL) | BIT(TND) | BIT(MLA), false,
              "with a block table and several queries a sequence, keys and values are f16 or bf16",
              "FIA: query longer than 1, page attention"},
     .legal = TYPES_16},
    {.rule = {"kv_type.as_query", "kv_type", ATTENTION, false,
              "keys and values of 16 bits have the type of the queries", "FIA: key, value; ATB: keyCache"},
     .legal = ANY, .narrow = kv_as_q},

    {.rule = {"q_layout", "q_layout", BIT(DECODE) | BIT(PREFILL), false,
              "queries are BNSD, BSND or BSH; TND is a path of its own", "FIA: input_layout"},
     .legal = RANGE(PAGED_ASCEND_Q_BNSD, PAGED_ASCEND_Q_BSH, 1)},
    {.rule = {"q_layout.tnd", "q_layout", BIT(TND), false, "queries are TND", "FIA: input_layout"},
     .legal = RANGE(PAGED_ASCEND_Q_TND, PAGED_ASCEND_Q_TND, 1)},
    {.rule = {"q_layout.mla", "q_layout", BIT(MLA), false, "queries are BNSD, BSND, BSH or TND",
              "FIA: query_rope, D 512, input_layout"},
     .legal = RANGE(PAGED_ASCEND_Q_BNSD, PAGED_ASCEND_Q_TND, 1)},

    {.rule = {"kv_layout.of_query", "kv_layout", FUSED, false,
              "queries in BSH or BSND take no BnNBsD cache; BNSD and TND do",
              "FIA: query longer than 1, page attention, layouts of the cache"},
     .legal = RANGE(PAGED_ASCEND_BNBSH, PAGED_ASCEND_PA_NZ, 1), .narrow = kv_of_bsh},
    {.rule = {"kv_layout.nz", "kv_layout", BIT(PREFILL) | BIT(TND), false,
              "PA_NZ is for MLA, and for int8 with bf16 queries in decode",
              "FIA: query_rope, D 512; GQA with NZ"},
     .legal = RANGE(PAGED_ASCEND_BNBSH, PAGED_ASCEND_BNNBSD, 1)},
    {.rule = {"kv_layout.nz_int8", "kv_layout", BIT(DECODE), false,
              "PA_NZ is for MLA, and for int8 with bf16 queries in decode",
              "FIA: query_rope, D 512; GQA with NZ"},
     .legal = RANGE(PAGED_ASCEND_BNBSH, PAGED_ASCEND_PA_NZ, 1), .narrow = nz_is_int8},
    {.rule = {"kv_layout.mla_nz", "kv_layout", BIT(MLA), false, "queries in BNSD take no PA_NZ cache",
              "FIA: query_rope, D 512, NZ"},
     .legal = RANGE(PAGED_ASCEND_BNBSH, PAGED_ASCEND_PA_NZ, 1), .narrow = no_nz_for_bnsd},
    {.rule = {"kv_layout.movers", "kv_layout", BIT(ATB) | MOVERS, false,
              "the cache is [blocks, block, heads, head_dim], which is BnBsH, or PA_NZ",
              "SCATTER, GATHER: cacheMode; ATB: keyCache"},
     .legal = LIST(PAGED_ASCEND_BNBSH, PAGED_ASCEND_PA_NZ)},

    {.rule = {"n_heads", "n_heads", FUSED, false, "a layer has at most 256 heads",
              "FIA: query longer than 1, N"},
     .legal = RANGE(1, 256, 1)},
    {.rule = {"n_heads.atb", "n_heads", BIT(ATB), false, "a layer has heads", "ATB: headNum"},
     .legal = RANGE(1, INT32_MAX, 1)},
    {.rule = {"n_heads.mla", "n_heads", BIT(MLA), false, "32, 64 or 128 heads share the one of the cache",
              "FIA: query_rope, D 512"},
     .legal = LIST(32, 64, 128)},
    {.rule = {"n_heads.nz_int8", "n_heads", BIT(DECODE), false,
              "with int8 in PA_NZ heads and KV heads are 10 and 1, 64 and 8, 80 and 8, or 128 and 16",
              "FIA: GQA with NZ"},
     .legal = LIST(10, 64, 80, 128), .narrow = heads_of_nz_int8},

    {.rule = {"n_kv_heads", "n_kv_heads", BIT(DECODE) | BIT(PREFILL) | BIT(TND), false,
              "KV heads divide the heads, at most 64 heads share one", "FIA: num_key_value_heads"},
     .legal = {.lo = 1, .hi = INT32_MAX, .step = 1, .max_ratio = 64}, .narrow = kv_heads_divide},
    {.rule = {"n_kv_heads.mla", "n_kv_heads", BIT(MLA), false, "the cache has one head",
              "FIA: query_rope, D 512, key_rope"},
     .legal = RANGE(1, 1, 1)},
    {.rule = {"n_kv_heads.atb", "n_kv_heads", BIT(ATB), false, "KV heads divide the heads", "ATB: kvHeadNum"},
     .legal = RANGE(1, INT32_MAX, 1), .narrow = kv_heads_divide},
    {.rule = {"n_kv_heads.movers", "n_kv_heads", MOVERS, false, "the cache has heads",
              "SCATTER, GATHER: keyCache"},
     .legal = RANGE(1, INT32_MAX, 1)},
    {.rule = {"n_kv_heads.nz_int8", "n_kv_heads", BIT(DECODE), false,
              "with int8 in PA_NZ heads and KV heads are 10 and 1, 64 and 8, 80 and 8, or 128 and 16",
              "FIA: GQA with NZ"},
     .legal = ANY, .narrow = kv_heads_of_nz_int8},
    {.rule = {"n_kv_heads.gather", "n_kv_heads", BIT(GATHER), false,
              "all heads of a token take at most 148 KiB", "GATHER: size of a token"},
     .legal = RANGE(1, INT32_MAX, 1), .narrow = gather_heads},

    {.rule = {"head_dim", "head_dim_k", BIT(DECODE) | BIT(PREFILL), false,
              "head_dim is at most 512 and a multiple of 16, of 32 with int8", "FIA: query longer than 1, D"},
     .legal = RANGE(1, 512, 1), .narrow = dim_step},
    {.rule = {"head_dim.tnd", "head_dim_k", BIT(TND), false, "head_dim is 64, 128 or 192",
              "FIA: TND, D other than 512; vllm-ascend"},
     .legal = LIST(64, 128, 192)},
    {.rule = {"head_dim.mla", "head_dim_k", BIT(MLA), false, "head_dim is 512", "FIA: query_rope, D 512"},
     .legal = RANGE(512, 512, 1)},
    {.rule = {"head_dim.atb", "head_dim_k", BIT(ATB), false,
              "head_dim is at most 576, at most 256 where keys and values are quantised", "ATB: head_size"},
     .legal = RANGE(1, INT32_MAX, 1), .narrow = dim_of_atb},
    {.rule = {"head_dim.movers", "head_dim_k", MOVERS, false, "heads have elements",
              "SCATTER, GATHER: keyCache"},
     .legal = RANGE(1, INT32_MAX, 1)},
    {.rule = {"head_dim.nz", "head_dim_k", BIT(ATB) | MOVERS, false,
              "in PA_NZ a head is a whole number of 32 bytes", "SCATTER: PA_NZ; ATB: NZ"},
     .legal = RANGE(INT32_MIN, INT32_MAX, 1), .narrow = dim_of_nz},
    {.rule = {"head_dim.nz_int8", "head_dim_k", BIT(DECODE), false, "with int8 in PA_NZ head_dim is 128",
              "FIA: GQA with NZ"},
     .legal = ANY, .narrow = dim_of_nz_int8},
    {.rule = {"head_dim.bnbsh", "head_dim_k", FUSED, false,
              "KV heads × head_dim is at most 65535 in BnBsH; BnNBsD has no such limit",
              "FIA: query longer than 1, page attention, 65535"},
     .legal = RANGE(INT32_MIN, INT32_MAX, 1), .narrow = dim_of_bnbsh},
    {.rule = {"head_dim.gather", "head_dim_k", BIT(GATHER), false,
              "all heads of a token take at most 148 KiB",
              "GATHER: size of a token"},
     .legal = RANGE(1, INT32_MAX, 1), .narrow = dim_of_gather},

    {.rule = {"head_dim_v", "head_dim_v", BIT(DECODE) | BIT(PREFILL) | BIT(MLA), false,
              "values are as wide as keys", "FIA: key, value of one shape"},
     .legal = ANY, .narrow = v_as_k},
    {.rule = {"head_dim_v.tnd", "head_dim_v", BIT(TND), false,
              "values are as wide as keys, but 128 with keys of 192; 192 is not for paged caches",
              "FIA: TND, D other than 512"},
     .legal = ANY, .narrow = v_of_tnd},
    {.rule = {"head_dim_v.atb", "head_dim_v", BIT(ATB), false,
              "values are as keys at most 576 wide, at most 256 where quantised", "ATB: head_size"},
     .legal = RANGE(1, INT32_MAX, 1), .narrow = dim_of_atb},
    {.rule = {"head_dim_v.atb_int8", "head_dim_v", BIT(ATB), false,
              "where they are quantised, values are as wide as keys", "ATB: head_size"},
     .legal = ANY, .narrow = v_of_int8},
    {.rule = {"head_dim_v.movers", "head_dim_v", MOVERS, false, "heads have elements",
              "SCATTER, GATHER: valueCache"},
     .legal = RANGE(1, INT32_MAX, 1)},
    {.rule = {"head_dim_v.nz", "head_dim_v", BIT(ATB) | MOVERS, false,
              "in PA_NZ a head is a whole number of 32 bytes", "SCATTER: PA_NZ; ATB: NZ"},
     .legal = ANY, .narrow = dim_of_nz},
    {.rule = {"head_dim_v.gather", "head_dim_v", BIT(GATHER), false,
              "all heads of a token take at most 148 KiB", "GATHER: size of a token"},
     .legal = RANGE(1, INT32_MAX, 1), .narrow = dim_of_gather},

    {.rule = {"rope_dim.mla", "rope_dim", BIT(MLA), false, "query_rope and key_rope are 64 wide",
              "FIA: query_rope, D 512"},
     .legal = RANGE(64, 64, 1)},
    {.rule = {"rope_dim", "rope_dim", ALL & ~BIT(MLA), false, "only MLA has rotated parts of their own",
              "FIA: query_rope"},
     .legal = RANGE(0, 0, 1)},

    {.rule = {"block_size.decode", "block_size", BIT(DECODE), false,
              "a block has at most 512 tokens, a multiple of 16, of 32 with int8", "IFA: block_size"},
     .legal = RANGE(1, 512, 1), .narrow = block_step},
    {.rule = {"block_size.nz_int8", "block_size", BIT(DECODE), false,
              "with int8 in PA_NZ a block has 128 or 512 tokens", "FIA: GQA with NZ"},
     .legal = LIST(128, 512), .narrow = block_of_nz_int8},
    {.rule = {"block_size.prefill", "block_size", BIT(PREFILL), false,
              "a block has 128 to 512 tokens, a multiple of 128",
              "FIA: query longer than 1, page attention, block_size"},
     .legal = RANGE(128, 512, 128)},
    {.rule = {"block_size.tnd", "block_size", BIT(TND), false, "a block has 128, 512 or 1024 tokens",
              "FIA: TND, D other than 512, page attention"},
     .legal = LIST(128, 512, 1024)},
    {.rule = {"block_size.mla", "block_size", BIT(MLA), false, "a block has 16 or 128 tokens",
              "FIA: query_rope, D 512, page attention"},
     .legal = LIST(16, 128)},
    {.rule = {"block_size.mla_nz", "block_size", BIT(MLA), false, "in PA_NZ a block has 128 tokens",
              "FIA: query_rope, D 512, NZ"},
     .legal = ANY, .narrow = block_of_mla_nz},
    {.rule = {"block_size.atb", "block_size", BIT(ATB), false,
              "block × head_dim is at most 128 × 128 and block a multiple of 16; above a head_dim of 256 a "
              "block has at most 128 tokens", "ATB: block_size"},
     .legal = RANGE(1, INT32_MAX, 16), .narrow = block_of_atb},
    {.rule = {"block_size.movers", "block_size", MOVERS, false, "a block has tokens",
              "SCATTER, GATHER: keyCache"},
     .legal = RANGE(1, INT32_MAX, 1)},
    {.rule = {"block_size.advised", "block_size", BIT(DECODE) | BIT(ATB), true,
              "128 is advised: smaller blocks cost time, larger ones memory",
              "IFA: block_size; ATB: block_size"},
     .legal = RANGE(128, 128, 1)},

    {.rule = {"writer_block_size", "writer_block_size", ALL, false,
              "who writes and who reads must count in the same blocks",
              "users: an int8 cache in PA_NZ came out damaged"},
     .legal = ANY, .narrow = writer_as_reader},
    {.rule = {"engine_block_size", "engine_block_size", ALL, false,
              "a block of the scheduler is a whole number of blocks of the kernel",
              "vllm-ascend: kernel block size; users: a scheduler with blocks of 16"},
     .legal = RANGE(INT32_MIN, INT32_MAX, 1), .narrow = engine_over_kernel},
    {.rule = {"pool_block_bytes", "pool_block_bytes", ALL, false,
              "layers that share a pool have blocks of the same bytes, or they write into each other's",
              "users: groups of other block shapes in one pool"},
     .legal = ANY, .narrow = pool_as_layer},

    {.rule = {"batch", "batch", BIT(DECODE) | BIT(PREFILL) | BIT(MLA), false,
              "a call has 1 to 65536 sequences",
              "FIA: query longer than 1, B"},
     .legal = RANGE(1, 65536, 1)},
    {.rule = {"batch.tnd", "batch", BIT(TND), false, "a call has 1 to 4096 sequences",
              "FIA: TND, number of actual_seq_lengths"},
     .legal = RANGE(1, 4096, 1)},
    {.rule = {"batch.others", "batch", BIT(ATB) | MOVERS, false, "a call has sequences", "ATB: contextLens"},
     .legal = RANGE(1, INT32_MAX, 1)},

    {.rule = {"max_q.decode", "max_q", BIT(DECODE), false, "a sequence has one query", "FIA: Q_S"},
     .legal = RANGE(1, 1, 1)},
    {.rule = {"max_q.prefill", "max_q", BIT(PREFILL), false,
              "the longest query has 2 to 20971520 tokens; one token goes the way of decode", "FIA: Q_S, S"},
     .legal = RANGE(2, KEYS_MAX, 1)},
    {.rule = {"max_q.tnd", "max_q", BIT(TND), false, "the longest query has 1 to 20971520 tokens", "FIA: S"},
     .legal = RANGE(1, KEYS_MAX, 1)},
    {.rule = {"max_q.mla", "max_q", BIT(MLA), false, "a sequence has 1 to 16 queries",
              "FIA: query_rope, D 512, S of query"},
     .legal = RANGE(1, 16, 1)},
    {.rule = {"max_q.others", "max_q", BIT(ATB), false, "a sequence has queries", "ATB: query"},
     .legal = RANGE(1, INT32_MAX, 1)},
    {.rule = {"max_k", "max_k", FUSED, false, "a sequence has at most 20971520 keys", "FIA: S"},
     .legal = RANGE(0, KEYS_MAX, 1)},
    {.rule = {"max_k.others", "max_k", BIT(ATB) | BIT(GATHER), false, "a length is not negative",
              "ATB: contextLens; GATHER: seqLens"},
     .legal = RANGE(0, INT32_MAX, 1)},

    {.rule = {"n_blocks", "n_blocks", ATTENTION | BIT(GATHER), false,
              "the pool holds the blocks of the longest sequence", "FIA: page attention, blocknum"},
     .legal = RANGE(1, INT32_MAX, 1), .narrow = enough_blocks},
    {.rule = {"n_blocks.scatter", "n_blocks", BIT(SCATTER), false, "the pool has blocks",
              "SCATTER: keyCache"},
     .legal = RANGE(1, INT32_MAX, 1)},
    {.rule = {"table_rows", "table_rows", ATTENTION | BIT(GATHER), false,
              "the block table has a row for each sequence", "FIA: page attention, block_table; GATHER"},
     .legal = ANY, .narrow = as_batch},
    {.rule = {"table_cols", "table_cols", ATTENTION | BIT(GATHER), false,
              "a row of the block table covers the longest sequence",
              "FIA: page attention, block_table; ATB: max_num_blocks_per_seq"},
     .legal = RANGE(1, INT32_MAX, 1), .narrow = enough_cols},
    {.rule = {"table_cols.count", "table_cols", FUSED, false,
              "the tokens that a row of the block table covers are counted in 32 bits", "ours"},
     .legal = RANGE(1, INT32_MAX, 1), .narrow = countable_cols},

    {.rule = {"sparse_mode", "sparse_mode", BIT(PREFILL), false,
              "0 no mask or a full one, 1 all, 2 causal from the left, 3 causal from the right, 4 band",
              "FIA: sparse_mode"},
     .legal = RANGE(0, 4, 1)},
    {.rule = {"sparse_mode.tnd", "sparse_mode", BIT(TND), false, "mode 0 without a mask, or 3 with one",
              "FIA: TND, sparse"},
     .legal = LIST(0, 3)},
    {.rule = {"sparse_mode.mla", "sparse_mode", BIT(MLA), false,
              "one query a sequence takes mode 0, several take mode 3", "FIA: query_rope, D 512, sparse"},
     .legal = ANY, .narrow = sparse_of_mla},
    {.rule = {"mask.none", "mask_rows", BIT(TND) | BIT(MLA), false, "mode 0 is without a mask here",
              "FIA: TND, sparse; query_rope, D 512, sparse"},
     .legal = ANY, .narrow = no_mask},
    {.rule = {"mask.fixed_rows", "mask_rows", BIT(PREFILL) | BIT(TND) | BIT(MLA), false,
              "modes 2 to 4 take the fixed mask of 2048 × 2048", "FIA: query longer than 1, atten_mask"},
     .legal = ANY, .narrow = fixed_mask},
    {.rule = {"mask.rows", "mask_rows", BIT(PREFILL), false,
              "a full mask has a row for each query; mode 1 can not be without", "FIA: sparse_mode 0, 1"},
     .legal = RANGE(0, INT32_MAX, 1), .narrow = mask_rows_of_queries},
    {.rule = {"mask.rows_decode", "mask_rows", BIT(DECODE), false,
              "a mask has a row for the query, or is none",
              "FIA: atten_mask, Q_S 1"},
     .legal = RANGE(0, INT32_MAX, 1)},
    {.rule = {"mask.fixed_cols", "mask_cols", BIT(PREFILL) | BIT(TND) | BIT(MLA), false,
              "modes 2 to 4 take the fixed mask of 2048 × 2048", "FIA: query longer than 1, atten_mask"},
     .legal = ANY, .narrow = fixed_mask},
    {.rule = {"mask.width", "mask_cols", FUSED, false,
              "a full mask is as wide as the tokens that the block table covers; another width is not told, "
              "and beyond 512 keys the mask was left out without a word",
              "FIA: page attention, KV_S; users: a mask of the wrong width"},
     .legal = RANGE(0, INT32_MAX, 1), .narrow = mask_as_wide},
    {.rule = {"lse.mla", "lse", BIT(MLA), false, "MLA gives no LSE",
              "FIA: query_rope, D 512, softmax_lse_flag"},
     .legal = RANGE(0, 0, 1)},
    {.rule = {"lse", "lse", FUSED & ~BIT(MLA), false, "asked for or not", "FIA: softmax_lse_flag"},
     .legal = RANGE(0, 1, 1)},
    {.rule = {"lse.others", "lse", BIT(ATB) | MOVERS, false, "there is no LSE", "ATB: output"},
     .legal = RANGE(0, 0, 1)},

    /* Of arrays. */
    {.rule = {"table.range", "table", ATTENTION | BIT(GATHER), false,
              "an entry names a block of the pool; it is not checked there",
              "FIA: block_table; ATB: blockTables"}},
    {.rule = {"table.absent", "table", ATTENTION | BIT(GATHER), false,
              "-1 may stand behind a sequence's keys only", "FIA: block_table"}},
    {.rule = {"table.wide", "table", ATTENTION | BIT(GATHER), true,
              "a block whose first element has a number of 33 bits was misread in one geometry", "users"}},
    {.rule = {"lens_q.count", "lens_q", FUSED, false,
              "there is a length for each sequence, or one for all; in "
              "TND one for each", "FIA: actual_seq_lengths"}},
    {.rule = {"lens_q.order", "lens_q", BIT(TND) | BIT(MLA), false,
              "lengths in TND are running sums: they never fall and are not negative",
              "FIA: TND, actual_seq_lengths"}},
    {.rule = {"lens_q.total", "lens_q", BIT(TND) | BIT(MLA), false,
              "the last running sum is the number of query rows", "FIA: TND, actual_seq_lengths"}},
    {.rule = {"lens_q.max", "lens_q", FUSED, false, "a sequence has 0 to max_q queries",
              "FIA: actual_seq_lengths"}},
    {.rule = {"lens_q.keys", "lens_q", FUSED, false,
              "with the causal mask from the right a sequence has at least as many keys as queries",
              "FIA: sparse_mode 3"}},
    {.rule = {"lens_k.count", "lens_k", ATTENTION | BIT(GATHER), false,
              "there is a length for each sequence, or, but for TND and GATHER, one for all",
              "FIA: actual_seq_lengths_kv"}},
    {.rule = {"lens_k.table", "lens_k", ATTENTION | BIT(GATHER), false,
              "a sequence has no more keys than its row of the block table covers, and not fewer than none",
              "FIA: page attention, block_table"}},
    {.rule = {"lens_k.blocks", "lens_k", BIT(PREFILL), false,
              "the pool has as many blocks as all sequences take, those they share counted for each",
              "FIA: page attention, blocknum"}},
    {.rule = {"slots.count", "slots", BIT(SCATTER), false, "there is a slot for each row",
              "SCATTER: slotMapping"}},
    {.rule = {"slots.negative", "slots", BIT(SCATTER), false,
              "a slot is not negative: such were seen to write before the cache; leave the row out",
              "SCATTER: slotMapping; users"}},
    {.rule = {"slots.range", "slots", BIT(SCATTER), false,
              "a slot is block × block_size + offset, below blocks × block_size", "SCATTER: slotMapping"}},
    {.rule = {"slots.twice", "slots", BIT(SCATTER), false,
              "no slot is named twice: which row stays is not defined", "SCATTER: slotMapping"}},
};
/* clang-format on */
const int32_t paged__ascend_n_rows = sizeof paged__ascend_rows / sizeof paged__ascend_rows[0];
