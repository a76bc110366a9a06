/* linear_amx_bf16.c: quantised linear layers for AMX by products of bf16, for models that are told so
 * (`linear` of paged_model_config). See linear_kernels.h for the packed weights.
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
 * the ends are: |x| above 4.7e21 is infinite, which makes its token NaN; and since tiles take denormals for
 * zero, weights below 2^-14 by the factor, and products below 2^-70 by it, come to nothing. The factor is
 * 2^15 for rows whose weights are below one. A row whose d or m is no number is NaN.
 *
 * A matrix of weights as TDPBF16PS wants it has 16 lines, each a pair of columns of all 16 rows. A word of
 * packed nibbles has columns of four lines, so columns pass in the order of pairs_of_lines; activations are
 * stored in that order.
 *
 * Few tokens multiply weights as they are unpacked, the next while tiles are at work. For many a strip of two
 * tiles × up to 320 columns is unpacked into a panel. Two groups' activations of these columns, which come
 * from L2, are as large, and both stay in L1: with larger panels a product reads both its sides from L2, and
 * that is slower than to take sums out of their tiles and in again between panels. Activations that the first
 * strip brings into L2 serve up to eight strips; outputs are made of the last sums while they are in L1.
 *
 * While tiles are at work the processor has one unit for multiplications (and shifts) of vectors instead of
 * two, so unpacking does with few of them.
 */
#include "ops/amx/tiles.h"
#include "ops/linear_vnni.h"

