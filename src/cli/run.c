/* cli/run.c: paged run: one prompt in, text out as it comes.
 *
 * The way: options -> model -> prompt as tokens -> engine -> steps, each of which gives new text -> JSON or
 * statistics. Everything that a run holds lies in struct run and is freed by close_run(), whatever went
 * wrong.
 */
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "cli/cli.h"
#include "cli/plan.h"
#include "paged/engine.h"
#include "paged/model.h"

typedef struct run_options {
    const char *model, *prompt, *file, *system;
    bool raw, ignore_eos, json, stats, quiet;
    int32_t max_tokens, top_k, ctx, block_size, n_threads, chunk, kv_type, log_level;
    float temperature, top_p;
    uint64_t seed;
    size_t pool_bytes;
} run_options;

static const char *const kv_types[] = {"f16", "f32", "bf16", NULL}; /* index: paged_type */
static const char *const log_levels[] = {"error", "warn", "info", "debug", NULL};

#define AT(field) offsetof(run_options, field)
static const paged__option options_table[] = {
    {.kind = PAGED__OPTION_HEADING, .name = "What to run"},
    {PAGED__OPTION_TEXT, 'm', "model", "FILE", AT(model), 0, 0, NULL,
     "the model, a GGUF file (default: $PAGED_MODEL)"},
    {PAGED__OPTION_TEXT, 'p', "prompt", "TEXT", AT(prompt), 0, 0, NULL, "the prompt"},
    {PAGED__OPTION_TEXT, 'f', "file", "FILE", AT(file), 0, 0, NULL,
     "the prompt from a file, '-' for stdin; all its bytes"},
    {PAGED__OPTION_TEXT, 0, "system", "TEXT", AT(system), 0, 0, NULL,
     "system message before the prompt (default: the template's)"},
    {PAGED__OPTION_FLAG, 0, "raw", NULL, AT(raw), 0, 0, NULL,
     "no chat template: the prompt is continued as it is; text such\nas <|im_end|> becomes its control "
     "token"},
    {.kind = PAGED__OPTION_HEADING, .name = "Generation"},
    {PAGED__OPTION_INT, 'n', "max-tokens", "N", AT(max_tokens), 1, INT32_MAX, NULL,
     "tokens to generate at most (default: until the model ends or\nthe context is full)"},
    {PAGED__OPTION_REAL, 0, "temperature", "T", AT(temperature), 0, 1e9, NULL,
     "0: always the most likely token, so every run gives the same\ntext (default: 0)"},
    {PAGED__OPTION_INT, 0, "top-k", "K", AT(top_k), -1, INT32_MAX, NULL,
     "sample from the K most likely tokens (default: 0, off)"},
    {PAGED__OPTION_REAL, 0, "top-p", "P", AT(top_p), 0, 1, NULL,
     "sample from the most likely tokens that sum to P; 0 is greedy\n(default: 1, off)"},
    {PAGED__OPTION_SEED, 0, "seed", "S", AT(seed), 0, 0, NULL, "same seed, same text (default: 0)"},
    {PAGED__OPTION_FLAG, 0, "ignore-eos", NULL, AT(ignore_eos), 0, 0, NULL,
     "go on after tokens that end a generation"},
    {.kind = PAGED__OPTION_HEADING, .name = "Memory and threads"},
    {PAGED__OPTION_INT, 0, "ctx", "N", AT(ctx), 1, INT32_MAX, NULL,
     "tokens of prompt and answer at most (default: the model's)"},
    {PAGED__OPTION_BYTES, 0, "pool-bytes", "N", AT(pool_bytes), 0, 0, NULL,
     "bytes of the KV pool: 64M, 1GiB (default: what the context needs)"},
    {PAGED__OPTION_CHOICE, 0, "kv-type", "TYPE", AT(kv_type), 0, 0, kv_types,
     "f16, f32 or bf16 (default: f16)"},
    {PAGED__OPTION_INT, 0, "block-size", "N", AT(block_size), 1, 1024, NULL,
     "tokens of a block (default: 16); multiples of 16 are faster,\nthey take the packed layout"},
    {PAGED__OPTION_INT, 0, "threads", "N", AT(n_threads), 1, 256, NULL,
     "threads (default: the cores that this process may use)"},
    {PAGED__OPTION_INT, 0, "chunk", "N", AT(chunk), 1, 65536, NULL,
     "prompt tokens computed in one step at most (default: 512)"},
    {.kind = PAGED__OPTION_HEADING, .name = "Output"},
    {PAGED__OPTION_FLAG, 0, "json", NULL, AT(json), 0, 0, NULL,
     "one JSON object at the end instead of text as it comes"},
    {PAGED__OPTION_FLAG, 0, "stats", NULL, AT(stats), 0, 0, NULL,
     "tokens, speeds and memory on stderr at the end"},
    {PAGED__OPTION_FLAG, 'q', "quiet", NULL, AT(quiet), 0, 0, NULL,
     "no memory plan, no notes, no progress bar"},
    {PAGED__OPTION_CHOICE, 0, "log-level", "LEVEL", AT(log_level), 0, 0, log_levels,
     "error, warn, info or debug (default: warn; with --quiet error)"},
};
#undef AT

