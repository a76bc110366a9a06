/* Goal: where rows are few, each line of K and V is asked for once at each distance, and nothing but what
 * comes. Method: tiles of many sizes at places in random order; what is asked for with a byte lies that
 * distance on in the order in which tiles are read. */
#include "ops/ops.h"
#include "test.h"

enum { N_STEPS = 6, N_TILES = (N_STEPS + 2) * PAGED__STEP_TILES, TILE_MAX = 16 * 256 * 4 };

/* Tiles of so many bytes lie at places[i] * TILE_MAX. */
typedef struct memory {
    uint8_t *bytes;
    int32_t places[N_TILES], tile_bytes;
} memory;

static paged__tiles tiles_at(const memory *m, int32_t step) {
    const int32_t *places = m->places + step * PAGED__STEP_TILES;
    paged__tiles t = {0};
    for (int32_t i = 0; i < PAGED__STEP_TILES; i++) t.at[i] = m->bytes + (size_t)places[i] * TILE_MAX;
    places += PAGED__STEP_TILES;
    for (int32_t i = 0; i < PAGED__TILES_AHEAD; i++) t.next[i] = m->bytes + (size_t)places[i] * TILE_MAX;
    return t;
}

/* How many bytes come before it, in the order in which tiles are read. */
static int64_t position(const memory *m, const void *address) {
    const int64_t at = (const uint8_t *)address - m->bytes;
    for (int32_t i = 0; i < N_TILES; i++)
        if (m->places[i] == at / TILE_MAX && at % TILE_MAX < m->tile_bytes)
            return (int64_t)i * m->tile_bytes + at % TILE_MAX;
    test_fail(__FILE__, __LINE__, "byte %lld is in no tile", (long long)at);
    return -1;
}

static void check_distance(const memory *m, int32_t distance) {
    const int32_t bytes = m->tile_bytes, most = PAGED__TILES_AHEAD * bytes - bytes / 2;
    for (int32_t step = 0; step < N_STEPS; step++) {
        const paged__tiles t = tiles_at(m, step);
        for (int32_t j = 0; j < PAGED__STEP_TILES; j++) {
            const paged__ahead a = paged__ahead_of(&t, j, paged__offset_of(distance, bytes), bytes);
            for (int64_t at = 0; at < bytes; at += 32) {
                const int64_t here = (int64_t)(step * PAGED__STEP_TILES + j) * bytes + at;
                CHECK_EQ(position(m, paged__byte_ahead(&a, at)), here + PAGED_MIN(distance, most));
            }
        }
    }
}

/* Those asked for while weights are made come right behind what the last line of K has asked for. */
static void check_lines_behind(const memory *m, paged__offset far) {
    const int64_t bytes = m->tile_bytes;
    for (int32_t step = 0; step < N_STEPS; step++) {
        const paged__tiles t = tiles_at(m, step);
        const paged__lines lines = paged__lines_behind(&t, far, m->tile_bytes);
        const int64_t first = ((step + 1) * PAGED__STEP_TILES + far.tiles) * bytes + far.bytes;
        CHECK_EQ(lines.n, (bytes - far.bytes) / 64);
        for (int32_t i = 0; i < lines.n; i++)
            CHECK_EQ(position(m, (const uint8_t *)lines.at + i * 64), first + i * 64);
    }
}

static void each_line_once(void) {
    static const int32_t sizes[] = {64, 256, 512, 1024, 1088, 2048, 4096, 5120, 8192, TILE_MAX};
    uint64_t rng = test_seed;
    memory m = {.bytes = malloc((size_t)N_TILES * TILE_MAX)};
    CHECK(m.bytes != NULL);
    for (int32_t i = 0; i < N_TILES; i++) m.places[i] = i;
    for (int32_t i = N_TILES - 1; i > 0; i--) {
        const int32_t k = (int32_t)(paged__rand(&rng) % (uint64_t)(i + 1)), p = m.places[i];
        m.places[i] = m.places[k];
        m.places[k] = p;
    }
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        m.tile_bytes = sizes[i];
        check_distance(&m, PAGED__NEARER_BYTES);
        check_distance(&m, PAGED__LESS_FAR_BYTES);
        check_lines_behind(&m, paged__offset_of(PAGED__LESS_FAR_BYTES, m.tile_bytes));
        check_lines_behind(&m, (paged__offset){.tiles = PAGED__STEP_TILES - 1});
    }
    free(m.bytes);
}

#define TESTS(X) X(each_line_once)
TEST_MAIN(TESTS)
