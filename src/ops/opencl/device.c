/* opencl/device.c: which devices there are; open and close; buffers; programs, and where they are kept. */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ops/opencl/cl.h"

enum { PLATFORMS_MAX = 16, DEVICES_MAX = 64, PATH_BYTES = 4096 };

paged_status paged__cl_fail(paged_error *err, const char *what, int32_t code) {
    const bool no_memory = code == CL_MEM_OBJECT_ALLOCATION_FAILURE || code == CL_OUT_OF_HOST_MEMORY ||
                           code == CL_OUT_OF_RESOURCES;
    return paged__fail(err, no_memory ? PAGED_ERR_NO_MEMORY : PAGED_ERR_IO, "OpenCL: %s: %s (%d)", what,
                       paged__cl_error_name(code), code);
}

/* ---- devices ---- */

typedef struct found {
    cl_platform_id platform;
    cl_device_id device;
} found;

static void get_text(const paged__cl_api *api, const found *f, uint32_t what, char *to, size_t capacity) {
    const bool of_platform = what == CL_PLATFORM_NAME || what == CL_PLATFORM_VERSION;
    const int32_t code = of_platform ? api->GetPlatformInfo(f->platform, what, capacity, to, NULL)
                                     : api->GetDeviceInfo(f->device, what, capacity, to, NULL);
    if (code != CL_SUCCESS) to[0] = 0;
    to[capacity - 1] = 0;
}

/* A number of the device, of 4 or 8 bytes; 0: it does not say. */
static uint64_t get_number(const paged__cl_api *api, const found *f, uint32_t what) {
    uint64_t number = 0;
    return api->GetDeviceInfo(f->device, what, sizeof number, &number, NULL) == CL_SUCCESS ? number : 0;
}

/* Of all platforms, in the order of the loader. */
static int32_t find_devices(const paged__cl_api *api, found *out, int32_t capacity) {
    cl_platform_id platforms[PLATFORMS_MAX];
    uint32_t n_platforms = 0;
    int32_t n = 0;
    if (api->GetPlatformIDs(PLATFORMS_MAX, platforms, &n_platforms) != CL_SUCCESS) return 0;
    for (uint32_t p = 0; p < PAGED_MIN(n_platforms, (uint32_t)PLATFORMS_MAX); p++) {
        cl_device_id devices[DEVICES_MAX];
        uint32_t n_devices = 0;
        if (api->GetDeviceIDs(platforms[p], CL_DEVICE_TYPE_ALL, DEVICES_MAX, devices, &n_devices) !=
            CL_SUCCESS)
            continue;
        for (uint32_t d = 0; d < PAGED_MIN(n_devices, (uint32_t)DEVICES_MAX); d++)
            if (n < capacity) out[n++] = (found){platforms[p], devices[d]};
    }
    return n;
}

static void describe(const paged__cl_api *api, const found *f, paged_cl_device *out) {
    char platform[64], device[128];
    get_text(api, f, CL_PLATFORM_NAME, platform, sizeof platform);
    get_text(api, f, CL_DEVICE_NAME, device, sizeof device);
    *out = (paged_cl_device){
        .is_cpu = get_number(api, f, CL_DEVICE_TYPE) & CL_DEVICE_TYPE_CPU,
        .n_units = (int32_t)get_number(api, f, CL_DEVICE_MAX_COMPUTE_UNITS),
        .memory_bytes = get_number(api, f, CL_DEVICE_GLOBAL_MEM_SIZE),
        .max_alloc_bytes = get_number(api, f, CL_DEVICE_MAX_MEM_ALLOC_SIZE),
    };
    snprintf(out->name, sizeof out->name, "%s: %s", platform, device);
    get_text(api, f, CL_DRIVER_VERSION, out->driver, sizeof out->driver);
}

int32_t paged_cl_list(paged_cl_device *out, int32_t capacity) {
    const paged__cl_api *api = paged__cl_api_open(NULL);
    found all[DEVICES_MAX];
    if (!api) return 0;
    const int32_t n = find_devices(api, all, DEVICES_MAX);
    for (int32_t i = 0; i < PAGED_MIN(n, capacity); i++) describe(api, &all[i], &out[i]);
    return n;
}

/* ---- open ---- */

static bool contains(const char *text, const char *part) {
    const size_t n = strlen(part);
    for (; *text; text++)
        if (strncasecmp(text, part, n) == 0) return true;
    return false;
}

