/* test_gguf_hostile.c: a GGUF file that lies or is cut is refused with one line that says where and how much.
 *
 * Method: files built byte by byte, each with one lie, must be refused with the stated status and words;
 * every truncation and 200,000 random mutations of a good file go through gguf_probe.h, which uses all that
 * the reader offers, over a heap buffer of exactly the file's size, and bounds its memory.
 */
#include "test.h"

#include "fuzz/gguf_probe.h"
#include "model/gguf.h"

/* ---- building files ---- */

enum { U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 };

static struct {
    uint8_t data[1 << 16];
    size_t n;
} file;

static void put(const void *bytes, size_t n) {
    CHECK(file.n + n <= sizeof file.data);
    memcpy(file.data + file.n, bytes, n);
    file.n += n;
}

static void put_u32(uint32_t v) {
    put(&v, sizeof v);
}
static void put_u64(uint64_t v) {
    put(&v, sizeof v);
}

static void put_str(const char *text) {
    put_u64(strlen(text));
    put(text, strlen(text));
}

static void start(uint64_t n_tensors, uint64_t n_keys) {
    file.n = 0;
    put("GGUF", 4);
    put_u32(3);
    put_u64(n_tensors);
    put_u64(n_keys);
}

static void key(const char *name, uint32_t type) {
    put_str(name);
    put_u32(type);
}

static void key_array(const char *name, uint32_t type, uint64_t n) {
    key(name, ARR);
    put_u32(type);
    put_u64(n);
}

static void key_u32(const char *name, uint32_t v) {
    key(name, U32);
    put_u32(v);
}

static void tensor(const char *name, uint32_t n_dims, const uint64_t *dims, uint32_t type, uint64_t offset) {
    put_str(name);
    put_u32(n_dims);
    for (uint32_t d = 0; d < n_dims; d++) put_u64(dims[d]);
    put_u32(type);
    put_u64(offset);
}

static void tensor_1d(const char *name, uint64_t ne, uint32_t type, uint64_t offset) {
    tensor(name, 1, &ne, type, offset);
}

/* Pads to the data section and gives it n_bytes. */
static void finish(size_t n_bytes) {
    static const uint8_t zeros[4096];
    put(zeros, (0 - file.n) & 31);
    put(zeros, n_bytes);
}

/* One of everything. The data section ends with the last tensor, without padding. */
static void build_good(void) {
    const float floats[3] = {0.5f, -1.0f, 1e10f};
    const int32_t ints[5] = {1, -2, 3, 4, 5};
    start(3, 8);
    key("general.architecture", STR);
    put_str("llama");
    key_u32("llama.block_count", 3);
    key("x.flag", BOOL);
    put("\1", 1);
    key("x.double", F64);
    put(&(double){2.5}, 8);
    key_array("x.floats", F32, 3);
    put(floats, sizeof floats);
    key_array("x.words", STR, 4);
    put_str("a");
    put_str("");
    put_str("\xc4\xa0"
            "b");
    put_u64(3);
    put("x\0y", 3);
    key_array("x.ints", I32, 5);
    put(ints, sizeof ints);
    key_array("x.bools", BOOL, 2);
    put("\0\1", 2);
    tensor("a.weight", 2, (uint64_t[]){8, 2}, GGML_TYPE_F32, 0);
    tensor("b.weight", 3, (uint64_t[]){32, 2, 2}, GGML_TYPE_Q4_1, 64);
    tensor_1d("c.weight", 5, GGML_TYPE_F16, 160);
    finish(170);
}

static paged_status run(paged_error *err) {
    return probe(file.data, file.n, err);
}

/* The message has all of the words, which are separated by '|'. */
static void refused(paged_status want, const char *words) {
    paged_error err;
    const paged_status s = run(&err);
    if (s != want)
        test_fail(__FILE__, __LINE__, "status %d \"%s\", not %d, for %s", s, err.message, want, words);
    char copy[200], *rest = copy;
    snprintf(copy, sizeof copy, "%s", words);
    for (char *word; (word = strsep(&rest, "|")) != NULL;)
        if (!strstr(err.message, word))
            test_fail(__FILE__, __LINE__, "\"%s\" lacks \"%s\"", err.message, word);
}

