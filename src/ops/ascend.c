/* ascend.c: judges a call by the table of rules: what is broken, and which value is the nearest legal one. */
#include "ops/ascend.h"

#include <stdio.h>

/* ---- names ---- */

static const char *name_of(const char *const *names, int32_t n, int32_t i) {
    return i >= 0 && i < n ? names[i] : NULL;
}

const char *paged_ascend_path_name(int32_t path) {
    static const char *const names[] = {"decode", "prefill", "tnd", "mla", "atb", "scatter", "gather"};
    return name_of(names, PAGED_ASCEND_PATHS, path);
}

const char *paged_ascend_layout_name(int32_t layout) {
    static const char *const names[] = {"bnbsh", "bnnbsd", "pa_nz"};
    return name_of(names, PAGED_ASCEND_LAYOUTS, layout);
}

const char *paged_ascend_q_layout_name(int32_t layout) {
    static const char *const names[] = {"bnsd", "bsnd", "bsh", "tnd"};
    return name_of(names, PAGED_ASCEND_Q_LAYOUTS, layout);
}

static const char *type_name(int32_t type) {
    static const char *const names[] = {"f16", "f32", "bf16", "int8"};
    return name_of(names, 4, type);
}

int32_t paged_ascend_rule_count(void) {
    return paged__ascend_n_rows;
}

const paged_ascend_rule *paged_ascend_rule_at(int32_t i) {
    return i >= 0 && i < paged__ascend_n_rows ? &paged__ascend_rows[i].rule : NULL;
}

const paged_ascend_rule *paged__ascend_rule(const char *id) {
    int32_t i = 0;
    while (i < paged__ascend_n_rows && strcmp(paged__ascend_rows[i].rule.id, id) != 0) i++;
    PAGED_ASSERT(i < paged__ascend_n_rows);
    return &paged__ascend_rows[i].rule;
}

/* ---- fields ---- */

typedef struct field {
    const char *name;
    size_t offset;
    const char *(*value_name)(int32_t); /* NULL: a number */
} field;

