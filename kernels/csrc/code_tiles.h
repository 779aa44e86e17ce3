/* tile[rows, PANEL] += x[rows, BLOCK] @ w[BLOCK, PANEL] for codes (codes.h), by matrices of bytes (AMX).
 *
 * Bits are those of codes.h: sums within a group are exact, and groups are added in the same order. Codes are
 * unpacked to bytes without an offset, once for all rows of a chunk, as AMX needs bytes.
 * Refuses to know: the origin of x and w, threads.
 */
#ifndef BATON_CODE_TILES_H
#define BATON_CODE_TILES_H

#include "codes.h"
#include "halves.h"

#if HAS_TILES && defined(__AMX_INT8__)
#define TILES_OF_CODES 1
#else
#define TILES_OF_CODES 0
#endif

/* Fewest rows for which AMX matrices, though not full, pay off. */
#define TILED_FROM 16
/* Groups whose sums are kept together: sums take 16 KiB of L1, the weights 4 to 8 KiB. */
#define TILED_GROUPS 4

#if TILES_OF_CODES

/* Sum one group for `matrices` x 16 rows: sums [row][PANEL]. */
INLINE void multiply_group(int matrices, int is_signed, const uint8_t *w, const char *x, int32_t *sums) {
    const int64_t x_pitch = numbers_bytes(8);
    int32_t *others = sums + TILE_ROWS * PANEL;
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(4, x, x_pitch);
    _tile_loadd(6, w, PANEL * 4);
    _tile_loadd(7, w + LANES * 4, PANEL * 4);
    if (is_signed) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
    } else {
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
    }
    if (matrices > 1) {
        _tile_zero(2);
        _tile_zero(3);
        _tile_loadd(5, x + TILE_ROWS * x_pitch, x_pitch);
        if (is_signed) {
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        } else {
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        }
    }
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + LANES, PANEL * 4);
    if (matrices > 1) {
        _tile_stored(2, others, PANEL * 4);
        _tile_stored(3, others + LANES, PANEL * 4);
    }
}

/* Scale the sums of `blocks` x `groups` groups (constants) and add them to the rows' tiles, like add_group.
 * Prefetches the next TILED_ROWS rows. */
INLINE void add_groups(int blocks, int groups, int has_scales, int has_minima, int64_t rows, int64_t x_step,
                       const float *scales, const float *minima, code_rows x, const int32_t *sums, float *tile) {
    for (int64_t r = 0; r < rows; r++, sums += PANEL, tile += PANEL) {
        vec low = load(FLOAT32, tile, 0), high = load(FLOAT32, tile, LANES);
#pragma GCC unroll 4
        for (int n = 0; n < blocks * groups; n++) {
            const block_header *header = (const void *)((const char *)(x.headers + r) + n / groups * x_step);
            vec_i32 parts[2];
            memcpy(parts, sums + n * TILED_ROWS * PANEL, sizeof parts);
            vec first = to_float(parts[0]), second = to_float(parts[1]), scale = splat(header->scales[n % groups]);
            if (n % groups == 0)
                __builtin_prefetch(x.numbers + n / groups * x_step + (r + TILED_ROWS) * numbers_bytes(8), 0, 3);
            if (has_scales) {
                first *= load(FLOAT32, scales, n * PANEL);
                second *= load(FLOAT32, scales, n * PANEL + LANES);
            }
            if (has_minima) {
                float inputs;
                memcpy(&inputs, &header->groups[n % groups], 4);
                first = multiply_add(splat(inputs), load(FLOAT32, minima, n * PANEL), first);
                second = multiply_add(splat(inputs), load(FLOAT32, minima, n * PANEL + LANES), second);
            }
            low = multiply_add(first, scale, low);
            high = multiply_add(second, scale, high);
        }
        store(tile, low);
        store(tile + LANES, high);
    }
}

INLINE void add_blocks(int blocks, int groups, const code_slice *c, int64_t first, int64_t rows, code_rows x,
                       const int32_t *sums, float *tile) {
    const float *scales = c->scales ? c->scales + first * groups * PANEL : NULL;
    const float *minima = c->minima ? c->minima + first * groups * PANEL : NULL;
    x.numbers += first * c->x_step;
    x.headers = (const void *)((const char *)x.headers + first * c->x_step);
    sums += first * groups * TILED_ROWS * PANEL;
    if (minima)
        add_groups(blocks, groups, 1, 1, rows, c->x_step, scales, minima, x, sums, tile);
    else if (scales)
        add_groups(blocks, groups, 1, 0, rows, c->x_step, scales, minima, x, sums, tile);
    else
        add_groups(blocks, groups, 0, 0, rows, c->x_step, scales, minima, x, sums, tile);
}

/* Add all blocks' sums at once for TILED_GROUPS groups, else one by one, with the same result. */
INLINE void add_sums(int groups, const code_slice *c, int64_t rows, code_rows x, const int32_t *sums, float *tile) {
    if (c->num_blocks == TILED_GROUPS / groups) {
        add_blocks(TILED_GROUPS / groups, groups, c, 0, rows, x, sums, tile);
        return;
    }
    for (int64_t i = 0; i < c->num_blocks; i++) add_blocks(1, groups, c, i, rows, x, sums, tile);
}

/* x: the rows' first blocks; w: a panel as unpack_codes writes it; at most TILED_GROUPS groups. */
static __attribute__((noinline)) void tiled_codes(int64_t rows, const uint8_t *w, code_rows x, code_slice c,
                                                  float *tile) {
    int32_t sums[TILED_GROUPS * TILED_ROWS * PANEL] __attribute__((aligned(64)));
    int32_t *to = sums;
    int two = rows > TILE_ROWS;
    for (int64_t i = 0; i < c.num_blocks; i++)
        for (int64_t g = 0; g < BLOCK; g += c.groups.size, to += TILED_ROWS * PANEL, w += c.groups.size * PANEL) {
            const char *numbers = x.numbers + i * c.x_step + g;
            if (c.groups.offset && two)
                multiply_group(2, 1, w, numbers, to);
            else if (c.groups.offset)
                multiply_group(1, 1, w, numbers, to);
            else if (two)
                multiply_group(2, 0, w, numbers, to);
            else
                multiply_group(1, 0, w, numbers, to);
        }
    if (c.groups.size == BLOCK)
        add_sums(1, &c, rows, x, sums, tile);
    else if (c.groups.size == BLOCK / 2)
        add_sums(2, &c, rows, x, sums, tile);
    else
        add_sums(4, &c, rows, x, sums, tile);
}

#endif

#endif
