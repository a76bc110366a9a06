/* cli/openai.h: requests and answers in the JSON of the OpenAI API: /v1/chat/completions and /v1/completions.
 *
 * Taken: messages (roles system, user, assistant; content a string or text parts) or prompt (a string or
 * tokens), max_tokens, max_completion_tokens, temperature, top_p, seed, stop, presence_penalty,
 * frequency_penalty, logit_bias, logprobs, top_logprobs; besides top_k, min_p, repetition_penalty,
 * min_tokens, ignore_eos, stop_token_ids. What would change the answer and is not here (n above 1, tools,
 * images, response_format) is refused, not ignored.
 */
#ifndef PAGED_CLI_OPENAI_H
#define PAGED_CLI_OPENAI_H

#include "cli/session.h"

/* Owns what a request points to. A zeroed one is empty. */
typedef struct paged__openai_request {
    bool is_chat;
    paged_request request;
    int32_t *tokens;
    paged_logit_bias *logit_bias;
    int32_t *stop_tokens;
    const char *stops[PAGED_STOPS_MAX]; /* borrowed from the body */
} paged__openai_request;

/* body: borrowed as long as the request is used. `defaults` count for what it does not say. False: it cannot
 * be answered, and err says why (status INVALID_ARG, UNSUPPORTED, NO_MEMORY). */
bool paged__openai_parse(const paged__session *session, const json_t *body, bool is_chat,
                         const paged__sampling_options *defaults, paged__openai_request *out,
                         paged_error *err);
void paged__openai_free(paged__openai_request *request);

/* What was generated so far. */
typedef struct paged__openai_answer {
    paged__buffer text, tokens, logprobs, top_logprobs; /* bytes; int32_t; float; paged_top_logprob */
    paged_output end;                                   /* its pointers are not used */
} paged__openai_answer;

bool paged__openai_take(paged__openai_answer *answer, const paged__openai_request *request,
                        const paged_output *out); /* false: no memory */
void paged__openai_answer_free(paged__openai_answer *answer);

/* The body of the response: object "chat.completion" or "text_completion". NULL: no memory. */
json_t *paged__openai_body(const paged__session *session, const paged__openai_request *request,
                           const paged__openai_answer *answer, uint64_t id, int64_t created);

/* {"error": {"message", "type", "param", "code"}} */
json_t *paged__openai_error(const char *message, const char *code);

#endif
