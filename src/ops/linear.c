/* linear.c: who computes which part of a linear layer. See linear.h.
 *
 * Threads divide the tiles of a job's matrices by bytes, of many tokens the tokens. A thread goes through its
 * tiles a few at a time and through its tokens in chunks: the kernel gives the sums of a chunk (on the stack,
 * in L2), and the epilogue puts them where they belong; or the kernel does both (`layer`). A weight is read
 * from memory once for up to chunk_tokens() tokens (by each who has other tokens).
 */
#include "ops/linear_kernels.h"

static const paged__linear_kernels_table *kernels(void) {
#if defined(__x86_64__)
    const uint32_t flags = paged_cpu_flags();
    if (flags & PAGED_CPU_AMX) return &paged__linear_amx;
    if (flags & PAGED_CPU_AVX512_VNNI) return &paged__linear_vnni;
    if (flags & PAGED_CPU_AVX2) return &paged__linear_avx2;
#elif defined(__aarch64__)
    const uint32_t flags = paged_cpu_flags();
    if (flags & PAGED_CPU_NEON_DOT) return &paged__linear_neon_dot;
    if (flags & PAGED_CPU_NEON) return &paged__linear_neon;
#endif
    return &paged__linear_ref;
}

const char *paged__linear_kernels(void) {
    return kernels()->name;
}

const char *paged__linear_bf16(void) {
#if defined(__x86_64__)
    if (paged_cpu_flags() & PAGED_CPU_AMX) return paged__linear_amx_bf16.name;
#endif
    return NULL;
}

size_t paged__act_bytes(paged__act_kind kind, int32_t n_tokens, int32_t n_cols) {
    size_t bytes;
    if (n_tokens <= 0 || n_cols <= 0 || n_cols > INT32_MAX - 255) return 0;
    const size_t n_blocks = (size_t)paged__act_blocks(n_cols);
    const size_t row = kind == PAGED__ACT_I8     ? n_blocks * sizeof(paged__act_block)
                       : kind == PAGED__ACT_BF16 ? n_blocks * PAGED__ACT_BLOCK * 2
                                                 : (size_t)n_cols * sizeof(float);
    return paged__mul((size_t)n_tokens, row, &bytes) ? bytes : 0;
}

/* Groups are as few as can be, and of about the same size. */
paged__act paged__act_make(paged__act_kind kind, int32_t n_tokens, int32_t n_cols, uint8_t *data) {
    const bool wide = kind == PAGED__ACT_BF16 ||
                      (kind == PAGED__ACT_I8 && n_tokens >= PAGED__AMX_TOKENS && kernels()->wide_groups);
    const int32_t most = wide ? PAGED__AMX_GROUP : PAGED__ACT_GROUP, tokens = PAGED_MAX(n_tokens, 1);
    const int32_t n_groups = (tokens + most - 1) / most;
    return (paged__act){kind, n_tokens, n_cols, (tokens + n_groups - 1) / n_groups, data};
}

/* The reference takes groups of any size: those that are wider than the kernels chosen now, because others
 * were when they were made. */
static const paged__linear_kernels_table *kernels_for(const paged__act *x) {
    const paged__linear_kernels_table *k = kernels();
#if defined(__x86_64__)
    if (x->kind == PAGED__ACT_BF16) return &paged__linear_amx_bf16;
#endif
    PAGED_ASSERT(x->kind != PAGED__ACT_BF16);
    return x->group <= PAGED__ACT_GROUP || k->wide_groups ? k : &paged__linear_ref;
}

void paged__act_set(const paged__act *act, int32_t token, const float *x, const float *norm_weight,
                    float eps) {
    kernels_for(act)->act_set(act, token, x, norm_weight, eps);
}

void paged__rms_norm(float *out, const float *x, int32_t n, const float *weight, float eps) {
    kernels()->rms_norm(out, x, n, weight, eps);
}

void paged__turn(float *x, const paged__turns *turns, int32_t n_heads, int32_t head_dim) {
    kernels()->turn(x, turns, n_heads, head_dim);
}

/* Tokens [begin, end): whole groups. */
typedef struct tokens {
    int32_t begin, end;
} tokens;

/* Tokens of a chunk: whole groups, and chunks of about the same size. */
static int32_t chunk_tokens(const paged__act *x, tokens all, int32_t n_tiles, int32_t n_sums) {
    const int32_t n_groups = PAGED_MAX(n_sums / (n_tiles * PAGED__ROW_TILE) / x->group, 2), /* `layer` */
        n = all.end - all.begin, most = n_groups * x->group, n_chunks = (n + most - 1) / most;
    return paged__round_up((n + n_chunks - 1) / n_chunks, x->group);
}

