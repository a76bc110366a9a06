/* tests/diff/tool_tokens.c: many texts to token ids, and back, for the comparisons with llama.cpp: a run for
 * each text would load the vocabulary each time.
 *
 * The input is records, the length in bytes as a line and then the bytes. A line of JSON comes out for each:
 * the ids, and the bytes that they give back, in hexadecimal.
 *
 *     tool_tokens MODEL [--control] [--special] < records      exit code 0, 1 on any error, 2 on wrong usage
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "paged/model.h"

enum { TEXT_MAX = 1 << 24 };

static void print_back(const paged_tokenizer *tok, const int32_t *tokens, int32_t n) {
    static char out[PAGED_DETOK_MAX];
    paged_detok detok;
    paged_detok_init(&detok, tok, true);
    for (int32_t i = 0; i <= n; i++) {
        const int32_t len =
            i < n ? paged_detok_push(&detok, tokens[i], out) : paged_detok_finish(&detok, out);
        for (int32_t k = 0; k < len; k++) printf("%02x", (unsigned char)out[k]);
    }
}

static int tokenize(const paged_tokenizer *tok, const char *text, size_t len, uint32_t flags) {
    paged_error err;
    int32_t n;
    int32_t *tokens = malloc((len + 8) * sizeof *tokens);
    if (!tokens || paged_tokenize(tok, text, len, flags, tokens, (int32_t)len + 8, &n, &err)) {
        fprintf(stderr, "tool_tokens: %s\n", tokens ? err.message : "no memory");
        free(tokens);
        return 1;
    }
    printf("{\"tokens\": [");
    for (int32_t i = 0; i < n; i++) printf("%s%d", i ? ", " : "", tokens[i]);
    printf("], \"back\": \"");
    print_back(tok, tokens, n);
    printf("\"}\n");
    free(tokens);
    return 0;
}

static int run(const paged_tokenizer *tok, uint32_t flags) {
    char *text = malloc(TEXT_MAX);
    size_t len;
    int rc = text ? 0 : 1;
    while (rc == 0 && scanf("%zu", &len) == 1) {
        if (len > TEXT_MAX || getchar() != '\n' || fread(text, 1, len, stdin) != len)
            rc = (fprintf(stderr, "tool_tokens: a record that ends too early\n"), 1);
        else
            rc = tokenize(tok, text, len, flags);
    }
    free(text);
    return rc;
}

int main(int argc, char **argv) {
    uint32_t flags = 0;
    for (int i = 2; i < argc; i++) {
        if (strcmp(argv[i], "--control") == 0)
            flags |= PAGED_TOKENIZE_CONTROL;
        else if (strcmp(argv[i], "--special") == 0)
            flags |= PAGED_TOKENIZE_SPECIAL;
        else
            argc = 0;
    }
    if (argc < 2) {
        fprintf(stderr, "usage: tool_tokens MODEL [--control] [--special] < records\n");
        return 2;
    }
    const paged_model_config config = {.struct_size = sizeof config, .vocab_only = true};
    paged_model *model;
    paged_error err;
    if (paged_model_load(argv[1], &config, &model, &err)) {
        fprintf(stderr, "tool_tokens: %s\n", err.message);
        return 1;
    }
    const int rc = run(paged_model_tokenizer(model), flags);
    paged_model_free(model);
    return rc;
}
