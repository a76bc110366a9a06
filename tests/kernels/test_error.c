/* Goal: what each KV type costs in accuracy is known and stays so. Method: attention over the same f32 keys
 * and values, stored in each type, against the textbook in double on what was given, not on what was stored.
 * The table that is printed is the one in docs/attention.md. */
#include "kernels/world.h"

enum { HEADS = 8, KV_HEADS = 2, DIM = 128, KEYS = 2048, QUERIES = 16, N_DATA = 3 };

static const char *const data_names[N_DATA] = {"uniform", "gaussian", "outlier channels"};

static float gaussian(uint64_t *rng) {
    float sum = 0; /* of 12 uniform ones in [-1, 1), each of variance 1 / 3 */
    for (int32_t i = 0; i < 12; i++) sum += draw_unit(rng);
    return sum / 2;
}

/* Keys whose channels 7 and 100 are about 20 and -15, as in some layers of real models: the other channels
 * decide, as what all keys have in common does not matter. */
static float draw_data(int32_t data, bool is_key, int64_t i, uint64_t *rng) {
    if (data == 0) return draw_unit(rng);
    float x = gaussian(rng);
    if (data == 2 && is_key && i % DIM == 7) x += 20;
    if (data == 2 && is_key && i % DIM == 100) x -= 15;
    return x;
}

static world draw_world(int32_t data, uint64_t *rng) {
    const int32_t n_keys = KEYS, n_queries = QUERIES;
    shape s = {.type = PAGED_TYPE_F32,
               .layout = PAGED_LAYOUT_PACKED,
               .block_size = 32,
               .n_heads = HEADS,
               .n_kv_heads = KV_HEADS,
               .dk = DIM,
               .dv = DIM};
    world w = world_make(s, 1, &n_keys, &n_queries, FILL_UNIFORM, rng);
    for (int64_t i = 0; i < (int64_t)KEYS * KV_HEADS * DIM; i++) {
        w.k[i] = draw_data(data, true, i, rng);
        w.v[i] = draw_data(data, false, i, rng);
    }
    for (int64_t i = 0; i < (int64_t)QUERIES * HEADS * DIM; i++) w.q[i] = draw_data(data, false, i, rng);
    return w;
}

typedef struct errors {
    double largest, rms; /* in units of the root mean square of the exact result */
} errors;

static errors errors_of(const double *want, const result *got) {
    int64_t n = (int64_t)QUERIES * HEADS * DIM;
    double square = 0, want_square = 0;
    errors e = {0};
    for (int64_t i = 0; i < n; i++) {
        double error = fabs((double)got->out[i] - want[i]);
        CHECK(isfinite(error));
        e.largest = fmax(e.largest, error);
        square += error * error;
        want_square += want[i] * want[i];
    }
    e.rms = sqrt(square / want_square);
    e.largest /= sqrt(want_square / (double)n);
    return e;
}

/* About twice what was measured, for root mean squares [data][type]; f16, f32, bf16, i8. */
static const double rms_most[N_DATA][4] = {
    {4e-4, 1e-6, 5e-3, 1e-2},
    {6e-4, 2e-6, 8e-3, 2.5e-2},
    {1.2e-3, 2e-6, 1.2e-2, 3.2e-2},
};

static void error_of_each_type(void) {
    static double want[QUERIES * HEADS * DIM];
    static const paged_type types[4] = {PAGED_TYPE_F32, PAGED_TYPE_F16, PAGED_TYPE_BF16, PAGED_TYPE_I8};
    printf("%-18s %-6s %10s %10s\n", "data", "type", "rms", "max");
    for (int32_t data = 0; data < N_DATA; data++) {
        uint64_t rng = test_seed;
        world w = draw_world(data, &rng);
        for (int32_t i = 0; i < QUERIES; i++)
            for (int32_t head = 0; head < HEADS; head++) {
                double lse, size;
                dense_row(&w, 0, i, head, want + ((int64_t)i * HEADS + head) * DIM, &lse, &size);
            }
        for (int32_t t = 0; t < 4; t++) {
            world stored_as = w; /* the same arrays */
            stored_as.s.type = types[t];
            place p = place_make(&stored_as, w.s.layout, w.s.block_size, false, false, false, &rng);
            result r = run_all(&stored_as, &p, 1);
            errors e = errors_of(want, &r);
            printf("%-18s %-6s %10.1e %10.1e\n", data_names[data], type_name(types[t]), e.rms, e.largest);
            CHECK(e.rms <= rms_most[data][types[t]]);
            result_free(&r);
            place_free(&p);
        }
        world_free(&w);
    }
}

#define TESTS(X) X(error_of_each_type)
TEST_MAIN(TESTS)
