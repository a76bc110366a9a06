/* model/tokenizer.c: from GGUF metadata to a tokenizer, and from text to tokens.
 *
 * Text is first cut at the tokens that are matched as they stand: user-defined ones always, control tokens
 * where the caller asks for them. The longest at the leftmost place wins. What lies between is raw text for
 * bpe.c or spm.c. The metadata is not trusted: all counts and ids are checked here, and everything that is
 * kept is copied.
 */
#include "model/vocab.h"

#include <stdlib.h>

/* Control tokens that end a generation in models whose files name only one of them. */
static const char *const end_texts[] = {
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "</s>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_turn|>",
    "<eos>",
    "<|return|>",
    "<｜end▁of▁sentence｜>",
};

static bool is_end_text(const char *text) {
    for (size_t i = 0; i < sizeof end_texts / sizeof end_texts[0]; i++)
        if (strcmp(text, end_texts[i]) == 0) return true;
    return false;
}

/* ---- loading: tokens and their types ---- */

/* The type decides how a token is used: a user-defined one that reads like the end of a turn is a control
 * token that the file forgot to mark, and left so it would let text end a turn. */
static uint8_t token_type(int32_t in_file, const char *text, int32_t id) {
    if (in_file < PAGED__TOKEN_NORMAL || in_file > PAGED__TOKEN_BYTE) return PAGED__TOKEN_NORMAL;
    if (in_file != PAGED__TOKEN_USER || !is_end_text(text)) return (uint8_t)in_file;
    paged__log(PAGED_LOG_WARN, "token %d \"%s\" is not marked as a control token; taken for one", id, text);
    return PAGED__TOKEN_CONTROL;
}

static paged_status add_token(paged_tokenizer *tok, int32_t id, const char *text, char *buf,
                              paged_error *err) {
    uint8_t type = tok->types[id];
    size_t len = strlen(text), shown = len;
    bool pure = true;
    const char *bytes = text;
    if (tok->kind == PAGED__VOCAB_GPT2 && paged__token_is_text(tok, id) && type != PAGED__TOKEN_USER) {
        shown = len = paged__bpe_decode(text, buf, &pure);
        bytes = buf;
    } else if (tok->kind == PAGED__VOCAB_LLAMA) {
        for (const char *p = text; (p = strstr(p, "\xe2\x96\x81")) != NULL; p += 3) shown -= 2;
    }
    if (shown > PAGED__TOKEN_BYTES_MAX)
        return paged__fail(err, PAGED_ERR_FORMAT, "token %d has %zu bytes, at most %d", id, shown,
                           PAGED__TOKEN_BYTES_MAX);
    bool findable = len > 0 && pure && paged__token_is_text(tok, id) &&
                    (tok->kind == PAGED__VOCAB_GPT2 || type != PAGED__TOKEN_BYTE);
    if (!paged__pieces_add(&tok->pieces, bytes, len, findable))
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for token %d", id);
    tok->eog[id] = type == PAGED__TOKEN_CONTROL && is_end_text(text);
    return PAGED_OK;
}

static paged_status load_tokens(const paged__gguf *g, paged_tokenizer *tok, paged_error *err) {
    static const char key[] = "tokenizer.ggml.tokens", types_key[] = "tokenizer.ggml.token_type";
    const int32_t *types = NULL;
    int64_t n, n_types;
    paged_status status = paged__gguf_arr_str(g, key, true, &n, err);
    if (!status) status = paged__gguf_arr_i32(g, types_key, false, &types, &n_types, err);
    if (status) return status;
    if (n < 1 || n > PAGED__VOCAB_MAX)
        return paged__fail(err, PAGED_ERR_FORMAT, "%s has %lld entries, not 1 to %d", key, (long long)n,
                           PAGED__VOCAB_MAX);
    if (paged__gguf_has(g, types_key) && n_types != n)
        return paged__fail(err, PAGED_ERR_FORMAT, "%s has %lld entries for %lld tokens", types_key,
                           (long long)n_types, (long long)n);
    tok->n_vocab = (int32_t)n;
    size_t longest = 0;
    for (int64_t i = 0; i < n; i++) longest = PAGED_MAX(longest, strlen(paged__gguf_arr_str_at(g, key, i)));
    tok->types = paged__alloc((size_t)n, sizeof *tok->types);
    tok->eog = paged__calloc((size_t)n, sizeof *tok->eog);
    char *buf = paged__alloc(longest + 1, 1);
    if (!tok->types || !tok->eog || !buf || paged__pieces_init(&tok->pieces))
        status = paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for %lld tokens", (long long)n);
    for (int32_t i = 0; !status && i < tok->n_vocab; i++) {
        const char *text = paged__gguf_arr_str_at(g, key, i);
        tok->types[i] = n_types ? token_type(types[i], text, i) : PAGED__TOKEN_NORMAL;
        status = add_token(tok, i, text, buf, err);
    }
    paged__free(buf);
    return status;
}

