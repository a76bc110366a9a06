/* opencl/pool.c: the bytes of blocks on a device: an arena, and transfers of blocks between it and the host.
 *
 * Transfers have a queue of their own, in order, so that the newest one has ended only when all have. */
#include "ops/opencl/cl.h"

static void drop(paged_cl *cl, cl_event *event) {
    if (*event) cl->api->ReleaseEvent(*event);
    *event = NULL;
}

/* ---- the arena ---- */

/* Drivers take memory when a buffer is made, so all of it is there. */
static paged_status pool_back(void *ctx, size_t offset, size_t size_bytes) {
    const paged__cl_pool *pool = ctx;
    return offset <= pool->size_bytes && size_bytes <= pool->size_bytes - offset ? PAGED_OK
                                                                                 : PAGED_ERR_INVALID_ARG;
}

static paged_status pool_copy(void *ctx, size_t dst, size_t src, size_t size_bytes) {
    paged__cl_pool *pool = ctx;
    const cl_event *before;
    cl_event copied;
    if (size_bytes == 0) return PAGED_OK;
    const uint32_t n_before = paged__cl_pool_before(pool, true, &before);
    if (pool->cl->api->EnqueueCopyBuffer(pool->cl->compute, pool->mem, pool->mem, src, dst, size_bytes,
                                         n_before, before, &copied) != CL_SUCCESS)
        return PAGED_ERR_IO;
    paged__cl_pool_touch(pool, copied);
    return PAGED_OK;
}

static void pool_destroy(void *ctx) {
    paged__cl_pool *pool = ctx;
    paged_cl *cl = pool->cl;
    cl->api->Finish(cl->compute);
    cl->api->Finish(cl->moves);
    for (; pool->oldest < pool->next; pool->oldest++)
        drop(cl, &pool->transfers[pool->oldest % PAGED_CL_TRANSFERS_MAX]);
    drop(cl, &pool->touched);
    drop(cl, &pool->moved);
    drop(cl, &pool->filled);
    cl->api->ReleaseMemObject(pool->mem);
    cl->stats.pool_bytes -= pool->size_bytes;
    if (cl->stats.pool_bytes == 0) cl->stats.scale_bytes = 0;
    paged__free(pool);
}

paged_status paged_cl_arena_create(paged_cl *cl, size_t size_bytes, paged_arena *out, paged_error *err) {
    int32_t code = CL_SUCCESS;
    if (!cl || !out || size_bytes == 0)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "an arena of %zu bytes on a device", size_bytes);
    paged__cl_pool *pool = paged__calloc(1, sizeof *pool);
    if (!pool) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for an arena");
    *pool = (paged__cl_pool){.cl = cl, .size_bytes = size_bytes, .oldest = 1, .next = 1};
    if (size_bytes <= cl->info.max_alloc_bytes - PAGED__CL_SLACK)
        pool->mem =
            cl->api->CreateBuffer(cl->context, CL_MEM_READ_WRITE, size_bytes + PAGED__CL_SLACK, NULL, &code);
    if (!pool->mem) {
        paged__free(pool);
        return paged__fail(
            err, PAGED_ERR_NO_MEMORY,
            "OpenCL: a pool of %zu bytes (%s, %d); the device gives %zu bytes at once, and has "
            "%zu in all",
            size_bytes, code ? paged__cl_error_name(code) : "too large", code, cl->info.max_alloc_bytes,
            cl->info.memory_bytes);
    }
    cl->stats.pool_bytes += size_bytes;
    *out = (paged_arena){
        .ctx = pool, .size_bytes = size_bytes, .back = pool_back, .copy = pool_copy, .destroy = pool_destroy};
    return PAGED_OK;
}

paged__cl_pool *paged__cl_pool_of(const paged_arena *arena) {
    return arena && arena->destroy == pool_destroy ? arena->ctx : NULL;
}

/* ---- order ---- */

uint32_t paged__cl_pool_before(const paged__cl_pool *pool, bool writes, const cl_event **list) {
    const cl_event *event = writes ? &pool->moved : &pool->filled;
    *list = *event ? event : NULL;
    return *event != NULL;
}

void paged__cl_pool_touch(paged__cl_pool *pool, cl_event event) {
    drop(pool->cl, &pool->touched);
    pool->touched = event;
    /* The other queue may wait for it. */
    pool->cl->api->Flush(pool->cl->compute);
}

/* ---- transfers ---- */

