/* attn_ref.c: the kernels of ops.h in plain C, for every machine and as the plain statement of what the
 * others compute. */
#include <float.h>
#include <math.h>

#include "ops/ops.h"
#include "ops/scores.h"

/* Element e of an array of n pairs or singles is converted on its own; slow and obvious. */
static float load(const void *src, int64_t e, paged_type type) {
    uint16_t h;
    if (type == PAGED_TYPE_F32) {
        float f;
        memcpy(&f, (const uint8_t *)src + e * 4, sizeof f);
        return f;
    }
    memcpy(&h, (const uint8_t *)src + e * 2, sizeof h);
    return type == PAGED_TYPE_F16 ? paged__f16_to_f32(h) : paged__bf16_to_f32(h);
}

static void qk(const paged__step *step, paged_type type) {
    int32_t n_rows = step->n_rows;
    float k[PAGED_ATTN_STEP];
    for (int32_t e = 0; e < n_rows * PAGED_ATTN_STEP; e++) step->s[e] = 0;
    for (int32_t d = 0; d < step->head_dim_k; d++) {
        for (int32_t t = 0; t < PAGED_ATTN_STEP; t++) {
            int32_t i = t % PAGED_TILE;
            int64_t e = type == PAGED_TYPE_BF16 ? (d / 2) * 32 + i * 2 + d % 2 : d * 16 + i;
            k[t] = load(step->k.at[t / PAGED_TILE], e, type);
        }
        for (int32_t r = 0; r < n_rows; r++) {
            float *s = step->s + r * PAGED_ATTN_STEP,
                  qd = load(step->q + r * step->q_stride, d, PAGED_TYPE_F32);
            for (int32_t t = 0; t < PAGED_ATTN_STEP; t++) s[t] += qd * k[t];
        }
    }
}

static void pv(const paged__step *step, paged_type type) {
    int64_t dv = step->head_dim_v;
    float v[PAGED_HEAD_DIM_MAX];
    for (int32_t t = 0; t < PAGED_ATTN_STEP; t++) {
        int64_t i = t % PAGED_TILE;
        for (int64_t d = 0; d < dv; d++) {
            int64_t e = type == PAGED_TYPE_BF16 ? (i / 2) * 2 * dv + d * 2 + i % 2 : i * dv + d;
            v[d] = load(step->v.at[t / PAGED_TILE], e, type);
        }
        for (int32_t r = 0; r < step->n_rows; r++) {
            if (t < step->seen[r].first || t >= step->seen[r].end) continue;
            float *o = step->o + r * step->o_stride,
                  weight = load(step->p + r * step->p_stride, t, PAGED_TYPE_F32);
            for (int64_t d = 0; d < dv; d++) o[d] += weight * v[d];
        }
    }
}

static void softmax_row(float *p, const float *s, paged__range seen, float *l, float *o, int32_t n) {
    /* Not -inf, so that a row whose scores are all -inf has weights of zero and not NaN. */
    float s_max = -FLT_MAX, *m = o + n;
    for (int32_t t = seen.first; t < seen.end; t++) s_max = s[t] > s_max ? s[t] : s_max;
    if (s_max > *m + PAGED__RESCALE) {
        float factor = paged__exp2(*m - s_max);
        for (int32_t i = 0; i < PAGED__L_LANES; i++) l[i] *= factor;
        for (int32_t d = 0; d < n; d++) o[d] *= factor;
        *m = s_max;
    }
    for (int32_t t = 0; t < PAGED_ATTN_STEP; t++) {
        bool is_seen = t >= seen.first && t < seen.end;
        p[t] = is_seen ? paged__exp2(s[t] - *m) : 0;
        if (is_seen) l[t % PAGED__L_LANES] += p[t];
    }
}

static void softmax(const paged__step *step) {
    for (int32_t r = 0; r < step->n_rows; r++)
        softmax_row((float *)(void *)(step->p + r * step->p_stride), step->s + r * PAGED_ATTN_STEP,
                    step->seen[r], step->l + r * PAGED__L_LANES, step->o + r * step->o_stride,
                    step->o_floats);
}

int32_t paged__q_bytes_f32(int32_t head_dim) {
    return paged__row_bytes(head_dim * 4);
}

void paged__load_q_f32(void *q, const float *src, float scale, int32_t head_dim) {
    float *row = q;
    for (int32_t d = 0; d < head_dim; d++) row[d] = src[d] * scale;
}

static void merge(float *acc, float a, const float *part, float b, int32_t n) {
    for (int32_t d = 0; d < n; d++) acc[d] = acc[d] * a + part[d] * b;
}

static void divide(float *out, const float *o, float l, int32_t n) {
    for (int32_t d = 0; d < n; d++) out[d] = o[d] / l + 0.0f;
}

