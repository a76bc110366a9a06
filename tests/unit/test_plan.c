/* Goal: the planner's arithmetic is that of the published shapes and of the real cache. Method: bytes a token
 * of every named shape as layers × KV heads × head dim gives them by hand; sequences that grow in real caches
 * (paged, contiguous, packed tails, windows), compared with the plan at every token; small loads by hand. */
#include "base/base.h"
#include "paged/plan.h"
#include "test.h"

/* ---- shapes ---- */

/* Bytes of one token: 2 (K and V) × layers × KV heads × head dim × bytes of an element; int8 has two f32
 * scales a row besides. The numbers are written out, so that neither side computes them for the other. */
static const struct {
    const char *name;
    int64_t n_params;
    int64_t f16, f32, int8;
} known[] = {
    {"llama-2-7b", 6738415616, 524288, 1048576, 270336},
    {"llama-2-13b", 13015864320, 819200, 1638400, 422400},
    {"llama-2-70b", 68976648192, 327680, 655360, 168960},
    {"llama-3-8b", 8030261248, 131072, 262144, 67584},
    {"llama-3-70b", 70553706496, 327680, 655360, 168960},
    {"llama-3.1-405b", 405853388800, 516096, 1032192, 266112},
    {"llama-3.2-1b", 1235814400, 32768, 65536, 17408},
    {"llama-3.2-3b", 3212749824, 114688, 229376, 59136},
    {"falcon-7b", 6921720704, 8192, 16384, 4352},
    {"falcon-40b", 41303293952, 122880, 245760, 65280},
    {"mistral-7b-v0.1", 7241732096, 131072, 262144, 67584},
    {"mistral-7b", 7248023552, 131072, 262144, 67584},
    {"qwen2-0.5b", 494032768, 12288, 24576, 6528},
    {"qwen2-1.5b", 1543714304, 28672, 57344, 14784},
    {"qwen2-7b", 7615616512, 57344, 114688, 29568},
    {"qwen2-72b", 72706203648, 327680, 655360, 168960},
    {"qwen2.5-3b", 3085938688, 36864, 73728, 19008},
    {"qwen2.5-14b", 14770033664, 196608, 393216, 101376},
    {"qwen2.5-32b", 32763876352, 262144, 524288, 135168},
    {"qwen3-0.6b", 596049920, 114688, 229376, 59136},
    {"qwen3-1.7b", 1720574976, 114688, 229376, 59136},
    {"qwen3-4b", 4022468096, 147456, 294912, 76032},
    {"qwen3-8b", 8190735360, 147456, 294912, 76032},
    {"qwen3-14b", 14768307200, 163840, 327680, 84480},
    {"qwen3-32b", 32762123264, 262144, 524288, 135168},
    {"gemma-2-2b", 2614341888, 106496, 212992, 54080},
    {"gemma-2-9b", 9241705984, 344064, 688128, 174720},
    {"gemma-2-27b", 27227128320, 376832, 753664, 194304},
    {"gemma-3-270m", 268098176, 18432, 36864, 9360},
    {"gemma-3-1b", 999885952, 26624, 53248, 13520},
    {"gemma-3-4b", 3880099328, 139264, 278528, 70720},
    {"gemma-3-12b", 11765788416, 393216, 786432, 199680},
    {"gemma-3-27b", 27009002240, 507904, 1015808, 261888},
    {"smollm2-135m", 134515008, 23040, 46080, 12240},
    {"smollm2-360m", 361821120, 40960, 81920, 21760},
    {"smollm2-1.7b", 1711376384, 196608, 393216, 104448},
};

static int64_t token_bytes(const paged_shape *shape, paged_type type) {
    int64_t bytes = 0;
    for (int32_t g = 0; g < shape->n_groups; g++) {
        paged_group_config group = shape->groups[g];
        group.type = type;
        bytes += (int64_t)paged_block_bytes(&group, 1);
    }
    return bytes;
}

