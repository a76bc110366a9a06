/* Goal: an output of a linear layer has one bit pattern: alone or among 70 tokens, on any number of threads,
 * in a stack of matrices or on its own, on every instruction set; and what is wrong with one token, or lies
 * beside the rows, touches no other. Method: the reference, each token alone on one thread, against all
 * else. */
#include "kernels/linear_world.h"

enum { N_TOKENS = 70 };

static bool same(const float *a, const float *b, int64_t n) {
    return memcmp(a, b, (size_t)n * sizeof *a) == 0;
}

/* y [n_tokens, sum of rows] of one epilogue over up to 4 matrices. */
static float *run_stack(const paged__linear_job *base, const paged__act *act, int64_t n_out, int32_t nth) {
    paged__linear_job job = *base;
    job.x = act;
    job.y = take((size_t)(act->n_tokens * n_out), sizeof(float));
    job.y_stride = n_out;
    job.room = room_for(nth);
    for (int32_t i = 0; i < nth; i++) paged__linear_run(&job, i, nth);
    return job.y;
}

/* Each token alone, one thread, reference kernels. */
static float *linear_alone(const paged__linear_job *base, const inputs *in, bool quantised, int64_t n_out) {
    CHECK(linear_isa_use(0));
    float *all = take((size_t)(N_TOKENS * n_out), sizeof *all);
    for (int32_t t = 0; t < N_TOKENS; t++) {
        paged__linear_job job = *base;
        if (job.residual) job.residual += t * job.residual_stride;
        paged__act act = activate(in, quantised, t, 1);
        float *y = run_stack(&job, &act, n_out, 1);
        memcpy(all + t * n_out, y, (size_t)n_out * sizeof *y);
        free(y);
        free(act.data);
    }
    return all;
}

/* Runs of some tokens from `first` on, on every instruction set, against `want`. */
static void check_batches(const paged__linear_job *base, const inputs *in, bool quantised, int64_t n_out,
                          const float *want) {
    static const struct {
        int32_t first, n, nth;
    } runs[] = {{0, 70, 1}, {0, 70, 3},  {3, 1, 1},  {5, 2, 2},  {0, 6, 7},  {11, 7, 2},
                {1, 13, 1}, {20, 50, 5}, {2, 23, 1}, {4, 24, 2}, {9, 33, 1}, {6, 64, 3}};
    for (int32_t isa = 0; isa < N_LINEAR_ISAS; isa++) {
        if (!linear_isa_use(isa)) continue;
        for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
            const int32_t first = runs[i].first, n = runs[i].n;
            paged__linear_job job = *base;
            if (job.residual) job.residual += first * job.residual_stride;
            paged__act act = activate(in, quantised, first, n);
            float *y = run_stack(&job, &act, n_out, runs[i].nth);
            if (!same(y, want + first * n_out, n * n_out))
                test_fail(__FILE__, __LINE__, "%s, %d tokens from %d on %d threads differ from each alone",
                          paged__linear_kernels(), n, first, runs[i].nth);
            free(y);
            free(act.data);
        }
    }
    paged_cpu_mask(~0u);
}

static void one_matrix(void) {
    uint64_t rng = test_seed;
    for (int32_t type = 0; type < PAGED__N_WEIGHT_TYPES; type++) {
        const bool quantised = paged__wants_quantised((paged__weight_type)type);
        weights v = weights_make((paged__weight_type)type, 77, quantised ? 768 : 601, true, 1, &rng);
        inputs in = inputs_make(N_TOKENS, v.w.n_cols, &rng);
        const paged__linear_job job = {.w = {&v.w}, .n_w = 1};
        float *want = linear_alone(&job, &in, quantised, 77);
        check_batches(&job, &in, quantised, 77, want);
        free(want);
        inputs_free(&in);
        weights_free(&v);
    }
}

/* More tokens than one call of a kernel takes, whose groups do not end where its room does: as in pieces.
 * Of a gated unit, where what leaves the room of the gate's sums meets those of up. */
