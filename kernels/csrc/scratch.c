/* Memory that a thread keeps from call to call: fresh pages would cost more than the work in them.
 *
 * Refuses to know: what is put there.
 */
#include <stdlib.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "vectors.h"

#define NUM_SLOTS 4
#define HUGE_PAGE (2 << 20)
#define LARGE (HUGE_PAGE / 8) /* what is read in strides through so many pages gets a huge one */

/* Ask for huge pages under [p, p + bytes): weights are read in one stream. A wish, no more. */
void baton_huge_pages(void *p, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    uintptr_t begin = ((uintptr_t)p + HUGE_PAGE - 1) & -(uintptr_t)HUGE_PAGE;
    uintptr_t end = ((uintptr_t)p + bytes) & -(uintptr_t)HUGE_PAGE;
    if (end > begin) madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#endif
}

void *baton_scratch(int slot, int64_t bytes) {
    static __thread void *memory[NUM_SLOTS];
    static __thread int64_t sizes[NUM_SLOTS];
    if (sizes[slot] < bytes) {
        free(memory[slot]);
        sizes[slot] = 0;
        int is_large = bytes >= LARGE;
        if (is_large) bytes = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        if (posix_memalign(&memory[slot], is_large ? HUGE_PAGE : 64, bytes)) memory[slot] = NULL;
        if (memory[slot]) sizes[slot] = bytes;
        if (memory[slot] && is_large) baton_huge_pages(memory[slot], bytes);
    }
    return memory[slot];
}
