/* engine/engine.c: create, free, facts. */
#include <stdio.h>

#include "engine/engine.h"
#include "mem/hash.h"

enum {
    DEFAULT_BLOCK = 16,
    DEFAULT_CHUNK = 512,
    DEFAULT_WAITING = 64,
    RUNNING_MAX = 4096,
    CHUNK_MAX = 1 << 16,
    THREADS_MAX = 256,
    WATERMARK = 16,         /* one block of so many */
    LOGITS_BYTES = 64 << 20 /* of a step, if that is enough for those that run */
};

void paged_engine_config_init(paged_engine_config *config) {
    *config = (paged_engine_config){.struct_size = sizeof *config, .kv_type = PAGED_KV_AUTO};
}

static bool is_cpu(const char *device) {
    return !device || strcmp(device, "cpu") == 0;
}

/* A device computes in f32 whatever the type, so there f16 has three bits more for the same time. */
paged_type paged_engine_kv_type(int32_t kv_type, const char *device, int32_t head_dim_k) {
    if (kv_type != PAGED_KV_AUTO) return (paged_type)kv_type;
    const bool has_pairs = paged_cpu_flags() & PAGED_CPU_AVX512_BF16;
    return has_pairs && is_cpu(device) && head_dim_k % 2 == 0 ? PAGED_TYPE_BF16 : PAGED_TYPE_F16;
}

static paged_status fill_defaults(const paged_model_info *info, paged_engine_config *c, paged_error *err) {
    if (c->block_size == 0) c->block_size = DEFAULT_BLOCK;
    if (c->max_running == 0) c->max_running = 1;
    if (c->max_waiting == 0) c->max_waiting = DEFAULT_WAITING;
    if (c->n_threads == 0) c->n_threads = PAGED_MIN(paged_cpu_count(), THREADS_MAX);
    if (c->n_ctx == 0) c->n_ctx = info->n_ctx_train;
    if (c->block_size < 1 || c->block_size > 1024)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "block_size is %d; 1 … 1024", c->block_size);
    if (!c->kv_plain && c->block_size % PAGED_TILE)
        return paged__fail(err, PAGED_ERR_INVALID_ARG,
                           "block_size is %d; the packed layout asks for a multiple of %d", c->block_size,
                           PAGED_TILE);
    if (c->n_ctx < 1 || c->n_ctx > info->n_ctx_train)
        return paged__fail(err, PAGED_ERR_TOO_LONG, "a context of %d tokens was asked for; the model has %d",
                           c->n_ctx, info->n_ctx_train);
    if (c->max_running < 1 || c->max_running > RUNNING_MAX || c->max_waiting < 1 ||
        c->max_waiting > RUNNING_MAX * 16)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "max_running is %d (1 … %d), max_waiting %d (1 … %d)",
                           c->max_running, RUNNING_MAX, c->max_waiting, RUNNING_MAX * 16);
    if (c->n_threads < 1 || c->n_threads > THREADS_MAX)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "n_threads is %d; 1 … %d", c->n_threads, THREADS_MAX);
    c->kv_type = (int32_t)paged_engine_kv_type(c->kv_type, c->device, info->head_dim_k);
    if (c->kv_type != PAGED_TYPE_F16 && c->kv_type != PAGED_TYPE_F32 && c->kv_type != PAGED_TYPE_BF16 &&
        c->kv_type != PAGED_TYPE_I8)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "kv_type is %d", c->kv_type);
    c->no_prefix_cache |= c->contiguous;
    if (c->chunk_tokens == 0) c->chunk_tokens = PAGED_MAX(PAGED_MIN(DEFAULT_CHUNK, c->n_ctx), c->max_running);
    if (c->chunk_tokens < 1 || c->chunk_tokens > CHUNK_MAX)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "chunk_tokens is %d; 1 … %d", c->chunk_tokens,
                           CHUNK_MAX);
    return PAGED_OK;
}

/* The header of the file, with names, numbers and vocabulary, and of each tensor N_PIECES pieces of PIECE
 * bytes, evenly spread, or all of it: any training touches all rows. The whole of the weights would take a
 * second for each 10 GB. */
