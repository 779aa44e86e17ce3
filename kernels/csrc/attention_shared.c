/* Computes attention of a block of query rows (tokens x heads that share keys), tile by tile of keys.
 *
 *   in tiles   scores [16 keys, 16 rows] are sums of matrix products in steps of HALVES elements;
 *              bfloat16 weights are multiplied by pairs of values, in steps of HALVES keys
 *   in lanes   a score is LANES sums along head_dim, added at the end; values are added key by key
 * Steps are always counted from the sequence's first token and the head's first element.
 * Refuses to know: other pieces, how the step was cut.
 */
#include "attention_shared.h"

#define BLOCK (2 * TILE_ROWS) /* rows whose scores and weights are kept together */
#define SCORE_STRIDE (TILE + LANES)
#define MATRIX_BYTES 1024
#define VALUE_BYTES (MATRIX_BYTES + 64) /* bytes between matrices of values; no divisor of a page */
#define PRODUCTS 4 /* matrices of sums at a time, so that no product waits for another into its matrix */
#define FETCHED 8 /* keys that are prefetched together, line by line */
#define AHEAD 8 /* keys that a decode prefetches ahead, at least */
#define SCORED_ROWS 4 /* SCORED_ROWS x SCORED_KEYS sums fill a vector once lanes are added */
#define SCORED_KEYS (LANES / SCORED_ROWS)

typedef struct {
    int64_t group, count; /* rows of the piece */
    int64_t room;         /* numbers per key: head_dim padded to whole steps */
    int64_t stride;       /* floats from one row of sums to the next */
    char *query; /* in tiles [row / 16][step][pair][16 rows][2]; in lanes [row][room] floats, scaled */
    float *sums; /* sums of this span: [row][stride] */
    float *joined; /* sums of all earlier spans, in the same layout */
    softmax_state *states, *joined_states; /* [row] */
    float *scores;  /* a block's scores: [row][SCORE_STRIDE]; weights overwrite them */
    char *weights;  /* in tiles, a block's bfloat16 weights: [row / 16][step of HALVES keys][16 rows][HALVES] */
    char *values;   /* in tiles: [step of HALVES keys][column / 16][pair][16 columns][2] */
    char *copies;   /* copies of keys that matrices cannot load in place: [PRODUCTS][16][room] */
    const void *keys[2 * TILE], *value_rows[TILE]; /* this tile's rows; `keys` also has the next tile's */
    /* what a decode prefetches: both tiles' keys, or this tile's keys and the next tile's values */
    const void *fetched[2 * TILE];
    int64_t next;                  /* place in `fetched` of the next row to prefetch */
} shared;

INLINE int64_t rows_of(const attention_call *c) {
    return ceil_div(max64(PROMPT_ROWS, group_of(c)), BLOCK) * BLOCK;
}

static float *place(const attention_call *c, char *at, shared *s) {
    int64_t rows = rows_of(c), columns = ceil_div(c->value_dim, PANEL) * PANEL;
    s->group = group_of(c);
    s->room = ceil_div(c->head_dim, HALVES) * HALVES;
    s->stride = columns + LANES; /* not a multiple of half a page */
    s->query = at, at += rows * s->room * sizeof(float);
    s->sums = (float *)at, at += rows * s->stride * sizeof(float);
    s->joined = (float *)at, at += rows * s->stride * sizeof(float);
    s->scores = (float *)at, at += BLOCK * SCORE_STRIDE * sizeof(float);
    s->values = at, at += TILE / HALVES * (columns / LANES) * VALUE_BYTES;
    s->weights = at, at += BLOCK * TILE * 2;
    s->copies = at, at += PRODUCTS * TILE_ROWS * s->room * 2;
    s->states = (softmax_state *)at, at += rows * sizeof(softmax_state);
    s->joined_states = (softmax_state *)at, at += rows * sizeof(softmax_state);
    return (float *)at;
}

int64_t shared_scratch_bytes(const attention_call *c) {
    shared s;
    return (int64_t)place(c, NULL, &s);
}

