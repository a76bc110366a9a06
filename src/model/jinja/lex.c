/* model/jinja/lex.c: a template's text to tokens, with the white space around tags as transformers sets it:
 * the newline after a block tag goes (trim_blocks), and so do blanks before one on its line (lstrip_blocks).
 *
 * `-` at a border takes all white space on that side, `+` keeps what would have gone. Newlines are
 * made \n first, and one at the very end is dropped.
 */
#include <stdlib.h>

#include "model/jinja/ast.h"

typedef struct lexer {
    paged__j_run *run;
    const char *p, *end;
    bool line_start; /* the last tag took its newline with it, or nothing was read yet */
    j_token *tokens; /* [n of cap] */
    size_t n, cap;
    char brackets[J_SOURCE_DEPTH]; /* those that are open, in a tag */
    size_t n_brackets;
} lexer;

static j_token *add(lexer *l, j_token_type type) {
    j_token *tokens = paged__j_grow(l->run, l->tokens, l->n, &l->cap, sizeof *tokens);
    if (!tokens) return NULL;
    l->tokens = tokens;
    tokens[l->n] = (j_token){.type = (uint8_t)type, .line = l->run->line};
    return &tokens[l->n++];
}

static void fail(lexer *l, const char *what) {
    paged__j_fail(l->run, PAGED_ERR_FORMAT, "%s", what);
}

static void advance(lexer *l, const char *to) {
    for (; l->p < to; l->p++) l->run->line += *l->p == '\n';
}

static bool starts(const lexer *l, const char *text) {
    const size_t n = strlen(text);
    return (size_t)(l->end - l->p) >= n && memcmp(l->p, text, n) == 0;
}

static const char *skip_space(const lexer *l, const char *p) {
    uint32_t code;
    while (p < l->end) {
        const size_t n = paged__j_char(p, (size_t)(l->end - p), &code);
        if (!paged__j_is_space(code)) break;
        p += n;
    }
    return p;
}

/* ---- around tags ---- */

static void add_data(lexer *l, const char *from, const char *to) {
    if (to <= from) return;
    const j_value text = paged__j_string(l->run, (j_string){.bytes = from, .len = (size_t)(to - from)});
    j_token *token = add(l, J_T_DATA);
    if (token) token->value = text;
}

/* The text [from, to) before a tag with the sign '-', '+' or 0; `block`: not a print. */
static void add_data_before(lexer *l, const char *from, const char *to, char sign, bool block) {
    const j_string all = {.bytes = from, .len = (size_t)(to - from)};
    if (sign == '-') {
        add_data(l, from, from + paged__j_strip(&all, NULL, false, true).len);
        return;
    }
    if (block && sign != '+') {
        const char *line = to;
        while (line > from && line[-1] != '\n') line--;
        const j_string last = {.bytes = line, .len = (size_t)(to - line)};
        if ((line > from || l->line_start) && paged__j_strip(&last, NULL, true, false).len == 0) to = line;
    }
    add_data(l, from, to);
}

/* The end of a tag: its length at p, with the white space that goes with it; 0: this is none. */
static size_t tag_end(const lexer *l, const char *p, const char *close, bool block) {
    const size_t left = (size_t)(l->end - p);
    if (left >= 3 && *p == '-' && memcmp(p + 1, close, 2) == 0) return (size_t)(skip_space(l, p + 3) - p);
    if (block && left >= 3 && *p == '+' && memcmp(p + 1, close, 2) == 0) return 3;
    if (left >= 2 && memcmp(p, close, 2) == 0) return block && left > 2 && p[2] == '\n' ? 3 : 2;
    return 0;
}

static void take_end(lexer *l, size_t n) {
    advance(l, l->p + n);
    l->line_start = l->p[-1] == '\n';
}

static void lex_comment(lexer *l) {
    for (const char *p = l->p; p < l->end; p++) {
        const size_t n = tag_end(l, p, "#}", true);
        if (n == 0) continue;
        advance(l, p);
        take_end(l, n);
        return;
    }
    fail(l, "a comment has no end");
}

