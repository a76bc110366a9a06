/* engine/sampler.c: logits -> one token.
 *
 *   1 logit bias; tokens that may not come yet get -inf
 *   2 repetition penalty (Keskar et al. 2019) over prompt and answer; presence and frequency penalties, as in
 *     the OpenAI API, over the answer
 *   3 greedy: the largest; else softmax(logits / temperature), of which
 *   4 min-p (Nguyen et al. 2024) keeps what has at least min_p times the largest probability,
 *   5 top-k (Fan et al. 2018) the k best of these,
 *   6 top-p (Holtzman et al. 2020) the fewest best of these with that mass;
 *   7 one is drawn by inverse CDF.
 *
 * Equal logits are ordered by id, so that nothing depends on a sort. Most of a vocabulary is never looked at
 * token by token: see ops/select.h.
 */
#include <math.h>
#include <stdlib.h>

#include "engine/engine.h"
#include "ops/select.h"

static const float GREEDY_BELOW = 1e-5f;
static const float BANNED = -100; /* a bias as low as this */
static const double LOG2_E = 1.44269504088896340736;

typedef struct candidate {
    float logit;
    int32_t token;
} candidate;

struct paged__sampler {
    int32_t n_vocab, n_blocks;
    int32_t *eog; /* [n_eog] tokens that end a generation */
    int32_t n_eog;
    candidate *candidates; /* [n_vocab] */
    float *changed;        /* [n_vocab] the row after bias and penalties */
    float *maxima;         /* [n_blocks] */
    double *sums;          /* [n_blocks] */
    int32_t *counts;       /* [n_vocab] zero between calls */
};

paged__sampler *paged__sampler_create(int32_t n_vocab, const paged_tokenizer *tok) {
    paged__sampler *s = paged__calloc(1, sizeof *s);
    if (!s) return NULL;
    s->n_vocab = n_vocab;
    s->n_blocks = paged__select_blocks(n_vocab);
    for (int32_t i = 0; tok && i < n_vocab; i++) s->n_eog += paged_token_is_eog(tok, i);
    s->eog = paged__alloc((size_t)s->n_eog, sizeof *s->eog);
    s->candidates = paged__alloc((size_t)n_vocab, sizeof *s->candidates);
    s->changed = paged__alloc((size_t)n_vocab, sizeof *s->changed);
    s->maxima = paged__alloc((size_t)s->n_blocks, sizeof *s->maxima);
    s->sums = paged__alloc((size_t)s->n_blocks, sizeof *s->sums);
    s->counts = paged__calloc((size_t)n_vocab, sizeof *s->counts);
    if (!s->eog || !s->candidates || !s->changed || !s->maxima || !s->sums || !s->counts) {
        paged__sampler_free(s);
        return NULL;
    }
    for (int32_t i = 0, n = 0; n < s->n_eog; i++)
        if (paged_token_is_eog(tok, i)) s->eog[n++] = i;
    return s;
}

void paged__sampler_free(paged__sampler *s) {
    if (!s) return;
    paged__free(s->eog);
    paged__free(s->candidates);
    paged__free(s->changed);
    paged__free(s->maxima);
    paged__free(s->sums);
    paged__free(s->counts);
    paged__free(s);
}

/* ---- 1, 2: what changes the row ---- */

static void ban(float *x, const int32_t *tokens, int32_t n) {
    for (int32_t i = 0; i < n; i++) x[tokens[i]] = -INFINITY;
}

static void repeat(float *x, int32_t token, float penalty) {
    x[token] = x[token] > 0 ? x[token] / penalty : x[token] * penalty;
}

/* Each token once, however often it occurs; the tokens of the answer are counted besides. */
static void penalise(paged__sampler *s, float *x, const paged__choice *how) {
    const paged_request *p = how->params;
    const float repetition = p->repetition_penalty == 0 ? 1 : p->repetition_penalty;
    int32_t *counts = s->counts;
    const int32_t *answer = how->tokens + how->n_prompt, n_answer = how->n_tokens - how->n_prompt;
    if (repetition != 1) {
        for (int32_t i = 0; i < how->n_tokens; i++)
            if (counts[how->tokens[i]]++ == 0) repeat(x, how->tokens[i], repetition);
        for (int32_t i = 0; i < how->n_tokens; i++) counts[how->tokens[i]] = 0;
    }
    if (p->presence_penalty == 0 && p->frequency_penalty == 0) return;
    for (int32_t i = 0; i < n_answer; i++) counts[answer[i]]++;
    for (int32_t i = 0; i < n_answer; i++) {
        if (counts[answer[i]] == 0) continue;
        x[answer[i]] -= p->presence_penalty + p->frequency_penalty * (float)counts[answer[i]];
        counts[answer[i]] = 0;
    }
}

static bool is_changed(const paged__choice *how) {
    const paged_request *p = how->params;
    return how->ban_eog || how->ban_stops || p->n_logit_bias > 0 || p->presence_penalty != 0 ||
           p->frequency_penalty != 0 || (p->repetition_penalty != 0 && p->repetition_penalty != 1);
}

