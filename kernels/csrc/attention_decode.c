/* Computes attention of one query token for one KV head's group over a span of keys; reading the cache takes
 * the time.
 *
 * Blocks are scattered in memory, so the next blocks are prefetched, their pages first.
 * Refuses to know: other requests, how spans are joined.
 */
#include "attention.h"

#define GROUP 4   /* heads that read a key together */
#define KEYS 32  /* keys that stay in L1 while all heads read them, and keys to prefetch at once */
#define KEYS8 64 /* KEYS for float8; both divide TILE */
#define BLOCKS (KEYS / LANES < 4 ? KEYS / LANES : 4) /* vectors of keys whose scores are summed in registers */
#define WIDTH (LANES / 2)                            /* vectors of a value whose sums are in registers */
#define LINE 64                                      /* bytes that are fetched together */

typedef struct {
    float *query; /* [group, padded], scaled; as pairs of bfloat16, not scaled */
    float *sums;  /* [group, padded_value] */
    float *scores; /* [group, TILE], a tile's scores, then its weights or pairs of weights */
    softmax_state *states;
    int64_t group;
    int64_t padded, padded_value; /* head_dim and value_dim rounded up to whole vectors */
} decode_state;

/* Rows of a cache, each `offset` bytes after its key. */
typedef struct {
    const void *const *keys;
    int64_t offset;
} row_list;

INLINE const void *row_of(row_list rows, int64_t i) { return (const char *)rows.keys[i] + rows.offset; }
INLINE void fetch_part_of(const row_list *rows, int64_t i, int64_t offset) {
    __builtin_prefetch((const char *)row_of(*rows, i) + offset, 0, 3);
}

/* Load one element, or a pair of bfloat16, of each of LANES keys at `rows`, from element j on, as columns whose
 * lanes are keys. Return the number of elements. */
INLINE int64_t take_columns(int type, int paired, int pairs, const void *const *rows, int64_t j, vec *columns) {
    vec key[LANES];
#if DOTS_HALVES
    if (type == FLOAT8 && paired) { /* a lane's four numbers become 16 bits each */
        const __m512i first = _mm512_set4_epi32((int)0x800d800c, (int)0x80098008, (int)0x80058004, (int)0x80018000);
        const __m512i second = _mm512_add_epi8(first, _mm512_set1_epi32(0x00020002));
        load_columns(rows, j, key);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            columns[2 * i] = (vec)e4m3s_as_halves(_mm512_shuffle_epi8((__m512i)key[i], first));
            columns[2 * i + 1] = (vec)e4m3s_as_halves(_mm512_shuffle_epi8((__m512i)key[i], second));
        }
        return 4 * LANES;
    }
#endif
    if (pairs || type == FLOAT32) {
        load_columns(rows, j * size_of(type), key);
    } else {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) key[i] = load(type, rows[i], j);
        transpose(key);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) columns[i] = key[i];
    return pairs ? 2 * LANES : LANES;
}

/* sum[h][b] += query elements j of head h times column i of block b's keys. */
INLINE void add_column(int paired, int pairs, const decode_state *d, int heads, int blocks, const float *query,
                       int64_t j, const vec (*columns)[2 * LANES], int64_t i, vec (*sum)[BLOCKS]) {
#pragma GCC unroll 4
    for (int b = 0; b < blocks; b++) {
        vec key = columns[b][i];
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            const float *from = query + h * d->padded;
#if DOTS_HALVES
            if (paired) {
                sum[h][b] = dot_pair(sum[h][b], from + j, (vec_u32)key);
                continue;
            }
#endif
            if (pairs) { /* each half becomes a float in its place */
                sum[h][b] = multiply_add(splat(from[2 * j]), first_of(BFLOAT16, (vec_u32)key), sum[h][b]);
                sum[h][b] = multiply_add(splat(from[2 * j + 1]), second_of(BFLOAT16, (vec_u32)key), sum[h][b]);
            } else {
                sum[h][b] = multiply_add(splat(from[j]), key, sum[h][b]);
            }
        }
    }
}