static void many_tokens(void) {
    enum { MANY = 1087, PIECE = 60, ROWS = 77 };
    uint64_t rng = test_seed;
    for (int32_t type = 0; type < PAGED__N_WEIGHT_TYPES; type++) {
        const bool quantised = paged__wants_quantised((paged__weight_type)type);
        weights gate = weights_make((paged__weight_type)type, ROWS, 256, true, 1, &rng),
                up = weights_make((paged__weight_type)type, ROWS, 256, true, 1, &rng);
        inputs in = inputs_make(MANY, gate.w.n_cols, &rng);
        const paged__linear_job job = {.w = {&gate.w, &up.w}, .n_w = 2, .epilogue = PAGED__SWIGLU};
        for (int32_t isa = 0; isa < N_LINEAR_ISAS; isa++) {
            if (!linear_isa_use(isa)) continue;
            float *want = take(MANY * ROWS, sizeof *want);
            for (int32_t first = 0; first < MANY; first += PIECE) {
                const int32_t n = PAGED_MIN(PIECE, MANY - first);
                paged__act act = activate(&in, quantised, first, n);
                float *y = run_stack(&job, &act, ROWS, 1);
                memcpy(want + first * ROWS, y, (size_t)(n * ROWS) * sizeof *y);
                free(y);
                free(act.data);
            }
            static const int32_t counts[] = {257, 259, 511, 513, 1024, MANY};
            for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
                paged__act act = activate(&in, quantised, 0, counts[i]);
                float *y = run_stack(&job, &act, ROWS, 1 + (int32_t)i % 3);
                if (!same(y, want, (int64_t)counts[i] * ROWS))
                    test_fail(__FILE__, __LINE__, "%s, type %d: %d tokens differ from pieces of %d",
                              paged__linear_kernels(), type, counts[i], PIECE);
                free(y);
                free(act.data);
            }
            free(want);
        }
        inputs_free(&in);
        weights_free(&gate);
        weights_free(&up);
    }
    paged_cpu_mask(~0u);
}

/* Every output is made by one thread, and where each can have 128 tokens, those of a token by the same, in
 * the order of tokens. */
static void each_output_once(void) {
    enum { ROWS = 100, COLS = 64, MOST = 1087, N_COUNTS = 6, N_NTHS = 9 };
    static const int32_t counts[N_COUNTS] = {127, 255, 256, 300, 512, MOST},
                         nths[N_NTHS] = {1, 2, 3, 4, 5, 6, 8, 12, 64};
    static uint8_t by[MOST][ROWS]; /* which thread, from 1 on */
    uint64_t rng = test_seed;
    weights v = weights_make(PAGED__W_Q4_1, ROWS, COLS, true, 1, &rng);
    inputs in = inputs_make(MOST, COLS, &rng);
    float *y = take((size_t)MOST * ROWS, sizeof *y);
    for (int kind = PAGED__ACT_I8; kind <= (paged__linear_bf16() ? PAGED__ACT_BF16 : PAGED__ACT_I8); kind++)
        for (int32_t c = 0; c < N_COUNTS * N_NTHS; c++) {
            const int32_t n = counts[c % N_COUNTS], nth = nths[c / N_COUNTS];
            paged__act act = activate(&in, (paged__act_kind)kind, 0, n);
            memset(by, 0, sizeof by);
            for (int32_t ith = 0; ith < nth; ith++) {
                for (int32_t e = 0; e < n * ROWS; e++) y[e] = -12345.0f;
                const paged__linear_job job = {
                    .w = {&v.w}, .n_w = 1, .x = &act, .y = y, .y_stride = ROWS, .room = room_for(nth)};
                paged__linear_run(&job, ith, nth);
                for (int32_t e = 0; e < n * ROWS; e++) {
                    if (y[e] == -12345.0f) continue;
                    CHECK_EQ(by[e / ROWS][e % ROWS], 0);
                    by[e / ROWS][e % ROWS] = (uint8_t)(ith + 1);
                }
            }
            for (int32_t t = 0; t < n; t++)
                for (int32_t r = 0; r < ROWS; r++) {
                    CHECK(by[t][r] != 0);
                    if (n / nth < 128) continue;
                    CHECK_EQ(by[t][r], by[t][0]);
                    CHECK(t == 0 || by[t][r] >= by[t - 1][r]);
                }
            free(act.data);
        }
    free(y);
    inputs_free(&in);
    weights_free(&v);
}

