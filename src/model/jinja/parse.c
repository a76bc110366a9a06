/* model/jinja/parse.c: tokens to the tree, by recursive descent with jinja2's precedence:
 *
 *     if-else < or < and < not < comparisons < + - < ~ < * / // % < ** < sign < . [] () < | is
 *
 * Nesting is bounded by J_SOURCE_DEPTH; what is not known is refused with its line. Unknown filters and tests
 * are an error where they are used, so that a template is not lost to a branch that is never taken.
 */
#include "model/jinja/ast.h"

typedef struct parser {
    paged__j_run *run;
    const j_token *t; /* the current one */
    int depth, n_loops;
    j_node *macro; /* the one being defined */
} parser;

static j_node *parse_expr(parser *p);
static j_node *parse_unary(parser *p, bool with_filters);
static j_node *parse_steps(parser *p, j_node *base, bool with_filters);
static j_node *parse_body(parser *p, const char *ends);

/* ---- tools ---- */

/* The last token, J_T_END, stays. */
static void next(parser *p) {
    if (p->t->type != J_T_END) p->t++;
}

static j_node *node(parser *p, j_node_type type) {
    j_node *n = paged__j_alloc(p->run, 1, sizeof *n);
    if (n) *n = (j_node){.type = (uint8_t)type, .line = p->t->line};
    return n;
}

static void append(parser *p, j_node *parent, j_node *child) {
    if (!parent || !child) return;
    j_node **list = paged__j_grow(p->run, parent->list, parent->n, &parent->cap, sizeof *list);
    if (!list) return;
    parent->list = list;
    list[parent->n++] = child;
}

static void *fail(parser *p, const char *what) {
    p->run->line = p->t->line;
    paged__j_fail(p->run, PAGED_ERR_FORMAT, "%s", what);
    return NULL;
}

static bool failed(const parser *p) {
    return p->run->status != PAGED_OK;
}

static bool is_op(const parser *p, const char *op) {
    return p->t->type == J_T_OP && strcmp(p->t->op, op) == 0;
}

static bool is_name(const parser *p, const char *name) {
    return p->t->type == J_T_NAME && paged__j_is(p->t->value.s, name);
}

static bool skip_op(parser *p, const char *op) {
    if (!is_op(p, op)) return false;
    next(p);
    return true;
}

static bool skip_name(parser *p, const char *name) {
    if (!is_name(p, name)) return false;
    next(p);
    return true;
}

static void expect_op(parser *p, const char *op) {
    if (skip_op(p, op) || failed(p)) return;
    p->run->line = p->t->line;
    paged__j_fail(p->run, PAGED_ERR_FORMAT, "\"%s\" is missing", op);
}

static void expect_name(parser *p, const char *name) {
    if (skip_name(p, name) || failed(p)) return;
    p->run->line = p->t->line;
    paged__j_fail(p->run, PAGED_ERR_FORMAT, "\"%s\" is missing", name);
}

static j_value take_name(parser *p) {
    if (p->t->type != J_T_NAME) {
        fail(p, "a name is missing");
        return paged__j_undefined();
    }
    const j_value name = p->t->value;
    next(p);
    return name;
}

static bool enter(parser *p) {
    if (failed(p)) return false;
    if (p->depth++ < J_SOURCE_DEPTH) return true;
    p->run->line = p->t->line;
    paged__j_fail(p->run, PAGED_ERR_LIMIT, "it nests deeper than %d", J_SOURCE_DEPTH);
    return false;
}

/* ---- values ---- */

/* A variable that only exists in the macro that names it. */
static void note_special_name(parser *p, const j_string *name) {
    if (!p->macro) return;
    if (paged__j_is(name, "caller")) p->macro->op |= J_USES_CALLER;
    if (paged__j_is(name, "varargs")) p->macro->op |= J_USES_VARARGS;
    if (paged__j_is(name, "kwargs")) p->macro->op |= J_USES_KWARGS;
}

