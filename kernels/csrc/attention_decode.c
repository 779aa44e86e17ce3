/* One query token of one KV head's group over a span of its keys. Bound by reading the cache.
 *
 * Refuses to know: other requests, how spans are joined.
 */
#include <math.h>

#include "attention.h"

#define GROUP 4      /* heads that read a key together */
#define WIDTH 4      /* vectors of a value that are summed in registers */
#define KEYS 64      /* scores that are kept at a time */

typedef struct {
    const float *query; /* [group, padded], scaled */
    float *sums;        /* [group, padded] */
    float *tops, *totals;
    int64_t group, padded; /* head_dim rounded up to whole vectors */
} decode_state;

/* scores[h][key] of `num` keys at `rows`. */
INLINE void score_keys(int type, const decode_state *d, int heads, const float *query,
                       const void *const *rows, const void *const *next, int64_t num,
                       float (*scores)[KEYS]) {
    int64_t line = 64 / size_of(type);
    for (int64_t i = 0; i < num; i++) {
        vec sum[GROUP] = {{0}};
        for (int64_t j = 0; j < d->padded; j += LANES) {
            if (query == d->query && j % line == 0) __builtin_prefetch(at(type, next[i], j), 0, 2);
            vec key = load(type, rows[i], j);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) sum[h] += key * load(FLOAT32, query, h * d->padded + j);
        }
        float sums[GROUP];
        sum_lanes_of_four(sum, sums);
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) scores[h][i] = sums[h];
    }
}

/* sums[h] += sum over keys of weights[h][key] * value, for one head or a pair of heads.
 *
 * This is the `turn`-th of `num_turns` passes over the same values; each fetches a share of the
 * next ones, so that memory is never idle. */
INLINE void add_values(int type, const decode_state *d, int heads, float *sums,
                       float (*weights)[KEYS], const void *const *rows, const void *const *next,
                       int64_t num, int64_t turn, int64_t num_turns) {
    int64_t j = 0;
    for (; j + WIDTH * LANES <= d->padded; j += WIDTH * LANES) {
        vec sum[2][WIDTH];
#pragma GCC unroll 2
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
            for (int w = 0; w < WIDTH; w++)
                sum[h][w] = load(FLOAT32, sums, h * d->padded + j + w * LANES);
        for (int64_t i = 0; i < num; i++) {
            for (int64_t w = turn; w < WIDTH; w += num_turns)
                __builtin_prefetch(at(type, next[i], j + w * LANES), 0, 2);
#pragma GCC unroll 4
            for (int w = 0; w < WIDTH; w++) {
                vec value = load(type, rows[i], j + w * LANES);
#pragma GCC unroll 2
                for (int h = 0; h < heads; h++) sum[h][w] += splat(weights[h][i]) * value;
            }
        }
#pragma GCC unroll 2
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
            for (int w = 0; w < WIDTH; w++) store(sums + h * d->padded + j + w * LANES, sum[h][w]);
    }
    for (; j < d->padded; j += LANES)
        for (int h = 0; h < heads; h++) {
            vec sum = load(FLOAT32, sums, h * d->padded + j);
            for (int64_t i = 0; i < num; i++) sum += splat(weights[h][i]) * load(type, rows[i], j);
            store(sums + h * d->padded + j, sum);
        }
}

/* Scores become weights; what was summed before is scaled to the new largest score. */
static void soften_and_weigh(const attention_call *c, const decode_state *d, int64_t h,
                             float *scores, int64_t num) {
    for (int64_t i = num; i % LANES; i++) scores[i] = -INFINITY;
    vec largest = splat(d->tops[h]), total = {0};
    for (int64_t i = 0; i < num; i += LANES) {
        vec score = load(FLOAT32, scores, i);
        if (c->soft_cap > 0) {
            score = choose(score == -INFINITY, score, soften(score, c->soft_cap));
            store(scores + i, score);
        }
        largest = choose(score > largest, score, largest);
    }
    float top = largest_lane(largest), base = top == -INFINITY ? 0 : top;
    float factor = exp_fast(splat(d->tops[h] - top))[0];
    if (d->tops[h] == -INFINITY) factor = 0;
    for (int64_t i = 0; i < num; i += LANES) {
        vec weight = exp_of_negative(load(FLOAT32, scores, i) - base);
        store(scores + i, weight);
        total += weight;
    }
    d->tops[h] = top;
    d->totals[h] = d->totals[h] * factor + sum_lanes(total);
    if (factor != 1)
        for (int64_t j = 0; j < d->padded; j++) d->sums[h * d->padded + j] *= factor;
}

