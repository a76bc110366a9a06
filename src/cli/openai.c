/* cli/openai.c: see openai.h. */
#include "cli/openai.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "cli/plan.h"

enum { COMPLETION_TOKENS = 16 }; /* of /v1/completions where nobody says otherwise, as in the OpenAI API */

#define REFUSE(status, ...)                                                                                  \
    do {                                                                                                     \
        paged__fail(err, PAGED_ERR_##status, __VA_ARGS__);                                                   \
        return false;                                                                                        \
    } while (0)

/* ---- fields ---- */

static bool take_number(const json_t *body, const char *name, double low, double high, double *out,
                        paged_error *err) {
    const json_t *value = json_object_get(body, name);
    if (!value || json_is_null(value)) return true;
    if (!json_is_number(value)) REFUSE(INVALID_ARG, "%s must be a number", name);
    const double x = json_number_value(value);
    if (!(x >= low && x <= high)) REFUSE(INVALID_ARG, "%s is %g; it must lie in %g … %g", name, x, low, high);
    *out = x;
    return true;
}

static bool take_real(const json_t *body, const char *name, double low, double high, float *out,
                      paged_error *err) {
    double x = (double)*out;
    if (!take_number(body, name, low, high, &x, err)) return false;
    *out = (float)x;
    return true;
}

static bool take_integer(const json_t *body, const char *name, int32_t low, int32_t *out, paged_error *err) {
    const json_t *value = json_object_get(body, name);
    double x = *out;
    if (!take_number(body, name, low, INT32_MAX, &x, err)) return false;
    if (x != floor(x)) REFUSE(INVALID_ARG, "%s is %g; it must be a whole number", name, x);
    if (value && !json_is_null(value)) *out = (int32_t)x;
    return true;
}

static bool take_flag(const json_t *body, const char *name, bool *out, paged_error *err) {
    const json_t *value = json_object_get(body, name);
    if (!value || json_is_null(value)) return true;
    if (!json_is_boolean(value)) REFUSE(INVALID_ARG, "%s must be true or false", name);
    *out = json_is_true(value);
    return true;
}

static bool take_seed(const json_t *body, uint64_t *out, paged_error *err) {
    const json_t *value = json_object_get(body, "seed");
    if (!value || json_is_null(value)) return true;
    if (!json_is_integer(value)) REFUSE(INVALID_ARG, "seed must be a whole number");
    *out = (uint64_t)json_integer_value(value);
    return true;
}

/* A string, or a list of strings. */
static bool take_stops(const json_t *body, paged__openai_request *out, paged_error *err) {
    const json_t *value = json_object_get(body, "stop");
    if (!value || json_is_null(value)) return true;
    const size_t n = json_is_array(value) ? json_array_size(value) : 1;
    if (n > PAGED_STOPS_MAX) REFUSE(INVALID_ARG, "stop has %zu strings; at most %d", n, PAGED_STOPS_MAX);
    for (size_t i = 0; i < n; i++) {
        const json_t *text = json_is_array(value) ? json_array_get(value, i) : value;
        if (!json_is_string(text)) REFUSE(INVALID_ARG, "stop must be a string or a list of strings");
        out->stops[i] = json_string_value(text);
    }
    out->request.stop = out->stops;
    out->request.n_stop = (int32_t)n;
    return true;
}

/* {"TOKEN": bias, …} */
static bool take_bias(const json_t *body, paged__openai_request *out, paged_error *err) {
    json_t *value = json_object_get(body, "logit_bias");
    if (!value || json_is_null(value)) return true;
    if (!json_is_object(value)) REFUSE(INVALID_ARG, "logit_bias must be an object of token: bias");
    const size_t n = json_object_size(value);
    if (n > PAGED_LOGIT_BIAS_MAX)
        REFUSE(INVALID_ARG, "logit_bias has %zu tokens; at most %d", n, PAGED_LOGIT_BIAS_MAX);
    out->logit_bias = paged__alloc(n, sizeof *out->logit_bias);
    if (!out->logit_bias) REFUSE(NO_MEMORY, "no memory for logit_bias");
    const char *key;
    json_t *bias;
    json_object_foreach(value, key, bias) {
        char *end;
        const long token = strtol(key, &end, 10);
        if (end == key || *end || token < INT32_MIN || token > INT32_MAX || !json_is_number(bias))
            REFUSE(INVALID_ARG, "logit_bias: '%.32s' is no token id with a number", key);
        out->logit_bias[out->request.n_logit_bias++] =
            (paged_logit_bias){(int32_t)token, (float)json_number_value(bias)};
    }
    out->request.logit_bias = out->logit_bias;
    return true;
}

/* A list of token ids in *tokens, owned by the caller. */
static bool take_tokens(const json_t *list, const char *name, int32_t **tokens, int32_t *n,
                        paged_error *err) {
    const size_t size = json_array_size(list);
    if (size > INT32_MAX / 8) REFUSE(INVALID_ARG, "%s has %zu tokens", name, size);
    *tokens = paged__alloc(size, sizeof **tokens);
    if (!*tokens) REFUSE(NO_MEMORY, "no memory for %zu tokens", size);
    for (size_t i = 0; i < size; i++) {
        const json_t *token = json_array_get(list, i);
        const json_int_t id = json_integer_value(token);
        if (!json_is_integer(token) || id < INT32_MIN || id > INT32_MAX)
            REFUSE(INVALID_ARG, "%s: entry %zu is no token id", name, i);
        (*tokens)[i] = (int32_t)id;
    }
    *n = (int32_t)size;
    return true;
}

static bool take_sampling(const json_t *body, paged__openai_request *out, paged_error *err) {
    paged_request *q = &out->request;
    int32_t n = 1;
    if (!take_integer(body, "n", 1, &n, err)) return false;
    if (n > 1) REFUSE(UNSUPPORTED, "n is %d; one choice a request is supported", n);
    const json_t *ids = json_object_get(body, "stop_token_ids");
    if (ids && !json_is_null(ids)) {
        if (!json_is_array(ids)) REFUSE(INVALID_ARG, "stop_token_ids must be a list");
        if (!take_tokens(ids, "stop_token_ids", &out->stop_tokens, &q->n_stop_tokens, err)) return false;
        q->stop_tokens = out->stop_tokens;
    }
    return take_integer(body, "max_tokens", 1, &q->max_tokens, err) &&
           take_integer(body, "max_completion_tokens", 1, &q->max_tokens, err) &&
           take_integer(body, "min_tokens", 0, &q->min_tokens, err) &&
           take_integer(body, "top_k", -1, &q->top_k, err) &&
           take_real(body, "temperature", 0, 1e9, &q->temperature, err) &&
           take_real(body, "top_p", 0, 1, &q->top_p, err) && take_real(body, "min_p", 0, 1, &q->min_p, err) &&
           take_real(body, "repetition_penalty", 0, 100, &q->repetition_penalty, err) &&
           take_real(body, "presence_penalty", -100, 100, &q->presence_penalty, err) &&
           take_real(body, "frequency_penalty", -100, 100, &q->frequency_penalty, err) &&
           take_flag(body, "ignore_eos", &q->ignore_eos, err) && take_seed(body, &q->seed, err) &&
           take_stops(body, out, err) && take_bias(body, out, err);
}

/* Chat: true and a count; completions: a count. */
static bool take_logprobs(const json_t *body, bool is_chat, paged_request *q, paged_error *err) {
    if (is_chat)
        return take_flag(body, "logprobs", &q->logprobs, err) &&
               take_integer(body, "top_logprobs", 0, &q->n_top_logprobs, err);
    const json_t *value = json_object_get(body, "logprobs");
    q->logprobs = value && !json_is_null(value);
    return take_integer(body, "logprobs", 0, &q->n_top_logprobs, err);
}

static bool refuse_unknown(const json_t *body, paged_error *err) {
    static const char *const unsupported[] = {"tools",   "functions", "response_format",
                                              "best_of", "suffix",    "echo"};
    for (size_t i = 0; i < sizeof unsupported / sizeof unsupported[0]; i++) {
        const json_t *value = json_object_get(body, unsupported[i]);
        if (value && !json_is_null(value) && !json_is_false(value) &&
            !(json_is_array(value) && json_array_size(value) == 0))
            REFUSE(UNSUPPORTED, "%s is not supported", unsupported[i]);
    }
    return true;
}

/* ---- the prompt ---- */

/* A string, or parts {"type": "text", "text": …}, joined. The caller frees *content (paged__free). */
static bool take_content(const json_t *value, int32_t index, char **content, paged_error *err) {
    paged__buffer text = {0};
    const size_t n = json_is_array(value) ? json_array_size(value) : 1;
    bool ok = json_is_array(value) || json_is_string(value);
    for (size_t i = 0; ok && i < n; i++) {
        const json_t *part = json_is_array(value) ? json_object_get(json_array_get(value, i), "text") : value;
        ok = json_is_string(part) &&
             paged__buffer_append(&text, json_string_value(part), json_string_length(part));
    }
    ok = ok && !(text.len && memchr(text.data, 0, text.len)) && paged__buffer_append(&text, "", 1);
    if (!ok) {
        paged__buffer_free(&text);
        REFUSE(INVALID_ARG, "content of message %d must be a text without NUL, or a list of text parts",
               index);
    }
    *content = text.data;
    return true;
}

static bool tokenize_messages(const paged__session *s, const json_t *list, paged__openai_request *out,
                              paged_error *err) {
    if (!json_is_array(list) || json_array_size(list) == 0 || json_array_size(list) > 10000)
        REFUSE(INVALID_ARG, "messages must be a list of 1 … 10000 messages");
    if (!s->info.chat_template) REFUSE(UNSUPPORTED, "this model has no chat template; use /v1/completions");
    const int32_t n = (int32_t)json_array_size(list);
    paged_message *messages = paged__calloc((size_t)n, sizeof *messages);
    if (!messages) REFUSE(NO_MEMORY, "no memory for %d messages", n);
    bool ok = true;
    for (int32_t i = 0; ok && i < n; i++) {
        const json_t *message = json_array_get(list, (size_t)i), *role = json_object_get(message, "role");
        char *content = NULL;
        ok = take_content(json_object_get(message, "content"), i, &content, err);
        messages[i] = (paged_message){json_is_string(role) ? json_string_value(role) : "", content};
    }
    if (ok) {
        const paged_chat chat = {
            .struct_size = sizeof chat, .messages = messages, .n_messages = n, .add_generation_prompt = true};
        paged_prompt text = {0};
        ok = paged_chat_render(s->model, &chat, &text, err) == PAGED_OK;
        paged__free(text.text);
        out->tokens = text.tokens;
        out->request.n_tokens = text.n_tokens;
    }
    for (int32_t i = 0; i < n; i++) paged__free((void *)(uintptr_t)messages[i].content);
    paged__free(messages);
    return ok;
}

static bool tokenize_prompt(const paged__session *s, const json_t *prompt, paged__openai_request *out,
                            paged_error *err) {
    if (json_is_array(prompt) && json_array_size(prompt) == 1 && json_is_string(json_array_get(prompt, 0)))
        prompt = json_array_get(prompt, 0);
    if (json_is_array(prompt))
        return take_tokens(prompt, "prompt", &out->tokens, &out->request.n_tokens, err);
    if (!json_is_string(prompt)) REFUSE(INVALID_ARG, "prompt must be a string or a list of tokens");
    const size_t len = json_string_length(prompt);
    if (len > PAGED__TEXT_MAX) REFUSE(LIMIT, "a prompt of %zu bytes; at most %d", len, PAGED__TEXT_MAX);
    out->tokens = paged__alloc(len + 8, sizeof *out->tokens);
    if (!out->tokens) REFUSE(NO_MEMORY, "no memory for a prompt of %zu bytes", len);
    return paged_tokenize(paged_model_tokenizer(s->model), json_string_value(prompt), len,
                          PAGED_TOKENIZE_SPECIAL, out->tokens, (int32_t)len + 8, &out->request.n_tokens,
                          err) == PAGED_OK;
}

bool paged__openai_parse(const paged__session *s, const json_t *body, bool is_chat,
                         const paged__sampling_options *defaults, paged__openai_request *out,
                         paged_error *err) {
    *out = (paged__openai_request){.is_chat = is_chat};
    paged__session_request(defaults, &out->request);
    if (!json_is_object(body)) {
        paged__fail(err, PAGED_ERR_INVALID_ARG, "the body is no JSON object");
        return false;
    }
    const bool ok = refuse_unknown(body, err) && take_sampling(body, out, err) &&
                    take_logprobs(body, is_chat, &out->request, err) &&
                    (is_chat ? tokenize_messages(s, json_object_get(body, "messages"), out, err)
                             : tokenize_prompt(s, json_object_get(body, "prompt"), out, err));
    if (ok && !is_chat && out->request.max_tokens == 0) out->request.max_tokens = COMPLETION_TOKENS;
    out->request.tokens = out->tokens;
    if (!ok) paged__openai_free(out);
    return ok;
}

void paged__openai_free(paged__openai_request *request) {
    paged__free(request->tokens);
    paged__free(request->logit_bias);
    paged__free(request->stop_tokens);
    *request = (paged__openai_request){0};
}

/* ---- the answer ---- */

bool paged__openai_take(paged__openai_answer *a, const paged__openai_request *request,
                        const paged_output *out) {
    const size_t n = (size_t)out->n_tokens, k = (size_t)request->request.n_top_logprobs;
    a->end = *out;
    return paged__buffer_append(&a->text, out->text, out->text_len) &&
           paged__buffer_append(&a->tokens, out->tokens, n * sizeof *out->tokens) &&
           (!out->logprobs || paged__buffer_append(&a->logprobs, out->logprobs, n * sizeof *out->logprobs)) &&
           (!out->top_logprobs ||
            paged__buffer_append(&a->top_logprobs, out->top_logprobs, n * k * sizeof *out->top_logprobs));
}

void paged__openai_answer_free(paged__openai_answer *a) {
    paged__buffer_free(&a->text);
    paged__buffer_free(&a->tokens);
    paged__buffer_free(&a->logprobs);
    paged__buffer_free(&a->top_logprobs);
}

static int32_t token_text(const paged__session *s, int32_t token, char *bytes) {
    const int32_t n = paged_token_bytes(paged_model_tokenizer(s->model), token, true, bytes, PAGED_DETOK_MAX);
    return n < 0 ? 0 : n;
}

/* {"token", "logprob", "bytes"} */
static json_t *chat_logprob(const paged__session *s, int32_t token, float logprob) {
    char bytes[PAGED_DETOK_MAX];
    const int32_t n = token_text(s, token, bytes);
    json_t *list = json_array();
    for (int32_t i = 0; i < n; i++) json_array_append_new(list, json_integer((unsigned char)bytes[i]));
    return json_pack("{s:o, s:f, s:o}", "token", paged__json_text(bytes, (size_t)n), "logprob",
                     isfinite(logprob) ? (double)logprob : -9999.0, "bytes", list);
}

static json_t *logprobs_of(const paged__session *s, const paged__openai_request *request,
                           const paged__openai_answer *a) {
    const int32_t *tokens = (const int32_t *)(const void *)a->tokens.data;
    const float *logprobs = (const float *)(const void *)a->logprobs.data;
    const paged_top_logprob *top = (const paged_top_logprob *)(const void *)a->top_logprobs.data;
    const int32_t n = (int32_t)(a->logprobs.len / sizeof *logprobs), k = request->request.n_top_logprobs;
    if (!request->request.logprobs) return json_null();
    json_t *content = json_array(), *texts = json_array(), *values = json_array(), *tops = json_array();
    for (int32_t i = 0; i < n; i++) {
        char bytes[PAGED_DETOK_MAX];
        json_t *others = request->is_chat ? json_array() : json_object(),
               *one = chat_logprob(s, tokens[i], logprobs[i]);
        for (int32_t j = 0; j < k; j++) {
            const paged_top_logprob t = top[i * k + j];
            if (request->is_chat) {
                json_array_append_new(others, chat_logprob(s, t.token, t.logprob));
                continue;
            }
            json_t *name = paged__json_text(bytes, (size_t)token_text(s, t.token, bytes));
            json_object_set_new(others, json_string_value(name), json_real((double)t.logprob));
            json_decref(name);
        }
        json_array_append(texts, json_object_get(one, "token"));
        json_array_append(values, json_object_get(one, "logprob"));
        json_array_append(tops, others);
        json_object_set_new(one, "top_logprobs", others);
        json_array_append_new(content, one);
    }
    if (request->is_chat) {
        json_decref(texts), json_decref(values), json_decref(tops);
        return json_pack("{s:o}", "content", content);
    }
    json_decref(content);
    return json_pack("{s:o, s:o, s:o}", "tokens", texts, "token_logprobs", values, "top_logprobs", tops);
}

static const char *finish_reason(paged_finish finish) {
    return finish == PAGED_FINISH_STOP || finish == PAGED_FINISH_LENGTH ? paged_finish_name(finish) : "error";
}

json_t *paged__openai_body(const paged__session *s, const paged__openai_request *request,
                           const paged__openai_answer *a, uint64_t id, int64_t created) {
    const char *model = paged__model_name(&s->info, s->model_path);
    const paged_output *end = &a->end;
    char name[40];
    snprintf(name, sizeof name, "%s-%llu", request->is_chat ? "chatcmpl" : "cmpl", (unsigned long long)id);
    json_t *text = paged__json_text(a->text.data ? a->text.data : "", a->text.len);
    json_t *choice = request->is_chat
                         ? json_pack("{s:i, s:{s:s, s:o}, s:o, s:s}", "index", 0, "message", "role",
                                     "assistant", "content", text, "logprobs", logprobs_of(s, request, a),
                                     "finish_reason", finish_reason(end->finish))
                         : json_pack("{s:i, s:o, s:o, s:s}", "index", 0, "text", text, "logprobs",
                                     logprobs_of(s, request, a), "finish_reason", finish_reason(end->finish));
    json_t *usage = json_pack("{s:i, s:i, s:i, s:{s:i}}", "prompt_tokens", (int)end->prompt_tokens,
                              "completion_tokens", (int)end->completion_tokens, "total_tokens",
                              (int)(end->prompt_tokens + end->completion_tokens), "prompt_tokens_details",
                              "cached_tokens", (int)end->cached_tokens);
    return json_pack("{s:s, s:s, s:I, s:o, s:[o], s:o}", "id", name, "object",
                     request->is_chat ? "chat.completion" : "text_completion", "created", (json_int_t)created,
                     "model", paged__json_text(model, strlen(model)), "choices", choice, "usage", usage);
}

json_t *paged__openai_error(const char *message, const char *code) {
    return json_pack("{s:{s:s, s:s, s:n, s:s}}", "error", "message", message, "type", "invalid_request_error",
                     "param", "code", code);
}
