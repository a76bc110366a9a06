/* model/jinja/exec.c: statements, macros and loops; and the life of templates and runs.
 *
 * Names are looked up from the innermost scope outward, and set in the innermost one. Loops, macros, with,
 * block set and filter blocks have a scope of their own; an if has none.
 */
#include <stdio.h>

#include "model/jinja/ast.h"

/* ---- loops ---- */

/* Takes items of the source until one passes the filter; false: there is none. */
static bool fetch(paged__j_run *run, j_loop *loop) {
    while (loop->next < loop->source->n && paged__j_step(run, 1)) {
        const j_value item = loop->source->items[loop->next++];
        j_scope scope = {.parent = loop->outer}, *const back = run->scope;
        run->scope = &scope;
        paged__j_assign(run, loop->node->a, item);
        const bool passes = !run->status && paged__j_truth(paged__j_eval(run, loop->node->c));
        run->scope = back;
        if (run->status) return false;
        if (!passes) continue;
        paged__j_push(run, loop->kept, item);
        return run->status == PAGED_OK;
    }
    return false;
}

/* Whether there is an item number i. */
static bool has_item(paged__j_run *run, j_loop *loop, size_t i) {
    while (i >= loop->kept.seq->n)
        if (!fetch(run, loop)) return false;
    return true;
}

static int64_t loop_length(paged__j_run *run, j_loop *loop) {
    while (fetch(run, loop))
        ;
    return (int64_t)loop->kept.seq->n;
}

/* J_ABSENT: no such attribute (but there may be a method). */
j_value paged__j_loop_attr(paged__j_run *run, j_loop *loop, const j_string *name) {
    const size_t i = loop->index;
    if (paged__j_is(name, "index")) return paged__j_int((int64_t)i + 1);
    if (paged__j_is(name, "index0")) return paged__j_int((int64_t)i);
    if (paged__j_is(name, "first")) return paged__j_bool(i == 0);
    if (paged__j_is(name, "last")) return paged__j_bool(!has_item(run, loop, i + 1));
    if (paged__j_is(name, "length")) return paged__j_int(loop_length(run, loop));
    if (paged__j_is(name, "revindex")) return paged__j_int(loop_length(run, loop) - (int64_t)i);
    if (paged__j_is(name, "revindex0")) return paged__j_int(loop_length(run, loop) - (int64_t)i - 1);
    if (paged__j_is(name, "previtem")) return i ? loop->kept.seq->items[i - 1] : paged__j_undefined();
    if (paged__j_is(name, "nextitem"))
        return has_item(run, loop, i + 1) ? loop->kept.seq->items[i + 1] : paged__j_undefined();
    if (paged__j_is(name, "depth")) return paged__j_int(1);
    if (paged__j_is(name, "depth0")) return paged__j_int(0);
    return (j_value){.kind = J_ABSENT};
}

static j_signal run_loop(paged__j_run *run, const j_node *s, j_loop *loop) {
    static const j_string loop_name = {.bytes = "loop", .len = 4};
    j_scope *scope = paged__j_alloc(run, 1, sizeof *scope), *const outer = run->scope;
    if (!scope) return J_GO_ON;
    *scope = (j_scope){.parent = outer};
    bool completed = false; /* one body to its end; break and continue do not count, as in jinja2 */
    for (size_t i = 0; !run->status && has_item(run, loop, i) && paged__j_step(run, 1); i++) {
        scope->n = 0;
        run->scope = scope;
        loop->index = i;
        paged__j_bind(run, scope, &loop_name, (j_value){.kind = J_LOOP, .loop = loop});
        paged__j_assign(run, s->a, loop->kept.seq->items[i]);
        const j_signal signal = run->status ? J_GO_ON : paged__j_exec(run, s->list[0]);
        run->scope = outer;
        if (signal == J_DO_BREAK) break;
        completed |= signal == J_GO_ON;
    }
    if (completed || s->n < 2 || run->status) return J_GO_ON;
    *scope = (j_scope){.parent = outer};
    run->scope = scope;
    const j_signal signal = paged__j_exec(run, s->list[1]);
    run->scope = outer;
    return signal;
}