/* ---- loading: tokens that are matched in the text ---- */

typedef struct special {
    const char *bytes; /* [len] */
    size_t len;
    int32_t id;
    uint8_t type;
} special;

static int compare_specials(const void *a, const void *b) {
    const special *x = a, *y = b;
    int order = memcmp(x->bytes, y->bytes, PAGED_MIN(x->len, y->len));
    if (order) return order;
    if (x->len != y->len) return x->len < y->len ? -1 : 1;
    if (x->type != y->type) return x->type < y->type ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* Of tokens with the same text and type only the first is kept, so that a text has three at most. `list` is
 * sorted. */
static size_t drop_duplicates(special *list, size_t n) {
    size_t n_kept = 0;
    for (size_t i = 0; i < n; i++) {
        const special *last = n_kept ? &list[n_kept - 1] : NULL;
        bool same = last && last->type == list[i].type && last->len == list[i].len &&
                    memcmp(last->bytes, list[i].bytes, last->len) == 0;
        if (!same) list[n_kept++] = list[i];
    }
    return n_kept;
}

static bool is_special(const paged_tokenizer *tok, int32_t id) {
    return !paged__token_is_text(tok, id) || tok->types[id] == PAGED__TOKEN_USER;
}

static paged_status load_specials(paged_tokenizer *tok, paged_error *err) {
    size_t n = 0, len;
    for (int32_t i = 0; i < tok->n_vocab; i++) n += is_special(tok, i);
    special *list = paged__alloc(n, sizeof *list);
    tok->specials = paged__alloc(n, sizeof *tok->specials);
    if (!list || !tok->specials) {
        paged__free(list);
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for %zu control tokens", n);
    }
    n = 0;
    for (int32_t i = 0; i < tok->n_vocab; i++) {
        const char *bytes = paged__piece(&tok->pieces, i, &len);
        if (is_special(tok, i) && len > 0) list[n++] = (special){bytes, len, i, tok->types[i]};
        tok->has_user_tokens |= tok->types[i] == PAGED__TOKEN_USER;
    }
    if (n) qsort(list, n, sizeof *list, compare_specials);
    n = drop_duplicates(list, n);
    for (size_t i = 0; i < n; i++) {
        tok->specials[i] = list[i].id;
        tok->special_from[(uint8_t)list[i].bytes[0] + 1]++;
    }
    tok->n_specials = (int32_t)n;
    for (int b = 0; b < 256; b++) tok->special_from[b + 1] += tok->special_from[b];
    paged__free(list);
    return PAGED_OK;
}

/* ---- loading: the rest ---- */

/* An id from the file, checked; `missing` stands where the file has none. */
static paged_status load_id(const paged__gguf *g, const paged_tokenizer *tok, const char *key,
                            int32_t missing, int32_t *out, paged_error *err) {
    uint32_t id = UINT32_MAX;
    paged_status status = paged__gguf_u32(g, key, false, 0, (uint32_t)tok->n_vocab - 1, &id, err);
    if (!status) *out = id != UINT32_MAX ? (int32_t)id : missing < tok->n_vocab ? missing : -1;
    return status;
}

static paged_status load_ids(const paged__gguf *g, paged_tokenizer *tok, paged_error *err) {
    bool llama = tok->kind == PAGED__VOCAB_LLAMA;
    int32_t eot = -1, eom = -1;
    tok->add_bos = llama || paged__presplit_get_facts(tok->presplit).add_bos;
    tok->add_space_prefix = llama;
    paged_status status = load_id(g, tok, "tokenizer.ggml.bos_token_id", llama ? 1 : -1, &tok->bos, err);
    if (!status) status = load_id(g, tok, "tokenizer.ggml.eos_token_id", llama ? 2 : -1, &tok->eos, err);
    if (!status) status = load_id(g, tok, "tokenizer.ggml.unknown_token_id", llama ? 0 : -1, &tok->unk, err);
    if (!status) status = load_id(g, tok, "tokenizer.ggml.eot_token_id", -1, &eot, err);
    if (!status) status = load_id(g, tok, "tokenizer.ggml.eom_token_id", -1, &eom, err);
    if (!status) status = paged__gguf_bool(g, "tokenizer.ggml.add_bos_token", false, &tok->add_bos, err);
    if (!status) status = paged__gguf_bool(g, "tokenizer.ggml.add_eos_token", false, &tok->add_eos, err);
    if (!status && llama)
        status = paged__gguf_bool(g, "tokenizer.ggml.add_space_prefix", false, &tok->add_space_prefix, err);
    if (status) return status;
    tok->add_bos = tok->add_bos && tok->bos >= 0;
    tok->add_eos = tok->add_eos && tok->eos >= 0;
    if (tok->eos >= 0) tok->eog[tok->eos] = true;
    if (eot >= 0) tok->eog[eot] = true;
    if (eom >= 0) tok->eog[eom] = true;
    /* Text that has no token may not end a generation. */
    if (tok->unk >= 0 && (tok->eog[tok->unk] || tok->unk == tok->bos)) tok->unk = -1;
    return PAGED_OK;
}

/* Files do not say which tokens take the white space behind them along; llama.cpp goes by the name, too. */
static paged_status load_name(const paged__gguf *g, paged_tokenizer *tok, paged_error *err) {
    const char *name = "";
    paged_status status = paged__gguf_str(g, "general.name", false, &name, err);
    tok->drops_space = !status && (strcasestr(name, "phi-3") || strcasestr(name, "phi3"));
    return status;
}

static paged_status load_kind(const paged__gguf *g, paged_tokenizer *tok, paged_error *err) {
    const char *model, *pre = NULL;
    paged_status status = paged__gguf_str(g, "tokenizer.ggml.model", true, &model, err);
    if (status) return status;
    if (strcmp(model, "llama") == 0) {
        tok->kind = PAGED__VOCAB_LLAMA;
        return PAGED_OK;
    }
    if (strcmp(model, "gpt2") != 0)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED,
                           "tokenizer \"%.60s\" (tokenizer.ggml.model) is not known", model);
    tok->kind = PAGED__VOCAB_GPT2;
    status = paged__gguf_str(g, "tokenizer.ggml.pre", false, &pre, err);
    if (status) return status;
    if (!pre) {
        pre = "gpt-2";
        paged__log(PAGED_LOG_WARN,
                   "the file names no pre-split rule (tokenizer.ggml.pre): taking \"%s\"; if that is not the "
                   "model's own, its answers get worse",
                   pre);
    }
    status = paged__presplit_create(pre, &tok->presplit, err);
    if (!status) tok->ignore_merges = paged__presplit_get_facts(tok->presplit).ignore_merges;
    return status;
}

