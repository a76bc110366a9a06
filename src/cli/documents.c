/* cli/documents.c: the two documents that this program began with, number by number, beside what we compute
 * and measured.
 *
 *   A   a PagedAttention operator: pages of 16 KB, a table for each head
 *   B   a paged KV cache in a runtime: LLaMA-13B, blocks of 16 tokens
 *
 * What can be computed is computed here, and whether a number holds is decided by comparison, not by hand.
 * What must be measured is the figure of the last run that the repository records (measured.h).
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "cli/measured.h"
#include "cli/plan.h"
#include "cli/planner.h"

/* OURS: the document has no number there. */
typedef enum verdict { HOLDS, DIFFERS, DEPENDS, OPEN, OURS } verdict;

static const char *const verdict_names[] = {"holds", "does not hold", "depends", "not measured yet", "ours"};

typedef struct finding {
    char document;    /* 'A', 'B' */
    int32_t claim;    /* row of docs/claims.md */
    const char *what; /* static, as says */
    const char *says;
    verdict verdict;
    char ours[240];
} finding;

enum { FINDINGS_MAX = 64 };

typedef struct findings {
    finding all[FINDINGS_MAX];
    int32_t n;
} findings;

__attribute__((format(printf, 7, 8))) static void add(findings *f, char document, int32_t claim,
                                                      const char *what, const char *says, verdict truth,
                                                      const char *ours, ...) {
    PAGED_ASSERT(f->n < FINDINGS_MAX);
    finding *one = &f->all[f->n++];
    *one = (finding){.document = document, .claim = claim, .what = what, .says = says, .verdict = truth};
    va_list args;
    va_start(args, ours);
    vsnprintf(one->ours, sizeof one->ours, ours, args);
    va_end(args);
}

/* A number holds when ours, rounded or cut to its last digit, is the same. */
static verdict same(double theirs, double last_digit, double ours) {
    double rounded = round(ours / last_digit) * last_digit, cut = floor(ours / last_digit) * last_digit;
    double near = last_digit / 1000;
    return fabs(rounded - theirs) < near || fabs(cut - theirs) < near ? HOLDS : DIFFERS;
}

/* The document says MB and GB and means either power; one of them is enough. */
static verdict same_bytes(double theirs, double last_digit, size_t ours, int32_t power) {
    verdict binary = same(theirs, last_digit, (double)ours / pow(1024, power));
    return binary == HOLDS ? HOLDS : same(theirs, last_digit, (double)ours / pow(1000, power));
}

enum { MEGA = 2, GIGA = 3 };

static void add_bytes(findings *f, char document, int32_t claim, const char *what, const char *says,
                      double theirs, double last_digit, int32_t power, size_t ours) {
    add(f, document, claim, what, says, same_bytes(theirs, last_digit, ours, power), "%s",
        paged__size_both(ours).text);
}

static void add_count(findings *f, char document, int32_t claim, const char *what, const char *says,
                      int64_t theirs, int64_t ours) {
    add(f, document, claim, what, says, theirs == ours ? HOLDS : DIFFERS, "%lld", (long long)ours);
}

static paged_plan plan_of(paged_plan_way way, const paged_group_config *group, int32_t block_size,
                          int32_t max_tokens) {
    paged_plan plan;
    paged_status status = paged_plan_init(&plan, way, group, 1, block_size, max_tokens, NULL);
    PAGED_ASSERT(status == PAGED_OK);
    return plan;
}

/* ---- document B: LLaMA-13B, f16 ---- */