static j_signal exec_for(paged__j_run *run, const j_node *s) {
    const j_value over = paged__j_eval(run, s->b);
    j_seq *source = run->status ? NULL : paged__j_iterate(run, over);
    j_loop *loop = paged__j_alloc(run, 1, sizeof *loop);
    if (!source || !loop) return J_GO_ON;
    *loop = (j_loop){.source = source, .node = s, .outer = run->scope, .changed = {.kind = J_ABSENT}};
    if (s->c) {
        loop->kept = paged__j_seq(run, J_LIST);
    } else {
        loop->kept = (j_value){.kind = J_SEQ, .seq = source};
        loop->next = source->n;
    }
    return run->status ? J_GO_ON : run_loop(run, s, loop);
}

/* ---- macros ---- */

static const j_value *find_named(const j_args *args, const j_string *name) {
    for (size_t i = 0; i < args->n_named; i++)
        if (paged__j_same(args->named[i].key.s, name)) return &args->named[i].value;
    return NULL;
}

static bool is_param(const j_node *def, const j_string *name) {
    for (size_t i = 0; i < def->n; i++)
        if (paged__j_same(def->list[i]->value.s, name)) return true;
    return false;
}

/* Arguments that no parameter takes: to varargs, kwargs and caller, where the macro uses them. */
static void bind_rest(paged__j_run *run, const j_node *def, const j_args *args) {
    static const j_string varargs = {.bytes = "varargs", .len = 7}, kwargs = {.bytes = "kwargs", .len = 6},
                          caller = {.bytes = "caller", .len = 6};
    j_value rest = paged__j_seq(run, J_TUPLE), named = paged__j_dict(run);
    for (size_t i = def->n; i < args->n && !run->status; i++) paged__j_push(run, rest, args->items[i]);
    j_value the_caller = paged__j_undefined();
    for (size_t i = 0; i < args->n_named && !run->status; i++) {
        const j_string *name = args->named[i].key.s;
        if (is_param(def, name)) continue;
        if ((def->op & J_USES_CALLER) && paged__j_same(name, &caller))
            the_caller = args->named[i].value;
        else if (def->op & J_USES_KWARGS)
            paged__j_dict_set(run, named.dict, args->named[i].key, args->named[i].value);
        else
            paged__j_fail(run, PAGED_ERR_INVALID_ARG, "the macro takes no argument %.*s",
                          (int)PAGED_MIN(name->len, 60), name->bytes);
    }
    if (run->status) return;
    if (def->op & J_USES_CALLER) paged__j_bind(run, run->scope, &caller, the_caller);
    if (def->op & J_USES_KWARGS) paged__j_bind(run, run->scope, &kwargs, named);
    if (def->op & J_USES_VARARGS)
        paged__j_bind(run, run->scope, &varargs, rest);
    else if (rest.seq->n)
        paged__j_fail(run, PAGED_ERR_INVALID_ARG, "the macro takes %zu arguments, not %zu", def->n, args->n);
}

static void bind_params(paged__j_run *run, const j_node *def, const j_args *args) {
    for (size_t i = 0; i < def->n && !run->status; i++) {
        const j_node *param = def->list[i];
        const j_value *named = find_named(args, param->value.s);
        if (named && i < args->n) {
            paged__j_fail(run, PAGED_ERR_INVALID_ARG, "two values for the argument %.*s",
                          (int)PAGED_MIN(param->value.s->len, 60), param->value.s->bytes);
            return;
        }
        j_value v = {.kind = J_UNDEFINED, .s = param->value.s};
        if (i < args->n)
            v = args->items[i];
        else if (named)
            v = *named;
        else if (param->a)
            v = paged__j_eval(run, param->a);
        paged__j_bind(run, run->scope, param->value.s, v);
    }
    if (!run->status) bind_rest(run, def, args);
}