static j_node *constant(parser *p, j_value value) {
    j_node *n = node(p, J_CONST);
    if (n) n->value = value;
    return n;
}

static j_node *parse_name(parser *p) {
    const j_string *s = p->t->value.s;
    j_node *n;
    if (paged__j_is(s, "true") || paged__j_is(s, "True"))
        n = constant(p, paged__j_bool(true));
    else if (paged__j_is(s, "false") || paged__j_is(s, "False"))
        n = constant(p, paged__j_bool(false));
    else if (paged__j_is(s, "none") || paged__j_is(s, "None"))
        n = constant(p, paged__j_none());
    else {
        n = node(p, J_NAME);
        if (n) n->value = p->t->value;
        note_special_name(p, s);
    }
    next(p);
    return n;
}

/* Strings that stand side by side are one. */
static j_node *parse_strings(parser *p) {
    j_node *n = constant(p, p->t->value);
    const j_token *first = p->t;
    next(p);
    if (p->t->type != J_T_STRING) return n;
    j_buffer buf = {0};
    paged__j_put_string(p->run, &buf, first->value.s);
    for (; p->t->type == J_T_STRING; next(p)) paged__j_put_string(p->run, &buf, p->t->value.s);
    if (n) n->value = paged__j_buffer_value(p->run, &buf);
    return n;
}

static bool at_tuple_end(const parser *p, const char *end_name) {
    return p->t->type == J_T_PRINT_END || p->t->type == J_T_BLOCK_END || is_op(p, ")") ||
           (end_name && is_name(p, end_name));
}

static j_node *parse_or(parser *p);
static j_node *parse_primary(parser *p);

typedef enum tuple_of { OF_EXPR, OF_OR, OF_PRIMARY } tuple_of;

/* One expression, or several with commas: a tuple. `empty`: () is one too. */
static j_node *parse_tuple(parser *p, tuple_of of, const char *end_name, bool empty) {
    j_node *tuple = node(p, J_MAKE);
    if (tuple) tuple->op = J_TUPLE;
    bool is_tuple = false;
    while (!failed(p) && !at_tuple_end(p, end_name)) {
        append(p, tuple, of == OF_EXPR ? parse_expr(p) : of == OF_OR ? parse_or(p) : parse_primary(p));
        if (!skip_op(p, ",")) break;
        is_tuple = true;
    }
    if (failed(p)) return NULL;
    if (!is_tuple && tuple->n == 1) return tuple->list[0];
    if (tuple->n == 0 && !empty) return fail(p, "an expression is missing");
    return tuple;
}

static j_node *parse_list(parser *p) {
    j_node *list = node(p, J_MAKE);
    if (list) list->op = J_LIST;
    for (next(p); !failed(p) && !is_op(p, "]");) {
        append(p, list, parse_expr(p));
        if (!skip_op(p, ",") && !is_op(p, "]")) return fail(p, "\"]\" is missing");
    }
    next(p);
    return list;
}

static j_node *parse_object(parser *p) {
    j_node *object = node(p, J_OBJECT);
    for (next(p); !failed(p) && !is_op(p, "}");) {
        append(p, object, parse_expr(p));
        expect_op(p, ":");
        append(p, object, parse_expr(p));
        if (!skip_op(p, ",") && !is_op(p, "}")) return fail(p, "\"}\" is missing");
    }
    next(p);
    return object;
}

static j_node *parse_primary(parser *p) {
    if (failed(p)) return NULL;
    if (p->t->type == J_T_NAME) return parse_name(p);
    if (p->t->type == J_T_STRING) return parse_strings(p);
    if (p->t->type == J_T_NUMBER) {
        j_node *n = constant(p, p->t->value);
        next(p);
        return n;
    }
    if (is_op(p, "[")) return parse_list(p);
    if (is_op(p, "{")) return parse_object(p);
    if (!skip_op(p, "(")) return fail(p, "an expression is missing");
    j_node *n = parse_tuple(p, OF_EXPR, NULL, true);
    expect_op(p, ")");
    return n;
}

