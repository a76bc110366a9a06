/* server/http.c: see http.h. The head is collected whole and then cut into strings; the body is copied as it
 * comes. */
#include "server/http.h"

#include <string.h>
#include <strings.h>

#include "base/base.h"

static void fail(paged__http *h, int status, const char *error) {
    h->state = PAGED__HTTP_FAILED;
    h->status = status;
    h->error = error;
}

/* ---- the head ---- */

static bool is_token_char(char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           (c && strchr("!#$%&'*+-.^_`|~", c));
}

static size_t token_len(const char *text) {
    size_t n = 0;
    while (is_token_char(text[n])) n++;
    return n;
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    const char lower = (char)(c | 0x20);
    return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

/* In place; false: not percent-encoded as it should be, or a NUL. */
static bool decode(char *text) {
    char *out = text;
    for (const char *in = text; *in; in++) {
        if (*in != '%') {
            *out++ = *in;
            continue;
        }
        const int high = hex_digit(in[1]), low = high < 0 ? -1 : hex_digit(in[2]);
        if (low < 0 || high * 16 + low == 0) return false;
        *out++ = (char)(high * 16 + low);
        in += 2;
    }
    *out = 0;
    return true;
}

/* METHOD SP TARGET SP HTTP/1.x */
static bool cut_request_line(paged__http *h, char *line) {
    const size_t n = token_len(line);
    char *target = line + n;
    if (n == 0 || *target != ' ') return fail(h, 400, "no request line"), false;
    *target++ = 0;
    char *version = strchr(target, ' ');
    if (!version) return fail(h, 400, "no HTTP version in the request line"), false;
    *version++ = 0;
    if (strncmp(version, "HTTP/", 5) != 0) return fail(h, 400, "no HTTP version in the request line"), false;
    h->is_1_0 = strcmp(version, "HTTP/1.0") == 0;
    if (!h->is_1_0 && strcmp(version, "HTTP/1.1") != 0)
        return fail(h, 505, "HTTP/1.1 and HTTP/1.0 are spoken here"), false;
    h->keep_alive = !h->is_1_0;
    h->method = line;
    /* A proxy may send the absolute form. */
    if (strncasecmp(target, "http://", 7) == 0) {
        target += 7 + strcspn(target + 7, "/?");
        if (*target == '?') return fail(h, 400, "the target has no path"), false;
        if (!*target) *--target = '/'; /* in the place of the host's end, as the path is decoded in place */
    }
    const bool is_star = strcmp(target, "*") == 0 && strcmp(h->method, "OPTIONS") == 0;
    if (*target != '/' && !is_star) return fail(h, 400, "the target must be a path"), false;
    char *query = strchr(target, '?');
    if (query) *query++ = 0;
    h->query = query ? query : "";
    h->path = target;
    for (const char *c = target; *c; c++)
        if ((unsigned char)*c <= ' ' || (unsigned char)*c >= 0x7f)
            return fail(h, 400, "the path is not percent-encoded"), false;
    if (!decode(h->path)) return fail(h, 400, "the path is not percent-encoded as it should be"), false;
    return true;
}

static bool cut_header(paged__http *h, char *line) {
    const size_t n = token_len(line);
    char *value = line + n;
    if (n == 0 || *value != ':') return fail(h, 400, "a header without a name, or a folded one"), false;
    if (h->n_headers == PAGED__HEADERS_MAX) return fail(h, 431, "too many headers"), false;
    *value++ = 0;
    value += strspn(value, " \t");
    char *end = value + strlen(value);
    while (end > value && (end[-1] == ' ' || end[-1] == '\t')) *--end = 0;
    for (const char *c = value; *c; c++)
        if (((unsigned char)*c < ' ' && *c != '\t') || *c == 0x7f)
            return fail(h, 400, "a control character in a header"), false;
    h->headers[h->n_headers].name = line;
    h->headers[h->n_headers++].value = value;
    return true;
}

static bool take_length(paged__http *h, const char *value, bool *has_length) {
    size_t n = 0;
    if (!*value) return fail(h, 400, "Content-Length is no number"), false;
    for (const char *c = value; *c; c++) {
        if (*c < '0' || *c > '9') return fail(h, 400, "Content-Length is no number"), false;
        if (!paged__mul(n, 10, &n) || !paged__add(n, (size_t)(*c - '0'), &n)) n = SIZE_MAX / 16;
    }
    if (*has_length && n != h->n_left) return fail(h, 400, "two values of Content-Length"), false;
    *has_length = true;
    h->n_left = n;
    return true;
}

/* One of the words of a list such as "keep-alive, Upgrade". */
static bool has_word(const char *list, const char *word) {
    const size_t n = strlen(word);
    for (const char *c = list; *c; c += strcspn(c, ","), c += *c == ',') {
        c += strspn(c, " \t");
        if (strncasecmp(c, word, n) == 0 && strchr(" \t,", c[n])) return true;
    }
    return false;
}

/* What the headers say about the connection and the length of the body. */
static bool read_headers(paged__http *h) {
    bool has_length = false;
    int32_t n_hosts = 0;
    for (int32_t i = 0; i < h->n_headers; i++) {
        const char *name = h->headers[i].name, *value = h->headers[i].value;
        if (strcasecmp(name, "Host") == 0) n_hosts++;
        if (strcasecmp(name, "Content-Length") == 0 && !take_length(h, value, &has_length)) return false;
        if (strcasecmp(name, "Transfer-Encoding") == 0) {
            if (strcasecmp(value, "chunked") != 0 || h->chunked)
                return fail(h, 501, "Transfer-Encoding can be chunked only"), false;
            h->chunked = true;
        }
        if (strcasecmp(name, "Connection") == 0) {
            if (has_word(value, "close")) h->keep_alive = false;
            if (has_word(value, "keep-alive") && h->is_1_0) h->keep_alive = true;
        }
        if (strcasecmp(name, "Expect") == 0) {
            if (strcasecmp(value, "100-continue") != 0) return fail(h, 417, "unknown expectation"), false;
            h->expects_continue = !h->is_1_0;
        }
    }
    /* Two readings of one length are how requests are smuggled past a proxy. */
    if (h->chunked && (has_length || h->is_1_0))
        return fail(h, 400, "Transfer-Encoding beside Content-Length, or in HTTP/1.0"), false;
    if (n_hosts > 1 || (n_hosts == 0 && !h->is_1_0)) return fail(h, 400, "one Host header is needed"), false;
    if (h->n_left > h->body_max) return fail(h, 413, "the body is too large"), false;
    return true;
}

static void end_head(paged__http *h) {
    h->head.data[h->head.len - 4] = 0; /* of the CRLF CRLF */
    if (memchr(h->head.data, 0, h->head.len - 4)) {
        fail(h, 400, "a NUL in the head");
        return;
    }
    char *line = h->head.data;
    for (bool first = true; line; first = false) {
        char *end = strstr(line, "\r\n");
        if (end) *end = 0;
        if (strpbrk(line, "\r\n")) {
            fail(h, 400, "a line that does not end in CRLF");
            return;
        }
        if (!(first ? cut_request_line(h, line) : cut_header(h, line))) return;
        line = end ? end + 2 : NULL;
    }
    if (!read_headers(h)) return;
    h->state = h->chunked ? PAGED__HTTP_CHUNK_SIZE : h->n_left ? PAGED__HTTP_BODY : PAGED__HTTP_DONE;
}

/* Byte by byte, so that the end is found wherever the pieces are cut. */
static size_t feed_head(paged__http *h, const char *data, size_t n) {
    for (size_t i = 0; i < n; i++) {
        /* A blank line before a request is left over from the one before it (RFC 9112, 2.2). */
        if (h->head.len == 0 && (data[i] == '\r' || data[i] == '\n')) {
            if (++h->n_overhead > 64) return fail(h, 400, "blank lines instead of a request"), i + 1;
            continue;
        }
        if (h->head.len == PAGED__HEAD_MAX) return fail(h, 431, "the head is too large"), i;
        if (!paged__buffer_append(&h->head, data + i, 1)) return fail(h, 503, "no memory"), i;
        if (data[i] == '\n' && h->head.len >= 4 &&
            memcmp(h->head.data + h->head.len - 4, "\r\n\r\n", 4) == 0) {
            h->n_overhead = 0;
            end_head(h);
            return i + 1;
        }
    }
    return n;
}

/* ---- the body ---- */

static size_t feed_body(paged__http *h, const char *data, size_t n) {
    const size_t take = PAGED_MIN(n, h->n_left);
    if (!paged__buffer_append(&h->body, data, take)) return fail(h, 503, "no memory for the body"), 0;
    h->n_left -= take;
    if (h->n_left == 0) h->state = h->chunked ? PAGED__HTTP_CHUNK_END : PAGED__HTTP_DONE;
    return take;
}

/* "1a;name=value": the extension is not looked at. */
static void end_chunk_size(paged__http *h) {
    size_t size = 0, i = 0;
    for (; i < h->n_line && hex_digit(h->line[i]) >= 0; i++) {
        if (i == 8) {
            fail(h, 413, "a chunk is too large");
            return;
        }
        size = size * 16 + (size_t)hex_digit(h->line[i]);
    }
    if (i == 0 || (i < h->n_line && !strchr("; \t", h->line[i]))) {
        fail(h, 400, "a chunk without a size");
        return;
    }
    if (size > h->body_max - h->body.len) {
        fail(h, 413, "the body is too large");
        return;
    }
    h->n_line = 0;
    h->n_left = size;
    h->state = size ? PAGED__HTTP_CHUNK_DATA : PAGED__HTTP_TRAILER;
}

/* One byte of what stands between the data of chunks. */
static void feed_frame(paged__http *h, char c) {
    /* Chunks of one byte cost five more: what they may cost together grows with the data. */
    if (++h->n_overhead > PAGED__HEAD_MAX + 8 * h->body.len) {
        fail(h, 431, "more chunk headers or trailers than data");
        return;
    }
    if (h->state == PAGED__HTTP_CHUNK_END) {
        const char wanted = h->n_line == 0 ? '\r' : '\n';
        if (c != wanted) {
            fail(h, 400, "a chunk that does not end where it says");
        } else if (h->n_line++ == 1) {
            h->n_line = 0;
            h->state = PAGED__HTTP_CHUNK_SIZE;
        }
        return;
    }
    /* A size, or a line of the trailer, of which only its length counts. */
    const bool at_end =
        c == '\n' && h->n_line > 0 && h->line[PAGED_MIN(h->n_line, sizeof h->line) - 1] == '\r';
    if (!at_end) {
        if (c == '\n') {
            fail(h, 400, "a line of a chunk that does not end in CRLF");
            return;
        }
        /* What is too long to be kept moves up, so that the last byte is always there. */
        if (h->n_line >= sizeof h->line) {
            h->line[sizeof h->line - 1] = c;
            h->n_line++;
        } else {
            h->line[h->n_line++] = c;
        }
        return;
    }
    h->n_line--;
    if (h->state == PAGED__HTTP_CHUNK_SIZE) {
        h->n_line = PAGED_MIN(h->n_line, sizeof h->line - 1);
        end_chunk_size(h);
    } else if (h->n_line == 0) {
        h->state = PAGED__HTTP_DONE;
    } else {
        h->n_line = 0;
    }
}

size_t paged__http_feed(paged__http *h, const char *data, size_t n) {
    size_t used = 0;
    while (used < n && h->state < PAGED__HTTP_DONE) {
        switch (h->state) {
        case PAGED__HTTP_HEAD:
            used += feed_head(h, data + used, n - used);
            break;
        case PAGED__HTTP_BODY:
        case PAGED__HTTP_CHUNK_DATA:
            used += feed_body(h, data + used, n - used);
            break;
        default:
            feed_frame(h, data[used++]);
            break;
        }
    }
    return used;
}

void paged__http_reset(paged__http *h) {
    const size_t body_max = h->body_max;
    paged__buffer_free(&h->head);
    paged__buffer_free(&h->body);
    *h = (paged__http){.body_max = body_max};
}

/* ---- questions ---- */

const char *paged__http_header(const paged__http *h, const char *name) {
    for (int32_t i = 0; i < h->n_headers; i++)
        if (strcasecmp(h->headers[i].name, name) == 0) return h->headers[i].value;
    return NULL;
}

bool paged__http_query(const paged__http *h, const char *name, char *out, size_t capacity) {
    const size_t n = strlen(name);
    for (const char *c = h->query; c && *c; c += strcspn(c, "&"), c += *c == '&') {
        if (strncmp(c, name, n) != 0 || c[n] != '=') continue;
        const size_t len = strcspn(c + n + 1, "&");
        if (len < capacity) memcpy(out, c + n + 1, len);
        out[len < capacity ? len : 0] = 0;
        if (len >= capacity || !decode(out)) memcpy(out, "?", 2);
        return true;
    }
    return false;
}