/* Runs a body into a text of its own, in the scope given. */
static j_value capture(paged__j_run *run, const j_node *body, j_signal *signal) {
    j_buffer buf = {0}, *const out = run->out;
    run->out = &buf;
    *signal = paged__j_exec(run, body);
    run->out = out;
    return paged__j_buffer_value(run, &buf);
}

j_value paged__j_call_macro(paged__j_run *run, const j_macro *macro, const j_args *args) {
    j_scope *scope = paged__j_alloc(run, 1, sizeof *scope), *const back = run->scope;
    if (!scope) return paged__j_undefined();
    *scope = (j_scope){.parent = macro->scope};
    run->scope = scope;
    bind_params(run, macro->def, args);
    j_signal signal;
    const j_value text = run->status ? paged__j_undefined() : capture(run, macro->def->a, &signal);
    run->scope = back;
    return text;
}

static j_value make_macro(paged__j_run *run, const j_node *def) {
    j_macro *macro = paged__j_alloc(run, 1, sizeof *macro);
    if (!macro) return paged__j_undefined();
    *macro = (j_macro){def, run->scope};
    return (j_value){.kind = J_MACRO, .macro = macro};
}

/* ---- statements ---- */

static void print(paged__j_run *run, j_value v) {
    paged__j_put_value(run, run->out, v);
    if (!run->status && run->out->len > run->limits.output_bytes)
        paged__j_fail(run, PAGED_ERR_LIMIT, "it writes more than %zu bytes", run->limits.output_bytes);
}

static j_signal exec_if(paged__j_run *run, const j_node *s) {
    for (size_t i = 0; i < s->n && !run->status; i++) {
        const j_node *one = s->list[i];
        if (!one->a || paged__j_truth(paged__j_eval(run, one->a)))
            return run->status ? J_GO_ON : paged__j_exec(run, one->b);
    }
    return J_GO_ON;
}

static bool push_scope(paged__j_run *run) {
    j_scope *scope = paged__j_alloc(run, 1, sizeof *scope);
    if (!scope) return false;
    *scope = (j_scope){.parent = run->scope};
    run->scope = scope;
    return true;
}

static j_signal exec_capture(paged__j_run *run, const j_node *s) {
    j_signal signal;
    if (!push_scope(run)) return J_GO_ON;
    const j_value text = capture(run, s->c, &signal);
    run->scope = run->scope->parent;
    if (run->status || signal != J_GO_ON) return signal;
    const j_value v = paged__j_steps(run, s, text, NULL);
    if (run->status) return J_GO_ON;
    if (s->a)
        paged__j_assign(run, s->a, v);
    else
        print(run, v);
    return J_GO_ON;
}

static j_signal exec_with(paged__j_run *run, const j_node *s) {
    j_value values = paged__j_seq(run, J_LIST);
    for (size_t i = 1; i < s->n && !run->status; i += 2)
        paged__j_push(run, values, paged__j_eval(run, s->list[i]));
    if (run->status || !push_scope(run)) return J_GO_ON;
    for (size_t i = 0; i < values.seq->n; i++) paged__j_assign(run, s->list[2 * i], values.seq->items[i]);
    const j_signal signal = paged__j_exec(run, s->c);
    run->scope = run->scope->parent;
    return signal;
}

static void exec_call_block(paged__j_run *run, const j_node *s) {
    const j_value caller = make_macro(run, s->b);
    const j_value callee = paged__j_eval(run, s->a->a);
    if (!run->status) print(run, paged__j_steps(run, s->a, callee, &caller));
}