paged_status paged__tokenizer_create(const paged__gguf *g, paged_tokenizer **out, paged_error *err) {
    paged_tokenizer *tok = paged__calloc(1, sizeof *tok);
    if (!tok) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a tokenizer");
    paged_status status = load_kind(g, tok, err);
    if (!status) status = load_name(g, tok, err);
    if (!status) status = load_tokens(g, tok, err);
    if (!status) status = load_ids(g, tok, err);
    if (!status)
        status =
            tok->kind == PAGED__VOCAB_LLAMA ? paged__spm_load(g, tok, err) : paged__bpe_load(g, tok, err);
    if (!status) status = load_specials(tok, err); /* last: it points into the pieces */
    if (status)
        paged__tokenizer_free(tok);
    else
        *out = tok;
    return status;
}

void paged__tokenizer_free(paged_tokenizer *tok) {
    if (!tok) return;
    paged__pieces_free(&tok->pieces);
    paged__free(tok->types);
    paged__free(tok->eog);
    paged__free(tok->scores);
    paged__free(tok->specials);
    paged__merges_free(&tok->merges);
    paged__presplit_free(tok->presplit);
    paged__free(tok);
}

/* ---- facts ---- */

const char *paged__tokenizer_kind(const paged_tokenizer *tok) {
    return tok->kind == PAGED__VOCAB_LLAMA ? "llama" : "gpt2";
}

