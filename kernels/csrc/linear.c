/* out[M, N] = x[M, K] @ W^T: linear layers over packed weights.
 *
 * W is stored as [N / PANEL][K][PANEL] (zeros fill the last panel), so that a micro kernel reads it as one stream.
 * Decodes are bound by that stream, prompts by multiply-adds; for the blocking see Goto and van de Geijn, "Anatomy
 * of High-Performance Matrix Multiplication" (2008).
 * Refuses to know: what a layer is for.
 */
#include "linear.h"

#include "code_tiles.h"
#include "finish.h"

/* Measured on Xeons with 32 or 48 KiB of L1 and 1 or 2 MiB of L2 cache. */
#define MAX_CHUNK (30 * MAX_ROWS) /* maximum number of rows of x that are packed together, so that they stay in L2 */
#define MIN_CHUNK (8 * MAX_ROWS)
#define MOST_TILED ((MAX_CHUNK + TILED_ROWS - 1) / TILED_ROWS * TILED_ROWS)
#define CHUNK_FLOATS (1 << 18)
#define CHUNK_TILED (7 << 16) /* MAX_CHUNK for AMX, in numbers of x, which take 1 or 2 bytes each */
#define BY_ROWS (8 * MAX_ROWS) /* from this many rows per thread on, threads divide rows instead of panels */
#define CHUNKS 4 /* chunks per thread, so that others can take some from a slow thread */
#define SERIAL_PRODUCTS (1 << 16) /* below, waking threads costs more than it saves */
#define FETCH_AHEAD 8192 /* bytes ahead to prefetch in a stream that is read once */
#define FETCH_NEXT 2048 /* bytes ahead that matrices of few rows prefetch into L1 */
#define SUPER 256 /* inputs whose groups' scales share a factor */
#define WIDEN_FROM 3 /* fewest blocks of rows for which converting a slice of bf16 or int8 in memory pays */
#define SLICE_STEPS 8 /* steps of HALVES inputs of a bf16 panel that fit into L1 */
#define SCALED_DEPTH 128 /* group sizes of float8 are multiples of this */

INLINE int is_codes(int type) { return type >= CODES8; }

/* Return whether bfloat16 is multiplied directly, not converted to float. */
INLINE int in_halves(const linear_call *c) {
    return DOTS_HALVES && c->x_type == BFLOAT16 && is_paired(c->w_type);
}
/* Return whether float8 weights have scales per group of inputs; slices then never span two groups. */
INLINE int has_scales(const linear_call *c) { return c->w_type == FLOAT8 && c->group_scales; }
/* Return the rows to multiply for each row of x: 2 with `fine` inputs. */
INLINE int64_t rows_each(const linear_call *c) { return c->fine ? 2 : 1; }
INLINE int in_tiles(const linear_call *c) {
    if (is_codes(c->w_type))
        return TILES_OF_CODES && c->num_rows * rows_each(c) >= TILED_FROM && baton_has_tiles();
    return HAS_TILES && in_halves(c) && baton_has_tiles();
}

/* Blocks of rows, small enough for a micro kernel: of nearly equal size, or of `size` if fewer rows would cost as
 * much. The `each` rows of one row of x stay together. */
typedef struct {
    int64_t count, num_blocks, size, each;
} row_blocks;

/* Return whether codes of 6 bits are unpacked to 8 bits for `count` multiplied rows. */
INLINE int is_widened(int w_type, int64_t count) { return WIDENS(w_type) && count > 2 * code_rows_of(6); }

/* Cut `count` rows of x into blocks. */
INLINE row_blocks cut(const linear_call *c, int64_t count) {
    int64_t each = rows_each(c);
    count *= each;
    if (in_tiles(c)) return (row_blocks){count, ceil_div(count, TILED_ROWS), TILED_ROWS, each};
    int most = !is_codes(c->w_type) ? MAX_ROWS : code_rows_of(is_widened(c->w_type, count) ? 8 : bits_of(c->w_type));
    return (row_blocks){count, ceil_div(count, most), 0, each};
}
INLINE int64_t block_start(row_blocks b, int64_t i) {
    if (b.size) return min64(b.size * i, b.count);
    return b.each == 1 ? b.count * i / b.num_blocks : b.count / 2 * i / b.num_blocks * 2;
}

INLINE int64_t num_panels(const linear_call *c) { return ceil_div(c->num_columns, PANEL); }
INLINE int64_t num_slices(const linear_call *c) {
    return ceil_div(c->depth, has_scales(c) ? SCALED_DEPTH : MAX_DEPTH);
}
INLINE int64_t num_steps(const linear_call *c) { return ceil_div(c->depth, HALVES); }
INLINE int64_t filled_depth(const linear_call *c) { return filled_to(c->w_type, c->depth); }

/* Return the first input of slice s; slices begin at whole pairs. */
INLINE int64_t slice_start(const linear_call *c, int64_t s) {
    if (has_scales(c)) return min64(s * SCALED_DEPTH, c->depth);
    return s == num_slices(c) ? c->depth : (c->depth * s / num_slices(c) + 1) / 2 * 2;
}

