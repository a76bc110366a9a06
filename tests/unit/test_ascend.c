/* Goal: each rule of the contract with Ascend's operators holds at its edge and not beyond it, the nearest
 * legal value is legal and none is nearer, and what those operators leave unchecked is found. Method: edges
 * written down here from the public pages, one call a rule; random calls, of which each repaired one must be
 * accepted and each single repair compared with a search by brute force; layouts by hand and round trip. */
#include "paged/ascend.h"

#include "base/base.h"
#include "test.h"

enum { MAX = 64 };

/* A call that each path accepts. */
static paged_ascend_config good(paged_ascend_path path) {
    paged_ascend_config c = {.struct_size = sizeof c,
                             .path = (int32_t)path,
                             .n_heads = 32,
                             .n_kv_heads = 8,
                             .head_dim_k = 128,
                             .block_size = 128,
                             .batch = 4,
                             .max_q = 1,
                             .max_k = 4096,
                             .n_blocks = 256,
                             .table_rows = 4,
                             .table_cols = 32};
    if (path == PAGED_ASCEND_PREFILL) c.max_q = 512;
    if (path == PAGED_ASCEND_TND) c.q_layout = PAGED_ASCEND_Q_TND;
    if (path == PAGED_ASCEND_MLA) {
        c.n_kv_heads = 1;
        c.head_dim_k = 512;
        c.rope_dim = 64;
        c.q_layout = PAGED_ASCEND_Q_TND;
    }
    return c;
}

/* Of int8 in PA_NZ. */
static paged_ascend_config good_nz_int8(void) {
    paged_ascend_config c = good(PAGED_ASCEND_DECODE);
    c.n_heads = 64;
    c.kv_type = PAGED_TYPE_I8;
    c.q_type = PAGED_TYPE_BF16;
    c.kv_layout = PAGED_ASCEND_PA_NZ;
    return c;
}

/* The finding of this rule; NULL: the call does not break it. */
static const paged_ascend_finding *broken(const paged_ascend_config *c, const char *rule) {
    static paged_ascend_finding found[MAX];
    int32_t n = paged_ascend_check(c, found, MAX);
    CHECK(n <= MAX);
    for (int32_t i = 0; i < n; i++)
        if (strcmp(found[i].rule->id, rule) == 0) return &found[i];
    return NULL;
}

