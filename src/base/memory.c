/* memory.c: how much memory is at hand. What cannot be read is not known, and never an error. */
#include <stdio.h>
#include <stdlib.h>

#include "base/base.h"
#include "base/cgroup.h"

/* Of the machine; INT64_MAX: not known. */
static int64_t machine_memory(void) {
    static const char key[] = "MemAvailable:";
    char line[128];
    int64_t bytes = INT64_MAX;
    FILE *file = fopen("/proc/meminfo", "re");
    if (!file) return bytes;
    while (fgets(line, (int)sizeof line, file))
        if (strncmp(line, key, sizeof key - 1) == 0) bytes = strtoll(line + sizeof key - 1, NULL, 10) * 1024;
    fclose(file);
    return bytes;
}

size_t paged_memory_available(void) {
    const int64_t machine = machine_memory(), group = paged__cgroup_memory("");
    const int64_t bytes = PAGED_MIN(machine, group);
    return bytes == INT64_MAX ? 0 : (size_t)PAGED_MAX(bytes, 0);
}
