/* cli/plan_text.c: a plan as text, and as one JSON object. */
#include <string.h>

#include "base/base.h"
#include "cli/plan.h"
#include "cli/planner.h"

static const paged_type types[PAGED__TYPES] = {PAGED_TYPE_F16, PAGED_TYPE_F32, PAGED_TYPE_BF16,
                                               PAGED_TYPE_I8};

/* The tables of the second document: one for K and one for V of each layer and head, entries of 8 bytes. */
enum { DOCUMENT_ENTRY_BYTES = 8 };

/* As columns and rows come. */
static const paged_plan_way order[PAGED_PLAN_WAYS] = {PAGED_PLAN_PAGED, PAGED_PLAN_PACKED,
                                                      PAGED_PLAN_CONTIGUOUS};

static int64_t document_tables(const paged__planner *p) {
    int64_t n = 0;
    for (int32_t g = 0; g < p->n_groups; g++) n += 2ll * p->groups[g].n_layers * p->groups[g].n_kv_heads;
    return n;
}

static size_t block_bytes(const paged__planner *p) {
    size_t bytes = 0;
    for (int32_t g = 0; g < p->n_groups; g++) bytes += p->plans[PAGED_PLAN_PAGED].groups[g].block_bytes;
    return bytes;
}

/* ---- text ---- */

static void print_model(const paged__planner *p) {
    paged__cli *cli = p->cli;
    paged__out_printf(cli, "%-15s ", "model");
    paged__out_safe(cli, p->model, strlen(p->model));
    for (int32_t g = 0; g < p->n_groups; g++) {
        const paged_group_config *group = &p->groups[g];
        paged__out_printf(cli, "%s%d layers", g ? "; " : ": ", group->n_layers);
        if (group->window) paged__out_printf(cli, " with a window of %d", group->window);
        if (g == 0)
            paged__out_printf(cli, ", %d KV heads, head_dim %d", group->n_kv_heads, group->head_dim_k);
    }
    paged__out_printf(cli, "; sequences of up to %d tokens\n", p->n_ctx);
    if (p->weight_bytes)
        paged__out_printf(cli, "%-15s %s\n", "weights", paged__size_both(p->weight_bytes).text);
    paged__out_printf(cli, "%-15s ", "a token");
    for (int32_t i = 0; i < PAGED__TYPES; i++)
        paged__out_printf(cli, "%s%s %zu bytes", i ? ", " : "", paged__type_name(types[i]),
                          paged__planner_token_bytes(p, types[i]));
    size_t request = paged_plan_peak_bytes(&p->plans[PAGED_PLAN_PAGED], p->n_ctx);
    paged__out_printf(cli, "\n%-15s %s: %d tokens in %s\n", "a request", paged__size_both(request).text,
                      p->n_ctx, paged__type_name(p->groups[0].type));
    paged__out_printf(cli, "%-15s %s of %d tokens\n", "a block", paged__size_both(block_bytes(p)).text,
                      p->block_size);
    paged__out_printf(cli, "%-15s %s: %d requests of %d tokens\n", "pool for all",
                      paged__size_both(request * (size_t)p->n_requests).text, p->n_requests, p->n_ctx);
}

static void print_tables(const paged__planner *p) {
    const paged_plan *plan = &p->plans[PAGED_PLAN_PAGED];
    int32_t n_entries = paged_plan_table_entries(plan);
    int64_t n_tables = document_tables(p);
    paged__out_printf(p->cli,
                      "%-15s %d entries a sequence, int32, for all layers and heads%s: %s; with padding %s "
                      "for %d requests\n",
                      "block tables", n_entries, p->n_groups > 1 ? " of a group" : "",
                      paged__size_both((size_t)p->n_groups * (size_t)n_entries * sizeof(int32_t)).text,
                      paged__size_both(paged_plan_table_bytes(plan, p->n_requests)).text, p->n_requests);
    paged__out_printf(p->cli,
                      "%-15s the same as one table for K and V of each layer and head, entries of 8 bytes: "
                      "%lld tables, %s a request\n",
                      "", (long long)n_tables,
                      paged__size_both((size_t)n_tables * (size_t)n_entries * DOCUMENT_ENTRY_BYTES).text);
}

static void print_lengths(const paged__planner *p) {
    paged__cli *cli = p->cli;
    paged__out_printf(cli, "\n%9s %24s %7s %24s %7s", "tokens", "paged", "unused", "contiguous", "saved");
    if (p->pool_bytes) paged__out_printf(cli, "  fit: paged  packed tails    contiguous");
    paged__out_write(cli, "\n", 1);
    for (int32_t i = 0; i < p->n_lengths; i++) {
        int32_t n = p->lengths[i];
        size_t paged = paged_plan_peak_bytes(&p->plans[PAGED_PLAN_PAGED], n);
        size_t whole = paged_plan_peak_bytes(&p->plans[PAGED_PLAN_CONTIGUOUS], n);
        size_t stored = paged_plan_stored_bytes(&p->plans[PAGED_PLAN_PAGED], n);
        paged__out_printf(cli, "%9d %24s %6.1f%% %24s %6.1f%%", n, paged__size_both(paged).text,
                          100 - 100 * (double)stored / (double)paged, paged__size_both(whole).text,
                          100 - 100 * (double)paged / (double)whole);
        for (int32_t w = 0; w < PAGED_PLAN_WAYS && p->pool_bytes; w++) {
            paged__out_printf(cli, "%*lld", w == 0 ? 12 : 14,
                              (long long)paged_plan_fit(&p->plans[order[w]], p->pool_bytes, n));
        }
        paged__out_write(cli, "\n", 1);
    }
}

