/* A block of a prompt's queries over its keys, tile by tile, by the micro kernel.
 *
 * Rows are tokens x heads of a group: all of them read the same keys.
 * Refuses to know: other pieces, how the step was cut.
 */
#include <math.h>

#include "attention.h"
#include "micro.h"

typedef struct {
    float *query;  /* [slice of head_dim][row][X_STRIDE], scaled */
    float *keys;   /* per panel of TILE: [head_dim][PANEL] */
    float *values; /* per panel of padded: [TILE][PANEL] */
    float *scores; /* of one block of rows: [row][X_STRIDE], in place weights */
    float *sums;   /* per block of rows: [padded / PANEL][row][PANEL] */
    float *tops, *totals, *factors; /* [num_rows] */
} tiles;

INLINE int64_t padded_dim(const attention_call *c) { return ceil_div(c->head_dim, PANEL) * PANEL; }
INLINE int64_t num_slices(const attention_call *c) { return ceil_div(c->head_dim, MAX_DEPTH); }
INLINE int64_t max_rows(const attention_call *c) {
    return max64(PROMPT_ROWS, c->num_heads / c->num_kv_heads);
}

static float *place(const attention_call *c, float *at, tiles *t) {
    int64_t rows = max_rows(c), padded = padded_dim(c);
    t->query = at, at += num_slices(c) * rows * X_STRIDE;
    t->sums = at, at += rows * padded;
    t->keys = at, at += TILE * padded;
    t->values = at, at += TILE * padded;
    t->scores = at, at += MAX_ROWS * X_STRIDE;
    t->tops = at, at += rows;
    t->totals = at, at += rows;
    t->factors = at, at += rows;
    return at;
}

int64_t prompt_scratch_bytes(const attention_call *c) {
    tiles t;
    return (int64_t)place(c, NULL, &t);
}

