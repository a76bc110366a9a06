/* server/openai.h: requests and answers in the JSON of the OpenAI API: /v1/chat/completions and
 * /v1/completions. `paged batch` reads its files with it, too.
 *
 * Taken: messages (roles of the model's template; content a string or text parts) or prompt (a string, a
 * list of strings, tokens, a list of token lists), max_tokens, max_completion_tokens, temperature, top_p, n,
 * seed, stop, presence_penalty, frequency_penalty, logit_bias, logprobs, top_logprobs, echo, stream,
 * stream_options; besides top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids,
 * add_generation_prompt, cache_salt, priority. What would change the answer and is not here (tools,
 * images, response_format …) is refused, not ignored; unknown fields are ignored, and null is the default.
 */
#ifndef PAGED_SERVER_OPENAI_H
#define PAGED_SERVER_OPENAI_H

#include "paged/engine.h"
#include "server/text.h"

/* What requests are read against. Borrowed. */
typedef struct paged__openai_world {
    const paged_model *model;
    const char *name; /* of the model, in answers */
    const char *chat_template;
    paged_request defaults; /* what a request gets that says nothing else */
} paged__openai_world;

typedef struct paged__openai_prompt {
    int32_t *tokens; /* owned */
    int32_t n_tokens;
    const char *text; /* borrowed from the body; NULL: it came as tokens, or as messages */
    size_t text_len;
} paged__openai_prompt;

/* Owns what a request points to. A zeroed one is empty. */
typedef struct paged__openai_request {
    bool is_chat, stream, include_usage, echo, has_seed;
    paged_request request;         /* with the tokens of the first prompt */
    paged__openai_prompt *prompts; /* [n_prompts]; each has request.n answers */
    int32_t n_prompts;
    paged_logit_bias *logit_bias;
    int32_t *stop_tokens;
    const char *stops[PAGED_STOPS_MAX]; /* borrowed from the body */
    const char *param;                  /* after a refusal: the field that it is about, or NULL; static */
} paged__openai_request;

/* body: borrowed as long as the request is used. False: it cannot be answered, and err says why (status
 * INVALID_ARG, UNSUPPORTED, LIMIT, NO_MEMORY); then only out->param is to be read. */
bool paged__openai_parse(const paged__openai_world *world, const json_t *body, bool is_chat,
                         paged__openai_request *out, paged_error *err);
void paged__openai_free(paged__openai_request *request);

/* The messages of a body as tokens, with *text (a 0 at its end) as the template gives it if text is not
 * NULL; both owned by the caller. *param: as of a request. */
bool paged__openai_messages(const paged__openai_world *world, const json_t *body, const char **param,
                            int32_t **tokens, int32_t *n_tokens, char **text, paged_error *err);

/* Whether each of a list of messages may be one of a request. False: err (INVALID_ARG, UNSUPPORTED,
 * NO_MEMORY) says why not. */
bool paged__openai_check_messages(const json_t *list, paged_error *err);

/* Puts `known` in place of the tokens that prompt begins with, if both are the same bytes up to a border of
 * tokens: an answer's own tokens need not be those that its text gives, and the cache knows them only. False:
 * they are not, or there is no memory; the prompt is as before. */
bool paged__openai_splice(const paged__openai_world *world, paged__openai_prompt *prompt,
                          const int32_t *known, int32_t n_known);

/* A JSON string as tokens, owned by the caller; flags of paged_tokenize; name: of the field, for errors. */
bool paged__openai_text_tokens(const paged__openai_world *world, const json_t *value, const char *name,
                               uint32_t flags, int32_t **tokens, int32_t *n_tokens, paged_error *err);

/* A list of token ids, owned by the caller. */
bool paged__openai_tokens(const json_t *list, const char *name, int32_t **tokens, int32_t *n,
                          paged_error *err);

/* ---- answers ---- */

/* What one choice has generated so far. */
typedef struct paged__openai_answer {
    paged__buffer text, tokens, logprobs, top_logprobs; /* bytes; int32_t; float; paged_top_logprob */
    paged_output end;                                   /* its pointers are not used */
    /* Of the prompt, with echo and logprobs; owned by the service. */
    const float *prompt_logprobs;
    const int32_t *prompt_top1;
} paged__openai_answer;

bool paged__openai_take(paged__openai_answer *answer, const paged__openai_request *request,
                        const paged_output *out); /* false: no memory */
void paged__openai_answer_free(paged__openai_answer *answer);

/* The text that a prompt gives back with echo. False: no memory. */
bool paged__openai_echo(const paged__openai_world *world, const paged__openai_prompt *prompt,
                        paged__buffer *text);

/* The log-probabilities of tokens [first, first + n) of an answer; JSON null where nobody asked. Of
 * completions only: `prompt`, whose tokens come before them (NULL: none), and text_offset, where the text
 * of the first one begins, moved to the end of the last. */
json_t *paged__openai_logprobs(const paged__openai_world *world, const paged__openai_request *request,
                               const paged__openai_answer *answer, const paged__openai_prompt *prompt,
                               int32_t first, int32_t n, int64_t *text_offset);

/* "stop", "length" or, for what should not be, "error". */
const char *paged__openai_finish(paged_finish finish);

json_t *paged__openai_usage(const paged__openai_request *request, const paged__openai_answer *answers);

/* The body of the response: object "chat.completion" or "text_completion". answers [n_prompts * n]. NULL: no
 * memory. */
json_t *paged__openai_body(const paged__openai_world *world, const paged__openai_request *request,
                           const paged__openai_answer *answers, const char *id, int64_t created);

/* {"error": {"message", "type", "param", "code"}}; param and code may be NULL. */
json_t *paged__openai_error(const char *message, const char *type, const char *param, const char *code);

#endif
