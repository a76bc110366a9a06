/* cli/serve.c: paged serve: the options of the server, and the thread that loads the model while the server
 * already answers 503.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "base/base.h"
#include "cli/cli.h"
#include "cli/places.h"
#include "cli/plan.h"
#include "cli/session.h"
#include "server/server.h"
#include "server/slots.h"

enum { OTHER_FILES = 64 }; /* descriptors that are no connections */

typedef struct serve_options {
    const char *config, *model, *name, *host, *api_key, *cors_origin, *access_log, *slot_dir;
    int32_t port, max_running, max_waiting, max_connections;
    int32_t reader_timeout, idle_timeout, drain_timeout, stall_timeout, log_level, keep_days;
    size_t max_body;
    bool quiet, no_prefix_cache;
    paged__sampling_options sampling;
    paged__memory_options memory;
    paged__places_options places;
} serve_options;

#define AT(field) offsetof(serve_options, field)
static const paged__option options_table[] = {
    {.kind = PAGED__OPTION_HEADING, .name = "What to serve"},
    PAGED__MODEL_ROW(serve_options, model),
    {PAGED__OPTION_TEXT, 0, "name", "NAME", AT(name), 0, 0, NULL,
     "the model's name for clients (default: what the file says)"},
    {PAGED__OPTION_TEXT, 0, "config", "FILE", AT(config), 0, 0, NULL,
     "options, a line each: name = value; # begins a comment"},
    {.kind = PAGED__OPTION_HEADING, .name = "Clients"},
    {PAGED__OPTION_TEXT, 0, "host", "HOST", AT(host), 0, 0, NULL,
     "address to listen on (default: 127.0.0.1, this machine only)"},
    {PAGED__OPTION_INT, 'p', "port", "N", AT(port), 0, 65535, NULL, "port, 0: any (default: 8080)"},
    {PAGED__OPTION_TEXT, 0, "api-key", "KEY", AT(api_key), 0, 0, NULL,
     "what clients must send (default: nothing). Others on this\nmachine can see a command line: prefer "
     "PAGED_API_KEY"},
    {PAGED__OPTION_TEXT, 0, "cors-origin", "ORIGIN", AT(cors_origin), 0, 0, NULL,
     "web pages that may use the server (default: *; '': none)"},
    {PAGED__OPTION_INT, 0, "max-connections", "N", AT(max_connections), 1, 100000, NULL,
     "connections at once (default: 1024)"},
    {PAGED__OPTION_BYTES, 0, "max-body", "N", AT(max_body), 0, 0, NULL,
     "bytes of a request's body at most (default: 2M)"},
    {PAGED__OPTION_INT, 0, "reader-timeout", "S", AT(reader_timeout), 1, 86400, NULL,
     "seconds after which a client that takes nothing is cut off\n(default: 60)"},
    {PAGED__OPTION_INT, 0, "idle-timeout", "S", AT(idle_timeout), 1, 86400, NULL,
     "seconds that a connection may wait for a request (default: 75)"},
    {PAGED__OPTION_INT, 0, "drain-timeout", "S", AT(drain_timeout), 0, 86400, NULL,
     "seconds that requests have to end after SIGTERM (default: 60)"},
    {PAGED__OPTION_INT, 0, "stall-timeout", "S", AT(stall_timeout), 1, 86400, NULL,
     "seconds that a step may last before requests and /health are\nanswered 503 (default: 30)"},
    {PAGED__OPTION_TEXT, 0, "access-log", "FILE", AT(access_log), 0, 0, NULL,
     "a line of JSON for each request; '-': stderr (default: none)"},
    {.kind = PAGED__OPTION_HEADING, .name = "Requests and memory"},
    {PAGED__OPTION_INT, 0, "max-running", "N", AT(max_running), 1, 4096, NULL,
     "requests in one step (default: 16)"},
    {PAGED__OPTION_INT, 0, "max-waiting", "N", AT(max_waiting), 1, 100000, NULL,
     "requests that wait; beyond that: 429 (default: 64)"},
    {PAGED__OPTION_FLAG, 0, "no-prefix-cache", NULL, AT(no_prefix_cache), 0, 0, NULL,
     "nothing is taken over from earlier requests"},
    PAGED__MEMORY_ROWS(serve_options, memory),
    {.kind = PAGED__OPTION_HEADING, .name = "What outlives this process"},
    PAGED__PLACES_ROWS(serve_options, places),
    {PAGED__OPTION_TEXT, 0, "slot-save-path", "DIR", AT(slot_dir), 0, 0, NULL,
     "where POST /slots/{id}?action=save puts its files (default: such\nrequests are refused)"},
    {PAGED__OPTION_INT, 0, "keep-days", "N", AT(keep_days), 0, 36500, NULL,
     "days that a conversation is kept after its last change, 0: for\never (default: 30)"},
    {.kind = PAGED__OPTION_HEADING, .name = "Generation, where a request says nothing else"},
    PAGED__SAMPLING_ROWS(serve_options, sampling),
    {.kind = PAGED__OPTION_HEADING, .name = "Output"},
    {PAGED__OPTION_FLAG, 'q', "quiet", NULL, AT(quiet), 0, 0, NULL,
     "no memory plan, no notes, no progress bar"},
    {PAGED__OPTION_CHOICE, 0, "log-level", "LEVEL", AT(log_level), 0, 0, paged__log_levels,
     "error, warn, info or debug (default: warn; with --quiet error)"},
};
#undef AT

