/* Computes attention of a block of a prompt's queries with the micro kernel, tile by tile of keys.
 *
 * A row is one token's query of one head of a group, so all rows read the same keys.
 * Refuses to know: other pieces, how the step was cut.
 */
#include "attention.h"
#include "micro.h"

typedef struct {
    float *query;  /* [slice of head_dim][row][X_STRIDE], scaled */
    float *keys;   /* per panel of TILE: [head_dim][PANEL] */
    float *values; /* per panel of padded values: [TILE][PANEL] */
    float *scores; /* one block of rows: [row][X_STRIDE]; weights overwrite them */
    float *sums;   /* this span's sums; per block of rows: [padded / PANEL][row, up to `room`][PANEL] */
    float *joined; /* sums of all earlier spans, in the same layout */
    softmax_state *states, *joined_states; /* [num_rows] */
    /* With bfloat16 pairs, query is [step of HALVES][row][HALVES]; keys are [pair of elements][PANEL][2] per panel
     * of TILE; values are [pair of keys][PANEL][2] per panel; `weights` is used, too. */
    char *weights; /* one block of rows: [step of HALVES keys][MOST_ROWS][HALVES] */
} tiles;

#define MOST_ROWS TILED_ROWS /* maximum number of rows of a block; MAX_ROWS without matrices */

/* A block of rows whose scores are kept together; `room`: rows that its sums have memory for. */
typedef struct {
    int64_t start, rows, room;
} row_block;

INLINE int64_t num_blocks(const attention_call *c, int64_t count) {
    return ceil_div(count, in_tiles(c) ? TILED_ROWS : MAX_ROWS);
}
/* Return the i-th block of rows: with matrices TILED_ROWS rows, without nearly equally many. */
INLINE row_block block_of(const attention_call *c, int64_t count, int64_t i) {
    if (in_tiles(c)) return (row_block){i * TILED_ROWS, min64(TILED_ROWS, count - i * TILED_ROWS), TILED_ROWS};
    int64_t start = count * i / num_blocks(c, count), rows = count * (i + 1) / num_blocks(c, count) - start;
    return (row_block){start, rows, rows};
}

/* Return value_dim rounded up to whole panels. */
INLINE int64_t padded_dim(const attention_call *c) { return ceil_div(c->value_dim, PANEL) * PANEL; }
INLINE int64_t num_slices(const attention_call *c) { return ceil_div(c->head_dim, MAX_DEPTH); }
INLINE int64_t max_rows(const attention_call *c) {
    return ceil_div(max64(PROMPT_ROWS, c->num_heads / c->num_kv_heads), TILED_ROWS) * TILED_ROWS;
}

INLINE int64_t key_steps(const attention_call *c) { return ceil_div(c->head_dim, HALVES); }
/* Return the bytes between steps of queries, no multiple of a page, because steps would share cache sets. */
INLINE int64_t query_step(const attention_call *c) { return (max_rows(c) + 8) * ROW_BYTES; }

static float *place(const attention_call *c, float *at, tiles *t) {
    int64_t rows = max_rows(c), padded = padded_dim(c), dim = key_steps(c) * HALVES;
    t->query = at, at += max64(num_slices(c) * rows * X_STRIDE, key_steps(c) * query_step(c) / 4);
    t->sums = at, at += rows * padded;
    t->joined = at, at += rows * padded;
    t->keys = at, at += TILE * dim;
    t->values = at, at += TILE * padded;
    t->scores = at, at += MOST_ROWS * X_STRIDE;
    t->states = (softmax_state *)at, at += 2 * rows;
    t->joined_states = (softmax_state *)at, at += 2 * rows;
    t->weights = (char *)at, at += TILE / HALVES * MOST_ROWS * ROW_BYTES / 4;
    return at;
}

int64_t prompt_scratch_bytes(const attention_call *c) {
    tiles t;
    return (int64_t)place(c, NULL, &t);
}

INLINE void scale_panel(float *sums, float factor) {
    store(sums, load(FLOAT32, sums, 0) * factor);
    store(sums + LANES, load(FLOAT32, sums, LANES) * factor);
}

