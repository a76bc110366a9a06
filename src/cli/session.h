/* cli/session.h: what the commands that run a model share: their options, a model and an engine, Ctrl-C.
 *
 * A command has the structs of options in its own struct and puts the rows of the macros into its table.
 */
#ifndef PAGED_CLI_SESSION_H
#define PAGED_CLI_SESSION_H

#include "cli/cli.h"
#include "cli/places.h"
#include "paged/engine.h"
#include "paged/model.h"
#include "server/openai.h"

typedef struct paged__memory_options {
    int32_t ctx, block_size, n_threads, chunk, kv_choice; /* of paged__kv_choices */
    size_t pool_bytes;
    bool contiguous;
    int32_t linear; /* a paged_linear */
    bool fit;       /* the context and pool that the memory at hand holds */
    const char *device;
} paged__memory_options;

typedef struct paged__sampling_options {
    int32_t max_tokens, top_k;
    float temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
    uint64_t seed;
    bool ignore_eos;
} paged__sampling_options;

extern const char *const paged__kv_types[];       /* index: paged_type */
extern const char *const paged__kv_choices[];     /* the first is auto, paged_type i comes as i + 1 */
extern const char *const paged__linear_choices[]; /* index: paged_linear */
extern const char *const paged__log_levels[];     /* index: paged_log_level */

/* Defaults of the structs above. */
#define PAGED__MEMORY_DEFAULTS                                                                               \
    { .block_size = 16 }
#define PAGED__SAMPLING_DEFAULTS                                                                             \
    { .top_p = 1, .repetition_penalty = 1 }

#define PAGED__KV_HELP                                                                                       \
    "auto, f16, f32, bf16 or int8 (default: auto, bf16 where the\nprocessor multiplies it, else f16)"

#define PAGED__LINEAR_ROW(T, field)                                                                          \
    {                                                                                                        \
        PAGED__OPTION_CHOICE, 0, "linear", "TYPE", offsetof(T, field), 0, 0, paged__linear_choices,          \
            "auto, int8 or bf16: how linear layers multiply quantised weights\n(default: auto, which is "    \
            "int8); bf16, on processors with AMX, is\nfaster for long prompts and many requests, slower "    \
            "alone"                                                                                          \
    }

#define PAGED__MODEL_ROW(T, field)                                                                           \
    {                                                                                                        \
        PAGED__OPTION_TEXT, 'm', "model", "FILE", offsetof(T, field), 0, 0, NULL,                            \
            "the model, a GGUF file (default: $PAGED_MODEL)"                                                 \
    }

