/* test_tokenizer.c: text becomes the right tokens and comes back as the same bytes, and no text or file does
 * harm.
 *
 * Method: vocabularies are built here and written as GGUF files by ggml's own writer. Merging is compared
 * with a naive implementation on random texts, splitting and decoding with expectations that were taken from
 * the reference tokenizers and from the Unicode standard. (tests/diff compares the real vocabulary with
 * llama.cpp.)
 */
#include "test.h"

#include <math.h>
#include <pthread.h>

#include "vocabs.h"

static char pick(uint64_t *rng, const char *of, size_t n) {
    return of[paged__rand(rng) % n];
}

/* ---- byte-level BPE ---- */

static void bpe_merges_by_rank(void) {
    paged_tokenizer *tok = create_gpt2("gpt-2");
    CHECK_IDS(tok, "hello", 0, HELLO);
    CHECK_IDS(tok, "hellhe w", 0, HELL, HE, W);
    CHECK_IDS(tok, "lll", 0, LL, 'l');
    CHECK_IDS(tok, "hexo", 0, HE, 'x', 'o');
    CHECK_IDS(tok, "\xc3\xa9", 0, 0xc3, 0xa9);
    CHECK_STR(paged__tokenizer_kind(tok), "gpt2");
    CHECK_STR(paged__tokenizer_pre(tok), "gpt-2");
    tokenize(tok, "", 0, 0);
    CHECK_EQ(n_ids, 0);
    paged__tokenizer_free(tok);
}

static void bpe_any_bytes_round_trip(void) {
    paged_tokenizer *tok = create_gpt2("smollm");
    uint64_t rng = test_seed;
    char text[64], out[PAGED_DETOK_MAX];
    for (int round = 0; round < 2000; round++) {
        size_t len = paged__rand(&rng) % sizeof text, n = 0;
        for (size_t i = 0; i < len; i++) {
            text[i] = pick(&rng, "hello \n\xe4\xbd\xa0 w1\xf0\x9f", 14);
            if (round % 2) text[i] = (char)paged__rand(&rng);
        }
        tokenize(tok, text, len, PAGED_TOKENIZE_CONTROL);
        CHECK(n_ids <= (int32_t)len);
        for (int32_t i = 0; i < n_ids; i++) {
            int32_t k = paged_token_bytes(tok, ids[i], true, out, sizeof out);
            CHECK(k > 0 && n + (size_t)k <= len && memcmp(text + n, out, (size_t)k) == 0);
            n += (size_t)k;
        }
        CHECK_EQ(n, len);
    }
    paged__tokenizer_free(tok);
}

/* Merges the pair of lowest rank, leftmost first, by looking at all pairs again each time. */
static int naive_bpe(const paged_tokenizer *tok, const char *text, int n, int32_t *out) {
    for (int i = 0; i < n; i++) out[i] = (uint8_t)text[i];
    for (;;) {
        int best = tok->merges.n, at = -1;
        for (int i = 0; i + 1 < n; i++)
            for (int m = 0; m < best; m++)
                if (tok->merges.list[m].left == out[i] && tok->merges.list[m].right == out[i + 1])
                    best = m, at = i;
        if (at < 0) return n;
        out[at] = tok->merges.list[best].result;
        for (int i = at + 1; i + 1 < n; i++) out[i] = out[i + 1];
        n--;
    }
}

