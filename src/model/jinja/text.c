/* model/jinja/text.c: strings with their marks: cutting, searching, and writing values as text.
 *
 * A position is in bytes here; what templates count are characters. Text that is not valid UTF-8 is never
 * refused: a stray byte is a character of its own, and comes out as it came in.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "model/jinja/value.h"
#include "model/vocab.h"

bool paged__j_is(const j_string *s, const char *text) {
    const size_t len = strlen(text);
    return s->len == len && memcmp(s->bytes, text, len) == 0;
}

bool paged__j_same(const j_string *a, const j_string *b) {
    return a->len == b->len && (a->len == 0 || memcmp(a->bytes, b->bytes, a->len) == 0);
}

bool paged__j_raw_at(const j_string *s, size_t i) {
    return s->mask ? s->mask[i] != 0 : s->raw;
}

j_string paged__j_cut(const j_string *s, size_t from, size_t to) {
    return (j_string){
        .bytes = s->bytes + from, .len = to - from, .mask = s->mask ? s->mask + from : NULL, .raw = s->raw};
}

size_t paged__j_char(const char *p, size_t n, uint32_t *code) {
    const uint8_t *b = (const uint8_t *)p;
    const int len = paged__utf8_char(b, n);
    if (len == 1) *code = b[0];
    if (len == 2) *code = (b[0] & 0x1fu) << 6 | (b[1] & 0x3fu);
    if (len == 3) *code = (b[0] & 0x0fu) << 12 | (b[1] & 0x3fu) << 6 | (b[2] & 0x3fu);
    if (len == 4) *code = (b[0] & 0x07u) << 18 | (b[1] & 0x3fu) << 12 | (b[2] & 0x3fu) << 6 | (b[3] & 0x3fu);
    if (len <= 0) *code = 0xdc00u + b[0];
    return len <= 0 ? 1 : (size_t)len;
}

size_t paged__j_count_chars(const j_string *s) {
    size_t n = 0;
    uint32_t code;
    for (size_t pos = 0; pos < s->len; n++) pos += paged__j_char(s->bytes + pos, s->len - pos, &code);
    return n;
}

size_t paged__j_offset(const j_string *s, size_t char_idx) {
    size_t pos = 0;
    uint32_t code;
    while (char_idx-- && pos < s->len) pos += paged__j_char(s->bytes + pos, s->len - pos, &code);
    return pos;
}

bool paged__j_is_space(uint32_t c) {
    return (c >= 9 && c <= 13) || (c >= 28 && c <= 32) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
           c == 0x3000;
}

size_t paged__j_find(const j_string *s, const j_string *part, size_t from) {
    if (from > s->len) return SIZE_MAX;
    if (part->len == 0) return from;
    const char *at = memmem(s->bytes + from, s->len - from, part->bytes, part->len);
    return at ? (size_t)(at - s->bytes) : SIZE_MAX;
}

/* Whether the character is one of `chars`; NULL: white space. */
static bool to_strip(const j_string *chars, const char *p, size_t n, uint32_t code) {
    if (!chars) return paged__j_is_space(code);
    uint32_t other;
    for (size_t pos = 0, m; pos < chars->len; pos += m) {
        m = paged__j_char(chars->bytes + pos, chars->len - pos, &other);
        if (m == n && memcmp(chars->bytes + pos, p, n) == 0) return true;
    }
    return false;
}

j_string paged__j_strip(const j_string *s, const j_string *chars, bool left, bool right) {
    size_t from = 0, to = s->len;
    uint32_t code;
    while (left && from < to) {
        const size_t n = paged__j_char(s->bytes + from, to - from, &code);
        if (!to_strip(chars, s->bytes + from, n, code)) break;
        from += n;
    }
    while (right && from < to) {
        size_t last = to - 1;
        /* Back to a lead byte from which the characters end exactly here. */
        while (last > from && to - last < 4 && ((uint8_t)s->bytes[last] & 0xc0) == 0x80) last--;
        size_t n = paged__j_char(s->bytes + last, to - last, &code);
        if (last + n != to) {
            last = to - 1;
            n = paged__j_char(s->bytes + last, 1, &code);
        }
        if (!to_strip(chars, s->bytes + last, n, code)) break;
        to = last;
    }
    return paged__j_cut(s, from, to);
}

/* ---- buffers ---- */

/* Room for n more bytes; false after an error. */
static bool reserve(paged__j_run *run, j_buffer *buf, size_t n) {
    if (!paged__j_step(run, n / 64)) return false;
    if (n <= buf->cap - buf->len) return true;
    if (n > run->limits.memory_bytes) {
        paged__j_fail(run, PAGED_ERR_LIMIT, "a text of %zu bytes is too long", n);
        return false;
    }
    const size_t cap = PAGED_MAX(buf->cap * 2, buf->len + n + 32);
    char *bytes = paged__j_alloc(run, cap, 1);
    uint8_t *mask = paged__j_alloc(run, cap, 1);
    if (!bytes || !mask) return false;
    if (buf->len) {
        memcpy(bytes, buf->bytes, buf->len);
        memcpy(mask, buf->mask, buf->len);
    }
    buf->bytes = bytes;
    buf->mask = mask;
    buf->cap = cap;
    return true;
}

