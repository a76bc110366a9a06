/* base/cgroup.h: what the control groups allow. Knows files, not processors. */
#ifndef PAGED_BASE_CGROUP_H
#define PAGED_BASE_CGROUP_H

#include <stdint.h>

/* CPUs that the CPU quotas (v1 and v2) of this process's groups and all their ancestors allow, rounded up,
 * at least 1; INT32_MAX where there is no quota. Reads <root>/proc/self/{cgroup,mountinfo} and the files
 * they name below <root>; root is "" except in tests. */
int32_t paged__cgroup_cpus(const char *root);

/* Bytes that their memory limits still leave, files that were not used for long counted as free; INT64_MAX
 * where there is no limit. */
int64_t paged__cgroup_memory(const char *root);

#endif
