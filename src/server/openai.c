/* server/openai.c: see openai.h. */
#include "server/openai.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "model/chat.h"

enum {
    COMPLETION_TOKENS = 16, /* of /v1/completions where nobody says otherwise, as in the OpenAI API */
    PROMPT_MAX = 256 << 20, /* bytes of a prompt; keeps token counts far inside int32_t */
    MESSAGES_MAX = 10000,
    BIAS_MAX = 100 /* of a logit; -100 bans */
};

#define REFUSE(status, ...)                                                                                  \
    do {                                                                                                     \
        paged__fail(err, PAGED_ERR_##status, __VA_ARGS__);                                                   \
        return false;                                                                                        \
    } while (0)

/* ---- fields ---- */

/* Every field is read by a function that names it in out->param first, so that a refusal can say whose it is.
 */

static const json_t *field(const json_t *body, const char *name, paged__openai_request *out) {
    const json_t *value = json_object_get(body, name);
    out->param = name;
    return value && !json_is_null(value) ? value : NULL;
}

static bool take_number(const json_t *body, const char *name, double low, double high, double *to,
                        paged__openai_request *out, paged_error *err) {
    const json_t *value = field(body, name, out);
    if (!value) return true;
    if (!json_is_number(value)) REFUSE(INVALID_ARG, "%s must be a number", name);
    const double x = json_number_value(value);
    if (!(x >= low && x <= high)) REFUSE(INVALID_ARG, "%s is %g; it must lie in %g … %g", name, x, low, high);
    *to = x;
    return true;
}

static bool take_real(const json_t *body, const char *name, double low, double high, float *to,
                      paged__openai_request *out, paged_error *err) {
    double x = (double)*to;
    if (!take_number(body, name, low, high, &x, out, err)) return false;
    *to = (float)x;
    return true;
}

static bool take_integer(const json_t *body, const char *name, int32_t low, int32_t high, int32_t *to,
                         paged__openai_request *out, paged_error *err) {
    double x = *to;
    if (!take_number(body, name, low, high, &x, out, err)) return false;
    if (x != floor(x)) REFUSE(INVALID_ARG, "%s is %g; it must be a whole number", name, x);
    if (field(body, name, out)) *to = (int32_t)x;
    return true;
}

static bool take_flag(const json_t *body, const char *name, bool *to, paged__openai_request *out,
                      paged_error *err) {
    const json_t *value = field(body, name, out);
    if (!value) return true;
    if (!json_is_boolean(value)) REFUSE(INVALID_ARG, "%s must be true or false", name);
    *to = json_is_true(value);
    return true;
}

static bool take_seed(const json_t *body, paged__openai_request *out, paged_error *err) {
    const json_t *value = field(body, "seed", out);
    if (!value) return true;
    if (!json_is_integer(value)) REFUSE(INVALID_ARG, "seed must be a whole number");
    out->request.seed = (uint64_t)json_integer_value(value);
    out->has_seed = true;
    return true;
}

static bool take_salt(const json_t *body, paged__openai_request *out, paged_error *err) {
    const json_t *value = field(body, "cache_salt", out);
    if (!value) return true;
    if (!json_is_string(value) || strlen(json_string_value(value)) != json_string_length(value))
        REFUSE(INVALID_ARG, "cache_salt must be a string without NUL");
    out->request.salt = json_string_value(value);
    return true;
}

/* A string, or a list of strings. */
static bool take_stops(const json_t *body, paged__openai_request *out, paged_error *err) {
    const json_t *value = field(body, "stop", out);
    if (!value) return true;
    const size_t n = json_is_array(value) ? json_array_size(value) : 1;
    if (n > PAGED_STOPS_MAX) REFUSE(INVALID_ARG, "stop has %zu strings; at most %d", n, PAGED_STOPS_MAX);
    for (size_t i = 0; i < n; i++) {
        const json_t *text = json_is_array(value) ? json_array_get(value, i) : value;
        if (!json_is_string(text)) REFUSE(INVALID_ARG, "stop must be a string or a list of strings");
        out->stops[i] = json_string_value(text);
        if (strlen(out->stops[i]) != json_string_length(text))
            REFUSE(INVALID_ARG, "a stop string must have no NUL in it");
    }
    out->request.stop = out->stops;
    out->request.n_stop = (int32_t)n;
    return true;
}

/* {"TOKEN": bias, …} */
static bool take_bias(const json_t *body, paged__openai_request *out, paged_error *err) {
    const json_t *value = field(body, "logit_bias", out);
    if (!value) return true;
    if (!json_is_object(value)) REFUSE(INVALID_ARG, "logit_bias must be an object of token: bias");
    const size_t n = json_object_size(value);
    if (n > PAGED_LOGIT_BIAS_MAX)
        REFUSE(INVALID_ARG, "logit_bias has %zu tokens; at most %d", n, PAGED_LOGIT_BIAS_MAX);
    out->logit_bias = paged__alloc(n, sizeof *out->logit_bias);
    if (!out->logit_bias) REFUSE(NO_MEMORY, "no memory for logit_bias");
    const char *key;
    json_t *bias;
    json_object_foreach((json_t *)(uintptr_t)value, key, bias) {
        char *end;
        const long token = strtol(key, &end, 10);
        if (end == key || *end || token < INT32_MIN || token > INT32_MAX || !json_is_number(bias))
            REFUSE(INVALID_ARG, "logit_bias: '%.32s' is no token id with a number", key);
        if (fabs(json_number_value(bias)) > BIAS_MAX)
            REFUSE(INVALID_ARG, "logit_bias of token %.32s is %g; it must lie in -%d … %d", key,
                   json_number_value(bias), BIAS_MAX, BIAS_MAX);
        out->logit_bias[out->request.n_logit_bias++] =
            (paged_logit_bias){(int32_t)token, (float)json_number_value(bias)};
    }
    out->request.logit_bias = out->logit_bias;
    return true;
}

bool paged__openai_tokens(const json_t *list, const char *name, int32_t **tokens, int32_t *n,
                          paged_error *err) {
    const size_t size = json_array_size(list);
    if (!json_is_array(list)) REFUSE(INVALID_ARG, "%s must be a list of token ids", name);
    if (size > INT32_MAX / 8) REFUSE(INVALID_ARG, "%s has %zu tokens", name, size);
    *tokens = paged__alloc(size, sizeof **tokens);
    if (!*tokens) REFUSE(NO_MEMORY, "no memory for %zu tokens", size);
    for (size_t i = 0; i < size; i++) {
        const json_t *token = json_array_get(list, i);
        const json_int_t id = json_integer_value(token);
        if (!json_is_integer(token) || id < INT32_MIN || id > INT32_MAX) {
            paged__free(*tokens);
            *tokens = NULL;
            REFUSE(INVALID_ARG, "%s: entry %zu is no token id", name, i);
        }
        (*tokens)[i] = (int32_t)id;
    }
    *n = (int32_t)size;
    return true;
}

static bool take_sampling(const json_t *body, paged__openai_request *out, paged_error *err) {
    paged_request *q = &out->request;
    const json_t *ids = field(body, "stop_token_ids", out);
    if (ids) {
        if (!paged__openai_tokens(ids, "stop_token_ids", &out->stop_tokens, &q->n_stop_tokens, err))
            return false;
        q->stop_tokens = out->stop_tokens;
    }
    /* A completion of no tokens is how a prompt alone is scored, with echo. */
    const int32_t least = out->is_chat ? 1 : 0;
    return take_integer(body, "n", 1, PAGED_CHOICES_MAX, &q->n, out, err) &&
           take_integer(body, "max_tokens", least, INT32_MAX, &q->max_tokens, out, err) &&
           take_integer(body, "max_completion_tokens", least, INT32_MAX, &q->max_tokens, out, err) &&
           take_integer(body, "min_tokens", 0, INT32_MAX, &q->min_tokens, out, err) &&
           take_integer(body, "top_k", -1, INT32_MAX, &q->top_k, out, err) &&
           take_integer(body, "priority", -PAGED_PRIORITY_MAX, PAGED_PRIORITY_MAX, &q->priority, out, err) &&
           take_real(body, "temperature", 0, 1e9, &q->temperature, out, err) &&
           take_real(body, "top_p", 0, 1, &q->top_p, out, err) &&
           take_real(body, "min_p", 0, 1, &q->min_p, out, err) &&
           take_real(body, "repetition_penalty", 0, 100, &q->repetition_penalty, out, err) &&
           take_real(body, "presence_penalty", -100, 100, &q->presence_penalty, out, err) &&
           take_real(body, "frequency_penalty", -100, 100, &q->frequency_penalty, out, err) &&
           take_flag(body, "ignore_eos", &q->ignore_eos, out, err) && take_seed(body, out, err) &&
           take_salt(body, out, err) && take_stops(body, out, err) && take_bias(body, out, err);
}

/* Chat: true and a count; completions: a count. */
static bool take_logprobs(const json_t *body, paged__openai_request *out, paged_error *err) {
    paged_request *q = &out->request;
    if (out->is_chat) {
        if (!take_flag(body, "logprobs", &q->logprobs, out, err) ||
            !take_integer(body, "top_logprobs", 0, PAGED_TOP_LOGPROBS_MAX, &q->n_top_logprobs, out, err))
            return false;
        if (q->n_top_logprobs && !q->logprobs) REFUSE(INVALID_ARG, "top_logprobs needs logprobs true");
        return true;
    }
    q->logprobs = field(body, "logprobs", out) != NULL;
    return take_integer(body, "logprobs", 0, PAGED_TOP_LOGPROBS_MAX, &q->n_top_logprobs, out, err);
}

static bool take_stream(const json_t *body, paged__openai_request *out, paged_error *err) {
    if (!take_flag(body, "stream", &out->stream, out, err)) return false;
    const json_t *options = field(body, "stream_options", out);
    if (!options) return true;
    if (!json_is_object(options)) REFUSE(INVALID_ARG, "stream_options must be an object");
    if (!out->stream) REFUSE(INVALID_ARG, "stream_options needs stream true");
    const bool ok = take_flag(options, "include_usage", &out->include_usage, out, err);
    out->param = "stream_options";
    return ok;
}

/* What a field says that asks for nothing: false, 0, "none", "auto", [], {}. */
static bool asks_for_nothing(const json_t *value) {
    const char *text = json_string_value(value);
    return json_is_false(value) || (json_is_array(value) && json_array_size(value) == 0) ||
           (json_is_object(value) && json_object_size(value) == 0) ||
           (json_is_integer(value) && json_integer_value(value) == 0) ||
           (text && (!text[0] || strcmp(text, "none") == 0 || strcmp(text, "auto") == 0));
}

static bool refuse_unsupported(const json_t *body, paged__openai_request *out, paged_error *err) {
    static const char *const names[] = {"tools",
                                        "tool_choice",
                                        "functions",
                                        "function_call",
                                        "suffix",
                                        "modalities",
                                        "audio",
                                        "prediction",
                                        "web_search_options",
                                        "continue_final_message",
                                        "chat_template_kwargs",
                                        "chat_template",
                                        "guided_json",
                                        "guided_regex",
                                        "guided_choice",
                                        "guided_grammar",
                                        "structured_outputs",
                                        "grammar",
                                        "json_schema"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const json_t *value = field(body, names[i], out);
        if (value && !asks_for_nothing(value)) REFUSE(UNSUPPORTED, "%s is not supported", names[i]);
    }
    const json_t *format = field(body, "response_format", out);
    const char *type = json_string_value(json_object_get(format, "type"));
    if (format && !(type && strcmp(type, "text") == 0))
        REFUSE(UNSUPPORTED, "response_format: only {\"type\": \"text\"} is supported");
    const json_t *best_of = field(body, "best_of", out);
    if (best_of && json_integer_value(best_of) != out->request.n)
        REFUSE(UNSUPPORTED, "best_of is supported only where it equals n");
    if (out->is_chat && field(body, "echo", out) && !asks_for_nothing(field(body, "echo", out)))
        REFUSE(UNSUPPORTED, "echo is a field of /v1/completions");
    return true;
}

/* ---- the prompt ---- */

/* NULL: it is of another type. */
static const json_t *text_of_part(const json_t *part) {
    const char *type = json_string_value(json_object_get(part, "type"));
    return type && strcmp(type, "text") == 0 ? json_object_get(part, "text") : NULL;
}

/* A string, or parts {"type": "text", "text": …}, joined. The caller frees *content (paged__free). */
static bool take_content(const json_t *value, int32_t index, char **content, paged_error *err) {
    paged__buffer text = {0};
    const size_t n = json_is_array(value) ? json_array_size(value) : 1;
    bool ok = json_is_array(value) || json_is_string(value), has_room = true;
    for (size_t i = 0; ok && has_room && i < n; i++) {
        const json_t *part = json_is_array(value) ? text_of_part(json_array_get(value, i)) : value;
        ok = json_is_string(part);
        has_room = !ok || paged__buffer_append(&text, json_string_value(part), json_string_length(part));
    }
    ok = ok && !(text.len && memchr(text.data, 0, text.len));
    has_room = has_room && (!ok || paged__buffer_append(&text, "", 1));
    if (!ok || !has_room) {
        paged__buffer_free(&text);
        if (!has_room) REFUSE(NO_MEMORY, "no memory for the content of message %d", index);
        REFUSE(INVALID_ARG, "content of message %d must be a text without NUL, or a list of text parts",
               index);
    }
    *content = text.data;
    return true;
}

static bool take_message(const json_t *message, int32_t index, paged_message *out, paged_error *err) {
    const char *role = json_string_value(json_object_get(message, "role"));
    if (!role) REFUSE(INVALID_ARG, "message %d has no role", index);
    const json_t *calls = json_object_get(message, "tool_calls");
    if (calls && !json_is_null(calls))
        REFUSE(UNSUPPORTED, "tool_calls of message %d are not supported", index);
    char *content = NULL;
    if (!take_content(json_object_get(message, "content"), index, &content, err)) return false;
    /* The newer name of the same role. */
    *out = (paged_message){strcmp(role, "developer") == 0 ? "system" : role, content};
    return true;
}

bool paged__openai_check_messages(const json_t *list, paged_error *err) {
    if (!json_is_array(list)) REFUSE(INVALID_ARG, "messages must be a list of objects with role and content");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *role = json_object_get(json_array_get(list, i), "role");
        paged_message message;
        if (!take_message(json_array_get(list, i), (int32_t)i, &message, err)) return false;
        paged__free((void *)(uintptr_t)message.content);
        if (!paged__chat_is_role(json_string_value(role), json_string_length(role)))
            REFUSE(INVALID_ARG, "message %zu has the role \"%.40s\", which is none", i,
                   json_string_value(role));
    }
    return true;
}

