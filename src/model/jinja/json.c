/* model/jinja/json.c: JSON in, as the values of variables, and JSON out, as Python's json.dumps writes it.
 *
 * What is read is raw: strings keep the mark in all that is made of them. Reading recurses at most
 * J_VALUE_DEPTH deep and refuses what is not JSON; the last of equal keys counts, at the place of the first.
 * Integers beyond 64 bits become floats.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "model/jinja/value.h"

/* ---- reading ---- */

enum { KEYS_MAX = 10000 }; /* of one object: each new key is compared with all others */

typedef struct reader {
    paged__j_run *run;
    const char *p, *begin, *end;
    int depth;
} reader;

static j_value bad(reader *r, const char *what) {
    return paged__j_fail(r->run, PAGED_ERR_FORMAT, "JSON, byte %td: %s", r->p - r->begin, what);
}

static void skip_space(reader *r) {
    while (r->p < r->end && (*r->p == ' ' || *r->p == '\t' || *r->p == '\n' || *r->p == '\r')) r->p++;
}

static bool take(reader *r, char c) {
    skip_space(r);
    if (r->p == r->end || *r->p != c) return false;
    r->p++;
    return true;
}

static bool hex4(reader *r, uint32_t *out) {
    *out = 0;
    if (r->end - r->p < 4) return false;
    for (int i = 0; i < 4; i++, r->p++) {
        const char c = *r->p;
        const int digit = c >= '0' && c <= '9'   ? c - '0'
                          : c >= 'a' && c <= 'f' ? c - 'a' + 10
                          : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                 : -1;
        if (digit < 0) return false;
        *out = *out * 16 + (uint32_t)digit;
    }
    return true;
}

/* \uXXXX; a surrogate without its other half becomes U+FFFD. */
static bool read_unicode(reader *r, j_buffer *buf) {
    uint32_t code, low;
    if (!hex4(r, &code)) return false;
    if (code >= 0xd800 && code < 0xdc00 && r->end - r->p >= 6 && r->p[0] == '\\' && r->p[1] == 'u') {
        const char *back = r->p;
        r->p += 2;
        if (hex4(r, &low) && low >= 0xdc00 && low < 0xe000)
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        else
            r->p = back;
    }
    if (code >= 0xd800 && code < 0xe000) code = 0xfffd;
    paged__j_put_code(r->run, buf, code, true);
    return true;
}

static bool read_escape(reader *r, j_buffer *buf) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char *at = r->p < r->end && *r->p ? strchr(from, *r->p) : NULL;
    if (at) {
        r->p++;
        paged__j_put(r->run, buf, &to[at - from], 1, true);
        return true;
    }
    if (r->p == r->end || *r->p != 'u') return false;
    r->p++;
    return read_unicode(r, buf);
}

/* r->p is behind the quote. */
static j_value read_string(reader *r) {
    const char *from = r->p;
    while (r->p < r->end && *r->p != '"' && *r->p != '\\' && (uint8_t)*r->p >= 0x20) r->p++;
    if (r->p < r->end && *r->p == '"')
        return paged__j_string(r->run,
                               (j_string){.bytes = from, .len = (size_t)(r->p++ - from), .raw = true});
    j_buffer buf = {0};
    for (;;) {
        paged__j_put(r->run, &buf, from, (size_t)(r->p - from), true);
        if (r->run->status) return paged__j_undefined();
        if (r->p == r->end || (uint8_t)*r->p < 0x20) return bad(r, "the string does not end");
        if (*r->p++ == '"') return paged__j_buffer_value(r->run, &buf);
        if (!read_escape(r, &buf)) return bad(r, "an unknown escape in a string");
        from = r->p;
        while (r->p < r->end && *r->p != '"' && *r->p != '\\' && (uint8_t)*r->p >= 0x20) r->p++;
    }
}

static bool is_digit(const reader *r) {
    return r->p < r->end && *r->p >= '0' && *r->p <= '9';
}

