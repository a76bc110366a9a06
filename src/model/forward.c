/* model/forward.c: see forward.h. */
#include "model/forward.h"

#include <math.h>

/* Attention lasts from share 0 of its first phase to that of the phase behind it, whoever does them: any one
 * thread may be away. One after the other, they may write. */
static void time_attention(paged__runner *r, bool attends) {
    const uint64_t now = paged__now_ns();
    if (!attends) r->attn_ns += now - r->attn_start_ns;
    r->attn_start_ns = attends ? now : 0;
}

/* Goes through a phase: `while (next_share(t)) …` does t->share of t->nth. */
static bool next_share(paged__lane *t) {
    paged__runner *r = t->runner;
    t->share = paged__team_share(r->team, &t->place);
    if (t->share == 0 && t->attends != (r->attn_start_ns != 0)) time_attention(r, t->attends);
    return t->share >= 0;
}

/* The share's rows of n: [*begin, *end). */
static void rows_of(const paged__lane *t, int32_t n, int32_t *begin, int32_t *end) {
    *begin = (int32_t)((int64_t)n * t->share / t->nth);
    *end = (int32_t)((int64_t)n * (t->share + 1) / t->nth);
}

/* The same in elements, for what looks at each alone. */
static void elements_of(const paged__lane *t, int64_t n, int64_t *begin, int64_t *end) {
    *begin = n * t->share / t->nth;
    *end = n * (t->share + 1) / t->nth;
}

/* The rows that the layer attends, where those are not all. */
static const paged__kept *kept_of(const paged__lane *t, const paged__layer *l) {
    const paged__kept *kept = &t->runner->kept;
    return kept->is_fewer && l->index == t->model->hp.n_layers - 1 ? kept : NULL;
}

static int64_t q_dim_of(const paged_model *m) {
    return (int64_t)m->hp.n_heads * m->hp.head_dim_k;
}

/* ---- norms; sums in double ---- */

static void layer_norm(const float *x, int32_t n, const paged__norm *norm, float eps, float *out) {
    double sum = 0, squares = 0;
    for (int32_t i = 0; i < n; i++) sum += (double)x[i];
    const double mean = sum / n;
    for (int32_t i = 0; i < n; i++) squares += ((double)x[i] - mean) * ((double)x[i] - mean);
    const double scale = 1.0 / sqrt(squares / n + (double)eps);
    for (int32_t i = 0; i < n; i++)
        out[i] = (float)(((double)x[i] - mean) * scale) * norm->weight[i] + norm->bias[i];
}

/* Of a row of the width of x. */
static void normalise(const paged__lane *t, const float *x, const paged__norm *norm, float *out) {
    const paged__hparams *hp = &t->model->hp;
    if (t->model->arch->norm == PAGED__NORM_LAYER)
        layer_norm(x, hp->n_embd, norm, hp->norm_eps, out);
    else
        paged__rms_norm(out, x, hp->n_embd, norm->weight, hp->norm_eps);
}

/* ---- rows ---- */

/* cos and sin of all pairs at a position, as paged__turns has them. In double: a position of six digits
 * leaves an f32 angle no digit for the turn. */
static void make_turns(const paged__runner *r, int32_t which, int32_t row) {
    const int32_t half = r->model->hp.rope[which].n_rot / 2;
    float *c = r->turns[which] + (int64_t)row * r->turns_dim[which], *s = c + r->turns_dim[which] / 2;
    for (int32_t k = 0; k < half; k++) {
        const double angle = (double)r->step->positions[row] * r->inv_freq[which][k];
        const float cos_k = (float)(cos(angle) * r->magnitude[which]),
                    sin_k = (float)(sin(angle) * r->magnitude[which]);
        if (r->model->arch->rope == PAGED__ROPE_PAIRS) {
            c[2 * k] = c[2 * k + 1] = cos_k;
            s[2 * k] = -sin_k;
            s[2 * k + 1] = sin_k;
        } else {
            c[k] = cos_k;
            s[k] = sin_k;
        }
    }
}

/* Row i of x: of the embedding, and of learned positions; the angles of RoPE for its position. */
static void embed_row(const paged__lane *t, int32_t i) {
    const paged__runner *r = t->runner;
    const paged_model *m = t->model;
    const int32_t n_embd = m->hp.n_embd;
    float *x = t->x + (int64_t)i * n_embd;
    paged__weight_row(m->tok_embd, r->step->tokens[i], x);
    if (m->hp.embd_scale != 1.0f)
        for (int32_t k = 0; k < n_embd; k++) x[k] *= m->hp.embd_scale;
    if (m->pos_embd) {
        float *position = r->normed + (int64_t)t->ith * n_embd;
        paged__weight_row(m->pos_embd, r->step->positions[i], position);
        for (int32_t k = 0; k < n_embd; k++) x[k] += position[k];
    }
    for (int32_t which = 0; which < PAGED__MODEL_GROUPS; which++)
        if (r->inv_freq[which]) make_turns(r, which, i);
}

