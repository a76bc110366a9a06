/* What the Redis store gives back is what was written, or a miss: against Debian's redis-server, one that is
 * stopped, killed, full or locked, values that were changed behind its back, and servers that are none and
 * answer with every kind of nonsense. No call takes longer than its time, whatever the server does. */
#include "base/base.h"
#include "paged/redis_store.h"
#include "redis_servers.h"

enum { BLOCK = 16, GROUP_BYTES = 9000, SMALL_PART = 4096 };

/* A call on a machine that is busy takes its time limit and some more. */
static const double SLACK_S = 2.0;

typedef struct world {
    paged_store store;
    paged_notes notes;
    paged_error err;
} world;

/* One record with its memory. */
typedef struct sample {
    int32_t tokens[BLOCK];
    uint8_t bytes[2][GROUP_BYTES];
    paged_record is;
} sample;

static paged_key key_of(uint64_t n) {
    paged_key key;
    const uint64_t parts[2] = {paged__mix(n), paged__mix(n + 1000003)};
    memcpy(key.bytes, parts, sizeof key.bytes);
    return key;
}

static void blank(sample *s, uint64_t n) {
    memset(s, 0, sizeof *s);
    s->is = (paged_record){.key = key_of(n), .tokens = s->tokens, .bytes = {s->bytes[0], s->bytes[1]}};
}

static void fill(sample *s, uint64_t n, int32_t n_tokens) {
    uint64_t state = n * 77 + test_seed;
    blank(s, n);
    s->is.parent = key_of(n - 1);
    s->is.first = (int32_t)(n % 1000) * BLOCK;
    s->is.n_tokens = n_tokens;
    s->is.groups = 3;
    for (int32_t i = 0; i < n_tokens; i++) s->tokens[i] = (int32_t)(paged__rand(&state) % 50000);
    for (int g = 0; g < 2; g++)
        for (int i = 0; i < GROUP_BYTES; i++) s->bytes[g][i] = (uint8_t)paged__rand(&state);
}

static void check_same(const sample *got, const sample *want) {
    CHECK(memcmp(&got->is.parent, &want->is.parent, sizeof got->is.parent) == 0);
    CHECK_EQ(got->is.first, want->is.first);
    CHECK_EQ(got->is.n_tokens, want->is.n_tokens);
    CHECK_EQ(got->is.groups, want->is.groups);
    CHECK(memcmp(got->tokens, want->tokens, sizeof got->tokens) == 0);
    CHECK(memcmp(got->bytes, want->bytes, sizeof got->bytes) == 0);
}

static paged_store_shape shape_named(const char *fingerprint) {
    return (paged_store_shape){.fingerprint = (const uint8_t *)fingerprint,
                               .fingerprint_bytes = strlen(fingerprint),
                               .block_size = BLOCK,
                               .n_groups = 2,
                               .block_bytes = {GROUP_BYTES, GROUP_BYTES}};
}

static void open_world(world *w, paged_redis_store_config config, const char *fingerprint) {
    const paged_store_shape shape = shape_named(fingerprint);
    config.struct_size = sizeof config;
    if (!config.part_bytes) config.part_bytes = SMALL_PART;
    if (!config.timeout_ms) config.timeout_ms = 5000;
    memset(w, 0, sizeof *w);
    CHECK_EQ(paged_redis_store_create(&config, &w->store, &w->notes, &w->err), PAGED_OK);
    CHECK_EQ(w->store.open(w->store.self, &shape, &w->err), PAGED_OK);
}

static void close_world(world *w) {
    w->store.close(w->store.self);
    w->notes.close(w->notes.self);
}

static paged_status put(world *w, const sample *s) {
    return w->store.write(w->store.self, &s->is, &w->err);
}

static paged_status get(world *w, sample *s, uint64_t n) {
    blank(s, n);
    return w->store.read(w->store.self, &s->is, 3);
}

static paged_store_stats stats_of(const world *w) {
    paged_store_stats stats;
    w->store.get_stats(w->store.self, &stats);
    return stats;
}

static void do_and_forget(test_redis *r, const char *command) {
    redisReply *reply = redis_do(r, command, 0);
    if (reply->type == REDIS_REPLY_ERROR) test_fail(__FILE__, __LINE__, "%s: %s", command, reply->str);
    freeReplyObject(reply);
}

static sample a, b, got;

/* ---- what it is for ---- */

static void records_come_back(void) {
    if (!has_redis(__func__)) return;
    test_redis r = {0};
    world w, other, parts;
    paged_key keys[300];
    redis_start(&r);
    open_world(&w, (paged_redis_store_config){.servers = r.address}, "one");
    open_world(&other, (paged_redis_store_config){.servers = r.address}, "another");
    open_world(&parts, (paged_redis_store_config){.servers = r.address, .part_bytes = 8192}, "one");
    for (uint64_t n = 1; n <= 300; n++) {
        keys[n - 1] = key_of(n);
        if (n == 280) continue;
        fill(&a, n, BLOCK);
        CHECK_EQ(put(&w, &a), PAGED_OK);
    }
    for (uint64_t n = 1; n <= 300; n += 13) {
        fill(&a, n, BLOCK);
        CHECK_EQ(get(&w, &got, n), PAGED_OK);
        check_same(&got, &a);
        CHECK_EQ(get(&other, &got, n), PAGED_ERR_NOT_FOUND);
        CHECK_EQ(get(&parts, &got, n), PAGED_ERR_NOT_FOUND);
    }
    CHECK_EQ(get(&w, &got, 280), PAGED_ERR_NOT_FOUND);
    CHECK_EQ(w.store.find(w.store.self, keys, 300), 279);
    CHECK_EQ(w.store.find(w.store.self, keys, 12), 12);
    CHECK_EQ(w.store.find(w.store.self, keys + 279, 21), 0);
    CHECK_EQ(w.store.find(w.store.self, keys + 280, 20), 20);
    CHECK_EQ(other.store.find(other.store.self, keys, 300), 0);

    /* Only what is wanted is written into the caller's memory. */
    blank(&got, 5);
    fill(&a, 5, BLOCK);
    CHECK_EQ(w.store.read(w.store.self, &got.is, 2), PAGED_OK);
    CHECK(memcmp(got.bytes[1], a.bytes[1], GROUP_BYTES) == 0 && got.bytes[0][0] == 0 &&
          got.bytes[0][99] == 0);

    const paged_store_stats stats = stats_of(&w);
    CHECK_EQ(stats.n_writes, 299);
    CHECK_EQ(stats.n_damaged + stats.n_failures, 0);
    CHECK(stats.up && stats.written_bytes > 299 * 2 * GROUP_BYTES);
    close_world(&w);
    close_world(&other);
    close_world(&parts);
    redis_end(&r);
}