static void accepted(void) {
    paged_error err;
    if (run(&err)) test_fail(__FILE__, __LINE__, "refused: %s", err.message);
}

/* ---- cut files ---- */

static void good_file_and_trailing_bytes(void) {
    build_good();
    accepted();
    put("trailing bytes are no harm", 26);
    accepted();
}

static void every_truncation(void) {
    build_good();
    const size_t n_bytes = file.n;
    for (file.n = 0; file.n < n_bytes; file.n++) {
        paged_error err;
        const paged_status s = run(&err);
        if (s != PAGED_ERR_FORMAT)
            test_fail(__FILE__, __LINE__, "%zu of %zu bytes: status %d", file.n, n_bytes, s);
    }
    /* One byte before the end: the last tensor and both sizes. */
    file.n = n_bytes - 1;
    refused(PAGED_ERR_FORMAT, "memory.gguf|'c.weight'|10 bytes|169 of them data");
    /* In the padding before the data. */
    file.n = n_bytes - 171;
    refused(PAGED_ERR_FORMAT, "'a.weight'|64 bytes|0 of them data");
    file.n = 0;
    refused(PAGED_ERR_FORMAT, "header|4 bytes|of 0");
    file.n = 3;
    refused(PAGED_ERR_FORMAT, "header|4 bytes|of 3");
    file.n = 20;
    refused(PAGED_ERR_FORMAT, "header|3 tensors|4 bytes that are left");
}

static void cut_inside_named_things(void) {
    start(0, 1);
    key("general.name", STR);
    put_u64(10);
    put("short", 5);
    refused(PAGED_ERR_FORMAT, "key 'general.name'|10 bytes|too early");
    start(1, 0);
    put_str("blk.0.attn_q.weight");
    put_u32(2);
    put_u64(32);
    refused(PAGED_ERR_FORMAT, "tensor 'blk.0.attn_q.weight'|8 bytes needed at offset 63 of 63");
    put_u64(32);
    refused(PAGED_ERR_FORMAT, "tensor 'blk.0.attn_q.weight'|4 bytes needed at offset 71 of 71");
}

/* ---- header ---- */

static void header_lies(void) {
    build_good();
    memcpy(file.data, "GGML", 4);
    refused(PAGED_ERR_FORMAT, "header|not a GGUF file|47 47 4d 4c");
    const uint32_t versions[] = {0, 1, 4, 99};
    for (int i = 0; i < 4; i++) {
        char words[40];
        build_good();
        memcpy(file.data + 4, &versions[i], 4);
        snprintf(words, sizeof words, "header|version %" PRIu32, versions[i]);
        refused(PAGED_ERR_UNSUPPORTED, words);
    }
    build_good();
    memcpy(file.data + 4, "\0\0\0\3", 4);
    refused(PAGED_ERR_UNSUPPORTED, "header|big-endian|version 3");
    build_good();
    file.data[4] = 2; /* the same layout */
    accepted();
}

static void counts_of_the_header(void) {
    const uint64_t counts[] = {(uint64_t)1 << 60, UINT64_MAX, (uint64_t)1 << 63, 100000, (uint64_t)1 << 32};
    for (int i = 0; i < 5; i++) {
        char words[60];
        build_good();
        memcpy(file.data + 8, &counts[i], 8);
        snprintf(words, sizeof words, "header|%" PRIu64 " tensors", counts[i]);
        refused(PAGED_ERR_FORMAT, words);
        build_good();
        memcpy(file.data + 16, &counts[i], 8);
        snprintf(words, sizeof words, "header|%" PRIu64 " keys", counts[i]);
        refused(PAGED_ERR_FORMAT, words);
    }
    build_good(); /* one key too many: the first tensor is read as a key */
    file.data[16]++;
    refused(PAGED_ERR_FORMAT, "tensor number 0|too early");
    start(0, 0);
    accepted();
}

/* ---- keys ---- */

