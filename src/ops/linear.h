/* ops/linear.h: linear layers, y = W x, on the weights that GGUF files have.
 *
 *   pack      rows of a GGUF tensor -> tiles of 16 rows, once at load; the original may then be dropped
 *   quantise  activations of a step -> the form the kernels want, once per input and shared by its matrices
 *   run       some row tiles of a matrix (or of a stack of matrices with one input), or some tokens
 *   norm, turn   of rows between products
 *
 * Quantised weights are seen in one way: w = d * u + m with u an unsigned integer, d and m one pair per 32
 * weights of a row (16 for Q6_K); a signed format has d * (u - zero) instead. Activations are x = s * q with
 * q in -127 … 127 and one s per 32. So a block contributes d * s * ((u - zero) · q) + m * (s * sum q): the
 * integer part is exact, whatever the instruction set, and is followed by a fixed chain of f32 multiply-adds
 * in ascending order of blocks. F32, F16 and BF16 weights keep activations in f32 (ascending partial sums of
 * 64 columns, each one chain of multiply-adds). Therefore an output has the same bits for any number of
 * tokens, any thread count, any division of rows, and on all instruction sets.
 *
 * Activations of kind PAGED__ACT_BF16 are multiplied in another way, on AMX: both sides rounded to bf16, one
 * chain of TDPBF16PS over ascending blocks. The same bits for any number of tokens, threads and division, but
 * others than those above. A row of weights with a d or m that is no finite number gives NaN, and so does a
 * token with an |x| above 4.7e21.
 *
 * Packed, a tile holds for each block of 32 columns the 16 rows' quants in the order in which a vector of 16
 * lanes (one a row) × 4 consecutive columns wants them, so that the broadcast of 4 activations against it is
 * one VPDPBUSD; 4-bit types keep two nibbles a byte. Each type keeps its bits per weight (K-quants gain up to
 * 0.2 bit for unpacked scales). Behind them a tile of a quantised type has 64 bytes, a factor for each of its
 * rows, which bf16 wants.
 *
 * Only base/ may be included. Thread rule: pure functions; a packed matrix does not change.
 */
#ifndef PAGED_OPS_LINEAR_H
#define PAGED_OPS_LINEAR_H

#include "base/base.h"

enum { PAGED__ROW_TILE = 16, PAGED__ACT_BLOCK = 32, PAGED__ROOM_BYTES = 512 << 10 };

/* Values are ours; model/ maps ggml's. */
typedef enum paged__weight_type {
    PAGED__W_F32,
    PAGED__W_F16,
    PAGED__W_BF16,
    PAGED__W_Q4_0,
    PAGED__W_Q4_1,
    PAGED__W_Q5_0,
    PAGED__W_Q8_0,
    PAGED__W_Q4_K,
    PAGED__W_Q5_K,
    PAGED__W_Q6_K,
    PAGED__W_IQ4_NL,
    PAGED__N_WEIGHT_TYPES
} paged__weight_type;

/* A packed matrix: n_rows outputs, n_cols inputs. Rows are padded with zeros to whole tiles, of quantised
 * types to an even number. */
typedef struct paged__matrix {
    paged__weight_type type;
    int32_t n_rows, n_cols, n_tiles;
    uint8_t *data; /* n_tiles * tile_bytes, 64-byte aligned; owned by whoever packed */
    size_t tile_bytes;
} paged__matrix;

/* The form of activations. What is quantised may be multiplied in either of the last two where AMX is,
 * elsewhere in the second. */
typedef enum paged__act_kind {
    PAGED__ACT_F32,
    PAGED__ACT_I8,  /* a scale for 32 */
    PAGED__ACT_BF16 /* where paged__linear_bf16() names kernels; by weights that are scaled to bf16 first */
} paged__act_kind;

/* Activations of n_tokens rows; the memory is the caller's, paged__act_bytes() of it, 64-byte aligned. Made
 * by paged__act_make(). */
typedef struct paged__act {
    paged__act_kind kind;
    int32_t n_tokens, n_cols;
    int32_t group; /* tokens that lie together, as the kernels chosen when it was made want it */
    uint8_t *data;
} paged__act;

/* What becomes of the sums. */
typedef enum paged__epilogue {
    PAGED__STORE,  /* y = W x */
    PAGED__ADD,    /* y = residual + W x; residual may be y */
    PAGED__SWIGLU, /* two matrices, gate and up: y = silu(gate x) * (up x) */
    PAGED__GEGLU   /* y = gelu_tanh(gate x) * (up x) */
} paged__epilogue;