/* Some tiles of matrix i (GLU: of gate and up), some tokens; y_first: where its part of a row of y begins.
 * sums[2][n_sums]: room. */
static void run_tiles(const paged__linear_kernels_table *k, const paged__linear_job *job, int32_t i,
                      int32_t y_first, tokens all, int32_t tile, int32_t n_tiles, float *sums,
                      int32_t n_sums) {
    const bool glu = job->epilogue >= PAGED__SWIGLU, add = job->epilogue == PAGED__ADD;
    const int32_t row = tile * PAGED__ROW_TILE, stride = n_tiles * PAGED__ROW_TILE,
                  chunk = chunk_tokens(job->x, all, n_tiles, n_sums);
    PAGED_ASSERT(n_tiles % 2 == 0 || !paged__is_quantised(job->w[i]->type));
    paged__outcome out = {.sums = sums,
                          .stride = stride,
                          .bias = job->bias[i] ? job->bias[i] + row : NULL,
                          .bias_other = glu && job->bias[1] ? job->bias[1] + row : NULL,
                          .other = glu && sums ? sums + n_sums : NULL,
                          .other_stride = add ? job->residual_stride : stride,
                          .y_stride = job->y_stride,
                          .act = job->act,
                          .act_col = row,
                          .n_rows = PAGED_MIN(stride, job->w[i]->n_rows - row),
                          .epilogue = job->epilogue};
    for (int32_t first = all.begin; first < all.end; first += chunk) {
        const int64_t at = y_first + row;
        out.n_tokens = PAGED_MIN(chunk, all.end - first);
        out.act_token = first;
        if (!job->act) out.y = job->y + first * job->y_stride + at;
        if (add) out.other = job->residual + first * job->residual_stride + at;
        if (k->layer) {
            k->layer(&out, job->w[i], glu ? job->w[1] : NULL, tile, n_tiles, job->x, first, sums);
            continue;
        }
        k->sums(sums, job->w[i], tile, n_tiles, job->x, first, out.n_tokens);
        if (glu) k->sums(sums + n_sums, job->w[1], tile, n_tiles, job->x, first, out.n_tokens);
        k->finish(&out);
    }
}

static void run_narrow(const paged__linear_kernels_table *k, const paged__linear_job *job, int32_t i,
                       int32_t y_first, tokens all, int32_t begin, int32_t end) {
    _Alignas(64) float sums[2 * PAGED__SUMS_MAX];
    const int32_t at_once = paged__tiles_at_once(job->w[i]->type);
    for (int32_t t = begin; t < end; t += at_once)
        run_tiles(k, job, i, y_first, all, t, PAGED_MIN(at_once, end - t), sums, PAGED__SUMS_MAX);
}

/* By `layer`: more tiles at once, whose sums would be large for a stack. Two groups of tokens need no room,
 * and without it there are no more at once. */
static void run_wide(const paged__linear_kernels_table *k, const paged__linear_job *job, int32_t i,
                     int32_t y_first, tokens all, int32_t begin, int32_t end) {
    _Static_assert(2 * PAGED__WIDE_SUMS_MAX * sizeof(float) == PAGED__ROOM_BYTES,
                   "two matrices of a gated unit");
    const bool many = job->room && all.end - all.begin > 2 * job->x->group;
    const int32_t at_once = many ? PAGED__WIDE_TILES : end - begin;
    for (int32_t t = begin; t < end; t += at_once)
        run_tiles(k, job, i, y_first, all, t, PAGED_MIN(at_once, end - t), job->room,
                  many ? PAGED__WIDE_SUMS_MAX : 0);
}

/* The first tile that begins at or behind byte `cut` of a stack of tiles, in steps of `at_once`. */
static int32_t tile_at(int64_t cut, const paged__matrix *w, int64_t bytes_before, int64_t tile_bytes,
                       int32_t at_once) {
    const int64_t step = tile_bytes * at_once, inside = PAGED_MAX(cut - bytes_before, 0);
    return (int32_t)PAGED_MIN((inside + step / 2) / step * at_once, (int64_t)w->n_tiles);
}

/* Tiles [begin, end) of each matrix that are the part of a thread. */
typedef struct part {
    int32_t begin[4], end[4];
} part;