static j_value read_number(reader *r) {
    const char *from = r->p;
    bool whole = true, ok;
    if (r->p < r->end && *r->p == '-') r->p++;
    ok = is_digit(r);
    if (ok && *r->p == '0')
        r->p++;
    else
        while (is_digit(r)) r->p++;
    if (ok && r->p < r->end && *r->p == '.') {
        whole = false;
        r->p++;
        ok = is_digit(r);
        while (is_digit(r)) r->p++;
    }
    if (ok && r->p < r->end && (*r->p == 'e' || *r->p == 'E')) {
        whole = false;
        r->p++;
        if (r->p < r->end && (*r->p == '+' || *r->p == '-')) r->p++;
        ok = is_digit(r);
        while (is_digit(r)) r->p++;
    }
    if (!ok) return bad(r, "no value here");
    /* strtod needs an end, and numbers are short. */
    char text[400];
    const size_t n = (size_t)(r->p - from);
    if (n >= sizeof text) return bad(r, "a number of more than 399 characters");
    memcpy(text, from, n);
    text[n] = 0;
    errno = 0;
    const long long integer = whole ? strtoll(text, NULL, 10) : 0;
    if (whole && errno == 0) return paged__j_int(integer);
    return paged__j_float(strtod(text, NULL));
}

static j_value read_value(reader *r);

static j_value read_array(reader *r) {
    j_value list = paged__j_seq(r->run, J_LIST);
    if (take(r, ']')) return list;
    do {
        paged__j_push(r->run, list, read_value(r));
        if (r->run->status) return paged__j_undefined();
    } while (take(r, ','));
    return take(r, ']') ? list : bad(r, "no , or ] after an item");
}

static j_value read_object(reader *r) {
    j_value object = paged__j_dict(r->run);
    if (r->run->status || take(r, '}')) return object;
    do {
        if (!take(r, '"')) return bad(r, "no key here");
        const j_value key = read_string(r);
        if (r->run->status) return key;
        if (!take(r, ':')) return bad(r, "no : after a key");
        paged__j_dict_set(r->run, object.dict, key, read_value(r));
        if (r->run->status) return paged__j_undefined();
        if (object.dict->n > KEYS_MAX)
            return paged__j_fail(r->run, PAGED_ERR_LIMIT, "a JSON object has more than %d keys", KEYS_MAX);
    } while (take(r, ','));
    return take(r, '}') ? object : bad(r, "no , or } after a value");
}

static bool take_word(reader *r, const char *word) {
    const size_t n = strlen(word);
    if ((size_t)(r->end - r->p) < n || memcmp(r->p, word, n) != 0) return false;
    r->p += n;
    return true;
}

static j_value read_value(reader *r) {
    if (!paged__j_step(r->run, 1)) return paged__j_undefined();
    if (r->depth == J_VALUE_DEPTH - 8)
        return paged__j_fail(r->run, PAGED_ERR_LIMIT, "JSON is nested deeper than %d", J_VALUE_DEPTH - 8);
    r->depth++;
    j_value v;
    if (take(r, '{'))
        v = read_object(r);
    else if (take(r, '['))
        v = read_array(r);
    else if (take(r, '"'))
        v = read_string(r);
    else if (take_word(r, "true"))
        v = paged__j_bool(true);
    else if (take_word(r, "false"))
        v = paged__j_bool(false);
    else if (take_word(r, "null"))
        v = paged__j_none();
    else
        v = read_number(r);
    r->depth--;
    return v;
}

j_value paged__j_read_json(paged__j_run *run, const char *json, size_t len) {
    reader r = {.run = run, .p = json, .begin = json, .end = json + len};
    const j_value v = read_value(&r);
    skip_space(&r);
    return !run->status && r.p != r.end ? bad(&r, "something follows the value") : v;
}

/* ---- writing ---- */

