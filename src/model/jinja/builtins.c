/* model/jinja/builtins.c: how built-in functions are found and called; tests, globals, and the methods of
 * dicts,
 * lists and loops. Nothing here changes a value: what jinja2's immutable sandbox refuses is not there.
 */
#include <math.h>
#include <stdio.h>
#include <time.h>

#include "model/jinja/ast.h"

#define FUNCTION(name)                                                                                       \
    static j_value name(paged__j_run *run, j_value self, const j_value *argv, const j_args *args)
#define UNUSED (void)run, (void)self, (void)argv, (void)args

const j_builtin *paged__j_find_builtin(const j_builtin *list, size_t n, const j_string *name) {
    for (size_t i = 0; i < n; i++)
        if (paged__j_is(name, list[i].name)) return &list[i];
    return NULL;
}

/* ---- calls ---- */

/* The index of a name in "old new count"; -1: it is not there. */
static int param_index(const char *params, const j_string *name) {
    int index = 0;
    for (const char *word = params; *word; index++) {
        const size_t n = strcspn(word, " ");
        if (n == name->len && memcmp(word, name->bytes, n) == 0) return index;
        word += n + (word[n] == ' ');
    }
    return -1;
}

static size_t count_params(const char *params) {
    size_t n = *params != 0;
    for (; *params; params++) n += *params == ' ';
    return n;
}

static bool bind(paged__j_run *run, const j_builtin *fn, const j_args *args, j_value argv[J_PARAMS_MAX]) {
    const size_t n = count_params(fn->params);
    for (size_t i = 0; i < J_PARAMS_MAX; i++) argv[i] = (j_value){.kind = J_ABSENT};
    if (args->n > n) {
        paged__j_fail(run, PAGED_ERR_INVALID_ARG, "%s takes %zu arguments, not %zu", fn->name, n, args->n);
        return false;
    }
    for (size_t i = 0; i < args->n; i++) argv[i] = args->items[i];
    for (size_t i = 0; i < args->n_named; i++) {
        const j_string *name = args->named[i].key.s;
        const int index = param_index(fn->params, name);
        if (index < 0 || argv[index].kind != J_ABSENT) {
            paged__j_fail(run, PAGED_ERR_INVALID_ARG, "%s: argument %.*s is %s", fn->name,
                          (int)PAGED_MIN(name->len, 60), name->bytes,
                          index < 0 ? "not known" : "given twice");
            return false;
        }
        argv[index] = args->named[i].value;
    }
    for (int32_t i = 0; i < fn->n_required; i++) {
        if (argv[i].kind != J_ABSENT) continue;
        paged__j_fail(run, PAGED_ERR_INVALID_ARG, "%s needs %d arguments", fn->name, fn->n_required);
        return false;
    }
    return true;
}

/* Of the strings that a function may look at, so that each call pays for its time. */
static size_t bytes_of(j_value self, const j_args *args) {
    size_t n = self.kind == J_STRING ? self.s->len : 0;
    for (size_t i = 0; i < args->n; i++) n += args->items[i].kind == J_STRING ? args->items[i].s->len : 0;
    return n;
}

j_value paged__j_call_builtin(paged__j_run *run, const j_builtin *fn, j_value self, const j_args *args) {
    j_value argv[J_PARAMS_MAX];
    if (run->status || !paged__j_step(run, 2 + bytes_of(self, args) / 64)) return paged__j_undefined();
    if (fn->params[0] != '*' && !bind(run, fn, args, argv)) return paged__j_undefined();
    const j_value v = fn->call(run, self, argv, args);
    return run->status ? paged__j_undefined() : v;
}

/* ---- tests ---- */

static j_value yes(bool b) {
    return paged__j_bool(b);
}

FUNCTION(t_defined) {
    UNUSED;
    return yes(self.kind != J_UNDEFINED);
}
FUNCTION(t_undefined) {
    UNUSED;
    return yes(self.kind == J_UNDEFINED);
}
FUNCTION(t_none) {
    UNUSED;
    return yes(self.kind == J_NONE);
}
FUNCTION(t_boolean) {
    UNUSED;
    return yes(self.kind == J_BOOL);
}
FUNCTION(t_true) {
    UNUSED;
    return yes(self.kind == J_BOOL && self.b);
}
FUNCTION(t_false) {
    UNUSED;
    return yes(self.kind == J_BOOL && !self.b);
}
FUNCTION(t_integer) {
    UNUSED;
    return yes(self.kind == J_INT);
}
FUNCTION(t_float) {
    UNUSED;
    return yes(self.kind == J_FLOAT);
}
FUNCTION(t_number) {
    UNUSED;
    return yes(paged__j_is_number(self));
}
FUNCTION(t_string) {
    UNUSED;
    return yes(self.kind == J_STRING);
}
FUNCTION(t_mapping) {
    UNUSED;
    return yes(self.kind == J_DICT);
}
FUNCTION(t_escaped) {
    UNUSED;
    return yes(false);
}

