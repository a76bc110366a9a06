/* model/runner.c: create, check, run. See runner.h; what a step computes is in forward.c and arch/.
 *
 *   create: attention, team, one arena for all activations of the largest step. Nothing allocates per step.
 *   step:   check -> plan attention (all that can fail) -> paged__forward() on every thread of the team
 */
#include "model/runner.h"

#include "base/team.h"
#include "model/forward.h"

/* ---- create ---- */

/* Layers of a group differ in where their keys are and in nothing else. */
static paged_status create_attn(paged__runner *r, const paged_kv *kv, paged_error *err) {
    const paged__hparams *hp = &r->model->hp;
    memcpy(r->kv, kv, (size_t)hp->n_layers * sizeof *kv);
    paged_status s = PAGED_OK;
    for (int32_t g = 0; g < r->model->n_groups && !s; g++) {
        const paged_attn_config c = {
            .struct_size = sizeof c,
            .n_heads = hp->n_heads,
            .n_kv_heads = hp->n_kv_heads,
            .head_dim_k = hp->head_dim_k,
            .head_dim_v = hp->head_dim_v,
            .block_size = kv[0].block_size,
            .type = kv[0].type,
            .layout = kv[0].layout,
            .scale = hp->attn_scale,
            .window = r->model->groups[g].window,
            .softcap = hp->attn_softcap,
            .n_threads_max = r->config.n_threads,
            .max_q = r->config.max_tokens,
            .max_seqs = r->config.max_seqs,
            .max_k = r->config.max_k,
            .max_shared_q = r->model->groups[g].window ? 0 : r->config.max_shared_q,
        };
        s = r->config.cl ? paged_cl_attn_create(r->config.cl, r->config.arena, &c, &r->away[g], err)
                         : paged_attn_create(&c, &r->attn[g], err);
    }
    return s;
}

/* Whether a layer turns by hp.rope[which]. */
static bool uses_rope(const paged_model *m, int32_t which) {
    for (int32_t i = 0; i < m->hp.n_layers; i++)
        if (m->layers[i].rope == which) return true;
    return false;
}

/* The most that an input of any product needs for n_rows. */
static size_t widest_input(const paged_model *m, int32_t n_rows) {
    size_t most = 0;
    for (int32_t i = 0; i < m->n_weights; i++) {
        const paged__weight *w = &m->weights[i];
        if (paged__model_multiplies(m, w))
            most = PAGED_MAX(most, paged__input_bytes(paged__weight_form(w), n_rows, w->n_cols));
    }
    return most;
}

static bool has_mixed_ffn(const paged_model *m) {
    for (int32_t i = 0; i < m->hp.n_layers; i++) {
        const paged__layer *l = &m->layers[i];
        if (l->gate.w && paged__weight_form(l->gate.w) != paged__weight_form(l->up.w)) return true;
    }
    return false;
}

static bool has_post_norms(const paged_model *m) {
    for (int32_t i = 0; i < m->hp.n_layers; i++)
        if (m->layers[i].attn_post_norm.weight || m->layers[i].ffn_post_norm.weight) return true;
    return false;
}

static size_t aligned(size_t n_bytes) {
    return (n_bytes + 63) / 64 * 64;
}

static bool multiplies_as_bf16(const paged_model *m) {
    for (int32_t i = 0; i < m->n_weights; i++)
        if (m->weights[i].as_bf16) return true;
    return false;
}

/* The next n_bytes of the arena; NULL while it is only measured. */
static void *take(uint8_t *arena, size_t *at, size_t n_bytes) {
    void *part = arena ? arena + *at : NULL;
    *at += aligned(n_bytes);
    return part;
}

/* Cuts r->arena, or only measures if there is none yet; returns its size. Nothing overflows: every dimension
 * was bounded when the model was loaded. */
