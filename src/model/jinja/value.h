/* model/jinja/value.h: the values of a template, and the memory of one compilation or rendering.
 *
 * Everything lives in the arena of its run and goes with it; nothing is freed alone. So a substring points
 * into its string, and values are copied freely. Errors are sticky: the first one is kept in run->status,
 * functions then return undefined, and loops look at it. May include jinja.h, model/vocab.h. */
#ifndef PAGED_MODEL_JINJA_VALUE_H
#define PAGED_MODEL_JINJA_VALUE_H

#include "model/jinja/jinja.h"

typedef enum j_kind {
    J_UNDEFINED, /* hint: what is not defined, may be NULL */
    J_NONE,
    J_BOOL,
    J_INT,
    J_FLOAT,
    J_STRING,
    J_SEQ,
    J_DICT,
    J_NAMESPACE, /* dict */
    J_LOOP,
    J_MACRO,
    J_FUNCTION, /* a global */
    J_METHOD,   /* a function with its object */
    J_ABSENT    /* an argument that was not given; never a value of a template */
} j_kind;

typedef struct j_string {
    const char *bytes; /* [len] UTF-8; a byte that is no part of a character counts as one */
    size_t len;
    const uint8_t *mask; /* [len] 1: raw; NULL: all bytes are as `raw` says */
    bool raw;
} j_string;

typedef struct j_value {
    uint8_t kind;
    union {
        bool b;
        int64_t i;
        double f;
        const j_string *s; /* also the hint of an undefined one */
        struct j_seq *seq;
        struct j_dict *dict;
        struct j_loop *loop;
        const struct j_macro *macro;
        const struct j_builtin *fn;
        const struct j_method *method;
    };
} j_value;

typedef enum j_form { J_LIST, J_TUPLE, J_RANGE, J_KEYS, J_VALUES, J_ITEMS, J_ITERATOR } j_form;

typedef struct j_seq {
    j_value *items; /* [n of cap] */
    size_t n, cap;
    uint8_t form; /* an iterator has no length and is empty after its first use */
} j_seq;

typedef struct j_entry {
    j_value key, value;
    uint64_t hash;
} j_entry;

typedef struct j_dict {
    j_entry *entries; /* [n of cap] in the order of insertion */
    size_t n, cap;
} j_dict;

typedef struct j_method {
    j_value self;
    const struct j_builtin *fn;
} j_method;

typedef struct j_args {
    const j_value *items; /* [n] positional */
    size_t n;
    const j_entry *named; /* [n_named] keys are strings */
    size_t n_named;
} j_args;

enum { J_PARAMS_MAX = 6 };

/* A filter, test, method or global. `params`: names with blanks between them, bound to argv [J_PARAMS_MAX]
 * with J_ABSENT for those not given; "*" takes any, and `args` is all there is. */
typedef struct j_builtin {
    const char *name, *params;
    int32_t n_required;
    j_value (*call)(struct paged__j_run *run, j_value self, const j_value *argv, const j_args *args);
} j_builtin;

typedef struct j_buffer {
    char *bytes;   /* [len of cap] */
    uint8_t *mask; /* [len of cap] */
    size_t len, cap;
} j_buffer;

typedef struct j_variable {
    const j_string *name;
    j_value value;
} j_variable;

typedef struct j_scope {
    struct j_scope *parent;
    j_variable *variables; /* [n of cap] */
    size_t n, cap;
} j_scope;

typedef struct j_chunk {
    struct j_chunk *next;
    size_t used, size; /* of the bytes behind this header */
} j_chunk;

/* Nesting of the source; of values that are written, compared or read; of evaluation (macros call macros).
 * The last one is the deepest: it fits in 256 KiB of stack. */
enum { J_SOURCE_DEPTH = 96, J_VALUE_DEPTH = 64, J_RUN_DEPTH = 200 };

struct paged__j_run {
    const paged__jinja *t; /* NULL while compiling */
    paged__jinja_limits limits;
    j_chunk *chunks;
    size_t memory_used;
    int64_t steps;
    int32_t depth, value_depth;
    int32_t line; /* of what is compiled or evaluated; 0: nothing yet */
    int64_t now;
    paged_status status;
    char message[400];
    j_scope root, *scope;
    j_buffer *out;
};

/* ---- errors, memory, steps ---- */

