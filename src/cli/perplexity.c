/* cli/perplexity.c: paged perplexity: how well a model predicts a text, as one number to compare files and
 * settings by.
 *
 * The text is cut into pieces of --ctx tokens, each computed for itself, the first token of each being BOS
 * where the model has one. The first half of a piece is there to be looked back at; the tokens of the second
 * half count. It is the measure of llama.cpp's tool of this name, so that numbers can be compared. A text of
 * less than a piece counts from its second token on.
 */
#include <math.h>
#include <stdio.h>

#include "base/base.h"
#include "cli/cli.h"
#include "cli/plan.h"
#include "cli/session.h"

enum { CTX_DEFAULT = 512 };

typedef struct perplexity_options {
    const char *file, *model;
    bool json, quiet;
    paged__memory_options memory;
} perplexity_options;

#define AT(field) offsetof(perplexity_options, field)
static const paged__option options_table[] = {
    {.kind = PAGED__OPTION_HEADING, .name = "Options"},
    {PAGED__OPTION_OPERAND, 0, "FILE", NULL, AT(file), 0, 0, NULL, "a text, '-' for stdin"},
    PAGED__MODEL_ROW(perplexity_options, model),
    {PAGED__OPTION_INT, 0, "ctx", "N", AT(memory.ctx), 2, INT32_MAX, NULL,
     "tokens of a piece of the text (default: 512, or the model's\ncontext if that is less)"},
    {PAGED__OPTION_CHOICE, 0, "kv-type", "TYPE", AT(memory.kv_choice), 0, 0, paged__kv_choices,
     PAGED__KV_HELP},
    PAGED__LINEAR_ROW(perplexity_options, memory.linear),
    {PAGED__OPTION_INT, 0, "threads", "N", AT(memory.n_threads), 1, 256, NULL,
     "threads (default: the cores that this process may use)"},
    {PAGED__OPTION_FLAG, 0, "json", NULL, AT(json), 0, 0, NULL, "one JSON object"},
    {PAGED__OPTION_FLAG, 'q', "quiet", NULL, AT(quiet), 0, 0, NULL, "no notes, no progress bar"},
};
#undef AT

typedef struct perplexity {
    paged__cli *cli;
    perplexity_options options;
    paged__session session;
    paged__buffer text;
    int32_t *tokens; /* [n_tokens] of the text, owned */
    int32_t n_tokens;
    int32_t n_ctx, n_pieces;
    double sum, squares; /* of the negative log-probabilities that count */
    int64_t n_counted;
} perplexity;