FUNCTION(t_iterable) {
    UNUSED;
    return yes(self.kind == J_SEQ || self.kind == J_STRING || self.kind == J_DICT ||
               self.kind == J_UNDEFINED);
}

FUNCTION(t_sequence) {
    UNUSED;
    return yes((self.kind == J_SEQ && self.seq->form <= J_RANGE) || self.kind == J_STRING ||
               self.kind == J_DICT || self.kind == J_UNDEFINED);
}

FUNCTION(t_callable) {
    UNUSED;
    return yes(self.kind == J_MACRO || self.kind == J_FUNCTION || self.kind == J_METHOD ||
               self.kind == J_UNDEFINED);
}

FUNCTION(t_eq) {
    UNUSED;
    return yes(paged__j_equal(run, self, argv[0]));
}
FUNCTION(t_ne) {
    UNUSED;
    return yes(!paged__j_equal(run, self, argv[0]));
}
FUNCTION(t_lt) {
    UNUSED;
    return yes(paged__j_compare(run, self, argv[0]) == -1);
}
FUNCTION(t_gt) {
    UNUSED;
    return yes(paged__j_compare(run, self, argv[0]) == 1);
}
FUNCTION(t_in) {
    UNUSED;
    return yes(paged__j_contains(run, argv[0], self));
}

FUNCTION(t_le) {
    UNUSED;
    const int order = paged__j_compare(run, self, argv[0]);
    return yes(order == -1 || order == 0);
}

FUNCTION(t_ge) {
    UNUSED;
    const int order = paged__j_compare(run, self, argv[0]);
    return yes(order == 1 || order == 0);
}

/* Identity is that of the object; small values have none here and are compared. */
FUNCTION(t_sameas) {
    UNUSED;
    if (self.kind != argv[0].kind) return yes(false);
    if (self.kind == J_SEQ || self.kind >= J_DICT) return yes(self.dict == argv[0].dict);
    return yes(paged__j_equal(run, self, argv[0]));
}

static j_value remainder_is(paged__j_run *run, j_value v, j_value by, int64_t want) {
    if (!paged__j_is_number(v) || !paged__j_is_number(by))
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "a %s cannot be divided by a %s", paged__j_type(v),
                             paged__j_type(by));
    if (paged__j_real(by) == 0) return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "division by zero");
    if (v.kind == J_FLOAT || by.kind == J_FLOAT) {
        const double b = paged__j_real(by);
        double rest = fmod(paged__j_real(v), b);
        if (rest != 0 && (rest < 0) != (b < 0)) rest += b;
        return yes(rest == (double)want);
    }
    const int64_t b = paged__j_integer(by), rest = b == -1 ? 0 : paged__j_integer(v) % b;
    return yes((want == 0 ? rest == 0 : rest == 1 || rest == -1));
}

FUNCTION(t_even) {
    UNUSED;
    return remainder_is(run, self, paged__j_int(2), 0);
}
FUNCTION(t_odd) {
    UNUSED;
    return remainder_is(run, self, paged__j_int(2), 1);
}
FUNCTION(t_divisibleby) {
    UNUSED;
    return remainder_is(run, self, argv[0], 0);
}

static j_value string_test(paged__j_run *run, j_value self, const char *method) {
    const j_string name = {.bytes = method, .len = strlen(method)};
    const j_value text = paged__j_string(run, paged__j_str(run, self));
    const j_args none = {0};
    if (run->status) return paged__j_undefined();
    return paged__j_call_builtin(run, paged__j_find_string_method(&name), text, &none);
}

FUNCTION(t_lower) {
    UNUSED;
    return string_test(run, self, "islower");
}
FUNCTION(t_upper) {
    UNUSED;
    return string_test(run, self, "isupper");
}
FUNCTION(t_filter) {
    UNUSED;
    return yes(self.kind == J_STRING && paged__j_find_filter(self.s) != NULL);
}
FUNCTION(t_test) {
    UNUSED;
    return yes(self.kind == J_STRING && paged__j_find_test(self.s) != NULL);
}

