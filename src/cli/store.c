/* cli/store.c: paged store: looks at a file store, checks it, cleans it up, takes records out and puts
 * them in. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"
#include "cli/cli.h"
#include "cli/plan.h"
#include "store/tools.h"

typedef struct store_options {
    const char *verb, *file, *dir, *key;
    size_t max_bytes;
    int32_t ttl_s;
    bool records, json, quiet;
} store_options;

#define AT(field) offsetof(store_options, field)
static const paged__option options_table[] = {
    {.kind = PAGED__OPTION_HEADING, .name = "What to do"},
    {PAGED__OPTION_OPERAND, 0, "ACTION", NULL, AT(verb), 0, 0, NULL,
     "ls: what there is, by fingerprint (model, types, kernels)\n"
     "check: read every record; damaged ones go into quarantine\n"
     "gc: remove what is too old or too much and not pinned, and pack\nthe index\n"
     "export: write records into FILE; import: read them from it; pins\nare not carried along"},
    {PAGED__OPTION_OPERAND, 0, "FILE", NULL, AT(file), 0, 0, NULL, "of export and import"},
    {PAGED__OPTION_TEXT, 0, "store", "DIR", AT(dir), 0, 0, NULL, "the directory of the store"},
    {PAGED__OPTION_FLAG, 0, "records", NULL, AT(records), 0, 0, NULL, "ls: each record, with its key"},
    {PAGED__OPTION_TEXT, 0, "key", "KEY", AT(key), 0, 0, NULL,
     "export: only the record of this key and all before it, as a\nprompt needs them (default: everything)"},
    {PAGED__OPTION_BYTES, 0, "store-bytes", "N", AT(max_bytes), 0, 0, NULL,
     "gc, import: bytes that the data files may have: 10GiB (default:\nwhat the disk holds)"},
    {PAGED__OPTION_INT, 0, "store-ttl", "S", AT(ttl_s), 1, INT32_MAX, NULL,
     "gc: records not used for S seconds go (default: none)"},
    {.kind = PAGED__OPTION_HEADING, .name = "Output"},
    {PAGED__OPTION_FLAG, 0, "json", NULL, AT(json), 0, 0, NULL, "one JSON object"},
    {PAGED__OPTION_FLAG, 'q', "quiet", NULL, AT(quiet), 0, 0, NULL, "no progress bar"},
};
#undef AT

typedef struct store_command {
    paged__cli *cli;
    store_options options;
    paged_store store;
    const char *label; /* of the progress bar */
    paged_key key;
} store_command;

typedef struct hex {
    char text[33];
} hex;

static hex hex_of(const uint8_t bytes[16]) {
    hex out;
    for (int i = 0; i < 16; i++) snprintf(out.text + 2 * i, 3, "%02x", bytes[i]);
    return out;
}

static bool parse_key(const char *text, paged_key *key) {
    static const char digits[] = "0123456789abcdef";
    if (strlen(text) != 32 || strspn(text, digits) != 32) return false;
    for (int i = 0; i < 16; i++)
        key->bytes[i] = (uint8_t)((strchr(digits, text[2 * i]) - digits) * 16 +
                                  (strchr(digits, text[2 * i + 1]) - digits));
    return true;
}

static void show_progress(void *user, int64_t done, int64_t all) {
    const store_command *c = user;
    if (all > 0 && !c->cli->quiet) paged__term_progress(&c->cli->term, c->label, (double)done / (double)all);
}

static int told(store_command *c, const paged_error *err) {
    return paged__error(c->cli, "%s", err->message);
}

/* ---- ls ---- */

typedef struct listing {
    store_command *c;
    json_t *shapes, *records; /* NULL: as text */
    paged_status status;
    paged_error err;
} listing;

typedef struct when {
    char text[32];
} when;

static when when_of(int64_t seconds) {
    when out = {"-"};
    const time_t at = (time_t)seconds;
    struct tm parts;
    if (seconds > 0 && gmtime_r(&at, &parts)) strftime(out.text, sizeof out.text, "%Y-%m-%d %H:%M", &parts);
    return out;
}

static bool list_record(void *user, const paged__tool_record *r) {
    listing *l = user;
    const hex key = hex_of(r->key.bytes), parent = hex_of(r->parent.bytes);
    if (l->records)
        json_array_append_new(l->records,
                              json_pack("{s:s, s:s, s:i, s:i, s:I, s:I}", "key", key.text, "parent",
                                        parent.text, "first", (int)r->first, "tokens", (int)r->n_tokens,
                                        "groups", (json_int_t)r->groups, "used", (json_int_t)r->used_at));
    else
        paged__out_printf(l->c->cli, "  %s  tokens %d to %d, used %s\n", key.text, r->first,
                          r->first + r->n_tokens - 1, when_of(r->used_at).text);
    return true;
}

