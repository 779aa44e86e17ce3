/* out[M, N] = x[M, K] @ W^T: linear layers over weights that were packed when they were loaded.
 *
 * W is kept as [N / PANEL][K][PANEL] (the last panel filled up with zeros), so that a micro kernel
 * reads it as one stream. Decodes are bound by that stream, prompts by multiply-adds; the blocking
 * follows Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
 * Refuses to know: what a layer is for.
 */
#include "micro.h"

/* Measured on a Xeon with 48 KiB of L1 and 2 MiB of L2 cache, and alike on its neighbours. */
#define CHUNK_ROWS (44 * MAX_ROWS) /* of x that are packed at a time: half a megabyte to a few */
#define MAX_DEPTH 256    /* of a panel that all rows use before the next slice: stays in L1 */
#define FETCH_AHEAD 2048 /* bytes of a stream that is read once */
#define COPY_FROM 8      /* blocks of rows that pay for a copy of a slice in L1 */
#define WIDEN_FROM 3     /* the same where the copy saves converting bf16 or int8 each time */

typedef struct {
    int x_type, w_type, out_type;
    int64_t num_rows, num_columns, depth;
    const void *x;
    int64_t x_stride;
    const void *w;
    const float *scales, *bias; /* [num_columns], or NULL */
    char *out;
    int64_t out_stride;
} linear_call;

/* Rows are cut into blocks of nearly equal size, none larger than MAX_ROWS. */
typedef struct {
    int64_t count, num_blocks;
} row_blocks;

INLINE row_blocks cut(int64_t count) { return (row_blocks){count, ceil_div(count, MAX_ROWS)}; }
INLINE int64_t block_start(row_blocks b, int64_t i) { return b.count * i / b.num_blocks; }

/* One block of x, [rows, depth], becomes [depth][rows]. */
static void pack_rows(const linear_call *c, int64_t first, int64_t rows, float *to) {
    const void *x = at(c->x_type, c->x, first * c->x_stride);
    for (int64_t k = 0; k < c->depth; k++)
        for (int64_t r = 0; r < rows; r++, to++)
            *to = c->x_type == BFLOAT16 ? from_bf16(((const uint16_t *)x)[r * c->x_stride + k])
                                        : ((const float *)x)[r * c->x_stride + k];
}

/* A finished tile [rows, PANEL] into the output. */
static void finish(const linear_call *c, int64_t first, int64_t rows, int64_t column, float *tile) {
    int64_t width = min64(PANEL, c->num_columns - column);
    for (int64_t r = 0; r < rows; r++, tile += PANEL) {
        if (c->scales)
            for (int64_t i = 0; i < width; i++) tile[i] *= c->scales[column + i];
        if (c->bias)
            for (int64_t i = 0; i < width; i++) tile[i] += c->bias[column + i];
        char *to = c->out + ((first + r) * c->out_stride + column) * size_of(c->out_type);
        write_row(c->out_type, tile, to, width);
    }
}

INLINE void widen(int type, const void *w, int64_t size, float *to) {
    for (int64_t i = 0; i < size; i += LANES) store(to + i, load(type, w, i));
}