static void set_fingerprint(paged_engine *e) {
    enum { PIECE = 4096, N_PIECES = 8 };
    const paged__gguf *file = e->model->file;
    XXH3_state_t state;
    size_t size_bytes, first;
    const uint8_t *map = paged__gguf_map(file, &size_bytes);
    first = size_bytes;
    XXH3_128bits_reset(&state);
    for (int32_t i = 0; i < paged__gguf_n_tensors(file); i++) {
        const paged__gguf_tensor *t = paged__gguf_tensor_at(file, i);
        const uint8_t *data = t->data;
        first = PAGED_MIN(first, (size_t)(data - map));
        if (t->size_bytes <= (size_t)N_PIECES * PIECE) {
            XXH3_128bits_update(&state, data, t->size_bytes);
            continue;
        }
        for (size_t k = 0; k < N_PIECES; k++)
            XXH3_128bits_update(&state, data + (t->size_bytes - PIECE) / (N_PIECES - 1) * k, PIECE);
    }
    XXH3_128bits_update(&state, map, first);
    XXH3_128bits_update(&state, &size_bytes, sizeof size_bytes);
    const XXH128_hash_t hash = XXH3_128bits_digest(&state);
    e->fingerprint[0] = hash.low64;
    e->fingerprint[1] = hash.high64;
    /* Some models turn keys in another way in an engine of a long context. */
    if (paged__rope_is_long(&e->model->hp.rope[0], e->n_ctx)) e->fingerprint[1] = ~e->fingerprint[1];
}

enum {
    FORMAT = 1,  /* of keys and of the bytes of a block */
    NUMERICS = 3 /* of our kernels: one more whenever keys or values get other bits */
};

size_t paged__fingerprint(const paged_engine *e, paged_type kv_type, char text[PAGED__FINGERPRINT_MAX]) {
    const paged_engine_config *c = &e->config;
    int n = snprintf(text, PAGED__FINGERPRINT_MAX,
                     "paged kv %d\nmodel %016llx%016llx %s\nblock %d type %d layout %d\n"
                     "numerics %d attention %s split %d linear %s ggml %s flags %x\n",
                     FORMAT, (unsigned long long)e->fingerprint[0], (unsigned long long)e->fingerprint[1],
                     e->model->arch->name, c->block_size, (int)kv_type, c->kv_plain, NUMERICS,
                     e->runner ? paged__runner_attn_kernels(e->runner) : "none", PAGED_ATTN_SPLIT,
                     e->model->linear_kernels, PAGED_GGML_BUILD, (unsigned)paged_cpu_flags());
    for (int32_t g = 0; g < e->n_groups; g++) {
        const paged_group_config *gc = &e->cache->groups[g].config;
        n += snprintf(text + n, (size_t)(PAGED__FINGERPRINT_MAX - n), "group %d: %d %d %d %d window %d\n", g,
                      gc->n_layers, gc->n_kv_heads, gc->head_dim_k, gc->head_dim_v, gc->window);
    }
    return (size_t)n;
}

/* Groups of layers as the backend has them, or the model. Returns how many. */
static int32_t fill_groups(const paged_engine *e, const paged_model_info *info,
                           paged_group_config groups[PAGED__MODEL_GROUPS]) {
    const paged_engine_config *c = &e->config;
    const int32_t n = e->backend.groups ? e->backend.n_groups : e->model->n_groups;
    PAGED_ASSERT(n >= 1 && n <= PAGED__MODEL_GROUPS);
    for (int32_t g = 0; g < n; g++) {
        groups[g] = (paged_group_config){.n_layers = e->model->groups[g].n_layers,
                                         .n_kv_heads = info->n_kv_heads,
                                         .head_dim_k = info->head_dim_k,
                                         .head_dim_v = info->head_dim_v,
                                         .window = e->model->groups[g].window};
        if (e->backend.groups) groups[g] = e->backend.groups[g];
        groups[g].type = (paged_type)c->kv_type;
        groups[g].layout = c->kv_plain ? PAGED_LAYOUT_PLAIN : PAGED_LAYOUT_PACKED;
    }
    return n;
}

/* Whether a request of n_tokens fits the pool when it is alone there: its blocks, of a window those that are
 * there at a time, in as many extents as they need when each belongs to one group. */
