/* model/rope.h: the angles of rotary embeddings (Su et al. 2021), and the ways to stretch them beyond the
 * context that a model was trained with.
 *
 *     angle of pair i at position p = p * inv_freq[i], inv_freq[i] = base^(-2i / n_rot) / factors[i] * scale
 *
 * cos and sin are multiplied by the magnitude. What a file may say (keys <arch>.rope.*):
 *   linear     scale = 1 / factor (Chen et al. 2023)
 *   NTK        another base: nothing of ours
 *   llama3     the tensor rope_freqs.weight has the factors
 *   yarn       high frequencies stay, low ones are scaled, those between are mixed (Peng et al. 2023)
 *   longrope   factors for contexts up to the original one and for longer ones (Ding et al. 2024)
 *
 * May include base/. Pure functions; everything was bounded when the file was read (hparams.c).
 */
#ifndef PAGED_MODEL_ROPE_H
#define PAGED_MODEL_ROPE_H

#include "base/base.h"

typedef enum paged__rope_order {
    PAGED__ROPE_NONE,  /* the family has no rotation */
    PAGED__ROPE_PAIRS, /* elements 2i and 2i + 1 turn together; in GGUF files of the LLaMA family */
    PAGED__ROPE_HALVES /* elements i and i + n_rot / 2 do; also called NEOX */
} paged__rope_order;

typedef struct paged__rope {
    int32_t n_rot; /* elements of a head that turn, an even number; the rest stays */
    float base, scale, attn_factor;
    bool yarn;
    float beta_fast, beta_slow; /* yarn: turns within the original context at which mixing begins and ends */
    int32_t n_ctx_orig;         /* yarn, longrope */
    const float *factors, *long_factors; /* [n_rot / 2]; NULL: all 1; long ones: for n_ctx > n_ctx_orig */
} paged__rope;

/* inv_freq [n_rot / 2] in double for an engine of n_ctx tokens; returns the magnitude. */
double paged__rope_frequencies(const paged__rope *rope, int32_t n_ctx, double *inv_freq);

/* Whether such an engine takes the factors for long contexts: its keys differ from those of a shorter one. */
static inline bool paged__rope_is_long(const paged__rope *rope, int32_t n_ctx) {
    return rope->long_factors && n_ctx > rope->n_ctx_orig;
}

#endif
