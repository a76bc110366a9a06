/* model/jinja/eval.c: expressions. Recursion follows the nesting of the source and of macro calls, counted in
 * run->depth.
 */
#include <math.h>

#include "model/jinja/ast.h"

/* ---- names ---- */

static j_value undefined_name(const j_string *name) {
    return (j_value){.kind = J_UNDEFINED, .s = name};
}

/* Using what is not defined is an error that names it. */
static j_value fail_undefined(paged__j_run *run, j_value v) {
    if (!v.s) return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "an undefined value is used");
    return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "'%.*s' is undefined", (int)PAGED_MIN(v.s->len, 60),
                         v.s->bytes);
}

static j_value find_name(paged__j_run *run, const j_string *name) {
    for (const j_scope *scope = run->scope; scope; scope = scope->parent) {
        if (!paged__j_step(run, 1 + scope->n / 16)) return paged__j_undefined();
        for (size_t i = scope->n; i-- > 0;)
            if (paged__j_same(scope->variables[i].name, name)) return scope->variables[i].value;
    }
    const j_builtin *fn = paged__j_find_global(name);
    return fn ? (j_value){.kind = J_FUNCTION, .fn = fn} : undefined_name(name);
}

void paged__j_bind(paged__j_run *run, j_scope *scope, const j_string *name, j_value v) {
    for (size_t i = 0; i < scope->n; i++) {
        if (!paged__j_same(scope->variables[i].name, name)) continue;
        scope->variables[i].value = v;
        return;
    }
    j_variable *variables =
        paged__j_grow(run, scope->variables, scope->n, &scope->cap, sizeof *scope->variables);
    if (!variables) return;
    scope->variables = variables;
    variables[scope->n++] = (j_variable){name, v};
}

/* Targets nest as deep as the source does. */
void paged__j_assign(paged__j_run *run, const j_node *target, j_value v) {
    if (run->status) return;
    if (target->type == J_NAME) {
        paged__j_bind(run, run->scope, target->value.s, v);
    } else if (target->type == J_ATTR_TARGET) {
        const j_value ns = find_name(run, target->a->value.s);
        if (ns.kind == J_NAMESPACE)
            paged__j_dict_set(run, ns.dict, target->value, v);
        else
            paged__j_fail(run, PAGED_ERR_INVALID_ARG, "an attribute of a %s cannot be set",
                          paged__j_type(ns));
    } else {
        const j_seq *items = paged__j_iterate(run, v);
        if (items && items->n != target->n) {
            paged__j_fail(run, PAGED_ERR_INVALID_ARG, "%zu values for %zu names", items->n, target->n);
            return;
        }
        for (size_t i = 0; items && i < target->n; i++)
            paged__j_assign(run, target->list[i], items->items[i]);
    }
}

/* ---- arithmetic ---- */

static j_value no_operation(paged__j_run *run, const char *op, j_value a, j_value b) {
    if (a.kind == J_UNDEFINED) return fail_undefined(run, a);
    if (b.kind == J_UNDEFINED) return fail_undefined(run, b);
    return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "a %s %s a %s cannot be computed", paged__j_type(a), op,
                         paged__j_type(b));
}

static j_value too_large(paged__j_run *run) {
    return paged__j_fail(run, PAGED_ERR_LIMIT, "an integer of more than 64 bits");
}

static j_value power(paged__j_run *run, j_value a, j_value b) {
    if (a.kind == J_FLOAT || b.kind == J_FLOAT || paged__j_integer(b) < 0) {
        const double base = paged__j_real(a), exponent = paged__j_real(b), f = pow(base, exponent);
        if ((base == 0 && exponent < 0) || (isnan(f) && !isnan(base) && !isnan(exponent)))
            return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "%g ** %g has no value", base, exponent);
        if (isinf(f) && isfinite(base) && isfinite(exponent)) return too_large(run);
        return paged__j_float(f);
    }
    int64_t base = paged__j_integer(a), exponent = paged__j_integer(b), result = 1;
    for (; exponent > 0; exponent >>= 1) {
        if ((exponent & 1) && __builtin_mul_overflow(result, base, &result)) return too_large(run);
        if (exponent > 1 && __builtin_mul_overflow(base, base, &base)) return too_large(run);
    }
    return paged__j_int(result);
}

