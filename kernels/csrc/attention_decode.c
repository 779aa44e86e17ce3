/* One query token of one KV head's group over a span of its keys. Bound by reading the cache.
 *
 * Refuses to know: other requests, how spans are joined.
 */
#include "attention.h"

#define GROUP 4 /* heads that read a key together */
#define WIDTH 4 /* vectors of a value that are summed in registers */
#define KEYS 64 /* whose values are read head after head while they stay in L1; divides TILE */
#define AHEAD (TILE + KEYS) /* while one key is used, the one KEYS later is fetched */

typedef struct {
    float *query; /* [group, padded], scaled; or pairs of bfloat16, not scaled, [group, padded] */
    float *sums;  /* [group, padded_value] */
    float *scores; /* [group, TILE] of this tile, in place weights, or pairs of them */
    softmax_state *states;
    int64_t group;
    int64_t padded, padded_value; /* head_dim and value_dim rounded up to whole vectors */
} decode_state;

/* sum[h][b] += query element j of head h times LANES keys' element j. */
INLINE void add_element(const decode_state *d, int heads, const float *query, int64_t j, vec key,
                        int b, vec (*sum)[4]) {
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
        sum[h][b] = multiply_add(splat(query[h * d->padded + j]), key, sum[h][b]);
}

/* The elements [j, j + returned) of LANES keys at `rows`: lanes are keys, and a score runs over
 * head_dim in order. */
INLINE int64_t score_elements(int type, int paired, const decode_state *d, int heads,
                              const float *query, const void *const *rows, int64_t j, int b,
                              vec (*sum)[4]) {
    vec key[LANES];
#if DOTS_HALVES
    if (paired) {
        load_columns(rows, j * 2, key);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++)
                sum[h][b] = dot_pair(sum[h][b], query + h * d->padded + j / 2 + i, (vec_u32)key[i]);
        return 2 * LANES;
    }
#endif
    if (type == BFLOAT16 && j + 2 * LANES <= d->padded) {
        /* Turned two by two; each half becomes a float where it is. */
        load_columns(rows, j * 2, key);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            add_element(d, heads, query, j + 2 * i, (vec)((vec_u32)key[i] << 16), b, sum);
            add_element(d, heads, query, j + 2 * i + 1, (vec)((vec_u32)key[i] & 0xffff0000u), b, sum);
        }
        return 2 * LANES;
    }
    if (type == FLOAT32) {
        load_columns(rows, j * 4, key);
    } else {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) key[i] = load(type, rows[i], j);
        transpose(key);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) add_element(d, heads, query, j + i, key[i], b, sum);
    return LANES;
}

/* Scores of `blocks` x LANES keys at `rows`; `fetch`, unless NULL, is what is read next, and is
 * fetched row after row. */
INLINE void score_block(int type, int paired, const decode_state *d, int heads, int blocks, const float *query,
                        const void *const *rows, const void *const *fetch, float *scores) {
    int64_t line = 64 / size_of(type), row = 0, column = 0, num = 0;
    vec sum[GROUP][4] = {{{0}}};
    for (int64_t j = 0; j < d->padded; j += num)
#pragma GCC unroll 4
        for (int b = 0; b < blocks; b++) {
            num = score_elements(type, paired, d, heads, query, rows + b * LANES, j, b, sum);
            for (int64_t n = 0; fetch && n < num * LANES; n += line) {
                __builtin_prefetch(at(type, fetch[row], column), 0, 2);
                if ((column += line) >= d->padded) column = 0, row++;
            }
        }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int b = 0; b < blocks; b++) store(scores + h * TILE + b * LANES, sum[h][b]);
}

/* Scores of the keys [from, to), whole vectors of them, at `rows`. */
INLINE void score_keys(int type, int paired, const decode_state *d, int64_t head, int heads,
                       const void *const *rows, const void *const *fetch, int64_t from, int64_t to) {
    /* As many chains of sums as hide the latency of one. */
    const int blocks = heads == 1 ? 4 : 2;
    const float *query = d->query + head * d->padded;
    float *scores = d->scores + head * TILE;
    const void *const *ahead = head == 0 ? fetch : NULL;
    int64_t i = from;
    for (; i + blocks * LANES <= to; i += blocks * LANES)
        score_block(type, paired, d, heads, blocks, query, rows + i, ahead ? ahead + i : NULL, scores + i);
    for (; i < to; i += LANES)
        score_block(type, paired, d, heads, 1, query, rows + i, ahead ? ahead + i : NULL, scores + i);
}

