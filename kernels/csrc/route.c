/* Chooses each token's experts and their weights from a router's logits.
 *
 * Refuses to know: experts.
 */
#include <math.h>

#include "vectors.h"

enum { SOFTMAX = 0, SIGMOID = 1, SOFTMAX_OF_CHOSEN = 2 };

typedef struct {
    int64_t type, num_threads, num_tokens, num_experts, top_k, scoring, normalize;
    /* Experts are in `num_groups` equal groups, of which `top_groups` are chosen first: by the sum of their
     * `group_best` best scores. */
    int64_t num_groups, top_groups, group_best;
    const void *logits; /* [num_tokens, num_experts] of `type` */
    const float *bias;  /* [num_experts], added to scores only for the choice, or NULL */
    const float *scales; /* [num_experts], a factor of each expert's weights, or NULL */
    int64_t *ids;       /* [num_tokens, top_k], best first; equal scores by rising id */
    float *weights;     /* [num_tokens, top_k] */
    double scale;
} route_call;

/* Return the first index of the largest of `count` numbers. */
static int64_t best_of(const float *numbers, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++)
        if (numbers[i] > numbers[best]) best = i;
    return best;
}

static float sum_of_best(const float *numbers, int64_t count, int64_t num, float *copy) {
    float sum = 0;
    memcpy(copy, numbers, count * sizeof(float));
    for (int64_t i = 0; i < num && i < count; i++) {
        int64_t best = best_of(copy, count);
        sum += copy[best];
        copy[best] = -INFINITY;
    }
    return sum;
}

/* Exclude the experts of groups that are not chosen. */
static void choose_groups(const route_call *c, float *choice, float *copy) {
    int64_t size = c->num_experts / c->num_groups;
    float *scores = copy + size;
    for (int64_t g = 0; g < c->num_groups; g++)
        scores[g] = sum_of_best(choice + g * size, size, c->group_best, copy);
    for (int64_t i = 0; i < c->top_groups; i++) scores[best_of(scores, c->num_groups)] = -INFINITY;
    for (int64_t g = 0; g < c->num_groups; g++)
        for (int64_t e = 0; e < size && scores[g] != -INFINITY; e++) choice[g * size + e] = -INFINITY;
}

/* numbers = e^(number - largest), divided by their sum. */
static void softmax(float *numbers, int64_t count) {
    float largest = numbers[best_of(numbers, count)], sum = 0;
    for (int64_t i = 0; i < count; i++) sum += numbers[i] = expf(numbers[i] - largest);
    for (int64_t i = 0; i < count; i++) numbers[i] /= sum;
}

static void route(const route_call *c, int64_t token, float *scratch) {
    int64_t n = c->num_experts, *ids = c->ids + token * c->top_k;
    float *scores = scratch, *choice = scratch + n, *weights = c->weights + token * c->top_k, sum = 0;
    read_row(c->type, at(c->type, c->logits, token * n), scores, n);
    if (c->scoring == SOFTMAX) softmax(scores, n);
    if (c->scoring == SIGMOID)
        for (int64_t e = 0; e < n; e++) scores[e] = 1 / (1 + expf(-scores[e]));
    for (int64_t e = 0; e < n; e++) choice[e] = scores[e] + (c->bias ? c->bias[e] : 0);
    if (c->num_groups > 1) choose_groups(c, choice, scratch + 2 * n);
    for (int64_t k = 0; k < c->top_k; k++) {
        ids[k] = best_of(choice, n);
        choice[ids[k]] = -INFINITY;
        weights[k] = scores[ids[k]];
    }
    if (c->scoring == SOFTMAX_OF_CHOSEN) softmax(weights, c->top_k);
    for (int64_t k = 0; k < c->top_k; k++) sum += weights[k];
    for (int64_t k = 0; k < c->top_k; k++)
        weights[k] = (c->normalize ? weights[k] / (sum + 1e-20f) : weights[k]) * (float)c->scale;
    for (int64_t k = 0; c->scales && k < c->top_k; k++) weights[k] *= c->scales[ids[k]];
}

/* Return 0, or 1 without memory. */
int baton_route(const route_call *c) {
    int failed = 0;
    int64_t num_threads = min64(c->num_threads, ceil_div(c->num_tokens * c->num_experts, 1 << 14));
#pragma omp parallel num_threads(num_threads) reduction(+ : failed)
    {
        float *scratch = baton_scratch(0, 4 * c->num_experts * sizeof(float));
        int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
        int64_t last = c->num_tokens * (thread + 1) / team;
        for (int64_t t = c->num_tokens * thread / team; scratch && t < last; t++) route(c, t, scratch);
        failed = scratch == NULL;
    }
    return failed != 0;
}