enum {
    TILES = 2, /* of rows, side by side in a matrix, … */
    STRIP = TILES * PAGED__ROW_TILE,
    GROUPS = 2,         /* of tokens, at once */
    LINE = 64,          /* bytes */
    MATRIX = 16 * LINE, /* a block of weights or, at most, of activations */
    PANEL_BLOCKS = 10,  /* with two tiles of rows 20 KiB, and as much of activations: both in L1 */
    AHEAD = 3072,       /* bytes of weights that few tokens ask for before they use them, … */
    FARTHER = 3072,     /* … after they asked L2 for them so much before (see linear_vnni.c), … */
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

/* 16 numbers of f16, each for both columns of a line. */
INLINE __m512h for_line(__m256i f16s) {
    const __m512i twice = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7,
                                           6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    return (__m512h)_mm512_permutexvar_epi16(twice, _mm512_castsi256_si512(f16s));
}
INLINE __m512h f16s_for_line(const uint8_t *at) {
    return for_line(_mm256_load_si256((const __m256i *)(const void *)at));
}
/* The same of bytes. */
INLINE __m512h bytes_for_line(const uint8_t *at, const bool has_sign) {
    const __m128i bytes = _mm_load_si128((const __m128i *)(const void *)at);
    if (has_sign) return for_line((__m256i)_mm256_cvtepi16_ph(_mm256_cvtepi8_epi16(bytes)));
    return for_line((__m256i)_mm256_cvtepu16_ph(_mm256_cvtepu8_epi16(bytes)));
}

/* The factors of a tile's rows, each for a line. */
INLINE __m512h factors_for_line(const float *factors) {
    return for_line(_mm512_cvtps_ph(_mm512_load_ps(factors), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
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
/* What is too much of a quant of a plain type, as f16: 16, and of Q4_0 8 more. */
INLINE __m512h plain_offset(const paged__weight_type type) {
    return (__m512h)_mm512_set1_epi16(type == PAGED__W_Q4_0 ? 0x4e00 : 0x4c00);
}

/* Words shifted right by n, or left by -n. */
typedef uint16_t words __attribute__((vector_size(64)));
INLINE __m512i shifted(__m512i x, const int n) {
    return n >= 0 ? (__m512i)((words)x >> n) : (__m512i)((words)x << -n);
}
/* mask ? a : b */
#define SELECT(mask, a, b)    _mm512_ternarylogic_epi32(_mm512_set1_epi16(mask), a, b, 0xca)
#define AND_OR(a, mask, more) _mm512_ternarylogic_epi32(a, _mm512_set1_epi16(mask), more, 0xea)

/* `block` shifted right by six, by another unit than that of shifts, which products share. */
INLINE __m512i shifted_by_bytes(const uint8_t *block) {
    const __m512i from = _mm512_set1_epi64(0x3e362e261e160e06);
    return _mm512_multishift_epi64_epi8(from, _mm512_load_si512(block));
}

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
        const __m512i high =
            t == 3 ? shifted_by_bytes(q + i * 64) : shifted(_mm512_load_si512(q + i * 64), 4 * t - 6);
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

/* d of half `half` of a block, m, and what is added to products with d: m, less the offset of plain types.
 * All times `up`, the rows' factors. Of K-quants d and dmin are multiplied by them first, which is exact
 * but where the factor is below one. */
INLINE __m512h scale_for_line(const uint8_t *unit, int64_t b, const int half, __m512h up,
                              const paged__weight_type type) {
    if (!paged__is_k(type)) return _mm512_mul_ph(f16s_for_line(unit + b * 32), up);
    return _mm512_mul_ph(_mm512_mul_ph(f16s_for_line(unit), up),
                         bytes_for_line(unit + 64 + b * 32 + half * 16, type == PAGED__W_Q6_K));
}
INLINE __m512h min_for_line(const uint8_t *unit, int64_t b, __m512h up, const paged__weight_type type) {
    if (!paged__is_k(type)) return _mm512_mul_ph(f16s_for_line(unit + 64 + b * 32), up);
    return _mm512_mul_ph(_mm512_mul_ph(f16s_for_line(unit + 32), up),
                         bytes_for_line(unit + 64 + b * 32 + 16, false));
}
INLINE __m512h addend_for_line(const uint8_t *unit, int64_t b, __m512h up, __m512h d,
                               const paged__weight_type type) {
    const __m512h m = paged__has_min(type) ? min_for_line(unit, b, up, type) : _mm512_setzero_ph();
    return is_plain(type) ? _mm512_fnmadd_ph(d, plain_offset(type), m) : m;
}

/* Block b of a unit as 16 lines of bf16; up: the rows' factors; ahead: asked for meanwhile, unless 0. */
INLINE void unpack_block(uint8_t *to, const uint8_t *unit, int64_t b, __m512h up, const __m512h table,
                         uintptr_t ahead, const paged__weight_type type) {
    const uint8_t *block = block_of(unit, b, type);
    const bool adds = paged__has_min(type) || is_plain(type);
    const __m512i eighth = _mm512_set1_epi16(4096), mask = _mm512_set1_epi16((int16_t)0x8fff);
    const __m512h d = scale_for_line(unit, b, 0, up, type);
    const __m512h d_second = type == PAGED__W_Q6_K ? scale_for_line(unit, b, 1, up, type) : d;
    const __m512h m = adds ? addend_for_line(unit, b, up, d, type) : _mm512_setzero_ph();
    UNROLL for (int line = 0; line < 16; line++) {
        if (ahead && line % 3 == 0 && line / 3 * LINE < AHEAD_TILE) {
            const uintptr_t at = ahead + (uintptr_t)(line / 3 * LINE);
            _mm_prefetch((const char *)at, _MM_HINT_T0);
            _mm_prefetch((const char *)(at + FARTHER), _MM_HINT_T1);
        }
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

/* What all blocks of a strip want. */
typedef struct unpacker {
    __m512h up[TILES], table;
} unpacker;
INLINE unpacker unpacker_of(const strip *from, const paged__weight_type type) {
    return (unpacker){{factors_for_line(from->factors), factors_for_line(from->factors + PAGED__ROW_TILE)},
                      table_of(type)};
}

/* Block b of both tiles. */
INLINE void unpack_both(uint8_t *to, const strip *from, int64_t b, const unpacker *u, uintptr_t ahead,
                        const paged__weight_type type) {
    const int64_t n = paged__unit_blocks(type);
    const uint8_t *unit = from->tile + b / n * paged__unit_step(type);
    unpack_block(to, unit, b % n, u->up[0], u->table, ahead, type);
    unpack_block(to + MATRIX, unit + paged__unit_bytes(type), b % n, u->up[1], u->table,
                 ahead ? ahead + AHEAD_TILE : 0, type);
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
    float *sums[GROUPS];      /* of a group [tokens][STRIP] */
    const uint8_t *x[GROUPS]; /* of the groups, at the first of the blocks */
    int64_t x_step[GROUPS];   /* to the next block */
    bool two;
} task;

/* From what `before` has, if not NULL, in rows like those of k->sums. */
INLINE void sums_begin(const task *k, const float *before) {
    if (!before) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
        return;
    }
    TILE_LOAD(0, before, STRIP * 4);
    TILE_LOAD(1, before + PAGED__ROW_TILE, STRIP * 4);
    if (!k->two) return;
    before += k->sums[1] - k->sums[0];
    TILE_LOAD(2, before, STRIP * 4);
    TILE_LOAD(3, before + PAGED__ROW_TILE, STRIP * 4);
}

INLINE void sums_end(const task *k) {
    TILE_STORE(0, k->sums[0], STRIP * 4);
    TILE_STORE(1, k->sums[0] + PAGED__ROW_TILE, STRIP * 4);
    if (!k->two) return;
    TILE_STORE(2, k->sums[1], STRIP * 4);
    TILE_STORE(3, k->sums[1] + PAGED__ROW_TILE, STRIP * 4);
}

INLINE void multiply(task *k, const uint8_t *panel, int64_t n_blocks) {
    const uint8_t *x0 = k->x[0], *x1 = k->x[1];
    const int64_t step0 = k->x_step[0], step1 = k->x_step[1];
    const bool two = k->two;
    for (int64_t b = 0; b < n_blocks; b++, panel += TILES * MATRIX) {
        TILE_LOAD(4, x0, LINE);
        TILE_LOAD(6, panel, LINE);
        TILE_DOT_BF16(0, 4, 6);
        TILE_LOAD(7, panel + MATRIX, LINE);
        TILE_DOT_BF16(1, 4, 7);
        x0 += step0;
        if (!two) continue;
        TILE_LOAD(5, x1, LINE);
        TILE_DOT_BF16(2, 5, 6);
        TILE_DOT_BF16(3, 5, 7);
        x1 += step1;
    }
    k->x[0] = x0;
    k->x[1] = x1;
}

/* Up to two groups from token t on of a call's, whose sums go to `out`; how many tokens they are. */
static int32_t take_groups(task *k, float *out, const paged__act *x, int32_t token0, int32_t t, int32_t end,
                           int64_t block) {
    int32_t n = 0;
    k->two = false;
    for (int i = 0; i < GROUPS && t + n < end; i++) {
        const paged__group group = paged__group_of(x, token0 + t + n);
        k->sums[i] = out + (int64_t)n * STRIP;
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
    _Alignas(64) uint8_t ring[2][TILES * MATRIX];
    const unpacker u = unpacker_of(from, type);
    const int64_t step = paged__unit_step(type) / paged__unit_blocks(type);
    const uintptr_t ahead = (uintptr_t)from->tile + AHEAD;
    unpack_both(ring[0], from, 0, &u, ahead, type);
    ROLLED for (int64_t b = 1; b < n_blocks; b++) {
        unpack_both(ring[b % 2], from, b, &u, ahead + (uintptr_t)(b * step), type);
        multiply(k, ring[(b + 1) % 2], 1);
    }
    multiply(k, ring[(n_blocks + 1) % 2], 1);
}

/* Blocks b … of a panel. */
INLINE void unpack_panel(uint8_t *panel, const strip *from, int64_t b, int64_t n,
                         const paged__weight_type type) {
    const unpacker u = unpacker_of(from, type);
    ROLLED for (int64_t i = 0; i < n; i++) unpack_both(panel + i * TILES * MATRIX, from, b + i, &u, 0, type);
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

/* From the sums' scale to that of outputs: a strip's [n_tokens][STRIP]. */
INLINE void scale_sums(float *out, const float *factors, int32_t n_tokens) {
    const __m512 up = _mm512_set1_ps(0x1p56f); /* F16_TO_BF16 - X_EXPONENT */
    const __m512 down[TILES] = {_mm512_div_ps(up, _mm512_load_ps(factors)),
                                _mm512_div_ps(up, _mm512_load_ps(factors + PAGED__ROW_TILE))};
    for (int32_t t = 0; t < n_tokens; t++, out += STRIP) UNROLL for (int i = 0; i < TILES; i++) {
            float *at = out + i * PAGED__ROW_TILE;
            _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), down[i]));
        }
}

/* The rows of some tiles, of some tokens. */
typedef struct span {
    const paged__outcome *out;
    const paged__act *x;
    int32_t token0;
} span;

/* What becomes of the sums of a strip [n_tokens][STRIP] from token t on; gate: of a gated unit, or NULL. */
static void finish_strip(const span *s, int32_t strip_row, int32_t t, int32_t n_tokens, const float *gate,
                         const float *sums) {
    paged__outcome o = *s->out;
    o.n_tokens = n_tokens;
    o.n_rows = PAGED_MIN(o.n_rows - strip_row, (int32_t)STRIP);
    o.act_token += t;
    o.act_col += strip_row;
    o.stride = STRIP;
    o.sums = gate ? gate : sums;
    if (gate) {
        o.other = sums;
        o.other_stride = STRIP;
    } else if (o.other) {
        o.other += t * o.other_stride + strip_row;
    }
    if (o.bias) o.bias += strip_row;
    if (o.bias_other) o.bias_other += strip_row;
    if (!o.act) o.y += t * o.y_stride + strip_row;
    paged__finish(&o);
}

/* Rows of y are far apart, each a miss of its own; they come while tiles are at work. */
INLINE void fetch_outputs(const paged__outcome *o, int32_t strip_row, int32_t t, int32_t n_tokens) {
    if (o->act) return;
    const float *y = o->y + t * o->y_stride + strip_row;
    for (int32_t i = 0; i < n_tokens; i++, y += o->y_stride) {
        __builtin_prefetch(y, 1);
        __builtin_prefetch(y + 16, 1);
    }
}

/* What a panel is made of: blocks b … b + n - 1 of a strip of w. */
typedef struct piece {
    const paged__matrix *w;
    strip from;
    int64_t b, n;
    int32_t row;         /* of the span: the strip's first */
    bool is_up, is_last; /* w is `up`; no blocks of the strip come behind */
} piece;

typedef struct pieces {
    const paged__matrix *w, *up; /* up: or NULL */
    int32_t tile0, n_strips;
    int64_t n_blocks, part; /* of a piece, but a strip's last */
    int64_t n;              /* all */
} pieces;

/* Of up to `most` blocks. */
static pieces pieces_of(const paged__matrix *w, const paged__matrix *up, int32_t tile0, int32_t n_tiles,
                        int64_t most) {
    const int64_t n_blocks =
                      (int64_t)w->tile_bytes / paged__unit_bytes(w->type) * paged__unit_blocks(w->type),
                  n_parts = 1 + (n_blocks - 1) / most;
    return (pieces){w,
                    up,
                    tile0,
                    n_tiles / TILES,
                    n_blocks,
                    (n_blocks + n_parts - 1) / n_parts,
                    n_parts * (n_tiles / TILES) * (up ? 2 : 1)};
}

/* The i-th: first all of some columns, which share activations. */
static piece piece_at(const pieces *p, int64_t i) {
    const bool is_up = p->up && i % 2;
    const paged__matrix *w = is_up ? p->up : p->w;
    if (p->up) i /= 2;
    const int32_t tile = (int32_t)(i % p->n_strips) * TILES;
    const int64_t b = i / p->n_strips * p->part;
    return (piece){w,
                   {paged__tile_at(w, p->tile0 + tile), paged__tile_factors(w, p->tile0 + tile)},
                   b,
                   PAGED_MIN(p->part, p->n_blocks - b),
                   tile * PAGED__ROW_TILE,
                   is_up,
                   b + p->part >= p->n_blocks};
}

/* Packed weights that are wanted next, `each` lines of them with two groups of tokens. */
typedef struct coming {
    const uint8_t *at;
    int64_t n, each;
} coming;

static coming coming_of(const piece *p, int32_t n_times) {
    const int64_t unit_blocks = paged__unit_blocks(p->w->type), step = paged__unit_step(p->w->type);
    const int64_t first = p->b / unit_blocks, n = (p->b + p->n - 1) / unit_blocks + 1 - first;
    return (coming){p->from.tile + first * step, n * step / LINE, (n * step / LINE + n_times - 1) / n_times};
}

INLINE void fetch_weights(coming *c) {
    const int64_t n = PAGED_MIN(c->n, c->each);
    for (int64_t i = 0; i < n; i++) _mm_prefetch((const char *)c->at + i * LINE, _MM_HINT_T1);
    c->at += n * LINE;
    c->n -= n;
}

/* A piece, all tokens; sums [n_tokens][STRIP] of the blocks before, and then with these. With the last blocks
 * outputs are made, of a gated unit (gate: sums of the gate) when those of `up` are there. */
static void panel_pass(const span *s, float *sums, const float *gate, const uint8_t *panel, const piece *p,
                       bool ends, coming next, int64_t *widths) {
    _Alignas(64) float made[GROUPS * PAGED__AMX_GROUP * STRIP];
    const int32_t n_tokens = s->out->n_tokens;
    task k = {0};
    for (int32_t t = 0, here; t < n_tokens; t += here) {
        float *at = sums + (int64_t)t * STRIP;
        here = take_groups(&k, ends ? made : at, s->x, s->token0, t, n_tokens, p->b);
        configure_for(&k, widths);
        sums_begin(&k, p->b > 0 ? at : NULL);
        fetch_weights(&next);
        if (ends) fetch_outputs(s->out, p->row, t, here);
        multiply(&k, panel, p->n);
        sums_end(&k);
        if (p->is_last) scale_sums(k.sums[0], p->from.factors, here);
        if (ends) finish_strip(s, p->row, t, here, gate ? gate + (int64_t)t * STRIP : NULL, made);
    }
}

/* A strip after the other, all its columns. */
static void few(const span *s, const pieces *all) {
    _Alignas(64) float made[2][GROUPS * PAGED__AMX_GROUP * STRIP];
    const int32_t n_tokens = s->out->n_tokens;
    int64_t widths = 0;
    task k = {0};
    for (int64_t i = 0; i < all->n; i++) {
        const piece p = piece_at(all, i);
        take_groups(&k, made[p.is_up], s->x, s->token0, 0, n_tokens, 0);
        configure_for(&k, &widths);
        sums_begin(&k, NULL);
        functions[p.w->type].few(&k, &p.from, p.n);
        sums_end(&k);
        scale_sums(made[p.is_up], p.from.factors, n_tokens);
        if (p.is_up || !all->up) finish_strip(s, p.row, 0, n_tokens, p.is_up ? made[0] : NULL, made[p.is_up]);
    }
}

/* Several strips, so that activations of some columns, brought into L2 by the first, serve all. room: sums of
 * w, then of `up`, a strip after the other. */
static void many(const span *s, const pieces *all, float *room) {
    _Alignas(64) uint8_t panel[PANEL_BLOCKS * TILES * MATRIX];
    const int32_t at_once = GROUPS * s->x->group, n_times = (s->out->n_tokens + at_once - 1) / at_once;
    int64_t widths = 0;
    piece now = piece_at(all, 0), next;
    for (int64_t i = 0; i < all->n; i++, now = next) {
        float *sums = room + (int64_t)now.row * s->out->n_tokens;
        const float *gate = now.is_up ? sums : NULL;
        next = piece_at(all, PAGED_MIN(i + 1, all->n - 1));
        functions[now.w->type].panel(panel, &now.from, now.b, now.n);
        panel_pass(s, gate ? sums + PAGED__WIDE_SUMS_MAX : sums, gate, panel, &now,
                   now.is_last && (gate || !all->up), coming_of(&next, n_times), &widths);
    }
}

static void layer(const paged__outcome *out, const paged__matrix *w, const paged__matrix *up, int32_t tile0,
                  int32_t n_tiles, const paged__act *x, int32_t token0, float *room) {
    const span s = {out, x, token0};
    if (out->n_tokens <= GROUPS * x->group) {
        const pieces all = pieces_of(w, up, tile0, n_tiles, INT64_MAX);
        few(&s, &all);
    } else {
        const pieces all = pieces_of(w, up, tile0, n_tiles, PANEL_BLOCKS);
        many(&s, &all, room);
    }
    TILE_RELEASE();
}

const paged__linear_kernels_table paged__linear_amx_bf16 = {.name = "amx_bf16", .layer = layer, PAGED__LANES};
