/* model/jinja/strings.c: operations on strings that filters and methods share, and the methods of strings.
 * What comes from a string keeps its marks; what an operation adds of its own (padding) is the template's.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "model/jinja/value.h"

/* ---- shared ---- */

/* ASCII, Latin-1, Greek and Cyrillic: one character for one. */
uint32_t paged__j_case_of(uint32_t c, bool upper) {
    static const struct {
        uint32_t first, last, to; /* lower case range, first in upper case */
    } ranges[] = {{'a', 'z', 'A'},       {0xe0, 0xf6, 0xc0},    {0xf8, 0xfe, 0xd8},   {0x3b1, 0x3c1, 0x391},
                  {0x3c3, 0x3cb, 0x3a3}, {0x430, 0x44f, 0x410}, {0x450, 0x45f, 0x400}};
    for (size_t i = 0; i < sizeof ranges / sizeof ranges[0]; i++) {
        const uint32_t n = ranges[i].last - ranges[i].first;
        if (upper && c - ranges[i].first <= n) return ranges[i].to + (c - ranges[i].first);
        if (!upper && c - ranges[i].to <= n) return ranges[i].first + (c - ranges[i].to);
    }
    return c;
}

static bool is_cased(uint32_t c) {
    return paged__j_case_of(c, true) != c || paged__j_case_of(c, false) != c;
}

static bool is_letter(uint32_t c) {
    return is_cased(c) || (c >= 0xaa && !paged__j_is_space(c) && !(c >= 0xd800 && c <= 0xf8ff));
}

j_value paged__j_set_case(paged__j_run *run, const j_string *s, j_case to) {
    j_buffer buf = {0};
    bool first = true;
    for (size_t pos = 0, n; pos < s->len && !run->status; pos += n) {
        uint32_t c;
        n = paged__j_char(s->bytes + pos, s->len - pos, &c);
        const bool upper = to == J_UPPER || ((to == J_CAPITALIZE || to == J_TITLE) && first);
        first = to == J_TITLE && !is_cased(c);
        const uint32_t other = paged__j_case_of(c, upper);
        if (other != c) {
            paged__j_put_code(run, &buf, other, paged__j_raw_at(s, pos));
        } else {
            const j_string one = paged__j_cut(s, pos, pos + n);
            paged__j_put_string(run, &buf, &one);
        }
    }
    return paged__j_buffer_value(run, &buf);
}

static void put_cut(paged__j_run *run, j_buffer *buf, const j_string *s, size_t from, size_t to) {
    const j_string piece = paged__j_cut(s, from, to);
    paged__j_put_string(run, buf, &piece);
}

j_value paged__j_replace(paged__j_run *run, const j_string *s, const j_string *old, const j_string *with,
                         int64_t count) {
    j_buffer buf = {0};
    size_t pos = 0;
    for (; count != 0 && paged__j_step(run, 1); count--) {
        const size_t at = paged__j_find(s, old, pos);
        if (at == SIZE_MAX) break;
        put_cut(run, &buf, s, pos, at);
        paged__j_put_string(run, &buf, with);
        pos = at + old->len;
        if (old->len) continue;
        /* Nothing is found before each character, and once at the end. */
        uint32_t code;
        if (at == s->len) return paged__j_buffer_value(run, &buf);
        pos = at + paged__j_char(s->bytes + at, s->len - at, &code);
        put_cut(run, &buf, s, at, pos);
    }
    put_cut(run, &buf, s, pos, s->len);
    return paged__j_buffer_value(run, &buf);
}

static bool is_line_end(uint32_t c) {
    return (c >= 10 && c <= 13) || (c >= 28 && c <= 30) || c == 0x85 || c == 0x2028 || c == 0x2029;
}

static void push_cut(paged__j_run *run, j_value list, const j_string *s, size_t from, size_t to) {
    paged__j_push(run, list, paged__j_string(run, paged__j_cut(s, from, to)));
}

