/* model/jinja/filters.c: filters. Those that give a generator in jinja2 give an iterator: no length, used
 * up by its first use.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "model/jinja/value.h"

#define FILTER(name)                                                                                         \
    static j_value name(paged__j_run *run, j_value self, const j_value *argv, const j_args *args)
#define UNUSED (void)run, (void)self, (void)argv, (void)args

static bool given(j_value v) {
    return v.kind != J_ABSENT && v.kind != J_NONE;
}

static bool is_set(j_value v) {
    return v.kind != J_ABSENT && paged__j_truth(v);
}

static int64_t int_or(paged__j_run *run, const char *what, j_value v, int64_t missing) {
    if (v.kind == J_ABSENT) return missing;
    if (v.kind == J_INT || v.kind == J_BOOL) return paged__j_integer(v);
    paged__j_fail(run, PAGED_ERR_INVALID_ARG, "%s: a %s, not an integer", what, paged__j_type(v));
    return missing;
}

/* An iterator over the items of `list`, which nobody else has. */
static j_value as_iterator(j_value list) {
    if (list.kind == J_SEQ) list.seq->form = J_ITERATOR;
    return list;
}

static j_value copy_list(paged__j_run *run, j_value v) {
    const j_seq *items = paged__j_iterate(run, v);
    j_value list = paged__j_seq(run, J_LIST);
    for (size_t i = 0; items && i < items->n && !run->status; i++) paged__j_push(run, list, items->items[i]);
    return run->status ? paged__j_undefined() : list;
}

/* ---- attributes, and keys of an order ---- */

/* One part of "a.0.b", an item first and an attribute else. */
static j_value get_part(paged__j_run *run, j_value v, const j_string *part) {
    int64_t index;
    bool digits = part->len > 0;
    for (size_t i = 0; i < part->len; i++) digits &= part->bytes[i] >= '0' && part->bytes[i] <= '9';
    if (digits && paged__j_parse_int(part, 10, &index)) return paged__j_get_item(run, v, paged__j_int(index));
    return paged__j_get_item(run, v, paged__j_string(run, *part));
}

/* v itself if `path` was not given; `missing` takes the place of what is undefined, if it was. */
static j_value get_path(paged__j_run *run, j_value v, j_value path, j_value missing) {
    if (!given(path)) return v;
    if (path.kind == J_INT) return paged__j_get_item(run, v, path);
    if (path.kind != J_STRING)
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "an attribute's name is a %s", paged__j_type(path));
    for (size_t from = 0; from <= path.s->len && !run->status;) {
        const j_string dot = {.bytes = ".", .len = 1};
        const size_t at = paged__j_find(path.s, &dot, from), to = at == SIZE_MAX ? path.s->len : at;
        const j_string part = paged__j_cut(path.s, from, to);
        v = get_part(run, v, &part);
        if (v.kind == J_UNDEFINED && given(missing)) v = missing;
        from = to + 1;
    }
    return v;
}

/* What an item is compared by; strings in lower case unless the case counts. */
static j_value key_of(paged__j_run *run, j_value v, j_value path, bool case_sensitive) {
    const j_value key = get_path(run, v, path, paged__j_none());
    return key.kind == J_STRING && !case_sensitive ? paged__j_set_case(run, key.s, J_LOWER) : key;
}

/* "a,b": a list of keys. */
static j_value keys_of(paged__j_run *run, j_value v, j_value path, bool case_sensitive) {
    const j_string comma = {.bytes = ",", .len = 1};
    if (path.kind != J_STRING || paged__j_find(path.s, &comma, 0) == SIZE_MAX)
        return key_of(run, v, path, case_sensitive);
    j_value keys = paged__j_seq(run, J_LIST);
    for (size_t from = 0; from <= path.s->len && !run->status;) {
        const size_t at = paged__j_find(path.s, &comma, from), to = at == SIZE_MAX ? path.s->len : at;
        const j_value part = paged__j_string(run, paged__j_cut(path.s, from, to));
        paged__j_push(run, keys, key_of(run, v, part, case_sensitive));
        from = to + 1;
    }
    return keys;
}