/* Find the addresses of the tile's keys and values, and of the next tile's keys. */
static void find_rows(const attention_call *c, const piece *p, int64_t tile, int is_first, shared *s) {
    int64_t kv_bytes = value_offset(c);
    if (is_first) find_keys(c, p, tile, 0, TILE, s->keys);
    else memcpy(s->keys, s->keys + TILE, TILE * sizeof(void *));
    find_keys(c, p, tile, TILE, 2 * TILE, s->keys);
    for (int64_t i = 0; i < TILE; i++) s->value_rows[i] = (const char *)s->keys[i] + kv_bytes;
    memcpy(s->fetched, s->keys, sizeof s->keys);
    for (int64_t i = TILE; kv_bytes && i < 2 * TILE; i++) s->fetched[i] = (const char *)s->keys[i] + kv_bytes;
    int64_t begin = max64(0, p->begin - tile);
    if (p->num_tokens > 1) s->next = 2 * TILE; /* prompts prefetch nothing */
    else if (kv_bytes) s->next = begin;
    else s->next = is_first ? begin + AHEAD : s->next - TILE;
}

/* Keys to prefetch, line by line, in the order that the CPU's own prefetcher expects. */
typedef struct {
    const char *line, *stop;
    const void *const *key, *const *last;
    int64_t bytes;
} stream;

/* Return the next `num` keys to prefetch; none if fewer are left, or if `wanted` is 0. */
INLINE stream fetch_keys(const attention_call *c, shared *s, int wanted, int64_t num) {
    int64_t bytes = c->head_dim * size_of(c->cache_type);
    if (!wanted || s->next + num > 2 * TILE) return (stream){0};
    const void *const *key = s->fetched + s->next;
    s->next += num;
    return (stream){*key, (const char *)*key + bytes, key, key + num - 1, bytes};
}

INLINE void fetch_line(stream *f) {
    if (__builtin_expect(f->line >= f->stop, 0)) {
        if (f->key == f->last) return;
        f->line = *++f->key;
        f->stop = f->line + f->bytes;
    }
    __builtin_prefetch(f->line, 0, 2);
    f->line += 64;
}

/* Return how many of the tile's `num` keys any row before `end` sees. */
INLINE int64_t seen_keys(const attention_call *c, const piece *p, int64_t end, int64_t tile, int64_t num) {
    return min64(num, row_end(c, p, end - 1) - tile);
}

/* Turn a block's scores [skip, num) into weights, and scale the sums of earlier tiles. */
INLINE void weigh_rows(const attention_call *c, const piece *p, shared *s, float scale, int64_t start,
                       int64_t rows, int64_t tile, int64_t skip, int64_t num) {
    score_rows w = {s->scores, SCORE_STRIDE};
    w.states = s->states + start;
    find_seen(c, p, tile, skip, start, rows, &w);
    baton_weigh(scale, c->soft_cap, &w, rows, num);
    for (int64_t r = 0; r < rows; r++) {
        float *sums = s->sums + (start + r) * s->stride;
        if (w.factors[r] != 1)
            for (int64_t j = 0; j < s->stride; j += LANES) store(sums + j, load(FLOAT32, sums, j) * w.factors[r]);
    }
}

#if HAS_TILES

/* Pack queries as second factors of matrix products: columns are the piece's rows. */
static void order_queries(const attention_call *c, const piece *p, shared *s) {
    uint16_t copies[LANES][s->room];
    memset(copies, 0, sizeof copies);
    for (int64_t r = 0; r < s->count; r += LANES) {
        const void *rows[LANES];
        for (int64_t i = 0; i < LANES; i++) {
            int64_t row = min64(r + i, s->count - 1); /* the last row replaces missing ones */
            int64_t token = p->row + row / s->group, head = p->kv_head * s->group + row % s->group;
            const void *from = at(BFLOAT16, c->query, (token * c->num_heads + head) * c->head_dim);
            rows[i] = halves_of(BFLOAT16, from, c->head_dim, s->room, copies[i]);
        }
        for (int64_t j = 0; j < s->room; j += HALVES) {
            vec columns[LANES];
            load_columns(rows, j * 2, columns);
            float *to = (float *)(s->query + r * s->room * 2 + j / HALVES * MATRIX_BYTES);
            for (int64_t i = 0; i < LANES; i++) store(to + i * LANES, columns[i]);
        }
    }
}