/* Pack LANES keys at `rows` into columns of a panel. */
INLINE void pack_keys(int type, const attention_call *c, const void *const *rows, float *to) {
    int64_t whole = c->head_dim - c->head_dim % LANES;
    for (int64_t j = 0; j < whole; j += LANES) {
        vec block[LANES];
        for (int64_t i = 0; i < LANES; i++) block[i] = load(type, rows[i], j);
        transpose(block);
        for (int64_t i = 0; i < LANES; i++) store(to + (j + i) * PANEL, block[i]);
    }
    float row[c->head_dim];
    for (int64_t i = 0; whole < c->head_dim && i < LANES; i++) {
        read_row(type, rows[i], row, c->head_dim);
        for (int64_t j = whole; j < c->head_dim; j++) to[j * PANEL + i] = row[j];
    }
}

/* Pack a tile's keys and values [skip, num) into panels. */
INLINE void pack_tile(int type, const attention_call *c, const tiles *t, const void *const *keys, int64_t skip,
                      int64_t num) {
    int64_t dim = c->head_dim, padded = padded_dim(c);
    for (int64_t i = skip / PANEL * PANEL; i < num; i += LANES)
        pack_keys(type, c, keys + i, t->keys + i / PANEL * PANEL * dim + i % PANEL);
    float row[padded];
    memset(row, 0, sizeof row);
    for (int64_t i = skip; i < num; i++) {
        read_row(type, (const char *)keys[i] + value_offset(c), row, c->value_dim);
        for (int64_t j = 0; j < padded; j += PANEL)
            memcpy(t->values + j * TILE + i * PANEL, row + j, PANEL * sizeof(float));
    }
}

#if DOTS_HALVES

/* Pack keys like pack_keys, but in pairs of elements. */
INLINE void pair_keys(int type, const attention_call *c, const void *const *keys, float *to) {
    int64_t room = key_steps(c) * HALVES;
    uint16_t copies[LANES][room];
    const void *rows[LANES];
    for (int64_t i = 0; i < LANES; i++) rows[i] = halves_of(type, keys[i], c->head_dim, room, copies[i]);
    for (int64_t j = 0; j < room; j += 2 * LANES) {
        vec block[LANES];
        load_columns(rows, j * 2, block);
        for (int64_t i = 0; i < LANES; i++) store(to + (j / 2 + i) * PANEL, block[i]);
    }
}

/* Pack a tile like pack_tile; values of 0 pad partly filled steps. */
INLINE void pair_tile(int type, const attention_call *c, const tiles *t, const void *const *keys, int64_t skip,
                      int64_t num) {
    int64_t padded = padded_dim(c), room = key_steps(c) * HALVES;
    uint16_t nothing[padded], copies[2][padded];
    memset(nothing, 0, sizeof nothing);
    for (int64_t i = skip / PANEL * PANEL; i < num; i += LANES)
        pair_keys(type, c, keys + i, t->keys + i / PANEL * PANEL * room / 2 + i % PANEL);
    for (int64_t i = skip / HALVES * HALVES; i < ceil_div(num, HALVES) * HALVES; i += 2) {
        const void *rows[2] = {nothing, nothing};
        for (int64_t n = 0; n < 2; n++)
            if (i + n >= skip && i + n < num)
                rows[n] = halves_of(type, (const char *)keys[i + n] + value_offset(c), c->value_dim, padded, copies[n]);
        for (int64_t j = 0; j < padded; j += PANEL) {
            vec pairs[2];
            pair_halves(BFLOAT16, rows[0], rows[1], j, pairs);
            store(t->values + (j * TILE + i * PANEL) / 2, pairs[0]);
            store(t->values + (j * TILE + i * PANEL) / 2 + LANES, pairs[1]);
        }
    }
}

/* tile [rows of a block, PANEL] = x @ w, by matrices or by pairs; `factors`: add the old tile times each row's
 * factor. */
INLINE void multiply_block(int tiled, int64_t rows, const float *w, const char *x, int64_t x_step,
                           int64_t num_steps, float *tile, int64_t stride, const float *factors) {
    const int accumulate = factors != NULL;
    fetch nothing = {(const char *)w, 0};
#if HAS_TILES
    if (tiled) {
        for (int64_t r = 0; accumulate && r < rows; r++)
            if (factors[r] != 1) scale_panel(tile + r * stride, factors[r]);
        const meanwhile idle = {NULL};
        if (rows > TILE_ROWS)
            tiles_product(2, 2, (const char *)w, x, x_step, num_steps, tile, stride, accumulate, nothing, idle);
        else
            tiles_product(1, 2, (const char *)w, x, x_step, num_steps, tile, stride, accumulate, nothing, idle);
        return;
    }
#endif
    const int64_t num_pairs = HALVES / 2;
    pairs_product(rows, BFLOAT16, (const char *)w, x, x_step, num_steps, num_pairs, tile, stride, accumulate, factors,
                  nothing);
}