static void embed(paged__lane *t) {
    while (next_share(t)) {
        int32_t begin, end;
        rows_of(t, t->n_tokens, &begin, &end);
        for (int32_t i = begin; i < end; i++) embed_row(t, i);
    }
}

static void keep_outputs(paged__lane *t, const paged__kept *kept) {
    const paged__runner *r = t->runner;
    if (t->n_outputs == t->n_tokens) return;
    const int64_t n_embd = t->model->hp.n_embd;
    while (next_share(t)) {
        int32_t begin, end;
        rows_of(t, t->n_outputs, &begin, &end);
        for (int32_t i = begin; i < end; i++)
            memcpy(r->x_kept + i * n_embd, t->x + r->step->outputs[i] * n_embd,
                   (size_t)n_embd * sizeof *t->x);
    }
    t->x = r->x_kept;
    t->n_rows = t->n_outputs;
    t->row_map = kept ? kept->outputs : r->step->outputs;
}

/* ---- products ---- */

/* What a product reads: rows of n_cols floats, picked by row_map, normed if `norm` is given; or what the one
 * before it has made already. */
typedef struct source {
    const float *rows;
    int32_t n_cols;
    const int32_t *row_map;
    const paged__norm *norm;
    const paged__input *made;
} source;

static void set_input(const paged__lane *t, const paged__input *in, int32_t i, const source *from) {
    const int64_t row = from->row_map ? from->row_map[i] : i;
    const float *x = from->rows + row * from->n_cols;
    if (from->norm && t->model->arch->norm == PAGED__NORM_LAYER) {
        float *normed = t->runner->normed + (int64_t)t->ith * t->model->hp.n_embd;
        normalise(t, x, from->norm, normed);
        paged__input_set(in, i, normed, NULL, 0);
    } else {
        paged__input_set(in, i, x, from->norm ? from->norm->weight : NULL, t->model->hp.norm_eps);
    }
}

/* Few rows every thread makes for itself, when it has a share of the product; more are a phase before it. */
static bool is_shared(const paged__lane *t) {
    return t->n_rows > PAGED__FEW_ROWS;
}

/* Which weights come behind those of the product to come. A wrong guess brings lines that nobody wants. */
static void then_comes(paged__lane *t, const paged__affine *next, int32_t n_next) {
    t->next = next;
    t->n_next = next->w ? n_next : 0;
}

/* What this thread will read of them first; what is left of a guess is forgotten. */
static void look_ahead(paged__lane *t) {
    const paged__matrix *w[4];
    size_t n_bytes;
    int32_t n = 0;
    for (; n < t->n_next && t->next[n].w->is_packed; n++) w[n] = &t->next[n].w->matrix;
    t->n_next = 0;
    t->place.ahead = t->place.ahead_end = paged__linear_begin(w, n, t->n_rows, t->ith, t->nth, &n_bytes);
    if (n_bytes > 0) t->place.ahead_end += PAGED_MIN(n_bytes, (size_t)PAGED__AHEAD_BYTES);
}

static void make_shared_input(paged__lane *t, const source *from, const paged__input *in) {
    while (next_share(t)) {
        int32_t begin, end;
        rows_of(t, t->n_rows, &begin, &end);
        for (int32_t i = begin; i < end; i++) set_input(t, in, i, from);
    }
}

/* Runs a product whose matrices want their input, the rows of `from`, in one form. */
static void multiply_alike(paged__lane *t, const source *from, paged__product *p) {
    const paged__runner *r = t->runner;
    paged__input in;
    bool is_made = from->made || is_shared(t);
    if (r->rooms) p->room = r->rooms + (size_t)t->ith * (PAGED__ROOM_BYTES / sizeof *p->room);
    p->x = from->made ? from->made : &in;
    if (!from->made)
        paged__input_init(&in, paged__weight_form(p->w[0]), t->n_rows, from->n_cols,
                          is_shared(t) ? r->input : r->own_inputs + (size_t)t->ith * r->own_bytes);
    if (!from->made && is_shared(t)) make_shared_input(t, from, &in);
    while (next_share(t)) {
        for (int32_t i = 0; i < t->n_rows && !is_made; i++) set_input(t, &in, i, from);
        is_made = true;
        paged__product_run(p, t->share, t->nth);
        if (t->n_next > 0) look_ahead(t);
    }
    /* Who came too late for a share has nothing to look for. */
    if (t->n_next > 0) t->place.ahead = t->place.ahead_end;
    t->n_next = 0;
}

