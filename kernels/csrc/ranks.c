/* Ranks that exchange tensors in the shared memory of one machine: all-reduce and all-gather in a group, and
 * point-to-point sends from one rank to another.
 *
 *     aborted | flags ... | slots[rank][num_slots] ...      each flag in its own cache line, then data
 *
 * Collectives: a flag per rank, and two slots. A rank writes its part into one of its slots, raises its flag, and
 * reads all other parts. A rank one step ahead writes its other slot; no rank can be two steps ahead. Each rank adds
 * the parts in the order of ranks, so all ranks have the same bits.
 *
 * Point-to-point: each rank sends to at most one other rank. A rank's slots are a ring of pieces. The rank's first
 * flag counts the pieces that it has sent; its second flag, which the receiver raises, counts the pieces received.
 * A sender waits only while the ring is full.
 *
 * Refuses to know: the meaning of the numbers, how ranks are started.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "vectors.h"

#define LINE 64 /* bytes of a cache line */
#define PIECE 512 /* floats that are added at once */
#define YIELD_NS 1000000 /* for this time, a waiting rank yields its core; then it sleeps */
#define SLEEP_NS 50000000 /* interval at which a sleeping rank checks that others are alive */
#define GONE 2 /* returned if a rank has ended, or not answered in time */

enum { SUM = 0, GATHER = 1 };

typedef struct {
    uint32_t came; /* number of steps for which this rank's part is complete */
    uint32_t num_sleepers;
    char rest[LINE - 8];
} flag;

typedef struct {
    int64_t rank, size, num_flags, num_slots, slot_bytes, spins, timeout_s;
    char *shared;
    int64_t step, received; /* numbers of the last step or piece sent, and of the last piece received */
} rank_group;

typedef struct {
    int64_t type, kind, count;
    rank_group *group;
    const void *in;
    void *out; /* SUM: [count]; GATHER: [size][count] */
} collective_call;

typedef struct {
    int64_t num_bytes, sender;
    rank_group *group;
    void *data;
} point_to_point_call;

static flag *flag_of(const rank_group *g, int64_t index) {
    return (flag *)(g->shared + (1 + index) * LINE);
}

static char *slot_of(const rank_group *g, int64_t rank, uint32_t step) {
    return g->shared + (1 + g->num_flags) * LINE + (g->num_slots * rank + step % g->num_slots) * g->slot_bytes;
}