bool paged__openai_messages(const paged__openai_world *w, const json_t *body, const char **param,
                            int32_t **tokens, int32_t *n_tokens, char **text, paged_error *err) {
    paged__openai_request fields = {0};
    bool open = true;
    if (!take_flag(body, "add_generation_prompt", &open, &fields, err)) return *param = fields.param, false;
    *param = "messages";
    const json_t *list = json_object_get(body, "messages");
    if (!json_is_array(list) || json_array_size(list) == 0 || json_array_size(list) > MESSAGES_MAX)
        REFUSE(INVALID_ARG, "messages must be a list of 1 … %d messages", MESSAGES_MAX);
    if (!w->chat_template) REFUSE(UNSUPPORTED, "this model has no chat template; use /v1/completions");
    const int32_t n = (int32_t)json_array_size(list);
    size_t n_bytes = 0;
    paged_message *messages = paged__calloc((size_t)n, sizeof *messages);
    if (!messages) REFUSE(NO_MEMORY, "no memory for %d messages", n);
    bool ok = true;
    for (int32_t i = 0; ok && i < n; i++) {
        ok = take_message(json_array_get(list, (size_t)i), i, &messages[i], err);
        if (ok) n_bytes += strlen(messages[i].content) + strlen(messages[i].role);
    }
    if (ok && n_bytes > PROMPT_MAX) {
        paged__fail(err, PAGED_ERR_LIMIT, "messages of %zu bytes; at most %d", n_bytes, PROMPT_MAX);
        ok = false;
    }
    if (ok) {
        const paged_chat chat = {
            .struct_size = sizeof chat, .messages = messages, .n_messages = n, .add_generation_prompt = open};
        paged_prompt prompt = {0};
        ok = paged_chat_render(w->model, &chat, &prompt, err) == PAGED_OK;
        if (ok) {
            *tokens = prompt.tokens;
            *n_tokens = prompt.n_tokens;
            prompt.tokens = NULL;
            if (text) *text = prompt.text, prompt.text = NULL;
        }
        paged_prompt_free(&prompt);
    }
    for (int32_t i = 0; i < n; i++) paged__free((void *)(uintptr_t)messages[i].content);
    paged__free(messages);
    return ok;
}

