/* test_record.c: a record as bytes is believed only if every bit of it is right.
 *
 * Method: a record is sealed; it opens to the same values; with any bit of front or groups turned, with
 * another key, shape or fingerprint, it does not. What copies and sums in one go is compared with xxHash,
 * with the processor's vectors and without.
 */
#include "mem/hash.h"
#include "store/store.h"
#include "test.h"

enum { BLOCK = 16, TOKENS = 11 };
static const uint8_t fingerprint[] = "model, types, layout, kernels";
static const size_t bytes_of_group[3] = {512, 96, 1000};

static paged__shape shape_of(size_t fingerprint_bytes) {
    paged__shape shape;
    paged_store_shape is = {fingerprint, fingerprint_bytes, BLOCK, 3, {512, 96, 1000}};
    CHECK_EQ(paged__shape_copy(&shape, &is, NULL), PAGED_OK);
    return shape;
}

static int32_t tokens[BLOCK];
static uint8_t groups[3][1000], front[512];

static paged_record sealed(const paged__shape *shape) {
    uint64_t state = test_seed;
    paged_record record = {.first = 32, .n_tokens = TOKENS, .tokens = tokens, .groups = 5};
    memset(record.key.bytes, 7, 16);
    memset(record.parent.bytes, 9, 16);
    memset(tokens, 0, sizeof tokens);
    for (int i = 0; i < TOKENS; i++) tokens[i] = (int32_t)(paged__rand(&state) % 50000);
    for (int g = 0; g < 3; g++) {
        record.bytes[g] = groups[g];
        for (size_t i = 0; i < bytes_of_group[g]; i++) groups[g][i] = (uint8_t)paged__rand(&state);
    }
    CHECK(shape->front_bytes <= sizeof front);
    paged__record_seal(shape, &record, front);
    return record;
}

static void opens_to_what_was_sealed(void) {
    paged__shape shape = shape_of(sizeof fingerprint);
    const paged_record record = sealed(&shape);
    int32_t found_tokens[BLOCK];
    paged_record found = {.key = record.key, .tokens = found_tokens};
    CHECK(paged__record_open(&shape, front, &found));
    CHECK(paged__key_equal(&found.parent, &record.parent));
    CHECK_EQ(found.first, 32);
    CHECK_EQ(found.n_tokens, TOKENS);
    CHECK_EQ(found.groups, 5);
    CHECK(memcmp(found_tokens, tokens, sizeof tokens) == 0);
    CHECK(paged__record_group_right(&shape, front, 0, groups[0]));
    CHECK(paged__record_group_right(&shape, front, 2, groups[2]));
    CHECK(!paged__record_group_right(&shape, front, 0, groups[2]));
    CHECK_EQ(paged__record_payload(&shape, 5), 1512);
    struct iovec parts[PAGED__RECORD_PARTS];
    CHECK_EQ(paged__record_parts(&shape, &record, 5, front, parts), 3);
    CHECK(parts[0].iov_base == front && parts[0].iov_len == 320);
    CHECK(parts[2].iov_base == groups[2] && parts[2].iov_len == 1000);
    paged__shape_free(&shape);
}

