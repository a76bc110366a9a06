/* model/pack.c: the weights of a model in the layout of our kernels, once, at load.
 *
 * All threads pack one matrix after the other, each its own tiles, into one allocation in huge pages. What
 * has been packed is given back page by page in the mapped file (the system reads it again if somebody
 * asks, as the embedding's rows do), so that the weights are held once.
 */
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/team.h"
#include "model/model.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14; refused before */
#endif

enum { ALIGN = 64, SMALL_BYTES = 4 << 20 /* not worth starting threads */ };

typedef struct packing {
    paged_model *m;
    paged__team *team;
    void (*progress)(void *user, float fraction);
    void *user;
    size_t total_bytes, done_bytes; /* of the file */
} packing;

static size_t file_bytes(const paged__weight *w) {
    return (size_t)w->n_rows * w->row_bytes;
}

/* The whole pages of it; what is missing of advice costs memory, not correctness. */
static void advise(const paged__weight *w, int advice) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)w->rows,
                    end = begin + file_bytes(w), first = (begin + page - 1) / page * page,
                    last = end / page * page;
    if (first < last) madvise((void *)first, last - first, advice);
}

static void pack_all(void *user, int32_t ith, int32_t nth) {
    packing *p = user;
    for (int32_t i = 0; i < p->m->n_weights; i++) {
        const paged__weight *w = &p->m->weights[i];
        if (w->is_packed) paged__matrix_pack(&w->matrix, w->rows, w->row_bytes, ith, nth);
        paged__team_barrier(p->team);
        if (ith != 0) continue;
        if (w->is_packed)
            advise(w, MADV_DONTNEED);
        else if (p->progress)
            advise(w, MADV_POPULATE_READ); /* the wait for a slow disk is here and not in the first step */
        p->done_bytes += file_bytes(w);
        if (p->progress) p->progress(p->user, (float)p->done_bytes / (float)p->total_bytes);
    }
}

static const char *kernels_name(const paged_model *m) {
    for (int32_t i = 0; i < m->n_weights; i++)
        if (m->weights[i].as_bf16) return paged__linear_bf16();
    return paged__linear_kernels();
}

/* "avx512_vnni, packed q8_0, q4_1; ggml iq2_s" */
static void describe(paged_model *m) {
    size_t used = 0;
    for (int packed = 1; packed >= 0; packed--) {
        bool seen[GGML_TYPE_COUNT] = {false}, any = false;
        for (int32_t i = 0; i < m->n_weights; i++) {
            const paged__weight *w = &m->weights[i];
            if (w->is_packed != packed || seen[w->type] || !paged__model_multiplies(m, w)) continue;
            seen[w->type] = true;
            const char *gap = any ? ", " : !packed ? (used ? "; ggml " : "ggml ") : ", packed ";
            if (used < sizeof m->linear_kernels)
                used += (size_t)snprintf(m->linear_kernels + used, sizeof m->linear_kernels - used, "%s%s%s",
                                         packed && !any ? kernels_name(m) : "", gap, ggml_type_name(w->type));
            any = true;
        }
    }
}

/* Of the packed form, so that the next matrix is aligned as well; 0: our kernels do not take it. */
static size_t aligned_bytes(const paged__weight *w) {
    paged__weight_type type;
    if (!paged__weight_can_pack(w, &type)) return 0;
    const size_t n = paged__matrix_bytes(type, w->n_rows, w->n_cols);
    return (n + ALIGN - 1) / ALIGN * ALIGN;
}

/* Which matrices will be packed, and how much that takes. False: more than the address space. */
static bool measure(paged_model *m, size_t *all_file_bytes) {
    for (int32_t i = 0; i < m->n_weights; i++) {
        paged__weight *w = &m->weights[i];
        *all_file_bytes += file_bytes(w);
        const size_t n_bytes = paged__model_multiplies(m, w) ? aligned_bytes(w) : 0;
        w->is_packed = n_bytes > 0;
        if (!paged__add(m->packed_bytes, n_bytes, &m->packed_bytes)) return false;
    }
    return true;
}

/* After measure(). Weights of floats are multiplied in one way only. */
static void choose(paged_model *m, paged_linear linear) {
    paged__weight_type type;
    if (linear != PAGED_LINEAR_BF16) return;
    for (int32_t i = 0; i < m->n_weights; i++) {
        paged__weight *w = &m->weights[i];
        w->as_bf16 = w->is_packed && paged__weight_can_pack(w, &type) && paged__wants_quantised(type);
    }
}

static void lay_out(paged_model *m) {
    uint8_t *at = m->packed;
    for (int32_t i = 0; i < m->n_weights; i++) {
        paged__weight *w = &m->weights[i];
        paged__weight_type type;
        if (!w->is_packed || !paged__weight_can_pack(w, &type)) continue;
        paged__matrix_init(&w->matrix, type, w->n_rows, w->n_cols, at);
        at += aligned_bytes(w);
    }
}

paged_status paged__model_pack(paged_model *m, paged_linear linear,
                               void (*progress)(void *user, float fraction), void *user, paged_error *err) {
    packing p = {.m = m, .progress = progress, .user = user};
    if (!measure(m, &p.total_bytes) || !(m->packed = paged__alloc_huge(m->packed_bytes)))
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for %zu bytes of packed weights",
                           m->packed_bytes);
    choose(m, linear);
    lay_out(m);
    const int32_t n_threads =
        m->packed_bytes < SMALL_BYTES ? 1 : PAGED_MIN(paged_cpu_count(), (int32_t)PAGED__TEAM_MAX);
    /* Where the system gives no threads one does as well, later. */
    paged_status s = paged__team_create(n_threads, false, &p.team, NULL);
    if (s) s = paged__team_create(1, false, &p.team, err);
    if (s) return s;
    paged__team_run(p.team, pack_all, &p);
    paged__team_free(p.team);
    describe(m);
    return PAGED_OK;
}