INLINE int64_t chunk_rows(const linear_call *c) {
    int64_t most = in_tiles(c) ? CHUNK_TILED : CHUNK_FLOATS;
    int64_t rows = min64(MAX_CHUNK, max64(MIN_CHUNK, most / c->depth));
    return (in_tiles(c) ? rows / TILED_ROWS * TILED_ROWS : rows) / rows_each(c);
}

/* Return whether x is read in place: a single row of floats. */
INLINE int is_direct(const linear_call *c) {
    return c->num_rows == 1 && c->x_type == FLOAT32 && !is_codes(c->w_type) &&
           filled_depth(c) == c->depth;
}

INLINE int64_t packed_row_bytes(const linear_call *c) {
    if (in_halves(c)) return num_steps(c) * ROW_BYTES;
    return is_codes(c->w_type) ? ceil_div(c->depth, BLOCK) * block_bytes(bits_of(c->w_type))
                               : num_slices(c) * X_STRIDE * (int64_t)sizeof(float);
}

/* Return the rows to allocate for x: AMX reads whole matrices, and steps of a page's size would share cache
 * sets. */
INLINE int64_t room_for(const linear_call *c, int64_t count) {
    if (!in_halves(c) && !is_codes(c->w_type)) return count;
    int64_t whole = in_tiles(c) || count > TILE_ROWS ? ceil_div(count, TILE_ROWS) * TILE_ROWS : count;
    return count > TILE_ROWS ? whole + TILE_ROWS / 2 : whole;
}
/* Return the bytes of `count` packed rows of x. */
INLINE int64_t packed_bytes(const linear_call *c, int64_t count) {
    return room_for(c, count * rows_each(c)) * packed_row_bytes(c);
}

static void *packed_memory(const linear_call *c) {
    if (is_direct(c)) return (void *)c->x;
    return baton_scratch(0, packed_bytes(c, min64(c->num_rows, chunk_rows(c))));
}

INLINE code_groups groups_of(const linear_call *c) {
    return (code_groups){min64(c->group, BLOCK), c->group_minima ? 0 : offset_of(c->w_type)};
}

/* Round rows [begin, end) of a chunk of x to [block][row of the chunk], see codes.h. */
INLINE void round_rows(const linear_call *c, int type, int64_t chunk, int64_t count, int64_t begin,
                       int64_t end, char *to) {
    int bits = bits_of(c->w_type);
    int64_t each = rows_each(c), room = room_for(c, count * each), x_step = room * block_bytes(bits);
    code_groups groups = groups_of(c);
    for (int64_t k = 0; k < c->depth; k += BLOCK, to += x_step)
        for (int64_t r = begin; r < end; r++)
            round_block(bits, type, at(type, c->x, (chunk + r) * c->x_stride + k),
                        min64(BLOCK, c->depth - k), groups, each == 2, rows_from(bits, to, room, r * each));
}

/* Parameters of a function that computes a panel's sums for the packed rows' blocks [begin, end). `then`: the
 * weight to prefetch next. `left`: rows to finish meanwhile, or NULL. */
#define SUMS_OF_A_PANEL                                                                                  \
    const linear_call *c, int64_t panel, const void *then, row_blocks b, int64_t begin, int64_t end,     \
        const void *packed, float *tiles, unfinished *left

#define ORDERED 4 /* rows that are read side by side; more are slow, because prefetchers follow few streams */

/* Copy rows [begin, end) of a chunk of x to [step][row of the chunk][HALVES]. */
static void order_rows(const linear_call *c, int64_t chunk, int64_t step_bytes, int64_t begin,
                       int64_t end, char *to) {
    for (int64_t first = begin; first < end; first += ORDERED) {
        int64_t last = min64(first + ORDERED, end);
        char *step = to;
        for (int64_t k = 0; k < c->depth; k += HALVES, step += step_bytes)
            for (int64_t r = first; r < last; r++) {
                char *row = step + r * ROW_BYTES;
                const void *from = at(BFLOAT16, c->x, (chunk + r) * c->x_stride + k);
                if (k + HALVES <= c->depth) {
                    memcpy(row, from, ROW_BYTES);
                } else {
                    memset(row, 0, ROW_BYTES);
                    memcpy(row, from, (c->depth - k) * 2);
                }
            }
    }
}

/* Convert rows [begin, end) of a chunk of x to [slice][row of the chunk][X_STRIDE]. */
static void pack_rows(const linear_call *c, int64_t chunk, int64_t count, int64_t begin, int64_t end,
                      void *packed) {
    if (is_codes(c->w_type)) {
        if (c->x_type == BFLOAT16)
            round_rows(c, BFLOAT16, chunk, count, begin, end, packed);
        else if (c->x_type == FLOAT16)
            round_rows(c, FLOAT16, chunk, count, begin, end, packed);
        else
            round_rows(c, FLOAT32, chunk, count, begin, end, packed);
        return;
    }
    if (in_halves(c)) {
        order_rows(c, chunk, packed_bytes(c, count) / num_steps(c), begin, end, packed);
        return;
    }
    float *to = packed;
    for (int64_t s = 0; s < num_slices(c); s++) {
        int64_t k = slice_start(c, s), size = slice_start(c, s + 1) - k;
        for (int64_t r = begin; r < end; r++) {
            float *row = to + (s * count + r) * X_STRIDE;
            read_row(c->x_type, at(c->x_type, c->x, (chunk + r) * c->x_stride + k), row, size);
            row[size] = 0; /* pads the last pair, if the depth is odd */
        }
    }
}

