/* cli/run.c: paged run: one prompt in, text out as it comes.
 *
 * The way: options -> model -> prompt as tokens -> engine -> steps, each of which gives new text -> JSON or
 * statistics. Everything that a run holds lies in struct run and is freed by close_run(), whatever went
 * wrong.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "cli/cli.h"
#include "cli/plan.h"
#include "cli/session.h"

typedef struct run_options {
    const char *model, *prompt, *file, *system, *session_file;
    bool raw, json, stats, quiet;
    int32_t log_level, keep_sink;
    paged__sampling_options sampling;
    paged__memory_options memory;
    paged__places_options places;
} run_options;

#define AT(field) offsetof(run_options, field)
static const paged__option options_table[] = {
    {.kind = PAGED__OPTION_HEADING, .name = "What to run"},
    PAGED__MODEL_ROW(run_options, model),
    {PAGED__OPTION_TEXT, 'p', "prompt", "TEXT", AT(prompt), 0, 0, NULL, "the prompt"},
    {PAGED__OPTION_TEXT, 'f', "file", "FILE", AT(file), 0, 0, NULL,
     "the prompt from a file, '-' for stdin; all its bytes"},
    {PAGED__OPTION_TEXT, 0, "system", "TEXT", AT(system), 0, 0, NULL,
     "system message before the prompt (default: the template's)"},
    {PAGED__OPTION_FLAG, 0, "raw", NULL, AT(raw), 0, 0, NULL,
     "no chat template: the prompt is continued as it is; text such\nas <|im_end|> becomes its control "
     "token"},
    {.kind = PAGED__OPTION_HEADING, .name = "Generation"},
    PAGED__SAMPLING_ROWS(run_options, sampling),
    {PAGED__OPTION_INT, 0, "keep-sink", "N", AT(keep_sink), 1, INT32_MAX, NULL,
     "when the context is full, keep its first N tokens, drop the older\nhalf of the others and go on, up "
     "to --max-tokens; an\napproximation (default: a full context ends the text)"},
    {.kind = PAGED__OPTION_HEADING, .name = "Memory and threads"},
    PAGED__MEMORY_ROWS(run_options, memory),
    {.kind = PAGED__OPTION_HEADING, .name = "What outlives this process"},
    {PAGED__OPTION_TEXT, 0, "session", "FILE", AT(session_file), 0, 0, NULL,
     "take keys and values from this file if it is there, and leave\nthose of prompt and answer in it"},
    PAGED__PLACES_ROWS(run_options, places),
    {.kind = PAGED__OPTION_HEADING, .name = "Output"},
    {PAGED__OPTION_FLAG, 0, "json", NULL, AT(json), 0, 0, NULL,
     "one JSON object at the end instead of text as it comes"},
    {PAGED__OPTION_FLAG, 0, "stats", NULL, AT(stats), 0, 0, NULL,
     "tokens, speeds and memory on stderr at the end"},
    {PAGED__OPTION_FLAG, 'q', "quiet", NULL, AT(quiet), 0, 0, NULL,
     "no memory plan, no notes, no progress bar"},
    {PAGED__OPTION_CHOICE, 0, "log-level", "LEVEL", AT(log_level), 0, 0, paged__log_levels,
     "error, warn, info or debug (default: warn; with --quiet error)"},
};
#undef AT

typedef struct run {
    paged__cli *cli;
    run_options options;
    paged__session session;
    uint64_t id;
    paged__buffer prompt_text;
    int32_t *prompt; /* [n_prompt], owned */
    int32_t n_prompt;
    paged__buffer text;   /* generated; with --json only */
    paged__buffer tokens; /* int32_t, generated; with --json or --session only */
    bool ends_in_newline, has_text;
    paged_output end; /* the last one read; its pointers are not used */
} run;

/* ---- the prompt ---- */

static int check_options(run *r) {
    const run_options *o = &r->options;
    if (!o->prompt && !o->file) {
        return paged__usage_error(r->cli,
                                  "no prompt: give --prompt TEXT, or --file FILE ('-' for standard input)");
    }
    if (o->prompt && o->file) return paged__usage_error(r->cli, "give --prompt or --file, not both");
    if (o->keep_sink && o->sampling.max_tokens == 0)
        return paged__usage_error(r->cli, "--keep-sink outlives the context, so it asks for --max-tokens");
    if (o->raw && o->system)
        return paged__usage_error(r->cli, "--system needs the chat template, which --raw leaves out");
    return PAGED__EXIT_OK;
}

