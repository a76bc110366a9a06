/* cli/plan.c: see plan.h. */
#include "cli/plan.h"

#include <stdio.h>
#include <string.h>

#include "base/base.h"

paged__size_text paged__size(size_t size_bytes) {
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB"};
    paged__size_text size;
    double value = (double)size_bytes;
    int32_t unit = -1;
    /* 1023.95 would be printed as 1024.0. */
    while (unit < 3 && value >= 1023.95) {
        value /= 1024;
        unit++;
    }
    if (unit < 0)
        snprintf(size.text, sizeof size.text, "%zu B", size_bytes);
    else
        snprintf(size.text, sizeof size.text, "%.1f %s", value, units[unit]);
    return size;
}

/* value and letter: "3.125", 'G'. */
static char scaled(size_t size_bytes, double step, char *value, size_t capacity) {
    static const char letters[] = " KMGTPE";
    double x = (double)size_bytes;
    int32_t unit = 0;
    /* 999.95 would be printed as 1000. */
    while (unit < 6 && x >= step * 0.99995) {
        x /= step;
        unit++;
    }
    snprintf(value, capacity, "%.4g", x);
    return letters[unit];
}

paged__size_text paged__size_both(size_t size_bytes) {
    paged__size_text size;
    char binary[16], decimal[16];
    char b = scaled(size_bytes, 1024, binary, sizeof binary);
    char d = scaled(size_bytes, 1000, decimal, sizeof decimal);
    if (size_bytes < 1000)
        snprintf(size.text, sizeof size.text, "%zu B", size_bytes);
    else if (b == ' ')
        snprintf(size.text, sizeof size.text, "%zu B = %s %cB", size_bytes, decimal, d);
    else
        snprintf(size.text, sizeof size.text, "%s %ciB = %s %cB", binary, b, decimal, d);
    return size;
}

const char *paged__type_name(paged_type type) {
    switch (type) {
    case PAGED_TYPE_F16:
        return "f16";
    case PAGED_TYPE_F32:
        return "f32";
    case PAGED_TYPE_BF16:
        return "bf16";
    case PAGED_TYPE_I8:
        return "int8";
    }
    return "?";
}

const char *paged__layout_name(paged_layout layout) {
    return layout == PAGED_LAYOUT_PACKED ? "packed" : "plain";
}

const char *paged__model_name(const paged_model_info *info, const char *path) {
    if (info->name && info->name[0]) return info->name;
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

const char *paged__main_weight_type(const paged_model_info *info) {
    const char *name = "";
    size_t most = 0;
    for (int32_t i = 0; i < info->n_weight_types; i++) {
        if (info->weight_types[i].bytes <= most) continue;
        most = info->weight_types[i].bytes;
        name = info->weight_types[i].name;
    }
    return name;
}

int32_t paged__model_groups(const paged_model_info *info, paged_type type,
                            paged_group_config groups[PAGED_SHAPE_GROUPS_MAX]) {
    const int32_t n_layers[] = {info->n_layers - info->n_windowed_layers, info->n_windowed_layers};
    int32_t n_groups = 0;
    for (int32_t i = 0; i < PAGED_SHAPE_GROUPS_MAX; i++)
        if (n_layers[i] > 0)
            groups[n_groups++] = (paged_group_config){.n_layers = n_layers[i],
                                                      .n_kv_heads = info->n_kv_heads,
                                                      .head_dim_k = info->head_dim_k,
                                                      .head_dim_v = info->head_dim_v,
                                                      .type = type,
                                                      .window = i ? info->window : 0};
    return n_groups;
}

size_t paged__kv_bytes(const paged_model_info *info, paged_type type, int32_t block_size, int64_t n_tokens) {
    paged_group_config groups[PAGED_SHAPE_GROUPS_MAX];
    int32_t n_groups = paged__model_groups(info, type, groups);
    return paged_pool_bytes_for(groups, n_groups, block_size, n_tokens);
}

size_t paged__token_bytes(const paged_model_info *info, paged_type type, int32_t n_layers) {
    const paged_group_config group = {.n_layers = n_layers,
                                      .n_kv_heads = info->n_kv_heads,
                                      .head_dim_k = info->head_dim_k,
                                      .head_dim_v = info->head_dim_v,
                                      .type = type};
    return n_layers > 0 ? paged_block_bytes(&group, 1) : 0;
}

void paged__plan_note(paged__cli *cli, const paged_model_info *model, const paged_engine_info *engine,
                      const char *path) {
    paged__note(cli, "%s (%s, %s): weights %s, %s packed", paged__model_name(model, path), model->arch,
                paged__main_weight_type(model), paged__size(engine->weight_bytes).text,
                paged__size(model->packed_bytes).text);
    if (model->n_windowed_layers > 0 && model->n_windowed_layers < model->n_layers)
        paged__note(cli, "KV pool %s: blocks of %d tokens, %s; %d of %d layers keep %d tokens; context %d",
                    paged__size(engine->pool_bytes).text, engine->block_size,
                    paged__type_name(engine->kv_type), model->n_windowed_layers, model->n_layers,
                    model->window, engine->n_ctx);
    else
        paged__note(cli, "KV pool %s: %d block%s of %d tokens, %s, so %lld tokens fit; context %d",
                    paged__size(engine->pool_bytes).text, engine->n_blocks, engine->n_blocks == 1 ? "" : "s",
                    engine->block_size, paged__type_name(engine->kv_type),
                    (long long)engine->n_blocks * engine->block_size, engine->n_ctx);
    if (engine->contiguous)
        paged__note(cli, "no paging: room for %d requests at once, a run of %d tokens each",
                    engine->n_blocks * engine->block_size / engine->n_ctx, engine->n_ctx);
    paged__note(cli, "%d thread%s, attention kernels %s, linear %s, %s for computing", engine->n_threads,
                engine->n_threads == 1 ? "" : "s", engine->attn_kernels, engine->linear_kernels,
                paged__size(engine->compute_bytes).text);
}
