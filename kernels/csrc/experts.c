/* Computes a mixture of experts: each token goes through few of many gated MLPs, whose results are summed.
 *
 * Rows are sorted by expert, so that each weight is read once for all its tokens. A token's results are added in
 * the order of its chosen experts, so they do not depend on the batch. If ranks divide the experts, a call computes
 * and adds only the rows of its own experts.
 * Refuses to know: how experts are chosen, how a linear layer is computed.
 */
#include <string.h>

#include "linear.h"
#include "vectors.h"

#define MOST_BYTES (64 << 20) /* maximum number of bytes of intermediate results; more tokens are computed in slabs */
#define JOBS_PER_THREAD 4     /* from this many jobs per thread on, each thread takes whole jobs, not panels */

#define MOST_RANKS 64

enum { PACKED = 0, SHARED = 1, PLAN = 2 }; /* slots of scratch memory, PACKED as in linear.c */

typedef struct {
    linear_call gate_up, down; /* calls for the first expert; x, out and num_rows are set later */
    int64_t num_tokens, num_experts, top_k, hidden, num_threads, x_stride;
    int64_t squares;      /* 1: no gate, the activation is relu(x)^2 */
    /* The call has the weights of `num_experts` experts. The expert with id e is on rank e % num_ranks, where it is
     * number e / num_ranks. */
    int64_t rank, num_ranks;
    /* In both weights, each expert's rows fill whole panels; padding rows are 0. */
    const int64_t *ids;   /* [num_tokens, top_k] */
    const float *weights; /* [num_tokens, top_k] */
    const void *x;        /* [num_tokens, hidden], of type `gate_up.x_type`, like base and out */
    const void *base;     /* [num_tokens, hidden], added to the experts' sum, or NULL */
    const float *base_gate; /* [num_tokens], sigmoids of these scale base; NULL: not scaled */
    void *out;            /* [num_tokens, hidden] */
    int64_t *loads;       /* rows of the busiest rank and of all ranks are added to these two; NULL: not counted */
} experts_call;

/* Rows of one expert that are multiplied together: order[first, first + count). */
typedef struct {
    linear_call gate_up, down;
    int64_t first, count, packed_at; /* packed_at: offset in bytes, if threads share panels */
} job;

typedef struct {
    int64_t num_rows, num_jobs;
    int64_t *order; /* own rows by expert; row = token of the slab * top_k + place */
    char *is_own;   /* by row */
    job *jobs;
    char *gathered, *middle, *results, *packed; /* results is indexed by row, the others by place in `order` */
} plan;

/* Return an expert's hidden size: `down.depth` rounded up to whole panels. */
static int64_t middle_size(const experts_call *c) { return c->gate_up.num_columns; }

