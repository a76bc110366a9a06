/* test.h: the harness of the C tests. One program a file, one process a program.
 *
 *     static void adds(void) { CHECK(1 + 1 == 2); }
 *     #define TESTS(X) X(adds)
 *     TEST_MAIN(TESTS)
 *
 *   test_x [--long] [--seed N] [FILTER]     FILTER: only tests whose name contains it
 *
 * A failed CHECK ends its test, not the program. The last line is "N passed, N failed". Random tests take
 * test_seed, which is printed with every failure, so that a run can be repeated.
 */
#ifndef PAGED_TESTS_TEST_H
#define PAGED_TESTS_TEST_H

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static jmp_buf test_jump;
static uint64_t test_seed = 1; /* --seed */
static bool test_long;         /* --long: the counts that the issues state, not a sample of them */

__attribute__((format(printf, 3, 4), noreturn, unused)) static void test_fail(const char *file, int line,
                                                                              const char *fmt, ...) {
    va_list args;
    printf("%s:%d: ", file, line);
    va_start(args, fmt);
    vprintf(fmt, args);
    va_end(args);
    printf(" (seed %" PRIu64 ")\n", test_seed);
    longjmp(test_jump, 1);
}

#define CHECK(cond)                                                                                          \
    do {                                                                                                     \
        if (!(cond)) test_fail(__FILE__, __LINE__, "CHECK(%s)", #cond);                                      \
    } while (0)

/* Integers that must be equal; prints both. */
#define CHECK_EQ(got, want)                                                                                  \
    do {                                                                                                     \
        long long got_ = (long long)(got), want_ = (long long)(want);                                        \
        if (got_ != want_)                                                                                   \
            test_fail(__FILE__, __LINE__, "%s is %lld, not %s = %lld", #got, got_, #want, want_);            \
    } while (0)

#define CHECK_STR(got, want)                                                                                 \
    do {                                                                                                     \
        const char *got_ = (got), *want_ = (want);                                                           \
        if (strcmp(got_, want_) != 0)                                                                        \
            test_fail(__FILE__, __LINE__, "%s is \"%s\", not \"%s\"", #got, got_, want_);                    \
    } while (0)

struct test_case {
    const char *name;
    void (*run)(void);
};

__attribute__((unused)) static int test_main(int argc, char **argv, const struct test_case *cases,
                                             int n_cases) {
    const char *filter = "";
    volatile int n_passed = 0, n_failed = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--long") == 0)
            test_long = true;
        else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc)
            test_seed = strtoull(argv[++i], NULL, 0);
        else
            filter = argv[i];
    }
    for (volatile int i = 0; i < n_cases; i++) {
        if (!strstr(cases[i].name, filter)) continue;
        if (setjmp(test_jump) == 0) {
            cases[i].run();
            n_passed++;
        } else {
            printf("FAIL %s\n", cases[i].name);
            n_failed++;
        }
        fflush(stdout);
    }
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed != 0;
}

#define TEST_CASE_(name) {#name, name},
#define TEST_MAIN(LIST)                                                                                      \
    int main(int argc, char **argv) {                                                                        \
        static const struct test_case cases[] = {LIST(TEST_CASE_)};                                          \
        return test_main(argc, argv, cases, (int)(sizeof cases / sizeof cases[0]));                          \
    }

#endif
