/* model/chat.c: a chat to text and tokens.
 *
 * The variables are those that transformers gives: messages, add_generation_prompt, bos_token, eos_token,
 * tools and
 * documents (none unless the caller has some). Everything of the caller is raw, so that it never becomes a
 * control
 * token; a role from the list below is the template's word, since templates write '<|' + role + '|>'.
 */
#include "model/chat.h"

#include <time.h>

#include "model/jinja/jinja.h"

static const char *const roles[] = {"system", "developer", "user", "assistant", "tool", "function"};

struct paged__chat_template {
    const paged_tokenizer *tok;
    paged__jinja *jinja; /* NULL: `broken` says why */
    paged_error broken;
    char bos[PAGED_DETOK_MAX], eos[PAGED_DETOK_MAX]; /* "" if there is none */
    size_t bos_len, eos_len;
};

static size_t token_text(const paged_tokenizer *tok, int32_t token, char out[PAGED_DETOK_MAX]) {
    const int32_t n = token < 0 ? 0 : paged_token_bytes(tok, token, true, out, PAGED_DETOK_MAX);
    return n > 0 && n <= PAGED_DETOK_MAX ? (size_t)n : 0;
}

paged_status paged__chat_create(const char *text, const paged_tokenizer *tok, paged__chat_template **out,
                                paged_error *err) {
    paged__chat_template *t = paged__calloc(1, sizeof *t);
    if (!t) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a chat template");
    t->tok = tok;
    t->bos_len = token_text(tok, paged_token_bos(tok), t->bos);
    t->eos_len = token_text(tok, paged_token_eos(tok), t->eos);
    const paged_status status = paged__jinja_compile(text, strlen(text), NULL, &t->jinja, &t->broken);
    if (status == PAGED_ERR_NO_MEMORY) {
        paged__fail(err, status, "%s", t->broken.message);
        paged__chat_free(t);
        return status;
    }
    if (status) paged__log(PAGED_LOG_WARN, "%s; the model cannot chat", t->broken.message);
    *out = t;
    return PAGED_OK;
}

void paged__chat_free(paged__chat_template *t) {
    if (!t) return;
    paged__jinja_free(t->jinja);
    paged__free(t);
}

void paged_prompt_free(paged_prompt *prompt) {
    paged__free(prompt->text);
    paged__free(prompt->tokens);
    *prompt = (paged_prompt){0};
}

/* ---- variables ---- */

bool paged__chat_is_role(const char *role, size_t len) {
    for (size_t i = 0; i < sizeof roles / sizeof roles[0]; i++)
        if (strlen(roles[i]) == len && memcmp(role, roles[i], len) == 0) return true;
    return false;
}

static paged_status check_messages(const paged_chat *chat, paged_error *err) {
    if (chat->messages_json) return PAGED_OK;
    if (chat->n_messages < 1 || !chat->messages)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "a chat needs at least one message, not %d",
                           chat->n_messages);
    for (int32_t i = 0; i < chat->n_messages; i++) {
        const paged_message *m = &chat->messages[i];
        if (!m->role || !paged__chat_is_role(m->role, strlen(m->role)))
            return paged__fail(
                err, PAGED_ERR_INVALID_ARG,
                "message %d has the role \"%.40s\", not system, developer, user, assistant, tool or "
                "function",
                i, m->role ? m->role : "(none)");
        if (!m->content) return paged__fail(err, PAGED_ERR_INVALID_ARG, "message %d has no content", i);
    }
    return PAGED_OK;
}

static void set_variables(const paged__chat_template *t, const paged_chat *chat, paged__j_run *run) {
    if (chat->messages_json)
        paged__j_set_messages_json(run, chat->messages_json, strlen(chat->messages_json),
                                   paged__chat_is_role);
    else
        paged__j_set_messages(run, chat->messages, (size_t)chat->n_messages);
    paged__j_set_bool(run, "add_generation_prompt", chat->add_generation_prompt);
    paged__j_set_text(run, "bos_token", t->bos, t->bos_len, false);
    paged__j_set_text(run, "eos_token", t->eos, t->eos_len, false);
    paged__j_set_none(run, "tools");
    paged__j_set_none(run, "documents");
    if (chat->variables_json) paged__j_set_members(run, chat->variables_json, strlen(chat->variables_json));
}

