/* file_slots.c: one data file of slots of equal size, which of them are taken, and records on their way
 * there. Policy is not here. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include "store/file.h"

enum { STAGE_BYTES = 4 << 20, STAGE_ALIGN = 2 << 20 /* a huge page */ };

void paged__slots_name(int64_t shape, char name[32]) {
    snprintf(name, 32, "data-%" PRId64, shape);
}

paged_status paged__slots_open(paged__slots *slots, int dir, int64_t shape, int64_t slot_bytes,
                               bool read_only, bool create, paged_error *err) {
    char name[32];
    struct stat info;
    paged__slots_name(shape, name);
    /* O_NONBLOCK: opening a pipe without a writer would wait for ever. */
    const int flags =
        (read_only ? O_RDONLY : O_RDWR) | (create ? O_CREAT : 0) | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    const int fd = paged__system()->open(dir, name, flags, 0600);
    if (fd < 0) return paged__io_fail(err, name, errno);
    int error = paged__system()->stat(fd, &info) ? errno : 0;
    if (error) paged__io_fail(err, name, error);
    if (!error && !S_ISREG(info.st_mode)) {
        paged__fail(err, PAGED_ERR_IO, "%s: not a regular file", name);
        error = EINVAL;
    }
    if (error) {
        close(fd);
        return PAGED_ERR_IO;
    }
    *slots = (paged__slots){.fd = fd, .slot_bytes = slot_bytes};
    slots->direct = paged__system()->open(dir, name, (flags & ~O_CREAT) | O_DIRECT, 0);
    /* The last record may be shorter than its slot. */
    const paged_status status = paged__slots_reset(slots, (info.st_size + slot_bytes - 1) / slot_bytes, err);
    if (status) paged__slots_close(slots);
    return status;
}

void paged__slots_close(paged__slots *slots) {
    paged__slots_end_ahead(slots);
    if (slots->fd >= 0) close(slots->fd);
    if (slots->direct >= 0) close(slots->direct);
    paged__free(slots->stage.bytes);
    paged__free(slots->states);
    *slots = (paged__slots){.fd = -1, .direct = -1};
}

static paged_status make_room(paged__slots *slots, int64_t n, paged_error *err) {
    if (n <= slots->n_states) return PAGED_OK;
    const int64_t n_states = PAGED_MAX(n, PAGED_MAX(2 * slots->n_states, 256));
    uint8_t *states = paged__alloc((size_t)n_states, 1);
    if (!states) return paged__fail(err, PAGED_ERR_NO_MEMORY, "%" PRId64 " slots", n_states);
    if (slots->n_slots) memcpy(states, slots->states, (size_t)slots->n_slots);
    paged__free(slots->states);
    slots->states = states;
    slots->n_states = n_states;
    return PAGED_OK;
}

paged_status paged__slots_reset(paged__slots *slots, int64_t n_slots, paged_error *err) {
    const paged_status status = make_room(slots, n_slots, err);
    if (status) return status;
    if (n_slots) memset(slots->states, PAGED__SLOT_FREE, (size_t)n_slots);
    slots->n_slots = slots->n_free = n_slots;
    slots->next = 0;
    return PAGED_OK;
}

void paged__slots_mark(paged__slots *slots, int64_t slot, paged__slot_state state) {
    if (slot < 0 || slot >= slots->n_slots) return; /* the index was lied to; nothing is there to be kept */
    slots->n_free += (state == PAGED__SLOT_FREE) - (slots->states[slot] == PAGED__SLOT_FREE);
    slots->states[slot] = (uint8_t)state;
}

/* In the order of the file, so that what is written one after the other lies so. */
int64_t paged__slots_find_free(paged__slots *slots) {
    if (slots->n_free == 0) return -1;
    const uint8_t *found =
        memchr(slots->states + slots->next, PAGED__SLOT_FREE, (size_t)(slots->n_slots - slots->next));
    if (!found) found = memchr(slots->states, PAGED__SLOT_FREE, (size_t)slots->n_slots);
    PAGED_ASSERT(found);
    const int64_t slot = found - slots->states;
    slots->next = (slot + 1) % slots->n_slots;
    return slot;
}