static void key_names(void) {
    start(0, 1);
    key("", U32);
    put_u32(1);
    refused(PAGED_ERR_FORMAT, "key number 0|empty");
    start(0, 2);
    key_u32("good", 1);
    put_u64((uint64_t)1 << 63);
    put("xxxxxxxxxxxxxxxxxxxxxxxxxxxxx", 29);
    refused(PAGED_ERR_FORMAT, "key number 1|9223372036854775808 bytes");
    start(0, 1);
    put_u64(3);
    put("a\0b", 3);
    put_u32(U8);
    put("\1", 1);
    refused(PAGED_ERR_FORMAT, "key 'a\\x00b'|NUL at byte 1 of 3");
    start(0, 1);
    key_u32("evil\n\x1b[31mkey", 1);
    file.n--;
    refused(PAGED_ERR_FORMAT, "key 'evil\\x0a\\x1b[31mkey'");
    start(0, 1);
    put_u64(65536);
    for (int i = 0; i < 2048; i++) put("0123456789abcdef", 16);
    refused(PAGED_ERR_FORMAT, "key number 0|65536 bytes");
    start(0, 3);
    key_u32("same.key", 1);
    key_u32("other.key", 1);
    key_u32("same.key", 1);
    refused(PAGED_ERR_FORMAT, "key 'same.key'|two keys");
}

static void key_values(void) {
    start(0, 1);
    key("k.str", STR);
    put_u64((uint64_t)1 << 63);
    refused(PAGED_ERR_FORMAT, "key 'k.str'|9223372036854775808 bytes");
    start(0, 1);
    key("k.str", STR);
    put_u64(UINT64_MAX - 7);
    refused(PAGED_ERR_FORMAT, "key 'k.str'|18446744073709551608 bytes");
    const uint32_t bad_types[] = {13, 255, 0x80000000u, UINT32_MAX};
    for (int i = 0; i < 4; i++) {
        char words[60];
        snprintf(words, sizeof words, "key 'k.type'|value type %" PRIu32, bad_types[i]);
        start(0, 1);
        key("k.type", bad_types[i]);
        put_u64(0);
        refused(PAGED_ERR_FORMAT, words);
        start(0, 1);
        key_array("k.type", bad_types[i], 0);
        refused(PAGED_ERR_FORMAT, words);
    }
    for (int v = 2; v < 256; v += 101) {
        start(0, 1);
        key("k.bool", BOOL);
        put(&(uint8_t){(uint8_t)v}, 1);
        refused(PAGED_ERR_FORMAT, "key 'k.bool'|not 0 or 1");
    }
    start(0, 1);
    key_array("k.bools", BOOL, 3);
    put("\0\1\7", 3);
    refused(PAGED_ERR_FORMAT, "key 'k.bools'|number 2 is 7");
}

static void arrays(void) {
    const uint64_t counts[] = {(uint64_t)1 << 61, ((uint64_t)1 << 61) + 1, (uint64_t)1 << 62, UINT64_MAX,
                               1000};
    for (uint32_t type = U8; type <= F64; type++) {
        if (type == ARR) continue;
        for (int i = 0; i < 5; i++) {
            char words[60];
            snprintf(words, sizeof words, "key 'k.array'|%" PRIu64, counts[i]);
            start(0, 1);
            key_array("k.array", type, counts[i]);
            put_u64(0);
            refused(PAGED_ERR_FORMAT, words);
        }
    }
    start(0, 1);
    key_array("k.nested", ARR, 1);
    put_u32(ARR);
    put_u64(0);
    refused(PAGED_ERR_UNSUPPORTED, "key 'k.nested'|arrays of arrays");
    start(0, 1);
    key_array("k.strings", STR, 3);
    put_str("abc");
    put_u64((uint64_t)1 << 63);
    put_str("abc");
    refused(PAGED_ERR_FORMAT, "key 'k.strings'|9223372036854775808 bytes");
}

static void alignments(void) {
    const uint32_t bad[] = {0, 1, 4, 24, 33, 131072, (uint32_t)1 << 31, UINT32_MAX};
    for (int i = 0; i < 8; i++) {
        char words[60];
        snprintf(words, sizeof words, "key 'general.alignment'|%" PRIu32, bad[i]);
        start(0, 1);
        key_u32("general.alignment", bad[i]);
        finish(64);
        refused(PAGED_ERR_FORMAT, words);
    }
    start(0, 1);
    key("general.alignment", STR);
    put_str("32");
    refused(PAGED_ERR_FORMAT, "key 'general.alignment'|str");
}