typedef struct writer {
    paged__j_run *run;
    j_buffer *buf;
    j_string indent, comma, colon; /* indent: of one level, used if `lines` */
    bool lines, ascii, sorted;
} writer;

static void put(writer *w, const char *text) {
    paged__j_put(w->run, w->buf, text, strlen(text), false);
}

static void put_string(writer *w, const j_string *s) {
    put(w, "\"");
    for (size_t pos = 0, n; pos < s->len && !w->run->status; pos += n) {
        static const char special[] = "\"\\\n\r\t\f\b", letters[] = "\"\\nrtfb";
        uint32_t c;
        char escape[16];
        n = paged__j_char(s->bytes + pos, s->len - pos, &c);
        const char *at = c && c < 0x80 ? strchr(special, (char)c) : NULL;
        int len = 0;
        if (at)
            len = snprintf(escape, sizeof escape, "\\%c", letters[at - special]);
        else if (c >= 0x10000 && w->ascii)
            len = snprintf(escape, sizeof escape, "\\u%04x\\u%04x", (unsigned)(0xd7c0 + (c >> 10)),
                           (unsigned)(0xdc00 + (c & 0x3ff)));
        else if (c < 0x20 || (c >= 0x7f && w->ascii && c != 0x7f))
            len = snprintf(escape, sizeof escape, "\\u%04x", (unsigned)c);
        if (len) {
            paged__j_put(w->run, w->buf, escape, (size_t)len, paged__j_raw_at(s, pos));
        } else {
            const j_string one = paged__j_cut(s, pos, pos + n);
            paged__j_put_string(w->run, w->buf, &one);
        }
    }
    put(w, "\"");
}

static void put_float(writer *w, double f) {
    char text[40];
    paged__j_format_float(f, text);
    put(w, isnan(f) ? "NaN" : isinf(f) ? (f < 0 ? "-Infinity" : "Infinity") : text);
}

static void new_line(writer *w) {
    if (!w->lines) return;
    put(w, "\n");
    for (int32_t i = 0; i < w->run->value_depth && !w->run->status; i++)
        paged__j_put_string(w->run, w->buf, &w->indent);
}

/* A key that is no string, as json.dumps turns it into one. */
static void put_key(writer *w, j_value key) {
    char text[40];
    switch (key.kind) {
    case J_STRING:
        put_string(w, key.s);
        return;
    case J_NONE:
        put(w, "\"null\"");
        return;
    case J_BOOL:
        put(w, key.b ? "\"true\"" : "\"false\"");
        return;
    case J_INT:
        snprintf(text, sizeof text, "\"%lld\"", (long long)key.i);
        put(w, text);
        return;
    case J_FLOAT:
        put(w, "\"");
        put_float(w, key.f);
        put(w, "\"");
        return;
    default:
        paged__j_fail(w->run, PAGED_ERR_INVALID_ARG, "tojson: a %s is no key", paged__j_type(key));
    }
}

/* The index of the next entry by key after the one at `last` (SIZE_MAX: the first). Quadratic, and its
 * steps are counted. */
static size_t next_sorted(writer *w, const j_dict *d, size_t last) {
    size_t best = SIZE_MAX;
    for (size_t i = 0; i < d->n && paged__j_step(w->run, 1); i++) {
        if (last != SIZE_MAX && paged__j_compare(w->run, d->entries[i].key, d->entries[last].key) <= 0)
            continue;
        if (best == SIZE_MAX || paged__j_compare(w->run, d->entries[i].key, d->entries[best].key) < 0)
            best = i;
    }
    return best == SIZE_MAX ? 0 : best;
}

static void put_any(writer *w, j_value v);

static void put_dict(writer *w, const j_dict *d) {
    size_t at = SIZE_MAX;
    put(w, "{");
    for (size_t i = 0; i < d->n && !w->run->status; i++) {
        at = w->sorted ? next_sorted(w, d, at) : i;
        if (i) paged__j_put_string(w->run, w->buf, &w->comma);
        new_line(w);
        put_key(w, d->entries[at].key);
        paged__j_put_string(w->run, w->buf, &w->colon);
        put_any(w, d->entries[at].value);
    }
    w->run->value_depth--;
    if (d->n) new_line(w);
    w->run->value_depth++;
    put(w, "}");
}

