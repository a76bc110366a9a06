/* model/presplit.c: the rules that cut text into words before byte pairs are merged, by their name in the
 * model file.
 *
 * A rule is a sequence of patterns. Each cuts every part that the pattern before it left into matches and the
 * gaps between them; a part is matched as if it were the whole text, so a lookahead ends at its border. The
 * rules are facts of the tokenizers they come from; each was compared with llama.cpp's tokens on
 * tests/diff/nasty.py and random mixtures.
 *
 * White space is written out, since PCRE2's \s has U+180E in it. Patterns have no groups that repeat, so that
 * PCRE2 needs constant memory however long a run is, and none matches the empty string. Ranges never take
 * white space along.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "model/vocab.h"

#include <stdio.h>

enum {
    MAX_PATTERNS = 5,
    MATCH_LIMIT = 200 * 1000 * 1000,
    HEAP_LIMIT_KIB = 64 * 1024,
    JIT_STACK_MAX = 4 << 20
};

#define SPACE                                                                                                \
    "\\x09-\\x0d\\x20\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{"     \
    "3000}"
#define SPACES          "[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+"
#define LINES_OR_SPACES "[" SPACE "]*[\\r\\n]+|" SPACES
#define SUFFIX          "'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
#define SYMBOLS         " ?[^" SPACE "\\p{L}\\p{N}]+"

#define GPT2 "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+|" SYMBOLS "|" SPACES
#define WORDS_DIGITS(digits)                                                                                 \
    SUFFIX "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}" digits "|" SYMBOLS "[\\r\\n]*|" LINES_OR_SPACES
/* Capitals, then small letters. Letters outside ASCII count as both. */
#define CASED(suffix, digits)                                                                                \
    "[^\\r\\n\\p{L}\\p{N}]?[^\\P{L}a-z]*[^\\P{L}A-Z]+" suffix                                                \
    "|[^\\r\\n\\p{L}\\p{N}]?[^\\P{L}a-z]+[^\\P{L}A-Z]*" suffix "|\\p{N}" digits "|" SYMBOLS                  \
    "[\\r\\n/]*|" LINES_OR_SPACES
#define BLOOM " ?[^(" SPACE "|.,!?\\x{2026}\\x{3002}\\x{ff0c}\\x{3001}\\x{964}\\x{6d4}\\x{60c})]+"

typedef struct rule {
    const char *names; /* between spaces */
    const char *patterns[MAX_PATTERNS];
    bool ignore_merges; /* a word that is a token is that token, without merging */
    bool add_bos;       /* where the file does not say */
} rule;

static const rule rules[] = {
    {" gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat mpt olmo jais trillion ",
     {GPT2},
     false,
     false},
    {" smollm starcoder refact command-r codeshell exaone minerva-7b ", {"\\p{N}", GPT2}, false, false},
    {" llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2 ", {WORDS_DIGITS("{1,3}")}, true, true},
    {" glm4 ", {WORDS_DIGITS("{1,3}")}, true, false},
    {" dbrx smaug-bpe chatglm-bpe ", {WORDS_DIGITS("{1,3}")}, false, false},
    {" qwen2 deepseek-r1-qwen stablelm2 megrez ", {WORDS_DIGITS("")}, false, false},
    {" qwen35 ",
     {SUFFIX "|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^" SPACE
             "\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|" LINES_OR_SPACES},
     false,
     false},
    {" falcon ", {"[\\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]"}, false, false},
    {" default ", {"[\\p{P}$+<=>^~|]+", GPT2, "\\p{N}+", "[0-9][0-9][0-9]"}, false, false},
    {" deepseek-coder ",
     {"[\\r\\n]", "[" SPACE "]?\\p{L}+", "[" SPACE "]?\\p{P}+",
      "[^\\x{00}-\\x{7ff}" SPACE "\\x{9fa6}-\\x{abff}\\x{e000}-\\x{10ffff}]+", "\\p{N}"},
     false,
     false},
    {" deepseek-v3 hunyuan-dense ",
     {"\\p{N}{1,3}", "[\\x{4e00}-\\x{9fa5}\\x{3040}-\\x{309f}\\x{30a0}-\\x{30ff}]+",
      "[!-/:-@\\[-`{-~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| "
      "?[\\p{P}\\p{S}]+[\\r\\n]*|" LINES_OR_SPACES},
     false,
     false},
    {" tekken ", {CASED("", "")}, true, true},
    {" gpt-4o llama4 ", {CASED("(?:" SUFFIX ")?", "{1,3}")}, false, false},
    {" bloom poro-chat gpt3-finnish ", {BLOOM}, false, false},
    {" viking ", {BLOOM, "\\p{N}"}, false, false},
};

struct paged__presplit {
    pcre2_code *codes[MAX_PATTERNS];
    int n_codes;
    paged__presplit_facts facts;
    char name[32];
};

struct paged__presplit_state {
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *jit_stack;
};

static void *pcre2_alloc(size_t size_bytes, void *user) {
    (void)user;
    return paged__alloc(size_bytes, 1);
}

static void pcre2_release(void *ptr, void *user) {
    (void)user;
    paged__free(ptr);
}

static const rule *find_rule(const char *pre) {
    char name[sizeof((paged__presplit *)0)->name + 2];
    int len = snprintf(name, sizeof name, " %s ", pre);
    if (len < 3 || (size_t)len >= sizeof name || strchr(pre, ' ')) return NULL;
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++)
        if (strstr(rules[i].names, name)) return &rules[i];
    return NULL;
}

