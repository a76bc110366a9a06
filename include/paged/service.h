/* service.h: an engine with a thread of its own, for programs with many callers.
 *
 *     paged_service_create -> { submit -> read … -> release } from any threads -> paged_service_free
 *
 * The service's thread steps the engine while there is work; it sleeps, without burning a CPU, while there is
 * none. A call waits for no step, paged_service_call aside: requests are looked at and changed while one is
 * computed. A request makes at most ring_tokens tokens that its reader has not taken: then it is *parked*
 * (PAGED_WAIT_READER: it keeps its blocks until others need them, and has no part in the steps) until it is
 * read, so that no token is ever dropped and nobody else waits; one that stays parked for reader_timeout_ms
 * ends by PAGED_FINISH_READER.
 *
 * Thread rule: every function may be called from any thread, except that one id is read by one thread at
 * a time. paged_service_cancel is also safe in a signal handler.
 */
#ifndef PAGED_SERVICE_H
#define PAGED_SERVICE_H

#include "paged/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct paged_service paged_service;

typedef struct paged_service_config {
    size_t struct_size;
    int32_t ring_tokens;        /* tokens of a request that wait for its reader at most; 0: 256 */
    int32_t reader_timeout_ms;  /* 0: 60 000 */
    paged_engine_config engine; /* see paged_engine_config_init; its struct_size may be left 0 */
} paged_service_config;

/* Errors: those of paged_engine_create, and NO_MEMORY where the system gives no thread or descriptor. The
 * model is borrowed and must outlive the service. config NULL: all defaults. */
PAGED_API paged_status paged_service_create(const paged_model *model, const paged_service_config *config,
                                            paged_service **out, paged_error *err);

/* Cancels what runs, waits for the step under way, ends the thread. Nobody may be in another call. NULL
 * is fine.
 */
PAGED_API void paged_service_free(paged_service *service);

/* As paged_engine_submit; checked and refused at once, without waiting for a step. */
PAGED_API paged_status paged_service_submit(paged_service *service, const paged_request *request,
                                            uint64_t *id, paged_error *err);

/* As paged_engine_read: what is new of one request. Waits up to timeout_ms (0: not at all, < 0: without
 * limit) until there is something new: text, tokens, progress of the prompt, or the end. Without any in
 * that time *out has counters and wait only. Pointers are borrowed until the next read or release of the
 * same id. Errors: NOT_FOUND, also when it is released meanwhile; NO_MEMORY, and nothing is lost. */
PAGED_API paged_status paged_service_read(paged_service *service, uint64_t id, int32_t timeout_ms,
                                          paged_output *out);

/* See paged_engine_prompt_logprobs; after the end of the request. Borrowed until its release. */
PAGED_API paged_status paged_service_prompt_logprobs(paged_service *service, uint64_t id,
                                                     const float **logprobs, const int32_t **top1,
                                                     int32_t *n);

/* Ends a request within one step. Unknown ids are ignored. */
PAGED_API void paged_service_cancel(paged_service *service, uint64_t id);

/* Forgets a request, running or finished. Its blocks are given back within one step. NOT_FOUND. */
PAGED_API paged_status paged_service_release(paged_service *service, uint64_t id);

/* For event loops: a descriptor that is readable while requests have news that nobody has asked for.
 * Owned by the service: only wait for it. paged_service_ready returns up to `capacity` of their ids, each
 * once, and forgets their news; each is then read with timeout 0. An id comes again when there is something
 * newer. A read asks for the news of its id, and one that waits for it beforehand. */
PAGED_API int paged_service_fd(const paged_service *service);
PAGED_API int32_t paged_service_ready(paged_service *service, uint64_t *ids, int32_t capacity);
/* The CPU that the service's thread was last seen on, -1: none yet. Where all cores compute, an event loop on
 * that one holds up the next step, and on another one it runs while that step is prepared. */
PAGED_API int32_t paged_service_cpu(const paged_service *service);

/* paged_engine_pin and paged_engine_pins, which wait for no step. */
PAGED_API paged_status paged_service_pin(paged_service *service, const char *name, const char *salt,
                                         const int32_t *tokens, int32_t n_tokens, paged_error *err);
PAGED_API paged_status paged_service_pins(paged_service *service, bool (*fn)(void *user, const char *name),
                                          void *user, paged_error *err);

/* Calls fn(engine, user), on this thread, between two steps: anything that engine.h can tell or do and that
 * is not above (statistics, check, facts). Steps wait for fn, so it must be quick; it must not call the
 * service or step, submit to, read from or release from the engine. */
PAGED_API void paged_service_call(paged_service *service, void (*fn)(paged_engine *engine, void *user),
                                  void *user);
/* The same, if the step at hand ends within so many ms; false: it does not, and fn was not called. */
PAGED_API bool paged_service_call_within(paged_service *service, int32_t timeout_ms,
                                         void (*fn)(paged_engine *engine, void *user), void *user);

#ifdef __cplusplus
}
#endif
#endif