static bool fits_alone(const paged_engine *e, int32_t n_tokens) {
    const int32_t size = e->config.block_size;
    int64_t n_extents = 0;
    for (int32_t g = 0; g < e->n_groups; g++) {
        const paged__group *group = &e->cache->groups[g];
        const int32_t window = group->config.window + e->config.chunk_tokens;
        int64_t n = (n_tokens + size - 1) / size;
        if (group->config.window) n = PAGED_MIN(n, (window + size - 1) / size + 1);
        if (e->n_groups == 1) return n <= e->n_blocks;
        const int64_t n_each = (int64_t)paged__extent_blocks_min(e->cache->extent_bytes, group->block_bytes);
        n_extents += (n + n_each - 1) / n_each;
    }
    return n_extents <= e->cache->n_extents;
}

/* The device that the configuration names, with the pool on it; nothing if that is the CPU. */
static paged_status open_device(paged_engine *e, paged_error *err) {
    static const char prefix[] = "opencl";
    const char *device = e->config.device;
    const size_t n = sizeof prefix - 1;
    e->config.device = NULL; /* the caller's */
    if (is_cpu(device)) return PAGED_OK;
    if (strncmp(device, prefix, n) != 0 || (device[n] && device[n] != ':'))
        return paged__fail(err, PAGED_ERR_INVALID_ARG,
                           "device is \"%.64s\"; cpu, opencl, opencl:NUMBER or opencl:NAME", device);
    const paged_cl_config config = {.struct_size = sizeof config,
                                    .device = device[n] ? device + n + 1 : NULL};
    paged_status s = paged_cl_open(&config, &e->cl, err);
    return s ? s : paged_cl_arena_create(e->cl, e->config.pool_bytes, &e->arena, err);
}

/* The pool, and the context that it can hold: the smaller of what was asked for and what fits. */
static paged_status create_cache(paged_engine *e, const paged_model_info *info, paged_error *err) {
    paged_engine_config *c = &e->config;
    paged_group_config groups[PAGED__MODEL_GROUPS];
    e->n_groups = fill_groups(e, info, groups);
    for (int32_t g = 0; g < e->n_groups; g++) e->windowed |= groups[g].window > 0 && !c->contiguous;
    const int64_t blocks_each = (c->n_ctx + c->block_size - 1) / c->block_size;
    e->packed_tails = !c->no_packed_tails && !c->contiguous && !e->windowed && !c->kv_plain &&
                      c->block_size >= 32 && c->block_size <= 256;
    /* A packed tail that is full is copied to a block before its tiles are free. */
    const int64_t n_spare = e->packed_tails;
    if (c->pool_bytes == 0)
        c->pool_bytes = paged_pool_bytes_for(groups, e->n_groups, c->block_size,
                                             (blocks_each * c->max_running + n_spare) * c->block_size);
    if (c->pool_bytes == 0)
        return paged__fail(err, PAGED_ERR_NO_MEMORY,
                           "the pool for %d requests of %d tokens is larger than the address space",
                           c->max_running, c->n_ctx);
    const size_t block_bytes = paged_block_bytes(&groups[0], c->block_size);
    if (c->pool_bytes < block_bytes)
        return paged__fail(err, PAGED_ERR_NO_BLOCKS,
                           "a pool of %zu bytes holds no block; one block of %d tokens needs %zu",
                           c->pool_bytes, c->block_size, block_bytes);
    e->n_ctx = c->n_ctx;
    if (!e->windowed)
        e->n_ctx = (int32_t)PAGED_MIN((int64_t)c->n_ctx,
                                      (int64_t)(c->pool_bytes / block_bytes) * c->block_size - n_spare);
    paged_status s = open_device(e, err);
    if (s) return s;
    const paged_cache_config cc = {.struct_size = sizeof cc,
                                   .groups = groups,
                                   .n_groups = e->n_groups,
                                   .block_size = c->block_size,
                                   .pool_bytes = c->pool_bytes,
                                   .max_seqs = c->max_running + 1, /* one to save and load with */
                                   .max_seq_tokens = e->n_ctx,
                                   .packed_tails = e->packed_tails,
                                   .contiguous = c->contiguous,
                                   .trim_after = 10 * 1000000000ull, /* ns, as of paged__now_ns() */
                                   .poison = c->poison,
                                   .arena = e->cl ? &e->arena : NULL,
                                   .event = c->n_stores ? paged__stores_event : c->event,
                                   .event_user = c->n_stores ? e : c->event_user};
    s = paged_cache_create(&cc, &e->cache, err);
    paged_cache_stats stats;
    if (s) return s;
    paged_cache_get_stats(e->cache, &stats);
    e->n_blocks = stats.n_blocks;
    while (!c->contiguous && e->n_ctx > 0 && !fits_alone(e, e->n_ctx)) e->n_ctx--;
    if (e->n_ctx == 0)
        return paged__fail(err, PAGED_ERR_NO_BLOCKS,
                           "a pool of %zu bytes holds no block of each of %d groups", c->pool_bytes,
                           e->n_groups);
    /* Nobody asks for more than he came with where runs are whole. */
    e->watermark = c->contiguous ? 0 : (stats.n_blocks + WATERMARK - 1) / WATERMARK;
    return PAGED_OK;
}

