/* kv.h: the two structs in which memory and attention meet. Whoever owns blocks fills them, whoever computes
 * reads them, and neither knows the other.
 *
 *   block         block_size consecutive token slots of one group (layers and KV heads that live together)
 *   block table   logical -> physical block, int32, -1 = absent (block 0 is an ordinary block)
 *   slot          physical block * block_size + offset in the block, int64
 *   tile          16 consecutive slots, the unit of the packed layout and of a packed tail
 *
 * Where element d of the key of KV head h in block b, offset o lies, in elements from byte address
 * k + b * block_stride + h * k_head_stride (V likewise); tile t = o / 16, i = o % 16, dk, dv the head dims:
 *
 *   PLAIN           K: o * dk + d
 *   PACKED f32, f16 K: t * 16 * dk + d * 16 + i                      [d][16]
 *                   V: t * 16 * dv + i * dv + d                      [16][d]
 *   PACKED bf16     K: t * 16 * dk + d / 2 * 32 + i * 2 + d % 2      [d / 2][16][2]
 *                   V: t * 16 * dv + i / 2 * 2 * dv + d * 2 + i % 2  [8][d][2]
 *
 *   PACKED i8       K: t * 16 * dk + d / 4 * 64 + i * 4 + d % 4      [d / 4][16][4]
 *                   V: t * 16 * dv + i / 4 * 4 * dv + d * 4 + i % 4  [4][d][4]
 *
 * i8 has a scale (f32) for each slot and KV head besides: at k_scale + b * scale_block_stride +
 * h * scale_head_stride + o * 4 (v_scale likewise). It exists in the packed layout only.
 *   V   int8 values, -127 to 127; an element is value * scale
 *   K   uint8, value + 128. The key is rotated before: in each run of B elements, B the largest power of two
 *       that divides head_dim_k, value[i] * scale = sum over j of (-1)^popcount(i & j) * key[j] / sqrt(B)
 * The largest value of a row is ±127. A row of zeros has scale 0; one with a NaN has scale NaN and values 0.
 * Elements saturate at ±2^100, and a row whose largest element is below 2^-100 counts as zeros.
 *
 * The packed layout is what the inner products want: a vector holds the same element of 16 tokens, so that no
 * shuffle and no horizontal sum is needed. It asks for block_size % 16 == 0; for
 * bf16 the head dims must be even, for i8 multiples of 4.
 */
#ifndef PAGED_KV_H
#define PAGED_KV_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* 0 is the default wherever a type is asked for. */
typedef enum paged_type {
    PAGED_TYPE_F16 = 0,
    PAGED_TYPE_F32 = 1,
    PAGED_TYPE_BF16 = 2,
    PAGED_TYPE_I8 = 3
} paged_type;

typedef enum paged_layout { PAGED_LAYOUT_PLAIN = 0, PAGED_LAYOUT_PACKED = 1 } paged_layout;

enum { PAGED_TILE = 16 };

/* The keys and values of one layer of one group. Borrowed: valid as long as the memory behind it. */
typedef struct paged_kv {
    uint8_t *k, *v;                                     /* first byte of block 0 of this layer */
    int64_t block_stride, k_head_stride, v_head_stride; /* bytes */
    uint8_t *k_scale, *v_scale;                         /* i8 only: scale of slot 0 of block 0 */
    int64_t scale_block_stride, scale_head_stride;      /* i8 only: bytes */
    int32_t n_blocks;                                   /* physical ids lie in [0, n_blocks) */
    int32_t block_size;                                 /* tokens */
    int32_t n_kv_heads, head_dim_k, head_dim_v;
    paged_type type;
    paged_layout layout;
} paged_kv;

/* The block tables of one group for the sequences of a step. Borrowed; must not change between plan and the
 * last run. */
typedef struct paged_tables {
    const int32_t *blocks;      /* [n_rows, (n_kv_heads,) max_blocks] physical ids, -1 absent */
    const int32_t *rows;        /* [n_seqs] row of each sequence in `blocks`; NULL: sequence i has row i */
    int64_t seq_stride;         /* entries from one row to the next */
    int64_t head_stride;        /* entries from one KV head to the next; 0: one table serves all heads */
    const int32_t *seqlens_k;   /* [n_seqs] keys of each sequence, those of this step included */
    int32_t n_seqs, max_blocks; /* max_blocks: entries in a row */

    /* Windowed groups: first key that is still there, 0 … seqlens_k; entries of blocks that lie wholly before
     * it may be -1. NULL: all are. */
    const int32_t *first_k; /* [n_seqs] */

    /* Packed tails: where the last block of a sequence has no block of its own (its entry is -1), its tiles
     * stand here: physical block * (block_size / 16) + tile in it, so that slot i of tile t is slot
     * 16 * t + i. Tiles behind the last key may be -1. Packed layout only. NULL: no row has such a tail. */
    const int32_t *tail_tiles; /* [n_rows, block_size / 16], -1 absent; the same for all heads */
} paged_tables;

#ifdef __cplusplus
}
#endif
#endif
