/* engine/conversation.c: see conversation.h. It knows no engine, only tokens.
 *
 *   tokens:  system | user, opening, answer, closing | user, opening, answer …
 *             head   └────────── turn 0 ────────────┘ └──── turn 1, begun
 *
 * What the template puts around a message is taken from paged_chat_tokenize by comparing what it gives with
 * and without the message: a template is a sequence of messages whose borders are single tokens, so the
 * tokens of a message do not depend on those beside it.
 */
#include "paged/conversation.h"
#include "base/base.h"

/* A growing array of tokens; owned. */
typedef struct run {
    int32_t *tokens;
    int32_t n, capacity;
} run;

struct paged_conversation {
    const paged_model *model;
    paged_conversation_config config; /* system and salt: see below */
    char *salt;                       /* owned */
    run all;                          /* head and turns */
    run opening, closing;             /* around an answer */
    int32_t n_head;
    int32_t *turns; /* [n_turns] tokens of each; owned */
    int32_t n_turns, capacity;
    bool begun;
    paged_conversation_info info; /* what is counted since create, and of the last answer */
};

/* ---- arrays ---- */

/* Room for n more elements of 4 bytes. False: no memory. */
static bool grow(int32_t **array, int32_t n_used, int32_t *capacity, int32_t n) {
    const int64_t need = (int64_t)n_used + n;
    if (need <= *capacity) return true;
    const int64_t bigger = PAGED_MAX(need, 2 * (int64_t)*capacity);
    if (bigger > INT32_MAX) return false;
    int32_t *grown = paged__alloc((size_t)bigger, sizeof *grown);
    if (!grown) return false;
    if (n_used) memcpy(grown, *array, (size_t)n_used * sizeof *grown);
    paged__free(*array);
    *array = grown;
    *capacity = (int32_t)bigger;
    return true;
}

static bool append(run *r, const int32_t *tokens, int32_t n) {
    if (!grow(&r->tokens, r->n, &r->capacity, n)) return false;
    if (n) memcpy(r->tokens + r->n, tokens, (size_t)n * sizeof *tokens);
    r->n += n;
    return true;
}

static paged_status no_memory(paged_error *err) {
    return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a conversation");
}

/* ---- the template ---- */

/* Tokens of messages, appended to *out from the skip-th on. */
static paged_status tokenize(const paged_conversation *c, const paged_message *messages, int32_t n_messages,
                             bool opened, int32_t skip, run *out, paged_error *err) {
    paged_model_info info;
    paged_model_get_info(c->model, &info);
    /* A token stands for one byte at least, and what the template adds is a part of it. */
    size_t capacity = (info.chat_template ? strlen(info.chat_template) : 0) + 1024;
    for (int32_t i = 0; i < n_messages; i++) capacity += strlen(messages[i].content) + 64;
    if (capacity > INT32_MAX)
        return paged__fail(err, PAGED_ERR_LIMIT, "a message of about %zu bytes; at most %d", capacity,
                           INT32_MAX);
    int32_t n = 0, *tokens = paged__alloc(capacity, sizeof *tokens);
    if (!tokens) return no_memory(err);
    paged_status s = paged_chat_tokenize(c->model, messages, n_messages, opened, tokens, (int32_t)capacity,
                                         &n, NULL, 0, err);
    if (!s && !append(out, tokens + PAGED_MIN(skip, n), n - PAGED_MIN(skip, n))) s = no_memory(err);
    paged__free(tokens);
    return s;
}

static const paged_message no_system = {"system", ""};

/* What a message adds to those before it. */
static paged_status tokenize_message(const paged_conversation *c, const char *role, const char *content,
                                     run *out, paged_error *err) {
    const paged_message both[] = {no_system, {role, content}};
    run before = {0};
    paged_status s = tokenize(c, both, 1, false, 0, &before, err);
    if (!s) s = tokenize(c, both, 2, false, before.n, out, err);
    paged__free(before.tokens);
    return s;
}

