/* Adds adapters' low-rank products to a layer's output, in place.
 *
 *     x [rows, depth] -- A --> middle [rows, rank] -- B of each part --> some columns of out
 *
 * The rows of one adapter lie side by side, so each matrix is read once for all of them. Each output's
 * sum runs in order. So a row's result depends neither on the other rows nor on the number of threads.
 * Refuses to know: how a product is computed, which request a row belongs to.
 */
#include "linear.h"
#include "vectors.h"

#define LEAST_ROWS 32         /* rows of a job for which reading an adapter's matrices pays */
#define JOBS_PER_THREAD 4     /* from this many jobs per thread, each thread takes whole jobs instead of panels */
#define LEAST_PRODUCTS (1 << 15) /* below, waking threads costs more than it saves */

enum { OWN = 0, SHARED = 1, JOBS = 2 }; /* slots of scratch memory; OWN: of a thread with a whole job */

/* Columns of out that one module of an adapter changes. */
typedef struct {
    int64_t first_rank, rank;           /* the columns of middle that B reads */
    int64_t first_column, num_columns;  /* the columns of out */
    const void *b;                      /* panels of [num_columns, rank] */
    const float *gains, *shifts;        /* [num_columns], out = out * gains + shifts + product; or NULL */
} low_rank_part;

/* The rows [first_row, first_row + num_rows) have one adapter. */
typedef struct {
    int64_t first_row, num_rows, rank;  /* rank: rows of A, those of all parts */
    int64_t first_part, num_parts;
    const void *a;                      /* panels of [rank, depth] */
} low_rank_span;

typedef struct {
    int64_t type, w_type, num_threads;  /* type: of x, middle and out */
    int64_t depth, x_stride, out_stride, num_spans;
    const void *x;                      /* [num_rows, depth] */
    void *out;                          /* [num_rows, columns of the layer] */
    const low_rank_span *spans;
    const low_rank_part *parts;
} low_rank_call;

/* Some rows of one span. */
typedef struct {
    linear_call shrink; /* x to middle; its `out` is set when there is memory */
    const low_rank_part *parts;
    int64_t num_parts, first_row;
    int64_t place; /* offset of the job's memory, if threads share jobs */
} job;

INLINE int64_t lines_of(int64_t bytes) { return ceil_div(bytes, 64) * 64; }
INLINE int64_t panels_in(const linear_call *c) { return ceil_div(c->num_columns, PANEL); }

/* Return the call that adds a part's product to out. */
static linear_call expand_of(const low_rank_call *c, const job *j, const low_rank_part *part) {
    int64_t first = j->first_row * c->out_stride + part->first_column;
    linear_call expand = j->shrink;
    expand.num_columns = part->num_columns, expand.depth = part->rank;
    expand.x = at(c->type, j->shrink.out, part->first_rank), expand.x_stride = j->shrink.out_stride;
    expand.w = part->b, expand.bias = part->shifts, expand.gains = part->gains, expand.adds = 1;
    expand.out = (char *)c->out + first * size_of(c->type), expand.out_stride = c->out_stride;
    return expand;
}

/* A job's memory: packed x, then middle, then the packed middle of each part. */
static int64_t middle_place(const job *j) { return lines_of(baton_packed_bytes(&j->shrink)); }

static int64_t parts_place(const low_rank_call *c, const job *j) {
    return middle_place(j) + lines_of(j->shrink.num_rows * j->shrink.num_columns * size_of(c->type));
}

static int64_t bytes_of(const low_rank_call *c, const job *j) {
    int64_t bytes = parts_place(c, j);
    for (int64_t i = 0; i < j->num_parts; i++) {
        linear_call expand = expand_of(c, j, j->parts + i);
        bytes += lines_of(baton_packed_bytes(&expand));
    }
    return bytes;
}

static void pack_middle(const low_rank_call *c, const job *j, char *memory) {
    char *packed = memory + parts_place(c, j);
    for (int64_t i = 0; i < j->num_parts; i++) {
        linear_call expand = expand_of(c, j, j->parts + i);
        baton_pack_input(&expand, packed);
        packed += lines_of(baton_packed_bytes(&expand));
    }
}

/* Add the products of a thread's share of each part's panels. */
static void expand_share(const low_rank_call *c, const job *j, int thread, int team, char *memory) {
    char *packed = memory + parts_place(c, j);
    for (int64_t i = 0; i < j->num_parts; i++) {
        linear_call expand = expand_of(c, j, j->parts + i);
        int64_t panels = panels_in(&expand);
        baton_linear_panels(&expand, panels * thread / team, panels * (thread + 1) / team, packed);
        packed += lines_of(baton_packed_bytes(&expand));
    }
}