/* Runs p, whose w, bias, n_w, y, y_stride and epilogue are set, on `from`. Matrices that want different forms
 * of their input (a file may mix types) take turns. */
static void multiply(paged__lane *t, const source *from, const paged__product *p) {
    int64_t first = 0; /* output of matrix `at` */
    for (int32_t at = 0, next; at < p->n_w; at = next) {
        paged__product part = *p;
        int64_t width = 0;
        part.n_w = 0;
        for (next = at; next < p->n_w && paged__weight_form(p->w[next]) == paged__weight_form(p->w[at]);
             next++) {
            part.bias[part.n_w] = p->bias[next];
            part.w[part.n_w++] = p->w[next];
            width += p->w[next]->n_rows;
        }
        part.y = p->y + first;
        multiply_alike(t, from, &part);
        first += width;
    }
}

/* y [n_rows, m->w->n_rows] = m of the rows of `from` */
static void multiply_one(paged__lane *t, const paged__affine *m, const source *from, float *y) {
    multiply(t, from,
             &(paged__product){.w = {m->w}, .bias = {m->bias}, .n_w = 1, .y = y, .y_stride = m->w->n_rows});
}

/* x += m of the rows of `from`, or its norm */
static void multiply_add(paged__lane *t, const paged__affine *m, const source *from,
                         const paged__norm *norm) {
    const int64_t n_embd = t->model->hp.n_embd;
    if (!norm->weight) {
        multiply(t, from,
                 &(paged__product){.w = {m->w},
                                   .bias = {m->bias},
                                   .n_w = 1,
                                   .y = t->x,
                                   .y_stride = n_embd,
                                   .epilogue = PAGED__ADD,
                                   .residual = t->x,
                                   .residual_stride = n_embd});
        return;
    }
    multiply_one(t, m, from, t->runner->y);
    while (next_share(t)) {
        int32_t begin, end;
        rows_of(t, t->n_rows, &begin, &end);
        for (int32_t i = begin; i < end; i++) {
            float *y = t->runner->y + i * n_embd, *x = t->x + i * n_embd;
            normalise(t, y, norm, y);
            for (int64_t k = 0; k < n_embd; k++) x[k] += y[k];
        }
    }
}

void paged__project_qkv(paged__lane *t, const paged__layer *l, const paged__norm *norm) {
    const paged__runner *r = t->runner;
    const paged__kept *kept = kept_of(t, l);
    source normed = {.rows = t->x, .n_cols = t->model->hp.n_embd, .norm = norm};
    then_comes(t, &l->wo, 1);
    paged__product p = {.y = r->qkv, .y_stride = r->qkv_dim};
    if (kept) p.y += q_dim_of(t->model);
    for (int32_t i = kept ? 1 : 0; i < l->n_qkv; i++, p.n_w++) {
        p.w[p.n_w] = l->qkv[i].w;
        p.bias[p.n_w] = l->qkv[i].bias;
    }
    multiply(t, &normed, &p);
    if (!kept || kept->n_rows == 0) return;
    normed.row_map = kept->rows;
    t->n_rows = kept->n_rows;
    multiply(
        t, &normed,
        &(paged__product){
            .w = {l->qkv[0].w}, .bias = {l->qkv[0].bias}, .n_w = 1, .y = r->qkv, .y_stride = r->qkv_dim});
    t->n_rows = t->n_tokens;
}

void paged__add_attention(paged__lane *t, const paged__layer *l) {
    const paged__runner *r = t->runner;
    then_comes(t, l->gate.w ? &l->gate : &l->up, 1);
    multiply_add(t, &l->wo, &(source){.rows = r->a, .n_cols = (int32_t)r->a_dim, .row_map = t->row_map},
                 &l->attn_post_norm);
}

/* ---- feed-forward ---- */

static float activate(paged__activation activation, float x) {
    if (activation == PAGED__GELU_ERF) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    return paged__gate(activation == PAGED__SILU ? PAGED__SWIGLU : PAGED__GEGLU, x, 1.0f);
}

