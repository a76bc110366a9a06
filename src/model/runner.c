/* model/runner.c: the ggml side of a step. See runner.h.
 *
 *   create: kv, attention, thread pool, graph memory; the largest graph is built once, so that gallocr and
 *           the work buffer have their final size. Nothing allocates per step.
 *   step:   check -> plan attention -> graph of this shape (kept if the last had it) -> inputs -> compute
 *
 * ggml aborts on misuse, so everything that reaches it is checked here or at load.
 */
#include "model/runner.h"

#include <ggml-alloc.h>
#include <ggml-cpu.h>
#include <math.h>

#include "model/fused.h"

enum { NODES_PER_LAYER = 32, NODES_EXTRA = 32, ROPE_STACK = 64 };

typedef struct layer_ctx {
    paged__runner *runner;
    paged_kv kv;
} layer_ctx;

struct paged__runner {
    const paged_model *model;
    paged__runner_config config; /* config.kv is not kept */
    paged_attn *attn;
    layer_ctx *layers; /* [n_layers] what the custom nodes point to */
    float *rope;       /* [max_tokens][n_rot / 2][cos, sin] of this step */
    double *inv_freq;  /* [n_rot / 2] radians a position */
    uint8_t *scratch;  /* [n_threads][scratch_bytes] */
    size_t scratch_bytes;

    struct ggml_threadpool *pool;
    ggml_gallocr_t galloc;
    void *ctx_mem, *work;
    size_t ctx_bytes, work_bytes;
    struct ggml_context *ctx; /* the kept graph; reset when another shape comes */
    paged__graph graph;
    bool graph_merge; /* the kept graph has merge nodes */
    bool has_graph;

    const paged__step *step; /* while a step computes */
    uint64_t attn_start_ns, attn_ns, step_ns;
};

/* ---- our operators ---- */

static const float *row_f32(const struct ggml_tensor *t, int64_t row) {
    return (const float *)(const void *)((const uint8_t *)t->data + (size_t)row * t->nb[1]);
}

static int64_t stride_f32(const struct ggml_tensor *t) {
    return (int64_t)(t->nb[1] / sizeof(float));
}

/* x [n_heads, head_dim]: turns the first n_rot elements of each head in neighbouring pairs. cs [n_rot /
 * 2][cos, sin]. */
static void rotate(float *x, int32_t n_heads, int32_t head_dim, int32_t n_rot, const float *cs) {
    for (int32_t h = 0; h < n_heads; h++, x += head_dim) {
        for (int32_t i = 0; i < n_rot; i += 2) {
            const float c = cs[i], s = cs[i + 1], a = x[i], b = x[i + 1];
            x[i] = a * c - b * s;
            x[i + 1] = a * s + b * c;
        }
    }
}

/* src: q, k, v. Turns q and k where they are and writes k and v to the cache. dst is one element that orders
 * what follows. */
static void op_write(struct ggml_tensor *dst, int ith, int nth, void *user) {
    const layer_ctx *l = user;
    paged__runner *r = l->runner;
    const paged__hparams *hp = &r->model->hp;
    struct ggml_tensor *q = dst->src[0], *k = dst->src[1], *v = dst->src[2];
    const int32_t n = (int32_t)q->ne[1], begin = (int32_t)((int64_t)n * ith / nth),
                  end = (int32_t)((int64_t)n * (ith + 1) / nth);
    if (ith == 0) r->attn_start_ns = paged__now_ns();
    for (int32_t t = begin; t < end; t++) {
        const float *cs = r->rope + (int64_t)t * hp->n_rot;
        rotate((float *)(uintptr_t)row_f32(q, t), hp->n_heads, hp->head_dim_k, hp->n_rot, cs);
        rotate((float *)(uintptr_t)row_f32(k, t), hp->n_kv_heads, hp->head_dim_k, hp->n_rot, cs);
    }
    if (begin < end)
        paged_kv_write(&l->kv, row_f32(k, begin), stride_f32(k), row_f32(v, begin), stride_f32(v),
                       r->step->slots + begin, end - begin, 0, 1);
}

/* src: q, the write. dst [head_dim_v * n_heads, n_tokens]. */
static void op_attend(struct ggml_tensor *dst, int ith, int nth, void *user) {
    const layer_ctx *l = user;
    const struct ggml_tensor *q = dst->src[0];
    paged_attn_run(
        l->runner->attn, &l->kv,
        &(paged_attn_io){
            .q = q->data, .q_stride = stride_f32(q), .out = dst->data, .out_stride = stride_f32(dst)},
        ith, nth);
    if (ith == 0) l->runner->attn_ns += paged__now_ns() - l->runner->attn_start_ns;
}