static paged_status compile(const char *pattern, pcre2_compile_context *context, pcre2_code **out,
                            paged_error *err) {
    int code;
    size_t offset;
    *out = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_NO_UTF_CHECK, &code,
                         &offset, context);
    if (!*out) {
        char text[120] = "";
        if (code == PCRE2_ERROR_HEAP_FAILED)
            return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a pre-split rule");
        pcre2_get_error_message(code, (PCRE2_UCHAR *)text, sizeof text);
        return paged__fail(err, PAGED_ERR_UNSUPPORTED, "this PCRE2 cannot compile the pre-split rule: %s",
                           text);
    }
    /* Without a just-in-time compiler, or memory for its code, matching is slower and gives the same. */
    pcre2_jit_compile(*out, PCRE2_JIT_COMPLETE);
    return PAGED_OK;
}

paged_status paged__presplit_create(const char *pre, paged__presplit **out, paged_error *err) {
    const rule *r = find_rule(pre);
    if (!r)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED,
                           "pre-split rule \"%.60s\" (tokenizer.ggml.pre) is not known", pre);
    paged_status status = PAGED_ERR_NO_MEMORY;
    paged__presplit *p = paged__calloc(1, sizeof *p);
    pcre2_general_context *general = pcre2_general_context_create(pcre2_alloc, pcre2_release, NULL);
    pcre2_compile_context *context = general ? pcre2_compile_context_create(general) : NULL;
    if (!p || !context) {
        paged__fail(err, status, "no memory for pre-split rule \"%s\"", pre);
        goto done;
    }
    snprintf(p->name, sizeof p->name, "%s", pre);
    p->facts = (paged__presplit_facts){p->name, r->ignore_merges, r->add_bos};
    status = PAGED_OK;
    while (!status && p->n_codes < MAX_PATTERNS && r->patterns[p->n_codes]) {
        status = compile(r->patterns[p->n_codes], context, &p->codes[p->n_codes], err);
        p->n_codes += status == PAGED_OK;
    }
done:
    pcre2_compile_context_free(context);
    pcre2_general_context_free(general);
    if (status)
        paged__presplit_free(p);
    else
        *out = p;
    return status;
}

void paged__presplit_free(paged__presplit *p) {
    if (!p) return;
    for (int i = 0; i < p->n_codes; i++) pcre2_code_free(p->codes[i]);
    paged__free(p);
}

paged__presplit_facts paged__presplit_get_facts(const paged__presplit *p) {
    return p->facts;
}

paged_status paged__presplit_state_create(paged__presplit_state **out, paged_error *err) {
    paged__presplit_state *s = paged__calloc(1, sizeof *s);
    pcre2_general_context *general = pcre2_general_context_create(pcre2_alloc, pcre2_release, NULL);
    if (s && general) {
        s->match = pcre2_match_data_create(1, general);
        s->context = pcre2_match_context_create(general);
        s->jit_stack =
            pcre2_jit_stack_create(32 << 10, JIT_STACK_MAX, general); /* NULL where there is no JIT */
    }
    pcre2_general_context_free(general);
    if (!s || !s->match || !s->context) {
        paged__presplit_state_free(s);
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory to split text into words");
    }
    pcre2_set_match_limit(s->context, MATCH_LIMIT);
    pcre2_set_heap_limit(s->context, HEAP_LIMIT_KIB);
    if (s->jit_stack) pcre2_jit_stack_assign(s->context, NULL, s->jit_stack);
    *out = s;
    return PAGED_OK;
}

void paged__presplit_state_free(paged__presplit_state *s) {
    if (!s) return;
    pcre2_match_data_free(s->match);
    pcre2_match_context_free(s->context);
    pcre2_jit_stack_free(s->jit_stack);
    paged__free(s);
}

/* The next match at or after *begin: its borders. False: none, or an error in *status. */
static bool next_match(const pcre2_code *code, paged__encoder *e, const char *text, size_t len, size_t *begin,
                       size_t *end, paged_status *status) {
    const uint32_t options = PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY;
    const paged__presplit_state *s = e->split;
    int rc = pcre2_match(code, (PCRE2_SPTR)text, len, *begin, options, s->match, s->context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
        rc = pcre2_match(code, (PCRE2_SPTR)text, len, *begin, options | PCRE2_NO_JIT, s->match, s->context);
    if (rc >= 0) {
        const size_t *borders = pcre2_get_ovector_pointer(s->match);
        *begin = borders[0];
        *end = borders[1];
        return true;
    }
    if (rc == PCRE2_ERROR_NOMEMORY)
        *status = paged__fail(e->err, PAGED_ERR_NO_MEMORY, "no memory to split %zu bytes into words", len);
    else if (rc != PCRE2_ERROR_NOMATCH)
        *status = paged__fail(e->err, PAGED_ERR_LIMIT,
                              "splitting %zu bytes into words takes too long (PCRE2 error %d)", len, rc);
    return false;
}

typedef paged_status (*word_fn)(paged__encoder *e, const char *bytes, size_t len);

/* Patterns from `level` on. The depth is the number of patterns, not a matter of the text. */
static paged_status split(const paged__presplit *p, int level, paged__encoder *e, const char *text,
                          size_t len, word_fn word) {
    if (len == 0) return PAGED_OK;
    if (level == p->n_codes) return word(e, text, len);
    paged_status status = PAGED_OK;
    size_t pos = 0, begin = 0, end = 0;
    while (!status && pos < len) {
        begin = pos;
        if (!next_match(p->codes[level], e, text, len, &begin, &end, &status)) begin = end = len;
        if (!status) status = split(p, level + 1, e, text + pos, begin - pos, word);
        if (!status) status = split(p, level + 1, e, text + begin, end - begin, word);
        pos = end;
    }
    return status;
}

paged_status paged__presplit_run(const paged__presplit *p, paged__encoder *e, const char *text, size_t len,
                                 word_fn word) {
    return split(p, 0, e, text, len, word);
}
