/* cli/plan_cmd.c: paged plan: what keys and values of a model take, before it is there. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/base.h"
#include "cli/plan.h"
#include "cli/planner.h"
#include "cli/session.h"
#include "paged/ascend.h"
#include "paged/model.h"

typedef struct plan_options {
    const char *model, *lengths, *trace, *svg;
    int32_t layers, kv_heads, head_dim, window;
    int32_t kv_choice, profile, block_size, ctx, requests;
    size_t page_size, memory, pool_bytes;
    float weight_bits;
    bool shapes, documents, json, quiet;
} plan_options;

#define ROW(field) offsetof(plan_options, field)

enum { PROFILE_NONE, PROFILE_SEED, PROFILE_ASCEND };
static const char *const profiles[] = {"none", "seed", "ascend", NULL};

static const paged__option options_table[] = {
    {PAGED__OPTION_OPERAND, 0, "MODEL", NULL, ROW(model), 0, 0, NULL,
     "a GGUF file, or the name of a shape (default: $PAGED_MODEL)"},
    {.kind = PAGED__OPTION_HEADING, .name = "Model"},
    {PAGED__OPTION_FLAG, 0, "shapes", NULL, ROW(shapes), 0, 0, NULL, "list the shapes that have a name"},
    {PAGED__OPTION_INT, 0, "layers", "N", ROW(layers), 1, 100000, NULL,
     "a shape without a name: this, --kv-heads and --head-dim"},
    {PAGED__OPTION_INT, 0, "kv-heads", "N", ROW(kv_heads), 1, 100000, NULL, "KV heads of a layer"},
    {PAGED__OPTION_INT, 0, "head-dim", "N", ROW(head_dim), 1, 100000, NULL,
     "elements of a key, and of a value, in one head"},
    {PAGED__OPTION_INT, 0, "window", "N", ROW(window), 1, INT32_MAX, NULL,
     "keys that a query sees at most in the layers of such a shape"},
    {PAGED__OPTION_REAL, 0, "weight-bits", "X", ROW(weight_bits), 0.1, 64, NULL,
     "bits of a parameter, where a name says how many there are\n(default: 16)"},
    {.kind = PAGED__OPTION_HEADING, .name = "Keys and values"},
    {PAGED__OPTION_CHOICE, 0, "kv-type", "TYPE", ROW(kv_choice), 0, 0, paged__kv_choices, PAGED__KV_HELP},
    {PAGED__OPTION_INT, 0, "ctx", "N", ROW(ctx), 1, INT32_MAX, NULL,
     "tokens of the longest sequence (default: the model's context)"},
    {PAGED__OPTION_CHOICE, 0, "profile", "NAME", ROW(profile), 0, 0, profiles,
     "blocks of others: seed (pages of 16K, of the first document), ascend\n(128 tokens; what its "
     "operators would refuse is told)"},
    {PAGED__OPTION_INT, 0, "block-size", "N", ROW(block_size), 1, 1024, NULL,
     "tokens of a block (default: 16)"},
    {PAGED__OPTION_BYTES, 0, "page-size", "BYTES", ROW(page_size), 0, 0, NULL,
     "the same as the bytes of keys and values of one head of one\nlayer in a block, such as 16K"},
    {.kind = PAGED__OPTION_HEADING, .name = "Memory"},
    {PAGED__OPTION_BYTES, 0, "memory", "BYTES", ROW(memory), 0, 0, NULL,
     "what there is for weights, keys and values"},
    {PAGED__OPTION_BYTES, 0, "pool-bytes", "BYTES", ROW(pool_bytes), 0, 0, NULL,
     "what there is for keys and values alone"},
    {.kind = PAGED__OPTION_HEADING, .name = "Load"},
    {PAGED__OPTION_INT, 0, "requests", "N", ROW(requests), 1, 1000000, NULL,
     "requests at once, for what they take together (default: 8)"},
    {PAGED__OPTION_TEXT, 0, "lengths", "LIST", ROW(lengths), 0, 0, NULL,
     "lengths of sequences in tokens, such as 128,1024,4096"},
    {PAGED__OPTION_TEXT, 0, "trace", "FILE", ROW(trace), 0, 0, NULL,
     "requests of a trace: Azure, BurstGPT, lengths alone (CSV), Mooncake,\nBailian, ShareGPT (JSON lines); "
     "\"-\": stdin. Default: made up, with\nthe lengths of ShareGPT"},
    {.kind = PAGED__OPTION_HEADING, .name = "Output"},
    {PAGED__OPTION_FLAG, 0, "documents", NULL, ROW(documents), 0, 0, NULL,
     "every number of the two documents that this program began with,\nbeside what we compute and measured"},
    {PAGED__OPTION_FLAG, 0, "json", NULL, ROW(json), 0, 0, NULL, "one JSON object"},
    {PAGED__OPTION_TEXT, 0, "svg", "FILE", ROW(svg), 0, 0, NULL,
     "charts: waste by block size and, with a pool, what lies in it"},
    {PAGED__OPTION_FLAG, 'q', "quiet", NULL, ROW(quiet), 0, 0, NULL, "no notes"},
};

/* ---- the model ---- */

