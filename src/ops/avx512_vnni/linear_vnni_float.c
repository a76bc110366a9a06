/* linear_vnni_float.c: linear layers on F32, F16 and BF16 weights for AVX-512. A vector is one column of 16
 * rows; 4 tiles × 6 tokens are 24 chains of multiply-adds over ascending columns, which hide their latency.
 * Conversion to f32 is exact and happens in registers.
 */
#include "ops/linear_vnni.h"

INLINE __m512 column(const uint8_t *tile, int64_t k, const paged__weight_type type) {
    if (type == PAGED__W_F32) return _mm512_load_ps(tile + k * 64);
    const __m256i half = _mm256_load_si256((const __m256i *)(const void *)(tile + k * 32));
    if (type == PAGED__W_F16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

typedef struct task {
    float *sums;         /* [n_tokens][n_tiles * 16] */
    int64_t stride;      /* of sums */
    const uint8_t *tile; /* at the first column */
    int64_t tile_bytes, n_cols;
    const float *x; /* [n_cols][n_tokens] */
    bool asks_twice;
} task;

/* Bytes; each of the tiles is a stream of its own. Where AMX is, L2 is asked before, so much farther (why:
 * linear_vnni.c). */
enum { AHEAD = 1024, FARTHER = 2048 };

/* One partial sum. */
INLINE void columns(const task *k, int64_t begin, int64_t end, const int n_tiles, const int n_tokens,
                    const bool twice, const paged__weight_type type) {
    __m512 acc[4][PAGED__ACT_GROUP];
    UNROLL for (int t = 0; t < n_tokens; t++) {
        UNROLL for (int r = 0; r < n_tiles; r++) acc[r][t] = _mm512_setzero_ps();
    }
    const uint8_t *tile = k->tile;
    const float *x = k->x + begin * n_tokens;
    for (int64_t c = begin; c < end; c++, x += n_tokens) {
        __m512 w[4];
        UNROLL for (int r = 0; r < n_tiles; r++) {
            const uint8_t *from = tile + r * k->tile_bytes;
            w[r] = column(from, c, type);
            const uintptr_t ahead = (uintptr_t)from + (size_t)(c * paged__float_bytes(type) * 16 + AHEAD);
            _mm_prefetch((const char *)ahead, _MM_HINT_T0);    /* maybe behind the last weight */
            if (twice && (type == PAGED__W_F32 || c % 2 == 0)) /* once a line */
                _mm_prefetch((const char *)(ahead + FARTHER), _MM_HINT_T1);
        }
        UNROLL for (int t = 0; t < n_tokens; t++) {
            const __m512 xt = _mm512_set1_ps(x[t]);
            UNROLL for (int r = 0; r < n_tiles; r++) acc[r][t] = _mm512_fmadd_ps(w[r], xt, acc[r][t]);
        }
    }
    UNROLL for (int t = 0; t < n_tokens; t++) {
        UNROLL for (int r = 0; r < n_tiles; r++) {
            float *sum = k->sums + t * k->stride + r * 16;
            _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), acc[r][t]));
        }
    }
}

INLINE void all_columns(const task *k, const int n_tiles, const int n_tokens, const bool twice,
                        const paged__weight_type type) {
    for (int64_t c = 0; c < k->n_cols; c += PAGED__FLOAT_BLOCK)
        columns(k, c, PAGED_MIN(c + PAGED__FLOAT_BLOCK, k->n_cols), n_tiles, n_tokens, twice, type);
}

#define SHAPE(type, tiles, tokens)                                                                           \
    static void columns_##type##_##tiles##_##tokens(const task *k) {                                         \
        if (k->asks_twice)                                                                                   \
            all_columns(k, tiles, tokens, true, PAGED__W_##type);                                            \
        else                                                                                                 \
            all_columns(k, tiles, tokens, false, PAGED__W_##type);                                           \
    }
#define SHAPES(type, tiles)                                                                                  \
    SHAPE(type, tiles, 1)                                                                                    \
    SHAPE(type, tiles, 2)                                                                                    \
    SHAPE(type, tiles, 3)                                                                                    \
    SHAPE(type, tiles, 4)                                                                                    \
    SHAPE(type, tiles, 5)                                                                                    \
    SHAPE(type, tiles, 6)
#define LIST(type, tiles)                                                                                    \
    {                                                                                                        \
        columns_##type##_##tiles##_1, columns_##type##_##tiles##_2, columns_##type##_##tiles##_3,            \
            columns_##type##_##tiles##_4, columns_##type##_##tiles##_5, columns_##type##_##tiles##_6         \
    }

SHAPES(F32, 1)
SHAPES(F32, 4)
SHAPES(F16, 1)
SHAPES(F16, 4)
SHAPES(BF16, 1)
SHAPES(BF16, 4)

/* [type][4 tiles, else 1][n_tokens - 1] */
static void (*const shapes[3][2][PAGED__ACT_GROUP])(const task *k) = {
    [PAGED__W_F32] = {LIST(F32, 1), LIST(F32, 4)},
    [PAGED__W_F16] = {LIST(F16, 1), LIST(F16, 4)},
    [PAGED__W_BF16] = {LIST(BF16, 1), LIST(BF16, 4)},
};

void paged__vnni_float_sums(float *out, const paged__matrix *w, const uint8_t *tile, int32_t n_tiles,
                            const paged__act *x, int32_t token0, int32_t n_tokens) {
    const int64_t stride = n_tiles * PAGED__ROW_TILE, column_bytes = 16 * paged__float_bytes(w->type);
    const int32_t step = n_tiles == 4 ? 4 : 1;
    memset(out, 0, (size_t)(n_tokens * stride) * sizeof *out);
    for (int64_t c = 0; c < w->n_cols; c += PAGED__PANEL_COLS)
        for (int32_t t = 0, width = 0; t < n_tokens; t += width) {
            const paged__group group = paged__group_of(x, token0 + t);
            width = group.width;
            PAGED_ASSERT(width <= PAGED__ACT_GROUP);
            for (int32_t r = 0; r < n_tiles; r += step) {
                const task k = {.sums = out + t * stride + r * 16,
                                .stride = stride,
                                .tile = tile + r * (int64_t)w->tile_bytes + c * column_bytes,
                                .tile_bytes = (int64_t)w->tile_bytes,
                                .n_cols = PAGED_MIN(PAGED__PANEL_COLS, w->n_cols - c),
                                .x = paged__group_floats(x, group) + c * width,
                                .asks_twice = (paged_cpu_flags() & PAGED_CPU_AMX) != 0};
                shapes[w->type][step == 4][width - 1](&k);
            }
        }
}
