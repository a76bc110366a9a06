/* Goal: a sampled token follows the distribution that temperature, top-k and top-p describe, and nothing but
 * (seed, position). Method: frequencies against probabilities computed here in double by a sort of the whole
 * vocabulary. */
#include <math.h>

#include "engine/engine.h"
#include "test.h"

enum { V = 400, DRAWS = 6000 };

static float logits[V];
static double want[V];
static int order[V];

static int by_want(const void *a, const void *b) {
    const double x = want[*(const int *)a], y = want[*(const int *)b];
    return x < y ? 1 : x > y ? -1 : *(const int *)a - *(const int *)b;
}

/* Textbook: softmax(logits / t), keep the k best, of these the smallest set with mass >= p, renormalise. */
static void expect(double t, int k, double p) {
    double total = 0, mass = 0, kept = 0;
    for (int i = 0; i < V; i++) total += want[i] = exp((double)logits[i] / t);
    for (int i = 0; i < V; i++) {
        want[i] /= total;
        order[i] = i;
    }
    qsort(order, V, sizeof *order, by_want);
    const int n_k = k > 0 && k < V ? k : V;
    for (int i = 0; i < n_k; i++) mass += want[order[i]];
    int keep = 0;
    while (keep < n_k && (keep == 0 || kept < p * mass)) kept += want[order[keep++]];
    for (int i = 0; i < V; i++) want[order[i]] = i < keep ? want[order[i]] / kept : 0;
}

static void check_case(float t, int k, float p) {
    static int seen[V];
    paged__sampler *s = paged__sampler_create(V);
    paged_request q;
    paged_request_init(&q);
    q.temperature = t;
    q.top_k = k;
    q.top_p = p;
    q.seed = test_seed;
    expect((double)t, k, (double)p);
    memset(seen, 0, sizeof seen);
    for (int i = 0; i < DRAWS; i++) seen[paged__sample(s, logits, &q, false, NULL, i)]++;
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
            for (int c = 0; c < 4; c++) check_case(ts[a], ks[b], ps[c]);
}

static void greedy_cases(void) {
    fill();
    paged__sampler *s = paged__sampler_create(V);
    for (int i = 0; i < 6; i++) {
        paged_request q;
        paged_request_init(&q);
        q.temperature = i == 0 ? 0 : i == 1 ? 1e-8f : i == 2 ? 9e-6f : 1;
        if (i == 3) q.top_k = 1;
        if (i == 4) q.top_p = 0;
        if (i == 5) q.top_p = 1e-6f, q.top_k = 1000000000;
        q.seed = 99;
        for (int pos = 0; pos < 50; pos++) CHECK_EQ(paged__sample(s, logits, &q, false, NULL, pos), 7);
    }
    paged__sampler_free(s);
}

static void extremes(void) {
    fill();
    logits[3] = NAN;
    logits[4] = -INFINITY;
    paged__sampler *s = paged__sampler_create(V);
    paged_request q;
    paged_request_init(&q);
    const float ts[] = {0, 1e-4f, 1e6f, 3e38f};
    for (int a = 0; a < 4; a++) {
        q.temperature = ts[a];
        for (int pos = 0; pos < 5000; pos++) {
            const int32_t t = paged__sample(s, logits, &q, false, NULL, pos);
            CHECK(t >= 0 && t < V && t != 3 && t != 4);
        }
    }
    for (int i = 0; i < V; i++) logits[i] = NAN;
    CHECK_EQ(paged__sample(s, logits, &q, false, NULL, 0), 0);
    paged__sampler_free(s);
}

static void logprobs(void) {
    fill();
    double total = 0;
    for (int i = 0; i < V; i++) total += exp((double)logits[i]);
    for (int i = 0; i < V; i += 37) {
        int32_t top1;
        CHECK(fabs((double)paged__logprob(logits, V, i, &top1) - log(exp((double)logits[i]) / total)) < 1e-6);
        CHECK_EQ(top1, 7);
    }
}

#define TESTS(X) X(distribution) X(greedy_cases) X(extremes) X(logprobs)
TEST_MAIN(TESTS)