/* Writing twice is writing once; both, and reading, let a record live on. */
static void use_prolongs_life(void) {
    if (!has_redis(__func__)) return;
    test_redis r = {0};
    world w;
    redis_start(&r);
    open_world(&w, (paged_redis_store_config){.servers = r.address, .ttl_s = 1000}, "one");
    fill(&a, 7, BLOCK);
    for (int how = 0; how < 3; how++) {
        if (how < 2)
            CHECK_EQ(put(&w, &a), PAGED_OK);
        else
            CHECK_EQ(get(&w, &got, 7), PAGED_OK);
        redisReply *names = redis_do(&r, "KEYS *");
        CHECK_EQ(names->elements, 5); /* of 18384 bytes */
        for (size_t i = 0; i < names->elements; i++) {
            redisReply *ttl = redis_do(&r, "TTL %s", names->element[i]->str);
            CHECK(ttl->integer > 900 && ttl->integer <= 1000);
            freeReplyObject(ttl);
            freeReplyObject(redis_do(&r, "EXPIRE %s 100", names->element[i]->str));
        }
        freeReplyObject(names);
    }
    CHECK_EQ(stats_of(&w).n_writes, 1);
    close_world(&w);
    redis_end(&r);
}

/* Two engines on the same server, without expiry. */
static void engines_share(void) {
    if (!has_redis(__func__)) return;
    test_redis r = {0};
    world w, second;
    redis_start(&r);
    open_world(&w, (paged_redis_store_config){.servers = r.address, .ttl_s = -1, .prefix = "x:"}, "one");
    open_world(&second, (paged_redis_store_config){.servers = r.address, .ttl_s = -1, .prefix = "x:"}, "one");
    fill(&a, 9, BLOCK);
    CHECK_EQ(put(&w, &a), PAGED_OK);
    CHECK_EQ(put(&second, &a), PAGED_OK);
    CHECK_EQ(stats_of(&second).n_writes, 0);
    CHECK_EQ(get(&second, &got, 9), PAGED_OK);
    check_same(&got, &a);
    redisReply *names = redis_do(&r, "KEYS x:*");
    CHECK_EQ(names->elements, 5);
    redisReply *ttl = redis_do(&r, "TTL %s", names->element[0]->str);
    CHECK_EQ(ttl->integer, -1);
    freeReplyObject(ttl);
    freeReplyObject(names);
    close_world(&w);
    close_world(&second);
    redis_end(&r);
}

static void tails_are_found(void) {
    if (!has_redis(__func__)) return;
    test_redis r = {0};
    world w;
    paged_key key;
    int32_t n_common = -1, tokens[BLOCK];
    redis_start(&r);
    open_world(&w, (paged_redis_store_config){.servers = r.address}, "one");
    const paged_key parent = key_of(500);
    CHECK_EQ(w.store.tail(w.store.self, &parent, tokens, BLOCK, &key, &n_common), PAGED_ERR_NOT_FOUND);
    /* Thirty tails, of which sixteen stay; the k-th begins with k tokens that count from 0. */
    for (uint64_t n = 1; n <= 30; n++) {
        fill(&a, 600 + n, BLOCK - 1);
        a.is.parent = parent;
        for (int32_t i = 0; i < BLOCK - 1; i++) a.tokens[i] = i < (int32_t)n / 2 ? i : 1000 + (int32_t)n;
        CHECK_EQ(put(&w, &a), PAGED_OK);
        CHECK_EQ(put(&w, &a), PAGED_OK); /* is there once */
    }
    for (int32_t i = 0; i < BLOCK; i++) tokens[i] = i;
    CHECK_EQ(w.store.tail(w.store.self, &parent, tokens, BLOCK, &key, &n_common), PAGED_OK);
    CHECK_EQ(n_common, 15);
    CHECK(memcmp(&key, &(paged_key){0}, sizeof key) != 0);
    CHECK_EQ(get(&w, &got, 630), PAGED_OK);
    CHECK(memcmp(&got.is.key, &key, sizeof key) == 0);
    CHECK_EQ(got.is.n_tokens, 15);
    CHECK_EQ(w.store.tail(w.store.self, &parent, tokens, 9, &key, &n_common), PAGED_OK);
    CHECK_EQ(n_common, 9);
    tokens[0] = 99999;
    CHECK_EQ(w.store.tail(w.store.self, &parent, tokens, BLOCK, &key, &n_common), PAGED_ERR_NOT_FOUND);
    redisReply *names = redis_do(&r, "KEYS paged:t:*");
    CHECK_EQ(names->elements, 1);
    redisReply *length = redis_do(&r, "LLEN %s", names->element[0]->str);
    CHECK_EQ(length->integer, 16);
    /* An entry that is none does no harm. */
    freeReplyObject(redis_do(&r, "LPUSH %s short", names->element[0]->str));
    freeReplyObject(
        redis_do(&r, "LPUSH %s 0123456789012345\177\177\177\177and more", names->element[0]->str));
    tokens[0] = 0;
    CHECK_EQ(w.store.tail(w.store.self, &parent, tokens, BLOCK, &key, &n_common), PAGED_OK);
    freeReplyObject(length);
    freeReplyObject(names);
    close_world(&w);
    redis_end(&r);
}

