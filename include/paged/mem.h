/* mem.h: who owns which block. A paged KV cache without a model and without floating point.
 *
 *   cache ── arena (the bytes) ── extents ── blocks ── groups (layers, KV heads that live and die together)
 *     └── sequences: a length and one block table per group
 *
 * A sequence grows by reserve -> write -> commit: reserve takes the blocks, the caller writes keys and values
 * into the slots, commit says with which tokens. Only committed tokens count. fork shares all blocks; the one
 * that is shared and partly filled is copied before its first write (copy on write), inside reserve. Every
 * call is all or nothing: a failed call changes nothing.
 *
 * Reuse. A sequence that was matched in a namespace shares what it computes: its full blocks are indexed by
 * content when they are committed, its last, partly filled one when it is freed. Blocks that nobody holds any
 * more stay cached until their room is needed; then the least recently used leaf goes first.
 *
 * Windows. A group whose layers see only the last `window` keys holds the blocks of that window and no
 * others: what falls out goes back with the commit, its table entry becomes -1, and positions stay what they
 * were (paged_seq_first_k() says where the keys begin). Heads with windows of their own are a group over some
 * of the heads of their layers. A match ends where all groups have what the next token sees: groups without
 * a window every block, the others those of their last window.
 *
 * Packed tails (an option). The last block of a sequence, as long as it is not full, is no block but tiles of
 * 16 tokens, taken one by one from blocks that several sequences share: the table of blocks of 64 or 128 with
 * the waste of 16. Its entry in the block table is -1, and paged_tables.tail_tiles names its tiles. A tail
 * becomes a block, by one copy, in the reservation that will fill it or when it is sealed. A block that is
 * cut by truncate stays a block.
 *
 * Blocks are numbered per group from 0 on; block b of a group begins at byte b * block_bytes of the arena, so
 * an operator needs nothing but one stride. In a cache of one group the numbers 0 … n_blocks - 1 are dense.
 * In a cache of several groups an extent belongs to one group at a time and the numbers have gaps.
 *
 * Layout of a block: [layer][K | V][kv_head][block_size][head_dim], so all layers of a block are one run of
 * bytes and the K of all heads of one layer is one run. In a group of i8 the scales of a layer follow its K
 * and V: [layer][K | V | scales of K | scales of V], the scales [kv_head][block_size] f32.
 *
 * Thread rule: one thread at a time per cache. Different caches are independent.
 */
#ifndef PAGED_MEM_H
#define PAGED_MEM_H

#include "paged/base.h"
#include "paged/kv.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The seam between ids and bytes. mem manages ids; the arena knows where the bytes are and how they are
 * copied. */
typedef struct paged_arena {
    void *ctx;
    uint8_t *base;     /* first byte; never moves; NULL where the bytes cannot be addressed (a device) */
    size_t size_bytes; /* address space, reserved once */
    paged_status (*back)(void *ctx, size_t offset, size_t size_bytes); /* make usable; idempotent */
    /* Gives back to the system; NULL: what is backed stays so. */
    paged_status (*unback)(void *ctx, size_t offset, size_t size_bytes);
    paged_status (*copy)(void *ctx, size_t dst, size_t src, size_t size_bytes);
    void (*destroy)(void *ctx);
    size_t granule_bytes; /* the unit of back and unback, which only see multiples of it (or the end of the
                           * pool); a power of two; 0: 2 MiB */
} paged_arena;

/* Anonymous memory of this machine in huge pages where the system gives them, backed on first use. Errors:
 * NO_MEMORY. */
PAGED_API paged_status paged_arena_create_host(size_t size_bytes, paged_arena *out, paged_error *err);

typedef struct paged_group_config {
    int32_t n_layers, n_kv_heads, head_dim_k, head_dim_v; /* head_dim_v 0: as head_dim_k */
    paged_type type;
    paged_layout layout;
    int32_t window; /* keys that a query sees at most, its own included; 0: all. Blocks that no later token
                     * can see go back when they fall out of it */
} paged_group_config;

