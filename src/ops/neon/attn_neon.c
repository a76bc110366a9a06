/* attn_neon.c: the kernels of ops.h for 64-bit ARM (NEON), in f32 arithmetic.
 *
 * qk: a tile is 4 vectors of four keys each; 4 rows × 4 vectors are 16 accumulators, 4 registers hold K.
 * pv: 4 rows × 16 elements of V are 16 accumulators; a weight is broadcast.
 * Functions that are always inlined take their row count and type as constants, so that the loops over rows
 * and vectors are unrolled and the accumulators stay in registers.
 */
#include <arm_neon.h>
#include <float.h>
#include <math.h>

#include "ops/ops.h"
#include "ops/scores.h"

enum { ROWS = 4, VECS = 4 };

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

/* ---- elements of tiles as floats ---- */

INLINE float32x4_t load_f32(const uint8_t *bytes) {
    return vreinterpretq_f32_u8(vld1q_u8(bytes));
}
INLINE float32x4_t load_f16(const uint8_t *bytes) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(bytes)));
}
/* One of each of four pairs. A bf16 is the upper half of its float. */
INLINE float32x4_t load_of_pairs(const uint8_t *bytes, int64_t which) {
    uint32x4_t pairs = vreinterpretq_u32_u8(vld1q_u8(bytes));
    uint32x4_t top = vshlq_u32(pairs, vdupq_n_s32(which ? 0 : 16));
    return vreinterpretq_f32_u32(vandq_u32(top, vdupq_n_u32(0xffff0000u)));
}

/* Element d of the keys 4 * m … 4 * m + 3. */
INLINE float32x4_t load_k(const uint8_t *tile, int64_t d, int64_t m, const paged_type type) {
    if (type == PAGED_TYPE_F32) return load_f32(tile + (d * PAGED_TILE + m * 4) * 4);
    if (type == PAGED_TYPE_F16) return load_f16(tile + (d * PAGED_TILE + m * 4) * 2);
    return load_of_pairs(tile + (d / 2 * PAGED_TILE + m * 4) * 4, d % 2);
}

/* Elements d … d + 3 of token t. */
INLINE float32x4_t load_v(const uint8_t *tile, int64_t t, int64_t d, int64_t dv, const paged_type type) {
    if (type == PAGED_TYPE_F32) return load_f32(tile + (t * dv + d) * 4);
    if (type == PAGED_TYPE_F16) return load_f16(tile + (t * dv + d) * 2);
    return load_of_pairs(tile + (t / 2 * dv + d) * 4, t % 2);
}

INLINE float load_v1(const uint8_t *tile, int64_t t, int64_t d, int64_t dv, const paged_type type) {
    uint16_t half;
    float x;
    if (type == PAGED_TYPE_F32) {
        memcpy(&x, tile + (t * dv + d) * 4, sizeof x);
        return x;
    }
    memcpy(&half, tile + (type == PAGED_TYPE_F16 ? t * dv + d : (t / 2 * dv + d) * 2 + t % 2) * 2,
           sizeof half);
    return type == PAGED_TYPE_F16 ? paged__f16_to_f32(half) : paged__bf16_to_f32(half);
}

/* ---- scores ---- */

INLINE void qk_tile(const paged__step *step, int32_t r, int32_t j, const int n, const paged_type type) {
    const uint8_t *tile = step->k.at[j];
    const float *q[ROWS];
    float32x4_t acc[ROWS][4];
    UNROLL for (int i = 0; i < n; i++) {
        q[i] = (const float *)(const void *)(step->q + (r + i) * step->q_stride);
        UNROLL for (int m = 0; m < 4; m++) acc[i][m] = vdupq_n_f32(0);
    }
    for (int64_t d = 0; d < step->head_dim_k; d++) {
        float32x4_t k[4];
        UNROLL for (int m = 0; m < 4; m++) k[m] = load_k(tile, d, m, type);
        UNROLL for (int i = 0; i < n; i++) {
            UNROLL for (int m = 0; m < 4; m++) acc[i][m] = vfmaq_n_f32(acc[i][m], k[m], q[i][d]);
        }
    }
    UNROLL for (int i = 0; i < n; i++) {
        float *s = step->s + (r + i) * PAGED_ATTN_STEP + j * PAGED_TILE;
        UNROLL for (int m = 0; m < 4; m++) vst1q_f32(s + m * 4, acc[i][m]);
    }
}

