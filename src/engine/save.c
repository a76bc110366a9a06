/* engine/save.c: keys and values of one text in a file of its own, by hand (paged_engine_save, …_load).
 *
 *   head     magic, version, sizes, XXH3-64 of what follows up to the first block and of the head before it
 *   fingerprint  as of stores: what model, layout and numerics the bytes are of
 *   tokens   [n_tokens] int32
 *   blocks   [n_blocks] of each group its bytes, then XXH3-64 of them, seeded with the number of the block;
 *            slots without a token are zeros
 *
 * Integers are little-endian, as the machines are that this runs on. The length of the file is exact. Nothing
 * of a salt is in it: who has the file has the text, and it is loaded into whichever namespace he names.
 *
 * A file is looked through from end to end before the cache sees any of it. The cache is used through a
 * sequence, as by a request: so what is loaded is indexed like what was computed.
 */
#include "engine/save.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/engine.h"
#include "mem/hash.h"

static const char magic[8] = "PAGEDKV";

enum { VERSION = 1 };

typedef struct head {
    char magic[8];
    uint32_t version, fingerprint_bytes;
    uint64_t file_bytes;
    int32_t n_tokens, block_size, n_groups, unused;
    uint64_t sum; /* of the head without it, the fingerprint, the tokens */
} head;

/* What both ways share. */
typedef struct work {
    paged_engine *e;
    const char *name;
    paged_error *err;
    char fingerprint[PAGED__FINGERPRINT_MAX];
    size_t fingerprint_bytes, block_bytes; /* of all groups, with sums */
    paged_seq seq;                         /* 0: none */
    int fd;
    uint8_t *bytes; /* owned */
} work;

static size_t padded(size_t n) {
    return (n + 7) / 8 * 8;
}

static size_t front_bytes(const work *w, size_t n_tokens) {
    return sizeof(head) + padded(w->fingerprint_bytes) + padded(n_tokens * sizeof(int32_t));
}

static uint64_t front_sum(const uint8_t *file, size_t bytes) {
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    XXH3_64bits_update(&state, file, offsetof(head, sum));
    XXH3_64bits_update(&state, file + sizeof(head), bytes - sizeof(head));
    return XXH3_64bits_digest(&state);
}

static paged_status fail_io(paged_error *err, const char *name, const char *what) {
    char reason[128];
    return paged__fail(err, PAGED_ERR_IO, "%s: %s: %s", name, what, strerror_r(errno, reason, sizeof reason));
}

static paged_status begin(work *w, paged_engine *e, const char *name, paged_error *err) {
    *w = (work){.e = e, .name = name, .err = err, .fd = -1};
    if (e->config.no_prefix_cache)
        return paged__fail(err, PAGED_ERR_UNSUPPORTED, "the engine keeps nothing (no_prefix_cache)");
    if (e->cl) return paged__fail(err, PAGED_ERR_UNSUPPORTED, "the pool lies on a device");
    w->fingerprint_bytes = paged__fingerprint(e, (paged_type)e->config.kv_type, w->fingerprint);
    for (int32_t g = 0; g < e->n_groups; g++)
        w->block_bytes += padded(e->cache->groups[g].block_bytes) + sizeof(uint64_t);
    return PAGED_OK;
}

static void end(work *w) {
    if (w->seq) PAGED_ASSERT(paged_seq_free(w->e->cache, w->seq) == PAGED_OK);
    if (w->seq) paged__stores_take(w->e);
    if (w->fd >= 0) close(w->fd);
    paged__free(w->bytes);
}

/* Puts a sequence on what is cached of the tokens. Its last, partly filled block is a block of its own
 * afterwards, where there is room for that; else it is left out. */
static paged_status open_sequence(work *w, const int32_t *tokens, int32_t n_tokens, const char *salt,
                                  int32_t *n_cached) {
    paged_engine *e = w->e;
    paged__names names;
    paged_match match;
    const int32_t size = e->config.block_size, n_max = e->cache->max_seq_tokens;
    /* A match leaves the last token to be computed: one more, whatever it is. */
    int32_t *more = paged__calloc((size_t)n_tokens + 1, sizeof *more);
    if (!more) return paged__fail(w->err, PAGED_ERR_NO_MEMORY, "no memory for %d tokens", n_tokens);
    memcpy(more, tokens, (size_t)n_tokens * sizeof *more);
    paged_status s = paged_seq_create(e->cache, &w->seq);
    if (!s)
        s = paged_seq_match(e->cache, w->seq, paged__names_of(e, salt, &names), more,
                            PAGED_MIN(n_tokens + 1, n_max), &match);
    paged__free(more);
    if (s) return paged__fail(w->err, s, "no sequence to read %d tokens with", n_tokens);
    *n_cached = match.n_matched;
    const int32_t rest = match.n_matched % size;
    if (rest == 0) return PAGED_OK;
    if (match.n_matched - rest + size > n_max || paged_seq_reserve(e->cache, w->seq, size - rest)) {
        *n_cached -= rest;
        s = paged_seq_truncate(e->cache, w->seq, *n_cached);
    }
    return s;
}