static const j_builtin tests[] = {
    {"!=", "other", 1, t_ne},
    {"<", "other", 1, t_lt},
    {"<=", "other", 1, t_le},
    {"==", "other", 1, t_eq},
    {">", "other", 1, t_gt},
    {">=", "other", 1, t_ge},
    {"boolean", "", 0, t_boolean},
    {"callable", "", 0, t_callable},
    {"defined", "", 0, t_defined},
    {"divisibleby", "num", 1, t_divisibleby},
    {"eq", "other", 1, t_eq},
    {"equalto", "other", 1, t_eq},
    {"escaped", "", 0, t_escaped},
    {"even", "", 0, t_even},
    {"false", "", 0, t_false},
    {"filter", "", 0, t_filter},
    {"float", "", 0, t_float},
    {"ge", "other", 1, t_ge},
    {"greaterthan", "other", 1, t_gt},
    {"gt", "other", 1, t_gt},
    {"in", "seq", 1, t_in},
    {"integer", "", 0, t_integer},
    {"iterable", "", 0, t_iterable},
    {"le", "other", 1, t_le},
    {"lessthan", "other", 1, t_lt},
    {"lower", "", 0, t_lower},
    {"lt", "other", 1, t_lt},
    {"mapping", "", 0, t_mapping},
    {"ne", "other", 1, t_ne},
    {"none", "", 0, t_none},
    {"number", "", 0, t_number},
    {"odd", "", 0, t_odd},
    {"sameas", "other", 1, t_sameas},
    {"sequence", "", 0, t_sequence},
    {"string", "", 0, t_string},
    {"test", "", 0, t_test},
    {"true", "", 0, t_true},
    {"undefined", "", 0, t_undefined},
    {"upper", "", 0, t_upper},
};

const j_builtin *paged__j_find_test(const j_string *name) {
    return paged__j_find_builtin(tests, sizeof tests / sizeof tests[0], name);
}

/* ---- globals ---- */

enum { RANGE_MAX = 100000 }; /* as in jinja2's sandbox */

static int64_t range_arg(paged__j_run *run, j_value v) {
    if (v.kind == J_INT || v.kind == J_BOOL) return paged__j_integer(v);
    paged__j_fail(run, PAGED_ERR_INVALID_ARG, "range of a %s", paged__j_type(v));
    return 0;
}

FUNCTION(g_range) {
    UNUSED;
    if (args->n < 1 || args->n > 3 || args->n_named)
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "range takes 1 to 3 integers");
    const int64_t first = range_arg(run, args->items[0]),
                  second = args->n > 1 ? range_arg(run, args->items[1]) : 0,
                  step = args->n > 2 ? range_arg(run, args->items[2]) : 1;
    const int64_t from = args->n > 1 ? first : 0, to = args->n > 1 ? second : first;
    if (step == 0) return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "range with a step of 0");
    j_value list = paged__j_seq(run, J_RANGE);
    for (int64_t i = from; !run->status && (step > 0 ? i < to : i > to);) {
        if (list.seq->n == RANGE_MAX)
            return paged__j_fail(run, PAGED_ERR_LIMIT, "a range of more than %d", RANGE_MAX);
        paged__j_push(run, list, paged__j_int(i));
        if (__builtin_add_overflow(i, step, &i)) break;
    }
    return list;
}

/* dict(pairs or dict, name=value …) */
static j_value make_dict(paged__j_run *run, const j_args *args) {
    j_value dict = paged__j_dict(run);
    if (args->n > 1) return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "dict takes one argument and names");
    if (args->n && args->items[0].kind == J_DICT) {
        const j_dict *from = args->items[0].dict;
        for (size_t i = 0; i < from->n && !run->status; i++)
            paged__j_dict_set(run, dict.dict, from->entries[i].key, from->entries[i].value);
    } else if (args->n) {
        const j_seq *pairs = paged__j_iterate(run, args->items[0]);
        for (size_t i = 0; pairs && i < pairs->n && !run->status; i++) {
            const j_seq *pair = paged__j_iterate(run, pairs->items[i]);
            if (pair && pair->n != 2)
                return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "dict: item %zu is no pair", i);
            if (pair) paged__j_dict_set(run, dict.dict, pair->items[0], pair->items[1]);
        }
    }
    for (size_t i = 0; i < args->n_named && !run->status; i++)
        paged__j_dict_set(run, dict.dict, args->named[i].key, args->named[i].value);
    return dict;
}

FUNCTION(g_dict) {
    UNUSED;
    return make_dict(run, args);
}

FUNCTION(g_namespace) {
    UNUSED;
    j_value ns = make_dict(run, args);
    if (!run->status) ns.kind = J_NAMESPACE;
    return ns;
}

FUNCTION(g_raise_exception) {
    UNUSED;
    const j_string text = paged__j_str(run, argv[0]);
    return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "the template refuses: %.*s",
                         (int)PAGED_MIN(text.len, 300), text.bytes);
}