/* Compute the scores of the first `blocks` x LANES keys of `rows`, each summed over head_dim in order. `fetch`:
 * rows that are read later, to prefetch, or NULL. Two loops, with columns in memory, as sums fill the
 * registers. */
INLINE void score_block(int type, int paired, const decode_state *d, int heads, int blocks, const float *query,
                        const void *const *rows, const row_list *fetch, int64_t from, float *scores) {
    vec columns[BLOCKS][2 * LANES], sum[GROUP][BLOCKS] = {{{0}}};
    for (int64_t j = 0, num = 0; j < d->padded; j += num) {
        int pairs = paired || (type == BFLOAT16 && j + 2 * LANES <= d->padded);
        int64_t offset = j * size_of(type);
#pragma GCC unroll 1
        for (int b = 0; b < blocks; b++) {
            num = take_columns(type, paired, pairs, rows + b * LANES, j, columns[b]);
            if (fetch && offset % LINE == 0)
#pragma GCC unroll 16
                for (int n = 0; n < LANES; n++) fetch_part_of(fetch, from + b * LANES + n, offset);
        }
        int64_t each = pairs ? 2 : 1;
#pragma GCC unroll 2
        for (int64_t i = 0; i < num / each; i++)
            add_column(paired, pairs, d, heads, blocks, query, j / each + i, columns, i, sum);
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int b = 0; b < blocks; b++) store(scores + h * TILE + b * LANES, sum[h][b]);
}

/* Compute the scores of `num` keys, in whole vectors, for `heads` heads from `head` on. */
INLINE void score_keys(int type, int paired, const decode_state *d, int64_t head, int heads,
                       const void *const *rows, const row_list *fetch, int64_t num, float *scores) {
    /* Use enough chains of sums to hide their latency. */
    const int blocks = heads == 1 ? BLOCKS : 2;
    const float *query = d->query + head * d->padded;
    const row_list *ahead = head == 0 ? fetch : NULL;
    int64_t i = 0;
    scores += head * TILE;
    for (; i + blocks * LANES <= num; i += blocks * LANES)
        score_block(type, paired, d, heads, blocks, query, rows + i, ahead, i, scores + i);
    for (; i < num; i += LANES)
        score_block(type, paired, d, heads, 1, query, rows + i, ahead, i, scores + i);
}

/* sums[h] += sum over keys of weights[h][key] * value, key by key or pair by pair (the last key of an odd number
 * is paired with any key of weight 0), for one or two heads and `width` vectors of a value, from element j on. */
INLINE void add_part(int type, int paired, int width, const decode_state *d, int heads, float *sums,
                     const float *weights, row_list values, const row_list *fetch, int64_t num, int64_t j) {
    const int step = paired ? 2 : 1;
    vec sum[2][WIDTH];
#pragma GCC unroll 2
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 8
        for (int w = 0; w < width; w++) sum[h][w] = load(FLOAT32, sums, h * d->padded_value + j + w * LANES);
    for (int64_t i = 0; i < num; i += step) {
#if DOTS_HALVES
#pragma GCC unroll 4
        for (int w = 0; paired && w < width; w += 2) {
            vec pairs[2];
            pair_halves(type, row_of(values, i), row_of(values, i + 1), j + w * LANES, pairs);
#pragma GCC unroll 2
            for (int h = 0; h < heads; h++)
#pragma GCC unroll 2
                for (int n = 0; n < 2; n++)
                    sum[h][w + n] = dot_pair(sum[h][w + n], weights + h * TILE + i / 2, (vec_u32)pairs[n]);
        }
#endif
#pragma GCC unroll 8
        for (int w = 0; !paired && w < width; w++) {
            vec value = load(type, row_of(values, i), j + w * LANES);
#pragma GCC unroll 2
            for (int h = 0; h < heads; h++)
                sum[h][w] = multiply_add(splat(weights[h * TILE + i]), value, sum[h][w]);
        }
        if (fetch)
#pragma GCC unroll 2
            for (int n = 0; n < step; n++)
#pragma GCC unroll 8
                for (int w = 0; w < width; w++)
                    if ((j + w * LANES) * size_of(type) % LINE == 0)
                        fetch_part_of(fetch, i + n, (j + w * LANES) * size_of(type));
    }
#pragma GCC unroll 2
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 8
        for (int w = 0; w < width; w++) store(sums + h * d->padded_value + j + w * LANES, sum[h][w]);
}

