/* Goal: a product with a weight of any type, packed or by rows of the file, is the product of its values, and
 * a model may mix types as it likes. Method: sums in double over what ggml says the values are; whole models
 * whose types are mixed against the same values stored as f32 (that path is held against NumPy and
 * llama.cpp elsewhere); bits where an output may not depend on what is beside it. */
#include <ggml-cpu.h>
#include <math.h>
#include <unistd.h>

#include "engine/engine.h"
#include "model/weight.h"
#include "test.h"
#include "tiny_model.h"

enum { N_ROWS = 40, N_COLS = 512, N_INPUTS = 7, Y_STRIDE = 2 * N_ROWS + 3 };

/* All types of matrices that this ggml knows, ours among them; not those of inputs, integers and doubles. The
 * long tier only takes those for whose grids ggml sorts a quarter of a minute (tests/diff/test_types.py reads
 * them too). */
static bool is_of_weights(enum ggml_type type) {
    const char *name = ggml_type_name(type);
    if (!test_long && strncmp(name, "iq", 2) == 0 && name[2] < '4') return false;
    return ggml_get_type_traits_cpu(type)->vec_dot && type != GGML_TYPE_Q8_1 && type != GGML_TYPE_Q8_K;
}

typedef struct matrix {
    paged__weight w;
    uint8_t *rows, *packed;
    double *values; /* [N_ROWS, N_COLS] */
} matrix;

static float uniform(uint64_t *seed) {
    return (float)(int32_t)(paged__rand(seed) >> 40) / 8388608.0f - 1.0f;
}

/* False: our kernels do not take the type. */
static bool make_matrix(matrix *m, enum ggml_type type, bool packed, uint64_t seed) {
    const size_t row_bytes = ggml_row_size(type, N_COLS);
    float *row = malloc(N_COLS * sizeof *row), importance[N_COLS];
    paged__weight_type ours;
    *m = (matrix){.rows = aligned_alloc(64, (N_ROWS * row_bytes + 63) / 64 * 64),
                  .values = malloc(sizeof(double) * N_ROWS * N_COLS)};
    m->w = (paged__weight){.name = "w",
                           .type = type,
                           .n_rows = N_ROWS,
                           .n_cols = N_COLS,
                           .rows = m->rows,
                           .row_bytes = row_bytes};
    for (int32_t i = 0; i < N_COLS; i++) importance[i] = 1.0f;
    for (int32_t r = 0; r < N_ROWS; r++) {
        for (int32_t i = 0; i < N_COLS; i++) row[i] = uniform(&seed);
        ggml_quantize_chunk(type, row, m->rows + (size_t)r * row_bytes, 0, 1, N_COLS, importance);
        paged__weight_row(&m->w, r, row);
        for (int32_t i = 0; i < N_COLS; i++) m->values[r * N_COLS + i] = (double)row[i];
    }
    free(row);
    if (!packed) return true;
    if (!paged__weight_can_pack(&m->w, &ours)) return false;
    m->packed = paged__alloc(paged__matrix_bytes(ours, N_ROWS, N_COLS), 1);
    paged__matrix_init(&m->w.matrix, ours, N_ROWS, N_COLS, m->packed);
    paged__matrix_pack(&m->w.matrix, m->rows, row_bytes, 0, 1);
    m->w.is_packed = true;
    return true;
}

static void free_matrix(matrix *m) {
    free(m->rows);
    free(m->values);
    paged__free(m->packed);
}

typedef struct world {
    float x[N_INPUTS][N_COLS], norm[N_COLS], residual[N_INPUTS][N_ROWS];
    double normed[N_INPUTS][N_COLS];
} world;

static void fill_world(world *w, uint64_t seed) {
    for (int32_t i = 0; i < N_COLS; i++) w->norm[i] = 1.0f + 0.3f * uniform(&seed);
    for (int32_t t = 0; t < N_INPUTS; t++) {
        double squares = 0;
        for (int32_t i = 0; i < N_COLS; i++) {
            w->x[t][i] = 3.0f * uniform(&seed);
            squares += (double)w->x[t][i] * (double)w->x[t][i];
        }
        for (int32_t i = 0; i < N_COLS; i++)
            w->normed[t][i] = (double)w->x[t][i] / sqrt(squares / N_COLS + 1e-5) * (double)w->norm[i];
        for (int32_t r = 0; r < N_ROWS; r++) w->residual[t][r] = uniform(&seed);
    }
}

