/* cli/inspect.c: paged inspect: what a model file holds and what memory it will take. */
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "cli/cli.h"
#include "cli/plan.h"
#include "paged/engine.h"
#include "paged/model.h"

enum { BLOCK_SIZE = 16, TEMPLATE_LINES = 5, TEMPLATE_COLUMNS = 76 };

typedef struct inspect_options {
    const char *model;
    bool json;
} inspect_options;

static const paged__option options_table[] = {
    {.kind = PAGED__OPTION_HEADING, .name = "Options"},
    {PAGED__OPTION_OPERAND, 0, "MODEL", NULL, offsetof(inspect_options, model), 0, 0, NULL,
     "a GGUF file (default: $PAGED_MODEL)"},
    {PAGED__OPTION_FLAG, 0, "json", NULL, offsetof(inspect_options, json), 0, 0, NULL, "one JSON object"},
};

/* What an engine would take here without --kv-type. */
static paged_type default_type(const paged_model_info *m) {
    return paged_engine_kv_type(PAGED_KV_AUTO, NULL, m->head_dim_k);
}

/* ---- as JSON ---- */

static json_t *text_or_null(const char *text) {
    return text ? paged__json_text(text, strlen(text)) : json_null();
}

static json_t *weights_json(const paged_model_info *m) {
    json_t *types = json_array();
    for (int32_t i = 0; i < m->n_weight_types; i++) {
        json_array_append_new(types,
                              json_pack("{s:o, s:i, s:I}", "type", text_or_null(m->weight_types[i].name),
                                        "tensors", (int)m->weight_types[i].n_tensors, "bytes",
                                        (json_int_t)m->weight_types[i].bytes));
    }
    return types;
}

static json_t *tokenizer_json(const paged_model_info *m, const paged_tokenizer *tok) {
    json_t *ends = json_array();
    for (int32_t i = 0; i < paged_token_count(tok); i++) {
        if (paged_token_is_eog(tok, i)) json_array_append_new(ends, json_integer(i));
    }
    return json_pack("{s:o, s:o, s:i, s:i, s:i, s:o}", "kind", text_or_null(m->tokenizer), "pre",
                     text_or_null(m->pre), "tokens", (int)paged_token_count(tok), "bos",
                     (int)paged_token_bos(tok), "eos", (int)paged_token_eos(tok), "end_of_generation", ends);
}

static json_t *plan_json(const paged_model_info *m) {
    const paged_type type = default_type(m);
    size_t pool = paged__kv_bytes(m, type, BLOCK_SIZE, m->n_ctx_train);
    return json_pack("{s:i, s:s, s:i, s:i, s:I, s:I}", "context", (int)m->n_ctx_train, "kv_type",
                     paged__type_name(type), "block_size", (int)BLOCK_SIZE, "blocks",
                     (int)((m->n_ctx_train - 1) / BLOCK_SIZE + 1), "pool_bytes", (json_int_t)pool,
                     "weight_bytes", (json_int_t)m->weight_bytes);
}

