/* conversation.h: the turns of a chat as the tokens that an engine is asked with.
 *
 *     paged_conversation_create
 *       -> { add_user -> request -> submit -> { read -> take } … } … or add_turn …
 *       -> paged_conversation_free
 *
 * A turn is a message of the user and its answer; it owns a run of tokens, template included. An answer is
 * kept as the tokens that the model made, so the next request begins with exactly the tokens whose keys and
 * values are cached: it computes the new message and nothing else.
 *
 * Old turns go when asked for (paged_conversation_keep) or when a message would exceed max_tokens, in one of
 * two ways. Both are visible in paged_conversation_info.
 *   exact      whole turns go, the oldest first. What is left is a conversation like any other: the answers
 *              are those of a fresh one with these turns, bit for bit. What follows the system message is
 *              computed again once.
 *   keep-sink  an approximation: the system message and the newest half of the other tokens stay, wherever
 *              that cuts a turn, and an answer goes on beyond the context (paged_request.keep_sink). What is
 *              kept is computed again, too, so the keys and values are those of the tokens kept.
 * Keys and values of what has gone stay cached until their blocks are needed.
 *
 * Thread rule: one thread at a time per conversation.
 */
#ifndef PAGED_CONVERSATION_H
#define PAGED_CONVERSATION_H

#include "paged/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct paged_conversation paged_conversation;

typedef enum paged_conversation_mode {
    PAGED_CONVERSATION_EXACT = 0,
    PAGED_CONVERSATION_KEEP_SINK
} paged_conversation_mode;

typedef struct paged_conversation_config {
    size_t struct_size;
    const char *system; /* system message; copied; NULL: the template's own, if it has one */
    const char *salt;   /* of its requests; copied; NULL: none */
    int32_t max_tokens; /* of a prompt; less than the context by what an answer needs; 0: any number */
    paged_conversation_mode mode;
} paged_conversation_config;

/* Errors: those of paged_chat_tokenize, TOO_LONG (the system message alone exceeds max_tokens), INVALID_ARG,
 * NO_MEMORY. The model is borrowed; config NULL: all defaults. */
PAGED_API paged_status paged_conversation_create(const paged_model *model,
                                                 const paged_conversation_config *config,
                                                 paged_conversation **out, paged_error *err);
PAGED_API void paged_conversation_free(paged_conversation *conversation); /* NULL is fine */

/* Begins a turn with a message of the user. Where max_tokens asks for it, older turns go. Errors: TOO_LONG
 * (the message alone, with both numbers), INVALID_ARG (the turn before has no answer), NO_MEMORY, those of
 * paged_chat_tokenize. */
PAGED_API paged_status paged_conversation_add_user(paged_conversation *conversation, const char *text,
                                                   paged_error *err);

/* Sets tokens, n_tokens, salt and keep_sink of a request; they are borrowed until the conversation changes.
 * Errors: INVALID_ARG (no turn has begun). */
PAGED_API paged_status paged_conversation_request(const paged_conversation *conversation,
                                                  paged_request *request, paged_error *err);

/* What was read of the answer: adds its tokens to the turn, and ends the turn when it has a finish reason,
 * whichever. Errors: INVALID_ARG (no turn has begun), NO_MEMORY. */
PAGED_API paged_status paged_conversation_take(paged_conversation *conversation, const paged_output *out,
                                               paged_error *err);

/* Forgets a turn that has begun, with what its answer has so far. Turns that went for it stay away. */
PAGED_API void paged_conversation_undo(paged_conversation *conversation);

/* A whole turn that took place elsewhere. Errors: those of paged_conversation_add_user. */
PAGED_API paged_status paged_conversation_add_turn(paged_conversation *conversation, const char *user,
                                                   const char *assistant, paged_error *err);

/* Drops all turns but the last n_last; one that has begun stays in any case. Returns how many went. */
PAGED_API int32_t paged_conversation_keep(paged_conversation *conversation, int32_t n_last);

typedef struct paged_conversation_info {
    int32_t n_turns;         /* now; the first one may have lost its beginning (keep-sink) */
    int32_t n_tokens;        /* now, system message and a turn that has begun included */
    int32_t n_system_tokens; /* before the first turn */
    bool begun;              /* the last turn has no answer yet */
    int64_t n_dropped_turns, n_dropped_tokens; /* since create */
    /* of the last answer that has ended: */
    int32_t prompt_tokens, cached_tokens, completion_tokens; /* as in paged_output */
    int32_t n_dropped_by_answer;                             /* paged_output.n_dropped */
} paged_conversation_info;

PAGED_API void paged_conversation_get_info(const paged_conversation *conversation,
                                           paged_conversation_info *out);

/* Where a turn lies in the tokens of a request: [first, first + n). Errors: INVALID_ARG (no such turn). */
PAGED_API paged_status paged_conversation_turn(const paged_conversation *conversation, int32_t turn,
                                               int32_t *first, int32_t *n);

/* All its tokens, a turn that has begun included; borrowed until it changes. */
PAGED_API const int32_t *paged_conversation_tokens(const paged_conversation *conversation, int32_t *n);

/* The tokens of another conversation with the same model and system message, with those of each of its turns
 * (paged_conversation_turn), which had all ended: they are kept as they are, so that what was computed of
 * them is found. For one that has no turns. Errors: INVALID_ARG (it has turns, the tokens begin with
 * another system message, do not add up, or are none of the model's), TOO_LONG (max_tokens), NO_MEMORY. */
PAGED_API paged_status paged_conversation_restore(paged_conversation *conversation, const int32_t *tokens,
                                                  int32_t n_tokens, const int32_t *turns, int32_t n_turns,
                                                  paged_error *err);

#ifdef __cplusplus
}
#endif
#endif
