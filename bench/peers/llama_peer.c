/* bench/peers/llama_peer.c: llama.cpp behind the protocol of bench/protocol.h, at its best: chunks of 512
 * tokens, flash attention, f16 KV cache, weights repacked where it wants to, logits of the last token only,
 * and the plain argmax here instead of its sampler chain, which is slower.
 *
 *     llama_peer MODEL N_THREADS N_CTX
 */
#include <ggml-backend.h>
#include <llama.h>

#include "bench/protocol.h"

enum { CHUNK = 512 };

typedef struct peer {
    struct llama_model *model;
    struct llama_context *ctx;
    int32_t n_vocab;
    llama_token next; /* the token that the latest logits chose */
} peer;

static void take_next(peer *p) {
    const float *logits = llama_get_logits_ith(p->ctx, -1);
    int32_t best = 0;
    for (int32_t i = 1; i < p->n_vocab; i++)
        if (logits[i] > logits[best]) best = i;
    p->next = best;
}

/* One request at a time. */
static bool open_request(void *self, int32_t n_requests, int32_t n_tokens) {
    peer *p = self;
    if (n_requests != 1) return false;
    llama_token chunk[CHUNK];
    llama_memory_clear(llama_get_memory(p->ctx), false);
    for (int32_t done = 0; done < n_tokens; done += CHUNK) {
        const int32_t n = n_tokens - done < CHUNK ? n_tokens - done : CHUNK;
        for (int32_t i = 0; i < n; i++) chunk[i] = bench_token(0, done + i, p->n_vocab);
        if (llama_decode(p->ctx, llama_batch_get_one(chunk, n)) != 0) return false;
    }
    take_next(p);
    return true;
}

static bool decode(void *self, int32_t n_tokens) {
    peer *p = self;
    for (int32_t i = 0; i < n_tokens; i++) {
        if (llama_decode(p->ctx, llama_batch_get_one(&p->next, 1)) != 0) return false;
        take_next(p);
    }
    return true;
}

static int32_t last_token(const void *self) {
    return ((const peer *)self)->next;
}

static void quiet(enum ggml_log_level level, const char *text, void *user) {
    (void)user;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

static bool open_peer(peer *p, const char *path, int32_t n_threads, uint32_t n_ctx) {
    p->model = llama_model_load_from_file(path, llama_model_default_params());
    if (!p->model) return false;
    p->n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(p->model));
    struct llama_context_params c = llama_context_default_params();
    c.n_ctx = n_ctx;
    c.n_batch = c.n_ubatch = CHUNK;
    c.n_threads = c.n_threads_batch = n_threads;
    c.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    c.type_k = c.type_v = GGML_TYPE_F16;
    p->ctx = llama_init_from_model(p->model, c);
    return p->ctx != NULL;
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fputs("llama_peer MODEL N_THREADS N_CTX\n", stderr);
        return 2;
    }
    peer p = {0};
    llama_log_set(quiet, NULL);
    ggml_backend_load_all();
    int status = EXIT_FAILURE;
    if (open_peer(&p, argv[1], atoi(argv[2]), (uint32_t)atoi(argv[3]))) {
        const bench_side side = {
            .self = &p, .open = open_request, .decode = decode, .last_token = last_token};
        status = bench_serve(&side);
    }
    if (p.ctx) llama_free(p.ctx);
    if (p.model) llama_model_free(p.model);
    return status;
}
