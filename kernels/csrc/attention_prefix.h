/* Decodes that begin with the same blocks: spans of keys that are read once for all of them.
 *
 * A span's sums do not depend on the rows computed beside a row, so results keep their bits.
 * Refuses to know: how a span is computed.
 */
#ifndef BATON_ATTENTION_PREFIX_H
#define BATON_ATTENTION_PREFIX_H

#include "attention.h"

#define SHARING_ROWS 16 /* fewest query rows (decodes x heads) of a span for which packing its keys pays */

/* A decode whose first `spans` spans are also those of the group's first decode. */
typedef struct {
    int32_t request, leader, spans;
} sharer;

/* A decode's partial results: of `spans` spans for each KV head, from `partial` on; the first `shared` spans are
 * computed together with other decodes. */
typedef struct {
    int64_t partial, spans, shared;
} decode_spans;

/* Return the size of the table that baton_find_sharers uses. */
int64_t baton_sharers_table(const attention_call *c);
/* Write to `sharers` [num_requests] the decodes that share spans: group by group, the most spans first. Set `shared`
 * of all requests. Return the number of sharers. */
int64_t baton_find_sharers(const attention_call *c, sharer *sharers, decode_spans *decodes, int32_t *table);

#endif
