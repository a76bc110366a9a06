/* cli/session.c: see session.h. */
#include "cli/session.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "cli/plan.h"

#define TYPES "f16", "f32", "bf16", "int8", NULL
const char *const paged__kv_types[] = {TYPES};
const char *const paged__kv_choices[] = {"auto", TYPES};
#undef TYPES
const char *const paged__linear_choices[] = {"auto", "int8", "bf16", NULL};
const char *const paged__log_levels[] = {"error", "warn", "info", "debug", NULL};

/* ---- model and engine ---- */

static void on_load(void *user, float fraction) {
    paged__term_progress(user, "loading", (double)fraction);
}

int paged__session_load(paged__session *s, paged__cli *cli, const char *named, paged_linear linear) {
    *s = (paged__session){.cli = cli, .model_path = paged__args_model(cli, named, "--model FILE")};
    if (!s->model_path) return PAGED__EXIT_USAGE;
    const uint64_t start = paged__now_ns();
    const paged_model_config config = {.struct_size = sizeof config,
                                       .progress = cli->quiet ? NULL : on_load,
                                       .progress_user = cli->quiet ? NULL : &cli->term,
                                       .linear = linear};
    paged_error err;
    const paged_status status = paged_model_load(s->model_path, &config, &s->model, &err);
    paged__term_clear(&cli->term);
    if (status != PAGED_OK) return paged__error(cli, "%s", err.message);
    paged_model_get_info(s->model, &s->info);
    s->load_ms = (double)(paged__now_ns() - start) / 1e6;
    return PAGED__EXIT_OK;
}

int32_t paged__kv_type_of(int32_t choice) {
    return choice > 0 ? choice - 1 : PAGED_KV_AUTO;
}

paged_engine_config paged__session_config(const paged__memory_options *o) {
    return (paged_engine_config){.struct_size = sizeof(paged_engine_config),
                                 .n_ctx = o->ctx,
                                 .pool_bytes = o->pool_bytes,
                                 .block_size = o->block_size,
                                 .kv_type = paged__kv_type_of(o->kv_choice),
                                 .kv_plain = o->block_size % PAGED_TILE != 0,
                                 .chunk_tokens = o->chunk,
                                 .n_threads = o->n_threads,
                                 .contiguous = o->contiguous,
                                 .device = o->device};
}

int paged__session_refused(paged__cli *cli, paged_status status, const paged_error *err) {
    const char *advice = status == PAGED_ERR_TOO_LONG    ? "; lower --ctx"
                         : status == PAGED_ERR_NO_BLOCKS ? "; raise --pool-bytes"
                         : status == PAGED_ERR_NO_MEMORY ? "; lower --ctx or --pool-bytes"
                                                         : "";
    return paged__error(cli, "%s%s", err->message, advice);
}

/* ---- --fit ---- */

enum { SPARE_PART = 10 /* of the memory at hand, a part of so many is left to others */ };

/* What an engine takes besides its pool, seen on one with the smallest. */
static paged_status measure_compute(const paged__session *s, paged_engine_config config, size_t *bytes,
                                    paged_error *err) {
    paged_engine *engine = NULL;
    paged_engine_info info;
    config.n_ctx = PAGED_MIN(config.block_size, s->info.n_ctx_train);
    config.pool_bytes = 0;
    const paged_status status = paged_engine_create(s->model, &config, &engine, err);
    if (status) return status;
    paged_engine_get_info(engine, &info);
    *bytes = info.compute_bytes;
    paged_engine_free(engine);
    return PAGED_OK;
}

paged_status paged__session_fit(const paged__session *s, paged_engine_config *config, paged_error *err) {
    const int64_t n_ctx = config->n_ctx ? config->n_ctx : s->info.n_ctx_train;
    const paged_type type = paged_engine_kv_type(config->kv_type, config->device, s->info.head_dim_k);
    const size_t available = paged_memory_available(),
                 wanted = paged__kv_bytes(&s->info, type, config->block_size,
                                          n_ctx * PAGED_MAX(config->max_running, 1)),
                 least = paged__kv_bytes(&s->info, type, config->block_size, config->block_size);
    size_t compute;
    if (config->device)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED,
                           "--fit knows the memory of this machine, not that of --device");
    if (config->chunk_tokens == 0) config->chunk_tokens = (int32_t)PAGED_MIN(n_ctx, 512);
    const paged_status status = measure_compute(s, *config, &compute, err);
    if (status || available == 0) return status; /* not known: as without --fit */
    const size_t usable = available - available / SPARE_PART, room = usable > compute ? usable - compute : 0;
    if (room < least)
        return paged__fail(err, PAGED_ERR_NO_MEMORY,
                           "%zu bytes of memory are at hand; computing takes %zu, the smallest pool %zu",
                           available, compute, least);
    config->pool_bytes = wanted && wanted < room ? wanted : room;
    return PAGED_OK;
}

