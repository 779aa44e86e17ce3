/* One call of paged attention: its pieces, and the order in which a row's products are summed.
 *
 * The order is counted from the sequence's first token. So a row has the same bits in every batch, as a decode or
 * as part of a prompt, with or without a cached prefix:
 *   score   sum over head_dim, element by element, or pair by pair
 *   TILE    the largest score is merged with those of the span's earlier tiles; sums run key by
 *           key, or pair by pair of keys
 *   SPAN    starts with empty sums; one function joins the spans, one after another
 * Keys that a row does not see, before its window and after itself, weigh 0, and adding 0 does not change any bit.
 * CPUs that multiply bfloat16 (see halves.h) multiply queries, keys, values and rounded weights in pairs or, with
 * AMX, in matrices. Decodes and prompts then use the same instructions; for calls with many heads per key see
 * attention_shared.h.
 *
 * Refuses to know: how a piece is computed.
 */
#ifndef BATON_ATTENTION_H
#define BATON_ATTENTION_H

#include <math.h>

#include "halves.h"

#define TILE 192        /* keys whose scores are kept together; a multiple of every PANEL */
#define SPAN (3 * TILE) /* keys of a decode for one thread */
#define PROMPT_ROWS 384 /* query rows (tokens x heads) that share packed keys */
#define MOST_WEIGHED TILED_ROWS /* rows whose scores become weights together */
#define SERIAL_WORK 65536

typedef struct {
    int64_t type, cache_type; /* cache_type: the type of query and out, or FLOAT8 */
    int64_t num_threads, num_tokens, num_requests, max_blocks;
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    int64_t value_dim; /* size per head of a value and of an output; at most head_dim */
    int64_t block_stride, kv_stride, head_stride, token_stride; /* strides of the cache, in elements */
    int64_t sliding_window;                                     /* 0: none */
    const void *query, *kv_cache;
    void *out;
    const int32_t *query_start_loc, *seq_lens, *block_table;
    double scale, soft_cap; /* soft_cap 0: none */
    const float *sinks;     /* [num_heads], or NULL */
    /* [num_tokens], never descending: the end of the keys that a token sees. NULL: a token sees those up to itself. */
    const int32_t *row_ends;
} attention_call;

/* Query rows [row, row + num_tokens) of one KV head, over the keys [begin, end); the first is at `position`.
 * `partial`: place of a decode's partial result, or -1. `sharer`: the piece's rows are those of num_tokens decodes
 * that share these keys, from this one in the list of sharers on; or -1. */
typedef struct {
    int64_t request, kv_head, row, num_tokens, begin, end, partial, position, sharer;
} piece;

/* Return the end of the keys that the piece's row r sees. */
INLINE int64_t row_end(const attention_call *c, const piece *p, int64_t r) {
    int64_t token = r / (c->num_heads / c->num_kv_heads);
    return c->row_ends ? c->row_ends[p->row + token] : p->position + token + 1;
}

/* Return the cache row of a key (is_value 0) or value (1). */
INLINE const void *cache_row(const attention_call *c, const piece *p, int64_t position,
                             int is_value) {
    int64_t block = c->block_table[p->request * c->max_blocks + position / c->block_size];
    return at(c->cache_type, c->kv_cache,
              block * c->block_stride + is_value * c->kv_stride + p->kv_head * c->head_stride +
                  position % c->block_size * c->token_stride);
}

/* Find the addresses of the tile's keys [from, to). The piece's first and last key stand in for keys outside the
 * piece, which get no weight. */
INLINE void find_keys(const attention_call *c, const piece *p, int64_t tile, int64_t from, int64_t to,
                      const void **keys) {
    int64_t begin = max64(from, min64(to, p->begin - tile)), end = max64(begin, min64(to, p->end - tile));
    for (int64_t i = begin, stop; i < end; i = stop) {
        const char *key = cache_row(c, p, tile + i, 0);
        stop = min64(end, i + c->block_size - (tile + i) % c->block_size);
        for (int64_t n = i; n < stop; n++) keys[n] = at(c->cache_type, key, (n - i) * c->token_stride);
    }
    const void *first = cache_row(c, p, p->begin, 0), *last = cache_row(c, p, p->end - 1, 0);
    for (int64_t i = from; i < begin; i++) keys[i] = first;
    for (int64_t i = end; i < to; i++) keys[i] = last;
}
/* Return the bytes from a key to its value. */
INLINE int64_t value_offset(const attention_call *c) { return c->kv_stride * size_of(c->cache_type); }