/* The bytes of tokens one after another, control tokens as text. */
typedef struct spelling {
    const paged_tokenizer *tokenizer;
    const int32_t *tokens;
    int32_t n_tokens, next;
    char bytes[PAGED_DETOK_MAX];
    int32_t at, n; /* in bytes, of the token before next */
} spelling;

/* The next byte; -1: there is none, or no such token. */
static int next_byte(spelling *s) {
    while (s->at == s->n) {
        if (s->next == s->n_tokens) return -1;
        s->at = 0;
        s->n = paged_token_bytes(s->tokenizer, s->tokens[s->next++], true, s->bytes, PAGED_DETOK_MAX);
        if (s->n < 0 || s->n > PAGED_DETOK_MAX) return s->n = 0, -1;
    }
    return (unsigned char)s->bytes[s->at++];
}

bool paged__openai_splice(const paged__openai_world *w, paged__openai_prompt *prompt, const int32_t *known,
                          int32_t n_known) {
    const paged_tokenizer *tokenizer = paged_model_tokenizer(w->model);
    spelling a = {.tokenizer = tokenizer, .tokens = known, .n_tokens = n_known};
    spelling b = {.tokenizer = tokenizer, .tokens = prompt->tokens, .n_tokens = prompt->n_tokens};
    int byte;
    while ((byte = next_byte(&a)) >= 0)
        if (next_byte(&b) != byte) return false;
    /* All of known was spelled, and the prompt's token that is as far ends there. */
    if (a.next != n_known || a.at != a.n || b.at != b.n || b.next == prompt->n_tokens) return false;
    const int32_t n_rest = prompt->n_tokens - b.next;
    int32_t *tokens = paged__alloc((size_t)n_known + (size_t)n_rest, sizeof *tokens);
    if (!tokens) return false;
    memcpy(tokens, known, (size_t)n_known * sizeof *tokens);
    memcpy(tokens + n_known, prompt->tokens + b.next, (size_t)n_rest * sizeof *tokens);
    paged__free(prompt->tokens);
    prompt->tokens = tokens;
    prompt->n_tokens = n_known + n_rest;
    return true;
}

