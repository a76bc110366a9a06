/* model/spm.c: SentencePiece's way of merging, as LLaMA has it ("llama" in GGUF).
 *
 * Spaces become U+2581; the text begins as one symbol a character; then the two neighbours whose joint text
 * is the token of highest score, leftmost first, become one, until none is left. What is no token then is
 * given byte by byte, or as the unknown token. Candidates lie in a heap as (score, position) and are looked
 * up again when they come out: O(n log n) for n characters.
 */
#include "model/vocab.h"

static const char space_mark[] = "\xe2\x96\x81"; /* U+2581 */
enum { SPACE_MARK_LEN = 3 };

/* ---- loading ---- */

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return -1;
}

int paged__byte_of_text(const char *text, size_t len) {
    if (len != 6 || memcmp(text, "<0x", 3) != 0 || text[5] != '>') return -1;
    int high = hex_digit(text[3]), low = hex_digit(text[4]);
    return high < 0 || low < 0 ? -1 : high * 16 + low;
}

paged_status paged__spm_load(const paged__gguf *g, paged_tokenizer *tok, paged_error *err) {
    static const char key[] = "tokenizer.ggml.scores";
    const float *scores;
    int64_t n;
    paged_status status = paged__gguf_arr_f32(g, key, true, &scores, &n, err);
    if (status) return status;
    if (n != tok->n_vocab)
        return paged__fail(err, PAGED_ERR_FORMAT, "%s has %lld entries for %d tokens", key, (long long)n,
                           tok->n_vocab);
    tok->scores = paged__alloc((size_t)n, sizeof *tok->scores);
    if (!tok->scores) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for %lld scores", (long long)n);
    for (int b = 0; b < 256; b++) tok->byte_ids[b] = -1;
    for (int32_t i = 0; i < tok->n_vocab; i++) {
        if (scores[i] != scores[i])
            return paged__fail(err, PAGED_ERR_FORMAT, "%s: entry %d is not a number", key, i);
        tok->scores[i] = scores[i];
        if (tok->types[i] != PAGED__TOKEN_BYTE) continue;
        size_t len;
        const char *text = paged__piece(&tok->pieces, i, &len);
        int byte = paged__byte_of_text(text, len);
        if (byte < 0)
            return paged__fail(err, PAGED_ERR_FORMAT, "byte token %d has the text \"%.*s\"", i,
                               (int)PAGED_MIN(len, 20), text);
        tok->byte_ids[byte] = i;
    }
    return PAGED_OK;
}

/* ---- encoding ---- */

/* Orders candidates: higher scores first, then from left to right. Floats compare as their bits do once
 * negative ones are turned. */
static uint64_t candidate_key(float score, int32_t left) {
    uint32_t bits;
    score += 0.0f; /* -0 is 0 */
    memcpy(&bits, &score, sizeof bits);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)~bits << 32 | (uint32_t)left;
}

/* The key of merging symbol `left` with the next. False: there is no next, or no such token. */
static bool find_candidate(const paged__encoder *e, const char *text, int32_t left, uint64_t *key) {
    int32_t right = left < 0 ? -1 : e->next[left];
    if (right < 0 || e->len[left] == 0) return false;
    int32_t id = paged__pieces_find(&e->tok->pieces, text + e->sym[left],
                                    (size_t)e->len[left] + (size_t)e->len[right]);
    if (id < 0) return false;
    *key = candidate_key(e->tok->scores[id], left);
    return true;
}

static void push_candidate(paged__encoder *e, const char *text, int32_t left) {
    uint64_t key;
    if (find_candidate(e, text, left, &key)) paged__heap_push(e->heap, &e->n_heap, key);
}

/* Each merge takes one symbol away and adds at most two candidates for the one that came out, so 2 n entries
 * are enough. */
static void merge_all(paged__encoder *e, const char *text, int32_t n) {
    e->n_heap = 0;
    for (int32_t i = 0; i + 1 < n; i++) push_candidate(e, text, i);
    while (e->n_heap) {
        uint64_t key = paged__heap_pop(e->heap, &e->n_heap), now;
        int32_t left = (int32_t)(uint32_t)key;
        if (!find_candidate(e, text, left, &now) || now != key) continue;
        int32_t right = e->next[left];
        e->len[left] += e->len[right];
        e->len[right] = 0; /* gone */
        e->next[left] = e->next[right];
        if (e->next[right] >= 0) e->prev[e->next[right]] = left;
        push_candidate(e, text, e->prev[left]);
        push_candidate(e, text, left);
    }
}

static paged_status emit_symbol(paged__encoder *e, const char *text, size_t len) {
    const paged_tokenizer *tok = e->tok;
    int32_t id = paged__pieces_find(&tok->pieces, text, len);
    if (id >= 0) return paged__emit(e, id);
    if (len == SPACE_MARK_LEN && memcmp(text, space_mark, len) == 0 && tok->byte_ids[' '] >= 0)
        return paged__emit(e, tok->byte_ids[' ']);
    bool in_bytes = true;
    for (size_t i = 0; i < len; i++) in_bytes &= tok->byte_ids[(uint8_t)text[i]] >= 0;
    if (!in_bytes) return tok->unk >= 0 ? paged__emit(e, tok->unk) : PAGED_OK;
    paged_status status = PAGED_OK;
    for (size_t i = 0; !status && i < len; i++) status = paged__emit(e, tok->byte_ids[(uint8_t)text[i]]);
    return status;
}

/* text [len]: escaped */
static paged_status encode_escaped(paged__encoder *e, const char *text, size_t len) {
    const uint8_t *bytes = (const uint8_t *)text;
    size_t n_chars = 0;
    for (size_t i = 0; i < len; n_chars++) {
        int size = paged__utf8_char(bytes + i, len - i);
        i += size > 0 ? (size_t)size : 1;
    }
    paged_status status = paged__encoder_reserve(e, n_chars);
    if (status) return status;
    int32_t n = 0;
    for (size_t i = 0; i < len; n++) {
        int size = paged__utf8_char(bytes + i, len - i);
        e->sym[n] = (int32_t)i;
        e->len[n] = size > 0 ? size : 1;
        e->prev[n] = n - 1;
        e->next[n] = (size_t)n + 1 < n_chars ? n + 1 : -1;
        i += (size_t)e->len[n];
    }
    merge_all(e, text, n);
    for (int32_t i = 0; !status && i >= 0; i = e->next[i])
        status = emit_symbol(e, text + e->sym[i], (size_t)e->len[i]);
    return status;
}

paged_status paged__spm_encode(paged__encoder *e, const char *text, size_t len, bool add_space) {
    size_t n_spaces = add_space, n = 0;
    for (size_t i = 0; i < len; i++) n_spaces += text[i] == ' ';
    if (len + n_spaces * SPACE_MARK_LEN > INT32_MAX)
        return paged__fail(e->err, PAGED_ERR_LIMIT, "%zu bytes are too long", len);
    char *escaped = paged__alloc(len + n_spaces * SPACE_MARK_LEN, 1);
    if (!escaped) return paged__fail(e->err, PAGED_ERR_NO_MEMORY, "no memory for %zu bytes of text", len);
    for (size_t i = 0; i < len + add_space; i++) {
        char c = add_space && i == 0 ? ' ' : text[i - add_space];
        if (c == ' ') {
            memcpy(escaped + n, space_mark, SPACE_MARK_LEN);
            n += SPACE_MARK_LEN;
        } else {
            escaped[n++] = c;
        }
    }
    paged_status status = n ? encode_escaped(e, escaped, n) : PAGED_OK;
    paged__free(escaped);
    return status;
}
