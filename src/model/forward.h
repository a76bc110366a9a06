/* model/forward.h: the words in which a file of arch/ describes its layer.
 *
 * A step is one function, paged__forward, that every thread of the team runs from end to end (one program,
 * many threads), each with its own *lane*. A word below is one phase of base/team.h or a few: it does this
 * thread's shares, mostly one, and when it ends, what it made is there for all. Nothing is scheduled, built
 * or kept: there is no graph. Nothing allocates and nothing can fail.
 *
 * A thread that was away may still be at a word that is over for the others, and finds no share left in it.
 * So outside of its shares a word looks at nothing that a later one changes.
 *
 * A step of few rows is reading weights, and there is a moment of nothing at the end of each phase. So a word
 * with a product knows which one mostly follows, and who waits brings the weights of that one nearer.
 *
 *   x     the residual stream                  [n_rows, n_embd]
 *   qkv   queries, keys, values of a row       [n_rows, (n_heads + n_kv_heads) * dk + n_kv_heads * dv]
 *   a     what attention gives                 [n_rows, n_heads * dv]
 *   h     between the two halves of the FFN    [n_rows, n_ff]
 *
 * In the last layer q and a have the rows that it attends only, one behind the other.
 *
 * The order of the words is the graph: a layer whose two halves stand side by side makes h before it adds a.
 * What a layer may have or not (biases, norms of heads, norms after a half) a word takes from the layer.
 *
 * Shares are rows of x for all that looks at a row as a whole (norms, RoPE, the cache), so that its sums are
 * one thread's. For products they are row tiles of the weights, so that every weight is read once and threads
 * finish together whatever the shape; of many rows they are rows again, so that a thread finds its own near.
 */
#ifndef PAGED_MODEL_FORWARD_H
#define PAGED_MODEL_FORWARD_H

#include "base/team.h"
#include "model/runner.h"

typedef struct paged__lane {
    paged__runner *runner;
    const paged_model *model;
    paged__team_place place;
    int32_t ith, nth;
    int32_t share; /* at work */
    bool attends;  /* is at the phases of attention */
    int32_t n_tokens, n_outputs;
    int32_t n_rows;         /* of x: n_tokens; n_outputs once the last layer has attended */
    const int32_t *row_map; /* [n_rows] rows of `a` that belong to those of x; NULL: the same */
    float *x;
    const paged__affine *next; /* [n_next] matrices of the product behind this one, with one input */
    int32_t n_next;
} paged__lane;

typedef enum paged__activation {
    PAGED__SILU,
    PAGED__GELU_TANH, /* the usual approximation (Hendrycks & Gimpel 2016) */
    PAGED__GELU_ERF   /* plain feed-forward only */
} paged__activation;

/* ---- a layer ---- */

/* q, k, v = W norm(x) + b */
void paged__project_qkv(paged__lane *t, const paged__layer *l, const paged__norm *norm);

/* Norms of heads and RoPE on q and k, then k and v into the cache; a = attention(q) over the cache. In the
 * last layer x then keeps only the rows whose logits are wanted. False: there are none, and this layer was
 * the last; nobody asks for more. */
bool paged__attend(paged__lane *t, const paged__layer *l);

/* x += wo a + b; where there is a norm for it, x += norm(wo a + b) */
void paged__add_attention(paged__lane *t, const paged__layer *l);

/* h = act(gate norm(x)) ⊙ (up norm(x)); without a gate, h = act(up norm(x)) */
void paged__make_hidden(paged__lane *t, const paged__layer *l, const paged__norm *norm,
                        paged__activation activation);

/* x += down h + b, or its norm */
void paged__add_hidden(paged__lane *t, const paged__layer *l);

/* ---- all of them, for the runner ---- */

/* Embedding, layers, logits. */
void paged__forward(paged__lane *t);

#endif
