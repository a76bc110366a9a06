/* linear_ref.c: linear layers in plain C, for every machine and as the plain statement of what the others
 * compute. The multiply-add must be fused, which libm does exactly even where the machine cannot. */
#include "ops/linear_lanes.h"

static void sum_block(float *sum, const paged__row_block *w, const paged__act_block *x, bool halves,
                      bool has_min) {
    for (int h = 0; h < (halves ? 2 : 1); h++) {
        const int begin = halves ? h * 16 : 0, end = halves ? begin + 16 : 32;
        int32_t dot = 0;
        for (int j = begin; j < end; j++) dot += ((int32_t)w->u[j] - w->zero) * x->q[j];
        *sum = fmaf((float)dot, w->d[h] * x->s, *sum);
    }
    if (has_min) *sum = fmaf(w->m, x->s_sum, *sum);
}

static void tile_quantised(float *sums, int32_t stride, const paged__matrix *w, int32_t tile,
                           const paged__act *x, int32_t token0, int32_t n_tokens) {
    const bool halves = w->type == PAGED__W_Q6_K, has_min = paged__has_min(w->type);
    const int32_t unit_cols = paged__unit_blocks(w->type) * PAGED__ACT_BLOCK;
    const int32_t n_blocks = paged__round_up(w->n_cols, unit_cols) / PAGED__ACT_BLOCK;
    paged__row_block block;
    for (int32_t r = 0; r < PAGED__ROW_TILE; r++)
        for (int32_t b = 0; b < n_blocks; b++) {
            paged__row_block_read(w, tile * PAGED__ROW_TILE + r, b, &block);
            for (int32_t t = 0; t < n_tokens; t++) {
                const paged__group group = paged__group_of(x, token0 + t);
                const paged__act_block *act =
                    paged__group_blocks(x, group) + (int64_t)b * group.width + (token0 + t - group.first);
                sum_block(sums + t * stride + r, &block, act, halves, has_min);
            }
        }
}

static float weight(const uint8_t *tile, int64_t e, paged__weight_type type) {
    uint16_t h;
    float f;
    if (type == PAGED__W_F32) {
        memcpy(&f, tile + e * 4, sizeof f);
        return f;
    }
    memcpy(&h, tile + e * 2, sizeof h);
    return type == PAGED__W_F16 ? paged__f16_to_f32(h) : paged__bf16_to_f32(h);
}

static void tile_float(float *sums, int32_t stride, const paged__matrix *w, int32_t tile, const paged__act *x,
                       int32_t token0, int32_t n_tokens) {
    const uint8_t *data = paged__tile_at(w, tile);
    for (int32_t t = 0; t < n_tokens; t++) {
        const paged__group group = paged__group_of(x, token0 + t);
        const float *act = paged__group_floats(x, group) + (token0 + t - group.first);
        for (int32_t first = 0; first < w->n_cols; first += PAGED__FLOAT_BLOCK)
            for (int r = 0; r < PAGED__ROW_TILE; r++) {
                float part = 0;
                for (int64_t k = first; k < PAGED_MIN(first + PAGED__FLOAT_BLOCK, w->n_cols); k++)
                    part = fmaf(weight(data, k * 16 + r, w->type), act[k * group.width], part);
                sums[t * stride + r] += part;
            }
    }
}

static void sums(float *out, const paged__matrix *w, int32_t tile0, int32_t n_tiles, const paged__act *x,
                 int32_t token0, int32_t n_tokens) {
    const int32_t stride = n_tiles * PAGED__ROW_TILE;
    for (int32_t i = 0; i < n_tokens * stride; i++) out[i] = 0;
    for (int32_t i = 0; i < n_tiles; i++)
        (paged__is_quantised(w->type) ? tile_quantised : tile_float)(out + i * PAGED__ROW_TILE, stride, w,
                                                                     tile0 + i, x, token0, n_tokens);
}

const paged__linear_kernels_table paged__linear_ref = {.name = "ref", .sums = sums, PAGED__LANES};