/* h = act(h), of a gated unit ⊙ up */
static void activate_hidden(paged__lane *t, paged__activation activation, const float *up) {
    const paged__runner *r = t->runner;
    while (next_share(t)) {
        int64_t begin, end;
        elements_of(t, (int64_t)t->n_rows * t->model->hp.n_ff, &begin, &end);
        for (int64_t i = begin; i < end; i++) r->h[i] = activate(activation, r->h[i]) * (up ? up[i] : 1.0f);
    }
}

/* True: h is never floats, but the input of `down` in its form, in the same memory. */
static bool hidden_input(const paged__lane *t, const paged__layer *l, paged__input *in) {
    if (!l->gate.w || !paged__weight_chains(l->gate.w, l->up.w, l->down.w)) return false;
    paged__input_init(in, paged__weight_form(l->down.w), t->n_rows, t->model->hp.n_ff,
                      (uint8_t *)t->runner->h);
    return true;
}

void paged__make_hidden(paged__lane *t, const paged__layer *l, const paged__norm *norm,
                        paged__activation activation) {
    const paged__runner *r = t->runner;
    const paged__hparams *hp = &t->model->hp;
    const source normed = {.rows = t->x, .n_cols = hp->n_embd, .norm = norm};
    paged__input next;
    then_comes(t, &l->down, 1);
    if (!l->gate.w) {
        multiply_one(t, &l->up, &normed, r->h);
        activate_hidden(t, activation, NULL);
    } else if (paged__weight_form(l->gate.w) != paged__weight_form(l->up.w)) {
        /* One after the other, then both together. */
        multiply_one(t, &l->gate, &normed, r->h);
        multiply_one(t, &l->up, &normed, r->up);
        activate_hidden(t, activation, r->up);
    } else {
        multiply(t, &normed,
                 &(paged__product){.w = {l->gate.w, l->up.w},
                                   .bias = {l->gate.bias, l->up.bias},
                                   .n_w = 2,
                                   .y = r->h,
                                   .y_stride = hp->n_ff,
                                   .next = hidden_input(t, l, &next) ? &next : NULL,
                                   .epilogue = activation == PAGED__SILU ? PAGED__SWIGLU : PAGED__GEGLU});
    }
}

void paged__add_hidden(paged__lane *t, const paged__layer *l) {
    paged__input made;
    if (l->index + 1 < t->model->hp.n_layers)
        then_comes(t, t->model->layers[l->index + 1].qkv, t->model->layers[l->index + 1].n_qkv);
    else
        then_comes(t, &t->model->output, 1);
    const source hidden = {
        .rows = t->runner->h, .n_cols = t->model->hp.n_ff, .made = hidden_input(t, l, &made) ? &made : NULL};
    multiply_add(t, &l->down, &hidden, &l->ffn_post_norm);
}

/* ---- attention ---- */

/* x [n_heads, head_dim_k] of the token in row i: norm [head_dim_k] or NULL, then RoPE. */
static void prepare_heads(const paged__lane *t, const paged__layer *l, int32_t i, float *x, int32_t n_heads,
                          const float *norm) {
    const paged__runner *r = t->runner;
    const paged__hparams *hp = &t->model->hp;
    for (int32_t h = 0; norm && h < n_heads; h++)
        paged__rms_norm(x + (int64_t)h * hp->head_dim_k, x + (int64_t)h * hp->head_dim_k, hp->head_dim_k,
                        norm, hp->norm_eps);
    if (l->rope < 0) return;
    const int64_t dim = r->turns_dim[l->rope];
    const float *c = r->turns[l->rope] + i * dim;
    const paged__turns turns = {.neighbours = t->model->arch->rope == PAGED__ROPE_PAIRS,
                                .n_rot = hp->rope[l->rope].n_rot,
                                .cos = c,
                                .sin = c + dim / 2};
    paged__turn(x, &turns, n_heads, hp->head_dim_k);
}

/* Norms of heads and RoPE on k of the share's rows begin … end - 1, and on its part of q. */
static void prepare_rows(paged__lane *t, const paged__layer *l, int32_t *begin_out, int32_t *end_out) {
    const paged__runner *r = t->runner;
    const paged__hparams *hp = &t->model->hp;
    const paged__kept *kept = kept_of(t, l);
    const int64_t q_dim = q_dim_of(t->model);
    int32_t begin, end, q_begin, q_end;
    rows_of(t, t->n_tokens, &begin, &end);
    for (int32_t i = begin; i < end; i++) {
        float *q = r->qkv + i * r->qkv_dim;
        if (!kept) prepare_heads(t, l, i, q, hp->n_heads, l->q_norm);
        prepare_heads(t, l, i, q + q_dim, hp->n_kv_heads, l->k_norm);
    }
    *begin_out = begin;
    *end_out = end;
    if (!kept) return;
    rows_of(t, kept->n_rows, &q_begin, &q_end);
    for (int32_t i = q_begin; i < q_end; i++)
        prepare_heads(t, l, kept->rows[i], r->qkv + i * r->qkv_dim, hp->n_heads, l->q_norm);
}

