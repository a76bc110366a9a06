/* Goal: a stop string ends the text where it begins, however the bytes are cut, and nothing that could be its
 * beginning is shown before. Method: random texts over two letters, so that near misses are many, against a
 * search in the whole text. */
#include "engine/stop.h"
#include "test.h"

enum { TEXT_MAX = 200 };

/* Where the first complete one begins: the one that ends first, of these the longest; -1: none. */
static int64_t find_in(const char *text, int64_t n, const char *const *strings, int32_t n_strings) {
    for (int64_t end = 1; end <= n; end++) {
        int64_t longest = 0;
        for (int32_t i = 0; i < n_strings; i++) {
            const int64_t len = (int64_t)strlen(strings[i]);
            if (len <= end && len > longest && memcmp(text + end - len, strings[i], (size_t)len) == 0)
                longest = len;
        }
        if (longest) return end - longest;
    }
    return -1;
}

static void random_texts(void) {
    uint64_t state = test_seed;
    for (int32_t round = 0; round < (test_long ? 200000 : 5000); round++) {
        char text[TEXT_MAX], strings[4][10];
        const char *list[4];
        const int32_t n_strings = 1 + (int32_t)(paged__rand(&state) % 4);
        const int64_t n = (int64_t)(paged__rand(&state) % TEXT_MAX);
        for (int32_t i = 0; i < n_strings; i++) {
            const size_t len = 1 + paged__rand(&state) % 9;
            for (size_t j = 0; j < len; j++) strings[i][j] = "ab"[paged__rand(&state) % 2];
            strings[i][len] = 0;
            list[i] = strings[i];
        }
        for (int64_t i = 0; i < n; i++)
            text[i] = paged__rand(&state) % 20 ? "ab"[paged__rand(&state) % 2] : 'c';
        const int64_t want = find_in(text, n, list, n_strings);
        paged__stop stop;
        CHECK_EQ(paged__stop_init(&stop, list, n_strings, NULL), PAGED_OK);
        int64_t at = 0;
        bool goes_on = true;
        while (at < n && goes_on) {
            const int64_t piece = 1 + (int64_t)(paged__rand(&state) % 6),
                          len = piece < n - at ? piece : n - at;
            goes_on = paged__stop_push(&stop, text + at, (size_t)len, true);
            at += len;
            CHECK(stop.safe <= at && (want < 0 || stop.safe <= want));
            /* Nothing is held back that cannot be the beginning of one. */
            if (goes_on) CHECK(at - stop.safe < 9);
        }
        paged__stop_finish(&stop);
        CHECK_EQ(stop.found, want);
        CHECK_EQ(stop.safe, want < 0 ? n : want);
        if (want >= 0) CHECK(memcmp(text + want, list[stop.which], strlen(list[stop.which])) == 0);
    }
}

static void unarmed(void) {
    const char *list[] = {"stop"};
    paged__stop stop;
    CHECK_EQ(paged__stop_init(&stop, list, 1, NULL), PAGED_OK);
    CHECK(paged__stop_push(&stop, "a stop, st", 10, false));
    CHECK_EQ(stop.safe, 8); /* "st" may go on */
    CHECK(!paged__stop_push(&stop, "op!", 3, true));
    CHECK_EQ(stop.found, 8);
}

static void refused(void) {
    paged__stop stop;
    paged_error err;
    char longest[PAGED__STOP_BYTES_MAX + 2];
    const char *list[PAGED__STOP_STRINGS_MAX + 1];
    memset(longest, 'x', sizeof longest);
    longest[sizeof longest - 1] = 0;
    for (int i = 0; i <= PAGED__STOP_STRINGS_MAX; i++) list[i] = "y";
    CHECK_EQ(paged__stop_init(&stop, list, PAGED__STOP_STRINGS_MAX, &err), PAGED_OK);
    CHECK_EQ(paged__stop_init(&stop, list, PAGED__STOP_STRINGS_MAX + 1, &err), PAGED_ERR_INVALID_ARG);
    list[3] = "";
    CHECK_EQ(paged__stop_init(&stop, list, 5, &err), PAGED_ERR_INVALID_ARG);
    CHECK(strstr(err.message, "stop string 3") != NULL);
    list[3] = longest;
    CHECK_EQ(paged__stop_init(&stop, list, 5, &err), PAGED_ERR_INVALID_ARG);
    list[3] = longest + 1; /* 256 bytes */
    CHECK_EQ(paged__stop_init(&stop, list, 5, &err), PAGED_OK);
    CHECK(!paged__stop_push(&stop, longest, sizeof longest - 1, true));
    CHECK_EQ(stop.found, 0);
}

#define TESTS(X) X(random_texts) X(unarmed) X(refused)
TEST_MAIN(TESTS)