void paged__j_put(paged__j_run *run, j_buffer *buf, const char *bytes, size_t len, bool raw) {
    if (len == 0 || !reserve(run, buf, len)) return;
    memcpy(buf->bytes + buf->len, bytes, len);
    memset(buf->mask + buf->len, raw, len);
    buf->len += len;
}

void paged__j_put_string(paged__j_run *run, j_buffer *buf, const j_string *s) {
    if (s->len == 0 || !reserve(run, buf, s->len)) return;
    memcpy(buf->bytes + buf->len, s->bytes, s->len);
    if (s->mask)
        memcpy(buf->mask + buf->len, s->mask, s->len);
    else
        memset(buf->mask + buf->len, s->raw, s->len);
    buf->len += s->len;
}

void paged__j_put_code(paged__j_run *run, j_buffer *buf, uint32_t c, bool raw) {
    char b[4];
    if (c < 0x80) {
        b[0] = (char)c;
        paged__j_put(run, buf, b, 1, raw);
    } else if (c < 0x800) {
        b[0] = (char)(0xc0 | c >> 6);
        b[1] = (char)(0x80 | (c & 0x3f));
        paged__j_put(run, buf, b, 2, raw);
    } else if (c < 0x10000) {
        b[0] = (char)(0xe0 | c >> 12);
        b[1] = (char)(0x80 | (c >> 6 & 0x3f));
        b[2] = (char)(0x80 | (c & 0x3f));
        paged__j_put(run, buf, b, 3, raw);
    } else {
        b[0] = (char)(0xf0 | c >> 18);
        b[1] = (char)(0x80 | (c >> 12 & 0x3f));
        b[2] = (char)(0x80 | (c >> 6 & 0x3f));
        b[3] = (char)(0x80 | (c & 0x3f));
        paged__j_put(run, buf, b, 4, raw);
    }
}

j_string paged__j_buffer_string(const j_buffer *buf) {
    const bool all_raw = buf->len && !memchr(buf->mask, 0, buf->len),
               none_raw = !buf->len || !memchr(buf->mask, 1, buf->len);
    return (j_string){.bytes = buf->len ? buf->bytes : "",
                      .len = buf->len,
                      .mask = all_raw || none_raw ? NULL : buf->mask,
                      .raw = all_raw};
}

j_value paged__j_buffer_value(paged__j_run *run, const j_buffer *buf) {
    return run->status ? paged__j_undefined() : paged__j_string(run, paged__j_buffer_string(buf));
}

/* ---- values as text ---- */

size_t paged__j_format_float(double f, char out[40]) {
    if (isnan(f)) return (size_t)snprintf(out, 40, "nan");
    if (isinf(f)) return (size_t)snprintf(out, 40, f < 0 ? "-inf" : "inf");
    /* The shortest digits that give the same number. */
    char digits[40];
    int precision = 0;
    do snprintf(digits, sizeof digits, "%.*e", precision, f);
    while (strtod(digits, NULL) != f && precision++ < 17);
    const int exponent = atoi(strchr(digits, 'e') + 1);
    if (exponent >= -4 && exponent < 16) {
        const int n = snprintf(out, 40, "%.*f", PAGED_MAX(precision - exponent, 0), f);
        return (size_t)n + (strchr(out, '.') ? 0 : (size_t)snprintf(out + n, 40 - (size_t)n, ".0"));
    }
    return (size_t)snprintf(out, 40, "%s", digits);
}

/* Characters that repr() writes as escapes: no letters, marks, numbers, punctuation or symbols. */
static bool is_printable(uint32_t c) {
    if (c < 0x7f) return c >= 0x20;
    if (c <= 0xa0 || c == 0xad || paged__j_is_space(c)) return false;
    if (c >= 0x200b && c <= 0x200f) return false;
    if ((c >= 0x202a && c <= 0x202e) || (c >= 0x2060 && c <= 0x206f) || c == 0xfeff) return false;
    return !(c >= 0xd800 && c <= 0xf8ff) && c < 0xe0000;
}

