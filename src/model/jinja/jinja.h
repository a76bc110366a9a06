/* model/jinja/jinja.h: chat templates: a bounded part of Jinja, compiled once and rendered for each request.
 *
 *     text --lex.c, parse.c--> paged__jinja (read-only, shared by threads)
 *                                    |
 *     variables (JSON, texts) --> paged__j_run --eval.c, exec.c--> text, and for each byte where it came from
 *
 * It means what Python's jinja2 means in the sandbox that transformers sets up (docs/chat-templates.md says
 * where not), and it reaches nothing: no files, no process, no clock but the time it is given. Steps, depth,
 * memory and output have limits, so that any template ends soon.
 *
 * Every text carries a mark for each byte: raw (it came from a message or another variable) or not (the
 * template wrote it). All operations keep the marks, so that the tokenizer can take control tokens from what
 * the template wrote, and never from content. May include base/, paged/model.h, model/vocab.h (UTF-8). */
#ifndef PAGED_MODEL_JINJA_JINJA_H
#define PAGED_MODEL_JINJA_JINJA_H

#include "base/base.h"
#include "paged/model.h"

typedef struct paged__jinja paged__jinja;
typedef struct paged__j_run paged__j_run;

enum { PAGED__JINJA_SOURCE_MAX = 1 << 20 }; /* bytes of a template */

/* Zero means the default. */
typedef struct paged__jinja_limits {
    size_t memory_bytes; /* of one rendering or compilation; 256 MiB */
    size_t output_bytes; /* 16 MiB */
    int64_t steps;       /* 4 million; a step is an operation or 64 bytes written */
    size_t chunk_bytes;  /* of the arena; small ones let a sanitizer see over-reads */
} paged__jinja_limits;

/* Errors: FORMAT (with the line), UNSUPPORTED (a statement we do not have), LIMIT, NO_MEMORY. */
paged_status paged__jinja_compile(const char *text, size_t len, const paged__jinja_limits *limits,
                                  paged__jinja **out, paged_error *err);
void paged__jinja_free(paged__jinja *t); /* NULL is fine */

/* One rendering; belongs to one thread. `limits` may be NULL. `now` is Unix time, for strftime_now. */
paged_status paged__j_run_create(const paged__jinja *t, const paged__jinja_limits *limits, int64_t now,
                                 paged__j_run **out, paged_error *err);
void paged__j_run_free(paged__j_run *run); /* NULL is fine */

/* Variables. What is wrong with one is kept and told by paged__j_run_render. The texts must live until
 * then. */
void paged__j_set_text(paged__j_run *run, const char *name, const char *bytes, size_t len, bool raw);
void paged__j_set_bool(paged__j_run *run, const char *name, bool value);
void paged__j_set_none(paged__j_run *run, const char *name);
void paged__j_set_json(paged__j_run *run, const char *name, const char *json, size_t len);
void paged__j_set_members(paged__j_run *run, const char *json, size_t len); /* each member a variable */

/* The variable `messages`; their roles are the template's words, and their content is raw. */
void paged__j_set_messages(paged__j_run *run, const paged_message *messages, size_t n);
/* As paged__j_set_json; roles for which `trusted` is true are the template's. */
void paged__j_set_messages_json(paged__j_run *run, const char *json, size_t len,
                                bool (*trusted)(const char *role, size_t len));

typedef struct paged__j_rendered {
    char *bytes;  /* [len + 1], with a final 0 */
    uint8_t *raw; /* [len] 1: from a variable, 0: from the template */
    size_t len;
} paged__j_rendered;

/* The caller frees bytes and raw. Errors: INVALID_ARG (the template refuses or cannot do it, with the line),
 * FORMAT (bad JSON), UNSUPPORTED, LIMIT, NO_MEMORY. */
paged_status paged__j_run_render(paged__j_run *run, paged__j_rendered *out, paged_error *err);

#endif
