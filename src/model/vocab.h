/* model/vocab.h: what the files of the tokenizer share: pieces, encoder state, UTF-8, the heap of merges.
 * Private to them.
 *
 *     text --tokenizer.c: control tokens--> raw text --bpe.c or spm.c--> ids --detok.c--> text
 *                                              |
 *                                         presplit.c (BPE only): words
 *
 * Invariants: a paged_tokenizer never changes after create. Pieces 0 … n_vocab - 1 are the tokens of the
 * file, in order; the pieces after them occur in merges only and are never given out. Control, unknown and
 * byte tokens cannot be found by their bytes, so that ordinary text never becomes one of them, whatever the
 * merges and scores say.
 * Owner: the tokenizer owns all it points to; an encoder lives for one call and belongs to one thread.
 */
#ifndef PAGED_MODEL_VOCAB_H
#define PAGED_MODEL_VOCAB_H

#include "model/tokenizer.h"

enum {
    PAGED__VOCAB_MAX = 1 << 21,
    PAGED__MERGES_MAX = 1 << 22,
    PAGED__TOKEN_BYTES_MAX =
        640 /* every byte may become a U+FFFD of three: below PAGED_DETOK_MAX with what is pending */
};

/* Values of tokenizer.ggml.token_type. */
typedef enum paged__token_type {
    PAGED__TOKEN_NORMAL = 1,
    PAGED__TOKEN_UNKNOWN = 2,
    PAGED__TOKEN_CONTROL = 3,
    PAGED__TOKEN_USER = 4, /* text that is always one token */
    PAGED__TOKEN_UNUSED = 5,
    PAGED__TOKEN_BYTE = 6
} paged__token_type;

typedef enum paged__vocab_kind { PAGED__VOCAB_GPT2, PAGED__VOCAB_LLAMA } paged__vocab_kind;

/* ---- pieces: byte strings with ids, and a map back from bytes to id ---- */

typedef struct paged__pieces {
    char *bytes;     /* [n_bytes] all pieces, one after the other */
    size_t *ends;    /* [n] piece i ends here, and begins where i - 1 ends */
    uint32_t *slots; /* [mask + 1] open addressing; id + 1, 0 is empty */
    size_t n_bytes, cap_bytes;
    int32_t n, cap;
    uint32_t n_found, mask;
    size_t max_len; /* longest piece that can be found */
} paged__pieces;

paged_status paged__pieces_init(paged__pieces *p); /* NO_MEMORY */
void paged__pieces_free(paged__pieces *p);

/* Appends a piece; its id is the count before. A findable one that was there already is found under the new
 * id from now on. False: no memory. */
bool paged__pieces_add(paged__pieces *p, const char *bytes, size_t len, bool findable);

int32_t paged__pieces_find(const paged__pieces *p, const char *bytes, size_t len); /* -1: none */

static inline const char *paged__piece(const paged__pieces *p, int32_t id, size_t *len) {
    size_t begin = id ? p->ends[id - 1] : 0;
    *len = p->ends[id] - begin;
    return p->bytes + begin;
}

/* ---- the tokenizer ---- */

typedef struct paged__merge {
    int32_t left, right, result; /* pieces */
} paged__merge;

typedef struct paged__merges {
    paged__merge *list; /* [n] by rank */
    uint32_t *slots;    /* [mask + 1] (left, right) -> rank + 1, 0 is empty */
    int32_t n;
    uint32_t mask;
} paged__merges;

typedef struct paged__presplit paged__presplit;
typedef struct paged__presplit_state paged__presplit_state;

struct paged_tokenizer {
    paged__vocab_kind kind;
    int32_t n_vocab;
    paged__pieces pieces;  /* gpt2: the bytes a token stands for; llama: its text, with U+2581 for spaces */
    uint8_t *types;        /* [n_vocab] paged__token_type */
    bool *eog;             /* [n_vocab] */
    float *scores;         /* [n_vocab] llama only */
    int32_t byte_ids[256]; /* gpt2: the piece of each byte; llama: the token <0xXX>, -1 if there is none */

    int32_t *specials; /* [n_specials] tokens that are matched in the text, ascending by bytes */
    int32_t n_specials;
    int32_t
        special_from[257]; /* those that begin with byte b are special_from[b] … special_from[b + 1] - 1 */
    bool has_user_tokens;
    bool drops_space; /* Phi-3: white space behind most special tokens is no text */

    paged__merges merges;      /* gpt2 only */
    paged__presplit *presplit; /* gpt2 only */
    int32_t bos, eos, unk;     /* -1: none */
    bool add_bos, add_eos, add_space_prefix, ignore_merges;
};

static inline bool paged__token_is_text(const paged_tokenizer *tok, int32_t id) {
    return tok->types[id] != PAGED__TOKEN_CONTROL && tok->types[id] != PAGED__TOKEN_UNKNOWN;
}

