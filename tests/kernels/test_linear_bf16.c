/* Goal: products of bf16 are those of the numbers in the file, to the roundings that linear_amx_bf16.c names,
 * for any shape, any f16 scale and any size of activations that it promises; beyond, and only there, NaN.
 * Method: ggml's dequantisation and sums in double; weights and activations end at pages that nobody may
 * touch; of each case a token alone, whose bits must be the same. */
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/linear_world.h"

enum { MOST_W = 4, BEHIND = 5, TOUCHED = 0x5a };

/* Of the sum of the absolute products: twice what 5000 random layers came to. Both sides are rounded, each by
 * 2^-8 at most, and d and the addend of plain types by 2^-11: of up to 55 d beside weights of 4 d. */
static const double allowed = 0.015;

/* ---- memory that ends at a page without access ---- */

static size_t page_size(void) {
    return (size_t)sysconf(_SC_PAGESIZE);
}

static size_t whole_pages(size_t bytes) {
    return (bytes + page_size() - 1) / page_size() * page_size();
}

static uint8_t *guarded(size_t bytes) {
    const size_t inside = whole_pages(bytes);
    uint8_t *pages = mmap(NULL, inside + page_size(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED && mprotect(pages, inside, PROT_READ | PROT_WRITE) == 0);
    return pages + inside - bytes;
}

static void guarded_free(uint8_t *p, size_t bytes) {
    const size_t inside = whole_pages(bytes);
    munmap(p + bytes - inside, inside + page_size());
}

/* What take_aligned() gave, moved. */
static uint8_t *moved(uint8_t *from, size_t bytes) {
    uint8_t *to = guarded(bytes);
    memcpy(to, from, bytes);
    free(from);
    return to;
}

static paged__act act_make(const inputs *in, int32_t token0, int32_t n) {
    paged__act act = activate(in, PAGED__ACT_BF16, token0, n);
    act.data = moved(act.data, paged__act_bytes(act.kind, n, act.n_cols));
    return act;
}

static void act_free(paged__act *act) {
    guarded_free(act->data, paged__act_bytes(act->kind, act->n_tokens, act->n_cols));
}

static size_t bytes_of(const paged__matrix *w) {
    return paged__matrix_bytes(w->type, w->n_rows, w->n_cols);
}

static void guard(weights *v) {
    v->w.data = moved(v->w.data, bytes_of(&v->w));
}

static void guarded_weights_free(weights *v) {
    guarded_free(v->w.data, bytes_of(&v->w));
    v->w.data = NULL;
    weights_free(v);
}

/* ---- a layer ---- */

typedef struct layer {
    weights v[MOST_W];
    float *bias[MOST_W]; /* [n_rows] or NULL */
    int32_t n_w, n_out;
    paged__epilogue epilogue;
    inputs in;
    inputs residual; /* of layers that may add one */
} layer;

/* y [n, n_out + BEHIND] of the tokens token0 …, each part of nth by itself. The caller frees it. */
static float *layer_run(const layer *l, int32_t token0, int32_t n, int32_t nth) {
    paged__act act = act_make(&l->in, token0, n);
    const int64_t stride = l->n_out + BEHIND;
    float *y = take((size_t)(n * stride), sizeof *y);
    memset(y, TOUCHED, (size_t)(n * stride) * sizeof *y);
    paged__linear_job job = {.n_w = l->n_w,
                             .x = &act,
                             .y = y,
                             .y_stride = stride,
                             .epilogue = l->epilogue,
                             .residual_stride = l->residual.stride,
                             .room = room_for(nth)};
    if (l->residual.x) job.residual = l->residual.x + token0 * l->residual.stride;
    for (int32_t i = 0; i < l->n_w; i++) {
        job.w[i] = &l->v[i].w;
        job.bias[i] = l->bias[i];
    }
    for (int32_t i = 0; i < nth; i++) paged__linear_run(&job, i, nth);
    act_free(&act);
    return y;
}

static void layer_free(layer *l) {
    for (int32_t i = 0; i < l->n_w; i++) {
        guarded_weights_free(&l->v[i]);
        free(l->bias[i]);
    }
    inputs_free(&l->in);
    inputs_free(&l->residual);
}

static double activated(double x, paged__epilogue e) {
    if (e == PAGED__SWIGLU) return x / (1 + exp(-x));
    return x / 2 * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}

/* Row r of matrix i with its bias; *error: what it may be off by. */
static double row_of(const layer *l, int32_t i, int32_t r, const double *x, double *error) {
    double size;
    const double sum = dot_row(&l->v[i], r, x, &size);
    *error = allowed * size + 1e-30;
    return sum + (l->bias[i] ? (double)l->bias[i][r] : 0);
}

/* Both functions of a gate are less steep than 1.2. */
static double gated(const layer *l, int32_t r, const double *x, double *error) {
    double error_gate, error_up;
    const double gate = row_of(l, 0, r, x, &error_gate), up = row_of(l, 1, r, x, &error_up);
    const double value = activated(gate, l->epilogue);
    *error = 1.2 * error_gate * (fabs(up) + error_up) + fabs(value) * error_up + 1e-5 * fabs(value * up);
    return value * up;
}

/* y is the row of the token. Returns the largest error, of those allowed. */
static double check_token(const layer *l, int32_t token, const float *y) {
    const bool glu = l->epilogue >= PAGED__SWIGLU;
    const int32_t n_cols = l->in.act.n_cols;
    double worst = 0, *x = take((size_t)n_cols, sizeof *x);
    for (int32_t k = 0; k < n_cols; k++) x[k] = (double)l->in.x[token * l->in.stride + k];
    for (int32_t i = 0, e = 0; i < (glu ? 1 : l->n_w); i++)
        for (int32_t r = 0; r < l->v[i].w.n_rows; r++, e++) {
            double error;
            double want = glu ? gated(l, r, x, &error) : row_of(l, i, r, x, &error);
            if (l->epilogue == PAGED__ADD) want += (double)l->residual.x[token * l->residual.stride + e];
            const double off = fabs((double)y[e] - want);
            if (!(off <= error + 1e-6 * fabs(want)))
                test_fail(__FILE__, __LINE__,
                          "%s, %d x %d, epilogue %d, token %d, row %d of matrix %d: %.9g, "
                          "not %.9g, off by up to %.3g",
                          weight_name(l->v[i].w.type), l->v[i].w.n_rows, n_cols, (int)l->epilogue, token, r,
                          i, (double)y[e], want, error);
            worst = fmax(worst, off / error);
        }
    free(x);
    return worst;
}

/* ---- odd shapes ---- */

/* One that takes so many columns. */
static paged__weight_type draw_type(int32_t n_cols, uint64_t *rng) {
    for (;;) {
        const paged__weight_type type =
            (paged__weight_type)(PAGED__W_Q4_0 + draw(rng, PAGED__N_WEIGHT_TYPES - PAGED__W_Q4_0));
        if (paged__linear_supports(type, 1, n_cols)) return type;
    }
}

/* Half of them at the borders of tiles, groups and rooms. */
static int32_t draw_rows(uint64_t *rng) {
    static const int32_t odd[] = {1, 15, 16, 17, 31, 32, 33, 255, 256, 257, 512, 513, 530};
    return draw(rng, 2) ? odd[draw(rng, 13)] : 1 + draw(rng, 530);
}
static int32_t draw_tokens(uint64_t *rng) {
    static const int32_t odd[] = {1, 2, 16, 17, 31, 32, 33, 34, 47, 49, 240, 256, 257, 511, 513, 700};
    return draw(rng, 2) ? odd[draw(rng, 16)] : 1 + draw(rng, 700);
}

/* Two gated matrices have as many rows; otherwise up to four one behind the other, of any types. */
static layer layer_draw(int32_t n_tokens, uint64_t *rng) {
    layer l = {.epilogue = (paged__epilogue)draw(rng, PAGED__GEGLU + 1)};
    const bool glu = l.epilogue >= PAGED__SWIGLU, with_bias = draw(rng, 2);
    const int32_t n_cols = draw(rng, 2) ? 256 * (1 + draw(rng, 5)) : 32 * (1 + draw(rng, 40));
    const int32_t rows = draw_rows(rng);
    l.n_w = glu ? 2 : 1 + draw(rng, MOST_W);
    for (int32_t i = 0; i < l.n_w; i++) {
        const paged__weight_type type = draw_type(n_cols, rng);
        const int32_t n = glu || i == 0 ? rows : draw_rows(rng), nth = 1 + draw(rng, 5);
        const bool bits = draw(rng, 4) != 0; /* ggml's own blocks take long */
        l.v[i] = weights_make(type, n, n_cols, bits, nth, rng);
        guard(&l.v[i]);
        if (!glu || i == 0) l.n_out += n;
        if (!with_bias) continue;
        l.bias[i] = take((size_t)n, sizeof(float));
        for (int32_t r = 0; r < n; r++) l.bias[i][r] = draw_unit(rng);
    }
    l.in = inputs_make(n_tokens, n_cols, rng);
    l.residual = inputs_make(n_tokens, l.n_out, rng);
    return l;
}

static void odd_shapes(void) {
    enum { CHECKED = 8 };
    uint64_t rng = test_seed;
    double worst = 0;
    const int32_t n_cases = !paged__linear_bf16() ? 0 : test_long ? 250 : 30;
    for (int32_t c = 0; c < n_cases; c++) {
        const int32_t n = draw_tokens(&rng), nth = 1 + draw(&rng, draw(&rng, 4) ? 4 : 200);
        layer l = layer_draw(n, &rng);
        const int64_t stride = l.n_out + BEHIND;
        float *y = layer_run(&l, 0, n, nth);
        for (int32_t t = 0; t < n; t++)
            for (int32_t e = 0; e < BEHIND * 4; e++)
                CHECK_EQ(((const uint8_t *)(y + t * stride + l.n_out))[e], TOUCHED);
        for (int32_t i = 0; i < PAGED_MIN(n, CHECKED); i++) { /* the first and the last, and some between */
            const int32_t t = n <= CHECKED ? i : (int32_t)((int64_t)i * (n - 1) / (CHECKED - 1));
            worst = fmax(worst, check_token(&l, t, y + t * stride));
        }
        const int32_t one = draw(&rng, n);
        float *alone = layer_run(&l, one, 1, 1 + draw(&rng, 3));
        if (memcmp(alone, y + one * stride, (size_t)l.n_out * sizeof *y) != 0)
            test_fail(__FILE__, __LINE__, "case %d: token %d of %d on %d threads differs from it alone", c,
                      one, n, nth);
        free(alone);
        free(y);
        layer_free(&l);
    }
    printf("%d shapes, seed %" PRIu64 ": errors up to %.2f of those allowed\n", n_cases, test_seed, worst);
}

/* ---- the ends of f16 ---- */

typedef enum scales { SMALL, LARGE, MIXED, N_SCALES } scales;

/* An f16 of 2^-14 and less, denormal ones too, or of 2^15. */
static uint16_t draw_scale(scales which, uint64_t *rng) {
    const bool large = which == LARGE || (which == MIXED && draw(rng, 2));
    const uint32_t bits = large ? 30u << 10 | (uint32_t)draw(rng, 1024) : 1u + (uint32_t)draw(rng, 2047);
    return (uint16_t)(bits | (uint32_t)draw(rng, 2) << 15);
}

static bool has_min(paged__weight_type type) {
    return type == PAGED__W_Q4_1 || type == PAGED__W_Q4_K || type == PAGED__W_Q5_K;
}

/* Where a block has its d; its m lies behind it. */
static size_t scale_at(paged__weight_type type) {
    return type == PAGED__W_Q6_K ? 208 : 0;
}

/* After its GGUF bits have changed. */
static void weights_again(weights *v) {
    const int64_t n = (int64_t)v->w.n_rows * v->w.n_cols;
    ggml_get_type_traits(ggml_types[v->w.type])->to_float(v->gguf, v->values, n);
    paged__matrix_pack(&v->w, v->gguf, v->row_bytes, 0, 1);
}

static void set_scales(weights *v, scales which, uint64_t *rng) {
    const size_t block = ggml_type_size(ggml_types[v->w.type]), at = scale_at(v->w.type);
    for (uint8_t *b = v->gguf; b < v->gguf + (size_t)v->w.n_rows * v->row_bytes; b += block)
        for (size_t i = 0; i < (has_min(v->w.type) ? 2 : 1); i++) {
            const uint16_t d = draw_scale(which, rng);
            memcpy(b + at + 2 * i, &d, sizeof d);
        }
    weights_again(v);
}

/* The largest error of the layer, of those allowed; few tokens and many, which go different ways. */
static double check_few_and_many(const layer *l) {
    const int32_t counts[] = {1, 17, l->in.act.n_tokens};
    double worst = 0;
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        float *y = layer_run(l, 0, counts[c], 1);
        for (int32_t t = 0; t < counts[c]; t += 3)
            worst = fmax(worst, check_token(l, t, y + t * (l->n_out + BEHIND)));
        free(y);
    }
    return worst;
}

