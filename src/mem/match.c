/* match.c: gives a new sequence what is cached of its tokens.
 *
 * First it finds out what there is, without changing anything but the sequence's own table; then it takes
 * memory, references and the block for the copy, in an order that can be undone. */
#include "mem/mem.h"

/* What was found. */
typedef struct finding {
    paged__walk shared; /* whole blocks, up to where all groups have what the next token sees */
    paged__walk reach;  /* as far as the tokens agree; where the tail hangs */
    int32_t tail;       /* node with the longest common piece after that; -1: none, or it is of no use */
    int32_t row;        /* or the sequence with a promise that has a longer one; -1: none */
    int32_t n_common;   /* tokens of it */
    paged_miss why;
} finding;

/* ---- a walk down the index ---- */

paged__walk paged__walk_start(const paged_cache *cache, int32_t space) {
    (void)cache;
    return (paged__walk){.node = -2 - space};
}

void paged__walk_add(const paged_cache *cache, paged__walk *walk, int32_t node) {
    walk->node = node;
    walk->n_full++;
    for (int32_t g = 0; g < cache->n_groups; g++) {
        if (!cache->groups[g].config.window) continue;
        walk->runs[g] = paged__node_block(cache, node, g) >= 0 ? walk->runs[g] + 1 : 0;
    }
}

bool paged__walk_covers(const paged_cache *cache, const paged__walk *walk, int32_t pos) {
    for (int32_t g = 0; g < cache->n_groups; g++) {
        if (!cache->groups[g].config.window) continue;
        if (walk->n_full - paged__window_first(cache, g, pos) > walk->runs[g]) return false;
    }
    return true;
}

/* The same with the block after them: of that node, or of a sequence that has it in all groups (-1). */
static bool covers_with(const paged_cache *cache, const paged__walk *walk, int32_t tail, int32_t pos) {
    paged__walk longer = *walk;
    if (tail >= 0)
        paged__walk_add(cache, &longer, tail);
    else
        longer.n_full++;
    for (int32_t g = 0; g < cache->n_groups && tail < 0; g++) longer.runs[g]++;
    return paged__walk_covers(cache, &longer, pos);
}

/* ---- what there is ---- */

const char *paged_miss_name(paged_miss miss) {
    static const char *const names[PAGED_MISS_KINDS] = {
        [PAGED_MISS_NONE] = "none",
        [PAGED_MISS_NO_MATCH] = "no-match",
        [PAGED_MISS_EVICTED] = "evicted",
        [PAGED_MISS_NAMESPACE] = "namespace",
        [PAGED_MISS_TOO_SHORT] = "too-short",
        [PAGED_MISS_NO_BLOCK] = "no-block",
        [PAGED_MISS_OFF] = "off",
    };
    return miss >= 0 && miss < PAGED_MISS_KINDS ? names[miss] : "unknown";
}

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

/* The partly filled block of a sequence that lives is in no index, but who waited for it may have it. */
static void look_at_promises(const paged_cache *cache, int32_t space, const int32_t *tokens, int32_t pos,
                             int32_t n_max, finding *f) {
    for (int32_t r = 0; r < cache->max_seqs; r++) {
        const paged__seq *seq = &cache->seqs[r];
        if (!cache->promises[r].n_tokens || seq->space != space || seq->len <= pos + f->n_common ||
            seq->len >= pos + cache->block_size ||
            memcmp(seq->tokens, tokens, (size_t)pos * sizeof *tokens) != 0)
            continue;
        int32_t k = 0, n = PAGED_MIN(seq->len - pos, n_max);
        while (k < n && seq->tokens[pos + k] == tokens[pos + k]) k++;
        if (k <= f->n_common) continue;
        f->n_common = k;
        f->row = r;
    }
}