static void bpe_equals_naive(void) {
    uint64_t rng = test_seed;
    for (int round = 0; round < 40; round++) {
        static char parts[MAX_MERGES][40], results[MAX_MERGES][40];
        begin("gpt2", "gpt-2");
        add_bytes_gpt2();
        for (int m = 0; m < 30; m++) {
            const char *side_text[2];
            for (int side = 0; side < 2; side++)
                side_text[side] = paged__rand(&rng) % 2 && m ? results[paged__rand(&rng) % (uint64_t)m]
                                                             : v.bytes['a' + paged__rand(&rng) % 3];
            if (strlen(side_text[0]) + strlen(side_text[1]) > 8) side_text[0] = side_text[1] = v.bytes['a'];
            snprintf(parts[m], sizeof parts[m], "%s %s", side_text[0], side_text[1]);
            snprintf(results[m], sizeof results[m], "%s%s", side_text[0], side_text[1]);
            bool seen = false;
            for (int i = 256; i < v.n; i++) seen |= strcmp(v.tokens[i], results[m]) == 0;
            v.merges[v.n_merges++] = parts[m];
            if (!seen) add(results[m], 1, 0);
        }
        paged_tokenizer *tok = create();
        for (int k = 0; k < 50; k++) {
            char text[80];
            int32_t want[80];
            int n = (int)(paged__rand(&rng) % sizeof text);
            for (int i = 0; i < n; i++) text[i] = pick(&rng, "abc", 3);
            tokenize(tok, text, (size_t)n, 0);
            int n_want = naive_bpe(tok, text, n, want);
            CHECK_EQ(n_ids, n_want);
            CHECK(memcmp(ids, want, (size_t)n_want * sizeof *want) == 0);
        }
        paged__tokenizer_free(tok);
    }
}

static void bpe_whole_words_where_the_rule_says(void) {
    for (int ignore = 0; ignore < 2; ignore++) {
        begin("gpt2", ignore ? "llama-bpe" : "dbrx");
        add_bytes_gpt2();
        int word = add("xyz", 1, 0), ab = merge("a b", "ab");
        gguf_set_val_u32(v.file, "tokenizer.ggml.bos_token_id", 7);
        paged_tokenizer *tok = create();
        if (ignore)
            CHECK_IDS(tok, "xyz", 0, word);
        else
            CHECK_IDS(tok, "xyz", 0, 'x', 'y', 'z');
        CHECK_IDS(tok, "ab", 0, ab);
        CHECK_EQ(paged__tokenizer_adds_bos(tok), ignore);
        paged__tokenizer_free(tok);
    }
}

/* A merge may give text that is no token (its bytes are given) or that is a control token (likewise). */
static void bpe_never_gives_control_tokens(void) {
    begin("gpt2", "llama-bpe");
    add_bytes_gpt2();
    add("ab", 3, 0);
    v.merges[v.n_merges++] = "a b";
    v.merges[v.n_merges++] = "c d";
    add_types(v.n);
    paged_tokenizer *tok = create();
    CHECK_IDS(tok, "ab", 0, 'a', 'b');
    CHECK_IDS(tok, "cd", 0, 'c', 'd');
    CHECK_IDS(tok, "ab", PAGED_TOKENIZE_CONTROL, 256);
    paged__tokenizer_free(tok);
}

/* ---- pre-split ---- */

static char words[TEXT_MAX];

static paged_status note_word(paged__encoder *e, const char *bytes, size_t len) {
    (void)e;
    size_t n = strlen(words);
    snprintf(words + n, sizeof words - n, "%s%.*s", n ? "|" : "", (int)len, bytes);
    return PAGED_OK;
}