/* By number, or by a part of the name. */
static bool is_wanted(const paged_cl_device *device, int32_t i, const char *wanted) {
    char *end;
    if (!wanted || !*wanted) return i == 0;
    const long number = strtol(wanted, &end, 10);
    return *end == 0 ? number == i : contains(device->name, wanted);
}

static paged_status choose(const paged__cl_api *api, const char *wanted, found *out, paged_cl_device *info,
                           paged_error *err) {
    found all[DEVICES_MAX];
    const int32_t n = find_devices(api, all, DEVICES_MAX);
    for (int32_t i = 0; i < n; i++) {
        describe(api, &all[i], info);
        if (!is_wanted(info, i, wanted)) continue;
        *out = all[i];
        if (get_number(api, out, CL_DEVICE_ADDRESS_BITS) < 64 ||
            !get_number(api, out, CL_DEVICE_ENDIAN_LITTLE) || !get_number(api, out, CL_DEVICE_AVAILABLE) ||
            !get_number(api, out, CL_DEVICE_COMPILER_AVAILABLE))
            return paged__fail(err, PAGED_ERR_UNSUPPORTED,
                               "OpenCL device %d (%s) is not a little-endian one of 64 bits with a compiler",
                               i, info->name);
        return PAGED_OK;
    }
    return paged__fail(err, PAGED_ERR_UNSUPPORTED, "no OpenCL device \"%s\" among %d", wanted ? wanted : "0",
                       n);
}

/* The folder of programs, made if it is not there; NULL: there is none. */
static char *make_cache_dir(const char *wanted) {
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    char path[PATH_BYTES];
    int n = 0;
    if (wanted)
        n = snprintf(path, sizeof path, "%s", wanted);
    else if (xdg && *xdg == '/')
        n = snprintf(path, sizeof path, "%s/paged", xdg);
    else if (home && *home == '/')
        n = snprintf(path, sizeof path, "%s/.cache/paged", home);
    if (n <= 0 || (size_t)n >= sizeof path) return NULL;
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(path, 0700); /* what is there is fine; the last one decides */
        *slash = '/';
    }
    if (mkdir(path, 0700) != 0 && errno != EEXIST) return NULL;
    char *copy = paged__alloc((size_t)n + 1, 1);
    if (copy) memcpy(copy, path, (size_t)n + 1);
    return copy;
}

static paged_status open_device(paged_cl *cl, const char *wanted, paged_error *err) {
    found f;
    int32_t code;
    paged_status s = choose(cl->api, wanted, &f, &cl->info, err);
    if (s) return s;
    cl->device = f.device;
    get_text(cl->api, &f, CL_PLATFORM_VERSION, cl->platform_version, sizeof cl->platform_version);
    cl->divides_exactly =
        get_number(cl->api, &f, CL_DEVICE_SINGLE_FP_CONFIG) & CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT;
    cl->context = cl->api->CreateContext(NULL, 1, &cl->device, NULL, NULL, &code);
    if (!cl->context) return paged__cl_fail(err, "clCreateContext", code);
    cl->compute = cl->api->CreateCommandQueue(cl->context, cl->device, 0, &code);
    if (!cl->compute) return paged__cl_fail(err, "clCreateCommandQueue", code);
    cl->moves = cl->api->CreateCommandQueue(cl->context, cl->device, 0, &code);
    return cl->moves ? PAGED_OK : paged__cl_fail(err, "clCreateCommandQueue", code);
}

paged_status paged_cl_open(const paged_cl_config *config, paged_cl **out, paged_error *err) {
    const char *why;
    if (!config || !out)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "%s is NULL", config ? "out" : "config");
    if (config->struct_size != sizeof *config)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "struct_size is %zu, not %zu", config->struct_size,
                           sizeof *config);
    const paged__cl_api *api = paged__cl_api_open(&why);
    if (!api) return paged__fail(err, PAGED_ERR_UNSUPPORTED, "no OpenCL here: %s is missing", why);
    paged_cl *cl = paged__calloc(1, sizeof *cl);
    if (!cl) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for an OpenCL device");
    cl->api = api;
    paged_status s = open_device(cl, config->device, err);
    if (s) {
        paged_cl_close(cl);
        return s;
    }
    if (!config->cache_dir || *config->cache_dir) cl->cache_dir = make_cache_dir(config->cache_dir);
    *out = cl;
    return PAGED_OK;
}

