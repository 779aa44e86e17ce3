/* Computes paged attention, as paged_attention in baton_kernels/reference.py defines it.
 *
 * A step is cut into pieces that threads take one by one. A decode reads each key and value once from the cache,
 * for all query heads that share it; long contexts are cut into spans of fixed length, which are then joined
 * ("flash decoding"). A prompt's pieces are blocks of queries that go through tiles of keys, packed for the same
 * micro kernel as linear layers. Both sum in the order of attention.h. Dao et al., arXiv:2205.14135.
 * Refuses to know: layers, schedulers.
 */
#include <float.h>
#include "attention.h"
#include "attention_shared.h"

/* Fewest heads per key for which a decode packs its keys for the micro kernel, because products then take longer than
 * reading keys. Both ways give the same bits. */
#define PACKED_GROUP 16

enum { SCRATCH_PIECES = 1, SCRATCH_PARTIALS = 2, SCRATCH_TILES = 3 };

/* Return the tokens per piece of a prompt; its query rows are these tokens times the heads that share a key. */
static int64_t tokens_per_piece(const attention_call *c) {
    int64_t group = c->num_heads / c->num_kv_heads;
    return max64(1, PROMPT_ROWS / group);
}

INLINE int64_t first_key(const attention_call *c, int64_t position) {
    return c->sliding_window > 0 ? max64(0, position + 1 - c->sliding_window) : 0;
}

/* Return the number of a step's pieces; if `pieces` is not NULL, write them there. */
static int64_t make_pieces(const attention_call *c, piece *pieces) {
    int64_t n = 0, partials = 0, block = tokens_per_piece(c), span = SPAN;
    for (int64_t r = 0; r < c->num_requests; r++) {
        int64_t row = c->query_start_loc[r], count = c->query_start_loc[r + 1] - row;
        int64_t length = c->seq_lens[r];
        if (count == 1) {
            int64_t begin = first_key(c, length - 1);
            int64_t first = begin / span, spans = ceil_div(length, span) - first;
            for (int64_t head = 0; head < c->num_kv_heads; head++)
                for (int64_t s = 0; s < spans; s++, n++)
                    if (pieces)
                        pieces[n] = (piece){r, head, row, 1, max64(begin, (first + s) * span),
                                            min64(length, (first + s + 1) * span), spans,
                                            spans > 1 ? partials++ : -1, length - 1};
        } else {
            /* Late queries see the most keys: from the last one back, long pieces come first, and short ones fill
             * gaps. */
            for (int64_t t = count; t > 0; t -= min64(t, block))
                for (int64_t head = 0; head < c->num_kv_heads; head++, n++)
                    if (pieces) {
                        int64_t tokens = min64(t, block), position = length - count + t - tokens;
                        int64_t end = c->row_ends ? c->row_ends[row + t - 1] : position + tokens;
                        pieces[n] = (piece){r, head, row + t - tokens, tokens, first_key(c, position), end,
                                            1, -1, position};
                    }
        }
    }
    return n;
}

/* Join the spans of one head of one request, which are adjacent in `pieces`, and write the output. */
static void join(const attention_call *c, const piece *p, int64_t h, const float *partials) {
    int64_t group = c->num_heads / c->num_kv_heads, size = partial_size(c);
    float sums[padded_sum(c)];
    softmax_state state = EMPTY_STATE;
    memset(sums, 0, sizeof sums);
    for (int64_t s = 0; s < p->num_spans; s++) {
        const float *part = partials + ((p->partial + s) * group + h) * size;
        baton_join(&state, sums, (softmax_state){part[0], part[1]}, part + 2, padded_sum(c) / LANES, LANES);
    }
    float divisor = baton_divisor(state, c->sinks, p->kv_head * group + h);
    for (int64_t d = 0; d < c->value_dim; d++) sums[d] /= divisor;
    int64_t to = (p->row * c->num_heads + p->kv_head * group + h) * c->value_dim;
    write_row(c->type, sums, (char *)c->out + to * size_of(c->type), c->value_dim);
}

/* Return 0, or 1 without memory for the pieces. */
int baton_attention(const attention_call *c) {
    int64_t num_pieces = make_pieces(c, NULL), num_partials = 0, group = c->num_heads / c->num_kv_heads;
    piece *pieces = baton_scratch(SCRATCH_PIECES, (num_pieces + 1) * sizeof(piece));
    if (!pieces) return 1;
    make_pieces(c, pieces);
    int64_t work = 0;
    for (int64_t i = 0; i < num_pieces; i++) {
        num_partials += pieces[i].partial >= 0;
        work += pieces[i].num_tokens * (pieces[i].end - pieces[i].begin);
    }
    float *partials =
        baton_scratch(SCRATCH_PARTIALS, (num_partials + 1) * group * partial_size(c) * sizeof(float));
    if (!partials) return 1;
    int team = work * c->head_dim * group < SERIAL_WORK ? 1 : c->num_threads, failed = 0;
    int shared = is_shared(c), decodes = decodes_shared(c);
    int64_t scratch = max64(shared || decodes ? shared_scratch_bytes(c) : 0, prompt_scratch_bytes(c));
#pragma omp parallel num_threads(team) if (team > 1)
    {
        float *tiles = baton_scratch(SCRATCH_TILES, scratch);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_pieces; i++) {
            const piece *p = pieces + i;
            if (p->num_tokens > 1 || c->query_start_loc[p->request + 1] - c->query_start_loc[p->request] > 1) {
                if (!tiles) failed = 1;
                else if (shared) baton_attend_shared(c, p, tiles, NULL);
                else baton_attend_prompt(c, p, tiles, NULL);
            } else {
                float *partial = p->partial < 0 ? NULL : partials + p->partial * group * partial_size(c);
                /* Threads take pieces in turns, so this is probably the thread's next piece. */
                const piece *next = i + team < num_pieces ? p + team : NULL;
                if (group < PACKED_GROUP && !decodes) baton_attend_decode(c, p, next, partial);
                else if (!tiles) failed = 1;
                else if (decodes) baton_attend_shared(c, p, tiles, partial);
                else baton_attend_prompt(c, p, tiles, partial);
            }
        }
        if (num_partials) {
#pragma omp for schedule(dynamic, 4)
            for (int64_t n = 0; n < num_pieces * group; n++) {
                const piece *p = pieces + n / group;
                int first = p->partial == 0 || (p->partial > 0 && (p->request != p[-1].request ||
                                                                   p->kv_head != p[-1].kv_head));
                if (first) join(c, p, n % group, partials);
            }
        }
    }
    int64_t num_rows = c->query_start_loc[c->num_requests], row = c->num_heads * c->value_dim * size_of(c->type);
    memset((char *)c->out + num_rows * row, 0, (c->num_tokens - num_rows) * row);
    return failed;
}