static int print_json(paged__cli *cli, const paged_model_info *m, const paged_tokenizer *tok) {
    json_t *object =
        json_pack("{s:o, s:o, s:I, s:I, s:I, s:i, s:I, s:s, s:f}", "name", text_or_null(m->name),
                  "architecture", text_or_null(m->arch), "file_bytes", (json_int_t)m->file_bytes,
                  "weight_bytes", (json_int_t)m->weight_bytes, "parameters", (json_int_t)m->n_params,
                  "tensors", (int)m->n_tensors, "packed_bytes", (json_int_t)m->packed_bytes, "linear_kernels",
                  m->linear_kernels, "load_ms", m->load_ms);
    json_t *shape =
        json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:b}", "layers",
                  (int)m->n_layers, "embd", (int)m->n_embd, "ff", (int)m->n_ff, "heads", (int)m->n_heads,
                  "kv_heads", (int)m->n_kv_heads, "head_dim_k", (int)m->head_dim_k, "head_dim_v",
                  (int)m->head_dim_v, "vocab", (int)m->n_vocab, "context", (int)m->n_ctx_train, "window",
                  (int)m->window, "windowed_layers", (int)m->n_windowed_layers, "rope_freq_base",
                  (double)m->rope_freq_base, "tied_output", (int)m->tied_output);
    json_t *kv =
        json_pack("{s:I, s:I}", "f16", (json_int_t)paged__token_bytes(m, PAGED_TYPE_F16, m->n_layers), "f32",
                  (json_int_t)paged__token_bytes(m, PAGED_TYPE_F32, m->n_layers));
    if (json_object_update_new(object, shape) != 0 ||
        json_object_set_new(object, "weights", weights_json(m)) != 0 ||
        json_object_set_new(object, "tokenizer", tokenizer_json(m, tok)) != 0 ||
        json_object_set_new(object, "chat_template", text_or_null(m->chat_template)) != 0 ||
        json_object_set_new(object, "kv_bytes_per_token", kv) != 0 ||
        json_object_set_new(object, "plan", plan_json(m)) != 0) {
        json_decref(object);
        object = NULL;
    }
    return paged__out_json(cli, object, false);
}

/* ---- as text ---- */

static void print_row(paged__cli *cli, const char *label, const char *text) {
    paged__out_printf(cli, "%-14s ", label);
    paged__out_safe(cli, text, strlen(text));
    paged__out_write(cli, "\n", 1);
}

static void print_shape(paged__cli *cli, const paged_model_info *m, const char *path) {
    print_row(cli, "model", paged__model_name(m, path));
    paged__out_printf(cli, "%-14s %s, %d layers, width %d, feed-forward %d\n", "architecture", m->arch,
                      m->n_layers, m->n_embd, m->n_ff);
    paged__out_printf(cli, "%-14s %d heads on %d KV heads, head_dim %d", "attention", m->n_heads,
                      m->n_kv_heads, m->head_dim_k);
    if (m->head_dim_v != m->head_dim_k) paged__out_printf(cli, " (keys), %d (values)", m->head_dim_v);
    if (m->n_windowed_layers)
        paged__out_printf(cli, "; %d of %d layers see the last %d tokens", m->n_windowed_layers, m->n_layers,
                          m->window);
    paged__out_printf(cli, "\n%-14s %d tokens, ", "context", m->n_ctx_train);
    if (m->rope_freq_base > 0)
        paged__out_printf(cli, "RoPE base %g\n", (double)m->rope_freq_base);
    else
        paged__out_printf(cli, "learned positions\n");
    paged__out_printf(cli, "%-14s %.1f million in %d tensors%s\n", "parameters", (double)m->n_params / 1e6,
                      m->n_tensors, m->tied_output ? ", the embedding is the output matrix too" : "");
    paged__out_printf(cli, "%-14s %s of %s in the file:", "weights", paged__size(m->weight_bytes).text,
                      paged__size(m->file_bytes).text);
    for (int32_t i = 0; i < m->n_weight_types; i++) {
        int32_t n = m->weight_types[i].n_tensors;
        paged__out_printf(cli, "%s %s %s (%d tensor%s)", i ? "," : "",
                          paged__size(m->weight_types[i].bytes).text, m->weight_types[i].name, n,
                          n == 1 ? "" : "s");
    }
    paged__out_printf(cli, "\n%-14s %s in %.3f s: %s\n", "packed", paged__size(m->packed_bytes).text,
                      m->load_ms / 1000, m->linear_kernels);
}

static void print_token(paged__cli *cli, const paged_tokenizer *tok, const char *what, int32_t token) {
    char text[256];
    int32_t n = paged_token_bytes(tok, token, true, text, sizeof text);
    if (n < 0 || n > (int32_t)sizeof text) return;
    paged__out_printf(cli, "%s%d ", what, token);
    paged__out_safe(cli, text, (size_t)n);
}

