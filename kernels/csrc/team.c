/* Teams of threads: the functions that GCC calls for `#pragma omp`, in place of libgomp's.
 *
 * Each thread that opens a parallel region has its own team, whose workers wait for the next region. libgomp's
 * threads sleep after spinning for a while. If waking a thread takes longer than this while, as in virtual
 * machines, a thread that slept is late at the next barrier, where the others fall asleep in turn: from then on,
 * each barrier costs a wake-up, and a decode step takes six times as long. Here, a waiting thread spins for
 * AWAKE_NS, longer than a wake-up takes, and lets other threads have its core now and then; only after that it
 * sleeps.
 *
 * GCC on Linux only; elsewhere, `#pragma omp` has no effect.
 * Refuses to know: what is computed.
 */
#include <stdint.h>

/* Lenders of cores: `bytes` has the address of two bytes per lender. The lender sets the first while it computes;
 * this process sets the second while it computes on the lender's cores. Both stay valid until the next call. */
typedef struct {
    int64_t num_own_threads, num_lenders;
    const void *bytes;
} lenders_call;

#if defined(_OPENMP) && defined(__linux__) && !defined(__clang__)
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "old_glibc.h"

#define HIDDEN __attribute__((visibility("hidden"))) /* torch's libgomp keeps its own functions of these names */
#define LINE 64                                      /* bytes of a cache line */
#define SPINS 1000
#define SPINS_PER_LOOK 32 /* spins between looks at the clock */
#define AWAKE_NS 2000000
#define YIELD_NS 1000000 /* Linux counts each yield as a used slice of time: beside one busy program, a yield every
                          * 0.1 ms makes a decode step ten times as long */
#define MOST_LOOPS 16 /* dynamic loops of a region; none may stand outside a region */
#define MOST_LENDERS 64
#define SIZE_BITS 10  /* bits for the team's size in the word that starts a region */

typedef void region(void *data);

/* A word that threads wait for, and how many of them sleep. */
typedef struct {
    _Alignas(LINE) atomic_uint word;
    atomic_uint num_sleepers;
} event;

/* The leader fills `run`, `data` and `next`, then changes `begun`; only after that, members read them. */
typedef struct {
    event begun;  /* number of the region; its number of threads in the lower SIZE_BITS */
    event done;   /* counts workers that have finished the region */
    event passed; /* counts barriers that all threads have reached */
    event grown;  /* counts regions with more threads than the previous one */
    _Alignas(LINE) atomic_uint num_waiting; /* threads at the current barrier */
    atomic_long next[MOST_LOOPS];           /* iterations taken from each dynamic loop */
    region *run;
    void *data;
    unsigned num_workers, num_regions, size, fork; /* size: of the last region */
    atomic_uint num_own;  /* threads on the process's own cores; 0: none were ever borrowed */
    unsigned num_lenders; /* lenders of the other threads' cores */
    _Atomic int8_t *lenders[MOST_LENDERS];
    pthread_t *workers;
} team;

typedef struct {
    team *of;
    unsigned id, seen;
} worker;

/* The region that this thread is in. */
typedef struct {
    team *of; /* NULL: a region of one thread, or no region */
    unsigned id, size, num_loops;
    atomic_long *next;
    long first, end, step, chunk;
} place;

static __thread place here;
static __thread team *own;
static atomic_uint num_forks; /* a forked process has no workers */
static pthread_key_t at_end;
static pthread_once_t has_key = PTHREAD_ONCE_INIT;

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static bool spin(event *e, unsigned value, int times) {
    for (int i = 0; i < times; i++) {
        if (atomic_load_explicit(&e->word, memory_order_acquire) != value) return true;
        relax();
    }
    return false;
}