/* Keeps the first error; returns undefined. */
j_value paged__j_fail(paged__j_run *run, paged_status status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void *paged__j_alloc(paged__j_run *run, size_t n, size_t elem_bytes); /* NULL: run->status says why */
/* Makes room for one more: the array, moved if it had to grow. */
void *paged__j_grow(paged__j_run *run, void *items, size_t n, size_t *cap, size_t elem_bytes);
bool paged__j_step(paged__j_run *run, size_t n); /* false: an error, or too many steps */
void paged__j_arena_free(paged__j_run *run);

/* ---- making values ---- */

static inline j_value paged__j_undefined(void) {
    return (j_value){.kind = J_UNDEFINED, .s = NULL};
}
static inline j_value paged__j_none(void) {
    return (j_value){.kind = J_NONE};
}
static inline j_value paged__j_bool(bool b) {
    return (j_value){.kind = J_BOOL, .b = b};
}
static inline j_value paged__j_int(int64_t i) {
    return (j_value){.kind = J_INT, .i = i};
}
static inline j_value paged__j_float(double f) {
    return (j_value){.kind = J_FLOAT, .f = f};
}

j_value paged__j_string(paged__j_run *run, j_string s);
j_value paged__j_text(paged__j_run *run, const char *text); /* a static text of ours */
j_value paged__j_seq(paged__j_run *run, j_form form);       /* empty; .seq is NULL after an error */
void paged__j_push(paged__j_run *run, j_value seq, j_value item);
j_value paged__j_pair(paged__j_run *run, j_value a, j_value b);
j_value paged__j_dict(paged__j_run *run);
void paged__j_dict_set(paged__j_run *run, j_dict *dict, j_value key, j_value value);
const j_entry *paged__j_dict_find(paged__j_run *run, const j_dict *dict, j_value key);
const j_value *paged__j_dict_get(const j_dict *dict, const char *name, size_t len); /* NULL: none */

/* ---- what values are ---- */

const char *paged__j_type(j_value v); /* "string" */
bool paged__j_is_number(j_value v);   /* also booleans, as in Python */
double paged__j_real(j_value v);      /* of a number */
int64_t paged__j_integer(j_value v);  /* of an integer or boolean */
bool paged__j_truth(j_value v);
bool paged__j_equal(paged__j_run *run, j_value a, j_value b);
int paged__j_compare(paged__j_run *run, j_value a, j_value b); /* fails if they have no order */
bool paged__j_contains(paged__j_run *run, j_value container, j_value item);
/* The items of anything that can be iterated; an iterator is used up. Fails with the type. */
j_seq *paged__j_iterate(paged__j_run *run, j_value v);
bool paged__j_length(paged__j_run *run, j_value v, int64_t *n); /* fails if it has none */

/* ---- text.c ---- */

bool paged__j_is(const j_string *s, const char *text);
bool paged__j_same(const j_string *a, const j_string *b);
bool paged__j_raw_at(const j_string *s, size_t i);
j_string paged__j_cut(const j_string *s, size_t from, size_t to); /* bytes [from, to) */
size_t paged__j_char(const char *p, size_t n, uint32_t *code); /* its bytes; a stray byte: 1, 0xdc80 + it */
size_t paged__j_count_chars(const j_string *s);
size_t paged__j_offset(const j_string *s, size_t char_idx); /* bytes before it, at most len */
bool paged__j_is_space(uint32_t code);
size_t paged__j_find(const j_string *s, const j_string *part, size_t from); /* SIZE_MAX: none */
j_string paged__j_strip(const j_string *s, const j_string *chars, bool left, bool right);

void paged__j_put(paged__j_run *run, j_buffer *buf, const char *bytes, size_t len, bool raw);
void paged__j_put_string(paged__j_run *run, j_buffer *buf, const j_string *s);
void paged__j_put_code(paged__j_run *run, j_buffer *buf, uint32_t code, bool raw);
j_string paged__j_buffer_string(const j_buffer *buf);
j_value paged__j_buffer_value(paged__j_run *run, const j_buffer *buf);
void paged__j_put_value(paged__j_run *run, j_buffer *buf, j_value v); /* as Python's str() */
void paged__j_put_repr(paged__j_run *run, j_buffer *buf, j_value v);
size_t paged__j_format_float(double f, char out[40]); /* as Python's repr() */
j_string paged__j_str(paged__j_run *run, j_value v);  /* str(v); "" after an error */

/* ---- json.c ---- */

j_value paged__j_read_json(paged__j_run *run, const char *json, size_t len);
void paged__j_write_json(paged__j_run *run, j_buffer *buf, j_value v, const j_value *argv);

/* ---- strings.c: what filters and methods share; all keep the marks ---- */

typedef enum j_case { J_UPPER, J_LOWER, J_CAPITALIZE, J_TITLE } j_case;
j_value paged__j_set_case(paged__j_run *run, const j_string *s, j_case to);
uint32_t paged__j_case_of(uint32_t code, bool upper); /* the same character in the other case, or itself */
j_value paged__j_replace(paged__j_run *run, const j_string *s, const j_string *old, const j_string *with,
                         int64_t count); /* count < 0: all */
j_value paged__j_split_lines(paged__j_run *run, const j_string *s, bool keep_ends);
j_value paged__j_center(paged__j_run *run, const j_string *s, int64_t width);
j_value paged__j_join_list(paged__j_run *run, const j_string *between, j_value items, bool any);
j_value paged__j_format(paged__j_run *run, const j_string *format, j_value args); /* format % args */
/* Python's int(text, base) and float(text); false: no number. */
bool paged__j_parse_int(const j_string *s, int64_t base, int64_t *out);
bool paged__j_parse_float(const j_string *s, double *out);

/* ---- builtins: NULL if there is none of this name ---- */

const j_builtin *paged__j_find_builtin(const j_builtin *list, size_t n, const j_string *name);
const j_builtin *paged__j_find_filter(const j_string *name);
const j_builtin *paged__j_find_test(const j_string *name);
const j_builtin *paged__j_find_global(const j_string *name);
const j_builtin *paged__j_find_string_method(const j_string *name);
const j_builtin *paged__j_find_method(j_value self, const j_string *name);
j_value paged__j_call_builtin(paged__j_run *run, const j_builtin *fn, j_value self, const j_args *args);

/* ---- eval.c ---- */

j_value paged__j_call(paged__j_run *run, j_value callee, const j_args *args);
j_value paged__j_get_attr(paged__j_run *run, j_value v, const j_string *name);
j_value paged__j_get_item(paged__j_run *run, j_value v, j_value key);

#endif