INLINE void add_values(int type, int paired, const decode_state *d, int heads, float *sums,
                       const float *weights, row_list values, const row_list *fetch, int64_t num) {
    int64_t j = 0;
    for (; j + WIDTH * LANES <= d->padded_value; j += WIDTH * LANES)
        add_part(type, paired, WIDTH, d, heads, sums, weights, values, fetch, num, j);
    for (; j + WIDTH / 2 * LANES <= d->padded_value; j += WIDTH / 2 * LANES)
        add_part(type, paired, WIDTH / 2, d, heads, sums, weights, values, fetch, num, j);
    const int least = paired ? 2 : 1;
    for (; j < d->padded_value; j += least * LANES)
        add_part(type, paired, least, d, heads, sums, weights, values, fetch, num, j);
}

/* Compute the scores of `num` keys, in whole vectors, for all heads. */
INLINE void score_all(int type, int paired, const decode_state *d, const void *const *rows,
                      const row_list *fetch, int64_t num, float *scores) {
    for (int64_t h = 0; h < d->group; h += GROUP) {
        int64_t heads = min64(GROUP, d->group - h);
        if (heads == 4)
            score_keys(type, paired, d, h, 4, rows, fetch, num, scores);
        else if (heads == 3)
            score_keys(type, paired, d, h, 3, rows, fetch, num, scores);
        else if (heads == 2)
            score_keys(type, paired, d, h, 2, rows, fetch, num, scores);
        else
            score_keys(type, paired, d, h, 1, rows, fetch, num, scores);
    }
}

/* Add the weighted values of `num` keys, for all heads. */
INLINE void add_all(int type, int paired, const decode_state *d, row_list values, const row_list *fetch,
                    int64_t num, const float *weights) {
    for (int64_t h = 0; h < d->group; h += 2) {
        float *sums = d->sums + h * d->padded_value;
        const row_list *ahead = h == 0 ? fetch : NULL;
        if (h + 1 < d->group)
            add_values(type, paired, d, 2, sums, weights + h * TILE, values, ahead, num);
        else
            add_values(type, paired, d, 1, sums, weights + h * TILE, values, ahead, num);
    }
}

typedef struct {
    void (*score)(const decode_state *, const void *const *, const row_list *, int64_t, float *);
    void (*add)(const decode_state *, row_list, const row_list *, int64_t, const float *);
} loops;

/* Compile these loops once per element type, as functions: they take most of this file's compile time, and a call
 * costs little, because it handles KEYS or KEYS8 keys. */
