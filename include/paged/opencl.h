/* opencl.h: keys, values, block tables and attention on an OpenCL 1.2 device.
 *
 *     paged_cl_open -> paged_cl_arena_create ─> a paged_cache over it (mem.h)
 *                   -> paged_cl_attn_create
 *     per step:  paged_cl_attn_plan, paged_cl_slots_plan
 *     per layer: paged_cl_kv_write, paged_cl_attn_run
 *     paged_cl_attn_free, arena.destroy, paged_cl_close, in this order
 *
 * What lies on the device: the pool with its scales, and the tables, slots and work of the step. Queries, new
 * keys and values go there, results come back; keys and values never do, unless a block is read out.
 *
 * The semantics are those of ops.h, and so is what is checked: a plan looks at every table entry before
 * anything is sent, so a kernel reads nothing else. On one device the result of a row has the same bits
 * whatever is in its batch, however a prefill is cut and wherever its blocks lie; bits differ between devices
 * and from the CPU's. A cascade (paged_batch.shared) is checked, and then read sequence by sequence.
 *
 * libOpenCL.so.1 is looked for at run time. Where it, a driver or a device is missing, open says UNSUPPORTED
 * and all else of the library works.
 *
 * Thread rule: one thread at a time per paged_cl and all that was made from it. Different ones are
 * independent.
 */
#ifndef PAGED_OPENCL_H
#define PAGED_OPENCL_H

#include "paged/arena.h"
#include "paged/base.h"
#include "paged/kv.h"
#include "paged/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- devices ---- */

typedef struct paged_cl_device {
    char name[200]; /* "platform: device" */
    char driver[64];
    bool is_cpu;
    int32_t n_units;                      /* that compute side by side */
    size_t memory_bytes, max_alloc_bytes; /* of all; of one buffer, and so of a pool */
} paged_cl_device;

/* The devices of this machine, at most `capacity` of them; NULL and 0 count. Returns how many there are; 0
 * also without libOpenCL. */
PAGED_API int32_t paged_cl_list(paged_cl_device *out, int32_t capacity);

typedef struct paged_cl paged_cl;

typedef struct paged_cl_config {
    size_t struct_size;
    const char *device; /* its number in the list, or a part of its name; NULL: the first */
    /* Programs are kept here once they are built, a file for each device, driver and shape. NULL: paged/ in
     * $XDG_CACHE_HOME, or in ~/.cache; "": they are not kept. */
    const char *cache_dir;
} paged_cl_config;

/* Errors: UNSUPPORTED (no library, no device, none of that name, one of 32 bits), INVALID_ARG, NO_MEMORY. */
PAGED_API paged_status paged_cl_open(const paged_cl_config *config, paged_cl **out, paged_error *err);
PAGED_API void paged_cl_close(paged_cl *cl); /* NULL is fine */
PAGED_API const paged_cl_device *paged_cl_get_device(const paged_cl *cl);

typedef struct paged_cl_stats {
    /* Bytes that this paged_cl holds on the device, by kind. */
    size_t pool_bytes;
    size_t scale_bytes; /* of pool_bytes, those of i8, by the largest share of any attention object */
    size_t table_bytes; /* block tables, slots, the list of work */
    size_t io_bytes;    /* queries, new keys and values, results */
    size_t state_bytes; /* of splits that are not merged yet */
    uint64_t n_kernels; /* started so far */
    uint64_t sent_bytes, received_bytes; /* to and from the device so far, transfers of blocks aside */
    uint64_t block_sent_bytes, block_read_bytes; /* keys and values moved by paged_cl_block_write and _read */
    uint64_t n_built, n_loaded;                  /* programs built from source; found in the cache */
    uint64_t build_ns;                           /* spent on both */
} paged_cl_stats;

PAGED_API void paged_cl_get_stats(const paged_cl *cl, paged_cl_stats *out);

/* ---- the pool ---- */

/* An arena whose bytes are on the device (base is NULL; a paged_kv over it has addresses from
 * PAGED_ARENA_AWAY on). It is taken at once and never gives anything back before it is destroyed. Errors:
 * INVALID_ARG; NO_MEMORY with what was asked for and what the device has. */
PAGED_API paged_status paged_cl_arena_create(paged_cl *cl, size_t size_bytes, paged_arena *out,
                                             paged_error *err);

/* Moves the bytes offset … offset + size_bytes - 1 of the pool, a block is one run of them, to host memory
 * and back, beside what the device computes. `host` must not be touched before the transfer has ended.
 * Whatever touches the pool later waits for it, where it must: a block that is being read out is not written,
 * one that is being written is neither read nor written. *ticket names the transfer (NULL: not wanted).
 * Errors: INVALID_ARG; LIMIT (PAGED_CL_TRANSFERS_MAX have not ended); IO. */
enum { PAGED_CL_TRANSFERS_MAX = 256 };
PAGED_API paged_status paged_cl_block_read(const paged_arena *arena, size_t offset, size_t size_bytes,
                                           void *host, uint64_t *ticket, paged_error *err);
PAGED_API paged_status paged_cl_block_write(const paged_arena *arena, size_t offset, size_t size_bytes,
                                            const void *host, uint64_t *ticket, paged_error *err);

/* Whether a transfer has ended; true for a ticket that was never given. */
PAGED_API bool paged_cl_transfer_done(const paged_arena *arena, uint64_t ticket);
/* Until all have. Errors: IO. */
PAGED_API paged_status paged_cl_transfers_wait(const paged_arena *arena, paged_error *err);

/* ---- attention ---- */

typedef struct paged_cl_attn paged_cl_attn;

/* For caches in this arena. The program for this shape is built, or found, here. n_threads_max has no
 * meaning. Errors: INVALID_ARG (names the field), NO_MEMORY, UNSUPPORTED (the driver does not build it),
 * LIMIT (max_q times the query heads of a KV head are 2^31 or more). */
PAGED_API paged_status paged_cl_attn_create(paged_cl *cl, const paged_arena *arena,
                                            const paged_attn_config *config, paged_cl_attn **out,
                                            paged_error *err);
PAGED_API void paged_cl_attn_free(paged_cl_attn *attn); /* NULL is fine */

/* As paged_attn_plan: checks all, then sends tables and work. The arrays of the batch are not needed any
 * more when it returns. Errors: INVALID_ARG, LIMIT, NO_MEMORY, IO. */
PAGED_API paged_status paged_cl_attn_plan(paged_cl_attn *attn, const paged_batch *batch, const paged_kv *kv,
                                          paged_error *err);

/* One layer: io as in paged_attn_run, in host memory. Returns when the results are there. A failure of the
 * device is an error of its own: IO. */
PAGED_API paged_status paged_cl_attn_run(paged_cl_attn *attn, const paged_kv *kv, const paged_attn_io *io,
                                         paged_error *err);

/* Which slots the next calls of paged_cl_kv_write fill; checked as by paged_kv_check_slots, and sent. Errors:
 * INVALID_ARG, NO_MEMORY, IO. */
PAGED_API paged_status paged_cl_slots_plan(paged_cl_attn *attn, const paged_kv *kv, const int64_t *slots,
                                           int32_t n_tokens, paged_error *err);

/* As paged_kv_write, for the planned slots; the same bytes. It is on its way when it returns. *n_nan: NaN
 * seen; NULL: not wanted, which saves the wait. Errors: IO. */
PAGED_API paged_status paged_cl_kv_write(paged_cl_attn *attn, const paged_kv *kv, const float *k,
                                         int64_t k_stride, const float *v, int64_t v_stride, int64_t *n_nan,
                                         paged_error *err);

#ifdef __cplusplus
}
#endif
#endif
