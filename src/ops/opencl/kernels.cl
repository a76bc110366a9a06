/* kernels.cl: writing keys and values, and attention over them, in OpenCL C 1.2 without extensions.
 *
 * A program is built for one shape. The host defines
 *   DK, DV, BLOCK, HEADS, KV_HEADS   as in paged_attn_config
 *   TYPE                             a paged_type (kv.h): 0 f16, 1 f32, 2 bf16, 3 i8
 *   PACKED, CAUSAL, WINDOW, SOFTCAP, ALIBI   1 or 0; WINDOW: keys
 *   ROWS                             rows of an item, at most
 *   STEP, SPLIT                      tokens of a softmax step and of a split
 *   DIRECT                           1: blocks are taken to lie in order, for measuring what the tables cost
 *
 * Attention. Work is a list of items: up to ROWS rows (a query and a head of a KV head's group) of one
 * sequence and some of its splits, for each KV head. One work-item does one of them: its vectors run over the
 * 16 tokens of a tile, then over 16 elements of a value, so that no lane waits for another and nothing is
 * summed across lanes but the weights, in one order. Keys and values of a tile become f32 first, whatever
 * they are, so that all types share the rest.
 *
 * The same bits, as ops.h promises: each score and each element of the result is one chain of fma in
 * ascending order, steps and splits sit at absolute positions, splits are folded in ascending order by
 * fold(), in `attend` as in `merge`, and what a row does not see is never multiplied into it. */
#pragma OPENCL FP_CONTRACT OFF

#define GROUP (HEADS / KV_HEADS)
#define TILE 16
#define CHUNKS ((DV + 15) / 16) /* of 16 elements of a value */
#define N_TILES (STEP / TILE)
#define PAIR 4 /* rows that share a load */
#define LOAD_TILES 2 /* of K that are at work together: more chains than an fma takes cycles */
#define LN_2 0.69314718056f
#define STATE_FLOATS (CHUNKS * 16 + 16) /* o, m, l, padding */
#define STATE_ROWS (GROUP < ROWS ? GROUP : ROWS) /* of an item that decodes */

/* The layout of paged__cl_item and paged__cl_kv in cl.h. */
typedef struct item {
    int table, head_stride; /* entries in `tables`: of KV head 0, from one to the next */
    int tail;               /* where the tiles of a packed tail are, which stand for a block of -1 */
    int q_first;            /* row of the sequence's first query in q and out */
    int row_first, n_rows;  /* of the sequence: query * GROUP + head of the group */
    int first_keys;         /* keys before this one are seen by the first query; may be below 0 */
    int n_keys;             /* of the sequence */
    int split_first, split_end;
    int state; /* the first of its states, [KV_HEADS, STATE_ROWS]; -1: results go out */
} item;

typedef struct cache {
    long k, v, k_scale, v_scale; /* bytes from the begin of the pool */
    long block_stride, k_head_stride, v_head_stride, scale_block_stride, scale_head_stride;
} cache;

/* 16 elements wherever they lie. Private memory is arrays of vectors instead: what vstore16 writes in pieces
 * a processor must wait for when it reads it as one. */
typedef struct __attribute__((packed)) {
    float16 v;
} loose_float;
typedef struct __attribute__((packed)) {
    uint16 v;
} loose_uint;
typedef struct __attribute__((packed)) {
    ushort16 v;
} loose_ushort;
#define LOAD(type, from) (((__global const loose_##type *)(from))->v)

/* ---- numbers ---- */

