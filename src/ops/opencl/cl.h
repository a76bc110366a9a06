/* opencl/cl.h: the device as attn.c, pool.c and device.c see it.
 *
 *   device.c    which devices there are; open, close; buffers; programs and where they are kept
 *   pool.c      the arena, and transfers of blocks
 *   attn.c      plans, and what runs by them
 *   kernels.cl  what the device runs
 *
 * Two queues, each in order: `compute` for kernels and what they need, `moves` for transfers of blocks. What
 * must wait across them waits by events: a transfer for the newest kernel that touches the pool, kernels
 * that write the pool for the newest transfer, those that read it for the newest transfer into it.
 *
 * May include base/, ops/ and its own api.h.
 */
#ifndef PAGED_OPS_OPENCL_CL_H
#define PAGED_OPS_OPENCL_CL_H

#include "base/base.h"
#include "ops/opencl/api.h"
#include "paged/opencl.h"

struct paged_cl {
    const paged__cl_api *api;
    cl_device_id device;
    cl_context context;
    cl_command_queue compute, moves;
    paged_cl_device info;
    char platform_version[64];
    bool divides_exactly; /* on request */
    char *cache_dir;      /* NULL: programs are not kept */
    paged_cl_stats stats;
};

/* PAGED_ERR_IO, or NO_MEMORY where the code says so: `what` failed with an OpenCL code. */
paged_status paged__cl_fail(paged_error *err, const char *what, int32_t code);

/* ---- buffers ---- */

typedef struct paged__cl_buffer {
    cl_mem mem; /* NULL: none yet */
    size_t size_bytes;
} paged__cl_buffer;

/* At least size_bytes; what was in it is gone when it grows. *kind: a number of the stats, which is kept. */
paged_status paged__cl_buffer_reserve(paged_cl *cl, paged__cl_buffer *buffer, size_t size_bytes, size_t *kind,
                                      paged_error *err);
void paged__cl_buffer_free(paged_cl *cl, paged__cl_buffer *buffer, size_t *kind);
/* Reserves, and copies host memory, which may change when it returns. */
paged_status paged__cl_buffer_send(paged_cl *cl, paged__cl_buffer *buffer, const void *data,
                                   size_t size_bytes, size_t *kind, paged_error *err);

/* ---- programs ---- */

/* The kernels of kernels.cl built with these options; *from_cache: it was found. UNSUPPORTED with the end of
 * the driver's log. */
paged_status paged__cl_program_build(paged_cl *cl, const char *options, cl_program *out, bool *from_cache,
                                     paged_error *err);
/* Keeps a program that was built; where that fails, the next one builds again. */
void paged__cl_program_keep(paged_cl *cl, const char *options, cl_program program);

extern const char paged__cl_source[]; /* kernels.cl */
extern const size_t paged__cl_source_bytes;

/* ---- the pool ---- */

typedef struct paged__cl_pool {
    paged_cl *cl;
    cl_mem mem;
    size_t size_bytes;
    cl_event touched;       /* the newest kernel, or copy, that touches it; NULL: none */
    cl_event moved, filled; /* the newest transfer; the newest one into the pool; NULL: none */
    uint64_t oldest, next;  /* tickets oldest … next - 1 have not been seen to end */
    cl_event transfers[PAGED_CL_TRANSFERS_MAX]; /* by ticket % PAGED_CL_TRANSFERS_MAX */
    bool failed;                                /* one of those that ended */
} paged__cl_pool;

enum { PAGED__CL_SLACK = 64 }; /* bytes behind the pool that kernels may load, and never use */

/* The pool of an arena of paged_cl_arena_create; NULL: it is none of these. */
paged__cl_pool *paged__cl_pool_of(const paged_arena *arena);

/* What a kernel has to wait for, as a list of at most one event. */
uint32_t paged__cl_pool_before(const paged__cl_pool *pool, bool writes, const cl_event **list);
/* The kernel that was started after that; takes the event. */
void paged__cl_pool_touch(paged__cl_pool *pool, cl_event event);

/* As paged_cl_block_read and _write; does not begin before `gate`, if there is one. */
paged_status paged__cl_transfer(const paged_arena *arena, bool into_pool, size_t offset, size_t size_bytes,
                                void *host, cl_event gate, uint64_t *ticket, paged_error *err);

/* ---- attention ---- */

enum { PAGED__CL_ROWS = 16, PAGED__CL_STATE_TAIL = 16 }; /* kernels.cl: ROWS at most; behind o */

/* As in kernels.cl. */
typedef struct paged__cl_item {
    int32_t table, head_stride, tail, q_first, row_first, n_rows, first_keys, n_keys, split_first, split_end,
        state;
} paged__cl_item;

typedef struct paged__cl_kv {
    int64_t k, v, k_scale, v_scale;
    int64_t block_stride, k_head_stride, v_head_stride, scale_block_stride, scale_head_stride;
} paged__cl_kv;

/* As paged_cl_attn_create, for measuring: with `direct` block i of a sequence is its first block + i, and no
 * table is read but for that. */
paged_status paged__cl_attn_create(paged_cl *cl, const paged_arena *arena, const paged_attn_config *config,
                                   bool direct, paged_cl_attn **out, paged_error *err);

#endif