typedef struct keyed {
    j_value key, value;
} keyed;

/* Stable, by merging runs of 1, 2, 4 … ; equal ones keep their order also in reverse. */
static keyed *merge_sort(paged__j_run *run, keyed *items, size_t n, bool reverse) {
    keyed *other = paged__j_alloc(run, n + 1, sizeof *other);
    for (size_t width = 1; other && width < n && !run->status; width *= 2) {
        for (size_t from = 0; from < n; from += 2 * width) {
            const size_t middle = PAGED_MIN(from + width, n), to = PAGED_MIN(from + 2 * width, n);
            size_t a = from, b = middle;
            for (size_t k = from; k < to; k++) {
                bool take_b = a == middle;
                if (!take_b && b < to) {
                    const int order = paged__j_compare(run, items[b].key, items[a].key);
                    take_b = paged__j_step(run, 1) && (reverse ? order == 1 : order == -1);
                }
                other[k] = take_b ? items[b++] : items[a++];
            }
        }
        keyed *swap = items;
        items = other;
        other = swap;
    }
    return items;
}

static j_value sort_list(paged__j_run *run, j_value v, j_value path, bool case_sensitive, bool reverse) {
    const j_seq *seq = paged__j_iterate(run, v);
    keyed *items = seq ? paged__j_alloc(run, seq->n + 1, sizeof *items) : NULL;
    if (!items) return paged__j_undefined();
    for (size_t i = 0; i < seq->n && !run->status; i++)
        items[i] = (keyed){keys_of(run, seq->items[i], path, case_sensitive), seq->items[i]};
    const size_t n = seq->n;
    if (!run->status) items = merge_sort(run, items, n, reverse);
    j_value list = paged__j_seq(run, J_LIST);
    for (size_t i = 0; i < n && !run->status; i++) paged__j_push(run, list, items[i].value);
    return list;
}

/* ---- lists ---- */

FILTER(f_list) {
    UNUSED;
    return copy_list(run, self);
}

FILTER(f_length) {
    UNUSED;
    int64_t n = 0;
    return paged__j_length(run, self, &n) ? paged__j_int(n) : paged__j_undefined();
}

FILTER(f_first) {
    UNUSED;
    const j_seq *items = paged__j_iterate(run, self);
    return items && items->n ? items->items[0] : paged__j_undefined();
}

FILTER(f_last) {
    UNUSED;
    if (self.kind == J_SEQ && self.seq->form == J_ITERATOR)
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "last: an iterator has no end to begin at");
    const j_seq *items = paged__j_iterate(run, self);
    return items && items->n ? items->items[items->n - 1] : paged__j_undefined();
}

FILTER(f_reverse) {
    UNUSED;
    const j_seq *items = paged__j_iterate(run, self);
    j_value list = paged__j_seq(run, J_ITERATOR);
    for (size_t i = items ? items->n : 0; i-- > 0 && !run->status;) paged__j_push(run, list, items->items[i]);
    if (self.kind != J_STRING || run->status) return list;
    const j_string nothing = {.bytes = ""};
    return paged__j_join_list(run, &nothing, list, false);
}

FILTER(f_sort) {
    UNUSED;
    return sort_list(run, self, argv[2], is_set(argv[1]), is_set(argv[0]));
}

FILTER(f_unique) {
    UNUSED;
    const j_seq *items = paged__j_iterate(run, self);
    j_value list = paged__j_seq(run, J_ITERATOR), seen = paged__j_dict(run);
    for (size_t i = 0; items && i < items->n && !run->status; i++) {
        const j_value key = key_of(run, items->items[i], argv[1], is_set(argv[0]));
        if (run->status || paged__j_dict_find(run, seen.dict, key)) continue;
        paged__j_dict_set(run, seen.dict, key, paged__j_none());
        paged__j_push(run, list, items->items[i]);
    }
    return list;
}