static j_value divide_floats(paged__j_run *run, uint8_t op, double a, double b) {
    if (b == 0) return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "division by zero");
    if (op == '/') return paged__j_float(a / b);
    double rest = fmod(a, b);
    const double quotient = (a - rest) / b;
    const bool adjust = rest != 0 && (b < 0) != (rest < 0);
    if (op == '%') {
        if (rest == 0) rest = copysign(0, b);
        return paged__j_float(adjust ? rest + b : rest);
    }
    const double whole = adjust ? quotient - 1 : quotient;
    if (whole == 0) return paged__j_float(copysign(0, a / b));
    const double floored = floor(whole);
    return paged__j_float(whole - floored > 0.5 ? floored + 1 : floored);
}

static j_value divide(paged__j_run *run, uint8_t op, j_value a, j_value b) {
    if (op == '/' || a.kind == J_FLOAT || b.kind == J_FLOAT)
        return divide_floats(run, op, paged__j_real(a), paged__j_real(b));
    const int64_t x = paged__j_integer(a), y = paged__j_integer(b);
    if (y == 0) return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "division by zero");
    if (x == INT64_MIN && y == -1) return op == '%' ? paged__j_int(0) : too_large(run);
    const int64_t rest = x % y;
    const bool adjust = rest != 0 && (rest < 0) != (y < 0);
    return paged__j_int(op == '%' ? rest + (adjust ? y : 0) : x / y - adjust);
}

static j_value add_numbers(paged__j_run *run, uint8_t op, j_value a, j_value b) {
    if (a.kind == J_FLOAT || b.kind == J_FLOAT) {
        const double x = paged__j_real(a), y = paged__j_real(b);
        return paged__j_float(op == '+' ? x + y : op == '-' ? x - y : x * y);
    }
    const int64_t x = paged__j_integer(a), y = paged__j_integer(b);
    int64_t z;
    const bool over = op == '+'   ? __builtin_add_overflow(x, y, &z)
                      : op == '-' ? __builtin_sub_overflow(x, y, &z)
                                  : __builtin_mul_overflow(x, y, &z);
    return over ? too_large(run) : paged__j_int(z);
}

static j_value add_seqs(paged__j_run *run, const j_seq *a, const j_seq *b) {
    j_value sum = paged__j_seq(run, (j_form)a->form);
    for (size_t i = 0; i < a->n && !run->status; i++) paged__j_push(run, sum, a->items[i]);
    for (size_t i = 0; i < b->n && !run->status; i++) paged__j_push(run, sum, b->items[i]);
    return sum;
}

static j_value repeat(paged__j_run *run, j_value v, int64_t times) {
    if (v.kind == J_STRING) {
        j_buffer buf = {0};
        for (int64_t i = 0; i < times && paged__j_step(run, 1) && v.s->len; i++)
            paged__j_put_string(run, &buf, v.s);
        return paged__j_buffer_value(run, &buf);
    }
    j_value list = paged__j_seq(run, (j_form)v.seq->form);
    for (int64_t i = 0; i < times && v.seq->n && !run->status; i++)
        for (size_t k = 0; k < v.seq->n && !run->status; k++) paged__j_push(run, list, v.seq->items[k]);
    return list;
}

static bool is_list(j_value v) {
    return v.kind == J_SEQ && v.seq->form <= J_TUPLE;
}

static j_value compute(paged__j_run *run, uint8_t op, j_value a, j_value b) {
    const char sign[2] = {(char)op, 0};
    if (run->status || !paged__j_step(run, 1)) return paged__j_undefined();
    if (paged__j_is_number(a) && paged__j_is_number(b)) {
        if (op == J_OP_POW) return power(run, a, b);
        if (op == '/' || op == '%' || op == J_OP_FLOOR) return divide(run, op, a, b);
        return add_numbers(run, op, a, b);
    }
    if (op == '+' && a.kind == J_STRING && b.kind == J_STRING) {
        j_buffer buf = {0};
        paged__j_put_string(run, &buf, a.s);
        paged__j_put_string(run, &buf, b.s);
        return paged__j_buffer_value(run, &buf);
    }
    if (op == '+' && is_list(a) && is_list(b) && a.seq->form == b.seq->form)
        return add_seqs(run, a.seq, b.seq);
    if (op == '*' && (a.kind == J_STRING || is_list(a)) && (b.kind == J_INT || b.kind == J_BOOL))
        return repeat(run, a, paged__j_integer(b));
    if (op == '*' && (b.kind == J_STRING || is_list(b)) && (a.kind == J_INT || a.kind == J_BOOL))
        return repeat(run, b, paged__j_integer(a));
    if (op == '%' && a.kind == J_STRING) return paged__j_format(run, a.s, b);
    return no_operation(run, op == J_OP_POW ? "**" : op == J_OP_FLOOR ? "//" : sign, a, b);
}