/* Three matrices of different formats with one input: the same as each on its own. */
static void stacks(void) {
    static const paged__weight_type types[3] = {PAGED__W_Q4_K, PAGED__W_Q8_0, PAGED__W_Q6_K};
    static const int32_t n_rows[3] = {64, 33, 48}, before[3] = {0, 64, 97};
    enum { N_OUT = 145 };
    uint64_t rng = test_seed;
    weights v[3];
    for (int32_t i = 0; i < 3; i++) v[i] = weights_make(types[i], n_rows[i], 512, false, 1, &rng);
    inputs in = inputs_make(N_TOKENS, 512, &rng);
    float *want = take((size_t)N_TOKENS * N_OUT, sizeof *want), bias[N_OUT];
    for (int32_t e = 0; e < N_OUT; e++) bias[e] = draw_unit(&rng);
    for (int32_t i = 0; i < 3; i++) {
        const paged__linear_job job = {.w = {&v[i].w}, .n_w = 1, .bias = {i == 1 ? NULL : bias + before[i]}};
        float *y = linear_alone(&job, &in, true, n_rows[i]);
        for (int32_t t = 0; t < N_TOKENS; t++)
            memcpy(want + t * N_OUT + before[i], y + t * n_rows[i], (size_t)n_rows[i] * sizeof *y);
        free(y);
    }
    const paged__linear_job job = {
        .w = {&v[0].w, &v[1].w, &v[2].w}, .n_w = 3, .bias = {bias, NULL, bias + before[2]}};
    check_batches(&job, &in, true, N_OUT, want);
    free(want);
    inputs_free(&in);
    for (int32_t i = 0; i < 3; i++) weights_free(&v[i]);
}

/* The bytes that a part reads first are those whose outputs it writes first. */
static void where_parts_begin(void) {
    static const paged__weight_type types[3] = {PAGED__W_Q4_K, PAGED__W_Q8_0, PAGED__W_Q6_K};
    static const int32_t n_rows[3] = {64, 33, 48}, before[4] = {0, 64, 97, 145};
    uint64_t rng = test_seed;
    weights v[3];
    for (int32_t i = 0; i < 3; i++) v[i] = weights_make(types[i], n_rows[i], 512, false, 1, &rng);
    const paged__matrix *const w[3] = {&v[0].w, &v[1].w, &v[2].w};
    inputs in = inputs_make(1, 512, &rng);
    paged__act act = activate(&in, PAGED__ACT_I8, 0, 1);
    float y[145];
    for (int32_t nth = 1; nth <= 9; nth++)
        for (int32_t ith = 0; ith < nth; ith++) {
            for (int32_t e = 0; e < 145; e++) y[e] = -12345.0f;
            const paged__linear_job job = {
                .w = {w[0], w[1], w[2]}, .n_w = 3, .x = &act, .y = y, .y_stride = 145};
            paged__linear_run(&job, ith, nth);
            int32_t e = 0, i = 0, last;
            while (e < 145 && y[e] == -12345.0f) e++;
            size_t n_bytes = 1;
            const uint8_t *begin = paged__linear_begin(w, 3, 1, ith, nth, &n_bytes);
            if (e == 145) {
                CHECK(!begin && n_bytes == 0);
                continue;
            }
            while (e >= before[i + 1]) i++;
            for (last = e; last + 1 < before[i + 1] && y[last + 1] != -12345.0f;) last++;
            const int32_t first_tile = (e - before[i]) / 16, last_tile = (last - before[i]) / 16 + 1;
            CHECK(begin == w[i]->data + (size_t)first_tile * w[i]->tile_bytes);
            /* Tiles that are padding are read as well. */
            CHECK(n_bytes == (size_t)(last_tile + last_tile % 2 - first_tile) * w[i]->tile_bytes);
        }
    CHECK(!paged__linear_begin(w, 0, 1, 0, 1, &(size_t){0}));
    size_t n_bytes = 1;
    CHECK(paged__linear_begin(w, 3, 255, 1, 2, &n_bytes) && n_bytes > 0);
    CHECK(!paged__linear_begin(w, 3, 256, 1, 2, &n_bytes) && n_bytes == 0);
    free(act.data);
    inputs_free(&in);
    for (int32_t i = 0; i < 3; i++) weights_free(&v[i]);
}