static j_value extreme(paged__j_run *run, j_value self, const j_value *argv, int want) {
    const j_seq *items = paged__j_iterate(run, self);
    if (!items || items->n == 0) return paged__j_undefined();
    j_value best = items->items[0], best_key = key_of(run, best, argv[1], is_set(argv[0]));
    for (size_t i = 1; i < items->n && !run->status; i++) {
        const j_value key = key_of(run, items->items[i], argv[1], is_set(argv[0]));
        if (run->status || paged__j_compare(run, key, best_key) != want) continue;
        best = items->items[i];
        best_key = key;
    }
    return best;
}

FILTER(f_min) {
    UNUSED;
    return extreme(run, self, argv, -1);
}
FILTER(f_max) {
    UNUSED;
    return extreme(run, self, argv, 1);
}

FILTER(f_sum) {
    UNUSED;
    j_value sum = argv[1].kind == J_ABSENT ? paged__j_int(0) : argv[1];
    const j_seq *items = paged__j_iterate(run, self);
    if (!paged__j_is_number(sum)) return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "sum adds numbers only");
    for (size_t i = 0; items && i < items->n && paged__j_step(run, 1); i++) {
        const j_value v = get_path(run, items->items[i], argv[0], paged__j_none());
        int64_t whole = 0;
        if (!paged__j_is_number(v))
            return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "sum: item %zu is a %s", i, paged__j_type(v));
        if (sum.kind == J_FLOAT || v.kind == J_FLOAT)
            sum = paged__j_float(paged__j_real(sum) + paged__j_real(v));
        else if (__builtin_add_overflow(paged__j_integer(sum), paged__j_integer(v), &whole))
            return paged__j_fail(run, PAGED_ERR_LIMIT, "an integer of more than 64 bits");
        else
            sum = paged__j_int(whole);
    }
    return sum;
}

FILTER(f_batch) {
    UNUSED;
    const int64_t n = int_or(run, "batch", argv[0], 1);
    const j_seq *items = paged__j_iterate(run, self);
    j_value list = paged__j_seq(run, J_ITERATOR), row = paged__j_seq(run, J_LIST);
    for (size_t i = 0; items && i < items->n && !run->status; i++) {
        if (row.seq->n && (int64_t)row.seq->n == n) {
            paged__j_push(run, list, row);
            row = paged__j_seq(run, J_LIST);
        }
        paged__j_push(run, row, items->items[i]);
    }
    if (run->status || row.seq->n == 0) return list;
    while (given(argv[1]) && (int64_t)row.seq->n < n && !run->status) paged__j_push(run, row, argv[1]);
    paged__j_push(run, list, row);
    return list;
}

/* ---- map, select, reject ---- */

static const j_value *named_arg(const j_args *args, const char *name) {
    for (size_t i = 0; i < args->n_named; i++)
        if (paged__j_is(args->named[i].key.s, name)) return &args->named[i].value;
    return NULL;
}

static j_value map_attribute(paged__j_run *run, const j_seq *items, const j_args *args) {
    const j_value *path = named_arg(args, "attribute"), *missing = named_arg(args, "default");
    if (!path || args->n_named > (missing ? 2u : 1u))
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "map needs a filter or an attribute");
    j_value list = paged__j_seq(run, J_ITERATOR);
    for (size_t i = 0; i < items->n && !run->status; i++)
        paged__j_push(run, list, get_path(run, items->items[i], *path, missing ? *missing : paged__j_none()));
    return list;
}

FILTER(f_map) {
    UNUSED;
    if (!paged__j_truth(self)) return paged__j_seq(run, J_ITERATOR); /* none and 0 too, as in jinja2 */
    const j_seq *items = paged__j_iterate(run, self);
    if (!items) return paged__j_undefined();
    if (args->n == 0) return map_attribute(run, items, args);
    const j_builtin *fn = args->items[0].kind == J_STRING ? paged__j_find_filter(args->items[0].s) : NULL;
    if (!fn) return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "map: there is no such filter");
    const j_args rest = {args->items + 1, args->n - 1, args->named, args->n_named};
    j_value list = paged__j_seq(run, J_ITERATOR);
    if (++run->depth > J_RUN_DEPTH) paged__j_fail(run, PAGED_ERR_LIMIT, "map runs nested too deep");
    for (size_t i = 0; i < items->n && !run->status; i++)
        paged__j_push(run, list, paged__j_call_builtin(run, fn, items->items[i], &rest));
    run->depth--;
    return list;
}

