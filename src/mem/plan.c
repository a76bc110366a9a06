/* plan.c: see paged/plan.h. Works in bytes, so that groups, windows and ways need no cases but here. */
#include "paged/plan.h"

#include "mem/mem.h"

const char *paged_plan_way_name(paged_plan_way way) {
    static const char *const names[] = {"paged", "contiguous", "packed tails"};
    return way >= 0 && way < PAGED_PLAN_WAYS ? names[way] : "unknown way";
}

/* ---- one sequence ---- */

static bool can_pack(int32_t block_size) {
    return block_size >= 2 * PAGED_TILE && block_size <= 256 && block_size % PAGED_TILE == 0;
}

paged_status paged_plan_init(paged_plan *plan, paged_plan_way way, const paged_group_config *groups,
                             int32_t n_groups, int32_t block_size, int32_t max_seq_tokens, paged_error *err) {
    if (block_size == 0) block_size = PAGED__BLOCK_SIZE_DEFAULT;
    if (!plan || !groups || n_groups < 1 || n_groups > PAGED_GROUPS_MAX || way < 0 || way >= PAGED_PLAN_WAYS)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "plan or groups is NULL, n_groups %d, way %d",
                           n_groups, (int)way);
    if (block_size < 1 || block_size > PAGED__BLOCK_SIZE_MAX || max_seq_tokens < 1)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "block_size %d (1 to %d), max_seq_tokens %d (from 1)",
                           block_size, PAGED__BLOCK_SIZE_MAX, max_seq_tokens);
    if (way == PAGED_PLAN_PACKED && !can_pack(block_size))
        return paged__fail(err, PAGED_ERR_INVALID_ARG,
                           "packed tails ask for a block_size of 32 to 256, a multiple of %d, not %d",
                           PAGED_TILE, block_size);
    paged_plan p = {
        .way = way, .block_size = block_size, .max_seq_tokens = max_seq_tokens, .n_groups = n_groups};
    size_t total = 0, n_blocks = (size_t)paged__ceil_div(max_seq_tokens, block_size), bytes;
    for (int32_t g = 0; g < n_groups; g++) {
        p.groups[g].token_bytes = paged_block_bytes(&groups[g], 1);
        p.groups[g].block_bytes = paged_block_bytes(&groups[g], block_size);
        p.groups[g].window = groups[g].window;
        if (groups[g].window < 0 || !p.groups[g].block_bytes)
            return paged__fail(
                err, PAGED_ERR_INVALID_ARG,
                "group %d: %d layers, %d KV heads, head dims %d and %d, window %d in blocks of "
                "%d are no shape, or too large",
                g, groups[g].n_layers, groups[g].n_kv_heads, groups[g].head_dim_k, groups[g].head_dim_v,
                groups[g].window, block_size);
        if (!paged__mul(n_blocks, p.groups[g].block_bytes, &bytes) || !paged__add(total, bytes, &total) ||
            total > PTRDIFF_MAX)
            return paged__fail(err, PAGED_ERR_LIMIT,
                               "a sequence of %d tokens is larger than the address space", max_seq_tokens);
    }
    *plan = p;
    return PAGED_OK;
}

static int32_t inside(const paged_plan *plan, int32_t n_tokens) {
    return PAGED_MAX(0, PAGED_MIN(n_tokens, plan->max_seq_tokens));
}

size_t paged_plan_stored_bytes(const paged_plan *plan, int32_t n_tokens) {
    size_t bytes = 0;
    n_tokens = inside(plan, n_tokens);
    for (int32_t g = 0; g < plan->n_groups; g++) {
        int32_t window = plan->groups[g].window, n = window ? PAGED_MIN(n_tokens, window) : n_tokens;
        bytes += (size_t)n * plan->groups[g].token_bytes;
    }
    return bytes;
}

size_t paged_plan_taken_bytes(const paged_plan *plan, int32_t n_tokens) {
    const int32_t b = plan->block_size;
    size_t bytes = 0;
    n_tokens = inside(plan, n_tokens);
    for (int32_t g = 0; g < plan->n_groups && n_tokens; g++) {
        int32_t window = plan->groups[g].window;
        /* What the newest token does not see went back with the commit of the one before it. */
        int32_t n_gone =
            window && plan->way != PAGED_PLAN_CONTIGUOUS ? PAGED_MAX(0, n_tokens - window) / b : 0;
        int32_t n_end = plan->way == PAGED_PLAN_CONTIGUOUS ? plan->max_seq_tokens : n_tokens;
        int32_t n_tail = plan->way == PAGED_PLAN_PACKED ? n_tokens % b : 0;
        size_t n_blocks = (size_t)(paged__ceil_div(n_end - n_tail, b) - n_gone);
        size_t n_tiles = (size_t)paged__ceil_div(n_tail, PAGED_TILE);
        bytes += n_blocks * plan->groups[g].block_bytes + n_tiles * PAGED_TILE * plan->groups[g].token_bytes;
    }
    return bytes;
}

