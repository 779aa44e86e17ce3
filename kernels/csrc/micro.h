/* c[rows, PANEL] (+)= x[rows, size] @ w[size, PANEL]: the kernel of all float matrix products.
 *
 * Every output's sum over `size` runs in order: a row's result does not depend on the other rows or their number.
 * Refuses to know: the origin of x and w, threads.
 */
#ifndef BATON_MICRO_H
#define BATON_MICRO_H

#include "vectors.h"

#define MAX_DEPTH 192 /* maximum number of inputs at a time, so that a panel's part of w stays in L1 beside x */
/* Floats between rows of x: a constant that does not map rows to the same cache set. */
#define X_STRIDE (MAX_DEPTH + 16)

/* Memory to prefetch during a sum, `step` bytes per step. */
typedef struct {
    const char *from;
    int64_t step;
} fetch;

/* Return whether this CPU reads a stream faster through L2 than past it. Intel's prefetchnta fills only L1, and
 * holds one of a core's few line buffers until memory answers: on a Cascade Lake, median decode steps take 1.1 to
 * 2.5 times as long with it, while on a Zen 5 it is 2 to 6 % faster. */
INLINE int streams_through_l2(void) {
#if defined(__x86_64__)
    return __builtin_cpu_is("intel");
#else
    return 0;
#endif
}

/* Prefetch a line into L1 (1), into L2 (2), or as part of a stream that is read once (0). If streams_through_l2()
 * is false, streams go past L2: in L2, a step's weights would evict what every step needs, including the
 * interpreter's code. `level` is a constant. */
INLINE void fetch_into(int level, const char *from) {
    if (level == 1)
        __builtin_prefetch(from, 0, 3);
    else if (level == 2 || streams_through_l2())
        __builtin_prefetch(from, 0, 2);
    else
        __builtin_prefetch(from, 0, 0);
}

/* Hide a loop's constant count from the compiler, so that it does not unroll the loop: on a Zen 5, unrolled loads
 * read memory a sixth more slowly. */
INLINE void as_one_loop(int64_t *turns) { __asm__("" : "+r"(*turns)); }

/* sum[r] += x[r] * w for one input of each row and one row of w. */
INLINE void add_products(int rows, const float *x, vec first, vec second, vec sum[][2]) {
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        vec input = splat(x[r * X_STRIDE]);
        sum[r][0] = multiply_add(input, first, sum[r][0]);
        sum[r][1] = multiply_add(input, second, sum[r][1]);
    }
}

/* w has `type` and is contiguous, PANEL numbers per input; bfloat16 and float8 have pairs of inputs, and x is
 * padded with a zero. */
INLINE void micro_rows(int rows, int type, const void *w, const float *x, int64_t size, float *c,
                       int64_t c_stride, int accumulate, fetch f) {
    vec sum[MAX_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        sum[r][0] = accumulate ? load(FLOAT32, c, r * c_stride) : (vec){0};
        sum[r][1] = accumulate ? load(FLOAT32, c, r * c_stride + LANES) : (vec){0};
    }
    for (int64_t k = 0; k < size; k++) {
        const char *here = at(type, w, k * PANEL);
        fetch_into(0, f.from + k * f.step);
        if (f.step > 64) fetch_into(0, f.from + k * f.step + 64);
        if (is_paired(type)) {
            vec_u32 left = load_pairs(type, here, 0), right = load_pairs(type, here, LANES);
            add_products(rows, x + k, first_of(type, left), first_of(type, right), sum);
            k++;
            fetch_into(0, f.from + k * f.step);
            add_products(rows, x + k, second_of(type, left), second_of(type, right), sum);
        } else {
            add_products(rows, x + k, load(type, here, 0), load(type, here, LANES), sum);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        store(c + r * c_stride, sum[r][0]);
        store(c + r * c_stride + LANES, sum[r][1]);
    }
}

#define MICRO_CASE(n) \
    case n: \
        if (n <= MAX_ROWS) micro_rows(n, type, w, x, size, c, c_stride, accumulate, f); \
        break;

/* Call micro_rows with `rows` as a constant. size: at most MAX_DEPTH; every caller passes a constant c_stride. */
INLINE void micro(int rows, int type, const void *w, const float *x, int64_t size, float *c,
                  int64_t c_stride, int accumulate, fetch f) {
    switch (rows) {
        MICRO_CASE(1)
        MICRO_CASE(2)
        MICRO_CASE(3)
        MICRO_CASE(4)
        MICRO_CASE(5)
        MICRO_CASE(6)
        MICRO_CASE(7)
        MICRO_CASE(8)
        MICRO_CASE(9)
        MICRO_CASE(10)
        MICRO_CASE(11)
        MICRO_CASE(12)
    }
}

#endif
