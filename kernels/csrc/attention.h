/* One call of paged attention, what its pieces are, and the order in which a row is summed.
 *
 * The order is counted from the text's first token, so that a row gives the same bits alone and in
 * company, as a decode and as a part of a prompt, whatever was in the cache before:
 *   score   sum over head_dim, one element after another, or pair after pair
 *   TILE    its largest score joins what earlier tiles of the span gave; sums run key by key, or
 *           pair by pair of keys
 *   SPAN    starts anew; spans are joined one after another, by one function
 * A row's keys before its window and after itself weigh 0, and adding 0 changes no bit.
 * Pairs: where a CPU multiplies bfloat16 as it is (see halves.h), queries, keys, values and weights,
 * rounded, are multiplied so; by decodes and prompts alike. Where it has matrices (AMX), by them, also
 * by both alike: decodes, and prompts of many heads that share a key, as attention_shared.h says.
 *
 * Refuses to know: how a piece is computed.
 */
#ifndef BATON_ATTENTION_H
#define BATON_ATTENTION_H

#include <math.h>

#include "halves.h"

#define TILE 192        /* keys whose scores are kept at a time; a multiple of every PANEL */
#define SPAN (3 * TILE) /* keys of a decode that one thread takes at a time */
#define PROMPT_ROWS 384 /* query rows (tokens x heads) that share packed keys */
#define SERIAL_WORK 65536

typedef struct {
    int64_t type, cache_type; /* of query and out; of the cache, FLOAT8 where it is another */
    int64_t num_threads, num_tokens, num_requests, max_blocks;
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    int64_t value_dim; /* of a value, and of the output: at most head_dim */
    int64_t block_stride, kv_stride, head_stride, token_stride; /* of the cache, in elements */
    int64_t sliding_window;                                     /* 0: none */
    const void *query, *kv_cache;
    void *out;
    const int32_t *query_start_loc, *seq_lens, *block_table;
    double scale, soft_cap; /* soft_cap 0: none */
    const float *sinks;     /* [num_heads], or NULL */
} attention_call;

/* Query rows [row, row + num_tokens) of one KV head over the keys [begin, end). */
typedef struct {
    int64_t request, kv_head, row, num_tokens, begin, end, num_spans, partial;
} piece;

/* The cache row of a key (is_value 0) or value (1). */
INLINE const void *cache_row(const attention_call *c, const piece *p, int64_t position,
                             int is_value) {
    int64_t block = c->block_table[p->request * c->max_blocks + position / c->block_size];
    return at(c->cache_type, c->kv_cache,
              block * c->block_stride + is_value * c->kv_stride + p->kv_head * c->head_stride +
                  position % c->block_size * c->token_stride);
}

/* Whether queries and keys, weights and values are multiplied by matrices. */
INLINE int in_tiles(const attention_call *c) {
    return HAS_TILES && c->type == BFLOAT16 && baton_has_tiles();
}

/* Rows of a cache as bfloat16 with zeros up to `room` numbers; in `copy` unless they lie so. */
INLINE const void *halves_of(int cache_type, const void *from, int64_t dim, int64_t room,
                             uint16_t *copy) {
    if (cache_type == BFLOAT16 && dim == room) return from;
    float row[room];
    memset(row, 0, sizeof row);
    read_row(cache_type, from, row, dim);
    write_row(BFLOAT16, row, copy, room);
    return copy;
}

/* LANES numbers of two rows of bfloat16, each beside its neighbour. */
INLINE vec_u32 pair_up(const void *first, const void *second, int64_t index) {
    return widened((const uint16_t *)first + index) | widened((const uint16_t *)second + index) << 16;
}

/* Floats of a sum of values: value_dim filled up to whole vectors. */
INLINE int64_t padded_sum(const attention_call *c) { return ceil_div(c->value_dim, LANES) * LANES; }
/* Floats of a partial result per head: the largest score, the sum of weights, the weighted sum. */
INLINE int64_t partial_size(const attention_call *c) { return 2 + padded_sum(c); }

/* What a row has gathered: its largest score, and the sum of its weights relative to it. */
typedef struct {
    float top, total;
} softmax_state;
#define EMPTY_STATE ((softmax_state){-INFINITY, 0})

float baton_weigh(float scale, double soft_cap, float *scores, int64_t from, int64_t to, int64_t num,
                  softmax_state *state, char *halves, int64_t step);
void baton_join(softmax_state *state, float *sums, softmax_state span, const float *span_sums,
                int64_t num, int64_t stride);
float baton_divisor(softmax_state state, const float *sinks, int64_t head);

int64_t prompt_scratch_bytes(const attention_call *c);
void baton_attend_prompt(const attention_call *c, const piece *p, float *scratch, float *partial);
void baton_attend_decode(const attention_call *c, const piece *p, float *partial);

#endif
