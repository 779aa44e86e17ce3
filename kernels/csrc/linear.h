/* out[M, N] = x[M, K] @ W^T, whole, or piece by piece for whoever has many small products to make.
 *
 * Refuses to know: how it is computed.
 */
#ifndef BATON_LINEAR_H
#define BATON_LINEAR_H

#include <stdint.h>

typedef struct {
    int64_t x_type, w_type, out_type, num_threads;
    /* SILU and so on: the first half of W makes gates of the second, out[M, N / 2]; 0: none. */
    int64_t gated;
    int64_t num_rows, num_columns, depth, x_stride, out_stride; /* num_columns: of out */
    const void *x, *w;
    const float *scales, *bias; /* one per row of W, or NULL */
    char *out;
    /* Of codes, see codes.h: [N / PANEL][K / group][PANEL] numbers, or NULL, and by what those of
     * each SUPER inputs are multiplied, [N / PANEL][K / SUPER][PANEL] numbers, or NULL. */
    int64_t group, scales_type, minima_type, factors_type;
    int64_t fine; /* codes only: each input is rounded to two numbers of 8 bits, see codes.h */
    const void *group_scales, *group_minima, *scale_factors, *minimum_factors;
} linear_call;

/* Returns 0, or 1 when there is no memory for the packed input. `gated`: num_columns, those of
 * the output, is a multiple of PANEL, and W has twice as many rows. */
int baton_linear(const linear_call *c);

#define NO_ROW 3 /* what a call returns that is asked for one that W does not have */

/* Rows of W, of codes, as numbers: out[num_rows, depth]; x: which, int64_t each. 0, or NO_ROW. */
int baton_unpack_codes(const linear_call *c);

/* The pieces, by one thread each: at most so many rows at once, */
int64_t baton_most_rows(const linear_call *c);
/* packed into so many bytes, */
int64_t baton_packed_bytes(const linear_call *c);
void baton_pack_input(const linear_call *c, void *to);
/* and multiplied with the panels of the output from `begin` to `end`. */
void baton_linear_panels(const linear_call *c, int64_t begin, int64_t end, const void *packed);

/* The i-th of several layers of the same shape, whose weights, whole panels, lie one after another. */
linear_call baton_linear_part(const linear_call *c, int64_t i);

#endif