/* The bytes of block idx of a group; NULL: it is not there. */
static uint8_t *block_at(const work *w, int32_t group, int32_t idx) {
    int64_t slot;
    const int32_t size = w->e->config.block_size;
    if (paged_seq_slots(w->e->cache, w->seq, group, idx * size, 1, &slot) || slot % size) return NULL;
    return w->e->cache->arena.base + (size_t)(slot / size) * w->e->cache->groups[group].block_bytes;
}

/* ---- save ---- */

static paged_status fill_blocks(const work *w, uint8_t *to, int32_t n_tokens) {
    const int32_t size = w->e->config.block_size;
    for (int32_t i = 0; i * size < n_tokens; i++) {
        for (int32_t g = 0; g < w->e->n_groups; g++) {
            const paged__group *group = &w->e->cache->groups[g];
            const uint8_t *from = block_at(w, g, i);
            if (!from)
                return paged__fail(w->err, PAGED_ERR_UNSUPPORTED,
                                   "layers with a window of %d tokens have given up those before token %d",
                                   group->config.window, paged_seq_first_k(w->e->cache, w->seq, g));
            memcpy(to, from, group->block_bytes);
            paged_block_clear(&group->config, size, to, PAGED_MIN(n_tokens - i * size, size));
            const uint64_t sum = XXH3_64bits_withSeed(to, group->block_bytes, (uint64_t)i);
            to += padded(group->block_bytes);
            memcpy(to, &sum, sizeof sum);
            to += sizeof sum;
        }
    }
    return PAGED_OK;
}

static bool write_all(int fd, const uint8_t *bytes, size_t n) {
    while (n > 0) {
        const ssize_t k = write(fd, bytes, n);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) {
            if (k == 0) errno = ENOSPC;
            return false;
        }
        bytes += k;
        n -= (size_t)k;
    }
    return true;
}

/* Into a new file beside, .NAME.PID-TIME.tmp, which takes the name when all of it is durable. Its lock ends
 * with the process, and tells paged__save_sweep that somebody still writes it. */
paged_status paged__save_write(const paged__saving *saving, int dir_fd, const char *name, paged_error *err) {
    char beside[PAGED__NAME_MAX + 40];
    const char *slash = strrchr(name, '/'), *last = slash ? slash + 1 : name;
    snprintf(beside, sizeof beside, "%.*s.%s.%d-%llx.tmp", (int)(last - name), name, last, (int)getpid(),
             (unsigned long long)paged__now_ns());
    const int fd = openat(dir_fd, beside, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) return fail_io(err, name, "cannot make a file beside it");
    (void)!flock(fd, LOCK_EX | LOCK_NB);
    paged_status s = PAGED_OK;
    if (!write_all(fd, saving->bytes, saving->facts.file_bytes) || fsync(fd) != 0)
        s = fail_io(err, name, "cannot write");
    if (!s && renameat(dir_fd, beside, dir_fd, name) != 0) s = fail_io(err, name, "cannot take the name");
    if (s) unlinkat(dir_fd, beside, 0);
    if (!s && dir_fd >= 0) fsync(dir_fd); /* without it a crash leaves the file before, or none */
    close(fd);
    return s;
}

void paged__save_free(paged__saving *saving) {
    paged__free(saving->bytes);
    *saving = (paged__saving){0};
}

/* Back from `at` over one character of `set` or more and then `before`; NULL: they are not there. */
static const char *skip_back(const char *begin, const char *at, const char *set, char before) {
    const char *from = at;
    while (at > begin && strchr(set, at[-1])) at--;
    return at < from && at > begin && at[-1] == before ? at - 1 : NULL;
}

static bool is_beside(const char *name) {
    const size_t n = strlen(name);
    if (name[0] != '.' || n < 4 || strcmp(name + n - 4, ".tmp") != 0) return false;
    const char *at = skip_back(name, name + n - 4, "0123456789abcdef", '-');
    if (at) at = skip_back(name, at, "0123456789", '.');
    return at && at > name + 1;
}