/* Sleep until the event's word has another value. */
static void sleep_while(event *e, unsigned value) {
    atomic_fetch_add(&e->num_sleepers, 1);
    while (atomic_load(&e->word) == value) syscall(SYS_futex, &e->word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
    atomic_fetch_sub(&e->num_sleepers, 1);
}

/* Wait until the event's word has another value. */
static void wait_while(event *e, unsigned value) {
    if (spin(e, value, SPINS)) return;
    int64_t now = now_ns(), sleep_at = now + AWAKE_NS, yield_at = now + YIELD_NS;
    do {
        if (now >= yield_at) {
            sched_yield();
            yield_at = now + YIELD_NS;
        }
        if (spin(e, value, SPINS_PER_LOOK)) return;
        now = now_ns();
    } while (now < sleep_at);
    sleep_while(e, value);
}

/* Wake the sleeping threads; call after changing the word. */
static void wake(event *e) {
    if (atomic_load(&e->num_sleepers)) syscall(SYS_futex, &e->word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static void begin_region(team *t, unsigned size) {
    atomic_store(&t->begun.word, ++t->num_regions << SIZE_BITS | size);
    wake(&t->begun);
    if (size > t->size || !size) {
        atomic_fetch_add(&t->grown.word, 1); /* after `begun`: see work() */
        wake(&t->grown);
    }
    t->size = size;
}

static void run_as(team *t, unsigned id, unsigned size, atomic_long *next, region *run, void *data) {
    place outer = here;
    here = (place){.of = t, .id = id, .size = size, .next = next};
    run(data);
    here = outer;
}

/* ---------------------------------------------------------------- workers */

static void *work(void *argument) {
    worker w = *(worker *)argument;
    free(argument);
    team *t = w.of;
    prctl(PR_SET_NAME, "baton-team");
    for (;;) {
        wait_while(&t->begun, w.seen);
        unsigned grown = atomic_load(&t->grown.word); /* before `begun`, so that no growth is missed */
        w.seen = atomic_load(&t->begun.word);
        unsigned size = w.seen & ((1u << SIZE_BITS) - 1);
        if (!size) return NULL; /* the leader ends */
        if (w.id >= size) {
            /* On a borrowed core, sleep at once, because its owner needs it. */
            unsigned num_own = atomic_load(&t->num_own);
            if (num_own && w.id >= num_own) sleep_while(&t->grown, grown);
            continue;
        }
        run_as(t, w.id, size, t->next, t->run, t->data);
        atomic_fetch_add(&t->done.word, 1);
        wake(&t->done);
    }
}

static void end_team(void *leaders) {
    team *t = leaders;
    if (t->fork == atomic_load(&num_forks)) {
        begin_region(t, 0);
        for (unsigned i = 0; i < t->num_workers; i++) pthread_join(t->workers[i], NULL);
        free(t->workers);
        free(t);
    }
    own = NULL;
}

static void count_fork(void) { atomic_fetch_add(&num_forks, 1); }

static void make_key(void) {
    pthread_key_create(&at_end, end_team);
    pthread_atfork(NULL, NULL, count_fork);
}

/* Return this thread's team, with as many workers as possible, or NULL. */
static team *team_of(unsigned num_workers) {
    pthread_once(&has_key, make_key);
    if (!own || own->fork != atomic_load(&num_forks)) {
        void *memory;
        if (posix_memalign(&memory, LINE, sizeof(team))) return NULL;
        own = memory;
        *own = (team){.fork = atomic_load(&num_forks)};
        pthread_setspecific(at_end, own);
    }
    if (own->num_workers < num_workers) {
        pthread_t *workers = realloc(own->workers, num_workers * sizeof *workers);
        if (workers) own->workers = workers;
        while (workers && own->num_workers < num_workers) {
            worker *w = malloc(sizeof *w);
            if (!w) break;
            *w = (worker){own, own->num_workers + 1, own->begun.word};
            if (pthread_create(&workers[own->num_workers], NULL, work, w)) {
                free(w);
                break;
            }
            own->num_workers++;
        }
    }
    return own;
}

static void mark_lenders(const team *t, int8_t is_used) {
    for (unsigned i = 0; i < t->num_lenders; i++) atomic_store(&t->lenders[i][1], is_used);
}

/* Return a region's number of threads, and mark borrowed cores as used; only own cores while a lender computes.
 * Beside the lender's thread, one would wait for its turn at each barrier, and so would all others. */
static unsigned num_usable(const team *t, unsigned num_threads) {
    if (!t->num_lenders || num_threads <= t->num_own) return num_threads;
    mark_lenders(t, 1); /* first: a lender sets its byte before it looks at this one */
    for (unsigned i = 0; i < t->num_lenders; i++)
        if (atomic_load(&t->lenders[i][0])) {
            mark_lenders(t, 0);
            return t->num_own;
        }
    return num_threads;
}

/* Note the lenders of this thread's team. Return 1 if they are too many, or without memory. */
int baton_watch_lenders(const lenders_call *c) {
    if (!c->num_lenders && !own) return 0;
    team *t = c->num_lenders <= MOST_LENDERS ? team_of(0) : NULL;
    if (!t) return 1;
    t->num_own = c->num_own_threads;
    t->num_lenders = c->num_lenders;
    for (int64_t i = 0; i < c->num_lenders; i++) t->lenders[i] = ((_Atomic int8_t *const *)c->bytes)[i];
    return 0;
}

/* ---------------------------------------------------------------- what GCC calls */

HIDDEN void GOMP_parallel(region *run, void *data, unsigned num_threads, unsigned flags) {
    if (num_threads >= 1u << SIZE_BITS) num_threads = (1u << SIZE_BITS) - 1; /* also catches negative numbers */
    team *t = num_threads > 1 && !here.size ? team_of(num_threads - 1) : NULL;
    if (t) num_threads = num_usable(t, num_threads);
    unsigned size = t && t->num_workers < num_threads - 1 ? t->num_workers + 1 : num_threads;
    if (!t || size < 2) {
        if (t && num_threads > t->num_own) mark_lenders(t, 0);
        atomic_long next[MOST_LOOPS] = {0};
        run_as(NULL, 0, 1, next, run, data);
        return;
    }
    t->run = run;
    t->data = data;
    for (int i = 0; i < MOST_LOOPS; i++) atomic_store_explicit(&t->next[i], 0, memory_order_relaxed);
    atomic_store_explicit(&t->done.word, 0, memory_order_relaxed);
    begin_region(t, size);
    run_as(t, 0, size, t->next, run, data);
    for (unsigned num; (num = atomic_load(&t->done.word)) < size - 1;) wait_while(&t->done, num);
    if (num_threads > t->num_own) mark_lenders(t, 0);
}

HIDDEN int omp_get_thread_num(void) { return here.id; }

HIDDEN int omp_get_num_threads(void) { return here.size ? here.size : 1; }

HIDDEN void GOMP_barrier(void) {
    team *t = here.of;
    if (!t) return;
    unsigned passed = atomic_load(&t->passed.word);
    if (atomic_fetch_add(&t->num_waiting, 1) + 1 == here.size) {
        atomic_store(&t->num_waiting, 0);
        atomic_store(&t->passed.word, passed + 1);
        wake(&t->passed);
    } else {
        wait_while(&t->passed, passed);
    }
}

/* Take the loop's next chunk: store its bounds and return true, or return false if there is none. */
HIDDEN bool GOMP_loop_nonmonotonic_dynamic_next(long *first, long *end) {
    if (here.num_loops >= MOST_LOOPS) __builtin_trap(); /* one of our own regions has too many loops */
    long taken = atomic_fetch_add_explicit(&here.next[here.num_loops], here.chunk, memory_order_relaxed);
    long from = here.first + taken * here.step, to = from + here.chunk * here.step;
    if (here.step > 0 ? from >= here.end : from <= here.end) return false;
    *first = from;
    *end = (here.step > 0 ? to > here.end : to < here.end) ? here.end : to;
    return true;
}

HIDDEN bool GOMP_loop_nonmonotonic_dynamic_start(long from, long to, long step, long chunk, long *first, long *end) {
    here.first = from;
    here.end = to;
    here.step = step;
    here.chunk = chunk;
    return GOMP_loop_nonmonotonic_dynamic_next(first, end);
}

HIDDEN void GOMP_loop_end_nowait(void) { here.num_loops++; }

HIDDEN void GOMP_loop_end(void) {
    here.num_loops++;
    GOMP_barrier();
}

/* Other versions of GCC call these functions. */
HIDDEN bool GOMP_loop_dynamic_start(long, long, long, long, long *, long *)
    __attribute__((alias("GOMP_loop_nonmonotonic_dynamic_start")));
HIDDEN bool GOMP_loop_dynamic_next(long *, long *) __attribute__((alias("GOMP_loop_nonmonotonic_dynamic_next")));
#else
int baton_watch_lenders(const lenders_call *c) { return 0; }
#endif