/* [d][16], or [d / 2][16][2] of pairs. `elem` is 2 or 4 and constant in each call: then a copy is a move. */
static inline void pack_k(void *tile, const void *const *rows, int64_t head_dim, int64_t run, size_t elem) {
    uint8_t *to = tile;
    for (int64_t d = 0; d < head_dim; d += run)
        for (int64_t i = 0; i < PAGED_TILE; i++)
            for (int64_t b = 0; b < run; b++, to += elem) {
                if (d + b < head_dim)
                    memcpy(to, (const uint8_t *)rows[i] + (size_t)(d + b) * elem, elem);
                else
                    memset(to, 0, elem);
            }
}

/* [16][d] */
static inline void pack_v(void *tile, const void *const *rows, size_t row_bytes) {
    for (int64_t i = 0; i < PAGED_TILE; i++)
        memcpy((uint8_t *)tile + (size_t)i * row_bytes, rows[i], row_bytes);
}

void paged__pack_k_f16(void *tile, const void *const *rows, int32_t head_dim) {
    pack_k(tile, rows, head_dim, 1, 2);
}
void paged__pack_k_f32(void *tile, const void *const *rows, int32_t head_dim) {
    pack_k(tile, rows, head_dim, 1, 4);
}
void paged__pack_k_bf16(void *tile, const void *const *rows, int32_t head_dim) {
    pack_k(tile, rows, head_dim, 2, 2);
}
void paged__pack_v_f16(void *tile, const void *const *rows, int32_t head_dim) {
    pack_v(tile, rows, (size_t)head_dim * 2);
}
void paged__pack_v_f32(void *tile, const void *const *rows, int32_t head_dim) {
    pack_v(tile, rows, (size_t)head_dim * 4);
}
/* [8][d][2] */
void paged__pack_v_bf16(void *tile, const void *const *rows, int32_t head_dim) {
    uint8_t *to = tile;
    for (int64_t i = 0; i < PAGED_TILE; i += 2)
        for (int64_t d = 0; d < head_dim; d++, to += 4) {
            memcpy(to, (const uint8_t *)rows[i] + d * 2, 2);
            memcpy(to + 2, (const uint8_t *)rows[i + 1] + d * 2, 2);
        }
}

static int64_t from_f32(void *dst, const float *src, int64_t n, paged_type type) {
    int64_t n_nan = 0;
    for (int64_t i = 0; i < n; i++) {
        n_nan += isnan(src[i]) != 0;
        if (type == PAGED_TYPE_F32) {
            memcpy((uint8_t *)dst + i * 4, &src[i], sizeof src[i]);
        } else {
            uint16_t h = type == PAGED_TYPE_F16 ? paged__f32_to_f16(src[i]) : paged__f32_to_bf16(src[i]);
            memcpy((uint8_t *)dst + i * 2, &h, sizeof h);
        }
    }
    return n_nan;
}

#define OF_TYPE(name, type)                                                                                  \
    static void qk_##name(const paged__step *step) {                                                         \
        qk(step, type);                                                                                      \
    }                                                                                                        \
    static void pv_##name(const paged__step *step) {                                                         \
        pv(step, type);                                                                                      \
    }                                                                                                        \
    static void to_f32_##name(float *dst, const void *src, int64_t n) {                                      \
        for (int64_t i = 0; i < n; i++) dst[i] = load(src, i, type);                                         \
    }                                                                                                        \
    static int64_t from_f32_##name(void *dst, const float *src, int64_t n) {                                 \
        return from_f32(dst, src, n, type);                                                                  \
    }

OF_TYPE(f16, PAGED_TYPE_F16)
OF_TYPE(f32, PAGED_TYPE_F32)
OF_TYPE(bf16, PAGED_TYPE_BF16)

#define ENTRY(name)                                                                                          \
    .q_bytes = paged__q_bytes_f32, .p_bytes = PAGED_ATTN_STEP * 4, .load_q = paged__load_q_f32,              \
    .qk = qk_##name, .softmax = softmax, .pv = pv_##name, .pack_k = paged__pack_k_##name,                    \
    .pack_v = paged__pack_v_##name, .to_f32 = to_f32_##name, .from_f32 = from_f32_##name

const paged__type_kernels paged__ref_f16 = {ENTRY(f16)};
const paged__type_kernels paged__ref_f32 = {ENTRY(f32)};
const paged__type_kernels paged__ref_bf16 = {ENTRY(bf16)};

const paged__kernels paged__kernels_ref = {
    .name = "ref",
    .of = {[PAGED_TYPE_F16] = &paged__ref_f16,
           [PAGED_TYPE_F32] = &paged__ref_f32,
           [PAGED_TYPE_BF16] = &paged__ref_bf16,
           [PAGED_TYPE_I8] = &paged__ref_i8},
    .merge = merge,
    .divide = divide,
    .softcap = paged__softcap,
    .alibi = paged__alibi,
};
