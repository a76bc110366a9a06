/* fuzz_gguf.c: no bytes make the GGUF reader crash, read outside the file, take memory out of proportion, or
 * break a promise of gguf.h (see gguf_probe.h).
 *
 * With libFuzzer (-DPAGED_FUZZ=ON):
 *     fuzz_gguf -max_len=2048 NEW_FOLDER tests/fuzz/corpus/gguf
 * Without, it replays files, and the files of folders:
 *     fuzz_gguf tests/fuzz/corpus/gguf
 *
 * valid.gguf was written with the Python package gguf. The others were found by the fuzzer from it; they are
 * the set that -set_cover_merge=1 -use_counters=0 left.
 */
#include "gguf_probe.h"
#include "model/gguf.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    paged_error err;
    probe(data, n_bytes, &err);
    return 0;
}

#ifndef PAGED_LIBFUZZER
#include "replay.h"

int main(int argc, char **argv) {
    return replay_main(argc, argv, LLVMFuzzerTestOneInput);
}
#endif
