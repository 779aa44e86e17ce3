/* A block of a prompt's queries over its keys, tile by tile, by the micro kernel.
 *
 * Rows are tokens x heads of a group: all of them read the same keys.
 * Refuses to know: other pieces, how the step was cut.
 */
#include <math.h>

#include "attention.h"
#include "micro.h"

#define NUM_BLOCKS (PROMPT_ROWS / MAX_ROWS + 1)

typedef struct {
    float *query;   /* per block of rows: [head_dim][rows], scaled */
    float *keys;    /* per panel of TILE: [head_dim][PANEL] */
    float *values;  /* per panel of padded: [TILE][PANEL] */
    float *scores;  /* per block of rows: [TILE / PANEL][rows][PANEL] */
    float *weights; /* of one block of rows: [TILE][rows] */
    float *sums;    /* per block of rows: [padded / PANEL][rows][PANEL] */
    float *tops, *totals, *factors; /* [num_rows] */
} tiles;

INLINE int64_t padded_dim(const attention_call *c) { return ceil_div(c->head_dim, PANEL) * PANEL; }
INLINE int64_t max_rows(const attention_call *c) {
    return max64(PROMPT_ROWS, c->num_heads / c->num_kv_heads);
}

int64_t prompt_scratch_bytes(const attention_call *c) {
    int64_t rows = max_rows(c), padded = padded_dim(c);
    int64_t floats = rows * (2 * padded + 3) + 2 * TILE * padded + TILE * PANEL * 0 +
                     TILE * MAX_ROWS * 2 + 16 * 9;
    return floats * sizeof(float);
}

static tiles place(const attention_call *c, float *at) {
    int64_t rows = max_rows(c), padded = padded_dim(c);
    tiles t;
    t.query = at, at += rows * padded;
    t.sums = at, at += rows * padded;
    t.keys = at, at += TILE * padded;
    t.values = at, at += TILE * padded;
    t.scores = at, at += TILE * MAX_ROWS;
    t.weights = at, at += TILE * MAX_ROWS;
    t.tops = at, at += rows;
    t.totals = at, at += rows;
    t.factors = at, at += rows;
    return t;
}

/* Keys and values of [begin, begin + num) into panels; what is not there is zero. */
INLINE void pack_tile(int type, const attention_call *c, const piece *p, const tiles *t,
                      int64_t begin, int64_t num) {
    int64_t dim = c->head_dim, padded = padded_dim(c);
    float row[padded];
    for (int64_t i = 0; i < TILE; i++) {
        float *key = t->keys + i / PANEL * PANEL * dim + i % PANEL;
        if (i < num) {
            const void *from = cache_row(c, p, begin + i, 0);
            read_row(type, from, row, dim);
            for (int64_t j = 0; j < dim; j++) key[j * PANEL] = row[j];
            read_row(type, at(type, from, c->kv_stride), row, dim);
        } else if (i < ceil_div(num, PANEL) * PANEL) {
            for (int64_t j = 0; j < dim; j++) key[j * PANEL] = 0;
        } else {
            break;
        }
        if (i >= num) continue;
        for (int64_t j = dim; j < padded; j++) row[j] = 0;
        for (int64_t j = 0; j < padded; j += PANEL)
            memcpy(t->values + j * TILE + i * PANEL, row + j, PANEL * sizeof(float));
    }
}

/* One row's scores, [panel][PANEL] with a stride between panels, become weights. */
static float weigh(const attention_call *c, float *scores, int64_t stride, int64_t from, int64_t to,
                   int64_t num, float *top, float *factor) {
    int64_t num_panels = ceil_div(num, PANEL);
    float before = *top, largest = before;
    for (int64_t q = 0; q < num_panels; q++) {
        float *row = scores + q * stride;
        int64_t low = from - q * PANEL, high = to - q * PANEL;
        if (c->soft_cap > 0)
            for (int64_t i = 0; i < PANEL; i++) row[i] = soften(row[i], c->soft_cap);
        if (low > 0 || high < PANEL)
            for (int64_t i = 0; i < PANEL; i++)
                if (i < low || i >= high) row[i] = -INFINITY;
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < PANEL; i++) largest = row[i] > largest ? row[i] : largest;
    }
    float total = 0;
    for (int64_t q = 0; q < num_panels; q++) {
        float *row = scores + q * stride;
        if (largest == -INFINITY) {
            memset(row, 0, PANEL * sizeof(float));
            continue;
        }
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < PANEL; i++) {
            row[i] = row[i] == -INFINITY ? 0 : exp_fast(row[i] - largest);
            total += row[i];
        }
    }
    *top = largest;
    *factor = before == largest ? 1 : before == -INFINITY ? 0 : exp_fast(before - largest);
    return total;
}

/* One block of rows over one tile of `num` keys that begins at `begin`. */
static void attend_block(const attention_call *c, const piece *p, const tiles *t, int64_t start,
                         int64_t rows, int64_t begin, int64_t num) {
    int64_t group = c->num_heads / c->num_kv_heads, dim = c->head_dim, padded = padded_dim(c);
    int64_t num_panels = ceil_div(num, PANEL), stride = rows * PANEL;
    for (int64_t q = 0; q < num_panels; q++)
        micro(rows, FLOAT32, t->keys + q * PANEL * dim, t->query + start * dim, dim,
              t->scores + q * stride, 0, (fetch){(const char *)t->keys, 0});
    int64_t first = p->end - p->num_tokens; /* position of the piece's first query */
    for (int64_t r = 0; r < rows; r++) {
        int64_t position = first + (start + r) / group, low = 0;
        if (c->sliding_window > 0) low = position + 1 - c->sliding_window - begin;
        int64_t high = min64(num, position + 1 - begin);
        float total = weigh(c, t->scores + r * PANEL, stride, low, high, num, t->tops + start + r,
                            t->factors + start + r);
        t->totals[start + r] = t->totals[start + r] * t->factors[start + r] + total;
    }
    for (int64_t q = 0; q < num_panels; q++)
        for (int64_t i = 0; i < min64(PANEL, num - q * PANEL); i++)
            for (int64_t r = 0; r < rows; r++)
                t->weights[(q * PANEL + i) * rows + r] = t->scores[q * stride + r * PANEL + i];
    for (int64_t j = 0; j < padded; j += PANEL) {
        float *sums = t->sums + start * padded + j * rows;
        for (int64_t r = 0; r < rows; r++)
            if (t->factors[start + r] != 1)
                for (int64_t i = 0; i < PANEL; i++) sums[r * PANEL + i] *= t->factors[start + r];
        micro(rows, FLOAT32, t->values + j * TILE, t->weights, num, sums, 1, (fetch){(const char *)t->values, 0});
    }
}

INLINE void prompt(int type, int cache_type, const attention_call *c, const piece *p,
                   float *scratch) {
    tiles t = place(c, scratch);
    int64_t group = c->num_heads / c->num_kv_heads, dim = c->head_dim, padded = padded_dim(c);
    int64_t count = p->num_tokens * group, num_blocks = ceil_div(count, MAX_ROWS);
    float row[padded];
    for (int64_t b = 0; b < num_blocks; b++) {
        int64_t start = count * b / num_blocks, rows = count * (b + 1) / num_blocks - start;
        for (int64_t r = 0; r < rows; r++) {
            int64_t token = p->row + (start + r) / group, head = p->kv_head * group + (start + r) % group;
            read_row(type, at(type, c->query, (token * c->num_heads + head) * dim), row, dim);
            for (int64_t j = 0; j < dim; j++)
                t.query[start * dim + j * rows + r] = row[j] * (float)c->scale;
        }
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