static void request_sizes(findings *f, const paged_shape *shape) {
    const paged_group_config *group = &shape->groups[0];
    paged_group_config layer = *group;
    layer.n_layers = 1;
    const size_t one = paged_pool_bytes_for(group, 1, 16, 4096), weights = (size_t)shape->n_params * 2;
    add_bytes(f, 'B', 26, "K of a layer, [40, 4096, 128] × 2 bytes", "40 MB", 40, 1, MEGA,
              paged_pool_bytes_for(&layer, 1, 16, 4096) / 2);
    add_bytes(f, 'B', 26, "a request of 4096 tokens", "3.2 GB", 3.2, 0.1, GIGA, one);
    add_bytes(f, 'B', 25, "batch 8 × 4096, in the heading", "25.6 GB", 25.6, 0.1, GIGA, 8 * one);
    add_bytes(f, 'B', 25, "batch 8 × 4096, in the text", "22 GB", 22, 1, GIGA, 8 * one);
    add_bytes(f, 'B', 26, "weights", "26 GB", 26, 1, GIGA, weights);
    add_bytes(f, 'B', 26, "weights and batch 8", "52 GB", 52, 1, GIGA, weights + 8 * one);
    add(f, 'B', 26, "that is far more than one card", "32 GB",
        weights + 8 * one > 32000000000u ? HOLDS : DIFFERS, "%.2f times as much",
        (double)(weights + 8 * one) / 32e9);
    double unused = 100 * (1 - 100.0 / 4096);
    add(f, 'B', 27, "100 tokens used of 4096 reserved: wasted", "97 %", same(97, 1, unused), "%.2f %%",
        unused);
}

static void savings(findings *f, const paged_shape *shape) {
    static const struct {
        const char *what, *before, *after, *saved;
        int32_t n_requests, n_tokens;
        double gb, percent;
    } rows[] = {
        {"short, n = 128", "3.2 GB", "0.1 GB", "-97 %", 1, 128, 0.1, 97},
        {"medium, n = 1024", "3.2 GB", "0.8 GB", "-75 %", 1, 1024, 0.8, 75},
        {"long, n = 4096", "3.2 GB", "3.2 GB", "0 %", 1, 4096, 3.2, 0},
        {"8 × n = 1024", "25.6 GB", "6.4 GB", "-75 %", 8, 1024, 6.4, 75},
    };
    const paged_plan paged = plan_of(PAGED_PLAN_PAGED, &shape->groups[0], 16, 4096);
    const paged_plan whole = plan_of(PAGED_PLAN_CONTIGUOUS, &shape->groups[0], 16, 4096);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        size_t n = (size_t)rows[i].n_requests;
        size_t after = n * paged_plan_taken_bytes(&paged, rows[i].n_tokens);
        size_t before = n * paged_plan_taken_bytes(&whole, rows[i].n_tokens);
        double saved = 100 - 100 * (double)after / (double)before;
        add_bytes(f, 'B', 32, rows[i].what, rows[i].after, rows[i].gb, 0.1, GIGA, after);
        add(f, 'B', 32, rows[i].what, rows[i].saved, same(rows[i].percent, 1, saved), "-%.2f %%, of %s",
            saved, paged__size_both(before).text);
    }
}

static void tables(findings *f, const paged_shape *shape) {
    const paged_plan plan = plan_of(PAGED_PLAN_PAGED, &shape->groups[0], 16, 4096);
    int32_t n = paged_plan_table_entries(&plan);
    int64_t n_tables = 2ll * shape->groups[0].n_layers * shape->groups[0].n_kv_heads;
    add_count(f, 'B', 33, "entries of a table, 4096 tokens in blocks of 16", "256", 256, n);
    add(f, 'B', 33, "a table, entries of 8 bytes", "2 KB", n * 8 == 2048 ? HOLDS : DIFFERS, "%d bytes",
        n * 8);
    add_count(f, 'B', 33, "tables: layers × heads × K and V", "3200", 3200, n_tables);
    add_bytes(f, 'B', 33, "all tables of a request", "6.4 MB", 6.4, 0.1, MEGA,
              (size_t)n_tables * (size_t)n * 8);
    add(f, 'B', 33, "what is needed: one table, int32, for all layers and heads", "", OURS, "%zu bytes",
        (size_t)n * sizeof(int32_t));
    add(f, 'B', 34, "finding addresses, of the time of attention", "< 0.5 %", DEPENDS, "%s (%s)",
        PAGED__MEASURED_LOOKUP, PAGED__MEASURED_ATTN);
}

/* Mean length for which blocks of b tokens waste the share: half a block less half a token is lost. */
static double length_for(int32_t b, double share) {
    double lost = (b - 1) / 2.0;
    return lost / share - lost;
}

