/* fuzz_model.c: no bytes make loading a model crash, hang, or take memory out of proportion; what loads can
 * be run. Goes where fuzz_gguf.c ends: numbers of the families, tokenizers, tensors, packing, and a few steps
 * of an engine on what is left standing.
 *
 * With libFuzzer (-DPAGED_FUZZ=ON):
 *     fuzz_model -max_len=16384 NEW_FOLDER tests/fuzz/corpus/model
 * Without, it replays files, and the files of folders.
 *
 * The seeds, a model of each family of a few kilobytes, are made by make_models.py; the others were found:
 * those of -set_cover_merge=1 -use_counters=0 below 3000 bytes.
 */
#include "gguf_probe.h"
#include "paged/engine.h"

enum { MAX_BYTES = 1 << 16 };

static void run_engine(paged_model *m) {
    static const char text[] = "a <s>b the\n\xff\xf0\x9f\x98\x80 12";
    int32_t tokens[sizeof text + 8], n = 0, n_active = 1;
    paged_model_info info;
    paged_error err;
    paged_model_get_info(m, &info);
    PROBE_MUST(!paged_tokenize(paged_model_tokenizer(m), text, sizeof text - 1,
                               PAGED_TOKENIZE_SPECIAL | PAGED_TOKENIZE_CONTROL, tokens, sizeof text + 8, &n,
                               &err));
    paged_engine *engine;
    const paged_engine_config config = {.struct_size = sizeof config,
                                        .n_ctx = PAGED_MIN(info.n_ctx_train, 48),
                                        .chunk_tokens = 5,
                                        .n_threads = 1,
                                        .kv_type = PAGED_TYPE_F32,
                                        .poison = true};
    PROBE_MUST(!paged_engine_create(m, &config, &engine, &err));
    paged_request request;
    uint64_t id;
    paged_request_init(&request);
    request.tokens = tokens;
    request.n_tokens = n;
    request.max_tokens = 3;
    if (paged_engine_submit(engine, &request, &id, &err) == PAGED_OK) {
        for (int step = 0; n_active && step < 40; step++)
            PROBE_MUST(!paged_engine_step(engine, &n_active, &err));
        PROBE_MUST(!n_active && !paged_engine_check(engine, &err));
    }
    paged_engine_free(engine);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    if (n_bytes > MAX_BYTES) return 0;
    probe_memory memory = {.n_left = -1};
    const paged_allocator allocator = {probe_alloc, probe_free, &memory};
    paged_model *m = NULL;
    paged_error err = {0};
    paged_allocator_set(&allocator);
    probe_data = data;
    probe_bytes = n_bytes;
    const paged_status s = paged_model_load(PROBE_PATH, NULL, &m, &err);
    /* Rows are packed in tiles of 16, or 32: a matrix of one row takes 32 times its size. */
    PROBE_MUST(memory.peak_bytes <= 64 * n_bytes + (2 << 20));
    if (s) {
        PROBE_MUST(!m && (s == PAGED_ERR_FORMAT || s == PAGED_ERR_UNSUPPORTED));
        PROBE_MUST(err.status == s && strstr(err.message, PROBE_PATH) && !strchr(err.message, '\n'));
    } else {
        run_engine(m);
        paged_model_free(m);
    }
    PROBE_MUST(memory.used_bytes == 0);
    paged_allocator_set(NULL);
    return 0;
}

#ifndef PAGED_LIBFUZZER
#include "replay.h"

int main(int argc, char **argv) {
    return replay_main(argc, argv, LLVMFuzzerTestOneInput);
}
#endif