void paged_cl_close(paged_cl *cl) {
    if (!cl) return;
    if (cl->moves) cl->api->ReleaseCommandQueue(cl->moves);
    if (cl->compute) cl->api->ReleaseCommandQueue(cl->compute);
    if (cl->context) cl->api->ReleaseContext(cl->context);
    paged__free(cl->cache_dir);
    paged__free(cl);
}

const paged_cl_device *paged_cl_get_device(const paged_cl *cl) {
    return &cl->info;
}

void paged_cl_get_stats(const paged_cl *cl, paged_cl_stats *out) {
    *out = cl->stats;
}

/* ---- buffers ---- */

void paged__cl_buffer_free(paged_cl *cl, paged__cl_buffer *buffer, size_t *kind) {
    if (buffer->mem) cl->api->ReleaseMemObject(buffer->mem);
    *kind -= buffer->size_bytes;
    *buffer = (paged__cl_buffer){0};
}

paged_status paged__cl_buffer_reserve(paged_cl *cl, paged__cl_buffer *buffer, size_t size_bytes, size_t *kind,
                                      paged_error *err) {
    int32_t code = CL_SUCCESS;
    if (buffer->mem && buffer->size_bytes >= size_bytes) return PAGED_OK;
    /* Half as much again, so that growth by a token does not take a buffer each time. */
    size_t wanted = PAGED_MAX(size_bytes, buffer->size_bytes + buffer->size_bytes / 2);
    wanted = PAGED_MAX(PAGED_MIN(wanted, cl->info.max_alloc_bytes), 256);
    paged__cl_buffer_free(cl, buffer, kind);
    if (size_bytes <= wanted)
        buffer->mem = cl->api->CreateBuffer(cl->context, CL_MEM_READ_WRITE, wanted, NULL, &code);
    if (!buffer->mem)
        return paged__fail(err, PAGED_ERR_NO_MEMORY,
                           "OpenCL: a buffer of %zu bytes (%d); the device gives %zu at once, and has %zu",
                           size_bytes, code, cl->info.max_alloc_bytes, cl->info.memory_bytes);
    buffer->size_bytes = wanted;
    *kind += wanted;
    return PAGED_OK;
}

paged_status paged__cl_buffer_send(paged_cl *cl, paged__cl_buffer *buffer, const void *data,
                                   size_t size_bytes, size_t *kind, paged_error *err) {
    paged_status s = paged__cl_buffer_reserve(cl, buffer, size_bytes, kind, err);
    if (s || size_bytes == 0) return s;
    const int32_t code =
        cl->api->EnqueueWriteBuffer(cl->compute, buffer->mem, CL_TRUE, 0, size_bytes, data, 0, NULL, NULL);
    if (code != CL_SUCCESS) return paged__cl_fail(err, "clEnqueueWriteBuffer", code);
    cl->stats.sent_bytes += size_bytes;
    return PAGED_OK;
}

/* ---- programs ----
 *
 * A file is a head and the driver's binary. It is used only if it says that it is of this device, driver,
 * source and these options, and if its bytes are those that were written: drivers trust what they are given.
 * A file that anything is wrong with is built anew and replaced. */

typedef struct file_head {
    char magic[8];
    uint64_t key[2];
    uint64_t size_bytes, sum; /* of what follows */
} file_head;

static const char file_magic[8] = "pagedcl1";

static uint64_t hash_bytes(uint64_t hash, const void *data, size_t n) {
    const uint8_t *bytes = data;
    for (size_t i = 0; i < n; i += 8) {
        uint64_t word = 0;
        memcpy(&word, bytes + i, PAGED_MIN(n - i, (size_t)8));
        hash = paged__mix(hash ^ word);
    }
    return paged__mix(hash ^ n);
}

static void make_key(const paged_cl *cl, const char *options, uint64_t key[2]) {
    const char *const texts[] = {cl->info.name, cl->info.driver, cl->platform_version, options};
    for (int32_t i = 0; i < 2; i++) {
        key[i] = hash_bytes((uint64_t)i, paged__cl_source, paged__cl_source_bytes);
        for (size_t t = 0; t < sizeof texts / sizeof texts[0]; t++)
            key[i] = hash_bytes(key[i], texts[t], strlen(texts[t]));
    }
}

static bool file_path(const paged_cl *cl, const uint64_t key[2], char *path) {
    return cl->cache_dir && snprintf(path, PATH_BYTES, "%s/opencl-%016llx.bin", cl->cache_dir,
                                     (unsigned long long)key[0]) < PATH_BYTES;
}

