/* shapes.c: the shapes of well-known models, from the configurations that their makers published. */
#include <strings.h>

#include "base/base.h"
#include "paged/plan.h"

#define GROUP(layers, kv_heads, head_dim, keys)                                                              \
    { .n_layers = (layers), .n_kv_heads = (kv_heads), .head_dim_k = (head_dim), .window = (keys) }

/* name, query heads, context, parameters, groups */
static const paged_shape shapes[] = {
    {"llama-2-7b", 32, 4096, 6738415616, 1, {GROUP(32, 32, 128, 0)}},
    {"llama-2-13b", 40, 4096, 13015864320, 1, {GROUP(40, 40, 128, 0)}},
    {"llama-2-70b", 64, 4096, 68976648192, 1, {GROUP(80, 8, 128, 0)}},
    {"llama-3-8b", 32, 8192, 8030261248, 1, {GROUP(32, 8, 128, 0)}},
    {"llama-3-70b", 64, 8192, 70553706496, 1, {GROUP(80, 8, 128, 0)}},
    {"llama-3.1-405b", 128, 131072, 405853388800, 1, {GROUP(126, 8, 128, 0)}},
    {"llama-3.2-1b", 32, 131072, 1235814400, 1, {GROUP(16, 8, 64, 0)}},
    {"llama-3.2-3b", 24, 131072, 3212749824, 1, {GROUP(28, 8, 128, 0)}},
    {"falcon-7b", 71, 2048, 6921720704, 1, {GROUP(32, 1, 64, 0)}},
    {"falcon-40b", 128, 2048, 41303293952, 1, {GROUP(60, 8, 64, 0)}},
    {"mistral-7b-v0.1", 32, 32768, 7241732096, 1, {GROUP(32, 8, 128, 4096)}},
    {"mistral-7b", 32, 32768, 7248023552, 1, {GROUP(32, 8, 128, 0)}},
    {"qwen2-0.5b", 14, 32768, 494032768, 1, {GROUP(24, 2, 64, 0)}},
    {"qwen2-1.5b", 12, 32768, 1543714304, 1, {GROUP(28, 2, 128, 0)}},
    {"qwen2-7b", 28, 32768, 7615616512, 1, {GROUP(28, 4, 128, 0)}},
    {"qwen2-72b", 64, 32768, 72706203648, 1, {GROUP(80, 8, 128, 0)}},
    {"qwen2.5-3b", 16, 32768, 3085938688, 1, {GROUP(36, 2, 128, 0)}},
    {"qwen2.5-14b", 40, 32768, 14770033664, 1, {GROUP(48, 8, 128, 0)}},
    {"qwen2.5-32b", 40, 32768, 32763876352, 1, {GROUP(64, 8, 128, 0)}},
    {"qwen3-0.6b", 16, 40960, 596049920, 1, {GROUP(28, 8, 128, 0)}},
    {"qwen3-1.7b", 16, 40960, 1720574976, 1, {GROUP(28, 8, 128, 0)}},
    {"qwen3-4b", 32, 40960, 4022468096, 1, {GROUP(36, 8, 128, 0)}},
    {"qwen3-8b", 32, 40960, 8190735360, 1, {GROUP(36, 8, 128, 0)}},
    {"qwen3-14b", 40, 40960, 14768307200, 1, {GROUP(40, 8, 128, 0)}},
    {"qwen3-32b", 64, 40960, 32762123264, 1, {GROUP(64, 8, 128, 0)}},
    {"gemma-2-2b", 8, 8192, 2614341888, 2, {GROUP(13, 4, 256, 0), GROUP(13, 4, 256, 4096)}},
    {"gemma-2-9b", 16, 8192, 9241705984, 2, {GROUP(21, 8, 256, 0), GROUP(21, 8, 256, 4096)}},
    {"gemma-2-27b", 32, 8192, 27227128320, 2, {GROUP(23, 16, 128, 0), GROUP(23, 16, 128, 4096)}},
    {"gemma-3-270m", 4, 32768, 268098176, 2, {GROUP(3, 1, 256, 0), GROUP(15, 1, 256, 512)}},
    {"gemma-3-1b", 4, 32768, 999885952, 2, {GROUP(4, 1, 256, 0), GROUP(22, 1, 256, 512)}},
    {"gemma-3-4b", 8, 131072, 3880099328, 2, {GROUP(5, 4, 256, 0), GROUP(29, 4, 256, 1024)}},
    {"gemma-3-12b", 16, 131072, 11765788416, 2, {GROUP(8, 8, 256, 0), GROUP(40, 8, 256, 1024)}},
    {"gemma-3-27b", 32, 131072, 27009002240, 2, {GROUP(10, 16, 128, 0), GROUP(52, 16, 128, 1024)}},
    {"smollm2-135m", 9, 8192, 134515008, 1, {GROUP(30, 3, 64, 0)}},
    {"smollm2-360m", 15, 8192, 361821120, 1, {GROUP(32, 5, 64, 0)}},
    {"smollm2-1.7b", 32, 8192, 1711376384, 1, {GROUP(24, 32, 64, 0)}},
};

int32_t paged_shape_count(void) {
    return (int32_t)(sizeof shapes / sizeof shapes[0]);
}

const paged_shape *paged_shape_at(int32_t i) {
    return i >= 0 && i < paged_shape_count() ? &shapes[i] : NULL;
}

const paged_shape *paged_shape_find(const char *name) {
    for (int32_t i = 0; name && i < paged_shape_count(); i++) {
        if (strcasecmp(shapes[i].name, name) == 0) return &shapes[i];
    }
    return NULL;
}
