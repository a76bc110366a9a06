/* test_gguf.c: what stands in a valid GGUF file is what the reader gives, and what is asked for wrongly is
 * refused.
 *
 * Method: ggml's own writer makes the files and ggml's own reader is the oracle, key by key and tensor by
 * tensor: on a small file with every type, on random files, and on the real model ($PAGED_MODEL, skipped
 * without).
 */
#include "test.h"

#include <errno.h>
#include <float.h>
#include <ggml.h>
#include <gguf.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/gguf.h"

static char folder[64];

static const char *path_of(const char *name) {
    static char path[200];
    if (folder[0] == '\0') {
        snprintf(folder, sizeof folder, "/tmp/paged-test-gguf-XXXXXX");
        CHECK(mkdtemp(folder));
    }
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static paged__gguf *open_file(const char *path) {
    paged__gguf *g = NULL;
    paged_error err = {0};
    if (paged__gguf_open(path, &g, &err)) test_fail(__FILE__, __LINE__, "%s", err.message);
    return g;
}

/* ---- files by ggml's writer ---- */

static struct ggml_context *tensor_context(void) {
    return ggml_init((struct ggml_init_params){.mem_size = 4u << 20});
}

/* Bytes that differ from tensor to tensor. */
static void add_tensor(struct gguf_context *file, struct ggml_context *ctx, const char *name,
                       enum ggml_type type, int n_dims, const int64_t *ne) {
    struct ggml_tensor *t = ggml_new_tensor(ctx, type, n_dims, ne);
    uint8_t *data = ggml_get_data(t);
    uint64_t seed = strlen(name) + (uint64_t)name[0] * 256 + (uint64_t)name[strlen(name) - 1];
    for (size_t i = 0; i < ggml_nbytes(t); i++) data[i] = (uint8_t)paged__rand(&seed);
    ggml_set_name(t, name);
    gguf_add_tensor(file, t);
}

static const char *write_all_types(void) {
    static const char *words[] = {"<s>", "", "\xc4\xa0the", "line\nbreak", "\xe4\xbd\xa0\xe5\xa5\xbd"};
    static const int32_t ints[] = {1, -1, INT32_MIN, INT32_MAX, 0, 7};
    static const uint32_t uints[] = {0, UINT32_MAX, 3};
    static const float floats[] = {0.0f, -1.5f, 3.4e38f};
    const char *path = path_of("all.gguf");
    struct ggml_context *ctx = tensor_context();
    struct gguf_context *file = gguf_init_empty();
    gguf_set_val_u8(file, "v.u8", 255);
    gguf_set_val_i8(file, "v.i8", -128);
    gguf_set_val_u16(file, "v.u16", 65535);
    gguf_set_val_i16(file, "v.i16", -32768);
    gguf_set_val_u32(file, "v.u32", UINT32_MAX);
    gguf_set_val_i32(file, "v.i32", INT32_MIN);
    gguf_set_val_u64(file, "v.u64", UINT64_MAX);
    gguf_set_val_i64(file, "v.i64", INT64_MIN);
    gguf_set_val_f32(file, "v.f32", 1e-5f);
    gguf_set_val_f64(file, "v.f64", 0.1);
    gguf_set_val_bool(file, "v.true", true);
    gguf_set_val_bool(file, "v.false", false);
    gguf_set_val_str(file, "v.str", "{% if x %}\n\"\xe4\xbd\xa0\"{% endif %}");
    gguf_set_val_str(file, "v.empty", "");
    gguf_set_val_f32(file, "v.nan", strtof("nan", NULL));
    gguf_set_val_i64(file, "v.small64", 12);
    gguf_set_arr_str(file, "a.words", words, 5);
    gguf_set_arr_str(file, "a.no_words", words, 0);
    gguf_set_arr_data(file, "a.i32", GGUF_TYPE_INT32, ints, 6);
    gguf_set_arr_data(file, "a.u32", GGUF_TYPE_UINT32, uints, 3);
    gguf_set_arr_data(file, "a.f32", GGUF_TYPE_FLOAT32, floats, 3);
    gguf_set_arr_data(file, "a.no_f32", GGUF_TYPE_FLOAT32, floats, 0);
    gguf_set_arr_data(file, "a.u8", GGUF_TYPE_UINT8, "abc", 3);
    gguf_set_arr_data(file, "a.i64", GGUF_TYPE_INT64, (int64_t[]){-5, 6}, 2);
    gguf_set_arr_data(file, "a.bool", GGUF_TYPE_BOOL, "\1\0\1\0\1", 5);
    add_tensor(file, ctx, "t.f32", GGML_TYPE_F32, 1, (int64_t[]){5});
    add_tensor(file, ctx, "t.q4_1", GGML_TYPE_Q4_1, 2, (int64_t[]){64, 3});
    add_tensor(file, ctx, "t.f16", GGML_TYPE_F16, 3, (int64_t[]){3, 2, 2});
    add_tensor(file, ctx, "t.q6_K", GGML_TYPE_Q6_K, 4, (int64_t[]){256, 2, 1, 2});
    CHECK(gguf_write_to_file(file, path, false));
    gguf_free(file);
    ggml_free(ctx);
    return path;
}

/* ---- against ggml's reader ---- */

static void same_scalar(const paged__gguf *g, const struct gguf_context *want, int64_t id) {
    const char *key = gguf_get_key(want, id), *text = NULL, *type;
    paged_error err;
    uint32_t u = 0;
    float f = 0;
    bool b = false;
    char value[64], value_want[64] = "";
    CHECK(paged__gguf_key_at(g, (int32_t)id, &type, value, sizeof value));
    switch (gguf_get_kv_type(want, id)) {
    case GGUF_TYPE_UINT32:
        CHECK_EQ(paged__gguf_u32(g, key, true, 0, UINT32_MAX, &u, &err), PAGED_OK);
        CHECK_EQ(u, gguf_get_val_u32(want, id));
        snprintf(value_want, sizeof value_want, "%" PRIu32, u);
        break;
    case GGUF_TYPE_FLOAT32:
        f = gguf_get_val_f32(want, id);
        snprintf(value_want, sizeof value_want, "%.9g", (double)f);
        if (f != f) break; /* NaN is outside of every range */
        CHECK_EQ(paged__gguf_f32(g, key, true, -FLT_MAX, FLT_MAX, &f, &err), PAGED_OK);
        CHECK(f == gguf_get_val_f32(want, id));
        break;
    case GGUF_TYPE_BOOL:
        CHECK_EQ(paged__gguf_bool(g, key, true, &b, &err), PAGED_OK);
        CHECK_EQ(b, gguf_get_val_bool(want, id));
        snprintf(value_want, sizeof value_want, "%s", b ? "true" : "false");
        break;
    case GGUF_TYPE_STRING:
        CHECK_EQ(paged__gguf_str(g, key, true, &text, &err), PAGED_OK);
        CHECK_STR(text, gguf_get_val_str(want, id));
        return;
    case GGUF_TYPE_UINT8:
        snprintf(value_want, sizeof value_want, "%d", gguf_get_val_u8(want, id));
        break;
    case GGUF_TYPE_INT8:
        snprintf(value_want, sizeof value_want, "%d", gguf_get_val_i8(want, id));
        break;
    case GGUF_TYPE_UINT16:
        snprintf(value_want, sizeof value_want, "%d", gguf_get_val_u16(want, id));
        break;
    case GGUF_TYPE_INT16:
        snprintf(value_want, sizeof value_want, "%d", gguf_get_val_i16(want, id));
        break;
    case GGUF_TYPE_INT32:
        snprintf(value_want, sizeof value_want, "%d", gguf_get_val_i32(want, id));
        break;
    case GGUF_TYPE_UINT64:
        snprintf(value_want, sizeof value_want, "%" PRIu64, gguf_get_val_u64(want, id));
        break;
    case GGUF_TYPE_INT64:
        snprintf(value_want, sizeof value_want, "%" PRId64, gguf_get_val_i64(want, id));
        break;
    case GGUF_TYPE_FLOAT64:
        snprintf(value_want, sizeof value_want, "%.17g", gguf_get_val_f64(want, id));
        break;
    default:
        test_fail(__FILE__, __LINE__, "%s: a type that this test does not know", key);
    }
    CHECK_STR(value, value_want);
    CHECK_STR(type, gguf_type_name(gguf_get_kv_type(want, id)));
}

static void same_array(const paged__gguf *g, const struct gguf_context *want, int64_t id) {
    const char *key = gguf_get_key(want, id);
    const size_t n_want = gguf_get_arr_n(want, id);
    paged_error err;
    int64_t n = -1;
    const int32_t *ints;
    const float *floats;
    switch (gguf_get_arr_type(want, id)) {
    case GGUF_TYPE_STRING:
        CHECK_EQ(paged__gguf_arr_str(g, key, true, &n, &err), PAGED_OK);
        CHECK_EQ(n, n_want);
        for (int64_t i = 0; i < n; i++) {
            CHECK_STR(paged__gguf_arr_str_at(g, key, i), gguf_get_arr_str(want, id, (size_t)i));
            CHECK_EQ(paged__gguf_arr_str_bytes(g, key, i), strlen(paged__gguf_arr_str_at(g, key, i)));
        }
        break;
    case GGUF_TYPE_INT32:
    case GGUF_TYPE_UINT32:
        CHECK_EQ(paged__gguf_arr_i32(g, key, true, &ints, &n, &err), PAGED_OK);
        CHECK_EQ(n, n_want);
        CHECK((uintptr_t)ints % 4 == 0);
        CHECK(n == 0 || memcmp(ints, gguf_get_arr_data(want, id), 4 * n_want) == 0);
        break;
    case GGUF_TYPE_FLOAT32:
        CHECK_EQ(paged__gguf_arr_f32(g, key, true, &floats, &n, &err), PAGED_OK);
        CHECK_EQ(n, n_want);
        CHECK((uintptr_t)floats % 4 == 0);
        CHECK(n == 0 || memcmp(floats, gguf_get_arr_data(want, id), 4 * n_want) == 0);
        break;
    default:
        break; /* no getter, only printed */
    }
}

static void same_tensor(const paged__gguf *g, const struct gguf_context *want, int64_t id) {
    const paged__gguf_tensor *t = paged__gguf_find(g, gguf_get_tensor_name(want, id));
    size_t map_bytes;
    const uint8_t *map = paged__gguf_map(g, &map_bytes);
    CHECK(t && t == paged__gguf_tensor_at(g, (int32_t)id));
    CHECK_STR(t->name, gguf_get_tensor_name(want, id));
    CHECK_EQ(t->type, gguf_get_tensor_type(want, id));
    CHECK_EQ(t->size_bytes, gguf_get_tensor_size(want, id));
    for (int d = 0; d < 4; d++) CHECK_EQ(t->ne[d], gguf_get_tensor_ne(want, id)[d]);
    CHECK(t->n_dims == 4 || t->ne[t->n_dims] == 1);
    CHECK_EQ((const uint8_t *)t->data - map, gguf_get_data_offset(want) + gguf_get_tensor_offset(want, id));
}

/* Everything in the file at `path`, by both readers. */
static void same_as_ggml(const char *path) {
    struct gguf_context *want = gguf_init_from_file(path, (struct gguf_init_params){.no_alloc = true});
    struct stat info;
    CHECK(want && stat(path, &info) == 0);
    paged__gguf *g = open_file(path);
    CHECK_EQ(paged__gguf_file_bytes(g), info.st_size);
    CHECK_EQ(paged__gguf_n_keys(g), gguf_get_n_kv(want));
    CHECK_EQ(paged__gguf_n_tensors(g), gguf_get_n_tensors(want));
    for (int64_t id = 0; id < gguf_get_n_kv(want); id++) {
        const char *type;
        char value[64];
        CHECK_STR(paged__gguf_key_at(g, (int32_t)id, &type, value, sizeof value), gguf_get_key(want, id));
        if (gguf_get_kv_type(want, id) == GGUF_TYPE_ARRAY)
            same_array(g, want, id);
        else
            same_scalar(g, want, id);
    }
    size_t data_bytes = 0;
    for (int64_t id = 0; id < gguf_get_n_tensors(want); id++) {
        same_tensor(g, want, id);
        data_bytes += gguf_get_tensor_size(want, id);
    }
    CHECK_EQ(paged__gguf_data_bytes(g), data_bytes);
    paged__gguf_close(g);
    gguf_free(want);
}

static void all_types(void) {
    same_as_ggml(write_all_types());
}

static void data_is_the_tensors_bytes(void) {
    paged__gguf *g = open_file(write_all_types());
    const paged__gguf_tensor *t = paged__gguf_find(g, "t.q4_1");
    uint64_t seed = strlen("t.q4_1") + (uint64_t)'t' * 256 + (uint64_t)'1';
    CHECK(t);
    CHECK_EQ(t->size_bytes, 6 * 20);
    for (size_t i = 0; i < t->size_bytes; i++)
        CHECK_EQ(((const uint8_t *)t->data)[i], (uint8_t)paged__rand(&seed));
    CHECK(!paged__gguf_find(g, "t.q4") && !paged__gguf_find(g, "t.q4_11") && !paged__gguf_find(g, ""));
    paged__gguf_close(g);
}

static void nothing_in_it(void) {
    const char *path = path_of("empty.gguf");
    struct gguf_context *file = gguf_init_empty();
    CHECK(gguf_write_to_file(file, path, false));
    gguf_free(file);
    same_as_ggml(path);
    paged__gguf *g = open_file(path);
    CHECK(!paged__gguf_find(g, "x") && !paged__gguf_has(g, "x"));
    paged__gguf_close(g);
    paged__gguf_close(NULL);
}

static void random_files(void) {
    static const enum ggml_type types[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16,  GGML_TYPE_Q4_0,
                                           GGML_TYPE_Q4_K, GGML_TYPE_Q8_0, GGML_TYPE_IQ4_NL};
    uint64_t seed = test_seed;
    for (int i = 0; i < 40; i++) {
        const char *path = path_of("random.gguf");
        struct ggml_context *ctx = tensor_context();
        struct gguf_context *file = gguf_init_empty();
        const uint64_t n_keys = paged__rand(&seed) % 300, n_tensors = paged__rand(&seed) % 300;
        char name[40];
        for (uint64_t k = 0; k < n_keys; k++) {
            const uint64_t v = paged__rand(&seed);
            snprintf(name, sizeof name, "k.%" PRIx64, paged__rand(&seed) >> (v % 60));
            if (v % 4 == 0)
                gguf_set_val_u32(file, name, (uint32_t)v);
            else if (v % 4 == 1)
                gguf_set_val_i16(file, name, (int16_t)(v >> 3));
            else if (v % 4 == 2)
                gguf_set_val_str(file, name, name + v / 4 % 3);
            else
                gguf_set_arr_data(file, name, GGUF_TYPE_INT32, &v, v / 4 % 3);
        }
        for (uint64_t k = 0; k < n_tensors; k++) {
            const enum ggml_type type = types[paged__rand(&seed) % 7];
            const int64_t block = ggml_blck_size(type);
            const int64_t ne[4] = {block * (1 + (int64_t)(paged__rand(&seed) % 3)),
                                   1 + (int64_t)(paged__rand(&seed) % 4),
                                   1 + (int64_t)(paged__rand(&seed) % 2), 1};
            snprintf(name, sizeof name, "%" PRIx64 ".%" PRIu64, paged__rand(&seed) & 255, k);
            add_tensor(file, ctx, name, type, 4, ne);
        }
        CHECK(gguf_write_to_file(file, path, false));
        gguf_free(file);
        ggml_free(ctx);
        same_as_ggml(path);
    }
}

/* ---- questions that are refused ---- */

static void u32_from_any_integer(void) {
    paged__gguf *g = open_file(write_all_types());
    paged_error err;
    uint32_t u = 77;
    CHECK_EQ(paged__gguf_u32(g, "v.u8", true, 0, 255, &u, &err), PAGED_OK);
    CHECK_EQ(u, 255);
    CHECK_EQ(paged__gguf_u32(g, "v.u16", true, 0, 65535, &u, &err), PAGED_OK);
    CHECK_EQ(u, 65535);
    CHECK_EQ(paged__gguf_u32(g, "v.small64", true, 12, 12, &u, &err), PAGED_OK);
    CHECK_EQ(u, 12);
    static const struct {
        const char *key, *value;
    } outside[] = {{"v.i8", "-128"},
                   {"v.i16", "-32768"},
                   {"v.i32", "-2147483648"},
                   {"v.i64", "-9223372036854775808"},
                   {"v.u64", "18446744073709551615"}};
    for (int i = 0; i < 5; i++) {
        CHECK_EQ(paged__gguf_u32(g, outside[i].key, false, 0, UINT32_MAX, &u, &err), PAGED_ERR_FORMAT);
        CHECK(strstr(err.message, outside[i].key) && strstr(err.message, outside[i].value));
    }
    CHECK_EQ(paged__gguf_u32(g, "v.u8", true, 0, 254, &u, &err), PAGED_ERR_FORMAT);
    CHECK(strstr(err.message, "all.gguf: key 'v.u8': 255 is outside 0 to 254"));
    CHECK_EQ(paged__gguf_u32(g, "v.u8", true, 256, 300, &u, NULL), PAGED_ERR_FORMAT);
    CHECK_EQ(u, 12);
    paged__gguf_close(g);
}

static void wrong_types_and_absent_keys(void) {
    paged__gguf *g = open_file(write_all_types());
    paged_error err;
    uint32_t u = 1;
    float f = 2;
    bool b = true;
    const char *text = "x";
    const int32_t *ints = (const int32_t *)&u;
    const float *floats = &f;
    int64_t n = -1;
    CHECK_EQ(paged__gguf_u32(g, "v.str", true, 0, 9, &u, &err), PAGED_ERR_FORMAT);
    CHECK(strstr(err.message, "key 'v.str': its type is str, not an integer"));
    CHECK_EQ(paged__gguf_u32(g, "v.f32", true, 0, 9, &u, &err), PAGED_ERR_FORMAT);
    CHECK_EQ(paged__gguf_u32(g, "v.true", true, 0, 9, &u, &err), PAGED_ERR_FORMAT);
    CHECK_EQ(paged__gguf_u32(g, "a.u32", true, 0, 9, &u, &err), PAGED_ERR_FORMAT);
    CHECK(strstr(err.message, "[u32]"));
    CHECK_EQ(paged__gguf_f32(g, "v.f64", true, 0, 9, &f, &err), PAGED_ERR_FORMAT);
    CHECK_EQ(paged__gguf_f32(g, "v.nan", true, -3e38f, 3e38f, &f, &err), PAGED_ERR_FORMAT);
    CHECK(strstr(err.message, "key 'v.nan': nan is outside"));
    CHECK_EQ(paged__gguf_f32(g, "v.f32", true, 1e-4f, 1, &f, &err), PAGED_ERR_FORMAT);
    CHECK_EQ(paged__gguf_bool(g, "v.u8", true, &b, &err), PAGED_ERR_FORMAT);
    CHECK_EQ(paged__gguf_str(g, "a.words", true, &text, &err), PAGED_ERR_FORMAT);
    CHECK_EQ(paged__gguf_arr_i32(g, "a.f32", true, &ints, &n, &err), PAGED_ERR_FORMAT);
    CHECK_EQ(paged__gguf_arr_f32(g, "a.i32", true, &floats, &n, &err), PAGED_ERR_FORMAT);
    CHECK_EQ(paged__gguf_arr_i32(g, "a.i64", true, &ints, &n, &err), PAGED_ERR_FORMAT);
    CHECK_EQ(paged__gguf_arr_str(g, "v.str", true, &n, &err), PAGED_ERR_FORMAT);
    CHECK_EQ(paged__gguf_u32(g, "no.such", true, 0, 9, &u, &err), PAGED_ERR_FORMAT);
    CHECK(strstr(err.message, "all.gguf: key 'no.such': it is missing"));
    CHECK_EQ(paged__gguf_arr_str(g, "no.such", true, &n, &err), PAGED_ERR_FORMAT);
    CHECK_EQ(n, -1); /* untouched by all of these */
    CHECK_EQ(paged__gguf_u32(g, "no.such", false, 0, 9, &u, &err), PAGED_OK);
    CHECK_EQ(paged__gguf_f32(g, "no.such", false, 0, 9, &f, &err), PAGED_OK);
    CHECK_EQ(paged__gguf_bool(g, "no.such", false, &b, &err), PAGED_OK);
    CHECK_EQ(paged__gguf_str(g, "no.such", false, &text, &err), PAGED_OK);
    CHECK_EQ(paged__gguf_arr_i32(g, "no.such", false, &ints, &n, &err), PAGED_OK);
    CHECK(u == 1 && f == 2 && b && strcmp(text, "x") == 0 && floats == &f && n == 0);
    paged__gguf_close(g);
}

static void printed_values(void) {
    static const char *want[][3] = {
        {"a.words", "[str]", "5: <s>, , \\xc4\\xa0the, line\\x0abreak, ..."},
        {"a.i32", "[i32]", "6: 1, -1, -2147483648, 2147483647, ..."},
        {"a.u8", "[u8]", "3: 97, 98, 99"},
        {"a.bool", "[bool]", "5: true, false, true, false, ..."},
        {"a.no_f32", "[f32]", "0"},
        {"v.str", "str", "{% if x %}\\x0a\"\\xe4\\xbd\\xa0\"{% endif %}"},
    };
    paged__gguf *g = open_file(write_all_types());
    int n_found = 0;
    for (int32_t i = 0; i < paged__gguf_n_keys(g); i++) {
        const char *type;
        char value[80], cut[12];
        const char *key = paged__gguf_key_at(g, i, &type, value, sizeof value);
        for (size_t k = 0; k < sizeof want / sizeof want[0]; k++) {
            if (strcmp(key, want[k][0]) != 0) continue;
            CHECK_STR(type, want[k][1]);
            CHECK_STR(value, want[k][2]);
            n_found++;
        }
        paged__gguf_key_at(g, i, &type, cut, sizeof cut);
        CHECK(strlen(cut) < sizeof cut);
        if (strcmp(key, "v.str") == 0) CHECK_STR(cut, "{% if x ...");
    }
    CHECK_EQ(n_found, 6);
    paged__gguf_close(g);
}

static void not_a_file(void) {
    char long_path[400];
    paged_error err;
    paged__gguf *g = NULL;
    CHECK_EQ(paged__gguf_open(path_of("no-such-file"), &g, &err), PAGED_ERR_IO);
    CHECK(strstr(err.message, "no-such-file: No such file"));
    CHECK_EQ(paged__gguf_open(folder, &g, &err), PAGED_ERR_IO);
    CHECK(strstr(err.message, "directory"));
    const char *fifo = path_of("fifo");
    CHECK(mkfifo(fifo, 0600) == 0);
    CHECK_EQ(paged__gguf_open(fifo, &g, &err), PAGED_ERR_IO);
    CHECK(strstr(err.message, "fifo: not a regular file"));
    unlink(fifo);
    /* A long path is shown from its end, so that the reason still fits. */
    snprintf(long_path, sizeof long_path, "%s/%.*d-empty-file", folder, 200, 0);
    FILE *f = fopen(long_path, "w");
    CHECK(f && fclose(f) == 0);
    CHECK_EQ(paged__gguf_open(long_path, &g, &err), PAGED_ERR_FORMAT);
    CHECK(strstr(err.message,
                 "0-empty-file: header: the file ends too early: 4 bytes needed at offset 0 of 0"));
    unlink(long_path);
    CHECK(!g);
}

/* ---- the real model ---- */

static void real_model(void) {
    const char *path = getenv("PAGED_MODEL");
    if (!path) {
        printf("real_model: skipped, PAGED_MODEL is not set\n");
        return;
    }
    same_as_ggml(path);
}

/* Last: takes the files away. */
static void clean_up(void) {
    static const char *const names[] = {"all.gguf", "empty.gguf", "random.gguf"};
    for (int i = 0; i < 3; i++) unlink(path_of(names[i]));
    CHECK(rmdir(folder) == 0 || errno == ENOTEMPTY);
}

#define TESTS(X)                                                                                             \
    X(all_types)                                                                                             \
    X(data_is_the_tensors_bytes)                                                                             \
    X(nothing_in_it)                                                                                         \
    X(random_files)                                                                                          \
    X(u32_from_any_integer)                                                                                  \
    X(wrong_types_and_absent_keys)                                                                           \
    X(printed_values)                                                                                        \
    X(not_a_file)                                                                                            \
    X(real_model)                                                                                            \
    X(clean_up)
TEST_MAIN(TESTS)
