/* A row's scores become weights, and spans of keys are joined: the same bits for whoever calls.
 *
 * Functions, not inline code: a compiler may fuse a product with either of two sums, and chooses
 * anew wherever it sees them.
 * Online softmax: Milakov and Gimelshein, arXiv:1805.02867. Refuses to know: queries and keys.
 */
#include "attention.h"

/* Scores of a tile, [num] with room for whole vectors, times `scale` become weights, in place or, as
 * bfloat16, at `halves`, from HALVES keys to the next `step` bytes; those outside [from, to) become 0.
 * Returns what the sums of earlier tiles must be multiplied by. */
float baton_weigh(float scale, double soft_cap, float *scores, int64_t from, int64_t to, int64_t num,
                  softmax_state *state, char *halves, int64_t step) {
    float before = state->top;
    vec largest = splat(-INFINITY), total = {0};
    if (soft_cap > 0 || scale < 0) {
        for (int64_t i = 0; i < num; i += LANES) {
            vec score = load(FLOAT32, scores, i) * scale;
            store(scores + i, soft_cap > 0 ? soften(score, soft_cap) : score);
        }
        scale = 1;
    }
    for (int64_t i = 0; i < min64(from, num); i++) scores[i] = -INFINITY;
    for (int64_t i = max64(to, 0); i < ceil_div(num, LANES) * LANES; i++) scores[i] = -INFINITY;
    for (int64_t i = 0; i < num; i += LANES) {
        vec score = load(FLOAT32, scores, i);
        largest = larger(score, largest);
    }
    float top = largest_lane(largest) * scale; /* of products, too: rounding keeps their order */
    if (!(top > before)) top = before;
    float base = top == -INFINITY ? 0 : top; /* where no key counts */
    for (int64_t i = 0; i < num; i += LANES) {
        vec weight = exp_of_negative(multiply_add(load(FLOAT32, scores, i), splat(scale), splat(-base)));
        if (halves)
            store_as(BFLOAT16, halves + i / HALVES * step, i % HALVES, weight);
        else
            store(scores + i, weight);
        total += weight;
    }
    float factor = before == top ? 1 : before == -INFINITY ? 0 : exp_fast(splat(before - top))[0];
    state->top = top;
    state->total = state->total * factor + sum_lanes(total);
    return factor;
}

/* Adds the next span to what earlier ones gave. Sums lie in `num` vectors, from each to the next
 * `stride` floats. */
void baton_join(softmax_state *state, float *sums, softmax_state span, const float *span_sums,
                int64_t num, int64_t stride) {
    if (span.total == 0) return; /* no key counted */
    /* The side with the larger top keeps its scale: one product, to be fused with the one sum. */
    int scale_span = state->total != 0 && span.top <= state->top;
    float factor = state->total == 0 ? 0
                   : scale_span      ? exp_fast(splat(span.top - state->top))[0]
                                     : exp_fast(splat(state->top - span.top))[0];
    for (int64_t i = 0; i < num * stride; i += stride) {
        vec before = load(FLOAT32, sums, i), part = load(FLOAT32, span_sums, i);
        store(sums + i, scale_span ? part * factor + before : before * factor + part);
    }
    state->total = scale_span ? span.total * factor + state->total : state->total * factor + span.total;
    if (!scale_span) state->top = span.top;
}

/* What a row's sums are to be divided by; a sink's weight counts, but it has no value
 * (Xiao et al., arXiv:2309.17453). */
float baton_divisor(softmax_state state, const float *sinks, int64_t head) {
    return sinks ? state.total + exp_fast(splat(sinks[head] - state.top))[0] : state.total;
}