/* What stands around an answer, and before the first message. */
static paged_status read_template(paged_conversation *c, const char *system, paged_error *err) {
    const paged_message given = {"system", system}, none = {"user", ""};
    run before = {0}, empty = {0}, user = {0};
    paged_status s = tokenize(c, &no_system, 1, false, 0, &before, err);
    if (!s) s = tokenize(c, &no_system, 1, true, before.n, &c->opening, err);
    if (!s) s = tokenize_message(c, "assistant", "", &empty, err);
    if (!s && empty.n < c->opening.n)
        s = paged__fail(err, PAGED_ERR_UNSUPPORTED, "an answer opens with %d tokens, an empty one has %d",
                        c->opening.n, empty.n);
    if (!s && !append(&c->closing, empty.tokens + c->opening.n, empty.n - c->opening.n)) s = no_memory(err);
    if (!s && system) s = tokenize(c, &given, 1, false, 0, &c->all, err);
    if (!s && !system) {
        s = tokenize_message(c, none.role, none.content, &user, err);
        if (!s) s = tokenize(c, &none, 1, false, 0, &c->all, err);
        if (!s) c->all.n -= PAGED_MIN(user.n, c->all.n);
    }
    c->n_head = c->all.n;
    paged__free(before.tokens);
    paged__free(empty.tokens);
    paged__free(user.tokens);
    return s;
}

/* ---- create, free ---- */

static paged_status create(paged_conversation *c, const paged_conversation_config *config, paged_error *err) {
    if (config) {
        if (config->struct_size < sizeof config->struct_size || config->struct_size > sizeof *config)
            return paged__fail(err, PAGED_ERR_INVALID_ARG, "struct_size is %zu, this library knows up to %zu",
                               config->struct_size, sizeof *config);
        memcpy(&c->config, config, config->struct_size);
    }
    if (c->config.max_tokens < 0 ||
        (c->config.mode != PAGED_CONVERSATION_EXACT && c->config.mode != PAGED_CONVERSATION_KEEP_SINK))
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "max_tokens is %d, mode %d", c->config.max_tokens,
                           (int)c->config.mode);
    if (c->config.salt) {
        const size_t size = strlen(c->config.salt) + 1;
        c->salt = paged__alloc(size, 1);
        if (!c->salt) return no_memory(err);
        memcpy(c->salt, c->config.salt, size);
    }
    paged_status s = read_template(c, c->config.system, err);
    c->config.system = c->config.salt = NULL;
    if (!s && c->config.max_tokens && c->n_head > c->config.max_tokens)
        s = paged__fail(err, PAGED_ERR_TOO_LONG,
                        "the system message has %d tokens; the conversation may have %d", c->n_head,
                        c->config.max_tokens);
    return s;
}

paged_status paged_conversation_create(const paged_model *model, const paged_conversation_config *config,
                                       paged_conversation **out, paged_error *err) {
    if (!model || !out) return paged__fail(err, PAGED_ERR_INVALID_ARG, "%s is NULL", model ? "out" : "model");
    paged_conversation *c = paged__calloc(1, sizeof *c);
    if (!c) return no_memory(err);
    c->model = model;
    paged_status s = create(c, config, err);
    if (s) {
        paged_conversation_free(c);
        return s;
    }
    *out = c;
    return PAGED_OK;
}

void paged_conversation_free(paged_conversation *c) {
    if (!c) return;
    paged__free(c->salt);
    paged__free(c->all.tokens);
    paged__free(c->opening.tokens);
    paged__free(c->closing.tokens);
    paged__free(c->turns);
    paged__free(c);
}

/* ---- what goes ---- */

/* Takes n tokens behind the head out, and with them the turns that lie in them as a whole. */
static void drop_tokens(paged_conversation *c, int32_t n) {
    int32_t n_gone = 0, left = n;
    while (n_gone < c->n_turns && c->turns[n_gone] <= left) left -= c->turns[n_gone++];
    if (left) c->turns[n_gone] -= left;
    c->n_turns -= n_gone;
    memmove(c->turns, c->turns + n_gone, (size_t)c->n_turns * sizeof *c->turns);
    c->all.n -= n;
    memmove(c->all.tokens + c->n_head, c->all.tokens + c->n_head + n,
            (size_t)(c->all.n - c->n_head) * sizeof *c->all.tokens);
    c->info.n_dropped_turns += n_gone;
    c->info.n_dropped_tokens += n;
}

int32_t paged_conversation_keep(paged_conversation *c, int32_t n_last) {
    const int32_t n = c->n_turns - PAGED_MAX(n_last, c->begun);
    int32_t n_tokens = 0;
    for (int32_t i = 0; i < n; i++) n_tokens += c->turns[i];
    if (n > 0) drop_tokens(c, n_tokens);
    return PAGED_MAX(n, 0);
}