#define PAGED__SAMPLING_ROWS(T, s)                                                                           \
    {PAGED__OPTION_INT,                                                                                      \
     'n',                                                                                                    \
     "max-tokens",                                                                                           \
     "N",                                                                                                    \
     offsetof(T, s.max_tokens),                                                                              \
     1,                                                                                                      \
     INT32_MAX,                                                                                              \
     NULL,                                                                                                   \
     "tokens to generate at most (default: until the model ends or\nthe context is full)"},                  \
        {PAGED__OPTION_REAL,                                                                                 \
         0,                                                                                                  \
         "temperature",                                                                                      \
         "T",                                                                                                \
         offsetof(T, s.temperature),                                                                         \
         0,                                                                                                  \
         1e9,                                                                                                \
         NULL,                                                                                               \
         "0: always the most likely token, so every run gives the same\ntext (default: 0)"},                 \
        {PAGED__OPTION_INT,                                                                                  \
         0,                                                                                                  \
         "top-k",                                                                                            \
         "K",                                                                                                \
         offsetof(T, s.top_k),                                                                               \
         -1,                                                                                                 \
         INT32_MAX,                                                                                          \
         NULL,                                                                                               \
         "sample from the K most likely tokens (default: 0, off)"},                                          \
        {PAGED__OPTION_REAL,                                                                                 \
         0,                                                                                                  \
         "top-p",                                                                                            \
         "P",                                                                                                \
         offsetof(T, s.top_p),                                                                               \
         0,                                                                                                  \
         1,                                                                                                  \
         NULL,                                                                                               \
         "sample from the most likely tokens that sum to P; 0 is greedy\n(default: 1, off)"},                \
        {PAGED__OPTION_REAL,                                                                                 \
         0,                                                                                                  \
         "min-p",                                                                                            \
         "P",                                                                                                \
         offsetof(T, s.min_p),                                                                               \
         0,                                                                                                  \
         1,                                                                                                  \
         NULL,                                                                                               \
         "sample from tokens with at least P times the probability of\nthe best (default: 0, off)"},         \
        {PAGED__OPTION_REAL,                                                                                 \
         0,                                                                                                  \
         "repetition-penalty",                                                                               \
         "R",                                                                                                \
         offsetof(T, s.repetition_penalty),                                                                  \
         0,                                                                                                  \
         100,                                                                                                \
         NULL,                                                                                               \
         "makes tokens of prompt and answer less likely (default: 1,\noff)"},                                \
        {PAGED__OPTION_REAL,                                                                                 \
         0,                                                                                                  \
         "presence-penalty",                                                                                 \
         "X",                                                                                                \
         offsetof(T, s.presence_penalty),                                                                    \
         -100,                                                                                               \
         100,                                                                                                \
         NULL,                                                                                               \
         "taken from the logit of tokens of the answer (default: 0)"},                                       \
        {PAGED__OPTION_REAL,                                                                                 \
         0,                                                                                                  \
         "frequency-penalty",                                                                                \
         "X",                                                                                                \
         offsetof(T, s.frequency_penalty),                                                                   \
         -100,                                                                                               \
         100,                                                                                                \
         NULL,                                                                                               \
         "the same, times how often the token occurs (default: 0)"},                                         \
        {PAGED__OPTION_SEED,                                                                                 \
         0,                                                                                                  \
         "seed",                                                                                             \
         "S",                                                                                                \
         offsetof(T, s.seed),                                                                                \
         0,                                                                                                  \
         0,                                                                                                  \
         NULL,                                                                                               \
         "same seed, same text (default: 0)"},                                                               \
    {                                                                                                        \
        PAGED__OPTION_FLAG, 0, "ignore-eos", NULL, offsetof(T, s.ignore_eos), 0, 0, NULL,                    \
            "go on after tokens that end a generation"                                                       \
    }

#define PAGED__MEMORY_ROWS(T, m)                                                                             \
    {PAGED__OPTION_INT,                                                                                      \
     0,                                                                                                      \
     "ctx",                                                                                                  \
     "N",                                                                                                    \
     offsetof(T, m.ctx),                                                                                     \
     1,                                                                                                      \
     INT32_MAX,                                                                                              \
     NULL,                                                                                                   \
     "tokens of prompt and answer at most (default: the model's)"},                                          \
        {PAGED__OPTION_BYTES,                                                                                \
         0,                                                                                                  \
         "pool-bytes",                                                                                       \
         "N",                                                                                                \
         offsetof(T, m.pool_bytes),                                                                          \
         0,                                                                                                  \
         0,                                                                                                  \
         NULL,                                                                                               \
         "bytes of the KV pool: 64M, 1GiB (default: what the context needs)"},                               \
        {PAGED__OPTION_FLAG,                                                                                 \
         0,                                                                                                  \
         "contiguous",                                                                                       \
         NULL,                                                                                               \
         offsetof(T, m.contiguous),                                                                          \
         0,                                                                                                  \
         0,                                                                                                  \
         NULL,                                                                                               \
         "no paging, to compare with: each request reserves room for\nthe whole context in one run, and "    \
         "shares nothing"},                                                                                  \
        {PAGED__OPTION_FLAG,                                                                                 \
         0,                                                                                                  \
         "fit",                                                                                              \
         NULL,                                                                                               \
         offsetof(T, m.fit),                                                                                 \
         0,                                                                                                  \
         0,                                                                                                  \
         NULL,                                                                                               \
         "the largest context and pool that the memory at hand holds, up\nto --ctx"},                        \
        {PAGED__OPTION_CHOICE, 0, "kv-type", "TYPE", offsetof(T, m.kv_choice), 0, 0, paged__kv_choices,      \
         PAGED__KV_HELP},                                                                                    \
        PAGED__LINEAR_ROW(T, m.linear),                                                                      \
        {PAGED__OPTION_INT,                                                                                  \
         0,                                                                                                  \
         "block-size",                                                                                       \
         "N",                                                                                                \
         offsetof(T, m.block_size),                                                                          \
         1,                                                                                                  \
         1024,                                                                                               \
         NULL,                                                                                               \
         "tokens of a block (default: 16); multiples of 16 are faster,\nthey take the packed layout"},       \
        {PAGED__OPTION_INT,                                                                                  \
         0,                                                                                                  \
         "threads",                                                                                          \
         "N",                                                                                                \
         offsetof(T, m.n_threads),                                                                           \
         1,                                                                                                  \
         256,                                                                                                \
         NULL,                                                                                               \
         "threads (default: the cores that this process may use)"},                                          \
        {PAGED__OPTION_TEXT,                                                                                 \
         0,                                                                                                  \
         "device",                                                                                           \
         "NAME",                                                                                             \
         offsetof(T, m.device),                                                                              \
         0,                                                                                                  \
         0,                                                                                                  \
         NULL,                                                                                               \
         "where the KV pool lies and attention runs: cpu (default),\nopencl, opencl:NUMBER or opencl:NAME"}, \
    {                                                                                                        \
        PAGED__OPTION_INT, 0, "chunk", "N", offsetof(T, m.chunk), 1, 65536, NULL,                            \
            "prompt tokens computed in one step at most (default: 512)"                                      \
    }

