/* fuzz_http.c: no bytes make the HTTP reader crash or read a request differently when they come in pieces,
 * and no body of a request breaks the reader of the OpenAI API's JSON. The first byte says how the others are
 * cut.
 *
 * Promises: the same state, status and use of the bytes whole, byte by byte and cut in pieces; never more
 * bytes used than given; a body within its bound; strings that end; what the JSON reader accepts has a prompt
 * with tokens, and what it refuses a reason.
 *
 * With libFuzzer (-DPAGED_FUZZ=ON):
 *     fuzz_http -max_len=4096 NEW_FOLDER tests/fuzz/corpus/http
 * Without, it replays files, and the files of folders:
 *     fuzz_http tests/fuzz/corpus/http
 */
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

#include "base/base.h"
#include "server/http.h"
#include "server/openai.h"
#include "tiny_model.h"

#define MUST(cond)                                                                                           \
    do {                                                                                                     \
        if (!(cond)) {                                                                                       \
            fprintf(stderr, "%s:%d: broken promise: %s\n", __FILE__, __LINE__, #cond);                       \
            __builtin_trap();                                                                                \
        }                                                                                                    \
    } while (0)

enum { BODY_MAX = 2048 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

/* piece 0: all at once. Returns how many bytes the request took. */
static size_t feed(paged__http *h, const char *data, size_t n, size_t piece) {
    size_t used = 0;
    *h = (paged__http){.body_max = BODY_MAX};
    while (used < n && h->state < PAGED__HTTP_DONE) {
        const size_t most = piece ? PAGED_MIN(piece, n - used) : n - used;
        const size_t took = paged__http_feed(h, data + used, most);
        MUST(took <= most);
        MUST(took == most || h->state >= PAGED__HTTP_DONE);
        used += took;
    }
    return used;
}

static void compare(const paged__http *a, const paged__http *b) {
    MUST(a->state == b->state && a->status == b->status && a->n_headers == b->n_headers);
    MUST(a->body.len == b->body.len && a->body.len <= BODY_MAX);
    MUST(a->body.len == 0 || memcmp(a->body.data, b->body.data, a->body.len) == 0);
    if (a->state != PAGED__HTTP_DONE) return;
    MUST(strcmp(a->method, b->method) == 0 && strcmp(a->path, b->path) == 0 &&
         strcmp(a->query, b->query) == 0);
    MUST(a->keep_alive == b->keep_alive);
    for (int32_t i = 0; i < a->n_headers; i++)
        MUST(strcmp(a->headers[i].name, b->headers[i].name) == 0 &&
             strcmp(a->headers[i].value, b->headers[i].value) == 0);
}

static const paged_model *tiny_model(void) {
    static paged_model *model;
    const tiny_shape shape = {1, 1, 1, 8, 16, 64, GGML_TYPE_F32};
    char path[] = "/tmp/fuzz_http_XXXXXX";
    paged_error err;
    if (model) return model;
    const int fd = mkstemp(path);
    MUST(fd >= 0 && close(fd) == 0);
    MUST(tiny_model_write(path, &shape, 1));
    const paged_status status = paged_model_load(path, NULL, &model, &err);
    unlink(path);
    MUST(status == PAGED_OK);
    return model;
}

static void read_json(const char *text, size_t len, bool is_chat) {
    paged__openai_world world = {.model = tiny_model(), .name = "tiny"};
    paged__openai_request request;
    paged_error err = {0};
    json_error_t where;
    paged_request_init(&world.defaults);
    json_t *body = json_loadb(text, len, JSON_REJECT_DUPLICATES, &where);
    if (!body) return;
    if (paged__openai_parse(&world, body, is_chat, &request, &err)) {
        MUST(request.n_prompts >= 1 && request.request.n >= 1);
        MUST(request.n_prompts * request.request.n <= PAGED_CHOICES_MAX);
        MUST(request.prompts[0].tokens && request.request.tokens == request.prompts[0].tokens);
        paged__openai_free(&request);
    } else {
        MUST(err.status != PAGED_OK && err.message[0]);
    }
    json_decref(body);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    if (n_bytes == 0) return 0;
    const char *text = (const char *)data + 1;
    const size_t n = n_bytes - 1;
    paged__http whole, other;
    char value[64];
    const size_t used = feed(&whole, text, n, 0);
    const size_t pieces[] = {1, (size_t)data[0] + 2};
    for (int i = 0; i < 2; i++) {
        const size_t also = feed(&other, text, n, pieces[i]);
        MUST(also == used);
        compare(&whole, &other);
        paged__http_reset(&other);
    }
    if (whole.state == PAGED__HTTP_DONE) {
        paged__http_query(&whole, "a", value, sizeof value);
        paged__http_header(&whole, "authorization");
        read_json(whole.body.data, whole.body.len, data[0] & 1);
    }
    paged__http_reset(&whole);
    /* A body of its own, so that it need not be a whole request. */
    read_json(text, n, data[0] & 1);
    return 0;
}

#ifndef PAGED_LIBFUZZER
#include "replay.h"

int main(int argc, char **argv) {
    return replay_main(argc, argv, LLVMFuzzerTestOneInput);
}
#endif