/* Makes room for a turn of n_new tokens, which fits into what the head leaves. */
static void make_room(paged_conversation *c, int32_t n_new) {
    const int32_t max = c->config.max_tokens, n_old = c->all.n - c->n_head;
    if (!max || c->all.n + n_new <= max) return;
    int32_t n_drop = 0;
    if (c->config.mode == PAGED_CONVERSATION_KEEP_SINK)
        n_drop = PAGED_MAX(c->all.n + n_new - max, n_old - n_old / 2);
    else
        for (int32_t i = 0; c->all.n + n_new - n_drop > max; i++) n_drop += c->turns[i];
    drop_tokens(c, n_drop);
}

/* ---- turns ---- */

/* Begins a turn with tokens of the user and the opening of the answer; all or nothing. */
static paged_status begin_turn(paged_conversation *c, const run *user, int32_t n_more, paged_error *err) {
    const int32_t n_new = user->n + c->opening.n;
    const int64_t n_whole = (int64_t)c->n_head + n_new + n_more;
    if (c->config.max_tokens && n_whole > c->config.max_tokens)
        return paged__fail(err, PAGED_ERR_TOO_LONG,
                           "the turn has %lld tokens with the system message; the conversation may have %d",
                           (long long)n_whole, c->config.max_tokens);
    if (n_whole > INT32_MAX || !grow(&c->turns, c->n_turns, &c->capacity, 1) ||
        !grow(&c->all.tokens, c->all.n, &c->all.capacity, n_new + n_more))
        return no_memory(err);
    make_room(c, n_new + n_more);
    append(&c->all, user->tokens, user->n);
    append(&c->all, c->opening.tokens, c->opening.n);
    c->turns[c->n_turns++] = n_new;
    c->begun = true;
    return PAGED_OK;
}

paged_status paged_conversation_add_user(paged_conversation *c, const char *text, paged_error *err) {
    run user = {0};
    if (!c || !text) return paged__fail(err, PAGED_ERR_INVALID_ARG, "conversation or text is NULL");
    if (c->begun) return paged__fail(err, PAGED_ERR_INVALID_ARG, "turn %d has no answer yet", c->n_turns - 1);
    paged_status s = tokenize_message(c, "user", text, &user, err);
    if (!s) s = begin_turn(c, &user, 0, err);
    paged__free(user.tokens);
    return s;
}

paged_status paged_conversation_add_turn(paged_conversation *c, const char *user, const char *assistant,
                                         paged_error *err) {
    run asked = {0}, answered = {0};
    if (!c || !user || !assistant)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "conversation or a text is NULL");
    if (c->begun) return paged__fail(err, PAGED_ERR_INVALID_ARG, "turn %d has no answer yet", c->n_turns - 1);
    paged_status s = tokenize_message(c, "user", user, &asked, err);
    if (!s) s = tokenize_message(c, "assistant", assistant, &answered, err);
    /* The message of the assistant begins with the opening. */
    if (!s) s = begin_turn(c, &asked, answered.n - c->opening.n, err);
    if (!s) {
        append(&c->all, answered.tokens + c->opening.n, answered.n - c->opening.n);
        c->turns[c->n_turns - 1] += answered.n - c->opening.n;
        c->begun = false;
    }
    paged__free(asked.tokens);
    paged__free(answered.tokens);
    return s;
}

static paged_status check_restored(const paged_conversation *c, const int32_t *tokens, int32_t n_tokens,
                                   const int32_t *turns, int32_t n_turns, paged_error *err) {
    paged_model_info info;
    if (!c || n_tokens < 0 || n_turns < 0 || (n_tokens && !tokens) || (n_turns && !turns))
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "conversation or a list is NULL, or a count negative");
    if (c->n_turns) return paged__fail(err, PAGED_ERR_INVALID_ARG, "it has %d turns already", c->n_turns);
    if (n_tokens < c->n_head ||
        (c->n_head && memcmp(tokens, c->all.tokens, (size_t)c->n_head * sizeof *tokens) != 0))
        return paged__fail(err, PAGED_ERR_INVALID_ARG,
                           "%d tokens that do not begin with the %d of the system message", n_tokens,
                           c->n_head);
    int64_t sum = c->n_head;
    for (int32_t i = 0; i < n_turns; i++) {
        if (turns[i] < 1)
            return paged__fail(err, PAGED_ERR_INVALID_ARG, "turn %d has %d tokens", i, turns[i]);
        sum += turns[i];
    }
    if (sum != n_tokens)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "%d tokens, but %lld in the turns", n_tokens,
                           (long long)sum);
    paged_model_get_info(c->model, &info);
    for (int32_t i = 0; i < n_tokens; i++)
        if (tokens[i] < 0 || tokens[i] >= info.n_vocab)
            return paged__fail(err, PAGED_ERR_INVALID_ARG, "token %d is %d; the model has %d", i, tokens[i],
                               info.n_vocab);
    if (c->config.max_tokens && n_tokens > c->config.max_tokens)
        return paged__fail(err, PAGED_ERR_TOO_LONG, "%d tokens; the conversation may have %d", n_tokens,
                           c->config.max_tokens);
    return PAGED_OK;
}