size_t paged_plan_peak_bytes(const paged_plan *plan, int32_t n_tokens) {
    size_t peak = 0;
    n_tokens = inside(plan, n_tokens);
    /* A block more of tokens never takes less, so the most lies within the last block_size lengths. */
    for (int32_t i = 0; i < PAGED_MIN(plan->block_size, n_tokens); i++)
        peak = PAGED_MAX(peak, paged_plan_taken_bytes(plan, n_tokens - i));
    return peak;
}

int64_t paged_plan_fit(const paged_plan *plan, size_t pool_bytes, int32_t n_tokens) {
    size_t bytes = paged_plan_peak_bytes(plan, n_tokens);
    if (!bytes) return 0;
    /* Tiles come out of whole blocks. */
    if (plan->n_groups == 1) pool_bytes -= pool_bytes % plan->groups[0].block_bytes;
    return (int64_t)(pool_bytes / bytes);
}

int32_t paged_plan_table_entries(const paged_plan *plan) {
    return paged__ceil_div(plan->max_seq_tokens, plan->block_size);
}

size_t paged_plan_table_bytes(const paged_plan *plan, int32_t n_seqs) {
    size_t row_bytes = (size_t)paged__row_stride(paged_plan_table_entries(plan)) * sizeof(int32_t);
    return (size_t)plan->n_groups * (size_t)PAGED_MAX(0, n_seqs) * row_bytes;
}

/* ---- a load ---- */

static paged_status check_load(const paged_plan *plan, const paged_plan_request *requests, int32_t n_requests,
                               paged_error *err) {
    if (!plan || !requests || n_requests < 1)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "a plan and at least one request are needed, not %d",
                           n_requests);
    for (int32_t i = 0; i < n_requests; i++) {
        int64_t n = (int64_t)requests[i].n_prompt + requests[i].n_output;
        if (requests[i].n_prompt < 1 || requests[i].n_output < 1)
            return paged__fail(err, PAGED_ERR_INVALID_ARG, "request %d: prompt %d, output %d; each is from 1",
                               i, requests[i].n_prompt, requests[i].n_output);
        if (n > plan->max_seq_tokens)
            return paged__fail(err, PAGED_ERR_INVALID_ARG,
                               "request %d has %lld tokens, a sequence at most %d", i, (long long)n,
                               plan->max_seq_tokens);
    }
    return PAGED_OK;
}

/* One step in which so many bytes were stored and taken. False: beyond 2^64. */
static bool count(paged_plan_load *load, int32_t n_running, size_t stored, size_t taken) {
    load->n_steps++;
    load->sum_running += n_running;
    load->max_running = PAGED_MAX(load->max_running, n_running);
    return paged__add(load->sum_stored, stored, &load->sum_stored) &&
           paged__add(load->sum_taken, taken, &load->sum_taken);
}

static paged_status beyond(paged_error *err) {
    return paged__fail(err, PAGED_ERR_LIMIT, "bytes summed over all steps go beyond 2^64");
}

paged_status paged_plan_life(const paged_plan *plan, const paged_plan_request *requests, int32_t n_requests,
                             paged_plan_load *out, paged_error *err) {
    paged_plan_load load = {0};
    paged_status status = check_load(plan, requests, n_requests, err);
    if (status != PAGED_OK) return status;
    for (int32_t i = 0; i < n_requests; i++) {
        for (int32_t k = 0; k < requests[i].n_output; k++) {
            int32_t n = requests[i].n_prompt + k;
            if (!count(&load, 1, paged_plan_stored_bytes(plan, n), paged_plan_taken_bytes(plan, n)))
                return beyond(err);
        }
    }
    *out = load;
    return PAGED_OK;
}

typedef struct sequence {
    int32_t n_tokens, n_left;
    size_t taken_bytes;
} sequence;

/* Those that run lie in the order of their admission at the front of `all`; those that gave way are a stack
 * that grows from its end, the oldest of them on top. Never more than n_requests of both. */
typedef struct pool {
    const paged_plan *plan;
    size_t pool_bytes, taken_bytes;
    sequence *all; /* [n_requests] */
    int32_t n_requests, n_running, n_gave_way, n_admitted;
    paged_plan_load load;
} pool;

