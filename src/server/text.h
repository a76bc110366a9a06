/* server/text.h: bytes that grow, and JSON strings of any bytes. The commands of cli use it, too. */
#ifndef PAGED_SERVER_TEXT_H
#define PAGED_SERVER_TEXT_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

typedef struct paged__buffer {
    char *data; /* [len], owned; 64-byte aligned */
    size_t len, capacity;
} paged__buffer;

bool paged__buffer_append(paged__buffer *buffer, const void *data, size_t size_bytes); /* false: no memory */
/* printf; false: no memory. */
bool paged__buffer_printf(paged__buffer *buffer, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* A JSON string with its quotes. Text that is UTF-8 stays as it is. */
bool paged__buffer_json(paged__buffer *buffer, const char *text, size_t len);
void paged__buffer_free(paged__buffer *buffer);

/* A JSON string of any bytes: text that is no UTF-8 has '?' in place of its bytes from 0x80 on. */
json_t *paged__json_text(const char *text, size_t len);

/* ---- files in the program ---- */

/* A file that was put into the program when it was built (cmake/embed.cmake). */
typedef struct paged__file {
    const char *path;          /* "/openapi.json" */
    const unsigned char *data; /* [size_bytes] */
    size_t size_bytes;
} paged__file;

#endif
