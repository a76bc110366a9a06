/* server/text.c: see text.h. */
#include "server/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"

static bool make_room(paged__buffer *buffer, size_t size_bytes) {
    size_t need;
    if (!paged__add(buffer->len, size_bytes, &need)) return false;
    if (need <= buffer->capacity) return true;
    size_t capacity = PAGED_MAX(need, buffer->capacity + buffer->capacity / 2 + 4096);
    char *grown = paged__alloc(capacity, 1);
    if (!grown) return false;
    if (buffer->len) memcpy(grown, buffer->data, buffer->len);
    paged__free(buffer->data);
    buffer->data = grown;
    buffer->capacity = capacity;
    return true;
}

bool paged__buffer_append(paged__buffer *buffer, const void *data, size_t size_bytes) {
    if (!make_room(buffer, size_bytes)) return false;
    if (size_bytes) memcpy(buffer->data + buffer->len, data, size_bytes);
    buffer->len += size_bytes;
    return true;
}

bool paged__buffer_printf(paged__buffer *buffer, const char *fmt, ...) {
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    const int n = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    const bool ok = n >= 0 && make_room(buffer, (size_t)n + 1);
    if (ok) {
        vsnprintf(buffer->data + buffer->len, (size_t)n + 1, fmt, again);
        buffer->len += (size_t)n;
    }
    va_end(again);
    return ok;
}

bool paged__buffer_json(paged__buffer *buffer, const char *text, size_t len) {
    /* At most six bytes for one: \u0000. */
    size_t most;
    if (!paged__mul(len, 6, &most) || !paged__add(most, 2, &most) || !make_room(buffer, most)) return false;
    char *out = buffer->data + buffer->len;
    *out++ = '"';
    for (size_t i = 0; i < len; i++) {
        const unsigned char c = (unsigned char)text[i];
        if (c == '"' || c == '\\') {
            *out++ = '\\';
            *out++ = (char)c;
        } else if (c == '\n') {
            *out++ = '\\';
            *out++ = 'n';
        } else if (c < 0x20) {
            static const char hex[] = "0123456789abcdef";
            memcpy(out, "\\u00", 4);
            out[4] = hex[c >> 4];
            out[5] = hex[c & 15];
            out += 6;
        } else {
            *out++ = (char)c;
        }
    }
    *out++ = '"';
    buffer->len = (size_t)(out - buffer->data);
    return true;
}

void paged__buffer_free(paged__buffer *buffer) {
    paged__free(buffer->data);
    *buffer = (paged__buffer){0};
}

json_t *paged__json_text(const char *text, size_t len) {
    json_t *value = json_stringn(text, len);
    if (value) return value;
    char *copy = paged__alloc(len + 1, 1);
    if (!copy) return NULL;
    for (size_t i = 0; i < len; i++) copy[i] = (unsigned char)text[i] < 0x80 ? text[i] : '?';
    value = json_stringn(copy, len);
    paged__free(copy);
    return value;
}