/* ---- what follows a value ---- */

/* The arguments of a call into call->list; the "(" is current. */
static void parse_args(parser *p, j_node *call) {
    bool named = false;
    expect_op(p, "(");
    while (!failed(p) && !is_op(p, ")")) {
        j_node *arg = node(p, J_ARG);
        if (!arg) return;
        if (skip_op(p, "**")) {
            arg->op = 'd';
        } else if (skip_op(p, "*")) {
            arg->op = '*';
        } else if (p->t->type == J_T_NAME && p->t[1].type == J_T_OP && strcmp(p->t[1].op, "=") == 0) {
            arg->value = p->t->value;
            p->t += 2;
            named = true;
        } else if (named) {
            fail(p, "a positional argument follows a named one");
            return;
        }
        arg->a = parse_expr(p);
        append(p, call, arg);
        if (!skip_op(p, ",") && !is_op(p, ")")) {
            fail(p, "\")\" is missing");
            return;
        }
    }
    if (!failed(p)) next(p);
}

/* a, or a.b as one name: no filter or test of ours has one, but a branch that is never taken may. */
static j_value take_dotted_name(parser *p) {
    const j_value first = take_name(p);
    j_buffer buf = {0};
    if (failed(p) || !is_op(p, ".")) return first;
    paged__j_put_string(p->run, &buf, first.s);
    while (!failed(p) && skip_op(p, ".")) {
        const j_value part = take_name(p);
        if (failed(p)) break;
        paged__j_put(p->run, &buf, ".", 1, false);
        paged__j_put_string(p->run, &buf, part.s);
    }
    return paged__j_buffer_value(p->run, &buf);
}

static j_node *parse_filter(parser *p) {
    j_node *filter = node(p, J_FILTER);
    const j_value name = take_dotted_name(p);
    if (failed(p)) return NULL;
    filter->value = name;
    filter->fn = paged__j_find_filter(name.s);
    if (is_op(p, "(")) parse_args(p, filter);
    return filter;
}

static j_node *parse_test(parser *p) {
    j_node *test = node(p, J_TEST);
    const bool negated = skip_name(p, "not");
    const j_value name = take_dotted_name(p);
    if (failed(p)) return NULL;
    test->op = negated;
    test->value = name;
    test->fn = paged__j_find_test(name.s);
    if (is_op(p, "(")) {
        parse_args(p, test);
        return test;
    }
    const bool value = p->t->type == J_T_NAME || p->t->type == J_T_STRING || p->t->type == J_T_NUMBER ||
                       is_op(p, "[") || is_op(p, "{");
    if (!value || is_name(p, "else") || is_name(p, "or") || is_name(p, "and")) return test;
    if (is_name(p, "is")) return fail(p, "tests cannot be chained with \"is\"");
    j_node *arg = node(p, J_ARG);
    if (!arg) return NULL;
    j_node *first = parse_primary(p);
    arg->a = parse_steps(p, first, false);
    append(p, test, arg);
    return test;
}

/* [a], [a, b] as a tuple, [a:b:c] */
static j_node *parse_subscript(parser *p) {
    j_node *item = node(p, J_ITEM);
    next(p);
    if (failed(p)) return NULL;
    if (!is_op(p, ":")) item->a = parse_expr(p);
    if (is_op(p, ":")) {
        item->type = J_SLICE;
        next(p);
        if (!is_op(p, "]") && !is_op(p, ":")) item->b = parse_expr(p);
        if (skip_op(p, ":") && !is_op(p, "]")) item->c = parse_expr(p);
    } else if (is_op(p, ",")) {
        j_node *tuple = node(p, J_MAKE);
        if (!tuple) return NULL;
        tuple->op = J_TUPLE;
        append(p, tuple, item->a);
        while (!failed(p) && skip_op(p, ",")) append(p, tuple, parse_expr(p));
        item->a = tuple;
    }
    expect_op(p, "]");
    return item;
}