/* W x in double, and how far it may be off: inputs are rounded to 8 bits at most coarsely (six standard
 * deviations of it). */
static double exact(const matrix *m, const double *x, int32_t r, double *bound) {
    double sum = 0, squares = 0, most = 0;
    for (int32_t i = 0; i < N_COLS; i++) {
        const double v = m->values[r * N_COLS + i];
        sum += v * x[i];
        squares += v * v;
        most = fmax(most, fabs(x[i]));
    }
    *bound = 6 * sqrt(squares) * most / 127 / sqrt(12);
    return sum;
}

/* y [n, Y_STRIDE] for the inputs from `first` on, as nth threads would do it. */
static void multiply(const matrix *const *m, int32_t n_w, const world *w, int32_t first, int32_t n,
                     int32_t nth, paged__epilogue epilogue, float *y) {
    const paged__form form = paged__weight_form(&m[0]->w);
    uint8_t *data = paged__alloc(paged__input_bytes(form, n, N_COLS), 1);
    paged__input in;
    paged__input_init(&in, form, n, N_COLS, data);
    for (int32_t i = 0; i < n; i++) paged__input_set(&in, i, w->x[first + i], w->norm, 1e-5f);
    paged__product p = {.n_w = n_w,
                        .x = &in,
                        .y = y,
                        .y_stride = Y_STRIDE,
                        .epilogue = epilogue,
                        .residual = w->residual[first],
                        .residual_stride = N_ROWS};
    for (int32_t i = 0; i < n_w; i++) p.w[i] = &m[i]->w;
    for (int32_t ith = 0; ith < nth; ith++) paged__product_run(&p, ith, nth);
    paged__free(data);
}

static double gate_exact(paged__epilogue epilogue, double g, double u) {
    if (epilogue == PAGED__SWIGLU) return g / (1 + exp(-g)) * u;
    return 0.5 * g * (1 + tanh(sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))) * u;
}

static void check_near(double got, double want, double bound, enum ggml_type type, bool packed) {
    if (!(fabs(got - want) <= bound))
        test_fail(__FILE__, __LINE__, "%s, %s: %.6f, not %.6f ± %.6f", ggml_type_name(type),
                  packed ? "packed" : "by rows", got, want, bound);
}

static void check_values(const matrix *const *m, const world *w, const float *y, paged__epilogue epilogue,
                         enum ggml_type type, bool packed) {
    for (int32_t t = 0; t < N_INPUTS; t++) {
        for (int32_t r = 0; r < N_ROWS; r++) {
            double bound, bound_up;
            const double a = exact(m[0], w->normed[t], r, &bound),
                         b = exact(m[1], w->normed[t], r, &bound_up);
            const float *row = y + t * Y_STRIDE;
            if (epilogue == PAGED__ADD) {
                check_near((double)row[r], a + (double)w->residual[t][r], bound, type, packed);
            } else if (epilogue == PAGED__STORE) {
                check_near((double)row[r], a, bound, type, packed);
                check_near((double)row[N_ROWS + r], b, bound_up, type, packed);
            } else {
                /* The slope of both functions is at most 1.2. */
                check_near((double)row[r], gate_exact(epilogue, a, b),
                           1.2 * bound * (fabs(b) + bound_up) + bound_up * fmax(fabs(a), 0.3), type, packed);
            }
        }
    }
}