static j_value eval_math(paged__j_run *run, const j_node *e) {
    j_value v = paged__j_eval(run, e->list[0]->a);
    for (size_t i = 1; i < e->n && !run->status;) {
        j_value next = paged__j_eval(run, e->list[i]->a);
        if (e->list[i]->op != '+' || v.kind != J_STRING || next.kind != J_STRING) {
            v = compute(run, e->list[i++]->op, v, next);
            continue;
        }
        /* 'a' + b + 'c' …: one growing text, not one for each sum. */
        j_buffer buf = {0};
        paged__j_put_string(run, &buf, v.s);
        while (!run->status) {
            paged__j_put_string(run, &buf, next.s);
            if (++i == e->n || e->list[i]->op != '+') break;
            next = paged__j_eval(run, e->list[i]->a);
            if (next.kind == J_STRING) continue;
            return no_operation(run, "+", paged__j_buffer_value(run, &buf), next);
        }
        v = paged__j_buffer_value(run, &buf);
    }
    return v;
}

static j_value eval_sign(paged__j_run *run, const j_node *e) {
    const j_value v = paged__j_eval(run, e->a);
    if (run->status) return v;
    if (v.kind == J_UNDEFINED) return fail_undefined(run, v);
    if (!paged__j_is_number(v))
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "a %s has no sign", paged__j_type(v));
    if (v.kind == J_FLOAT) return paged__j_float(e->op == '-' ? -v.f : v.f);
    const int64_t i = paged__j_integer(v);
    return i == INT64_MIN && e->op == '-' ? too_large(run) : paged__j_int(e->op == '-' ? -i : i);
}

/* ---- comparisons ---- */

static bool compare(paged__j_run *run, uint8_t op, j_value a, j_value b) {
    if (op == J_OP_EQ) return paged__j_equal(run, a, b);
    if (op == J_OP_NE) return !paged__j_equal(run, a, b);
    if (op == J_OP_IN) return paged__j_contains(run, b, a);
    if (op == J_OP_NOT_IN) return !paged__j_contains(run, b, a);
    if (a.kind == J_UNDEFINED || b.kind == J_UNDEFINED) {
        fail_undefined(run, a.kind == J_UNDEFINED ? a : b);
        return false;
    }
    const int order = paged__j_compare(run, a, b); /* 2: a NaN, of which nothing holds */
    if (op == '<') return order == -1;
    if (op == '>') return order == 1;
    return order == 0 || order == (op == J_OP_LE ? -1 : 1);
}

static j_value eval_compare(paged__j_run *run, const j_node *e) {
    j_value left = paged__j_eval(run, e->list[0]->a);
    bool holds = true;
    for (size_t i = 1; i < e->n && holds && !run->status; i++) {
        const j_value right = paged__j_eval(run, e->list[i]->a);
        if (run->status) break;
        holds = compare(run, e->list[i]->op, left, right);
        left = right;
    }
    return paged__j_bool(holds);
}

/* ---- members ---- */

static j_value method_of(paged__j_run *run, j_value v, const j_builtin *fn) {
    j_method *method = paged__j_alloc(run, 1, sizeof *method);
    if (!method) return paged__j_undefined();
    *method = (j_method){v, fn};
    return (j_value){.kind = J_METHOD, .method = method};
}