static j_node *parse_attr(parser *p) {
    j_node *attr = node(p, J_ATTR);
    next(p);
    if (failed(p)) return NULL;
    if (p->t->type == J_T_NUMBER && p->t->value.kind == J_INT) {
        attr->type = J_ITEM;
        attr->a = constant(p, p->t->value);
        next(p);
        return attr;
    }
    attr->value = take_name(p);
    return attr;
}

static j_node *parse_call(parser *p) {
    j_node *call = node(p, J_CALL);
    if (call) parse_args(p, call);
    return call;
}

/* Steps behind `base`: first . [] and (), then, with filters, | is and (). */
static j_node *parse_steps(parser *p, j_node *base, bool with_filters) {
    j_node *chain = node(p, J_POSTFIX);
    if (!chain) return NULL;
    chain->a = base;
    while (!failed(p)) {
        if (is_op(p, "."))
            append(p, chain, parse_attr(p));
        else if (is_op(p, "["))
            append(p, chain, parse_subscript(p));
        else if (is_op(p, "("))
            append(p, chain, parse_call(p));
        else
            break;
    }
    while (with_filters && !failed(p)) {
        if (skip_op(p, "|"))
            append(p, chain, parse_filter(p));
        else if (skip_name(p, "is"))
            append(p, chain, parse_test(p));
        else if (is_op(p, "("))
            append(p, chain, parse_call(p));
        else
            break;
    }
    return chain->n ? chain : base;
}

/* ---- operators ---- */

static j_node *parse_unary_body(parser *p, bool with_filters) {
    j_node *n;
    if (is_op(p, "-") || is_op(p, "+")) {
        n = node(p, J_SIGN);
        if (!n) return NULL;
        n->op = (uint8_t)p->t->op[0];
        next(p);
        n->a = parse_unary(p, false);
    } else {
        n = parse_primary(p);
    }
    return parse_steps(p, n, with_filters);
}

static j_node *parse_unary(parser *p, bool with_filters) {
    j_node *n = enter(p) ? parse_unary_body(p, with_filters) : NULL;
    p->depth--;
    return n;
}

/* The operator at hand, as level `level` has them; 0: none. It is skipped. */
static uint8_t take_operator(parser *p, int level) {
    static const char *const texts[] = {"==", "!=", "<", "<=", ">", ">=", "+",
                                        "-",  "*",  "/", "//", "%", "**"};
    static const uint8_t ops[] = {J_OP_EQ, J_OP_NE, '<', J_OP_LE,    '>', J_OP_GE, '+',
                                  '-',     '*',     '/', J_OP_FLOOR, '%', J_OP_POW};
    static const uint8_t levels[] = {0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3};
    for (size_t i = 0; i < sizeof ops; i++)
        if (levels[i] == level && skip_op(p, texts[i])) return ops[i];
    if (level == 0 && skip_name(p, "in")) return J_OP_IN;
    if (level == 0 && is_name(p, "not") && p->t[1].type == J_T_NAME && paged__j_is(p->t[1].value.s, "in")) {
        p->t += 2;
        return J_OP_NOT_IN;
    }
    return 0;
}

static j_node *operand(parser *p, uint8_t op, j_node *value) {
    j_node *n = node(p, J_OPERAND);
    if (!n) return NULL;
    n->op = op;
    n->a = value;
    return n;
}

/* Several of `one` with operators of the level between them. */
static j_node *parse_chain(parser *p, int level, j_node_type type, j_node *(*one)(parser *p)) {
    j_node *first = one(p), *chain = NULL;
    for (uint8_t op; !failed(p) && (op = take_operator(p, level)) != 0;) {
        if (!chain) {
            chain = node(p, type);
            append(p, chain, operand(p, 0, first));
        }
        j_node *value = one(p);
        append(p, chain, operand(p, op, value));
    }
    return chain ? chain : first;
}

