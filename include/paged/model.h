/* model.h: a GGUF file as a model: its shape, its tokenizer, its chat template. Part of libpaged-engine.
 *
 * Loading checks everything before it is used: a damaged or hostile file is an error with the key or tensor
 * and the numbers in it. Matrices are packed for the kernels at load, by all threads, and the pages of the
 * file that they came from are given back; matrices of types without a kernel stay in the mapped file.
 *
 * Thread rule: a loaded model does not change; all functions on it may be called from any thread at the same
 * time.
 */
#ifndef PAGED_MODEL_H
#define PAGED_MODEL_H

#include "paged/base.h"
#include "paged/kv.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct paged_model paged_model;
typedef struct paged_tokenizer paged_tokenizer;

/* How linear layers of quantised weights are computed. */
typedef enum paged_linear {
    PAGED_LINEAR_AUTO, /* I8 */
    PAGED_LINEAR_I8,   /* activations quantised to 8 bits, 32 to a scale: the same bits everywhere */
    PAGED_LINEAR_BF16  /* weights and activations rounded to bf16, on processors with AMX. More exact; prompts
                        * and batches are faster, a token alone is slower */
} paged_linear;

typedef struct paged_model_config {
    size_t struct_size;
    bool vocab_only;                              /* tokenizer and facts only; such a model cannot run */
    void (*progress)(void *user, float fraction); /* 0 … 1, from the calling thread; may be NULL */
    void *progress_user;
    paged_linear linear; /* bf16 without AMX: UNSUPPORTED */
} paged_model_config;

/* Errors: IO, FORMAT (damaged or hostile file), UNSUPPORTED (architecture, tokenizer, tensor type, linear),
 * NO_MEMORY. config may be NULL. The caller owns the model and frees it after every engine that uses it. */
PAGED_API paged_status paged_model_load(const char *path, const paged_model_config *config, paged_model **out,
                                        paged_error *err);
PAGED_API void paged_model_free(paged_model *model); /* NULL is fine */

enum { PAGED_WEIGHT_TYPES_MAX = 16 };

typedef struct paged_model_info {
    const char *arch, *name;     /* owned by the model; name may be "" */
    const char *chat_template;   /* NULL: none */
    const char *tokenizer, *pre; /* "gpt2" or "llama"; name of the pre-split rule, "" if none */
    int32_t n_layers, n_embd, n_ff, n_heads, n_kv_heads, head_dim_k, head_dim_v, n_vocab;
    int32_t n_ctx_train; /* context length the file states */
    int32_t n_tensors;
    int64_t n_params;
    size_t file_bytes, weight_bytes;
    size_t packed_bytes;               /* of weights in the layout of the kernels; 0 with vocab_only */
    const char *linear_kernels;        /* "avx512_vnni, packed q8_0, q4_1; ggml iq2_s": owned by the model */
    double load_ms;                    /* what paged_model_load took */
    float rope_freq_base;              /* 0: no RoPE */
    int32_t window, n_windowed_layers; /* layers that see the last `window` keys only; 0: none do */
    bool tied_output;                  /* the embedding is the output matrix */
    int32_t n_weight_types;            /* tensor types in the file, with how many tensors and bytes of each */
    struct {
        const char *name; /* ggml's name: "q4_1" */
        int32_t n_tensors;
        size_t bytes;
    } weight_types[PAGED_WEIGHT_TYPES_MAX];
} paged_model_info;

PAGED_API void paged_model_get_info(const paged_model *model, paged_model_info *out);

/* ---- tokenizer ---- */

PAGED_API const paged_tokenizer *paged_model_tokenizer(const paged_model *model); /* owned by the model */

enum {
    PAGED_TOKENIZE_SPECIAL = 1u << 0, /* add BOS and EOS where the file says so */
    PAGED_TOKENIZE_CONTROL = 1u << 1  /* text such as <|im_end|> is its control token, not characters */
};

/* Text (any bytes; invalid UTF-8 is encoded byte by byte) to token ids.
 *   tokens [capacity]; text_len + 8 entries are always enough. Time grows as n log n at worst, also for one
 * long run. Errors: LIMIT (capacity too small, or a limit of the pre-split was reached), NO_MEMORY. */
PAGED_API paged_status paged_tokenize(const paged_tokenizer *tok, const char *text, size_t text_len,
                                      uint32_t flags, int32_t *tokens, int32_t capacity, int32_t *n_tokens,
                                      paged_error *err);