/* What happens to the index, in order. Replayed into an empty model it gives exactly the index. */
typedef enum paged_event_kind {
    PAGED_EVENT_STORED = 1,
    PAGED_EVENT_REMOVED = 2,
    PAGED_EVENT_CHANGED = 3 /* a group with a window lost its block of the entry, or got one again */
} paged_event_kind;

typedef struct paged_event {
    paged_event_kind kind;
    int32_t entry;  /* its name, until it is removed */
    int32_t parent; /* entry before it; -1: the first one of its namespace */
    int32_t n_tokens;
    const int32_t *tokens;      /* [n_tokens] of this block only; valid during the call */
    uint64_t namespace_hash[2]; /* XXH3-128 of the namespace; of first blocks only, else 0 */
    uint32_t groups;            /* bit g: group g has a block of it, from now on; REMOVED: until now */
} paged_event;

/* Must not call back into the cache. */
typedef void (*paged_event_fn)(void *user, const paged_event *event);

typedef struct paged_cache_config {
    size_t struct_size;
    const paged_group_config *groups; /* [n_groups] copied */
    int32_t n_groups;                 /* 1 … PAGED_GROUPS_MAX */
    int32_t block_size;               /* tokens, 1 … 1024; 0: 16 */
    size_t pool_bytes;                /* KV bytes: address space, and the highest limit */
    int32_t max_seqs;                 /* 0: 64 */
    int32_t max_seq_tokens;           /* longest sequence; 0: what the pool holds */
    const paged_arena *arena; /* NULL: a host arena of its own. Else borrowed, at least pool_bytes long */
    bool poison; /* for tests: blocks are filled with NaN when they are taken and when they are freed */
    paged_event_fn event; /* NULL: none */
    void *event_user;
    size_t max_bytes;    /* first limit, see paged_cache_set_max_bytes(); 0: pool_bytes */
    uint64_t trim_after; /* by the clock of paged_cache_set_clock(), which gives memory that no block was in
                          * for so long back to the system; 0: only paged_cache_trim() does */
    bool contiguous;     /* the documents' enable_paged false, a baseline to compare with: a sequence takes
                          * consecutive blocks for max_seq_tokens (which must be set) with its first
                          * reservation and keeps them until it is freed. Nothing is shared: a match finds
                          * nothing, a fork copies, a window gives nothing back */
    bool packed_tails;   /* see above; asks for a block_size of 32 … 256, packed layout in all groups */
} paged_cache_config;

enum { PAGED_GROUPS_MAX = 16 };

typedef struct paged_cache paged_cache;

/* A sequence: an index and a generation. 0 is never valid. A handle that was freed, or belongs to another
 * cache, is refused with PAGED_ERR_STALE. */
typedef uint64_t paged_seq;

/* Everything that scales with the configuration is taken here. Errors: INVALID_ARG (names the field),
 * NO_MEMORY, NO_BLOCKS (the pool does not hold one block per group). */
PAGED_API paged_status paged_cache_create(const paged_cache_config *config, paged_cache **out,
                                          paged_error *err);
PAGED_API void paged_cache_free(paged_cache *cache); /* sequences that are left die with it; NULL is fine */

/* Bytes of one block of a group; what a pool needs for n_tokens of one sequence. Overflow gives 0. */
PAGED_API size_t paged_block_bytes(const paged_group_config *group, int32_t block_size);
PAGED_API size_t paged_pool_bytes_for(const paged_group_config *groups, int32_t n_groups, int32_t block_size,
                                      int64_t n_tokens);

PAGED_API paged_status paged_seq_create(paged_cache *cache, paged_seq *out); /* NO_SEQS */
PAGED_API paged_status paged_seq_free(paged_cache *cache,
                                      paged_seq seq); /* gives its references back; STALE */

/* ---- reuse ---- */

/* What must be equal for keys and values to be the same, besides the tokens. Each field has its kind and its
 * length, so that an adapter and a salt of the same name are two things. */
typedef enum paged_ns_kind {
    PAGED_NS_MODEL = 1,
    PAGED_NS_ADAPTER,
    PAGED_NS_SALT, /* of a tenant */
    PAGED_NS_KV_TYPE,
    PAGED_NS_ROPE,
    PAGED_NS_NUMERICS, /* kernels, splits */
    PAGED_NS_USER      /* this and above: the caller's own */
} paged_ns_kind;

