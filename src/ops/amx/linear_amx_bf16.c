/* linear_amx_bf16.c: quantised linear layers for AMX by products of bf16, for large models and those that are
 * told so (`linear` of paged_model_config). See linear_kernels.h for the packed weights.
 *
 * Tiles cannot scale a block's sums, and taking them out to do it costs more than the product (linear_amx.c).
 * Here weights are scaled before they are multiplied, and an output is one sum over all columns in a tile:
 *
 *     w   = d * q + m in f16, once for 16 rows × 2 columns, then rounded to bf16
 *     x   rounded to bf16
 *     y   = sum of w * x by TDPBF16PS over ascending blocks of 32 columns
 *
 * Both roundings are of 2^-8 at most, finer than the 127 steps a block of the other kernels (and ggml's).
 * Those of d, m and w to f16 are of 2^-11, but plain types (is_plain) come as 16 + u: theirs are 2^-11 of up
 * to 31 d and of what makes up for the 16, so even a weight of 0 is not exact. The bits of an output are its
 * own whatever the batch, but not those of the other kernels.
 *
 * From f16 to bf16: VPMULHRSW by 4096 shifts right by three and rounds, and then the three bits below the
 * sign, copies of it, are cleared. What remains has the exponent of f16 in the field of bf16, so it is the
 * weight times 2^-112. To keep away from the ends of both formats, a row's weights are multiplied by a power
 * of two first (the tile's factors), activations by 2^56, and sums at last by what gives one altogether. So
 * the ends are: products of |x| below about 1e-23 come to nothing, since tiles take denormals for zero, and
 * |x| above 4.7e21 is infinite, which makes its token NaN. A row whose d or m is no number is NaN.
 *
 * A matrix of weights as TDPBF16PS wants it has 16 lines, each a pair of columns of all 16 rows. A word of
 * packed nibbles has columns of four lines, so columns pass in the order of pairs_of_lines; activations are
 * stored in that order.
 *
 * Few tokens multiply weights as they are unpacked, the next while tiles are at work. For many a strip of two
 * tiles × up to 576 columns is unpacked into L1, and the activations of these columns, which the first strip
 * brings into L2, serve up to eight strips.
 */
#include "ops/amx/tiles.h"
#include "ops/linear_vnni.h"

enum {
    TILES = 2,          /* of rows, side by side in a matrix */
    GROUPS = 2,         /* of tokens, at once */
    LINE = 64,          /* bytes */
    MATRIX = 16 * LINE, /* a block of weights or, at most, of activations */
    PANEL_BLOCKS = 18,  /* with two tiles of rows 36 KiB, for L1 */
    AHEAD = 4096,       /* bytes of weights that few tokens ask for before they use them, … */
    AHEAD_TILE = 320,   /* … so many of them with a block of a tile */
    X_EXPONENT = 56,
    F16_TO_BF16 = 112 /* of the biases of their exponents */
};

/* ---- activations: [groups][n_blocks][tokens of the group][32] bf16 ---- */

/* Line p of four vectors i, nibble t: p = 4 i + t. */
#define PAIRS(i)                                                                                             \
    4 * (i), 4 * (i) + 2, 16 + 4 * (i), 16 + 4 * (i) + 2, 4 * (i) + 1, 4 * (i) + 3, 16 + 4 * (i) + 1,        \
        16 + 4 * (i) + 3
static const _Alignas(64) uint16_t pairs_of_lines[PAGED__ACT_BLOCK] = {PAIRS(0), PAIRS(1), PAIRS(2),
                                                                       PAIRS(3)};

/* A block that holds NaN, or what is infinite here, is all NaN, and so are its token's outputs. */
INLINE void put_block(uint8_t *out, __m512 first, __m512 second) {
    const __m512 up = _mm512_set1_ps(0x1p56f);
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    const __m512i x = (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(second, up), _mm512_mul_ps(first, up));
    const __mmask32 bad = _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
    _mm512_store_si512(out, bad ? _mm512_set1_epi16(0x7fc0)
                                : _mm512_permutexvar_epi16(_mm512_load_si512(pairs_of_lines), x));
}