/* 2^x for x <= 0, as in ops.h of the library: polynomial of degree 6, exact at 0; NaN stays NaN. */
#define EXP2(type, itype)                                                                                    \
    type shifted = x + (type)12582912.0f, f = x - (shifted - (type)12582912.0f), p;                          \
    p = fma(f, (type)0.00015353362f, (type)0.00133988739f);                                                  \
    p = fma(f, p, (type)0.00961843692f);                                                                     \
    p = fma(f, p, (type)0.0555033237f);                                                                      \
    p = fma(f, p, (type)0.240226477f);                                                                       \
    p = fma(f, p, (type)0.693147182f);                                                                       \
    p = fma(f, p, (type)1.0f);                                                                               \
    p = as_##type(as_##itype(p) + (as_##itype(shifted) << 23));                                              \
    return select(select(p, (type)0.0f, x < (type)-126.0f), x, isnan(x))

float16 exp2_16(float16 x) {
    EXP2(float16, int16);
}
float exp2_1(float x) {
    EXP2(float, int);
}

/* tanh within 2 units in the last place: near 0 a polynomial in x^2, elsewhere 1 - 2 / (exp(2 |x|) + 1). */
float16 tanh_16(float16 x) {
    float16 a = fabs(x), u = x * x, p = fma(u, (float16)0.00237076564f, (float16)-0.008410070802f);
    p = fma(u, p, (float16)0.021788322f);
    p = fma(u, p, (float16)-0.05396155178f);
    p = fma(u, p, (float16)0.1333331287f);
    p = fma(u, p, (float16)-0.3333333323f);
    float16 near = fma(x * u, p, x);
    float16 e = exp2_16(select(a, (float16)10.0f, a > 10.0f) * -2.8853900818f);
    float16 far = copysign((1.0f - e) / (1.0f + e), x);
    return select(near, far, a >= 0.6f);
}