static const char *split(const char *rule, const char *text) {
    paged__presplit *p = NULL;
    paged__encoder e = {0};
    paged_error err = {0};
    words[0] = 0;
    if (paged__presplit_create(rule, &p, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
    CHECK_EQ(paged__presplit_state_create(&e.split, NULL), PAGED_OK);
    CHECK_EQ(paged__presplit_run(p, &e, text, strlen(text), note_word), PAGED_OK);
    paged__presplit_state_free(e.split);
    paged__presplit_free(p);
    return words;
}

static void splits_by_rule(void) {
    CHECK_STR(split("gpt-2", "don't WE'LL"), "don|'t| WE|'|LL");
    CHECK_STR(split("gpt-2", "a  b   \n\n c 12345"), "a| | b|   \n\n| c| 12345");
    CHECK_STR(split("smollm", "a 12345"), "a| |1|2|3|4|5");
    CHECK_STR(split("smollm", "(x):\n"), "(|x|):|\n");
    CHECK_STR(split("llama-bpe", "don't WE'LL 12345"), "don|'t| WE|'LL| |123|45");
    CHECK_STR(split("llama-bpe", "(x):\n  y"), "(x|):\n| | y");
    CHECK_STR(split("qwen2", "a 123"), "a| |1|2|3");
    CHECK_STR(split("qwen2", "\xe4\xbd\xa0\xe5\xa5\xbd"
                             "12"),
              "\xe4\xbd\xa0\xe5\xa5\xbd|1|2");
    CHECK_STR(split("falcon", "a->b 12345"), "a|->|b| |123|45");
    CHECK_STR(split("deepseek-v3", "#include 1234\n"), "#include| |123|4|\n");
    CHECK_STR(split("tekken", "iPhone XMLHttp"), "i|Phone| XMLHttp");
    CHECK_STR(split("bloom", "a, b"), "a|,| b");
}

static char logged[600];

static void note_log(void *user, paged_log_level level, const char *line) {
    (void)user;
    (void)level;
    snprintf(logged, sizeof logged, "%s", line);
}

static void rule_unknown_or_missing(void) {
    paged_tokenizer *tok = NULL;
    paged_error err = {0};
    static const char *const bad[] = {"martian",     "",  "gpt",
                                      "gpt-2 phi-2", " ", "a-very-long-name-that-no-rule-has-had-until-now"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        begin("gpt2", bad[i]);
        add_bytes_gpt2();
        CHECK_EQ(try_create(&tok, &err), PAGED_ERR_UNSUPPORTED);
        CHECK(!tok && strstr(err.message, "tokenizer.ggml.pre") && strstr(err.message, bad[i]));
    }
    begin("unigram", "gpt-2");
    CHECK_EQ(try_create(&tok, &err), PAGED_ERR_UNSUPPORTED);
    CHECK(strstr(err.message, "unigram"));
    paged_log_set(note_log, NULL, PAGED_LOG_WARN);
    tok = create_gpt2(NULL);
    paged_log_set(NULL, NULL, PAGED_LOG_ERROR);
    CHECK(strstr(logged, "tokenizer.ggml.pre") && strstr(logged, "gpt-2"));
    CHECK_STR(paged__tokenizer_pre(tok), "gpt-2");
    paged__tokenizer_free(tok);
}

/* ---- SentencePiece ---- */

static void spm_round_trip(void) {
    static const char *const texts[] = {"Hello",
                                        " Hello",
                                        "  x",
                                        "",
                                        "\n",
                                        "a\tb",
                                        "\xc3\xa9",
                                        " ",
                                        "   ",
                                        "Hello ",
                                        "\xf0\x9f\x98\x80",
                                        "a</s>Hello",
                                        "</s> x",
                                        "<s></s>",
                                        "</s>",
                                        "\xff\xfe!",
                                        "a\xe4\xbd"};
    for (int prefix = 0; prefix < 2; prefix++) {
        begin_llama(true);
        gguf_set_val_bool(v.file, "tokenizer.ggml.add_space_prefix", prefix);
        paged_tokenizer *tok = create();
        for (size_t i = 0; i < sizeof texts / sizeof texts[0] - 2; i++) {
            check_round_trip(tok, texts[i], 0);
            check_round_trip(tok, texts[i], PAGED_TOKENIZE_CONTROL);
        }
        for (size_t i = sizeof texts / sizeof texts[0] - 2; i < sizeof texts / sizeof texts[0]; i++) {
            char out[PAGED_DETOK_MAX];
            size_t n = 0;
            tokenize(tok, texts[i], strlen(texts[i]), 0);
            for (int32_t k = prefix; k < n_ids; k++) { /* the bytes themselves; a stream would replace them */
                int32_t len = paged_token_bytes(tok, ids[k], false, out, sizeof out);
                CHECK(len == 1 && out[0] == texts[i][n++]);
            }
            CHECK_EQ(n, strlen(texts[i]));
        }
        paged__tokenizer_free(tok);
    }
}

static void spm_pieces(void) {
    begin_llama(true);
    paged_tokenizer *tok = create();
    const int32_t mark = 259, hello = mark + 12;
    CHECK_IDS(tok, "Hello", PAGED_TOKENIZE_SPECIAL, 1, hello);
    CHECK_IDS(tok, "</s>Hello", PAGED_TOKENIZE_CONTROL, 2, hello);
    CHECK_IDS(tok, "\xc3\xa9", 0, mark, 3 + 0xc3, 3 + 0xa9);
    /* A control token is not found by merging, however its text merges. */
    tokenize(tok, "</s>", 4, 0);
    for (int32_t i = 0; i < n_ids; i++) CHECK(!paged_token_is_control(tok, ids[i]));
    CHECK_EQ(n_ids, 3);
    /* The dummy space goes, a real one stays, also when the pieces come one by one. */
    const int32_t pieces[] = {1, hello, hello};
    CHECK_STR(decode(tok, pieces, 3, false), "Hello Hello");
    paged__tokenizer_free(tok);

    begin_llama(false);
    tok = create();
    CHECK_IDS(tok, "a\xc3\xa9", 0, 3, 9, 0);
    paged__tokenizer_free(tok);
}

/* Merges the neighbours whose joint text has the highest score, leftmost first. lens [n]: bytes of each
 * symbol of `text`. */
static int naive_spm(const paged_tokenizer *tok, const char *text, int *lens, int n) {
    for (;;) {
        int at = -1, start = 0;
        float best = -INFINITY;
        for (int i = 0; i + 1 < n; start += lens[i++]) {
            size_t len = (size_t)lens[i] + (size_t)lens[i + 1];
            for (int32_t id = 3; id < tok->n_vocab; id++) {
                if (strlen(v.tokens[id]) != len || memcmp(v.tokens[id], text + start, len) != 0) continue;
                if (tok->scores[id] > best) best = tok->scores[id], at = i;
            }
        }
        if (at < 0) return n;
        lens[at] += lens[at + 1];
        for (int i = at + 1; i + 1 < n; i++) lens[i] = lens[i + 1];
        n--;
    }
}

static void spm_equals_naive(void) {
    uint64_t rng = test_seed;
    for (int round = 0; round < 20; round++) {
        static char texts[60][8];
        begin("llama", NULL);
        add("<unk>", 2, 0), add("<s>", 3, 0), add("</s>", 3, 0);
        add("a", 1, -50), add("b", 1, -50), add("c", 1, -50);
        for (int i = 0; i < 40; i++) {
            int len = 2 + (int)(paged__rand(&rng) % 4);
            for (int k = 0; k < len; k++) texts[i][k] = pick(&rng, "abc", 3);
            texts[i][len] = 0;
            bool seen = false;
            for (int k = 0; k < v.n; k++) seen |= strcmp(v.tokens[k], texts[i]) == 0;
            if (!seen) add(texts[i], 1, -(float)(paged__rand(&rng) % 8)); /* many ties */
        }
        add_types(v.n);
        add_scores(v.n);
        gguf_set_val_bool(v.file, "tokenizer.ggml.add_space_prefix", false);
        paged_tokenizer *tok = create();
        for (int k = 0; k < 40; k++) {
            char text[80];
            int n = (int)(paged__rand(&rng) % sizeof text), lens[80], start = 0;
            for (int i = 0; i < n; i++) text[i] = pick(&rng, "abc", 3), lens[i] = 1;
            tokenize(tok, text, (size_t)n, 0);
            CHECK_EQ(n_ids, naive_spm(tok, text, lens, n));
            for (int i = 0; i < n_ids; start += lens[i++]) {
                CHECK_EQ(strlen(v.tokens[ids[i]]), lens[i]);
                CHECK(memcmp(v.tokens[ids[i]], text + start, (size_t)lens[i]) == 0);
            }
        }
        paged__tokenizer_free(tok);
    }
}

/* ---- control tokens, BOS, EOS ---- */

static void control_text_only_where_asked(void) {
    paged_tokenizer *tok = create_gpt2("smollm");
    CHECK_IDS(tok, "a<|im_end|>b", PAGED_TOKENIZE_CONTROL, 'a', END, 'b');
    tokenize(tok, "<|im_end|>", 10, 0);
    CHECK_EQ(n_ids, 10);
    CHECK_STR(decode(tok, ids, n_ids, false), "<|im_end|>");
    /* The longest at the leftmost place; user-defined tokens always. */
    CHECK_IDS(tok, "<|im_end|>!!", PAGED_TOKENIZE_CONTROL, CONTROL_LONG, '!');
    CHECK_IDS(tok, "<ud>\n\n", 0, USER_LONG);
    CHECK_IDS(tok, "<ud>\n<ud", 0, USER, '\n', '<', 'u', 'd');
    CHECK_IDS(tok, "<|im_<|im_end|>", PAGED_TOKENIZE_CONTROL, '<', '|', 'i', 'm', '_', END);
    /* Nor where the caller marks a byte of it as raw; a shorter one that ends before the mark still is. */
    static const uint8_t raw[12] = {[10] = 1};
    int32_t n = 0;
    CHECK_EQ(
        paged__tokenize_marked(tok, "<|im_end|>!!", raw, 12, PAGED_TOKENIZE_CONTROL, ids, TEXT_MAX, &n, NULL),
        PAGED_OK);
    CHECK_EQ(n, 3);
    CHECK_EQ(ids[0], END);
    CHECK_EQ(
        paged__tokenize_marked(tok, "!<|im_end|>!", raw, 12, PAGED_TOKENIZE_CONTROL, ids, TEXT_MAX, &n, NULL),
        PAGED_OK);
    CHECK_EQ(n, 12);
    CHECK(paged_token_is_control(tok, END) && !paged_token_is_control(tok, USER) &&
          !paged_token_is_control(tok, 'a'));
    CHECK(paged_token_is_eog(tok, END) && paged_token_is_eog(tok, ENDOFTEXT) &&
          !paged_token_is_eog(tok, START));
    CHECK(!paged_token_is_eog(tok, -1) && !paged_token_is_eog(tok, 100000) &&
          !paged_token_is_control(tok, -1));
    const int32_t mixed[] = {'a', END, 'b', USER};
    CHECK_STR(decode(tok, mixed, 4, false), "ab<ud>");
    CHECK_STR(decode(tok, mixed, 4, true), "a<|im_end|>b<ud>");
    CHECK_EQ(paged_token_bytes(tok, END, false, decoded, 1), 0);
    CHECK_EQ(paged_token_bytes(tok, END, true, decoded, 1), 10);
    CHECK_EQ(paged_token_bytes(tok, -1, true, decoded, 1), -1);
    CHECK_EQ(paged_token_bytes(tok, paged_token_count(tok), true, decoded, 1), -1);
    paged__tokenizer_free(tok);
}

static void bos_and_eos_as_the_file_says(void) {
    paged_tokenizer *tok = create_gpt2("gpt-2");
    CHECK(!paged__tokenizer_adds_bos(tok));
    CHECK_EQ(paged_token_bos(tok), START);
    CHECK_EQ(paged_token_eos(tok), END);
    CHECK_IDS(tok, "a", PAGED_TOKENIZE_SPECIAL, 'a');
    paged__tokenizer_free(tok);

    begin_llama(true);
    tok = create();
    CHECK(paged__tokenizer_adds_bos(tok) && paged_token_is_eog(tok, 2));
    tokenize(tok, "", 0, PAGED_TOKENIZE_SPECIAL);
    CHECK(n_ids == 1 && ids[0] == 1);
    tokenize(tok, "", 0, 0);
    CHECK_EQ(n_ids, 0);
    paged__tokenizer_free(tok);

    begin_llama(true);
    gguf_set_val_bool(v.file, "tokenizer.ggml.add_bos_token", false);
    gguf_set_val_bool(v.file, "tokenizer.ggml.add_eos_token", true);
    gguf_set_val_u32(v.file, "tokenizer.ggml.eot_token_id", 9);
    tok = create();
    tokenize(tok, "", 0, PAGED_TOKENIZE_SPECIAL);
    CHECK(n_ids == 1 && ids[0] == 2 && paged_token_is_eog(tok, 9));
    paged__tokenizer_free(tok);
}

/* ---- decoding ---- */

static void detok_replaces_maximal_subparts(void) {
    static const struct {
        const char *bytes, *text;
    } cases[] = {
        {"a\xf1\x80\x80\xe1\x80\xc2"
         "b\x80"
         "c\x80\xbf"
         "d",
         "a\ufffd\ufffd\ufffd"
         "b\ufffd"
         "c\ufffd\ufffd"
         "d"}, /* Unicode, table 3-8 */
        {"\xc0\xaf\xe0\x80\xbf\xf0\x81\x82"
         "A",
         "\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd"
         "A"},
        {"\xed\xa0\x80\xf4\x91\x92\x93\xff"
         "A",
         "\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd"
         "A"},
        {"\xf0\x9f\x98", "\ufffd"},
        {"\xf0\x9f\x98\xf0\x9f\x98\x80", "\ufffd\U0001f600"},
        {"\xe4\xbd\xa0\xe4", "\xe4\xbd\xa0\ufffd"},
    };
    paged_tokenizer *tok = create_gpt2("gpt-2");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int32_t bytes[32], n = 0;
        for (const char *p = cases[i].bytes; *p; p++) bytes[n++] = (uint8_t)*p;
        CHECK_STR(decode(tok, bytes, n, true), cases[i].text);
    }
    paged__tokenizer_free(tok);
}

/* Each push gives whole characters, and never more than three bytes wait. */
static void detok_streams_whole_characters(void) {
    paged_tokenizer *tok = create_gpt2("gpt-2");
    uint64_t rng = test_seed;
    for (int round = 0; round < 300; round++) {
        paged_detok d;
        char out[PAGED_DETOK_MAX], all[4000];
        int32_t bytes[200];
        size_t n = 0;
        paged_detok_init(&d, tok, true);
        for (int i = 0; i < 200; i++) {
            bytes[i] =
                (int32_t)(uint8_t) "\xf0\x9f\x98\x80\xe4\xbd\xa0\xc3\xa9z\xff\xc0\xed"[paged__rand(&rng) %
                                                                                       13];
            int32_t k = paged_detok_push(&d, bytes[i], out);
            CHECK(d.n_pending <= 3);
            for (int32_t j = 0, size; j < k; j += size) {
                size = paged__utf8_char((const uint8_t *)out + j, (size_t)(k - j));
                CHECK(size > 0);
            }
            memcpy(all + n, out, (size_t)k);
            n += (size_t)k;
        }
        n += (size_t)paged_detok_finish(&d, all + n);
        all[n] = 0;
        CHECK_EQ(paged_detok_finish(&d, out), 0);
        CHECK_STR(decode(tok, bytes, 200, true), all);
    }
    CHECK_EQ(decode(tok, (const int32_t[]){-1, 1 << 30}, 2, true)[0], 0);
    paged__tokenizer_free(tok);
}

/* ---- limits ---- */

static void *tokenize_long_runs(void *arg) {
    const paged_tokenizer *tok = arg;
    const size_t n = 1000 * 1000;
    static const char *const runs[] = {"A", "l", " ", "\n", "9", "!", "<", "\xff", "\xcc\x81", " \n"};
    char *text = malloc(n);
    int32_t *tokens = malloc((n + 8) * sizeof *tokens), n_tokens = 0;
    intptr_t n_failed = !text || !tokens;
    for (size_t r = 0; !n_failed && r < sizeof runs / sizeof runs[0]; r++) {
        for (size_t i = 0; i < n; i++) text[i] = runs[r][i % strlen(runs[r])];
        text[n - 1] = r % 2 ? 'x' : text[n - 1];
        const uint64_t start = paged__now_ns();
        paged_error err = {0};
        paged_tokenize(tok, text, n, PAGED_TOKENIZE_CONTROL, tokens, (int32_t)n + 8, &n_tokens, &err);
        const double took_s = (double)(paged__now_ns() - start) * 1e-9;
        if (err.status || n_tokens < 1000 || took_s > 20) { /* a quadratic way takes hours */
            printf("run %zu: %s, %d tokens, %.1f s\n", r, err.message, n_tokens, took_s);
            n_failed++;
        }
    }
    free(text);
    free(tokens);
    return (void *)n_failed;
}

static void in_small_thread(const paged_tokenizer *tok) {
    pthread_attr_t attr;
    pthread_t thread;
    void *n_failed = NULL;
    pthread_attr_init(&attr);
    CHECK_EQ(pthread_attr_setstacksize(&attr, 256 << 10), 0);
    CHECK_EQ(pthread_create(&thread, &attr, tokenize_long_runs, (void *)(uintptr_t)tok), 0);
    pthread_join(thread, &n_failed);
    CHECK_EQ((intptr_t)n_failed, 0);
}

static void long_runs_in_a_small_stack(void) {
    static const char *const all_rules[] = {"smollm",      "llama-bpe", "falcon", "deepseek-coder",
                                            "deepseek-v3", "gpt-4o",    "viking"};
    for (size_t i = 0; i < sizeof all_rules / sizeof all_rules[0]; i++) {
        if (i > 1 && !test_long) break;
        paged_tokenizer *tok = create_gpt2(all_rules[i]);
        in_small_thread(tok);
        paged__tokenizer_free(tok);
    }
    begin_llama(true);
    paged_tokenizer *tok = create();
    in_small_thread(tok);
    paged__tokenizer_free(tok);
}

static void capacity_is_kept(void) {
    paged_tokenizer *tok = create_gpt2("gpt-2");
    int32_t out[4] = {-7, -7, -7, -7}, n = -7;
    paged_error err = {0};
    CHECK_EQ(paged_tokenize(tok, "abcd", 4, 0, out, 3, &n, &err), PAGED_ERR_LIMIT);
    CHECK(n == -7 && out[0] == -7 && strstr(err.message, "4") && strstr(err.message, "3"));
    CHECK_EQ(paged_tokenize(tok, "abcd", 4, 0, NULL, 0, &n, NULL), PAGED_ERR_LIMIT);
    CHECK_EQ(paged_tokenize(tok, "abcd", 4, 0, out, 4, &n, &err), PAGED_OK);
    CHECK_EQ(n, 4);
    paged__tokenizer_free(tok);
}

/* ---- hostile files ---- */

static void expect_error(paged_status status, const char *word) {
    paged_tokenizer *tok = NULL;
    paged_error err = {0};
    CHECK_EQ(try_create(&tok, &err), status);
    CHECK(!tok);
    if (!strstr(err.message, word))
        test_fail(__FILE__, __LINE__, "\"%s\" does not name %s", err.message, word);
}

static void hostile_files_are_refused(void) {
    static char big[PAGED__TOKEN_BYTES_MAX + 2];
    begin("gpt2", "gpt-2");
    expect_error(PAGED_ERR_FORMAT, "tokenizer.ggml.tokens");
    begin("gpt2", "gpt-2"), add_bytes_gpt2();
    expect_error(PAGED_ERR_FORMAT, "tokenizer.ggml.merges");
    static const char *const ids_keys[] = {"tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",
                                           "tokenizer.ggml.eot_token_id", "tokenizer.ggml.unknown_token_id"};
    for (int i = 0; i < 4; i++) {
        begin("gpt2", "gpt-2"), add_bytes_gpt2(), merge("a b", "ab");
        gguf_set_val_u32(v.file, ids_keys[i], 257);
        expect_error(PAGED_ERR_FORMAT, ids_keys[i]);
    }
    static const char *const bad_merges[] = {"ab", "", " ", "a ", " b", "a"};
    for (int i = 0; i < 6; i++) {
        begin("gpt2", "gpt-2"), add_bytes_gpt2(), merge(bad_merges[i], "ab");
        expect_error(PAGED_ERR_FORMAT, "merge 0");
    }
    begin("gpt2", "gpt-2"), add_bytes_gpt2(), merge("a b", "ab"), add_types(v.n - 1);
    expect_error(PAGED_ERR_FORMAT, "token_type");
    begin_llama(true), add_scores(v.n - 1);
    expect_error(PAGED_ERR_FORMAT, "scores");
    begin_llama(true), v.scores[5] = NAN, add_scores(v.n);
    expect_error(PAGED_ERR_FORMAT, "not a number");
    begin_llama(true), v.tokens[9] = "<0xG1>";
    expect_error(PAGED_ERR_FORMAT, "byte token 9");
    memset(big, 'a', sizeof big - 1);
    begin("gpt2", "gpt-2"), add_bytes_gpt2(), merge("a b", "ab"), add(big, 1, 0);
    expect_error(PAGED_ERR_FORMAT, "token 257");
}

/* Odd, but harmless: duplicates, empty tokens, unknown types, merges that never apply. */
static void odd_files_are_safe(void) {
    begin("gpt2", "gpt-2");
    add_bytes_gpt2();
    add("", 1, 0), add("", 3, 0), add("", 4, 0), add("<x>", 3, 0), add("<x>", 3, 0), add("<x>", 4, 0),
        add("zz", 99, 0), add("zz", -1, 0);
    int ab = merge("a b", "ab");
    merge("a b", "ab2");
    merge("\xe4\xbd\xa0 b", "never");
    v.merges[v.n_merges++] = "q r s";
    add_types(v.n);
    paged_tokenizer *tok = create();
    CHECK_IDS(tok, "ab", 0, ab);
    CHECK_IDS(tok, "<x>", 0, 261);
    tokenize(tok,
             "qrs\xe4\xbd\xa0"
             "b",
             7, PAGED_TOKENIZE_CONTROL);
    CHECK_STR(decode(tok, ids, n_ids, true), "qrs\xe4\xbd\xa0"
                                             "b");
    paged__tokenizer_free(tok);

    begin("llama", NULL); /* one token, no bytes: what has no token is lost, nothing else */
    add("a", 1, 0);
    add_scores(1);
    tok = create();
    tokenize(tok, "abc", 3, PAGED_TOKENIZE_SPECIAL);
    CHECK(n_ids >= 1);
    paged__tokenizer_free(tok);
}

/* ---- no memory ---- */

static int n_left, n_live;

static void *failing_alloc(void *user, size_t size_bytes, size_t align) {
    (void)user;
    if (n_left-- <= 0) return NULL;
    n_live++;
    return aligned_alloc(align, (size_bytes + align - 1) / align * align);
}

static void failing_free(void *user, void *ptr) {
    (void)user;
    n_live -= ptr != NULL;
    free(ptr);
}

static void every_allocation_may_fail(void) {
    paged_allocator allocator = {failing_alloc, failing_free, NULL};
    for (int kind = 0; kind < 2; kind++) {
        if (kind)
            begin_llama(true);
        else
            begin("gpt2", "smollm"), add_bytes_gpt2(), merge("h e", "he"), merge("x y", "xy");
        paged__gguf *g = write_and_open();
        paged_status status = PAGED_ERR_NO_MEMORY;
        paged_allocator_set(&allocator);
        for (int i = 0; status == PAGED_ERR_NO_MEMORY && i < 10000; i++) {
            paged_tokenizer *tok = NULL;
            int32_t out[100], n = -1;
            n_left = i;
            n_live = 0;
            status = paged__tokenizer_create(g, &tok, NULL);
            if (!status)
                status = paged_tokenize(tok, "hehehehehe Hello, world 123", 27, 0, out, 100, &n, NULL);
            n_left = 1;
            paged__tokenizer_free(tok);
            if (n_live || (status && n != -1)) status = PAGED_ERR_CORRUPT;
        }
        paged_allocator_set(NULL);
        paged__gguf_close(g);
        CHECK_EQ(status, PAGED_OK);
    }
}

#define TESTS(X)                                                                                             \
    X(bpe_merges_by_rank)                                                                                    \
    X(bpe_any_bytes_round_trip)                                                                              \
    X(bpe_equals_naive)                                                                                      \
    X(bpe_whole_words_where_the_rule_says)                                                                   \
    X(bpe_never_gives_control_tokens)                                                                        \
    X(splits_by_rule)                                                                                        \
    X(rule_unknown_or_missing)                                                                               \
    X(spm_round_trip)                                                                                        \
    X(spm_pieces)                                                                                            \
    X(spm_equals_naive)                                                                                      \
    X(control_text_only_where_asked)                                                                         \
    X(bos_and_eos_as_the_file_says)                                                                          \
    X(detok_replaces_maximal_subparts)                                                                       \
    X(detok_streams_whole_characters)                                                                        \
    X(long_runs_in_a_small_stack)                                                                            \
    X(capacity_is_kept)                                                                                      \
    X(hostile_files_are_refused)                                                                             \
    X(odd_files_are_safe)                                                                                    \
    X(every_allocation_may_fail)
TEST_MAIN(TESTS)