static void print_sweep(const paged__planner *p) {
    paged__cli *cli = p->cli;
    paged__out_printf(cli, "\nLoad: ");
    paged__out_safe(cli, p->load.name, strlen(p->load.name));
    paged__out_printf(cli, ", %d requests. Of the memory taken, mean over all steps, hold no token:\n",
                      p->load.n_requests);
    paged__out_printf(cli, "%9s %9s %12s %9s %14s\n", "block", "entries", "a table", "paged", "packed tails");
    for (int32_t i = 0; i < PAGED__SWEEP; i++) {
        paged__out_printf(cli, "%9d %9d %12s %8.2f%%", p->sweep[i].block_size, p->sweep[i].n_entries,
                          paged__size(p->sweep[i].table_bytes).text, 100 * p->sweep[i].paged);
        if (p->sweep[i].packed >= 0) paged__out_printf(cli, " %13.2f%%", 100 * p->sweep[i].packed);
        paged__out_write(cli, "\n", 1);
    }
    paged__out_printf(cli, "contiguous, %d tokens reserved for everyone: %.2f%%\n", p->n_ctx,
                      100 * p->contiguous);
}

static void print_pool(const paged__planner *p) {
    paged__cli *cli = p->cli;
    paged__out_printf(cli, "\nPool of %s, all requests waiting from the start, mean over steps:\n",
                      paged__size_both(p->pool_bytes).text);
    paged__out_printf(cli, "%-24s %9s %6s %11s %8s %8s %8s\n", "", "at once", "most", "hold tokens", "unused",
                      "free", "gave way");
    for (int32_t i = 0; i < PAGED_PLAN_WAYS; i++) {
        const paged_plan_way w = order[i];
        const paged_plan_load *load = &p->ways[w].load;
        char label[64];
        snprintf(label, sizeof label, w == PAGED_PLAN_CONTIGUOUS ? "%s" : "%s, block %d",
                 paged_plan_way_name(w), p->plans[w].block_size);
        if (!p->ways[w].fits) {
            paged__out_printf(cli, "%-24s a request does not fit\n", label);
            continue;
        }
        double all = (double)load->n_steps * (double)p->pool_bytes;
        double stored = (double)load->sum_stored / all, taken = (double)load->sum_taken / all;
        paged__out_printf(cli, "%-24s %9.1f %6d %10.1f%% %7.1f%% %7.1f%% %8lld\n", label,
                          (double)load->sum_running / (double)load->n_steps, load->max_running, 100 * stored,
                          100 * (taken - stored), 100 * (1 - taken), (long long)load->n_preempted);
    }
}

void paged__planner_text(const paged__planner *p) {
    print_model(p);
    print_tables(p);
    if (p->memory_bytes)
        paged__out_printf(p->cli, "%-15s %s less the weights: %s for keys and values\n", "memory",
                          paged__size_both(p->memory_bytes).text, paged__size_both(p->pool_bytes).text);
    print_lengths(p);
    print_sweep(p);
    if (p->pool_bytes) print_pool(p);
}

/* ---- JSON ---- */

static json_t *groups_json(const paged__planner *p) {
    json_t *list = json_array();
    for (int32_t g = 0; g < p->n_groups; g++) {
        const paged_group_config *group = &p->groups[g];
        json_array_append_new(list,
                              json_pack("{s:i, s:i, s:i, s:i, s:i}", "layers", group->n_layers, "kv_heads",
                                        group->n_kv_heads, "head_dim_k", group->head_dim_k, "head_dim_v",
                                        group->head_dim_v ? group->head_dim_v : group->head_dim_k, "window",
                                        group->window));
    }
    return list;
}

static json_t *lengths_json(const paged__planner *p) {
    json_t *list = json_array();
    for (int32_t i = 0; i < p->n_lengths; i++) {
        int32_t n = p->lengths[i];
        json_t *row = json_pack("{s:i, s:I}", "tokens", n, "stored_bytes",
                                (json_int_t)paged_plan_stored_bytes(&p->plans[PAGED_PLAN_PAGED], n));
        for (int32_t w = 0; w < PAGED_PLAN_WAYS; w++) {
            json_t *way = json_pack("{s:I}", "bytes", (json_int_t)paged_plan_peak_bytes(&p->plans[w], n));
            if (p->pool_bytes)
                json_object_set_new(way, "fit", json_integer(paged_plan_fit(&p->plans[w], p->pool_bytes, n)));
            json_object_set_new(row, paged_plan_way_name((paged_plan_way)w), way);
        }
        json_array_append_new(list, row);
    }
    return list;
}

