/* Finds decodes that begin with the same blocks.
 *
 * A group's decodes have the same first block. The group's first decode leads: the others count how many of their
 * leading blocks are the leader's. This takes a microsecond or two for 32 decodes, and less if nothing is shared.
 * Refuses to know: how a span is computed.
 */
#include <stdlib.h>

#include "attention_prefix.h"

#define NOBODY (-1)

int64_t baton_sharers_table(const attention_call *c) {
    int64_t size = 4;
    while (size < 2 * c->num_requests) size *= 2;
    return size;
}

/* Return the whole spans of a decode before its newest key, which no other decode has. */
INLINE int64_t whole_spans(const attention_call *c, int64_t request) {
    int is_decode = c->query_start_loc[request + 1] - c->query_start_loc[request] == 1;
    return is_decode ? (c->seq_lens[request] - 1) / SPAN : 0;
}

/* Return how many leading spans two requests share, of at most `most`. */
static int64_t common_spans(const attention_call *c, int64_t one, int64_t other, int64_t most) {
    const int32_t *first = c->block_table + one * c->max_blocks, *second = c->block_table + other * c->max_blocks;
    int64_t num = ceil_div(most * SPAN, c->block_size), i = 0;
    while (i < num && first[i] == second[i]) i++;
    return min64(most, i * c->block_size / SPAN);
}

static int by_group(const void *one, const void *other) {
    const sharer *a = one, *b = other;
    if (a->leader != b->leader) return a->leader < b->leader ? -1 : 1;
    if (a->spans != b->spans) return a->spans > b->spans ? -1 : 1;
    return (a->request > b->request) - (a->request < b->request);
}

/* Return the first request with this first block, or NOBODY after entering the request. */
static int64_t find_leader(const attention_call *c, int32_t *table, int64_t request) {
    uint32_t mask = (uint32_t)baton_sharers_table(c) - 1, block = (uint32_t)c->block_table[request * c->max_blocks];
    for (uint32_t i = block * 2654435761u >> 8 & mask;; i = (i + 1) & mask) {
        if (table[i] == NOBODY) {
            table[i] = (int32_t)request;
            return NOBODY;
        }
        if ((uint32_t)c->block_table[table[i] * c->max_blocks] == block) return table[i];
    }
}

int64_t baton_find_sharers(const attention_call *c, sharer *sharers, decode_spans *decodes, int32_t *table) {
    int64_t group = c->num_heads / c->num_kv_heads, least = max64(2, ceil_div(SHARING_ROWS, group)), num = 0;
    for (int64_t r = 0; r < c->num_requests; r++) decodes[r].shared = 0;
    if (c->sliding_window > 0 || c->row_ends || c->num_requests < least) return 0;
    memset(table, 0xff, baton_sharers_table(c) * sizeof(int32_t)); /* NOBODY */
    for (int64_t r = 0; r < c->num_requests; r++) {
        int64_t own = whole_spans(c, r), leader = own ? find_leader(c, table, r) : NOBODY;
        if (leader == NOBODY) continue;
        int64_t spans = common_spans(c, leader, r, min64(own, whole_spans(c, leader)));
        if (!spans) continue;
        /* `shared` of a leader is used as a mark that the leader is in the list. */
        if (!decodes[leader].shared)
            sharers[num++] = (sharer){(int32_t)leader, (int32_t)leader, (int32_t)whole_spans(c, leader)};
        decodes[leader].shared = 1;
        sharers[num++] = (sharer){(int32_t)r, (int32_t)leader, (int32_t)spans};
    }
    qsort(sharers, num, sizeof(sharer), by_group);
    for (int64_t first = 0, end; first < num; first = end) {
        for (end = first; end < num && sharers[end].leader == sharers[first].leader;) end++;
        int64_t most = end - first >= least ? sharers[first + least - 1].spans : 0; /* shared by at least so many */
        for (int64_t i = first; i < end; i++) decodes[sharers[i].request].shared = min64(most, sharers[i].spans);
    }
    return num;
}
