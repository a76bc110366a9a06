/* cli/tokenize.c: paged tokenize: text in, token ids and their pieces out. */
#include <string.h>

#include "base/base.h"
#include "cli/cli.h"
#include "paged/model.h"

typedef struct tokenize_options {
    const char *model, *text, *file, *system;
    bool no_control, no_special, chat, json;
} tokenize_options;

#define AT(field) offsetof(tokenize_options, field)
static const paged__option options_table[] = {
    {.kind = PAGED__OPTION_HEADING, .name = "Options"},
    {PAGED__OPTION_TEXT, 'm', "model", "FILE", AT(model), 0, 0, NULL,
     "the model, a GGUF file (default: $PAGED_MODEL)"},
    {PAGED__OPTION_TEXT, 0, "text", "TEXT", AT(text), 0, 0, NULL, "the text (default: all bytes of stdin)"},
    {PAGED__OPTION_TEXT, 'f', "file", "FILE", AT(file), 0, 0, NULL,
     "the text from a file, '-' for stdin; all its bytes"},
    {PAGED__OPTION_FLAG, 0, "no-control", NULL, AT(no_control), 0, 0, NULL,
     "text such as <|im_end|> is ordinary characters (default: it\nbecomes its control token)"},
    {PAGED__OPTION_FLAG, 0, "no-special", NULL, AT(no_special), 0, 0, NULL,
     "no BOS and EOS (default: where the file asks for them)"},
    {PAGED__OPTION_FLAG, 0, "chat", NULL, AT(chat), 0, 0, NULL,
     "the text as a user's message in the chat template, as paged run\nsends it"},
    {PAGED__OPTION_TEXT, 0, "system", "TEXT", AT(system), 0, 0, NULL,
     "with --chat: the system message (default: the template's)"},
    {PAGED__OPTION_FLAG, 0, "json", NULL, AT(json), 0, 0, NULL,
     "one object: count, tokens, pieces; bytes that are no whole\ncharacter become U+FFFD"},
};
#undef AT

static paged_status encode_chat(const tokenize_options *o, const paged_model *model, const char *text,
                                int32_t **tokens, int32_t *n_tokens, paged_error *err) {
    const paged_message messages[2] = {{"system", o->system}, {"user", text}};
    const int32_t first = o->system ? 0 : 1;
    const paged_chat chat = {.struct_size = sizeof chat,
                             .messages = messages + first,
                             .n_messages = 2 - first,
                             .add_generation_prompt = true};
    paged_prompt prompt = {0};
    const paged_status status = paged_chat_render(model, &chat, &prompt, err);
    paged__free(prompt.text);
    *tokens = prompt.tokens;
    *n_tokens = prompt.n_tokens;
    return status;
}

/* tokens [*n_tokens] is allocated here and the caller's. text ends with a 0 that is not counted in
 * text_len. */