typedef struct paged_ns_field {
    int32_t kind;     /* paged_ns_kind */
    const void *data; /* [size_bytes] compared byte by byte */
    size_t size_bytes;
} paged_ns_field;

/* No fields is a namespace too. Kinds ascend strictly; all fields together have at most 64 KiB. */
typedef struct paged_namespace {
    const paged_ns_field *fields; /* [n_fields] */
    int32_t n_fields;
} paged_namespace;

/* Why a match ended where it did. */
typedef enum paged_miss {
    PAGED_MISS_NONE = 0,  /* all tokens but the last were reused */
    PAGED_MISS_NO_MATCH,  /* never seen */
    PAGED_MISS_EVICTED,   /* was cached, as far as is remembered, and had to go */
    PAGED_MISS_NAMESPACE, /* the first block is cached for another namespace */
    PAGED_MISS_TOO_SHORT, /* fewer than two tokens: nothing to reuse */
    PAGED_MISS_NO_BLOCK,  /* the tokens inside the next block match, but the pool has no block for the copy */
    PAGED_MISS_OFF,       /* nobody asked for reuse; never said by paged_seq_match */
    PAGED_MISS_KINDS
} paged_miss;

PAGED_API const char *paged_miss_name(paged_miss miss); /* "none", "no-match" …; static */

typedef struct paged_match {
    int32_t n_matched; /* tokens committed by the match, at most n_tokens - 1 */
    int32_t n_copied;  /* of them, those that lie in a block copied for this sequence */
    paged_miss why;
} paged_match;

/* Puts an empty sequence into a namespace, for good, and gives it what is cached of these tokens: whole
 * blocks shared, and the longest common piece of the block after them copied. At least one token is left to
 * be computed. A sequence that is never matched shares nothing and is never indexed; n_tokens 0 only opens
 * the namespace. From then on commit may replace a block that is full by a cached one of the same content,
 * so the tables and slots of committed tokens may change in it. Errors: INVALID_ARG (not empty, matched
 * before, a bad namespace), TOO_LONG, NO_MEMORY, STALE, what the arena says. */
PAGED_API paged_status paged_seq_match(paged_cache *cache, paged_seq seq, const paged_namespace *space,
                                       const int32_t *tokens, int32_t n_tokens, paged_match *out);

/* Prompts that arrive together and begin alike: one sequence computes, the others wait and hold no blocks.
 * Before its match, an empty sequence says which tokens it is going to have. *waits: another one has promised
 * to compute a beginning of them that is at least a block longer than what is cached; leave this one alone
 * until paged_seq_waits() says 0, then match it: it finds what was computed, to the token, as long as the
 * other one lives. Otherwise match it now, and others may wait for it. A producer that is freed or truncated,
 * or that commits other tokens than it promised, is replaced by the oldest one that waited for it. To match
 * a sequence that waits, or to reserve in it, ends its wait. Errors: INVALID_ARG (not empty, matched or
 * promised before), TOO_LONG, NO_MEMORY, STALE. O(max_seqs × common tokens). */
PAGED_API paged_status paged_seq_promise(paged_cache *cache, paged_seq seq, const paged_namespace *space,
                                         const int32_t *tokens, int32_t n_tokens, bool *waits);
PAGED_API int32_t paged_seq_waits(const paged_cache *cache, paged_seq seq); /* 1, 0; -1: stale */

/* How many of the tokens that a sequence has promised a match would find now; -1: stale, or it promised
 * nothing. */
PAGED_API int32_t paged_seq_reach(const paged_cache *cache, paged_seq seq);

/* Keeps what is cached of these tokens. priority (0 … 255, 0 at first): of the leaves, the lowest go first.
 * until: pinned, that is not evicted at all, as long as paged_cache_set_clock() was told less; 0: not pinned,
 * an earlier pin on the same piece ends. *n_kept: how many of the tokens are kept. A pin
 * holds a reference to each block, of groups with a window to those of the last one. O(blocks). Errors:
 * INVALID_ARG, NO_MEMORY, LIMIT (all groups have windows, and more pinned paths than the pool has blocks). */