static void products_are_those_of_the_values(void) {
    static world w;
    static float all[N_INPUTS * Y_STRIDE], some[N_INPUTS * Y_STRIDE];
    int n_types = 0;
    ggml_cpu_init(); /* the tables behind its conversions, as loading a model does */
    fill_world(&w, test_seed);
    for (int i = 0; i < 2 * GGML_TYPE_COUNT; i++) {
        const enum ggml_type type = (enum ggml_type)(i / 2);
        matrix a, b;
        if (!is_of_weights(type)) continue;
        n_types += i % 2;
        const bool packed = i % 2;
        bool ok = make_matrix(&a, type, packed, test_seed + 1);
        ok = make_matrix(&b, type, packed, test_seed + 2) && ok; /* both are freed below */
        for (int epilogue = PAGED__STORE; ok && epilogue <= PAGED__GEGLU; epilogue++) {
            const matrix *const m[] = {&a, &b};
            const int32_t n_w = epilogue == PAGED__ADD ? 1 : 2,
                          width = epilogue == PAGED__STORE ? 2 * N_ROWS : N_ROWS;
            multiply(m, n_w, &w, 0, N_INPUTS, 1, (paged__epilogue)epilogue, all);
            check_values(m, &w, all, (paged__epilogue)epilogue, type, packed);
            for (int32_t t = 0; t < N_INPUTS; t++) {
                multiply(m, n_w, &w, t, 1, 1 + t, (paged__epilogue)epilogue, some);
                CHECK(memcmp(some, all + t * Y_STRIDE, (size_t)width * sizeof *all) == 0);
            }
        }
        free_matrix(&a);
        free_matrix(&b);
    }
    printf("  %d types\n", n_types);
    CHECK(n_types >= (test_long ? 27 : 20));
}

/* ---- whole models ---- */

static const struct {
    enum ggml_type type, other;
    const char *determinism, *kernels; /* what is multiplied by whom */
} mixes[] = {{GGML_TYPE_Q4_K, GGML_TYPE_Q6_K, "q4_K: yes, q6_K: yes", "packed q4_K, q6_K"},
             {GGML_TYPE_Q8_0, GGML_TYPE_F16, "q8_0: yes, f16: yes", "packed q8_0, f16"},
             {GGML_TYPE_BF16, GGML_TYPE_Q2_K, "bf16: yes, q2_K: yes", "packed bf16; ggml q2_K"},
             {GGML_TYPE_Q5_1, GGML_TYPE_Q3_K, "q5_1: yes, q3_K: yes", "ggml q5_1, q3_K"},
             {GGML_TYPE_IQ4_XS, GGML_TYPE_Q5_0, "iq4_xs: yes, q5_0: yes", "packed q5_0; ggml iq4_xs"},
             {GGML_TYPE_F32, GGML_TYPE_IQ4_NL, "f32: yes, iq4_nl: yes", "packed f32, iq4_nl"}};
enum { N_MIXES = sizeof mixes / sizeof mixes[0], N_PROMPT = 60 };

static paged_model *load_mix(int i, bool as_f32) {
    const tiny_shape shape = {2, 4, 2, 64, 512, 256, mixes[i].type};
    char path[64];
    paged_model *m = NULL;
    paged_error err = {0};
    snprintf(path, sizeof path, "/tmp/paged-test-%d-w.gguf", (int)getpid());
    CHECK(tiny_model_write_mixed(path, &shape, test_seed, mixes[i].other, as_f32));
    if (paged_model_load(path, NULL, &m, &err)) printf("%s\n", err.message);
    unlink(path);
    CHECK(m != NULL);
    return m;
}

/* Log-probabilities of a prompt [N_PROMPT - 1]. */
static void score(const paged_model *m, paged_engine_config c, float *out) {
    int32_t tokens[N_PROMPT], active = 1, n;
    uint64_t seed = 3, id;
    const float *logprobs;
    const int32_t *top1;
    paged_engine *e = NULL;
    c.struct_size = sizeof c;
    for (int32_t i = 0; i < N_PROMPT; i++) tokens[i] = (int32_t)(paged__rand(&seed) % 256);
    CHECK_EQ(paged_engine_create(m, &c, &e, NULL), PAGED_OK);
    paged_request q;
    paged_request_init(&q);
    q.tokens = tokens;
    q.n_tokens = N_PROMPT;
    q.max_tokens = 1;
    q.prompt_logprobs = true;
    CHECK_EQ(paged_engine_submit(e, &q, &id, NULL), PAGED_OK);
    while (active) CHECK_EQ(paged_engine_step(e, &active, NULL), PAGED_OK);
    CHECK_EQ(paged_engine_prompt_logprobs(e, id, &logprobs, &top1, &n), PAGED_OK);
    CHECK_EQ(n, N_PROMPT - 1);
    memcpy(out, logprobs, (size_t)n * sizeof *out);
    paged_engine_free(e);
}