/* Return the 16 keys from i on as a first factor: in place if evenly spaced, else copied. */
INLINE const char *key_matrix(const attention_call *c, const piece *p, shared *s, int64_t tile,
                              int64_t i, char *copies, int64_t *pitch) {
    int is_even = c->cache_type == BFLOAT16 && s->room == c->head_dim && c->block_size % TILE_ROWS == 0;
    if (is_even) {
        /* The first key's address. A piece that begins later knows only a later key of the same block. */
        int64_t known = max64(tile + i, p->begin), back = known - tile - i;
        *pitch = c->token_stride * 2;
        return (const char *)s->keys[known - tile] - back * *pitch;
    }
    *pitch = s->room * 2;
    for (int64_t n = 0; n < TILE_ROWS; n++) {
        char *copy = copies + n * *pitch;
        const void *row = halves_of(c->cache_type, s->keys[i + n], c->head_dim, s->room, (uint16_t *)copy);
        if (row != copy) memcpy(copy, row, *pitch);
    }
    return copies;
}

/* Compute the scores of `matrices` x 16 keys from i on for `blocks` x 16 rows. The product of both constants is at
 * most PRODUCTS. */
INLINE void score_matrices(int matrices, int blocks, const attention_call *c, const piece *p, shared *s,
                           int64_t start, int64_t tile, int64_t i, int fetches) {
    const char *keys[PRODUCTS], *query = s->query + start * s->room * 2;
    float products[PRODUCTS][LANES * LANES] __attribute__((aligned(64)));
    int64_t pitch, size = TILE_ROWS * s->room * 2;
    for (int m = 0; m < matrices; m++)
        keys[m] = key_matrix(c, p, s, tile, i + m * TILE_ROWS, s->copies + m * size, &pitch);
    /* Values stored apart from keys double the fetches. */
    const int64_t fetched = matrices * FETCHED * (c->kv_stride ? 2 : 1);
    stream fetch = fetch_keys(c, s, fetches, fetched);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t j = 0; j < s->room / HALVES; j++) {
        const int64_t key = j * ROW_BYTES, row = j * MATRIX_BYTES;
        _tile_loadd(6, query + row, 64);
        if (blocks > 1) _tile_loadd(7, query + size + row, 64);
        _tile_loadd(4, keys[0] + key, pitch);
        _tile_dpbf16ps(0, 4, 6);
        if (blocks > 1) _tile_dpbf16ps(1, 4, 7);
        if (matrices > 1) {
            _tile_loadd(5, keys[1] + key, pitch);
            if (blocks > 1) _tile_dpbf16ps(2, 5, 6);
            if (blocks > 1) _tile_dpbf16ps(3, 5, 7);
            else _tile_dpbf16ps(1, 5, 6);
        }
        if (matrices > 2) {
            _tile_loadd(4, keys[2] + key, pitch);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(5, keys[3] + key, pitch);
            _tile_dpbf16ps(3, 5, 6);
        }
        for (int64_t n = 0; n < fetched; n++) fetch_line(&fetch);
    }
    _tile_stored(0, products[0], 64);
    _tile_stored(1, products[1], 64);
    _tile_stored(2, products[2], 64);
    _tile_stored(3, products[3], 64);
    for (int m = 0; m < matrices; m++)
        for (int b = 0; b < blocks; b++) {
            float *scores = s->scores + b * TILE_ROWS * SCORE_STRIDE + i + m * TILE_ROWS;
            vec rows[LANES];
            for (int64_t r = 0; r < LANES; r++) rows[r] = load(FLOAT32, products[m * blocks + b], r * LANES);
            transpose(rows);
            for (int64_t r = 0; r < LANES; r++) store(scores + r * SCORE_STRIDE, rows[r]);
        }
}

/* Pack the tile's values in pairs of keys; zeros replace missing keys. */
static void pair_values(const attention_call *c, shared *s, int64_t skip, int64_t num) {
    int64_t columns = s->stride - LANES;
    uint16_t nothing[columns], copies[2][columns];
    memset(nothing, 0, sizeof nothing);
    for (int64_t i = skip / HALVES * HALVES; i < ceil_div(num, HALVES) * HALVES; i += 2) {
        const void *rows[2] = {nothing, nothing};
        for (int64_t n = 0; n < 2; n++)
            if (i + n >= skip && i + n < num)
                rows[n] = halves_of(c->cache_type, s->value_rows[i + n], c->value_dim, columns, copies[n]);
        stream fetch = fetch_keys(c, s, 1, 2);
        char *to = s->values + i / HALVES * (columns / LANES) * VALUE_BYTES + i % HALVES * LANES * 2;
        for (int64_t j = 0; j < columns; j += PANEL, to += 2 * VALUE_BYTES) {
            vec pairs[2];
            pair_halves(BFLOAT16, rows[0], rows[1], j, pairs);
            store((float *)to, pairs[0]);
            store((float *)(to + VALUE_BYTES), pairs[1]);
            fetch_line(&fetch);
            fetch_line(&fetch);
        }
    }
}