static void print_tokenizer(paged__cli *cli, const paged_model_info *m, const paged_tokenizer *tok) {
    paged__out_printf(cli, "%-14s %s%s%s, %d tokens", "tokenizer", m->tokenizer,
                      m->pre[0] ? ", pre-split rule " : "", m->pre, paged_token_count(tok));
    print_token(cli, tok, "; BOS ", paged_token_bos(tok));
    print_token(cli, tok, "; EOS ", paged_token_eos(tok));
    paged__out_printf(cli, "\n%-14s ", "ends");
    const char *gap = "";
    for (int32_t i = 0; i < paged_token_count(tok); i++) {
        if (!paged_token_is_eog(tok, i)) continue;
        print_token(cli, tok, gap, i);
        gap = ", ";
    }
    paged__out_write(cli, "\n", 1);
}

static void print_template(paged__cli *cli, const char *text) {
    if (!text) {
        print_row(cli, "chat template", "none: paged run continues the prompt as it is");
        return;
    }
    paged__out_printf(cli, "%-14s %zu bytes\n", "chat template", strlen(text));
    for (int32_t i = 0; i < TEMPLATE_LINES && text; i++) {
        size_t len = strcspn(text, "\n");
        paged__out_write(cli, "  | ", 4);
        paged__out_safe(cli, text, PAGED_MIN(len, (size_t)TEMPLATE_COLUMNS));
        if (len > TEMPLATE_COLUMNS) paged__out_write(cli, " ...", 4);
        paged__out_write(cli, "\n", 1);
        text = text[len] ? text + len + 1 : NULL;
    }
    if (text) paged__out_write(cli, "  | ...\n", 8);
}

static void print_plan(paged__cli *cli, const paged_model_info *m) {
    const paged_type type = default_type(m);
    const char *name = paged__type_name(type);
    size_t pool = paged__kv_bytes(m, type, BLOCK_SIZE, m->n_ctx_train);
    const int32_t n_global = m->n_layers - m->n_windowed_layers;
    paged__out_printf(cli, "%-14s %s a token in %s, %s in f32", "KV cache",
                      paged__size(paged__token_bytes(m, type, m->n_layers)).text, name,
                      paged__size(paged__token_bytes(m, PAGED_TYPE_F32, m->n_layers)).text);
    if (m->n_windowed_layers)
        paged__out_printf(cli, "; %s in %s behind the window",
                          paged__size(paged__token_bytes(m, type, n_global)).text, name);
    paged__out_printf(cli, "\n");
    paged__out_printf(cli, "%-14s context %d in %s: pool %s (%d blocks of %d tokens) + weights %s = %s\n",
                      "plan", m->n_ctx_train, name, paged__size(pool).text,
                      (m->n_ctx_train - 1) / BLOCK_SIZE + 1, BLOCK_SIZE, paged__size(m->weight_bytes).text,
                      paged__size(pool + m->weight_bytes).text);
}

static int inspect_command(paged__cli *cli, int argc, char **argv) {
    inspect_options o = {0};
    int code;
    if (!paged__args_parse(cli, &paged__command_inspect, argc, argv, &o, &code)) return code;
    const char *path = paged__args_model(cli, o.model, "MODEL");
    if (!path) return PAGED__EXIT_USAGE;
    paged__log_to_stderr(cli, PAGED_LOG_WARN);

    paged_model *model = NULL;
    paged_error err;
    paged_model_config config = {.struct_size = sizeof config};
    paged_status status = paged_model_load(path, &config, &model, &err);
    if (status != PAGED_OK) return paged__error(cli, "%s", err.message);
    paged_model_info info;
    paged_model_get_info(model, &info);
    const paged_tokenizer *tok = paged_model_tokenizer(model);
    if (o.json) {
        code = print_json(cli, &info, tok);
    } else {
        print_shape(cli, &info, path);
        print_tokenizer(cli, &info, tok);
        print_template(cli, info.chat_template);
        print_plan(cli, &info);
    }
    paged_model_free(model);
    return code;
}

const paged__command paged__command_inspect = {
    .name = "inspect",
    .purpose = "show what a model file holds and what memory it takes",
    .usage = "MODEL [--json]",
    .example = "paged inspect model.gguf",
    .options = options_table,
    .n_options = sizeof options_table / sizeof options_table[0],
    .run = inspect_command,
};
