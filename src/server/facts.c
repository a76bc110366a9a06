/* server/facts.c: routes that answer at once: health, version, models, tokens, templates, the check. */
#include <stdlib.h>

#include "base/base.h"
#include "server/route.h"

void paged__reply_stalled(paged__conn *c) {
    paged__reply_error(c, 503, NULL, NULL, "the engine has not moved for %d s, though there is work",
                       c->server->config.stall_ms / 1000);
}

void paged__health(paged__conn *c) {
    if (!c->server->service)
        paged__reply_error(c, 503, NULL, NULL, "Loading model");
    else if (paged__server_is_stalled(c->server))
        paged__reply_stalled(c);
    else
        paged__reply_json(c, 200, json_pack("{s:s}", "status", "ok"));
}

void paged__version_route(paged__conn *c) {
    paged__reply_json(c, 200, json_pack("{s:s}", "version", paged_version()));
}

void paged__models(paged__conn *c, const char *id) {
    const paged__server *s = c->server;
    const char *name = s->world.name;
    if (id[0] && strcmp(id, name) != 0) {
        paged__reply_error(c, 404, "model", "model_not_found", "there is no model '%.100s' here", id);
        return;
    }
    const paged_model_info *m = &s->model_info;
    json_t *model = json_pack(
        "{s:o, s:s, s:I, s:s, s:i, s:{s:I, s:I, s:i, s:i, s:i}}", "id", paged__json_text(name, strlen(name)),
        "object", "model", "created", (json_int_t)s->started, "owned_by", "paged", "max_model_len",
        (int)s->info.n_ctx, "meta", "n_params", (json_int_t)m->n_params, "size", (json_int_t)m->weight_bytes,
        "n_vocab", (int)m->n_vocab, "n_embd", (int)m->n_embd, "n_ctx_train", (int)m->n_ctx_train);
    paged__reply_json(c, 200, id[0] ? model : json_pack("{s:s, s:[o]}", "object", "list", "data", model));
}

/* ---- tokens ---- */

/* A field that is true or false; false: it is something else, and that has been answered. */
static bool take_flag(paged__conn *c, const json_t *body, const char *name, bool *to) {
    const json_t *value = json_object_get(body, name);
    if (!value || json_is_null(value)) return true;
    *to = json_is_true(value);
    if (json_is_boolean(value)) return true;
    paged__reply_error(c, 400, name, NULL, "%s must be true or false", name);
    return false;
}

static json_t *piece_of(const paged__server *s, int32_t token) {
    char bytes[PAGED_DETOK_MAX];
    const int32_t n =
        paged_token_bytes(paged_model_tokenizer(s->world.model), token, true, bytes, sizeof bytes);
    return paged__json_text(bytes, (size_t)PAGED_MAX(n, 0));
}

/* What llama.cpp's clients send. */
static void tokenize_content(paged__conn *c, const json_t *body, const json_t *content) {
    bool special = false, control = true, pieces = false;
    int32_t *tokens = NULL, n = 0;
    paged_error err = {0};
    if (!take_flag(c, body, "add_special", &special) || !take_flag(c, body, "parse_special", &control) ||
        !take_flag(c, body, "with_pieces", &pieces))
        return;
    const uint32_t flags = (special ? PAGED_TOKENIZE_SPECIAL : 0u) | (control ? PAGED_TOKENIZE_CONTROL : 0u);
    if (!paged__openai_text_tokens(&c->server->world, content, "content", flags, &tokens, &n, &err)) {
        paged__reply_status(c, &err, "content");
        return;
    }
    json_t *list = json_array();
    for (int32_t i = 0; i < n; i++)
        json_array_append_new(list, pieces ? json_pack("{s:i, s:o}", "id", (int)tokens[i], "piece",
                                                       piece_of(c->server, tokens[i]))
                                           : json_integer(tokens[i]));
    paged__free(tokens);
    paged__reply_json(c, 200, json_pack("{s:o}", "tokens", list));
}

