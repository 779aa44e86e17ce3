/* Work on rows between matrix products: norms, gated units, rotation, storing KV.
 *
 * The op of the same name in baton_kernels/reference.py defines each function.
 * Refuses to know: layers, requests.
 */
#include <math.h>

#include "vectors.h"

#define SERIAL_ELEMENTS 16384 /* below, waking threads costs more than it saves */

INLINE int threads_for(int num_threads, int64_t elements) {
    return elements < SERIAL_ELEMENTS ? 1 : num_threads;
}

INLINE float sum_of_squares(const float *row, int64_t size) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; i++) squares += row[i] * row[i];
    return squares;
}

/* Normalize in place. Like Hugging Face, round the normalized value before applying a weight of the same type;
 * apply a wide (FLOAT32) weight before rounding. */
INLINE void apply_norm(int type, int wide, float *row, float inverse_rms, const void *weight,
                       int64_t size) {
    if ((type == BFLOAT16 || type == FLOAT16) && !wide) {
        const uint16_t *w = weight;
#pragma omp simd
        for (int64_t i = 0; i < size; i++)
            row[i] = round_to(type, row[i] * inverse_rms) *
                     (type == BFLOAT16 ? from_bf16(w[i]) : from_fp16(w[i]));
    } else {
        const float *w = weight;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) row[i] = row[i] * inverse_rms * w[i];
    }
}

INLINE void norm_row(int type, int wide, float *row, const void *weight, int64_t size, float eps) {
    float inverse_rms = 1.0f / sqrtf(sum_of_squares(row, size) / size + eps);
    apply_norm(type, wide, row, inverse_rms, weight, size);
}

typedef struct {
    int64_t type, num_threads, num_rows, size;
    const void *x, *residual, *weight; /* residual may be NULL; without weight, compute only the sum */
    void *out, *sum;
    double eps;
    int64_t wide;  /* whether the weight is FLOAT32, whatever `type` is */
    double factor; /* factor of x, if there is a residual */
    double sum_factor; /* factor of the sum, if there is a residual */
} norm_call;

INLINE void rms_norm_row(int type, const norm_call *c, int64_t i) {
    int64_t size = c->size, from = i * size * size_of(type);
    float row[size], other[size];
    read_row(type, (const char *)c->x + from, row, size);
    if (c->residual) {
        read_row(type, (const char *)c->residual + from, other, size);
        if (c->factor != 1) {
            float factor = c->factor;
            for (int64_t j = 0; j < size; j++) row[j] = round_to(type, row[j] * factor);
        }
#pragma omp simd
        for (int64_t j = 0; j < size; j++) row[j] = round_to(type, row[j] + other[j]);
        if (c->sum_factor != 1) {
            float factor = c->sum_factor;
            for (int64_t j = 0; j < size; j++) row[j] = round_to(type, row[j] * factor);
        }
        write_row(type, row, (char *)c->sum + from, size);
    }
    if (!c->weight) return;
    norm_row(type, c->wide, row, c->weight, size, c->eps);
    write_row(type, row, (char *)c->out + from, size);
}

/* rms_norm, or with a residual add_rms_norm. All rows are contiguous. */
int baton_rms_norm(const norm_call *c) {
    int team = threads_for(c->num_threads, c->num_rows * c->size);
#pragma omp parallel for num_threads(team) if (team > 1)
    for (int64_t i = 0; i < c->num_rows; i++) {
        if (c->type == BFLOAT16)
            rms_norm_row(BFLOAT16, c, i);
        else if (c->type == FLOAT16)
            rms_norm_row(FLOAT16, c, i);
        else
            rms_norm_row(FLOAT32, c, i);
    }
    return 0;
}

INLINE void gated_mul_row(int type, int64_t kind, int64_t size, const void *gate, const void *up,
                          void *out) {
    int64_t whole = size - size % LANES, rest = (size - whole) * size_of(type);
    for (int64_t j = 0; j < whole; j += LANES) {
        vec made = round_all(type, activate(kind, load(type, gate, j)));
        store_as(type, out, j, made * round_all(type, gated_half(kind, load(type, up, j))));
    }
    if (!rest) return;
    float last[3][LANES] = {{0}};
    memcpy(last[0], at(type, gate, whole), rest);
    memcpy(last[1], at(type, up, whole), rest);
    vec made = round_all(type, activate(kind, load(type, last[0], 0)));
    store_as(type, last[2], 0, made * round_all(type, gated_half(kind, load(type, last[1], 0))));
    memcpy((void *)at(type, out, whole), last[2], rest);
}

