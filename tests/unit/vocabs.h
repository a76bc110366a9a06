/* vocabs.h: small vocabularies for the tests of tokenizers and chats, written as GGUF files by ggml's own
 * writer, and what turns text into ids and back in a test.
 */
#ifndef PAGED_TESTS_VOCABS_H
#define PAGED_TESTS_VOCABS_H

#include <ggml.h>
#include <gguf.h>
#include <unistd.h>

#include "model/vocab.h"
#include "test.h"

/* ---- vocabularies ---- */

enum { MAX_TOKENS = 600, MAX_MERGES = 64, TEXT_MAX = 4096 };

typedef struct vocab {
    struct gguf_context *file;
    const char *tokens[MAX_TOKENS], *merges[MAX_MERGES];
    int32_t types[MAX_TOKENS];
    float scores[MAX_TOKENS];
    int n, n_merges;
    char bytes[256][8]; /* texts of the byte tokens */
} vocab;

static vocab v;

static inline int add(const char *text, int32_t type, float score) {
    CHECK(v.n < MAX_TOKENS);
    v.tokens[v.n] = text;
    v.types[v.n] = type;
    v.scores[v.n] = score;
    return v.n++;
}

static inline void begin(const char *model, const char *pre) {
    v = (vocab){.file = gguf_init_empty()};
    gguf_set_val_str(v.file, "tokenizer.ggml.model", model);
    if (pre) gguf_set_val_str(v.file, "tokenizer.ggml.pre", pre);
}

/* Token b stands for byte b, written in GPT-2's alphabet. */
static inline void add_bytes_gpt2(void) {
    int n_other = 0;
    for (int b = 0; b < 256; b++) {
        bool own = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
        int c = own ? b : 256 + n_other++;
        if (c < 0x80)
            snprintf(v.bytes[b], sizeof v.bytes[b], "%c", c);
        else
            snprintf(v.bytes[b], sizeof v.bytes[b], "%c%c", 0xc0 | c >> 6, 0x80 | (c & 0x3f));
        add(v.bytes[b], 1, 0);
    }
}

static inline void add_bytes_llama(void) {
    for (int b = 0; b < 256; b++) {
        snprintf(v.bytes[b], sizeof v.bytes[b], "<0x%02X>", (unsigned)b);
        add(v.bytes[b], 6, 0);
    }
}

/* The merge "a b" and the token it gives. */
static inline int merge(const char *parts, const char *result) {
    CHECK(v.n_merges < MAX_MERGES);
    v.merges[v.n_merges++] = parts;
    return add(result, 1, 0);
}

static inline paged__gguf *write_and_open(void) {
    char path[] = "/tmp/paged-test-tokenizer-XXXXXX";
    int fd = mkstemp(path);
    paged__gguf *g = NULL;
    paged_error err = {0};
    CHECK(fd >= 0);
    close(fd);
    if (v.n) gguf_set_arr_str(v.file, "tokenizer.ggml.tokens", v.tokens, (size_t)v.n);
    if (v.n_merges) gguf_set_arr_str(v.file, "tokenizer.ggml.merges", v.merges, (size_t)v.n_merges);
    bool written = gguf_write_to_file(v.file, path, true);
    gguf_free(v.file);
    paged_status status = written ? paged__gguf_open(path, &g, &err) : PAGED_ERR_IO;
    unlink(path);
    if (status) test_fail(__FILE__, __LINE__, "%s", err.message);
    return g;
}

static inline void add_types(int n) {
    gguf_set_arr_data(v.file, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, v.types, (size_t)n);
}

static inline void add_scores(int n) {
    gguf_set_arr_data(v.file, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, v.scores, (size_t)n);
}

static inline paged_status try_create(paged_tokenizer **tok, paged_error *err) {
    paged__gguf *g = write_and_open();
    paged_status status = paged__tokenizer_create(g, tok, err);
    paged__gguf_close(g);
    return status;
}

