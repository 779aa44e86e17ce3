/* Token mixers that carry a state from token to token: short convolutions and linear recurrences.
 *
 * Every token goes through the same loop in order, so its bits do not depend on chunks or batch. Work is divided
 * by requests, heads and columns, which are independent. The functions of baton_kernels/recurrent.py define the
 * results.
 * Refuses to know: layers, who owns a slot.
 */
#include <math.h>
#include <stdlib.h>

#include "vectors.h"

#define COLUMN_VECS 4
#define COLUMNS (COLUMN_VECS * LANES) /* columns of a state, or channels of a convolution, per job */
#define SERIAL_ELEMENTS 16384 /* below, waking threads costs more than it saves */

/* The tokens of a step, as in StateMetadata. */
typedef struct {
    int64_t num_requests, num_tokens;
    const int32_t *segment_start_loc, *read_slots, *write_slots, *request_start_loc;
} state_step;

INLINE int64_t end_of_tokens(const state_step *step) {
    return step->segment_start_loc[step->request_start_loc[step->num_requests]];
}

INLINE float read_one(int type, const void *p, int64_t index) {
    float x;
    read_row(type, at(type, p, index), &x, 1);
    return x;
}

INLINE void write_one(int type, void *p, int64_t index, float x) {
    write_row(type, &x, (void *)at(type, p, index), 1);
}

typedef struct {
    int64_t type, num_threads, num_channels, kernel_size, has_silu;
    /* Strides in elements: between tokens, and of the states. */
    int64_t x_stride, in_gate_stride, out_gate_stride;
    int64_t slot_stride, channel_stride, tap_stride;
    const void *x, *weight, *bias, *in_gate, *out_gate; /* bias and gates may be NULL */
    void *states, *out;
    state_step step;
} conv_call;

typedef struct {
    int64_t first, size; /* the job's channels */
    float *weight;       /* [kernel_size][COLUMNS] */
    float *window;       /* [kernel_size][COLUMNS], the newest input last */
    float bias[COLUMNS];
} conv_job;

INLINE void load_window(int type, const conv_call *c, conv_job *job, int64_t slot) {
    int64_t kept = c->kernel_size - 1;
    if (slot < 0) {
        memset(job->window, 0, kept * COLUMNS * sizeof(float));
        return;
    }
    int64_t from = slot * c->slot_stride + job->first * c->channel_stride;
    for (int64_t k = 0; k < kept; k++)
        for (int64_t j = 0; j < job->size; j++)
            job->window[k * COLUMNS + j] =
                read_one(type, c->states, from + k * c->tap_stride + j * c->channel_stride);
}

INLINE void store_window(int type, const conv_call *c, conv_job *job, int64_t slot) {
    int64_t to = slot * c->slot_stride + job->first * c->channel_stride;
    for (int64_t k = 0; k < c->kernel_size - 1; k++)
        for (int64_t j = 0; j < job->size; j++)
            write_one(type, c->states, to + k * c->tap_stride + j * c->channel_stride,
                      job->window[k * COLUMNS + j]);
}

INLINE void conv_token(int type, const conv_call *c, conv_job *job, int64_t token) {
    int64_t kept = c->kernel_size - 1;
    float *newest = job->window + kept * COLUMNS, gate[COLUMNS] = {0}, sum[COLUMNS];
    read_row(type, at(type, c->x, token * c->x_stride + job->first), newest, job->size);
    if (c->in_gate) {
        read_row(type, at(type, c->in_gate, token * c->in_gate_stride + job->first), gate,
                 job->size);
        for (int64_t j = 0; j < COLUMNS; j += LANES)
            store(newest + j, round_all(type, load(FLOAT32, newest, j) * load(FLOAT32, gate, j)));
    }
    if (c->out_gate)
        read_row(type, at(type, c->out_gate, token * c->out_gate_stride + job->first), gate,
                 job->size);
    for (int64_t j = 0; j < COLUMNS; j += LANES) {
        vec total = load(FLOAT32, job->bias, j);
        for (int64_t k = 0; k <= kept; k++)
            total = multiply_add(load(FLOAT32, job->window, k * COLUMNS + j),
                                 load(FLOAT32, job->weight, k * COLUMNS + j), total);
        if (c->has_silu) total = silu(round_all(type, total));
        if (c->out_gate) total = round_all(type, total) * load(FLOAT32, gate, j);
        store(sum + j, total);
    }
    int64_t to = token * c->num_channels + job->first;
    write_row(type, sum, (void *)at(type, c->out, to), job->size);
    memmove(job->window, job->window + COLUMNS, kept * COLUMNS * sizeof(float));
}

