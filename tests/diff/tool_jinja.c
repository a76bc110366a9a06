/* tests/diff/tool_jinja.c: renders chat templates in batch, for the comparison with jinja2.
 *
 * A request on stdin is a line with four numbers, the bytes of three texts and the time, and then the texts:
 *
 *     TEMPLATE_BYTES VARIABLES_BYTES MESSAGES_BYTES NOW\n TEMPLATE VARIABLES MESSAGES
 *
 * VARIABLES is a JSON object, MESSAGES a JSON list or nothing. The answer is "ok BYTES\n" with the text
 * and its
 * marks (a '1' or '0' for each byte: raw or not), or "STATUS BYTES\n" with the message of the error.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "model/jinja/jinja.h"

static char *take(size_t n) {
    char *text = malloc(n + 1);
    if (!text || fread(text, 1, n, stdin) != n) exit(1);
    text[n] = 0;
    return text;
}

static bool is_role(const char *role, size_t len) {
    return (len == 4 && memcmp(role, "user", 4) == 0) || (len == 9 && memcmp(role, "assistant", 9) == 0) ||
           (len == 6 && memcmp(role, "system", 6) == 0);
}

static paged_status render(const char *const texts[3], const size_t sizes[3], int64_t now,
                           paged__j_rendered *out, paged_error *err) {
    paged__jinja *t = NULL;
    paged__j_run *run = NULL;
    paged_status status = paged__jinja_compile(texts[0], sizes[0], NULL, &t, err);
    if (!status) status = paged__j_run_create(t, NULL, now, &run, err);
    if (!status) {
        paged__j_set_members(run, texts[1], sizes[1]);
        if (sizes[2]) paged__j_set_messages_json(run, texts[2], sizes[2], is_role);
        status = paged__j_run_render(run, out, err);
    }
    paged__j_run_free(run);
    paged__jinja_free(t);
    return status;
}

int main(void) {
    size_t sizes[3];
    int64_t now;
    while (scanf("%zu %zu %zu %" SCNd64, &sizes[0], &sizes[1], &sizes[2], &now) == 4 && getchar() == '\n') {
        char *texts[3];
        for (int i = 0; i < 3; i++) texts[i] = take(sizes[i]);
        paged__j_rendered out = {0};
        paged_error err = {0};
        const paged_status status = render((const char *const *)texts, sizes, now, &out, &err);
        if (status) {
            printf("%s %zu\n%s", paged_status_name(status), strlen(err.message), err.message);
        } else {
            printf("ok %zu\n", out.len);
            fwrite(out.bytes, 1, out.len, stdout);
            for (size_t i = 0; i < out.len; i++) putchar('0' + out.raw[i]);
        }
        paged__free(out.bytes);
        paged__free(out.raw);
        for (int i = 0; i < 3; i++) free(texts[i]);
    }
    return !feof(stdin);
}