/* Rows of any scales, by activations of any size. */
static void ranges(void) {
    enum { ROWS = 64, COLS = 512, TOKENS = 40 };
    static const float sizes[] = {1e-20f, 1, 1e20f};
    uint64_t rng = test_seed;
    double worst = 0;
    for (int32_t type = PAGED__W_Q4_0; type < PAGED__N_WEIGHT_TYPES && paged__linear_bf16(); type++)
        for (int32_t i = 0; i < N_SCALES * 3; i++) {
            layer l = {.n_w = 1, .n_out = ROWS};
            l.v[0] = weights_make((paged__weight_type)type, ROWS, COLS, true, 1, &rng);
            set_scales(&l.v[0], (scales)(i % N_SCALES), &rng);
            guard(&l.v[0]);
            l.in = inputs_make(TOKENS, COLS, &rng);
            for (int64_t k = 0; k < TOKENS * l.in.stride; k++) l.in.x[k] *= sizes[i / N_SCALES];
            worst = fmax(worst, check_few_and_many(&l));
            layer_free(&l);
        }
    printf("ends of f16: errors up to %.2f of those allowed\n", worst);
}

/* An f16 that times the factor of a row that has a d of 1 is just above a denormal. */
static uint16_t small_scale(paged__weight_type type) {
    if (type == PAGED__W_Q8_0 || type == PAGED__W_IQ4_NL) return 9;
    return type == PAGED__W_Q4_K || type == PAGED__W_Q5_K ? 144 : 288;
}