static int tokenize(perplexity *p) {
    const size_t capacity = p->text.len + 8;
    paged_error err;
    p->tokens = paged__alloc(capacity, sizeof *p->tokens);
    if (!p->tokens) return paged__error(p->cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
    if (paged_tokenize(paged_model_tokenizer(p->session.model), p->text.data, p->text.len,
                       PAGED_TOKENIZE_SPECIAL, p->tokens, (int32_t)PAGED_MIN(capacity, INT32_MAX),
                       &p->n_tokens, &err))
        return paged__error(p->cli, "%s", err.message);
    if (p->n_tokens < 2)
        return paged__error(p->cli, "the text has %d token%s; two are the least", p->n_tokens,
                            p->n_tokens == 1 ? "" : "s");
    p->n_ctx = PAGED_MIN(p->options.memory.ctx, p->n_tokens);
    p->n_pieces = p->n_tokens / p->n_ctx;
    return PAGED__EXIT_OK;
}

/* logprobs [n_ctx - 1]: of token i + 1 of the piece */
static void count(perplexity *p, const float *logprobs) {
    const bool is_whole = p->n_ctx == p->n_tokens;
    for (int32_t i = is_whole ? 0 : p->n_ctx / 2; i < p->n_ctx - 1; i++) {
        const double loss = -(double)logprobs[i];
        p->sum += loss;
        p->squares += loss * loss;
        p->n_counted++;
    }
}

static int compute_piece(perplexity *p, int32_t piece) {
    paged_engine *engine = p->session.engine;
    paged_request request;
    paged_output out = {.finish = PAGED_FINISH_NONE};
    paged_error err;
    uint64_t id;
    const float *logprobs;
    const int32_t *top1;
    int32_t n_active, n;
    int32_t *tokens = p->tokens + (ptrdiff_t)piece * p->n_ctx;
    if (p->tokens[0] == paged_token_bos(paged_model_tokenizer(p->session.model))) tokens[0] = p->tokens[0];
    paged_request_init(&request);
    request.tokens = tokens;
    request.n_tokens = p->n_ctx;
    request.max_tokens = 1;
    request.prompt_logprobs = true;
    const int code = paged__session_submit(&p->session, &request, &id);
    if (code != PAGED__EXIT_OK) return code;
    while (out.finish == PAGED_FINISH_NONE) {
        if (paged__interrupt_taken()) return PAGED__EXIT_INTERRUPTED;
        if (paged_engine_step(engine, &n_active, &err)) return paged__error(p->cli, "%s", err.message);
        if (paged_engine_read(engine, id, &out) || out.finish == PAGED_FINISH_ERROR)
            return paged__error(p->cli, "the request failed: %s", paged_status_text(out.error));
        if (!p->options.quiet)
            paged__term_progress(&p->cli->term, "reading the text",
                                 (piece + (double)out.prompt_done / p->n_ctx) / p->n_pieces);
    }
    if (paged_engine_prompt_logprobs(engine, id, &logprobs, &top1, &n))
        return paged__error(p->cli, "the request failed: %s", paged_finish_name(out.finish));
    count(p, logprobs);
    paged_engine_release(engine, id);
    return PAGED__EXIT_OK;
}

static int report(perplexity *p) {
    paged__cli *cli = p->cli;
    paged__term_clear(&cli->term);
    const double n = (double)p->n_counted, mean = p->sum / n, value = exp(mean);
    const double variance = fmax(p->squares / n - mean * mean, 0);
    const double error = n > 1 ? value * sqrt(variance / (n - 1)) : 0; /* of the mean, as seen in exp(mean) */
    const char *name = paged__model_name(&p->session.info, p->session.model_path);
    if (!p->options.json) {
        paged__out_printf(cli, "perplexity %.4f ± %.4f over %lld tokens, in %d piece%s of %d\n", value, error,
                          (long long)p->n_counted, p->n_pieces, p->n_pieces == 1 ? "" : "s", p->n_ctx);
        return PAGED__EXIT_OK;
    }
    paged_engine_info info;
    paged_engine_get_info(p->session.engine, &info);
    return paged__out_json(cli,
                           json_pack("{s:f, s:f, s:f, s:I, s:i, s:i, s:s, s:o}", "perplexity", value, "error",
                                     error, "mean_logprob", -mean, "tokens", (json_int_t)p->n_counted,
                                     "pieces", (int)p->n_pieces, "context", (int)p->n_ctx, "kv_type",
                                     paged__type_name(info.kv_type), "model",
                                     paged__json_text(name, strlen(name))),
                           true);
}

static int run_all(perplexity *p) {
    perplexity_options *o = &p->options;
    int code = paged__text_take(p->cli, NULL, o->file, &p->text);
    if (code == PAGED__EXIT_OK)
        code = paged__session_load(&p->session, p->cli, o->model, (paged_linear)o->memory.linear);
    if (code != PAGED__EXIT_OK) return code;
    /* The token that the engine generates behind a piece has no slot. */
    if (o->memory.ctx == 0) o->memory.ctx = PAGED_MIN((int32_t)CTX_DEFAULT, p->session.info.n_ctx_train);
    code = tokenize(p);
    if (code == PAGED__EXIT_OK) code = paged__session_start(&p->session, &o->memory, 1, NULL);
    if (code != PAGED__EXIT_OK) return code;
    const int32_t n_left = p->n_tokens - p->n_pieces * p->n_ctx;
    if (n_left)
        paged__note(p->cli, "the last %d of %d tokens are no whole piece and left out", n_left, p->n_tokens);
    paged__interrupt_keep(true);
    for (int32_t i = 0; i < p->n_pieces && code == PAGED__EXIT_OK; i++) code = compute_piece(p, i);
    return code == PAGED__EXIT_OK ? report(p) : code;
}

static int perplexity_command(paged__cli *cli, int argc, char **argv) {
    perplexity p = {.cli = cli, .options = {.memory = PAGED__MEMORY_DEFAULTS}};
    int code;
    if (!paged__args_parse(cli, &paged__command_perplexity, argc, argv, &p.options, &code)) return code;
    if (!p.options.file) return paged__usage_error(cli, "no text: give FILE, or '-' for standard input");
    cli->quiet = p.options.quiet;
    paged__log_to_stderr(cli, cli->quiet ? PAGED_LOG_ERROR : PAGED_LOG_WARN);
    paged__interrupt_catch(cli);
    code = run_all(&p);
    paged__session_close(&p.session);
    paged__buffer_free(&p.text);
    paged__free(p.tokens);
    return code;
}

const paged__command paged__command_perplexity = {
    .name = "perplexity",
    .purpose = "measure how well a model predicts a text",
    .usage = "FILE --model MODEL [options]",
    .example = "paged perplexity text.txt --model model.gguf",
    .options = options_table,
    .n_options = sizeof options_table / sizeof options_table[0],
    .run = perplexity_command,
};