/* The items that pass a test (`want`) or fail it; skip: 1 if the first argument names an attribute. */
static j_value choose(paged__j_run *run, j_value self, const j_args *args, size_t skip, bool want) {
    if (!paged__j_truth(self)) return paged__j_seq(run, J_ITERATOR);
    const j_seq *items = paged__j_iterate(run, self);
    const j_builtin *test = NULL;
    if (!items) return paged__j_undefined();
    if (args->n < skip) return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "an attribute's name is missing");
    if (args->n > skip) {
        const j_value name = args->items[skip];
        test = name.kind == J_STRING ? paged__j_find_test(name.s) : NULL;
        if (!test) return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "select, reject: there is no such test");
    }
    const size_t used = skip + (test != NULL);
    const j_args rest = {args->n > used ? args->items + used : NULL, args->n - used, args->named,
                         args->n_named};
    j_value list = paged__j_seq(run, J_ITERATOR);
    for (size_t i = 0; i < items->n && !run->status; i++) {
        j_value v = items->items[i];
        if (skip) v = get_path(run, v, args->items[0], paged__j_none());
        if (test && !run->status) v = paged__j_call_builtin(run, test, v, &rest);
        if (!run->status && paged__j_truth(v) == want) paged__j_push(run, list, items->items[i]);
    }
    return list;
}

FILTER(f_select) {
    UNUSED;
    return choose(run, self, args, 0, true);
}
FILTER(f_reject) {
    UNUSED;
    return choose(run, self, args, 0, false);
}
FILTER(f_selectattr) {
    UNUSED;
    return choose(run, self, args, 1, true);
}
FILTER(f_rejectattr) {
    UNUSED;
    return choose(run, self, args, 1, false);
}

/* ---- dicts and members ---- */

static j_value pairs_of(paged__j_run *run, const j_dict *dict) {
    j_value list = paged__j_seq(run, J_LIST);
    for (size_t i = 0; i < dict->n && !run->status; i++)
        paged__j_push(run, list, paged__j_pair(run, dict->entries[i].key, dict->entries[i].value));
    return list;
}

FILTER(f_items) {
    UNUSED;
    if (self.kind == J_UNDEFINED) return paged__j_seq(run, J_ITERATOR);
    if (self.kind != J_DICT)
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "items of a %s", paged__j_type(self));
    return as_iterator(pairs_of(run, self.dict));
}

FILTER(f_dictsort) {
    UNUSED;
    if (self.kind != J_DICT)
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "dictsort of a %s", paged__j_type(self));
    const bool by_value = argv[1].kind == J_STRING && paged__j_is(argv[1].s, "value");
    if (given(argv[1]) && !by_value && !(argv[1].kind == J_STRING && paged__j_is(argv[1].s, "key")))
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "dictsort: by must be 'key' or 'value'");
    const j_value pairs = pairs_of(run, self.dict);
    if (run->status) return pairs;
    return sort_list(run, pairs, paged__j_int(by_value), is_set(argv[0]), is_set(argv[2]));
}

FILTER(f_attr) {
    UNUSED;
    const j_string name = paged__j_str(run, argv[0]);
    if (self.kind == J_DICT && !paged__j_find_method(self, &name)) return paged__j_undefined();
    const j_value key = paged__j_string(run, name);
    return run->status ? key : paged__j_get_attr(run, self, key.s);
}

FILTER(f_default) {
    UNUSED;
    const bool use = self.kind == J_UNDEFINED || (is_set(argv[1]) && !paged__j_truth(self));
    if (!use) return self;
    return argv[0].kind == J_ABSENT ? paged__j_text(run, "") : argv[0];
}

/* ---- numbers ---- */

FILTER(f_abs) {
    UNUSED;
    if (self.kind == J_FLOAT) return paged__j_float(fabs(self.f));
    if (!paged__j_is_number(self))
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "abs of a %s", paged__j_type(self));
    const int64_t i = paged__j_integer(self);
    if (i == INT64_MIN) return paged__j_fail(run, PAGED_ERR_LIMIT, "an integer of more than 64 bits");
    return paged__j_int(i < 0 ? -i : i);
}

