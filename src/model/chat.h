/* model/chat.h: a chat template applied to messages, piece by piece, so that template text may become control
 * tokens and message content never can. ChatML only, recognised by its text. Public function:
 * paged_chat_tokenize. May include base/, model/tokenizer.h. */
#ifndef PAGED_MODEL_CHAT_H
#define PAGED_MODEL_CHAT_H

#include "model/tokenizer.h"

/* As paged_chat_tokenize, on a template text (NULL: none) and a tokenizer. */
paged_status paged__chat_tokenize(const char *chat_template, const paged_tokenizer *tok,
                                  const paged_message *messages, int32_t n_messages,
                                  bool add_generation_prompt, int32_t *tokens, int32_t capacity,
                                  int32_t *n_tokens, char *text, size_t text_capacity, paged_error *err);

#endif
