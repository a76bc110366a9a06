/* model/gguf.h: a GGUF file, checked before anything of it is believed. The one parser of the format; ggml's
 * is not used.
 *
 * What it guarantees after open: the file is mapped; version and byte order are known; every key has one
 * value of the type that is asked for; keys and tensor names are unique, not empty and without NUL; every
 * tensor has 1 … 4 dims ≥ 1, a known type, rows of whole quantisation blocks, an aligned offset, and bytes
 * that lie inside the file and overlap no other tensor. Nothing is allocated out of proportion to the file.
 * May include base/ and ggml only.
 */
#ifndef PAGED_MODEL_GGUF_H
#define PAGED_MODEL_GGUF_H

#include <ggml.h>

#include "base/base.h"

typedef struct paged__gguf paged__gguf;

typedef struct paged__gguf_tensor {
    const char *name;
    enum ggml_type type;
    int32_t n_dims;
    int64_t ne[4];    /* ne[0] is the row length; 1 beyond n_dims */
    const void *data; /* in the mapped file */
    size_t size_bytes;
} paged__gguf_tensor;

/* Errors: IO, FORMAT, UNSUPPORTED, NO_MEMORY; the message names file, key or tensor, and the numbers. */
paged_status paged__gguf_open(const char *path, paged__gguf **out, paged_error *err);
void paged__gguf_close(paged__gguf *g); /* NULL is fine */

size_t paged__gguf_file_bytes(const paged__gguf *g);
size_t paged__gguf_data_bytes(const paged__gguf *g);                   /* sum over tensors */
const void *paged__gguf_map(const paged__gguf *g, size_t *size_bytes); /* the whole mapped file */

/* Typed getters. An absent key leaves *out as it is and is an error only if `required`; another type, a value
 * outside [min, max], or a string with a NUL inside, is PAGED_ERR_FORMAT naming the key and the value. Any
 * GGUF integer type is taken for u32. */
bool paged__gguf_has(const paged__gguf *g, const char *key);
paged_status paged__gguf_u32(const paged__gguf *g, const char *key, bool required, uint32_t min, uint32_t max,
                             uint32_t *out, paged_error *err);
paged_status paged__gguf_f32(const paged__gguf *g, const char *key, bool required, float min, float max,
                             float *out, paged_error *err);
paged_status paged__gguf_bool(const paged__gguf *g, const char *key, bool required, bool *out,
                              paged_error *err);
paged_status paged__gguf_str(const paged__gguf *g, const char *key, bool required, const char **out,
                             paged_error *err);

/* Arrays; *out borrowed. Type is exact (i32 also accepts u32). Absent and not required: *n = 0. */
paged_status paged__gguf_arr_i32(const paged__gguf *g, const char *key, bool required, const int32_t **out,
                                 int64_t *n, paged_error *err);
paged_status paged__gguf_arr_f32(const paged__gguf *g, const char *key, bool required, const float **out,
                                 int64_t *n, paged_error *err);
paged_status paged__gguf_arr_str(const paged__gguf *g, const char *key, bool required, int64_t *n,
                                 paged_error *err);
/* After arr_str said n > i. A NUL stands behind the string; the second gives its length, as it may have NULs
 * inside. */
const char *paged__gguf_arr_str_at(const paged__gguf *g, const char *key, int64_t i);
size_t paged__gguf_arr_str_bytes(const paged__gguf *g, const char *key, int64_t i);

int32_t paged__gguf_n_tensors(const paged__gguf *g);
const paged__gguf_tensor *paged__gguf_tensor_at(const paged__gguf *g, int32_t i);
const paged__gguf_tensor *paged__gguf_find(const paged__gguf *g,
                                           const char *name); /* NULL: absent; O(log n) */

/* For `paged inspect`: every key in the file's order, its type ("u32", "[str]"; static), and a short printed
 * value in plain ASCII, other bytes as \xNN. */
int32_t paged__gguf_n_keys(const paged__gguf *g);
const char *paged__gguf_key_at(const paged__gguf *g, int32_t i, const char **type_name, char *value,
                               size_t value_capacity);

#endif
