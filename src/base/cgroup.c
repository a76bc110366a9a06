/* cgroup.c: the CPU quota and the memory limit of this process.
 *
 *   /proc/self/cgroup     "5:cpu,cpuacct:/a/b"  (v1)    "0::/a/b" (v2)   the group: a path in its hierarchy
 *   /proc/self/mountinfo  "… ROOT MOUNTPOINT … - cgroup2 … rw,…"      where its part below ROOT is
 *
 * From MOUNTPOINT/a/b up to MOUNTPOINT each directory may hold a limit; the tightest counts. What cannot
 * be read or parsed is no quota: a wrong guess must not keep a program from starting. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/base.h"
#include "base/cgroup.h"

struct line_reader {
    FILE *file;
    char text[PATH_MAX + 512];
};

/* The next line without its newline; lines that do not fit are skipped. */
static bool next_line(struct line_reader *reader) {
    bool rest = false;
    while (fgets(reader->text, (int)sizeof reader->text, reader->file)) {
        char *end = strchr(reader->text, '\n');
        bool whole = end && !rest;
        rest = !end;
        if (!whole) continue;
        *end = '\0';
        return true;
    }
    return false;
}

static bool open_lines(struct line_reader *reader, const char *root, const char *path) {
    if (snprintf(reader->text, sizeof reader->text, "%s%s", root, path) >= (int)sizeof reader->text)
        return false;
    reader->file = fopen(reader->text, "re");
    return reader->file != NULL;
}

/* True if `word` is an element of a comma-separated list. */
static bool has_word(const char *list, const char *word) {
    size_t n = strlen(word);
    for (const char *p = list; p; p = strchr(p, ',')) {
        p += *p == ',';
        if (strncmp(p, word, n) == 0 && (p[n] == '\0' || p[n] == ',')) return true;
    }
    return false;
}

/* Writes the group's path ("/a/b") for the v2 hierarchy or for a controller of v1. */
static bool find_group(const char *root, bool v2, const char *controller, char *out, size_t out_bytes) {
    struct line_reader reader;
    bool found = false;
    if (!open_lines(&reader, root, "/proc/self/cgroup")) return false;
    while (!found && next_line(&reader)) {
        char *controllers = strchr(reader.text, ':');
        char *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path) continue;
        *path++ = '\0';
        controllers++;
        found = v2 ? *controllers == '\0' : has_word(controllers, controller);
        found = found && *path == '/' && snprintf(out, out_bytes, "%s", path) < (int)out_bytes;
    }
    fclose(reader.file);
    return found;
}

/* Writes the mount point of the hierarchy and which of its directories is mounted there. */
static bool find_mount(const char *root, bool v2, const char *controller, char *mount_root, char *mount_point,
                       size_t out_bytes) {
    struct line_reader reader;
    bool found = false;
    if (!open_lines(&reader, root, "/proc/self/mountinfo")) return false;
    while (!found && next_line(&reader)) {
        char *field[5], *save = NULL;
        char *tail = strstr(reader.text, " - ");
        if (!tail) continue;
        *tail = '\0';
        int n = 0; /* id, parent, device, root, mount point */
        for (char *p = strtok_r(reader.text, " ", &save); p && n < 5; p = strtok_r(NULL, " ", &save))
            field[n++] = p;
        char *type = strtok_r(tail + 3, " ", &save), *options = NULL;
        if (type && strtok_r(NULL, " ", &save)) options = strtok_r(NULL, " ", &save);
        if (n < 5 || !options || strcmp(type, v2 ? "cgroup2" : "cgroup") != 0) continue;
        found = (v2 || has_word(options, controller)) &&
                snprintf(mount_root, out_bytes, "%s", field[3]) < (int)out_bytes &&
                snprintf(mount_point, out_bytes, "%s", field[4]) < (int)out_bytes;
    }
    fclose(reader.file);
    return found;
}

static bool read_line(const char *root, const char *dir, const char *name, char *out, size_t out_bytes) {
    char path[2 * PATH_MAX];
    if (snprintf(path, sizeof path, "%s%s/%s", root, dir, name) >= (int)sizeof path) return false;
    FILE *file = fopen(path, "re");
    if (!file) return false;
    bool ok = fgets(out, (int)out_bytes, file) != NULL;
    fclose(file);
    return ok;
}

