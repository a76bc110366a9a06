/* ops/amx/tiles.h: tile registers, 0 … 7, in words of the assembler. Compilers' own functions differ in what
 * they say about memory: gcc 12's _tile_loadconfig says that it reads 8 bytes, and its _tile_loadd that it
 * reads none. Here all that touches memory says so. A register is a number in digits.
 */
#ifndef PAGED_OPS_AMX_TILES_H
#define PAGED_OPS_AMX_TILES_H

#include <stdint.h>

/* Rows of row_bytes each, of every register. */
typedef struct tile_shapes {
    uint8_t palette, start_row, reserved[14]; /* palette 1 */
    uint16_t row_bytes[16];
    uint8_t n_rows[16];
} tile_shapes;

#define TILE_SHAPES_LOAD(shapes)  __asm__ volatile("ldtilecfg %0" : : "m"(shapes) : "memory")
#define TILE_SHAPES_STORE(shapes) __asm__ volatile("sttilecfg %0" : "=m"(shapes) : : "memory")
#define TILE_RELEASE()            __asm__ volatile("tilerelease" : : : "memory")

/* Rows at `at`, `stride` bytes apart. */
#define TILE_LOAD(t, at, stride)                                                                             \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(at), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(t, at, stride)                                                                            \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(at), "r"((int64_t)(stride)) : "memory")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t : :)

/* sum += rows × lines; a line has groups of columns that are added up together: pairs of bf16, four int8. */
#define TILE_DOT_BF16(sum, rows, lines)                                                                      \
    __asm__ volatile("tdpbf16ps %%tmm" #lines ", %%tmm" #rows ", %%tmm" #sum : :)
#define TILE_DOT_INT8(sum, rows, lines)                                                                      \
    __asm__ volatile("tdpbssd %%tmm" #lines ", %%tmm" #rows ", %%tmm" #sum : :)

#endif