static j_node *parse_factor(parser *p) {
    return parse_unary(p, true);
}

static j_node *parse_power(parser *p) {
    return parse_chain(p, 3, J_MATH, parse_factor);
}

static j_node *parse_product(parser *p) {
    return parse_chain(p, 2, J_MATH, parse_power);
}

/* Values with a word or sign between them that is always the same. */
static j_node *parse_row(parser *p, j_node_type type, const char *op, const char *name,
                         j_node *(*one)(parser *p)) {
    j_node *first = one(p), *row = NULL;
    while (!failed(p) && (op ? skip_op(p, op) : skip_name(p, name))) {
        if (!row) {
            row = node(p, type);
            append(p, row, first);
        }
        append(p, row, one(p));
    }
    return row ? row : first;
}

static j_node *parse_join(parser *p) {
    return parse_row(p, J_JOIN, "~", NULL, parse_product);
}

static j_node *parse_sum(parser *p) {
    return parse_chain(p, 1, J_MATH, parse_join);
}

static j_node *parse_not(parser *p) {
    bool negated = false, is_not = false;
    for (; skip_name(p, "not"); is_not = true) negated = !negated;
    j_node *n = parse_chain(p, 0, J_COMPARE, parse_sum);
    for (int i = 0; is_not && i < 2 - negated; i++) {
        j_node *outer = node(p, J_NOT);
        if (!outer) return NULL;
        outer->a = n;
        n = outer;
    }
    return n;
}

static j_node *parse_and(parser *p) {
    return parse_row(p, J_AND, NULL, "and", parse_not);
}

static j_node *parse_or(parser *p) {
    return parse_row(p, J_OR, NULL, "or", parse_and);
}

static j_node *parse_expr_body(parser *p) {
    j_node *first = parse_or(p);
    if (!skip_name(p, "if")) return first;
    /* a if x else b if y else c: the else branch is the next of a list, not a level deeper. */
    j_node *cases = node(p, J_IF_ELSE);
    for (bool more = true; more && !failed(p);) {
        append(p, cases, first);
        append(p, cases, parse_or(p));
        more = skip_name(p, "else");
        if (!more) break;
        first = parse_or(p);
        more = skip_name(p, "if");
        if (!more) append(p, cases, first);
    }
    return cases;
}

static j_node *parse_expr(parser *p) {
    j_node *n = enter(p) ? parse_expr_body(p) : NULL;
    p->depth--;
    return n;
}

/* ---- statements ---- */

static void end_tag(parser *p) {
    if (p->t->type == J_T_BLOCK_END)
        next(p);
    else if (!failed(p))
        fail(p, "the end of the tag is missing");
}

/* A statement's body up to one of the names in `ends`, which is then current. */
static j_node *parse_block(parser *p, const char *ends) {
    end_tag(p);
    return parse_body(p, ends);
}

static j_node *parse_if(parser *p) {
    j_node *chain = node(p, J_IF);
    do {
        j_node *one = node(p, J_CASE);
        if (!one) return NULL;
        one->a = parse_tuple(p, OF_OR, NULL, false);
        one->b = parse_block(p, "elif else endif");
        append(p, chain, one);
    } while (!failed(p) && skip_name(p, "elif"));
    if (skip_name(p, "else")) {
        j_node *last = node(p, J_CASE);
        if (!last) return NULL;
        last->b = parse_block(p, "endif");
        append(p, chain, last);
    }
    expect_name(p, "endif");
    return chain;
}

static bool is_target(const j_node *n) {
    if (n->type == J_NAME || n->type == J_ATTR_TARGET) return true;
    if (n->type != J_MAKE || n->op != J_TUPLE) return false;
    for (size_t i = 0; i < n->n; i++)
        if (!is_target(n->list[i])) return false;
    return true;
}

