/* mem/mem.h: the structures inside a cache. Only src/mem and its tests include this.
 *
 *   pool bytes   |<-- extent 0 -->|<-- extent 1 -->|<-- extent 2 -->| … | rest (waste)
 *                  owner: group 0    owner: group 1   owner: none
 *   group 0      |0|1|2|3|4|5|6|7|                                    block b at byte b * block_bytes, always
 *   group 1                       |  8 |  9 | 10 |                    ids follow the bytes: with gaps
 *
 *   group.partial[f] ─> extent ⇄ extent ⇄ …     extents of the group with a free block, by how full they are
 *                         └─ free_head ─> block ─> block ─> -1        LIFO: freed last, still in cache
 *                         └─ n_fresh: from first + n_fresh on not taken since the group got it
 *   free_extents  [n_free_extents]              extents of no group, a stack: emptied last, still backed
 *   granules      [n_granules]                  the arena in units of backing, whoever's blocks lie there
 *   idle_first ─> granule ⇄ granule ⇄ … ─> idle_last   backed, no block in them; the longest idle first
 *
 *   seqs[row]     tag, len, reserved, n_entries, tokens ─> [max_seq_tokens], its row of cache->tokens
 *   tables        [row * table_stride + i]: block of the tokens i * block_size …; -1 from n_entries on
 *
 * Extents. One group: they have multiples of 2 MiB, a block belongs to the extent in which it begins,
 * nothing is wasted between them. Several groups: an extent belongs to the group that has blocks in use
 * there and to nobody otherwise, so every byte of the pool is within reach of every group; only blocks that
 * lie whole in the extent are used. See paged__extent_bytes(). Contiguous mode: an extent is what one
 * sequence takes, so it is full or free, and the pool gives consecutive blocks without a rule of its own.
 *
 *   nodes[i]      index entry: tokens, the node before, and node_blocks[i * n_groups + g]: the block of each
 *                 group at this place; -1: the group has a window and gave it up. blocks[b].node leads back
 *   space ─ children ─> node ⇄ node            the children of a parent, a tree ordered by their tokens
 *                         └─ children ─> …     the block after it; only full nodes have children
 *   buckets       hash of all tokens up to the end of a full node ─> node ─> hash_next …
 *   evictable     heap of the leaves that nobody uses, the least wanted on top; pins: heap by end
 *   tail_tiles    [row * n_tiles + i]: tiles of the last, partly filled block of a row that has no block; see
 *                 tail.c
 *   group.loose   heap of the cached blocks of a group with a window; they may go before their node
 *
 * Invariants (check.c, check_prefix.c prove them):
 *  - a block is free (refs 0, exactly once on its extent's list or fresh), cached (refs 0, indexed), in use
 *    (refs = table entries and pins that name it), or divided into tiles (refs = those in use, each of which
 *    has as many references as rows name it); divided ones count as used, too;
 *  - every full block of a sequence with a namespace is a node whose parent is the block before it, the last
 *    of them is seq->tip, and what the sequence has of a node's blocks are the node's own; so a node in use
 *    (a tip, pinned, or with a block in use) has parents in use, and what has no references can be evicted:
 *    blocks of groups without a window leaf by leaf, those of groups with one at any time;
 *  - a node has its blocks of all groups without a window, and at least one block if nobody uses it or what
 *    comes after it;
 *  - a node's tokens never change; a partly filled block that is indexed is copied before it is written;
 *  - no two children of a parent have the same tokens;
 *  - an extent has an owner <=> it has blocks in use or cached; it is on one of its owner's partial lists,
 *    that of its fullness, <=> it has free ones besides;
 *  - a row has ceil((len + reserved) / block_size) entries, the same number in all groups, and -1 behind
 *    them. In a group with a window the first paged__seq_first() of them are -1 too: they are out of the
 *    window of the token at position len;
 *    Contiguous mode: none before the first reservation, then max_blocks consecutive ones;
 *  - blocks that hold only reserved slots have one reference; of the sequences that share a partly committed
 *    block at most one holds a reservation in it (the one that reserved before it was forked), and nobody
 *    else sees the slots it may write;
 *  - sequences that share a block agree on its place in the table and on the tokens that both have committed
 *    in it;
 *  - a granule counts the blocks in use or cached that touch it; it is backed if there are any, and on the
 *    idle list <=> it is backed and there are none;
 *  - blocks take more than max_bytes only while nothing can be evicted.
 *
 * Ownership: the cache owns all arrays; the arena only if it made it (owns_arena).
 */