static void block_sizes(findings *f, const paged_shape *shape) {
    static const struct {
        int32_t block;
        const char *entries, *waste;
        int32_t n_entries;
        double percent;
    } rows[] = {{8, "512", "4 %", 512, 4},
                {16, "256", "6 %", 256, 6},
                {32, "128", "10 %", 128, 10},
                {64, "64", "18 %", 64, 18}};
    static const char *const measured[] = {PAGED__MEASURED_WASTE_8, PAGED__MEASURED_WASTE_16,
                                           PAGED__MEASURED_WASTE_32, PAGED__MEASURED_WASTE_64};
    static const char *const entries[] = {"block 8: entries", "block 16: entries", "block 32: entries",
                                          "block 64: entries"};
    static const char *const waste[] = {"block 8: waste", "block 16: waste", "block 32: waste",
                                        "block 64: waste"};
    for (int32_t i = 0; i < 4; i++) {
        const paged_plan plan = plan_of(PAGED_PLAN_PAGED, &shape->groups[0], rows[i].block, 4096);
        add_count(f, 'B', 35, entries[i], rows[i].entries, rows[i].n_entries,
                  paged_plan_table_entries(&plan));
        add(f, 'B', 35, waste[i], rows[i].waste, DEPENDS,
            "right for sequences of %.0f tokens; Azure conversations %s (%s)",
            length_for(rows[i].block, rows[i].percent / 100), measured[i], PAGED__MEASURED_CACHE);
    }
    add(f, 'B', 28, "fragments of several requests on one page", "", OURS,
        "packed tails, blocks of 64: %s wasted, in place of %s (%s)", PAGED__MEASURED_TAILS_64,
        PAGED__MEASURED_WASTE_64, PAGED__MEASURED_CACHE);
    const paged_plan standard = plan_of(PAGED_PLAN_PAGED, &shape->groups[0], 0, 4096);
    add_count(f, 'B', 36, "default block size", "16", 16, standard.block_size);
    add(f, 'B', 36, "what is published of that NPU's operators", "", OURS,
        "decode advises 128, prefill and TND take no less: --profile ascend");
}

static void service(findings *f, const paged_shape *shape) {
    const paged_group_config *group = &shape->groups[0];
    add(f, 'B', 29, "memory in use, before and after", "40 % -> 95 %", DEPENDS,
        "Azure conversations %s -> %s, first fit of exact sizes %s (%s)", PAGED__MEASURED_STORED_MAXIMUM,
        PAGED__MEASURED_STORED_PAGED, PAGED__MEASURED_STORED_FIRST_FIT, PAGED__MEASURED_CACHE);
    size_t pool = 100000 * paged_block_bytes(group, 16);
    add(f, 'B', 31, "block_size 16, max_blocks 100000", "", OURS, "%s for this model",
        paged__size_both(pool).text);
    const paged_plan paged = plan_of(PAGED_PLAN_PAGED, group, 16, 4096);
    const paged_plan whole = plan_of(PAGED_PLAN_CONTIGUOUS, group, 16, 4096);
    size_t eight = 8 * paged_plan_taken_bytes(&whole, 1024);
    add(f, 'B', 37, "8 short requests: 25.6 -> 6.4 GB, so twice the throughput", "2 ×", OPEN,
        "in %s fit %lld requests of 1024 tokens, contiguous %lld: memory allows %.0f ×; of tokens a second "
        "there is "
        "no figure yet",
        paged__size_both(eight).text, (long long)paged_plan_fit(&paged, eight, 1024),
        (long long)paged_plan_fit(&whole, eight, 1024),
        (double)paged_plan_fit(&paged, eight, 1024) / (double)paged_plan_fit(&whole, eight, 1024));
}

/* ---- document A: 32 heads, head_dim 64, f16, pages of 16 KB ---- */

enum { PAGE = 16 * 1024 };

static int32_t page_tokens(int32_t head_dim) {
    const paged_group_config head = {.n_layers = 1, .n_kv_heads = 1, .head_dim_k = head_dim};
    return (int32_t)(PAGE / paged_block_bytes(&head, 1));
}

