/* embed_engine.c: libpaged-engine in its shortest form: a model, one prompt, text as it comes.
 *
 *     cc embed_engine.c $(pkg-config --cflags --libs paged-engine)
 *     ./a.out model.gguf "The capital of France is"
 */
#include <paged/engine.h>
#include <paged/model.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void ok(paged_status status, const paged_error *err) {
    if (status == PAGED_OK) return;
    fprintf(stderr, "%s\n", err ? err->message : paged_status_text(status));
    exit(1);
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s MODEL.gguf PROMPT\n", argv[0]);
        return 2;
    }
    paged_error err;
    paged_model *model;
    ok(paged_model_load(argv[1], NULL, &model, &err), &err);

    /* A context of 1024 tokens and the pool that it needs; everything else is the default. */
    paged_engine_config config;
    paged_engine_config_init(&config);
    config.n_ctx = 1024;
    paged_engine *engine;
    ok(paged_engine_create(model, &config, &engine, &err), &err);

    size_t len = strlen(argv[2]);
    int32_t capacity = (int32_t)len + 8, n_tokens;
    int32_t *tokens = malloc((size_t)capacity * sizeof *tokens);
    if (!tokens) return 1;
    ok(paged_tokenize(paged_model_tokenizer(model), argv[2], len, PAGED_TOKENIZE_SPECIAL, tokens, capacity,
                      &n_tokens, &err),
       &err);

    paged_request request;
    paged_request_init(&request);
    request.tokens = tokens;
    request.n_tokens = n_tokens;
    request.max_tokens = 40;
    uint64_t id;
    ok(paged_engine_submit(engine, &request, &id, &err), &err);
    free(tokens); /* the engine has its own copy */

    paged_output out = {0};
    while (out.finish == PAGED_FINISH_NONE) {
        int32_t n_active;
        ok(paged_engine_step(engine, &n_active, &err), &err);
        ok(paged_engine_read(engine, id, &out), NULL);
        fwrite(out.text, 1, out.text_len, stdout);
        fflush(stdout);
    }
    printf("\n[%s after %d tokens, %d blocks]\n", paged_finish_name(out.finish), out.completion_tokens,
           out.blocks_used);

    ok(paged_engine_release(engine, id), NULL);
    paged_engine_free(engine);
    paged_model_free(model);
    return out.finish == PAGED_FINISH_ERROR;
}