/* One panel for the blocks [begin, end) of a chunk of rows. */
INLINE void panel_of(const linear_call *c, int type, int64_t panel, int64_t chunk, row_blocks b,
                     int64_t begin, int64_t end, const float *packed) {
    float tiles[CHUNK_ROWS * PANEL] __attribute__((aligned(64)));
    float wide[MAX_DEPTH * PANEL] __attribute__((aligned(64)));
    int64_t num_slices = ceil_div(c->depth, MAX_DEPTH);
    int widens = end - begin >= (type == FLOAT32 ? COPY_FROM : WIDEN_FROM);
    int shared = end - begin > 1;
    int64_t origin = block_start(b, begin);
    for (int64_t s = 0; s < num_slices; s++) {
        int64_t k = c->depth * s / num_slices, size = c->depth * (s + 1) / num_slices - k;
        const void *w = at(type, c->w, (panel * c->depth + k) * PANEL);
        /* Alone, a slice is its own stream; else the next slice comes while this one is used. */
        fetch f = {(const char *)w + FETCH_AHEAD, PANEL * size_of(type)};
        if (widens) widen(type, w, size * PANEL, wide);
        if (shared) f.step = ceil_div(f.step, end - begin);
        for (int64_t i = begin; i < end; i++) {
            if (shared) f.from = (const char *)at(type, w, size * PANEL) + (i - begin) * size * f.step;
            int64_t start = block_start(b, i), rows = block_start(b, i + 1) - start;
            const float *x = packed + start * c->depth + k * rows;
            float *tile = tiles + (start - origin) * PANEL;
            if (widens)
                micro(rows, FLOAT32, wide, x, size, tile, s > 0, f);
            else
                micro(rows, type, w, x, size, tile, s > 0, f);
            if (s == num_slices - 1) finish(c, chunk + start, rows, panel * PANEL, tile);
        }
    }
}

/* A thread's share of one chunk: panels, or parts of panels where these are too few. */
static void share_of(const linear_call *c, int64_t chunk, row_blocks b, const float *packed,
                     int thread, int num_threads) {
    int64_t num_panels = ceil_div(c->num_columns, PANEL);
    int64_t parts = num_panels % num_threads == 0 || num_panels >= 8 * num_threads
                        ? 1
                        : min64(b.num_blocks, ceil_div(8 * num_threads, num_panels));
    int64_t num_units = num_panels * parts;
    int64_t last = num_units * (thread + 1) / num_threads;
    for (int64_t unit = num_units * thread / num_threads; unit < last; unit++) {
        int64_t panel = unit / parts, part = unit % parts;
        int64_t begin = b.num_blocks * part / parts, end = b.num_blocks * (part + 1) / parts;
        if (c->w_type == FLOAT32)
            panel_of(c, FLOAT32, panel, chunk, b, begin, end, packed);
        else if (c->w_type == BFLOAT16)
            panel_of(c, BFLOAT16, panel, chunk, b, begin, end, packed);
        else
            panel_of(c, INT8, panel, chunk, b, begin, end, packed);
    }
}

/* Returns 0, or 1 when there is no memory for the packed input. */
int baton_linear(int x_type, int w_type, int out_type, int num_threads, int64_t num_rows,
                 int64_t num_columns, int64_t depth, const void *x, int64_t x_stride, const void *w,
                 const float *scales, const float *bias, void *out) {
    linear_call call = {x_type, w_type, out_type, num_rows, num_columns, depth, x,
                        x_stride, w, scales, bias, out, num_columns};
    int direct = num_rows == 1 && x_type == FLOAT32; /* a single row is packed as it is */
    float *packed = (float *)x;
    if (!direct) {
        packed = baton_scratch(0, min64(num_rows, CHUNK_ROWS) * depth * sizeof(float));
        if (!packed) return 1;
    }
#pragma omp parallel num_threads(num_threads)
    {
        int thread = omp_get_thread_num(), team = omp_get_num_threads();
        for (int64_t chunk = 0; chunk < num_rows; chunk += CHUNK_ROWS) {
            row_blocks b = cut(min64(CHUNK_ROWS, num_rows - chunk));
            if (!direct) {
#pragma omp for schedule(static)
                for (int64_t i = 0; i < b.num_blocks; i++) {
                    int64_t start = block_start(b, i);
                    pack_rows(&call, chunk + start, block_start(b, i + 1) - start,
                              packed + start * depth);
                }
            }
            share_of(&call, chunk, b, packed, thread, team);
            if (!direct && chunk + CHUNK_ROWS < num_rows) {
#pragma omp barrier
            }
        }
    }
    return 0;
}

int baton_panel(void) { return PANEL; }