INLINE void widen(int type, const void *w, int64_t size, float *to) {
    for (int64_t i = 0; i < size; i += LANES) store(to + i, load(type, w, i));
}

/* Convert a panel's numbers to floats, and separate pairs of inputs. */
INLINE void widen_panel(int type, const void *w, int64_t size, float *to) {
    if (!is_paired(type)) {
        widen(type, w, size * PANEL, to);
        return;
    }
    for (int64_t k = 0; k < size; k += 2, to += 2 * PANEL)
        for (int64_t i = 0; i < PANEL; i += LANES) {
            vec_u32 pairs = load_pairs(type, w, k * PANEL / 2 + i);
            store(to + i, first_of(type, pairs));
            store(to + PANEL + i, second_of(type, pairs));
        }
}

/* tile (+)= part times the panel's scales of input k's group. */
INLINE void add_scaled(const linear_call *c, int64_t panel, int64_t k, int64_t rows, const float *part,
                       int accumulate, float *tile) {
    int64_t group = panel * ceil_div(c->depth, c->group) + k / c->group;
    const float *scales = (const float *)c->group_scales + group * PANEL;
    for (int64_t i = 0; i < PANEL; i += LANES) {
        vec scale = load(FLOAT32, scales, i);
        for (int64_t r = 0; r < rows; r++) {
            vec sum = accumulate ? load(FLOAT32, tile, r * PANEL + i) : (vec){0};
            store(tile + r * PANEL + i, multiply_add(load(FLOAT32, part, r * PANEL + i), scale, sum));
        }
    }
}

/* Compute tiles[rows of blocks begin..end][PANEL] for one panel of W; `then`: the weight to prefetch next. */
INLINE void multiply(int type, SUMS_OF_A_PANEL) {
    float wide[MAX_DEPTH * PANEL] __attribute__((aligned(64)));
    float part[MAX_ROWS * PANEL] __attribute__((aligned(64)));
    int widens = type != FLOAT32 && end - begin >= WIDEN_FROM, scaled = type == FLOAT8 && has_scales(c);
    int64_t origin = block_start(b, begin), last = num_slices(c) - 1;
    for (int64_t s = 0; s <= last; s++) {
        int64_t k = slice_start(c, s), size = slice_start(c, s + 1) - k;
        const void *w = at(type, c->w, (panel * filled_depth(c) + k) * PANEL);
        /* One block of rows fetches ahead within the slice; several blocks share the slice and fetch the next
         * one. */
        fetch f = {(const char *)w + FETCH_AHEAD, PANEL * size_of(type)};
        const char *next = s == last ? then : at(type, w, size * PANEL);
        if (widens) widen_panel(type, w, size, wide);
        if (end - begin > 1) f.step = ceil_div(f.step, end - begin);
        for (int64_t i = begin; i < end; i++) {
            int64_t start = block_start(b, i), rows = block_start(b, i + 1) - start;
            const float *x = (const float *)packed + (is_direct(c) ? k : (s * b.count + start) * X_STRIDE);
            float *tile = tiles + (start - origin) * PANEL, *sums = scaled ? part : tile;
            if (end - begin > 1) f.from = next + (i - begin) * size * f.step;
            if (widens)
                micro(rows, FLOAT32, wide, x, size, sums, PANEL, s > 0 && !scaled, f);
            else
                micro(rows, type, w, x, size, sums, PANEL, s > 0 && !scaled, f);
            if (scaled) add_scaled(c, panel, k, rows, part, s > 0, tile);
        }
    }
}

#if HAS_TILES
static void finish_piece(void *left, int64_t num_rows) { finish_rows(left, num_rows); }
#endif

#if DOTS_HALVES
/* Multiply like `multiply`, but in bfloat16; tiles have memory for whole matrices. Rows of `left`, unless NULL,
 * are finished as soon as their sums are complete, while the next rows are multiplied. */