static const serve_options defaults = {.host = "127.0.0.1",
                                       .port = 8080,
                                       .api_key = "",
                                       .cors_origin = "*",
                                       .max_running = 16,
                                       .max_waiting = 64,
                                       .max_connections = 1024,
                                       .max_body = 2 << 20,
                                       .reader_timeout = 60,
                                       .idle_timeout = 75,
                                       .drain_timeout = 60,
                                       .stall_timeout = 30,
                                       .sampling = {.temperature = 1, .top_p = 1, .repetition_penalty = 1},
                                       .memory = PAGED__MEMORY_DEFAULTS,
                                       .places = PAGED__PLACES_DEFAULTS,
                                       .keep_days = 30,
                                       .log_level = -1};

typedef struct serve {
    paged__cli *cli;
    serve_options options;
    paged__buffer config; /* text of --config, which options borrow from */
    paged__session session;
    paged__places places;
    paged_service *service;
    paged__server *server;
    FILE *access_log;
    int code;
} serve;

/* Flags before environment before file: each is read over what the ones behind it said. */
static int read_options(serve *s, int argc, char **argv) {
    serve_options first = defaults;
    int code;
    if (!paged__args_parse(s->cli, &paged__command_serve, argc, argv, &first, &code)) return code;
    s->options = defaults;
    const char *path = first.config ? first.config : getenv("PAGED_CONFIG");
    if (path && path[0]) {
        code = paged__text_take(s->cli, NULL, path, &s->config);
        if (code != PAGED__EXIT_OK) return code;
        if (!paged__args_file(s->cli, &paged__command_serve, s->config.data, path, &s->options))
            return PAGED__EXIT_USAGE;
    }
    if (!paged__args_environment(s->cli, &paged__command_serve, &s->options)) return PAGED__EXIT_USAGE;
    if (!paged__args_parse(s->cli, &paged__command_serve, argc, argv, &s->options, &code)) return code;
    for (const char *c = s->options.cors_origin; *c; c++)
        if ((unsigned char)*c <= ' ' || *c == 0x7f)
            return paged__usage_error(s->cli,
                                      "--cors-origin is one origin, such as https://example.org, or *");
    return PAGED__EXIT_OK;
}

/* ---- loading ---- */

/* Without --pool-bytes: what all requests need in full, but no more than half of the memory at hand,
 * of which nothing is taken before it is used. */