j_value paged__j_split_lines(paged__j_run *run, const j_string *s, bool keep_ends) {
    j_value list = paged__j_seq(run, J_LIST);
    size_t from = 0;
    for (size_t pos = 0, n; pos < s->len && !run->status; pos += n) {
        uint32_t c;
        n = paged__j_char(s->bytes + pos, s->len - pos, &c);
        if (!is_line_end(c)) continue;
        if (c == '\r' && pos + 1 < s->len && s->bytes[pos + 1] == '\n') n = 2;
        push_cut(run, list, s, from, keep_ends ? pos + n : pos);
        from = pos + n;
    }
    if (from < s->len) push_cut(run, list, s, from, s->len);
    return list;
}

/* s with blanks (or zeros) before and behind it. */
static j_value pad(paged__j_run *run, const j_string *s, int64_t before, int64_t behind) {
    j_buffer buf = {0};
    for (; before > 0 && paged__j_step(run, 1); before--) paged__j_put(run, &buf, " ", 1, false);
    paged__j_put_string(run, &buf, s);
    for (; behind > 0 && paged__j_step(run, 1); behind--) paged__j_put(run, &buf, " ", 1, false);
    return paged__j_buffer_value(run, &buf);
}

j_value paged__j_center(paged__j_run *run, const j_string *s, int64_t width) {
    const int64_t n = (int64_t)paged__j_count_chars(s), all = width > n ? width - n : 0,
                  left = all / 2 + (all & width & 1);
    return pad(run, s, left, all - left);
}

j_value paged__j_join_list(paged__j_run *run, const j_string *between, j_value items, bool any) {
    const j_seq *seq = paged__j_iterate(run, items);
    j_buffer buf = {0};
    for (size_t i = 0; seq && i < seq->n && paged__j_step(run, 1); i++) {
        if (i) paged__j_put_string(run, &buf, between);
        if (!any && seq->items[i].kind != J_STRING)
            return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "join: item %zu is a %s, not a string", i,
                                 paged__j_type(seq->items[i]));
        paged__j_put_value(run, &buf, seq->items[i]);
    }
    return paged__j_buffer_value(run, &buf);
}

/* ---- numbers in text ---- */

/* The text without blanks around it and without underscores between digits, into out [400]. */
static bool plain_number(const j_string *text, char out[400]) {
    const j_string s = paged__j_strip(text, NULL, true, true);
    size_t n = 0;
    for (size_t i = 0; i < s.len; i++) {
        const bool inside = i > 0 && i + 1 < s.len && s.bytes[i - 1] != '_';
        if (s.bytes[i] == '_' && inside && s.bytes[i + 1] != '_') continue;
        if (s.bytes[i] == '_' || s.bytes[i] == 0 || n == 399) return false;
        out[n++] = s.bytes[i];
    }
    out[n] = 0;
    return n > 0;
}

bool paged__j_parse_int(const j_string *text, int64_t base, int64_t *out) {
    char s[400], *end;
    if (base < 0 || base == 1 || base > 36 || !plain_number(text, s)) return false;
    const char *digits = s + (s[0] == '-' || s[0] == '+');
    const bool has_prefix = digits[0] == '0' && (digits[1] | 0x20) != 0x20;
    const char mark = has_prefix ? (char)(digits[1] | 0x20) : 0;
    char plain[400];
    int64_t radix = mark == 'x' ? 16 : mark == 'o' ? 8 : mark == 'b' ? 2 : 0;
    if (radix && (base == 0 || base == radix))
        digits += 2;
    else
        radix = base ? base : 10;
    if (*digits == '-' || *digits == '+' || *digits == 0 || (*digits >= 9 && *digits <= 13) || *digits == ' ')
        return false;
    snprintf(plain, sizeof plain, "%s%s", s[0] == '-' ? "-" : "", digits);
    errno = 0;
    *out = strtoll(plain, &end, (int)radix);
    /* strtoll takes 0x with base 16, which Python does too. */
    return *end == 0 && errno == 0;
}