static void op_merge(struct ggml_tensor *dst, int ith, int nth, void *user) {
    const layer_ctx *l = user;
    const uint64_t start = ith == 0 ? paged__now_ns() : 0;
    paged_attn_merge(l->runner->attn, &(paged_attn_io){.out = dst->data, .out_stride = stride_f32(dst)}, ith,
                     nth);
    if (ith == 0) l->runner->attn_ns += paged__now_ns() - start;
}

struct ggml_tensor *paged__graph_attention(paged__graph *g, int32_t layer, struct ggml_tensor *q,
                                           struct ggml_tensor *k, struct ggml_tensor *v, bool keep) {
    paged__runner *r = g->runner;
    const paged__hparams *hp = &r->model->hp;
    layer_ctx *l = &r->layers[layer];
    struct ggml_tensor *qkv[] = {q, k, v};
    struct ggml_tensor *written =
        ggml_custom_4d(g->ctx, GGML_TYPE_F32, 1, 1, 1, 1, qkv, 3, op_write, GGML_N_TASKS_MAX, l);
    if (!keep) {
        ggml_build_forward_expand(g->cgraph, written);
        return NULL;
    }
    struct ggml_tensor *src[] = {q, written};
    struct ggml_tensor *a = ggml_custom_4d(g->ctx, GGML_TYPE_F32, (int64_t)hp->n_heads * hp->head_dim_v,
                                           g->n_tokens, 1, 1, src, 2, op_attend, GGML_N_TASKS_MAX, l);
    return r->graph_merge ? ggml_custom_inplace(g->ctx, a, NULL, 0, op_merge, GGML_N_TASKS_MAX, l) : a;
}

/* ---- graph ---- */

static void build(paged__runner *r, int32_t n_tokens, int32_t n_outputs, bool merge) {
    const size_t n_nodes = (size_t)r->model->hp.n_layers * NODES_PER_LAYER + NODES_EXTRA;
    ggml_reset(r->ctx);
    r->graph_merge = merge;
    paged__graph *g = &r->graph;
    *g = (paged__graph){
        .ctx = r->ctx, .runner = r, .model = r->model, .n_tokens = n_tokens, .n_outputs = n_outputs};
    g->cgraph = ggml_new_graph_custom(r->ctx, n_nodes, false);
    g->tokens = ggml_new_tensor_1d(r->ctx, GGML_TYPE_I32, n_tokens);
    g->outputs = ggml_new_tensor_1d(r->ctx, GGML_TYPE_I32, PAGED_MAX(n_outputs, 1));
    ggml_set_input(g->tokens);
    ggml_set_input(g->outputs);
    r->model->arch->build(g);
    /* `outputs` is not in the graph when every row is wanted, but it is always filled. */
    ggml_build_forward_expand(g->cgraph, g->outputs);
    if (g->logits) {
        ggml_set_output(g->logits);
        ggml_build_forward_expand(g->cgraph, g->logits);
    }
}

static paged_status ready_graph(paged__runner *r, int32_t n_tokens, int32_t n_outputs, bool merge,
                                paged_error *err) {
    if (r->has_graph && r->graph.n_tokens == n_tokens && r->graph.n_outputs == n_outputs &&
        r->graph_merge == merge)
        return PAGED_OK;
    r->has_graph = false;
    build(r, n_tokens, n_outputs, merge);
    if (!ggml_gallocr_alloc_graph(r->galloc, r->graph.cgraph))
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for the graph of %d tokens", n_tokens);
    r->has_graph = true;
    return PAGED_OK;
}

static struct ggml_cplan plan_graph(const paged__runner *r) {
    struct ggml_cplan plan = ggml_graph_plan(r->graph.cgraph, r->config.n_threads, r->pool);
    plan.work_data = r->work;
    return plan;
}

/* Every shape that a step can have must fit what is taken here. The largest graph in tokens and outputs needs
 * the most of each buffer; the node paths for few tokens need no work memory. */
static paged_status reserve_graph(paged__runner *r, paged_error *err) {
    const paged__runner_config *c = &r->config;
    build(r, c->max_tokens, c->max_outputs, true);
    r->galloc = ggml_gallocr_new(ggml_backend_cpu_buffer_type());
    if (!r->galloc || !ggml_gallocr_reserve(r->galloc, r->graph.cgraph))
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for the graph of %d tokens and %d outputs",
                           c->max_tokens, c->max_outputs);
    r->work_bytes = plan_graph(r).work_size;
    build(r, 1, 1, true);
    r->work_bytes = PAGED_MAX(r->work_bytes, plan_graph(r).work_size);
    r->work = paged__alloc(PAGED_MAX(r->work_bytes, (size_t)64), 1);
    if (!r->work)
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a work buffer of %zu bytes",
                           r->work_bytes);
    return PAGED_OK;
}