/* ggml's writer, the oracle of test_gguf.c, knows no other alignment than 32. */
static void alignment_is_obeyed(void) {
    for (uint32_t alignment = 8; alignment <= 65536; alignment *= 2) {
        static uint8_t data[4 * 65536];
        start(2, 1);
        key_u32("general.alignment", alignment);
        tensor_1d("t", 4, GGML_TYPE_I8, alignment);
        tensor_1d("s", 1, GGML_TYPE_I8, 0);
        const size_t data_start = (file.n + alignment - 1) / alignment * alignment;
        paged_error err = {0};
        paged__gguf *g = NULL;
        memset(data, 0, sizeof data);
        memcpy(data, file.data, file.n);
        probe_data = data;
        probe_bytes = data_start + alignment + 4;
        if (paged__gguf_open(PROBE_PATH, &g, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
        const uint8_t *map = paged__gguf_map(g, &(size_t){0});
        CHECK_EQ((const uint8_t *)paged__gguf_find(g, "t")->data - map, data_start + alignment);
        CHECK_EQ((const uint8_t *)paged__gguf_find(g, "s")->data - map, data_start);
        paged__gguf_close(g);
        CHECK_EQ(probe(data, probe_bytes - 1, &err), PAGED_ERR_FORMAT);
    }
}

/* ---- tensors ---- */

static void tensor_names(void) {
    start(1, 0);
    tensor_1d("", 4, GGML_TYPE_F32, 0);
    finish(64);
    refused(PAGED_ERR_FORMAT, "tensor number 0|empty");
    start(1, 0);
    tensor_1d("0123456789012345678901234567890123456789012345678901234567890123", 4, GGML_TYPE_F32, 0);
    finish(64);
    refused(PAGED_ERR_FORMAT, "tensor '0123456789|64 bytes, the limit is 63");
    start(3, 0);
    tensor_1d("twice", 4, GGML_TYPE_F32, 0);
    tensor_1d("once", 4, GGML_TYPE_F32, 32);
    tensor_1d("twice", 4, GGML_TYPE_F32, 64);
    finish(128);
    refused(PAGED_ERR_FORMAT, "tensor 'twice'|two tensors");
}

static void dims(void) {
    const uint32_t bad_counts[] = {0, 5, 1000, UINT32_MAX};
    for (int i = 0; i < 4; i++) {
        char words[40];
        snprintf(words, sizeof words, "tensor 't'|%" PRIu32 " dimensions", bad_counts[i]);
        start(1, 0);
        put_str("t");
        put_u32(bad_counts[i]);
        finish(128);
        refused(PAGED_ERR_FORMAT, words);
    }
    const struct {
        uint64_t ne[4];
        uint32_t n_dims, type;
        const char *words;
    } cases[] = {
        {{0}, 1, GGML_TYPE_F32, "dimension 0 is 0"},
        {{4, 0}, 2, GGML_TYPE_F32, "dimension 1 is 0"},
        {{4, 1, 1, 0}, 4, GGML_TYPE_F32, "dimension 3 is 0"},
        {{(uint64_t)1 << 63}, 1, GGML_TYPE_F32, "dimension 0 is 9223372036854775808"},
        {{UINT64_MAX}, 1, GGML_TYPE_F32, "dimension 0 is 18446744073709551615"},
        {{(uint64_t)1 << 32, (uint64_t)1 << 32}, 2, GGML_TYPE_F32, "4294967296 x 4294967296|wrap"},
        {{(uint64_t)1 << 32, (uint64_t)1 << 31}, 2, GGML_TYPE_I8, "wrap"},
        {{65536, 65536, 65536, 65536}, 4, GGML_TYPE_F16, "wrap"},
        {{(uint64_t)1 << 62}, 1, GGML_TYPE_F32, "wrap"}, /* 2^64 bytes */
        {{(uint64_t)1 << 62}, 1, GGML_TYPE_F16, "9223372036854775808 bytes|do not lie in the file"},
        {{33}, 1, GGML_TYPE_Q4_0, "row of 33|blocks of 32"},
        {{16, 2}, 2, GGML_TYPE_Q8_0, "row of 16|blocks of 32"},
        {{128}, 1, GGML_TYPE_Q6_K, "row of 128|blocks of 256"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char words[100];
        snprintf(words, sizeof words, "tensor 't'|%s", cases[i].words);
        start(1, 0);
        tensor("t", cases[i].n_dims, cases[i].ne, cases[i].type, 0);
        finish(4096);
        refused(PAGED_ERR_FORMAT, words);
    }
}

static void tensor_types(void) {
    for (uint32_t type = 0; type < 200; type++) {
        /* 4, 5, 31 … 33 and 36 … 38 are types that ggml has removed. */
        const bool known = type < GGML_TYPE_COUNT && type != 4 && type != 5 && (type < 31 || type > 33) &&
                           (type < 36 || type > 38);
        char words[60];
        start(1, 0);
        tensor_1d("t", 1024, type, 0);
        finish(4096);
        finish(4096); /* twice: 1024 values of 8 bytes */
        snprintf(words, sizeof words, "tensor 't'|unknown tensor type %" PRIu32, type);
        if (known)
            accepted();
        else
            refused(PAGED_ERR_UNSUPPORTED, words);
    }
    const uint32_t far_away[] = {1u << 31, UINT32_MAX, 0x10000000u};
    for (int i = 0; i < 3; i++) {
        start(1, 0);
        tensor_1d("t", 1024, far_away[i], 0);
        finish(4096);
        refused(PAGED_ERR_UNSUPPORTED, "tensor 't'|unknown tensor type");
    }
}

static void offsets(void) {
    const struct {
        uint64_t offset;
        const char *words;
    } cases[] = {
        {UINT64_MAX - 31, "18446744073709551584|do not lie in the file"},
        {UINT64_MAX, "18446744073709551615 is not a multiple of 32"},
        {(uint64_t)1 << 63, "9223372036854775808|do not lie"},
        {128, "16 bytes|128|do not lie"},
        {16, "16 is not a multiple of 32"},
        {1, "1 is not a multiple of 32"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char words[100];
        snprintf(words, sizeof words, "tensor 't'|%s", cases[i].words);
        start(1, 0);
        tensor_1d("t", 4, GGML_TYPE_F32, cases[i].offset);
        finish(128);
        refused(PAGED_ERR_FORMAT, words);
    }
}

static void overlaps(void) {
    start(2, 0);
    tensor_1d("low", 9, GGML_TYPE_F32, 0); /* 36 bytes */
    tensor_1d("high", 4, GGML_TYPE_F32, 32);
    finish(128);
    refused(PAGED_ERR_FORMAT, "'high'|offset 32|'low'|36 bytes at 0");
    start(2, 0); /* the other way round in the file */
    tensor_1d("high", 4, GGML_TYPE_F32, 32);
    tensor_1d("low", 9, GGML_TYPE_F32, 0);
    finish(128);
    refused(PAGED_ERR_FORMAT, "'high'|offset 32|'low'");
    start(3, 0); /* the same bytes, and one inside another */
    tensor_1d("a", 4, GGML_TYPE_F32, 64);
    tensor_1d("b", 4, GGML_TYPE_F32, 0);
    tensor_1d("c", 4, GGML_TYPE_F32, 64);
    finish(128);
    refused(PAGED_ERR_FORMAT, "overlaps");
    start(2, 0);
    tensor_1d("outer", 32, GGML_TYPE_F32, 0);
    tensor_1d("inner", 4, GGML_TYPE_F32, 64);
    finish(128);
    refused(PAGED_ERR_FORMAT, "'inner'|'outer'");
    start(3, 0); /* side by side, with a gap, in any order */
    tensor_1d("z", 8, GGML_TYPE_F32, 96);
    tensor_1d("x", 8, GGML_TYPE_F32, 0);
    tensor_1d("y", 8, GGML_TYPE_F32, 32);
    finish(128);
    accepted();
}

/* ---- many entries, and no memory ---- */

/* Sizes at which a quadratic check would take minutes. */
static void many_entries_are_fast(void) {
    enum { N = 100000 };
    uint8_t *data = calloc(N, 64);
    paged_error err;
    CHECK(data);
    start(N, 0);
    memcpy(data, file.data, file.n);
    size_t n = file.n;
    for (uint64_t i = 0; i < N; i++) {
        char name[16];
        file.n = 0;
        snprintf(name, sizeof name, "t%06" PRIu64, (i * 7919) % N);
        tensor_1d(name, 1, GGML_TYPE_I8, 0); /* all overlap: found after one sort */
        memcpy(data + n, file.data, file.n);
        n += file.n;
    }
    const uint64_t before_ns = paged__now_ns();
    const paged_status s = probe(data, (size_t)N * 64, &err);
    const uint64_t took_ms = (paged__now_ns() - before_ns) / 1000000;
    free(data);
    CHECK_EQ(s, PAGED_ERR_FORMAT);
    CHECK(strstr(err.message, "overlaps"));
    if (took_ms > 5000) test_fail(__FILE__, __LINE__, "%d tensors took %" PRIu64 " ms", N, took_ms);
}

static void every_allocation_may_fail(void) {
    build_good();
    probe_data = file.data;
    probe_bytes = file.n;
    int n_failed = 0;
    for (int64_t n = 0;; n++) {
        probe_memory memory = {.n_left = n};
        const paged_allocator allocator = {probe_alloc, probe_free, &memory};
        paged__gguf *g = NULL;
        paged_error err = {0};
        paged_allocator_set(&allocator);
        const paged_status s = paged__gguf_open(PROBE_PATH, &g, &err);
        paged__gguf_close(g);
        paged_allocator_set(NULL);
        CHECK_EQ(memory.used_bytes, 0);
        if (!s) break;
        CHECK_EQ(s, PAGED_ERR_NO_MEMORY);
        CHECK(strstr(err.message, PROBE_PATH) && !g);
        n_failed++;
    }
    CHECK(n_failed >= 1);
}

/* ---- mutations ---- */

/* Values that sit at the edges of the checks. */
static uint64_t nasty(uint64_t *seed) {
    const uint64_t values[] = {0,
                               1,
                               2,
                               5,
                               9,
                               31,
                               32,
                               255,
                               65535,
                               (uint64_t)1 << 31,
                               UINT32_MAX,
                               (uint64_t)1 << 32,
                               (uint64_t)1 << 61,
                               (uint64_t)1 << 63,
                               UINT64_MAX,
                               UINT64_MAX - 7};
    return values[paged__rand(seed) % (sizeof values / sizeof values[0])];
}

static void mutate(uint64_t *seed) {
    for (uint64_t n = 1 + paged__rand(seed) % 4; n > 0; n--) {
        const size_t at = (size_t)(paged__rand(seed) % (file.n - 8));
        const uint64_t v = nasty(seed);
        switch (paged__rand(seed) % 6) {
        case 0:
            file.data[at] = (uint8_t)paged__rand(seed);
            break;
        case 1:
            file.data[at] ^= (uint8_t)(1u << (paged__rand(seed) % 8));
            break;
        case 2:
            memcpy(file.data + at, &v, 4);
            break;
        case 3:
            memcpy(file.data + at, &v, 8);
            break;
        case 4:
            file.data[at]++;
            break;
        default: /* a few bytes go, the rest moves down */
            memmove(file.data + at, file.data + at + 1 + (v & 7), file.n - at - 1 - (v & 7));
            file.n -= 1 + (v & 7);
        }
        if (file.n < 64) return;
    }
}

static void random_mutations(void) {
    uint64_t seed = test_seed;
    int n_accepted = 0;
    for (int i = 0; i < 200000; i++) {
        paged_error err;
        build_good();
        mutate(&seed);
        n_accepted += run(&err) == PAGED_OK;
    }
    /* Both sides of the checks must have been met. */
    CHECK(n_accepted > 5000 && n_accepted < 195000);
}

#define TESTS(X)                                                                                             \
    X(good_file_and_trailing_bytes)                                                                          \
    X(every_truncation)                                                                                      \
    X(cut_inside_named_things)                                                                               \
    X(header_lies)                                                                                           \
    X(counts_of_the_header)                                                                                  \
    X(key_names)                                                                                             \
    X(key_values)                                                                                            \
    X(arrays)                                                                                                \
    X(alignments)                                                                                            \
    X(alignment_is_obeyed)                                                                                   \
    X(tensor_names)                                                                                          \
    X(dims)                                                                                                  \
    X(tensor_types)                                                                                          \
    X(offsets)                                                                                               \
    X(overlaps)                                                                                              \
    X(many_entries_are_fast)                                                                                 \
    X(every_allocation_may_fail)                                                                             \
    X(random_mutations)
TEST_MAIN(TESTS)
