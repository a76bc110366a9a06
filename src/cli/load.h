/* cli/load.h: a load of requests for the planner: lengths from a trace file, or made up. */
#ifndef PAGED_CLI_LOAD_H
#define PAGED_CLI_LOAD_H

#include "cli/cli.h"
#include "paged/plan.h"

enum { PAGED__STEPS_MAX = 1 << 26 };

typedef struct paged__load {
    const char *name;             /* borrowed: the path, or a literal */
    paged_plan_request *requests; /* [n_requests] owned */
    int32_t n_requests;
    int32_t n_left_out; /* longer than the longest sequence */
} paged__load;

/* Reads an Azure LLM inference trace (ContextTokens, GeneratedTokens), BurstGPT (Request tokens, Response
 * tokens), lengths alone (num_prefill_tokens, num_decode_tokens), all three CSV with a heading, or JSON lines
 * with input_length and output_length (Mooncake, Bailian, ShareGPT). Prompts without tokens are skipped, an
 * answer has at least one. Returns an exit code; the error has been told. */
int paged__load_read(paged__cli *cli, const char *path, paged__load *load);

/* 1000 requests, always the same, with the lengths of ShareGPT conversations: log-normal, prompts of median
 * 731 and mean 857 up to 3998 tokens, answers of median 632 and mean 652 up to 1021. */
int paged__load_generate(paged__cli *cli, paged__load *load);

/* Leaves out what is longer than max_tokens. It is an error if nothing is left, or more than PAGED__STEPS_MAX
 * tokens of answers, which would take minutes to count. */
int paged__load_cut(paged__cli *cli, paged__load *load, int32_t max_tokens);

void paged__load_free(paged__load *load);

#endif