bool paged__openai_text_tokens(const paged__openai_world *w, const json_t *value, const char *name,
                               uint32_t flags, int32_t **tokens, int32_t *n_tokens, paged_error *err) {
    if (!json_is_string(value)) REFUSE(INVALID_ARG, "%s must be a string", name);
    const size_t len = json_string_length(value);
    if (len > PROMPT_MAX) REFUSE(INVALID_ARG, "a %s of %zu bytes; at most %d", name, len, PROMPT_MAX);
    *tokens = paged__alloc(len + 8, sizeof **tokens);
    if (!*tokens) REFUSE(NO_MEMORY, "no memory for a %s of %zu bytes", name, len);
    if (paged_tokenize(paged_model_tokenizer(w->model), json_string_value(value), len, flags, *tokens,
                       (int32_t)len + 8, n_tokens, err) == PAGED_OK)
        return true;
    paged__free(*tokens);
    *tokens = NULL;
    return false;
}

/* A string or a list of tokens. */
static bool take_prompt(const paged__openai_world *w, const json_t *value, paged__openai_prompt *out,
                        paged_error *err) {
    if (json_is_array(value)) return paged__openai_tokens(value, "prompt", &out->tokens, &out->n_tokens, err);
    if (!json_is_string(value))
        REFUSE(INVALID_ARG, "prompt must be a string, a list of tokens, or a list of these");
    out->text = json_string_value(value);
    out->text_len = json_string_length(value);
    return paged__openai_text_tokens(w, value, "prompt", PAGED_TOKENIZE_SPECIAL | PAGED_TOKENIZE_CONTROL,
                                     &out->tokens, &out->n_tokens, err);
}