/* f32 -> f16, rounds to nearest even, saturates; NaN stays NaN. */
ushort to_f16(float f) {
    uint u = as_uint(f), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (ushort)(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
    if (a >= 0x477ff000u) return (ushort)(sign | 0x7bffu);
    if (a < 0x38800000u) return (ushort)(sign | (as_uint(as_float(a) + 0.5f) - 0x3f000000u));
    a += 0xfffu + ((a >> 13) & 1u);
    return (ushort)(sign | (a - 0x38000000u) >> 13);
}

ushort to_bf16(float f) {
    uint u = as_uint(f), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (ushort)(u >> 16 | 0x40u);
    a += 0x7fffu + ((a >> 16) & 1u);
    return (ushort)(sign | min(a >> 16, 0x7f7fu));
}

/* ---- i8 ---- */

#define ROTATION (DK & -DK)

/* Each run of ROTATION elements times the Hadamard matrix of that order: sums and differences, in the order
 * in which i8.c of the library makes them. */
void rotate_key(float *x) {
    for (int apart = 1; apart < ROTATION; apart *= 2)
        for (int block = 0; block < DK; block += 2 * apart)
            for (int i = block; i < block + apart; i++) {
                float a = x[i], b = x[i + apart];
                x[i] = a + b;
                x[i + apart] = a - b;
            }
}

/* Scale, and what elements are multiplied by before they are rounded (0: all are zero); kv.h says how rows
 * saturate and vanish. Returns the number of NaN. */
int limit_row(float *x, int n) {
    int n_nan = 0;
    for (int i = 0; i < n; i++) {
        n_nan += isnan(x[i]);
        x[i] = x[i] > 0x1p100f ? 0x1p100f : x[i] < -0x1p100f ? -0x1p100f : x[i];
    }
    return n_nan;
}

float scale_row(const float *x, int n, int n_nan, float norm, float *by) {
    float top = 0;
    for (int i = 0; i < n; i++) top = fabs(x[i]) > top ? fabs(x[i]) : top;
    *by = 0;
    if (n_nan > 0) return as_float(0x7fc00000);
    if (top < 0x1p-100f) return 0;
    *by = 127 / top;
    return top * norm / 127;
}

char to_i8(float x, float by) {
    return by == 0 ? 0 : (char)(as_int(x * by + 12582912.0f) & 0xff);
}

/* ---- writing ---- */

#if TYPE == 1
typedef float element;
#define TO_ELEMENT(x) (x)
#elif TYPE == 3
typedef char element;
#else
typedef ushort element;
#define TO_ELEMENT(x) (TYPE == 0 ? to_f16(x) : to_bf16(x))
#endif

/* Element d of offset o in the block of a head (kv.h). */
int k_at(int o, int d) {
    int tile = o / TILE * TILE * DK, i = o % TILE;
    if (!PACKED) return o * DK + d;
    if (TYPE == 3) return tile + d / 4 * 64 + i * 4 + d % 4;
    if (TYPE == 2) return tile + d / 2 * 32 + i * 2 + d % 2;
    return tile + d * 16 + i;
}
int v_at(int o, int d) {
    int tile = o / TILE * TILE * DV, i = o % TILE;
    if (!PACKED) return o * DV + d;
    if (TYPE == 3) return tile + i / 4 * 4 * DV + d * 4 + i % 4;
    if (TYPE == 2) return tile + i / 2 * 2 * DV + d * 2 + i % 2;
    return tile + i * DV + d;
}

/* Work-item (token, KV head). */
__kernel void write_kv(__global uchar *pool, cache c, __global const float *k, long k_stride,
                       __global const float *v, long v_stride, __global const long *slots,
                       __global int *n_nan) {
    long token = get_global_id(0), head = get_global_id(1), slot = slots[token];
    if (slot < 0) return;
    long block = slot / BLOCK * c.block_stride;
    int o = (int)(slot % BLOCK), bad = 0;
    __global element *to_k = (__global element *)(pool + c.k + block + head * c.k_head_stride);
    __global element *to_v = (__global element *)(pool + c.v + block + head * c.v_head_stride);
    k += token * k_stride + head * DK;
    v += token * v_stride + head * DV;
#if TYPE == 3
    float x[DK > DV ? DK : DV], by, scale;
    long at = slot / BLOCK * c.scale_block_stride + head * c.scale_head_stride + o * 4;
    for (int d = 0; d < DK; d++) x[d] = k[d];
    int bad_k = limit_row(x, DK);
    if (bad_k == 0) rotate_key(x);
    scale = scale_row(x, DK, bad_k, 1 / sqrt((float)ROTATION), &by);
    *(__global float *)(pool + c.k_scale + at) = scale;
    for (int d = 0; d < DK; d++) to_k[k_at(o, d)] = to_i8(x[d], by) ^ (char)0x80;
    for (int d = 0; d < DV; d++) x[d] = v[d];
    int bad_v = limit_row(x, DV);
    scale = scale_row(x, DV, bad_v, 1, &by);
    *(__global float *)(pool + c.v_scale + at) = scale;
    for (int d = 0; d < DV; d++) to_v[v_at(o, d)] = to_i8(x[d], by);
    bad = bad_k + bad_v;
#else
    for (int d = 0; d < DK; d++) {
        bad += isnan(k[d]);
        to_k[k_at(o, d)] = TO_ELEMENT(k[d]);
    }
    for (int d = 0; d < DV; d++) {
        bad += isnan(v[d]);
        to_v[v_at(o, d)] = TO_ELEMENT(v[d]);
    }
#endif
    if (bad) atomic_add(n_nan, bad);
}

/* ---- attention: from the tables to tiles of f32 ---- */

/* The block of a token, and its offset there. */
long block_of(__global const int *tables, const item *it, int head, int token, int *o) {
    __global const int *table = tables + it->table + head * it->head_stride;
    *o = token % BLOCK;
    if (DIRECT) return table[0] + token / BLOCK;
    int block = table[token / BLOCK];
    if (!PACKED || block >= 0) return block;
    int tile = tables[it->tail + *o / TILE];
    *o = tile % (BLOCK / TILE) * TILE + *o % TILE;
    return tile / (BLOCK / TILE);
}

/* Where the tile of 16 tokens (or, in the plain layout, each token of it) lies; tokens outside first ... end - 1
 * repeat one inside. */
#if PACKED
#define N_PLACES 1
#else
#define N_PLACES TILE
#endif
typedef struct place {
    long block[N_PLACES];
    int o[N_PLACES];
} place;

place find(__global const int *tables, const item *it, int head, int t0, int first, int end) {
    place p;
    for (int i = 0; i < N_PLACES; i++) {
        int token = PACKED ? t0 : clamp(t0 + i, first, end - 1);
        p.block[i] = block_of(tables, it, head, token, &p.o[i]);
    }
    return p;
}

/* Tiles of a head are short runs of bytes, which no processor foresees: what is read next is asked for while a
 * tile is read, line by line. */
#if PACKED && defined(__has_builtin)
#if __has_builtin(__builtin_prefetch)
#define ASK(ahead, n_bytes) __builtin_prefetch((ahead) + (n_bytes))
#endif
#endif
#ifndef ASK
#define ASK(ahead, n_bytes)
#endif
#define ELEMENT_BYTES ((int)sizeof(element))

/* The first byte of a packed tile. */
__global const uchar *tile_at(__global const uchar *head, const cache *c, const place *p, int dim) {
    return head + p->block[0] * c->block_stride + p->o[0] * dim * ELEMENT_BYTES;
}

/* k [DK], a vector for the 16 tokens of each element */
void load_k(__global const uchar *k, const cache *c, const place *p, float16 *tile,
            __global const uchar *ahead) {
#if PACKED
    __global const uchar *at = tile_at(k, c, p, DK);
#if TYPE == 0
    for (int d = 0; d < DK; d++) {
        ASK(ahead, 32 * d);
        tile[d] = vload_half16(d, (__global const half *)at);
    }
#elif TYPE == 1
    for (int d = 0; d < DK; d++) {
        ASK(ahead, 64 * d);
        tile[d] = LOAD(float, at + 64 * d);
    }
#elif TYPE == 2
    for (int d = 0; d < DK; d += 2) {
        ASK(ahead, 32 * d);
        uint16 two = LOAD(uint, at + 32 * d);
        tile[d] = as_float16(two << 16);
        tile[d + 1] = as_float16(two & 0xffff0000u);
    }
#else
    for (int d = 0; d < DK; d += 4) {
        ASK(ahead, 16 * d);
        int16 four = as_int16(LOAD(uint, at + 16 * d) ^ 0x80808080u);
        tile[d] = convert_float16(four << 24 >> 24);
        tile[d + 1] = convert_float16(four << 16 >> 24);
        tile[d + 2] = convert_float16(four << 8 >> 24);
        tile[d + 3] = convert_float16(four >> 24);
    }
#endif
#else
    float *to = (float *)tile;
    for (int i = 0; i < TILE; i++) {
        __global const uchar *at = k + p->block[i] * c->block_stride;
        for (int d = 0; d < DK; d++) {
#if TYPE == 1
            to[d * TILE + i] = ((__global const float *)at)[p->o[i] * DK + d];
#else
            int from = p->o[i] * DK + d;
            to[d * TILE + i] = TYPE == 0 ? vload_half(from, (__global const half *)at)
                                         : as_float((uint)((__global const ushort *)at)[from] << 16);
#endif
        }
    }
#endif
}

/* v [16][CHUNKS]; elements from DV on are anything */
void load_v(__global const uchar *v, const cache *c, const place *p, float16 *tile,
            __global const uchar *ahead) {
    for (int i = 0; i < TILE; i++) {
        __global const uchar *at = v + p->block[PACKED ? 0 : i] * c->block_stride;
        int o = PACKED ? p->o[0] + i : p->o[i];
        for (int d = 0; d < CHUNKS * 16; d += 16) {
            ASK(ahead, (i * DV + d) * ELEMENT_BYTES);
#if TYPE == 1
            float16 x = LOAD(float, (__global const float *)at + o * DV + d);
#elif TYPE == 2 && PACKED
            uint16 two = LOAD(uint, (__global const uint *)at + o / 2 * DV + d);
            float16 x = as_float16(i % 2 ? two & 0xffff0000u : two << 16);
#elif TYPE == 3
            int16 four = as_int16(LOAD(uint, (__global const uint *)at + o / 4 * DV + d));
            float16 x = convert_float16(four << (24 - i % 4 * 8) >> 24);
#elif TYPE == 0
            float16 x = vload_half16(0, (__global const half *)at + o * DV + d);
#else
            ushort16 h = LOAD(ushort, (__global const ushort *)at + o * DV + d);
            float16 x = as_float16(convert_uint16(h) << 16);
#endif
            tile[i * CHUNKS + d / 16] = x;
        }
    }
}

/* ---- attention: rows against tiles ---- */

/* Small loops that must vanish, so that what they index stays in registers. */
#define EACH(i, n) _Pragma("unroll") for (int i = 0; i < n; i++)

/* s[n] = q[n] * k, of LOAD_TILES tiles */
#define QK(n)                                                                                                \
    {                                                                                                        \
        float16 acc[n * LOAD_TILES];                                                                         \
        EACH(i, n * LOAD_TILES) acc[i] = 0;                                                                  \
        for (int d = 0; d < DK; d++)                                                                         \
            EACH(j, LOAD_TILES)                                                                              \
                EACH(i, n)                                                                                   \
                    acc[i * LOAD_TILES + j] =                                                                \
                        fma((float16)q[i * DK + d], k[j * DK + d], acc[i * LOAD_TILES + j]);                 \
        EACH(i, n) EACH(j, LOAD_TILES) s[i * N_TILES + j] = acc[i * LOAD_TILES + j];                         \
    }

void qk(const float *q, const float16 *k, float16 *s, int n_rows) {
    for (; n_rows >= PAIR; n_rows -= PAIR, q += PAIR * DK, s += PAIR * N_TILES) QK(PAIR)
    if (n_rows == 3) QK(3)
    if (n_rows == 2) QK(2)
    if (n_rows == 1) QK(1)
}

/* o[n] += p[n] * v, tokens that all rows see; m chunks from d on. */
#define PV_CHUNKS(n, m)                                                                                      \
    {                                                                                                        \
        float16 acc[n * m];                                                                                  \
        EACH(i, n) EACH(j, m) acc[i * m + j] = o[i * CHUNKS + d + j];                                        \
        for (int t = 0; t < TILE; t++)                                                                       \
            EACH(j, m)                                                                                       \
                EACH(i, n)                                                                                   \
                    acc[i * m + j] = fma((float16)p[i * STEP + t], v[t * CHUNKS + d + j], acc[i * m + j]);   \
        EACH(i, n) EACH(j, m) o[i * CHUNKS + d + j] = acc[i * m + j];                                        \
    }
#define PV(n)                                                                                                \
    {                                                                                                        \
        int d = 0;                                                                                           \
        for (; d + 2 <= CHUNKS; d += 2) PV_CHUNKS(n, 2)                                                      \
        if (d < CHUNKS) PV_CHUNKS(n, 1)                                                                      \
    }

void pv(const float *p, const float16 *v, float16 *o, int n_rows) {
    for (; n_rows >= PAIR; n_rows -= PAIR, p += PAIR * STEP, o += PAIR * CHUNKS) PV(PAIR)
    if (n_rows == 3) PV(3)
    if (n_rows == 2) PV(2)
    if (n_rows == 1) PV(1)
}

/* The same for one row and the tokens first ... end - 1 of the tile. */
void pv_some(const float *p, const float16 *v, float16 *o, int first, int end) {
    for (int t = max(first, 0); t < min(end, TILE); t++)
        for (int d = 0; d < CHUNKS; d++) o[d] = fma((float16)p[t], v[t * CHUNKS + d], o[d]);
}

float sum_16(float16 x) {
    float8 a = x.lo + x.hi;
    float4 b = a.lo + a.hi;
    float2 c = b.lo + b.hi;
    return c.x + c.y;
}
float max_16(float16 x) {
    float8 a = fmax(x.lo, x.hi);
    float4 b = fmax(a.lo, a.hi);
    float2 c = fmax(b.lo, b.hi);
    return fmax(c.x, c.y);
}

/* ---- attention: states, of a row each ---- */

typedef struct row_state {
    float m, l;
} row_state;

/* acc and o become those of both sets of tokens; the one that follows is `cur`, `from`. */
void fold(row_state *acc, float16 *o, row_state cur, const float16 *from) {
    if (cur.l == 0) return;
    float m = fmax(acc->m, cur.m), b = exp2_1(cur.m - m), a = acc->l == 0 ? 0 : exp2_1(acc->m - m);
    for (int d = 0; d < CHUNKS; d++) o[d] = fma(o[d], (float16)a, from[d] * b);
    acc->l = fma(acc->l, a, cur.l * b);
    acc->m = m;
}

/* out = o / l, with the sink; never -0 */
void finish(row_state s, const float16 *o, float sink, __global float *out, __global float *lse) {
    float a = 1;
    if (sink != -INFINITY) {
        float m = s.l == 0 ? sink : fmax(s.m, sink);
        a = s.l == 0 ? 0 : exp2_1(s.m - m);
        s.l = fma(s.l, a, exp2_1(sink - m));
        s.m = m;
    }
    float by = s.l == 0 ? 0 : a / s.l;
    for (int d = 0; d < DV; d++) out[d] = ((const float *)o)[d] * by + 0.0f;
    if (lse) *lse = s.l == 0 ? -INFINITY : (s.m + log2(s.l)) * LN_2;
}

/* ---- attention ---- */

/* Row r of the item sees the keys ... */
int row_end(const item *it, int r) {
    return CAUSAL ? max(it->first_keys + (it->row_first + r) / GROUP, 0) : it->n_keys;
}
int row_begin(const item *it, int r) {
    return WINDOW ? max(row_end(it, r) - WINDOW, 0) : 0;
}

/* Rows of q, times what makes scores those of log2. */
void load_q(const item *it, int head, __global const float *q, long q_stride, float scale, float *to) {
    for (int r = 0; r < it->n_rows; r++, to += DK) {
        int row = it->row_first + r;
        __global const float *from =
            q + (it->q_first + row / GROUP) * q_stride + (head * GROUP + row % GROUP) * DK;
        for (int d = 0; d < DK; d++) to[d] = from[d] * scale;
#if TYPE == 3
        rotate_key(to);
        for (int d = 0; d < DK; d++) to[d] *= 1 / sqrt((float)ROTATION);
#endif
    }
}

/* Scores of a row and step -> weights, and the state of before times what it is worth now. */
void softmax(const item *it, int head, int r, int t0, float16 *s, row_state *state, float16 *o,
             __global const float *slopes, float softcap) {
    const int16 lane = (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    int row = it->row_first + r, first = row_begin(it, r) - t0, end = row_end(it, r) - t0;
    int position = it->first_keys + row / GROUP - 1;
    if (first >= STEP || end <= 0 || first >= end) return;
    float16 top = -INFINITY, l = 0;
    for (int j = 0; j < STEP; j += TILE) {
        float16 x = s[j / TILE];
        int16 t = lane + j;
        if (SOFTCAP) x = softcap * tanh_16(x / softcap);
        if (ALIBI)
            x = fma((float16)slopes[head * GROUP + row % GROUP], convert_float16(t + (t0 - position)), x);
        if (j < first || j + TILE > end) x = select((float16)-INFINITY, x, t >= first && t < end);
        s[j / TILE] = x;
        top = fmax(top, x);
    }
    float m = fmax(state->m, max_16(top)), a = state->l == 0 ? 0 : exp2_1(state->m - m);
    for (int j = 0; j < STEP; j += TILE) {
        int16 t = lane + j;
        float16 p = exp2_16(s[j / TILE] - m);
        if (j < first || j + TILE > end) p = select((float16)0, p, t >= first && t < end);
        s[j / TILE] = p;
        l += p;
    }
    state->l = fma(state->l, a, sum_16(l));
    state->m = m;
    if (a != 1)
        for (int d = 0; d < CHUNKS; d++) o[d] *= a;
}

/* i8: where the scales of a tile are. */
float16 scales_of(__global const uchar *scales, const cache *c, const place *p) {
    return LOAD(float, (__global const float *)(scales + p->block[0] * c->scale_block_stride) + p->o[0]);
}

/* The tokens first ... end - 1 of a step, which somebody sees. Where tiles that nobody sees stand beside
 * others, those are read in their place. */
void attend_step(const item *it, int head, int t0, int first, int end, __global const uchar *pool,
                 const cache *c, __global const int *tables, const float *q, float16 *s, float16 *tile,
                 row_state *state, float16 *o, __global const float *slopes, float softcap) {
    __global const uchar *k = pool + c->k + head * c->k_head_stride;
    __global const uchar *v = pool + c->v + head * c->v_head_stride;
    const int tile_first = (first - t0) / TILE, tile_end = (end - t0 + TILE - 1) / TILE;
    place places[N_TILES];
    for (int j = tile_first; j < tile_end; j++) places[j] = find(tables, it, head, t0 + j * TILE, first, end);
    __global const uchar *ahead[N_TILES]; /* the keys of the next step, or of this one again */
    for (int j = tile_first; j < tile_end && PACKED; j++) {
        int t = t0 + STEP + j * TILE;
        place next = places[j];
        if (t < row_end(it, it->n_rows - 1)) next = find(tables, it, head, t, t, t + TILE);
        ahead[j] = tile_at(k, c, &next, DK);
    }
    for (int j = 0; j < N_TILES; j += LOAD_TILES) {
        if (j + LOAD_TILES <= tile_first || j >= tile_end) continue;
        for (int i = 0; i < LOAD_TILES; i++) {
            const place *p = &places[clamp(j + i, tile_first, tile_end - 1)];
            load_k(k, c, p, tile + i * DK, tile_at(v, c, p, DV));
        }
        qk(q, tile, s + j, it->n_rows);
    }
#if TYPE == 3
    for (int j = tile_first; j < tile_end; j++) {
        float16 scale = scales_of(pool + c->k_scale + head * c->scale_head_stride, c, &places[j]);
        for (int r = 0; r < it->n_rows; r++) s[r * N_TILES + j] *= scale;
    }
#endif
    for (int r = 0; r < it->n_rows; r++)
        softmax(it, head, r, t0, s + r * N_TILES, &state[r], o + r * CHUNKS, slopes, softcap);
    int last = it->n_rows - 1, all_first = row_begin(it, last), all_end = row_end(it, 0);
    for (int j = tile_first; j < tile_end; j++) {
        const float *p = (const float *)(s + j);
        int t = t0 + j * TILE;
        load_v(v, c, &places[j], tile, ahead[j]);
#if TYPE == 3
        float16 scale = scales_of(pool + c->v_scale + head * c->scale_head_stride, c, &places[j]);
        for (int r = 0; r < it->n_rows; r++) s[r * N_TILES + j] *= scale;
#endif
        if (all_first <= t && t + TILE <= all_end)
            pv(p, tile, o, it->n_rows);
        else
            for (int r = 0; r < it->n_rows; r++)
                pv_some(p + r * STEP, tile, o + r * CHUNKS, row_begin(it, r) - t, row_end(it, r) - t);
    }
}

void clear(int n_rows, row_state *state, float16 *o) {
    for (int r = 0; r < n_rows; r++) state[r] = (row_state){-INFINITY, 0};
    for (int i = 0; i < n_rows * CHUNKS; i++) o[i] = 0;
}

float sink_of(__global const float *sinks, int head) {
    return sinks ? sinks[head] * 1.44269504089f : -INFINITY;
}

/* Where row r of the item goes. */
#define OUT_ROW(r) (it.q_first + (it.row_first + r) / GROUP)
#define OUT_HEAD(r) (head * GROUP + (it.row_first + r) % GROUP)

/* Work-item (KV head, item). */
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void
attend(__global const uchar *pool, cache c, __global const int *tables, __global const item *items,
       __global const float *q, long q_stride, __global float *out, __global float *lse,
       __global const float *sinks, __global const float *slopes, __global float *states, float scale,
       float softcap) {
    const item it = items[get_global_id(1)];
    const int head = (int)get_global_id(0);
    float rows[ROWS * DK];
    float16 s[ROWS * N_TILES], tile[LOAD_TILES * DK > TILE * CHUNKS ? LOAD_TILES * DK : TILE * CHUNKS];
    float16 cur[ROWS * CHUNKS], acc[ROWS * CHUNKS];
    row_state cur_state[ROWS], acc_state[ROWS];
    const int first = row_begin(&it, 0), end = row_end(&it, it.n_rows - 1);
    load_q(&it, head, q, q_stride, scale, rows);
    clear(it.n_rows, acc_state, acc);
    for (int split = it.split_first; split < it.split_end; split++) {
        clear(it.n_rows, cur_state, cur);
        for (int t0 = max(split * SPLIT, first / STEP * STEP); t0 < min((split + 1) * SPLIT, end); t0 += STEP)
            attend_step(&it, head, t0, max(first, t0), min(end, t0 + STEP), pool, &c, tables, rows, s, tile,
                        cur_state, cur, slopes, softcap);
        for (int r = 0; r < it.n_rows; r++) fold(&acc_state[r], acc + r * CHUNKS, cur_state[r], cur + r * CHUNKS);
    }
    for (int r = 0; r < it.n_rows; r++) {
        if (it.state >= 0) {
            __global float *to = states + (it.state + head * STATE_ROWS + r) * (long)STATE_FLOATS;
            for (int d = 0; d < CHUNKS; d++) vstore16(acc[r * CHUNKS + d], d, to);
            to[CHUNKS * 16] = acc_state[r].m;
            to[CHUNKS * 16 + 1] = acc_state[r].l;
        } else {
            long row = (long)OUT_ROW(r) * HEADS + OUT_HEAD(r);
            finish(acc_state[r], acc + r * CHUNKS, sink_of(sinks, OUT_HEAD(r)), out + row * DV,
                   lse ? lse + row : 0);
        }
    }
}

/* Work-item (KV head, row of the item, merge): n items of the same rows, a split each, in ascending order. */
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void
merge(__global const item *items, __global const int2 *merges, __global float *out, __global float *lse,
      __global const float *sinks, __global const float *states) {
    const int head = (int)get_global_id(0), r = (int)get_global_id(1);
    const int2 which = merges[get_global_id(2)]; /* first item, number of them */
    const item it = items[which.x];
    if (r >= it.n_rows) return;
    float16 acc[CHUNKS], cur[CHUNKS];
    row_state state;
    clear(1, &state, acc);
    for (int i = which.x; i < which.x + which.y; i++) {
        __global const float *from = states + (items[i].state + head * STATE_ROWS + r) * (long)STATE_FLOATS;
        for (int d = 0; d < CHUNKS; d++) cur[d] = vload16(d, from);
        fold(&state, acc, (row_state){from[CHUNKS * 16], from[CHUNKS * 16 + 1]}, cur);
    }
    long row = (long)OUT_ROW(r) * HEADS + OUT_HEAD(r);
    finish(state, acc, sink_of(sinks, OUT_HEAD(r)), out + row * DV, lse ? lse + row : 0);
}
