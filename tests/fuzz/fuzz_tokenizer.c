/* fuzz_tokenizer.c: no text makes a tokenizer crash, hang, take memory out of proportion, give a token that
 * is not there, turn into a control token unasked, or come back as other bytes.
 *
 * The first byte of the input takes the vocabulary: the byte-level one under a pre-split rule, one for each
 * kind of rule, or SentencePiece with and without byte tokens and dummy space. The second says if control
 * tokens are read. What follows is the text. (Hostile vocabularies are fuzz_model's.) With libFuzzer
 * (-DPAGED_FUZZ=ON):
 *     fuzz_tokenizer -max_len=4096 NEW_FOLDER tests/fuzz/corpus/tokenizer
 * Without, it replays files, and the files of folders:
 *     fuzz_tokenizer tests/fuzz/corpus/tokenizer
 *
 * The corpus was found by the fuzzer from the strings of tests/diff/nasty.py; it is what -merge=1
 * -use_counters=0 left.
 */
#include "probe.h"
#include "unit/vocabs.h"

static const char *const rules[] = {"gpt-2",  "smollm", "llama-bpe",   "glm4",    "dbrx",
                                    "qwen2",  "qwen35", "falcon",      "default", "deepseek-coder",
                                    "tekken", "gpt-4o", "deepseek-v3", "bloom",   "viking"};
enum { N_RULES = sizeof rules / sizeof rules[0], N_VOCABS = N_RULES + 4 };

static const paged_tokenizer *vocabulary(int i) {
    static const paged_tokenizer *made[N_VOCABS];
    if (made[i]) return made[i];
    if (setjmp(test_jump)) abort(); /* a check failed, and said so */
    if (i < N_RULES) {
        made[i] = create_gpt2(rules[i]);
    } else {
        begin_llama((i - N_RULES) & 1);
        gguf_set_val_bool(v.file, "tokenizer.ggml.add_space_prefix", (i - N_RULES) & 2);
        made[i] = create();
    }
    return made[i];
}

/* The bytes of all tokens, one after the other. */
static size_t join(const paged_tokenizer *tok, const int32_t *tokens, int32_t n, char *out, size_t capacity) {
    size_t at = 0;
    for (int32_t i = 0; i < n; i++) {
        const int32_t len = paged_token_bytes(tok, tokens[i], true, out + at, (int32_t)(capacity - at));
        PROBE_MUST(len >= 0 && (size_t)len <= capacity - at);
        at += (size_t)len;
    }
    return at;
}

/* SentencePiece writes a space as U+2581, and cannot tell one from the other. Returns the new length. */
static size_t spaces(const char *text, size_t len, char *out) {
    size_t n = 0;
    for (size_t i = 0; i < len; n++) {
        const bool is_mark = len - i >= 3 && memcmp(text + i, "\xe2\x96\x81", 3) == 0;
        out[n] = is_mark ? ' ' : text[i];
        i += is_mark ? 3 : 1;
    }
    return n;
}

static void check_bytes(const paged_tokenizer *tok, int kind, const char *text, size_t len,
                        const int32_t *tokens, int32_t n, bool with_control) {
    const bool is_spm = kind >= N_RULES, has_bytes = !is_spm || ((kind - N_RULES) & 1);
    const bool has_dummy = is_spm && ((kind - N_RULES) & 2);
    const size_t capacity = 4 * len + 4096; /* an unknown character comes back as longer text */
    char *joined = malloc(capacity), *want = malloc(len + 1);
    PROBE_MUST(joined && want);
    const size_t n_joined = join(tok, tokens, n, joined, capacity);
    if (has_bytes && !(has_dummy && with_control)) { /* a dummy space may follow each control token */
        const size_t n_want = is_spm ? spaces(text, len, want) : (memcpy(want, text, len), len);
        const size_t dummy = has_dummy && n_joined == n_want + 1 && joined[0] == ' ';
        PROBE_MUST(n_joined - dummy == n_want && memcmp(joined + dummy, want, n_want) == 0);
    }
    free(joined);
    free(want);
}

/* As a stream: whole characters only. */
static void check_stream(const paged_tokenizer *tok, const int32_t *tokens, int32_t n) {
    static char out[PAGED_DETOK_MAX];
    paged_detok d;
    paged_detok_init(&d, tok, true);
    for (int32_t i = 0; i <= n; i++) {
        const int32_t len = i < n ? paged_detok_push(&d, tokens[i], out) : paged_detok_finish(&d, out);
        PROBE_MUST(len >= 0 && len <= PAGED_DETOK_MAX && d.n_pending <= 3);
        for (int32_t k = 0, size; k < len; k += size) {
            size = paged__utf8_char((const uint8_t *)out + k, (size_t)(len - k));
            PROBE_MUST(size > 0);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    if (n_bytes < 2) return 0;
    const int kind = data[0] % N_VOCABS;
    const paged_tokenizer *tok = vocabulary(kind);
    const uint32_t flags = data[1] & 1 ? PAGED_TOKENIZE_CONTROL : 0;
    const size_t len = n_bytes - 2;
    const int32_t capacity = (int32_t)len + 8;
    int32_t n = -1, again = -1;
    paged_error err = {0};
    /* Each on the heap and of its size, so that a sanitizer sees one too many. */
    char *text = malloc(len + !len);
    int32_t *tokens = malloc((size_t)capacity * sizeof *tokens);
    PROBE_MUST(text && tokens);
    memcpy(text, data + 2, len);

    probe_memory memory = {.n_left = -1};
    const paged_allocator allocator = {probe_alloc, probe_free, &memory};
    paged_allocator_set(&allocator);
    PROBE_MUST(!paged_tokenize(tok, text, len, flags, tokens, capacity, &n, &err));
    paged_allocator_set(NULL);
    PROBE_MUST(memory.used_bytes == 0 && memory.peak_bytes <= 128 * len + 65536);
    PROBE_MUST(n >= 0 && n <= capacity);
    for (int32_t i = 0; i < n; i++) {
        PROBE_MUST(tokens[i] >= 0 && tokens[i] < paged_token_count(tok));
        PROBE_MUST(flags || !paged_token_is_control(tok, tokens[i]));
    }
    check_bytes(tok, kind, text, len, tokens, n, flags != 0);
    check_stream(tok, tokens, n);
    /* Into just enough room, and into one less. */
    int32_t *exact = malloc((size_t)(n + !n) * sizeof *exact);
    PROBE_MUST(exact);
    PROBE_MUST(!paged_tokenize(tok, text, len, flags, exact, n, &again, &err) && again == n);
    PROBE_MUST(n == 0 || memcmp(exact, tokens, (size_t)n * sizeof *exact) == 0);
    if (n) PROBE_MUST(paged_tokenize(tok, text, len, flags, exact, n - 1, &again, &err) == PAGED_ERR_LIMIT);
    free(exact);
    free(tokens);
    free(text);
    return 0;
}

#ifndef PAGED_LIBFUZZER
#include "replay.h"

int main(int argc, char **argv) {
    return replay_main(argc, argv, LLVMFuzzerTestOneInput);
}
#endif