static void give_way(pool *p) {
    sequence *youngest = &p->all[--p->n_running];
    p->taken_bytes -= youngest->taken_bytes;
    youngest->n_tokens++; /* the one that it was about to compute */
    p->all[p->n_requests - ++p->n_gave_way] = *youngest;
    p->load.n_preempted++;
}

static void admit(pool *p, const paged_plan_request *requests) {
    size_t spare = p->plan->way == PAGED_PLAN_CONTIGUOUS ? 0 : p->pool_bytes / 100;
    while (p->n_gave_way || p->n_admitted < p->n_requests) {
        const paged_plan_request *next = p->n_gave_way ? NULL : &requests[p->n_admitted];
        sequence seq = next ? (sequence){.n_tokens = next->n_prompt, .n_left = next->n_output}
                            : p->all[p->n_requests - p->n_gave_way];
        seq.taken_bytes = paged_plan_taken_bytes(p->plan, seq.n_tokens);
        size_t free_bytes = p->pool_bytes - p->taken_bytes;
        if (seq.taken_bytes > free_bytes || (p->n_running && seq.taken_bytes + spare > free_bytes)) return;
        if (next)
            p->n_admitted++;
        else
            p->n_gave_way--;
        p->taken_bytes += seq.taken_bytes;
        p->all[p->n_running++] = seq;
    }
}

/* A token more for those that ran in the step before; the oldest first. */
static void grow(pool *p, int32_t n_old) {
    for (int32_t i = 0; i < PAGED_MIN(n_old, p->n_running); i++) {
        size_t wanted = paged_plan_taken_bytes(p->plan, p->all[i].n_tokens + 1);
        while (i < p->n_running && p->taken_bytes - p->all[i].taken_bytes + wanted > p->pool_bytes)
            give_way(p);
        if (i >= p->n_running) return;
        p->taken_bytes += wanted - p->all[i].taken_bytes;
        p->all[i].taken_bytes = wanted;
        p->all[i].n_tokens++;
    }
}

static void finish(pool *p) {
    int32_t n = 0;
    for (int32_t i = 0; i < p->n_running; i++) {
        if (--p->all[i].n_left > 0)
            p->all[n++] = p->all[i];
        else
            p->taken_bytes -= p->all[i].taken_bytes;
    }
    p->n_running = n;
}

static size_t stored_bytes(const pool *p) {
    size_t bytes = 0;
    for (int32_t i = 0; i < p->n_running; i++) bytes += paged_plan_stored_bytes(p->plan, p->all[i].n_tokens);
    return bytes;
}

static paged_status check_alone(const paged_plan *plan, size_t pool_bytes, const paged_plan_request *requests,
                                int32_t n_requests, paged_error *err) {
    for (int32_t i = 0; i < n_requests; i++) {
        size_t bytes = paged_plan_peak_bytes(plan, requests[i].n_prompt + requests[i].n_output - 1);
        if (bytes > pool_bytes)
            return paged__fail(err, PAGED_ERR_NO_BLOCKS,
                               "request %d, %d and %d tokens, takes %zu bytes when it ends; the pool has %zu",
                               i, requests[i].n_prompt, requests[i].n_output, bytes, pool_bytes);
    }
    return PAGED_OK;
}

paged_status paged_plan_replay(const paged_plan *plan, size_t pool_bytes, const paged_plan_request *requests,
                               int32_t n_requests, void (*each)(void *user, const paged_plan_step *step),
                               void *user, paged_plan_load *out, paged_error *err) {
    paged_status status = check_load(plan, requests, n_requests, err);
    if (status == PAGED_OK) status = check_alone(plan, pool_bytes, requests, n_requests, err);
    if (status != PAGED_OK) return status;
    pool p = {.plan = plan, .pool_bytes = pool_bytes, .n_requests = n_requests};
    p.all = paged__alloc((size_t)n_requests, sizeof *p.all);
    if (!p.all) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for %d requests", n_requests);
    while (p.n_running || p.n_gave_way || p.n_admitted < n_requests) {
        /* Growth first: a step has the blocks of those that run before it takes others in. */
        grow(&p, p.n_running);
        admit(&p, requests);
        paged_plan_step step = {p.load.n_steps, p.n_running, stored_bytes(&p), p.taken_bytes};
        if (!count(&p.load, step.n_running, step.stored_bytes, step.taken_bytes)) {
            status = beyond(err);
            break;
        }
        if (each) each(user, &step);
        finish(&p);
    }
    paged__free(p.all);
    if (status == PAGED_OK) *out = p.load;
    return status;
}