static paged_status runner_step(void *self, const paged__step *step, const float **logits, paged_error *err) {
    return paged__runner_step(self, step, logits, err);
}

static uint64_t runner_now(void *self) {
    (void)self;
    return paged__now_ns();
}

static void runner_run(void *self, void (*fn)(void *user, int32_t ith, int32_t nth), void *user) {
    paged__runner_run(self, fn, user);
}

/* The runner with the clock of the machine, or what the caller brought. */
static paged_status create_backend(paged_engine *e, paged_error *err) {
    const paged_engine_config *c = &e->config;
    int32_t n_layers = 0, n = 0;
    for (int32_t g = 0; g < e->n_groups; g++) n_layers += e->cache->groups[g].config.n_layers;
    paged_kv *kv = paged__calloc((size_t)n_layers, sizeof *kv);
    if (!kv) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for %d layers", n_layers);
    for (int32_t g = 0; e->backend.step && g < e->n_groups; g++)
        for (int32_t i = 0; i < e->cache->groups[g].config.n_layers; i++)
            PAGED_ASSERT(paged_cache_kv(e->cache, g, i, &kv[n++]) == PAGED_OK);
    for (int32_t i = 0; !e->backend.step && i < n_layers; i++) {
        const paged__layer *l = &e->model->layers[i];
        PAGED_ASSERT(paged_cache_kv(e->cache, l->group, l->in_group, &kv[i]) == PAGED_OK);
    }
    const paged__runner_config rc = {.max_tokens = c->chunk_tokens,
                                     .max_seqs = c->max_running,
                                     .max_outputs = e->max_outputs,
                                     .max_k = e->n_ctx,
                                     .max_shared_q = c->max_running > 1 ? c->max_running : 0,
                                     .n_threads = c->n_threads,
                                     .kv = kv,
                                     .cl = e->cl,
                                     .arena = &e->arena};
    paged_status s = PAGED_OK;
    if (!e->backend.step) {
        s = paged__runner_create(e->model, &rc, &e->runner, err);
        e->backend =
            (paged__backend){.self = e->runner, .step = runner_step, .now_ns = runner_now, .run = runner_run};
    } else if (e->backend.bind) {
        s = e->backend.bind(e->backend.self, kv, err);
    }
    paged__free(kv);
    return s;
}