INLINE void conv_channels(int type, const conv_call *c, int64_t first) {
    const state_step *step = &c->step;
    float weight[c->kernel_size * COLUMNS], window[c->kernel_size * COLUMNS];
    conv_job job = {first, min64(COLUMNS, c->num_channels - first), weight, window, {0}};
    memset(weight, 0, sizeof weight);
    memset(window, 0, sizeof window);
    if (c->bias) read_row(type, at(type, c->bias, first), job.bias, job.size);
    for (int64_t j = 0; j < job.size; j++)
        for (int64_t k = 0; k < c->kernel_size; k++)
            weight[k * COLUMNS + j] = read_one(type, c->weight, (first + j) * c->kernel_size + k);
    for (int64_t request = 0; request < step->num_requests; request++) {
        int64_t segment = step->request_start_loc[request];
        int64_t end = step->request_start_loc[request + 1];
        if (segment < end) load_window(type, c, &job, step->read_slots[segment]);
        for (; segment < end; segment++) {
            int64_t token = step->segment_start_loc[segment];
            for (; token < step->segment_start_loc[segment + 1]; token++)
                conv_token(type, c, &job, token);
            if (step->write_slots[segment] >= 0)
                store_window(type, c, &job, step->write_slots[segment]);
        }
    }
    for (int64_t token = end_of_tokens(step); token < step->num_tokens; token++)
        memset((void *)at(type, c->out, token * c->num_channels + first), 0,
               job.size * size_of(type));
}

int baton_causal_conv(const conv_call *c) {
    int64_t jobs = ceil_div(c->num_channels, COLUMNS);
    int64_t elements = c->step.num_tokens * c->num_channels * c->kernel_size;
    int team = elements < SERIAL_ELEMENTS ? 1 : c->num_threads;
#pragma omp parallel for num_threads(team) if (team > 1)
    for (int64_t job = 0; job < jobs; job++) {
        if (c->type == BFLOAT16)
            conv_channels(BFLOAT16, c, job * COLUMNS);
        else if (c->type == FLOAT16)
            conv_channels(FLOAT16, c, job * COLUMNS);
        else
            conv_channels(FLOAT32, c, job * COLUMNS);
    }
    return 0;
}

typedef struct {
    int64_t type, num_threads, num_heads, num_key_heads, key_dim, value_dim;
    /* Strides between tokens, in elements; a token's heads are adjacent. */
    int64_t query_stride, key_stride, value_stride, rate_stride, beta_stride;
    int64_t slot_stride; /* elements between slots; a slot, [num_heads][key_dim][value_dim], has no gaps */
    const void *query, *key, *value;
    const void *rate, *rate_bias, *log_decay; /* rate: [tokens][num_heads]; the others: [num_heads] */
    const void *beta; /* [tokens][num_heads], for the delta rule; NULL: the selective scan */
    const void *skip; /* [num_heads], for the selective scan */
    float *states;
    void *out;
    state_step step;
} recurrence_call;

typedef struct {
    int64_t head, key_head, first, size; /* the job's columns */
    float *state;                        /* [key_dim][COLUMNS] */
    float *query, *key;                  /* [key_dim], padded to whole vectors */
    float log_decay, rate_bias, skip;
} recurrence_job;

/* Return log(1 + e^x), which above 20 rounds to x. */
INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* Return 1 / the length of a row padded with zeros to whole vectors. */
INLINE float inverse_length(const float *row, int64_t size) {
    vec sum = {0};
    for (int64_t i = 0; i < size; i += LANES)
        sum = multiply_add(load(FLOAT32, row, i), load(FLOAT32, row, i), sum);
    return 1.0f / sqrtf(sum_lanes(sum) + 1e-6f);
}

INLINE void scale_row(float *row, int64_t size, float factor) {
    for (int64_t i = 0; i < size; i += LANES) store(row + i, load(FLOAT32, row, i) * factor);
}

