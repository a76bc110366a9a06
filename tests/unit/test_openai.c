/* Goal: whoever sends messages is told that there is no memory for them, and never that they are wrong.
 * Method: let the n-th allocation fail for n = 1, 2, 3 … until none does. */
#include <stdlib.h>

#include "server/openai.h"
#include "test.h"

static int32_t countdown; /* the countdown-th allocation fails; 0: none */

static void *failing_alloc(void *user, size_t size_bytes, size_t align) {
    (void)user;
    if (countdown > 0 && --countdown == 0) return NULL;
    return aligned_alloc(align, (size_bytes + align - 1) / align * align);
}

static void plain_free(void *user, void *ptr) {
    (void)user;
    free(ptr);
}

static const paged_allocator allocator = {failing_alloc, plain_free, NULL};

/* How many allocations failed before one round had enough. */
static int32_t count_faults(const char *text, paged_status wanted) {
    json_t *list = json_loads(text, 0, NULL);
    paged_error err = {0};
    int32_t n = 0;
    bool ok = false;
    CHECK(list != NULL);
    for (bool fired = true; fired; n += fired) {
        countdown = n + 1;
        ok = paged__openai_check_messages(list, &err);
        fired = countdown == 0;
        if (fired) CHECK(!ok && err.status == PAGED_ERR_NO_MEMORY);
    }
    countdown = 0;
    CHECK(ok == (wanted == PAGED_OK) && (ok || err.status == wanted));
    json_decref(list);
    return n;
}

static void no_memory_is_no_mistake_of_the_client(void) {
    char *content = malloc(10001), text[20100];
    memset(content, 'x', 10000);
    content[10000] = 0;
    paged_allocator_set(&allocator);
    snprintf(text, sizeof text, "[{\"role\": \"user\", \"content\": \"%s\"}]", content);
    CHECK(count_faults(text, PAGED_OK) >= 1);
    snprintf(text, sizeof text,
             "[{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"a\"},"
             "{\"type\": \"text\", \"text\": \"%s\"}]}, {\"role\": \"system\", \"content\": \"\"}]",
             content);
    CHECK(count_faults(text, PAGED_OK) >= 3);
    CHECK(count_faults("[{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"a\"}, 7]}]",
                       PAGED_ERR_INVALID_ARG) >= 1);
    CHECK_EQ(count_faults("[{\"role\": \"user\", \"content\": 7}]", PAGED_ERR_INVALID_ARG), 0);
    paged_allocator_set(NULL);
    free(content);
}

#define TESTS(X) X(no_memory_is_no_mistake_of_the_client)
TEST_MAIN(TESTS)
