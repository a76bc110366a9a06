/* Goal: a text's keys and values in a file come back bit for bit, and a file that is not exactly that changes
 * nothing (D07). Method: a tiny random model; the answer after a load against one of an engine that has
 * never seen a file; every byte that is flipped, every length that is cut. */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/engine.h"
#include "test.h"
#include "tiny_model.h"

enum { N_TOKENS = 200, N_NEW = 20, N_CTX = 256 };

static char folder[64];
static int folder_fd;

static paged_model *load_model(uint64_t seed) {
    static const tiny_shape shape = {2, 4, 2, 16, 96, 1024, GGML_TYPE_F32};
    char path[64];
    paged_model *m = NULL;
    snprintf(path, sizeof path, "/tmp/paged-save-%d.gguf", (int)getpid());
    CHECK(tiny_model_write(path, &shape, seed));
    const paged_status s = paged_model_load(path, NULL, &m, NULL);
    unlink(path);
    CHECK_EQ(s, PAGED_OK);
    return m;
}

static void open_folder(void) {
    snprintf(folder, sizeof folder, "/tmp/paged-save-XXXXXX");
    CHECK(mkdtemp(folder) != NULL);
    folder_fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(folder_fd >= 0);
}

static void close_folder(void) {
    const char *const names[] = {"a", "b", "link", "pipe", "dir"};
    for (int i = 0; i < 4; i++) unlinkat(folder_fd, names[i], 0);
    unlinkat(folder_fd, "dir", AT_REMOVEDIR);
    close(folder_fd);
    CHECK_EQ(rmdir(folder), 0); /* nothing else was left in it */
}