static void names_tell_nothing(void) {
    if (!has_redis(__func__)) return;
    test_redis r = {0};
    world w;
    redis_start(&r);
    open_world(&w, (paged_redis_store_config){.servers = r.address}, "a fingerprint");
    fill(&a, 3, BLOCK - 2);
    CHECK_EQ(put(&w, &a), PAGED_OK);
    redisReply *names = redis_do(&r, "KEYS *");
    for (size_t i = 0; i < names->elements; i++) {
        const char *name = names->element[i]->str;
        CHECK(strncmp(name, "paged:", 6) == 0 && strchr("bt", name[6]));
        CHECK(strspn(name + 7, "0123456789abcdef:") == strlen(name + 7));
        CHECK_EQ(strlen(name) <= 6 + 2 + 17 + 32 + 3, 1);
    }
    CHECK_EQ(names->elements, 6);
    freeReplyObject(names);
    close_world(&w);
    redis_end(&r);
}

/* ---- what it does not believe ---- */

/* Each way of changing one of the values behind the store's back: a miss, counted, and gone. */
static void damage_is_a_miss(void) {
    if (!has_redis(__func__)) return;
    test_redis r = {0};
    world w;
    redis_start(&r);
    open_world(&w, (paged_redis_store_config){.servers = r.address}, "one");
    uint64_t n = 0, n_damaged = 0;
    for (int part = 0; part < 5; part++)
        for (int how = 0; how < 7; how++) {
            char name[200], second[200];
            fill(&a, ++n, BLOCK);
            do_and_forget(&r, "FLUSHALL");
            CHECK_EQ(put(&w, &a), PAGED_OK);
            redisReply *names = redis_do(&r, "KEYS *");
            size_t shortest = 0;
            for (size_t i = 1; i < names->elements; i++)
                if (names->element[i]->len < names->element[shortest]->len) shortest = i;
            snprintf(second, sizeof second, "%s:%d", names->element[shortest]->str, part == 1 ? 2 : 1);
            snprintf(name, sizeof name, part ? "%s:%d" : "%s", names->element[shortest]->str, part);
            freeReplyObject(names);
            bool is_damaged = true;
            if (how == 0) {
                freeReplyObject(redis_do(&r, "DEL %s", name));
                is_damaged = part > 0; /* without its first part it is not there */
            } else if (how == 1) {
                /* In the middle: bytes, or padding of the front. */
                freeReplyObject(redis_do(&r, "SETBIT %s 1600 %d", name, 1));
                freeReplyObject(redis_do(&r, "SETRANGE %s 1000 %s", name, "????????"));
            } else if (how == 2) {
                freeReplyObject(redis_do(&r, "APPEND %s x", name));
            } else if (how == 3) {
                freeReplyObject(redis_do(&r, "SET %s short", name));
            } else if (how == 4) {
                freeReplyObject(redis_do(&r, "DEL %s", name));
                freeReplyObject(redis_do(&r, "LPUSH %s x", name));
            } else if (how == 5) {
                freeReplyObject(redis_do(&r, "COPY %s %s REPLACE", second, name));
            } else {
                freeReplyObject(redis_do(&r, "SETRANGE %s 9000000 x", name)); /* larger than agreed */
            }
            n_damaged += is_damaged;
            if (get(&w, &got, n) != PAGED_ERR_NOT_FOUND)
                test_fail(__FILE__, __LINE__, "part %d changed in way %d was believed", part, how);
            CHECK_EQ(stats_of(&w).n_damaged, n_damaged);
            /* Who computes it again may write it again, and that is good. */
            CHECK_EQ(put(&w, &a), PAGED_OK);
            CHECK_EQ(get(&w, &got, n), PAGED_OK);
            check_same(&got, &a);
        }
    CHECK_EQ(stats_of(&w).n_failures, 0);
    close_world(&w);
    redis_end(&r);
}

/* A record of another key under this name, as a whole. */
static void swapped_records_are_misses(void) {
    if (!has_redis(__func__)) return;
    test_redis r = {0};
    world w;
    redis_start(&r);
    open_world(&w, (paged_redis_store_config){.servers = r.address, .part_bytes = 1 << 20}, "one");
    fill(&a, 1, BLOCK);
    fill(&b, 2, BLOCK);
    CHECK(put(&w, &a) == PAGED_OK && put(&w, &b) == PAGED_OK);
    redisReply *names = redis_do(&r, "KEYS *");
    CHECK_EQ(names->elements, 2);
    freeReplyObject(redis_do(&r, "RENAME %s keep", names->element[0]->str));
    freeReplyObject(redis_do(&r, "RENAME %s %s", names->element[1]->str, names->element[0]->str));
    freeReplyObject(redis_do(&r, "RENAME keep %s", names->element[1]->str));
    freeReplyObject(names);
    CHECK_EQ(get(&w, &got, 1), PAGED_ERR_NOT_FOUND);
    CHECK_EQ(get(&w, &got, 2), PAGED_ERR_NOT_FOUND);
    CHECK_EQ(stats_of(&w).n_damaged, 2);
    close_world(&w);
    redis_end(&r);
}

/* ---- servers that refuse ---- */

static void a_full_server_is_a_limit(void) {
    if (!has_redis(__func__)) return;
    test_redis r = {0};
    world w;
    redis_start(&r);
    open_world(&w, (paged_redis_store_config){.servers = r.address, .retry_ms = 600000}, "one");
    fill(&a, 1, BLOCK);
    CHECK_EQ(put(&w, &a), PAGED_OK);
    do_and_forget(&r, "CONFIG SET maxmemory-policy noeviction");
    do_and_forget(&r, "CONFIG SET maxmemory 1");
    fill(&b, 2, BLOCK);
    CHECK_EQ(put(&w, &b), PAGED_ERR_LIMIT);
    CHECK(strstr(w.err.message, "full"));
    CHECK_EQ(w.notes.put(w.notes.self, "name", "text", 4, 0, &w.err), PAGED_ERR_LIMIT);
    /* What is there can be read, and the server counts as up. */
    CHECK_EQ(get(&w, &got, 1), PAGED_OK);
    CHECK_EQ(put(&w, &a), PAGED_OK);
    CHECK_EQ(get(&w, &got, 2), PAGED_ERR_NOT_FOUND);
    CHECK(stats_of(&w).up);
    do_and_forget(&r, "CONFIG SET maxmemory 0");
    CHECK_EQ(put(&w, &b), PAGED_OK);
    close_world(&w);
    redis_end(&r);
}

