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
 * What is kept is a set: of equal logits those with the lowest ids. The draw goes through it by id, so only
 * the border of the set needs an order, which a histogram of logits finds. Most of a vocabulary is never
 * looked at token by token: see ops/select.h.
 */
#include <math.h>
#include <stdlib.h>

#include "engine/engine.h"
#include "ops/select.h"

static const float GREEDY_BELOW = 1e-5f;
static const float BANNED = -100; /* a bias as low as this */
static const double LOG2_E = 1.44269504088896340736;

enum { N_BINS = 256 };

struct paged__sampler {
    int32_t n_vocab, n_blocks;
    int32_t *eog; /* [n_eog] tokens that end a generation */
    int32_t n_eog;
    float *changed;  /* [n_vocab] the row after bias and penalties */
    float *maxima;   /* [n_blocks] */
    double *sums;    /* [n_blocks] */
    int32_t *counts; /* [n_vocab] zero between calls */

    /* Candidates, by id; those at the border of a cut, by rank. */
    int32_t n;
    float *logits;       /* [n_vocab + PAGED__SELECT_SLACK] */
    int32_t *tokens;     /* the same */
    float *weights;      /* [n_vocab] */
    int32_t *border;     /* [n_vocab] places among the candidates */
    double bins[N_BINS]; /* what the candidates of a bin weigh */
    int32_t in_bin[N_BINS];
};