static json_t *sweep_json(const paged__planner *p) {
    json_t *list = json_array();
    for (int32_t i = 0; i < PAGED__SWEEP; i++)
        json_array_append_new(
            list, json_pack("{s:i, s:i, s:I, s:f, s:o}", "block_size", p->sweep[i].block_size, "entries",
                            p->sweep[i].n_entries, "table_bytes", (json_int_t)p->sweep[i].table_bytes,
                            "paged", p->sweep[i].paged, "packed tails",
                            p->sweep[i].packed < 0 ? json_null() : json_real(p->sweep[i].packed)));
    return list;
}

/* Share of the pool that holds tokens, mean over every `steps_a_value` steps. */
static json_t *curve_json(const paged__planner *p, const paged__curve *curve) {
    json_t *values = json_array();
    for (int64_t from = 0; from < curve->n_steps; from += curve->width)
        json_array_append_new(values, json_real(paged__curve_mean(curve, from) / (double)p->pool_bytes));
    return json_pack("{s:I, s:o}", "steps_a_value", (json_int_t)curve->width, "stored", values);
}

static json_t *way_json(const paged__planner *p, paged_plan_way way) {
    const paged_plan_load *load = &p->ways[way].load;
    double all = (double)load->n_steps * (double)p->pool_bytes;
    if (!p->ways[way].fits) return json_null();
    return json_pack("{s:i, s:I, s:f, s:i, s:f, s:f, s:I, s:o}", "block_size", p->plans[way].block_size,
                     "steps", (json_int_t)load->n_steps, "running",
                     (double)load->sum_running / (double)load->n_steps, "most", load->max_running, "stored",
                     (double)load->sum_stored / all, "taken", (double)load->sum_taken / all, "gave_way",
                     (json_int_t)load->n_preempted, "curve", curve_json(p, &p->ways[way].curve));
}

static json_t *ways_json(const paged__planner *p) {
    json_t *object = json_object();
    for (int32_t i = 0; i < PAGED_PLAN_WAYS; i++)
        json_object_set_new(object, paged_plan_way_name(order[i]), way_json(p, order[i]));
    return object;
}

int paged__planner_json(const paged__planner *p) {
    const paged_plan *plan = &p->plans[PAGED_PLAN_PAGED];
    int32_t n_entries = paged_plan_table_entries(plan);
    size_t request = paged_plan_peak_bytes(plan, p->n_ctx);
    json_t *bytes = json_object();
    for (int32_t i = 0; i < PAGED__TYPES; i++)
        json_object_set_new(bytes, paged__type_name(types[i]),
                            json_integer((json_int_t)paged__planner_token_bytes(p, types[i])));
    json_t *tables = json_pack("{s:i, s:I, s:I, s:I, s:I}", "entries", n_entries, "bytes_per_request",
                               (json_int_t)p->n_groups * n_entries * (json_int_t)sizeof(int32_t), "bytes",
                               (json_int_t)paged_plan_table_bytes(plan, p->n_requests), "document_tables",
                               (json_int_t)document_tables(p), "document_bytes_per_request",
                               (json_int_t)document_tables(p) * n_entries * DOCUMENT_ENTRY_BYTES);
    json_t *load =
        json_pack("{s:o, s:i, s:i, s:o, s:f}", "name", paged__json_text(p->load.name, strlen(p->load.name)),
                  "requests", p->load.n_requests, "left_out", p->load.n_left_out, "waste", sweep_json(p),
                  "contiguous_waste", p->contiguous);
    json_t *object =
        json_pack("{s:o, s:o, s:i, s:s, s:i, s:o, s:I, s:I, s:i, s:I, s:o, s:o, s:o}", "model",
                  paged__json_text(p->model, strlen(p->model)), "groups", groups_json(p), "context", p->n_ctx,
                  "kv_type", paged__type_name(p->groups[0].type), "block_size", p->block_size, "token_bytes",
                  bytes, "block_bytes", (json_int_t)block_bytes(p), "request_bytes", (json_int_t)request,
                  "requests", p->n_requests, "pool_bytes_for_requests", (json_int_t)request * p->n_requests,
                  "tables", tables, "lengths", lengths_json(p), "load", load);
    if (object && p->weight_bytes)
        json_object_set_new(object, "weight_bytes", json_integer((json_int_t)p->weight_bytes));
    if (object && p->pool_bytes) {
        json_object_set_new(object, "pool_bytes", json_integer((json_int_t)p->pool_bytes));
        json_object_set_new(object, "pool", ways_json(p));
    }
    return paged__out_json(p->cli, object, false);
}
