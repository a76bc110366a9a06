/* Goal: a sampled token follows the distribution that temperature, top-k and top-p describe, and nothing but
 * (seed, position). Method: frequencies against probabilities computed here in double by a sort of the whole
 * vocabulary. */
#include <math.h>

#include "engine/engine.h"
#include "ops/select.h"
#include "test.h"

enum { V = 400, DRAWS = 6000 };

static float logits[V];
static double want[V];
static int order[V];

static int by_want(const void *a, const void *b) {
    const double x = want[*(const int *)a], y = want[*(const int *)b];
    return x < y ? 1 : x > y ? -1 : *(const int *)a - *(const int *)b;
}

/* With nothing but a position. */
static int32_t sample(paged__sampler *s, const paged_request *q, int32_t position) {
    static int32_t tokens[8192];
    const paged__choice how = {.params = q, .tokens = tokens, .n_prompt = position, .n_tokens = position};
    return paged__sample(s, logits, &how);
}

/* Textbook: softmax(logits / t), keep what has min_p of the best, of these the k best, of these the smallest
 * set with mass >= p, renormalise. */
static void expect(double t, int k, double p, double min_p) {
    double total = 0, mass = 0, kept = 0;
    for (int i = 0; i < V; i++) total += want[i] = exp((double)logits[i] / t);
    for (int i = 0; i < V; i++) {
        want[i] /= total;
        order[i] = i;
    }
    qsort(order, V, sizeof *order, by_want);
    int n_k = 0;
    while (n_k < V && (k <= 0 || n_k < k) && want[order[n_k]] >= min_p * want[order[0]]) n_k++;
    for (int i = 0; i < n_k; i++) mass += want[order[i]];
    int keep = 0;
    while (keep < n_k && (keep == 0 || kept < p * mass)) kept += want[order[keep++]];
    for (int i = 0; i < V; i++) want[order[i]] = i < keep ? want[order[i]] / kept : 0;
}

static void check_case(float t, int k, float p, float min_p) {
    static int seen[V];
    paged__sampler *s = paged__sampler_create(V, NULL);
    paged_request q;
    paged_request_init(&q);
    q.temperature = t;
    q.top_k = k;
    q.top_p = p;
    q.min_p = min_p;
    q.seed = test_seed;
    expect((double)t, k, (double)p, (double)min_p);
    memset(seen, 0, sizeof seen);
    for (int i = 0; i < DRAWS; i++) seen[sample(s, &q, i)]++;
    paged__sampler_free(s);
    for (int i = 0; i < V; i++) {
        const double mean = want[i] * DRAWS, sigma = sqrt(mean * (1 - want[i]));
        if (want[i] <= 0) CHECK_EQ(seen[i], 0);
        CHECK(fabs(seen[i] - mean) < 6 * sigma + 2);
    }
}

static void fill(void) {
    uint64_t state = test_seed;
    for (int i = 0; i < V; i++) logits[i] = (float)(paged__rand(&state) >> 40) * 0x1p-24f * 12 - 6;
    logits[7] = logits[13] = 6.5f; /* a tie at the top */
}

static void distribution(void) {
    fill();
    const float ts[] = {0.2f, 0.7f, 1.0f, 2.0f}, ps[] = {0.1f, 0.5f, 0.9f, 1.0f};
    const int ks[] = {0, 2, 40, V + 5};
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 4; b++)
            for (int c = 0; c < 4; c++)
                for (int d = 0; d < 2; d++) check_case(ts[a], ks[b], ps[c], d ? 0.11f : 0);
}

static void greedy_cases(void) {
    fill();
    paged__sampler *s = paged__sampler_create(V, NULL);
    for (int i = 0; i < 6; i++) {
        paged_request q;
        paged_request_init(&q);
        q.temperature = i == 0 ? 0 : i == 1 ? 1e-8f : i == 2 ? 9e-6f : 1;
        if (i == 3) q.top_k = 1;
        if (i == 4) q.top_p = 0;
        if (i == 5) q.top_p = 1e-6f, q.top_k = 1000000000;
        q.seed = 99;
        for (int pos = 0; pos < 50; pos++) CHECK_EQ(sample(s, &q, pos), 7);
    }
    paged__sampler_free(s);
}

