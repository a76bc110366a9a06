/* cli/measured.h: figures of the last bench runs that docs/memory.md and docs/performance.md record. Made by
 * `./x claims`, not by hand. */
#ifndef PAGED_CLI_MEASURED_H
#define PAGED_CLI_MEASURED_H

#define PAGED__MEASURED_WASTE_8 "0.285 %"

#define PAGED__MEASURED_WASTE_16 "0.605 %"

#define PAGED__MEASURED_WASTE_32 "1.2 %"

#define PAGED__MEASURED_WASTE_64 "2.5 %"

#define PAGED__MEASURED_TAILS_64 "0.726 %"

#define PAGED__MEASURED_STORED_MAXIMUM "8.4 %"

#define PAGED__MEASURED_STORED_FIRST_FIT "72.3 %"

#define PAGED__MEASURED_STORED_PAGED "95.975 %"

#define PAGED__MEASURED_LOOKUP "0.03 % (-0.41 % … 0.45 %), inconclusive"

#define PAGED__MEASURED_LOSS_8 "10.5 % (9.26 % … 10.8 %), inconclusive"

#define PAGED__MEASURED_LOSS_32 "1.57 % (1.12 % … 3.02 %), inconclusive"

#define PAGED__MEASURED_GATHER "1.715 (1.690 … 1.732)"

#define PAGED__MEASURED_CACHE "./x bench cache, 2026-11-29"

#define PAGED__MEASURED_ATTN "./x bench attn, 2026-11-29"

#endif