static bool file_is_good(const paged__file_map *map, const uint64_t key[2]) {
    file_head head;
    if (map->size_bytes < sizeof head) return false;
    memcpy(&head, map->data, sizeof head);
    return memcmp(head.magic, file_magic, sizeof head.magic) == 0 &&
           memcmp(head.key, key, sizeof head.key) == 0 && head.size_bytes == map->size_bytes - sizeof head &&
           head.sum == hash_bytes(0, map->data + sizeof head, map->size_bytes - sizeof head);
}

static cl_program load(paged_cl *cl, const char *options) {
    uint64_t key[2];
    char path[PATH_BYTES];
    paged__file_map map;
    make_key(cl, options, key);
    if (!file_path(cl, key, path) || paged__file_map_open(path, &map, NULL) != PAGED_OK) return NULL;
    cl_program program = NULL;
    if (file_is_good(&map, key)) {
        const size_t n = map.size_bytes - sizeof(file_head);
        const unsigned char *binary = map.data + sizeof(file_head);
        int32_t code, taken;
        program = cl->api->CreateProgramWithBinary(cl->context, 1, &cl->device, &n, &binary, &taken, &code);
        if (program && cl->api->BuildProgram(program, 1, &cl->device, options, NULL, NULL) != CL_SUCCESS) {
            cl->api->ReleaseProgram(program);
            program = NULL;
        }
    }
    paged__file_map_close(&map);
    return program;
}

static paged_status build(paged_cl *cl, const char *options, cl_program *out, paged_error *err) {
    const char *source = paged__cl_source;
    int32_t code;
    *out = cl->api->CreateProgramWithSource(cl->context, 1, &source, &paged__cl_source_bytes, &code);
    if (!*out) return paged__cl_fail(err, "clCreateProgramWithSource", code);
    code = cl->api->BuildProgram(*out, 1, &cl->device, options, NULL, NULL);
    if (code == CL_SUCCESS) return PAGED_OK;
    char log[4096] = "";
    cl->api->GetProgramBuildInfo(*out, cl->device, CL_PROGRAM_BUILD_LOG, sizeof log, log, NULL);
    log[sizeof log - 1] = 0;
    for (char *c = log; *c; c++)
        if (*c == '\n') *c = ' ';
    cl->api->ReleaseProgram(*out);
    *out = NULL;
    return paged__fail(err, PAGED_ERR_UNSUPPORTED, "OpenCL: %s does not build the kernels (%d): %.300s",
                       cl->info.name, code, log);
}

paged_status paged__cl_program_build(paged_cl *cl, const char *options, cl_program *out, bool *from_cache,
                                     paged_error *err) {
    paged_status s = PAGED_OK;
    *out = load(cl, options);
    *from_cache = *out != NULL;
    if (!*out) s = build(cl, options, out, err);
    cl->stats.n_loaded += *from_cache;
    cl->stats.n_built += !s && !*from_cache;
    return s;
}

/* All or nothing: another process may read it at any time. */
static void write_file(const char *path, const file_head *head, const unsigned char *binary) {
    char temporary[PATH_BYTES + 16];
    snprintf(temporary, sizeof temporary, "%s.XXXXXX", path);
    const int fd = mkstemp(temporary);
    FILE *file = fd >= 0 ? fdopen(fd, "wb") : NULL;
    if (!file) {
        if (fd >= 0) close(fd);
        return;
    }
    bool ok = fwrite(head, sizeof *head, 1, file) == 1 &&
              fwrite(binary, 1, head->size_bytes, file) == head->size_bytes;
    ok = fclose(file) == 0 && ok;
    if (!ok || rename(temporary, path) != 0) unlink(temporary);
}

void paged__cl_program_keep(paged_cl *cl, const char *options, cl_program program) {
    file_head head = {0};
    char path[PATH_BYTES];
    size_t n = 0;
    memcpy(head.magic, file_magic, sizeof head.magic);
    make_key(cl, options, head.key);
    if (!file_path(cl, head.key, path) ||
        cl->api->GetProgramInfo(program, CL_PROGRAM_BINARY_SIZES, sizeof n, &n, NULL) != CL_SUCCESS || n == 0)
        return;
    unsigned char *binary = paged__alloc(n, 1);
    if (binary &&
        cl->api->GetProgramInfo(program, CL_PROGRAM_BINARIES, sizeof binary, &binary, NULL) == CL_SUCCESS) {
        head.size_bytes = n;
        head.sum = hash_bytes(0, binary, n);
        write_file(path, &head, binary);
    }
    paged__free(binary);
}