static j_signal exec_one(paged__j_run *run, const j_node *s) {
    run->line = s->line;
    switch (s->type) {
    case J_DATA:
        print(run, s->value);
        break;
    case J_PRINT:
        print(run, paged__j_eval(run, s->a));
        break;
    case J_IF:
        return exec_if(run, s);
    case J_FOR:
        return exec_for(run, s);
    case J_SET:
        paged__j_assign(run, s->a, paged__j_eval(run, s->b));
        break;
    case J_CAPTURE:
        return exec_capture(run, s);
    case J_MACRO_DEF:
        paged__j_bind(run, run->scope, s->value.s, make_macro(run, s));
        break;
    case J_CALL_BLOCK:
        exec_call_block(run, s);
        break;
    case J_WITH:
        return exec_with(run, s);
    case J_BREAK:
        return J_DO_BREAK;
    default:
        return J_DO_CONTINUE;
    }
    return J_GO_ON;
}

j_signal paged__j_exec(paged__j_run *run, const j_node *body) {
    j_signal signal = J_GO_ON;
    if (run->depth >= J_RUN_DEPTH) {
        paged__j_fail(run, PAGED_ERR_LIMIT, "it runs nested deeper than %d", J_RUN_DEPTH);
        return J_GO_ON;
    }
    run->depth++;
    for (size_t i = 0; i < body->n && signal == J_GO_ON && paged__j_step(run, 1); i++)
        signal = exec_one(run, body->list[i]);
    run->depth--;
    return signal;
}

/* ---- templates and runs ---- */

static void init(paged__j_run *run, const paged__jinja_limits *limits) {
    *run = (paged__j_run){.limits = limits ? *limits : (paged__jinja_limits){0}};
    paged__jinja_limits *l = &run->limits;
    if (!l->memory_bytes) l->memory_bytes = (size_t)256 << 20;
    if (!l->output_bytes) l->output_bytes = (size_t)16 << 20;
    if (!l->steps) l->steps = 4000000;
    if (!l->chunk_bytes) l->chunk_bytes = 64 << 10;
    run->steps = l->steps;
    run->scope = &run->root;
}

/* One line of whole characters, whatever a template put into it. */
static paged_status report(paged__j_run *run, paged_error *err) {
    char *text = run->message;
    size_t len = strlen(text), pos = 0;
    for (uint32_t code; pos < len;) {
        const size_t n = paged__j_char(text + pos, len - pos, &code);
        if (code >= 0xdc80 && code < 0xdd00) text[pos] = '?';
        if (code < 0x20 || code == 0x7f) text[pos] = ' ';
        pos += n;
    }
    if (!run->line) return paged__fail(err, run->status, "chat template: %s", run->message);
    return paged__fail(err, run->status, "chat template, line %d: %s", run->line, run->message);
}

paged_status paged__jinja_compile(const char *text, size_t len, const paged__jinja_limits *limits,
                                  paged__jinja **out, paged_error *err) {
    if (len > PAGED__JINJA_SOURCE_MAX)
        return paged__fail(err, PAGED_ERR_LIMIT, "a chat template of %zu bytes; at most %d", len,
                           PAGED__JINJA_SOURCE_MAX);
    paged__jinja *t = paged__calloc(1, sizeof *t);
    if (!t) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a chat template");
    size_t n_tokens = 0;
    init(&t->memory, limits);
    const j_token *tokens = paged__j_lex(&t->memory, text, len, &n_tokens);
    if (tokens) t->body = paged__j_parse(&t->memory, tokens);
    if (!t->body) {
        const paged_status status = report(&t->memory, err);
        paged__jinja_free(t);
        return status;
    }
    *out = t;
    return PAGED_OK;
}

void paged__jinja_free(paged__jinja *t) {
    if (!t) return;
    paged__j_arena_free(&t->memory);
    paged__free(t);
}

paged_status paged__j_run_create(const paged__jinja *t, const paged__jinja_limits *limits, int64_t now,
                                 paged__j_run **out, paged_error *err) {
    paged__j_run *run = paged__alloc(1, sizeof *run);
    if (!run) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a chat");
    init(run, limits);
    run->t = t;
    run->now = now;
    *out = run;
    return PAGED_OK;
}

void paged__j_run_free(paged__j_run *run) {
    if (!run) return;
    paged__j_arena_free(run);
    paged__free(run);
}