paged_status paged__slots_grow(paged__slots *slots, int64_t n, paged_error *err) {
    paged_status status = make_room(slots, slots->n_slots + n, err);
    if (status) return status;
    /* In one run, so that writes find their blocks and a full disk shows here. */
    if (paged__system()->allocate(slots->fd, slots->n_slots * slots->slot_bytes, n * slots->slot_bytes) !=
            0 &&
        errno != EOPNOTSUPP)
        return paged__io_fail(err, "data file", errno);
    memset(slots->states + slots->n_slots, PAGED__SLOT_FREE, (size_t)n);
    slots->n_slots += n;
    slots->n_free += n;
    return PAGED_OK;
}

int64_t paged__slots_used(const paged__slots *slots) {
    int64_t n = slots->n_slots;
    while (n > 0 && slots->states[n - 1] == PAGED__SLOT_FREE) n--;
    return n;
}

void paged__slots_settle(paged__slots *slots) {
    for (int64_t i = 0; i < slots->n_slots; i++) {
        if (slots->states[i] == PAGED__SLOT_NEW) slots->states[i] = PAGED__SLOT_USED;
        if (slots->states[i] == PAGED__SLOT_GOING) paged__slots_mark(slots, i, PAGED__SLOT_FREE);
    }
}

/* ---- the stage ---- */

static void no_direct(paged__slots *slots) {
    slots->ahead.off = true;
    close(slots->direct);
    slots->direct = -1;
}

static bool set_up(paged__slots *slots) {
    paged__stage *stage = &slots->stage;
    if (stage->bytes) return true;
    const int64_t most = (int64_t)(sizeof stage->of / sizeof stage->of[0]);
    stage->n_max = (int32_t)PAGED_MAX(PAGED_MIN(STAGE_BYTES / slots->slot_bytes, most), 1);
    const size_t n_bytes = (size_t)stage->n_max * (size_t)slots->slot_bytes;
    stage->bytes = paged__alloc_huge((n_bytes + STAGE_ALIGN - 1) / STAGE_ALIGN * STAGE_ALIGN);
    if (!stage->bytes) no_direct(slots);
    return stage->bytes != NULL;
}

uint8_t *paged__slots_stage(paged__slots *slots, int64_t slot, const paged_key *key) {
    paged__stage *stage = &slots->stage;
    if (slots->direct < 0 || !set_up(slots) || stage->n == stage->n_max) return NULL;
    stage->of[stage->n].slot = slot;
    stage->of[stage->n].key = *key;
    return stage->bytes + (int64_t)stage->n++ * slots->slot_bytes;
}

bool paged__slots_is_staged(const paged__slots *slots, int64_t slot) {
    for (int32_t i = 0; i < slots->stage.n; i++)
        if (slots->stage.of[i].slot == slot) return true;
    return false;
}

/* Slots i … i + n - 1 of the stage, which lie one behind the other in the file. */
static int drain_run(paged__slots *slots, int32_t i, int32_t n) {
    paged__stage *stage = &slots->stage;
    const struct iovec all = {stage->bytes + (int64_t)i * slots->slot_bytes,
                              (size_t)n * (size_t)slots->slot_bytes};
    const int64_t at = stage->of[i].slot * slots->slot_bytes;
    if (slots->direct >= 0) {
        const int error = paged__write_all(slots->direct, &(struct iovec){all.iov_base, all.iov_len}, 1, at);
        if (error != EINVAL) return error;
        /* It could be opened so, but wants other sizes or places than these. */
        no_direct(slots);
    }
    return paged__write_all(slots->fd, &(struct iovec){all.iov_base, all.iov_len}, 1, at);
}

int paged__slots_drain(paged__slots *slots) {
    paged__stage *stage = &slots->stage;
    const int32_t n = stage->n;
    int error = 0;
    stage->n = 0;
    for (int32_t first = 0, i = 1; i <= n && !error; i++) {
        if (i < n && stage->of[i].slot == stage->of[i - 1].slot + 1) continue;
        error = drain_run(slots, first, i - first);
        first = i;
    }
    return error;
}
