/* fuzz_jinja.c: no template and no JSON makes the template engine crash, hang, take memory out of
 * proportion, or mark what the template wrote as content.
 *
 * The input is a template, a 0 byte, and JSON for its variables. With libFuzzer (-DPAGED_FUZZ=ON):
 *     fuzz_jinja -max_len=2048 NEW_FOLDER tests/fuzz/corpus/jinja
 * Without, it replays files, and the files of folders:
 *     fuzz_jinja tests/fuzz/corpus/jinja
 *
 * The corpus was found by the fuzzer from the templates of tests/diff; it is what -set_cover_merge=1
 * -use_counters=0 left, less what is longer than 1000 bytes.
 *
 * The chunks of the arena are small, so that a sanitizer sees reads behind an allocation. Without raw
 * bytes in the template's reach, that is without variables, nothing of the output may be raw.
 */
#include <stdlib.h>

#include "model/jinja/jinja.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static const paged__jinja_limits limits = {
    .memory_bytes = 4 << 20, .output_bytes = 1 << 18, .steps = 200000, .chunk_bytes = 1};

/* False: it did not render. */
static bool render(const paged__jinja *t, const char *json, size_t len, paged__j_rendered *out) {
    paged__j_run *run = NULL;
    paged_error err = {0};
    if (paged__j_run_create(t, &limits, 1755000000, &run, &err)) abort();
    if (json) paged__j_set_members(run, json, len);
    const paged_status status = paged__j_run_render(run, out, &err);
    if (status && (!err.message[0] || err.status != status || strchr(err.message, '\n'))) abort();
    paged__j_run_free(run);
    return status == PAGED_OK;
}

static void check(const paged__jinja *t, const char *json, size_t len) {
    paged__j_rendered a = {0}, b = {0};
    if (render(t, json, len, &a)) {
        /* The same again; a template does not change. */
        if (!render(t, json, len, &b) || a.len != b.len || memcmp(a.bytes, b.bytes, a.len + 1) != 0 ||
            memcmp(a.raw, b.raw, a.len) != 0)
            abort();
        for (size_t i = 0; i < a.len; i++)
            if (a.raw[i] > (json != NULL)) abort();
    }
    paged__free(a.bytes);
    paged__free(a.raw);
    paged__free(b.bytes);
    paged__free(b.raw);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    const uint8_t *nul = n_bytes ? memchr(data, 0, n_bytes) : NULL;
    const size_t len = nul ? (size_t)(nul - data) : n_bytes;
    char *text = calloc(len + !len, 1);
    paged__jinja *t = NULL;
    paged_error err = {0};
    if (!text) return 0;
    if (len) memcpy(text, data, len);
    if (paged__jinja_compile(text, len, &limits, &t, &err) == PAGED_OK) {
        free(text); /* a compiled template keeps nothing of it */
        text = NULL;
        check(t, NULL, 0);
        if (nul) check(t, (const char *)nul + 1, n_bytes - len - 1);
    }
    paged__jinja_free(t);
    free(text);
    return 0;
}

#ifndef PAGED_LIBFUZZER
#include "replay.h"

int main(int argc, char **argv) {
    return replay_main(argc, argv, LLVMFuzzerTestOneInput);
}
#endif
