/* file_ahead.c: records that are going to be read, brought from the disk before they are asked for.
 *
 * While the records of one half of the buffer are looked at, those of the other are under way, past the
 * system's memory (O_DIRECT): so the disk always has something to do, and nobody copies but we. Nothing here
 * is believed: a slot may have been written again since. Whatever goes wrong, a record is just not here, and
 * who wants it reads it from the file, and hears there what is wrong.
 */
#include <errno.h>

#include "store/file.h"

enum { HALF_BYTES = 2 << 20, AHEAD_ALIGN = 2 << 20 /* a huge page */ };

static paged__ahead_half *other_half(paged__ahead *a) {
    return &a->halves[1 - a->at];
}

/* Nothing more is asked for. It is told once. */
static void turn_off(paged__ahead *a, int error) {
    char reason[128];
    if (!a->off)
        paged__log(PAGED_LOG_WARN, "store: records are not read ahead of their use any more: %s",
                   strerror_r(error, reason, sizeof reason));
    a->off = true;
}

static bool set_up(paged__slots *slots) {
    paged__ahead *a = &slots->ahead;
    if (a->off || slots->direct < 0) return false;
    if (!a->reads && paged__system()->reads_open(2 * PAGED__AHEAD_MAX, &a->reads) < 0) {
        a->reads = 0;
        turn_off(a, errno);
        return false;
    }
    if (a->bytes) return true;
    const int64_t n_max = PAGED_MIN(HALF_BYTES / slots->slot_bytes, (int64_t)PAGED__AHEAD_MAX);
    a->n_max = (int32_t)PAGED_MAX(n_max, 1);
    const size_t half_bytes = (size_t)a->n_max * (size_t)slots->slot_bytes;
    a->bytes = paged__alloc_huge((2 * half_bytes + AHEAD_ALIGN - 1) / AHEAD_ALIGN * AHEAD_ALIGN);
    for (int h = 0; h < 2 && a->bytes; h++) a->halves[h].bytes = a->bytes + (size_t)h * half_bytes;
    return a->bytes != NULL;
}

/* No more of it, and nothing is under way from now on. */
static void give_up(paged__ahead *a) {
    if (a->reads) paged__system()->reads_close(a->reads);
    a->reads = 0;
    a->off = true;
    for (int h = 0; h < 2; h++) {
        a->halves[h].failed |= a->halves[h].n_under_way > 0;
        a->halves[h].n_under_way = 0;
    }
}

static void wait_for(paged__ahead *a, const paged__ahead_half *half) {
    struct io_event events[PAGED__AHEAD_MAX];
    while (half->n_under_way > 0) {
        const int n = paged__system()->reads_wait(a->reads, PAGED__AHEAD_MAX, events);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            turn_off(a, n < 0 ? errno : EIO);
            give_up(a);
            return;
        }
        for (int i = 0; i < n; i++) {
            const struct iocb *read = (const struct iocb *)(uintptr_t)events[i].obj;
            paged__ahead_half *its = &a->halves[read->aio_data];
            its->n_under_way--;
            its->failed |= events[i].res != (int64_t)read->aio_nbytes;
            /* The file could be opened so, but wants other sizes or places than these. */
            if (events[i].res == -EINVAL) turn_off(a, EINVAL);
        }
    }
}

static void forget(paged__ahead *a) {
    a->n_keys = a->next = 0;
    for (int h = 0; h < 2; h++) {
        wait_for(a, &a->halves[h]);
        a->halves[h].n = 0;
    }
}

void paged__slots_expect(paged__slots *slots, const paged_key *keys, int32_t n) {
    paged__ahead *a = &slots->ahead;
    forget(a);
    if (n < 2 || !set_up(slots)) return; /* one alone is soonest read by who wants it */
    if (n > a->n_keys_max) {
        paged__free(a->keys);
        a->keys = paged__alloc((size_t)n, sizeof *a->keys);
        a->n_keys_max = a->keys ? n : 0;
        if (!a->keys) return;
    }
    memcpy(a->keys, keys, (size_t)n * sizeof *keys);
    a->n_keys = n;
}

/* Slots that lie one behind the other in the file are one read. */
static int32_t make_reads(const paged__slots *slots, paged__ahead_half *half, struct iocb **reads) {
    int32_t n_reads = 0;
    for (int32_t first = 0, i = 1; i <= half->n; i++) {
        if (i < half->n && half->slots[i] == half->slots[i - 1] + 1) continue;
        half->reads[n_reads] =
            (struct iocb){.aio_data = (uint64_t)(half - slots->ahead.halves),
                          .aio_lio_opcode = IOCB_CMD_PREAD,
                          .aio_fildes = (uint32_t)slots->direct,
                          .aio_buf = (uintptr_t)(half->bytes + (int64_t)first * slots->slot_bytes),
                          .aio_nbytes = (uint64_t)((i - first) * slots->slot_bytes),
                          .aio_offset = half->slots[first] * slots->slot_bytes};
        reads[n_reads] = &half->reads[n_reads];
        n_reads++;
        first = i;
    }
    return n_reads;
}

void paged__slots_read_ahead(paged__slots *slots, int64_t (*slot_of)(void *user, const paged_key *key),
                             void *user) {
    paged__ahead *a = &slots->ahead;
    paged__ahead_half *half = other_half(a);
    struct iocb *reads[PAGED__AHEAD_MAX];
    if (half->n || a->off) return;
    while (half->n < a->n_max && a->next < a->n_keys) {
        const paged_key key = a->keys[a->next++];
        const int64_t slot = slot_of(user, &key);
        if (slot >= 0 && slot < slots->n_slots)
            half->slots[half->n++] = slot;
        else
            a->next = a->n_keys; /* what comes behind it is of no use without it */
    }
    if (half->n == 0) return;
    const int32_t n_reads = make_reads(slots, half, reads);
    const int n = paged__system()->reads_start(a->reads, n_reads, reads);
    if (n < 0 && errno == EINVAL) turn_off(a, EINVAL);
    half->n_under_way = PAGED_MAX(n, 0);
    half->failed = n < n_reads;
}

static int32_t place_in(const paged__ahead_half *half, int64_t slot) {
    for (int32_t i = 0; i < half->n; i++)
        if (half->slots[i] == slot) return i;
    return -1;
}

bool paged__slots_is_ahead(paged__slots *slots, int64_t slot) {
    paged__ahead *a = &slots->ahead;
    if (place_in(&a->halves[a->at], slot) >= 0) return true;
    if (place_in(other_half(a), slot) < 0) return false;
    PAGED_ASSERT(a->halves[a->at].n_under_way == 0); /* paged__slots_ahead has waited for it */
    a->halves[a->at].n = 0;
    a->at = 1 - a->at;
    return true;
}

const uint8_t *paged__slots_ahead(paged__slots *slots, int64_t slot) {
    paged__ahead *a = &slots->ahead;
    paged__ahead_half *half = &a->halves[a->at];
    const int32_t place = place_in(half, slot);
    wait_for(a, half);
    return place < 0 || half->failed ? NULL : half->bytes + (int64_t)place * slots->slot_bytes;
}

void paged__slots_end_ahead(paged__slots *slots) {
    paged__ahead *a = &slots->ahead;
    give_up(a);
    paged__free(a->bytes);
    paged__free(a->keys);
    *a = (paged__ahead){0};
}