static finding look_up(const paged_cache *cache, int32_t space, const int32_t *tokens, int32_t n_tokens) {
    const paged__walk start = paged__walk_start(cache, space);
    finding f = {.shared = start, .reach = start, .tail = -1, .row = -1};
    int32_t pos = 0, limit = n_tokens - 1; /* the last token is always computed */
    uint64_t hash[2];
    bool missed = false, incomplete = false;
    while (pos + cache->block_size <= n_tokens && !missed) {
        int32_t node = paged__prefix_find(cache, f.reach.node, tokens + pos, hash);
        missed = node < 0;
        if (missed || pos + cache->block_size > limit) break;
        paged__walk_add(cache, &f.reach, node);
        pos += cache->block_size;
        if (paged__walk_covers(cache, &f.reach, pos)) f.shared = f.reach;
    }
    int32_t n_max = PAGED_MIN(limit - pos, cache->block_size);
    if (n_max > 0) {
        f.tail = paged__prefix_best(cache, f.reach.node, tokens + pos, n_max, &f.n_common);
        if (f.tail >= 0) incomplete = !covers_with(cache, &f.reach, f.tail, pos + f.n_common);
        if (incomplete) f.tail = -1;
        if (f.tail < 0) f.n_common = 0;
        look_at_promises(cache, space, tokens, pos, n_max, &f);
        if (f.row >= 0 && !covers_with(cache, &f.reach, -1, pos + f.n_common)) f.row = -1;
        if (f.row >= 0) f.tail = -1;
    }
    if (f.tail < 0 && f.row < 0) f.n_common = 0;
    f.why = why_missed(cache, tokens, n_tokens, pos + f.n_common, missed ? hash : NULL);
    /* The index knows more of the tokens, but a window there is not complete any more. */
    if (f.n_common == 0 && (incomplete || f.shared.n_full < f.reach.n_full)) f.why = PAGED_MISS_EVICTED;
    return f;
}

int32_t paged__match_reach(const paged_cache *cache, int32_t space, const int32_t *tokens, int32_t n_tokens) {
    finding f = look_up(cache, space, tokens, n_tokens);
    return f.n_common ? f.reach.n_full * cache->block_size + f.n_common : f.shared.n_full * cache->block_size;
}

/* ---- taking it ---- */

/* References to the blocks of a walk that the token at position pos sees, entered into the sequence's tables;
 * the sequence stands on its end. */
static void share(paged_cache *cache, paged__seq *seq, const paged__walk *walk, int32_t pos) {
    for (int32_t g = 0; g < cache->n_groups; g++) {
        int32_t *table = paged__seq_table(cache, g, seq), node = walk->node;
        int32_t first = paged__window_first(cache, g, pos);
        for (int32_t i = walk->n_full - 1; i >= first; i--, node = cache->nodes[node].parent) {
            table[i] = paged__node_block(cache, node, g);
            paged__block_ref(cache, g, table[i]);
        }
    }
    seq->tip = walk->node;
    paged__node_enter(cache, walk->node);
}

static void unshare(paged_cache *cache, paged__seq *seq, const paged__walk *walk, int32_t pos) {
    for (int32_t g = 0; g < cache->n_groups; g++) {
        int32_t *table = paged__seq_table(cache, g, seq), first = paged__window_first(cache, g, pos);
        for (int32_t i = walk->n_full - 1; i >= first; i--) {
            PAGED_ASSERT(!paged__block_unref(cache, g, table[i]));
            table[i] = -1;
        }
    }
    seq->tip = -1;
    paged__node_leave(cache, walk->node);
}

/* So that the tail is not what is evicted for its copy. */
static void hold(paged_cache *cache, int32_t node) {
    for (int32_t g = 0; g < cache->n_groups && node >= 0; g++)
        paged__block_ref(cache, g, paged__node_block(cache, node, g));
}

static void let_go(paged_cache *cache, int32_t node) {
    for (int32_t g = 0; g < cache->n_groups && node >= 0; g++)
        PAGED_ASSERT(!paged__block_unref(cache, g, paged__node_block(cache, node, g)));
}