typedef struct {
    int64_t type, num_threads, num_rows, size; /* size: numbers of an output row */
    int64_t gate_stride, up_stride;            /* in elements, from one row to the next */
    const void *gate, *up;
    void *out;
    int64_t kind; /* activation, such as SILU */
} gated_call;

/* gated_mul and gate_mul. */
int baton_gated_mul(const gated_call *c) {
    int64_t type = c->type, size = c->size;
    int team = threads_for(c->num_threads, c->num_rows * size);
#pragma omp parallel for num_threads(team) if (team > 1)
    for (int64_t i = 0; i < c->num_rows; i++) {
        const void *gate = at(type, c->gate, i * c->gate_stride);
        const void *up = at(type, c->up, i * c->up_stride);
        void *to = (void *)at(type, c->out, i * size);
        if (type == BFLOAT16)
            gated_mul_row(BFLOAT16, c->kind, size, gate, up, to);
        else if (type == FLOAT16)
            gated_mul_row(FLOAT16, c->kind, size, gate, up, to);
        else
            gated_mul_row(FLOAT32, c->kind, size, gate, up, to);
    }
    return 0;
}

typedef struct {
    int64_t type, num_threads, num_rows, size, group_size, weight_size, norm_before_gate;
    int64_t x_stride, gate_stride; /* in elements, from one row to the next */
    const void *x, *gate, *weight; /* weight: weight_size numbers, repeated along a row */
    void *out;
    double eps;
} gated_norm_call;

INLINE void gated_norm_row(int type, const gated_norm_call *c, int64_t i) {
    int64_t size = c->size, group = c->group_size;
    float row[size], gate[size], weight[c->weight_size];
    read_row(type, at(type, c->x, i * c->x_stride), row, size);
    read_row(type, at(type, c->gate, i * c->gate_stride), gate, size);
    read_row(type, c->weight, weight, c->weight_size);
    int64_t whole = size - size % LANES;
    for (int64_t j = 0; j < whole; j += LANES) store(gate + j, silu(load(FLOAT32, gate, j)));
    if (whole < size) {
        float last[LANES] = {0};
        memcpy(last, gate + whole, (size - whole) * sizeof(float));
        store(last, silu(load(FLOAT32, last, 0)));
        memcpy(gate + whole, last, (size - whole) * sizeof(float));
    }
    for (int64_t first = 0; first < size; first += group) {
        float *x = row + first, *gated = gate + first, squares = 0;
        const float *w = weight + first % c->weight_size;
        if (!c->norm_before_gate)
            for (int64_t j = 0; j < group; j++) x[j] *= gated[j];
#pragma omp simd reduction(+ : squares)
        for (int64_t j = 0; j < group; j++) squares += x[j] * x[j];
        float inverse_rms = 1.0f / sqrtf(squares / group + (float)c->eps);
        for (int64_t j = 0; j < group; j++)
            x[j] = round_to(type, round_to(type, x[j] * inverse_rms) * w[j]);
        if (c->norm_before_gate)
            for (int64_t j = 0; j < group; j++) x[j] *= gated[j];
    }
    write_row(type, row, (void *)at(type, c->out, i * size), size);
}

int baton_gated_rms_norm(const gated_norm_call *c) {
    int team = threads_for(c->num_threads, c->num_rows * c->size);
#pragma omp parallel for num_threads(team) if (team > 1)
    for (int64_t i = 0; i < c->num_rows; i++) {
        if (c->type == BFLOAT16)
            gated_norm_row(BFLOAT16, c, i);
        else if (c->type == FLOAT16)
            gated_norm_row(FLOAT16, c, i);
        else
            gated_norm_row(FLOAT32, c, i);
    }
    return 0;
}

typedef struct {
    int64_t type, num_threads, num_rows, size;
    const void *x;
    void *out;
    double cap;
} soften_call;