static void contiguous_cache(findings *f) {
    const paged_group_config layer = {.n_layers = 1, .n_kv_heads = 32, .head_dim_k = 64};
    size_t one = paged_pool_bytes_for(&layer, 1, 16, 8192);
    add(f, 'A', 2, "a layer: 8192 × 32 × 2 × 2 bytes", "1 MB", DIFFERS,
        "head_dim is missing: %s with head_dim 64", paged__size_both(one).text);
    add_bytes(f, 'A', 2, "32 layers", "32 MB", 32, 1, MEGA, 32 * one);
    add(f, 'A', 12, "kv_cache, 32 heads × 256 pages of 16 KB, a layer", "", OURS,
        "%s, twice the contiguous %s: a pool reserved at its maximum saves nothing",
        paged__size_both((size_t)32 * 256 * PAGE).text, paged__size_both(one).text);
}

static void pages(findings *f) {
    static const struct {
        int64_t block, kb;
        const char *what, *says;
    } addresses[] = {{5, 80, "address of block 5", "80 KB"},
                     {12, 192, "address of block 12", "192 KB"},
                     {30, 480, "address of block 30", "480 KB"}};
    add(f, 'A', 4, "tokens in a page of 16 KB of one head", "", OURS, "%d tokens at head_dim 64, %d at 128",
        page_tokens(64), page_tokens(128));
    for (size_t i = 0; i < sizeof addresses / sizeof addresses[0]; i++) {
        int64_t at = addresses[i].block * PAGE;
        add(f, 'A', 6, addresses[i].what, addresses[i].says, at == addresses[i].kb * 1024 ? HOLDS : DIFFERS,
            "%lld bytes", (long long)at);
    }
    int32_t each = (8192 - 1) / page_tokens(64) + 1;
    add(f, 'A', 5, "block_table, int32, 1 × 32 heads × 256", "", OURS, "%s; one table for all heads takes %s",
        paged__size_both((size_t)32 * 256 * sizeof(int32_t)).text,
        paged__size_both((size_t)256 * sizeof(int32_t)).text);
    add(f, 'A', 13, "blocks used by 8192 tokens", "512", each * 32 == 512 ? HOLDS : DIFFERS,
        "%d in a head, %d in 32 heads; 512 was a sum of ids", each, each * 32);
    add(f, 'A', 14, "256 pages are too few for 8192 tokens, so 512", "512", each > 256 ? HOLDS : DIFFERS,
        "256 pages hold %d tokens at head_dim 64, %d at 128", 256 * page_tokens(64), 256 * page_tokens(128));
    add(f, 'A', 21, "max_blocks 256 to 512", "", OURS, "%d to %d tokens at head_dim 64",
        256 * page_tokens(64), 512 * page_tokens(64));
    add(f, 'A', 23, "16 KB is the L1 of the NPU", "16 KB", DIFFERS,
        "L1 has 512 KB, the unified buffer 192 KB, by what is published of that NPU");
}

/* 256 MB for 2048 tokens are 128 KiB a token; with that the sizes are computed. The percentages are right all
 * the same, if the first size is what is reserved and the second what is used. */
static void memory_table(findings *f) {
    static const struct {
        const char *what, *sizes, *percent;
        size_t before_mb, after_mb, n_tokens;
        double saved;
    } rows[] = {{"batch 1, 2048", "256 MB -> 256 MB", "0 %", 256, 256, 2048, 0},
                {"batch 1, 8192", "1 GB -> 256 MB", "75 %", 1024, 256, 8192, 75},
                {"batch 4, 4096", "1 GB -> 512 MB", "50 %", 1024, 512, 4 * 4096, 50}};
    const size_t token = ((size_t)256 << 20) / 2048;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const double saved = 100 - 100 * (double)rows[i].after_mb / (double)rows[i].before_mb;
        const size_t stored = rows[i].n_tokens * token;
        add(f, 'A', 17, rows[i].what, rows[i].percent, same(rows[i].saved, 1, saved),
            "%.0f %%, as used against reserved", saved);
        add(f, 'A', 17, rows[i].what, rows[i].sizes, stored == rows[i].after_mb << 20 ? HOLDS : DIFFERS,
            "%zu tokens of %zu KiB are %s, in pages as in one run; %zu MB hold %zu", rows[i].n_tokens,
            token >> 10, paged__size_both(stored).text, rows[i].after_mb, (rows[i].after_mb << 20) / token);
    }
}