typedef struct paged__session {
    paged__cli *cli;
    const char *model_path;
    paged_model *model;
    paged_model_info info;
    paged_engine *engine;
    double load_ms;       /* of the model and, once it is made, the engine */
    paged__places places; /* what of them the engine has not taken */
} paged__session;

/* Loads the model (named, or $PAGED_MODEL) with a progress bar unless quiet. Returns an exit code; the error
 * has been told. */
int paged__session_load(paged__session *session, paged__cli *cli, const char *named, paged_linear linear);

/* kv_type of an engine's config for one of paged__kv_choices. */
int32_t paged__kv_type_of(int32_t choice);

/* What the options say about an engine. */
paged_engine_config paged__session_config(const paged__memory_options *options);
/* --fit: sets the pool to what is needed, or to what is at hand if that is less; the context follows. */
paged_status paged__session_fit(const paged__session *session, paged_engine_config *config, paged_error *err);
/* Tells why there is no engine, and what to do. Returns an exit code. */
int paged__session_refused(paged__cli *cli, paged_status status, const paged_error *err);

/* Makes the engine. max_running 0: 1. places: NULL: none, and nothing is taken over from earlier requests. */
int paged__session_start(paged__session *session, const paged__memory_options *options, int32_t max_running,
                         const paged__places_options *places);
void paged__session_close(paged__session *session); /* a zeroed one is fine */

/* paged_request_init() and the options. */
void paged__session_request(const paged__sampling_options *options, paged_request *request);

/* What the server's and the batch's requests are read against. Borrows the session. */
paged__openai_world paged__session_world(const paged__session *session,
                                         const paged__sampling_options *defaults);

/* Submits; a refusal is told, with what to do about it. */
int paged__session_submit(paged__session *session, const paged_request *request, uint64_t *id);

/* Messages in the model's template as tokens, in *tokens [*n_tokens], owned by the caller (paged__free). A
 * model without a template gets the text of the last message as it is. */
int paged__session_chat(paged__session *session, const paged_message *messages, int32_t n_messages,
                        int32_t **tokens, int32_t *n_tokens);

/* ---- what the engine counted ---- */

/* A few lines on stderr: steps, who had to give way, what was computed or read once for several. */
void paged__session_print_stats(const paged__session *session);
json_t *paged__session_counters(const paged__session *session); /* the same as an object */

/* ---- speeds ---- */

double paged__prefill_speed(const paged_output *out); /* tokens/s of what was computed, 0: unknown */
double paged__decode_speed(const paged_output *out);

/* ---- Ctrl-C ----
 *
 * While a request is watched, the first one cancels it; otherwise, and the second time, the process ends with
 * 130. A signal handler knows nothing but static objects, so there is one watch a process. */

void paged__interrupt_catch(paged__cli *cli);
void paged__interrupt_watch(paged_engine *engine, uint64_t id); /* engine NULL: nothing is watched */
bool paged__interrupt_taken(void); /* one came since the last call; the next one is a first one again */

/* With `keep` true the first one is only noted where nothing is watched; it cancels the next that is watched
 * unless paged__interrupt_taken() is asked before. */
void paged__interrupt_keep(bool keep);

/* A wait for input that Ctrl-C ends whenever it comes: hold it back, wait for the input, read, let it go.
 * False: it came, now or before. One that is held back comes in the wait, never between the look and the
 * read. */
void paged__interrupt_hold(bool hold);
bool paged__interrupt_wait(int fd);

#endif