static void passwords_are_not_told(void) {
    if (!has_redis(__func__)) return;
    test_redis r = {0};
    world w;
    redis_start(&r);
    do_and_forget(&r, "ACL SETUSER ann on >secret-of-ann ~* +@all");
    do_and_forget(&r, "CONFIG SET requirepass sesame-of-all");
    static const struct {
        const char *user, *password;
        bool works;
    } CASES[] = {{NULL, NULL, false},
                 {NULL, "sesame-of-none", false},
                 {NULL, "sesame-of-all", true},
                 {"ann", "secret-of-none", false},
                 {"ann", "secret-of-ann", true}};
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        open_world(&w,
                   (paged_redis_store_config){
                       .servers = r.address, .user = CASES[i].user, .password = CASES[i].password},
                   "one");
        fill(&a, 100 + i, BLOCK);
        CHECK_EQ(put(&w, &a), CASES[i].works ? PAGED_OK : PAGED_ERR_IO);
        CHECK(!strstr(w.err.message, "secret") && !strstr(w.err.message, "sesame"));
        CHECK_EQ(get(&w, &got, 100 + i), CASES[i].works ? PAGED_OK : PAGED_ERR_NOT_FOUND);
        CHECK_EQ(stats_of(&w).up, CASES[i].works);
        close_world(&w);
    }
    redis_end(&r);
    /* A server that says it back. */
    fake_server f = {.bytes = "-MISCONF no sesame-of-all here\r\n", .n_bytes = 32};
    fake_start(&f);
    open_world(&w, (paged_redis_store_config){.servers = f.address, .password = "sesame-of-all"}, "one");
    CHECK_EQ(put(&w, &a), PAGED_ERR_IO);
    CHECK(!strstr(w.err.message, "sesame"));
    close_world(&w);
    fake_end(&f);
}

/* ---- servers that do not answer ---- */

/* All that a store is asked; returns how many calls gave something. */
static int all_calls(world *w, double limit_s) {
    const paged_key keys[3] = {key_of(1), key_of(2), key_of(3)};
    paged_key key;
    int32_t n_common, n_good = 0;
    void *data = NULL;
    size_t size;
    for (int i = 0; i < 8; i++) {
        const double from = seconds();
        switch (i) {
        case 0:
            n_good += w->store.find(w->store.self, keys, 3) > 0;
            break;
        case 1:
            n_good += get(w, &got, 1) == PAGED_OK;
            break;
        case 2:
            n_good += put(w, &b) == PAGED_OK;
            break;
        case 3:
            n_good += w->store.tail(w->store.self, &keys[0], b.tokens, BLOCK, &key, &n_common) == PAGED_OK;
            break;
        case 4:
            n_good += w->notes.put(w->notes.self, "n", "x", 1, 0, &w->err) == PAGED_OK;
            break;
        case 5:
            if (w->notes.get(w->notes.self, "n", SIZE_MAX, &data, &size, &w->err) == PAGED_OK) {
                n_good++;
                free(data);
            }
            break;
        case 6:
            n_good += w->notes.erase(w->notes.self, "n", &w->err) == PAGED_OK;
            break;
        default:
            n_good += w->store.flush(w->store.self, &w->err) != PAGED_OK;
            break;
        }
        const double took = seconds() - from;
        if (took > limit_s) test_fail(__FILE__, __LINE__, "call %d took %.2f s, not %.2f", i, took, limit_s);
    }
    return n_good;
}

static void a_stopped_server_is_a_miss(void) {
    if (!has_redis(__func__)) return;
    test_redis r = {0};
    world w, patient;
    redis_start(&r);
    const paged_redis_store_config config = {.servers = r.address, .timeout_ms = 30, .retry_ms = 600000};
    open_world(&patient, (paged_redis_store_config){.servers = r.address}, "one");
    open_world(&w, config, "one");
    fill(&a, 1, BLOCK);
    fill(&b, 2, BLOCK);
    CHECK_EQ(put(&patient, &a), PAGED_OK);
    CHECK_EQ(get(&patient, &got, 1), PAGED_OK);
    kill(r.pid, SIGSTOP);
    CHECK_EQ(all_calls(&w, 0.6 + SLACK_S), 0);
    CHECK(!stats_of(&w).up);
    /* It is left alone now: a hundred times thirty milliseconds would be three seconds. */
    const double from = seconds();
    for (int i = 0; i < 100; i++) CHECK_EQ(get(&w, &got, 1), PAGED_ERR_NOT_FOUND);
    CHECK(seconds() - from < SLACK_S); /* on a machine that has nothing else to do: at once */
    CHECK(stats_of(&w).n_failures <= 2);
    close_world(&w);
    /* And used again when it is back. */
    open_world(&w, (paged_redis_store_config){.servers = r.address, .timeout_ms = 30, .retry_ms = 1}, "one");
    CHECK_EQ(get(&w, &got, 1), PAGED_ERR_NOT_FOUND);
    kill(r.pid, SIGCONT);
    int n_tries = 0;
    do sleep_ms(10);
    while (get(&w, &got, 1) != PAGED_OK && ++n_tries < 1000);
    check_same(&got, &a);
    CHECK(stats_of(&w).up);
    close_world(&w);
    /* One that is busy with something else. */
    open_world(&w, config, "one");
    CHECK_EQ(redisAppendCommand(r.line, "EVAL %s 0",
                                "local t = redis.call('TIME')[1] + 2 "
                                "while redis.call('TIME')[1] + 0 < t do end"),
             REDIS_OK);
    int done = 0;
    while (!done) CHECK_EQ(redisBufferWrite(r.line, &done), REDIS_OK);
    sleep_ms(50);
    CHECK_EQ(get(&w, &got, 1), PAGED_ERR_NOT_FOUND);
    close_world(&w);
    close_world(&patient);
    redis_end(&r);
}