bool paged__j_parse_float(const j_string *text, double *out) {
    char s[400], *end;
    if (!plain_number(text, s) || strpbrk(s, "xXpP(") || (s[0] >= 9 && s[0] <= 13)) return false;
    *out = strtod(s, &end);
    return *end == 0 && end != s;
}

/* ---- format % values ---- */

typedef struct spec {
    bool left, zero, plus, blank;
    int width, precision; /* precision -1: none */
    char kind;
} spec;

/* The text of one number, as C has it too. */
static int number_text(const spec *c, j_value v, char *out, size_t capacity) {
    if (strchr("di", c->kind)) {
        const int64_t i = v.kind == J_FLOAT ? (int64_t)v.f : paged__j_integer(v);
        return snprintf(out, capacity, c->plus ? "%+lld" : c->blank ? "% lld" : "%lld", (long long)i);
    }
    const int precision = c->precision < 0 ? 6 : c->precision;
    return snprintf(out, capacity,
                    c->plus    ? "%+.*f"
                    : c->blank ? "% .*f"
                               : "%.*f",
                    precision, paged__j_real(v));
}

static void put_padded(paged__j_run *run, j_buffer *buf, const spec *c, const j_string *s, bool is_number) {
    int64_t n = (int64_t)c->width - (int64_t)paged__j_count_chars(s);
    const bool zeros = is_number && c->zero && !c->left;
    const bool has_sign = zeros && s->len && strchr("+- ", s->bytes[0]);
    if (has_sign) put_cut(run, buf, s, 0, 1);
    for (; !c->left && n > 0; n--) paged__j_put(run, buf, zeros ? "0" : " ", 1, false);
    put_cut(run, buf, s, has_sign, s->len);
    for (; n > 0; n--) paged__j_put(run, buf, " ", 1, false);
}

static void put_one(paged__j_run *run, j_buffer *buf, const spec *c, j_value v) {
    char text[400];
    if (c->kind == 's' || c->kind == 'r') {
        j_buffer repr = {0};
        if (c->kind == 'r') paged__j_put_repr(run, &repr, v);
        j_string s = c->kind == 'r' ? paged__j_buffer_string(&repr) : paged__j_str(run, v);
        if (run->status) return;
        if (c->precision >= 0) s = paged__j_cut(&s, 0, paged__j_offset(&s, (size_t)c->precision));
        put_padded(run, buf, c, &s, false);
    } else if (!paged__j_is_number(v)) {
        paged__j_fail(run, PAGED_ERR_INVALID_ARG, "%%%c needs a number, not a %s", c->kind, paged__j_type(v));
    } else if (paged__j_real(v) > 1e18 || paged__j_real(v) < -1e18 || paged__j_real(v) != paged__j_real(v)) {
        paged__j_fail(run, PAGED_ERR_LIMIT, "%%%c of a number beyond 1e18", c->kind);
    } else {
        const int n = number_text(c, v, text, sizeof text);
        const j_string s = {.bytes = text, .len = (size_t)n};
        put_padded(run, buf, c, &s, true);
    }
}

/* A number at *pos, at most 300. */
static int take_number(const j_string *f, size_t *pos) {
    int n = 0;
    while (*pos < f->len && f->bytes[*pos] >= '0' && f->bytes[*pos] <= '9') {
        n = n * 10 + (f->bytes[(*pos)++] - '0');
        n = PAGED_MIN(n, 300);
    }
    return n;
}

/* *pos is behind the %. False: not a format that is supported. */
static bool take_spec(const j_string *f, size_t *pos, spec *c) {
    *c = (spec){.precision = -1};
    for (; *pos < f->len && strchr("-0+ ", f->bytes[*pos]) && f->bytes[*pos]; (*pos)++) {
        c->left |= f->bytes[*pos] == '-';
        c->zero |= f->bytes[*pos] == '0';
        c->plus |= f->bytes[*pos] == '+';
        c->blank |= f->bytes[*pos] == ' ';
    }
    c->width = take_number(f, pos);
    if (*pos < f->len && f->bytes[*pos] == '.') {
        (*pos)++;
        c->precision = take_number(f, pos);
    }
    if (*pos == f->len) return false;
    c->kind = f->bytes[(*pos)++];
    return c->kind && strchr("srdif%", c->kind) && !(c->precision >= 0 && strchr("di", c->kind));
}