INLINE void multiply_halves(int type, SUMS_OF_A_PANEL) {
    char last_step[STEP_BYTES] __attribute__((aligned(64)));
    char wide[SLICE_STEPS * STEP_BYTES] __attribute__((aligned(64)));
    float part[TILED_ROWS * PANEL] __attribute__((aligned(64)));
    int scaled = type == FLOAT8 && has_scales(c);
    int64_t origin = block_start(b, begin), all = num_steps(c), step_bytes = HALVES * PANEL * size_of(type);
    int64_t x_step = packed_bytes(c, b.count) / all, full = c->depth / HALVES;
    const char *w = (const char *)c->w + panel * filled_depth(c) * PANEL * size_of(type);
    /* A single block of rows reads each part of a panel only once. */
    int64_t most = end - begin == 1 && (type == BFLOAT16 || !b.size) ? full : SLICE_STEPS;
    if (scaled) most = SCALED_DEPTH / HALVES;
    if (full < all) {
        memset(last_step, 0, sizeof last_step);
        memcpy(last_step, w + full * step_bytes, (filled_depth(c) - full * HALVES) * PANEL * size_of(type));
    }
    for (int64_t s = 0, count; s < all; s += count) {
        int is_last = s == full;
        count = is_last ? 1 : min64(most, full - s);
        const char *here = is_last ? last_step : w + s * step_bytes, *step = here;
        fetch f = {here + FETCH_AHEAD, step_bytes};
        if (end - begin > 1) f.step = ceil_div(step_bytes / 64, end - begin) * 64;
        if (is_last) f.step = 0;
        const char *next = s + count == all ? then : here + count * step_bytes;
        /* For a single block of rows, codes are unpacked in registers. */
        int in_place = type == BFLOAT16 || (end - begin == 1 && !b.size);
        if (!in_place) {
            for (int64_t i = 0; i < count; i++) widen_step(here + i * step_bytes, wide + i * STEP_BYTES);
            step = wide;
        }
        for (int64_t i = begin; i < end; i++) {
            int64_t start = block_start(b, i), rows = block_start(b, i + 1) - start;
            const char *x = (const char *)packed + s * x_step + start * ROW_BYTES;
            float *tile = tiles + (start - origin) * PANEL, *sums = scaled ? part : tile;
            int accumulate = s > 0 && !scaled;
            if (end - begin > 1) f.from = next + (i - begin) * count * f.step;
#if HAS_TILES
            if (b.size) {
                meanwhile m = {left && left->ready ? finish_piece : NULL, left, ceil_div(TILED_ROWS, count)};
                if (end - begin == 1 && rows <= TILE_ROWS) f.from = here + FETCH_NEXT;
                if (rows > TILE_ROWS)
                    tiles_product(2, 2, step, x, x_step, count, sums, PANEL, accumulate, f, m);
                else if (end - begin > 1)
                    tiles_product(1, 2, step, x, x_step, count, sums, PANEL, accumulate, f, m);
                else
                    tiles_product(1, 1, step, x, x_step, count, sums, PANEL, accumulate, f, m);
                if (scaled) add_scaled(c, panel, s * HALVES, rows, part, s > 0, tile);
                if (left && s + count == all) left->ready += rows;
                continue;
            }
#endif
            if (in_place)
                pairs_product(rows, type, step, x, x_step, count, HALVES / 2, sums, PANEL, accumulate, NULL, f);
            else
                pairs_product(rows, BFLOAT16, step, x, x_step, count, HALVES / 2, sums, PANEL, accumulate, NULL, f);
            if (scaled) add_scaled(c, panel, s * HALVES, rows, part, s > 0, tile);
        }
    }
}
#endif

#if DOTS_HALVES
/* Compute sums like `multiply_halves`, without matrices, over inputs that do not fill a step, such as ranks of adapters. */
static __attribute__((noinline)) void of_few_in_halves(SUMS_OF_A_PANEL) {
    int64_t origin = block_start(b, begin), depth = filled_depth(c);
    const char *w = (const char *)c->w + panel * depth * PANEL * 2;
    fetch f = {w + FETCH_AHEAD, HALVES * PANEL * 2};
    for (int64_t i = begin; i < end; i++) {
        int64_t start = block_start(b, i), rows = block_start(b, i + 1) - start;
        const char *x = (const char *)packed + start * ROW_BYTES;
        float *tile = tiles + (start - origin) * PANEL;
        pairs_product(rows, BFLOAT16, w, x, 0, 1, depth / 2, tile, PANEL, 0, NULL, f);
        f.step = 0;
    }
}
#endif

#define GROUPS (BLOCK / SUMMED * PANEL) /* maximum number of group numbers per block */
#define SLICE_BLOCKS 8 /* blocks of a panel's codes that stay in L1 */
#define WIDENED_BLOCKS 4 /* those that stay in L1 beside their codes, unpacked to bytes */

/* to[groups][PANEL] = from * factors; consecutive groups' factors are `step` numbers apart; NULL: no factors. */
INLINE void widen_as(int type, const void *from, int64_t num_groups, const float *factors, int64_t step,
                     float *to) {
    for (int64_t i = 0; i < num_groups * PANEL; i += PANEL, factors += factors ? step : 0)
        for (int64_t j = 0; j < PANEL; j += LANES) {
            vec x = load(type, from, i + j);
            store(to + i + j, factors ? x * load(FLOAT32, factors, j) : x);
        }
}
INLINE void widen_any(int type, const void *from, int64_t first, int64_t num_groups,
                      const float *factors, int64_t step, float *to) {
    from = at(type, from, first * PANEL);
    if (type == INT8)
        widen_as(INT8, from, num_groups, factors, step, to);
    else if (type == FLOAT16)
        widen_as(FLOAT16, from, num_groups, factors, step, to);
    else if (type == BFLOAT16)
        widen_as(BFLOAT16, from, num_groups, factors, step, to);
    else
        widen_as(FLOAT32, from, num_groups, factors, step, to);
}

