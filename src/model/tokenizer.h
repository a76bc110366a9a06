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

/* Whole text to one control token of exactly this text; -1: none. */
int32_t paged__tokenizer_find_control(const paged_tokenizer *tok, const char *text);

#endif