j_value paged__j_format(paged__j_run *run, const j_string *f, j_value args) {
    const bool many = args.kind == J_SEQ && args.seq->form == J_TUPLE;
    const size_t n = many ? args.seq->n : 1;
    size_t used = 0, from = 0;
    j_buffer buf = {0};
    for (size_t pos = 0; pos < f->len && !run->status;) {
        spec c;
        if (f->bytes[pos] != '%') {
            pos++;
            continue;
        }
        put_cut(run, &buf, f, from, pos++);
        if (!take_spec(f, &pos, &c))
            return paged__j_fail(run, PAGED_ERR_UNSUPPORTED, "a format that is none of %%s %%r %%d %%f");
        from = pos;
        if (c.kind == '%') {
            paged__j_put(run, &buf, "%", 1, false);
            continue;
        }
        if (used == n)
            return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "a format of more than %zu values", n);
        put_one(run, &buf, &c, many ? args.seq->items[used] : args);
        used++;
    }
    if (used != n)
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "a format of %zu values, not %zu", used, n);
    put_cut(run, &buf, f, from, f->len);
    return paged__j_buffer_value(run, &buf);
}

/* ---- methods ---- */

#define METHOD(name)                                                                                         \
    static j_value name(paged__j_run *run, j_value self, const j_value *argv, const j_args *args)
#define UNUSED (void)run, (void)self, (void)argv, (void)args

/* An argument that must be a string; NULL if it was not given or is none. */
static const j_string *text_arg(paged__j_run *run, const char *what, j_value v) {
    if (v.kind == J_STRING) return v.s;
    if (v.kind != J_ABSENT && v.kind != J_NONE)
        paged__j_fail(run, PAGED_ERR_INVALID_ARG, "%s: a %s, not a string", what, paged__j_type(v));
    return NULL;
}

static int64_t int_arg(paged__j_run *run, const char *what, j_value v, int64_t missing) {
    if (v.kind == J_ABSENT) return missing;
    if (v.kind == J_INT || v.kind == J_BOOL) return paged__j_integer(v);
    paged__j_fail(run, PAGED_ERR_INVALID_ARG, "%s: a %s, not an integer", what, paged__j_type(v));
    return missing;
}

static j_value strip(paged__j_run *run, j_value self, j_value chars, bool left, bool right) {
    const j_string *set = text_arg(run, "strip", chars);
    if (!paged__j_step(run, set ? (self.s->len / 64 + 1) * (set->len / 16 + 1) : 1))
        return paged__j_undefined();
    return paged__j_string(run, paged__j_strip(self.s, set, left, right));
}

METHOD(m_strip) {
    UNUSED;
    return strip(run, self, argv[0], true, true);
}
METHOD(m_lstrip) {
    UNUSED;
    return strip(run, self, argv[0], true, false);
}
METHOD(m_rstrip) {
    UNUSED;
    return strip(run, self, argv[0], false, true);
}
METHOD(m_upper) {
    UNUSED;
    return paged__j_set_case(run, self.s, J_UPPER);
}
METHOD(m_lower) {
    UNUSED;
    return paged__j_set_case(run, self.s, J_LOWER);
}
METHOD(m_title) {
    UNUSED;
    return paged__j_set_case(run, self.s, J_TITLE);
}
METHOD(m_capitalize) {
    UNUSED;
    return paged__j_set_case(run, self.s, J_CAPITALIZE);
}

