/* Tiles of sums become rows of the output: scaled, with their bias, gated, rounded.
 *
 * Refuses to know: how sums come about.
 */
#ifndef BATON_FINISH_H
#define BATON_FINISH_H

#include "halves.h"
#include "linear.h"

/* Bytes of an output from which no cache keeps it until it is read. */
#define PASSES_BY (1 << 20)

/* What the sums still lack: scales and bias of the columns that begin at `column` of W. */
INLINE void adjust(const linear_call *c, int64_t column, int64_t width, float *row) {
    if (c->scales)
        for (int64_t i = 0; i < width; i++) row[i] *= c->scales[column + i];
    if (c->bias)
        for (int64_t i = 0; i < width; i++) row[i] += c->bias[column + i];
}

/* The gate of sums, times what it gates; each rounded on the way. */
INLINE vec gate_of(const linear_call *c, int type, vec sums, vec up) {
    vec gate = round_all(type, activate(c->gated, round_all(type, sums)));
    return gate * round_all(type, gated_half(c->gated, round_all(type, up)));
}

/* A finished row of a tile into the output; `up` is its partner's where the layer is gated. */
INLINE void finish(const linear_call *c, int type, int64_t row, int64_t column, float *tile, float *up) {
    int64_t width = min64(PANEL, c->num_columns - column);
    void *to = c->out + (row * c->out_stride + column) * size_of(type);
    adjust(c, column, width, tile);
    if (!up) {
        write_row(type, tile, to, width);
        return;
    }
    adjust(c, c->num_columns + column, width, up);
    for (int64_t i = 0; i < PANEL; i += LANES)
        store_as(type, to, i, gate_of(c, type, load(FLOAT32, tile, i), load(FLOAT32, up, i)));
}

/* Rows of a panel that are left to finish, one after another. */
typedef struct {
    const linear_call *call;
    int64_t column, row, ready; /* ready: so many rows have their sums */
    float *tile, *up;          /* up: its partner's where the layer is gated, or NULL */
} unfinished;

INLINE void finish_all(int type, unfinished *u, int64_t count) {
    for (int64_t r = 0; r < count; r++)
        finish(u->call, type, u->row + r, u->column, u->tile + r * PANEL, u->up ? u->up + r * PANEL : NULL);
}

#if DOTS_HALVES
/* LANES sums and their neighbours as one line of bfloat16, or two of floats. */
INLINE void store_lines(int type, char *to, vec first, vec second, int passes_by) {
    if (type == BFLOAT16) {
        store_line(to, first, second, passes_by);
    } else if (passes_by) {
        _mm512_stream_ps((float *)to, (__m512)first);
        _mm512_stream_ps((float *)to + LANES, (__m512)second);
    } else {
        store((float *)to, first);
        store((float *)to + LANES, second);
    }
}

/* The same of whole lines of bfloat16 or floats, which may lack no more than a gate. */
INLINE void finish_lines(int type, unfinished *u, int64_t count) {
    const linear_call *c = u->call;
    int64_t step = c->out_stride * size_of(type);
    char *to = c->out + u->row * step + u->column * size_of(type);
    int is_line = (uintptr_t)to % 64 == 0 && step % 64 == 0;
    int passes_by = is_line && c->num_rows * step >= PASSES_BY;
    for (int64_t r = 0; r < count; r++, to += step) {
        vec sums[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            sums[i] = load(FLOAT32, u->tile, r * PANEL + i * LANES);
            if (u->up) sums[i] = gate_of(c, type, sums[i], load(FLOAT32, u->up, r * PANEL + i * LANES));
        }
        store_lines(type, to, sums[0], sums[1], passes_by);
    }
}
#endif

/* The next `count` rows, or as many as are ready. Who has finished all calls finish_end, too. */
static __attribute__((noinline)) void finish_rows(unfinished *u, int64_t count) {
    const linear_call *c = u->call;
    count = min64(count, u->ready);
#if DOTS_HALVES
    int is_whole = !c->scales && !c->bias && u->column + PANEL <= c->num_columns;
    if (is_whole && c->out_type == BFLOAT16)
        finish_lines(BFLOAT16, u, count);
    else if (is_whole && c->out_type == FLOAT32)
        finish_lines(FLOAT32, u, count);
    else
#endif
        if (c->out_type == BFLOAT16)
        finish_all(BFLOAT16, u, count);
    else if (c->out_type == FLOAT16)
        finish_all(FLOAT16, u, count);
    else
        finish_all(FLOAT32, u, count);
    u->row += count, u->ready -= count, u->tile += count * PANEL;
    if (u->up) u->up += count * PANEL;
}

/* Other threads see what went past the cache. */
INLINE void finish_end(void) {
#if DOTS_HALVES
    _mm_sfence();
#endif
}

#endif