#if defined(__linux__)
static void wake(flag *f) {
    syscall(SYS_futex, &f->came, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static void sleep_while(flag *f, uint32_t seen) {
    struct timespec nap = {0, SLEEP_NS};
    syscall(SYS_futex, &f->came, FUTEX_WAIT, seen, &nap, NULL, 0);
}
#else
static void wake(flag *f) { (void)f; }

static void sleep_while(flag *f, uint32_t seen) {
    struct timespec nap = {0, 50000};
    if (__atomic_load_n(&f->came, __ATOMIC_SEQ_CST) == seen) nanosleep(&nap, NULL);
}
#endif

static int has_come(const flag *f, uint32_t step) {
    return (int32_t)(__atomic_load_n(&f->came, __ATOMIC_SEQ_CST) - step) >= 0;
}

static int is_aborted(const rank_group *g) {
    return __atomic_load_n((uint32_t *)g->shared, __ATOMIC_RELAXED) != 0;
}

static void raise_flag(const rank_group *g, int64_t index, uint32_t step) {
    flag *f = flag_of(g, index);
    __atomic_store_n(&f->came, step, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&f->num_sleepers, __ATOMIC_SEQ_CST)) wake(f);
}

static int64_t nanoseconds_between(const struct timespec *start, const struct timespec *now) {
    return (now->tv_sec - start->tv_sec) * (int64_t)1000000000 + now->tv_nsec - start->tv_nsec;
}

static int await(const rank_group *g, int64_t index, uint32_t step) {
    flag *f = flag_of(g, index);
    for (int64_t i = 0; i < g->spins; i++) {
        if (has_come(f, step)) return 0;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    now = start;
    while (g->spins && nanoseconds_between(&start, &now) < YIELD_NS) {
        if (has_come(f, step)) return 0;
        sched_yield();
        clock_gettime(CLOCK_MONOTONIC, &now);
    }
    while (!has_come(f, step)) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (is_aborted(g) || now.tv_sec - start.tv_sec > g->timeout_s) return GONE;
        __atomic_fetch_add(&f->num_sleepers, 1, __ATOMIC_SEQ_CST);
        uint32_t seen = __atomic_load_n(&f->came, __ATOMIC_SEQ_CST);
        if ((int32_t)(seen - step) < 0) sleep_while(f, seen);
        __atomic_fetch_sub(&f->num_sleepers, 1, __ATOMIC_SEQ_CST);
    }
    return 0;
}

INLINE void add_parts(int type, const rank_group *g, uint32_t step, int64_t count, void *out) {
    float sum[PIECE], part[PIECE];
    for (int64_t first = 0; first < count; first += PIECE) {
        int64_t size = min64(PIECE, count - first);
        read_row(type, at(type, slot_of(g, 0, step), first), sum, size);
        for (int64_t rank = 1; rank < g->size; rank++) {
            read_row(type, at(type, slot_of(g, rank, step), first), part, size);
            for (int64_t i = 0; i < size; i++) sum[i] += part[i];
        }
        write_row(type, sum, (char *)out + first * size_of(type), size);
    }
}

static void finish(const collective_call *c, uint32_t step, int64_t first, int64_t count) {
    const rank_group *g = c->group;
    int64_t size = size_of(c->type);
    if (c->kind == GATHER) {
        for (int64_t rank = 0; rank < g->size; rank++)
            memcpy((char *)c->out + (rank * c->count + first) * size, slot_of(g, rank, step),
                   count * size);
        return;
    }
    void *out = (char *)c->out + first * size;
    if (c->type == BFLOAT16)
        add_parts(BFLOAT16, g, step, count, out);
    else if (c->type == FLOAT16)
        add_parts(FLOAT16, g, step, count, out);
    else
        add_parts(FLOAT32, g, step, count, out);
}

/* Return 0, or GONE. */
int baton_collective(const collective_call *c) {
    rank_group *g = c->group;
    int64_t most = g->slot_bytes / size_of(c->type);
    for (int64_t first = 0; first < c->count; first += most) {
        int64_t count = min64(most, c->count - first);
        uint32_t step = (uint32_t)++g->step;
        memcpy(slot_of(g, g->rank, step), at(c->type, c->in, first), count * size_of(c->type));
        raise_flag(g, g->rank, step);
        for (int64_t rank = 0; rank < g->size; rank++) {
            if (rank == g->rank) continue;
            int failed = await(g, rank, step);
            if (failed) return failed;
        }
        finish(c, step, first, count);
    }
    return 0;
}

/* Return 0, or GONE. */
int baton_send(const point_to_point_call *c) {
    rank_group *g = c->group;
    for (int64_t first = 0; first < c->num_bytes; first += g->slot_bytes) {
        uint32_t piece = (uint32_t)++g->step;
        if (is_aborted(g) || await(g, g->size + g->rank, piece - (uint32_t)g->num_slots)) return GONE;
        memcpy(slot_of(g, g->rank, piece), (char *)c->data + first, min64(g->slot_bytes, c->num_bytes - first));
        raise_flag(g, g->rank, piece);
    }
    return 0;
}

/* Return 0, or GONE. */
int baton_receive(const point_to_point_call *c) {
    rank_group *g = c->group;
    for (int64_t first = 0; first < c->num_bytes; first += g->slot_bytes) {
        uint32_t piece = (uint32_t)++g->received;
        if (is_aborted(g) || await(g, c->sender, piece)) return GONE;
        memcpy((char *)c->data + first, slot_of(g, c->sender, piece), min64(g->slot_bytes, c->num_bytes - first));
        raise_flag(g, g->size + c->sender, piece);
    }
    return 0;
}

/* Make all calls of all ranks fail from now on. */
void baton_abort_ranks(const rank_group *g) {
    __atomic_store_n((uint32_t *)g->shared, 1, __ATOMIC_SEQ_CST);
    for (int64_t index = 0; index < g->num_flags; index++) wake(flag_of(g, index));
}