/* At white space, as often as `limit` says (< 0: always). */
static j_value split_space(paged__j_run *run, const j_string *s, int64_t limit, bool from_right) {
    j_value list = paged__j_seq(run, J_LIST);
    j_string rest = *s;
    for (; !run->status; limit--) {
        rest = paged__j_strip(&rest, NULL, !from_right || limit == 0, from_right || limit == 0);
        if (limit == 0 || rest.len == 0) break;
        size_t begin = 0, end = rest.len;
        uint32_t c;
        for (size_t pos = 0, n; pos < rest.len; pos += n) {
            n = paged__j_char(rest.bytes + pos, rest.len - pos, &c);
            if (!paged__j_is_space(c)) continue;
            if (from_right) {
                begin = pos + n;
            } else {
                end = pos;
                break;
            }
        }
        if (!paged__j_step(run, from_right ? rest.len / 64 : end / 64)) break;
        push_cut(run, list, &rest, begin, end);
        rest = from_right ? paged__j_cut(&rest, 0, begin) : paged__j_cut(&rest, end, rest.len);
    }
    /* What a limit left over keeps its inner white space. */
    if (rest.len && !run->status) push_cut(run, list, &rest, 0, rest.len);
    return list;
}

/* The last place of `part` in the first `end` bytes; SIZE_MAX: none, or an error. */
static size_t find_last(paged__j_run *run, const j_string *s, const j_string *part, size_t end) {
    if (part->len > end) return SIZE_MAX;
    size_t at = end - part->len + 1;
    bool found = false;
    while (!found && at > 0) found = part->len == 0 || memcmp(s->bytes + --at, part->bytes, part->len) == 0;
    if (part->len == 0) at = end;
    const size_t looked_at = end - at;
    return paged__j_step(run, (looked_at / 64 + 1) * (part->len / 64 + 1)) && found ? at : SIZE_MAX;
}

static void reverse(j_seq *list) {
    for (size_t i = 0; i < list->n / 2; i++) {
        const j_value v = list->items[i];
        list->items[i] = list->items[list->n - 1 - i];
        list->items[list->n - 1 - i] = v;
    }
}

static j_value split(paged__j_run *run, j_value self, const j_value *argv, bool from_right) {
    const j_string *s = self.s, *by = text_arg(run, "split", argv[0]);
    int64_t limit = int_arg(run, "split", argv[1], -1);
    if (run->status) return paged__j_undefined();
    if (!by) {
        const j_value words = split_space(run, s, limit, from_right);
        if (from_right && words.kind == J_SEQ) reverse(words.seq);
        return words;
    }
    if (by->len == 0) return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "split: an empty separator");
    j_value list = paged__j_seq(run, J_LIST);
    size_t from = 0, to = s->len;
    for (; limit != 0 && paged__j_step(run, 1); limit--) {
        const size_t at = from_right ? find_last(run, s, by, to) : paged__j_find(s, by, from);
        if (at == SIZE_MAX) break;
        if (from_right)
            push_cut(run, list, s, at + by->len, to), to = at;
        else
            push_cut(run, list, s, from, at), from = at + by->len;
    }
    push_cut(run, list, s, from, to);
    if (from_right && !run->status) reverse(list.seq);
    return list;
}

METHOD(m_split) {
    UNUSED;
    return split(run, self, argv, false);
}
METHOD(m_rsplit) {
    UNUSED;
    return split(run, self, argv, true);
}

METHOD(m_splitlines) {
    UNUSED;
    return paged__j_split_lines(run, self.s, argv[0].kind != J_ABSENT && paged__j_truth(argv[0]));
}

static bool has_affix(const j_string *s, const j_string *part, bool at_end) {
    if (part->len > s->len) return false;
    return part->len == 0 ||
           memcmp(s->bytes + (at_end ? s->len - part->len : 0), part->bytes, part->len) == 0;
}

static j_value test_affix(paged__j_run *run, const j_string *s, j_value parts, bool at_end) {
    if (parts.kind == J_STRING) return paged__j_bool(has_affix(s, parts.s, at_end));
    if (parts.kind != J_SEQ || parts.seq->form != J_TUPLE)
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "startswith and endswith need a string, not a %s",
                             paged__j_type(parts));
    for (size_t i = 0; i < parts.seq->n && !run->status; i++) {
        const j_string *part = text_arg(run, "startswith, endswith", parts.seq->items[i]);
        if (part && has_affix(s, part, at_end)) return paged__j_bool(true);
    }
    return paged__j_bool(false);
}

