/* model/tokenizer.h: from GGUF metadata to a tokenizer. Public functions in paged/model.h. May include base/,
 * model/gguf.h. */
#ifndef PAGED_MODEL_TOKENIZER_H
#define PAGED_MODEL_TOKENIZER_H

#include "model/gguf.h"
#include "paged/model.h"

/* Copies what it needs; the file may be closed afterwards. Errors: FORMAT, UNSUPPORTED (names model or
 * pre-split rule), NO_MEMORY. */
paged_status paged__tokenizer_create(const paged__gguf *g, paged_tokenizer **out, paged_error *err);
void paged__tokenizer_free(paged_tokenizer *tok); /* NULL is fine */

const char *paged__tokenizer_kind(const paged_tokenizer *tok); /* "gpt2", "llama" */
const char *paged__tokenizer_pre(const paged_tokenizer *tok);  /* "smollm", "" */
bool paged__tokenizer_adds_bos(const paged_tokenizer *tok);

/* As paged_tokenize. Where raw [text_len] is 1 the text is ordinary characters, whatever the flags say;
 * NULL: it is nowhere. */
paged_status paged__tokenize_marked(const paged_tokenizer *tok, const char *text, const uint8_t *raw,
                                    size_t text_len, uint32_t flags, int32_t *tokens, int32_t capacity,
                                    int32_t *n_tokens, paged_error *err);

#endif
