/* Calls the other files' functions one after another, without Python between them.
 *
 * Refuses to know: what they compute.
 */
#include <stdint.h>

typedef struct {
    int (*function)(const void *call);
    const void *call;
} tape_entry;

/* Return 0, or the result of the first function that fails. */
int baton_run_tape(int64_t num_entries, const tape_entry *entries) {
    for (int64_t i = 0; i < num_entries; i++) {
        int failed = entries[i].function(entries[i].call);
        if (failed) return failed;
    }
    return 0;
}
