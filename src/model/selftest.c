/* model/selftest.c: does this build of ggml give the same bits for one row as for many, and for one thread as
 * for all? A build with other matmul kernels (llamafile's, repacked weights) does not for some types, and
 * then answers depend on the batch. Asked at start for each type of matrix in the model, on rows of the
 * model's own weights.
 */
#include <ggml-alloc.h>
#include <ggml-cpu.h>
#include <stdio.h>

#include "model/model.h"

enum { TEST_ROWS = 32, TEST_COLS = 17, N_NS = 4 };

/* y [rows, n] = w x for the first n columns of x. */
static paged_status multiply(struct ggml_tensor *w, const float *x, int32_t n, int n_threads, float *y) {
    const size_t bytes = ggml_tensor_overhead() * 8 + ggml_graph_overhead();
    void *mem = paged__alloc(bytes, 1);
    if (!mem) return PAGED_ERR_NO_MEMORY;
    struct ggml_context *ctx =
        ggml_init((struct ggml_init_params){.mem_size = bytes, .mem_buffer = mem, .no_alloc = true});
    struct ggml_tensor *rows =
        ggml_view_2d(ctx, w, w->ne[0], PAGED_MIN(w->ne[1], (int64_t)TEST_ROWS), w->nb[1], 0);
    struct ggml_tensor *in = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, w->ne[0], n);
    ggml_set_input(in);
    struct ggml_tensor *out = ggml_mul_mat(ctx, rows, in);
    ggml_set_output(out);
    struct ggml_cgraph *graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    ggml_gallocr_t galloc = ggml_gallocr_new(ggml_backend_cpu_buffer_type());
    void *work = NULL;
    bool ok = galloc && ggml_gallocr_alloc_graph(galloc, graph);
    if (ok) {
        struct ggml_cplan plan = ggml_graph_plan(graph, n_threads, NULL);
        work = paged__alloc(PAGED_MAX(plan.work_size, (size_t)64), 1);
        plan.work_data = work;
        memcpy(in->data, x, ggml_nbytes(in));
        ok = work && ggml_graph_compute(graph, &plan) == GGML_STATUS_SUCCESS;
        if (ok) memcpy(y, out->data, ggml_nbytes(out));
    }
    paged__free(work);
    if (galloc) ggml_gallocr_free(galloc);
    ggml_free(ctx);
    paged__free(mem);
    return ok ? PAGED_OK : PAGED_ERR_NO_MEMORY;
}

static paged_status same_bits(struct ggml_tensor *w, int n_threads, bool *same) {
    static const int32_t ns[N_NS] = {1, 2, 5, TEST_COLS};
    const int64_t rows = PAGED_MIN(w->ne[1], (int64_t)TEST_ROWS);
    float *x = paged__alloc((size_t)w->ne[0] * TEST_COLS, sizeof *x);
    float *all = paged__alloc((size_t)rows * TEST_COLS, sizeof *all),
          *some = paged__alloc((size_t)rows * TEST_COLS, sizeof *some);
    paged_status s = x && all && some ? PAGED_OK : PAGED_ERR_NO_MEMORY;
    uint64_t seed = 7;
    for (int64_t i = 0; !s && i < w->ne[0] * TEST_COLS; i++)
        x[i] = (float)(int32_t)(paged__rand(&seed) >> 40) / 8388608.0f - 1.0f;
    if (!s) s = multiply(w, x, TEST_COLS, 1, all);
    *same = true;
    for (int32_t i = 0; i < N_NS; i++) {
        for (int threads = 1; !s && threads <= n_threads; threads++) {
            s = multiply(w, x, ns[i], threads, some);
            if (!s) *same = *same && memcmp(all, some, (size_t)(rows * ns[i]) * sizeof *all) == 0;
        }
    }
    paged__free(x);
    paged__free(all);
    paged__free(some);
    return s;
}

paged_status paged__model_self_test(const paged_model *m, int32_t n_threads, bool *all, char *text,
                                    size_t capacity, paged_error *err) {
    bool seen[GGML_TYPE_COUNT] = {false};
    size_t used = 0;
    *all = true;
    if (capacity) text[0] = 0;
    for (struct ggml_tensor *t = ggml_get_first_tensor(m->ctx); t; t = ggml_get_next_tensor(m->ctx, t)) {
        if (t->ne[1] == 1 || seen[t->type] || (t == m->tok_embd && m->output != t)) continue;
        bool same;
        seen[t->type] = true;
        if (same_bits(t, PAGED_MIN(n_threads, 2), &same))
            return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for the self-test of %s",
                               ggml_type_name(t->type));
        *all = *all && same;
        if (used < capacity)
            used += (size_t)snprintf(text + used, capacity - used, "%s%s: %s", used ? ", " : "",
                                     ggml_type_name(t->type), same ? "yes" : "no");
    }
    return PAGED_OK;
}