/* What vLLM's send. */
static void tokenize_prompt(paged__conn *c, const json_t *body) {
    bool special = true, strings = false;
    int32_t *tokens = NULL, n = 0;
    const char *param = "prompt";
    const json_t *prompt = json_object_get(body, "prompt");
    paged_error err = {0};
    if (!take_flag(c, body, "add_special_tokens", &special) ||
        !take_flag(c, body, "return_token_strs", &strings))
        return;
    const uint32_t flags = PAGED_TOKENIZE_CONTROL | (special ? PAGED_TOKENIZE_SPECIAL : 0u);
    const bool ok =
        prompt ? paged__openai_text_tokens(&c->server->world, prompt, "prompt", flags, &tokens, &n, &err)
               : paged__openai_messages(&c->server->world, body, &param, &tokens, &n, NULL, &err);
    if (!ok) {
        if (err.status == PAGED_ERR_LIMIT) err.status = PAGED_ERR_INVALID_ARG;
        paged__reply_status(c, &err, param);
        return;
    }
    json_t *list = json_array(), *texts = strings ? json_array() : json_null();
    for (int32_t i = 0; i < n; i++) {
        json_array_append_new(list, json_integer(tokens[i]));
        if (strings) json_array_append_new(texts, piece_of(c->server, tokens[i]));
    }
    paged__free(tokens);
    paged__reply_json(c, 200,
                      json_pack("{s:i, s:i, s:o, s:o}", "count", (int)n, "max_model_len",
                                (int)c->server->info.n_ctx, "tokens", list, "token_strs", texts));
}

void paged__tokenize_route(paged__conn *c) {
    json_t *body = paged__body_json(c);
    if (!body) return;
    const json_t *content = json_object_get(body, "content");
    if (content)
        tokenize_content(c, body, content);
    else
        tokenize_prompt(c, body);
    json_decref(body);
}

void paged__detokenize_route(paged__conn *c) {
    json_t *body = paged__body_json(c);
    int32_t *tokens = NULL, n = 0;
    paged_error err = {0};
    if (!body) return;
    const bool ok = paged__openai_tokens(json_object_get(body, "tokens"), "tokens", &tokens, &n, &err);
    json_decref(body);
    const int32_t n_vocab = paged_token_count(paged_model_tokenizer(c->server->world.model));
    for (int32_t i = 0; ok && i < n; i++) {
        if (tokens[i] >= 0 && tokens[i] < n_vocab) continue;
        paged__reply_error(c, 400, "tokens", NULL, "token %d is %d; the vocabulary ends at %d", i, tokens[i],
                           n_vocab - 1);
        paged__free(tokens);
        return;
    }
    paged__buffer text = {0};
    const paged__openai_prompt prompt = {.tokens = tokens, .n_tokens = n};
    if (!ok) {
        paged__reply_status(c, &err, "tokens");
    } else if (!paged__openai_echo(&c->server->world, &prompt, &text)) {
        paged__reply_error(c, 503, NULL, NULL, "no memory");
    } else {
        json_t *value = paged__json_text(text.data ? text.data : "", text.len);
        paged__reply_json(c, 200, json_pack("{s:O, s:o}", "prompt", value, "content", value));
    }
    paged__buffer_free(&text);
    paged__free(tokens);
}

void paged__apply_template(paged__conn *c) {
    json_t *body = paged__body_json(c);
    int32_t *tokens = NULL, n = 0;
    char *text = NULL;
    const char *param = NULL;
    paged_error err = {0};
    if (!body) return;
    const bool ok = paged__openai_messages(&c->server->world, body, &param, &tokens, &n, &text, &err);
    json_decref(body);
    if (ok)
        paged__reply_json(c, 200, json_pack("{s:o}", "prompt", paged__json_text(text, strlen(text))));
    else
        paged__reply_status(c, &err, param);
    paged__free(tokens);
    paged__free(text);
}

void paged__reply_busy(paged__conn *c) {
    paged__reply_error(c, 503, NULL, NULL, "the engine is in a step that has not ended yet");
}

/* ---- the check ---- */

static void check(paged_engine *engine, void *user) {
    paged_error *err = user;
    err->status = paged_engine_check(engine, err);
}

void paged__check_route(paged__conn *c) {
    paged_error err = {0};
    if (!paged__server_look(c->server, check, &err))
        paged__reply_busy(c);
    else if (err.status == PAGED_OK)
        paged__reply_json(c, 200, json_pack("{s:b}", "ok", 1));
    else
        paged__reply_error(c, 500, NULL, "corrupt", "%s", err.message);
}