void paged__save_sweep(int dir_fd) {
    const int all_fd = openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *all = all_fd >= 0 ? fdopendir(all_fd) : NULL;
    if (!all) {
        if (all_fd >= 0) close(all_fd);
        return;
    }
    for (const struct dirent *entry; (entry = readdir(all));) {
        struct stat info;
        if (!is_beside(entry->d_name)) continue;
        const int fd = openat(dir_fd, entry->d_name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        if (fd < 0) continue;
        if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && flock(fd, LOCK_EX | LOCK_NB) == 0)
            unlinkat(dir_fd, entry->d_name, 0);
        close(fd);
    }
    closedir(all);
}

static paged_status make_file(work *w, const int32_t *tokens, int32_t n_tokens, const char *salt,
                              paged__saving *out) {
    const int32_t size = w->e->config.block_size;
    int32_t n;
    paged_status s = open_sequence(w, tokens, n_tokens, salt, &n);
    if (s) return s;
    if (n == 0) return paged__fail(w->err, PAGED_ERR_NOT_FOUND, "none of the %d tokens is cached", n_tokens);
    const size_t front = front_bytes(w, (size_t)n), n_blocks = (size_t)((n + size - 1) / size);
    const size_t bytes = front + n_blocks * w->block_bytes;
    w->bytes = paged__calloc(bytes, 1);
    if (!w->bytes)
        return paged__fail(w->err, PAGED_ERR_NO_MEMORY, "no memory for a file of %zu bytes", bytes);
    head h = {.version = VERSION,
              .fingerprint_bytes = (uint32_t)w->fingerprint_bytes,
              .file_bytes = bytes,
              .n_tokens = n,
              .block_size = size,
              .n_groups = w->e->n_groups};
    memcpy(h.magic, magic, sizeof magic);
    memcpy(w->bytes, &h, sizeof h);
    memcpy(w->bytes + sizeof h, w->fingerprint, w->fingerprint_bytes);
    memcpy(w->bytes + sizeof h + padded(w->fingerprint_bytes), tokens, (size_t)n * sizeof *tokens);
    h.sum = front_sum(w->bytes, front);
    memcpy(w->bytes, &h, sizeof h);
    s = fill_blocks(w, w->bytes + front, n);
    if (s) return s;
    *out = (paged__saving){.bytes = w->bytes, .facts = {.n_tokens = n, .file_bytes = bytes}};
    w->bytes = NULL;
    return PAGED_OK;
}

static bool is_name(const char *name) {
    return name && name[0] && strlen(name) <= PAGED__NAME_MAX;
}

paged_status paged__save_take(paged_engine *e, const int32_t *tokens, int32_t n_tokens, const char *salt,
                              const char *name, paged__saving *out, paged_error *err) {
    if (!e || !tokens || n_tokens < 1 || !is_name(name) || !out)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "engine, tokens (%d), name or out is not given",
                           n_tokens);
    if (n_tokens > e->n_ctx + 1)
        return paged__fail(err, PAGED_ERR_TOO_LONG, "%d tokens; the context has %d", n_tokens, e->n_ctx);
    work w;
    paged_status s = begin(&w, e, name, err);
    if (!s) s = make_file(&w, tokens, PAGED_MIN(n_tokens, e->n_ctx), salt, out);
    end(&w);
    return s;
}

paged_status paged_engine_save(paged_engine *e, const int32_t *tokens, int32_t n_tokens, const char *salt,
                               int dir_fd, const char *name, paged_saved *out, paged_error *err) {
    paged__saving saving = {0};
    paged_status s = paged__save_take(e, tokens, n_tokens, salt, name, out ? &saving : NULL, err);
    if (!s) s = paged__save_write(&saving, dir_fd, name, err);
    if (!s) *out = saving.facts;
    paged__save_free(&saving);
    return s;
}

/* ---- load ---- */