static void a_dead_server_is_a_miss(void) {
    if (!has_redis(__func__)) return;
    test_redis r = {0};
    world w;
    redis_start(&r);
    open_world(&w, (paged_redis_store_config){.servers = r.address, .retry_ms = 1}, "one");
    fill(&a, 1, BLOCK);
    fill(&b, 2, BLOCK);
    CHECK_EQ(put(&w, &a), PAGED_OK);
    redis_kill(&r);
    CHECK_EQ(all_calls(&w, SLACK_S), 0);
    CHECK(!stats_of(&w).up);
    redis_start(&r); /* empty: nothing was to outlive it */
    sleep_ms(5);
    CHECK_EQ(get(&w, &got, 1), PAGED_ERR_NOT_FOUND);
    CHECK_EQ(put(&w, &a), PAGED_OK);
    CHECK_EQ(get(&w, &got, 1), PAGED_OK);
    CHECK(stats_of(&w).up);
    /* It may also close a line that is not in use; the next call opens another, and nothing is lost. */
    const uint64_t n_failures = stats_of(&w).n_failures;
    do_and_forget(&r, "CLIENT KILL TYPE normal SKIPME yes");
    CHECK_EQ(get(&w, &got, 1), PAGED_OK);
    CHECK_EQ(stats_of(&w).n_failures, n_failures);
    close_world(&w);
    redis_end(&r);
    open_world(&w, (paged_redis_store_config){.servers = "127.0.0.1:1,[::1]:1,unix:/nowhere/at/all"}, "one");
    CHECK_EQ(all_calls(&w, SLACK_S), 0);
    close_world(&w);
}

/* The share of a lost server goes to the others, and theirs stays where it is. */
static void two_of_three_go_on(void) {
    if (!has_redis(__func__)) return;
    enum { N = 120 };
    test_redis r[3] = {0};
    world w;
    char servers[400], reversed[400];
    int64_t before[3], n_all = 0;
    for (int i = 0; i < 3; i++) redis_start(&r[i]);
    snprintf(servers, sizeof servers, "%s,%s,%s", r[0].address, r[1].address, r[2].address);
    snprintf(reversed, sizeof reversed, "%s,%s,%s", r[2].address, r[0].address, r[1].address);
    open_world(&w, (paged_redis_store_config){.servers = servers, .part_bytes = 1 << 20}, "one");
    for (uint64_t n = 1; n <= N; n++) {
        fill(&a, n, BLOCK);
        CHECK_EQ(put(&w, &a), PAGED_OK);
    }
    close_world(&w);
    for (int i = 0; i < 3; i++) {
        redisReply *size = redis_do(&r[i], "DBSIZE");
        before[i] = size->integer;
        n_all += size->integer;
        CHECK(before[i] > N / 6 && before[i] < N / 2); /* expected 40, five standard deviations are 26 */
        freeReplyObject(size);
    }
    CHECK_EQ(n_all, N);
    redis_kill(&r[1]);
    open_world(&w, (paged_redis_store_config){.servers = reversed, .part_bytes = 1 << 20, .retry_ms = 600000},
               "one");
    int n_found = 0;
    for (uint64_t n = 1; n <= N; n++) {
        const bool found = get(&w, &got, n) == PAGED_OK;
        n_found += found;
        fill(&a, n, BLOCK);
        if (found) check_same(&got, &a);
        CHECK_EQ(put(&w, &a), PAGED_OK);
        CHECK_EQ(get(&w, &got, n), PAGED_OK);
        check_same(&got, &a);
    }
    CHECK_EQ(n_found, N - before[1]);
    CHECK_EQ(stats_of(&w).n_failures, 1);
    close_world(&w);
    for (int i = 0; i < 3; i++) redis_end(&r[i]);
}

/* ---- servers that are none ---- */

