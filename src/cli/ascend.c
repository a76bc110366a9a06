/* cli/ascend.c: paged ascend-check: whether the operators of an Ascend card would take a call. */
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "cli/ascend.h"
#include "cli/session.h"
#include "paged/plan.h"

enum { FINDINGS_MAX = 64 };

typedef struct check_options {
    paged_ascend_config call; /* PAGED_ASCEND_UNSET: not given */
    const char *shape, *arrays, *dump;
    uint64_t seed;
    bool rules, json, lse;
} check_options;

static const char *const paths[] = {"decode", "prefill", "tnd", "mla", "atb", "scatter", "gather", NULL};
static const char *const layouts[] = {"bnbsh", "bnnbsd", "pa_nz", NULL};
static const char *const q_layouts[] = {"bnsd", "bsnd", "bsh", "tnd", NULL};

#define AT(field) offsetof(check_options, field)
#define NUMBER(name, field, help)                                                                            \
    { PAGED__OPTION_INT, 0, name, "N", AT(call.field), 0, INT32_MAX, NULL, help }

static const paged__option options_table[] = {
    {PAGED__OPTION_OPERAND, 0, "SHAPE", NULL, AT(shape), 0, 0, NULL,
     "a shape with a name (paged plan --shapes): its heads and head_dim"},
    {.kind = PAGED__OPTION_HEADING, .name = "The call"},
    {PAGED__OPTION_CHOICE, 0, "path", "PATH", AT(call.path), 0, 0, paths,
     "decode, prefill, tnd, mla (FusedInferAttentionScore), atb\n(PagedAttention), scatter, gather "
     "(default: decode)"},
    {PAGED__OPTION_CHOICE, 0, "q-type", "TYPE", AT(call.q_type), 0, 0, paged__kv_types,
     "of queries (default: f16, or as --kv-type)"},
    {PAGED__OPTION_CHOICE, 0, "kv-type", "TYPE", AT(call.kv_type), 0, 0, paged__kv_types,
     "f16, f32, bf16 or int8 (default: as --q-type)"},
    {PAGED__OPTION_CHOICE, 0, "q-layout", "NAME", AT(call.q_layout), 0, 0, q_layouts,
     "bnsd, bsnd, bsh or tnd (default: tnd for tnd, mla and atb, else bnsd)"},
    {PAGED__OPTION_CHOICE, 0, "kv-layout", "NAME", AT(call.kv_layout), 0, 0, layouts,
     "bnbsh, bnnbsd or pa_nz (default: bnbsh)"},
    {.kind = PAGED__OPTION_HEADING, .name = "Sizes"},
    NUMBER("heads", n_heads, "of queries (default: as --kv-heads, or 32; mla: 128)"),
    NUMBER("kv-heads", n_kv_heads, "of keys and values (default: as --heads; mla: 1)"),
    NUMBER("head-dim", head_dim_k, "elements of a key in a head (default: 128; mla: 512)"),
    NUMBER("head-dim-v", head_dim_v, "elements of a value (default: as --head-dim; tnd: at most 128)"),
    NUMBER("rope-dim", rope_dim, "mla: elements of query_rope and key_rope (default: 64)"),
    NUMBER("block-size", block_size, "tokens of a block (default: 128)"),
    NUMBER("writer-block", writer_block_size, "where who writes counts in other blocks"),
    NUMBER("engine-block", engine_block_size, "where the scheduler above counts in other blocks"),
    NUMBER("pool-block", pool_block_bytes, "bytes of a block of the pool, where layers share one"),
    NUMBER("batch", batch, "sequences (default: 1)"),
    NUMBER("max-q", max_q, "tokens of the longest query (default: 1; prefill: 128)"),
    NUMBER("max-k", max_k, "keys of the longest sequence (default: 1024)"),
    NUMBER("blocks", n_blocks, "of the pool (default: what the batch can take)"),
    NUMBER("table-rows", table_rows, "of block_table (default: as --batch)"),
    NUMBER("table-cols", table_cols, "of block_table (default: what --max-k takes)"),
    NUMBER("sparse-mode", sparse_mode, "0 to 4 (default: 0; 3 where there are several queries)"),
    NUMBER("mask-rows", mask_rows, "of atten_mask, 0: none (default: what the mode takes)"),
    NUMBER("mask-cols", mask_cols, "of atten_mask"),
    {PAGED__OPTION_FLAG, 0, "lse", NULL, AT(lse), 0, 0, NULL, "softmax_lse is asked for"},
    {.kind = PAGED__OPTION_HEADING, .name = "Arrays, and a comparison with a card"},
    {PAGED__OPTION_TEXT, 0, "arrays", "FILE", AT(arrays), 0, 0, NULL,
     "what those operators do not check: a JSON object with any of table\n(rows), lens_q, lens_k, slots, "
     "tokens (a number); \"-\": stdin"},
    {PAGED__OPTION_TEXT, 0, "dump", "DIR", AT(dump), 0, 0, NULL,
     "write the call with random inputs and its golden result as .npy\nfiles, a manifest, and a program "
     "that compares them with a card's"},
    {PAGED__OPTION_SEED, 0, "seed", "N", AT(seed), 0, 0, NULL, "of the random inputs (default: 0)"},
    {.kind = PAGED__OPTION_HEADING, .name = "Output"},
    {PAGED__OPTION_FLAG, 0, "rules", NULL, AT(rules), 0, 0, NULL, "list all rules with their sources"},
    {PAGED__OPTION_FLAG, 0, "json", NULL, AT(json), 0, 0, NULL, "one JSON object"},
};
#undef AT