static size_t pool_bytes(const serve *s) {
    const paged__memory_options *o = &s->options.memory;
    if (o->pool_bytes) return o->pool_bytes;
    const int32_t n_ctx =
        o->ctx ? PAGED_MIN(o->ctx, s->session.info.n_ctx_train) : s->session.info.n_ctx_train;
    const paged_type type =
        paged_engine_kv_type(paged__kv_type_of(o->kv_choice), o->device, s->session.info.head_dim_k);
    const size_t all =
        paged__kv_bytes(&s->session.info, type, o->block_size, (int64_t)n_ctx * s->options.max_running);
    const size_t half = paged_memory_available() / 2; /* 0: not known */
    return all && (half == 0 || all < half) ? all : half;
}

static int start_service(serve *s) {
    const serve_options *o = &s->options;
    paged__memory_options memory = o->memory;
    if (!o->memory.fit) memory.pool_bytes = pool_bytes(s);
    paged_service_config config = {.struct_size = sizeof config,
                                   .engine = paged__session_config(&memory),
                                   .reader_timeout_ms = o->reader_timeout * 1000};
    config.engine.max_running = o->max_running;
    config.engine.max_waiting = o->max_waiting;
    config.engine.no_prefix_cache = o->no_prefix_cache;
    paged_error err;
    if (o->memory.fit && o->memory.pool_bytes)
        return paged__usage_error(s->cli, "give --fit or --pool-bytes, not both");
    paged_status status = o->memory.fit ? paged__session_fit(&s->session, &config.engine, &err) : PAGED_OK;
    config.engine.stores = s->places.all;
    config.engine.n_stores = s->places.n;
    if (!status) status = paged_service_create(s->session.model, &config, &s->service, &err);
    if (!status) s->places.n = 0; /* the engine's */
    return status == PAGED_OK ? PAGED__EXIT_OK : paged__session_refused(s->cli, status, &err);
}

static void *load(void *user) {
    serve *s = user;
    s->code =
        paged__session_load(&s->session, s->cli, s->options.model, (paged_linear)s->options.memory.linear);
    if (s->code == PAGED__EXIT_OK) s->code = start_service(s);
    paged__server_model model = {.service = s->service, .path = s->session.model_path};
    if (s->code == PAGED__EXIT_OK) {
        model.world = paged__session_world(&s->session, &s->options.sampling);
        if (s->options.name) model.world.name = s->options.name;
    }
    paged__server_open(s->server, &model);
    return NULL;
}

static void on_ready(void *user, int32_t port) {
    const serve *s = user;
    const paged_engine_info *info = &s->server->info;
    const bool is_v6 = strchr(s->options.host, ':');
    paged__plan_note(s->cli, &s->session.info, info, s->session.model_path);
    paged__note(s->cli, "%d requests at once, %d may wait; %lld requests of %d tokens fit, or %lld of 1024",
                s->options.max_running, s->options.max_waiting,
                (long long)info->n_blocks * info->block_size / info->n_ctx, info->n_ctx,
                (long long)info->n_blocks * info->block_size / 1024);
    paged__out_printf(s->cli, is_v6 ? "listening on http://[%s]:%d\n" : "listening on http://%s:%d\n",
                      s->options.host, port);
    paged__out_flush(s->cli);
}

/* ---- the command ---- */

static int open_log(serve *s) {
    const char *path = s->options.access_log;
    if (!path || !path[0]) return PAGED__EXIT_OK;
    s->access_log = strcmp(path, "-") == 0 ? stderr : fopen(path, "ae");
    return s->access_log ? PAGED__EXIT_OK : paged__error(s->cli, "cannot open %s: %s", path, strerror(errno));
}

/* A connection is a descriptor, and the usual limit is 1024. */
static void raise_file_limit(int32_t n_connections) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    const rlim_t wanted = (rlim_t)n_connections + OTHER_FILES;
    if (limit.rlim_cur >= wanted) return;
    limit.rlim_cur = limit.rlim_max == RLIM_INFINITY ? wanted : PAGED_MIN(wanted, limit.rlim_max);
    setrlimit(RLIMIT_NOFILE, &limit);
}