typedef struct paged__linear_job {
    const paged__matrix *w[4]; /* [n_w] one input, outputs one behind the other; GLU: gate and up */
    int32_t n_w;
    const float *bias[4]; /* each [n_rows] or NULL */
    const paged__act *x;  /* f32 or not as paged__wants_quantised() says for every w */
    float *y;             /* [n_tokens, sum of n_rows] (GLU: [n_tokens, n_rows]), rows of y_stride floats */
    int64_t y_stride;
    const paged__act *act; /* or instead of y, of GLU: the next product's activations [n_tokens, n_rows] */
    paged__epilogue epilogue;
    const float *residual; /* PAGED__ADD: rows of residual_stride floats */
    int64_t residual_stride;
    /* [PAGED__ROOM_BYTES] of this thread, 64-byte aligned, or NULL: with it many tokens of PAGED__ACT_BF16
     * are multiplied faster. */
    float *room;
} paged__linear_job;

/* libpaged-engine calls these across the border of the libraries. */
#pragma GCC visibility push(default)

/* False if this shape of this type has no kernel (n_cols no multiple of the format's block); the model then
 * uses ggml's. */
bool paged__linear_supports(paged__weight_type type, int64_t n_rows, int64_t n_cols);
bool paged__wants_quantised(paged__weight_type type);

/* Bytes of `data` for a matrix; 0: not supported or overflow. */
size_t paged__matrix_bytes(paged__weight_type type, int64_t n_rows, int64_t n_cols);

/* Fills the part of thread ith of nth of w->data from GGUF rows (row_bytes apart); paged__matrix_init() sets
 * the other fields of w. */
void paged__matrix_init(paged__matrix *w, paged__weight_type type, int32_t n_rows, int32_t n_cols,
                        uint8_t *data);
void paged__matrix_pack(const paged__matrix *w, const void *rows, size_t row_bytes, int32_t ith, int32_t nth);
/* One row back as f32 [n_cols]: for embeddings, and tests. */
void paged__matrix_row(const paged__matrix *w, int32_t row, float *out);

size_t paged__act_bytes(paged__act_kind kind, int32_t n_tokens, int32_t n_cols);
paged__act paged__act_make(paged__act_kind kind, int32_t n_tokens, int32_t n_cols, uint8_t *data);
/* Row `token` of the activations from f32 [n_cols]. With `norm_weight` [n_cols] it is RMS-normalised first:
 * x / sqrt(mean(x^2) + eps) * norm_weight (sum in a fixed order). Threads may set different rows at once;
 * all must be set before a matrix runs. Quantised, a row that holds NaN or an infinity gives NaN. */
void paged__act_set(const paged__act *act, int32_t token, const float *x, const float *norm_weight,
                    float eps);

/* Whether the outputs of a gated unit whose gate is w can become quantised activations as they are made, the
 * same as paged__act_set() makes of them. */
bool paged__linear_into_act(const paged__matrix *w);

/* The part of thread ith of nth: row tiles, so that bytes of weights are equal. Of 256 tokens and more first
 * tokens, in as many parts of 128 or more as nth is a multiple of. Cannot fail. */
void paged__linear_run(const paged__linear_job *job, int32_t ith, int32_t nth);

/* Where that part of a stack of n_w matrices (of a gated unit: of its gate) begins, and how many bytes it has
 * there in one piece: for who can bring them to a cache before. NULL and 0 where tokens are divided. */
const uint8_t *paged__linear_begin(const paged__matrix *const *w, int32_t n_w, int32_t n_tokens, int32_t ith,
                                   int32_t nth, size_t *n_bytes);

/* ---- what a model does to rows between its products, on the same instruction sets ---- */

/* out [n] = x / sqrt(mean(x^2) + eps) * weight; out may be x. The sum is in the order of paged__act_set(). */
void paged__rms_norm(float *out, const float *x, int32_t n, const float *weight, float eps);

/* The angles of a position: of each pair of the first n_rot elements of a head. */
typedef struct paged__turns {
    bool neighbours; /* pairs are 2 k, 2 k + 1; else k, n_rot / 2 + k */
    int32_t n_rot;
    const float *cos, *sin; /* [n_rot / 2]; of neighbours [n_rot] by element, the sines of 2 k negated */
} paged__turns;

/* Turns x [n_heads, head_dim] in place. */
void paged__turn(float *x, const paged__turns *turns, int32_t n_heads, int32_t head_dim);

/* "amx", "avx512_vnni", "avx2", "neon_dot", "neon", "ref" */
const char *paged__linear_kernels(void);
/* Those that multiply PAGED__ACT_BF16 here: "amx_bf16"; NULL: none do. */
const char *paged__linear_bf16(void);

#pragma GCC visibility pop

#endif