/* Sort by expert the rows of the tokens from `token` on, and cut them into jobs. */
static int make_plan(const experts_call *c, int64_t token, int64_t count, plan *p) {
    int type = c->gate_up.x_type;
    int64_t rows = count * c->top_k, size = size_of(type), most = baton_most_rows(&c->down);
    most = min64(most, baton_most_rows(&c->gate_up));
    int64_t most_jobs = min64(rows, c->num_experts) + rows / most;
    int64_t counts_bytes = (c->num_experts + 1) * sizeof(int64_t);
    char *memory = baton_scratch(PLAN, counts_bytes + rows * (sizeof(int64_t) + 1) + most_jobs * sizeof(job));
    if (!memory) return 1;
    int64_t *starts = (int64_t *)memory;
    p->order = starts + c->num_experts + 1;
    p->jobs = (job *)(p->order + rows);
    p->is_own = (char *)(p->jobs + most_jobs);
    const int64_t *ids = c->ids + token * c->top_k;
    memset(starts, 0, counts_bytes);
    for (int64_t r = 0; r < rows; r++) {
        p->is_own[r] = ids[r] % c->num_ranks == c->rank;
        if (p->is_own[r]) starts[ids[r] / c->num_ranks + 1]++;
    }
    for (int64_t e = 0; e < c->num_experts; e++) starts[e + 1] += starts[e];
    for (int64_t r = 0; r < rows; r++)
        if (p->is_own[r]) p->order[starts[ids[r] / c->num_ranks]++] = r; /* starts[e]: now the end */
    int64_t middle_at = rows * c->hidden * size, results_at = middle_at + rows * middle_size(c) * size;
    int64_t packed_at = (results_at + rows * c->hidden * size + 63) / 64 * 64, packed = 0;
    p->num_rows = rows;
    p->num_jobs = 0;
    for (int64_t e = 0, first = 0; e < c->num_experts; first = starts[e++])
        for (int64_t at = first; at < starts[e]; at += most) {
            job *j = &p->jobs[p->num_jobs++];
            *j = (job){baton_linear_part(&c->gate_up, e), baton_linear_part(&c->down, e), at,
                       min64(most, starts[e] - at), packed};
            j->gate_up.num_rows = j->down.num_rows = j->count;
            j->gate_up.x_stride = c->hidden;
            j->down.x_stride = middle_size(c);
            packed += (max64(baton_packed_bytes(&j->gate_up), baton_packed_bytes(&j->down)) + 63) / 64 * 64;
        }
    int alone = p->num_jobs >= JOBS_PER_THREAD * c->num_threads;
    memory = baton_scratch(SHARED, packed_at + (alone ? 0 : packed));
    if (!memory) return 1;
    p->gathered = memory;
    p->middle = memory + middle_at;
    p->results = memory + results_at;
    p->packed = alone ? NULL : memory + packed_at;
    for (int64_t i = 0; i < p->num_jobs; i++) {
        job *j = &p->jobs[i];
        j->gate_up.x = p->gathered + j->first * c->hidden * size;
        j->gate_up.out = p->middle + j->first * middle_size(c) * size;
        j->down.x = j->gate_up.out;
        /* Results overwrite the input, which is no longer needed; they move to their rows later. */
        j->down.out = (char *)j->gate_up.x;
    }
    return 0;
}

static void gather(const experts_call *c, const plan *p, int64_t token, const job *j) {
    int type = c->gate_up.x_type;
    for (int64_t i = 0; i < j->count; i++) {
        int64_t from = token + p->order[j->first + i] / c->top_k;
        memcpy((char *)j->gate_up.x + i * c->hidden * size_of(type),
               at(type, c->x, from * c->x_stride), c->hidden * size_of(type));
    }
}

static void scatter(const experts_call *c, const plan *p, const job *j) {
    int64_t row_bytes = c->hidden * size_of(c->gate_up.x_type);
    for (int64_t i = 0; i < j->count; i++)
        memcpy(p->results + p->order[j->first + i] * row_bytes, j->down.out + i * row_bytes, row_bytes);
}

/* Apply relu(x)^2 to a job's hidden rows; round once, like torch. */
static void square_middle(const experts_call *c, const job *j) {
    int type = c->gate_up.x_type;
    if (!c->squares) return;
    for (int64_t i = 0; i < j->count * middle_size(c); i += LANES) {
        vec x = activate(RELU, load(type, j->down.x, i));
        store_as(type, (void *)j->down.x, i, x * x);
    }
}

static int job_alone(const experts_call *c, const plan *p, int64_t token, const job *j) {
    int64_t bytes = max64(baton_packed_bytes(&j->gate_up), baton_packed_bytes(&j->down));
    void *packed = baton_scratch(PACKED, bytes);
    if (!packed) return 1;
    gather(c, p, token, j);
    baton_pack_input(&j->gate_up, packed);
    baton_linear_panels(&j->gate_up, 0, middle_size(c) / PANEL, packed);
    square_middle(c, j);
    baton_pack_input(&j->down, packed);
    baton_linear_panels(&j->down, 0, ceil_div(c->hidden, PANEL), packed);
    scatter(c, p, j);
    return 0;
}

/* Compute the panels [first, last), counted over all jobs with `each` panels per job. */
static void panels_of_jobs(const plan *p, int is_down, int64_t each, int64_t first, int64_t last) {
    for (int64_t i = first / each; i * each < last; i++) {
        const job *j = &p->jobs[i];
        baton_linear_panels(is_down ? &j->down : &j->gate_up, max64(first - i * each, 0),
                            min64(last - i * each, each), p->packed + j->packed_at);
    }
}