/* sums [blocks x 16 rows, panels x PANEL] += weights x values, over the steps [begin, end). `blocks` or `panels`
 * is 1, the other 1 or 2. */
INLINE void add_matrices(int blocks, int panels, const shared *s, int64_t begin, int64_t end, int64_t column,
                         float *sums) {
    const int64_t pitch = s->stride * sizeof(float), size = (s->stride - LANES) / LANES * VALUE_BYTES;
    const char *weights = s->weights, *values = s->values + column / LANES * VALUE_BYTES;
    float *others = panels > 1 ? sums + PANEL : sums + TILE_ROWS * s->stride;
    _tile_loadd(0, sums, pitch);
    _tile_loadd(1, sums + LANES, pitch);
    if (blocks * panels > 1) {
        _tile_loadd(2, others, pitch);
        _tile_loadd(3, others + LANES, pitch);
    }
    for (int64_t step = begin; step < end; step++) {
        const char *from = values + step * size;
        _tile_loadd(4, weights + step * MATRIX_BYTES, ROW_BYTES);
        _tile_loadd(6, from, 64);
        _tile_loadd(7, from + VALUE_BYTES, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (blocks > 1) {
            _tile_loadd(5, weights + TILE_ROWS * TILE * 2 + step * MATRIX_BYTES, ROW_BYTES);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        } else if (panels > 1) {
            _tile_loadd(5, from + 2 * VALUE_BYTES, 64);
            _tile_loadd(6, from + 3 * VALUE_BYTES, 64);
            _tile_dpbf16ps(2, 4, 5);
            _tile_dpbf16ps(3, 4, 6);
        }
    }
    _tile_stored(0, sums, pitch);
    _tile_stored(1, sums + LANES, pitch);
    if (blocks * panels > 1) {
        _tile_stored(2, others, pitch);
        _tile_stored(3, others + LANES, pitch);
    }
}

/* Attend with the rows [start, start + rows) to the tile's keys [skip, num). */
INLINE void block_in_tiles(int blocks, const attention_call *c, const piece *p, shared *s, int64_t start,
                        int64_t rows, int64_t tile, int64_t skip, int64_t num) {
    int64_t begin = skip / HALVES * HALVES, end = ceil_div(num, HALVES) * HALVES;
    int64_t together = PRODUCTS / blocks * TILE_ROWS, i = skip / TILE_ROWS * TILE_ROWS;
    for (; i + together <= ceil_div(num, TILE_ROWS) * TILE_ROWS; i += together)
        score_matrices(PRODUCTS / blocks, blocks, c, p, s, start, tile, i, start == 0);
    for (; i < num; i += TILE_ROWS) score_matrices(1, blocks, c, p, s, start, tile, i, start == 0);
    weigh_rows(c, p, s, c->scale, start, rows, tile, skip, num);
    for (int64_t r = 0; r < rows; r++) {
        float *scores = s->scores + r * SCORE_STRIDE;
        char *to = s->weights + r / TILE_ROWS * TILE_ROWS * TILE * 2 + r % TILE_ROWS * ROW_BYTES;
        for (int64_t i = ceil_div(num, LANES) * LANES; i < end; i += LANES) store(scores + i, (vec){0});
        for (int64_t i = begin; i < end; i += LANES)
            store_as(BFLOAT16, to + i / HALVES * MATRIX_BYTES, i % HALVES, load(FLOAT32, scores, i));
    }
    float *sums = s->sums + start * s->stride;
    int64_t column = 0, num_columns = s->stride - LANES;
    for (; blocks == 1 && column + 2 * PANEL <= num_columns; column += 2 * PANEL)
        add_matrices(1, 2, s, begin / HALVES, end / HALVES, column, sums + column);
    for (; column < num_columns; column += PANEL)
        add_matrices(blocks, 1, s, begin / HALVES, end / HALVES, column, sums + column);
}

static void span_in_tiles(const attention_call *c, const piece *p, shared *s, int64_t begin, int64_t end) {
    tiles_begin(ROW_BYTES);
    for (int64_t tile = begin / TILE * TILE; tile < end; tile += TILE) {
        int64_t skip = max64(0, begin - tile), num = min64(TILE, end - tile);
        find_rows(c, p, tile, tile <= begin, s);
        pair_values(c, s, skip, num);
        for (int64_t start = 0; start < s->count; start += BLOCK) {
            int64_t rows = min64(BLOCK, s->count - start), seen = seen_keys(c, p, start + rows, tile, num);
            if (seen <= skip) continue;
            if (rows > TILE_ROWS) block_in_tiles(2, c, p, s, start, rows, tile, skip, seen);
            else block_in_tiles(1, c, p, s, start, rows, tile, skip, seen);
        }
    }
    tiles_end();
}

#else

static void order_queries(const attention_call *c, const piece *p, shared *s) {}
static void span_in_tiles(const attention_call *c, const piece *p, shared *s, int64_t begin, int64_t end) {}

#endif

static void read_queries(const attention_call *c, const piece *p, shared *s) {
    for (int64_t r = 0; r < s->count; r++) {
        int64_t token = p->row + r / s->group, head = p->kv_head * s->group + r % s->group;
        const float *from = (const float *)c->query + (token * c->num_heads + head) * c->head_dim;
        float *to = (float *)s->query + r * s->room;
        for (int64_t j = 0; j < c->head_dim; j++) to[j] = from[j] * (float)c->scale;
    }
}

/* Compute the scores of SCORED_KEYS keys for SCORED_ROWS rows, of which `rows` exist. */
INLINE void score_lanes(int64_t dim, int64_t stride, const float *query, int64_t rows, const void *const *key_rows,
                        stream fetch, float *scores) {
    const float *keys[SCORED_KEYS];
    vec sum[LANES] = {{0}};
    for (int64_t k = 0; k < SCORED_KEYS; k++) keys[k] = key_rows[k];
    for (int64_t j = 0; j < dim; j += LANES) {
        fetch_line(&fetch);
        fetch_line(&fetch);
        vec key[SCORED_KEYS];
#pragma GCC unroll 4
        for (int k = 0; k < SCORED_KEYS; k++) key[k] = load(FLOAT32, keys[k], j);
#pragma GCC unroll 4
        for (int r = 0; r < SCORED_ROWS; r++) {
            vec input = load(FLOAT32, query + r * stride, j);
#pragma GCC unroll 4
            for (int k = 0; k < SCORED_KEYS; k++)
                sum[r * SCORED_KEYS + k] = multiply_add(input, key[k], sum[r * SCORED_KEYS + k]);
        }
    }
    float sums[LANES];
    store(sums, sums_of_lanes(sum));
    for (int64_t r = 0; r < rows; r++) memcpy(scores + r * SCORE_STRIDE, sums + r * SCORED_KEYS, SCORED_KEYS * 4);
}

/* sums [rows, PANEL] += weights x the values [from, to), key by key. */
INLINE void add_lanes(int rows, const shared *s, int64_t from, int64_t to, int64_t column,
                      stream fetch, float *sums) {
    vec sum[MAX_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        sum[r][0] = load(FLOAT32, sums, r * s->stride);
        sum[r][1] = load(FLOAT32, sums, r * s->stride + LANES);
    }
    for (int64_t i = from; i < to; i++) {
        fetch_line(&fetch);
        const float *value = (const float *)s->value_rows[i] + column;
        vec first = load(FLOAT32, value, 0), second = load(FLOAT32, value, LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            vec weight = splat(s->scores[r * SCORE_STRIDE + i]);
            sum[r][0] = multiply_add(weight, first, sum[r][0]);
            sum[r][1] = multiply_add(weight, second, sum[r][1]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        store(sums + r * s->stride, sum[r][0]);
        store(sums + r * s->stride + LANES, sum[r][1]);
    }
}

#define LANES_CASE(n) \
    case n: \
        for (int64_t j = 0; n <= MAX_ROWS && j < s->stride - LANES; j += PANEL) \
            add_lanes(n, s, from, to, j, fetch_keys(c, s, is_first, FETCHED), sums + j); \
        break;

static void add_values(const attention_call *c, int64_t rows, shared *s, int is_first, int64_t from, int64_t to,
                       float *sums) {
    switch (rows) {
        LANES_CASE(1)
        LANES_CASE(2)
        LANES_CASE(3)
        LANES_CASE(4)
        LANES_CASE(5)
        LANES_CASE(6)
        LANES_CASE(7)
        LANES_CASE(8)
        LANES_CASE(9)
        LANES_CASE(10)
        LANES_CASE(11)
        LANES_CASE(12)
    }
}

static void span_in_lanes(const attention_call *c, const piece *p, shared *s, int64_t begin, int64_t end) {
    int64_t num_blocks = ceil_div(s->count, MAX_ROWS);
    for (int64_t tile = begin / TILE * TILE; tile < end; tile += TILE) {
        int64_t skip = max64(0, begin - tile), num = min64(TILE, end - tile);
        find_rows(c, p, tile, tile <= begin, s);
        for (int64_t b = 0; b < num_blocks; b++) {
            int64_t start = s->count * b / num_blocks, rows = s->count * (b + 1) / num_blocks - start;
            int64_t seen = seen_keys(c, p, start + rows, tile, num);
            if (seen <= skip) continue;
            for (int64_t i = skip / SCORED_KEYS * SCORED_KEYS; i < seen; i += SCORED_KEYS)
                for (int64_t r = 0; r < rows; r += SCORED_ROWS) {
                    const float *query = (const float *)s->query + (start + r) * s->room;
                    score_lanes(c->head_dim, s->room, query, min64(SCORED_ROWS, rows - r), s->keys + i,
                                fetch_keys(c, s, start == 0 && r < 2 * SCORED_ROWS, 2),
                                s->scores + r * SCORE_STRIDE + i);
                }
            weigh_rows(c, p, s, 1, start, rows, tile, skip, seen);
            add_values(c, rows, s, start == 0, skip, seen, s->sums + start * s->stride);
        }
    }
}

/* Store a decode's rows in `partial` if it has several spans; store other rows in the output. */
static void finish(const attention_call *c, const piece *p, const shared *s, const float *all_sums,
                   const softmax_state *states, float *partial) {
    float row[s->stride];
    for (int64_t r = 0; r < s->count; r++) {
        const float *sums = all_sums + r * s->stride;
        if (partial) {
            float *to = partial + r * partial_size(c);
            to[0] = states[r].top;
            to[1] = states[r].total;
            memcpy(to + 2, sums, padded_sum(c) * sizeof(float));
            continue;
        }
        int64_t token = p->row + r / s->group, head = p->kv_head * s->group + r % s->group;
        float divisor = baton_divisor(states[r], c->sinks, head);
        for (int64_t j = 0; j < c->value_dim; j++) row[j] = sums[j] / divisor;
        int64_t to = (token * c->num_heads + head) * c->value_dim;
        write_row(c->type, row, (char *)c->out + to * size_of(c->type), c->value_dim);
    }
}

void baton_attend_shared(const attention_call *c, const piece *p, float *scratch, float *partial) {
    shared s;
    place(c, (char *)scratch, &s);
    s.count = p->num_tokens * s.group;
    int tiled = in_tiles(c);
    if (tiled) order_queries(c, p, &s);
    else read_queries(c, p, &s);
    int64_t size = s.count * s.stride, num_spans = ceil_div(p->end, SPAN) - p->begin / SPAN;
    if (num_spans > 1) memset(s.joined, 0, size * sizeof(float));
    for (int64_t r = 0; r < s.count; r++) s.joined_states[r] = EMPTY_STATE;
    for (int64_t span = p->begin / SPAN; span * SPAN < p->end; span++) {
        int64_t begin = max64(p->begin, span * SPAN), end = min64(p->end, (span + 1) * SPAN);
        memset(s.sums, 0, size * sizeof(float));
        for (int64_t r = 0; r < s.count; r++) s.states[r] = EMPTY_STATE;
        if (tiled) span_in_tiles(c, p, &s, begin, end);
        else span_in_lanes(c, p, &s, begin, end);
        for (int64_t r = 0; num_spans > 1 && r < s.count; r++)
            baton_join(s.joined_states + r, s.joined + r * s.stride, s.states[r], s.sums + r * s.stride,
                       s.stride / LANES, LANES);
    }
    finish(c, p, &s, num_spans > 1 ? s.joined : s.sums, num_spans > 1 ? s.joined_states : s.states, partial);
}
