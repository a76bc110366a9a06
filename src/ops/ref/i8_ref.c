/* i8_ref.c: the kernels of i8 in plain C, and the rows of q that all tables share. */
#include "ops/i8.h"

int32_t paged__q_bytes_i8(int32_t head_dim) {
    return paged__row_bytes((int32_t)sizeof(paged__i8_q) + head_dim);
}

void paged__load_q_i8(void *q, const float *src, float scale, int32_t head_dim) {
    paged__i8_q *row = q;
    int32_t sum = 0;
    paged__i8_from_f32(row->q, &row->scale, src, scale, head_dim, true);
    for (int32_t d = 0; d < head_dim; d++) sum += row->q[d];
    row->bias = -PAGED__I8_BIAS * sum;
}

static void qk(const paged__step *step) {
    for (int32_t r = 0; r < step->n_rows; r++) {
        const paged__i8_q *q = paged__i8_q_row(step, r);
        for (int32_t t = 0; t < PAGED_ATTN_STEP; t++) {
            int32_t j = t / PAGED_TILE, i = t % PAGED_TILE, sum = q->bias;
            const uint8_t *k = (const uint8_t *)step->k.at[j] + i * 4;
            for (int32_t d = 0; d < step->head_dim_k; d++) sum += q->q[d] * k[d / 4 * 64 + d % 4];
            step->s[r * PAGED_ATTN_STEP + t] = (float)sum * q->scale * step->k.scale[j][i];
        }
    }
}

/* weight[16] and *scale of w[16] ≥ 0. */
static void weights_of_tile(uint8_t *weight, float *scale, const float *w) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it leaves the integer in the low bits */
    float top = 0;
    for (int32_t i = 0; i < PAGED_TILE; i++) top = w[i] > top || w[i] != w[i] ? w[i] : top; /* NaN is kept */
    float by = top >= PAGED__I8_P_MIN ? 255 / top : 0;
    *scale = top < PAGED__I8_P_MIN ? 0 : top / 255;
    for (int32_t i = 0; i < PAGED_TILE; i++) {
        float shifted = w[i] * by + magic;
        uint32_t u;
        memcpy(&u, &shifted, sizeof u);
        weight[i] = (uint8_t)u;
    }
}

void paged__i8_weights(const paged__step *step) {
    for (int32_t r = 0; r < step->n_rows; r++) {
        paged__i8_p *row = paged__i8_p_row(step, r);
        const float *p = step->s + r * PAGED_ATTN_STEP;
        float w[PAGED_ATTN_STEP] = {0};
        /* The scale of what the row does not see may be NaN. */
        for (int32_t t = step->seen[r].first; t < step->seen[r].end; t++)
            w[t] = p[t] * step->v.scale[t / PAGED_TILE][t % PAGED_TILE];
        for (int32_t j = 0; j < PAGED__STEP_TILES; j++)
            weights_of_tile(row->weight + j * PAGED_TILE, &row->scale[j], w + j * PAGED_TILE);
    }
}

static void softmax(const paged__step *step) {
    paged__i8_softmax(step, &paged__ref_f32);
    paged__i8_weights(step);
}

static void pv(const paged__step *step) {
    int64_t dv = step->head_dim_v;
    for (int32_t r = 0; r < step->n_rows; r++) {
        const paged__i8_p *p = paged__i8_p_row(step, r);
        float *o = step->o + r * step->o_stride;
        for (int32_t j = 0; j < PAGED__STEP_TILES; j++) {
            const int8_t *v = step->v.at[j];
            for (int64_t d = 0; d < dv; d++) {
                int32_t sum = 0;
                for (int64_t i = 0; i < PAGED_TILE; i++)
                    sum += p->weight[j * PAGED_TILE + i] * v[i / 4 * 4 * dv + d * 4 + i % 4];
                o[d] += p->scale[j] * (float)sum;
            }
        }
    }
}

const paged__type_kernels paged__ref_i8 = {.q_bytes = paged__q_bytes_i8,
                                           .p_bytes = PAGED__I8_P_BYTES,
                                           .load_q = paged__load_q_i8,
                                           .qk = qk,
                                           .softmax = softmax,
                                           .pv = pv};
