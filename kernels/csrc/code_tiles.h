/* tile[rows, PANEL] += x[rows, BLOCK] @ w[BLOCK, PANEL] of codes (codes.h), by matrices of bytes (AMX).
 *
 * The same bits as products of rows: sums within a group are exact either way, groups are added alike.
 * Weights are unpacked once for all rows of a chunk: matrices take whole bytes, without an offset.
 * Refuses to know: where x and w come from, threads.
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

/* Rows from which matrices are filled well enough. */
#define TILED_FROM 16
/* Groups whose sums are kept at a time: 16 KiB of L1, beside 4 to 8 of weights. */
#define TILED_GROUPS 4

#if TILES_OF_CODES

/* Some inputs of a panel as numbers of 8 bits without their offset: [input / 4][PANEL][4]. */
INLINE void unpack_codes(int type, int32_t offset, const uint8_t *w, int64_t num_inputs, const char *fetched,
                         uint8_t *to) {
    const int bits = bits_of(type);
    for (int64_t k = 0; k < num_inputs; k += 32 / bits)
        for (int half = 0; half < 2; half++, w += LANES * 4, fetched += LANES * 4) {
            uint8_t *here = to + k * PANEL + half * LANES * 4;
            codes read = load_codes(w);
            __builtin_prefetch(fetched, 0, 2);
            if (bits == 8) {
                *(codes *)here = read - (uint8_t)offset;
            } else {
                *(codes *)here = number_of(type, low_half(read)) - (uint8_t)offset;
                *(codes *)(here + PANEL * 4) = number_of(type, high_half(read)) - (uint8_t)offset;
            }
        }
}

/* A group's sums of `matrices` x 16 rows: [row][PANEL]. */
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

/* A row's tile += its sums of all groups, as what they stand for; see add_group. Fetches what the row
 * TILED_ROWS further down begins with: it comes next. */
INLINE void add_groups(int groups, int has_scales, int has_minima, const code_slice *c, code_rows x,
                       const int32_t *sums, float *tile) {
    const float *scales = c->scales, *minima = c->minima;
    vec low = load(FLOAT32, tile, 0), high = load(FLOAT32, tile, LANES);
    for (int64_t i = 0; i < c->num_blocks; i++) {
        const block_header *header = (const void *)((const char *)x.headers + i * c->x_step);
        vec scale = splat(header->scale);
        __builtin_prefetch(x.numbers + i * c->x_step + TILED_ROWS * numbers_bytes(8), 0, 3);
        __builtin_prefetch(header + TILED_ROWS, 0, 3);
#pragma GCC unroll 4
        for (int g = 0; g < groups; g++, sums += TILED_ROWS * PANEL) {
            vec_i32 parts[2];
            memcpy(parts, sums, sizeof parts);
            vec first = to_float(parts[0]), second = to_float(parts[1]);
            if (has_scales) {
                first *= load(FLOAT32, scales, 0), second *= load(FLOAT32, scales, LANES);
                scales += PANEL;
            }
            if (has_minima) {
                float inputs;
                memcpy(&inputs, &header->groups[g], 4);
                first = multiply_add(splat(inputs), load(FLOAT32, minima, 0), first);
                second = multiply_add(splat(inputs), load(FLOAT32, minima, LANES), second);
                minima += PANEL;
            }
            low = multiply_add(first, scale, low);
            high = multiply_add(second, scale, high);
        }
    }
    store(tile, low);
    store(tile + LANES, high);
}

/* The rows' tiles += their sums. */
INLINE void add_rows(int groups, int64_t rows, const code_slice *c, code_rows x, const int32_t *sums,
                     float *tile) {
    for (int64_t r = 0; r < rows; r++, x.headers++, x.numbers += numbers_bytes(8), sums += PANEL, tile += PANEL) {
        if (c->minima)
            add_groups(groups, 1, 1, c, x, sums, tile);
        else if (c->scales)
            add_groups(groups, 1, 0, c, x, sums, tile);
        else
            add_groups(groups, 0, 0, c, x, sums, tile);
    }
}

/* x: the rows' first blocks; w: as unpack_codes leaves them; TILED_GROUPS groups at the most. */
INLINE void tiled_codes(int matrices, int64_t rows, const uint8_t *w, code_rows x, code_slice c,
                        float *tile) {
    int32_t sums[TILED_GROUPS * TILED_ROWS * PANEL] __attribute__((aligned(64)));
    int32_t *to = sums;
    for (int64_t i = 0; i < c.num_blocks; i++)
        for (int64_t g = 0; g < BLOCK; g += c.groups.size, to += TILED_ROWS * PANEL, w += c.groups.size * PANEL) {
            const char *numbers = x.numbers + i * c.x_step + g;
            if (c.groups.offset)
                multiply_group(matrices, 1, w, numbers, to);
            else
                multiply_group(matrices, 0, w, numbers, to);
        }
    if (c.groups.size == BLOCK)
        add_rows(1, rows, &c, x, sums, tile);
    else if (c.groups.size == BLOCK / 2)
        add_rows(2, rows, &c, x, sums, tile);
    else
        add_rows(4, rows, &c, x, sums, tile);
}

#endif

#endif