const char *paged__tokenizer_pre(const paged_tokenizer *tok) {
    return tok->presplit ? paged__presplit_get_facts(tok->presplit).name : "";
}

bool paged__tokenizer_adds_bos(const paged_tokenizer *tok) {
    return tok->add_bos;
}

int32_t paged_token_count(const paged_tokenizer *tok) {
    return tok->n_vocab;
}
int32_t paged_token_bos(const paged_tokenizer *tok) {
    return tok->bos;
}
int32_t paged_token_eos(const paged_tokenizer *tok) {
    return tok->eos;
}

bool paged_token_is_control(const paged_tokenizer *tok, int32_t token) {
    return token >= 0 && token < tok->n_vocab && tok->types[token] == PAGED__TOKEN_CONTROL;
}

bool paged_token_is_eog(const paged_tokenizer *tok, int32_t token) {
    return token >= 0 && token < tok->n_vocab && tok->eog[token];
}

/* ---- from text to tokens ---- */

/* Narrows specials [*low, *high), which agree up to byte `depth`, to those with byte c there. */
static void narrow(const paged_tokenizer *tok, size_t depth, uint8_t c, int32_t *low, int32_t *high) {
    for (int side = 0; side < 2; side++) { /* the first with a byte >= c, then the first with a byte > c */
        int32_t from = *low, to = *high;
        while (from < to) {
            int32_t mid = from + (to - from) / 2;
            size_t len;
            const char *bytes = paged__piece(&tok->pieces, tok->specials[mid], &len);
            int byte = depth < len ? (uint8_t)bytes[depth] : -1;
            if (byte < c + side)
                from = mid + 1;
            else
                to = mid;
        }
        if (side == 0)
            *low = from;
        else
            *high = from;
    }
}

/* The longest special token that text [len > 0] begins with, a control token only if it lies in the first
 * `n_control` bytes; -1: none. */
static int32_t match_special(const paged_tokenizer *tok, const char *text, size_t len, size_t n_control,
                             size_t *match_len) {
    int32_t low = tok->special_from[(uint8_t)text[0]], high = tok->special_from[(uint8_t)text[0] + 1],
            best = -1;
    for (size_t depth = 1; low < high; depth++) {
        /* All of them begin with the first `depth` bytes of the text; those that end here come first. */
        for (int32_t i = low; i < high; i++) {
            size_t piece_len;
            int32_t id = tok->specials[i];
            paged__piece(&tok->pieces, id, &piece_len);
            if (piece_len > depth) break;
            if (depth > n_control && tok->types[id] != PAGED__TOKEN_USER) continue;
            best = id;
            *match_len = depth;
            break;
        }
        if (depth == len) break;
        narrow(tok, depth, (uint8_t)text[depth], &low, &high);
    }
    return best;
}

/* Raw text stands at the start or after a special token, where SentencePiece vocabularies want their space.
 */
