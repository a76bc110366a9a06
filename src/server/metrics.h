/* server/metrics.h: what a Prometheus server reads at /metrics, under vLLM's names and, where there are none,
 * under ours. */
#ifndef PAGED_SERVER_METRICS_H
#define PAGED_SERVER_METRICS_H

#include "server/server.h"

paged__metrics *paged__metrics_create(void);
void paged__metrics_free(paged__metrics *metrics);

void paged__metrics_http(paged__metrics *metrics, int status);
/* n tokens came `seconds` after those before them; first: they are the first, after the submission. */
void paged__metrics_tokens(paged__metrics *metrics, bool first, int32_t n, double seconds);
/* What a step computed, of prompts and answers. */
void paged__metrics_step(paged__metrics *metrics, int64_t n_tokens);
/* An answer has ended; end->finish NONE: its client has left. */
void paged__metrics_ended(paged__metrics *metrics, const paged_output *end, double seconds);

void paged__metrics_reply(paged__conn *conn);

#endif