static void set(paged__j_run *run, const char *name, j_value v) {
    const j_value key = paged__j_text(run, name);
    if (!run->status) paged__j_bind(run, &run->root, key.s, v);
}

void paged__j_set_text(paged__j_run *run, const char *name, const char *bytes, size_t len, bool raw) {
    set(run, name, paged__j_string(run, (j_string){.bytes = bytes, .len = len, .raw = raw}));
}

void paged__j_set_bool(paged__j_run *run, const char *name, bool value) {
    set(run, name, paged__j_bool(value));
}

void paged__j_set_none(paged__j_run *run, const char *name) {
    set(run, name, paged__j_none());
}

void paged__j_set_json(paged__j_run *run, const char *name, const char *json, size_t len) {
    set(run, name, paged__j_read_json(run, json, len));
}

void paged__j_set_members(paged__j_run *run, const char *json, size_t len) {
    const j_value all = paged__j_read_json(run, json, len);
    if (run->status) return;
    if (all.kind != J_DICT) {
        paged__j_fail(run, PAGED_ERR_FORMAT, "the variables are a %s, not a JSON object", paged__j_type(all));
        return;
    }
    for (size_t i = 0; i < all.dict->n && paged__j_step(run, 1 + run->root.n / 16); i++)
        paged__j_bind(run, &run->root, all.dict->entries[i].key.s, all.dict->entries[i].value);
}

void paged__j_set_messages(paged__j_run *run, const paged_message *messages, size_t n) {
    j_value list = paged__j_seq(run, J_LIST);
    for (size_t i = 0; i < n && !run->status; i++) {
        const paged_message *m = &messages[i];
        j_value message = paged__j_dict(run), role = paged__j_text(run, "role"),
                content = paged__j_text(run, "content");
        const j_string role_text = {.bytes = m->role, .len = strlen(m->role)},
                       text = {.bytes = m->content, .len = strlen(m->content), .raw = true};
        if (run->status) return;
        paged__j_dict_set(run, message.dict, role, paged__j_string(run, role_text));
        paged__j_dict_set(run, message.dict, content, paged__j_string(run, text));
        paged__j_push(run, list, message);
    }
    set(run, "messages", list);
}

void paged__j_set_messages_json(paged__j_run *run, const char *json, size_t len,
                                bool (*trusted)(const char *role, size_t len)) {
    const j_value list = paged__j_read_json(run, json, len), key = paged__j_text(run, "role");
    const bool is_list = list.kind == J_SEQ;
    for (size_t i = 0; is_list && i < list.seq->n && !run->status; i++) {
        const j_value message = list.seq->items[i];
        const j_value *role = message.kind == J_DICT ? paged__j_dict_get(message.dict, "role", 4) : NULL;
        if (!role || role->kind != J_STRING || !trusted(role->s->bytes, role->s->len)) continue;
        const j_string text = {.bytes = role->s->bytes, .len = role->s->len};
        paged__j_dict_set(run, message.dict, key, paged__j_string(run, text));
    }
    if (!run->status && !is_list)
        paged__j_fail(run, PAGED_ERR_FORMAT, "the messages are a %s, not a list", paged__j_type(list));
    set(run, "messages", list);
}

paged_status paged__j_run_render(paged__j_run *run, paged__j_rendered *out, paged_error *err) {
    j_buffer buf = {0};
    run->out = &buf;
    if (!run->status) paged__j_exec(run, run->t->body);
    if (run->status) return report(run, err);
    char *bytes = paged__alloc(buf.len + 1, 1);
    uint8_t *raw = paged__alloc(buf.len + 1, 1);
    if (!bytes || !raw) {
        paged__free(bytes);
        paged__free(raw);
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a chat of %zu bytes", buf.len);
    }
    if (buf.len) {
        memcpy(bytes, buf.bytes, buf.len);
        memcpy(raw, buf.mask, buf.len);
    }
    bytes[buf.len] = 0;
    *out = (paged__j_rendered){bytes, raw, buf.len};
    return PAGED_OK;
}
