/* Softmax: turns a row's scores into weights, and joins spans of keys, with equal bits for all callers.
 *
 * These functions are not inline, because a compiler may fuse a product with either of two sums, and would choose
 * differently in different callers.
 * Online softmax: Milakov and Gimelshein, arXiv:1805.02867. Refuses to know: queries and keys.
 */
#include "attention.h"

#define TOGETHER 4 /* rows that hide the latency of each other's chains of sums */

/* Merge a tile's largest score and sum of weights into a row's state; return the factor for the row's sums so
 * far. */
static __attribute__((noinline)) float gather(softmax_state *state, float top, float total) {
    float before = state->top;
    float factor = before == top ? 1 : before == -INFINITY ? 0 : power_of_two(splat(before - top))[0];
    state->top = top;
    state->total = state->total * factor + total;
    return factor;
}

/* Turn the scores of `rows` rows, from `row` on, into powers of two relative to each row's largest score. */
INLINE void weigh_rows(int rows, int halved, float scale, score_rows *s, int64_t row, int64_t num) {
    const int64_t stride = s->stride, row_bytes = s->row_bytes;
    float *scores = s->scores + row * stride;
    char *halves = s->halves + row * row_bytes;
    vec largest[TOGETHER], base[TOGETHER], total[TOGETHER];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) largest[r] = splat(-INFINITY), total[r] = (vec){0};
    for (int64_t i = 0; i < num; i += LANES)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) largest[r] = larger(load(FLOAT32, scores + r * stride, i), largest[r]);
    float top[TOGETHER];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        top[r] = largest_lane(largest[r]) * scale; /* also the largest scaled score, as rounding keeps order */
        if (!(top[r] > s->states[row + r].top)) top[r] = s->states[row + r].top;
        base[r] = splat(top[r] == -INFINITY ? 0 : -top[r]); /* 0 if the row does not see any key */
    }
    for (int64_t i = 0; i < num; i += LANES) {
        char *to = halves + i / HALVES * s->step + i % HALVES * 2;
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            vec score = load(FLOAT32, scores + r * stride, i);
            vec weight = power_of_two(multiply_add(score, splat(scale), base[r]));
            if (halved)
                store_weights(to + r * row_bytes, weight);
            else
                store(scores + r * stride + i, weight);
            total[r] += weight;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) s->factors[row + r] = gather(s->states + row + r, top[r], sum_lanes(total[r]));
}

/* Turn each row's scores [num], times `scale`, into weights; 0 for keys that the row does not see. Rows have room
 * for whole vectors. */
void baton_weigh(float scale, double soft_cap, score_rows *s, int64_t num_rows, int64_t num) {
    for (int64_t r = 0; r < num_rows; r++) {
        float *scores = s->scores + r * s->stride;
        for (int64_t i = 0; (soft_cap > 0 || scale < 0) && i < num; i += LANES) {
            vec score = load(FLOAT32, scores, i) * scale;
            store(scores + i, soft_cap > 0 ? soften(score, soft_cap) : score);
        }
        for (int64_t i = 0; i < min64(s->seen[r].from, num); i++) scores[i] = -INFINITY;
        for (int64_t i = max64(s->seen[r].to, 0); i < ceil_div(num, LANES) * LANES; i++) scores[i] = -INFINITY;
    }
    scale = (soft_cap > 0 || scale < 0 ? 1 : scale) * LOG2_E;
    int64_t r = 0;
    const int halved = DOTS_HALVES && s->halves;
    for (; halved && r + TOGETHER <= num_rows; r += TOGETHER) weigh_rows(TOGETHER, 1, scale, s, r, num);
    for (; halved && r < num_rows; r++) weigh_rows(1, 1, scale, s, r, num);
    for (; r + TOGETHER <= num_rows; r += TOGETHER) weigh_rows(TOGETHER, 0, scale, s, r, num);
    for (; r < num_rows; r++) weigh_rows(1, 0, scale, s, r, num);
}

/* Join the next span's sums to those of earlier spans. Sums are `num` vectors, `stride` floats apart. */
void baton_join(softmax_state *state, float *sums, softmax_state span, const float *span_sums,
                int64_t num, int64_t stride) {
    if (span.total == 0) return; /* the row saw no key */
    /* The side with the larger top keeps its scale, so only one product can be fused with the sum. */
    int scale_span = state->total != 0 && span.top <= state->top;
    float factor = state->total == 0 ? 0
                   : scale_span      ? power_of_two(splat(span.top - state->top))[0]
                                     : power_of_two(splat(state->top - span.top))[0];
    for (int64_t i = 0; i < num * stride; i += stride) {
        vec before = load(FLOAT32, sums, i), part = load(FLOAT32, span_sums, i);
        store(sums + i, scale_span ? part * factor + before : before * factor + part);
    }
    state->total = scale_span ? span.total * factor + state->total : state->total * factor + span.total;
    if (!scale_span) state->top = span.top;
}

/* Return the divisor of a row's sums; a sink adds to the sum of weights, but has no value (Xiao et al.,
 * arXiv:2309.17453). */
float baton_divisor(softmax_state state, const float *sinks, int64_t head) {
    return sinks ? state.total + exp_fast(splat(sinks[head] - state.top / LOG2_E))[0] : state.total;
}