/* The length of {% raw %} or {% endraw %} at p; 0: this is none. *sign: that of its begin. */
static size_t raw_tag(const lexer *l, const char *p, const char *word, char *sign) {
    const char *const begin = p;
    const size_t n = strlen(word);
    if (l->end - p < 2 || memcmp(p, "{%", 2) != 0) return 0;
    p += 2;
    *sign = p < l->end && (*p == '-' || *p == '+') ? *p++ : 0;
    p = skip_space(l, p);
    if ((size_t)(l->end - p) < n || memcmp(p, word, n) != 0) return 0;
    p = skip_space(l, p + n);
    const bool is_begin = word[0] == 'r';
    if (is_begin && p < l->end && *p == '+') return 0;
    const size_t close = tag_end(l, p, "%}", true);
    if (close == 0) return 0;
    /* The newline after {% raw %} stays. */
    return (size_t)(p - begin) + (is_begin && *p == '%' ? 2 : close);
}

static void lex_raw(lexer *l, size_t begin_len) {
    char sign;
    take_end(l, begin_len);
    for (const char *p = l->p; p < l->end; p++) {
        const size_t n = raw_tag(l, p, "endraw", &sign);
        if (n == 0) continue;
        add_data_before(l, l->p, p, sign, true);
        advance(l, p);
        take_end(l, n);
        return;
    }
    fail(l, "a raw block has no end");
}

/* ---- in tags ---- */

static bool is_digit(const lexer *l, const char *p) {
    return p < l->end && *p >= '0' && *p <= '9';
}

static bool is_name_char(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           (uint8_t)c >= 0x80;
}

/* Digits of a base, with single underscores between them. */
static const char *skip_digits(const lexer *l, const char *p, int base) {
    static const char digits[] = "0123456789abcdef0123456789ABCDEF";
    const char *good = p;
    while (p < l->end) {
        const char *at = *p ? strchr(digits, *p) : NULL;
        const char *at_upper = *p ? strchr(digits + 16, *p) : NULL;
        const bool is = (at && at - digits < base) || (at_upper && at_upper - digits - 16 < base);
        if (!is && !(*p == '_' && p == good)) break;
        if (is) good = p + 1;
        p++;
    }
    return good;
}

/* Digits copied without underscores. */
static void lex_number(lexer *l) {
    char text[400];
    const char *p = l->p;
    int base = 10;
    bool real = false;
    if (*p == '0' && l->end - p > 2) {
        const char c = (char)(p[1] | 0x20);
        base = c == 'x' ? 16 : c == 'o' ? 8 : c == 'b' ? 2 : 10;
        if (base != 10 && skip_digits(l, p + 2, base) == p + 2) base = 10;
    }
    if (base != 10) {
        p = skip_digits(l, p + 2, base);
    } else {
        const bool after_dot = l->n && strcmp(l->tokens[l->n - 1].op, ".") == 0; /* x.0.1 */
        p = skip_digits(l, p, 10);
        if (!after_dot && p < l->end && *p == '.' && is_digit(l, p + 1)) {
            p = skip_digits(l, p + 1, 10);
            real = true;
        }
        if (!after_dot && p < l->end && (*p == 'e' || *p == 'E')) {
            const char *digits = p + 1;
            if (digits < l->end && (*digits == '+' || *digits == '-')) digits++;
            if (is_digit(l, digits)) {
                p = skip_digits(l, digits, 10);
                real = true;
            }
        }
    }
    size_t n = 0;
    for (const char *q = base == 10 ? l->p : l->p + 2; q < p && n < sizeof text - 1; q++)
        if (*q != '_') text[n++] = *q;
    text[n] = 0;
    char *end;
    unsigned long long integer = strtoull(text, &end, base);
    if (n == sizeof text - 1 || (!real && integer > INT64_MAX)) {
        fail(l, "a number is too large");
        return;
    }
    if (!real && base == 10 && text[0] == '0' && integer != 0) {
        fail(l, "a number begins with 0");
        return;
    }
    j_token *token = add(l, J_T_NUMBER);
    if (token) token->value = real ? paged__j_float(strtod(text, NULL)) : paged__j_int((int64_t)integer);
    advance(l, p);
}