/* The tiles or the block that the tail was found in, to new tiles. */
static paged_status copy_to_tiles(paged_cache *cache, int32_t group, const finding *f, int32_t from,
                                  const int32_t *tiles) {
    paged_status status = PAGED_OK;
    if (from >= 0) return paged__tail_from_block(cache, group, tiles, from, f->n_common);
    const int32_t *theirs = paged__seq_tiles(cache, group, &cache->seqs[f->row]);
    for (int32_t i = 0; i * PAGED_TILE < f->n_common && status == PAGED_OK; i++)
        status = paged__tile_copy(cache, group, tiles[i], theirs[i]);
    return status;
}

/* Takes a block of a group for entry idx, or the tiles of a tail, and copies what was found. Errors: of the
 * arena; then nothing has changed. */
static paged_status copy_into(paged_cache *cache, const paged__seq *seq, int32_t group, int32_t idx,
                              const finding *f) {
    size_t block_bytes = cache->groups[group].block_bytes;
    int32_t block, n_tiles = paged__ceil_div(f->n_common, PAGED_TILE);
    int32_t from = f->row >= 0 ? paged__seq_table(cache, group, &cache->seqs[f->row])[idx]
                               : paged__node_block(cache, f->tail, group);
    paged_status status;
    if (cache->n_tiles) {
        int32_t *tiles = paged__seq_tiles(cache, group, seq);
        status = paged__tiles_take(cache, group, n_tiles, tiles);
        if (status == PAGED_OK) {
            status = copy_to_tiles(cache, group, f, from, tiles);
            if (status != PAGED_OK) paged__tiles_untake(cache, group, n_tiles, tiles);
        }
        for (int32_t i = 0; i < n_tiles; i++) {
            if (status == PAGED_OK)
                paged__tile_name(cache, group, (int32_t)(seq - cache->seqs), &tiles[i], tiles[i]);
            else
                tiles[i] = -1;
        }
        return status;
    }
    status = paged__block_take(cache, group, &block);
    if (status != PAGED_OK) return status;
    status = cache->arena.copy(cache->arena.ctx, (size_t)block * block_bytes, (size_t)from * block_bytes,
                               block_bytes);
    if (status != PAGED_OK)
        paged__block_unref(cache, group, block);
    else
        paged__seq_table(cache, group, seq)[idx] = block;
    return status;
}

static void undo_copy(paged_cache *cache, const paged__seq *seq, int32_t group, int32_t idx,
                      int32_t n_tokens) {
    int32_t *entry = &paged__seq_table(cache, group, seq)[idx];
    if (cache->n_tiles) {
        int32_t *tiles = paged__seq_tiles(cache, group, seq), n_tiles = paged__ceil_div(n_tokens, PAGED_TILE);
        paged__tiles_untake(cache, group, n_tiles, tiles);
        for (int32_t i = 0; i < n_tiles; i++) tiles[i] = -1;
        return;
    }
    paged__block_unref(cache, group, *entry);
    *entry = -1;
}

/* Entry idx of every group, or of none. */
static paged_status copy_tail(paged_cache *cache, const paged__seq *seq, const finding *f) {
    paged_status status = PAGED_OK;
    int32_t g = 0, idx = f->reach.n_full, n_tokens = f->n_common;
    while (g < cache->n_groups && status == PAGED_OK) {
        status = copy_into(cache, seq, g, idx, f);
        g += status == PAGED_OK;
    }
    if (status != PAGED_OK) {
        while (--g >= 0) undo_copy(cache, seq, g, idx, n_tokens);
        return status;
    }
    if (!cache->n_tiles) cache->n_allocs += (uint64_t)cache->n_groups; /* tiles count for themselves */
    cache->n_copies += (uint64_t)cache->n_groups;
    return PAGED_OK;
}

/* References to everything that was found, and the copy. Without a block for the copy the match ends before
 * it. */
