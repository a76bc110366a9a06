/* cli/args.c: the parser and the help, both from a command's table of options.
 *
 * Taken are "--name value", "--name=value", "-n value", flags, operands, and "--" after which everything is
 * an operand. A value may begin with a dash, so that "--max-tokens -5" is told as a bad number and not as an
 * unknown option. The last of two equal options counts.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "cli/cli.h"

/* ---- did you mean ---- */

enum { NAME_MAX_LEN = 31 };

/* Edit distance in which a swap of two neighbours counts once (optimal string alignment). */
static int32_t distance(const char *a, const char *b) {
    size_t n_a = strlen(a), n_b = strlen(b);
    if (n_a > NAME_MAX_LEN || n_b > NAME_MAX_LEN) return NAME_MAX_LEN;
    int32_t rows[3][NAME_MAX_LEN + 1]; /* row i % 3: distances of a[0 … i) to every beginning of b */
    for (size_t j = 0; j <= n_b; j++) rows[0][j] = (int32_t)j;
    for (size_t i = 1; i <= n_a; i++) {
        int32_t *row = rows[i % 3], *above = rows[(i - 1) % 3];
        row[0] = (int32_t)i;
        for (size_t j = 1; j <= n_b; j++) {
            int32_t best = above[j - 1] + (a[i - 1] != b[j - 1]);
            best = PAGED_MIN(best, above[j] + 1);
            best = PAGED_MIN(best, row[j - 1] + 1);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
                best = PAGED_MIN(best, rows[(i - 2) % 3][j - 2] + 1);
            }
            row[j] = best;
        }
    }
    return rows[n_a % 3][n_b];
}

const char *paged__args_nearest(const char *typed, const char *const *names, int32_t n_names) {
    const char *nearest = NULL;
    /* A third of the letters may be wrong; more than that is guesswork. */
    int32_t best = (int32_t)strlen(typed) / 3 + 1;
    for (int32_t i = 0; i < n_names; i++) {
        int32_t d = names[i] ? distance(typed, names[i]) : NAME_MAX_LEN;
        /* A beginning that is cut short, as in --temp, is near at any length. */
        if (names[i] && strlen(typed) >= 3 && strncmp(typed, names[i], strlen(typed)) == 0) d = 1;
        if (d > best || (nearest && d == best)) continue;
        best = d;
        nearest = names[i];
    }
    return nearest;
}

/* ---- values ---- */

static bool blank_start(const char *text) {
    return text[0] == 0 || strchr(" \t\n\v\f\r", text[0]);
}

/* A whole number in [0, max] or, with a '-', down to min. */
static bool parse_whole(const char *text, int64_t min, int64_t max, int64_t *out, const char **end) {
    char *stop;
    if (blank_start(text)) return false;
    errno = 0;
    long long n = strtoll(text, &stop, 10);
    if (stop == text || errno != 0 || n < min || n > max) return false;
    *end = stop;
    *out = n;
    return true;
}

static bool parse_real(const char *text, double min, double max, float *out) {
    char *end;
    if (blank_start(text)) return false;
    double x = strtod(text, &end);
    /* The comparison is false for NaN; what underflows is a good 0. */
    if (end == text || *end || !(x >= min && x <= max)) return false;
    *out = (float)x;
    return true;
}

/* K, M, G, T and KiB … are powers of 1024, KB … powers of 1000. */
static bool parse_bytes(const char *text, size_t *out) {
    static const char letters[] = "KMGT";
    const char *end;
    int64_t n;
    if (!parse_whole(text, 1, INT64_MAX, &n, &end)) return false;
    size_t bytes = (size_t)n;
    const char *letter = *end ? strchr(letters, *end & ~0x20) : NULL;
    if (letter) {
        end++;
        bool decimal = (*end == 'B' || *end == 'b') && end[1] == 0;
        for (const char *l = letters; l <= letter; l++) {
            if (!paged__mul(bytes, decimal ? 1000 : 1024, &bytes)) return false;
        }
        if (*end == 'i')
            end++;
        else if (!decimal && *end)
            return false;
    }
    if (*end == 'B' || *end == 'b') end++;
    if (*end) return false;
    *out = bytes;
    return true;
}

static void list_choices(const char *const *choices, char *out, size_t capacity) {
    out[0] = 0;
    for (int32_t i = 0; choices[i]; i++) {
        size_t len = strlen(out);
        snprintf(out + len, capacity - len, "%s%s", i ? ", " : "", choices[i]);
    }
}

static bool take_choice(const paged__option *option, const char *text, int32_t *target) {
    for (int32_t i = 0; option->choices[i]; i++) {
        if (strcmp(text, option->choices[i]) != 0) continue;
        *target = i;
        return true;
    }
    return false;
}