static int encode(paged__cli *cli, const tokenize_options *o, const paged_model *model, const char *text,
                  size_t text_len, int32_t **tokens, int32_t *n_tokens) {
    paged_error err;
    paged_status status;
    if (o->chat) {
        const char *nul = memchr(text, 0, text_len);
        if (nul)
            return paged__error(cli, "a NUL byte at offset %td, which a chat message cannot hold",
                                nul - text);
        status = encode_chat(o, model, text, tokens, n_tokens, &err);
    } else {
        const size_t capacity = text_len + 8;
        uint32_t flags =
            (o->no_special ? 0 : PAGED_TOKENIZE_SPECIAL) | (o->no_control ? 0 : PAGED_TOKENIZE_CONTROL);
        *tokens = paged__alloc(capacity, sizeof **tokens);
        if (!*tokens) return paged__error(cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
        status = paged_tokenize(paged_model_tokenizer(model), text, text_len, flags, *tokens,
                                (int32_t)PAGED_MIN(capacity, INT32_MAX), n_tokens, &err);
    }
    return status == PAGED_OK ? PAGED__EXIT_OK : paged__error(cli, "%s", err.message);
}

static json_t *piece(const paged_tokenizer *tok, int32_t token) {
    char bytes[2 * PAGED_DETOK_MAX];
    paged_detok detok;
    paged_detok_init(&detok, tok, true);
    detok.started = true; /* a piece keeps its leading space, also where the text would lose it */
    int32_t n = paged_detok_push(&detok, token, bytes);
    n += paged_detok_finish(&detok, bytes + n);
    return paged__json_text(bytes, (size_t)n);
}

static int print_json(paged__cli *cli, const paged_tokenizer *tok, const int32_t *tokens, int32_t n_tokens) {
    json_t *ids = json_array(), *pieces = json_array();
    for (int32_t i = 0; i < n_tokens; i++) {
        json_array_append_new(ids, json_integer(tokens[i]));
        json_array_append_new(pieces, piece(tok, tokens[i]));
    }
    json_t *object = json_pack("{s:i, s:o, s:o}", "count", (int)n_tokens, "tokens", ids, "pieces", pieces);
    return paged__out_json(cli, object, true);
}

static int print_lines(paged__cli *cli, const paged_tokenizer *tok, const int32_t *tokens, int32_t n_tokens) {
    int code = PAGED__EXIT_OK;
    for (int32_t i = 0; i < n_tokens && code == PAGED__EXIT_OK && !cli->out_errno; i++) {
        paged__out_printf(cli, "%7d  ", tokens[i]);
        code = paged__out_json(cli, piece(tok, tokens[i]), true);
    }
    return code;
}

static int tokenize_text(paged__cli *cli, const tokenize_options *o, const char *path, paged__buffer *text) {
    paged_model *model = NULL;
    int32_t *tokens = NULL, n_tokens = 0;
    paged_error err;
    paged_model_config config = {.struct_size = sizeof config, .vocab_only = true};
    paged_status status = paged_model_load(path, &config, &model, &err);
    if (status != PAGED_OK) return paged__error(cli, "%s", err.message);
    int code = encode(cli, o, model, text->data, text->len, &tokens, &n_tokens);
    if (code == PAGED__EXIT_OK) {
        const paged_tokenizer *tok = paged_model_tokenizer(model);
        code = o->json ? print_json(cli, tok, tokens, n_tokens) : print_lines(cli, tok, tokens, n_tokens);
    }
    paged__free(tokens);
    paged_model_free(model);
    return code;
}

static int tokenize_command(paged__cli *cli, int argc, char **argv) {
    tokenize_options o = {0};
    int code;
    if (!paged__args_parse(cli, &paged__command_tokenize, argc, argv, &o, &code)) return code;
    if (o.text && o.file) return paged__usage_error(cli, "give --text or --file, not both");
    if (o.chat && (o.no_control || o.no_special)) {
        return paged__usage_error(
            cli, "--chat decides on control tokens and BOS itself; leave out --no-control and --no-special");
    }
    if (o.system && !o.chat) return paged__usage_error(cli, "--system needs --chat");
    const char *path = paged__args_model(cli, o.model, "--model FILE");
    if (!path) return PAGED__EXIT_USAGE;
    paged__log_to_stderr(cli, PAGED_LOG_WARN);

    paged__buffer text = {0};
    code = paged__text_take(cli, o.text, o.file ? o.file : "-", &text);
    if (code == PAGED__EXIT_OK) code = tokenize_text(cli, &o, path, &text);
    paged__buffer_free(&text);
    return code;
}

const paged__command paged__command_tokenize = {
    .name = "tokenize",
    .purpose = "show the tokens of a text",
    .usage = "--model FILE [--text TEXT | --file FILE] [options]",
    .example = "paged tokenize --model model.gguf --text \"Hello, world\" --json",
    .options = options_table,
    .n_options = sizeof options_table / sizeof options_table[0],
    .run = tokenize_command,
};
