/* file_slots.c: one data file of slots of equal size, and which of them are taken. Policy is not here. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include "store/file.h"

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
    /* The last record may be shorter than its slot. */
    const paged_status status = paged__slots_reset(slots, (info.st_size + slot_bytes - 1) / slot_bytes, err);
    if (status) paged__slots_close(slots);
    return status;
}

void paged__slots_close(paged__slots *slots) {
    if (slots->fd >= 0) close(slots->fd);
    paged__free(slots->states);
    *slots = (paged__slots){.fd = -1};
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
