/* cli/chat.c: paged chat: a conversation in the terminal.
 *
 * A turn: a line -> conversation -> engine -> text as it comes, and its tokens back to the conversation. The
 * whole of it goes to the engine each time; what is cached is taken over, so a turn computes the new message.
 * Lines are edited with libedit where stdin is a terminal, and read as they are elsewhere.
 */
#include <errno.h>
#include <fcntl.h>
#include <histedit.h>
#include <langinfo.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <wchar.h>

#include "base/base.h"
#include "cli/chat_notes.h"
#include "cli/cli.h"
#include "cli/plan.h"
#include "cli/session.h"
#include "paged/conversation.h"

enum { HISTORY_MAX = 1000, KEEP_SINK_TOKENS = 1 << 16 };

typedef struct chat_options {
    const char *model, *system, *id;
    bool resume, list, stats, quiet, no_history, keep_sink;
    int32_t log_level, history;
    paged__sampling_options sampling;
    paged__memory_options memory;
    paged__places_options places;
} chat_options;

#define AT(field) offsetof(chat_options, field)
static const paged__option options_table[] = {
    {.kind = PAGED__OPTION_HEADING, .name = "What to talk to"},
    PAGED__MODEL_ROW(chat_options, model),
    {PAGED__OPTION_TEXT, 0, "system", "TEXT", AT(system), 0, 0, NULL,
     "system message at the start (default: the template's)"},
    {PAGED__OPTION_INT, 0, "history", "N", AT(history), 1, INT32_MAX, NULL,
     "tokens of a conversation at most; its oldest turns go first\n(default: any number; with --keep-sink "
     "3/4 of the context)"},
    {PAGED__OPTION_FLAG, 0, "keep-sink", NULL, AT(keep_sink), 0, 0, NULL,
     "a full context drops its middle instead of ending the answer,\nand the history is cut anywhere: an "
     "approximation"},
    {.kind = PAGED__OPTION_HEADING, .name = "Conversations that are kept, with --store or --redis"},
    {PAGED__OPTION_FLAG, 0, "resume", NULL, AT(resume), 0, 0, NULL,
     "go on with the one that changed last, or with the one of ID"},
    {PAGED__OPTION_OPERAND, 0, "ID", NULL, AT(id), 0, 0, NULL, "of --resume, as --list says"},
    {PAGED__OPTION_FLAG, 0, "list", NULL, AT(list), 0, 0, NULL, "list them and end"},
    {.kind = PAGED__OPTION_HEADING, .name = "Generation"},
    PAGED__SAMPLING_ROWS(chat_options, sampling),
    {.kind = PAGED__OPTION_HEADING, .name = "Memory and threads"},
    PAGED__MEMORY_ROWS(chat_options, memory),
    {.kind = PAGED__OPTION_HEADING, .name = "What outlives this process"},
    PAGED__PLACES_ROWS(chat_options, places),
    {.kind = PAGED__OPTION_HEADING, .name = "Terminal"},
    {PAGED__OPTION_FLAG, 0, "stats", NULL, AT(stats), 0, 0, NULL, "a line of statistics after each answer"},
    {PAGED__OPTION_FLAG, 0, "no-history", NULL, AT(no_history), 0, 0, NULL,
     "keep no file of the lines typed"},
    {PAGED__OPTION_FLAG, 'q', "quiet", NULL, AT(quiet), 0, 0, NULL, "no memory plan, no notes, no bar"},
    {PAGED__OPTION_CHOICE, 0, "log-level", "LEVEL", AT(log_level), 0, 0, paged__log_levels,
     "error, warn, info or debug (default: warn; with --quiet error)"},
};
#undef AT