static size_t lay_out(paged__runner *r) {
    const paged__hparams *hp = &r->model->hp;
    const size_t n = (size_t)r->config.max_tokens, n_out = (size_t)r->config.max_outputs, f32 = sizeof(float);
    const size_t n_embd = (size_t)hp->n_embd, n_ff = (size_t)hp->n_ff;
    size_t at = 0;
    r->x = take(r->arena, &at, n * n_embd * f32);
    r->x_kept = take(r->arena, &at, n_out * n_embd * f32);
    r->y = take(r->arena, &at, has_post_norms(r->model) ? n * n_embd * f32 : 0);
    r->qkv = take(r->arena, &at, n * (size_t)r->qkv_dim * f32);
    r->a = take(r->arena, &at, n * (size_t)r->a_dim * f32);
    r->h = take(r->arena, &at, n * n_ff * f32);
    r->up = take(r->arena, &at, has_mixed_ffn(r->model) ? n * n_ff * f32 : 0);
    for (int32_t i = 0; i < PAGED__MODEL_GROUPS; i++)
        r->turns[i] = take(r->arena, &at, n * (size_t)r->turns_dim[i] * f32);
    r->normed = take(r->arena, &at, (size_t)r->config.n_threads * n_embd * f32);
    r->input = take(r->arena, &at, widest_input(r->model, r->config.max_tokens));
    r->own_inputs = take(r->arena, &at, (size_t)r->config.n_threads * r->own_bytes);
    if (multiplies_as_bf16(r->model))
        r->rooms = take(r->arena, &at, (size_t)r->config.n_threads * PAGED__ROOM_BYTES);
    r->kept.rows = take(r->arena, &at, n * sizeof *r->kept.rows);
    r->kept.outputs = take(r->arena, &at, n_out * sizeof *r->kept.outputs);
    r->kept.cu_seqlens_q =
        take(r->arena, &at, ((size_t)r->config.max_seqs + 1) * sizeof *r->kept.cu_seqlens_q);
    r->logits = take(r->arena, &at, n_out * (size_t)hp->n_vocab * f32);
    return at;
}

static paged_status create(paged__runner *r, const paged_kv *kv, paged_error *err) {
    const paged__hparams *hp = &r->model->hp;
    r->a_dim = (int64_t)hp->n_heads * hp->head_dim_v;
    r->qkv_dim =
        (int64_t)(hp->n_heads + hp->n_kv_heads) * hp->head_dim_k + (int64_t)hp->n_kv_heads * hp->head_dim_v;
    r->own_bytes = aligned(widest_input(r->model, PAGED_MIN(r->config.max_tokens, (int32_t)PAGED__FEW_ROWS)));
    bool ok = true;
    for (int32_t i = 0; i < PAGED__MODEL_GROUPS; i++) {
        if (!uses_rope(r->model, i)) continue;
        r->turns_dim[i] = (int64_t)hp->rope[i].n_rot * (r->model->arch->rope == PAGED__ROPE_PAIRS ? 2 : 1);
        r->inv_freq[i] = paged__alloc((size_t)hp->rope[i].n_rot / 2, sizeof *r->inv_freq[i]);
        ok = ok && r->inv_freq[i];
        if (r->inv_freq[i])
            r->magnitude[i] = paged__rope_frequencies(&hp->rope[i], r->config.max_k, r->inv_freq[i]);
    }
    r->arena_bytes = lay_out(r);
    r->kv = paged__calloc((size_t)hp->n_layers, sizeof *r->kv);
    r->arena = paged__alloc_huge(r->arena_bytes);
    if (!ok || !r->kv || !r->arena)
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for steps of %d tokens: %zu bytes",
                           r->config.max_tokens, r->arena_bytes);
    lay_out(r);
    paged_status s = create_attn(r, kv, err);
    return s ? s : paged__team_create(r->config.n_threads, false, &r->team, err);
}

paged_status paged__runner_create(const paged_model *model, const paged__runner_config *config,
                                  paged__runner **out, paged_error *err) {
    if (model->vocab_only)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "the model was loaded with vocab_only");
    if (config->max_tokens < 1 || config->max_seqs < 1 || config->max_outputs < 1 || config->n_threads < 1 ||
        config->n_threads > PAGED__TEAM_MAX)
        return paged__fail(
            err, PAGED_ERR_INVALID_ARG,
            "%d tokens, %d sequences, %d outputs, %d threads: each at least 1, threads at most %d",
            config->max_tokens, config->max_seqs, config->max_outputs, config->n_threads, PAGED__TEAM_MAX);
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
    paged__team_free(r->team);
    for (int32_t i = 0; i < PAGED__MODEL_GROUPS; i++) {
        paged_attn_free(r->attn[i]);
        paged_cl_attn_free(r->away[i]);
        paged__free(r->inv_freq[i]);
    }
    paged__free(r->arena);
    paged__free(r->kv);
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
    return PAGED_OK;
}