static int run_server(serve *s) {
    const serve_options *o = &s->options;
    const int code = paged__places_open(s->cli, &o->places, &s->places);
    if (code != PAGED__EXIT_OK) return code;
    const paged__server_config config = {.host = o->host,
                                         .port = o->port,
                                         .api_key = o->api_key,
                                         .cors_origin = o->cors_origin,
                                         .body_max = o->max_body,
                                         .max_connections = o->max_connections,
                                         .head_timeout_ms = 10000,
                                         .body_timeout_ms = 60000,
                                         .idle_timeout_ms = o->idle_timeout * 1000,
                                         .write_timeout_ms = o->reader_timeout * 1000,
                                         .drain_timeout_ms = o->drain_timeout * 1000,
                                         .stall_ms = o->stall_timeout * 1000,
                                         .access_log = s->access_log,
                                         .notes = s->places.has_notes ? &s->places.notes : NULL,
                                         .slot_dir = o->slot_dir,
                                         .conversation_days = o->keep_days,
                                         .on_ready = on_ready,
                                         .user = s};
    paged_error err;
    pthread_t loader;
    s->places.has_notes = false; /* the server's */
    if (paged__server_create(&config, &s->server, &err) != PAGED_OK)
        return paged__error(s->cli, "%s", err.message);
    if (pthread_create(&loader, NULL, load, s) != 0)
        return paged__error(s->cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
    const bool ok = paged__server_run(s->server);
    pthread_join(loader, NULL);
    if (paged__server_is_stalled(s->server)) { /* its thread would be waited for in vain */
        paged__error(s->cli, "the engine has not moved for %d s; ended without it", o->stall_timeout);
        _Exit(PAGED__EXIT_ERROR);
    }
    if (paged__slots_is_saving(s->server->slots))
        return paged__error(s->cli, "a slot's file is not written yet; ended without it");
    return s->code != PAGED__EXIT_OK ? s->code : ok ? PAGED__EXIT_OK : PAGED__EXIT_ERROR;
}

static int serve_command(paged__cli *cli, int argc, char **argv) {
    serve s = {.cli = cli};
    int code = read_options(&s, argc, argv);
    const serve_options *o = &s.options;
    /* Help was asked for, or something is wrong; both have been told. */
    if (code != PAGED__EXIT_OK || !o->host) {
        paged__buffer_free(&s.config);
        return code;
    }
    cli->quiet = o->quiet;
    const int32_t level = o->log_level >= 0 ? o->log_level : o->quiet ? PAGED_LOG_ERROR : PAGED_LOG_WARN;
    paged__log_to_stderr(cli, (paged_log_level)level);
    if (!paged__args_model(cli, o->model, "--model FILE")) code = PAGED__EXIT_USAGE;
    if (code == PAGED__EXIT_OK) code = open_log(&s);
    raise_file_limit(o->max_connections);
    if (code == PAGED__EXIT_OK) code = run_server(&s);
    paged__server_free(s.server);
    paged_service_free(s.service);
    paged__places_close(&s.places);
    paged__session_close(&s.session);
    if (s.access_log && s.access_log != stderr) fclose(s.access_log);
    paged__buffer_free(&s.config);
    return code;
}

const paged__command paged__command_serve = {
    .name = "serve",
    .purpose = "answer requests over HTTP (OpenAI API)",
    .usage = "--model FILE [options]\n\nEvery option may be an environment variable, too (--max-running: "
             "PAGED_MAX_RUNNING),\nor a line of the file of --config; the command line counts first.",
    .example = "paged serve --model model.gguf --port 8080",
    .options = options_table,
    .n_options = sizeof options_table / sizeof options_table[0],
    .run = serve_command,
};