/* Of a gated unit: those of the gate, though up may be of another type and its bytes are divided too. */
static void where_gated_parts_begin(void) {
    enum { ROWS = 17 * 16 };
    uint64_t rng = test_seed;
    weights gate = weights_make(PAGED__W_Q4_0, ROWS, 512, false, 1, &rng),
            up = weights_make(PAGED__W_Q8_0, ROWS, 512, false, 1, &rng);
    const paged__matrix *const w = &gate.w;
    inputs in = inputs_make(1, 512, &rng);
    paged__act act = activate(&in, PAGED__ACT_I8, 0, 1);
    float y[ROWS];
    for (int32_t nth = 1; nth <= 40; nth++)
        for (int32_t ith = 0; ith < nth; ith++) {
            for (int32_t e = 0; e < ROWS; e++) y[e] = -12345.0f;
            const paged__linear_job job = {
                .w = {w, &up.w}, .n_w = 2, .x = &act, .y = y, .y_stride = ROWS, .epilogue = PAGED__SWIGLU};
            paged__linear_run(&job, ith, nth);
            int32_t e = 0;
            while (e < ROWS && y[e] == -12345.0f) e++;
            size_t n_bytes = 1;
            const uint8_t *begin = paged__linear_begin(&w, 1, 1, ith, nth, &n_bytes);
            CHECK(begin == (e < ROWS ? w->data + (size_t)(e / 16) * w->tile_bytes : NULL));
        }
    free(act.data);
    inputs_free(&in);
    weights_free(&gate);
    weights_free(&up);
}

static void epilogues(void) {
    uint64_t rng = test_seed;
    weights gate = weights_make(PAGED__W_Q4_1, 53, 96, false, 1, &rng),
            up = weights_make(PAGED__W_Q5_0, 53, 96, false, 1, &rng);
    inputs in = inputs_make(N_TOKENS, 96, &rng), residual = inputs_make(N_TOKENS, 53, &rng);
    const float *bias = residual.x + 2 * residual.stride;
    for (int32_t e = PAGED__ADD; e <= PAGED__GEGLU; e++) {
        const bool add = e == PAGED__ADD;
        const paged__linear_job job = {.w = {&gate.w, add ? NULL : &up.w},
                                       .n_w = add ? 1 : 2,
                                       .bias = {NULL, add ? NULL : bias},
                                       .epilogue = (paged__epilogue)e,
                                       .residual = add ? residual.x : NULL,
                                       .residual_stride = residual.stride};
        float *want = linear_alone(&job, &in, true, 53);
        for (int32_t i = 0; i < N_TOKENS * 53; i++) CHECK(isfinite(want[i]));
        check_batches(&job, &in, true, 53, want);
        free(want);
    }
    inputs_free(&in);
    inputs_free(&residual);
    weights_free(&gate);
    weights_free(&up);
}

/* A gated unit whose outputs become activations as they are made: those of `want`, every byte. */
static void check_into(const paged__linear_job *base, const paged__act *x, const paged__act *want,
                       int32_t nth) {
    const size_t bytes = paged__act_bytes(want->kind, want->n_tokens, want->n_cols);
    paged__linear_job job = *base;
    paged__act got = *want;
    got.data = take_aligned(bytes);
    memset(got.data, 0xff, bytes);
    job.x = x;
    job.act = &got;
    job.room = room_for(nth);
    for (int32_t i = 0; i < nth; i++) paged__linear_run(&job, i, nth);
    CHECK(memcmp(got.data, want->data, bytes) == 0);
    free(got.data);
}

/* What a gated unit makes as activations is what paged__act_set() makes of its rows, on every instruction
 * set. */