PAGED_API paged_status paged_prefix_keep(paged_cache *cache, const paged_namespace *space,
                                         const int32_t *tokens, int32_t n_tokens, int32_t priority,
                                         uint64_t until, int32_t *n_kept);

/* ---- transfers ---- */

/* What an entry of the index is made of, while somebody reads it. */
typedef struct paged_hold {
    int32_t entry;                    /* as in paged_event */
    int32_t first, n_tokens;          /* position of its first token in its sequence */
    const int32_t *tokens;            /* [n_tokens] */
    int32_t blocks[PAGED_GROUPS_MAX]; /* of each group; -1: a group with a window has given it up */
} paged_hold;

/* Holds an entry: until it is released its blocks are in use, so that they are neither evicted nor moved nor
 * written, and any thread may read their bytes and `tokens` without a lock, while this cache goes on. Of the
 * entries before it those blocks are held that a match needs; they may move. Can be held many times; each
 * hold is released once. O(blocks before it). Errors: NOT_FOUND (no such entry any more), LIMIT (65535 holds
 * of it, or as paged_prefix_keep()). */
PAGED_API paged_status paged_entry_hold(paged_cache *cache, int32_t entry, paged_hold *out);
PAGED_API void paged_entry_release(paged_cache *cache, const paged_hold *hold);

/* The same for a block of a sequence that somebody else writes into before it is committed: its bytes are
 * nobody else's until it is released, also where the sequence is freed meanwhile. Errors: INVALID_ARG (no
 * such block, or one that nobody uses), LIMIT. */
PAGED_API paged_status paged_block_hold(paged_cache *cache, int32_t group, int32_t block);
PAGED_API void paged_block_release(paged_cache *cache, int32_t group, int32_t block);

/* Zeros in every slot of a block from slot n_tokens on, in any layout and type: what is there belonged to
 * others. `bytes`: of paged_block_bytes(). */
PAGED_API void paged_block_clear(const paged_group_config *group, int32_t block_size, void *bytes,
                                 int32_t n_tokens);

/* Tells the time, in the caller's unit, which never goes back; pins that end by then are released, and
 * memory that was idle for config.trim_after goes back to the system, at most 64 granules (128 MiB) a call.
 */
PAGED_API void paged_cache_set_clock(paged_cache *cache, uint64_t now);

/* Evicts everything that is cached and not in use or pinned. */
PAGED_API void paged_cache_clear(paged_cache *cache);

/* ---- an elastic pool ---- */

/* The pool's memory follows its blocks. It is backed when a block in it is first taken. Blocks are taken
 * where most are taken already, so that other places run empty; memory that the last block left is idle until
 * it is used again or given back: by paged_cache_trim(), with time by paged_cache_set_clock(), and at once
 * when the limit needs it. The addresses of blocks never change. */

/* Changes what blocks in use and cached ones together may take from now on; 0: pool_bytes. A reservation that
 * would go beyond is refused (NO_BLOCKS), what is cached beyond is evicted here, and what is in use beyond
 * stays until its sequences let go. Memory backed is at most the limit, too, but for free blocks between ones
 * in use, which paged_cache_compact() can gather. O(what it evicts and gives back). Errors: INVALID_ARG (more
 * than pool_bytes). */
PAGED_API paged_status paged_cache_set_max_bytes(paged_cache *cache, size_t max_bytes);

/* Gives idle memory back to the system, the longest idle first, until at most keep_bytes of it are left. It
 * does nothing with an arena that takes nothing back.
 * Errors: INVALID_ARG, what the arena says; what went before an error is gone. */
PAGED_API paged_status paged_cache_trim(paged_cache *cache, size_t keep_bytes);