static void nonsense_is_a_miss(void) {
    static const char *const ANSWERS[] = {
        "hello\r\n",
        "\r\n",
        "+",
        "+OK",
        "+OK\r\n",
        ":1\r\n",
        ":1\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n",
        ":99999999999999999999999\r\n",
        ":x\r\n",
        "$-1\r\n",
        "$-2\r\n",
        "$-9223372036854775808\r\n",
        "$9223372036854775807\r\n",
        "$18446744073709551616\r\nx",
        "$2147483647\r\nabc",
        "$5\r\nabc",
        "$3\r\nabcdef\r\n",
        "$0\r\n\r\n",
        "$3\r\nabc\r\n$3\r\nabc\r\n$3\r\nabc\r\n$3\r\nabc\r\n",
        "*-1\r\n",
        "*-2\r\n",
        "*0\r\n",
        "*0\r\n*0\r\n*0\r\n*0\r\n",
        "*2147483647\r\n",
        "*9223372036854775807\r\n",
        "*4096\r\n*4096\r\n*4096\r\n*4096\r\n*4096\r\n*4096\r\n*4096\r\n*4096\r\n*4096\r\n*4096\r\n",
        "*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n",
        "*2\r\n$3\r\nabc\r\n:7\r\n",
        "*3\r\n$-1\r\n*0\r\n-ERR\r\n",
        "-\r\n",
        "-ERR\r\n",
        "-ERR no\r\n-ERR no\r\n-ERR no\r\n",
        "-LOADING Redis is loading the dataset in memory\r\n",
        "-READONLY\r\n",
        "-MOVED 3999 10.0.0.1:6381\r\n",
        "-OOM command not allowed\r\n",
        "-\x1b[2J\x07\x7f\r\n",
        "$20\r\n01234567890123456789\r\n:1\r\n",
        "_\r\n",
        "%1\r\n+a\r\n+b\r\n",
        ",1.5\r\n",
        "#t\r\n",
        "(123\r\n",
        "HTTP/1.1 400 Bad Request\r\n\r\n"};
    world w;
    fill(&b, 2, BLOCK - 1);
    for (size_t i = 0; i < sizeof ANSWERS / sizeof *ANSWERS; i++)
        for (int closes = 0; closes < (test_long || i % 4 == 0 ? 2 : 1); closes++) {
            fake_server f = {.bytes = ANSWERS[i], .n_bytes = strlen(ANSWERS[i]), .closes = closes};
            fake_start(&f);
            open_world(&w, (paged_redis_store_config){.servers = f.address, .timeout_ms = 4, .retry_ms = 1},
                       "one");
            all_calls(&w, 0.2 + SLACK_S);
            CHECK(get(&w, &got, 1) != PAGED_OK);
            close_world(&w);
            fake_end(&f);
        }
    /* Bytes that are no accident: zeros in the text. */
    static const char ZEROS[] = "$4\r\n\0\0\0\0\r\n-\0ERR\r\n*1\r\n\0";
    fake_server f = {.bytes = ZEROS, .n_bytes = sizeof ZEROS - 1};
    fake_start(&f);
    open_world(&w, (paged_redis_store_config){.servers = f.address, .timeout_ms = 4, .retry_ms = 1}, "one");
    all_calls(&w, 0.2 + SLACK_S);
    close_world(&w);
    fake_end(&f);
}

/* Answers without an end, and such that come a byte at a time. */
static void endless_answers_end(void) {
    static char flood[1 << 16];
    static const char *const DRIPS[] = {"$1000000\r\naaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
                                        "+aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
                                        "*4000\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n"};
    world w;
    fill(&b, 2, BLOCK - 1);
    memset(flood, 'a', sizeof flood);
    for (int i = 0; i < 6; i++) {
        fake_server f = {.repeats = true};
        if (i < 3) {
            f.bytes = DRIPS[i];
            f.n_bytes = strlen(DRIPS[i]);
            f.ms_between = 5;
        } else {
            f.bytes = flood;
            f.n_bytes = sizeof flood;
            memcpy(flood, i == 3 ? "$999999999\r\n" : i == 4 ? "+aaaaaaaaaaa" : ":1\r\n:1\r\n:1\r\n", 12);
        }
        fake_start(&f);
        open_world(&w, (paged_redis_store_config){.servers = f.address, .timeout_ms = 20, .retry_ms = 600000},
                   "one");
        const int n_good = all_calls(&w, 0.5 + SLACK_S);
        CHECK(n_good == 0 || i == 5); /* a 1 is an answer to some questions */
        CHECK(get(&w, &got, 1) != PAGED_OK);
        close_world(&w);
        fake_end(&f);
    }
}

/* Random runs of pieces of the protocol. */
static void random_answers_are_misses(void) {
    static const char *const PIECES[] = {"*1\r\n",  "*2\r\n",     "*-1\r\n",   "*3",        "$4\r\n",
                                         "$-1\r\n", "$0\r\n\r\n", "abcd",      "\r\n",      ":1\r\n",
                                         ":0\r\n",  "+OK\r\n",    "-ERR\r\n",  "-OOM \r\n", "\0",
                                         "$10\r\n", "4096",       "*4096\r\n", "PAGEDREC"};
    uint64_t state = test_seed;
    world w;
    fill(&b, 2, BLOCK - 1);
    for (int i = 0; i < (test_long ? 2000 : 40); i++) {
        char bytes[600];
        size_t n = 0;
        while (n < 500 && paged__rand(&state) % 24) {
            const char *piece = PIECES[paged__rand(&state) % (sizeof PIECES / sizeof *PIECES)];
            const size_t len = piece[0] ? strlen(piece) : 1;
            memcpy(bytes + n, piece, len);
            n += len;
        }
        fake_server f = {.bytes = bytes, .n_bytes = n, .closes = paged__rand(&state) % 2};
        fake_start(&f);
        open_world(&w, (paged_redis_store_config){.servers = f.address, .timeout_ms = 5, .retry_ms = 1},
                   "one");
        all_calls(&w, 0.1 + SLACK_S);
        CHECK(get(&w, &got, 1) != PAGED_OK);
        close_world(&w);
        fake_end(&f);
    }
}

/* ---- notes ---- */

typedef struct names {
    char text[400];
    int64_t last;
    int n_left;
} names;

static bool add_name(void *user, const char *name, int64_t changed) {
    names *n = user;
    strcat(strcat(n->text, name), " ");
    CHECK(changed > 1600000000 && (!n->last || changed <= n->last));
    n->last = changed;
    return --n->n_left > 0;
}

static const char *listed(world *w, int n) {
    static names found;
    found = (names){.n_left = n};
    CHECK_EQ(w->notes.list(w->notes.self, add_name, &found, &w->err), PAGED_OK);
    return found.text;
}