static paged_status take(paged_cache *cache, paged__seq *seq, finding *f) {
    int32_t need[PAGED_GROUPS_MAX];
    paged_status status = PAGED_OK;
    if (f->n_common > 0) {
        int32_t pos = f->reach.n_full * cache->block_size + f->n_common;
        share(cache, seq, &f->reach, pos);
        hold(cache, f->tail);
        int32_t n_tiles = paged__ceil_div(f->n_common, PAGED_TILE);
        for (int32_t g = 0; g < cache->n_groups; g++)
            need[g] = cache->n_tiles ? paged__tiles_blocks(cache, g, n_tiles) : 1;
        bool room = paged__make_room(cache, need);
        if (room) status = copy_tail(cache, seq, f);
        let_go(cache, f->tail);
        if (room && status == PAGED_OK) {
            f->shared = f->reach;
            return PAGED_OK;
        }
        unshare(cache, seq, &f->reach, pos);
        if (status != PAGED_OK) return status;
        f->n_common = 0;
        f->why = PAGED_MISS_NO_BLOCK;
    }
    share(cache, seq, &f->shared, f->shared.n_full * cache->block_size);
    return PAGED_OK;
}

/* What was taken becomes part of the sequence. Cannot fail. */
static void commit(paged_cache *cache, paged__seq *seq, const finding *f, const int32_t *tokens) {
    seq->len = f->shared.n_full * cache->block_size + f->n_common;
    seq->n_entries = f->shared.n_full + (f->n_common > 0);
    seq->has_tail = cache->n_tiles > 0 && f->n_common > 0;
    if (seq->len) memcpy(seq->tokens, tokens, (size_t)seq->len * sizeof *tokens);
    cache->n_tokens += seq->len;
}

static void tell_match(paged_cache *cache, const paged__seq *seq, const finding *f, int32_t n_tokens,
                       paged_match *out) {
    cache->n_queries++;
    cache->n_query_tokens += (uint64_t)n_tokens;
    cache->n_hit_tokens += (uint64_t)seq->len;
    cache->n_misses[f->why]++;
    if (out) *out = (paged_match){.n_matched = seq->len, .n_copied = f->n_common, .why = f->why};
}

paged_status paged_seq_match(paged_cache *cache, paged_seq handle, const paged_namespace *names,
                             const int32_t *tokens, int32_t n_tokens, paged_match *out) {
    paged__seq *seq = paged__seq_find(cache, handle);
    if (!seq) return PAGED_ERR_STALE;
    if (seq->len || seq->reserved || seq->space >= 0 || n_tokens < 0 || (n_tokens > 0 && !tokens))
        return PAGED_ERR_INVALID_ARG;
    if (n_tokens > cache->max_seq_tokens) return PAGED_ERR_TOO_LONG;
    if (cache->contiguous) { /* shares nothing */
        finding none = {.tail = -1, .why = n_tokens < 2 ? PAGED_MISS_TOO_SHORT : PAGED_MISS_NO_MATCH};
        tell_match(cache, seq, &none, n_tokens, out);
        return PAGED_OK;
    }
    int32_t space;
    paged_status status = paged__space_open(cache, names, &space);
    if (status != PAGED_OK) return status;
    finding f = look_up(cache, space, tokens, n_tokens);
    status = take(cache, seq, &f);
    if (status != PAGED_OK) {
        paged__settle_limit(cache);
        paged__space_unref(cache, space);
        return status;
    }
    int32_t row = (int32_t)(seq - cache->seqs);
    if (cache->promises[row].n_tokens && cache->promises[row].space != space) paged__promise_end(cache, row);
    paged__promise_check(cache, row, 0, tokens, n_tokens);
    commit(cache, seq, &f, tokens);
    seq->space = space;
    /* Since it promised, others may have computed what is waited for. */
    if (cache->promises[row].n_waiters) paged__promise_kept(cache, row);
    paged__settle_limit(cache);
    tell_match(cache, seq, &f, n_tokens, out);
    return PAGED_OK;
}