/* Whether a layer of each group, which stands for all of it, can be written and read as the step says. */
static paged_status plan(paged__runner *r, const paged__step *step, paged_error *err) {
    paged_status s = PAGED_OK;
    for (int32_t g = 0; g < r->model->n_groups && !s; g++) {
        int32_t il = 0;
        while (r->model->layers[il].group != g) il++;
        const paged_kv *kv = &r->kv[il];
        if (r->away[g]) {
            s = paged_cl_slots_plan(r->away[g], kv, step->slots[g], step->n_tokens, err);
            if (!s) s = paged_cl_attn_plan(r->away[g], &step->batch[g], kv, err);
        } else {
            s = paged_kv_check_slots(kv, step->slots[g], step->n_tokens, err);
            if (!s) s = paged_attn_plan(r->attn[g], &step->batch[g], kv, err);
            r->needs_merge[g] = !s && paged_attn_needs_merge(r->attn[g]);
        }
    }
    return s;
}

/* Fills r->kept. A device attends what was planned; a matrix that gives q, k and v at once cannot leave q
 * away. */
static void choose_kept(paged__runner *r, const paged__step *step) {
    paged__kept *kept = &r->kept;
    const paged_batch *batch = &step->batch[0]; /* all groups have the same sequences */
    const int32_t n_seqs = batch->tables.n_seqs, *cu = batch->cu_seqlens_q;
    int32_t n = 0, n_outputs = 0;
    kept->is_fewer = false;
    if (r->config.cl || r->model->layers[r->model->hp.n_layers - 1].n_qkv != 3) return;
    for (int32_t seq = 0; seq < n_seqs; seq++) {
        kept->cu_seqlens_q[seq] = n;
        if (n_outputs == step->n_outputs || step->outputs[n_outputs] >= cu[seq + 1]) continue;
        for (int32_t row = step->outputs[n_outputs]; row < cu[seq + 1]; row++) {
            if (n_outputs < step->n_outputs && step->outputs[n_outputs] == row)
                kept->outputs[n_outputs++] = n;
            kept->rows[n++] = row;
        }
    }
    kept->cu_seqlens_q[n_seqs] = kept->n_rows = n;
    kept->is_fewer = n < step->n_tokens && n_outputs == step->n_outputs;
}

void paged__runner_plan_kept(paged__runner *r, const paged__layer *l) {
    paged_error err;
    paged_batch batch = r->step->batch[l->group];
    batch.cu_seqlens_q = r->kept.cu_seqlens_q;
    /* A part of what the plan at the step's begin has accepted. */
    PAGED_ASSERT(paged_attn_plan(r->attn[l->group], &batch, &r->kv[l->index], &err) == PAGED_OK);
    r->kept.needs_merge = paged_attn_needs_merge(r->attn[l->group]);
}

static void run_lane(void *user, int32_t ith, int32_t nth) {
    paged__runner *r = user;
    paged__lane lane = {.runner = r,
                        .model = r->model,
                        .place = {.ith = ith},
                        .ith = ith,
                        .nth = nth,
                        .n_tokens = r->step->n_tokens,
                        .n_outputs = r->step->n_outputs,
                        .n_rows = r->step->n_tokens,
                        .x = r->x};
    paged__forward(&lane);
}

paged_status paged__runner_step(paged__runner *r, const paged__step *step, const float **logits,
                                paged_error *err) {
    const uint64_t start = paged__now_ns();
    paged_status s = check_step(r, step, err);
    if (!s) s = plan(r, step, err);
    if (s) return s;
    choose_kept(r, step);
    r->step = step;
    r->device = PAGED_OK;
    paged__team_run(r->team, run_lane, r);
    r->step = NULL;
    if (r->device) return paged__fail(err, r->device, "%s", r->device_error.message);
    if (logits) *logits = step->n_outputs ? r->logits : NULL;
    r->step_ns += paged__now_ns() - start;
    return PAGED_OK;
}

void paged__runner_run(paged__runner *r, void (*fn)(void *user, int32_t ith, int32_t nth), void *user) {
    paged__team_run(r->team, fn, user);
}

/* ---- facts ---- */

size_t paged__runner_compute_bytes(const paged__runner *r) {
    return r->arena_bytes;
}

const char *paged__runner_attn_kernels(const paged__runner *r) {
    return r->away[0] ? "opencl" : paged_attn_kernels(r->attn[0]);
}

void paged__runner_times(const paged__runner *r, uint64_t *attn_ns, uint64_t *step_ns) {
    *attn_ns = r->attn_ns;
    *step_ns = r->step_ns;
}

void *paged__runner_activations(paged__runner *r, size_t *size_bytes) {
    *size_bytes = r->arena_bytes;
    return r->arena;
}

int64_t paged__runner_max_rows(const paged__runner *r) {
    return PAGED_MAX(r->config.max_tokens, r->config.max_outputs);
}