/* up: of a gated unit, whose gate is w[0]; else NULL. */
static part part_of(const paged__matrix *const *w, int32_t n, const paged__matrix *up, int32_t ith,
                    int32_t nth) {
    part p;
    int64_t tile_bytes[4], all = 0, before = 0;
    for (int32_t i = 0; i < n; i++) {
        tile_bytes[i] = (int64_t)(w[i]->tile_bytes + (up ? up->tile_bytes : 0));
        all += tile_bytes[i] * w[i]->n_tiles;
    }
    const int64_t cuts[2] = {(int64_t)((double)all * ith / nth), (int64_t)((double)all * (ith + 1) / nth)};
    for (int32_t i = 0; i < n; i++) {
        const int32_t at_once = paged__tiles_at_once(w[i]->type);
        p.begin[i] = tile_at(cuts[0], w[i], before, tile_bytes[i], at_once);
        p.end[i] = ith + 1 == nth ? w[i]->n_tiles : tile_at(cuts[1], w[i], before, tile_bytes[i], at_once);
        before += tile_bytes[i] * w[i]->n_tiles;
    }
    return p;
}

/* Of many tokens threads divide the tokens: what a thread makes of its rows it reads itself afterwards (a
 * model divides its rows alike), so that they stay in its cache. Into how many parts: of MANY_TOKENS or
 * more, but for whole groups, and each with as many threads, which then divide the tiles. */
static int32_t n_token_parts(int32_t n_tokens, int32_t nth) {
    enum { MANY_TOKENS = 128 };
    int32_t n = PAGED_MAX(1, PAGED_MIN(nth, n_tokens / MANY_TOKENS));
    while (nth % n != 0) n--;
    return n;
}

/* Those of thread *ith of *nth, which then say who it is among those who have the same. */
static tokens tokens_of(const paged__act *x, int32_t *ith, int32_t *nth) {
    const int32_t n_groups = (x->n_tokens + x->group - 1) / x->group;
    const int32_t n = n_token_parts(x->n_tokens, *nth), alike = *nth / n, i = *ith / alike;
    *ith %= alike;
    *nth = alike;
    return (tokens){(int32_t)((int64_t)n_groups * i / n) * x->group,
                    PAGED_MIN((int32_t)((int64_t)n_groups * (i + 1) / n) * x->group, x->n_tokens)};
}

const uint8_t *paged__linear_begin(const paged__matrix *const *w, int32_t n_w, int32_t n_tokens, int32_t ith,
                                   int32_t nth, size_t *n_bytes) {
    const part p = part_of(w, n_w, NULL, ith, nth);
    for (int32_t i = 0; i < n_w && n_token_parts(n_tokens, nth) == 1; i++) {
        if (p.begin[i] >= p.end[i]) continue;
        *n_bytes = (size_t)(p.end[i] - p.begin[i]) * w[i]->tile_bytes;
        return paged__tile_at(w[i], p.begin[i]);
    }
    *n_bytes = 0;
    return NULL;
}

bool paged__linear_into_act(const paged__matrix *w) {
    return paged__is_quantised(w->type) && w->n_rows % (2 * PAGED__ACT_BLOCK) == 0;
}

void paged__linear_run(const paged__linear_job *job, int32_t ith, int32_t nth) {
    const paged__linear_kernels_table *k = kernels_for(job->x);
    const bool glu = job->epilogue >= PAGED__SWIGLU;
    const int32_t n = glu ? 1 : job->n_w;
    PAGED_ASSERT(job->n_w >= 1 && job->n_w <= 4 && (!glu || job->n_w == 2));
    for (int32_t i = 0; i < job->n_w; i++)
        PAGED_ASSERT(job->w[i]->n_cols == job->x->n_cols &&
                     paged__wants_quantised(job->w[i]->type) == (job->x->kind != PAGED__ACT_F32) &&
                     (!glu || job->w[i]->n_rows == job->w[0]->n_rows));
    PAGED_ASSERT(!job->act || (glu && paged__linear_into_act(job->w[0]) && job->act->kind == job->x->kind));
    if (job->x->n_tokens <= 0) return;
    const tokens all = tokens_of(job->x, &ith, &nth);
    const part p = part_of(job->w, n, glu ? job->w[1] : NULL, ith, nth);
    for (int32_t i = 0, y_first = 0; i < n; y_first += job->w[i++]->n_rows)
        if (p.begin[i] < p.end[i])
            (k->layer ? run_wide : run_narrow)(k, job, i, y_first, all, p.begin[i], p.end[i]);
}
