/* model/chat.h: a model's chat template: compiled once, rendered to text and tokens. The language is
 * model/jinja's; here are the variables that a template may expect, the roles, and the way to tokens. Public
 * functions in paged/model.h. May include base/, model/tokenizer.h, model/jinja/jinja.h. */
#ifndef PAGED_MODEL_CHAT_H
#define PAGED_MODEL_CHAT_H

#include "model/tokenizer.h"

typedef struct paged__chat_template paged__chat_template;

/* A template that does not compile is kept with its error, which each rendering then gives: such a model
 * still completes raw text. `tok` must live as long. Errors: NO_MEMORY. */
paged_status paged__chat_create(const char *text, const paged_tokenizer *tok, paged__chat_template **out,
                                paged_error *err);
void paged__chat_free(paged__chat_template *t); /* NULL is fine */

/* Whether a message may have it. */
bool paged__chat_is_role(const char *role, size_t len);

/* As the public functions; t may be NULL: the model has none. */
paged_status paged__chat_render(const paged__chat_template *t, const paged_chat *chat, paged_prompt *out,
                                paged_error *err);
paged_status paged__chat_tokenize(const paged__chat_template *t, const paged_chat *chat, int32_t *tokens,
                                  int32_t capacity, int32_t *n_tokens, char *text, size_t text_capacity,
                                  paged_error *err);

#endif
