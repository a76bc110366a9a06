/* cgroup.c: the CPU quota of this process.
 *
 *   /proc/self/cgroup     "5:cpu,cpuacct:/a/b"  (v1)    "0::/a/b" (v2)   the group: a path in its hierarchy
 *   /proc/self/mountinfo  "… ROOT MOUNTPOINT … - cgroup2 … rw,…"      where its part below ROOT is
 *
 * From MOUNTPOINT/a/b up to MOUNTPOINT each directory may hold a quota; the tightest counts. What cannot
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

/* Writes the group's path ("/a/b") for the v2 hierarchy or for v1's cpu controller. */
static bool find_group(const char *root, bool v2, char *out, size_t out_bytes) {
    struct line_reader reader;
    bool found = false;
    if (!open_lines(&reader, root, "/proc/self/cgroup")) return false;
    while (!found && next_line(&reader)) {
        char *controllers = strchr(reader.text, ':');
        char *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path) continue;
        *path++ = '\0';
        controllers++;
        found = v2 ? *controllers == '\0' : has_word(controllers, "cpu");
        found = found && *path == '/' && snprintf(out, out_bytes, "%s", path) < (int)out_bytes;
    }
    fclose(reader.file);
    return found;
}

/* Writes the mount point of the hierarchy and which of its directories is mounted there. */
static bool find_mount(const char *root, bool v2, char *mount_root, char *mount_point, size_t out_bytes) {
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
        found = (v2 || has_word(options, "cpu")) &&
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

/* CPUs that one directory allows. */
static int32_t quota_of(const char *root, const char *dir, bool v2) {
    char text[64], period_text[64];
    char *end;
    long long quota, period;
    if (!read_line(root, dir, v2 ? "cpu.max" : "cpu.cfs_quota_us", text, sizeof text)) return INT32_MAX;
    quota = strtoll(text, &end, 10);
    if (end == text) return INT32_MAX; /* "max 100000" */
    if (v2) {
        period = strtoll(end, NULL, 10);
    } else {
        if (!read_line(root, dir, "cpu.cfs_period_us", period_text, sizeof period_text)) return INT32_MAX;
        period = strtoll(period_text, NULL, 10);
    }
    if (quota <= 0 || period <= 0) return INT32_MAX; /* v1 says -1 for none */
    quota = quota / period + (quota % period != 0);
    return (int32_t)PAGED_MIN(quota, (long long)INT32_MAX);
}

static int32_t hierarchy_cpus(const char *root, bool v2) {
    char group[PATH_MAX], mount_root[PATH_MAX], mount_point[PATH_MAX], dir[2 * PATH_MAX];
    int32_t n_cpus = INT32_MAX;
    if (!find_group(root, v2, group, sizeof group)) return INT32_MAX;
    if (!find_mount(root, v2, mount_root, mount_point, sizeof group)) return INT32_MAX;
    /* A container sees its own group mounted as the whole hierarchy, while the path still counts from the
     * host's root. */
    size_t n_root = strcmp(mount_root, "/") == 0 ? 0 : strlen(mount_root);
    bool below = strncmp(group, mount_root, n_root) == 0 && (group[n_root] == '/' || group[n_root] == '\0');
    snprintf(dir, sizeof dir, "%s%s", mount_point, below ? group + n_root : "");
    size_t n_mount = strlen(mount_point);
    for (;;) {
        int32_t here = quota_of(root, dir, v2);
        n_cpus = PAGED_MIN(n_cpus, here);
        char *slash = strrchr(dir, '/');
        if (!slash || (size_t)(slash - dir) < n_mount) break;
        *slash = '\0';
    }
    return n_cpus;
}

int32_t paged__cgroup_cpus(const char *root) {
    int32_t v1 = hierarchy_cpus(root, false), v2 = hierarchy_cpus(root, true);
    return PAGED_MIN(v1, v2);
}