/* Small weights in the row of large ones, which meet no activations: nothing but the small ones is in the
 * outputs, and they are as exact as others. */
static void small_beside_large(void) {
    enum { ROWS = 32, COLS = 512, TOKENS = 40 };
    uint64_t rng = test_seed;
    double worst = 0;
    for (int32_t type = PAGED__W_Q4_0; type < PAGED__N_WEIGHT_TYPES && paged__linear_bf16(); type++) {
        layer l = {.n_w = 1, .n_out = ROWS};
        l.v[0] = weights_make((paged__weight_type)type, ROWS, COLS, true, 1, &rng);
        const size_t block = ggml_type_size(ggml_types[type]), n_blocks = l.v[0].row_bytes / block;
        for (size_t i = 0; i < ROWS * n_blocks; i++)
            for (size_t j = 0; j < (has_min((paged__weight_type)type) ? 2 : 1); j++) {
                const uint16_t d = i % n_blocks < n_blocks / 2 ? 0x3c00 : small_scale(l.v[0].w.type);
                memcpy(l.v[0].gguf + i * block + scale_at((paged__weight_type)type) + 2 * j, &d, sizeof d);
            }
        weights_again(&l.v[0]);
        guard(&l.v[0]);
        l.in = inputs_make(TOKENS, COLS, &rng);
        for (int32_t t = 0; t < TOKENS; t++) memset(l.in.x + t * l.in.stride, 0, COLS / 2 * sizeof(float));
        worst = fmax(worst, check_few_and_many(&l));
        layer_free(&l);
    }
    printf("small beside large: errors up to %.2f of those allowed\n", worst);
}

