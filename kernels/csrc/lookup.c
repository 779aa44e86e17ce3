/* Finds an earlier occurrence of a text's last tokens.
 *
 * find_run of baton_kernels/lookup.py defines the result.
 * Refuses to know: requests, the use of the place.
 */
#include "vectors.h"

#define STRIDE 64 /* tokens that are compared together */

INLINE int has_token(const int32_t *tokens, int64_t num, int32_t token) {
    int found = 0;
#pragma omp simd reduction(| : found)
    for (int64_t i = 0; i < num; i++) found |= tokens[i] == token;
    return found;
}

/* Return the end of the latest earlier occurrence of the longest run (least to most tokens) that ends the text;
 * -1: no occurrence. */
int64_t baton_find_run(const int32_t *tokens, int64_t num, int64_t least, int64_t most) {
    int64_t best = -1, best_length = least - 1;
    if (num < 2) return -1;
    int32_t last = tokens[num - 1];
    for (int64_t high = num - 1; high > 0; high -= STRIDE) {
        int64_t low = high > STRIDE ? high - STRIDE : 0;
        if (!has_token(tokens + low, high - low, last)) continue;
        for (int64_t end = high; end > low; end--) {
            if (tokens[end - 1] != last) continue;
            int64_t length = 1;
            while (length < most && length < end &&
                   tokens[end - 1 - length] == tokens[num - 1 - length])
                length++;
            if (length > best_length) best = end, best_length = length;
            if (best_length >= most) return best;
        }
    }
    return best;
}