/* ---- rendering ---- */

static paged_status render(const paged__chat_template *t, const paged_chat *chat, paged__j_rendered *out,
                           paged_error *err) {
    paged__j_run *run = NULL;
    const int64_t now = chat->now_s ? chat->now_s : (int64_t)time(NULL);
    paged_status status = paged__j_run_create(t->jinja, NULL, now, &run, err);
    if (status) return status;
    set_variables(t, chat, run);
    status = paged__j_run_render(run, out, err);
    paged__j_run_free(run);
    return status;
}

/* BOS once: the template may print it, and else it is added where the file asks for it, unseen. */
static paged_status tokenize(const paged__chat_template *t, const paged__j_rendered *text, paged_prompt *out,
                             paged_error *err) {
    const int32_t bos = paged_token_bos(t->tok);
    if (text->len > INT32_MAX / 2)
        return paged__fail(err, PAGED_ERR_LIMIT, "a chat of %zu bytes is too long", text->len);
    const int32_t capacity = (int32_t)text->len + 9;
    out->tokens = paged__alloc((size_t)capacity, sizeof *out->tokens);
    if (!out->tokens) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for %d tokens", capacity);
    int32_t *tokens = out->tokens + 1, n = 0;
    const paged_status status = paged__tokenize_marked(t->tok, text->bytes, text->raw, text->len,
                                                       PAGED_TOKENIZE_CONTROL, tokens, capacity - 1, &n, err);
    if (status) return status;
    const bool add_bos = paged__tokenizer_adds_bos(t->tok) && (n == 0 || tokens[0] != bos);
    if (add_bos)
        out->tokens[0] = bos;
    else if (n)
        memmove(out->tokens, tokens, (size_t)n * sizeof *tokens);
    out->n_tokens = n + add_bos;
    return PAGED_OK;
}

paged_status paged__chat_render(const paged__chat_template *t, const paged_chat *chat, paged_prompt *out,
                                paged_error *err) {
    paged_chat c = {0};
    if (!chat || chat->struct_size < sizeof chat->struct_size || chat->struct_size > sizeof c)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "struct_size is %zu, this library knows up to %zu",
                           chat ? chat->struct_size : 0, sizeof c);
    memcpy(&c, chat, chat->struct_size);
    if (!t) return paged__fail(err, PAGED_ERR_UNSUPPORTED, "the model has no chat template");
    if (!t->jinja) return paged__fail(err, t->broken.status, "%s", t->broken.message);
    paged__j_rendered text = {0};
    paged_prompt prompt = {0};
    paged_status status = check_messages(&c, err);
    if (!status) status = render(t, &c, &text, err);
    if (!status) status = tokenize(t, &text, &prompt, err);
    prompt.text = text.bytes;
    prompt.text_len = text.len;
    paged__free(text.raw);
    if (status)
        paged_prompt_free(&prompt);
    else
        *out = prompt;
    return status;
}

paged_status paged__chat_tokenize(const paged__chat_template *t, const paged_chat *chat, int32_t *tokens,
                                  int32_t capacity, int32_t *n_tokens, char *text, size_t text_capacity,
                                  paged_error *err) {
    paged_prompt prompt;
    paged_status status = paged__chat_render(t, chat, &prompt, err);
    if (status) return status;
    if (prompt.n_tokens > capacity)
        status = paged__fail(err, PAGED_ERR_LIMIT, "the chat has %d tokens, room for %d", prompt.n_tokens,
                             PAGED_MAX(capacity, 0));
    else if (text && prompt.text_len >= text_capacity)
        status = paged__fail(err, PAGED_ERR_LIMIT, "the chat as text has %zu bytes, room for %zu",
                             prompt.text_len, text_capacity);
    if (!status) {
        if (prompt.n_tokens) memcpy(tokens, prompt.tokens, (size_t)prompt.n_tokens * sizeof *tokens);
        if (text) memcpy(text, prompt.text, prompt.text_len + 1);
        *n_tokens = prompt.n_tokens;
    }
    paged_prompt_free(&prompt);
    return status;
}
