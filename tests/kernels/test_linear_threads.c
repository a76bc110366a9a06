/* Goal: real threads may pack, set activations and run side by side. Method: a team that goes through a layer
 * (barriers between the stages, as an engine has), under TSan too, and its bits against one thread's. */
#include <pthread.h>

#include "kernels/linear_world.h"

enum { N_THREADS = 3, ROWS = 200, COLS = 512, TOKENS = 29, ROUNDS = 20 };

typedef struct layer {
    weights *v;
    paged__matrix w; /* packed by the team */
    paged__act act;
    const inputs *in;
    float *y;
    pthread_barrier_t barrier;
} layer;

typedef struct member {
    layer *layer;
    int32_t ith;
} member;

static void *run_member(void *arg) {
    const member *m = arg;
    layer *l = m->layer;
    const paged__linear_job job = {.w = {&l->w}, .n_w = 1, .x = &l->act, .y = l->y, .y_stride = ROWS};
    for (int32_t round = 0; round < ROUNDS; round++) {
        paged__matrix_pack(&l->w, l->v->gguf, l->v->row_bytes, m->ith, N_THREADS);
        for (int32_t t = m->ith; t < TOKENS; t += N_THREADS)
            paged__act_set(&l->act, t, l->in->x + t * l->in->stride, NULL, 0);
        pthread_barrier_wait(&l->barrier);
        paged__linear_run(&job, m->ith, N_THREADS);
        pthread_barrier_wait(&l->barrier);
    }
    return NULL;
}

static void side_by_side(void) {
    uint64_t rng = test_seed;
    weights v = weights_make(PAGED__W_Q5_K, ROWS, COLS, true, 1, &rng);
    inputs in = inputs_make(TOKENS, COLS, &rng);
    paged__act act = activate(&in, true, 0, TOKENS);
    float *want = take((size_t)TOKENS * ROWS, sizeof *want);
    const paged__linear_job job = {.w = {&v.w}, .n_w = 1, .x = &act, .y = want, .y_stride = ROWS};
    paged__linear_run(&job, 0, 1);

    layer l = {.v = &v, .w = v.w, .act = act, .in = &in, .y = take((size_t)TOKENS * ROWS, sizeof *want)};
    l.w.data = take_aligned(paged__matrix_bytes(PAGED__W_Q5_K, ROWS, COLS));
    l.act.data = take_aligned(paged__act_bytes(true, TOKENS, COLS));
    CHECK_EQ(pthread_barrier_init(&l.barrier, NULL, N_THREADS), 0);
    pthread_t threads[N_THREADS];
    member members[N_THREADS];
    for (int32_t i = 0; i < N_THREADS; i++) {
        members[i] = (member){&l, i};
        CHECK_EQ(pthread_create(&threads[i], NULL, run_member, &members[i]), 0);
    }
    for (int32_t i = 0; i < N_THREADS; i++) pthread_join(threads[i], NULL);
    CHECK(memcmp(l.y, want, (size_t)TOKENS * ROWS * sizeof *want) == 0);
    CHECK(memcmp(l.w.data, v.w.data, paged__matrix_bytes(PAGED__W_Q5_K, ROWS, COLS)) == 0);
    pthread_barrier_destroy(&l.barrier);
    free(l.w.data);
    free(l.act.data);
    free(l.y);
    free(want);
    free(act.data);
    inputs_free(&in);
    weights_free(&v);
}

#define TESTS(X) X(side_by_side)
TEST_MAIN(TESTS)