/* What one directory allows; INT64_MAX: no limit. */
typedef int64_t limit_fn(const char *root, const char *dir, bool v2);

/* CPUs */
static int64_t cpus_of(const char *root, const char *dir, bool v2) {
    char text[64], period_text[64];
    char *end;
    long long quota, period;
    if (!read_line(root, dir, v2 ? "cpu.max" : "cpu.cfs_quota_us", text, sizeof text)) return INT64_MAX;
    quota = strtoll(text, &end, 10);
    if (end == text) return INT64_MAX; /* "max 100000" */
    if (v2) {
        period = strtoll(end, NULL, 10);
    } else {
        if (!read_line(root, dir, "cpu.cfs_period_us", period_text, sizeof period_text)) return INT64_MAX;
        period = strtoll(period_text, NULL, 10);
    }
    if (quota <= 0 || period <= 0) return INT64_MAX; /* v1 says -1 for none */
    return quota / period + (quota % period != 0);
}

static bool read_bytes(const char *root, const char *dir, const char *name, int64_t *out) {
    char text[64], *end;
    if (!read_line(root, dir, name, text, sizeof text)) return false;
    *out = strtoll(text, &end, 10);
    return end != text && *out >= 0; /* not "max" */
}

/* Pages of files that nobody has used for long: the group gives them back when it needs memory. */
static int64_t reclaimable(const char *root, const char *dir, bool v2) {
    const char *key = v2 ? "inactive_file " : "total_inactive_file ";
    char path[2 * PATH_MAX], line[128];
    int64_t bytes = 0;
    if (snprintf(path, sizeof path, "%s%s/memory.stat", root, dir) >= (int)sizeof path) return 0;
    FILE *file = fopen(path, "re");
    if (!file) return 0;
    while (fgets(line, (int)sizeof line, file))
        if (strncmp(line, key, strlen(key)) == 0) bytes = strtoll(line + strlen(key), NULL, 10);
    fclose(file);
    return PAGED_MAX(bytes, 0);
}

/* Bytes that may still be taken. */
static int64_t memory_of(const char *root, const char *dir, bool v2) {
    int64_t limit, used;
    if (!read_bytes(root, dir, v2 ? "memory.max" : "memory.limit_in_bytes", &limit) ||
        !read_bytes(root, dir, v2 ? "memory.current" : "memory.usage_in_bytes", &used))
        return INT64_MAX;
    used -= PAGED_MIN(used, reclaimable(root, dir, v2));
    return limit > used ? limit - used : 0;
}

/* The least that the group and its ancestors allow. */
static int64_t least(const char *root, bool v2, const char *controller, limit_fn *limit_of) {
    char group[PATH_MAX], mount_root[PATH_MAX], mount_point[PATH_MAX], dir[2 * PATH_MAX];
    int64_t n = INT64_MAX;
    if (!find_group(root, v2, controller, group, sizeof group)) return n;
    if (!find_mount(root, v2, controller, mount_root, mount_point, sizeof group)) return n;
    /* A container sees its own group mounted as the whole hierarchy, while the path still counts from the
     * host's root. */
    size_t n_root = strcmp(mount_root, "/") == 0 ? 0 : strlen(mount_root);
    bool below = strncmp(group, mount_root, n_root) == 0 && (group[n_root] == '/' || group[n_root] == '\0');
    snprintf(dir, sizeof dir, "%s%s", mount_point, below ? group + n_root : "");
    size_t n_mount = strlen(mount_point);
    for (;;) {
        int64_t here = limit_of(root, dir, v2);
        n = PAGED_MIN(n, here);
        char *slash = strrchr(dir, '/');
        if (!slash || (size_t)(slash - dir) < n_mount) break;
        *slash = '\0';
    }
    return n;
}

static int64_t least_of_both(const char *root, const char *controller, limit_fn *limit_of) {
    int64_t v1 = least(root, false, controller, limit_of), v2 = least(root, true, controller, limit_of);
    return PAGED_MIN(v1, v2);
}

int32_t paged__cgroup_cpus(const char *root) {
    return (int32_t)PAGED_MIN(least_of_both(root, "cpu", cpus_of), (int64_t)INT32_MAX);
}

int64_t paged__cgroup_memory(const char *root) {
    return least_of_both(root, "memory", memory_of);
}
