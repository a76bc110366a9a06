/* cli/ascend.h: what the files of `paged ascend-check` share.
 *
 *   ascend.c        options, the verdict as text and JSON, arrays of the user's
 *   ascend_dump.c   a call with its golden result, as files for a card to be compared with
 */
#ifndef PAGED_CLI_ASCEND_H
#define PAGED_CLI_ASCEND_H

#include "cli/cli.h"
#include "paged/ascend.h"

/* Those of src/cli/static/, which every dump takes along. */
extern const paged__file paged__dump_files[];

/* Writes the call `c`, which is accepted, to the folder `path`, which it makes or finds. An exit code. */
int paged__ascend_dump(paged__cli *cli, const paged_ascend_config *c, const char *path, uint64_t seed);

#endif