/* sums[h] += sum over keys of weights[h][key] * value, key by key, or pair by pair (a last key has
 * anybody for its neighbour, of weight 0), for one head or a pair of heads.
 * `fetch` is what is read next, unless NULL. */
INLINE void add_values(int type, int paired, const decode_state *d, int heads, float *sums,
                       const float *weights, const void *const *rows, const void *const *fetch,
                       int64_t num) {
    int64_t j = 0;
    for (; j + WIDTH * LANES <= d->padded_value; j += WIDTH * LANES) {
        vec sum[2][WIDTH];
#pragma GCC unroll 2
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
            for (int w = 0; w < WIDTH; w++)
                sum[h][w] = load(FLOAT32, sums, h * d->padded_value + j + w * LANES);
#if DOTS_HALVES
        for (int64_t i = 0; paired && i < num; i += 2) {
            for (int64_t n = i; fetch && n < i + 2; n++)
#pragma GCC unroll 4
                for (int w = 0; w < WIDTH; w += 2) /* one a line */
                    __builtin_prefetch(at(type, fetch[n], j + w * LANES), 0, 2);
#pragma GCC unroll 4
            for (int w = 0; w < WIDTH; w++) {
                vec_u32 values = pair_up(rows[i], rows[i + 1], j + w * LANES);
#pragma GCC unroll 2
                for (int h = 0; h < heads; h++)
                    sum[h][w] = dot_pair(sum[h][w], weights + h * TILE + i / 2, values);
            }
        }
#endif
        for (int64_t i = 0; !paired && i < num; i++) {
            if (fetch)
#pragma GCC unroll 4
                for (int w = 0; w < WIDTH; w++)
                    if (w * LANES * size_of(type) % 64 == 0) /* one a line */
                        __builtin_prefetch(at(type, fetch[i], j + w * LANES), 0, 2);
#pragma GCC unroll 4
            for (int w = 0; w < WIDTH; w++) {
                vec value = load(type, rows[i], j + w * LANES);
#pragma GCC unroll 2
                for (int h = 0; h < heads; h++)
                    sum[h][w] = multiply_add(splat(weights[h * TILE + i]), value, sum[h][w]);
            }
        }
#pragma GCC unroll 2
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
            for (int w = 0; w < WIDTH; w++) store(sums + h * d->padded_value + j + w * LANES, sum[h][w]);
    }
    for (; j < d->padded_value; j += LANES)
        for (int h = 0; h < heads; h++) {
            vec sum = load(FLOAT32, sums, h * d->padded_value + j);
#if DOTS_HALVES
            for (int64_t i = 0; paired && i < num; i += 2)
                sum = dot_pair(sum, weights + h * TILE + i / 2, pair_up(rows[i], rows[i + 1], j));
#endif
            for (int64_t i = 0; !paired && i < num; i++)
                sum = multiply_add(splat(weights[h * TILE + i]), load(type, rows[i], j), sum);
            store(sums + h * d->padded_value + j, sum);
        }
}

/* Scores of the keys [from, to) at `rows`, for all heads. */
INLINE void score_all(int type, int paired, const decode_state *d, const void *const *rows,
                      const void *const *fetch, int64_t from, int64_t to) {
    for (int64_t h = 0; h < d->group; h += GROUP) {
        int64_t heads = min64(GROUP, d->group - h);
        if (heads == 4)
            score_keys(type, paired, d, h, 4, rows, fetch, from, to);
        else if (heads == 3)
            score_keys(type, paired, d, h, 3, rows, fetch, from, to);
        else if (heads == 2)
            score_keys(type, paired, d, h, 2, rows, fetch, from, to);
        else
            score_keys(type, paired, d, h, 1, rows, fetch, from, to);
    }
}