/* a, (b, c) or, `attributes`, ns.a */
static j_node *parse_target(parser *p, const char *end_name, bool attributes) {
    j_node *n;
    if (attributes && p->t->type == J_T_NAME && p->t[1].type == J_T_OP && strcmp(p->t[1].op, ".") == 0) {
        n = node(p, J_ATTR_TARGET);
        if (!n) return NULL;
        n->a = parse_name(p);
        next(p);
        n->value = take_name(p);
        if (!failed(p) && n->a->type != J_NAME) return fail(p, "this cannot be assigned to");
        return n;
    }
    n = parse_tuple(p, OF_PRIMARY, end_name, false);
    if (!failed(p) && !is_target(n)) return fail(p, "this cannot be assigned to");
    return n;
}

static j_node *parse_for(parser *p) {
    j_node *loop = node(p, J_FOR);
    if (!loop) return NULL;
    loop->a = parse_target(p, "in", false);
    expect_name(p, "in");
    loop->b = parse_tuple(p, OF_OR, "recursive", false);
    if (skip_name(p, "if")) loop->c = parse_expr(p);
    if (is_name(p, "recursive")) {
        p->run->line = p->t->line;
        paged__j_fail(p->run, PAGED_ERR_UNSUPPORTED, "recursive loops are not supported");
    }
    p->n_loops++;
    append(p, loop, parse_block(p, "else endfor"));
    p->n_loops--;
    if (skip_name(p, "else")) append(p, loop, parse_block(p, "endfor"));
    expect_name(p, "endfor");
    return loop;
}

static j_node *parse_set(parser *p) {
    j_node *set = node(p, J_SET);
    if (!set) return NULL;
    set->a = parse_target(p, NULL, true);
    if (skip_op(p, "=")) {
        set->b = parse_tuple(p, OF_EXPR, NULL, false);
        return set;
    }
    set->type = J_CAPTURE;
    while (!failed(p) && skip_op(p, "|")) append(p, set, parse_filter(p));
    set->c = parse_block(p, "endset");
    expect_name(p, "endset");
    return set;
}

static j_node *parse_filter_block(parser *p) {
    j_node *block = node(p, J_CAPTURE);
    if (!block) return NULL;
    do append(p, block, parse_filter(p));
    while (!failed(p) && skip_op(p, "|"));
    block->c = parse_block(p, "endfilter");
    expect_name(p, "endfilter");
    return block;
}

static void parse_params(parser *p, j_node *macro) {
    bool has_default = false;
    expect_op(p, "(");
    while (!failed(p) && !is_op(p, ")")) {
        j_node *param = node(p, J_PARAM);
        if (!param) return;
        param->value = take_name(p);
        if (skip_op(p, "=")) {
            param->a = parse_expr(p);
            has_default = true;
        } else if (has_default) {
            fail(p, "a parameter without a default follows one with a default");
            return;
        }
        append(p, macro, param);
        if (!skip_op(p, ",") && !is_op(p, ")")) {
            fail(p, "\")\" is missing");
            return;
        }
    }
    if (!failed(p)) next(p);
}

/* The body of a macro or call block. `outer` learns what special names it uses, as jinja2 has it. */
static void parse_macro_body(parser *p, j_node *macro, const char *end) {
    j_node *outer = p->macro;
    const int n_loops = p->n_loops;
    p->macro = macro;
    p->n_loops = 0;
    macro->a = parse_block(p, end);
    p->n_loops = n_loops;
    p->macro = outer;
    if (outer) outer->op |= macro->op;
    expect_name(p, end);
}

static j_node *parse_macro(parser *p) {
    j_node *macro = node(p, J_MACRO_DEF);
    if (!macro) return NULL;
    macro->value = take_name(p);
    parse_params(p, macro);
    parse_macro_body(p, macro, "endmacro");
    return macro;
}