int paged__session_start(paged__session *s, const paged__memory_options *o, int32_t max_running,
                         const paged__places_options *places) {
    const uint64_t start = paged__now_ns();
    paged_engine_config config = paged__session_config(o);
    config.max_running = max_running;
    config.no_prefix_cache = !places;
    config.warm_up = max_running > 1;
    paged_error err;
    if (o->fit && o->pool_bytes) return paged__usage_error(s->cli, "give --fit or --pool-bytes, not both");
    const int code = places ? paged__places_open(s->cli, places, &s->places) : PAGED__EXIT_OK;
    if (code != PAGED__EXIT_OK) return code;
    paged_status status = o->fit ? paged__session_fit(s, &config, &err) : PAGED_OK;
    config.stores = s->places.all;
    config.n_stores = s->places.n;
    if (!status) status = paged_engine_create(s->model, &config, &s->engine, &err);
    if (!status) s->places.n = 0; /* the engine's */
    s->load_ms += (double)(paged__now_ns() - start) / 1e6;
    return status == PAGED_OK ? PAGED__EXIT_OK : paged__session_refused(s->cli, status, &err);
}

void paged__session_close(paged__session *s) {
    /* From here on Ctrl-C has nothing to cancel and ends the process. */
    paged__interrupt_watch(NULL, 0);
    paged__interrupt_keep(false);
    if (s->cli) paged__term_clear(&s->cli->term);
    paged_engine_free(s->engine);
    paged__places_close(&s->places);
    paged_model_free(s->model);
    *s = (paged__session){0};
}

/* ---- requests ---- */

void paged__session_request(const paged__sampling_options *o, paged_request *request) {
    paged_request_init(request);
    request->max_tokens = o->max_tokens;
    request->temperature = o->temperature;
    request->top_k = o->top_k;
    request->top_p = o->top_p;
    request->min_p = o->min_p;
    request->repetition_penalty = o->repetition_penalty;
    request->presence_penalty = o->presence_penalty;
    request->frequency_penalty = o->frequency_penalty;
    request->seed = o->seed;
    request->ignore_eos = o->ignore_eos;
}

paged__openai_world paged__session_world(const paged__session *s, const paged__sampling_options *defaults) {
    paged__openai_world world = {.model = s->model,
                                 .name = paged__model_name(&s->info, s->model_path),
                                 .chat_template = s->info.chat_template};
    paged__session_request(defaults, &world.defaults);
    return world;
}

int paged__session_submit(paged__session *s, const paged_request *request, uint64_t *id) {
    paged_error err;
    const paged_status status = paged_engine_submit(s->engine, request, id, &err);
    if (status == PAGED_OK) return PAGED__EXIT_OK;
    paged_engine_info info;
    paged_engine_get_info(s->engine, &info);
    const char *advice = status != PAGED_ERR_TOO_LONG       ? ""
                         : info.n_ctx < s->info.n_ctx_train ? "; shorten it, or raise --ctx or --pool-bytes"
                                                            : "; shorten it";
    return paged__error(s->cli, "%s%s", err.message, advice);
}

/* The text as it is, for a model without a template. */
static paged_status encode_text(const paged__session *s, const char *text, int32_t **tokens,
                                int32_t *n_tokens, paged_error *err) {
    const size_t capacity = strlen(text) + 8;
    *tokens = paged__alloc(capacity, sizeof **tokens);
    if (!*tokens)
        return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a prompt of %zu bytes", strlen(text));
    return paged_tokenize(paged_model_tokenizer(s->model), text, strlen(text), PAGED_TOKENIZE_SPECIAL,
                          *tokens, (int32_t)PAGED_MIN(capacity, INT32_MAX), n_tokens, err);
}

int paged__session_chat(paged__session *s, const paged_message *messages, int32_t n_messages,
                        int32_t **tokens, int32_t *n_tokens) {
    paged_error err;
    paged_status status;
    *tokens = NULL;
    if (s->info.chat_template) {
        const paged_chat chat = {.struct_size = sizeof chat,
                                 .messages = messages,
                                 .n_messages = n_messages,
                                 .add_generation_prompt = true};
        paged_prompt prompt = {0};
        status = paged_chat_render(s->model, &chat, &prompt, &err);
        paged__free(prompt.text);
        *tokens = prompt.tokens;
        *n_tokens = prompt.n_tokens;
    } else {
        status = encode_text(s, messages[n_messages - 1].content, tokens, n_tokens, &err);
    }
    if (status == PAGED_OK) return PAGED__EXIT_OK;
    paged__free(*tokens);
    *tokens = NULL;
    const bool is_template = status == PAGED_ERR_UNSUPPORTED || status == PAGED_ERR_FORMAT;
    return paged__error(s->cli, "%s%s", err.message,
                        is_template ? "; paged run --raw runs without the template" : "");
}

/* ---- what the engine counted ---- */