typedef struct run {
    paged__cli *cli;
    run_options options;
    const char *model_path;
    paged_model *model;
    paged_model_info info;
    paged_engine *engine;
    uint64_t id;
    paged__buffer prompt_text;
    int32_t *prompt; /* [n_prompt], owned */
    int32_t n_prompt;
    paged__buffer text;   /* generated; with --json only */
    paged__buffer tokens; /* int32_t, generated; with --json only */
    bool ends_in_newline, has_text;
    paged_output end; /* the last one read; its pointers are not used */
    double load_ms;
} run;

/* ---- Ctrl-C ----
 *
 * A signal handler can know nothing but static objects. interrupt_engine is NULL except while there is a
 * request to cancel. */

static _Atomic(paged_engine *) interrupt_engine;
static _Atomic(uint64_t) interrupt_id;
static _Atomic(paged__term *) interrupt_term;
static atomic_bool interrupted;

static void on_interrupt(int signal_number) {
    (void)signal_number;
    paged_engine *engine = atomic_load(&interrupt_engine);
    if (!engine || atomic_exchange(&interrupted, true)) {
        paged__term *term = atomic_load(&interrupt_term);
        if (term) paged__term_clear(term);
        _exit(PAGED__EXIT_INTERRUPTED);
    }
    paged_engine_cancel(engine, atomic_load(&interrupt_id));
}

