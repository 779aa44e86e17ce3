/* Pins a team's threads: the first ones to the process's own cores, the others to borrowed cores. Linux only;
 * elsewhere, threads are not pinned.
 * Refuses to know: the lender, the work.
 */
#if defined(__linux__)
#define _GNU_SOURCE
#include <sched.h>
#endif
#include "vectors.h"

/* Sets of cores: bit masks of `num_bytes` bytes. */
typedef struct {
    int64_t num_threads, num_own_threads, num_bytes;
    const void *own, *lent;
} places_call;

/* Return the number of threads that could not be placed. */
int baton_place_threads(const places_call *c) {
    int failed = 0;
#if defined(__linux__)
#pragma omp parallel num_threads(c->num_threads) reduction(+ : failed)
    {
        const void *cores = omp_get_thread_num() < c->num_own_threads ? c->own : c->lent;
        failed += sched_setaffinity(0, c->num_bytes, cores) != 0;
    }
#endif
    return failed;
}