#define FIELD(name, value_name)                                                                              \
    { #name, offsetof(paged_ascend_config, name), value_name }

/* In the order of the struct: a rule looks at no field behind its own. */
static const field fields[] = {
    FIELD(q_type, type_name),
    FIELD(kv_type, type_name),
    FIELD(q_layout, paged_ascend_q_layout_name),
    FIELD(kv_layout, paged_ascend_layout_name),
    FIELD(n_heads, NULL),
    FIELD(n_kv_heads, NULL),
    FIELD(head_dim_k, NULL),
    FIELD(head_dim_v, NULL),
    FIELD(rope_dim, NULL),
    FIELD(block_size, NULL),
    FIELD(writer_block_size, NULL),
    FIELD(engine_block_size, NULL),
    FIELD(pool_block_bytes, NULL),
    FIELD(batch, NULL),
    FIELD(max_q, NULL),
    FIELD(max_k, NULL),
    FIELD(n_blocks, NULL),
    FIELD(table_rows, NULL),
    FIELD(table_cols, NULL),
    FIELD(sparse_mode, NULL),
    FIELD(mask_rows, NULL),
    FIELD(mask_cols, NULL),
    FIELD(lse, NULL),
};
enum { N_FIELDS = sizeof fields / sizeof fields[0] };

static int32_t get(const paged_ascend_config *c, const field *f) {
    int32_t value;
    memcpy(&value, (const char *)c + f->offset, sizeof value);
    return value;
}

static void set(paged_ascend_config *c, const field *f, int32_t value) {
    memcpy((char *)c + f->offset, &value, sizeof value);
}

const char *paged_ascend_field_name(int32_t i) {
    return i >= 0 && i < N_FIELDS ? fields[i].name : NULL;
}

int32_t *paged_ascend_field_value(paged_ascend_config *config, int32_t i) {
    if (i < 0 || i >= N_FIELDS) return NULL;
    return (int32_t *)(void *)((char *)config + fields[i].offset);
}

/* ---- what one would take ---- */

void paged_ascend_unset(paged_ascend_config *c) {
    *c = (paged_ascend_config){.struct_size = sizeof *c};
    for (int32_t i = 0; i < N_FIELDS; i++) set(c, &fields[i], PAGED_ASCEND_UNSET);
}

static void set_default(int32_t *value, int64_t usual) {
    if (*value == PAGED_ASCEND_UNSET) *value = (int32_t)PAGED_MAX(PAGED_MIN(usual, INT32_MAX), 0);
}

static void fill_types(paged_ascend_config *c) {
    bool tnd = c->path == PAGED_ASCEND_TND || c->path == PAGED_ASCEND_MLA || c->path == PAGED_ASCEND_ATB;
    int32_t q_type = c->kv_type == PAGED_TYPE_BF16 ? PAGED_TYPE_BF16 : PAGED_TYPE_F16;
    bool nz_int8 = c->kv_type == PAGED_TYPE_I8 && c->kv_layout == PAGED_ASCEND_PA_NZ;
    set_default(&c->q_type, nz_int8 ? PAGED_TYPE_BF16 : q_type);
    set_default(&c->kv_type, c->q_type);
    set_default(&c->q_layout, tnd ? PAGED_ASCEND_Q_TND : PAGED_ASCEND_Q_BNSD);
    set_default(&c->kv_layout, PAGED_ASCEND_BNBSH);
}

void paged_ascend_fill(paged_ascend_config *c) {
    bool mla = c->path == PAGED_ASCEND_MLA;
    fill_types(c);
    set_default(&c->n_heads, mla ? 128 : c->n_kv_heads == PAGED_ASCEND_UNSET ? 32 : c->n_kv_heads);
    set_default(&c->n_kv_heads, mla ? 1 : c->n_heads);
    set_default(&c->head_dim_k, mla ? 512 : 128);
    set_default(&c->head_dim_v, c->path == PAGED_ASCEND_TND ? PAGED_MIN(c->head_dim_k, 128) : c->head_dim_k);
    set_default(&c->rope_dim, mla ? 64 : 0);
    set_default(&c->block_size, 128);
    set_default(&c->writer_block_size, 0);
    set_default(&c->engine_block_size, 0);
    set_default(&c->pool_block_bytes, 0);
    set_default(&c->batch, 1);
    set_default(&c->max_q, c->path == PAGED_ASCEND_PREFILL ? 128 : 1);
    set_default(&c->max_k, 1024);
    set_default(&c->table_rows, c->batch);
    set_default(&c->table_cols, c->block_size > 0
                                    ? PAGED_MAX(((int64_t)c->max_k + c->block_size - 1) / c->block_size, 1)
                                    : 1);
    set_default(&c->n_blocks, (int64_t)c->table_rows * c->table_cols);
    bool causal = c->max_q > 1 && c->path != PAGED_ASCEND_ATB;
    set_default(&c->sparse_mode, causal && c->path != PAGED_ASCEND_DECODE ? 3 : 0);
    bool fixed = c->sparse_mode >= 2, full = c->sparse_mode == 1;
    set_default(&c->mask_rows, fixed ? 2048 : full ? c->max_q : 0);
    set_default(&c->mask_cols, fixed ? 2048 : c->mask_rows ? (int64_t)c->table_cols * c->block_size : 0);
    set_default(&c->lse, 0);
}

/* ---- one rule ---- */

/* False: the row says nothing about this call. */
static bool legal_of(const paged__ascend_row *row, const paged_ascend_config *c, paged__legal *legal) {
    *legal = row->legal;
    bool of_arrays = !legal->list && legal->step == 0;
    if (of_arrays || !(row->rule.paths & 1u << c->path)) return false;
    return !row->narrow || row->narrow(c, legal);
}

static bool is_legal(const paged__legal *l, int64_t value) {
    if (l->list) {
        int32_t i = 0;
        while (i < l->n_list && l->list[i] != value) i++;
        return i < l->n_list;
    }
    if (value < l->lo || value > l->hi || value % l->step != 0) return false;
    if (l->divides <= 0) return true;
    return l->divides % value == 0 && (l->max_ratio == 0 || l->divides / value <= l->max_ratio);
}

/* ---- the nearest value ---- */

typedef struct search {
    paged_ascend_config config;
    const field *field;
    bool warnings; /* rules that only warn count as well */
    int64_t value, nearest;
    bool found;
} search;

static bool row_counts(const search *s, const paged__ascend_row *row) {
    return strcmp(row->rule.field, s->field->name) == 0 && (s->warnings || !row->rule.warning);
}

/* Takes a candidate that all rules of the field accept, if it is nearer than what there is. Of two that are
 * as near the smaller one stays. */
static void offer(search *s, int64_t candidate) {
    if (candidate < INT32_MIN || candidate > INT32_MAX) return;
    bool word = s->field->value_name != NULL; /* words have no distance: the first one is as good */
    int64_t from = word ? INT32_MIN : s->value;
    int64_t far = candidate > from ? candidate - from : from - candidate;
    int64_t had = s->nearest > from ? s->nearest - from : from - s->nearest;
    if (s->found && (far > had || (far == had && candidate > s->nearest))) return;
    set(&s->config, s->field, (int32_t)candidate);
    for (int32_t i = 0; i < paged__ascend_n_rows; i++) {
        paged__legal legal;
        if (row_counts(s, &paged__ascend_rows[i]) && legal_of(&paged__ascend_rows[i], &s->config, &legal) &&
            !is_legal(&legal, candidate))
            return;
    }
    s->found = true;
    s->nearest = candidate;
}

static void offer_divisors(search *s, int64_t n) {
    for (int64_t i = 1; i * i <= n; i++) {
        if (n % i) continue;
        offer(s, i);
        offer(s, n / i);
    }
}

/* The rules of a field have at most one list, or one number to divide, and steps that divide each other; so
 * the nearest of what all of them allow is in a list, is a divisor, or is next to the value. */
static void find(search *s) {
    paged__legal all = {.lo = INT32_MIN, .hi = INT32_MAX, .step = 1};
    offer(s, s->value);
    if (s->found) return;
    for (int32_t i = 0; i < paged__ascend_n_rows; i++) {
        paged__legal legal;
        if (!row_counts(s, &paged__ascend_rows[i]) || !legal_of(&paged__ascend_rows[i], &s->config, &legal))
            continue;
        if (legal.list) {
            for (int32_t k = 0; k < legal.n_list; k++) offer(s, legal.list[k]);
            set(&s->config, s->field, (int32_t)s->value);
            continue;
        }
        all.lo = PAGED_MAX(all.lo, legal.lo);
        all.hi = PAGED_MIN(all.hi, legal.hi);
        all.step = PAGED_MAX(all.step, legal.step);
        all.divides = PAGED_MAX(all.divides, legal.divides);
    }
    if (all.divides > 0) offer_divisors(s, all.divides);
    int64_t at = PAGED_MAX(PAGED_MIN(s->value, all.hi), all.lo), rest = (at % all.step + all.step) % all.step;
    offer(s, at - rest);
    if (rest) offer(s, at - rest + all.step);
    if (s->field->value_name) offer(s, PAGED_MAX(all.lo, 0));
    offer(s, 0); /* fields that may be left out: rules need not bear on it */
}

static search nearest(const paged_ascend_config *c, const field *f, bool warnings) {
    search s = {.config = *c, .field = f, .warnings = warnings, .value = get(c, f)};
    find(&s);
    return s;
}

/* ---- words ---- */

typedef struct word {
    char text[24];
} word;

typedef struct words {
    char text[128];
} words;

static word value_text(const field *f, int64_t value) {
    word w;
    const char *name = f->value_name ? f->value_name((int32_t)value) : NULL;
    if (name)
        snprintf(w.text, sizeof w.text, "%s", name);
    else
        snprintf(w.text, sizeof w.text, "%lld", (long long)value);
    return w;
}

static words legal_text(const field *f, const paged__legal *l) {
    words w = {""};
    size_t len = 0;
    if (l->list) {
        for (int32_t i = 0; i < l->n_list && len < sizeof w.text; i++)
            len += (size_t)snprintf(w.text + len, sizeof w.text - len, "%s%s",
                                    i == 0              ? ""
                                    : i + 1 < l->n_list ? ", "
                                                        : " or ",
                                    value_text(f, l->list[i]).text);
        return w;
    }
    if (l->divides > 0) {
        snprintf(w.text, sizeof w.text, "a divisor of %lld%s", (long long)l->divides,
                 l->max_ratio ? ", at least a 64th" : "");
        return w;
    }
    word lo = value_text(f, l->lo), hi = value_text(f, l->hi);
    if (l->lo > l->hi)
        snprintf(w.text, sizeof w.text, "nothing");
    else if (l->lo == l->hi)
        snprintf(w.text, sizeof w.text, "%s", lo.text);
    else if (l->hi == INT32_MAX && l->lo == INT32_MIN)
        snprintf(w.text, sizeof w.text, "multiples of %lld", (long long)l->step);
    else if (l->hi == INT32_MAX)
        snprintf(w.text, sizeof w.text, "%s or more", lo.text);
    else if (l->lo == INT32_MIN)
        snprintf(w.text, sizeof w.text, "at most %s", hi.text);
    else
        snprintf(w.text, sizeof w.text, "%s to %s", lo.text, hi.text);
    len = strlen(w.text);
    if (l->step > 1 && l->lo < l->hi && !(l->hi == INT32_MAX && l->lo == INT32_MIN))
        snprintf(w.text + len, sizeof w.text - len, " in steps of %lld", (long long)l->step);
    return w;
}

static void describe(paged_ascend_finding *finding, const field *f, const paged__legal *legal,
                     const char *path) {
    word near = {""};
    if (finding->has_nearest) near = value_text(f, finding->nearest);
    snprintf(finding->message, sizeof finding->message, "%s is %s; %s takes %s: %s%s%s", f->name,
             value_text(f, finding->value).text, path, legal_text(f, legal).text, finding->rule->text,
             finding->has_nearest ? "; nearest " : "", near.text);
}

/* ---- a call ---- */

/* What is wrong before any rule of the table can be asked; NULL: nothing. */
static const paged_ascend_rule *foreign(const paged_ascend_config *c) {
    static const paged_ascend_rule rules[] = {
        {.id = "struct_size",
         .field = "struct_size",
         .text = "the struct has another size",
         .source = "ours"},
        {.id = "path", .field = "path", .text = "the path is none of ours", .source = "ours"}};
    if (!c || c->struct_size != sizeof *c) return &rules[0];
    return paged_ascend_path_name(c->path) ? NULL : &rules[1];
}

static int32_t tell_foreign(const paged_ascend_config *c, const paged_ascend_rule *rule,
                            paged_ascend_finding *out, int32_t max) {
    bool size = strcmp(rule->id, "struct_size") == 0;
    if (max < 1) return 1;
    *out = (paged_ascend_finding){.rule = rule, .entry = -1};
    out->value = size ? (c ? (int64_t)c->struct_size : 0) : c->path;
    if (size)
        snprintf(out->message, sizeof out->message, "struct_size is %lld, not %zu", (long long)out->value,
                 sizeof *c);
    else
        snprintf(out->message, sizeof out->message, "path is %d, which is none of 0 to %d", c->path,
                 PAGED_ASCEND_PATHS - 1);
    return 1;
}

/* An unset head_dim_v is that of the keys. */
static paged_ascend_config with_defaults(const paged_ascend_config *config) {
    paged_ascend_config c = *config;
    if (c.head_dim_v == 0) c.head_dim_v = c.head_dim_k;
    return c;
}

static void add(paged_ascend_finding *out, int32_t max, int32_t n, const paged__ascend_row *row,
                const paged_ascend_config *c, const field *f, const paged__legal *legal) {
    if (n >= max) return;
    search s = nearest(c, f, row->rule.warning);
    out[n] = (paged_ascend_finding){.rule = &row->rule,
                                    .value = s.value,
                                    .entry = -1,
                                    .has_nearest = s.found,
                                    .nearest = s.found ? s.nearest : 0};
    describe(&out[n], f, legal, paged_ascend_path_name(c->path));
}

int32_t paged_ascend_check(const paged_ascend_config *config, paged_ascend_finding *out, int32_t max) {
    const paged_ascend_rule *rule = foreign(config);
    if (rule) return tell_foreign(config, rule, out, max);
    paged_ascend_config c = with_defaults(config);
    int32_t n = 0;
    for (int32_t i = 0; i < N_FIELDS; i++)
        for (int32_t r = 0; r < paged__ascend_n_rows; r++) {
            const paged__ascend_row *row = &paged__ascend_rows[r];
            paged__legal legal;
            if (strcmp(row->rule.field, fields[i].name) != 0 || !legal_of(row, &c, &legal) ||
                is_legal(&legal, get(&c, &fields[i])))
                continue;
            add(out, max, n++, row, &c, &fields[i], &legal);
        }
    return n;
}

bool paged_ascend_nearest(paged_ascend_config *config) {
    if (foreign(config)) return false;
    paged_ascend_config c = with_defaults(config);
    for (int32_t i = 0; i < N_FIELDS; i++) {
        search s = nearest(&c, &fields[i], false);
        if (!s.found) return false;
        set(&c, &fields[i], (int32_t)s.nearest);
    }
    *config = c;
    return true;
}

bool paged_ascend_accepts(const paged_ascend_config *config) {
    if (foreign(config)) return false;
    paged_ascend_config c = with_defaults(config);
    for (int32_t i = 0; i < N_FIELDS; i++) {
        search s = {.config = c, .field = &fields[i], .value = get(&c, &fields[i])};
        offer(&s, s.value);
        if (!s.found) return false;
    }
    return true;
}