INLINE void qk(const paged__step *step, const paged_type type) {
    for (int32_t r = 0, n; r < step->n_rows; r += n) {
        n = paged__next_rows(step->n_rows - r, ROWS);
        for (int32_t j = 0; j < PAGED__STEP_TILES; j++) switch (n) {
            case 1:
                qk_tile(step, r, j, 1, type);
                break;
            case 2:
                qk_tile(step, r, j, 2, type);
                break;
            case 3:
                qk_tile(step, r, j, 3, type);
                break;
            default:
                qk_tile(step, r, j, 4, type);
                break;
            }
    }
}

/* ---- weights ---- */

/* exp2 for x ≤ 8; zero below PAGED__EXP2_MIN; NaN is kept. */
INLINE float32x4_t exp2_of(float32x4_t x) {
    float32x4_t whole = vrndnq_f32(x), f = vsubq_f32(x, whole), p = vdupq_n_f32(PAGED__EXP2_C6);
    p = vfmaq_f32(vdupq_n_f32(PAGED__EXP2_C5), f, p);
    p = vfmaq_f32(vdupq_n_f32(PAGED__EXP2_C4), f, p);
    p = vfmaq_f32(vdupq_n_f32(PAGED__EXP2_C3), f, p);
    p = vfmaq_f32(vdupq_n_f32(PAGED__EXP2_C2), f, p);
    p = vfmaq_f32(vdupq_n_f32(PAGED__EXP2_C1), f, p);
    p = vfmaq_f32(vdupq_n_f32(1.0f), f, p);
    int32x4_t bits = vaddq_s32(vreinterpretq_s32_f32(p), vshlq_n_s32(vcvtq_s32_f32(whole), 23));
    uint32x4_t is_tiny = vcltq_f32(x, vdupq_n_f32(PAGED__EXP2_MIN));
    return vreinterpretq_f32_s32(vbicq_s32(bits, vreinterpretq_s32_u32(is_tiny)));
}

/* All bits of the tokens t … t + 3 that the row sees. */
INLINE uint32x4_t seen_from(paged__range seen, int32_t t) {
    static const int32_t lanes[4] = {0, 1, 2, 3};
    int32x4_t at = vaddq_s32(vld1q_s32(lanes), vdupq_n_s32(t));
    return vandq_u32(vcgeq_s32(at, vdupq_n_s32(seen.first)), vcltq_s32(at, vdupq_n_s32(seen.end)));
}

static void scale_by(float *x, float factor, int32_t n) {
    for (int32_t i = 0; i < n; i += 4) vst1q_f32(x + i, vmulq_n_f32(vld1q_f32(x + i), factor));
}

static void softmax_row(float *p, const float *s, paged__range seen, float *l, float *o, int32_t n) {
    /* Not -inf, so that a row whose scores are all -inf has weights of zero and not NaN. */
    float32x4_t lowest = vdupq_n_f32(-FLT_MAX), top = lowest;
    float *m = o + n;
    for (int32_t t = 0; t < PAGED_ATTN_STEP; t += 4)
        top = vmaxnmq_f32(top, vbslq_f32(seen_from(seen, t), vld1q_f32(s + t), lowest)); /* not NaN */
    float s_max = vmaxnmvq_f32(top);
    if (s_max > *m + PAGED__RESCALE) {
        float factor = paged__exp2(*m - s_max);
        scale_by(l, factor, PAGED__L_LANES);
        scale_by(o, factor, n);
        *m = s_max;
    }
    float32x4_t v_m = vdupq_n_f32(*m);
    for (int32_t t = 0; t < PAGED_ATTN_STEP; t += 4) {
        float32x4_t x = exp2_of(vsubq_f32(vld1q_f32(s + t), v_m));
        x = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), seen_from(seen, t)));
        float *lane = l + t % PAGED__L_LANES;
        vst1q_f32(lane, vaddq_f32(vld1q_f32(lane), x));
        vst1q_f32(p + t, x);
    }
}

