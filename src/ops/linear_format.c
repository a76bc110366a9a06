/* linear_format.c: from GGUF's rows to packed tiles, and back. See linear_kernels.h for the tiles.
 *
 * Packing moves bits and never rounds, so that a packed matrix holds exactly the numbers of the file. Rows of
 * a tile are interleaved by 4 columns: a dword of the tile is 4 columns (8 nibbles of 4 columns and of those
 * 16 further) of one row. It runs at the speed of memory; the source may be unaligned.
 */
#include <math.h>

#include "ops/linear_kernels.h"

const uint8_t paged__iq4_nl[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

/* GGUF: columns and bytes of a block. */
static const struct {
    int32_t cols, bytes;
} gguf[PAGED__N_WEIGHT_TYPES] = {
    [PAGED__W_F32] = {1, 4},      [PAGED__W_F16] = {1, 2},      [PAGED__W_BF16] = {1, 2},
    [PAGED__W_Q4_0] = {32, 18},   [PAGED__W_Q4_1] = {32, 20},   [PAGED__W_Q5_0] = {32, 22},
    [PAGED__W_Q8_0] = {32, 34},   [PAGED__W_Q4_K] = {256, 144}, [PAGED__W_Q5_K] = {256, 176},
    [PAGED__W_Q6_K] = {256, 210}, [PAGED__W_IQ4_NL] = {32, 18},
};

bool paged__linear_supports(paged__weight_type type, int64_t n_rows, int64_t n_cols) {
    return (unsigned)type < PAGED__N_WEIGHT_TYPES && n_rows > 0 && n_cols > 0 && n_rows <= INT32_MAX - 31 &&
           n_cols <= INT32_MAX - 255 && n_cols % gguf[type].cols == 0;
}

bool paged__wants_quantised(paged__weight_type type) {
    return paged__is_quantised(type);
}

static int32_t n_units_of(paged__weight_type type, int32_t n_cols) {
    return paged__round_up(n_cols, paged__unit_blocks(type) * 32) / (paged__unit_blocks(type) * 32);
}

static int32_t n_tiles_of(paged__weight_type type, int32_t n_rows) {
    const int32_t side_by_side = paged__is_quantised(type) ? 2 : 1;
    return paged__round_up(n_rows, side_by_side * PAGED__ROW_TILE) / PAGED__ROW_TILE;
}

static size_t tile_bytes_of(paged__weight_type type, int32_t n_cols) {
    if (paged__is_quantised(type))
        return (size_t)n_units_of(type, n_cols) * (size_t)paged__unit_bytes(type) + PAGED__FACTOR_BYTES;
    const size_t bytes = (size_t)n_cols * PAGED__ROW_TILE * (size_t)paged__float_bytes(type);
    return (bytes + 63) & ~(size_t)63;
}

size_t paged__matrix_bytes(paged__weight_type type, int64_t n_rows, int64_t n_cols) {
    size_t bytes;
    if (!paged__linear_supports(type, n_rows, n_cols)) return 0;
    const size_t n_tiles = (size_t)n_tiles_of(type, (int32_t)n_rows);
    return paged__mul(n_tiles, tile_bytes_of(type, (int32_t)n_cols), &bytes) ? bytes : 0;
}

void paged__matrix_init(paged__matrix *w, paged__weight_type type, int32_t n_rows, int32_t n_cols,
                        uint8_t *data) {
    *w = (paged__matrix){.type = type,
                         .n_rows = n_rows,
                         .n_cols = n_cols,
                         .n_tiles = n_tiles_of(type, n_rows),
                         .data = data,
                         .tile_bytes = tile_bytes_of(type, n_cols)};
}

static uint16_t load16(const uint8_t *p) {
    uint16_t u;
    memcpy(&u, p, sizeof u);
    return u;
}
static uint32_t load32(const uint8_t *p) {
    uint32_t u;
    memcpy(&u, p, sizeof u);
    return u;
}
static void store16(uint8_t *p, uint32_t u) {
    const uint16_t h = (uint16_t)u;
    memcpy(p, &h, sizeof h);
}
/* Dword of row r in vector i. */
static void put(uint8_t *vectors, int i, int r, uint32_t u) {
    memcpy(vectors + i * 64 + r * 4, &u, sizeof u);
}

/* ---- packing: one row of one unit ---- */

/* Bits 4 i + c of the word -> bit i of byte c: an 8 × 4 bit matrix transposed. */
static uint32_t transpose_bits(uint32_t x) {
    uint32_t out = 0;
    for (int i = 0; i < 8; i++) {
        const uint32_t four = x >> (4 * i) & 15u;
        out |= (four * 0x00204081u & 0x01010101u) << i;
    }
    return out;
}

/* Formats of 32 columns a block; half: which of the unit's blocks. */
static void pack_simple(uint8_t *unit, int half, int r, const uint8_t *src, const paged__weight_type type) {
    uint8_t *high = unit + paged__head_bytes(type) + half * paged__block_bytes(type);
    uint8_t *quants = high + paged__high_bytes(type);
    store16(unit + half * 32 + r * 2, load16(src));
    src += 2;
    if (type == PAGED__W_Q4_1) {
        store16(unit + 64 + half * 32 + r * 2, load16(src));
        src += 2;
    }
    if (type == PAGED__W_Q5_0) {
        put(high, 0, r, transpose_bits(load32(src)));
        src += 4;
    }
    if (type == PAGED__W_Q8_0)
        for (int i = 0; i < 8; i++) put(quants, i, r, load32(src + i * 4) ^ 0x80808080u);
    else
        for (int i = 0; i < 4; i++) put(quants, i, r, load32(src + i * 4));
}

/* 6-bit scales and minima of Q4_K and Q5_K: block b < 4 in the low six bits of bytes b and b + 4; the others'
 * low nibbles in byte b + 4, and their high bits in what is left of the first eight. */
static void pack_k_scales(uint8_t *scales, int r, const uint8_t *src) {
    for (int b = 0; b < 8; b++) {
        const uint32_t s = b < 4 ? src[b] & 63u : (src[b + 4] & 15u) | (src[b - 4] >> 6 & 3u) << 4;
        const uint32_t m = b < 4 ? src[b + 4] & 63u : (uint32_t)src[b + 4] >> 4 | (src[b] >> 6 & 3u) << 4;
        scales[b * 32 + r] = (uint8_t)s;
        scales[b * 32 + 16 + r] = (uint8_t)m;
    }
}

/* Q4_K: d, dmin, scales[12], quants[128]; Q5_K has high bits [32] before the quants: bit b of byte j is that
 * of column j of block b. Quants: 4 runs of 32 bytes, the low nibbles one block, the high ones the next. */
static void pack_k45(uint8_t *unit, int r, const uint8_t *src, const paged__weight_type type) {
    const uint8_t *bits = src + 16, *nibbles = bits + (type == PAGED__W_Q5_K ? 32 : 0);
    store16(unit + r * 2, load16(src));
    store16(unit + 32 + r * 2, load16(src + 2) ^ 0x8000u);
    pack_k_scales(unit + 64, r, src + 4);
    for (int b = 0; b < 8; b++) {
        uint8_t *high = unit + paged__head_bytes(type) + b * paged__block_bytes(type);
        const int shift = b % 2 * 4;
        for (int i = 0; i < 4; i++) {
            const uint32_t first = load32(nibbles + b / 2 * 32 + i * 4) >> shift & 0x0f0f0f0fu;
            const uint32_t second = load32(nibbles + b / 2 * 32 + 16 + i * 4) >> shift & 0x0f0f0f0fu;
            put(high + paged__high_bytes(type), i, r, first | second << 4);
        }
        if (type != PAGED__W_Q5_K) continue;
        uint32_t all = 0;
        for (int i = 0; i < 8; i++) all |= (load32(bits + i * 4) >> b & 0x01010101u) << i;
        put(high, 0, r, all);
    }
}

/* Q6_K: low nibbles [128], high pairs of bits [64], scales i8[16], d. Each half of 128 columns has 64 bytes
 * of nibbles and 32 of pairs: its block k takes the nibbles of bytes 32 (k % 2) …, low ones for k < 2, and
 * the pairs at bit 2 k. */
static void pack_q6_k(uint8_t *unit, int r, const uint8_t *src) {
    const paged__weight_type type = PAGED__W_Q6_K;
    store16(unit + r * 2, load16(src + 208));
    store16(unit + 32 + r * 2, 0);
    for (int b = 0; b < 8; b++) {
        const uint8_t *nibbles = src + b / 4 * 64 + b % 2 * 32, *pairs = src + 128 + b / 4 * 32;
        uint8_t *high = unit + paged__head_bytes(type) + b * paged__block_bytes(type);
        const int shift = b % 4 / 2 * 4;
        uint32_t fields[2] = {0, 0};
        for (int i = 0; i < 4; i++) {
            const uint32_t first = load32(nibbles + i * 4) >> shift & 0x0f0f0f0fu;
            const uint32_t second = load32(nibbles + 16 + i * 4) >> shift & 0x0f0f0f0fu;
            put(high + paged__high_bytes(type), i, r, first | second << 4);
            fields[0] |= (load32(pairs + i * 4) >> (b % 4 * 2) & 0x03030303u) << (2 * i);
            fields[1] |= (load32(pairs + 16 + i * 4) >> (b % 4 * 2) & 0x03030303u) << (2 * i);
        }
        put(high, 0, r, fields[0]);
        put(high, 1, r, fields[1]);
        unit[64 + b * 32 + r] = src[192 + b * 2];
        unit[64 + b * 32 + 16 + r] = src[192 + b * 2 + 1];
    }
}

static void pack_tile(const paged__matrix *w, uint8_t *tile, const uint8_t *rows, size_t row_bytes,
                      int32_t n_rows) {
    const paged__weight_type type = w->type;
    const int32_t n_blocks = w->n_cols / gguf[type].cols;
    const bool is_k = paged__is_k(type);
    for (int32_t b = 0; b < n_blocks; b++) {
        uint8_t *unit = tile + (size_t)(is_k ? b : b / 2) * (size_t)paged__unit_step(type);
        for (int32_t r = 0; r < n_rows; r++) {
            const uint8_t *src = rows + (size_t)r * row_bytes + (size_t)b * (size_t)gguf[type].bytes;
            switch (type) {
            case PAGED__W_Q4_1:
                pack_simple(unit, b % 2, r, src, PAGED__W_Q4_1);
                break;
            case PAGED__W_Q5_0:
                pack_simple(unit, b % 2, r, src, PAGED__W_Q5_0);
                break;
            case PAGED__W_Q8_0:
                pack_simple(unit, b % 2, r, src, PAGED__W_Q8_0);
                break;
            case PAGED__W_Q4_K:
                pack_k45(unit, r, src, PAGED__W_Q4_K);
                break;
            case PAGED__W_Q5_K:
                pack_k45(unit, r, src, PAGED__W_Q5_K);
                break;
            case PAGED__W_Q6_K:
                pack_q6_k(unit, r, src);
                break;
            default:
                pack_simple(unit, b % 2, r, src, PAGED__W_Q4_0); /* IQ4_NL too */
                break;
            }
        }
    }
}

/* A power of two for each row, by which none of its weights reaches 2^15: products in f16 then do not
 * overflow, and weights down to 2^-28 of the largest are not lost. Seen from the largest d and m alone, so it
 * may be less than it could. At most 2^15, which f16 has, and which makes the smallest d a normal number. NaN
 * for a row that has NaN or an infinity. */
static void pack_tile_factors(const paged__matrix *w, int32_t t) {
    const paged__weight_type type = w->type;
    const uint8_t *unit = paged__tile_at(w, t);
    const bool is_k = paged__is_k(type);
    uint16_t most[2][PAGED__ROW_TILE] = {{0}}; /* without signs, f16 are ordered as integers */
    for (int32_t u = 0; u < n_units_of(type, w->n_cols); u++, unit += paged__unit_step(type))
        for (int i = 0; i < paged__head_bytes(type) / 32 && i < (is_k ? 2 : 4); i++) {
            uint16_t *of = most[is_k ? i : i / 2];
            for (int r = 0; r < PAGED__ROW_TILE; r++)
                of[r] = PAGED_MAX(of[r], (uint16_t)(load16(unit + i * 32 + r * 2) & 0x7fffu));
        }
    const float scale = type == PAGED__W_Q6_K ? 128 : is_k ? 63 : 1;
    const float range = type == PAGED__W_Q8_0 || type == PAGED__W_IQ4_NL ? 128 : 32;
    float *factors = paged__tile_factors(w, t);
    for (int r = 0; r < PAGED__ROW_TILE; r++) {
        const float bound =
            paged__f16_to_f32(most[0][r]) * scale * range + paged__f16_to_f32(most[1][r]) * scale;
        int exponent = 15;
        if (bound > 0 && isfinite(bound)) (void)frexpf(bound, &exponent);
        factors[r] = isfinite(bound) ? ldexpf(1.0f, PAGED_MIN(15 - exponent, 15)) : NAN;
    }
}

static void pack_float_tile(const paged__matrix *w, uint8_t *tile, const uint8_t *rows, size_t row_bytes,
                            int32_t n_rows) {
    for (int64_t k = 0; k < w->n_cols; k++)
        for (int32_t r = 0; r < n_rows; r++) {
            const uint8_t *src = rows + (size_t)r * row_bytes;
            if (w->type == PAGED__W_F32)
                memcpy(tile + (k * 16 + r) * 4, src + k * 4, 4);
            else
                memcpy(tile + (k * 16 + r) * 2, src + k * 2, 2);
        }
}

static void clear_tile(const paged__matrix *w, uint8_t *tile) {
    if (!paged__is_quantised(w->type)) {
        memset(tile, 0, w->tile_bytes);
        return;
    }
    for (int32_t u = 0; u < n_units_of(w->type, w->n_cols); u++)
        memset(tile + (size_t)u * (size_t)paged__unit_step(w->type), 0, (size_t)paged__unit_bytes(w->type));
}

void paged__matrix_pack(const paged__matrix *w, const void *rows, size_t row_bytes, int32_t ith,
                        int32_t nth) {
    const int32_t begin = (int32_t)((int64_t)w->n_tiles * ith / nth);
    const int32_t end = (int32_t)((int64_t)w->n_tiles * (ith + 1) / nth);
    const int32_t unit_cols = paged__unit_blocks(w->type) * PAGED__ACT_BLOCK;
    for (int32_t t = begin; t < end; t++) {
        uint8_t *tile = w->data + (paged__tile_at(w, t) - w->data);
        const uint8_t *src = (const uint8_t *)rows + (size_t)t * PAGED__ROW_TILE * row_bytes;
        const int32_t n_rows = PAGED_MIN(PAGED__ROW_TILE, w->n_rows - t * PAGED__ROW_TILE);
        if (n_rows < PAGED__ROW_TILE || w->n_cols % unit_cols != 0) clear_tile(w, tile);
        if (n_rows > 0)
            (paged__is_quantised(w->type) ? pack_tile : pack_float_tile)(w, tile, src, row_bytes, n_rows);
        if (paged__is_quantised(w->type)) pack_tile_factors(w, t);
    }
}

/* ---- and back ---- */

/* Column j of row r. */
static uint32_t quant_at(const uint8_t *block, int r, int j, paged__weight_type type) {
    const uint8_t *quants = block + paged__high_bytes(type);
    if (type == PAGED__W_Q8_0) return quants[j / 4 * 64 + r * 4 + j % 4];
    const uint32_t low = quants[j % 16 / 4 * 64 + r * 4 + j % 4] >> (j / 16 * 4) & 15u;
    if (type == PAGED__W_IQ4_NL) return paged__iq4_nl[low];
    if (paged__high_bytes(type) == 64) return low | (block[r * 4 + j % 4] >> (j / 4) & 1u) << 4;
    if (paged__high_bytes(type) == 128)
        return low | (block[j / 16 * 64 + r * 4 + j % 4] >> (j % 16 / 4 * 2) & 3u) << 4;
    return low;
}

void paged__row_block_read(const paged__matrix *w, int32_t row, int32_t block, paged__row_block *out) {
    const paged__weight_type type = w->type;
    const int n = paged__unit_blocks(type), b = block % n, r = row % PAGED__ROW_TILE;
    const uint8_t *tile = paged__tile_at(w, row / PAGED__ROW_TILE);
    const uint8_t *unit = tile + (size_t)(block / n) * (size_t)paged__unit_step(type);
    const uint8_t *quants = unit + paged__head_bytes(type) + b * paged__block_bytes(type);
    const uint8_t *scales = unit + 64 + b * 32;
    for (int j = 0; j < PAGED__ACT_BLOCK; j++) out->u[j] = (uint8_t)quant_at(quants, r, j, type);
    out->zero = paged__has_min(type) ? 0 : 1 << paged__zero_shift(type);
    out->m = 0;
    if (!paged__is_k(type)) {
        out->d[0] = out->d[1] = paged__f16_to_f32(load16(unit + b * 32 + r * 2));
        if (type == PAGED__W_Q4_1) out->m = paged__f16_to_f32(load16(scales + r * 2));
        return;
    }
    const float d = paged__f16_to_f32(load16(unit + r * 2));
    const bool is_q6 = type == PAGED__W_Q6_K;
    out->d[0] = d * (is_q6 ? (float)(int8_t)scales[r] : (float)scales[r]);
    out->d[1] = is_q6 ? d * (float)(int8_t)scales[16 + r] : out->d[0];
    if (!is_q6) out->m = paged__f16_to_f32(load16(unit + 32 + r * 2)) * (float)scales[16 + r];
}

static float float_at(const uint8_t *tile, int64_t e, paged__weight_type type) {
    float f;
    memcpy(&f, tile + e * 4 * (type == PAGED__W_F32), sizeof f);
    if (type == PAGED__W_F32) return f;
    const uint16_t h = load16(tile + e * 2);
    return type == PAGED__W_F16 ? paged__f16_to_f32(h) : paged__bf16_to_f32(h);
}

void paged__matrix_row(const paged__matrix *w, int32_t row, float *out) {
    const int32_t tile = row / PAGED__ROW_TILE, r = row % PAGED__ROW_TILE;
    if (!paged__is_quantised(w->type)) {
        for (int64_t k = 0; k < w->n_cols; k++)
            out[k] = float_at(paged__tile_at(w, tile), k * 16 + r, w->type);
        return;
    }
    paged__row_block block;
    for (int32_t b = 0; b < w->n_cols / PAGED__ACT_BLOCK; b++) {
        paged__row_block_read(w, row, b, &block);
        for (int j = 0; j < PAGED__ACT_BLOCK; j++)
            out[b * PAGED__ACT_BLOCK + j] =
                block.d[j / 16] * (float)((int32_t)block.u[j] - block.zero) + block.m;
    }
}
