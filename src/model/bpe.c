/* model/bpe.c: byte-level byte-pair encoding, as GPT-2 has it ("gpt2" in GGUF).
 *
 * Everything is done on bytes: the printable characters that stand for bytes in the file are decoded once, at
 * load. A word begins as one symbol a byte; then the merge of lowest rank, leftmost first, is applied until
 * none is left. Candidates lie in a heap as (rank, position) and are checked when they come out, since their
 * neighbours may have changed: O(n log n) for n bytes.
 */
#include "model/vocab.h"

/* ---- loading ---- */

/* The byte that a character of GPT-2's byte alphabet stands for; -1: none. Printable Latin-1 characters stand
 * for themselves, the other 68 bytes, ascending, are U+0100 and on. */
static int byte_of_char(uint32_t c) {
    if ((c >= 0x21 && c <= 0x7e) || (c >= 0xa1 && c <= 0xac) || (c >= 0xae && c <= 0xff)) return (int)c;
    if (c < 0x100 || c > 0x143) return -1;
    if (c <= 0x120) return (int)(c - 0x100);        /* 0x00 … 0x20 */
    if (c <= 0x142) return (int)(c - 0x121 + 0x7f); /* 0x7f … 0xa0 */
    return 0xad;
}

size_t paged__bpe_decode(const char *text, char *out, bool *pure) {
    size_t len = strlen(text), n = 0;
    *pure = true;
    for (size_t i = 0; i < len;) {
        const uint8_t *p = (const uint8_t *)text + i;
        int size = paged__utf8_char(p, len - i), byte = -1;
        if (size == 1) byte = byte_of_char(p[0]);
        if (size == 2) byte = byte_of_char((uint32_t)(p[0] & 0x1f) << 6 | (p[1] & 0x3f));
        size_t step = size > 0 ? (size_t)size : 1;
        if (byte >= 0)
            out[n++] = (char)byte;
        else {
            *pure = false;
            memmove(out + n, p, step);
            n += step;
        }
        i += step;
    }
    return n;
}

static uint32_t *merge_slot(const paged__merges *m, int32_t left, int32_t right) {
    uint64_t hash = paged__mix((uint64_t)(uint32_t)left << 32 | (uint32_t)right);
    for (uint32_t i = (uint32_t)hash & m->mask;; i = (i + 1) & m->mask) {
        if (!m->slots[i]) return &m->slots[i];
        const paged__merge *merge = &m->list[m->slots[i] - 1];
        if (merge->left == left && merge->right == right) return &m->slots[i];
    }
}

/* The piece with these bytes; it is made if there is none. -1: no memory. */
static int32_t intern(paged__pieces *p, const char *bytes, size_t len) {
    int32_t id = paged__pieces_find(p, bytes, len);
    if (id >= 0) return id;
    return paged__pieces_add(p, bytes, len, true) ? p->n - 1 : -1;
}

/* buf [strlen(text)]: work memory */
static paged_status load_merge(paged_tokenizer *tok, const char *text, int32_t rank, char *buf,
                               paged_error *err) {
    const char *space = text[0] ? strchr(text + 1, ' ') : NULL;
    if (!space || !space[1])
        return paged__fail(err, PAGED_ERR_FORMAT, "merge %d \"%.40s\" has no two parts", rank, text);
    bool left_pure, right_pure;
    memcpy(buf, text, (size_t)(space - text));
    buf[space - text] = 0;
    size_t n_left = paged__bpe_decode(buf, buf, &left_pure);
    size_t n_right = paged__bpe_decode(space + 1, buf + n_left, &right_pure);
    paged__merge merge = {.left = -1};
    if (left_pure && right_pure) { /* another one can never apply to bytes */
        merge.left = intern(&tok->pieces, buf, n_left);
        merge.right = intern(&tok->pieces, buf + n_left, n_right);
        merge.result = intern(&tok->pieces, buf, n_left + n_right);
        if (merge.left < 0 || merge.right < 0 || merge.result < 0)
            return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for merge %d", rank);
    }
    tok->merges.list[rank] = merge;
    if (merge.left < 0) return PAGED_OK;
    uint32_t *slot = merge_slot(&tok->merges, merge.left, merge.right);
    if (!*slot) *slot = (uint32_t)rank + 1; /* of two equal merges the first counts */
    return PAGED_OK;
}

static paged_status load_merges(const paged__gguf *g, paged_tokenizer *tok, paged_error *err) {
    static const char key[] = "tokenizer.ggml.merges";
    int64_t n;
    paged_status status = paged__gguf_arr_str(g, key, true, &n, err);
    if (status) return status;
    if (n > PAGED__MERGES_MAX)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED, "%lld merges, at most %d", (long long)n,
                           PAGED__MERGES_MAX);
    size_t longest = 0;
    for (int64_t i = 0; i < n; i++) longest = PAGED_MAX(longest, strlen(paged__gguf_arr_str_at(g, key, i)));
    paged__merges *m = &tok->merges;
    m->n = (int32_t)n;
    m->mask = 1023;
    while (m->mask < 2 * (uint32_t)n) m->mask = m->mask * 2 + 1;
    m->list = paged__alloc((size_t)n, sizeof *m->list);
    m->slots = paged__calloc((size_t)m->mask + 1, sizeof *m->slots);
    char *buf = paged__alloc(longest + 1, 1);
    if (!m->list || !m->slots || !buf)
        status = paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for %lld merges", (long long)n);
    for (int32_t i = 0; !status && i < m->n; i++)
        status = load_merge(tok, paged__gguf_arr_str_at(g, key, i), i, buf, err);
    paged__free(buf);
    return status;
}