/* The code of up to `max` digits at *p, at least `min`; UINT32_MAX: there are fewer. */
static uint32_t take_code(const char **p, const char *end, int base, int min, int max) {
    uint32_t code = 0;
    int n = 0;
    for (; n < max && *p < end; n++, (*p)++) {
        const char c = (char)(**p | 0x20);
        const int digit = **p >= '0' && **p <= '9' ? **p - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : 99;
        if (digit >= base) break;
        code = code * (uint32_t)base + (uint32_t)digit;
    }
    return n < min ? UINT32_MAX : code;
}

/* *p is behind the backslash; escapes are Python's. False: a bad one. */
static bool put_escape(lexer *l, j_buffer *buf, const char **p, const char *end) {
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    const char c = *(*p)++;
    const char *at = c ? strchr(from, c) : NULL;
    uint32_t code = UINT32_MAX;
    if (c == '\n') return true;
    if (at) {
        paged__j_put(l->run, buf, &to[at - from], 1, false);
        return true;
    }
    if (c >= '0' && c <= '7') {
        (*p)--;
        code = take_code(p, end, 8, 1, 3);
    } else if (c == 'x') {
        code = take_code(p, end, 16, 2, 2);
    } else if (c == 'u') {
        code = take_code(p, end, 16, 4, 4);
    } else if (c == 'U') {
        code = take_code(p, end, 16, 8, 8);
    } else if (c == 'N') {
        return false;
    } else {
        (*p)--;
        paged__j_put(l->run, buf, "\\", 1, false);
        return true;
    }
    if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return false;
    paged__j_put_code(l->run, buf, code, false);
    return true;
}

static void lex_string(lexer *l) {
    const char quote = *l->p, *p = l->p + 1, *from = p;
    j_buffer buf = {0};
    bool escaped = false;
    while (p < l->end && *p != quote) {
        if (*p != '\\') {
            p++;
            continue;
        }
        if (l->end - p < 2) break;
        paged__j_put(l->run, &buf, from, (size_t)(p - from), false);
        p++;
        if (!put_escape(l, &buf, &p, l->end)) {
            fail(l, "an escape in a string names no character that we know");
            return;
        }
        from = p;
        escaped = true;
        /* The character behind an unknown escape's backslash is an ordinary one, and may be a quote. */
    }
    if (p >= l->end) {
        fail(l, "a string has no end");
        return;
    }
    j_value value;
    if (escaped) {
        paged__j_put(l->run, &buf, from, (size_t)(p - from), false);
        value = paged__j_buffer_value(l->run, &buf);
    } else {
        value = paged__j_string(l->run, (j_string){.bytes = from, .len = (size_t)(p - from)});
    }
    j_token *token = add(l, J_T_STRING);
    if (token) token->value = value;
    advance(l, p + 1);
}

static void lex_op(lexer *l) {
    static const char *const long_ops[] = {"**", "//", "==", "!=", "<=", ">="};
    static const char short_ops[] = "+-*/%~[](){}=<>.:|,;";
    const char *op = NULL;
    size_t n = 1;
    for (size_t i = 0; i < sizeof long_ops / sizeof long_ops[0]; i++)
        if (starts(l, long_ops[i])) op = long_ops[i], n = 2;
    if (!op) op = *l->p ? strchr(short_ops, *l->p) : NULL;
    if (!op) {
        paged__j_fail(l->run, PAGED_ERR_FORMAT, "unexpected character 0x%02x", (uint8_t)*l->p);
        return;
    }
    static const char open[] = "([{", close[] = ")]}";
    const char *bracket = strchr(close, *op);
    if (strchr(open, *op)) {
        if (l->n_brackets == sizeof l->brackets) {
            paged__j_fail(l->run, PAGED_ERR_LIMIT, "brackets nest deeper than %d", J_SOURCE_DEPTH);
            return;
        }
        l->brackets[l->n_brackets++] = *op;
    } else if (bracket && (l->n_brackets == 0 || l->brackets[--l->n_brackets] != open[bracket - close])) {
        paged__j_fail(l->run, PAGED_ERR_FORMAT, "unexpected \"%c\"", *op);
        return;
    }
    j_token *token = add(l, J_T_OP);
    if (token) memcpy(token->op, op, n);
    advance(l, l->p + n);
}