static paged_status create_tables(paged_engine *e, paged_error *err) {
    const size_t n = (size_t)e->config.chunk_tokens, n_run = (size_t)e->config.max_running;
    e->n_slots = e->config.max_running + e->config.max_waiting;
    e->slots = paged__calloc((size_t)e->n_slots, sizeof *e->slots);
    e->waiting = paged__calloc((size_t)e->n_slots, sizeof *e->waiting);
    e->running = paged__calloc(n_run, sizeof *e->running);
    e->pieces = paged__calloc(n_run, sizeof *e->pieces);
    e->step_tokens = paged__calloc(n, sizeof *e->step_tokens);
    e->positions = paged__calloc(n, sizeof *e->positions);
    e->outputs = paged__calloc(n, sizeof *e->outputs);
    bool has_groups = true;
    for (int32_t g = 0; g < e->n_groups; g++) {
        e->step_slots[g] = paged__calloc(n, sizeof *e->step_slots[g]);
        e->first_k[g] = paged__calloc(n_run, sizeof *e->first_k[g]);
        has_groups = has_groups && e->step_slots[g] && e->first_k[g];
    }
    e->cu_seqlens_q = paged__calloc(n_run + 1, sizeof *e->cu_seqlens_q);
    e->shared = paged__calloc(n_run / 2 + 1, sizeof *e->shared);
    e->seqlens_k = paged__calloc(n_run, sizeof *e->seqlens_k);
    e->rows = paged__calloc(n_run, sizeof *e->rows);
    e->samplers = paged__calloc((size_t)e->config.n_threads, sizeof *e->samplers);
    bool has_samplers = e->samplers;
    for (int32_t i = 0; i < e->config.n_threads && has_samplers; i++) {
        e->samplers[i] = paged__sampler_create(e->n_vocab, e->tok);
        has_samplers = e->samplers[i];
    }
    if (e->slots && e->waiting && e->running && e->pieces && e->step_tokens && e->positions && e->outputs &&
        has_groups && e->shared && e->cu_seqlens_q && e->seqlens_k && e->rows && has_samplers)
        return PAGED_OK;
    return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for %d requests", e->n_slots);
}

static paged_status create(paged_engine *e, const paged_engine_config *config, paged_error *err) {
    if (!config) paged_engine_config_init(&e->config);
    if (config) {
        if (config->struct_size < sizeof config->struct_size || config->struct_size > sizeof *config)
            return paged__fail(err, PAGED_ERR_INVALID_ARG, "struct_size is %zu, this library knows up to %zu",
                               config->struct_size, sizeof *config);
        memcpy(&e->config, config, config->struct_size);
    }
    paged_model_info info;
    paged_model_get_info(e->model, &info);
    e->n_vocab = info.n_vocab;
    e->tok = paged_model_tokenizer(e->model);
    if (e->model->vocab_only && !e->backend.step)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "the model was loaded with vocab_only");
    paged_status s = fill_defaults(&info, &e->config, err);
    if (s) return s;
    /* A row for each that runs, and one at least for prompts whose log-probabilities are wanted. */
    e->max_outputs = PAGED_MAX(LOGITS_BYTES / (4 * e->n_vocab), e->config.max_running + 1);
    e->max_outputs = PAGED_MIN(e->max_outputs, e->config.chunk_tokens);
    s = create_cache(e, &info, err);
    if (!s) set_fingerprint(e);
    if (!s) s = create_backend(e, err);
    if (!s) s = create_tables(e, err);
    if (!s && e->runner)
        s = paged__model_self_test(e->model, e->config.n_threads, &e->deterministic, e->determinism,
                                   sizeof e->determinism, err);
    if (!s && e->config.warm_up) s = paged__engine_warm_up(e, err);
    if (!s) s = paged__stores_open(e, err); /* last, since they stay the caller's where create fails */
    return s;
}

paged_status paged__engine_create(const paged_model *model, const paged_engine_config *config,
                                  const paged__backend *backend, paged_engine **out, paged_error *err) {
    if (!model || !out) return paged__fail(err, PAGED_ERR_INVALID_ARG, "%s is NULL", model ? "out" : "model");
    paged_engine *e = paged__calloc(1, sizeof *e);
    if (!e) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for an engine");
    e->model = model;
    if (backend) e->backend = *backend;
    paged_status s = create(e, config, err);
    if (s) {
        paged_engine_free(e);
        return s;
    }
    *out = e;
    return PAGED_OK;
}

paged_status paged_engine_create(const paged_model *model, const paged_engine_config *config,
                                 paged_engine **out, paged_error *err) {
    return paged__engine_create(model, config, NULL, out, err);
}

