/* model/detok.c: tokens to bytes, and a stream of tokens to whole characters.
 *
 * The stream gives what decoding all bytes at once with Unicode's maximal subpart rule would give, and holds
 * back at most three bytes (the beginning of a character). Encoding puts one space before the text of
 * SentencePiece vocabularies, at the start and after each special token; decoding takes exactly those away
 * again, so a round trip gives the same bytes.
 */
#include "model/vocab.h"

/* Spaces of SentencePiece back from U+2581. out [len] may not overlap. Returns the length. */
static size_t unescape(const char *text, size_t len, char *out) {
    size_t n = 0;
    for (size_t i = 0; i < len;) {
        if (len - i >= 3 && memcmp(text + i, "\xe2\x96\x81", 3) == 0) {
            out[n++] = ' ';
            i += 3;
        } else {
            out[n++] = text[i++];
        }
    }
    return n;
}

/* out [3 * PAGED__TOKEN_BYTES_MAX]; `token` is one of the vocabulary. Returns the length. */
static size_t token_bytes(const paged_tokenizer *tok, int32_t token, bool control, char *out) {
    size_t len;
    const char *bytes = paged__piece(&tok->pieces, token, &len);
    if (!paged__token_is_text(tok, token) && !control) return 0;
    if (tok->kind == PAGED__VOCAB_LLAMA && tok->types[token] == PAGED__TOKEN_BYTE) {
        out[0] = (char)paged__byte_of_text(bytes, len);
        return 1;
    }
    bool escaped = tok->kind == PAGED__VOCAB_LLAMA && paged__token_is_text(tok, token) &&
                   tok->types[token] != PAGED__TOKEN_USER;
    if (escaped) return unescape(bytes, len, out);
    if (len) memcpy(out, bytes, len);
    return len;
}

int32_t paged_token_bytes(const paged_tokenizer *tok, int32_t token, bool control, char *buf,
                          int32_t capacity) {
    char bytes[3 * PAGED__TOKEN_BYTES_MAX];
    if (token < 0 || token >= tok->n_vocab) return -1;
    size_t len = token_bytes(tok, token, control, bytes);
    if (capacity >= 0 && len && len <= (size_t)capacity) memcpy(buf, bytes, len);
    return (int32_t)len;
}

void paged_detok_init(paged_detok *detok, const paged_tokenizer *tok, bool control) {
    *detok = (paged_detok){.tok = tok, .control = control};
}

static size_t put_replacement(char *out) {
    memcpy(out, "\xef\xbf\xbd", 3);
    return 3;
}

/* bytes [n]: what is pending, then new bytes. Returns the number of bytes written. */
static size_t put_characters(paged_detok *detok, const uint8_t *bytes, size_t n, char *out) {
    size_t n_out = 0;
    detok->n_pending = 0;
    for (size_t i = 0; i < n;) {
        int size = paged__utf8_char(bytes + i, n - i);
        if (size == 0) {
            detok->n_pending = (uint8_t)(n - i);
            memcpy(detok->pending, bytes + i, n - i);
            break;
        }
        if (size > 0) {
            memcpy(out + n_out, bytes + i, (size_t)size);
            n_out += (size_t)size;
            i += (size_t)size;
        } else {
            n_out += put_replacement(out + n_out);
            i += (size_t)-size;
        }
    }
    return n_out;
}

int32_t paged_detok_push(paged_detok *detok, int32_t token, char *out) {
    const paged_tokenizer *tok = detok->tok;
    char bytes[4 + 3 * PAGED__TOKEN_BYTES_MAX];
    if (token < 0 || token >= tok->n_vocab) return 0;
    size_t n_pending = detok->n_pending, skip = 0;
    memcpy(bytes, detok->pending, n_pending);
    size_t len = token_bytes(tok, token, detok->control, bytes + n_pending);
    uint8_t type = tok->types[token];
    if (type == PAGED__TOKEN_CONTROL || type == PAGED__TOKEN_USER) {
        detok->started = false;
    } else if (len && !detok->started) {
        skip = tok->add_space_prefix && bytes[n_pending] == ' ';
        detok->started = true;
    }
    memmove(bytes + n_pending, bytes + n_pending + skip, len - skip);
    return (int32_t)put_characters(detok, (const uint8_t *)bytes, n_pending + len - skip, out);
}

int32_t paged_detok_finish(paged_detok *detok, char *out) {
    /* What is pending is the beginning of one character: one maximal subpart. */
    if (!detok->n_pending) return 0;
    detok->n_pending = 0;
    return (int32_t)put_replacement(out);
}