INLINE void recurrence_token(int type, int is_delta, const recurrence_call *c,
                             const recurrence_job *job, int64_t token) {
    int64_t head = job->head, key_dim = c->key_dim, from = job->key_head * key_dim;
    float value[COLUMNS] = {0}, result[COLUMNS];
    read_row(type, at(type, c->query, token * c->query_stride + from), job->query, key_dim);
    read_row(type, at(type, c->key, token * c->key_stride + from), job->key, key_dim);
    int64_t column = head * c->value_dim + job->first;
    read_row(type, at(type, c->value, token * c->value_stride + column), value, job->size);
    float rate = softplus(read_one(type, c->rate, token * c->rate_stride + head) + job->rate_bias);
    float decay = expf(-expf(job->log_decay) * rate);
    vec written[COLUMN_VECS], out[COLUMN_VECS] = {{0}};
    if (is_delta) {
        float beta = read_one(type, c->beta, token * c->beta_stride + head);
        beta = round_to(type, 1.0f / (1.0f + expf(-beta)));
        scale_row(job->query, key_dim, inverse_length(job->query, key_dim) / sqrtf(key_dim));
        scale_row(job->key, key_dim, inverse_length(job->key, key_dim));
        vec known[COLUMN_VECS] = {{0}};
        for (int64_t i = 0; i < key_dim; i++) {
            vec key = splat(job->key[i]);
#pragma GCC unroll 4
            for (int j = 0; j < COLUMN_VECS; j++) {
                vec old = load(FLOAT32, job->state, i * COLUMNS + j * LANES);
                known[j] = multiply_add(old * decay, key, known[j]);
            }
        }
        for (int j = 0; j < COLUMN_VECS; j++)
            written[j] = (load(FLOAT32, value, j * LANES) - known[j]) * beta;
    } else {
        for (int j = 0; j < COLUMN_VECS; j++) written[j] = load(FLOAT32, value, j * LANES) * rate;
    }
    for (int64_t i = 0; i < key_dim; i++) {
        vec key = splat(job->key[i]), query = splat(job->query[i]);
#pragma GCC unroll 4
        for (int j = 0; j < COLUMN_VECS; j++) {
            float *place = job->state + i * COLUMNS + j * LANES;
            vec new = multiply_add(key, written[j], load(FLOAT32, place, 0) * decay);
            store(place, new);
            out[j] = multiply_add(query, new, out[j]);
        }
    }
    for (int j = 0; j < COLUMN_VECS; j++) {
        vec skipped = is_delta ? (vec){0} : load(FLOAT32, value, j * LANES);
        store(result + j * LANES, multiply_add(skipped, splat(job->skip), out[j]));
    }
    int64_t to = token * c->num_heads * c->value_dim + column;
    write_row(type, result, (void *)at(type, c->out, to), job->size);
}

INLINE void copy_state(const recurrence_call *c, recurrence_job *job, int64_t slot, int stores) {
    float *place = c->states + slot * c->slot_stride + job->first +
                   job->head * c->key_dim * c->value_dim;
    for (int64_t i = 0; i < c->key_dim; i++) {
        float *row = job->state + i * COLUMNS, *kept = place + i * c->value_dim;
        memcpy(stores ? kept : row, stores ? row : kept, job->size * sizeof(float));
    }
}

INLINE void recurrence(int type, int is_delta, const recurrence_call *c, int64_t request,
                       int64_t head, int64_t first) {
    const state_step *step = &c->step;
    int64_t segment = step->request_start_loc[request], whole = ceil_div(c->key_dim, LANES) * LANES;
    int64_t end = step->request_start_loc[request + 1];
    if (segment >= end) return;
    float state[c->key_dim * COLUMNS], query[whole], key[whole];
    memset(state, 0, sizeof state);
    memset(query, 0, sizeof query);
    memset(key, 0, sizeof key);
    recurrence_job job = {
        head, head / (c->num_heads / c->num_key_heads), first,
        min64(COLUMNS, c->value_dim - first), state, query, key,
        read_one(type, c->log_decay, head), read_one(type, c->rate_bias, head),
        is_delta ? 0 : read_one(type, c->skip, head),
    };
    if (step->read_slots[segment] >= 0) copy_state(c, &job, step->read_slots[segment], 0);
    for (; segment < end; segment++) {
        int64_t token = step->segment_start_loc[segment];
        for (; token < step->segment_start_loc[segment + 1]; token++)
            recurrence_token(type, is_delta, c, &job, token);
        if (step->write_slots[segment] >= 0) copy_state(c, &job, step->write_slots[segment], 1);
    }
}

/* gated_delta_rule, or without beta selective_scan. */
int baton_recurrence(const recurrence_call *c) {
    int64_t parts = ceil_div(c->value_dim, COLUMNS), width = c->num_heads * c->value_dim;
    int64_t jobs = c->step.num_requests * c->num_heads * parts;
    int team = c->step.num_tokens * width * c->key_dim < SERIAL_ELEMENTS ? 1 : c->num_threads;
#pragma omp parallel for num_threads(team) if (team > 1) schedule(dynamic, 1)
    for (int64_t job = 0; job < jobs; job++) {
        int64_t first = job % parts * COLUMNS, head = job / parts % c->num_heads;
        int64_t request = job / parts / c->num_heads;
#define RUN(type) \
    c->beta ? recurrence(type, 1, c, request, head, first) \
            : recurrence(type, 0, c, request, head, first)
        if (c->type == BFLOAT16)
            RUN(BFLOAT16);
        else if (c->type == FLOAT16)
            RUN(FLOAT16);
        else
            RUN(FLOAT32);
#undef RUN
    }
    int64_t end = end_of_tokens(&c->step);
    memset((void *)at(c->type, c->out, end * width), 0,
           (c->step.num_tokens - end) * width * size_of(c->type));
    return 0;
}