/* Widen scales and minima of some groups of a panel to floats, for codes.h; `super` selects the factors. Integer
 * minima without factors are zero points, multiples of their groups' scales. */
INLINE void widen_groups(const linear_call *c, int64_t first, int64_t super, int64_t num_groups,
                         float *scales, float *minima) {
    float factors[PANEL] __attribute__((aligned(64)));
    const float *times = c->scale_factors ? factors : NULL;
    if (times) widen_any(c->factors_type, c->scale_factors, super, 1, NULL, 0, factors);
    widen_any(c->scales_type, c->group_scales, first, num_groups, times, 0, scales);
    if (!c->group_minima) return;
    times = c->minimum_factors ? factors : c->minima_type == INT8 ? scales : NULL;
    if (c->minimum_factors) widen_any(c->factors_type, c->minimum_factors, super, 1, NULL, 0, factors);
    widen_any(c->minima_type, c->group_minima, first, num_groups, times, times == scales ? PANEL : 0, minima);
}

/* Prefetch the scales and minima that widen_groups reads. */
INLINE void fetch_groups(const linear_call *c, int64_t first, int64_t num_groups) {
    const void *numbers[] = {c->group_scales, c->group_minima};
    int64_t sizes[] = {size_of(c->scales_type) * PANEL, size_of(c->minima_type) * PANEL};
    for (int n = 0; n < 2 && numbers[n]; n++)
        for (int64_t i = 0; i < num_groups * sizes[n]; i += 64)
            fetch_into(1, (const char *)numbers[n] + first * sizes[n] + i);
}

/* Return the blocks [first, first + count) of a panel of codes, with widened scales and minima. Prefetches the
 * next panel's scales and minima, which hardware prefetchers miss, as many codes lie in between. */
INLINE code_slice slice_of(const linear_call *c, int64_t panel, int64_t first, int64_t count,
                           int64_t x_step, float *scales, float *minima) {
    code_slice slice = {count, x_step, groups_of(c), NULL, NULL};
    if (!c->group_scales) return slice;
    slice.scales = scales, slice.minima = c->group_minima ? minima : NULL;
    int64_t num_groups = ceil_div(c->depth, c->group), num_supers = ceil_div(c->depth, SUPER);
    int64_t each = BLOCK / slice.groups.size, blocks = c->group > BLOCK ? c->group / BLOCK : 1;
    for (int64_t i = first; i < first + count; i++, scales += each * PANEL, minima += each * PANEL) {
        int64_t group = blocks > 1 ? i / blocks : i * each, here = min64(each, num_groups - group);
        fetch_groups(c, (panel + 1) * num_groups + group, here);
        widen_groups(c, panel * num_groups + group, panel * num_supers + i * BLOCK / SUPER, here,
                     scales, minima);
        for (int64_t j = here * PANEL; j < each * PANEL; j += LANES)
            store(scales + j, (vec){0}), store(minima + j, (vec){0});
    }
    return slice;
}

/* Multiply with a panel of codes, see PackedWeight for their order. */
INLINE void multiply_codes(int type, SUMS_OF_A_PANEL) {
    int bits = bits_of(type);
    float scales[SLICE_BLOCKS * GROUPS] __attribute__((aligned(64)));
    float minima[SLICE_BLOCKS * GROUPS] __attribute__((aligned(64)));
    uint8_t last_block[BLOCK * PANEL] __attribute__((aligned(64)));
    /* Codes that are unpacked to bytes: TILED_GROUPS groups, or WIDENED_BLOCKS blocks. */
    uint8_t numbers[4 * BLOCK * PANEL] __attribute__((aligned(64)));
    int64_t origin = block_start(b, begin), padded = filled_depth(c), full = padded / BLOCK;
    int64_t step_bytes = PANEL * 4, bytes = BLOCK * PANEL * bits / 8, all = ceil_div(padded, BLOCK);
    int widened = !b.size && is_widened(type, b.count);
    int64_t most = b.size ? TILED_GROUPS * groups_of(c).size / BLOCK : widened ? WIDENED_BLOCKS : SLICE_BLOCKS;
    int64_t room = room_for(c, b.count), x_step = room * block_bytes(bits);
    const uint8_t *w = (const uint8_t *)c->w + panel * padded * PANEL * bits / 8;
    memset(tiles, 0, (block_start(b, end) - origin) * PANEL * sizeof(float));
    if (full < all) {
        memset(last_block, 0, sizeof last_block);
        memcpy(last_block, w + full * bytes, (padded - full * BLOCK) * PANEL * bits / 8);
    }
    for (int64_t s = 0, count; s < all; s += count) {
        int is_last = s == full;
        count = is_last ? 1 : min64(most, full - s);
        const uint8_t *here = is_last ? last_block : w + s * bytes;
        code_slice slice = slice_of(c, panel, s, count, x_step, scales, minima);
        /* One block of rows fetches ahead within the slice; several blocks share the slice and fetch the next
         * one. */
        fetch f = {(const char *)here + FETCH_AHEAD, step_bytes};
        int64_t num_fetches = count * bytes / step_bytes;
        if (end - begin > 1) f.step = ceil_div(step_bytes, end - begin);
        if (is_last) f.step = 0;
#if TILES_OF_CODES
        if (b.size) unpack_codes(type, slice.groups.offset, here, count * BLOCK, f.from, numbers);
#endif
        if (widened) unpack_codes(type, 0, here, count * BLOCK, NULL, numbers);
        for (int64_t i = begin; i < end; i++) {
            int64_t start = block_start(b, i), rows = block_start(b, i + 1) - start;
            code_rows x = rows_from(bits, (const char *)packed + s * x_step, room, start);
            float *tile = tiles + (start - origin) * PANEL;
#if TILES_OF_CODES
            if (b.size) {
                tiled_codes(rows, numbers, x, slice, tile);
                continue;
            }
#endif
            if (end - begin > 1)
                f.from = (const char *)here + count * bytes + (i - begin) * num_fetches * f.step;
            /* More steps fetch the same bytes. */
            fetch wide = {f.from, ceil_div(f.step * bits, 8)};
            if (widened)
                micro_codes(rows, CODES8, numbers, x, slice, tile, wide);
            else
                micro_codes(rows, type, here, x, slice, tile, f);
        }
    }
}