#define LOOPS_OF(name, type, paired) \
    static __attribute__((noinline)) void score_##name(const decode_state *d, const void *const *rows, \
                                                       const row_list *fetch, int64_t num, float *scores) { \
        score_all(type, paired, d, rows, fetch, num, scores); \
    } \
    static __attribute__((noinline)) void add_##name(const decode_state *d, row_list values, \
                                                     const row_list *fetch, int64_t num, \
                                                     const float *weights) { \
        add_all(type, paired, d, values, fetch, num, weights); \
    } \
    static const loops name = {score_##name, add_##name};

LOOPS_OF(of_float32, FLOAT32, 0)
LOOPS_OF(of_bfloat16, BFLOAT16, DOTS_HALVES)
LOOPS_OF(of_float16, FLOAT16, 0)
LOOPS_OF(of_float8, FLOAT8, 0)
#if DOTS_HALVES
LOOPS_OF(of_float8_pairs, FLOAT8, 1)
#else
#define of_float8_pairs of_float8
#endif

static loops loops_of(int type, int paired) {
    return type == FLOAT32    ? of_float32
           : type == BFLOAT16 ? of_bfloat16
           : type == FLOAT16  ? of_float16
           : paired           ? of_float8_pairs
                              : of_float8;
}

/* Prefetch a line of each block of a tile, so that the CPU looks up many pages at once and early: a prefetch into
 * a page that is not looked up yet delays the instructions after it. */
static void find_pages(const attention_call *c, const piece *p, int64_t tile) {
    for (int64_t i = max64(tile, p->begin); i < min64(p->end, tile + TILE); i += c->block_size) {
        const char *key = cache_row(c, p, i, 0);
        __builtin_prefetch(key, 0, 3);
        __builtin_prefetch(key + value_offset(c), 0, 3);
    }
}

/* Store the result in the output, or, if the decode has several spans, in `partial` ([group, 2 + padded]). */
static void finish(const attention_call *c, const piece *p, const decode_state *d, float *partial) {
    for (int64_t h = 0; h < d->group; h++) {
        float *sums = d->sums + h * d->padded_value;
        if (partial) {
            float *to = partial + h * partial_size(c);
            to[0] = d->states[h].top;
            to[1] = d->states[h].total;
            memcpy(to + 2, sums, padded_sum(c) * sizeof(float));
        } else {
            float divisor = baton_divisor(d->states[h], c->sinks, p->kv_head * d->group + h);
            for (int64_t j = 0; j < c->value_dim; j++) sums[j] /= divisor;
            int64_t to = (p->row * c->num_heads + p->kv_head * d->group + h) * c->value_dim;
            write_row(c->type, sums, (char *)c->out + to * size_of(c->type), c->value_dim);
        }
    }
}

/* Copy `num` rows of `dim` numbers, as floats or bfloat16, unless they can be read in place. `fetch`: rows to
 * prefetch, or NULL. */
INLINE void copy_rows(int paired, int64_t dim, int cache_type, int64_t padded, row_list rows, const row_list *fetch,
                      int64_t num, float *copies, const void **copied) {
    for (int64_t i = 0; i < num; i++, copies += padded) {
        copied[i] = copies;
#if DOTS_HALVES
        if (paired) copied[i] = halves_of(cache_type, row_of(rows, i), dim, padded, (uint16_t *)copies);
#endif
        if (!paired) read_row(cache_type, row_of(rows, i), copies, dim);
        for (int64_t offset = 0; fetch && offset < dim * size_of(cache_type); offset += LINE)
            fetch_part_of(fetch, i, offset);
    }
}

/* Load the heads' queries, see decode_state. */
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

/* Turn a tile's scores [skip, num) into weights, and scale the sums of earlier tiles. */
INLINE void weigh_tile(int paired, const attention_call *c, const decode_state *d, int64_t skip,
                       int64_t num) {
    for (int64_t start = 0; start < d->group; start += MOST_WEIGHED) {
        int64_t heads = min64(MOST_WEIGHED, d->group - start);
        float *scores = d->scores + start * TILE;
        /* The halves overwrite the scores in place, never ahead of scores still to be read. */
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

INLINE void decode(int type, int cache_type, const attention_call *c, const piece *p, const piece *next,
                   float *partial) {
    const int paired = DOTS_HALVES && type == BFLOAT16;
    const int64_t whole = paired ? HALVES : LANES;
    int64_t group = c->num_heads / c->num_kv_heads, padded = ceil_div(c->head_dim, whole) * whole;
    int64_t padded_value = ceil_div(c->value_dim, whole) * whole;
    float query[group * padded], sums[group * padded_value], scores[group * TILE];
    softmax_state states[group];
    decode_state d = {query, sums, scores, states, group, padded, padded_value};
    memset(sums, 0, sizeof sums);
    memset(query, 0, sizeof query);
    for (int64_t h = 0; h < group; h++) states[h] = EMPTY_STATE;
    take_query(type, paired, c, p, &d);
    /* A whole vector would read beyond the row. */
    int64_t column = paired && cache_type == FLOAT8 ? 4 * LANES : whole;
    int copies = c->head_dim % column != 0 || c->value_dim % whole != 0;
    const int64_t together = cache_type == FLOAT8 ? KEYS8 : KEYS;
    float wide[copies ? together * padded : 1];
    memset(wide, 0, sizeof wide);
    loops run = loops_of(!copies ? cache_type : paired ? BFLOAT16 : FLOAT32, paired);
    const void *keys[TILE + KEYS8], *later[KEYS8], *copied[KEYS8];
    const int64_t to_value = value_offset(c);
    for (int64_t tile = p->begin / TILE * TILE; tile < p->end; tile += TILE) {
        int64_t skip = max64(0, p->begin - tile), num = min64(TILE, p->end - tile);
        find_keys(c, p, tile, 0, TILE + together, keys);
        /* The piece whose rows are read after this tile. */
        const piece *then = tile + TILE < p->end ? p : next;
        int64_t then_tile = then == p ? tile + TILE : then ? then->begin / TILE * TILE : 0;
        if (then) {
            find_pages(c, then, then_tile);
            find_keys(c, then, then_tile, 0, together, later);
        }
        for (int64_t i = skip / LANES * LANES, stop; i < num; i = stop) {
            stop = min64(ceil_div(num, LANES) * LANES, i + together);
            row_list here = {keys + i, 0}, ahead = {keys + i + together, 0};
            if (i + together >= num) ahead = (row_list){keys, to_value};
            if (copies) copy_rows(paired, c->head_dim, cache_type, padded, here, &ahead, stop - i, wide, copied);
            run.score(&d, copies ? copied : here.keys, copies ? NULL : &ahead, stop - i, scores + i);
        }
        weigh_tile(paired, c, &d, skip, num);
        int64_t each = paired ? 2 : 1; /* keys whose values are added together, counted from the tile's first */
        for (int64_t i = skip / each * each, stop; i < num; i = stop) {
            stop = min64(ceil_div(num, each) * each, i + together);
            row_list here = {keys + i, to_value}, ahead = {keys + i + together, to_value};
            if (i + together >= num) ahead = (row_list){later, 0};
            const row_list *fetch = i + together < num || then ? &ahead : NULL;
            if (copies) copy_rows(paired, c->value_dim, cache_type, padded, here, fetch, stop - i, wide, copied);
            run.add(&d, copies ? (row_list){copied, 0} : here, copies ? NULL : fetch, stop - i, scores + i / each);
        }
    }
    finish(c, p, &d, partial);
}

void baton_attend_decode(const attention_call *c, const piece *p, const piece *next, float *partial) {
    if (c->cache_type == FLOAT8 && c->type == BFLOAT16)
        decode(BFLOAT16, FLOAT8, c, p, next, partial);
    else if (c->cache_type == FLOAT8 && c->type == FLOAT16)
        decode(FLOAT16, FLOAT8, c, p, next, partial);
    else if (c->cache_type == FLOAT8)
        decode(FLOAT32, FLOAT8, c, p, next, partial);
    else if (c->type == BFLOAT16)
        decode(BFLOAT16, BFLOAT16, c, p, next, partial);
    else if (c->type == FLOAT16)
        decode(FLOAT16, FLOAT16, c, p, next, partial);
    else
        decode(FLOAT32, FLOAT32, c, p, next, partial);
}