void paged__session_print_stats(const paged__session *s) {
    paged_engine_stats e;
    paged_cache_stats c;
    paged_engine_get_stats(s->engine, &e);
    paged_engine_get_cache_stats(s->engine, &c);
    fprintf(stderr, "steps       %llu, of %.1f tokens; %llu requests\n", (unsigned long long)e.n_steps,
            e.n_steps ? (double)e.n_tokens / (double)e.n_steps : 0.0, (unsigned long long)e.n_submitted);
    fprintf(stderr,
            "gave way    %llu times blocks to others, %llu tokens put off by a step for want of one, %llu "
            "cached blocks evicted\n",
            (unsigned long long)e.n_preemptions, (unsigned long long)e.n_stalls,
            (unsigned long long)(c.n_evicted + c.n_evicted_blocks));
    fprintf(stderr,
            "shared      %llu of %llu tokens found in the cache, %llu times after a wait; a common beginning "
            "read once in %llu steps, for %llu rows; %llu tails packed\n",
            (unsigned long long)c.n_hit_tokens, (unsigned long long)c.n_query_tokens,
            (unsigned long long)c.n_waits, (unsigned long long)e.n_cascade_steps,
            (unsigned long long)e.n_cascade_rows, (unsigned long long)c.n_packed);
}

json_t *paged__session_counters(const paged__session *s) {
    paged_engine_stats e;
    paged_cache_stats c;
    paged_engine_get_stats(s->engine, &e);
    paged_engine_get_cache_stats(s->engine, &c);
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "steps",
                     (json_int_t)e.n_steps, "tokens", (json_int_t)e.n_tokens, "requests",
                     (json_int_t)e.n_submitted, "preemptions", (json_int_t)e.n_preemptions, "stalls",
                     (json_int_t)e.n_stalls, "cascade_steps", (json_int_t)e.n_cascade_steps, "cascade_rows",
                     (json_int_t)e.n_cascade_rows, "promise_waits", (json_int_t)c.n_waits, "hit_tokens",
                     (json_int_t)c.n_hit_tokens, "evicted", (json_int_t)(c.n_evicted + c.n_evicted_blocks),
                     "tails_packed", (json_int_t)c.n_packed);
}

/* ---- speeds ---- */

static double per_second(int32_t n_tokens, double ms) {
    return n_tokens > 0 && ms > 0 ? n_tokens * 1000.0 / ms : 0;
}

double paged__prefill_speed(const paged_output *out) {
    return per_second(out->prompt_done - out->cached_tokens, out->prefill_ms);
}

/* The first token comes out of the prefill; decoding makes the others and, unseen, the one that ends the
 * text. */
double paged__decode_speed(const paged_output *out) {
    return per_second(out->completion_tokens - 1 + (out->stop_token >= 0), out->decode_ms);
}

/* ---- Ctrl-C ---- */

static _Atomic(paged_engine *) watched_engine;
static _Atomic(uint64_t) watched_id;
static _Atomic(paged__term *) watched_term;
static atomic_bool taken, keep_running;

static void on_interrupt(int signal_number) {
    (void)signal_number;
    paged_engine *engine = atomic_load(&watched_engine);
    const bool again = atomic_exchange(&taken, true);
    if (!again && engine) {
        paged_engine_cancel(engine, atomic_load(&watched_id));
    } else if (again || !atomic_load(&keep_running)) {
        paged__term *term = atomic_load(&watched_term);
        if (term) paged__term_clear(term);
        _exit(PAGED__EXIT_INTERRUPTED);
    }
}

void paged__interrupt_catch(paged__cli *cli) {
    struct sigaction action = {.sa_handler = on_interrupt, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    atomic_store(&watched_term, &cli->term);
    sigaction(SIGINT, &action, NULL);
}

void paged__interrupt_watch(paged_engine *engine, uint64_t id) {
    atomic_store(&watched_engine, NULL);
    atomic_store(&watched_id, id);
    atomic_store(&watched_engine, engine);
    /* One that came since the last look and before there was a request to cancel. */
    if (engine && atomic_load(&taken)) paged_engine_cancel(engine, id);
}

bool paged__interrupt_taken(void) {
    return atomic_exchange(&taken, false);
}

void paged__interrupt_keep(bool keep) {
    atomic_store(&keep_running, keep);
}

void paged__interrupt_hold(bool hold) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    pthread_sigmask(hold ? SIG_BLOCK : SIG_UNBLOCK, &set, NULL);
}

bool paged__interrupt_wait(int fd) {
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    sigset_t set;
    pthread_sigmask(SIG_BLOCK, NULL, &set);
    sigdelset(&set, SIGINT);
    while (!atomic_load(&taken)) {
        if (ppoll(&wait, 1, NULL, &set) >= 0) return true;
        if (errno != EINTR && errno != EAGAIN) return true; /* the read will say what it is */
    }
    return false;
}
