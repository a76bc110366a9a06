/* Goal: what is planned for a model is what its engine takes. Method: engines of SmolLM2 ($PAGED_MODEL;
 * skipped without) for several KV types, block sizes, contexts and numbers of requests; their own report is
 * the oracle. */
#include "paged/engine.h"
#include "paged/plan.h"
#include "test.h"

static void compare(const paged_model *model, const paged_engine_config *config) {
    const paged_shape *shape = paged_shape_find("smollm2-135m");
    paged_group_config group = shape->groups[0];
    group.type = (paged_type)config->kv_type;
    paged_plan plan;
    CHECK_EQ(paged_plan_init(&plan, PAGED_PLAN_PAGED, &group, 1, config->block_size, config->n_ctx, NULL),
             PAGED_OK);
    paged_engine *engine;
    CHECK_EQ(paged_engine_create(model, config, &engine, NULL), PAGED_OK);
    paged_engine_info info;
    paged_cache_stats stats;
    paged_engine_get_info(engine, &info);
    paged_engine_get_cache_stats(engine, &stats);
    CHECK_EQ(info.kv_bytes_per_token, plan.groups[0].token_bytes);
    CHECK_EQ(stats.block_bytes, plan.groups[0].block_bytes);
    CHECK_EQ(info.n_ctx, config->n_ctx);
    /* With packed tails the engine has one block more, for the copy that ends a tail. */
    size_t spare = info.packed_tails ? plan.groups[0].block_bytes : 0;
    CHECK_EQ(info.pool_bytes - spare,
             (size_t)config->max_running * paged_plan_peak_bytes(&plan, config->n_ctx));
    CHECK_EQ(paged_plan_fit(&plan, info.pool_bytes - spare, config->n_ctx), config->max_running);
    /* One more than run, for what is saved and loaded by hand. */
    CHECK_EQ(stats.table_bytes, paged_plan_table_bytes(&plan, config->max_running + 1));
    paged_engine_free(engine);
}

static void smollm2_takes_what_is_planned(void) {
    const char *path = getenv("PAGED_MODEL");
    if (!path || !*path) {
        printf("skipped: PAGED_MODEL is not set\n");
        return;
    }
    paged_model *model = NULL;
    CHECK_EQ(paged_model_load(path, NULL, &model, NULL), PAGED_OK);
    static const int32_t block_sizes[] = {5, 16, 64};
    for (int32_t type = PAGED_TYPE_F16; type <= PAGED_TYPE_I8; type++) {
        for (size_t b = 0; b < sizeof block_sizes / sizeof block_sizes[0]; b++) {
            const bool packs = block_sizes[b] % PAGED_TILE == 0;
            if (type == PAGED_TYPE_I8 && !packs) continue;
            for (int32_t n = 1; n <= 9; n += 4) {
                compare(model, &(paged_engine_config){.struct_size = sizeof(paged_engine_config),
                                                      .n_ctx = 100 * n + 3,
                                                      .block_size = block_sizes[b],
                                                      .kv_type = type,
                                                      .kv_plain = !packs,
                                                      .max_running = n,
                                                      .chunk_tokens = 16,
                                                      .n_threads = 1});
            }
        }
    }
    paged_model_free(model);
}

#define TESTS(X) X(smollm2_takes_what_is_planned)
TEST_MAIN(TESTS)
