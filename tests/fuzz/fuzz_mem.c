/* fuzz_mem.c: no order of operations breaks an invariant of a cache, loses a block or lets one sequence see
 * another's keys and values. The bytes are the choices of tests/sim/mem_stream.h, the same that
 * test_mem_random.c draws from a generator: what cache is made, and operation by operation what is asked of
 * it and what fails; a naive model says what must come out.
 *
 * With libFuzzer (-DPAGED_FUZZ=ON):
 *     fuzz_mem -max_len=2048 -len_control=0 NEW_FOLDER tests/fuzz/corpus/mem
 * Without, it replays files, and the files of folders:
 *     fuzz_mem tests/fuzz/corpus/mem
 *
 * The corpus was found by the fuzzer from random bytes; it is a part of what it kept. */
#include "sim/mem_stream.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    static struct model m;
    static const uint8_t nothing[1];
    struct choices c = {.bytes = n_bytes ? data : nothing, .n = n_bytes};
    if (setjmp(test_jump)) abort(); /* a check failed, and said so */
    stream_open(&m, &c);
    while (c.at < c.n) stream_step(&m, &c);
    model_check_all(&m);
    model_close(&m);
    return 0;
}

#ifndef PAGED_LIBFUZZER
#include "replay.h"

int main(int argc, char **argv) {
    return replay_main(argc, argv, LLVMFuzzerTestOneInput);
}
#endif