paged_status paged_conversation_restore(paged_conversation *c, const int32_t *tokens, int32_t n_tokens,
                                        const int32_t *turns, int32_t n_turns, paged_error *err) {
    const paged_status s = check_restored(c, tokens, n_tokens, turns, n_turns, err);
    if (s) return s;
    if (!grow(&c->turns, 0, &c->capacity, n_turns) ||
        !grow(&c->all.tokens, c->all.n, &c->all.capacity, n_tokens - c->n_head))
        return no_memory(err);
    append(&c->all, tokens + c->n_head, n_tokens - c->n_head);
    if (n_turns) memcpy(c->turns, turns, (size_t)n_turns * sizeof *turns);
    c->n_turns = n_turns;
    return PAGED_OK;
}

static paged_status check_begun(const paged_conversation *c, paged_error *err) {
    if (!c) return paged__fail(err, PAGED_ERR_INVALID_ARG, "conversation is NULL");
    return c->begun ? PAGED_OK : paged__fail(err, PAGED_ERR_INVALID_ARG, "no turn has begun");
}

paged_status paged_conversation_request(const paged_conversation *c, paged_request *request,
                                        paged_error *err) {
    paged_status s = check_begun(c, err);
    if (s) return s;
    request->tokens = c->all.tokens;
    request->n_tokens = c->all.n;
    request->salt = c->salt;
    request->keep_sink = c->config.mode == PAGED_CONVERSATION_KEEP_SINK ? PAGED_MAX(c->n_head, 1) : 0;
    return PAGED_OK;
}

paged_status paged_conversation_take(paged_conversation *c, const paged_output *out, paged_error *err) {
    paged_status s = check_begun(c, err);
    if (s) return s;
    const int32_t n_before = c->all.n;
    if (!grow(&c->all.tokens, c->all.n, &c->all.capacity, out->n_tokens + c->closing.n))
        return no_memory(err);
    append(&c->all, out->tokens, out->n_tokens);
    if (out->finish) {
        append(&c->all, c->closing.tokens, c->closing.n);
        c->begun = false;
        c->info.prompt_tokens = out->prompt_tokens;
        c->info.cached_tokens = out->cached_tokens;
        c->info.completion_tokens = out->completion_tokens;
        c->info.n_dropped_by_answer = out->n_dropped;
    }
    c->turns[c->n_turns - 1] += c->all.n - n_before;
    return PAGED_OK;
}

void paged_conversation_undo(paged_conversation *c) {
    if (!c || !c->begun) return;
    c->all.n -= c->turns[--c->n_turns];
    c->begun = false;
}

/* ---- facts ---- */

const int32_t *paged_conversation_tokens(const paged_conversation *c, int32_t *n) {
    *n = c->all.n;
    return c->all.tokens;
}

void paged_conversation_get_info(const paged_conversation *c, paged_conversation_info *out) {
    *out = c->info;
    out->n_turns = c->n_turns;
    out->n_tokens = c->all.n;
    out->n_system_tokens = c->n_head;
    out->begun = c->begun;
}

paged_status paged_conversation_turn(const paged_conversation *c, int32_t turn, int32_t *first, int32_t *n) {
    if (!c || turn < 0 || turn >= c->n_turns) return PAGED_ERR_INVALID_ARG;
    *first = c->n_head;
    for (int32_t i = 0; i < turn; i++) *first += c->turns[i];
    *n = c->turns[turn];
    return PAGED_OK;
}