/* The weighted values of the keys [from, to) at `rows`, for all heads. */
INLINE void add_all(int type, int paired, const decode_state *d, const void *const *rows,
                    const void *const *fetch, int64_t from, int64_t to) {
    for (int64_t h = 0; h < d->group; h += 2) {
        float *sums = d->sums + h * d->padded_value;
        const float *weights = d->scores + h * TILE + (paired ? from / 2 : from);
        const void *const *ahead = h == 0 && fetch ? fetch + from : NULL;
        if (h + 1 < d->group)
            add_values(type, paired, d, 2, sums, weights, rows + from, ahead, to - from);
        else
            add_values(type, paired, d, 1, sums, weights, rows + from, ahead, to - from);
    }
}

/* One copy of these loops for each type that is read: they are called once in KEYS keys, and take
 * most of the time that this file takes to compile. */
#define LOOPS_OF(name, type, paired) \
    static __attribute__((noinline)) void score_##name(const decode_state *d, \
                                                       const void *const *rows, \
                                                       const void *const *fetch, int64_t from, \
                                                       int64_t to) { \
        score_all(type, paired, d, rows, fetch, from, to); \
    } \
    static __attribute__((noinline)) void add_##name(const decode_state *d, \
                                                     const void *const *rows, \
                                                     const void *const *fetch, int64_t from, \
                                                     int64_t to) { \
        add_all(type, paired, d, rows, fetch, from, to); \
    }

LOOPS_OF(float32, FLOAT32, 0)
LOOPS_OF(bfloat16, BFLOAT16, DOTS_HALVES)
LOOPS_OF(float16, FLOAT16, 0)

typedef void loop(const decode_state *, const void *const *, const void *const *, int64_t, int64_t);

/* Where keys (first AHEAD) and values (last AHEAD) of a tile and what is fetched meanwhile lie. */
static void find_rows(const attention_call *c, const piece *p, int64_t tile, const void **rows) {
    find_keys(c, p, tile, 0, AHEAD, rows);
    for (int64_t i = 0; i < AHEAD; i++) rows[AHEAD + i] = (const char *)rows[i] + value_offset(c);
}

/* Into the output, or into `partial` ([group, 2 + padded]) where there are more spans. */
static void finish(const attention_call *c, const piece *p, const decode_state *d, float *partial) {
    for (int64_t h = 0; h < d->group; h++) {
        float *sums = d->sums + h * d->padded_value;
        if (partial) {
            float *to = partial + h * partial_size(c);
            to[0] = d->states[h].top;
            to[1] = d->states[h].total;
            memcpy(to + 2, sums, d->padded_value * sizeof(float));
        } else {
            float divisor = baton_divisor(d->states[h], c->sinks, p->kv_head * d->group + h);
            for (int64_t j = 0; j < c->value_dim; j++) sums[j] /= divisor;
            int64_t to = (p->row * c->num_heads + p->kv_head * d->group + h) * c->value_dim;
            write_row(c->type, sums, (char *)c->out + to * size_of(c->type), c->value_dim);
        }
    }
}

/* Copies of the keys or values [from, to) at `rows`, `dim` of each, for whoever cannot read them
 * where they are: floats, or of bfloat16. */
INLINE void copy_rows(int paired, int64_t dim, int cache_type, int64_t padded, const void **rows,
                      int64_t from, int64_t to, float *copies) {
    for (int64_t i = from; i < to; i++, copies += padded) {
        if (paired) {
            rows[i] = halves_of(cache_type, rows[i], dim, padded, (uint16_t *)copies);
        } else {
            read_row(cache_type, rows[i], copies, dim);
            rows[i] = copies;
        }
    }
}

/* The heads' queries, see decode_state. */
INLINE void take_query(int type, int paired, const attention_call *c, const piece *p, decode_state *d) {
    for (int64_t h = 0; h < d->group; h++) {
        int64_t from = (p->row * c->num_heads + p->kv_head * d->group + h) * c->head_dim;
        float *query = d->query + h * d->padded;
        if (paired) {
            memcpy(query, at(type, c->query, from), c->head_dim * 2);
            continue;
        }
        read_row(type, at(type, c->query, from), query, c->head_dim);
        for (int64_t j = 0; j < c->head_dim; j++) query[j] *= (float)c->scale;
    }
}