static int take_numbers(paged__planner *p, const plan_options *o) {
    if (o->model) return paged__usage_error(p->cli, "either '%s' or --layers, not both", o->model);
    if (!o->layers || !o->kv_heads || !o->head_dim)
        return paged__usage_error(p->cli, "a shape takes --layers, --kv-heads and --head-dim together");
    p->groups[p->n_groups++] = (paged_group_config){
        .n_layers = o->layers, .n_kv_heads = o->kv_heads, .head_dim_k = o->head_dim, .window = o->window};
    snprintf(p->model, sizeof p->model, "a shape of your own");
    p->n_ctx = 4096;
    return PAGED__EXIT_OK;
}

static void take_shape(paged__planner *p, const paged_shape *shape, float weight_bits) {
    memcpy(p->groups, shape->groups, sizeof p->groups);
    p->n_groups = shape->n_groups;
    p->n_ctx = shape->n_ctx;
    p->weight_bytes = (size_t)((double)shape->n_params * (weight_bits > 0 ? (double)weight_bits : 16) / 8);
    snprintf(p->model, sizeof p->model, "%s", shape->name);
}

static int tell_no_model(paged__cli *cli, const char *name) {
    const char *names[64];
    int32_t n = 0;
    while (n < 64 && paged_shape_at(n)) {
        names[n] = paged_shape_at(n)->name;
        n++;
    }
    const char *nearest = paged__args_nearest(name, names, n);
    if (nearest)
        return paged__error(cli, "'%s' is neither a file nor a shape; did you mean %s?", name, nearest);
    return paged__error(cli, "'%s' is neither a file nor a shape; --shapes lists the shapes", name);
}

static int take_file(paged__planner *p, const char *path) {
    struct stat facts;
    if (stat(path, &facts) != 0 && errno == ENOENT) return tell_no_model(p->cli, path);
    paged_model *model = NULL;
    paged_error err;
    paged_model_info info;
    paged_model_config config = {.struct_size = sizeof config, .vocab_only = true};
    if (paged_model_load(path, &config, &model, &err) != PAGED_OK)
        return paged__error(p->cli, "%s", err.message);
    paged_model_get_info(model, &info);
    p->n_groups = paged__model_groups(&info, PAGED_TYPE_F16, p->groups);
    p->n_ctx = info.n_ctx_train;
    p->weight_bytes = info.weight_bytes;
    snprintf(p->model, sizeof p->model, "%s", paged__model_name(&info, path));
    paged_model_free(model);
    return PAGED__EXIT_OK;
}

static int take_model(paged__planner *p, const plan_options *o) {
    if (o->layers || o->kv_heads || o->head_dim) return take_numbers(p, o);
    if (o->window) return paged__usage_error(p->cli, "--window belongs to a shape of --layers");
    const char *name = paged__args_model(p->cli, o->model, "MODEL");
    if (!name) return PAGED__EXIT_USAGE;
    const paged_shape *shape = paged_shape_find(name);
    if (!shape && o->weight_bits > 0)
        return paged__usage_error(p->cli, "--weight-bits belongs to a shape with a name");
    if (!shape) return take_file(p, name);
    take_shape(p, shape, o->weight_bits);
    return PAGED__EXIT_OK;
}

/* ---- blocks, memory, lengths ---- */

size_t paged__planner_token_bytes(const paged__planner *p, paged_type type) {
    size_t bytes = 0;
    for (int32_t g = 0; g < p->n_groups; g++) {
        paged_group_config group = p->groups[g];
        group.type = type;
        bytes += paged_block_bytes(&group, 1);
    }
    return bytes;
}

