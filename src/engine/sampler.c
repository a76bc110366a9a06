/* engine/sampler.c: one token from a row of logits. Temperature first, then top-k, then top-p (Holtzman et
 * al. 2020), as the OpenAI API describes them; equal logits are ordered by id, so that the result does not
 * depend on a sort.
 */
#include <math.h>
#include <stdlib.h>

#include "engine/engine.h"

static const float GREEDY_BELOW = 1e-5f;

typedef struct candidate {
    float logit;
    int32_t token;
} candidate;

struct paged__sampler {
    int32_t n_vocab;
    candidate *candidates; /* [n_vocab] */
};

paged__sampler *paged__sampler_create(int32_t n_vocab) {
    paged__sampler *s = paged__calloc(1, sizeof *s);
    if (!s) return NULL;
    s->n_vocab = n_vocab;
    s->candidates = paged__alloc((size_t)n_vocab, sizeof *s->candidates);
    if (!s->candidates) {
        paged__free(s);
        return NULL;
    }
    return s;
}

void paged__sampler_free(paged__sampler *s) {
    if (!s) return;
    paged__free(s->candidates);
    paged__free(s);
}

static int by_logit(const void *pa, const void *pb) {
    const candidate *a = pa, *b = pb;
    if (a->logit != b->logit) return a->logit > b->logit ? -1 : 1;
    return (a->token > b->token) - (a->token < b->token);
}

/* A better b: the order of by_logit. */
static bool before(candidate a, candidate b) {
    return by_logit(&a, &b) < 0;
}

/* A heap of the k best with the worst on top. */
static void sift_down(candidate *heap, int32_t n, int32_t i) {
    for (;;) {
        int32_t worst = i;
        for (int32_t c = 2 * i + 1; c <= 2 * i + 2 && c < n; c++)
            if (before(heap[worst], heap[c])) worst = c;
        if (worst == i) return;
        const candidate t = heap[i];
        heap[i] = heap[worst];
        heap[worst] = t;
        i = worst;
    }
}

static int32_t keep_best(candidate *c, int32_t n, int32_t k) {
    if (k >= n) return n;
    for (int32_t i = k / 2 - 1; i >= 0; i--) sift_down(c, k, i);
    for (int32_t i = k; i < n; i++) {
        if (!before(c[i], c[0])) continue;
        c[0] = c[i];
        sift_down(c, k, 0);
    }
    return k;
}

static bool allowed(const paged_tokenizer *tok, bool ban_eog, int32_t token) {
    return !ban_eog || !paged_token_is_eog(tok, token);
}

static int32_t argmax(const float *logits, int32_t n, bool ban_eog, const paged_tokenizer *tok) {
    int32_t best = -1;
    for (int32_t i = 0; i < n; i++)
        if ((best < 0 || logits[i] > logits[best]) && logits[i] == logits[i] && allowed(tok, ban_eog, i))
            best = i;
    return best < 0 ? 0 : best;
}

/* [0, 1) from (seed, position), 53 bits. */
static double uniform(uint64_t seed, int32_t position) {
    return (double)(paged__mix(paged__mix(seed) + (uint64_t)(uint32_t)position) >> 11) * 0x1p-53;
}

/* The first candidate at which the running sum passes u * total; c sorted or not, always in the same order.
 */
static int32_t draw(const candidate *c, int32_t n, double inv_temperature, double max, double total,
                    double u) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++) {
        sum += exp(((double)c[i].logit - max) * inv_temperature);
        if (sum > u * total) return c[i].token;
    }
    return c[n - 1].token;
}

int32_t paged__sample(paged__sampler *s, const float *logits, const paged_request *params, bool ban_eog,
                      const paged_tokenizer *tok, int32_t position) {
    const int32_t best = argmax(logits, s->n_vocab, ban_eog, tok);
    if (!(params->temperature >= GREEDY_BELOW) || params->top_p <= 0 || params->top_k == 1) return best;

    const double inv_t = 1.0 / (double)params->temperature, max = (double)logits[best];
    const double u = uniform(params->seed, position);
    candidate *c = s->candidates;
    int32_t n = 0;
    double total = 0;
    for (int32_t i = 0; i < s->n_vocab; i++) {
        if (logits[i] != logits[i] || !allowed(tok, ban_eog, i)) continue;
        c[n++] = (candidate){logits[i], i};
        total += exp(((double)logits[i] - max) * inv_t);
    }
    if (n == 0) return best;
    const bool cut_k = params->top_k > 0 && params->top_k < n, cut_p = params->top_p < 1;
    if (!cut_k && !cut_p) return draw(c, n, inv_t, max, total, u);

    if (cut_k) {
        n = keep_best(c, n, params->top_k);
    } else {
        /* Tokens below (1 - top_p) / n_vocab have less than 1 - top_p together: the nucleus needs none of
         * them, and what is left is short enough to sort. */
        const double floor_logit = max + log((1.0 - (double)params->top_p) / n * total) / inv_t;
        int32_t m = 0;
        for (int32_t i = 0; i < n; i++)
            if ((double)c[i].logit >= floor_logit || c[i].token == best) c[m++] = c[i];
        n = m;
    }
    qsort(c, (size_t)n, sizeof *c, by_logit);
    if (cut_k) { /* top-p is taken of what top-k left */
        total = 0;
        for (int32_t i = 0; i < n; i++) total += exp(((double)c[i].logit - max) * inv_t);
    }
    double sum = 0;
    int32_t keep = 0;
    while (keep < n && (keep == 0 || sum < (double)params->top_p * total))
        sum += exp(((double)c[keep++].logit - max) * inv_t);
    return draw(c, keep, inv_t, max, sum, u);
}

float paged__logprob(const float *logits, int32_t n_vocab, int32_t token, int32_t *top1) {
    int32_t best = 0;
    for (int32_t i = 1; i < n_vocab; i++)
        if (logits[i] > logits[best]) best = i;
    double sum = 0;
    for (int32_t i = 0; i < n_vocab; i++) sum += exp((double)logits[i] - (double)logits[best]);
    if (top1) *top1 = best;
    return (float)((double)logits[token] - (double)logits[best] - log(sum));
}
