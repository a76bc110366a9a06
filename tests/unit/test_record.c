/* test_record.c: a record as bytes is believed only if every bit of it is right.
 *
 * Method: a record is sealed; it opens to the same values; with any bit of front or groups turned, with
 * another key, shape or fingerprint, it does not.
 */
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
    X(every_bit_counts) X(foreign_is_refused) X(shapes_that_cannot_be) X(names_of_notes)
TEST_MAIN(TESTS)