paged_status paged__bpe_load(const paged__gguf *g, paged_tokenizer *tok, paged_error *err) {
    for (int b = 0; b < 256; b++) {
        char byte = (char)b;
        tok->byte_ids[b] = intern(&tok->pieces, &byte, 1);
        if (tok->byte_ids[b] < 0)
            return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for the vocabulary");
    }
    return load_merges(g, tok, err);
}

void paged__merges_free(paged__merges *m) {
    paged__free(m->list);
    paged__free(m->slots);
    *m = (paged__merges){0};
}

/* ---- encoding ---- */

/* A piece that is no token is given as the tokens of its bytes. A byte without a token cannot be given at
 * all. */
static paged_status emit_piece(paged__encoder *e, int32_t piece) {
    const paged_tokenizer *tok = e->tok;
    if (piece < tok->n_vocab) return paged__emit(e, piece);
    size_t len;
    const char *bytes = paged__piece(&tok->pieces, piece, &len);
    paged_status status = PAGED_OK;
    for (size_t i = 0; !status && i < len; i++) {
        int32_t id = tok->byte_ids[(uint8_t)bytes[i]];
        if (id < tok->n_vocab) status = paged__emit(e, id);
    }
    return status;
}

static void push_candidate(paged__encoder *e, int32_t left) {
    if (left < 0 || e->next[left] < 0) return;
    uint32_t slot = *merge_slot(&e->tok->merges, e->sym[left], e->sym[e->next[left]]);
    if (slot) paged__heap_push(e->heap, &e->n_heap, (uint64_t)(slot - 1) << 32 | (uint32_t)left);
}

/* Each merge takes one symbol away and adds at most two candidates for the one that came out, so 2 n entries
 * are enough. */
static void merge_all(paged__encoder *e, int32_t n) {
    e->n_heap = 0;
    for (int32_t i = 0; i + 1 < n; i++) push_candidate(e, i);
    while (e->n_heap) {
        uint64_t key = paged__heap_pop(e->heap, &e->n_heap);
        const paged__merge *merge = &e->tok->merges.list[key >> 32];
        int32_t left = (int32_t)(uint32_t)key, right = e->next[left];
        /* A symbol that was merged into its left neighbour has sym -1. */
        if (right < 0 || e->sym[left] != merge->left || e->sym[right] != merge->right) continue;
        e->sym[left] = merge->result;
        e->sym[right] = -1;
        e->next[left] = e->next[right];
        if (e->next[right] >= 0) e->prev[e->next[right]] = left;
        push_candidate(e, e->prev[left]);
        push_candidate(e, left);
    }
}

static paged_status encode_word(paged__encoder *e, const char *word, size_t len) {
    const paged_tokenizer *tok = e->tok;
    if (len == 1) return emit_piece(e, tok->byte_ids[(uint8_t)word[0]]);
    if (tok->ignore_merges) {
        int32_t id = paged__pieces_find(&tok->pieces, word, len);
        if (id >= 0 && id < tok->n_vocab) return paged__emit(e, id);
    }
    paged_status status = paged__encoder_reserve(e, len);
    if (status) return status;
    int32_t n = (int32_t)len;
    for (int32_t i = 0; i < n; i++) {
        e->sym[i] = tok->byte_ids[(uint8_t)word[i]];
        e->prev[i] = i - 1;
        e->next[i] = i + 1 < n ? i + 1 : -1;
    }
    merge_all(e, n);
    for (int32_t i = 0; !status && i >= 0; i = e->next[i]) status = emit_piece(e, e->sym[i]);
    return status;
}

/* Runs of valid UTF-8 are split into words; each byte between them is a word of its own. */
paged_status paged__bpe_encode(paged__encoder *e, const char *text, size_t len) {
    const uint8_t *bytes = (const uint8_t *)text;
    paged_status status = PAGED_OK;
    size_t begin = 0, pos = 0;
    while (!status && pos < len) {
        int size = paged__utf8_char(bytes + pos, len - pos);
        if (size > 0) {
            pos += (size_t)size;
            if (pos < len) continue;
        }
        if (pos > begin)
            status = paged__presplit_run(e->tok->presplit, e, text + begin, pos - begin, encode_word);
        size_t n_bad = pos == len ? 0 : size < 0 ? (size_t)-size : len - pos;
        for (begin = pos + n_bad; !status && pos < begin; pos++) status = encode_word(e, text + pos, 1);
    }
    return status;
}