j_value paged__j_get_attr(paged__j_run *run, j_value v, const j_string *name) {
    if (run->status) return paged__j_undefined();
    if (v.kind == J_UNDEFINED) return fail_undefined(run, v);
    if (v.kind == J_LOOP) {
        const j_value found = paged__j_loop_attr(run, v.loop, name);
        if (found.kind != J_ABSENT) return found;
    }
    const j_builtin *fn = paged__j_find_method(v, name);
    if (fn) return method_of(run, v, fn);
    if (v.kind == J_DICT || v.kind == J_NAMESPACE) {
        const j_value *found = paged__j_dict_get(v.dict, name->bytes, name->len);
        if (found && paged__j_step(run, v.dict->n / 16)) return *found;
    }
    return undefined_name(name);
}

static j_value item_at(paged__j_run *run, j_value v, int64_t i) {
    if (v.kind == J_SEQ) {
        const int64_t n = (int64_t)v.seq->n;
        if (i < 0) i += n;
        return i >= 0 && i < n ? v.seq->items[i] : paged__j_undefined();
    }
    const int64_t n = (int64_t)paged__j_count_chars(v.s);
    if (!paged__j_step(run, v.s->len / 64)) return paged__j_undefined();
    if (i < 0) i += n;
    if (i < 0 || i >= n) return paged__j_undefined();
    const size_t from = paged__j_offset(v.s, (size_t)i);
    uint32_t code;
    const size_t len = paged__j_char(v.s->bytes + from, v.s->len - from, &code);
    return paged__j_string(run, paged__j_cut(v.s, from, from + len));
}

j_value paged__j_get_item(paged__j_run *run, j_value v, j_value key) {
    if (run->status) return paged__j_undefined();
    if (v.kind == J_UNDEFINED) return fail_undefined(run, v);
    const bool has_items = v.kind == J_STRING || (v.kind == J_SEQ && v.seq->form <= J_RANGE);
    if (has_items && (key.kind == J_INT || key.kind == J_BOOL)) return item_at(run, v, paged__j_integer(key));
    if (v.kind == J_DICT && key.kind != J_DICT && (key.kind != J_SEQ || key.seq->form == J_TUPLE)) {
        const j_entry *found = paged__j_dict_find(run, v.dict, key);
        if (found) return found->value;
    }
    if (key.kind != J_STRING) return paged__j_undefined();
    const j_value found = paged__j_get_attr(run, v, key.s);
    return found;
}

/* One end of a slice, moved into 0 … n (or -1 … n - 1 going down). */
static int64_t slice_end(paged__j_run *run, const j_node *e, int64_t n, bool down, int64_t missing) {
    const j_value v = e ? paged__j_eval(run, e) : paged__j_none();
    if (v.kind == J_NONE) return missing;
    if (v.kind != J_INT && v.kind != J_BOOL) {
        paged__j_fail(run, PAGED_ERR_INVALID_ARG, "a %s in a slice", paged__j_type(v));
        return 0;
    }
    int64_t i = paged__j_integer(v);
    if (i < 0) i += n;
    if (i < 0) return down ? -1 : 0;
    return PAGED_MIN(i, down ? n - 1 : n);
}

static j_value slice(paged__j_run *run, j_value v, const j_node *e) {
    if (v.kind == J_UNDEFINED) return fail_undefined(run, v);
    const bool has_items = v.kind == J_STRING || (v.kind == J_SEQ && v.seq->form <= J_RANGE);
    int64_t n = 0, step = 1;
    if (has_items) paged__j_length(run, v, &n);
    const j_value by = e->c ? paged__j_eval(run, e->c) : paged__j_none();
    if (by.kind == J_INT || by.kind == J_BOOL) step = paged__j_integer(by);
    const bool odd_step = by.kind != J_NONE && by.kind != J_INT && by.kind != J_BOOL;
    const int64_t from = slice_end(run, e->a, n, step < 0, step < 0 ? n - 1 : 0),
                  to = slice_end(run, e->b, n, step < 0, step < 0 ? -1 : n);
    if (run->status) return paged__j_undefined();
    if (!has_items) return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "a slice of a %s", paged__j_type(v));
    if (step == 0 || odd_step) return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "a bad step in a slice");
    if (v.kind == J_STRING && step == 1) {
        if (!paged__j_step(run, v.s->len / 64)) return paged__j_undefined();
        const size_t begin = paged__j_offset(v.s, (size_t)from),
                     end = paged__j_offset(v.s, (size_t)PAGED_MAX(from, to));
        return paged__j_string(run, paged__j_cut(v.s, begin, end));
    }
    const j_seq *items = paged__j_iterate(run, v);
    j_value list = paged__j_seq(run, v.kind == J_SEQ ? (j_form)v.seq->form : J_LIST);
    for (int64_t i = from; !run->status && (step > 0 ? i < to : i > to);) {
        paged__j_push(run, list, items->items[i]);
        if (__builtin_add_overflow(i, step, &i)) break;
    }
    if (v.kind == J_SEQ || run->status) return list;
    j_buffer buf = {0};
    for (size_t i = 0; i < list.seq->n; i++) paged__j_put_string(run, &buf, list.seq->items[i].s);
    return paged__j_buffer_value(run, &buf);
}

