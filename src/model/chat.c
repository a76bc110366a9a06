/* model/chat.c: ChatML, piece by piece.
 *
 *     <|im_start|>ROLE\nCONTENT<|im_end|>\n   for each message, then <|im_start|>assistant\n
 *
 * The two border tokens are put in by their ids; role and content are tokenized together as raw text, in
 * which control tokens are ordinary characters. So content never becomes a border, and harmless content gives
 * the tokens of the whole text. Of the model's template only these facts are read: that it is ChatML, its
 * default system message (a plain literal), whether it prints BOS and whether it trims content.
 */
#include "model/chat.h"

static const char start_text[] = "<|im_start|>", end_text[] = "<|im_end|>", assistant_text[] = "assistant\n";

typedef struct output {
    const paged_tokenizer *tok;
    paged_error *err;
    int32_t *tokens; /* [n_tokens of capacity] */
    int32_t n_tokens, capacity;
    char *text; /* [n_text of text_capacity] or NULL: not wanted */
    size_t n_text, text_capacity;
    int32_t start, end; /* control tokens */
} output;

static paged_status put_text(output *o, const char *text, size_t len) {
    if (!o->text) return PAGED_OK;
    if (len >= o->text_capacity - o->n_text)
        return paged__fail(o->err, PAGED_ERR_LIMIT, "the chat as text needs more than %zu bytes",
                           o->text_capacity);
    if (len) memcpy(o->text + o->n_text, text, len);
    o->n_text += len;
    return PAGED_OK;
}

static paged_status put_token(output *o, int32_t id, const char *text) {
    if (o->n_tokens == o->capacity)
        return paged__fail(o->err, PAGED_ERR_LIMIT, "the chat has more than %d tokens", o->capacity);
    o->tokens[o->n_tokens++] = id;
    return put_text(o, text, strlen(text));
}

static paged_status put_raw(output *o, const char *text, size_t len, uint32_t flags) {
    int32_t n = 0;
    paged_status status = paged_tokenize(o->tok, text, len, flags, o->tokens + o->n_tokens,
                                         o->capacity - o->n_tokens, &n, o->err);
    if (status) return status;
    o->n_tokens += n;
    return put_text(o, text, len);
}

/* ---- the template ---- */

/* Copies the string literal that begins at the quote *p, without its quotes and escapes, into out
 * [strlen(p)]; *p is then behind it. False: it does not end. */
static bool read_literal(const char **p, char *out) {
    const char quote = **p;
    const char *in = *p + 1;
    for (; *in && *in != quote; in++) {
        if (*in == '\\' && in[1]) {
            in++;
            *out++ = *in == 'n' ? '\n' : *in == 't' ? '\t' : *in == 'r' ? '\r' : *in;
        } else {
            *out++ = *in;
        }
    }
    *out = 0;
    *p = in;
    if (!*in) return false;
    *p = in + 1;
    return true;
}

static const char *skip_blank(const char *p) {
    return p + strspn(p, " \t\r\n-");
}

static bool is_system_message(const char *text) {
    static const char begin[] = "<|im_start|>system\n";
    const char *end = strstr(text, end_text);
    if (strncmp(text, begin, sizeof begin - 1) != 0 || !end) return false;
    end += sizeof end_text - 1;
    return strspn(end, "\n") == strlen(end);
}

/* The first {{ 'literal' }} that is a whole system message, into out [strlen(chat_template) + 1]; "" if there
 * is none. */
static void find_default_system(const char *chat_template, char *out) {
    for (const char *p = chat_template; (p = strstr(p, "{{")) != NULL;) {
        p = skip_blank(p + 2);
        if (*p != '\'' && *p != '"') continue;
        if (!read_literal(&p, out)) break;
        if (is_system_message(out) && strncmp(skip_blank(p), "}}", 2) == 0) return;
    }
    *out = 0;
}

static bool trims_content(const char *chat_template) {
    static const char *const forms[] = {"content'] | trim", "content']|trim",   "content\"] | trim",
                                        "content\"]|trim",  ".content | trim",  ".content|trim",
                                        "content.strip()",  "content'].strip()"};
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++)
        if (strstr(chat_template, forms[i])) return true;
    return false;
}

/* ---- messages ---- */