static const float *change(paged__sampler *s, const float *logits, const paged__choice *how) {
    if (!is_changed(how)) return logits;
    float *x = s->changed;
    memcpy(x, logits, (size_t)s->n_vocab * sizeof *x);
    for (int32_t i = 0; i < how->params->n_logit_bias; i++) {
        const paged_logit_bias b = how->params->logit_bias[i];
        x[b.token] = b.bias <= BANNED ? -INFINITY : x[b.token] + b.bias;
    }
    if (how->ban_eog) ban(x, s->eog, s->n_eog);
    if (how->ban_stops) ban(x, how->params->stop_tokens, how->params->n_stop_tokens);
    penalise(s, x, how);
    return x;
}

/* ---- candidates ---- */

static int by_logit(const void *pa, const void *pb) {
    const candidate *a = pa, *b = pb;
    if (a->logit != b->logit) return a->logit > b->logit ? -1 : 1;
    return (a->token > b->token) - (a->token < b->token);
}

/* A heap of the k best with the worst on top. */
static void sift_down(candidate *heap, int32_t n, int32_t i) {
    for (;;) {
        int32_t worst = i;
        for (int32_t c = 2 * i + 1; c <= 2 * i + 2 && c < n; c++)
            if (by_logit(&heap[worst], &heap[c]) < 0) worst = c;
        if (worst == i) return;
        const candidate t = heap[i];
        heap[i] = heap[worst];
        heap[worst] = t;
        i = worst;
    }
}

/* The first token with the largest logit; -1: all are NaN. */
static int32_t best_of(const paged__sampler *s, const float *x) {
    int32_t block = 0;
    for (int32_t b = 1; b < s->n_blocks; b++)
        if (s->maxima[b] > s->maxima[block]) block = b;
    const int32_t begin = block * PAGED__SELECT_BLOCK,
                  end = PAGED_MIN(begin + PAGED__SELECT_BLOCK, s->n_vocab);
    for (int32_t i = begin; i < end; i++)
        if (x[i] == s->maxima[block]) return i;
    return -1;
}

/* The k best of at least `floor`, best first; returns how many. k ≥ 1. */
static int32_t collect(paged__sampler *s, const float *x, float floor, int32_t k) {
    candidate *c = s->candidates;
    int32_t n = 0;
    for (int32_t b = 0; b < s->n_blocks; b++) {
        if (!(s->maxima[b] >= floor) || (n == k && s->maxima[b] <= c[0].logit)) continue;
        const int32_t begin = b * PAGED__SELECT_BLOCK,
                      end = PAGED_MIN(begin + PAGED__SELECT_BLOCK, s->n_vocab);
        for (int32_t i = begin; i < end; i++) {
            if (!(x[i] >= floor) || (n == k && x[i] <= c[0].logit))
                continue; /* among equals the first stay */
            if (n < k) {
                c[n++] = (candidate){x[i], i};
                for (int32_t j = n / 2 - 1; n == k && j >= 0; j--) sift_down(c, k, j);
            } else {
                c[0] = (candidate){x[i], i};
                sift_down(c, k, 0);
            }
        }
    }
    qsort(c, (size_t)n, sizeof *c, by_logit);
    return n;
}

/* All of at least `floor`, by id; returns how many. */
static int32_t gather(paged__sampler *s, const float *x, float floor) {
    int32_t n = 0;
    for (int32_t b = 0; b < s->n_blocks; b++) {
        if (!(s->maxima[b] >= floor)) continue;
        const int32_t begin = b * PAGED__SELECT_BLOCK,
                      end = PAGED_MIN(begin + PAGED__SELECT_BLOCK, s->n_vocab);
        for (int32_t i = begin; i < end; i++)
            if (x[i] >= floor) s->candidates[n++] = (candidate){x[i], i};
    }
    return n;
}

/* ---- drawing ---- */

/* [0, 1) from seed, choice and position, 53 bits. */
static double uniform(const paged__choice *how) {
    const uint64_t stream = paged__mix(how->params->seed) + ((uint64_t)(uint32_t)how->choice << 32);
    return (double)(paged__mix(stream + (uint64_t)(uint32_t)(how->n_tokens + how->n_dropped)) >> 11) *
           0x1p-53;
}

/* From the whole vocabulary: the block first, then the token in it. */
static int32_t draw_any(const paged__sampler *s, const float *x, float max, float scale, int32_t best,
                        double u) {
    double total = 0, sum = 0;
    for (int32_t b = 0; b < s->n_blocks; b++) total += s->sums[b];
    int32_t block = 0, token = best;
    while (block < s->n_blocks - 1 && sum + s->sums[block] <= u * total) sum += s->sums[block++];
    const int32_t begin = block * PAGED__SELECT_BLOCK,
                  end = PAGED_MIN(begin + PAGED__SELECT_BLOCK, s->n_vocab);
    for (int32_t i = begin; i < end; i++) {
        const double weight = (double)paged__select_weight(x[i], max, scale);
        if (weight > 0) token = i; /* rounding may leave u * total just beyond the last one */
        sum += weight;
        if (sum > u * total) break;
    }
    return token;
}