static int chat_prompt(run *r) {
    const paged__buffer *text = &r->prompt_text;
    paged_message messages[2];
    int32_t n_messages = 0;
    const char *nul = memchr(text->data, 0, text->len);
    if (nul) {
        return paged__error(
            r->cli, "the prompt has a NUL byte at offset %td, which a chat message cannot hold; use --raw",
            nul - text->data);
    }
    if (r->options.system) messages[n_messages++] = (paged_message){"system", r->options.system};
    messages[n_messages++] = (paged_message){"user", text->data};

    return paged__session_chat(&r->session, messages, n_messages, &r->prompt, &r->n_prompt);
}

static int raw_prompt(run *r) {
    size_t len = r->prompt_text.len;
    r->prompt = paged__alloc(len + 8, sizeof *r->prompt);
    if (!r->prompt) return paged__error(r->cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
    paged_error err;
    paged_status status = paged_tokenize(paged_model_tokenizer(r->session.model), r->prompt_text.data, len,
                                         PAGED_TOKENIZE_SPECIAL | PAGED_TOKENIZE_CONTROL, r->prompt,
                                         (int32_t)(len + 8), &r->n_prompt, &err);
    if (status != PAGED_OK) return paged__error(r->cli, "%s", err.message);
    if (r->n_prompt == 0) return paged__error(r->cli, "the prompt is empty: there is nothing to continue");
    return PAGED__EXIT_OK;
}

static int make_prompt(run *r) {
    const run_options *o = &r->options;
    if (o->raw) return raw_prompt(r);
    if (r->session.info.chat_template) return chat_prompt(r);
    if (o->system)
        return paged__error(r->cli, "this model has no chat template, so it takes no --system message");
    paged__note(r->cli, "this model has no chat template; the prompt is continued as it is, as with --raw");
    return raw_prompt(r);
}

static int submit(run *r) {
    paged_request request;
    paged__session_request(&r->options.sampling, &request);
    request.tokens = r->prompt;
    request.n_tokens = r->n_prompt;
    request.keep_sink = r->options.keep_sink;
    const int code = paged__session_submit(&r->session, &request, &r->id);
    if (code == PAGED__EXIT_OK) paged__interrupt_watch(r->session.engine, r->id);
    return code;
}

/* ---- steps ---- */

static int take_output(run *r, const paged_output *out) {
    paged__cli *cli = r->cli;
    const bool keeps = r->options.json || r->options.session_file;
    if (keeps && !paged__buffer_append(&r->tokens, out->tokens, (size_t)out->n_tokens * sizeof *out->tokens))
        return paged__error(cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
    if (r->options.json) {
        if (!paged__buffer_append(&r->text, out->text, out->text_len))
            return paged__error(cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
        return PAGED__EXIT_OK;
    }
    if (out->text_len == 0) return PAGED__EXIT_OK;
    paged__term_clear(&cli->term);
    r->has_text = true;
    r->ends_in_newline = out->text[out->text_len - 1] == '\n';
    paged__out_write(cli, out->text, out->text_len);
    return paged__out_flush(cli) ? PAGED__EXIT_OK : PAGED__EXIT_ERROR; /* told by paged__out_end() */
}

static int generate(run *r) {
    for (;;) {
        paged_error err;
        int32_t n_active;
        paged_output *out = &r->end;
        paged_status status = paged_engine_step(r->session.engine, &n_active, &err);
        if (status != PAGED_OK) return paged__error(r->cli, "%s", err.message);
        status = paged_engine_read(r->session.engine, r->id, out);
        if (status != PAGED_OK) return paged__error(r->cli, "%s", paged_status_text(status));
        if (out->prompt_done < out->prompt_tokens && !r->options.quiet) {
            paged__term_progress(&r->cli->term, "reading the prompt",
                                 (double)out->prompt_done / out->prompt_tokens);
        } else {
            paged__term_clear(&r->cli->term);
        }
        int code = take_output(r, out);
        if (code != PAGED__EXIT_OK) return code;
        if (out->finish == PAGED_FINISH_ERROR)
            return paged__error(r->cli, "the request failed: %s", paged_status_text(out->error));
        if (out->finish != PAGED_FINISH_NONE) break;
        if (n_active == 0) return paged__error(r->cli, "the engine has lost the request");
    }
    if (r->has_text && !r->ends_in_newline && isatty(STDOUT_FILENO)) paged__out_write(r->cli, "\n", 1);
    paged__out_flush(r->cli);
    return r->end.finish == PAGED_FINISH_CANCELLED ? PAGED__EXIT_INTERRUPTED : PAGED__EXIT_OK;
}

/* ---- the session file ---- */

static int load_session(run *r) {
    paged_saved saved;
    paged_error err;
    if (!r->options.session_file) return PAGED__EXIT_OK;
    const paged_status status =
        paged_engine_load(r->session.engine, NULL, AT_FDCWD, r->options.session_file, NULL, &saved, &err);
    if (status == PAGED_ERR_NOT_FOUND) return PAGED__EXIT_OK; /* the first run makes it */
    if (status != PAGED_OK) return paged__error(r->cli, "%s", err.message);
    return PAGED__EXIT_OK;
}

/* Prompt and answer. An answer that was interrupted is kept as far as it got. */
static int save_session(run *r) {
    const size_t n_made = r->tokens.len / sizeof(int32_t), n = (size_t)r->n_prompt + n_made;
    paged_saved saved;
    paged_error err;
    if (!r->options.session_file) return PAGED__EXIT_OK;
    int32_t *tokens = paged__alloc(n, sizeof *tokens);
    if (!tokens) return paged__error(r->cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
    memcpy(tokens, r->prompt, (size_t)r->n_prompt * sizeof *tokens);
    if (n_made) memcpy(tokens + r->n_prompt, r->tokens.data, n_made * sizeof *tokens);
    const paged_status status = paged_engine_save(r->session.engine, tokens, (int32_t)n, NULL, AT_FDCWD,
                                                  r->options.session_file, &saved, &err);
    paged__free(tokens);
    return status == PAGED_OK ? PAGED__EXIT_OK : paged__error(r->cli, "%s", err.message);
}

/* ---- what was measured ---- */

static int print_json(run *r) {
    const paged_output *out = &r->end;
    paged_engine_info info;
    paged_engine_get_info(r->session.engine, &info);
    const int32_t *ids = (const int32_t *)(const void *)r->tokens.data;
    const char *name = paged__model_name(&r->session.info, r->session.model_path);
    json_t *tokens = json_array();
    for (size_t i = 0; i < r->tokens.len / sizeof *ids; i++)
        json_array_append_new(tokens, json_integer(ids[i]));
    json_t *timings =
        json_pack("{s:f, s:f, s:f, s:f, s:f, s:f}", "load_ms", r->session.load_ms, "queue_ms", out->queue_ms,
                  "prefill_ms", out->prefill_ms, "decode_ms", out->decode_ms, "prefill_tokens_per_s",
                  paged__prefill_speed(out), "decode_tokens_per_s", paged__decode_speed(out));
    json_t *object = json_pack(
        "{s:o, s:o, s:i, s:i, s:i, s:i, s:s, s:s, s:i, s:o, s:o, s:o, s:s, s:i, s:I}", "text",
        paged__json_text(r->text.data ? r->text.data : "", r->text.len), "tokens", tokens, "prompt_tokens",
        (int)out->prompt_tokens, "completion_tokens", (int)out->completion_tokens, "cached_tokens",
        (int)out->cached_tokens, "dropped_tokens", (int)out->n_dropped, "cache_miss",
        paged_miss_name(out->miss), "finish_reason", paged_finish_name(out->finish), "blocks_used",
        (int)out->blocks_used, "timings", timings, "engine", paged__session_counters(&r->session), "model",
        paged__json_text(name, strlen(name)), "kv_type", paged__type_name(info.kv_type), "block_size",
        (int)info.block_size, "seed", (json_int_t)r->options.sampling.seed);
    return paged__out_json(r->cli, object, true);
}

static void print_device(const run *r) {
    paged_cl_device device;
    paged_cl_stats s;
    if (!paged_engine_get_device(r->session.engine, &device, &s)) return;
    fprintf(stderr, "device      %s, driver %s\n", device.name, device.driver);
    fprintf(stderr, "            pool %s, tables %s, io %s, states %s; %llu kernels, KV read back %s\n",
            paged__size(s.pool_bytes).text, paged__size(s.table_bytes).text, paged__size(s.io_bytes).text,
            paged__size(s.state_bytes).text, (unsigned long long)s.n_kernels,
            paged__size(s.block_read_bytes).text);
}

static void print_stats(run *r) {
    const paged_output *out = &r->end;
    paged_engine_info info;
    paged_cache_stats cache;
    paged_engine_get_info(r->session.engine, &info);
    paged_engine_get_cache_stats(r->session.engine, &cache);
    size_t used = (size_t)out->blocks_used * cache.block_bytes;
    paged__term_clear(&r->cli->term);
    fprintf(stderr, "load        %.3f s, %.3f s of them the model\n", r->session.load_ms / 1000,
            r->session.info.load_ms / 1000);
    fprintf(stderr, "prompt      %d tokens in %.3f s, %.1f tokens/s, %d from the cache (%s)\n",
            out->prompt_tokens, out->prefill_ms / 1000, paged__prefill_speed(out), out->cached_tokens,
            paged_miss_name(out->miss));
    fprintf(stderr, "completion  %d tokens in %.3f s, %.1f tokens/s, ended by %s\n", out->completion_tokens,
            out->decode_ms / 1000, paged__decode_speed(out), paged_finish_name(out->finish));
    if (out->n_dropped)
        fprintf(stderr, "dropped     %d tokens of prompt and text, by --keep-sink\n", out->n_dropped);
    fprintf(stderr, "KV cache    %d of %d blocks of %d tokens, %s of %s\n", out->blocks_used, info.n_blocks,
            info.block_size, paged__size(used).text, paged__size(info.pool_bytes).text);
    paged__session_print_stats(&r->session);
    fprintf(stderr, "attention   %s kernels, %s %s\n", info.attn_kernels, paged__layout_name(info.kv_layout),
            paged__type_name(info.kv_type));
    print_device(r);
    fprintf(stderr, "linear      %s\n", info.linear_kernels);
    fprintf(stderr, "same bits   %s (%s)\n", info.deterministic ? "yes" : "no", info.determinism);
}

/* ---- all of it ---- */

static int run_all(run *r) {
    int code = paged__text_take(r->cli, r->options.prompt, r->options.file, &r->prompt_text);
    if (code == PAGED__EXIT_OK)
        code = paged__session_load(&r->session, r->cli, r->options.model,
                                   (paged_linear)r->options.memory.linear);
    if (code == PAGED__EXIT_OK) code = make_prompt(r);
    if (code == PAGED__EXIT_OK)
        code = paged__session_start(&r->session, &r->options.memory, 1, &r->options.places);
    if (code != PAGED__EXIT_OK) return code;

    if (!r->options.json) {
        paged_engine_info info;
        paged_engine_get_info(r->session.engine, &info);
        paged__plan_note(r->cli, &r->session.info, &info, r->session.model_path);
        if (info.n_ctx < r->options.memory.ctx) {
            paged__note(r->cli, "the pool holds %d tokens, so the context is not the %d of --ctx", info.n_ctx,
                        r->options.memory.ctx);
        }
    }
    code = load_session(r);
    if (code == PAGED__EXIT_OK) code = submit(r);
    if (code == PAGED__EXIT_OK) code = generate(r);
    if (code != PAGED__EXIT_OK && code != PAGED__EXIT_INTERRUPTED) return code;
    const int saved = save_session(r);
    if (saved != PAGED__EXIT_OK) return saved;
    if (r->options.json) {
        int json_code = print_json(r);
        if (json_code != PAGED__EXIT_OK) return json_code;
    }
    if (r->options.stats) print_stats(r);
    return code;
}

static void close_run(run *r) {
    paged__session_close(&r->session);
    paged__free(r->prompt);
    paged__buffer_free(&r->prompt_text);
    paged__buffer_free(&r->text);
    paged__buffer_free(&r->tokens);
}

static int run_command(paged__cli *cli, int argc, char **argv) {
    run r = {.cli = cli,
             .options = {.sampling = PAGED__SAMPLING_DEFAULTS,
                         .memory = PAGED__MEMORY_DEFAULTS,
                         .places = PAGED__PLACES_DEFAULTS,
                         .log_level = -1}};
    run_options *o = &r.options;
    int code;
    if (!paged__args_parse(cli, &paged__command_run, argc, argv, o, &code)) return code;
    code = check_options(&r);
    if (code != PAGED__EXIT_OK) return code;
    cli->quiet = o->quiet;
    if (o->log_level < 0) o->log_level = o->quiet ? PAGED_LOG_ERROR : PAGED_LOG_WARN;
    paged__log_to_stderr(cli, (paged_log_level)o->log_level);
    paged__interrupt_catch(cli);
    code = run_all(&r);
    close_run(&r);
    return code;
}

const paged__command paged__command_run = {
    .name = "run",
    .purpose = "answer a prompt with a model",
    .usage = "--model FILE --prompt TEXT [options]",
    .example = "paged run --model model.gguf --prompt \"What is a KV cache?\" --max-tokens 100",
    .options = options_table,
    .n_options = sizeof options_table / sizeof options_table[0],
    .run = run_command,
};
