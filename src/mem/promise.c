/* promise.c: prompts that arrive together and begin alike. One computes, the others wait for it and hold no
 * blocks.
 *
 * A promise is the tokens that a sequence is going to have; they lie in its tokens array, before they are
 * committed. It either produces (producer -1) or waits for the row of another one, until that one has
 * committed all that both have in common. If the producer goes, or does something else than it promised, its
 * waiters look for another one in the order in which they came; the first of them finds none and produces.
 *
 * So a waiter's producer never waits itself, and it still has tokens to compute that the waiter wants. */
#include "mem/mem.h"

static int32_t common(const int32_t *a, int32_t n_a, const int32_t *b, int32_t n_b) {
    int32_t i = 0, n = PAGED_MIN(n_a, n_b);
    while (i < n && a[i] == b[i]) i++;
    return i;
}

/* The row whose promise has most in common with this one's, and is worth waiting for: it will give at least a
 * block more than what is cached. -1: none. */
static int32_t find_producer(const paged_cache *cache, int32_t row, int32_t *n_common) {
    const paged__promise *own = &cache->promises[row];
    int32_t best = -1;
    if (cache->contiguous) return -1; /* what the other one computes is of no use here */
    *n_common =
        paged__match_reach(cache, own->space, cache->seqs[row].tokens, own->n_tokens) + cache->block_size - 1;
    for (int32_t r = 0; r < cache->max_seqs; r++) {
        const paged__promise *other = &cache->promises[r];
        if (r == row || !other->n_tokens || other->producer >= 0 || other->space != own->space) continue;
        int32_t n = common(cache->seqs[r].tokens, other->n_tokens, cache->seqs[row].tokens,
                           own->n_tokens - 1); /* the last token is always computed */
        if (n <= *n_common || n <= cache->seqs[r].len) continue;
        *n_common = n;
        best = r;
    }
    return best;
}

/* Waits for the best producer there is, or produces. */
static void settle(paged_cache *cache, int32_t row) {
    paged__promise *p = &cache->promises[row];
    int32_t n_common, producer = find_producer(cache, row, &n_common);
    p->producer = producer;
    p->n_common = producer >= 0 ? n_common : 0;
    if (producer >= 0) cache->promises[producer].n_waiters++;
}

static void stop_waiting(paged_cache *cache, int32_t row) {
    paged__promise *p = &cache->promises[row];
    if (p->producer < 0) return;
    cache->promises[p->producer].n_waiters--;
    p->producer = -1;
    p->n_common = 0;
}

/* The oldest that waits for this row; -1: none. */
static int32_t oldest_waiter(const paged_cache *cache, int32_t producer) {
    int32_t oldest = -1;
    for (int32_t r = 0; r < cache->max_seqs && cache->promises[producer].n_waiters > 0; r++) {
        const paged__promise *p = &cache->promises[r];
        if (p->n_tokens && p->producer == producer &&
            (oldest < 0 || p->ticket < cache->promises[oldest].ticket))
            oldest = r;
    }
    return oldest;
}

void paged__promise_end(paged_cache *cache, int32_t row) {
    paged__promise *p = &cache->promises[row];
    if (!p->n_tokens) return;
    stop_waiting(cache, row);
    p->n_tokens = 0; /* nobody finds it any more */
    for (int32_t waiter; (waiter = oldest_waiter(cache, row)) >= 0;) {
        stop_waiting(cache, waiter);
        settle(cache, waiter);
        cache->n_handovers += cache->promises[waiter].producer < 0;
    }
    paged__space_unref(cache, p->space);
    *p = (paged__promise){.producer = -1};
}

void paged__promise_check(paged_cache *cache, int32_t row, int32_t first, const int32_t *tokens,
                          int32_t n_tokens) {
    const paged__promise *p = &cache->promises[row];
    int32_t n = PAGED_MIN(n_tokens, p->n_tokens - first);
    if (n > 0 && memcmp(cache->seqs[row].tokens + first, tokens, (size_t)n * sizeof *tokens) != 0)
        paged__promise_end(cache, row);
    else
        stop_waiting(cache, row); /* it goes on by itself */
}

void paged__promise_kept(paged_cache *cache, int32_t row) {
    int32_t n_left = cache->promises[row].n_waiters;
    for (int32_t r = 0; r < cache->max_seqs && n_left > 0; r++) {
        const paged__promise *p = &cache->promises[r];
        if (!p->n_tokens || p->producer != row) continue;
        n_left--;
        if (cache->seqs[row].len >= p->n_common) stop_waiting(cache, r);
    }
}

paged_status paged_seq_promise(paged_cache *cache, paged_seq handle, const paged_namespace *names,
                               const int32_t *tokens, int32_t n_tokens, bool *waits) {
    paged__seq *seq = paged__seq_find(cache, handle);
    if (!seq) return PAGED_ERR_STALE;
    int32_t row = (int32_t)(seq - cache->seqs), space;
    if (seq->len || seq->reserved || seq->space >= 0 || cache->promises[row].n_tokens || n_tokens < 1 ||
        !tokens || !waits)
        return PAGED_ERR_INVALID_ARG;
    if (n_tokens > cache->max_seq_tokens) return PAGED_ERR_TOO_LONG;
    paged_status status = paged__space_open(cache, names, &space);
    if (status != PAGED_OK) return status;
    memcpy(seq->tokens, tokens, (size_t)n_tokens * sizeof *tokens);
    cache->promises[row] = (paged__promise){
        .n_tokens = n_tokens, .space = space, .producer = -1, .ticket = ++cache->next_ticket};
    settle(cache, row);
    *waits = cache->promises[row].producer >= 0;
    cache->n_waits += *waits;
    return PAGED_OK;
}

int32_t paged_seq_reach(const paged_cache *cache, paged_seq handle) {
    const paged__seq *seq = paged__seq_find(cache, handle);
    const paged__promise *p = seq ? &cache->promises[seq - cache->seqs] : NULL;
    if (!p || !p->n_tokens) return -1;
    return paged__match_reach(cache, p->space, seq->tokens, p->n_tokens);
}

int32_t paged_seq_waits(const paged_cache *cache, paged_seq handle) {
    const paged__seq *seq = paged__seq_find(cache, handle);
    return seq ? cache->promises[seq - cache->seqs].producer >= 0 : -1;
}