static void into_activations(void) {
    enum { N_ROWS = 192 };
    uint64_t rng = test_seed;
    weights gate = weights_make(PAGED__W_Q4_1, N_ROWS, 96, false, 1, &rng),
            up = weights_make(PAGED__W_Q8_0, N_ROWS, 96, false, 1, &rng);
    inputs in = inputs_make(N_TOKENS, 96, &rng);
    CHECK(paged__linear_into_act(&gate.w));
    in.x[20 * in.stride] = NAN; /* a token is NaN in both ways */
    for (int32_t e = PAGED__SWIGLU; e <= PAGED__GEGLU; e++) {
        paged__linear_job job = {.w = {&gate.w, &up.w}, .n_w = 2, .epilogue = (paged__epilogue)e};
        float *rows = linear_alone(&job, &in, true, N_ROWS);
        const inputs hidden = {.act = {.n_cols = N_ROWS}, .x = rows, .stride = N_ROWS};
        for (int32_t isa = 0; isa < N_LINEAR_ISAS; isa++) {
            if (!linear_isa_use(isa)) continue;
            for (int32_t n = 1; n <= N_TOKENS; n += n < 14 ? 1 : n < 42 ? 9 : 28) {
                const paged__act x = activate(&in, true, N_TOKENS - n, n),
                                 want = activate(&hidden, true, N_TOKENS - n, n);
                check_into(&job, &x, &want, 3);
                free(x.data);
                free(want.data);
            }
        }
        free(rows);
    }
    paged_cpu_mask(~0u);
    inputs_free(&in);
    weights_free(&gate);
    weights_free(&up);
}

/* A token that holds NaN or an infinity: all its outputs are NaN (of F32, F16 and BF16 weights NaN or
 * infinite), and all others as without it. */
static void poison(void) {
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    uint64_t rng = test_seed;
    for (int32_t type = 0; type < PAGED__N_WEIGHT_TYPES; type++) {
        const bool quantised = paged__wants_quantised((paged__weight_type)type);
        weights v = weights_make((paged__weight_type)type, 40, 256, false, 1, &rng);
        inputs in = inputs_make(N_TOKENS, 256, &rng);
        const paged__linear_job job = {.w = {&v.w}, .n_w = 1};
        float *want = linear_alone(&job, &in, quantised, 40);
        for (int32_t i = 0; i < 3; i++) in.x[(i * 20 + 7) * in.stride + draw(&rng, 256)] = bad[i];
        for (int32_t isa = 0; isa < N_LINEAR_ISAS; isa++) {
            if (!linear_isa_use(isa)) continue;
            paged__act act = activate(&in, quantised, 0, N_TOKENS);
            float *y = run_stack(&job, &act, 40, 2);
            for (int32_t t = 0; t < N_TOKENS; t++) {
                const bool is_bad = t % 20 == 7 && t < 60;
                if (!is_bad) CHECK(same(y + t * 40, want + t * 40, 40));
                for (int32_t r = 0; r < 40 && is_bad; r++)
                    CHECK(quantised ? isnan(y[t * 40 + r]) : !isfinite(y[t * 40 + r]));
            }
            free(y);
            free(act.data);
        }
        free(want);
        inputs_free(&in);
        weights_free(&v);
    }
    paged_cpu_mask(~0u);
}

/* Values that quantisation may stumble over: bytes of activations are the same on all instruction sets. */
static void activations(void) {
    static const float odd[] = {0.0f,     -0.0f,     0x1p-149f, 0x1p-126f, 0x1p-101f, 0x1p-100f,
                                0x1p-99f, 3.0e38f,   -3.4e38f,  1.0f,      0.5f,      NAN,
                                INFINITY, -INFINITY, 126.5f,    127.0f};
    enum { N = 96, ROUNDS = 300 };
    uint64_t rng = test_seed;
    float x[N], norm[N];
    for (int32_t k = 0; k < N; k++) norm[k] = draw_unit(&rng);
    const size_t bytes = paged__act_bytes(true, 1, N);
    uint8_t *data[N_LINEAR_ISAS];
    for (int32_t isa = 0; isa < N_LINEAR_ISAS; isa++) data[isa] = take_aligned(bytes);
    for (int32_t i = 0; i < ROUNDS; i++) {
        for (int32_t k = 0; k < N; k++)
            x[k] = draw(&rng, 4) == 0 ? odd[draw(&rng, i % 3 == 0 ? 16 : 11)]
                                      : ldexpf(draw_unit(&rng), draw(&rng, i % 2 ? 4 : 60) - 30);
        for (int32_t isa = 0; isa < N_LINEAR_ISAS; isa++) {
            if (!linear_isa_use(isa)) continue;
            const paged__act act = paged__act_make(true, 1, N, data[isa]);
            memset(data[isa], 0xaa, bytes);
            paged__act_set(&act, 0, x, i % 4 == 1 ? norm : NULL, 1e-5f);
            CHECK(memcmp(data[isa], data[0], bytes) == 0);
        }
    }
    for (int32_t isa = 0; isa < N_LINEAR_ISAS; isa++) free(data[isa]);
    paged_cpu_mask(~0u);
}