#ifndef PAGED_MEM_MEM_H
#define PAGED_MEM_MEM_H

#include "base/base.h"
#include "paged/mem.h"

enum {
    PAGED__GRANULE = 2 << 20,       /* bytes; the usual unit in which memory is backed: a huge page */
    PAGED__FULLNESS = 64,           /* classes of partly filled extents */
    PAGED__BLOCK_SIZE_DEFAULT = 16, /* tokens */
    PAGED__BLOCK_SIZE_MAX = 1024,
    PAGED__TAIL_BLOCK_MAX = 256, /* tokens of a block with packed tails */
    PAGED__TILES_MAX = PAGED__TAIL_BLOCK_MAX / PAGED_TILE,
    PAGED__SEQ_BITS = 20, /* of a handle: row; the other 44 bits are the tag */
    PAGED__MAX_SEQS = 1 << PAGED__SEQ_BITS
};

/* A transfer or a pin is a reference, not a state. */
typedef enum paged__block_state {
    PAGED__BLOCK_FREE = 0,
    PAGED__BLOCK_USED = 1,
    PAGED__BLOCK_CACHED = 2,
    PAGED__BLOCK_DIVIDED = 3 /* into tiles; indexed by nobody */
} paged__block_state;

typedef struct paged__block {
    int32_t refs;
    union {
        int32_t next_free;  /* free: on the list of its extent; -1: last */
        int32_t node;       /* indexed: that it belongs to */
        int32_t open_place; /* divided: in group.open; -1: no tile is free */
    };
    uint8_t state;        /* paged__block_state */
    bool indexed;         /* belongs to a node */
    uint16_t n_transfers; /* of refs: those of transfers, during which it is neither moved nor reused */
} paged__block;

typedef struct paged__extent {
    int32_t owner;                       /* group; -1: none, then nothing else here counts */
    int32_t first, n_blocks;             /* ids of the owner */
    int32_t n_taken, n_fresh, free_head; /* taken: in use or cached */
    int32_t prev, next;                  /* partial list of its fullness; -1: end */
} paged__extent;

typedef struct paged__granule {
    uint64_t since;     /* when its last block went, by the caller's clock; of idle ones */
    int32_t n_taken;    /* blocks in use or cached that touch it */
    int32_t prev, next; /* idle list; -1: end */
    int32_t recount;    /* of n_taken; zero between calls */
    bool backed;
} paged__granule;

/* Working space of stats and check; zero between calls. */
typedef struct paged__recount {
    int32_t n_refs;    /* table entries and pins that name the block; in stats: its committed tokens */
    int32_t last_row;  /* row that named it last, + 1 */
    int32_t last_idx;  /* and where */
    int32_t n_writers; /* sequences with a reservation in it */
} paged__recount;

typedef struct paged__tile {
    int32_t refs;    /* rows that name it; 0: free, or not a tile of a divided block */
    int32_t recount; /* working space of stats and check; zero between calls */
    int32_t row;     /* that was given it; another one may name it by now */
} paged__tile;

typedef struct paged__heap {
    int32_t *items; /* [n] nodes, or blocks of a group; the parent of i is (i - 1) / 2 */
    int32_t n;
    int32_t group; /* whose blocks; -1: nodes */
} paged__heap;

typedef struct paged__group {
    paged_group_config config;
    size_t block_bytes;
    size_t k_bytes, v_bytes, scale_bytes; /* of one layer of a block; scale: of K, and as many of V */
    int32_t n_ids;                        /* ids lie in [0, n_ids) */
    int32_t n_used, n_cached, n_free;     /* blocks of the extents it owns */
    int32_t partial[PAGED__FULLNESS];     /* first extent with n_taken >> fullness_shift = index; -1: none */
    uint64_t fullness;                    /* bit f: partial[f] is not empty */
    int32_t fullness_shift;
    paged__block *blocks;    /* [n_ids] */
    paged__recount *recount; /* [n_ids] */
    int32_t *tables;         /* [max_seqs, table_stride], [max_blocks] of a row count */
    /* packed tails, else NULL */
    int32_t *tail_tiles;   /* [max_seqs, n_tiles] -1 absent */
    paged__tile *tiles;    /* [n_ids * n_tiles] */
    int32_t *open, n_open; /* [n_ids] divided blocks with a free tile, by tiles in use */
    int32_t open_begin[PAGED__TILES_MAX + 1];
    int32_t n_divided, n_free_tiles;
    /* groups with a window, else NULL */
    paged__heap loose;    /* cached blocks, the least wanted on top */
    int32_t *loose_place; /* [n_ids] place in it; -1: not there */
    uint64_t *loose_tick; /* [n_ids] of the last use, while cached */
} paged__group;