/* A float cut to an integer; false: it has none. */
static bool to_integer(paged__j_run *run, double f, int64_t *out) {
    if (!isfinite(f)) return false;
    if (f >= 0x1p63 || f < -0x1p63) {
        paged__j_fail(run, PAGED_ERR_LIMIT, "an integer of more than 64 bits");
        return false;
    }
    *out = (int64_t)f;
    return true;
}

FILTER(f_int) {
    UNUSED;
    const j_value missing = argv[0].kind == J_ABSENT ? paged__j_int(0) : argv[0];
    int64_t i = 0;
    double f;
    if (self.kind == J_UNDEFINED)
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "int of an undefined value");
    if (self.kind == J_INT || self.kind == J_BOOL) return paged__j_int(paged__j_integer(self));
    if (self.kind == J_FLOAT && isinf(self.f))
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "int of infinity");
    if (self.kind == J_FLOAT) return to_integer(run, self.f, &i) ? paged__j_int(i) : missing;
    if (self.kind != J_STRING) return missing;
    if (paged__j_parse_int(self.s, int_or(run, "int", argv[1], 10), &i)) return paged__j_int(i);
    return paged__j_parse_float(self.s, &f) && to_integer(run, f, &i) ? paged__j_int(i) : missing;
}

FILTER(f_float) {
    UNUSED;
    double f;
    if (self.kind == J_UNDEFINED)
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "float of an undefined value");
    if (paged__j_is_number(self)) return paged__j_float(paged__j_real(self));
    if (self.kind == J_STRING && paged__j_parse_float(self.s, &f)) return paged__j_float(f);
    return argv[0].kind == J_ABSENT ? paged__j_float(0) : argv[0];
}

FILTER(f_round) {
    UNUSED;
    const int64_t precision = int_or(run, "round", argv[0], 0);
    const j_string *method = argv[1].kind == J_STRING ? argv[1].s : NULL;
    if (!paged__j_is_number(self))
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "round of a %s", paged__j_type(self));
    if (precision < -300 || precision > 300)
        return paged__j_fail(run, PAGED_ERR_LIMIT, "round: a precision beyond 300");
    const double f = paged__j_real(self), scale = pow(10, (double)precision);
    if (method && paged__j_is(method, "ceil")) return paged__j_float((ceil(f * scale) + 0.0) / scale);
    if (method && paged__j_is(method, "floor")) return paged__j_float(floor(f * scale) / scale);
    if (argv[1].kind != J_ABSENT && !(method && paged__j_is(method, "common")))
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "round: method must be common, ceil or floor");
    if (self.kind != J_FLOAT && precision >= 0) return paged__j_int(paged__j_integer(self));
    if (!isfinite(f)) return self;
    if (precision < 0) {
        const double whole = nearbyint(f * scale) / scale;
        return self.kind == J_FLOAT ? paged__j_float(whole) : paged__j_int((int64_t)whole);
    }
    /* printf rounds the exact value, halves to even, as Python does. */
    char text[700];
    snprintf(text, sizeof text, "%.*f", (int)precision, f);
    return paged__j_float(strtod(text, NULL));
}

/* ---- text ---- */

static j_value change_case(paged__j_run *run, j_value v, j_case to) {
    const j_string s = paged__j_str(run, v);
    return run->status ? paged__j_undefined() : paged__j_set_case(run, &s, to);
}

FILTER(f_upper) {
    UNUSED;
    return change_case(run, self, J_UPPER);
}
FILTER(f_lower) {
    UNUSED;
    return change_case(run, self, J_LOWER);
}
FILTER(f_capitalize) {
    UNUSED;
    return change_case(run, self, J_CAPITALIZE);
}