paged__sampler *paged__sampler_create(int32_t n_vocab, const paged_tokenizer *tok) {
    paged__sampler *s = paged__calloc(1, sizeof *s);
    if (!s) return NULL;
    s->n_vocab = n_vocab;
    s->n_blocks = paged__select_blocks(n_vocab);
    for (int32_t i = 0; tok && i < n_vocab; i++) s->n_eog += paged_token_is_eog(tok, i);
    s->eog = paged__alloc((size_t)s->n_eog, sizeof *s->eog);
    const size_t room = (size_t)n_vocab + PAGED__SELECT_SLACK;
    s->logits = paged__alloc(room, sizeof *s->logits);
    s->tokens = paged__alloc(room, sizeof *s->tokens);
    s->weights = paged__alloc((size_t)n_vocab, sizeof *s->weights);
    s->border = paged__alloc((size_t)n_vocab, sizeof *s->border);
    s->changed = paged__alloc((size_t)n_vocab, sizeof *s->changed);
    s->maxima = paged__alloc((size_t)s->n_blocks, sizeof *s->maxima);
    s->sums = paged__alloc((size_t)s->n_blocks, sizeof *s->sums);
    s->counts = paged__calloc((size_t)n_vocab, sizeof *s->counts);
    if (!s->eog || !s->logits || !s->tokens || !s->weights || !s->border || !s->changed || !s->maxima ||
        !s->sums || !s->counts) {
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
    paged__free(s->logits);
    paged__free(s->tokens);
    paged__free(s->weights);
    paged__free(s->border);
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

/* All of at least `floor` are the candidates, by id. */
static void gather(paged__sampler *s, const float *x, float floor) {
    s->n = 0;
    for (int32_t b = 0; b < s->n_blocks; b++) {
        if (!(s->maxima[b] >= floor)) continue;
        const int32_t begin = b * PAGED__SELECT_BLOCK,
                      len = PAGED_MIN(PAGED__SELECT_BLOCK, s->n_vocab - begin);
        const int32_t n = paged__select_gather(x + begin, len, floor, s->logits + s->n, s->tokens + s->n);
        for (int32_t i = s->n; i < s->n + n; i++) s->tokens[i] += begin;
        s->n += n;
    }
}

/* What the candidates weigh. */
static double mass_of(paged__sampler *s, float max, float scale) {
    double mass = 0;
    paged__select_sums(s->logits, s->n, max, scale, s->sums);
    for (int32_t b = 0; b < paged__select_blocks(s->n); b++) mass += s->sums[b];
    return mass;
}

/* Those near the largest, in ever wider steps down to `lowest`, until there are k and they weigh `mass`. What
 * has the k best has the mass of the best, and the other way round, so that none of the cuts lacks any. */
static void gather_enough(paged__sampler *s, const float *x, float max, float scale, double lowest, int32_t k,
                          double mass) {
    const float last = (float)PAGED_MIN(lowest, (double)max);
    for (double bits = 6;; bits *= 2) { /* of weight; what is 126 below the best one has none */
        const float floor = bits > 126 ? last : PAGED_MAX((float)((double)max - bits / (double)scale), last);
        gather(s, x, floor);
        if (floor <= last || (s->n >= k && (mass == 0 || mass_of(s, max, scale) >= mass))) return;
    }
}

/* The bin of a logit: the better the lower. The same difference of floats gives the same bin, so a bin has
 * all of its equals. */
static int32_t bin_of(float logit, float max, float per_unit) {
    const float at = (max - logit) * per_unit;
    return at < N_BINS - 1 ? (int32_t)at : N_BINS - 1; /* also what is infinitely far */
}

static float widest_bins(const paged__sampler *s, float max) {
    float lowest = max;
    for (int32_t i = 0; i < s->n; i++)
        if (s->logits[i] < lowest) lowest = s->logits[i];
    const float per_unit = (N_BINS - 1) / (max - lowest);
    return per_unit > 0 && isfinite(per_unit) ? per_unit : 1;
}

/* Order of candidates i and j by rank: the better first, of equals the lower id. */
static bool ranks_before(const paged__sampler *s, int32_t i, int32_t j) {
    return s->logits[i] != s->logits[j] ? s->logits[i] > s->logits[j] : i < j;
}

/* Heap sort of places by rank, which needs no memory. */
static void sift_down(const paged__sampler *s, int32_t *heap, int32_t n, int32_t i) {
    for (;;) {
        int32_t last = i;
        for (int32_t c = 2 * i + 1; c <= 2 * i + 2 && c < n; c++)
            if (ranks_before(s, heap[last], heap[c])) last = c;
        if (last == i) return;
        const int32_t t = heap[i];
        heap[i] = heap[last];
        heap[last] = t;
        i = last;
    }
}

static void sort_places(const paged__sampler *s, int32_t *places, int32_t n) {
    int32_t n_sorted = 1; /* places of equals are */
    while (n_sorted < n && ranks_before(s, places[n_sorted - 1], places[n_sorted])) n_sorted++;
    if (n_sorted >= n) return;
    for (int32_t i = n / 2 - 1; i >= 0; i--) sift_down(s, places, n, i);
    for (int32_t end = n - 1; end > 0; end--) {
        const int32_t t = places[0];
        places[0] = places[end];
        places[end] = t;
        sift_down(s, places, end, 0);
    }
}

/* The last candidate, by rank, of the fewest best ones that are k or weigh `mass`. */
static int32_t find_last(paged__sampler *s, float max, int32_t k, double mass) {
    const float per_unit = widest_bins(s, max);
    memset(s->bins, 0, sizeof s->bins);
    memset(s->in_bin, 0, sizeof s->in_bin);
    for (int32_t i = 0; i < s->n; i++) {
        const int32_t bin = bin_of(s->logits[i], max, per_unit);
        s->bins[bin] += (double)s->weights[i];
        s->in_bin[bin]++;
    }
    int32_t bin = 0, n_kept = 0, n_border = 0, filled = 0;
    double kept = 0;
    for (; bin < N_BINS; bin++) {
        if (s->in_bin[bin] > 0) filled = bin;
        if (n_kept + s->in_bin[bin] >= k || kept + s->bins[bin] >= mass) break;
        n_kept += s->in_bin[bin];
        kept += s->bins[bin];
    }
    if (bin == N_BINS) { /* all of them */
        bin = filled;
        k = INT32_MAX;
        mass = INFINITY;
    }
    for (int32_t i = 0; i < s->n; i++)
        if (bin_of(s->logits[i], max, per_unit) == bin) s->border[n_border++] = i;
    sort_places(s, s->border, n_border);
    int32_t i = 0;
    for (; i < n_border - 1; i++) {
        kept += (double)s->weights[s->border[i]];
        if (++n_kept >= k || kept >= mass) break;
    }
    return s->border[i];
}

/* Only the fewest best candidates that are k or weigh `mass` stay. Returns what they weigh. */
static double keep_best(paged__sampler *s, float max, int32_t k, double mass) {
    const int32_t last = find_last(s, max, k, mass);
    const float lowest = s->logits[last];
    double kept = 0;
    int32_t n = 0;
    for (int32_t i = 0; i < s->n; i++) {
        if (!(s->logits[i] > lowest || (s->logits[i] == lowest && i <= last))) continue;
        s->logits[n] = s->logits[i];
        s->tokens[n] = s->tokens[i];
        kept += (double)(s->weights[n++] = s->weights[i]);
    }
    s->n = n;
    return kept;
}

/* ---- drawing ---- */

/* [0, 1) from seed, choice and position, 53 bits. */
static double uniform(const paged__choice *how) {
    const uint64_t stream = paged__mix(how->params->seed) + ((uint64_t)(uint32_t)how->choice << 32);
    return (double)(paged__mix(stream + (uint64_t)(uint32_t)(how->n_tokens + how->n_dropped)) >> 11) *
           0x1p-53;
}

/* With which of n weights the sum goes beyond `at`. Rounding may leave `at` just beyond the last one. */
static int32_t reach(const float *weights, int32_t n, double at) {
    double sum = 0;
    int32_t found = 0;
    for (int32_t i = 0; i < n; i++) {
        if (weights[i] > 0) found = i;
        sum += (double)weights[i];
        if (sum > at) break;
    }
    return found;
}

/* From the whole vocabulary, whose sums are there: the block first, then the token in it. */
static int32_t draw_any(paged__sampler *s, const float *x, float max, float scale, double at) {
    int32_t block = 0;
    double before = 0;
    while (block < s->n_blocks - 1 && before + s->sums[block] <= at) before += s->sums[block++];
    while (block > 0 && s->sums[block] == 0) before -= s->sums[--block];
    const int32_t begin = block * PAGED__SELECT_BLOCK, n = PAGED_MIN(PAGED__SELECT_BLOCK, s->n_vocab - begin);
    paged__select_weights(x + begin, n, max, scale, s->weights);
    return begin + reach(s->weights, n, at - before);
}

static double total_of(const paged__sampler *s) {
    double total = 0;
    for (int32_t b = 0; b < s->n_blocks; b++) total += s->sums[b];
    return total;
}

/* The candidates of a row after steps 4 to 6; false: the whole vocabulary is left, and its sums are there. */
static bool cut(paged__sampler *s, const float *x, const paged_request *p, float max, float scale) {
    const double t = (double)p->temperature, top_p = (double)p->top_p;
    const bool cut_k = p->top_k > 0 && p->top_k < s->n_vocab, cut_p = p->top_p<1, cut_min = p->min_p> 0;
    const double least = cut_min ? (double)max + log((double)p->min_p) * t : -INFINITY;
    double mass = 0;
    if (cut_k) {
        gather_enough(s, x, max, scale, least, p->top_k, 0);
    } else if (cut_min) {
        gather(s, x, (float)least);
    } else {
        paged__select_sums(x, s->n_vocab, max, scale, s->sums);
        if (!cut_p) return false;
        mass = total_of(s);
        /* Tokens below (1 - top_p) / n_vocab of the mass have less than 1 - top_p of it together, so no
         * nucleus needs them. The factor is for the order of summation. */
        gather_enough(s, x, max, scale, (double)max + log((1.0 - top_p) / s->n_vocab * mass) * t, 0,
                      top_p * mass * (1 + 1e-6));
    }
    paged__select_weights(s->logits, s->n, max, scale, s->weights);
    if (cut_k) mass = keep_best(s, max, p->top_k, INFINITY);
    if (cut_p) keep_best(s, max, INT32_MAX, top_p * (mass > 0 ? mass : mass_of(s, max, scale)));
    return true;
}

/* x: the row after changes, whose maxima are there, and its best token. */
static int32_t sample(paged__sampler *s, const float *x, int32_t best, const paged__choice *how) {
    const paged_request *p = how->params;
    if (best < 0) return 0;
    if (!(p->temperature >= GREEDY_BELOW) || p->top_p <= 0 || p->top_k == 1 || x[best] == -INFINITY)
        return best;
    const float scale = (float)(LOG2_E / (double)p->temperature);
    const double u = uniform(how);
    if (!cut(s, x, p, x[best], scale)) return draw_any(s, x, x[best], scale, u * total_of(s));
    double kept = 0;
    for (int32_t i = 0; i < s->n; i++) kept += (double)s->weights[i];
    return s->tokens[reach(s->weights, s->n, u * kept)];
}

/* The best token of a row whose maxima this takes; -1: all are NaN. */
static int32_t look_at(paged__sampler *s, const float *x) {
    paged__select_maxima(x, s->n_vocab, s->maxima);
    return best_of(s, x);
}

int32_t paged__sample(paged__sampler *s, const float *logits, const paged__choice *how) {
    const float *x = change(s, logits, how);
    return sample(s, x, look_at(s, x), how);
}

/* ---- log-probabilities ---- */

static float logprob(paged__sampler *s, const float *logits, int32_t best, int32_t token) {
    paged__select_sums(logits, s->n_vocab, logits[best], (float)LOG2_E, s->sums);
    return (float)((double)logits[token] - (double)logits[best] - log(total_of(s)));
}

/* The maxima of the row are there. */
static float top_logprobs(paged__sampler *s, const float *logits, int32_t best, int32_t token, int32_t k,
                          paged_top_logprob *top) {
    const float of_token = logprob(s, logits, best, token), max = logits[best];
    const double log_total = (double)logits[token] - (double)of_token;
    gather_enough(s, logits, max, (float)LOG2_E, -INFINITY, k, 0);
    paged__select_weights(s->logits, s->n, max, (float)LOG2_E, s->weights);
    if (s->n > k) keep_best(s, max, k, INFINITY);
    for (int32_t i = 0; i < s->n; i++) s->border[i] = i;
    sort_places(s, s->border, s->n);
    for (int32_t i = 0; i < k; i++)
        top[i] = i < s->n ? (paged_top_logprob){s->tokens[s->border[i]],
                                                (float)((double)s->logits[s->border[i]] - log_total)}
                          : (paged_top_logprob){-1, -INFINITY};
    return of_token;
}

float paged__logprob(paged__sampler *s, const float *logits, int32_t token, int32_t *top1) {
    const int32_t best = PAGED_MAX(look_at(s, logits), 0);
    if (top1) *top1 = best;
    return logprob(s, logits, best, token);
}

int32_t paged__sample_scored(paged__sampler *s, const float *logits, const paged__choice *how, float *score,
                             paged_top_logprob *top) {
    const float *x = change(s, logits, how);
    const int32_t first = look_at(s, x), token = sample(s, x, first, how), k = how->params->n_top_logprobs;
    /* Scores are of the row before changes; mostly there are none. */
    const int32_t best = PAGED_MAX(x == logits ? first : look_at(s, logits), 0);
    *score = k ? top_logprobs(s, logits, best, token, k, top) : logprob(s, logits, best, token);
    return token;
}