/* The scores [skip, num) of a tile become weights, and what earlier tiles gave is scaled. */
INLINE void weigh_tile(int paired, const attention_call *c, const decode_state *d, int64_t skip,
                       int64_t num) {
    for (int64_t start = 0; start < d->group; start += MOST_WEIGHED) {
        int64_t heads = min64(MOST_WEIGHED, d->group - start);
        float *scores = d->scores + start * TILE;
        /* Halves lie in place: none is written beyond the scores that were read. */
        score_rows s = {scores, TILE, paired ? (char *)scores : NULL, TILE * sizeof(float), ROW_BYTES};
        s.states = d->states + start;
        for (int64_t h = 0; h < heads; h++) s.seen[h].from = skip, s.seen[h].to = num;
        baton_weigh(paired ? c->scale : 1, c->soft_cap, &s, heads, num);
        for (int64_t h = 0; h < heads; h++) {
            float *sums = d->sums + (start + h) * d->padded_value;
            if (s.factors[h] != 1)
                for (int64_t j = 0; j < d->padded_value; j++) sums[j] *= s.factors[h];
        }
    }
}

INLINE void decode(int type, int cache_type, const attention_call *c, const piece *p,
                   float *partial) {
    const int paired = DOTS_HALVES && type == BFLOAT16;
    const int64_t whole = paired ? HALVES : LANES;
    int64_t group = c->num_heads / c->num_kv_heads, padded = ceil_div(c->head_dim, whole) * whole;
    int64_t padded_value = padded_sum(c);
    float query[group * padded], sums[group * padded_value], scores[group * TILE];
    softmax_state states[group];
    decode_state d = {query, sums, scores, states, group, padded, padded_value};
    memset(sums, 0, sizeof sums);
    memset(query, 0, sizeof query);
    for (int64_t h = 0; h < group; h++) states[h] = EMPTY_STATE;
    take_query(type, paired, c, p, &d);
    /* A vector would read the neighbour's, or nobody's, memory; and float8 is unpacked only once
     * for all heads. */
    int copies = padded != c->head_dim || padded_value != c->value_dim || cache_type != type;
    float wide[copies ? KEYS * padded : 1];
    memset(wide, 0, sizeof wide);
    int read = copies && !paired ? FLOAT32 : type;
    loop *score = read == FLOAT32 ? score_float32 : read == BFLOAT16 ? score_bfloat16 : score_float16;
    loop *add = read == FLOAT32 ? add_float32 : read == BFLOAT16 ? add_bfloat16 : add_float16;
    const void *keys[2 * AHEAD], **values = keys + AHEAD;
    for (int64_t tile = p->begin / TILE * TILE; tile < p->end; tile += TILE) {
        int64_t skip = max64(0, p->begin - tile), num = min64(TILE, p->end - tile);
        find_rows(c, p, tile, keys);
        for (int64_t i = skip / LANES * LANES, stop; i < num; i = stop) {
            stop = min64(ceil_div(num, LANES) * LANES, i + KEYS);
            if (copies) copy_rows(paired, c->head_dim, cache_type, padded, keys, i, stop, wide);
            score(&d, keys, copies ? NULL : keys + KEYS, i, stop);
        }
        weigh_tile(paired, c, &d, skip, num);
        int64_t each = paired ? 2 : 1; /* keys whose values are added together, from the tile's first */
        for (int64_t i = skip / each * each, stop; i < num; i = stop) {
            stop = min64(ceil_div(num, each) * each, i + KEYS);
            if (copies) copy_rows(paired, c->value_dim, cache_type, padded, values, i, stop, wide);
            add(&d, values, copies ? NULL : values + KEYS, i, stop);
        }
    }
    finish(c, p, &d, partial);
}

void baton_attend_decode(const attention_call *c, const piece *p, float *partial) {
    if (c->cache_type == FLOAT8 && c->type == BFLOAT16)
        decode(BFLOAT16, FLOAT8, c, p, partial);
    else if (c->cache_type == FLOAT8 && c->type == FLOAT16)
        decode(FLOAT16, FLOAT8, c, p, partial);
    else if (c->cache_type == FLOAT8)
        decode(FLOAT32, FLOAT8, c, p, partial);
    else if (c->type == BFLOAT16)
        decode(BFLOAT16, BFLOAT16, c, p, partial);
    else if (c->type == FLOAT16)
        decode(FLOAT16, FLOAT16, c, p, partial);
    else
        decode(FLOAT32, FLOAT32, c, p, partial);
}