static paged_engine *make(const paged_model *m, paged_engine_config c) {
    paged_engine *e = NULL;
    paged_error err = {0};
    c.struct_size = sizeof c;
    c.n_ctx = N_CTX;
    c.n_threads = 1;
    c.poison = true;
    c.max_running = 4;
    if (paged_engine_create(m, &c, &e, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
    return e;
}

typedef struct answer {
    int32_t tokens[N_NEW], cached;
    float logprobs[N_NEW];
} answer;

static answer ask(paged_engine *e, const int32_t *tokens, int32_t n, const char *salt) {
    uint64_t id;
    paged_request q;
    paged_output o;
    paged_error err = {0};
    answer a;
    paged_request_init(&q);
    q.tokens = tokens;
    q.n_tokens = n;
    q.max_tokens = N_NEW;
    q.ignore_eos = q.logprobs = true;
    q.salt = salt;
    CHECK_EQ(paged_engine_submit(e, &q, &id, NULL), PAGED_OK);
    for (int32_t active = 1; active;) CHECK_EQ(paged_engine_step(e, &active, NULL), PAGED_OK);
    CHECK_EQ(paged_engine_read(e, id, &o), PAGED_OK);
    CHECK_EQ(o.n_tokens, N_NEW);
    memset(&a, 0, sizeof a);
    a.cached = o.cached_tokens;
    memcpy(a.tokens, o.tokens, sizeof a.tokens);
    memcpy(a.logprobs, o.logprobs, sizeof a.logprobs);
    CHECK_EQ(paged_engine_release(e, id), PAGED_OK);
    if (paged_engine_check(e, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
    return a;
}

static void same(const answer *a, const answer *b) {
    CHECK(memcmp(a->tokens, b->tokens, sizeof a->tokens) == 0);
    CHECK(memcmp(a->logprobs, b->logprobs, sizeof a->logprobs) == 0);
}

static void fill(int32_t *tokens, int32_t n, uint64_t seed) {
    for (int32_t i = 0; i < n; i++) tokens[i] = (int32_t)(paged__rand(&seed) % 256);
}

/* The tokens of a request and its answer, all of which but the last are cached. */
static int32_t talk(paged_engine *e, int32_t *tokens, const char *salt) {
    const answer a = ask(e, tokens, N_TOKENS, salt);
    memcpy(tokens + N_TOKENS, a.tokens, sizeof a.tokens);
    return N_TOKENS + N_NEW;
}

static void comes_back(void) {
    static const paged_engine_config cases[] = {
        {.block_size = 16},
        {.block_size = 64},
        {.block_size = 64, .no_packed_tails = true},
        {.block_size = 256},
        {.block_size = 16, .kv_type = PAGED_TYPE_F32},
        {.block_size = 32, .kv_type = PAGED_TYPE_BF16},
        {.block_size = 32, .kv_type = PAGED_TYPE_I8},
        {.block_size = 7, .kv_plain = true},
    };
    paged_model *m = load_model(test_seed);
    open_folder();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int32_t tokens[N_CTX];
        paged_saved saved, loaded;
        paged_error err = {0};
        fill(tokens, N_TOKENS, test_seed);
        paged_engine *e = make(m, cases[i]);
        const answer want = ask(e, tokens, N_TOKENS, NULL);
        CHECK_EQ(paged_engine_save(e, tokens, N_TOKENS, "s", folder_fd, "a", &saved, &err),
                 PAGED_ERR_NOT_FOUND);
        const int32_t n = talk(e, tokens, "s");
        if (paged_engine_save(e, tokens, n, "s", folder_fd, "a", &saved, &err))
            test_fail(__FILE__, __LINE__, "%s", err.message);
        CHECK_EQ(saved.n_tokens, n - 1);
        CHECK_EQ(e->cache->n_seqs, 0);
        CHECK_EQ(paged_engine_check(e, NULL), PAGED_OK);
        paged_engine_free(e);

        e = make(m, cases[i]);
        if (paged_engine_load(e, "t", folder_fd, "a", NULL, &loaded, &err))
            test_fail(__FILE__, __LINE__, "%s", err.message);
        CHECK_EQ(loaded.n_tokens, n - 1);
        CHECK_EQ(loaded.file_bytes, saved.file_bytes);
        CHECK_EQ(paged_engine_check(e, NULL), PAGED_OK);
        answer a = ask(e, tokens, N_TOKENS, NULL); /* not his */
        same(&a, &want);
        CHECK_EQ(a.cached, 0);
        a = ask(e, tokens, N_TOKENS, "t");
        same(&a, &want);
        CHECK_EQ(a.cached, N_TOKENS - 1);
        CHECK_EQ(paged_engine_load(e, "t", folder_fd, "a", NULL, &loaded, &err),
                 PAGED_OK); /* there already */
        CHECK_EQ(loaded.n_tokens, n - 1);
        /* Half of it is there. */
        CHECK(ask(e, tokens, 70, "u").cached == 0);
        CHECK_EQ(paged_engine_load(e, "u", folder_fd, "a", NULL, &loaded, &err), PAGED_OK);
        a = ask(e, tokens, N_TOKENS, "u");
        same(&a, &want);
        CHECK_EQ(a.cached, N_TOKENS - 1);
        paged_engine_free(e);
    }
    close_folder();
    paged_model_free(m);
}

/* A text that fills the context, whose last block has no whole place in a sequence. */
static void comes_back_full(void) {
    paged_model *m = load_model(test_seed);
    int32_t tokens[N_CTX + 1];
    paged_saved saved;
    open_folder();
    fill(tokens, N_CTX, test_seed);
    for (int32_t block = 16; block <= 64; block *= 4) {
        paged_engine *e = make(m, (paged_engine_config){.block_size = block, .chunk_tokens = 50});
        ask(e, tokens, N_CTX - N_NEW, NULL);
        CHECK_EQ(paged_engine_save(e, tokens, N_CTX - N_NEW, NULL, folder_fd, "a", &saved, NULL), PAGED_OK);
        paged_engine_free(e);
        e = make(m, (paged_engine_config){.block_size = block, .pool_bytes = 0});
        CHECK_EQ(paged_engine_load(e, NULL, folder_fd, "a", NULL, &saved, NULL), PAGED_OK);
        CHECK_EQ(saved.n_tokens, N_CTX - N_NEW);
        CHECK_EQ(ask(e, tokens, N_CTX - N_NEW, NULL).cached, N_CTX - N_NEW - 1);
        paged_engine_free(e);
    }
    close_folder();
    paged_model_free(m);
}

static size_t read_all(const char *name, uint8_t **bytes) {
    struct stat info;
    const int fd = openat(folder_fd, name, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0 && fstat(fd, &info) == 0);
    *bytes = malloc((size_t)info.st_size + 100);
    CHECK(read(fd, *bytes, (size_t)info.st_size) == info.st_size);
    close(fd);
    return (size_t)info.st_size;
}

static void write_all(const char *name, const uint8_t *bytes, size_t n) {
    const int fd = openat(folder_fd, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && write(fd, bytes, n) == (ssize_t)n);
    close(fd);
}

/* D07. With each error the cache is as it was, and the fixed prompt has the answer of a fresh engine. */
static void refuses_what_is_damaged(void) {
    paged_model *m = load_model(test_seed), *other = load_model(test_seed + 1);
    int32_t tokens[N_CTX], fixed[50];
    uint8_t *bytes;
    paged_saved saved;
    paged_error err;
    open_folder();
    fill(tokens, N_TOKENS, test_seed);
    fill(fixed, 50, 9);
    paged_engine *e = make(m, (paged_engine_config){0});
    const answer want = ask(e, fixed, 50, NULL);
    const int32_t n = talk(e, tokens, NULL);
    CHECK_EQ(paged_engine_save(e, tokens, n, NULL, folder_fd, "a", &saved, NULL), PAGED_OK);
    paged_engine_free(e);
    const size_t size = read_all("a", &bytes);
    const size_t block_bytes = 16 * 2 * 2 * 2 * 16 * 2 + 8, n_blocks = (size_t)(n - 1 + 15) / 16;
    const size_t front = size - n_blocks * block_bytes, tokens_at = front - (size_t)(n - 1 + 1) / 2 * 8;
    CHECK(memcmp(bytes + tokens_at, tokens, (size_t)(n - 1) * 4) == 0);

    e = make(m, (paged_engine_config){0});
    paged_cache_stats before, after;
    paged_engine_get_cache_stats(e, &before);
    const size_t cuts[] = {0, size / 10, size / 2, size / 100 * 99, size - 1};
    for (int i = 0; i < 5; i++) {
        write_all("b", bytes, cuts[i]);
        CHECK_EQ(paged_engine_load(e, NULL, folder_fd, "b", NULL, &saved, &err), PAGED_ERR_FORMAT);
        CHECK(strstr(err.message, "bytes") != NULL);
    }
    memset(bytes + size, 0, 100);
    write_all("b", bytes, size + 100);
    CHECK_EQ(paged_engine_load(e, NULL, folder_fd, "b", NULL, &saved, &err), PAGED_ERR_FORMAT);
    /* A bit of each byte of the front, of some in every block, and of its sum. */
    for (size_t at = 0; at < size; at += at < front ? 1 : 257) {
        bytes[at] ^= (uint8_t)(1 << at % 8);
        write_all("b", bytes, size);
        err = (paged_error){0};
        const paged_status s = paged_engine_load(e, NULL, folder_fd, "b", NULL, &saved, &err);
        CHECK(s == PAGED_ERR_FORMAT && err.message[0]);
        bytes[at] ^= (uint8_t)(1 << at % 8);
    }
    /* Two blocks in each other's place. */
    uint8_t *block = malloc(block_bytes);
    memcpy(block, bytes + front, block_bytes);
    memcpy(bytes + front, bytes + front + block_bytes, block_bytes);
    memcpy(bytes + front + block_bytes, block, block_bytes);
    write_all("b", bytes, size);
    CHECK_EQ(paged_engine_load(e, NULL, folder_fd, "b", NULL, &saved, &err), PAGED_ERR_FORMAT);
    CHECK(strstr(err.message, "block 0 of") != NULL);
    free(block);
    free(bytes);
    paged_engine_get_cache_stats(e, &after);
    CHECK_EQ(after.n_used, before.n_used);
    CHECK_EQ(after.n_cached, before.n_cached);
    CHECK_EQ(after.n_allocs, before.n_allocs);
    CHECK_EQ(after.n_queries, before.n_queries);
    CHECK_EQ(after.n_stored, before.n_stored);
    CHECK_EQ(after.backed_bytes, before.backed_bytes);
    const answer a = ask(e, fixed, 50, NULL);
    same(&a, &want);
    paged_engine_free(e);

    /* Another model of the same names and sizes, other types, another block size, too short a context. */
    const struct {
        const paged_model *model;
        paged_engine_config c;
        paged_status status;
    } foreign[] = {{other, {0}, PAGED_ERR_UNSUPPORTED},
                   {m, {.kv_type = PAGED_TYPE_BF16}, PAGED_ERR_UNSUPPORTED},
                   {m, {.block_size = 32}, PAGED_ERR_UNSUPPORTED},
                   {m, {.kv_plain = true}, PAGED_ERR_UNSUPPORTED},
                   {m, {.pool_bytes = 5 * (block_bytes - 8)}, PAGED_ERR_FORMAT}};
    for (int i = 0; i < 5; i++) {
        e = make(foreign[i].model, foreign[i].c);
        err = (paged_error){0};
        const paged_status s = paged_engine_load(e, NULL, folder_fd, "a", NULL, &saved, &err);
        if (s != foreign[i].status) test_fail(__FILE__, __LINE__, "case %d: %d, %s", i, (int)s, err.message);
        CHECK_EQ(e->cache->groups[0].n_cached, 0);
        if (i == 1)
            CHECK_STR(err.message, "a has keys and values in f16, and this engine has them in bf16; one with "
                                   "kv_type f16 can load it");
        else if (s == PAGED_ERR_UNSUPPORTED)
            CHECK(strstr(err.message, "a is of another model, or of other types, sizes or kernels"));
        paged_engine_free(e);
    }
    close_folder();
    paged_model_free(other);
    paged_model_free(m);
}

static void opens_only_files(void) {
    paged_model *m = load_model(test_seed);
    int32_t tokens[N_CTX];
    paged_saved saved;
    paged_error err;
    char long_name[5000];
    open_folder();
    fill(tokens, N_TOKENS, test_seed);
    paged_engine *e = make(m, (paged_engine_config){0});
    const int32_t n = talk(e, tokens, NULL);
    CHECK_EQ(paged_engine_save(e, tokens, n, NULL, folder_fd, "a", &saved, NULL), PAGED_OK);
    CHECK_EQ(symlinkat("a", folder_fd, "link"), 0);
    CHECK_EQ(mkfifoat(folder_fd, "pipe", 0600), 0);
    CHECK_EQ(mkdirat(folder_fd, "dir", 0700), 0);
    CHECK_EQ(paged_engine_load(e, NULL, folder_fd, "link", NULL, &saved, &err), PAGED_ERR_IO);
    CHECK_EQ(paged_engine_load(e, NULL, folder_fd, "pipe", NULL, &saved, &err), PAGED_ERR_IO);
    CHECK_EQ(paged_engine_load(e, NULL, folder_fd, "dir", NULL, &saved, &err), PAGED_ERR_IO);
    CHECK_EQ(paged_engine_load(e, NULL, folder_fd, "none", NULL, &saved, &err), PAGED_ERR_NOT_FOUND);
    CHECK_EQ(paged_engine_load(e, NULL, folder_fd, "", NULL, &saved, &err), PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_engine_save(e, tokens, n, NULL, folder_fd, "dir", &saved, &err), PAGED_ERR_IO);
    CHECK_EQ(paged_engine_save(e, tokens, n, NULL, folder_fd, "none/a", &saved, &err), PAGED_ERR_IO);
    memset(long_name, 'a', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = 0;
    CHECK_EQ(paged_engine_save(e, tokens, n, NULL, folder_fd, long_name, &saved, &err),
             PAGED_ERR_INVALID_ARG);
    CHECK_EQ(paged_engine_check(e, NULL), PAGED_OK);
    CHECK_EQ(e->cache->n_seqs, 0);
    paged_engine_free(e);
    close_folder();
    paged_model_free(m);
}

#define TESTS(X) X(comes_back) X(comes_back_full) X(refuses_what_is_damaged) X(opens_only_files)
TEST_MAIN(TESTS)