typedef struct paged__node {
    uint64_t hash[2];    /* full nodes: of the parent's hash and the tokens */
    uint64_t tick;       /* of the last use */
    uint64_t until;      /* end of the pin; 0: none */
    int32_t parent;      /* node; -2 - s: first block in namespace s */
    int32_t n_tokens;    /* block_size: full; less: a sealed tail; 0: the node is free */
    int32_t children;    /* root of their tree; -1: a leaf */
    int32_t left, right; /* among its siblings; -1: none */
    int32_t hash_next;   /* in its bucket, or on the list of free nodes; -1: last */
    int32_t n_blocks;    /* that it has */
    int32_t n_held;      /* of them, those with references */
    int32_t n_users;     /* sequences whose tip it is, a pin, and transfers */
    int32_t heap_pos;    /* in cache->pins if it is pinned, else in cache->evictable; -1: in none */
    uint8_t priority;
    uint16_t n_transfers; /* of n_users */
} paged__node;

/* Lives as long as a sequence or a node is in it. */
typedef struct paged__space {
    uint64_t hash[2];
    uint8_t *bytes; /* [n_bytes] kind, length, data of each field; owned */
    size_t n_bytes;
    int32_t n_refs;   /* sequences and first nodes; 0: free */
    int32_t next;     /* in its bucket, or on the free list; -1: last */
    int32_t children; /* as of a node */
} paged__space;

typedef struct paged__seq {
    uint64_t tag; /* salt of the cache + generation, 44 bits */
    bool live;
    bool has_tail; /* entry n_entries - 1 is -1, its slots are tiles */
    int32_t len, reserved, n_entries;
    int32_t space;     /* namespace; -1: shares nothing */
    int32_t tip;       /* node of the last full committed block; -2 - space: none is full; -1: no namespace */
    int32_t next_free; /* row; -1: last */
    int32_t *tokens;   /* [max_seq_tokens], [len] of them committed; a row of cache->tokens, for good */
} paged__seq;

typedef struct paged__promise {
    int32_t n_tokens;  /* at the beginning of the row's tokens, committed or not; 0: it promised nothing */
    int32_t space;     /* a reference */
    int32_t producer;  /* row it waits for; -1: it waits for none */
    int32_t n_common;  /* it waits until that one has committed so many */
    int32_t n_waiters; /* that wait for it */
    uint64_t ticket;   /* who came first */
} paged__promise;