static j_node *parse_call_block(parser *p) {
    j_node *block = node(p, J_CALL_BLOCK);
    if (!block) return NULL;
    block->b = node(p, J_MACRO_DEF);
    if (is_op(p, "(") && block->b) parse_params(p, block->b);
    block->a = parse_expr(p);
    if (failed(p)) return NULL;
    if (block->a->type != J_POSTFIX || block->a->list[block->a->n - 1]->type != J_CALL)
        return fail(p, "a call is missing");
    block->b->value = paged__j_text(p->run, "caller");
    parse_macro_body(p, block->b, "endcall");
    return block;
}

/* What transformers marks for training; here it is a scope. */
static j_node *parse_scope(parser *p, const char *end) {
    j_node *with = node(p, J_WITH);
    if (!with) return NULL;
    while (!failed(p) && p->t->type != J_T_BLOCK_END) {
        append(p, with, parse_target(p, NULL, false));
        expect_op(p, "=");
        append(p, with, parse_expr(p));
        if (!skip_op(p, ",")) break;
    }
    with->c = parse_block(p, end);
    expect_name(p, end);
    return with;
}

static j_node *parse_jump(parser *p, j_node_type type) {
    if (!p->n_loops) return fail(p, "break or continue outside of a loop");
    return node(p, type);
}

static j_node *parse_statement(parser *p) {
    if (skip_name(p, "if")) return parse_if(p);
    if (skip_name(p, "for")) return parse_for(p);
    if (skip_name(p, "set")) return parse_set(p);
    if (skip_name(p, "macro")) return parse_macro(p);
    if (skip_name(p, "call")) return parse_call_block(p);
    if (skip_name(p, "filter")) return parse_filter_block(p);
    if (skip_name(p, "with")) return parse_scope(p, "endwith");
    if (skip_name(p, "generation")) return parse_scope(p, "endgeneration");
    if (skip_name(p, "break")) return parse_jump(p, J_BREAK);
    if (skip_name(p, "continue")) return parse_jump(p, J_CONTINUE);
    p->run->line = p->t->line;
    const j_string none = {.bytes = "", .len = 0};
    const j_string *name = p->t->type == J_T_NAME ? p->t->value.s : &none;
    paged__j_fail(p->run, PAGED_ERR_UNSUPPORTED, "the statement \"%.*s\" is not supported here",
                  (int)PAGED_MIN(name->len, 40), name->bytes);
    return NULL;
}

/* Whether the current name is one of the words in `ends`. */
static bool at_end(const parser *p, const char *ends) {
    if (p->t->type != J_T_NAME) return false;
    const j_string *name = p->t->value.s;
    for (const char *word = ends; *word;) {
        const size_t n = strcspn(word, " ");
        if (n == name->len && memcmp(word, name->bytes, n) == 0) return true;
        word += n + (word[n] == ' ');
    }
    return false;
}

static void parse_into(parser *p, j_node *body, const char *ends) {
    while (!failed(p)) {
        if (p->t->type == J_T_END) {
            if (*ends) fail(p, "the template ends inside a block");
            return;
        }
        j_node *child;
        if (p->t->type == J_T_DATA) {
            child = node(p, J_DATA);
            if (child) child->value = p->t->value;
            next(p);
        } else if (p->t->type == J_T_PRINT) {
            next(p);
            child = node(p, J_PRINT);
            if (child) child->a = parse_tuple(p, OF_EXPR, NULL, false);
            if (!failed(p) && p->t->type != J_T_PRINT_END) fail(p, "\"}}\" is missing");
            next(p);
        } else {
            next(p);
            if (at_end(p, ends)) return;
            child = parse_statement(p);
            end_tag(p);
        }
        if (failed(p)) return;
        append(p, body, child);
    }
}

static j_node *parse_body(parser *p, const char *ends) {
    j_node *body = enter(p) ? node(p, J_BODY) : NULL;
    if (body) parse_into(p, body, ends);
    p->depth--;
    return body;
}

j_node *paged__j_parse(paged__j_run *run, const j_token *tokens) {
    parser p = {.run = run, .t = tokens};
    j_node *body = parse_body(&p, "");
    return run->status ? NULL : body;
}