static void catch_interrupt(run *r) {
    struct sigaction action = {.sa_handler = on_interrupt, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    atomic_store(&interrupt_term, &r->cli->term);
    sigaction(SIGINT, &action, NULL);
}

/* ---- the prompt ---- */

static int check_options(run *r) {
    const run_options *o = &r->options;
    if (!o->prompt && !o->file) {
        return paged__usage_error(r->cli,
                                  "no prompt: give --prompt TEXT, or --file FILE ('-' for standard input)");
    }
    if (o->prompt && o->file) return paged__usage_error(r->cli, "give --prompt or --file, not both");
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

    /* A token stands for one byte at least, and what the template adds is a part of it. */
    size_t capacity = text->len + strlen(r->info.chat_template) + 1024;
    if (r->options.system) capacity += strlen(r->options.system);
    r->prompt = paged__alloc(capacity, sizeof *r->prompt);
    if (!r->prompt) return paged__error(r->cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
    paged_error err;
    paged_status status = paged_chat_tokenize(r->model, messages, n_messages, true, r->prompt,
                                              (int32_t)capacity, &r->n_prompt, NULL, 0, &err);
    if (status == PAGED_ERR_UNSUPPORTED)
        return paged__error(r->cli, "%s; --raw runs without the template", err.message);
    if (status != PAGED_OK) return paged__error(r->cli, "%s", err.message);
    return PAGED__EXIT_OK;
}

static int raw_prompt(run *r) {
    size_t len = r->prompt_text.len;
    r->prompt = paged__alloc(len + 8, sizeof *r->prompt);
    if (!r->prompt) return paged__error(r->cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
    paged_error err;
    paged_status status = paged_tokenize(paged_model_tokenizer(r->model), r->prompt_text.data, len,
                                         PAGED_TOKENIZE_SPECIAL | PAGED_TOKENIZE_CONTROL, r->prompt,
                                         (int32_t)(len + 8), &r->n_prompt, &err);
    if (status != PAGED_OK) return paged__error(r->cli, "%s", err.message);
    if (r->n_prompt == 0) return paged__error(r->cli, "the prompt is empty: there is nothing to continue");
    return PAGED__EXIT_OK;
}

static int make_prompt(run *r) {
    const run_options *o = &r->options;
    if (o->raw) return raw_prompt(r);
    if (r->info.chat_template) return chat_prompt(r);
    if (o->system)
        return paged__error(r->cli, "this model has no chat template, so it takes no --system message");
    paged__note(r->cli, "this model has no chat template; the prompt is continued as it is, as with --raw");
    return raw_prompt(r);
}

/* ---- model and engine ---- */

static void on_load(void *user, float fraction) {
    paged__term_progress(user, "loading", (double)fraction);
}

static int load(run *r) {
    bool bar = !r->options.quiet;
    paged_model_config config = {
        .struct_size = sizeof config, .progress = bar ? on_load : NULL, .progress_user = &r->cli->term};
    paged_error err;
    paged_status status = paged_model_load(r->model_path, &config, &r->model, &err);
    if (status != PAGED_OK) return paged__error(r->cli, "%s", err.message);
    paged_model_get_info(r->model, &r->info);
    return PAGED__EXIT_OK;
}

static int create_engine(run *r) {
    const run_options *o = &r->options;
    paged_engine_config config = {.struct_size = sizeof config,
                                  .n_ctx = o->ctx,
                                  .pool_bytes = o->pool_bytes,
                                  .block_size = o->block_size,
                                  .kv_type = (paged_type)o->kv_type,
                                  .kv_plain = o->block_size % PAGED_TILE != 0,
                                  .chunk_tokens = o->chunk,
                                  .n_threads = o->n_threads};
    paged_error err;
    paged_status status = paged_engine_create(r->model, &config, &r->engine, &err);
    if (status == PAGED_OK) return PAGED__EXIT_OK;
    const char *advice = status == PAGED_ERR_TOO_LONG    ? "; lower --ctx"
                         : status == PAGED_ERR_NO_BLOCKS ? "; raise --pool-bytes"
                         : status == PAGED_ERR_NO_MEMORY ? "; lower --ctx or --pool-bytes"
                                                         : "";
    return paged__error(r->cli, "%s%s", err.message, advice);
}

static int submit(run *r) {
    const run_options *o = &r->options;
    paged_request request;
    paged_request_init(&request);
    request.tokens = r->prompt;
    request.n_tokens = r->n_prompt;
    request.max_tokens = o->max_tokens;
    request.temperature = o->temperature;
    request.top_k = o->top_k;
    request.top_p = o->top_p;
    request.seed = o->seed;
    request.ignore_eos = o->ignore_eos;
    paged_error err;
    paged_status status = paged_engine_submit(r->engine, &request, &r->id, &err);
    if (status != PAGED_OK) {
        paged_engine_info info;
        paged_engine_get_info(r->engine, &info);
        const char *advice = status != PAGED_ERR_TOO_LONG ? ""
                             : info.n_ctx < r->info.n_ctx_train
                                 ? "; shorten it, or raise --ctx or --pool-bytes"
                                 : "; shorten it";
        return paged__error(r->cli, "%s%s", err.message, advice);
    }
    atomic_store(&interrupt_id, r->id);
    atomic_store(&interrupt_engine, r->engine);
    return PAGED__EXIT_OK;
}

/* ---- steps ---- */

static int take_output(run *r, const paged_output *out) {
    paged__cli *cli = r->cli;
    if (r->options.json) {
        if (!paged__buffer_append(&r->text, out->text, out->text_len) ||
            !paged__buffer_append(&r->tokens, out->tokens, (size_t)out->n_tokens * sizeof *out->tokens)) {
            return paged__error(cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
        }
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
        paged_status status = paged_engine_step(r->engine, &n_active, &err);
        if (status != PAGED_OK) return paged__error(r->cli, "%s", err.message);
        status = paged_engine_read(r->engine, r->id, out);
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

/* ---- what was measured ---- */

static double per_second(int32_t n_tokens, double ms) {
    return n_tokens > 0 && ms > 0 ? n_tokens * 1000.0 / ms : 0;
}

static double prefill_speed(const paged_output *out) {
    return per_second(out->prompt_done - out->cached_tokens, out->prefill_ms);
}

/* The first token comes out of the prefill; decoding makes the others and, unseen, the one that ends the
 * text. */
static double decode_speed(const paged_output *out) {
    return per_second(out->completion_tokens - 1 + (out->finish == PAGED_FINISH_STOP), out->decode_ms);
}

static int print_json(run *r) {
    const paged_output *out = &r->end;
    paged_engine_info info;
    paged_engine_get_info(r->engine, &info);
    const int32_t *ids = (const int32_t *)(const void *)r->tokens.data;
    const char *name = paged__model_name(&r->info, r->model_path);
    json_t *tokens = json_array();
    for (size_t i = 0; i < r->tokens.len / sizeof *ids; i++)
        json_array_append_new(tokens, json_integer(ids[i]));
    json_t *timings =
        json_pack("{s:f, s:f, s:f, s:f, s:f, s:f}", "load_ms", r->load_ms, "queue_ms", out->queue_ms,
                  "prefill_ms", out->prefill_ms, "decode_ms", out->decode_ms, "prefill_tokens_per_s",
                  prefill_speed(out), "decode_tokens_per_s", decode_speed(out));
    json_t *object = json_pack(
        "{s:o, s:o, s:i, s:i, s:i, s:s, s:s, s:i, s:o, s:o, s:s, s:i, s:I}", "text",
        paged__json_text(r->text.data ? r->text.data : "", r->text.len), "tokens", tokens, "prompt_tokens",
        (int)out->prompt_tokens, "completion_tokens", (int)out->completion_tokens, "cached_tokens",
        (int)out->cached_tokens, "cache_miss", paged_miss_name(out->miss), "finish_reason",
        paged_finish_name(out->finish), "blocks_used", (int)out->blocks_used, "timings", timings, "model",
        paged__json_text(name, strlen(name)), "kv_type", paged__type_name(info.kv_type), "block_size",
        (int)info.block_size, "seed", (json_int_t)r->options.seed);
    return paged__out_json(r->cli, object, true);
}

static void print_stats(run *r) {
    const paged_output *out = &r->end;
    paged_engine_info info;
    paged_cache_stats cache;
    paged_engine_get_info(r->engine, &info);
    paged_engine_get_cache_stats(r->engine, &cache);
    size_t used = (size_t)out->blocks_used * cache.block_bytes;
    paged__term_clear(&r->cli->term);
    fprintf(stderr, "load        %.3f s\n", r->load_ms / 1000);
    fprintf(stderr, "prompt      %d tokens in %.3f s, %.1f tokens/s, %d from the cache (%s)\n",
            out->prompt_tokens, out->prefill_ms / 1000, prefill_speed(out), out->cached_tokens,
            paged_miss_name(out->miss));
    fprintf(stderr, "completion  %d tokens in %.3f s, %.1f tokens/s, ended by %s\n", out->completion_tokens,
            out->decode_ms / 1000, decode_speed(out), paged_finish_name(out->finish));
    fprintf(stderr, "KV cache    %d of %d blocks of %d tokens, %s of %s\n", out->blocks_used, info.n_blocks,
            info.block_size, paged__size(used).text, paged__size(info.pool_bytes).text);
    fprintf(stderr, "attention   %s kernels, %s %s\n", info.attn_kernels, paged__layout_name(info.kv_layout),
            paged__type_name(info.kv_type));
    fprintf(stderr, "same bits   %s (%s)\n", info.deterministic ? "yes" : "no", info.determinism);
}

/* ---- all of it ---- */

static int run_all(run *r) {
    int code = paged__text_take(r->cli, r->options.prompt, r->options.file, &r->prompt_text);
    uint64_t start = paged__now_ns();
    if (code == PAGED__EXIT_OK) code = load(r);
    if (code == PAGED__EXIT_OK) code = make_prompt(r);
    if (code == PAGED__EXIT_OK) code = create_engine(r);
    if (code != PAGED__EXIT_OK) return code;
    r->load_ms = (double)(paged__now_ns() - start) / 1e6;

    if (!r->options.json) {
        paged_engine_info info;
        paged_engine_get_info(r->engine, &info);
        paged__plan_note(r->cli, &r->info, &info, r->model_path);
        if (info.n_ctx < r->options.ctx) {
            paged__note(r->cli, "the pool holds %d tokens, so the context is not the %d of --ctx", info.n_ctx,
                        r->options.ctx);
        }
    }
    code = submit(r);
    if (code == PAGED__EXIT_OK) code = generate(r);
    if (code != PAGED__EXIT_OK && code != PAGED__EXIT_INTERRUPTED) return code;
    if (r->options.json) {
        int json_code = print_json(r);
        if (json_code != PAGED__EXIT_OK) return json_code;
    }
    if (r->options.stats) print_stats(r);
    return code;
}

static void close_run(run *r) {
    /* From here on Ctrl-C has nothing to cancel and ends the process. */
    atomic_store(&interrupt_engine, NULL);
    paged__term_clear(&r->cli->term);
    paged_engine_free(r->engine);
    paged_model_free(r->model);
    paged__free(r->prompt);
    paged__buffer_free(&r->prompt_text);
    paged__buffer_free(&r->text);
    paged__buffer_free(&r->tokens);
}

static int run_command(paged__cli *cli, int argc, char **argv) {
    run r = {.cli = cli, .options = {.block_size = 16, .top_p = 1, .log_level = -1}};
    run_options *o = &r.options;
    int code;
    if (!paged__args_parse(cli, &paged__command_run, argc, argv, o, &code)) return code;
    code = check_options(&r);
    if (code != PAGED__EXIT_OK) return code;
    r.model_path = paged__args_model(cli, o->model, "--model FILE");
    if (!r.model_path) return PAGED__EXIT_USAGE;
    cli->quiet = o->quiet;
    if (o->log_level < 0) o->log_level = o->quiet ? PAGED_LOG_ERROR : PAGED_LOG_WARN;
    paged__log_to_stderr(cli, (paged_log_level)o->log_level);
    catch_interrupt(&r);
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