/* Compute all jobs with all threads; each thread takes some panels of every job. */
static void jobs_together(const experts_call *c, const plan *p, int64_t token) {
    int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
    for (int is_down = 0; is_down <= 1; is_down++) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < p->num_jobs; i++) {
            const job *j = &p->jobs[i];
            if (is_down)
                square_middle(c, j);
            else
                gather(c, p, token, j);
            baton_pack_input(is_down ? &j->down : &j->gate_up, p->packed + j->packed_at);
        }
        int64_t each = ceil_div(is_down ? c->hidden : middle_size(c), PANEL), all = each * p->num_jobs;
        panels_of_jobs(p, is_down, each, all * thread / team, all * (thread + 1) / team);
#pragma omp barrier
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < p->num_jobs; i++) scatter(c, p, &p->jobs[i]);
}

/* Load `count` numbers from `index` on; the other lanes are 0. */
INLINE vec load_some(int type, const void *from, int64_t index, int64_t count) {
    if (count == LANES) return load(type, from, index);
    float last[LANES] = {0};
    memcpy(last, at(type, from, index), count * size_of(type));
    return load(type, last, 0);
}

INLINE void store_some(int type, void *to, int64_t index, vec x, int64_t count) {
    float last[LANES];
    if (count == LANES) {
        store_as(type, to, index, x);
        return;
    }
    store_as(type, last, 0, x);
    memcpy((void *)at(type, to, index), last, count * size_of(type));
}

/* out = base * sigmoid(gate) + the sum of a token's results; `at_token`: place of the token in the slab. */
static void add_up(const experts_call *c, const plan *p, int64_t token, int64_t at_token) {
    int type = c->gate_up.x_type;
    const float *weights = c->weights + (token + at_token) * c->top_k;
    const char *is_own = p->is_own + at_token * c->top_k;
    float gate = 1;
    if (c->base_gate) gate = 1 / (1 + exp_fast(splat(-c->base_gate[token + at_token]))[0]);
    for (int64_t i = 0; i < c->hidden; i += LANES) {
        int64_t count = min64(LANES, c->hidden - i), place = (token + at_token) * c->hidden + i;
        vec sum = {0};
        for (int64_t k = 0; k < c->top_k; k++)
            if (is_own[k]) sum = multiply_add(splat(weights[k]),
                               load_some(type, p->results, (at_token * c->top_k + k) * c->hidden + i, count), sum);
        if (c->base) sum = multiply_add(splat(gate), load_some(type, c->base, place, count), sum);
        store_some(type, c->out, place, sum, count);
    }
}

/* Add to `loads` how many rows the busiest rank has, and how many all ranks have. */
static void count_loads(const experts_call *c) {
    int64_t rows = c->num_tokens * c->top_k, most = 0, counts[MOST_RANKS] = {0};
    for (int64_t r = 0; r < rows; r++) counts[c->ids[r] % c->num_ranks]++;
    for (int64_t rank = 0; rank < c->num_ranks; rank++) most = max64(most, counts[rank]);
    c->loads[0] += most;
    c->loads[1] += rows;
}

/* Compute the experts. Return 0, or 1 without memory. */
int baton_experts(const experts_call *c) {
    int64_t token_bytes = c->top_k * (2 * c->hidden + middle_size(c)) * size_of(c->gate_up.x_type);
    int64_t slab = max64(MOST_BYTES / token_bytes, 1);
    if (c->loads) count_loads(c);
    for (int64_t token = 0; token < c->num_tokens; token += slab) {
        int64_t count = min64(slab, c->num_tokens - token);
        plan p;
        if (make_plan(c, token, count, &p)) return 1;
        int failed = 0;
#pragma omp parallel num_threads(c->num_threads) reduction(+ : failed)
        {
            if (p.packed) {
                jobs_together(c, &p, token);
            } else {
#pragma omp for schedule(dynamic)
                for (int64_t i = 0; i < p.num_jobs; i++) failed += job_alone(c, &p, token, &p.jobs[i]);
            }
#pragma omp for schedule(static)
            for (int64_t t = 0; t < count; t++) add_up(c, &p, token, t);
        }
        if (failed) return 1;
    }
    return 0;
}