/* Products of bf16 have bits of their own: each token alone on one thread against all else, where there are
 * several strips of rows, and one of their room's tokens is beyond it; alone, poisoned tokens are NaN. */
static void bf16(void) {
    enum { ROWS = 586, COLS = 768, MANY = 530, SOME = 3 };
    static const int32_t counts[] = {2, 3, 15, 16, 17, 31, 32, 33, 48, 70, 255, 257, MANY};
    uint64_t rng = test_seed;
    for (int32_t type = PAGED__W_Q4_0; type < PAGED__N_WEIGHT_TYPES && paged__linear_bf16(); type++) {
        weights v = weights_make((paged__weight_type)type, ROWS, COLS, type % 2 == 0, 2, &rng);
        inputs in = inputs_make(MANY, COLS, &rng);
        in.x[1 * in.stride + draw(&rng, COLS)] = NAN;
        in.x[40 * in.stride + draw(&rng, COLS)] = -INFINITY;
        paged__linear_job job = {.w = {&v.w}, .n_w = 1};
        float *want = take(MANY * ROWS, sizeof *want);
        for (int32_t t = 0; t < MANY; t++) {
            paged__act act = activate(&in, PAGED__ACT_BF16, t, 1);
            float *y = run_stack(&job, &act, ROWS, 1);
            memcpy(want + t * ROWS, y, ROWS * sizeof *y);
            for (int32_t r = 0; r < ROWS; r++) CHECK(t == 1 || t == 40 ? isnan(y[r]) : isfinite(y[r]));
            free(y);
            free(act.data);
        }
        for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
            const int32_t n = counts[i], first = draw(&rng, MANY - n + 1), nth = 1 + draw(&rng, SOME);
            paged__act act = activate(&in, PAGED__ACT_BF16, first, n);
            float *y = run_stack(&job, &act, ROWS, nth);
            if (!same(y, want + first * ROWS, (int64_t)n * ROWS))
                test_fail(__FILE__, __LINE__,
                          "type %d: %d tokens from %d on %d threads differ from each alone", type, n, first,
                          nth);
            free(y);
            free(act.data);
        }
        free(want);
        inputs_free(&in);
        weights_free(&v);
    }
}

/* A gated unit of bf16 into activations: what paged__act_set() makes of its rows. */
static void bf16_into_activations(void) {
    enum { ROWS = 192 };
    uint64_t rng = test_seed;
    if (!paged__linear_bf16()) return;
    weights gate = weights_make(PAGED__W_Q4_K, ROWS, 256, false, 1, &rng),
            up = weights_make(PAGED__W_Q6_K, ROWS, 256, false, 1, &rng);
    inputs in = inputs_make(N_TOKENS, 256, &rng);
    for (int32_t n = 1; n <= N_TOKENS; n += 23) {
        paged__act x = activate(&in, PAGED__ACT_BF16, 0, n);
        paged__linear_job job = {.w = {&gate.w, &up.w}, .n_w = 2, .epilogue = PAGED__SWIGLU};
        const inputs hidden = {.act = {.n_cols = ROWS}, .x = run_stack(&job, &x, ROWS, 1), .stride = ROWS};
        const paged__act want = activate(&hidden, PAGED__ACT_BF16, 0, n);
        check_into(&job, &x, &want, 2);
        free(hidden.x);
        free(x.data);
        free(want.data);
    }
    inputs_free(&in);
    weights_free(&gate);
    weights_free(&up);
}

#define TESTS(X)                                                                                             \
    X(one_matrix)                                                                                            \
    X(many_tokens)                                                                                           \
    X(each_output_once)                                                                                      \
    X(stacks)                                                                                                \
    X(where_parts_begin)                                                                                     \
    X(where_gated_parts_begin)                                                                               \
    X(epilogues) X(into_activations) X(poison) X(activations) X(bf16) X(bf16_into_activations)
TEST_MAIN(TESTS)