/* Return input k's code; w: the output's first byte in a panel. */
INLINE int code_at(int bits, const uint8_t *w, int64_t k) {
    const int64_t pitch = PANEL * 4;
    if (bits == 8) return w[k / 4 * pitch + k % 4];
    int64_t step = bits == 4 ? k / 8 : k / 16 * 3 + k % 16 / 8;
    int both = w[step * pitch + k % 4], low = k % 8 < 4 ? both & 15 : both >> 4;
    if (bits == 4) return low;
    int high = w[(k / 16 * 3 + 2) * pitch + k % 4] >> k % 16 / 4 * 2;
    return low | (high & 3) << 4;
}

/* Unpack a row of W's codes, rounded to `out_type`. */
static void unpack_row(const linear_call *c, int64_t id, char *to) {
    int bits = bits_of(c->w_type), is_e2m1 = c->w_type == CODES_E2M1;
    static const float numbers_e2m1[] = {TABLE_E2M1};
    float scales[GROUPS], minima[GROUPS], row[BLOCK];
    int64_t panel = id / PANEL, column = id % PANEL;
    const uint8_t *w = (const uint8_t *)c->w + (panel * filled_depth(c) * bits / 32 * PANEL + column) * 4;
    fetch_lines((const char *)w, PANEL * 4, filled_depth(c) * bits / 32);
    for (int64_t k = 0; k < c->depth; k += BLOCK) {
        int64_t count = min64(BLOCK, c->depth - k);
        code_slice slice = slice_of(c, panel, k / BLOCK, 1, 0, scales, minima);
        for (int64_t i = 0; i < count; i++) {
            int code = code_at(bits, w, k + i);
            float number = is_e2m1 ? numbers_e2m1[code] : code;
            row[i] = (number - slice.groups.offset) * scales[i / slice.groups.size * PANEL + column];
        }
        /* In a separate loop: product and sum are rounded one by one, as in the reference. */
        for (int64_t i = 0; i < count && c->group_minima; i++)
            row[i] += minima[i / slice.groups.size * PANEL + column];
        write_row(c->out_type, row, to + k * size_of(c->out_type), count);
    }
}

int baton_unpack_codes(const linear_call *c) {
    const int64_t *ids = c->x;
    for (int64_t i = 0; i < c->num_rows; i++)
        if (ids[i] < 0 || ids[i] >= c->num_columns) return NO_ROW;
    int team = c->num_rows > 1 ? c->num_threads : 1;
#pragma omp parallel for num_threads(team) if (team > 1)
    for (int64_t i = 0; i < c->num_rows; i++)
        unpack_row(c, ids[i], c->out + i * c->depth * size_of(c->out_type));
    return 0;
}

/* Not inlined, as code around such a long loop changes what the compiler keeps in registers. */
typedef void panel_sums(SUMS_OF_A_PANEL);
#define PANEL_SUMS(name, multiply, type)                                    \
    static __attribute__((noinline)) void name(SUMS_OF_A_PANEL) {           \
        multiply(type, c, panel, then, b, begin, end, packed, tiles, left); \
    }
PANEL_SUMS(of_float32, multiply, FLOAT32)
PANEL_SUMS(of_bfloat16, multiply, BFLOAT16)
PANEL_SUMS(of_float16, multiply, FLOAT16)
PANEL_SUMS(of_float8, multiply, FLOAT8)
PANEL_SUMS(of_int8, multiply, INT8)
PANEL_SUMS(of_codes8, multiply_codes, CODES8)
PANEL_SUMS(of_codes6, multiply_codes, CODES6)
PANEL_SUMS(of_codes4, multiply_codes, CODES4)
PANEL_SUMS(of_codes_e2m1, multiply_codes, CODES_E2M1)
#if DOTS_HALVES
PANEL_SUMS(of_bfloat16_in_halves, multiply_halves, BFLOAT16)
PANEL_SUMS(of_float8_in_halves, multiply_halves, FLOAT8)
#endif