/* Compute a whole job in one thread, without waiting for others. */
static int job_alone(const low_rank_call *c, const job *shared) {
    job own = *shared;
    char *memory = baton_scratch(OWN, bytes_of(c, &own));
    if (!memory) return 1;
    own.shrink.out = memory + middle_place(&own);
    baton_pack_input(&own.shrink, memory);
    baton_linear_panels(&own.shrink, 0, panels_in(&own.shrink), memory);
    pack_middle(c, &own, memory);
    expand_share(c, &own, 0, 1, memory);
    return 0;
}

/* Compute all jobs with all threads, which divide the panels. */
static void jobs_together(const low_rank_call *c, const job *jobs, int64_t num_jobs, char *memory) {
    int thread = omp_get_thread_num(), team = omp_get_num_threads();
    int64_t panels = 0, before = 0;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num_jobs; i++) baton_pack_input(&jobs[i].shrink, memory + jobs[i].place);
    for (int64_t i = 0; i < num_jobs; i++) panels += panels_in(&jobs[i].shrink);
    int64_t begin = panels * thread / team, end = panels * (thread + 1) / team;
    for (int64_t i = 0; i < num_jobs; i++) {
        int64_t here = panels_in(&jobs[i].shrink);
        int64_t first = max64(begin - before, 0), last = min64(end - before, here);
        if (first < last) baton_linear_panels(&jobs[i].shrink, first, last, memory + jobs[i].place);
        before += here;
    }
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num_jobs; i++) pack_middle(c, &jobs[i], memory + jobs[i].place);
    for (int64_t i = 0; i < num_jobs; i++) expand_share(c, &jobs[i], thread, team, memory + jobs[i].place);
}

static linear_call shrink_of(const low_rank_call *c, const low_rank_span *span) {
    linear_call shrink = {0};
    shrink.x_type = shrink.out_type = c->type, shrink.w_type = c->w_type, shrink.num_threads = 1;
    shrink.num_rows = span->num_rows, shrink.num_columns = shrink.out_stride = span->rank;
    shrink.depth = c->depth, shrink.x_stride = c->x_stride, shrink.w = span->a;
    return shrink;
}

/* Return the most rows of a job: few enough for all threads to have jobs, and for caches. */
static int64_t most_rows(const low_rank_call *c, int64_t num_rows) {
    linear_call shrink = shrink_of(c, c->spans);
    int64_t even = ceil_div(num_rows, JOBS_PER_THREAD * c->num_threads);
    return min64(baton_most_rows(&shrink), max64(LEAST_ROWS, even));
}

/* Cut the spans into jobs of nearly equal size; return the number of jobs. */
static int64_t make_jobs(const low_rank_call *c, int64_t most, job *jobs) {
    int64_t count = 0;
    for (int64_t s = 0; s < c->num_spans; s++) {
        const low_rank_span *span = c->spans + s;
        int64_t parts = ceil_div(span->num_rows, most);
        for (int64_t i = 0; i < parts; i++, count++) {
            int64_t begin = span->num_rows * i / parts, end = span->num_rows * (i + 1) / parts;
            job *j = &jobs[count];
            *j = (job){shrink_of(c, span), c->parts + span->first_part, span->num_parts, span->first_row + begin, 0};
            j->shrink.num_rows = end - begin;
            j->shrink.x = at(c->type, c->x, j->first_row * c->x_stride);
        }
    }
    return count;
}

/* Return 0, or 1 without memory for jobs or packed rows. */
int baton_low_rank(const low_rank_call *c) {
    int64_t rows = 0, products = 0, bytes = 0, most_jobs = 0;
    int failed = 0;
    for (int64_t s = 0; s < c->num_spans; s++) {
        rows += c->spans[s].num_rows;
        products += c->spans[s].num_rows * c->spans[s].rank * c->depth;
    }
    if (!rows) return 0;
    int64_t most = most_rows(c, rows);
    for (int64_t s = 0; s < c->num_spans; s++) most_jobs += ceil_div(c->spans[s].num_rows, most);
    job *jobs = baton_scratch(JOBS, most_jobs * sizeof(job));
    if (!jobs) return 1;
    int64_t num_jobs = make_jobs(c, most, jobs);
    int team = products < LEAST_PRODUCTS ? 1 : c->num_threads, alone = num_jobs >= JOBS_PER_THREAD * team;
    char *memory = NULL;
    if (!alone) {
        for (int64_t i = 0; i < num_jobs; i++) jobs[i].place = bytes, bytes += bytes_of(c, &jobs[i]);
        memory = baton_scratch(SHARED, bytes);
        if (!memory) return 1;
        for (int64_t i = 0; i < num_jobs; i++) jobs[i].shrink.out = memory + jobs[i].place + middle_place(&jobs[i]);
    }
#pragma omp parallel num_threads(team) reduction(+ : failed) if (team > 1)
    {
        if (alone)
#pragma omp for schedule(dynamic, 1) nowait
            for (int64_t i = 0; i < num_jobs; i++) failed += job_alone(c, &jobs[i]);
        else
            jobs_together(c, jobs, num_jobs, memory);
    }
    return failed;
}
