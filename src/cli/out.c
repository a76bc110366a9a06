/* cli/out.c: messages on stderr, results on stdout. Errors of stdout are kept until the end, so that no
 * command has to handle them; after the first one nothing more is written.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "cli/cli.h"

/* Names from a damaged file must not steer the terminal: control characters, and all that is not ASCII in
 * a text that is no UTF-8, become '?'. */
static void make_safe(char *text, size_t len) {
    json_t *valid = json_stringn(text, len);
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)text[i], next = i + 1 < len ? (unsigned char)text[i + 1] : 0;
        bool c1 = c == 0xc2 && next >= 0x80 && next < 0xa0; /* U+0080 … U+009F */
        if (c1) text[i + 1] = '?';
        if (c1 || c < 0x20 || c == 0x7f || (!valid && c >= 0x80)) text[i] = '?';
    }
    json_decref(valid);
}

/* One line in one write, so that lines of several threads do not mix. */
static void say(paged__cli *cli, const char *prefix, const char *suffix, const char *fmt, va_list args) {
    char message[2048], line[2300];
    vsnprintf(message, sizeof message, fmt, args);
    make_safe(message, strlen(message));
    paged__term_clear(&cli->term);
    snprintf(line, sizeof line, "paged: %s%s%s%s\n", prefix, prefix[0] ? ": " : "", message, suffix);
    fputs(line, stderr);
}

int paged__error(paged__cli *cli, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    say(cli, cli->command ? cli->command : "", "", fmt, args);
    va_end(args);
    return PAGED__EXIT_ERROR;
}

int paged__usage_error(paged__cli *cli, const char *fmt, ...) {
    char hint[64];
    snprintf(hint, sizeof hint, " (see 'paged %s%s--help')", cli->command ? cli->command : "",
             cli->command ? " " : "");
    va_list args;
    va_start(args, fmt);
    say(cli, cli->command ? cli->command : "", hint, fmt, args);
    va_end(args);
    return PAGED__EXIT_USAGE;
}

void paged__note(paged__cli *cli, const char *fmt, ...) {
    if (cli->quiet) return;
    va_list args;
    va_start(args, fmt);
    say(cli, "", "", fmt, args);
    va_end(args);
}

bool paged__out_write(paged__cli *cli, const char *data, size_t size_bytes) {
    if (cli->out_errno) return false;
    if (fwrite(data, 1, size_bytes, stdout) == size_bytes) return true;
    cli->out_errno = errno ? errno : EIO;
    return false;
}

bool paged__out_printf(paged__cli *cli, const char *fmt, ...) {
    if (cli->out_errno) return false;
    va_list args;
    va_start(args, fmt);
    int n = vprintf(fmt, args);
    va_end(args);
    if (n < 0) cli->out_errno = errno ? errno : EIO;
    return n >= 0;
}

void paged__out_safe(paged__cli *cli, const char *text, size_t len) {
    char copy[256];
    size_t n = PAGED_MIN(len, sizeof copy);
    memcpy(copy, text, n);
    make_safe(copy, n);
    paged__out_write(cli, copy, n);
}

bool paged__out_flush(paged__cli *cli) {
    if (!cli->out_errno && fflush(stdout) != 0) cli->out_errno = errno ? errno : EIO;
    return cli->out_errno == 0;
}

static int dump(const char *data, size_t size_bytes, void *user) {
    /* Errors of stdout wait for paged__out_end(), so that only shortage of memory is jansson's error. */
    paged__out_write(user, data, size_bytes);
    return 0;
}

int paged__out_json(paged__cli *cli, json_t *value, bool flat) {
    size_t flags = JSON_ENCODE_ANY | JSON_REAL_PRECISION(6) | (flat ? 0 : JSON_INDENT(2));
    int rc = value ? json_dump_callback(value, dump, cli, flags) : -1;
    json_decref(value);
    if (rc != 0) return paged__error(cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
    paged__out_write(cli, "\n", 1);
    return PAGED__EXIT_OK;
}

int paged__out_end(paged__cli *cli, int code) {
    paged__out_flush(cli);
    if (!cli->out_errno) return code;
    if (cli->out_errno == EPIPE) return PAGED__EXIT_PIPE;
    return paged__error(cli, "cannot write to standard output: %s", strerror(cli->out_errno));
}

static void log_text(paged__cli *cli, const char *prefix, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    say(cli, prefix, "", fmt, args);
    va_end(args);
}

static void log_line(void *user, paged_log_level level, const char *line) {
    static const char *const names[] = {"error", "warning", "info", "debug"};
    log_text(user, level <= PAGED_LOG_DEBUG ? names[level] : "log", "%s", line);
}

void paged__log_to_stderr(paged__cli *cli, paged_log_level max_level) {
    paged_log_set(log_line, cli, max_level);
}