/* Tokens of a page that holds keys and values of one head of one layer. */
static int take_page(paged__planner *p, const plan_options *o) {
    paged_group_config head = p->groups[0];
    if (o->block_size) return paged__usage_error(p->cli, "either --block-size or --page-size, not both");
    head.n_layers = head.n_kv_heads = 1;
    size_t token = paged_block_bytes(&head, 1);
    if (o->page_size % token)
        return paged__error(p->cli,
                            "a page of %zu bytes holds no whole number of tokens; one takes %zu in one head",
                            o->page_size, token);
    if (o->page_size / token > 1024)
        return paged__error(p->cli,
                            "a page of %zu bytes holds %zu tokens of %zu bytes; a block has at most 1024",
                            o->page_size, o->page_size / token, token);
    p->block_size = (int32_t)(o->page_size / token);
    return PAGED__EXIT_OK;
}

static int take_profile(paged__cli *cli, plan_options *o) {
    if (o->profile == PROFILE_NONE) return PAGED__EXIT_OK;
    if (o->block_size || o->page_size)
        return paged__usage_error(cli, "--profile %s says what a block is; leave out --%s",
                                  profiles[o->profile], o->block_size ? "block-size" : "page-size");
    if (o->profile == PROFILE_SEED)
        o->page_size = 16384;
    else
        o->block_size = 128;
    return PAGED__EXIT_OK;
}

/* Notes what an Ascend card's attention would refuse of these keys and values; heads of queries are not
 * known here, so each KV head counts for one. */
static void judge_for_ascend(const paged__planner *p) {
    for (int32_t g = 0; g < p->n_groups; g++) {
        const paged_group_config *group = &p->groups[g];
        int32_t n_blocks = (p->n_ctx - 1) / p->block_size + 1;
        paged_ascend_config call = {.struct_size = sizeof call,
                                    .path = PAGED_ASCEND_PREFILL,
                                    .q_type =
                                        group->type == PAGED_TYPE_BF16 ? PAGED_TYPE_BF16 : PAGED_TYPE_F16,
                                    .kv_type = (int32_t)group->type,
                                    .kv_layout = PAGED_ASCEND_BNNBSD,
                                    .n_heads = group->n_kv_heads,
                                    .n_kv_heads = group->n_kv_heads,
                                    .head_dim_k = group->head_dim_k,
                                    .head_dim_v = group->head_dim_v,
                                    .block_size = p->block_size,
                                    .batch = 1,
                                    .max_q = 2,
                                    .max_k = p->n_ctx,
                                    .n_blocks = n_blocks,
                                    .table_rows = 1,
                                    .table_cols = n_blocks};
        paged_ascend_finding found[8];
        int32_t n = PAGED_MIN(paged_ascend_check(&call, found, 8), 8);
        for (int32_t i = 0; i < n; i++)
            paged__note(p->cli, "Ascend would refuse it (%s): %s", found[i].rule->id, found[i].message);
    }
}

static int take_memory(paged__planner *p, const plan_options *o) {
    if (o->memory && o->pool_bytes)
        return paged__usage_error(p->cli, "either --memory or --pool-bytes, not both");
    p->memory_bytes = o->memory;
    p->pool_bytes = o->pool_bytes;
    if (!o->memory) return PAGED__EXIT_OK;
    if (o->memory <= p->weight_bytes)
        return paged__error(p->cli, "weights take %zu bytes of the %zu of --memory, so no key fits",
                            p->weight_bytes, o->memory);
    p->pool_bytes = o->memory - p->weight_bytes;
    return PAGED__EXIT_OK;
}

static int take_lengths(paged__planner *p, const char *text) {
    if (!text) {
        for (int64_t n = 128; n < p->n_ctx; n *= 8) p->lengths[p->n_lengths++] = (int32_t)n;
        p->lengths[p->n_lengths++] = p->n_ctx;
        return PAGED__EXIT_OK;
    }
    for (const char *at = text;; at++) {
        char *end;
        long n = at[0] >= '0' && at[0] <= '9' ? strtol(at, &end, 10) : 0;
        if (n < 1 || n > p->n_ctx || (*end && *end != ','))
            return paged__usage_error(p->cli,
                                      "--lengths takes numbers from 1 to the context %d, such as "
                                      "128,1024, not '%s'",
                                      p->n_ctx, text);
        if (p->n_lengths == PAGED__LENGTHS_MAX)
            return paged__usage_error(p->cli, "--lengths has more than %d numbers", PAGED__LENGTHS_MAX);
        p->lengths[p->n_lengths++] = (int32_t)n;
        if (!*end) return PAGED__EXIT_OK;
        at = end;
    }
}

