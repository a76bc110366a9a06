/* model/forward.c: see forward.h. */
#include "model/forward.h"

#include <math.h>

#include "base/team.h"

static void barrier(paged__lane *t) {
    paged__team_barrier(t->runner->team);
}

/* This thread's rows of n: [*begin, *end). */
static void my_rows(const paged__lane *t, int32_t n, int32_t *begin, int32_t *end) {
    *begin = (int32_t)((int64_t)n * t->ith / t->nth);
    *end = (int32_t)((int64_t)n * (t->ith + 1) / t->nth);
}

/* ---- rows ---- */

void paged__embed(paged__lane *t) {
    const paged__runner *r = t->runner;
    const int32_t half = t->model->hp.n_rot / 2;
    int32_t begin, end;
    my_rows(t, t->n_tokens, &begin, &end);
    for (int32_t i = begin; i < end; i++) {
        paged__weight_row(t->model->tok_embd, r->step->tokens[i], t->x + (int64_t)i * t->model->hp.n_embd);
        float *cs = r->rope + (int64_t)i * 2 * half;
        for (int32_t k = 0; k < half; k++, cs += 2) {
            /* In double: a position of six digits leaves an f32 angle no digit for the turn. */
            const double angle = (double)r->step->positions[i] * r->inv_freq[k];
            cs[0] = (float)cos(angle);
            cs[1] = (float)sin(angle);
        }
    }
    barrier(t);
}

void paged__keep_outputs(paged__lane *t) {
    const paged__runner *r = t->runner;
    if (t->n_outputs == t->n_tokens) return;
    const int64_t n_embd = t->model->hp.n_embd;
    int32_t begin, end;
    my_rows(t, t->n_outputs, &begin, &end);
    for (int32_t i = begin; i < end; i++)
        memcpy(r->x_kept + i * n_embd, t->x + r->step->outputs[i] * n_embd, (size_t)n_embd * sizeof *t->x);
    t->x = r->x_kept;
    t->n_rows = t->n_outputs;
    t->row_map = r->step->outputs;
    barrier(t);
}

/* ---- products ---- */

/* What a product reads: rows of n_cols floats, picked by row_map, normalised if `norm` is given. */
typedef struct source {
    const float *rows;
    int32_t n_cols;
    const int32_t *row_map;
    const float *norm;
} source;

/* The rows of x in the form that w wants. Few rows every thread makes for itself; more are divided, and a
 * barrier follows. */
static void make_input(paged__lane *t, const source *from, const paged__weight *w, paged__input *in) {
    const paged__runner *r = t->runner;
    const bool is_shared = t->n_rows > PAGED__FEW_ROWS;
    int32_t begin = 0, end = t->n_rows;
    if (is_shared) my_rows(t, t->n_rows, &begin, &end);
    paged__input_init(in, paged__weight_form(w), t->n_rows, from->n_cols,
                      is_shared ? r->input : r->own_inputs + (size_t)t->ith * r->own_bytes);
    for (int32_t i = begin; i < end; i++) {
        const int64_t row = from->row_map ? from->row_map[i] : i;
        paged__input_set(in, i, from->rows + row * from->n_cols, from->norm, t->model->hp.norm_eps);
    }
    if (is_shared) barrier(t);
}

/* Runs p, whose w, n_w, y, y_stride and epilogue are set, on `from`. Matrices that want different forms of
 * their input (a file may mix types) take turns. */
static void multiply(paged__lane *t, const source *from, const paged__product *p) {
    int64_t first = 0; /* output of matrix `at` */
    for (int32_t at = 0, next; at < p->n_w; at = next) {
        paged__product part = *p;
        paged__input in;
        int64_t width = 0;
        part.n_w = 0;
        for (next = at; next < p->n_w && paged__weight_form(p->w[next]) == paged__weight_form(p->w[at]);
             next++) {
            part.w[part.n_w++] = p->w[next];
            width += p->w[next]->n_rows;
        }
        if (at > 0) barrier(t); /* the others may still read the input before */
        make_input(t, from, p->w[at], &in);
        part.x = &in;
        part.y = p->y + first;
        paged__product_run(&part, t->ith, t->nth);
        first += width;
    }
    barrier(t);
}

static void multiply_add(paged__lane *t, const paged__weight *w, const source *from) {
    const int64_t n_embd = t->model->hp.n_embd;
    multiply(t, from,
             &(paged__product){.w = {w},
                               .n_w = 1,
                               .y = t->x,
                               .y_stride = n_embd,
                               .epilogue = PAGED__ADD,
                               .residual = t->x,
                               .residual_stride = n_embd});
}