#define PAGED__PUT_BLOCK(act, group, inside, block, x)                                                       \
    put_block((act)->data + ((int64_t)(group).first * paged__act_blocks((act)->n_cols) +                     \
                             (int64_t)(block) * (group).width + (inside)) *                                  \
                                LINE,                                                                        \
              (__m512)(x)[0], (__m512)(x)[1])
#include "ops/linear_lanes.h"

/* ---- weights ---- */

/* 16 numbers, each for both columns of a line. */
INLINE __m512h for_line(__m512 x) {
    const __m512i twice = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7,
                                           6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    const __m256i halves = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (__m512h)_mm512_permutexvar_epi16(twice, _mm512_castsi256_si512(halves));
}

/* What the low five bits of a word stand for; IQ4_NL has its four bits twice. Others that have no high bits
 * need none. */
INLINE __m512h table_of(const paged__weight_type type) {
    int16_t q[32];
    for (int i = 0; i < 32; i++)
        q[i] = (int16_t)(type == PAGED__W_IQ4_NL ? paged__iq4_nl[i % 16] - 128
                                                 : i - (paged__has_min(type) ? 0 : 16));
    return _mm512_cvtepi16_ph(_mm512_loadu_si512(q));
}

/* Types of four bits come as 16 + u, an integer put into the number 16, and m makes up for it. */
INLINE bool is_plain(const paged__weight_type type) {
    return (type == PAGED__W_Q4_0) | (type == PAGED__W_Q4_1) | (type == PAGED__W_Q4_K);
}
INLINE float plain_offset(const paged__weight_type type) {
    return type == PAGED__W_Q4_0 ? 16 + 8 : 16;
}

/* Words shifted right by n, or left by -n. */
typedef uint16_t words __attribute__((vector_size(64)));
INLINE __m512i shifted(__m512i x, const int n) {
    return n >= 0 ? (__m512i)((words)x >> n) : (__m512i)((words)x << -n);
}
/* mask ? a : b */
#define SELECT(mask, a, b)    _mm512_ternarylogic_epi32(_mm512_set1_epi16(mask), a, b, 0xca)
#define AND_OR(a, mask, more) _mm512_ternarylogic_epi32(a, _mm512_set1_epi16(mask), more, 0xea)

/* Line 4 i + t of a block as f16: u - zero, or 16 + u (is_plain). */
INLINE __m512h line_of(const uint8_t *block, const int i, const int t, const __m512h table,
                       const paged__weight_type type) {
    const uint8_t *q = block + paged__high_bytes(type);
    const __m512i magic = _mm512_set1_epi16(0x6400); /* f16 of 1024, with room for an integer */
    if (type == PAGED__W_Q8_0) {
        const __m512i two = _mm512_load_si512(q + (t % 2 * 4 + i) * 64);
        return _mm512_sub_ph((__m512h)AND_OR(shifted(two, t / 2 * 8), 255, magic),
                             (__m512h)_mm512_set1_epi16(0x6400 + 128));
    }
    const __m512i low = shifted(_mm512_load_si512(q + i * 64), 4 * t);
    if (is_plain(type)) {
        const __m512i high = shifted(_mm512_load_si512(q + i * 64), 4 * t - 6);
        return (__m512h)AND_OR(high, 15 << 6, _mm512_set1_epi16(0x4c00)); /* f16 of 16 */
    }
    if (paged__high_bytes(type) == 0) return (__m512h)_mm512_permutexvar_epi16(low, (__m512i)table);
    const bool pairs = paged__high_bytes(type) == 128;
    const __m512i all = _mm512_load_si512(block + (pairs ? t % 2 * 64 : 0));
    const __m512i high = shifted(all, (pairs ? 2 * i + t / 2 * 8 : 4 * t + i) - 4);
    if (!pairs) return (__m512h)_mm512_permutexvar_epi16(SELECT(15, low, high), (__m512i)table);
    return _mm512_sub_ph((__m512h)AND_OR(low, 15, AND_OR(high, 48, magic)),
                         (__m512h)_mm512_set1_epi16(0x6400 + 32));
}