/* Attend like attend_block, but with bfloat16 products. */
INLINE void attend_pairs(int tiled, const attention_call *c, const piece *p, const tiles *t, row_block b,
                         int64_t tile, int64_t skip, int64_t num) {
    int64_t padded = padded_dim(c), steps = key_steps(c);
    num = min64(num, row_end(c, p, b.start + b.rows - 1) - tile); /* keys that any row may see */
    if (num <= skip) return;
    int64_t begin = skip / HALVES * HALVES, end = ceil_div(num, HALVES) * HALVES;
    for (int64_t q = begin; q < num; q += PANEL)
        multiply_block(tiled, b.rows, t->keys + q * steps * HALVES / 2,
                       (const char *)t->query + b.start * ROW_BYTES, query_step(c), steps, t->scores + q,
                       X_STRIDE, NULL);
    score_rows s = {t->scores, X_STRIDE, t->weights, ROW_BYTES, MOST_ROWS * ROW_BYTES};
    s.states = t->states + b.start;
    find_seen(c, p, tile, skip, b.start, b.rows, &s);
    baton_weigh(c->scale, c->soft_cap, &s, b.rows, num);
    for (int64_t r = 0; r < b.rows; r++)
        for (int64_t i = ceil_div(num, LANES) * LANES; i < end; i += LANES)
            store_weights(t->weights + r * ROW_BYTES + i / HALVES * MOST_ROWS * ROW_BYTES + i % HALVES * 2, (vec){0});
    for (int64_t j = 0; j < padded; j += PANEL) {
        float *sums = t->sums + b.start * padded + j * b.room;
        multiply_block(tiled, b.rows, t->values + (j * TILE + begin * PANEL) / 2,
                       t->weights + begin / HALVES * MOST_ROWS * ROW_BYTES, MOST_ROWS * ROW_BYTES,
                       (end - begin) / HALVES, sums, PANEL, s.factors);
    }
}

/* Prefetch a part of the next tile's keys and values into L2; each block of rows prefetches one part. */
INLINE void fetch_part(const attention_call *c, const void *const *keys, int64_t part, int64_t of) {
    for (int64_t i = TILE * part / of; i < TILE * (part + 1) / of; i++) {
        for (int64_t n = 0; n < c->head_dim * size_of(c->cache_type); n += 64) fetch_into(2, (const char *)keys[i] + n);
        const char *value = (const char *)keys[i] + value_offset(c);
        for (int64_t n = 0; n < c->value_dim * size_of(c->cache_type); n += 64) fetch_into(2, value + n);
    }
}

/* Attend with all rows to the keys [skip, num) of the tile that begins at `tile`. */
static void attend_tile(const attention_call *c, const piece *p, const tiles *t, const void *const *next,
                        int64_t count, int64_t tile, int64_t skip, int64_t num) {
#if HAS_TILES
    if (in_tiles(c)) {
        tiles_begin(ROW_BYTES);
        for (int64_t b = 0; b < num_blocks(c, count); b++)
            attend_pairs(1, c, p, t, block_of(c, count, b), tile, skip, num);
        tiles_end();
        return;
    }
#endif
    for (int64_t b = 0; b < num_blocks(c, count); b++) {
        fetch_part(c, next, b, num_blocks(c, count));
        attend_pairs(0, c, p, t, block_of(c, count, b), tile, skip, num);
    }
}

#define TOKENS_AHEAD 16 /* tokens whose queries are prefetched, because each has its own page */

/* Pack queries for attend_pairs. */
INLINE void order_queries(const attention_call *c, const piece *p, const tiles *t, int64_t count) {
    int64_t group = c->num_heads / c->num_kv_heads, room = key_steps(c) * HALVES, step = query_step(c);
    uint16_t copy[room];
    for (int64_t r = 0; r < count; r++) {
        int64_t token = p->row + r / group, head = p->kv_head * group + r % group;
        const char *from = at(BFLOAT16, c->query, (token * c->num_heads + head) * c->head_dim);
        const char *row = halves_of(BFLOAT16, from, c->head_dim, room, copy);
        for (int64_t s = 0; s < key_steps(c); s++) {
            fetch_into(2, from + s * ROW_BYTES + TOKENS_AHEAD * c->num_heads * c->head_dim * 2);
            memcpy((char *)t->query + s * step + r * ROW_BYTES, row + s * ROW_BYTES, ROW_BYTES);
        }
    }
}