/* ---- create ---- */

static paged_status create_attn(paged__runner *r, const paged_kv *kv, paged_error *err) {
    const paged__hparams *hp = &r->model->hp;
    for (int32_t i = 0; i < hp->n_layers; i++) r->layers[i] = (layer_ctx){.runner = r, .kv = kv[i]};
    const paged_attn_config c = {
        .struct_size = sizeof c,
        .n_heads = hp->n_heads,
        .n_kv_heads = hp->n_kv_heads,
        .head_dim_k = hp->head_dim_k,
        .head_dim_v = hp->head_dim_v,
        .block_size = kv[0].block_size,
        .type = kv[0].type,
        .layout = kv[0].layout,
        .n_threads_max = r->config.n_threads,
        .max_q = r->config.max_tokens,
        .max_seqs = r->config.max_seqs,
        .max_k = r->config.max_k,
    };
    return paged_attn_create(&c, &r->attn, err);
}

/* Frequencies of RoPE (Su et al. 2021) in double: angle = position * base^(-2i / n_rot) * freq_scale /
 * factor[i]. */
static void fill_frequencies(paged__runner *r) {
    const paged__hparams *hp = &r->model->hp;
    for (int32_t i = 0; i < hp->n_rot / 2; i++) {
        const double factor = r->model->rope_factors ? (double)r->model->rope_factors[i] : 1.0;
        r->inv_freq[i] =
            pow((double)hp->rope_freq_base, -2.0 * i / hp->n_rot) * (double)hp->rope_freq_scale / factor;
    }
}

static paged_status create(paged__runner *r, const paged_kv *kv, paged_error *err) {
    const paged__hparams *hp = &r->model->hp;
    const paged__runner_config *c = &r->config;
    const size_t n_nodes = (size_t)hp->n_layers * NODES_PER_LAYER + NODES_EXTRA;
    r->ctx_bytes = n_nodes * ggml_tensor_overhead() * 2 + ggml_graph_overhead_custom(n_nodes, false);
    r->scratch_bytes = (paged__fused_scratch_bytes(r->model) + 63) / 64 * 64;
    r->layers = paged__calloc((size_t)hp->n_layers, sizeof *r->layers);
    r->rope = paged__alloc((size_t)c->max_tokens * (size_t)hp->n_rot, sizeof *r->rope);
    r->inv_freq = paged__alloc((size_t)hp->n_rot / 2, sizeof *r->inv_freq);
    r->scratch = paged__alloc((size_t)c->n_threads, r->scratch_bytes);
    r->ctx_mem = paged__alloc(r->ctx_bytes, 1);
    if (!r->layers || !r->rope || !r->inv_freq || !r->scratch || !r->ctx_mem)
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a runner of %d tokens a step",
                           c->max_tokens);
    r->ctx = ggml_init(
        (struct ggml_init_params){.mem_size = r->ctx_bytes, .mem_buffer = r->ctx_mem, .no_alloc = true});
    struct ggml_threadpool_params pool = ggml_threadpool_params_default(c->n_threads);
    r->pool = ggml_threadpool_new(&pool);
    if (!r->ctx || !r->pool)
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "ggml has no memory for %d threads", c->n_threads);
    fill_frequencies(r);
    paged_status s = create_attn(r, kv, err);
    return s ? s : reserve_graph(r, err);
}

paged_status paged__runner_create(const paged_model *model, const paged__runner_config *config,
                                  paged__runner **out, paged_error *err) {
    if (model->vocab_only)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "the model was loaded with vocab_only");
    if (config->max_tokens < 1 || config->max_seqs < 1 || config->max_outputs < 1 || config->n_threads < 1 ||
        config->n_threads > GGML_MAX_N_THREADS)
        return paged__fail(
            err, PAGED_ERR_INVALID_ARG,
            "%d tokens, %d sequences, %d outputs, %d threads: each at least 1, threads at most %d",
            config->max_tokens, config->max_seqs, config->max_outputs, config->n_threads, GGML_MAX_N_THREADS);
    paged__runner *r = paged__calloc(1, sizeof *r);
    if (!r) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a runner");
    r->model = model;
    r->config = *config;
    r->config.kv = NULL;
    paged_status s = create(r, config->kv, err);
    if (s) {
        paged__runner_free(r);
        return s;
    }
    *out = r;
    return PAGED_OK;
}