static bool take_prompts(const paged__openai_world *w, const json_t *body, paged__openai_request *out,
                         paged_error *err) {
    const json_t *prompt = field(body, "prompt", out), *first = json_array_get(prompt, 0);
    const bool several = json_is_string(first) || json_is_array(first);
    const size_t n = several ? json_array_size(prompt) : 1;
    if (n * (size_t)out->request.n > PAGED_CHOICES_MAX)
        REFUSE(INVALID_ARG, "%zu prompts with %d answers each; at most %d answers together", n,
               out->request.n, PAGED_CHOICES_MAX);
    out->prompts = paged__calloc(n, sizeof *out->prompts);
    if (!out->prompts) REFUSE(NO_MEMORY, "no memory for %zu prompts", n);
    for (size_t i = 0; i < n; i++) {
        out->n_prompts++;
        if (!take_prompt(w, several ? json_array_get(prompt, i) : prompt, &out->prompts[i], err))
            return false;
    }
    return true;
}

static bool take_chat(const paged__openai_world *w, const json_t *body, paged__openai_request *out,
                      paged_error *err) {
    out->prompts = paged__calloc(1, sizeof *out->prompts);
    if (!out->prompts) REFUSE(NO_MEMORY, "no memory for a prompt");
    out->n_prompts = 1;
    return paged__openai_messages(w, body, &out->param, &out->prompts[0].tokens, &out->prompts[0].n_tokens,
                                  NULL, err);
}