/* Keys of row 0 in qkv; values are k_dim behind. */
static const float *keys_of_rows(const paged__runner *r, int64_t *k_dim) {
    *k_dim = (int64_t)r->model->hp.n_kv_heads * r->model->hp.head_dim_k;
    return r->qkv + q_dim_of(r->model);
}

static void write_kv(paged__lane *t, const paged__layer *l) {
    paged__runner *r = t->runner;
    while (next_share(t)) {
        int32_t begin, end;
        int64_t k_dim;
        prepare_rows(t, l, &begin, &end);
        const float *k = keys_of_rows(r, &k_dim) + begin * r->qkv_dim;
        if (begin < end)
            paged_kv_write(&r->kv[l->index], k, r->qkv_dim, k + k_dim, r->qkv_dim,
                           r->step->slots[l->group] + begin, end - begin, 0, 1);
        if (t->share == 0 && kept_of(t, l) && t->n_outputs > 0) paged__runner_plan_kept(r, l);
    }
}

static void attend_here(paged__lane *t, const paged__layer *l, const paged_attn_io *io) {
    paged__runner *r = t->runner;
    paged_attn *attn = r->attn[l->group];
    const bool needs_merge = kept_of(t, l) ? r->kept.needs_merge : r->needs_merge[l->group];
    while (next_share(t)) paged_attn_run(attn, &r->kv[l->index], io, t->share, t->nth);
    while (needs_merge && next_share(t)) paged_attn_merge(attn, io, t->share, t->nth);
}

/* Both on the device, which one thread at a time talks to. After a failure the step goes on with what is
 * there, since the others cannot be told to stop, and fails at its end. */
static void write_and_attend_away(paged__lane *t, const paged__layer *l, const paged_attn_io *io) {
    paged__runner *r = t->runner;
    paged_cl_attn *attn = r->away[l->group];
    const paged_kv *kv = &r->kv[l->index];
    int32_t begin, end;
    int64_t k_dim;
    while (next_share(t)) prepare_rows(t, l, &begin, &end);
    while (next_share(t)) {
        if (t->share != 0 || r->device) continue;
        const float *k = keys_of_rows(r, &k_dim);
        r->device = paged_cl_kv_write(attn, kv, k, r->qkv_dim, k + k_dim, r->qkv_dim, NULL, &r->device_error);
        if (!r->device && io) r->device = paged_cl_attn_run(attn, kv, io, &r->device_error);
    }
}

bool paged__attend(paged__lane *t, const paged__layer *l) {
    paged__runner *r = t->runner;
    const bool is_last = l->index == t->model->hp.n_layers - 1;
    const paged_attn_io io = {.q = r->qkv, .q_stride = r->qkv_dim, .out = r->a};
    const bool attends = !is_last || t->n_outputs > 0;
    t->attends = attends;
    if (r->away[l->group]) {
        write_and_attend_away(t, l, attends ? &io : NULL);
    } else {
        write_kv(t, l);
        if (attends) attend_here(t, l, &io);
    }
    t->attends = false;
    if (!attends) return false;
    if (is_last) keep_outputs(t, kept_of(t, l));
    return true;
}

/* ---- all of it ---- */

static void project_logits(paged__lane *t) {
    const paged_model *m = t->model;
    const float cap = m->hp.logit_softcap;
    float *logits = t->runner->logits;
    multiply_one(t, &m->output, &(source){.rows = t->x, .n_cols = m->hp.n_embd, .norm = &m->output_norm},
                 logits);
    if (cap == 0) return;
    while (next_share(t)) {
        int64_t begin, end;
        elements_of(t, (int64_t)t->n_rows * m->hp.n_vocab, &begin, &end);
        for (int64_t i = begin; i < end; i++) logits[i] = cap * tanhf(logits[i] / cap);
    }
}

void paged__forward(paged__lane *t) {
    const paged_model *m = t->model;
    embed(t);
    for (int32_t i = 0; i < m->hp.n_layers; i++) m->arch->forward_layer(t, &m->layers[i]);
    if (t->n_outputs > 0) project_logits(t);
}
