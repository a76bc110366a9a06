/* match.c: gives a new sequence what is cached of its tokens.
 *
 * First it finds out what there is, without changing anything but the sequence's own table; then it takes
 * memory, references and the block for the copy, in an order that can be undone. */
#include "mem/mem.h"

/* What was found. */
typedef struct finding {
    int32_t n_full;   /* nodes, written to the table of group 0 */
    int32_t tail;     /* node with the longest common piece after them; -1: none */
    int32_t n_common; /* tokens of it */
    paged_miss why;
} finding;

/* Why nothing more than n_found tokens was found. The first block of what is missing has that hash, unless
 * the prompt ends in it. */
static paged_miss why_missed(const paged_cache *cache, const int32_t *tokens, int32_t n_tokens,
                             int32_t n_found, const uint64_t *hash) {
    if (n_tokens < 2) return PAGED_MISS_TOO_SHORT;
    if (n_found == n_tokens - 1) return PAGED_MISS_NONE;
    if (hash && cache->evicted_tags[hash[0] & (cache->n_buckets - 1)] == ((uint32_t)hash[1] | 1))
        return PAGED_MISS_EVICTED;
    if (n_found == 0 && n_tokens >= cache->block_size &&
        cache->first_counts[paged__prefix_first(cache, tokens)] > 0)
        return PAGED_MISS_NAMESPACE;
    return PAGED_MISS_NO_MATCH;
}

static finding look_up(const paged_cache *cache, const paged__seq *seq, int32_t space, const int32_t *tokens,
                       int32_t n_tokens) {
    finding f = {.tail = -1};
    int32_t *table = paged__seq_table(cache, 0, seq), parent = -2 - space, pos = 0, limit = n_tokens - 1;
    uint64_t hash[2];
    bool missed = false;
    while (pos + cache->block_size <= n_tokens && !missed) {
        int32_t node = paged__prefix_find(cache, parent, tokens + pos, hash);
        missed = node < 0;
        if (missed || pos + cache->block_size > limit) break; /* the last token is always computed */
        table[f.n_full++] = parent = node;
        pos += cache->block_size;
    }
    if (pos < limit)
        f.tail = paged__prefix_best(cache, parent, tokens + pos, PAGED_MIN(limit - pos, cache->block_size),
                                    &f.n_common);
    f.why = why_missed(cache, tokens, n_tokens, pos + f.n_common, missed ? hash : NULL);
    return f;
}

static void hold(paged_cache *cache, int32_t node) {
    for (int32_t g = 0; g < cache->n_groups; g++)
        paged__block_ref(cache, g, paged__node_block(cache, node, g));
}

static void let_go(paged_cache *cache, int32_t node) {
    for (int32_t g = 0; g < cache->n_groups; g++)
        PAGED_ASSERT(!paged__block_unref(cache, g, paged__node_block(cache, node, g)));
}

/* Takes a block of each group for entry idx and copies the node into it. Errors: of the arena; then nothing
 * has changed. */
static paged_status copy_tail(paged_cache *cache, const paged__seq *seq, int32_t idx, int32_t node) {
    paged_status status = PAGED_OK;
    int32_t g = 0, taken = -1;
    for (; g < cache->n_groups && status == PAGED_OK; g++) {
        size_t block_bytes = cache->groups[g].block_bytes;
        taken = -1;
        status = paged__block_take(cache, g, &taken);
        if (status == PAGED_OK) {
            paged__seq_table(cache, g, seq)[idx] = taken;
            status = cache->arena.copy(cache->arena.ctx, (size_t)taken * block_bytes,
                                       (size_t)paged__node_block(cache, node, g) * block_bytes, block_bytes);
        }
    }
    if (status == PAGED_OK) {
        cache->n_allocs += (uint64_t)cache->n_groups;
        cache->n_copies += (uint64_t)cache->n_groups;
        return PAGED_OK;
    }
    for (g--; g >= 0; g--) {
        int32_t *entry = &paged__seq_table(cache, g, seq)[idx];
        if (*entry >= 0) paged__block_unref(cache, g, *entry);
        *entry = -1;
    }
    return status;
}

/* References to everything that was found, and the copy. Without a block for the copy the match ends before
 * it.
 */
static paged_status take(paged_cache *cache, const paged__seq *seq, finding *f) {
    const int32_t *table = paged__seq_table(cache, 0, seq);
    int32_t need[PAGED_GROUPS_MAX];
    paged_status status = PAGED_OK;
    for (int32_t i = 0; i < f->n_full; i++) hold(cache, table[i]);
    if (f->tail >= 0) {
        for (int32_t g = 0; g < cache->n_groups; g++) need[g] = 1;
        hold(cache, f->tail); /* so that it is not what is evicted for its copy */
        if (paged__room_possible(cache, need) && paged__make_room(cache, need)) {
            status = copy_tail(cache, seq, f->n_full, f->tail);
            let_go(cache, f->tail);
        } else {
            let_go(cache, f->tail);
            f->tail = -1;
            f->n_common = 0;
            f->why = PAGED_MISS_NO_BLOCK;
        }
    }
    for (int32_t i = f->n_full - 1; i >= 0 && status != PAGED_OK; i--) let_go(cache, table[i]);
    return status;
}

/* What was taken becomes part of the sequence. Cannot fail. */
static void commit(paged_cache *cache, paged__seq *seq, const finding *f, const int32_t *tokens) {
    for (int32_t g = 1; g < cache->n_groups; g++) {
        for (int32_t i = 0; i < f->n_full; i++)
            paged__seq_table(cache, g, seq)[i] =
                paged__node_block(cache, paged__seq_table(cache, 0, seq)[i], g);
    }
    seq->len = f->n_full * cache->block_size + f->n_common;
    seq->n_entries = f->n_full + (f->n_common > 0);
    if (seq->len) memcpy(seq->tokens, tokens, (size_t)seq->len * sizeof *tokens);
    cache->n_tokens += seq->len;
}

paged_status paged_seq_match(paged_cache *cache, paged_seq handle, const paged_namespace *names,
                             const int32_t *tokens, int32_t n_tokens, paged_match *out) {
    paged__seq *seq = paged__seq_find(cache, handle);
    if (!seq) return PAGED_ERR_STALE;
    if (seq->len || seq->reserved || seq->space >= 0 || n_tokens < 0 || (n_tokens > 0 && !tokens))
        return PAGED_ERR_INVALID_ARG;
    if (n_tokens > cache->max_seq_tokens) return PAGED_ERR_TOO_LONG;
    int32_t space;
    paged_status status = paged__space_open(cache, names, &space);
    if (status != PAGED_OK) return status;
    finding f = look_up(cache, seq, space, tokens, n_tokens);
    status = take(cache, seq, &f);
    if (status != PAGED_OK) {
        int32_t *table = paged__seq_table(cache, 0, seq);
        for (int32_t i = 0; i < f.n_full; i++) table[i] = -1;
        paged__settle_limit(cache);
        paged__space_unref(cache, space);
        return status;
    }
    commit(cache, seq, &f, tokens);
    seq->space = space;
    paged__settle_limit(cache);
    cache->n_queries++;
    cache->n_query_tokens += (uint64_t)n_tokens;
    cache->n_hit_tokens += (uint64_t)seq->len;
    cache->n_misses[f.why]++;
    if (out) *out = (paged_match){.n_matched = seq->len, .n_copied = f.n_common, .why = f.why};
    return PAGED_OK;
}