void paged_engine_free(paged_engine *e) {
    if (!e) return;
    for (int32_t i = 0; e->slots && i < e->n_slots; i++) paged__request_clear(e, &e->slots[i]);
    paged__stores_close(e);
    for (int32_t i = 0; e->samplers && i < e->config.n_threads; i++) paged__sampler_free(e->samplers[i]);
    paged__free(e->samplers);
    paged__free(e->rows);
    paged__free(e->seqlens_k);
    paged__free(e->cu_seqlens_q);
    paged__free(e->shared);
    for (int32_t g = 0; g < PAGED__MODEL_GROUPS; g++) {
        paged__free(e->first_k[g]);
        paged__free(e->step_slots[g]);
    }
    paged__free(e->outputs);
    paged__free(e->positions);
    paged__free(e->step_tokens);
    paged__free(e->pieces);
    paged__free(e->running);
    paged__free(e->waiting);
    paged__free(e->slots);
    paged__runner_free(e->runner);
    paged_cache_free(e->cache);
    if (e->arena.destroy) e->arena.destroy(e->arena.ctx);
    paged_cl_close(e->cl);
    paged__free(e);
}

void paged_engine_get_info(const paged_engine *e, paged_engine_info *out) {
    paged_model_info info;
    paged_cache_stats stats;
    size_t block_bytes = 0; /* of all groups */
    paged_model_get_info(e->model, &info);
    paged_cache_get_stats(e->cache, &stats);
    for (int32_t g = 0; g < e->n_groups; g++) block_bytes += e->cache->groups[g].block_bytes;
    *out = (paged_engine_info){
        .n_ctx = e->n_ctx,
        .block_size = e->config.block_size,
        .chunk_tokens = e->config.chunk_tokens,
        .n_threads = e->config.n_threads,
        .max_running = e->config.max_running,
        .kv_type = (paged_type)e->config.kv_type,
        .kv_layout = e->config.kv_plain ? PAGED_LAYOUT_PLAIN : PAGED_LAYOUT_PACKED,
        .attn_kernels = e->runner ? paged__runner_attn_kernels(e->runner) : "none",
        .linear_kernels = info.linear_kernels,
        .weight_bytes = info.weight_bytes,
        .pool_bytes = e->config.pool_bytes,
        .compute_bytes = e->runner ? paged__runner_compute_bytes(e->runner) : 0,
        .kv_bytes_per_token = block_bytes / (size_t)e->config.block_size,
        .n_blocks = stats.n_blocks,
        .packed_tails = e->packed_tails,
        .contiguous = e->config.contiguous,
        .deterministic = e->deterministic,
    };
    memcpy(out->determinism, e->determinism, sizeof out->determinism);
}

bool paged_engine_get_device(const paged_engine *e, paged_cl_device *device, paged_cl_stats *stats) {
    if (!e->cl) return false;
    if (device) *device = *paged_cl_get_device(e->cl);
    if (stats) paged_cl_get_stats(e->cl, stats);
    return true;
}

void paged_engine_get_cache_stats(const paged_engine *e, paged_cache_stats *out) {
    paged_cache_get_stats(e->cache, out);
}

void paged_engine_get_stats(const paged_engine *e, paged_engine_stats *out) {
    *out = e->stats;
    out->n_running = e->n_running;
    out->n_waiting = e->n_waiting;
    for (int32_t i = 0; i < e->n_running; i++) out->n_wait[e->running[i]->wait]++;
    for (int32_t i = 0; i < e->n_waiting; i++) out->n_wait[e->waiting[i]->wait]++;
    paged__stores_stats(e, out);
}

const paged_cache *paged_engine_cache(const paged_engine *e) {
    return e->cache;
}

static paged_request_view view_of(const paged__request *r) {
    return (paged_request_view){.id = r->id,
                                .wait = r->wait,
                                .seq = r->state == PAGED__RUNNING ? r->seq : 0,
                                .n_prompt = r->n_prompt,
                                .n_tokens = r->n_tokens,
                                .n_cached = r->n_cached,
                                .n_reused = r->n_reused,
                                .n_preemptions = r->n_preemptions};
}

int32_t paged_engine_requests(const paged_engine *e, paged_request_view *out, int32_t capacity) {
    for (int32_t i = 0; i < e->n_running && i < capacity; i++) out[i] = view_of(e->running[i]);
    for (int32_t i = 0; i < e->n_waiting && e->n_running + i < capacity; i++)
        out[e->n_running + i] = view_of(e->waiting[i]);
    return e->n_running + e->n_waiting;
}

paged_status paged_engine_check(const paged_engine *e, paged_error *err) {
    return paged_cache_check(e->cache, err);
}