static void times(findings *f) {
    add(f, 'A', 18, "2048: 120 -> 125 ms", "4 %", same(4, 1, 100 * (125.0 / 120 - 1)),
        "%.2f %% by their times", 100 * (125.0 / 120 - 1));
    add(f, 'A', 18, "4096: 280 -> 295 ms", "5 %", same(5, 1, 100 * (295.0 / 280 - 1)),
        "%.2f %% by their times", 100 * (295.0 / 280 - 1));
    const paged_group_config layer = {.n_layers = 1, .n_kv_heads = 32, .head_dim_k = 64};
    add(f, 'A', 18, "8192: out of memory -> 520 ms", "", DEPENDS,
        "8192 tokens are %s a layer either way; pages save what is reserved beyond them",
        paged__size_both(paged_pool_bytes_for(&layer, 1, 64, 8192)).text);
    add(f, 'A', 18, "the overhead of pages, here", "4 to 5 %", DEPENDS,
        "blocks in place of one run: K of a head in pieces of 8 KiB %s, of 32 KiB %s (%s)",
        PAGED__MEASURED_LOSS_8, PAGED__MEASURED_LOSS_32, PAGED__MEASURED_ATTN);
    add(f, 'A', 9, "gathering pages to one run first", "4 to 5 %", DEPENDS,
        "reading blocks where they lie is %s times as fast (%s)", PAGED__MEASURED_GATHER,
        PAGED__MEASURED_ATTN);
    add(f, 'A', 15, "the first call", "100 ms", OPEN, "comes with the Python interface");
    add(f, 'A', 19, "below 2048 contiguous, above 4096 paged", "2048, 4096", DEPENDS,
        "on the load, not on one length: paged plan --trace FILE --memory BYTES");
}

/* ---- report ---- */

static void print_text(paged__cli *cli, const findings *f) {
    static const char *const titles[] = {
        "A: a PagedAttention operator (32 heads, head_dim 64, pages of 16 KB)",
        "B: a paged KV cache in a runtime (LLaMA-13B, f16, blocks of 16)"};
    for (char document = 'A'; document <= 'B'; document++) {
        paged__out_printf(cli, "%s%s\n", document == 'A' ? "" : "\n", titles[document - 'A']);
        for (int32_t i = 0; i < f->n; i++) {
            const finding *one = &f->all[i];
            if (one->document != document) continue;
            paged__out_printf(cli, "%4d  %s%s%s\n      %s: %s\n", one->claim, one->what,
                              one->says[0] ? ": " : "", one->says, verdict_names[one->verdict], one->ours);
        }
    }
    paged__out_printf(cli, "\nThe number in front is the row of docs/claims.md, which has all claims.\n");
}

static int print_json(paged__cli *cli, const findings *f) {
    json_t *list = json_array();
    for (int32_t i = 0; i < f->n; i++) {
        const finding *one = &f->all[i];
        const char document[] = {one->document, 0};
        json_array_append_new(list, json_pack("{s:s, s:i, s:s, s:s, s:s, s:s}", "document", document, "claim",
                                              one->claim, "what", one->what, "says", one->says, "verdict",
                                              verdict_names[one->verdict], "ours", one->ours));
    }
    return paged__out_json(cli, list, false);
}

int paged__documents(paged__cli *cli, bool json) {
    findings f = {.n = 0};
    const paged_shape *shape = paged_shape_find("llama-2-13b");
    contiguous_cache(&f);
    pages(&f);
    memory_table(&f);
    times(&f);
    request_sizes(&f, shape);
    savings(&f, shape);
    tables(&f, shape);
    block_sizes(&f, shape);
    service(&f, shape);
    if (json) return print_json(cli, &f);
    print_text(cli, &f);
    return PAGED__EXIT_OK;
}