/* Forgets those that have ended, the oldest first. */
static void reap(paged__cl_pool *pool) {
    for (; pool->oldest < pool->next; pool->oldest++) {
        cl_event *event = &pool->transfers[pool->oldest % PAGED_CL_TRANSFERS_MAX];
        int32_t state;
        if (pool->cl->api->GetEventInfo(*event, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof state, &state,
                                        NULL) != CL_SUCCESS)
            state = -1;
        if (state > CL_COMPLETE) return;
        pool->failed |= state < 0;
        drop(pool->cl, event);
    }
    drop(pool->cl, &pool->moved);
    drop(pool->cl, &pool->filled);
}

static paged_status enqueue(paged__cl_pool *pool, bool into_pool, size_t offset, size_t size_bytes,
                            void *host, cl_event gate, cl_event *ended, paged_error *err) {
    const paged__cl_api *api = pool->cl->api;
    cl_event before[2];
    uint32_t n = 0;
    if (pool->touched) before[n++] = pool->touched;
    if (gate) before[n++] = gate;
    const cl_event *list = n ? before : NULL;
    const int32_t code = into_pool ? api->EnqueueWriteBuffer(pool->cl->moves, pool->mem, CL_FALSE, offset,
                                                             size_bytes, host, n, list, ended)
                                   : api->EnqueueReadBuffer(pool->cl->moves, pool->mem, CL_FALSE, offset,
                                                            size_bytes, host, n, list, ended);
    if (code != CL_SUCCESS) return paged__cl_fail(err, "a transfer of a block", code);
    api->Flush(pool->cl->moves);
    return PAGED_OK;
}

static void keep(paged_cl *cl, cl_event *to, cl_event event) {
    drop(cl, to);
    cl->api->RetainEvent(event);
    *to = event;
}

paged_status paged__cl_transfer(const paged_arena *arena, bool into_pool, size_t offset, size_t size_bytes,
                                void *host, cl_event gate, uint64_t *ticket, paged_error *err) {
    paged__cl_pool *pool = paged__cl_pool_of(arena);
    cl_event ended;
    if (!pool || !host || size_bytes == 0 || offset > pool->size_bytes ||
        size_bytes > pool->size_bytes - offset)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "%zu bytes at %zu of %s of %zu bytes", size_bytes,
                           offset, pool ? "a pool" : "what is no pool on a device",
                           pool ? pool->size_bytes : 0);
    reap(pool);
    if (pool->next - pool->oldest == PAGED_CL_TRANSFERS_MAX)
        return paged__fail(err, PAGED_ERR_LIMIT, "%d transfers have not ended", PAGED_CL_TRANSFERS_MAX);
    paged_status s = enqueue(pool, into_pool, offset, size_bytes, host, gate, &ended, err);
    if (s) return s;
    keep(pool->cl, &pool->moved, ended);
    if (into_pool) keep(pool->cl, &pool->filled, ended);
    pool->transfers[pool->next % PAGED_CL_TRANSFERS_MAX] = ended;
    if (ticket) *ticket = pool->next;
    pool->next++;
    *(into_pool ? &pool->cl->stats.block_sent_bytes : &pool->cl->stats.block_read_bytes) += size_bytes;
    return PAGED_OK;
}

paged_status paged_cl_block_read(const paged_arena *arena, size_t offset, size_t size_bytes, void *host,
                                 uint64_t *ticket, paged_error *err) {
    return paged__cl_transfer(arena, false, offset, size_bytes, host, NULL, ticket, err);
}

paged_status paged_cl_block_write(const paged_arena *arena, size_t offset, size_t size_bytes,
                                  const void *host, uint64_t *ticket, paged_error *err) {
    /* Only read from: the two directions share a function. */
    return paged__cl_transfer(arena, true, offset, size_bytes, (void *)(uintptr_t)host, NULL, ticket, err);
}

bool paged_cl_transfer_done(const paged_arena *arena, uint64_t ticket) {
    paged__cl_pool *pool = paged__cl_pool_of(arena);
    if (!pool) return true;
    reap(pool);
    return ticket < pool->oldest || ticket >= pool->next;
}

paged_status paged_cl_transfers_wait(const paged_arena *arena, paged_error *err) {
    paged__cl_pool *pool = paged__cl_pool_of(arena);
    if (!pool) return paged__fail(err, PAGED_ERR_INVALID_ARG, "what is no pool on a device");
    const int32_t code = pool->cl->api->Finish(pool->cl->moves);
    if (code != CL_SUCCESS) return paged__cl_fail(err, "transfers of blocks", code);
    reap(pool);
    const bool failed = pool->failed;
    pool->failed = false;
    return failed ? paged__fail(err, PAGED_ERR_IO, "OpenCL: a transfer of a block failed") : PAGED_OK;
}