/* ---- one call of paged_tokenize ---- */

typedef struct paged__encoder {
    const paged_tokenizer *tok;
    paged_error *err;
    int32_t *out; /* [n_out of cap_out] */
    size_t n_out, cap_out;
    /* Work memory of the merges of one word: a list of symbols linked by index, and a heap of candidates. */
    int32_t *prev, *next, *sym,
        *len;       /* [cap_symbols] -1 ends the list; sym: piece, or where the symbol begins */
    uint64_t *heap; /* [2 * cap_symbols] of n_heap: order, then position */
    size_t n_heap, cap_symbols;
    paged__presplit_state *split; /* gpt2 only */
} paged__encoder;

paged_status paged__emit(paged__encoder *e, int32_t id); /* NO_MEMORY */
paged_status paged__encoder_reserve(paged__encoder *e,
                                    size_t n); /* symbols and heap for n symbols; LIMIT, NO_MEMORY */

/* Raw text, no control tokens in it. */
paged_status paged__bpe_encode(paged__encoder *e, const char *text, size_t len);
paged_status paged__spm_encode(paged__encoder *e, const char *text, size_t len, bool add_space);

/* ---- loading, per kind ---- */

/* Byte-level BPE writes each byte as a printable character. Decodes such a text into out [strlen(text)];
 * characters that stand for no byte are kept as they are and *pure becomes false. Returns the length. */
size_t paged__bpe_decode(const char *text, char *out, bool *pure);

paged_status paged__bpe_load(const paged__gguf *g, paged_tokenizer *tok,
                             paged_error *err); /* byte_ids, merges */
paged_status paged__spm_load(const paged__gguf *g, paged_tokenizer *tok,
                             paged_error *err); /* scores, byte_ids */
void paged__merges_free(paged__merges *m);

/* The byte of "<0x0A>"; -1 if the text is not of this form. */
int paged__byte_of_text(const char *text, size_t len);

/* ---- pre-split rules ---- */

/* What the model's name for its rule (tokenizer.ggml.pre) implies besides the patterns. */
typedef struct paged__presplit_facts {
    const char *name; /* static */
    bool ignore_merges, add_bos;
} paged__presplit_facts;

paged_status paged__presplit_create(const char *pre, paged__presplit **out,
                                    paged_error *err); /* UNSUPPORTED, NO_MEMORY */
void paged__presplit_free(paged__presplit *p);         /* NULL is fine */
paged__presplit_facts paged__presplit_get_facts(const paged__presplit *p);

paged_status paged__presplit_state_create(paged__presplit_state **out, paged_error *err);
void paged__presplit_state_free(paged__presplit_state *s); /* NULL is fine */

/* Calls word() for each word, in order; together they are the text. `text` must be valid UTF-8. LIMIT; what
 * word() returns. */
paged_status paged__presplit_run(const paged__presplit *p, paged__encoder *e, const char *text, size_t len,
                                 paged_status (*word)(paged__encoder *e, const char *bytes, size_t len));

/* ---- UTF-8 ---- */

/* Looks at the character that begins at p [n > 0]: its length 1 … 4; 0 if the n bytes are the beginning of
 * one and more are needed; -k if the first k bytes can never begin one (k is Unicode's maximal subpart: one
 * U+FFFD stands for them). */
static inline int paged__utf8_char(const uint8_t *p, size_t n) {
    uint8_t lead = p[0], low = 0x80, high = 0xbf;
    if (lead < 0x80) return 1;
    if (lead < 0xc2 || lead > 0xf4) return -1;
    int len = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    if (lead == 0xe0) low = 0xa0;  /* no overlong forms */
    if (lead == 0xed) high = 0x9f; /* no surrogates */
    if (lead == 0xf0) low = 0x90;
    if (lead == 0xf4) high = 0x8f; /* nothing above U+10FFFF */
    for (int i = 1; i < len; i++) {
        if ((size_t)i >= n) return 0;
        if (p[i] < low || p[i] > high) return -i;
        low = 0x80;
        high = 0xbf;
    }
    return len;
}

/* ---- a heap of merges: the smallest key first ---- */

static inline void paged__heap_push(uint64_t *heap, size_t *n, uint64_t key) {
    size_t i = (*n)++;
    while (i > 0 && heap[(i - 1) / 2] > key) {
        heap[i] = heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap[i] = key;
}

static inline uint64_t paged__heap_pop(uint64_t *heap, size_t *n) {
    uint64_t top = heap[0], key = heap[--*n];
    size_t i = 0, child;
    while ((child = 2 * i + 1) < *n) {
        if (child + 1 < *n && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= key) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = key;
    return top;
}

#endif