#endif

/* Attend with one block of rows to the keys [skip, num) of the tile that begins at `tile`. */
static void attend_block(const attention_call *c, const piece *p, const tiles *t, row_block b,
                         int64_t tile, int64_t skip, int64_t num) {
    int64_t dim = c->head_dim, padded = padded_dim(c);
    fetch nothing = {(const char *)t->keys, 0};
    num = min64(num, row_end(c, p, b.start + b.rows - 1) - tile); /* keys that any row may see */
    if (num <= skip) return;
    for (int64_t q = skip / PANEL * PANEL; q < num; q += PANEL)
        for (int64_t s = 0; s < num_slices(c); s++) {
            int64_t k = s * MAX_DEPTH;
            micro(b.rows, FLOAT32, t->keys + q * dim + k * PANEL,
                  t->query + (s * max_rows(c) + b.start) * X_STRIDE, min64(MAX_DEPTH, dim - k),
                  t->scores + q, X_STRIDE, s > 0, nothing);
        }
    score_rows s = {t->scores, X_STRIDE};
    s.states = t->states + b.start;
    find_seen(c, p, tile, skip, b.start, b.rows, &s);
    baton_weigh(1, c->soft_cap, &s, b.rows, num);
    for (int64_t j = 0; j < padded; j += PANEL) {
        float *sums = t->sums + b.start * padded + j * b.room;
        for (int64_t r = 0; r < b.rows; r++)
            if (s.factors[r] != 1) scale_panel(sums + r * PANEL, s.factors[r]);
        micro(b.rows, FLOAT32, t->values + j * TILE + skip * PANEL, t->scores + skip, num - skip, sums,
              PANEL, 1, nothing);
    }
}

/* Return the sums of row r of a block: padded / PANEL panels, PANEL * room floats apart. */
INLINE int64_t sums_of(int64_t padded, row_block b, int64_t r) { return b.start * padded + r * PANEL; }

/* Attend with all rows to one span, which ends at `end`. */
INLINE void attend_span(int type, int cache_type, const attention_call *c, const piece *p, const tiles *t,
                        int64_t count, int64_t begin, int64_t end) {
    row_block last = block_of(c, count, num_blocks(c, count) - 1);
    memset(t->sums, 0, (last.start + last.room) * padded_dim(c) * sizeof(float));
    for (int64_t r = 0; r < count; r++) t->states[r] = EMPTY_STATE;
    for (int64_t tile = begin / TILE * TILE; tile < end; tile += TILE) {
        int64_t skip = max64(0, begin - tile), num = min64(TILE, end - tile);
        const void *keys[2 * TILE];
        find_keys(c, p, tile, 0, 2 * TILE, keys);
#if DOTS_HALVES
        if (type == BFLOAT16) {
            pair_tile(cache_type, c, t, keys, skip, num);
            attend_tile(c, p, t, keys + TILE, count, tile, skip, num);
            continue;
        }
#endif
        pack_tile(cache_type, c, t, keys, skip, num);
        for (int64_t b = 0; b < num_blocks(c, count); b++)
            attend_block(c, p, t, block_of(c, count, b), tile, skip, num);
    }
}

/* Join the finished span to the earlier ones. */
static void join_span(const attention_call *c, const tiles *t, int64_t count) {
    int64_t padded = padded_dim(c);
    for (int64_t i = 0; i < num_blocks(c, count); i++) {
        row_block b = block_of(c, count, i);
        for (int64_t r = 0; r < b.rows; r++) {
            softmax_state joined = t->joined_states[b.start + r];
            for (int64_t half = 0; half < PANEL; half += LANES) {
                int64_t at = sums_of(padded, b, r) + half;
                t->joined_states[b.start + r] = joined;
                baton_join(t->joined_states + b.start + r, t->joined + at, t->states[b.start + r],
                           t->sums + at, padded / PANEL, b.room * PANEL);
            }
        }
    }
}

