/* Memory that a thread keeps from call to call, as fresh pages would cost more than the work in them. It is freed
 * when the thread ends, because callers come and go, each with a team of threads.
 *
 * Refuses to know: the contents.
 */
#include <pthread.h>
#include <stdlib.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "old_glibc.h"
#include "vectors.h"

#define NUM_SLOTS 5
#define HUGE_PAGE (2 << 20)
#define LARGE (HUGE_PAGE / 8) /* from this size on, memory is in huge pages */

/* Ask for huge pages for [p, p + bytes); Linux may decline. */
static void ask_for_huge_pages(void *p, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    uintptr_t begin = ((uintptr_t)p + HUGE_PAGE - 1) & -(uintptr_t)HUGE_PAGE;
    uintptr_t end = ((uintptr_t)p + bytes) & -(uintptr_t)HUGE_PAGE;
    if (end > begin) madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#endif
}

typedef struct {
    void *memory[NUM_SLOTS];
    int64_t sizes[NUM_SLOTS];
    int is_known; /* whether the memory is freed when the thread ends */
} thread_scratch;

static pthread_key_t at_end;
static pthread_once_t has_key = PTHREAD_ONCE_INIT;

static void free_all(void *of_thread) {
    thread_scratch *own = of_thread;
    for (int slot = 0; slot < NUM_SLOTS; slot++) {
        free(own->memory[slot]);
        own->memory[slot] = NULL;
        own->sizes[slot] = 0;
    }
    own->is_known = 0;
}

static void make_key(void) { pthread_key_create(&at_end, free_all); }

void *baton_scratch(int slot, int64_t bytes) {
    static __thread thread_scratch own;
    void **memory = own.memory;
    int64_t *sizes = own.sizes;
    if (sizes[slot] < bytes) {
        if (!own.is_known) {
            pthread_once(&has_key, make_key);
            own.is_known = pthread_setspecific(at_end, &own) == 0;
        }
        free(memory[slot]);
        sizes[slot] = 0;
        int is_large = bytes >= LARGE;
        if (is_large) bytes = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        if (posix_memalign(&memory[slot], is_large ? HUGE_PAGE : 64, bytes)) memory[slot] = NULL;
        if (memory[slot]) sizes[slot] = bytes;
        if (memory[slot] && is_large) ask_for_huge_pages(memory[slot], bytes);
    }
    return memory[slot];
}
