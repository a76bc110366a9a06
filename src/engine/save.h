/* engine/save.h: paged_engine_save in two halves, for who has others to serve meanwhile: what is cached is
 * copied between two steps, and the copy is written by any thread while steps go on. */
#ifndef PAGED_ENGINE_SAVE_H
#define PAGED_ENGINE_SAVE_H

#include "paged/engine.h"

/* A file that is not written yet. */
typedef struct paged__saving {
    uint8_t *bytes; /* [facts.file_bytes] owned */
    paged_saved facts;
} paged__saving;

/* As paged_engine_save, of which these two are the whole. name: for errors. */
paged_status paged__save_take(paged_engine *engine, const int32_t *tokens, int32_t n_tokens, const char *salt,
                              const char *name, paged__saving *out, paged_error *err);
paged_status paged__save_write(const paged__saving *saving, int dir_fd, const char *name, paged_error *err);
void paged__save_free(paged__saving *saving);

/* Removes what a process that was killed left half written in a directory. */
void paged__save_sweep(int dir_fd);

#endif
