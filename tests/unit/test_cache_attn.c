/* Goal: memory and attention mean the same by windows and packed tails. Method: rows go through slots of a
 * cache into its blocks and are read back through its tables; every output is compared with a dense reference
 * in double that knows no blocks, and bit by bit with a cache of another shape. All that no token was written
 * to is NaN. */
#include <math.h>

#include "mem/mem.h"
#include "paged/ops.h"
#include "test.h"

enum { HEADS = 4, KV_HEADS = 2, DIM = 16, LEN = 200, Q_ROW = HEADS * DIM, KV_ROW = KV_HEADS * DIM };

typedef struct shape {
    int32_t block_size, window;
    bool packed_tails;
} shape;

typedef struct setup {
    paged_cache *cache;
    paged_kv kv;
    paged_attn *attn;
    bool windowed;
} setup;

static float q_of[2][LEN * Q_ROW], k_of[2][LEN * KV_ROW], v_of[2][LEN * KV_ROW];

static void fill(float *to, int32_t n, uint64_t *rand) {
    for (int32_t i = 0; i < n; i++) to[i] = (float)(int32_t)(paged__rand(rand) % 2001 - 1000) / 500.0f;
}

/* Sequence 1 is a fork of sequence 0 after n_common tokens. */
static void fill_rows(int32_t n_common) {
    uint64_t rand = paged__mix(test_seed);
    for (int32_t s = 0; s < 2; s++) {
        fill(q_of[s], LEN * Q_ROW, &rand);
        fill(k_of[s], LEN * KV_ROW, &rand);
        fill(v_of[s], LEN * KV_ROW, &rand);
    }
    memcpy(k_of[1], k_of[0], (size_t)(n_common * KV_ROW) * sizeof(float));
    memcpy(v_of[1], v_of[0], (size_t)(n_common * KV_ROW) * sizeof(float));
}

static setup make(shape s) {
    setup w = {.windowed = s.window > 0};
    const paged_group_config group = {.n_layers = 1,
                                      .n_kv_heads = KV_HEADS,
                                      .head_dim_k = DIM,
                                      .type = PAGED_TYPE_F32,
                                      .layout = PAGED_LAYOUT_PACKED,
                                      .window = s.window};
    const paged_cache_config config = {.struct_size = sizeof config,
                                       .groups = &group,
                                       .n_groups = 1,
                                       .block_size = s.block_size,
                                       .pool_bytes = paged_pool_bytes_for(&group, 1, s.block_size, 3 * LEN),
                                       .max_seqs = 4,
                                       .max_seq_tokens = LEN,
                                       .packed_tails = s.packed_tails,
                                       .poison = true};
    const paged_attn_config attn = {.struct_size = sizeof attn,
                                    .n_heads = HEADS,
                                    .n_kv_heads = KV_HEADS,
                                    .head_dim_k = DIM,
                                    .block_size = s.block_size,
                                    .type = PAGED_TYPE_F32,
                                    .layout = PAGED_LAYOUT_PACKED,
                                    .window = s.window,
                                    .max_q = 2 * LEN,
                                    .max_seqs = 2,
                                    .max_k = LEN};
    paged_error err = {0};
    if (paged_cache_create(&config, &w.cache, &err) || paged_attn_create(&attn, &w.attn, &err))
        test_fail(__FILE__, __LINE__, "%s", err.message);
    paged__cache_shuffle(w.cache, 7);
    CHECK_EQ(paged_cache_kv(w.cache, 0, 0, &w.kv), PAGED_OK);
    return w;
}

