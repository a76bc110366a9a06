/* arena.h: where the bytes of blocks are, as who owns blocks and who keeps bytes agree on it. mem.h takes an
 * arena, and makes those of this machine's memory; opencl.h makes those of a device.
 */
#ifndef PAGED_ARENA_H
#define PAGED_ARENA_H

#include "paged/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where there is no base, byte `offset` of the arena has the address PAGED_ARENA_AWAY + offset in a paged_kv:
 * a number for the device, which nobody may follow here. */
enum { PAGED_ARENA_AWAY = 4096 };

/* The seam between ids and bytes. mem manages ids; the arena knows where the bytes are and how they are
 * copied. */
typedef struct paged_arena {
    void *ctx;
    uint8_t *base;     /* first byte; never moves; NULL where the bytes cannot be addressed (a device) */
    size_t size_bytes; /* address space, reserved once */
    paged_status (*back)(void *ctx, size_t offset, size_t size_bytes); /* make usable; idempotent */
    /* Gives back to the system; NULL: what is backed stays so. */
    paged_status (*unback)(void *ctx, size_t offset, size_t size_bytes);
    paged_status (*copy)(void *ctx, size_t dst, size_t src, size_t size_bytes);
    void (*destroy)(void *ctx);
    size_t granule_bytes; /* the unit of back and unback, which only see multiples of it (or the end of the
                           * pool); a power of two; 0: 2 MiB */
} paged_arena;

#ifdef __cplusplus
}
#endif
#endif