/* False: the error has been told. */
static bool take_value(paged__cli *cli, const paged__option *option, const char *text, void *options) {
    void *target = (char *)options + option->offset;
    const char *end;
    int64_t n;
    char names[128];
    switch (option->kind) {
    case PAGED__OPTION_OPERAND:
    case PAGED__OPTION_TEXT:
        *(const char **)target = text;
        return true;
    case PAGED__OPTION_FLAG:
        *(bool *)target = true;
        return true;
    case PAGED__OPTION_INT:
        if (parse_whole(text, (int64_t)option->min, (int64_t)option->max, &n, &end) && !*end) {
            *(int32_t *)target = (int32_t)n;
            return true;
        }
        paged__usage_error(cli, "--%s takes a whole number from %.0f to %.0f, not '%s'", option->name,
                           option->min, option->max, text);
        return false;
    case PAGED__OPTION_SEED:
        if (parse_whole(text, 0, INT64_MAX, &n, &end) && !*end) {
            *(uint64_t *)target = (uint64_t)n;
            return true;
        }
        paged__usage_error(cli, "--%s takes a whole number from 0 to %lld, not '%s'", option->name,
                           (long long)INT64_MAX, text);
        return false;
    case PAGED__OPTION_REAL:
        if (parse_real(text, option->min, option->max, target)) return true;
        paged__usage_error(cli, "--%s takes a number from %.10g to %.10g, not '%s'", option->name,
                           option->min, option->max, text);
        return false;
    case PAGED__OPTION_BYTES:
        if (parse_bytes(text, target)) return true;
        paged__usage_error(cli, "--%s takes a number of bytes from 1 on, such as 64M or 1GiB, not '%s'",
                           option->name, text);
        return false;
    case PAGED__OPTION_CHOICE:
        if (take_choice(option, text, target)) return true;
        list_choices(option->choices, names, sizeof names);
        paged__usage_error(cli, "--%s is one of %s, not '%s'", option->name, names, text);
        return false;
    case PAGED__OPTION_HEADING:
        break;
    }
    return false;
}

/* ---- the command line ---- */

static bool is_option(const paged__option *option) {
    return option->kind != PAGED__OPTION_HEADING && option->kind != PAGED__OPTION_OPERAND;
}

/* name [name_len]: a long name or one letter. */
static const paged__option *find(const paged__command *command, bool is_long, const char *name,
                                 size_t name_len) {
    for (int32_t i = 0; i < command->n_options; i++) {
        const paged__option *option = &command->options[i];
        if (!is_option(option)) continue;
        if (!is_long && option->letter && name_len == 1 && name[0] == option->letter) return option;
        if (is_long && strlen(option->name) == name_len && strncmp(name, option->name, name_len) == 0)
            return option;
    }
    return NULL;
}

static void tell_unknown(paged__cli *cli, const paged__command *command, const char *word) {
    enum { OPTIONS_MAX = 64 };
    const char *names[OPTIONS_MAX + 1];
    int32_t n = 0;
    for (int32_t i = 0; i < command->n_options && n < OPTIONS_MAX; i++) {
        if (is_option(&command->options[i])) names[n++] = command->options[i].name;
    }
    names[n++] = "help";
    char typed[NAME_MAX_LEN + 1];
    const char *name = word + strspn(word, "-");
    snprintf(typed, sizeof typed, "%.*s", (int)PAGED_MIN(strcspn(name, "="), (size_t)NAME_MAX_LEN), name);
    const char *nearest = paged__args_nearest(typed, names, n);
    if (nearest)
        paged__usage_error(cli, "unknown option '%s'; did you mean --%s?", word, nearest);
    else
        paged__usage_error(cli, "unknown option '%s'", word);
}

/* The n-th operand of the table; NULL: there are not so many. */
static const paged__option *operand(const paged__command *command, int32_t n) {
    for (int32_t i = 0; i < command->n_options; i++) {
        if (command->options[i].kind == PAGED__OPTION_OPERAND && n-- == 0) return &command->options[i];
    }
    return NULL;
}

/* Takes the option at argv[i], with its value, and returns how many words it had; 0: the error has been
 * told. */
static int take_option(paged__cli *cli, const paged__command *command, int n_left, char **words,
                       void *options) {
    const char *word = words[0];
    bool is_long = word[1] == '-';
    const char *name = word + 1 + is_long, *equals = is_long ? strchr(name, '=') : NULL;
    size_t name_len = equals ? (size_t)(equals - name) : strlen(name);
    const paged__option *option = find(command, is_long, name, name_len);
    if (!option) {
        tell_unknown(cli, command, word);
        return 0;
    }
    if (option->kind == PAGED__OPTION_FLAG) {
        if (!equals) return take_value(cli, option, NULL, options);
        paged__usage_error(cli, "--%s takes no value", option->name);
        return 0;
    }
    if (equals) return take_value(cli, option, equals + 1, options);
    if (n_left < 2) {
        paged__usage_error(cli, "--%s needs a value: --%s %s", option->name, option->name, option->value);
        return 0;
    }
    return take_value(cli, option, words[1], options) ? 2 : 0;
}