INLINE void attend_keys(int type, const attention_call *c, const decode_state *d,
                        const void *const *rows, const void *const *next, int64_t num) {
    float scores[GROUP][KEYS];
    for (int64_t h = 0; h < d->group; h += GROUP) {
        int64_t heads = min64(GROUP, d->group - h);
        const float *query = d->query + h * d->padded;
        if (heads == 4)
            score_keys(type, d, 4, query, rows, next, num, scores);
        else if (heads == 3)
            score_keys(type, d, 3, query, rows, next, num, scores);
        else if (heads == 2)
            score_keys(type, d, 2, query, rows, next, num, scores);
        else
            score_keys(type, d, 1, query, rows, next, num, scores);
        for (int64_t i = 0; i < heads; i++) soften_and_weigh(c, d, h + i, scores[i], num);
        for (int64_t i = 0; i < heads; i += 2) {
            float *sums = d->sums + (h + i) * d->padded;
            int64_t turn = (h + i) / 2, num_turns = min64(WIDTH, (d->group + 1) / 2);
            if (i + 1 < heads)
                add_values(type, d, 2, sums, scores + i, rows + KEYS, next + KEYS, num, turn,
                           num_turns);
            else
                add_values(type, d, 1, sums, scores + i, rows + KEYS, next + KEYS, num, turn,
                           num_turns);
        }
    }
}

/* Pointers to keys (first KEYS) and values (last KEYS). */
static void find_rows(const attention_call *c, const piece *p, int64_t begin, int64_t num,
                      const void **rows) {
    int64_t kv_bytes = c->kv_stride * size_of(c->cache_type);
    int64_t token_bytes = c->token_stride * size_of(c->cache_type);
    for (int64_t i = 0; i < num;) {
        int64_t stop = min64(num, i + c->block_size - (begin + i) % c->block_size);
        const char *key = cache_row(c, p, begin + i, 0);
        for (; i < stop; i++, key += token_bytes) {
            rows[i] = key;
            rows[KEYS + i] = key + kv_bytes;
        }
    }
}

/* Into the output, or into `partial` ([group, 2 + head_dim]) where there are more spans. */
static void finish(const attention_call *c, const piece *p, const decode_state *d, float *partial) {
    for (int64_t h = 0; h < d->group; h++) {
        float *sums = d->sums + h * d->padded;
        if (partial) {
            float *to = partial + h * partial_size(c);
            to[0] = d->tops[h];
            to[1] = d->totals[h];
            memcpy(to + 2, sums, c->head_dim * sizeof(float));
        } else {
            for (int64_t j = 0; j < c->head_dim; j++) sums[j] /= d->totals[h];
            int64_t to = (p->row * c->num_heads + p->kv_head * d->group + h) * c->head_dim;
            write_row(c->type, sums, (char *)c->out + to * size_of(c->type), c->head_dim);
        }
    }
}

INLINE void decode(int type, int cache_type, const attention_call *c, const piece *p,
                   float *partial) {
    int64_t group = c->num_heads / c->num_kv_heads;
    int64_t padded = ceil_div(c->head_dim, LANES) * LANES;
    float query[group * padded], sums[group * padded], tops[group], totals[group];
    decode_state d = {query, sums, tops, totals, group, padded};
    memset(sums, 0, sizeof sums);
    memset(query, 0, sizeof query);
    for (int64_t h = 0; h < group; h++) {
        tops[h] = -INFINITY;
        totals[h] = 0;
        int64_t from = (p->row * c->num_heads + p->kv_head * group + h) * c->head_dim;
        read_row(type, at(type, c->query, from), query + h * padded, c->head_dim);
        for (int64_t j = 0; j < c->head_dim; j++) query[h * padded + j] *= (float)c->scale;
    }
    /* A vector would read the neighbour's, or nobody's, memory; and float8 is unpacked only once
     * for all heads. */
    int copies = padded != c->head_dim || cache_type != type;
    float wide[copies ? 2 * KEYS * padded : 1];
    memset(wide, 0, sizeof wide);
    const void *buffers[2][2 * KEYS], **rows = buffers[0], **next = buffers[1];
    find_rows(c, p, p->begin, min64(KEYS, p->end - p->begin), rows);
    for (int64_t begin = p->begin; begin < p->end; begin += KEYS) {
        int64_t num = min64(KEYS, p->end - begin), left = p->end - begin - num;
        find_rows(c, p, begin + num, min64(KEYS, left), next);
        for (int64_t i = min64(KEYS, left); i < num; i++)
            next[i] = rows[i], next[KEYS + i] = rows[KEYS + i];
        if (copies) {
            for (int64_t i = 0; i < 2 * KEYS; i++) {
                if (i % KEYS >= num) continue;
                read_row(cache_type, rows[i], wide + i * padded, c->head_dim);
                rows[i] = wide + i * padded;
            }
            attend_keys(FLOAT32, c, &d, rows, rows, num);
        } else {
            attend_keys(type, c, &d, rows, next, num);
        }
        const void **swap = rows;
        rows = next, next = swap;
    }
    finish(c, p, &d, partial);
}

void baton_attend_decode(const attention_call *c, const piece *p, float *partial) {
    if (c->cache_type == FLOAT8 && c->type == BFLOAT16)
        decode(BFLOAT16, FLOAT8, c, p, partial);
    else if (c->cache_type == FLOAT8)
        decode(FLOAT32, FLOAT8, c, p, partial);
    else if (c->type == BFLOAT16)
        decode(BFLOAT16, BFLOAT16, c, p, partial);
    else
        decode(FLOAT32, FLOAT32, c, p, partial);
}