static void extremes(void) {
    fill();
    logits[3] = NAN;
    logits[4] = -INFINITY;
    paged__sampler *s = paged__sampler_create(V, NULL);
    paged_request q;
    paged_request_init(&q);
    const float ts[] = {0, 1e-4f, 1e6f, 3e38f};
    for (int a = 0; a < 4; a++) {
        q.temperature = ts[a];
        for (int pos = 0; pos < 5000; pos++) {
            const int32_t t = sample(s, &q, pos);
            CHECK(t >= 0 && t < V && t != 3 && t != 4);
        }
    }
    for (int i = 0; i < V; i++) logits[i] = NAN;
    CHECK_EQ(sample(s, &q, 0), 0);
    paged__sampler_free(s);
}

static void logprobs(void) {
    paged__sampler *s = paged__sampler_create(V, NULL);
    fill();
    expect(1, 0, 1, 0);
    paged_top_logprob top[20];
    for (int i = 0; i < V; i += 37) {
        int32_t top1;
        CHECK(fabs((double)paged__logprob(s, logits, i, &top1) - log(want[i])) < 1e-6);
        CHECK_EQ(top1, 7);
        /* The same of the token that comes, whatever made it come. */
        const paged_logit_bias up = {i, 100};
        const paged_request q = {.n_top_logprobs = 20, .top_p = 1, .logit_bias = &up, .n_logit_bias = i % 2};
        const paged__choice how = {.params = &q, .tokens = &top1};
        float score;
        const int32_t token = paged__sample_scored(s, logits, &how, &score, top);
        CHECK_EQ(token, i % 2 ? i : 7);
        CHECK(fabs((double)score - log(want[token])) < 1e-6);
        for (int j = 0; j < 20; j++) {
            CHECK_EQ(top[j].token, order[j]);
            CHECK(fabs((double)top[j].logprob - log(want[order[j]])) < 1e-6);
        }
    }
    paged__sampler_free(s);
}

/* Bias, then repetition over prompt and answer, then presence and frequency over the answer: the largest of
 * the row that these rules give, written down for a few tokens. */
static void penalties(void) {
    enum { N_PROMPT = 3 };
    const int32_t tokens[] = {7, 13, 20, 30, 30, 31}; /* prompt 7 13 20, answer 30 30 31 */
    const paged_logit_bias bias[] = {{50, 9.0f}, {51, -100.0f}, {52, 3.0f}};
    const struct {
        float repetition, presence, frequency;
        int32_t n_bias;
        double want[8]; /* of the tokens below */
    } cases[] = {
        {0, 0, 0, 0, {6, -2, 4, 3, 2, 1, 5, 1.5}},
        {2, 0, 0, 0, {3, -4, 2, 1.5, 1, 1, 5, 1.5}},
        {1, 0.5f, 0, 0, {6, -2, 4, 2.5, 1.5, 1, 5, 1.5}},
        {1, 0.5f, 0.25f, 0, {6, -2, 4, 2, 1.25, 1, 5, 1.5}},
        {2, 0.5f, 0.25f, 3, {3, -4, 2, 0.5, 0.25, 10, -INFINITY, 4.5}},
    };
    const int32_t ids[8] = {7, 13, 20, 30, 31, 50, 51, 52};
    const float raw[8] = {6, -2, 4, 3, 2, 1, 5, 1.5f};
    paged__sampler *s = paged__sampler_create(V, NULL);
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        paged_request q;
        paged_request_init(&q);
        q.repetition_penalty = cases[c].repetition;
        q.presence_penalty = cases[c].presence;
        q.frequency_penalty = cases[c].frequency;
        q.logit_bias = bias;
        q.n_logit_bias = cases[c].n_bias;
        const paged__choice how = {.params = &q, .tokens = tokens, .n_prompt = N_PROMPT, .n_tokens = 6};
        /* Another token at a known height wins exactly when it is above the one in question. */
        for (int i = 0; i < 8; i++) {
            for (int above = 0; above < 2; above++) {
                for (int v = 0; v < V; v++) logits[v] = -INFINITY;
                logits[ids[i]] = raw[i];
                const double rival =
                    isinf(cases[c].want[i]) ? -50 : cases[c].want[i] + (above ? 1e-3 : -1e-3);
                logits[100] = (float)rival;
                CHECK_EQ(paged__sample(s, logits, &how), above || isinf(cases[c].want[i]) ? 100 : ids[i]);
            }
        }
    }
    paged__sampler_free(s);
}