/* Store a decode's result for a span, per head, in the layout of attention_decode.c. */
static void leave_partial(const attention_call *c, const tiles *t, int64_t count, float *partial) {
    int64_t padded = padded_dim(c);
    for (int64_t i = 0; i < num_blocks(c, count); i++) {
        row_block b = block_of(c, count, i);
        for (int64_t r = 0; r < b.rows; r++) {
            const float *from = t->sums + sums_of(padded, b, r);
            float *to = partial + (b.start + r) * partial_size(c);
            to[0] = t->states[b.start + r].top;
            to[1] = t->states[b.start + r].total;
            for (int64_t j = 0; j < padded_sum(c); j += LANES)
                store(to + 2 + j, load(FLOAT32, from, j / PANEL * PANEL * b.room + j % PANEL));
        }
    }
}

INLINE void prompt(int type, int cache_type, const attention_call *c, const piece *p,
                   float *scratch, float *partial) {
    tiles t;
    place(c, scratch, &t);
    int64_t group = c->num_heads / c->num_kv_heads, dim = c->head_dim, padded = padded_dim(c);
    int64_t count = p->num_tokens * group;
    float row[max64(dim, padded)];
#if DOTS_HALVES
    if (type == BFLOAT16) order_queries(c, p, &t, count);
#endif
    for (int64_t r = 0; r < count && !(DOTS_HALVES && type == BFLOAT16); r++) {
        int64_t token = p->row + r / group, head = p->kv_head * group + r % group;
        read_row(type, at(type, c->query, (token * c->num_heads + head) * dim), row, dim);
        for (int64_t j = 0; j < dim; j++)
            t.query[(j / MAX_DEPTH * max_rows(c) + r) * X_STRIDE + j % MAX_DEPTH] =
                row[j] * (float)c->scale;
    }
    int64_t num_spans = ceil_div(p->end, SPAN) - p->begin / SPAN;
    row_block last = block_of(c, count, num_blocks(c, count) - 1);
    memset(t.joined, 0, num_spans > 1 ? (last.start + last.room) * padded * sizeof(float) : 0);
    for (int64_t r = 0; r < count; r++) t.joined_states[r] = EMPTY_STATE;
    for (int64_t s = p->begin / SPAN; s * SPAN < p->end; s++) {
        attend_span(type, cache_type, c, p, &t, count, max64(p->begin, s * SPAN),
                    min64(p->end, (s + 1) * SPAN));
        if (num_spans > 1) join_span(c, &t, count);
    }
    if (partial) {
        leave_partial(c, &t, count, partial);
        return;
    }
    const float *sums = num_spans > 1 ? t.joined : t.sums;
    const softmax_state *states = num_spans > 1 ? t.joined_states : t.states;
    for (int64_t i = 0; i < num_blocks(c, count); i++) {
        row_block b = block_of(c, count, i);
        for (int64_t r = 0; r < b.rows; r++) {
            const float *from = sums + sums_of(padded, b, r);
            int64_t token = p->row + (b.start + r) / group, head = p->kv_head * group + (b.start + r) % group;
            float divisor = baton_divisor(states[b.start + r], c->sinks, head);
            for (int64_t j = 0; j < padded; j += LANES)
                store(row + j, load(FLOAT32, from, j / PANEL * PANEL * b.room + j % PANEL) / divisor);
            int64_t to = (token * c->num_heads + head) * c->value_dim;
            write_row(type, row, (char *)c->out + to * size_of(type), c->value_dim);
        }
    }
}

/* `partial`: [group, partial_size], for the result of a decode with several spans; otherwise NULL. */
void baton_attend_prompt(const attention_call *c, const piece *p, float *scratch, float *partial) {
    if (c->cache_type == FLOAT8 && c->type == BFLOAT16)
        prompt(BFLOAT16, FLOAT8, c, p, scratch, partial);
    else if (c->cache_type == FLOAT8 && c->type == FLOAT16)
        prompt(FLOAT16, FLOAT8, c, p, scratch, partial);
    else if (c->cache_type == FLOAT8)
        prompt(FLOAT32, FLOAT8, c, p, scratch, partial);
    else if (c->type == BFLOAT16)
        prompt(BFLOAT16, BFLOAT16, c, p, scratch, partial);
    else if (c->type == FLOAT16)
        prompt(FLOAT16, FLOAT16, c, p, scratch, partial);
    else
        prompt(FLOAT32, FLOAT32, c, p, scratch, partial);
}