/* ---- calls ---- */

typedef struct arg_list {
    j_value *items;
    j_entry *named;
    size_t n, cap, n_named, cap_named;
} arg_list;

static void add_arg(paged__j_run *run, arg_list *list, j_value v) {
    j_value *items = paged__j_grow(run, list->items, list->n, &list->cap, sizeof *items);
    if (!items || !paged__j_step(run, 1)) return;
    list->items = items;
    items[list->n++] = v;
}

static void add_named(paged__j_run *run, arg_list *list, j_value name, j_value v) {
    if (name.kind != J_STRING) {
        paged__j_fail(run, PAGED_ERR_INVALID_ARG, "an argument's name is a %s", paged__j_type(name));
        return;
    }
    for (size_t i = 0; i < list->n_named; i++) {
        if (!paged__j_same(list->named[i].key.s, name.s)) continue;
        paged__j_fail(run, PAGED_ERR_INVALID_ARG, "two values for the argument %.*s",
                      (int)PAGED_MIN(name.s->len, 60), name.s->bytes);
        return;
    }
    j_entry *named = paged__j_grow(run, list->named, list->n_named, &list->cap_named, sizeof *named);
    if (!named || !paged__j_step(run, 1 + list->n_named / 16)) return;
    list->named = named;
    named[list->n_named++] = (j_entry){.key = name, .value = v};
}

static void eval_arg(paged__j_run *run, arg_list *list, const j_node *arg) {
    const j_value v = paged__j_eval(run, arg->a);
    if (run->status) return;
    if (arg->op == '*') {
        const j_seq *items = paged__j_iterate(run, v);
        for (size_t i = 0; items && i < items->n && !run->status; i++) add_arg(run, list, items->items[i]);
    } else if (arg->op == 'd') {
        if (v.kind != J_DICT) {
            paged__j_fail(run, PAGED_ERR_INVALID_ARG, "** needs a dict, not a %s", paged__j_type(v));
            return;
        }
        for (size_t i = 0; i < v.dict->n && !run->status; i++)
            add_named(run, list, v.dict->entries[i].key, v.dict->entries[i].value);
    } else if (arg->value.kind == J_STRING) {
        add_named(run, list, arg->value, v);
    } else {
        add_arg(run, list, v);
    }
}

static j_args eval_args(paged__j_run *run, const j_node *call, const j_value *caller) {
    arg_list list = {0};
    for (size_t i = 0; i < call->n && !run->status; i++) eval_arg(run, &list, call->list[i]);
    if (caller) add_named(run, &list, paged__j_text(run, "caller"), *caller);
    return (j_args){list.items, list.n, list.named, list.n_named};
}

j_value paged__j_call(paged__j_run *run, j_value callee, const j_args *args) {
    if (run->status || !paged__j_step(run, 4)) return paged__j_undefined();
    switch (callee.kind) {
    case J_MACRO:
        return paged__j_call_macro(run, callee.macro, args);
    case J_FUNCTION:
        return paged__j_call_builtin(run, callee.fn, paged__j_undefined(), args);
    case J_METHOD:
        return paged__j_call_builtin(run, callee.method->fn, callee.method->self, args);
    case J_UNDEFINED:
        return fail_undefined(run, callee);
    default:
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "a %s cannot be called", paged__j_type(callee));
    }
}

static j_value apply(paged__j_run *run, const j_node *step, j_value v) {
    const bool is_test = step->type == J_TEST;
    if (!step->fn)
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "there is no %s \"%.*s\"",
                             is_test ? "test" : "filter", (int)PAGED_MIN(step->value.s->len, 60),
                             step->value.s->bytes);
    const j_args args = eval_args(run, step, NULL);
    const j_value result = paged__j_call_builtin(run, step->fn, v, &args);
    return is_test && !run->status ? paged__j_bool(paged__j_truth(result) != step->op) : result;
}