static paged_status put_message(output *o, const paged_message *m, bool trim) {
    static const char blank[] = " \t\n\v\f\r";
    const char *content = m->content;
    size_t role_len = strlen(m->role), len = strlen(content);
    while (trim && len && strchr(blank, content[0])) content++, len--;
    while (trim && len && strchr(blank, content[len - 1])) len--;
    char *raw = paged__alloc(role_len + 1 + len, 1);
    if (!raw) return paged__fail(o->err, PAGED_ERR_NO_MEMORY, "no memory for a message of %zu bytes", len);
    memcpy(raw, m->role, role_len);
    raw[role_len] = '\n';
    if (len) memcpy(raw + role_len + 1, content, len);
    paged_status status = put_token(o, o->start, start_text);
    if (!status) status = put_raw(o, raw, role_len + 1 + len, 0);
    if (!status) status = put_token(o, o->end, end_text);
    if (!status) status = put_raw(o, "\n", 1, 0);
    paged__free(raw);
    return status;
}

static bool is_role(const char *role) {
    return role &&
           (strcmp(role, "system") == 0 || strcmp(role, "user") == 0 || strcmp(role, "assistant") == 0);
}

static paged_status check_messages(const paged_message *messages, int32_t n, paged_error *err) {
    if (n < 1 || !messages)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "a chat needs at least one message, not %d", n);
    for (int32_t i = 0; i < n; i++) {
        if (!is_role(messages[i].role))
            return paged__fail(err, PAGED_ERR_INVALID_ARG,
                               "message %d has the role \"%.40s\", not system, user or assistant", i,
                               messages[i].role ? messages[i].role : "(none)");
        if (!messages[i].content)
            return paged__fail(err, PAGED_ERR_INVALID_ARG, "message %d has no content", i);
    }
    return PAGED_OK;
}

/* BOS once: printed where the template prints it, silent where only the file asks for it. */
static paged_status put_bos(output *o, const char *chat_template) {
    char text[PAGED_DETOK_MAX];
    int32_t bos = paged_token_bos(o->tok);
    bool printed = strstr(chat_template, "bos_token") != NULL;
    if (bos < 0 || (!printed && !paged__tokenizer_adds_bos(o->tok))) return PAGED_OK;
    int32_t len = printed ? paged_token_bytes(o->tok, bos, true, text, sizeof text - 1) : 0;
    text[len] = 0;
    return put_token(o, bos, text);
}

static paged_status put_chat(output *o, const char *chat_template, const paged_message *messages,
                             int32_t n_messages, bool add_generation_prompt) {
    const bool trim = trims_content(chat_template);
    char *message = paged__alloc(strlen(chat_template) + 1, 1);
    if (!message) return paged__fail(o->err, PAGED_ERR_NO_MEMORY, "no memory for the chat template");
    find_default_system(chat_template, message);
    paged_status status = put_bos(o, chat_template);
    if (!status && *message && strcmp(messages[0].role, "system") != 0)
        status = put_raw(o, message, strlen(message), PAGED_TOKENIZE_CONTROL);
    for (int32_t i = 0; !status && i < n_messages; i++) status = put_message(o, &messages[i], trim);
    if (!status && add_generation_prompt) status = put_token(o, o->start, start_text);
    if (!status && add_generation_prompt) status = put_raw(o, assistant_text, sizeof assistant_text - 1, 0);
    paged__free(message);
    return status;
}

paged_status paged__chat_tokenize(const char *chat_template, const paged_tokenizer *tok,
                                  const paged_message *messages, int32_t n_messages,
                                  bool add_generation_prompt, int32_t *tokens, int32_t capacity,
                                  int32_t *n_tokens, char *text, size_t text_capacity, paged_error *err) {
    output o = {.tok = tok,
                .err = err,
                .tokens = tokens,
                .capacity = PAGED_MAX(capacity, 0),
                .text = text,
                .text_capacity = text_capacity};
    if (!chat_template || !*chat_template)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED, "the model has no chat template");
    if (!strstr(chat_template, start_text) || !strstr(chat_template, end_text))
        return paged__fail(err, PAGED_ERR_UNSUPPORTED, "the chat template is not ChatML: no %s and %s in it",
                           start_text, end_text);
    o.start = paged__tokenizer_find_control(tok, start_text);
    o.end = paged__tokenizer_find_control(tok, end_text);
    if (o.start < 0 || o.end < 0)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED,
                           "the template is ChatML, but %s is no control token of the vocabulary",
                           o.start < 0 ? start_text : end_text);
    paged_status status = check_messages(messages, n_messages, err);
    if (!status) status = put_chat(&o, chat_template, messages, n_messages, add_generation_prompt);
    if (status) return status;
    *n_tokens = o.n_tokens;
    if (text) text[o.n_text] = 0;
    return PAGED_OK;
}