static void shapes_are_as_published(void) {
    const int32_t n = (int32_t)(sizeof known / sizeof known[0]);
    CHECK_EQ(paged_shape_count(), n);
    for (int32_t i = 0; i < n; i++) {
        const paged_shape *shape = paged_shape_find(known[i].name);
        CHECK(shape && shape == paged_shape_at(i));
        CHECK_EQ(shape->n_params, known[i].n_params);
        CHECK_EQ(token_bytes(shape, PAGED_TYPE_F16), known[i].f16);
        CHECK_EQ(token_bytes(shape, PAGED_TYPE_BF16), known[i].f16);
        CHECK_EQ(token_bytes(shape, PAGED_TYPE_F32), known[i].f32);
        CHECK_EQ(token_bytes(shape, PAGED_TYPE_I8), known[i].int8);
        CHECK_EQ(shape->n_heads % shape->groups[0].n_kv_heads, 0);
    }
    CHECK(paged_shape_find("LLaMA-2-13B") == paged_shape_find("llama-2-13b"));
    CHECK(!paged_shape_find("llama-2-14b") && !paged_shape_find("") && !paged_shape_find(NULL));
    CHECK(!paged_shape_at(-1) && !paged_shape_at(n));
}

/* Gemma 3 has one layer of six without a window, Gemma 2 every second. */
static void windows_are_groups(void) {
    const paged_shape *shape = paged_shape_find("gemma-3-1b");
    CHECK_EQ(shape->n_groups, 2);
    CHECK_EQ(shape->groups[0].n_layers, 4);
    CHECK_EQ(shape->groups[0].window, 0);
    CHECK_EQ(shape->groups[1].n_layers, 22);
    CHECK_EQ(shape->groups[1].window, 512);
    paged_plan plan;
    CHECK_EQ(paged_plan_init(&plan, PAGED_PLAN_PAGED, shape->groups, 2, 16, 32768, NULL), PAGED_OK);
    /* 1 KiB a token and layer: 4 layers of 32768 tokens, 22 of the window. */
    CHECK_EQ(paged_plan_stored_bytes(&plan, 32768), 4ll * 32768 * 1024 + 22ll * 512 * 1024);
    CHECK_EQ(paged_plan_stored_bytes(&plan, 100), 26 * 100 * 1024);
    CHECK_EQ(paged_plan_peak_bytes(&plan, 32768), 4ll * 32768 * 1024 + 22ll * (512 + 16) * 1024);
}

/* ---- one sequence ---- */

static const paged_group_config llama_13b = {.n_layers = 40, .n_kv_heads = 40, .head_dim_k = 128};

static void one_request_of_llama_13b(void) {
    paged_plan plan;
    CHECK_EQ(paged_plan_init(&plan, PAGED_PLAN_PAGED, &llama_13b, 1, 16, 4096, NULL), PAGED_OK);
    CHECK_EQ(paged_plan_taken_bytes(&plan, 4096), 3355443200ll);
    CHECK_EQ(8 * paged_plan_taken_bytes(&plan, 4096), 25ull << 30);
    CHECK_EQ(paged_plan_taken_bytes(&plan, 1024) * 4, paged_plan_taken_bytes(&plan, 4096));
    CHECK_EQ(paged_plan_taken_bytes(&plan, 128) * 32, paged_plan_taken_bytes(&plan, 4096));
    CHECK_EQ(paged_plan_taken_bytes(&plan, 100), 7 * 16 * 819200);
    CHECK_EQ(paged_plan_taken_bytes(&plan, 0), 0);
    CHECK_EQ(paged_plan_taken_bytes(&plan, -5), 0);
    CHECK_EQ(paged_plan_taken_bytes(&plan, 9999), 3355443200ll);
    CHECK_EQ(paged_plan_table_entries(&plan), 256);
    CHECK_EQ(paged_plan_fit(&plan, 25ull << 30, 4096), 8);
    CHECK_EQ(paged_plan_fit(&plan, (25ull << 30) - 1, 4096), 7);
    CHECK_EQ(paged_plan_fit(&plan, 25ull << 30, 1024), 32);
    CHECK_EQ(paged_plan_init(&plan, PAGED_PLAN_CONTIGUOUS, &llama_13b, 1, 16, 4096, NULL), PAGED_OK);
    CHECK_EQ(paged_plan_taken_bytes(&plan, 1), 3355443200ll);
    CHECK_EQ(paged_plan_fit(&plan, 25ull << 30, 1), 8);
    CHECK_EQ(paged_plan_init(&plan, PAGED_PLAN_PACKED, &llama_13b, 1, 64, 4096, NULL), PAGED_OK);
    CHECK_EQ(paged_plan_taken_bytes(&plan, 100), (64 + 3 * 16) * 819200);
    CHECK_EQ(paged_plan_taken_bytes(&plan, 128), 128 * 819200);
    /* Eight requests of three tiles in six blocks of four. */
    CHECK_EQ(paged_plan_fit(&plan, 6 * 64 * 819200, 33), 8);
    CHECK_EQ(paged_plan_fit(&plan, 6 * 64 * 819200 - 1, 33), 6);
}