/* What is added to a block's products with d: m, less the offset of plain types. */
INLINE __m512 addend_of(const uint8_t *unit, int64_t b, const paged__weight_type type) {
    const __m512 m = paged__has_min(type) ? min_of(unit, b, type) : _mm512_setzero_ps();
    if (!is_plain(type)) return m;
    return _mm512_fnmadd_ps(_mm512_set1_ps(plain_offset(type)), scale_of(unit, b, 0, type), m);
}

/* Block b of a unit as 16 lines of bf16; up: the rows' factors; ahead: asked for meanwhile, unless 0. */
INLINE void unpack_block(uint8_t *to, const uint8_t *unit, int64_t b, __m512 up, const __m512h table,
                         uintptr_t ahead, const paged__weight_type type) {
    const uint8_t *block = block_of(unit, b, type);
    const bool adds = paged__has_min(type) || is_plain(type);
    const __m512i eighth = _mm512_set1_epi16(4096), mask = _mm512_set1_epi16((int16_t)0x8fff);
    const __m512h d = for_line(_mm512_mul_ps(scale_of(unit, b, 0, type), up));
    const __m512h d_second =
        type == PAGED__W_Q6_K ? for_line(_mm512_mul_ps(scale_of(unit, b, 1, type), up)) : d;
    const __m512h m = adds ? for_line(_mm512_mul_ps(addend_of(unit, b, type), up)) : _mm512_setzero_ph();
    UNROLL for (int line = 0; line < 16; line++) {
        if (ahead && line % 3 == 0 && line / 3 * LINE < AHEAD_TILE)
            _mm_prefetch((const char *)ahead + line / 3 * LINE, _MM_HINT_T0);
        const __m512h q = line_of(block, line / 4, line % 4, table, type), scale = line % 2 ? d_second : d;
        const __m512h w = adds ? _mm512_fmadd_ph(q, scale, m) : _mm512_mul_ph(q, scale);
        _mm512_store_si512(to + line * LINE, _mm512_and_si512(_mm512_mulhrs_epi16((__m512i)w, eighth), mask));
    }
}

/* Two tiles of rows. */
typedef struct strip {
    const uint8_t *tile;
    const float *factors;
} strip;

/* Block b of both tiles. */
INLINE void unpack_both(uint8_t *to, const strip *from, int64_t b, const __m512h table, uintptr_t ahead,
                        const paged__weight_type type) {
    const int64_t n = paged__unit_blocks(type);
    const uint8_t *unit = from->tile + b / n * paged__unit_step(type);
    unpack_block(to, unit, b % n, _mm512_load_ps(from->factors), table, ahead, type);
    unpack_block(to + MATRIX, unit + paged__unit_bytes(type), b % n,
                 _mm512_load_ps(from->factors + PAGED__ROW_TILE), table, ahead ? ahead + AHEAD_TILE : 0,
                 type);
}

/* ---- products ---- */

/* Tiles 0 … 3: sums of two groups × two tiles of rows; 4, 5: activations; 6, 7: weights. */
static void configure(int32_t width0, int32_t width1) {
    const uint8_t a = (uint8_t)width0, b = (uint8_t)PAGED_MAX(width1, 1);
    const tile_shapes shapes = {
        .palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .n_rows = {a, a, b, b, a, b, 16, 16}};
    TILE_SHAPES_LOAD(shapes);
}

/* Two groups, or one if the second has no tokens. */
typedef struct task {
    float *sums[GROUPS]; /* rows `stride` floats apart */
    int64_t stride;
    const uint8_t *x[GROUPS]; /* of the groups, at the first of the blocks */
    int64_t x_step[GROUPS];   /* to the next block */
    bool two;
} task;

INLINE void sums_begin(const task *k, bool goes_on) {
    if (!goes_on) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
        return;
    }
    TILE_LOAD(0, k->sums[0], k->stride * 4);
    TILE_LOAD(1, k->sums[0] + PAGED__ROW_TILE, k->stride * 4);
    if (!k->two) return;
    TILE_LOAD(2, k->sums[1], k->stride * 4);
    TILE_LOAD(3, k->sums[1] + PAGED__ROW_TILE, k->stride * 4);
}

INLINE void sums_end(const task *k) {
    TILE_STORE(0, k->sums[0], k->stride * 4);
    TILE_STORE(1, k->sums[0] + PAGED__ROW_TILE, k->stride * 4);
    if (!k->two) return;
    TILE_STORE(2, k->sums[1], k->stride * 4);
    TILE_STORE(3, k->sums[1] + PAGED__ROW_TILE, k->stride * 4);
}