/* LANES keys from `begin` on, of which `num` are there, into columns of a panel. */
INLINE void pack_keys(int type, const attention_call *c, const piece *p, int64_t begin, int64_t num,
                      float *to) {
    const void *rows[LANES];
    for (int64_t i = 0; i < LANES; i++)
        rows[i] = cache_row(c, p, begin + min64(i, num - 1), 0);
    int64_t whole = type == FLOAT8 ? 0 : c->head_dim - c->head_dim % LANES; /* load knows no FLOAT8 */
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

/* Keys and values of [begin, begin + num) into panels; what is in the last panel of keys beyond
 * them is never looked at. */
INLINE void pack_tile(int type, const attention_call *c, const piece *p, const tiles *t,
                      int64_t begin, int64_t num) {
    int64_t dim = c->head_dim, padded = padded_dim(c);
    for (int64_t i = 0; i < num; i += LANES)
        pack_keys(type, c, p, begin + i, min64(LANES, num - i),
                  t->keys + i / PANEL * PANEL * dim + i % PANEL);
    float row[padded];
    memset(row, 0, sizeof row);
    for (int64_t i = 0; i < num; i++) {
        const void *from = cache_row(c, p, begin + i, 1);
        read_row(type, from, row, dim);
        for (int64_t j = 0; j < padded; j += PANEL)
            memcpy(t->values + j * TILE + i * PANEL, row + j, PANEL * sizeof(float));
    }
}

/* One row's scores, [num] filled up to whole vectors, become weights; keys outside [from, to) do
 * not count. Returns the sum of the weights. */
static float weigh(const attention_call *c, float *scores, int64_t from, int64_t to, int64_t num,
                   float *top, float *factor) {
    vec largest = splat(*top), total = {0};
    if (c->soft_cap > 0)
        for (int64_t i = 0; i < num; i += LANES)
            store(scores + i, soften(load(FLOAT32, scores, i), c->soft_cap));
    for (int64_t i = 0; i < min64(from, num); i++) scores[i] = -INFINITY;
    for (int64_t i = max64(to, 0); i < ceil_div(num, LANES) * LANES; i++) scores[i] = -INFINITY;
    for (int64_t i = 0; i < num; i += LANES) {
        vec score = load(FLOAT32, scores, i);
        largest = choose(score > largest, score, largest);
    }
    float before = *top;
    *top = largest_lane(largest);
    float base = *top == -INFINITY ? 0 : *top; /* where no key counts */
    for (int64_t i = 0; i < num; i += LANES) {
        vec weight = exp_of_negative(load(FLOAT32, scores, i) - base);
        store(scores + i, weight);
        total += weight;
    }
    *factor = before == *top ? 1 : before == -INFINITY ? 0 : exp_fast(splat(before - *top))[0];
    return sum_lanes(total);
}

/* One block of rows over one tile of `num` keys that begins at `begin`. */
static void attend_block(const attention_call *c, const piece *p, const tiles *t, int64_t start,
                         int64_t rows, int64_t begin, int64_t num) {
    int64_t group = c->num_heads / c->num_kv_heads, dim = c->head_dim, padded = padded_dim(c);
    int64_t first = p->end - p->num_tokens; /* position of the piece's first query */
    fetch nothing = {(const char *)t->keys, 0};
    num = min64(num, first + (start + rows - 1) / group + 1 - begin); /* what any row may see */
    for (int64_t q = 0; q < num; q += PANEL)
        for (int64_t s = 0; s < num_slices(c); s++) {
            int64_t k = s * MAX_DEPTH;
            micro(rows, FLOAT32, t->keys + q * dim + k * PANEL,
                  t->query + (s * max_rows(c) + start) * X_STRIDE, min64(MAX_DEPTH, dim - k),
                  t->scores + q, X_STRIDE, s > 0, nothing);
        }
    if (num <= 0) return;
    for (int64_t r = 0; r < rows; r++) {
        int64_t position = first + (start + r) / group, low = 0;
        if (c->sliding_window > 0) low = position + 1 - c->sliding_window - begin;
        float total = weigh(c, t->scores + r * X_STRIDE, low, position + 1 - begin, num,
                            t->tops + start + r, t->factors + start + r);
        t->totals[start + r] = t->totals[start + r] * t->factors[start + r] + total;
    }
    for (int64_t j = 0; j < padded; j += PANEL) {
        float *sums = t->sums + start * padded + j * rows;
        for (int64_t r = 0; r < rows; r++)
            if (t->factors[start + r] != 1)
                for (int64_t i = 0; i < PANEL; i++) sums[r * PANEL + i] *= t->factors[start + r];
        micro(rows, FLOAT32, t->values + j * TILE, t->scores, num, sums, PANEL, 1, nothing);
    }
}

INLINE void prompt(int type, int cache_type, const attention_call *c, const piece *p,
                   float *scratch) {
    tiles t;
    place(c, scratch, &t);
    int64_t group = c->num_heads / c->num_kv_heads, dim = c->head_dim, padded = padded_dim(c);
    int64_t count = p->num_tokens * group, num_blocks = ceil_div(count, MAX_ROWS);
    float row[padded];
    for (int64_t r = 0; r < count; r++) {
        int64_t token = p->row + r / group, head = p->kv_head * group + r % group;
        read_row(type, at(type, c->query, (token * c->num_heads + head) * dim), row, dim);
        for (int64_t j = 0; j < dim; j++)
            t.query[(j / MAX_DEPTH * max_rows(c) + r) * X_STRIDE + j % MAX_DEPTH] =
                row[j] * (float)c->scale;
    }
    memset(t.sums, 0, count * padded * sizeof(float));
    for (int64_t r = 0; r < count; r++) t.tops[r] = -INFINITY, t.totals[r] = 0;
    for (int64_t begin = p->begin; begin < p->end; begin += TILE) {
        int64_t num = min64(TILE, p->end - begin);
        pack_tile(cache_type, c, p, &t, begin, num);
        for (int64_t b = 0; b < num_blocks; b++) {
            int64_t start = count * b / num_blocks, rows = count * (b + 1) / num_blocks - start;
            attend_block(c, p, &t, start, rows, begin, num);
        }
    }
    for (int64_t b = 0; b < num_blocks; b++) {
        int64_t start = count * b / num_blocks, rows = count * (b + 1) / num_blocks - start;
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t j = 0; j < dim; j++)
                row[j] = t.sums[start * padded + j / PANEL * PANEL * rows + r * PANEL + j % PANEL] /
                         t.totals[start + r];
            int64_t token = p->row + (start + r) / group, head = p->kv_head * group + (start + r) % group;
            write_row(type, row, (char *)c->out + (token * c->num_heads + head) * dim * size_of(type), dim);
        }
    }
}

void baton_attend_prompt(const attention_call *c, const piece *p, float *scratch) {
    if (c->cache_type == FLOAT8 && c->type == BFLOAT16)
        prompt(BFLOAT16, FLOAT8, c, p, scratch);
    else if (c->cache_type == FLOAT8)
        prompt(FLOAT32, FLOAT8, c, p, scratch);
    else if (c->type == BFLOAT16)
        prompt(BFLOAT16, BFLOAT16, c, p, scratch);
    else
        prompt(FLOAT32, FLOAT32, c, p, scratch);
}