static paged_status read_file(work *w, int dir_fd, size_t *bytes) {
    struct stat info;
    /* O_NONBLOCK: opening a pipe without a writer would wait for ever. */
    w->fd = openat(dir_fd, w->name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (w->fd < 0 && errno == ENOENT)
        return paged__fail(w->err, PAGED_ERR_NOT_FOUND, "there is no %s", w->name);
    if (w->fd < 0) return fail_io(w->err, w->name, errno == ELOOP ? "it is a link" : "cannot open");
    if (fstat(w->fd, &info) != 0) return fail_io(w->err, w->name, "cannot look at it");
    if (!S_ISREG(info.st_mode)) return paged__fail(w->err, PAGED_ERR_IO, "%s is not a regular file", w->name);
    const size_t size = (size_t)info.st_size,
                 most = front_bytes(w, (size_t)w->e->n_ctx) + padded(PAGED__FINGERPRINT_MAX) +
                        (size_t)(w->e->n_ctx / w->e->config.block_size + 1) * w->block_bytes;
    if (size < sizeof(head) || size > most)
        return paged__fail(w->err, PAGED_ERR_FORMAT, "%s has %zu bytes; a file of this engine has %zu … %zu",
                           w->name, size, sizeof(head), most);
    w->bytes = paged__alloc(size, 1);
    if (!w->bytes) return paged__fail(w->err, PAGED_ERR_NO_MEMORY, "no memory for a file of %zu bytes", size);
    for (size_t at = 0; at < size;) {
        const ssize_t k = read(w->fd, w->bytes + at, size - at);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) return fail_io(w->err, w->name, "cannot read");
        if (k == 0)
            return paged__fail(w->err, PAGED_ERR_FORMAT, "%s ends at byte %zu of %zu", w->name, at, size);
        at += (size_t)k;
    }
    *bytes = size;
    return PAGED_OK;
}

/* A file whose fingerprint is another one; what the user can change, the type, is told by its name. */
static paged_status fail_foreign(const work *w, const head *h) {
    static const char *const names[] = {[PAGED_TYPE_F16] = "f16",
                                        [PAGED_TYPE_F32] = "f32",
                                        [PAGED_TYPE_BF16] = "bf16",
                                        [PAGED_TYPE_I8] = "int8"};
    const char *theirs = (const char *)w->bytes + sizeof *h;
    char text[PAGED__FINGERPRINT_MAX];
    for (int32_t type = PAGED_TYPE_F16; type <= PAGED_TYPE_I8; type++)
        if (paged__fingerprint(w->e, (paged_type)type, text) == h->fingerprint_bytes &&
            memcmp(text, theirs, h->fingerprint_bytes) == 0)
            return paged__fail(w->err, PAGED_ERR_UNSUPPORTED,
                               "%s has keys and values in %s, and this engine has them in %s; one with "
                               "kv_type %s can load it",
                               w->name, names[type], names[w->e->config.kv_type], names[type]);
    return paged__fail(w->err, PAGED_ERR_UNSUPPORTED,
                       "%s is of another model, or of other types, sizes or kernels; it was saved by\n%.*s"
                       "and this is\n%s",
                       w->name, (int)h->fingerprint_bytes, theirs, w->fingerprint);
}

/* What the file says of itself, against its length and its sum; then against this engine. */
static paged_status check_front(const work *w, const head *h, size_t bytes) {
    const paged_engine *e = w->e;
    if (memcmp(h->magic, magic, sizeof magic) != 0)
        return paged__fail(w->err, PAGED_ERR_FORMAT, "%s is not a file of saved keys and values", w->name);
    if (h->version != VERSION)
        return paged__fail(w->err, PAGED_ERR_FORMAT, "%s has version %u; this library reads %d", w->name,
                           h->version, VERSION);
    if (h->file_bytes != bytes)
        return paged__fail(w->err, PAGED_ERR_FORMAT, "%s has %zu bytes and says %llu", w->name, bytes,
                           (unsigned long long)h->file_bytes);
    if (h->n_tokens < 1 || h->n_tokens > (int64_t)(bytes / sizeof(int32_t)) ||
        h->fingerprint_bytes > PAGED__FINGERPRINT_MAX)
        return paged__fail(w->err, PAGED_ERR_FORMAT, "%s says %d tokens and a fingerprint of %u bytes",
                           w->name, h->n_tokens, h->fingerprint_bytes);
    const size_t front =
        sizeof *h + padded(h->fingerprint_bytes) + padded((size_t)h->n_tokens * sizeof(int32_t));
    if (front > bytes || h->sum != front_sum(w->bytes, front))
        return paged__fail(w->err, PAGED_ERR_FORMAT, "%s: the sum of its head and tokens is wrong", w->name);
    if (h->fingerprint_bytes != w->fingerprint_bytes ||
        memcmp(w->bytes + sizeof *h, w->fingerprint, w->fingerprint_bytes) != 0)
        return fail_foreign(w, h);
    if (h->n_tokens > e->n_ctx)
        return paged__fail(w->err, PAGED_ERR_TOO_LONG, "%s has %d tokens; the context has %d", w->name,
                           h->n_tokens, e->n_ctx);
    return PAGED_OK;
}