static paged_status encode_raw(paged__encoder *e, const char *text, size_t len) {
    if (len == 0) return PAGED_OK;
    if (e->tok->kind == PAGED__VOCAB_GPT2) return paged__bpe_encode(e, text, len);
    return paged__spm_encode(e, text, len, e->tok->add_space_prefix);
}

/* How much of text [len], which follows special token `id`, is dropped with it. */
static size_t dropped_after(const paged_tokenizer *tok, int32_t id, const char *text, size_t len) {
    static const char *const keep[] = {"<unk>", "<s>", "<|endoftext|>"};
    size_t piece_len, n = 0;
    const char *piece = paged__piece(&tok->pieces, id, &piece_len);
    if (!tok->drops_space) return 0;
    for (size_t i = 0; i < sizeof keep / sizeof keep[0]; i++)
        if (strlen(keep[i]) == piece_len && memcmp(piece, keep[i], piece_len) == 0) return 0;
    while (n < len && (text[n] == ' ' || (text[n] >= '\t' && text[n] <= '\r'))) n++;
    return n;
}

/* Control tokens are found between the bytes that `raw` [len] marks with 1; NULL: none is marked. */
static paged_status encode(paged__encoder *e, const char *text, const uint8_t *raw, size_t len,
                           uint32_t flags) {
    const paged_tokenizer *tok = e->tok;
    const bool control = (flags & PAGED_TOKENIZE_CONTROL) != 0, add = (flags & PAGED_TOKENIZE_SPECIAL) != 0;
    size_t begin = 0, match_len = 0, control_end = control && !raw ? len : 0;
    paged_status status = add && tok->add_bos ? paged__emit(e, tok->bos) : PAGED_OK;
    for (size_t pos = 0; !status && pos < len && (control || tok->has_user_tokens);) {
        if (control && pos >= control_end && !raw[pos]) {
            const uint8_t *next = memchr(raw + pos, 1, len - pos);
            control_end = next ? (size_t)(next - raw) : len;
        }
        const size_t n_control = control_end > pos ? control_end - pos : 0;
        int32_t id = match_special(tok, text + pos, len - pos, n_control, &match_len);
        if (id < 0) {
            pos++;
            continue;
        }
        status = encode_raw(e, text + begin, pos - begin);
        if (!status) status = paged__emit(e, id);
        pos += match_len;
        begin = pos += dropped_after(tok, id, text + pos, len - pos);
    }
    if (!status) status = encode_raw(e, text + begin, len - begin);
    if (!status && add && tok->add_eos) status = paged__emit(e, tok->eos);
    return status;
}

paged_status paged__tokenize_marked(const paged_tokenizer *tok, const char *text, const uint8_t *raw,
                                    size_t text_len, uint32_t flags, int32_t *tokens, int32_t capacity,
                                    int32_t *n_tokens, paged_error *err) {
    if (text_len > INT32_MAX - 8)
        return paged__fail(err, PAGED_ERR_LIMIT, "a text of %zu bytes is too long, at most %d", text_len,
                           INT32_MAX - 8);
    paged__encoder e = {.tok = tok, .err = err};
    paged_status status = PAGED_OK;
    if (tok->presplit) status = paged__presplit_state_create(&e.split, err);
    if (!status) status = encode(&e, text, raw, text_len, flags);
    if (!status && e.n_out > (size_t)PAGED_MAX(capacity, 0))
        status = paged__fail(err, PAGED_ERR_LIMIT, "the text has %zu tokens, room for %d", e.n_out, capacity);
    if (!status) {
        if (e.n_out) memcpy(tokens, e.out, e.n_out * sizeof *tokens);
        *n_tokens = (int32_t)e.n_out;
    }
    paged__presplit_state_free(e.split);
    paged__free(e.prev);
    paged__free(e.heap);
    paged__free(e.out);
    return status;
}

paged_status paged_tokenize(const paged_tokenizer *tok, const char *text, size_t text_len, uint32_t flags,
                            int32_t *tokens, int32_t capacity, int32_t *n_tokens, paged_error *err) {
    return paged__tokenize_marked(tok, text, NULL, text_len, flags, tokens, capacity, n_tokens, err);
}