static int make_plans(paged__planner *p) {
    paged_error err;
    for (int32_t way = 0; way < PAGED_PLAN_WAYS; way++) {
        int32_t block_size = way == PAGED_PLAN_PACKED ? p->pack_block_size : p->block_size;
        if (paged_plan_init(&p->plans[way], (paged_plan_way)way, p->groups, p->n_groups, block_size, p->n_ctx,
                            &err) != PAGED_OK)
            return paged__error(p->cli, "%s", err.message);
    }
    return PAGED__EXIT_OK;
}

static int prepare(paged__planner *p, const plan_options *o) {
    int code = take_model(p, o);
    if (code != PAGED__EXIT_OK) return code;
    for (int32_t g = 0; g < p->n_groups; g++)
        p->groups[g].type =
            paged_engine_kv_type(paged__kv_type_of(o->kv_choice), NULL, p->groups[g].head_dim_k);
    if (o->ctx) p->n_ctx = o->ctx;
    p->n_requests = o->requests;
    p->block_size = o->block_size ? o->block_size : 16;
    if (o->page_size) code = take_page(p, o);
    bool packs = p->block_size >= 32 && p->block_size <= 256 && p->block_size % PAGED_TILE == 0;
    p->pack_block_size = packs ? p->block_size : 64;
    if (code == PAGED__EXIT_OK) code = take_memory(p, o);
    if (code == PAGED__EXIT_OK) code = take_lengths(p, o->lengths);
    if (code == PAGED__EXIT_OK) code = make_plans(p);
    if (code == PAGED__EXIT_OK)
        code =
            o->trace ? paged__load_read(p->cli, o->trace, &p->load) : paged__load_generate(p->cli, &p->load);
    if (code == PAGED__EXIT_OK) code = paged__load_cut(p->cli, &p->load, p->n_ctx);
    if (code == PAGED__EXIT_OK && p->load.n_left_out)
        paged__note(p->cli, "%d of %d requests are longer than %d tokens and left out", p->load.n_left_out,
                    p->load.n_left_out + p->load.n_requests, p->n_ctx);
    return code;
}

/* ---- the numbers ---- */

/* Share of the bytes taken that hold no token. */
static int waste(paged__planner *p, paged_plan_way way, int32_t block_size, double *share) {
    paged_plan plan;
    paged_plan_load load;
    paged_error err;
    if (paged_plan_init(&plan, way, p->groups, p->n_groups, block_size, p->n_ctx, &err) != PAGED_OK ||
        paged_plan_life(&plan, p->load.requests, p->load.n_requests, &load, &err) != PAGED_OK)
        return paged__error(p->cli, "%s", err.message);
    *share = 1 - (double)load.sum_stored / (double)load.sum_taken;
    return PAGED__EXIT_OK;
}

static int sweep(paged__planner *p) {
    static const int32_t sizes[PAGED__SWEEP] = {8, 16, 32, 64, 128, 256};
    int code = waste(p, PAGED_PLAN_CONTIGUOUS, p->block_size, &p->contiguous);
    for (int32_t i = 0; i < PAGED__SWEEP && code == PAGED__EXIT_OK; i++) {
        p->sweep[i].block_size = sizes[i];
        p->sweep[i].n_entries = (p->n_ctx - 1) / sizes[i] + 1;
        p->sweep[i].table_bytes = (size_t)p->n_groups * (size_t)p->sweep[i].n_entries * sizeof(int32_t);
        p->sweep[i].packed = -1;
        code = waste(p, PAGED_PLAN_PAGED, sizes[i], &p->sweep[i].paged);
        if (code == PAGED__EXIT_OK && sizes[i] >= 32)
            code = waste(p, PAGED_PLAN_PACKED, sizes[i], &p->sweep[i].packed);
    }
    return code;
}

static void draw(void *user, const paged_plan_step *step) {
    paged__curve *curve = user;
    if (step->step / curve->width >= PAGED__CURVE) {
        for (int32_t i = 0; i < PAGED__CURVE; i++)
            curve->sum[i] = i < PAGED__CURVE / 2 ? curve->sum[2 * i] + curve->sum[2 * i + 1] : 0;
        curve->width *= 2;
    }
    curve->sum[step->step / curve->width] += (double)step->stored_bytes;
    curve->n_steps = step->step + 1;
}

double paged__curve_mean(const paged__curve *curve, int64_t first_step) {
    int64_t n = PAGED_MIN(curve->width, curve->n_steps - first_step);
    return curve->sum[first_step / curve->width] / (double)n;
}