typedef struct chat {
    paged__session session;
    chat_options options;
    EditLine *edit;  /* NULL: stdin is no terminal */
    int keys;        /* the terminal once more, for reads that do not wait; -1: closed */
    bool line_begun; /* there was something in the line that Ctrl-C ended */
    History *history;
    char *line; /* of getline(); owned */
    size_t line_capacity;
    paged_conversation *talk;
    paged__chat_note note;
    json_t *system;        /* of a conversation that is resumed; options.system is its text */
    paged__buffer message; /* a line with a 0 behind it */
    paged__buffer text;    /* of an answer, as far as it is to be kept */
    paged_output last;     /* of the last answer; its pointers are not used */
    bool answered;
} chat;

static int no_memory(chat *c) {
    return paged__error(c->session.cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
}

/* A new conversation. What can go wrong here went wrong, or not, at the first one, memory aside. */
static int begin(chat *c) {
    const chat_options *o = &c->options;
    paged_conversation_config config = {.struct_size = sizeof config,
                                        .system = o->system,
                                        .max_tokens = o->history,
                                        .mode = o->keep_sink ? PAGED_CONVERSATION_KEEP_SINK
                                                             : PAGED_CONVERSATION_EXACT};
    paged_engine_info info;
    paged_engine_get_info(c->session.engine, &info);
    if (config.max_tokens == 0 && o->keep_sink) config.max_tokens = info.n_ctx - info.n_ctx / 4;
    paged_conversation *fresh;
    paged_error err;
    const paged_status status = paged_conversation_create(c->session.model, &config, &fresh, &err);
    if (status != PAGED_OK) return paged__error(c->session.cli, "%s", err.message);
    paged_conversation_free(c->talk);
    c->talk = fresh;
    c->answered = false;
    return PAGED__EXIT_OK;
}

/* ---- lines ---- */

static char *prompt_text(EditLine *edit) {
    static char text[] = "> ";
    (void)edit;
    return text;
}

/* $XDG_STATE_HOME/paged/history, readable by its owner alone. False: there is no home for it. */
static bool history_path(char *path, size_t capacity) {
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    char folder[4000];
    int n;
    if (state && state[0] == '/')
        n = snprintf(folder, sizeof folder, "%s/paged", state);
    else if (home && home[0] == '/')
        n = snprintf(folder, sizeof folder, "%s/.local/state/paged", home);
    else
        return false;
    if (n < 0 || (size_t)n >= sizeof folder || (size_t)n + 16 > capacity) return false;
    for (char *at = folder + 1; (at = strchr(at, '/')); at++) {
        *at = 0;
        mkdir(folder, 0700); /* most are there; what cannot be made shows when the file is opened */
        *at = '/';
    }
    mkdir(folder, 0700);
    snprintf(path, capacity, "%s/history", folder);
    return true;
}

/* libedit's way to a character: Ctrl-C ends it, bytes that are no UTF-8 are dropped. */
static int read_key(EditLine *edit, wchar_t *key) {
    mbstate_t state = {0};
    chat *c;
    if (el_get(edit, EL_CLIENTDATA, &c) != 0) return -1;
    for (;;) {
        char byte;
        if (!paged__interrupt_wait(c->keys)) {
            const LineInfo *line = el_line(edit);
            c->line_begun = line->lastchar > line->buffer;
            return -1;
        }
        const ssize_t n = read(c->keys, &byte, 1);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue; /* Ctrl-C throws away what was typed */
        if (n <= 0) return (int)n;
        const size_t length = mbrtowc(key, &byte, 1, &state);
        if (length == (size_t)-1) state = (mbstate_t){0};
        if (length <= 1) return 1; /* 0: a NUL, which is a key as well */
    }
}

static void open_editor(chat *c) {
    char path[4096];
    HistEvent event;
    if (!isatty(STDIN_FILENO)) return;
    /* O_NONBLOCK on stdin itself would be the shell's as well. */
    c->keys = open("/dev/stdin", O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (c->keys < 0) return;
    /* libedit knows characters by the locale, and a message is UTF-8 whatever that says. */
    setlocale(LC_CTYPE, "");
    if (strcmp(nl_langinfo(CODESET), "UTF-8") != 0) setlocale(LC_CTYPE, "C.UTF-8");
    c->edit = el_init("paged", stdin, stdout, stderr);
    if (!c->edit) return;
    el_set(c->edit, EL_PROMPT, prompt_text);
    el_set(c->edit, EL_EDITOR, "emacs");
    el_set(c->edit, EL_CLIENTDATA, c);
    el_set(c->edit, EL_GETCFN, read_key);
    c->history = history_init();
    if (!c->history) return;
    history(c->history, &event, H_SETSIZE, HISTORY_MAX);
    history(c->history, &event, H_SETUNIQUE, 1);
    el_set(c->edit, EL_HIST, history, c->history);
    if (!c->options.no_history && history_path(path, sizeof path)) history(c->history, &event, H_LOAD, path);
    el_source(c->edit, NULL); /* the user's .editrc */
}

static void close_editor(chat *c) {
    char path[4096];
    HistEvent event;
    if (c->history && !c->options.no_history && history_path(path, sizeof path)) {
        const int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600); /* so that nobody else reads it */
        if (fd >= 0) close(fd);
        history(c->history, &event, H_SAVE, path);
    }
    if (c->edit) el_end(c->edit);
    if (c->keys >= 0) close(c->keys);
    if (c->history) history_end(c->history);
}

/* A line of the terminal. Ctrl-C gives up the line begun; on an empty one, the second time, it ends the
 * conversation. */
static const char *edit_line(chat *c, ssize_t *len) {
    const char *line = NULL;
    int n = 0;
    paged__interrupt_hold(true);
    for (int on_empty = 0; on_empty < 2;) {
        line = el_gets(c->edit, &n);
        if (line || !paged__interrupt_taken()) break;
        on_empty = c->line_begun ? 0 : on_empty + 1;
        if (on_empty < 2) fputs("\n(Ctrl-C again, Ctrl-D or /quit leaves)\n", stderr);
    }
    paged__interrupt_hold(false);
    *len = line ? n : -1;
    HistEvent event;
    if (line && c->history && n > 1) history(c->history, &event, H_ENTER, line);
    return line;
}

/* The next line without its newline; NULL: there is none. */
static const char *read_line(chat *c, ssize_t *len) {
    const char *line;
    if (c->edit) {
        line = edit_line(c, len);
    } else {
        *len = getline(&c->line, &c->line_capacity, stdin);
        line = *len >= 0 ? c->line : NULL;
    }
    while (line && *len > 0 && (line[*len - 1] == '\n' || line[*len - 1] == '\r')) (*len)--;
    return line;
}

/* ---- an answer ---- */

static void tell_statistics(chat *c) {
    const paged_output *o = &c->last;
    paged_engine_info info;
    paged_cache_stats stats;
    paged_conversation_info talk;
    paged_engine_get_info(c->session.engine, &info);
    paged_engine_get_cache_stats(c->session.engine, &stats);
    paged_conversation_get_info(c->talk, &talk);
    if (!c->answered) {
        fprintf(stderr, "no answer yet; context %d tokens, pool %s\n", info.n_ctx,
                paged__size(info.pool_bytes).text);
        return;
    }
    fprintf(stderr,
            "%d turn%s, %d of %d tokens; %d read (%d from the cache) at %.0f tokens/s, %d written at %.0f "
            "tokens/s; KV cache %s used, %s kept, of %s\n",
            talk.n_turns, talk.n_turns == 1 ? "" : "s", talk.n_tokens, info.n_ctx,
            o->prompt_tokens - o->cached_tokens, o->cached_tokens, paged__prefill_speed(o),
            o->completion_tokens, paged__decode_speed(o), paged__size(stats.used_bytes).text,
            paged__size((size_t)stats.n_cached * stats.block_bytes).text, paged__size(info.pool_bytes).text);
    if (talk.n_dropped_tokens || talk.n_dropped_by_answer)
        fprintf(stderr, "dropped turns: %lld, tokens: %lld, within the last answer: %d\n",
                (long long)talk.n_dropped_turns, (long long)talk.n_dropped_tokens, talk.n_dropped_by_answer);
}

/* Steps until the request ends; the text goes to stdout, the tokens to the conversation. */
static int generate(chat *c, uint64_t id) {
    paged__session *s = &c->session;
    paged_output *out = &c->last;
    for (bool newline = true;;) {
        paged_error err;
        paged_status status = paged_engine_step(s->engine, NULL, &err);
        if (status != PAGED_OK) return paged__error(s->cli, "%s", err.message);
        status = paged_engine_read(s->engine, id, out);
        if (status == PAGED_OK) status = paged_conversation_take(c->talk, out, NULL);
        if (status != PAGED_OK) return paged__error(s->cli, "%s", paged_status_text(status));
        if (out->prompt_done < out->prompt_tokens && !c->options.quiet)
            paged__term_progress(&s->cli->term, "reading", (double)out->prompt_done / out->prompt_tokens);
        if (out->text_len) {
            paged__term_clear(&s->cli->term);
            newline = out->text[out->text_len - 1] == '\n';
            paged__out_write(s->cli, out->text, out->text_len);
            if (c->note.note && !paged__buffer_append(&c->text, out->text, out->text_len))
                return no_memory(c);
            if (!paged__out_flush(s->cli)) return PAGED__EXIT_ERROR; /* told by paged__out_end() */
        }
        if (out->finish == PAGED_FINISH_NONE) continue;
        paged__term_clear(&s->cli->term);
        if (!newline) paged__out_write(s->cli, "\n", 1);
        paged__out_flush(s->cli);
        return PAGED__EXIT_OK;
    }
}

static void tell_end(chat *c) {
    paged_engine_info info;
    paged_engine_get_info(c->session.engine, &info);
    if (c->last.finish == PAGED_FINISH_CANCELLED) fputs("(stopped)\n", stderr);
    if (c->last.finish == PAGED_FINISH_ERROR)
        fprintf(stderr, "(the answer failed: %s)\n", paged_status_text(c->last.error));
    if (c->last.finish == PAGED_FINISH_LENGTH &&
        c->last.prompt_tokens + c->last.completion_tokens >= info.n_ctx && !c->last.n_dropped)
        fprintf(stderr, "(the context of %d tokens is full; /drop N forgets turns, /clear all)\n",
                info.n_ctx);
    if (c->options.stats) tell_statistics(c);
}

/* The request for the turn that a line begins, submitted. Not OK: it was told, and nothing has changed but
 * that turns may have gone for it. */
static int submit(chat *c, const char *line, size_t len, uint64_t *id) {
    paged_request request;
    paged_error err;
    c->message.len = 0;
    if (!paged__buffer_append(&c->message, line, len) || !paged__buffer_append(&c->message, "", 1))
        return no_memory(c);
    if (paged_conversation_add_user(c->talk, c->message.data, &err) != PAGED_OK)
        return paged__error(c->session.cli, "%s", err.message);
    paged__session_request(&c->options.sampling, &request);
    if (c->options.keep_sink && request.max_tokens == 0) request.max_tokens = KEEP_SINK_TOKENS;
    PAGED_ASSERT(paged_conversation_request(c->talk, &request, NULL) == PAGED_OK);
    const int code = paged__session_submit(&c->session, &request, id);
    if (code != PAGED__EXIT_OK) paged_conversation_undo(c->talk);
    return code;
}

/* Only shortage of memory while it is written and a broken stdout end the conversation. */
static int answer(chat *c, const char *line, size_t len) {
    uint64_t id;
    if (submit(c, line, len, &id) != PAGED__EXIT_OK) return PAGED__EXIT_OK;
    paged__interrupt_watch(c->session.engine, id);
    c->text.len = 0;
    const int code = generate(c, id);
    paged__interrupt_watch(NULL, 0);
    paged__interrupt_taken();
    paged_engine_release(c->session.engine, id);
    if (code != PAGED__EXIT_OK) return code;
    c->answered = true;
    paged__chat_note_add(c->session.cli, &c->note, c->talk, c->message.data, c->text.data ? c->text.data : "",
                         c->text.len);
    tell_end(c);
    return PAGED__EXIT_OK;
}

/* ---- the conversation ---- */

static void drop(chat *c, int32_t n_turns) {
    paged_conversation_info talk;
    paged_conversation_get_info(c->talk, &talk);
    const int32_t n = paged_conversation_keep(c->talk, PAGED_MAX(talk.n_turns - n_turns, 0));
    paged_conversation_get_info(c->talk, &talk);
    fprintf(stderr, "(%d turn%s forgotten, %d left, %d tokens)\n", n, n == 1 ? "" : "s", talk.n_turns,
            talk.n_tokens);
}

/* A line that begins with a slash. False: the conversation ends. */
static bool command(chat *c, const char *line, size_t len) {
    static const char *const names[] = {"/clear", "/drop", "/stats", "/help", "/quit"};
    char word[32], rest;
    int n_turns;
    snprintf(word, sizeof word, "%.*s", (int)len, line);
    if (strcmp(word, "/quit") == 0 || strcmp(word, "/exit") == 0) return false;
    if (strcmp(word, "/clear") == 0) {
        if (begin(c) == PAGED__EXIT_OK &&
            paged__chat_note_begin(c->session.cli, &c->note, c->options.system) == PAGED__EXIT_OK)
            fputs("(a new conversation)\n", stderr);
    } else if (sscanf(word, "/drop %d%c", &n_turns, &rest) == 1 && n_turns > 0) {
        drop(c, n_turns);
    } else if (strncmp(word, "/drop", 5) == 0 && (word[5] == 0 || word[5] == ' ')) {
        paged__error(c->session.cli, "/drop asks for a number of turns, 1 or more: /drop 2");
    } else if (strcmp(word, "/stats") == 0) {
        tell_statistics(c);
    } else if (strcmp(word, "/help") == 0) {
        fputs("/clear  forget the conversation\n/drop N  forget its N oldest turns\n/stats  tokens, speeds, "
              "memory\n"
              "/quit   leave; so does Ctrl-D\nCtrl-C  stop the answer\n",
              stderr);
    } else {
        const char *nearest = paged__args_nearest(word, names, sizeof names / sizeof names[0]);
        paged__error(c->session.cli, "unknown command '%s'%s%s; /help lists them", word,
                     nearest ? "; did you mean " : "", nearest ? nearest : "");
    }
    return true;
}

static int talk(chat *c) {
    int code = PAGED__EXIT_OK;
    ssize_t len;
    for (const char *line; code == PAGED__EXIT_OK && (line = read_line(c, &len));) {
        if (len == 0) continue;
        if (memchr(line, 0, (size_t)len))
            paged__error(c->session.cli, "a line with a NUL byte cannot be a message");
        else if (line[0] != '/')
            code = answer(c, line, (size_t)len);
        else if (!command(c, line, (size_t)len))
            break;
    }
    if (c->edit && code == PAGED__EXIT_OK) fputs("\n", stderr);
    return code;
}

/* ---- conversations that are kept ---- */

static int list(paged__cli *cli, const chat_options *o) {
    paged__places places;
    int code = paged__places_open(cli, &o->places, &places);
    if (code == PAGED__EXIT_OK && !places.has_notes)
        code = paged__usage_error(cli, "--list needs the place where conversations are kept: --store");
    else if (code == PAGED__EXIT_OK)
        code = paged__chat_note_list(cli, &places.notes);
    paged__places_close(&places);
    return code;
}

/* Shows what was said last, so that one knows where one is. */
static void tell_resumed(const chat *c) {
    paged_conversation_info talk;
    paged_conversation_get_info(c->talk, &talk);
    if (!c->options.quiet)
        fprintf(stderr, "(%d turn%s, %d tokens of an earlier conversation)\n", talk.n_turns,
                talk.n_turns == 1 ? "" : "s", talk.n_tokens);
}

static int begin_or_resume(chat *c) {
    chat_options *o = &c->options;
    paged__cli *cli = c->session.cli;
    if (c->session.places.has_notes) c->note.notes = &c->session.places.notes;
    if (!o->resume) {
        const int code = begin(c);
        return code == PAGED__EXIT_OK ? paged__chat_note_begin(cli, &c->note, o->system) : code;
    }
    if (o->system) return paged__usage_error(cli, "--resume goes on with the system message that there is");
    int code = paged__chat_note_open(cli, &c->note, o->id);
    if (code != PAGED__EXIT_OK) return code;
    /* The note may be another one's by the time that /clear begins a new conversation. */
    const char *system = paged__chat_note_system(&c->note);
    c->system = system ? json_string(system) : NULL;
    o->system = json_string_value(c->system);
    code = begin(c);
    if (code == PAGED__EXIT_OK) code = paged__chat_note_restore(cli, &c->note, c->talk);
    if (code == PAGED__EXIT_OK) tell_resumed(c);
    return code;
}

static int chat_command(paged__cli *cli, int argc, char **argv) {
    static const chat_options defaults = {.sampling = PAGED__SAMPLING_DEFAULTS,
                                          .memory = PAGED__MEMORY_DEFAULTS,
                                          .places = PAGED__PLACES_DEFAULTS,
                                          .log_level = -1};
    chat c = {.options = defaults, .keys = -1};
    chat_options *o = &c.options;
    int code;
    if (!paged__args_parse(cli, &paged__command_chat, argc, argv, o, &code)) return code;
    cli->quiet = o->quiet;
    if (o->id && !o->resume) return paged__usage_error(cli, "'%s': an ID goes with --resume", o->id);
    if (o->list) return list(cli, o);
    if (o->log_level < 0) o->log_level = o->quiet ? PAGED_LOG_ERROR : PAGED_LOG_WARN;
    paged__log_to_stderr(cli, (paged_log_level)o->log_level);
    paged__interrupt_catch(cli);
    code = paged__session_load(&c.session, cli, o->model, (paged_linear)o->memory.linear);
    if (code == PAGED__EXIT_OK && !c.session.info.chat_template)
        code = paged__error(
            cli, "this model has no chat template, so it cannot hold a conversation; see paged run");
    if (code == PAGED__EXIT_OK) code = paged__session_start(&c.session, &o->memory, 1, &o->places);
    if (code == PAGED__EXIT_OK) code = begin_or_resume(&c);
    if (code == PAGED__EXIT_OK) {
        paged_engine_info info;
        paged_engine_get_info(c.session.engine, &info);
        paged__plan_note(cli, &c.session.info, &info, c.session.model_path);
        open_editor(&c);
        paged__interrupt_keep(c.edit != NULL);
        if (c.edit && !o->quiet) fputs("/help lists the commands, Ctrl-D leaves\n", stderr);
        code = talk(&c);
        close_editor(&c);
    }
    paged_conversation_free(c.talk);
    paged__chat_note_free(&c.note);
    json_decref(c.system);
    paged__session_close(&c.session);
    paged__buffer_free(&c.message);
    paged__buffer_free(&c.text);
    free(c.line);
    return code;
}

const paged__command paged__command_chat = {
    .name = "chat",
    .purpose = "talk with a model",
    .usage = "--model FILE [options]",
    .example = "paged chat --model model.gguf --temperature 0.7 --top-p 0.9",
    .options = options_table,
    .n_options = sizeof options_table / sizeof options_table[0],
    .run = chat_command,
};