/* ---- the call ---- */

static void set_default(int32_t *value, int64_t usual) {
    if (*value == PAGED_ASCEND_UNSET) *value = (int32_t)PAGED_MIN(usual, INT32_MAX);
}

static int take_shape(paged__cli *cli, check_options *o) {
    const paged_shape *shape = o->shape ? paged_shape_find(o->shape) : NULL;
    if (!o->shape) return PAGED__EXIT_OK;
    if (!shape)
        return paged__usage_error(cli, "there is no shape '%s'; paged plan --shapes lists them", o->shape);
    set_default(&o->call.n_heads, shape->n_heads);
    set_default(&o->call.n_kv_heads, shape->groups[0].n_kv_heads);
    set_default(&o->call.head_dim_k, shape->groups[0].head_dim_k);
    return PAGED__EXIT_OK;
}

/* ---- arrays of the user's ---- */

typedef struct arrays {
    paged_ascend_arrays of;
    int32_t *table;
    int64_t *lens_q, *lens_k, *slots;
} arrays;

static void free_arrays(arrays *a) {
    paged__free(a->table);
    paged__free(a->lens_q);
    paged__free(a->lens_k);
    paged__free(a->slots);
}

/* A list of integers; *out NULL where there is none of this name. */
static int take_list(paged__cli *cli, const json_t *object, const char *name, int64_t **out, int64_t *n) {
    const json_t *list = json_object_get(object, name);
    if (!list) return PAGED__EXIT_OK;
    *n = (int64_t)json_array_size(list);
    if (!json_is_array(list) || *n > INT32_MAX)
        return paged__error(cli, "--arrays: %s is not a list of integers", name);
    *out = paged__alloc((size_t)*n, sizeof **out);
    if (!*out) return paged__error(cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
    for (int64_t i = 0; i < *n; i++) {
        const json_t *item = json_array_get(list, (size_t)i);
        if (!json_is_integer(item))
            return paged__error(cli, "--arrays: entry %lld of %s is no integer", (long long)i, name);
        (*out)[i] = json_integer_value(item);
    }
    return PAGED__EXIT_OK;
}

static int take_table(paged__cli *cli, const json_t *object, paged_ascend_config *c, arrays *a) {
    const json_t *rows = json_object_get(object, "table");
    if (!rows) return PAGED__EXIT_OK;
    size_t n_rows = json_array_size(rows), n_cols = json_array_size(json_array_get(rows, 0));
    if (!n_rows || !n_cols || n_rows > INT32_MAX || n_cols > INT32_MAX)
        return paged__error(cli, "--arrays: table is not a list of rows of integers");
    a->table = paged__alloc(n_rows, n_cols * sizeof *a->table);
    if (!a->table) return paged__error(cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
    for (size_t r = 0; r < n_rows; r++) {
        const json_t *row = json_array_get(rows, r);
        if (json_array_size(row) != n_cols)
            return paged__error(cli, "--arrays: row %zu of table has %zu entries, row 0 has %zu", r,
                                json_array_size(row), n_cols);
        for (size_t i = 0; i < n_cols; i++) {
            const json_t *item = json_array_get(row, i);
            json_int_t value = json_integer_value(item);
            if (!json_is_integer(item) || value < INT32_MIN || value > INT32_MAX)
                return paged__error(cli, "--arrays: entry %zu of row %zu of table is no int32", i, r);
            a->table[r * n_cols + i] = (int32_t)value;
        }
    }
    set_default(&c->batch, (int64_t)n_rows);
    set_default(&c->table_rows, (int64_t)n_rows);
    set_default(&c->table_cols, (int64_t)n_cols);
    if (c->table_rows != (int32_t)n_rows || c->table_cols != (int32_t)n_cols)
        return paged__error(cli,
                            "--arrays: table is [%zu, %zu], but --table-rows and --table-cols say [%d, %d]",
                            n_rows, n_cols, c->table_rows, c->table_cols);
    a->of.table = a->table;
    return PAGED__EXIT_OK;
}

static int take_object(paged__cli *cli, const json_t *object, paged_ascend_config *c, arrays *a) {
    static const char *const known[] = {"table", "lens_q", "lens_k", "slots", "tokens"};
    const char *name;
    json_t *value;
    if (!json_is_object(object)) return paged__error(cli, "--arrays takes a JSON object");
    json_object_foreach((json_t *)(uintptr_t)object, name, value) {
        size_t i = 0;
        while (i < 5 && strcmp(known[i], name) != 0) i++;
        if (i == 5)
            return paged__error(cli, "--arrays knows table, lens_q, lens_k, slots and tokens, not '%s'",
                                name);
    }
    int64_t n_q = 0, n_k = 0;
    int code = take_table(cli, object, c, a);
    if (code == PAGED__EXIT_OK) code = take_list(cli, object, "lens_q", &a->lens_q, &n_q);
    if (code == PAGED__EXIT_OK) code = take_list(cli, object, "lens_k", &a->lens_k, &n_k);
    if (code == PAGED__EXIT_OK) code = take_list(cli, object, "slots", &a->slots, &a->of.n_slots);
    a->of.lens_q = a->lens_q;
    a->of.lens_k = a->lens_k;
    a->of.slots = a->slots;
    a->of.n_lens_q = (int32_t)n_q;
    a->of.n_lens_k = (int32_t)n_k;
    a->of.n_tokens = PAGED_MAX(json_integer_value(json_object_get(object, "tokens")), 0);
    return code;
}

static int take_arrays(paged__cli *cli, const char *path, paged_ascend_config *c, arrays *a) {
    paged__buffer text = {0};
    json_error_t where;
    int code = paged__text_take(cli, NULL, path, &text);
    if (code != PAGED__EXIT_OK) return code;
    json_t *object = json_loadb(text.data, text.len, JSON_REJECT_DUPLICATES, &where);
    if (!object)
        code = paged__error(cli, "--arrays: line %d: %s", where.line, where.text);
    else
        code = take_object(cli, object, c, a);
    json_decref(object);
    paged__buffer_free(&text);
    return code;
}

/* ---- the verdict ---- */

typedef struct verdict {
    paged_ascend_finding found[FINDINGS_MAX];
    int32_t n, n_refused;
    paged_ascend_config repaired;
    bool has_repaired; /* the fields can be put right; what is wrong in arrays stays wrong */
} verdict;

static int judge(paged__cli *cli, const paged_ascend_config *c, const arrays *a, verdict *v) {
    paged_error err;
    int32_t n_arrays = 0;
    v->n = PAGED_MIN(paged_ascend_check(c, v->found, FINDINGS_MAX), FINDINGS_MAX);
    v->repaired = *c;
    v->has_repaired = !paged_ascend_accepts(c) && paged_ascend_nearest(&v->repaired);
    bool any = a->of.table || a->of.lens_q || a->of.lens_k || a->of.slots;
    if (any && paged_ascend_check_arrays(c, &a->of, v->found + v->n, FINDINGS_MAX - v->n, &n_arrays, &err) !=
                   PAGED_OK)
        return paged__error(cli, "%s", err.message);
    v->n = PAGED_MIN(v->n + n_arrays, FINDINGS_MAX);
    for (int32_t i = 0; i < v->n; i++) v->n_refused += !v->found[i].rule->warning;
    return PAGED__EXIT_OK;
}

static json_t *config_json(paged_ascend_config *c) {
    json_t *object = json_object();
    json_object_set_new(object, "path", json_string(paged_ascend_path_name(c->path)));
    for (int32_t i = 0; paged_ascend_field_name(i); i++) {
        const char *name = paged_ascend_field_name(i);
        int32_t value = *paged_ascend_field_value(c, i);
        const char *word = strcmp(name, "q_layout") == 0    ? paged_ascend_q_layout_name(value)
                           : strcmp(name, "kv_layout") == 0 ? paged_ascend_layout_name(value)
                           : strstr(name, "_type")          ? paged__kv_types[value]
                                                            : NULL;
        json_object_set_new(object, name, word ? json_string(word) : json_integer(value));
    }
    return object;
}

static int print_json(paged__cli *cli, paged_ascend_config *c, verdict *v) {
    json_t *list = json_array();
    for (int32_t i = 0; i < v->n; i++) {
        const paged_ascend_finding *f = &v->found[i];
        json_t *one = json_pack("{s:s, s:s, s:s, s:b, s:I, s:s, s:s}", "rule", f->rule->id, "field",
                                f->rule->field, "source", f->rule->source, "warning", (int)f->rule->warning,
                                "value", (json_int_t)f->value, "text", f->rule->text, "message", f->message);
        json_object_set_new(one, "nearest", f->has_nearest ? json_integer(f->nearest) : json_null());
        json_object_set_new(one, "entry", f->entry >= 0 ? json_integer(f->entry) : json_null());
        json_array_append_new(list, one);
    }
    json_t *object =
        json_pack("{s:b, s:s, s:b, s:o, s:o}", "accepted", (int)(v->n_refused == 0), "facts",
                  PAGED_ASCEND_FACTS, "ran_on_a_card", 0, "call", config_json(c), "findings", list);
    json_object_set_new(object, "nearest_call", v->has_repaired ? config_json(&v->repaired) : json_null());
    return paged__out_json(cli, object, false);
}

static void print_repair(paged__cli *cli, paged_ascend_config *c, verdict *v) {
    json_t *from = config_json(c), *to = config_json(&v->repaired), *value;
    const char *name, *gap = "accepted with ";
    json_object_foreach(to, name, value) {
        if (json_equal(value, json_object_get(from, name))) continue;
        if (json_is_string(value))
            paged__out_printf(cli, "%s%s %s", gap, name, json_string_value(value));
        else
            paged__out_printf(cli, "%s%s %lld", gap, name, (long long)json_integer_value(value));
        gap = ", ";
    }
    paged__out_printf(cli, "\n");
    json_decref(from);
    json_decref(to);
}

static void print_text(paged__cli *cli, paged_ascend_config *c, verdict *v) {
    for (int32_t i = 0; i < v->n; i++) {
        const paged_ascend_finding *f = &v->found[i];
        paged__out_printf(cli, "%s  %s\n         %s\n", f->rule->warning ? "warning" : "refused", f->rule->id,
                          f->message);
        if (!f->rule->warning) paged__out_printf(cli, "         source: %s\n", f->rule->source);
    }
    if (v->n_refused == 0)
        paged__out_printf(cli, "accepted: %s, %d heads on %d, head_dim %d, %s, blocks of %d\n",
                          paged_ascend_path_name(c->path), c->n_heads, c->n_kv_heads, c->head_dim_k,
                          paged_ascend_layout_name(c->kv_layout), c->block_size);
    if (v->has_repaired) print_repair(cli, c, v);
    paged__out_printf(cli, "By public documentation as of " PAGED_ASCEND_FACTS
                           "; nothing of this ran on such a card.\n");
}

/* ---- the rules ---- */

static int print_rules(paged__cli *cli, bool json) {
    json_t *list = json_array();
    for (int32_t i = 0; i < paged_ascend_rule_count(); i++) {
        const paged_ascend_rule *rule = paged_ascend_rule_at(i);
        char on[64] = "";
        json_t *names = json_array();
        for (int32_t p = 0; p < PAGED_ASCEND_PATHS; p++) {
            if (!(rule->paths & 1u << p)) continue;
            size_t len = strlen(on);
            snprintf(on + len, sizeof on - len, "%s%s", len ? " " : "", paged_ascend_path_name(p));
            json_array_append_new(names, json_string(paged_ascend_path_name(p)));
        }
        json_array_append_new(list, json_pack("{s:s, s:s, s:b, s:s, s:s, s:o}", "rule", rule->id, "field",
                                              rule->field, "warning", (int)rule->warning, "text", rule->text,
                                              "source", rule->source, "paths", names));
        if (!json)
            paged__out_printf(cli, "%s%s (%s)\n    %s\n    source: %s\n", rule->id,
                              rule->warning ? ", a warning" : "", on, rule->text, rule->source);
    }
    if (json) return paged__out_json(cli, list, false);
    json_decref(list);
    return PAGED__EXIT_OK;
}

/* ---- the command ---- */

static int check_call(paged__cli *cli, check_options *o, arrays *a) {
    static verdict v; /* large for a stack */
    int code = take_shape(cli, o);
    if (code == PAGED__EXIT_OK && o->arrays) code = take_arrays(cli, o->arrays, &o->call, a);
    if (code != PAGED__EXIT_OK) return code;
    paged_ascend_fill(&o->call);
    o->call.lse = o->lse;
    v = (verdict){.n = 0};
    code = judge(cli, &o->call, a, &v);
    if (code != PAGED__EXIT_OK) return code;
    if (o->json)
        code = print_json(cli, &o->call, &v);
    else
        print_text(cli, &o->call, &v);
    if (code == PAGED__EXIT_OK && v.n_refused) return PAGED__EXIT_ERROR;
    if (code == PAGED__EXIT_OK && o->dump) code = paged__ascend_dump(cli, &o->call, o->dump, o->seed);
    return code;
}

static int ascend_command(paged__cli *cli, int argc, char **argv) {
    check_options o = {.json = false};
    arrays a = {.table = NULL};
    int code;
    paged_ascend_unset(&o.call);
    if (!paged__args_parse(cli, &paged__command_ascend, argc, argv, &o, &code)) return code;
    if (o.rules) return print_rules(cli, o.json);
    code = check_call(cli, &o, &a);
    free_arrays(&a);
    return code;
}

const paged__command paged__command_ascend = {
    .name = "ascend-check",
    .purpose = "say whether an Ascend card's operators take a call",
    .usage = "[SHAPE] [options]",
    .example = "paged ascend-check llama-3-8b --path prefill --block-size 16\n"
               "  paged ascend-check --path mla --kv-layout pa_nz --max-q 4\n"
               "  paged ascend-check llama-3-8b --batch 4 --lse --dump card",
    .options = options_table,
    .n_options = sizeof options_table / sizeof options_table[0],
    .run = ascend_command,
};
