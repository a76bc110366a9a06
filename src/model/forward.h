/* model/forward.h: the words in which a file of arch/ describes its layers.
 *
 * A step is one function, arch->forward, that every thread of the team runs from end to end (one program,
 * many threads), each with its own *lane*. A word below does this thread's part of a piece of work and ends
 * with a barrier, so what it made is there for all when the next begins. Nothing is scheduled, built or kept:
 * there is no graph. Nothing allocates and nothing can fail.
 *
 *   x     the residual stream                  [n_rows, n_embd]
 *   qkv   queries, keys, values of a row       [n_rows, (n_heads + n_kv_heads) * dk + n_kv_heads * dv]
 *   a     what attention gives                 [n_rows, n_heads * dv]
 *   h     between the two halves of the FFN    [n_rows, n_ff]
 *
 * Division: rows of x for all that looks at a row as a whole (RMS norm, RoPE, the cache), so that its sums
 * are one thread's; row tiles of the weights for products, so that every weight is read once and threads
 * finish together whatever the shape.
 */
#ifndef PAGED_MODEL_FORWARD_H
#define PAGED_MODEL_FORWARD_H

#include "model/runner.h"

typedef struct paged__lane {
    paged__runner *runner;
    const paged_model *model;
    int32_t ith, nth;
    int32_t n_tokens, n_outputs;
    int32_t n_rows;         /* of x: n_tokens, after paged__keep_outputs() n_outputs */
    const int32_t *row_map; /* [n_rows] rows of `a` that belong to those of x; NULL: the same */
    float *x;
} paged__lane;

/* x = rows of the embedding; the angles of RoPE for the step's positions. */
void paged__embed(paged__lane *t);

/* q, k, v = wq, wk, wv * norm(x) */
void paged__project_qkv(paged__lane *t, const paged__layer *l);

/* RoPE on q and k, then k and v into the cache; a = attention(q) over the cache. */
void paged__write_kv(paged__lane *t, int32_t il);
void paged__attend(paged__lane *t, int32_t il);

/* From here on x has only the rows whose logits are wanted. */
void paged__keep_outputs(paged__lane *t);

/* x += wo * a */
void paged__add_attention(paged__lane *t, const paged__layer *l);

/* x += down * (act(gate * h) ⊙ (up * h)), h = norm(x); `gated` is PAGED__SWIGLU or PAGED__GEGLU */
void paged__add_gated_ffn(paged__lane *t, const paged__layer *l, paged__epilogue gated);

/* logits = output * norm(x) */
void paged__project_logits(paged__lane *t);

#endif