static void lex_tag(lexer *l, bool block) {
    const int32_t line = l->run->line;
    l->n_brackets = 0;
    add(l, block ? J_T_BLOCK : J_T_PRINT);
    while (!l->run->status) {
        advance(l, skip_space(l, l->p));
        const size_t n = l->n_brackets ? 0 : tag_end(l, l->p, block ? "%}" : "}}", block);
        if (n) {
            add(l, block ? J_T_BLOCK_END : J_T_PRINT_END);
            take_end(l, n);
            return;
        }
        if (l->p >= l->end) {
            l->run->line = line;
            fail(l, "a tag has no end");
        } else if (is_digit(l, l->p)) {
            lex_number(l);
        } else if (is_name_char(*l->p)) {
            const char *p = l->p;
            while (p < l->end && is_name_char(*p)) p++;
            const j_value name =
                paged__j_string(l->run, (j_string){.bytes = l->p, .len = (size_t)(p - l->p)});
            j_token *token = add(l, J_T_NAME);
            if (token) token->value = name;
            l->p = p;
        } else if (*l->p == '\'' || *l->p == '"') {
            lex_string(l);
        } else {
            lex_op(l);
        }
    }
}

/* ---- all of it ---- */

/* Into the arena, since tokens point into it. */
static char *normalise(paged__j_run *run, const char *text, size_t *len) {
    char *copy = paged__j_alloc(run, *len + 1, 1);
    if (!copy) return NULL;
    size_t n = 0;
    for (size_t i = 0; i < *len; i++) {
        copy[n++] = text[i] == '\r' ? '\n' : text[i];
        if (text[i] == '\r' && i + 1 < *len && text[i + 1] == '\n') i++;
    }
    if (n && copy[n - 1] == '\n') n--;
    *len = n;
    return copy;
}

static void lex_any(lexer *l) {
    const char *tag = l->p;
    char sign = 0;
    while ((tag = memchr(tag, '{', (size_t)(l->end - tag))) != NULL) {
        if (l->end - tag >= 2 && (tag[1] == '{' || tag[1] == '%' || tag[1] == '#')) break;
        tag++;
    }
    if (!tag) {
        add_data(l, l->p, l->end);
        advance(l, l->end);
        return;
    }
    const char kind = tag[1];
    const size_t raw = raw_tag(l, tag, "raw", &sign);
    if (!raw) sign = l->end - tag >= 3 && (tag[2] == '-' || tag[2] == '+') ? tag[2] : 0;
    add_data_before(l, l->p, tag, sign, kind != '{');
    advance(l, tag);
    l->line_start = false;
    if (raw) {
        lex_raw(l, raw);
        return;
    }
    l->p += sign ? 3 : 2;
    if (kind == '#')
        lex_comment(l);
    else
        lex_tag(l, kind == '%');
}

j_token *paged__j_lex(paged__j_run *run, const char *text, size_t len, size_t *n) {
    char *copy = normalise(run, text, &len);
    if (!copy) return NULL;
    lexer l = {.run = run, .p = copy, .end = copy + len, .line_start = true};
    run->line = 1;
    while (l.p < l.end && !run->status) lex_any(&l);
    add(&l, J_T_END);
    if (run->status) return NULL;
    *n = l.n;
    return l.tokens;
}