struct paged_cache {
    paged__group groups[PAGED_GROUPS_MAX];
    int32_t n_groups, block_size, max_seqs, max_seq_tokens, max_blocks;
    int32_t n_tiles; /* of a block; 0: no packed tails */
    size_t pool_bytes;
    bool poison, owns_arena, contiguous;
    paged_arena arena;
    /* pool.c */
    size_t extent_bytes;
    int32_t n_extents, n_free_extents;
    paged__extent *extents;   /* [n_extents] */
    int32_t *free_extents;    /* [n_extents] */
    paged__granule *granules; /* [n_granules] */
    size_t granule_bytes, n_granules;
    int32_t granule_shift; /* log2(granule_bytes) */
    int32_t idle_first, idle_last;
    size_t max_bytes, used_bytes, taken_bytes, backed_bytes, idle_bytes; /* taken: used or cached */
    uint64_t trim_after, n_backed, n_unbacked, n_moves;
    uint64_t shuffle; /* state of the generator; 0: blocks are taken in order */
    /* seq.c */
    paged__seq *seqs; /* [max_seqs] */
    int32_t n_seqs, free_seq;
    int64_t n_tokens;
    int32_t *tokens;                    /* [max_seqs, token_stride] memory of the system once it is touched */
    int64_t table_stride, token_stride; /* entries of a row */
    /* promise.c */
    paged__promise *promises; /* [max_seqs] */
    uint64_t next_ticket, n_waits, n_handovers;
    uint64_t n_allocs, n_frees, n_copies, n_refused;
    /* prefix.c, lru.c */
    paged__node *nodes;   /* [n_nodes_max] */
    int32_t *node_tokens; /* [n_nodes_max, block_size] */
    int32_t *node_blocks; /* [n_nodes_max, n_groups] -1: the group has given it up */
    int32_t n_nodes_max, free_node;
    bool all_windowed;      /* no group keeps a whole sequence */
    int64_t n_pinned;       /* nodes of paths pinned or in transfer, shared ones once for each */
    int32_t *buckets;       /* [n_buckets] a power of two */
    uint32_t *evicted_tags; /* [n_buckets] hash of the full node that was evicted last from this bucket */
    uint32_t *first_counts; /* [n_buckets] full first nodes of any namespace, by their tokens */
    size_t n_buckets;
    uint64_t hash_mask; /* all ones; tests cut the hash */
    paged__heap evictable, pins;
    uint64_t tick, now;
    paged_event_fn event;
    void *event_user;
    uint64_t n_queries, n_query_tokens, n_hit_tokens, n_stored, n_evicted, n_misses[PAGED_MISS_KINDS];
    uint64_t n_packed;         /* tails that became blocks */
    uint64_t n_evicted_blocks; /* of groups with a window, before their node */
    /* space.c */
    paged__space *spaces;   /* [n_spaces_max] */
    int32_t *space_buckets; /* [n_spaces_max] a power of two */
    int32_t n_spaces_max, free_space;
    size_t space_bytes; /* of both arrays and all bytes */
};

/* ---- size.c ---- */

/* The block sizes of several groups that share a pool of extents. */
typedef struct paged__shapes {
    size_t block_bytes[PAGED_GROUPS_MAX];
    int32_t n_groups;
} paged__shapes;

