/* mem/mem.h: the structures inside a cache. Only src/mem and its tests include this.
 *
 *   pool bytes   |<-- extent 0 -->|<-- extent 1 -->|<-- extent 2 -->| … | rest (waste)
 *                  owner: group 0    owner: group 1   owner: none
 *   group 0      |0|1|2|3|4|5|6|7|                                    block b at byte b * block_bytes, always
 *   group 1                       |  8 |  9 | 10 |                    ids follow the bytes: with gaps
 *
 *   group.partial ─> extent ⇄ extent ⇄ …        extents of the group with a free block
 *                      └─ free_head ─> block ─> block ─> -1           LIFO: freed last, still in cache
 *                      └─ n_fresh: from first + n_fresh on not taken since the group got it
 *   free_extents  [n_free_extents]              extents of no group, a stack
 *
 *   seqs[row]     tag, len, reserved, n_entries, tokens ─> [tokens_capacity]
 *   tables        [row * max_blocks + i]: block of the tokens i * block_size …; -1 from n_entries on
 *
 * Extents. One group: they have multiples of 2 MiB, a block belongs to the extent in which it begins, nothing
 * is wasted between them. Several groups: an extent belongs to the group that has blocks in use there and to
 * nobody otherwise, so every byte of the pool is within reach of every group; only blocks that lie whole in
 * the extent are used. See paged__extent_bytes().
 *
 * Invariants (check.c proves them):
 *  - a block is free (refs 0, exactly once on its extent's list or fresh) or in use (refs = table entries
 *    that name it);
 *  - an extent has an owner <=> it has blocks in use; it is on its owner's partial list <=> it has free ones
 *    besides;
 *  - a row has ceil((len + reserved) / block_size) entries, the same number in all groups, and -1 behind
 *    them;
 *  - blocks that hold only reserved slots have one reference; of the sequences that share a partly committed
 *    block at most one holds a reservation in it (the one that reserved before it was forked), and nobody
 *    else sees the slots it may write;
 *  - sequences that share a block agree on its place in the table and on the tokens that both have committed
 *    in it;
 *  - a block in use lies in backed granules.
 *
 * Ownership: the cache owns all arrays; the arena only if it made it (owns_arena).
 */
#ifndef PAGED_MEM_MEM_H
#define PAGED_MEM_MEM_H

#include "base/base.h"
#include "paged/mem.h"

enum {
    PAGED__GRANULE = 2 << 20,       /* bytes; the unit in which memory is backed: a huge page */
    PAGED__BLOCK_SIZE_DEFAULT = 16, /* tokens */
    PAGED__BLOCK_SIZE_MAX = 1024,
    PAGED__SEQ_BITS = 20, /* of a handle: row; the other 44 bits are the tag */
    PAGED__MAX_SEQS = 1 << PAGED__SEQ_BITS
};

/* A transfer or a pin is a reference, not a state. */
typedef enum paged__block_state { PAGED__BLOCK_FREE = 0, PAGED__BLOCK_USED = 1 } paged__block_state;

typedef struct paged__block {
    int32_t refs;
    int32_t next_free; /* on the free list of its extent; -1: last */
    uint8_t state;     /* paged__block_state */
} paged__block;

typedef struct paged__extent {
    int32_t owner;           /* group; -1: none, then nothing else here counts */
    int32_t first, n_blocks; /* ids of the owner */
    int32_t n_used, n_fresh, free_head;
    int32_t prev, next; /* partial list of the owner; -1: end */
} paged__extent;

/* Working space of stats and check; zero between calls. */
typedef struct paged__recount {
    int32_t n_refs;    /* table entries that name the block; in stats: its committed tokens */
    int32_t last_row;  /* row that named it last, + 1 */
    int32_t last_idx;  /* and where */
    int32_t n_writers; /* sequences with a reservation in it */
} paged__recount;

typedef struct paged__group {
    paged_group_config config;
    size_t block_bytes, k_bytes, v_bytes; /* k, v: of one layer of a block */
    int32_t n_ids;                        /* ids lie in [0, n_ids) */
    int32_t n_used, n_free;               /* blocks of the extents it owns */
    int32_t partial;                      /* first extent with a free block; -1: none */
    paged__block *blocks;                 /* [n_ids] */
    paged__recount *recount;              /* [n_ids] */
    int32_t *tables;                      /* [max_seqs, max_blocks] */
} paged__group;

typedef struct paged__seq {
    uint64_t tag; /* salt of the cache + generation, 44 bits */
    bool live;
    int32_t len, reserved, n_entries;
    int32_t next_free; /* row; -1: last */
    int32_t tokens_capacity;
    int32_t *tokens; /* [tokens_capacity], [len] of them committed; NULL while the capacity is 0 */
} paged__seq;

struct paged_cache {
    paged__group groups[PAGED_GROUPS_MAX];
    int32_t n_groups, block_size, max_seqs, max_seq_tokens, max_blocks;
    size_t pool_bytes;
    bool poison, owns_arena;
    paged_arena arena;
    /* pool.c */
    size_t extent_bytes;
    int32_t n_extents, n_free_extents;
    paged__extent *extents; /* [n_extents] */
    int32_t *free_extents;  /* [n_extents] */
    uint8_t *backed;        /* [n_granules] 0 or 1 */
    size_t n_granules, backed_bytes, used_bytes;
    uint64_t shuffle; /* state of the generator; 0: blocks are taken in order */
    /* seq.c */
    paged__seq *seqs; /* [max_seqs] */
    int32_t n_seqs, free_seq;
    int64_t n_tokens;
    size_t token_bytes; /* of all tokens arrays */
    uint64_t n_allocs, n_frees, n_copies, n_refused;
};

/* ---- size.c ---- */

/* The block sizes of several groups that share a pool of extents. */
typedef struct paged__shapes {
    size_t block_bytes[PAGED_GROUPS_MAX];
    int32_t n_groups;
} paged__shapes;

/* Whole blocks in an extent that begins at the worst place. */
size_t paged__extent_blocks_min(size_t extent_bytes, size_t block_bytes);

/* Size of the extents of a pool of several groups; 0: the pool does not hold one block per group. The
 * smallest multiple of 2 MiB up to 64 MiB that leaves each group at least 99 % of the pool if it had it
 * for itself, else the one that leaves most; there must be four extents a group. A pool too small for that
 * counts in multiples of its largest block instead. */
size_t paged__extent_bytes(const paged__shapes *shapes, size_t pool_bytes);

/* Extents for n_blocks blocks of each group, wherever they lie. */
size_t paged__extents_needed(const paged__shapes *shapes, size_t extent_bytes, size_t n_blocks);

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

void paged__block_ref(paged_cache *cache, int32_t group, int32_t block);

/* Drops a reference; true if it was the last one and the block is free now. */
bool paged__block_unref(paged_cache *cache, int32_t group, int32_t block);

/* For tests: from now on blocks are taken in an order that the seed decides, so that physical placement is
 * random. */
void paged__cache_shuffle(paged_cache *cache, uint64_t seed);

/* ---- seq.c ---- */

/* Puts all rows on the list of free ones and fills the tables with -1. */
void paged__seqs_init(paged_cache *cache);

static inline int32_t paged__ceil_div(int64_t a, int32_t b) {
    return (int32_t)((a + b - 1) / b);
}

#endif