static bool list_shape(void *user, const paged__tool_shape *shape) {
    listing *l = user;
    const hex hash = hex_of(shape->hash);
    size_t record_bytes = 0;
    for (int32_t g = 0; g < shape->n_groups; g++) record_bytes += shape->block_bytes[g];
    json_t *object = NULL;
    if (l->shapes) {
        l->records = l->c->options.records ? json_array() : NULL;
        object = json_pack("{s:s, s:I, s:I, s:I, s:i, s:i, s:I, s:I}", "fingerprint", hash.text, "records",
                           (json_int_t)shape->n_records, "pinned", (json_int_t)shape->n_pinned, "bytes",
                           (json_int_t)shape->bytes, "block_size", (int)shape->block_size, "groups",
                           (int)shape->n_groups, "block_bytes", (json_int_t)record_bytes, "used",
                           (json_int_t)shape->last_used_at);
    } else {
        char pinned[40] = "";
        if (shape->n_pinned) snprintf(pinned, sizeof pinned, "; %" PRId64 " pinned", shape->n_pinned);
        paged__out_printf(l->c->cli, "%s  %" PRId64 " records of %d tokens, %s each, %s; used %s%s\n",
                          hash.text, shape->n_records, shape->block_size, paged__size(record_bytes).text,
                          paged__size((size_t)shape->bytes).text, when_of(shape->last_used_at).text, pinned);
    }
    if (l->c->options.records)
        l->status = paged__tool_records(&l->c->store, shape->id, list_record, l, &l->err);
    if (l->records) json_object_set_new(object, "list", l->records);
    if (object) json_array_append_new(l->shapes, object);
    return l->status == PAGED_OK;
}

static int list_store(store_command *c) {
    listing l = {.c = c, .shapes = c->options.json ? json_array() : NULL};
    paged_store_stats stats;
    c->store.get_stats(c->store.self, &stats);
    const paged_status status = paged__tool_shapes(&c->store, list_shape, &l, &l.err);
    if (status || l.status) {
        json_decref(l.shapes);
        return told(c, &l.err);
    }
    if (l.shapes)
        return paged__out_json(
            c->cli, json_pack("{s:o, s:I}", "fingerprints", l.shapes, "records", (json_int_t)stats.n_records),
            false);
    paged__out_printf(c->cli, "%" PRIu64 " records\n", stats.n_records);
    return PAGED__EXIT_OK;
}

/* ---- the others ---- */

static int check_store(store_command *c) {
    const paged__tool_watch watch = {show_progress, c};
    paged__tool_report report;
    paged_error err;
    c->label = "checking";
    const paged_status status = paged__tool_check(&c->store, &watch, &report, &err);
    paged__term_clear(&c->cli->term);
    if (status) return told(c, &err);
    int code = PAGED__EXIT_OK;
    if (c->options.json)
        code =
            paged__out_json(c->cli,
                            json_pack("{s:I, s:I, s:I}", "records", (json_int_t)report.n_records, "damaged",
                                      (json_int_t)report.n_damaged, "bytes", (json_int_t)report.bytes),
                            false);
    else
        paged__out_printf(c->cli, "%" PRId64 " records, %s: right\n", report.n_records,
                          paged__size((size_t)report.bytes).text);
    if (report.n_damaged == 0) return code;
    return paged__error(
        c->cli, "damaged: %" PRId64 " of %" PRId64 " records%s", report.n_damaged,
        report.n_damaged + report.n_records,
        access(c->options.dir, W_OK) == 0 ? "; they went, and copies of up to 16 are in quarantine" : "");
}

static int clean_store(store_command *c) {
    paged_store_stats stats;
    paged_error err;
    if (paged__tool_gc(&c->store, &err)) return told(c, &err);
    c->store.get_stats(c->store.self, &stats);
    if (c->options.json)
        return paged__out_json(c->cli,
                               json_pack("{s:I, s:I}", "records", (json_int_t)stats.n_records, "removed",
                                         (json_int_t)stats.n_evicted),
                               false);
    paged__out_printf(c->cli, "%" PRIu64 " records went, %" PRIu64 " are there\n", stats.n_evicted,
                      stats.n_records);
    return PAGED__EXIT_OK;
}

static int tell_report(store_command *c, const char *what, const paged__tool_report *r) {
    if (c->options.json)
        return paged__out_json(c->cli,
                               json_pack("{s:I, s:I, s:I, s:I}", "records", (json_int_t)r->n_records, "known",
                                         (json_int_t)r->n_known, "damaged", (json_int_t)r->n_damaged, "bytes",
                                         (json_int_t)r->bytes),
                               false);
    paged__out_printf(c->cli, "%" PRId64 " records, %s, %s %s\n", r->n_records,
                      paged__size((size_t)r->bytes).text, what, c->options.file);
    if (r->n_known) paged__out_printf(c->cli, "%" PRId64 " of them were there before\n", r->n_known);
    return PAGED__EXIT_OK;
}