static inline size_t paged__gcd(size_t a, size_t b) {
    while (b) {
        size_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Whole blocks in an extent that begins at the worst place. */
static inline size_t paged__extent_blocks_min(size_t extent_bytes, size_t block_bytes) {
    /* Extent e begins at e * E. The next block border is at most B - paged__gcd(E, B) further on. */
    size_t lost = block_bytes - paged__gcd(extent_bytes, block_bytes);
    return extent_bytes < lost ? 0 : (extent_bytes - lost) / block_bytes;
}

/* Size of the extents of a pool of several groups; 0: the pool does not hold one block per group. The
 * smallest multiple of 2 MiB up to 64 MiB that leaves each group at least 99 % of the pool if it had it
 * for itself, else the one that leaves most; there must be four extents a group. A pool too small for that
 * counts in multiples of its largest block instead. */
size_t paged__extent_bytes(const paged__shapes *shapes, size_t pool_bytes);

/* Entries of a row of an array of int32 rows with n_entries each, padding included. */
int64_t paged__row_stride(int32_t n_entries);

/* Extents for n_blocks blocks of each group, wherever they lie. */
size_t paged__extents_needed(const paged__shapes *shapes, size_t extent_bytes, size_t n_blocks);

/* ---- what several parts ask ---- */

static inline int32_t paged__node_block(const paged_cache *cache, int32_t node, int32_t group) {
    return cache->node_blocks[(int64_t)node * cache->n_groups + group];
}
static inline const int32_t *paged__node_tokens(const paged_cache *cache, int32_t node) {
    return cache->node_tokens + (int64_t)node * cache->block_size;
}

/* First entry that the token at position len needs of a group: 0 without a window. */
static inline int32_t paged__window_first(const paged_cache *cache, int32_t group, int32_t len) {
    int32_t window = cache->groups[group].config.window;
    return window > 0 && !cache->contiguous ? PAGED_MAX(len - window + 1, 0) / cache->block_size : 0;
}

/* Entries of a row of n_tokens tokens, committed and reserved, that has n_entries by now. */
static inline int32_t paged__entries_for(const paged_cache *cache, int64_t n_tokens, int32_t n_entries) {
    if (cache->contiguous) return n_tokens > 0 || n_entries > 0 ? cache->max_blocks : 0;
    return (int32_t)((n_tokens + cache->block_size - 1) / cache->block_size);
}

/* Entries of a group at the beginning of a row that are out of the window. */
static inline int32_t paged__seq_first(const paged_cache *cache, int32_t group, const paged__seq *seq) {
    return paged__window_first(cache, group, seq->len);
}

/* ---- pool.c ---- */

/* Puts all extents on the stack of free ones. The arrays exist. */
void paged__pool_init(paged_cache *cache);

/* The ids of a group in an extent, whoever owns it now. */
void paged__extent_range(const paged_cache *cache, int32_t group, int32_t extent, int32_t *first,
                         int32_t *n_blocks);

int32_t paged__extent_of(const paged_cache *cache, int32_t group, int32_t block);

/* True if so many blocks of each group can be taken together. */
bool paged__pool_can_take(const paged_cache *cache, const int32_t *need /* [n_groups] */);

/* Takes a block with one reference and backs its memory. The caller has asked paged__pool_can_take(); so
 * what fails here is the arena, and then nothing has changed. */
paged_status paged__block_take(paged_cache *cache, int32_t group, int32_t *block);

/* Of a block in use or cached; a cached one is in use then. */
void paged__block_ref(paged_cache *cache, int32_t group, int32_t block);

/* Drops a reference; true if it was the last one and the block is free now. An indexed one stays, cached. */
bool paged__block_unref(paged_cache *cache, int32_t group, int32_t block);

/* Frees a cached block, which is not indexed any more. */
void paged__block_drop(paged_cache *cache, int32_t group, int32_t block);

/* The block `to`, which was just taken, gets the content's references and place in the index; `from` is free
 * then. Tables are the caller's. */
void paged__block_move(paged_cache *cache, int32_t group, int32_t from, int32_t to);

/* A partly filled extent off its list, so that nothing is taken from it, and on again. */
void paged__extent_detach(paged_cache *cache, int32_t extent);
void paged__extent_attach(paged_cache *cache, int32_t extent);

/* Gives back at most n_max granules that have been idle since `until` or longer, the longest idle first, as
 * long as more than keep_bytes are idle. Errors: of the arena; what went before is gone. */
paged_status paged__pool_trim(paged_cache *cache, size_t keep_bytes, uint64_t until, size_t n_max);

/* For tests: from now on blocks are taken in an order that the seed decides, so that physical placement is
 * random. */
void paged__cache_shuffle(paged_cache *cache, uint64_t seed);

/* ---- seq.c ---- */

/* Puts all rows on the list of free ones and fills the tables with -1. */
void paged__seqs_init(paged_cache *cache);

paged__seq *paged__seq_find(const paged_cache *cache, paged_seq handle);                   /* NULL: stale */
int32_t *paged__seq_table(const paged_cache *cache, int32_t group, const paged__seq *seq); /* [max_blocks] */

/* Somebody else has the block of this entry, or the index, in one group at least: a window may have made
 * others let go of it in the rest. */
bool paged__seq_shares(const paged_cache *cache, const paged__seq *seq, int32_t idx);

/* ---- tail.c ---- */

/* Blocks that must be divided so that n_tiles tiles can be taken. */
int32_t paged__tiles_blocks(const paged_cache *cache, int32_t group, int32_t n_tiles);

/* Takes a tile with one reference, or n of them, or none. What fails is the arena; for the rest see
 * paged__block_take(). */
paged_status paged__tile_take(paged_cache *cache, int32_t group, int32_t *tile);
paged_status paged__tiles_take(paged_cache *cache, int32_t group, int32_t n, int32_t *tiles);
void paged__tiles_untake(paged_cache *cache, int32_t group, int32_t n, const int32_t *tiles);

/* Entry of a row's tail_tiles names the tile from now on. */
void paged__tile_name(paged_cache *cache, int32_t group, int32_t row, int32_t *entry, int32_t tile);

/* Moves tiles out of the emptiest divided blocks until no whole block could be gained, as far as the budget
 * goes. Tables change. Errors: of the arena; what was moved before stays moved. */
paged_status paged__tails_compact(paged_cache *cache, int32_t group, size_t *rest_bytes);

void paged__tile_ref(paged_cache *cache, int32_t group, int32_t tile);

/* True if it was the last one of its block and the block is free now. */
bool paged__tile_unref(paged_cache *cache, int32_t group, int32_t tile);

/* Of any two tiles, of divided blocks or not. Errors: of the arena. */
paged_status paged__tile_copy(paged_cache *cache, int32_t group, int32_t dst, int32_t src);

static inline int32_t *paged__seq_tiles(const paged_cache *cache, int32_t group, const paged__seq *seq) {
    if (!cache->n_tiles) return NULL;
    return cache->groups[group].tail_tiles + (seq - cache->seqs) * cache->n_tiles;
}

/* Tiles of the tail, the same number in every group; 0: it has none. */
int32_t paged__seq_n_tiles(const paged_cache *cache, const paged__seq *seq);

/* Gives the tiles from number n_tiles on back. */
void paged__tail_cut(paged_cache *cache, paged__seq *seq, int32_t group, int32_t n_tiles);

/* Another sequence has tile idx of the tail, in one group at least. */
bool paged__tail_shares(const paged_cache *cache, const paged__seq *seq, int32_t idx);

/* Copies the first n_tokens of a tail into a block, or of a block into tiles. Errors: of the arena. */
paged_status paged__tail_to_block(paged_cache *cache, const paged__seq *seq, int32_t group, int32_t block,
                                  int32_t n_tokens);
paged_status paged__tail_from_block(paged_cache *cache, int32_t group, const int32_t *tiles, int32_t block,
                                    int32_t n_tokens);

/* ---- space.c ---- */

/* Finds or makes a namespace and takes a reference. Errors: INVALID_ARG, NO_MEMORY. */
paged_status paged__space_open(paged_cache *cache, const paged_namespace *names, int32_t *space);
void paged__space_unref(paged_cache *cache, int32_t space);
/* The fields as bytes, each with kind and length; the caller's to free. NULL and INVALID_ARG, or NULL and
 * NO_MEMORY, in *status. The engine's, too, and so visible across the border of the libraries. */
PAGED_API uint8_t *paged__namespace_encode(const paged_namespace *names, size_t *n_bytes,
                                           paged_status *status);
void paged__spaces_free(paged_cache *cache);

/* ---- lru.c ---- */

/* The references of an indexed block went from or to 0. */
void paged__block_used(paged_cache *cache, int32_t group, int32_t block);
void paged__block_released(paged_cache *cache, int32_t group, int32_t block);

/* A cached block is about to leave its node. */
void paged__block_forgotten(paged_cache *cache, int32_t group, int32_t block);

/* The content of an indexed block lies in `to` from now on: node and heap follow. */
void paged__block_renamed(paged_cache *cache, int32_t group, int32_t from, int32_t to);

/* A sequence takes this node for its tip, or leaves it; nothing happens where there is none (negative). */
void paged__node_enter(paged_cache *cache, int32_t node);
void paged__node_leave(paged_cache *cache, int32_t node);

/* After a change of children, users or key: puts an unpinned node into its place among the evictable ones, or
 * out. One that is of no use to anybody any more is removed, with the parents that it leaves so. */
void paged__node_settle(paged_cache *cache, int32_t node);

/* Evicts the leaf that is wanted least; false: there is none. */
bool paged__evict_leaf(paged_cache *cache);

/* A node that may be removed at once: nobody uses it, nothing comes after it. */
static inline bool paged__node_idle(const paged__node *n) {
    return n->n_tokens > 0 && n->children < 0 && n->n_users == 0 && n->n_held == 0;
}

/* Evicts until so many blocks of each group can be taken together; false: not possible, and then, with one
 * group, nothing was evicted. */
bool paged__make_room(paged_cache *cache, const int32_t *need /* [n_groups] */);

/* Evicts what the limit does not allow, as far as possible. */
void paged__evict_to_limit(paged_cache *cache);

/* At the end of every call that may have left blocks cached. */
static inline void paged__settle_limit(paged_cache *cache) {
    if (cache->taken_bytes > cache->max_bytes) paged__evict_to_limit(cache);
}

/* A pin of a path of depth + 1 nodes holds the block of node number i: all that a match needs that ends in
 * the last one. */
static inline bool paged__pin_holds(const paged_cache *cache, int32_t group, int32_t depth, int32_t i) {
    return i >= paged__window_first(cache, group, depth * cache->block_size + 1);
}

/* Nodes before this one. */
int32_t paged__node_depth(const paged_cache *cache, int32_t node);

/* A node without children may stay alone when it is unpinned, so there must be nodes for all that is pinned.
 */
bool paged__may_pin(const paged_cache *cache, int32_t depth);

/* Which of two nodes or blocks of a heap comes first. */
bool paged__heap_before(const paged_cache *cache, const paged__heap *heap, int32_t a, int32_t b);

/* ---- prefix.c ---- */

/* Empties the index. The arrays exist. */
void paged__prefix_init(paged_cache *cache);

/* The longest common beginning of tokens with a child of the parent; its length in *n_common, 0 and -1:
 * none. */
int32_t paged__prefix_best(const paged_cache *cache, int32_t parent, const int32_t *tokens, int32_t n_tokens,
                           int32_t *n_common);

/* Nodes for a cache of these groups: as many as can be of use at once. */
size_t paged__prefix_nodes_max(const paged_cache *cache);

/* The node of a full block of these tokens after parent; -1: none. Its hash in any case. */
int32_t paged__prefix_find(const paged_cache *cache, int32_t parent, const int32_t *tokens, uint64_t hash[2]);

/* Indexes the blocks of a sequence that became full beyond first_len; blocks that exist already are
 * replaced by the cached ones. */
void paged__prefix_commit(paged_cache *cache, paged__seq *seq, int32_t first_len);

/* Indexes the partly filled last block of a sequence that is about to leave. */
void paged__prefix_seal(paged_cache *cache, const paged__seq *seq);

/* Takes an idle node out of the index and frees its blocks. */
void paged__prefix_remove(paged_cache *cache, int32_t node);

/* Frees the cached block of a group with a window; its node stays, unless it is of no use without. */
void paged__prefix_drop_block(paged_cache *cache, int32_t group, int32_t block);

/* Bucket of the first block's tokens in first_counts. */
size_t paged__prefix_first(const paged_cache *cache, const int32_t *tokens);

/* For tests: keeps only these bits of a hash, so that collisions are certain. Before the first match. */
void paged__cache_cut_hash(paged_cache *cache, uint64_t mask);

/* ---- match.c ---- */

/* A walk down the index along the tokens of a prompt. */
typedef struct paged__walk {
    int32_t node;                   /* where it is; -2 - space: at the start */
    int32_t n_full;                 /* nodes so far */
    int32_t runs[PAGED_GROUPS_MAX]; /* of groups with a window: nodes in a row up to here that have a block */
} paged__walk;

paged__walk paged__walk_start(const paged_cache *cache, int32_t space);
void paged__walk_add(const paged_cache *cache, paged__walk *walk, int32_t node);

/* All groups have what the token at position pos sees of the nodes so far. */
bool paged__walk_covers(const paged_cache *cache, const paged__walk *walk, int32_t pos);

/* How many of these tokens a match would find now. */
int32_t paged__match_reach(const paged_cache *cache, int32_t space, const int32_t *tokens, int32_t n_tokens);

/* ---- promise.c ---- */

/* The row promises nothing any more; those who wait for it find another one. */
void paged__promise_end(paged_cache *cache, int32_t row);

/* The row is about to have these tokens from position first on: ends a promise of others, and its waiting. */
void paged__promise_check(paged_cache *cache, int32_t row, int32_t first, const int32_t *tokens,
                          int32_t n_tokens);

/* The row has committed; lets those go on who have all they waited for. */
void paged__promise_kept(paged_cache *cache, int32_t row);

/* ---- check_tail.c ---- */

/* Counts the references of rows into tiles, those of tiles into recount; divided blocks and their lists. */
paged_status paged__check_tails(const paged_cache *cache, paged_error *err);

/* ---- check_prefix.c ---- */

/* Counts the references of pins and transfers into recount; then the index against blocks, tables and heaps.
 */
paged_status paged__check_pins(const paged_cache *cache, paged_error *err);
paged_status paged__check_promises(const paged_cache *cache, paged_error *err);
paged_status paged__check_prefix(const paged_cache *cache, paged_error *err);

static inline int32_t paged__ceil_div(int64_t a, int32_t b) {
    return (int32_t)((a + b - 1) / b);
}

#endif