static void repr_string(paged__j_run *run, j_buffer *buf, const j_string *s) {
    const bool has_single = s->len && memchr(s->bytes, '\'', s->len),
               has_double = s->len && memchr(s->bytes, '"', s->len);
    const char quote = has_single && !has_double ? '"' : '\'';
    paged__j_put(run, buf, &quote, 1, false);
    for (size_t pos = 0, n; pos < s->len && !run->status; pos += n) {
        uint32_t c;
        char escape[12];
        n = paged__j_char(s->bytes + pos, s->len - pos, &c);
        int len = 0;
        if (c == '\n' || c == '\r' || c == '\t')
            len = snprintf(escape, sizeof escape, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
        else if (c == '\\' || c == (uint32_t)quote)
            len = snprintf(escape, sizeof escape, "\\%c", (char)c);
        else if (!is_printable(c))
            len = snprintf(escape, sizeof escape,
                           c < 0x100     ? "\\x%02x"
                           : c < 0x10000 ? "\\u%04x"
                                         : "\\U%08x",
                           (unsigned)c);
        if (len) {
            paged__j_put(run, buf, escape, (size_t)len, paged__j_raw_at(s, pos));
        } else {
            const j_string one = paged__j_cut(s, pos, pos + n);
            paged__j_put_string(run, buf, &one);
        }
    }
    paged__j_put(run, buf, &quote, 1, false);
}

static void put_text(paged__j_run *run, j_buffer *buf, const char *text) {
    paged__j_put(run, buf, text, strlen(text), false);
}

static void repr_seq(paged__j_run *run, j_buffer *buf, const j_seq *seq) {
    static const char *const open[] = {[J_LIST] = "[",
                                       [J_TUPLE] = "(",
                                       [J_KEYS] = "dict_keys([",
                                       [J_VALUES] = "dict_values([",
                                       [J_ITEMS] = "dict_items(["};
    put_text(run, buf, open[seq->form]);
    for (size_t i = 0; i < seq->n && !run->status; i++) {
        if (i) put_text(run, buf, ", ");
        paged__j_put_repr(run, buf, seq->items[i]);
    }
    if (seq->form == J_TUPLE && seq->n == 1) put_text(run, buf, ",");
    put_text(run, buf, seq->form == J_LIST ? "]" : seq->form == J_TUPLE ? ")" : "])");
}

static void repr_dict(paged__j_run *run, j_buffer *buf, const j_dict *dict) {
    put_text(run, buf, "{");
    for (size_t i = 0; i < dict->n && !run->status; i++) {
        if (i) put_text(run, buf, ", ");
        paged__j_put_repr(run, buf, dict->entries[i].key);
        put_text(run, buf, ": ");
        paged__j_put_repr(run, buf, dict->entries[i].value);
    }
    put_text(run, buf, "}");
}

void paged__j_put_repr(paged__j_run *run, j_buffer *buf, j_value v) {
    char number[40];
    if (!paged__j_step(run, 1)) return;
    if (run->value_depth >= J_VALUE_DEPTH) {
        paged__j_fail(run, PAGED_ERR_LIMIT, "a value is nested deeper than %d", J_VALUE_DEPTH);
        return;
    }
    run->value_depth++;
    switch (v.kind) {
    case J_UNDEFINED:
        put_text(run, buf, "Undefined");
        break;
    case J_NONE:
        put_text(run, buf, "None");
        break;
    case J_BOOL:
        put_text(run, buf, v.b ? "True" : "False");
        break;
    case J_INT:
        snprintf(number, sizeof number, "%lld", (long long)v.i);
        put_text(run, buf, number);
        break;
    case J_FLOAT:
        paged__j_put(run, buf, number, paged__j_format_float(v.f, number), false);
        break;
    case J_STRING:
        repr_string(run, buf, v.s);
        break;
    case J_SEQ:
        if (v.seq->form == J_RANGE || v.seq->form == J_ITERATOR)
            paged__j_fail(run, PAGED_ERR_UNSUPPORTED, "a %s cannot be written as text", paged__j_type(v));
        else
            repr_seq(run, buf, v.seq);
        break;
    case J_DICT:
        repr_dict(run, buf, v.dict);
        break;
    case J_NAMESPACE:
        put_text(run, buf, "<Namespace ");
        repr_dict(run, buf, v.dict);
        put_text(run, buf, ">");
        break;
    default:
        paged__j_fail(run, PAGED_ERR_UNSUPPORTED, "a %s cannot be written as text", paged__j_type(v));
    }
    run->value_depth--;
}

void paged__j_put_value(paged__j_run *run, j_buffer *buf, j_value v) {
    if (v.kind == J_STRING)
        paged__j_put_string(run, buf, v.s);
    else if (v.kind != J_UNDEFINED)
        paged__j_put_repr(run, buf, v);
}

j_string paged__j_str(paged__j_run *run, j_value v) {
    if (v.kind == J_STRING) return *v.s;
    j_buffer buf = {0};
    paged__j_put_value(run, &buf, v);
    return run->status ? (j_string){.bytes = ""} : paged__j_buffer_string(&buf);
}