static panel_sums *sums_of(const linear_call *c) {
#if DOTS_HALVES
    if (in_halves(c) && c->w_type == BFLOAT16 && c->depth < HALVES && !in_tiles(c)) return of_few_in_halves;
    if (in_halves(c)) return c->w_type == FLOAT8 ? of_float8_in_halves : of_bfloat16_in_halves;
#endif
    switch (c->w_type) {
        case FLOAT32: return of_float32;
        case BFLOAT16: return of_bfloat16;
        case FLOAT16: return of_float16;
        case FLOAT8: return of_float8;
        case CODES8: return of_codes8;
        case CODES6: return of_codes6;
        case CODES4: return of_codes4;
        case CODES_E2M1: return of_codes_e2m1;
    }
    return of_int8;
}

/* With few rows, a gated layer computes this many panels of one half, then the same ones of the other half: a
 * switch between the two streams costs as much as a quarter of a panel of codes. */
#define TOGETHER (MOST_TILED / TILED_ROWS)
INLINE int64_t num_together(const linear_call *c, row_blocks b) {
    return c->gated && b.num_blocks == 1 ? TOGETHER : 1;
}

/* Add the two sums of each row of x, in place. */
INLINE void join_rows(int64_t rows, float *tile) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < PANEL; i += LANES) {
            const float *both = tile + 2 * r * PANEL + i;
            store(tile + r * PANEL + i, load(FLOAT32, both, 0) + load(FLOAT32, both, PANEL));
        }
}

/* Compute `count` panels of the output (at most num_together) for the blocks [begin, end) of a chunk of rows. */
static void panels_of(const linear_call *c, int64_t panel, int64_t count, int64_t chunk, row_blocks b,
                      int64_t begin, int64_t end, const void *packed) {
    float tiles[2][MOST_TILED * PANEL] __attribute__((aligned(64)));
    int64_t first = block_start(b, begin), rows = block_start(b, end) - first, size = rows * PANEL;
    first /= b.each, rows /= b.each; /* now in rows of x; `size` counts multiplied rows */
    int halves = c->gated != 0;
    panel_sums *sums = sums_of(c);
    unfinished left[TOGETHER];
    for (int64_t i = 0; i < count; i++)
        left[i] = (unfinished){c, (panel + i) * PANEL, chunk + first, 0, tiles[0] + i * size,
                               halves ? tiles[1] + i * size : NULL};
#if HAS_TILES
    if (b.size) tiles_begin(is_codes(c->w_type) ? groups_of(c).size : ROW_BYTES);
#endif
    for (int half = 0; half <= halves; half++)
        for (int64_t i = 0; i < count; i++) {
            int64_t here = panel + i + half * num_panels(c), next = i + 1 < count ? here + 1 : panel + count;
            if (i + 1 == count && half < halves) next = panel + num_panels(c);
            const void *then = at(c->w_type, c->w, next * filled_depth(c) * PANEL);
            sums(c, here, then, b, begin, end, packed, tiles[half] + i * size, half < halves ? NULL : left + i);
            if (b.each == 2) join_rows(rows, tiles[half] + i * size);
        }
    for (int64_t i = 0; i < count; i++) {
        left[i].ready = chunk + first + rows - left[i].row;
        finish_rows(left + i, rows);
    }
#if HAS_TILES
    if (b.size) tiles_end();
#endif
}

/* Compute a thread's share of one chunk: panels, or parts of panels if panels are too few. */
static void share_of(const linear_call *c, int64_t chunk, row_blocks b, const void *packed,
                     int thread, int num_threads) {
    int64_t panels = num_panels(c);
    int64_t parts = panels % num_threads == 0 || panels >= 8 * num_threads
                        ? 1
                        : min64(b.num_blocks, ceil_div(8 * num_threads, panels));
    int64_t last = panels * parts * (thread + 1) / num_threads, count;
    for (int64_t unit = panels * parts * thread / num_threads; unit < last; unit += count) {
        int64_t part = unit % parts;
        count = min64(num_together(c, b), last - unit);
        panels_of(c, unit / parts, count, chunk, b, b.num_blocks * part / parts, b.num_blocks * (part + 1) / parts,
                  packed);
    }
}

/* Compute the i-th of `num_chunks` chunks of rows in one thread, without waiting for other threads. */
static int chunk_of(const linear_call *c, int64_t i, int64_t num_chunks) {
    void *packed = packed_memory(c);
    if (!packed) return 1;
    int64_t chunk = c->num_rows * i / num_chunks;
    row_blocks b = cut(c, c->num_rows * (i + 1) / num_chunks - chunk);
    if (!is_direct(c)) pack_rows(c, chunk, b.count / b.each, 0, b.count / b.each, packed);
    for (int64_t panel = 0; panel < num_panels(c); panel++)
        panels_of(c, panel, 1, chunk, b, 0, b.num_blocks, packed);
    return 0;
}

