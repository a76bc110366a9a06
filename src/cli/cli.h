/* cli/cli.h: what the commands of the program `paged` share: the row of the command table, exit codes,
 * messages, output.
 *
 * A command is one constant of type paged__command: main.c finds it in its table, args.c makes parser and
 * help from its options, and its `run` gets what was typed after its name. Results go to stdout through
 * paged__out_…, everything else to stderr, one line a message, "paged: run: what is wrong and what to do".
 */
#ifndef PAGED_CLI_CLI_H
#define PAGED_CLI_CLI_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cli/term.h"
#include "paged/base.h"
#include "server/text.h"

enum {
    PAGED__EXIT_OK = 0,
    PAGED__EXIT_ERROR = 1,
    PAGED__EXIT_USAGE = 2,
    PAGED__EXIT_INTERRUPTED = 130, /* Ctrl-C, as shells count it */
    PAGED__EXIT_PIPE = 141         /* the reader of stdout has gone, as shells count it */
};

/* One per process, owned by main(). */
typedef struct paged__cli {
    const char *command; /* name for messages; NULL before a command is known */
    bool quiet;          /* no notes, no progress */
    int out_errno;       /* the first error on stdout; output after it is dropped */
    paged__term term;
} paged__cli;

typedef enum paged__option_kind {
    PAGED__OPTION_HEADING, /* no option: a heading in the help */
    PAGED__OPTION_OPERAND, /* const char *: an argument without a dash, in the order of the table */
    PAGED__OPTION_FLAG,    /* bool */
    PAGED__OPTION_TEXT,    /* const char *, borrowed from argv */
    PAGED__OPTION_INT,     /* int32_t in min … max */
    PAGED__OPTION_SEED,    /* uint64_t in 0 … 2^63 - 1 */
    PAGED__OPTION_REAL,    /* float in min … max */
    PAGED__OPTION_BYTES,   /* size_t, with a suffix */
    PAGED__OPTION_CHOICE   /* int32_t: an index of choices */
} paged__option_kind;

typedef struct paged__option {
    paged__option_kind kind;
    char letter;                /* short form, 0: none */
    const char *name;           /* long form without the dashes; of a heading: its text */
    const char *value;          /* what the help calls the value */
    size_t offset;              /* of the target in the command's struct of options */
    double min, max;            /* INT and REAL */
    const char *const *choices; /* CHOICE: ends with NULL */
    const char *help;           /* lines are divided by \n */
} paged__option;

typedef struct paged__command {
    const char *name, *purpose, *usage, *example;
    const paged__option *options; /* [n_options] */
    int32_t n_options;
    /* argv[0] is the first word after the name. Returns an exit code. */
    int (*run)(paged__cli *cli, int argc, char **argv);
} paged__command;

extern const paged__command paged__command_run, paged__command_chat, paged__command_batch,
    paged__command_serve, paged__command_bench, paged__command_plan, paged__command_perplexity,
    paged__command_tokenize, paged__command_inspect, paged__command_store;

/* ---- args.c ---- */

/* Fills the struct at `options`, which holds the defaults. False: the command ends now with *exit_code,
 * because help was asked for and printed, or because of a usage error that has been told. */
bool paged__args_parse(paged__cli *cli, const paged__command *command, int argc, char **argv, void *options,
                       int *exit_code);

/* The same from "name = value" lines, and from variables: PAGED_MAX_BODY is --max-body. False: the error
 * has been told. text is cut into strings and borrowed by the options; path: its name, for errors. */
bool paged__args_file(paged__cli *cli, const paged__command *command, char *text, const char *path,
                      void *options);
bool paged__args_environment(paged__cli *cli, const paged__command *command, void *options);

void paged__args_help(paged__cli *cli, const paged__command *command);

/* The entry of names [n_names] that was probably meant, NULL: none is near. Entries may be NULL. */
const char *paged__args_nearest(const char *typed, const char *const *names, int32_t n_names);

/* The model that was named, or $PAGED_MODEL. NULL: neither, and the usage error has been told. */
const char *paged__args_model(paged__cli *cli, const char *named, const char *how);

/* ---- out.c: messages and output ---- */

/* "paged: COMMAND: message" on stderr; control characters in it become '?'. They return the exit code 1 or
 * 2. */
int paged__error(paged__cli *cli, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
int paged__usage_error(paged__cli *cli, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* "paged: message" on stderr unless quiet. */
void paged__note(paged__cli *cli, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* False: stdout does not take more. The reason is told once, by paged__out_end(). */
bool paged__out_write(paged__cli *cli, const char *data, size_t size_bytes);
bool paged__out_printf(paged__cli *cli, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Text from a file, 256 bytes of it at most, made harmless for a terminal. */
void paged__out_safe(paged__cli *cli, const char *text, size_t len);
bool paged__out_flush(paged__cli *cli);

/* Prints a value, in one line if `flat`, and a newline. Takes the reference, also when value is NULL (no
 * memory: an error). */
int paged__out_json(paged__cli *cli, json_t *value, bool flat);

/* Flushes stdout and turns what went wrong there into an exit code; else returns `code`. */
int paged__out_end(paged__cli *cli, int code);

/* Routes the library's log to stderr. */
void paged__log_to_stderr(paged__cli *cli, paged_log_level max_level);

/* ---- text.c: text from files ---- */

enum { PAGED__TEXT_MAX = 256 << 20 }; /* bytes of a text; keeps token counts far inside int32_t */

/* The given text or, if it is NULL, all bytes of a file ("-": of stdin), NULs included. A 0 that `len`
 * does not count follows. Returns an exit code; the error has been told. */
int paged__text_take(paged__cli *cli, const char *given, const char *path, paged__buffer *text);

#endif