/* Return whether AMX matrices compute attention's products. */
INLINE int in_tiles(const attention_call *c) {
    return HAS_TILES && c->type == BFLOAT16 && baton_has_tiles();
}

#if DOTS_HALVES

/* Load HALVES numbers of a cache row as bfloat16. */
INLINE __m512i load_halves(int type, const void *row, int64_t index) {
    if (type == FLOAT8) return e4m3s_as_halves(_mm512_cvtepu8_epi16(_mm256_loadu_si256(at(FLOAT8, row, index))));
    return _mm512_loadu_si512(at(BFLOAT16, row, index));
}

/* Return a cache row, padded with zeros to `room` numbers; `copy` is written only if the row must be copied. */
INLINE const void *halves_of(int type, const void *row, int64_t dim, int64_t room, uint16_t *copy) {
    if (type == BFLOAT16 && dim == room) return row;
    int64_t i = 0;
    for (; i + HALVES <= dim; i += HALVES) _mm512_storeu_si512(copy + i, load_halves(type, row, i));
    for (; i < room; i += HALVES) {
        uint16_t rest[HALVES] = {0};
        if (i < dim) memcpy(rest, at(type, row, i), (dim - i) * size_of(type));
        _mm512_storeu_si512(copy + i, load_halves(type, rest, 0));
    }
    return copy;
}

/* Load HALVES numbers of each of two rows, interleaved. */
INLINE void pair_halves(int type, const void *first, const void *second, int64_t index, vec *pairs) {
    const __m512i low = (__m512i)(vec_u32){0x200000, 0x210001, 0x220002, 0x230003, 0x240004, 0x250005, 0x260006, 0x270007,
                                  0x280008, 0x290009, 0x2a000a, 0x2b000b, 0x2c000c, 0x2d000d, 0x2e000e, 0x2f000f};
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    __m512i one = load_halves(type, first, index), other = load_halves(type, second, index);
    pairs[0] = (vec)_mm512_permutex2var_epi16(one, low, other);
    pairs[1] = (vec)_mm512_permutex2var_epi16(one, high, other);
}

#endif

/* Return the floats of a sum of values: value_dim, filled up to whole vectors. */
INLINE int64_t padded_sum(const attention_call *c) { return ceil_div(c->value_dim, LANES) * LANES; }
/* Return the floats per head of a partial result: the largest score, the sum of weights, the weighted sum. */
INLINE int64_t partial_size(const attention_call *c) { return 2 + padded_sum(c); }

/* A row's largest score so far, as a power of two, and the sum of the row's weights relative to that. */
typedef struct {
    float top, total;
} softmax_state;
#define EMPTY_STATE ((softmax_state){-INFINITY, 0})

/* A tile's scores, by row. */
typedef struct {
    float *scores; /* rows are `stride` floats apart; if `halves` is NULL, weights overwrite scores */
    int64_t stride;
    char *halves; /* bfloat16 weights: rows `row_bytes` apart, HALVES keys `step` bytes apart */
    int64_t row_bytes, step;
    struct {
        int64_t from, to; /* the tile's keys that the row sees */
    } seen[MOST_WEIGHED];
    softmax_state *states;
    float factors[MOST_WEIGHED]; /* factors of the sums of earlier tiles */
} score_rows;

/* Find the tile's keys, from `skip` on, that the piece's rows [start, start + num_rows) see. */
INLINE void find_seen(const attention_call *c, const piece *p, int64_t tile, int64_t skip, int64_t start,
                      int64_t num_rows, score_rows *rows) {
    int64_t group = c->num_heads / c->num_kv_heads;
    for (int64_t r = 0; r < num_rows; r++) {
        int64_t own_end = p->position + (start + r) / group + 1 - tile;
        rows->seen[r].from = c->sliding_window > 0 ? max64(skip, own_end - c->sliding_window) : skip;
        rows->seen[r].to = row_end(c, p, start + r) - tile;
    }
}

void baton_weigh(float scale, double soft_cap, score_rows *rows, int64_t num_rows, int64_t num);
void baton_join(softmax_state *state, float *sums, softmax_state span, const float *span_sums,
                int64_t num, int64_t stride);
float baton_divisor(softmax_state state, const float *sinks, int64_t head);

int64_t prompt_scratch_bytes(const attention_call *c);
void baton_attend_prompt(const attention_call *c, const piece *p, float *scratch, float *partial);
void baton_attend_decode(const attention_call *c, const piece *p, const piece *next, float *partial);

#endif
