/* One call of paged attention, and what its pieces are.
 *
 * Refuses to know: how a piece is computed.
 */
#ifndef BATON_ATTENTION_H
#define BATON_ATTENTION_H

#include "vectors.h"

#define SPAN 512        /* keys of a decode that one thread takes at a time */
#define PROMPT_ROWS 384 /* query rows (tokens x heads) that share packed keys */
#define TILE 192        /* keys whose scores are kept at a time; a multiple of every PANEL */
#define SERIAL_WORK 65536

typedef struct {
    int64_t type, cache_type; /* of query and out; of the cache, FLOAT8 where it is another */
    int64_t num_threads, num_tokens, num_requests, max_blocks;
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    int64_t block_stride, kv_stride, head_stride, token_stride; /* of the cache, in elements */
    int64_t sliding_window;                                     /* 0: none */
    const void *query, *kv_cache;
    void *out;
    const int32_t *query_start_loc, *seq_lens, *block_table;
    double scale, soft_cap; /* soft_cap 0: none */
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

INLINE vec soften(vec score, float cap) {
    /* cap * tanh(score / cap) */
    return cap * (1.0f - 2.0f / (exp_fast(score * (2.0f / cap)) + 1.0f));
}

/* Floats of a partial result per head: the largest score, the sum of weights, the weighted sum. */
INLINE int64_t partial_size(const attention_call *c) { return 2 + c->head_dim; }

int64_t prompt_scratch_bytes(const attention_call *c);
void baton_attend_prompt(const attention_call *c, const piece *p, float *scratch);
void baton_attend_decode(const attention_call *c, const piece *p, float *partial);

#endif