static int export_store(store_command *c) {
    const paged__tool_watch watch = {show_progress, c};
    paged__tool_report report;
    paged_error err;
    c->label = "writing";
    const paged_status status = paged__tool_export(&c->store, c->options.key ? &c->key : NULL,
                                                   c->options.file, &watch, &report, &err);
    paged__term_clear(&c->cli->term);
    if (status) return told(c, &err);
    const int code = tell_report(c, "into", &report);
    if (report.n_damaged == 0) return code;
    return paged__error(c->cli, "damaged: %" PRId64 " of %" PRId64 " records, which are not in the file",
                        report.n_damaged, report.n_damaged + report.n_records);
}

static int import_store(store_command *c) {
    const paged__tool_watch watch = {show_progress, c};
    paged__tool_report report;
    paged_error err;
    c->label = "reading";
    const paged_status status = paged__tool_import(&c->store, c->options.file, &watch, &report, &err);
    paged__term_clear(&c->cli->term);
    if (status == PAGED_ERR_LIMIT)
        return paged__error(c->cli, "%s; %" PRId64 " records were read before", err.message,
                            report.n_records);
    return status ? told(c, &err) : tell_report(c, "from", &report);
}

/* ---- the command ---- */

static const struct verb {
    const char *name;
    int (*run)(store_command *c);
    bool has_file;
} verbs[] = {{"ls", list_store, false},
             {"check", check_store, false},
             {"gc", clean_store, false},
             {"export", export_store, true},
             {"import", import_store, true}};
enum { N_VERBS = sizeof verbs / sizeof verbs[0] };

/* NULL: a usage error, which has been told. */
static const struct verb *find_verb(store_command *c) {
    const store_options *o = &c->options;
    const char *names[N_VERBS];
    const struct verb *verb = NULL;
    for (int i = 0; i < N_VERBS; i++) {
        names[i] = verbs[i].name;
        if (o->verb && strcmp(o->verb, names[i]) == 0) verb = &verbs[i];
    }
    const char *nearest = o->verb ? paged__args_nearest(o->verb, names, N_VERBS) : NULL;
    if (!o->verb)
        paged__usage_error(c->cli, "nothing to do: give ls, check, gc, export or import");
    else if (!verb && nearest)
        paged__usage_error(c->cli, "unknown action '%s'; did you mean '%s'?", o->verb, nearest);
    else if (!verb)
        paged__usage_error(c->cli, "unknown action '%s': there are ls, check, gc, export and import",
                           o->verb);
    else if (!o->dir || !o->dir[0])
        paged__usage_error(c->cli, "no store: give --store DIR");
    else if (verb->has_file && !o->file)
        paged__usage_error(c->cli, "%s of which file? paged store %s FILE --store DIR", o->verb, o->verb);
    else if (!verb->has_file && o->file)
        paged__usage_error(c->cli, "%s takes no file, such as '%s'", o->verb, o->file);
    else if (o->key && !parse_key(o->key, &c->key))
        paged__usage_error(c->cli, "a key has 32 digits 0-9 a-f: see paged store ls --records");
    else
        return verb;
    return NULL;
}

static int open_store(store_command *c, bool may_make) {
    const store_options *o = &c->options;
    struct stat info;
    paged_error err;
    if (!may_make && stat(o->dir, &info) != 0) return paged__error(c->cli, "%s: %s", o->dir, strerror(errno));
    const paged_file_store_config config = {.struct_size = sizeof config,
                                            .dir = o->dir,
                                            .max_bytes = o->max_bytes ? o->max_bytes : UINT64_MAX,
                                            .ttl_s = o->ttl_s,
                                            .read_only = !may_make && access(o->dir, W_OK) != 0};
    return paged_file_store_create(&config, &c->store, NULL, &err) ? told(c, &err) : PAGED__EXIT_OK;
}

static int store_run(paged__cli *cli, int argc, char **argv) {
    store_command c = {.cli = cli};
    int code;
    if (!paged__args_parse(cli, &paged__command_store, argc, argv, &c.options, &code)) return code;
    cli->quiet = c.options.quiet;
    paged__log_to_stderr(cli, PAGED_LOG_WARN);
    const struct verb *verb = find_verb(&c);
    if (!verb) return PAGED__EXIT_USAGE;
    code = open_store(&c, strcmp(verb->name, "import") == 0);
    if (code != PAGED__EXIT_OK) return code;
    code = verb->run(&c);
    c.store.close(c.store.self);
    return code;
}

const paged__command paged__command_store = {
    .name = "store",
    .purpose = "look at blocks on disk, check and move them",
    .usage = "ACTION [FILE] --store DIR [options]",
    .example = "paged store ls --store ~/blocks\n"
               "  paged store check --store ~/blocks\n"
               "  paged store export blocks.kv --store ~/blocks\n"
               "  paged store import blocks.kv --store /srv/blocks",
    .options = options_table,
    .n_options = sizeof options_table / sizeof options_table[0],
    .run = store_run,
};