static void softmax(const paged__step *step) {
    for (int32_t r = 0; r < step->n_rows; r++)
        softmax_row((float *)(void *)(step->p + r * step->p_stride), step->s + r * PAGED_ATTN_STEP,
                    step->seen[r], step->l + r * PAGED__L_LANES, step->o + r * step->o_stride,
                    step->o_floats);
}

/* ---- values ---- */

/* What a block of rows and tokens is worked on with. */
typedef struct pv_work {
    const paged__step *step;
    const float *p[ROWS];
    float *o[ROWS];
    int32_t t0, t1;
} pv_work;

/* The 4 * n_vecs elements from d on. */
INLINE void pv_vecs(const pv_work *w, int64_t d, const int n, const int n_vecs, const paged_type type) {
    float32x4_t acc[ROWS][VECS];
    UNROLL for (int i = 0; i < n; i++) {
        UNROLL for (int m = 0; m < n_vecs; m++) acc[i][m] = vld1q_f32(w->o[i] + d + m * 4);
    }
    for (int64_t t = w->t0; t < w->t1; t++) {
        const uint8_t *tile = w->step->v.at[t / PAGED_TILE];
        float32x4_t v[VECS];
        UNROLL for (int m = 0; m < n_vecs; m++) v[m] =
            load_v(tile, t % PAGED_TILE, d + m * 4, w->step->head_dim_v, type);
        UNROLL for (int i = 0; i < n; i++) {
            UNROLL for (int m = 0; m < n_vecs; m++) acc[i][m] = vfmaq_n_f32(acc[i][m], v[m], w->p[i][t]);
        }
    }
    UNROLL for (int i = 0; i < n; i++) {
        UNROLL for (int m = 0; m < n_vecs; m++) vst1q_f32(w->o[i] + d + m * 4, acc[i][m]);
    }
}

INLINE void pv_rows(const paged__step *step, int32_t r, int32_t t0, int32_t t1, const int n,
                    const paged_type type) {
    int64_t dv = step->head_dim_v, d = 0;
    pv_work w = {.step = step, .t0 = t0, .t1 = t1};
    UNROLL for (int i = 0; i < n; i++) {
        w.p[i] = (const float *)(const void *)(step->p + (r + i) * step->p_stride);
        w.o[i] = step->o + (r + i) * step->o_stride;
    }
    for (; d + 16 <= dv; d += 16) pv_vecs(&w, d, n, 4, type);
    for (; d + 4 <= dv; d += 4) pv_vecs(&w, d, n, 1, type);
    /* A vector would reach beyond the tile. */
    for (; d < dv; d++)
        for (int64_t t = t0; t < t1; t++) {
            float v = load_v1(step->v.at[t / PAGED_TILE], t % PAGED_TILE, d, dv, type);
            UNROLL for (int i = 0; i < n; i++) w.o[i][d] = fmaf(w.p[i][t], v, w.o[i][d]);
        }
}

INLINE void pv_block(const paged__step *step, int32_t r, int32_t n, int32_t t0, int32_t t1,
                     const paged_type type) {
    switch (n) {
    case 1:
        pv_rows(step, r, t0, t1, 1, type);
        break;
    case 2:
        pv_rows(step, r, t0, t1, 2, type);
        break;
    case 3:
        pv_rows(step, r, t0, t1, 3, type);
        break;
    default:
        pv_rows(step, r, t0, t1, 4, type);
        break;
    }
}

/* ---- the end of a row ---- */

static void merge(float *acc, float a, const float *part, float b, int32_t n) {
    for (int32_t d = 0; d < n; d += 4) {
        float32x4_t scaled = vmulq_n_f32(vld1q_f32(acc + d), a);
        vst1q_f32(acc + d, vfmaq_n_f32(scaled, vld1q_f32(part + d), b));
    }
}

static void divide(float *out, const float *o, float l, int32_t n) {
    int32_t d = 0;
    for (; d + 4 <= n; d += 4)
        vst1q_f32(out + d, vaddq_f32(vdivq_f32(vld1q_f32(o + d), vdupq_n_f32(l)), vdupq_n_f32(0)));
    for (; d < n; d++) out[d] = o[d] / l + 0.0f;
}