static void notes_are_kept(void) {
    if (!has_redis(__func__)) return;
    test_redis r[2] = {0};
    world w;
    char servers[300];
    void *data = NULL;
    size_t size = 0;
    static char large[1 << 20];
    redis_start(&r[0]);
    redis_start(&r[1]);
    snprintf(servers, sizeof servers, "%s,%s", r[0].address, r[1].address);
    open_world(&w, (paged_redis_store_config){.servers = servers, .retry_ms = 1}, "one");
    paged_notes *notes = &w.notes;
    CHECK_STR(listed(&w, 99), "");
    CHECK_EQ(notes->get(notes->self, "conv-a", SIZE_MAX, &data, &size, &w.err), PAGED_ERR_NOT_FOUND);
    CHECK_EQ(notes->erase(notes->self, "conv-a", &w.err), PAGED_ERR_NOT_FOUND);
    memset(large, 7, sizeof large);
    static const char *const NAMES[] = {"conv-a", "conv-b", "conv-c", "d", "e.f_g-H"};
    for (int i = 0; i < 5; i++) {
        CHECK_EQ(notes->put(notes->self, NAMES[i], i == 3 ? large : NAMES[i], i == 3 ? sizeof large : 6, 0,
                            &w.err),
                 PAGED_OK);
        sleep_ms(3);
    }
    CHECK_STR(listed(&w, 99), "e.f_g-H d conv-c conv-b conv-a ");
    CHECK_EQ(notes->put(notes->self, "conv-b", "new\0text", 8, time(NULL) + 500, &w.err), PAGED_OK);
    CHECK_STR(listed(&w, 2), "conv-b e.f_g-H ");
    CHECK_EQ(notes->get(notes->self, "conv-b", SIZE_MAX, &data, &size, &w.err), PAGED_OK);
    CHECK(size == 8 && memcmp(data, "new\0text", 8) == 0);
    free(data);
    CHECK_EQ(notes->get(notes->self, "d", SIZE_MAX, &data, &size, &w.err), PAGED_OK);
    CHECK(size == sizeof large && memcmp(data, large, size) == 0);
    free(data);
    for (size_t n = 0; n < 2 * sizeof large; n = 100 * n + 7) { /* its beginning */
        CHECK_EQ(notes->get(notes->self, "d", n, &data, &size, &w.err), PAGED_OK);
        CHECK(size == PAGED_MIN(n, sizeof large) && memcmp(data, large, size) == 0);
        free(data);
    }
    CHECK_EQ(notes->erase(notes->self, "d", &w.err), PAGED_OK);
    CHECK_EQ(notes->put(notes->self, "conv-c", "x", 1, time(NULL) - 5, &w.err), PAGED_OK);
    /* One that went by itself leaves the list. */
    CHECK_EQ(notes->put(notes->self, "brief", "x", 1, time(NULL) + 9, &w.err), PAGED_OK);
    for (int i = 0; i < 2; i++) {
        redisReply *ttl = redis_do(&r[i], "TTL paged:n:brief");
        CHECK(ttl->integer == -2 || (ttl->integer > 0 && ttl->integer <= 9));
        freeReplyObject(ttl);
        freeReplyObject(redis_do(&r[i], "PEXPIRE paged:n:brief 0"));
    }
    CHECK_EQ(notes->get(notes->self, "brief", SIZE_MAX, &data, &size, &w.err), PAGED_ERR_NOT_FOUND);
    CHECK_STR(listed(&w, 99), "conv-b e.f_g-H conv-a ");
    CHECK_STR(listed(&w, 99), "conv-b e.f_g-H conv-a ");

    /* Of a server that is not there we do not say that there is no such note. */
    redis_kill(&r[0]);
    redis_kill(&r[1]);
    CHECK_EQ(notes->get(notes->self, "conv-b", SIZE_MAX, &data, &size, &w.err), PAGED_ERR_IO);
    CHECK_EQ(notes->put(notes->self, "conv-b", "x", 1, 0, &w.err), PAGED_ERR_IO);
    CHECK_EQ(notes->erase(notes->self, "conv-b", &w.err), PAGED_ERR_IO);
    CHECK_EQ(notes->list(notes->self, add_name, &(names){.n_left = 9}, &w.err), PAGED_ERR_IO);
    /* What is no name goes nowhere. */
    static const char *const BAD[] = {"", ".x", "a/b", "a b", "a\r\nDEL", "n\xc3\xa4me"};
    for (int i = 0; i < 6; i++)
        CHECK_EQ(notes->put(notes->self, BAD[i], "x", 1, 0, &w.err), PAGED_ERR_INVALID_ARG);
    close_world(&w);
    redis_end(&r[0]);
    redis_end(&r[1]);
}

/* ---- threads ---- */

typedef struct beside {
    world *w;
    atomic_bool stop;
    atomic_int n_wrong;
} beside;

static void *look_at_stats(void *arg) {
    beside *o = arg;
    uint64_t before = 0;
    while (!o->stop) {
        const paged_store_stats stats = stats_of(o->w);
        o->n_wrong += stats.n_reads < before || stats.n_hits > stats.n_reads;
        before = stats.n_reads;
    }
    return NULL;
}

static void *use_notes(void *arg) {
    beside *o = arg;
    for (int i = 0; !o->stop; i++) {
        char text[32];
        void *data = NULL;
        size_t size = 0;
        const int n = snprintf(text, sizeof text, "note %d", i);
        const paged_notes *notes = &o->w->notes;
        o->n_wrong += notes->put(notes->self, "n", text, (size_t)n, 0, NULL) != PAGED_OK;
        o->n_wrong += notes->get(notes->self, "n", SIZE_MAX, &data, &size, NULL) != PAGED_OK ||
                      size != (size_t)n || memcmp(data, text, size) != 0;
        free(data);
    }
    return NULL;
}

/* Records in one thread, notes in another, counters in a third. */
static void threads_do_not_meet(void) {
    if (!has_redis(__func__)) return;
    test_redis r = {0};
    world w;
    beside other = {.w = &w};
    pthread_t threads[2];
    redis_start(&r);
    open_world(&w, (paged_redis_store_config){.servers = r.address}, "one");
    CHECK_EQ(pthread_create(&threads[0], NULL, look_at_stats, &other), 0);
    CHECK_EQ(pthread_create(&threads[1], NULL, use_notes, &other), 0);
    int n_wrong = 0;
    for (uint64_t n = 1; n <= 200; n++) {
        fill(&a, n, n % 3 ? BLOCK : BLOCK - 1);
        n_wrong += put(&w, &a) != PAGED_OK || get(&w, &got, n) != PAGED_OK;
    }
    other.stop = true;
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    close_world(&w);
    redis_end(&r);
    CHECK_EQ(n_wrong, 0);
    CHECK_EQ(other.n_wrong, 0);
}