void paged__runner_free(paged__runner *r) {
    if (!r) return;
    if (r->pool) ggml_threadpool_free(r->pool);
    if (r->galloc) ggml_gallocr_free(r->galloc);
    if (r->ctx) ggml_free(r->ctx);
    paged_attn_free(r->attn);
    paged__free(r->work);
    paged__free(r->ctx_mem);
    paged__free(r->scratch);
    paged__free(r->inv_freq);
    paged__free(r->rope);
    paged__free(r->layers);
    paged__free(r);
}

/* ---- step ---- */

static paged_status check_step(const paged__runner *r, const paged__step *step, paged_error *err) {
    const paged__runner_config *c = &r->config;
    if (step->n_tokens < 1 || step->n_tokens > c->max_tokens || step->n_outputs < 0 ||
        step->n_outputs > step->n_tokens || step->n_outputs > c->max_outputs)
        return paged__fail(err, PAGED_ERR_INVALID_ARG,
                           "a step of %d tokens and %d outputs; at most %d and %d", step->n_tokens,
                           step->n_outputs, c->max_tokens, c->max_outputs);
    for (int32_t i = 0; i < step->n_tokens; i++)
        if (step->tokens[i] < 0 || step->tokens[i] >= r->model->hp.n_vocab || step->positions[i] < 0)
            return paged__fail(err, PAGED_ERR_INVALID_ARG,
                               "token %d at position %d in row %d; the vocabulary has %d", step->tokens[i],
                               step->positions[i], i, r->model->hp.n_vocab);
    for (int32_t i = 0; i < step->n_outputs; i++)
        if (step->outputs[i] < (i ? step->outputs[i - 1] + 1 : 0) || step->outputs[i] >= step->n_tokens)
            return paged__fail(err, PAGED_ERR_INVALID_ARG, "output %d is row %d; rows ascend and end at %d",
                               i, step->outputs[i], step->n_tokens - 1);
    return paged_kv_check_slots(&r->layers[0].kv, step->slots, step->n_tokens, err);
}

static void fill_rope(paged__runner *r, const paged__step *step) {
    const int32_t half = r->model->hp.n_rot / 2;
    float *cs = r->rope;
    for (int32_t t = 0; t < step->n_tokens; t++) {
        for (int32_t i = 0; i < half; i++, cs += 2) {
            const double angle = (double)step->positions[t] * r->inv_freq[i];
            cs[0] = (float)cos(angle);
            cs[1] = (float)sin(angle);
        }
    }
}

paged_status paged__runner_step(paged__runner *r, const paged__step *step, const float **logits,
                                paged_error *err) {
    const uint64_t start = paged__now_ns();
    paged_status s = check_step(r, step, err);
    if (!s) s = paged_attn_plan(r->attn, &step->batch, &r->layers[0].kv, err);
    if (!s) s = ready_graph(r, step->n_tokens, step->n_outputs, paged_attn_needs_merge(r->attn), err);
    if (s) return s;

    fill_rope(r, step);
    memcpy(r->graph.tokens->data, step->tokens, (size_t)step->n_tokens * sizeof(int32_t));
    if (step->n_outputs)
        memcpy(r->graph.outputs->data, step->outputs, (size_t)step->n_outputs * sizeof(int32_t));
    r->step = step;
    struct ggml_cplan plan = plan_graph(r);
    PAGED_ASSERT(plan.work_size <= r->work_bytes);
    const enum ggml_status status = ggml_graph_compute(r->graph.cgraph, &plan);
    r->step = NULL;
    if (status != GGML_STATUS_SUCCESS)
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "ggml could not compute the step (%s)",
                           ggml_status_to_string(status));
    if (logits) *logits = r->graph.logits ? r->graph.logits->data : NULL;
    r->step_ns += paged__now_ns() - start;
    return PAGED_OK;
}

/* ---- facts ---- */

size_t paged__runner_compute_bytes(const paged__runner *r) {
    return ggml_gallocr_get_buffer_size(r->galloc, 0) + r->work_bytes + r->ctx_bytes;
}

const char *paged__runner_attn_kernels(const paged__runner *r) {
    return paged_attn_kernels(r->attn);
}

void paged__runner_times(const paged__runner *r, uint64_t *attn_ns, uint64_t *step_ns) {
    *attn_ns = r->attn_ns;
    *step_ns = r->step_ns;
}

int64_t paged__runner_max_rows(const paged__runner *r) {
    int64_t max = 0;
    for (int i = 0; i < ggml_graph_n_nodes(r->graph.cgraph); i++) {
        const struct ggml_tensor *t = ggml_graph_node(r->graph.cgraph, i);
        if (t != r->graph.logits) max = PAGED_MAX(max, ggml_nrows(t));
    }
    return max;
}

uint8_t *paged__runner_scratch(paged__runner *r, int ith) {
    return r->scratch + (size_t)ith * r->scratch_bytes;
}