/* Words begin after white space and - ( { [ <, and nowhere else. */
FILTER(f_title) {
    UNUSED;
    const j_string s = paged__j_str(run, self);
    j_buffer buf = {0};
    bool first = true;
    for (size_t pos = 0, n; pos < s.len && !run->status; pos += n) {
        uint32_t c;
        n = paged__j_char(s.bytes + pos, s.len - pos, &c);
        const uint32_t other = paged__j_case_of(c, first);
        first = paged__j_is_space(c) || (c && c < 0x80 && strchr("-({[<", (char)c));
        const j_string one = paged__j_cut(&s, pos, pos + n);
        if (other != c)
            paged__j_put_code(run, &buf, other, paged__j_raw_at(&s, pos));
        else
            paged__j_put_string(run, &buf, &one);
    }
    return paged__j_buffer_value(run, &buf);
}

FILTER(f_trim) {
    UNUSED;
    const j_string s = paged__j_str(run, self);
    if (given(argv[0]) && argv[0].kind != J_STRING)
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "trim: a %s, not a string", paged__j_type(argv[0]));
    const j_string *set = given(argv[0]) ? argv[0].s : NULL;
    if (!paged__j_step(run, set ? (s.len / 64 + 1) * (set->len / 16 + 1) : 1)) return paged__j_undefined();
    return paged__j_string(run, paged__j_strip(&s, set, true, true));
}

FILTER(f_replace) {
    UNUSED;
    const j_string s = paged__j_str(run, self), old = paged__j_str(run, argv[0]),
                   with = paged__j_str(run, argv[1]);
    const int64_t count = given(argv[2]) ? int_or(run, "replace", argv[2], -1) : -1;
    return run->status ? paged__j_undefined() : paged__j_replace(run, &s, &old, &with, count);
}

FILTER(f_join) {
    UNUSED;
    const j_string between = argv[0].kind == J_ABSENT ? (j_string){.bytes = ""} : paged__j_str(run, argv[0]);
    if (!given(argv[1])) return paged__j_join_list(run, &between, self, true);
    const j_seq *items = paged__j_iterate(run, self);
    j_value list = paged__j_seq(run, J_LIST);
    for (size_t i = 0; items && i < items->n && !run->status; i++)
        paged__j_push(run, list, get_path(run, items->items[i], argv[1], paged__j_none()));
    return run->status ? paged__j_undefined() : paged__j_join_list(run, &between, list, true);
}

FILTER(f_string) {
    UNUSED;
    const j_string s = paged__j_str(run, self);
    return paged__j_string(run, s);
}

FILTER(f_center) {
    UNUSED;
    const j_string s = paged__j_str(run, self);
    return paged__j_center(run, &s, int_or(run, "center", argv[0], 80));
}

FILTER(f_format) {
    UNUSED;
    const j_string s = paged__j_str(run, self);
    j_value values = paged__j_seq(run, J_TUPLE);
    if (args->n_named) return paged__j_fail(run, PAGED_ERR_UNSUPPORTED, "format with names is not supported");
    for (size_t i = 0; i < args->n && !run->status; i++) paged__j_push(run, values, args->items[i]);
    return run->status ? values : paged__j_format(run, &s, values);
}

FILTER(f_indent) {
    UNUSED;
    if (self.kind != J_STRING)
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "indent of a %s", paged__j_type(self));
    j_buffer blanks = {0}, buf = {0};
    if (argv[0].kind == J_STRING)
        paged__j_put_string(run, &blanks, argv[0].s);
    else
        for (int64_t i = int_or(run, "indent", argv[0], 4); i > 0 && paged__j_step(run, 1); i--)
            paged__j_put(run, &blanks, " ", 1, false);
    const j_string indent = paged__j_buffer_string(&blanks);
    const bool blank_too = is_set(argv[2]);
    paged__j_put_string(run, &buf, self.s);
    paged__j_put(run, &buf, "\n", 1, false); /* a line end at the end gives an empty last line */
    const j_string all = paged__j_buffer_string(&buf);
    const j_value lines = paged__j_split_lines(run, &all, false);
    j_buffer out = {0};
    if (is_set(argv[1])) paged__j_put_string(run, &out, &indent);
    for (size_t i = 0; !run->status && i < lines.seq->n; i++) {
        const j_string *line = lines.seq->items[i].s;
        if (i) paged__j_put(run, &out, "\n", 1, false);
        if (i && (line->len || blank_too)) paged__j_put_string(run, &out, &indent);
        paged__j_put_string(run, &out, line);
    }
    return paged__j_buffer_value(run, &out);
}

