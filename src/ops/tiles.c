/* tiles.c: from a block table to the tiles of a softmax step. */
#include "ops/attn.h"

void paged__tiles_find(const paged__attn_step *step, const void **k, const void **v) {
    const paged_kv *kv = step->kv;
    int64_t elem = (int64_t)paged__type_bytes(kv->type);
    for (int32_t j = 0; j < PAGED__STEP_TILES; j++) {
        if (j * PAGED_TILE >= step->n_tokens) {
            k[j] = k[0];
            v[j] = v[0];
            continue;
        }
        int32_t t = step->t0 + j * PAGED_TILE, block = t / kv->block_size, offset = t % kv->block_size;
        int64_t base = step->table[block] * kv->block_stride;
        k[j] = kv->k + base + step->head * kv->k_head_stride + offset * elem * kv->head_dim_k;
        v[j] = kv->v + base + step->head * kv->v_head_stride + offset * elem * kv->head_dim_v;
    }
}

static void gather_packed(const paged__kernels *kernels, const paged__attn_step *step,
                          const paged__scratch *scratch) {
    const paged_kv *kv = step->kv;
    const void *found_k[PAGED__STEP_TILES], *found_v[PAGED__STEP_TILES];
    paged__tiles_find(step, found_k, found_v);
    for (int32_t j = 0; j * PAGED_TILE < step->n_tokens; j++) {
        float *k = scratch->k_tiles + (int64_t)j * PAGED_TILE * kv->head_dim_k;
        float *v = scratch->v_tiles + (int64_t)j * PAGED_TILE * kv->head_dim_v;
        if (kv->type == PAGED_TYPE_BF16) {
            kernels->unpack_bf16(k, found_k[j], kv->head_dim_k / 2, PAGED_TILE);
            kernels->unpack_bf16(v, found_v[j], PAGED_TILE / 2, kv->head_dim_v);
        } else {
            kernels->to_f32[kv->type](k, found_k[j], (int64_t)PAGED_TILE * kv->head_dim_k);
            kernels->to_f32[kv->type](v, found_v[j], (int64_t)PAGED_TILE * kv->head_dim_v);
        }
    }
}

/* Token by token, since neighbours may lie in different blocks. */
static void gather_plain(const paged__kernels *kernels, const paged__attn_step *step,
                         const paged__scratch *scratch) {
    const paged_kv *kv = step->kv;
    int64_t elem = (int64_t)paged__type_bytes(kv->type), dk = kv->head_dim_k, dv = kv->head_dim_v;
    int32_t n_tiled = (step->n_tokens + PAGED_TILE - 1) / PAGED_TILE * PAGED_TILE;
    int32_t block = step->t0 / kv->block_size, offset = step->t0 % kv->block_size;
    float row[PAGED_HEAD_DIM_MAX];
    for (int32_t i = 0; i < n_tiled; i++) {
        float *k = scratch->k_tiles + i / PAGED_TILE * PAGED_TILE * dk + i % PAGED_TILE,
              *v = scratch->v_tiles + i * dv;
        if (i >= step->n_tokens) {
            for (int64_t d = 0; d < dk; d++) k[d * PAGED_TILE] = 0;
            memset(v, 0, (size_t)dv * sizeof(float));
            continue;
        }
        int64_t base = step->table[block] * kv->block_stride;
        kernels->to_f32[kv->type](row, kv->k + base + step->head * kv->k_head_stride + offset * elem * dk,
                                  dk);
        for (int64_t d = 0; d < dk; d++) k[d * PAGED_TILE] = row[d];
        kernels->to_f32[kv->type](v, kv->v + base + step->head * kv->v_head_stride + offset * elem * dv, dv);
        if (++offset == kv->block_size) {
            offset = 0;
            block++;
        }
    }
}

void paged__tiles_gather(const paged__kernels *kernels, const paged__attn_step *step,
                         const paged__scratch *scratch, const void **k, const void **v) {
    const paged_kv *kv = step->kv;
    if (kv->layout == PAGED_LAYOUT_PACKED)
        gather_packed(kernels, step, scratch);
    else
        gather_plain(kernels, step, scratch);
    for (int32_t j = 0; j < PAGED__STEP_TILES; j++) {
        int64_t tile = j * PAGED_TILE < step->n_tokens ? (int64_t)j * PAGED_TILE : 0;
        k[j] = scratch->k_tiles + tile * kv->head_dim_k;
        v[j] = scratch->v_tiles + tile * kv->head_dim_v;
    }
}