bool paged__openai_parse(const paged__openai_world *w, const json_t *body, bool is_chat,
                         paged__openai_request *out, paged_error *err) {
    *out = (paged__openai_request){.is_chat = is_chat, .request = w->defaults};
    if (out->request.n == 0) out->request.n = 1;
    if (!json_is_object(body)) REFUSE(INVALID_ARG, "the body is no JSON object");
    /* In completions 0 is a number of tokens, so "nobody says" needs another mark until it is read. */
    if (!is_chat && out->request.max_tokens == 0) out->request.max_tokens = COMPLETION_TOKENS;
    bool ok = take_sampling(body, out, err) && refuse_unsupported(body, out, err) &&
              take_logprobs(body, out, err) && take_stream(body, out, err) &&
              (is_chat || take_flag(body, "echo", &out->echo, out, err)) &&
              (is_chat ? take_chat(w, body, out, err) : take_prompts(w, body, out, err));
    if (ok && !is_chat && out->request.max_tokens == 0 && !out->echo) {
        out->param = "max_tokens";
        paged__fail(err, PAGED_ERR_INVALID_ARG, "max_tokens is 0, which only makes sense with echo");
        ok = false;
    }
    const char *param = out->param;
    if (ok) {
        out->request.prompt_logprobs = out->echo && out->request.logprobs;
        out->request.tokens = out->prompts[0].tokens;
        out->request.n_tokens = out->prompts[0].n_tokens;
    } else {
        paged__openai_free(out);
    }
    out->param = ok ? NULL : param;
    return ok;
}