/* ---- configuration ---- */

static void wrong_configurations_are_refused(void) {
    static const char *const BAD[] = {"",
                                      ",",
                                      "a:1,",
                                      "a:1,,b:1",
                                      ":6379",
                                      "a:0",
                                      "a:65536",
                                      "a:1x",
                                      "a:",
                                      "::1",
                                      "[::1",
                                      "[::1]x",
                                      "unix:",
                                      "unix:x",
                                      "a b:1",
                                      "a:1,a:1",
                                      "a,a:6379",
                                      "[]:1",
                                      "u:pw@h:6379",
                                      "me@host:1",
                                      "redis://h:1",
                                      "a:+1",
                                      "a:99999999999999999999"};
    paged_store store;
    paged_error err;
    char text[9000];
    for (size_t i = 0; i < sizeof BAD / sizeof *BAD; i++) {
        const paged_redis_store_config c = {.struct_size = sizeof c, .servers = BAD[i]};
        if (paged_redis_store_create(&c, &store, NULL, &err) != PAGED_ERR_INVALID_ARG)
            test_fail(__FILE__, __LINE__, "\"%s\" was taken", BAD[i]);
        CHECK(!strstr(err.message, "pw"));
    }
    const size_t size = sizeof(paged_redis_store_config);
    const paged_redis_store_config cases[] = {{.struct_size = size},
                                              {.servers = "a:1"},
                                              {.struct_size = size + 8, .servers = "a:1"},
                                              {.struct_size = size, .servers = "a:1", .user = "me"},
                                              {.struct_size = size, .servers = "a:1", .timeout_ms = -1},
                                              {.struct_size = size, .servers = "a:1", .timeout_ms = 60001},
                                              {.struct_size = size, .servers = "a:1", .retry_ms = -1},
                                              {.struct_size = size, .servers = "a:1", .ttl_s = -2},
                                              {.struct_size = size, .servers = "a:1", .part_bytes = 100},
                                              {.struct_size = size, .servers = "a:1", .prefix = "a b"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        CHECK_EQ(paged_redis_store_create(&cases[i], &store, NULL, &err), PAGED_ERR_INVALID_ARG);
    /* Too many, and one of them too long. */
    text[0] = 0;
    for (int i = 1; i <= 65; i++) snprintf(text + strlen(text), 32, "%sh:%d", i > 1 ? "," : "", i);
    CHECK_EQ(paged_redis_store_create(&(paged_redis_store_config){.struct_size = size, .servers = text},
                                      &store, NULL, &err),
             PAGED_ERR_INVALID_ARG);
    memset(text, 'h', 300);
    text[300] = 0;
    CHECK_EQ(paged_redis_store_create(&(paged_redis_store_config){.struct_size = size, .servers = text},
                                      &store, NULL, &err),
             PAGED_ERR_INVALID_ARG);
    const paged_redis_store_config good = {
        .struct_size = size, .servers = "a,b:7000,[::1]:6380,[::1],unix:/run/redis.sock", .prefix = ""};
    CHECK_EQ(paged_redis_store_create(&good, &store, NULL, &err), PAGED_OK);
    store.close(store.self);
}

/* ---- memory ---- */

static int64_t n_left;
static int64_t n_held;

static void *failing_alloc(void *user, size_t size, size_t align) {
    (void)user;
    if (n_left-- <= 0) return NULL;
    n_held++;
    return aligned_alloc(align, (size + align - 1) / align * align);
}

static void counted_free(void *user, void *ptr) {
    (void)user;
    n_held -= ptr != NULL;
    free(ptr);
}

/* The n-th allocation fails, for n = 0, 1, 2 … until none does: an error, and nothing is held. */
static void allocation_fails(void) {
    const paged_allocator failing = {failing_alloc, counted_free, NULL};
    const paged_redis_store_config config = {
        .struct_size = sizeof config, .servers = "127.0.0.1:1", .user = "u", .password = "p"};
    const paged_store_shape shape = shape_named("one");
    world w;
    bool works = false;
    paged_allocator_set(&failing);
    for (int64_t n = 0; !works && n < 100; n++) {
        n_left = n;
        n_held = 0;
        paged_status status = paged_redis_store_create(&config, &w.store, &w.notes, &w.err);
        const bool made = status == PAGED_OK;
        if (made) status = w.store.open(w.store.self, &shape, &w.err);
        works = status == PAGED_OK;
        if (made) close_world(&w);
        if ((status != PAGED_OK && status != PAGED_ERR_NO_MEMORY) || n_held != 0) {
            paged_allocator_set(NULL);
            test_fail(__FILE__, __LINE__, "allocation %d fails: %s, %d held", (int)n,
                      paged_status_name(status), (int)n_held);
        }
    }
    paged_allocator_set(NULL);
    CHECK(works);
}

#define TESTS(X)                                                                                             \
    X(records_come_back)                                                                                     \
    X(use_prolongs_life)                                                                                     \
    X(engines_share)                                                                                         \
    X(tails_are_found)                                                                                       \
    X(names_tell_nothing)                                                                                    \
    X(damage_is_a_miss)                                                                                      \
    X(swapped_records_are_misses)                                                                            \
    X(a_full_server_is_a_limit)                                                                              \
    X(passwords_are_not_told)                                                                                \
    X(a_stopped_server_is_a_miss)                                                                            \
    X(a_dead_server_is_a_miss)                                                                               \
    X(two_of_three_go_on)                                                                                    \
    X(nonsense_is_a_miss)                                                                                    \
    X(endless_answers_end)                                                                                   \
    X(random_answers_are_misses)                                                                             \
    X(threads_do_not_meet)                                                                                   \
    X(allocation_fails)                                                                                      \
    X(notes_are_kept)                                                                                        \
    X(wrong_configurations_are_refused)
TEST_MAIN(TESTS)
