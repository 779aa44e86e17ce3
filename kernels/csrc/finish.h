/* Turns tiles of sums into rows of the output: scale, add the bias, gate, round.
 *
 * Refuses to know: how sums are computed.
 */
#ifndef BATON_FINISH_H
#define BATON_FINISH_H

#include "halves.h"
#include "linear.h"

/* Smallest output, in bytes, that caches cannot hold until it is read. */
#define PASSES_BY (1 << 20)

/* The unfinished rows of a panel. */
typedef struct {
    const linear_call *call;
    int64_t column, row, ready; /* ready: rows with complete sums */
    float *tile, *up;          /* up: tile of the ups, or NULL */
} unfinished;

/* Return sums after scales and bias of W's rows from `column` on. */
INLINE vec adjusted(const linear_call *c, int64_t column, vec sums) {
    if (c->scales) sums *= load(FLOAT32, c->scales, column);
    if (c->bias) sums += load(FLOAT32, c->bias, column);
    return sums;
}

/* Return the sums of a call that adds, plus the output's numbers at `to`. */
INLINE vec added(const linear_call *c, int type, int64_t column, const char *to, vec sums) {
    vec old = load(type, to, 0);
    return c->gains ? multiply_add(old, load(FLOAT32, c->gains, column), sums) : old + sums;
}

/* Return activation(sums) * up, after rounding both. */
INLINE vec gate_of(const linear_call *c, int type, vec sums, vec up) {
    vec gate = round_all(type, activate(c->gated, round_all(type, sums)));
    return gate * round_all(type, gated_half(c->gated, round_all(type, up)));
}

/* Store 2 * LANES sums; with 512-bit vectors, one line of bfloat16 or two lines of floats. */
INLINE void store_lines(int type, char *to, vec first, vec second, int passes_by) {
#if DOTS_HALVES
    if (type == BFLOAT16) {
        store_line(to, first, second, passes_by);
        return;
    }
    if (type == FLOAT32 && passes_by) {
        _mm512_stream_ps((float *)to, (__m512)first);
        _mm512_stream_ps((float *)to + LANES, (__m512)second);
        return;
    }
#endif
    store_as(type, to, 0, first);
    store_as(type, to, LANES, second);
}

/* Finish rows of a whole panel. */
INLINE void finish_whole(int type, unfinished *u, int64_t count) {
    const linear_call *c = u->call;
    int64_t step = c->out_stride * size_of(type);
    char *to = c->out + u->row * step + u->column * size_of(type);
    int is_line = (uintptr_t)to % 64 == 0 && step % 64 == 0;
    int passes_by = is_line && !c->adds && c->num_rows * step >= PASSES_BY;
    for (int64_t r = 0; r < count; r++, to += step) {
        vec sums[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            int64_t column = u->column + i * LANES, place = r * PANEL + i * LANES;
            sums[i] = adjusted(c, column, load(FLOAT32, u->tile, place));
            if (c->adds) sums[i] = added(c, type, column, to + i * LANES * size_of(type), sums[i]);
            if (!u->up) continue;
            vec up = adjusted(c, c->num_columns + column, load(FLOAT32, u->up, place));
            sums[i] = gate_of(c, type, sums[i], up);
        }
        store_lines(type, to, sums[0], sums[1], passes_by);
    }
}

/* Finish rows of the last panel, which is partial; such layers have no gate. */
INLINE void finish_part(int type, unfinished *u, int64_t count) {
    const linear_call *c = u->call;
    int64_t width = c->num_columns - u->column;
    for (int64_t r = 0; r < count; r++) {
        float *row = u->tile + r * PANEL, old[PANEL];
        char *to = c->out + ((u->row + r) * c->out_stride + u->column) * size_of(type);
        if (c->scales)
            for (int64_t i = 0; i < width; i++) row[i] *= c->scales[u->column + i];
        if (c->bias)
            for (int64_t i = 0; i < width; i++) row[i] += c->bias[u->column + i];
        if (c->adds) {
            read_row(type, to, old, width);
            for (int64_t i = 0; i < width; i++) row[i] += c->gains ? old[i] * c->gains[u->column + i] : old[i];
        }
        write_row(type, row, to, width);
    }
}

INLINE void finish_any(int type, unfinished *u, int64_t count) {
    if (u->column + PANEL <= u->call->num_columns)
        finish_whole(type, u, count);
    else
        finish_part(type, u, count);
}

/* Finish the next `count` rows, or those that are ready. Call finish_end after the last row. */
static __attribute__((noinline)) void finish_rows(unfinished *u, int64_t count) {
    count = min64(count, u->ready);
    if (u->call->out_type == BFLOAT16)
        finish_any(BFLOAT16, u, count);
    else if (u->call->out_type == FLOAT16)
        finish_any(FLOAT16, u, count);
    else
        finish_any(FLOAT32, u, count);
    u->row += count, u->ready -= count, u->tile += count * PANEL;
    if (u->up) u->up += count * PANEL;
}

/* Make streamed stores visible to other threads. */
INLINE void finish_end(void) {
#if DOTS_HALVES
    _mm_sfence();
#endif
}

#endif