static int replay(paged__planner *p) {
    for (int32_t way = 0; way < PAGED_PLAN_WAYS; way++) {
        paged_error err;
        p->ways[way].curve.width = 1;
        paged_status status =
            paged_plan_replay(&p->plans[way], p->pool_bytes, p->load.requests, p->load.n_requests, draw,
                              &p->ways[way].curve, &p->ways[way].load, &err);
        p->ways[way].fits = status == PAGED_OK;
        if (status == PAGED_ERR_NO_BLOCKS)
            paged__note(p->cli, "%s: %s", paged_plan_way_name((paged_plan_way)way), err.message);
        else if (status != PAGED_OK)
            return paged__error(p->cli, "%s", err.message);
    }
    return PAGED__EXIT_OK;
}

static int list_shapes(paged__cli *cli, bool json) {
    json_t *all = json_array();
    if (!json)
        paged__out_printf(cli, "%-18s %7s %9s %8s %9s  %s\n", "shape", "layers", "KV heads", "head_dim",
                          "context", "a token in f16");
    for (int32_t i = 0; paged_shape_at(i); i++) {
        const paged_shape *s = paged_shape_at(i);
        paged__planner p = {.n_groups = s->n_groups};
        memcpy(p.groups, s->groups, sizeof p.groups);
        int32_t n_layers = s->groups[0].n_layers + s->groups[1].n_layers;
        int32_t window = s->groups[s->n_groups - 1].window;
        size_t bytes = paged__planner_token_bytes(&p, PAGED_TYPE_F16);
        if (json)
            json_array_append_new(all, json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:I, s:I}", "name",
                                                 s->name, "layers", n_layers, "layers_with_window",
                                                 window ? s->groups[s->n_groups - 1].n_layers : 0, "window",
                                                 window, "heads", s->n_heads, "kv_heads",
                                                 s->groups[0].n_kv_heads, "head_dim", s->groups[0].head_dim_k,
                                                 "context", s->n_ctx, "parameters", (json_int_t)s->n_params,
                                                 "token_bytes_f16", (json_int_t)bytes));
        else
            paged__out_printf(cli, "%-18s %7d %9d %8d %9d  %s%s\n", s->name, n_layers,
                              s->groups[0].n_kv_heads, s->groups[0].head_dim_k, s->n_ctx,
                              paged__size(bytes).text, window ? ", with windows" : "");
    }
    if (json) return paged__out_json(cli, all, false);
    json_decref(all);
    return PAGED__EXIT_OK;
}

static int plan_command(paged__cli *cli, int argc, char **argv) {
    plan_options o = {.requests = 8};
    int code;
    if (!paged__args_parse(cli, &paged__command_plan, argc, argv, &o, &code)) return code;
    cli->quiet = o.quiet;
    paged__log_to_stderr(cli, o.quiet ? PAGED_LOG_ERROR : PAGED_LOG_WARN);
    if ((o.shapes || o.documents) && o.model)
        return paged__usage_error(cli, "--%s takes no MODEL, such as '%s'", o.shapes ? "shapes" : "documents",
                                  o.model);
    if (o.shapes) return list_shapes(cli, o.json);
    if (o.documents) return paged__documents(cli, o.json);
    paged__planner p = {.cli = cli};
    code = take_profile(cli, &o);
    if (code == PAGED__EXIT_OK) code = prepare(&p, &o);
    if (code == PAGED__EXIT_OK && o.profile == PROFILE_ASCEND) judge_for_ascend(&p);
    if (code == PAGED__EXIT_OK) code = sweep(&p);
    if (code == PAGED__EXIT_OK && p.pool_bytes) code = replay(&p);
    if (code == PAGED__EXIT_OK && o.svg) code = paged__planner_svg(&p, o.svg);
    if (code == PAGED__EXIT_OK && o.json) code = paged__planner_json(&p);
    if (code == PAGED__EXIT_OK && !o.json) paged__planner_text(&p);
    paged__load_free(&p.load);
    return code;
}

const paged__command paged__command_plan = {
    .name = "plan",
    .purpose = "say what memory keys and values take, and how many requests fit",
    .usage = "[MODEL] [options]",
    .example = "paged plan llama-2-13b --memory 80GB\n"
               "  paged plan model.gguf --pool-bytes 1GiB --trace requests.csv --svg plan.svg\n"
               "  paged plan --layers 32 --kv-heads 32 --head-dim 64 --page-size 16K --ctx 8192\n"
               "  paged plan llama-3-8b --profile ascend --memory 32GB\n"
               "  paged plan --documents",
    .options = options_table,
    .n_options = sizeof options_table / sizeof options_table[0],
    .run = plan_command,
};