FILTER(f_truncate) {
    UNUSED;
    const j_string s = paged__j_str(run, self), dots = {.bytes = "...", .len = 3},
                   end = argv[2].kind == J_ABSENT ? dots : paged__j_str(run, argv[2]);
    const int64_t length = int_or(run, "truncate", argv[0], 255),
                  leeway = given(argv[3]) ? int_or(run, "truncate", argv[3], 5) : 5,
                  n_end = (int64_t)paged__j_count_chars(&end);
    int64_t n = 0;
    if (run->status || !paged__j_length(run, self, &n)) return paged__j_undefined();
    if (length < n_end || leeway < 0)
        return paged__j_fail(run, PAGED_ERR_INVALID_ARG, "truncate: to %lld characters, with %lld of an end",
                             (long long)length, (long long)n_end);
    if (self.kind != J_STRING) /* what is short enough stays what it is */
        return n - leeway <= length
                   ? self
                   : paged__j_fail(run, PAGED_ERR_INVALID_ARG, "truncate of a %s", paged__j_type(self));
    if (n - leeway <= length) return paged__j_string(run, s);
    size_t to = paged__j_offset(&s, (size_t)(length - n_end));
    if (!is_set(argv[1])) {
        size_t space = to;
        while (space > 0 && s.bytes[space - 1] != ' ') space--;
        if (space > 0) to = space - 1;
    }
    j_buffer buf = {0};
    const j_string kept = paged__j_cut(&s, 0, to);
    paged__j_put_string(run, &buf, &kept);
    paged__j_put_string(run, &buf, &end);
    return paged__j_buffer_value(run, &buf);
}

FILTER(f_tojson) {
    UNUSED;
    j_buffer buf = {0};
    paged__j_write_json(run, &buf, self, argv);
    return paged__j_buffer_value(run, &buf);
}

static const j_builtin filters[] = {
    {"abs", "", 0, f_abs},
    {"attr", "name", 1, f_attr},
    {"batch", "linecount fill_with", 1, f_batch},
    {"capitalize", "", 0, f_capitalize},
    {"center", "width", 0, f_center},
    {"count", "", 0, f_length},
    {"d", "default_value boolean", 0, f_default},
    {"default", "default_value boolean", 0, f_default},
    {"dictsort", "case_sensitive by reverse", 0, f_dictsort},
    {"first", "", 0, f_first},
    {"float", "default", 0, f_float},
    {"format", "*", 0, f_format},
    {"indent", "width first blank", 0, f_indent},
    {"int", "default base", 0, f_int},
    {"items", "", 0, f_items},
    {"join", "d attribute", 0, f_join},
    {"last", "", 0, f_last},
    {"length", "", 0, f_length},
    {"list", "", 0, f_list},
    {"lower", "", 0, f_lower},
    {"map", "*", 0, f_map},
    {"max", "case_sensitive attribute", 0, f_max},
    {"min", "case_sensitive attribute", 0, f_min},
    {"reject", "*", 0, f_reject},
    {"rejectattr", "*", 0, f_rejectattr},
    {"replace", "old new count", 2, f_replace},
    {"reverse", "", 0, f_reverse},
    {"round", "precision method", 0, f_round},
    {"safe", "", 0, f_string},
    {"select", "*", 0, f_select},
    {"selectattr", "*", 0, f_selectattr},
    {"sort", "reverse case_sensitive attribute", 0, f_sort},
    {"string", "", 0, f_string},
    {"sum", "attribute start", 0, f_sum},
    {"title", "", 0, f_title},
    {"tojson", "ensure_ascii indent separators sort_keys", 0, f_tojson},
    {"trim", "chars", 0, f_trim},
    {"truncate", "length killwords end leeway", 0, f_truncate},
    {"unique", "case_sensitive attribute", 0, f_unique},
    {"upper", "", 0, f_upper},
};

const j_builtin *paged__j_find_filter(const j_string *name) {
    return paged__j_find_builtin(filters, sizeof filters / sizeof filters[0], name);
}