static void put_seq(writer *w, const j_seq *seq) {
    put(w, "[");
    for (size_t i = 0; i < seq->n && !w->run->status; i++) {
        if (i) paged__j_put_string(w->run, w->buf, &w->comma);
        new_line(w);
        put_any(w, seq->items[i]);
    }
    w->run->value_depth--;
    if (seq->n) new_line(w);
    w->run->value_depth++;
    put(w, "]");
}

static void put_any(writer *w, j_value v) {
    char text[40];
    if (!paged__j_step(w->run, 1)) return;
    if (w->run->value_depth >= J_VALUE_DEPTH) {
        paged__j_fail(w->run, PAGED_ERR_LIMIT, "tojson: a value is nested deeper than %d", J_VALUE_DEPTH);
        return;
    }
    w->run->value_depth++;
    switch (v.kind) {
    case J_NONE:
        put(w, "null");
        break;
    case J_BOOL:
        put(w, v.b ? "true" : "false");
        break;
    case J_INT:
        snprintf(text, sizeof text, "%lld", (long long)v.i);
        put(w, text);
        break;
    case J_FLOAT:
        put_float(w, v.f);
        break;
    case J_STRING:
        put_string(w, v.s);
        break;
    case J_DICT:
        put_dict(w, v.dict);
        break;
    case J_SEQ:
        if (v.seq->form <= J_TUPLE) {
            put_seq(w, v.seq);
            break;
        } /* fall through */
    default:
        paged__j_fail(w->run, PAGED_ERR_INVALID_ARG, "tojson: a %s is not JSON", paged__j_type(v));
    }
    w->run->value_depth--;
}

/* argv: ensure_ascii, indent, separators, sort_keys. */
void paged__j_write_json(paged__j_run *run, j_buffer *buf, j_value v, const j_value *argv) {
    writer w = {.run = run, .buf = buf, .ascii = paged__j_truth(argv[0]) && argv[0].kind != J_ABSENT};
    w.sorted = argv[3].kind != J_ABSENT && paged__j_truth(argv[3]);
    w.comma = (j_string){.bytes = ", ", .len = 2};
    w.colon = (j_string){.bytes = ": ", .len = 2};
    j_buffer blanks = {0};
    if (argv[1].kind == J_STRING) {
        w.lines = true;
        w.indent = *argv[1].s;
    } else if (argv[1].kind == J_INT || argv[1].kind == J_BOOL) {
        w.lines = true;
        for (int64_t i = 0; i < paged__j_integer(argv[1]) && !run->status; i++)
            paged__j_put(run, &blanks, " ", 1, false);
        w.indent = paged__j_buffer_string(&blanks);
    } else if (argv[1].kind != J_ABSENT && argv[1].kind != J_NONE) {
        paged__j_fail(run, PAGED_ERR_INVALID_ARG, "tojson: indent is a %s", paged__j_type(argv[1]));
    }
    if (w.lines) w.comma.len = 1;
    if (argv[2].kind != J_ABSENT && argv[2].kind != J_NONE) {
        const j_seq *seq = argv[2].kind == J_SEQ ? argv[2].seq : NULL;
        if (!seq || seq->n != 2 || seq->items[0].kind != J_STRING || seq->items[1].kind != J_STRING) {
            paged__j_fail(run, PAGED_ERR_INVALID_ARG, "tojson: separators must be two strings");
            return;
        }
        w.comma = *seq->items[0].s;
        w.colon = *seq->items[1].s;
    }
    const int32_t depth = run->value_depth;
    run->value_depth = 0; /* it is the indent */
    put_any(&w, v);
    run->value_depth = depth;
}