bool paged__args_parse(paged__cli *cli, const paged__command *command, int argc, char **argv, void *options,
                       int *exit_code) {
    int32_t n_operands = 0;
    bool only_operands = false;
    *exit_code = PAGED__EXIT_USAGE;
    for (int i = 0; i < argc;) {
        const char *word = argv[i];
        if (!only_operands && strcmp(word, "--") == 0) {
            only_operands = true;
            i++;
        } else if (!only_operands && (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0)) {
            paged__args_help(cli, command);
            *exit_code = PAGED__EXIT_OK;
            return false;
        } else if (!only_operands && word[0] == '-' && word[1]) {
            int n = take_option(cli, command, argc - i, argv + i, options);
            if (n == 0) return false;
            i += n;
        } else {
            const paged__option *option = operand(command, n_operands++);
            if (!option) {
                paged__usage_error(cli, "unexpected argument '%s'", word);
                return false;
            }
            take_value(cli, option, word, options);
            i++;
        }
    }
    *exit_code = PAGED__EXIT_OK;
    return true;
}

/* ---- files and variables ---- */

/* A flag has no value on the command line, but has one here. */
static bool take_setting(paged__cli *cli, const paged__option *option, const char *text, void *options) {
    static const char *const yes[] = {"1", "true", "yes", "on"}, *const no[] = {"0", "false", "no", "off",
                                                                                ""};
    if (option->kind != PAGED__OPTION_FLAG) return take_value(cli, option, text, options);
    for (size_t i = 0; i < sizeof yes / sizeof yes[0]; i++)
        if (strcmp(text, yes[i]) == 0) return take_value(cli, option, NULL, options);
    for (size_t i = 0; i < sizeof no / sizeof no[0]; i++)
        if (strcmp(text, no[i]) == 0) return true;
    paged__usage_error(cli, "%s is true or false, not '%s'", option->name, text);
    return false;
}

/* Cuts the blanks off both ends. */
static char *trim(char *text) {
    text += strspn(text, " \t\r");
    size_t n = strlen(text);
    while (n > 0 && strchr(" \t\r", text[n - 1])) text[--n] = 0;
    return text;
}

bool paged__args_file(paged__cli *cli, const paged__command *command, char *text, const char *path,
                      void *options) {
    int32_t number = 0;
    for (char *line = text, *next; line; line = next) {
        next = strchr(line, '\n');
        if (next) *next++ = 0;
        number++;
        char *name = trim(line), *equals = strchr(name, '=');
        if (!*name || *name == '#') continue;
        if (equals) *equals = 0;
        const char *value = equals ? trim(equals + 1) : "true";
        name = trim(name);
        const paged__option *option = find(command, true, name, strlen(name));
        if (!option) {
            paged__usage_error(cli, "%s, line %d: there is no option '%s'", path, number, name);
            return false;
        }
        if (!take_setting(cli, option, value, options)) return false;
    }
    return true;
}

bool paged__args_environment(paged__cli *cli, const paged__command *command, void *options) {
    for (int32_t i = 0; i < command->n_options; i++) {
        const paged__option *option = &command->options[i];
        char name[64];
        if (!is_option(option)) continue;
        snprintf(name, sizeof name, "PAGED_%s", option->name);
        for (char *c = name; *c; c++) *c = (char)(*c == '-' ? '_' : *c >= 'a' && *c <= 'z' ? *c - 32 : *c);
        const char *value = getenv(name);
        if (value && !take_setting(cli, option, value, options)) return false;
    }
    return true;
}

const char *paged__args_model(paged__cli *cli, const char *named, const char *how) {
    const char *path = named ? named : getenv("PAGED_MODEL");
    if (path && path[0]) return path;
    paged__usage_error(cli, "no model: give %s, a GGUF file, or set PAGED_MODEL", how);
    return NULL;
}

/* ---- help ---- */

static void help_row(paged__cli *cli, const char *left, const char *help) {
    for (const char *line = help; line; left = "") {
        const char *end = strchr(line, '\n');
        int len = end ? (int)(end - line) : (int)strlen(line);
        paged__out_printf(cli, "  %-24s %.*s\n", left, len, line);
        line = end ? end + 1 : NULL;
    }
}

void paged__args_help(paged__cli *cli, const paged__command *command) {
    paged__out_printf(cli, "paged %s: %s\n\nUsage: paged %s %s\n", command->name, command->purpose,
                      command->name, command->usage);
    for (int32_t i = 0; i < command->n_options; i++) {
        const paged__option *option = &command->options[i];
        char left[64];
        if (option->kind == PAGED__OPTION_HEADING) {
            paged__out_printf(cli, "\n%s:\n", option->name);
            continue;
        }
        if (option->kind == PAGED__OPTION_OPERAND) {
            snprintf(left, sizeof left, "%s", option->name);
        } else {
            char letter[] = {'-', option->letter, ',', ' ', 0};
            snprintf(left, sizeof left, "%s--%s%s%s", option->letter ? letter : "    ", option->name,
                     option->value ? " " : "", option->value ? option->value : "");
        }
        help_row(cli, left, option->help);
    }
    help_row(cli, "-h, --help", "this text");
    paged__out_printf(cli, "\nExample:\n  %s\n", command->example);
}
