/* out[M, N] = x[M, K] @ W^T: the whole product, or pieces of it, for callers with many small products.
 *
 * Refuses to know: how it is computed.
 */
#ifndef BATON_LINEAR_H
#define BATON_LINEAR_H

#include <stdint.h>

typedef struct {
    int64_t x_type, w_type, out_type, num_threads;
    /* The activation, such as SILU: out[M, N / 2] = activation(x @ W1^T) * (x @ W2^T), W1 and W2 being the halves
     * of W; 0: no gate. */
    int64_t gated;
    int64_t num_rows, num_columns, depth, x_stride, out_stride; /* num_columns: columns of out */
    const void *x, *w;
    const float *scales, *bias; /* one per row of W, or NULL */
    char *out;
    /* For codes (codes.h): scales and minima of groups, [N / PANEL][K / group][PANEL], or NULL; and the factors
     * that SUPER inputs' scales or minima share, [N / PANEL][K / SUPER][PANEL], or NULL. */
    int64_t group, scales_type, minima_type, factors_type;
    int64_t fine; /* codes only: each input is rounded to two numbers of 8 bits, see codes.h */
    const void *group_scales, *group_minima, *scale_factors, *minimum_factors;
    /* Whether out = out * gains + sums + bias, rounded once, instead of only sums + bias; needs gated == 0. */
    int64_t adds;
    const float *gains; /* [num_columns], or NULL: all are 1 */
} linear_call;

/* Compute the product; return 0, or 1 without memory for the packed input. With `gated`, num_columns must be a
 * multiple of PANEL, and W has twice as many rows. */
int baton_linear(const linear_call *c);

#define NO_ROW 3 /* returned if the call asks for a row that W does not have */

/* Unpack rows of codes to out[num_rows, depth]; x: int64_t indices of rows. Return 0 or NO_ROW. */
int baton_unpack_codes(const linear_call *c);

/* Pieces of a product, each for one thread. Return the most rows of a piece. */
int64_t baton_most_rows(const linear_call *c);
/* Return the bytes of the call's packed rows. */
int64_t baton_packed_bytes(const linear_call *c);
void baton_pack_input(const linear_call *c, void *to);
/* Multiply the packed rows with the output's panels [begin, end). */
void baton_linear_panels(const linear_call *c, int64_t begin, int64_t end, const void *packed);

/* Return the call of the i-th of equal layers, whose weights follow one another in whole panels. */
linear_call baton_linear_part(const linear_call *c, int64_t i);

#endif