/* ---- conversion ---- */

static void to_f32_f16(float *dst, const void *src, int64_t n) {
    const uint8_t *bytes = src;
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) vst1q_f32(dst + i, load_f16(bytes + i * 2));
    for (; i < n; i++) dst[i] = load_v1(bytes, 0, i, n, PAGED_TYPE_F16);
}

static void to_f32_bf16(float *dst, const void *src, int64_t n) {
    const uint8_t *bytes = src;
    for (int64_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, bytes + i * 2, sizeof half);
        dst[i] = paged__bf16_to_f32(half);
    }
}

static void to_f32_f32(float *dst, const void *src, int64_t n) {
    memcpy(dst, src, (size_t)n * sizeof(float));
}

static int64_t from_f32_f16(void *dst, const float *src, int64_t n) {
    uint8_t *bytes = dst;
    int64_t i = 0, n_nan = 0;
    const float32x4_t most = vdupq_n_f32(65504.0f);
    for (; i + 4 <= n; i += 4) {
        float32x4_t x = vld1q_f32(src + i);
        n_nan += 4 - vaddvq_u32(vshrq_n_u32(vceqq_f32(x, x), 31));
        x = vmaxq_f32(vnegq_f32(most), vminq_f32(most, x)); /* keep NaN */
        vst1_u8(bytes + i * 2, vreinterpret_u8_f16(vcvt_f16_f32(x)));
    }
    for (; i < n; i++) {
        uint16_t half = paged__f32_to_f16(src[i]);
        n_nan += src[i] != src[i];
        memcpy(bytes + i * 2, &half, sizeof half);
    }
    return n_nan;
}

static int64_t from_f32_bf16(void *dst, const float *src, int64_t n) {
    int64_t n_nan = 0;
    for (int64_t i = 0; i < n; i++) {
        uint16_t half = paged__f32_to_bf16(src[i]);
        n_nan += src[i] != src[i];
        memcpy((uint8_t *)dst + i * 2, &half, sizeof half);
    }
    return n_nan;
}

static int64_t from_f32_f32(void *dst, const float *src, int64_t n) {
    int64_t n_nan = 0;
    memcpy(dst, src, (size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++) n_nan += src[i] != src[i];
    return n_nan;
}

#define OF_TYPE(name, type)                                                                                  \
    static void qk_##name(const paged__step *step) {                                                         \
        qk(step, type);                                                                                      \
    }                                                                                                        \
    static void pv_block_##name(const paged__step *step, int32_t r, int32_t n, int32_t t0, int32_t t1) {     \
        pv_block(step, r, n, t0, t1, type);                                                                  \
    }                                                                                                        \
    static void pv_##name(const paged__step *step) {                                                         \
        paged__pv_by_blocks(step, ROWS, pv_block_##name);                                                    \
    }                                                                                                        \
    const paged__type_kernels paged__neon_##name = {.q_bytes = paged__q_bytes_f32,                           \
                                                    .p_bytes = PAGED_ATTN_STEP * 4,                          \
                                                    .load_q = paged__load_q_f32,                             \
                                                    .qk = qk_##name,                                         \
                                                    .softmax = softmax,                                      \
                                                    .pv = pv_##name,                                         \
                                                    .pack_k = paged__pack_k_##name,                          \
                                                    .pack_v = paged__pack_v_##name,                          \
                                                    .to_f32 = to_f32_##name,                                 \
                                                    .from_f32 = from_f32_##name};

OF_TYPE(f16, PAGED_TYPE_F16)
OF_TYPE(f32, PAGED_TYPE_F32)
OF_TYPE(bf16, PAGED_TYPE_BF16)

const paged__kernels paged__kernels_neon = {
    .name = "neon",
    .of = {[PAGED_TYPE_F16] = &paged__neon_f16,
           [PAGED_TYPE_F32] = &paged__neon_f32,
           [PAGED_TYPE_BF16] = &paged__neon_bf16,
           [PAGED_TYPE_I8] = &paged__neon_i8},
    .merge = merge,
    .divide = divide,
    .softcap = paged__softcap,
    .alibi = paged__alibi,
};