/* Compute all rows with all threads, which together pack the input, and divide the panels. */
static void rows_together(const linear_call *c, void *packed) {
    int thread = omp_get_thread_num(), team = omp_get_num_threads();
    int64_t size = chunk_rows(c);
    for (int64_t chunk = 0; chunk < c->num_rows; chunk += size) {
        row_blocks b = cut(c, min64(size, c->num_rows - chunk));
        if (!is_direct(c)) {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < b.count / b.each; r++)
                pack_rows(c, chunk, b.count / b.each, r, r + 1, packed);
        }
        share_of(c, chunk, b, packed, thread, team);
        if (chunk + size < c->num_rows) {
#pragma omp barrier
        }
    }
}

int baton_linear(const linear_call *c) {
    int failed = 0, by_rows = c->num_rows >= c->num_threads * BY_ROWS;
    int64_t each = ceil_div(c->num_rows, c->num_threads), chunks = ceil_div(each, chunk_rows(c));
    if (!in_tiles(c)) chunks = max64(chunks, min64(each / MIN_CHUNK, CHUNKS));
    int64_t num_chunks = chunks * c->num_threads;
    void *packed = packed_memory(c);
    if (!packed) return 1;
#pragma omp parallel num_threads(c->num_threads) reduction(+ : failed)
    {
        if (by_rows)
#pragma omp for schedule(dynamic, 1) nowait
            for (int64_t i = 0; i < num_chunks; i++) failed += chunk_of(c, i, num_chunks);
        else
            rows_together(c, packed);
        finish_end();
    }
    return failed;
}

/* Multiply by a block-diagonal W: each group of inputs has its own group of outputs. */
typedef struct {
    linear_call first; /* call for the first group; each group begins a panel; no codes, no bias */
    int64_t num_groups, x_group_stride, out_group_stride;
} grouped_call;

/* Return 0, or 1 without memory for the packed input. */
int baton_grouped_linear(const grouped_call *c) {
    const linear_call *first = &c->first;
    int64_t w_size = num_panels(first) * filled_depth(first) * PANEL;
    int failed = 0, team = first->num_rows * w_size * c->num_groups < SERIAL_PRODUCTS ? 1 : first->num_threads;
#pragma omp parallel for num_threads(team) reduction(+ : failed) if (team > 1)
    for (int64_t g = 0; g < c->num_groups; g++) {
        linear_call own = *first;
        own.x = at(own.x_type, own.x, g * c->x_group_stride);
        own.w = at(own.w_type, own.w, g * w_size);
        own.out += g * c->out_group_stride * size_of(own.out_type);
        int64_t num_chunks = ceil_div(own.num_rows, chunk_rows(&own));
        for (int64_t i = 0; i < num_chunks; i++) failed += chunk_of(&own, i, num_chunks);
        finish_end();
    }
    return failed;
}

int64_t baton_most_rows(const linear_call *c) { return chunk_rows(c); }

int64_t baton_packed_bytes(const linear_call *c) { return packed_bytes(c, c->num_rows); }

void baton_pack_input(const linear_call *c, void *to) { pack_rows(c, 0, c->num_rows, 0, c->num_rows, to); }

void baton_linear_panels(const linear_call *c, int64_t begin, int64_t end, const void *packed) {
    row_blocks b = cut(c, c->num_rows);
    for (int64_t panel = begin, count; panel < end; panel += count) {
        count = min64(num_together(c, b), end - panel);
        panels_of(c, panel, count, 0, b, 0, b.num_blocks, is_direct(c) ? c->x : packed);
    }
    finish_end();
}

linear_call baton_linear_part(const linear_call *c, int64_t i) {
    linear_call part = *c;
    int64_t panels = i * (num_panels(c) << (c->gated != 0)), columns = panels * PANEL;
    int64_t size = filled_depth(c) * PANEL;
    int64_t panel_bytes = is_codes(c->w_type) ? size * bits_of(c->w_type) / 8 : size * size_of(c->w_type);
    part.w = (const char *)c->w + panels * panel_bytes;
    if (c->scales) part.scales = c->scales + columns;
    if (c->bias) part.bias = c->bias + columns;
    if (!c->group_scales) return part;
    int64_t groups = columns * ceil_div(c->depth, c->group), supers = columns * ceil_div(c->depth, SUPER);
    part.group_scales = at(c->scales_type, c->group_scales, groups);
    if (c->group_minima) part.group_minima = at(c->minima_type, c->group_minima, groups);
    if (c->scale_factors) part.scale_factors = at(c->factors_type, c->scale_factors, supers);
    if (c->minimum_factors) part.minimum_factors = at(c->factors_type, c->minimum_factors, supers);
    return part;
}

int baton_panel(void) { return PANEL; }

/* Return whether bfloat16 is multiplied by instructions of its own. */
int baton_has_bfloat16(void) { return DOTS_HALVES; }
