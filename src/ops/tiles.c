/* tiles.c: from a block table to the tiles of a softmax step. */
#include "ops/attn.h"

/* What absent tokens of a plain tile hold, so that packing needs no bounds. */
static const float zeros[PAGED_HEAD_DIM_MAX];

/* Whether a row sees a token of tile j. */
static bool is_seen(const paged__attn_step *step, int32_t j) {
    return j >= step->n_before / PAGED_TILE && j * PAGED_TILE < step->n_tokens;
}

/* Where no row sees a token, a tile that is there stands for one that may not be. */
static void repeat_tile(const paged__attn_step *step, const void **k, const void **v) {
    int32_t first = step->n_before / PAGED_TILE;
    for (int32_t j = 0; j < PAGED__STEP_TILES; j++) {
        if (is_seen(step, j)) continue;
        k[j] = k[first];
        v[j] = v[first];
    }
}

void paged__tiles_find(const paged__attn_step *step, const void **k, const void **v) {
    const paged_kv *kv = step->kv;
    int64_t elem = (int64_t)paged__type_bytes(kv->type);
    int32_t first = step->n_before / PAGED_TILE, t = step->t0 + first * PAGED_TILE,
            block = t / kv->block_size, offset = t % kv->block_size;
    const uint8_t *k_head = kv->k + step->head * kv->k_head_stride,
                  *v_head = kv->v + step->head * kv->v_head_stride;
    for (int32_t j = first; j < PAGED__STEP_TILES && is_seen(step, j); j++) {
        paged__slot at = paged__table_at(kv, step->table, block, offset);
        k[j] = k_head + at.block * kv->block_stride + at.offset * elem * kv->head_dim_k;
        v[j] = v_head + at.block * kv->block_stride + at.offset * elem * kv->head_dim_v;
        offset += PAGED_TILE;
        if (offset == kv->block_size) {
            offset = 0;
            block++;
        }
    }
    repeat_tile(step, k, v);
}

void paged__scales_find(const paged__attn_step *step, const float **k, const float **v) {
    const paged_kv *kv = step->kv;
    int32_t first = step->n_before / PAGED_TILE, t = step->t0 + first * PAGED_TILE,
            block = t / kv->block_size, offset = t % kv->block_size;
    for (int32_t j = first; j < PAGED__STEP_TILES && is_seen(step, j); j++) {
        paged__slot at = paged__table_at(kv, step->table, block, offset);
        int64_t scale = at.block * kv->scale_block_stride + step->head * kv->scale_head_stride +
                        at.offset * (int64_t)sizeof(float);
        k[j] = (const float *)(const void *)(kv->k_scale + scale);
        v[j] = (const float *)(const void *)(kv->v_scale + scale);
        offset += PAGED_TILE;
        if (offset == kv->block_size) {
            offset = 0;
            block++;
        }
    }
    for (int32_t j = 0; j < PAGED__STEP_TILES; j++) {
        if (is_seen(step, j)) continue;
        k[j] = k[first];
        v[j] = v[first];
    }
}

/* The plain rows of tile j. Token by token, since neighbours may lie in different blocks. */
static void find_rows(const paged__attn_step *step, int32_t j, const void **k, const void **v) {
    const paged_kv *kv = step->kv;
    int64_t elem = (int64_t)paged__type_bytes(kv->type);
    int32_t t = step->t0 + j * PAGED_TILE, block = t / kv->block_size, offset = t % kv->block_size;
    for (int32_t i = 0; i < PAGED_TILE; i++) {
        if (j * PAGED_TILE + i < step->n_before || j * PAGED_TILE + i >= step->n_tokens) {
            k[i] = zeros;
            v[i] = zeros;
        } else {
            int64_t base = step->table->blocks[block] * kv->block_stride;
            k[i] = kv->k + base + step->head * kv->k_head_stride + offset * elem * kv->head_dim_k;
            v[i] = kv->v + base + step->head * kv->v_head_stride + offset * elem * kv->head_dim_v;
        }
        if (++offset == kv->block_size) {
            offset = 0;
            block++;
        }
    }
}

static void prefetch_bytes(const uint8_t *at, int64_t n) {
    for (int64_t i = 0; i < n; i += 64) __builtin_prefetch(at + i);
}

/* Brings the plain rows of tile j into the cache, in runs of tokens that share a block. */
static void prefetch_rows(const paged__attn_step *step, int32_t j) {
    const paged_kv *kv = step->kv;
    int64_t elem = (int64_t)paged__type_bytes(kv->type), dk = elem * kv->head_dim_k,
            dv = elem * kv->head_dim_v;
    int32_t end = PAGED_MIN((j + 1) * PAGED_TILE, step->n_tokens);
    for (int32_t i = j * PAGED_TILE, n; i < end; i += n) {
        int32_t block = (step->t0 + i) / kv->block_size, offset = (step->t0 + i) % kv->block_size;
        int64_t base = step->table->blocks[block] * kv->block_stride;
        n = PAGED_MIN(end - i, kv->block_size - offset);
        prefetch_bytes(kv->k + base + step->head * kv->k_head_stride + offset * dk, n * dk);
        prefetch_bytes(kv->v + base + step->head * kv->v_head_stride + offset * dv, n * dv);
    }
}

void paged__tiles_pack(const paged__type_kernels *kernels, const paged__attn_step *step,
                       const paged__attn_step *next, const paged__scratch *scratch, bool widen,
                       const void **k, const void **v) {
    int64_t dk = step->kv->head_dim_k, dv = step->kv->head_dim_v;
    for (int32_t j = 0; j < PAGED__STEP_TILES; j++) {
        float *k_tile = scratch->k_tiles + j * PAGED_TILE * (dk + 1),
              *v_tile = scratch->v_tiles + j * PAGED_TILE * dv;
        const void *k_rows[PAGED_TILE], *v_rows[PAGED_TILE];
        if (next) prefetch_rows(next, j);
        if (!is_seen(step, j)) continue;
        find_rows(step, j, k_rows, v_rows);
        kernels->pack_k(widen ? scratch->narrow : k_tile, k_rows, (int32_t)dk);
        if (widen) kernels->widen_k(k_tile, scratch->narrow, (int32_t)dk);
        kernels->pack_v(widen ? scratch->narrow : v_tile, v_rows, (int32_t)dv);
        if (widen) kernels->widen_v(v_tile, scratch->narrow, (int32_t)dv);
        k[j] = k_tile;
        v[j] = v_tile;
    }
    repeat_tile(step, k, v);
}

void paged__tiles_widen(const paged__type_kernels *kernels, const paged__attn_step *step,
                        const paged__scratch *scratch, const void **k, const void **v) {
    int64_t dk = step->kv->head_dim_k, dv = step->kv->head_dim_v;
    const void *found_k[PAGED__STEP_TILES], *found_v[PAGED__STEP_TILES];
    paged__tiles_find(step, found_k, found_v);
    for (int32_t j = 0; j < PAGED__STEP_TILES; j++) {
        float *k_tile = scratch->k_tiles + j * PAGED_TILE * (dk + 1),
              *v_tile = scratch->v_tiles + j * PAGED_TILE * dv;
        if (!is_seen(step, j)) continue;
        kernels->widen_k(k_tile, found_k[j], (int32_t)dk);
        kernels->widen_v(v_tile, found_v[j], (int32_t)dv);
        k[j] = k_tile;
        v[j] = v_tile;
    }
    repeat_tile(step, k, v);
}