/* The longest length that there is: nothing wraps. 4 bytes a token in blocks of 16. */
static void the_longest_sequence(void) {
    paged_plan plan;
    const paged_group_config group = {.n_layers = 1, .n_kv_heads = 1, .head_dim_k = 1, .window = 1000};
    const paged_group_config full = {.n_layers = 1, .n_kv_heads = 1, .head_dim_k = 1};
    CHECK_EQ(paged_plan_init(&plan, PAGED_PLAN_PAGED, &full, 1, 16, INT32_MAX, NULL), PAGED_OK);
    CHECK_EQ(paged_plan_peak_bytes(&plan, INT32_MAX), 4ll << 31);
    CHECK_EQ(paged_plan_table_entries(&plan), 1 << 27);
    CHECK_EQ(paged_plan_fit(&plan, (size_t)1 << 40, INT32_MAX), 128);
    CHECK_EQ(paged_plan_init(&plan, PAGED_PLAN_PAGED, &group, 1, 16, INT32_MAX, NULL), PAGED_OK);
    CHECK_EQ(paged_plan_peak_bytes(&plan, INT32_MAX), 64 * 64);
}

static void odd_input_is_refused(void) {
    paged_plan plan;
    paged_error err;
    paged_group_config group = llama_13b;
    CHECK_EQ(paged_plan_init(&plan, PAGED_PLAN_PAGED, NULL, 1, 16, 8, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_plan_init(&plan, PAGED_PLAN_PAGED, &group, 0, 16, 8, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_plan_init(&plan, PAGED_PLAN_WAYS, &group, 1, 16, 8, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_plan_init(&plan, PAGED_PLAN_PAGED, &group, 1, 1025, 8, &err), PAGED_ERR_INVALID_ARG);
    CHECK(strstr(err.message, "1025"));
    CHECK_EQ(paged_plan_init(&plan, PAGED_PLAN_PAGED, &group, 1, 16, 0, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_plan_init(&plan, PAGED_PLAN_PACKED, &group, 1, 16, 8, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_plan_init(&plan, PAGED_PLAN_PACKED, &group, 1, 40, 8, &err), PAGED_ERR_INVALID_ARG);
    group.window = -1;
    CHECK_EQ(paged_plan_init(&plan, PAGED_PLAN_PAGED, &group, 1, 16, 8, &err), PAGED_ERR_INVALID_ARG);
    group = (paged_group_config){.n_layers = INT32_MAX, .n_kv_heads = 1, .head_dim_k = INT32_MAX};
    CHECK_EQ(paged_plan_init(&plan, PAGED_PLAN_PAGED, &group, 1, 16, 8, &err), PAGED_ERR_INVALID_ARG);
    group.head_dim_k = 1 << 12;
    CHECK_EQ(paged_plan_init(&plan, PAGED_PLAN_PAGED, &group, 1, 16, INT32_MAX, &err), PAGED_ERR_LIMIT);
    CHECK_STR(paged_plan_way_name(PAGED_PLAN_PACKED), "packed tails");
    CHECK_STR(paged_plan_way_name((paged_plan_way)9), "unknown way");
}

/* A sequence grows in a real cache, a token at a time; the cache's own count is the oracle. */
static void grow_beside_a_cache(const paged_group_config *groups, int32_t n_groups, int32_t block_size,
                                paged_plan_way way, int32_t n_tokens) {
    paged_plan plan;
    CHECK_EQ(paged_plan_init(&plan, way, groups, n_groups, block_size, n_tokens, NULL), PAGED_OK);
    paged_cache_config config = {.struct_size = sizeof config,
                                 .groups = groups,
                                 .n_groups = n_groups,
                                 .block_size = block_size,
                                 .pool_bytes = 64 << 20,
                                 .max_seqs = 3,
                                 .max_seq_tokens = n_tokens,
                                 .contiguous = way == PAGED_PLAN_CONTIGUOUS,
                                 .packed_tails = way == PAGED_PLAN_PACKED};
    paged_cache *cache;
    paged_seq seq;
    CHECK_EQ(paged_cache_create(&config, &cache, NULL), PAGED_OK);
    CHECK_EQ(paged_seq_create(cache, &seq), PAGED_OK);
    size_t most = 0;
    for (int32_t n = 1; n <= n_tokens; n++) {
        paged_cache_stats stats;
        CHECK_EQ(paged_seq_reserve(cache, seq, 1), PAGED_OK);
        paged_cache_get_stats(cache, &stats);
        /* A divided block counts there as a whole, here as its tiles. */
        size_t used = stats.used_bytes - (size_t)stats.n_divided * stats.block_bytes;
        used += (size_t)stats.n_tail_tiles * stats.block_bytes * PAGED_TILE / (size_t)block_size;
        CHECK_EQ(paged_plan_taken_bytes(&plan, n), used);
        most = PAGED_MAX(most, used);
        CHECK_EQ(paged_plan_peak_bytes(&plan, n), most);
        CHECK_EQ(paged_plan_table_bytes(&plan, 3), stats.table_bytes);
        CHECK_EQ(paged_seq_commit(cache, seq, &n, 1), PAGED_OK);
    }
    paged_cache_free(cache);
}

static void a_real_cache_takes_what_is_planned(void) {
    const paged_group_config full = {.n_layers = 2, .n_kv_heads = 3, .head_dim_k = 8, .head_dim_v = 4};
    const paged_group_config packed = {
        .n_layers = 2, .n_kv_heads = 1, .head_dim_k = 8, .layout = PAGED_LAYOUT_PACKED};
    const paged_group_config int8 = {.n_layers = 1,
                                     .n_kv_heads = 2,
                                     .head_dim_k = 16,
                                     .type = PAGED_TYPE_I8,
                                     .layout = PAGED_LAYOUT_PACKED};
    static const int32_t windows[] = {1, 2, 15, 16, 17, 33, 100};
    for (int32_t b = 1; b <= 40; b += 13) {
        grow_beside_a_cache(&full, 1, b, PAGED_PLAN_PAGED, 130);
        grow_beside_a_cache(&full, 1, b, PAGED_PLAN_CONTIGUOUS, 130);
        for (size_t i = 0; i < sizeof windows / sizeof windows[0]; i++) {
            paged_group_config groups[] = {full, full};
            groups[1].window = windows[i];
            grow_beside_a_cache(groups + 1, 1, b, PAGED_PLAN_PAGED, 150);
            grow_beside_a_cache(groups, 2, b, PAGED_PLAN_PAGED, 150);
        }
    }
    grow_beside_a_cache(&int8, 1, 16, PAGED_PLAN_PAGED, 70);
    grow_beside_a_cache(&packed, 1, 32, PAGED_PLAN_PACKED, 130);
    grow_beside_a_cache(&packed, 1, 64, PAGED_PLAN_PACKED, 200);
    grow_beside_a_cache(&int8, 1, 128, PAGED_PLAN_PACKED, 300);
}

/* ---- a load ---- */

/* One byte a token: a layer, a head, an element of int8 with its scales would be 10, so f16 of one element:
 * 4 bytes. */
static const paged_group_config four_bytes = {.n_layers = 1, .n_kv_heads = 1, .head_dim_k = 1};

static void a_life_is_a_sum(void) {
    paged_plan plan;
    paged_plan_load load;
    const paged_plan_request requests[] = {{3, 2}, {5, 1}};
    CHECK_EQ(paged_plan_init(&plan, PAGED_PLAN_PAGED, &four_bytes, 1, 4, 8, NULL), PAGED_OK);
    CHECK_EQ(paged_plan_life(&plan, requests, 2, &load, NULL), PAGED_OK);
    CHECK_EQ(load.n_steps, 3);
    CHECK_EQ(load.sum_stored, 4 * (3 + 4 + 5));
    CHECK_EQ(load.sum_taken, 4 * (4 + 4 + 8));
}

/* A pool of three blocks of four tokens. Requests a (3, 4), b (4, 3), c (1, 1).
 *   step 0   a 3, b 4, c 1: three blocks, all run; c ends
 *   step 1   a 4, b 5: three blocks
 *   step 2   a 5 wants a block: b, the youngest, gives way; then there is no room for its two blocks
 *   step 3   a 6, its last token; a ends
 *   step 4   b 6, its last token */
static void the_youngest_gives_way(void) {
    paged_plan plan;
    paged_plan_load load;
    const paged_plan_request requests[] = {{3, 4}, {4, 3}, {1, 1}};
    CHECK_EQ(paged_plan_init(&plan, PAGED_PLAN_PAGED, &four_bytes, 1, 4, 8, NULL), PAGED_OK);
    CHECK_EQ(paged_plan_replay(&plan, 3 * 16, requests, 3, NULL, NULL, &load, NULL), PAGED_OK);
    CHECK_EQ(load.n_steps, 5);
    CHECK_EQ(load.sum_running, 3 + 2 + 1 + 1 + 1);
    CHECK_EQ(load.max_running, 3);
    CHECK_EQ(load.n_preempted, 1);
    CHECK_EQ(load.sum_stored, 4 * (8 + 9 + 5 + 6 + 6));
    CHECK_EQ(load.sum_taken, 16 * (3 + 3 + 2 + 2 + 2));
}

struct seen {
    int64_t n_steps;
    size_t most, pool_bytes;
};

static void see(void *user, const paged_plan_step *step) {
    struct seen *seen = user;
    CHECK_EQ(step->step, seen->n_steps++);
    CHECK(step->stored_bytes <= step->taken_bytes && step->taken_bytes <= seen->pool_bytes);
    CHECK(step->n_running > 0);
    seen->most = PAGED_MAX(seen->most, step->taken_bytes);
}

/* Whatever the load: nothing is lost, the pool is never overdrawn, and tokens made equal tokens asked for. */
static void every_request_ends(void) {
    const paged_group_config windowed[] = {four_bytes,
                                           {.n_layers = 2, .n_kv_heads = 1, .head_dim_k = 1, .window = 9}};
    for (int32_t round = 0; round < 60; round++) {
        enum { N = 60 };
        paged_plan_request requests[N];
        int64_t n_output = 0, n_least = 0;
        for (int32_t i = 0; i < N; i++) {
            requests[i].n_prompt = 1 + (int32_t)(paged__rand(&test_seed) % 60);
            requests[i].n_output = 1 + (int32_t)(paged__rand(&test_seed) % 60);
            n_output += requests[i].n_output;
            n_least = PAGED_MAX(n_least, requests[i].n_output);
        }
        paged_plan plan;
        paged_plan_load load, life;
        paged_plan_way way = (paged_plan_way)(round % PAGED_PLAN_WAYS);
        int32_t n_groups = way == PAGED_PLAN_PAGED ? 2 : 1;
        CHECK_EQ(paged_plan_init(&plan, way, windowed, n_groups, 32, 120, NULL), PAGED_OK);
        size_t pool = paged_plan_peak_bytes(&plan, 120) * (1 + (size_t)round / 9);
        struct seen seen = {.pool_bytes = pool};
        CHECK_EQ(paged_plan_replay(&plan, pool, requests, N, see, &seen, &load, NULL), PAGED_OK);
        CHECK_EQ(load.sum_running, n_output);
        CHECK_EQ(load.n_steps, seen.n_steps);
        CHECK(load.n_steps >= n_least);
        CHECK_EQ(paged_plan_life(&plan, requests, N, &life, NULL), PAGED_OK);
        CHECK_EQ(life.n_steps, n_output);
        CHECK_EQ(life.sum_stored, load.sum_stored);
        CHECK_EQ(life.sum_taken, load.sum_taken);
    }
}

static void odd_loads_are_refused(void) {
    paged_plan plan;
    paged_plan_load load;
    paged_error err;
    const paged_plan_request fine = {8, 9}, empty = {0, 4}, silent = {4, 0}, long_one = {17, 16};
    CHECK_EQ(paged_plan_init(&plan, PAGED_PLAN_PAGED, &four_bytes, 1, 4, 32, NULL), PAGED_OK);
    CHECK_EQ(paged_plan_life(&plan, &fine, 0, &load, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_plan_life(&plan, &empty, 1, &load, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_plan_life(&plan, &silent, 1, &load, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_plan_life(&plan, &long_one, 1, &load, &err), PAGED_ERR_INVALID_ARG);
    CHECK(strstr(err.message, "33") && strstr(err.message, "32"));
    CHECK_EQ(paged_plan_replay(&plan, 4 * 16, &fine, 1, NULL, NULL, &load, &err), PAGED_OK);
    CHECK_EQ(paged_plan_replay(&plan, 4 * 16 - 1, &fine, 1, NULL, NULL, &load, &err), PAGED_ERR_NO_BLOCKS);
    CHECK(strstr(err.message, "64") && strstr(err.message, "63"));
}

#define TESTS(X)                                                                                             \
    X(shapes_are_as_published)                                                                               \
    X(windows_are_groups)                                                                                    \
    X(one_request_of_llama_13b)                                                                              \
    X(the_longest_sequence)                                                                                  \
    X(odd_input_is_refused)                                                                                  \
    X(a_real_cache_takes_what_is_planned)                                                                    \
    X(a_life_is_a_sum)                                                                                       \
    X(the_youngest_gives_way)                                                                                \
    X(every_request_ends)                                                                                    \
    X(odd_loads_are_refused)
TEST_MAIN(TESTS)