/* The bytes of one token, which may be a part of a UTF-8 character. Control tokens give their text when
 * `control` is true, nothing otherwise. Returns the number of bytes (also when capacity is smaller; then
 * nothing is written), -1: no such token. */
PAGED_API int32_t paged_token_bytes(const paged_tokenizer *tok, int32_t token, bool control, char *buf,
                                    int32_t capacity);

PAGED_API int32_t paged_token_count(const paged_tokenizer *tok);
PAGED_API int32_t paged_token_bos(const paged_tokenizer *tok); /* -1: none */
PAGED_API int32_t paged_token_eos(const paged_tokenizer *tok); /* -1: none */
PAGED_API bool paged_token_is_control(const paged_tokenizer *tok, int32_t token);
PAGED_API bool paged_token_is_eog(const paged_tokenizer *tok,
                                  int32_t token); /* any token that ends a generation */

/* Tokens to text as a stream: only whole UTF-8 characters come out; bytes that can never become one become
 * U+FFFD, as does a character cut off at the end. The joined output equals that of one call with all tokens.
 * No allocation inside. */
typedef struct paged_detok {
    const paged_tokenizer *tok;
    bool control; /* control tokens as text */
    bool started; /* the dummy space of SentencePiece vocabularies is dropped once, at the start */
    uint8_t n_pending;
    uint8_t pending[4]; /* first bytes of a character that is not complete yet */
} paged_detok;

enum { PAGED_DETOK_MAX = 2048 }; /* one token never gives more bytes than this */

PAGED_API void paged_detok_init(paged_detok *detok, const paged_tokenizer *tok, bool control);
/* out [PAGED_DETOK_MAX]; returns the number of bytes written. An unknown token writes nothing. */
PAGED_API int32_t paged_detok_push(paged_detok *detok, int32_t token, char *out);
PAGED_API int32_t paged_detok_finish(paged_detok *detok, char *out);

/* ---- chat ----
 *
 * The chat template of the file, a program in a part of Jinja (docs/chat-templates.md), is compiled when
 * the model
 * is loaded and rendered here. Text of the template may become control tokens; what comes from a message or a
 * variable never does, whatever the template does with it.
 */

typedef struct paged_message {
    const char *role;    /* "system", "developer", "user", "assistant", "tool", "function" */
    const char *content; /* UTF-8; never becomes a control token */
} paged_message;

typedef struct paged_chat {
    size_t struct_size;
    const paged_message *messages; /* [n_messages] */
    int32_t n_messages;
    const char *
        /* instead of them: a JSON list, with tool_calls and whatever else the template knows */
        messages_json;
    const char
        *variables_json; /* a JSON object, each member a variable: tools, enable_thinking, …; NULL: none */
    bool add_generation_prompt; /* opens the assistant's turn */
    int64_t now_s;              /* Unix time, for templates that tell the date; 0: now */
} paged_chat;

typedef struct paged_prompt {
    char *text; /* [text_len + 1], with a final 0; as the template wrote it */
    size_t text_len;
    int32_t *tokens; /* [n_tokens] with BOS once, where the template prints it or the file asks for it */
    int32_t n_tokens;
} paged_prompt;

/* The caller frees the prompt. Errors: UNSUPPORTED (no template, or one that uses what we do not have),
 * FORMAT (a
 * broken template, bad JSON), INVALID_ARG (a role that is not listed above, or a chat that the template
 * refuses: its message), LIMIT (steps, memory, output), NO_MEMORY. */
PAGED_API paged_status paged_chat_render(const paged_model *model, const paged_chat *chat, paged_prompt *out,
                                         paged_error *err);
PAGED_API void paged_prompt_free(paged_prompt *prompt); /* a zeroed one is fine */

/* paged_chat_render into arrays of the caller: tokens [capacity] and, if text is not NULL, text
 * [text_capacity] with a final 0. Errors also: LIMIT (capacity). */
PAGED_API paged_status paged_chat_tokenize(const paged_model *model, const paged_message *messages,
                                           int32_t n_messages, bool add_generation_prompt, int32_t *tokens,
                                           int32_t capacity, int32_t *n_tokens, char *text,
                                           size_t text_capacity, paged_error *err);

#ifdef __cplusplus
}
#endif
#endif