METHOD(m_startswith) {
    UNUSED;
    return test_affix(run, self.s, argv[0], false);
}
METHOD(m_endswith) {
    UNUSED;
    return test_affix(run, self.s, argv[0], true);
}

static j_value remove_affix(paged__j_run *run, j_value self, j_value part, bool at_end) {
    const j_string *text = text_arg(run, "removeprefix, removesuffix", part);
    if (!text || !has_affix(self.s, text, at_end)) return self;
    const size_t n = text->len, len = self.s->len;
    return paged__j_string(run, paged__j_cut(self.s, at_end ? 0 : n, at_end ? len - n : len));
}

METHOD(m_removeprefix) {
    UNUSED;
    return remove_affix(run, self, argv[0], false);
}
METHOD(m_removesuffix) {
    UNUSED;
    return remove_affix(run, self, argv[0], true);
}

METHOD(m_replace) {
    UNUSED;
    const j_string *old = text_arg(run, "replace", argv[0]), *with = text_arg(run, "replace", argv[1]);
    if (!old || !with) return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "replace needs two strings");
    return paged__j_replace(run, self.s, old, with, int_arg(run, "replace", argv[2], -1));
}

static j_value find(paged__j_run *run, j_value self, j_value part, bool last, bool must) {
    const j_string *text = text_arg(run, "find", part);
    if (!text) return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "find needs a string");
    if (!paged__j_step(run, self.s->len / 64)) return paged__j_undefined();
    const size_t at = last ? find_last(run, self.s, text, self.s->len) : paged__j_find(self.s, text, 0);
    if (at == SIZE_MAX && must)
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "index: it is not in the string");
    if (at == SIZE_MAX) return paged__j_int(-1);
    const j_string before = paged__j_cut(self.s, 0, at);
    return paged__j_int((int64_t)paged__j_count_chars(&before));
}

METHOD(m_find) {
    UNUSED;
    return find(run, self, argv[0], false, false);
}
METHOD(m_rfind) {
    UNUSED;
    return find(run, self, argv[0], true, false);
}
METHOD(m_index) {
    UNUSED;
    return find(run, self, argv[0], false, true);
}

METHOD(m_count) {
    UNUSED;
    const j_string *text = text_arg(run, "count", argv[0]);
    if (!text) return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "count needs a string");
    if (text->len == 0) return paged__j_int((int64_t)paged__j_count_chars(self.s) + 1);
    int64_t n = 0;
    for (size_t at = 0; (at = paged__j_find(self.s, text, at)) != SIZE_MAX && paged__j_step(run, 1); n++)
        at += text->len;
    return paged__j_int(n);
}

METHOD(m_join) {
    UNUSED;
    return paged__j_join_list(run, self.s, argv[0], false);
}

static j_value partition(paged__j_run *run, j_value self, j_value by, bool last) {
    const j_string *s = self.s, *text = text_arg(run, "partition", by);
    if (!text || text->len == 0) return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "partition needs a text");
    const size_t at = last ? find_last(run, s, text, s->len) : paged__j_find(s, text, 0);
    const size_t from = at != SIZE_MAX ? at : last ? 0 : s->len, to = at != SIZE_MAX ? at + text->len : from;
    j_value parts = paged__j_seq(run, J_TUPLE);
    push_cut(run, parts, s, 0, from);
    push_cut(run, parts, s, from, to);
    push_cut(run, parts, s, to, s->len);
    return parts;
}

METHOD(m_partition) {
    UNUSED;
    return partition(run, self, argv[0], false);
}
METHOD(m_rpartition) {
    UNUSED;
    return partition(run, self, argv[0], true);
}

METHOD(m_center) {
    UNUSED;
    return paged__j_center(run, self.s, int_arg(run, "center", argv[0], 0));
}