static int32_t *field(paged_ascend_config *c, const char *name) {
#define FIELD(f)                                                                                             \
    if (strcmp(name, #f) == 0) return &c->f;
    FIELD(q_type)
    FIELD(kv_type)
    FIELD(q_layout)
    FIELD(kv_layout)
    FIELD(n_heads)
    FIELD(n_kv_heads)
    FIELD(head_dim_k)
    FIELD(head_dim_v)
    FIELD(rope_dim)
    FIELD(block_size)
    FIELD(writer_block_size)
    FIELD(engine_block_size)
    FIELD(pool_block_bytes)
    FIELD(batch)
    FIELD(max_q)
    FIELD(max_k)
    FIELD(n_blocks)
    FIELD(table_rows)
    FIELD(table_cols)
    FIELD(sparse_mode)
    FIELD(mask_rows)
    FIELD(mask_cols)
    FIELD(lse)
#undef FIELD
    return NULL;
}

/* One row for each rule of calls: in the call `base` with `with` changes, the field is legal at `edge` and
 * breaks the rule at `beyond`, from where the way back leads to `nearest`. */
typedef struct edge {
    const char *rule, *field;
    int32_t edge, beyond, nearest;
    int32_t base; /* a path, or NZ_INT8 */
    struct {
        const char *field;
        int32_t value;
    } with[6];
} edge;

enum { NZ_INT8 = PAGED_ASCEND_PATHS };
enum {
    DECODE = PAGED_ASCEND_DECODE,
    PREFILL = PAGED_ASCEND_PREFILL,
    TND = PAGED_ASCEND_TND,
    MLA = PAGED_ASCEND_MLA,
    ATB = PAGED_ASCEND_ATB,
    SCATTER = PAGED_ASCEND_SCATTER,
    GATHER = PAGED_ASCEND_GATHER
};
enum { F16 = PAGED_TYPE_F16, F32 = PAGED_TYPE_F32, BF16 = PAGED_TYPE_BF16, I8 = PAGED_TYPE_I8 };
enum { BNBSH = PAGED_ASCEND_BNBSH, BNNBSD = PAGED_ASCEND_BNNBSD, NZ = PAGED_ASCEND_PA_NZ };

static const edge edges[] = {
    {"q_type", "q_type", F16, F32, F16, DECODE, {{0}}},
    {"q_type", "q_type", BF16, I8, F16, ATB, {{"kv_type", I8}}},
    {"kv_type", "kv_type", I8, F32, F16, DECODE, {{0}}},
    {"kv_type", "kv_type", I8, F32, F16, SCATTER, {{0}}},
    {"kv_type.paged_prefill", "kv_type", F16, I8, F16, PREFILL, {{0}}},
    {"kv_type.paged_prefill", "kv_type", BF16, I8, BF16, TND, {{"q_type", BF16}}},
    {"kv_type.as_query", "kv_type", F16, BF16, F16, DECODE, {{0}}},
    {"q_layout", "q_layout", PAGED_ASCEND_Q_BSH, PAGED_ASCEND_Q_TND, PAGED_ASCEND_Q_BNSD, PREFILL, {{0}}},
    {"q_layout.tnd", "q_layout", PAGED_ASCEND_Q_TND, PAGED_ASCEND_Q_BSND, PAGED_ASCEND_Q_TND, TND, {{0}}},
    {"q_layout.mla", "q_layout", PAGED_ASCEND_Q_TND, 4, PAGED_ASCEND_Q_BNSD, MLA, {{0}}},
    {"kv_layout.of_query", "kv_layout", BNBSH, BNNBSD, BNBSH, PREFILL, {{"q_layout", PAGED_ASCEND_Q_BSND}}},
    {"kv_layout.nz", "kv_layout", BNNBSD, NZ, BNBSH, PREFILL, {{0}}},
    {"kv_layout.nz_int8", "kv_layout", BNNBSD, NZ, BNBSH, DECODE, {{0}}},
    {"kv_layout.mla_nz", "kv_layout", BNNBSD, NZ, BNBSH, MLA, {{"q_layout", PAGED_ASCEND_Q_BNSD}}},
    {"kv_layout.movers", "kv_layout", NZ, BNNBSD, BNBSH, SCATTER, {{0}}},
    {"n_heads", "n_heads", 256, 257, 256, DECODE, {{0}}},
    {"n_heads.atb", "n_heads", 8, 0, 1, ATB, {{"n_kv_heads", 1}}},
    {"n_heads.mla", "n_heads", 64, 65, 64, MLA, {{0}}},
    {"n_heads.nz_int8", "n_heads", 64, 72, 64, NZ_INT8, {{0}}},
    {"n_kv_heads", "n_kv_heads", 8, 7, 8, DECODE, {{0}}},
    {"n_kv_heads", "n_kv_heads", 2, 1, 2, PREFILL, {{"n_heads", 128}}},
    {"n_kv_heads", "n_kv_heads", 1, 0, 1, TND, {{"n_heads", 64}}},
    {"n_kv_heads.mla", "n_kv_heads", 1, 2, 1, MLA, {{0}}},
    {"n_kv_heads.atb", "n_kv_heads", 32, 33, 32, ATB, {{0}}},
    {"n_kv_heads.movers", "n_kv_heads", 1, 0, 1, GATHER, {{0}}},
    {"n_kv_heads.nz_int8", "n_kv_heads", 8, 16, 8, NZ_INT8, {{0}}},
    {"n_kv_heads.gather", "n_kv_heads", 75776, 75777, 75776, GATHER, {{"head_dim_k", 1}}},
    {"head_dim", "head_dim_k", 512, 528, 512, DECODE, {{0}}},
    {"head_dim", "head_dim_k", 112, 120, 112, PREFILL, {{0}}},
    {"head_dim", "head_dim_k", 96, 80, 64, DECODE, {{"kv_type", I8}}},
    {"head_dim.tnd", "head_dim_k", 64, 65, 64, TND, {{0}}},
    {"head_dim.mla", "head_dim_k", 512, 128, 512, MLA, {{0}}},
    {"head_dim.atb", "head_dim_k", 576, 577, 576, ATB, {{"block_size", 16}, {"table_cols", 256}}},
    {"head_dim.atb",
     "head_dim_k",
     256,
     257,
     256,
     ATB,
     {{"kv_type", I8}, {"block_size", 64}, {"table_cols", 64}}},
    {"head_dim.movers", "head_dim_k", 1, 0, 1, SCATTER, {{0}}},
    {"head_dim.nz", "head_dim_k", 16, 24, 16, SCATTER, {{"kv_layout", NZ}}},
    {"head_dim.nz", "head_dim_k", 32, 16, 32, SCATTER, {{"kv_layout", NZ}, {"kv_type", I8}}},
    {"head_dim.nz_int8", "head_dim_k", 128, 64, 128, NZ_INT8, {{0}}},
    {"head_dim.bnbsh", "head_dim_k", 240, 256, 240, DECODE, {{"n_heads", 256}, {"n_kv_heads", 256}}},
    {"head_dim.gather", "head_dim_k", 592, 593, 592, GATHER, {{"n_kv_heads", 128}}},
    {"head_dim_v", "head_dim_v", 128, 64, 128, DECODE, {{0}}},
    {"head_dim_v.tnd", "head_dim_v", 128, 192, 128, TND, {{"head_dim_k", 192}}},
    {"head_dim_v.atb", "head_dim_v", 576, 577, 576, ATB, {{"block_size", 16}, {"table_cols", 256}}},
    {"head_dim_v.atb_int8", "head_dim_v", 128, 64, 128, ATB, {{"kv_type", I8}}},
    {"head_dim_v.movers", "head_dim_v", 1, -1, 1, SCATTER, {{0}}},
    {"head_dim_v.nz", "head_dim_v", 64, 72, 64, GATHER, {{"kv_layout", NZ}}},
    {"head_dim_v.gather", "head_dim_v", 592, 600, 592, GATHER, {{"n_kv_heads", 128}}},
    {"rope_dim.mla", "rope_dim", 64, 32, 64, MLA, {{0}}},
    {"rope_dim", "rope_dim", 0, 64, 0, PREFILL, {{0}}},
    {"block_size.decode", "block_size", 512, 528, 512, DECODE, {{"writer_block_size", 0}}},
    {"block_size.decode", "block_size", 16, 8, 16, DECODE, {{"table_cols", 256}}},
    {"block_size.decode", "block_size", 32, 48, 32, DECODE, {{"kv_type", I8}, {"table_cols", 128}}},
    {"block_size.nz_int8", "block_size", 512, 256, 128, NZ_INT8, {{0}}},
    {"block_size.prefill", "block_size", 128, 16, 128, PREFILL, {{0}}},
    {"block_size.prefill", "block_size", 512, 640, 512, PREFILL, {{0}}},
    {"block_size.tnd", "block_size", 1024, 256, 128, TND, {{0}}},
    {"block_size.mla", "block_size", 16, 64, 16, MLA, {{"table_cols", 256}}},
    {"block_size.mla_nz", "block_size", 128, 16, 128, MLA, {{"kv_layout", NZ}, {"table_cols", 256}}},
    {"block_size.atb", "block_size", 128, 144, 128, ATB, {{0}}},
    {"block_size.atb", "block_size", 64, 80, 64, ATB, {{"head_dim_k", 256}, {"table_cols", 64}}},
    {"block_size.atb", "block_size", 128, 144, 128, ATB, {{"head_dim_k", 576}}},
    {"block_size.movers", "block_size", 1, 0, 1, SCATTER, {{0}}},
    {"writer_block_size", "writer_block_size", 128, 16, 0, SCATTER, {{0}}},
    {"writer_block_size", "writer_block_size", 128, 127, 128, NZ_INT8, {{0}}},
    {"engine_block_size", "engine_block_size", 256, 200, 256, PREFILL, {{0}}},
    {"engine_block_size", "engine_block_size", 128, 80, 128, PREFILL, {{0}}},
    {"pool_block_bytes", "pool_block_bytes", 8 * 256 * 2 * 128, 524289, 524288, DECODE, {{0}}},
    {"batch", "batch", 65536, 65537, 65536, DECODE, {{"table_rows", 65536}}},
    {"batch.tnd", "batch", 4096, 4097, 4096, TND, {{"table_rows", 4096}}},
    {"batch.others", "batch", 1, 0, 1, SCATTER, {{0}}},
    {"max_q.decode", "max_q", 1, 2, 1, DECODE, {{0}}},
    {"max_q.prefill", "max_q", 2, 1, 2, PREFILL, {{0}}},
    {"max_q.tnd", "max_q", 20971520, 20971521, 20971520, TND, {{0}}},
    {"max_q.mla", "max_q", 16, 17, 16, MLA, {{"sparse_mode", 3}, {"mask_rows", 2048}, {"mask_cols", 2048}}},
    {"max_q.others", "max_q", 1, 0, 1, ATB, {{0}}},
    {"max_k", "max_k", 20971520, 20971521, 20971520, TND, {{"table_cols", 163840}, {"n_blocks", 163840}}},
    {"max_k.others", "max_k", 0, -1, 0, GATHER, {{0}}},
    {"n_blocks", "n_blocks", 32, 31, 32, PREFILL, {{0}}},
    {"n_blocks.scatter", "n_blocks", 1, 0, 1, SCATTER, {{0}}},
    {"table_rows", "table_rows", 4, 5, 4, TND, {{0}}},
    {"table_cols", "table_cols", 32, 31, 32, DECODE, {{0}}},
    {"table_cols.count", "table_cols", 16777215, 16777216, 16777215, DECODE, {{0}}},
    {"sparse_mode", "sparse_mode", 4, 5, 4, PREFILL, {{"mask_rows", 2048}, {"mask_cols", 2048}}},
    {"sparse_mode.tnd", "sparse_mode", 3, 2, 3, TND, {{"mask_rows", 2048}, {"mask_cols", 2048}}},
    {"sparse_mode.mla", "sparse_mode", 0, 3, 0, MLA, {{0}}},
    {"mask.none", "mask_rows", 0, 2048, 0, TND, {{0}}},
    {"mask.fixed_rows", "mask_rows", 2048, 512, 2048, PREFILL, {{"sparse_mode", 3}, {"mask_cols", 2048}}},
    {"mask.rows", "mask_rows", 512, 511, 512, PREFILL, {{"sparse_mode", 1}, {"mask_cols", 4096}}},
    {"mask.rows_decode", "mask_rows", 0, -1, 0, DECODE, {{0}}},
    {"mask.fixed_cols", "mask_cols", 2048, 2049, 2048, TND, {{"sparse_mode", 3}, {"mask_rows", 2048}}},
    {"mask.width", "mask_cols", 4096, 4095, 4096, DECODE, {{"mask_rows", 1}}},
    {"mask.width", "mask_cols", 4096, 4000, 4096, PREFILL, {{"mask_rows", 512}}},
    {"lse.mla", "lse", 0, 1, 0, MLA, {{0}}},
    {"lse", "lse", 1, 2, 1, DECODE, {{0}}},
    {"lse.others", "lse", 0, 1, 0, ATB, {{0}}},
};

static paged_ascend_config call_of(const edge *e) {
    paged_ascend_config c = e->base == NZ_INT8 ? good_nz_int8() : good((paged_ascend_path)e->base);
    for (int32_t i = 0; i < 6 && e->with[i].field; i++) *field(&c, e->with[i].field) = e->with[i].value;
    return c;
}

static void rules_hold_at_their_edges(void) {
    for (size_t i = 0; i < sizeof edges / sizeof edges[0]; i++) {
        const edge *e = &edges[i];
        paged_ascend_config c = call_of(e);
        *field(&c, e->field) = e->edge;
        paged_ascend_finding first;
        if (!paged_ascend_accepts(&c)) {
            paged_ascend_check(&c, &first, 1);
            test_fail(__FILE__, __LINE__, "%s at %d: %s", e->rule, e->edge, first.message);
        }
        *field(&c, e->field) = e->beyond;
        CHECK(!paged_ascend_accepts(&c));
        const paged_ascend_finding *f = broken(&c, e->rule);
        if (!f) test_fail(__FILE__, __LINE__, "%s holds at %d", e->rule, e->beyond);
        CHECK_STR(f->rule->field, e->field);
        CHECK_EQ(f->value, e->beyond);
        CHECK_EQ(f->entry, -1);
        if (!f->has_nearest || f->nearest != e->nearest)
            test_fail(__FILE__, __LINE__, "%s: nearest to %d is %d, not %d", e->rule, e->beyond,
                      f->has_nearest ? (int)f->nearest : -1, e->nearest);
        *field(&c, e->field) = e->nearest;
        if (!paged_ascend_accepts(&c)) {
            paged_ascend_check(&c, &first, 1);
            test_fail(__FILE__, __LINE__, "%s fed back %d: %s", e->rule, e->nearest, first.message);
        }
    }
}

static void each_rule_has_an_edge(void) {
    for (int32_t i = 0; i < paged_ascend_rule_count(); i++) {
        const paged_ascend_rule *rule = paged_ascend_rule_at(i);
        paged_ascend_config c = good(PAGED_ASCEND_DECODE);
        bool of_call = field(&c, rule->field) != NULL && !rule->warning, has = !of_call;
        for (size_t k = 0; k < sizeof edges / sizeof edges[0]; k++)
            has = has || strcmp(edges[k].rule, rule->id) == 0;
        if (!has) test_fail(__FILE__, __LINE__, "%s has no edge here", rule->id);
        CHECK(rule->text[0] && rule->source[0] && rule->paths);
        for (int32_t k = 0; k < i; k++) CHECK(strcmp(rule->id, paged_ascend_rule_at(k)->id) != 0);
    }
    CHECK(paged_ascend_rule_at(-1) == NULL && paged_ascend_rule_at(paged_ascend_rule_count()) == NULL);
}

static void good_calls_pass(void) {
    for (int32_t path = 0; path < PAGED_ASCEND_PATHS; path++) {
        paged_ascend_config c = good((paged_ascend_path)path), fixed = c;
        CHECK_EQ(paged_ascend_check(&c, NULL, 0), 0);
        CHECK(paged_ascend_accepts(&c));
        CHECK(paged_ascend_nearest(&fixed));
        fixed.head_dim_v = 0; /* what 0 stands for is written out */
        CHECK(memcmp(&c, &fixed, sizeof c) == 0);
    }
    paged_ascend_config c = good_nz_int8();
    CHECK_EQ(paged_ascend_check(&c, NULL, 0), 0);
}

static void warnings_do_not_refuse(void) {
    paged_ascend_config c = good(PAGED_ASCEND_DECODE);
    c.block_size = 16;
    c.table_cols = 256;
    const paged_ascend_finding *f = broken(&c, "block_size.advised");
    CHECK(f && f->rule->warning && f->nearest == 128);
    CHECK_EQ(paged_ascend_check(&c, NULL, 0), 1);
    CHECK(paged_ascend_accepts(&c));
}

static void foreign_values_are_told(void) {
    paged_ascend_config c = good(PAGED_ASCEND_DECODE);
    paged_ascend_finding f;
    c.path = 99;
    CHECK_EQ(paged_ascend_check(&c, &f, 1), 1);
    CHECK_STR(f.message, "path is 99, which is none of 0 to 6");
    CHECK(!paged_ascend_accepts(&c) && !paged_ascend_nearest(&c));
    CHECK_EQ(c.path, 99);
    c = good(PAGED_ASCEND_DECODE);
    c.struct_size--;
    CHECK_EQ(paged_ascend_check(&c, &f, 1), 1);
    CHECK_STR(f.rule->id, "struct_size");
    CHECK(!paged_ascend_accepts(&c) && !paged_ascend_nearest(&c) && !paged_ascend_accepts(NULL));
    CHECK_EQ(paged_ascend_check(NULL, &f, 1), 1);
    CHECK(paged_ascend_path_name(-1) == NULL && paged_ascend_layout_name(3) == NULL);
    c = good(PAGED_ASCEND_PREFILL);
    c.block_size = 16;
    CHECK_EQ(paged_ascend_check(&c, &f, 1), 2); /* block, and what of the table 4096 keys need then */
    CHECK_STR(f.message, "block_size is 16; prefill takes 128 to 512 in steps of 128: a block has 128 to 512 "
                         "tokens, a multiple of 128; nearest 128");
}

/* ---- random calls ---- */

static int32_t pick(uint64_t *rng, const char *name) {
    static const int32_t odd[] = {-2147483647 - 1, -1, 0, 1, 2147483647};
    static const int32_t usual[] = {0,   1,   2,   3,    4,    7,    8,    10,    15,   16,  17,
                                    31,  32,  33,  48,   63,   64,   80,   96,    100,  127, 128,
                                    129, 160, 192, 200,  255,  256,  257,  320,   384,  511, 512,
                                    513, 576, 640, 1000, 1024, 2048, 4096, 65535, 65536};
    uint64_t r = paged__rand(rng);
    bool word = strstr(name, "type") || strstr(name, "layout") || strcmp(name, "sparse_mode") == 0;
    if (word) return (int32_t)(r % 5);
    if (r % 16 == 0) return odd[r / 16 % 5];
    if (r % 16 < 12) return usual[r / 16 % (sizeof usual / sizeof usual[0])];
    return (int32_t)(r / 16 % 3000);
}

static const char *const names[] = {
    "q_type",     "kv_type",           "q_layout",          "kv_layout",        "n_heads",  "n_kv_heads",
    "head_dim_k", "head_dim_v",        "rope_dim",          "block_size",       "batch",    "max_q",
    "max_k",      "writer_block_size", "engine_block_size", "pool_block_bytes", "n_blocks", "table_rows",
    "table_cols", "sparse_mode",       "mask_rows",         "mask_cols",        "lse"};
enum { N_NAMES = sizeof names / sizeof names[0] };

static void repaired_calls_are_accepted(void) {
    uint64_t rng = test_seed;
    int64_t n_broken = 0;
    for (int32_t i = 0; i < (test_long ? 400000 : 4000); i++) {
        paged_ascend_config c = {.struct_size = sizeof c};
        c.path = (int32_t)(paged__rand(&rng) % PAGED_ASCEND_PATHS);
        for (int32_t k = 0; k < N_NAMES; k++) *field(&c, names[k]) = pick(&rng, names[k]);
        paged_ascend_finding found[MAX];
        int32_t n = paged_ascend_check(&c, found, MAX), n_refused = 0;
        CHECK(n >= 0 && n <= MAX);
        for (int32_t k = 0; k < n; k++) n_refused += !found[k].rule->warning;
        CHECK_EQ(paged_ascend_accepts(&c), n_refused == 0);
        n_broken += n_refused > 0;
        if (!paged_ascend_nearest(&c))
            test_fail(__FILE__, __LINE__, "call %d can not be repaired: %s", i, found[0].message);
        CHECK(paged_ascend_accepts(&c));
    }
    CHECK(n_broken > 1000);
}

/* One field of a good call is anything: the value named is legal, and all nearer ones are not. */
static void no_legal_value_is_nearer(void) {
    uint64_t rng = test_seed ^ 0x5a5a;
    int32_t n_told = 0;
    for (int32_t i = 0; i < (test_long ? 40000 : 1000); i++) {
        paged_ascend_config c = {.struct_size = sizeof c};
        c.path = (int32_t)(paged__rand(&rng) % PAGED_ASCEND_PATHS);
        for (int32_t k = 0; k < N_NAMES; k++) *field(&c, names[k]) = pick(&rng, names[k]);
        CHECK(paged_ascend_nearest(&c));
        const char *name = names[paged__rand(&rng) % N_NAMES];
        *field(&c, name) = pick(&rng, name);
        paged_ascend_finding found[MAX];
        int32_t n = paged_ascend_check(&c, found, MAX);
        for (int32_t k = 0; k < n; k++) {
            if (strcmp(found[k].rule->field, name) != 0 || found[k].rule->warning) continue;
            if (strstr(name, "type") || strstr(name, "layout")) continue; /* words have no distance */
            CHECK(found[k].has_nearest || strcmp(name, "head_dim_v") == 0);
            int64_t far = found[k].nearest - found[k].value;
            far = far < 0 ? -far : far;
            if (far > 300) continue; /* too far for brute force */
            n_told++;
            for (int64_t d = 0; d <= far; d++)
                for (int32_t sign = -1; sign <= 1; sign += 2) {
                    int64_t value = found[k].value + sign * d;
                    if (value < INT32_MIN || value > INT32_MAX || (d == 0 && sign > 0)) continue;
                    if (value == 0 && strcmp(name, "head_dim_v") == 0) continue; /* stands for head_dim_k */
                    *field(&c, name) = (int32_t)value;
                    paged_ascend_finding again[MAX];
                    int32_t m = paged_ascend_check(&c, again, MAX);
                    bool legal = true;
                    for (int32_t j = 0; j < m; j++)
                        legal = legal && (again[j].rule->warning || strcmp(again[j].rule->field, name) != 0);
                    if (legal != (d == far && value == found[k].nearest) && !(legal && d == far))
                        test_fail(__FILE__, __LINE__, "%s: %lld is %s, nearest is %lld", found[k].message,
                                  (long long)value, legal ? "legal" : "not legal",
                                  (long long)found[k].nearest);
                }
            *field(&c, name) = (int32_t)found[k].value;
        }
    }
    CHECK(n_told > 50);
}

/* ---- arrays ---- */

typedef struct expect {
    const char *rule;
    int64_t value, entry;
} expect;

static void check_arrays(const paged_ascend_config *c, const paged_ascend_arrays *a, const expect *want,
                         int32_t n_want) {
    paged_ascend_finding found[MAX];
    paged_error err;
    int32_t n = -1;
    CHECK_EQ(paged_ascend_check_arrays(c, a, found, MAX, &n, &err), PAGED_OK);
    if (n != n_want)
        test_fail(__FILE__, __LINE__, "%d findings, not %d: %s", n, n_want, n > 0 ? found[0].message : "");
    for (int32_t i = 0; i < n; i++) {
        CHECK_STR(found[i].rule->id, want[i].rule);
        CHECK_EQ(found[i].value, want[i].value);
        CHECK_EQ(found[i].entry, want[i].entry);
        CHECK(found[i].message[0]);
    }
}
#define EXPECT(c, a, ...)                                                                                    \
    check_arrays((c), (a), (const expect[]){__VA_ARGS__},                                                    \
                 sizeof((const expect[]){__VA_ARGS__}) / sizeof(expect))
#define EXPECT_NONE(c, a) check_arrays((c), (a), NULL, 0)

static void tables_are_read_as_far_as_keys_go(void) {
    paged_ascend_config c = good(PAGED_ASCEND_DECODE);
    c.batch = c.table_rows = 2;
    c.table_cols = 3;
    c.n_blocks = 10;
    c.max_k = 300;
    int32_t table[6] = {0, 9, -1, 5, -1, 77};
    int64_t lens[2] = {256, 128};
    paged_ascend_arrays a = {.table = table, .lens_k = lens, .n_lens_k = 2};
    EXPECT_NONE(&c, &a); /* what lies behind the keys is nobody's business */
    lens[0] = 257;
    EXPECT(&c, &a, {"table.absent", -1, 2});
    table[2] = 10;
    EXPECT(&c, &a, {"table.range", 10, 2});
    table[2] = -2;
    EXPECT(&c, &a, {"table.range", -2, 2});
    table[2] = 4;
    lens[1] = 385;
    EXPECT(&c, &a, {"table.absent", -1, 4}, {"table.range", 77, 5}, {"lens_k.table", 385, 1});
    lens[1] = -1;
    EXPECT(&c, &a, {"lens_k.table", -1, 1});
    a.n_lens_k = 1; /* one length for all, which the second row does not have */
    lens[0] = 129;
    EXPECT(&c, &a, {"table.absent", -1, 4});
    a.n_lens_k = 3;
    EXPECT(&c, &a, {"lens_k.count", 3, -1});
    a.lens_k = NULL; /* nothing is known: all entries count */
    EXPECT(&c, &a, {"table.absent", -1, 4}, {"table.range", 77, 5});
}

static void far_blocks_are_warned_of(void) {
    paged_ascend_config c = good(PAGED_ASCEND_DECODE);
    c.batch = c.table_rows = c.table_cols = 1;
    c.n_kv_heads = 4; /* 4 × 128 × 128 = 2^16 elements a block, so block 65536 begins at 2^32 */
    c.n_blocks = 100000;
    int32_t table = 65535;
    int64_t len = 128;
    paged_ascend_arrays a = {.table = &table, .lens_k = &len, .n_lens_k = 1};
    EXPECT_NONE(&c, &a);
    table = 65536;
    EXPECT(&c, &a, {"table.wide", 65536, 0});
    c.n_kv_heads = 3; /* 2^32 / 49152 is 87381.33 */
    table = 87381;
    EXPECT_NONE(&c, &a);
    table = 87382;
    EXPECT(&c, &a, {"table.wide", 87382, 0});
}

static void running_sums_rise(void) {
    paged_ascend_config c = good(PAGED_ASCEND_TND);
    int64_t sums[4] = {3, 3, 10, 12}, lens[4] = {5, 0, 7, 2};
    c.max_q = 7;
    c.sparse_mode = 3;
    paged_ascend_arrays a = {.lens_q = sums, .n_lens_q = 4, .n_tokens = 12, .lens_k = lens, .n_lens_k = 4};
    EXPECT_NONE(&c, &a);
    a.n_tokens = 13;
    EXPECT(&c, &a, {"lens_q.total", 12, 3});
    a.n_tokens = 12;
    lens[2] = 6;
    EXPECT(&c, &a, {"lens_q.keys", 7, 2});
    lens[2] = 7;
    c.max_q = 6;
    EXPECT(&c, &a, {"lens_q.max", 7, 2});
    sums[1] = 2;
    EXPECT(&c, &a, {"lens_q.order", 2, 1});
    sums[1] = 3;
    sums[0] = -1;
    EXPECT(&c, &a, {"lens_q.order", -1, 0});
    a.n_lens_q = 1;
    EXPECT(&c, &a, {"lens_q.count", 1, -1});
    c = good(PAGED_ASCEND_PREFILL); /* there they are lengths, and may fall */
    int64_t falling[4] = {300, 200, 100, 0}, keys[4] = {300, 300, 300, 300};
    paged_ascend_arrays b = {.lens_q = falling, .n_lens_q = 4, .lens_k = keys, .n_lens_k = 4};
    EXPECT_NONE(&c, &b);
    b.n_lens_k = 1; /* one length of keys for all queries, and the other way round */
    EXPECT_NONE(&c, &b);
    b.n_lens_q = 1;
    EXPECT_NONE(&c, &b);
    b.n_lens_q = b.n_lens_k = 4;
    falling[0] = 513;
    EXPECT(&c, &b, {"lens_q.max", 513, 0});
}

static void pools_hold_all_sequences(void) {
    paged_ascend_config c = good(PAGED_ASCEND_PREFILL);
    int64_t lens[4] = {4096, 4096, 1, 0};
    paged_ascend_arrays a = {.lens_k = lens, .n_lens_k = 4};
    c.n_blocks = 65;
    EXPECT_NONE(&c, &a);
    c.n_blocks = 64;
    EXPECT(&c, &a, {"lens_k.blocks", 65, -1});
}

static void slots_are_looked_through(void) {
    paged_ascend_config c = good(PAGED_ASCEND_SCATTER);
    c.n_blocks = 2;
    int64_t slots[5] = {255, 0, 128, 7, 6};
    paged_ascend_arrays a = {.slots = slots, .n_slots = 5, .n_tokens = 5};
    EXPECT_NONE(&c, &a);
    slots[3] = 256;
    EXPECT(&c, &a, {"slots.range", 256, 3});
    slots[3] = 128;
    EXPECT(&c, &a, {"slots.twice", 128, 3});
    slots[3] = -1;
    EXPECT(&c, &a, {"slots.negative", -1, 3});
    slots[4] = -1; /* twice, but that they are negative says it all */
    EXPECT(&c, &a, {"slots.negative", -1, 3});
    slots[4] = slots[3] = 255;
    EXPECT(&c, &a, {"slots.twice", 255, 3});
    a.n_tokens = 6;
    EXPECT(&c, &a, {"slots.count", 5, -1}, {"slots.twice", 255, 3});
    a = (paged_ascend_arrays){.slots = slots};
    EXPECT_NONE(&c, &a);
}

static void sizes_that_arrays_can_not_have(void) {
    paged_ascend_config c = good(PAGED_ASCEND_DECODE);
    paged_ascend_arrays a = {.n_lens_k = -1};
    paged_error err;
    int32_t n = 7, table = 0;
    CHECK_EQ(paged_ascend_check_arrays(&c, &a, NULL, 0, &n, &err), PAGED_ERR_INVALID_ARG);
    a = (paged_ascend_arrays){.table = &table};
    c.table_rows = 5;
    CHECK_EQ(paged_ascend_check_arrays(&c, &a, NULL, 0, &n, &err), PAGED_ERR_INVALID_ARG);
    CHECK_STR(err.message, "the table has 5 rows for 4 sequences");
    c.block_size = 0;
    CHECK_EQ(paged_ascend_check_arrays(&c, &a, NULL, 0, &n, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_ascend_check_arrays(NULL, &a, NULL, 0, &n, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_ascend_check_arrays(&c, NULL, NULL, 0, &n, &err), PAGED_ERR_INVALID_ARG);
    c.path = -1;
    CHECK_EQ(paged_ascend_check_arrays(&c, &a, NULL, 0, &n, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(n, 7);
}

static void *no_alloc(void *user, size_t size_bytes, size_t align) {
    (void)user, (void)size_bytes, (void)align;
    return NULL;
}
static void no_free(void *user, void *ptr) {
    (void)user, (void)ptr;
}

static void slots_without_memory(void) {
    paged_ascend_config c = good(PAGED_ASCEND_SCATTER);
    int64_t slots[2] = {1, 1};
    paged_ascend_arrays a = {.slots = slots, .n_slots = 2};
    paged_ascend_finding found[MAX];
    paged_error err;
    int32_t n = 7;
    paged_allocator_set(&(paged_allocator){.alloc = no_alloc, .free = no_free});
    paged_status status = paged_ascend_check_arrays(&c, &a, found, MAX, &n, &err);
    paged_allocator_set(NULL);
    CHECK_EQ(status, PAGED_ERR_NO_MEMORY);
    CHECK_EQ(n, 7);
    CHECK_STR(err.message, "no memory to sort 2 slots");
}

/* ---- layouts ---- */

static void shapes_of_layouts(void) {
    int64_t axes[5];
    int32_t n;
    paged_error err;
    CHECK_EQ(paged_ascend_shape(PAGED_ASCEND_BNBSH, PAGED_TYPE_F16, 7, 128, 8, 96, axes, &n, &err), PAGED_OK);
    CHECK(n == 3 && axes[0] == 7 && axes[1] == 128 && axes[2] == 768);
    CHECK_EQ(paged_ascend_shape(PAGED_ASCEND_BNNBSD, PAGED_TYPE_F32, 7, 128, 8, 96, axes, &n, &err),
             PAGED_OK);
    CHECK(n == 4 && axes[1] == 8 && axes[2] == 128 && axes[3] == 96);
    CHECK_EQ(paged_ascend_shape(PAGED_ASCEND_PA_NZ, PAGED_TYPE_BF16, 7, 128, 8, 96, axes, &n, &err),
             PAGED_OK);
    CHECK(n == 5 && axes[1] == 8 && axes[2] == 6 && axes[3] == 128 && axes[4] == 16);
    CHECK_EQ(paged_ascend_shape(PAGED_ASCEND_PA_NZ, PAGED_TYPE_I8, 7, 128, 8, 96, axes, &n, &err), PAGED_OK);
    CHECK(n == 5 && axes[2] == 3 && axes[4] == 32);
    n = 9;
    CHECK_EQ(paged_ascend_shape(PAGED_ASCEND_PA_NZ, PAGED_TYPE_F16, 7, 128, 8, 100, axes, &n, &err),
             PAGED_ERR_INVALID_ARG);
    CHECK_STR(err.message, "head_dim is 100; PA_NZ takes multiples of 16 elements, 32 bytes");
    CHECK_EQ(n, 9);
    CHECK_EQ(paged_ascend_shape((paged_ascend_layout)3, PAGED_TYPE_F16, 7, 1, 1, 1, axes, &n, &err),
             PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_ascend_shape(PAGED_ASCEND_BNBSH, (paged_type)9, 7, 1, 1, 1, axes, &n, &err),
             PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_ascend_shape(PAGED_ASCEND_BNBSH, PAGED_TYPE_F16, 0, 1, 1, 1, axes, &n, &err),
             PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_ascend_shape(PAGED_ASCEND_BNBSH, PAGED_TYPE_F16, INT32_MAX, INT32_MAX, INT32_MAX,
                                INT32_MAX, axes, &n, &err),
             PAGED_ERR_INVALID_ARG);
}

/* Two blocks of 32 tokens, two heads of 32; bytes by an rng. */
static void caches_come_back(void) {
    enum { BLOCKS = 2, SIZE = 32, HEADS = 2, DIM = 32, ELEMS = BLOCKS * SIZE * HEADS * DIM };
    static uint8_t cache[2][ELEMS * 4], copy[2][ELEMS * 4], dense[2][ELEMS * 4];
    static float scales[2][BLOCKS * HEADS * SIZE], scales_back[2][BLOCKS * HEADS * SIZE],
        scales_dense[2][BLOCKS * HEADS * SIZE];
    uint64_t rng = test_seed;
    paged_error err;
    for (int32_t type = 0; type < 4; type++)
        for (int32_t packed = type == PAGED_TYPE_I8; packed < 2; packed++)
            for (int32_t layout = 0; layout < PAGED_ASCEND_LAYOUTS; layout++) {
                int64_t elem = type == PAGED_TYPE_F32 ? 4 : type == PAGED_TYPE_I8 ? 1 : 2;
                paged_kv kv = {.k = cache[0],
                               .v = cache[1],
                               .block_stride = HEADS * SIZE * DIM * elem,
                               .k_head_stride = SIZE * DIM * elem,
                               .v_head_stride = SIZE * DIM * elem,
                               .n_blocks = BLOCKS,
                               .block_size = SIZE,
                               .n_kv_heads = HEADS,
                               .head_dim_k = DIM,
                               .head_dim_v = DIM,
                               .type = (paged_type)type,
                               .layout = (paged_layout)packed};
                paged_ascend_dense to = {.k = dense[0], .v = dense[1]};
                if (type == PAGED_TYPE_I8) {
                    kv.k_scale = (uint8_t *)scales[0];
                    kv.v_scale = (uint8_t *)scales[1];
                    kv.scale_block_stride = HEADS * SIZE * 4;
                    kv.scale_head_stride = SIZE * 4;
                    to.k_scale = scales_dense[0];
                    to.v_scale = scales_dense[1];
                }
                for (int32_t s = 0; s < 2; s++)
                    for (size_t i = 0; i < sizeof cache[s]; i++) cache[s][i] = (uint8_t)paged__rand(&rng);
                for (int32_t i = 0; i < BLOCKS * HEADS * SIZE; i++)
                    scales[0][i] = scales[1][i] = (float)i + 0.5f;
                for (int32_t i = 0; i < 3; i++)
                    CHECK_EQ(paged_ascend_export(&kv, (paged_ascend_layout)layout, &to, i, 3, &err),
                             PAGED_OK);
                paged_kv other = kv;
                other.k = copy[0];
                other.v = copy[1];
                other.k_scale = kv.k_scale ? (uint8_t *)scales_back[0] : NULL;
                other.v_scale = kv.v_scale ? (uint8_t *)scales_back[1] : NULL;
                memset(copy, 0xee, sizeof copy);
                CHECK_EQ(paged_ascend_import(&other, (paged_ascend_layout)layout, &to, 0, 1, &err), PAGED_OK);
                CHECK(memcmp(cache[0], copy[0], (size_t)(ELEMS * elem)) == 0);
                CHECK(memcmp(cache[1], copy[1], (size_t)(ELEMS * elem)) == 0);
                if (kv.k_scale) CHECK(memcmp(scales, scales_back, sizeof scales) == 0);
                /* V of token 17, head 1, block 1, element 20, by hand. */
                int64_t at = layout == PAGED_ASCEND_BNBSH    ? ((32 + 17) * 2 + 1) * 32 + 20
                             : layout == PAGED_ASCEND_BNNBSD ? (3 * 32 + 17) * 32 + 20
                             : elem == 1                     ? (3 * 32 + 17) * 32 + 20
                             : elem == 2                     ? ((3 * 2 + 1) * 32 + 17) * 16 + 4
                                                             : ((3 * 4 + 2) * 32 + 17) * 8 + 4;
                int64_t in = 3 * 32 * 32 + (packed == 0               ? 17 * 32 + 20
                                            : type == PAGED_TYPE_BF16 ? 16 * 32 + 20 * 2 + 1
                                            : type == PAGED_TYPE_I8   ? 16 * 32 + 20 * 4 + 1
                                                                      : 17 * 32 + 20);
                CHECK(memcmp(dense[1] + at * elem, cache[1] + in * elem, (size_t)elem) == 0);
            }
}

static void conversions_go_round(void) {
    enum { ELEMS = 3 * 5 * 2 * 64 };
    static uint8_t a[ELEMS * 4], b[ELEMS * 4], c[ELEMS * 4];
    uint64_t rng = test_seed;
    paged_error err;
    for (size_t i = 0; i < sizeof a; i++) a[i] = (uint8_t)paged__rand(&rng);
    for (int32_t type = 0; type < 4; type++)
        for (int32_t from = 0; from < 3; from++)
            for (int32_t to = 0; to < 3; to++) {
                size_t bytes = ELEMS * (size_t)(type == PAGED_TYPE_F32 ? 4 : type == PAGED_TYPE_I8 ? 1 : 2);
                CHECK_EQ(paged_ascend_convert((paged_ascend_layout)from, (paged_ascend_layout)to,
                                              (paged_type)type, 3, 5, 2, 64, a, b, &err),
                         PAGED_OK);
                CHECK_EQ(paged_ascend_convert((paged_ascend_layout)to, (paged_ascend_layout)from,
                                              (paged_type)type, 3, 5, 2, 64, b, c, &err),
                         PAGED_OK);
                CHECK(memcmp(a, c, bytes) == 0);
                if (from == to) CHECK(memcmp(a, b, bytes) == 0);
            }
    CHECK_EQ(
        paged_ascend_convert(PAGED_ASCEND_BNBSH, PAGED_ASCEND_PA_NZ, PAGED_TYPE_I8, 3, 5, 2, 48, a, b, &err),
        PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_ascend_convert(PAGED_ASCEND_BNBSH, PAGED_ASCEND_BNNBSD, PAGED_TYPE_I8, 3, 5, 2, 48, NULL,
                                  b, &err),
             PAGED_ERR_INVALID_ARG);
}

static void exports_are_checked(void) {
    static uint8_t bytes[4096];
    paged_kv kv = {.k = bytes,
                   .v = bytes,
                   .block_stride = 400,
                   .k_head_stride = 200,
                   .v_head_stride = 200,
                   .n_blocks = 2,
                   .block_size = 5,
                   .n_kv_heads = 2,
                   .head_dim_k = 20,
                   .head_dim_v = 20};
    static uint8_t out[1024];
    paged_ascend_dense to = {.k = out};
    float scale;
    paged_error err;
    CHECK_EQ(paged_ascend_export(&kv, PAGED_ASCEND_BNBSH, &to, 0, 1, &err), PAGED_OK);
    CHECK_EQ(paged_ascend_export(&kv, PAGED_ASCEND_PA_NZ, &to, 0, 1, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_ascend_export(&kv, PAGED_ASCEND_BNBSH, &to, 1, 1, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_ascend_export(NULL, PAGED_ASCEND_BNBSH, &to, 0, 1, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_ascend_import(&kv, PAGED_ASCEND_BNBSH, NULL, 0, 1, &err), PAGED_ERR_INVALID_ARG);
    to.k_scale = &scale;
    CHECK_EQ(paged_ascend_export(&kv, PAGED_ASCEND_BNBSH, &to, 0, 1, &err), PAGED_ERR_INVALID_ARG);
    CHECK_STR(err.message, "only int8 has scales");
}

#define TESTS(X)                                                                                             \
    X(good_calls_pass)                                                                                       \
    X(rules_hold_at_their_edges)                                                                             \
    X(each_rule_has_an_edge)                                                                                 \
    X(warnings_do_not_refuse)                                                                                \
    X(foreign_values_are_told)                                                                               \
    X(repaired_calls_are_accepted)                                                                           \
    X(no_legal_value_is_nearer)                                                                              \
    X(tables_are_read_as_far_as_keys_go)                                                                     \
    X(far_blocks_are_warned_of)                                                                              \
    X(running_sums_rise)                                                                                     \
    X(pools_hold_all_sequences)                                                                              \
    X(slots_are_looked_through)                                                                              \
    X(slots_without_memory)                                                                                  \
    X(sizes_that_arrays_can_not_have)                                                                        \
    X(shapes_of_layouts)                                                                                     \
    X(caches_come_back)                                                                                      \
    X(conversions_go_round)                                                                                  \
    X(exports_are_checked)
TEST_MAIN(TESTS)