static void every_bit_counts(void) {
    paged__shape shape = shape_of(sizeof fingerprint);
    const paged_record record = sealed(&shape);
    int32_t found_tokens[BLOCK];
    for (size_t bit = 0; bit < shape.front_bytes * 8; bit++) {
        paged_record found = {.key = record.key, .tokens = found_tokens};
        front[bit / 8] ^= (uint8_t)(1u << bit % 8);
        if (paged__record_open(&shape, front, &found))
            test_fail(__FILE__, __LINE__, "bit %zu of the front was believed", bit);
        front[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    for (int g = 0; g < 3; g += 2)
        for (size_t bit = 0; bit < bytes_of_group[g] * 8; bit++) {
            groups[g][bit / 8] ^= (uint8_t)(1u << bit % 8);
            if (paged__record_group_right(&shape, front, g, groups[g]))
                test_fail(__FILE__, __LINE__, "bit %zu of group %d was believed", bit, g);
            groups[g][bit / 8] ^= (uint8_t)(1u << bit % 8);
        }
    paged__shape_free(&shape);
}

/* To one place it is what it is in pieces. */
static void packs_what_it_seals(void) {
    paged__shape shape = shape_of(sizeof fingerprint);
    const paged_record record = sealed(&shape);
    uint8_t packed[2048];
    memset(packed, 0xee, sizeof packed);
    CHECK_EQ(paged__record_pack(&shape, &record, packed), shape.front_bytes + 1512);
    CHECK(memcmp(packed, front, shape.front_bytes) == 0);
    CHECK(memcmp(packed + shape.front_bytes, groups[0], 512) == 0);
    CHECK(memcmp(packed + shape.front_bytes + 512, groups[2], 1000) == 0);
    CHECK_EQ(packed[shape.front_bytes + 1512], 0xee);
    paged__shape_free(&shape);
}

/* Small sizes, sizes around whole pieces of 8 KiB, where what is left for the last may be less than xxHash
 * takes at once, and some by chance, at any address. */
static void copies_and_sums(void) {
    enum { MOST = 70000 };
    uint64_t state = test_seed;
    uint8_t *from = malloc(MOST + 64), *to = malloc(MOST + 64);
    CHECK(from && to);
    for (size_t i = 0; i < MOST + 64; i++) from[i] = (uint8_t)paged__rand(&state);
    for (size_t i = 0; i < 3000; i++) {
        const size_t n = i < 600    ? i
                         : i < 2400 ? 8192 * (1 + i % 8) - 300 + i % 600
                                    : paged__rand(&state) % MOST;
        const size_t a = paged__rand(&state) % 32, b = paged__rand(&state) % 32;
        const uint64_t right = XXH3_64bits(from + a, n);
        for (int k = 0; k < 2; k++) {
            paged_cpu_mask(k ? 0 : UINT32_MAX);
            memset(to, 0, n + 64);
            if (paged__copy_summed(to + b, from + a, n) != right || memcmp(to + b, from + a, n) != 0 ||
                (b && to[b - 1]) || to[b + n])
                test_fail(__FILE__, __LINE__, "%zu bytes from %zu to %zu, masked %d, seed %llu", n, a, b, k,
                          (unsigned long long)test_seed);
        }
    }
    paged_cpu_mask(UINT32_MAX);
    free(from);
    free(to);
}

static void foreign_is_refused(void) {
    paged__shape shape = shape_of(sizeof fingerprint), other = shape_of(sizeof fingerprint - 1);
    const paged_record record = sealed(&shape);
    int32_t found_tokens[BLOCK];
    paged_record found = {.key = record.key, .tokens = found_tokens};
    CHECK(memcmp(shape.id, other.id, sizeof shape.id) != 0);
    CHECK(!paged__record_open(&other, front, &found));
    found.key.bytes[15] ^= 1;
    CHECK(!paged__record_open(&shape, front, &found));
    paged__shape_free(&shape);
    paged__shape_free(&other);
}

static void shapes_that_cannot_be(void) {
    paged__shape out = {0};
    const paged_store_shape good = {fingerprint, sizeof fingerprint, BLOCK, 3, {512, 96, 1000}};
    paged_store_shape bad[6] = {good, good, good, good, good, good};
    bad[0].fingerprint = NULL;
    bad[1].fingerprint_bytes = PAGED__FINGERPRINT_MAX + 1;
    bad[2].block_size = 0;
    bad[3].n_groups = 0;
    bad[4].n_groups = PAGED_GROUPS_MAX + 1;
    bad[5].block_bytes[1] = 0;
    for (int i = 0; i < 6; i++) CHECK_EQ(paged__shape_copy(&out, &bad[i], NULL), PAGED_ERR_INVALID_ARG);
    CHECK(out.is.fingerprint == NULL);
}

static void names_of_notes(void) {
    char longest[130];
    memset(longest, 'a', sizeof longest);
    longest[129] = 0;
    static const char *const bad[] = {"",    ".",    "..",  ".a",   "../a",    "/tmp/a",
                                      "a/b", "a\\b", "a b", "\xff", "\xc3\xa4"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        CHECK_EQ(paged__note_check(bad[i], 1, NULL), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged__note_check(NULL, 1, NULL), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged__note_check(longest, 1, NULL), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged__note_check(longest + 1, 0, NULL), PAGED_OK);
    CHECK_EQ(paged__note_check("chat-01", PAGED__NOTE_MAX, NULL), PAGED_OK);
    CHECK_EQ(paged__note_check("chat-01", PAGED__NOTE_MAX + 1, NULL), PAGED_ERR_INVALID_ARG);
    char *copy = paged__note_copy("ab", 1);
    CHECK_STR(copy, "a");
    free(copy);
}

#define TESTS(X)                                                                                             \
    X(opens_to_what_was_sealed)                                                                              \
    X(every_bit_counts)                                                                                      \
    X(packs_what_it_seals) X(copies_and_sums) X(foreign_is_refused) X(shapes_that_cannot_be) X(names_of_notes)
TEST_MAIN(TESTS)