/* A step of n_tokens for each sequence: reserve, write, attend, commit. out [n_seqs, LEN, Q_ROW]. */
static void step(const setup *w, const paged_seq *seqs, int32_t n_seqs, int32_t n_tokens, float *out) {
    static float q[2 * LEN * Q_ROW], got[2 * LEN * Q_ROW];
    int32_t cu[3] = {0}, rows[2], n_keys[2], first_k[2], tokens[LEN], len = paged_seq_len(w->cache, seqs[0]);
    int64_t slots[LEN];
    paged_error err = {0};
    for (int32_t s = 0; s < n_seqs; s++) {
        for (int32_t i = 0; i < n_tokens; i++) tokens[i] = s * 1000 + len + i;
        CHECK_EQ(paged_seq_reserve(w->cache, seqs[s], n_tokens), PAGED_OK);
        CHECK_EQ(paged_seq_slots(w->cache, seqs[s], 0, len, n_tokens, slots), PAGED_OK);
        CHECK_EQ(paged_kv_write(&w->kv, k_of[s] + len * KV_ROW, 0, v_of[s] + len * KV_ROW, 0, slots, n_tokens,
                                0, 1),
                 0);
        memcpy(q + cu[s] * Q_ROW, q_of[s] + len * Q_ROW, (size_t)(n_tokens * Q_ROW) * sizeof *q);
        cu[s + 1] = cu[s] + n_tokens;
        rows[s] = paged_seq_row(w->cache, seqs[s]);
        n_keys[s] = len + n_tokens;
        first_k[s] = paged_seq_first_k(w->cache, seqs[s], 0);
    }
    paged_batch batch = {.cu_seqlens_q = cu};
    CHECK_EQ(paged_cache_tables(w->cache, 0, &batch.tables), PAGED_OK);
    batch.tables.rows = rows;
    batch.tables.seqlens_k = n_keys;
    batch.tables.first_k = w->windowed ? first_k : NULL;
    batch.tables.n_seqs = n_seqs;
    const paged_attn_io io = {.q = q, .out = got};
    if (paged_attn_plan(w->attn, &batch, &w->kv, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
    paged_attn_run(w->attn, &w->kv, &io, 0, 1);
    if (paged_attn_needs_merge(w->attn)) paged_attn_merge(w->attn, &io, 0, 1);
    for (int32_t s = 0; s < n_seqs; s++) {
        memcpy(out + (s * LEN + len) * Q_ROW, got + cu[s] * Q_ROW, (size_t)(n_tokens * Q_ROW) * sizeof *out);
        for (int32_t i = 0; i < n_tokens; i++) tokens[i] = s * 1000 + len + i;
        CHECK_EQ(paged_seq_commit(w->cache, seqs[s], tokens, n_tokens), PAGED_OK);
        if (paged_cache_check(w->cache, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
    }
}

/* n_common tokens of one sequence, then two of them to the end, `chunk` tokens a step. */
static void run(shape s, int32_t n_common, int32_t chunk, float *out) {
    setup w = make(s);
    paged_seq seqs[2];
    CHECK_EQ(paged_seq_create(w.cache, &seqs[0]), PAGED_OK);
    for (int32_t pos = 0; pos < n_common; pos += chunk)
        step(&w, seqs, 1, PAGED_MIN(chunk, n_common - pos), out);
    CHECK_EQ(paged_seq_fork(w.cache, seqs[0], &seqs[1]), PAGED_OK);
    for (int32_t pos = n_common; pos < LEN; pos += chunk) step(&w, seqs, 2, PAGED_MIN(chunk, LEN - pos), out);
    paged_attn_free(w.attn);
    paged_cache_free(w.cache);
}

/* Row i of a sequence sees the keys max(0, i - window + 1) … i, without blocks, in double. */
static void check_dense(int32_t s, int32_t i, int32_t window, const float *out) {
    int32_t first = window && i >= window ? i - window + 1 : 0;
    for (int32_t h = 0; h < HEADS; h++) {
        double weights[LEN], sum = 0, max = -INFINITY;
        int32_t kv_head = h / (HEADS / KV_HEADS);
        for (int32_t j = first; j <= i; j++) {
            double score = 0;
            for (int32_t d = 0; d < DIM; d++)
                score += (double)q_of[s][i * Q_ROW + h * DIM + d] *
                         (double)k_of[s][j * KV_ROW + kv_head * DIM + d];
            weights[j] = score / sqrt(DIM);
            max = fmax(max, weights[j]);
        }
        for (int32_t j = first; j <= i; j++) sum += weights[j] = exp(weights[j] - max);
        for (int32_t d = 0; d < DIM; d++) {
            double want = 0, got = (double)out[h * DIM + d];
            for (int32_t j = first; j <= i; j++)
                want += weights[j] / sum * (double)v_of[s][j * KV_ROW + kv_head * DIM + d];
            if (!(fabs(got - want) < 1e-5))
                test_fail(__FILE__, __LINE__, "sequence %d row %d head %d: %g, not %g", s, i, h, got, want);
        }
    }
}

/* D15 with attention, D10: all blocks NaN. One prefill, chunks, token by token; the same bits in all. */
static void windows_and_tails(void) {
    static const shape shapes[] = {{16, 0, false},  {64, 0, true},  {128, 0, true}, {16, 4, false},
                                   {32, 40, false}, {64, 40, true}, {64, 4, true},  {256, 70, true}};
    static const int32_t chunks[] = {LEN, 3, 1, 50};
    static float want[2 * LEN * Q_ROW], got[2 * LEN * Q_ROW];
    for (int32_t n_common = 0; n_common <= 75; n_common += 75) {
        fill_rows(n_common);
        for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
            for (int32_t c = 0; c < 4; c++) {
                float *out = c ? got : want;
                run(shapes[i], n_common, chunks[c], out);
                for (int32_t s = 0; s < 2; s++) {
                    size_t from = (size_t)((s * LEN + (s ? n_common : 0)) * Q_ROW);
                    size_t n = (size_t)((LEN - (s ? n_common : 0)) * Q_ROW);
                    CHECK(memcmp(want + from, out + from, n * sizeof *out) == 0);
                    for (int32_t row = s ? n_common : 0; row < LEN && c == 0; row++)
                        check_dense(s, row, shapes[i].window, out + (s * LEN + row) * Q_ROW);
                }
            }
        }
    }
}

/* Block size, tails and where blocks lie change no bit. */
static void shapes_change_no_bit(void) {
    static const shape shapes[] = {
        {16, 0, false}, {32, 0, true}, {64, 0, true}, {64, 0, false}, {256, 0, true}};
    static float want[2 * LEN * Q_ROW], got[2 * LEN * Q_ROW];
    fill_rows(40);
    for (int32_t i = 0; i < 5; i++) {
        run(shapes[i], 40, 7, i ? got : want);
        const float *out = i ? got : want;
        CHECK(memcmp(want, out, sizeof want / 2) == 0);
        CHECK(memcmp(want + (LEN + 40) * Q_ROW, out + (LEN + 40) * Q_ROW, (LEN - 40) * Q_ROW * sizeof *out) ==
              0);
    }
}

#define TESTS(X) X(windows_and_tails) X(shapes_change_no_bit)
TEST_MAIN(TESTS)
