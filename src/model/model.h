/* model/model.h: a loaded model as the rooms above and the files of arch/ see it.
 *
 *   GGUF file --checked--> paged_model {hparams, weights, tokenizer}     read-only, shared by runners
 *                              |
 *                          paged__runner: tokens + slots + tables -> logits, by a graph that arch/ builds
 *
 * Weights are ggml tensors whose data lies in the mapped file. May include base/, ops (paged/ops.h), ggml.
 */
#ifndef PAGED_MODEL_MODEL_H
#define PAGED_MODEL_MODEL_H

#include <ggml-backend.h>
#include <ggml.h>

#include "model/gguf.h"
#include "model/tokenizer.h"
#include "paged/model.h"

typedef struct paged__hparams {
    int32_t n_layers, n_embd, n_ff, n_heads, n_kv_heads, head_dim_k, head_dim_v, n_rot, n_vocab, n_ctx_train;
    float norm_eps, rope_freq_base, rope_freq_scale; /* freq_scale: 1 / the linear scaling factor */
} paged__hparams;

typedef struct paged__layer {
    struct ggml_tensor *attn_norm;         /* [n_embd] f32 */
    struct ggml_tensor *wq, *wk, *wv;      /* [n_embd, heads * head_dim] */
    struct ggml_tensor *wo;                /* [n_heads * head_dim_v, n_embd] */
    struct ggml_tensor *ffn_norm;          /* [n_embd] f32 */
    struct ggml_tensor *ffn_gate, *ffn_up; /* [n_embd, n_ff] */
    struct ggml_tensor *ffn_down;          /* [n_ff, n_embd] */
} paged__layer;

struct paged__arch;

struct paged_model {
    paged__gguf *file;
    paged_tokenizer *tok;
    const struct paged__arch *arch;
    paged__hparams hp;
    const char *name, *chat_template; /* in `file`; chat_template NULL: none */
    bool vocab_only;

    struct ggml_context *ctx; /* tensor headers */
    void *ctx_mem;
    ggml_backend_buffer_t buffer;    /* the mapped file as ggml sees it */
    struct ggml_tensor *tok_embd;    /* [n_embd, n_vocab] */
    struct ggml_tensor *output_norm; /* [n_embd] f32 */
    struct ggml_tensor *output;      /* [n_embd, n_vocab]; tok_embd if the file has none */
    paged__layer *layers;            /* [n_layers] */
    float *rope_factors;             /* [n_rot / 2] divides each frequency; NULL: all 1 */
};

struct paged__graph; /* model/runner.h */

/* One model family. `name` is GGUF's general.architecture, the prefix of its keys. */
typedef struct paged__arch {
    const char *name;
    paged_status (*load)(paged_model *m, paged_error *err); /* hp is filled for what all families share */
    void (*build)(struct paged__graph *g);                  /* appends the nodes of one step */
} paged__arch;

extern const paged__arch paged__arch_llama;

/* ---- for arch/: tensors by name, checked ---- */

/* Type and shape must match: ne1 0 means a vector of f32, else a matrix of a type that ggml can multiply.
 * Errors: FORMAT with name, found and wanted shape. An absent tensor is an error if `required`, else *out =
 * NULL. */
paged_status paged__model_tensor(paged_model *m, const char *name, bool required, int64_t ne0, int64_t ne1,
                                 struct ggml_tensor **out, paged_error *err);

/* *all: whether rows of ggml's matmul are equal in bits for one row and for several, and for one and for more
 * threads, for each type of matrix in the model (selftest.c). `text`: "q4_1: yes, f16: no". Errors:
 * NO_MEMORY. */
paged_status paged__model_self_test(const paged_model *m, int32_t n_threads, bool *all, char *text,
                                    size_t text_capacity, paged_error *err);

#endif