/* Copies blocks, at most budget_bytes of them, from the emptiest places into free ones of the fullest, so
 * that memory becomes idle. Cached blocks move; with in_use those of sequences, too, and their tables are
 * rewritten: between steps, that is while nobody holds block ids, slots or a plan made from them. An extent
 * is drained only if the free blocks of others hold all of it, so that a call with nothing to gain does
 * nothing. With in_use tiles of packed tails move as well, until no whole block could be gained.
 * *moved_bytes: copied, 0: nothing is left to do (may be NULL). O(blocks moved), and O(table entries) if
 * blocks in use moved. Errors: INVALID_ARG, what the arena says; then no block has moved, though tiles may
 * have, and every sequence holds what it held. Method: the
 * emptiest segments first, as the cleaner of a log-structured file system (Rosenblum, Ousterhout 1992). */
PAGED_API paged_status paged_cache_compact(paged_cache *cache, size_t budget_bytes, bool in_use,
                                           size_t *moved_bytes);

/* ---- growing and shrinking ---- */

/* Makes the slots committed … committed + n_tokens - 1 of every group writable and owned by this sequence
 * alone. Replaces an earlier reservation: a smaller one gives blocks back, 0 gives all back. Free blocks are
 * taken first, then cached ones are evicted; those stay evicted whatever happens after. Errors:
 * NO_BLOCKS, TOO_LONG, NO_MEMORY, STALE, INVALID_ARG. */
PAGED_API paged_status paged_seq_reserve(paged_cache *cache, paged_seq seq, int32_t n_tokens);

/* Slots of the positions first … first + n - 1, all of them committed or reserved, and not before
 * paged_seq_first_k(). Errors: INVALID_ARG, STALE. */
PAGED_API paged_status paged_seq_slots(const paged_cache *cache, paged_seq seq, int32_t group, int32_t first,
                                       int32_t n, int64_t *slots);

/* The first n_tokens reserved slots now hold keys and values of these tokens. Errors: INVALID_ARG (more than
 * reserved), STALE. */
PAGED_API paged_status paged_seq_commit(paged_cache *cache, paged_seq seq, const int32_t *tokens,
                                        int32_t n_tokens);

/* Shortens to n_tokens committed tokens, drops any reservation, gives whole blocks back at once. Where a
 * group has a window the blocks of it at n_tokens must still be there: n_tokens is 0, or max(0,
 * n_tokens - window + 1) is at least paged_seq_first_k(); else INVALID_ARG, and nothing changes. Errors:
 * INVALID_ARG, STALE. */
PAGED_API paged_status paged_seq_truncate(paged_cache *cache, paged_seq seq, int32_t n_tokens);

/* A new sequence with the same committed tokens in the same blocks. A reservation is not inherited. Errors:
 * NO_SEQS, STALE; where it copies (config.contiguous) NO_BLOCKS and what the arena says, too. */
PAGED_API paged_status paged_seq_fork(paged_cache *cache, paged_seq parent, paged_seq *out);

PAGED_API int32_t paged_seq_len(const paged_cache *cache, paged_seq seq); /* committed tokens; -1: stale */
PAGED_API int32_t paged_seq_reserved(const paged_cache *cache,
                                     paged_seq seq); /* reserved beyond them; -1: stale */

/* The committed tokens, borrowed until the next call that changes the sequence; NULL: stale. */
PAGED_API const int32_t *paged_seq_tokens(const paged_cache *cache, paged_seq seq);

/* Position of the first key that a group still has, a multiple of block_size; 0 without a window; -1: stale
 * or no such group. For paged_tables.first_k. */
PAGED_API int32_t paged_seq_first_k(const paged_cache *cache, paged_seq seq, int32_t group);

/* Row of the sequence in the tables of paged_cache_tables(); -1: stale. Fixed for the life of the sequence.
 */
PAGED_API int32_t paged_seq_row(const paged_cache *cache, paged_seq seq);

/* Fills blocks, seq_stride, head_stride, max_blocks and, with packed tails, tail_tiles (else NULL); rows,
 * seqlens_k, first_k and n_seqs are the caller's. */
PAGED_API paged_status paged_cache_tables(const paged_cache *cache, int32_t group, paged_tables *out);

/* The keys and values of one layer (counted inside its group). Errors: INVALID_ARG. */
PAGED_API paged_status paged_cache_kv(const paged_cache *cache, int32_t group, int32_t layer, paged_kv *out);