/* Gives the rows 3, 8, … 38 a d or m that is no number. */
static void spoil_rows(weights *v, uint64_t *rng) {
    static const uint16_t bad[] = {0x7c00, 0xfc00, 0x7e00, 0xfe01}; /* ±inf, ±NaN */
    const size_t block = ggml_type_size(ggml_types[v->w.type]);
    const int32_t n_blocks = (int32_t)(v->row_bytes / block);
    for (int32_t i = 0; i < 8; i++) {
        uint8_t *row = v->gguf + (size_t)(3 + 5 * i) * v->row_bytes;
        const size_t at = scale_at(v->w.type) + (i >= 4 && has_min(v->w.type) ? 2 : 0);
        memcpy(row + (size_t)draw(rng, n_blocks) * block + at, &bad[i % 4], 2);
    }
    paged__matrix_pack(&v->w, v->gguf, v->row_bytes, 0, 1);
}

/* Such a row is NaN, whatever it meets, and all others are as they were. */
static void rows_of_no_numbers(void) {
    enum { ROWS = 40, COLS = 512, TOKENS = 40 };
    static const int32_t counts[] = {1, TOKENS};
    uint64_t rng = test_seed;
    for (int32_t type = PAGED__W_Q4_0; type < PAGED__N_WEIGHT_TYPES && paged__linear_bf16(); type++) {
        layer l = {.n_w = 1, .n_out = ROWS};
        l.v[0] = weights_make((paged__weight_type)type, ROWS, COLS, true, 1, &rng);
        l.in = inputs_make(TOKENS, COLS, &rng);
        memset(l.in.x, 0, COLS * sizeof(float)); /* token 0 */
        guard(&l.v[0]);
        float *before = layer_run(&l, 0, TOKENS, 1);
        spoil_rows(&l.v[0], &rng);
        for (size_t c = 0; c < 2; c++) {
            float *y = layer_run(&l, 0, counts[c], 2);
            for (int32_t t = 0; t < counts[c]; t++)
                for (int32_t r = 0; r < ROWS; r++) {
                    const int64_t e = t * (ROWS + BEHIND) + r;
                    if (r % 5 == 3 ? !isnan(y[e]) : memcmp(&y[e], &before[e], sizeof *y) != 0)
                        test_fail(__FILE__, __LINE__, "%s, token %d of %d, row %d: %g",
                                  weight_name(l.v[0].w.type), t, counts[c], r, (double)y[e]);
                }
            free(y);
        }
        free(before);
        layer_free(&l);
    }
}