/* The same bits from every instruction set, for any length; NaN and infinities as documented. */
static void selection(void) {
    enum { N = 4000, BLOCK = PAGED__SELECT_BLOCK, MOST = N + PAGED__SELECT_SLACK };
    static float x[N], maxima[3][N], weights[3][N], values[3][MOST];
    static double sums[3][N];
    static int32_t places[3][MOST];
    const uint32_t sets[] = {0, PAGED_CPU_AVX2, ~0u};
    uint64_t state = test_seed;
    for (int32_t n = 1; n < N; n += 1 + n / 7) {
        const float floor = n % 3 ? -20 : -INFINITY;
        int32_t found[3], n_large = 0;
        for (int i = 0; i < n; i++) x[i] = (float)(paged__rand(&state) >> 40) * 0x1p-24f * 200 - 190;
        x[n / 2] = NAN;
        x[n / 3] = -INFINITY;
        for (int k = 0; k < 3; k++) {
            paged_cpu_mask(sets[k]);
            paged__select_maxima(x, n, maxima[k]);
            paged__select_sums(x, n, 10, 1.44269504f, sums[k]);
            paged__select_weights(x, n, 10, 1.44269504f, weights[k]);
            found[k] = paged__select_gather(x, n, floor, values[k], places[k]);
        }
        paged_cpu_mask(~0u);
        const int32_t n_blocks = paged__select_blocks(n);
        for (int k = 1; k < 3; k++) {
            CHECK(memcmp(maxima[k], maxima[0], (size_t)n_blocks * sizeof **maxima) == 0);
            CHECK(memcmp(sums[k], sums[0], (size_t)n_blocks * sizeof **sums) == 0);
            CHECK(memcmp(weights[k], weights[0], (size_t)n * sizeof **weights) == 0);
        }
        for (int32_t b = 0; b < n_blocks; b++) {
            float max = -INFINITY;
            double sum = 0;
            for (int32_t i = b * BLOCK; i < n && i < b * BLOCK + BLOCK; i++) {
                /* The argument of exp2 is rounded to f32. */
                const double weight = x[i] == x[i] ? exp((double)x[i] - 10) : 0;
                CHECK(fabs((double)weights[0][i] - weight) <= 2e-5 * weight + 1.2e-38);
                if (x[i] > max) max = x[i];
                sum += weight;
            }
            CHECK(maxima[0][b] == max);
            CHECK(fabs(sums[0][b] - sum) <= 2e-5 * sum + 1e-38);
        }
        for (int32_t i = 0; i < n; i++) {
            if (!(x[i] >= floor)) continue;
            for (int k = 0; k < 3; k++) CHECK(places[k][n_large] == i && values[k][n_large] == x[i]);
            n_large++;
        }
        for (int k = 0; k < 3; k++) CHECK_EQ(found[k], n_large);
    }
}

/* The cuts beside a sort of the vocabulary: flat rows, equal logits, rows that span more than weights can.
 * What is kept is where the draws fall. */
static void cuts_of_many(void) {
    enum { N = 3000 };
    static float row[N];
    static int32_t ids[N], tokens[1];
    static bool seen[N];
    const float spans[] = {0, 1e-38f, 0.5f, 30, 3e38f};
    paged__sampler *s = paged__sampler_create(N, NULL);
    uint64_t state = test_seed;
    for (int c = 0; c < 5; c++) {
        for (int i = 0; i < N; i++) {
            row[i] = spans[c] * (float)(paged__rand(&state) % 512) / 512;
            ids[i] = i;
        }
        for (int i = 1; i < N; i++) /* by rank */
            for (int j = i; j > 0 && row[ids[j]] > row[ids[j - 1]]; j--) {
                const int32_t t = ids[j];
                ids[j] = ids[j - 1];
                ids[j - 1] = t;
            }
        paged_request q;
        paged_request_init(&q);
        q.temperature = 1;
        q.top_k = 200;
        q.top_p = c % 2 ? 0.75f : 1;
        double mass = 0, kept = 0;
        int n_kept = 0;
        for (int i = 0; i < 200; i++) mass += exp((double)row[ids[i]] - (double)row[ids[0]]);
        while (n_kept < 200 && (n_kept == 0 || kept < (double)q.top_p * mass))
            kept += exp((double)row[ids[n_kept++]] - (double)row[ids[0]]);
        memset(seen, 0, sizeof seen);
        for (int i = 0; i < 6000; i++) {
            const paged__choice how = {.params = &q, .tokens = tokens, .n_tokens = i};
            seen[paged__sample(s, row, &how)] = true;
        }
        for (int i = n_kept; i < N; i++) CHECK(!seen[ids[i]]);
        if (spans[c] < 1)
            for (int i = 0; i < n_kept; i++) CHECK(seen[ids[i]]);
    }
    paged__sampler_free(s);
}

#define TESTS(X)                                                                                             \
    X(distribution) X(greedy_cases) X(extremes) X(logprobs) X(penalties) X(selection) X(cuts_of_many)
TEST_MAIN(TESTS)
