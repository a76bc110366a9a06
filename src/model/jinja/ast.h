/* model/jinja/ast.h: tokens and the tree of a compiled template.
 *
 * What follows each other stays a list (operands of a chain, steps behind a value, branches of an if), so
 * that the tree is only as deep as the source is nested, which parse.c bounds. May include value.h. */
#ifndef PAGED_MODEL_JINJA_AST_H
#define PAGED_MODEL_JINJA_AST_H

#include "model/jinja/value.h"

typedef enum j_token_type {
    J_T_END,
    J_T_DATA,
    J_T_PRINT, /* {{ */
    J_T_PRINT_END,
    J_T_BLOCK, /* {% */
    J_T_BLOCK_END,
    J_T_NAME,
    J_T_STRING,
    J_T_NUMBER,
    J_T_OP
} j_token_type;

typedef struct j_token {
    uint8_t type;
    char op[3]; /* "**" and a 0 */
    int32_t line;
    j_value value; /* of data, names, strings, numbers */
} j_token;

/* tokens [*n], with J_T_END last, in the arena of the run; NULL after an error. */
j_token *paged__j_lex(paged__j_run *run, const char *text, size_t len, size_t *n);

typedef enum j_node_type {
    /* expressions */
    J_CONST,   /* value */
    J_NAME,    /* value: its name */
    J_MAKE,    /* list; op J_LIST or J_TUPLE */
    J_OBJECT,  /* list: key, value, key, value … */
    J_IF_ELSE, /* list: value, condition, value, condition …, and the value of the else, if there is one */
    J_OR,      /* list */
    J_AND,     /* list */
    J_NOT,     /* a */
    J_SIGN,    /* a; op '-' or '+' */
    J_COMPARE, /* list of J_OPERAND, the first without an operator */
    J_MATH,    /* likewise, all of one precedence, from left to right */
    J_JOIN,    /* list: a ~ b ~ c */
    J_OPERAND, /* a; op */
    J_POSTFIX, /* a, then the steps of list: */
    J_ATTR,    /* value: name */
    J_ITEM,    /* a */
    J_SLICE,   /* a, b, c; each may be NULL */
    J_CALL,    /* list of J_ARG */
    J_FILTER,  /* value: name, fn (NULL: unknown), list of J_ARG */
    J_TEST,    /* likewise; op 1: is not */
    J_ARG,     /* a; value: its name, if any; op '*' or 'd' (for **): unpacked */
    J_ATTR_TARGET, /* a: J_NAME of a namespace; value: attribute */
    /* statements */
    J_BODY,       /* list */
    J_DATA,       /* value */
    J_PRINT,      /* a */
    J_IF,         /* list of J_CASE */
    J_CASE,       /* a (NULL: else), b: body */
    J_FOR,        /* a: target, b: iterable, c: filter or NULL; list: body, else */
    J_SET,        /* a: target, b: expression */
    J_CAPTURE,    /* a: target or NULL (print it), list: filters, c: body: block set, filter */
    J_MACRO_DEF,  /* value: name; list of J_PARAM, a: body; op: what of caller, varargs, kwargs it uses */
    J_PARAM,      /* value: name; a: default or NULL */
    J_CALL_BLOCK, /* a: the call, a J_POSTFIX; b: J_MACRO_DEF of the caller */
    J_WITH,       /* list: target, expression, …; c: body */
    J_BREAK,
    J_CONTINUE
} j_node_type;

enum { J_USES_CALLER = 1, J_USES_VARARGS = 2, J_USES_KWARGS = 4 };

/* Operators that are not one character. */
enum { J_OP_EQ = 1, J_OP_NE, J_OP_LE, J_OP_GE, J_OP_IN, J_OP_NOT_IN, J_OP_POW, J_OP_FLOOR };

typedef struct j_node {
    uint8_t type, op;
    int32_t line;
    j_value value;
    const j_builtin *fn;
    struct j_node *a, *b, *c;
    struct j_node **list; /* [n of cap] */
    size_t n, cap;
} j_node;

/* The body of a template; NULL after an error. */
j_node *paged__j_parse(paged__j_run *run, const j_token *tokens);

struct paged__jinja {
    paged__j_run memory; /* holds the arena of the tree */
    j_node *body;
};

typedef struct j_macro {
    const j_node *def;
    j_scope *scope; /* where it was defined */
} j_macro;

typedef struct j_loop {
    j_seq *source;
    size_t next;        /* of source, that no one has looked at */
    j_value kept;       /* list: items that passed the filter */
    size_t index;       /* of kept, the current one */
    const j_node *node; /* for the filter */
    j_scope *outer;
    int32_t depth;
    j_value changed; /* the last arguments of loop.changed, a list; absent: none */
} j_loop;

/* eval.c */
j_value paged__j_eval(paged__j_run *run, const j_node *e);
void paged__j_assign(paged__j_run *run, const j_node *target, j_value v);
void paged__j_bind(paged__j_run *run, j_scope *scope, const j_string *name, j_value v);
j_value paged__j_steps(paged__j_run *run, const j_node *e, j_value v, const j_value *caller);

/* exec.c */
typedef enum j_signal { J_GO_ON, J_DO_BREAK, J_DO_CONTINUE } j_signal;
j_signal paged__j_exec(paged__j_run *run, const j_node *body);
j_value paged__j_call_macro(paged__j_run *run, const j_macro *macro, const j_args *args);
j_value paged__j_loop_attr(paged__j_run *run, j_loop *loop, const j_string *name);

#endif
