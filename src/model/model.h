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
#include "model/rope.h"
#include "model/tokenizer.h"
#include "model/weight.h"
#include "paged/model.h"

enum { PAGED__MODEL_GROUPS = 2 }; /* of layers: those that see all keys, those that see a window */

typedef enum paged__norm_kind {
    PAGED__NORM_RMS,  /* x / rms(x) * weight (Zhang & Sennrich 2019) */
    PAGED__NORM_LAYER /* (x - mean) / deviation * weight + bias (Ba et al. 2016) */
} paged__norm_kind;

typedef struct paged__hparams {
    int32_t n_layers, n_embd, n_ff, n_heads, n_kv_heads, head_dim_k, head_dim_v, n_vocab, n_ctx_train;
    float norm_eps;
    float embd_scale;                      /* of the rows of the embedding */
    float attn_scale;                      /* of q · k; 0: 1 / sqrt(head_dim_k) */
    float attn_softcap, logit_softcap;     /* 0: none */
    int32_t window;                        /* keys that a windowed layer sees; 0: there is none */
    paged__rope rope[PAGED__MODEL_GROUPS]; /* of layers without and with a window */
} paged__hparams;

/* Layers whose keys and values live and die together: a group of the cache. */
typedef struct paged__layer_group {
    int32_t n_layers, window; /* window 0: all keys */
} paged__layer_group;

typedef struct paged__norm {
    const float *weight, *bias; /* [n]; weight NULL: there is no such norm. bias: with PAGED__NORM_LAYER */
} paged__norm;

/* y = W x + b */
typedef struct paged__affine {
    const paged__weight *w; /* NULL: there is none */
    const float *bias;      /* [w->n_rows] or NULL */
} paged__affine;

/* What a family does not have is NULL. */
typedef struct paged__layer {
    int32_t index;           /* from 0 */
    int32_t group, in_group; /* of the cache; number of this layer in it */
    bool windowed;
    int32_t rope;                       /* of hp.rope; -1: this layer has none */
    paged__norm attn_norm, attn_norm_2; /* [n_embd] */
    paged__affine qkv[3];               /* [n_qkv] q, k, v: heads * head_dim × n_embd; or all in the first */
    int32_t n_qkv;
    const float *q_norm, *k_norm; /* [head_dim_k] RMS norm of each head */
    paged__affine wo;             /* n_embd × n_heads * head_dim_v */
    paged__norm attn_post_norm;   /* of what attention gives, before it is added */
    paged__norm ffn_norm;
    paged__affine gate, up; /* n_ff × n_embd; gate.w NULL: a plain feed-forward */
    paged__affine down;     /* n_embd × n_ff */
    paged__norm ffn_post_norm;
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
    const paged__weight *pos_embd; /* n_ctx_train × n_embd, learned positions; NULL: none */
    paged__norm output_norm;       /* [n_embd] */
    paged__affine output;          /* n_vocab × n_embd; tok_embd if the file has none */
    double load_ms;
    char linear_kernels[160];                       /* "avx512_vnni, packed q8_0, q4_1; ggml iq2_s" */
    paged__layer *layers;                           /* [n_layers] */
    paged__layer_group groups[PAGED__MODEL_GROUPS]; /* [n_groups] */
    int32_t n_groups;
};

struct paged__lane;   /* model/forward.h */
struct paged__loader; /* model/load.h */

/* One model family: a file of arch/. `name` is GGUF's general.architecture, the prefix of its keys. */
typedef struct paged__arch {
    const char *name;
    paged__norm_kind norm;
    paged__rope_order rope;
    /* Numbers that this family alone has; hp is filled with what all have, and all layers are alike. NULL:
     * none. */
    paged_status (*configure)(paged_model *m, paged_error *err);
    void (*load_layer)(struct paged__loader *from, paged__layer *l);
    void (*forward_layer)(struct paged__lane *lane, const paged__layer *l); /* on every thread at once */
    bool has_positions; /* learned ones: position_embd.weight */
} paged__arch;

extern const paged__arch paged__arch_falcon, paged__arch_gemma2, paged__arch_gemma3, paged__arch_gpt2,
    paged__arch_llama, paged__arch_phi3, paged__arch_qwen2, paged__arch_qwen3, paged__arch_smollm3;

/* hparams.c: every number of the file, bounded. Fills hp (but n_vocab), groups, and what layers are before
 * they have tensors. Errors: FORMAT, UNSUPPORTED, NO_MEMORY; they name the key and the value. */
paged_status paged__model_hparams(paged_model *m, paged_error *err);

/* For configure(): a number with the key <arch>.<key>; absent, *out stays. */
paged_status paged__model_key_i32(const paged_model *m, const char *key, bool required, int32_t min,
                                  int32_t max, int32_t *out, paged_error *err);
paged_status paged__model_key_f32(const paged_model *m, const char *key, bool required, float min, float max,
                                  float *out, paged_error *err);

/* load.c: every tensor, by the words of the family. One that the family does not know is an error: ignoring
 * it would give wrong text in silence. */
paged_status paged__model_tensors(paged_model *m, paged_error *err);

/* Embeddings are read by rows and never multiplied, but for one that is the output matrix, too. */
static inline bool paged__model_multiplies(const paged_model *m, const paged__weight *w) {
    return w == m->output.w || (w != m->tok_embd && w != m->pos_embd);
}

/* pack.c: packs what our kernels take and fills is_packed, as_bf16, packed, packed_bytes, linear_kernels.
 * `progress` may be NULL. Errors: NO_MEMORY. */
paged_status paged__model_pack(paged_model *m, paged_linear linear,
                               void (*progress)(void *user, float fraction), void *user, paged_error *err);

/* *all: whether products give one row the same bits alone and among others, and on one thread and on several,
 * for each type of matrix in the model (selftest.c). `text`: "q4_1: yes, f16: no". Errors: NO_MEMORY. */
paged_status paged__model_self_test(const paged_model *m, int32_t n_threads, bool *all, char *text,
                                    size_t text_capacity, paged_error *err);

#endif