METHOD(m_ljust) {
    UNUSED;
    return pad(run, self.s, 0, int_arg(run, "ljust", argv[0], 0) - (int64_t)paged__j_count_chars(self.s));
}

METHOD(m_rjust) {
    UNUSED;
    return pad(run, self.s, int_arg(run, "rjust", argv[0], 0) - (int64_t)paged__j_count_chars(self.s), 0);
}

typedef enum char_class { IS_DIGIT, IS_ALPHA, IS_ALNUM, IS_SPACE, IS_LOWER, IS_UPPER } char_class;

/* All characters are of the class; for the cases: all that have a case, and one has. */
static bool all_are(const j_string *s, char_class class) {
    bool any = false;
    for (size_t pos = 0, n; pos < s->len; pos += n) {
        uint32_t c;
        n = paged__j_char(s->bytes + pos, s->len - pos, &c);
        const bool digit = c >= '0' && c <= '9', letter = is_letter(c);
        if (class == IS_LOWER || class == IS_UPPER) {
            if (!is_cased(c)) continue;
            any = true;
            if (paged__j_case_of(c, class == IS_UPPER) != c) return false;
            continue;
        }
        const bool ok = class == IS_DIGIT   ? digit
                        : class == IS_ALPHA ? letter
                        : class == IS_ALNUM ? digit || letter
                                            : paged__j_is_space(c);
        if (!ok) return false;
        any = true;
    }
    return any;
}

METHOD(m_isdigit) {
    UNUSED;
    return paged__j_bool(all_are(self.s, IS_DIGIT));
}
METHOD(m_isalpha) {
    UNUSED;
    return paged__j_bool(all_are(self.s, IS_ALPHA));
}
METHOD(m_isalnum) {
    UNUSED;
    return paged__j_bool(all_are(self.s, IS_ALNUM));
}
METHOD(m_isspace) {
    UNUSED;
    return paged__j_bool(all_are(self.s, IS_SPACE));
}
METHOD(m_islower) {
    UNUSED;
    return paged__j_bool(all_are(self.s, IS_LOWER));
}
METHOD(m_isupper) {
    UNUSED;
    return paged__j_bool(all_are(self.s, IS_UPPER));
}

static const j_builtin string_methods[] = {
    {"capitalize", "", 0, m_capitalize},
    {"center", "width", 1, m_center},
    {"count", "sub", 1, m_count},
    {"endswith", "suffix", 1, m_endswith},
    {"find", "sub", 1, m_find},
    {"index", "sub", 1, m_index},
    {"isalnum", "", 0, m_isalnum},
    {"isalpha", "", 0, m_isalpha},
    {"isdigit", "", 0, m_isdigit},
    {"islower", "", 0, m_islower},
    {"isspace", "", 0, m_isspace},
    {"isupper", "", 0, m_isupper},
    {"join", "iterable", 1, m_join},
    {"ljust", "width", 1, m_ljust},
    {"lower", "", 0, m_lower},
    {"lstrip", "chars", 0, m_lstrip},
    {"partition", "sep", 1, m_partition},
    {"removeprefix", "prefix", 1, m_removeprefix},
    {"removesuffix", "suffix", 1, m_removesuffix},
    {"replace", "old new count", 2, m_replace},
    {"rfind", "sub", 1, m_rfind},
    {"rjust", "width", 1, m_rjust},
    {"rpartition", "sep", 1, m_rpartition},
    {"rsplit", "sep maxsplit", 0, m_rsplit},
    {"rstrip", "chars", 0, m_rstrip},
    {"split", "sep maxsplit", 0, m_split},
    {"splitlines", "keepends", 0, m_splitlines},
    {"startswith", "prefix", 1, m_startswith},
    {"strip", "chars", 0, m_strip},
    {"title", "", 0, m_title},
    {"upper", "", 0, m_upper},
};

const j_builtin *paged__j_find_string_method(const j_string *name) {
    return paged__j_find_builtin(string_methods, sizeof string_methods / sizeof string_methods[0], name);
}
