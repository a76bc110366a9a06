/* model/load.h: the words in which a file of arch/ says what tensors a layer has.
 *
 * Each word finds tensors by their names in GGUF, checks type and shape, and puts them where they belong. The
 * first error stays, and all words after it do nothing, so a list of words needs no check between them.
 * Biases of matrices are taken where they are.
 */
#ifndef PAGED_MODEL_LOAD_H
#define PAGED_MODEL_LOAD_H

#include "model/model.h"

typedef struct paged__loader {
    paged_model *m;
    const paged__gguf_tensor **used; /* [n_used] tensors that were asked for, each at most once */
    int32_t n_used;
    int32_t layer; /* names are blk.<layer>.…; -1: they are as they are */
    paged_status status;
    paged_error *err;
} paged__loader;

/* Whether this layer has <name>.weight. */
bool paged__load_has(const paged__loader *from, const char *name);

void paged__load_norm(paged__loader *from, const char *name, paged__norm *out); /* [n_embd] */
void paged__load_vector(paged__loader *from, const char *name, int32_t n, const float **out);
void paged__load_affine(paged__loader *from, const char *name, int32_t n_rows, int32_t n_cols,
                        paged__affine *out);

/* attn_q, attn_k, attn_v, or attn_qkv with the rows of all three; attn_output. */
void paged__load_attention(paged__loader *from, paged__layer *l);
void paged__load_head_norms(paged__loader *from, paged__layer *l); /* attn_q_norm, attn_k_norm */

/* ffn_gate, ffn_up, ffn_down; without ffn_gate ffn_up has the rows of the gate, too, before its own. */
void paged__load_gated_ffn(paged__loader *from, paged__layer *l);
void paged__load_plain_ffn(paged__loader *from, paged__layer *l); /* ffn_up, ffn_down */

#endif
