/* model/model.h: a loaded model as the rooms above and the files of arch/ see it.
 *
 *   GGUF file --checked--> paged_model {hparams, weights, tokenizer}     read-only, shared by runners
 *                              |
 *                          paged__runner: tokens + slots + tables -> logits, as arch->forward describes it
 *
 * Matrices that our kernels take are packed once, at load, by all threads; the pages of the file they came
 * from go back to the system, so that nothing is held twice. The others, and vectors, stay in the mapped
 * file. May include base/, ops, ggml.
 */
#ifndef PAGED_MODEL_MODEL_H
#define PAGED_MODEL_MODEL_H

#include "model/chat.h"
#include "model/gguf.h"
#include "model/tokenizer.h"
#include "model/weight.h"
#include "paged/model.h"

typedef struct paged__hparams {
    int32_t n_layers, n_embd, n_ff, n_heads, n_kv_heads, head_dim_k, head_dim_v, n_rot, n_vocab, n_ctx_train;
    float norm_eps, rope_freq_base, rope_freq_scale; /* freq_scale: 1 / the linear scaling factor */
} paged__hparams;

typedef struct paged__layer {
    const float *attn_norm;            /* [n_embd] */
    const paged__weight *wq, *wk, *wv; /* heads * head_dim × n_embd */
    const paged__weight *wo;           /* n_embd × n_heads * head_dim_v */
    const float *ffn_norm;             /* [n_embd] */
    const paged__weight *gate, *up;    /* n_ff × n_embd */
    const paged__weight *down;         /* n_embd × n_ff */
} paged__layer;

struct paged__arch;

struct paged_model {
    paged__gguf *file;
    paged_tokenizer *tok;
    const struct paged__arch *arch;
    paged__hparams hp;
    const char *name, *chat_template; /* in `file`; chat_template NULL: none */
    paged__chat_template *chat;       /* compiled; NULL: none */
    bool vocab_only;

    paged__weight *weights; /* [n_weights] every matrix that is used, in the order of loading */
    int32_t n_weights;
    uint8_t *packed; /* what the packed ones point into; NULL: none is */
    size_t packed_bytes;
    const paged__weight *tok_embd; /* n_vocab × n_embd */
    const float *output_norm;      /* [n_embd] */
    const paged__weight *output;   /* n_vocab × n_embd; tok_embd if the file has none */
    double load_ms;
    char linear_kernels[160]; /* "avx512_vnni, packed q8_0, q4_1; ggml iq2_s" */
    paged__layer *layers;     /* [n_layers] */
    float *rope_factors;      /* [n_rot / 2] divides each frequency; NULL: all 1 */
};

struct paged__lane; /* model/forward.h */

/* One model family. `name` is GGUF's general.architecture, the prefix of its keys. */
typedef struct paged__arch {
    const char *name;
    paged_status (*load)(paged_model *m, paged_error *err); /* hp is filled for what all families share */
    void (*forward)(struct paged__lane *lane);              /* one step, run by every thread at once */
} paged__arch;

extern const paged__arch paged__arch_llama;

/* ---- for arch/: tensors by name, checked ---- */

/* The shape must match, and the type be one that can be multiplied (a vector: f32). Errors: FORMAT with name,
 * found and wanted shape, UNSUPPORTED. An absent matrix is an error if `required`, else *out = NULL. */
paged_status paged__model_matrix(paged_model *m, const char *name, bool required, int32_t n_rows,
                                 int32_t n_cols, const paged__weight **out, paged_error *err);
paged_status paged__model_vector(const paged_model *m, const char *name, int32_t n, const float **out,
                                 paged_error *err);

/* The embedding of a model that has an output matrix is read by rows and never multiplied. */
static inline bool paged__model_multiplies(const paged_model *m, const paged__weight *w) {
    return w != m->tok_embd || w == m->output;
}

/* pack.c: packs what our kernels take and fills is_packed, packed, packed_bytes, linear_kernels. `progress`
 * may be NULL. Errors: NO_MEMORY. */
paged_status paged__model_pack(paged_model *m, void (*progress)(void *user, float fraction), void *user,
                               paged_error *err);

/* *all: whether products give one row the same bits alone and among others, and on one thread and on several,
 * for each type of matrix in the model (selftest.c). `text`: "q4_1: yes, f16: no". Errors: NO_MEMORY. */
paged_status paged__model_self_test(const paged_model *m, int32_t n_threads, bool *all, char *text,
                                    size_t text_capacity, paged_error *err);

#endif