void paged__project_qkv(paged__lane *t, const paged__layer *l) {
    const paged__runner *r = t->runner;
    multiply(t, &(source){.rows = t->x, .n_cols = t->model->hp.n_embd, .norm = l->attn_norm},
             &(paged__product){.w = {l->wq, l->wk, l->wv}, .n_w = 3, .y = r->qkv, .y_stride = r->qkv_dim});
}

void paged__add_attention(paged__lane *t, const paged__layer *l) {
    const paged__runner *r = t->runner;
    multiply_add(t, l->wo, &(source){.rows = r->a, .n_cols = (int32_t)r->a_dim, .row_map = t->row_map});
}

/* gate and up want different forms: one after the other, then both together by rows. */
static void gate_mixed(paged__lane *t, const paged__layer *l, const source *from, paged__epilogue gated) {
    const paged__runner *r = t->runner;
    const int64_t n_ff = t->model->hp.n_ff;
    int32_t begin, end;
    multiply(t, from, &(paged__product){.w = {l->gate}, .n_w = 1, .y = r->h, .y_stride = n_ff});
    multiply(t, from, &(paged__product){.w = {l->up}, .n_w = 1, .y = r->up, .y_stride = n_ff});
    my_rows(t, t->n_rows, &begin, &end);
    for (int64_t i = begin * n_ff; i < end * n_ff; i++) r->h[i] = paged__gate(gated, r->h[i], r->up[i]);
    barrier(t);
}

void paged__add_gated_ffn(paged__lane *t, const paged__layer *l, paged__epilogue gated) {
    const paged__runner *r = t->runner;
    const paged__hparams *hp = &t->model->hp;
    const source normed = {.rows = t->x, .n_cols = hp->n_embd, .norm = l->ffn_norm};
    if (paged__weight_form(l->gate) != paged__weight_form(l->up))
        gate_mixed(t, l, &normed, gated);
    else
        multiply(t, &normed,
                 &(paged__product){
                     .w = {l->gate, l->up}, .n_w = 2, .y = r->h, .y_stride = hp->n_ff, .epilogue = gated});
    multiply_add(t, l->down, &(source){.rows = r->h, .n_cols = hp->n_ff});
}

void paged__project_logits(paged__lane *t) {
    const paged_model *m = t->model;
    multiply(
        t, &(source){.rows = t->x, .n_cols = m->hp.n_embd, .norm = m->output_norm},
        &(paged__product){.w = {m->output}, .n_w = 1, .y = t->runner->logits, .y_stride = m->hp.n_vocab});
}

/* ---- attention ---- */

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

void paged__write_kv(paged__lane *t, int32_t il) {
    paged__runner *r = t->runner;
    const paged__hparams *hp = &t->model->hp;
    const int64_t q_dim = (int64_t)hp->n_heads * hp->head_dim_k,
                  k_dim = (int64_t)hp->n_kv_heads * hp->head_dim_k;
    int32_t begin, end;
    if (t->ith == 0) r->attn_start_ns = paged__now_ns();
    my_rows(t, t->n_tokens, &begin, &end);
    for (int32_t i = begin; i < end; i++) {
        float *q = r->qkv + i * r->qkv_dim;
        const float *cs = r->rope + (int64_t)i * hp->n_rot;
        rotate(q, hp->n_heads, hp->head_dim_k, hp->n_rot, cs);
        rotate(q + q_dim, hp->n_kv_heads, hp->head_dim_k, hp->n_rot, cs);
    }
    const float *k = r->qkv + begin * r->qkv_dim + q_dim;
    if (begin < end)
        paged_kv_write(&r->kv[il], k, r->qkv_dim, k + k_dim, r->qkv_dim, r->step->slots + begin, end - begin,
                       0, 1);
    barrier(t);
}

void paged__attend(paged__lane *t, int32_t il) {
    paged__runner *r = t->runner;
    const paged_attn_io io = {.q = r->qkv, .q_stride = r->qkv_dim, .out = r->a};
    paged_attn_run(r->attn, &r->kv[il], &io, t->ith, t->nth);
    barrier(t);
    if (paged_attn_needs_merge(r->attn)) {
        paged_attn_merge(r->attn, &io, t->ith, t->nth);
        barrier(t);
    }
    if (t->ith == 0) r->attn_ns += paged__now_ns() - r->attn_start_ns;
}