j_value paged__j_steps(paged__j_run *run, const j_node *e, j_value v, const j_value *caller) {
    for (size_t i = 0; i < e->n && !run->status; i++) {
        const j_node *step = e->list[i];
        run->line = step->line;
        if (step->type == J_ATTR) {
            v = paged__j_get_attr(run, v, step->value.s);
        } else if (step->type == J_ITEM) {
            v = paged__j_get_item(run, v, paged__j_eval(run, step->a));
        } else if (step->type == J_SLICE) {
            v = slice(run, v, step);
        } else if (step->type == J_CALL) {
            const j_args args = eval_args(run, step, i + 1 == e->n ? caller : NULL);
            v = paged__j_call(run, v, &args);
        } else {
            v = apply(run, step, v);
        }
    }
    return run->status ? paged__j_undefined() : v;
}

/* ---- all expressions ---- */

static j_value eval_list(paged__j_run *run, const j_node *e) {
    j_value list = paged__j_seq(run, (j_form)e->op);
    for (size_t i = 0; i < e->n && !run->status; i++)
        paged__j_push(run, list, paged__j_eval(run, e->list[i]));
    return list;
}

static j_value eval_dict(paged__j_run *run, const j_node *e) {
    j_value dict = paged__j_dict(run);
    for (size_t i = 0; i + 1 < e->n && !run->status; i += 2) {
        const j_value key = paged__j_eval(run, e->list[i]), value = paged__j_eval(run, e->list[i + 1]);
        if (!run->status) paged__j_dict_set(run, dict.dict, key, value);
    }
    return dict;
}

static j_value eval_join(paged__j_run *run, const j_node *e) {
    j_buffer buf = {0};
    for (size_t i = 0; i < e->n && !run->status; i++)
        paged__j_put_value(run, &buf, paged__j_eval(run, e->list[i]));
    return paged__j_buffer_value(run, &buf);
}

/* The first operand that decides, or the last one. */
static j_value eval_logic(paged__j_run *run, const j_node *e) {
    j_value v = paged__j_undefined();
    for (size_t i = 0; i < e->n && !run->status; i++) {
        v = paged__j_eval(run, e->list[i]);
        if (paged__j_truth(v) == (e->type == J_OR)) break;
    }
    return v;
}

static j_value eval_if_else(paged__j_run *run, const j_node *e) {
    size_t i = 0;
    for (; i + 1 < e->n && !run->status; i += 2)
        if (paged__j_truth(paged__j_eval(run, e->list[i + 1]))) return paged__j_eval(run, e->list[i]);
    return i < e->n && !run->status ? paged__j_eval(run, e->list[i]) : paged__j_undefined();
}

static j_value eval_any(paged__j_run *run, const j_node *e) {
    switch (e->type) {
    case J_CONST:
        return e->value;
    case J_NAME:
        return find_name(run, e->value.s);
    case J_MAKE:
        return eval_list(run, e);
    case J_OBJECT:
        return eval_dict(run, e);
    case J_IF_ELSE:
        return eval_if_else(run, e);
    case J_OR:
    case J_AND:
        return eval_logic(run, e);
    case J_NOT:
        return paged__j_bool(!paged__j_truth(paged__j_eval(run, e->a)));
    case J_SIGN:
        return eval_sign(run, e);
    case J_COMPARE:
        return eval_compare(run, e);
    case J_MATH:
        return eval_math(run, e);
    case J_JOIN:
        return eval_join(run, e);
    default:
        return paged__j_steps(run, e, paged__j_eval(run, e->a), NULL);
    }
}

j_value paged__j_eval(paged__j_run *run, const j_node *e) {
    if (!paged__j_step(run, 1)) return paged__j_undefined();
    if (run->depth >= J_RUN_DEPTH)
        return paged__j_fail(run, PAGED_ERR_LIMIT, "it runs nested deeper than %d", J_RUN_DEPTH);
    run->depth++;
    run->line = e->line;
    const j_value v = eval_any(run, e);
    run->depth--;
    return v;
}