/* Blocks that a reservation of n_tokens would take in a group, copies on write included; -1: stale. */
PAGED_API int32_t paged_seq_blocks_needed(const paged_cache *cache, paged_seq seq, int32_t group,
                                          int32_t n_tokens);

typedef struct paged_cache_stats {
    int32_t n_blocks, n_free, n_used, n_cached; /* n_blocks = the sum of the others, over all groups; an
                                                 * extent that no group holds counts as group 0's */
    int32_t n_seqs, max_seqs, block_size, n_pins;
    int64_t n_tokens;     /* committed, shared ones counted once per sequence */
    int64_t n_slots_used; /* slots of used blocks that hold a committed token, shared ones once */
    size_t pool_bytes, used_bytes,
        backed_bytes;                   /* limit; blocks in use; memory taken from the system so far */
    size_t waste_bytes;                 /* of the pool that no whole block fits into */
    size_t block_bytes;                 /* of group 0 */
    size_t table_bytes, metadata_bytes; /* block tables; everything else this cache keeps */
    uint64_t n_allocs, n_frees, n_copies,
        n_refused; /* blocks taken, given back, copied on write; reservations refused */
    uint64_t n_queries, n_query_tokens, n_hit_tokens; /* matches, their tokens, tokens that they reused */
    uint64_t n_stored, n_evicted;                     /* entries of the index */
    uint64_t n_misses[PAGED_MISS_KINDS];              /* matches by why they ended */
    int32_t n_divided, n_tail_tiles; /* of n_used: blocks divided into tiles; tiles of them in use */
    uint64_t n_packed;               /* tails that became blocks, in each group */
    uint64_t n_waits, n_handovers;   /* promises that waited; waiters that became producers */
    uint64_t n_evicted_blocks;       /* of groups with a window, while their entry stayed */
    /* more blocks of group 0 that could be in use: free or evictable, and within max_bytes */
    int32_t n_available;
    size_t max_bytes, cached_bytes; /* the limit; cached blocks */
    size_t idle_bytes;              /* backed memory without a block */
    uint64_t n_backed, n_unbacked;  /* granules taken from the system, given back */
    uint64_t n_moves;               /* blocks moved by compaction */
} paged_cache_stats;

PAGED_API void paged_cache_get_stats(const paged_cache *cache, paged_cache_stats *out);

/* References to a block, pins and transfers included; 0 for a free or cached one, -1 for an id that does not
 * exist. */
PAGED_API int32_t paged_block_refs(const paged_cache *cache, int32_t group, int32_t block);

/* ---- looking at blocks ---- */

typedef enum paged_block_state {
    PAGED_BLOCK_ABSENT = 0, /* the bytes belong to another group now, or the id to none */
    PAGED_BLOCK_FREE,
    PAGED_BLOCK_USED,   /* tables or pins name it */
    PAGED_BLOCK_CACHED, /* only the index knows it; it goes when its room is needed */
    PAGED_BLOCK_TAILS   /* divided into tiles, the last blocks of several sequences */
} paged_block_state;

typedef struct paged_block_view {
    paged_block_state state;
    int32_t refs; /* table entries, pins and transfers that name it; of TAILS: tiles in use */
    bool backed;  /* its memory is taken from the system */
    bool indexed; /* a prompt may find it */
} paged_block_view;

/* The blocks first … of a group, at most n of them. How many there were; -1: no such group. */
PAGED_API int32_t paged_cache_blocks(const paged_cache *cache, int32_t group, int32_t first, int32_t n,
                                     paged_block_view *out);

/* The committed tokens in a block, tokens [block_size], and the *position of the first of them in its
 * sequence. How many; 0 also of tails, -1: no such block. O(table entries) if it is not indexed. */
PAGED_API int32_t paged_block_tokens(const paged_cache *cache, int32_t group, int32_t block, int32_t *tokens,
                                     int32_t *position);

/* Walks every invariant and names the first one that does not hold (PAGED_ERR_CORRUPT). O(blocks + table
 * entries). */
PAGED_API paged_status paged_cache_check(const paged_cache *cache, paged_error *err);

#ifdef __cplusplus
}
#endif
#endif