/* ---- the ends of activations ---- */

/* y of n tokens is what it was before, but for token t. */
static void check_others(const layer *l, const float *y, const float *before, int32_t n, int32_t t) {
    const int64_t stride = l->n_out + BEHIND;
    for (int32_t i = 0; i < n; i++)
        CHECK(i == t || memcmp(y + i * stride, before + i * stride, (size_t)l->n_out * sizeof *y) == 0);
}

/* One number that is none, or that 2^56 times makes infinite: all outputs of its token are NaN, not one of
 * them infinite. Those a bit smaller are multiplied. */
static void tokens_of_no_numbers(void) {
    enum { ROWS = 100, COLS = 256, TOKENS = 40, N_BAD = 6 };
    static const float bad[N_BAD] = {NAN, INFINITY, -INFINITY, 1e30f, -1e30f, 4.73e21f}, most = 4.7e21f;
    static const int32_t counts[] = {1, 17, TOKENS};
    uint64_t rng = test_seed;
    for (int32_t type = PAGED__W_Q4_0; type < PAGED__N_WEIGHT_TYPES && paged__linear_bf16(); type++) {
        layer l = {.n_w = 1, .n_out = ROWS};
        l.v[0] = weights_make((paged__weight_type)type, ROWS, COLS, true, 1, &rng);
        l.in = inputs_make(TOKENS, COLS, &rng);
        guard(&l.v[0]);
        float *before = layer_run(&l, 0, TOKENS, 1), kept[COLS];
        for (int32_t i = 0; i <= N_BAD; i++)
            for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
                const int32_t n = counts[c], t = draw(&rng, n);
                float *x = l.in.x + t * l.in.stride;
                memcpy(kept, x, sizeof kept);
                if (i < N_BAD) x[draw(&rng, COLS)] = bad[i];
                for (int32_t k = 0; k < COLS && i == N_BAD; k++) x[k] = draw(&rng, 2) ? most : -most;
                float *y = layer_run(&l, 0, n, 2);
                for (int32_t r = 0; r < ROWS && i < N_BAD; r++) CHECK(isnan(y[t * (ROWS + BEHIND) + r]));
                if (i == N_BAD) check_token(&l, t, y + t * (ROWS + BEHIND));
                check_others(&l, y, before, n, t);
                memcpy(x, kept, sizeof kept);
                free(y);
            }
        free(before);
        layer_free(&l);
    }
}

#define TESTS(X) X(odd_shapes) X(ranges) X(small_beside_large) X(rows_of_no_numbers) X(tokens_of_no_numbers)
TEST_MAIN(TESTS)