static inline paged_tokenizer *create(void) {
    paged_tokenizer *tok = NULL;
    paged_error err = {0};
    if (try_create(&tok, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
    return tok;
}

enum { START = 256, END, ENDOFTEXT, USER, USER_LONG, CONTROL_LONG, HE, LL, HELL, HELLO, W };

/* A small chat vocabulary of the byte-level kind. */
static inline paged_tokenizer *create_gpt2(const char *pre) {
    begin("gpt2", pre);
    add_bytes_gpt2();
    add("<|im_start|>", 3, 0);
    add("<|im_end|>", 3, 0);
    add("<|endoftext|>", 3, 0);
    add("<ud>", 4, 0);
    add("<ud>\n\n", 4, 0);
    add("<|im_end|>!", 3, 0);
    merge("h e", "he");
    merge("l l", "ll");
    merge("he ll", "hell");
    merge("hell o", "hello");
    merge("\xc4\xa0 w", "\xc4\xa0w");
    add_types(v.n);
    gguf_set_val_u32(v.file, "tokenizer.ggml.bos_token_id", START);
    gguf_set_val_u32(v.file, "tokenizer.ggml.eos_token_id", END);
    return create();
}

/* A small SentencePiece vocabulary. Tokens 0 … 2 are <unk>, <s>, </s>; "</" and "s>" would merge to </s>. */
static inline void begin_llama(bool with_bytes) {
    begin("llama", NULL);
    add("<unk>", 2, 0);
    add("<s>", 3, 0);
    add("</s>", 3, 0);
    if (with_bytes) add_bytes_llama();
    static const char *const pieces[] = {"\xe2\x96\x81",
                                         "H",
                                         "e",
                                         "l",
                                         "o",
                                         "x",
                                         "a",
                                         "b",
                                         "ll",
                                         "He",
                                         "Hell",
                                         "Hello",
                                         "\xe2\x96\x81Hello",
                                         "\xe2\x96\x81\xe2\x96\x81",
                                         "ab",
                                         "ba",
                                         "</",
                                         "s>",
                                         "<",
                                         "/",
                                         "s",
                                         ">",
                                         "\n"};
    for (size_t i = 0; i < sizeof pieces / sizeof pieces[0]; i++) add(pieces[i], 1, -(float)(i / 2));
    add_types(v.n);
    add_scores(v.n);
}

/* ---- helpers ---- */

static int32_t ids[TEXT_MAX * 4], n_ids;

static inline void tokenize(const paged_tokenizer *tok, const char *text, size_t len, uint32_t flags) {
    paged_error err = {0};
    n_ids = -1;
    if (paged_tokenize(tok, text, len, flags, ids, (int32_t)(sizeof ids / sizeof ids[0]), &n_ids, &err))
        test_fail(__FILE__, __LINE__, "%s", err.message);
}

static inline void check_ids(const paged_tokenizer *tok, const char *text, uint32_t flags, int n,
                             const int32_t *want) {
    tokenize(tok, text, strlen(text), flags);
    for (int i = 0; i < n && i < n_ids; i++)
        if (ids[i] != want[i])
            test_fail(__FILE__, __LINE__, "\"%s\": token %d is %d, not %d", text, i, ids[i], want[i]);
    if (n_ids != n) test_fail(__FILE__, __LINE__, "\"%s\": %d tokens, not %d", text, n_ids, n);
}

#define CHECK_IDS(tok, text, flags, ...)                                                                     \
    do {                                                                                                     \
        const int32_t want_[] = {__VA_ARGS__};                                                               \
        check_ids(tok, text, flags, (int)(sizeof want_ / sizeof want_[0]), want_);                           \
    } while (0)

/* Decodes ids as a stream; the text lies in `decoded` and is returned. */
static char decoded[TEXT_MAX * 16];
static size_t n_decoded;

static inline const char *decode(const paged_tokenizer *tok, const int32_t *tokens, int32_t n, bool control) {
    paged_detok d;
    paged_detok_init(&d, tok, control);
    n_decoded = 0;
    for (int32_t i = 0; i < n; i++) {
        CHECK(n_decoded + PAGED_DETOK_MAX < sizeof decoded);
        n_decoded += (size_t)paged_detok_push(&d, tokens[i], decoded + n_decoded);
    }
    n_decoded += (size_t)paged_detok_finish(&d, decoded + n_decoded);
    decoded[n_decoded] = 0;
    return decoded;
}

static inline void check_round_trip(const paged_tokenizer *tok, const char *text, uint32_t flags) {
    tokenize(tok, text, strlen(text), flags);
    CHECK_STR(decode(tok, ids, n_ids, true), text);
}

#endif