INLINE void multiply(task *k, const uint8_t *panel, int64_t n_blocks) {
    for (int64_t b = 0; b < n_blocks; b++, panel += TILES * MATRIX) {
        TILE_LOAD(4, k->x[0], LINE);
        TILE_LOAD(6, panel, LINE);
        TILE_DOT_BF16(0, 4, 6);
        TILE_LOAD(7, panel + MATRIX, LINE);
        TILE_DOT_BF16(1, 4, 7);
        k->x[0] += k->x_step[0];
        if (!k->two) continue;
        TILE_LOAD(5, k->x[1], LINE);
        TILE_DOT_BF16(2, 5, 6);
        TILE_DOT_BF16(3, 5, 7);
        k->x[1] += k->x_step[1];
    }
}

/* Up to two groups from token t on of a call's; how many tokens they are. */
static int32_t take_groups(task *k, float *out, const paged__act *x, int32_t token0, int32_t t, int32_t end,
                           int64_t block) {
    int32_t n = 0;
    k->two = false;
    for (int i = 0; i < GROUPS && t + n < end; i++) {
        const paged__group group = paged__group_of(x, token0 + t + n);
        k->sums[i] = out + (int64_t)(t + n) * k->stride;
        k->x_step[i] = (int64_t)group.width * LINE;
        k->x[i] = x->data + (int64_t)group.first * paged__act_blocks(x->n_cols) * LINE + block * k->x_step[i];
        k->two = i > 0;
        n += group.width;
    }
    return n;
}

static void configure_for(const task *k, int64_t *widths) {
    const int64_t now = k->x_step[0] * 64 + (k->two ? k->x_step[1] : 0);
    if (now == *widths) return;
    *widths = now;
    configure((int32_t)(k->x_step[0] / LINE), k->two ? (int32_t)(k->x_step[1] / LINE) : 0);
}

/* One or two groups: weights are multiplied as they are unpacked. While tiles multiply a block, vectors
 * unpack the next. */
INLINE void multiply_few(task *k, const strip *from, int64_t n_blocks, const paged__weight_type type) {
    const int64_t step = paged__unit_step(type) / paged__unit_blocks(type);
    _Alignas(64) uint8_t ring[2][TILES * MATRIX];
    const __m512h table = table_of(type);
    const uintptr_t ahead = (uintptr_t)from->tile + AHEAD;
    unpack_both(ring[0], from, 0, table, ahead, type);
    ROLLED for (int64_t b = 1; b < n_blocks; b++) {
        unpack_both(ring[b % 2], from, b, table, ahead + (uintptr_t)(b * step), type);
        multiply(k, ring[(b + 1) % 2], 1);
    }
    multiply(k, ring[(n_blocks + 1) % 2], 1);
}

/* Blocks b … of a panel. */
INLINE void unpack_panel(uint8_t *panel, const strip *from, int64_t b, int64_t n,
                         const paged__weight_type type) {
    const __m512h table = table_of(type);
    ROLLED for (int64_t i = 0; i < n; i++)
        unpack_both(panel + i * TILES * MATRIX, from, b + i, table, 0, type);
}

#define FUNCTIONS(type)                                                                                      \
    static void few_##type(task *k, const strip *from, int64_t n_blocks) {                                   \
        multiply_few(k, from, n_blocks, PAGED__W_##type);                                                    \
    }                                                                                                        \
    static void panel_##type(uint8_t *panel, const strip *from, int64_t b, int64_t n) {                      \
        unpack_panel(panel, from, b, n, PAGED__W_##type);                                                    \
    }
#define FORMATS(X) X(Q4_0) X(Q4_1) X(Q5_0) X(Q8_0) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_NL)
FORMATS(FUNCTIONS)

#define NAMES(type) [PAGED__W_##type] = {few_##type, panel_##type},
static const struct {
    void (*few)(task *k, const strip *from, int64_t n_blocks);
    void (*panel)(uint8_t *panel, const strip *from, int64_t b, int64_t n);
} functions[PAGED__N_WEIGHT_TYPES] = {FORMATS(NAMES)};