/* What the format says of the time is the template's if the format is. */
FUNCTION(g_strftime_now) {
    UNUSED;
    char format[200], text[400];
    struct tm tm;
    const time_t now = (time_t)run->now;
    if (argv[0].kind != J_STRING || argv[0].s->len >= sizeof format - 1 ||
        (argv[0].s->len && memchr(argv[0].s->bytes, 0, argv[0].s->len)))
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "strftime_now needs a format of less than %zu bytes",
                             sizeof format - 1);
    const size_t n = argv[0].s->len;
    bool raw = false;
    for (size_t i = 0; i < n; i++) raw |= paged__j_raw_at(argv[0].s, i);
    memcpy(format, argv[0].s->bytes, n);
    memcpy(format + n, ".", 2); /* an empty result and one that does not fit look alike */
    if (!localtime_r(&now, &tm))
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "strftime_now: no such time");
    const size_t len = strftime(text, sizeof text, format, &tm);
    if (len == 0)
        return paged__j_fail(run, PAGED_ERR_LIMIT, "strftime_now: more than %zu bytes", sizeof text);
    j_buffer buf = {0};
    paged__j_put(run, &buf, text, len - 1, raw);
    return paged__j_buffer_value(run, &buf);
}

static const j_builtin globals[] = {
    {"dict", "*", 0, g_dict},
    {"namespace", "*", 0, g_namespace},
    {"raise_exception", "message", 1, g_raise_exception},
    {"range", "*", 0, g_range},
    {"strftime_now", "format", 1, g_strftime_now},
};

const j_builtin *paged__j_find_global(const j_string *name) {
    return paged__j_find_builtin(globals, sizeof globals / sizeof globals[0], name);
}

/* ---- methods ---- */

FUNCTION(d_get) {
    UNUSED;
    const j_entry *found = paged__j_dict_find(run, self.dict, argv[0]);
    return found ? found->value : argv[1].kind == J_ABSENT ? paged__j_none() : argv[1];
}

static j_value view(paged__j_run *run, const j_dict *dict, j_form form) {
    j_value list = paged__j_seq(run, form);
    for (size_t i = 0; i < dict->n && !run->status; i++) {
        const j_entry *e = &dict->entries[i];
        paged__j_push(run, list,
                      form == J_KEYS     ? e->key
                      : form == J_VALUES ? e->value
                                         : paged__j_pair(run, e->key, e->value));
    }
    return list;
}

FUNCTION(d_items) {
    UNUSED;
    return view(run, self.dict, J_ITEMS);
}
FUNCTION(d_keys) {
    UNUSED;
    return view(run, self.dict, J_KEYS);
}
FUNCTION(d_values) {
    UNUSED;
    return view(run, self.dict, J_VALUES);
}

FUNCTION(d_copy) {
    UNUSED;
    const j_args from = {.items = &self, .n = 1};
    return make_dict(run, &from);
}

static const j_builtin dict_methods[] = {
    {"copy", "", 0, d_copy}, {"get", "key default", 1, d_get}, {"items", "", 0, d_items},
    {"keys", "", 0, d_keys}, {"values", "", 0, d_values},
};

FUNCTION(l_count) {
    UNUSED;
    int64_t n = 0;
    for (size_t i = 0; i < self.seq->n && paged__j_step(run, 1); i++)
        n += paged__j_equal(run, self.seq->items[i], argv[0]);
    return paged__j_int(n);
}

FUNCTION(l_index) {
    UNUSED;
    for (size_t i = 0; i < self.seq->n && paged__j_step(run, 1); i++)
        if (paged__j_equal(run, self.seq->items[i], argv[0])) return paged__j_int((int64_t)i);
    return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "index: it is not in the list");
}

static const j_builtin list_methods[] = {
    {"count", "value", 1, l_count},
    {"index", "value", 1, l_index},
};

FUNCTION(loop_cycle) {
    UNUSED;
    if (!args->n || args->n_named) return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "cycle needs values");
    return args->items[self.loop->index % args->n];
}

FUNCTION(loop_changed) {
    UNUSED;
    j_value now = paged__j_seq(run, J_TUPLE);
    for (size_t i = 0; i < args->n && !run->status; i++) paged__j_push(run, now, args->items[i]);
    const j_value before = self.loop->changed;
    const bool changed = before.kind == J_ABSENT || !paged__j_equal(run, before, now);
    if (changed && !run->status) self.loop->changed = now;
    return yes(changed);
}

static const j_builtin loop_methods[] = {
    {"changed", "*", 0, loop_changed},
    {"cycle", "*", 0, loop_cycle},
};

#define FIND(list) paged__j_find_builtin(list, sizeof list / sizeof list[0], name)

const j_builtin *paged__j_find_method(j_value self, const j_string *name) {
    if (self.kind == J_STRING) return paged__j_find_string_method(name);
    if (self.kind == J_DICT) return FIND(dict_methods);
    if (self.kind == J_LOOP) return FIND(loop_methods);
    if (self.kind == J_SEQ && self.seq->form <= J_RANGE) return FIND(list_methods);
    return NULL;
}