void paged__openai_free(paged__openai_request *request) {
    for (int32_t i = 0; i < request->n_prompts; i++) paged__free(request->prompts[i].tokens);
    paged__free(request->prompts);
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

bool paged__openai_echo(const paged__openai_world *w, const paged__openai_prompt *prompt,
                        paged__buffer *text) {
    if (prompt->text) return paged__buffer_append(text, prompt->text, prompt->text_len);
    char bytes[PAGED_DETOK_MAX];
    paged_detok detok;
    paged_detok_init(&detok, paged_model_tokenizer(w->model), true);
    for (int32_t i = 0; i < prompt->n_tokens; i++)
        if (!paged__buffer_append(text, bytes, (size_t)paged_detok_push(&detok, prompt->tokens[i], bytes)))
            return false;
    return paged__buffer_append(text, bytes, (size_t)paged_detok_finish(&detok, bytes));
}

static int32_t token_text(const paged__openai_world *w, int32_t token, char *bytes) {
    const int32_t n = paged_token_bytes(paged_model_tokenizer(w->model), token, true, bytes, PAGED_DETOK_MAX);
    return n < 0 ? 0 : n;
}

/* JSON has no infinity. */
static double as_json(float logprob) {
    return isfinite(logprob) ? (double)logprob : -9999.0;
}

/* {"token", "logprob", "bytes"} */
static json_t *chat_logprob(const paged__openai_world *w, int32_t token, float logprob) {
    char bytes[PAGED_DETOK_MAX];
    const int32_t n = token_text(w, token, bytes);
    json_t *list = json_array();
    for (int32_t i = 0; i < n; i++) json_array_append_new(list, json_integer((unsigned char)bytes[i]));
    return json_pack("{s:o, s:f, s:o}", "token", paged__json_text(bytes, (size_t)n), "logprob",
                     as_json(logprob), "bytes", list);
}

static json_t *chat_logprobs(const paged__openai_world *w, const paged__openai_request *request,
                             const paged__openai_answer *a, int32_t first, int32_t n) {
    const int32_t *tokens = (const int32_t *)(const void *)a->tokens.data;
    const float *logprobs = (const float *)(const void *)a->logprobs.data;
    const paged_top_logprob *top = (const paged_top_logprob *)(const void *)a->top_logprobs.data;
    const int32_t k = request->request.n_top_logprobs;
    json_t *content = json_array();
    for (int32_t i = first; i < first + n; i++) {
        json_t *one = chat_logprob(w, tokens[i], logprobs[i]), *others = json_array();
        for (int32_t j = 0; j < k; j++)
            json_array_append_new(others, chat_logprob(w, top[i * k + j].token, top[i * k + j].logprob));
        json_object_set_new(one, "top_logprobs", others);
        json_array_append_new(content, one);
    }
    return json_pack("{s:o}", "content", content);
}

/* The four lists of the completions of old. */
typedef struct legacy {
    const paged__openai_world *world;
    json_t *tokens, *logprobs, *tops, *offsets;
    int64_t *offset; /* in characters, as clients count */
} legacy;

static void legacy_top(const legacy *l, json_t *tops, int32_t token, float logprob) {
    char bytes[PAGED_DETOK_MAX];
    json_t *name = paged__json_text(bytes, (size_t)token_text(l->world, token, bytes));
    json_object_set_new(tops, json_string_value(name), json_real(as_json(logprob)));
    json_decref(name);
}

/* tops: taken; NULL is null. logprob NULL: of the first token of a prompt, which has none. */
static void legacy_add(const legacy *l, int32_t token, const float *logprob, json_t *tops) {
    char bytes[PAGED_DETOK_MAX];
    const int32_t n = token_text(l->world, token, bytes);
    json_array_append_new(l->tokens, paged__json_text(bytes, (size_t)n));
    json_array_append_new(l->logprobs, logprob ? json_real(as_json(*logprob)) : json_null());
    json_array_append_new(l->tops, tops ? tops : json_null());
    json_array_append_new(l->offsets, json_integer(*l->offset));
    for (int32_t i = 0; i < n; i++) *l->offset += ((unsigned char)bytes[i] & 0xc0) != 0x80;
}

static json_t *legacy_logprobs(const paged__openai_world *w, const paged__openai_request *request,
                               const paged__openai_answer *a, const paged__openai_prompt *prompt,
                               int32_t first, int32_t n, int64_t *text_offset) {
    const int32_t *tokens = (const int32_t *)(const void *)a->tokens.data;
    const float *logprobs = (const float *)(const void *)a->logprobs.data;
    const paged_top_logprob *top = (const paged_top_logprob *)(const void *)a->top_logprobs.data;
    const int32_t k = request->request.n_top_logprobs;
    const legacy l = {w, json_array(), json_array(), json_array(), json_array(), text_offset};
    for (int32_t i = 0; prompt && i < prompt->n_tokens; i++) {
        const float *logprob = i > 0 && a->prompt_logprobs ? &a->prompt_logprobs[i - 1] : NULL;
        legacy_add(&l, prompt->tokens[i], logprob, NULL);
    }
    for (int32_t i = first; i < first + n; i++) {
        json_t *tops = k ? json_object() : NULL;
        for (int32_t j = 0; j < k; j++) legacy_top(&l, tops, top[i * k + j].token, top[i * k + j].logprob);
        legacy_add(&l, tokens[i], &logprobs[i], tops);
    }
    return json_pack("{s:o, s:o, s:o, s:o}", "tokens", l.tokens, "token_logprobs", l.logprobs, "top_logprobs",
                     l.tops, "text_offset", l.offsets);
}

json_t *paged__openai_logprobs(const paged__openai_world *w, const paged__openai_request *request,
                               const paged__openai_answer *a, const paged__openai_prompt *prompt,
                               int32_t first, int32_t n, int64_t *text_offset) {
    if (!request->request.logprobs) return json_null();
    if (request->is_chat) return chat_logprobs(w, request, a, first, n);
    return legacy_logprobs(w, request, a, prompt, first, n, text_offset);
}

const char *paged__openai_finish(paged_finish finish) {
    return finish == PAGED_FINISH_STOP || finish == PAGED_FINISH_LENGTH ? paged_finish_name(finish) : "error";
}

static json_t *choice_of(const paged__openai_world *w, const paged__openai_request *request,
                         const paged__openai_answer *a, int32_t index) {
    const paged__openai_prompt *prompt = &request->prompts[index / request->request.n];
    /* With max_tokens 0 the token that was made all the same is not given out. */
    const bool prompt_only = request->echo && request->request.max_tokens == 0;
    const int32_t n = prompt_only ? 0 : (int32_t)(a->tokens.len / sizeof(int32_t));
    int64_t offset = 0;
    json_t *logprobs = paged__openai_logprobs(w, request, a, request->echo ? prompt : NULL, 0, n, &offset);
    const char *finish = prompt_only ? "length" : paged__openai_finish(a->end.finish);
    paged__buffer text = {0};
    const bool ok = (!request->echo || paged__openai_echo(w, prompt, &text)) &&
                    (prompt_only || paged__buffer_append(&text, a->text.data, a->text.len));
    json_t *value = ok ? paged__json_text(text.data ? text.data : "", text.len) : NULL;
    paged__buffer_free(&text);
    if (request->is_chat)
        return json_pack("{s:i, s:{s:s, s:o}, s:o, s:s}", "index", (int)index, "message", "role", "assistant",
                         "content", value, "logprobs", logprobs, "finish_reason", finish);
    return json_pack("{s:i, s:o, s:o, s:s}", "index", (int)index, "text", value, "logprobs", logprobs,
                     "finish_reason", finish);
}

json_t *paged__openai_usage(const paged__openai_request *request, const paged__openai_answer *answers) {
    json_int_t prompt = 0, completion = 0, cached = 0;
    const bool prompt_only = request->echo && request->request.max_tokens == 0;
    for (int32_t i = 0; i < request->n_prompts * request->request.n; i++) {
        const paged_output *end = &answers[i].end;
        if (!prompt_only) completion += end->completion_tokens;
        if (i % request->request.n) continue; /* a prompt counts once */
        prompt += end->prompt_tokens;
        cached += end->cached_tokens;
    }
    return json_pack("{s:I, s:I, s:I, s:{s:I}}", "prompt_tokens", prompt, "completion_tokens", completion,
                     "total_tokens", prompt + completion, "prompt_tokens_details", "cached_tokens", cached);
}

json_t *paged__openai_body(const paged__openai_world *w, const paged__openai_request *request,
                           const paged__openai_answer *answers, const char *id, int64_t created) {
    json_t *choices = json_array();
    for (int32_t i = 0; i < request->n_prompts * request->request.n; i++)
        json_array_append_new(choices, choice_of(w, request, &answers[i], i));
    return json_pack("{s:s, s:s, s:I, s:o, s:s, s:o, s:o}", "id", id, "object",
                     request->is_chat ? "chat.completion" : "text_completion", "created", (json_int_t)created,
                     "model", paged__json_text(w->name, strlen(w->name)), "system_fingerprint",
                     "paged-" PAGED_VERSION_STRING, "choices", choices, "usage",
                     paged__openai_usage(request, answers));
}

json_t *paged__openai_error(const char *message, const char *type, const char *param, const char *code) {
    json_t *text = paged__json_text(message, strlen(message));
    return json_pack("{s:{s:o, s:s, s:s?, s:s?}}", "error", "message", text, "type", type, "param", param,
                     "code", code);
}
