/* cli/plan.h: memory in words: what a model and a pool take, and how many tokens fit. The command
 * `paged plan` is in planner.h. */
#ifndef PAGED_CLI_PLAN_H
#define PAGED_CLI_PLAN_H

#include "cli/cli.h"
#include "paged/engine.h"
#include "paged/model.h"
#include "paged/plan.h"

typedef struct paged__size_text {
    char text[48];
} paged__size_text;

/* "512 B", "22.5 KiB", "180.0 MiB". */
paged__size_text paged__size(size_t size_bytes);

/* Powers of 1024 and of 1000, four digits each: "3.125 GiB = 3.355 GB". */
paged__size_text paged__size_both(size_t size_bytes);

const char *paged__type_name(paged_type type);       /* "f16" */
const char *paged__layout_name(paged_layout layout); /* "packed" */

/* The name the file gives, else the last part of the path. Borrowed from either. */
const char *paged__model_name(const paged_model_info *info, const char *path);

/* The tensor type that most bytes have; "" for a model without tensors. */
const char *paged__main_weight_type(const paged_model_info *info);

/* The groups of layers as the engine makes them: without a window, then with. Returns how many there are. */
int32_t paged__model_groups(const paged_model_info *info, paged_type type,
                            paged_group_config groups[PAGED_SHAPE_GROUPS_MAX]);

/* Bytes of keys and values of n_tokens tokens in blocks of block_size; 0: too many for this machine. */
size_t paged__kv_bytes(const paged_model_info *info, paged_type type, int32_t block_size, int64_t n_tokens);

/* Bytes of a token's keys and values in so many layers. */
size_t paged__token_bytes(const paged_model_info *info, paged_type type, int32_t n_layers);

/* Three notes at the start of a run: weights, pool, threads. */
void paged__plan_note(paged__cli *cli, const paged_model_info *model, const paged_engine_info *engine,
                      const char *path);

#endif