/* From n candidates, best first, of which the first with a mass of top_p count. */
static int32_t draw_of(const candidate *c, int32_t n, float scale, double mass, double top_p, double u) {
    double kept = 0, sum = 0;
    int32_t n_kept = 0;
    while (n_kept < n && (n_kept == 0 || kept < top_p * mass))
        kept += (double)paged__select_weight(c[n_kept++].logit, c[0].logit, scale);
    for (int32_t i = 0; i < n_kept; i++) {
        sum += (double)paged__select_weight(c[i].logit, c[0].logit, scale);
        if (sum > u * kept) return c[i].token;
    }
    return c[n_kept - 1].token;
}

static double mass_of(const candidate *c, int32_t n, float max, float scale) {
    double mass = 0;
    for (int32_t i = 0; i < n; i++) mass += (double)paged__select_weight(c[i].logit, max, scale);
    return mass;
}

/* Candidates, best first, of which the first ones have top_p of the mass; returns how many. These are mostly
 * few, so they are looked for among those near the largest first: what has the mass has the nucleus as its
 * beginning. (The margin is for the order of summation.) Tokens below (1 - top_p) / n_vocab of the mass have
 * less than 1 - top_p of it together, so no nucleus needs them. */
static int32_t nucleus(paged__sampler *s, const float *x, const paged_request *p, float max, float scale,
                       double mass) {
    const double t = (double)p->temperature, top_p = (double)p->top_p;
    const double lowest = (double)max + log((1.0 - top_p) / s->n_vocab * mass) * t;
    const float last = (float)PAGED_MIN(lowest, (double)max);
    float floor = last;
    int32_t n = 0;
    for (double depth = 4; n == 0 || floor > last; depth *= 2) {
        floor = PAGED_MAX((float)((double)max - depth * t), last);
        n = gather(s, x, floor);
        if (mass_of(s->candidates, n, max, scale) >= top_p * mass * (1 + 1e-9)) break;
    }
    qsort(s->candidates, (size_t)n, sizeof *s->candidates, by_logit);
    return n;
}

int32_t paged__sample(paged__sampler *s, const float *logits, const paged__choice *how) {
    const paged_request *p = how->params;
    const float *x = change(s, logits, how);
    paged__select_maxima(x, s->n_vocab, s->maxima);
    const int32_t best = best_of(s, x);
    if (best < 0) return 0;
    if (!(p->temperature >= GREEDY_BELOW) || p->top_p <= 0 || p->top_k == 1 || x[best] == -INFINITY)
        return best;

    const double inv_t = 1.0 / (double)p->temperature, u = uniform(how);
    const float max = x[best], scale = (float)(inv_t * LOG2_E);
    const bool cut_k = p->top_k > 0 && p->top_k < s->n_vocab, cut_p = p->top_p<1, cut_min = p->min_p> 0;
    double floor = cut_min ? (double)max + log((double)p->min_p) / inv_t : -INFINITY, mass = 0;
    if (cut_k) { /* what top-k leaves is short */
        const int32_t n = collect(s, x, (float)floor, p->top_k);
        return draw_of(s->candidates, n, scale, mass_of(s->candidates, n, max, scale), (double)p->top_p, u);
    }
    if (cut_min) {
        const int32_t n = collect(s, x, (float)floor, s->n_vocab);
        return draw_of(s->candidates, n, scale, mass_of(s->candidates, n, max, scale), (double)p->top_p, u);
    }
    paged__select_sums(x, s->n_vocab, max, scale, s->sums);
    if (!cut_p) return draw_any(s, x, max, scale, best, u);
    for (int32_t b = 0; b < s->n_blocks; b++) mass += s->sums[b];
    const int32_t n = nucleus(s, x, p, max, scale, mass);
    return draw_of(s->candidates, n, scale, mass, (double)p->top_p, u);
}

/* ---- log-probabilities ---- */

float paged__logprob(paged__sampler *s, const float *logits, int32_t token, int32_t *top1) {
    paged__select_maxima(logits, s->n_vocab, s->maxima);
    const int32_t best = PAGED_MAX(best_of(s, logits), 0);
    if (top1) *top1 = best;
    paged__select_sums(logits, s->n_vocab, logits[best], (float)LOG2_E, s->sums);
    double total = 0;
    for (int32_t b = 0; b < s->n_blocks; b++) total += s->sums[b];
    return (float)((double)logits[token] - (double)logits[best] - log(total));
}

float paged__top_logprobs(paged__sampler *s, const float *logits, int32_t token, int32_t k,
                          paged_top_logprob *top) {
    int32_t best;
    const float of_token = paged__logprob(s, logits, token, &best);
    const double log_total = (double)logits[token] - (double)of_token;
    const int32_t n = collect(s, logits, -INFINITY, PAGED_MIN(k, s->n_vocab));
    for (int32_t i = 0; i < k; i++)
        top[i] = i < n ? (paged_top_logprob){s->candidates[i].token,
                                             (float)((double)s->candidates[i].logit - log_total)}
                       : (paged_top_logprob){-1, -INFINITY};
    return of_token;
}