/* ---- all tokens of a call ---- */

/* From the sums' scale to that of outputs: a strip's rows of n_tokens, `stride` floats apart. */
INLINE void scale_sums(float *out, int64_t stride, const float *factors, int32_t n_tokens) {
    const __m512 up = _mm512_set1_ps(0x1p56f); /* F16_TO_BF16 - X_EXPONENT */
    const __m512 down[TILES] = {_mm512_div_ps(up, _mm512_load_ps(factors)),
                                _mm512_div_ps(up, _mm512_load_ps(factors + PAGED__ROW_TILE))};
    for (int32_t t = 0; t < n_tokens; t++, out += stride) UNROLL for (int i = 0; i < TILES; i++) {
            float *at = out + i * PAGED__ROW_TILE;
            _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), down[i]));
        }
}

static void few_sums(float *out, const paged__matrix *w, const strip *from, const paged__act *x,
                     int32_t token0, int32_t n_tokens, int64_t n_blocks) {
    int64_t widths = 0;
    task k = {.stride = TILES * PAGED__ROW_TILE};
    take_groups(&k, out, x, token0, 0, n_tokens, 0);
    configure_for(&k, &widths);
    sums_begin(&k, false);
    functions[w->type].few(&k, from, n_blocks);
    sums_end(&k);
    scale_sums(out, k.stride, from->factors, n_tokens);
}

/* Blocks b … b + n - 1 of a strip, all tokens; factors: with the last blocks, else NULL. */
static void panel_sums(float *out, int64_t stride, const uint8_t *panel, int64_t b, int64_t n,
                       const float *factors, const paged__act *x, int32_t token0, int32_t n_tokens) {
    int64_t widths = 0;
    task k = {.stride = stride};
    for (int32_t t = 0, here; t < n_tokens; t += here) {
        here = take_groups(&k, out, x, token0, t, n_tokens, b);
        configure_for(&k, &widths);
        sums_begin(&k, b > 0);
        multiply(&k, panel, n);
        sums_end(&k);
        if (factors) scale_sums(out + t * stride, stride, factors, here);
    }
}

/* Several strips, so that activations of some columns, brought into L2 by the first, serve all. */
static void many_sums(float *out, const paged__matrix *w, int32_t tile0, int32_t n_tiles, const paged__act *x,
                      int32_t token0, int32_t n_tokens, int64_t n_blocks) {
    _Alignas(64) uint8_t panel[PANEL_BLOCKS * TILES * MATRIX];
    const int64_t n_parts = (n_blocks + PANEL_BLOCKS - 1) / PANEL_BLOCKS,
                  part = (n_blocks + n_parts - 1) / n_parts;
    for (int64_t b = 0; b < n_blocks; b += part) {
        const int64_t n = PAGED_MIN(part, n_blocks - b);
        for (int32_t t = 0; t < n_tiles; t += TILES) {
            const strip from = {paged__tile_at(w, tile0 + t), paged__tile_factors(w, tile0 + t)};
            functions[w->type].panel(panel, &from, b, n);
            panel_sums(out + t * PAGED__ROW_TILE, n_tiles * PAGED__ROW_TILE, panel, b, n,
                       b + n == n_blocks ? from.factors : NULL, x, token0, n_tokens);
        }
    }
}

static void sums(float *out, const paged__matrix *w, int32_t tile0, int32_t n_tiles, const paged__act *x,
                 int32_t token0, int32_t n_tokens) {
    const strip from = {paged__tile_at(w, tile0), paged__tile_factors(w, tile0)};
    const int64_t n_blocks =
        (int64_t)w->tile_bytes / paged__unit_bytes(w->type) * paged__unit_blocks(w->type);
    if (n_tiles == TILES && n_tokens <= GROUPS * x->group)
        few_sums(out, w, &from, x, token0, n_tokens, n_blocks);
    else
        many_sums(out, w, tile0, n_tiles, x, token0, n_tokens, n_blocks);
    TILE_RELEASE();
}

const paged__linear_kernels_table paged__linear_amx_bf16 = {
    .name = "amx_bf16", .wide_tiles = true, .sums = sums, PAGED__LANES};
