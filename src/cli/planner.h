/* cli/planner.h: what the files of `paged plan` share: a plan as it was asked for, and its results.
 *
 *   plan_cmd.c    options, and the numbers
 *   plan_text.c   the numbers as text and as JSON
 *   plan_svg.c    the numbers as charts
 *   documents.c   the numbers of the two documents beside ours
 */
#ifndef PAGED_CLI_PLANNER_H
#define PAGED_CLI_PLANNER_H

#include "cli/cli.h"
#include "cli/load.h"
#include "paged/plan.h"

enum { PAGED__LENGTHS_MAX = 32, PAGED__SWEEP = 6, PAGED__CURVE = 256, PAGED__TYPES = 4 };

/* What lies in a pool over the steps of a replay: at most PAGED__CURVE means, of `width` steps each. */
typedef struct paged__curve {
    double sum[PAGED__CURVE]; /* stored bytes */
    int64_t width, n_steps;
} paged__curve;

typedef struct paged__planner {
    paged__cli *cli;
    char model[160];                                   /* the name as it is shown */
    paged_group_config groups[PAGED_SHAPE_GROUPS_MAX]; /* [n_groups] with the KV type */
    int32_t n_groups, n_ctx;
    size_t weight_bytes;                 /* 0: not known */
    int32_t block_size, pack_block_size; /* of paged, of packed tails */
    size_t memory_bytes, pool_bytes;     /* 0: not given */
    int32_t n_requests;
    int32_t lengths[PAGED__LENGTHS_MAX], n_lengths;
    paged__load load;
    paged_plan plans[PAGED_PLAN_WAYS]; /* of sequences up to n_ctx */

    struct {
        int32_t block_size, n_entries;
        size_t table_bytes;   /* of a sequence */
        double paged, packed; /* share of the bytes taken that hold no token; packed < 0: not possible */
    } sweep[PAGED__SWEEP];
    double contiguous; /* the same share where every request has n_ctx reserved */
    struct {
        bool fits; /* every request of the load fits alone */
        paged_plan_load load;
        paged__curve curve;
    } ways[PAGED_PLAN_WAYS]; /* with a pool only */
} paged__planner;

size_t paged__planner_token_bytes(const paged__planner *p, paged_type type);

void paged__planner_text(const paged__planner *p);
int paged__planner_json(const paged__planner *p);
int paged__planner_svg(const paged__planner *p, const char *path);

/* Tables and claims of the two documents; an exit code. */
int paged__documents(paged__cli *cli, bool json);

#endif