/* soft_cap, in whole vectors only, as a lane's result must not depend on its place in a row. */
int baton_soft_cap(const soften_call *c) {
    int team = threads_for(c->num_threads, c->num_rows * c->size);
#pragma omp parallel for num_threads(team) if (team > 1)
    for (int64_t i = 0; i < c->num_rows; i++)
        for (int64_t j = 0; j < c->size; j += LANES) {
            float row[LANES] = {0};
            int64_t at_row = i * c->size + j, width = min64(LANES, c->size - j);
            read_row(c->type, at(c->type, c->x, at_row), row, width);
            store(row, soften(load(FLOAT32, row, 0), c->cap));
            write_row(c->type, row, (void *)at(c->type, c->out, at_row), width);
        }
    return 0;
}

typedef struct {
    int64_t num_rows, first_bytes, second_bytes; /* bytes per row of each tensor */
    const char *first, *second;
    char *out;
} join_call;

/* join: write each row of one tensor, followed by the other tensor's row. */
int baton_join_rows(const join_call *c) {
    for (int64_t i = 0; i < c->num_rows; i++) {
        char *to = c->out + i * (c->first_bytes + c->second_bytes);
        memcpy(to, c->first + i * c->first_bytes, c->first_bytes);
        memcpy(to + c->first_bytes, c->second + i * c->second_bytes, c->second_bytes);
    }
    return 0;
}

typedef struct {
    int64_t type, num_threads, num_rows, size;
    const void *x;
    int64_t *out; /* [num_rows] */
} largest_call;
#define MOST_PARTS 64 /* maximum number of parts of a row */

/* Return the first index of the largest number in a part of a row; `best`: the number. */
INLINE int64_t largest_of(const largest_call *c, int64_t i, int64_t begin, int64_t end, float *best) {
    enum { CHUNK = 256 };
    int64_t found = begin;
    *best = -INFINITY;
    for (int64_t first = begin; first < end; first += CHUNK) {
        float row[CHUNK], most = -INFINITY;
        int64_t num = min64(CHUNK, end - first);
        read_row(c->type, at(c->type, c->x, i * c->size + first), row, num);
#pragma omp simd reduction(max : most)
        for (int64_t j = 0; j < num; j++) most = row[j] > most ? row[j] : most;
        if (most <= *best) continue;
        *best = most;
        found = first;
        while (row[found - first] != most) found++;
    }
    return found;
}

int baton_largest(const largest_call *c) {
    int team = threads_for(c->num_threads, c->num_rows * c->size);
    /* With fewer rows than threads, threads divide each row. */
    int64_t parts = min64(c->num_rows < team ? team : 1, MOST_PARTS), size = ceil_div(c->size, parts);
    if (parts == 1) {
#pragma omp parallel for num_threads(team) if (team > 1)
        for (int64_t i = 0; i < c->num_rows; i++) {
            float best;
            c->out[i] = largest_of(c, i, 0, c->size, &best);
        }
        return 0;
    }
    for (int64_t i = 0; i < c->num_rows; i++) {
        int64_t found[MOST_PARTS], first = 0;
        float best[MOST_PARTS];
#pragma omp parallel for num_threads(team)
        for (int64_t p = 0; p < parts; p++)
            found[p] = largest_of(c, i, min64(c->size, p * size), min64(c->size, (p + 1) * size), &best[p]);
        for (int64_t p = 1; p < parts; p++)
            if (best[p] > best[first]) first = p;
        c->out[i] = found[first];
    }
    return 0;
}

/* Rotate the first rotary_dim dims of a head, half-split; other dims stay. */
INLINE void rotate(float *head, const float *cos, const float *sin, int64_t rotary_dim) {
    int64_t half = rotary_dim / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float x1 = head[i], x2 = head[half + i];
        head[i] = x1 * cos[i] - x2 * sin[i];
        head[half + i] = x2 * cos[half + i] + x1 * sin[half + i];
    }
}

