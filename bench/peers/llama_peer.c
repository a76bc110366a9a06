/* bench/peers/llama_peer.c: llama.cpp behind the protocol of bench/protocol.h, at its best: chunks of 512
 * tokens, flash attention, f16 KV cache, weights repacked where it wants to, logits of the last token only,
 * and the plain argmax here instead of its sampler chain, which is slower.
 *
 *     llama_peer MODEL N_THREADS N_CTX
 */
#include <ggml-backend.h>
#include <llama.h>

#include "bench/protocol.h"

enum { CHUNK = 512, REQUESTS_MAX = 64, BATCH_CTX = 2048 /* tokens that a request of a batch may make */ };

typedef struct peer {
    struct llama_model *model;
    struct llama_context *ctx; /* for n_seqs sequences of n_ctx_seq tokens */
    struct llama_batch step;   /* a token of each */
    int32_t n_vocab, n_threads, n_ctx, n_seqs, n_ctx_seq, n_open, at; /* `at`: tokens of each that is open */
    llama_token next[REQUESTS_MAX]; /* the tokens that the latest logits chose */
} peer;

static llama_token best(const peer *p, int32_t row) {
    const float *logits = llama_get_logits_ith(p->ctx, row);
    int32_t best = 0;
    for (int32_t i = 1; i < p->n_vocab; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

/* A cache of its own for each sequence, the faster of the two kinds where they share nothing. */
static bool make_context(peer *p, int32_t n_seqs, int32_t n_ctx_seq) {
    if (p->ctx && p->n_seqs == n_seqs && p->n_ctx_seq >= n_ctx_seq) return true;
    if (p->ctx) llama_free(p->ctx);
    struct llama_context_params c = llama_context_default_params();
    c.n_ctx = (uint32_t)(n_seqs * n_ctx_seq);
    c.n_seq_max = (uint32_t)n_seqs;
    c.kv_unified = false;
    c.n_batch = c.n_ubatch = CHUNK;
    c.n_threads = c.n_threads_batch = p->n_threads;
    c.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    c.type_k = c.type_v = GGML_TYPE_F16;
    p->ctx = llama_init_from_model(p->model, c);
    p->n_seqs = n_seqs;
    p->n_ctx_seq = n_ctx_seq;
    return p->ctx != NULL;
}

/* The prompt is computed for the first request and copied to the others, so that it takes as long as one. */
static bool open_requests(void *self, int32_t n_requests, int32_t n_tokens) {
    peer *p = self;
    llama_token chunk[CHUNK];
    if (n_requests > REQUESTS_MAX ||
        !make_context(p, n_requests, n_requests > 1 ? n_tokens + BATCH_CTX : p->n_ctx))
        return false;
    llama_memory_t memory = llama_get_memory(p->ctx);
    llama_memory_clear(memory, false);
    for (int32_t done = 0; done < n_tokens; done += CHUNK) {
        const int32_t n = n_tokens - done < CHUNK ? n_tokens - done : CHUNK;
        for (int32_t i = 0; i < n; i++) chunk[i] = bench_token(0, done + i, p->n_vocab);
        if (llama_decode(p->ctx, llama_batch_get_one(chunk, n)) != 0) return false;
    }
    for (int32_t s = 0; s < n_requests; s++) {
        p->next[s] = best(p, -1);
        if (s > 0) llama_memory_seq_cp(memory, 0, s, -1, -1);
    }
    p->n_open = n_requests;
    p->at = n_tokens;
    return true;
}

static bool decode(void *self, int32_t n_tokens) {
    peer *p = self;
    for (int32_t i = 0; i < n_tokens; i++, p->at++) {
        struct llama_batch *b = &p->step;
        b->n_tokens = p->n_open;
        for (int32_t s = 0; s < p->n_open; s++) {
            b->token[s] = p->next[s];
            b->pos[s] = p->at;
            b->n_seq_id[s] = 1;
            b->seq_id[s][0] = s;
            b->logits[s] = 1;
        }
        if (llama_decode(p->ctx, *b) != 0) return false;
        for (int32_t s = 0; s < p->n_open; s++) p->next[s] = best(p, s);
    }
    return true;
}

static int32_t last_token(const void *self) {
    return ((const peer *)self)->next[0];
}

static void quiet(enum ggml_log_level level, const char *text, void *user) {
    (void)user;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

static bool open_peer(peer *p, const char *path) {
    p->model = llama_model_load_from_file(path, llama_model_default_params());
    if (!p->model) return false;
    p->n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(p->model));
    p->step = llama_batch_init(REQUESTS_MAX, 0, 1);
    return make_context(p, 1, p->n_ctx);
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fputs("llama_peer MODEL N_THREADS N_CTX\n", stderr);
        return 2;
    }
    peer p = {.n_threads = atoi(argv[2]), .n_ctx = atoi(argv[3])};
    llama_log_set(quiet, NULL);
    ggml_backend_load_all();
    int status = EXIT_FAILURE;
    if (open_peer(&p, argv[1])) {
        const bench_side side = {
            .self = &p, .open = open_requests, .decode = decode, .last_token = last_token};
        status = bench_serve(&side);
    }
    if (p.step.token) llama_batch_free(p.step);
    if (p.ctx) llama_free(p.ctx);
    if (p.model) llama_model_free(p.model);
    return status;
}