static paged_status check_tokens(const work *w, const int32_t *tokens, int32_t n) {
    for (int32_t i = 0; i < n; i++)
        if (tokens[i] < 0 || tokens[i] >= w->e->n_vocab)
            return paged__fail(w->err, PAGED_ERR_FORMAT, "%s: token %d is %d; the vocabulary ends at %d",
                               w->name, i, tokens[i], w->e->n_vocab - 1);
    return PAGED_OK;
}

static paged_status check_blocks(const work *w, const uint8_t *at, int32_t n_blocks) {
    for (int32_t i = 0; i < n_blocks; i++) {
        for (int32_t g = 0; g < w->e->n_groups; g++) {
            const size_t bytes = w->e->cache->groups[g].block_bytes;
            const uint64_t sum = XXH3_64bits_withSeed(at, bytes, (uint64_t)i);
            if (memcmp(at + padded(bytes), &sum, sizeof sum) != 0)
                return paged__fail(w->err, PAGED_ERR_FORMAT, "%s: the sum of block %d of %d is wrong",
                                   w->name, i, n_blocks);
            at += padded(bytes) + sizeof sum;
        }
    }
    return PAGED_OK;
}

/* What is not cached yet takes its blocks, gets its bytes, and is committed. */
static paged_status insert(work *w, const int32_t *tokens, int32_t n_tokens, const char *salt,
                           const uint8_t *blocks) {
    paged_engine *e = w->e;
    const int32_t size = e->config.block_size, n_blocks = (n_tokens + size - 1) / size;
    int32_t n_cached;
    paged_status s = open_sequence(w, tokens, n_tokens, salt, &n_cached);
    if (s || n_cached == n_tokens) return s;
    const int32_t n_slots = PAGED_MIN(n_blocks * size, e->cache->max_seq_tokens);
    s = paged_seq_reserve(e->cache, w->seq, n_slots - n_cached);
    if (s)
        return paged__fail(w->err, s, "there is no room for %d tokens: %d blocks of %d, %d in all", n_tokens,
                           n_blocks, size, e->n_blocks);
    for (int32_t i = n_cached / size; i < n_blocks; i++) {
        const uint8_t *from = blocks + (size_t)i * w->block_bytes;
        for (int32_t g = 0; g < e->n_groups; g++) {
            uint8_t *to = block_at(w, g, i);
            const size_t bytes = e->cache->groups[g].block_bytes;
            const bool is_tile = (i + 1) * size > n_slots; /* at the end of the context */
            if (!to || is_tile)
                return paged_seq_commit(e->cache, w->seq, tokens + n_cached, i * size - n_cached);
            memcpy(to, from, bytes);
            from += padded(bytes) + sizeof(uint64_t);
        }
    }
    return paged_seq_commit(e->cache, w->seq, tokens + n_cached, n_tokens - n_cached);
}

static paged_status load(work *w, const char *salt, int dir_fd, int32_t *tokens_out, paged_saved *out) {
    size_t bytes = 0;
    head h;
    paged_status s = read_file(w, dir_fd, &bytes);
    if (s) return s;
    memcpy(&h, w->bytes, sizeof h);
    if ((s = check_front(w, &h, bytes))) return s;
    const int32_t size = w->e->config.block_size, n_blocks = (h.n_tokens + size - 1) / size;
    const size_t front = front_bytes(w, (size_t)h.n_tokens);
    if (bytes != front + (size_t)n_blocks * w->block_bytes)
        return paged__fail(w->err, PAGED_ERR_FORMAT, "%s has %zu bytes; %d tokens take %zu", w->name, bytes,
                           h.n_tokens, front + (size_t)n_blocks * w->block_bytes);
    const int32_t *tokens =
        (const int32_t *)(const void *)(w->bytes + sizeof h + padded(w->fingerprint_bytes));
    s = check_tokens(w, tokens, h.n_tokens);
    if (!s) s = check_blocks(w, w->bytes + front, n_blocks);
    if (!s) s = insert(w, tokens, h.n_tokens, salt, w->bytes + front);
    if (s) return s;
    *out = (paged_saved){.n_tokens = paged_seq_len(w->e->cache, w->seq), .file_bytes = bytes};
    if (tokens_out) memcpy(tokens_out, tokens, (size_t)out->n_tokens * sizeof *tokens);
    return PAGED_OK;
}

paged_status paged_engine_load(paged_engine *e, const char *salt, int dir_fd, const char *name,
                               int32_t *tokens, paged_saved *out, paged_error *err) {
    if (!e || !is_name(name) || !out)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "engine, name or out is not given");
    work w;
    paged_status s = begin(&w, e, name, err);
    if (!s) s = load(&w, salt, dir_fd, tokens, out);
    end(&w);
    return s;
}