static void types_may_be_mixed(void) {
    for (int i = 0; i < N_MIXES; i++) {
        float want[N_PROMPT - 1], got[N_PROMPT - 1], again[N_PROMPT - 1];
        paged_model *m = load_mix(i, true);
        score(m, (paged_engine_config){.n_threads = 1}, want);
        paged_model_free(m);
        m = load_mix(i, false);
        score(m, (paged_engine_config){.n_threads = 1}, got);
        double off = 0;
        for (int32_t t = 0; t < N_PROMPT - 1; t++) off += fabs((double)got[t] - (double)want[t]);
        off /= N_PROMPT - 1;
        printf("  %s: mean |log-prob difference| to f32 %.4f\n", mixes[i].determinism, off);
        /* Activations of 8 bits cost this much here, in ggml's products as in ours; a wrong matrix costs
         * several, since the logits of this model lie within ±20. */
        if (!(off < 0.6)) test_fail(__FILE__, __LINE__, "%s: off by %.4f", mixes[i].determinism, off);
        const paged_engine_config others[] = {{.n_threads = 2},
                                              {.n_threads = 3, .chunk_tokens = 7},
                                              {.n_threads = 1, .chunk_tokens = 1},
                                              {.n_threads = 2, .chunk_tokens = 5}};
        for (int c = 0; c < 4; c++) {
            score(m, others[c], again);
            CHECK(memcmp(got, again, sizeof got) == 0);
        }
        paged_engine *e = NULL;
        paged_engine_info info;
        CHECK_EQ(paged_engine_create(m, NULL, &e, NULL), PAGED_OK);
        paged_engine_get_info(e, &info);
        CHECK_STR(info.determinism, mixes[i].determinism);
        CHECK(info.deterministic && strstr(info.linear_kernels, mixes[i].kernels));
        paged_engine_free(e);
        paged_model_free(m);
    }
}

/* Bytes of a mapped file that are in memory on this process's account. */
static size_t resident_bytes(const char *path) {
    char line[4096];
    size_t n_bytes = 0, kib;
    bool inside = false;
    FILE *maps = fopen("/proc/self/smaps", "r");
    CHECK(maps != NULL);
    while (fgets(line, sizeof line, maps)) {
        unsigned long begin, end;
        if (sscanf(line, "%lx-%lx ", &begin, &end) == 2) inside = strstr(line, path) != NULL; /* a mapping */
        if (inside && sscanf(line, "Rss: %zu kB", &kib) == 1) n_bytes += kib << 10;
    }
    fclose(maps);
    return n_bytes;
}

/* What lies packed is not held a second time: the pages of the file are given back. */
static void weights_are_held_once(void) {
    char real[4096];
    const char *path = getenv("PAGED_MODEL");
    paged_model *m = NULL;
    paged_model_info info;
    if (!path || !realpath(path, real)) {
        printf("skipped: PAGED_MODEL is not set\n");
        return;
    }
    CHECK_EQ(paged_model_load(real, NULL, &m, NULL), PAGED_OK);
    paged_model_get_info(m, &info);
    const size_t resident = resident_bytes(real);
    CHECK(resident > 0); /* keys, and vectors */
    if (resident > info.file_bytes / 10)
        test_fail(__FILE__, __LINE__, "%zu of %zu bytes of the file are in memory", resident,
                  info.file_bytes);
    CHECK(info.packed_bytes > info.weight_bytes * 9 / 10 && info.packed_bytes < info.weight_bytes * 11 / 10);
    CHECK(info.load_ms > 0);
    paged_model_free(m);
}

#define TESTS(X) X(products_are_those_of_the_values) X(types_may_be_mixed) X(weights_are_held_once)
TEST_MAIN(TESTS)