typedef struct {
    int64_t type, num_threads;
    int64_t num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, qkv_stride;
    /* Strides of the cache, in elements. */
    int64_t block_stride, kv_stride, head_stride, token_stride, block_size;
    const void *qkv, *query_weight, *key_weight, *value_weight, *cos, *sin; /* weights may be NULL */
    void *kv_cache, *out;
    const int64_t *slots; /* NULL: rows of qkv have only queries, and nothing is stored */
    double eps;
    int64_t cache_type; /* FLOAT8, or the type of qkv */
    double key_factor, value_factor; /* factors of keys and values stored as FLOAT8 */
    int64_t wide;                    /* whether the norms' weights are FLOAT32, whatever `type` is */
    int64_t whole; /* whether a norm spans all heads; its weight then has all heads' dims */
} store_call;

/* Round values for a FLOAT8 cache first to the type of qkv, like the reference. */
INLINE void store_float8(int type, float *head, float factor, uint8_t *to, int64_t size) {
    for (int64_t i = 0; i < size; i++) head[i] = round_to(type, head[i]) * factor;
    write_row(FLOAT8, head, to, size);
}

/* Return 1 / the root mean square of `num` heads together. */
INLINE float inverse_rms_of(int type, const store_call *c, const void *heads, int64_t num) {
    float head[c->head_dim], squares = 0;
    for (int64_t h = 0; h < num; h++) {
        read_row(type, at(type, heads, h * c->head_dim), head, c->head_dim);
        squares += sum_of_squares(head, c->head_dim);
    }
    return 1.0f / sqrtf(squares / (num * c->head_dim) + (float)c->eps);
}

/* Process every `step`-th of a token's heads from `first` on; queries come first, then keys, then values. */
INLINE void norm_rotary_store_heads(int type, const store_call *c, int64_t token, int64_t first, int64_t step) {
    float head[c->head_dim], cos[c->rotary_dim], sin[c->rotary_dim];
    read_row(type, at(type, c->cos, token * c->rotary_dim), cos, c->rotary_dim);
    read_row(type, at(type, c->sin, token * c->rotary_dim), sin, c->rotary_dim);
    const void *from = at(type, c->qkv, token * c->qkv_stride);
    int64_t slot = c->slots ? c->slots[token] : -1, num_rotated = c->num_heads + c->num_kv_heads;
    int64_t place = slot < 0 ? 0
                             : slot / c->block_size * c->block_stride +
                                   slot % c->block_size * c->token_stride;
    int64_t end = slot < 0 ? c->num_heads : num_rotated + c->num_kv_heads;
    float of_queries = 0, of_keys = 0;
    if (c->whole) {
        of_queries = inverse_rms_of(type, c, from, c->num_heads);
        of_keys = inverse_rms_of(type, c, at(type, from, c->num_heads * c->head_dim), c->num_kv_heads);
    }
    for (int64_t h = first; h < end; h += step) {
        read_row(type, at(type, from, h * c->head_dim), head, c->head_dim);
        const void *weight = h < c->num_heads ? c->query_weight : c->key_weight;
        int whole = c->whole && h < num_rotated;
        if (h >= num_rotated) weight = c->value_weight;
        if (weight) {
            int64_t nth = h < c->num_heads ? h : h - c->num_heads;
            float inverse_rms =
                whole ? (h < c->num_heads ? of_queries : of_keys)
                      : 1.0f / sqrtf(sum_of_squares(head, c->head_dim) / c->head_dim + (float)c->eps);
            if (whole) weight = at(c->wide ? FLOAT32 : type, weight, nth * c->head_dim);
            apply_norm(type, c->wide, head, inverse_rms, weight, c->head_dim);
            for (int64_t i = 0; type != FLOAT32 && i < c->head_dim; i++)
                head[i] = round_to(type, head[i]);
        }
        if (h < num_rotated) rotate(head, cos, sin, c->rotary_dim);
        if (h < c->num_heads) {
            const void *to = at(type, c->out, (token * c->num_heads + h) * c->head_dim);
            write_row(type, head, (void *)to, c->head_dim);
            continue;
        }
        int64_t is_value = h >= num_rotated, kv_head = (h - c->num_heads) % c->num_kv_heads;
        int64_t index = place + is_value * c->kv_stride + kv_head * c->head_stride;
        if (c->cache_type == FLOAT8)
            store_float8(type, head, is_value ? c->value_factor : c->key_factor,
                         (uint8_t *)c->kv_cache + index, c->head_dim);
        else
            write_row(type, head, (void *)at(type, c->kv_cache, index), c->head_dim);
    }
}

int baton_norm_rotary_store(const store_call *c) {
    /* With few tokens, threads divide heads, as writing to many pages is slow. */
    int64_t parts = c->num_tokens < c->num_threads ? c->num_threads : 1;
#pragma omp parallel for num_threads(c->num_threads)
    for (int64_t i = 0; i < c->num_tokens * parts; i++) {
        if (c->type == BFLOAT16)
            norm_rotary_store_heads(BFLOAT16, c, i / parts, i % parts, parts);
        else if (c->type == FLOAT16)
            norm_rotary_store_heads(FLOAT16, c, i / parts, i % parts, parts);
        else
            norm_rotary_store_heads(FLOAT32, c, i / parts, i % parts, parts);
    }
    return 0;
}

typedef struct {
    int64_t type, num_threads, num_tokens, num_heads, rank, rotary_dim, interleaved;
    /* Strides in elements; query and out have one between tokens and one between heads. */
    int64_t latent_stride, query_stride, query_head_stride, out_stride, out_head_stride;
    int64_t block_stride, token_stride, block_size; /* of the cache */
    const void *query, *latent, *weight, *cos, *sin;
    void *cache, *out;
    const int64_t *slots;
    double eps;
} latent_call;

/* Reorder interleaved pairs x0 y0 x1 y1 .. to halves x0 x1 .. y0 y1 .., for rotate. */
INLINE void take_apart(float *head, int64_t size) {
    float pairs[size];
    memcpy(pairs, head, size * sizeof(float));
    for (int64_t i = 0; i < size / 2; i++) {
        head[i] = pairs[2 * i];
        head[size / 2 + i] = pairs[2 * i + 1];
    }
}

INLINE void turn(int type, const latent_call *c, const void *from, const float *cos,
                 const float *sin, void *to) {
    float head[c->rotary_dim];
    read_row(type, from, head, c->rotary_dim);
    if (c->interleaved) take_apart(head, c->rotary_dim);
    rotate(head, cos, sin, c->rotary_dim);
    write_row(type, head, to, c->rotary_dim);
}

INLINE void store_latent_token(int type, const latent_call *c, int64_t token) {
    float row[c->rank], cos[c->rotary_dim], sin[c->rotary_dim];
    read_row(type, at(type, c->cos, token * c->rotary_dim), cos, c->rotary_dim);
    read_row(type, at(type, c->sin, token * c->rotary_dim), sin, c->rotary_dim);
    for (int64_t h = 0; h < c->num_heads; h++) {
        const void *from = at(type, c->query, token * c->query_stride + h * c->query_head_stride);
        int64_t to = token * c->out_stride + h * c->out_head_stride;
        turn(type, c, from, cos, sin, (void *)at(type, c->out, to));
    }
    int64_t slot = c->slots[token];
    if (slot < 0) return;
    int64_t place = slot / c->block_size * c->block_stride + slot % c->block_size * c->token_stride;
    const void *latent = at(type, c->latent, token * c->latent_stride);
    void *to = (void *)at(type, c->cache, place);
    read_row(type, latent, row, c->rank);
    norm_row(type, 0, row, c->weight, c->rank, c->eps);
    write_row(type, row, to, c->rank);
    turn(type, c, at(type, latent, c->rank), cos, sin, (void *)at(type, to, c->rank));
}

/* norm_rotary_store_latent. */
int baton_store_latent(const latent_call *c) {
    int64_t elements = c->num_tokens * (c->num_heads * c->rotary_dim + c->rank);
    int team = threads_for(c->num_threads, elements);
#pragma omp parallel for num_threads(team) if (team > 1)
    for (int64_t token = 0; token < c->num_tokens; token++) {
        if (c->type == BFLOAT16)
            store_latent_token(BFLOAT16, c, token);
        else if (c->type == FLOAT16)
            store_latent_token(FLOAT16, c, token);
        else
            store_latent_token(FLOAT32, c, token);
    }
    return 0;
}
